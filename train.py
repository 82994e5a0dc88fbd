"""The recipe, top to bottom: a chat model, a warm-up by SFT, then GRPO, with an honest evaluation around each.

    python train.py --env letters --difficulty 6
    python train.py --env alphabet
    python train.py --env swarm --difficulty medium

    config -> policy -> eval "before" -> SFT on 100 expert episodes -> eval "after_sft"
           -> (rollout: 8 tasks x 8 samples -> GRPO: one step) x updates, an eval now and then -> eval "final" -> report

With --async-rollouts N a second process samples N batches ahead while this one trains (ahead.py); without it, one thing after the other.

On a machine without a GPU, or that cannot reach the hub, the same command trains the embedded pico_base/, or for swarm pico_swarm/.
`python train.py --help` lists every flag with its reason; they are declared once, just below.

A run leaves runs/<name>/: config.json, metrics.jsonl (a line an update), evals.jsonl (every task of every
evaluation), episodes.jsonl (samples to read), summary.json (the final numbers with intervals), report.md, curves.png,
report.html (curves and episodes to click through), checkpoint/. After any kill, `python train.py --resume runs/<name>` goes
on where the checkpoint stands; on CPU the metrics come out the same to the last bit, because every random number is drawn from a
seed and a place, never from what was drawn before (not so ahead, where the batches under way are sampled anew). `python train.py --eval-only runs/<name>` evaluates its checkpoint again, on the
same tasks or, with --difficulty and other settings of the environment, on others. `--eval-only --api-base URL --model NAME` does it with any
OpenAI-compatible endpoint (api.py).
"""

import importlib.util
import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import tyro
from tqdm import tqdm

import compare
import doctor
import metrics
import parallel
import report
from ahead import Ahead, Job
from api import evaluate_api
from checkpoint import flush, load_tensors, restore, save_checkpoint
from env_alphabet import Alphabet
from env_letters import Letters
from env_swarm import Swarm
from evaluate import broken, evaluate_only, evaluate_policy, greedy, summarize
from grpo import CLIP, IMPORTANCE, update
from policy import choose_model, load_policy
from rollout import play
from runfolder import (
    LOGS,
    StopSignal,
    append,
    give_back_memory,
    machine,
    memory_folder,
    open_run,
    open_wandb,
    save_episodes,
    thin,
    trim,
    write_json,
)
from sampler import TorchSampler
from sft import demonstrations, sft_batches, sft_step

# Where the seconds of an update go. In turn: all but "wait", one after the other. Ahead: the other process's rollout, environment and sync run
# beside this one's wait and train.
PARTS = tuple(report.BARS)
# Tasks are drawn from a seed. These ranges never meet; pretraining (lab/pretrain.py) starts at 3e9.
TRAIN_SEEDS, SFT_SEEDS = 0, 1_000_000_000  # held-out tasks: evaluate.py
EVAL_TIERS = (3, 5, 6)  # always evaluated, beside the tier that is trained


