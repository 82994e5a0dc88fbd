"""Did SFT help, did GRPO? Symptoms read off the evaluations of a run, for the doctor to tell.

After every evaluation the doctor looks at evals.jsonl, at the tasks that are trained. Every
evaluation plays the same development tasks, so two of them are compared task by task:

    symptom              seen in                           most often
    no SFT               before and after SFT the same     too few steps, or nothing new was shown
    bad SFT              reward, exact lower after SFT     a rate that is too high, or bad examples
    pays something else  reward up, exact down             partial credit that pays a guess
    only in training     training up, evaluations not      few or easier tasks in training
    lost                 reward, exact below after SFT     a learning rate that is too high
    past its best        reward, exact below the best      it trained for too long
    length               replies half or twice as long     what longer replies were for is not paid

How often does it cry wolf? Evaluations are looked at again and again, so 95% will not do. While a
run trains, a difference counts from 4 standard errors on (SURE), and at its end, which comes once,
from 3 on. Of 12,000 made-up runs that stood still, evaluated 7 or 20 times each, 26 were told
something (tests/test_doctor.py repeats it with fewer). The price: a loss of 8 points on 256 tasks
is told in half of the runs that end with it. The interval in the report shows the others.
"""

import numpy as np

import metrics
from bookkeeping import records

SURE, SURE_AT_END = 4.0, 3.0  # standard errors between two evaluations that are no chance
MEASURABLE = 2.0  # … and that a 95% interval shows
SMALL = 0.05  # a change that is no change, as compare.EQUAL
STAGES = ("before", "after_sft", "train", "final")  # evaluations that belong to the run


def symptoms(evals: list[dict], rewards: list[float], config: dict) -> dict[str, str]:
    """{symptom: sentence} after an evaluation.

    evals: the lines of evals.jsonl so far. rewards: as in doctor.symptoms. config: the run's flags.
    """
    evals = [e for e in evals if e.get("trained") and e.get("stage") in STAGES]
    of_stage = {e["stage"]: e for e in evals}
    if "after_sft" not in of_stage:
        return {}
    told, sft, now = {}, of_stage["after_sft"], evals[-1]
    if "before" in of_stage and config.get("sft_steps"):
        told |= sft_changed(*records.same_tasks(of_stage["before"], sft))
    if now["stage"] in ("train", "final"):
        name = goal(*evals)
        best = max(evals[evals.index(sft) : -1], key=lambda e: np.mean(e[name]))
        sft, now, best = records.same_tasks(sft, now, best)
        told |= (  # the first that is there: the others would speak of the same illness
            evaluations_pay_something_else(sft, now)
            or ({} if config.get("curriculum") else only_in_training(sft, now, rewards))
            or lost(sft, now)
            or past_its_best(best, now)
            or length(sft, now)
        )
    return told


def goal(*evals: dict) -> str:
    """What evaluations are about: exact answers, if all of them have such."""
    return "exact" if all("exact" in e for e in evals) else "reward"


def moved(before: dict, after: dict, name: str) -> float:
    """By how many standard errors a measure rose, over tasks that both have a result of.

    As in compare.permutation_test: if nothing has changed, every difference could as well have
    the other sign, and a sum of n such has the variance Σ difference². So z tasks squared have to
    change before this can reach z, however few there are.
    """
    difference = np.array(after[name], dtype=float) - np.array(before[name], dtype=float)
    return float(difference.sum() / np.sqrt(max((difference**2).sum(), 1e-12)))


def fallen(before: dict, after: dict, errors: float) -> str:
    """How exact answers or the reward fell, by so many standard errors; "" if neither did."""
    for name in dict.fromkeys((goal(before, after), "reward")):
        if moved(before, after, name) < -errors:
            return change(before, after, name)
    return ""


def sure(now: dict) -> float:
    return SURE_AT_END if now["stage"] == "final" else SURE


def change(before: dict, after: dict, name: str) -> str:
    """'exact answers went from 19.5% to 12.5%, -7.0 points [-10.9, -3.1], n=256, paired'"""
    gain = metrics.gain(before[name], after[name])
    was, now = np.mean(before[name]), np.mean(after[name])
    went = f"the mean reward went from {was:.3f} to {now:.3f}, {gain.signed()}"
    if name == "exact":
        went = f"exact answers went from {100 * was:.1f}% to {100 * now:.1f}%, {gain.points()}"
    return f"{went}, n={gain.n}, paired"


def equal(before: dict, after: dict, name: str) -> bool:
    """Is a change shown to be small? Its whole interval is, beside the values that there are."""
    gain = metrics.gain(before[name], after[name])
    span = 1.0 if name == "exact" else np.ptp([*before[name], *after[name]])
    return max(abs(gain.low), abs(gain.high)) <= SMALL * span


