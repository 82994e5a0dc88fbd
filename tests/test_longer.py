"""Protects the study of longer strings: levels of the lengths they say, and a base that really saw
no string of more than 80 letters."""

import random
import re

import pytest

from lab.base import corpus
from lab.base.pretrain import POLISHED
from lab.base.tokenizer import build
from lab.environments import Exactly, Lengths


@pytest.mark.parametrize(
    "level, letters, asked",
    [
        ("40-80", (40, 80), (8, 12)),
        ("80-95", (80, 95), (12, 20)),
        ("95-110", (95, 110), (12, 20)),
        ("110-130", (110, 130), (12, 20)),
        ("80-150", (80, 150), (12, 20)),
        ("130", (130, 130), (12, 20)),
    ],
)
def test_a_level_has_strings_of_its_lengths(level, letters, asked):
    env = Exactly() if level in Exactly.levels else Lengths()
    env.level = level  # as a curriculum does it
    tasks = [(env.reset(seed), env.task)[1] for seed in range(300)]
    sizes, wanted = {len(task.text) for task in tasks}, {len(task.letters) for task in tasks}
    assert (min(sizes), max(sizes)) == letters and (min(wanted), max(wanted)) == asked


def test_the_base_was_shown_no_string_of_more_than_80_letters():
    tokenizer, rng = build(), random.Random(0)
    tasks = [corpus.repeating_task(rng) for _ in range(3000)]
    assert max(len(task.text) for task in tasks) == 80
    assert max(len(task.letters) for task in tasks) == 20
    rows = corpus.tally_rows(tokenizer, rng, 20, 512, corpus.repeating_task, corpus.words_between)
    how = {"draw": corpus.third_of_tier_6, "reword": corpus.with_words}
    rows += [corpus.letters_row(tokenizer, rng, POLISHED, POLISHED, **how) for _ in range(100)]
    pairs = [(tokenizer.decode(p), tokenizer.decode(r)) for row in rows for p, r, *_ in row]
    quoted = [re.findall('"([a-z]+)"', prompt) for prompt, _ in pairs]
    spelled = [re.findall(r"(?<!\S)([a-z])\d*(?!\S)", reply) for _, reply in pairs]
    assert max(len(text) for (text,) in quoted) <= 80 and 70 < max(map(len, spelled)) <= 80
