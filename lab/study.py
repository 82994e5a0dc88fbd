"""What trains the arms of a table that are missing. lab/study.toml has every table's arms as data.

    python -m lab.study --list                       # the tables, their arms, how many seeds are done
    python -m lab.study letters                      # all that results/letters.json does not have yet
    python -m lab.study letters --arms grpo chance --seeds 2 --runs /tmp/runs --results /tmp/results

A fair table sets its own arm beside everything that might do as well, each at its best:

    sweep       each setting of an arm with seed 0; the best is chosen on *development* tasks
    seeds       the best setting with every seed; how many is said before the first run
    held-out    only then does a policy play tasks that no run has looked at

results/TABLE.json grows by a setting or a seed at a time. What stands in it is not run again, and a
run that was cut goes on where it was. lab/tables.py makes the pages' tables of it. A seed's entry:

    {"seed": 0, "held_out": {WORLD: {"greedy": {"exact": "0110…"}, "sampled": …}},
     "development": {"after_sft": "0100…", "final": "0110…"}, "work": 2.4, "seconds": 455.0}

A string has a digit per task, a list a number. Work is millions of tokens that passed through the
model: once when sampled, three times (forward and backward) when trained.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

import env_swarm
import settings
from bookkeeping import refusals
from bookkeeping.folder import find_checkpoint, load_checkpoint
from evaluate import HELD_OUT_SEEDS
from fast.machine import choose_model
from fast.sampler import TorchSampler
from lab.tables import RESULTS, ROOT, digits, keep, numbers
from policy import encode, load_policy
from rollout import play

# What lab/study.toml need not say; it says what the fields are.
TABLE = {"decodings": ["greedy", "sampled"]}
ARM = {"flags": "", "sweep": [], "seeds": 99, "worlds": [], "of": "", "begun": 0}
ARM |= {"best_of": 1, "player": ""}


# ---------------------------------------------------------------------------- one run
def train(flags: str, folder: Path, threads: int) -> None:
    """train.py with these flags into this folder, unless it has finished; it goes on if cut."""
    if (folder / "summary.json").exists():
        return
    words = [*flags.split(), "--runs", str(folder.parent), "--name", folder.name, "--no-wandb"]
    if (folder / "config.json").exists():
        env = json.loads((folder / "config.json").read_text())["env"]
        words = ["--resume", str(folder), "--env", env]
    words += ["--threads", str(threads)]
    subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, check=True)


def told(folder: Path, measure: str) -> dict:
    """What a finished run says of itself: development tasks, work, seconds."""
    summary, tasks = json.loads((folder / "summary.json").read_text()), {}
    for line in map(json.loads, (folder / "evals.jsonl").read_text().splitlines()):
        if line["trained"] and line["stage"] in ("before", "after_sft", "final"):
            tasks[line["stage"]] = digits(line[measure])
    work = summary["tokens"]["sampled"] + 3 * summary["tokens"]["trained"]
    return {"development": tasks, "work": work / 1e6, "seconds": summary["seconds"]["total"]}


# ---------------------------------------------------------------------------- held-out tasks
def play_world(table: "Table", arm: dict, flags: str, folder: Path, seed: int) -> dict:
    """{decoding: {measure: values}} of held-out tasks, by the policy of this folder."""
    cfg, _ = settings.command_line(flags.split())
    refusals.check(cfg)
    path, why, _ = choose_model(cfg.model, cfg.env, cfg.device)
    policy = load_policy(path, cfg.lora_rank, cfg.lora_alpha, cfg.device)
    settings.complete(cfg, policy.n_parameters, why)
    make_env = next(make for trained, make in settings.eval_sets(cfg).values() if trained)
    seeds = settings.seeds_from(cfg, HELD_OUT_SEEDS, cfg.eval_n)
    measured = lambda marks: {name: digits([m[name] for m in marks]) for name in table.measures}
    if arm["player"]:
        env = make_env()
        env.style = arm["player"]
        return {"scripted": measured([env_swarm.play(env, number) for number in seeds])}
    load_checkpoint(find_checkpoint(folder / "checkpoint"), policy)
    sampler, found = TorchSampler(policy), {}
    sampler.sync(0)
    batches = [seeds]
    if arm["begun"]:
        sampler = Begun(sampler, policy, arm["begun"])
        make_env = partial(sampler.watch, make_env)
        batches = [[number] for number in seeds]
    for how in ["sampled"] if arm["best_of"] > 1 else table.decodings:
        how_drawn = (arm["best_of"], cfg.max_tokens, float(how == "sampled"), seed)
        played = [play(policy, sampler, make_env, some, *how_drawn) for some in batches]
        best = [max(group, key=lambda e: e.reward) for groups in played for group in groups]
        found[how] = measured([{"reward": e.reward} | e.components for e in best])
    return found


@dataclass
class Begun:
    """A sampler whose replies begin with the first words of an expert that derives, so that the
    base has chosen its habit: the most that choosing one can bring. An episode at a time."""

    inner: TorchSampler
    policy: object
    words: int
    version: int = 0

    def watch(self, make_env: Callable):
        self.env = make_env()
        self.env.style = "derives"
        return self.env

    def sample(self, prompts, k, max_tokens, temperature, seeds, caches=None, keep=False):
        words = self.env.expert_reply().split(" ")[: self.words]
        start = encode(self.policy, " ".join(words))
        prompts = [prompt + start for prompt in prompts]
        groups = self.inner.sample(prompts, k, max_tokens, temperature, seeds)
        for sample in sum(groups, []):
            sample.token_ids = start + sample.token_ids
            sample.logprobs = [0.0] * len(start) + sample.logprobs  # given, not drawn
        return groups


# ---------------------------------------------------------------------------- a whole table
class Table:
    """A table of lab/study.toml, and where its runs and its results are."""

    def __init__(self, name: str, said: dict, runs: Path, results: Path, threads: int = 1):
        said = TABLE | said
        self.flags, self.seeds, self.worlds = said["flags"], said["seeds"], said["worlds"]
        self.measures, self.decodings = said["measures"], said["decodings"]
        self.arms = {arm: ARM | values for arm, values in said["arms"].items()}
        self.name, self.runs, self.threads = name, runs / name, threads
        self.file = results / f"{name}.json"

    def grow(self, name: str, seeds: int) -> None:
        """Run what the results do not have of an arm: its sweep, then its seeds."""
        arm, kept = self.arms[name], self.kept(name)
        for setting in [s for s in arm["sweep"] if s not in kept["swept"]]:
            said = told(self.run(name, setting, 0), self.measures[0])
            mean = float(numbers(said["development"]["final"]).mean())
            kept["swept"][setting] = {"development": mean, "work": said["work"]}
            self.keep(name, kept)
        mean_of = lambda setting: kept["swept"][setting]["development"]
        best = max(kept["swept"], key=mean_of, default="")  # the first of equals, the cheapest
        kept["settings"] = self.flags_of(name, best)
        kept["planned"] = min(self.seeds, arm["seeds"])
        for seed in range(len(kept["seeds"]), min(seeds, self.seeds, arm["seeds"])):
            kept["seeds"].append({"seed": seed} | self.play(name, best, seed))
            self.keep(name, kept)

    def play(self, name: str, setting: str, seed: int) -> dict:
        """Train and play the held-out tasks: what is kept of a seed."""
        arm = self.arms[name]
        trained = arm["of"] or name
        folder = self.runs if arm["player"] else self.run(trained, setting, seed)
        flags = self.flags_of(trained, setting)
        play = lambda world: play_world(self, arm, f"{flags} {self.worlds[world]}", folder, seed)
        found = {"held_out": {world: play(world) for world in arm["worlds"] or self.worlds}}
        alone = arm["of"] or arm["player"]
        return found if alone else found | told(folder, self.measures[0])

    def run(self, name: str, setting: str, seed: int) -> Path:
        """The folder of a finished run."""
        folder = self.runs / re.sub(r"[\s-]+", "-", f"{name} {setting} {seed}")
        train(f"{self.flags_of(name, setting)} --seed {seed}", folder, self.threads)
        return folder

    def flags_of(self, name: str, setting: str) -> str:
        return f"{self.flags} {self.arms[name]['flags']} {setting}"

    def kept(self, name: str) -> dict:
        """What the results have of an arm. Another process may have added to them."""
        new = {"what": self.arms[name]["what"], "settings": "", "swept": {}, "seeds": []}
        arms = json.loads(self.file.read_text())["arms"] if self.file.exists() else {}
        return arms.get(name, new)

    def keep(self, name: str, arm: dict) -> None:
        keep(self.file, {"made_by": f"python -m lab.study {self.name}"}, {name: arm})


def read_tables(runs: Path, results: Path = RESULTS, threads: int = 1) -> dict[str, Table]:
    """{name: table}, of lab/study.toml."""
    tables = tomllib.loads((ROOT / "lab" / "study.toml").read_text(encoding="utf8"))
    return {name: Table(name, said, runs, results, threads) for name, said in tables.items()}


def main(
    table: tyro.conf.Positional[str] = "",
    arms: tuple[str, ...] = (),
    seeds: int = 99,
    runs: Path = ROOT / "runs",
    results: Path = RESULTS,
    threads: int = 1,
    list: bool = False,
) -> None:
    """arms: only these. seeds: at most so many. runs: where each table gets a folder for its runs.
    results: the folder of TABLE.json. threads: of a run. list: only say what there is."""
    tables = read_tables(runs, results, threads)
    if table not in tables and not list:
        raise SystemExit(f"{table or 'no table'}: choose one of {', '.join(tables)}")
    for one in [tables[table]] if table else tables.values():
        for arm in arms or one.arms:
            if list:
                print(f"{one.name:9} {arm:18} {len(one.kept(arm)['seeds'])} seeds")
            else:
                one.grow(arm, seeds)


if __name__ == "__main__":
    tyro.cli(main)
