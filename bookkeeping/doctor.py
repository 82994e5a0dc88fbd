"""What is wrong with this run? Symptoms read off its metrics, with a likely cause and a cure.

A run that learns nothing looks much like one that does: lines go by and nothing raises. So after
every update the doctor checks the newest lines of metrics.jsonl (grpo.update and evaluate.summarize
explain their columns) for the few things that usually go wrong. It reports each symptom once, when
it first sees it, and summary.json keeps it. The doctor never stops a run. A loss or a log-prob that
is not a number does, where it arises, before it can reach a checkpoint.

    symptom              seen in             for  most often caused by
    collapse             reward              5    a learning rate that is too high
    stuck                groups_with_signal  5    one step that broke the policy: the rate again
    broken               format              3    the same, seen in replies that cannot be read
    no signal            groups_with_signal  10   a task that is too hard
    few groups           groups_with_signal  30   the same, now and then right: nothing is learnt
    solved               groups_with_signal  10   no illness: nothing is left to learn
    no gradient          grad_norm           10   a frozen adapter, gradient checkpointing
    noise, KL            entropy, kl_ref     3, 5 a learning rate that is too high
    cut short            truncated           5    --max-tokens too small, or a stop token not learnt
    errors               errors              3    a bug in the environment
    stop token           stop_trained        1    the end-of-turn token is masked
    sequence ratio       stretch             2    a reply's ratio is clipped as if it were a token's
    not exact            exact, fraction     1    "correct" is counted as reward > 0
    pays something else  reward, exact       10   partial credit that rewards a guess
    dropout              mismatch, twice     3    model.train() in the update
    stale                mismatch            3    the sampler has old weights
    two distributions    mismatch            3    another temperature, top-k or top-p in the sampler
    uncorrected          ratio, mismatch     3    --importance none with samples of old policies

Most of the last eight are mistakes in the code around a run; bookkeeping/failures.py makes each on
purpose. (A ninth, `template`, is found in the prompts themselves: refusals.prompt_warnings.)

After every evaluation the doctor checks evals.jsonl (EVALUATED), where tasks can be compared in
pairs:

    no SFT, bad SFT      the same after SFT as before, or lower
    pays something else  reward up, exact down since SFT
    lost, past its best  exact or reward below what it was after SFT, or below its best

How often does it cry wolf there? While a run trains, a difference counts from 4 standard errors on
(SURE); at the end, which comes once, from 3 on. Of 40 made-up runs that stood still, evaluated 20
times each, two at most get a warning (tests/test_doctor.py). The price: a loss of 8 points on 256
tasks is reported in half of the runs that end with it. The interval in the report shows the others.

The same rules judge the logs of TRL, Unsloth, ms-swift, verl and prime-rl, which logs.py turns into
such lines. Their columns allow a few more rules (LIMITS: far off, engine, thrown away, learning
rate), and so does the end of a whole log (AT_END): not a number, entropy collapse, only in
training, still, warm-up.

cures.toml has each symptom's causes, and its cures in every framework's flags.

Run me: `python -m bookkeeping.doctor RUN_OR_LOG [--json]`; without a path it shows a made-up run.
Exit status: 0 nothing was found, 1 a symptom was found, 2 the log cannot be read.
"""

import argparse
import json
import math
import tomllib
from collections.abc import Callable
from itertools import chain
from operator import ge, gt, le
from pathlib import Path

import numpy as np

import metrics
from bookkeeping import logs, records

START = 5  # updates that count as the start of a run
FEWEST = 10  # updates; fewer say too little
SURE = 4.0  # standard errors; a test that is repeated needs more than 95%
SURE_AT_END = 3.0  # ... in the final evaluation, which comes once
MEASURABLE = 2.0  # ... that a 95% interval shows
# Below this share of groups with a signal, the gradient is mostly noise. A guess: of the SmolLM2
# runs that learnt sums, six had more and one had fewer; some that stood still had more, too.
FEW = 0.25
SPENT = 0.02  # nats per token; below, a policy says only one thing
# Nats per token, too many whatever came before: a base model's text has an entropy of 2 to 3.
MOST = {"entropy": 4.5, "kl_ref": 2.0}
# {symptom that others may explain, and then is not reported: those that do not explain it}
EXPLAINED = {"few groups": set(), "entropy collapse": {"few groups"}, "still": set()}
LOOKS = 3_000  # rows of a log that are judged; of a longer log every second one, and so on
LONGEST = 1_000  # most lines whose rewards count
STAGES = ("before", "after_sft", "train", "final")  # evaluations that belong to the run
OURS = "picoswarm"
JOURNAL = "learn/FAILURES.md"
TEXTS = tomllib.loads(Path(__file__).with_name("cures.toml").read_text(encoding="utf-8"))
ILLNESSES = TEXTS["symptom"]

