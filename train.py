"""The recipe: SFT warm-up of a chat model, then GRPO, each between two evaluations.

    python train.py --env letters --difficulty 6        (or --env alphabet, --env swarm)

    config -> policy -> eval "before" -> SFT on 100 expert episodes -> eval "after_sft"
           -> (sample, compare, learn, look) x updates -> eval "final"

Without a GPU or the Hugging Face hub it trains a model from models/. If a run was
killed, `--resume runs/NAME` continues it.
"""

import os
import sys
from datetime import date
from functools import partial
from pathlib import Path

# Printed before torch is imported; under torchrun, only by the first process.
if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    print("torch is loading, which takes seconds", flush=True)

import evaluate
import settings
from bookkeeping import chat, refusals
from bookkeeping.run import open_run
from fast import parallel
from fast.ahead import open_rollouts
from fast.machine import checkpoint_activations, choose_model, fit_memory, speak_utf8
from grpo import compute_advantages, update
from learn import failures
from policy import adam, load_policy, set_learning_rate
from rollout import prompt_ids
from settings import Config, make_env
from sft import sft


def train(cfg: Config, user_flags: set[str] = frozenset()) -> Path:
    """One run; returns its folder. user_flags: names of the flags the user gave."""
    run = open_run(cfg, user_flags)  # its folder and, with --resume, its checkpoint
    policy, rollouts = prepare(cfg, user_flags)
    optimizer = adam(policy, cfg.lr)
    run.start(policy, optimizer)  # from its checkpoint, if there is one
    state = run.state  # how many updates are done, and what else a resumed run needs

    # ---- SFT: learn the form of a reply from a few demonstrations --------------------
    if not run.saved:  # no checkpoint, so SFT is still to be done
        evaluate_stage(cfg, run, policy, rollouts, "before")
        # new_env() makes an environment. It is guarded: if it raises or hangs, its
        # episode fails and the run goes on; but a demonstration that fails ends it.
        new_env = partial(refusals.guarded, make_env, cfg, cfg.difficulty)
        seeds = settings.sft_seeds(cfg)
        # paused(): the sampler frees its memory meanwhile. learning(): gradients are
        # on, and their memory is freed at the end.
        with run.clock("sft"), rollouts.paused(), policy.learning():
            result = sft(policy, new_env, seeds, cfg, run.end_if_asked)
        run.log_sft(result)
        run.warn(result["warnings"])  # if demonstrations are too long
        run.warn(refusals.prompt_warnings(policy, cfg))  # if SFT has other prompts
        evaluate_stage(cfg, run, policy, rollouts, "after_sft")
        run.save(policy, optimizer)
    reference = run.reference(policy)  # what --kl compares with

    # ---- GRPO: replies that score above their group's mean become likelier -----------
    print(evaluate.healthy_values(cfg))
    while not run.finished():
        # 1 sample: the current policy plays each task k times, one group per task.
        # fast/ahead.py gives the sampler the new weights, then calls rollout.play.
        # state.level: how hard the tasks are (--curriculum raises it).
        groups = rollouts.batch(state.updates, state.level)  # [num_tasks][k]
        # 2 compare: how much better was each episode than the others of its group?
        advantages = compute_advantages(groups, cfg)  # [num_tasks, k]
        # 3 learn: make the tokens of the better ones likelier, of the worse less likely
        set_learning_rate(optimizer, settings.learning_rate(cfg, state.updates))
        with rollouts.paused(), policy.learning():
            stats = update(policy, optimizer, groups, advantages, cfg, reference)
        # 4 look: log it; evaluate and save now and then
        state.updates += 1
        run.log(groups, evaluate.summarize(groups) | stats, rollouts)
        if state.updates == 1:
            print(evaluate.signal_verdict(groups))  # can GRPO learn from such a batch?
        last = run.finished()
        if state.updates % cfg.eval_every == 0 and not last:
            evaluate_stage(cfg, run, policy, rollouts, "train")
        if state.updates % cfg.save_every == 0 or last or run.stop_asked():
            # two of the groups are kept, to be read
            run.save(policy, optimizer, groups, advantages)
        run.end_if_asked()  # after Ctrl-C it has saved and ends here (see --resume)
    evaluate_stage(cfg, run, policy, rollouts, "final")
    rollouts.close()
    return run.write_report()


