"""The evidence for the swarm environment, into results/swarm/.

    python -m lab.swarm.scripted               # everything; under two minutes on one idle core
    python -m lab.swarm.scripted --n 50        # a quick look

ranking   every scripted player on held-out scenarios, each difficulty, both versions, with 95% intervals
exploit   80 characters of nonsense instead of work: full quality in v0.1, none in v0.2
lengths   tokens of the observations and of whole episodes, with pico_swarm's tokenizer
speed     whole episodes a minute on one core, and how the time grows with bots and with steps

Players are deterministic given the scenario, so a scenario is played once. The pools have 500 scenarios a difficulty (v0.1: 200).
"""

import json
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import metrics
from env_swarm import EVAL_SEEDS, WEIGHTS, Swarm, play
from lab.base.tokenizer import build
from swarm.bots import SCENARIOS, draw_scenario, work_text
from swarm.economy import content_quality
from swarm.players import PLAYERS
from swarm.tools import write_call

OUT = ROOT / "results" / "swarm"
LEVELS = ("easy", "medium", "hard")
SHOWN = ("reward", "payoff", "reputation", "quality", "diversity", "gain", "error_rate", "used_claim_task", "used_submit_work",
         "used_propose_trade", "used_accept_proposal")  # fmt: skip
NONSENSE = "x" * 80
LENGTH_EPISODES = 40


def ranking(n: int) -> dict:
    """{version: {difficulty: {player: {metric: Interval}}}}; every player meets the same scenarios."""
    table: dict = {}
    for version in WEIGHTS:
        count = min(n, SCENARIOS[version])
        for difficulty in LEVELS:
            for style in tqdm(PLAYERS, desc=f"v{version} {difficulty}", leave=False):
                marks = [play(Swarm(difficulty, version, style=style), EVAL_SEEDS + i) for i in range(count)]
                row = {name: metrics.mean([m[name] for m in marks]) for name in SHOWN}
                row["survival"] = metrics.proportion(sum(m["survival"] for m in marks), count)
                table.setdefault(version, {}).setdefault(difficulty, {})[style] = row
    return table


def play_nonsense(env: Swarm, seed: int) -> dict[str, float]:
    """The grinder, but every submission is 80 times the letter x."""
    env.reset(seed)
    done = False
    while not done:
        _, tool, arguments = PLAYERS["grinder"](env.seen, env.dice)
        if tool == "submit_work":
            arguments = {**arguments, "content": NONSENSE}
        done = env.step(write_call(tool, arguments))[1]
    return env.score()


def exploit(n: int) -> dict:
    """{version: {what is submitted: {metric: Interval}}} for a grinder on medium."""
    table: dict = {}
    for version in ("0.1", "0.2"):
        count = min(n, SCENARIOS[version])
        ways = {"work": lambda env, seed: play(env, seed), "nonsense": play_nonsense}
        for name, way in ways.items():
            marks = [way(Swarm("medium", version, style="grinder"), EVAL_SEEDS + i) for i in range(count)]
            table.setdefault(version, {})[name] = {m: metrics.mean([x[m] for x in marks]) for m in ("quality", "gain", "reward")}
    return table


def lengths(n: int) -> dict:
    """{difficulty: {player: tokens}} over n episodes: of an observation, of the opening with its tools, of a reply, of everything."""
    tokenizer, table = build(), {}
    count = lambda text: len(tokenizer(text)["input_ids"])
    for difficulty in LEVELS:
        for style in ("expert", "random"):
            seen, said, whole = [], [], []
            for i in tqdm(range(n), desc=f"lengths {difficulty} {style}", leave=False):
                env = Swarm(difficulty, style=style)
                messages, done = env.reset(EVAL_SEEDS + i), False
                opening = count(tokenizer.apply_chat_template(messages, tools=env.tools, tokenize=False))
                while not done:
                    reply = env.expert_reply()
                    new, done = env.step(reply)
                    messages += [{"role": "assistant", "content": reply}, *new]
                    said.append(count(reply))
                    seen += [count(message["content"]) for message in new]
                whole.append(count(tokenizer.apply_chat_template(messages, tools=env.tools, tokenize=False)))
            table.setdefault(difficulty, {})[style] = {
                "observation": round(float(np.mean(seen))), "observation_95": int(np.percentile(seen, 95)), "observation_most": max(seen),
                "over_250": sum(x > 250 for x in seen) / len(seen), "opening": opening, "reply": round(float(np.mean(said))),
                "episode": round(float(np.mean(whole))), "episode_most": max(whole),
            }  # fmt: skip
    return table


