"""The recipe, top to bottom: a chat model, a warm-up by SFT, then GRPO, with an honest evaluation around each.

    python train.py --env letters --difficulty 6
    python train.py --env alphabet

    config -> policy -> eval "before" -> SFT on 100 expert episodes -> eval "after_sft"
           -> (rollout: 8 tasks x 8 samples -> GRPO: one step) x updates, an eval now and then -> eval "final" -> report

On a machine without a GPU, or that cannot reach the hub, the same command trains the embedded pico_base/.
`python train.py --help` lists every flag with its reason; they are declared once, just below.

A run leaves runs/<name>/: config.json, metrics.jsonl (a line an update), evals.jsonl (every task of every
evaluation), episodes.jsonl (samples to read), summary.json (the final numbers with intervals), report.md, curves.png,
report.html (curves and episodes to click through), checkpoint/. After any kill, `python train.py --resume runs/<name>` goes on where the checkpoint stands; on CPU the
metrics come out the same to the last bit, because every random number is drawn from a seed and a place, never
from what was drawn before.
"""

import json
import os
import platform
import resource
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import tyro
from tqdm import tqdm

import metrics
import report
from env_alphabet import Alphabet
from env_letters import Letters
from grpo import CLIP, collate, group_advantages, update
from policy import choose_model, find_checkpoint, load_checkpoint, load_policy, save_checkpoint, token_logprobs
from rollout import play, segments
from sampler import TorchSampler
from sft import demonstrations, sft_batches, sft_step

# Tasks are drawn from a seed. These ranges never meet; pretraining (lab/pretrain.py) starts at 3e9.
TRAIN_SEEDS, SFT_SEEDS, EVAL_SEEDS = 0, 1_000_000_000, 2_000_000_000
EVAL_TIERS = (3, 5, 6)  # always evaluated, beside the tier that is trained


@dataclass
class Config:
    """RL post-training of a chat model: SFT warm-up on a scripted expert, then GRPO."""

    # task
    env: str = "letters"  # which environment: letters or alphabet
    think: bool = True  # may the policy think before it answers? --no-think is the seed's plateau
    # letters
    difficulty: int = 6  # tier 1 to 10; 6 is 40-80 random letters, 8-12 of them asked
    reward: str = "binary"  # binary pays exact answers only; partial pays every right letter, and so also guessing
    curriculum: bool = False  # begin at tier 1 and go up when 75% of the last 5 updates' episodes are exact
    # alphabet: the settings of the public single-GPU recipe
    min_turns: int = 3
    max_turns: int = 3
    min_names: int = 1  # new names a turn
    max_names: int = 4
    similarity_power: float = 8.0  # pushes the 0.66 that names as given get for nothing down to 0.08
    power_per_turn: bool = False  # False: average the turns, then power once; True: power each turn, then average
    # policy
    model: str = "auto"  # folder or hub id of a causal LM; auto: Qwen3-4B-Instruct-2507, or pico_base where it cannot run
    lora_rank: int = 32  # 0 trains all weights
    lora_alpha: int = 64  # the update is scaled by alpha / rank
    device: str = "auto"  # auto: cuda if there is one
    threads: int = 0  # CPU threads; 0 leaves torch's choice
    # SFT
    sft_style: str = "states"  # bare, states (thinks, but without the algorithm: the seed's data) or derives (the algorithm)
    sft_examples: int = 100  # demonstrations are scarce, rewards are not
    sft_steps: int = 50
    sft_batch: int = 8
    sft_lr: float | None = None  # None: by model size, see by_size
    # GRPO
    updates: int | None = None  # None: by model size
    until_converged: bool = False  # after these, go on until the training reward has settled (metrics.trend) …
    max_updates: int = 400  # … or so many updates are done; the learning rate stays at its end
    num_tasks: int = 8  # groups an update
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
    micro_tokens: int = 16384  # padded tokens a forward pass; changes memory, never the gradient
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, a third slower
    # evaluation: fixed held-out tasks, greedy
    eval_n: int = 256  # tasks a tier; 32 would give an interval 34 points wide
    eval_every: int = 20  # updates
    # run
    seed: int = 0
    name: str = ""  # of the run folder; empty: env, tier and time
    runs: str = "runs"  # where run folders live
    resume: str = ""  # a run folder to continue
    save_every: int = 10  # updates between checkpoints
    wandb: bool = True  # online if you are logged in, otherwise into the run folder, to sync later


