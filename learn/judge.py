"""The other side of learn/exercises.py: references, hints and answers. Read it last: it gives
everything away.

A reader's function and the real one are called with the same small inputs: the docstring's example,
edge cases (equal rewards, an episode in error, no task at all), then random ones, the same for
every reader. The first input on which they differ is shown. `--hint N` helps, and `--answer N`
answers the question at the end of an exercise.

Run me: `python -m learn.exercises`
"""

import argparse
import copy
import inspect
import json
import random
import re
from functools import partial
from operator import attrgetter

import torch

import grpo
import metrics
from batch import Batch, importance_weights
from env_letters import Task, make_task, score_reply
from policy import Output, draw, logprobs_and_entropy
from swarm import governance

# name: (hint, answer to the question)
HELP = {
    "partial_reward": (
        "None is worth 0 whatever else is true. For several letters, compare the keys with the "
        "letters asked for before you look at any count.",
        "Guessing: every count that is right by luck earns its share, so a policy that answers "
        "at once has something to live on. binary pays only a reply that is entirely right, "
        "which a guess hardly ever is: nothing until the right habit is found, and then "
        "everything.",
    ),
    "conversation": (
        "Walk along it: False for the prompt, True for a whole reply, False for what follows. "
        "zip(replies, [*deltas, []]) gives the last reply an empty delta.",
        "To stop. The token that ends a reply gets no gradient, neither in good replies nor in "
        "bad ones, so replies run on until --max-tokens cuts them off.",
    ),
    "draw": (
        "p = (logits / temperature).softmax(-1), then p.cumsum(-1); the token is the first "
        "whose sum is larger than uniform (torch.searchsorted(…, right=True)). Temperature 0 is "
        "a separate case.",
        "Because a log-prob is of a distribution, and that one was sampled from. The ratio "
        "p_now / p_old would not be 1 even for a policy that has not moved, and the gradient "
        "would be that of a policy that never played.",
    ),
    "token_logprobs": (
        "logits[:, :-1].log_softmax(-1) is about tokens 1 … T-1. gather(-1, ids[:, 1:, None]) "
        "picks those, and [mask] what was asked for.",
        "The first token has none, because nothing comes before it; the last position's logits "
        "are thrown away, because they predict a token that nobody sampled. So there are T-1 of "
        "them, and the mask is [N, T-1].",
    ),
    "group_advantages": (
        "valid = ~rewards.isnan(), n = valid.sum(1, keepdim=True).clamp(min=1); the mean is "
        "rewards.nan_to_num(0).sum(1, keepdim=True) / n. torch.where puts the 0 where an "
        "episode broke. Begin with rewards.double().",
        "Exactly 0, and it is no bug: if all answers score the same, none is better than the "
        "others. The tasks are solved (or, if every reward is 0, too hard); grpo.update skips "
        "such groups, and bookkeeping/doctor.py says so if it goes on.",
    ),
    "token_weights": (
        "Write the whole loss as a sum over all tokens and look at what stands before one of "
        "them. torch.full_like(lengths, …) if it is the same for all.",
        "The long ones: a reply's weight is shared out among its tokens, so each token of a "
        "wrong reply that is ten times as long is pushed down a tenth as hard. Wrong replies "
        "may grow longer and longer. Dr. GRPO divides all by one constant, dapo by all tokens.",
    ),
    "clipped_loss": (
        "ratio = (logprobs - old).exp(). Two products, torch.minimum of them, and a minus in "
        "front: an optimizer makes things small.",
        "On-policy every ratio is 1, so the value is minus the mean advantage, and that is 0 by "
        "construction. The gradient of ratio · A is A · grad log p, a different direction for "
        "every token, and does not cancel. Watch the reward and grad_norm instead.",
    ),
    "importance_weights": (
        "The log of a product is a sum: torch.zeros(rows).index_add(0, row, log_ratio), then "
        "[row] gives each token its episode's. Clamp before exp, or a long episode overflows.",
        "0.99 each, hardly less than full weight; here 0.99 ** 1000 = 0.00004. Token by token "
        "nobody notices that the policy has left this reply behind, and such runs broke "
        "(results/offpolicy.json).",
    ),
    "k3": (
        "log r = reference - logprobs, in this order; the samples come from the policy.",
        "Its gradient is grad log p whatever the reference says, and that is 0 on average: "
        "nothing would pull. And as a number to watch it is noise, negative half of the time; "
        "k3 is never below 0, and close to half the square of the log-ratio if that is small.",
    ),
    "wilson": (
        "Multiply out: p² (n + z²) - p (2x + z²) + x²/n = 0, a quadratic in p. Its middle is (x "
        "+ z²/2) / (n + z²).",
        "The usual one says 1 ± 0: certain after 32 tasks. Wilson says 0.893 to 1: with a true "
        "share of 0.893, 32 right ones in a row come once in forty times.",
    ),
    "expect": (
        "prior = var + max(0, spread - noise). The noisier the reading, the smaller the step "
        "away from mean; keep 0 / 0 in mind.",
        "As the reading alone does if the gain is 1: a reading without noise, or an agent of "
        "whom nothing is known (a large var). It hardly looks at the reading if the agent's "
        "deals vary no more than readings do and its record is long (a small var).",
    ),
}


