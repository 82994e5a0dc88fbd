"""Protects the behaviour report: differences are paired, corrected and the right way round, and what is said of the best episode is true.

Runs are played by scripted players (behaviour.made_up), and every number is worked out again from the games themselves.
"""

import json
import math
import random
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import metrics
import warm
from bookkeeping import behaviour, significance, tables
from env_swarm import DEV_SEEDS, Swarm, play

ROOT = Path(__file__).resolve().parent.parent
N = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return behaviour.made_up(tmp_path_factory.mktemp("run"), N)


def load(folder: Path) -> tuple[dict, list[dict], list[dict]]:
    lines = lambda name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return json.loads((folder / "config.json").read_text()), lines("evals"), lines("episodes")


def table(sections: list[dict], title: str) -> dict:
    return next(s for s in sections if s["title"].startswith(title))


def evaluation(reward, update: int = 0, stage: str = "after_sft", **lists) -> dict:
    return {"update": update, "stage": stage, "tasks": "medium v0.2", "trained": True, "reward": list(map(float, reward)), **lists}


def mean_of(cell: str) -> float:
    return float(re.match(r"[-+]?[\d.]+", cell)[0])


# ------------------------------------------------------------------------------------------------ averages and differences


def test_averages_are_those_of_the_games(run):
    config, evals, episodes = load(run)
    found = table(behaviour.sections(config, evals, episodes), "Behaviour: after SFT → update 40 (final)")
    rows = {row[0]: row[1:] for row in found["rows"]}
    before, after = ([play(Swarm(style=style), DEV_SEEDS + i) for i in range(N)] for style in ("random", "expert"))
    for name in ("reward", "quality", "used_submit_work", "used_accept_proposal", "gain", "error_rate"):
        digits, factor, _ = tables.scale(name)
        a, b, difference, _, clearly = rows[tables.NAMES[name]]
        x, y = (factor * np.mean([m[name] for m in marks]) for marks in (before, after))
        assert [mean_of(cell) for cell in (a, b, difference)] == pytest.approx([x, y, y - x], abs=0.51 * 10**-digits)
        assert clearly == ("up" if y > x else "down")
    assert rows["trades proposed"][-1] == "cannot tell"
    assert "not frozen at the end" in found["text"][1] and "not frozen at the end" not in rows  # the same for both, everywhere


def test_a_difference_is_paired_by_scenario():
    """Scenarios differ by far more than the checkpoints do: separate means overlap, the paired difference does not."""
    hard = np.random.default_rng(0).random(60)
    (row,) = behaviour.changes(evaluation(hard), evaluation(hard + 0.02 + 0.001 * np.sin(np.arange(60)), 40, "final"))
    assert row["a"].high > row["b"].low  # as two means: nothing to be seen
    assert row["gain"] == metrics.gain(hard, hard + 0.02 + 0.001 * np.sin(np.arange(60))) and row["gain"].low > 0.019
    assert row["p"] < 0.001 and row["gain"].n == 60


def test_the_flip_test_is_the_exact_one_where_that_can_be_counted():
    rng = np.random.default_rng(1)
    d = np.stack([rng.normal(0.3, 1, 10), rng.normal(0, 1, 10), np.r_[np.ones(4), np.zeros(6)]], axis=1)
    signs = np.array(np.meshgrid(*[[-1, 1]] * 10)).reshape(10, -1).T  # all 1024
    exact = (np.abs(signs @ d) >= np.abs(d.sum(axis=0)) - 1e-9).mean(axis=0)
    assert significance.permutation_test(d) == pytest.approx(exact, abs=0.015)
    assert exact[2] == pytest.approx(2 / 2**4)


def test_where_nothing_changed_hardly_a_table_says_otherwise():
    """Twenty measures without a difference: one of them passes 0.05 in 64 of 100 tables; corrected, one table in twenty may err.

    Of 16 tables, 10 and 1 are expected. Were nothing corrected, both numbers would be the same.
    """
    rng, raw, corrected = np.random.default_rng(2), 0, 0
    for _ in range(16):
        lists = lambda: {f"measure_{i}": rng.normal(size=40).tolist() for i in range(20)}
        rows = behaviour.changes(evaluation(rng.normal(size=40), **lists()), evaluation(rng.normal(size=40), 40, "final", **lists()))
        raw += any(row["p"] < 0.05 for row in rows)
        corrected += any(row["corrected"] < 0.05 for row in rows)
        running = 0.0
        for i, row in enumerate(sorted(rows, key=lambda row: row["p"])):  # Holm 1979, written out
            running = max(running, min(1.0, (len(rows) - i) * row["p"]))
            assert row["corrected"] == pytest.approx(running)
    assert raw >= 6 and corrected <= 3


