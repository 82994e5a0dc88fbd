"""Protects the swarm environment: the books balance, every tool and rule does what is written, no
reply breaks it, and the same seed and replies give the same episode.

Expected numbers are worked out here by hand or by other code, from the written rules and not from
the environment's. What a rule does not fix, the bots' and the scenarios' dice, is held by a digest
of whole games.
"""

import hashlib
import inspect
import json
import math
import random
import re
from collections import Counter
from dataclasses import replace
from statistics import fmean as mean
from types import SimpleNamespace

import pytest
from scipy.special import expit as sigmoid

from env_swarm import PAYOFFS, Swarm, play
from made_up import played
from settings import DEV_SEEDS, Config, task_seeds
from swarm import bots as swarm_bots
from swarm import economy as eco
from swarm import tools as act
from swarm.bots import draw_scenario, draw_tasks, finish_step
from swarm.economy import ME, Scenario, Task, end_step, open_economy
from swarm.players import PLAYERS
from swarm.tools import (
    ACTIONS,
    TOOLS,
    Refused,
    read_call,
    schemas,
    show,
    tool_names,
    wrap_call,
    write_call,
)
from swarm.view import observe, view
from warm import run

LEVELS = ("easy", "medium", "hard")
VERSIONS = ("0.2", "0.1")
TASK = Task("task_1", "review the water budget for city health", 5, 20, 10)
WORK = (
    "I review the water budget for city health. I check the data and the method, and give a clear "
    "summary with a plan for the whole team."
)
PASS = write_call("pass_turn", {})


def scenario(version: str = "0.2", bots=("honest", "honest"), **changes) -> Scenario:
    """Round numbers, nothing at random: no tax, no audits, no decay, the breaker at 10."""
    return Scenario(0, "medium", version, "normal", tuple(bots), **{"dice": "test"} | changes)


def economy(version="0.2", bots=("honest", "honest"), proxy=0.0, gate="soft", **changes):
    """An economy with one open task; the bots do nothing unless a test lets them.

    proxy: the noise of its proxy.
    """
    tasks = [[replace(TASK)], [], [], [], []]
    return open_economy(scenario(version, bots, **changes), tasks, proxy_noise=proxy, gate=gate)


def play_moves(e: eco.Economy, *moves: tuple) -> eco.Economy:
    """Members act. A move: (who, tool, argument …)."""
    for name, tool, *arguments in moves:
        ACTIONS[tool](e, name, *arguments)
    return e


def check_books(economy: eco.Economy) -> None:
    members = economy.members.values()
    for member in members:
        owned = economy.scenario.resources + math.fsum(member.books.values())
        assert member.resources == pytest.approx(owned, abs=1e-6)
        assert member.resources >= 0 and 0 <= member.reputation <= 100
        assert max(member.books["tax"], member.books["fine"]) <= 0 <= member.books["bonus"]
    assert math.fsum(m.resources for m in members) == pytest.approx(economy.total, abs=1e-6)
    assert math.fsum(m.books["transfer"] for m in members) == pytest.approx(0, abs=1e-6)


@pytest.fixture
def quiet(monkeypatch):
    """Bots that do nothing."""
    for kind in swarm_bots.BOTS:
        monkeypatch.setitem(swarm_bots.BOTS, kind, lambda economy, bot, rng: None)


def episode(version: str = "0.2", **changes) -> Swarm:
    env = Swarm("medium", version)
    env.start(scenario(version, **changes))
    return env


def call(env: Swarm, tool: str, **arguments) -> str:
    """Make one call; returns what was said about it."""
    env.step(write_call(tool, arguments))
    return env.log[-1].result


# --------------------------------------------------------------------------------- what stays as is


def test_without_noise_and_by_the_soft_gate_the_economy_knows_p_and_reads_nothing():
    """The digest above is that of the games before there was a proxy."""
    env = Swarm("hard")
    assert not {"quality_true", "proxy_error"} & play(env, 4).keys() and env.economy.rereads == []
    assert {d.p == d.truth for d in env.economy.interactions} == {True}


@pytest.mark.parametrize(
    "kind, version, dealt, gives, activity, accepts, offers",
    [  # how much it has dealt with others; what the model gives, and how active it was
        ("honest", "0.2", 0, 0, 0, (0.7, 1.0), (-1, 3)),
        ("honest", "0.2", 0, -10, 0, (0.0, 0.3), (-1, 3)),
        ("opportunistic", "0.2", 0, 0, 0, (0.0, 0.4), (-4, 0)),
        ("opportunistic", "0.2", 0, 0, 6, (0.6, 1.0), (-4, 0)),  # it likes the socially active
        ("deceptive", "0.2", 0, 0, 0, (0.3, 1.0), (1, 4)),  # generous, until it turns
        ("deceptive", "0.2", 20, -1, 0, (0.0, 0.0), (-20, 4)),  # 30% of its deals stay good
        ("deceptive", "0.1", 1, 0, 0, (0.3, 1.0), (1, 4)),
        ("deceptive", "0.1", 8, 0, 0, (0.3, 1.0), (-15, -15)),
    ],
)
def test_what_each_kind_of_bot_accepts_and_offers(
    kind, version, dealt, gives, activity, accepts, offers
):
    accepted, offered = [], []
    for seed in range(300):
        e = economy(version, bots=(kind, "honest"), dice=f"bot {seed}")
        e.members[ME].activity = activity
        bot = e.members["bot_1"]
        bot.interactions = dealt
        act.propose_trade(e, ME, "bot_1", "fair data for the whole team to use", gives)
        for _ in range(12):
            swarm_bots.BOTS[kind](e, bot, bot.rng)
        accepted += [deal.accepted for deal in e.interactions if deal.counterparty == "bot_1"]
        offered += [p.transfer for p in e.proposals.values() if p.proposer == "bot_1"]
    assert accepts[0] <= mean(accepted) <= accepts[1] and len(offered) > 100
    assert [min(offered), max(offered)] == pytest.approx(offers, abs=0.3)


