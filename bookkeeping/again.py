"""What train.py does in place of a run: --eval-only after one, and --probe before one.

--eval-only judges the checkpoint in a run folder, beside its base. It plays greedily and sampled,
with the adapter and without, on development tasks or, once, for a final table, on held-out ones.
Other rules (`--set`, `--max-tokens`) give a set of tasks another name, so that it is not compared
with the run's own.

--probe (at the end) plays a first batch and says what GRPO could learn from it.

Run me: `python train.py --eval-only runs/NAME`.
"""

from functools import partial
from pathlib import Path

import metrics
from bookkeeping import folder as run_folder
from bookkeeping import records, report, tables
from bookkeeping.pretrained import load_checked
from bookkeeping.refusals import check, guarded, preflight, warn_unread_flags
from bookkeeping.run import passes_of_sft, probe_report, record_evaluation
from evaluate import HELD_OUT_SEEDS, eval_sets
from fast import parallel
from fast.ahead import open_collector
from fast.machine import choose_model
from grpo import compute_advantages
from settings import DEV_SEEDS, Config, levels_of, make_env, seeds_from, settable, sft_seeds
from sft import sft

# The name of a set of tasks already says these settings (evaluate.eval_sets):
IN_NAME = (
    "version",
    "min_turns",
    "max_turns",
    "min_names",
    "max_names",
    "similarity_power",
    "power_per_turn",
)
# The flags that go with --eval-only: which tasks, the rules they are played by, and
# how all this is computed.
MAY_BE_TYPED = (
    "model",
    "difficulty",
    "eval_other_tiers",
    "eval_n",
    "set",
    "max_tokens",
    "reward",
    "device",
    "threads",
    "engine",
    "vllm_memory",
    "plain",
    "vllm_seeds",
    "vllm_sleep",
    "vllm_eager",
)
# Added to the name of a set of tasks if the policy is as it was before SFT and GRPO, or
# samples instead of taking the likeliest token.
BASE, SAMPLED = ", base", ", sampled"


def evaluate_only(given: Config, typed: set[str]) -> None:
    """Evaluate a run's checkpoint and its base; print each measure, and the gains.

    given: the Config of the command line, whose eval_only names the run folder; typed:
    the names of the flags that were typed. SystemExit or ValueError with one sentence
    if it cannot be done.
    """
    if parallel.world() > 1:
        raise ValueError("--eval-only is for one process; leave torchrun out")
    folder = Path(given.eval_only).absolute()
    cfg, saved, lock = run_folder.open_saved("--eval-only", folder, given)
    run_folder.mend(folder)
    if saved is None:
        raise SystemExit(f"--eval-only {folder}: it has no checkpoint yet; train first")
    check(cfg)  # your own class may no longer have the level
    sets, seeds = chosen_tasks(cfg, given, typed)
    preflight(cfg)
    if not run_folder.trained_with(saved, cfg.env):
        print(f"{cfg.env}: its code or its rows have changed since this run was trained")
    path, why, _ = choose_model(cfg.model, cfg.env, cfg.device)
    policy = load_checked(
        path, cfg.lora_rank, cfg.lora_alpha, cfg.device, cfg.seed, cfg.today, cfg.dtype
    )
    run_folder.refuse_base(saved, policy)
    collector = open_collector(cfg, policy)
    before = len(records.lines(folder / "evals.jsonl"))
    # Freshly loaded, its adapter adds nothing: this is the base.
    play_ways(cfg, policy, collector, sets, seeds, folder, 0, BASE)
    with records.foreign(folder):
        update = run_folder.load_checkpoint(saved, policy)[1]["updates"]  # Adam's moments go
    print(f"{folder} after {update} updates; {why}")
    play_ways(cfg, policy, collector, sets, seeds, folder, update)
    print_results(records.lines(folder / "evals.jsonl")[before:])
    with records.foreign(folder):
        report.write(folder)
    lock.release()
    collector.close()
    print(f"\nkept in {folder}/evals.jsonl and report.html")


def play_ways(
    cfg, policy, collector, sets, seeds, folder: Path, update: int, whose: str = ""
) -> None:
    """Play the sets greedily, then sampled."""
    for how, temperature in (("", 0.0), (SAMPLED, cfg.temperature)):
        for name, (trained, new_env) in sets.items():
            groups = collector.once(new_env, seeds, update, temperature)  # [n][1]
            shown = trained and not how + whose
            name += how + whose
            record_evaluation(folder, policy, groups, name, shown, "eval_only", update)


