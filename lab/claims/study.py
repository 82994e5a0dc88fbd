"""A final table, made fairly: one arm beside everything that might do as well, over seeds, on held-out tasks.

    sweep       every setting of an arm with seed 0; the best is chosen on *development* tasks
    seeds       the best setting with every seed; how many is said before the first run
    held-out    only then does every policy play tasks that no run has looked at; the table's own file does that

Some arms were added, and some sweeps widened, when a first held-out table was known (docs/trust.md has the list). Every choice was made on
development tasks. Intervals are not corrected for their number.

The tables are lab/claims/letters.py, bases.py, alphabet.py and longer.py, and lab/swarm/trained.py. Finished runs are committed and not run
again; a run that was cut goes on where it was.
"""

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import numpy as np
from tqdm import tqdm

import metrics
from lab.claims import as_share, interval
from lab.common import ROOT, launch, reach, read_json, side_by_side, table
from metrics import Interval

KEPT = ("summary.json", "evals.jsonl", "config.json")  # of every run
REPORT = (*KEPT, "metrics.jsonl", "report.md", "curves.png")  # of one that a page shows
STAGES = {"before": "the base", "after_sft": "after SFT", "final": "after GRPO"}  # of a run, in words


@dataclass(frozen=True)
class Arm:
    what: str
    flags: str = ""
    sweep: dict[str, str] = field(default_factory=lambda: {"": ""})  # {label of a setting: its flags}
    once: bool = False  # with seed 0 alone


def grid(rates: str, steps: str) -> dict[str, str]:
    """SFT: every learning rate with every number of steps."""
    return {f"lr{rate}-n{n}": f"--sft-lr {rate} --sft-steps {n}" for n in steps.split() for rate in rates.split()}


@dataclass(frozen=True)
class Study:
    runs: Path  # relative, because configs are committed
    out: Path
    arms: dict[str, Arm]
    seeds: tuple[int, ...]
    measure: str  # whose mean over development tasks chooses a setting
    flags: Callable[[str], str]  # of the run of that name, besides its arm's
    keeps: Callable[[str], tuple[str, ...]]  # files of the run of that name


# ------------------------------------------------------------------------------------------------ runs
def run_name(arm: str, setting: str, seed: int) -> str:
    return "-".join(part for part in (arm, setting, str(seed)) if part)


def train(study: Study, arm: str, setting: str, seed: int, threads: int) -> None:
    """One run, unless it is committed."""
    name, a = run_name(arm, setting, seed), study.arms[arm]
    if not (study.out / name / "summary.json").exists():
        flags = f"{study.flags(name)} {a.flags} {a.sweep[setting]} --seed {seed}".split()
        launch(flags, study.runs, name, study.out / name, study.keeps(name), threads)


def development(study: Study, name: str) -> float:
    """The mean of the study's measure, greedy, over development tasks, at a run's end."""
    summary = read_json(study.out / name / "summary.json")
    return summary["eval"][summary["trained"]]["final"][study.measure]


def best(study: Study, arm: str) -> str:
    """The setting that is best with seed 0; the first of equals, which is the cheapest."""
    return max(study.arms[arm].sweep, key=lambda setting: development(study, run_name(arm, setting, 0)))


def train_all(study: Study, jobs: int, only: Iterable[str] = ()) -> None:
    """What is missing of these arms, or of all. jobs: runs at once, one thread each."""
    arms = {arm: study.arms[arm] for arm in only or study.arms}
    work = [(study, arm, setting, study.seeds[0], 1) for arm, a in arms.items() for setting in a.sweep]
    side_by_side(train, work, jobs, f"seed {study.seeds[0]}, all settings")
    work = [(study, arm, best(study, arm), seed, 1) for seed in study.seeds[1:] for arm, a in arms.items() if not a.once]
    side_by_side(train, work, jobs, "the other seeds")


def best_runs(study: Study) -> dict[str, list[str]]:
    """{arm: its runs, one per seed, at its best setting}, as far as they are there."""
    there = lambda arm, setting, seed: (study.out / run_name(arm, setting, seed) / "summary.json").exists()
    found: dict[str, list[str]] = {}
    for arm, a in study.arms.items():
        swept = all(there(arm, setting, study.seeds[0]) for setting in a.sweep)
        setting = best(study, arm) if swept else None
        seeds = takewhile(lambda seed, arm=arm, setting=setting: there(arm, setting, seed), study.seeds if swept else ())
        found[arm] = [run_name(arm, setting, seed) for seed in seeds]  # without a gap: less() pairs by place
    return found


def played_runs(study: Study) -> dict[str, list[str]]:
    """The same of those that have played the held-out tasks; arms without any are left out."""
    played = lambda name: (study.out / name / "held_out.json").exists()
    found = {arm: list(takewhile(played, names)) for arm, names in best_runs(study).items()}
    return {arm: names for arm, names in found.items() if names}


def play_all(study: Study, others: Iterable[str], play: Callable[[str, int, int], None], jobs: int, only: Iterable[str] = ()) -> None:
    """Train what is missing (train_all); then play(name, seed, threads) lets the others, which no run gives, and every best run play the
    held-out tasks."""
    train_all(study, jobs, only)
    seeds = dict.fromkeys(others, 0) | {name: int(name.rpartition("-")[2]) for names in best_runs(study).values() for name in names}
    for name, seed in tqdm(seeds.items(), desc="held-out tasks"):
        play(name, seed, jobs)


