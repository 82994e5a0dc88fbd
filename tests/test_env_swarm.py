"""Protects the swarm environment: the books balance, every rule does what is written (single tools:
test_swarm_tools.py), no reply breaks it, and the same seed and replies give the same episode.

Expected numbers are worked out here by hand or by other code, from the written rules and not from
the environment's.
"""

import hashlib
import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bookkeeping.refusals import check
from env_swarm import STYLES, WEIGHTS, Swarm, play
from settings import DEV_SEEDS, Config, sft_seeds, task_seeds
from swarm import bots as swarm_bots
from swarm import economy as eco
from swarm import tools as act
from swarm.bots import EXTREMES, bots_act, draw_scenario, draw_tasks, exploits, tenths
from swarm.economy import ME, MECHANISMS, end_step, open_economy
from swarm.players import PLAYERS, from_short
from swarm.tools import TOOLS, Refused, wrap_call, write_call
from swarm.view import view
from test_swarm_tools import VERSIONS, WORK, check_books, economy, mean, scenario, sigmoid

ROOT = Path(__file__).resolve().parent.parent
LEVELS = ("easy", "medium", "hard")
PASS = write_call("pass_turn", {})


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


# ------------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("style", ["expert", "random"])
def test_same_seed_and_replies_give_the_same_observations_and_score(version, style):
    one, two = Swarm("hard", version, style=style), Swarm("hard", version)
    two.reset(99)  # what was played before must not matter
    two.step("nothing")
    seen, done = [(one.reset(5), two.reset(5))], False
    while not done:
        reply = one.expert_reply()
        (a, done), (b, _) = one.step(reply), two.step(reply)
        seen.append((a, b))
    assert len(seen) == 26 and all(a == b for a, b in seen)
    assert one.score() == two.score()


def test_the_tasks_do_not_depend_on_what_is_played():
    one, two = Swarm(style="idle"), Swarm(style="expert")
    gains = play(one, 3)["gain"], play(two, 3)["gain"]
    told = [[t.id, t.text, t.bounty] for epoch in one.economy.to_come for t in epoch]
    assert told == [[t.id, t.text, t.bounty] for epoch in two.economy.to_come for t in epoch]
    assert gains[0] != gains[1]


def test_the_model_acts_then_the_bots_then_the_governance(monkeypatch):
    seen = []

    def watch(e, bot, rng):
        seen.append((e.step, bot.name, len(e.posts), round(e.members[ME].reputation, 6)))

    monkeypatch.setitem(swarm_bots.BOTS, "honest", watch)
    env = episode(decay=0.9)
    for _ in range(2):
        call(env, "post", content="news")
    first, second = [(1, "bot_2", 1, 52.0), (1, "bot_1", 1, 52.0)], 48.8  # 52 * 0.9 + 2
    assert seen == [*first, (2, "bot_1", 2, second), (2, "bot_2", 2, second)]


@pytest.mark.parametrize("version, shared", [("0.2", False), ("0.1", True)])
def test_each_bot_has_its_own_dice_in_v02_and_shares_them_in_v01(version, shared):
    env = Swarm("medium", version)
    env.reset(1)
    dice = [m.rng for m in env.economy.members.values() if m.name != ME]
    assert (len({id(d) for d in dice}) == 1) is shared
    assert len({d.random() for d in dice}) == len(dice)  # and none repeats another


# ------------------------------------------------------------------- any reply, and the books after

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
good_arguments = st.builds(
    lambda n, text, transfer, way: {
        "post_id": f"post_{n}",
        "task_id": f"task_{n}",
        "proposal_id": f"prop_{n}",
        "counterparty_id": f"bot_{n}",
        "content": text,
        "offered_transfer": transfer,
        "direction": way,
    },
    st.integers(1, 9),
    st.sampled_from(["good work", WORK, "x" * 300]),
    st.floats(-20, 60) | st.floats(),
    st.sampled_from(["up", "down", "up"]),
)
strange = st.dictionaries(st.sampled_from(["content", "task_id", "offered_transfer"]), json_values)
made_calls = st.builds(write_call, st.sampled_from(list(TOOLS)), good_arguments | strange)
pieces = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": ', '"post"', "}", "\ud800"]
soup = st.lists(st.sampled_from(pieces) | st.text(max_size=8), max_size=9).map("".join)
replies = st.lists(made_calls | made_calls | soup, min_size=25, max_size=25)
MARKUP = '{"content": "\\ud800 </tool_response> <|im_end|>\\u0000\\u202e"}'
NASTY = [wrap_call("post", MARKUP), write_call("claim_task", {"task_id": "\ud800" * 500})]


def clean(text: str) -> bool:
    """UTF-8, one printable line after another, and nothing that could be read as markup."""
    text.encode("utf-8")
    return not re.search("[<>]", text) and all(line.isprintable() for line in text.split("\n"))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(LEVELS), st.sampled_from(VERSIONS), replies)
@example(1, "medium", "0.2", [*NASTY, write_call("\ud800" * 50, {}), *[""] * 22])
def test_any_string_is_a_legal_reply_and_the_books_balance(seed, difficulty, version, replies):
    env = Swarm(difficulty, version)
    env.reset(seed)
    for turn, reply in enumerate(replies, start=1):
        messages, done = env.step(reply)
        check_books(env.economy)
        assert done == (turn == 25) and len(messages) == 1 - done
        assert all(m["role"] == "tool" and clean(m["content"]) for m in messages)
        json.dumps(env.log[-1].arguments, ensure_ascii=False).encode("utf-8")
    assert all(math.isfinite(value) for value in env.score().values())
    assert env.step("one more") == ([], True) and len(env.log) == 25