def by_size(n_parameters: int, env: str) -> dict:
    """Defaults that depend on the model. Large: the runs this project grew out of. Small: what was stable on pico_base (results/)."""
    if n_parameters > 50e6:
        return {"lr": 5e-6, "sft_lr": 1e-5, "updates": 200, "max_tokens": {"letters": 2048, "alphabet": 768}[env]}
    updates, max_tokens = {"letters": (150, 320), "alphabet": (80, 640)}[env]
    return {"lr": 3e-4, "sft_lr": 1e-4, "updates": updates, "max_tokens": max_tokens}


def make_env(cfg: Config, difficulty: int):
    """A fresh environment; the only place that knows which there are."""
    if cfg.env == "letters":
        return Letters(difficulty, cfg.reward, cfg.think, cfg.sft_style)
    if cfg.env == "alphabet":
        return Alphabet(
            cfg.min_turns, cfg.max_turns, cfg.min_names, cfg.max_names, cfg.similarity_power, cfg.power_per_turn, cfg.think, cfg.sft_style
        )
    raise ValueError(f"--env {cfg.env}: there is no such environment; choose letters or alphabet")


def eval_sets(cfg: Config) -> dict[str, tuple]:
    """What is evaluated: {name of a set of tasks: (is it the one trained on?, make_env)}. The same name means the same tasks."""
    if cfg.env == "letters":
        tiers = sorted({*EVAL_TIERS, cfg.difficulty})
        return {f"tier {tier}": (tier == cfg.difficulty, lambda tier=tier: make_env(cfg, tier)) for tier in tiers}
    span = lambda low, high: str(low) if low == high else f"{low}-{high}"
    name = f"{span(cfg.min_turns, cfg.max_turns)} turns, {span(cfg.min_names, cfg.max_names)} names, power {cfg.similarity_power:g}"
    return {name + (" a turn" if cfg.power_per_turn else ""): (True, lambda: make_env(cfg, 0))}


