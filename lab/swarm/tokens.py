"""What does an episode of swarm cost in tokens, and which part of it? Nearly all of it is read, not said.

    python -m lab.swarm.tokens                                # scripted players on 32 medium development scenarios, a minute
    python -m lab.swarm.tokens --model models/pico_swarm --sampled 16     # and the model's own episodes

Sampling pays for what is said (token after token), training for all of it, and attention for the square. Medians over episodes; `most` is
the longest. A part is counted by itself, so the parts can add up to a little more than the whole where a piece spans two of them.
"""

import re
from collections import defaultdict
from statistics import median

import tyro

from env_swarm import DEV_SEEDS, Swarm
from fast.sampler import TorchSampler
from lab.common import table
from policy import PICO_SWARM, encode, load_policy
from rollout import Episode, expert_episode, play

PARTS = ("whole", "prompt", "read", "said", "thought", "state", "tasks", "offers", "feed")
SECTIONS = {"state": "step", "tasks": "tasks", "offers": "proposals", "feed": "feed"}


def parts(policy, episode: Episode) -> dict[str, int]:
    """Tokens of an episode: all, the prompt, what is read after it, what is said, and in these the thoughts and some sections."""
    count = lambda text: len(encode(policy, text))
    observations = "".join("\n" + m["content"] for m in episode.messages[2:] if m["role"] != "assistant")
    sections = re.findall(r"\n# (?:\w+).*(?:\n- .*)*", observations)
    thoughts = [m["content"].partition("</think>")[0] for m in episode.messages if "</think>" in m["content"] and m["role"] == "assistant"]
    prompt = episode.sampled.index(True)
    of = {"whole": len(episode.token_ids), "prompt": prompt, "said": episode.reply_tokens, "thought": sum(map(count, thoughts))}
    of["read"] = of["whole"] - of["prompt"] - of["said"]
    return of | {name: sum(count(s) for s in sections if s.startswith(f"\n# {word}")) for name, word in SECTIONS.items()}


def main(model: str = str(PICO_SWARM), episodes: int = 32, sampled: int = 0, difficulty: str = "medium") -> None:
    policy, rows, seeds = load_policy(model, 0, 64, "cpu"), [], [DEV_SEEDS + i for i in range(episodes)]
    played = {
        style: [expert_episode(policy, Swarm(difficulty, style=style), seed) for seed in seeds] for style in ("expert", "novice", "grinder")
    }
    if sampled:
        groups = play(policy, TorchSampler(policy), lambda: Swarm(difficulty), seeds[:sampled], 1, 160, 1.0, 0)
        played["the model, sampled"] = [episode for group in groups for episode in group]
    for who, some in played.items():
        of = defaultdict(list)
        for episode in some:
            for name, tokens in parts(policy, episode).items():
                of[name].append(tokens)
        rows.append([who, max(of["whole"]), *(f"{median(of[name]):.0f}" for name in PARTS), len(some)])
    print(*table("| player | most | " + " | ".join(PARTS) + " | n |", rows), sep="\n")


if __name__ == "__main__":
    tyro.cli(main)
