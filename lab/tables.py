"""The tables of README.md and docs/, made from results/*.json, so that the pages cannot drift.

    python -m lab.tables            # make every table again, in place, between its markers

A page has `<!-- table: NAME -->`, the table, `<!-- end -->`. TABLES has the rows and columns of
each NAME; `made` writes any of them. results/TABLE.json has one entry per arm and seed, with one
digit or number per task, so that every interval can be computed again. An interval in a page's
prose must also be in one of these tables, on any page: `wrong` lists those that are not.
tests/test_tables.py runs the check.
"""

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from math import comb
from pathlib import Path

import numpy as np

import metrics
from bookkeeping import compare, doctor, logs
from env_letters import make_task
from lab import claims
from settings import DEV_SEEDS
from swarm import governance

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)
INTERVAL = re.compile(
    r"[-+]?\d[\d,]*(?:\.\d+)?%?(?: points| s)? \[[-+]?[\d.,]*\d%?, [-+]?[\d.,]*\d%?\]"
)
WAYS = ("greedy", "sampled")
STAR = {
    "what": "the right ones among the policy's samples, resampled in five rounds, imitated (STaR)"
}
# Better names of arms. results/ keeps the name that lab/study.toml had when they ran.
LABELS = {
    ("letters", "selection"): {
        "what": "RL without a baseline (REINFORCE on right answers), resampled in every update"
    },
    ("letters", "chance"): {
        "what": "GRPO, every episode paid 0 or 1 by the toss of a coin (at 1e-5, a rate that moves "
        "nothing)"
    },
    ("letters", "chance_fixed"): {
        "what": "GRPO, every episode paid 0 or 1 by the toss of a coin, at 3e-5, where RL without a "
        "baseline, truly rewarded, reaches 97%"
    },
    ("letters", "star"): STAR,
    ("longer", "star"): STAR,
    ("real", "star"): {"what": "in place of GRPO: " + STAR["what"] + ", products in bfloat16"},
    ("recipe", "rank_1"): {"what": "LoRA of rank 1 (SFT, too)"},
    ("recipe", "all_weights"): {"what": "all weights (SFT, too)"},
    ("real", "own"): {
        "what": "in place of GRPO: RL without a baseline (REINFORCE on right answers), resampled "
        "in every update"
    },
    ("real", "clip_bfloat16"): {
        "what": "GRPO in bfloat16, but fresh samples are clipped (`--importance clip`)"
    },
    ("real", "own_bfloat16"): {
        "what": "in place of GRPO: REINFORCE on right answers, resampled in every update, products "
        "in bfloat16"
    },
    ("real", "rft"): {
        "what": "in place of GRPO: samples of where it begins, drawn once, and SFT on the right ones "
        "(RFT, at 1e-3), products in bfloat16"
    },
    ("real", "rft_slower"): {"what": "RFT at 3e-4, products in bfloat16"},
    ("real", "way_start"): {
        "what": "50 steps of SFT on 100 answers with the way to them (its replies may have 64 "
        "tokens, GRPO's 16)"
    },
}
# Arms that got more seeds after a look at held-out results. Comparisons with them have the wider
# interval that a claim has for its looks.
LOOKED_AT = {"real": ("more_sft", "own", "way_start"), "real_spelt": ("short",)}
Cell = str | Callable[[dict], object]


def read(name: str) -> dict:
    """results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf8"))


def keep(file: Path, head: dict, arms: dict) -> None:
    """Add arms to a result file, or replace them.

    Each arm has its own line, so that a diff shows what has grown. Numbers have six digits: no
    page shows more.
    """
    data = json.loads(file.read_text(encoding="utf8")) if file.exists() else {}
    arms = data.pop("arms", {}) | arms
    six_digits = lambda text: float(f"{float(text):.6g}")
    rounded = lambda x: json.loads(json.dumps(x), parse_float=six_digits)
    short = lambda x: json.dumps(rounded(x), separators=(",", ":"), ensure_ascii=False)
    line = lambda item: f"{short(item[0])}:{short(item[1])}"
    lines = [
        *map(line, (data | head).items()),
        '"arms":{\n' + ",\n".join(map(line, arms.items())) + "\n}",
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf8")


def table(head: str, rows: Iterable[list]) -> str:
    """Markdown. head: the titles of the columns, with " | " between them."""
    lines = [head, " | ".join(["---"] * len(head.split(" | ")))]
    lines += [" | ".join(map(str, row)) for row in rows]
    return "".join(f"| {line} |\n" for line in lines)


def made(rows: Iterable[dict], columns: dict[str, Cell]) -> str:
    """A table. columns: {title: cell}, with " | " in both if they are several columns.

    A cell is a format string of the row's fields, or a function of the row. It is empty if the row
    lacks what it shows.
    """

    def text(cell: Cell, row: dict) -> object:
        try:
            return cell.format_map(row) if isinstance(cell, str) else cell(row)
        except KeyError:
            return ""

    return table(" | ".join(columns), ([text(c, row) for c in columns.values()] for row in rows))


# ------------------------------------------------------------------------------- intervals
def digits(values: list) -> str | list:
    """0s and 1s as a string, a digit per task; other values as they are."""
    return "".join(f"{x:.0f}" for x in values) if set(values) <= {0, 1} else values


def numbers(values: str | list) -> np.ndarray:
    """The inverse of `digits`; a single number for all tasks stays one."""
    return np.array([*values] if isinstance(values, str) else values, dtype=float)


def scores(arm: dict, measure: str = "exact", how: str = "greedy", world: str = "") -> list:
    """[seeds][tasks] of an arm's held-out tasks, in its first world if none is named."""
    worlds = [seed["held_out"] for seed in arm["seeds"]]
    ways = [held[world or next(iter(held))] for held in worlds]
    return [numbers(way.get(how, next(iter(way.values())))[measure]) for way in ways]


def over(rows: list, level: float = 0.95, least: float = -1.0) -> metrics.Interval:
    """The mean of [seeds][tasks], its interval over seeds and tasks; for one policy, over tasks.

    least: how small a value can be, if all are equal.
    """
    return metrics.mean(rows[0]) if len(rows) == 1 else claims.interval(rows, level, least=least)


def percent(rows: list, digits: int = 1) -> str:
    """The share of right answers; its interval stays between 0 and 1."""
    return over(rows, least=0.0).within(0.0, 1.0).percent(digits)


def less(ours: list, theirs: list, level: float = 0.95) -> metrics.Interval:
    """Ours minus theirs, paired by seed and task; a single policy is paired with every seed."""
    if len(ours) == 1 == len(theirs):
        return metrics.gain(theirs[0], ours[0])
    n = max(len(ours), len(theirs))
    ours, theirs = (rows * n if len(rows) == 1 else rows for rows in (ours, theirs))
    return over([a - b for a, b in zip(ours, theirs)], level)


def share(right: float, n: int) -> str:
    return metrics.proportion(right, n).percent()


# ------------------------------------------------------------------------------- arms and cells
def arms(table: str, *names: str) -> list[dict]:
    """The arms of results/TABLE.json that have a seed, or those named.

    Each has its name, its label, the other arms, and the level of intervals of comparisons with it.
    """
    found = read(table)["arms"]
    done = [name for name, arm in found.items() if arm.get("seeds", True)]
    level = lambda name: claims.LEVEL if name in LOOKED_AT.get(table, ()) else 0.95
    return [
        found[name]
        | {"name": name, "others": found, "level": level(name)}
        | LABELS.get((table, name), {})
        for name in names or done
    ]


def stages(table: str, **names: str) -> list[dict]:
    """Arms under other names."""
    return [arm | {"what": names[arm["name"]]} for arm in arms(table, *names)]


def seeds(arm: dict) -> str:
    """How many seeds are done, and of how many if more were planned."""
    done = len(arm["seeds"])
    planned = arm.get("planned", done)
    return f"{done} of {planned}" if done < planned else f"{done}"


def of_seeds(arm: dict, key: str) -> list:
    """[seeds][tasks] of what is kept besides the held-out tasks, such as after_sft or final."""
    return [numbers((seed | seed.get("development", {}))[key]) for seed in arm["seeds"]]


def work(arm: dict) -> str:
    """An arm's mean work, if it was trained."""
    return f"{np.mean([seed['work'] for seed in arm['seeds']]):.1f}"