def check(cfg: Config) -> None:
    """Refuse what cannot work, in one sentence, before anything is loaded."""
    make_env(cfg, cfg.difficulty)
    if cfg.curriculum and cfg.env != "letters":
        raise ValueError(f"--curriculum: {cfg.env} has no tiers to climb; leave it out")
    if cfg.loss not in CLIP:
        raise ValueError(f"--loss {cfg.loss}: choose one of {', '.join(CLIP)}")
    if cfg.baseline not in ("group", "batch", "none"):
        raise ValueError(f"--baseline {cfg.baseline}: choose group, batch or none")
    if cfg.k < 2 and cfg.baseline == "group":
        raise ValueError("--k 1: a group of one has no baseline, every advantage would be 0; use --k 2 or more, or --baseline batch")
    for name in ("num_tasks", "k", "epochs", "eval_n", "eval_every", "save_every", "sft_examples", "sft_batch", "micro_tokens"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: must be at least 1")
    if cfg.until_converged and cfg.max_updates < (cfg.updates or 0):
        raise ValueError(f"--max-updates {cfg.max_updates}: must be at least --updates {cfg.updates}")
    for name in ("temperature", "lr", "sft_lr", "max_tokens", "updates", "sft_steps", "lora_rank", "lora_alpha", "kl", "lr_end"):
        value, least = getattr(cfg, name), 0 if name in ("updates", "sft_steps", "lora_rank", "kl", "lr_end") else 1e-12
        if value is not None and not value >= least:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be {'positive' if least else 'at least 0'}")


# ------------------------------------------------------------------------------------------------ the recipe


def train(cfg: Config) -> Path:
    """One whole run; returns its folder."""
    started = time.time()
    folder, saved = open_run(cfg)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    path, why = choose_model(cfg.model)
    policy = load_policy(path, cfg.lora_rank, cfg.lora_alpha, cfg.device, cfg.seed)
    for name, value in by_size(policy.n_parameters, cfg.env).items():
        if getattr(cfg, name) is None:
            setattr(cfg, name, value)
    print(why)
    print(f"chosen for {policy.n_parameters / 1e6:.1f}M parameters: lr {cfg.lr:g}, sft_lr {cfg.sft_lr:g}, "
          f"updates {cfg.updates}, max_tokens {cfg.max_tokens}")  # fmt: skip
    if cfg.gradient_checkpointing:
        policy.lm.gradient_checkpointing_enable()
        policy.lm.enable_input_require_grads()
        policy.model.train()  # transformers checkpoints only in training mode; LoRA's and the base's dropout are 0
    sampler = TorchSampler(policy)
    write_json(folder / "config.json", asdict(cfg))

    # What a resumed run needs, besides weights and optimizer. Kept in checkpoint/state.json.
    state = {
        "update": -1,  # updates done; -1: not even SFT
        "level": 1 if cfg.curriculum else cfg.difficulty,
        "recent": [],  # share of exact episodes in the last updates at this level
        "rewards": [],  # mean reward of every update, to notice a collapse
        "sft": {},
        "seconds": dict.fromkeys(("total", "rollout", "train", "eval", "sft"), 0.0),
        "tokens": dict.fromkeys(("sampled", "trained", "sft"), 0),
        "collapse": "",
    }
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=cfg.lr, weight_decay=0.0)
    if saved:
        optimizer_state, state = load_checkpoint(saved, policy)
        optimizer.load_state_dict(optimizer_state)
        print(f"resumed {folder} after update {state['update']}")
    trim(folder, state["update"])
    seconds, tokens, stop = state["seconds"], state["tokens"], StopSignal()
    spent_before = seconds["total"]
    log = open_wandb(cfg, folder)

    def evaluate(stage: str, done: int) -> None:
        """Greedy, on the same held-out tasks every time; each task's result goes to evals.jsonl, a few episodes to episodes.jsonl."""
        t = time.time()
        sampler.sync(max(done, 0))
        for name, (trained, env) in tqdm(eval_sets(cfg).items(), desc=f"eval {stage}", leave=False):
            groups = play(policy, sampler, env, [EVAL_SEEDS + i for i in range(cfg.eval_n)], 1, cfg.max_tokens, 0.0, 0)
            episodes = [g[0] for g in groups]
            append(folder / "evals.jsonl", {
                "update": done, "stage": stage, "tasks": name, "trained": trained, "reward": [e.reward for e in episodes],
                **{part: [e.components.get(part, 0.0) for e in episodes] for part in ("exact", "format")},
                "reply_tokens": [e.reply_tokens for e in episodes], "truncated": [e.stop_reason == "truncated" for e in episodes],
            })  # fmt: skip
            if trained:
                save_episodes(folder, done, stage, policy, groups[:8], cfg.temperature)
            exact, reward = (
                metrics.proportion(sum(e.components.get("exact", 0.0) for e in episodes), len(episodes)),
                metrics.mean([e.reward for e in episodes]),
            )
            tqdm.write(f"eval {stage:10} update {done:4}  {name}  exact {exact.percent()}  reward {reward}")
            log({f"eval/{name}/exact": exact.mean, f"eval/{name}/reward": reward.mean, "update": done})
        seconds["eval"] += time.time() - t

    def save() -> None:
        seconds["total"] = spent_before + time.time() - started
        save_checkpoint(folder / "checkpoint", policy, optimizer, state)

    # ---- SFT: learn the format from a few demonstrations -----------------------------------------------
    if state["update"] < 0:
        evaluate("before", -1)
        t = time.time()
        demos = demonstrations(policy, lambda: make_env(cfg, cfg.difficulty), [SFT_SEEDS + i for i in range(cfg.sft_examples)])
        sft_optimizer = torch.optim.AdamW(policy.trainable().values(), lr=cfg.sft_lr, weight_decay=0.0)
        losses = []
        batches = sft_batches(demos, cfg.sft_batch, cfg.sft_steps, cfg.seed)
        for i, batch in enumerate(tqdm(batches, desc="SFT", disable=not batches)):
            for group in sft_optimizer.param_groups:  # linear warm-up over a tenth, then linear to zero
                group["lr"] = cfg.sft_lr * min((i + 1) / max(1, cfg.sft_steps / 10), (cfg.sft_steps - i) / cfg.sft_steps)
            losses.append(sft_step(policy, sft_optimizer, batch, cfg.micro_tokens)["loss"])
            tokens["sft"] += sum(e.reply_tokens for e in batch)
            stop.check("SFT starts again on --resume")
        tokens["trained"] += tokens["sft"]
        seconds["sft"] = time.time() - t
        state["sft"] = {"loss_first": losses[0], "loss_last": losses[-1]} if losses else {}
        evaluate("after_sft", 0)
        state["update"] = 0
        save()
    reference = {name: p.detach().clone() for name, p in policy.trainable().items()} if cfg.kl and state["update"] == 0 else None
    if cfg.kl and reference is None:
        reference = torch.load(folder / "reference.pt", weights_only=True)
    elif cfg.kl:
        torch.save(reference, folder / "reference.pt")

    # ---- GRPO: sample, score, make what scored above its group's mean likelier ----------------------------
    print("a loss near 0 and a ratio of 1.000 are what on-policy GRPO looks like when it is healthy; watch the reward")
    bar = tqdm(initial=state["update"], total=cfg.updates, desc="GRPO")
    while not finished(cfg, state):
        step = state["update"]
        t0 = time.time()
        sampler.sync(step)
        first = TRAIN_SEEDS + (cfg.seed * 100_000 + step) * cfg.num_tasks
        level = state["level"]
        groups = play(policy, sampler, lambda level=level: make_env(cfg, level), [first + i for i in range(cfg.num_tasks)],
                      cfg.k, cfg.max_tokens, cfg.temperature, noise=cfg.seed)  # fmt: skip
        t1 = time.time()
        for group in optimizer.param_groups:
            group["lr"] = cfg.lr * min((step + 1) / max(1, cfg.warmup), 1 - (1 - cfg.lr_end) * min(1, step / cfg.updates))
        stats = update(
            policy, optimizer, groups, loss=cfg.loss, baseline=cfg.baseline, normalize=cfg.normalize and cfg.loss != "dr_grpo", temperature=cfg.temperature,
            max_tokens=cfg.max_tokens, micro_tokens=cfg.micro_tokens, epochs=cfg.epochs, kl=cfg.kl, reference=reference,
        )  # fmt: skip
        t2 = time.time()

        episodes = [e for group in groups for e in group if e.stop_reason != "error"]
        line = {"update": step + 1, "level": level, **summarize(groups), **stats, "seconds_rollout": t1 - t0, "seconds_train": t2 - t1}
        seconds["rollout"], seconds["train"] = seconds["rollout"] + t1 - t0, seconds["train"] + t2 - t1
        tokens["sampled"] += sum(e.reply_tokens for e in episodes)
        tokens["trained"] += stats["trained_tokens"]
        append(folder / "metrics.jsonl", line)
        log(line)
        tqdm.write(
            f"update {step + 1:4}  reward {line['reward']:.2f} ± {(line['reward_high'] - line['reward_low']) / 2:.2f}  exact {line['exact']:.2f}"
            f"  length {line['reply_tokens']:5.1f}  signal {line['groups_with_signal']:.2f}  entropy {line.get('entropy', 0):.3f}"
            f"  grad {line['grad_norm']:.2f}  ratio {line.get('ratio', 1):.3f}  loss {line['loss']:+.4f}"
            f"  {t1 - t0:.1f}s + {t2 - t1:.1f}s"
        )
        state["update"] = step + 1
        state["rewards"].append(line["reward"])
        if (fallen := metrics.collapsed(state["rewards"])) and not state["collapse"]:
            state["collapse"] = f"update {step + 1}: {fallen}"
            tqdm.write("COLLAPSE " + state["collapse"])
            shutil.copytree(folder / "checkpoint", folder / "checkpoint-at-collapse", dirs_exist_ok=True)  # the last one saved
        state["recent"] = (state["recent"] + [line["exact"]])[-5:]
        if cfg.curriculum and level < cfg.difficulty and len(state["recent"]) == 5 and sum(state["recent"]) / 5 >= 0.75:
            state["level"], state["recent"] = level + 1, []
        last = finished(cfg, state)
        bar.update()
        if (step + 1) % cfg.eval_every == 0 and not last:
            evaluate("train", step + 1)
        if (step + 1) % cfg.save_every == 0 or last or stop.asked:
            save_episodes(folder, step + 1, "", policy, groups[:2], cfg.temperature)
            save()
        stop.check(f"go on with: python train.py --resume {folder}")

    # ---- what a person gets ---------------------------------------------------------------------------
    bar.close()
    evaluate("final", state["update"])
    seconds["total"] = spent_before + time.time() - started
    write_json(folder / "summary.json", report.summarize_run(folder, asdict(cfg), state, machine(policy)))
    report.write(folder)
    log.finish()
    print(
        f"\n{(folder / 'report.md').read_text().split('## Config')[0]}\nall of it: {folder}/report.html, {folder}/report.md, {folder}/curves.png"
    )
    return folder