Lines = list[dict]
Found = dict[str, str]  # {symptom: the numbers that show it}


def cure(name: str, framework: str) -> str:
    """What to set."""
    illness = ILLNESSES[name]
    return (TEXTS["cure"][illness["cure"]] | illness.get("instead", {}))[framework]


def signs(lines: Lines, rules: list[Callable]) -> Found:
    """What these rules find in a run, as of the last of these lines."""
    told: Found = {}
    for rule in rules if lines else ():
        told |= rule(lines) or {}
    # A broken run also has no signal, and replies that may never end, but those are not the cause.
    if told.keys() & {"broken", "stuck"}:
        hidden = {"no signal", "few groups", "no gradient", "cut short"}
        told = {name: seen for name, seen in told.items() if name not in hidden}
    return told


def symptoms(lines: Lines, rules: list[Callable] | None = None) -> Found:
    """{symptom: "numbers: what they mean; what to do"}, in our own flags.

    lines: metrics.jsonl so far; or, for the rules EVALUATED, what of_run returns.
    """
    return {
        name: f"{seen}: {ILLNESSES[name]['causes'][0]}; {cure(name, OURS)}"
        for name, seen in signs(lines, rules or RULES).items()
    }


def look_at(lines: Lines, evals: Lines = ()) -> dict[str, tuple[int, str]]:
    """{symptom: (update or step, the numbers that show it)}, each where it first appears.

    evals: what of_run returns, for a run of ours.
    """
    # Steps without a reward (TRL, between two generations) have nothing for the rules.
    paid = [line for line in lines if len(every([line], "reward"))] or lines
    outcomes = [{"eval_reward": np.mean(e["reward"])} for e in evals if e["stage"] != "before"]
    stride = math.ceil(len(paid) / LOOKS) or 1
    moments = chain(
        ((paid[:k], RULES) for k in range(stride, len(paid) + 1, stride)),
        [(outcomes + lines, AT_END)] if lines else [],
        ((evals[:k], EVALUATED) for k in range(1, len(evals) + 1)),
    )
    found: dict[str, tuple[int, str]] = {}
    for so_far, rules in moments:
        for name, seen in signs(so_far, rules).items():
            explanations = found.keys() - EXPLAINED.get(name, found.keys())
            if name not in found and not explanations:
                found[name] = (so_far[-1]["update"], seen)
    if "entropy collapse" in found:  # it is why few groups have a signal
        found.pop("few groups", None)
    if "not a number" in found:  # findings at later steps may come from it
        found["not a number"] = (no_numbers(lines)[1][0], found["not a number"][1])
    return dict(sorted(found.items(), key=lambda one: one[1][0]))


# ------------------------------------------------------------------- what rules look at


def every(lines: Lines, name: str) -> np.ndarray:
    values = np.array([line[name] for line in lines if name in line], dtype=float)
    return values[np.isfinite(values)]


def last(lines: Lines, name: str, n: int) -> np.ndarray:
    """A metric's n newest values; NaNs if there are fewer, or if they are old.

    Rules fire if a comparison is true, and with NaN none is.
    """
    values = every(lines[-8 * n :], name)[-n:]
    return values if len(values) == n else np.full(n, math.nan)


def at_level(lines: Lines) -> Lines:
    """The lines at the last one's level: a harder level pays less, and that is no illness."""
    return [line for line in lines[-LONGEST:] if line.get("level") == lines[-1].get("level")]


def rise(values: np.ndarray, fewest: int = 20, n: int = 10) -> tuple[float, float, float, float]:
    """(mean of the first n, of the last n, the rise, the rise in standard errors).

    Noise is measured on neighbours' differences, so that a trend does not count as noise. NaNs if
    there are too few values.
    """
    if len(values) < fewest:
        return (math.nan,) * 4
    before, after = float(np.mean(values[:n])), float(np.mean(values[-n:]))
    error = float(np.std(np.diff(values)) / math.sqrt(n))
    return before, after, after - before, (after - before) / max(error, 1e-9)


def solved(lines: Lines) -> bool:
    """Is nearly all right? A reward beyond 1 is on a scale of its own."""
    now, best = last(lines, aim(lines), FEWEST), max(every(lines, aim(lines)), default=0)
    return now.mean() > 0.9 and best <= 1.0001


def at_its_best(lines: Lines) -> bool:
    """Are the last rewards, on whatever scale, all the highest there ever was?"""
    now, best = last(lines, aim(lines), FEWEST), max(every(lines, aim(lines)), default=0)
    return now.min() > max(best - 1e-6, 0)


