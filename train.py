"""The recipe: an SFT warm-up, then GRPO, with an evaluation before, between and after.

    python train.py --env letters --difficulty 6        (or --env alphabet, --env swarm)

    config -> policy -> eval "before" -> SFT on 100 expert episodes -> eval "after_sft"
           -> (sample, compare, learn, look) x updates -> eval "final"

This file adds speed (fast/) and records (bookkeeping/) to the chapters: the .py files
beside it, but not pico.py. learn/loop.py is the same loop without either.

Without a GPU, or if the Hugging Face hub cannot be reached, it trains a model from
models/. If a run was killed, `--resume runs/NAME` continues it.
"""

import os
import sys
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

# Printed before torch is imported; under torchrun, only by the first process.
if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    print("torch is loading, which takes seconds", flush=True)

import settings
from bookkeeping import failures, refusals
from bookkeeping.again import evaluate_only, probe
from bookkeeping.columns import log_columns
from bookkeeping.pretrained import check_passes, load_checked, load_teacher
from bookkeeping.run import open_run, reading_guide
from chat import about, prompt_ids, read_template
from evaluate import eval_sets
from fast import logprobs, parallel
from fast.ahead import open_collector
from fast.machine import checkpoint_activations, choose_model, fit_memory, speak_utf8
from grpo import compute_advantages, teacher_advantages, update
from policy import PLAIN, Backend, Policy, adam, set_learning_rate
from settings import Config, make_env
from sft import sft


def train(cfg: Config, user_flags: set[str] = frozenset()) -> Path:
    """One run; returns its folder. user_flags: names of the flags the user gave."""
    # open_run: with --resume, cfg takes the saved settings. prepare: what depends on
    # the model is filled in.
    run = open_run(cfg, user_flags)
    cfg, policy, new_env_at, collector, teacher = prepare(cfg, user_flags)
    backend = replace(choose_backend(cfg, policy), bar=run.bar)
    optimizer = adam(policy, cfg.lr)
    # Advantages come from the rewards or, with --teacher, from a second model.
    set_advantages = (
        partial(teacher_advantages, teacher, backend=backend)
        if teacher
        else compute_advantages
    )
    # start loads the checkpoint, if there is one (open_run has found its folder).
    run.start(cfg, policy, optimizer, collector)
    state = run.state  # how many updates are done, and what else a resumed run needs
    evaluate = partial(evaluate_stage, cfg, run, policy, collector, new_env_at)

    # ---- SFT: learn the form of a reply from a few demonstrations --------------------
    if not run.saved:  # no checkpoint, so SFT is still to be done
        evaluate("before")
        # paused(): the sampler lends its memory to the trainer. learning(): the
        # gradients' memory is freed at the end.
        with run.clock("sft"), collector.paused(), policy.learning():
            new_env = partial(new_env_at, cfg.difficulty)
            result = sft(policy, new_env, settings.sft_seeds(cfg), cfg, backend)
        run.log_sft(result)
        # Warn if RL's prompts are written differently from SFT's.
        run.warn(refusals.prompt_warnings(policy, cfg, new_env_at))
        run.save(policy, optimizer, backend)  # a resumed run need not do SFT again
    if state.updates == 0:  # also after a run that was killed between SFT and RL
        evaluate("after_sft")
    reference = run.reference(policy)  # what --kl compares with; None without --kl

    # ---- GRPO: replies that score above their group's mean become likelier -----------
    print(reading_guide(cfg))  # once: how to read the lines below
    while not run.finished():
        # 1 sample: the sampler gets the new weights, then rollout.play plays each task
        # k times, one group per task. (level: how hard the tasks are; it changes only
        # with --curriculum.)
        groups = collector.collect(state.updates, state.level)  # [num_tasks][k]
        episodes = [e for group in groups for e in group]
        # 2 compare: how much better was each episode than the others of its group? Sets
        # Episode.advantages, one per sampled token (grpo.compute_advantages).
        set_advantages(groups, cfg)
        # 3 learn: make the tokens of the better ones likelier, of the worse less likely
        lr = settings.learning_rate(cfg, state.updates)
        set_learning_rate(optimizer, lr)
        with collector.paused(), policy.learning():
            result = update(policy, optimizer, episodes, cfg, reference, backend)
            # The columns of metrics.jsonl. They may need another forward pass, so this
            # runs while the trainer has the memory.
            stats = log_columns(result, groups, policy, cfg, backend)
        # 4 look: log it; evaluate and save now and then
        state.updates += 1
        run.log(groups, stats | {"lr": lr}, collector)
        state.level = run.next_level()
        last = run.finished()
        if state.updates % cfg.eval_every == 0 and not last:
            evaluate("train")
        if last or run.checkpoint_due():
            # also keeps two groups as readable text
            run.save(policy, optimizer, backend, groups)
        run.stop_if_asked()  # Ctrl-C: stop; --resume continues from the last checkpoint
    evaluate("final")
    collector.close()
    return run.write_report()


