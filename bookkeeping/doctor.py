"""What is wrong with this run? Symptoms read off its metrics, with a likely cause and a cure.

A run that learns nothing looks much like one that does: lines go by and nothing raises. So after
every update the doctor looks at the newest lines of metrics.jsonl (grpo.update and
evaluate.summarize say what is in them) for the few things that usually go wrong. It tells each one
once, when it first sees it, and summary.json keeps it. Nothing here stops a run. A loss or a
log-prob that is not a number does, where it arises, before it can reach a checkpoint.

    symptom              seen in             for  most often
    collapse             reward              5    a learning rate that is too high
    stuck                groups_with_signal  5    one step that broke the policy: the rate again
    broken               format              3    the same, seen in replies that nothing can read
    no signal            groups_with_signal  10   a task that is too hard
    few groups           groups_with_signal  30   the same, now and then right: nothing is learnt
    solved               groups_with_signal  10   no illness, nothing is left to learn
    no gradient          grad_norm           5    a frozen adapter, gradient checkpointing
    noise                entropy             3    a learning rate that is too high
    cut short            truncated           5    --max-tokens too small, or a stop token not learnt
    errors               errors              3    a bug in the environment
    stop token           stop_trained        1    the end-of-turn token is masked
    sequence ratio       stretch             2    a reply's ratio is clipped as if it were a token's
    not exact            exact, fraction     1    "correct" is counted as reward > 0
    pays something else  reward, exact       10   partial credit that pays a guess
    dropout              mismatch, twice     3    model.train() in the update
    stale                mismatch            3    the sampler has old weights
    two distributions    mismatch            3    another temperature, top-k or top-p in the sampler
    uncorrected          ratio, mismatch     3    --importance none on samples of old policies

Most of the last eight are mistakes in the code around a run; learn/failures.py makes each of them
on purpose. (A ninth, `template`, is seen in the prompts themselves: guard.other_opening.) After
every evaluation bookkeeping/progress.py looks at evals.jsonl: did SFT help, did GRPO?

The same rules judge the logs of TRL, Unsloth, ms-swift, verl and prime-rl, which logs.py turns into
such lines. Their columns allow some more, and so do trends over a whole log (TRENDS):

    learning rate, far off, engine, thrown away; not a number, KL, entropy collapse,
    only in training, still, warm-up

cures.toml has each symptom's causes and cures, in every framework's flags.

Run me: `python -m bookkeeping.doctor RUN_OR_LOG [--json]`; without one, made-up runs are looked at.
Exit status: 0 nothing was found, 1 a symptom was found, 2 the log cannot be read.
"""

import argparse
import json
import math
import tomllib
from collections.abc import Callable
from operator import ge, gt, le
from pathlib import Path

import numpy as np

from bookkeeping import logs, progress, records
from bookkeeping.records import printable

LOOKS_BACK = 50  # lines are enough
START = 5  # updates that count as the start of a run
FEWEST = 10  # updates; fewer say nothing
SURE = 4.0  # standard errors, as in progress.py
LOOKS = 3_000  # moments at which a log is looked at; a longer one at every second step, and so on
LONGEST = 1_000  # lines whose rewards count
# How much of an answer is right, from 0 to 1, if the environment says so: letters', alphabet's.
PARTS = ("fraction", "similarity")
OURS, JOURNAL = "picoswarm", "learn/FAILURES.md"
TEXTS = tomllib.loads(Path(__file__).with_name("cures.toml").read_text(encoding="utf-8"))
ILLNESSES = TEXTS["symptom"]

Lines = list[dict[str, float]]


def cure(name: str, framework: str) -> str:
    """What to set. Unsloth takes TRL's flags."""
    illness = ILLNESSES[name]
    cures = TEXTS["cure"][illness["cure"]] | illness.get("instead", {})
    return cures.get(framework, cures[logs.TRL])


def symptoms(lines: Lines, rewards: list[float], began: float | None = None) -> dict[str, str]:
    """{symptom: "numbers: what they mean; what to do"} after an update, in our own flags.

    lines: the newest of metrics.jsonl, in order. rewards: the mean reward of every update so far
    (in a curriculum: at this level). began: first_gap of the run's first lines; None: not known.
    """
    return {name: in_short(name, seen) for name, seen in signs(lines, rewards, began).items()}