@dataclass
class Config:
    """RL post-training of a chat model: SFT warm-up on a scripted expert, then GRPO."""

    preset: str = ""  # seed: the settings of the run this project grew out of (PRESETS below), which stood still at 44%
    # task
    env: str = "letters"  # which environment: letters, alphabet or swarm
    think: bool = True  # may the policy think before it answers? --no-think is the seed's plateau
    difficulty: int | str | None = None  # letters: tier 1 to 10 (6: 40-80 random letters, 8-12 of them asked); swarm: easy, medium, hard
    curriculum: bool = False  # begin at the easiest and go up when the last 5 updates were good enough (PROMOTE below)
    # letters
    reward: str = "binary"  # binary pays exact answers only; partial pays every right letter, and so also guessing
    # alphabet: the settings of the public single-GPU recipe
    min_turns: int = 3
    max_turns: int = 3
    min_names: int = 1  # new names a turn
    max_names: int = 4
    similarity_power: float = 8.0  # pushes the 0.66 that names as given get for nothing down to 0.08
    power_per_turn: bool = False  # False: average the turns, then power once; True: power each turn, then average
    # swarm: rules, and what is paid for (None: the weights of the version, see env_swarm.py)
    swarm_version: str = "0.2"  # 0.1 has the loopholes that the published run found
    swarm_payoff: float | None = None
    swarm_reputation: float | None = None
    swarm_quality: float | None = None
    swarm_diversity: float | None = None
    swarm_floor: float = 50.0  # ending with a reputation below it costs …
    swarm_floor_penalty: float = 0.0  # … this times what is missing, as a share of 100
    swarm_error_penalty: float | None = None  # times the share of turns lost to errors. None: by model size (0 as published, or 2)
    # policy
    model: str = "auto"  # folder or hub id of a causal LM; auto: Qwen3-4B-Instruct-2507, or pico_base where it cannot run
    lora_rank: int = 32  # 0 trains all weights
    lora_alpha: int = 64  # the update is scaled by alpha / rank
    device: str = "auto"  # auto: cuda if there is one
    engine: str = "auto"  # what samples: torch (sampler.py) or vllm (vllm_engine.py). auto: vllm where it is installed beside a GPU
    vllm_memory: float = 0.3  # share of the card that vLLM takes, and gives back while the trainer needs it
    threads: int = 0  # CPU threads; 0 leaves torch's choice
    # SFT
    sft_style: str | None = None  # whom to imitate; the default shows the format and not what does well: states; swarm: crowd
    sft_examples: int = 100  # demonstrations are scarce, rewards are not
    sft_steps: int = 50
    sft_batch: int | None = None  # None: 8, and 2 in swarm, where an episode has 25 replies to learn from
    sft_lr: float | None = None  # None: by model size, see by_size
    # GRPO
    updates: int | None = None  # None: by model size
    until_converged: bool = False  # after these, go on until the training reward has settled (metrics.trend) …
    max_updates: int = 400  # … or so many updates are done; the learning rate stays at its end
    num_tasks: int | None = None  # groups an update; None: 8, and 4 in swarm, whose episodes are long
    k: int = 8  # samples a group: more find a rare good answer more often
    loss: str = "grpo"  # reinforce, grpo, dr_grpo, dapo, gspo or cispo; grpo.py has them side by side
    baseline: str = "group"  # what a reward is compared with: group, batch or none
    normalize: bool = True  # divide advantages by the group's standard deviation (dr_grpo never does)
    lr: float | None = None  # None: by model size
    warmup: int = 5  # updates over which the learning rate rises; Adam's first steps are its largest
    lr_end: float = 0.1  # from there it falls linearly to this share of lr at the last update; 1 keeps it constant
    kl: float = 0.0  # weight of the KL to the policy after SFT; 0 needs no reference at all
    epochs: int = 1  # optimizer steps a batch; above 1 the ratio leaves 1 and clipping acts
    temperature: float = 1.0  # of sampling *and* of the trained log-probs: they must be the same distribution
    max_tokens: int | None = None  # None: by model size; longest reply of a turn
    importance: str | None = None  # of another policy's samples: clip, none, token, sequence (grpo.py). None: sequence if ahead, or by size
    async_rollouts: int = 0  # batches sampled ahead by a second process while this one trains (ahead.py); 0 is strictly on-policy
    max_off_policy_steps: int | None = None  # drop episodes whose sampler was more updates behind; None keeps all
    micro_tokens: int | None = None  # padded tokens a forward pass; changes memory, never the gradient. None: by model size
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, a third slower
    # evaluation: fixed held-out tasks, greedy
    eval_n: int | None = None  # tasks a tier; 32 would give an interval 34 points wide. None: 256, and 128 in swarm
    eval_every: int = 20  # updates
    # evaluation over an API (api.py): any OpenAI-compatible endpoint instead of a checkpoint; --model is its name there
    api_base: str = ""  # such as https://HOST/v1
    api_key_env: str = "OPENAI_API_KEY"  # the environment variable that holds the key; the key itself is given nowhere else
    api_temperature: float | None = 0.0  # 0 is greedy, as all our evaluations; None leaves it to the endpoint
    api_concurrency: int = 8  # episodes at a time
    api_rpm: float = 0.0  # requests a minute, at most; 0: no limit
    api_timeout: float = 120.0  # seconds for one request, from its start to the answer's last byte
    api_retries: int = 5  # of a request that met 429, 5xx, a lost connection or an answer that is none
    api_minutes: float = 60.0  # for all of it; what is not done by then counts as failed
    # run
    seed: int = 0
    name: str = ""  # of the run folder; empty: env, tier and time
    runs: str = "runs"  # where run folders live
    resume: str = ""  # a run folder to continue
    eval_only: str = ""  # a run folder whose checkpoint to evaluate, and nothing else
    save_every: int = 10  # updates between checkpoints
    wandb: bool = True  # online if you are logged in, otherwise into the run folder, to sync later