# ------------------------------------------------------ the real functions, and what they are given


def conversation(prompt, replies, deltas):  # a test compares it with rollout.take_turn
    ids, sampled = list(prompt), [False] * len(prompt)
    for reply, delta in zip(replies, [*deltas, []]):
        ids += reply + delta
        sampled += [True] * len(reply) + [False] * len(delta)
    return ids, sampled


def clipped_loss(now, old, A, eps, eps_high):
    batch = Batch([], None, None, None, old, A, old_logprobs=old)
    output = Output(now, None)
    ratio = grpo.token_ratio(batch, output)
    return -grpo.clipped_surrogate(batch, output, ratio, (eps, eps_high))


def token_logprobs(logits, ids, mask):
    """Log-probs of a policy whose model gives these logits."""
    return logprobs_and_entropy(logits[:, :-1][mask], ids[:, 1:][mask])[0]


def token_weights(loss, lengths, max_tokens):
    return grpo.token_weights(grpo.LOSSES[loss].weight, lengths, max_tokens)


REAL = {
    "partial_reward": lambda task, reply: score_reply(task, reply, "partial", True)["reward"],
    "conversation": conversation,
    "draw": lambda logits, uniform, temperature: tuple(
        found.item() for found in draw(logits[None], torch.tensor([uniform]), temperature)
    ),
    "token_logprobs": token_logprobs,
    "group_advantages": grpo.group_advantages,
    "token_weights": token_weights,
    "clipped_loss": clipped_loss,
    "importance_weights": partial(importance_weights, "sequence"),
    "k3": grpo.k3,
    "wilson": lambda x, n: attrgetter("low", "high")(metrics.proportion(x, n)),
    "expect": lambda mean, var, spread, p, noise: governance.expect(
        governance.Belief(mean, var, spread), p, noise
    ),
}
WITH_SLOPE = ("clipped_loss", "k3")  # here the gradient is what matters


