"""pico.py is the book: its tokens, numbers, samples, loss and gradient are those of rollout.py, fast/ and grpo.py, and it learns.

What pico.py says in its comments about three mistakes is tried out, and so is each way of using it wrongly.
"""

import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import env_letters
import grpo
import metrics
import pico
import settings
import train
import warm
from bookkeeping import presets, refusals
from fast.logprobs import token_logprobs
from fast.sampler import TorchSampler
from grpo import group_advantages, policy_loss, token_weights
from hostile import WAYS, replies
from policy import PICO, adam, encode, load_policy, render
from rollout import expert_episode, play

ROOT = Path(__file__).resolve().parent.parent
LETTERS = env_letters.Letters(difficulty=6, reward="binary", think=True, style="states")
NEW_ENV = lambda: env_letters.Letters(difficulty=6, reward="binary", think=True, style="states")


@pytest.fixture(scope="module")
def policy():
    """pico_base with LoRA's B no longer 0: what is zero hides mistakes."""
    policy = load_policy(str(PICO), lora_rank=pico.RANK, lora_alpha=pico.ALPHA, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(0.003 * torch.randn(p.shape, generator=generator))
    return policy


def lora_of(policy) -> dict[str, torch.Tensor]:
    """The book's adapter under pico.py's names."""
    lora = {}
    for name, p in policy.trainable().items():
        layer, which = re.fullmatch(r"base_model\.model\.(.*)\.lora_([AB])\.default\.weight", name).groups()
        lora[f"{layer}.weight.{which}"] = p.detach().clone().requires_grad_()
    return lora


def numpy_uniforms(noise: int, seeds, k: int, n: int) -> torch.Tensor:
    """The book's random numbers, as fast/sampler.py draws them: keyed by (noise, task, sample, turn)."""
    rows = [np.random.default_rng((noise, seed, i, 0)).random(n) for seed in seeds for i in range(k)]
    return torch.tensor(np.stack(rows), dtype=torch.float32)


# ------------------------------------------------------------------------------------------ its form


def test_it_is_300_lines_of_100_columns_and_needs_torch_alone():
    text = (ROOT / "pico.py").read_text()
    assert len(text.splitlines()) <= 300 and max(map(len, text.splitlines())) <= 100
    tree = ast.parse(text, feature_version=(3, 10))
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in found} <= {"torch", *sys.stdlib_module_names}


def test_every_file_of_the_book_that_it_names_is_there():
    text = (ROOT / "pico.py").read_text()
    for name in re.findall(r"[\w/]+\.(?:py|md)", text):
        assert (ROOT / name).exists(), name
    assert text.count("(book: ") == 6


def test_its_numbers_are_those_of_the_model_and_of_the_settings():
    config = json.loads((PICO / "config.json").read_text())
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [config[name] for name in names] == [
        pico.LAYERS,
        pico.HEADS,
        pico.KV_HEADS,
        pico.HEAD_DIM,
    ]
    assert config["rms_norm_eps"] == 1e-6 and config["rope_parameters"]["rope_theta"] == 10000.0
    cfg = settings.Config()
    refusals.check(cfg)
    settings.fill(cfg, presets.by_size(0.9e6, "letters"))
    ours = dict(
        lora_rank=pico.RANK, lora_alpha=pico.ALPHA, sft_examples=len(pico.SFT_SEEDS), sft_steps=pico.SFT_STEPS, sft_batch=pico.SFT_BATCH,
        sft_lr=pico.SFT_LR, num_tasks=pico.TASKS, k=pico.K, max_tokens=pico.MAX_TOKENS, lr=pico.LR, warmup=pico.WARMUP,
        lr_end=pico.LR_END, eval_n=len(pico.DEV),
    )  # fmt: skip
    assert {name: getattr(cfg, name) for name in ours} == ours
    assert list(pico.SFT_SEEDS) == settings.sft_seeds(cfg) and pico.DEV[0] == settings.DEV_SEEDS
    assert grpo.CLIP["grpo"] == (pico.CLIP, pico.CLIP)