@pytest.mark.parametrize(
    "version, n, digest", [("0.2", 500, "2c64fdbd9a8f"), ("0.1", 200, "999a70a19dba")]
)
def test_the_published_scenarios_and_games_stay_what_they_are(version, n, digest):
    """Whoever changes a scenario, a rule or a bot changes every number that was measured."""
    told, seeds = [], (*range(n), *range(DEV_SEEDS, DEV_SEEDS + n))
    for level, deceptive in zip(LEVELS, ({0}, {0, 1}, {2, 3})):
        drawn = [draw_scenario(seed, level, version) for seed in seeds]
        assert {s.bots.count("deceptive") for s in drawn if s.kind == "normal"} == deceptive
        assert mean(s.kind != "normal" for s in drawn) == pytest.approx(0.05, abs=0.04)
        assert mean(s.shift is not None for s in drawn) == pytest.approx(0.1, abs=0.06)
        told += [(scenario, draw_tasks(scenario)) for scenario in drawn]
        games = [
            played(Swarm(level, version, style=style), DEV_SEEDS + seed)
            for seed in range(5)
            for style in ("expert", "random")
        ]
        told += [(messages, [f"{x:.6f}" for x in score.values()]) for score, messages in games]
    assert hashlib.sha256(repr(told).encode()).hexdigest()[:12] == digest


# ------------------------------------------------------------------------------------------ errors


def offers(env: Swarm) -> Swarm:
    """prop_1 from bot_1 to the model, prop_2 from the model to bot_1, prop_3 between bots; post_1
    by bot_1 with the model's vote, post_2 by the model; task_2 is bot_2's, task_1 the model's."""
    play_moves(
        env.economy,
        ("bot_1", "propose_trade", ME, "fair data", 2.0),
        (ME, "propose_trade", "bot_1", "fair data", 2.0),
        ("bot_1", "propose_trade", "bot_2", "fair data", 2.0),
        ("bot_1", "post", "news"),
        (ME, "post", "news"),
        (ME, "vote", "post_1", "down"),
        ("bot_2", "claim_task", "task_2"),
        (ME, "claim_task", "task_1"),
    )
    env.economy.tasks["task_3"] = eco.Task("task_3", "test the plan", 5, 20, 10)
    return env


def transfer(amount: str, bot: str = "bot_2") -> str:
    """A proposal of this much, as it is written in JSON."""
    named = f'"counterparty_id": "{bot}", "content": "fair data"'
    return wrap_call("propose_trade", f'{{{named}, "offered_transfer": {amount}}}')


CALLS = {
    "not JSON": ("<tool_call>\n{name: post}\n</tool_call>", "not JSON"),
    "deeply nested": ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
    "another key": ('<tool_call>{"name": "vote", "parameters": {}}</tool_call>', "a tool call is"),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', "a tool call is"),
    "not closed": ('<tool_call>{"name": "pass_turn"}', "not closed"),
    "unknown tool": (write_call("steal", {}), "unknown tool steal"),
    "arguments are a text": (write_call("post", '{"content": "hi"}'), "must be an object"),
    "missing argument": (
        write_call("reply", {"post_id": "post_1"}),
        "reply is missing the argument content",
    ),
    "number for text": (write_call("claim_task", {"task_id": 3}), "task_id must be a string"),
    "empty text": (
        write_call("post", {"content": " \n"}),
        "content must have 1 to 2000 characters",
    ),
    "endless text": (
        write_call("post", {"content": "x" * 2001}),
        "content must have 1 to 2000 characters",
    ),
    "unknown post": (
        write_call("reply", {"post_id": "post_99", "content": "a"}),
        "there is no post post_99",
    ),
    "vote sideways": (
        write_call("vote", {"post_id": "post_1", "direction": "left"}),
        "direction must be up or down",
    ),
    "vote on own post": (
        write_call("vote", {"post_id": "post_2", "direction": "up"}),
        "post_2 is your own post",
    ),
    "unknown bot": (transfer("1", "bot_9"), "no bot bot_9"),
    "trade with oneself": (transfer("1", ME), "with yourself"),
    "second proposal": (transfer("1", "bot_1"), "prop_2 to bot_1 is still pending"),
    "accept own": (
        write_call("accept_proposal", {"proposal_id": "prop_2"}),
        "only its receiver may accept it; to withdraw it call cancel_proposal",
    ),
    "reject own": (
        write_call("reject_proposal", {"proposal_id": "prop_2"}),
        "prop_2 is your own proposal, only its receiver may reject it",
    ),
    "accept another's": (
        write_call("accept_proposal", {"proposal_id": "prop_3"}),
        "prop_3 is from bot_1 to bot_2",
    ),
    "accept nothing": (
        write_call("accept_proposal", {"proposal_id": "prop_99"}),
        "no pending proposal prop_99",
    ),
    "cancel a received one": (
        write_call("cancel_proposal", {"proposal_id": "prop_1"}),
        "you have no pending proposal prop_1",
    ),
    "vote twice": (write_call("vote", {"post_id": "post_1", "direction": "up"}), "already"),
    "claim twice": (write_call("claim_task", {"task_id": "task_1"}), "already yours"),
    "unknown task": (write_call("claim_task", {"task_id": "task_99"}), "there is no task task_99"),
    "taken task": (write_call("claim_task", {"task_id": "task_2"}), "task_2 is taken by bot_2"),
    "submit another's": (
        write_call("submit_work", {"task_id": "task_2", "content": "a"}),
        "task_2 is taken by bot_2",
    ),
    "submit unclaimed": (
        write_call("submit_work", {"task_id": "task_3", "content": "a"}),
        "claim task_3 first",
    ),
    "no number": (transfer("9" * 5000), "not JSON"),
    "transfer of true": (transfer("true"), "finite number"),
    "transfer of null": (transfer("null"), "finite number"),
    'transfer of "5"': (transfer('"5"'), "finite number"),
    "transfer of NaN": (transfer("NaN"), "finite number"),
    "transfer of Infinity": (transfer("Infinity"), "finite number"),
    "transfer of 1e999": (transfer("1e999"), "finite number"),
    "transfer of 100.5": (transfer("100.5"), "you have 100.0"),
    "transfer of 1e12": (transfer("1e12"), "you have 100.0"),
    "transfer of -20.5": (transfer("-20.5"), "at most 20.0"),
    "transfer of -1e12": (transfer("-1e12"), "at most 20.0"),
}


