"""Protects what the command line means: a flag that was typed counts as typed, with its default
as well; what cannot work is refused in one sentence; presets keep
their meaning; and an environment of one's own is looked at before a model is loaded.
"""

import json
import re
from dataclasses import asdict

import pytest

import settings
from bookkeeping import failures, refusals
from bookkeeping.again import MAY_BE_TYPED
from bookkeeping.folder import resume_folder, take_typed
from grpo import LOSSES, LossRule, reinforce
from helpers import refusal
from rollout import EnvironmentFailed
from settings import Config

BIG = "Qwen/Qwen3-4B-Instruct-2507"


# ----------------------------------------------------------------------------------- typed flags


def saved(folder, **flags) -> Config:
    cfg = Config(**flags)
    refusals.check(cfg)
    (folder / "config.json").write_text(json.dumps(asdict(cfg)))
    return cfg


def test_eval_only_judges_a_run_by_the_default_reward_if_that_is_typed(tmp_path):
    for words, reward in ((["--reward=binary"], "binary"), ([], "partial")):
        given, typed = settings.command_line(["--eval-only", str(tmp_path), *words])
        cfg = saved(tmp_path, reward="partial")
        take_typed("--eval-only", cfg, given, typed - {"eval_only"}, MAY_BE_TYPED)
        assert settings.make_env(cfg, 6).reward_kind == reward
    given, typed = settings.command_line(["--eval-only", str(tmp_path), "--lora-rank", "32"])
    with pytest.raises(SystemExit, match="cannot change on --eval-only: this run has 8"):
        take_typed("--eval-only", saved(tmp_path, lora_rank=8), given, {"lora_rank"}, MAY_BE_TYPED)


@pytest.mark.parametrize(
    "words, after",
    [
        (["--no-until-converged"], {"until_converged": False}),
        (["--max-updates", "400"], {"max_updates": 400}),
        (["--threads=0", "--engine", "auto"], {"threads": 0, "engine": "auto"}),
        ([], {"until_converged": True, "max_updates": 500, "threads": 2, "engine": "torch"}),
        # another experiment is refused, also if it is the default
        (["--loss", "grpo"], "--loss cannot change on --resume"),
        (["--think", "--k=8"], "--k cannot change on --resume"),  # the first by name
        (["--set", "version=0.2"], "--set cannot change on --resume"),
    ],
)
def test_resume_takes_a_flag_that_is_typed_with_its_default(tmp_path, words, after):
    how = {"until_converged": True, "max_updates": 500, "threads": 2, "engine": "torch"}
    saved(tmp_path, env="swarm", loss="gspo", k=4, think=False, set=["version=0.1"], **how)
    cfg, typed = settings.command_line(["--resume", str(tmp_path), *words])
    if isinstance(after, str):
        with pytest.raises(SystemExit, match=f"^{after}"):
            resume_folder(cfg, typed)
        return
    *_, lock = resume_folder(cfg, typed)
    lock.release()
    assert {name: getattr(cfg, name) for name in after} == after


@pytest.mark.parametrize(
    "words, told",
    [
        ("--env sums.py:Sums --reward binary --no-think --k 4", "ignores --reward, --think"),
        ("--env alphabet --difficulty 6", "--env alphabet ignores --difficulty"),
        ("--env swarm --difficulty easy --set floor=1 --no-think", ""),
    ],
)
def test_flags_that_change_nothing_are_named(capsys, words, told):
    refusals.warn_unread_flags(*settings.command_line(words.split()))
    said = capsys.readouterr().out
    assert told in said and bool(said) == bool(told)


# -------------------------------------------------------------------------------------- refusals

