"""Protects lab/swarm/rules.py: a variant changes what it says it changes, and the price of an error is what an error costs."""

import random

import pytest

import metrics
from lab.swarm import rules
from lab.swarm.rules import (
    ACCEPTORS,
    CHOICES,
    accept,
    before_all,
    busy,
    grinder,
    less,
    one_claim,
    played,
    refused,
    says_less,
    slips,
    verdict,
)
from swarm.players import MORE_WORK, PLAYERS, tuned


def seen(**changes) -> dict:
    nothing = {"version": "0.2", "step": 3, "last_step": 25, "resources": 90.0, "reputation": 50.0, "threshold": 10.0, "frozen": False,
               "tasks": [], "feed": [], "incoming": [], "pending": [],
               "bots": [{"id": "bot_1", "frozen": False, "proposed": 0, "accepted": 0}]}  # fmt: skip
    return nothing | changes


def offered(*gets: float) -> list[dict]:
    return [{"id": f"prop_{i}", "from": "bot_1", "reputation": 50.0, "you_get": get, "text": "data"} for i, get in enumerate(gets)]


TASKS = [{"id": f"task_{i}", "yours": i == 1, "bounty": 10, "difficulty": 1, "deadline": 10, "text": "test the plan"} for i in (1, 2)]
DICE = random.Random(0)


def test_only_fair_offers_are_accepted_and_the_best_of_them():
    assert accept(seen(incoming=offered(-1.1, -20)), DICE) is None
    assert accept(seen(incoming=offered(-1, 0.5, -5)), DICE)[1:] == ("accept_proposal", {"proposal_id": "prop_1"})
    assert accept(seen(incoming=offered(3), frozen=True), DICE) is None


def test_idle_turns_are_those_that_the_grinder_passes():
    player, fair = busy(accept), offered(1)
    assert player(seen(incoming=fair), DICE)[1] == "accept_proposal" and player(seen(), DICE)[1] == "pass_turn"
    assert player(seen(incoming=fair, tasks=TASKS), DICE)[1] == "submit_work"
    assert before_all(grinder, accept)(seen(incoming=fair, tasks=TASKS), DICE)[1] == "accept_proposal"


def test_a_slip_is_refused_by_the_environment_at_its_rate():
    does = played(busy(slips(accept, 0.25)), 30)
    lost, accepted = round(sum(25 * s["error_rate"] for s in does)), round(sum(s["used_accept_proposal"] for s in does))
    share = metrics.proportion(lost, lost + accepted)
    assert share.n > 100 and share.low < 0.25 < share.high
    assert all(s["error_rate"] == 0 for s in played(busy(slips(accept, 0.0)), 5))


def test_the_price_is_what_the_environment_charges(monkeypatch):
    monkeypatch.setattr(rules, "ACCEPTORS", {"one": ACCEPTORS["grinder, in turns that it would pass"]})
    row = rules.price(12)["proposer"]["one"]
    charged = played(busy(slips(accept, refused())), 12, error_penalty=2.0)
    assert row["at"]["2.0"].mean == pytest.approx(less(charged, played(grinder, 12)).mean)
    even = row["breaks even"]
    assert row["at"]["0.0"].mean - even * row["errors"] / 25 == pytest.approx(0) and even > 0


def test_every_choice_of_tuned_that_is_changed_changes_its_play():
    plain = [s["reward"] for s in played(tuned, 6)]
    assert plain == [s["reward"] for s in played(PLAYERS["tuned"], 6)]
    for name, player in CHOICES.items():
        assert [s["reward"] for s in played(player, 6)] != plain, name
    mine = seen(tasks=TASKS)
    assert tuned(mine, DICE)[1] == "claim_task" and one_claim(tuned)(mine, DICE)[1] == "submit_work"
    long, short = (player(seen(tasks=TASKS[:1]), DICE)[2]["content"] for player in (tuned, says_less(tuned, MORE_WORK)))
    assert long == short + MORE_WORK


def test_a_verdict_follows_the_interval():
    interval = lambda low, high: metrics.Interval((low + high) / 2, low, high, 9)
    said = [verdict(interval(*ends)) for ends in ((0.1, 0.2), (-0.2, -0.1), (-0.1, 0.1))]
    assert said == ["accepting earns more", "proposing earns more", "it cannot be told"]


def test_a_price_is_no_loss_until_its_interval_is_wholly_below_nothing():
    row = {"at": {str(p): metrics.Interval(0.02 - p / 25, 0.01 - p / 25, 0.03 - p / 25, 9) for p in rules.PRICES}}
    assert rules.not_a_loss(row) == 0.5
    assert rules.not_a_loss({"at": {str(p): metrics.Interval(-0.2, -0.3, -0.1, 9) for p in rules.PRICES}}) is None


def test_the_published_scale_is_told_beside_ours():
    one, other = played(grinder, 3), played(grinder, 3, payoff_scale="published")
    assert rules.column(one, "reward, published") == rules.column(other) != rules.column(one)
    assert rules.column(one, "gain") == rules.column(other, "gain")
