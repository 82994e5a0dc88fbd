"""Swarm, trained to the end: GRPO beside everything that might do as well, over seeds, on held-out scenarios.

    python -m lab.swarm.trained            # finished runs are kept and not run again; about five hours on two cores
    python -m lab.swarm.trained --table    # only the pages and the picture, from what is committed

A control that could win gets what our own arm gets: its settings are swept with seed 0 on *development* scenarios, the best one is trained
with every seed, and only then every policy plays the same held-out scenarios, once, greedily and sampled. Three seeds, planned before the
first run. There are 500 training scenarios, and a run of 125 updates has met them all: a seed decides their order, and what is sampled.
"""

import json
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import tyro
from tqdm import tqdm

import metrics
import settings
from bookkeeping.checkpoint import find_checkpoint, load_checkpoint
from env_swarm import Swarm
from env_swarm import play as play_scripted
from lab.claims import study
from lab.claims.study import KEPT, REPORT, Arm, Study, best_runs, development, dots, grid, over_seeds, setting_of, sweep_tables, versions
from lab.common import RESULTS, pyplot, read_json, read_lines, save_picture, table, write_page
from policy import PICO_SWARM, load_policy
from swarm.bots import SCENARIOS, draw_scenario

N = 256
LONG = "--until-converged --max-updates 250"
# Of a curriculum and its control. Meant to be 150, and set to 100 for want of time when seed 0 had trained for some 55, before any held-out
# scenario was played. Medium rises by 0.01 after update 70.
SAME_WORK = "--updates 100"
SFT = "--updates 0 --sft-style"
ARMS = {
    "grpo": Arm("**GRPO**, the default settings, until it has settled", LONG),
    "no_think": Arm("GRPO, thinking not allowed", f"{LONG} --no-think"),
    "no_sft": Arm("GRPO from the base, without SFT", f"{LONG} --sft-steps 0"),
    "v01": Arm("GRPO under the rules of v0.1", f"{LONG} --swarm-version 0.1"),
    "hard": Arm("GRPO on hard scenarios all along", f"{SAME_WORK} --difficulty hard"),
    "climbs": Arm("GRPO that climbs: easy, medium, hard", f"{SAME_WORK} --difficulty hard --curriculum"),
    "more_sft": Arm("more SFT on the 100 episodes of the expert that GRPO begins with", f"{SFT} expert",
                    grid("1e-4 3e-4 1e-3", "200 1000")),
    "sft_tuned": Arm("SFT on 100 episodes of the best scripted player", f"{SFT} tuned", grid("1e-4 3e-4 1e-3", "200 1000")),
    "grpo_tuned": Arm("GRPO after that SFT, until it has settled", f"{LONG} --sft-style tuned --sft-lr 1e-3 --sft-steps 1000"),
    "start": Arm("after the default SFT: where GRPO begins", "--updates 0"),
}  # fmt: skip
TRAINED = ("grpo", "grpo_tuned", "no_sft", "no_think", "v01", "hard", "climbs")  # by RL


def keeps(name: str) -> tuple[str, ...]:
    return (*REPORT, "report.html") if name == "grpo-0" else (*KEPT, "metrics.jsonl") if name.startswith(TRAINED) else KEPT


STUDY = Study(Path("runs/swarm"), RESULTS / "swarm", ARMS, (0, 1, 2), "reward", lambda name: "--env swarm", keeps)


# ------------------------------------------------------------------------------------------------ held-out scenarios
SMALL = settings.by_size(1e6, "swarm")  # what a small model gets by default
PRICE, MAX_TOKENS = SMALL["swarm_error_penalty"], SMALL["max_tokens"]  # scripted players pay for errors, too


@dataclass
class World(Swarm):
    """A swarm whose scenarios keep their bots and tasks, under other rules than those they were drawn with."""

    error_penalty: float = PRICE
    rules: dict = field(default_factory=dict)  # {parameter of a Scenario: its value}

    def reset(self, seed: int) -> list[dict]:
        return self.start(replace(draw_scenario(seed, self.difficulty, self.version), **self.rules))


