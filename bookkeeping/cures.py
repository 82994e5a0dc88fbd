"""What a symptom means, why it happens, and what to set in which framework: all texts, no rules.

One entry per symptom of symptoms.py and of doctor.py: the question that people ask about it, its
causes with the most frequent first, the cure in each framework's own flags, and its page of the
failure journal. docs/doctor.md is made from this table.

The flags were read in the versions of names.VERSIONS: TRL's GRPOConfig and transformers'
TrainingArguments, verl/trainer/config/*.yaml, packages/prime-rl-configs/. Unsloth takes TRL's.

Run me: `python -m bookkeeping.cures` prints the tables of docs/doctor.md.
"""

import re
from dataclasses import dataclass

from bookkeeping.names import NAMES, OURS, PRIME, TRL, UNKNOWN, UNSLOTH, VERL

JOURNAL = "learn/FAILURES.md"


@dataclass(frozen=True)
class Illness:
    asked: str  # as people ask
    causes: tuple[str, ...]  # the most frequent first
    cures: dict[str, str]  # {framework: what to set}
    journal: str = ""  # a heading of the failure journal


RATE = {
    TRL: (
        "a third of learning_rate (1e-6 is GRPOConfig's own, LoRA takes about 10 times that); "
        "beta=0.01 holds the policy back"
    ),
    VERL: "a third of actor_rollout_ref.actor.optim.lr; actor_rollout_ref.actor.use_kl_loss=True",
    PRIME: "a third of trainer.optim.lr; a higher trainer.loss.kl_tau",
    OURS: "a third of --lr",
}
LIMIT = {
    TRL: "raise max_completion_length; mask_truncated_completions=True leaves cut replies out",
    VERL: "raise data.max_response_length",
    PRIME: "raise orchestrator.train.sampling.max_completion_tokens, and seq_len with it",
    OURS: "raise --max-tokens",
}
SIGNAL = {
    TRL: (
        "easier prompts, a higher temperature, or a larger num_generations; print completions "
        "with log_completions=True"
    ),
    VERL: (
        "algorithm.filter_groups.enable=True draws other prompts; a larger "
        "actor_rollout_ref.rollout.n"
    ),
    PRIME: "a larger orchestrator.group_size; easier tasks (orchestrator's difficulty pools)",
    OURS: "lower --difficulty, --reward partial, or more --sft-steps",
}
REWARD = {
    TRL: "look at reward_weights; log_completions=True shows what is paid",
    VERL: (
        "look at custom_reward_function (or reward.custom_reward_function) and at "
        "trainer.log_val_generations"
    ),
    PRIME: "look at the weights of the environment's reward functions, and read rollouts/step_N",
    OURS: "--reward binary; read report.html",
}
SYNC = {
    TRL: (
        "sampling settings belong into GRPOConfig (temperature, top_p, top_k), never into "
        "generation_kwargs; lora_dropout=0 or disable_dropout=True; the newest vLLM that TRL "
        "allows"
    ),
    VERL: (
        "one actor_rollout_ref.rollout.temperature, top_p=1, top_k=-1; "
        "algorithm.rollout_correction.rollout_is=token; actor_rollout_ref.rollout.dtype as the"
        " trainer's"
    ),
    PRIME: (
        "a lower orchestrator.max_off_policy_steps; the same dtype in inference and trainer; "
        "temperature 1 in orchestrator.train.sampling"
    ),
    OURS: "the same --temperature at both ends, top-k and top-p off",
}
AGE = {
    TRL: (
        "steps_per_generation and num_iterations of 1; keep "
        "vllm_importance_sampling_correction=True"
    ),
    VERL: (
        "algorithm.rollout_correction.rollout_is=token; fewer "
        "actor_rollout_ref.actor.ppo_epochs, a larger ppo_mini_batch_size"
    ),
    PRIME: "a lower orchestrator.max_off_policy_steps",
    OURS: "--importance sequence or clip, or fewer --async-rollouts",
}
SCHEDULE = {
    TRL: (
        "warmup_steps below a tenth of max_steps (a number under 1 is a share); learning_rate "
        "above 0"
    ),
    VERL: (
        "actor_rollout_ref.actor.optim.lr_warmup_steps (or lr_warmup_steps_ratio) below a "
        "tenth of trainer.total_training_steps"
    ),
    PRIME: "trainer.scheduler.warmup_steps below a tenth of max_steps",
    OURS: "a smaller --warmup",
}

