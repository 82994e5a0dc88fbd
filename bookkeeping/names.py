"""What other frameworks call the numbers that we know: one line per framework and column.

    theirs        the name in their log; * stands for one part of it, such as a reward's name
    ours          the name in our metrics.jsonl (fast/measure.py, evaluate.summarize), or one that
                  symptoms.py knows; no_signal is 1 minus our groups_with_signal
    unit          of the number as it is read

A framework's log is known by the names in it, not by its file's name: KNOWN_BY. Names that are in
no line are counted and left alone. UNLOGGED says what a rule misses, and what would log it.

Sources, each read in the source code of that version:
    TRL 1.16.0       trl/trainer/grpo_trainer.py, `self._metrics[mode][…]`; the learning rate,
                     grad_norm and loss are those of transformers 5.19.0, trainer.py. Older names
                     (completion_length, rewards/NAME without /mean, clip_ratio): TRL 0.14 to 0.16
    Unsloth 2026.8.19  unsloth/models/rl_replacements.py (commit 015bdef): TRL's columns, with
                     completion_length and kl always there
    verl 0.10.0.dev  verl/trainer/ppo/metric_utils.py, core_algos.py, rollout_corr_helper.py,
                     utils/debug/metrics.py (commit 1dda039)
    prime-rl 0.8.0   src/prime_rl/orchestrator/metrics.py and orchestrator.py, trainer/rl/train.py
                     and loss.py (commit 559b447)

Run me: `python -m bookkeeping.names` prints the table.
"""

import re
from functools import lru_cache

TRL, UNSLOTH, VERL, PRIME, OURS, UNKNOWN = (
    "TRL",
    "Unsloth",
    "verl",
    "prime-rl",
    "picoswarm",
    "an unknown trainer",
)
VERSIONS = {TRL: "1.16.0", UNSLOTH: "2026.8.19", VERL: "0.10.0.dev", PRIME: "0.8.0"}