def aim(lines: Lines) -> str:
    """The column that counts right answers, if a log has one; or the reward."""
    return "goal" if len(every(lines[-FEWEST:], "goal")) else "reward"


def signal(line: dict) -> float:
    """Above 0 if some group's rewards differ, from whatever a framework logs; NaN if unknown."""
    get = lambda name: line.get(name, math.nan)
    spreads = (
        get("groups_with_signal"),
        get("advantage_max") - get("advantage_min"),
        get("advantage_std"),
        get("reward_std"),
        0.0 if get("reward") == get("reward_max") else math.nan,
    )
    return next(filter(math.isfinite, spreads), math.nan)


def quiet(lines: Lines, n: int) -> bool:
    """In the last n updates that say so, did no group have a signal?"""
    known = every([{"signal": signal(line)} for line in lines[-8 * n :]], "signal")[-n:]
    return len(known) == n and known.max() <= 1e-6


def by_chance(lines: Lines) -> bool:
    """Would chance make the last stretch of updates without a signal?

    With one group per update, many have none: at a share of 60%, ten in a row are nothing. Chance
    makes it if, at the share before it, more than one run in a hundred would have such a stretch.
    The share of a few updates says little, so it is mixed with two of four. A run's first stretch
    has no share before it, and counts.
    """
    groups = every(lines[-LONGEST:], "groups_with_signal")
    if not np.isin(groups, (0, 1)).all():
        return False  # there are more groups in an update
    began = max(np.flatnonzero(groups), default=-1) + 1
    share = (began - groups.sum() + 2) / (began + 4)
    return began * share ** (len(groups) - began) > 0.01


# ------------------------------------------------------------------- rules, after every update
# Each: the lines so far -> {symptom: the numbers that show it}, or None.


def silent(lines: Lines) -> Found | None:
    """A group whose rewards are all equal has advantages of 0, and so no gradient.

    If that is true of all groups, nothing moves. stuck: the policy once scored, and now repeats one
    token; a learning rate of 30 leaves such a policy. solved: all is right, and it was not always;
    a reward function that pays for everything is no success.
    """
    if not quiet(lines, START) or by_chance(lines):
        return None
    here = at_level(lines)
    was, now, ten = (
        last(part, "reward", n).mean()
        for part, n in ((here[:START], START), (here, START), (here, FEWEST))
    )
    if was >= 0.1 and now <= 0.5 * was:
        return {
            "stuck": f"in the last {START} updates all samples of a task scored the same, "
            f"{now:.2f} on average, and at the start it was {was:.2f}"
        }
    if quiet(lines, FEWEST):
        top = solved(here) or at_its_best(here)
        risen = top and every(here[:START], "reward").min() < now - 0.02
        mean = "" if math.isnan(ten) else f" (mean {ten:.2f})"
        told = f"in the last {FEWEST} updates every group's rewards were all equal{mean}"
        return {"solved" if risen else "no signal": told}


def few_groups(lines: Lines, n: int = 30) -> Found | None:
    """A gradient from few groups is mostly noise: the reward has not risen since the start."""
    share = last(lines, "groups_with_signal", n)
    if not (share[-FEWEST:].any() and share.mean() <= FEW):
        return None
    here = at_level(lines)
    was, now, risen, errors = rise(every(here, "reward"), fewest=n)
    if errors <= MEASURABLE and risen <= 0.1 and not solved(here):
        return {
            "few groups": f"in the last {n} updates {share.mean():.0%} of the groups had rewards "
            f"that differ, and the mean reward has not risen ({was:.2f} at first, {now:.2f} now)"
        }


def no_gradient(lines: Lines, n: int = FEWEST) -> Found | None:
    """Groups have a signal, and yet the norm is 0: no weight gets a gradient.

    If no signal is logged, a reward that stays the same shows that there was none. A Trainer that
    logs every tenth step writes the mean share of ten steps, but the norm of the last one: if few
    groups have a signal, zeros are no surprise. Nor are they if all replies were cut short and left
    out of the loss (TRL's mask_truncated_completions).
    """
    norm = last(lines, "grad_norm", n).max()
    if norm > 1e-8 or math.isnan(norm):  # it moves, or it is not known
        return None
    same = np.ptp(last(lines, "reward", n)) < 1e-9 and math.isnan(signal(lines[-1]))
    left_out = last(lines, "truncated", n).min() >= 0.95 and not same
    few = quiet(lines, n) or last(lines, "groups_with_signal", n).mean() <= FEW
    if not (few or left_out):
        told = f"the gradient's norm was 0 in the last {n} updates"
        return {"no signal" if same else "no gradient": told}