ILLNESSES = {
    "not a number": Illness(
        "why is my loss or my grad_norm NaN?",
        (
            "a learning rate that is too high",
            "float16, whose numbers end at 65,504",
            "a division by a deviation or a length of 0 in the reward",
            "a prompt so long that nothing is left to train",
        ),
        {
            TRL: (
                "bf16=True in place of fp16=True; a third of learning_rate; look at the first "
                "step that has it"
            ),
            VERL: (
                "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16; a third of "
                "actor_rollout_ref.actor.optim.lr"
            ),
            PRIME: "a third of trainer.optim.lr",
            OURS: "a third of --lr",
        },
        "learning-rate",
    ),
    "collapse": Illness(
        "why did my reward collapse?",
        (
            "a learning rate that is too high",
            "samples that are too old, or of another distribution",
            "no KL term and no clipping on a small batch",
            "a curriculum that has moved on to harder tasks, which is no illness",
        ),
        RATE,
        "learning-rate",
    ),
    "stuck": Illness(
        "why are all my completions the same, and the reward 0 for good?",
        ("one step broke the policy: a learning rate that is too high",),
        RATE,
        "learning-rate",
    ),
    "broken": Illness(
        "why can no answer be parsed any more?",
        ("one step broke the policy: a learning rate that is too high",),
        RATE,
        "learning-rate",
    ),
    "noise": Illness(
        "why does the entropy explode and the model write gibberish?",
        (
            "a learning rate that is too high",
            "samples that are too old",
            "an entropy bonus that is too large",
        ),
        RATE,
        "learning-rate",
    ),
    "KL": Illness(
        "why does the KL explode?",
        (
            "a learning rate that is too high",
            "a reward that pays what the reference would never say",
            "beta of 0, so nothing holds the policy",
        ),
        RATE,
        "learning-rate",
    ),
    "no signal": Illness(
        "why is my loss exactly 0, and grad_norm too?",
        (
            "all replies to a prompt earn the same: the task is too hard to be right once",
            (
                "the reward function never finds an answer: its tag or its pattern is not in "
                "the prompt"
            ),
            "replies are cut off before the answer",
            "the task is solved",
        ),
        SIGNAL,
        "no-variance",
    ),
    "few groups": Illness(
        "why is frac_reward_zero_std so high?",
        ("most prompts are too easy or too hard for the policy",),
        SIGNAL,
        "no-variance",
    ),
    "solved": Illness(
        "why does nothing happen any more at a reward of 1?",
        ("nearly every reply is right, so nearly no group has a signal",),
        {
            TRL: "harder prompts, or stop here",
            VERL: "harder prompts, or stop here",
            PRIME: "harder tasks, or stop here",
            OURS: "raise --difficulty, or stop here",
        },
        "no-variance",
    ),
    "entropy collapse": Illness(
        "why did the entropy fall to 0 while the reward stands still?",
        (
            "too few different replies to learn from: the policy says one thing",
            "a learning rate that is too high",
            "a reward that one cheap reply satisfies",
        ),
        {
            TRL: "epsilon_high=0.28, entropy_coef above 0, a higher temperature",
            VERL: "actor_rollout_ref.actor.clip_ratio_high=0.28, entropy_coeff above 0",
            PRIME: "a higher orchestrator.train.sampling.temperature",
            OURS: "a third of --lr, a larger --k",
        },
        "no-variance",
    ),
    "cut short": Illness(
        "why is clipped_ratio 1, and every completion as long as the limit?",
        (
            "the limit is shorter than an answer",
            ("the model does not end its turn: its end-of-turn token is not among the stop tokens"),
            "the policy has come apart and rambles",
        ),
        LIMIT,
        "stop-token",
    ),
    "cut off more": Illness(
        "why do completions grow until they hit the limit?",
        (
            "length is paid, or costs nothing",
            "the end-of-turn token is not trained",
            "thinking pays and the limit is too short for it",
        ),
        LIMIT,
        "stop-token",
    ),
    "pays something else": Illness(
        "why does the reward rise while accuracy does not?",
        (
            "partial credit, or a reward for the format, pays a guess",
            "the judge can be fooled",
        ),
        REWARD,
        "generous-reward",
    ),
    "pays length": Illness(
        "why do completions only get longer?",
        ("a reward function pays length, directly or through what longer replies contain",),
        REWARD,
        "generous-reward",
    ),
    "only in training": Illness(
        "why does the training reward rise and the evaluation not?",
        (
            "few training prompts, seen again and again",
            "evaluation differs: greedy, another prompt, another limit",
            "the training reward pays something else",
        ),
        {
            TRL: "more prompts, fewer num_train_epochs; the same limit and template in evaluation",
            VERL: (
                "more prompts, fewer trainer.total_epochs; "
                "actor_rollout_ref.rollout.val_kwargs as in training"
            ),
            PRIME: "more tasks; the same sampling in orchestrator.eval",
            OURS: "look at reset(seed), or stop earlier",
        },
        "generous-reward",
    ),
    "still": Illness(
        "why does my reward not move?",
        (
            (
                "a learning rate that is too low (1e-6 is for all weights; LoRA takes 10 times"
                " as much or more)"
            ),
            "a warm-up that has not ended",
            "too few steps, or groups too small for the noise",
        ),
        {
            TRL: "three times learning_rate, or ten with LoRA",
            VERL: "three times actor_rollout_ref.actor.optim.lr",
            PRIME: "three times trainer.optim.lr",
            OURS: "three times --lr",
        },
    ),
    "learning rate": Illness(
        "why is my learning rate 0?",
        (
            "the schedule has ended: the run goes on past the steps it was planned for",
            "a warm-up that is counted in other steps",
            "it is logged before it is set (TRL logs 0 at the first step of a warm-up)",
        ),
        SCHEDULE,
    ),
    "warm-up": Illness(
        "why does nothing happen although the reward has a signal?",
        ("the warm-up is longer than the run",),
        SCHEDULE,
    ),
    "resumed": Illness(
        "why does the reward jump after I resumed?",
        (
            (
                "the optimizer and its schedule were not in the checkpoint (save_only_model, "
                "or a folder without optimizer.pt)"
            ),
            "two runs write into one log",
        ),
        {
            TRL: "save_only_model=False, then trainer.train(resume_from_checkpoint=…)",
            VERL: (
                "trainer.resume_mode=auto, and optimizer among "
                "actor_rollout_ref.actor.checkpoint.save_contents"
            ),
            PRIME: "[ckpt] while it trains, and resume.step",
            OURS: "--resume runs/NAME",
        },
    ),
    "far off": Illness(
        "why is clip_ratio so high?",
        (
            "many updates on one batch, or samples of older weights",
            "a learning rate that is too high",
            "a ratio per reply that is clipped as if it were a token's",
        ),
        AGE,
        "sequence-ratio",
    ),
    "uncorrected": Illness(
        "why does it fall apart when samples are old?",
        ("nothing corrects for who sampled",),
        AGE,
        "off-policy",
    ),
    "stale": Illness(
        "why do sampler and trainer drift apart?",
        (
            (
                "the engine still has old weights: the sync is left out, or an adapter is "
                "cached under its old name"
            ),
            "a numeric difference that grows with the weights",
        ),
        {
            TRL: (
                "one server per run and the version of vLLM that TRL names; "
                'vllm_mode="colocate" to compare'
            ),
            VERL: "look at the engine's update of weights; actor_rollout_ref.rollout.load_format",
            PRIME: "look at weight_broadcast; inference and trainer of one version",
            OURS: "hand the sampler new weights after every update, under a new name",
        },
        "stale-adapter",
    ),
    "two distributions": Illness(
        "why does sampling_logp_difference start high?",
        (
            "another temperature, top-k or top-p in the sampler than in the loss",
            "dropout in the trainer",
            "another dtype or kernel, or quantized weights, in the engine",
            "another chat template or beginning-of-text token at one end",
        ),
        SYNC,
        "temperature",
    ),
    "engine": Illness(
        "why is my rollout-training mismatch so high?",
        (
            "another temperature, top-k or top-p in the sampler than in the loss",
            "old weights in the engine",
            "bfloat16 or float8 in the engine, float32 in the trainer; routing of experts",
        ),
        SYNC,
        "temperature",
    ),
    "thrown away": Illness(
        "why is importance_sampling_ratio far below 1?",
        (
            (
                "whole replies are masked because their ratio, a product of many tokens, is "
                "out of bounds"
            ),
            "sampler and trainer disagree; see the mismatch",
        ),
        {
            TRL: 'vllm_importance_sampling_mode="token_truncate"; then mend the mismatch',
            VERL: "algorithm.rollout_correction.rollout_is=token; then mend the mismatch",
            PRIME: "wider trainer.loss.dppo_mask_low and dppo_mask_high",
            OURS: "--importance clip",
        },
        "off-policy",
    ),
    "errors": Illness(
        "why are so many rollouts in error?",
        ("a bug, a timeout or a missing service in the environment",),
        {
            TRL: "let the reward function return None for what it cannot score, and count those",
            VERL: "look at the reward worker's log",
            PRIME: "read rollouts/step_N/train/all/traces.jsonl",
            OURS: "episodes.jsonl names each error",
        },
    ),
    "dropout": Illness(
        "why do two passes of the trainer differ?",
        ("dropout is on in the update",),
        SYNC,
        "dropout",
    ),
    "stop token": Illness(
        "why do replies run on?",
        ("the end-of-turn token is masked, most often as padding",),
        LIMIT,
        "stop-token",
    ),
    "sequence ratio": Illness(
        "why are most tokens clipped?",
        ("a reply's ratio is clipped with a token's epsilon",),
        AGE,
        "sequence-ratio",
    ),
    "not exact": Illness(
        "why is accuracy so much better than the answers?",
        ("correct is counted as reward > 0",),
        REWARD,
        "reward-as-correct",
    ),
    "every step clipped": Illness(
        "why is grad_norm above max_grad_norm all the time?",
        (
            (
                "nothing is wrong by itself: Adam divides by the gradient's size anyway, so "
                "clipping only evens steps out"
            ),
            "if the reward falls too: a learning rate that is too high",
        ),
        {
            TRL: "leave it, or raise max_grad_norm",
            VERL: "leave it, or raise actor_rollout_ref.actor.grad_clip",
            PRIME: "leave it, or raise trainer.optim.max_norm",
            OURS: "leave it",
        },
    ),
    "too short": Illness(
        "is it too early to tell?",
        ("the log has hardly begun",),
        {
            TRL: "come back after 30 steps",
            VERL: "come back after 30 steps",
            PRIME: "come back after 30 steps",
            OURS: "come back after 30 updates",
        },
    ),
}


