"""The evidence for the swarm environment, into results/swarm/.

    python -m lab.swarm.scripted               # everything; under two minutes on one idle core
    python -m lab.swarm.scripted --n 50        # a quick look

ranking   every scripted player on development scenarios, each difficulty, both versions, with 95% intervals
lengths   tokens of the observations and of whole episodes, with pico_swarm's tokenizer
speed     whole episodes a minute on one core, and how the time grows with bots and with steps

Players are deterministic given the scenario, so a scenario is played once. The pools have 500 scenarios a difficulty (v0.1: 200).
"""

import platform
import time
from dataclasses import replace
from itertools import product

import numpy as np
import tyro
from tqdm import tqdm

import metrics
from env_swarm import DEV_SEEDS, WEIGHTS, Swarm, play
from lab.base.tokenizer import build
from lab.common import RESULTS, cpu, pyplot, reach, save_picture, table, write_json, write_page
from swarm.bots import SCENARIOS, draw_scenario, work_text
from swarm.economy import content_quality
from swarm.players import PLAYERS

OUT = RESULTS / "swarm"
LEVELS = ("easy", "medium", "hard")
SHOWN = ("reward", "reward_published", "payoff", "payoff_published", "reputation", "quality", "diversity", "gain", "error_rate",
         "used_claim_task", "used_submit_work", "used_propose_trade", "used_accept_proposal")  # fmt: skip
LENGTH_EPISODES = 40
ORDER = ("tuned", "proposer", "expert", "grinder", "random", "idle")


def ranking(n: int) -> dict:
    """{version: {difficulty: {player: {metric: Interval}}}}; every player meets the same scenarios."""
    found: dict = {}
    for version in WEIGHTS:
        count = min(n, SCENARIOS[version])
        for difficulty in LEVELS:
            for style in tqdm(PLAYERS, desc=f"v{version} {difficulty}", leave=False):
                marks = [both_scales(Swarm(difficulty, version, style=style), DEV_SEEDS + i) for i in range(count)]
                row = {name: metrics.mean([m[name] for m in marks]) for name in SHOWN}
                row["survival"] = metrics.proportion(sum(m["survival"] for m in marks), count)
                found.setdefault(version, {}).setdefault(difficulty, {})[style] = row
    return found


def both_scales(env: Swarm, seed: int) -> dict[str, float]:
    """The score of a whole episode, with its reward and payoff on the published scale too."""
    marks = play(env, seed)
    env.payoff_scale = "published"
    return marks | {f"{name}_published": env.score()[name] for name in ("reward", "payoff")}


def lengths(n: int) -> dict:
    """{difficulty: {player: tokens}} over n episodes: of an observation, of the opening with its tools, of a reply, of everything."""
    tokenizer, found = build(), {}
    count = lambda text: len(tokenizer(text)["input_ids"])
    for difficulty in LEVELS:
        for style in ("expert", "random"):
            seen, said, whole = [], [], []
            for i in tqdm(range(n), desc=f"lengths {difficulty} {style}", leave=False):
                env = Swarm(difficulty, style=style)
                messages, done = env.reset(DEV_SEEDS + i), False
                opening = count(tokenizer.apply_chat_template(messages, tools=env.tools, tokenize=False))
                while not done:
                    reply = env.expert_reply()
                    new, done = env.step(reply)
                    messages += [{"role": "assistant", "content": reply}, *new]
                    said.append(count(reply))
                    seen += [count(message["content"]) for message in new]
                whole.append(count(tokenizer.apply_chat_template(messages, tools=env.tools, tokenize=False)))
            found.setdefault(difficulty, {})[style] = {
                "observation": round(float(np.mean(seen))), "observation_95": int(np.percentile(seen, 95)), "observation_most": max(seen),
                "over_250": sum(x > 250 for x in seen) / len(seen), "opening": opening, "reply": round(float(np.mean(said))),
                "episode": round(float(np.mean(whole))), "episode_most": max(whole),
            }  # fmt: skip
    return found


def seconds(bots: int, epochs: int, episodes: int, rounds: int) -> float:
    """CPU seconds of one expert episode with so many bots and epochs: the median over rounds."""
    kinds = ("honest", "opportunistic", "deceptive", "honest")
    times = []
    for r in range(rounds):
        start = time.process_time()
        for i in range(episodes):
            env = Swarm("medium")
            scenario = draw_scenario(DEV_SEEDS + r * episodes + i, "medium", "0.2")
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