def in_short(name: str, seen: str) -> str:
    return f"{seen}: {ILLNESSES[name]['causes'][0]}; {cure(name, OURS)}"


def signs(lines: Lines, rewards: list[float], began: float | None) -> dict[str, str]:
    """{symptom: the numbers that show it}, in any framework's lines."""
    told = {name: rule(lines, rewards) for name, rule in RULES.items()}
    told |= beyond(lines) | silent(lines, rewards) | disagreement(lines, began)
    # A broken run also has no signal, and its replies may never end; but that is not what to mend.
    if "stuck" in told or told["broken"]:
        told |= dict.fromkeys(("no signal", "few groups", "no gradient", "cut short"))
    return {name: seen for name, seen in told.items() if seen}


def first_seen(lines: Lines, began: float | None) -> dict[str, tuple[dict, str]]:
    """{symptom: (the line at which it is first seen, the numbers that show it)}"""
    found: dict[str, tuple[dict, str]] = {}
    stride = math.ceil(len(lines) / LOOKS) or 1
    for k in range(stride, len(lines) + 1, stride):
        for name, seen in signs(lines[max(0, k - LOOKS_BACK) : k], paid(lines[:k]), began).items():
            found.setdefault(name, (lines[k - 1], seen))
    return found


def paid(lines: Lines) -> list[float]:
    """The rewards at the level of the last line. A curriculum never goes back to a level."""
    level = lines[-1].get("level") if lines else None
    return every(
        [line for line in lines[-LONGEST:] if line.get("level") == level], "reward"
    ).tolist()


def last(lines: Lines, name: str, n: int) -> np.ndarray:
    """A metric's n newest values; NaN if there are not that many, or if they are of long ago.

    Every rule is told where a comparison is true, and none with NaN is.
    """
    values = every(lines[-8 * n :], name)[-n:]
    return values if len(values) == n else np.full(n, math.nan)


def every(lines: Lines, name: str) -> np.ndarray:
    values = np.array([line[name] for line in lines if name in line], dtype=float)
    return values[np.isfinite(values)]


def rise(values: np.ndarray, fewest: int = 20, n: int = 10) -> tuple[float, float, float, float]:
    """(mean of the first n, of the last n, how far it rose, in how many standard errors).

    The noise is that of neighbours' differences, so a trend does not count as noise. NaN, if there
    are fewer values.
    """
    if len(values) < fewest:
        return (math.nan,) * 4
    before, after = float(np.mean(values[:n])), float(np.mean(values[-n:]))
    error = float(np.std(np.diff(values)) / math.sqrt(2) * math.sqrt(2 / n))
    return before, after, after - before, (after - before) / max(error, 1e-9)


# ------------------------------------------------------------------- rules: is there a signal?
# Each: (newest lines, rewards so far) -> the numbers that show it, or None.


def signal(line: dict) -> float:
    """Had any group rewards that differ? By whatever a framework logs; NaN if nothing says it."""
    get = lambda name: line.get(name, math.nan)
    spread = get("advantage_max") - get("advantage_min")
    spreads = (get("groups_with_signal"), spread, get("advantage_std"), get("reward_std"))
    for spread in filter(math.isfinite, spreads):
        return spread if spread > 1e-6 else 0.0
    ends = (get("reward_max"), get("reward_min"))
    return 0.0 if line.get("trainable") == 0 or line.get("reward") in ends else math.nan


def signals(lines: Lines, n: int) -> np.ndarray:
    """The newest n that are known. Where none is, a gradient of 0 at one reward shows the same."""
    known = every([{"signal": signal(line)} for line in lines[-8 * n :]], "signal")
    same = np.ptp(last(lines, "reward", n)) < 1e-9 and not last(lines, "grad_norm", n).any()
    if len(known) == 0 and same:
        return np.zeros(n)
    return known[-n:] if len(known) >= n else np.full(n, math.nan)


