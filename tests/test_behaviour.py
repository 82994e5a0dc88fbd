"""Protects the behaviour report: differences are paired, corrected and the right way round, and
calls are those that were made.

Runs are played by scripted players (made_up.swarm), and every number is worked out again from the
games themselves.
"""

import random
import re
from pathlib import Path

import numpy as np
import pytest

import made_up
import metrics
from bookkeeping import behaviour, records, tables
from env_swarm import DEV_SEEDS, Swarm, play

N = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return made_up.swarm(tmp_path_factory.mktemp("run"), N)


def evaluation(reward, update: int = 0, stage: str = "after_sft", **lists) -> dict:
    at = {"update": update, "stage": stage, "tasks": "medium v0.2", "trained": True}
    return at | {"reward": list(map(float, reward)), **lists}


# -------------------------------------------------------------------------- averages, differences


def test_averages_are_those_of_the_games(run):
    (found,) = behaviour.sections(records.lines(run / "evals.jsonl"))
    assert found["title"] == "Behaviour: after SFT → update 40 (final)"
    rows = {row[0]: row[1:] for row in found["rows"]}
    scores = [[play(Swarm(style=s), DEV_SEEDS + i) for i in range(N)] for s in ("random", "expert")]
    number = lambda cell: float(re.match(r"[-+]?[\d.]+", cell)[0])
    for name in ("reward", "quality", "used_submit_work", "gain", "error_rate"):
        digits, factor, _ = tables.scale(name)
        x, y = (factor * np.mean([score[name] for score in played]) for played in scores)
        *cells, _, clearly = rows[tables.NAMES[name]][:5]
        expected = pytest.approx([x, y, y - x], abs=0.51 * 10**-digits)
        assert [number(cell) for cell in cells] == expected
        assert clearly == ("up" if y > x else "down")
    assert rows["trades proposed"][4] == "cannot tell"
    assert rows["turns in which something was done"][1] == "25, always"
    # the same for both, everywhere
    assert "not frozen at the end" in found["text"][1] and "not frozen at the end" not in rows


def test_a_difference_is_paired_by_scenario():
    """Scenarios differ by far more than the checkpoints do: two means overlap, the paired
    difference is clear. A scenario without a result takes its pair out."""
    hard = np.random.default_rng(0).random(60)
    later = hard + 0.02 + 0.001 * np.sin(np.arange(60))
    quality = [None, *later[1:]]
    a, b = evaluation(hard, quality=quality), evaluation(later, quality=[*hard[:59], None])
    x, y = behaviour.paired(a, b, "reward")
    assert metrics.mean(x).high > metrics.mean(y).low
    gain = metrics.gain(hard, later)
    assert metrics.gain(x, y) == gain and gain.low > 0.019 and gain.n == 60
    reward, other = behaviour.averages(a, b)["rows"]
    assert reward[3:6] == [gain.text(3, 1, sign="+"), "<0.001", "up"]
    assert len(behaviour.paired(a, b, "quality")[0]) == 58 and other[3].startswith("-")


# ------------------------------------------------------------------------------ calls


def test_the_calls_of_an_episode_are_those_that_were_made(run):
    saved, env = records.lines(run / "episodes.jsonl")[-1], Swarm(style="expert")
    assert saved["stage"] == "final"
    play(env, saved["seed"])
    for turn, (call, result) in zip(env.log, behaviour.calls_of(saved["messages"]), strict=True):
        assert call == behaviour.brief(turn)
        assert result in (turn.result, f"error: {turn.result}", "(the end)")


def test_calls_that_cannot_be_read_are_told_and_not_raised():
    answer = {"role": "tool", "content": "# error: the tool call is not JSON\n# step 2 of 25: …"}
    characters = "<tool_call>{}[]\"': /|`\n"
    garbage = ["".join(random.Random(i).choices(characters, k=60)) for i in range(50)]
    for text in ["", "no call", "<tool_call>{", "<tool_call>[1]</tool_call>", *garbage]:
        say = {"role": "assistant", "content": text}
        (call, result), (_, end) = behaviour.calls_of([say, answer, say])
        assert call in ("(no call)", "(a call that cannot be read)")
        assert (result, end) == ("error: the tool call is not JSON", "(the end)")
