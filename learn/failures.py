"""The failure journal, executable: what goes wrong in RL runs, and which logged number shows it.

    python train.py --break dropout     # a run with that mistake in it, two minutes on two cores

None of these raises an error. Lines go by, the loss is near 0, the bar fills up. What differs is
one column of metrics.jsonl, if you know which; bookkeeping/doctor.py looks at those columns and
says so. Most are known from other people's runs; `reward-as-correct` and `generous-reward` come
from picoRL, `off-policy` from a run of ours (results/offpolicy.json).

A mistake is put in where a person would make it: settings, or one function of the book replaced by
a wrong one for the rest of the run. So the book itself has no `if broken` anywhere.

learn/FAILURES.md has what a person sees, why, how to mend it, and what each run said.

Run me: `python -m learn.failures` lists them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Failure:
    metric: str  # the column of metrics.jsonl that shows it
    cause: str
    told: str  # what bookkeeping/doctor.py calls it
    flags: dict = field(default_factory=dict)  # settings of train.py, beside those in SHORT
    patch: Callable[[], None] = lambda: None  # puts the mistake in, for the rest of the process


# Letters, tier 6, small evaluations: what happens shows in the updates.
SHORT = {
    "env": "letters",
    "difficulty": 6,
    "updates": 30,
    "eval_n": 32,
    "eval_every": 1000,
    "engine": "torch",
    "wandb": False,
}


def forget_stop_token() -> None:
    """`labels[eos == pad] = -100`: if padding and end-of-turn are one token, both are masked."""
    import grpo
    import sft

    def without(e):
        return replace(e, sampled=[*e.sampled[:-1], False]) if e.stop_reason == "done" else e

    def micro_batches(chosen, *rest):  # of (episode, advantage of each token, weight of each)
        episodes = [without(e) for e, *_ in chosen]
        first = [e.reply_tokens for e in episodes]
        shorter = [(e, a[:n], w[:n]) for e, n, (_, a, w) in zip(episodes, first, chosen)]
        return right(shorter, *rest)

    def collate(episodes, *rest):
        return sft_collate([without(e) for e in episodes], *rest)

    right, grpo.micro_batches = grpo.micro_batches, micro_batches
    sft_collate, sft.collate = sft.collate, collate


def drop_out_in_update() -> None:
    """`model.train()` around the update, and a config with dropout in it: the sampler had none."""
    import grpo

    def token_logprobs(policy, *rest):
        attentions = [layer.self_attn for layer in policy.lm.base_model.layers]
        for attention in attentions:
            attention.attention_dropout = 0.1
        policy.model.train()
        found = right(policy, *rest)
        policy.model.eval()
        return found

    right, grpo.token_logprobs = grpo.token_logprobs, token_logprobs


def ratio_of_sequences() -> None:
    """The ratio of a whole reply, clipped as if it were one token's.

    A product of 100 ratios leaves [0.8, 1.2] at once.
    """
    import grpo

    def token_ratio(batch, out):
        gap = out.logprobs - batch.proximal  # [M]
        total = gap.new_zeros(int(batch.row.max()) + 1).index_add(0, batch.row, gap)  # [N]
        return total[batch.row].exp()

    grpo.token_ratio = token_ratio


def another_template() -> None:
    """SFT uses the model's chat template, RL sends plain text: two ways to make a prompt."""
    import rollout
    import sft

    right, expert = rollout.prompt_ids, sft.expert_episode

    def plain(policy, messages, tools, think):
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return rollout.encode(policy, text + "assistant: ")

    def expert_episode(*given):
        rollout.prompt_ids = right
        try:
            return expert(*given)
        finally:
            rollout.prompt_ids = plain

    rollout.prompt_ids, sft.expert_episode = plain, expert_episode


def never_sync() -> None:
    """The sampler keeps SFT's weights: an adapter under a name that the engine has cached."""
    from fast.sampler import TorchSampler

    right = TorchSampler.sync

    def sync(self, version):
        if version == 0:
            right(self, version)
        self.version = version  # it says that it is new

    TorchSampler.sync = sync


