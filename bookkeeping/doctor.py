"""What is wrong with this run? Symptoms read off the metrics, each with a likely cause and a cure.

A run that learns nothing looks much like one that does: lines go by and nothing raises. So after
every update the doctor looks at the newest lines of metrics.jsonl (grpo.update and
evaluate.summarize say what is in them) for the few things that usually go wrong. It tells each one
once, when it first sees it, and summary.json keeps it. Nothing here stops a run. A loss or a
log-prob that is not a number does, where it arises (grpo.py, sft.py, rollout.py,
bookkeeping/run.py), before it can reach a checkpoint.

    symptom              seen in             for most often
    collapse             reward              5   a learning rate that is too high
    stuck                groups_with_signal  5   one step that broke the policy: the rate again
    broken               format              3   the same, seen in replies that nothing can read
    no signal            groups_with_signal  10  a task that is too hard, or solved
    noise                entropy             3   a learning rate that is too high
    cut short            truncated           5   --max-tokens too small, or a stop token not learnt
    errors               errors              3   a bug in the environment
    stop token           stop_trained        1   the end-of-turn token is masked
    sequence ratio       stretch             2   a reply's ratio is clipped as if it were a token's
    not exact            exact, fraction     1   "correct" is counted as reward > 0
    pays something else  reward, exact       10  partial credit that pays a guess
    dropout              mismatch, twice     3   model.train() in the update
    stale                mismatch            3   the sampler has old weights
    two distributions    mismatch            3   another temperature, top-k or top-p in the sampler
    uncorrected          ratio, mismatch     3   --importance none on samples of old policies

The last eight are mistakes in the code around a run; learn/failures.py makes each of them on
purpose. (A ninth, `template`, is seen in the prompts themselves: guard.other_opening.)

After every evaluation bookkeeping/progress.py looks at evals.jsonl: did SFT help, did GRPO?

Run me: `python -m bookkeeping.doctor runs/NAME` looks at a run update by update; without a run, at
made-up ones. It also reads the logs of TRL, Unsloth, verl and prime-rl, and those of wandb and
TensorBoard: give it a file or a folder (docs/doctor.md, bookkeeping/foreign.py).
"""

import sys
from pathlib import Path

import numpy as np

import metrics
from bookkeeping import progress, records
from bookkeeping.progress import LOWER_RATE

LOOKS_BACK = 50  # lines are enough
START = 5  # updates that count as the start of a run
# How much of an answer is right, from 0 to 1, if the environment says so: letters', alphabet's.
PARTS = ("fraction", "similarity")


def symptoms(lines: list[dict], rewards: list[float], began: float | None = None) -> dict[str, str]:
    """{symptom: sentence} after an update. A sentence is "numbers: what they mean and what to do".

    lines: the newest of metrics.jsonl, in order. rewards: the mean reward of every update so far
    (in a curriculum: at this level). began: first_gap of the run's first lines; None: not known.
    """
    told = {
        "collapse": metrics.collapsed(rewards),
        "stuck": stuck(lines, rewards),
        "broken": broken(lines),
        "noise": noise(lines),
        "errors": errors(lines),
        "stop token": stop_token(lines),
        "sequence ratio": sequence_ratio(lines),
        "not exact": not_exact(lines),
        "pays something else": pays_something_else(lines),
        "uncorrected": uncorrected(lines),
        **disagreement(lines, began),
    }
    # A broken run also has no signal, and its replies may never end; but that is not what to mend.
    if not (told["stuck"] or told["broken"]):
        told |= {"no signal": no_signal(lines), "cut short": cut_short(lines)}
    return {name: sentence for name, sentence in told.items() if sentence}


def last(lines: list[dict], name: str, n: int) -> np.ndarray | None:
    """A metric's n newest values; None if there are not that many yet."""
    values = [line[name] for line in lines[-n:] if name in line]
    return np.array(values, dtype=float) if len(values) == n else None


def stuck(lines: list[dict], rewards: list[float], n: int = 5) -> str | None:
    """The policy repeats one token: no noise, no NaN, gradient 0. But it once scored.

    A learning rate of 30 leaves such a policy.
    """
    signal, start = last(lines, "groups_with_signal", n), rewards[:-n][:START]
    if signal is None or signal.any() or not start:
        return None
    was, now = np.mean(start), np.mean(rewards[-n:])
    if was < 0.1 or now > 0.5 * was:
        return None
    return (
        f"in the last {n} updates all samples of a task scored the same, {now:.2f} on average, "
        f"and at the start it was {was:.2f}: the policy is broken and cannot recover, "
        f"{LOWER_RATE}; start again with a third of it"
    )