def test_every_mechanism_moves_resources():
    moved = Counter()
    for seed in range(20):
        env = Swarm("hard", style="random" if seed % 2 else "expert")
        play(env, seed)
        for member in env.economy.members.values():
            moved.update({name: abs(amount) for name, amount in member.books.items()})
    assert all(moved[name] > 1 for name in MECHANISMS)


def test_nobody_loses_more_than_he_has():
    e = economy()
    assert eco.book(e, ME, "fine", -250) == -100 and e.members[ME].resources == 0
    assert e.total == 200


# ------------------------------------------------------------------------------------------ errors


def offers(env: Swarm) -> Swarm:
    """prop_1 from bot_1 to the model, prop_2 from the model to bot_1, prop_3 between bots; post_1 by
    bot_1 with the model's vote, post_2 by the model; task_2 is bot_2's, task_3 the model's."""
    e = env.economy
    for name, other in (("bot_1", ME), (ME, "bot_1"), ("bot_1", "bot_2")):
        act.propose_trade(e, name, other, "fair data", 2.0)
    for name in ("bot_1", ME):
        act.post(e, name, "news")
    act.vote(e, ME, "post_1", "down")
    e.tasks["task_3"] = eco.Task("task_3", "test the plan", 5, 20, 10)
    act.claim_task(e, "bot_2", "task_2")
    act.claim_task(e, ME, "task_3")
    return env


def transfer(amount: str) -> str:
    """A proposal to bot_2 of this much, as it is written in JSON."""
    text = '{"counterparty_id": "bot_2", "content": "fair data", "offered_transfer": %s}'
    return wrap_call("propose_trade", text % amount)


def to(bot: str) -> str:
    trade = {"counterparty_id": bot, "content": "a", "offered_transfer": 1}
    return write_call("propose_trade", trade)


CALLS = {
    "not JSON": ("<tool_call>\n{name: post}\n</tool_call>", "not JSON"),
    "deeply nested": ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', "a tool call is"),
    "not closed": ('<tool_call>{"name": "pass_turn"}', "not closed"),
    "unknown tool": (write_call("steal", {}), "unknown tool steal"),
    "arguments are a text": (write_call("post", '{"content": "hi"}'), "must be an object"),
    "missing argument": (write_call("reply", {"post_id": "post_1"}), "reply is missing the argument content"),
    "number for text": (write_call("claim_task", {"task_id": 3}), "task_id must be a string"),
    "empty text": (write_call("post", {"content": " \n"}), "content must have 1 to 2000 characters"),
    "endless text": (write_call("post", {"content": "x" * 2001}), "content must have 1 to 2000 characters"),
    "unknown post": (write_call("reply", {"post_id": "post_99", "content": "a"}), "there is no post post_99"),
    "vote sideways": (write_call("vote", {"post_id": "post_1", "direction": "left"}), "direction must be up or down"),
    "vote on own post": (write_call("vote", {"post_id": "post_2", "direction": "up"}), "post_2 is your own post"),
    "unknown bot": (to("bot_9"), "no bot bot_9"),
    "trade with oneself": (to(ME), "with yourself"),
    "second proposal": (
        to("bot_1"), "prop_2 to bot_1 is still pending"
    ),
    "accept own": (write_call("accept_proposal", {"proposal_id": "prop_2"}),
                   "prop_2 is your own proposal, only its receiver may accept it"),
    "reject own": (write_call("reject_proposal", {"proposal_id": "prop_2"}),
                   "prop_2 is your own proposal, only its receiver may reject it"),
    "accept another's": (write_call("accept_proposal", {"proposal_id": "prop_3"}), "prop_3 is from bot_1 to bot_2"),
    "accept nothing": (write_call("accept_proposal", {"proposal_id": "prop_99"}), "no pending proposal prop_99"),
    "cancel a received one": (write_call("cancel_proposal", {"proposal_id": "prop_1"}), "you have no pending proposal prop_1"),
    "vote twice": (write_call("vote", {"post_id": "post_1", "direction": "up"}), "already"),
    "claim twice": (write_call("claim_task", {"task_id": "task_3"}), "already yours"),
    "unknown task": (write_call("claim_task", {"task_id": "task_99"}), "there is no task task_99"),
    "taken task": (write_call("claim_task", {"task_id": "task_2"}), "task_2 is taken by bot_2"),
    "submit another's": (write_call("submit_work", {"task_id": "task_2", "content": "a"}), "task_2 is taken by bot_2"),
    "submit unclaimed": (write_call("submit_work", {"task_id": "task_1", "content": "a"}), "claim task_1 first"),
    "no number": (transfer("9" * 5000), "not JSON"),
    'transfer of true': (transfer('true'), "finite number"),
    'transfer of null': (transfer('null'), "finite number"),
    'transfer of "5"': (transfer('"5"'), "finite number"),
    'transfer of NaN': (transfer('NaN'), "finite number"),
    'transfer of Infinity': (transfer('Infinity'), "finite number"),
    'transfer of 1e999': (transfer('1e999'), "finite number"),
    'transfer of 100.5': (transfer('100.5'), "you have 100.0"),
    'transfer of 1e12': (transfer('1e12'), "you have 100.0"),
    'transfer of -20.5': (transfer('-20.5'), "at most 20.0"),
    'transfer of -1e12': (transfer('-1e12'), "at most 20.0"),
}


