"""Short logs in the formats that bookkeeping/logs.py reads, for its tests and for people who want to see one: results/doctor/samples.

    python -m lab.trust.foreign_samples      # needs requirements/doctor.txt (tensorboard; wandb is in requirements.txt)

Written by the real writer: trainer_state.json (TRL 1.16.0, from results/doctor/trl), run.wandb (wandb 0.31.0, offline),
events.out.tfevents.plain (tensorboard 2.21.0 through torch). Written here, in the format that the framework's source documents, with the
numbers of our own runs of results/failures: verl's console lines (verl/utils/logger/aggregate_logger.py) and JSON lines (FileLogger in
verl/utils/tracking.py), prime-rl's console lines (orchestrator.log_train_batch, trainer/rl/train.py) and metrics.jsonl (monitors/file.py),
TRL's console (transformers prints the dict), Unsloth's trainer_state.json (TRL's columns, kl and completion_length added), wandb's CSV of a
chart. Versions: bookkeeping/names.py.
"""

import csv
import gzip
import json
import shutil
import tempfile
from pathlib import Path

from lab.common import RESULTS, read_lines, write_page
from lab.trust.foreign_truth import OUT, RUNS

SAMPLES = OUT / "samples"
STEPS = 12


def run(name: str) -> list[dict]:
    """The first updates of one of our runs with a mistake, or without."""
    return read_lines(RESULTS / "failures" / name / "metrics.jsonl")[:STEPS]


def trl_rows(line: dict) -> dict:
    return {
        "loss": line.get("loss", 0.0), "grad_norm": line.get("grad_norm", 0.0), "learning_rate": 3e-4,
        "completions/mean_length": line["reply_tokens"],
        "completions/clipped_ratio": line["truncated"], "rewards/exact/mean": line["exact"], "reward": line["reward"],
        "frac_reward_zero_std": 1 - line["groups_with_signal"], "entropy": line.get("entropy", 0.0), "epoch": line["update"] / 100,
    }  # fmt: skip


def verl_row(line: dict) -> dict:
    return {
        "actor/entropy": line.get("entropy", 0.0), "actor/pg_loss": line.get("loss", 0.0), "actor/grad_norm": line.get("grad_norm", 0.0),
        "actor/lr": 3e-4, "actor/ppo_kl": 0.0, "actor/pg_clipfrac": line.get("clip_fraction", 0.0), "critic/score/mean": line["reward"],
        "critic/rewards/mean": line["reward"],
        "critic/advantages/mean": 0.0, "response_length/mean": line["reply_tokens"], "response_length/clip_ratio": line["truncated"],
        "training/rollout_probs_diff_mean": line.get("mismatch", 0.0), "timing_s/step": 1.0,
    }  # fmt: skip


def prime_rows(line: dict) -> list[dict]:
    """The orchestrator's row and two of the trainer's, as its monitor writes them."""
    step = line["update"]
    whole = {"train/agg/effective/policy/reward/mean": line["reward"], "train/agg/all/policy/reward/mean": line["reward"],
             "train/agg/all/policy/solved_some": line["groups_with_signal"],
             "train/agg/all/policy/num_output_tokens/mean": line["reply_tokens"],
             "train/agg/all/policy/is_truncated/mean": line["truncated"], "train/agg/all/has_error/mean": 0.0,
             "off_policy/mean": 0.0}  # fmt: skip
    trained = {
        "loss/mean": line.get("loss", 0.0),
        "entropy/all/mean": line.get("entropy", 0.0),
        "mismatch_kl/all/mean": line.get("mismatch", 0.0),
    }
    rate = {"optim/lr": 3e-4, "optim/grad_norm": line.get("grad_norm", 0.0)}
    return [{"step": step, "time": 1.7e9 + step, **row} for row in (whole, rate, trained)]