def cure(name: str, framework: str) -> str:
    """What to set. Unsloth takes TRL's flags, and so, most often, does who borrows its names."""
    cures = ILLNESSES[name].cures
    return cures.get(TRL if framework in (UNSLOTH, UNKNOWN) else framework, "")


def why_the_loss_is_near_0(framework: str) -> str:
    """The healthy answer to the question that is asked most."""
    once = {
        TRL: "num_iterations=1",
        UNSLOTH: "num_iterations=1",
        VERL: "ppo_epochs=1",
        PRIME: "fresh samples",
    }.get(framework, "one update per batch")
    return (
        "a loss near 0 is normal here, because advantages add up to 0 within each group and with "
        f"{once} the ratio is 1 when it is computed: the value cancels, its gradient does not. "
        "Watch the reward, and grad_norm, which must not be 0"
    )


# The column that shows a symptom, under our name. For the page; a rule says its own.
LOOK_AT = {
    "not a number": "loss", "collapse": "reward", "stuck": "no_signal", "noise": "entropy",
    "KL": "kl", "no signal": "no_signal", "few groups": "no_signal", "solved": "no_signal",
    "entropy collapse": "entropy", "cut short": "truncated", "cut off more": "truncated",
    "pays something else": "part", "pays length": "reply_tokens", "only in training": "eval_reward",
    "still": "reward", "learning rate": "lr", "warm-up": "lr", "resumed": "lr",
    "far off": "clip_fraction", "stale": "mismatch", "two distributions": "mismatch",
    "engine": "mismatch", "thrown away": "kept_ratio", "errors": "errors_share",
    "every step clipped": "grad_norm",
}  # fmt: skip
# Where a framework has no such column, the next best.
INSTEAD = {
    "no_signal": ("groups_with_signal", "grad_norm"),
    "mismatch": ("mismatch_kl", "mismatch_probability"),
}