def plot(ranks: dict, rates: dict) -> None:
    fig, axes = pyplot().subplots(2, 2, figsize=(11, 8.2))
    axes = axes.flatten()
    colours = dict(zip(PLAYERS, ("#000000", "#00868b", "#1b7837", "#2166ac", "#b2182b", "#762a83", "#b8860b", "#777777")))
    for ax, version in zip(axes, ("0.2", "0.1")):
        for k, (style, colour) in enumerate(colours.items()):
            rows = [ranks[version][d][style]["reward"] for d in LEVELS]
            x, y = np.arange(3) + 0.08 * (k - 3), [row.mean for row in rows]
            ax.errorbar(x, y, reach(rows), fmt="o", color=colour, label=style, capsize=3, markersize=5)
        ax.set_xticks(range(3), LEVELS)
        ax.set(title=f"reward, v{version} (n = {rows[0].n} a difficulty)", ylabel="reward, mean and 95% interval", ylim=(0.5, 1.35))
        ax.grid(axis="y", alpha=0.3)
    task = "review the supply budget for river transport"
    lengths = np.arange(1, 301)
    filler = work_text(task) + " We check the data again" * 20
    for version, text, label, colour in (("0.1", "x" * 400, "v0.1, nonsense", "#b2182b"), ("0.2", "x" * 400, "v0.2, nonsense", "#2166ac"),
                                         ("0.2", filler, "v0.2, words of the task first", "#1b7837")):  # fmt: skip
        axes[2].plot(lengths, [content_quality(text[:n], version, 0.5, task) for n in lengths], color=colour, label=label)
    axes[2].axvline(80, color="#999999", linestyle=":", linewidth=1)
    axes[2].set(title="quality of a submission, difficulty 5", xlabel="characters", ylabel="quality", ylim=(0, 1))
    axes[2].legend(fontsize=9, loc="lower right")
    axes[2].grid(alpha=0.3)
    for by, style, label in (("seconds_by_bots", "o-", "bots (25 steps)"), ("seconds_by_steps", "s-", "steps (4 bots)")):
        axes[3].loglog(rates[by].keys(), [1000 * t for t in rates[by].values()], style, label=label)
    low = 1000 * min(rates["seconds_by_steps"].values())
    axes[3].loglog([25, 400], [low, 16 * low], ":", color="#999999", label="proportional to the steps")
    axes[3].set(title="CPU time of an episode", xlabel="number of bots, or of steps", ylabel="ms")
    axes[3].set_xticks([2, 4, 8, 16, 32, 64, 100, 200, 400], [2, 4, 8, 16, 32, 64, 100, 200, 400])
    axes[3].set_yticks([1, 2, 5, 10, 20, 40], [1, 2, 5, 10, 20, 40])
    axes[3].minorticks_off()
    axes[3].legend(fontsize=9)
    axes[3].grid(alpha=0.3, which="both")
    fig.tight_layout(h_pad=4)
    fig.legend(*axes[0].get_legend_handles_labels(), ncols=8, fontsize=10, loc="center", bbox_to_anchor=(0.5, 0.505), frameon=False)
    save_picture(fig, OUT / "swarm.png", 110)


def disjoint(ranks: dict) -> list[str]:
    """Where this order does not hold with disjoint intervals. Empty: it holds everywhere."""
    order, wrong = ORDER, []
    for version, difficulty in product(ranks, LEVELS):
        for better, worse in zip(order, order[1:]):
            a, b = (ranks[version][difficulty][who]["reward"] for who in (better, worse))
            if not a.low > b.high:
                wrong.append(f"v{version} {difficulty}: {better} {a} against {worse} {b}")
    return wrong


