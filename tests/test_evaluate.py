"""Protects how a policy is judged: every development task once and in order, with nothing made up
where an episode broke; and that the line about a training batch is what its episodes say, with an
interval over tasks and not over episodes.
"""

from unittest.mock import MagicMock

import pytest

import metrics
from bookkeeping import again, tables
from bookkeeping.again import print_results
from bookkeeping.records import lines, save_episodes
from bookkeeping.run import passes_of_sft, probe_report, record_evaluation
from evaluate import summarize
from helpers import put
from rollout import Episode
from settings import DEV_SEEDS, Config, dev_seeds


def episode(reward: float = 0.0, seed: int = 0, stop: str = "done", **parts: float) -> Episode:
    """Two tokens given, two of the policy's."""
    broken = stop == "error"
    return Episode(
        seed, 0, [20, 30, 40, 2], [False, False, True, True], [0.0, 0.0, -0.5, -0.25], turns=1, reward=0.0 if broken else reward,
        components={} if broken else parts, stop_reason=stop, messages=[{"role": "user", "content": f"task {seed}"}],
        error="Lost: it" * broken,
    )  # fmt: skip


# -------------------------------------------------------------------------------- development tasks


def judged(tiny, folder, sets: dict, n: int, stage: str = "train", done: int = 20) -> dict:
    """{(set, measure): its mean} of episodes that are worth what the lists say."""
    means = {}
    for tasks, (trained, episodes) in sets.items():
        for e, seed in zip(episodes, dev_seeds(Config(eval_n=n))):
            e.seed = seed
        groups = [[e] for e in episodes]
        found = record_evaluation(folder, tiny, groups, tasks, trained, stage, done)
        means |= {(tasks, name): value.mean for name, value in found.items()}
    return means


def test_every_set_is_kept_in_the_order_of_its_tasks(tiny, tmp_path):
    easy = [episode(r, exact=float(r == 1), format=1.0) for r in (1.0, 0.2, 1.0)]
    hard = [
        episode(0.1, exact=0.0, format=0.5),
        episode(stop="error"),
        episode(1.0, exact=1.0, format=1.0, stop="truncated"),
    ]
    logged = judged(tiny, tmp_path, {"easy": (False, easy), "hard": (True, hard)}, 3)
    assert lines(tmp_path / "evals.jsonl") == [
        {"update": 20, "stage": "train", "tasks": "easy", "trained": False, "reward": [1.0, 0.2, 1.0], "exact": [1.0, 0.0, 1.0],
         "format": [1.0, 1.0, 1.0], "reply_tokens": [2, 2, 2], "truncated": [False, False, False]},
        {"update": 20, "stage": "train", "tasks": "hard", "trained": True, "reward": [0.1, 1.0], "exact": [0.0, 1.0],
         "format": [0.5, 1.0], "reply_tokens": [2, 2], "truncated": [False, True], "missing": {"1": "Lost: it"}},
    ]  # fmt: skip
    means = {
        ("easy", "reward"): 2.2 / 3,
        ("easy", "exact"): 2 / 3,
        ("hard", "reward"): 1.1 / 2,
        ("hard", "exact"): 1 / 2,
    }
    assert logged == {name: pytest.approx(mean) for name, mean in means.items()}


def test_the_first_eight_episodes_of_the_trained_tasks_are_kept_to_read(tiny, tmp_path):
    sets = {
        "other": (False, [episode(1.0, exact=1.0)] * 10),
        "mine": (True, [episode(i / 10, exact=0.0) for i in range(10)]),
    }
    judged(tiny, tmp_path, sets, 10, "final", 40)
    kept = lines(tmp_path / "episodes.jsonl")
    assert [e["seed"] for e in kept] == [DEV_SEEDS + i for i in range(8)] and [
        e["reward"] for e in kept
    ] == [i / 10 for i in range(8)]
    assert {(e["update"], e["stage"], e["source"], e["advantage"]) for e in kept} == {
        (40, "final", "eval", None)
    }
    assert kept[0]["segments"][-1]["logprobs"] == [-0.5, -0.25]


@pytest.mark.parametrize("best, kept", [(9, [*range(8), 9]), (3, list(range(8)))])
def test_where_nothing_is_simply_right_the_best_episode_is_kept_too(tiny, tmp_path, best, kept):
    played = [episode(-1.0 + 0.5 * (i == best), payoff=0.5) for i in range(10)]
    played.append(episode(stop="error"))  # its 0 is not the best reward
    judged(tiny, tmp_path, {"medium": (True, played)}, 11)
    assert [e["seed"] - DEV_SEEDS for e in lines(tmp_path / "episodes.jsonl")] == kept


def test_where_every_episode_broke_there_is_no_result_and_the_first_error_is_told(tiny, tmp_path):
    with pytest.raises(ValueError, match="every episode ended in an error .Lost: it.*--resume"):
        judged(tiny, tmp_path, {"mine": (True, [episode(stop="error"), episode(stop="error")])}, 2)
    assert not (tmp_path / "evals.jsonl").exists()


