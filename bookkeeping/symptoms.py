"""What is wrong with somebody else's run? The rules, on columns under our names.

Where doctor.py has a rule, it is that rule: look_at() hands it the lines as our own runs would have
written them. The rules here are those that our own runs need not (their settings are refused, or
their evaluations say more), or for columns that only others log:

    symptom              seen in                           told when
    not a number         loss, grad_norm, reward, kl       once
    cut off more         truncated                         the last 5 above the first 5, by 0.2
    KL                   kl to the reference               above 1 nat per token, 10 times before
    entropy collapse     entropy, groups_with_signal       a tenth of the start, reward no higher
    pays something else  reward up, right answers not      4 standard errors, or no relation
    pays length          the same                          and replies 1.5 times as long
    only in training     reward up, evaluations not        4 standard errors, 3 evaluations
    still                reward, entropy, reply_tokens     none has moved, in 30 steps
    learning rate        lr                                0
    warm-up              lr                                rises to the very end
    resumed              lr, steps                         a second warm-up; the count goes back
    far off              clip_fraction                     above 0.3
    engine               mismatch as KL or probability     above ENGINE
    thrown away          importance ratio of the sampler   below 0.5
    errors               errors_share                      above 0.1

and four remarks, which are no symptoms: every step clipped, few groups, solved, too short.

A threshold is a number that was chosen on development runs (results/doctor/README.md says which) or
that our own doctor has. How often a rule is wrong is measured there too.

Run me: `python -m bookkeeping.symptoms` shows a made-up run with a warm-up that never ends.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bookkeeping.logs import Log

LOOKS = 3_000  # moments at which a log is looked at; a longer one at every second step, and so on
LOOKS_BACK = 50  # lines that our doctor is handed, as while a run trains
LONGEST = 1_000  # rewards that it is handed
START = 5  # steps that count as the start
SURE = 4.0  # standard errors, as in progress.py
FEWEST = 10  # steps: fewer say nothing
# bfloat16 and another engine make about 0.01 nats per token: 0.01²/2 of k3 KL, most of it in few
# tokens. Ten times that is no rounding. Probabilities differ by less than their logarithms.
ENGINE = {"mismatch_kl": 0.02, "mismatch_probability": 0.03}
REMARKS = ("every step clipped", "few groups", "solved", "too short")


@dataclass(frozen=True)
class Finding:
    """A symptom, the step at which it was first seen, and the numbers that show it."""

    name: str
    step: int
    seen: str
    columns: tuple[str, ...]  # ours

    @property
    def remark(self) -> bool:
        return self.name in REMARKS


class View:
    """The columns of a log up to a step. `last` and `first` leave out what is no number.

    goal: the column that counts right answers, if one does.
    """

    def __init__(self, columns: dict[str, np.ndarray], goal: str | None, upto: int):
        self.columns, self.goal, self.upto = columns, goal, upto

    def all(self, name: str) -> np.ndarray:
        values = self.columns.get(name, np.empty(0))[: self.upto]
        return values[np.isfinite(values)]

    def last(self, name: str, n: int = START) -> np.ndarray | None:
        """The n newest values; None if there are not that many, or if they are of long ago."""
        values = self.columns.get(name, np.empty(0))[max(0, self.upto - 8 * n) : self.upto]
        values = values[np.isfinite(values)]
        return values[-n:] if len(values) >= n else None

    def first(self, name: str, n: int = START) -> np.ndarray | None:
        values = self.columns.get(name, np.empty(0))[: min(self.upto, 8 * n)]
        values = values[np.isfinite(values)]
        return values[:n] if len(values) >= n else None


def rise(values: np.ndarray, n: int = 10) -> tuple[float, float, float, float]:
    """(mean of the first n, of the last n, how far it rose, in how many standard errors).

    The noise is that of neighbours' differences, so a trend does not count as noise.
    """
    before, after = float(values[:n].mean()), float(values[-n:].mean())
    error = float(np.std(np.diff(values)) / math.sqrt(2) * math.sqrt(2 / n))
    return before, after, after - before, (after - before) / max(error, 1e-9)


# ------------------------------------------------------------------------------------------- rules
# Each: (what was read so far) -> (a sentence with numbers, its columns), or None.
Seen = tuple[str, tuple[str, ...]] | None


def cut_off_more(view: View) -> Seen:
    """Replies run into the limit more and more, before our own rule sees half of them there."""
    first, last = view.first("truncated"), view.last("truncated")
    if first is None or last is None or len(view.all("truncated")) < 3 * START:
        return None
    if last.mean() - first.mean() < 0.2 or last.min() <= first.max():
        return None
    return (
        f"{100 * first.mean():.0f}% of the replies ran into the limit at the start, "
        f"{100 * last.mean():.0f}% in the last {START} steps",
        ("truncated", "reply_tokens"),
    )


def kl_runs_away(view: View) -> Seen:
    early, last = view.first("kl", 10), view.last("kl")
    if early is None or last is None:
        return None
    was, now = float(np.median(early)), float(np.median(last))
    if now < 1 or now < 10 * max(was, 0.01):
        return None
    return f"the KL to the reference was {was:.3g} nats per token and is {now:.3g}", ("kl",)


def entropy_collapse(view: View) -> Seen:
    """Entropy falls while a policy learns. Here it fell and nothing was learnt for it."""
    first, last, rewards = view.first("entropy"), view.last("entropy"), view.all("reward")
    signal = view.last("groups_with_signal")
    if first is None or last is None or len(rewards) < 20:
        return None
    if last.max() > 0.1 * first.mean() or last.max() > 0.3:
        return None
    was, now, risen, errors = rise(rewards)
    if risen > 0 and errors > 2 or (signal is not None and signal.mean() > 0.3):
        return None
    if now > 0.9 and rewards.max() <= 1:
        return None  # solved: nothing is left to be unsure of
    return (
        f"the entropy of a token was {first.mean():.3g} nats and is {last.mean():.3g}, and the "
        f"reward went from {was:.2f} to {now:.2f}",
        ("entropy", "reward"),
    )


def pays_something_else(view: View) -> Seen:
    """The reward rises, and the reward function that counts right answers does not. Or the one
    stands high and still while the other goes up and down: right answers hardly count in it."""
    if (goal := view.goal) is None:
        return None
    rewards, right = view.all("reward"), view.all(goal)
    if len(rewards) < 20 or len(right) < 20:
        return None
    was, now, risen, errors = rise(rewards)
    right_was, right_now, right_risen, _ = rise(right)
    name, noise = goal.removeprefix("part:"), np.std(np.diff(right))
    if noise > 0.02 and np.std(np.diff(rewards)) < 0.3 * noise and right_now < now - 0.2:
        return (
            f"the reward is {now:.2f} where {name} is {right_now:.2f}, and it does not follow when "
            f"{name} goes up and down",
            ("reward", goal),
        )
    if risen < 0.05 or errors < SURE or right_risen > 0.2 * risen:
        return None
    return (
        f"the reward rose from {was:.2f} to {now:.2f}, and {name} went from {right_was:.2f} to "
        f"{right_now:.2f}",
        ("reward", goal),
    )


def pays_length(view: View) -> Seen:
    """The same, and replies grew with the reward: length itself is paid."""
    found, tokens = pays_something_else(view), view.all("reply_tokens")
    if found is None or len(tokens) < 20:
        return None
    was, now, _, errors = rise(tokens)
    if now < 1.5 * was or errors < SURE:
        return None
    return (
        f"{found[0]}, while replies grew from {was:.0f} to {now:.0f} tokens",
        (*found[1], "reply_tokens"),
    )


def only_in_training(view: View) -> Seen:
    """Evaluations are compared with their own first, training with its own start."""
    evals, rewards = view.all("eval_reward"), view.all("reward")
    if len(evals) < 3 or len(rewards) < 20:
        return None
    was, now, risen, errors = rise(rewards)
    if risen < 0.1 or errors < SURE or evals[-2:].mean() - evals[0] > 0.2 * risen:
        return None
    return (
        f"the training reward rose from {was:.2f} to {now:.2f}, and evaluations went from "
        f"{evals[0]:.2f} to {evals[-2:].mean():.2f}",
        ("reward", "eval_reward"),
    )


def still(view: View) -> Seen:
    """Nothing moves although there is a signal: steps that are too small to see."""
    if view.upto < 30:
        return None
    signal, norm = view.last("groups_with_signal", 20), view.last("grad_norm", 20)
    rewards, entropy = view.all("reward"), view.all("entropy")
    if norm is None or not norm.any() or len(rewards) < 30 or len(entropy) < 30:
        return None
    if signal is not None and signal.mean() < 0.1:
        return None
    _, _, _, errors = rise(rewards)
    was, now, risen, moved = rise(entropy)
    if abs(errors) > 2 or abs(moved) > 2 or abs(risen) > 0.1 * max(was, 1e-9):
        return None
    tokens = view.all("reply_tokens")
    if len(tokens) >= 30 and abs(rise(tokens)[3]) > 2:
        return None
    return (
        f"in {view.upto} steps the reward stayed at {rewards[-10:].mean():.2f} and the entropy at "
        f"{now:.3g} nats, although gradients are not 0 (the last norm is {norm[-1]:.2g})",
        ("reward", "entropy", "grad_norm"),
    )


def no_rate(view: View) -> Seen:
    rates = view.last("lr", 10)
    if rates is None or rates.any():
        return None
    return "the learning rate was 0 in the last 10 steps", ("lr",)


def far_off(view: View) -> Seen:
    share = view.last("clip_fraction", 3)
    if share is None or share.min() < 0.3:
        return None
    return (
        f"{100 * share.mean():.0f}% of the tokens were clipped in the last 3 steps: the policy is "
        "far from the one that sampled",
        ("clip_fraction",),
    )


def engine(view: View) -> Seen:
    """The disagreement of sampler and trainer in units that our own rule does not know."""
    for name, allowed in ENGINE.items():
        gap, age = view.last(name, 3), view.last("off_policy_steps", 3)
        if gap is None or gap.min() < allowed or (age is not None and age.min() > 1):
            continue
        unit = "nats per token (k3 KL)" if name == "mismatch_kl" else "in probability"
        return (
            f"sampler and trainer disagree about the sampled tokens by {gap[-1]:.3g} {unit}",
            (name,),
        )
    return None


def thrown_away(view: View) -> Seen:
    ratio = view.last("kept_ratio", 3)
    if ratio is None or ratio.max() > 0.5:
        return None
    return (
        f"the importance ratio of sampler and trainer is {ratio.mean():.2f} on average, where 1 is "
        "agreement: most samples are masked or weighed down",
        ("kept_ratio",),
    )


def many_errors(view: View) -> Seen:
    share = view.last("errors_share", 3)
    if share is None or share.min() < 0.1:
        return None
    return f"{100 * share.mean():.0f}% of the last 3 steps' episodes failed", ("errors_share",)


RULES: dict[str, Callable] = {
    "cut off more": cut_off_more,
    "KL": kl_runs_away,
    "entropy collapse": entropy_collapse,
    "learning rate": no_rate,
    "far off": far_off,
    "engine": engine,
    "thrown away": thrown_away,
    "errors": many_errors,
    "pays length": pays_length,
    "pays something else": pays_something_else,
    "only in training": only_in_training,
    "still": still,
}
# A trend is a matter of the whole log: looked at while it grows, the best moment would be picked.
AT_THE_END = ("pays length", "pays something else", "only in training", "still", "entropy collapse")


# ------------------------------------------------------------------------------------ a whole log


def warm_up(log: Log, rates: np.ndarray) -> Finding | None:
    """Does the learning rate still rise when the log ends? Not if the run has only begun."""
    rates = rates[np.isfinite(rates)]
    if len(rates) < 20 or log.steps[-1] < 0.5 * log.planned:
        return None
    if not (np.diff(rates) > 0).all():
        return None
    seen = (
        f"the learning rate rose in every step, from {rates[0]:.2g} to {rates[-1]:.2g}, and the "
        f"log ends at step {log.steps[-1]}" + (f" of {log.planned:.0f}" if log.planned else "")
    )
    return Finding("warm-up", log.steps[-1], seen, ("lr",))


def resumed(log: Log, rates: np.ndarray) -> Finding | None:
    """A learning rate that starts again has lost its schedule, and most often Adam's moments."""
    known = np.flatnonzero(np.isfinite(rates))
    for i, j in zip(known, known[1:]):
        later = rates[j + 1 : j + 20]
        later = later[np.isfinite(later)]
        fell = (
            rates[j] < 0.5 * rates[:j][np.isfinite(rates[:j])].max() and rates[j] < 0.7 * rates[i]
        )
        again = len(later) > 1 and later.max() > 1.5 * max(rates[j], 1e-30) and later[0] > rates[j]
        if fell and again:
            seen = (
                f"the learning rate fell from {rates[i]:.2g} to {rates[j]:.2g} in one step and "
                f"rose to {later.max():.2g} again: the schedule began anew"
            )
            return Finding("resumed", log.steps[j], seen, ("lr",))
    if log.backwards:
        seen = (
            f"the count of steps goes back to {log.backwards[0]}: resumed, or two runs in one log"
        )
        return Finding("resumed", log.backwards[0], seen, ())
    return None


