"""Letters in levels of length, as an environment of one's own (docs/fork.md): from tier 6, up to 80 letters, to tier 7, up to 150.

    python train.py --env lab/claims/lengths.py:Lengths --model models/pico_long --curriculum

models/pico_long was never shown more than 80 letters. The last level is tier 7 itself; those between have its 12 to 20 letters asked.
"""

from env_letters import TIERS, Letters

LEVELS = {"40-80": TIERS[6], "80-95": (80, 95), "95-110": (95, 110), "110-130": (110, 130), "80-150": TIERS[7]}
CURVE = range(60, 151, 10)  # exact lengths, for the curve of a final table
SOURCE, _, _, P_SEVERAL, FEWEST, MOST = TIERS[7]
TIERS |= {name: tier if len(tier) > 2 else (SOURCE, *tier, P_SEVERAL, FEWEST, MOST) for name, tier in LEVELS.items()}
TIERS |= {f"{n} letters": (SOURCE, n, n, P_SEVERAL, FEWEST, MOST) for n in CURVE}


class Lengths(Letters):
    levels = list(LEVELS)

    def __init__(self, level: str = "80-150"):
        self.level = level
        super().__init__(level, "binary", True, "states")

    def reset(self, seed: int) -> list[dict]:
        self.difficulty = self.level  # a curriculum sets it
        return super().reset(seed)


if __name__ == "__main__":
    for name in Lengths.levels:
        env = Lengths(name)
        print(name, env.reset(seed=7)[0]["content"], sep=": ")
