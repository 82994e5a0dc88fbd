"""pico.py is the book: its tokens, numbers, samples and gradient are those of rollout.py, fast/ and
grpo.py, and it learns."""

import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import env_letters
import grpo
import metrics
import pico
import settings
import train
import warm
from bookkeeping import refusals
from chat import encode, render
from fast.sampler import TorchSampler
from helpers import put
from policy import MAX_GRAD_NORM, PICO, load_policy
from rollout import play
from steps import stir
from warm import ROOT

NEW_ENV = lambda: env_letters.Letters(
    difficulty=6, reward_kind="binary", think=True, style="states"
)


@pytest.fixture(scope="module")
def policy():
    """pico_base with LoRA's B no longer 0: what is zero hides mistakes."""
    policy = load_policy(str(PICO), lora_rank=pico.RANK, lora_alpha=pico.ALPHA, device="cpu")
    stir(policy, 0.003)
    return policy


def lora_of(policy) -> dict[str, torch.Tensor]:
    """The book's adapter under pico.py's names."""
    lora, form = {}, r"base_model\.model\.(.*)\.lora_([AB])\.default\.weight"
    for name, p in policy.trainable().items():
        layer, which = re.fullmatch(form, name).groups()
        lora[f"{layer}.weight.{which}"] = p.detach().clone().requires_grad_()
    return lora


def uniforms(noise: int, seeds, k: int, n: int) -> torch.Tensor:
    """The book's random numbers, as fast/sampler.py draws them: by (noise, task, sample, turn)."""
    keys = [(noise, seed, i, 0) for seed in seeds for i in range(k)]
    rows = [np.random.default_rng(key).random(n) for key in keys]
    return torch.tensor(np.stack(rows), dtype=torch.float32)


def as_pico(e) -> pico.Episode:
    n = e.sampled.index(True)
    return pico.Episode(e.token_ids[:n], e.token_ids[n:], e.messages[-1]["content"], e.reward)


# ------------------------------------------------------------------------------------- its form


