"""What a symptom comes from, and the one thing to set first, in each framework: texts, no rules.

One entry per symptom of doctor.py: the columns that show it (our names), its causes with the most
frequent first, the cure in each framework's own flags, and its page of the failure journal. The
table of docs/doctor.md is made from this one (lab/tables.py).

The flags were read in TRL 1.16's GRPOConfig and transformers' TrainingArguments (Unsloth and, but
for dashes, ms-swift take the same), verl/trainer/config/*.yaml of verl 0.10.0.dev, and the
configuration of prime-rl 0.8.0.

Run me: `python -m bookkeeping.cures no signal` prints what is known of one.
"""

import sys
from typing import NamedTuple

from bookkeeping.logs import PRIME, TRL, VERL

OURS = "picoswarm"
JOURNAL = "learn/FAILURES.md"


class Illness(NamedTuple):
    columns: tuple[str, ...]
    causes: tuple[str, ...]
    cures: dict[str, str]
    journal: str = ""  # a heading of the failure journal


RATE = {
    TRL: "a third of learning_rate",
    VERL: "a third of actor_rollout_ref.actor.optim.lr",
    PRIME: "a third of trainer.optim.lr",
    OURS: "start again with a third of --lr",
}
FASTER = {
    TRL: "three times learning_rate, with LoRA ten times",
    VERL: "three times actor_rollout_ref.actor.optim.lr",
    PRIME: "three times trainer.optim.lr",
    OURS: "three times --lr",
}
LIMIT = {
    TRL: "a larger max_completion_length",
    VERL: "a larger data.max_response_length",
    PRIME: "a larger orchestrator.train.sampling.max_completion_tokens, and seq_len with it",
    OURS: "raise --max-tokens, or see in report.html whether replies never end",
}
SIGNAL = {
    TRL: "easier prompts, then more SFT, partial reward, or a larger num_generations",
    VERL: "easier prompts, then more SFT, partial reward, or a larger rollout.n",
    PRIME: "easier tasks, then more SFT, partial reward, or a larger orchestrator.group_size",
    OURS: (
        "easier tasks (letters, swarm: a lower --difficulty), then more --sft-steps, partial "
        "credit (letters: --reward partial), or a larger --k; where all is right, raise "
        "--difficulty"
    ),
}
REWARD = {
    TRL: "log_completions=True shows what is paid; then mend reward_weights or the function",
    VERL: "trainer.log_val_generations=10 shows what is paid; then mend the reward function",
    PRIME: "rollouts/step_N shows what is paid; then mend the weights of the rubric",
    OURS: "pay exact answers, or make the parts small (--reward binary)",
}
SYNC = {
    TRL: "temperature, top_p, top_k in GRPOConfig alone, none in generation_kwargs",
    VERL: "actor_rollout_ref.rollout.top_p=1 and top_k=-1, and one temperature",
    PRIME: "temperature 1 and nothing else in orchestrator.train.sampling",
    OURS: "one --temperature at both ends, and no top-k or top-p",
}
AGE = {
    TRL: "num_iterations=1 and steps_per_generation as gradient_accumulation_steps",
    VERL: "actor_rollout_ref.actor.ppo_epochs=1 and a larger ppo_mini_batch_size",
    PRIME: "a lower orchestrator.max_off_policy_steps",
    OURS: "--importance sequence or clip, or fewer --async-rollouts",
}
SCHEDULE = {
    TRL: "warmup_steps below a tenth of max_steps, learning_rate above 0",
    VERL: "actor.optim.lr_warmup_steps below a tenth of trainer.total_training_steps",
    PRIME: "trainer.scheduler.warmup_steps below a tenth of max_steps",
    OURS: "a smaller --warmup",
}