def value(measure: str, how: str = "greedy", world: str = "") -> Cell:
    return lambda arm: over(scores(arm, measure, how, world)).text()


reward = partial(value, "reward")


def exact(how: str = "greedy") -> Cell:
    return lambda arm: percent(scores(arm, "exact", how))


def mean(measure: str, form: str, how: str = "greedy", scale: float = 1) -> Cell:
    return lambda arm: format(scale * np.mean(scores(arm, measure, how)), form)


def bold(cell: Cell) -> Cell:
    """The cell, in bold type if it is GRPO's."""
    return lambda arm: f"**{cell(arm)}**" if arm["name"] == "grpo" else cell(arm)


def difference(
    arms: dict, a: str, b: str, how="greedy", world="", measure="reward", level=0.95
) -> metrics.Interval:
    """Arm a minus arm b."""
    return less(*(scores(arms[name], measure, how, world) for name in (a, b)), level)


def beside(ours: str, rows: list[dict], measure: str = "exact") -> list[dict]:
    """Each row with `ours` minus it and p, greedy and sampled.

    p is corrected by Holm over the rows that were played so.
    """
    for how in WAYS:
        played = [row for row in rows if how in next(iter(row["seeds"][0]["held_out"].values()))]
        of = {row["name"]: np.array(scores(row, measure, how)) for row in played}
        found = {
            name: compare.differ(of[ours], theirs) for name, theirs in of.items() if name != ours
        }
        p = dict(zip(found, map(compare.small, compare.holm([p for _, p, _ in found.values()]))))
        text = {name: f"{told(gain, measure)}, p {p[name]}" for name, (gain, *_) in found.items()}
        rows = [row | {how: text.get(row["name"], "")} for row in rows]
    return rows


def told(gain: metrics.Interval, measure: str) -> str:
    """A difference: of shares in points, of rewards as it is."""
    return gain.within(-1.0, 1.0).points() if measure == "exact" else gain.signed()


def both_ways(ours: str, right: str = "right") -> dict[str, Cell]:
    """The columns of rows that come from `beside`."""
    return {
        f"{right}, greedy": bold(exact()),
        f"{ours} minus this, greedy": "{greedy}",
        f"{right}, sampled": exact("sampled"),
        f"{ours} minus this, sampled": "{sampled}",
    }


def swarm_columns(title: str) -> dict[str, Cell]:
    """The columns of rows that come from `beside`, for rewards of swarm."""
    return {
        title: "{what}",
        "rate": rate,
        "reward, greedy": bold(reward()),
        "GRPO minus this, greedy": "{greedy}",
        "reward, sampled": bold(reward("sampled")),
        "GRPO minus this, sampled": "{sampled}",
        "turns lost to errors, sampled, %": mean("error_rate", ".1f", "sampled", 100),
        "thousand tokens sampled, trained on": tokens,
    }


def differences(name: str, *rows: tuple[str, str, str, str], measure: str = "reward") -> list[list]:
    """Rows (title, an arm of results/NAME.json, another, world): the first minus the second."""
    found = read(name)["arms"]
    gain = lambda a, b, world, how: difference(found, a, b, how, world, measure)
    return [
        [title, *(told(gain(a, b, world, how), measure) for how in WAYS)]
        for title, a, b, world in rows
    ]


def each_seed(measure: str, how: str, form: str, scale: float = 1, middle=np.mean) -> Cell:
    """A number per seed: the mean over its tasks, or another middle."""
    return lambda arm: " ".join(
        format(scale * middle(row), form) for row in scores(arm, measure, how)
    )


def rate(arm: dict) -> str:
    """The learning rate that was best on development tasks; es.json's is a step along noise."""
    find = lambda flag: re.findall(rf"--{flag} (\S+)", arm["settings"])
    rates = find("lr") or find("sft-lr")  # the latter if it learned by SFT alone
    if not rates:
        return ""
    return f"{rates[-1]} (step)" if arm["name"] == "es" else rates[-1]


def tokens(arm: dict) -> str:
    """Thousands of tokens sampled, and trained on after SFT; means over seeds."""
    of = lambda kind: np.mean([seed["tokens"].get(kind, 0) for seed in arm["seeds"]]) / 1e3
    return f"{of('sampled'):.0f}, {of('trained') - of('sft'):.0f}"


def gain(ours: str, measure: str = "exact", how: str = "greedy", but: tuple = ()) -> Cell:
    """An arm minus the row's arm, in points if a share. The rows in `but` have none."""

    def cell(arm: dict) -> str:
        found = difference(arm["others"], ours, arm["name"], how, "", measure, arm["level"])
        return "" if arm["name"] in (ours, *but) else told(found, measure)

    return cell


def risen(measure: str, digits: int = 3) -> Cell:
    """GRPO minus its start in each seed, sampled; the interval is over the tasks of one seed."""
    return lambda arm: ", ".join(
        metrics.gain(before, after).signed(digits)
        for before, after in zip(
            scores(arm, measure, "sampled"), scores(arm["others"]["grpo"], measure, "sampled")
        )
        if arm["name"] == "start"
    )


# ------------------------------------------------------------------------------- letters
def passed(stage: str) -> Cell:
    """Sampled at temperature 1: pass@k without bias (Chen et al. 2021, eq. 1)."""
    miss = lambda row, right: comb(row["of"] - right, row["k"]) / comb(row["of"], row["k"])
    return lambda row: percent([[1 - miss(row, right) for right in s] for s in row[stage]], 0)


def bases() -> Iterable[dict]:
    """Each base in both decodings, with [seeds][tasks] of its arms."""
    data = read("bases")
    names = ("base", "prefilled", "grpo", "sft_derives", "no_think")
    for base, how in product(data["bases"], WAYS):
        row = {name: scores(data["arms"][f"{base}_{name}"], how=how) for name in names}
        derives = np.mean(scores(data["arms"][f"{base}_base"], "habit_derives", how))
        yield data["bases"][base] | row | {"how": how, "derives": derives}


def developed(stage: str) -> Cell:
    """pico.py's share of right answers after a stage, over all its seeds."""
    n = read("pico")["development"]
    return lambda arm: share(n * np.mean([seed["exact"][stage] for seed in arm["seeds"]]), n)


def median(key: str, form: str) -> Cell:
    return lambda arm: format(np.median([seed[key] for seed in arm["seeds"]]), form)


def gained(arm: dict, level: float = 0.95) -> metrics.Interval:
    """On development tasks: at the end minus after SFT."""
    return less(of_seeds(arm, "final"), of_seeds(arm, "after_sft"), level)


def per_seed(ours: list, theirs: list) -> str:
    """'+2.1 -0.4': ours minus theirs in points, each seed."""
    return " ".join(f"{100 * (a - b).mean():+.1f}" for a, b in zip(ours, theirs))


def forgotten(how: str) -> Cell:
    """Alphabet of results/razor.json: the row's arm minus the base."""
    return lambda arm: (
        ""
        if arm["name"] == "base"
        else difference(
            arm["others"], f"{arm['name']}_old", "base_old", how, measure="exact"
        ).points()
    )


COURSE: dict[str, Cell] = {  # development tasks before and after GRPO
    "seeds": seeds,
    "after SFT": lambda arm: percent(of_seeds(arm, "after_sft")),
    "after GRPO": lambda arm: percent(of_seeds(arm, "final")),
    "gained": lambda arm: gained(arm, arm["level"]).points(),
    "n": lambda arm: len(of_seeds(arm, "final")[0]),
}


def right(title: str, rows: list[dict]) -> str:
    """A table of what arms get exactly right; its head says how many tasks and seeds."""
    [n] = {len(scores(arm)[0]) for arm in rows}
    n_seeds = max(len(arm["seeds"]) for arm in rows)  # an arm with fewer says so
    cell = exact()
    as_its_name = lambda arm: f"**{cell(arm)}**" if arm["what"].startswith("**") else cell(arm)
    return made(
        rows,
        {title: "{what}", f"right, {n} held-out tasks, {n_seeds} seeds": as_its_name},
    )


