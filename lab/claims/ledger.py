"""What the claims ledger says: intervals, verdicts, pages and pictures, from the runs that are kept in results/claims/.

Nothing is trained here; lab/claims/ablate.py makes the runs. The verdict comes from the interval of a difference, never from means alone:

    holds       above (below): all of the 95% interval lies above (below) the number. equal: all of it lies within the margin (as in a test
                of equivalence, Schuirmann 1987: not to find a difference is no evidence that there is none)
    fails       all of the interval lies on the other side; or below the smallest difference that would matter; or, for equal,
                outside the margin
    undecided   anything else; more seeds make the interval narrower

How many seeds a claim gets is a rule, written before they are run: 3; then 6, then 12, while a part that decides is undecided (LOOKS). Who
looks three times may be wrong three times, so a verdict on trained runs asks for the interval at 98.3%: three looks at 1.7% err in 5% of
the cases at most, however they hang together (Bonferroni; lab/claims/rule.py simulates it). Scripts play a number of units that was fixed
before: one look, at 95%. The pages show 95% intervals, as everywhere else, and the wider one beside a verdict that it changes.

A claim of several parts is reported part by part. In one word it holds if all that decide hold, and fails if one of them fails. What varies
is in the interval:

    runs        Var = Var_seeds(differences) / S + Var_tasks(difference averaged over seeds) / T, Student's t with Satterthwaite's degrees
                of freedom (1946). Differences are of the same seed; the development tasks are the same for all seeds, so their choice is
                not in the first term. What varies within a run is counted in both, which errs to the safe side. Three seeds leave two
                degrees of freedom: where seeds differ, t is 4.3 and not 2, and the interval is wide. That is what three seeds can tell.
    scripts     Student's t over scenarios, or over seeds of a simulation; Welch's where the two arms play other scenarios

No correction is made for the number of checks: of forty that predict what is not so, one holds by luck.
"""

import math
import re
import textwrap
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Lock

import numpy as np
import tyro

from bookkeeping import records, significance
from lab.claims.claims import CLAIMS, Check, Claim
from lab.claims.quantities import Run, Script, held
from lab.common import RESULTS, pyplot, read_json, save_picture, table, write_page
from metrics import Interval

OUT = RESULTS / "claims"
LOOKS = (3, 6, 12)  # seeds
LEVEL = 1 - 0.05 / len(LOOKS)
VERDICTS = {"holds": "#1b7837", "fails": "#b2182b", "undecided": "#777777", "not run": "#777777", "": "#2166ac"}


# ------------------------------------------------------------------------------------------------ intervals and verdicts
def interval(rows: list | tuple, level: float = 0.95, most: float = 1.0) -> Interval:
    """The mean with its interval, at 95% or another level. rows: a number a seed; or an array [tasks] a seed, the same tasks for all; or a
    pair of independent samples. n is the number of seeds (or units). One seed has no interval: from minus to plus infinity. most: how large
    a number can be, either way, if all that were seen agree."""
    part = significance.variance_of_mean
    if isinstance(rows, tuple):
        a, b = (np.asarray(side, float) for side in rows)
        return student(float(a.mean() - b.mean()), [part(a), part(b)], min(len(a), len(b)), level, most)
    if not rows:
        return Interval(math.nan, -math.inf, math.inf, 0)
    means = np.array([np.mean(row) for row in rows], float)
    if len(means) < 2:
        return Interval(float(means[0]), -math.inf, math.inf, 1)
    over_tasks, n = ([part(np.mean(rows, axis=0))], len(rows[0])) if np.ndim(rows[0]) else ([], len(means))
    # n: if all seeds agree in all tasks, it is the tasks that say how sure that is.
    return replace(student(float(means.mean()), [part(means), *over_tasks], n, level, most), n=len(means))


def student(mean: float, parts: list[tuple[float, int]], n: int, level: float, most: float = 1.0) -> Interval:
    """Student's interval (significance.by_variance); a mean that is not a finite number has none."""
    if not math.isfinite(mean):
        return Interval(mean, -math.inf, math.inf, n)
    return significance.by_variance(mean, parts, n, (-most, most), level)[0]


