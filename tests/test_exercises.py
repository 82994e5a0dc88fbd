"""Protects the exercises: the committed file is unsolved, the real functions solve it, so does a
second way of writing each, and a mistake that is easy to make is shown the input that tells."""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch

import rollout
from env_letters import Task, parse_answer
from fast import sampler
from learn import exercises
from learn.judge import REAL, TOLD, cases, main, verdict
from rollout import Episode

NAN = float("nan")
BANANA = Task("banana", ("a", "n", "q"), (3, 2, 0))


def test_the_committed_file_is_unsolved(capsys):
    defined = [n for n, f in vars(exercises).items() if inspect.getmodule(f) is exercises]
    assert list(REAL) == list(TOLD) == list(cases()) == defined
    assert main([], vars(exercises)) == 1
    told = capsys.readouterr().out
    assert told.count("not done yet") == 11 and "0 of 11 right" in told and "--hint 1 helps" in told


def test_the_real_functions_solve_it(capsys):
    assert main([], REAL) == 0
    assert "11 of 11 right" in capsys.readouterr().out


def test_the_conversation_is_that_of_rollout():
    """By take_turn alone; what stands between two turns is put into the delta's place."""
    policy = SimpleNamespace(stop_ids={2}, name="numbers", tokenizer=Numbers())
    for prompt, replies, deltas in cases()["conversation"]:
        episode = Episode(0, 0, list(prompt), [False] * len(prompt), [0.0] * len(prompt))
        for reply, delta in zip(replies, [*deltas, None]):
            said = [{"role": "user", "content": " ".join(map(str, delta or []))}]
            sample = sampler.Sample(list(reply), [0.0] * len(reply), True)
            env = SimpleNamespace(step=lambda _: (said, delta is None), think=False)  # noqa: B023
            rollout.take_turn(policy, episode, env, sample, 10**9)
        assert (episode.token_ids, episode.sampled) == REAL["conversation"](prompt, replies, deltas)


class Numbers:
    """A tokenizer whose texts are the ids themselves: "7 8 2" <-> [7, 8, 2]."""

    added_tokens_decoder, all_special_tokens, eos_token_id = {}, [], 2

    def __call__(self, text, **_):
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def apply_chat_template(self, messages, **_):
        return " ".join(message["content"] for message in messages)


def log(*p: float) -> torch.Tensor:
    return torch.tensor(p).log()


SHIFT = (log(0.1, 0.6, 0.3).expand(1, 3, 3), torch.tensor([[1, 1, 1]]), torch.tensor([[False, True]]))
LOSS = (log(0.25, 0.3, 0.3), log(0.25, 0.2, 0.2), torch.tensor([1.0, 1, -1]), 0.2, 0.28)


@pytest.mark.parametrize(
    "name, given, expected",  # the examples of the docstrings, worked out by hand
    [
        ("partial_reward", (BANANA, '<answer>{"a": 3, "n": 2, "q": 1}</answer>'), 0.7),
        ("draw", (log(0.5, 0.25, 0.25), 0.6, 1.0), (1, math.log(1 / 4))),
        ("draw", (log(0.5, 0.25, 0.25), 0.6, 0.5), (0, math.log(2 / 3))),
        ("draw", (log(0.5, 0.25, 0.25), 0.6, 0.0), (0, math.log(1 / 2))),
        ("token_logprobs", SHIFT, [math.log(0.6)]),
        ("group_advantages", (torch.tensor([[1, NAN, 0]]),), [1, 0, -1]),
        ("group_advantages", (torch.full((1, 3), 0.9),), [0, 0, 0]),
        ("token_weights", ("grpo", torch.tensor([2.0, 8]), 10), [1 / 4, 1 / 16]),
        ("token_weights", ("dr_grpo", torch.tensor([2.0, 8]), 10), [1 / 20, 1 / 20]),
        ("token_weights", ("dapo", torch.tensor([2.0, 8]), 10), [1 / 10, 1 / 10]),
        ("clipped_loss", LOSS, [-1, -1.28, 1.5]),
        ("importance_weights", (log(0.8, 0.5, 3), torch.tensor([0, 0, 1]), 2.0), [0.4, 0.4, 2]),
        ("k3", (log(0.5, 0.3), log(0.25, 0.3)), [0.5 - math.log(0.5) - 1, 0]),
        ("wilson", (13, 32), (0.2552, 0.5774)),
        ("expect", (0.5, 0.05, 0.04, 0.9, 0.05), 0.7),
    ],
)
def test_the_examples_of_the_docstrings(name, given, expected):
    found = torch.as_tensor(REAL[name](*given)).flatten().tolist()
    expected = [expected] if isinstance(expected, float) else expected
    assert found == pytest.approx(list(expected), abs=1e-4)


# ----------------------------------------------------------------------- as a reader would write it