def prepare(cfg: Config, user_flags: set[str]):
    """Load the model, get ready to play.

    Returns (config, policy, new_env_at, collector, teacher). new_env_at(level) makes an
    environment. Environments other than this repository's env_*.py are guarded: if one
    raises or hangs, its episode fails and the run goes on. teacher: None without
    --teacher.
    """
    if cfg.break_:
        failures.plant(cfg.break_)  # --break: plant a known bug (learn/FAILURES.md)
    cfg, policy, load_copy = load_model(cfg, user_flags)
    refusals.check(cfg)  # main has checked the flags; this checks what was filled in
    new_env_at = partial(refusals.guarded, make_env, cfg)
    # The first task's prompt: the teacher is checked with it, sampler and trainer are
    # compared, and an update's memory is planned from its length.
    env = new_env_at(cfg.difficulty)
    opening = env.reset(settings.task_seeds(cfg, 0)[0])
    prompt = prompt_ids(policy, opening, env.tools, env.think)
    teacher = load_teacher(cfg, policy, prompt, opening, env) if cfg.teacher else None
    turns = getattr(env, "max_turns", None)  # None: it does not say
    # Do sampler and trainer agree? (Not asked if a bug is planted.)
    if not cfg.break_:
        check_passes(policy, cfg, prompt, turns, choose_backend(cfg, policy))
    message = fit_memory(cfg, policy, len(prompt), turns)  # sets cfg.micro_tokens
    print(message, end="")
    if cfg.gradient_checkpointing:
        checkpoint_activations(policy)
    seeds = partial(settings.task_seeds, cfg)
    collector = open_collector(cfg, policy, load_copy, new_env_at, task_seeds=seeds)
    return cfg, policy, new_env_at, collector, teacher


def load_model(cfg: Config, user_flags: set[str]):
    """Choose the model and load the policy.

    Returns cfg completed with what depends on the model (such as the learning rate),
    the policy, and load_copy(), which loads another copy of it.
    """
    # model: its name. reason: why this one (--model auto depends on the machine).
    # memory_settings: {setting: value} with which it fits the card. If there are
    # several processes, the first one decides.
    choice = choose_model(*settings.model_request(cfg, user_flags))
    model, reason, memory_settings = parallel.broadcast(choice)
    today = parallel.broadcast(cfg.today or date.today().isoformat())
    lora = cfg.lora_rank, cfg.lora_alpha
    load_copy = partial(
        load_checked, model, *lora, cfg.device, cfg.seed, today, cfg.dtype
    )
    policy = load_copy()
    # If the chat template writes today's date, the run keeps its first date, so that a
    # resumed run has the same prompts.
    run_date = today if read_template(policy.tokenizer).dated else ""
    cfg = settings.complete(cfg, policy.n_parameters, model, memory_settings, run_date)
    print(
        f"{reason}\nchosen for {policy.n_parameters / 1e6:.1f}M parameters: lr "
        f"{cfg.lr:g}, sft_lr {cfg.sft_lr:g}, updates {cfg.updates}, max_tokens "
        f"{cfg.max_tokens}\n{about(policy.tokenizer, today)}"
    )
    return cfg, policy, load_copy


def choose_backend(cfg: Config, policy: Policy) -> Backend:
    """fast/'s implementation, or with --plain the chapters' own.

    Both split the work over the processes.
    """
    backend = replace(PLAIN, shard=parallel.shard, all_reduce=parallel.all_reduce)
    if cfg.plain:
        return backend
    shares = logprobs.shares_prompts(policy.lm)
    return replace(backend, forward=logprobs.forward, shares_prompts=shares)


def evaluate_stage(cfg: Config, run, policy, collector, new_env_at, stage: str) -> None:
    """Play the development tasks greedily; stage: before, after_sft, train or final."""
    with run.clock("eval"):
        seeds = settings.dev_seeds(cfg)
        sets = eval_sets(cfg, new_env_at)  # {name: (is it trained on?, new_env)}
        bar = parallel.bar(sets.items(), desc=f"eval {stage}", leave=False)
        for tasks, (is_trained_level, new_env) in bar:
            # groups [n][1]
            groups = collector.greedy(new_env, seeds, update=run.state.updates)
            run.log_evaluation(policy, groups, tasks, is_trained_level, stage)
        run.look_at_evaluations()


def main() -> None:
    """The command line: a run or an evaluation.

    A known error is reported in one sentence.
    """
    speak_utf8()
    parallel.start()
    with refusals.errors_in_one_sentence():
        cfg, user_flags = settings.command_line(sys.argv[1:], failures.SETTINGS)
        if cfg.api_base:
            from bridges.api import evaluate_api  # another model, over HTTP

            return evaluate_api(cfg)
        if cfg.eval_only:
            return evaluate_only(cfg, user_flags)
        # Refuse what cannot work, before a model is loaded. (With --resume, open_run
        # checks the flags together with those of the run's folder.)
        if not cfg.resume and parallel.rank() == 0:
            refusals.check(cfg)
            refusals.warn_unread_flags(cfg, user_flags)
            refusals.preflight(cfg)
        if cfg.probe and not cfg.resume:
            cfg, policy, new_env_at, collector, _ = prepare(cfg, user_flags)
            probe(cfg, policy, new_env_at, collector, choose_backend(cfg, policy))
        else:
            train(cfg, user_flags)
        parallel.stop()


if __name__ == "__main__":
    main()