def test_an_episode_in_error_takes_its_pair_out():
    a = evaluation([1, 1, 1, 1], quality=[0.5, None, 0.5, 0.1])
    b = evaluation([2, 2, 2, 2], 40, "final", quality=[0.7, 0.9, None, 0.3])
    quality = next(row for row in behaviour.changes(a, b) if row["name"] == "quality")
    assert quality["gain"].n == 2 and quality["gain"].mean == pytest.approx(0.2)


def test_the_parts_of_the_gain_add_up_with_the_weights_that_were_set(run):
    config, evals, episodes = load(run)
    said = lambda config: [t for t in behaviour.sections(config, evals, episodes)[0]["text"] if t.startswith("Where the")]
    parts = {name: float(x) for name, x in re.findall(r"(payoff|reputation|quality|diversity) ([-+][\d.]+)", said(config)[0])}
    total = float(re.search(r"Where the ([-+][\d.]+)", said(config)[0])[1])
    assert sum(parts.values()) == pytest.approx(total, abs=0.003)
    gain = np.mean(evals[3]["reputation"]) - np.mean(evals[1]["reputation"])
    assert parts["reputation"] == pytest.approx(0.3 * gain, abs=6e-4)
    assert said(config | {"swarm_reputation": 0.5}) == []  # these are not the weights that paid: nothing is said
    for e in evals:
        e["reward"] = (np.array(e["reward"]) + 0.2 * np.array(e["reputation"])).tolist()
    assert f"reputation {0.5 * gain:+.3f}" in said(config | {"swarm_reputation": 0.5})[0]


def test_who_got_worse_is_counted():
    text = behaviour.winners_and_losers(evaluation([1.0, 1.0, 1.0, 0.5]), evaluation([1.1, 0.7, 1.0, 0.4], 40, "final"))
    assert text.startswith("Reward rose in 1 of 4 scenarios and fell in 2, 50.0% [")
    assert text.endswith("; furthest in scenario 1 (1.00 → 0.70), scenario 3 (0.50 → 0.40).")


def test_a_share_of_episodes_gets_wilson_and_a_count_does_not():
    assert tables.average(np.zeros(30)) == metrics.proportion(0, 30)  # up to 0.11, of votes too
    assert tables.interval("truncated", metrics.proportion(3, 30)).startswith("10.0% [")


# ------------------------------------------------------------------------------------------------ rows, tools, the best


def test_the_rows_of_the_first_scenarios(run):
    config, evals, episodes = load(run)
    found = table(behaviour.sections(config, evals, episodes), "Scenario by scenario")
    assert [row[0] for row in found["rows"]] == [str(i) for i in range(8)]
    for i, row in enumerate(found["rows"]):
        cells = dict(zip(found["head"], row))
        a, b = play(Swarm(style="random"), DEV_SEEDS + i), play(Swarm(style="expert"), DEV_SEEDS + i)
        assert cells["reward"] == f"{a['reward']:.2f} → {b['reward']:.2f}"
        both = [f"{m['used_claim_task']}/{m['used_submit_work']}" for m in (a, b)]
        assert cells["claimed/submitted"] == " → ".join(both) and cells["errors"] == f"{a['error_rate']:.0%} → {b['error_rate']:.0%}"


def test_tool_shares_fill_the_turns_of_every_episode(run):
    for e in load(run)[1]:
        shares = behaviour.tool_shares(e)
        assert list(shares)[-2:] == ["errors", "pass_turn"]
        assert sum(shares.values()) == pytest.approx(np.ones(N))
        assert shares["vote"] == pytest.approx(np.array(e["used_vote"]) / 25)
    assert behaviour.tool_shares({"used_post": 0.0, "error_rate": 1.0})["errors"] == 1.0  # nothing but errors


def test_the_best_episode_is_the_best_and_its_calls_are_those_that_were_made(run):
    config, evals, episodes = load(run)
    found = behaviour.sections(config, evals, episodes)
    best, env = int(np.argmax(evals[3]["reward"])), Swarm(style="expert")
    play(env, DEV_SEEDS + best)
    section, calls = table(found, "The best episode"), table(found, "Its 25 calls")
    assert section["text"][0].startswith(f"Scenario {best} earned {max(evals[3]['reward']):.3f}, the most of {N}")
    assert section["episode"] == {"update": 40, "stage": "final", "seed": DEV_SEEDS + best}
    for step, (turn, row) in enumerate(zip(env.log, calls["rows"], strict=True), 1):
        assert row[0] == str(step) and row[1] == behaviour.brief(turn)
        assert row[2] == (turn.result if step < 25 else "(the end)") or row[2] == f"error: {turn.result}"