@pytest.mark.parametrize("name", CALLS)
def test_errors_are_said_and_counted_and_change_nothing_but_the_time(name, quiet):
    reply, phrase = CALLS[name]
    env = offers(episode())
    e = env.economy
    world = lambda: [
        [(m.name, m.resources) for m in e.members.values()],
        [(t.id, t.holder) for t in e.tasks.values()],
        [(p.id, sum(p.votes.values())) for p in e.posts.values()],
        sorted(e.proposals),
    ]
    before = world()
    messages, done = env.step(reply)
    first = messages[0]["content"].splitlines()[0]
    assert first.startswith("# error: ") and phrase in first and not done
    assert world() == before and e.step == 2
    marks, own = env.score(), name in ("accept own", "reject own")
    assert marks["error_rate"] == 1 / 25 and marks["self_proposal_errors"] == own


@pytest.mark.parametrize("amount", ["0", "-20", "100", "3.5", "-0.0"])
def test_possible_transfers_are_not_refused(amount, quiet):
    env = episode()
    env.step(transfer(amount))
    assert env.log[-1].ok and env.economy.proposals["prop_1"].transfer == float(amount)


def test_own_proposal_names_cancel_proposal_only_where_it_exists(quiet):
    for version in VERSIONS:
        env = offers(episode(version))
        said = call(env, "accept_proposal", proposal_id="prop_2")
        assert ("cancel_proposal" in said) is (version == "0.2")
    assert "unknown tool" in call(env, "cancel_proposal", proposal_id="prop_2")


POST = write_call("post", {"content": "news"})


@pytest.mark.parametrize("reply", ["", "I wait.", f"<think>\n{POST}", "</tool_call>"])
def test_a_reply_without_a_call_passes_and_says_so(reply, quiet):
    env = episode()
    messages, done = env.step(reply)
    assert messages[0]["content"].startswith("# result: no tool call found, so you passed\n")
    names = ("used_pass_turn", "error_rate", "turns_used", "format")
    assert [env.score()[name] for name in names] == [1, 0, 0, 0] and not done


@pytest.mark.parametrize("first, posts", [(POST, 1), (write_call("nope", {}), 0)])
def test_only_the_first_of_several_calls_counts_and_none_in_the_thinking(first, posts, quiet):
    env = episode()
    messages, _ = env.step(f"<think>\n{PASS}\n</think>\n" + first + 2 * POST)
    assert "only the first of 3 calls counts" in messages[0]["content"]
    marks = env.score()
    assert [marks[name] for name in ("extra_calls", "used_post", "used_pass_turn")] == [2, posts, 0]
    assert len(env.economy.posts) == posts and marks["error_rate"] == (1 - posts) / 25


@pytest.mark.parametrize(
    "before", ["<think>\nA thought.\n</think>\n", "I think ", "</think>\nwell", "<tool_call>hm\n</think>"]
)
def test_where_thinking_is_not_allowed_nothing_may_be_said_before_the_call(before):
    for think, reply, fine in ((False, before + POST, False), (False, "\n" + POST, True)):
        env = Swarm("medium", think=think)
        env.reset(7)
        messages, _ = env.step(reply)
        said = "you may not think here" in messages[0]["content"]
        assert (env.used["post"] == 1) is fine is not said


def test_arguments_that_a_tool_does_not_take_are_ignored(quiet):
    env = episode()
    assert call(env, "pass_turn", reason="tired") == "you passed"


# ------------------------------------------------------------------------------- the rules, by hand


@pytest.mark.parametrize(
    "version, text, quality",
    [
        # 100 characters, difficulty 0.5, so the scale is 80 + 60; four of the five terms
        (
            "0.2",
            "Review of the water budget for the city. ".ljust(100, "-"),
            0.25 * (1 - math.exp(-100 / 140)) + 0.25 * sigmoid(70 / 20) + 0.5 * 4 / 5,
        ),
        ("0.2", "x" * 80, 0.25 * (1 - math.exp(-80 / 140)) + 0.25 * sigmoid(50 / 20)),
        # v0.1 can be gamed: any 80 characters score as well as can be
        ("0.1", "x" * 80, 0.5 * 1 + 0.5 * 0.8),
        ("0.1", WORK, 0.5 * 1 + 0.5 * 0.8),
        ("0.1", "x" * 40, 0.5 * 0.5 + 0.5 * 0.3),
    ],
)
def test_scores_of_submissions(version, text, quality):
    task = "review the water budget for city health"
    assert eco.content_quality(text, version, 0.5, task) == pytest.approx(quality)


def test_terms_are_whole_words_in_any_case():
    quality = lambda text: eco.content_quality(text, "0.2", 0.5, "water")
    assert quality("watery") < 0.5 < quality("WATER!")
    assert eco.terms("Review THE water Budget") == ["review", "water", "budget"]


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


@pytest.mark.parametrize("version, kept", [("0.2", 10 * (1 - 0.1 * (1 + 150 / 120))), ("0.1", 9.0)])
def test_incomes_are_taxed_and_losses_are_not(version, kept):
    e = economy(version, tax=0.1)
    eco.book(e, ME, "bonus", 50)  # 150 of 350: the average of three members is 116.67
    eco.book(e, "bot_1", "bonus", 10)  # now 360, average 120
    assert eco.earn(e, ME, "task", 10) == pytest.approx(kept)
    assert e.members[ME].books["tax"] == pytest.approx(kept - 10)
    assert eco.earn(e, ME, "task", -10) == -10


@pytest.mark.parametrize("reply, power", [(POST, 1), (PASS, 2), ("<tool_call>", 2), ("hm", 2)])
def test_reputation_decays_and_faster_for_who_does_nothing(reply, power, quiet):
    env = episode(decay=0.97)
    env.step(reply)
    start = 52 if reply == POST else 50
    assert env.economy.members[ME].reputation == pytest.approx(start * 0.97**power)
    assert env.economy.members["bot_1"].reputation == pytest.approx(50 * 0.97)