NO_RULES = {"tax": 0.0, "audit": 0.0, "decay": 1.0, "threshold": 0.0, "shift": None}
STRICT = {"tax": 0.15, "audit": 0.3, "decay": 0.97, "threshold": 20.0, "shift": None}  # the tightest of hard
WORLDS = {  # where policies that were trained on medium scenarios of v0.2 play
    "medium": {}, "easy": {"difficulty": "easy"}, "hard": {"difficulty": "hard"}, "medium, no rules": {"rules": NO_RULES},
    "medium, rules at their tightest": {"rules": STRICT}, "medium, v0.1": {"version": "0.1"},
}  # fmt: skip
DECODINGS = {"greedy": 0.0, "sampled": 1.0}
YARDSTICKS = ("tuned", "proposer", "expert", "grinder", "trader", "random", "idle")
MEASURED = (
    "reward", "reward_published", "payoff", "payoff_published", "reputation", "quality", "diversity", "error_rate", "turns_acted",
    "truncated", "used_pass_turn", "used_claim_task", "used_submit_work", "used_propose_trade", "used_accept_proposal", "used_post",
    "self_proposal_errors",
)  # fmt: skip


def scenarios(world: str) -> list[int]:
    """Their seeds. No run has looked at them."""
    return study.held_out_seeds(min(N, SCENARIOS[WORLDS[world].get("version", "0.2")]))


def by_measure(marks: list[dict]) -> dict[str, list[float]]:
    """{measure: its value in each episode}."""
    return {name: [round(m[name], 4) for m in marks] for name in MEASURED}


def both_scales(env: Swarm) -> dict[str, float]:
    """The score of an episode that was played, with its reward and payoff on the published scale too."""
    marks = env.score()
    env.payoff_scale = "published"
    return marks | {f"{name}_published": env.score()[name] for name in ("reward", "payoff")}


def play_world(policy, world: str, temperature: float, think: bool, seed: int) -> dict[str, list[float]]:
    """{measure: [scenarios]} of a policy on the held-out scenarios of a world."""
    from fast.sampler import TorchSampler
    from rollout import play

    envs: list[Swarm] = []

    def make_env() -> Swarm:
        envs.append(World(think=think, **WORLDS[world]))
        return envs[-1]

    play(policy, TorchSampler(policy), make_env, scenarios(world), 1, MAX_TOKENS, temperature, seed)
    return by_measure([both_scales(env) for env in envs])


AT_HOME = {"medium, v0.1": "v01", "hard": "hard"}  # {world: the arm that is trained in it}


def worlds_of(arm: str) -> list[str]:
    """Where an arm plays held-out scenarios."""
    elsewhere = {"grpo": list(WORLDS), "v01": ["medium, v0.1"], "hard": ["hard"], "climbs": ["hard"]}
    return elsewhere.get(arm, ["medium"])


def play_held_out(arm: str, name: str, seed: int, threads: int) -> None:
    """Let a run's policy play, unless it has, into its held_out.json. Only the chosen setting of an arm comes here."""
    if (STUDY.out / name / "held_out.json").exists():
        return
    torch.set_num_threads(threads)
    policy = load_policy(str(PICO_SWARM), 32, 64, "cpu")
    load_checkpoint(find_checkpoint(STUDY.runs / name / "checkpoint"), policy)
    found = {
        world: {how: play_world(policy, world, heat, arm != "no_think", seed) for how, heat in DECODINGS.items()}
        for world in worlds_of(arm)
    }
    write_page(STUDY.out / name / "held_out.json", [json.dumps(found), ""])


def keep_ends(name: str) -> None:
    """Drop the evaluations on the way from evals.jsonl, most of it, if the run has no report to draw them in."""
    if "report.html" in keeps(name):
        return
    kept = [line for line in read_lines(STUDY.out / name / "evals.jsonl") if line["stage"] != "train"]
    write_page(STUDY.out / name / "evals.jsonl", [*(json.dumps(line, separators=(",", ":")) for line in kept), ""])