def test_what_it_did_differently_is_told_with_the_mean_and_whether_it_pays():
    rng = np.random.default_rng(3)
    accepted = rng.integers(0, 5, 50)
    accepted[17] = 8
    reward = accepted / 10 + rng.normal(0, 0.01, 50)
    lists = {"used_accept_proposal": accepted.tolist(), "used_post": [2] * 25 + [3] * 25, "used_propose_trade": [5] * 50}
    a, b = evaluation(reward - 0.3, **lists), evaluation(reward, 40, "final", **lists)
    (section,) = behaviour.best_episode({}, a, b, [])
    text = " ".join(section["text"])
    assert text.startswith(
        f"Scenario 17 earned {reward[17]:.3f}, the most of 50, update 40 (final); the same scenario after SFT: {reward[17] - 0.3:.3f}."
    )
    assert f"trades accepted 8 (mean {accepted.mean():.1f})" in text and "trades proposed" not in text
    r = stats.spearmanr(accepted, reward).statistic
    assert f"trades accepted {r:+.2f} [" in text and "not among the saved episodes" in text
    rows = {row[0]: row for row in section["rows"]}
    assert rows["trades accepted"][3] == f"{(8 - accepted.mean()) / accepted.std(ddof=1):+.1f}"
    assert "trades proposed" not in rows, "what never varies sets nobody apart"


def test_an_episode_that_is_like_the_others_is_not_made_special():
    a = b = evaluation([1.0, 1.1, 0.9, 1.05, 0.95, 1.0], used_post=[2, 2, 3, 1, 2, 2])
    assert "It used no tool more or less often" in " ".join(behaviour.best_episode({}, a, b, [])[0]["text"])


@pytest.mark.parametrize("n,r", [(60, 0.0), (60, 0.7)])
def test_the_interval_of_a_rank_correlation_holds_the_truth(n, r):
    rng, held = np.random.default_rng(4), 0
    truth = 6 / math.pi * math.asin(r / 2)  # Spearman's of a normal pair with correlation r
    for _ in range(300):
        x = rng.normal(size=n)
        found = behaviour.rank_correlation(x, r * x + math.sqrt(1 - r**2) * rng.normal(size=n))
        held += found.low <= truth <= found.high
    assert 0.90 < held / 300 < 0.99
    assert behaviour.rank_correlation(np.ones(9), np.arange(9.0)) is None


def test_calls_that_cannot_be_read_are_told_and_not_raised():
    say = lambda text: {"role": "assistant", "content": text}
    answer = {"role": "tool", "content": "# error: the tool call is not JSON\n# step 2 of 25: …"}
    garbage = ["", "no call", "<tool_call>{", "<tool_call>[1]</tool_call>", "<think>never ends", "\ud800<tool_call>{}</tool_call>"]
    garbage += ["".join(random.Random(i).choices("<tool_call>{}[]\"': /|`\n", k=60)) for i in range(50)]
    for text in garbage:
        ((call, result), (_, end)) = behaviour.calls_of([{"role": "user", "content": "?"}, say(text), answer, say(text)])
        assert call in ("(no call)", "(a call that cannot be read)") and result == "error: the tool call is not JSON" and end == "(the end)"


# ------------------------------------------------------------------------------------------------ text and errors


def test_what_a_model_said_stays_text_in_markdown():
    said = "post <img src=x> [a](b) | `code`\n# title"
    text = tables.markdown([tables.section("T", ["A sentence."], ["step", "call"], [["1", said]], said=(1,))])
    assert text.splitlines()[-1] == "| 1 | `post <img src=x> [a](b) \\| 'code' # title` |"
    assert text.startswith("## T\n\nA sentence.\n\n| step | call |\n|---|---|\n")


def test_any_two_evaluations_can_be_named(run):
    config, evals, episodes = load(run)
    titles = lambda *which: behaviour.sections(config, evals, episodes, which)[0]["title"]
    assert titles("-1", "20") == "Behaviour: before SFT → update 20" == titles("before", "20")
    assert titles("final", "0") == "Behaviour: update 40 (final) → after SFT"
    assert titles("0", "40") == titles("after_sft", "final") == behaviour.sections(config, evals, episodes)[0]["title"]


def test_evaluations_of_other_tasks_and_of_later_do_not_mix_in(run):
    config, evals, episodes = load(run)
    other = [e | {"tasks": "hard v0.2", "trained": False, "reward": [9.0] * N} for e in evals]
    later = [evals[3] | {"stage": "eval_only", "reward": [7.0] * N}, other[3] | {"stage": "eval_only"}]
    mixed = [e for pair in zip(other, evals) for e in pair] + later
    assert behaviour.sections(config, mixed, episodes) == behaviour.sections(config, evals, episodes)
    (found,) = tables.eval_only(mixed)
    assert [row[:4] for row in found["rows"]] == [
        ["medium v0.2 (trained)", "40", "24", metrics.alike(7.0, 24).text()],
        ["hard v0.2", "40", "24", metrics.alike(9.0, 24).text()],
    ]
    assert tables.eval_only(evals) == []