def collapse(lines: Lines, n: int = 5) -> Found | None:
    """Has a run fallen off a cliff?

    Compares means of n updates: the last with the best. A cliff is a fall to under 60% of the best,
    by more than 0.1, and by more than 5.5 standard errors. Why not the usual three? The test runs
    after every update and picks the best of all windows, so three raised a false alarm in most long
    noisy runs (31 of 40 simulated ones). With 5.5 none of 40 did, in any of five settings, and a
    fall from 0.80 to 0.14 is still seen five updates later.
    """
    rewards = every(at_level(lines), "reward")
    if len(rewards) < 2 * n:
        return None
    means = np.convolve(rewards, np.ones(n) / n, mode="valid")
    # The noise in a difference of two means of n, from the differences of neighbours.
    error = np.std(np.diff(rewards)) / math.sqrt(n)
    best, now = means.max(), means[-1]
    if best - now > max(0.4 * abs(best), 0.1, 5.5 * error):
        return {
            "collapse": f"the mean reward of the last {n} updates is {now:.2f} and was {best:.2f} "
            "at its best"
        }


def broken(lines: Lines, n: int = 3) -> Found | None:
    """A step that is far too large leaves replies that no environment can read.

    This shows even before there is a reward that could fall.
    """
    here = at_level(lines)
    now = last(here, "format", n)
    best = max(every(here[:-n], "format"), default=0)
    if best >= 0.5 and now.max() <= 0.2 * best:
        return {
            "broken": f"{best:.0%} of the replies had the right format and now {now.mean():.0%} "
            "have"
        }


def errors(lines: Lines, n: int = 3) -> Found | None:
    """Episodes that fail are left out, so the mean of the others may be that of easy tasks."""
    failed, played = last(lines, "errors", n), last(lines, "n", n)
    for share in (failed / np.maximum(failed + played, 1), last(lines, "errors_share", n)):
        if share.min() > 0 and share.mean() >= 0.1:
            return {
                "errors": f"in the last {n} updates {share.mean():.0%} of the episodes ended in an "
                "error and were left out"
            }


def not_exact(lines: Lines) -> Found | None:
    """An exact answer is right in all its parts, so no more answers are exact than parts are right.

    The share of right parts is the fraction in letters, the similarity in alphabet.

    The reward for exact answers says nothing here: an environment may pay more for a shorter one,
    or ten for each. If it does not report how much of an answer is right, the doctor stays silent:
    a reward of 0, 0.5 and 1 looks the same whether 0.5 is for half an answer or for a whole one
    that was not derived.
    """
    part, exact = (
        lines[-1].get(name, math.nan)
        for name in ("fraction" if "fraction" in lines[-1] else "similarity", "exact")
    )
    if part <= exact - 1e-6:
        return {
            "not exact": f"{exact:.0%} of the answers count as exact, and on average "
            f"{part:.0%} of an answer is right"
        }


def pays_something_else(lines: Lines, n: int = 10) -> Found | None:
    """Exact answers are the goal, but the reward is high without them, or rises and they do not.

    An environment may pay more than 1 for an exact answer: `exact_reward` is what it paid for one
    on average, in the updates that had any.
    """
    reward, exact = last(lines, "reward", n).mean(), last(lines, "exact", n).mean()
    scale = max([1.0, *every(lines, "exact_reward")])
    # Beyond the scale with nothing right: its scale is another. --reward partial starts at 0.67.
    if (exact > 0 or reward <= scale) and reward / scale - exact > 0.75:
        return {
            "pays something else": f"the reward is {reward:.2f} where {exact:.0%} of the answers "
            "are exact"
        }
    return rises_alone(lines, "exact", scale)


def rises_alone(lines: Lines, goal: str, scale: float = 1.0) -> Found | None:
    """The reward rises, and right answers do not. scale: the reward for one."""
    was, now, risen, errors = rise(every(lines, "reward"))
    right_was, right, right_risen, _ = rise(every(lines, goal))
    if risen >= 0.05 and errors >= SURE and scale * right_risen <= 0.2 * risen:
        return {
            "pays something else": f"the reward rose from {was:.2f} to {now:.2f}, and right "
            f"answers went from {right_was:.2f} to {right:.2f}"
        }


