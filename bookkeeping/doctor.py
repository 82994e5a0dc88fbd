"""What is wrong with this run? Symptoms read off the metrics, each with its likely cause and what to do about it.

A run that learns nothing looks much like one that does: lines go by, nothing raises. After every update the newest lines of metrics.jsonl
(grpo.update and evaluate.summarize say what is in them) are looked at for the few things that usually go wrong; each is told once, when it is
first seen, and kept in summary.json. Nothing here stops a run. What does, a loss or log-prob that is not a number, raises where it is met
(grpo.py, sft.py, rollout.py, bookkeeping/run.py), before it can reach a checkpoint.

    symptom              seen in                for         most often
    collapse             reward                 5 updates   a learning rate that is too high
    stuck                groups_with_signal     5           one step that broke the policy: the learning rate again
    broken               format                 3           the same, seen in replies that cannot be read any more
    no signal            groups_with_signal     10          a task that is too hard, or solved
    noise                entropy                3           a learning rate that is too high
    cut short            truncated              5           --max-tokens too small, or a stop token that is never learnt
    errors               errors                 3           a bug in the environment
    stop token           stop_trained           1           the end-of-turn token is masked
    sequence ratio       stretch                2           the ratio of a reply is clipped as if it were a token's
    not exact            exact, fraction        1           "correct" is counted as reward > 0
    pays something else  reward, exact          10          partial credit that pays a guess
    dropout              mismatch, twice        3           model.train() in the update
    stale                mismatch               3           the sampler has old weights
    two distributions    mismatch               3           another temperature, top-k or top-p in the sampler
    uncorrected          ratio, mismatch        3           --importance none on samples of old policies

The last eight are mistakes in the code around a run: learn/failures.py makes each of them on purpose. (A ninth, `template`, is seen in the prompts
themselves: sft.other_opening.)

Run me: `python -m bookkeeping.doctor runs/NAME` looks at a run update by update; without a run, at made-up ones.
"""

import json
import sys
from pathlib import Path

import numpy as np

import metrics

LOOKS_BACK = 50  # lines are enough
PARTS = ("fraction", "similarity")  # how much of an answer is right, from 0 to 1, if the environment says so: letters', alphabet's


def symptoms(lines: list[dict], rewards: list[float]) -> dict[str, str]:
    """{symptom: sentence} after an update. lines: the newest of metrics.jsonl, in order; rewards: the mean reward of every update so far
    (of a curriculum: at this level)."""
    told = {"collapse": metrics.collapsed(rewards), "stuck": stuck(lines, rewards), "broken": broken(lines), "noise": noise(lines), "errors": errors(lines),
            "stop token": stop_token(lines), "sequence ratio": sequence_ratio(lines), "not exact": not_exact(lines),
            "pays something else": pays_something_else(lines), "uncorrected": uncorrected(lines), **disagreement(lines)}  # fmt: skip
    # A broken run also has no signal, and its replies may never end; but that is not what to mend.
    if not (told["stuck"] or told["broken"]):
        told |= {"no signal": no_signal(lines), "cut short": cut_short(lines)}
    return {name: sentence for name, sentence in told.items() if sentence}


def last(lines: list[dict], name: str, n: int) -> np.ndarray | None:
    """A metric's n newest values; None if there are not so many yet."""
    values = [line[name] for line in lines[-n:] if name in line]
    return np.array(values, dtype=float) if len(values) == n else None


def stuck(lines: list[dict], rewards: list[float], n: int = 5) -> str | None:
    """A learning rate of 30 leaves a policy that repeats one token: no noise, no NaN, gradient 0. What gives it away is that it once scored."""
    signal, start = last(lines, "groups_with_signal", n), rewards[:-n][:5]
    if signal is None or signal.any() or not start or np.mean(start) < 0.1 or np.mean(rewards[-n:]) > 0.5 * np.mean(start):
        return None
    return (f"in the last {n} updates all samples of a task scored the same, {np.mean(rewards[-n:]):.2f} on average, and at the start it was {np.mean(start):.2f}: "
            "the policy is broken and cannot recover, most often because the learning rate is too high; start again with a third of it")  # fmt: skip


