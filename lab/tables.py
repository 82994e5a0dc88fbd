"""The tables of README.md and docs/, made from results/*.json, so that the pages cannot drift.

    python -m lab.tables            # make every table again, in place, between its markers
    python -m lab.tables --check    # change nothing; say what does not agree

A page holds `<!-- table: NAME -->`, the table, `<!-- end -->`; the function NAME below
yields its rows.
results/TABLE.json has one entry per arm and seed, with one digit or number per task, so that every
interval can be computed again. An interval in a page's prose must stand in one of these tables, on
any page: `wrong` names those that do not. tests/test_tables.py runs the check.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from math import comb
from pathlib import Path

import numpy as np

import metrics
from bookkeeping import logs
from bookkeeping.doctor import ILLNESSES, cure
from lab import claims
from metrics import Interval
from swarm import governance

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)
INTERVAL = re.compile(
    r"[-+]?\d[\d,]*(?:\.\d+)?%?(?: points| s)? \[[-+]?[\d.,]*\d%?, [-+]?[\d.,]*\d%?\]"
)


TABLES: dict[str, Callable[[], str]] = {}
WAYS = ("greedy", "sampled")


def made(head: str) -> Callable:
    """The function yields the rows of the table of its name. head: the titles of the columns."""

    def keep(function: Callable) -> Callable:
        TABLES[function.__name__] = lambda: table(head, function())
        return function

    return keep


def read(name: str):
    """results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf8"))


def table(head: str, rows: Iterable[list]) -> str:
    """Markdown. head: the titles of the columns, with " | " between them."""
    lines = [head, " | ".join(["---"] * len(head.split(" | ")))]
    lines += [" | ".join(map(str, row)) for row in rows]
    return "".join(f"| {line} |\n" for line in lines)


# ------------------------------------------------------------------------------- intervals
def digits(values: list) -> str | list:
    """0s and 1s as a string, a digit per task; other values as they are."""
    return "".join(f"{x:.0f}" for x in values) if set(values) <= {0, 1} else values


def numbers(values: str | list) -> np.ndarray:
    """What `digits` has made short; a number that stands for all tasks is one."""
    return np.array([*values] if isinstance(values, str) else values, dtype=float)


def scores(arm: dict, measure: str = "exact", how: str = "greedy", world: str = "") -> list:
    """[seeds][tasks] of an arm's held-out tasks; of its first world, if none is named."""
    worlds = [seed["held_out"] for seed in arm["seeds"]]
    ways = [held[world or next(iter(held))] for held in worlds]
    return [numbers(way.get(how, next(iter(way.values())))[measure]) for way in ways]


def over(rows: list) -> Interval:
    """The mean of [seeds][tasks], its interval over seeds and tasks; of one policy, over tasks."""
    return metrics.mean(rows[0]) if len(rows) == 1 else claims.interval(rows)


def percent(rows: list, digits: int = 1) -> str:
    """Of what is right or wrong: the share, which lies between 0 and 1."""
    found = over(rows)
    share = replace(found, low=max(0.0, found.low), high=min(1.0, found.high))
    return share.percent(digits)


def less(ours: list, theirs: list) -> Interval:
    """Ours minus theirs, paired by seed and task; one policy stands beside every seed."""
    if len(ours) == 1 == len(theirs):
        return metrics.gain(theirs[0], ours[0])
    theirs = theirs * len(ours) if len(theirs) == 1 else theirs
    return over([a - b for a, b in zip(ours, theirs)])


def gained(seeds: list[dict]) -> list:
    """[seeds][tasks] of development tasks: at the end minus after SFT."""
    return [numbers(seed["final"]) - numbers(seed["after_sft"]) for seed in seeds]


def work(arm: dict) -> str:
    """Its mean work, if it was trained."""
    done = [seed["work"] for seed in arm["seeds"] if "work" in seed]
    return f"{np.mean(done):.1f}" if done else ""


