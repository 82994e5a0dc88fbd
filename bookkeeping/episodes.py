"""Episodes for a person to read: episodes.jsonl, which report.html shows.

Whole groups are kept, with each sampled token's log-prob, the advantages that were trained on, and
by how much the update that followed made each token likelier.

Run me: `python -m bookkeeping.episodes` cuts a made-up episode into its segments.
"""

import json
from pathlib import Path

import torch

from bookkeeping.records import append
from fast.batches import collate, cut
from fast.logprobs import token_logprobs
from policy import plain_logprobs

# Episodes to read may take so many bytes: a run of days would save gigabytes that nobody reads.
MOST_BYTES = 64 * 2**20


def save_evaluation(folder: Path, update: int, stage: str, policy, groups: list) -> None:
    """Groups of an evaluation. They have no advantages, because nobody trains on them."""
    for g, group in enumerate(groups):
        for i, e in enumerate(group):
            record = record_of(policy, e, update, stage, g, i)
            append(folder / "episodes.jsonl", record)


@torch.no_grad()
def save_rollout(folder: Path, update: int, policy, groups: list, advantages, cfg) -> None:
    """Groups of a training batch, after the update. advantages [G, k]: those that were trained on.

    Raises FloatingPointError if the policy's log-probs are not finite any more: such weights must
    not become a checkpoint.
    """
    for g, group in enumerate(groups):
        ratios = ratios_of(policy, group, cfg, update)
        for i, e in enumerate(group):
            advantage = round(float(advantages[g, i]), 4)
            record = record_of(policy, e, update, "", g, i, advantage, ratios[i])
            append(folder / "episodes.jsonl", record)


def ratios_of(policy, group: list, cfg, update: int) -> list[list[float]]:
    """Of each member, its sampled tokens' importance ratios by the policy as it is now."""
    logprobs_of = plain_logprobs if cfg.plain else token_logprobs
    out: list[list[float]] = [[] for _ in group]
    played = [n for n, e in enumerate(group) if e.token_ids]  # else the environment gave no task
    for part in cut([group[n] for n in played], cfg.micro_tokens):
        some = [played[i] for i in part]
        pad = policy.tokenizer.pad_token_id
        batch = collate([group[n] for n in some], pad, policy.device)
        now, _ = logprobs_of(policy, batch.ids, batch.mask, cfg.temperature)  # [M]
        if not now.isfinite().all():
            raise FloatingPointError(f"after update {update} the policy's log-probs are not finite")
        ratios = (now - batch.behaviour).exp()
        for n, own in zip(some, ratios.split([group[n].reply_tokens for n in some])):
            out[n] = own.tolist()
    return out


def record_of(policy, e, update, stage, group, member, advantage=None, ratios=None) -> dict:
    """A line of episodes.jsonl."""
    return {
        "update": update, "source": "eval" if stage else "rollout", "stage": stage, "group": group,
        "member": member, "seed": e.seed, "reward": e.reward, "advantage": advantage,
        "components": e.components, "stop_reason": e.stop_reason, "error": e.error,
        "policy_version": e.policy_version, "reply_tokens": e.reply_tokens,
        "logprob": round(sum(e.logprobs), 3), "messages": e.messages,
        "segments": segments(policy, e, ratios),
    }  # fmt: skip


def segments(policy, episode, ratios: list[float] | None) -> list[dict]:
    """An episode cut where the speaker changes: given text, and the policy's tokens with numbers.

    ratios: the importance ratio of each sampled token, [episode.reply_tokens], or None.
    """
    out, at, used = [], 0, 0
    rounded = lambda values: [round(x, 4) for x in values]
    while at < len(episode.token_ids):
        sampled, end = episode.sampled[at], at
        while end < len(episode.token_ids) and episode.sampled[end] == sampled:
            end += 1
        ids = episode.token_ids[at:end]
        if sampled:
            out.append({
                "role": "policy",
                "tokens": [policy.tokenizer.decode([t]) for t in ids],
                "logprobs": rounded(episode.logprobs[at:end]),
                "ratios": ratios and rounded(ratios[used : used + len(ids)]),
            })  # fmt: skip
            used += len(ids)
        else:
            out.append({"role": "given", "text": policy.tokenizer.decode(ids)})
        at = end
    return out


def thin(path: Path, most: int = MOST_BYTES) -> None:
    """Keep episodes.jsonl under `most` bytes: every second update in it goes, not the ends."""
    while path.exists() and path.stat().st_size > most:
        update_of = lambda line: json.loads(line)["update"]
        with open(path, encoding="utf-8") as f:
            updates = sorted({update_of(line) for line in f})
        keep = {*updates[::2], updates[-1]}
        if len(keep) == len(updates):
            return  # one or two updates that are so large
        new = path.with_suffix(".new")
        with open(path, encoding="utf-8") as f, open(new, "w", encoding="utf-8") as out:
            out.writelines(line for line in f if update_of(line) in keep)
        new.replace(path)


if __name__ == "__main__":
    from types import SimpleNamespace

    words = ["Count", " the", " e", ": ", "two", "."]
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(words[i] for i in ids))
    episode = SimpleNamespace(
        token_ids=list(range(6)),
        sampled=[False] * 4 + [True] * 2,
        logprobs=[0.0] * 4 + [-0.5, -0.1],
    )
    for part in segments(SimpleNamespace(tokenizer=tokenizer), episode, [1.02, 1.0]):
        print(part)