def disagreement(lines: Lines, n: int = 3) -> Found | None:
    """Sampler and trainer disagree about samples that are said to be the policy's own.

    Such samples have off_policy_steps 0. Rounding explains 1e-7 nats per token on a CPU, and about
    0.01 in bfloat16 with another engine. More than that (the column `rounding`) has one of three
    causes, and each leaves its own trace: dropout also differs from itself, old weights get older,
    two distributions do neither.

    With older samples the ratio must show it: with --importance none it is 1 however old they are,
    because it compares with the policy at the start of the update.
    """
    trained = [line for line in lines if "mismatch" in line]  # not in an update without a signal
    gap, age, ratio, twice = (
        last(trained, name, n) for name in ("mismatch", "off_policy_steps", "ratio", "twice")
    )
    if age.max() > 0:  # other frameworks log no age
        moved = age.min() >= 2 and gap.min() >= 1e-3 and "importance" not in trained[-1]
        if moved and np.abs(ratio - 1).max() <= 1e-6:
            return {
                "uncorrected": f"samples are {age.mean():.0f} updates old and their log-probs have "
                f"moved by {gap[-1]:.3f} nats a token, yet the ratio is 1.000"
            }
        return None
    allowed = lines[-1].get("rounding", 0.03)
    if not gap.min() > allowed:
        return None
    much = (
        f"trainer and sampler give a token log-probs that differ by {gap[-1]:.3f} nats on average, "
        "though the samples are said to be the policy's own"
    )
    if twice.min() > 0.3 * gap.min():
        return {"dropout": f"{much}, and two passes of the trainer differ by {twice[-1]:.3f}"}
    whole = lines[0]["update"] <= max(1, lines[-1]["update"] - lines[-2]["update"])
    first = every(trained, "mismatch")[0] if whole else math.nan
    if first < 0.1 * gap.min():
        return {"stale": f"{much}; in the first update it was {first:.0e}"}
    if first > allowed:
        return {"two distributions": f"{much}, from the first update on"}


# {column: (symptom, for how many updates, which side, the limit, a second limit as a multiple of
# the first updates' value)}. If there are two limits, a column has to be beyond both. noise, KL:
# both start near 0; a policy with more than 1 nat per token has come apart, and one with more than
# MOST is sick, whatever it was before. engine: bfloat16 makes about 0.01 nats per token, 0.01²/2
# of k3 KL, most of it in few tokens. Ten times that is not rounding. Probabilities differ by less
# than their logarithms. stretch: Σ |log of the loss's ratio| / Σ |log-prob now - when sampled|,
# over all tokens: 1 for a ratio per token, and at most 1 for gspo's mean.
LIMITS = {
    "truncated": ("cut short", 5, gt, 0.5, 0),
    "entropy": ("noise", 3, ge, 1, 3),
    "kl_ref": ("KL", 5, ge, 1, 10),
    "stop_trained": ("stop token", 1, le, 0.5, 0),
    "stretch": ("sequence ratio", 2, ge, 2, 0),
    "clipped": ("far off", 3, ge, 0.3, 0),
    "kept_ratio": ("thrown away", 3, le, 0.5, 0),
    "mismatch_kl": ("engine", 3, ge, 0.02, 0),
    "mismatch_probability": ("engine", 3, ge, 0.03, 0),
    "lr": ("learning rate", 10, le, 0, 0),
}
BEYOND = {  # {column: the sentence about the mean of those updates, and of the first ones}
    "truncated": "{:.0%} of the episodes ran out of tokens",
    "entropy": "the entropy of a token was {:.2f} nats, and {:.2f} before",
    "kl_ref": "the KL to the reference was {:.3g} nats, and {:.3g} before",
    "stop_trained": "of the replies that ended by themselves, {:.0%} had their end-of-turn token "
    "in the loss",
    "stretch": "the ratio in the loss moved {:.0f} times as far as a token's log-prob",
    "clipped": "{:.0%} of the tokens were clipped",
    "kept_ratio": "the importance ratio of sampler and trainer was {:.2f} on average, where 1 is "
    "agreement",
    "mismatch_kl": "sampler and trainer disagreed by {:.3g} nats per sampled token (k3 KL)",
    "mismatch_probability": "sampler and trainer disagreed about sampled tokens by {:.3g} in "
    "probability",
    "lr": "the learning rate was 0",
}


def beyond(lines: Lines) -> Found:
    """Columns that are beyond their limit."""
    found = {}
    here = at_level(lines)
    for column, (symptom, n, compare, limit, times) in LIMITS.items():
        values, first = last(here, column, n), every(here[:-n][:START], column)
        was = np.median(first) if len(first) else math.nan
        bound = min(max(times * was, limit), MOST[column]) if times else limit
        if compare(values, bound).all() and not is_no_illness(symptom, lines, values, was):
            found[symptom] = f"in the last {n} updates " + BEYOND[column].format(values.mean(), was)
    return found


def is_no_illness(symptom: str, lines: Lines, values: np.ndarray, was: float) -> bool:
    """With samples of older weights engines may disagree, and a KL may fall from a high start."""
    if symptom == "engine":
        return last(lines, "off_policy_steps", len(values)).min() > 1
    return symptom == "KL" and values.mean() < 0.8 * was


RULES = [
    collapse,
    broken,
    silent,
    few_groups,
    no_gradient,
    errors,
    not_exact,
    pays_something_else,
    disagreement,
    beyond,
]


