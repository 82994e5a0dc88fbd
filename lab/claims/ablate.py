"""The claims ledger: every lesson that this project grew out of, tested again with intervals, into results/claims/.

    python -m lab.claims.ablate --list                # the claims, their arms, and how long they take
    python -m lab.claims.ablate thinking              # the runs of one claim (by name or number), then its page, its picture and the ledger
    python -m lab.claims.ablate --all                 # all of them: a night on two cores
    python -m lab.claims.ablate --table               # every page, picture and the ledger again from what is kept; nothing is trained

A claim is a few lines in lab/claims/claims.py; lab/claims/ledger.py judges it. Its arms are runs of train.py, one process each; finished
runs are kept and not run again, cut ones go on with --resume. How many seeds a claim gets is a rule (ledger.LOOKS): 3, and 6 and 12 while a
part of it is undecided; --seeds says otherwise. Two arms with the same flags are the same run, wherever they stand: it is made once.
"""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import tyro
from tqdm import tqdm

from bookkeeping import forecast, records
from lab import common
from lab.claims import ledger
from lab.claims.claims import CLAIMS, Claim
from lab.claims.ledger import LOOKS, agrees, asked, collect, goes_on, home, judge, owner
from lab.claims.quantities import Script
from lab.common import ROOT, read_json

RUNS = Path("runs/claims")  # relative: configs are committed
# Of an evaluation all that a check looks at; whole ones would be ten times as large.
KEPT = ("update", "stage", "tasks", "trained", "missing", "reward", "exact", "reply_tokens", "payoff", "reputation", "quality", "diversity",
        "error_rate", "used_accept_proposal", "used_propose_trade")  # fmt: skip


def run(claim: Claim, arm: str, seed: int, threads: int, launch=common.launch) -> None:
    """One run of one arm, unless it is kept already; resumed if it was cut. launch: as in lab/common.py."""
    target = home(claim, arm, seed)
    if (target / "summary.json").exists():
        return
    flags, name = claim.arms[arm].split(), f"{target.parent.name}-{target.name}"
    folder = ROOT / RUNS / name
    if (folder / "config.json").exists() and not agrees(records.record(folder / "config.json"), claim.arms[arm]):
        shutil.rmtree(folder)  # begun when the claim had other flags
    if not (folder / "summary.json").exists():
        begun = (folder / "config.json").exists()
        if begun and "--async-rollouts" in flags:  # a resumed run ahead is another run: what was under way is sampled anew
            shutil.rmtree(folder)
            begun = False
        launch(["--resume", str(RUNS / name)] if begun else [*flags, "--seed", str(seed)], RUNS, name, target, (), threads)
    keep(folder, target, claim.then)


def keep(folder: Path, target: Path, then=None) -> None:
    """Copy what the pages are made from; summary.json last, because it says that all is there."""
    target.mkdir(parents=True, exist_ok=True)
    if then:
        then(folder, target)
    shutil.copy(folder / "config.json", target)
    whole = lambda x: int(x) if isinstance(x, float) and x.is_integer() else x
    if (folder / "metrics.jsonl").exists():  # more SFT has no updates
        common.keep_metrics(folder, target)
    with open(target / "evals.jsonl", "w") as f:
        for e in (e for e in records.lines(folder / "evals.jsonl") if e["trained"]):
            slim = {k: [whole(x) for x in v] if isinstance(v, list) else v for k, v in e.items() if k in KEPT}
            f.write(json.dumps(slim, separators=(",", ":")) + "\n")
    records.write_json(target / "summary.json", records.record(folder / "summary.json"))


def play_script(claim: Claim, arm: str) -> None:
    """A script's units into one file. Seconds, so it is not resumed, only kept."""
    target, script = ledger.OUT / claim.name / arm / "summary.json", claim.arms[arm]
    if target.exists() and read_json(target)["n"] == script.n:
        return
    marks = [script.play(i) for i in range(script.n)]
    target.parent.mkdir(parents=True, exist_ok=True)
    records.write_json(target, {"arm": arm, "n": script.n, "values": {k: [round(m[k], 6) for m in marks] for k in marks[0]}})