def silent(lines: Lines, rewards: list[float]) -> dict[str, str]:
    """A group whose rewards are all equal has advantages of 0, and so no gradient.

    All groups: nothing moves. stuck: the policy repeats one token, but it once scored; a learning
    rate of 30 leaves such a policy. solved: all is right, and it was not always; a reward function
    that pays everything is no success.
    """
    n, was, now = START, np.mean(rewards[:START] or math.nan), np.mean(rewards[-START:] or math.nan)
    if (signals(lines, n) == 0).all() and len(rewards) > n and was >= 0.1 and now <= 0.5 * was:
        told = f"all samples of a task scored the same, {now:.2f} on average"
        return {"stuck": f"in the last {n} updates {told}, and at the start it was {was:.2f}"}
    if not (signals(lines, FEWEST) == 0).all():
        return {}
    risen = bool(rewards) and max(rewards) <= 1.0001 and min(rewards[:n]) < rewards[-1] - 0.02
    name = "solved" if risen and np.mean(rewards[-FEWEST:]) > 0.9 else "no signal"
    mean = f" (mean {np.mean(rewards[-FEWEST:]):.2f})" if rewards else ""
    return {name: f"in the last {FEWEST} updates every group's rewards were all equal{mean}"}


def few_groups(lines: Lines, rewards: list[float], n: int = 30) -> str | None:
    """A gradient of a few groups is mostly noise: the reward stands where it stood at the start."""
    share = last(lines, "groups_with_signal", n)
    was, now, risen, errors = rise(np.array(rewards), fewest=n)
    stands = abs(errors) <= 2 and abs(risen) <= 0.1
    solved = now > 0.9 and max(rewards) <= 1.0001
    if share[-FEWEST:].any() and share.mean() <= 0.3 and stands and not solved:
        return (
            f"in the last {n} updates {share.mean():.0%} of the groups had rewards that differ, "
            f"and the mean reward stands still ({was:.2f} at the start, {now:.2f} now)"
        )


def no_gradient(lines: Lines, rewards: list[float], n: int = 5) -> str | None:
    """Groups have a signal, and yet the norm is 0: no weight gets a gradient.

    Twice as many zeros have to show it where the share of groups is not logged: a reward_std may be
    that of the batch, and rewards that differ between groups are no signal.
    """
    unsure = np.isnan(last(lines, "groups_with_signal", n)).any()
    norms = last(lines, "grad_norm", 2 * n if unsure else n)
    if norms.max() <= 1e-8 and not (signals(lines, n) == 0).any():
        beside = "" if unsure else ", although rewards differed within groups"
        return f"the gradient's norm was 0 in the last {len(norms)} updates{beside}"


# ------------------------------------------------------------------- rules: the policy, its replies


def collapse(lines: Lines, rewards: list[float], window: int = 5) -> str | None:
    """Has a run fallen off a cliff?

    Compared are means of `window` updates: the last against the best. Far means: under 60% of the
    best, by more than 0.1, and by more than 5.5 standard errors. Why not the usual three? The
    question is asked after every update and picks the best of all windows, so three raised a false
    alarm in most long noisy runs (31 of 40 simulated ones). With 5.5 none of 40 did, in any of five
    settings, and a fall from 0.80 to 0.14 is still seen five updates later.
    """
    if len(rewards) < 2 * window:
        return None
    rolling = np.convolve(rewards, np.ones(window) / window, mode="valid")
    best, now = rolling.max(), rolling[-1]
    # The noise of a difference of two window means, from the differences of neighbours.
    error = np.std(np.diff(rewards)) / np.sqrt(2 * window) * np.sqrt(2)
    if best - now > max(0.4 * abs(best), 0.1, 5.5 * error):
        fell = f"the mean reward of the last {window} updates is {now:.2f}"
        return f"{fell} and was {best:.2f} at its best"
    return None


def broken(lines: Lines, rewards: list[float], n: int = 3) -> str | None:
    """A step that is far too large leaves replies that no environment can read.

    This shows long before a reward has anything to fall from.
    """
    lines = [line for line in lines if line.get("level") == lines[-1].get("level")]
    now = last(lines, "format", n)
    best = max(every(lines[:-n], "format"), default=0)
    if best >= 0.5 and now.max() <= 0.2 * best:
        return f"{best:.0%} of the replies had the right format and now {now.mean():.0%} have"


