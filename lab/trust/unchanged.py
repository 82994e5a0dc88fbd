"""Did a change of form change a number? Tiny runs of two checkouts, compared to the last bit.

    python -m lab.trust.unchanged COMMIT        # plays the same runs at COMMIT and here, and compares what they left

A test cannot hold this: the last bits differ from one CPU to the next, so there is nothing to commit that
another machine could compare with. Two checkouts on one machine can be compared exactly: metrics.jsonl and
evals.jsonl (without seconds, which are never the same), and the final weights, byte for byte.

Run it before and after every step that is meant to move code and not numbers.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.common import ROOT, read_lines
from lab.trust.faults import timeless

SMALL = ("--updates 2 --num-tasks 2 --k 4 --eval-n 3 --sft-steps 3 --sft-examples 4 --no-wandb --eval-every 1 --save-every 1 "
         "--no-eval-other-tiers --threads 1")  # fmt: skip
# name: flags of train.py. Together they pass through every branch of the loop.
RUNS = {
    "letters": "--env letters --difficulty 3 --reward partial --max-tokens 120",
    "alphabet": "--env alphabet --max-tokens 200",
    "swarm": "--env swarm --num-tasks 1 --eval-n 1 --max-tokens 60",
    "kl-epochs": "--env letters --difficulty 3 --reward partial --max-tokens 120 --kl 0.05 --epochs 2",
    "dr_grpo": "--env letters --difficulty 3 --reward partial --max-tokens 120 --loss dr_grpo --seed 1",
    "gspo-batch": "--env letters --difficulty 3 --reward partial --max-tokens 120 --loss gspo --baseline batch --importance token",
    "all-weights": "--env letters --difficulty 3 --reward partial --max-tokens 120 --lora-rank 0 --lr 1e-4",
    "curriculum": "--env letters --difficulty 3 --curriculum --max-tokens 120 --updates 6 --eval-every 3 --reward partial",
    "async": "--env letters --difficulty 3 --reward partial --max-tokens 120 --async-rollouts 1 --updates 4",
    "two-ranks": "--env letters --difficulty 3 --reward partial --max-tokens 120",
    "resume": "--env letters --difficulty 3 --reward partial --max-tokens 120 --kl 0.05",
}


def play(checkout: Path, runs: Path, names: list[str]) -> None:
    """Play the runs with the code of a checkout into `runs`."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in names:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        call = [sys.executable, *(torchrun if name == "two-ranks" else []), "train.py"]
        flags = [*SMALL.split(), *RUNS[name].split(), "--runs", str(runs), "--name", name]
        commands = [[*call, *flags]]
        if name == "resume":
            commands.append([*call, "--resume", str(runs / name), "--updates", "4"])
        for command in commands:
            done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name} in {checkout} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        print(f"played {name}", flush=True)


def differences(a: Path, b: Path) -> list[str]:
    """What two run folders do not have in common; [] if they are equal."""
    out = []
    for log in ("metrics.jsonl", "evals.jsonl"):
        for i, (x, y) in enumerate(zip(timeless(read_lines(a / log)), timeless(read_lines(b / log)), strict=True)):
            out += [f"{log} line {i + 1}: {k} was {x.get(k)}, is {y.get(k)}" for k in sorted(x.keys() | y.keys()) if x.get(k) != y.get(k)]
    for file in sorted((a / "checkpoint").glob("*.safetensors")):
        if file.read_bytes() != (b / "checkpoint" / file.name).read_bytes():
            out.append(f"checkpoint/{file.name}: other weights")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="what to compare with, or a folder of runs that --keep has left")
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--keep", type=Path, help="where to keep the runs of COMMIT, to compare with again")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        before, after = Path(args.commit), Path(place) / "after"
        if not before.is_dir():
            before = args.keep or Path(place) / "before"
            checkout = Path(place) / "checkout"
            subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(checkout)], check=True)
            subprocess.run(["git", "checkout", "--quiet", args.commit], cwd=checkout, check=True)
            play(checkout, before, args.only)
        play(ROOT, after, args.only)
        found = {name: differences(before / name, after / name) for name in args.only}
    for name, some in found.items():
        print(f"{name:12}", "equal to the last bit" if not some else "\n  ".join([f"{len(some)} differences", *some[:8]]))
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
