"""Protects the ten tools: a call is read as its schema says, and each tool does what is written, and no more.

Expected numbers are worked out here by hand, from the written rules.
"""

import inspect
import json
import math
from dataclasses import replace

import pytest

from swarm import economy as eco
from swarm import tools as act
from swarm.economy import ME, MECHANISMS, Scenario, Task, end_step, open_economy
from swarm.tools import ACTIONS, TOOLS, Refused, read_call, schemas, show, tool_names, wrap_call, write_call
from swarm.view import view

VERSIONS = ("0.2", "0.1")
WORK = (
    "I review the water budget for city health. I check the data and the method, and give a clear summary with a plan for the whole team."
)


def scenario(version: str = "0.2", bots=("honest", "honest"), **changes) -> Scenario:
    """Round numbers, nothing at random: no tax, no audits, no decay, the breaker at 10."""
    plain = Scenario(0, "medium", version, "normal", tuple(bots), 100.0, 0.0, 0.0, 1.0, 10.0, 1.0, 1.0, None, "test")
    return replace(plain, **changes)


def economy(version: str = "0.2", bots=("honest", "honest"), **changes) -> eco.Economy:
    """An economy with one open task; the bots do nothing unless a test lets them."""
    task = Task("task_1", "review the water budget for city health", 5, 20, 10)
    return open_economy(scenario(version, bots, **changes), [[task], [], [], [], []])


def check_books(economy: eco.Economy) -> None:
    start = economy.scenario.resources
    for member in economy.members.values():
        assert set(member.books) == set(MECHANISMS)
        assert member.resources == pytest.approx(start + math.fsum(member.books.values()), abs=1e-6)
        assert member.resources >= 0 and 0 <= member.reputation <= 100
        assert member.books["tax"] <= 0 and member.books["fine"] <= 0 and member.books["bonus"] >= 0
    total = math.fsum(m.resources for m in economy.members.values())
    assert total == pytest.approx(economy.total, abs=1e-6)
    assert math.fsum(m.books["transfer"] for m in economy.members.values()) == pytest.approx(0, abs=1e-6)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


# ------------------------------------------------------------------------------------------------ how a call is written and read


def test_tool_schemas_are_what_a_call_is_held_to():
    tools = schemas("0.2")
    assert json.loads(json.dumps(tools)) == tools
    names = "post reply vote propose_trade accept_proposal reject_proposal cancel_proposal claim_task submit_work pass_turn".split()
    assert [t["function"]["name"] for t in tools] == names and {t["type"] for t in tools} == {"function"}
    for tool in tools:
        assert set(tool["function"]) == {"name", "description", "parameters"}
        schema = tool["function"]["parameters"]
        assert schema["type"] == "object" and set(schema["required"]) == set(schema["properties"])
        assert all(p["type"] in ("string", "number") for p in schema["properties"].values())
        good = {name: 1.0 if p["type"] == "number" else "up" for name, p in schema["properties"].items()}
        assert read_call(write_call(tool["function"]["name"], good), "0.2")[1] == good
        for name, p in schema["properties"].items():
            bad = good | {name: "up" if p["type"] == "number" else 1.0}
            with pytest.raises(Refused, match=name):
                read_call(write_call(tool["function"]["name"], bad), "0.2")
    assert tools[2]["function"]["parameters"]["properties"]["direction"]["enum"] == ["up", "down"]


def test_a_call_is_written_in_one_way_whether_its_arguments_are_data_or_text():
    arguments = {"post_id": "post_1", "content": 'a "b" \u00e9 \u4e2d'}
    assert write_call("reply", arguments) == wrap_call("reply", json.dumps(arguments, ensure_ascii=False))
    written = json.dumps({"name": "reply", "arguments": arguments}, ensure_ascii=False)
    assert write_call("reply", arguments, "hm") == f"<think>\nhm\n</think>\n<tool_call>\n{written}\n</tool_call>"
    assert read_call(wrap_call("reply", json.dumps(arguments)), "0.2") == ("reply", arguments, 1)
    with pytest.raises(Refused, match="not JSON"):
        read_call(wrap_call("reply", "{post_id: 1}"), "0.2")


def test_show_is_short_and_one_line():
    assert show("a\n  b\tc") == "a b c"
    assert show("<tool_call>") == "(tool_call)"
    assert show("word " * 20) == "word word word word word word word word …"
    assert len(show("x" * 100)) <= 41