def noise(lines: Lines, rewards: list[float], n: int = 3) -> str | None:
    """Entropy per token falls while a policy learns.

    A policy with three times what it had, and more than 1 nat, has come apart.
    """
    was, now = np.median(last(lines[:START], "entropy", START)), last(lines, "entropy", n)
    if now.min() >= 1 and now.min() >= 3 * was:
        return f"the entropy of a token was {was:.2f} nats and is {now[-1]:.2f}"


def errors(lines: Lines, rewards: list[float], n: int = 3) -> str | None:
    """Episodes in error are left out, so the mean of the others may be one of the easy tasks."""
    failed, played = last(lines, "errors", n), last(lines, "n", n)
    for share in (failed / np.maximum(failed + played, 1), last(lines, "errors_share", n)):
        if share.min() > 0 and share.mean() >= 0.1:
            return (
                f"in the last {n} updates {share.mean():.0%} of the episodes ended in an error and "
                "were left out"
            )


# ------------------------------------------------------------------- rules: what is paid


def not_exact(lines: Lines, rewards: list[float]) -> str | None:
    """An exact answer is right in all its parts, so no more answers are exact than parts are right.

    What exact answers are paid says nothing: an environment may well pay the shorter one more, or
    ten for each. If it does not report how much of an answer is right, the doctor stays silent: a
    reward of 0, 0.5 and 1 looks the same whether 0.5 is for half an answer or for a whole one that
    was not derived.
    """
    now = lines[-1] if lines else {}
    part = next((now[name] for name in PARTS if name in now), math.nan)
    if part <= now.get("exact", math.nan) - 1e-6:
        return (
            f"{now['exact']:.0%} of the answers count as exact, and on average {part:.0%} of an "
            "answer is right"
        )


def pays_something_else(lines: Lines, rewards: list[float], n: int = 10) -> str | None:
    """Exact answers are the goal. The reward is high without them, or rises and they do not.

    An environment may pay more than 1 for an exact answer: `exact_reward` is what it paid for one
    on average, in the updates that had any.
    """
    reward, exact = last(lines, "reward", n).mean(), last(lines, "exact", n).mean()
    scale = max([1.0, *every(lines, "exact_reward")])
    if reward > scale and not exact > 0:
        return None  # it pays on another scale, and what it pays for a right answer is not known
    if reward / scale - exact > 0.75:  # --reward partial starts at 0.67, and learns
        return f"the reward is {reward:.2f} where {exact:.0%} of the answers are exact"
    return rises_alone(lines, "exact", scale)


def rises_alone(lines: Lines, goal: str, scale: float = 1.0) -> str | None:
    """The reward rises, and right answers do not. scale: what is paid for one."""
    was, now, risen, errors = rise(every(lines, "reward"))
    right_was, right, right_risen, _ = rise(every(lines, goal))
    if risen >= 0.05 and errors >= SURE and scale * right_risen <= 0.2 * risen:
        what = "exact answers" if goal == "exact" else goal.removeprefix("part:")
        return (
            f"the reward rose from {was:.2f} to {now:.2f}, and {what} went from {right_was:.2f} to "
            f"{right:.2f}"
        )


# ------------------------------------------------------------------- rules: sampler and trainer


def first_gap(lines: Lines) -> float | None:
    """The mismatch of the first update that measured one."""
    gaps = (line.get("mismatch", math.nan) for line in lines)
    return next(filter(math.isfinite, gaps), None)


def disagreement(lines: Lines, first: float | None, n: int = 3) -> dict[str, str]:
    """Sampler and trainer disagree about samples that are said to be the policy's own.

    Such samples have off_policy_steps 0. Rounding makes 1e-7 nats per token on a CPU, and about
    0.01 in bfloat16 with another engine. More than that (the column `rounding`) has one of three
    causes, and each leaves its own trace: dropout also differs from itself, old weights get older,
    two distributions do neither.
    """
    trained = [line for line in lines if "mismatch" in line]  # an update without a signal has none
    gap, age, twice = (last(trained, name, n) for name in ("mismatch", "off_policy_steps", "twice"))
    allowed = lines[-1].get("rounding", 0.03) if lines else 0
    if not gap.min() > allowed or age.max() > 0:  # others log no age
        return {}
    much = (
        f"trainer and sampler give a token log-probs that differ by {gap[-1]:.3f} nats on average, "
        "though the samples are said to be the policy's own"
    )
    if twice.min() > 0.3 * gap.min():
        return {"dropout": f"{much}, and two passes of the trainer differ by {twice[-1]:.3f}"}
    if first is not None and first < 0.1 * gap.min():
        return {"stale": f"{much}; in the first update it was {first:.0e}"}
    if first is not None and first > allowed:
        return {"two distributions": f"{much}, from the first update on"}
    return {}