def best_guess(arm: dict) -> np.ndarray:
    """[n] development tasks: 1 if the commonest counts for that many letters are right."""
    tier = int(re.findall(r"--difficulty (\d+)", arm["settings"])[-1])
    n = len(of_seeds(arm, "final")[0])
    truths = [make_task(random.Random(DEV_SEEDS + i), tier).counts for i in range(n)]
    guess = {len(truth): truth for truth, _ in reversed(Counter(truths).most_common())}
    return np.array([float(truth == guess[len(truth)]) for truth in truths])


def off_the_guess(arm: dict) -> str:
    """How many tasks are right at the end but not by the best guess, or vice versa; each seed."""
    guess = best_guess(arm)
    return " ".join(f"{abs(final - guess).sum():.0f}" for final in of_seeds(arm, "final"))


def beyond_the_guess(arm: dict) -> str:
    """Of the tasks that the best guess misses, what is right; each seed."""
    missed = best_guess(arm) == 0
    before, after = (
        [f"{final[missed].mean():.0%}" for final in of_seeds(arm, stage)]
        for stage in ("after_sft", "final")
    )
    return ", ".join(map(" → ".join, zip(before, after)))


def of_kind(arm: dict, addition: int) -> list:
    """[seeds][tasks] of SmolLM2's held-out sums that are additions (1) or subtractions (0)."""
    kinds = numbers(read("real")["additions"])
    return [row[kinds == addition] for row in scores(arm)]


KINDS: dict[str, Cell] = {
    "additions": lambda arm: percent(of_kind(arm, 1)),
    "subtractions": lambda arm: percent(of_kind(arm, 0)),
}


def pairs(what: str, name: str, *rows: tuple[str, str, str], level: float = 0.95) -> str:
    """A table: rows (title, an arm of results/NAME.json, another), paired by seed and task."""
    found = {arm["name"]: (scores(arm), of_seeds(arm, "final")) for arm in arms(name)}
    cells = []
    for title, a, b in rows:
        compared = zip(found[a], found[b])  # held-out tasks, then development tasks
        text = [[less(x, y, level).points(), per_seed(x, y)] for x, y in compared]
        cells.append([title, *text[0], *text[1]])
    return table(f"{what} | held-out tasks | each seed | development tasks | each seed", cells)


def swept(title: str, name: str, form: str, **labels: str) -> str:
    """A table of what each rate got on development tasks with seed 0; the best is bold."""
    found, rows = read(name)["arms"], {}
    for arm, what in labels.items():
        rates = {s.removeprefix("--lr "): x for s, x in found[arm]["swept"].items()}
        rows[what] = {rate: x["development"] for rate, x in rates.items() if " " not in rate}
    rates = sorted({rate for row in rows.values() for rate in row}, key=float)
    text = lambda x, row: f"**{x:{form}}**" if x == max(row.values()) else f"{x:{form}}"
    cell = lambda rate, row: text(row[rate], row) if rate in row else ""
    cells = [[what, *(cell(rate, row) for rate in rates)] for what, row in rows.items()]
    return table(" | ".join([title, *rates]), cells)


# Arms of longer.json, as its table by length calls them.
LENGTHS = {
    "climbs": "climbs",
    "tier7": "tier 7 from the start",
    "tier7_swept": "tier 7, swept",
    "positives": "tier 7, REINFORCE",
    "star": "tier 7, STaR",
    "rft": "tier 7, RFT",
    "tier6": "stays on tier 6",
    "prefilled": "prefilled",
    "base": "the base",
}