def test_what_is_told_of_a_tool_is_what_its_function_takes():
    assert list(TOOLS) == list(ACTIONS) == tool_names("0.2") and set(TOOLS) - set(tool_names("0.1")) == {"cancel_proposal"}
    for tool, (_, arguments) in TOOLS.items():
        assert list(inspect.signature(ACTIONS[tool]).parameters) == ["economy", "name", *arguments]


# ------------------------------------------------------------------------------------------------ what each tool does


@pytest.mark.parametrize("version", VERSIONS)
def test_a_submission_pays_and_moves_reputation(version):
    e = economy(version)
    act.claim_task(e, ME, "task_1")
    act.submit_work(e, ME, "task_1", WORK)
    n = len(WORK)
    if version == "0.2":
        quality = 0.25 * (1 - math.exp(-n / 140)) + 0.25 * sigmoid((n - 30) / 20) + 0.5
    else:
        quality = 0.9
    p = sigmoid(2 * 0.8 * (2 * quality - 1))  # reputation 50 adds nothing
    me = e.members[ME]
    assert me.resources == pytest.approx(100 + 20 * (2 * p - 1)) and me.books["task"] == pytest.approx(20 * (2 * p - 1))
    assert me.reputation == pytest.approx(50 + (p - 0.5) * 5)
    assert e.interactions[-1].p == pytest.approx(p) and "task_1" not in e.tasks


def test_bad_work_costs():
    e = economy()
    act.claim_task(e, ME, "task_1")
    act.submit_work(e, ME, "task_1", "no")
    assert e.members[ME].books["task"] < 0 and e.members[ME].reputation < 50


def test_audits_fine_half_the_bounty_with_probability_risk_times_one_minus_p():
    found_fault, ps = 0, []
    for seed in range(1500):
        e = economy(audit=0.4, dice=f"audit {seed}")
        act.claim_task(e, ME, "task_1")
        act.submit_work(e, ME, "task_1", WORK)
        p, me = e.interactions[-1].p, e.members[ME]
        ps.append(0.4 * (1 - p))
        if me.books["fine"]:
            found_fault += 1
            assert me.books["fine"] == -10 and me.reputation == pytest.approx(50 + (p - 0.5) * 5 - 3)
    mean = sum(ps) / len(ps)
    assert abs(found_fault / len(ps) - mean) < 4 * (mean * (1 - mean) / len(ps)) ** 0.5
    assert found_fault > 50


@pytest.mark.parametrize("transfer, fairness", [(0, 1.0), (3, 0.4), (-3, 0.4), (5, 0.0), (-15, -1.0), (80, -1.0)])
def test_a_trade_moves_the_transfer_and_pays_both_sides(transfer, fairness):
    e = economy()
    e.members["bot_1"].reputation = 70
    text = "x" * 50
    act.propose_trade(e, "bot_1", ME, text, transfer)
    quality = 0.5 * (1 - math.exp(-50 / 80)) + 0.5 * sigmoid(1)
    p = sigmoid(2 * (0.3 * (2 * quality - 1) + 0.2 * 0.4 + 0.5 * fairness))
    act.accept_proposal(e, ME, "prop_1")
    surplus = 5 * (2 * p - 1)
    assert e.members[ME].resources == pytest.approx(100 + transfer + surplus)
    assert e.members["bot_1"].resources == pytest.approx(100 - transfer + surplus)
    assert e.members["bot_1"].reputation == pytest.approx(70 + (p - 0.5) * (5 + abs(transfer)))
    assert e.members[ME].reputation == 50
    assert e.members[ME].interactions == e.members["bot_1"].interactions == 1
    check_books(e)


@pytest.mark.parametrize("transfer", [3, -3])
def test_a_received_transfer_is_taxed_and_a_given_one_is_not(transfer):
    """In v0.1 a tax of 10% is 10%; in v0.2 it is 10% · (1 + what one has / what all have on average)."""
    for version in VERSIONS:
        e = economy(version, tax=0.1)
        act.propose_trade(e, "bot_1", ME, "x" * 50, transfer)
        act.accept_proposal(e, ME, "prop_1")
        taker, giver = (ME, "bot_1") if transfer > 0 else ("bot_1", ME)
        taker, giver = e.members[taker], e.members[giver]
        surplus = 5 * (2 * e.interactions[-1].p - 1)
        rate = 0.1 if version == "0.1" else 0.1 * (1 + 100 / 99)  # 297 are left for three when the transfer comes in
        assert taker.books["transfer"] == 3 and giver.books["transfer"] == -3
        on_gain = taker.books["tax"] + 3 * rate  # the tax on the trade's gain, which both have
        if version == "0.1":
            assert surplus > 0 and [on_gain, giver.books["tax"]] == pytest.approx([-0.1 * surplus] * 2)
        else:
            before = 0 if transfer < 0 else surplus + giver.books["tax"]  # the proposer gains first
            average = (300 - 3 * rate + before) / 3
            assert on_gain == pytest.approx(-surplus * 0.1 * (1 + (103 - 3 * rate) / average))
        check_books(e)