def broken(lines: list[dict], n: int = 3) -> str | None:
    """A step that is far too large leaves replies that no environment can read.

    This shows long before a reward has anything to fall from.
    """
    lines = [line for line in lines if line.get("level") == lines[-1].get("level")]
    now = last(lines, "format", n)
    best = max((line["format"] for line in lines[:-n] if "format" in line), default=0)
    if now is None or best < 0.5 or now.max() > 0.2 * best:
        return None
    return (
        f"{100 * best:.0f}% of the replies had the right format and now {100 * now.mean():.0f}% "
        f"have: a step broke the policy, {LOWER_RATE}; start again with a third of it"
    )


def no_signal(lines: list[dict], n: int = 10) -> str | None:
    """A group whose rewards are all equal has advantages of 0, and so no gradient.

    All groups, n updates: nothing moved. See grpo.group_advantages.
    """
    signal, reward = last(lines, "groups_with_signal", n), last(lines, "reward", n)
    if signal is None or signal.any():
        return None
    if np.ptp(reward) < 1e-9 and reward[0] <= 0:
        why = (
            "the task is too hard to be right even once; make it easier (letters, swarm: "
            "--difficulty), train SFT longer, or pay parts (letters: --reward partial)"
        )
    else:
        why = (
            "the task may be solved, or its reward says the same of every answer; "
            "raise --difficulty, or look at the reward"
        )
    return (
        f"in the last {n} updates every group's rewards were all equal "
        f"(mean {reward.mean():.2f}), so nothing was learnt: {why}"
    )


def noise(lines: list[dict], n: int = 3) -> str | None:
    """Entropy per token falls while a policy learns.

    A policy with three times what it had, and more than 1 nat, has come apart.
    """
    start = [line["entropy"] for line in lines[:START] if "entropy" in line]
    now = last(lines, "entropy", n)
    if now is None or len(start) < START:
        return None
    was = float(np.median(start))
    if now.min() < max(1.0, 3 * was):
        return None
    return (
        f"the entropy of a token was {was:.2f} nats and is {now[-1]:.2f}: the policy writes "
        f"noise, {LOWER_RATE}; try a third of it"
    )


def cut_short(lines: list[dict], n: int = 5) -> str | None:
    """An episode that ran out of tokens rarely has an answer.

    So its reward says little about what the policy knows.
    """
    share = last(lines, "truncated", n)
    if share is None or share.min() <= 0.5:
        return None
    return (
        f"in the last {n} updates {100 * share.mean():.0f}% of the episodes ran out of tokens: "
        "raise --max-tokens, or see in report.html whether replies never end"
    )


def errors(lines: list[dict], n: int = 3) -> str | None:
    """Episodes in error are left out, so the mean of the others may be one of the easy tasks."""
    failed, played = last(lines, "errors", n), last(lines, "n", n)
    if failed is None or failed.min() < 1:
        return None
    lost, total = failed.sum(), failed.sum() + played.sum()
    if lost < 0.1 * total:
        return None
    return (
        f"in the last {n} updates {lost:.0f} of {total:.0f} episodes ended in an error and were "
        "left out: mend the environment (episodes.jsonl names each error)"
    )


def stop_token(lines: list[dict], n: int = 1) -> str | None:
    """Nearly all replies that ended by themselves should have their last token in the loss.

    Otherwise the policy forgets how to end.
    """
    trained = last(lines, "stop_trained", n)
    if trained is None or trained.max() > 0.5:
        return None
    return (
        f"of the replies that ended by themselves, {100 * trained[-1]:.0f}% have their end-of-turn "
        "token in the loss: it is masked, most often as padding, and replies will run on; "
        "keep it in the mask"
    )


def sequence_ratio(lines: list[dict], n: int = 2) -> str | None:
    """`stretch`: how far the loss's ratio moves for what the log-probs moved, over all tokens.

    Σ |log of the loss's ratio| / Σ |log-prob now - when sampled| is 1 for a ratio per token, and at
    most 1 for gspo's mean.
    """
    stretch = last(lines, "stretch", n)
    if stretch is None or stretch.min() < 2:
        return None
    clipped = 100 * lines[-1].get("clip_fraction", 0)
    return (
        f"the ratio in the loss moves {stretch[-1]:.0f} times as far as a token's log-prob, and "
        f"{clipped:.0f}% of the tokens are clipped: it is the ratio of a whole reply (a sum of "
        "log-ratios), clipped with a token's epsilon; take one ratio a token, or their mean as "
        "gspo does"
    )


def not_exact(lines: list[dict]) -> str | None:
    """An exact answer is right in all its parts, so no more answers are exact than parts are right.

    What exact answers are paid says nothing: an environment may well pay the shorter one more, or
    ten for each. If it does not report how much of an answer is right, the doctor stays silent: a
    reward of 0, 0.5 and 1 looks the same whether 0.5 is for half an answer or for a whole one that
    was not derived.
    """
    now = lines[-1] if lines else {}
    part = next((now[name] for name in PARTS if name in now), None)
    if "exact" not in now or part is None or part > now["exact"] - 1e-6:
        return None
    return (
        f"{100 * now['exact']:.0f}% of the answers count as exact, and on average "
        f"{100 * part:.0f}% of an answer is right: correct is counted as reward > 0, or the "
        "like; count what is exactly right"
    )


