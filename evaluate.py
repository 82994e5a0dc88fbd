"""How a policy is judged: greedily, on tasks that it never trained on.

Two kinds of numbers come out of episodes, and they are not the same. An *evaluation*
plays every task of a set once, greedily: its interval is over tasks, and two
evaluations are compared task by task. A *training batch* is sampled (temperature 1) on
a few tasks, different ones in every update: good to watch, too noisy to conclude from.

There are two sets. *Development* tasks are played before, during and after every run,
and every choice (a setting, a moment to stop, a better loss) is made by them. But the
best of ten numbers is biased upwards, so *held-out* tasks are kept apart: no run plays
them and nothing is chosen by them. `train.py --eval-only runs/NAME --held-out` plays
them, once, for a table.

An episode whose environment failed has no reward. It is in no mean, but it is counted,
and a comparison leaves its task out on both sides.

    evals.jsonl     {"update": 20, "stage": "train", "tasks": "tier 6", "reward": [1.0 …
    metrics.jsonl   {"update": 20, "reward": 0.41, "reward_low": 0.33, …}

Run me: `python evaluate.py` evaluates pico_base on eight tasks and prints both.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import metrics
from bookkeeping import doctor, records, report, tables
from bookkeeping import folder as run_folder
from bookkeeping.folder import load_checkpoint
from bookkeeping.refusals import check, guarded, preflight, warn_unread_flags
from fast import parallel
from fast.ahead import open_rollouts
from fast.machine import choose_model
from policy import Policy, load_policy
from rollout import Episode, play
from settings import (
    DEV_SEEDS,
    Config,
    dev_seeds,
    eval_sets,
    make_env,
    seeds_from,
    settable,
)

# Only this file and lab/study.py, which makes the final tables, may use it (a test
# checks): if any file could play these tasks, they would not be held out for long.
HELD_OUT_SEEDS = 4_000_000_000
MEND = "mend the environment and --resume, with --env again if it is a file of your own"


def evaluate_policy(
    policy: Policy,
    roll: Callable,
    sets: dict,
    seeds: list[int],
    folder: Path,
    stage: str,
    update: int,
) -> dict[str, dict[str, metrics.Interval]]:
    """Play the tasks with these seeds in every set, each greedily.

    roll(make_env, seeds) -> groups, one sample per task. sets: {name: (is it the one
    trained on?, make_env)}. stage: before, after_sft, train, final or eval_only;
    update: updates the policy has seen. Each task's result goes to evals.jsonl;
    episodes.jsonl gets a few whole episodes of the trained set. Returns {set: its
    headline}, without the failed episodes. Raises ValueError if all of them failed.
    """
    results = {}
    bar = parallel.bar(sets.items(), desc=f"eval {stage}", leave=False)
    for tasks, (trained, new_env) in bar:
        groups = roll(partial(guarded, new_env), seeds)  # [n][1]
        played = [e for [e] in without_failed(groups)]
        failed = {
            i: e.error for i, [e] in enumerate(groups) if e.stop_reason == "error"
        }
        line = eval_line(update, stage, tasks, trained, played, failed)
        records.append(folder / "evals.jsonl", line)
        if trained:
            records.save_episodes(folder, update, stage, policy, worth_reading(groups))
        results[tasks] = headline(played)
        shown = "  ".join(f"{name} {x}" for name, x in results[tasks].items())
        records.say(
            folder,
            f"eval {stage:10} update {update:4}  {tasks}  {shown}"
            + records.broken(groups),
        )
    return results


def worth_reading(groups: list[list[Episode]]) -> list[list[Episode]]:
    """The first eight groups; if the environment has no `exact`, also the best one."""
    played = [g for g in groups if g[0].stop_reason != "error"]
    first, best = groups[:8], max(played, key=lambda g: g[0].reward)
    graded = any("exact" not in g[0].components for g in played)
    return [*first, best] if graded and best not in first else first


def headline(episodes: list[Episode]) -> dict[str, metrics.Interval]:
    """What is printed about an evaluation: the reward, and `exact` if there is one."""
    found = {"reward": [e.reward for e in episodes]} | parts(episodes)
    return {
        name: metrics.mean(found[name]) for name in ("reward", "exact") if name in found
    }


def parts(episodes: list[Episode]) -> dict[str, list[float | None]]:
    """{entry of the score: its value in each episode, or None if it has none}.

    An episode of two turns has no turn_3, and a 0 would mean a third turn that was
    played badly.
    """
    names = dict.fromkeys(name for e in episodes for name in e.components)
    missing = {"exact": 0.0, "format": 0.0}  # not reported means not right
    return {
        name: [e.components.get(name, missing.get(name)) for e in episodes]
        for name in names
    }


def known(values: list[float | None]) -> list[float]:
    return [x for x in values if x is not None]


def eval_line(
    update: int,
    stage: str,
    tasks: str,
    trained: bool,
    episodes: list[Episode],
    missing: dict[int, str] | None = None,
) -> dict:
    """A line of evals.jsonl: every task's result, in order.

    missing: {index of a failed task: why}. null means that an episode's score has no
    such entry.
    """
    scores = {"reward": [e.reward for e in episodes]} | parts(episodes)
    rounded = lambda values: [x if x is None else round(x, 5) for x in values]
    return {
        "update": update,
        "stage": stage,
        "tasks": tasks,
        "trained": trained,
        **{name: rounded(values) for name, values in scores.items()},
        "reply_tokens": [e.reply_tokens for e in episodes],
        "truncated": [e.stop_reason == "truncated" for e in episodes],
        **({"missing": missing} if missing else {}),
    }


def print_components(line: dict) -> None:
    """Each measure in a line of evals.jsonl, with its interval."""
    tasks, n = line["tasks"], len(line["reward"])
    print(f"\n{tasks}: mean [95% interval], greedy, {n} tasks that were not trained on")
    for name in tables.measures(line):
        values = tables.values(line, name)
        given = values[~np.isnan(values)]
        print(f"  {name:22} {tables.cell(name, given)}, n={len(given)}")


def summarize(groups: list[list[Episode]]) -> dict:
    """A line of metrics.jsonl about one batch [G][k]: means over its episodes.

    The reward's mean is over groups, with its interval. ValueError if all episodes
    failed.
    """
    played = without_failed(groups)
    episodes = [e for g in played for e in g]
    # Episodes of a group share a task and are not independent: the interval is over
    # group means.
    reward = metrics.mean([sum(e.reward for e in g) / len(g) for g in played])
    # How far apart the rewards of a group are. Partial credit brings them closer, and
    # what is divided by a small deviation is mostly noise (picoRL's diagnosis).
    spread = np.mean([np.std([e.reward for e in g]) for g in played])
    average = lambda values: sum(values) / len(values)
    scores = {name: average(known(x)) for name, x in parts(episodes).items()}
    exact = [e.reward for e in episodes if e.components.get("exact") == 1]
    # what exact answers earned
    paid = {"exact_reward": average(exact)} if exact else {}
    return {
        "reward": reward.mean,
        "reward_low": reward.low,
        "reward_high": reward.high,
        "n": len(episodes),
        "deviation": float(spread),
        **scores,
        **paid,
        "reply_tokens": average([e.reply_tokens for e in episodes]),
        "truncated": average([e.stop_reason == "truncated" for e in episodes]),
        "errors": sum(map(len, groups)) - len(episodes),
    }


def without_failed(groups: list[list[Episode]]) -> list[list[Episode]]:
    """Groups without the episodes that failed. ValueError if all of them did."""
    played = [[e for e in g if e.stop_reason != "error"] for g in groups]
    played = [g for g in played if g]
    if not played:
        first = next(e.error for g in groups for e in g)
        raise ValueError(f"every episode ended in an error ({first}); {MEND}")
    return played


def probe_report(groups: list[list[Episode]], cfg: Config) -> list[str]:
    """What GRPO could learn from a batch [G][k], in a few lines, the verdict last."""
    played = without_failed(groups)
    episodes = [e for g in played for e in g]
    right = [[e.components.get("exact", e.reward) == 1 for e in g] for g in played]
    lengths = [e.reply_tokens for e in episodes]
    line = summarize(groups)
    different = [len({tuple(e.token_ids) for e in g}) for g in played]
    texts = (m["content"] for m in episodes[0].messages if m["role"] == "assistant")
    reply = next(texts, "")[-200:]
    return [
        f"replies     {len(episodes)}, {line.get('format', 1):.0%} in the right format",
        f"length      {line['reply_tokens']:.0f} tokens, at most {max(lengths)}; "
        f"{line['truncated']:.0%} are cut at --max-tokens {cfg.max_tokens}",
        f"different   {np.mean(different):.1f} of {cfg.k} replies to a task",
        f"reward      {metrics.mean([np.mean([e.reward for e in g]) for g in played])}",
        f"pass@1      {metrics.mean([np.mean(g) for g in right])} of full marks",
        f"pass@{cfg.k:<7}{metrics.mean([float(any(g)) for g in right])}",
        f"a reply     {reply!r}, reward {episodes[0].reward:g}",
        signal_verdict(groups),
    ]


def healthy_values(cfg: Config) -> str:
    """A line to print before the first update: which ratio and loss are healthy."""
    if cfg.epochs > 1 or cfg.async_rollouts:
        return (
            "the ratio leaves 1.000 here: watch the reward, clip_fraction and approx_kl"
        )
    if cfg.loss in ("grpo", "gspo") and cfg.baseline != "none" and not cfg.kl:
        return (
            "a loss near 0 and a ratio of 1.000 are healthy on-policy; watch the reward"
        )
    # dr_grpo and dapo weight by length; the value of a log-prob is nowhere near 0, nor
    # is a KL term
    return "a ratio of 1.000 is healthy on-policy, any loss is; watch the reward"


def signal_verdict(groups: list[list[Episode]]) -> str:
    """Does GRPO have something to learn from a batch [G][k]?"""
    rewards = [[e.reward for e in g] for g in without_failed(groups)]
    signal = sum(len(set(row)) > 1 for row in rewards)
    now = f"{signal} of {len(rewards)} groups have a signal"
    if signal >= doctor.FEW * len(rewards):
        return f"{now}: GRPO has something to learn from"
    if np.mean(sum(rewards, [])) > 0.9:
        return f"{now}, and the tasks are solved: give it harder ones"
    cure = doctor.cure("few groups", doctor.OURS)
    return f"{now}: GRPO will hardly move; try {cure}"


# ----------------------------------------------------------------- train.py --eval-only

# The name of a set of tasks already says these settings (settings.eval_sets):
IN_NAME = (
    "version",
    "min_turns",
    "max_turns",
    "min_names",
    "max_names",
    "similarity_power",
    "power_per_turn",
)
# The flags that go with --eval-only: which tasks, the rules they are played by, and
# how all this is computed.
MAY_BE_TYPED = (
    "difficulty",
    "eval_other_tiers",
    "eval_n",
    "set",
    "max_tokens",
    "reward",
    "device",
    "threads",
    "engine",
    "vllm_memory",
    "plain",
    "vllm_seeds",
    "vllm_sleep",
)
# Added to the name of a set of tasks if the policy is as it was before SFT and GRPO, or
# samples instead of taking the likeliest token.
BASE, SAMPLED = ", base", ", sampled"
GAINED = (
    "reward",
    "exact",
    "payoff",
    "quality",
    "turns_used",
    "error_rate",
    "any_error",
)


def evaluate_only(given: Config, typed: set[str]) -> None:
    """Evaluate a run's checkpoint and its base; print each component, and the gains.

    given: the Config of the command line, whose eval_only names the run folder; typed:
    the names of the flags that were typed. SystemExit or ValueError with one sentence
    if it cannot be done.
    """
    if parallel.world() > 1:
        raise ValueError("--eval-only is for one process; leave torchrun out")
    folder = Path(given.eval_only)
    cfg, saved, lock = run_folder.open_saved("--eval-only", folder, given)
    run_folder.mend(folder)
    if saved is None:
        raise SystemExit(f"--eval-only {folder}: it has no checkpoint yet; train first")
    check(cfg)  # your own class may no longer have the level
    sets, seeds = chosen_tasks(cfg, given, typed)
    preflight(cfg)
    run_folder.tell_changed(saved, cfg.env)
    path, why, _ = choose_model(cfg.model, cfg.env, cfg.device)
    policy = load_policy(
        path, cfg.lora_rank, cfg.lora_alpha, cfg.device, cfg.seed, cfg.today
    )
    rollouts = open_rollouts(cfg, policy)
    before = len(records.lines(folder / "evals.jsonl"))
    # Freshly loaded, its adapter adds nothing: this is the base.
    play_ways(cfg, policy, rollouts, sets, seeds, folder, 0, BASE)
    with records.foreign(folder):
        update = load_checkpoint(saved, policy)[1]["updates"]  # Adam's moments go
    print(f"{folder} after {update} updates; {why}")
    play_ways(cfg, policy, rollouts, sets, seeds, folder, update)
    lines = records.lines(folder / "evals.jsonl")[before:]
    for line in lines:
        if line["tasks"] in sets:  # greedy, with the adapter
            print_components(line)
    print_gains(lines)
    if (folder / "summary.json").exists():  # a run that is not finished has no report
        with records.foreign(folder):
            report.write(folder)
    lock.release()
    print(f"\nkept in {folder}/evals.jsonl, and in its report if it has one")


def play_ways(
    cfg, policy, rollouts, sets, seeds, folder: Path, update: int, whose: str = ""
) -> None:
    """Play the sets greedily, then sampled."""
    for how, temperature in (("", 0.0), (SAMPLED, cfg.temperature)):
        roll = partial(rollouts.once, update=update, temperature=temperature)
        named = {
            name + how + whose: (trained and not how + whose, new_env)
            for name, (trained, new_env) in sets.items()
        }
        evaluate_policy(policy, roll, named, seeds, folder, "eval_only", update)


def print_gains(lines: list[dict]) -> None:
    """What the adapter gains on each set, paired: both played the same tasks."""
    rows, found = [], {line["tasks"]: line for line in lines}
    for tasks in (name for name in found if not name.endswith(BASE)):
        base, own = records.same_tasks(found[tasks + BASE], found[tasks])
        for name in GAINED:
            if name in own and (name == "reward" or own[name] != own["reward"]):
                gain = metrics.gain(base[name], own[name])
                means = [
                    tables.cell(name, tables.values(line, name)) for line in (base, own)
                ]
                share = name in tables.PERCENT
                change = gain.points() if share else gain.signed()
                rows.append([tasks, tables.label(name), *means, change, str(gain.n)])
    text = ["The same tasks, paired; greedy unless it says sampled; 95% intervals."]
    head = ["tasks", "", "without the adapter", "with it", "difference", "n"]
    print("\n" + tables.markdown([tables.section("What was learnt", text, head, rows)]))


def chosen_tasks(cfg: Config, given: Config, typed: set[str]) -> tuple[dict, list[int]]:
    """(the sets to evaluate, the seeds of their tasks); cfg gets what was typed.

    Other rules or held-out tasks give the set another name, so that it is not compared
    with the run's own.
    """
    own = next(name for name, (trained, _) in eval_sets(cfg).items() if trained)
    own_rules = rules_of(cfg)
    warn_unread_flags(cfg, typed)
    cfg.async_rollouts = 0  # there is no trainer to run ahead of
    given.set = [*cfg.set, *given.set]  # the later one counts
    names = typed - {"eval_only", "held_out"}
    run_folder.take_typed("--eval-only", cfg, given, names, MAY_BE_TYPED)
    check(cfg)
    if "difficulty" in typed:
        cfg.eval_other_tiers = False
    rules = ""
    for rule, value in rules_of(cfg).items():
        if value != own_rules[rule]:
            rules += f", {rule.replace('_', ' ')} {value}"
    if given.held_out:
        rules += ", held-out"
        print("held-out tasks: for a final table; choose nothing by them")
    first = HELD_OUT_SEEDS if given.held_out else DEV_SEEDS
    seeds = seeds_from(cfg, first, cfg.eval_n)
    if not seeds:
        raise ValueError(
            f"--held-out: {cfg.env} has no tasks for it; see docs/tasks.md"
        )
    sets = {
        name + rules: (name + rules == own, new_env)
        for name, (_, new_env) in eval_sets(cfg, sweep=True).items()
    }
    return sets, seeds


def rules_of(cfg: Config) -> dict:
    """{rule: its value}, for the rules that a set's name does not mention."""
    env = make_env(cfg, cfg.difficulty)
    own = [name for name in settable(cfg.env) if name not in IN_NAME]
    # Only letters has another reward to choose.
    rules = {"max_tokens": cfg.max_tokens, "reward": getattr(env, "reward_kind", None)}
    return rules | {name: getattr(env, name) for name in own}


if __name__ == "__main__":
    from policy import PICO

    cfg = Config(eval_n=8, difficulty=3, max_tokens=320)
    check(cfg)
    policy = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    rollouts, new_env = open_rollouts(cfg, policy), partial(make_env, cfg, 3)
    groups = rollouts.greedy(new_env, dev_seeds(cfg), update=0)  # [8][1]
    episodes = [group[0] for group in groups]
    print_components(eval_line(0, "before", "pico_base, tier 3", True, episodes))
    groups = play(policy, rollouts.sampler, new_env, [1, 2, 3], 4, 320, 1.0, 0)
    line = {key: round(value, 3) for key, value in summarize(groups).items()}
    print("\n3 tasks, 4 samples each, at temperature 1:", line)
