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
    few groups           groups_with_signal  30   the same, now and then right: nothing is learned
    solved               groups_with_signal  10   no illness: nothing is left to learn
    no gradient          grad_norm           10   a frozen adapter, gradient checkpointing
    noise, KL            entropy, kl_ref     3, 5 a learning rate that is too high
    cut short            truncated           5    --max-tokens too small, or no stop token learned
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
rate), and so does the end of a whole log (AT_END): entropy collapse, only in training, still,
warm-up. A number that is none is looked for first, in all lines.

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
from pathlib import Path

import numpy as np

import metrics
from bookkeeping import logs, records, tables

START = 5  # updates that count as the start of a run
FEWEST = 10  # updates; fewer say too little
SURE = 4.0  # standard errors; a test that is repeated needs more than 95%
SURE_AT_END = 3.0  # ... in the final evaluation, which comes once
MEASURABLE = 2.0  # ... that a 95% interval shows
# Below this share of groups with a signal, the gradient is mostly noise. A guess: of the SmolLM2
# runs that learned sums, six had more and one had fewer; some that stood still had more, too.
FEW = 0.25
SPENT = 0.02  # nats per token; below, a policy says only one thing
# What a broken policy shows as well: these are not reported together with it.
OF_BROKEN = {"no signal", "few groups", "no gradient", "cut short"}
# {symptom that earlier ones explain, and then is not reported: those that do not explain it}
EXPLAINED = {"few groups": {"not a number"}, "entropy collapse": {"few groups"}, "still": set()}
LOOKS = 3_000  # rows of a log that are judged; of a longer log every second one, and so on
LONGEST = 1_000  # most lines whose rewards count
STAGES = ("before", "after_sft", "train", "final")  # evaluations that belong to the run
OURS = "picoswarm"
TEXTS = tomllib.loads(Path(__file__).with_name("cures.toml").read_text(encoding="utf-8"))
ILLNESSES = TEXTS["symptom"]

Lines = list[dict]
Symptoms = dict[str, str]  # {symptom: the numbers that show it}


def illness_of(name: str, lines: Lines = ()) -> dict:
    """A symptom's entry of cures.toml; its `if_never` replaces what cannot act in these lines.

    That is so if the first of its `never` columns that is logged is 0 in all lines.
    """
    illness = ILLNESSES[name]
    columns = (finite(lines, column) for column in illness.get("never", ()))
    logged = next(filter(len, columns), None)
    return illness if logged is None or logged.any() else illness | illness["if_never"]


def cure(name: str, framework: str, lines: Lines = ()) -> str:
    """What to set."""
    illness = illness_of(name, lines)
    return (TEXTS["cure"][illness["cure"]] | illness.get("instead", {}))[framework]


def signs(lines: Lines, rules: list[Callable]) -> Symptoms:
    """What these rules find in a run, as of the last of these lines."""
    findings: Symptoms = {}
    for rule in rules if lines else ():
        findings |= rule(lines) or {}
    hidden = OF_BROKEN if findings.keys() & {"broken", "stuck"} else set()
    return {name: evidence for name, evidence in findings.items() if name not in hidden}


def symptoms(lines: Lines, rules: list[Callable] | None = None) -> Symptoms:
    """{symptom: "numbers: what they mean; what to do"}, in our own flags.

    lines: metrics.jsonl so far; or, for the rules EVALUATED, what of_run returns.
    """
    return {
        name: f"{evidence}: {illness_of(name, lines)['causes'][0]}; {cure(name, OURS, lines)}"
        for name, evidence in signs(lines, rules or RULES).items()
    }