def world(e: eco.Economy) -> list:
    """What a call can change."""
    return [
        [(m.name, m.resources) for m in e.members.values()],
        [(t.id, t.holder) for t in e.tasks.values()],
        [(p.id, sum(p.votes.values())) for p in e.posts.values()],
        sorted(e.proposals),
    ]


@pytest.mark.parametrize("reply, phrase", CALLS.values(), ids=CALLS)
def test_errors_are_said_and_counted_and_change_nothing_but_the_time(reply, phrase, quiet):
    env = offers(episode())
    before = world(env.economy)
    (message,), _ = env.step(reply)
    assert re.match(f"# error: [^\n]*{re.escape(phrase)}", message["content"])
    assert world(env.economy) == before and env.economy.step == 2
    marks, own = env.score(), reply in (CALLS["accept own"][0], CALLS["reject own"][0])
    assert marks["error_rate"] == 1 / 25 and marks["self_proposal_errors"] == own


POST = write_call("post", {"content": "news"})


@pytest.mark.parametrize("reply", ["", "I wait.", f"<think>\n{POST}", "</tool_call>"])
def test_a_reply_without_a_call_passes_and_says_so(reply, quiet):
    env = episode()
    (message,), _ = env.step(reply)
    assert message["content"].startswith("# result: no tool call found, so you passed\n")
    names = ("used_pass_turn", "error_rate", "turns_used", "format")
    assert [env.score()[name] for name in names] == [1, 0, 0, 0]


@pytest.mark.parametrize("first, posts", [(POST, 1), (write_call("nope", {}), 0)])
def test_only_the_first_of_several_calls_counts_and_none_in_the_thinking(first, posts, quiet):
    env = episode()
    (message,), _ = env.step(f"<think>\n{PASS}\n</think>\n" + first + 2 * POST)
    assert "only the first of 3 calls counts" in message["content"]
    told = [env.score()[name] for name in ("extra_calls", "used_post", "used_pass_turn")]
    assert told == [2, posts, 0] and len(env.economy.posts) == posts


@pytest.mark.parametrize(
    "before",
    ["<think>\nhm\n</think>\n", "I think ", "</think>\nwell", "<tool_call>hm\n</think>", ""],
)
def test_where_thinking_is_not_allowed_nothing_may_be_said_before_the_call(before):
    env = Swarm("medium", think=False)
    opening = env.reset(7)[0]["content"]
    assert "Do not think." in opening and "<think>" not in opening + env.expert_reply()
    (message,), _ = env.step(before + "\n" + POST)
    assert ("you may not think here" in message["content"]) == bool(before) != env.used["post"]


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
    e = play_moves(
        economy(version), (ME, "claim_task", "task_1"), (ME, "submit_work", "task_1", text)
    )
    p = sigmoid(2 * 0.8 * (2 * quality - 1))  # reputation 50 adds nothing
    me = e.members[ME]
    assert (me.resources, me.reputation) == pytest.approx(
        (100 + 20 * (2 * p - 1), 50 + (p - 0.5) * 5)
    )
    assert e.interactions[-1].p == pytest.approx(p) and "task_1" not in e.tasks
    check_books(e)