def remarks(log: Log, view: View) -> list[Finding]:
    """What is worth a word and no alarm."""
    out, end = [], log.steps[-1]
    norms, signal = view.all("grad_norm"), view.all("groups_with_signal")
    rewards = view.all("reward")
    if view.upto < FEWEST:
        seen = f"the log has {view.upto} steps; most rules need {FEWEST} to 30"
        out.append(Finding("too short", end, seen, ()))
    if len(norms) >= 20 and np.mean(norms > 1) > 0.95:
        seen = (
            f"the gradient's norm is above 1, the usual limit, in {100 * np.mean(norms > 1):.0f}% "
            f"of the steps (median {np.median(norms):.2g})"
        )
        out.append(Finding("every step clipped", end, seen, ("grad_norm",)))
    late = signal[-20:]
    if len(late) == 20 and late.mean() < 0.25 and len(rewards) >= 20:
        seen = f"{100 * (1 - late.mean()):.0f}% of the last 20 steps' groups had equal rewards"
        right = view.all(view.goal or "reward")[-20:]
        solved = right.mean() > 0.9 and rewards.max() <= 1.0001
        name = "solved" if solved else "few groups"
        seen += f", with a mean reward of {rewards[-20:].mean():.2f}"
        out.append(Finding(name, end, seen, ("groups_with_signal", "reward")))
    return out