def test_a_rejected_bad_offer_costs_its_proposer_reputation_and_a_good_one_does_not():
    e = economy()
    act.propose_trade(e, "bot_1", ME, "x" * 50, -15)
    act.propose_trade(e, "bot_2", ME, "x" * 50, 0)
    quality = 0.5 * (1 - math.exp(-50 / 80)) + 0.5 * sigmoid(1)
    p = sigmoid(2 * (0.3 * (2 * quality - 1) - 0.5))
    act.reject_proposal(e, ME, "prop_1")
    act.reject_proposal(e, ME, "prop_2")
    assert e.members["bot_1"].reputation == pytest.approx(50 + (p - 0.5) * 20)
    assert e.members["bot_2"].reputation == 50
    assert [i.accepted for i in e.interactions] == [False, False] and not e.proposals and not e.members[ME].inbox


def test_a_promise_that_cannot_be_kept_is_refused():
    e = economy()
    act.propose_trade(e, "bot_1", ME, "fair data", 60)
    eco.book(e, "bot_1", "fine", -50)
    with pytest.raises(Refused, match="can no longer be paid"):
        act.accept_proposal(e, ME, "prop_1")
    end_step(e)
    assert not e.proposals and not e.members[ME].inbox


def test_a_second_proposal_replaces_the_first_in_v01_and_is_an_error_in_v02():
    for version in VERSIONS:
        e = economy(version)
        act.propose_trade(e, ME, "bot_1", "fair data", 1)
        if version == "0.2":
            with pytest.raises(Refused, match="cancel_proposal"):
                act.propose_trade(e, ME, "bot_1", "fair data", 2)
            act.cancel_proposal(e, ME, "prop_1")
        act.propose_trade(e, ME, "bot_1", "fair data", 2)
        assert [p.transfer for p in e.proposals.values()] == [2] and len(e.members["bot_1"].inbox) == 1


@pytest.mark.parametrize("version, posted, replied", [("0.2", 2.0, 1.5), ("0.1", 0.5, 0.3)])
def test_posts_and_replies_move_reputation(version, posted, replied):
    e = economy(version)
    act.post(e, ME, "hello")
    assert e.members[ME].reputation == 50 + posted
    act.post(e, "bot_1", "hello")
    act.reply(e, ME, "post_2", "thank you")
    assert e.members[ME].reputation == pytest.approx(50 + posted + replied)
    act.reply(e, ME, "post_1", "indeed")  # its own
    assert e.members[ME].reputation == pytest.approx(50 + posted + replied)


@pytest.mark.parametrize("version, replied", [("0.2", 0.75), ("0.1", 0.6)])  # a reply keeps its share of a post: 1.5 / 2, 0.3 / 0.5
def test_what_a_post_is_worth_is_a_rule_and_a_reply_follows_it(version, replied):
    for chosen in (1.0, 0.0, 4.0):
        e = economy(version)
        e.post_worth = chosen
        act.post(e, "bot_1", "hello")
        said = act.post(e, ME, "hello"), act.reply(e, ME, "post_1", "thank you")
        assert e.members[ME].reputation == pytest.approx(50 + chosen + replied * chosen)
        assert e.members["bot_1"].reputation == 50 + chosen  # the same rules for all
        assert [float(text.rpartition("+")[2]) for text in said] == [chosen, pytest.approx(replied * chosen, abs=0.051)]