def verdict(expect: str, i: Interval, than: float = 0.0, margin: float = 0.0) -> str:
    """holds, fails or undecided; "not run" without a number, "" if nothing is predicted."""
    if i.n == 0:
        return "not run"
    if expect == "":
        return ""
    low, high = i.low - than, i.high - than
    if expect == "equal":
        return "holds" if -margin < low and high < margin else "fails" if low > margin or high < -margin else "undecided"
    if expect == "below":
        low, high = -high, -low
    return "fails" if high < max(margin, 0.0) else "holds" if low > 0 else "undecided"


def together(verdicts: list[str]) -> str:
    """The verdict of a claim, from those of the checks that decide."""
    if not verdicts or set(verdicts) == {"not run"}:
        return "not run"
    return "fails" if "fails" in verdicts else "holds" if set(verdicts) == {"holds"} else "undecided"


def in_parts(verdicts: list[str]) -> str:
    """'2 hold, 1 fails' of a claim of several parts; of one part its verdict."""
    if len(set(verdicts)) < 2:
        return together(verdicts)
    plural = {"holds": "hold", "fails": "fail"}
    counts = [(verdicts.count(v), v) for v in VERDICTS if v in verdicts]
    return ", ".join(f"{n} {v if n == 1 else plural.get(v, v)}" for n, v in counts)


def judge(claim: Claim, arms: dict) -> tuple[list[tuple[Check, list | tuple, Interval, str]], str]:
    """Every check with its numbers, its 95% interval and its verdict; and the verdict of all."""
    found = []
    for check in claim.checks:
        rows = check.value(arms)
        judged = verdict(check.expect, judged_by(rows, check.most), check.than, check.margin)
        shown = interval(rows, most=check.most)
        found.append((check, rows, as_share(shown) if check.share else shown, judged))
    return found, together([v for check, _, _, v in found if check.decides])


def judged_by(rows: list | tuple, most: float = 1.0) -> Interval:
    """The interval that gives the verdict: wider for seeds, of which more may follow (LOOKS)."""
    return interval(rows, 0.95 if of_units(rows) else LEVEL, most)


def of_units(rows: list | tuple) -> bool:
    """Are these units of a script? They are dozens; seeds are LOOKS[-1] at most."""
    return isinstance(rows, tuple) or len(rows) > LOOKS[-1]


def goes_on(found: list) -> int:
    """How many seeds the rule asks for next; 0: none."""
    open_parts = [len(rows) for check, rows, _, v in found if check.decides and v == "undecided" and not of_units(rows)]
    return next((look for look in LOOKS if open_parts and look > min(open_parts)), 0)


# ------------------------------------------------------------------------------------------------ what is kept
def owner(claim: Claim, arm: str) -> tuple[Claim, str]:
    """The first claim and arm with these flags: there the runs are kept. What is done after a run makes it another one."""
    mine = claim.arms[arm]
    same = lambda c, a: (c, a) == (claim, arm) or (isinstance(mine, str) and isinstance(c.arms[a], str) and c.then is claim.then
                                                   and c.arms[a].split() == mine.split())  # fmt: skip
    return next((c, a) for c in (*CLAIMS, claim) for a in c.arms if same(c, a))


def home(claim: Claim, arm: str, seed: int) -> Path:
    """Where a run is kept."""
    c, a = owner(claim, arm)
    return OUT / c.name / f"{a}-{seed}"


# tyro fills a cache while it reads flags and empties it when it is done: two threads at once trip over each other (seen once,
# as a KeyError).
PARSING = Lock()


@cache
def asked(flags: str, whole: bool = False):
    """The Config of these flags; whole: with what train.py fills in for pico_base."""
    import settings  # here, because it brings torch along

    with PARSING:
        cfg = tyro.cli(settings.Config, args=flags.split())
    if whole:
        settings.fill(cfg, settings.by_env(cfg.env) | settings.by_size(0, cfg.env))
    return cfg


def wanted(flags: str) -> dict:
    """What these flags ask for; what train.py fills in or chooses later is left out, and so is what makes no other run."""
    left = lambda name, value: value in (None, "auto") or name in significance.SAME or name.startswith("api_")
    return {k: v for k, v in vars(asked(flags)).items() if not left(k, v)}


def agrees(config: dict, flags: str) -> bool:
    """Was a run with this config asked for with these flags? A claim may have changed since."""
    return all(config.get(name, value) == value for name, value in wanted(flags).items())


