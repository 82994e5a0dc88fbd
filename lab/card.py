"""What can the base do, exactly? Sample it, sort the replies by habit, count. Writes pico_base/README.md.

    python -m lab.card                     # about two minutes on two cores

Per habit: how often (share of sampled replies) and how right (exact answers among them), with Wilson intervals over
replies. Samples of one task are not quite independent, so these intervals are a little too narrow.
"""

import json
import sys
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from env_letters import STYLES, Letters
from metrics import proportion
from policy import PICO, load_policy
from rollout import play
from sampler import TorchSampler

CARD_SEEDS = 2_500_000_000  # neither trained nor evaluated on by train.py


def measure(model: str, tier: int, think: bool, tasks: int, k: int, temperature: float) -> dict:
    """{habit: (share, exact among them)} as lists over tasks, plus the overall exact share."""
    policy = load_policy(model, 0, 64, "cpu")
    make_env = lambda: Letters(tier, "binary", think, "states")
    groups = play(policy, TorchSampler(policy), make_env, [CARD_SEEDS + i for i in range(tasks)], k, 400, temperature, 0)
    out = {"exact": [np.mean([e.components["exact"] for e in g]) for g in groups], "n": tasks * k}
    for habit in STYLES:
        mine = [[e for e in g if e.components[f"habit_{habit}"]] for g in groups]
        out[habit] = {
            "share": sum(map(len, mine)) / out["n"],
            "n": sum(map(len, mine)),
            "right": sum(e.components["exact"] for g in mine for e in g),
            "tokens": float(np.mean([e.reply_tokens for g in mine for e in g] or [0])),
        }
    return out


def main(model: str = str(PICO), tasks: int = 256, k: int = 8) -> None:
    rows = []
    settings = [(3, True, 1.0), (5, True, 1.0), (6, True, 1.0), (6, False, 1.0), (6, True, 0.0), (6, False, 0.0)]
    for tier, think, temperature in tqdm(settings):
        result = measure(model, tier, think, tasks, k if temperature else 1, temperature)
        for habit in STYLES:
            h = result[habit]
            if h["n"]:
                right = proportion(h["right"], h["n"]).percent()
                how = "sampled" if temperature else "greedy"
                rows.append(
                    f"| {tier} | {'yes' if think else 'no'} | {how} | {habit} | {100 * h['share']:.1f}% | {right} | {h['n']} | {h['tokens']:.0f} |"
                )
    table = "\n".join(
        [
            "| tier | may think | decoding | habit | how often | how right (exact) [95%] | n | tokens a reply |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
        ]
    )
    print(table)
    config = json.loads((Path(model) / "config.json").read_text())
    (Path(model) / "README.md").write_text(CARD.format(table=table, vocab=config["vocab_size"], layers=config["num_hidden_layers"],
                                                       width=config["hidden_size"], tasks=tasks, k=k))  # fmt: skip


CARD = """---
license: mit
library_name: transformers
---
# pico_base

A Qwen3-architecture chat model of 0.9M parameters ({layers} layers, width {width}, head_dim 32, {vocab} tokens, tied
embeddings, bfloat16), made from nothing by `python -m lab.pretrain` (seeded, two CPU cores, about 50 minutes). It counts letters, in three habits of
different worth, and is meant as a place for RL to start from: the habit that is right is the one it rarely uses.

{table}

Measured by `python -m lab.card`: {tasks} tasks a row group, {k} samples a task at temperature 1 (one where greedy). `bare` answers at once,
`states` thinks but only states counts, `derives` spells the string with a running tally.

What it cannot do: anything else. It knows the prompts of `env_letters.py` and strings of up to 80 letters; it has seen no
prose, no other task and no multi-turn conversation. Its tokenizer (`lab/tokenizer.py`) splits quoted strings into letters and words of
prose into whole pieces; its chat template is Qwen3's ChatML, thinking and tools included.
"""

if __name__ == "__main__":
    tyro.cli(main)