def share(right: int, n: int) -> str:
    return metrics.proportion(right, n).percent()


def stages(table: str, **names: str) -> Iterable[tuple[str, dict, Callable]]:
    """(what, arm, bold) of the arms that are named; bold marks a cell if the arm is GRPO."""
    arms = read(table)["arms"]
    for name, what in names.items():
        yield what, arms[name], "**{}**".format if name == "grpo" else str


# ------------------------------------------------------------------------------- letters
@made("letters, tier 6 | exactly right | held-out tasks | seeds")
def letters():
    """Before and after, on held-out tasks."""
    for what, arm, bold in stages(
        "letters",
        base="the base, before anything",
        begun="the base, each reply begun with the first two letters of a tally",
        sft_derives="after SFT on 100 demonstrations of the method",
        start="where GRPO begins: 50 steps of SFT on 100 demonstrations without the method",
        grpo="after 150 updates of GRPO from there",
    ):
        rows = scores(arm)
        yield [what, bold(percent(rows)), len(rows[0]), len(rows)]


@made("arm | seeds | exactly right | GRPO minus this | work")
def letters_arms():
    """GRPO beside what might do as well."""
    arms = read("letters")["arms"]
    for name, arm in arms.items():
        rows, alone = scores(arm), name in ("grpo", "begun", "best_of", "base")
        gain = "" if alone else less(scores(arms["grpo"]), rows).points()
        yield [arm["what"], len(rows), percent(rows), gain, work(arm)]


@made("150 updates, development tasks | gain over SFT | each seed")
def letters_no_thinking():
    """What 150 updates add to the SFT, if thinking is not allowed: development tasks."""
    arms = read("letters")["arms"]
    for name in ("no_think", "no_think_partial"):
        gains = gained([seed["development"] for seed in arms[name]["seeds"]])
        each = " ".join(f"{100 * gain.mean():+.1f}" for gain in gains)
        yield [arms[name]["what"], over(gains).points(), each]


@made(
    "letters, sampled at temperature 1 | after SFT | after 40 updates of GRPO | seeds | development n"
)
def passes():
    """Sampled at temperature 1: pass@k without bias (Chen et al. 2021, eq. 1)."""
    found = read("letters")["passes"]
    n, stages = found["of"], [found["after SFT"], found["after 40 updates of GRPO"]]
    miss = lambda k, right: comb(n - right, k) / comb(n, k)
    for k in (1, 4, n):
        both = [[[1 - miss(k, right) for right in seed] for seed in stage] for stage in stages]
        yield [f"pass@{k}", *(percent(rows, 0) for rows in both), len(both[0]), len(both[0][0])]


@made("what | after SFT | after GRPO | seconds | peak GB | seeds")
def pico():
    """pico.py beside train.py: the same task, in the same hour."""
    data = read("pico")
    n = data["development"]
    for arm in data["arms"].values():
        of = lambda stage, seeds=arm["seeds"]: sum(n * seed["exact"][stage] for seed in seeds)
        right = [share(of(stage) / len(arm["seeds"]), n) for stage in ("after SFT", "after GRPO")]
        seconds, memory = ([s[x] for s in arm["seeds"]] for x in ("seconds", "gigabytes"))
        cells = [*right, f"{np.median(seconds):.0f}", f"{np.median(memory):.2f}", len(seconds)]
        yield [arm["what"], *cells]


@made(
    "base | decoding | derives | before | begun for it | after GRPO | GRPO minus begun"
    " | after SFT that derives | GRPO minus SFT | GRPO, no thinking"
)
def bases():
    """Letters on bases that were made in other ways."""
    data = read("bases")
    for base, how in product(data["bases"], WAYS):
        name = lambda arm, base=base: data["arms"][f"{base}_{arm}"]
        rows = {arm: scores(name(arm), how=how) for arm in ("grpo", "begun", "sft_derives")}
        derives = np.mean(scores(name("base"), "habit_derives", how))
        yield [
            data["bases"][base]["what"],
            how,
            f"{100 * derives:.1f}%",
            percent(scores(name("base"), how=how)),
            percent(rows["begun"]),
            f"**{percent(rows['grpo'])}**",
            less(rows["grpo"], rows["begun"]).points(),
            percent(rows["sft_derives"]),
            less(rows["grpo"], rows["sft_derives"]).points(),
            percent(scores(name("no_think"), how=how)),
        ]