def collect(claim: Claim) -> dict:
    """{arm: {seed: Run}}, and {arm: {number: array}} of scripts: what is kept of a claim's arms."""
    found: dict = {}
    for arm, what in claim.arms.items():
        if isinstance(what, Script):
            path = OUT / claim.name / arm / "summary.json"
            if path.exists():
                found[arm] = {k: np.array(v, float) for k, v in read_json(path)["values"].items()}
            continue
        some = home(claim, arm, 0)
        stem, runs = some.name.rpartition("-")[0], {}
        for path in some.parent.glob(f"{stem}-*/summary.json"):
            if seed := re.fullmatch(re.escape(stem) + r"-(\d+)", path.parent.name):
                runs[int(seed[1])] = read(path.parent)
                if not agrees(runs[int(seed[1])].summary["config"], what):
                    other = f"{path.parent} was run with other flags than {claim.name}/{arm} has now"
                    raise SystemExit(f"{other}; remove it, then run the claim again")
        if runs:
            found[arm] = dict(sorted(runs.items()))
    return found


@cache
def read(folder: Path) -> Run:
    samples = read_json(folder / "samples.json")["right"] if (folder / "samples.json").exists() else []
    lines, evals = (records.lines(folder / name) for name in ("metrics.jsonl", "evals.jsonl"))
    return Run(records.record(folder / "summary.json"), lines, evals, samples)


# ------------------------------------------------------------------------------------------------ pages
def digits(x: float, check: Check) -> int:
    return 1 if check.scale == 100 or abs(x) >= 10 else 3


def sign(check: Check) -> str:
    """A difference is written with its sign."""
    return "+" if " minus " in check.text or "gain" in check.text else ""


def number(x: float, check: Check, sign: str = "") -> str:
    return f"{check.scale * x:{sign}.{digits(x, check)}f}"


def in_words(i: Interval, check: Check) -> str:
    """'+12.5 points [+3.0, +22.0]'"""
    unit = f" {check.unit}" if check.unit else ""
    text = i.text(digits(i.mean, check), check.scale, unit, sign(check)) if i.n else ""
    return text.replace("inf", "∞")


def predicted(check: Check) -> str:
    if not check.expect:
        return "(measured)"
    if check.expect == "equal":
        return f"equal to {number(check.than, check)} within {number(check.margin, check)}"
    least = f"; {number(check.margin, check)} would matter" if check.margin else ""
    return f"{check.expect} {number(check.than, check)}{least}"


def many(rows: list | tuple) -> str:
    """'3 seeds', or '200 units' of a script."""
    n = min(map(len, rows)) if isinstance(rows, tuple) else len(rows)
    return f"{n} {'units' if of_units(rows) else 'seed' if n == 1 else 'seeds'}"


def told(check: Check, rows: list | tuple, v: str) -> str:
    """A verdict; with the interval that gave it, if the one at 95% would have given another."""
    if not v or v == verdict(check.expect, interval(rows, most=check.most), check.than, check.margin):
        return f"**{v}**" if v else ""
    wide = judged_by(rows, check.most)
    return f"**{v}** (at {100 * LEVEL:.1f}%: [{number(wide.low, check, sign(check))}, {number(wide.high, check, sign(check))}])"


def as_share(i: Interval) -> Interval:
    """Cut to between 0 and 1."""
    return replace(i, low=max(0.0, i.low), high=min(1.0, i.high))


def shown(claim: Claim, arm) -> Interval:
    """What the table and the picture show of an arm."""
    what = claim.shows[0]
    if any(isinstance(x, Run) for x in arm.values()):
        i = interval([held(x, what=what) for x in arm.values()])
        return as_share(i) if what == "exact" else i
    return interval(list(arm[what])) if what in arm else Interval(math.nan, -math.inf, math.inf, 0)