TABLES: dict[str, Callable[[], str]] = {
    "letters": lambda: right(  # pico_base: what somebody would try first
        "counting letters, 0.9M parameters",
        stages(
            "letters",
            start="warm-up: 100 demonstrations that do not spell",
            sft_states="more SFT on the same demonstrations, as much work as RL",
            rft="sample only the warm-up model, imitate what is right",
            grpo="**RL after the warm-up**",
            sft_derives="100 demonstrations that spell, no RL",
        ),
    ),
    "sums": lambda: right(  # SmolLM2: the same question
        "sums, SmolLM2-135M, 4-bit weights",
        stages(
            "real",
            start="warm-up: 100 answers",
            more_sft="the same answers for longer",
            grpo="RL after the warm-up",
            true_answers="SFT on answers to as many questions as RL saw (3 seeds, bfloat16)",
            way_start="100 worked examples, no RL; longer replies",
        ),
    ),
    "letters_arms": lambda: made(  # GRPO beside what might do as well
        arms("letters"),
        {
            "arm": "{what}",
            "seeds": seeds,
            "exactly right": exact(),
            "GRPO minus this": gain("grpo", but=("prefilled", "best_of", "base")),
            "work": work,
        },
    ),
    "recipe": lambda: made(  # each ingredient beside the default
        beside(
            "grpo",
            arms("recipe", "grpo", "maxrl", "teacher", "minus", "rank_1", "all_weights", "start")
            + arms("es", "es"),
        ),
        {
            "letters, tier 6": "{what}",
            "rate": rate,
            **both_ways("GRPO"),
            "thousand tokens sampled, trained on": tokens,
        },
    ),
    "recipe_weights": lambda: made(
        stages(
            "recipe",
            rank_1="RL, rank 1",
            sft_rank_1="SFT, rank 1",
            grpo="RL, rank 32",
            sft_rank_32="SFT, rank 32",
            all_weights="RL, all weights",
            all_weights_longer="RL, all weights, six times the tokens",
            sft_all_weights="SFT, all weights",
        ),
        {
            "letters, tier 6": "{what}",
            "seeds": seeds,
            "rate": rate,
            "right, greedy": exact(),
            "right, sampled": exact("sampled"),
            "samples that spell": mean("habit_derives", ".0%", "sampled"),
            "thousand tokens that RL sampled, trained on": tokens,
        },
    ),
    "recipe_sft": lambda: table(
        "letters, tier 6, 5 seeds | greedy | sampled",
        differences(
            "recipe",
            ("rank 1: RL minus SFT", "rank_1", "sft_rank_1", "tier 6"),
            ("rank 32: RL minus SFT", "grpo", "sft_rank_32", "tier 6"),
            ("SFT: rank 32 minus rank 1", "sft_rank_32", "sft_rank_1", "tier 6"),
            ("SFT: all weights minus rank 1", "sft_all_weights", "sft_rank_1", "tier 6"),
            measure="exact",
        ),
    ),
    "recipe_few": lambda: made(  # thirteen parameters: GRPO beside SFT
        arms("es", "few_grpo", "few_sft"),
        {
            "letters, tier 6, 5 seeds": "{what}",
            "right, greedy": exact(),
            "each seed": each_seed("exact", "greedy", ".0f", 100),
            "GRPO minus this": gain("few_grpo"),
            "right, sampled": exact("sampled"),
            "each seed, sampled": each_seed("exact", "sampled", ".0f", 100),
            "GRPO minus this, sampled": gain("few_grpo", how="sampled"),
        },
    ),
    "recipe_turns": lambda: made(
        beside("per_episode", arms("recipe", "per_episode", "per_turn")),
        {
            "alphabet, three turns, 3 seeds": "{what}",
            "rate": rate,
            **both_ways("per episode", "all lists right"),
        },
    ),
    "recipe_old": lambda: made(  # samples of up to seven updates ago
        beside(
            "old_fresh",
            stages(
                "recipe",
                old_fresh="fresh samples, as many tokens",
                old_none="`none`: not corrected",
                old_clip="`clip`",
                old_sequence="`sequence`",
                old_token="`token`",
                old_token_mask="`token_mask` (IcePop)",
                old_token_mask_low="`token_mask` at a lower rate",
                old_sequence_mask="`sequence_mask` (TRL's default)",
            ),
        ),
        {
            "letters, tier 6, 3 seeds": "{what}",
            "rate": rate,
            **both_ways("fresh"),
        },
    ),
    "recipe_passes": lambda: made(  # does MaxRL keep more ways open?
        [
            {"of": 128, "k": k}
            | {arm["name"]: [[*map(int, s)] for s in scores(arm, how="sampled")] for arm in rows}
            for rows in [arms("recipe", "start_draws", "grpo_draws", "maxrl_draws")]
            for k in (1, 8, 32, 128)
        ],
        {
            "letters, sampled at temperature 1": "pass@{k}",
            "after SFT": passed("start_draws"),
            "GRPO": passed("grpo_draws"),
            "MaxRL": passed("maxrl_draws"),
        },
    ),
    "why_letters": lambda: made(  # who samples: the start, or the policy as it is
        stages(
            "letters",
            start="the warm-up alone",
            sft_states="more of the warm-up's demonstrations",
            rft="RFT: samples of the warm-up, drawn once, the right ones imitated",
            star="STaR: the same in five rounds, each with new samples",
            frozen="frozen GRPO: samples of the warm-up, drawn once, compared with their group",
            selection="REINFORCE: right ones alone, resampled in every update",
            grpo="GRPO: resampled in every update, and compared with their group",
            sft_derives="imitation of 100 demonstrations that spell",
        ),
        {
            "letters, tier 6": "{what}",
            "seeds": seeds,
            "exactly right": bold(exact()),
            "GRPO minus this": gain("grpo"),
            "work": work,
        },
    ),
    "why_longer": lambda: made(  # the same where the base's own derivations fall short
        [
            *stages(
                "longer",
                base="the base",
                prefilled="the base, given the first two letters of the spelling",
            ),
            *beside(
                "tier7_swept",
                stages(
                    "longer",
                    rft="RFT: samples of the base, drawn once, the right ones imitated",
                    star="STaR: five rounds, each with new samples, the right ones imitated",
                    positives="REINFORCE: right ones alone, resampled in every update",
                    tier7="GRPO at its default rate",
                    tier7_swept="GRPO at the best of four rates",
                ),
            ),
        ],
        {
            "letters, tier 7": "{what}",
            "seeds": seeds,
            "exactly right": bold(exact()),
            "best GRPO minus this": "{greedy}",
            "sampled": exact("sampled"),
            "best GRPO minus this, sampled": "{sampled}",
            "work": work,
        },
    ),
    "why_swarm": lambda: made(  # is it the comparison, or would keeping the good episodes do?
        [
            *beside(
                "grpo",
                arms("why_swarm", "cloning", "star", "cloning_again", "reinforce", "grpo"),
                "reward",
            ),
            # no rival: without a difference, and not among the comparisons that Holm counts
            *(row | {"greedy": "", "sampled": ""} for row in arms("why_swarm", "start")),
        ],
        swarm_columns("swarm, medium, 3 seeds"),
    ),
    "why_swarm_long": lambda: made(  # what ties in 20 updates: does it part in 40?
        beside("grpo_long", arms("why_swarm", "cloning_again_long", "grpo_long"), "reward"),
        swarm_columns("swarm, medium, twice the tokens, 3 seeds"),
    ),
    "why_swarm_also": lambda: table(
        "reward | greedy | sampled",
        differences(
            "why_swarm",
            (
                "the best quarter resampled in every update, minus drawn once",
                "cloning_again",
                "cloning",
                "medium",
            ),
            ("the same in five rounds, minus drawn once", "star", "cloning", "medium"),
            ("in every update, minus in five rounds", "cloning_again", "star", "medium"),
            ("drawn once, minus the start", "cloning", "start", "medium"),
            ("REINFORCE minus the start", "reinforce", "start", "medium"),
        ),
    ),
    "why_letters_rates": lambda: swept(
        "letters, tier 6, right",
        "letters",
        ".1%",
        rft="RFT",
        star="STaR",
        frozen="frozen GRPO",
        selection="REINFORCE",
    ),
    "why_longer_rates": lambda: swept(
        "letters, tier 7, right",
        "longer",
        ".1%",
        rft="RFT",
        star="STaR",
        positives="REINFORCE",
        tier7_swept="GRPO",
    ),
    "why_swarm_rates": lambda: swept(
        "swarm, reward",
        "why_swarm",
        ".3f",
        cloning="filtered cloning, drawn once",
        star="in five rounds",
        cloning_again="in every update (RAFT)",
        reinforce="REINFORCE",
        grpo="GRPO",
    ),
    "why_sums_rates": lambda: swept(
        "sums, right",
        "real",
        ".1%",
        rft="RFT",
        star="STaR",
        frozen="frozen GRPO",
        own_bfloat16="REINFORCE",
        grpo_bfloat16="GRPO",
    ),
    "razor": lambda: made(  # how far each has moved, and what it has forgotten
        arms(
            "razor",
            *("base", "start", "grpo", "grpo_slow", "positives"),
            *("spells_25", "spells_50", "spells_100"),
        ),
        {
            "letters, tier 6": "{what}",
            "seeds": seeds,
            "RL's rate": rate,
            "right, greedy": exact(),
            "right, sampled": exact("sampled"),
            "moved, nats: mean of each seed": each_seed("moved", "sampled", ".1f"),
            "median": each_seed("moved", "sampled", ".1f", middle=np.median),
            "alphabet prefilled, greedy": lambda arm: exact()(arm["others"][f"{arm['name']}_old"]),
            "this minus the base": forgotten("greedy"),
            "the same, sampled": forgotten("sampled"),
        },
    ),
    "razor_old": lambda: table(
        "alphabet prefilled, 3 seeds | greedy | sampled",
        differences(
            "razor",
            ("GRPO at 3e-4 minus GRPO at 1e-3", "grpo_slow_old", "grpo_old", "alphabet"),
            ("GRPO at 3e-4 minus 100 steps of SFT", "grpo_slow_old", "spells_100_old", "alphabet"),
            ("GRPO at 1e-3 minus 100 steps of SFT", "grpo_old", "spells_100_old", "alphabet"),
            ("REINFORCE minus 100 steps of SFT", "positives_old", "spells_100_old", "alphabet"),
            measure="exact",
        ),
    ),
    "letters_no_thinking": lambda: made(
        arms("letters", "no_think", "no_think_partial"),
        {
            "150 updates, development tasks": "{what}",
            "gain over SFT": lambda arm: gained(arm).points(),
            "each seed": lambda arm: per_seed(of_seeds(arm, "final"), of_seeds(arm, "after_sft")),
        },
    ),
    "real": lambda: made(  # SmolLM2's sums
        arms("real"),
        {
            "SmolLM2-135M, sums of two digits": "{what}",
            "seeds": seeds,
            "exactly right": bold(exact()),
            "held-out tasks": lambda arm: len(scores(arm)[0]),
            "right format": mean("format", ".0%"),
            "right anywhere": mean("found", ".1%"),
            "GRPO minus this; 98.3% if seeds were added": gain(
                "grpo",
                but=(
                    "base",
                    "grpo_more",
                    "way_grpo",
                    "maxrl_bfloat16",
                    "clip_bfloat16",
                    "own_bfloat16",
                    "teacher_bfloat16",
                    "true_answers",
                    "rft",
                    "rft_slower",
                    "star",
                    "frozen",
                    "grpo_64",
                ),
            ),
        },
    ),
    "real_gain": lambda: made(
        arms("real", "grpo", "grpo_more", "way_grpo"),
        {
            "245 development tasks": "{what}",
            "minus after SFT": lambda arm: gained(arm).points(),
            "each seed": lambda arm: per_seed(of_seeds(arm, "final"), of_seeds(arm, "after_sft")),
        },
    ),
    "real_pairs": lambda: pairs(
        "points on SmolLM2's sums, intervals of 98.3%",
        "real",
        ("GRPO minus more SFT", "grpo", "more_sft"),
        ("GRPO minus RL without a baseline", "grpo", "own"),
        ("GRPO minus SFT that shows the way (64 tokens per reply, GRPO 16)", "grpo", "way_start"),
        ("RL without a baseline minus more SFT", "own", "more_sft"),
        ("more SFT minus where all three began", "more_sft", "start"),
        level=claims.LEVEL,
    ),
    "real_bfloat16": lambda: pairs(
        "points on SmolLM2's sums, products in bfloat16",
        "real",
        ("MaxRL minus GRPO", "maxrl_bfloat16", "grpo_bfloat16"),
        ("A teacher minus GRPO", "teacher_bfloat16", "grpo_bfloat16"),
        ("A teacher minus SFT on 1,280 answers", "teacher_bfloat16", "true_answers"),
    ),
    "clip_sums": lambda: pairs(
        "points on SmolLM2's sums, two CPU cores, products in bfloat16",
        "real",
        ("`--importance clip` minus `token`", "clip_bfloat16", "grpo_bfloat16"),
    ),
    "recipe_sums": lambda: made(
        arms("real", "grpo_bfloat16", "maxrl_bfloat16", "teacher_bfloat16", "true_answers"),
        {
            "SmolLM2's sums, held out": "{what}",
            "seeds": seeds,
            "exactly right": exact(),
        }
        | KINDS,
    ),
    "why_kinds": lambda: made(
        arms(
            "real",
            *("start", "grpo_bfloat16", "own_bfloat16", "rft", "rft_slower", "star", "frozen"),
            *("true_answers", "way_start"),
        ),
        {
            "SmolLM2's sums, held out": "{what}",
            "seeds": seeds,
        }
        | KINDS,
    ),
    "why_sums": lambda: pairs(
        "points on SmolLM2's sums, products in bfloat16",
        "real",
        ("SFT on the answers of 1,280 questions minus GRPO", "true_answers", "grpo_bfloat16"),
        ("RFT minus GRPO", "rft", "grpo_bfloat16"),
        ("RFT at 3e-4 minus GRPO", "rft_slower", "grpo_bfloat16"),
        ("STaR minus GRPO", "star", "grpo_bfloat16"),
        ("REINFORCE minus GRPO", "own_bfloat16", "grpo_bfloat16"),
        ("STaR minus RFT, both at 3e-4", "star", "rft_slower"),
        ("REINFORCE minus RFT, both at 3e-4", "own_bfloat16", "rft_slower"),
        ("frozen GRPO minus RFT", "frozen", "rft"),
        ("frozen GRPO minus where all began", "frozen", "start"),
        ("GRPO with replies of up to 64 tokens minus GRPO", "grpo_64", "grpo_bfloat16"),
    ),
    "real_letters": lambda: made(  # SmolLM2's letters
        arms("real_letters"),
        {"SmolLM2-135M, without thinking": "{what}"}
        | COURSE
        | {
            "the best guess for all": lambda arm: f"{best_guess(arm).mean():.1%}",
            "tasks that differ from it, each seed": off_the_guess,
        },
    ),
    "real_spelt": lambda: made(  # the same, spelt in the question
        arms("real_spelt", "half", "whole", "short"),
        {"SmolLM2-135M, letters apart": "{what}"}
        | COURSE
        | {
            "right among those that the best guess misses, before → after GRPO, each seed": beyond_the_guess,
            "held out, after GRPO": exact(),
            "held-out tasks": lambda arm: len(scores(arm)[0]),
        },
    ),
    "real_spelt_pairs": lambda: pairs(
        "points on short words, letters apart",
        "real_spelt",
        ("GRPO minus more SFT", "short", "short_sft"),
    ),
    "real_alphabet": lambda: made(  # its lists; development tasks, then held-out ones
        arms("real_alphabet"),
        {
            "SmolLM2-135M, two turns of one or two names": "{what}",
            "seeds": seeds,
            "after SFT: mean reward": lambda arm: over(of_seeds(arm, "after_sft")).text(),
            "after GRPO": lambda arm: over(of_seeds(arm, "final")).text(),
            "gained": lambda arm: gained(arm).signed(),
            "n": lambda arm: len(of_seeds(arm, "final")[0]),
            "held out, after GRPO": reward(),
            "both turns perfect": exact(),
            "held-out tasks": lambda arm: len(scores(arm)[0]),
        },
    ),
    "real_swarm": lambda: made(  # its tool calls
        arms("real_swarm"),
        {
            "SmolLM2-135M, easy scenarios": "{what}",
            "seeds": seeds,
            "turns acted, of 25: before | after SFT | after GRPO": lambda arm: " | ".join(
                f"{np.mean(of_seeds(arm, stage)):.1f}" for stage in ("before", "after_sft", "final")
            ),
            "n": lambda arm: len(of_seeds(arm, "final")[0]),
            "held out, after GRPO: mean reward": reward(),
            "turns with an error, %": mean("error_rate", ".0f", "greedy", 100),
            "works submitted": mean("used_submit_work", ".1f"),
            "held-out tasks": lambda arm: len(scores(arm, "reward")[0]),
        },
    ),
    "passes": lambda: made(
        [read("letters")["passes"] | {"k": k} for k in (1, 4, 32)],
        {
            "letters, sampled at temperature 1": "pass@{k}",
            "after SFT": passed("after SFT"),
            "after 40 updates of GRPO": passed("after 40 updates of GRPO"),
            "seeds": lambda row: len(row["after SFT"]),
            "development n": lambda row: len(row["after SFT"][0]),
        },
    ),
    "pico": lambda: made(  # pico.py beside train.py: the same task, in the same hour
        arms("pico"),
        {
            "what": "{what}",
            "after SFT": developed("after SFT"),
            "after GRPO": developed("after GRPO"),
            "seconds": median("seconds", ".0f"),
            "peak GB": median("gigabytes", ".2f"),
            "seeds": seeds,
        },
    ),
    "bases": lambda: made(  # letters on bases that were made in other ways
        bases(),
        {
            "base": "{what}",
            "decoding": "{how}",
            "spells": "{derives:.1%}",
            "before": lambda row: percent(row["base"]),
            "prefilled": lambda row: percent(row["prefilled"]),
            "after GRPO": lambda row: f"**{percent(row['grpo'])}**",
            "GRPO minus prefilled": lambda row: less(row["grpo"], row["prefilled"]).points(),
            "after SFT that spells": lambda row: percent(row["sft_derives"]),
            "GRPO minus SFT": lambda row: less(row["grpo"], row["sft_derives"]).points(),
            "GRPO, no thinking": lambda row: percent(row["no_think"]),
        },
    ),
    "bases_tally": lambda: made(  # how often a base spells when sampled, how often that is right
        [{"what": "pico_base"} | read("bases")["pico_base"], *read("bases")["bases"].values()],
        {
            "base, sampled": "{what}",
            "spells": "{often:.1%}",
            "of these right": lambda base: share(base["right"], base["n"]) if base["n"] else "",
            "n": "{n}",
        },
    ),
    "longer_arms": lambda: made(  # strings longer than any that the base was shown
        arms("longer", *LENGTHS),
        {
            "arm": "{what}",
            "seeds": seeds,
            "tier 7, greedy": lambda arm: f"**{percent(scores(arm))}**",
            "sampled": exact("sampled"),
            "climbs minus this, greedy": gain("climbs"),
            "work": work,
        },
    ),
    "longer_lengths": lambda: made(  # the same by the length of the string, greedy
        [{"n": n, "arms": arms("longer", *LENGTHS)} for n in range(60, 151, 10)],
        {
            "letters": "{n}",
            " | ".join(LENGTHS.values()): lambda row: " | ".join(
                percent(scores(arm, world=f"{row['n']}")) for arm in row["arms"]
            ),
        },
    ),
    "offpolicy": lambda: made(  # running ahead, and old samples; timed if alone on the machine
        [arm | arm["seeds"][0] for arm in arms("offpolicy")],
        {
            "flags": "{what}",
            "exactly right": lambda arm: percent([numbers(arm["development"])]),
            "samples are old by": "{old}",
            "updates a minute": "{a_minute:.1f}",
            "the trainer waits": "{waits:.0%} of the time",
        },
    ),
    "staleness": lambda: made(  # how old samples are if the sampler never waits
        [arm | arm["seeds"][0] for arm in arms("staleness")],
        {
            "what": "{what}",
            "age in update 1 · 5 · 10 · 15 · 20 · 25 · 30": lambda arm: " · ".join(
                f"{arm['off_policy_steps'][update - 1]:g}" for update in (1, 5, 10, 15, 20, 25, 30)
            ),
            "at most": lambda arm: f"{max(arm['off_policy_steps']):g}",
            "batches dropped, of all": lambda arm: (
                f"{sum(arm['batches_dropped'])} of "
                f"{sum(arm['batches_dropped']) + len(arm['batches_dropped'])}"
            ),
            "the trainer waits": lambda arm: "{:.0%} of the time".format(
                sum(arm["seconds_wait"]) / sum(arm["seconds_wait"] + arm["seconds_train"])
            ),
            "right after SFT → at the end": lambda arm: (
                f"{percent([numbers(arm['development']['after_sft'])])} → "
                f"{percent([numbers(arm['development']['final'])])}"
            ),
        },
    ),
    "known": lambda: made(  # rows of a file, and a generator that others wrote
        arms("known"),
        {
            "held-out tasks": "{what}",
            "after SFT": lambda arm: percent(of_seeds(arm, "held_out_sft")),
            "after GRPO": lambda arm: percent(of_seeds(arm, "held_out")),
            "gain of GRPO": lambda arm: less(
                of_seeds(arm, "held_out"), of_seeds(arm, "held_out_sft")
            ).points(),
            "the same on development tasks": lambda arm: gained(arm).points(),
            "seeds": seeds,
        },
    ),
    "fork": lambda: made(  # docs/fork.md's environment, of which the base is the same in each seed
        arms("fork"),
        {
            "the base": lambda arm: percent(of_seeds(arm, "before")[:1]),
            "after SFT": lambda arm: percent(of_seeds(arm, "after_sft")),
            "after GRPO": lambda arm: percent(of_seeds(arm, "final")),
            "the same on held-out words": lambda arm: percent(of_seeds(arm, "held_out")),
            "seeds": seeds,
        },
    ),
}


