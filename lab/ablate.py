"""The claims ledger: every lesson that this project grew out of, tested again with intervals, into results/claims/.

    python -m lab.ablate --list                     # the claims, their arms, and how long they take
    python -m lab.ablate thinking --seeds 3         # the runs of one claim (by name or number), then its page, its picture and the ledger
    python -m lab.ablate --all --seeds 3            # all of them: a night on two cores
    python -m lab.ablate --table                    # every page, picture and the ledger again from what is kept; nothing is trained

A claim is a few lines in lab/claims.py. Its arms are runs of train.py, one process each, side by side where there are cores; finished runs are kept
and not run again, cut ones go on with --resume. Two arms with the same flags are the same run, wherever they stand: it is made and kept once.

The verdict comes from the interval of a difference, never from means alone:

    holds       above (below): all of the 95% interval lies above (below) the number. equal: all of it lies within the margin (as in a test of
                equivalence, Schuirmann 1987: not to find a difference is no evidence that there is none)
    fails       all of the interval lies on the other side; or below the smallest difference that would matter; or, for equal, outside the margin
    undecided   anything else; more seeds make the interval narrower

and a claim of several checks holds if all that decide hold, fails if one of them fails. What varies is in the interval:

    runs        Var = Var_seeds(differences) / S + Var_tasks(difference averaged over seeds) / T, Student's t with Satterthwaite's degrees of freedom
                (1946). Differences are of the same seed; the held-out tasks are the same for all seeds, so their choice is not in the first term.
                What varies within a run is counted in both, which errs to the safe side. Three seeds leave two degrees of freedom: where seeds
                differ, t is 4.3 and not 2, and the interval is wide. That is what three seeds can tell.
    scripts     Student's t over scenarios, or over seeds of a simulation; Welch's where the two arms play other scenarios

No correction is made for the number of checks: of forty that predict what is not so, one holds by luck.
"""

import json
import math
import os
import re
import shutil
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from scipy import stats
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import compare
from lab import arms as lab_arms
from lab.claims import CLAIMS, Check, Claim
from lab.quantities import Run, Script, held
from metrics import Interval
from runfolder import write_json

OUT, RUNS = ROOT / "results" / "claims", Path("runs/claims")  # RUNS relative: configs are committed
VERDICTS = {"holds": "#1b7837", "fails": "#b2182b", "undecided": "#777777", "not run": "#777777", "": "#2166ac"}
# Of an evaluation all that a check looks at; whole ones would be ten times as large.
KEPT = ("update", "stage", "tasks", "trained", "missing", "reward", "exact", "reply_tokens", "payoff", "reputation", "quality", "diversity",
        "error_rate", "used_accept_proposal", "used_propose_trade")  # fmt: skip

# ------------------------------------------------------------------------------------------------ intervals and verdicts


def interval(rows: list | tuple) -> Interval:
    """The mean with its 95% interval. rows: a number a seed; or an array [tasks] a seed, the same tasks for all; or a pair of independent samples.

    n is the number of seeds (or units). One seed has no interval: from minus to plus infinity.
    """
    if isinstance(rows, tuple):
        a, b = (np.asarray(side, float) for side in rows)
        parts = [(side.var(ddof=1) / len(side), len(side) - 1) for side in (a, b)]
        return student(float(a.mean() - b.mean()), parts, min(len(a), len(b)))
    if not rows:
        return Interval(math.nan, -math.inf, math.inf, 0)
    means = np.array([np.mean(row) for row in rows], float)
    if len(means) < 2:
        return Interval(float(means[0]), -math.inf, math.inf, 1)
    parts = [(means.var(ddof=1) / len(means), len(means) - 1)]
    if np.ndim(rows[0]):
        by_task = np.mean(rows, axis=0)
        parts.append((by_task.var(ddof=1) / len(by_task), len(by_task) - 1))
    return student(float(means.mean()), parts, len(means))


def student(mean: float, parts: list[tuple[float, int]], n: int) -> Interval:
    """parts: (variance of the mean, its degrees of freedom), to be added up."""
    var = sum(v for v, _ in parts)
    if var == 0 or not math.isfinite(mean):
        return Interval(mean, mean, mean, n) if math.isfinite(mean) else Interval(mean, -math.inf, math.inf, n)
    df = var**2 / sum(v**2 / d for v, d in parts)
    reach = float(stats.t.ppf(0.975, df)) * math.sqrt(var)
    return Interval(mean, mean - reach, mean + reach, n)


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
    return "holds" if low > 0 else "fails" if high < max(margin, 0.0) else "undecided"