def test_appeal_after_three_steps_in_v02(quiet):
    env = episode(threshold=20.0, decay=0.99)
    me = env.economy.members[ME]
    call(env, "claim_task", task_id="task_1")
    me.reputation = 19.0
    call(env, "post", content="hi")  # 21 * 0.99 = 20.79: not yet
    call(env, "pass_turn")  # 20.79 * 0.99² = 20.38
    assert not me.frozen_at and env.economy.tasks["task_1"].holder == ME
    call(env, "pass_turn")  # 19.97: frozen
    assert me.frozen_at == 4 and env.economy.tasks["task_1"].holder == ""
    for step in (5, 6, 7):
        assert env.economy.step == step
        assert call(env, "post", content="hi") == "you are frozen and can only pass"
    assert me.reputation == 25 and not me.frozen_at
    assert call(env, "post", content="hi").startswith("post_")
    assert env.score()["error_rate"] == pytest.approx(3 / 25)


def test_the_breaker_is_for_good_in_v01(quiet):
    env, done = episode("0.1", threshold=20.0), False
    env.economy.members[ME].reputation = 19.0
    while not done:
        messages, done = env.step(PASS)
        assert done or "you are frozen to the end of step 25" in messages[0]["content"]
    assert env.score()["survival"] == 0 and env.score()["error_rate"] == 0


def test_a_frozen_bot_neither_acts_nor_trades():
    e = economy(threshold=20.0)
    act.propose_trade(e, "bot_1", ME, "fair data", 1)
    e.members["bot_1"].reputation = 5
    end_step(e)
    assert not e.proposals
    with pytest.raises(Refused, match="bot_1 is frozen"):
        act.propose_trade(e, ME, "bot_1", "fair data", 1)
    before = e.members["bot_1"].rng.getstate()
    bots_act(e)
    assert e.members["bot_1"].rng.getstate() == before


def test_tasks_go_away_after_the_next_epoch_and_proposals_after_five_steps():
    e = economy()
    act.claim_task(e, ME, "task_1")  # deadline 10
    act.propose_trade(e, ME, "bot_1", "fair data", 1)  # in step 1
    for step in range(1, 11):
        assert e.step == step and "task_1" in e.tasks
        assert ("prop_1" in e.proposals) is (step <= 6)
        end_step(e)
    assert "task_1" not in e.tasks
    told = [text for _, text in e.events]
    assert told == ["prop_1 to bot_1 lapsed", "task_1 is past its deadline"]


def test_new_tasks_every_epoch_and_a_rule_may_change(quiet):
    env = episode(tax=0.05, shift=(3, "tax", 0.1))
    seen, done = {}, False
    while not done:
        messages, done = env.step("pass")
        text = messages[0]["content"] if messages else ""
        now = len(env.economy.tasks), env.economy.rules["tax"], "# now tax rate 10%" in text
        seen[env.economy.step] = now
    a, b, c, d, _ = (len(epoch) for epoch in env.economy.to_come)
    assert [seen[step][0] for step in (2, 6, 11, 16)] == [a, a + b, b + c, c + d]
    assert [seen[step][1] for step in (2, 10, 11, 25)] == [0.05, 0.05, 0.1, 0.1]
    assert [step for step, (*_, told) in seen.items() if told] == [11]  # told once


# -------------------------------------------------------------------------------------------- bots


def test_betrayal_is_a_threshold_in_v01_and_a_sigmoid_in_v02():
    rng = random.Random(0)
    assert [exploits("0.1", rng, n, 5) for n in (0, 4, 5, 9)] == [False, False, True, True]
    for distance in (-2, -1, 0, 1, 6):
        expected = 0.7 * sigmoid(2 * distance)
        share = mean(exploits("0.2", rng, 5 + distance, 5) for _ in range(4000))
        assert abs(share - expected) < 4 * (expected * (1 - expected) / 4000) ** 0.5 + 1e-9
    drawn = [open_economy(draw_scenario(seed, "hard", "0.2"), [[]]) for seed in range(60)]
    turning = {m.turning for e in drawn for m in e.members.values() if m.name != ME}
    assert turning == {3, 4, 5, 6, 7, 8}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_deceptive_bot_demands_and_of_whom(version, monkeypatch):
    seen, propose = [], act.propose_trade

    def spy(e, name, other, content, transfer):
        if e.members[name].kind == "deceptive":
            seen.append((e.members[name].interactions, e.members[other].reputation, transfer))
        return propose(e, name, other, content, transfer)

    monkeypatch.setattr(act, "propose_trade", spy)
    for seed in range(25):
        env = Swarm("hard", version)
        env.reset(seed)
        env.economy.members[ME].reputation = 45.0 if seed % 2 else 35.0
        for member in env.economy.members.values():
            member.resources, member.interactions = 1000.0, 4 * (seed % 5)
        for _ in range(10):
            env.step("pass")
    demands = [(n, reputation, -gives) for n, reputation, gives in seen if gives < 0]
    assert len(demands) > 50 and all(1 <= gives <= 4 for *_, gives in seen if gives >= 0)
    if version == "0.1":
        assert {demand for *_, demand in demands} == {15.0}
        assert all(reputation > 40 and n >= 3 for n, reputation, _ in demands)
    else:
        amounts = {demand for *_, demand in demands}
        assert 5 <= min(amounts) and max(amounts) <= 20 and len(amounts) > 30
        assert any(reputation <= 40 for _, reputation, _ in demands)