def test_a_run_that_has_only_begun_has_nothing_to_compare(run):
    config, evals, episodes = load(run)
    assert behaviour.sections(config, [], []) == behaviour.sections(config, evals[:1], episodes) == []
    assert behaviour.sections(config, evals[:2], episodes)[0]["title"] == "Behaviour: before SFT → after SFT"
    assert behaviour.sections(config, evals[:3], episodes)[0]["title"] == "Behaviour: after SFT → update 20"


def command(*arguments: str) -> subprocess.CompletedProcess:
    return warm.run(["-m", "bookkeeping.behaviour", *arguments], ROOT)


def test_the_file_runs_alone_and_on_a_run(run):
    shown = command()
    assert shown.returncode == 0 and "Its 25 calls" in shown.stdout and "Tool use, over time" in shown.stdout, shown.stderr
    done = command(str(run), "before", "20")
    assert done.returncode == 0 and done.stdout == behaviour.report(run, ("before", "20")) + "\n"


def test_errors_are_one_sentence(run, tmp_path):
    short = behaviour.made_up(tmp_path, 2, players=("idle",))
    cases = {
        (str(run), "0", "33"): "no evaluation 33 of the trained tasks; choose two of before, after_sft, 20, final",
        (str(run), "0", "after_sft"): "are the same evaluation",
        (str(run), "0"): "usage: ",
        ("--help",): "usage: ",
        (str(tmp_path / "nowhere"),): "check the path",
        (str(ROOT / "results/showcase"),): "is a run of letters",
        (str(short),): "fewer than two evaluations",
    }
    for arguments, words in cases.items():
        done = command(*arguments)
        assert done.returncode != 0 and words in done.stderr and len(done.stderr.strip().splitlines()) == 1, arguments


def test_different_scenarios_are_refused(run):
    config, evals, episodes = load(run)
    fewer = {name: value[:5] if isinstance(value, list) else value for name, value in evals[1].items()}
    with pytest.raises(ValueError, match="after SFT has 5 scenarios and update 40"):
        behaviour.sections(config, [fewer, evals[3]], episodes)


def test_a_tool_that_only_one_checkpoint_used_has_its_column():
    a = evaluation([1.0] * 4, used_post=[0] * 4, used_vote=[0] * 4, used_reply=[2] * 4, error_rate=[0.0] * 4)
    b = evaluation([1.0] * 4, 40, "final", used_post=[1] * 4, used_vote=[0] * 4, used_reply=[2] * 4, error_rate=[0.0] * 4)
    _, found = behaviour.over_time([a, b])
    assert {"post", "reply"} < set(found["head"]) and found["text"][0].endswith(" Never: vote, errors.")


def test_the_curves_of_the_sampled_episodes_are_rolling_means_in_percent():
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    lines = [{"update": u, "error_rate": u / 10, "turns_used": 25} for u in (1, 2, 3)]
    behaviour.draw_turns(ax, lines, 2)
    turns, errors = ax.lines
    assert turns.get_ydata() == pytest.approx([100, 100]) and errors.get_ydata() == pytest.approx([15, 25])
    assert list(errors.get_xdata()) == [2, 3] and errors.get_color() == behaviour.COLOURS["errors"]


def test_counts_have_two_digits_shares_of_a_whole_one_and_the_rest_three():
    scales = {name: tables.scale(name) for name in ("used_post", "turns_used", "quality", "reply_tokens", "error_rate")}
    assert scales == {
        "used_post": (2, 1, ""), "turns_used": (2, 1, ""), "quality": (3, 1, ""), "reply_tokens": (1, 1, ""), "error_rate": (1, 100, "%"),
    }  # fmt: skip


def test_a_measure_that_only_one_later_evaluation_has_gets_its_column():
    later = [evaluation([1.0] * 4, stage="eval_only", exact=[1.0] * 4), evaluation([1.0] * 4, stage="eval_only")]
    (found,) = tables.eval_only(later)
    at = found["head"].index(tables.label("exact"))
    assert found["rows"][0][at] and found["rows"][1][at] == ""


def test_what_some_updates_did_not_measure_has_no_curve():
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    behaviour.draw_turns(ax, [{"update": 1, "turns_used": 5}, {"update": 2, "turns_used": 6, "reputation": 0.5}], 1)
    assert [line.get_label() for line in ax.lines] == ["turns used, of 25"]