ILLNESSES = {
    "not a number": Illness(
        (),
        (
            "a learning rate that is too high",
            "a reward function that returned None or nan",
            "float16, whose numbers end at 65,504",
            "a prompt so long that nothing is left to train",
        ),
        RATE
        | {
            TRL: "bf16=True in place of fp16=True, then a third of learning_rate",
            VERL: "actor.fsdp_config.model_dtype=bfloat16, then a third of actor.optim.lr",
        },
        "learning-rate",
    ),
    "collapse": Illness(
        ("reward",),
        (
            "the learning rate is too high",
            "samples that are too old, or of another distribution",
            "a curriculum that has moved on to harder tasks, which is no illness",
        ),
        RATE,
        "learning-rate",
    ),
    "stuck": Illness(
        ("groups_with_signal", "reward_std", "reward"),
        ("one step broke the policy, most often because the learning rate is too high",),
        RATE,
        "learning-rate",
    ),
    "broken": Illness(
        ("format",),
        ("one step broke the policy, most often because the learning rate is too high",),
        RATE,
        "learning-rate",
    ),
    "noise": Illness(
        ("entropy",),
        (
            "the policy writes noise, most often because the learning rate is too high",
            "samples that are too old",
            "an entropy bonus that is too large",
        ),
        RATE,
        "learning-rate",
    ),
    "KL": Illness(
        ("kl",),
        (
            "the learning rate is too high",
            "a reward that pays what the reference would never say",
        ),
        RATE,
        "learning-rate",
    ),
    "no signal": Illness(
        ("groups_with_signal", "reward_std", "advantage_max", "advantage_min", "reward"),
        (
            "the task is too hard to be right even once",
            "the reward function says the same of every answer: its tag or its pattern is not in "
            "the prompt",
            "replies are cut off before the answer",
            "the task is solved",
        ),
        SIGNAL,
        "no-variance",
    ),
    "few groups": Illness(
        ("groups_with_signal", "reward"),
        ("most tasks are too hard for the policy to be right now and then, or too easy to fail",),
        SIGNAL,
        "no-variance",
    ),
    "solved": Illness(
        ("groups_with_signal", "reward"),
        ("nearly every reply is right, so nothing is left to learn here",),
        dict.fromkeys((TRL, VERL, PRIME), "harder tasks, or stop here")
        | {OURS: "raise --difficulty, or stop here"},
        "no-variance",
    ),
    "no gradient": Illness(
        ("grad_norm", "reward_std", "groups_with_signal"),
        (
            "no weight is trained: a frozen adapter (is_trainable=False), or gradient "
            "checkpointing without enable_input_require_grads",
            "the version of DeepSpeed or FSDP loses the gradient",
            "no group has a signal, where the log does not show that",
        ),
        {
            TRL: 'gradient_checkpointing_kwargs={"use_reentrant": False}',
            VERL: "actor_rollout_ref.model.enable_gradient_checkpointing=False, to compare",
            PRIME: "trainer.model.ac off, to compare",
            OURS: "see that policy.trainable() is what the optimizer holds",
        },
    ),
    "entropy collapse": Illness(
        ("entropy", "reward"),
        (
            "too few different replies to learn from: the policy says one thing",
            "a learning rate that is too high",
            "a reward that one cheap reply satisfies",
        ),
        {
            TRL: "epsilon_high=0.28",
            VERL: "actor_rollout_ref.actor.clip_ratio_high=0.28",
            PRIME: "a higher orchestrator.train.sampling.temperature",
            OURS: "a larger --k",
        },
        "no-variance",
    ),
    "cut short": Illness(
        ("truncated", "reply_tokens"),
        (
            "the limit is shorter than an answer",
            "the model does not end its turn: its end-of-turn token is not among the stop tokens",
            "the policy has come apart and rambles",
        ),
        LIMIT,
        "stop-token",
    ),
    "cut off more": Illness(
        ("truncated", "reply_tokens"),
        ("length is paid, or costs nothing", "the end-of-turn token is not trained"),
        LIMIT,
        "stop-token",
    ),
    "pays something else": Illness(
        ("reward", "exact"),
        ("the reward pays something else, most often a guess that earns partial credit",),
        REWARD,
        "generous-reward",
    ),
    "only in training": Illness(
        ("reward", "eval_reward"),
        (
            "few training prompts, seen again and again",
            "evaluation differs: greedy, another prompt, another limit",
            "the training reward pays something else",
        ),
        {
            TRL: "more prompts, fewer num_train_epochs",
            VERL: "more prompts, fewer trainer.total_epochs",
            PRIME: "more tasks, and the same sampling in orchestrator.eval",
            OURS: "look at reset(seed), or stop earlier",
        },
        "generous-reward",
    ),
    "still": Illness(
        ("reward", "entropy", "grad_norm"),
        (
            "a learning rate that is too low: 1e-6 is for all weights, LoRA takes ten times that",
            "too few steps, or groups too small for the noise",
        ),
        FASTER,
    ),
    "learning rate": Illness(
        ("lr",),
        (
            "the schedule has ended: the run goes on past the steps it was planned for",
            "a warm-up that is counted in other steps",
        ),
        SCHEDULE,
    ),
    "warm-up": Illness(("lr",), ("the warm-up is longer than the run",), SCHEDULE),
    "resumed": Illness(
        ("lr",),
        ("the optimizer and its schedule were not in the checkpoint",),
        {
            TRL: "save_only_model=False, then train(resume_from_checkpoint=…)",
            VERL: "optimizer among actor_rollout_ref.actor.checkpoint.save_contents",
            PRIME: "[ckpt] while it trains, then resume.step",
            OURS: "--resume runs/NAME",
        },
    ),
    "far off": Illness(
        ("clipped",),
        (
            "many updates on one batch, or samples of older weights",
            "a learning rate that is too high",
            "a ratio per reply that is clipped as if it were a token's",
        ),
        AGE,
        "sequence-ratio",
    ),
    "uncorrected": Illness(
        ("ratio", "off_policy_steps", "mismatch"),
        ("nothing corrects for who sampled",),
        AGE,
        "off-policy",
    ),
    "stale": Illness(
        ("mismatch",),
        (
            "the sampler still has old weights: the sync is left out, or an adapter is cached "
            "under its old name",
            "a numeric difference that grows with the weights",
        ),
        {
            TRL: 'vllm_mode="colocate", to compare',
            VERL: "actor_rollout_ref.rollout.load_format=safetensors, to compare",
            PRIME: "inference and trainer of one version, one weight_broadcast",
            OURS: "hand the sampler new weights after every update, under a new name",
        },
        "stale-adapter",
    ),
    "two distributions": Illness(
        ("mismatch",),
        (
            "the sampler draws from another distribution than is trained: another temperature, "
            "top-k or top-p",
            "dropout in the trainer",
            "another dtype or kernel, or quantized weights, in the engine",
        ),
        SYNC,
        "temperature",
    ),
    "engine": Illness(
        ("mismatch_kl", "mismatch_probability"),
        (
            "another temperature, top-k or top-p in the sampler than in the loss",
            "old weights in the engine",
            "bfloat16 or float8 in the engine, float32 in the trainer; routing of experts",
        ),
        SYNC,
        "temperature",
    ),
    "thrown away": Illness(
        ("kept_ratio",),
        (
            "whole replies are masked because their ratio, a product of many tokens, is out of "
            "bounds",
            "sampler and trainer disagree; see the mismatch",
        ),
        {
            TRL: 'vllm_importance_sampling_mode="token_truncate"',
            VERL: "algorithm.rollout_correction.rollout_is=token",
            PRIME: "a wider trainer.loss.dppo_mask_high and dppo_mask_low",
            OURS: "--importance clip",
        },
        "off-policy",
    ),
    "errors": Illness(
        ("errors_share", "errors"),
        ("a bug, a timeout or a missing service in the environment",),
        {
            TRL: "let the reward function return None for what it cannot score",
            VERL: "read the reward worker's log",
            PRIME: "read rollouts/step_N",
            OURS: "mend the environment (episodes.jsonl names each error)",
        },
    ),
    "dropout": Illness(
        ("twice", "mismatch"),
        ("dropout is on in the update",),
        SYNC | {OURS: "use model.eval() there, or dropout 0"},
        "dropout",
    ),
    "stop token": Illness(
        ("stop_trained",),
        ("the end-of-turn token is masked, most often as padding, and replies will run on",),
        LIMIT | {OURS: "keep it in the mask"},
        "stop-token",
    ),
    "sequence ratio": Illness(
        ("stretch", "clip_fraction"),
        ("it is the ratio of a whole reply, clipped with a token's epsilon",),
        AGE | {OURS: "take one ratio a token, or their mean as gspo does"},
        "sequence-ratio",
    ),
    "not exact": Illness(
        ("exact", "fraction", "similarity"),
        ("correct is counted as reward > 0, or the like",),
        REWARD | {OURS: "count what is exactly right"},
        "reward-as-correct",
    ),
}


def cure(name: str, framework: str) -> str:
    """What to set. Unsloth takes TRL's flags."""
    cures = ILLNESSES[name].cures
    return cures.get(framework, cures[TRL])


def why_the_loss_is_near_0(framework: str) -> str:
    """The healthy answer to the question that is asked most."""
    once = {VERL: "ppo_epochs=1", PRIME: "fresh samples"}.get(framework, "num_iterations=1")
    return (
        "a loss near 0 is normal here, because advantages add up to 0 within each group and with "
        f"{once} the ratio is 1 when it is computed: the value cancels, its gradient does not"
    )


if __name__ == "__main__":
    print(ILLNESSES[" ".join(sys.argv[1:]) or "no signal"])