def broken(lines: list[dict], n: int = 3) -> str | None:
    """A step that is far too large leaves replies that no environment can read, long before a reward has anything to fall from."""
    now, before = last(lines, "format", n), [line["format"] for line in lines[:-n] if "format" in line]
    if now is None or not before or max(before) < 0.5 or now.max() > 0.2 * max(before):
        return None
    return (f"{100 * max(before):.0f}% of the replies had the right format and now {100 * now.mean():.0f}% have: a step broke the policy, most often because the learning rate is too high; "
            "start again with a third of it")  # fmt: skip


def no_signal(lines: list[dict], n: int = 10) -> str | None:
    """A group whose rewards are all equal has advantages of 0, and so no gradient (grpo.group_advantages). All groups, n updates: nothing moved."""
    signal, reward = last(lines, "groups_with_signal", n), last(lines, "reward", n)
    if signal is None or signal.any():
        return None
    if np.ptp(reward) < 1e-9 and reward[0] <= 0:
        why = "the task is too hard to be right even once; lower --difficulty, train SFT longer, or pay parts (--reward partial)"
    else:
        why = "the task may be solved, or its reward says the same of every answer; raise --difficulty, or look at the reward"
    return f"in the last {n} updates every group's rewards were all equal (mean {reward.mean():.2f}), so nothing was learnt: {why}"


def noise(lines: list[dict], n: int = 3) -> str | None:
    """Entropy per token falls while a policy learns. Thrice what it was, and above 1 nat, is a policy that has come apart."""
    start, now = [line["entropy"] for line in lines[:5] if "entropy" in line], last(lines, "entropy", n)
    if now is None or len(start) < 5 or now.min() < max(1.0, 3 * float(np.median(start))):
        return None
    return f"the entropy of a token was {np.median(start):.2f} nats and is {now[-1]:.2f}: the policy writes noise, most often because the learning rate is too high; try a third of it"


def cut_short(lines: list[dict], n: int = 5) -> str | None:
    """An episode that ran out of tokens rarely has an answer, so its reward says little of what the policy knows."""
    share = last(lines, "truncated", n)
    if share is None or share.min() <= 0.5:
        return None
    return f"in the last {n} updates {100 * share.mean():.0f}% of the episodes ran out of tokens: raise --max-tokens, or see in report.html whether replies never end"


def errors(lines: list[dict], n: int = 3) -> str | None:
    """Episodes in error are left out, so a mean over what is left may be one over the easy tasks."""
    failed, played = last(lines, "errors", n), last(lines, "n", n)
    if failed is None or failed.min() < 1 or failed.sum() < 0.1 * (failed.sum() + played.sum()):
        return None
    return f"in the last {n} updates {failed.sum():.0f} of {failed.sum() + played.sum():.0f} episodes ended in an error and were left out: mend the environment (episodes.jsonl names each error)"


def stop_token(lines: list[dict], n: int = 1) -> str | None:
    """Of the replies that ended by themselves nearly all should have their last token in the loss, or the policy forgets how to end."""
    trained = last(lines, "stop_trained", n)
    if trained is None or trained.max() > 0.5:
        return None
    return (f"of the replies that ended by themselves, {100 * trained[-1]:.0f}% have their end-of-turn token in the loss: it is masked, most often as padding, and replies "
            "will run on; keep it in the mask")  # fmt: skip


