"""How a policy is judged: greedy, on the same held-out tasks every time; and what a batch of samples says in one line.

Two kinds of numbers come out of episodes, and they are not the same. An *evaluation* plays every held-out task once, greedily: its interval
is over tasks, and two evaluations are compared task by task. A *training batch* is sampled at temperature 1 on tasks that are never seen again:
good for watching, too noisy to conclude from.

An episode in which the environment broke has no reward. It is in no mean, it is counted, and a comparison leaves its task out on both sides.

    evals.jsonl     {"update": 20, "stage": "train", "tasks": "tier 6", "reward": [1.0, 0.0, …], "exact": […], "reply_tokens": […], …}
    metrics.jsonl   {"update": 20, "reward": 0.41, "reward_low": 0.33, "reward_high": 0.49, "n": 64, …}

Run me: `python evaluate.py` evaluates pico_base on eight tasks and prints both.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

import env_swarm
import metrics
from bookkeeping import records, report
from bookkeeping.checkpoint import find_checkpoint, load_checkpoint
from bookkeeping.run import append, claim, mend, read_config, refuse_code, save_episodes
from fast.sampler import make_sampler
from policy import choose_model, load_policy
from rollout import Episode, play
from settings import Config, check, eval_sets, make_env

EVAL_SEEDS = env_swarm.EVAL_SEEDS  # 2e9; train.py draws from 0 and 1e9 on, lab/base/pretrain.py from 3e9


def greedy(policy, sampler, max_tokens: int) -> Callable:
    """roll(make_env, seeds) -> groups, for evaluate_policy: one sample a task, each token the likeliest."""
    return lambda make_env, seeds: play(policy, sampler, make_env, seeds, 1, max_tokens, 0.0, 0)


def evaluate_policy(
    policy, roll: Callable, folder: Path, sets: dict, n: int, stage: str, done: int, log: Callable
) -> dict[str, list[Episode]]:
    """Play n held-out tasks of every set. Each task's result goes to evals.jsonl, a few whole episodes to episodes.jsonl.

    roll(make_env, seeds) -> groups, greedy and one sample a task. sets: {name: (is it the one trained on?, make_env)}.
    stage: before, after_sft, train, final or eval_only; done: updates the policy has seen (-1: not even SFT).
    Returns {name: its episodes}, without those in error. Raises ValueError if all of them are.
    """
    results = {}
    for name, (trained, new_env) in tqdm(sets.items(), desc=f"eval {stage}", leave=False):
        groups = roll(new_env, [EVAL_SEEDS + i for i in range(n)])
        missing = {i: g[0].error for i, g in enumerate(groups) if g[0].stop_reason == "error"}
        results[name] = episodes = [g[0] for g in groups if g[0].stop_reason != "error"]
        if not episodes:
            raise ValueError(
                f"{name}: every episode of this evaluation ended in an error ({missing[0]}); mend the environment and --resume"
            )
        parts = episodes[0].components
        append(folder / "evals.jsonl", eval_line(done, stage, name, trained, episodes, missing))
        if trained:
            shown = groups[:8]
            best = max(groups, key=lambda g: g[0].reward)
            if "exact" not in parts and best not in shown:  # where no episode is simply right, the best one is worth reading
                shown = [*shown, best]
            save_episodes(folder, done, stage, policy, shown, temperature=1.0)  # only a rollout's ratios need it
        measures = {"reward": metrics.mean([e.reward for e in episodes])}
        if "exact" in parts:
            measures["exact"] = metrics.proportion(sum(e.components.get("exact", 0.0) for e in episodes), len(episodes))
        tqdm.write(
            f"eval {stage:10} update {done:4}  {name}  " + "  ".join(f"{key} {value}" for key, value in measures.items()) + broken(groups)
        )
        log({**{f"eval/{name}/{key}": value.mean for key, value in measures.items()}, "update": done})
    return results


def broken(groups: list[list[Episode]]) -> str:
    """What a person is told of episodes in error: how many, and the first."""
    errors = [e.error for g in groups for e in g if e.stop_reason == "error"]
    return f"\n  {len(errors)} of {sum(map(len, groups))} episodes ended in an error and are left out: {errors[0]}" if errors else ""


def eval_line(done: int, stage: str, name: str, trained: bool, episodes: list[Episode], missing: dict[int, str] | None = None) -> dict:
    """A line of evals.jsonl: the result of every task, in order; missing: {number of a task without a result: why}."""
    parts = episodes[0].components
    return {
        "update": done, "stage": stage, "tasks": name, "trained": trained, "reward": [round(e.reward, 5) for e in episodes],
        **{part: [round(e.components.get(part, 0.0), 4) for e in episodes] for part in parts},
        "reply_tokens": [e.reply_tokens for e in episodes], "truncated": [e.stop_reason == "truncated" for e in episodes],
        **({"missing": missing} if missing else {}),
    }  # fmt: skip


def print_components(name: str, episodes: list[Episode]) -> None:
    """Reward and components of an evaluation, each with its interval."""
    print(f"\n{name}: mean [95% interval], greedy, {len(episodes)} held-out tasks")
    parts = {"reward": [e.reward for e in episodes]}
    parts |= {part: [e.components.get(part, 0.0) for e in episodes] for part in episodes[0].components}
    for part, values in parts.items():
        print(f"  {part:22} {metrics.mean(values)}")


def summarize(groups: list[list[Episode]]) -> dict:
    """A line of metrics.jsonl about one batch of groups: means over episodes, the reward with its interval. ValueError if all are in error."""
    episodes = [e for group in groups for e in group if e.stop_reason != "error"]
    if not episodes:
        first = next(e.error for group in groups for e in group)
        raise ValueError(f"every episode of this update ended in an error ({first}); mend the environment and --resume")
    # Episodes of a group share a task and are not independent: the interval is over group means.
    by_group = [sum(e.reward for e in g) / len(g) for g in ([e for e in g if e.stop_reason != "error"] for g in groups) if g]
    reward = metrics.mean(by_group, resamples=500)
    names = episodes[0].components
    exact = [e.reward for e in episodes if e.components.get("exact") == 1]
    return {
        "reward": sum(e.reward for e in episodes) / len(episodes), "reward_low": reward.low, "reward_high": reward.high, "n": len(episodes),
        **{name: sum(e.components[name] for e in episodes) / len(episodes) for name in names},
        **({"exact_reward": sum(exact) / len(exact)} if exact else {}),  # what an exact answer was paid: 1 in letters and alphabet
        "reply_tokens": sum(e.reply_tokens for e in episodes) / len(episodes),
        "truncated": sum(e.stop_reason == "truncated" for e in episodes) / len(episodes),
        "errors": sum(e.stop_reason == "error" for g in groups for e in g),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ train.py --eval-only

# What may be set beside the run's own config: the tasks, and how they are computed.
FOR_EVAL = ("difficulty", "eval_n", "max_tokens", "device", "threads", "engine", "vllm_memory", "min_turns", "max_turns", "min_names", "max_names",
            "similarity_power", "power_per_turn", "reward", "swarm_version", "swarm_payoff", "swarm_reputation", "swarm_quality",
            "swarm_diversity", "swarm_floor", "swarm_floor_penalty", "swarm_error_penalty")  # fmt: skip


def evaluate_only(given) -> None:
    """Evaluate a run's checkpoint on held-out tasks of any difficulty; print every component with its interval, and keep it in the run.

    given: the Config of the command line, whose eval_only names the run folder. SystemExit or ValueError with one sentence if it cannot be done.
    """
    folder = Path(given.eval_only)
    if not (folder / "config.json").exists():
        raise SystemExit(f"--eval-only {folder}: there is no config.json in it, so it is no run folder; check the path")
    lock = claim(folder)
    mend(folder)
    saved = find_checkpoint(folder / "checkpoint")
    if saved is None:
        raise SystemExit(f"--eval-only {folder}: it has no checkpoint yet; train first")
    cfg = Config(**read_config(folder, Config))
    refuse_code(folder, cfg.env, given.env)
    own = next(name for name, (trained, _) in eval_sets(cfg).items() if trained)
    for name, default in asdict(Config()).items():
        value = getattr(given, name)
        if value == default or name == "eval_only":
            continue
        if name not in FOR_EVAL and value != getattr(cfg, name):
            raise SystemExit(
                f"--{name.replace('_', '-')}: this run has {getattr(cfg, name)}, and --eval-only cannot change it; leave it out"
            )
        setattr(cfg, name, value)
    check(cfg)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    path, why = choose_model(cfg.model, cfg.env)
    policy = load_policy(path, cfg.lora_rank, cfg.lora_alpha, cfg.device, cfg.seed)
    _, state = load_checkpoint(saved, policy)
    sets = {name: (name == own, env) for name, (trained, env) in eval_sets(cfg).items() if trained}
    print(f"{folder} after {state['update']} updates; {why}")
    sampler = make_sampler(cfg, policy)
    sampler.sync(state["update"])
    results = evaluate_policy(
        policy, greedy(policy, sampler, cfg.max_tokens), folder, sets, cfg.eval_n, "eval_only", state["update"], lambda line: None
    )
    for name, episodes in results.items():
        print_components(name, episodes)
        if cfg.env == "swarm":
            print("\nreward of the scripted players on the same scenarios:")
            for player in env_swarm.STYLES:
                env = make_env(cfg, cfg.difficulty)
                env.style = player
                print(f"  {player:22} {env_swarm.evaluate(env, cfg.eval_n, EVAL_SEEDS)['reward']}")
    if (folder / "summary.json").exists():
        with records.foreign(folder):
            report.write(folder)
    lock.release()
    print(f"\nkept in {folder}/evals.jsonl and {folder}/report.md")


if __name__ == "__main__":
    import tempfile
    from functools import partial

    from env_letters import Letters
    from fast.sampler import TorchSampler
    from policy import PICO

    policy = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    sampler, env = TorchSampler(policy), partial(Letters, 3, "binary", True, "states")
    with tempfile.TemporaryDirectory() as name:
        roll, sets = greedy(policy, sampler, 320), {"tier 3": (True, env)}
        for tasks, episodes in evaluate_policy(policy, roll, Path(name), sets, 8, "demo", 0, lambda line: None).items():
            print_components(tasks, episodes)
    line = summarize(play(policy, sampler, env, [1, 2, 3], 4, 320, 1.0, noise=0))
    print("\n3 tasks, 4 samples each, at temperature 1:", {key: round(value, 3) for key, value in line.items()})
