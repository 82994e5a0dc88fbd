"""Protects what the command line means: a flag that was typed counts as typed in every spelling and with every value, its default included;
and each task, learning rate and refusal is the one that is written.
"""

import json
import re
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import pytest

import evaluate
import settings
from bookkeeping import guard, refusals
from bookkeeping.folder import resume_folder
from bookkeeping.guard import check_environment, preflight
from evaluate import take_typed
from fast import machine as plan
from helpers import example
from learn import failures
from rollout import EnvironmentFailed
from settings import Config

FORK = Path(__file__).resolve().parents[1] / "docs" / "fork.md"
FLAGS = vars(Config()) | {"set": "version=0.2"}


def spelled(name: str) -> list[list[str]]:
    """Every way to type a flag with its default value (1, if that is None)."""
    name, value = name.rstrip("_"), FLAGS[name]
    names = sorted({name, name.replace("_", "-")})
    if isinstance(value, bool):
        return [[f"--{n}"] for n in names] + [[f"--no-{n}"] for n in names] + [[f"--no_{n}"] for n in names]
    text = "1" if value is None else str(value)
    return [[f"--{n}", text] for n in names] + [[f"--{n}={text}"] for n in names]


@pytest.mark.parametrize("name", list(FLAGS))
def test_a_flag_is_typed_in_every_spelling_and_with_its_default_as_well(monkeypatch, name):
    monkeypatch.setattr(settings.tyro, "cli", lambda config, args, default=None: Config())  # the next test asks tyro
    for words in spelled(name):
        assert settings.command_line(words)[1] == {name}, words
        assert settings.command_line(["--env", "letters", *words, "--no-wandb"])[1] == {"env", "wandb", name}, words


def test_tyro_takes_every_spelling():
    for i in range(6):
        words = [word for name in FLAGS for word in spelled(name)[i % len(spelled(name))]]
        cfg, typed = settings.command_line(words)
        assert (
            typed == set(FLAGS)
            and cfg.eval_every == 20
            and cfg.until_converged == ("--no" not in " ".join(w for w in words if "converged" in w))
        ), words


@pytest.mark.parametrize("words, typed", [
    (["--name", "seed"], {"name"}),  # a value that is called like a flag
    (["--preset", "seed"], {"preset"}),
    (["--runs=k"], {"runs"}),
    (["--name", "no_think"], {"name"}),
    ([], set()),
])  # fmt: skip
def test_a_value_is_no_flag(words, typed):
    assert settings.command_line(words)[1] == typed


def saved(folder, **flags) -> Config:
    cfg = Config(**flags)
    refusals.check(cfg)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(asdict(cfg)))
    return cfg


def test_eval_only_judges_a_run_of_partial_credit_by_the_default_reward_if_that_is_typed(tmp_path):
    for words, reward in ((["--reward", "binary"], "binary"), (["--reward=binary"], "binary"), ([], "partial")):
        given, typed = settings.command_line(["--eval-only", str(tmp_path), *words])
        cfg = saved(tmp_path, reward="partial")
        take_typed(cfg, given, typed)
        assert cfg.reward == reward and settings.make_env(cfg, 6).reward == reward
    given, typed = settings.command_line(["--eval-only", str(tmp_path), "--lora-rank", "32"])
    with pytest.raises(SystemExit, match="--lora-rank: this run has 8"):
        take_typed(saved(tmp_path, lora_rank=8), given, typed)


@pytest.mark.parametrize("words, after", [
    (["--no-until-converged"], {"until_converged": False}),
    (["--no_until_converged"], {"until_converged": False}),
    (["--max-updates", "400"], {"max_updates": 400}),
    (["--threads=0", "--engine", "auto"], {"threads": 0, "engine": "auto"}),
    ([], {"until_converged": True, "max_updates": 500, "threads": 2, "engine": "torch"}),
])  # fmt: skip
def test_resume_takes_a_flag_that_is_typed_with_its_default(tmp_path, words, after):
    saved(tmp_path, until_converged=True, max_updates=500, threads=2, engine="torch")
    cfg, typed = settings.command_line(["--resume", str(tmp_path), *words])
    *_, lock = resume_folder(cfg, typed)
    lock.release()
    assert {name: getattr(cfg, name) for name in after} == after


@pytest.mark.parametrize("words", [["--loss", "grpo"], ["--k=8"], ["--think"], ["--set", "version=0.2"], ["--epochs", "1"]])
def test_resume_refuses_another_experiment_that_is_typed_as_the_default(tmp_path, words):
    saved(tmp_path, env="swarm", loss="gspo", k=4, think=False, set=["version=0.1"], epochs=2)
    cfg, typed = settings.command_line(["--resume", str(tmp_path), *words])
    with pytest.raises(SystemExit, match="cannot change on --resume"):
        resume_folder(cfg, typed)