# ------------------------------------------------------------------------------- alphabet
def alphabet_also() -> dict[str, str]:
    """What else the page says, all of it sampled."""
    data = read("alphabet")
    prefilled, derives = arms("alphabet", "prefilled", "sft_derives")
    reward_gain, perfect_gain = (gain("grpo", m, "sampled") for m in ("reward", "exact"))
    published = metrics.mean(np.mean(data["published"], axis=0))  # three like replies to a list
    return {
        "perfect where the base takes up the method by itself": share(**data["alone"]),
        "perfect, prefilled": exact("sampled")(prefilled),
        "GRPO minus prefilled, mean reward": reward_gain(prefilled),
        "GRPO minus prefilled, perfect": perfect_gain(prefilled),
        "GRPO minus SFT that derives, mean reward": reward_gain(derives),
        "GRPO minus SFT that derives, perfect": perfect_gain(derives),
        "the published run, mean reward over its 20 lists": published.text(),
    }


TABLES |= {
    "alphabet": lambda: made(  # before and after, on held-out lists
        stages(
            "alphabet",
            base="the base, before anything",
            start="after SFT on 100 demonstrations that do not show the algorithm",
            grpo="after 80 updates of GRPO",
        ),
        {
            "alphabet": "{what}",
            "greedy: mean reward": bold(reward()),
            "all three turns perfect": bold(exact()),
            "sampled: mean reward": bold(reward("sampled")),
            "perfect": bold(exact("sampled")),
            "seeds": seeds,
        },
    ),
    "alphabet_arms": lambda: made(  # GRPO beside what might do as well
        arms("alphabet"),
        {
            "arm": "{what}",
            "seeds": seeds,
            "mean reward, greedy": reward(),
            "sampled": reward("sampled"),
            "GRPO minus this, greedy": gain("grpo", "reward"),
            "work": work,
        },
    ),
    "alphabet_also": lambda: table("sampled | value", alphabet_also().items()),
}