@pytest.mark.parametrize(
    "kind, gives, activity, low, high",
    [
        ("honest", 0, 0, 0.7, 1.0),
        ("honest", -10, 0, 0.0, 0.3),
        ("opportunistic", 0, 0, 0.0, 0.4),
        ("opportunistic", 0, 6, 0.6, 1.0),  # it likes the socially active
        ("deceptive", 0, 0, 0.3, 1.0),
        ("deceptive", -1, 0, 0.0, 0.0),
    ],
)
def test_honest_bots_accept_most_offers_and_opportunistic_ones_like_the_active(
    kind, gives, activity, low, high
):
    accepted = []
    for seed in range(300):
        e = economy(bots=(kind, "honest"), dice=f"accept {seed}")
        e.members[ME].activity = activity
        act.propose_trade(e, ME, "bot_1", "fair data for the whole team to use", gives)
        while "prop_1" in e.proposals:
            swarm_bots.BOTS[kind](e, e.members["bot_1"], e.members["bot_1"].rng)
        accepted.append(e.interactions[-1].accepted)
    assert low <= mean(accepted) <= high


def test_honest_bots_work_well_and_opportunistic_ones_take_the_best_bounties():
    p, bounty = {kind: [] for kind in swarm_bots.BOTS}, {kind: [] for kind in swarm_bots.BOTS}
    for seed in range(60):
        env = Swarm("hard" if seed % 2 else "medium")
        env.reset(seed)
        e, taken = env.economy, {}
        for _ in range(25):
            env.step("pass")
            taken |= {t.id: t for t in e.tasks.values() if t.holder}
        for deal in e.interactions:
            if deal.kind == "task":
                p[e.members[deal.initiator].kind].append(deal.p)
        for task in taken.values():
            if task.holder:
                bounty[e.members[task.holder].kind].append(task.bounty / e.scenario.bounty)
    assert mean(p["honest"]) > 0.7 > 0.6 > mean(p["opportunistic"])
    assert mean(bounty["opportunistic"]) > mean(bounty["honest"]) + 1


def test_opportunists_vote_only_where_two_others_have():
    e = economy(bots=("opportunistic", "honest", "honest"))
    act.post(e, "bot_2", "news")
    bot, voted = e.members["bot_1"], []
    for voter in (ME, "bot_3"):
        act.vote(e, voter, "post_1", "up")
        for _ in range(100):
            swarm_bots.socialise(e, bot, bot.rng, votes=0.0, posts=0.0, replies=0.0)
        voted.append("bot_1" in e.posts["post_1"].votes)
    assert voted == [False, True]


@given(st.floats(0, 1000))
@example(0.8999999999999999)
def test_a_bot_offers_no_more_than_it_has(resources):
    assert resources - 0.11 < tenths(resources) <= resources


# --------------------------------------------------------------------------------------- scenarios


@pytest.mark.parametrize("version, n", [("0.2", 500), ("0.1", 200)])
def test_seeds_wrap_around_within_a_block_and_blocks_differ(version, n):
    draw = lambda seed: draw_scenario(seed, "medium", version)
    assert draw(DEV_SEEDS + 7) == draw(DEV_SEEDS + 7 + n)
    assert len({draw(block * 10**9 + i).dice for block in (0, 1, 2) for i in range(n)}) == 3 * n
    tasks = lambda seed: [t.text for epoch in draw_tasks(draw(seed)) for t in epoch]
    assert tasks(0) != tasks(DEV_SEEDS) and tasks(0) != tasks(1)
    check(Config(env="swarm", set=[f"version={version}"], eval_n=n, sft_examples=n))
    for flag in ("eval_n", "sft_examples"):
        with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')} {n + 1}: .* {n} "):
            check(Config(env="swarm", set=[f"version={version}"], **{flag: n + 1}))