def test_a_line_that_a_power_cut_left_in_two_is_dropped_before_a_run_goes_on(tmp_path):
    saved(tmp_path)
    (tmp_path / "evals.jsonl").write_text('{"update":0,"stage":"before"}\n{"update":20,"sta')
    cfg, typed = settings.command_line(["--resume", str(tmp_path)])
    *_, lock = resume_folder(cfg, typed)
    assert (tmp_path / "evals.jsonl").read_text() == '{"update":0,"stage":"before"}\n'
    del lock


def test_of_two_flags_that_resume_refuses_the_first_by_name_is_told(tmp_path):
    """A set has an order of its own in every process: the same command must say the same."""
    saved(tmp_path, loss="gspo", k=4)
    cfg, typed = settings.command_line(["--resume", str(tmp_path), "--loss", "grpo", "--k=8"])
    assert typed == {"resume", "loss", "k"}
    with pytest.raises(SystemExit, match="^--k cannot change on --resume"):
        resume_folder(cfg, ["resume", "loss", "k"])


# ------------------------------------------------------------------------------------------------ an environment of one's own

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
        return ([], True) if len(self.said) == 2 else ([{"role": "user", "content": "And again?"}], False)
    def score(self):
        right = sum(reply == str(self.a + self.b) for reply in self.said) / 2
        return {"reward": right, "exact": float(right == 1)}
    def expert_reply(self):
        return str(self.a + self.b)