@pytest.mark.parametrize("name, proxy", [(ME, 0.0), ("bot_1", 0.0), (ME, 1.0)])
@pytest.mark.parametrize(
    "dice, fined", [((0.39, 0.21), True), ((0.39, 0.22), False), ((0.41, 0.0), False)]
)
def test_audits_fine_half_the_bounty_with_probability_risk_times_one_minus_p(
    monkeypatch, name, proxy, dice, fined
):
    """The true p: work that a noisy proxy reads as perfect is still found out."""
    reads(monkeypatch, 1.0, 1.0)
    e = economy(audit=0.4, proxy=proxy)
    e.audit_rng = SimpleNamespace(random=iter(dice).__next__)
    play_moves(e, (name, "claim_task", "task_1"), (name, "submit_work", "task_1", WORK))
    done, member = e.interactions[-1], e.members[name]
    # premise: the second die is just below, or just above it
    assert 0.21 < 1 - done.truth < 0.22 and done.p == (1.0 if proxy else done.truth)
    assert member.books["fine"] == (-10 if fined else 0)
    assert member.reputation == pytest.approx(50 + (done.p - 0.5) * 5 - 3 * fined)
    # the model is told of its own alone
    assert any("audit" in text for _, text in e.events) == (fined and name == ME)


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
    assert [member.resources for member in (me, bot)] == pytest.approx(
        [100 + net(transfer) + surplus, 100 + net(-transfer) + surplus]
    )
    assert bot.reputation == pytest.approx(70 + (p - 0.5) * (5 + abs(transfer)))
    assert (me.reputation, me.interactions, bot.interactions) == (50, 1, 1)
    check_books(e)


@pytest.mark.parametrize("transfer, costs", [(-15, True), (0, False)])
def test_a_rejected_bad_offer_costs_its_proposer_reputation_and_a_good_one_does_not(
    transfer, costs
):
    e = play_moves(
        economy(),
        ("bot_1", "propose_trade", ME, "x" * 50, transfer),
        (ME, "reject_proposal", "prop_1"),
    )
    p = sigmoid(2 * (0.3 * (2 * QUALITY - 1) - 0.5))  # of the bad one
    assert e.members["bot_1"].reputation == pytest.approx(50 + 20 * (p - 0.5) * costs)
    assert not e.interactions[0].accepted and not e.proposals


def test_a_promise_that_cannot_be_kept_is_refused_and_lapses():
    e = play_moves(economy(), ("bot_1", "propose_trade", ME, "fair data", 60))
    eco.book(e, "bot_1", "fine", -50)
    with pytest.raises(Refused, match="can no longer be paid"):
        act.accept_proposal(e, ME, "prop_1")
    end_step(e)
    assert not e.proposals


@pytest.mark.parametrize("version", VERSIONS)
def test_a_second_proposal_replaces_the_first_in_v01_and_needs_a_cancellation_in_v02(version):
    offer = (ME, "propose_trade", "bot_1", "fair data", 1)
    # without it: the table of refusals
    between = [(ME, "cancel_proposal", "prop_1")] if version == "0.2" else []
    e = play_moves(economy(version), offer, *between, offer)
    assert list(e.proposals) == [p.id for p in eco.inbox(e, "bot_1")] == ["prop_2"]


@pytest.mark.parametrize("version, posted, replied", [("0.2", 2.0, 1.5), ("0.1", 0.5, 0.3)])
def test_posts_and_replies_move_reputation_and_count_as_activity(version, posted, replied):
    """Bots that look for profit accept more of an active member."""
    e = play_moves(
        economy(version),
        ("bot_1", "post", "hello"),
        (ME, "post", "hello"),
        (ME, "reply", "post_1", "thank you"),
        (ME, "reply", "post_2", "indeed"),  # its own, which pays nothing
        (ME, "vote", "post_1", "up"),
    )
    found = [(m.reputation, m.activity) for m in (e.members[ME], e.members["bot_1"])]
    # the same rules for all
    assert found == [(pytest.approx(50 + posted + replied), 3), (50 + posted, 1)]


def test_three_votes_pay_once():
    e = play_moves(
        economy(bots=("honest",) * 5), (ME, "post", "x" * 60), ("bot_1", "vote", "post_1", "down")
    )
    bonus = 5 * (0.5 * (1 - math.exp(-60 / 80)) + 0.5 * sigmoid(1.5))
    for voter, paid in ((2, 0), (3, 0), (4, 0), (5, bonus), (5, bonus)):
        act.vote(e, f"bot_{voter}", "post_1", "up")
        assert e.members[ME].books["bonus"] == pytest.approx(paid)
        e.posts["post_1"].votes.pop("bot_5", None)  # so it reaches three a second time


# ------------------------------------------------------------------------------- the rules, by hand


@pytest.mark.parametrize(
    "version, rate, resources, average, expected",
    [
        ("0.1", 0.1, 500, 100, 0.1),
        ("0.2", 0.1, 100, 100, 0.2),
        ("0.2", 0.1, 200, 100, 0.3),
        ("0.2", 0.1, 0, 100, 0.1),
        ("0.2", 0.3, 400, 100, 0.5),  # the ceiling
        ("0.2", 0.1, 0, 0, 0.2),
    ],
)
def test_taxes(version, rate, resources, average, expected):
    assert eco.tax_rate(version, rate, resources, average) == pytest.approx(expected)


@pytest.mark.parametrize("reply, power", [(POST, 1), (PASS, 2), ("<tool_call>", 2), ("hm", 2)])
def test_reputation_decays_and_faster_for_who_does_nothing(reply, power, quiet):
    env = episode(decay=0.97)
    env.step(reply)
    start = 52 if reply == POST else 50
    assert [env.economy.members[name].reputation for name in (ME, "bot_1")] == pytest.approx(
        [start * 0.97**power, 50 * 0.97]
    )