@pytest.mark.parametrize("version, n", [("0.2", 500), ("0.1", 200)])
@pytest.mark.parametrize("num_tasks", [1, 4])
def test_every_run_trains_on_all_scenarios_in_an_order_of_its_own(version, n, num_tasks):
    def trained_on(seed: int, updates: int) -> list[int]:
        cfg = Config(env="swarm", seed=seed, num_tasks=num_tasks)
        seeds = [s for update in range(updates) for s in task_seeds(cfg, update)]
        return [draw_scenario(s, "medium", version).number for s in seeds]

    whole = [trained_on(seed, n // num_tasks) for seed in range(4)]
    assert whole[0] == list(range(n))  # the runs of seed 0 stay what they were
    assert all(sorted(numbers) == list(range(n)) for numbers in whole)
    shared = [len({*a[:80]} & {*b[:80]}) for a, b in combinations(whole, 2)]
    assert max(shared) < 60 * 200 / n  # 13 of 80 by chance (v0.1: 32), and not 80
    assert trained_on(0, 2 * n // num_tasks)[n:] != whole[0]  # a second pass has another order


def test_the_published_development_scenarios_stay_what_they_are():
    drawn = [draw_scenario(DEV_SEEDS + i, "medium", "0.2") for i in range(500)]
    digest = hashlib.sha256(repr(drawn).encode()).hexdigest()
    assert digest.startswith("502d78526a3cca53"), "the published tables are of other scenarios"


def test_demonstrations_training_and_development_have_scenarios_of_their_own():
    cfg = Config(env="swarm", num_tasks=4)
    ranges = (sft_seeds(cfg), task_seeds(cfg, 0), range(DEV_SEEDS, DEV_SEEDS + 500))
    dice = [{draw_scenario(s, "medium", "0.2").dice for s in seeds} for seeds in ranges]
    assert [len(d) for d in dice] == [100, 4, 500] and len(set.union(*dice)) == 604


def test_shares_and_ranges_of_the_scenarios():
    seeds = [block * 10**9 + i for block in range(4) for i in range(500)]
    drawn = {level: [draw_scenario(s, level, "0.2") for s in seeds] for level in LEVELS}
    everything = [s for scenarios in drawn.values() for s in scenarios]
    n, kinds = len(everything), Counter(s.kind for s in everything)
    assert set(kinds) == {"normal", *EXTREMES} and min(kinds.values()) > 30
    for share, expected in (
        (1 - kinds["normal"] / n, 0.05),
        (mean(s.shift is not None for s in everything), 0.10),
    ):
        assert abs(share - expected) < 4 * (expected * (1 - expected) / n) ** 0.5
    for s in everything:
        assert 50 <= s.resources <= 150 and 5 <= s.threshold <= 20 and 0.5 <= s.bounty <= 2.0
        assert 0.97 <= s.decay <= 1.0 and 0 <= s.tax <= 0.15 and 0 <= s.audit <= 0.3
        assert len(s.bots) == 4 and (s.kind[:4] != "all " or set(s.bots) == {s.kind[4:]})
        epoch, name, value = s.shift or (2, "tax", None)
        assert epoch in (2, 3, 4) and value != getattr(s, name)
    normal = {level: [s for s in drawn[level] if s.kind == "normal"] for level in LEVELS}
    deceptive = [{s.bots.count("deceptive") for s in normal[level]} for level in LEVELS]
    assert deceptive == [{0}, {0, 1}, {2, 3}]
    for name in ("tax", "audit", "threshold", "decay", "bounty", "resources", "scale"):
        sign = 1 if name in ("tax", "audit", "threshold") else -1
        means = [sign * mean(getattr(s, name) for s in drawn[level]) for level in LEVELS]
        assert means == sorted(means)


@pytest.mark.parametrize("version", VERSIONS)
def test_tasks_are_numbered_have_five_terms_and_scale_with_the_scenario(version):
    for seed in range(50):
        s = draw_scenario(seed, "easy", version)
        epochs = draw_tasks(s)
        flat, scale = [t for epoch in epochs for t in epoch], s.scale if version == "0.2" else 1
        assert [t.id for t in flat] == [f"task_{i + 1}" for i in range(len(flat))]
        for e, epoch in enumerate(epochs):
            assert {t.deadline for t in epoch} == {min(5 * (e + 2), 25)}
            assert len(epoch) in {1, round(2 * scale), round(3 * scale)}
        for t in flat:
            assert len(set(eco.terms(t.text))) == 5 and 1 <= t.level <= 10
            assert 5 + 1.5 * t.level - 1 <= t.bounty / s.bounty <= 10 + 1.5 * t.level + 1


# --------------------------------------------------------------------------------- reward and score


def recompute(env: Swarm) -> dict:
    """The reward from the log of turns, the interactions and the members, without env.score."""
    used = Counter(turn.tool for turn in env.log if turn.ok)
    total, base = sum(used.values()), len(env.tools)
    p = [i.p for i in env.economy.interactions if i.accepted and ME in (i.initiator, i.counterparty)]
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


@pytest.mark.parametrize("style", STYLES)
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
    missing = 0.6 - plain["reputation"]
    more = 0.2 * plain["reputation"] + 0.15 * plain["diversity"] - 2.0 * missing
    assert heavy["floor_missing"] == pytest.approx(missing) and missing > 0.1
    assert heavy["reward"] == pytest.approx(plain["reward"] + more)
    assert play(Swarm("hard", style="idle", payoff=0.0, reputation=0.0), 3)["reward"] == 0
    assert WEIGHTS["0.2"] == {"payoff": 1.0, "reputation": 0.3, "quality": 0.2, "diversity": 0.1}


@pytest.mark.parametrize(
    "shares, published",  # shares: the gain, in thirds of all bounties of the scenario
    [(0.0, 0.5), (0.25, 0.75), (0.5, 1.0), (2.0, 1.0), (-0.2, 0.3), (-0.9, 0.0)],
)
def test_the_published_payoff_ends_at_one_and_ours_does_not(shares, published):
    for scale, payoff in (("ours", (1 + math.tanh(shares)) / 2), ("published", published)):
        env = Swarm("medium", payoff_scale=scale)
        env.reset(3)
        env.economy.step = 26
        third = sum(t.bounty for tasks in draw_tasks(env.economy.scenario) for t in tasks) / 3
        env.economy.members[ME].resources += shares * third
        assert env.score()["payoff"] == pytest.approx(payoff)


def test_the_rules_reach_the_economy():
    env = Swarm("medium", trade_credit="both", post_worth=0.25)
    env.reset(0)
    assert (env.economy.trade_credit, env.economy.post_worth) == ("both", 0.25)
    assert [Swarm(version=version).post_worth for version in VERSIONS] == [2.0, 0.5]


def test_a_turn_that_was_passed_or_lost_is_used_but_nothing_was_done_in_it(quiet):
    env = episode()
    for reply in (POST, PASS, write_call("claim_task", {"task_id": "task_99"}), "<tool_call>", "hm"):
        env.step(reply)
    told = [env.score()[name] for name in ("turns_used", "turns_acted", "used_pass_turn", "format")]
    assert told == [4, 1, 2, 3 / 5]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("turns, errors, cut", [(25, 9, 0), (4, 2, 1)])
def test_errors_cost_their_share_of_all_turns_times_the_penalty(version, turns, errors, cut):
    env = Swarm("hard", version)
    env.reset(4)
    for i in range(turns):
        env.step(PASS if i % 3 else write_call("claim_task", {"task_id": "task_99"}))
    plain = env.score()
    assert (plain["error_rate"], plain["truncated"], env.error_penalty) == (errors / 25, cut, 0.0)
    env.error_penalty = 2.0
    assert env.score() == plain | {"reward": pytest.approx(plain["reward"] - 2.0 * errors / 25)}


def test_a_cut_episode_is_scored_as_if_the_rest_had_been_passed():
    cut, whole = Swarm("hard"), Swarm("hard")
    for env in (cut, whole):
        env.reset(4)
        for _ in range(6):
            env.step(env.expert_reply())
    first = cut.score()
    assert first == cut.score() and cut.economy.step == 7 and first["truncated"] == 1
    while not whole.step(PASS)[1]:
        pass
    names = ("reward", "gain", "payoff", "reputation", "quality", "diversity", "survival")
    assert [first[name] for name in names] == [whole.score()[name] for name in names]
    assert first["turns_used"] == 6 and whole.score()["turns_used"] == 25


def test_toxicity_and_quality_gap():
    env = Swarm("medium")
    env.reset(0)
    deals = ((True, 0.8), (True, 0.6), (False, 0.3))
    trade = lambda *deal: eco.Interaction(1, "trade", "bot_1", "bot_2", *deal)
    env.economy.interactions = [trade(*deal) for deal in deals]
    env.economy.step = 26
    told = [env.score()[name] for name in ("toxicity", "quality_gap", "quality")]
    assert told == pytest.approx([0.3, 0.4, 0.0])


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


def test_the_proposer_proposes_where_the_grinder_passes_and_neither_it_nor_tuned_accepts():
    for seed in range(10):
        styles = ("grinder", "proposer", "tuned")
        marks = [play(Swarm(style=style), seed) for style in styles]
        proposed = [mark["used_propose_trade"] > 0 for mark in marks]
        assert proposed == [False, True, True] and not marks[1]["used_accept_proposal"]
        assert marks[0]["used_pass_turn"] > marks[1]["used_pass_turn"]
        assert not marks[2]["used_accept_proposal"]


@pytest.mark.parametrize("think", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_players_speak_and_think_only_where_they_may(style, think):
    env = Swarm(think=think, style=style)
    opening = env.reset(2)[0]["content"]
    assert ("<think>" in opening) is think is not ("Do not think." in opening)
    thought = r"<think>\n.+\n</think>\n" if think else ""
    form = thought + r'<tool_call>\n\{"name": .+\}\n</tool_call>'
    assert re.fullmatch(form, env.expert_reply())


# ------------------------------------------------------------------------------------ observations


def described(seen: dict) -> list[tuple[str, str]]:
    """(id, what the messages say about it, once) of each task, offer and post in the view."""
    rows = []
    for t in seen["tasks"]:
        terms = f"bounty {t['bounty']}, difficulty {t['difficulty']}, deadline {t['deadline']}"
        rows.append((t["id"], rf"(?: yours)?: {re.escape(t['text'])}, {terms}"))
    for offer in seen["incoming"]:
        get = offer["you_get"]
        give = f"you get {get:.1f}" if get >= 0 else f"you give {-get:.1f}"
        told = f"{give}: {re.escape(offer['text'])}"
        rows.append((offer["id"], rf" from {offer['from']}, reputation \d+, {told}"))
    for post in seen["feed"]:
        if post["author"] != ME:
            told = rf"(?:, votes -?\d+)?: {re.escape(post['text'])}"
            rows.append((post["id"], f" by {post['author']}{told}"))
    return rows


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("style", ["expert", "random", "idle", "tuned"])
def test_all_of_the_view_can_be_read_off_the_messages_so_far(version, style):
    """Each thing is described once; what there is now is listed every time; numbers hold until
    another is told. The view names no kinds of bots, and is all that a player sees."""
    kinds = Counter()
    for seed in range(6):
        env = Swarm(LEVELS[seed % 3], version, style=style)
        now, done = env.reset(seed)[0]["content"], False
        told = now
        while not done:
            seen = view(env.economy)
            assert env.seen == seen and not re.search("honest|opportun|decept", json.dumps(seen))
            last = lambda pattern, none, told=told: [none, *re.findall(pattern, told, re.M)][-1]
            for name in ("resources", "reputation"):
                assert last(rf"^# step .*{name} ([\d.]+)", "") == f"{seen[name]:.1f}"
            assert int(last(r"^# more open tasks: (\d+)", "0")) == seen["more_tasks"]
            for name, text in described(seen):
                assert 1 <= len(re.findall(f"^- {name}{text}$", told, re.M)) <= 2, (name, text)
            ids = [row["id"] for name in ("tasks", "incoming") for row in seen[name]]
            assert re.findall(r"^- ((?:task|prop)_\d+)", now, re.M) == ids
            yours = [task["id"] for task in seen["tasks"] if task["yours"]]
            assert re.findall(r"^- (task_\d+) yours", now, re.M) == yours
            pending = [f"{p['id']} to {p['to']}" for p in seen["pending"]]
            assert re.findall(r"prop_\d+ to bot_\d(?=, |$)", last_line(now), re.M) == pending
            for post in seen["feed"]:
                votes = last(rf"^- {post['id']}(?: by \S+?)?, votes (-?\d+)", "0")
                assert int(votes) == post["votes"]
            for bot in seen["bots"]:
                row = last(rf"^# bots: .*({bot['id']}[^,\n]*)", bot["id"])
                known = f" accepted {bot['accepted']} of {bot['proposed']}" * (bot["proposed"] > 0)
                assert row.replace(" active", "") == bot["id"] + " frozen" * bot["frozen"] + known
            for text in seen["changed"]:
                assert f"# now {text}\n" in told + "\n"
            for event in (text.partition(": ")[2] for text in seen["events"]):
                assert f"# {event.replace('a rule has changed:', 'now')}\n" in told + "\n"
            assert ("# you are frozen to the end of step" in now) == seen["frozen"]
            kinds.update(name for name, value in seen.items() if value)
            messages, done = env.step(env.expert_reply())
            now = messages[0]["content"] if messages else ""
            told += "\n" + now
    assert kinds["incoming"] and kinds["feed"] and (version == "0.1" or kinds["events"])


def last_line(text: str) -> str:
    return "".join(re.findall("^# your pending proposals: .*$", text, re.M))


def test_the_view_tells_mine_from_others(quiet):
    env = offers(episode())
    seen = view(env.economy)
    assert [p["id"] for p in seen["incoming"]] == ["prop_1"]
    assert [p["id"] for p in seen["pending"]] == ["prop_2"]
    yours = {t["id"]: t["yours"] for t in seen["tasks"]}
    assert "task_2" not in yours and yours["task_3"] and not yours["task_1"]
    feed = [(p["id"], p["author"], p["votes"], p["voted"]) for p in seen["feed"]]
    assert feed == [("post_1", "bot_1", -1, True), ("post_2", ME, 0, False)]


def test_v02_shows_what_v01_does_not():
    shown = dict.fromkeys(VERSIONS, "")
    for version in VERSIONS:
        for seed in range(10):
            env, done = Swarm("medium", version, style="expert"), False
            env.reset(seed)
            while not done:
                messages, done = env.step(env.expert_reply())
                shown[version] += "".join(message["content"] for message in messages)
    for phrase in ("# bot_1 accepted prop_", "# hint: claimed ", "# your pending proposals: prop_"):
        assert phrase in shown["0.2"] and phrase not in shown["0.1"], phrase
    assert "accepted 1 of 2" in shown["0.2"] and "accepted 1 of 2" not in shown["0.1"]


def test_an_episode_is_rendered_with_its_tools_and_fits_the_context():
    from lab.base.tokenizer import build

    tokenizer, totals = build(), []
    for seed in range(6):
        env = Swarm(LEVELS[seed % 3], style="random" if seed % 2 else "expert")
        messages, done = env.reset(seed), False
        while not done:
            reply = env.expert_reply()
            new, done = env.step(reply)
            messages += [{"role": "assistant", "content": reply}, *new]
        text = tokenizer.apply_chat_template(messages, tools=env.tools, tokenize=False)
        assert text.count("<|im_start|>user\n<tool_response>\n# ") == 24 and "propose_trade" in text
        totals.append(len(tokenizer(text)["input_ids"]))
    assert max(totals) < 2_000  # 25 turns; 3,900 when all was told every time


# ----------------------------------------------------------------------- arguments and command line


@pytest.mark.parametrize(
    "flag, arguments",
    [
        ("--difficulty", {"difficulty": "brutal"}),
        ("--set version=", {"version": "0.3"}),
        ("--sft-style", {"style": "wizard"}),
        ("--set payoff=", {"payoff": -1.0}),
        ("--set floor_penalty=", {"floor_penalty": float("nan")}),
        ("--set reputation=", {"reputation": float("inf")}),
        ("--set error_penalty=", {"error_penalty": -0.1}),
        ("--set payoff_scale=", {"payoff_scale": "theirs"}),
        ("--set trade_credit=", {"trade_credit": "nobody"}),
        ("--set post_worth=", {"post_worth": -2.0}),
    ],
)
def test_a_wrong_argument_is_refused_in_one_sentence_that_names_the_flag(flag, arguments):
    with pytest.raises(ValueError, match=rf"^{flag}[^\n]*$"):
        Swarm(**arguments)


@pytest.mark.parametrize(
    "line, command",
    [
        ("claim 3", ("claim_task", {"task_id": "task_3"})),
        ("submit 4 two words", ("submit_work", {"task_id": "task_4", "content": "two words"})),
        ("post two words", ("post", {"content": "two words"})),
        ("vote 2 up", ("vote", {"post_id": "post_2", "direction": "up"})),
        ("pass", ("pass_turn", {})),
        ("dance", None),
        ("claim", None),
        ("propose 1 much a trade", None),
    ],
)
def test_short_commands(line, command):
    assert from_short(line) == command


def cli(*arguments: str, said: str = "") -> str:
    command = [sys.executable, "env_swarm.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, input=said)
    return done.stdout if done.returncode == 0 else done.stderr


def test_the_command_line_plays_and_evaluates():
    assert cli().count(" -> ") == 26
    assert cli("--play", "grinder", "--scenario", "8", "--version", "0.1").count("-- assistant") == 25
    said = cli("--play", "human", said="claim 1\nnonsense\npost hello\n")
    for told in ("task_1 is yours", "not a command", "as if the rest had been passed", "\nreward "):
        assert told in said
    said = cli("--evaluate", "random", "--n", "4")
    assert re.search(r"reward +\d\.\d+ \[\d\.\d+, \d\.\d+\], n=4", said), said


@pytest.mark.parametrize(
    "arguments",
    ["--play wizard", "--evaluate human", "--difficulty 9", "--scenario 500", "--n 0", "--speed 3"],
)
def test_the_command_line_refuses_in_one_sentence(arguments):
    said = cli(*arguments.split())
    assert said.count("\n") == 1 and arguments.split()[0] in said