REFUSED = [  # (flags, what is said)
    ({"num_tasks": 0}, "--num-tasks 0: must be at least 1"),
    ({"warmup": -3}, "--warmup -3: must be at least 0"),
    ({"lr": float("inf")}, "--lr inf: must be positive, not inf"),
    ({"threads": 10**11}, "--threads 100000000000: must be at most"),
    ({"today": "tomorrow"}, "--today tomorrow: give it as YYYY-MM-DD"),
    ({"vllm_memory": 5.0}, "--vllm-memory 5.0: must be a share of the card"),
    ({"engine": "vllm"}, "--engine vllm: with several processes vLLM needs a second"),
    ({"engine": "tpu"}, "--engine tpu: choose auto, torch, vllm"),
    ({"dtype": "float16"}, "--dtype float16: choose float32, bfloat16"),
    ({"dtype": "bfloat16", "plain": True}, "--dtype bfloat16: only fast/layers.py computes in it"),
    ({"loss": "ppo"}, "--loss ppo: choose reinforce, grpo, dr_grpo"),
    ({"loss": "compared"}, "--loss compared: it compares the episodes of a group"),
    ({"importance": "all"}, "--importance all: choose clip, none, token, sequence"),
    ({"baseline": "mean"}, "--baseline mean: choose group, batch, none, best"),
    ({"preset": "sede"}, "--preset sede: choose seed, swarm-published"),
    ({"loss": "reinforce", "epochs": 2}, "--loss reinforce: it has no importance ratio"),
    ({"loss": "maxrl", "normalize": False}, "--loss maxrl: it is grpo but for its division"),
    ({"loss": "reinforce", "async_rollouts": 1, "importance": "clip"}, "no importance ratio"),
    ({"break_": "dropout", "env": "swarm"}, "--env swarm: --break makes its mistakes in letters"),
    ({"break_": "nothing"}, "--break nothing: choose learning-rate, "),
    ({"break_": "dropout", "plain": True}, "--break dropout: the mistake is made in this process"),
    ({"difficulty": "hard"}, "--difficulty hard: letters has tiers 1 to 10"),
    ({"env": "alphabet", "curriculum": True}, "--curriculum: alphabet has no levels to climb"),
    ({"env": "swarm", "difficulty": "mixed", "curriculum": True}, "mixed: a curriculum climbs to"),
    ({"held_out": True}, "--held-out: a training run uses development tasks"),
    ({"plain": True, "engine": "vllm"}, "--plain: it has its own sampler"),
    ({"k": 1}, "--k 1: must be at least 2: a group of one has no baseline"),
    ({"k": 0, "baseline": "batch"}, "--k 0: must be at least 1"),
    ({"k": 1, "num_tasks": 1, "baseline": "batch"}, "a batch of one episode has no baseline"),
    ({"until_converged": True, "updates": 0}, "--updates 0: --until-converged watches"),
    ({"probe": True, "updates": 0}, "--updates 0: --probe draws the batch of the first"),
    ({"until_converged": True, "updates": 500}, "--max-updates 400: must be at least --updates"),
    ({"num_tasks": 20_000}, "--num-tasks 20000: there are not enough tasks"),
    ({"updates": 200_000}, "--updates 200000: must be at most 100000"),
    ({"seed": 1250}, "--seed 1250: must be 0 to 1249"),
    ({"env": "swarm", "eval_n": 10**6, "set": ["version=0.1"]}, "have that many different"),
    ({"env": "lettres"}, "--env lettres: there is no such environment; choose letters, alphabet"),
    ({"env": "two.py"}, "--env two.py: there is no such environment; choose letters, alphabet"),
    ({"env": "two.py:One"}, "--env two.py:One: cannot be used (AttributeError"),
    ({"env": "alphabet", "set": ["similarity_power=inf"]}, "=inf: must be positive, not inf"),
    ({"env": "alphabet", "set": ["credit_per_turn=true"]}, "add --set power_per_turn=true"),
    ({"env": "alphabet", "set": ["min_turns=4"]}, "--set min_turns=4 max_turns=3 "),
    ({"env": "alphabet", "set": ["min_turns=x"]}, "the value has to be of type int"),
    ({"env": "alphabet", "set": ["min_turns"]}, "--set min_turns: give NAME=VALUE"),
    ({"env": "swarm", "set": ["flor=1"]}, "--set flor=1: swarm has no such setting; choose"),
    ({"env": "swarm", "set": ["floor=-1"]}, "--set floor=-1.0: must be a number"),
    ({"env": "swarm", "set": ["version=3"]}, "--set version=3: swarm accepts 0.2, 0.1"),
    ({"env": "swarm", "set": ["payoff_scale=theirs"]}, "--set payoff_scale=theirs: "),
    ({"env": "swarm", "set": ["gate=mild"]}, "--set gate=mild: "),
    ({"env": "swarm", "set": ["proxy_noise=-1"]}, "--set proxy_noise=-1"),
    ({"env": "swarm", "difficulty": "brutal"}, "--difficulty brutal: "),
    ({"env": "alphabet", "set": ["max_names=74"]}, "at most "),
    ({"difficulty": 11}, "--difficulty 11: "),
    ({"reward": "Binary"}, "--reward Binary: "),
    ({"sft_style": "cot"}, "--sft-style cot: "),
    ({"env": "alphabet", "sft_style": "cot"}, "--sft-style cot: "),
    ({"env": "swarm", "sft_style": "wizard"}, "--sft-style wizard: "),
    (
        {"engine": "vllm", "async_rollouts": 1},
        "--engine vllm: vLLM is not installed; with an NVIDIA card, "
        "pip install -r requirements/gpu.txt",
    ),
    ({"lr": 10.0}, "--lr 10.0: must be at most 1"),
    ({"max_staleness": -1}, "--max-staleness -1: must be at least 0"),
    ({"max_staleness": 4}, "--max-staleness 4: it bounds the lag that speed makes, and --async"),
    ({"max_staleness": 4, "async_rollouts": 2}, "and --async-rollouts 2 fixes the lag; give"),
    ({"max_staleness": 4, "async_rollouts": 1}, "several processes would drop different batches"),
    ({"sync_every": 2, "async_rollouts": 1}, "--sync-every 2: the second process always samples"),
    ({"set": ["difficulty=1"]}, "letters has no such setting; it is the flag --difficulty"),
    ({"set": ["tier=1"]}, "letters has no such setting; leave it out"),
]


