"""The recipe, top to bottom: a chat model, a warm-up by SFT, then GRPO, with an honest evaluation around each.

    python train.py --env letters --difficulty 6
    python train.py --env alphabet
    python train.py --env swarm --difficulty medium

    config -> policy -> eval "before" -> SFT on 100 expert episodes -> eval "after_sft"
           -> (rollout: 8 tasks x 8 samples -> GRPO: one step) x updates, an eval now and then -> eval "final" -> report

With --async-rollouts N a second process samples N batches ahead while this one trains (fast/ahead.py); without it, one thing after the other.

On a machine without a GPU, or that cannot reach the hub, the same command trains the embedded models/pico_base/, or for swarm models/pico_swarm/.
`python train.py --help` lists every flag with its reason; they are declared once, in settings.py.

A run leaves runs/NAME/: config.json, metrics.jsonl (a line an update), evals.jsonl (every task of every
evaluation), episodes.jsonl (samples to read), summary.json (the final numbers with intervals), report.md, curves.png,
report.html (curves and episodes to click through), checkpoint/. After any kill, `python train.py --resume runs/NAME` goes
on where the checkpoint stands; on CPU the metrics come out the same to the last bit, because every random number is drawn from a
seed and a place, never from what was drawn before (with --async-rollouts they do not: the batches under way are sampled anew).
`python train.py --eval-only runs/NAME` evaluates its checkpoint again, on the same tasks or, with --difficulty and other settings of
the environment, on others. `--eval-only --api-base URL --model NAME` does it with any OpenAI-compatible endpoint (bridges/api.py).
"""

import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import tyro
from tqdm import tqdm

import metrics
from bookkeeping import doctor, records, report
from bookkeeping.checkpoint import flush, load_tensors, restore, save_checkpoint
from bookkeeping.run import (
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
from bridges.api import evaluate_api
from evaluate import broken, evaluate_only, evaluate_policy, greedy, summarize
from fast import parallel
from fast.ahead import Ahead, Job
from fast.sampler import make_sampler
from grpo import update
from learn import failures
from policy import choose_model, load_policy
from rollout import play
from settings import LEVELS, MOST_UPDATES, PRESETS, PROMOTE, SFT_SEEDS, TRAIN_SEEDS, Config, by_size, check, eval_sets, fill, kind, make_env
from sft import demonstrations, other_opening, sft_batches, sft_step

# Where the seconds of an update go. Without --async-rollouts all but "wait" come one after the other; with it the other process's rollout,
# environment and sync run beside this one's wait and train.
PARTS = tuple(report.BARS)
# What the line of an update tells beside the reward, where the environment has it.
TOLD = {"exact": "exact", "payoff": "payoff", "error_rate": "errors"}


# ------------------------------------------------------------------------------------------------ the recipe


def train(cfg: Config) -> Path:
    """One whole run; returns its folder.

    Raises ValueError and SystemExit with one sentence where the run cannot begin or go on, FloatingPointError where the policy is broken.
    """
    started = time.monotonic()  # not time.time: that one jumps when a machine's clock is set
    # Where torchrun started several processes, each runs these lines. The first one's folder is the run's; the others write into one that is
    # thrown away.
    opened = open_run(cfg) if parallel.rank() == 0 else None  # its third entry is the lock: the folder is ours while it lives
    cfg, home, saved = parallel.from_first(opened and (cfg, *opened[:2]))
    failures.put_in(cfg.break_)
    if cfg.api_base:
        raise ValueError(f"--resume {home}: it holds an evaluation over an API, there is nothing to train; start a run of its own")
    elsewhere = memory_folder() if parallel.rank() else None
    folder = Path(elsewhere.name) if elsewhere else home
    threads = cfg.threads or torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2) if cfg.async_rollouts else threads)  # the other half is for the process that samples
    path, why = parallel.from_first(choose_model(cfg.model, cfg.env) if parallel.rank() == 0 else None)  # it may ask the hub
    load = partial(load_policy, path, cfg.lora_rank, cfg.lora_alpha, cfg.device, cfg.seed)
    policy = load()
    fill(cfg, {"importance": "sequence"} if cfg.async_rollouts else {})  # on samples 8 updates old it learnt fastest (results/offpolicy)
    fill(cfg, by_size(policy.n_parameters, kind(cfg.env)))
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
        "rewards": [],  # mean reward of every update at this level, to notice a collapse
        "sft": {},
        "seconds": dict.fromkeys(("total", *PARTS, "eval", "sft"), 0.0),
        "tokens": dict.fromkeys(("sampled", "trained", "sft"), 0),
        "warnings": {},  # symptoms that were told (bookkeeping/doctor.py)
    }
    # Elsewhere torch chooses; on a GPU its choice takes 4 bytes a weight more while it steps.
    fused = True if policy.device.type == "cuda" else None
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=cfg.lr, weight_decay=0.0, fused=fused)
    if saved:
        state = restore(saved, policy, optimizer, state)
        print(f"resumed {folder} after update {state['update']}")
    trim(folder, state["update"])
    history = records.lines(folder / "metrics.jsonl")[-doctor.LOOKS_BACK :]
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
                policy, optimizer, groups, loss=cfg.loss, baseline=cfg.baseline, normalize=cfg.normalize and cfg.loss != "dr_grpo",
                temperature=cfg.temperature, max_tokens=cfg.max_tokens, micro_tokens=cfg.micro_tokens, epochs=cfg.epochs, kl=cfg.kl,
                reference=reference, importance=cfg.importance, version=step, max_off_policy=cfg.max_off_policy_steps,
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
            + "".join(f"  {title} {line[name]:.2f}" for name, title in TOLD.items() if name in line)
            + f"  length {line['reply_tokens']:5.1f}  signal {line['groups_with_signal']:.2f}  entropy {line.get('entropy', 0):.3f}"
            f"  grad {line['grad_norm']:.2f}  ratio {line.get('ratio', 1):.3f}  loss {line['loss']:+.4f}"
            f"  {t1 - t0:.1f}s + {clock['train']:.1f}s{broken(groups)}"
        )
        state["update"] = step + 1
        if history and history[-1]["level"] != level:
            state["rewards"] = []  # a harder level pays less, and that is no collapse
        state["rewards"].append(line["reward"])
        history = [*history, line][-doctor.LOOKS_BACK :]
        told = doctor.symptoms(history, state["rewards"])
        if step == 0 and (sentence := other_opening(policy, make_env(cfg, level), episodes[0])):
            told["template"] = sentence
        tell_symptoms(state, told, folder)
        if cfg.curriculum and level == state["level"] != cfg.difficulty:
            climb(cfg, state, line)
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
    first = TRAIN_SEEDS + (cfg.seed * MOST_UPDATES + step) * cfg.num_tasks
    return [first + i for i in range(cfg.num_tasks)]