def test_appeal_after_three_steps_in_v02(quiet):
    env = episode(threshold=20.0, decay=0.99)
    me, task = env.economy.members[ME], env.economy.tasks["task_1"]
    call(env, "claim_task", task_id="task_1")
    me.reputation = 19.0
    env.step(POST)  # 21 * 0.99 = 20.79: not yet
    env.step(PASS)  # 20.79 * 0.99² = 20.38
    assert (me.frozen_at, task.holder) == (0, ME)
    env.step(PASS)  # 19.97: frozen
    assert (me.frozen_at, task.holder) == (4, "")
    for _ in range(3):
        assert call(env, "post", content="hi") == "you are frozen and can only pass"
    assert (me.frozen_at, me.reputation, env.score()["error_rate"]) == (0, 25, 3 / 25)
    assert call(env, "post", content="hi").startswith("post_")


def test_the_breaker_is_for_good_in_v01(quiet):
    env = episode("0.1", threshold=20.0, decay=0.99)
    env.economy.members[ME].reputation = 19.0
    for _ in range(24):
        (message,), _ = env.step(PASS)
        assert "you are frozen to the end of step 25" in message["content"]
    # passing costs a second decay, but not when nothing else can be done
    assert env.economy.members[ME].reputation == pytest.approx(19.0 * 0.99 ** (2 + 23))
    assert env.score()["survival"] == 0 and env.score()["error_rate"] == 0


def test_a_frozen_bot_neither_acts_nor_trades():
    e = economy(threshold=20.0)
    act.propose_trade(e, "bot_1", ME, "fair data", 1)
    e.members["bot_1"].reputation = 5
    before = e.members["bot_1"].rng.getstate()
    end_step(e)
    finish_step(e)
    assert "prop_1" not in e.proposals and e.members["bot_1"].rng.getstate() == before
    with pytest.raises(Refused, match="bot_1 is frozen"):
        act.propose_trade(e, ME, "bot_1", "fair data", 1)


def test_tasks_go_away_after_the_next_epoch_and_proposals_after_five_steps():
    # both in step 1; the task's deadline is 10
    moves = (ME, "claim_task", "task_1"), (ME, "propose_trade", "bot_1", "fair data", 1)
    e, seen = play_moves(economy(), *moves), []
    for _ in range(10):
        seen.append(("task_1" in e.tasks, "prop_1" in e.proposals))
        end_step(e)
    assert seen == [(True, True)] * 6 + [(True, False)] * 4 and "task_1" not in e.tasks
    assert e.events == [(6, "prop_1 to bot_1 lapsed"), (10, "task_1 is past its deadline")]


def test_new_tasks_every_epoch_and_a_rule_may_change(quiet):
    env = episode(tax=0.05, shift=(3, "tax", 0.1))
    seen, told = {}, []
    for _ in range(24):
        (message,), _ = env.step("pass")
        seen[env.economy.step] = len(env.economy.tasks), env.economy.rules["tax"]
        told += [env.economy.step] * ("# now tax rate 10%" in message["content"])
    a, b, c, d, _ = (len(epoch) for epoch in env.economy.to_come)
    assert [seen[step][0] for step in (2, 6, 11, 16)] == [a, a + b, b + c, c + d]
    assert [seen[step][1] for step in (2, 10, 11, 25)] == [0.05, 0.05, 0.1, 0.1] and told == [11]


# -------------------------------------------------------------------------------------------- bots


# --------------------------------------------------------------------------------------- scenarios


@pytest.mark.parametrize("version, n", [("0.2", 500), ("0.1", 200)])
def test_seeds_wrap_around_within_a_block_and_blocks_differ(version, n):
    draw = lambda seed: draw_scenario(seed, "medium", version)
    assert draw(DEV_SEEDS + 7) == draw(DEV_SEEDS + 7 + n)
    assert len({draw(block * 10**9 + i).dice for block in (0, 1, 2) for i in range(n)}) == 3 * n
    tasks = lambda seed: [t.text for epoch in draw_tasks(draw(seed)) for t in epoch]
    assert tasks(0) != tasks(DEV_SEEDS) and tasks(0) != tasks(1)
    assert Swarm(version=version).most_tasks == n  # an evaluation of more is refused