def write(ranks: dict, sizes: dict, rates: dict, n: int) -> None:
    wrong = disjoint(ranks)
    lines = [
        "# Swarm: who earns what, and how fast it runs", "",
        f"`python -m lab.swarm.scripted{'' if n == 500 else f' --n {n}'}`. Scripted players only, no model. Development scenarios (seeds "
        f"from {DEV_SEEDS:,}), the same for all players; means with 95% intervals. Machine: "
        f"{platform.machine()}, {cpu()}, one core; Python {platform.python_version()}.", "",
        "What nonsense earns instead of work: [a claim](../claims/swarm_versions/README.md). What the rules are worth that the published "
        "texts leave open: [rules.md](rules.md). Policies that were trained on it: [trained.md](trained.md). Which findings of the "
        "published runs came out again: [findings.md](findings.md).", "",
        "![rewards, the exploit, and the time](swarm.png)", "",
        "## Who earns what", "",
        f"{' > '.join(ORDER).capitalize()}, with disjoint intervals, in every difficulty of both versions." if not wrong
        else f"The order {' > '.join(ORDER)} holds with disjoint intervals, but not here: " + "; ".join(wrong) + ".",
        "The expert is a decent player written by hand, not the best one: *proposer* is the grinder with fair proposals in its idle turns, "
        "and *tuned* the best honest plan that a search on training scenarios found ([what its choices are worth](rules.md)).",
        "The trader accepts whatever is offered: fine among honest bots, ruinous among deceptive ones. The novice plays any tool that is "
        "possible: with its few words it works badly, and it trades at any price.",
        "These rewards are without the price of an error, which the model pays (`--swarm-error-penalty`); "
        "of the players only *random* errs.",
        "Nobody here looks at more than the model is shown. *Published* is a scale of payoffs that ends at 1, as that of the published "
        "runs did (env_swarm.py): there the untrained model's payoff was 0.652 and its reward 0.888, the trained one's 0.998 and 1.377.",
        "",
    ]  # fmt: skip
    for version, levels in ranks.items():
        rows = [[difficulty, style, f"**{row['reward'].text()}**", row["reward_published"].text(),
                 *(row[m].text() for m in ("payoff", "payoff_published", "reputation", "quality", "diversity")),
                 row["gain"].text(1), row["survival"].text(2)] for difficulty in LEVELS
                for style, row in levels[difficulty].items()]  # fmt: skip
        lines += [f"### v{version}, n = {levels['easy']['expert']['reward'].n} scenarios a difficulty", "",
                  *table("| | player | reward | reward, published scale | payoff | payoff, published scale | reputation | quality | "
                         "diversity | gain | survival |", rows), ""]  # fmt: skip
    used = ("used_claim_task", "used_submit_work", "used_propose_trade", "used_accept_proposal")
    lines += ["### What they do, v0.2 (successful calls an episode)", "",
              *table("| | player | claimed | submitted | proposed | accepted | error rate |", [
        [difficulty, style, *(row[tool].text(1) for tool in used), row["error_rate"].text()]
        for difficulty in LEVELS for style, row in ranks["0.2"][difficulty].items()])]  # fmt: skip
    (per_bot, r_bots), (per_step, r_steps) = slope(rates["seconds_by_bots"]), slope(rates["seconds_by_steps"])
    ms = lambda times: ", ".join(f"{k}: {1000 * t:.1f}" for k, t in times.items())
    lines += [
        "", "## Lengths", "",
        f"Tokens of pico_swarm's tokenizer, v0.2, {LENGTH_EPISODES} episodes each. A whole episode takes a tenth of a context of 16,384.",
        "",
        *table("| | player | observation, mean | 95% are at most | longest | over 250 | opening with tools | reply | episode | longest |", [
            [difficulty, style, r["observation"], r["observation_95"], r["observation_most"], f"{r['over_250']:.1%}", r["opening"],
             r["reply"], r["episode"], r["episode_most"]] for difficulty, rows in sizes.items() for style, r in rows.items()]), "",
        "## Speed", "",
        f"* **{rates['episodes_per_minute']:,.0f} episodes of 25 turns a minute** on one core (expert, medium, 4 bots; "
        "CPU time, median of rounds).",
        f"* By number of bots, ms an episode: {ms(rates['seconds_by_bots'])}. A straight line of {1000 * per_bot:.2f} ms a bot, "
        f"R² {r_bots:.3f}.",
        f"* By number of steps: {ms(rates['seconds_by_steps'])}. A straight line of {1000 * per_step:.3f} ms a step, R² {r_steps:.3f}.", "",
        "## What was set by looking at these numbers", "",
        "The published descriptions leave many constants open (swarm/economy.py and swarm/tools.py list what we chose). Four were set "
        "after a first look, on scenarios of the same pools:", "",
        "* payoff counts from a third of all bounties. With an equal share for each member (a fifth) the expert stood at 0.92 to 0.96, "
        "where there is little left to gain; with a half, at 0.74 to 0.81.",
        "* A proposal moves its proposer's reputation by (p - 0.5)(5 + transfer), also when a bad one is rejected. Without the transfer "
        "and the rejections the circuit breaker never acted on a bot.",
        "* A turn lost to an error fades the reputation like a pass. Otherwise erring 25 times beat passing 25 times.",
        "* The random player submits and posts a sentence of 80 characters. With four words it lost so much in v0.1, where nothing is paid "
        "for quality and diversity, that its interval touched that of the idle player on medium.", "",
    ]  # fmt: skip
    write_page(OUT / "README.md", lines)
    as_dict = lambda x: x.dict() if isinstance(x, metrics.Interval) else {k: as_dict(v) for k, v in x.items()} if isinstance(x, dict) else x
    write_json(OUT / "swarm.json", as_dict({"ranking": ranks, "lengths": sizes, "speed": rates}))


def main(n: int = 500, rounds: int = 5) -> None:
    """Measure everything and write results/swarm/. n: scenarios a difficulty; rounds: of each timing."""
    OUT.mkdir(parents=True, exist_ok=True)
    ranks, sizes, rates = ranking(n), lengths(LENGTH_EPISODES), speed(rounds)
    plot(ranks, rates)
    write(ranks, sizes, rates, n)
    print((OUT / "README.md").read_text())


if __name__ == "__main__":
    tyro.cli(main)
