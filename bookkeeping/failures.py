"""The failure journal, executable: what goes wrong in RL runs, made on purpose.

    python train.py --break dropout     # a run with that mistake in it, two minutes on two cores

None of these raises an error. Lines go by, the loss is near 0, the bar fills up. Only one column of
metrics.jsonl differs, if you know which; bookkeeping/doctor.py watches these columns and says so.
Most are known from other people's runs; `reward-as-correct` and `generous-reward` come from picoRL,
`off-policy` from a run of ours (results/offpolicy.json).

A mistake is made where a person would make it: in the settings, or in one function of a chapter,
which is replaced by a wrong one for the rest of the run. So the chapters have no `if broken`.

learn/FAILURES.md says what you see, which number shows it, why, how to fix it, and what each run
printed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pkgutil import resolve_name

from chat import encode
from env_letters import parse_answer


@dataclass(frozen=True)
class Failure:
    told: str  # the symptom that bookkeeping/doctor.py reports
    flags: dict = field(default_factory=dict)  # settings of train.py, besides those in SHORT
    # {a function: the wrong one, which gets the right one as its first argument}
    wrong: dict[str, Callable] = field(default_factory=dict)


# Letters, tier 6, small evaluations: the effect shows in the updates.
SHORT = {
    "env": "letters",
    "difficulty": 6,
    "updates": 30,
    "eval_n": 32,
    "eval_every": 1000,
    "engine": "torch",
    "wandb": False,
}


def without_stop(e):
    """`labels[eos == pad] = -100`: if padding and end-of-turn are one token, both are masked."""
    if e.stop_reason != "done":
        return e
    return replace(e, sampled=[*e.sampled[:-1], False], advantages=e.advantages[:-1])


def batches_without_stop(right, policy, weighted, *rest):
    return right(policy, [(without_stop(e), weight) for e, weight in weighted], *rest)


def demonstrations_without_stop(right, episodes, *rest):
    return right([without_stop(e) for e in episodes], *rest)


def with_dropout(right, policy, *rest):
    """`model.train()` around the update, and a config with dropout in it: the sampler had none."""
    for layer in policy.lm.base_model.layers:
        layer.self_attn.attention_dropout = 0.1
    policy.model.train()
    found = right(policy, *rest)
    policy.model.eval()
    return found


def ratio_of_sequence(right, batch, output):
    """The ratio of a whole reply, clipped as if it were one token's.

    The product of 100 ratios is outside [0.8, 1.2] at once.
    """
    gap = output.logprobs - batch.old_logprobs  # [M]
    total = gap.new_zeros(len(batch.episodes)).index_add(0, batch.episode_of, gap)  # [N]
    return total[batch.episode_of].exp()


demonstrating = []  # not empty while SFT makes a demonstration


def plain_prompt(right, policy, messages, tools, think):
    """SFT uses the model's chat template, RL sends plain text: two ways to write a prompt."""
    if demonstrating:
        return right(policy, messages, tools, think)
    text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
    return encode(policy, text + "assistant: ")


def templated_demonstration(right, *given):
    demonstrating.append(True)
    try:
        return right(*given)
    finally:
        demonstrating.clear()


def never_sync(right, sampler, version):
    """The sampler keeps SFT's weights: an adapter under a name that the engine has cached."""
    if version == 0:
        right(sampler, version)
        sampler.cached = sampler.decoder.layers
    sampler.decoder.layers = sampler.cached
    sampler.version = version  # it claims to be new


def at_temperature_1(right, policy, ids, mask, temperature=1.0):
    """Sampled at one temperature, trained on the log-probs of another."""
    return right(policy, ids, mask)


def paid_is_correct(right, env):
    """`correct = reward > 0`, although the reward gives partial credit."""
    marks = right(env)
    return marks | {"exact": float(marks["reward"] > 0)}


def close_is_paid(right, env):
    """A count that is off by two is paid as if it were right."""
    answer = parse_answer(env.reply, True) or {}
    counts = zip(env.task.letters, env.task.counts)
    near = [abs(answer.get(letter, 99) - n) <= 2 for letter, n in counts]
    return right(env) | {"reward": sum(near) / len(near)}


FAILURES = {
    "learning-rate": Failure(
        told="broken",
        flags={"lr": 0.03, "warmup": 0, "updates": 12},
    ),
    "no-variance": Failure(
        told="no signal",
        flags={"difficulty": 8, "think": False, "updates": 12},
    ),
    "stop-token": Failure(
        told="stop token",
        flags={"updates": 10},
        wrong={
            "grpo.micro_batches": batches_without_stop,
            "sft.collate": demonstrations_without_stop,
        },
    ),
    "dropout": Failure(
        told="dropout",
        flags={"updates": 10},
        wrong={"fast.logprobs.token_logprobs": with_dropout},
    ),
    "sequence-ratio": Failure(
        told="sequence ratio",
        flags={"updates": 10, "epochs": 4},
        wrong={"grpo.RATIOS.token": ratio_of_sequence},
    ),
    "template": Failure(
        told="template",
        flags={"updates": 10},
        wrong={
            "rollout.prompt_ids": plain_prompt,
            "sft.expert_episode": templated_demonstration,
        },
    ),
    "stale-adapter": Failure(
        told="stale",
        wrong={"fast.sampler.TorchSampler.sync": never_sync},
    ),
    "temperature": Failure(
        told="two distributions",
        flags={"updates": 10, "temperature": 0.7},
        wrong={"fast.logprobs.token_logprobs": at_temperature_1},
    ),
    "reward-as-correct": Failure(
        told="not exact",
        flags={"reward": "partial", "updates": 5},
        wrong={"env_letters.Letters.score": paid_is_correct},
    ),
    "generous-reward": Failure(
        told="pays something else",
        flags={"updates": 20},
        wrong={"env_letters.Letters.score": close_is_paid},
    ),
    "off-policy": Failure(
        told="uncorrected",
        flags={"async_rollouts": 8, "importance": "none", "updates": 40},
    ),
}


# The flags of `train.py --break NAME`, as defaults: a typed flag wins.
SETTINGS = {name: SHORT | failure.flags for name, failure in FAILURES.items()}


def plant(name: str) -> None:
    """Plant the bug, for the rest of this process."""
    for place, wrong in FAILURES[name].wrong.items():
        owner, _, function = place.rpartition(".")
        replace_function(resolve_name(owner), function, wrong)


def replace_function(owner, name: str, wrong: Callable) -> None:
    """owner: a module, a class, or a table of functions."""
    table = owner if isinstance(owner, dict) else vars(owner)
    replaced = partial(wrong, table[name])
    if isinstance(owner, dict):
        owner[name] = replaced
    else:
        setattr(owner, name, lambda *given, **more: replaced(*given, **more))
