"""Protects the ten tools: a call is read as its schema says, and each tool does what is written.

Expected numbers are worked out here by hand, from the written rules.
"""

import inspect
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from scipy.special import expit as sigmoid

from swarm import economy as eco
from swarm import tools as act
from swarm.economy import ME, MECHANISMS, Scenario, Task, end_step, open_economy
from swarm.tools import ACTIONS, TOOLS, Refused, read_call, schemas, show, tool_names, write_call
from swarm.view import view

VERSIONS = ("0.2", "0.1")
TASK = Task("task_1", "review the water budget for city health", 5, 20, 10)
WORK = (
    "I review the water budget for city health. I check the data and the method, and give a clear "
    "summary with a plan for the whole team."
)


def scenario(version: str = "0.2", bots=("honest", "honest"), **changes) -> Scenario:
    """Round numbers, nothing at random: no tax, no audits, no decay, the breaker at 10."""
    numbers = (100.0, 0.0, 0.0, 1.0, 10.0, 1.0, 1.0)
    plain = Scenario(0, "medium", version, "normal", tuple(bots), *numbers, None, "test")
    return replace(plain, **changes)


def economy(version: str = "0.2", bots=("honest", "honest"), **changes) -> eco.Economy:
    """An economy with one open task; the bots do nothing unless a test lets them."""
    return open_economy(scenario(version, bots, **changes), [[replace(TASK)], [], [], [], []])


def check_books(economy: eco.Economy) -> None:
    members = economy.members.values()
    for member in members:
        gain = math.fsum(member.books[name] for name in MECHANISMS)
        assert member.resources == pytest.approx(economy.scenario.resources + gain, abs=1e-6)
        assert member.resources >= 0 and 0 <= member.reputation <= 100
        assert max(member.books["tax"], member.books["fine"]) <= 0 <= member.books["bonus"]
    assert math.fsum(m.resources for m in members) == pytest.approx(economy.total, abs=1e-6)
    assert math.fsum(m.books["transfer"] for m in members) == pytest.approx(0, abs=1e-6)


# ------------------------------------------------------------------ how a call is written and read


def test_tool_schemas_are_what_a_call_is_held_to():
    tools = [tool["function"] for tool in schemas("0.2")]
    names = (
        "post reply vote propose_trade accept_proposal reject_proposal cancel_proposal "
        "claim_task submit_work pass_turn"
    ).split()
    assert [tool["name"] for tool in tools] == names == list(ACTIONS) == list(TOOLS)
    assert set(names) - set(tool_names("0.1")) == {"cancel_proposal"}
    for tool in tools:
        name, kinds = tool["name"], tool["parameters"]["properties"]
        assert list(inspect.signature(ACTIONS[name]).parameters)[2:] == list(kinds)
        assert tool["parameters"]["required"] == list(kinds)
        good = {key: 1.0 if kind["type"] == "number" else "up" for key, kind in kinds.items()}
        assert read_call(write_call(name, good | {"reason": "new"}), "0.2") == (name, good, 1)
        for key, value in good.items():
            for bad in ({key: 1.0 if value == "up" else "up"}, {key: None}):
                with pytest.raises(Refused, match=key):
                    read_call(write_call(name, good | bad), "0.2")


@pytest.mark.parametrize("said", ["1 < 2", "a <b>word</b>", "</tool_call>", "<tool_call>"])
def test_a_call_may_hold_markup_and_its_own_end(said):
    call = write_call("post", {"content": said})
    assert read_call(call, "0.2") == ("post", {"content": said}, 1)
    assert read_call(f"{call}\n{call}", "0.2")[2] == 2


@pytest.mark.parametrize(
    "text, shown",
    [
        ("a\n  b\tc", "a b c"),
        ("<tool_call>", "(tool_call)"),
        ("a\u202e\x00", "a??"),
        ("a" * 19 + " " + "b" * 20, "a" * 19 + " " + "b" * 20),  # 40 characters
        ("a" * 19 + " " + "b" * 21, "a" * 19 + " …"),
    ],
)
def test_texts_are_shown_short_and_in_one_line(text, shown):
    assert show(text) == shown


