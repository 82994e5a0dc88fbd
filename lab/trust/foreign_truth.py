"""Ground truth for bookkeeping/foreign: TRL's real GRPOTrainer, with mistakes made on purpose and without.

    python -m lab.trust.foreign_truth              # make the runs that are missing, one after another (needs requirements/doctor.txt)
    python -m lab.trust.foreign_truth --only dropout --seeds 0
    python -m lab.trust.foreign_truth --page       # judge them all again, and write results/doctor/README.md and truth.json

Each run is pico_base on easy letters for 40 steps, and leaves what TRL leaves: trainer_state.json, unchanged but for gzip. All columns are computed by
TRL's code. Replies are sampled by fast/sampler.py, which takes a third of model.generate's time, from a copy of the weights that is made when TRL asks
for one; `plain` has TRL's own model.generate. Most arms log what TRL logs without an engine. Those marked `engine` go through TRL's path for vLLM,
because only that one logs how far trainer and sampler disagree; there our sampler stands in for vLLM.

Seed 0 is the development seed: rules and thresholds were chosen with it in view. Seeds 1 and 2 are the test, and were made before and looked at after.
"""

import copy
import gzip
import json
import math
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from lab.common import RESULTS

OUT = RESULTS / "doctor"
RUNS = OUT / "runs"
SEEDS = (0, 1, 2)
TASKS, K, STEPS = 4, 8, 40
FIRST_TASK = 2_600_000_000  # tasks that nothing else of ours plays
BASE = {
    "max_steps": STEPS, "per_device_train_batch_size": TASKS * K, "num_generations": K, "learning_rate": 1e-3, "max_completion_length": 48,
    "lr_scheduler_type": "constant", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no",
    "logging_steps": 1, "disable_tqdm": True, "shuffle_dataset": False, "weight_decay": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One setting. What is not named is as in BASE."""

    what: str
    mistake: bool
    told: tuple[str, ...] = ()  # the symptoms that name this mistake; any of them counts
    args: dict = field(default_factory=dict)  # of GRPOConfig
    tier: int = 3
    rewards: tuple[str, ...] = ("exact",)
    engine: bool = False  # through TRL's path for vLLM
    generate: bool = False  # TRL's own model.generate
    every: int = 1  # the engine takes new weights at every n-th step; 0: never
    temperature: float = 1.0  # of the engine
    dtype: str = "float32"  # of the engine's weights; it computes in float32
    dropout: float = 0.0
    lora: bool = True
    resumed: bool = False  # stopped half-way and resumed without its optimizer


HEALTHY = {
    "plain": Arm("TRL's defaults but for the learning rate, 1e-3 (LoRA)", False, generate=True),
    "dr-grpo": Arm("dr_grpo, rewards not scaled, warm-up and linear decay", False, args={
        "loss_type": "dr_grpo", "scale_rewards": "none", "lr_scheduler_type": "linear", "warmup_steps": 4, "learning_rate": 2e-3}),
    "kl": Arm("a KL term, beta 0.04", False, args={"beta": 0.04, "loss_type": "grpo"}),
    "two-epochs": Arm("each batch used twice, clipped", False, args={"num_iterations": 2, "learning_rate": 5e-4}),
    "two-rewards": Arm("partial credit, and a reward for the format", False, rewards=("partial", "format")),
    "full": Arm("all weights, cosine, learning rate 1e-4", False, lora=False, args={"learning_rate": 1e-4, "lr_scheduler_type": "cosine"}),
    "nearly-solved": Arm("an easy tier: many groups are all right", False, tier=1, args={"learning_rate": 5e-4}),
    "thinks-longer": Arm("tier 5: replies grow because thinking pays", False, tier=5, args={"max_completion_length": 96, "learning_rate": 5e-4}),
    "engine": Arm("through an engine, exact", False, engine=True),
    "engine-bf16": Arm("through an engine whose weights are rounded to bfloat16, corrected", False, engine=True, dtype="bfloat16"),
}  # fmt: skip
MISTAKES = {
    "learning-rate": Arm("the learning rate × 100", True, ("broken", "collapse", "noise", "KL", "stuck", "no signal", "entropy collapse"),
                         args={"learning_rate": 0.1}),
    "cut-short": Arm("a limit of 24 tokens, where answers need 27 to 70", True, ("cut short",), tier=5, args={"max_completion_length": 24}),
    "equal-rewards": Arm("the reward is always 0: it looks for a tag that the prompt does not ask for", True, ("no signal",), rewards=("boxed",)),
    "generous": Arm("any well-formed answer earns 1; exact answers are logged, weight 0", True, ("pays something else",), rewards=("format", "exact"),
                    args={"reward_weights": [1.0, 0.0]}),
    "length": Arm("length is paid; exact answers are logged, weight 0", True, ("pays something else", "pays length"), rewards=("longer", "exact"),
                  args={"reward_weights": [1.0, 0.0]}),
    "stale": Arm("the engine never gets new weights", True, ("stale",), engine=True, every=0),
    "temperature": Arm("the engine samples at 1.5, the loss thinks 1.0", True, ("two distributions",), engine=True, temperature=1.5),
    "dropout": Arm("lora_dropout 0.3, through an engine", True, ("dropout", "two distributions"), engine=True, dropout=0.3),
    "off-policy": Arm("samples up to 10 steps old, vllm_importance_sampling_correction=False", True, ("uncorrected", "stale", "collapse", "broken"), engine=True,
                      every=10, args={"vllm_importance_sampling_correction": False}),
    "many-epochs": Arm("each batch used 20 times, epsilon 10: nothing is clipped", True, ("uncorrected", "collapse", "KL", "broken"),
                       args={"num_iterations": 20, "epsilon": 10.0}),
    "warm-up": Arm("a warm-up of 2,000 steps in a run of 40", True, ("warm-up",), args={"lr_scheduler_type": "linear", "warmup_steps": 2000}),
    "resumed": Arm("stopped after 20 steps and resumed without its optimizer and schedule", True, ("resumed",), resumed=True,
                   args={"lr_scheduler_type": "linear", "warmup_steps": 4, "save_strategy": "steps", "save_steps": 20}),
}  # fmt: skip
ARMS = HEALTHY | MISTAKES


# ------------------------------------------------------------------------------------------------ rewards
def scorer(name: str, tier: int):
    """A reward function as TRL calls it, under this name in the log."""
    from env_letters import Letters

    def score(completions, seed, completion_ids, **_):
        out = []
        for completion, task, ids in zip(completions, seed, completion_ids):
            reply = completion[0]["content"]
            env = Letters(tier, "partial", True, "states")
            env.reset(task)
            env.step(reply)
            found = env.score()
            out.append({"exact": found["exact"], "partial": found["reward"], "format": found["format"],
                        "boxed": float("\\boxed" in reply), "longer": min(len(ids), 48) / 48}[name])  # fmt: skip
        return out

    score.__name__ = name
    return score


# ------------------------------------------------------------------------------------------------ an engine
class Engine:
    """What TRL calls for vLLM's samples: generate and sync_weights. The samples are those of fast/sampler.py, from a copy of the weights."""

    def __init__(self, trainer, arm: Arm, seed: int):
        self.trainer, self.arm, self.seed = trainer, arm, seed
        self.version, self.sampler, self.asked = -1, None, 0
        self.sync_weights()

    def sync_weights(self) -> None:
        """A copy of the trainer's weights, if it is time for one."""
        import torch

        from fast.sampler import TorchSampler
        from policy import Policy

        step = self.trainer.state.global_step
        if self.sampler is not None and (not self.arm.every or step - self.version < self.arm.every):
            return
        self.version = step
        model = copy.deepcopy(self.trainer.accelerator.unwrap_model(self.trainer.model)).eval()
        model.to(getattr(torch, self.arm.dtype)).to(torch.float32)
        tokenizer = self.trainer.processing_class
        stops = frozenset(self.trainer.eos_token_ids)
        self.sampler = TorchSampler(Policy(model, tokenizer, stops, "copy", 32 if self.arm.lora else 0, torch.device("cpu")))

    def generate(self, prompts, images=None, num_generations=1, profiler=None, **_):
        self.asked += 1
        seeds = [[(self.seed, self.asked, i)] for i in range(len(prompts))]
        limit = self.trainer.max_completion_length
        samples = [group[0] for group in self.sampler.sample(prompts, 1, limit, self.arm.temperature, seeds)]
        return None, [list(s.token_ids) for s in samples], [[[float(x)] for x in s.logprobs] for s in samples], None

    def in_place_of_generate(self, prompt_ids, *_, **__):
        """What TRL's _generate_single_turn returns without an engine: token ids, and no log-probs."""
        self.sync_weights()
        return self.generate(prompt_ids)[1], None


# ------------------------------------------------------------------------------------------------ a run
def train(arm: Arm, seed: int, folder: Path, steps: int = STEPS):
    """A GRPOTrainer of this arm in `folder`."""
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    from env_letters import Letters
    from policy import PICO

    set_seed(seed)
    torch.manual_seed(seed)
    env = Letters(arm.tier, "partial", True, "states")
    tasks = [FIRST_TASK + seed * 100_000 + i for i in range(TASKS * STEPS)]
    prompts = Dataset.from_list([{"prompt": env.reset(task), "seed": task} for task in tasks])
    args = trl.GRPOConfig(output_dir=str(folder), seed=seed, **(BASE | {"max_steps": STEPS} | arm.args))
    lora = (
        LoraConfig(r=32, lora_alpha=64, lora_dropout=arm.dropout, target_modules="all-linear", task_type="CAUSAL_LM") if arm.lora else None
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(PICO, dtype="float32", use_safetensors=True), processing_class=AutoTokenizer.from_pretrained(PICO),
        args=args, train_dataset=prompts, reward_funcs=[scorer(name, arm.tier) for name in arm.rewards], peft_config=lora,
    )  # fmt: skip
    engine = Engine(trainer, arm, seed)
    if arm.engine:
        trainer.vllm_generation, trainer.use_vllm = engine, True
        trainer._last_loaded_step = 0
    elif not arm.generate:
        trainer._generate_single_turn = engine.in_place_of_generate
    return trainer


def resume(arm: Arm, seed: int, folder: Path):
    """Train, lose the optimizer of the checkpoint half-way, and train on from there."""
    train(arm, seed, folder).train()
    half = folder / f"checkpoint-{STEPS // 2}"
    for name in ("optimizer.pt", "scheduler.pt"):
        (half / name).unlink()
    trainer = train(arm, seed, folder)
    trainer.train(resume_from_checkpoint=str(half))
    return trainer


def make(name: str, seed: int) -> None:
    arm = ARMS[name]
    start = time.perf_counter()
    folder = Path(tempfile.mkdtemp())
    try:
        if arm.resumed:
            trainer = resume(arm, seed, folder)
        else:
            trainer = train(arm, seed, folder)
            trainer.train()
        trainer.state.save_to_json(str(folder / "trainer_state.json"))
        RUNS.mkdir(parents=True, exist_ok=True)
        packed = gzip.compress((folder / "trainer_state.json").read_bytes(), mtime=0)
        (RUNS / f"{name}-{seed}.json.gz").write_bytes(packed)
    finally:
        shutil.rmtree(folder)
    log = [line for line in trainer.state.log_history if "reward" in line]
    print(f"{name}-{seed}: {time.perf_counter() - start:.0f} s, reward {log[0]['reward']:.2f} -> {log[-1]['reward']:.2f}", flush=True)


def main(only: tuple[str, ...] = (), seeds: tuple[int, ...] = SEEDS, page: bool = False) -> None:
    for seed in seeds:
        for name in only or ARMS:
            if not page and not (RUNS / f"{name}-{seed}.json.gz").exists():
                make(name, seed)


if __name__ == "__main__":
    tyro.cli(main)