def look_at(lines: Lines, evals: Lines = ()) -> dict[str, tuple[int, str]]:
    """{symptom: (update or step, the numbers that show it)}, each where it first appears.

    evals: what of_run returns, for a run of ours.
    """
    # Steps without a reward (TRL, between two generations) have nothing for the rules.
    paid = [line for line in lines if math.isfinite(value(line, "reward"))] or lines
    outcomes = [{"eval_reward": np.mean(e["reward"])} for e in evals if e["stage"] != "before"]
    stride = math.ceil(len(paid) / LOOKS) or 1
    moments = chain(
        ((paid[:k], RULES) for k in range(stride, len(paid) + 1, stride)),
        [(outcomes + lines, AT_END)] if lines else [],
        ((evals[:k], EVALUATED) for k in range(1, len(evals) + 1)),
    )
    findings = no_numbers(lines)
    for so_far, rules in moments:
        for name, evidence in signs(so_far, rules).items():
            explanations = findings.keys() - EXPLAINED.get(name, findings.keys())
            if name not in findings and not explanations:
                findings[name] = (so_far[-1]["update"], evidence)
    if "entropy collapse" in findings:  # it is why few groups have a signal
        findings.pop("few groups", None)
    return dict(sorted(findings.items(), key=lambda finding: finding[1][0]))


# ------------------------------------------------------------------- what rules look at


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


# Columns that follow from others.
DERIVED = {
    "signal": signal,
    "goal or reward": lambda line: line.get("goal", line.get("reward", math.nan)),
    # of an answer: the fraction in letters, the similarity in alphabet
    "right": lambda line: line.get("fraction", line.get("similarity", math.nan)),
    "ended": lambda line: 1 - line.get("truncated", math.nan),
    # of the episodes
    "failed": lambda line: line.get(
        "errors_share", value(line, "errors") / max(value(line, "errors") + value(line, "n"), 1)
    ),
}


def value(line: dict, name: str) -> float:
    return DERIVED[name](line) if name in DERIVED else line.get(name, math.nan)


def finite(lines: Lines, name: str) -> np.ndarray:
    """The values of a column, without those that are missing or no number."""
    column = np.array([value(line, name) for line in lines], dtype=float)
    return column[np.isfinite(column)]


def last(lines: Lines, name: str, n: int) -> np.ndarray:
    """A column's n newest values; NaNs if there are fewer, or if they are old.

    Rules fire if a comparison is true, and with NaN none is.
    """
    newest = finite(lines[-8 * n :], name)[-n:]
    return newest if len(newest) == n else np.full(n, math.nan)


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
    now, ever = last(lines, "goal or reward", FEWEST), finite(lines, "goal or reward")
    return now.mean() > 0.9 and max(ever, default=0) <= 1.0001


def at_its_best(lines: Lines) -> bool:
    """Are the last rewards, on whatever scale, all the highest there ever was?"""
    now, ever = last(lines, "goal or reward", FEWEST), finite(lines, "goal or reward")
    return now.min() > max(max(ever, default=0) - 1e-6, 0)


def quiet(lines: Lines, n: int) -> bool:
    """In the last n updates that say so, did no group have a signal?"""
    return last(lines, "signal", n).max() <= 1e-6


def by_chance(lines: Lines) -> bool:
    """Would chance make the last stretch of updates without a signal?

    With one group per update, many have none: at a share of 60%, ten in a row are nothing. Chance
    makes it if, at the share before it, more than one run in a hundred would have such a stretch.
    The share of a few updates says little, so it is mixed with two of four. A run's first stretch
    has no share before it, and counts.
    """
    groups = finite(lines[-LONGEST:], "groups_with_signal")
    if not np.isin(groups, (0, 1)).all():
        return False  # there are more groups in an update
    began = max(np.flatnonzero(groups), default=-1) + 1
    share = (began - groups.sum() + 2) / (began + 4)
    return began * share ** (len(groups) - began) > 0.01


# ------------------------------------------------------------------- rules, after every update
# Each: the lines so far -> {symptom: the numbers that show it}, or None.


def silent(lines: Lines) -> Symptoms | None:
    """A group whose rewards are all equal has advantages of 0, and so no gradient.

    If that is true of all groups, nothing moves. stuck: the policy once scored, and now repeats one
    token; a learning rate of 30 leaves such a policy. solved: all is right, and it was not always;
    a reward function that pays for everything is no success.
    """
    if not quiet(lines, START) or by_chance(lines):
        return None
    here = at_level(lines)
    start, end = (last(part, "reward", START).mean() for part in (here[:START], here))
    if start >= 0.1 and end <= 0.5 * start:
        return {
            "stuck": f"in the last {START} updates all samples of a task scored the same, "
            f"{end:.2f} on average, and at the start it was {start:.2f}"
        }
    if quiet(lines, FEWEST):
        top = solved(here) or at_its_best(here)
        learned = top and finite(here[:START], "reward").min() < end - 0.02
        mean = last(here, "reward", FEWEST).mean()
        shown = "" if math.isnan(mean) else f" (mean {mean:.2f})"
        equal = f"in the last {FEWEST} updates every group's rewards were all equal{shown}"
        return {"solved" if learned else "no signal": equal}


