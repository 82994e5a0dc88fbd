"""Protects the behaviour report: differences are paired, corrected and the right way round, and
what is said of the best episode is true.

Runs are played by scripted players (made_up.swarm), and every number is worked out again from the
games themselves.
"""

import math
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


def load(folder: Path) -> tuple[dict, list[dict], list[dict]]:
    evals, episodes = (records.lines(folder / f"{x}.jsonl") for x in ("evals", "episodes"))
    return records.read(folder / "config.json"), evals, episodes


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
        *cells, _, clearly = rows[tables.NAMES[name]]
        expected = pytest.approx([x, y, y - x], abs=0.51 * 10**-digits)
        assert [number(cell) for cell in cells] == expected
        assert clearly == ("up" if y > x else "down")
    assert rows["trades proposed"][-1] == "cannot tell"
    # the same for both, everywhere
    assert "not frozen at the end" in found["text"][1] and "not frozen at the end" not in rows


def test_a_difference_is_paired_by_scenario():
    """Scenarios differ by far more than the checkpoints do: two means overlap, the paired
    difference is clear. A scenario without a result takes its pair out."""
    hard = np.random.default_rng(0).random(60)
    later = hard + 0.02 + 0.001 * np.sin(np.arange(60))
    quality = [None, *later[1:]]
    a, b = evaluation(hard, quality=quality), evaluation(later, quality=[*hard[:59], None])
    reward, other = behaviour.changes(a, b)
    assert reward["a"].high > reward["b"].low
    assert reward["gain"] == metrics.gain(hard, later) and reward["gain"].low > 0.019
    assert reward["p"] < 0.001 and reward["gain"].n == 60
    assert other["gain"].n == 58 and other["gain"].mean < 0


def test_where_nothing_changed_hardly_a_table_says_otherwise():
    """Twenty measures without a difference: one of them passes 0.05 in 64 of 100 tables;
    corrected, one table in twenty may err. Of 16 tables, 10 and 1 are expected."""
    rng, raw, corrected = np.random.default_rng(2), 0, 0
    for _ in range(16):
        lists = lambda: {f"measure_{i}": rng.normal(size=40).tolist() for i in range(20)}
        noise = lambda: evaluation(rng.normal(size=40), **lists())  # noqa: B023
        rows = behaviour.changes(noise(), noise())
        raw += any(row["p"] < 0.05 for row in rows)
        corrected += any(row["corrected"] < 0.05 for row in rows)
    assert raw >= 6 and corrected <= 3


def test_the_parts_of_the_gain_add_up_with_the_weights_that_were_set(run):
    config, evals, episodes = load(run)

    def said(config: dict) -> str:
        text = behaviour.sections(config, evals, episodes)[0]["text"]
        return "".join(t for t in text if t.startswith("Where the"))

    pattern = r"(payoff|reputation|quality|diversity) ([-+][\d.]+)"
    parts = {name: float(x) for name, x in re.findall(pattern, said(config))}
    total = float(re.search(r"Where the ([-+][\d.]+)", said(config))[1])
    assert sum(parts.values()) == pytest.approx(total, abs=0.003)
    gain = np.mean(evals[3]["reputation"]) - np.mean(evals[1]["reputation"])
    assert parts["reputation"] == pytest.approx(0.3 * gain, abs=6e-4)
    for other in ({"set": ["reputation=0.5"]},):
        assert said(config | other) == "", "these are not the weights that paid"


# ---------------------------------------------------------------------------- rows, tools, the best


def test_the_rows_of_the_first_scenarios(run):
    found = table(behaviour.sections(*load(run)), "Scenario by scenario")
    assert [row[0] for row in found["rows"]] == [str(i) for i in range(8)]
    for i, row in enumerate(found["rows"]):
        cells = dict(zip(found["head"], row))
        a, b = (play(Swarm(style=style), DEV_SEEDS + i) for style in ("random", "expert"))
        assert cells["reward"] == f"{a['reward']:.3g} → {b['reward']:.3g}"
        assert cells["tasks claimed"] == f"{a['used_claim_task']} → {b['used_claim_task']}"


def test_tool_shares_fill_the_turns_of_every_episode(run):
    evals = load(run)[1]
    for e in evals:
        shares = behaviour.tool_shares(e)
        assert list(shares)[-2:] == ["errors", "pass_turn"]
        assert sum(shares.values()) == pytest.approx(np.ones(N))
        assert shares["vote"] == pytest.approx(np.array(e["used_vote"]) / 25)
    assert behaviour.tool_shares({"used_post": 0.0, "error_rate": 1.0})["errors"] == 1.0
    found = behaviour.tool_use(evals)
    assert len(found["rows"]) == 4 and {"claim_task", "errors"} < set(found["head"])