def minutes(flags: str) -> float:
    """Of one run on one thread of the machine that the results come from, roughly; from the runs in results/letters and results/swarm."""
    cfg = asked(flags, whole=True)
    if cfg.env == "swarm":
        each, sft, task = 0.3 * cfg.num_tasks * cfg.k, 0.3, 0.17
    else:
        slow = 1.0 if cfg.think and cfg.difficulty == 6 else 0.6 if cfg.think else 0.45
        each, sft, task = (3.2 if cfg.async_rollouts else 2.0) * slow, 0.25, 0.02 * slow
    return (cfg.updates * each + cfg.sft_steps * sft + forecast.number_of_evaluations(cfg) * cfg.eval_n * task + 20) / 60


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


def run_all(claims: list[Claim], seeds: int, jobs: int, threads: int, launch=common.launch) -> list[str]:
    """Make what is missing, `jobs` runs at once. Returns a sentence for every run that failed; the others go on."""
    scripts = [(claim, arm) for claim in claims for arm, what in claim.arms.items() if isinstance(what, Script)]
    for claim, arm in tqdm(scripts, desc="scripts", disable=not scripts):
        play_script(claim, arm)
    work, failed = to_do(claims, seeds), []
    about = sum(minutes(claim.arms[arm]) for claim, arm, _ in work) / jobs
    bar = tqdm(total=len(work), desc=f"{len(work)} runs, {jobs} at once, about {about:.0f} minutes", disable=not work)
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run, *job, threads, launch): job for job in work}
        try:
            for future in as_completed(futures):
                bar.update()
                try:
                    future.result()
                except RuntimeError as error:
                    failed.append(f"{futures[future][0].name}: {error}")
        except KeyboardInterrupt:
            pool.shutdown(wait=True, cancel_futures=True)
            raise SystemExit("stopped; the same command goes on where it was") from None
    bar.close()
    return failed


def listing(seeds: int) -> None:
    cores = 2
    for n, claim in enumerate(CLAIMS, 1):
        own_runs = {owner(claim, arm) for arm, what in claim.arms.items() if isinstance(what, str)}
        whole = sum(minutes(c.arms[a]) for c, a in own_runs) * seeds / cores
        rest = sum(minutes(c.arms[a]) for c, a in own_runs if c is claim) * seeds / cores
        note = f"about {whole:.0f} minutes" + (f", {rest:.0f} after the claims above" if rest < whole else "")
        note = note if own_runs else "scripts, about a minute"
        print(f"{n:2} {claim.name:15} {note}; {claim.sentence}\n{'':18} {', '.join(claim.arms)}")
    everything = sum(minutes(claim.arms[arm]) for claim, arm, seed in to_do(list(CLAIMS), seeds)) / cores
    print(f"\n{seeds} seeds on {cores} cores, a run a core; still to do in all: {everything / 60:.1f} hours")


def find(name: str) -> Claim:
    for n, claim in enumerate(CLAIMS, 1):
        if name in (claim.name, str(n)):
            return claim
    raise SystemExit(f"{name}: there is no such claim; choose a number or a name: {', '.join(claim.name for claim in CLAIMS)}")


def main(
    claim: tyro.conf.Positional[str] = "", seeds: int = 0, jobs: int = 0, threads: int = 1, all: bool = False, table: bool = False,
    list: bool = False,
) -> None:  # fmt: skip
    """claim: name or number; seeds: 0 to seeds - 1 of every arm, 0: by the rule;
    jobs: runs at once, 0: as many as there are cores, at most 8; threads: of a run."""
    if list:
        return listing(seeds or LOOKS[0])
    if not (claim or all or table):
        raise SystemExit("name a claim, or give --all, --table or --list")
    if seeds > LOOKS[-1]:
        raise SystemExit(f"--seeds {seeds}: the rule has at most {LOOKS[-1]}; use as many or fewer")
    if seeds < 0 or threads < 1 or jobs < 0:
        raise SystemExit(f"--seeds {seeds} --threads {threads} --jobs {jobs}: threads must be at least 1, seeds and jobs at least 0")
    failed = []
    if not table:
        jobs = jobs or min(8, max(1, (os.cpu_count() or 1) // threads))
        claims = [*CLAIMS] if all else [find(claim)]
        for look in (seeds,) if seeds else LOOKS:
            failed += run_all(claims, look, jobs, threads)
            claims = [c for c in claims if goes_on(judge(c, collect(c))[0])]
    ledger.write()
    if failed:
        raise SystemExit("\n".join([*failed, "the rest is kept; the same command tries these again"]))


if __name__ == "__main__":
    tyro.cli(main)