# ------------------------------------------------------------------------------- governance
SHARES = "0% | 12.5% | 25% | 37.5% | 50% | 62.5%"  # of the eight bots
GAINS = {  # (better, worse): what the step from the second to the first is called
    ("soft", "hard"): "soft gate instead of hard",
    ("fast tier", "soft"): "fast tier on top of soft",
    ("fast, p corrected", "fast tier"): "p corrected by audits, on top of the fast tier",
    ("fast + pairs", "fast tier"): "detection of pairs on top of the fast tier",
    ("fast + slow tier", "fast + pairs"): "vote on top of that",
    ("slow every epoch", "fast + slow tier"): "council every epoch instead of on a signal",
}


def governed() -> dict[str, list[dict]]:
    """{governance: [the numbers at each share, a value per seed]}"""
    return {arm["name"]: list(arm["shares"].values()) for arm in arms("governance")}


def governance_gains() -> Iterable[list]:
    """Welfare at the same seeds: the first minus the second."""
    found = governed()
    for (better, worse), text in GAINS.items():
        pairs = zip(found[worse], found[better])
        yield [text, *(metrics.gain(a["welfare"], b["welfare"]).text(2) for a, b in pairs)]


def average(key: str, form: str) -> Cell:
    return lambda cell: format(governance.over(cell[key]).mean, form)


def words(key: str, digits: int = 2) -> Cell:
    return lambda cell: governance.words(cell[key], digits)


def changed(share: str) -> dict[str, Cell]:
    """Two columns: welfare at a share of deceptive bots, and minus that under the rules of before.

    An arm's name is "governance: what is changed".
    """
    welfare = lambda arm: arm["shares"][share]["welfare"]
    before = lambda arm: welfare(arm["others"][arm["name"].split(":")[0] + ": before"])
    gained = lambda arm: metrics.gain(before(arm), welfare(arm)).signed(2)
    at = f"{int(share) / governance.AGENTS:.1%}"
    return {
        f"welfare, {at}": lambda arm: governance.words(welfare(arm)),
        f"minus before, {at}": lambda arm: "" if "before" in arm["name"] else gained(arm),
    }


TABLES |= {
    "governance_changes": lambda: made(
        arms("governance_changes"),
        {"governance: what is changed": "{name}", **changed("3"), **changed("4")},
    ),
    "governance_welfare": lambda: table(  # per possible deal, in truth, of the last ten epochs
        f"welfare, deceptive: | {SHARES}",
        ([name, *map(words("welfare"), cells)] for name, cells in governed().items()),
    ),
    "governance_gains": lambda: table(
        f"welfare gained by, deceptive: | {SHARES}", governance_gains()
    ),
    "governance_at_three": lambda: made(  # all measures at 37.5% deceptive
        [{"name": name} | cells[3] for name, cells in governed().items()],
        {
            "37.5% deceptive": "{name}",
            "toxicity, in truth": words("toxicity"),
            "as p says: soft / hard": lambda cell: " / ".join(
                average(f"toxicity_{gate}", ".2f")(cell) for gate in ("soft", "hard")
            ),
            "worst 5%": average("tail", ".2f"),
            "quality gap, in truth": words("quality_gap", 3),
            "thrash": words("thrash", 3),
            "audits per epoch": average("audits", ".1f"),
            "meetings": average("meetings", ".1f"),
            "collapsed": governance.collapsed,
        },
    ),
}


# ------------------------------------------------------------------------------- swarm
def swarm_also() -> list[list]:
    """What else the page says: differences, then means."""
    return [
        *differences(
            "swarm",
            ("GRPO minus the proposer", "grpo", "proposer", "medium"),
            (
                "GRPO after SFT on the best player, minus that SFT",
                "grpo_tuned",
                "sft_tuned",
                "medium",
            ),
            ("GRPO minus the base", "grpo", "base", "medium"),
            ("on hard scenarios, climbing minus hard all along", "climbs", "hard", "hard"),
        ),
        *(
            [arm["what"], *(reward(how)(arm) for how in WAYS)]
            for arm in stages(
                "swarm",
                climbs="on hard scenarios, climbing",
                hard="on hard scenarios, hard all along",
            )
        ),
    ]


def swarm_worlds() -> Iterable[list]:
    """The three policies, trained on medium scenarios of v0.2, in other worlds."""
    found, trained_there = read("swarm")["arms"], {"hard": "hard", "medium, v0.1": "v01"}
    worlds = [world for world in found["expert"]["seeds"][0]["held_out"] if "scale" not in world]
    played = [(world, how) for world in worlds for how in WAYS]
    chances = dict(zip(played, compare.holm([chance(found, *place) for place in played])))
    for world in worlds:
        there = trained_there.get(world)
        yield [
            world,
            *(reward(how, world)(found["grpo"]) for how in WAYS),
            reward("greedy", world)(found[there]) if there else "",
            reward("scripted", world)(found["expert"]),
            *(difference(found, "grpo", "expert", how, world).signed() for how in WAYS),
            " / ".join(compare.small(chances[world, how]) for how in WAYS),
        ]


def chance(arms: dict, world: str, how: str) -> float:
    """p that GRPO minus the expert is 0, by the same variances as its interval."""
    theirs = scores(arms["expert"], "reward", how, world)[0]
    rows = np.array([ours - theirs for ours in scores(arms["grpo"], "reward", how, world)])
    parts = [compare.variance_of_mean(rows.mean(axis=axis)) for axis in (1, 0)]
    return compare.by_variance(float(rows.mean()), parts, rows.shape[1])[1]


