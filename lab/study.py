"""Train the missing arms of a table. lab/study.toml has every table's arms as data.

    python -m lab.study letters                      # what results/letters.json does not have yet
    python -m lab.study letters --arms grpo chance --seeds 2 --runs /tmp/runs --results /tmp/results

A fair table compares its own arm with everything that might do as well, each at its best:

    sweep       each setting of an arm with seed 0; the best is chosen on *development* tasks
    seeds       the best setting with every seed; their number is fixed before the first run
    held-out    only then does a policy play tasks that no run has looked at

results/TABLE.json grows by one setting or seed at a time. Results that it has are not run again,
and a run that was cut off continues. lab/tables.py makes the pages' tables from it. A seed's entry:

    {"seed": 0, "held_out": {WORLD: {"greedy": {"exact": "0110…"}, "sampled": …}},
     "development": {"after_sft": "0100…", "final": "0110…"}, "work": 2.4, "seconds": 455.0,
     "tokens": {"sampled": 1197663, "read": …, "trained": …, "sft": …}, "machine": …, "commit": …,
     "mismatch": 0.008, "clip_fraction": 0.004}

A string has a digit per task, a list a number. Work is millions of tokens of replies: once when
sampled, three times (forward and backward) when trained. Prompts are in "read" alone. (Older seeds
lack tokens and all that follows.)

An arm may be played by another model, behind an OpenAI-compatible endpoint (`player`). It plays
greedily, and its replies may be as long as a policy's of that table.
"""

import asyncio
import json
import multiprocessing
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import tyro

import env_swarm
import settings
from batch import collate
from bookkeeping import pretrained, records, refusals, run
from bookkeeping.folder import find_checkpoint, load_checkpoint
from chat import encode
from evaluate import HELD_OUT_SEEDS, eval_sets
from fast import logprobs, machine
from fast.sampler import TorchSampler
from lab.tables import RESULTS, ROOT, WAYS, digits, keep, numbers
from policy import Policy, with_weights
from rollout import play

# Defaults of lab/study.toml, which explains the fields.
ARM = {
    "flags": "",
    "sweep": [],
    "seeds": 99,
    "worlds": [],
    "of": "",
    "prefill": 0,
    "best_of": 1,
    "draws": 1,
    "player": "",
}
# With --max-staleness these are kept of each update: they say what speed made of the lag.
SPEED = ("off_policy_steps", "batches_dropped", "seconds_wait", "seconds_train")
# Means over updates: nats between sampler and trainer at a sampled token, the share that is clipped.
OFF = ("mismatch", "clip_fraction")
SHARED = 2048  # micro_tokens of runs that share a card: 17 of SmolLM2 took 39 of 80 GB
KEEPING = threading.Lock()  # arms that grow at the same time write to one file


# ---------------------------------------------------------------------------- one run
def train(flags: str, folder: Path, here: Sequence[str]) -> None:
    """Run train.py with these flags, and those of this machine (here), into this folder.

    A finished run is left alone; one that was cut off continues.
    """
    if (folder / "summary.json").exists():
        return
    words = [*flags.split(), "--runs", str(folder.parent), "--name", folder.name, "--no-wandb"]
    if (folder / "config.json").exists():
        words = ["--resume", str(folder), "--env", records.config_of(folder)["env"]]
    subprocess.run([sys.executable, "train.py", *words, *here], cwd=ROOT, check=True)


def outcome(folder: Path, measure: str) -> dict:
    """What a finished run reports: development tasks, work, seconds."""
    summary = json.loads((folder / "summary.json").read_text())
    tokens = summary["tokens"]
    lines = records.lines(folder / "metrics.jsonl")
    free = [line for line in lines if "batches_dropped" in line]
    means = {name: [line[name] for line in lines if name in line] for name in OFF}
    return {
        "development": {
            line["stage"]: digits(line[measure])
            for line in records.lines(folder / "evals.jsonl")
            if line["trained"] and line["stage"] in ("before", "after_sft", "final")
        },
        "work": (tokens["sampled"] + 3 * tokens["trained"]) / 1e6,
        "tokens": tokens,
        "seconds": summary["seconds"]["total"],
        "machine": summary["machine"]["device"],
        "commit": summary["machine"]["commit"],
        **{name: [line[name] for line in free] for name in SPEED if free},
        **{name: sum(values) / len(values) for name, values in means.items() if values},
    }