def together(verdicts: list[str]) -> str:
    """Of a claim, from the verdicts of the checks that decide."""
    if not verdicts or set(verdicts) == {"not run"}:
        return "not run"
    return "fails" if "fails" in verdicts else "holds" if set(verdicts) == {"holds"} else "undecided"


def judge(claim: Claim, arms: dict) -> tuple[list[tuple[Check, list | tuple, Interval, str]], str]:
    """Every check with its numbers, interval and verdict; and the verdict of all."""
    found = []
    for check in claim.checks:
        rows = check.value(arms)
        i = interval(rows)
        found.append((check, rows, i, verdict(check.expect, i, check.than, check.margin)))
    return found, together([v for check, _, _, v in found if check.decides])


# ------------------------------------------------------------------------------------------------ runs


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


def run(claim: Claim, arm: str, seed: int, threads: int, launch=lab_arms.launch) -> None:
    """One run of one arm, unless it is kept already; resumed if it was cut. launch: as in lab/arms.py."""
    target = home(claim, arm, seed)
    if (target / "summary.json").exists():
        return
    flags, name = claim.arms[arm].split(), f"{target.parent.name}-{target.name}"
    folder = ROOT / RUNS / name
    if (folder / "config.json").exists() and not agrees(compare.record(folder / "config.json"), claim.arms[arm]):
        shutil.rmtree(folder)  # begun when the claim had other flags
    if not (folder / "summary.json").exists():
        begun = (folder / "config.json").exists()
        if begun and "--async-rollouts" in flags:  # a resumed run ahead is another run: what was under way is sampled anew
            shutil.rmtree(folder)
            begun = False
        launch(["--resume", str(RUNS / name)] if begun else [*flags, "--seed", str(seed)], RUNS, name, target, (), threads)
    keep(folder, target, claim.then)


@cache
def wanted(flags: str) -> dict:
    """What these flags ask for; what train.py fills in later is left out, and so is what makes no other run."""
    import settings  # here, because it brings torch along

    config = vars(tyro.cli(settings.Config, args=flags.split()))
    return {k: v for k, v in config.items() if v is not None and k not in compare.SAME and not k.startswith("api_")}


def agrees(config: dict, flags: str) -> bool:
    """Was a run with this config asked for with these flags? A claim may have changed since."""
    return all(config.get(name, value) == value for name, value in wanted(flags).items())


def keep(folder: Path, target: Path, then=None) -> None:
    """Copy what the pages are made from; summary.json last, because it says that all is there."""
    target.mkdir(parents=True, exist_ok=True)
    if then:
        then(folder, target)
    for name in ("config.json", "metrics.jsonl"):
        if (folder / name).exists():  # more SFT has no updates
            shutil.copy(folder / name, target / name)
    whole = lambda x: int(x) if isinstance(x, float) and x.is_integer() else x
    with open(target / "evals.jsonl", "w") as f:
        for e in (e for e in compare.lines(folder / "evals.jsonl") if e["trained"]):
            slim = {k: [whole(x) for x in v] if isinstance(v, list) else v for k, v in e.items() if k in KEPT}
            f.write(json.dumps(slim, separators=(",", ":")) + "\n")
    write_json(target / "summary.json", compare.record(folder / "summary.json"))


def play_script(claim: Claim, arm: str) -> None:
    """A script's units into one file. Seconds, so it is not resumed, only kept."""
    target, script = OUT / claim.name / arm / "summary.json", claim.arms[arm]
    if target.exists() and json.loads(target.read_text())["n"] == script.n:
        return
    marks = [script.play(i) for i in range(script.n)]
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, {"arm": arm, "n": script.n, "values": {k: [round(m[k], 6) for m in marks] for k in marks[0]}})