def reward(task, reply, base=0.1):
    answer = parse_answer(reply, len(task.letters) > 1)
    if len(task.letters) == 1 and answer is not None:
        answer = {task.letters[0]: answer}
    if answer is None or set(answer) != set(task.letters):
        return 0.0 if answer is None else base
    right = [answer[c] == n for c, n in zip(task.letters, task.counts)]
    return base + (1 - base) * sum(right) / len(right)


def tokens(prompt, replies, deltas, end=True):
    ids, mask = list(prompt), [False] * len(prompt)
    for i, reply in enumerate(replies):
        ids, mask = ids + reply, mask + [True] * (len(reply) - 1) + [end]
        if i < len(deltas):
            ids, mask = ids + deltas[i], mask + [False] * len(deltas[i])
    return ids, mask


def inverse_cdf(logits, uniform, temperature, says=None):
    if temperature == 0:
        return int(logits.argmax()), float(torch.log_softmax(logits, 0).max())
    sums = torch.softmax(logits.double() / temperature, 0).cumsum(0)
    token = next(i for i, total in enumerate(sums) if uniform < total)
    return token, float(torch.log_softmax(logits / (says or temperature), 0)[token])


def shifted(logits, ids, mask, back=1):
    asked = [(n, t + 1) for n, t in mask.nonzero().tolist()]
    return torch.tensor([torch.log_softmax(logits[n, t - back], -1)[ids[n, t]] for n, t in asked])


def advantages(rewards, ddof=0):
    out = torch.zeros(rewards.shape)
    for g, row in enumerate(rewards.double()):
        good = ~row.isnan()
        if good.sum() > 1:
            x = row[good]
            out[g, good] = ((x - x.mean()) / (x.std(correction=ddof) + 1e-6)).float()
    return out


def weights(loss, lengths, max_tokens):
    n = len(lengths)
    each = {"grpo": [1 / max(1, x) / n for x in lengths], "dr_grpo": [1 / max_tokens / n] * n}
    return torch.tensor(each.get(loss, [1 / sum(lengths)] * n))


def surrogate(now, old, A, eps, high, pick=torch.min):
    ratio = torch.exp(now - old)
    return -pick(ratio * A, torch.clip(ratio, 1 - eps, 1 + high) * A)


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


def gate(mean, var, spread, p, noise):
    prior = var + max(0.0, spread - noise)
    return mean + prior / (prior + noise) * (p - mean) if prior else mean


SOLVED = [reward, tokens, inverse_cdf, shifted, advantages, weights, surrogate, truncated, kl]
SOLVED = list(zip(REAL, [*SOLVED, interval, gate]))


@pytest.mark.parametrize("name, function", SOLVED)
def test_so_does_another_way_to_write_it(name, function):
    assert verdict(name, function) == "right"


@pytest.mark.parametrize(
    "name, mistaken",
    [
        ("partial_reward", lambda task, reply: reward(task, reply, base=0.0)),
        ("conversation", lambda *given: tokens(*given, end=False)),
        ("draw", lambda *given: inverse_cdf(*given, says=1.0)),
        ("token_logprobs", lambda *given: shifted(*given, back=0)),
        ("group_advantages", lambda rewards: advantages(rewards, ddof=1)),
        ("group_advantages", lambda rewards: advantages(rewards.nan_to_num(0))),
        ("token_weights", lambda loss, n, most: weights("grpo", n, most)),
        ("clipped_loss", lambda *given: surrogate(*given, pick=torch.max)),
        ("clipped_loss", lambda now, *rest: surrogate(now.detach(), *rest)),
        ("importance_weights", lambda *given: truncated(*given, of=torch.mean)),
        ("k3", lambda now, reference: now - reference),
        ("wilson", lambda successes, n: interval(successes, n, 1.645)),
        ("expect", lambda mean, var, spread, p, noise: p),
        ("wilson", lambda successes, n: None),
        ("wilson", lambda successes, n: successes / n),
    ],
)
def test_a_mistake_is_shown_the_input_that_tells(name, mistaken):
    said = verdict(name, mistaken)
    assert said.startswith(f"not yet: {name}(")
    assert " and should give " in said or " raises ZeroDivisionError: " in said


@pytest.mark.parametrize("n, name", enumerate(TOLD, 1))
def test_every_exercise_has_a_question_a_hint_and_an_answer(capsys, n, name):
    text = inspect.getdoc(getattr(exercises, name))
    assert text.startswith(f"{n}. ") and "The real one: " in text and text.endswith("?")
    for flag, words in zip(("--hint", "--answer"), TOLD[name]):
        assert main([flag, str(n)], {}) == 0 and capsys.readouterr().out == words + "\n"


@pytest.mark.parametrize("words", [["12"], ["k3"], ["--solve"]])
def test_wrong_words_are_refused_in_one_sentence(words):
    with pytest.raises(SystemExit) as end:
        main(words, {})
    assert isinstance(end.value.code, str) and "--help" in end.value.code