def over_http(name: str) -> dict[str, list[float]]:
    """{measure: [N]} of a run's policy, asked as any OpenAI-compatible endpoint is asked: text goes there, text comes back."""
    from bridges import api, serve

    server = serve.serve_policy(serve.load(str(STUDY.runs / name)), name)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    cfg = settings.Config(
        env="swarm", model=name, api_base=f"http://127.0.0.1:{server.server_port}/v1", max_tokens=MAX_TOKENS, api_concurrency=64
    )
    envs: list[Swarm] = []

    def make_env() -> Swarm:  # in the order of the scenarios: api.play_all begins them so
        envs.append(World())
        return envs[-1]

    api.run(api.play_all(api.open_endpoint(cfg), make_env, scenarios("medium"), lambda episode: None))
    server.shutdown()
    return by_measure([both_scales(env) for env in envs])


def others(threads: int) -> None:
    """The base, a policy over HTTP, and the scripted players on the same scenarios, into others.json."""
    if (STUDY.out / "others.json").exists():
        return
    torch.set_num_threads(threads)
    policy = load_policy(str(PICO_SWARM), 0, 64, "cpu")
    base = lambda world: {how: play_world(policy, world, heat, True, 0) for how, heat in DECODINGS.items()}
    found: dict = {"base": {world: base(world) for world in ("medium", "medium, v0.1")}}
    found["http"] = {"medium": {"greedy": over_http("grpo-0")}}
    for player in tqdm(YARDSTICKS, desc="scripted players"):
        found[player] = {}
        for world, given in WORLDS.items():
            envs = [World(style=player, **given) for _ in scenarios(world)]
            for env, number in zip(envs, scenarios(world)):
                play_scripted(env, number)
            marks = by_measure([both_scales(env) for env in envs])
            found[player][world] = {"scripted": marks if world == "medium" else {"reward": marks["reward"]}}
    write_page(STUDY.out / "others.json", [json.dumps(found), ""])


# ------------------------------------------------------------------------------------------------ the page
NAMES = {
    "base": "the base, before anything", "http": "GRPO, seed 0, asked over HTTP", "tuned": "scripted: tuned",
    "proposer": "scripted: proposer", "expert": "scripted: expert",
    "grinder": "scripted: grinder", "trader": "scripted: trader", "random": "scripted: random", "idle": "scripted: idle",
}  # fmt: skip
SHORT = ("grpo", "sft_tuned", "grpo_tuned", "no_sft", "more_sft", "no_think", "start")  # on medium, v0.2
COLUMNS = {  # of the table of parts: (title, digits, factor)
    "reward": ("reward", 3, 1), "reward_published": ("published scale", 3, 1), "payoff": ("payoff", 3, 1), "quality": ("quality", 3, 1),
    "reputation": ("reputation", 3, 1), "diversity": ("diversity", 3, 1), "error_rate": ("errors, %", 1, 100),
    "used_pass_turn": ("passes", 1, 1), "used_submit_work": ("works", 1, 1), "used_propose_trade": ("proposals", 1, 1),
    "used_accept_proposal": ("accepted", 1, 1), "used_post": ("posts", 1, 1),
}  # fmt: skip


def runs_of(arm: str) -> list[str]:
    """Its runs at the best setting that have played held-out scenarios, one per seed."""
    return [name for name in best_runs(STUDY)[arm] if (STUDY.out / name / "held_out.json").exists()]


def scores(arm: str, world: str = "medium", how: str = "greedy") -> dict[str, list[list[float]]]:
    """{measure: [seeds][N]} of an arm, or of what no run gives."""
    if arm in NAMES:
        every = [read_json(STUDY.out / "others.json")[arm][world]]
        how = how if how in every[0] else next(iter(every[0]))
    else:
        every = [read_json(STUDY.out / name / "held_out.json")[world] for name in runs_of(arm)]
    return {name: [each[how][name] for each in every] for name in every[0][how]}


def less(arm: str, how: str, ours: str = "grpo", world: str = "medium") -> str:
    """GRPO, or another arm, minus this, paired by seed and scenario."""
    return study.less(*(scores(a, world, how)["reward"] for a in (ours, arm))).signed()


