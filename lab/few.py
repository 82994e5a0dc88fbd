"""Thirteen parameters: GRPO and SFT when all layers share thirteen numbers.

    python -m lab.few       # results/es.json, beside recipe.json: the same tasks and tokens

TinyLoRA (Morris et al. 2026, "Learning to Reason in 13 Parameters", arXiv 2602.04118), as peft has
it: W' = W + U S (Σ v_i P_i) Vᵀ. U, S and V hold the two largest components of W's singular value
decomposition. P_i are fixed random matrices, other ones for each layer and seed. Only v [13] learns.
GRPO begins with the base, without a warm-up; SFT is shown 100 demonstrations that spell.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial

from peft import TinyLoraConfig, get_peft_model

import settings
from fast.sampler import TorchSampler
from grpo import compute_advantages, update
from lab.es import config_of, grow
from policy import PICO, Policy, adam, load_policy, set_learning_rate
from rollout import Episode, play
from sft import sft

RATES = (0.01, 0.03, 0.1)


def tiny(seed: int) -> Policy:
    """pico_base with thirteen numbers that learn, all 0 at first."""
    policy = load_policy(str(PICO), 0, 1, "cpu", seed)
    projections = 42 + 1000 * seed  # peft's default, and others for other seeds
    shape = {"r": 2, "u": 13, "weight_tying": 1.0, "target_modules": "all-linear"}
    config = TinyLoraConfig(projection_seed=projections, task_type="CAUSAL_LM", **shape)
    return replace(policy, model=get_peft_model(policy.model, config).eval(), lora_rank=2)


def folded(policy: Policy) -> Policy:
    """A copy with W' in place of W, which fast/sampler.py can read."""
    return replace(policy, model=deepcopy(policy.model).merge_and_unload(), lora_rank=0)


def train(flags: str, seed: int, lr: float) -> tuple[Callable, dict]:
    """((temperature, seeds) -> episodes, how many tokens RL sampled and trained on)."""
    cfg = config_of(flags, seed)
    policy = tiny(seed)
    new_env = partial(settings.make_env, cfg, cfg.difficulty)
    tokens = {"sampled": 0, "trained": 0}

    def played(temperature, seeds, k=1, number=0) -> list[list[Episode]]:
        sampler = TorchSampler(folded(policy))
        return play(policy, sampler, new_env, seeds, k, cfg.max_tokens, temperature, number)

    if cfg.updates == 0:
        with policy.learning():
            sft(policy, new_env, settings.sft_seeds(cfg), replace(cfg, sft_lr=lr))
    optimizer = adam(policy, lr)
    number = 0
    while cfg.updates and tokens["sampled"] < cfg.sampled_tokens:
        groups = played(cfg.temperature, settings.task_seeds(cfg, number), cfg.k, number)
        episodes = sum(groups, [])
        compute_advantages(groups, cfg)
        set_learning_rate(optimizer, settings.learning_rate(replace(cfg, lr=lr), number))
        with policy.learning():
            update(policy, optimizer, episodes, cfg)
        tokens["sampled"] += sum(e.reply_tokens for e in episodes)
        tokens["trained"] += sum(e.reply_tokens for e in episodes if any(e.advantages))
        number += 1
    return lambda *tasks: sum(played(*tasks), []), tokens


def main() -> None:
    rates = {f"--lr {lr}": (lr,) for lr in RATES}
    grow("few_grpo", "GRPO from the base, 13 parameters", rates, train)
    shown = lambda flags, *rest: train(
        f"{flags} --updates 0 --sft-style derives --sft-steps 100", *rest
    )
    rates = {f"--sft-lr {lr}": (lr,) for lr in RATES}
    grow("few_sft", "SFT on 100 demonstrations that spell, 13 parameters", rates, shown)


if __name__ == "__main__":
    main()