def cases() -> dict[str, list[tuple]]:
    """The inputs of each function: the example, edge cases, then random ones."""
    rng, g, nan = random.Random(0), torch.Generator().manual_seed(0), float("nan")
    noise = lambda *shape: torch.randn(*shape, generator=g)
    floats = lambda *numbers: torch.tensor(numbers).float()
    logs = lambda *numbers: floats(*numbers).log()
    three, one = Task("banana", ("a", "n", "q"), (3, 2, 0)), Task("banana", ("a",), (3,))
    right = '{"a": 3, "n": 2, "q": 0}'
    answers = [
        '{"a": 3, "n": 2, "q": 1}',
        right,
        '{"a": 3, "n": 2, "q": 0, "b": 0}',
        '{"a": 3, "n": 2}',
        "{}",
        "3, 2, 0",
    ]

    def letters():
        task = make_task(rng, 6)
        counts = {c: n + (rng.random() < 0.3) for c, n in zip(task.letters, task.counts)}
        return task, f"<answer>{json.dumps(counts)}</answer>"

    def shift(N, T, V, share):
        mask = torch.rand(N, T - 1, generator=g) < share
        return noise(N, T, V), torch.randint(0, V, (N, T), generator=g), mask

    noisy = lambda: (rng.random(), 0.06 * rng.random(), 0.08 * rng.random())
    row = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    lengths = [((2, 8), 10), ((5, 5), 10), ((0, 4), 10), ((7,), 10), ((3, 64, 20, 9), 64)]
    return {
        "partial_reward": [
            *((three, f"<answer>{words}</answer>") for words in answers),
            *((three, reply) for reply in ("", right, f"<think><answer>{right}</answer></think>")),
            *((one, f"<answer>{words}</answer>") for words in ('{"a": 3}', "3", "4", "three")),
            *(letters() for _ in range(20)),
        ],
        "conversation": [
            ([1, 5, 2, 1], [[7, 8, 2], [9, 2]], [[1, 6, 2, 1]]),
            ([5], [[2], [2]], [[6]]),
            ([9, 8, 1], [[3, 4, 5, 2]], []),
            ([9, 1], [[3, 2], [4, 4, 2], [5, 6, 7, 2]], [[8, 1], [7, 7, 1]]),
        ],
        "draw": [
            *((logs(0.5, 0.25, 0.25), 0.6, t) for t in (1.0, 0.5, 0.0, 2.0)),
            *((3 * noise(5), rng.random(), t) for t in (0.0, 0.3, 0.7, 1.0, 1.5) * 4),
        ],
        "token_logprobs": [shift(1, 3, 3, 1.1), shift(1, 3, 3, 0), shift(3, 6, 5, 0.6)],
        "group_advantages": [
            (floats([1, 0, 0, 1]),),
            (floats([1, 1, 1, 1]),),
            (floats([1, nan, 0]),),
            (floats([nan, nan], [0, 2]),),
            (floats([1, 0], [3, 1]),),
            (floats([0.9] * 3),),
            (torch.rand(5, 4, generator=g),),
        ],
        "token_weights": [
            (loss, floats(*n), most) for n, most in lengths for loss in ("grpo", "dr_grpo", "dapo")
        ],
        "clipped_loss": [
            (logs(0.25), logs(0.25), floats(1), 0.2, 0.28),
            (logs(0.3, 0.3), logs(0.2, 0.2), floats(1, -1), 0.2, 0.28),
            (logs(0.1, 0.1), logs(0.2, 0.2), floats(1, -1), 0.2, 0.28),
            *((0.3 * noise(6) - 2, 0.3 * noise(6) - 2, noise(6), 0.1, 0.5) for _ in range(5)),
        ],
        "importance_weights": [
            (logs(0.8, 0.5, 3), torch.tensor([0, 0, 1]), 2.0),
            (logs(4, 0.1, 0.1), torch.tensor([0, 0, 0]), 2.0),
            (floats(500, 500, -500), torch.tensor([0, 0, 1]), 2.0),
            *((0.3 * noise(7), row, cap) for cap in (1.0, 1.5, 2.0) * 2),
        ],
        "k3": [
            (logs(0.5), logs(0.25)),
            *((noise(5) - 3, noise(5) - 3) for _ in range(5)),
        ],
        "wilson": [
            *((13, 32), (0, 0), (0, 10), (10, 10), (1, 1), (128, 256)),
            *((rng.randint(0, n), n) for n in (2, 5, 20, 64, 256, 1024)),
        ],
        "expect": [
            (0.5, 0.05, 0.04, 0.9, 0.05),
            (0.5, 0.0, 0.01, 0.9, 0.04),
            (0.5, 0.05, 0.04, 0.9, 0.0),
            *((*noisy(), rng.random(), rng.uniform(0.001, 0.05)) for _ in range(20)),
        ],
    }