def test_it_needs_torch_alone_and_names_files_that_are_there():
    nodes = list(ast.walk(ast.parse(CODE, feature_version=(3, 10))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= {"torch", *sys.stdlib_module_names}
    assert all((ROOT / name).exists() for name in re.findall(r"[\w/]+\.(?:py|md)", CODE))


def test_its_numbers_are_those_of_the_model_and_of_the_settings():
    config = json.loads((PICO / "config.json").read_text())
    assert {
        "num_hidden_layers": pico.LAYERS,
        "num_attention_heads": pico.HEADS,
        "num_key_value_heads": pico.KV_HEADS,
        "head_dim": pico.HEAD_DIM,
        "rms_norm_eps": pico.EPS,
    }.items() <= config.items()
    assert config["rope_parameters"]["rope_theta"] == pico.ROPE_BASE
    cfg = settings.Config()
    refusals.check(cfg)
    settings.fill(cfg, settings.by_size(0.9e6, "letters"))
    called = {"lora_rank": "RANK", "lora_alpha": "ALPHA", "num_tasks": "TASKS", "warmup": "WARMUP"}
    for name in (*called, *"sft_steps sft_batch sft_lr k max_tokens lr lr_end".split()):
        assert getattr(cfg, name) == getattr(pico, called.get(name, name.upper())), name
    assert (cfg.sft_examples, cfg.eval_n) == (len(pico.SFT_SEEDS), len(pico.DEV_SEEDS))
    assert (
        list(pico.SFT_SEEDS) == settings.sft_seeds(cfg) and pico.DEV_SEEDS[0] == settings.DEV_SEEDS
    )
    assert MAX_GRAD_NORM == pico.MAX_NORM


# ----------------------------------------------------------------------- the book, part by part


def test_tasks_questions_demonstrations_and_token_ids_are_the_books(policy):
    env = NEW_ENV()
    for seed in [*range(100), *pico.SFT_SEEDS[:50]]:
        messages = env.reset(seed)
        ask, counts = pico.make_task(seed)
        assert ask == messages[0]["content"]
        assert list(counts.items()) == list(zip(env.task.letters, env.task.counts))
        prompt, reply = pico.PROMPT.format(ask), pico.demonstration(counts)
        assert pico.encode(prompt) == encode(policy, render(policy, messages, None, True))
        assert reply == env.expert_reply() and pico.encode(reply) == encode(policy, reply)
    with pytest.raises(ValueError, match="no token for 'é'"):
        pico.encode("é")


def test_any_reply_gets_the_books_reward_and_is_seen_as_the_books_habit():
    rng, rewards = random.Random(0), set()
    for seed in range(12):
        _, counts = pico.make_task(seed)
        task = env_letters.make_task(random.Random(seed), 6)
        right = [env_letters.write_reply(task, style) for style in env_letters.STYLES]
        answer, first = json.dumps(counts), next(iter(counts))
        inside = [
            *(answer[:-1] + f', "{first}": {counts[first]}}}', json.dumps([*counts.items()])),
            *(answer.replace("1", "true"), answer.replace("1", "1.0"), "[" * 5000, "7", "{}"),
            f"{' ' * 900}{answer}\u2003",
        ]
        wrong = [
            *(f"<answer>{text}</answer>" for text in inside),
            *("", answer, f"<answer>{answer}", f"</answer><answer>{answer}", right[0] * 2),
            *(right[0] + "<think>", f"<think>{right[0]}</think>", right[2][:-30]),
        ]
        places = [(reply, rng.randrange(len(reply))) for reply in right * 10]
        broken = [reply[:i] + rng.choice('09 ,:"{}<>az') + reply[i + 1 :] for reply, i in places]
        for reply in [*right, *wrong, *broken]:
            book = env_letters.score_reply(task, reply, "binary", think=True)
            assert pico.reward_of(counts, reply) == book["reward"], reply
            assert pico.spells_it_out(reply) == (book["habit_derives"] == 1.0), reply
            rewards.add(book["reward"])
    assert rewards == {0.0, 1.0}


@pytest.mark.parametrize("temperature, k, limit", [(0.0, 1, 320), (1.0, 4, 320), (1.0, 1, 12)])
def test_the_same_uniforms_draw_the_books_tokens(policy, monkeypatch, temperature, k, limit):
    """And with them the same texts, rewards and log-probs."""
    monkeypatch.setattr(pico, "MAX_TOKENS", limit)
    seeds, weights = [3, 4, 5], pico.weights_of(lora_of(policy))
    groups = play(policy, TorchSampler(policy), NEW_ENV, seeds, k, limit, temperature, 7)
    uniform = uniforms(7, seeds, k, limit) if temperature else None
    ours = pico.play(weights, seeds, k, uniform)
    assert ours == [[as_pico(e) for e in group] for group in groups]
    now, _ = pico.logprobs_of(weights, sum(ours, []))
    then = [x for e in sum(groups, []) for x, drawn in zip(e.logprobs, e.sampled) if drawn]
    torch.testing.assert_close(now, torch.tensor(then), atol=1e-4, rtol=0)


def test_the_gradient_is_the_books_for_fresh_samples(policy):
    (group,) = play(policy, TorchSampler(policy), NEW_ENV, [11], 6, 200, 1.0, 0)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0])
    for e, advantage in zip(group, advantages.tolist()):
        e.advantages = [advantage] * e.reply_tokens
    lora = lora_of(policy)
    loss = pico.grpo_loss(pico.weights_of(lora), [as_pico(e) for e in group], advantages)
    (loss / 6).backward()
    # "none": the ratio divides by the policy itself, so rounding in the sampler does not matter
    cfg = settings.Config(max_tokens=200, micro_tokens=10_000, importance="none")
    settings.fill(cfg, settings.by_size(0.9e6, "letters"))
    still = torch.optim.SGD(policy.trainable().values(), lr=0)
    book = grpo.update(policy, still, group, cfg)
    largest = max(float(x.grad.abs().max()) for x in lora.values())
    assert 0 < book.grad_norm < pico.MAX_NORM  # so it was not scaled down
    for ours, expected in zip(lora.values(), policy.trainable().values()):
        torch.testing.assert_close(ours.grad, expected.grad, atol=2e-5 * largest, rtol=1e-3)


@pytest.mark.parametrize("rights", [0, 3, 10])
def test_the_interval_is_the_books(monkeypatch, capsys, rights):
    rewards = [float(i < rights) for i in range(10)]
    played = [[pico.Episode([], [], "", reward)] for reward in rewards]
    monkeypatch.setattr(pico, "play", lambda *_: played)
    pico.evaluate({}, "now")
    told = re.search(r"\[(.*)%, (.*)%\]", capsys.readouterr().out).groups()
    book = metrics.mean(rewards)
    assert [float(end) / 100 for end in told] == pytest.approx([book.low, book.high], abs=0.00051)


def test_it_trains_on_tasks_of_neither_sft_nor_evaluation(monkeypatch):
    """And refuses a seed whose tasks would meet SFT's: 1250 · 100,000 · 8 is where they begin."""
    played = Mock(side_effect=KeyboardInterrupt)
    put(monkeypatch, pico, play=played, evaluate=Mock(), imitate=Mock())
    for seed in (0, 1249):
        pico.main(seed, updates=1)
    drawn = [seed for call in played.call_args_list for seed in call.args[1]]
    assert len(drawn) == 2 * pico.TASKS and not {*drawn} & {*pico.SFT_SEEDS, *pico.DEV_SEEDS}
    for seed in (-1, 1250):
        with pytest.raises(SystemExit, match="--seed"):
            pico.main(seed, updates=1)