def test_what_cannot_work_is_refused_in_one_sentence(tmp_path, monkeypatch):
    """And each row of the table of refusals is tried."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(refusals.parallel, "world", lambda: 2)
    monkeypatch.setitem(LOSSES, "compared", LossRule(reinforce, whole_groups=True))
    monkeypatch.setattr(refusals.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "two.py").write_text("class One:\n    pass\n\nclass Two(One):\n    pass\n")
    heard = []
    for flags, told in REFUSED:
        heard.append(refusal(ValueError, refusals.check, Config(**flags)))
        assert told in heard[-1]
    for _, _, why in refusals.REFUSALS:
        begins = re.sub("^{env} |{.*$", "", why)
        assert any(begins in said for said in heard), why
    for fine in ({"k": 1, "baseline": "batch"}, {"updates": 0}, {"until_converged": True}):
        refusals.check(Config(**fine))
    # A teacher judges each token: no group is needed.
    refusals.check(Config(k=1, num_tasks=1, teacher="pico_long"))
    refusals.check(Config(loss="reinforce", async_rollouts=1, importance="sequence"))


# ------------------------------------------------------------------------- an environment's --set


def chosen(n_parameters: float, *words: str) -> Config:
    """What a run of a model of this size has for these flags."""
    cfg, _ = settings.command_line(list(words), failures.SETTINGS)
    refusals.check(cfg)
    return settings.complete(cfg, n_parameters, "", {})


def test_set_gives_an_environment_its_fields(tmp_path):
    words = "--env alphabet --set min_turns=1 --set max_turns=2 --set min_turns=2"
    cfg = chosen(1e6, *words.split(), "--set", "power_per_turn=true")
    assert cfg.set == ["max_turns=2", "min_turns=2", "power_per_turn=True"]
    env = settings.make_env(cfg, 0)
    assert (env.min_turns, env.max_turns, env.power_per_turn, env.similarity_power) == (2, 2, 1, 8)
    cfg = chosen(1e6, *"--env swarm --set version=0.1 --set payoff=none --set floor=20".split())
    env = settings.make_env(cfg, "hard")
    assert (env.version, env.payoff, env.floor, env.difficulty) == ("0.1", 1.0, 20.0, "hard")
    mine = "from dataclasses import dataclass\n@dataclass\nclass Sums:\n    most: int = 9"
    (tmp_path / "sums.py").write_text(GOOD.replace("class Sums:", mine))
    cfg = Config(env=f"{tmp_path}/sums.py:Sums", set=["most=3"])
    assert settings.make_env(cfg, 0).most == 3 and settings.env_name(cfg.env) == "Sums"


def test_a_small_model_pays_for_errors_in_swarm_unless_another_price_is_set():
    price = lambda size, *words: settings.make_env(chosen(size, "--env", "swarm", *words), "hard")
    assert price(1e6).error_penalty == 0.5 and price(4e9).error_penalty == 0.0
    for size in (1e6, 4e9):
        assert price(size, "--set", "error_penalty=0.25").error_penalty == 0.25


# ------------------------------------------------------------------- defaults by size, and presets

PICORL = {
    "think": False, "reward": "partial", "lr": 5e-6, "warmup": 0, "lr_end": 1.0, "updates": 200,
    "max_tokens": 2048, "eval_n": 32, "eval_every": 10, "importance": "token", "k": 8,
    "sft_lr": 1e-5, "sft_steps": 50, "sft_examples": 100, "lora_rank": 32, "lora_alpha": 64,
    "loss": "grpo", "baseline": "group", "normalize": True, "kl": 0.0, "epochs": 1,
    "temperature": 1.0,
}  # fmt: skip
PUBLISHED = {
    "model": BIG, "lora_rank": 32, "lora_alpha": 64, "lr": 1e-5, "warmup": 0, "lr_end": 1.0,
    "sft_steps": 0, "temperature": 1.0,
}  # fmt: skip
SWARM = {
    "env": "swarm", "difficulty": "medium", "num_tasks": 16, "k": 4, "updates": 200,
    "max_tokens": 2048, "think": True, "gradient_checkpointing": True,
    "set": ["error_penalty=0.0", "payoff_scale=published", "text_ends=True", "version=0.2"],
}  # fmt: skip
SMALL_ONES = {"k": 8, "sft_lr": 1e-4, "importance": "clip", "warmup": 5, "lr_end": 0.1}
LARGE = {"k": 16, "updates": 200, "importance": "token", "lr": 1e-5}
CHOSEN = [  # (parameters, flags, what a run then has)
    (4e9, "--preset seed", PICORL | {"num_tasks": 8, "sft_batch": 8}),
    (4e9, "--preset seed --env swarm", PICORL | {"num_tasks": 4, "sft_batch": 2}),
    (4e9, "--preset swarm-published", PUBLISHED | SWARM),
    (4e9, "--preset alphabet-published",
     PUBLISHED | {"env": "alphabet", "num_tasks": 32, "k": 8, "updates": 100, "max_tokens": 768}),
    (4e9, "--preset swarm-published --env letters --difficulty 6 --k 6", PUBLISHED | {"k": 6, "set": []}),
    (4e9, "--preset seed --break learning-rate --reward binary",
     failures.SETTINGS["learning-rate"] | {"reward": "binary", "think": False}),
    (0.9e6, "", SMALL_ONES | {"lr": 3e-4, "updates": 150, "max_tokens": 320}),
    (0.9e6, "--env alphabet", SMALL_ONES | {"lr": 3e-4, "updates": 80, "max_tokens": 640}),
    (0.9e6, "--env swarm", SMALL_ONES | {"lr": 5e-4, "updates": 150, "max_tokens": 160}),
    (0.9e6, "--lora-rank 0", {"lr": 3e-4, "sft_lr": 1e-4}),  # small models: one rate
    (135e6, "", {"lr": 1e-4, "sft_lr": 2e-4, "k": 8, "max_tokens": 160, "importance": "clip"}),
    (135e6, "--dtype bfloat16", {"importance": "token"}),
    (135e6, "--dtype bfloat16 --importance clip", {"importance": "clip"}),
    (135e6, "--dtype bfloat16 --async-rollouts 1", {"importance": "sequence"}),
    (0.6e9, "", {"lr": 3e-5, "sft_lr": 1e-4}),
    (4e9, "", LARGE | {"max_tokens": 2048, "num_tasks": 8, "sft_batch": 8, "eval_n": 256}),
    (4e9, "--env alphabet", LARGE | {"max_tokens": 768}),
    (30e9, "--env swarm", LARGE | {"max_tokens": 512, "num_tasks": 4, "sft_batch": 2}),
    (4e9, "--lora-rank 0", {"lr": 1e-6, "sft_lr": 1e-5}),  # all weights learn: a tenth
    (4e9, "--lora-rank 0 --lr 1e-4", {"lr": 1e-4, "sft_lr": 1e-5}),
]  # fmt: skip


@pytest.mark.parametrize("n_parameters, words, expected", CHOSEN)
def test_defaults_by_size_and_presets_keep_their_meaning(n_parameters, words, expected):
    cfg = chosen(n_parameters, *words.split())
    about = lambda x: pytest.approx(x) if isinstance(x, float) else x
    assert {name: about(getattr(cfg, name)) for name in expected} == expected


def test_a_run_keeps_the_model_and_the_settings_that_auto_chose():
    """With `auto` in its config.json, a run resumed on another machine would meet another model."""
    for asked, path, kept in (
        ("auto", str(settings.MODELS / "pico_base"), "pico_base"),  # elsewhere on another machine
        ("auto", BIG, BIG),
        ("my/model", "my/model", "my/model"),
    ):
        cfg = Config(model=asked)
        cfg = settings.complete(cfg, 4e9, path, {"micro_tokens": 4096})
        assert (cfg.model, cfg.micro_tokens) == (kept, 4096)
    words = "--env swarm --device cpu --micro-tokens None --vllm-memory 0.3 --no-plain"
    model, env, device, asked = settings.model_request(*settings.command_line(words.split()))
    assert (model, env, device) == ("auto", "swarm", "cpu")  # auto and None leave the choice
    assert asked == {"env": "swarm", "device": "cpu", "vllm_memory": 0.3, "plain": False}


# -------------------------------------------------------------------- an environment of one's own

GOOD = """
import random
class Sums:
    think, tools, max_turns = True, None, 2
    def reset(self, seed):
        rng = random.Random(seed)
        self.a, self.b, self.said = rng.randint(0, 99), rng.randint(0, 99), []
        return [{"role": "user", "content": f"{self.a} + {self.b}?"}]
    def step(self, reply):
        self.said.append(reply)
        return ([], True) if len(self.said) == 2 else ([{"role": "user", "content": "More?"}], False)
    def score(self):
        right = sum(reply == str(self.a + self.b) for reply in self.said) / 2
        return {"reward": right, "exact": float(right == 1)}
    def expert_reply(self):
        return str(self.a + self.b)