def uncorrected(lines: Lines, rewards: list[float], n: int = 3) -> str | None:
    """The ratio is 1 however old the samples are.

    With --importance none it compares with the policy at the start of the update.
    """
    trained = [line for line in lines if "mismatch" in line]
    age, gap, ratio = (last(trained, name, n) for name in ("off_policy_steps", "mismatch", "ratio"))
    old = age.min() >= 2 and gap.min() >= 1e-3 and "importance" not in trained[-1]
    if old and np.abs(ratio - 1).max() <= 1e-6:
        return (
            f"samples are {age.mean():.0f} updates old and their log-probs have moved by "
            f"{gap[-1]:.3f} nats a token, yet the ratio is 1.000"
        )


# (symptom, column, for how many updates, beyond what; the numbers that show it).
# Of the engine's: bfloat16 makes about 0.01 nats per token: 0.01²/2 of k3 KL, most of it in few
# tokens. Ten times that is no rounding. Probabilities differ by less than their logarithms.
# stretch: Σ |log of the loss's ratio| / Σ |log-prob now - when sampled|, over all tokens: 1 for a
# ratio per token, and at most 1 for gspo's mean.
LIMITS = [
    ("cut short", "truncated", 5, gt, 0.5, "{:.0%} of the episodes ran out of tokens"),
    (
        "stop token",
        "stop_trained",
        1,
        le,
        0.5,
        "of the replies that ended by themselves, {:.0%} had their end-of-turn token in the loss",
    ),
    (
        "sequence ratio",
        "stretch",
        2,
        ge,
        2,
        "the ratio in the loss moved {:.0f} times as far as a token's log-prob",
    ),
    ("far off", "clipped", 3, ge, 0.3, "{:.0%} of the tokens were clipped"),
    (
        "thrown away",
        "kept_ratio",
        3,
        le,
        0.5,
        "the importance ratio of sampler and trainer was {:.2f} on average, where 1 is agreement",
    ),
    (
        "engine",
        "mismatch_kl",
        3,
        ge,
        0.02,
        "sampler and trainer disagreed by {:.3g} nats per sampled token (k3 KL)",
    ),
    (
        "engine",
        "mismatch_probability",
        3,
        ge,
        0.03,
        "sampler and trainer disagreed about sampled tokens by {:.3g} in probability",
    ),
    ("learning rate", "lr", 10, le, 0, "the learning rate was 0"),
]


def beyond(lines: Lines) -> dict[str, str]:
    """{symptom: the numbers that show it}, of columns that are beyond their limit."""
    found = {}
    for symptom, column, n, compare, limit, sentence in LIMITS:
        values, age = last(lines, column, n), last(lines, "off_policy_steps", n)
        if compare(values, limit).all() and not (symptom == "engine" and age.min() > 1):
            found[symptom] = f"in the last {n} updates {sentence.format(values.mean())}"
    return found


RULES: dict[str, Callable] = {
    "collapse": collapse,
    "broken": broken,
    "noise": noise,
    "few groups": few_groups,
    "no gradient": no_gradient,
    "errors": errors,
    "not exact": not_exact,
    "pays something else": pays_something_else,
    "uncorrected": uncorrected,
}


# ------------------------------------------------------------------- trends of a whole foreign log
# Our own runs need none of them: their settings are refused, or their evaluations say more.