@made("base, sampled | derives | of these right | n")
def bases_tally():
    """How often a base derives when sampled, and how often that is right."""
    data = read("bases")
    for base in [{"what": "pico_base"} | data["pico_base"], *data["bases"].values()]:
        right = share(base["right"], base["n"]) if base["n"] else ""
        yield [base["what"], f"{100 * base['often']:.1f}%", right, base["n"]]


@made("arm | seeds | tier 7, greedy | sampled | climbs minus this, greedy | work")
def longer_arms():
    """Strings longer than any that the base was shown."""
    arms = read("longer")["arms"]
    for name, arm in arms.items():
        rows, drawn = scores(arm), percent(scores(arm, how="sampled"))
        gain = "" if name == "climbs" else less(scores(arms["climbs"]), rows).points()
        yield [arm["what"], len(rows), f"**{percent(rows)}**", drawn, gain, work(arm)]


@made("letters | climbs | tier 7 from the start | stays on tier 6 | begun | the base")
def longer_lengths():
    """The same by the length of the string, greedy."""
    arms = read("longer")["arms"].values()
    for n in range(60, 151, 10):
        yield [n, *(percent(scores(arm, world=str(n))) for arm in arms)]


@made("flags | exactly right | samples are old by | updates a minute | the trainer waits")
def offpolicy():
    """Running ahead, and old samples; only what had the machine alone is timed."""
    for arm in read("offpolicy")["arms"].values():
        (seed,) = arm["seeds"]
        timed = ["", ""]
        if "waits" in seed:
            timed = [f"{seed['a_minute']:.1f}", f"{seed['waits']:.0%} of the time"]
        right = metrics.mean(numbers(seed["development"])).percent()
        yield [arm["what"], right, arm["old"], *timed]


@made(
    "held-out tasks | after SFT | after GRPO | gain of GRPO | the same on development tasks | seeds"
)
def known():
    """Rows of a file, and a generator that others wrote."""
    for arm in read("known")["arms"].values():
        sft, grpo = ([numbers(s[x]) for s in arm["seeds"]] for x in ("held_out_sft", "held_out"))
        gains = [less(grpo, sft).points(), over(gained(arm["seeds"])).points()]
        yield [arm["what"], percent(sft), percent(grpo), *gains, len(sft)]


@made("the base | after SFT | after GRPO | the same on held-out words | seeds")
def fork():
    """The environment of docs/fork.md, of which the base is the same in every seed."""
    seeds = read("fork")["arms"]["vowels"]["seeds"]
    stages = ("after_sft", "final", "held_out")
    cells = [percent([numbers(seed[stage]) for seed in seeds]) for stage in stages]
    yield [metrics.mean(numbers(seeds[0]["before"])).percent(), *cells, len(seeds)]


# ------------------------------------------------------------------------------- alphabet
@made(
    "alphabet | greedy: mean reward | all three turns perfect | sampled: mean reward | perfect | seeds"
)
def alphabet():
    """Before and after, on held-out lists, greedy and sampled."""
    for what, arm, bold in stages(
        "alphabet",
        base="the base, before anything",
        start="after SFT on 100 demonstrations that do not show the algorithm",
        grpo="after 80 updates of GRPO",
    ):
        perfect = [percent(scores(arm, "exact", how)) for how in WAYS]
        pairs = zip(rewards(arm), perfect)
        yield [what, *(bold(cell) for pair in pairs for cell in pair), len(arm["seeds"])]


