"""Protects the behaviour report: differences are paired, corrected and the right way round, and
what is said of the best episode is true.

Runs are played by scripted players (made_up.swarm), and every number is worked out again from the
games themselves.
"""

import random
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import made_up
import metrics
from bookkeeping import behaviour, records, tables
from env_swarm import DEV_SEEDS, Swarm, play

N = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return made_up.swarm(tmp_path_factory.mktemp("run"), N)


def load(folder: Path) -> tuple[list[dict], list[dict]]:
    return tuple(records.lines(folder / f"{x}.jsonl") for x in ("evals", "episodes"))


def table(sections: list[dict], title: str) -> dict:
    return next(s for s in sections if s["title"].startswith(title))


def evaluation(reward, update: int = 0, stage: str = "after_sft", **lists) -> dict:
    at = {"update": update, "stage": stage, "tasks": "medium v0.2", "trained": True}
    return at | {"reward": list(map(float, reward)), **lists}


# -------------------------------------------------------------------------- averages, differences


def test_averages_are_those_of_the_games(run):
    found = table(behaviour.sections(*load(run)), "Behaviour: after SFT → update 40 (final)")
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
    row = table(behaviour.sections(*load(run)), "Scenario by scenario")["rows"][7]
    x, y = (play(Swarm(style=style), DEV_SEEDS + 7) for style in ("random", "expert"))
    assert row[:2] == ["7", f"{x['reward']:.3g} → {y['reward']:.3g}"]
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


# ------------------------------------------------------------------------------ rows, tools, the best


def test_the_best_episode_is_the_best_and_its_calls_are_those_that_were_made(run):
    evals, episodes = load(run)
    reward, env = np.array(evals[3]["reward"]), Swarm(style="expert")
    best = int(np.argmax(reward))
    play(env, DEV_SEEDS + best)
    section = table(behaviour.sections(evals, episodes), "The best episode")
    said = f"Scenario {best} earned {reward.max():.3f}, the most of {N}"
    assert section["text"][0].startswith(said)
    saved = episodes[section["episode"]]
    assert (saved["seed"], saved["stage"]) == (DEV_SEEDS + best, "final")
    for turn, (call, result) in zip(env.log, behaviour.calls_of(saved["messages"]), strict=True):
        assert call == behaviour.brief(turn)
        assert result in (turn.result, f"error: {turn.result}", "(the end)")
    rows = {row[0]: row for row in section["rows"]}
    posts = np.array(evals[3]["used_post"])
    distance, r = (posts[best] - posts.mean()) / posts.std(ddof=1), stats.spearmanr(posts, reward)
    assert rows["posts"][3:] == [f"{distance:+.1f}", f"{r.statistic:+.2f} (p {r.pvalue:.3f})"]
    assert behaviour.best_episode(evals[1], evals[3], [])["episode"] is None


def test_calls_that_cannot_be_read_are_told_and_not_raised():
    answer = {"role": "tool", "content": "# error: the tool call is not JSON\n# step 2 of 25: …"}
    characters = "<tool_call>{}[]\"': /|`\n"
    garbage = ["".join(random.Random(i).choices(characters, k=60)) for i in range(50)]
    for text in ["", "no call", "<tool_call>{", "<tool_call>[1]</tool_call>", *garbage]:
        say = {"role": "assistant", "content": text}
        (call, result), (_, end) = behaviour.calls_of([say, answer, say])
        assert call in ("(no call)", "(a call that cannot be read)")
        assert (result, end) == ("error: the tool call is not JSON", "(the end)")