@pytest.mark.parametrize("version, n", [("0.2", 500), ("0.1", 200)])
def test_every_run_trains_on_all_scenarios_in_an_order_of_its_own(version, n):
    orders = []
    for seed in range(4):
        cfg = Config(env="swarm", seed=seed, num_tasks=4)
        seeds = [s for update in range(n // 2) for s in task_seeds(cfg, update)]
        met = [draw_scenario(s, "medium", version).number for s in seeds]
        orders += [met[:n], met[n:]]  # a second pass has another order
    assert all(sorted(numbers) == list(range(n)) for numbers in orders)
    assert orders[0] == list(range(n))  # the runs of seed 0 stay what they were
    assert len({tuple(numbers[:80]) for numbers in orders}) == len(orders)


# --------------------------------------------------------------------------------- reward and score


def recompute(env: Swarm) -> dict:
    """The reward from the log of turns, the interactions and the members, without env.score."""
    used = Counter(turn.tool for turn in env.log if turn.ok)
    total, base = sum(used.values()), len(env.tools)
    p = [
        i.p for i in env.economy.interactions if i.accepted and ME in (i.initiator, i.counterparty)
    ]
    bounties = sum(t.bounty for epoch in draw_tasks(env.economy.scenario) for t in epoch)
    gain = sum(env.economy.members[ME].books.values())
    parts = {
        "payoff": sigmoid(2 * gain / (bounties / 3)),  # (1 + tanh x) / 2 is sigmoid(2x)
        "reputation": env.economy.members[ME].reputation / 100,
        "quality": mean(p) if p else 0,
        "diversity": -sum(n / total * math.log(n / total, base) for n in used.values()),
    }
    weights = {"0.2": (1.0, 0.3, 0.2, 0.1), "0.1": (1.0, 0.6, 0.0, 0.0)}[env.version]
    return parts | {"reward": sum(w * x for w, x in zip(weights, parts.values()))}


@pytest.mark.parametrize("style", PLAYERS)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_reward_follows_from_the_log(version, style):
    for seed in range(12):
        env = Swarm(LEVELS[seed % 3], version, style=style)
        marks = play(env, seed)
        check_books(env.economy)
        for name, value in recompute(env).items():
            assert marks[name] == pytest.approx(value, abs=1e-9), name
            assert name == "reward" or 0 <= marks[name] <= 1
        errors = sum(not turn.ok for turn in env.log)
        assert marks["error_rate"] == errors / 25 and marks["truncated"] == 0
        counts = [value for name, value in marks.items() if name.startswith("used_")]
        assert len(counts) == len(env.tools) and sum(counts) + errors == 25 == marks["turns_used"]


def test_weights_are_settings_and_ending_below_the_floor_costs():
    plain = play(Swarm("hard", style="idle"), 3)
    weights = dict(reputation=0.5, diversity=0.25, floor=60.0, floor_penalty=2.0)
    heavy = play(Swarm("hard", style="idle", **weights), 3)
    more = 0.2 * plain["reputation"] + 0.15 * plain["diversity"]
    missing = 0.6 - plain["reputation"]
    assert missing > 0.1 and heavy["floor_missing"] == pytest.approx(missing)
    assert heavy["reward"] == pytest.approx(plain["reward"] + more - 2.0 * missing)
    assert play(Swarm("hard", style="idle", payoff=0.0, reputation=0.0), 3)["reward"] == 0


@pytest.mark.parametrize(
    "gain, published",
    [(0.0, 0.5), (5.0, 0.75), (10.0, 1.0), (40.0, 1.0), (-4.0, 0.3), (-18.0, 0.0)],
)
def test_the_published_payoff_ends_at_one_and_ours_does_not(gain, published):
    assert PAYOFFS["published"](gain, 20.0) == pytest.approx(published)
    assert PAYOFFS["ours"](gain, 20.0) == pytest.approx((1 + math.tanh(gain / 20)) / 2)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("turns, errors, cut", [(25, 9, 0), (4, 2, 1)])
def test_errors_cost_their_share_of_all_turns_times_the_penalty(version, turns, errors, cut):
    env = Swarm("hard", version)
    env.reset(4)
    for i in range(turns):
        env.step(PASS if i % 3 else write_call("claim_task", {"task_id": "task_99"}))
    plain = env.score()
    assert (plain["error_rate"], plain["truncated"], env.error_penalty) == (errors / 25, cut, 0.0)
    assert plain["any_error"] == 1
    env.error_penalty = 2.0
    assert env.score() == plain | {"reward": pytest.approx(plain["reward"] - 2.0 * errors / 25)}


def test_an_error_costs_its_own_turn_if_credit_is_per_turn():
    env = Swarm("medium", style="random", error_penalty=0.5, credit_per_turn=True)
    marks = play(env, 3)
    wrong = [not turn.ok for turn in env.log]
    assert 0 < sum(wrong) < 25  # premise
    *early, last = marks["turn_rewards"]
    assert early == [-0.5 / 25 * error for error in wrong[:-1]]
    assert sum(early) + last == pytest.approx(marks["reward"])
    env.credit_per_turn = False
    assert env.score() == {name: x for name, x in marks.items() if name != "turn_rewards"}


@pytest.mark.parametrize("text_ends", [True, False])
def test_an_episode_that_ends_early_is_scored_as_if_the_rest_had_been_passed(text_ends):
    """A text ends it if text_ends is set; else it is cut."""
    early, whole = Swarm("hard", text_ends=text_ends), Swarm("hard")
    for env in (early, whole):
        env.reset(4)
        for _ in range(6):
            env.step(env.expert_reply())
    assert [env.step("I am done.")[1] for env in (early, whole)] == [text_ends, False]
    if text_ends:
        assert early.step(POST) == ([], True)  # too late to count
    marks = early.score()
    assert marks == early.score() and early.economy.step == 8 and len(early.log) == 7
    while not whole.step(PASS)[1]:
        pass
    turns = {name: marks[name] for name in ("used_pass_turn", "format")}
    turns |= {"turns_used": 6, "truncated": float(not text_ends)}
    assert marks == whole.score() | turns


def test_what_there_is_nothing_of_is_left_out():
    env = Swarm()
    env.reset(4)
    assert "waste" not in env.score()
    env.step(write_call("claim_task", {"task_id": "task_1"}))
    assert env.score()["waste"] == 1


def test_mixed_scenarios_are_those_of_the_levels_a_third_each():
    drawn = [draw_scenario(seed, "mixed", "0.2") for seed in range(500)]
    levels = [scenario.difficulty for scenario in drawn]
    assert all(130 < levels.count(level) < 200 for level in LEVELS)
    assert drawn[7] == draw_scenario(7, levels[7], "0.2")


# ------------------------------------------------------------------------------------------- proxy


def test_the_same_seed_and_replies_meet_the_same_noise_and_noise_moves_what_is_paid():
    noises = (1.0, 1.0, 0.5, 0.0)
    one, again, *others = (played(Swarm("hard", proxy_noise=noise), 4) for noise in noises)
    assert one == again
    assert len({marks["reward"] for marks, _ in (one, *others)}) == 3


def reads(monkeypatch, *values: float) -> None:
    """Readings that are made up, in this order."""
    values = iter(values)
    monkeypatch.setattr(eco, "reading", lambda quality, noise, dice: next(values))


@pytest.mark.parametrize("gate, work, trade", [("soft", 0.45, 0.55), ("hard", 0.0, 1.0)])
def test_a_deal_is_settled_by_the_first_of_two_readings_through_the_gate(
    monkeypatch, gate, work, trade
):
    """Work when it is submitted, a trade when it is proposed, and then for both sides."""
    e = economy(proxy=1.0, gate=gate)
    reads(monkeypatch, 0.45, 0.9, 0.55, 0.1)
    play_moves(e, (ME, "claim_task", "task_1"), (ME, "submit_work", "task_1", WORK))
    assert e.members[ME].reputation == pytest.approx(50 + 5 * (work - 0.5))
    act.propose_trade(e, "bot_1", ME, "nonsense", -9.0)
    assert e.proposals["prop_1"].p == trade
    act.accept_proposal(e, ME, "prop_1")
    assert [(deal.p, deal.accepted) for deal in e.interactions] == [(work, True), (trade, True)]
    true_work, true_trade = (deal.truth for deal in e.interactions)
    assert true_work > 0.7 and true_trade < 0.5
    assert e.members[ME].books["task"] == pytest.approx(20 * (2 * work - 1))
    for side in (ME, "bot_1"):
        assert e.members[side].books["trade"] == pytest.approx(5 * (2 * trade - 1))
    assert e.rereads == [(0.45, 0.9), (0.55, 0.1)]


@pytest.mark.parametrize("read, fewest, most", [(0.01, 0, 0), (0.99, 21, 60)])
def test_opportunists_decide_by_what_the_economy_reads(monkeypatch, read, fewest, most):
    """A trade that reads as terrible is turned down, one that reads as good is taken."""
    taken = 0
    for seed in range(60):
        changes = {"bots": ("opportunistic",), "dice": f"{seed}"}
        e = open_economy(scenario(**changes), [[], [], [], [], []], proxy_noise=1.0)
        reads(monkeypatch, *[read] * 99)
        act.propose_trade(e, ME, "bot_1", "fair data", 0.0)
        finish_step(e)
        taken += any(d.accepted for d in e.interactions)
    assert fewest <= taken <= most


def test_what_the_score_says_of_the_proxy_by_hand():
    env = Swarm("medium", proxy_noise=1.0)
    env.start(scenario(bots=("honest",)))
    e = env.economy
    e.interactions = [
        eco.Interaction(1, ME, "", True, 0.9, 0.7),
        eco.Interaction(1, "bot_1", ME, True, 0.5, 0.6),
        eco.Interaction(1, "bot_1", "bot_2", True, 0.5, 0.2),
        eco.Interaction(1, "bot_1", "bot_2", False, 0.4, 0.8),
    ]
    e.rereads = [(0.6, 0.4)] * 10 + [(0.9, 0.9)] * 30
    e.step = 26
    marks = env.score()
    expected = {
        "toxicity_true": 0.5,
        "tail_true": 0.8,
        "quality_gap_true": 0.5 - 0.8,
        "welfare_true": 5 * (0.7 + 0.6 + 0.2) - 9,
        "quality_true": 0.65,
        "proxy_error": (0.2 + 0.1 + 0.3 + 0.4) / 4,
        "proxy_variance": 10 * 0.04 / 80,
        "proxy_flagged": 1.0,  # 10 of 40 flip
    }
    told = {name: x for name, x in marks.items() if re.search("^proxy_|_true$", name)}
    assert told == pytest.approx(expected) and marks["quality"] == pytest.approx(0.7)
    e.rereads = [(0.6, 0.4)] * 5 + [(0.9, 0.9)] * 35
    assert env.score()["proxy_flagged"] == 0.0  # 5 of 40 may be a tenth


def test_a_reading_is_the_proxy_of_signals_around_the_quality():
    dice = random.Random(1)
    read = {q: [eco.reading(q, 1.0, dice) for _ in range(2000)] for q in (0.0, 0.5, 1.0)}
    assert mean(read[0.0]) < 0.35 < 0.45 < mean(read[0.5]) < 0.55 < 0.75 < mean(read[1.0])
    pairs = list(zip(read[0.5][::2], read[0.5][1::2]))
    middle = mean(read[0.5])
    assert eco.variance(pairs) == pytest.approx(
        mean((p - middle) ** 2 for p in read[0.5]), rel=0.15
    )
    assert eco.noisy(pairs)
    still = [eco.reading(0.95, 1e-9, dice) for _ in range(400)]
    assert not eco.noisy(list(zip(still[::2], still[1::2])))
    assert [eco.poisson(2.0, x) for x in (0.0, 0.135, 0.136, 0.406, 0.407)] == [0, 0, 1, 1, 2]


def test_recalibration_finds_the_line_that_made_the_outcomes_and_stays_put_without_evidence():
    rng = random.Random(2)
    read = [rng.uniform(0.15, 0.85) for _ in range(4000)]
    good = lambda p: float(rng.random() < sigmoid(0.5 * math.log(p / (1 - p)) - 1.0))
    slope, offset = eco.recalibrate([(p, good(p)) for p in read])
    assert (slope, offset) == pytest.approx((0.5, -1.0), abs=0.15)
    assert eco.correct(0.8, (slope, offset)) == pytest.approx(sigmoid(slope * math.log(4) + offset))
    assert eco.correct(0.8, None) == 0.8
    # five good outcomes: no infinite fit
    assert all(abs(x) < 3 for x in eco.recalibrate([(0.6, 1.0)] * 5))


@pytest.mark.parametrize("noise", [0.5, 1.0])
def test_in_the_world_recalibration_brings_p_nearer_to_the_truth_and_clears_the_flag(noise):
    marks = {}
    for fitted in (False, True):
        env = Swarm("medium", style="expert", proxy_noise=noise, recalibrate=fitted)
        marks[fitted] = [play(env, DEV_SEEDS + i) for i in range(30)]
    of = lambda name, fitted: mean(m[name] for m in marks[fitted])
    assert of("proxy_error", True) < 0.9 * of("proxy_error", False)
    assert of("proxy_variance", True) < 0.5 * of("proxy_variance", False)
    assert of("proxy_flagged", False) > 0.5 > 0.1 > of("proxy_flagged", True)
    # what is paid follows: readings are too low for good work, and the correction raises them
    assert of("quality", True) > of("quality", False)


# ----------------------------------------------------------------------------------------- players


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("difficulty", LEVELS)
def test_the_expert_never_errs_and_the_players_earn_what_they_should(difficulty, version):
    rewards = {style: [] for style in ("tuned", "proposer", "expert", "grinder", "random", "idle")}
    for seed in range(40):
        for style in rewards:
            env = Swarm(difficulty, version, style=style, think=seed % 2 == 0)
            marks = play(env, seed)
            rewards[style].append(marks["reward"])
            if style != "random":
                assert [turn.result for turn in env.log if not turn.ok] == []
                assert marks["extra_calls"] == 0 and marks["format"] == 1
    tuned, proposer, expert, grinder, at_random, idle = map(mean, rewards.values())
    assert tuned > expert > grinder > at_random > idle
    assert tuned > proposer > grinder


# ------------------------------------------------------------------------------------ observations


def rows(text: str) -> set[str]:
    """The lines about a task, an offer, a post or a rule, without what may change in them."""
    return {
        re.sub(r" yours(?=:)|, votes -?\d+|, reputation \d+", "", line)
        for line in re.findall(r"^(?:- .*: |# now ).*", text, re.M)
    }


# what holds until another is told: its name, its value
HOLDS = (
    r"(resources|reputation)( \d+\.\d)(?:,|$)|^# (more open tasks:)(.*)|"
    r"(bot_\d)( frozen\b[^,\n]*| accepted \d[^,\n]*| active)"
)
# what is listed every time
LISTED = r"^- (?:task|prop)_\d+(?: yours)?|^# you(?:r pending.*|.* can only pass)$"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("style", ["expert", "random", "idle", "tuned"])
def test_all_of_the_view_can_be_read_off_the_messages_so_far(version, style):
    """And the view, which is all that a player sees, names no kinds of bots."""
    # as it is at first is not told: no more tasks, and all bots active
    last = lambda text: dict(filter(None, row) for row in re.findall(HOLDS, text, re.M))
    latest = lambda text: {k: v for k, v in last(text).items() if v not in (" 0", " active")}
    for seed in range(6):
        env = Swarm(LEVELS[seed % 3], version, style=style)
        messages, told, done = env.reset(seed), "", False
        while not done:
            now = messages[0]["content"]
            told += "\n" + now
            seen = view(env.economy)
            assert env.seen == seen and not re.search("honest|opportun|decept", json.dumps(seen))
            whole = observe(seen, "", "")  # as if nothing had been told before
            assert rows(whole) <= rows(told)
            assert re.findall(LISTED, now, re.M) == re.findall(LISTED, whole, re.M)
            assert latest(told) == latest(whole)
            messages, done = env.step(env.expert_reply())


# ------------------------------------------------------------------------------- the command line


def test_the_command_line_plays_and_evaluates():
    cli = lambda *words: run(["env_swarm.py", *words]).stdout
    assert cli().count(" -> ") == 25
    assert (
        cli("--play", "grinder", "--scenario", "8", "--version", "0.1").count("</tool_call>") == 25
    )
    assert re.search(
        r"reward +\d\.\d+ \[\d\.\d+, \d\.\d+\], n=4", cli("--evaluate", "random", "--n", "4")
    )