def prepare(cfg: Config, user_flags: set[str]):
    """Load the model, get ready to play, and fill in cfg: (policy, rollouts).

    cfg is changed here: some settings depend on the model, such as the learning rate,
    or on the free memory.
    """
    if cfg.break_:
        failures.put_in(cfg.break_)  # a mistake on purpose

    # model: its name. reason: a line that says why this one (--model auto depends on
    # the machine). to_fit: settings with which it fits the card. Several processes
    # follow the first one's choice.
    choice = choose_model(*settings.model_request(cfg, user_flags))
    model, reason, to_fit = parallel.broadcast(choice)
    # Some chat templates write the date.
    today = parallel.broadcast(cfg.today or date.today().isoformat())

    # Load it. (With --async-rollouts the process that samples loads it, too.)
    load = partial(
        load_policy, model, cfg.lora_rank, cfg.lora_alpha, cfg.device, cfg.seed, today
    )
    policy = load()

    # Fill in what depends on the model.
    settings.fill_in_defaults(cfg, policy.n_parameters, reason, model, to_fit)
    print(chat.about(policy.tokenizer, today))
    # The date is kept, for --resume, only if the template writes it.
    cfg.today = today if chat.read_template(policy.tokenizer).dated else ""
    refusals.check(cfg)  # main has checked the flags, this checks what was filled in

    # Fill in what depends on memory, judging by the length of a first prompt.
    # env_of_level(level) -> an environment, guarded as above
    env_of_level = partial(refusals.guarded, make_env, cfg)
    env = env_of_level(cfg.difficulty)
    opening = env.reset(settings.task_seeds(cfg, 0)[0])
    prompt = prompt_ids(policy, opening, env.tools, env.think)
    turns = getattr(env, "max_turns", 1)
    line = fit_memory(cfg, policy, len(prompt), turns)  # may set cfg.micro_tokens
    print(line, end="")
    if cfg.gradient_checkpointing:
        checkpoint_activations(policy)
    return policy, open_rollouts(
        cfg, policy, load, env_of_level, task_seeds=partial(settings.task_seeds, cfg)
    )


def probe(cfg: Config, user_flags: set[str]) -> None:
    """--probe: SFT, a first batch, and what GRPO could learn from it. Saves nothing."""
    policy, rollouts = prepare(cfg, user_flags)
    with rollouts.paused(), policy.learning():
        new_env = partial(refusals.guarded, make_env, cfg, cfg.difficulty)
        sft(policy, new_env, settings.sft_seeds(cfg), cfg, end_if_asked=lambda: None)
    level = settings.levels_of(cfg.env)[0] if cfg.curriculum else cfg.difficulty
    print(*evaluate.probe_report(rollouts.batch(0, level), cfg), sep="\n")
    rollouts.close()


def evaluate_stage(cfg: Config, run, policy, rollouts, stage: str) -> None:
    """Play the development tasks greedily; stage: before, after_sft, train or final."""
    with run.clock("eval"):
        done = run.state.updates
        greedy = partial(rollouts.greedy, update=done)
        sets, seeds = settings.eval_sets(cfg), settings.dev_seeds(cfg)
        results = evaluate.evaluate_policy(
            policy, greedy, sets, seeds, run.folder, stage, done
        )
        run.log_evaluation(results)


def main() -> None:
    """The command line: a run or an evaluation. A known error prints one sentence."""
    speak_utf8()
    parallel.start()
    with refusals.errors_in_one_sentence():
        cfg, user_flags = settings.command_line(sys.argv[1:])
        if cfg.api_base:
            from bridges.api import evaluate_api  # another model, over HTTP

            return evaluate_api(cfg)
        if cfg.eval_only:
            return evaluate.evaluate_only(cfg, user_flags)
        # Refuse what cannot work, before a model is loaded. (With --resume, open_run
        # checks the flags together with those of the run's folder.)
        if not cfg.resume and parallel.rank() == 0:
            refusals.check(cfg)
            refusals.warn_unread_flags(cfg, user_flags)
            refusals.preflight(cfg)
        if cfg.probe and not cfg.resume:
            probe(cfg, user_flags)
        else:
            train(cfg, user_flags)
        parallel.stop()


if __name__ == "__main__":
    main()