"""
CONTENT = 'f"{self.a} + {self.b}?"'
RESET = 'return [{"role": "user", "content": f"{self.a} + {self.b}?"}]'
STEP = "self.said.append(reply)"
OVER = "return ([], True) if"
SCORE = 'return {"reward": right, "exact": float(right == 1)}'
EXPERT = "return str(self.a + self.b)"
WRONG = [  # (old, new, what is said)
    ("random.Random(seed)", "random.Random()", "reset (sums.py:5) gave two openings for one seed"),
    ("random.Random(seed)", "random.Random(7)", "gave the same opening for every seed"),
    (
        "rng = random.Random(seed)",
        "rng = [random][seed]",
        "IndexError: list index out of range (sums.py:6)",
    ),
    (
        "rng = random.Random(seed)",
        "while True: pass",
        "Hung: no answer within 0.2 seconds (sums.py:6)",
    ),
    (RESET, 'return "1 + 1?"', "reset (sums.py:5) returned '1 + 1?'; it should return a list"),
    (RESET, 'return ["1 + 1?"]', "reset (sums.py:5) returned ['1 + 1?']; it should"),
    (CONTENT, "self.a", "reset (sums.py:5) returned [{'role': 'user', 'content': "),
    (
        RESET,
        RESET.replace("}]", ', "of": {1}}]'),
        "it should return a list of messages that JSON can write",
    ),
    (RESET, RESET.replace('"user"', '"human"'), "with a role of system, user, assistant, tool"),
    (RESET, RESET.replace('?"', '\\ud800"'), "reset (sums.py:5) returned"),
    (OVER, "None if", "step (sums.py:9) returned None; it should return (new messages"),
    ("([], True)", '([], "yes")', "step (sums.py:9) returned ([], 'yes')"),
    ("len(self.said) == 2", "False", "step (sums.py:9) did not end the expert's episode"),
    (STEP, STEP + "; reply[0]", "IndexError: string index out of range (sums.py:10)"),
    (SCORE, "return right", "score (sums.py:12) returned 0.0; it should return a dict"),
    (SCORE, 'return {"exact": 1.0}', "score (sums.py:12) returned {'exact': 1.0}; it should"),
    (SCORE, 'return {"reward": float("nan")}', "score (sums.py:12) returned {'reward': nan}"),
    (SCORE, SCORE.replace("exact", "loss"), "without 'loss', which is a column of the logs"),
    (SCORE, 'return {"reward": 1.0}', "the expert earns 1 and an empty reply 1"),
    (EXPERT, "pass", "expert_reply (sums.py:15) returned None; it should return a text"),
    (EXPERT, 'return "?"', "the expert earns 0 and an empty reply 0"),
    ("max_turns = True,", 'max_turns = "yes",', "think is 'yes'; give True or False"),
    ("True, None, 2", 'True, "add", 2', "tools is 'add'; give None or a list"),
]


def sums(folder, old: str = "", new: str = "", **flags) -> Config:
    """The Config of a run on the environment above, with one change."""
    assert GOOD.count(old) == 1 or not old
    (folder / "sums.py").write_text(GOOD.replace(old, new) if old else GOOD)
    settings.load_custom_env.cache_clear()
    return Config(env=f"{folder}/sums.py:Sums", **flags)


@pytest.mark.parametrize("old, new, told", WRONG)
def test_what_is_wrong_with_an_environment_is_said(tmp_path, monkeypatch, old, new, told):
    """With its method and line, before a model is loaded."""
    monkeypatch.setattr(refusals, "ENV_SECONDS", 0.2)
    said = refusal(ValueError, refusals.preflight, sums(tmp_path, old, new))
    assert told in said and said.startswith(f"--env {tmp_path}/sums.py:Sums: ")
    assert "docs/fork.md" in said


@pytest.mark.parametrize(
    "change, flags",
    [
        ([], {}),
        ([EXPERT, "raise NotImplementedError"], {"sft_steps": 0}),  # the expert is not asked
        (["said) / 2", "said) / len(self.said)"], {}),  # it is asked after a reply
    ],
)
def test_an_environment_as_it_should_be_passes(tmp_path, change, flags):
    refusals.preflight(sums(tmp_path, *change, **flags))


@pytest.mark.parametrize("change", [(RESET, "return []"), (OVER, "None if")])
def test_a_wrong_answer_in_the_middle_of_a_run_costs_its_episode(tmp_path, change):
    """What preflight did not meet: the types are checked at every call."""
    cfg = sums(tmp_path, *change)
    env = refusals.guarded(settings.make_env, cfg, cfg.difficulty)
    with pytest.raises(EnvironmentFailed, match=r"\(sums.py:\d+\) returned .*; it should return "):
        env.reset(0)
        env.step("3")
        env.step("3")


@pytest.mark.parametrize(
    "levels, flags, played",
    [
        ("['1', '2']", {"difficulty": 1}, "1"),
        ("(3, 5)", {"difficulty": "3"}, 3),
        ("[]", {}, 0),
        ("[3, 5]", {}, 5),
        ("[3, 5]", {"difficulty": 6}, "--difficulty 6: Sums has 3, 5; see docs/fork.md"),
        ("[]", {"difficulty": 6}, "--difficulty 6: Sums has no levels; see docs/fork.md"),
        ("[(3, 5)]", {}, "must be numbers or words in a list; see docs/fork.md"),
        ("'abc'", {}, "must be numbers or words in a list; see docs/fork.md"),
        ("[3]", {"curriculum": True}, "has no levels to climb; leave it out"),
        ("[3, 5]\n    promote = 0.8", {"curriculum": True}, "promote is 0.8; give a measure and"),
    ],
)
def test_a_level_is_a_number_or_a_word_as_the_class_has_it(tmp_path, levels, flags, played):
    cfg = sums(tmp_path, "class Sums:\n", f"class Sums:\n    levels = {levels}\n", **flags)
    if isinstance(played, str) and len(played) > 1:
        with pytest.raises(ValueError, match=re.escape(played)):
            refusals.check(cfg)
            refusals.preflight(cfg)
        return
    refusals.check(cfg)
    assert cfg.difficulty == played and type(cfg.difficulty) is type(played)