"""
RESET = 'return [{"role": "user", "content": f"{self.a} + {self.b}?"}]'
STEP = "self.said.append(reply)"
SCORE = 'return {"reward": right, "exact": float(right == 1)}'
EXPERT = "return str(self.a + self.b)"
WRONG = {  # what is wrong: (old, new, what must be said)
    "the seed is not used": ("random.Random(seed)", "random.Random()", "reset (sums.py:5) gave two openings for one seed"),
    "every seed is the same": ("random.Random(seed)", "random.Random(7)", "reset (sums.py:5) gave the same opening for every seed"),
    "no seed beyond a list": ("rng = random.Random(seed)", "rng = [random.Random(i) for i in range(100)][seed]",
                              "IndexError: list index out of range (sums.py:6)"),
    "no list": (RESET, 'return "1 + 1?"', "reset (sums.py:5) returned '1 + 1?', and not a list of messages"),
    "no messages": (RESET, "return []", "reset (sums.py:5) returned [], and not"),
    "content is a number": (RESET, 'return [{"role": "user", "content": self.a}]',
                            "reset (sums.py:5) returned [{'role': 'user', 'content': "),
    "a message is a text": (RESET, 'return ["1 + 1?"]', "reset (sums.py:5) returned ['1 + 1?'], and not a list of messages"),
    "more than JSON can write": (RESET, RESET.replace("}]", ', "of": {1}}]'), "and not a list of messages that JSON can write"),
    "a role that templates leave out": (RESET, RESET.replace('"user"', '"human"'), "with a role of system, user, assistant, tool"),
    "half a character": (RESET, RESET.replace("?\"", "\\ud800\""), "reset (sums.py:5) returned"),
    "a name is a number": (SCORE, 'return {"reward": right, 3: 0.5}', "a dict of named numbers"),
    "a role is missing": (RESET, 'return [{"content": "?"}]', "reset (sums.py:5)"),
    "step tells nothing": ("return ([], True) if", "None if", "step (sums.py:9) returned None, and not (new messages, is it over?)"),
    "step forgets that it may be over": ("return ([], True) if", "return [] if", "step (sums.py:9) returned []"),
    "over is a string": ("([], True)", '([], "yes")', "step (sums.py:9) returned ([], 'yes')"),
    "nothing new to answer": ('([{"role": "user", "content": "And again?"}], False)', "([], False)",
                              "step (sums.py:9) returned ([], False)"),
    "it never ends": ("len(self.said) == 2", "False", "step (sums.py:9) did not end an episode of the expert"),
    "step raises": (STEP, 'self.said.append({}["x"])', "KeyError: 'x' (sums.py:10)"),
    "an empty reply raises": (STEP, STEP + "; reply[0]", "IndexError: string index out of range (sums.py:10)"),
    "the score is a number": (SCORE, "return right", "score (sums.py:12) returned 0.0, and not a dict"),
    "there is no reward": (SCORE, 'return {"exact": 1.0}', "score (sums.py:12) returned {'exact': 1.0}, and not"),
    "the reward is text": (SCORE, 'return {"reward": "high"}', "score (sums.py:12) returned {'reward': 'high'}"),
    "the reward is no number": (SCORE, 'return {"reward": float("nan")}', "score (sums.py:12) returned {'reward': nan}"),
    "the expert is speechless": (EXPERT, "pass", "expert_reply (sums.py:15) returned None, and not a text"),
    "the expert earns nothing": (EXPERT, 'return "?"', "the expert earns 0 and an empty reply 0"),
    "silence is paid": (SCORE, 'return {"reward": 1.0 if self.said == ["", ""] else right}', "the expert earns 1 and an empty reply 1"),
    "an episode that was cut cannot be scored": ("right = sum(reply == str(self.a + self.b) for reply in self.said) / 2",
                                                 "right = float(self.said[1] == str(self.a + self.b))",
                                                 "IndexError: list index out of range (sums.py:13)"),
    "think is a text": ("think, tools, max_turns = True, None, 2", 'think, tools, max_turns = "yes", None, 2',
                        "think is 'yes', and not True or False"),
    "tools are a text": ("think, tools, max_turns = True, None, 2", 'think, tools, max_turns = True, "add", 2',
                         "tools is 'add', and not None or a list"),
    "it hangs": ("rng = random.Random(seed)", "while True: pass", "Hung: no answer within 0.2 seconds (sums.py:6)"),
}  # fmt: skip


def sums(folder, old: str = "", new: str = "", **flags) -> Config:
    """The Config of a run on the environment above, with one change."""
    assert GOOD.count(old) == 1 or not old
    (folder / "sums.py").write_text(GOOD.replace(old, new) if old else GOOD)
    settings.yours.cache_clear()
    return Config(env=f"{folder}/sums.py:Sums", **flags)


def test_a_level_that_a_class_does_not_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--difficulty 6: Sums has no levels; see docs/fork.md"):
        refusals.check(sums(tmp_path, difficulty=6))
    (folder := tmp_path / "two").mkdir()
    levelled = sums(folder, "class Sums:\n", "class Sums:\n    levels = [3, 5]\n")
    refusals.check(levelled)
    assert levelled.difficulty == 5 and settings.make_env(levelled, 3).level == 3
    with pytest.raises(ValueError, match="--difficulty 6: Sums has 3, 5; see docs/fork.md"):
        refusals.check(sums(folder, "class Sums:\n", "class Sums:\n    levels = [3, 5]\n", difficulty=6))


def levelled(folder, levels: str, **flags) -> Config:
    return sums(folder, "class Sums:\n", f"class Sums:\n    levels = {levels}\n", **flags)


@pytest.mark.parametrize("levels, asked, played", [("['1', '2']", 1, "1"), ("(3, 5)", "3", 3), ("['a b']", None, "a b"), ("[]", None, 0)])
def test_a_level_is_a_number_or_a_word_as_the_class_has_it(levels, asked, played, tmp_path):
    refusals.check(cfg := levelled(tmp_path, levels, difficulty=asked))
    assert cfg.difficulty == played and type(cfg.difficulty) is type(played)


@pytest.mark.parametrize("levels", ["[(3, 5), (5, 20)]", "[0.25, 0.5]", "3", "[True]", "'abc'"])
def test_levels_that_no_flag_could_name_are_refused(levels, tmp_path):
    with pytest.raises(ValueError, match="levels of .* must be numbers or words in a list; see docs/fork.md"):
        refusals.check(levelled(tmp_path, levels))


@pytest.mark.parametrize("levels", ["[]", "[3]"])
def test_a_curriculum_needs_two_levels(levels, tmp_path):
    with pytest.raises(ValueError, match=r"has no levels to climb; leave it out, or give your class two \(docs/fork.md\)"):
        refusals.check(levelled(tmp_path, levels, curriculum=True))


@pytest.mark.parametrize("promote", ["0.8", "'exact'", "('exact',)", "('exact', '0.8')", "(0.8, 'exact')"])
def test_what_a_curriculum_goes_up_by_is_a_measure_and_a_number(promote, tmp_path):
    cfg = levelled(tmp_path, f"[3, 5]\n    promote = {promote}", curriculum=True)
    refusals.check(cfg)
    with pytest.raises(ValueError, match=r'promote is .*; it is a measure and how high its mean has to be, as in \("reward", 0.75\)'):
        preflight(cfg)


def test_an_environment_as_it_should_be_passes(tmp_path):
    preflight(sums(tmp_path))
    (tmp_path / "vowels.py").write_text(example(FORK, "vowels.py"))
    preflight(Config(env=f"{tmp_path}/vowels.py:Vowels"))
    for env in ("letters", "alphabet", "swarm"):  # the built-in ones are tested here, and not before every run
        cfg = Config(env=env)
        refusals.check(cfg)
        check_environment(partial(settings.make_env, cfg, cfg.difficulty))


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_an_environment_is_said_with_its_method_and_line_before_a_model_is_loaded(tmp_path, monkeypatch, what):
    monkeypatch.setattr(guard, "ENV_SECONDS", 0.2)
    *change, words = WRONG[what]
    with pytest.raises(ValueError) as told:
        preflight(sums(tmp_path, *change))
    said = str(told.value)
    assert words in said and said.startswith(f"--env {tmp_path}/sums.py:Sums: ") and "docs/fork.md" in said and "\n" not in said


def test_a_wrong_answer_in_the_middle_of_a_run_costs_its_episode(tmp_path):
    """What preflight did not meet: the types are checked at every call."""
    for change, words in (
        ((RESET, "return []"), "reset (sums.py:5) returned [], and not a list of messages"),
        (("return ([], True) if", "None if"), "step (sums.py:9) returned None, and not (new messages, is it over?)"),
    ):
        cfg = sums(tmp_path, *change)
        env = guard.guarded(settings.make_env, cfg, cfg.difficulty)
        with pytest.raises(EnvironmentFailed, match=re.escape(words)):
            env.reset(0)
            env.step("3")
            env.step("3")


@pytest.mark.parametrize("name", ["level", "update", "tasks", "stage", "entropy", "loss", "ratio", "seconds_train", "twice"])
def test_an_entry_of_a_score_cannot_take_the_place_of_a_column_of_the_logs(tmp_path, name):
    with pytest.raises(ValueError, match=f"a dict without '{name}', which is a column of the logs"):
        preflight(sums(tmp_path, SCORE, f'return {{"reward": right, "{name}": 1.0}}'))


def test_an_environment_is_never_asked_for_the_score_of_no_reply(tmp_path):
    """A run asks for none: a reward that is a mean over the replies is as it should be."""
    preflight(sums(tmp_path, "for reply in self.said) / 2", "for reply in self.said) / len(self.said)"))


def test_without_sft_nobody_needs_an_expert(tmp_path):
    preflight(sums(tmp_path, EXPERT, "raise NotImplementedError", sft_steps=0))
    with pytest.raises(ValueError, match=": NotImplementedError"):
        preflight(sums(tmp_path, EXPERT, "raise NotImplementedError"))


def test_eval_only_of_an_environment_that_was_broken_since_says_so_at_once(tmp_path):
    cfg = sums(tmp_path, STEP, "pass")
    saved(tmp_path, env=cfg.env)
    (tmp_path / "checkpoint").mkdir()
    given, typed = settings.command_line(["--eval-only", str(tmp_path), "--env", cfg.env])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "find_checkpoint", lambda folder: folder)
        patch.setattr(evaluate, "load_policy", lambda *_: pytest.fail("a model was loaded"))
        with pytest.raises(ValueError, match="step .sums.py:9. did not end an episode"):
            evaluate.evaluate_only(given, typed)


# ------------------------------------------------------------------------------------------------ refusals and notes


def refused(**flags) -> str:
    with pytest.raises(ValueError) as told:
        refusals.check(Config(**flags))
    assert "\n" not in str(told.value)
    return str(told.value)


def test_a_negative_number_of_threads_is_refused():
    with pytest.raises(ValueError, match="^--threads -1: must be at least 0"):
        refusals.check(Config(threads=-1))


def test_every_flag_says_what_it_is(capsys):
    """In `train.py --help`, which tyro makes of the comments in the dataclass."""
    with pytest.raises(SystemExit):
        settings.read_flags(["--help"])
    entries = re.split(r"\n\W{1,6}--(?=[a-z])", capsys.readouterr().out)[1:]  # each begins with a flag; boxes are drawn on a terminal only
    entries = [" ".join(re.sub("[│╰─╯]|--{9,}", " ", entry).split()) for entry in entries]
    words = re.compile(r"^(\S+?),? (?:--\S+ |\{None\}\S+ |[A-Z]+ )?(.*?) ?(?:\(default: .*)?$")
    told = {match[1].replace("-", "_"): match[2] for match in map(words.match, entries)}
    assert set(told) == {f.name.rstrip("_") for f in fields(Config)}
    assert {name: text for name, text in told.items() if len(text) < 8} == {}
    assert told["env"].startswith("letters, alphabet, swarm;") and told["model"].startswith("folder or hub id")


def test_until_converged_needs_an_update_to_begin_with():
    """A13: it divided by the number of rewards so far, none."""
    assert refused(until_converged=True, updates=0).startswith("--updates 0: --until-converged ")
    refusals.check(Config(until_converged=True, updates=1))
    refusals.check(Config(updates=0))


def test_a_group_is_of_two_or_more_and_k_0_is_not_advised_to_become_1():
    for k in (0, 1, -3):
        said = refused(k=k)
        assert said.startswith(f"--k {k}: ") and "at least 2" in said and "at least 1" not in said
    assert refused(k=0, baseline="batch") == "--k 0: must be at least 1"
    refusals.check(Config(k=1, baseline="batch"))


def test_a_file_without_its_class_is_told_which_classes_it_has(tmp_path):
    (tmp_path / "two.py").write_text("class One:\n    pass\n\nclass Two(One):\n    pass\n")
    assert refused(env=f"{tmp_path}/two.py") == f"--env {tmp_path}/two.py: give FILE.py:CLASS; its classes are One, Two"
    assert "its classes are Task, Letters" in refused(env="env_letters.py")
    (tmp_path / "none.py").write_text("x = 1\n")
    assert refused(env=f"{tmp_path}/none.py") == f"--env {tmp_path}/none.py: give FILE.py:CLASS; there is no class in it"
    assert "or FILE.py:CLASS" in refused(env="nowhere.py")


@pytest.mark.parametrize("words, told", [
    (["--env", "sums.py:Sums", "--reward", "binary", "--no-think", "--k", "4"], "--env sums.py:Sums does not read --reward, --think"),
    (["--env", "alphabet", "--difficulty", "6"], "--env alphabet does not read --difficulty"),
    (["--env", "swarm", "--reward", "binary", "--no-eval-other-tiers"], "--env swarm does not read --eval-other-tiers, --reward"),
    (["--reward", "binary", "--difficulty", "3", "--sft-style", "bare"], ""),
    (["--env", "swarm", "--difficulty", "easy", "--set", "quality=1", "--no-think"], ""),
    (["--resume", "runs/x", "--env", "alphabet", "--difficulty", "1"], ""),  # there the folder says which environment it is
])  # fmt: skip
def test_flags_that_the_environment_does_not_read_are_named(capsys, words, told):
    settings.command_line(words)
    assert capsys.readouterr().out.strip() == (f"{told}; {'they change' if ',' in told else 'it changes'} nothing" if told else "")


@pytest.mark.parametrize("words, told", [
    (["--max-updates", "30"], "--max-updates changes nothing without --until-converged"),
    (["--lora-rank", "0", "--lora-alpha", "8"], "--lora-alpha changes nothing without --lora-rank"),
    (["--api-concurrency", "8"], "--api-concurrency changes nothing without --api-base"),
    (["--max-updates", "30", "--until-converged", "--lora-alpha", "8", "--api-base", "http://h/v1", "--api-concurrency", "8"], ""),
])  # fmt: skip
def test_a_flag_that_needs_another_is_told(capsys, words, told):
    settings.command_line(words)
    assert capsys.readouterr().out.strip() == told


@pytest.mark.parametrize("flags", [{"epochs": 2}, {"async_rollouts": 1, "importance": "clip"}])
def test_reinforce_is_refused_where_nothing_would_correct_for_old_samples(flags):
    assert "no importance ratio" in refused(loss="reinforce", **flags)
    refusals.check(settings.Config(loss="reinforce", async_rollouts=1, importance="sequence"))


def test_set_gives_an_environment_its_fields(tmp_path):
    words = "--env alphabet --set min_turns=1 --set max_turns=2 --set min_turns=2 --set power_per_turn=true"
    cfg, typed = settings.command_line(words.split())
    refusals.check(cfg)
    assert typed == {"env", "set"} and cfg.set == ["max_turns=2", "min_turns=2", "power_per_turn=True"]
    env = settings.make_env(cfg, 0)
    assert (env.min_turns, env.max_turns, env.power_per_turn, env.similarity_power) == (2, 2, True, 8.0)
    assert list(settings.eval_sets(cfg)) == ["2 turns, 1-4 names, power 8 a turn"]
    text = GOOD.replace("class Sums:", "from dataclasses import dataclass\n@dataclass\nclass Sums:\n    most: int = 9")
    (tmp_path / "sums.py").write_text(text)
    settings.yours.cache_clear()
    cfg = Config(env=f"{tmp_path}/sums.py:Sums", set=["most=3"])
    assert settings.make_env(cfg, 0).most == 3
    with pytest.raises(ValueError, match="--set least=3: Sums has no such setting; choose most"):
        settings.make_env(Config(env=cfg.env, set=["least=3"]), 0)


def test_a_setting_of_swarm_is_read_as_its_type_and_a_small_model_pays_for_errors(capsys):
    cfg = Config(env="swarm", set=["version=0.1", "payoff=none", "floor=20"])
    refusals.check(cfg)
    settings.complete(cfg, 1e6, "because")
    env = settings.make_env(cfg, "hard")
    assert (env.version, env.payoff, env.floor, env.error_penalty, env.difficulty) == ("0.1", 1.0, 20.0, 0.5, "hard")
    large = Config(env="swarm", set=["error_penalty=0.25"])
    for size in (1e6, 4e9):
        settings.complete(large, size, "because")
        refusals.check(large)
        assert settings.make_env(large, "hard").error_penalty == 0.25
    settings.complete(bare := Config(env="swarm"), 4e9, "because")
    refusals.check(bare)
    assert settings.make_env(bare, "hard").error_penalty == 0.0


@pytest.mark.parametrize("asked, path, kept", [
    ("auto", str(settings.MODELS / "pico_base"), "pico_base"),  # a name: another machine has it elsewhere
    ("auto", "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B-Instruct-2507"),
    ("my/model", "my/model", "my/model"),
    ("models/pico_base", "models/pico_base", "models/pico_base"),  # as it was typed
    ("auto", "", "auto"),
])  # fmt: skip
def test_a_run_keeps_the_model_that_auto_chose(capsys, asked, path, kept):
    """A17: with `auto` in its config.json, a run resumed on another machine would meet another model."""
    cfg = Config(model=asked)
    settings.complete(cfg, 1_000_000, "because", path)
    assert cfg.model == kept and capsys.readouterr().out.startswith("because\n")


def test_what_auto_sets_so_that_the_model_fits_is_kept_and_checked(capsys):
    cfg = Config(model="auto")
    settings.complete(cfg, 4e9, "because", "owner/name", {"micro_tokens": 4096, "gradient_checkpointing": True})
    assert (cfg.micro_tokens, cfg.gradient_checkpointing, cfg.model) == (4096, True, "owner/name")
    settings.complete(cfg := Config(), 4e9, "because", "", {"micro_tokens": 0})
    with pytest.raises(ValueError, match="--micro-tokens 0: must be positive"):
        refusals.check(cfg)


@pytest.mark.parametrize("words, fixed", [
    ([], {}),
    (["--engine", "auto", "--micro-tokens", "None", "--vllm-memory", "0.3"], {"vllm_memory": 0.3}),  # auto and None leave the choice
    (["--no-gradient-checkpointing", "--lora-rank=0"], {"gradient_checkpointing": False, "lora_rank": 0}),
    (["--preset", "seed"], {"max_tokens": 2048, "k": 8}),  # set by a preset and not typed
    (["--engine", "torch", "--max-tokens", "99"], {"engine": "torch", "max_tokens": 99}),
])  # fmt: skip
def test_auto_is_told_what_was_typed_or_set_and_leaves_it(words, fixed):
    model, env, device, asked = settings.asked(*settings.command_line(["--env", "swarm", "--device", "cpu", *words]))
    assert (model, env, device) == ("auto", "swarm", "cpu")
    assert {name: asked[name] for name in plan.READ & asked.keys()} == fixed
    assert settings.asked(Config(lora_rank=0))[3] == {"lora_rank": 0}  # called without a command line


def test_eval_only_chooses_for_the_device_that_was_asked_for(tmp_path, monkeypatch):
    saved(tmp_path, device="cpu")
    taken = []

    def choose(*asked):
        taken.append(asked)
        raise LookupError

    monkeypatch.setattr(evaluate, "find_checkpoint", lambda folder: folder)
    monkeypatch.setattr(evaluate, "choose_model", choose)
    with pytest.raises(LookupError):
        evaluate.evaluate_only(*settings.command_line(["--eval-only", str(tmp_path), "--device", "cuda:1"]))
    assert taken == [("auto", "letters", "cuda:1")]


def test_vllm_seeds_its_requests_and_sleeps_unless_it_is_told_not_to():
    """A22: both may cost time on a card; the defaults repeat a run, and lend the trainer vLLM's memory."""
    assert Config().vllm_seeds is Config().vllm_sleep is True
    cfg, typed = settings.command_line(["--no-vllm-seeds", "--no-vllm-sleep"])
    assert cfg.vllm_seeds is cfg.vllm_sleep is False and typed == {"vllm_seeds", "vllm_sleep"}