# ------------------------------------------------------------------- rules, after an evaluation
# Every evaluation plays the same development tasks, so two of them are compared task by task.


def of_run(evals: list[dict], sft_steps: int) -> Lines:
    """The evaluations that the rules look at: those of the trained tasks, during the run."""
    return [e for e in evals if e.get("trained") and e.get("stage") in STAGES[not sft_steps :]]


def rose(before: dict, after: dict, name: str) -> float:
    """By how many standard errors a measure rose, over the tasks of both.

    As in compare.permutation_test: if nothing has changed, every difference could as well have the
    other sign, and the sum of n such differences has variance Σ difference². So at least z² tasks
    have to change before this can reach z, however few there are. Many tasks can be sure of a
    change that is too small to act on (from 1.223 to 1.216 in swarm), so a change of less than 1%
    counts as none.
    """
    was, now = paired(before, after, name)
    if abs(now.mean() - was.mean()) < 0.01 * abs(was.mean()):
        return 0.0
    return (now - was).sum() / np.sqrt(max(((now - was) ** 2).sum(), 1e-12))


def paired(before: dict, after: dict, name: str) -> list[np.ndarray]:
    """A measure in both evaluations, [n] each, over the tasks of both."""
    return [np.array(e[name], dtype=float) for e in records.same_tasks(before, after)]


def went(before: dict, after: dict, name: str) -> str:
    """How a measure changed, in words."""
    was, now = paired(before, after, name)
    what = {"exact": "exact answers", "reward": "the mean reward"}.get(name, name)
    return (
        f"{what} went from {was.mean():.3f} to {now.mean():.3f}, "
        f"{metrics.gain(was, now).signed()}, n={len(now)}, paired"
    )


def after_sft(evals: Lines) -> Found | None:
    """Did SFT do anything, and was it good?"""
    if [e["stage"] for e in evals[-2:]] != ["before", "after_sft"]:
        return None
    before, sft = evals[-2:]
    seen = [
        name
        for name in ("exact", "reward", "format", "reply_tokens")
        if name in sft and name in before
    ]
    if rose(before, sft, seen[0]) < -SURE_AT_END:
        return {"bad SFT": f"over SFT {went(before, sft, seen[0])}"}
    still = all(abs(rose(before, sft, name)) <= MEASURABLE for name in seen)
    if still and len(sft["reward"]) >= 64:  # fewer cannot show that nothing has changed
        told = went(before, sft, seen[0])
        return {"no SFT": f"over SFT {told}, and neither format nor length of the replies moved"}


def after_grpo(evals: Lines) -> Found | None:
    """Did GRPO help? Only the first symptom counts: the others would be the same illness."""
    stages, now = [e["stage"] for e in evals], evals[-1]
    if "after_sft" not in stages[:-1]:
        return None
    goal = "exact" if all("exact" in e for e in evals) else "reward"
    trained = evals[stages.index("after_sft") :]
    sure = SURE_AT_END if now["stage"] == "final" else SURE
    paid, right = (rose(trained[0], now, name) for name in ("reward", goal))
    if paid >= sure and right <= 1 - sure:
        more, moved = (went(trained[0], now, name) for name in ("reward", goal))
        return {"pays something else": f"on development tasks {more}, and {moved}"}
    if right < -sure:
        return {"lost": f"since SFT {went(trained[0], now, goal)}"}
    best = max(trained, key=lambda e: np.mean(e[goal]))
    if rose(best, now, goal) < -SURE:
        return {"past its best": f"since update {best['update']} {went(best, now, goal)}"}


EVALUATED = [after_sft, after_grpo]


# ------------------------------------------------------------------- rules, at the end of a log
# A run that still learns may look like this for a while, and a log may lack its beginning.


def not_a_number(lines: Lines) -> Found | None:
    """NaN or infinity where a number should be.

    If a norm never was a number but the run learns, the logger is at fault (no_numbers); if nothing
    is learnt, the run is.
    """
    name, bad = no_numbers(lines)
    if bad:
        return {
            "not a number": f"{name} is not a finite number in {len(bad)} rows, first at {bad[0]}"
        }


def no_numbers(lines: Lines) -> tuple[str, list[int]]:
    """(the first column that should be a number and is not, at which steps); or ("", []).

    The KL may be no number now and then, if a batch had nothing to average, but not at the end.
    """
    learns = any(abs(rise(every(lines, name))[3]) > SURE for name in ("reward", "loss"))
    for name in ("loss", "grad_norm", "critic", "reward", "kl_ref"):
        bad = [line["update"] for line in lines if not math.isfinite(line.get(name, 0.0))]
        ever, end = every(lines, name), [line for line in lines if name in line][-3:]
        passes = name == "kl_ref" and (len(every(end, name)) or not len(ever))
        if bad and not passes and (len(ever) or not learns):
            return name, bad
    return "", []