def page(claim: Claim) -> tuple[list, str]:
    """results/claims/<claim>/README.md and claim.png. Returns what judge says."""
    arms = collect(claim)
    found, verdict_of_all = judge(claim, arms)
    if not arms:
        return found, verdict_of_all
    parts, more = in_parts([v for check, _, _, v in found if check.decides]), goes_on(found)
    seeds = f" By the rule for seeds (lab/claims/ledger.py) it goes on to {more}, which have not been run." if more else ""
    text = [
        f"# {claim.sentence}", "", f"**{parts.capitalize()}.**{seeds}", "", f"Source: {claim.source}.", "", f"As tested: {claim.reading}",
        "",
        *([f"**The rules are ours.** {claim.ours}", ""] if claim.ours else []),
        f"`python -m lab.claims.ablate {claim.name}` runs it, `--table` makes this page again from what is kept. 95% intervals; "
        "lab/claims/ledger.py says what is in them.",
        "", "![claim](claim.png)", "",
    ]  # fmt: skip
    text += table("| | number | predicted | measured | n | the document | verdict |", [
        ["decides" if check.decides else "", check.text, predicted(check), in_words(i, check), many(rows),
         "" if check.figure is None else number(check.figure, check, sign(check)), told(check, rows, v)]
        for check, rows, i, v in found])  # fmt: skip
    text += ["", *table(f"| arm | flags of train.py | {claim.shows[1]} | n | minutes a run, beside other work |", [])]
    for name, what in claim.arms.items():
        if name not in arms:
            text.append(f"| {name} | {f'`{what}`' if isinstance(what, str) else 'played by scripts'} | not run | | |")
            continue
        i = shown(claim, arms[name])
        cell = i.text() if i.n else ""
        if isinstance(what, Script):
            text.append(f"| {name} | played by scripts ([numbers]({name}/summary.json)) | {cell} | {what.n} units | |")
            continue
        spent = [r.summary["seconds"]["total"] / 60 for r in arms[name].values()]
        c, a = owner(claim, name)
        where = "" if c is claim else f" (runs of [{c.name}](../{c.name}/README.md), {a})"
        text.append(f"| {name}{where} | `{what}` | {cell} | {len(arms[name])} seeds | {np.mean(spent):.1f} |")
    machine = next((r.summary["machine"] for arm in arms.values() for r in arm.values() if isinstance(r, Run)), None)
    if machine:
        text += ["", f"Trained on {machine['device']} (a run), torch {machine['torch']}, transformers {machine['transformers']}."]
    write_page(OUT / claim.name / "README.md", [*text, ""])
    draw(claim, arms, found, verdict_of_all)
    return found, verdict_of_all


def draw(claim: Claim, arms: dict, found: list, verdict_of_all: str) -> None:
    """Left what the arms did, right every check: interval, seeds, what was predicted, what the document says."""
    plt = pyplot()
    some = [(check, rows, i, v) for check, rows, i, v in found if i.n]
    trained = [name for name in arms if isinstance(claim.arms[name], str) and any(r.lines for r in arms[name].values())]
    curves = bool(claim.curve and trained)
    fig = plt.figure(figsize=(15, max(6.2, 1.05 * len(some) + 1.2)), layout="constrained")
    fig.suptitle(f"{textwrap.fill(claim.sentence, 130)}\n{verdict_of_all}", color=VERDICTS[verdict_of_all], weight="bold")
    left, right = fig.subfigures(1, 2, width_ratios=(1, 1.15))
    axes = left.subplots(1 + curves, 1, squeeze=False)[:, 0]
    colours = dict(zip(claim.arms, plt.get_cmap("tab20" if len(claim.arms) > 10 else "tab10").colors * 2))
    if curves:
        for name in trained:
            runs = [r for r in arms[name].values() if r.lines]
            length = min(len(r.lines) for r in runs)
            window = min(5, length)
            values = [[line.get(claim.curve, np.nan) for line in r.lines[:length]] for r in runs]
            smooth = np.array([np.convolve(some, np.ones(window) / window, "valid") for some in values])
            x = np.arange(window, length + 1) - (window - 1) / 2
            axes[0].plot(x, smooth.mean(axis=0), color=colours[name], lw=1.6)
            axes[0].fill_between(x, smooth.min(axis=0), smooth.max(axis=0), color=colours[name], alpha=0.13, lw=0)
        axes[0].set(title="sampled replies, mean of 5 updates (bands: all seeds)", xlabel="update", ylabel=claim.curve)
        axes[0].grid(alpha=0.25)
    ax, names = axes[-1], [name for name in arms if shown(claim, arms[name]).n]
    for y, name in enumerate(names):
        i, what = shown(claim, arms[name]), claim.arms[name]
        bar(ax, y, i, colours[name])
        if isinstance(what, str):
            dots = [held(r, what=claim.shows[0]).mean() for r in arms[name].values()]
            ax.plot(dots, [y + 0.22] * len(dots), ".", color=colours[name], ms=5)
    size = lambda name: claim.arms[name].n if isinstance(claim.arms[name], Script) else len(arms[name])
    ax.set_yticks(range(len(names)), [f"{name}, n={size(name)}" for name in names], fontsize=8)
    ax.set(title=f"{claim.shows[1]} (95%; dots: seeds)", ylim=(len(names) - 0.4, -0.6))
    ax.grid(alpha=0.25, axis="x")
    for ax, (check, rows, i, v) in zip(np.atleast_1d(right.subplots(max(1, len(some)), 1)), some):
        one_check(ax, check, rows, i, v)
    save_picture(fig, OUT / claim.name / "claim.png", 90)