def test_an_entry_that_only_some_episodes_have_is_null_in_the_others_and_in_no_mean(
    tiny, tmp_path, capsys
):
    """The alphabet with 1 to 3 turns: an episode of one turn has no turn_2, and 0 would be a turn
    played badly."""
    mixed = [
        episode(0.5, turn_1=0.5),
        episode(1.0, turn_1=1.0, turn_2=0.25),
        episode(0.0, turn_1=0.0, turn_2=0.75),
    ]
    judged(tiny, tmp_path, {"mine": (True, mixed)}, 3)
    (line,) = lines(tmp_path / "evals.jsonl")
    assert line["turn_1"] == [0.5, 1.0, 0.0] and line["turn_2"] == [None, 0.25, 0.75]
    found = tables.average(tables.values(line, "turn_2"))
    assert found == metrics.mean([0.25, 0.75]) and "turn_2" in tables.measures(line)
    print_results([line | {"tasks": "mine, base"}, line])
    rows = capsys.readouterr().out.splitlines()
    (row,) = [row for row in rows if row.startswith("| mine | turn 2 |")]
    assert f"| {found.text(3)} | {found.text(3)} | +0.000 [" in row and row.endswith("| 2 |")


# --------------------------------------------------------------------------------- a training batch


def test_a_batch_in_one_line_by_hand():
    groups = [
        [episode(1.0, exact=1.0), episode(0.0, exact=0.0, stop="truncated"), episode(stop="error")],
        [episode(0.5, exact=0.0), episode(0.5, exact=0.0), episode(0.5, exact=1.0)],
    ]
    groups[0][0].sampled = [False, True, True, True]
    line = summarize(groups)
    assert line["n"] == 5 and line["errors"] == 1 and "error" not in line
    assert line["deviation"] == 0.25  # of the rewards as they are, in a group: 0.5 and 0
    means = {"reward": 2.5 / 5, "exact": 2 / 5, "reply_tokens": 11 / 5, "truncated": 1 / 5}
    assert {name: line[name] for name in means} == pytest.approx(means)


def test_the_interval_is_over_tasks_because_episodes_of_one_task_are_alike():
    groups = [[episode(reward, exact=0.0)] * 8 for reward in (0.0, 1.0, 1.0, 0.0)]
    line, by_task = summarize(groups), metrics.mean([0.0, 1.0, 1.0, 0.0])
    assert (line["reward_low"], line["reward_high"]) == (by_task.low, by_task.high) and line[
        "n"
    ] == 32
    assert by_task.high - by_task.low > 2 * (
        metrics.mean([0.0, 1.0] * 16).high - 0.5
    )  # premise: 32 episodes would look surer


# ------------------------------------------------------------------------ what GRPO could learn


@pytest.mark.parametrize(
    "groups, verdict",
    [
        ([[0, 0], [0, 0], [0, 0], [0, 1]], "1 of 4 groups have a signal: GRPO has something"),
        ([[0, 0]] * 5 + [[0, 1]], "1 of 6 groups have a signal: GRPO will hardly move"),
        ([[1, 1]] * 15 + [[0, 1]], "1 of 16 groups have a signal, and the tasks are solved"),
    ],
)
def test_a_first_batch_says_what_could_be_learned(groups, verdict):
    said = {"role": "assistant", "content": "<answer>7</answer>"}
    played = [[episode(float(r), exact=float(r), format=1.0) for r in g] for g in groups]
    broken = [episode(stop="error")] * 2  # counts nowhere
    for g in played:
        for e in g:
            e.messages.append(said)
            e.advantages = [float(len({e.reward for e in g}) > 1)]
    told = probe_report([*played, broken], Config(k=2, max_tokens=9))
    assert told[-1].startswith(verdict)
    assert told[0].split()[1] == f"{2 * len(groups)}," and "<answer>7</answer>" in told[-2]
    any_right = metrics.mean([float(any(g)) for g in groups])
    assert told[2] == "different   1.0 of 2 replies to a task"
    assert told[5] == f"pass@2      {any_right}"


def test_a_probe_plays_no_task_that_sft_showed_and_warns_of_many_passes(monkeypatch, capsys):
    collector = MagicMock(collect=lambda update, level: collector.task_seeds(update))
    cfg = Config(num_tasks=3, eval_n=5, sft_steps=50, sft_batch=8, difficulty=2)
    shown = {"demonstrations": 11, "beyond_context": 0, "too_long": 0}
    put(
        monkeypatch,
        again,
        sft=lambda *_: shown,
        compute_advantages=lambda *_: None,
        probe_report=lambda seeds, cfg: seeds,
    )
    again.probe(cfg, MagicMock(), print, collector, None)
    warning, *seeds = capsys.readouterr().out.splitlines()
    assert "36.4 passes over 11 demonstrations: it may know them by heart" in warning
    assert [int(seed) for seed in seeds] == dev_seeds(cfg)[:3]
    assert passes_of_sft(shown | {"demonstrations": 100}, cfg).endswith("100 demonstrations")


def test_an_episode_that_failed_before_its_first_reply_is_kept_to_read(tiny, tmp_path):
    failed = Episode(7, 0, stop_reason="error", error="Lost: it")
    save_episodes(tmp_path, 1, "", tiny, [[failed]], ratios=[[[]]])
    [kept] = lines(tmp_path / "episodes.jsonl")
    assert (kept["seed"], kept["advantage"], kept["error"]) == (7, 0.0, "Lost: it")