def test_a_run_of_an_environment_of_ones_own_is_called_by_its_class():
    assert [settings.short(env) for env in ("letters", "my/vowels.py:Vowels")] == ["letters", "Vowels"]


@pytest.mark.parametrize("tier", [1, 6, 8, 10])
def test_the_tiers_of_letters_are_evaluated_from_the_easiest_on(tier):
    cfg = Config(env="letters", difficulty=tier)
    refusals.check(cfg)
    assert list(settings.eval_sets(cfg)) == [f"tier {t}" for t in sorted({3, 5, 6, tier})]


# ------------------------------------------------------------------------------------------------ defaults by size


def chosen(n_parameters: float, *words: str) -> Config:
    """What a run of a model of this size has for these flags."""
    cfg, _ = settings.command_line(list(words))
    refusals.check(cfg)
    settings.complete(cfg, n_parameters, "because")
    return cfg


@pytest.mark.parametrize("n_parameters, words, lr, sft_lr", [
    (0.6e9, [], 3e-5, 1e-4),
    (1.7e9, [], 1e-5, 1e-4),
    (4.0e9, [], 1e-5, 1e-4),
    (30.5e9, [], 1e-5, 1e-4),
    (0.6e9, ["--lora-rank", "0"], 3e-6, 1e-5),  # all weights learn: a tenth
    (4.0e9, ["--lora-rank", "0"], 1e-6, 1e-5),
    (4.0e9, ["--lora-rank", "8"], 1e-5, 1e-4),  # the rate does not depend on the rank
    (4.0e9, ["--lora-rank", "0", "--lr", "1e-4"], 1e-4, 1e-5),
    (0.9e6, ["--lora-rank", "0"], 3e-4, 1e-4),  # small models: one rate, as before
])  # fmt: skip
def test_the_rate_is_that_of_published_recipes_and_a_tenth_without_lora(n_parameters, words, lr, sft_lr):
    cfg = chosen(n_parameters, *words)
    assert (cfg.lr, cfg.sft_lr) == (pytest.approx(lr, rel=1e-12), pytest.approx(sft_lr, rel=1e-12))