def seconds(bots: int, epochs: int, episodes: int, rounds: int) -> float:
    """CPU seconds of one expert episode with so many bots and epochs: the median over rounds."""
    kinds = ("honest", "opportunistic", "deceptive", "honest")
    times = []
    for r in range(rounds):
        start = time.process_time()
        for i in range(episodes):
            env = Swarm("medium")
            scenario = draw_scenario(EVAL_SEEDS + r * episodes + i, "medium", "0.2")
            env.start(replace(scenario, bots=tuple(kinds[b % 4] for b in range(bots)), epochs=epochs))
            while not env.step(env.expert_reply())[1]:
                pass
            env.score()
        times.append((time.process_time() - start) / episodes)
    return float(np.median(times))


def speed(rounds: int) -> dict:
    by_bots = {bots: seconds(bots, 5, 20, rounds) for bots in tqdm((2, 4, 8, 16, 32, 64), desc="bots", leave=False)}
    by_steps = {5 * epochs: seconds(4, epochs, 10, rounds) for epochs in tqdm((5, 10, 20, 40, 80), desc="steps", leave=False)}
    one = seconds(4, 5, 100, rounds)
    return {"episodes_per_minute": 60 / one, "seconds_by_bots": by_bots, "seconds_by_steps": by_steps}


def slope(times: dict[int, float]) -> tuple[float, float]:
    """Of a straight line through the points: (seconds per unit, R²)."""
    x, y = np.array(list(times)), np.array(list(times.values()))
    line = np.polyfit(x, y, 1)
    left = y - np.polyval(line, x)
    return float(line[0]), float(1 - (left**2).sum() / ((y - y.mean()) ** 2).sum())


def plot(table: dict, rates: dict) -> None:
    fig, axes = plt.subplots(2, 2, figsize=(11, 8.2))
    axes = axes.flatten()
    colours = dict(zip(PLAYERS, ("#1b7837", "#2166ac", "#b2182b", "#762a83", "#b8860b", "#777777")))
    for ax, version in zip(axes, ("0.2", "0.1")):
        for k, (style, colour) in enumerate(colours.items()):
            rows = [table[version][d][style]["reward"] for d in LEVELS]
            x = np.arange(3) + 0.08 * (k - 2)
            y = np.array([row.mean for row in rows])
            error = [y - [row.low for row in rows], np.array([row.high for row in rows]) - y]
            ax.errorbar(x, y, error, fmt="o", color=colour, label=style, capsize=3, markersize=5)
        ax.set_xticks(range(3), LEVELS)
        ax.set_title(f"reward, v{version} (n = {rows[0].n} a difficulty)")
        ax.set_ylabel("reward, mean and 95% interval")
        ax.grid(axis="y", alpha=0.3)
        ax.set_ylim(0.5, 1.25)
    task = "review the supply budget for river transport"
    lengths = np.arange(1, 301)
    filler = work_text(task) + " We check the data again" * 20
    curves = [
        ("0.1", "x" * 400, "v0.1, nonsense", "#b2182b", "-"),
        ("0.2", "x" * 400, "v0.2, nonsense", "#2166ac", "-"),
        ("0.2", filler, "v0.2, words of the task first", "#1b7837", "-"),
    ]
    for version, text, label, colour, line in curves:
        axes[2].plot(lengths, [content_quality(text[:n], version, 0.5, task) for n in lengths], line, color=colour, label=label)
    axes[2].axvline(80, color="#999999", linestyle=":", linewidth=1)
    axes[2].set(title="quality of a submission, difficulty 5", xlabel="characters", ylabel="quality", ylim=(0, 1))
    axes[2].legend(fontsize=9, loc="lower right")
    axes[2].grid(alpha=0.3)
    axes[3].loglog(rates["seconds_by_bots"].keys(), [1000 * t for t in rates["seconds_by_bots"].values()], "o-", label="bots (25 steps)")
    axes[3].loglog(rates["seconds_by_steps"].keys(), [1000 * t for t in rates["seconds_by_steps"].values()], "s-", label="steps (4 bots)")
    low = 1000 * min(rates["seconds_by_steps"].values())
    axes[3].loglog([25, 400], [low, 16 * low], ":", color="#999999", label="proportional to the steps")
    axes[3].set(title="CPU time of an episode", xlabel="number of bots, or of steps", ylabel="ms")
    axes[3].set_xticks([2, 4, 8, 16, 32, 64, 100, 200, 400], [2, 4, 8, 16, 32, 64, 100, 200, 400])
    axes[3].set_yticks([1, 2, 5, 10, 20, 40], [1, 2, 5, 10, 20, 40])
    axes[3].minorticks_off()
    axes[3].legend(fontsize=9)
    axes[3].grid(alpha=0.3, which="both")
    fig.tight_layout(h_pad=4)
    fig.legend(*axes[0].get_legend_handles_labels(), ncols=6, fontsize=10, loc="center", bbox_to_anchor=(0.5, 0.505), frameon=False)
    fig.savefig(OUT / "swarm.png", dpi=110)
    plt.close(fig)