# (theirs, ours, unit)
HUGGING_FACE = [  # transformers' Trainer writes these for TRL and Unsloth
    ("loss", "loss", "near 0 with one update per batch"),
    ("grad_norm", "grad_norm", "L2, before clipping"),
    ("learning_rate", "lr", ""),
    ("reward", "reward", "mean, weighted sum of all reward functions"),
    ("reward_std", "reward_std", "over the batch"),
    ("frac_reward_zero_std", "no_signal", "share of groups"),
    ("rewards/*/mean", "part", "mean of one reward function"),
    ("rewards/*", "part", "the same, TRL before 0.17"),
    ("completions/mean_length", "reply_tokens", "tokens"),
    ("completion_length", "reply_tokens", "tokens"),
    ("completions/clipped_ratio", "truncated", "share of replies"),
    ("entropy", "entropy", "nats per token"),
    ("kl", "kl", "nats per token, k3 estimate, to the reference"),
    ("clip_ratio/region_mean", "clip_fraction", "share of tokens"),
    ("clip_ratio", "clip_fraction", "share of tokens"),
    ("sampling/sampling_logp_difference/mean", "mismatch", "nats per token, absolute"),
    ("sampling/importance_sampling_ratio/mean", "kept_ratio", "1 if sampler and trainer agree"),
    ("eval_reward", "eval_reward", "mean"),
]
NAMES = {
    TRL: HUGGING_FACE,
    UNSLOTH: HUGGING_FACE,
    VERL: [
        ("critic/score/mean", "reward", "mean score, before a KL penalty"),
        ("critic/rewards/mean", "reward_less_kl", "mean, after a KL penalty"),
        ("response_length/mean", "reply_tokens", "tokens"),
        ("response_length/clip_ratio", "truncated", "share of replies"),
        ("actor/entropy", "entropy", "nats per token"),
        ("actor/entropy_loss", "entropy", "nats per token, older name"),
        ("actor/pg_loss", "loss", "near 0 with one update per batch"),
        ("actor/grad_norm", "grad_norm", "L2, before clipping"),
        ("actor/lr", "lr", ""),
        ("actor/kl_loss", "kl", "nats per token, to the reference"),
        ("actor/reward_kl_penalty", "kl", "nats per token, to the reference"),
        ("actor/ppo_kl", "moved_kl", "nats per token, to the policy that sampled"),
        ("actor/pg_clipfrac", "clip_fraction", "share of tokens"),
        ("training/rollout_probs_diff_mean", "mismatch_probability", "probability, absolute"),
        ("rollout_corr/k3_kl", "mismatch_kl", "nats per token, k3 estimate"),
        ("rollout_corr/rollout_is_mean", "kept_ratio", "1 if sampler and trainer agree"),
        ("val-core/*/acc/mean@*", "eval_reward", "mean"),
        ("val-core/*/reward/mean@*", "eval_reward", "mean"),
    ],
    PRIME: [
        ("train/agg/effective/*/reward/mean", "reward", "mean of what was trained on"),
        ("train/agg/all/*/reward/mean", "reward", "mean of all that was sampled"),
        ("train/agg/all/*/solved_some", "groups_with_signal", "share of groups"),
        ("train/agg/all/*/rewards/*/mean", "part", "mean of one reward function"),
        ("train/agg/all/*/num_output_tokens/mean", "reply_tokens", "tokens"),
        ("train/agg/all/num_output_tokens/mean", "reply_tokens", "tokens"),
        ("train/agg/all/*/is_truncated/mean", "truncated", "share of replies"),
        ("train/agg/all/has_error/mean", "errors_share", "share of episodes"),
        ("loss/mean", "loss", "near 0 with one update per batch"),
        ("entropy/all/mean", "entropy", "nats per token"),
        ("mismatch_kl/all/mean", "mismatch_kl", "nats per token, k3 estimate"),
        ("is_masked/all/mean", "clip_fraction", "share of tokens left out as too far off"),
        ("is_masked/mean", "clip_fraction", "share of tokens left out as too far off"),
        ("off_policy/mean", "off_policy_steps", "updates"),
        ("optim/lr", "lr", ""),
        ("optim/grad_norm", "grad_norm", "L2, before clipping"),
        ("eval/*/effective/*/reward/mean", "eval_reward", "mean"),
        ("eval/*/effective/*/avg@*", "eval_reward", "mean"),
        # the console's names (orchestrator.log_train_batch, trainer/rl/train.py)
        ("Reward", "reward", "mean of what was trained on"),
        ("Truncation", "truncated", "share of replies"),
        ("Error", "errors_share", "share of episodes"),
        ("Max Off-Policy", "oldest_steps", "updates"),
        ("Loss", "loss", "near 0 with one update per batch"),
        ("Entropy", "entropy", "nats per token"),
        ("Mismatch KL", "mismatch_kl", "nats per token, k3 estimate"),
        ("Grad. Norm", "grad_norm", "L2, before clipping"),
        ("LR", "lr", ""),
        ("Eval Reward", "eval_reward", "mean"),
    ],
    OURS: [
        (name, name, "docs/flags.md")
        for name in (
            "reward", "groups_with_signal", "entropy", "truncated", "reply_tokens", "kl", "loss",
            "grad_norm", "lr", "clip_fraction", "mismatch", "off_policy_steps", "format", "exact",
            "exact_reward", "fraction", "similarity", "stretch", "stop_trained", "twice", "ratio",
            "rounding", "importance", "errors", "n", "reward_low", "reward_high",
        )
    ],
    UNKNOWN: HUGGING_FACE,  # many trainers borrow these names
}  # fmt: skip

# Whose log is it? The first of these that has one of its names in it (after "train/" is cut off).
KNOWN_BY = [
    (VERL, re.compile(r"(actor|critic)/|response_length/|val-core/|rollout_corr/")),
    (PRIME, re.compile(r"train/agg/|agg/(all|effective)/|mismatch_kl/|optim/(lr|grad_norm)$|"
                       r"off_policy/|Mismatch KL$|Max Off-Policy$|Trainable$")),
    (OURS, re.compile(r"groups_with_signal$|stop_trained$")),
    (TRL, re.compile(r"completions/|completion_length$|frac_reward_zero_std$|reward_std$|"
                     r"rewards/|sampling/")),
]  # fmt: skip

