"""The other side of learn/exercises.py: the judge, the hints and the answers. Read it last.

A reader's function is compared with the real one on every case of learn/cases.py. If it differs,
each usual mistake is tried on the same input: one that gives the same result is most likely what
happened, and is named. So nothing here knows a second right solution, or looks at code.

Run me: `python -m learn.exercises`
"""

import argparse
import copy
import inspect
import sys
import traceback
from pathlib import Path

import torch

from learn.cases import CHECKS, WITH_SLOPE

# name: (hint, answer to the question)
TOLD = {
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


# ---------------------------------------------------------------------------------------- the judge


def attempt(function, case: tuple):
    """What the function returns, or the exception it raises. It gets a copy of the case, because a
    reader's function may change what it is given."""
    try:
        return function(*copy.deepcopy(case))
    except Exception as error:
        return error


def with_slope(function):
    """f(logprobs, …) -> [M] becomes (f's values, d (their sum) / d logprobs)."""

    def both(now, *rest):
        now = now.requires_grad_()
        out = function(now, *rest)
        if not isinstance(out, torch.Tensor):
            return out
        slope = (
            torch.autograd.grad(out.sum(), now, allow_unused=True)[0] if out.requires_grad else None
        )
        return out.detach(), torch.zeros_like(now) if slope is None else slope

    return both


def same(a, b) -> bool:
    """Equal but for rounding: numbers, tensors, lists of numbers, tuples of these. NaN is NaN."""
    if isinstance(b, tuple):
        return isinstance(a, tuple | list) and len(a) == len(b) and all(map(same, a, b))
    try:
        a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    except (TypeError, ValueError, RuntimeError):
        return False
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def shown(x) -> str:
    """[1.0, nan] -> '[1, nan]', short enough to be read."""
    if isinstance(x, torch.Tensor):
        x = x.tolist()
    if isinstance(x, tuple):
        return f"({', '.join(map(shown, x))})"
    if isinstance(x, list):
        text = f"[{', '.join(map(shown, x))}]"
    elif isinstance(x, float):
        text = f"{x:.4g}"
    else:
        text = repr(int(x) if isinstance(x, bool) else x)
    return text if len(text) <= 240 else text[:239] + "…"


def verdict(name: str, function) -> str:
    """'right', 'not done yet', or 'not yet: …' with the first input on which it differs."""
    real, cases, mistakes = CHECKS[name]()
    judged = with_slope if name in WITH_SLOPE else lambda f: f
    outs, wanted = ([attempt(judged(f), case) for case in cases] for f in (function, real))
    if any(isinstance(out, NotImplementedError) and not out.args for out in outs):
        return "not done yet"
    right = [not isinstance(out, Exception) and same(out, w) for out, w in zip(outs, wanted)]
    if all(right):
        return "right"
    wrong = right.index(False)
    out = outs[wrong]
    words = inspect.signature(function).parameters
    given = ", ".join(f"{word}={shown(value)}" for word, value in zip(words, cases[wrong]))
    if isinstance(out, Exception):
        return f"not yet: {place_of(out, function)}; given was {given}"
    if out is None:
        return f"not yet: {name}({given}) gives nothing; is there a return?"
    agreed = {}  # mistake: on which cases it gives what the reader's function gives
    for why, mistake in mistakes.items():
        agreed[why] = [same(attempt(judged(mistake), case), o) for case, o in zip(cases, outs)]
    candidates = [why for why in agreed if agreed[why][wrong]]
    likely = max(candidates, key=lambda why: sum(agreed[why]), default="")
    hint = "It is none of the mistakes that we know; --hint may help."
    what = " (the values, then their gradient)" if judged is with_slope else ""
    should = f"gives {shown(out)} and should give {shown(wanted[wrong])}{what}"
    return f"not yet: {name}({given}) {should}. " + (f"Likely: {likely}." if likely else hint)


def place_of(error: Exception, function) -> str:
    """'line 12 of exercises.py raises ValueError: …': the last line of the reader's own file."""
    code = function.__code__
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    line = lines[-1] if lines else code.co_firstlineno
    text = " ".join(str(error).split())[:200]
    return f"line {line} of {Path(code.co_filename).name} raises {type(error).__name__}: {text}"


def number(word: str) -> int:
    if word not in map(str, range(1, len(CHECKS) + 1)):
        raise argparse.ArgumentTypeError(f"there is no exercise {word}; choose 1 to {len(CHECKS)}")
    return int(word)


def main(argv: list[str], yours: dict) -> int:
    """Check, or tell. yours: {name: the reader's function}. Returns the exit status: 0 if all that
    was checked is right."""
    program = "python -m learn.exercises"
    parser = argparse.ArgumentParser(
        prog=program,
        description="Checks the exercises in learn/exercises.py against the real functions.",
    )
    parser.error = lambda why: sys.exit(f"{why}; {program} --help shows what can be asked")
    parser.add_argument("exercise", type=number, nargs="?", help="check this one only")
    parser.add_argument("--hint", type=number, metavar="N", help="a hint for exercise N")
    parser.add_argument(
        "--answer", type=number, metavar="N", help="the question at the end of exercise N, answered"
    )
    args, names = parser.parse_args(argv), list(CHECKS)
    if args.hint:
        name = names[args.hint - 1]
        print(f"{name}: {TOLD[name][0]}")
        return 0
    if args.answer:
        name = names[args.answer - 1]
        question = (inspect.getdoc(yours[name]) or "").partition("Question: ")[2]
        print(" ".join(question.split()) + f"\n\n{TOLD[name][1]}")
        return 0
    chosen = [names[args.exercise - 1]] if args.exercise else names
    verdicts = {name: verdict(name, yours[name]) for name in chosen}
    for name, said in verdicts.items():
        print(f"{names.index(name) + 1:2}  {name:18}  {said}")
    left = [name for name in chosen if verdicts[name] != "right"]
    if not left:
        whole = f"All {len(names)} are right: you have written the heart of it."
        print("\nRight." if args.exercise else f"\n{whole}")
        return 0
    print(
        f"\n{len(chosen) - len(left)} of {len(chosen)} right. Next is {left[0]} in "
        f"learn/exercises.py; {program} --hint {names.index(left[0]) + 1} helps."
    )
    return 1