def entropy_collapse(lines: Lines) -> Found | None:
    """Entropy falls while a policy learns. Here it fell, and nothing was learnt in return.

    A log may begin after the fall: then there is next to none from its first row on.
    """
    first = last(lines[:FEWEST], "entropy", START).mean()
    end, here = last(lines, "entropy", START), at_level(lines)
    was, now, _, errors = rise(every(here, "reward"))
    learns = solved(here) or last(lines, "groups_with_signal", START).mean() > 0.3
    if end.max() <= max(min(0.1 * first, 0.3), SPENT) and errors <= MEASURABLE and not learns:
        return {
            "entropy collapse": f"the entropy of a token was {first:.3g} nats and is "
            f"{end.mean():.3g}, and the reward went from {was:.2f} to {now:.2f}"
        }


def pays_another_goal(lines: Lines) -> Found | None:
    """The reward rises, and the reward function that counts right answers does not.

    Or the reward stands high and still while right answers go up and down: they hardly count in it.
    """
    rewards, right = every(lines, "reward"), every(lines, "goal")
    if min(len(rewards), len(right)) < 20:
        return None
    now, then, noise = rewards[-10:].mean(), right[-10:].mean(), np.std(np.diff(right))
    if noise > 0.02 and np.std(np.diff(rewards)) < 0.3 * noise and then < now - 0.2:
        return {
            "pays something else": f"the reward is {now:.2f} and does not follow right answers, "
            f"which are {then:.2f}"
        }
    return rises_alone(lines, "goal")


def only_in_training(lines: Lines) -> Found | None:
    """The training reward rises, above that of evaluations, which do not follow."""
    evals, rewards = every(lines, "eval_reward"), every(at_level(lines), "reward")
    was, now, risen, errors = rise(rewards)
    climbed = len({line["level"] for line in lines if "level" in line}) > 1  # easier, as asked
    if len(evals) < 3 or climbed or now < evals[-2:].mean() + 0.1:
        return None
    if risen >= 0.1 and errors >= SURE and evals[-2:].mean() - evals[0] <= 0.2 * risen:
        return {
            "only in training": f"the training reward rose from {was:.2f} to {now:.2f}, and "
            f"evaluations went from {evals[0]:.2f} to {evals[-2:].mean():.2f}"
        }


def still(lines: Lines) -> Found | None:
    """Nothing moves although there is a signal: steps that are too small to see."""
    reward, entropy, tokens = (
        rise(every(lines, name), fewest=30) for name in ("reward", "entropy", "reply_tokens")
    )
    norm, share = last(lines, "grad_norm", 20), last(lines, "groups_with_signal", 20)
    stands = abs(entropy[2]) <= 0.1 * entropy[0] and not abs(tokens[3]) > MEASURABLE
    if share.mean() < 0.1 or not norm.max() > 0 or entropy[1] <= SPENT:
        return None
    if stands and max(abs(reward[3]), abs(entropy[3])) <= MEASURABLE:
        return {
            "still": f"the reward stayed at {reward[1]:.2f} and the entropy at {entropy[1]:.3g} "
            f"nats, although gradients are not 0 (the last norm is {norm[-1]:.2g})"
        }


def always_the_same(lines: Lines) -> Found | None:
    """No signal: the mean reward never changed, in a log that has neither groups nor norms."""
    rewards, norms = every(lines, "reward"), every(lines, "grad_norm")
    unknown = all(math.isnan(signal(line)) for line in lines) and not norms.any()
    if len(rewards) >= 2 * FEWEST and np.ptp(rewards) < 1e-9 and unknown:
        return {"no signal": f"the mean reward was {rewards[0]:.2f} in all of {len(rewards)} rows"}


def warm_up(lines: Lines) -> Found | None:
    """Does the learning rate still rise when the log ends? A run that has only begun may do so."""
    rates, planned = every(lines, "lr"), max(every(lines, "planned"), default=0)
    if len(rates) >= 20 and lines[-1]["update"] >= 0.5 * planned and (np.diff(rates) > 0).all():
        return {"warm-up": f"the rate rose in every step, from {rates[0]:.2g} to {rates[-1]:.2g}"}


AT_END = [
    not_a_number,
    warm_up,
    entropy_collapse,
    pays_another_goal,
    only_in_training,
    always_the_same,
    still,
]


# ------------------------------------------------------------------- the command