def few_groups(lines: Lines, n: int = 30) -> Symptoms | None:
    """A gradient from few groups is mostly noise: the reward has not risen since the start."""
    share, here = last(lines, "groups_with_signal", n), at_level(lines)
    few = share[-FEWEST:].any() and share.mean() <= FEW
    start, end, gain, errors = rise(finite(here, "reward"), fewest=n)
    if few and errors <= MEASURABLE and gain <= 0.1 and not solved(here):
        return {
            "few groups": f"in the last {n} updates {share.mean():.0%} of the groups had rewards "
            f"that differ, and the mean reward has not risen ({start:.2f} at first, {end:.2f} now)"
        }


def no_gradient(lines: Lines, n: int = FEWEST) -> Symptoms | None:
    """Groups have a signal, and yet the norm is 0: no weight gets a gradient.

    If no signal is logged, a reward that stays the same shows that there was none. A Trainer that
    logs every tenth step writes the mean share of ten steps, but the norm of the last one: if few
    groups have a signal, zeros are no surprise. Nor are they if all replies were cut short and left
    out of the loss (TRL's mask_truncated_completions).
    """
    norm = last(lines, "grad_norm", n).max()
    same = np.ptp(last(lines, "reward", n)) < 1e-9 and math.isnan(signal(lines[-1]))
    left_out = last(lines, "truncated", n).min() >= 0.95 and not same
    few = quiet(lines, n) or last(lines, "groups_with_signal", n).mean() <= FEW
    if norm <= 1e-8 and not (few or left_out):
        zeros = f"the gradient's norm was 0 in the last {n} updates"
        return {"no signal" if same else "no gradient": zeros}


def collapse(lines: Lines, n: int = 5) -> Symptoms | None:
    """Has a run fallen off a cliff?

    Compares means of n updates: the last with the best. A cliff is a fall to under 60% of the best,
    by more than 0.1, and by more than 5.5 standard errors. Why not the usual three? The test runs
    after every update and picks the best of all windows, so three raised a false alarm in most long
    noisy runs (31 of 40 simulated ones). With 5.5 none of 40 did, in any of five settings, and a
    fall from 0.80 to 0.14 is still seen five updates later.
    """
    rewards = finite(at_level(lines), "reward")
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


def broken(lines: Lines, n: int = 3) -> Symptoms | None:
    """A step that is far too large leaves replies that no environment can read.

    This shows even before there is a reward that could fall.
    """
    here = at_level(lines)
    now = last(here, "format", n)
    best = max(finite(here[:-n], "format"), default=0)
    if best >= 0.5 and now.max() <= 0.2 * best:
        return {
            "broken": f"{best:.0%} of the replies had the right format and now {now.mean():.0%} "
            "have"
        }


def errors(lines: Lines, n: int = 3) -> Symptoms | None:
    """Episodes that fail are left out, so the mean of the others may be that of easy tasks."""
    share = last(lines, "failed", n)
    if share.min() > 0 and share.mean() >= 0.1:
        return {
            "errors": f"in the last {n} updates {share.mean():.0%} of the episodes ended in an "
            "error and were left out"
        }


def not_exact(lines: Lines) -> Symptoms | None:
    """An exact answer is right in all its parts, so no more answers are exact than parts are right.

    The reward for exact answers says nothing here: an environment may pay more for a shorter one,
    or ten for each. If it does not report how much of an answer is right, the doctor stays silent:
    a reward of 0, 0.5 and 1 looks the same whether 0.5 is for half an answer or for a whole one
    that was not derived.
    """
    right, exact = value(lines[-1], "right"), value(lines[-1], "exact")
    if right <= exact - 1e-6:
        return {
            "not exact": f"{exact:.0%} of the answers count as exact, and on average "
            f"{right:.0%} of an answer is right"
        }