# ------------------------------------------------------------------------------------------------ helpers


def summarize(groups) -> dict:
    """A line of metrics.jsonl about one batch of groups: means over episodes, the reward with its interval."""
    episodes = [e for group in groups for e in group if e.stop_reason != "error"]
    if not episodes:
        first = next(e.error for group in groups for e in group)
        raise RuntimeError(f"every episode of this update ended in an error ({first}); mend the environment and --resume")
    # Episodes of a group share a task and are not independent: the interval is over group means.
    by_group = [sum(e.reward for e in g) / len(g) for g in ([e for e in g if e.stop_reason != "error"] for g in groups) if g]
    reward = metrics.mean(by_group, resamples=500)
    names = episodes[0].components
    return {
        "reward": sum(e.reward for e in episodes) / len(episodes), "reward_low": reward.low, "reward_high": reward.high, "n": len(episodes),
        **{name: sum(e.components[name] for e in episodes) / len(episodes) for name in names},
        "reply_tokens": sum(e.reply_tokens for e in episodes) / len(episodes),
        "truncated": sum(e.stop_reason == "truncated" for e in episodes) / len(episodes),
        "errors": sum(e.stop_reason == "error" for g in groups for e in g),
    }  # fmt: skip


def open_run(cfg: Config) -> tuple[Path, Path | None]:
    """The run folder, and the checkpoint to go on from. With --resume, cfg becomes the saved config."""
    if cfg.resume:
        folder = Path(cfg.resume)
        if not (folder / "config.json").exists():
            raise SystemExit(f"--resume {folder}: there is no config.json in it, so it is no run folder; check the path")
        given = {f.name: getattr(cfg, f.name) for f in fields(cfg) if getattr(cfg, f.name) != f.default}
        for name, value in json.loads((folder / "config.json").read_text()).items():
            setattr(cfg, name, value)
        for name in (
            "updates",
            "until_converged",
            "max_updates",
            "wandb",
            "threads",
            "device",
        ):  # what may change without changing the experiment
            if name in given:
                setattr(cfg, name, given.pop(name))
        given.pop("resume", None)
        changed = [name for name, value in given.items() if getattr(cfg, name) != value]
        if changed:
            raise SystemExit(f"--{changed[0].replace('_', '-')} cannot change on --resume; start a new run for another experiment")
        cfg.resume = ""
        return folder, find_checkpoint(folder / "checkpoint")
    folder = Path(cfg.runs) / (
        cfg.name or f"{cfg.env}{f'-{cfg.difficulty}' if cfg.env == 'letters' else ''}-{time.strftime('%m%d-%H%M%S')}"
    )
    if folder.exists():
        raise SystemExit(f"{folder} exists; choose another --name, or continue it with --resume {folder}")
    folder.mkdir(parents=True)
    return folder, None