@made("arm | seeds | mean reward, greedy | sampled | GRPO minus this, greedy | work")
def alphabet_arms():
    """GRPO beside what might do as well."""
    arms = read("alphabet")["arms"]
    for name, arm in arms.items():
        gain = "" if name == "grpo" else difference(arms, "grpo", name)
        yield [arm["what"], len(arm["seeds"]), *rewards(arm), gain, work(arm)]


@made("sampled | value")
def alphabet_also():
    """What else the page says, all of it sampled."""
    data = read("alphabet")
    of = lambda name, measure: scores(data["arms"][name], measure, "sampled")
    gain = lambda name, measure: less(of("grpo", measure), of(name, measure))
    yield ["perfect where the base takes up the method by itself", share(**data["alone"])]
    yield ["perfect with its derivation begun", percent(of("begun", "exact"))]
    for name, what in {"begun": "begun", "sft_derives": "SFT that derives"}.items():
        yield [f"GRPO minus {what}, mean reward", gain(name, "reward").signed()]
        yield [f"GRPO minus {what}, perfect", gain(name, "exact").points()]
    published = metrics.mean(np.mean(data["published"], axis=0))  # three like replies to a list
    yield ["the published run, mean reward over its 20 lists", published.text()]


# ------------------------------------------------------------------------------- governance
SHARES = "0% | 12.5% | 25% | 37.5% | 50% | 62.5%"  # of the eight bots
GAINS = {  # (better, worse): what the step from the second to the first is called
    ("soft", "hard"): "soft gate instead of hard",
    ("fast tier", "soft"): "fast tier on top of soft",
    ("fast + pairs", "fast tier"): "detection of pairs on top of the fast tier",
    ("fast + slow tier", "fast + pairs"): "vote on top of that",
    ("slow every epoch", "fast + slow tier"): "council every epoch instead of on a signal",
}


def governed() -> dict[str, list[dict]]:
    """{governance: [the numbers of each share, a value per seed]}"""
    arms = read("governance")["arms"]
    return {name: list(arm["shares"].values()) for name, arm in arms.items()}


@made(f"welfare, deceptive: | {SHARES}")
def governance_welfare():
    """Per possible deal, in truth, of the last ten epochs."""
    for name, cells in governed().items():
        yield [name, *(governance.words(c["welfare"]) for c in cells)]


@made(f"welfare gained by, deceptive: | {SHARES}")
def governance_gains():
    """Welfare at the same seeds: the first minus the second."""
    found = governed()
    for (better, worse), text in GAINS.items():
        pairs = zip(found[worse], found[better])
        yield [text, *(metrics.gain(a["welfare"], b["welfare"]).text(2) for a, b in pairs)]


@made(
    "37.5% deceptive | toxicity, in truth | as p says: soft / hard | worst 5% | "
    "quality gap, in truth | thrash | audits per epoch | meetings | collapsed"
)
def governance_at_three():
    """All measures at 37.5% deceptive."""
    for name, cells in governed().items():
        cell = cells[3]
        mean = lambda key, digits, cell=cell: f"{governance.over(cell[key]).mean:.{digits}f}"
        seen = f"{mean('toxicity_soft', 2)} / {mean('toxicity_hard', 2)}"
        row = [name, governance.words(cell["toxicity"]), seen, mean("tail", 2)]
        row += [governance.words(cell[key], 3) for key in ("quality_gap", "thrash")]
        yield [*row, mean("audits", 1), mean("meetings", 1), governance.collapsed(cell)]


# ------------------------------------------------------------------------------- swarm
def difference(arms: dict, a: str, b: str, how: str = "greedy", world: str = "") -> str:
    """The reward of arm a minus that of b."""
    return less(*(scores(arms[name], "reward", how, world) for name in (a, b))).signed()