def not_a_number(log: logs.Log) -> str | None:
    """NaN or infinity where a number should be.

    A norm that never was a number while the run learns is a logger's fault; if nothing is learnt,
    it is the run's.
    """
    learns = any(abs(rise(every(log.lines, name))[3]) > SURE for name in ("reward", "loss"))
    for name in ("loss", "grad_norm", "reward", "kl", "entropy"):
        bad = [line for line in log.lines if not math.isfinite(line.get(name, 0.0))]
        if bad and (name in log.theirs or (name in ("loss", "grad_norm") and not learns)):
            return f"{name} is not a finite number in {len(bad)} rows, first at {bad[0]['step']}"


def kl_runs_away(log: logs.Log) -> str | None:
    was = np.median(last(log.lines[:FEWEST], "kl", FEWEST))
    now = np.median(last(log.lines, "kl", START))
    if now >= 1 and now >= 10 * was:
        return f"the KL to the reference was {was:.3g} nats per token and is {now:.3g}"


def entropy_collapse(log: logs.Log) -> str | None:
    """Entropy falls while a policy learns. Here it fell and nothing was learnt for it."""
    first = last(log.lines[:FEWEST], "entropy", START).mean()
    end = last(log.lines, "entropy", START)
    was, now, risen, errors = rise(every(log.lines, "reward"))
    solved = now > 0.9 and was <= 1
    has_signal = last(log.lines, "groups_with_signal", START).mean() > 0.3
    if end.max() <= min(0.1 * first, 0.3) and errors <= 2 and not (solved or has_signal):
        return (
            f"the entropy of a token was {first:.3g} nats and is {end.mean():.3g}, and the reward "
            f"went from {was:.2f} to {now:.2f}"
        )


def pays_another_goal(log: logs.Log) -> str | None:
    """The reward rises, and the reward function that counts right answers does not.

    Or the one stands high and still while the other goes up and down: right answers hardly count
    in it.
    """
    rewards, right = every(log.lines, "reward"), every(log.lines, logs.goal(log))
    if min(len(rewards), len(right)) < 20:
        return None
    now, then, noise = rewards[-10:].mean(), right[-10:].mean(), np.std(np.diff(right))
    if noise > 0.02 and np.std(np.diff(rewards)) < 0.3 * noise and then < now - 0.2:
        name = logs.goal(log).removeprefix("part:")
        return f"the reward is {now:.2f} and does not follow {name}, which is {then:.2f}"
    return rises_alone(log.lines, logs.goal(log))


def only_in_training(log: logs.Log) -> str | None:
    """Evaluations are compared with their own first, training with its own start."""
    evals = every(log.lines, "eval_reward")
    was, now, risen, errors = rise(every(log.lines, "reward"))
    if len(evals) < 3 or evals[-2:].mean() - evals[0] > 0.2 * risen:
        return None
    if risen >= 0.1 and errors >= SURE:
        return (
            f"the training reward rose from {was:.2f} to {now:.2f}, and evaluations went from "
            f"{evals[0]:.2f} to {evals[-2:].mean():.2f}"
        )


def still(log: logs.Log) -> str | None:
    """Nothing moves although there is a signal: steps that are too small to see."""
    columns = [every(log.lines, name) for name in ("reward", "entropy", "reply_tokens")]
    reward, entropy, tokens = (rise(values, fewest=30) for values in columns)
    stands = abs(reward[3]) <= 2 and abs(entropy[3]) <= 2 and not abs(tokens[3]) > 2
    norm = last(log.lines, "grad_norm", 20)
    if last(log.lines, "groups_with_signal", 20).mean() < 0.1 or not norm.max() > 0:
        return None
    if stands and abs(entropy[2]) <= 0.1 * entropy[0]:
        return (
            f"in {len(log.lines)} steps the reward stayed at {reward[1]:.2f} and the entropy at "
            f"{entropy[1]:.3g} nats, although gradients are not 0 (the last norm is {norm[-1]:.2g})"
        )


def warm_up(log: logs.Log) -> str | None:
    """Does the learning rate still rise when the log ends? Not if the run has only begun."""
    rates, end = every(log.lines, "lr"), log.lines[-1]["step"]
    if len(rates) >= 20 and end >= 0.5 * log.planned and (np.diff(rates) > 0).all():
        return (
            f"the learning rate rose in every step, from {rates[0]:.2g} to {rates[-1]:.2g}, and "
            f"the log ends at step {end}"
        )