BY_ENV = {  # defaults that depend on the environment
    "letters": {"difficulty": 6, "sft_style": "states", "num_tasks": 8, "eval_n": 256, "sft_batch": 8},
    "alphabet": {"difficulty": 0, "sft_style": "states", "num_tasks": 8, "eval_n": 256, "sft_batch": 8},
    "swarm": {"difficulty": "medium", "sft_style": "crowd", "num_tasks": 4, "eval_n": 128, "sft_batch": 2},
}
PRESETS = {
    "seed": {
        "think": False, "reward": "partial", "lr": 5e-6, "warmup": 0, "lr_end": 1.0, "updates": 200, "max_tokens": 2048, "eval_n": 32, "eval_every": 10,
        "importance": "clip",
    },
}  # fmt: skip
LEVELS = {"letters": list(range(1, 11)), "swarm": ["easy", "medium", "hard"]}  # what a curriculum climbs …
PROMOTE = {"letters": ("exact", 0.75), "swarm": ("reward", 1.0)}  # … when the mean of the last 5 updates is so high


def by_size(n_parameters: int, env: str) -> dict:
    """Defaults that depend on the model. Large: the runs this project grew out of. Small: what was stable on pico_base (results/)."""
    micro_tokens = 8192  # a 4B then takes 63 of an A100's 80 GB, with 16,384 it would take 115 (computed, results/bench/memory.md)
    if n_parameters > 50e6:
        max_tokens = {"letters": 2048, "alphabet": 768, "swarm": 512}[env]
        return {"lr": 5e-6, "sft_lr": 1e-5, "updates": 200, "max_tokens": max_tokens, "importance": "token", "micro_tokens": micro_tokens,
                **({"swarm_error_penalty": 0.0} if env == "swarm" else {})}  # fmt: skip
    # swarm: at 1e-3 (and an error penalty of 1) 20 updates end at as much reward, but what the base could copy suffers: 3.9% of errors against 0.7%
    lr, updates, max_tokens = {"letters": (3e-4, 150, 320), "alphabet": (3e-4, 80, 640), "swarm": (5e-4, 20, 160)}[env]
    # A small model slips in one call of ten while it samples. Without a price for that, a run that posted trades ended at 36% of errors.
    return {"lr": lr, "sft_lr": 1e-4, "updates": updates, "max_tokens": max_tokens, "importance": "clip", "micro_tokens": micro_tokens,
            **({"swarm_error_penalty": 2.0} if env == "swarm" else {})}  # fmt: skip


def fill(cfg: Config, defaults: dict) -> None:
    for name, value in defaults.items():
        if getattr(cfg, name) is None:
            setattr(cfg, name, value)


def make_env(cfg: Config, difficulty):
    """A fresh environment; with eval_sets and the tables above the only place that knows which there are."""
    if cfg.env == "letters":
        return Letters(difficulty, cfg.reward, cfg.think, cfg.sft_style)
    if cfg.env == "alphabet":
        return Alphabet(
            cfg.min_turns, cfg.max_turns, cfg.min_names, cfg.max_names, cfg.similarity_power, cfg.power_per_turn, cfg.think, cfg.sft_style
        )
    return Swarm(
        difficulty, cfg.swarm_version, cfg.think, cfg.sft_style, cfg.swarm_payoff, cfg.swarm_reputation, cfg.swarm_quality,
        cfg.swarm_diversity, cfg.swarm_floor, cfg.swarm_floor_penalty, cfg.swarm_error_penalty or 0.0,
    )  # fmt: skip