def page() -> None:
    arms = [arm for arm in SHORT if runs_of(arm)]
    each = lambda rows: " ".join(f"{np.mean(row):.3f}" for row in rows)
    rows = []
    for arm in (*arms, *NAMES):
        greedy, sampled = (scores(arm, how=how)["reward"] for how in DECODINGS)
        setting = setting_of(STUDY, arm) if arm in ARMS else ""
        both = arm in ARMS or arm == "base"
        rows.append([
            ARMS[arm].what if arm in ARMS else NAMES[arm], setting, len(greedy), f"**{over_seeds(greedy).text()}**",
            over_seeds(sampled).text() if both else "", each(greedy), each(sampled) if both else "",
            "" if arm == "grpo" else less(arm, "greedy"), less(arm, "sampled") if both and arm != "grpo" else "",
        ])  # fmt: skip
    lines = [
        "# Swarm, trained to the end", "",
        f"`python -m lab.swarm.trained`; seeds {STUDY.seeds[0]} to {STUDY.seeds[-1]}, planned before the first run; "
        f"{versions(STUDY, runs_of('grpo')[0])}. Mean reward on {N} held-out medium scenarios (v0.2) that no run looked at and "
        f"nothing was chosen by, less {PRICE} times the share of turns lost to errors; 95% intervals over seeds and scenarios (of one "
        "policy: over scenarios). *GRPO minus this* is paired by seed and scenario. Scripted players see what the model sees.", "",
    ]  # fmt: skip
    lines += table(
        ["", "settings", "seeds", "greedy", "sampled", "each seed, greedy", "sampled", "GRPO minus this, greedy", "sampled"], rows
    )
    if runs_of("grpo_tuned"):
        gains = ", ".join(f"{how} {less('sft_tuned', how, 'grpo_tuned')}" for how in DECODINGS)
        lines += ["", f"What GRPO adds to SFT on the best scripted player, paired by seed and scenario: {gains}."]
    same = sum(a == b for a, b in zip(scores("http")["reward"][0], scores("grpo")["reward"][0]))
    lines += ["", f"Over HTTP the policy of seed 0 earns the same reward as in process in {same} of the {N} scenarios.", "",
              "![each seed](trained.png)", "", "## How they play", "",
              "The same episodes: means over seeds and scenarios; an episode has 25 turns. *Published scale*: env_swarm.py.",
              ""]  # fmt: skip
    rows = []
    for arm in (*arms, *NAMES):
        for how in DECODINGS if arm in ARMS or arm == "base" else ["greedy" if arm == "http" else "scripted"]:
            found = scores(arm, how=how)
            cells = [f"{factor * np.mean(found[name]):.{digits}f}" for name, (_, digits, factor) in COLUMNS.items()]
            rows.append([ARMS[arm].what if arm in ARMS else NAMES[arm], how, *cells])
    lines += table(["", "decoding", *(title for title, _, _ in COLUMNS.values())], rows)
    lines += ["", "## Elsewhere", "", "GRPO's policies, trained on medium scenarios of v0.2, in worlds that they have not seen.",
              f"v0.1 has {SCENARIOS['0.1']} scenarios of a difficulty. *Trained there*: of v0.1 {len(runs_of('v01'))} seeds until settled, "
              f"on hard scenarios {len(runs_of('hard'))} seeds of 100 updates.", ""]  # fmt: skip
    rows = []
    for world in WORLDS:
        cells = [over_seeds(scores("grpo", world, how)["reward"]).text() for how in DECODINGS]
        there = AT_HOME.get(world, "")
        at_home = over_seeds(scores(there, world)["reward"]).text() if there and runs_of(there) else ""
        players = [over_seeds(scores(p, world)["reward"]).text() for p in ("expert", "proposer", "tuned")]
        gains = [less(player, how, world=world) for player in ("expert", "proposer") for how in DECODINGS]
        rows.append([world, *cells, at_home, *players, *gains])
    head = (
        "GRPO, greedy|GRPO, sampled|GRPO trained there, greedy|expert|proposer|tuned|"
        "GRPO minus expert, greedy|sampled|GRPO minus proposer, greedy|sampled"
    )
    lines += table(["world", *head.split("|")], rows)
    if runs_of("climbs"):
        ends = {how: [over_seeds(scores(arm, "hard", how)["reward"]).text() for arm in ("climbs", "hard")] for how in DECODINGS}
        told = [f"{how} {ends[how][0]}, on hard scenarios all along {ends[how][1]}, a difference of {less('hard', how, 'climbs', 'hard')}"
                for how in DECODINGS]  # fmt: skip
        logs = [read_lines(STUDY.out / name / "metrics.jsonl") for name in runs_of("climbs")]
        reached = ", ".join(str(next(line["update"] for line in log if line["level"] == "hard")) for log in logs)
        lines += [
            "", f"A curriculum, easy to medium to hard, earns on hard scenarios: {'; '.join(told)}. Both trained for {len(logs[0])} "
            f"updates, {len(logs)} of the {len(STUDY.seeds)} planned seeds; the curriculum reached hard scenarios at updates {reached}.",
        ]  # fmt: skip
    lines += ["", "## The runs", "", "*Settled*: what `--until-converged` asked after every update (metrics.trend).", ""]
    rows = []
    for arm in TRAINED:
        for name in runs_of(arm):
            s, updates = read_json(STUDY.out / name / "summary.json"), read_lines(STUDY.out / name / "metrics.jsonl")
            sampled = [line["reward"] for line in updates]
            end = f"{np.mean(sampled[:5]):.3f} → {np.mean(sampled[-5:]):.3f}"
            rows.append(
                [name, s["updates"], end, metrics.trend(sampled).sentence(), f"{s['seconds']['total'] / 60:.0f}", f"{s['peak_rss_gb']:.1f}"]
            )
    lines += table(["run", "updates", "sampled reward, first and last five batches", "settled?", "minutes", "peak GB"], rows)
    lines += ["", "## What was swept", "", "Seed 0, development scenarios (n = 128), greedy, at the end.", ""]
    lines += sweep_tables(STUDY, "reward", lambda name: [f"{development(STUDY, name):.3f}"])
    write_page(STUDY.out / "trained.md", lines)
    draw(arms)