def sequence_ratio(lines: list[dict], n: int = 2) -> str | None:
    """`stretch`: Σ |log of the loss's ratio| over Σ |log-prob now - when sampled|, of all tokens: 1 for a token's ratio, at most 1 for gspo's mean."""
    stretch = last(lines, "stretch", n)
    if stretch is None or stretch.min() < 2:
        return None
    return (f"the ratio in the loss moves {stretch[-1]:.0f} times as far as a token's log-prob, and {100 * lines[-1].get('clip_fraction', 0):.0f}% of the tokens are clipped: it is the ratio "
            "of a whole reply (a sum of log-ratios), clipped with a token's epsilon; take one ratio a token, or their mean as gspo does")  # fmt: skip


def not_exact(lines: list[dict]) -> str | None:
    """An exact answer is right in all its parts, so on average no more answers are exact than parts are right.

    What exact answers are paid tells nothing, because an environment may well pay the shorter one more, or ten for each. Where it does not say how much of
    an answer is right, nothing is told: a reward of 0, 0.5 and 1 looks the same whether 0.5 is for half an answer or for a whole one that was not derived.
    """
    exact = last(lines, "exact", 1)
    parts = next((values for values in (last(lines, name, 1) for name in PARTS) if values is not None), None)
    if exact is None or parts is None or parts[0] > exact[0] - 1e-6:
        return None
    return (f"{100 * exact[0]:.0f}% of the answers count as exact, and on average {100 * parts[0]:.0f}% of an answer is right: correct is counted as reward > 0, or the like; count "
            "what is exactly right")  # fmt: skip


def pays_something_else(lines: list[dict], n: int = 10) -> str | None:
    """Exact answers are what is wanted. The reward has risen beyond its noise and they have not, or it is high without them.

    An environment may pay more than 1 for an exact answer: `exact_reward` is what it paid, on average, where there was one.
    """
    reward, exact, then = last(lines, "reward", n), last(lines, "exact", n), lines[:5]
    if reward is None or exact is None or np.allclose(reward, exact):
        return None
    cure = "it pays something else, most often a guess that earns partial credit; pay exact answers, or make the parts small"
    paid = max(1.0, *(line.get("exact_reward", 0.0) for line in lines[-n:]))
    if reward.mean() / paid - exact.mean() > 0.75:  # --reward partial has 0.67 between them at first, and it does learn
        return f"the reward is {reward.mean():.2f} where {100 * exact.mean():.0f}% of the answers are exact: {cure}"
    error = lambda some: np.sqrt(sum(((line["reward_high"] - line["reward_low"]) / 4) ** 2 for line in some)) / len(some)
    before, before_exact = (float(np.mean([line[name] for line in then])) for name in ("reward", "exact"))
    risen = reward.mean() - before
    if (
        len(lines) < n + 5
        or risen < max(0.05, 4 * np.hypot(error(then), error(lines[-n:])))
        or paid * (exact.mean() - before_exact) > 0.2 * risen
    ):
        return None
    return f"the reward rose from {before:.2f} to {reward.mean():.2f}, and exact answers went from {100 * before_exact:.0f}% to {100 * exact.mean():.0f}%: {cure}"


def disagreement(lines: list[dict], n: int = 3) -> dict[str, str]:
    """Samples that are said to be the policy's own (off_policy_steps 0), and to which it gives other log-probs than its sampler did.

    Rounding is 1e-7 nats a token on a CPU and about 0.01 in bfloat16 with another engine. What is more (than the column `rounding` allows) has one of three
    causes, and each leaves its own trace: dropout differs from itself, old weights get older, two distributions do neither.
    """
    trained = [line for line in lines if "mismatch" in line]  # an update without a signal has none
    gap, age = last(trained, "mismatch", n), last(trained, "off_policy_steps", n)
    if gap is None or age is None or age.any():
        return {}
    first = trained[0]["mismatch"] if lines[0]["update"] == 1 else None
    twice, most = last(trained, "twice", n), lines[-1].get("rounding", 0.03)
    much = f"trainer and sampler give a token log-probs that differ by {gap[-1]:.3f} nats on average, though the samples are said to be the policy's own"
    if gap.min() > most and twice is not None and twice.min() > 0.3 * gap.min():
        return {
            "dropout": f"{much}, and two passes of the trainer over the same tokens differ by {twice[-1]:.3f}: dropout is on in the update; use model.eval() there, or dropout 0"
        }
    if first is not None and first < 0.1 * gap.min() and gap.min() > most:
        return {
            "stale": f"{much}; in the first update it was {first:.0e}: the sampler still has old weights; hand it new ones after every update, under a new name"
        }
    if first is not None and first > most and gap.min() > most:
        return {
            "two distributions": f"{much}, from the first update on: the sampler draws from another distribution than is trained; use one temperature, and no top-k or top-p"
        }
    return {}


