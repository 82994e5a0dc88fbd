"""How models/pico_long/ was made: pico_base, taught to find its place in a string at any distance.

    python -m lab.base.long       # half an hour on one core

A policy that was trained on pico_base at 40 to 80 letters is right in 0.4% of tier 7, 80 to 150
letters: it copies a string by the last letters and by how far back they are, and beyond what it has
seen, after a pair of letters that comes twice, it goes on at the wrong place. And more than 12
letters were never asked for. So three things are taught, and no string is longer than before:

    distance    words stand between a string and its tally, up to 150 letters of them
    the place   strings of 8, 12 or 18 different letters too, and stretches that come twice: pairs
                repeat, so more has to be compared. (Of 4 and 6 different letters: after 300 steps
                6% of the tokens were wrong, and strings of 26 were copied worse.)
    asking      1 to 20 letters are asked for

What it can do beyond 80 letters is what it made of that; docs/letters.md says how much, and what
RL adds. The figures above were seen on the way; their runs are not kept.
"""

import random

import tyro

from env_letters import Task, english_words, make_task
from lab.base import corpus
from lab.base.corpus import asking, letters_chat, pad_rows
from lab.base.pretrain import POLISHED, Pretrain, dice, main

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MOST = 80  # letters of a string
LONG = Pretrain(out="models/pico_long", start_from="models/pico_base", seed=7, threads=1)


def draw_task(rng: random.Random) -> Task:
    """A string of 10 to 80 letters: half are long, half have few letters, a third a stretch twice."""
    n = rng.randint(10, MOST) if rng.random() < 0.5 else rng.randint(round(0.7 * MOST), MOST)
    pool = rng.sample(LETTERS, rng.choice([8, 12, 18, 26, 26, 26]))
    text = "".join(rng.choice(pool) for _ in range(n))
    if rng.random() < 0.35:
        k = rng.randint(2, 6)
        i, j = rng.randrange(n - k), rng.randrange(n - k)
        text = (text[:j] + text[i : i + k] + text[j + k :])[:n]
    letters = rng.sample(LETTERS, rng.choice([1, 2, 3, 5, 8, 10, 12, 14, 16, 18, 20]))
    return asking(rng, text, letters, rng.uniform(0.3, 0.9) if rng.random() < 0.7 else 0.0)


def words_between(rng: random.Random, most: int) -> str:
    """English words of up to `most` letters in all, to stand between a string and its tally."""
    words, out, n = english_words(), "", rng.randint(0, most)
    while len(out) < n:
        out += " " + words[rng.randrange(len(words))]
    return out


def tally_rows(tokenizer, rng: random.Random, n: int, length: int) -> list[list]:
    """n rows of spec, words, tally, spec, words, tally, …, packed."""
    between = lambda rng: words_between(rng, rng.choice([0, 40, 150]))
    return corpus.tally_rows(tokenizer, rng, n, length, draw_task, between)


def chat_rows(tokenizer, rng: random.Random, n: int) -> list[list]:
    """n chats in all habits: a third are of tier 6, half have words before or after the string."""

    def reword(ask: str) -> str:
        words = words_between(rng, rng.choice([0, 0, 60, 150]))
        if words and rng.random() < 0.3:
            return f"{words.strip()} {ask}"
        return ask.replace('". ', f'".{words} ', 1) if words else ask

    draw = lambda: make_task(rng, 6) if rng.random() < 0.35 else draw_task(rng)
    thinks = lambda: rng.random() < 0.92
    return [
        letters_chat(tokenizer, rng, draw(), thinks(), POLISHED, LONG.habits, reword)
        for _ in range(n)
    ]


def batch(cfg: Pretrain, tokenizer, step: int):
    """10 rows of tallies and 16 chats."""
    rng = dice(cfg, step)
    kinds = (tally_rows(tokenizer, rng, 10, 512), chat_rows(tokenizer, rng, 16))
    return [pad_rows(rows, tokenizer) for rows in kinds]


if __name__ == "__main__":
    main(tyro.cli(Pretrain, default=LONG), {"long": batch})