@pytest.mark.parametrize("env, max_tokens, num_tasks, sft_batch, eval_n", [
    ("letters", 2048, 8, 8, 256), ("alphabet", 768, 8, 8, 256), ("swarm", 512, 4, 2, 128),
])  # fmt: skip
def test_a_large_model_samples_groups_of_16(env, max_tokens, num_tasks, sft_batch, eval_n):
    cfg = chosen(4e9, "--env", env)
    assert (cfg.k, cfg.num_tasks, cfg.max_tokens, cfg.updates, cfg.warmup) == (16, num_tasks, max_tokens, 200, 5)
    assert (cfg.importance, cfg.micro_tokens, cfg.sft_batch, cfg.eval_n) == ("token", 8192, sft_batch, eval_n)
    assert chosen(4e9, "--env", env, "--k", "8").k == 8


@pytest.mark.parametrize("env, lr, updates, max_tokens", [
    ("letters", 3e-4, 150, 320), ("alphabet", 3e-4, 80, 640), ("swarm", 5e-4, 150, 160),
])  # fmt: skip
def test_a_small_model_has_what_its_results_were_made_with(env, lr, updates, max_tokens):
    cfg = chosen(0.9e6, "--env", env)
    assert (cfg.lr, cfg.updates, cfg.max_tokens, cfg.k, cfg.sft_lr) == (lr, updates, max_tokens, 8, 1e-4)
    assert (cfg.importance, cfg.warmup, cfg.lr_end, cfg.micro_tokens) == ("clip", 5, 0.1, 8192)