def wrong_temperature() -> None:
    """Sampled at one temperature, trained on the log-probs of another."""
    import grpo

    right = grpo.token_logprobs
    grpo.token_logprobs = lambda policy, ids, mask, temperature=1.0: right(policy, ids, mask)


def paid_is_correct() -> None:
    """`correct = reward > 0`, where the reward pays parts."""
    from env_letters import Letters

    right = Letters.score

    def score(self):
        marks = right(self)
        return marks | {"exact": float(marks["reward"] > 0)}

    Letters.score = score


def close_is_paid() -> None:
    """A count that is off by two is paid as if it were right."""
    from env_letters import Letters, parse_answer

    right = Letters.score

    def score(self):
        answer = parse_answer(self.reply, True) or {}
        counts = zip(self.task.letters, self.task.counts)
        near = [abs(answer.get(letter, 99) - n) <= 2 for letter, n in counts]
        return right(self) | {"reward": sum(near) / len(near)}

    Letters.score = score


FAILURES = {
    "learning-rate": Failure(
        metric="format",
        cause="a learning rate that is too high",
        told="broken",
        flags={"lr": 0.03, "warmup": 0, "updates": 12},
    ),
    "no-variance": Failure(
        metric="groups_with_signal",
        cause=(
            "a task that is too hard (or too easy) for the policy: no group has both right "
            "and wrong answers"
        ),
        told="no signal",
        flags={"difficulty": 8, "think": False, "updates": 12},
    ),
    "stop-token": Failure(
        metric="stop_trained",
        cause="the end-of-turn token is masked, most often as padding",
        told="stop token",
        flags={"updates": 10},
        patch=forget_stop_token,
    ),
    "dropout": Failure(
        metric="mismatch",
        cause=(
            "dropout is on in the update and off in the sampler: model.train() where "
            "model.eval() belongs"
        ),
        told="dropout",
        flags={"updates": 10},
        patch=drop_out_in_update,
    ),
    "sequence-ratio": Failure(
        metric="stretch",
        cause="the ratio of a whole reply, clipped with the ε of a token",
        told="sequence ratio",
        flags={"updates": 10, "epochs": 4},
        patch=ratio_of_sequences,
    ),
    "template": Failure(
        metric="format",
        cause="the prompts of RL are not written as those of SFT: another chat template, or none",
        told="template",
        flags={"updates": 10},
        patch=another_template,
    ),
    "stale-adapter": Failure(
        metric="mismatch",
        cause=(
            "the sampler still has the old weights: an adapter loaded under a name that is "
            "cached, or a sync that was left out"
        ),
        told="stale",
        patch=never_sync,
    ),
    "temperature": Failure(
        metric="mismatch",
        cause=(
            "sampled from one distribution, trained on another: temperature, top-k or top-p"
            " at one end only"
        ),
        told="two distributions",
        flags={"updates": 10, "temperature": 0.7},
        patch=wrong_temperature,
    ),
    "reward-as-correct": Failure(
        metric="exact_reward",
        cause="`correct` is counted as reward > 0",
        told="not exact",
        flags={"reward": "partial", "updates": 5},
        patch=paid_is_correct,
    ),
    "generous-reward": Failure(
        metric="exact",
        cause="partial credit so generous that a guess is paid like an answer",
        told="pays something else",
        flags={"updates": 20},
        patch=close_is_paid,
    ),
    "off-policy": Failure(
        metric="mismatch",
        cause="samples of older policies are trained on as if they were the policy's own",
        told="uncorrected",
        flags={"async_rollouts": 8, "importance": "none", "updates": 40},
    ),
}


def settings(name: str) -> dict:
    """The flags of `train.py --break NAME`, as defaults: a typed flag wins.

    ValueError if there is no such mistake.
    """
    if name not in FAILURES:
        raise ValueError(f"--break {name}: choose {', '.join(FAILURES)}")
    return SHORT | FAILURES[name].flags


def put_in(name: str) -> None:
    """Make the mistake, for the rest of this process; "" makes none."""
    if name:
        settings(name)
        FAILURES[name].patch()


if __name__ == "__main__":
    for name, f in FAILURES.items():
        print(f"{name}\n  {f.cause}; look at `{f.metric}`\n")
