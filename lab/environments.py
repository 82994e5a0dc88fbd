"""Environments that only arms of lab/study.py need, each as FILE.py:CLASS.

    python train.py --env lab/environments.py:Chance --updates 150 --max-tokens 320
    python train.py --env lab/environments.py:Lengths --model models/pico_long --curriculum

Spelt      letters of tiers 1 to 5, with the word spelt in the question
Chance     letters of tier 6, paid by a coin toss: is it the reward that teaches?
Minus      letters of tier 6, always paid -1: what a teacher's constant part does alone
Lengths    letters in levels of length, for a curriculum: tier 6, then up to the 150 of tier 7
Exactly    the same in levels of one length each, for the curve of docs/letters.md
Lawless    the swarm without tax, audit, decay or circuit breaker
Strict     the swarm with each rule as tight as it ever is on hard scenarios
Leaves     the swarm under the published rules, with an expert that stops early

And an expert for sums that shows its steps: in_two_steps (docs/real.md).

    python -m lab.environments      # the kinds of SmolLM2's sums, for docs/why_rl.md
"""

import re
from dataclasses import dataclass, replace

import numpy as np

import settings
from env_letters import TIERS, Letters
from env_swarm import Swarm
from swarm.bots import draw_scenario

# The first level is tier 6, the last tier 7; those in between ask for tier 7's 12 to 20 letters.
LONGER = {"80-95": (80, 95), "95-110": (95, 110), "110-130": (110, 130), "80-150": (80, 150)}
EXACT = {str(n): (n, n) for n in range(60, 151, 10)}
TIERS["40-80"] = TIERS[6]
for level, (shortest, longest) in (LONGER | EXACT).items():
    TIERS[level] = TIERS[7]._replace(shortest=shortest, longest=longest)


class Levels(Letters):
    """Letters, binary reward, in the levels that a class lists, the easiest first."""

    style = "states"

    def __init__(self):
        self.level = self.levels[-1]
        super().__init__(self.level, "binary", True, self.style)

    def reset(self, seed: int) -> list[dict]:
        self.difficulty = self.level  # a curriculum sets it
        return super().reset(seed)


class Minus(Levels):
    """Letters of tier 6, every episode paid -1: with --baseline none, all that is sampled becomes less
    likely. A control of --teacher, whose advantages are negative on average."""

    levels = [6]

    def score(self) -> dict[str, float]:
        marks = super().score()  # the expert has to earn a little more, or it is refused
        return marks | {"reward": -1.0 + 1e-9 * marks["exact"]}


class Lengths(Levels):
    levels = ["40-80", *LONGER]


class Exactly(Levels):
    levels = list(EXACT)


class Spelt(Levels):
    """With spaces between the letters: SmolLM2's tokens are pieces of words, and hide them.

    verl-recipe's char_count does the same with dashes, for the same model.
    """

    levels = [1, 2, 3, 4, 5]
    style = "derives"

    def reset(self, seed: int) -> list[dict]:
        (message,) = super().reset(seed)
        word, spelt = f'"{self.task.text}"', f'"{" ".join(self.task.text)}"'
        return [message | {"content": message["content"].replace(word, spelt)}]


class Chance(Levels):
    """With some base models GRPO brings out a habit even if rewards are random (Shao et al. 2025,
    "Spurious Rewards"). Here nearly every group has a signal, but none is about the answer."""

    levels = [6]

    def score(self) -> dict[str, float]:
        return super().score() | {"reward": float(COIN.integers(2))}


# Tossed once per episode of this process. A run's first check requires that the expert earn more
# than empty replies: with this seed, over four tosses each, it does.
COIN = np.random.default_rng(3)


@dataclass
class Lawless(Swarm):
    """The bots and tasks are those that the seed draws; only the rules differ."""

    error_penalty: float = 0.5  # as for every small model
    rules = {"tax": 0.0, "audit": 0.0, "decay": 1.0, "threshold": 0.0, "shift": None}

    def reset(self, seed: int) -> list[dict]:
        return self.start(replace(draw_scenario(seed, self.difficulty, self.version), **self.rules))


class Strict(Lawless):
    rules = {"tax": 0.15, "audit": 0.3, "decay": 0.97, "threshold": 20.0, "shift": None}


LEAVING = 1 / 16  # in each turn, so that episodes have 12.8 turns on average, as the published base


@dataclass
class Leaves(Swarm):
    """The published rules: a reply without a call ends the episode, and payoff ends at 1.

    The published base stopped early (12.8 of 25 turns); pico_swarm does not. So the scripted player
    does, and SFT passes it on: in any turn it may say that it is done, instead of a call.
    """

    style: str = "proposer"
    error_penalty: float = 0.5  # as for every small model
    payoff_scale: str = "published"
    text_ends: bool = True

    def expert_reply(self) -> str:
        call = super().expert_reply()
        return "I am done." if self.dice.random() < LEAVING else call


def in_two_steps(entry: dict) -> str:
    """An expert for reasoning_gym's chain_sum with two numbers: first the tens, then the ones.

    15 - 43 becomes "15 - 40 = -25", "-25 - 3 = -28".
    """
    first, sign, second = entry["metadata"]["expression"].split()
    a, b = int(first), int(second)
    ones = b % 10
    half = int(entry["answer"]) - (ones if sign == "+" else -ones)
    steps = f"{a} {sign} {b - ones} = {half}\n{half} {sign} {ones} = {entry['answer']}"
    return f"<think>\n{steps}\n</think>\n<answer>{entry['answer']}</answer>"


def questions(cfg: settings.Config, seeds: list[int]) -> list[str]:
    """What the tasks of these seeds ask."""
    env = settings.make_env(cfg, cfg.difficulty)
    return [env.reset(seed)[-1]["content"] for seed in seeds]


def numbers_of(question: str) -> tuple:
    """The sign, and the two numbers; in order of size if the sign is a plus."""
    first, sign, second = re.search(r"(\d+) ([+-]) (\d+)", question).groups()
    return (sign, *sorted((first, second))) if sign == "+" else (sign, first, second)


def main() -> None:
    """Keep which held-out sums are additions; print which questions SFT and GRPO share."""
    from evaluate import HELD_OUT_SEEDS
    from lab.tables import RESULTS, digits, keep, read

    flags = read("real")["arms"]["true_answers"]["settings"]
    cfg, _ = settings.command_line(f"{flags} --eval-n 512".split())
    cfg = settings.complete(cfg, 134_515_008, "smollm2", {})
    held_out = questions(cfg, settings.seeds_from(cfg, HELD_OUT_SEEDS, cfg.eval_n))
    additions = digits([float(numbers_of(x)[0] == "+") for x in held_out])
    keep(RESULTS / "real.json", {"additions": additions}, {})
    shown = questions(cfg, settings.sft_seeds(cfg))
    print(f"SFT: {len(shown)} questions, {len({*shown})} different")
    for cfg.seed in range(3):
        drawn = questions(cfg, [x for n in range(80) for x in settings.task_seeds(cfg, n)])
        print(f"GRPO: {len({*drawn})} different, {len({*drawn} & {*shown})} of them among SFT's")
    known = {numbers_of(x) for x in shown}
    swapped = sum(numbers_of(x) in known for x in held_out)
    print(f"held out and among SFT's: {len({*held_out} & {*shown})}; {swapped} with terms swapped")


if __name__ == "__main__":
    main()