def our_line(log: Log, i: int, first: bool) -> dict[str, float]:
    """Step i as a line of our metrics.jsonl. What an engine logs is about its own weights."""
    line = {n: v[i] for n, v in log.columns.items() if math.isfinite(v[i])}
    line["update"] = i + 1 if first else log.steps[i]
    if "mismatch" in line:
        line.setdefault("off_policy_steps", 0.0)
    if line.get("grad_norm") == 0:  # verl logs no share of groups; a gradient of 0 is the same
        line.setdefault("groups_with_signal", 0.0)
    return line


def evidence(name: str, sentence: str, view: View) -> Seen:
    """The numbers of our doctor's sentence, without its advice, which names our own flags."""
    columns = {
        "collapse": ("reward",),
        "stuck": ("groups_with_signal", "reward"),
        "no signal": ("groups_with_signal", "reward"),
        "noise": ("entropy",),
        "cut short": ("truncated", "reply_tokens"),
        "broken": ("format",),
        "stale": ("mismatch",),
        "two distributions": ("mismatch",),
        "pays something else": ("reward", "exact"),
    }.get(name, ())
    if name in ("no signal", "stuck") and not len(view.all("groups_with_signal")):
        reward = view.all("reward")[-START:].mean()
        seen = f"the gradient was exactly 0 in the last {START} steps, at a reward of {reward:.2f}"
        return seen, ("grad_norm", "reward")
    return sentence.partition(": ")[0], columns


