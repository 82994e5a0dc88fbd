"""lab/swarm/trained.py: the worlds that policies play in, and the page that is made of what is kept."""

import numpy as np
import pytest

from env_swarm import Swarm, play
from lab.claims.study import over_seeds
from lab.common import read_json
from lab.swarm import findings, trained
from metrics import mean


def test_other_rules_keep_bots_and_tasks():
    seed = 3
    plain, strict = Swarm(), trained.World(**trained.WORLDS["medium, rules at their tightest"])
    plain.reset(seed), strict.reset(seed)
    a, b = plain.economy.scenario, strict.economy.scenario
    assert (a.bots, a.bounty, a.scale, a.resources, a.dice) == (b.bots, b.bounty, b.scale, b.resources, b.dice)
    assert (b.tax, b.audit, b.decay, b.threshold, b.shift) == (0.15, 0.3, 0.97, 20.0, None)


def test_the_tighter_the_rules_the_less_a_good_player_earns():
    def earns(world: str) -> float:
        return np.mean([play(trained.World(style="tuned", **trained.WORLDS[world]), seed)["reward"] for seed in range(12)])

    assert earns("medium, rules at their tightest") < earns("medium") < earns("medium, no rules")


def test_both_scales_are_of_one_episode_and_errors_are_paid_for_on_both():
    env = trained.World(style="grinder")
    marks = play(env, 5)
    both = trained.both_scales(env)
    assert both["reward"] == marks["reward"] and both["payoff"] == marks["payoff"] < both["payoff_published"]
    published = play(trained.World(style="grinder", payoff_scale="published"), 5)
    assert (both["reward_published"], both["payoff_published"]) == (published["reward"], published["payoff"])


def test_an_interval_of_several_policies_is_over_seeds_and_of_one_over_scenarios():
    rows = [[1.0, 1.2, 1.1, 0.9], [2.0, 2.2, 2.1, 1.9], [3.0, 3.2, 3.1, 2.9]]
    assert over_seeds(rows).high - over_seeds(rows).low > 2
    assert over_seeds(rows[:1]) == mean(rows[0])


def test_what_is_committed_is_of_the_planned_scenarios_and_finished_runs():
    for arm in ("grpo", "sft_tuned", "start"):
        names = trained.runs_of(arm)
        assert len(names) == len(trained.STUDY.seeds)
        for name in names:
            assert read_json(trained.STUDY.out / name / "summary.json")["config"]["name"] == name
        assert all(len(row) == trained.N for row in trained.scores(arm)["reward"])


@pytest.mark.parametrize("make, module, page", [(trained.page, trained, "trained.md"), (findings.main, findings, "findings.md")])
def test_the_committed_pages_are_what_the_committed_scores_give(monkeypatch, make, module, page):
    written = {}
    monkeypatch.setattr(module, "write_page", lambda path, lines: written.update({path.name: "\n".join(lines)}))
    monkeypatch.setattr(trained, "draw", lambda arms: None)
    make()
    assert written == {page: (trained.STUDY.out / page).read_text()}