def rewards(arm: dict, world: str = "") -> list[str]:
    """Its mean reward, greedy and sampled."""
    return [over(scores(arm, "reward", how, world)).text() for how in WAYS]


@made(
    "swarm, medium | seeds | reward, greedy | reward, sampled | published scale | payoff"
    " | quality | works | turns passed, of 25 | errors, % | errors sampled, %"
)
def swarm():
    """Base, SFT and GRPO on held-out scenarios, greedy and sampled."""
    for what, arm, bold in stages(
        "swarm",
        base="the base, before anything",
        start="after SFT on 100 episodes of the scripted expert",
        grpo="after GRPO",
    ):
        mean = lambda part, how="greedy", arm=arm: np.mean(scores(arm, part, how))
        published = scores(arm, "reward", world="medium, published scale")
        yield [
            what,
            len(published),
            *map(bold, rewards(arm)),
            over(published).text(),
            *(f"{mean(part):.2f}" for part in ("payoff", "quality")),
            *(f"{mean(part):.1f}" for part in ("used_submit_work", "used_pass_turn")),
            *(f"{100 * mean('error_rate', how):.1f}" for how in WAYS),
        ]


@made("arm | seeds | greedy | sampled | GRPO minus this, greedy | GRPO minus this, sampled")
def swarm_arms():
    """GRPO beside what might do as well."""
    arms = read("swarm")["arms"]
    for name in ("grpo", "sft_tuned", "grpo_tuned", "no_sft", "more_sft", "no_think", "start"):
        gains = [difference(arms, "grpo", name, how) for how in WAYS if name != "grpo"]
        arm = arms[name]
        yield [arm["what"], len(arm["seeds"]), *rewards(arm), *(gains or ["", ""])]


@made("scripted player | idle | random | trader | grinder | expert | proposer | tuned")
def swarm_players():
    """Scripted players on development scenarios."""
    players = read("swarm")["ranking"]["players"].values()
    for part, what in {
        "reward": f"mean reward (n = {len(next(iter(players))['reward'])} each)",
        "reward_published": "on the published scale",
    }.items():
        yield [what, *(f"{np.mean(marks[part]):.3f}" for marks in players)]


@made(
    "world | GRPO, greedy | sampled | trained there, greedy | expert | GRPO minus expert, greedy | sampled"
)
def swarm_worlds():
    """The three policies, trained on medium scenarios of v0.2, in other worlds."""
    arms, trained_there = read("swarm")["arms"], {"hard": "hard", "medium, v0.1": "v01"}
    for world in arms["expert"]["seeds"][0]["held_out"]:
        if "scale" in world:
            continue
        there = rewards(arms[trained_there[world]], world)[0] if world in trained_there else ""
        gains = [difference(arms, "grpo", "expert", how, world) for how in WAYS]
        expert = over(scores(arms["expert"], "reward", "scripted", world)).text()
        yield [world, *rewards(arms["grpo"], world), there, expert, *gains]


@made("reward | greedy | sampled")
def swarm_also():
    """What else the page says."""
    arms = read("swarm")["arms"]
    for what, a, b, world in (
        ("GRPO minus the proposer", "grpo", "proposer", "medium"),
        ("GRPO after SFT on the best player, minus that SFT", "grpo_tuned", "sft_tuned", "medium"),
        ("GRPO minus the base", "grpo", "base", "medium"),
        ("on hard scenarios, climbing minus hard all along", "climbs", "hard", "hard"),
    ):
        yield [what, *(difference(arms, a, b, how, world) for how in WAYS)]
    for what, name in (("climbing", "climbs"), ("hard all along", "hard")):
        yield [f"on hard scenarios, {what}", *rewards(arms[name])]


@made("what | adds to the reward")
def swarm_rules():
    """What the rules are worth that the published texts leave open, by scripted play."""
    for what, found in read("swarm")["rules"]["adds"].items():
        yield [what, Interval(**found).signed()]