def disjoint(table: dict) -> list[str]:
    """Where the order expert > grinder > random > idle does not hold with disjoint intervals. Empty: it holds everywhere."""
    order, wrong = ("expert", "grinder", "random", "idle"), []
    for version in table:
        for difficulty in LEVELS:
            for better, worse in zip(order, order[1:]):
                a, b = table[version][difficulty][better]["reward"], table[version][difficulty][worse]["reward"]
                if not a.low > b.high:
                    wrong.append(f"v{version} {difficulty}: {better} {a} against {worse} {b}")
    return wrong


def write(table: dict, tricks: dict, sizes: dict, rates: dict, n: int) -> None:
    show = lambda i, digits=3: f"{i.mean:.{digits}f} [{i.low:.{digits}f}, {i.high:.{digits}f}]"
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?")
    lines = [
        "# Swarm: who earns what, and how fast it runs",
        "",
        f"`python -m lab.swarm.scripted{'' if n == 500 else f' --n {n}'}`. Scripted players only, no model. Held-out scenarios (seeds from "
        f"{EVAL_SEEDS:,}), the same for all players; means with 95% bootstrap intervals (survival: Wilson). Machine: "
        f"{platform.machine()}, {cpu}, one core; Python {platform.python_version()}.",
        "",
        "Policies that were trained on it: [arms.md](arms.md). Which findings of the published runs came out again: [findings.md](findings.md).",
        "",
        "![rewards, the exploit, and the time](swarm.png)",
        "",
        "## Who earns what",
        "",
    ]
    wrong = disjoint(table)
    lines += ["Expert > grinder > random > idle, with disjoint intervals, in every difficulty of both versions." if not wrong
              else "The order expert > grinder > random > idle with disjoint intervals does not hold here: " + "; ".join(wrong) + ".",
              "The trader accepts whatever is offered: fine among honest bots, ruinous among deceptive ones. The novice plays any tool that is possible: with its "
              "few words it works badly, and it trades at any price.",
              "Nobody here looks at more than the model is shown.", ""]  # fmt: skip
    for version in table:
        count = table[version]["easy"]["expert"]["reward"].n
        lines += [f"### v{version}, n = {count} scenarios a difficulty", ""]
        lines += [
            "| | player | reward | payoff | reputation | quality | diversity | gain | survival |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for difficulty in LEVELS:
            for style, row in table[version][difficulty].items():
                cells = [f"**{show(row['reward'])}**", *(show(row[m]) for m in ("payoff", "reputation", "quality", "diversity"))]
                lines.append(f"| {difficulty} | {style} | {' | '.join(cells)} | {show(row['gain'], 1)} | {show(row['survival'], 2)} |")
        lines.append("")
    lines += ["### What they do, v0.2 (successful calls an episode)", ""]
    lines += ["| | player | claimed | submitted | proposed | accepted | error rate |", "|---|---|---|---|---|---|---|"]
    for difficulty in LEVELS:
        for style, row in table["0.2"][difficulty].items():
            cells = [show(row[f"used_{t}"], 1) for t in ("claim_task", "submit_work", "propose_trade", "accept_proposal")]
            lines.append(f"| {difficulty} | {style} | {' | '.join(cells)} | {show(row['error_rate'])} |")
    lines += [
        "",
        "## 80 characters of nonsense",
        "",
        "A grinder on medium that submits `"
        + "x" * 80
        + "` for every task, beside one that works. Quality is the mean p of its submissions.",
        "",
        "| version | submits | quality | gain | reward | n |",
        "|---|---|---|---|---|---|",
    ]
    for version, rows in tricks.items():
        for name, row in rows.items():
            lines.append(
                f"| v{version} | {name} | {show(row['quality'])} | {show(row['gain'], 1)} | {show(row['reward'])} | {row['reward'].n} |"
            )
    per_bot, r_bots = slope(rates["seconds_by_bots"])
    per_step, r_steps = slope(rates["seconds_by_steps"])
    ms = lambda times: ", ".join(f"{k}: {1000 * t:.1f}" for k, t in times.items())
    lines += [
        "",
        "; ".join(
            f"in v{version} nonsense gains {rows['nonsense']['gain'].mean:+.1f} where work gains {rows['work']['gain'].mean:+.1f}"
            for version, rows in tricks.items()
        ).capitalize()
        + ".",
        "",
        "## Lengths",
        "",
        f"Tokens of pico_swarm's tokenizer, v0.2, {LENGTH_EPISODES} episodes each. A whole episode takes about a quarter of a context of 16,384.",
        "",
        "| | player | observation, mean | 95% are at most | longest | over 250 | opening with tools | reply | episode | longest |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {difficulty} | {style} | {r['observation']} | {r['observation_95']} | {r['observation_most']} | {r['over_250']:.1%} "
            f"| {r['opening']} | {r['reply']} | {r['episode']} | {r['episode_most']} |"
            for difficulty, rows in sizes.items()
            for style, r in rows.items()
        ),
        "",
        "## Speed",
        "",
        f"* **{rates['episodes_per_minute']:,.0f} episodes of 25 turns a minute** on one core (expert, medium, 4 bots; CPU time, median of rounds).",
        f"* By number of bots, ms an episode: {ms(rates['seconds_by_bots'])}. A straight line of {1000 * per_bot:.2f} ms a bot, R² {r_bots:.3f}.",
        f"* By number of steps: {ms(rates['seconds_by_steps'])}. A straight line of {1000 * per_step:.3f} ms a step, R² {r_steps:.3f}.",
        "",
    ]
    lines += [
        "## What was set by looking at these numbers",
        "",
        "The published descriptions leave many constants open (swarm/economy.py and swarm/tools.py list what we chose). Four were set after a first look, on scenarios "
        "of the same pools:",
        "",
        "* payoff counts from a third of all bounties. With an equal share for each member (a fifth) the expert stood at 0.92 to 0.96, where "
        "there is little left to gain; with a half, at 0.74 to 0.81.",
        "* A proposal moves its proposer's reputation by (p - 0.5)(5 + transfer), also when a bad one is rejected. Without the transfer and the "
        "rejections the circuit breaker never acted on a bot.",
        "* A turn lost to an error fades the reputation like a pass. Otherwise erring 25 times beat passing 25 times.",
        "* The random player submits and posts a sentence of 80 characters. With four words it lost so much in v0.1, where nothing is paid for "
        "quality and diversity, that its interval touched that of the idle player on medium.",
        "",
    ]
    (OUT / "README.md").write_text("\n".join(lines))
    as_dict = lambda x: x.dict() if isinstance(x, metrics.Interval) else {k: as_dict(v) for k, v in x.items()} if isinstance(x, dict) else x
    (OUT / "swarm.json").write_text(
        json.dumps({"ranking": as_dict(table), "nonsense": as_dict(tricks), "lengths": sizes, "speed": rates}, indent=1) + "\n"
    )


def main(n: int = 500, rounds: int = 5) -> None:
    """Measure everything and write results/swarm/. n: scenarios a difficulty; rounds: of each timing."""
    OUT.mkdir(parents=True, exist_ok=True)
    table, tricks = ranking(n), exploit(n)
    sizes, rates = lengths(LENGTH_EPISODES), speed(rounds)
    plot(table, rates)
    write(table, tricks, sizes, rates, n)
    print((OUT / "README.md").read_text())


if __name__ == "__main__":
    tyro.cli(main)