def draw(arms: list[str]) -> None:
    """How the sampled reward rose, and one tick per seed: which arms end where GRPO ends?"""
    fig, (curves, ends) = pyplot().subplots(1, 2, figsize=(13, 4.8), layout="constrained")
    for name in runs_of("grpo"):
        rewards = [line["reward"] for line in read_lines(STUDY.out / name / "metrics.jsonl")]
        curves.plot(range(1, len(rewards) + 1), rewards, lw=1, alpha=0.35, color="C2")
        smooth = np.convolve(rewards, np.ones(10) / 10, "valid")
        curves.plot(
            range(10, len(rewards) + 1), smooth, color="C2", label="GRPO, a seed (mean of ten batches)" if name.endswith("0") else None
        )
    for player, colour in (("tuned", "C3"), ("expert", "C0"), ("grinder", "C7")):
        curves.axhline(np.mean(scores(player)["reward"]), color=colour, ls="--", lw=1, label=NAMES[player])
    curves.set(title="reward of the training batches, sampled", xlabel="update", ylabel="reward")
    curves.legend(fontsize=8)
    dots(ends, STUDY, {arm: scores(arm)["reward"] for arm in (*arms, *NAMES)}, NAMES, width=40)
    ends.set(title=f"greedy reward, {N} held-out scenarios (95%; ticks: seeds)", xlabel="reward")
    curves.grid(alpha=0.25)
    save_picture(fig, STUDY.out / "trained.png", 110)


def main(table: bool = False, only: str = "", jobs: int = 2) -> None:
    """only: arms, by name, separated by spaces; all by default. jobs: runs at once, one thread each."""
    arms = only.split() or list(ARMS)
    if not table:
        study.train_all(STUDY, jobs, arms)
        for arm in arms:
            for seed, name in zip(STUDY.seeds, best_runs(STUDY)[arm]):
                keep_ends(name)
                play_held_out(arm, name, seed, jobs)
        others(jobs)
    page()


if __name__ == "__main__":
    tyro.cli(main)