@made("finding | published | here | verdict")
def swarm_published():
    """Which of the published findings come out again: sampled, from the base to after GRPO."""
    data = read("swarm")
    for said in data["findings"]:
        arms = [data["arms"][arm] for arm in said["arms"]]
        before, after = (scores(arm, said["measure"], "sampled") for arm in arms)
        if len(before) == 1:
            change = less(after, before)
        else:  # of two versions the scenarios differ, so they are not paired
            change = claims.interval({"a": np.mean(after, axis=1), "b": np.mean(before, axis=1)})
        here = f"{np.mean(before):.3f} → {np.mean(after):.3f}: {change.signed()}"
        yield [said["what"], said["published"], here, verdict(change, said["side"])]


def verdict(change: Interval, side: int) -> str:
    """side: the publication says that it rises (1), falls (-1) or stays (0)."""
    moved = int(change.low > 0) - int(change.high < 0)
    if side == 0:
        return "it did change here" if moved else "no change can be told here either"
    said = {side: "**came out**", -side: "**came out the other way round**"}
    return said.get(moved, "cannot be told")


# ------------------------------------------------------------------------------- hardware
def hardware(arm: str) -> list[dict]:
    """The rows of an arm of results/hardware.json. A spread is [median, least, most]."""
    return read("hardware")["arms"][arm]["rows"]


def spread(values: list[float], digits: int = 0, unit: str = "") -> str:
    """A median with the least and the most, if there are any."""
    middle, *ends = (f"{value:,.{digits}f}" for value in values)
    return f"{middle}{unit}" + (f" [{', '.join(ends)}]" if ends else "")


def times_as_fast(values: list[float]) -> str:
    return re.sub(r"^(\S+)(?= \[)", r"**\1**", spread(values, 1))


@made(
    "what | against | theirs | ours | times as fast, or as little [least, most] | ours, of the limit"
)
def speed():
    """Ours beside TRL, transformers and vLLM, and the share of what the cores could do."""
    for r in hardware("speed"):
        how = (r.get("digits", 0), f" {r['unit']}" if "unit" in r else "")
        sides = [spread(r[side], *how) if side in r else "" for side in ("theirs", "ours")]
        ratio = times_as_fast(r["ratio"]) if "ratio" in r else ""
        share = f"{r['of_limit']:.0%}" if "of_limit" in r else ""
        yield [r["what"], r["against"], *sides, ratio, share]


@made("one run | machine | updates | minutes | peak GB")
def cost():
    """What a run of each environment costs on a CPU."""
    for r in hardware("cost"):
        run, minutes = f"`--env {r['env']}`, {r['model']}", f"{r['seconds'] / 60:.1f}"
        yield [run, r["machine"], r["updates"], minutes, f"{r['gb']:.1f}"]


def gib(phases: dict[str, float]) -> list[str]:
    """At the peak of sampling, and of training."""
    sampling = max(phases["rollout"], phases["evaluation"])
    return [f"{sampling:.1f}", f"{phases['update']:.1f}"]


@made("model | card | flags | sampling | training")
def card():
    """What fits on which card."""
    for r in hardware("card"):
        flags = f"`{r['flags']}`" if r["flags"] else "the defaults"
        yield [r["model"], r["card"], flags, *gib(r["gib"])]


@made(
    "preset | tasks × samples | longest conversation, tokens | sampling, GiB | training, GiB | an update, s | the run, hours"
)
def presets():
    """The presets of published runs: memory and time, on paper."""
    for r in hardware("presets"):
        name, tasks = f"`--preset {r['preset']}`", f"{r['num_tasks']} × {r['k']}"
        seconds = " to ".join(f"{value:,.0f}" for value in r["seconds"])
        hours = " to ".join(f"{value:.1f}" for value in r["hours"])
        yield [name, tasks, f"{r['tokens']:,}", *gib(r["gib"]), seconds, hours]