def trim(folder: Path, done: int) -> None:
    """Drop lines that a killed run wrote after its last checkpoint: they will be written again."""
    for name in ("metrics.jsonl", "evals.jsonl", "episodes.jsonl"):
        if (folder / name).exists():
            lines = []
            for line in (folder / name).read_text().splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:  # the line the kill cut in two
                    continue
                if record["update"] <= done and record.get("stage") != "final" and done >= 0:
                    lines.append(line)
            (folder / name).write_text("".join(line + "\n" for line in lines))


def finished(cfg: Config, state: dict) -> bool:
    """Are the updates done? With --until-converged: has the training reward settled as well?"""
    if state["update"] < cfg.updates or not cfg.until_converged:
        return state["update"] >= cfg.updates
    return state["update"] >= cfg.max_updates or metrics.trend(state["rewards"]).settled


@torch.no_grad()
def save_episodes(folder: Path, done: int, stage: str, policy, groups, temperature: float) -> None:
    """Whole groups for a person to read: text, and each sampled token with its log-prob. Groups of a rollout (stage "") also get their
    advantages and each token's importance ratio, how much likelier the update that followed has made it."""
    for g, group in enumerate(groups):
        advantages, ratios = [None] * len(group), [None] * len(group)
        if not stage:
            rewards = torch.tensor([[float("nan") if e.stop_reason == "error" else e.reward for e in group]])
            advantages = [round(a, 4) for a in group_advantages(rewards)[0].tolist()]
            batch = collate(group, torch.zeros(len(group)), torch.zeros(len(group)), policy.tokenizer.pad_token_id, policy.device)
            now, _ = token_logprobs(policy, batch.ids, batch.mask, temperature)  # [M]
            per_token = (now - batch.old_logprobs[batch.mask]).exp().tolist()
            for i, e in enumerate(group):
                ratios[i], per_token = per_token[: e.reply_tokens], per_token[e.reply_tokens :]
        for i, e in enumerate(group):
            append(folder / "episodes.jsonl", {
                "update": done, "source": "eval" if stage else "rollout", "stage": stage, "group": g, "member": i, "seed": e.seed,
                "reward": e.reward, "advantage": advantages[i], "components": e.components, "stop_reason": e.stop_reason, "error": e.error,
                "policy_version": e.policy_version, "reply_tokens": e.reply_tokens, "logprob": round(sum(e.logprobs), 3),
                "messages": e.messages, "segments": segments(policy, e, ratios[i]),
            })  # fmt: skip


