"""How new are the development tasks of letters? Their seeds are; the words of the word tiers need not be.

Tiers 1 to 5 draw words from a list: 65,737 for tier 1, 2,582 for tier 5. A run that trains on tier 5 meets about a thousand of these, and
so some of the words that it is evaluated on, mostly with other letters asked for. The strings of tiers 6 to 10 are drawn letter by letter.

Run me: `python -m lab.trust.overlap` counts for each tier.
"""

import random

from env_letters import TIERS, Task, make_task, words_between
from settings import DEV_SEEDS, Config, by_size, check, fill, sft_seeds, task_seeds


def tasks(tier: int, seeds) -> list[Task]:
    return [make_task(random.Random(seed), tier) for seed in seeds]


def seen(tier: int) -> tuple[int, int, int]:
    """(development tasks, those whose text was trained on, those whose letters were asked for as well), in a run with the default flags."""
    cfg = Config(difficulty=tier)
    check(cfg)
    fill(cfg, by_size(1e6, "letters"))
    trained = tasks(tier, [*sft_seeds(cfg), *(seed for update in range(cfg.updates) for seed in task_seeds(cfg, update))])
    texts, whole = {task.text for task in trained}, {(task.text, frozenset(task.letters)) for task in trained}
    development = tasks(tier, range(DEV_SEEDS, DEV_SEEDS + cfg.eval_n))
    again = sum((task.text, frozenset(task.letters)) in whole for task in development)
    return len(development), sum(task.text in texts for task in development), again


if __name__ == "__main__":
    for tier, (source, shortest, longest, *_) in TIERS.items():
        n, texts, again = seen(tier)
        pool = f"{len(words_between(shortest, longest)):,} words" if source == "word" else "random strings"
        print(
            f"tier {tier:2}, of {pool:14}  {texts:3} of {n} development tasks have a text that was trained on, {again} with "
            "the same letters"
        )