# ---------------------------------------------------------------------------- held-out tasks
def play_world(table: "Table", arm: dict, flags: str, folder: Path, seed: int) -> dict:
    """{decoding: {measure: values}} on held-out tasks, by the policy of this folder."""
    cfg, _ = settings.command_line(flags.split())
    refusals.check(cfg)
    path, why, fits = machine.choose_model(cfg.model, cfg.env, cfg.device)
    policy = pretrained.load_checked(path, cfg.lora_rank, cfg.lora_alpha, cfg.device)
    cfg = settings.complete(cfg, policy.n_parameters, path, fits)
    make_env = next(make for trained, make in eval_sets(cfg).values() if trained)
    seeds = settings.seeds_from(cfg, HELD_OUT_SEEDS, cfg.eval_n)
    measured = lambda marks: {
        name: digits([m[name] for m in marks])
        for name in table.measures
        if all(name in m for m in marks)
    }
    if "@" in arm["player"]:
        return {"greedy": measured(asyncio.run(ask(arm["player"], cfg, make_env, seeds)))}
    if arm["player"]:
        env = make_env()
        env.style = arm["player"]
        return {"scripted": measured([env_swarm.play(env, number) for number in seeds])}
    load_checkpoint(find_checkpoint(folder / "checkpoint"), policy)
    sampler, found = TorchSampler(policy), {}
    batches = [seeds]
    if arm["prefill"]:
        sampler = Prefilled(sampler, arm["prefill"])
        make_env = partial(sampler.watch, make_env)
        batches = [[number] for number in seeds]
    many = max(arm["best_of"], arm["draws"])
    for how in ["sampled"] if many > 1 else table.decodings:
        how_drawn = (many, cfg.max_tokens, float(how == "sampled"), seed)
        groups = [g for b in batches for g in play(policy, sampler, make_env, b, *how_drawn)]
        if arm["draws"] > 1:  # of each task: how many of its samples are right
            right = [sum(e.components["exact"] for e in group) for group in groups]
            return {"sampled": {"exact": digits(right)}}
        best = [max(group, key=lambda e: e.reward) for group in groups]
        found[how] = measured([{"reward": e.reward} | e.components for e in best])
    if "moved" in table.measures and not arm["prefill"]:
        found["sampled"]["moved"] = moved(policy, make_env, seeds, cfg.max_tokens)
    return found


@torch.no_grad()
def moved(policy: Policy, make_env: Callable, seeds: list, max_tokens: int) -> list[float]:
    """KL(base || policy) of the replies to each task, nats, estimated by one sample of the base.

    It is the base's log-prob of its own sampled tokens minus the policy's, summed over the tokens:
    "RL's Razor" (Shenfeld et al. 2025, arXiv 2509.04259) measures it on the new task.
    """
    base = {name: torch.zeros_like(w) for name, w in policy.trainable().items()}  # LoRA adds 0
    with with_weights(policy, base):
        groups = play(policy, TorchSampler(policy), make_env, seeds, 1, max_tokens, 1.0, 0)
    found = []
    for [e] in groups:
        batch = collate([e], policy.tokenizer.pad_token_id, policy.device)
        now, _ = logprobs.token_logprobs(policy, batch.ids, batch.mask)
        found.append(float((batch.sampler_logprobs - now).sum()))
    return found


async def ask(player: str, cfg: settings.Config, make_env: Callable, seeds: list) -> list[dict]:
    """The scores of NAME@ADDRESS, a model behind an OpenAI-compatible endpoint."""
    from bridges import api  # here, because it needs openai

    name, _, address = player.partition("@")
    end, episodes = api.Endpoint(replace(cfg, model=name, api_base=address)), []
    await api.play_all(end, make_env, seeds, episodes.append)
    episodes.sort(key=lambda e: e.group)
    for episode in episodes:
        if episode.error:
            raise SystemExit(f"{name}: scenario {episode.group} failed: {episode.error}")
    return [{"reward": e.reward} | e.components for e in episodes]


@dataclass
class Prefilled:
    """A sampler that begins each reply with the first words of an expert that derives, so the habit
    is chosen for the base: the most that choosing one can bring. One episode at a time."""

    inner: TorchSampler
    words: int
    version: int = 0

    def watch(self, make_env: Callable):
        self.env = make_env()
        self.env.style = "derives"
        return self.env

    def sample(self, prompts, k, max_tokens, temperature, seeds, caches=None, keep=False):
        words = self.env.expert_reply().split(" ")[: self.words]
        start = encode(self.inner.policy, " ".join(words))
        prompts = [prompt + start for prompt in prompts]
        groups = self.inner.sample(prompts, k, max_tokens, temperature, seeds)
        for sample in sum(groups, []):
            sample.token_ids = start + sample.token_ids
            sample.logprobs = [0.0] * len(start) + sample.logprobs  # given, not drawn
        return groups