def collect(claim: Claim) -> dict:
    """{arm: {seed: Run}}, and {arm: {number: array}} of scripts: what is kept of a claim's arms."""
    found: dict = {}
    for arm, what in claim.arms.items():
        if isinstance(what, Script):
            path = OUT / claim.name / arm / "summary.json"
            if path.exists():
                found[arm] = {k: np.array(v, float) for k, v in json.loads(path.read_text())["values"].items()}
            continue
        some = home(claim, arm, 0)
        stem, runs = some.name.rpartition("-")[0], {}
        for path in some.parent.glob(f"{stem}-*/summary.json"):
            if seed := re.fullmatch(re.escape(stem) + r"-(\d+)", path.parent.name):
                runs[int(seed[1])] = read(path.parent)
                if not agrees(runs[int(seed[1])].summary["config"], what):
                    raise SystemExit(
                        f"{path.parent} was run with other flags than {claim.name}/{arm} has now; remove it, then run the claim again"
                    )
        if runs:
            found[arm] = dict(sorted(runs.items()))
    return found


@cache
def read(folder: Path) -> Run:
    samples = json.loads((folder / "samples.json").read_text())["right"] if (folder / "samples.json").exists() else []
    return Run(
        compare.record(folder / "summary.json"), compare.lines(folder / "metrics.jsonl"), compare.lines(folder / "evals.jsonl"), samples
    )


def flag(flags: str, name: str, default: float) -> float:
    words = flags.split()
    return float(words[words.index(name) + 1]) if name in words else default


def minutes(flags: str) -> float:
    """Of one run on one thread of the machine that the results come from, roughly; from the runs in results/letters and results/swarm."""
    updates, steps = flag(flags, "--updates", 150), flag(flags, "--sft-steps", 50)
    evals = 3 + max(0, math.ceil(updates / flag(flags, "--eval-every", 20)) - 1)
    if "swarm" in flags:
        each, sft, task, load = 2.8 * flag(flags, "--num-tasks", 4) * flag(flags, "--k", 8), 4.7, 1.6 * flag(flags, "--eval-n", 128), 20
    else:
        slow = 0.45 if "--no-think" in flags else 0.6 if "--difficulty 5" in flags else 1.0
        ahead = 1.6 if "--async-rollouts" in flags else 1.0
        each, sft, task, load = 2.0 * slow * ahead, 0.25, 8.0 * slow * flag(flags, "--eval-n", 256) / 256, 20
    return (updates * each + steps * sft + evals * task + load) / 60


def to_do(claims: list[Claim], seeds: int) -> list[tuple[Claim, str, int]]:
    """The runs that are not kept yet, each once; seed by seed, so that a night that ends early has whole seeds."""
    work = {}
    for seed in range(seeds):
        for claim in claims:
            for arm, what in claim.arms.items():
                target = home(claim, arm, seed)
                if isinstance(what, str) and not (target / "summary.json").exists():
                    work.setdefault(target, (claim, arm, seed))
    return list(work.values())


def done_so_far(claim: Claim, arm: str, seed: int) -> float:
    """Share of a run's updates that its log has; its last evaluation is always to come."""
    target = home(claim, arm, seed)
    log = ROOT / RUNS / f"{target.parent.name}-{target.name}" / "metrics.jsonl"
    updates = flag(claim.arms[arm], "--updates", 150)
    return min(0.95, log.read_bytes().count(b"\n") / updates) if log.exists() and updates else 0.0


def run_all(claims: list[Claim], seeds: int, jobs: int, threads: int, launch=lab_arms.launch) -> list[str]:
    """Make what is missing, `jobs` runs at once. Returns a sentence for every run that failed; the others go on."""
    scripts = [(claim, arm) for claim in claims for arm, what in claim.arms.items() if isinstance(what, Script)]
    for claim, arm in tqdm(scripts, desc="scripts", disable=not scripts):
        play_script(claim, arm)
    work, failed = to_do(claims, seeds), []
    cost = [minutes(claim.arms[arm]) for claim, arm, _ in work]
    bar = tqdm(total=round(sum(cost), 1), desc=f"{len(work)} runs, {jobs} at once, about {sum(cost) / jobs:.0f} minutes", disable=not work,
               bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left{postfix}")  # fmt: skip
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run, *job, threads, launch): n for n, job in enumerate(work)}
        pending = set(futures)
        try:
            while pending:
                _, pending = wait(pending, timeout=5, return_when=FIRST_COMPLETED)
                share = [done_so_far(*work[futures[f]]) if f in pending else 1.0 for f in futures]
                bar.n = round(sum(s * c for s, c in zip(share, cost)), 1)
                bar.set_postfix_str(", ".join(f"{work[futures[f]][0].name}/{work[futures[f]][1]}" for f in pending if f.running())[:60])
        except KeyboardInterrupt:
            pool.shutdown(wait=True, cancel_futures=True)
            raise SystemExit("stopped; the same command goes on where it was") from None
    bar.close()
    for future, n in futures.items():
        if error := future.exception():
            if not isinstance(error, RuntimeError):
                raise error
            failed.append(f"{work[n][0].name}: {error}")
    return failed