def pays_something_else(lines: Lines, n: int = 10) -> Symptoms | None:
    """Exact answers are the goal, but the reward is high without them, or rises and they do not.

    An environment may pay more than 1 for an exact answer: `exact_reward` is what it paid for one
    on average, in the updates that had any.
    """
    reward, exact = last(lines, "reward", n).mean(), last(lines, "exact", n).mean()
    scale = max([1.0, *finite(lines, "exact_reward")])
    # Beyond the scale with nothing right: its scale is another. --reward partial starts at 0.67.
    if (exact > 0 or reward <= scale) and reward / scale - exact > 0.75:
        return {
            "pays something else": f"the reward is {reward:.2f} where {exact:.0%} of the answers "
            "are exact"
        }
    return rises_alone(lines, "exact", scale)


def rises_alone(lines: Lines, goal: str, scale: float = 1.0) -> Symptoms | None:
    """The reward rises, and right answers do not. scale: the reward for one."""
    start, end, gain, errors = rise(finite(lines, "reward"))
    right_start, right_end, right_gain, _ = rise(finite(lines, goal))
    if gain >= 0.05 and errors >= SURE and scale * right_gain <= 0.2 * gain:
        return {
            "pays something else": f"the reward rose from {start:.2f} to {end:.2f}, and right "
            f"answers went from {right_start:.2f} to {right_end:.2f}"
        }


def disagreement(lines: Lines, n: int = 3) -> Symptoms | None:
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
    old = age.min() >= 2 and gap.min() >= 1e-3 and "importance" not in trained[-1]
    if old and np.abs(ratio - 1).max() <= 1e-6:
        return {
            "uncorrected": f"samples are {age.mean():.0f} updates old and their log-probs have "
            f"moved by {gap[-1]:.3f} nats a token, yet the ratio is 1.000"
        }
    allowed = lines[-1].get("rounding", 0.03)
    if age.max() > 0 or not gap.min() > allowed:  # other frameworks log no age
        return None
    gap_is_large = (
        f"trainer and sampler give a token log-probs that differ by {gap[-1]:.3f} nats on average, "
        "though the samples are said to be the policy's own"
    )
    if twice.min() > 0.3 * gap.min():
        return {
            "dropout": f"{gap_is_large}, and two passes of the trainer differ by {twice[-1]:.3f}"
        }
    whole = lines[0]["update"] <= max(1, lines[-1]["update"] - lines[-2]["update"])
    first = finite(trained, "mismatch")[0] if whole else math.nan
    if first < 0.1 * gap.min():
        return {"stale": f"{gap_is_large}; in the first update it was {first:.0e}"}
    if first > allowed:
        return {"two distributions": f"{gap_is_large}, from the first update on"}