@pytest.mark.parametrize("preset, was", [
    ("swarm-published", {"env": "swarm", "difficulty": "medium", "num_tasks": 16,
                         "k": 4, "updates": 200, "max_tokens": 2048, "think": True,
                         "set": ["error_penalty=0.0", "payoff_scale=published", "version=0.2"],
                         "gradient_checkpointing": True}),
    ("alphabet-published", {"env": "alphabet", "num_tasks": 32, "k": 8, "updates": 100, "max_tokens": 768, "set": [],
                            "gradient_checkpointing": False}),
])  # fmt: skip
def test_a_published_preset_has_the_settings_of_the_published_run(preset, was):
    """Batches of 64 and 256 episodes; what both have in common is the public recipe's. A typed flag wins, the environment too."""
    was |= {
        "model": plan.BIG,
        "lora_rank": 32,
        "lora_alpha": 64,
        "lr": 1e-5,
        "warmup": 0,
        "lr_end": 1.0,
        "sft_steps": 0,
        "temperature": 1.0,
    }
    cfg = chosen(4e9, "--preset", preset)
    assert {name: getattr(cfg, name) for name in was} == was
    assert settings.learning_rate(cfg, 0) == settings.learning_rate(cfg, cfg.updates - 1) == 1e-5
    typed = chosen(4e9, "--preset", preset, "--env", "letters", "--difficulty", "2", "--k", "2")
    assert (typed.env, typed.k, typed.num_tasks) == ("letters", 2, was["num_tasks"])