def make_sampler(cfg: Config, policy):
    """The engine that samples from the policy: vLLM where asked for, or beside a GPU that has it; else our own."""
    beside_a_gpu = policy.device.type == "cuda" and importlib.util.find_spec("vllm")
    if beside_a_gpu and cfg.engine == "auto" and parallel.world() > 1:  # vLLM would take our process group for its own
        print("our own sampler samples, because several processes train; --async-rollouts 1 gives vLLM a process of its own beside each")
        return TorchSampler(policy)
    if cfg.engine == "vllm" or (cfg.engine == "auto" and beside_a_gpu):
        from vllm_engine import VllmSampler

        return VllmSampler(policy, cfg.vllm_memory)
    return TorchSampler(policy)


def eval_sets(cfg: Config) -> dict[str, tuple]:
    """What is evaluated: {name of a set of tasks: (is it the one trained on?, make_env)}. The same name means the same tasks."""
    if cfg.env == "letters":
        tiers = sorted({*EVAL_TIERS, cfg.difficulty})
        return {f"tier {tier}": (tier == cfg.difficulty, partial(make_env, cfg, tier)) for tier in tiers}
    if cfg.env == "swarm":
        return {f"{cfg.difficulty} v{cfg.swarm_version}": (True, partial(make_env, cfg, cfg.difficulty))}
    span = lambda low, high: str(low) if low == high else f"{low}-{high}"
    name = f"{span(cfg.min_turns, cfg.max_turns)} turns, {span(cfg.min_names, cfg.max_names)} names, power {cfg.similarity_power:g}"
    return {name + (" a turn" if cfg.power_per_turn else ""): (True, partial(make_env, cfg, 0))}