def sft_changed(before: dict, after: dict) -> dict[str, str]:
    """Did SFT do anything, and was it good?"""
    if went := fallen(before, after, SURE_AT_END):
        return {
            "bad SFT": f"over SFT {went}, on development tasks: the "
            "demonstrations are worse than the model was, or SFT broke it; read what it says "
            "after_sft in report.html, lower --sft-lr, or leave it out (--sft-steps 0)"
        }
    seen = {"exact", "reward", "format", "reply_tokens"} & before.keys() & after.keys()
    name = goal(before, after)
    still = all(abs(moved(before, after, name)) <= MEASURABLE for name in seen)
    if not (still and equal(before, after, name)):
        return {}
    return {
        "no SFT": f"over SFT {change(before, after, name)}, on development tasks, and neither "
        "format nor length of the replies moved: it taught nothing that can be measured, most "
        "often because of too few steps or a low rate; three times --sft-lr or --sft-steps, or "
        "--sft-steps 0 if the model can do already what is shown"
    }


def evaluations_pay_something_else(sft: dict, now: dict) -> dict[str, str]:
    """The same as in training (doctor.py).

    Two things come together, so exact answers need not have fallen as surely as the reward rose.
    """
    up = moved(sft, now, "reward") >= sure(now)
    if not up or goal(sft, now) != "exact" or moved(sft, now, "exact") > 1 - sure(now):
        return {}
    return {
        "pays something else": f"on development tasks {change(sft, now, 'reward')}, and "
        f"{change(sft, now, 'exact')}: the reward pays something else, most often a guess that "
        "earns partial credit; pay exact answers, or make the parts small"
    }


def only_in_training(sft: dict, now: dict, rewards: list[float], n: int = 10) -> dict[str, str]:
    """The training reward rises, beyond what development tasks earn, and those earn no more.

    Beyond: at first a greedy policy earns more than its samples, and samples may catch up with it.
    """
    if len(rewards) < 2 * n or moved(sft, now, "reward") > MEASURABLE:
        return {}
    start, end = metrics.level(rewards[:n]), metrics.level(rewards[-n:])
    if end.mean - start.mean < 0.1 or end.low < max(start.high, metrics.mean(now["reward"]).high):
        return {}
    return {
        "only in training": f"the training reward rose from {start.mean:.2f} to {end.mean:.2f}, "
        f"and on development tasks {change(sft, now, 'reward')}: what is learnt holds for the "
        "training tasks alone, because they are few, easier or leak the answer; look at "
        "reset(seed), or stop earlier"
    }


def lost(sft: dict, now: dict) -> dict[str, str]:
    """GRPO has made the policy worse than SFT left it."""
    if went := fallen(sft, now, sure(now)):
        return {
            "lost": f"since SFT {went}, on development tasks: GRPO makes the policy worse, most "
            "often because the learning rate is too high, or because the reward pays something "
            "else; try a third of --lr, and read in report.html what is paid"
        }
    return {}


def past_its_best(best: dict, now: dict) -> dict[str, str]:
    """The best of all evaluations is the best by luck, too; so this one is never lenient."""
    name = goal(best, now)
    fallen = np.mean(best[name]) - np.mean(now[name])
    # Paired tasks can make sure of a change that is too small to act on: from 1.223 to 1.216 in
    # swarm, and later that run rose to 1.243.
    if moved(best, now, name) > -SURE or fallen < 0.01 * abs(np.mean(best[name])):
        return {}
    return {
        "past its best": f"since update {best['update']} {change(best, now, name)}, on development "
        f"tasks: the best is behind it; start again with a lower --lr, or with --updates "
        f"{best['update']}"
    }


def length(sft: dict, now: dict) -> dict[str, str]:
    """Replies that halve or double and are no better for it. What is nearly always right may."""
    was, tokens = (float(np.mean(e["reply_tokens"])) for e in (sft, now))
    factor, name = tokens / max(was, 1e-9), goal(sft, now)
    if 0.5 < factor < 2 or abs(moved(sft, now, "reply_tokens")) < SURE:
        return {}
    if moved(sft, now, name) > MEASURABLE or (name == "exact" and np.mean(now[name]) > 0.95):
        return {}
    why = (
        "what the longer ones were for, such as thinking, is not paid or costs reward; see that "
        "right answers earn more than short ones"
        if factor < 1
        else "length is paid, or replies do not end; see in report.html what was added, and "
        "whether the reward asks for it"
    )
    return {
        "length": f"replies to development tasks went from {was:.0f} to {tokens:.0f} tokens since "
        f"SFT, and {change(sft, now, name)}: {why}"
    }