def test_five_updates_are_those_of_train_py(monkeypatch, tmp_path):
    """From one start, without SFT: rewards equal one by one, and then the adapters."""
    warm.draw_nothing(monkeypatch)
    small = {"TASKS": 2, "K": 4, "MAX_TOKENS": 160, "SFT_STEPS": 0, "LR": 3e-3}
    flags = {
        **{"updates": 5, "num_tasks": 2, "k": 4, "max_tokens": 160, "sft_steps": 0, "lr": 3e-3},
        **{"eval_n": 2, "eval_other_tiers": False, "wandb": False, "seed": 1, "difficulty": 6},
    }
    cfg = settings.Config(runs=str(tmp_path), name="book", **flags)
    refusals.check(cfg)
    rewards_of = lambda episodes: [e.reward for e in episodes]
    flat = lambda lora: torch.cat([x.detach().flatten() for x in lora.values()])
    ours, real_play, update = [], pico.play, Mock(wraps=train.update)

    def play_as_the_book(weights, seeds, k, uniform=None):
        groups = real_play(weights, seeds, k, uniforms(1, seeds, k, 160))
        ours.append(rewards_of(sum(groups, [])))
        return groups

    monkeypatch.setattr(train, "update", update)
    train.train(cfg)
    book = [rewards_of(call.args[2]) for call in update.call_args_list]
    end = lora_of(update.call_args.args[0])
    lora = lora_of(load_policy(str(PICO), pico.RANK, pico.ALPHA, device="cpu", seed=1))
    moved = flat(end) - flat(lora)
    stand_ins = {"play": play_as_the_book, "new_lora": lambda: lora, "evaluate": Mock()}
    put(monkeypatch, pico, **small, **stand_ins)
    pico.main(seed=1, updates=5)
    assert ours == book and len(ours) == 5
    assert {reward for batch in ours for reward in batch} == {0.0, 1.0}
    # Adam's first steps have one size for every weight, also where the gradient is rounding.
    assert (flat(lora) - flat(end)).norm() < 0.02 * moved.norm()


# ------------------------------------------------------------------------------- what it says

# As where torch was installed alone.
BARE = """
import runpy, sys
sys.modules["numpy"] = None
sys.argv = ["pico.py", "--help"]
runpy.run_path("pico.py", run_name="__main__")
"""


def test_it_speaks_at_once_and_does_not_complain_that_numpy_is_missing():
    done = subprocess.run([sys.executable, "-c", BARE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("pico.py: ") and "--updates" in done.stdout
    assert CODE.index("print(") < CODE.index("import torch")


SMALL = """
import pico
pico.TASKS, pico.K, pico.SFT_STEPS, pico.MAX_TOKENS = 1, 2, 1, 40
pico.SFT_SEEDS, pico.DEV_SEEDS = pico.SFT_SEEDS[:8], pico.DEV_SEEDS[:2]
pico.main(seed=0, updates=1000)
"""


def test_ctrl_c_ends_with_the_evaluation_so_far(tmp_path):
    """With small numbers at its top."""
    run = warm.Run(["-c", SMALL], tmp_path, pictures=False)
    while not (run.said[0].exists() and "update   2" in run.said[0].read_text()):
        assert run.process.exitcode is None, run.said[1].read_text()
        time.sleep(0.02)
    os.kill(run.process.pid, signal.SIGINT)
    done = run.end(120)
    assert done.returncode == 0 and done.stderr == ""
    assert re.search(r"stopped early.*\nafter GRPO +exact .* n = 2", done.stdout)
    assert len(re.findall("^Task [AB], reward [01]: ", done.stdout, re.M)) == 6
    assert "updates" in done.stdout.splitlines()[-1]  # the curve


# ----------------------------------------------------------------- docs/pico.md, kept by hand

PAGE, CODE = (ROOT / "docs" / "pico.md").read_text(), (ROOT / "pico.py").read_text()


def test_its_page_is_the_file_line_for_line():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert lines == [line for line in CODE.splitlines() if line]


def test_its_page_shows_values_of_names_in_the_code_above_them():
    pieces = re.findall(r"^```python\n(.*?)^```\n```\n(.*?)^```$", PAGE, re.S | re.M)
    assert len(pieces) > 20
    for code, values in pieces:
        names = {*re.findall(r"^(\w+)(?= +\[\d)", values, re.M)} - {"returns"}
        assert all(re.search(rf"\b{name}\b", code) for name in names), names