# ---------------------------------------------------------------------------------------- the judge


def same(a, b) -> bool:
    """Equal up to rounding: numbers, tensors, lists of numbers, tuples of these. NaN is NaN."""
    if isinstance(b, tuple):
        return isinstance(a, tuple | list) and len(a) == len(b) and all(map(same, a, b))
    try:
        a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    except (TypeError, ValueError, RuntimeError):
        return False
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def shown(x) -> str:
    """tensor([0.5]) -> '[0.5]', short enough to be read."""
    plain = lambda x: x.tolist() if isinstance(x, torch.Tensor) else x
    text = repr(tuple(map(plain, x)) if isinstance(x, tuple) else plain(x))
    return re.sub(r"\d+\.\d+(e-\d+)?", lambda number: f"{float(number[0]):.4g}", text)[:240]


def with_slope(function):
    """f(logprobs, …) -> [M] becomes (f's values, d (their sum) / d logprobs)."""

    def both(now, *rest):
        total = lambda logprobs: function(logprobs, *rest).sum()
        return function(now, *rest), torch.autograd.functional.vjp(total, now)[1]

    return both


def unwritten():
    """Nothing but a docstring, as each function of learn/exercises.py at first."""


def verdict(name: str, function) -> str:
    """'right', 'not done yet', or 'not yet: …' with the first input on which it differs."""
    code, empty = getattr(function, "__code__", None), unwritten.__code__
    # The constants, too, without the docstring: only they tell `return 0` from nothing.
    if code and (code.co_code, code.co_consts[1:]) == (empty.co_code, empty.co_consts[1:]):
        return "not done yet"
    yours, real = function, REAL[name]
    if name in WITH_SLOPE:
        yours, real = with_slope(yours), with_slope(real)
    for case in cases()[name]:
        words = zip(inspect.signature(function).parameters, case)
        call = f"{name}({', '.join(f'{word}={shown(value)}' for word, value in words)})"
        expected = real(*copy.deepcopy(case))  # copies: a reader's function may change what it gets
        try:
            found = yours(*copy.deepcopy(case))
        except Exception as error:
            message = " ".join(str(error).split())[:200]
            return f"not yet: {call} raises {type(error).__name__}: {message}"
        if not same(found, expected):
            what = " (the values, then their gradient)" if name in WITH_SLOPE else ""
            return f"not yet: {call} gives {shown(found)} and should give {shown(expected)}{what}"
    return "right"


def main(argv: list[str], yours: dict) -> int:
    """Check functions, or print a hint or an answer. yours: {name: the reader's function}.

    Returns the exit status: 0 if everything that was checked is right.
    """
    names = list(REAL)
    number = {"type": int, "choices": range(1, len(names) + 1), "metavar": "N"}
    parser = argparse.ArgumentParser("python -m learn.exercises")
    parser.add_argument("exercise", nargs="?", help="check this one only", **number)
    parser.add_argument("--hint", help="a hint for exercise N", **number)
    parser.add_argument("--answer", help="the question of exercise N, answered", **number)
    args = parser.parse_args(argv)
    if args.hint or args.answer:
        hint, answer = HELP[names[(args.hint or args.answer) - 1]]
        print(hint if args.hint else answer)
        return 0
    chosen, right = [args.exercise] if args.exercise else range(1, len(names) + 1), 0
    for n in chosen:
        result = verdict(names[n - 1], yours[names[n - 1]])
        print(f"{n:2}  {names[n - 1]:18}  {result}")
        right += result == "right"
    print(f"\n{right} of {len(chosen)} right; --hint N helps.")
    return int(right < len(chosen))