def look_at(log: Log, goal: str | None, symptoms: Callable) -> list[Finding]:
    """Everything there is to tell about a log, in the order of its steps; remarks last.

    goal: the column that counts right answers, if one does. symptoms: doctor.symptoms, handed in
    because the doctor's command stands above this file.
    """
    columns = {n: np.array(v, dtype=float) for n, v in log.columns.items()}
    steps, n = np.array(log.steps), len(log.steps)
    found: dict[str, Finding] = {}
    for column, step in log.not_numbers.items():
        seen = f"{column} is not a finite number at step {step}"
        found.setdefault("not a number", Finding("not a number", step, seen, ()))
    gap = int(np.median(np.diff(steps))) if n > 1 else 1
    first = log.steps[0] <= max(gap, 1)  # the log has the run's beginning
    # Steps without a reward (TRL, between two generations) say nothing that our rules ask for.
    rows = [i for i in range(n) if "reward" not in columns or np.isfinite(columns["reward"][i])]
    stride = max(1, math.ceil(len(rows) / LOOKS))
    gaps = (our_line(log, i, first).get("mismatch") for i in rows if first)
    began = next((value for value in gaps if value is not None), None)
    for k in range(stride - 1, len(rows), stride):
        view = View(columns, goal, rows[k] + 1)
        lines = [our_line(log, i, first) for i in rows[max(0, k + 1 - LOOKS_BACK) : k + 1]]
        rewards = view.all("reward")[-LONGEST:].tolist()
        try:
            told = symptoms(lines, rewards, began) if rewards else {}
        except (KeyError, ValueError, IndexError, ArithmeticError):
            told = {}  # a column that only half of the lines have
        for name, sentence in told.items():
            if name not in found:
                seen, shown = evidence(name, sentence, view)
                found[name] = Finding(name, log.steps[rows[k]], seen, shown)
        for name, rule in RULES.items():
            if name in found or (name in AT_THE_END and k + stride < len(rows)):
                continue
            if seen := rule(view):
                found[name] = Finding(name, log.steps[rows[k]], *seen)
    rates = columns.get("lr", np.empty(0))
    for late in (warm_up(log, rates), resumed(log, rates)):
        if late:
            found[late.name] = late
    said = remarks(log, View(columns, goal, n))
    return [*sorted(tidy(found, said), key=lambda f: f.step), *said]