def print_results(lines: list[dict]) -> None:
    """Each measure that both have of a set, with its interval, and what the adapter gains.

    lines: of evals.jsonl, for each set one of the base and one of the adapter. Both played the same
    tasks, so the gain is paired.
    """
    rows, found = [], {line["tasks"]: line for line in lines}
    for tasks in (name for name in found if not name.endswith(BASE)):
        pair = records.same_tasks(found[tasks + BASE], found[tasks])
        for name in tables.measures(*pair):
            base, own = tables.paired(*pair, name)
            if not len(base):  # no task has it in both
                continue
            gain = metrics.gain(base, own)
            change = gain.points() if name in tables.PERCENT else gain.signed()
            cells = [tables.cell(name, base), tables.cell(name, own), change, str(gain.n)]
            rows.append([tasks, tables.label(name), *cells])
    text = ["The same tasks, paired; greedy unless it says sampled; 95% intervals."]
    head = ["tasks", "", "without the adapter", "with it", "difference", "n"]
    print("\n" + tables.markdown([tables.section("What was learned", text, head, rows)]))


def chosen_tasks(cfg: Config, given: Config, typed: set[str]) -> tuple[dict, list[int]]:
    """(the sets to evaluate, the seeds of their tasks); cfg gets what was typed.

    Other rules or held-out tasks give the set another name, so that it is not compared
    with the run's own.
    """
    own = next(name for name, (trained, _) in eval_sets(cfg).items() if trained)
    own_rules = rules_of(cfg)
    warn_unread_flags(cfg, typed)
    cfg.async_rollouts = cfg.max_staleness = 0  # there is no trainer to run ahead of
    given.set = [*cfg.set, *given.set]  # the later one counts
    names = typed - {"eval_only", "held_out"}
    run_folder.take_typed("--eval-only", cfg, given, names, MAY_BE_TYPED)
    check(cfg)
    if "difficulty" in typed:
        cfg.eval_other_tiers = False
    typed_rules = {rule: x for rule, x in rules_of(cfg).items() if x != own_rules[rule]}
    rules = "".join(f", {rule.replace('_', ' ')} {x}" for rule, x in typed_rules.items())
    if given.held_out:
        rules += ", held-out"
        print("held-out tasks: for a final table; choose nothing by them")
    first = HELD_OUT_SEEDS if given.held_out else DEV_SEEDS
    seeds = seeds_from(cfg, first, cfg.eval_n)
    if not seeds:
        raise ValueError(f"--held-out: {cfg.env} has no tasks for it; see docs/tasks.md")
    sets = eval_sets(cfg, partial(guarded, make_env, cfg), sweep=True)
    sets = {name + rules: (name + rules == own, new_env) for name, (_, new_env) in sets.items()}
    return sets, seeds


def rules_of(cfg: Config) -> dict:
    """{rule: its value}, for the rules that a set's name does not mention."""
    env = make_env(cfg, cfg.difficulty)
    own = [name for name in settable(cfg.env) if name not in IN_NAME]
    # Only letters has another reward to choose.
    rules = {"max_tokens": cfg.max_tokens, "reward": getattr(env, "reward_kind", None)}
    return rules | {name: getattr(env, name) for name in own}


# ------------------------------------------------------------------------------------ --probe
def probe(cfg, policy, new_env_at, collector, backend) -> None:
    """SFT, a first batch, and what GRPO could learn from it. Saves nothing.

    It is given what train.prepare returns, and the backend of an update.
    """
    with collector.paused(), policy.learning():
        new_env = partial(new_env_at, cfg.difficulty)
        shown = sft(policy, new_env, sft_seeds(cfg), cfg, backend)
    # Development tasks: if the tasks come from a small file, SFT may already have shown
    # every training task.
    unseen = seeds_from(cfg, DEV_SEEDS, cfg.num_tasks)
    collector.task_seeds = lambda update: unseen
    groups = collector.collect(0, levels_of(cfg.env)[0] if cfg.curriculum else cfg.difficulty)
    compute_advantages(groups, cfg)
    print(passes_of_sft(shown, cfg), *probe_report(groups, cfg), sep="\n")
    collector.close()
