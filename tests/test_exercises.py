"""Protects the exercises: the committed file is unsolved, the real functions solve it, and a
mistake that is easy to make is shown the input that tells."""

import inspect
import math

import pytest
import torch

from env_letters import Task, score_reply
from learn import exercises
from learn.judge import HELP, REAL, cases, main, verdict

BANANA = Task("banana", ("a", "n", "q"), (3, 2, 0))


def test_the_committed_file_is_unsolved(capsys):
    defined = [n for n, f in vars(exercises).items() if inspect.getmodule(f) is exercises]
    assert list(REAL) == list(HELP) == list(cases()) == defined
    assert main([], vars(exercises)) == 1
    page = capsys.readouterr().out
    assert page.count("not done yet") == 11 and "0 of 11 right" in page and "--hint N helps" in page


def test_the_real_functions_solve_it(capsys):
    assert main([], REAL) == 0
    assert "11 of 11 right" in capsys.readouterr().out


def log(*p: float) -> torch.Tensor:
    return torch.tensor(p).log()


SHIFT = (
    log(0.1, 0.6, 0.3).expand(1, 3, 3),
    torch.tensor([[1, 1, 1]]),
    torch.tensor([[False, True]]),
)
LOSS = (log(0.25, 0.3, 0.3), log(0.25, 0.2, 0.2), torch.tensor([1.0, 1, -1]), 0.2, 0.28)


@pytest.mark.parametrize(
    "name, given, expected",  # the examples of the docstrings, worked out by hand
    [
        ("partial_reward", (BANANA, '<answer>{"a": 3, "n": 2, "q": 1}</answer>'), [0.7]),
        ("draw", (log(0.5, 0.25, 0.25), 0.6, 1.0), [1, math.log(1 / 4)]),
        ("draw", (log(0.5, 0.25, 0.25), 0.6, 0.5), [0, math.log(2 / 3)]),
        ("draw", (log(0.5, 0.25, 0.25), 0.6, 0.0), [0, math.log(1 / 2)]),
        ("token_logprobs", SHIFT, [math.log(0.6)]),
        ("group_advantages", (torch.tensor([[1, math.nan, 0]]),), [1, 0, -1]),
        ("group_advantages", (torch.full((1, 3), 0.9),), [0, 0, 0]),
        ("token_weights", ("grpo", torch.tensor([2.0, 8]), 10), [1 / 4, 1 / 16]),
        ("token_weights", ("dr_grpo", torch.tensor([2.0, 8]), 10), [1 / 20, 1 / 20]),
        ("token_weights", ("dapo", torch.tensor([2.0, 8]), 10), [1 / 10, 1 / 10]),
        ("clipped_loss", LOSS, [-1, -1.28, 1.5]),
        ("importance_weights", (log(0.8, 0.5, 3), torch.tensor([0, 0, 1]), 2.0), [0.4, 0.4, 2]),
        ("k3", (log(0.5, 0.3), log(0.25, 0.3)), [0.5 - math.log(0.5) - 1, 0]),
        ("wilson", (13, 32), [0.2552, 0.5774]),
        ("expect", (0.5, 0.05, 0.04, 0.9, 0.05), [0.7]),
    ],
)
def test_the_examples_of_the_docstrings(name, given, expected):
    found = torch.as_tensor(REAL[name](*given)).flatten().tolist()
    assert found == pytest.approx(expected, abs=1e-4)


# --------------------------------------------------------------------------------------- mistakes


def with_mask(prompt, replies, deltas):
    """A reply's end-of-turn token is left out."""
    ids, _ = REAL["conversation"](prompt, replies, deltas)
    return ids, REAL["conversation"](prompt, [reply[:-1] for reply in replies], deltas)[1]


def untempered(logits, uniform, temperature):
    token, _ = REAL["draw"](logits, uniform, temperature)
    return token, logits.log_softmax(-1)[token].item()


def nothing(mean, var, spread, p, noise):
    """With a docstring, as in the file."""
    return 0


MISTAKES = [
    ("partial_reward", lambda task, reply: score_reply(task, reply, "binary", True)["reward"]),
    ("conversation", with_mask),
    ("draw", untempered),
    (
        "token_logprobs",
        lambda logits, ids, mask: REAL["token_logprobs"](logits.roll(-1, 1), ids, mask),
    ),
    ("group_advantages", lambda rewards: REAL["group_advantages"](rewards.nan_to_num(0))),
    ("token_weights", lambda loss, n, most: REAL["token_weights"]("grpo", n, most)),
    ("clipped_loss", lambda now, old, A, low, high: -(now - old).exp() * A),
    ("clipped_loss", lambda now, *rest: REAL["clipped_loss"](now.detach(), *rest)),
    (
        "importance_weights",
        lambda log_ratio, row, cap: REAL["importance_weights"](
            log_ratio, torch.arange(len(row)), cap
        ),
    ),
    ("k3", lambda now, reference: now - reference),
    ("wilson", lambda x, n: REAL["wilson"](x + 1, n + 2)),
    ("wilson", lambda x, n: x / n),
    ("wilson", lambda x, n: print(x / n)),  # the return was forgotten
    ("expect", nothing),
    ("expect", lambda mean, var, spread, p, noise: p),
]


@pytest.mark.parametrize("name, mistaken", MISTAKES)
def test_a_mistake_is_shown_the_input_that_tells(name, mistaken):
    said = verdict(name, mistaken)
    assert said.startswith(f"not yet: {name}(")
    assert " and should give " in said or " raises " in said


@pytest.mark.parametrize("n, name", enumerate(HELP, 1))
def test_every_exercise_has_a_hint_and_an_answer(capsys, n, name):
    for flag, words in zip(("--hint", "--answer"), HELP[name]):
        assert main([flag, str(n)], {}) == 0 and capsys.readouterr().out == words + "\n"
