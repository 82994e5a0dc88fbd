"""Letters, tier 6, paid by chance: is it the reward that teaches, or would any do?

    python train.py --env lab/claims/chance.py:Chance --updates 150 --max-tokens 320     # one run; lab/claims/letters.py has the arm

On some bases GRPO brings out a habit even if rewards say nothing (Shao et al. 2025, "Spurious Rewards: Rethinking Training Signals in
RLVR"). Here every episode of training is paid 0 or 1 by the toss of a coin, so nearly every group has a signal, and none of it is about the
answer. "exact" still says what was right, for evaluations.
"""

import itertools

import numpy as np

from env_letters import Letters


class Chance(Letters):
    """As the letters environment of the default command, but for what is paid."""

    levels = [6]
    tosses = itertools.count()  # of this process: every episode is another one

    def __init__(self):
        super().__init__(6, "binary", True, "states")

    def reset(self, seed: int) -> list[dict]:
        self.coin = np.random.default_rng((seed, next(Chance.tosses)))
        return super().reset(seed)

    def score(self) -> dict[str, float]:
        return super().score() | {"reward": float(self.coin.integers(2))}


if __name__ == "__main__":
    rewards = []
    for _ in range(8):
        env = Chance()
        env.reset(0)
        env.step("<answer>{}</answer>")
        rewards.append(env.score()["reward"])
    print("one answer, eight times:", rewards)
