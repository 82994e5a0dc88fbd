"""Known tasks as an environment: rows of a file, or a generator of the reasoning-gym package.

    python train.py --env jsonl:rows.jsonl
    python train.py --env jsonl:train.jsonl,held_out=test.jsonl,scorer=number
    python train.py --env reasoning_gym:letter_counting,min_words=2,max_words=4

Both ask one question, read the one answer inside <answer> and </answer>, and give it to a scorer.
What differs is where a question comes from (bridges/rows.py, bridges/gym.py); this file is the
environment that both become. bridges/task.py keeps training and held-out tasks apart.

A scorer is somebody's code as well. If it raises, its episode has reward 0 and `scorer_failed` 1,
and the first such error is printed. It is not left out, as the episode of a broken environment is:
what breaks a scorer is most often the reply, and a policy would learn to break it.

Run me: `python -m bridges.known` shows a task of a small file, and what six replies earn.
"""

import re
import sys
from functools import cache

from bridges.gym import open_generator
from bridges.rows import open_rows
from bridges.task import Source, side_of_seed
from env_letters import split_thinking
from fast.machine import Hung, in_time

LONGEST_ANSWER = 10_000  # characters; what is longer is no answer
HINT = "Think first inside <think> and </think> if that helps. Then give"
ASK = "the answer inside <answer> and </answer>."


class Known:
    """One question at a time."""

    tools = None
    max_turns = 1
    seconds = 20.0  # for a call: a regular expression may run away (bookkeeping/guard.py)

    def __init__(self, source: Source, think: bool):
        self.source, self.think = source, think

    def reset(self, seed: int) -> list[dict]:
        self.task, self.reply = self.source.draw(seed), ""
        question = self.task.question
        gap = "\n\n" if "\n" in question else " "
        hint = HINT if self.think else "Do not think. Give"
        return [{"role": "user", "content": f"{question}{gap}{hint} {ASK}"}]

    def step(self, reply: str) -> tuple[list[dict], bool]:
        self.reply = reply
        return [], True

    def score(self) -> dict[str, float]:
        answer = answer_of(self.reply, self.think)
        marks = {"reward": 0.0, "exact": 0.0, "format": float(answer is not None)}
        failed = 0.0
        if answer is not None:
            try:
                marks |= marks_of(self.task.mark(answer))
            except (Exception, Hung) as error:  # any code may be in it, and any reply may come
                failed = 1.0
                tell_once(f"a scorer failed ({type(error).__name__}: {str(error)[:200]!a})")
        return marks | {"scorer_failed": failed}

    def expert_reply(self) -> str:
        return self.task.expert(self.think)

    def how_many(self, seed: int) -> int | None:
        """Different tasks in the range of this seed; None if there is no end of them."""
        return self.source.how_many(side_of_seed(seed))


@cache
def different(env: str, first: int, n: int) -> list[int]:
    """Of a generator's n seeds, from `first` on, those whose task no earlier one has.

    Some have few, and a task that is played twice is one result, not two (of 256 that
    tower_of_hanoi gives, 19 differ). A seed whose task cannot be had stays: it costs its own
    episode, when it is played.
    """
    known, tasks = open_known(env, True), {}
    for seed in range(first, first + n):
        try:
            tasks.setdefault(in_time(known.seconds, known.reset, seed)[0]["content"], seed)
        except (Exception, Hung):
            tasks[seed] = seed
    return list(tasks.values())


def answer_of(reply: str, think: bool) -> str | None:
    """The text of the one answer after the thinking, or None. Never raises, whatever the reply."""
    rest = split_thinking(reply)[1]
    before, opened, inside = rest.partition("<answer>")
    body, closed, after = inside.partition("</answer>")
    if not (opened and closed) or "<answer>" in inside or "</answer>" in after:
        return None
    if not think and (before.strip() or after.strip() or "think>" in reply):
        return None
    body = body.strip()
    return body if 0 < len(body) <= LONGEST_ANSWER else None


def marks_of(value) -> dict[str, float]:
    """What a scorer returned as the entries of a score. Raises whatever if it cannot be one."""
    marks = dict(value) if isinstance(value, dict) else {"reward": value}
    marks = {str(name): float(mark) for name, mark in marks.items()}
    if not abs(marks["reward"]) < float("inf"):  # NaN fails this, too
        raise ValueError(f"the reward is {marks['reward']}")
    return {"exact": float(marks["reward"] >= 1)} | marks


@cache
def tell_once(sentence: str) -> None:
    print(f"{sentence}; such a reply has reward 0", file=sys.stderr)


# ------------------------------------------------------------------------- the words of --env


def split_env(env: str) -> tuple[str, str, dict[str, str]]:
    """'jsonl:rows.jsonl,scorer=exact' -> ('jsonl', 'rows.jsonl', {'scorer': 'exact'})."""
    kind, _, rest = env.partition(":")
    first, *others = re.split(r",(?=\w+=)", rest)
    return kind, first, dict(other.split("=", 1) for other in others)


@cache  # an environment is made for every episode
def open_source(env: str) -> Source:
    """ValueError, in one sentence, if there is no such file, row, generator or scorer."""
    kind, name, options = split_env(env)
    try:
        if kind == "jsonl":
            return open_rows(name, options)
        return open_generator(name, options)
    except OSError as error:
        raise ValueError(f"--env {env}: {error.strerror}: {error.filename}") from None
    except ValueError as error:
        raise ValueError(f"--env {env}: {error}; see docs/tasks.md") from None


def open_known(env: str, think: bool) -> Known:
    return Known(open_source(env), think)


if __name__ == "__main__":
    import json
    import tempfile
    from pathlib import Path

    rows = [{"question": f"{a} + {a}?", "answer": f"twice {a} #### {2 * a}"} for a in range(1, 31)]
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "sums.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        env = open_known(f"jsonl:{file}", think=True)
        print(env.source.about)
        print("user      ", env.reset(0)[0]["content"])
        expert = env.expert_reply()
        right = answer_of(expert, True)
        replies = [expert, f"<answer>{right}.00</answer>", f"<answer>${right}</answer>"]
        for reply in [*replies, "<answer>-1</answer>", f"{right}", expert + expert]:
            env.step(reply)
            print(env.score()["reward"], repr(reply))