def check(cfg: Config) -> None:
    """Refuse what cannot work, in one sentence, before anything is loaded. Fills in what depends on the environment."""
    if cfg.env not in BY_ENV:
        raise ValueError(f"--env {cfg.env}: there is no such environment; choose {', '.join(BY_ENV)}")
    if cfg.preset and cfg.preset not in PRESETS:
        raise ValueError(f"--preset {cfg.preset}: choose {', '.join(PRESETS)}, or leave it out")
    fill(cfg, BY_ENV[cfg.env])
    if cfg.env == "letters" and not isinstance(cfg.difficulty, int):
        raise ValueError(f"--difficulty {cfg.difficulty}: letters has tiers 1 to 10")
    make_env(cfg, cfg.difficulty)
    if cfg.curriculum and cfg.env not in LEVELS:
        raise ValueError(f"--curriculum: {cfg.env} has no tiers to climb; leave it out")
    if cfg.loss not in CLIP:
        raise ValueError(f"--loss {cfg.loss}: choose one of {', '.join(CLIP)}")
    if cfg.importance not in (None, *IMPORTANCE):
        raise ValueError(f"--importance {cfg.importance}: choose one of {', '.join(IMPORTANCE)}")
    if cfg.max_off_policy_steps is not None and cfg.max_off_policy_steps < cfg.async_rollouts:
        raise ValueError(f"--max-off-policy-steps {cfg.max_off_policy_steps}: with --async-rollouts {cfg.async_rollouts} every batch is that old, "
                         "and all would be dropped; allow as many")  # fmt: skip
    if cfg.engine not in ("auto", "torch", "vllm"):
        raise ValueError(f"--engine {cfg.engine}: choose auto, torch or vllm")
    if cfg.engine == "vllm" and parallel.world() > 1 and not cfg.async_rollouts:
        raise ValueError("--engine vllm in several processes needs one of its own beside each of them; add --async-rollouts 1")
    if cfg.baseline not in ("group", "batch", "none"):
        raise ValueError(f"--baseline {cfg.baseline}: choose group, batch or none")
    if cfg.k < 2 and cfg.baseline == "group":
        raise ValueError("--k 1: a group of one has no baseline, every advantage would be 0; use --k 2 or more, or --baseline batch")
    for name in ("num_tasks", "k", "epochs", "eval_n", "eval_every", "save_every", "sft_examples", "sft_batch"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: must be at least 1")
    if cfg.until_converged and cfg.max_updates < (cfg.updates or 0):
        raise ValueError(f"--max-updates {cfg.max_updates}: must be at least --updates {cfg.updates}")
    from_zero = ("updates", "sft_steps", "lora_rank", "kl", "lr_end", "async_rollouts")
    for name in ("temperature", "lr", "sft_lr", "max_tokens", "micro_tokens", "lora_alpha", *from_zero):
        value, least = getattr(cfg, name), 0 if name in from_zero else 1e-12
        if value is not None and not value >= least:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be {'positive' if least else 'at least 0'}")


# ------------------------------------------------------------------------------------------------ the recipe


def train(cfg: Config) -> Path:
    """One whole run; returns its folder."""
    started = time.monotonic()  # not time.time: that one jumps when a machine's clock is set
    # Where torchrun started several processes, each runs these lines. The first one's folder is the run's; the others write into one that is thrown away.
    opened = open_run(cfg) if parallel.rank() == 0 else None  # the third is the lock: the folder is ours while it lives
    cfg, home, saved = parallel.from_first(opened and (cfg, *opened[:2]))
    if cfg.api_base:
        raise ValueError(f"--resume {home}: it holds an evaluation over an API, there is nothing to train; start a run of its own")
    elsewhere = memory_folder() if parallel.rank() else None
    folder = Path(elsewhere.name) if elsewhere else home
    threads = cfg.threads or torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2) if cfg.async_rollouts else threads)  # the other half is for the process that samples
    path, why = parallel.from_first(choose_model(cfg.model, cfg.env) if parallel.rank() == 0 else None)  # it may ask the hub
    load = partial(load_policy, path, cfg.lora_rank, cfg.lora_alpha, cfg.device, cfg.seed)
    policy = load()
    fill(cfg, {"importance": "sequence"} if cfg.async_rollouts else {})  # the one that held on samples 8 updates old (results/offpolicy)
    fill(cfg, by_size(policy.n_parameters, cfg.env))
    check(cfg)
    print(why)
    print(f"chosen for {policy.n_parameters / 1e6:.1f}M parameters: lr {cfg.lr:g}, sft_lr {cfg.sft_lr:g}, "
          f"updates {cfg.updates}, max_tokens {cfg.max_tokens}")  # fmt: skip
    if cfg.gradient_checkpointing:
        shares = [module.p for module in policy.lm.modules() if isinstance(module, torch.nn.Dropout)]
        if any(shares) or getattr(policy.lm.config, "attention_dropout", 0):
            raise ValueError("--gradient-checkpointing: this model has dropout, which would come on too; leave it out, or set that to 0")
        policy.lm.gradient_checkpointing_enable()
        policy.lm.enable_input_require_grads()
    ahead = None
    if cfg.async_rollouts:
        jobs = (cfg.async_rollouts + 2) * sum(p.numel() * p.element_size() for p in policy.trainable().values())  # each carries the weights
        ahead = Ahead(load, partial(make_sampler, cfg), max(1, threads // 2), jobs)
    sampler = None if ahead else make_sampler(cfg, policy)
    asleep = sampler.asleep if sampler else nullcontext  # `with asleep():` the sampler lends its memory to the trainer
    write_json(folder / "config.json", asdict(cfg))

    # What a resumed run needs, besides weights and optimizer. Kept in checkpoint/state.json.
    state = {
        "update": -1,  # updates done; -1: not even SFT
        "level": LEVELS[cfg.env][0] if cfg.curriculum else cfg.difficulty,
        "recent": [],  # what a curriculum watches (PROMOTE), of the last updates at this level
        "rewards": [],  # mean reward of every update, to notice a collapse
        "sft": {},
        "seconds": dict.fromkeys(("total", *PARTS, "eval", "sft"), 0.0),
        "tokens": dict.fromkeys(("sampled", "trained", "sft"), 0),
        "warnings": {},  # symptoms that were told (doctor.py)
    }
    # Elsewhere torch chooses; on a GPU its choice takes 4 bytes a weight more while it steps.
    fused = True if policy.device.type == "cuda" else None
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=cfg.lr, weight_decay=0.0, fused=fused)
    if saved:
        state = restore(saved, policy, optimizer, state)
        print(f"resumed {folder} after update {state['update']}")
    trim(folder, state["update"])
    history = compare.lines(folder / "metrics.jsonl")[-doctor.LOOKS_BACK :]
    seconds, tokens, stop = state["seconds"], state["tokens"], StopSignal()
    spent_before = seconds["total"]
    parallel.same_weights(policy.trainable().values())
    log = open_wandb(replace(cfg, wandb=cfg.wandb and not elsewhere), folder)

    def evaluate(stage: str, done: int) -> None:
        t = time.monotonic()
        if ahead:
            roll = lambda make_env, seeds: ahead.play(policy, Job(make_env, seeds, 1, cfg.max_tokens, 0.0, 0, max(done, 0)))
        else:
            sampler.sync(max(done, 0))
            roll = greedy(policy, sampler, cfg.max_tokens)
        shared = lambda make_env, seeds: parallel.gather(roll(make_env, parallel.share(seeds)))
        evaluate_policy(policy, shared, folder, eval_sets(cfg), cfg.eval_n, stage, done, log)
        seconds["eval"] += time.monotonic() - t

    def save() -> None:
        seconds["total"] = spent_before + time.monotonic() - started
        if parallel.rank() == 0:
            for name in LOGS:  # a checkpoint must not survive a power cut that the lines before it do not
                flush(folder / name) if (folder / name).exists() else None
            save_checkpoint(folder / "checkpoint", policy, optimizer, state)

    # ---- SFT: learn the format from a few demonstrations -----------------------------------------------
    if state["update"] < 0:
        evaluate("before", -1)
        t = time.monotonic()
        demos = demonstrations(policy, lambda: make_env(cfg, cfg.difficulty), [SFT_SEEDS + i for i in range(cfg.sft_examples)])
        sft_optimizer = torch.optim.AdamW(policy.trainable().values(), lr=cfg.sft_lr, weight_decay=0.0, fused=fused)
        losses = []
        batches = sft_batches(demos, cfg.sft_batch, cfg.sft_steps, cfg.seed)
        with asleep():
            policy.model.train(cfg.gradient_checkpointing)  # transformers checkpoints in training mode only
            for i, batch in enumerate(tqdm(batches, desc="SFT", disable=not batches)):
                for group in sft_optimizer.param_groups:  # linear warm-up over a tenth, then linear to zero
                    group["lr"] = cfg.sft_lr * min((i + 1) / max(1, cfg.sft_steps / 10), (cfg.sft_steps - i) / cfg.sft_steps)
                losses.append(sft_step(policy, sft_optimizer, batch, cfg.micro_tokens)["loss"])
                tokens["sft"] += sum(e.reply_tokens for e in batch)
                if parallel.any_rank(stop.asked):
                    raise SystemExit("stopped; SFT starts again on --resume")
            policy.model.eval()
        sft_optimizer.zero_grad(set_to_none=True)
        del sft_optimizer  # its moments are two more numbers for each weight that learns
        tokens["trained"] += tokens["sft"]
        seconds["sft"] = time.monotonic() - t
        state["sft"] = {"loss_first": losses[0], "loss_last": losses[-1]} if losses else {}
        evaluate("after_sft", 0)
        state["update"] = 0
        save()
    reference = {name: p.detach().clone() for name, p in policy.trainable().items()} if cfg.kl and state["update"] == 0 else None
    if cfg.kl and reference is None:
        reference = load_tensors(home / "reference.pt")
    elif cfg.kl:
        torch.save(reference, folder / "reference.pt")

    # ---- GRPO: sample, score, make what scored above its group's mean likelier ----------------------------
    print("a loss near 0 and a ratio of 1.000 are what on-policy GRPO looks like when it is healthy; watch the reward")
    bar = tqdm(initial=state["update"], total=cfg.updates, desc="GRPO")
    asked, last_batch = state["update"], (cfg.max_updates if cfg.until_converged else cfg.updates) - 1  # ahead: the next to ask for
    asked_at: dict[int, object] = {}  # {batch: its level}
    while not finished(cfg, state):
        step, level = state["update"], state["level"]
        clock = dict.fromkeys(PARTS, 0.0)  # where this update's seconds go
        t0 = time.monotonic()
        if ahead:
            while asked <= min(step + cfg.async_rollouts, last_batch):
                env, mine = partial(make_env, cfg, level), parallel.share(task_seeds(cfg, asked))
                ahead.ask(asked, policy, Job(env, mine, cfg.k, cfg.max_tokens, cfg.temperature, cfg.seed, step))
                asked_at[asked] = level
                asked += 1
            groups, spent = ahead.take(step)
            level = asked_at.pop(step)  # a curriculum may have gone up since
            clock |= spent
        else:
            sampler.sync(step)
            clock["sync"] = time.monotonic() - t0
            groups = play(policy, sampler, partial(make_env, cfg, level), parallel.share(task_seeds(cfg, step)), cfg.k,
                          cfg.max_tokens, cfg.temperature, cfg.seed, clock)  # fmt: skip
        t1 = t0 if ahead else time.monotonic()
        groups = parallel.gather(groups)
        if ahead or parallel.world() > 1:
            clock["wait"] = time.monotonic() - t1  # for the process that plays, or for the other ranks
        t1 = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = cfg.lr * min((step + 1) / max(1, cfg.warmup), 1 - (1 - cfg.lr_end) * min(1, step / cfg.updates))
        with asleep():
            policy.model.train(cfg.gradient_checkpointing)
            stats = update(
                policy, optimizer, groups, loss=cfg.loss, baseline=cfg.baseline, normalize=cfg.normalize and cfg.loss != "dr_grpo", temperature=cfg.temperature,
                max_tokens=cfg.max_tokens, micro_tokens=cfg.micro_tokens, epochs=cfg.epochs, kl=cfg.kl, reference=reference,
                importance=cfg.importance, version=step, max_off_policy=cfg.max_off_policy_steps,
            )  # fmt: skip
            policy.model.eval()
            optimizer.zero_grad(set_to_none=True)  # gradients need not lie about while the sampler works
        clock["train"] = time.monotonic() - t1
        if sum(clock.values()) > 10:  # seconds: it takes 0.08 of one, too much for an update of letters
            give_back_memory()

        episodes = [e for group in groups for e in group if e.stop_reason != "error"]
        line = {"update": step + 1, "level": level, **summarize(groups), **stats, **{f"seconds_{part}": clock[part] for part in PARTS}}
        for part in PARTS:
            seconds[part] = seconds.get(part, 0.0) + clock[part]
        tokens["sampled"] += sum(e.reply_tokens for e in episodes)
        tokens["trained"] += stats["trained_tokens"]
        append(folder / "metrics.jsonl", line)
        log(line)
        tqdm.write(
            f"update {step + 1:4}  reward {line['reward']:.2f} ± {(line['reward_high'] - line['reward_low']) / 2:.2f}"
            + (f"  exact {line['exact']:.2f}" if "exact" in line else f"  payoff {line['payoff']:.2f}  errors {line['error_rate']:.2f}")
            + f"  length {line['reply_tokens']:5.1f}  signal {line['groups_with_signal']:.2f}  entropy {line.get('entropy', 0):.3f}"
            f"  grad {line['grad_norm']:.2f}  ratio {line.get('ratio', 1):.3f}  loss {line['loss']:+.4f}"
            f"  {t1 - t0:.1f}s + {clock['train']:.1f}s{broken(groups)}"
        )
        state["update"] = step + 1
        state["rewards"].append(line["reward"])
        history = [*history, line][-doctor.LOOKS_BACK :]
        for name, sentence in doctor.symptoms(history, state["rewards"]).items():
            if name in state["warnings"]:
                continue
            state["warnings"][name] = f"update {step + 1}: {sentence}"
            tqdm.write(f"{name.upper()} at {state['warnings'][name]}")
            if name == "collapse" and not elsewhere:
                shutil.copytree(folder / "checkpoint", folder / "checkpoint-at-collapse", dirs_exist_ok=True)  # the last one saved
        if cfg.curriculum and level == state["level"] != cfg.difficulty:
            measure, enough = PROMOTE[cfg.env]
            state["recent"] = (state["recent"] + [line[measure]])[-5:]
            if len(state["recent"]) == 5 and sum(state["recent"]) / 5 >= enough:
                state["level"], state["recent"] = LEVELS[cfg.env][LEVELS[cfg.env].index(level) + 1], []
        last, asked_to_stop = finished(cfg, state), parallel.any_rank(stop.asked)
        bar.update()
        if (step + 1) % cfg.eval_every == 0 and not last:
            evaluate("train", step + 1)
        if (step + 1) % cfg.save_every == 0 or last or asked_to_stop:
            save_episodes(folder, step + 1, "", policy, groups[:2], cfg.temperature)
            thin(folder / "episodes.jsonl")
            save()
        if asked_to_stop:
            raise SystemExit(f"stopped; go on with: python train.py --resume {home}")

    # ---- what a person gets ---------------------------------------------------------------------------
    bar.close()
    evaluate("final", state["update"])
    if ahead:
        ahead.close()
    seconds["total"] = spent_before + time.monotonic() - started
    if elsewhere:
        return home
    write_json(folder / "summary.json", report.summarize_run(folder, asdict(cfg), state, machine(policy)))
    report.write(folder)
    log.finish()
    print(
        f"\n{(folder / 'report.md').read_text().split('## Config')[0]}\nall of it: {folder}/report.html, {folder}/report.md, {folder}/curves.png"
    )
    return folder


# ------------------------------------------------------------------------------------------------ helpers


def task_seeds(cfg: Config, step: int) -> list[int]:
    """The tasks of an update: never the same twice, and others for another --seed."""
    first = TRAIN_SEEDS + (cfg.seed * 100_000 + step) * cfg.num_tasks
    return [first + i for i in range(cfg.num_tasks)]


def finished(cfg: Config, state: dict) -> bool:
    """Are the updates done? With --until-converged: has the training reward settled as well?"""
    if state["update"] < cfg.updates or not cfg.until_converged:
        return state["update"] >= cfg.updates
    return state["update"] >= cfg.max_updates or metrics.trend(state["rewards"]).settled


def arguments(words: list[str]) -> list[str]:
    """The command line. Beside --api-base a bare --eval-only is dropped: there is no run folder to name, and nothing else to do."""
    bare = lambda i: words[i] == "--eval-only" and (i + 1 == len(words) or words[i + 1].startswith("--"))
    over_api = any(word.startswith(("--api-base", "--api_base")) for word in words)
    return [word for i, word in enumerate(words) if not (over_api and bare(i))]


def main() -> None:
    parallel.start()
    words = arguments(sys.argv[1:])
    cfg = tyro.cli(Config, args=words)
    if cfg.preset in PRESETS:  # once more, with the preset's values as defaults: a flag that you set wins
        cfg = tyro.cli(Config, args=words, default=replace(Config(), **PRESETS[cfg.preset]))
    try:
        if (cfg.eval_only or cfg.api_base) and parallel.world() > 1:
            raise ValueError("--eval-only is for one process; leave torchrun out")
        if cfg.api_base:
            evaluate_api(cfg)
        elif cfg.eval_only:
            evaluate_only(cfg)  # evaluate.py
        else:
            if not cfg.resume and parallel.rank() == 0:
                check(cfg)
            train(cfg)
            parallel.stop()
    except ValueError as error:
        raise SystemExit(str(error)) from None
    except torch.OutOfMemoryError as error:
        raise SystemExit(f"out of GPU memory ({(str(error).splitlines() or ['no more is known'])[0]}); the last checkpoint is kept: --resume it with a lower --micro-tokens, "
                         "or start again with --gradient-checkpointing") from None  # fmt: skip
    except FloatingPointError as error:
        raise SystemExit(
            f"training stopped: {error}; the last good checkpoint is kept for --eval-only, start a run with a lower --lr"
        ) from None
    except OSError as error:
        if error.errno is None:
            raise
        raise SystemExit(f"{error.strerror}: {error.filename or 'writing the run folder'}; the last checkpoint is kept, "
                         "make room or mend the path, then --resume") from None  # fmt: skip
    finally:
        for bar in list(tqdm._instances):  # or the sentence is glued to a bar that is still open
            bar.close()


if __name__ == "__main__":
    sys.exit(main())