def test_the_best_episode_is_the_best_and_its_calls_are_those_that_were_made(run):
    config, evals, episodes = load(run)
    found = behaviour.sections(config, evals, episodes)
    reward, env = np.array(evals[3]["reward"]), Swarm(style="expert")
    best = int(np.argmax(reward))
    play(env, DEV_SEEDS + best)
    section, calls = table(found, "The best episode"), table(found, "Its 25 calls")
    assert section["text"][0].startswith(
        f"Scenario {best} earned {reward.max():.3f}, the most of {N}"
    )
    saved = episodes[section["episode"]]
    assert (saved["seed"], saved["stage"]) == (DEV_SEEDS + best, "final")
    for turn, row in zip(env.log, calls["rows"], strict=True):
        assert row[1] == behaviour.brief(turn)
        assert row[2] in (turn.result, f"error: {turn.result}", "(the end)")
    rows = {row[0]: row for row in section["rows"]}
    posts = np.array(evals[3]["used_post"])
    if np.ptp(posts):
        distance = (posts[best] - posts.mean()) / posts.std(ddof=1)
        assert rows["posts"][3] == f"{distance:+.1f}"
        r = stats.spearmanr(posts, reward).statistic
        assert rows["posts"][4].startswith(f"{r:+.2f} [")
    last = behaviour.best_episode(config, evals[1], evals[3], [])[0]["text"][-1]
    assert last == "Its conversation is not among the saved episodes."


@pytest.mark.parametrize("n,r", [(60, 0.0), (60, 0.7)])
def test_the_interval_of_a_rank_correlation_holds_the_truth(n, r):
    rng, held = np.random.default_rng(4), 0
    truth = 6 / math.pi * math.asin(r / 2)  # Spearman's of a normal pair with correlation r
    for _ in range(300):
        x = rng.normal(size=n)
        y = r * x + math.sqrt(1 - r**2) * rng.normal(size=n)
        found = behaviour.rank_correlation(x, y)
        held += found.low <= truth <= found.high
    assert 0.90 < held / 300 < 0.99
    assert behaviour.rank_correlation(np.ones(9), np.arange(9.0)) is None


def test_calls_that_cannot_be_read_are_told_and_not_raised():
    say = lambda text: {"role": "assistant", "content": text}
    answer = {"role": "tool", "content": "# error: the tool call is not JSON\n# step 2 of 25: …"}
    garbage = ["", "no call", "<tool_call>{", "<tool_call>[1]</tool_call>", "<think>never ends"]
    characters = "<tool_call>{}[]\"': /|`\n"
    garbage += ["".join(random.Random(i).choices(characters, k=60)) for i in range(50)]
    for text in garbage:
        talk = [{"role": "user", "content": "?"}, say(text), answer, say(text)]
        (call, result), (_, end) = behaviour.calls_of(talk)
        assert call in ("(no call)", "(a call that cannot be read)")
        assert (result, end) == ("error: the tool call is not JSON", "(the end)")


# -------------------------------------------------------------------------------- text, moments


def test_what_a_model_said_stays_text_in_markdown():
    said, name = "post <img src=x> [a](b) | `code`\n# title", "<b>[x](y)|"
    section = tables.section(name, [name], ["step", name], [["1", said], [name, ""]], said=(1,))
    text = tables.markdown([section])
    assert "| 1 | `post <img src=x> [a](b) \\| 'code' # title` |" in text
    assert "<b>" not in text and "](y)" not in text


def test_any_two_evaluations_can_be_named_and_others_do_not_mix_in(run):
    config, evals, episodes = load(run)
    other = [e | {"tasks": "hard v0.2", "trained": False, "reward": [9.0] * N} for e in evals]
    mixed = [*other, *evals, evals[3] | {"stage": "eval_only", "reward": [7.0] * N}]
    whole = behaviour.sections(config, evals, episodes)
    assert behaviour.sections(config, mixed, episodes) == whole
    titles = lambda *which: behaviour.sections(config, mixed, episodes, which)[0]["title"]
    assert titles("before", "20") == "Behaviour: before SFT → update 20"
    assert titles("final", "0") == "Behaviour: update 40 (final) → after SFT"
    assert behaviour.sections(config, evals[:1], episodes) == []  # it has only begun
    for which, why in ((("0", "33"), "no evaluation 33"), (("0", "after_sft"), "the same")):
        with pytest.raises(ValueError, match=why):
            titles(*which)
    fewer = {k: v[:5] if isinstance(v, list) else v for k, v in evals[1].items()}
    with pytest.raises(ValueError, match="after SFT has 5 scenarios and update 40"):
        behaviour.sections(config, [fewer, evals[3]], episodes)