def one_check(ax, check: Check, rows, i: Interval, v: str) -> None:
    s = check.scale
    if check.expect == "equal":
        ax.axvspan(s * (check.than - check.margin), s * (check.than + check.margin), color="#dddddd", lw=0)
    ax.axvline(s * check.than, color="black", lw=1)
    if check.figure is not None:
        ax.axvline(s * check.figure, color="#7b3294", ls="--", lw=1.5)
        ax.text(s * check.figure, 0.75, f" document: {number(check.figure, check, sign(check))}", color="#7b3294", fontsize=7, va="top")
    bar(ax, 0, replace(i, mean=s * i.mean, low=s * i.low, high=s * i.high), VERDICTS[v])
    if isinstance(rows, list) and len(rows) <= 12:
        ax.plot([s * np.mean(row) for row in rows], [-0.45] * len(rows), ".", color=VERDICTS[v], ms=5, alpha=0.7)
    says = f"; {predicted(check)} → {v}" if v else ""
    ax.set_title(f"{check.text}: {in_words(i, check)}, {many(rows)}{says}", fontsize=8, loc="left", color=VERDICTS[v],
                 weight="bold" if check.decides else None, pad=2)  # fmt: skip
    ax.set(yticks=[], ylim=(-1, 1))
    ax.tick_params(labelsize=7)
    ax.margins(x=0.15)


def bar(ax, y: float, i: Interval, colour) -> None:
    if math.isfinite(i.low):
        ax.plot([i.low, i.high], [y, y], color=colour, lw=2.5, solid_capstyle="butt")
    ax.plot(i.mean, y, "o", color=colour, ms=6)


def write() -> None:
    """Every page, and results/claims/README.md: one line a claim."""
    lines, counts, checks, on = [], dict.fromkeys(("holds", "fails", "undecided", "not run"), 0), 0, []
    for n, claim in enumerate(CLAIMS, 1):
        found, v = page(claim)
        deciding = [(check, rows, i, w) for check, rows, i, w in found if check.decides]
        for *_, w in deciding:
            counts[w] += 1
        checks += sum(w not in ("", "not run") for _, _, _, w in found)
        evidence = "<br>".join(
            f"{check.text}: {in_words(i, check)} ({many(rows)}), {told(check, rows, w)}" for check, rows, i, w in deciding if i.n
        )
        name = claim.name if v == "not run" else f"[{claim.name}]({claim.name}/README.md)"
        on += [f"{claim.name} ({goes_on(found)})"] if goes_on(found) else []
        rules = " *(under rules of our own)*" if claim.ours else ""
        lines.append([n, name, claim.sentence + rules, f"**{in_parts([w for *_, w in deciding])}**", evidence])
    text = [
        "# The claims ledger", "",
        f"Every lesson of the documents that this project grew out of, tested again: {len(CLAIMS)} claims, whose {sum(counts.values())} "
        "parts are judged one by one: "
        + ", ".join(f"{k} {v}" for k, v in counts.items() if v) + ". "
        "`python -m lab.claims.ablate --table` makes all of this again from the numbers kept here, without training; `--all` makes the "
        "numbers. The page of each claim tells its parts, its arms, and how its words were read. "
        "95% intervals over seeds and development tasks; a verdict on trained runs asks more, 98.3%, because a claim may be looked at "
        "three times: with 3 seeds, and with 6 and 12 while a part is undecided ([the rule, simulated](rule.md)). It was written after "
        "most runs: thinking and baselines had got three more seeds after a look, and single_steps and too_short share their runs; "
        "invention, partial_credit, curriculum, swarm_weights and baselines went on by it. By the "
        f"rule these go on, which has not been done: {', '.join(on) or 'none'}. No correction for the number of checks ({checks} with a "
        "prediction): of forty predictions that are not so, one holds by luck.", "",
        *table("| | claim | what is tested | verdict | what decides |", lines), "",
    ]  # fmt: skip
    write_page(OUT / "README.md", text)
    print(f"wrote {OUT}/README.md: " + ", ".join(f"{k} {v}" for k, v in counts.items()))