def test_a_mistake_on_purpose_keeps_the_rest_of_a_preset():
    cfg, _ = settings.read_flags(["--preset", "seed", "--break", "learning-rate"])
    assert (cfg.preset, cfg.break_, cfg.think, cfg.reward) == ("seed", "learning-rate", False, "partial")
    assert {name: getattr(cfg, name) for name in failures.settings("learning-rate")} == failures.settings("learning-rate")


@pytest.mark.parametrize("env, num_tasks, sft_batch", [("letters", 8, 8), ("swarm", 4, 2)])
def test_the_preset_of_the_seed_is_what_it_was(env, num_tasks, sft_batch):
    """picoRL's run: every setting of it that a default of ours could change, as it was when large models still got them by themselves."""
    cfg = chosen(4e9, "--env", env, "--preset", "seed")
    was = {
        "think": False, "reward": "partial", "lr": 5e-6, "warmup": 0, "lr_end": 1.0, "updates": 200, "max_tokens": 2048, "eval_n": 32,
        "eval_every": 10, "importance": "clip", "k": 8, "num_tasks": num_tasks, "sft_lr": 1e-5, "sft_steps": 50, "sft_examples": 100,
        "sft_batch": sft_batch, "lora_rank": 32, "lora_alpha": 64, "loss": "grpo", "baseline": "group", "normalize": True, "kl": 0.0,
        "epochs": 1, "temperature": 1.0, "micro_tokens": 8192,
    }  # fmt: skip
    assert {name: getattr(cfg, name) for name in was} == was