# {column: (symptom, for how many updates, which side, the limit; the sentence about the mean of
# those updates, and of the first ones)}. engine: bfloat16 makes about 0.01 nats per token, 0.01²/2
# of k3 KL, most of it in few tokens. Ten times that is not rounding. Probabilities differ by less
# than their logarithms. stretch: Σ |log of the loss's ratio| / Σ |log-prob now - when sampled|,
# over all tokens: 1 for a ratio per token, and at most 1 for gspo's mean.
LIMITS = {
    "truncated": ("cut short", 5, np.greater, 0.5, "{:.0%} of the episodes ran out of tokens"),
    "entropy": (
        "noise",
        3,
        np.greater_equal,
        1,
        "the entropy of a token was {:.2f} nats, and {:.2f} before",
    ),
    "kl_ref": (
        "KL",
        5,
        np.greater_equal,
        1,
        "the KL to the reference was {:.3g} nats, and {:.3g} before",
    ),
    "stop_trained": (
        "stop token",
        1,
        np.less_equal,
        0.5,
        "of the replies that ended by themselves, {:.0%} had their end-of-turn token in the loss",
    ),
    "stretch": (
        "sequence ratio",
        2,
        np.greater_equal,
        2,
        "the ratio in the loss moved {:.0f} times as far as a token's log-prob",
    ),
    "clipped": ("far off", 3, np.greater_equal, 0.3, "{:.0%} of the tokens were clipped"),
    "kept_ratio": (
        "thrown away",
        3,
        np.less_equal,
        0.5,
        "the importance ratio of sampler and trainer was {:.2f} on average, where 1 is agreement",
    ),
    "mismatch_kl": (
        "engine",
        3,
        np.greater_equal,
        0.02,
        "sampler and trainer disagreed by {:.3g} nats per sampled token (k3 KL)",
    ),
    "mismatch_probability": (
        "engine",
        3,
        np.greater_equal,
        0.03,
        "sampler and trainer disagreed about sampled tokens by {:.3g} in probability",
    ),
    "lr": ("learning rate", 10, np.less_equal, 0, "the learning rate was 0"),
}
# {column: (the multiple of its first values that it may reach too, nats that are too many whatever
# came before)}. Both start near 0; a policy with more than 1 nat per token has come apart. A base
# model's text has an entropy of 2 to 3.
RELATIVE = {"entropy": (3, 4.5), "kl_ref": (10, 2.0)}


def beyond(lines: Lines) -> Symptoms:
    """Columns that are beyond their limit."""
    symptoms = {}
    here = at_level(lines)
    for column, (symptom, n, compare, limit, sentence) in LIMITS.items():
        values, first = last(here, column, n), finite(here[:-n][:START], column)
        start = np.median(first) if len(first) else math.nan
        if column in RELATIVE:
            times, most = RELATIVE[column]
            limit = min(max(times * start, limit), most)
        # With samples of older weights engines may disagree; a KL may fall from a high start.
        excuses = {
            "engine": last(here, "off_policy_steps", n).min() > 1,
            "KL": values.mean() < 0.8 * start,
        }
        if compare(values, limit).all() and not excuses.get(symptom):
            evidence = sentence.format(values.mean(), start)
            symptoms[symptom] = f"in the last {n} updates {evidence}"
    return symptoms


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
    first, second = tables.paired(*records.same_tasks(before, after), name)
    change = second - first
    if abs(change.mean()) < 0.01 * abs(first.mean()):
        return 0.0
    return change.sum() / np.sqrt(max((change**2).sum(), 1e-12))


def went(before: dict, after: dict, name: str) -> str:
    """How a measure changed, in words."""
    first, second = tables.paired(*records.same_tasks(before, after), name)
    what = {"exact": "exact answers", "reward": "the mean reward"}.get(name, name)
    return (
        f"{what} went from {first.mean():.3f} to {second.mean():.3f}, "
        f"{metrics.gain(first, second).signed()}, n={len(first)}, paired"
    )


def after_sft(evals: Lines) -> Symptoms | None:
    """Did SFT do anything, and was it good?"""
    if [e["stage"] for e in evals[-2:]] != ["before", "after_sft"]:
        return None
    before, sft = evals[-2:]
    measures = [
        name
        for name in ("exact", "reward", "format", "reply_tokens")
        if name in sft and name in before
    ]
    change = went(before, sft, measures[0])
    if rose(before, sft, measures[0]) < -SURE_AT_END:
        return {"bad SFT": f"over SFT {change}"}
    still = all(abs(rose(before, sft, name)) <= MEASURABLE for name in measures)
    if still and len(sft["reward"]) >= 64:  # fewer cannot show that nothing has changed
        return {"no SFT": f"over SFT {change}, and neither format nor length of the replies moved"}