def swarm_published() -> Iterable[list]:
    """Which published findings can be reproduced: sampled, from the base to after GRPO."""
    data = read("swarm")
    for finding in data["findings"]:
        before, after = (
            measured(data["arms"][arm], finding["measure"]) for arm in ("base", "grpo")
        )
        change = less(after, before)
        here = f"{np.mean(before):.3f} → {np.mean(after):.3f}: {change.signed()}"
        yield [finding["what"], finding["published"], here, verdict(change, finding.get("side"))]


def measured(arm: dict, measure: str) -> list:
    """[seeds][tasks] sampled. Published is the share of episodes with an error, not of turns."""
    if measure == "any_error":
        return [(errors > 0).astype(float) for errors in scores(arm, "error_rate", "sampled")]
    return scores(arm, measure, "sampled")


def swarm_both() -> Iterable[list]:
    """v0.1 beside v0.2, at the end of training, and the published numbers beside ours.

    The scenarios of two versions differ, so nothing is paired.
    """
    data = read("swarm")
    for finding in data["versions"]:
        old, new = (
            np.array(measured(data["arms"][arm], finding["measure"])) for arm in ("v01", "grpo")
        )
        row = [finding["what"], *finding["published"], f"{old.mean():.3f}", f"{new.mean():.3f}"]
        if not old.any() and not new.any():
            yield [*row, "", "never seen here"]
            continue
        change = claims.interval({"a": new.mean(axis=1), "b": old.mean(axis=1)})
        yield [*row, change.signed(), verdict(change, finding.get("side"))]
    best = [np.max(measured(data["arms"][arm], "reward")) for arm in ("v01", "grpo")]
    yield ["highest reward of an episode", "1.14", "1.403", *(f"{x:.3f}" for x in best), "", ""]


def verdict(change: metrics.Interval, side: int | None) -> str:
    """side: published to rise (1), to fall (-1), to stay (0), or nothing is said (None)."""
    if side is None:
        return "nothing to compare with"
    moved = int(change.low > 0) - int(change.high < 0)
    if side == 0:
        return "it did change here" if moved else "no change can be told here either"
    verdicts = {0: "cannot be told", side: "**came out**"}
    return verdicts.get(moved, "**came out the other way round**")


def swarm_players() -> Iterable[list]:
    """Scripted players on development scenarios."""
    players = read("swarm")["ranking"]["players"].values()
    n = len(next(iter(players))["reward"])
    for part, what in {
        "reward": f"mean reward (n = {n} each)",
        "reward_published": "on the published scale",
    }.items():
        yield [what, *(f"{np.mean(marks[part]):.3f}" for marks in players)]


PROXY = {  # what the page predicted: (an arm, minus another, in this world, by this measure)
    "quality where p is known: hard gate minus soft": ("hard", "soft", "p known", "quality"),
    "reward where p is known: trained under noise minus trained there": (
        "soft",
        "known",
        "p known",
        "reward",
    ),
    "reward under noise, soft gate: soft minus hard": ("soft", "hard", "noise, soft", "reward"),
    "reward under noise, hard gate: soft minus hard": ("soft", "hard", "noise, hard", "reward"),
}


TABLES |= {
    "swarm": lambda: made(  # base, SFT and GRPO on held-out scenarios
        stages(
            "swarm",
            base="the base, before anything",
            start="after SFT on 100 episodes of the scripted expert",
            grpo="after GRPO",
        ),
        {
            "swarm, medium": "{what}",
            "seeds": seeds,
            "reward, greedy": bold(reward()),
            "reward, sampled": bold(reward("sampled")),
            "published scale": reward("greedy", "medium, published scale"),
            "payoff": mean("payoff", ".2f"),
            "quality": mean("quality", ".2f"),
            "works": mean("used_submit_work", ".1f"),
            "turns passed, of 25": mean("used_pass_turn", ".1f"),
            "errors, %": mean("error_rate", ".1f", "greedy", 100),
            "errors sampled, %": mean("error_rate", ".1f", "sampled", 100),
        },
    ),
    "swarm_arms": lambda: made(  # GRPO beside what might do as well
        arms("swarm", "grpo", "sft_tuned", "grpo_tuned", "no_sft", "more_sft", "no_think", "start"),
        {
            "arm": "{what}",
            "seeds": seeds,
            "greedy": reward(),
            "sampled": reward("sampled"),
            "GRPO minus this, greedy": gain("grpo", "reward"),
            "GRPO minus this, sampled": gain("grpo", "reward", "sampled"),
            "work": work,
        },
    ),
    "swarm_players": lambda: table(
        "scripted player | idle | random | trader | grinder | expert | proposer | tuned",
        swarm_players(),
    ),
    "swarm_worlds": lambda: table(
        "world | GRPO, greedy | sampled | trained there, greedy | expert"
        " | GRPO minus expert, greedy | sampled | p, Holm's of twelve: greedy / sampled",
        swarm_worlds(),
    ),
    "swarm_also": lambda: table("reward | greedy | sampled", swarm_also()),
    "swarm_rules": lambda: table(  # how much the rules matter that the published texts leave open
        "what | adds to the reward",
        (
            [what, metrics.Interval(**found).signed()]
            for what, found in read("swarm")["rules"]["adds"].items()
        ),
    ),
    "swarm_published": lambda: table("finding | published | here | verdict", swarm_published()),
    "swarm_turns": lambda: made(  # taught to stop early, under the published rules
        arms("published", "base", "start", "grpo"),
        {
            "published rules": "{what}",
            "seeds": seeds,
            "turns used, of 25, sampled": lambda arm: (
                over(scores(arm, "turns_used", "sampled")).within(0, 25).text(1)
            ),
            "each seed": each_seed("turns_used", "sampled", ".1f"),
            "episodes that use all 25": lambda arm: percent(
                [(row == 25).astype(float) for row in scores(arm, "turns_used", "sampled")]
            ),
            "reward, sampled": reward("sampled"),
            "GRPO minus this: turns": gain("grpo", "turns_used", "sampled", but=("base",)),
            "in each seed": risen("turns_used", 1),
            "GRPO minus this: reward": gain("grpo", "reward", "sampled", but=("base",)),
            "each seed's": risen("reward"),
        },
    ),
    "swarm_others": lambda: made(  # other models and scripted players, on the same scenarios
        sorted(
            (arm for arm in arms("published") if arm["name"] != "start"),
            key=lambda arm: -np.mean(scores(arm, "reward")),
        ),
        {
            "published rules, greedy": "{what}",
            "seeds": seeds,
            "reward": reward(),
            "minus pico_swarm": lambda arm: (
                ""
                if arm["name"] == "base"
                else difference(arm["others"], arm["name"], "base").signed()
            ),
            "turns used, of 25": mean("turns_used", ".1f"),
            "works submitted": mean("used_submit_work", ".1f"),
            "errors, % of turns": mean("error_rate", ".1f", "greedy", 100),
            "scenarios": lambda arm: len(scores(arm, "reward")[0]),
        },
    ),
    "swarm_both": lambda: table(
        "at the end of training | published, v0.1 | v0.2 | here, v0.1 | v0.2 | v0.2 minus v0.1 | "
        "verdict",
        swarm_both(),
    ),
    "proxy": lambda: made(  # each policy in each economy
        [arm for arm in arms("proxy") if arm["name"] not in ("tuned", "expert")],
        {
            "swarm, medium, sampled": "{what}",
            "seeds": seeds,
            "reward, p known": value("reward", "sampled", "p known"),
            "reward, noise, soft gate": value("reward", "sampled", "noise, soft"),
            "reward, noise, hard gate": value("reward", "sampled", "noise, hard"),
            "quality, p known": value("quality", "sampled", "p known"),
            "works, p known": value("used_submit_work", "sampled", "p known"),
            "trades proposed, p known": value("used_propose_trade", "sampled", "p known"),
        },
    ),
    "proxy_predicted": lambda: table(
        "what was predicted | difference",
        (
            [what, difference(read("proxy")["arms"], a, b, "sampled", world, measure).signed()]
            for what, (a, b, world, measure) in PROXY.items()
        ),
    ),
    "proxy_read": lambda: made(  # how p is read, and what recalibration changes
        (
            {"who": player, "world": world}
            | {
                name: metrics.mean(numbers(values)).text()
                for name, values in marks["scripted"].items()
            }
            for player in ("tuned", "expert")
            for world, marks in read("proxy")["arms"][player]["seeds"][0]["held_out"].items()
        ),
        {
            "scripted player (n = 64 each)": "{who}",
            "economy": "{world}",
            "reward": "{reward}",
            "quality as settled": "{quality}",
            "in truth": "{quality_true}",
            "error of p": "{proxy_error}",
            "variance of a reading": "{proxy_variance}",
            "episodes flagged": "{proxy_flagged}",
        },
    ),
}