def pays_something_else(lines: list[dict], n: int = 10) -> str | None:
    """Exact answers are the goal. The reward is high without them, or rises and they do not.

    An environment may pay more than 1 for an exact answer: `exact_reward` is what it paid for one
    on average, in the updates that had any.
    """
    reward, exact = last(lines, "reward", n), last(lines, "exact", n)
    if reward is None or exact is None or np.allclose(reward, exact):
        return None
    cure = (
        "it pays something else, most often a guess that earns partial credit; "
        "pay exact answers, or make the parts small"
    )
    start, now = lines[:START], lines[-n:]
    paid = max(1.0, *(line.get("exact_reward", 0.0) for line in now))
    if reward.mean() > paid and not exact.any():
        return None  # it pays on another scale, and what it pays for a right answer is not known
    if reward.mean() / paid - exact.mean() > 0.75:  # --reward partial starts at 0.67, and learns
        return (
            f"the reward is {reward.mean():.2f} where {100 * exact.mean():.0f}% of the answers are "
            f"exact: {cure}"
        )
    was, was_exact = (
        float(np.mean([line.get(name, 0.0) for line in start])) for name in ("reward", "exact")
    )
    risen, exact_risen = reward.mean() - was, exact.mean() - was_exact
    if len(lines) < n + START or paid * exact_risen > 0.2 * risen:
        return None
    if risen < max(0.05, 4 * np.hypot(standard_error(start), standard_error(now))):
        return None
    return (
        f"the reward rose from {was:.2f} to {reward.mean():.2f}, and exact answers went from "
        f"{100 * was_exact:.0f}% to {100 * exact.mean():.0f}%: {cure}"
    )


def standard_error(lines: list[dict]) -> float:
    """Of the mean reward of these updates; a 95% interval is about four standard errors wide."""
    errors = [(line["reward_high"] - line["reward_low"]) / 4 for line in lines]
    return np.sqrt(sum(error**2 for error in errors)) / len(lines)


def first_gap(lines: list[dict]) -> float | None:
    """The mismatch of the first update that measured one."""
    return next((line["mismatch"] for line in lines if "mismatch" in line), None)


def disagreement(lines: list[dict], first: float | None, n: int = 3) -> dict[str, str]:
    """Sampler and trainer disagree about samples that are said to be the policy's own.

    Such samples have off_policy_steps 0. Rounding makes 1e-7 nats per token on a CPU, and about
    0.01 in bfloat16 with another engine. More than that (the column `rounding`) has one of three
    causes, and each leaves its own trace: dropout also differs from itself, old weights get older,
    two distributions do neither.
    """
    trained = [line for line in lines if "mismatch" in line]  # an update without a signal has none
    gap, age = last(trained, "mismatch", n), last(trained, "off_policy_steps", n)
    if gap is None or age is None or age.any():
        return {}
    twice, allowed = last(trained, "twice", n), lines[-1].get("rounding", 0.03)
    if not gap.min() > allowed:
        return {}
    much = (
        f"trainer and sampler give a token log-probs that differ by {gap[-1]:.3f} nats on average, "
        "though the samples are said to be the policy's own"
    )
    if twice is not None and twice.min() > 0.3 * gap.min():
        return {
            "dropout": f"{much}, and two passes of the trainer over the same tokens differ by "
            f"{twice[-1]:.3f}: dropout is on in the update; use model.eval() there, or dropout 0"
        }
    if first is not None and first < 0.1 * gap.min():
        return {
            "stale": f"{much}; in the first update it was {first:.0e}: the sampler still has old "
            "weights; hand it new ones after every update, under a new name"
        }
    if first is not None and first > allowed:
        return {
            "two distributions": f"{much}, from the first update on: the sampler draws from "
            "another distribution than is trained; use one temperature, and no top-k or top-p"
        }
    return {}


def uncorrected(lines: list[dict], n: int = 3) -> str | None:
    """The ratio is 1 however old the samples are.

    With --importance none it compares with the policy at the start of the update.
    """
    columns = [last(lines, name, n) for name in ("off_policy_steps", "mismatch", "ratio")]
    if any(column is None for column in columns):
        return None
    age, gap, ratio = columns
    if "importance" in lines[-1] or age.min() < 2 or gap.min() < 1e-3:
        return None
    if np.abs(ratio - 1).max() > 1e-6:
        return None
    return (
        f"samples are {age.mean():.0f} updates old and their log-probs have moved by "
        f"{gap[-1]:.3f} nats a token, yet the ratio is 1.000: nothing corrects for who sampled; "
        "--importance sequence or clip, or fewer --async-rollouts"
    )