# ------------------------------------------------------------------------------------------------ pages


def number(x: float, check: Check, plus: bool | None = None) -> str:
    """In the check's unit; with a sign where it is a difference."""
    plus = (" less " in check.text or "gain" in check.text) if plus is None else plus
    digits = 1 if check.scale == 100 or abs(x) >= 10 else 3
    return (
        f"{check.scale * x:{'+' if plus else ''}.{digits}f}" if math.isfinite(x) else "–" if math.isnan(x) else f"{'-' if x < 0 else ''}∞"
    )


def told(i: Interval, check: Check) -> str:
    """'+12.5 points [+3.0, +22.0]'"""
    if i.n == 0:
        return ""
    return f"{number(i.mean, check)}{' ' + check.unit if check.unit else ''} [{number(i.low, check)}, {number(i.high, check)}]"


def predicted(check: Check) -> str:
    if not check.expect:
        return "(measured)"
    if check.expect == "equal":
        return f"equal to {number(check.than, check, False)} within {number(check.margin, check, False)}"
    least = f"; {number(check.margin, check, False)} would matter" if check.margin else ""
    return f"{check.expect} {number(check.than, check, False)}{least}"


def many(rows: list | tuple, claim: Claim) -> str:
    """'3 seeds', or '200 units' of a script."""
    n = min(map(len, rows)) if isinstance(rows, tuple) else len(rows)
    scripted = all(isinstance(what, Script) for what in claim.arms.values()) or n >= 24
    return f"{n} {'units' if scripted else 'seed' if n == 1 else 'seeds'}"


def shown(claim: Claim, arm) -> Interval:
    """What the table and the picture show of an arm."""
    what = claim.shows[0]
    if any(isinstance(x, Run) for x in arm.values()):
        i = interval([held(x, what=what) for x in arm.values()])
        return replace(i, low=max(0.0, i.low), high=min(1.0, i.high)) if what == "exact" else i  # a share lies between 0 and 1
    return interval(list(arm[what])) if what in arm else Interval(math.nan, -math.inf, math.inf, 0)


def page(claim: Claim) -> tuple[list, str]:
    """results/claims/<claim>/README.md and claim.png. Returns what judge says."""
    arms = collect(claim)
    found, verdict_of_all = judge(claim, arms)
    if not arms:
        return found, verdict_of_all
    (OUT / claim.name).mkdir(parents=True, exist_ok=True)
    text = [
        f"# {claim.sentence}", "", f"**{verdict_of_all.capitalize()}.**", "", f"Source: {claim.source}.", "", f"As tested: {claim.reading}", "",
        f"`python -m lab.ablate {claim.name}` runs it, `--table` makes this page again from what is kept. 95% intervals; lab/ablate.py says what is in them.",
        "", "![claim](claim.png)", "", "| | number | predicted | measured | n | the document | verdict |", "|---" * 7 + "|",
    ]  # fmt: skip
    for check, rows, i, v in found:
        figure = "" if check.figure is None else number(check.figure, check)
        text.append(f"| {'decides' if check.decides else ''} | {check.text} | {predicted(check)} | {told(i, check)} | {many(rows, claim)} | {figure} | "
                    f"{f'**{v}**' if v else ''} |")  # fmt: skip
    text += ["", f"| arm | flags of train.py | {claim.shows[1]} | n | minutes a run |", "|---" * 5 + "|"]
    for name, what in claim.arms.items():
        if name not in arms:
            text.append(f"| {name} | {f'`{what}`' if isinstance(what, str) else 'played by scripts'} | not run | | |")
            continue
        i = shown(claim, arms[name])
        cell = f"{i.mean:.3f} [{i.low:.3f}, {i.high:.3f}]" if i.n else ""
        if isinstance(what, Script):
            text.append(f"| {name} | played by scripts ([numbers]({name}/summary.json)) | {cell} | {what.n} units | |")
            continue
        spent = [run_.summary["seconds"]["total"] / 60 for run_ in arms[name].values()]
        c, a = owner(claim, name)
        where = "" if c is claim else f" (runs of [{c.name}](../{c.name}/README.md), {a})"
        text.append(f"| {name}{where} | `{what}` | {cell} | {len(arms[name])} seeds | {np.mean(spent):.1f} |")
    machine = next((run_.summary["machine"] for arm in arms.values() for run_ in arm.values() if isinstance(run_, Run)), None)
    text += (
        ["", f"Trained on {machine['device']} (a run), torch {machine['torch']}, transformers {machine['transformers']}."]
        if machine
        else []
    )
    (OUT / claim.name / "README.md").write_text("\n".join([*text, ""]))
    draw(claim, arms, found, verdict_of_all)
    return found, verdict_of_all