def machine(policy) -> dict:
    """Where a result was obtained."""
    import peft
    import transformers

    gpu = torch.cuda.get_device_name() if policy.device.type == "cuda" else None
    return {
        "device": gpu or f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "peft": peft.__version__, "model": policy.name, "parameters": policy.n_parameters,
        "trainable": sum(p.numel() for p in policy.trainable().values()),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
    }  # fmt: skip


class StopSignal:
    """Ctrl-C or SIGTERM asks for a clean stop at the next safe point; a second Ctrl-C stops at once."""

    def __init__(self):
        self.asked = False
        if not hasattr(signal, "SIGTERM"):
            return
        for name in (signal.SIGINT, signal.SIGTERM):
            try:
                signal.signal(name, self.ask)
            except ValueError:  # not in the main thread, as in some tests
                return

    def ask(self, signum, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        tqdm.write("stopping at the next safe point (once more to stop at once)")

    def check(self, hint: str) -> None:
        if self.asked:
            raise SystemExit(f"stopped; {hint}")


def open_wandb(cfg: Config, folder: Path):
    """A function that logs a dict. wandb is online when logged in, else offline, and never asks."""
    if not cfg.wandb:
        log = lambda line: None
        log.finish = lambda: None
        return log
    import wandb

    try:
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        run = wandb.init(project="picoswarm", name=folder.name, dir=str(folder), config=asdict(cfg), mode=mode,
                         settings=wandb.Settings(silent=True, console="off"))  # fmt: skip
    except Exception as error:  # logging must not decide whether a run runs
        print(f"wandb could not start ({error}); going on without it")
        return open_wandb(Config(wandb=False), folder)
    if mode == "offline":
        print(f"wandb: not logged in, so logging offline; later: wandb sync {folder}/wandb/offline-run-*")
    log = lambda line: run.log(line)
    log.finish = run.finish
    return log


def append(path: Path, record: dict) -> None:
    with open(path, "a") as f:
        f.write(json.dumps(record) + "\n")


def write_json(path: Path, value: dict) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=1))
    new.replace(path)


def main() -> None:
    cfg = tyro.cli(Config)
    try:
        if not cfg.resume:
            check(cfg)
        train(cfg)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    except FloatingPointError as error:
        raise SystemExit(f"training stopped: {error}; the last good checkpoint is kept, try a lower --lr") from None
    except OSError as error:
        if error.errno is None:
            raise
        raise SystemExit(f"{error.strerror}: {error.filename or 'writing the run folder'}; the last checkpoint is kept, "
                         "make room or mend the path, then --resume") from None  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