# {framework: {our column: what to set, so that it is logged}}
UNLOGGED = {
    TRL: {
        "mismatch": "use_vllm=True with vllm_importance_sampling_correction=True (without an "
        "engine TRL logs no number that shows a temperature, a dropout or old weights)",
        "kl": "beta above 0",
        "groups_with_signal": "TRL 0.18 or newer",
        "eval_reward": 'eval_strategy="steps" and an eval_dataset',
        "entropy": "TRL 0.19 or newer",
    },
    UNSLOTH: {
        "mismatch": "fast_inference=True with vllm_importance_sampling_correction=True",
        "groups_with_signal": "a newer trl below it (0.18 on)",
        "eval_reward": 'eval_strategy="steps" and an eval_dataset',
        "entropy": "not logged by Unsloth; a plain TRL logs it",
    },
    VERL: {
        "mismatch_probability": "actor_rollout_ref.rollout.calculate_log_probs=True",
        "kl": "actor_rollout_ref.actor.use_kl_loss=True",
        "groups_with_signal": "not logged; algorithm.filter_groups.enable=True leaves such groups "
        "out",
        "eval_reward": "trainer.test_freq above 0",
        "entropy": "actor_rollout_ref.actor.calculate_entropy=True",
    },
    PRIME: {
        "mismatch_kl": "the trainer's log (trainer/metrics.jsonl, or its console lines)",
        "groups_with_signal": "the orchestrator's metrics.jsonl (--orchestrator.monitors.file)",
        "reward": "the orchestrator's log, which is another file than the trainer's",
        "eval_reward": "[[orchestrator.eval.source]] and orchestrator.eval.interval",
    },
    OURS: {},
    UNKNOWN: {},
}
# Reward functions whose name says that they count right answers.
GOALS = re.compile(r"exact|correct|accura|\bacc\b|solved|pass(ed)?\b|answer|verif|match", re.I)
NOT_GOALS = re.compile(r"format|length|tag|style|len\b|xml|think|short|long|repeat|language", re.I)


@lru_cache(maxsize=512)
def pattern(theirs: str) -> re.Pattern:
    return re.compile("([^/]+)".join(map(re.escape, theirs.split("*"))))


def whose(columns) -> str:
    """The framework that logs such names."""
    bare = [name.removeprefix("train/") for name in columns] + list(columns)
    for framework, known in KNOWN_BY:
        if any(known.match(name) for name in bare):
            # Unsloth patches TRL's trainer, and adds its old name for the length.
            both = "completion_length" in bare and "completions/mean_length" in bare
            return UNSLOTH if framework == TRL and both else framework
    return UNKNOWN


def ours(framework: str, name: str) -> tuple[str, int] | None:
    """(our name, which line of the table) of one of their columns; None if we have no use for it.

    A reward function becomes "part:NAME". If several columns become the same, the lowest line
    counts.
    """
    if framework != PRIME:
        name = name.removeprefix("train/")
        name = "eval_" + name.removeprefix("eval/") if name.startswith("eval/") else name
    for line, (theirs, mine, _) in enumerate(NAMES[framework]):
        found = pattern(theirs).fullmatch(name)
        if found and mine == "part":
            return f"part:{found.groups()[-1]}", line
        if found:
            return mine, line
    return None


def goal_of(parts: list[str]) -> str | None:
    """The one reward function that counts right answers, by its name."""
    named = [p for p in parts if GOALS.search(p.replace("_", " ")) and not NOT_GOALS.search(p)]
    return named[0] if len(named) == 1 else None


if __name__ == "__main__":
    for framework in (TRL, VERL, PRIME):
        print(f"\n{framework} {VERSIONS[framework]}")
        for theirs, mine, unit in NAMES[framework]:
            print(f"  {theirs:42} {mine:22} {unit}")
    assert ours(TRL, "train/rewards/exact/mean") == ("part:exact", 6)
