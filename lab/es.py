"""Two ways to learn that train.py does not have, with the tasks and tokens of results/recipe.json.

    python -m lab.es                # all arms of results/es.json
    python -m lab.es few_grpo       # one of them

RL without a backward pass: perturb the weights, play, move to where more was earned. Evolution
strategies (Salimans et al. 2017, arXiv 1703.03864; for language models Qiu et al. 2025, arXiv
2509.24372). Nothing is differentiated, so any reward of a whole policy will do, and sampling is
all that it costs. It begins after the SFT of recipe.json.

Thirteen parameters, which all layers share: TinyLoRA (Morris et al. 2026, "Learning to Reason in
13 Parameters", arXiv 2602.04118), as peft has it: W' = W + U S (Σ v_i P_i) Vᵀ. U, S and V hold the
two largest components of W's singular value decomposition. P_i are fixed random matrices, other
ones for each layer and seed. Only v [13] learns. GRPO begins with the base, without a warm-up; SFT
is shown 100 demonstrations that spell.

Sizes are swept with seed 0 on development tasks; the best is played on held-out tasks with each of
the table's seeds.
"""

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from peft import TinyLoraConfig, get_peft_model

import settings
from bookkeeping import refusals, run
from evaluate import HELD_OUT_SEEDS
from fast.machine import cpu_name
from fast.sampler import TorchSampler
from grpo import compute_advantages, update
from lab import study, tables
from policy import PICO, Policy, adam, load_policy, set_learning_rate
from rollout import Episode, play
from sft import sft

SIZES = [(0.003, 0.003), (0.01, 0.01), (0.03, 0.03), (0.01, 0.03)]  # (sigma, lr) of evolution
# Of thirteen parameters. 0.003 was added because the best was the lowest; predicted: below 0.01 for
# both arms.
RATES = (0.003, 0.01, 0.03, 0.1)
MEMBERS, TASKS = 16, 4  # perturbed policies per update, and tasks that each of them plays


def config_of(flags: str, seed: int) -> settings.Config:
    """A finished config for pico_base."""
    cfg, _ = settings.command_line([*flags.split(), "--seed", f"{seed}"])
    refusals.check(cfg)  # fills in what depends on the environment
    return settings.complete(cfg, settings.SMALL_MODEL, str(PICO), {"micro_tokens": 4096})


# ---------------------------------------------------------------------------- no backward pass
def evolve(policy: Policy, earn: Callable[[], float], seed: int, sigma: float, lr: float) -> None:
    """One update. earn() plays with the policy's present weights: the mean reward.

    sigma is a perturbation's standard deviation. lr is how far to move along the perturbations,
    each weighted by its standardized reward.
    """
    noises = [seed * MEMBERS + n for n in range(MEMBERS)]
    rewards = []
    for noise in noises:
        move(policy, noise, sigma)
        rewards.append(earn())
        move(policy, noise, -sigma)
    rewards = torch.tensor(rewards)  # [MEMBERS]
    scores = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
    for noise, score in zip(noises, scores.tolist()):
        move(policy, noise, lr * score / MEMBERS)


@torch.no_grad()
def move(policy: Policy, seed: int, step: float) -> None:
    """Add step · noise to all that learns. A seed's noise is drawn again, so none is stored."""
    generator = torch.Generator().manual_seed(seed)
    for p in policy.trainable().values():
        p += step * torch.randn(p.shape, generator=generator).to(p.device)


def evolution(flags: str, seed: int, sigma: float, lr: float) -> tuple[Callable, dict]:
    """((temperature, seeds) -> episodes, how many tokens RL sampled and trained on)."""
    cfg = config_of(flags, seed)
    policy = load_policy(str(PICO), cfg.lora_rank, cfg.lora_alpha, "cpu", seed)
    new_env = partial(settings.make_env, cfg, cfg.difficulty)
    with policy.learning():
        sft(policy, new_env, settings.sft_seeds(cfg), cfg)
    sampler = TorchSampler(policy)
    tokens = []  # sampled, of each perturbed policy
    number = 0

    def played(temperature: float, seeds: list[int]) -> list[Episode]:
        sampler.sync(number)
        groups = play(policy, sampler, new_env, seeds, 1, cfg.max_tokens, temperature, number)
        return sum(groups, [])

    def earn() -> float:
        episodes = played(cfg.temperature, settings.task_seeds(cfg, number)[:TASKS])
        tokens.append(sum(e.reply_tokens for e in episodes))
        return sum(e.reward for e in episodes) / len(episodes)

    while sum(tokens) < cfg.sampled_tokens:
        evolve(policy, earn, 100_000 * seed + number, sigma, lr)  # each seed has its own noise
        number += 1
    return played, {"sampled": sum(tokens), "trained": 0}


# ---------------------------------------------------------------------------- thirteen parameters
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


def thirteen(flags: str, seed: int, lr: float) -> tuple[Callable, dict]:
    """As `evolution`: GRPO or, if there are no updates, SFT."""
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


def imitation(flags: str, seed: int, lr: float) -> tuple[Callable, dict]:
    """`thirteen`, which SFT teaches to spell."""
    return thirteen(f"{flags} --updates 0 --sft-style derives --sft-steps 100", seed, lr)


# ---------------------------------------------------------------------------- the arms
ARMS = {  # {arm: (what, {how results/es.json calls a size: what train gets after the seed}, train)}
    "es": (
        "evolution strategies: no backward pass",
        {f"sigma {sigma} --lr {lr}": (sigma, lr) for sigma, lr in SIZES},
        evolution,
    ),
    "few_grpo": (
        "GRPO from the base, 13 parameters",
        {f"--lr {lr}": (lr,) for lr in RATES},
        thirteen,
    ),
    "few_sft": (
        "SFT on 100 demonstrations that spell, 13 parameters",
        {f"--sft-lr {lr}": (lr,) for lr in RATES},
        imitation,
    ),
}


def grow(name: str) -> None:
    """Sweep the sizes of an arm with seed 0, then train the best with each seed of recipe.json."""
    torch.set_num_threads(1)
    what, sizes, train = ARMS[name]
    table = study.read_tables(tables.ROOT / "runs")["recipe"]
    arm = {"what": what, "swept": {}, "seeds": [], "planned": table.seeds}
    exact = lambda episodes: [e.components["exact"] for e in episodes]
    mean_of = lambda size: arm["swept"][size]["development"]
    for size, values in sizes.items():
        played, _ = train(table.flags, 0, *values)
        right = exact(played(0.0, range(settings.DEV_SEEDS, settings.DEV_SEEDS + 256)))
        arm["swept"][size] = {"development": sum(right) / 256}
    arm["settings"] = max(sizes, key=mean_of)  # the first of equals
    held_out = range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + 512)
    for seed in range(table.seeds):
        played, tokens = train(table.flags, seed, *sizes[arm["settings"]])
        marks = {how: exact(played(t, held_out)) for how, t in (("greedy", 0.0), ("sampled", 1.0))}
        found = {how: {"exact": tables.digits(right)} for how, right in marks.items()}
        entry = {"seed": seed, "held_out": {"tier 6": found}, "tokens": tokens}
        arm["seeds"].append(entry | {"commit": run.commit(), "machine": cpu_name()})
        tables.keep(tables.RESULTS / "es.json", {"made_by": "python -m lab.es"}, {name: arm})


if __name__ == "__main__":
    for name in sys.argv[1:] or ARMS:
        grow(name)