def uncorrected(lines: list[dict], n: int = 3) -> str | None:
    """With --importance none the ratio is to the policy at the start of the update, so it is 1 however old the samples are."""
    age, gap, ratio = (last(lines, name, n) for name in ("off_policy_steps", "mismatch", "ratio"))
    if (
        age is None
        or gap is None
        or ratio is None
        or "importance" in lines[-1]
        or age.min() < 2
        or gap.min() < 1e-3
        or np.abs(ratio - 1).max() > 1e-6
    ):
        return None
    return (f"samples are {age.mean():.0f} updates old and their log-probs have moved by {gap[-1]:.3f} nats a token, yet the ratio is 1.000: nothing corrects for who sampled; "
            "--importance sequence or clip, or fewer --async-rollouts")  # fmt: skip


def look_at(lines: list[dict]) -> list[str]:
    """All that is told of a run, in the order in which it is seen: "update N: symptom: sentence"."""
    told = {}
    for i in range(len(lines)):
        rewards = [line["reward"] for line in lines[: i + 1] if line.get("level") == lines[i].get("level")]  # a curriculum never goes back
        for name, sentence in symptoms(lines[max(0, i + 1 - LOOKS_BACK) : i + 1], rewards).items():
            told.setdefault(name, f"update {lines[i]['update']}: {name}: {sentence}")
    return list(told.values())


def kept(summary: dict) -> dict[str, str]:
    """{symptom: sentence} of summary.json. Runs from before there was a doctor know one symptom."""
    return summary.get("warnings", {"collapse": summary["collapse"]} if summary.get("collapse") else {})


def made_up(**values) -> list[dict]:
    """30 updates of a healthy run, but for what is given as {metric: its values}."""
    rng = np.random.default_rng(0)
    healthy = {"reward": 0.4 + 0.01 * np.arange(30) + rng.normal(0, 0.02, 30), "groups_with_signal": np.full(30, 0.8), "entropy": np.linspace(0.3, 0.1, 30),
               "truncated": np.zeros(30), "errors": np.zeros(30), "n": np.full(30, 64)}  # fmt: skip
    columns = healthy | values
    return [{"update": i + 1, **{name: float(column[i]) for name, column in columns.items()}} for i in range(30)]


def demo() -> None:
    """A healthy run and three sick ones."""
    half = lambda before, after: np.repeat([before, after], 15).astype(float)
    runs = {
        "healthy": {},
        "too hard": {"reward": np.zeros(30), "groups_with_signal": np.zeros(30)},
        "a learning rate of 1": {"reward": half(0.5, 0.0), "entropy": half(0.2, 6.0), "truncated": half(0.0, 1.0)},
        "a bug": {"errors": half(0, 16), "n": half(64, 48)},
    }
    for name, values in runs.items():
        print(f"{name}:", *(look_at(made_up(**values)) or ["nothing to tell"]), sep="\n  ")
    assert look_at(made_up()) == [] and len(look_at(made_up(**runs["a learning rate of 1"]))) == 3


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(demo())
    file = Path(sys.argv[1]) / "metrics.jsonl"
    if not file.exists():
        sys.exit(f"{file}: there is no such file, so {sys.argv[1]} is no run that has trained; check the path")
    print("\n".join(look_at([json.loads(line) for line in file.read_text().splitlines()])) or "nothing to tell")