def of_ours(folder: Path) -> logs.Log:
    """A run of ours as a log."""
    lines, evals = (records.lines(folder / f"{name}.jsonl") for name in ("metrics", "evals"))
    looked = {column for illness in ILLNESSES.values() for column in illness["columns"]}
    lines = [{name: v for name, v in line.items() if v is not None} for line in lines]
    seen = {name: name for name in looked if any(name in line for line in lines)}
    evals = of_run(evals, records.config_of(folder)["sft_steps"])
    return logs.Log(OURS, lines, seen, [], [str(folder)], evals)


def answer(log: logs.Log) -> dict:
    """All findings, as one JSON object."""
    found = look_at(log.lines, log.evals)
    if "solved" in found:
        log.notes.append(f"solved, so no illness: {found.pop('solved')[1]}")
    told = []
    for name, (step, seen) in found.items():
        illness = ILLNESSES[name]
        told.append(
            {
                "name": name,
                "step": step,
                "seen": seen,
                "columns": [
                    log.theirs[c] for c in (*illness["columns"], "goal") if c in log.theirs
                ],
                "causes": illness["causes"],
                "cure": cure(name, log.framework),
                "journal": f"{JOURNAL}#{illness['journal']}" if "journal" in illness else "",
            }
        )
    steps = [line["update"] for line in log.lines]
    return {
        "files": log.files,
        "framework": log.framework,
        "steps": [min(steps, default=0), max(steps, default=0)],
        "rows": len(steps),
        "columns": log.theirs,
        "notes": log.notes,
        "not_logged": {
            name: how
            for name, how in logs.UNLOGGED.get(log.framework, {}).items()
            if name not in log.theirs
        },
        "symptoms": told,
        "nothing_found": "" if found else nothing_found(log),
    }


def nothing_found(log: logs.Log) -> str:
    """Why a log that looks odd may be fine, and how much was checked."""
    n, loss, norms = len(log.lines), every(log.lines, "loss"), every(log.lines, "grad_norm")
    if n < FEWEST:
        return f"too short to tell: {n} steps, and most rules need {FEWEST} to 30"
    if log.framework == logs.TRL and "reward" not in log.theirs:
        return "this log has no reward: it may be of SFT or DPO, and little could be looked at"
    said = "nothing wrong was found in what was looked at"
    if len(loss) and np.median(np.abs(loss)) < 0.1 and len(norms) and np.median(norms) > 0:
        said += (
            "; a loss near 0 is normal here, because advantages add up to 0 within each group and "
            "with one update per batch (num_iterations=1, ppo_epochs=1) the ratio is 1 when it is "
            "computed: the value cancels, its gradient does not (the gradient's norm is "
            f"{np.median(norms):.2g} here)"
        )
    return said


def text(found: dict) -> str:
    """The findings as text for people."""
    first, end = found["steps"]
    out = [
        f"{', '.join(found['files'])}: a log of {found['framework']}, "
        f"steps {first} to {end} ({found['rows']} rows)",
        f"looked at: {', '.join(sorted({*found['columns'].values()}))}",
        *(f"note: {note}" for note in found["notes"]),
    ]
    for one in found["symptoms"]:
        out += [
            "",
            f"step {one['step']}: {one['name']}: {one['seen']}",
            f"  look at     {', '.join(one['columns'])}",
            f"  because of  {one['causes'][0]}",
            *(f"  or of       {cause}" for cause in one["causes"][1:]),
            f"  set         {one['cure']}",
            *(f"  see it      {page}" for page in [one["journal"]] if page),
        ]
    out += ["", found["nothing_found"]] if found["nothing_found"] else []
    out += ["", "could not be looked at, because this log has no:"] if found["not_logged"] else []
    out += [f"  {column}: {how}" for column, how in found["not_logged"].items()]
    return "\n".join(map(records.printable, out))


def command() -> None:
    """`python -m bookkeeping.doctor`, and `picoswarm-doctor` if it is installed."""
    parser = argparse.ArgumentParser("doctor", epilog="docs/doctor.md says what it reads")
    parser.add_argument("path", nargs="?", type=Path, help="a run, a log, or a folder with one")
    parser.add_argument("--json", action="store_true", help="for machines")
    given = parser.parse_args()
    if given.path is None:  # few groups have a signal, and the reward stands still
        stands = {"update": 30, "groups_with_signal": 0.2, "reward": 0.3}
        print(*(f"{name}: {told}" for name, told in symptoms([stands] * 30).items()))
        return
    reader = of_ours if (given.path / "evals.jsonl").exists() else logs.read
    try:
        with records.foreign(given.path):
            found = answer(reader(given.path))
    except SystemExit as unreadable:
        found = {"error": str(unreadable)}
    print(json.dumps(found, indent=1) if given.json else found.get("error") or text(found))
    raise SystemExit(2 if "error" in found else bool(found["symptoms"]))


if __name__ == "__main__":
    command()