def after_grpo(evals: Lines) -> Symptoms | None:
    """Did GRPO help? Only the first symptom counts: the others would be the same illness."""
    stages, newest = [e["stage"] for e in evals], evals[-1]
    if "after_sft" not in stages[:-1]:
        return None
    goal = "exact" if all("exact" in e for e in evals) else "reward"
    trained = evals[stages.index("after_sft") :]
    sure = SURE_AT_END if newest["stage"] == "final" else SURE
    reward_rose, goal_rose = (rose(trained[0], newest, name) for name in ("reward", goal))
    if reward_rose >= sure and goal_rose <= 1 - sure:
        changes = ", and ".join(went(trained[0], newest, name) for name in ("reward", goal))
        return {"pays something else": f"on development tasks {changes}"}
    if goal_rose < -sure:
        return {"lost": f"since SFT {went(trained[0], newest, goal)}"}
    best = max(trained, key=lambda e: np.mean(e[goal]))
    if rose(best, newest, goal) < -SURE:
        return {"past its best": f"since update {best['update']} {went(best, newest, goal)}"}


EVALUATED = [after_sft, after_grpo]


# ------------------------------------------------------------------- rules, at the end of a log
# A run that still learns may look like this for a while, and a log may lack its beginning.


def no_numbers(lines: Lines) -> dict[str, tuple[int, str]]:
    """As look_at: the first column that should be a number and is not.

    If a norm never was a number but the run learns, the logger is at fault; if nothing is learned,
    the run is.
    The KL may be no number now and then, if a batch had nothing to average, but not at the end.
    """
    learns = any(abs(rise(finite(lines, name))[3]) > SURE for name in ("reward", "loss"))
    for name in ("loss", "grad_norm", "critic", "reward", "kl_ref"):
        bad = [line["update"] for line in lines if not math.isfinite(line.get(name, 0.0))]
        ever, end = finite(lines, name), [line for line in lines if name in line][-3:]
        passes = name == "kl_ref" and (len(finite(end, name)) or not len(ever))
        if bad and not passes and (len(ever) or not learns):
            evidence = f"{name} is not a finite number in {len(bad)} rows, first at {bad[0]}"
            return {"not a number": (bad[0], evidence)}
    return {}


def entropy_collapse(lines: Lines) -> Symptoms | None:
    """Entropy falls while a policy learns. Here it fell, and nothing was learned in return.

    A log may begin after the fall: then there is next to none from its first row on.
    """
    first, newest = last(lines[:FEWEST], "entropy", START).mean(), last(lines, "entropy", START)
    here = at_level(lines)
    start, end, _, errors = rise(finite(here, "reward"))
    learns = solved(here) or last(lines, "groups_with_signal", START).mean() > 0.3
    spent = newest.max() <= max(min(0.1 * first, 0.3), SPENT)
    if spent and errors <= MEASURABLE and not learns:
        return {
            "entropy collapse": f"the entropy of a token was {first:.3g} nats and is "
            f"{newest.mean():.3g}, and the reward went from {start:.2f} to {end:.2f}"
        }


def pays_another_goal(lines: Lines) -> Symptoms | None:
    """The reward rises, and the reward function that counts right answers does not.

    Or the reward stands high and still while right answers go up and down: they hardly count in it.
    """
    rewards, right = finite(lines, "reward"), finite(lines, "goal")
    if min(len(rewards), len(right)) < 20:
        return None
    paid, earned, noise = rewards[-10:].mean(), right[-10:].mean(), np.std(np.diff(right))
    if noise > 0.02 and np.std(np.diff(rewards)) < 0.3 * noise and earned < paid - 0.2:
        return {
            "pays something else": f"the reward is {paid:.2f} and does not follow right answers, "
            f"which are {earned:.2f}"
        }
    return rises_alone(lines, "goal")


def only_in_training(lines: Lines) -> Symptoms | None:
    """The training reward rises, above that of evaluations, which do not follow."""
    evals = finite(lines, "eval_reward")
    start, end, gain, errors = rise(finite(at_level(lines), "reward"))
    climbed = len({line["level"] for line in lines if "level" in line}) > 1  # easier, as asked
    if len(evals) < 3 or climbed or end < evals[-2:].mean() + 0.1:
        return None
    if gain >= 0.1 and errors >= SURE and evals[-2:].mean() - evals[0] <= 0.2 * gain:
        return {
            "only in training": f"the training reward rose from {start:.2f} to {end:.2f}, and "
            f"evaluations went from {evals[0]:.2f} to {evals[-2:].mean():.2f}"
        }