# ---------------------------------------------------------------------------- the book, part by part


def test_tasks_questions_demonstrations_and_token_ids_are_the_books(policy):
    for seed in [*range(150), *pico.SFT_SEEDS]:
        messages = LETTERS.reset(seed)
        ask, counts = pico.make_task(seed)
        assert ask == messages[0]["content"]
        assert counts == dict(zip(LETTERS.task.letters, LETTERS.task.counts)) and list(counts) == list(LETTERS.task.letters)
        assert pico.encode(pico.CHAT.format(ask)) == encode(policy, render(policy, messages, None, True))
        assert pico.demonstration(counts) == LETTERS.expert_reply()
        assert pico.encode(pico.demonstration(counts)) == encode(policy, LETTERS.expert_reply())


def test_any_reply_gets_the_books_reward_and_is_seen_as_the_books_habit():
    rng = random.Random(0)
    for seed in range(20):
        _, counts = pico.make_task(seed)
        task = env_letters.make_task(random.Random(seed), 6)
        right = [env_letters.write_reply(task, style) for style in env_letters.STYLES]
        answer = right[0].removeprefix("<answer>").removesuffix("</answer>")
        first = next(iter(counts))
        twice = answer[:-1] + f', "{first}": {counts[first]}}}'
        wrong = [
            "", answer, f"<answer>{answer}", f"{answer}</answer>", f"</answer><answer>{answer}", right[0] * 2, right[0] + "<think>",
            f"<answer>{twice}</answer>", f"<answer>{answer.replace('1', 'true')}</answer>",
            f"<answer>{answer.replace('1', '1.0')}</answer>",
            f"<answer>{list(counts.items())}</answer>", f"<answer>{json.dumps([list(pair) for pair in counts.items()])}</answer>",
            "<answer>" + "[" * 5000 + "</answer>", "<answer>7</answer>", "<answer>{}</answer>", f"<think>{right[0]}</think>",
            f"<answer>{' ' * 900}{answer}</answer>", f"<answer>\u2003{answer}\n</answer> and more", right[2].replace("</think>", ""),
        ]  # fmt: skip
        cut = [reply[: rng.randrange(len(reply))] for reply in right for _ in range(5)]
        swapped = []
        for reply in right * 10:
            i = rng.randrange(len(reply))
            swapped.append(reply[:i] + rng.choice('0123456789 ,:"{}<>abz') + reply[i + 1 :])
        rewards = set()
        for reply in [*right, *wrong, *cut, *swapped]:
            book = env_letters.score_reply(task, reply, "binary", think=True)
            assert pico.reward_of(counts, reply) == book["reward"], reply
            assert pico.spells(reply) == (book["habit_derives"] == 1.0), reply
            rewards.add(book["reward"])
        assert rewards == {0.0, 1.0}


@given(seed=st.integers(0, 50), way=st.sampled_from(WAYS), text=replies)
@hypothesis.settings(max_examples=200, deadline=None)
def test_hostile_replies_never_raise_and_get_the_books_reward(seed, way, text):
    env = NEW_ENV()
    env.reset(seed)
    _, counts = pico.make_task(seed)
    reply = way(env.expert_reply(), text)
    book = env_letters.score_reply(env.task, reply, "binary", think=True)
    assert pico.reward_of(counts, reply) == book["reward"]


def test_logprobs_are_the_books(policy):
    w = pico.policy_of(lora_of(policy))
    episodes = [expert_episode(policy, NEW_ENV(), seed) for seed in range(3)]
    ours = [as_pico(e) for e in episodes]
    found, row = pico.logprobs_of(w, ours)
    assert row.tolist() == [n for n, e in enumerate(ours) for _ in e.reply]
    for n, e in enumerate(episodes):
        ids = torch.tensor([e.token_ids])
        mask = torch.tensor([e.sampled[1:]])
        with torch.no_grad():
            logits = policy.model(input_ids=ids).logits[0, :-1]  # [T-1, V]
            everything = pico.forward(w, ids[:, :-1], torch.zeros(1, dtype=torch.long), torch.ones_like(mask))
            book = token_logprobs(policy, ids, mask)[0]
        torch.testing.assert_close(everything, logits.log_softmax(-1), atol=1e-4, rtol=0)
        torch.testing.assert_close(found[row == n], book, atol=1e-4, rtol=0)