# ---------------------------------------------------------------------------- what each tool does

SIXTY = 0.25 * (1 - math.exp(-60 / 140)) + 0.25 * sigmoid(30 / 20)


@pytest.mark.parametrize(
    "version, text, quality",
    [
        # the task's level is 5, so the scale of the length is 80 + 60
        ("0.2", WORK, 0.25 * (1 - math.exp(-132 / 140)) + 0.25 * sigmoid(102 / 20) + 0.5),
        ("0.2", "no", 0.25 * (1 - math.exp(-2 / 140)) + 0.25 * sigmoid(-28 / 20)),
        # repetition is no work: as 60 letters, with none or one of the task's five words
        ("0.2", "x" * 80, SIXTY),
        ("0.2", "health " * 100, SIXTY + 0.1),
        ("0.1", WORK, 0.9),
        ("0.1", "x" * 80, 0.9),  # can be gamed: any 80 letters score as well as can be
        ("0.1", "x" * 40, 0.5 * 40 / 80 + 0.5 * 0.3),
    ],
)
def test_a_submission_pays_and_moves_reputation(version, text, quality):
    e = economy(version)
    act.claim_task(e, ME, "task_1")
    act.submit_work(e, ME, "task_1", text)
    p = sigmoid(2 * 0.8 * (2 * quality - 1))  # reputation 50 adds nothing
    me = e.members[ME]
    assert me.resources == pytest.approx(100 + 20 * (2 * p - 1))
    assert me.reputation == pytest.approx(50 + (p - 0.5) * 5)
    assert e.interactions[-1].p == pytest.approx(p) and "task_1" not in e.tasks
    check_books(e)


@pytest.mark.parametrize("name", [ME, "bot_1"])
@pytest.mark.parametrize(
    "dice, fined", [((0.39, 0.21), True), ((0.39, 0.22), False), ((0.41, 0.0), False)]
)
def test_audits_fine_half_the_bounty_with_probability_risk_times_one_minus_p(name, dice, fined):
    e = economy(audit=0.4)
    e.audit_rng = SimpleNamespace(random=iter(dice).__next__)
    act.claim_task(e, name, "task_1")
    act.submit_work(e, name, "task_1", WORK)
    p, member = e.interactions[-1].p, e.members[name]
    assert 0.21 < 1 - p < 0.22  # premise: the second die is just below, or just above it
    assert member.books["fine"] == (-10 if fined else 0)
    assert member.reputation == pytest.approx(50 + (p - 0.5) * 5 - 3 * fined)
    told = any("audit" in text for _, text in e.events)
    assert told == (fined and name == ME)  # the model is told of its own alone


QUALITY = 0.5 * (1 - math.exp(-50 / 80)) + 0.5 * sigmoid(1)  # of 50 characters without a task


@pytest.mark.parametrize(
    "version, tax, quality", [("0.2", 0.0, QUALITY), ("0.1", 0.1, 0.5 * 50 / 80 + 0.5 * 0.3)]
)
@pytest.mark.parametrize(
    "transfer, fairness", [(0, 1.0), (3, 0.4), (-3, 0.4), (5, 0.0), (-15, -1.0), (80, -1.0)]
)
def test_a_trade_moves_the_transfer_and_pays_both_sides(version, tax, quality, transfer, fairness):
    """An income is taxed, a received transfer too; a loss is not, nor is what one gives."""
    e = economy(version, tax=tax)
    me, bot = e.members[ME], e.members["bot_1"]
    bot.reputation = 70
    act.propose_trade(e, "bot_1", ME, "x" * 50, transfer)
    act.accept_proposal(e, ME, "prop_1")
    p = sigmoid(2 * (0.3 * (2 * quality - 1) + 0.2 * 0.4 + 0.5 * fairness))
    net = lambda change: change * (1 - tax) if change > 0 else change
    surplus = net(5 * (2 * p - 1))
    assert me.resources == pytest.approx(100 + net(transfer) + surplus)
    assert bot.resources == pytest.approx(100 + net(-transfer) + surplus)
    assert bot.reputation == pytest.approx(70 + (p - 0.5) * (5 + abs(transfer)))
    assert (me.reputation, me.interactions, bot.interactions) == (50, 1, 1)
    check_books(e)