# If the first is told, the others would speak of the same illness.
HIDES = {
    "pays length": ("pays something else",),
    "warm-up": ("still",),
    "learning rate": ("still",),
    "collapse": ("entropy collapse", "still"),
    "stuck": ("no signal", "entropy collapse", "still"),
    "no signal": ("entropy collapse", "still"),
    "cut short": ("cut off more",),
    "noise": ("cut off more",),
}


def tidy(found: dict[str, Finding], said: list[Finding]) -> list[Finding]:
    """Without those that another one explains. What is solved has no signal, and that is well."""
    hidden = {name for one in found for name in HIDES.get(one, ())}
    if any(remark.name == "solved" for remark in said):
        hidden |= {"no signal", "entropy collapse"}
    return [one for name, one in found.items() if name not in hidden]


def demo() -> None:
    n = 40
    columns = {
        "reward": [0.4] * n,
        "lr": [1e-6 * i / 2000 for i in range(1, n + 1)],
    }
    log = Log([], "made up", "TRL", list(range(1, n + 1)), columns, {}, planned=n)
    found = look_at(log, None, lambda *_: {})
    print(*(f"step {one.step}: {one.name}: {one.seen}" for one in found), sep="\n")
    assert [one.name for one in found] == ["warm-up"]


if __name__ == "__main__":
    demo()