def train_example(runs: Path, out: Path, name: str, file: str, code: str, flags: list[str], n: int, threads: int) -> None:
    """Unless it is committed: a page's command, which begins with --env, trained with the page's example, a file of that name and code;
    then n held-out tasks, played with the policy as it ended."""
    from evaluate import evaluate_only
    from settings import Config

    if (out / name / "summary.json").exists():
        return
    (ROOT / runs).mkdir(parents=True, exist_ok=True)
    (ROOT / runs / file).write_text(code)
    flags = [word.replace(file, str(runs / file)) for word in flags]
    launch(flags, runs, name, out / name, KEPT, threads)
    given = Config(env=flags[1], eval_only=str(runs / name), held_out=True, eval_n=n)
    evaluate_only(given, {"env", "eval_only", "held_out", "eval_n"})
    (out / name / "evals.jsonl").write_text((ROOT / runs / name / "evals.jsonl").read_text())


def held_out_seeds(n: int) -> list[int]:
    """Of the first n held-out tasks. No run has looked at them."""
    from evaluate import HELD_OUT_SEEDS

    return [HELD_OUT_SEEDS + i for i in range(n)]


def player(model: str, run: Path | None = None):
    """(policy, sampler) of a model, as it is or as this run left it."""
    from bookkeeping.checkpoint import find_checkpoint, load_checkpoint
    from fast.sampler import TorchSampler
    from policy import load_policy

    policy = load_policy(model, 32, 64, "cpu")
    if run:  # LoRA begins at 0: without a run, this is the model itself
        load_checkpoint(find_checkpoint(run / "checkpoint"), policy)
    sampler = TorchSampler(policy)
    sampler.sync(0)
    return policy, sampler


class Begun:
    """A sampler whose replies begin with tokens that it is given: start_of(prompt) -> token ids. Their log-probs are told as 0."""

    version = 0

    def __init__(self, policy, start_of: Callable[[list[int]], list[int]]):
        from fast.sampler import TorchSampler

        self.inner, self.start_of = TorchSampler(policy), start_of

    def sample(self, prompts, k, max_tokens, temperature, seeds, caches=None, keep=False):
        starts = [self.start_of(prompt) for prompt in prompts]
        samples = self.inner.sample([p + start for p, start in zip(prompts, starts)], k, max_tokens, temperature, seeds)
        for start, group in zip(starts, samples):
            for sample in group:
                sample.token_ids, sample.logprobs = start + sample.token_ids, [0.0] * len(start) + sample.logprobs
        return samples


def work(study: Study, name: str) -> float:
    """Millions of tokens that passed through the model: forward once when sampled, three times (forward and backward) when trained."""
    tokens = read_json(study.out / name / "summary.json")["tokens"]
    return (tokens["sampled"] + 3 * tokens["trained"]) / 1e6  # trained: by SFT and GRPO


# ------------------------------------------------------------------------------------------------ what a page says
def over_seeds(rows: list) -> Interval:
    """The mean of [seeds][tasks]; its interval is over seeds and tasks. Of one policy: over tasks."""
    return interval(rows) if len(rows) > 1 else metrics.mean(rows[0])


def percent(rows: list) -> str:
    """Of what is right or wrong: the share of [seeds][tasks], cut to between 0 and 100%."""
    return as_share(over_seeds(rows)).percent()


def less(ours: list, theirs: list) -> Interval:
    """Ours minus theirs, [seeds][tasks] each, paired by seed and task, as far as both have seeds; one policy stands beside every seed."""
    pairs = list(zip(ours, theirs * len(ours) if len(theirs) == 1 else theirs))
    return over_seeds([np.subtract(a, b) for a, b in pairs]) if len(pairs) > 1 else metrics.gain(theirs[0], ours[0])


def setting_of(study: Study, arm: str) -> str:
    """The chosen setting, in words."""
    return study.arms[arm].sweep[best(study, arm)].replace("--", "").replace(" sft-steps", ", sft-steps") or "defaults"


def versions(study: Study, name: str) -> str:
    m = read_json(study.out / name / "summary.json")["machine"]
    return f"torch {m['torch']}, transformers {m['transformers']}, peft {m['peft']}, {m['device']}"


def sweep_tables(study: Study, head: str, cells: Callable[[str], list]) -> list[str]:
    """A table per arm that was swept. cells(run) are those of a setting's row."""
    lines = []
    for arm, a in study.arms.items():
        names = {setting: run_name(arm, setting, study.seeds[0]) for setting in a.sweep}
        done = {setting: name for setting, name in names.items() if (study.out / name / "summary.json").exists()}
        if len(a.sweep) > 1 and done:
            rows = [[setting, *cells(name)] for setting, name in done.items()]
            lines += [f"**{a.what}**", "", *table(f"| {arm} | {head} |", rows), ""]
    return lines


def dots(ax, study: Study, scores: dict[str, list], others: dict[str, str], factor: float = 1, width: int = 48) -> None:
    """The mean of every arm with its interval, and a tick per seed, in order: which arms end where GRPO ends?"""
    titles = {arm: a.what.replace("*", "") for arm, a in study.arms.items()} | others
    order = sorted(scores, key=lambda arm: np.mean(scores[arm]))
    for y, arm in enumerate(order):
        i = over_seeds(scores[arm])
        colour = "C2" if arm == "grpo" else "C0" if arm in study.arms else "C7"
        ax.errorbar(factor * i.mean, y, xerr=factor * reach([i]), fmt="o", color=colour, capsize=3)
        ax.plot([factor * np.mean(row) for row in scores[arm]], [y + 0.22] * len(scores[arm]), "|", color=colour)
    ax.set_yticks(range(len(order)), [textwrap.fill(titles[arm], width) for arm in order], fontsize=8)
    ax.grid(axis="x", alpha=0.25)