@pytest.mark.parametrize("flags, told", [
    ({"k": 1, "num_tasks": 1, "baseline": "batch"}, "a batch of one episode has no baseline"),
    ({"warmup": -3}, "--warmup -3: must be at least 0"),
    ({"vllm_memory": 5.0}, "--vllm-memory 5.0: must be a share of the card"),
    ({"env": "alphabet", "set": ["similarity_power=inf"]}, "--set similarity_power=inf: must be positive, not inf"),
    ({"env": "alphabet", "set": ["min_turns=4"]}, "--set min_turns=4 max_turns=3: need 1 <= min <= max"),
    ({"env": "alphabet", "set": ["min_turns=x"]}, "--set min_turns=x: the value has to be of type int"),
    ({"env": "alphabet", "set": ["min_turns"]}, "--set min_turns: give NAME=VALUE"),
    ({"env": "swarm", "set": ["flor=1"]}, "--set flor=1: swarm has no such setting; choose version, payoff"),
    ({"env": "swarm", "set": ["floor=-1"]}, "--set floor=-1.0: must be a number of at least 0"),
    ({"env": "swarm", "set": ["version=3"]}, "--set version=3: swarm knows 0.2, 0.1"),
    ({"env": "letters", "set": ["difficulty=1"]}, "letters has no such setting; it is the flag --difficulty"),
    ({"env": "letters", "set": ["tier=1"]}, "letters has no such setting; leave it out"),
    ({"num_tasks": 20_000}, "--num-tasks 20000: there are not so many tasks"),
    ({"lr": float("inf")}, "--lr inf: must be positive, not inf"), ({"threads": 10**11}, "--threads 100000000000: must be at most"),
    ({"break_": "dropout", "env": "swarm", "difficulty": 6}, "--env swarm: --break makes its mistakes in letters"),
])  # fmt: skip
def test_numbers_that_cannot_be_right_are_refused_by_their_own_name(flags, told):
    with pytest.raises(ValueError, match=told):
        refusals.check(Config(**flags))


def test_a_healthy_ratio_is_not_promised_where_it_moves():
    assert "leaves 1.000" in settings.healthy_loss(Config(epochs=2)) and "leaves 1.000" in settings.healthy_loss(Config(async_rollouts=1))
    assert "a ratio of 1.000" in settings.healthy_loss(Config())