TRENDS: dict[str, Callable] = {
    "not a number": not_a_number,
    "KL": kl_runs_away,
    "entropy collapse": entropy_collapse,
    "pays something else": pays_another_goal,
    "only in training": only_in_training,
    "still": still,
    "warm-up": warm_up,
}

# If the first is told, the others would speak of the same illness.
HIDES = {
    "warm-up": ("still",),
    "learning rate": ("still",),
    "collapse": ("entropy collapse", "still"),
    "stuck": ("no signal", "entropy collapse", "still", "few groups"),
    "no signal": ("entropy collapse", "still", "few groups"),
    "few groups": ("still",),
    "entropy collapse": ("few groups",),
    "solved": ("no signal", "entropy collapse", "still", "few groups"),
    "no gradient": ("still", "few groups", "entropy collapse"),
    "not a number": ("still", "no gradient"),
}


# ------------------------------------------------------------------- somebody else's log


def look_at_log(log: logs.Log) -> dict[str, tuple[int, str]]:
    """{symptom: (step, the numbers that show it)} of somebody else's log, in the order of steps."""
    gap = np.median(np.diff([0, *(line["step"] for line in log.lines[:FEWEST])]))
    whole = log.lines[0]["step"] <= max(1, gap)  # the log has the run's beginning
    # Steps without a reward (TRL, between two generations) say nothing that the rules ask for.
    lines = [line for line in log.lines if len(every([line], "reward"))] or log.lines
    seen = first_seen(lines, first_gap(log.lines) if whole else None)
    found = {name: (line["step"], numbers) for name, (line, numbers) in seen.items()}
    for name, rule in TRENDS.items():
        if numbers := rule(log):
            found.setdefault(name, (log.lines[-1]["step"], numbers))
    hidden = {other for name in found for other in HIDES.get(name, ())}
    kept = [one for one in found.items() if one[0] not in hidden]
    return dict(sorted(kept, key=lambda one: one[1][0]))


def answer(log: logs.Log) -> dict:
    """All that there is to say, as one JSON object."""
    found, told = look_at_log(log), []
    if "solved" in found:
        log.notes.append(f"solved, so no illness: {found.pop('solved')[1]}")
    for name, (step, seen) in found.items():
        illness = ILLNESSES[name]
        columns = [log.theirs[c] for c in (*illness["columns"], logs.goal(log)) if c in log.theirs]
        told.append({
            "name": name, "step": step, "seen": seen, "columns": columns,
            "causes": illness["causes"], "cure": cure(name, log.framework),
            "journal": f"{JOURNAL}#{illness['journal']}" if "journal" in illness else "",
        })  # fmt: skip
    unlogged = logs.UNLOGGED[log.framework]
    return {
        "files": log.files,
        "format": log.kind,
        "framework": log.framework,
        "steps": [min(line["step"] for line in log.lines), log.lines[-1]["step"]],
        "rows": len(log.lines),
        "columns": log.theirs,
        "notes": log.notes,
        "not_logged": {name: how for name, how in unlogged.items() if name not in log.theirs},
        "symptoms": told,
        "nothing_found": "" if found else nothing_found(log),
    }


def nothing_found(log: logs.Log) -> str:
    """Why a log that looks odd is well, and what that is worth."""
    n, loss, norms = len(log.lines), every(log.lines, "loss"), every(log.lines, "grad_norm")
    if n < FEWEST:
        return f"too short to tell: {n} steps, and most rules need {FEWEST} to 30"
    said = "nothing wrong was found in what was looked at"
    if "reward" not in log.theirs:
        return f"{said}; but this log has no reward, so most rules had nothing to look at"
    if len(loss) and np.median(np.abs(loss)) < 0.1 and np.sum(norms) > 0:
        once = {logs.VERL: "ppo_epochs=1", logs.PRIME: "fresh samples"}
        said += (
            "; a loss near 0 is normal here, because advantages add up to 0 within each group and "
            f"with {once.get(log.framework, 'num_iterations=1')} the ratio is 1 when it is "
            "computed: the value cancels, its gradient does not (the gradient's norm is "
            f"{np.median(norms):.2g} here)"
        )
    return said