def as_pico(e) -> pico.Episode:
    n = e.sampled.index(True)
    return pico.Episode(e.token_ids[:n], e.token_ids[n:], e.logprobs[n:], "", e.reward)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_uniforms_draw_the_books_tokens_texts_and_rewards(policy, temperature):
    seeds, k = [3, 4, 5], 4 if temperature else 1
    groups = play(policy, TorchSampler(policy), NEW_ENV, seeds, k, pico.MAX_TOKENS, temperature, noise=7)
    chance = numpy_uniforms(7, seeds, k, pico.MAX_TOKENS) if temperature else None
    ours = pico.play(pico.policy_of(lora_of(policy)), seeds, k, chance)
    assert [len(group) for group in ours] == [k] * len(seeds)
    for book, e in zip((e for g in groups for e in g), (e for g in ours for e in g)):
        n = book.sampled.index(True)
        assert e.prompt == book.token_ids[:n] and e.reply == book.token_ids[n:]
        assert e.text == book.messages[-1]["content"] and e.reward == book.reward
        torch.testing.assert_close(torch.tensor(e.logprobs), torch.tensor(book.logprobs[n:]), atol=1e-4, rtol=0)


def test_a_reply_that_is_cut_has_as_many_tokens_as_are_allowed(policy, monkeypatch):
    monkeypatch.setattr(pico, "MAX_TOKENS", 12)
    [[e]] = pico.play(pico.policy_of(lora_of(policy)), [3], 1)
    assert len(e.reply) == len(e.logprobs) == 12 and pico.STOP not in e.reply


def test_every_token_sees_at_least_itself_padding_too(policy, monkeypatch):
    """Else torch before 2.5 answers with NaN, and NaN spreads: found with torch 2.4.0, where nothing was ever right."""
    seen, attend = [], pico.F.scaled_dot_product_attention
    monkeypatch.setattr(pico, "MAX_TOKENS", 3)
    monkeypatch.setattr(
        pico.F,
        "scaled_dot_product_attention",
        lambda *x, attn_mask: seen.append(attn_mask) or attend(*x, attn_mask=attn_mask),
    )
    pico.play(pico.policy_of(lora_of(policy)), [0, 1, 2], 1)  # prompts of different lengths
    assert len(seen) == 4 * pico.LAYERS and not seen[0][..., -1, :].all() and all(mask.any(-1).all() for mask in seen)


def test_advantages_are_the_books():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    torch.testing.assert_close(pico.advantages_of(rewards), group_advantages(rewards), atol=1e-5, rtol=0)
    assert not pico.advantages_of(torch.ones(2, 1)).any()


def test_loss_and_gradient_are_the_books_also_where_clipping_acts(policy):
    groups = play(policy, TorchSampler(policy), NEW_ENV, [11], 6, 200, 1.0, noise=0)
    generator, advantages = (
        torch.Generator().manual_seed(1),
        torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0]),
    )
    for e in groups[0]:  # as if sampled by another policy: ratios leave [0.8, 1.2]
        moved = torch.tensor(e.logprobs) + 0.2 * torch.randn(len(e.logprobs), generator=generator)
        e.logprobs = [x if s else 0.0 for x, s in zip(moved.tolist(), e.sampled)]
    ids, mask, old = padded(groups[0])
    logprobs, _ = token_logprobs(policy, ids, mask)
    row = torch.nonzero(mask)[:, 0]
    loss, _, clipped = policy_loss("grpo", logprobs, old[mask], advantages[row], row, *grpo.CLIP["grpo"])
    book = (token_weights("grpo", torch.tensor([e.reply_tokens for e in groups[0]]).float(), 320)[row] * loss).sum()
    assert clipped.any() and not clipped.all()
    gradients = dict(zip(lora_of(policy), torch.autograd.grad(book, list(policy.trainable().values()))))
    lora = lora_of(policy)
    ours = pico.grpo_loss(pico.policy_of(lora), [as_pico(e) for e in groups[0]], advantages) / 6
    ours.backward()
    assert ours.item() == pytest.approx(book.item(), abs=1e-5)
    largest = max(g.abs().max() for g in gradients.values())
    for name, g in gradients.items():
        torch.testing.assert_close(lora[name].grad, g, atol=2e-5 * float(largest), rtol=1e-3)