@pytest.mark.parametrize("transfer", [0.0, 3.0, -15.0])
@pytest.mark.parametrize("receiver", [ME, "bot_2"])
def test_who_accepts_is_credited_only_if_the_rule_says_both(transfer, receiver):
    moved = {}
    for credit in eco.CREDITS:
        e = economy()
        e.trade_credit = credit
        act.propose_trade(e, "bot_1", receiver, "fair data", transfer)
        p = e.proposals["prop_1"].p
        act.accept_proposal(e, receiver, "prop_1")
        check_books(e)
        moved[credit] = [e.members[name].reputation - 50 for name in ("bot_1", receiver)]
        act.propose_trade(e, "bot_1", receiver, "more data", transfer)
        before = e.members[receiver].reputation
        act.reject_proposal(e, receiver, "prop_2")
        assert e.members[receiver].reputation == before  # a rejection is about the proposer alone
    terms = pytest.approx((p - 0.5) * (5 + abs(transfer)))
    assert moved == {"proposer": [terms, 0], "both": [terms, pytest.approx((p - 0.5) * 5)]}
    assert (p > 0.5) is (transfer != -15) and eco.Economy.trade_credit == "proposer"


def test_three_votes_pay_once():
    e = economy(bots=("honest",) * 5)
    text = "x" * 60
    act.post(e, ME, text)
    act.vote(e, "bot_1", "post_1", "down")
    for i in (2, 3, 4):
        act.vote(e, f"bot_{i}", "post_1", "up")
    assert e.members[ME].books["bonus"] == 0  # 3 - 1 = 2
    act.vote(e, "bot_5", "post_1", "up")
    bonus = 5 * (0.5 * (1 - math.exp(-60 / 80)) + 0.5 * sigmoid(1.5))
    assert e.members[ME].books["bonus"] == pytest.approx(bonus) and 0 < bonus < 5
    e.posts["post_1"].votes.pop("bot_5")
    act.vote(e, "bot_5", "post_1", "up")  # reaches three a second time
    assert e.members[ME].books["bonus"] == pytest.approx(bonus)


# ------------------------------------------------------------------------------------------------ the end of a step


@pytest.mark.parametrize("version", VERSIONS)
def test_passing_costs_a_second_decay_but_not_a_frozen_member_that_can_do_nothing_else(version):
    e = economy(version, bots=("honest",) * 4, decay=0.9)
    for name, frozen, passed in ((ME, False, True), ("bot_1", True, True), ("bot_2", True, False), ("bot_3", False, False)):
        e.members[name].frozen_at = e.step * frozen
        if passed:
            act.pass_turn(e, name)
    end_step(e)
    reputations = {name: e.members[name].reputation for name in (ME, "bot_1", "bot_2", "bot_3")}
    assert reputations == {ME: pytest.approx(40.5), "bot_1": pytest.approx(45), "bot_2": pytest.approx(45), "bot_3": pytest.approx(45)}


def test_the_words_of_a_task_count_in_capitals_too():
    assert eco.terms("Review THE water Budget") == ["review", "water", "budget"]


def test_a_text_of_forty_characters_is_shown_whole_and_one_more_is_cut():
    assert show("a" * 19 + " " + "b" * 20) == "a" * 19 + " " + "b" * 20
    assert show("a" * 19 + " " + "b" * 21) == "a" * 19 + " …"


def test_the_model_is_told_of_its_own_audits_only():
    told = {}
    for name in (ME, "bot_1"):
        for seed in range(40):
            e = economy(audit=1.0, dice=f"audit {seed}")
            act.claim_task(e, name, "task_1")
            act.submit_work(e, name, "task_1", "no")
            if e.members[name].books["fine"]:
                told.setdefault(name, set()).add(any("audit" in text for _, text in e.events))
    assert told == {ME: {True}, "bot_1": {False}}


def test_the_view_has_the_three_tasks_that_pay_best_and_the_last_two_posts():
    tasks = [Task(f"task_{n}", "review the water budget", 5, bounty, 10) for n, bounty in enumerate((20, 40, 10, 30))]
    e = open_economy(scenario(), [tasks, [], [], [], []])
    for n in range(3):
        act.post(e, "bot_1", f"post {n}")
    seen = view(e)
    assert [t["bounty"] for t in seen["tasks"]] == [40, 30, 20] and seen["more_tasks"] == 1
    assert {p["text"] for p in seen["feed"]} == {"post 1", "post 2"}


def test_every_post_reply_and_vote_counts_once_as_activity():
    """Bots that look for profit accept more of an active member."""
    e = economy()
    act.post(e, "bot_1", "a plan for the water")
    done = [act.post(e, ME, "my plan"), act.reply(e, ME, "post_1", "thank you"), act.vote(e, ME, "post_1", "up")]
    assert e.members[ME].activity == len(done) == 3 and e.members["bot_1"].activity == 1
