"""The letters table, whole: GRPO beside everything that might do as well, over seeds, on held-out tasks.

python -m lab.claims.letters            # finished runs are kept and not run again; about two hours on two cores
python -m lab.claims.letters --table    # only the page and the picture, from what is committed

Is it the reward, is it the policy gradient, is it thinking, or would more SFT have done it? A control that could win gets what our own arm
gets: its settings are swept with seed 0 on *development* tasks, the best one is trained with every seed, and only then every policy plays
the same 512 held-out tasks, once. GRPO itself keeps the defaults of settings.py, which were chosen on development tasks long before.

Five seeds, planned before the first run. All seeds share one base and the same 100 demonstrations.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import tyro

import metrics
from lab.claims import study
from lab.claims.study import (
    KEPT,
    REPORT,
    Arm,
    Study,
    best_runs,
    development,
    dots,
    grid,
    less,
    percent,
    run_name,
    setting_of,
    sweep_tables,
    train_all,
    versions,
)
from lab.common import RESULTS, ROOT, pyplot, read_json, read_lines, save_picture, table, write_json, write_page

N, BEST_OF = 512, 8
SHOWN = {"grpo-0": (*REPORT, "report.html"), "no_think-0": REPORT}  # runs that README and docs show
SFT = "--updates 0 --sft-style"  # 1,000 steps are GRPO's work (work)
ARMS = {
    "grpo": Arm("**GRPO**, the default command"),
    "selection": Arm("only what was right: SFT on the policy's own correct samples, anew in every update (no baseline, no advantage)",
                     "--loss reinforce --baseline none",
                     {f"lr{rate}": f"--lr {rate}" for rate in ("1e-5", "3e-5", "1e-4", "3e-4", "1e-3")}),
    "chance": Arm("GRPO, every episode paid 0 or 1 by the toss of a coin",
                  "--env lab/claims/chance.py:Chance --updates 150 --max-tokens 320",
                  {f"lr{rate}": f"--lr {rate}" for rate in ("1e-5", "3e-5", "1e-4", "3e-4")}),
    "sft_derives": Arm("SFT on 100 demonstrations that derive", f"{SFT} derives", grid("3e-5 1e-4 3e-4 1e-3", "50 100 200")),
    "sft_states": Arm("SFT on the 100 demonstrations that GRPO begins with, which state", f"{SFT} states",
                      grid("1e-3", "300") | grid("3e-4 1e-3 3e-3", "1000")),
    "no_think_partial": Arm("GRPO, thinking not allowed, partial credit", "--no-think --reward partial"),
    "no_think": Arm("GRPO, thinking not allowed", "--no-think"),
    "start": Arm("after the default SFT: where GRPO begins", SFT.replace(" --sft-style", "")),
}  # fmt: skip


def flags(name: str) -> str:
    rarely = "" if name in SHOWN else "--eval-every 50"  # what a run looks at changes nothing but its seconds
    return f"--env letters --difficulty 6 --no-eval-other-tiers {rarely}"


STUDY = Study(Path("runs/letters"), RESULTS / "letters", ARMS, (0, 1, 2, 3, 4), "exact", flags, lambda name: SHOWN.get(name, KEPT))


# ------------------------------------------------------------------------------------------------ held-out tasks
def held_out(name: str) -> None:
    """Let a run's policy play the held-out tasks, unless it has. Only the chosen setting of an arm comes here."""
    if any("held-out" in e["tasks"] for e in read_lines(STUDY.out / name / "evals.jsonl")):
        return
    own = read_json(STUDY.out / name / "config.json")["env"]  # said again, for it may be a file of code
    words = ["train.py", "--eval-only", str(STUDY.runs / name), "--env", own, "--held-out", "--eval-n", str(N)]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)  # a process each: chance.py's tosses begin anew
    (STUDY.out / name / "evals.jsonl").write_text((STUDY.runs / name / "evals.jsonl").read_text())


def without_runs(threads: int) -> None:
    """What no run gives, on the same held-out tasks, into others.json: {what: a list of [tasks], one entry per seed}.

    base: pico_base, greedy. begun: the base, greedy, after the first tokens of a derivation (two letters of the string): what is the most
    that choosing a habit can bring? best_of: does one of eight samples of GRPO's start have it right?
    """
    import torch

    from env_letters import Letters
    from policy import PICO
    from rollout import play

    if (STUDY.out / "others.json").exists():
        return
    torch.set_num_threads(threads)
    seeds, env = study.held_out_seeds(N), partial(Letters, 6, "binary", True, "derives")
    exact = lambda groups: [max(e.reward for e in group) for group in groups]
    policy, sampler = study.player(str(PICO))
    found = {"base": [exact(play(policy, sampler, env, seeds, 1, 320, 0.0, 0))]}
    found["begun"] = [exact(play(policy, begun(policy, env, seeds), env, seeds, 1, 320, 0.0, 0))]
    found["best_of"] = []
    for seed in STUDY.seeds:
        policy, sampler = study.player(str(PICO), STUDY.runs / run_name("start", "", seed))
        found["best_of"].append(exact(play(policy, sampler, env, seeds, BEST_OF, 320, 1.0, seed)))
    write_json(STUDY.out / "others.json", found)


def begun(policy, make_env: Callable, seeds: list[int]) -> study.Begun:
    """A sampler whose replies begin with the first tokens of a derivation: "<think>", a line's end, two letters of the string."""
    from policy import encode
    from rollout import expert_episode

    start = {}
    for seed in seeds:
        episode = expert_episode(policy, make_env(), seed)
        given = episode.sampled.index(True)
        thought = episode.messages[-1]["content"].split(" ")
        ids = encode(policy, " ".join(thought[:2]))
        assert episode.token_ids[given : given + len(ids)] == ids
        start[tuple(episode.token_ids[:given])] = ids
    return study.Begun(policy, lambda prompt: start[tuple(prompt)])