def finished(cfg: Config, state: dict) -> bool:
    """Are the updates done? With --until-converged: has the training reward settled as well?"""
    if state["update"] < cfg.updates or not cfg.until_converged:
        return state["update"] >= cfg.updates
    return state["update"] >= cfg.max_updates or metrics.trend(state["rewards"]).settled


def tell_symptoms(state: dict, symptoms: dict[str, str], folder: Path) -> None:
    """Print each {symptom: sentence} that was not told before, and keep it in the state. A collapse keeps the checkpoint that was saved last."""
    for name, sentence in symptoms.items():
        if name in state["warnings"]:
            continue
        state["warnings"][name] = f"update {state['update']}: {sentence}"
        tqdm.write(f"{name.upper()} at {state['warnings'][name]}")
        if name == "collapse" and parallel.rank() == 0:
            shutil.copytree(folder / "checkpoint", folder / "checkpoint-at-collapse", dirs_exist_ok=True)  # the next save is worse


def climb(cfg: Config, state: dict, line: dict) -> None:
    """One level up if the last five updates of this one were good enough (PROMOTE); line: the newest of metrics.jsonl."""
    measure, enough = PROMOTE[cfg.env]
    state["recent"] = (state["recent"] + [line[measure]])[-5:]
    if len(state["recent"]) == 5 and sum(state["recent"]) / 5 >= enough:
        state["level"], state["recent"] = LEVELS[cfg.env][LEVELS[cfg.env].index(state["level"]) + 1], []


def arguments(words: list[str]) -> list[str]:
    """The command line. Beside --api-base a bare --eval-only is dropped: there is no run folder to name, and nothing else to do."""
    bare = lambda i: words[i] == "--eval-only" and (i + 1 == len(words) or words[i + 1].startswith("--"))
    over_api = any(word.startswith(("--api-base", "--api_base")) for word in words)
    return [word for i, word in enumerate(words) if not (over_api and bare(i))]


def main() -> None:
    """The command line: one run or one evaluation. Whatever is known to go wrong ends it with one sentence and no traceback."""
    parallel.start()
    words = arguments(sys.argv[1:])
    cfg = tyro.cli(Config, args=words)
    try:
        if cfg.preset in PRESETS or cfg.break_:  # once more, with these values as defaults: a flag that you set wins
            chosen = failures.settings(cfg.break_) if cfg.break_ else PRESETS[cfg.preset]
            cfg = tyro.cli(Config, args=words, default=replace(Config(), **chosen))
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
        raise SystemExit(f"out of GPU memory ({(str(error).splitlines() or ['no more is known'])[0]}); the last checkpoint is kept: --resume it "
                         "with a lower --micro-tokens, or start again with --gradient-checkpointing") from None  # fmt: skip
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