def padded(episodes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    T = max(len(e.token_ids) for e in episodes)
    fill = lambda values, n: list(values) + [0] * (n - len(values))
    ids = torch.tensor([fill(e.token_ids, T) for e in episodes])
    mask = torch.tensor([fill(e.sampled[1:], T - 1) for e in episodes]).bool()
    return ids, mask, torch.tensor([fill(e.logprobs[1:], T - 1) for e in episodes]).float()


def test_a_step_is_the_books():
    """Clipped to length 1, then Adam without weight decay."""
    lora = {"x": torch.zeros(3, requires_grad=True)}
    optimizer = torch.optim.AdamW(lora.values(), weight_decay=0)
    lora["x"].grad = torch.tensor([3.0, 4.0, 0.0])
    assert pico.step(optimizer, lora, 0.01) == pytest.approx(5.0)
    theirs = {"x": torch.zeros(3, requires_grad=True)}
    book = SimpleNamespace(trainable=lambda: theirs, device=torch.device("cpu"))
    optimizer = adam(book, 0.01)
    theirs["x"].grad = torch.tensor([3.0, 4.0, 0.0])
    grpo.take_step(book, optimizer, 0.0)
    torch.testing.assert_close(lora["x"], theirs["x"])
    assert lora["x"].grad is None


def test_the_interval_is_the_books(monkeypatch, capsys):
    for rights in (0, 3, 10):
        played = [[pico.Episode([], [], [], "", float(i < rights))] for i in range(10)]
        monkeypatch.setattr(pico, "play", lambda *a, played=played: played)
        pico.evaluate({}, "now")
        low, high = re.search(r"\[(.*)%, (.*)%\]", capsys.readouterr().out).groups()
        book = metrics.mean([float(i < rights) for i in range(10)])
        assert float(low) == pytest.approx(100 * book.low, abs=0.051) and float(high) == pytest.approx(100 * book.high, abs=0.051)


@pytest.mark.parametrize("seed", [0, 1250, 2500])  # 1250 · 100,000 · 8 is where SFT's tasks begin
def test_whatever_the_seed_it_trains_on_tasks_of_neither_sft_nor_evaluation(monkeypatch, seed):
    drawn = []

    def play(w, seeds, k, chance=None):
        drawn.append(seeds)
        raise KeyboardInterrupt

    monkeypatch.setattr(pico, "evaluate", lambda w, stage: None)
    monkeypatch.setattr(pico, "SFT_STEPS", 0)
    monkeypatch.setattr(pico, "play", play)
    pico.main(seed, updates=1)
    assert len(drawn) == 1 and len(drawn[0]) == pico.TASKS and not set(drawn[0]) & {*pico.SFT_SEEDS, *pico.DEV}


def test_five_updates_are_those_of_train_py(monkeypatch, tmp_path, capsys):
    """The same start, demonstrations excepted: rewards equal one by one, and then the adapters."""
    warm.draw_nothing(monkeypatch)
    small = dict(TASKS=3, K=4, MAX_TOKENS=200, SFT_STEPS=0, SFT_SEEDS=range(10**9, 10**9 + 1), DEV=range(2 * 10**9, 2 * 10**9 + 2))
    for name, value in small.items():
        monkeypatch.setattr(pico, name, value)
    cfg = settings.Config(
        updates=5, num_tasks=3, k=4, max_tokens=200, sft_steps=0, eval_n=2, eval_other_tiers=False, wandb=False, seed=1,
        runs=str(tmp_path), name="book", difficulty=6, lr=3e-3,
    )  # fmt: skip
    monkeypatch.setattr(pico, "LR", 3e-3)
    refusals.check(cfg)
    real, seen, start, end = train.update, [], {}, {}

    def update(policy, optimizer, groups, *rest):
        if not seen:
            start.update(lora_of(policy))
        seen.append([[e.reward for e in group] for group in groups])
        stats = real(policy, optimizer, groups, *rest)
        end.update(lora_of(policy))
        return stats

    monkeypatch.setattr(train, "update", update)
    train.train(cfg)
    start = {name: x.detach() for name, x in start.items()}

    ours, final = [], {}
    play_of_pico, step = pico.play, pico.step

    def with_the_books_noise(w, seeds, k, chance=None):
        if chance is None:
            return play_of_pico(w, seeds, k)
        groups = play_of_pico(w, seeds, k, numpy_uniforms(1, seeds, k, 200))
        ours.append([[e.reward for e in group] for group in groups])
        return groups

    def watched(optimizer, lora, rate):
        norm = step(optimizer, lora, rate)
        final.update({name: x.detach() for name, x in lora.items()})
        return norm

    monkeypatch.setattr(pico, "play", with_the_books_noise)
    monkeypatch.setattr(pico, "step", watched)
    monkeypatch.setattr(pico, "new_lora", lambda: {name: x.clone().requires_grad_() for name, x in start.items()})
    pico.main(seed=1, updates=5)
    assert ours == seen and len(ours) == 5
    assert len({reward for batch in ours for group in batch for reward in group}) == 2  # some right, some wrong
    steps = [(final[name] - old, end[name].detach() - old) for name, old in start.items()]
    apart, moved = (torch.cat([x.flatten() for x in xs]).norm().item() for xs in ([a - b for a, b in steps], [b for _, b in steps]))
    assert apart < 0.02 * moved, "Adam's first steps have one size for every weight, also where the gradient is rounding alone"


# ----------------------------------------------------------- three things to try, as its comments say


@pytest.fixture(scope="module")
def warmed_up():
    """The adapter after a short SFT, as {name: tensor}."""
    kept, patch = {}, pytest.MonkeyPatch()
    with patch.context() as m:
        m.setattr(pico, "SFT_STEPS", 20)
        m.setattr(pico, "evaluate", lambda *_: None)
        new = pico.new_lora
        m.setattr(pico, "new_lora", lambda: kept.update(new()) or kept)
        pico.main(seed=0, updates=0)
    return {name: x.detach() for name, x in kept.items()}


@pytest.fixture
def learn(monkeypatch, warmed_up, capsys):
    """learn(updates, NAME=value …) -> (rewards printed, adapter afterwards): GRPO from the warm start, small."""

    def go(updates: int, **numbers):
        small = dict(TASKS=2, K=8, SFT_STEPS=0, SFT_SEEDS=pico.SFT_SEEDS[:1], evaluate=lambda *_: None)
        for name, value in (small | numbers).items():
            monkeypatch.setattr(pico, name, value)
        lora = {name: x.clone().requires_grad_() for name, x in warmed_up.items()}
        monkeypatch.setattr(pico, "new_lora", lambda: lora)
        capsys.readouterr()
        pico.main(seed=0, updates=updates)
        printed = re.findall(r"reward (\S+)", capsys.readouterr().out)
        return [float(x) for x in printed], lora

    return go


def moved(lora, before) -> float:
    return max((x.detach() - before[name]).abs().max().item() for name, x in lora.items())


def test_tried_k_of_1_learns_nothing(learn, warmed_up):
    rewards, lora = learn(3, K=1)
    assert len(rewards) == 3 and moved(lora, warmed_up) == 0.0
    rewards, lora = learn(1)
    assert moved(lora, warmed_up) > 0


def test_tried_a_limit_of_64_tokens_no_thought_ever_pays(warmed_up, monkeypatch):
    w, seeds, thinks = pico.policy_of(warmed_up), range(12), lambda e: "<think>" in e.text
    generous = [e for group in pico.play(w, seeds, 8, numpy_uniforms(0, seeds, 8, 320)) for e in group if thinks(e)]
    monkeypatch.setattr(pico, "MAX_TOKENS", 64)
    groups = pico.play(w, seeds, 8, numpy_uniforms(0, seeds, 8, 64))
    advantages = pico.advantages_of(torch.tensor([[e.reward for e in group] for group in groups]))
    strict = [(e, a) for group, row in zip(groups, advantages.tolist()) for e, a in zip(group, row) if thinks(e)]
    assert len(generous) == len(strict) > 30 and sum(e.reward for e in generous) > 3
    assert all(e.reward == 0 and a <= 0 for e, a in strict)


def test_tried_a_rate_of_a_tenth_ends_in_babble(learn):
    rewards, _ = learn(6, LR=0.1)
    assert rewards[0] > 0 and rewards[3:] == [0.0, 0.0, 0.0]


# ----------------------------------------------------------------------------------------- wrong use


def start(*flags: str, code: str = "", folder: Path = ROOT) -> subprocess.CompletedProcess:
    """`python pico.py FLAGS`, after `code`."""
    script = f"import runpy, sys; {code}\nsys.argv = ['pico.py', *{flags!r}]\nrunpy.run_path('pico.py', run_name='__main__')"
    return warm.run(["-c", script], folder, {**os.environ, "OMP_NUM_THREADS": "1"})


def one_line(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 1 and done.stdout == "" and len(done.stderr.splitlines()) == 1, (done.stdout, done.stderr)
    return done.stderr


def test_without_its_model_it_says_so(tmp_path):
    """In a Python of its own, as it is called."""
    shutil.copy(ROOT / "pico.py", tmp_path)
    said = one_line(subprocess.run([sys.executable, "pico.py"], cwd=tmp_path, capture_output=True, text=True))
    assert "there is no model in" in said and "clone" in said


def test_a_torch_that_is_too_old_is_named():
    said = one_line(start(code="import torch; torch.__version__ = '2.3.1+cpu'"))
    assert "torch 2.3.1+cpu is too old" in said and "pip install" in said


def test_out_of_memory_is_a_sentence_and_other_errors_are_not_hidden():
    fails = "import torch\ndef zeros(*a, **k): raise RuntimeError({!r})\ntorch.zeros = zeros"
    said = one_line(start(code=fails.format("[enforce fail] DefaultCPUAllocator: can't allocate memory")))
    assert "out of memory; lower TASKS" in said
    err = start(code=fails.format("a bug")).stderr
    assert "Traceback" in err and "RuntimeError: a bug" in err


def test_a_wrong_flag_is_a_sentence():
    done = start("--seeds", "1")
    assert done.returncode == 2 and "unrecognized arguments: --seeds 1" in done.stderr


def test_ctrl_c_ends_with_the_evaluation_so_far(tmp_path):
    """With small numbers at its top."""
    run = warm.Run(["-c", SMALL], ROOT, {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path, pictures=False)
    while not (run.said[0].exists() and "update   2" in run.said[0].read_text()):
        assert run.process.exitcode is None, run.said[1].read_text()
        time.sleep(0.02)
    os.kill(run.process.pid, signal.SIGINT)
    done = run.end(120)
    assert done.returncode == 0 and done.stderr == ""
    assert "stopped early" in done.stdout and re.search(r"after GRPO +exact .* n = 2", done.stdout)


SMALL = """
import pico
pico.TASKS, pico.K, pico.SFT_STEPS, pico.SFT_SEEDS, pico.DEV, pico.MAX_TOKENS = 1, 2, 1, pico.SFT_SEEDS[:8], pico.DEV[:2], 40
pico.main(seed=0, updates=1000)
"""