@pytest.mark.parametrize("transfer, costs", [(-15, True), (0, False)])
def test_a_rejected_bad_offer_costs_its_proposer_reputation_and_a_good_one_does_not(
    transfer, costs
):
    e = economy()
    act.propose_trade(e, "bot_1", ME, "x" * 50, transfer)
    act.reject_proposal(e, ME, "prop_1")
    p = sigmoid(2 * (0.3 * (2 * QUALITY - 1) - 0.5))
    lost = (p - 0.5) * 20 if costs else 0
    assert e.members["bot_1"].reputation == pytest.approx(50 + lost)
    assert not e.interactions[0].accepted and not e.proposals


def test_a_promise_that_cannot_be_kept_is_refused_and_lapses():
    e = economy()
    act.propose_trade(e, "bot_1", ME, "fair data", 60)
    eco.book(e, "bot_1", "fine", -50)
    with pytest.raises(Refused, match="can no longer be paid"):
        act.accept_proposal(e, ME, "prop_1")
    end_step(e)
    assert not e.proposals


@pytest.mark.parametrize("version", VERSIONS)
def test_a_second_proposal_replaces_the_first_in_v01_and_needs_a_cancellation_in_v02(version):
    e = economy(version)
    act.propose_trade(e, ME, "bot_1", "fair data", 1)
    if version == "0.2":  # without it: the table of refusals in test_env_swarm.py
        act.cancel_proposal(e, ME, "prop_1")
    act.propose_trade(e, ME, "bot_1", "fair data", 2)
    assert list(e.proposals) == [p.id for p in eco.inbox(e, "bot_1")] == ["prop_2"]


@pytest.mark.parametrize("version, posted, replied", [("0.2", 2.0, 1.5), ("0.1", 0.5, 0.3)])
def test_posts_and_replies_move_reputation_and_count_as_activity(version, posted, replied):
    """Bots that look for profit accept more of an active member."""
    e = economy(version)
    act.post(e, "bot_1", "hello")
    act.post(e, ME, "hello")
    act.reply(e, ME, "post_1", "thank you")
    act.reply(e, ME, "post_2", "indeed")  # its own, which pays nothing
    act.vote(e, ME, "post_1", "up")
    assert e.members[ME].reputation == pytest.approx(50 + posted + replied)
    assert e.members["bot_1"].reputation == 50 + posted  # the same rules for all
    assert [e.members[name].activity for name in (ME, "bot_1")] == [3, 1]


def test_three_votes_pay_once():
    e = economy(bots=("honest",) * 5)
    act.post(e, ME, "x" * 60)
    act.vote(e, "bot_1", "post_1", "down")
    bonus = 5 * (0.5 * (1 - math.exp(-60 / 80)) + 0.5 * sigmoid(1.5))
    for voter, paid in ((2, 0), (3, 0), (4, 0), (5, bonus), (5, bonus)):
        act.vote(e, f"bot_{voter}", "post_1", "up")
        assert e.members[ME].books["bonus"] == pytest.approx(paid)
        e.posts["post_1"].votes.pop("bot_5", None)  # so it reaches three a second time


def test_the_view_has_the_three_tasks_that_pay_best_and_the_last_two_posts():
    tasks = [replace(TASK, id=f"task_{bounty}", bounty=bounty) for bounty in (20, 40, 10, 30)]
    e = open_economy(scenario(), [tasks, [], [], [], []])
    for text in "abc":
        act.post(e, "bot_1", text)
    seen = view(e)
    assert [t["bounty"] for t in seen["tasks"]] == [40, 30, 20] and seen["more_tasks"] == 1
    assert {p["text"] for p in seen["feed"]} == {"b", "c"}
