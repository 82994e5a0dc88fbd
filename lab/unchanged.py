"""Did a change of form change a number? Tiny runs of two checkouts, compared to the last bit.

    python -m lab.unchanged COMMIT     # plays the same runs at COMMIT and here, and compares them

A test cannot hold this: the last bits differ from one CPU to the next, so there is nothing to
commit that another machine could compare with. Two checkouts on one machine can be compared
exactly: metrics.jsonl and evals.jsonl (without seconds, which are never the same), and the final
weights, byte for byte. Run it before and after every step that moves code and no numbers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL = (
    "--updates 2 --num-tasks 2 --k 4 --eval-n 3 --sft-steps 3 --sft-examples 4 --eval-every 1 "
    "--save-every 1 --no-eval-other-tiers --no-wandb --threads 1"
)
LETTERS = "--env letters --difficulty 3 --reward partial --max-tokens 120"
# name: flags of train.py. Together they pass through every branch of the loop.
RUNS = {
    "letters": LETTERS,
    "alphabet": "--env alphabet --max-tokens 200",
    "swarm": "--env swarm --num-tasks 1 --eval-n 1 --max-tokens 60",
    "kl-epochs": f"{LETTERS} --kl 0.05 --epochs 2",
    "dr_grpo": f"{LETTERS} --loss dr_grpo --seed 1",
    "gspo-batch": f"{LETTERS} --loss gspo --baseline batch --importance token",
    "all-weights": f"{LETTERS} --lora-rank 0 --lr 1e-4",
    "curriculum": f"{LETTERS} --curriculum --updates 6 --eval-every 3",
    "async": f"{LETTERS} --async-rollouts 1 --updates 4",
    "two-ranks": LETTERS,
    "resume": f"{LETTERS} --kl 0.05",
}


def play(checkout: Path, runs: Path, names: list[str]) -> None:
    """Play the runs with the code of a checkout into `runs`."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name in names:
        call = [sys.executable, *(torchrun if name == "two-ranks" else []), "train.py"]
        flags = [*SMALL.split(), *RUNS[name].split(), "--runs", str(runs), "--name", name]
        commands = [[*call, *flags]]
        if name == "resume":
            commands.append([*call, "--resume", str(runs / name), "--updates", "4"])
        for command in commands:
            done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
            if done.returncode:
                said = f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
                raise SystemExit(f"{name} in {checkout} failed:\n{said}")
        print(f"played {name}", flush=True)


def lines(log: Path) -> list[dict]:
    """Without what a clock says."""
    rows = map(json.loads, log.read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]


def differences(a: Path, b: Path) -> list[str]:
    """What two run folders do not have in common; [] if they are equal."""
    out = []
    for log in ("metrics.jsonl", "evals.jsonl"):
        for i, (x, y) in enumerate(zip(lines(a / log), lines(b / log), strict=True)):
            other = [k for k in sorted(x.keys() | y.keys()) if x.get(k) != y.get(k)]
            out += [f"{log} line {i + 1}: {k} was {x.get(k)}, is {y.get(k)}" for k in other]
    for file in sorted((a / "checkpoint").glob("*.safetensors")):
        if file.read_bytes() != (b / "checkpoint" / file.name).read_bytes():
            out.append(f"checkpoint/{file.name}: other weights")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="compare with this, or with a folder that --keep has left")
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--keep", type=Path, help="where to keep the runs of COMMIT")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        before, after = Path(args.commit), Path(place) / "after"
        if not before.is_dir():
            before = args.keep or Path(place) / "before"
            checkout = Path(place) / "checkout"
            clone = ["git", "clone", "--quiet", "--shared", str(ROOT), str(checkout)]
            subprocess.run(clone, check=True)
            subprocess.run(["git", "checkout", "--quiet", args.commit], cwd=checkout, check=True)
            play(checkout, before, args.only)
        play(ROOT, after, args.only)
        found = {name: differences(before / name, after / name) for name in args.only}
    for name, some in found.items():
        told = [f"{len(some)} differences", *some[:8]] if some else ["equal to the last bit"]
        print(f"{name:12}", "\n  ".join(told))
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
