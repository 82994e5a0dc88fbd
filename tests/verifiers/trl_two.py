"""Run by test_trl.py under `accelerate launch`: trains as `python -m bridges.trl` does,
and writes what TRL was about to train on into OUT-RANK.json."""

import json
import sys

from bridges.trl import make_trainer

out, *words = sys.argv[1:]
behind = words.index("--")
trainer = make_trainer(words[:behind], words[behind + 1 :])
taken, score = [], trainer._generate_and_score_completions


def watch(inputs):
    batch = score(inputs)
    mask = batch["completion_mask"] * batch["tool_mask"]
    for i, task in enumerate(inputs):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
        reply = batch["completion_mask"][i].bool()
        taken.append(
            {
                "seed": int(task["prompt"]),
                "given": prompt,
                "rest": batch["completion_ids"][i][reply].tolist(),
                "mask": mask[i][reply].bool().tolist(),
                "reward": task["earned"],
            }
        )
    return batch


trainer._generate_and_score_completions = watch
before = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
trainer.train()
model = trainer.accelerator.unwrap_model(trainer.model)
weights = [p.detach() for p in model.parameters() if p.requires_grad]
facts = {
    "episodes": taken,
    "moved": float(sum((a - b).abs().sum() for a, b in zip(before, weights))),
    "weights": float(sum(p.double().abs().sum() for p in weights)),
    "processes": trainer.accelerator.num_processes,
}
with open(f"{out}-{trainer.accelerator.process_index}.json", "w") as file:
    json.dump(facts, file)
