"""Protects the exercises: the committed file is unsolved, the functions that train the policy solve it, so does a second way of writing
each, and the mistakes that nearly everybody makes are called by their names. Wrong and right versions here are written as a reader would,
not as learn/cases.py does."""

import inspect
import math
import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import env_letters
import grpo
import metrics
import policy
import rollout
from env_letters import Task, parse_answer
from fast import sampler
from learn import exercises
from learn.cases import CHECKS, Numbers
from learn.judge import TOLD, main, verdict
from rollout import Episode
from swarm import governance

ROOT = Path(__file__).resolve().parent.parent
NAN = float("nan")
BANANA = Task("banana", ("a", "n", "q"), (3, 2, 0))

# ------------------------------------------------------------------------------------------------ unsolved


def test_the_committed_file_is_unsolved():
    assert list(CHECKS) == list(TOLD) == [name for name, f in vars(exercises).items() if getattr(f, "__module__", "") == "learn.exercises"]
    for name, check in CHECKS.items():
        with pytest.raises(NotImplementedError):
            getattr(exercises, name)(*check()[1][0])


def test_the_command_says_so_and_fails(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["learn/exercises.py"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "learn/exercises.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert end.value.code == 1 and said.count("not done yet") == len(CHECKS) and "0 of 11 right" in said and "--hint 1 helps" in said


# ------------------------------------------------------------------------------------------------ solved by the real functions


def real_conversation(prompt, replies, deltas):
    """By take_turn alone; what stands between two turns is put into the delta's place."""
    episode = Episode(0, 0, list(prompt), [False] * len(prompt), [0.0] * len(prompt))
    numbers = SimpleNamespace(tokenizer=Numbers(), stop_ids={2}, name="numbers")
    for reply, delta in zip(replies, [*deltas, None]):
        said = [{"role": "user", "content": " ".join(map(str, delta or []))}]
        env = SimpleNamespace(step=lambda _, said=said, delta=delta: (said, delta is None), think=False)
        sample = sampler.Sample(list(reply), [0.0] * len(reply), True)
        rollout.take_turn(numbers, episode, env, sample, 10**9)
    return episode.token_ids, episode.sampled


def real_draw(logits, uniform, temperature):
    tokens, logp = sampler.draw(logits.expand(2, -1), torch.tensor([uniform, 0.0]), temperature)
    return int(tokens[0]), float(logp[0])


def real_token_logprobs(logits, ids, mask):
    return policy.plain_logprobs(SimpleNamespace(model=lambda **_: SimpleNamespace(logits=logits[:, :-1])), ids, mask)[0]


def real_wilson(successes, n):
    interval = metrics.proportion(successes, n)
    return [interval.low, interval.high]


REAL = {
    "partial_reward": lambda task, reply: env_letters.score_reply(task, reply, reward="partial", think=True)["reward"],
    "conversation": real_conversation,
    "draw": real_draw,
    "token_logprobs": real_token_logprobs,
    "group_advantages": lambda rewards: grpo.group_advantages(rewards),
    "token_weights": lambda loss, lengths, max_tokens: grpo.token_weights(loss, lengths, max_tokens),
    "clipped_loss": lambda now, old, A, eps, high: grpo.policy_loss("grpo", now, old, A, torch.zeros(len(now)).long(), eps, high)[0],
    "importance_weights": lambda log_ratio, row, cap: grpo.importance_weights("sequence", log_ratio, row, cap),
    "k3": lambda now, reference: grpo.k3(now, reference),
    "wilson": real_wilson,
    "expect": lambda mean, var, spread, p, noise: governance.expect(governance.Belief(mean=mean, var=var, spread=spread), p, noise),
}


def test_the_real_functions_solve_it(capsys):
    assert main([], {**vars(exercises), **REAL}) == 0
    said = capsys.readouterr().out
    assert said.count("right\n") == len(CHECKS) and "not yet" not in said and "All 11 are right" in said


def log(*p: float) -> torch.Tensor:
    return torch.tensor(p).log()


@pytest.mark.parametrize("name, given, expected", [  # the examples of the docstrings, worked out by hand
    ("partial_reward", (BANANA, '<answer>{"a": 3, "n": 2, "q": 1}</answer>'), 0.7),
    ("conversation", ([1, 5, 2, 1], [[7, 8, 2], [9, 2]], [[1, 6, 2, 1]]),
     ([1, 5, 2, 1, 7, 8, 2, 1, 6, 2, 1, 9, 2], [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1])),
    ("draw", (log(0.5, 0.25, 0.25), 0.6, 1.0), (1, math.log(1 / 4))),
    ("draw", (log(0.5, 0.25, 0.25), 0.6, 0.5), (0, math.log(2 / 3))),
    ("draw", (log(0.5, 0.25, 0.25), 0.6, 0.0), (0, math.log(1 / 2))),
    ("token_logprobs", (log(0.1, 0.6, 0.3).expand(1, 3, 3), torch.tensor([[1, 1, 1]]), torch.tensor([[False, True]])), [math.log(0.6)]),
    ("group_advantages", (torch.tensor([[1.0, 0, 0, 1]]),), [[1, -1, -1, 1]]),
    ("group_advantages", (torch.tensor([[1, NAN, 0]]),), [[1, 0, -1]]),
    ("group_advantages", (torch.full((1, 3), 0.9),), [[0, 0, 0]]),
    ("token_weights", ("grpo", torch.tensor([2.0, 8]), 10), [1 / 4, 1 / 16]),
    ("token_weights", ("dr_grpo", torch.tensor([2.0, 8]), 10), [1 / 20, 1 / 20]),
    ("token_weights", ("dapo", torch.tensor([2.0, 8]), 10), [1 / 10, 1 / 10]),
    ("clipped_loss", (log(0.25, 0.3, 0.3), log(0.25, 0.2, 0.2), torch.tensor([1.0, 1, -1]), 0.2, 0.28), [-1, -1.28, 1.5]),
    ("importance_weights", (log(0.8, 0.5, 3), torch.tensor([0, 0, 1]), 2.0), [0.4, 0.4, 2]),
    ("k3", (log(0.5, 0.3), log(0.25, 0.3)), [0.5 - math.log(0.5) - 1, 0]),
    ("wilson", (13, 32), (0.2552, 0.5774)),
    ("wilson", (0, 10), (0, 0.2775)),
    ("expect", (0.5, 0.05, 0.04, 0.9, 0.05), 0.7),
])  # fmt: skip
def test_the_examples_of_the_docstrings(name, given, expected):
    flat = lambda x: [y for part in x for y in flat(part)] if isinstance(x, list | tuple) else [float(x)]
    out = REAL[name](*given)
    assert flat(out.tolist() if isinstance(out, torch.Tensor) else out) == pytest.approx(flat(expected), abs=1e-4)


# ------------------------------------------------------------------------------------------------ solved, and nearly solved, by a reader


def reward(task, reply, malformed=0.0, same_letters=True, base=0.1):
    answer = parse_answer(reply, len(task.letters) > 1)
    if answer is None:
        return malformed
    if len(task.letters) == 1:
        return 1.0 if answer == task.counts[0] else base
    if same_letters and set(answer) != set(task.letters):
        return base
    right = [answer.get(c) == n for c, n in zip(task.letters, task.counts)]
    return base + (1 - base) * sum(right) / len(right)


def tokens(prompt, replies, deltas, prompt_is=False, last_is=True, delta_is=False):
    ids, mask = list(prompt), [prompt_is] * len(prompt)
    for i, reply in enumerate(replies):
        ids, mask = ids + reply, mask + [True] * (len(reply) - 1) + [last_is]
        if i < len(deltas):
            ids, mask = ids + deltas[i], mask + [delta_is] * len(deltas[i])
    return ids, mask


def inverse_cdf(logits, uniform, temperature, says=None):
    if temperature == 0:
        return int(logits.argmax()), float(torch.log_softmax(logits, 0).max())
    p, total = torch.softmax(logits.double() / temperature, 0), 0.0
    for token in range(len(p)):
        total += p[token]
        if uniform < total:
            break
    return token, float(torch.log_softmax(logits / (says or temperature), 0)[token])


def shifted(logits, ids, mask, position=-1, token=0, log=torch.log_softmax):
    """position -1: the logits of the place before the one that the mask asks for; token 0: the token at that place."""
    asked = [(n, t + 1) for n, t in mask.nonzero().tolist()]
    return torch.tensor([log(logits[n, t + position], -1)[ids[n, t + token]] for n, t in asked])


def advantages(rewards, ddof=0, eps=1e-6, whole_batch=False, double=True):
    out = torch.zeros(rewards.shape)
    for g, row in enumerate(rewards.double() if double else rewards):
        good = ~row.isnan()
        x = (rewards[~rewards.isnan()].double() if whole_batch else row[good]) if good.any() else torch.zeros(2)
        std = (((x - x.mean()) ** 2).sum() / (len(x) - ddof)).sqrt() if len(x) > 1 else torch.zeros(())
        out[g, good] = ((row - x.mean()) / (std + eps))[good].float()
    return out


def weights(loss, lengths, max_tokens):
    each = {"grpo": [1 / max(1, n) / len(lengths) for n in lengths], "dr_grpo": [1 / max_tokens / len(lengths)] * len(lengths)}
    return torch.tensor(each.get(loss, [1 / sum(lengths)] * len(lengths)))


def surrogate(now, old, A, eps, high, pick=torch.min, sign=-1):
    ratio = torch.exp(now - old)
    return sign * pick(ratio * A, torch.clip(ratio, 1 - eps, 1 + high) * A)


def truncated(log_ratio, row, cap, of=torch.sum):
    return torch.stack([of(log_ratio[row == r]).exp().clamp(max=cap) for r in row])


def kl(now, reference):
    r = torch.exp(reference) / torch.exp(now)
    return r - torch.log(r) - 1


def interval(x, n, z=1.96):
    if n == 0:
        return 0.0, 1.0
    a, b, c = n + z * z, -(2 * x + z * z), x * x / n
    root = math.sqrt(b * b - 4 * a * c)
    return (-b - root) / (2 * a), (-b + root) / (2 * a)


def wald(x, n):
    p = x / n if n else 0.5
    reach = 1.96 * math.sqrt(p * (1 - p) / n) if n else 0.5
    return p - reach, p + reach


def gate(mean, var, spread, p, noise, least=0.0):
    prior = var + max(least, spread - noise)
    return (mean / prior + p / noise) / (1 / prior + 1 / noise) if prior > 0 and noise > 0 else (p if prior > 0 else mean)


def in_place(rewards):
    return rewards.copy_(grpo.group_advantages(rewards))


SOLVED = {"partial_reward": reward, "conversation": tokens, "draw": inverse_cdf, "token_logprobs": shifted, "group_advantages": advantages,
          "token_weights": weights, "clipped_loss": surrogate, "importance_weights": truncated, "k3": kl, "wilson": interval,
          "expect": gate}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_so_does_another_way_to_write_it(name):
    assert verdict(name, SOLVED[name]) == "right"


def test_what_is_given_may_be_changed():
    assert verdict("group_advantages", in_place) == "right"


@pytest.mark.parametrize("name, mistaken, named", [
    ("partial_reward", lambda task, reply: reward(task, reply, malformed=0.1), "malformed answer"),
    ("partial_reward", lambda task, reply: reward(task, reply, base=0.0), "0.1 of a well-formed answer is missing"),
    ("partial_reward", lambda task, reply: reward(task, reply, same_letters=False), "not compared with those asked for"),
    ("partial_reward", lambda task, reply: float(reward(task, reply) == 1), "all or nothing"),
    ("conversation", lambda *given: tokens(*given, last_is=False), "end-of-turn token is left out"),
    ("conversation", lambda *given: tokens(*given, prompt_is=True), "prompt is in the mask"),
    ("conversation", lambda *given: tokens(*given, delta_is=True), "between two turns is in the mask"),
    ("conversation", lambda prompt, replies, deltas: tokens(prompt, replies, []), "between two turns is missing"),
    ("draw", lambda *given: inverse_cdf(*given, says=1.0), "that of temperature 1"),
    ("draw", lambda logits, u, t: inverse_cdf(logits * t * t, u, t), "multiplies"),
    ("draw", lambda logits, u, t: inverse_cdf(logits, u, float(t > 0)), "is not used"),
    ("draw", lambda logits, u, t: inverse_cdf(logits, u, t) if t else (int(logits.argmax()), 0.0), "greedy has a log-prob too"),
    ("token_logprobs", lambda *given: shifted(*given, position=0), "no shift"),
    ("token_logprobs", lambda *given: shifted(*given, position=0, token=-1), "wrong way"),
    ("token_logprobs", lambda *given: shifted(*given, token=-1), "tokens are not shifted"),
    ("token_logprobs", lambda *given: shifted(*given, log=lambda x, _: x), "logits, not yet log-probs"),
    ("token_logprobs", lambda *given: -shifted(*given), "the sign"),
    ("token_logprobs", lambda logits, ids, mask: shifted(logits, ids, mask | True), "mask is not used"),
    ("group_advantages", lambda r: advantages(r, ddof=1), "ddof=1"),
    ("group_advantages", lambda r: (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True), "ddof=1"),
    ("group_advantages", lambda r: advantages(r, whole_batch=True), "those of the batch and not of the group"),
    ("group_advantages", lambda r: advantages(r, eps=0.0), "the std needs its 1e-6"),
    ("group_advantages", lambda r: advantages(r, double=False), "rounding noise"),
    ("group_advantages", lambda r: advantages(r.nan_to_num(0)), "counts as a reward of 0"),
    ("group_advantages", lambda r: (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True, correction=0) + 1e-6),
     "one NaN makes NaN of its whole group"),
    ("group_advantages", lambda r: (r - r.nanmean(1, keepdim=True)).nan_to_num(0), "not divided by the std"),
    ("token_weights", lambda loss, n, most: weights("dapo" if loss == "grpo" else loss, n, most),
     "under grpo every episode counts the same"),
    ("token_weights", lambda loss, n, most: weights("grpo" if loss == "dapo" else loss, n, most), "under dapo every token counts the same"),
    ("token_weights", lambda loss, n, most: weights("grpo" if loss == "dr_grpo" else loss, n, most), "own length"),
    ("token_weights", lambda loss, n, most: weights(loss, n, most) * (1 if loss == "dapo" else len(n)), "mean over episodes is missing"),
    ("token_weights", lambda loss, n, most: 1 / (len(n) * n) if loss == "grpo" else weights(loss, n, most), "a length of 0"),
    ("clipped_loss", lambda *given: surrogate(*given, sign=1), "the sign"),
    ("clipped_loss", lambda *given: surrogate(*given, pick=torch.max), "max for min"),
    ("clipped_loss", lambda *given: surrogate(*given, pick=lambda a, b: b), "without the min"),
    ("clipped_loss", lambda *given: surrogate(*given, pick=lambda a, b: a), "there is no clip"),
    ("clipped_loss", lambda now, old, A, low, high: surrogate(now, old, A, low, low), "eps stands on both sides"),
    ("clipped_loss", lambda now, old, A, low, high: surrogate(-now, -old, A, low, high), "upside down"),
    ("clipped_loss", lambda *given: surrogate(*given).mean(), "this is the mean"),
    ("clipped_loss", lambda now, *rest: surrogate(now.detach(), *rest), "detached"),
    ("importance_weights", lambda x, row, cap: x.exp().clamp(max=cap), "each token has its own ratio"),
    ("importance_weights", lambda x, row, cap: truncated(x, row, cap, of=torch.mean), "geometric mean"),
    ("importance_weights", lambda x, row, cap: truncated(x, row, float("inf")), "there is no cap"),
    ("importance_weights", lambda x, row, cap: truncated(x.exp().clamp(max=cap).log(), row, 1e30), "the cap is on each token"),
    ("importance_weights", lambda x, row, cap: truncated(x, row, cap).clamp(min=1 / cap), "cut off below"),
    ("k3", lambda now, reference: now - reference, "this is k1"),
    ("k3", lambda now, reference: (now - reference) ** 2 / 2, "this is k2"),
    ("k3", lambda now, reference: kl(reference, now), "upside down"),
    ("k3", lambda now, reference: kl(now.detach(), reference), "no gradient"),
    ("wilson", wald, "the normal approximation, not Wilson"),
    ("wilson", lambda x, n: (max(0, wald(x, n)[0]), min(1, wald(x, n)[1])), "cut off at 0 and 1"),
    ("wilson", lambda x, n: interval(x, n, 1.645), "90% interval"),
    ("wilson", lambda x, n: interval(x, n) if n else (0.0, 0.0), "without a task"),
    ("expect", lambda mean, var, spread, p, noise: p, "the hard gate"),
    ("expect", lambda mean, var, spread, p, noise: mean, "record alone"),
    ("expect", lambda mean, var, spread, p, noise: mean + p - gate(mean, var, spread, p, noise), "wrong way round"),
    ("expect", lambda mean, var, spread, p, noise: gate(mean, var, 0, p, noise), "how much deals really vary"),
    ("expect", lambda *given: gate(*given, least=-1.0), "a variance may not"),
])  # fmt: skip
def test_the_usual_mistakes_are_named(name, mistaken, named):
    said = verdict(name, mistaken)
    assert said.startswith(f"not yet: {name}(") and " and should give " in said and named in said.partition("Likely: ")[2], said
    assert "\n" not in said and said.isprintable()


def test_the_first_input_that_differs_is_shown():
    said = verdict("group_advantages", lambda rewards: advantages(rewards, ddof=1))
    assert "group_advantages(rewards=[[1, 0, 0, 1]]) gives [[0.866, -0.866, -0.866, 0.866]] and should give [[1, -1, -1, 1]]" in said


def test_what_nobody_knows_is_not_named():
    said = verdict("wilson", lambda successes, n: (0.3, 0.4))
    assert "wilson(successes=13, n=32) gives (0.3, 0.4) and should give (0.2552, 0.5774)" in said
    assert "none of the mistakes that we know" in said
    for strange in ("words", {}, [[1], [2, 3]], torch.zeros(0), (0.0,), float):
        assert verdict("wilson", lambda successes, n, strange=strange: strange).startswith("not yet: wilson(")


def test_chance_is_none():
    dice = random.Random(0)
    assert verdict("draw", lambda logits, u, t: (dice.randrange(len(logits)), -1.0)).startswith("not yet")


# ------------------------------------------------------------------------------------------------ what else a reader meets


def breaks(successes, n):
    return successes / n, 1.0


def test_an_exception_is_one_line_with_its_place():
    line = inspect.getsourcelines(breaks)[1] + 1
    said = verdict("wilson", lambda successes, n: interval(successes, n) if n else breaks(successes, n))
    assert said == f"not yet: line {line} of test_exercises.py raises ZeroDivisionError: division by zero; given was successes=0, n=0"
    no_arguments = lambda: 0
    said = verdict("wilson", no_arguments)
    assert f"line {inspect.getsourcelines(no_arguments)[1]} of test_exercises.py raises TypeError" in said and "\n" not in said

    def shouts(logprobs, reference):
        raise NotImplementedError("two\nlines")  # torch raises this where a type is not implemented; it is no empty exercise

    assert "raises NotImplementedError: two lines" in verdict("k3", shouts)
    assert "gives nothing; is there a return?" in verdict("k3", lambda logprobs, reference: None)


def test_one_alone(capsys):
    assert main(["10"], {**vars(exercises), "wilson": interval}) == 0
    assert main(["10"], vars(exercises)) == 1
    said = capsys.readouterr().out
    assert "Right." in said and "0 of 1 right. Next is wilson" in said and "k3" not in said


def test_every_exercise_has_a_question_a_hint_and_an_answer(capsys):
    for n, (name, (hint, answer)) in enumerate(TOLD.items(), 1):
        text = inspect.getdoc(getattr(exercises, name))
        question = text.rpartition("Question: ")[2]
        assert text.startswith(f"{n}. ") and "The real one: " in text and question.endswith("?") and "\n\n" not in question
        assert main(["--hint", str(n)], vars(exercises)) == 0
        assert hint in (said := capsys.readouterr().out) and answer not in said
        assert main(["--answer", str(n)], vars(exercises)) == 0
        said = capsys.readouterr().out  # the question in one line, wherever the docstring breaks it
        assert " ".join(question.split()) in said and answer in said and hint not in said


@pytest.mark.parametrize("words", [["12"], ["0"], ["-1"], ["k3"], ["1", "2"], ["--hint"], ["--hint", "12"], ["--answer", "x"], ["--solve"]])
def test_wrong_words_are_refused_in_one_sentence(words):
    with pytest.raises(SystemExit) as end:
        main(words, vars(exercises))
    assert isinstance(end.value.code, str) and end.value.code.isprintable() and "--help" in end.value.code