# ------------------------------------------------------------------------------------------------ the page
def played(name: str) -> list[float]:
    """[tasks] of the held-out evaluation of a run."""
    return next(e["exact"] for e in read_lines(STUDY.out / name / "evals.jsonl") if "held-out" in e["tasks"])


def development_gain(name: str) -> np.ndarray:
    """[tasks] exactly right at the end minus after SFT, of the development tasks."""
    after = {e["stage"]: np.array(e["exact"]) for e in read_lines(STUDY.out / name / "evals.jsonl") if e["trained"]}
    return after["final"] - after["after_sft"]


SINGLE = {  # what no run gives (without_runs)
    "begun": "the base, its derivation begun for it (two letters of the string given)",
    "best_of": f"best of {BEST_OF}: at least one of so many samples of GRPO's start is right",
    "base": "the base, before anything",
}


def read_scores() -> dict[str, list[list[float]]]:
    """{arm or other: [seeds][tasks] of the held-out tasks}."""
    return {arm: [played(name) for name in names] for arm, names in best_runs(STUDY).items()} | read_json(STUDY.out / "others.json")


def short() -> list[list]:
    """The table in brief: what, seeds, exactly right, GRPO minus this, work."""
    runs, scores, rows = best_runs(STUDY), read_scores(), []
    for arm in (*ARMS, *SINGLE):
        gain = "" if arm in ("grpo", *SINGLE) else less(scores["grpo"], scores[arm]).points()
        cost = "" if arm in SINGLE else f"{np.mean([study.work(STUDY, name) for name in runs[arm]]):.1f}"
        rows.append([ARMS[arm].what if arm in ARMS else SINGLE[arm], len(scores[arm]), percent(scores[arm]), gain, cost])
    return rows


def page() -> None:
    runs, scores, rows = best_runs(STUDY), read_scores(), []
    for arm, (what, _, right, gain, cost) in zip((*ARMS, *SINGLE), short()):
        each = " ".join(f"{100 * np.mean(score):.1f}" for score in scores[arm])
        setting = setting_of(STUDY, arm) if arm in ARMS else ""
        dev = f"{100 * np.mean([development(STUDY, name) for name in runs[arm]]):.1f}%" if arm in ARMS else ""
        rows.append([what, setting, dev, f"**{right}**", each, gain, cost])
    lines = [
        "# Letters, tier 6: GRPO beside everything that might do as well", "",
        f"`python -m lab.claims.letters`; seeds {STUDY.seeds[0]} to {STUDY.seeds[-1]}, planned before the first run; "
        f"{versions(STUDY, runs['grpo'][0])}. Exactly right, greedy, on {N} held-out tasks that no run looked at and nothing was "
        "chosen by; 95% intervals over seeds and tasks (of one seed or one policy: over tasks). *Development* is the mean over seeds of "
        "the 256 tasks by which settings were chosen. *Work*: millions of tokens, once when sampled, three times when trained on. *GRPO "
        "minus this*: in points, paired by seed and task. All rows have the same base and, if they have any, the same 100 tasks "
        "to demonstrate.", "",
        "The sweeps of two controls were widened, and the arms without thinking got their seeds, after a first held-out table had been "
        "seen; each choice was made on development tasks. Intervals are not corrected for their number. The runs are of several days: "
        "between them the code of the environment changed in words and in the word list of lower tiers, and compare tells them apart.", "",
    ]  # fmt: skip
    lines += table(["", "settings", "development", f"held-out, n = {N}", "each seed", "GRPO minus this", "work"], rows)
    gains = {arm: [development_gain(name) for name in runs[arm]] for arm in ("no_think", "no_think_partial")}
    told = [f"{ARMS[arm].what} {study.over_seeds(gain).points()}, each seed {' '.join(f'{100 * np.mean(g):+.1f}' for g in gain)}"
            for arm, gain in gains.items()]  # fmt: skip
    lines += ["", "![each seed](letters.png)", "", "## Without thinking", "",
              f"From SFT to the end of 150 updates, development tasks, greedy: {'; '.join(told)}.", "", "## What was swept", "",
              "Seed 0, development tasks (n = 256), exactly right at the end. The best setting of each arm went into the table.",
              ""]  # fmt: skip
    right = lambda name: metrics.proportion(round(256 * development(STUDY, name)), 256).percent()
    lines += sweep_tables(STUDY, "exactly right | work", lambda name: [right(name), f"{study.work(STUDY, name):.1f}"])
    write_page(STUDY.out / "README.md", lines)
    draw(scores)


def draw(scores: dict) -> None:
    fig, ax = pyplot().subplots(figsize=(9, 5.4), layout="constrained")
    dots(ax, STUDY, scores, SINGLE, 100)
    ax.set(title=f"letters, tier 6: exactly right of {N} held-out tasks (95%; ticks: seeds)", xlabel="%", xlim=(-2, 102))
    save_picture(fig, STUDY.out / "letters.png", 110)


def main(table: bool = False, jobs: int = 2) -> None:
    """jobs: runs at once, one thread each."""
    if not table:
        train_all(STUDY, jobs)
        for names in best_runs(STUDY).values():
            for name in names:
                held_out(name)
        without_runs(jobs)
    page()


if __name__ == "__main__":
    tyro.cli(main)