def still(lines: Lines) -> Symptoms | None:
    """Nothing moves although there is a signal: steps that are too small to see."""
    reward, entropy, tokens = (
        rise(finite(lines, name), fewest=30) for name in ("reward", "entropy", "reply_tokens")
    )
    norm, share = last(lines, "grad_norm", 20), last(lines, "groups_with_signal", 20)
    has_signal = norm.max() > 0 and not (share.mean() < 0.1 or entropy[1] <= SPENT)
    stands = abs(entropy[2]) <= 0.1 * entropy[0] and not abs(tokens[3]) > MEASURABLE
    if has_signal and stands and max(abs(reward[3]), abs(entropy[3])) <= MEASURABLE:
        return {
            "still": f"the reward stayed at {reward[1]:.2f} and the entropy at {entropy[1]:.3g} "
            f"nats, although gradients are not 0 (the last norm is {norm[-1]:.2g})"
        }


def always_the_same(lines: Lines) -> Symptoms | None:
    """No signal: the mean reward never changed, in a log that has neither groups nor norms."""
    rewards, norms = finite(lines, "reward"), finite(lines, "grad_norm")
    unknown = all(math.isnan(signal(line)) for line in lines) and not norms.any()
    if len(rewards) >= 2 * FEWEST and np.ptp(rewards) < 1e-9 and unknown:
        return {"no signal": f"the mean reward was {rewards[0]:.2f} in all of {len(rewards)} rows"}


def warm_up(lines: Lines) -> Symptoms | None:
    """Does the learning rate still rise when the log ends? A run that has only begun may do so."""
    rates, planned = finite(lines, "lr"), max(finite(lines, "planned"), default=0)
    if len(rates) >= 20 and lines[-1]["update"] >= 0.5 * planned and (np.diff(rates) > 0).all():
        return {"warm-up": f"the rate rose in every step, from {rates[0]:.2g} to {rates[-1]:.2g}"}