def draw(claim: Claim, arms: dict, found: list, verdict_of_all: str) -> None:
    """Left what the arms did, right every check: interval, seeds, what was predicted, what the document says."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    some = [(check, rows, i, v) for check, rows, i, v in found if i.n]
    trained = [name for name in arms if isinstance(claim.arms[name], str) and any(run_.lines for run_ in arms[name].values())]
    curves = bool(claim.curve and trained)
    fig = plt.figure(figsize=(15, max(6.2, 1.05 * len(some) + 1.2)), layout="constrained")
    fig.suptitle(f"{wrapped(claim.sentence, 130)}\n{verdict_of_all}", color=VERDICTS[verdict_of_all], weight="bold")
    left, right = fig.subfigures(1, 2, width_ratios=(1, 1.15))
    axes = left.subplots(1 + curves, 1, squeeze=False)[:, 0]
    colours = dict(zip(claim.arms, plt.get_cmap("tab20" if len(claim.arms) > 10 else "tab10").colors * 2))
    if curves:
        for name in trained:
            runs = [run_ for run_ in arms[name].values() if run_.lines]
            length = min(len(run_.lines) for run_ in runs)
            window = min(5, length)
            values = [[line.get(claim.curve, np.nan) for line in run_.lines[:length]] for run_ in runs]
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
            ax.plot(
                [held(run_, what=claim.shows[0]).mean() for run_ in arms[name].values()],
                [y + 0.22] * len(arms[name]),
                ".",
                color=colours[name],
                ms=5,
            )
    ax.set_yticks(
        range(len(names)),
        [f"{name}, n={what.n if isinstance(what := claim.arms[name], Script) else len(arms[name])}" for name in names],
        fontsize=8,
    )
    ax.set(title=f"{claim.shows[1]} (95%; dots: seeds)", ylim=(len(names) - 0.4, -0.6))
    ax.grid(alpha=0.25, axis="x")
    for ax, (check, rows, i, v) in zip(np.atleast_1d(right.subplots(max(1, len(some)), 1)), some):
        one_check(ax, claim, check, rows, i, v)
    fig.savefig(OUT / claim.name / "claim.png", dpi=90)
    plt.close(fig)


def one_check(ax, claim: Claim, check: Check, rows, i: Interval, v: str) -> None:
    s = check.scale
    if check.expect == "equal":
        ax.axvspan(s * (check.than - check.margin), s * (check.than + check.margin), color="#dddddd", lw=0)
    ax.axvline(s * check.than, color="black", lw=1)
    if check.figure is not None:
        ax.axvline(s * check.figure, color="#7b3294", ls="--", lw=1.5)
        ax.text(s * check.figure, 0.75, f" document: {number(check.figure, check)}", color="#7b3294", fontsize=7, va="top")
    bar(ax, 0, replace(i, mean=s * i.mean, low=s * i.low, high=s * i.high), VERDICTS[v])
    if isinstance(rows, list) and len(rows) <= 12:
        ax.plot([s * np.mean(row) for row in rows], [-0.45] * len(rows), ".", color=VERDICTS[v], ms=5, alpha=0.7)
    says = f"; {predicted(check)} → {v}" if v else ""
    ax.set_title(f"{check.text}: {told(i, check)}, {many(rows, claim)}{says}", fontsize=8, loc="left", color=VERDICTS[v],
                 weight="bold" if check.decides else None, pad=2)  # fmt: skip
    ax.set(yticks=[], ylim=(-1, 1))
    ax.tick_params(labelsize=7)
    ax.margins(x=0.15)


def bar(ax, y: float, i: Interval, colour) -> None:
    if math.isfinite(i.low):
        ax.plot([i.low, i.high], [y, y], color=colour, lw=2.5, solid_capstyle="butt")
    ax.plot(i.mean, y, "o", color=colour, ms=6)


def wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))


def ledger() -> None:
    """Every page, and results/claims/README.md: one line a claim."""
    lines, counts, checks = [], dict.fromkeys(("holds", "fails", "undecided", "not run"), 0), 0
    for n, claim in enumerate(CLAIMS, 1):
        found, v = page(claim)
        counts[v] += 1
        deciding = [(check, rows, i, w) for check, rows, i, w in found if check.decides]
        checks += sum(w not in ("", "not run") for _, _, _, w in found)
        evidence = "<br>".join(f"{check.text}: {told(i, check)} ({many(rows, claim)}), {w}" for check, rows, i, w in deciding if i.n)
        name = claim.name if v == "not run" else f"[{claim.name}]({claim.name}/README.md)"
        lines.append(f"| {n} | {name} | {claim.sentence} | **{v}** | {evidence} |")
    text = [
        "# The claims ledger", "",
        "Every lesson of the documents that this project grew out of, tested again: " + ", ".join(f"{k} {v}" for k, v in counts.items() if v) + ". "
        "`python -m lab.ablate --table` makes all of this again from the numbers kept here, without training; `--all` makes the numbers. "
        "A claim holds if all that decides it holds, and fails if one part fails: the page of each tells the parts, the arms, and how its words were read. "
        "95% intervals over seeds and held-out tasks; three seeds leave two degrees of freedom, so undecided often means too few seeds. "
        f"No correction for the number of checks ({checks} with a prediction): of forty predictions that are not so, one holds by luck.", "",
        "| | claim | what is tested | verdict | what decides |", "|---|---|---|---|---|", *lines, "",
    ]  # fmt: skip
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "README.md").write_text("\n".join(text))
    print(f"wrote {OUT}/README.md: " + ", ".join(f"{k} {v}" for k, v in counts.items()))


def listing(seeds: int) -> None:
    cores = 2
    for n, claim in enumerate(CLAIMS, 1):
        own_runs = {owner(claim, arm) for arm, what in claim.arms.items() if isinstance(what, str)}
        whole = sum(minutes(c.arms[a]) for c, a in own_runs) * seeds / cores
        rest = sum(minutes(c.arms[a]) for c, a in own_runs if c is claim) * seeds / cores
        note = (
            "scripts, about a minute"
            if not own_runs
            else f"about {whole:.0f} minutes" + (f", {rest:.0f} after the claims above" if rest < whole else "")
        )
        print(f"{n:2} {claim.name:15} {note}; {claim.sentence}\n{'':18} {', '.join(claim.arms)}")
    everything = sum(minutes(claim.arms[arm]) for claim, arm, seed in to_do(list(CLAIMS), seeds)) / cores
    print(f"\n{seeds} seeds on {cores} cores, a run a core; still to do in all: {everything / 60:.1f} hours")


def find(name: str) -> Claim:
    for n, claim in enumerate(CLAIMS, 1):
        if name in (claim.name, str(n)):
            return claim
    raise SystemExit(f"{name}: there is no such claim; choose a number or a name: {', '.join(claim.name for claim in CLAIMS)}")


def main(
    claim: Annotated[str, tyro.conf.Positional] = "", seeds: int = 3, jobs: int = 0, threads: int = 1,
    all: bool = False, table: bool = False, list: bool = False,
) -> None:  # fmt: skip
    """claim: name or number; seeds: 0 to seeds - 1 of every arm; jobs: runs at once, 0: as many as there are cores, at most 8; threads: of a run."""
    if list:
        return listing(seeds)
    if not (claim or all or table):
        raise SystemExit("name a claim, or give --all, --table or --list")
    if seeds < 1 or threads < 1 or jobs < 0:
        raise SystemExit(f"--seeds {seeds} --threads {threads} --jobs {jobs}: seeds and threads must be at least 1, jobs at least 0")
    failed = []
    if not table:
        jobs = jobs or min(8, max(1, (os.cpu_count() or 1) // threads))
        failed = run_all([*CLAIMS] if all else [find(claim)], seeds, jobs, threads)
    ledger()
    if failed:
        raise SystemExit("\n".join([*failed, "the rest is kept; the same command tries these again"]))


if __name__ == "__main__":
    tyro.cli(main)