def their_name(framework: str, ours: str) -> str:
    """The first of the framework's columns that is this one of ours, or the next best."""
    for wanted in (ours, *INSTEAD.get(ours, ())):
        for theirs, mine, _ in NAMES[framework]:
            if mine == wanted:
                return f"`{theirs}`"
    return "not logged"


def page() -> str:
    """The tables of docs/doctor.md: a question each, but for what only our own runs can show.

    What several have in common to set stands in the table of the first.
    """
    out: list[str] = []
    first: dict[int, str] = {}  # {which cures: the question that shows them}
    for name, ours in LOOK_AT.items():
        illness = ILLNESSES[name]
        causes = [f"({i}) {cause}" for i, cause in enumerate(illness.causes, 1)]
        why = "; ".join(causes) if len(causes) > 1 else illness.causes[0]
        see = f" [See it happen](../{JOURNAL}#{illness.journal})." if illness.journal else ""
        out += [f"### {illness.asked[0].upper()}{illness.asked[1:]}", ""]
        out += [f"**{name}**. Because of: {why}.{see}", ""]
        if asked := first.get(id(illness.cures)):
            look = ", ".join(f"{who} {their_name(who, ours)}" for who in (TRL, VERL, PRIME))
            anchor = re.sub(r"[^\w -]", "", asked.lower()).replace(" ", "-")
            out += [f"Look at: {look}. Set: as in [{asked}](#{anchor})", ""]
            continue
        first[id(illness.cures)] = illness.asked
        out += ["| framework | look at | set |", "| --- | --- | --- |"]
        for framework in (TRL, VERL, PRIME):
            cells = (framework, their_name(framework, ours), illness.cures[framework])
            out.append("| " + " | ".join(cells) + " |")
        out.append("")
    return "\n".join(out)


if __name__ == "__main__":
    print(page())