AT_END = [
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
    lines = [{name: v for name, v in line.items() if v is not None} for line in lines]
    logged = {name for line in lines for name in line}
    columns = {c: c for illness in ILLNESSES.values() for c in illness["columns"] if c in logged}
    evals = of_run(evals, records.config_of(folder)["sft_steps"])
    state = folder / "checkpoint" / "state.json"
    told = json.loads(state.read_bytes()).get("warnings", {}) if state.exists() else {}
    return logs.Log(OURS, lines, columns, [], [str(folder)], evals, told)


def answer(log: logs.Log) -> dict:
    """All findings, as one JSON object."""
    findings = look_at(log.lines, log.evals)
    if "solved" in findings:
        log.notes.append(f"solved, so no illness: {findings.pop('solved')[1]}")
    told = {name: said for name, said in log.told.items() if name not in {*findings, "solved"}}
    steps = [line["update"] for line in log.lines]
    unlogged = {} if without_reward(log) else logs.UNLOGGED.get(log.framework, {})
    return {
        "files": log.files,
        "run": log.run,
        "framework": log.framework,
        "steps": [min(steps, default=0), max(steps, default=0)],
        "rows": len(steps),
        "columns": log.names,
        "notes": log.notes,
        "not_logged": {name: how for name, how in unlogged.items() if name not in log.names},
        "symptoms": [
            *(symptom(log, name, *finding) for name, finding in findings.items()),
            *(said_itself(name, said) for name, said in told.items()),
        ],
        "nothing_found": "" if findings or told else nothing_found(log),
        "other_runs": [answer(other) for other in log.others],
    }


def symptom(log: logs.Log, name: str, step: int, evidence: str) -> dict:
    """One finding: since when, what shows it in which columns, its causes, its cure."""
    illness = illness_of(name, log.lines)
    return {
        "name": name,
        "step": step,
        "seen": evidence,
        "columns": [log.names[c] for c in (*illness["columns"], "goal") if c in log.names],
        "causes": illness["causes"],
        "cure": cure(name, log.framework, log.lines),
        "journal": f"learn/FAILURES.md#{illness['journal']}" if "journal" in illness else "",
    }


def said_itself(name: str, said: str) -> dict:
    """What a run of ours said while it ran, and its logs alone do not show.

    said: "update 0: what was seen; what to do".
    """
    update, _, rest = said.removeprefix("update ").partition(": ")
    seen, _, cure = rest.partition("; ")
    return {
        "name": name,
        "step": int(update),
        "seen": seen,
        "columns": ["train.log"],
        "causes": ["what the run itself saw, and its numbers alone do not show"],
        "cure": cure or "see report.html",
        "journal": "",
    }


def without_reward(log: logs.Log) -> bool:
    """Is it of another of TRL's trainers than GRPO's?"""
    return log.framework == logs.TRL and "reward" not in log.names


def nothing_found(log: logs.Log) -> str:
    """Why a log that looks odd may be fine, and how much was checked."""
    n, loss, norms = len(log.lines), finite(log.lines, "loss"), finite(log.lines, "grad_norm")
    if n < FEWEST:
        return f"too short to tell: {n} steps, and most rules need {FEWEST} to 30"
    if without_reward(log):
        return (
            "this log has no reward: it may be of SFT or DPO or KTO, and little could be looked at"
        )
    looks_odd = len(loss) and np.median(np.abs(loss)) < 0.1 and len(norms) and np.median(norms) > 0
    if not looks_odd:
        return "nothing wrong was found in what was looked at"
    return (
        "nothing wrong was found in what was looked at; a loss near 0 is normal here, because "
        "advantages add up to 0 within each group and with one update per batch (num_iterations=1, "
        "ppo_epochs=1) the ratio is 1 when it is computed: the value cancels, its gradient does "
        f"not (the gradient's norm is {np.median(norms):.2g} here)"
    )


def text(findings: dict) -> str:
    """What answer returns, as text for people."""
    first, end = findings["steps"]
    out = [
        f"{', '.join(findings['files'])}: {findings['run'] or 'a log'} of {findings['framework']}, "
        f"steps {first} to {end} ({findings['rows']} rows)",
        f"looked at: {', '.join(sorted({*findings['columns'].values()}))}",
        *(f"note: {note}" for note in findings["notes"]),
    ]
    for symptom in findings["symptoms"]:
        out += [
            "",
            f"step {symptom['step']}: {symptom['name']}: {symptom['seen']}",
            f"  look at     {', '.join(symptom['columns'])}",
            f"  because of  {symptom['causes'][0]}",
            *(f"  or of       {cause}" for cause in symptom["causes"][1:]),
            f"  set         {symptom['cure']}",
            *(f"  see it      {page}" for page in [symptom["journal"]] if page),
        ]
    if findings["nothing_found"]:
        out += ["", findings["nothing_found"]]
    if findings["not_logged"]:
        out += ["", "could not be looked at, because this log has no:"]
    out += [f"  {column}: {how}" for column, how in findings["not_logged"].items()]
    others = "".join(f"\n\n{text(other)}" for other in findings["other_runs"])
    return "\n".join(map(records.printable, out)) + others


def command() -> None:
    """`python -m bookkeeping.doctor`, and `picoswarm doctor` if it is installed."""
    parser = argparse.ArgumentParser("doctor", epilog="docs/doctor.md says what it reads")
    parser.add_argument("path", nargs="?", type=Path, help="a run, a log, or a folder with one")
    parser.add_argument("--json", action="store_true", help="for machines")
    flags = parser.parse_args()
    if flags.path is None:  # few groups have a signal, and the reward stands still
        line = {"update": 30, "groups_with_signal": 0.2, "reward": 0.3}
        print(*(f"{name}: {text}" for name, text in symptoms([line] * 30).items()))
        return
    reader = of_ours if (flags.path / "evals.jsonl").exists() else logs.read
    try:
        with records.foreign(flags.path):
            findings = answer(reader(flags.path))
    except SystemExit as unreadable:
        findings = {"error": str(unreadable)}
    if flags.json:
        print(json.dumps(findings, indent=1))
    else:
        print(findings.get("error") or text(findings))
    sick = any(one.get("symptoms") for one in [findings, *findings.get("other_runs", [])])
    raise SystemExit(2 if "error" in findings else sick)


if __name__ == "__main__":
    command()