def text(found: dict) -> str:
    """For people."""
    first, end = found["steps"]
    out = [
        f"{', '.join(found['files'])}: {found['format']} of {found['framework']}, "
        f"steps {first} to {end} ({found['rows']} rows)",
        f"looked at: {', '.join(sorted(found['columns'].values()))}",
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
    return "\n".join(map(printable, out))


def foreign(path: Path, as_json: bool) -> int:
    """Print what is wrong with somebody else's log; returns the exit status."""
    try:
        found = answer(logs.read(path))
    except (ValueError, OSError, MemoryError, OverflowError) as error:
        why = printable(str(error))[:500] or type(error).__name__
        print(json.dumps({"error": why}) if as_json else why)
        return 2
    print(json.dumps(found, indent=1, allow_nan=False) if as_json else text(found))
    return 1 if found["symptoms"] else 0


# ------------------------------------------------------------------- a run of our own


def look_at(lines: Lines, evals: list[dict] = (), config: dict | None = None) -> list[str]:
    """Everything there is to tell about a run, in order: "update N: symptom: sentence".

    lines: metrics.jsonl. evals: evals.jsonl. config: the run's flags.
    """
    seen = first_seen(lines, first_gap(lines)).items()
    told = [(line["update"], name, in_short(name, numbers)) for name, (line, numbers) in seen]
    evals = [e for e in evals if e.get("stage") in progress.STAGES]
    for update in dict.fromkeys(e["update"] for e in evals):
        so_far = [e for e in evals if e["update"] <= update]
        rewards = paid([line for line in lines if line["update"] <= update])
        found = progress.symptoms(so_far, rewards, config or {})
        told += [(update, name, sentence) for name, sentence in found.items()]
    first: dict[str, str] = {}
    for update, name, sentence in sorted(told, key=lambda one: one[0]):
        first.setdefault(name, f"update {update}: {name}: {sentence}")
    return list(first.values())


def own(folder: Path) -> int:
    """Print what there is to tell about a run of ours; returns the exit status."""
    with records.foreign(folder):
        lines, evals = (records.lines(folder / f"{name}.jsonl") for name in ("metrics", "evals"))
        flags = folder / "config.json"
        told = look_at(lines, evals, records.read(flags) if flags.exists() else {})
    looked = sorted({c for illness in ILLNESSES.values() for c in illness["columns"]})
    looked = ", ".join(name for name in looked if any(name in line for line in lines))
    well = f"nothing wrong was found in {len(lines)} updates and {len(evals)} evaluations"
    print("\n".join(map(printable, told)) or f"{well}; looked at: {looked}")
    return 1 if told else 0


def is_ours(path: Path) -> bool:
    """Is this the folder of a run of ours? Others call their count `step`."""
    lines, evals = path / "metrics.jsonl", path / "evals.jsonl"
    return evals.exists() or lines.is_file() and b'"update"' in lines.read_bytes()[:4096]


def command() -> None:
    """`python -m bookkeeping.doctor`, and `picoswarm-doctor` if it is installed."""
    parser = argparse.ArgumentParser("doctor", epilog="docs/doctor.md says what it reads")
    parser.add_argument("path", nargs="?", type=Path, help="a run, a log, or a folder with one")
    parser.add_argument("--json", action="store_true", help="for machines")
    given = parser.parse_args()
    if given.path is None:
        return demo()
    if not given.path.exists():
        parser.error(f"{given.path}: there is no such file or folder; check the path")
    is_own = is_ours(given.path) and not given.json
    raise SystemExit(own(given.path) if is_own else foreign(given.path, given.json))


def demo() -> None:
    """A run that stands still, because few of its groups have a signal, and one that learns."""
    for name, rewards in (("still", [0.3, 0.32] * 15), ("learns", np.linspace(0.3, 0.9, 30))):
        lines = [
            {"update": i, "reward": reward, "groups_with_signal": 0.2}
            for i, reward in enumerate(rewards, 1)
        ]
        print(f"{name}:", *(look_at(lines) or ["nothing wrong"]), sep="\n  ")


if __name__ == "__main__":
    command()
