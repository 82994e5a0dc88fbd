"""How a policy is judged: greedily, on tasks that it never trained on.

Two kinds of numbers come out of episodes, and they are not the same. An *evaluation*
plays every task of a set once, greedily: it always takes the likeliest token. Its
interval is over tasks, and two evaluations are compared task by task. A *training
batch* is sampled (temperature 1) on a few tasks, different ones in every update. It is
good to watch, but too noisy to draw conclusions from.

There are two kinds of sets. *Development* tasks are played before, during and after
every run, and every choice (a setting, a moment to stop, a better loss) is based on
them. But the best of ten numbers is biased upwards, so *held-out* tasks are kept apart:
no run plays them, and no choice is based on them. `train.py --eval-only runs/NAME
--held-out` plays them, once, for a table.

An episode whose environment failed has no reward. It is left out of every mean, but it
is counted. A comparison leaves its task out on both sides.

    evals.jsonl     {"update": 20, "stage": "train", "tasks": "tier 6", "reward": [1.0 …
    metrics.jsonl   {"update": 20, "reward": 0.41, "reward_low": 0.33, …}

Run me: `python evaluate.py` plays a few tasks with pico_base and prints a line of both.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

import metrics
from rollout import Episode
from settings import Config, env_kind, env_name, levels_of, make_env

# The first held-out task. Only the final evaluation (--eval-only) and lab/, which
# makes the final tables, may use this number; a test checks that. If any file could
# play these tasks, they would not be held out for long.
HELD_OUT_SEEDS = 4_000_000_000
EVAL_TIERS = (3, 5, 6)  # letters: evaluated in addition to the trained tier


# ------------------------------------------------------------------- what is evaluated


def eval_sets(
    cfg: Config, new_env_at: Callable | None = None, sweep: bool = False
) -> dict[str, tuple]:
    """What is evaluated: {name of a set of tasks: (is it the trained level?, new_env)}.

    The same name means the same tasks. new_env() makes an environment of the set's
    level. It calls new_env_at(level), which by default is make_env. sweep: add swarm's
    other levels, which take too long during a run.
    """
    new_env_at = new_env_at or partial(make_env, cfg)
    own, levels = cfg.difficulty, levels_of(cfg.env)
    others = {"letters": EVAL_TIERS, "custom": levels, "swarm": levels if sweep else ()}
    chosen = {own}
    if cfg.eval_other_tiers:
        chosen.update(others.get(env_kind(cfg.env), ()))
    sets = {}
    # cfg's own level comes last if it is not in levels, like "mixed" in swarm
    for level in dict.fromkeys([*levels, own]):
        if level in chosen:
            name = TASKS[env_kind(cfg.env)](make_env(cfg, level), cfg.env, level)
            sets[name] = (level == own, partial(new_env_at, level))
    return sets


def lists_of(env) -> str:
    """A description of an Alphabet's lists: '3 turns, 1-4 names, power 8'."""
    span = lambda low, high: str(low) if low == high else f"{low}-{high}"
    a_turn = " a turn" if env.power_per_turn else ""
    return (
        f"{span(env.min_turns, env.max_turns)} turns, "
        f"{span(env.min_names, env.max_names)} names, "
        f"power {env.similarity_power:g}{a_turn}"
    )


TASKS = {  # {kind of environment: what a set of its tasks is called}
    "letters": lambda env, name, level: f"tier {level}",
    "alphabet": lambda env, name, level: lists_of(env),
    "swarm": lambda env, name, level: f"{level} v{env.version}",
    "known": lambda env, name, level: env.name,
    "custom": lambda env, name, level: (
        f"{env_name(name)}, level {level}" if levels_of(name) else env_name(name)
    ),
}


# --------------------------------------------------------------------- what came of it


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


def eval_line(
    update: int,
    stage: str,
    tasks: str,
    trained: bool,
    episodes: list[Episode],
    missing: dict[int, str] | None = None,
) -> dict:
    """A line of evals.jsonl: every task's result, in order.

    missing: {index of a failed task: why}. A null in a list means that the episode's
    score has no such entry.
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


def summarize(groups: list[list[Episode]]) -> dict:
    """A line of metrics.jsonl about one batch of G groups of k episodes, [G][k].

    Most entries are means over episodes. The reward is the mean over groups, and has an
    interval. ValueError if all episodes failed.
    """
    played = without_failed(groups)
    episodes = [e for g in played for e in g]
    # Episodes of a group share a task, so they are not independent: the interval is
    # over group means.
    reward = metrics.mean([sum(e.reward for e in g) / len(g) for g in played])
    # How far apart the rewards of a group are. Partial credit brings them closer. Then
    # advantages, divided by a small deviation, are mostly noise (picoRL's diagnosis).
    spread = np.mean([np.std([e.reward for e in g]) for g in played])
    average = lambda values: sum(values) / len(values)
    scores = {
        name: average([x for x in values if x is not None])
        for name, values in parts(episodes).items()
    }
    exact = [e.reward for e in episodes if e.components.get("exact") == 1]
    # what exact answers earned on average
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
        raise ValueError(
            f"every episode ended in an error ({first}); fix the environment, then use "
            "--resume (with --env again if it is a file of your own)"
        )
    return played


if __name__ == "__main__":
    from policy import PICO, PlainSampler, load_policy
    from rollout import play

    policy = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    new_env = partial(make_env, Config(difficulty=1, sft_style="states"), 1)
    limits = {"max_tokens": 32, "sample_seed": 0}
    sampler = PlainSampler(policy)
    groups = play(policy, sampler, new_env, [*range(8)], 1, temperature=0.0, **limits)
    line = eval_line(0, "before", "tier 1", True, [e for [e] in groups])
    print("a line of evals.jsonl:", line)
    print("\ntier 1, greedy: exact", metrics.mean(line["exact"]))
    groups = play(policy, sampler, new_env, [1, 2, 3], 4, temperature=1.0, **limits)
    line = {key: round(value, 3) for key, value in summarize(groups).items()}
    print("\n3 tasks, 4 samples each, at temperature 1:", line)