# ---------------------------------------------------------------------------- a whole table
class Table:
    """A table of lab/study.toml, with the places of its runs and results."""

    def __init__(self, name: str, data: dict, runs: Path, results: Path, here: Sequence[str] = ()):
        self.flags, self.seeds, self.worlds = data["flags"], data["seeds"], data["worlds"]
        self.measures, self.decodings = data["measures"], data.get("decodings", WAYS)
        self.arms = {arm: ARM | values for arm, values in data["arms"].items()}
        self.name, self.runs, self.here = name, runs / name, here
        self.file = results / f"{name}.json"

    def grow(self, name: str, seeds: int, each: Callable = map) -> None:
        """Run what the results do not yet have of an arm: its sweep, then its seeds.

        each: like the built-in map; a pool's map runs several at a time.
        """
        arm, kept = self.arms[name], self.kept(name)
        missing = [s for s in arm["sweep"] if s not in kept["swept"]]
        for setting, folder in zip(missing, each(partial(self.run, name, seed=0), missing)):
            result = outcome(folder, self.measures[0])
            mean = float(numbers(result["development"]["final"]).mean())
            kept["swept"][setting] = {"development": mean, "work": result["work"]}
            self.keep(name, kept)
        swept = self.kept(arm["of"] or name)["swept"]
        mean_of = lambda setting: swept[setting]["development"]
        best = max(swept, key=mean_of, default="")  # the first of equals, the cheapest
        kept["settings"] = self.flags_of(name, best)
        kept["planned"] = min(self.seeds, arm["seeds"])
        missing = range(len(kept["seeds"]), min(seeds, kept["planned"]))
        for seed, found in zip(missing, each(partial(self.play, name, best), missing)):
            kept["seeds"].append({"seed": seed} | found)
            self.keep(name, kept)

    def play(self, name: str, setting: str, seed: int) -> dict:
        """Train, and play the held-out tasks; returns a seed's entry."""
        arm = self.arms[name]
        trained = arm["of"] or name
        folder = self.runs if arm["player"] else self.run(trained, setting, seed)
        flags = self.flags_of(trained, setting)
        play = lambda world: play_world(self, arm, f"{flags} {self.worlds[world]}", folder, seed)
        found = {
            "held_out": {world: play(world) for world in arm["worlds"] or self.worlds},
            "machine": machine.cpu_name(),
            "commit": run.commit(),
        }
        is_trained = not arm["of"] and not arm["player"]
        return found | outcome(folder, self.measures[0]) if is_trained else found

    def run(self, name: str, setting: str, seed: int) -> Path:
        """The folder of a finished run."""
        folder = self.runs / re.sub(r"[\s-]+", "-", f"{name} {setting} {seed}")
        train(f"{self.flags_of(name, setting)} --seed {seed}", folder, self.here)
        return folder

    def flags_of(self, name: str, setting: str) -> str:
        return f"{self.flags} {self.arms[name]['flags']} {setting}"

    def kept(self, name: str) -> dict:
        """The results of an arm so far. Another process may have added to them."""
        new = {"what": self.arms[name]["what"], "settings": "", "swept": {}, "seeds": []}
        arms = json.loads(self.file.read_text())["arms"] if self.file.exists() else {}
        return arms.get(name, new)

    def keep(self, name: str, arm: dict) -> None:
        with KEEPING:
            keep(self.file, {"made_by": f"python -m lab.study {self.name}"}, {name: arm})


def read_tables(runs: Path, results: Path = RESULTS, here: Sequence[str] = ()) -> dict[str, Table]:
    """{name: table} of lab/study.toml. here: flags of this machine, on which no result depends."""
    tables = tomllib.loads((ROOT / "lab" / "study.toml").read_text(encoding="utf8"))
    return {name: Table(name, data, runs, results, here) for name, data in tables.items()}


def grow_together(table: Table, arms, seeds: int, workers: int) -> None:
    """All arms at once, in so many processes; runs of the first arms start first."""
    spawn = multiprocessing.get_context("spawn")  # CUDA cannot be used in a fork
    with ProcessPoolExecutor(workers, spawn) as pool, ThreadPoolExecutor(len(arms)) as threads:
        # list waits for all, and raises what an arm's thread raised
        list(threads.map(lambda arm: table.grow(arm, seeds, pool.map), arms))


def main(
    table: tyro.conf.Positional[str] = "",
    arms: tuple[str, ...] = (),
    seeds: int = 99,
    runs: Path = ROOT / "runs",
    results: Path = RESULTS,
    threads: int = 1,
    workers: int = 1,
) -> None:
    """arms: only these. seeds: at most so many. runs: where each table gets a folder for its runs.
    results: the folder of TABLE.json. threads: per run. workers: runs at a time, which may share a
    card."""
    here = ["--threads", f"{threads}"]
    if workers > 1 and torch.cuda.is_available():
        here += ["--micro-tokens", f"{SHARED}"]
    tables = read_tables(runs, results, here)
    if table not in tables:
        raise SystemExit(f"{table or 'no table'}: choose one of {', '.join(tables)}")
    arms = arms or tables[table].arms
    if workers > 1:
        return grow_together(tables[table], arms, seeds, workers)
    for arm in arms:
        tables[table].grow(arm, seeds)


if __name__ == "__main__":
    tyro.cli(main)