@made(
    "what learns | cards | episodes | sampling, s | training, s | exchange, s | the rest, s | an update, s | episodes per second"
)
def scale_cards():
    """One update of a 4B on 1, 8 and 64 cards, on paper."""
    for r in hardware("scale_cards"):
        what = f"LoRA {r['rank']}" if r["rank"] else "all weights"
        exchange = r["exchange of gradients"] + r["exchange of episodes"]
        rest = r["copy of the weights"] + r["environment"]
        large = [f"{r[name]:.1f}" for name in ("sampling", "training")]
        both = [f"{value:.2f}" for value in (exchange, rest)]
        total = [f"{r[name]:.1f}" for name in ("seconds", "episodes_per_second")]
        yield [what, r["cards"], f"{r['episodes']:,}", *large, *both, *total]


# ------------------------------------------------------------------------------- trust
@made("verdict | lesson")
def lessons():
    """The claims, each with the verdicts of its parts; those that hold whole come first."""
    rows = []
    for name, claim in claims.CLAIMS.items():
        ours = " *Under rules of our own.*" if "ours" in claim else ""
        rows.append([f"**{claims.parts(name)}**", claim["sentence"] + ours])
    return sorted(rows, key=lambda r: 0 if r[0] == "**holds**" else 1 if "fail" in r[0] else 2)


@made("claim | number | predicted | measured | n | verdict")
def claim_numbers():
    """What decides each claim, and what a page cites beside it."""
    for name in claims.CLAIMS:
        for check in claims.checks(name):
            row = [claims.predicted(check), claims.measured(check), claims.many(check)]
            yield [name, check.text, *row, f"**{check.verdict}**" if check.verdict else ""]


@made("what was tried | how many | share")
def trust():
    """What was tried, how often it happened, and Wilson's interval of that share."""
    for arm in read("trust")["arms"].values():
        hits, n = arm["hits"], arm["n"]
        yield [arm["what"], f"{hits:,} of {n:,}", share(hits, n)]


@made("found | most often because | set, with TRL")
def doctor():
    """What the doctor finds in others' logs, why, and the one thing to set first with TRL."""
    logged = {mine for names in logs.NAMES.values() for mine in names.values()}
    seen = {}
    for name, illness in ILLNESSES.items():
        if not logged.issuperset(illness["columns"][:1]):
            continue  # only our own runs log what it looks at
        flags = cure(name, logs.TRL)
        first = seen.setdefault(flags, name)
        yield [name, illness["causes"][0], flags if first == name else f"as *{first}*"]


# ------------------------------------------------------------------------------- pages
def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def remake(text: str) -> str:
    """The page with each of its tables made again."""
    return MARK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def plain(text: str) -> str:
    """Without what bold type and units add to a number."""
    return re.sub(r"[*+%]| points", "", text)


def wrong(texts: dict[str, str]) -> list[str]:
    """Intervals in the prose of these pages ({name: text}) that stand in no table, a line each."""
    made = plain("".join(found[0] for text in texts.values() for found in MARK.finditer(text)))
    out = []
    for name, text in texts.items():
        prose = re.sub(r"```.*?```|`[^`]*`", "", MARK.sub("", text), flags=re.S)
        prose = re.sub(r"\s+", " ", prose)  # an interval may go over the end of a line
        missing = [i for i in INTERVAL.findall(prose) if plain(i) not in made]
        out += [f"{name}: {interval} stands in no table" for interval in missing]
    return out


def main() -> None:
    check = sys.argv[1:] == ["--check"]
    texts, problems = {}, []
    for page in pages():
        text, name = page.read_text(encoding="utf8"), f"{page.parent.name}/{page.name}"
        texts[name] = again = remake(text)
        if check and again != text:
            problems.append(f"{name}: not what results/ gives; run python -m lab.tables")
        elif again != text:
            page.write_text(again, encoding="utf8")
    problems += wrong(texts)
    print("\n".join(problems) or "every table and every interval is that of results/")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