# ------------------------------------------------------------------------------- hardware
def hardware(arm: str) -> list[dict]:
    """The rows of an arm of results/hardware.json."""
    return read("hardware")["arms"][arm]["rows"]


def spread(values: list[float]) -> str:
    """A median with the least and the most."""
    return f"{np.median(values):,.1f} [{min(values):,.1f}, {max(values):,.1f}]"


SPEEDS = "model | what, and whose | tokens per second | ours faster, round by round | peak MB"


def speeds(arms: dict) -> Iterator[list]:
    """Of arms of results/speed.json, over the rounds."""
    rates = {a: [r["tokens"] / r["seconds"] for r in arm["rounds"]] for a, arm in arms.items()}
    for name, arm in arms.items():
        model, side, package = name.split(", ")
        beginning = f"{model}, {side.partition('_')[0]}_ours"
        ours = next(rates[other] for other in arms if other.startswith(beginning))
        middle, ends = spread([a / b for a, b in zip(ours, rates[name])]).split(" ", 1)
        peak = max(r["mb"] for r in arm["rounds"])
        who = f"{side.replace('_', ', ')} ({package})"
        held = "" if side.endswith("limit") else f"{peak:,.0f}"
        yield [model, who, spread(rates[name]), f"**{middle}** {ends}", held]


def sampling(row: dict) -> str:
    """GiB at its peak."""
    return f"{max(row['gib']['rollout'], row['gib']['evaluation']):.1f}"


TABLES |= {
    "speed": lambda: table(SPEEDS, speeds(read("speed")["arms"])),
    "cost": lambda: made(  # what a run of each environment costs on a CPU
        hardware("cost"),
        {
            "one run": "`--env {env}`, {model}",
            "machine": "{machine}",
            "updates": "{updates}",
            "minutes": lambda row: f"{row['seconds'] / 60:.1f}",
            "peak GB": "{gb:.1f}",
        },
    ),
    "card": lambda: made(  # what fits on which card
        hardware("card"),
        {
            "model": "{model}",
            "card": "{card}",
            "flags": lambda row: f"`{row['flags']}`" if row["flags"] else "the defaults",
            "sampling": sampling,
            "training": "{gib[update]:.1f}",
        },
    ),
    "card_learn": lambda: made(  # SmolLM2's sums in two number formats
        [arm for arm in arms("card") if "planned" in arm]
        + stages(
            "real",
            grpo="two CPU cores, float32, `--importance clip`",
            grpo_bfloat16="two CPU cores, products in bfloat16, `--importance token`",
            clip_bfloat16="two CPU cores, products in bfloat16, `--importance clip`",
        ),
        {"SmolLM2's sums on an H200": "{what}"}
        | COURSE
        | {
            "each seed": lambda arm: per_seed(of_seeds(arm, "final"), of_seeds(arm, "after_sft")),
            "tokens clipped": lambda arm: (
                f"{np.mean([s['clip_fraction'] for s in arm['seeds']]):.1%}"
            ),
            "sampler and trainer differ by, nats": lambda arm: (
                f"{np.mean([s['mismatch'] for s in arm['seeds']]):.4f}"
            ),
        },
    ),
    "presets": lambda: made(  # memory and time of published runs, on paper
        hardware("presets"),
        {
            "preset": "`--preset {preset}`",
            "tasks × samples": "{num_tasks} × {k}",
            "longest conversation, tokens": "{tokens:,}",
            "sampling, GiB": sampling,
            "training, GiB": "{gib[update]:.1f}",
            "an update, s": "{seconds[0]:,.0f} to {seconds[1]:,.0f}",
            "the run, hours": "{hours[0]:.1f} to {hours[1]:.1f}",
        },
    ),
    "scale_cards": lambda: made(  # one update of a 4B on 1, 8 and 64 cards, on paper
        hardware("scale_cards"),
        {
            "what learns": lambda row: f"LoRA {row['rank']}" if row["rank"] else "all weights",
            "cards": "{cards}",
            "episodes": "{episodes:,}",
            "sampling, s": "{sampling:.1f}",
            "training, s": "{training:.1f}",
            "exchange, s": lambda row: (
                f"{row['exchange of gradients'] + row['exchange of episodes']:.2f}"
            ),
            "the rest, s": lambda row: f"{row['copy of the weights'] + row['environment']:.2f}",
            "an update, s": "{seconds:.1f}",
            "episodes per second": "{episodes_per_second:.1f}",
        },
    ),
}


# ------------------------------------------------------------------------------- trust
def lessons() -> list[dict]:
    """The claims, each with the verdicts of its parts; those that hold entirely come first."""
    rows = [claim | {"parts": claims.parts(name)} for name, claim in claims.CLAIMS.items()]
    return sorted(
        rows, key=lambda r: 0 if r["parts"] == "holds" else 1 if "fail" in r["parts"] else 2
    )


def illnesses() -> Iterable[list]:
    """What the doctor finds in others' logs, why, and what to set first with TRL."""
    logged = {column for names in logs.NAMES.values() for column in names.values()}
    seen = {}
    for name, illness in doctor.ILLNESSES.items():
        if not logged.issuperset(illness["columns"][:1]):
            continue  # only our own runs log its columns
        flags = doctor.cure(name, logs.TRL)
        first = seen.setdefault(flags, name)
        yield [name, illness["causes"][0], flags if first == name else f"as *{first}*"]


def claimed() -> Iterable[list]:
    """Every check of every claim, with its verdict in bold type."""
    for name in claims.CLAIMS:
        for check in claims.checks(name):
            *columns, verdict = claims.row(check)
            yield [name, *columns, verdict and f"**{verdict}**"]


TABLES |= {
    "lessons": lambda: made(
        lessons(),
        {
            "verdict": "**{parts}**",
            "lesson": lambda claim: (
                claim["sentence"] + (" *Under rules of our own.*" if "ours" in claim else "")
            ),
        },
    ),
    "claim_numbers": lambda: table(  # what decides each claim, and what pages cite besides
        "claim | number | predicted | measured | n | verdict", claimed()
    ),
    "trust": lambda: made(  # what was tried, how often it happened, and Wilson's interval of that
        arms("trust"),
        {
            "what was tried": "{what}",
            "how many": "{hits:,} of {n:,}",
            "share": lambda arm: share(arm["hits"], arm["n"]),
        },
    ),
    "doctor": lambda: table("found | most often because | set, with TRL", illnesses()),
}


# ------------------------------------------------------------------------------- pages
def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def remake(text: str) -> str:
    """The page with each of its tables made again."""
    return MARK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def plain(text: str) -> str:
    """The text without bold type and units."""
    return re.sub(r"[*+%]| points", "", text)


def wrong(texts: dict[object, str]) -> list[str]:
    """Intervals in the prose of these pages ({page: text}) that are in no table, a line each."""
    tables = plain("".join(found[0] for text in texts.values() for found in MARK.finditer(text)))
    lines = []
    for page, text in texts.items():
        prose = re.sub(r"```.*?```|`[^`]*`", "", MARK.sub("", text), flags=re.S)
        prose = re.sub(r"\s+", " ", prose)  # an interval may go over the end of a line
        missing = [i for i in INTERVAL.findall(prose) if plain(i) not in tables]
        lines += [f"{page}: {interval} stands in no table" for interval in missing]
    return lines


def main() -> None:
    texts = {page: remake(page.read_text(encoding="utf8")) for page in pages()}
    for page, text in texts.items():
        page.write_text(text, encoding="utf8")
    problems = wrong(texts)
    print("\n".join(problems) or "every table and every interval is that of results/")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