def prime_lines(line: dict) -> list[str]:
    step, clock = line["update"], f"12:00:{line['update']:02d}"
    return [
        f"{clock} SUCCESS Step {step} |    1.2s | Reward {line['reward']:.4f} | Trainable 64/64 (100.0%) | Turns 1.0 | Branches 1.0 | "
        f"Max Off-Policy 0 | Error 0.0% | Cancelled 0.0% | Truncation {line['truncated']:.1%}",
        f"{clock} SUCCESS Step {step} |    1.2s | Loss {line.get('loss', 0):.4f} | Entropy {line.get('entropy', 0):.4f} | "
        f"Mismatch KL {line.get('mismatch', 0):.4f} | Grad. Norm {line.get('grad_norm', 0):.4f} | LR 3.00e-04 | Throughput 900 tokens/s",
    ]


def documented() -> None:
    """What we cannot run here, in its own format."""
    for name in ("healthy", "learning-rate", "no-variance"):
        lines = run(name)
        verl = [" - ".join([f"step:{x['update']}", *(f"{k}:{v!r}" for k, v in verl_row(x).items())]) for x in lines]
        write_page(SAMPLES / f"verl-{name}.log", ["(TaskRunner pid=7) \x1b[36mtraining\x1b[0m", *verl, ""])
        write_page(SAMPLES / f"verl-{name}.jsonl", [*(json.dumps({"step": x["update"], "data": verl_row(x)}) for x in lines), ""])
        write_page(SAMPLES / f"prime-{name}.jsonl", [*(json.dumps(row) for x in lines for row in prime_rows(x)), ""])
        write_page(SAMPLES / f"prime-{name}.log", [*(text for x in lines for text in prime_lines(x)), ""])
        write_page(
            SAMPLES / f"trl-{name}.log", [*(f"{8 * x['update']:3d}%|#  | {x['update']}/12 [00:01<00:02]{trl_rows(x)}" for x in lines), ""]
        )
        unsloth = [trl_rows(x) | {"step": x["update"], "kl": 0.0, "completion_length": x["reply_tokens"]} for x in lines]
        write_page(
            SAMPLES / f"unsloth-{name}.json", [json.dumps({"global_step": STEPS, "log_history": unsloth, "max_steps": STEPS}, indent=1), ""]
        )
        with open(SAMPLES / f"wandb-{name}.csv", "w", newline="") as f:
            to = csv.writer(f)
            head = [
                c
                for name_ in ("reward", "grad_norm", "frac_reward_zero_std", "entropy")
                for c in (f"my-run - train/{name_}", f"my-run - train/{name_}__MIN")
            ]
            to.writerow(["Step", *head])
            for x in lines:
                row = trl_rows(x)
                to.writerow(
                    [x["update"], *(v for n in ("reward", "grad_norm", "frac_reward_zero_std", "entropy") for v in (row[n], row[n]))]
                )


def written_by_their_writers() -> None:
    """TRL's own file, and its rows given to wandb and TensorBoard, as its report_to does."""
    import wandb
    from torch.utils.tensorboard import SummaryWriter

    state = gzip.decompress((RUNS / "plain-0.json.gz").read_bytes())
    write_page(SAMPLES / "trl-plain.json", [state.decode()])
    rows = [line for line in json.loads(state)["log_history"] if "reward" in line][:STEPS]
    with tempfile.TemporaryDirectory() as folder:
        quiet = wandb.Settings(mode="offline", silent=True, console="off", x_disable_meta=True, x_disable_stats=True, disable_code=True,
                               disable_git=True, host="host", program="train.py", root_dir=folder, save_code=False)  # fmt: skip
        with wandb.init(project="sample", name="plain", dir=folder, settings=quiet) as writer:
            for row in rows:
                writer.log({f"train/{name}": value for name, value in row.items() if name != "step"} | {"train/global_step": row["step"]})
        wandb.teardown()  # only then the file is whole
        shutil.copy(next(Path(folder).rglob("*.wandb")), SAMPLES / "run.wandb")
    with tempfile.TemporaryDirectory() as folder:
        writer = SummaryWriter(folder)
        for row in rows:
            for name, value in row.items():
                writer.add_scalar(f"train/{name}", value, row["step"])
        writer.close()
        shutil.copy(next(Path(folder).glob("*tfevents*")), SAMPLES / "events.out.tfevents.plain")


if __name__ == "__main__":
    SAMPLES.mkdir(parents=True, exist_ok=True)
    documented()
    written_by_their_writers()