# ------------------------------------------------------------------------------------ a whole run


def look_at(lines: list[dict], evals: list[dict] = (), config: dict | None = None) -> list[str]:
    """Everything there is to tell about a run, in order: "update N: symptom: sentence".

    lines: metrics.jsonl. evals: evals.jsonl. config: the run's flags.
    """
    told: dict[str, str] = {}

    def tell(update: int, found: dict[str, str]) -> None:
        for name, sentence in found.items():
            told.setdefault(name, f"update {update}: {name}: {sentence}")

    def after(update: int, rewards: list[float]) -> None:
        seen = [e for e in evals if e.get("stage") in progress.STAGES and e["update"] <= update]
        if seen and max(e["update"] for e in seen) == update:
            tell(update, progress.symptoms(seen, rewards, config or {}))

    after(0, [])
    for i, now in enumerate(lines, 1):
        so_far = lines[:i]
        # A curriculum never goes back to a level.
        rewards = [line["reward"] for line in so_far if line.get("level") == now.get("level")]
        tell(now["update"], symptoms(so_far[-LOOKS_BACK:], rewards, first_gap(so_far)))
        after(now["update"], rewards)
    return list(told.values())


def made_up(**values) -> list[dict]:
    """30 updates of a healthy run, except for what is given as {metric: its values}."""
    rng = np.random.default_rng(0)
    healthy = {
        "reward": 0.4 + 0.01 * np.arange(30) + rng.normal(0, 0.02, 30),
        "groups_with_signal": np.full(30, 0.8),
        "entropy": np.linspace(0.3, 0.1, 30),
        "truncated": np.zeros(30),
        "errors": np.zeros(30),
        "n": np.full(30, 64),
    }
    columns = healthy | values
    return [
        {"update": i + 1, **{name: float(column[i]) for name, column in columns.items()}}
        for i in range(30)
    ]


def demo() -> None:
    """A healthy run and three sick ones."""
    half = lambda before, after: np.repeat([before, after], 15).astype(float)
    sick = {"reward": half(0.5, 0.0), "entropy": half(0.2, 6.0), "truncated": half(0.0, 1.0)}
    runs = {
        "healthy": {},
        "too hard": {"reward": np.zeros(30), "groups_with_signal": np.zeros(30)},
        "a learning rate of 1": sick,
        "a bug": {"errors": half(0, 16), "n": half(64, 48)},
    }
    for name, values in runs.items():
        print(f"{name}:", *(look_at(made_up(**values)) or ["nothing to tell"]), sep="\n  ")
    assert look_at(made_up()) == []
    assert len(look_at(made_up(**sick))) == 3


def main(folder: Path) -> None:
    logs = [folder / f"{name}.jsonl" for name in ("metrics", "evals")]
    flags = folder / "config.json"
    if not any(file.exists() for file in logs):
        why = f"there is no such file, so {folder} is no run that has trained; check the path"
        raise SystemExit(f"{logs[0]}: {why}")
    with records.foreign(folder):
        config = records.read(flags) if flags.exists() else {}
        try:
            told = look_at(*map(records.lines, logs), config)
        except ModuleNotFoundError as missing:  # `pip install ".[doctor]"`: others' logs need numpy
            cure = f"pip install {missing.name}"
            raise ValueError(f"{folder}: a run of ours needs {missing.name}; {cure}") from None
        print("\n".join(map(records.printable, told)) or "nothing to tell")


def is_ours(path: Path) -> bool:
    """Is this the folder of a run of ours, or nothing at all? Others call their count `step`."""
    lines = path / "metrics.jsonl"
    if not path.exists() or (path / "evals.jsonl").exists():
        return True
    if not lines.is_file():
        return False
    with open(lines, "rb") as f:
        start = f.read(4096)
    return b'"update"' in start or b'"step"' not in start


def command() -> None:
    """`python -m bookkeeping.doctor`, and `picoswarm-doctor` if it is installed."""
    words = [word for word in sys.argv[1:] if word != "--json"]
    if not words and "--json" not in sys.argv:
        return demo()
    if len(words) != 1 or words[0].startswith("-"):
        print("usage: doctor FILE_OR_FOLDER [--json]; docs/doctor.md says what it reads")
        raise SystemExit(0 if words in (["-h"], ["--help"]) else 2)
    path, as_json = Path(words[0]), "--json" in sys.argv
    if not path.exists():
        print(f"{path}: there is no such file or folder; check the path", file=sys.stderr)
        raise SystemExit(2)
    if is_ours(path) and not as_json:
        return main(path)
    from bookkeeping import foreign  # not needed while a run trains

    raise SystemExit(foreign.main(path, as_json, symptoms))


if __name__ == "__main__":
    command()
