"""Protects the swarm environment: the books balance, every rule does what is written (single tools: test_swarm_tools.py),
no reply can break or cheat it, and the same seed and replies give the same episode everywhere.

Expected numbers are worked out here by hand or by other code, from the written rules and not from the environment's.
"""

import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bookkeeping.refusals import check
from env_swarm import STYLES, WEIGHTS, Swarm, play, print_score
from settings import DEV_SEEDS, Config, sft_seeds, task_seeds
from swarm import bots as swarm_bots
from swarm import economy as eco
from swarm import players
from swarm import tools as act
from swarm.bots import EXTREMES, bots_act, draw_scenario, draw_tasks, exploits, tenths
from swarm.economy import ME, MECHANISMS, end_step, open_economy
from swarm.players import PLAYERS, from_short
from swarm.tools import TOOLS, Refused, read_call, write_call
from swarm.view import view
from test_swarm_tools import VERSIONS, WORK, check_books, economy, scenario, sigmoid

ROOT = Path(__file__).resolve().parent.parent
LEVELS = ("easy", "medium", "hard")


def episode(version: str = "0.2", bots=("honest", "honest"), monkeypatch=None, **changes) -> Swarm:
    """An environment on that scenario, with bots that only pass if monkeypatch is given."""
    env = Swarm("medium", version)
    if monkeypatch:
        for kind in swarm_bots.BOTS:
            monkeypatch.setitem(swarm_bots.BOTS, kind, lambda economy, bot, rng: None)
    env.start(scenario(version, bots, **changes))
    return env


def call(env: Swarm, tool: str, **arguments) -> str:
    """Make one call; returns what was said about it."""
    env.step(write_call(tool, arguments))
    return env.log[-1].result


# ------------------------------------------------------------------------------------------------ determinism


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("style", ["expert", "random"])
def test_same_seed_and_replies_give_the_same_observations_and_score(version, style):
    one, two = Swarm("hard", version, style=style), Swarm("hard", version)
    two.reset(99)  # what was played before must not matter
    two.step("nothing")
    seen = [one.reset(5)], [two.reset(5)]
    done = False
    while not done:
        reply = one.expert_reply()
        (a, done), (b, _) = one.step(reply), two.step(reply)
        seen[0].append(a), seen[1].append(b)
    assert seen[0] == seen[1] and len(seen[0]) == 26
    assert one.score() == two.score()


def test_the_same_on_any_machine():
    code = "from env_swarm import *; print([play(Swarm('medium', style='random'), i)['reward'] for i in range(3)])"
    run = lambda hash_seed: subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
                                           env={**os.environ, "PYTHONHASHSEED": hash_seed}).stdout  # fmt: skip
    assert run("1") == run("2") == f"{[play(Swarm('medium', style='random'), i)['reward'] for i in range(3)]}\n"


def test_members_of_a_group_meet_the_same_world_until_they_differ():
    one, two = Swarm("medium"), Swarm("medium")
    assert one.reset(3) == two.reset(3)
    tasks = [[t.id, t.text, t.bounty] for epoch in one.economy.to_come for t in epoch]
    for _ in range(25):
        one.step("pass"), two.step(two.expert_reply())
    assert [[t.id, t.text, t.bounty] for epoch in two.economy.to_come for t in epoch] == tasks
    assert one.score()["gain"] != two.score()["gain"]


def test_the_model_acts_then_the_bots_then_the_governance(monkeypatch):
    seen = []
    monkeypatch.setitem(
        swarm_bots.BOTS, "honest", lambda e, bot, rng: seen.append((e.step, bot.name, len(e.posts), e.members[ME].reputation))
    )
    env = episode(decay=0.9)
    for _ in range(2):
        call(env, "post", content="news")
    rotated = [(1, "bot_2", 1, 52.0), (1, "bot_1", 1, 52.0), (2, "bot_1", 2, 48.8), (2, "bot_2", 2, 48.8)]  # 52 * 0.9 + 2
    assert [(*row[:3], round(row[3], 6)) for row in seen] == rotated


class Recorder(random.Random):
    """Dice that remember what they showed."""

    def __init__(self, seed):
        super().__init__(seed)
        self.shown = []

    def random(self):
        self.shown.append(super().random())
        return self.shown[-1]


def streams(version: str, seed_of_the_first: int) -> list[list[float]]:
    env = Swarm("medium", version)
    env.reset(0)
    bots = [m for m in env.economy.members.values() if m.name != ME]
    shared = Recorder(0)
    for i, bot in enumerate(bots):
        bot.rng = Recorder(seed_of_the_first if i == 0 else i) if version == "0.2" else shared
    if version == "0.1" and seed_of_the_first:
        shared.random()  # somebody drew once more
    for _ in range(25):
        env.step("pass")
    return [bot.rng.shown for bot in bots]


def test_one_bot_s_draws_do_not_shift_another_s():
    before, after = streams("0.2", 0), streams("0.2", 1234)
    assert before[0] != after[0]
    for a, b in list(zip(before, after))[1:]:
        n = min(len(a), len(b))
        assert n > 40 and a[:n] == b[:n]


@pytest.mark.parametrize("version, shared", [("0.2", False), ("0.1", True)])
def test_each_bot_has_its_own_dice_in_v02_and_shares_them_in_v01(version, shared):
    env = Swarm("medium", version)
    env.reset(1)
    dice = [m.rng for m in env.economy.members.values() if m.name != ME]
    assert (len({id(d) for d in dice}) == 1) is shared
    assert len({d.random() for d in dice}) == len(dice)  # and none repeats another


# ------------------------------------------------------------------------------------------------ the books

replies_of_any_kind = st.one_of(
    st.text(max_size=30),
    st.builds(
        lambda tool, number, text, transfer, way: write_call(
            tool,
            {
                "post_id": f"post_{number}",
                "task_id": f"task_{number}",
                "proposal_id": f"prop_{number}",
                "counterparty_id": f"bot_{number}",
                "content": text,
                "offered_transfer": transfer,
                "direction": way,
            },
        ),  # fmt: skip
        st.sampled_from(list(TOOLS)),
        st.integers(1, 9),
        st.sampled_from(["good work", WORK, "x" * 300]),
        st.one_of(st.floats(-20, 60), st.floats()),
        st.sampled_from(["up", "down", "up"]),
    ),  # fmt: skip
)
slow = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@slow
@given(st.integers(0, 10_000), st.sampled_from(LEVELS), st.sampled_from(VERSIONS), st.lists(replies_of_any_kind, min_size=25, max_size=25))
def test_the_books_balance_whatever_is_played(seed, difficulty, version, replies):
    env = Swarm(difficulty, version)
    env.reset(seed)
    for reply in replies:
        env.step(reply)
        check_books(env.economy)


@pytest.mark.parametrize("style", STYLES)
def test_the_books_balance_for_every_player(style):
    for seed in range(30):
        env = Swarm(LEVELS[seed % 3], VERSIONS[seed % 2], style=style)
        play(env, seed)
        check_books(env.economy)
        assert env.score()["gain"] == pytest.approx(math.fsum(env.economy.members[ME].books.values()))


def test_every_mechanism_occurs():
    moved = Counter()
    for seed in range(40):
        env = Swarm("hard", style="random" if seed % 2 else "expert")
        play(env, seed)
        for member in env.economy.members.values():
            moved.update({name: abs(amount) for name, amount in member.books.items()})
    assert all(moved[name] > 1 for name in MECHANISMS)


def test_nobody_loses_more_than_he_has():
    e = economy()
    assert eco.book(e, ME, "fine", -250) == -100 and e.members[ME].resources == 0
    assert e.total == 200


# ------------------------------------------------------------------------------------------------ errors and hostile replies


def offers(env: Swarm) -> Swarm:
    """prop_1 from bot_1 to the model, prop_2 from the model to bot_1, prop_3 between bots; post_1 by bot_1, post_2 by the model."""
    e = env.economy
    act.propose_trade(e, "bot_1", ME, "fair data", 2.0)
    act.propose_trade(e, ME, "bot_1", "fair data", 2.0)
    act.propose_trade(e, "bot_1", "bot_2", "fair data", 2.0)
    act.post(e, "bot_1", "news")
    act.post(e, ME, "my news")
    act.claim_task(e, "bot_2", "task_2")
    return env


CALLS = {
    "not JSON": ("<tool_call>\n{name: post}\n</tool_call>", "not JSON"),
    "deeply nested": ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
    "a list": ("<tool_call>[1]</tool_call>", "a tool call is"),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', "a tool call is"),
    "name is a number": ('<tool_call>{"name": 3}</tool_call>', "a tool call is"),
    "not closed": ('<tool_call>{"name": "pass_turn"}', "not closed"),
    "unknown tool": (write_call("steal", {}), "unknown tool steal"),
    "arguments are a list": (write_call("post", ["hi"]), "arguments of post must be an object"),
    "arguments are a text": (write_call("post", '{"content": "hi"}'), "arguments of post must be an object"),
    "missing argument": (write_call("reply", {"post_id": "post_1"}), "reply is missing the argument content"),
    "no arguments": ('<tool_call>{"name": "post"}</tool_call>', "post is missing the argument content"),
    "number for text": (write_call("claim_task", {"task_id": 3}), "task_id must be a string"),
    "null": (write_call("claim_task", {"task_id": None}), "task_id must be a string"),
    "list for text": (write_call("post", {"content": ["a"]}), "content must be a string"),
    "empty text": (write_call("post", {"content": " \n"}), "content must have 1 to 2000 characters"),
    "endless text": (write_call("post", {"content": "x" * 2001}), "content must have 1 to 2000 characters"),
    "empty reply": (write_call("reply", {"post_id": "post_1", "content": ""}), "content must have"),
    "empty work": (write_call("submit_work", {"task_id": "task_1", "content": ""}), "content must have"),
    "unknown post": (write_call("reply", {"post_id": "post_99", "content": "a"}), "there is no post post_99"),
    "vote on unknown post": (write_call("vote", {"post_id": "x", "direction": "up"}), "there is no post x"),
    "vote sideways": (write_call("vote", {"post_id": "post_1", "direction": "left"}), "direction must be up or down"),
    "vote on own post": (write_call("vote", {"post_id": "post_2", "direction": "up"}), "post_2 is your own post"),
    "unknown bot": (write_call("propose_trade", {"counterparty_id": "bot_9", "content": "a", "offered_transfer": 1}), "no bot bot_9"),
    "trade with oneself": (write_call("propose_trade", {"counterparty_id": ME, "content": "a", "offered_transfer": 1}), "with yourself"),
    "second proposal": (
        write_call("propose_trade", {"counterparty_id": "bot_1", "content": "a", "offered_transfer": 1}), "prop_2 to bot_1 is still pending"
    ),
    "accept own": (write_call("accept_proposal", {"proposal_id": "prop_2"}),
                   "prop_2 is your own proposal, only its receiver may accept it"),
    "reject own": (write_call("reject_proposal", {"proposal_id": "prop_2"}),
                   "prop_2 is your own proposal, only its receiver may reject it"),
    "accept another's": (write_call("accept_proposal", {"proposal_id": "prop_3"}), "prop_3 is from bot_1 to bot_2"),
    "reject another's": (write_call("reject_proposal", {"proposal_id": "prop_3"}), "prop_3 is from bot_1 to bot_2"),
    "accept nothing": (write_call("accept_proposal", {"proposal_id": "prop_99"}), "no pending proposal prop_99"),
    "cancel a received one": (write_call("cancel_proposal", {"proposal_id": "prop_1"}), "you have no pending proposal prop_1"),
    "unknown task": (write_call("claim_task", {"task_id": "task_99"}), "there is no task task_99"),
    "taken task": (write_call("claim_task", {"task_id": "task_2"}), "task_2 is taken by bot_2"),
    "submit another's": (write_call("submit_work", {"task_id": "task_2", "content": "a"}), "task_2 is taken by bot_2"),
    "submit unclaimed": (write_call("submit_work", {"task_id": "task_1", "content": "a"}), "claim task_1 first"),
    "submit unknown": (write_call("submit_work", {"task_id": "task_99", "content": "a"}), "there is no task task_99"),
}  # fmt: skip
TRANSFERS = {
    "true": "finite number", "null": "finite number", '"5"': "finite number", "NaN": "finite number", "Infinity": "finite number",
    "-Infinity": "finite number", "1e999": "finite number", "1" + "0" * 400: "finite number", "9" * 5000: "not JSON",
    "100.5": "you have 100.0", "1e12": "you have 100.0", "-20.5": "at most 20.0", "-1e12": "at most 20.0",
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_errors_are_said_and_counted_and_change_nothing_but_the_time(name, monkeypatch):
    reply, phrase = CALLS[name]
    env = offers(episode(monkeypatch=monkeypatch))
    resources = {m.name: m.resources for m in env.economy.members.values()}
    pending, posts, tasks = set(env.economy.proposals), len(env.economy.posts), [(t.id, t.holder) for t in env.economy.tasks.values()]
    messages, done = env.step(reply)
    first = messages[0]["content"].splitlines()[0]
    assert first.startswith("# error: ") and phrase in first and not done
    assert env.economy.step == 2
    assert {m.name: m.resources for m in env.economy.members.values()} == resources
    assert (set(env.economy.proposals), len(env.economy.posts)) == (pending, posts)
    assert [(t.id, t.holder) for t in env.economy.tasks.values()] == tasks
    marks = env.score()
    assert marks["error_rate"] == 1 / 25
    assert marks["self_proposal_errors"] == (1.0 if name in ("accept own", "reject own") else 0.0)
    assert marks["format"] == float(read_ok(reply))


def read_ok(reply: str) -> bool:
    try:
        return read_call(reply, "0.2")[2] > 0
    except Refused:
        return False


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_impossible_transfers_are_refused(transfer, monkeypatch):
    env = episode(monkeypatch=monkeypatch)
    arguments = f'{{"counterparty_id": "bot_1", "content": "fair data", "offered_transfer": {transfer}}}'
    env.step(f'<tool_call>\n{{"name": "propose_trade", "arguments": {arguments}}}\n</tool_call>')
    assert TRANSFERS[transfer] in env.log[-1].result and not env.log[-1].ok
    assert not env.economy.proposals


@pytest.mark.parametrize("transfer", ["0", "-20", "100", "3.5", "-0.0"])
def test_possible_transfers_are_not(transfer, monkeypatch):
    env = episode(monkeypatch=monkeypatch)
    arguments = f'{{"counterparty_id": "bot_1", "content": "fair data", "offered_transfer": {transfer}}}'
    env.step(f'<tool_call>\n{{"name": "propose_trade", "arguments": {arguments}}}\n</tool_call>')
    assert env.log[-1].ok and env.economy.proposals["prop_1"].transfer == float(transfer)


def test_own_proposal_names_cancel_proposal_only_where_it_exists(monkeypatch):
    for version in VERSIONS:
        env = offers(episode(version, monkeypatch=monkeypatch))
        assert ("cancel_proposal" in call(env, "accept_proposal", proposal_id="prop_2")) is (version == "0.2")
    assert "unknown tool" in call(env, "cancel_proposal", proposal_id="prop_2")


def test_twice_is_an_error(monkeypatch):
    env = offers(episode(monkeypatch=monkeypatch))
    call(env, "vote", post_id="post_1", direction="down")
    assert "already" in call(env, "vote", post_id="post_1", direction="up")
    call(env, "claim_task", task_id="task_1")
    assert "already yours" in call(env, "claim_task", task_id="task_1")
    assert call(env, "accept_proposal", proposal_id="prop_1").startswith("you accepted")
    assert "no pending proposal" in call(env, "accept_proposal", proposal_id="prop_1")


def test_a_reply_without_a_call_passes_and_says_so(monkeypatch):
    for reply in ("", "I wait.", '<think>\n<tool_call>{"name": "post", "arguments": {"content": "a"}}</tool_call>', "</tool_call>"):
        env = episode(monkeypatch=monkeypatch)
        messages, done = env.step(reply)
        assert messages[0]["content"].startswith("# result: no tool call found, so you passed\n") and not done
        marks = env.score()
        assert (marks["used_pass_turn"], marks["error_rate"], marks["turns_used"], marks["format"]) == (1, 0, 0, 0)


def test_thinking_is_not_acting_and_the_first_of_two_calls_counts(monkeypatch):
    env = episode(monkeypatch=monkeypatch)
    calls = write_call("post", {"content": "one"}) + write_call("post", {"content": "two"})
    messages, _ = env.step(f"<think>\n{write_call('pass_turn', {})}\n</think>\n{calls}")
    assert [p.text for p in env.economy.posts.values()] == ["one"]
    assert "only the first of 2 calls counts" in messages[0]["content"]
    assert env.score()["extra_calls"] == 1 and env.score()["used_post"] == 1 and env.score()["used_pass_turn"] == 0


@pytest.mark.parametrize("first", [("nope", {}), ("claim_task", {"task_id": "task_99"})])
def test_of_several_calls_the_first_is_named_even_if_it_is_refused(monkeypatch, first):
    env = episode(monkeypatch=monkeypatch)
    messages, _ = env.step(write_call(*first) + 2 * write_call("post", {"content": "two"}))
    assert "error: " in messages[0]["content"] and "only the first of 3 calls counts" in messages[0]["content"]
    assert env.score()["extra_calls"] == 2 and not env.economy.posts


@pytest.mark.parametrize("before", ["<think>\nA long thought.\n</think>\n", "I think that ", "</think>\nwell"])
def test_where_thinking_is_not_allowed_nothing_may_be_said_before_the_call(before):
    call_alone = write_call("post", {"content": "news"})
    for think, reply, fine in ((False, before + call_alone, False), (False, "\n" + call_alone, True), (True, before + call_alone, True)):
        env = Swarm("medium", think=think)
        env.reset(7)
        messages, _ = env.step(reply)
        assert (env.used["post"] == 1) is fine and ("you may not think here" in messages[0]["content"]) is not fine


def test_unneeded_arguments_are_ignored(monkeypatch):
    env = episode(monkeypatch=monkeypatch)
    assert call(env, "pass_turn", reason="tired") == "you passed"
    assert read_call('<tool_call>{"name": "pass_turn"}</tool_call>', "0.2") == ("pass_turn", {}, 1)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20), lambda inner: st.lists(inner, max_size=3), max_leaves=4
)
strange_calls = st.builds(
    lambda tool, arguments: f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>",
    st.sampled_from(list(TOOLS)) | st.text(max_size=10),
    st.dictionaries(
        st.sampled_from(["content", "post_id", "task_id", "proposal_id", "counterparty_id", "offered_transfer", "direction"]), json_values
    ),
)
pieces = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": ', '"post"', "}", "\\ud800", "\ud800", "\x00"])
    | st.text(max_size=8),
    max_size=12,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(st.lists(pieces | strange_calls | st.text(), min_size=1, max_size=4), st.sampled_from(VERSIONS))
@example(['<tool_call>{"name": "post", "arguments": {"content": "\\ud800 </tool_response> <|im_end|>\\u0000\\u202e"}}</tool_call>'], "0.2")
@example([write_call("claim_task", {"task_id": "\ud800" * 500})], "0.2")
@example([write_call("\ud800" * 50, {})], "0.1")
def test_any_string_is_a_legal_reply(replies, version):
    env = Swarm("medium", version)
    env.reset(1)
    for reply in replies:
        messages, done = env.step(reply)
        text = messages[0]["content"]
        assert not done and clean(text)
        assert len(text) < 4000
        json.dumps(env.log[-1].arguments, ensure_ascii=False).encode("utf-8")
    assert all(math.isfinite(value) for value in env.score().values())


def clean(text: str) -> bool:
    """UTF-8, JSON, one printable line after another, and nothing that could be read as markup."""
    text.encode("utf-8")
    assert json.loads(json.dumps(text)) == text
    assert "<" not in text and ">" not in text
    return all(line.isprintable() for line in text.split("\n"))


def test_observations_are_clean_over_whole_episodes():
    for seed in range(30):
        env = Swarm(LEVELS[seed % 3], VERSIONS[seed % 2], style="random")
        messages, done = env.reset(seed), False
        assert messages[0]["role"] == "user" and clean(messages[0]["content"].replace("<think>", "").replace("</think>", ""))
        while not done:
            messages, done = env.step(env.expert_reply())
            for message in messages:
                assert message["role"] == "tool" and clean(message["content"])
        assert env.step("one more") == ([], True) and len(env.log) == 25


# ------------------------------------------------------------------------------------------------ the rules, by hand


def test_submission_scores_of_v02():
    # 100 characters, difficulty 0.5 so the length scale is 80 + 60 = 140; four of five terms (review water budget city health)
    text = ("Review of the water budget for the city. It was done with care, and nobody had to wait for any single part of it.")[:100]
    assert len(text) == 100
    length, effort, relevance = 1 - math.exp(-100 / 140), sigmoid(70 / 20), 4 / 5
    expected = 0.25 * length + 0.25 * effort + 0.5 * relevance
    assert eco.content_quality(text, "0.2", 0.5, "review the water budget for city health") == pytest.approx(expected)
    # "watery" is not "water", case and punctuation do not matter
    assert eco.content_quality("watery", "0.2", 0.5, "water") < 0.5 < eco.content_quality("WATER!", "0.2", 0.5, "water")


def test_submission_scores_of_v01_are_gameable():
    assert eco.content_quality("x" * 80, "0.1", 0.5, "review the water budget") == pytest.approx(0.5 * 1 + 0.5 * 0.8)
    assert eco.content_quality("x" * 40, "0.1") == pytest.approx(0.5 * 0.5 + 0.5 * 0.3)
    longest = max(eco.content_quality("x" * n, "0.1") for n in range(2000))
    assert eco.content_quality("x" * 80, "0.1") == longest
    assert eco.content_quality("x" * 80, "0.2", 0.5, "review the water budget") < 0.4


def test_taxes():
    assert eco.tax_rate("0.1", 0.1, 500, 100) == pytest.approx(0.1)
    assert eco.tax_rate("0.2", 0.1, 100, 100) == pytest.approx(0.2)
    assert eco.tax_rate("0.2", 0.1, 200, 100) == pytest.approx(0.3)
    assert eco.tax_rate("0.2", 0.1, 0, 100) == pytest.approx(0.1)
    assert eco.tax_rate("0.2", 0.3, 400, 100) == 0.5  # the ceiling
    assert eco.tax_rate("0.2", 0.1, 0, 0) == pytest.approx(0.2)


@pytest.mark.parametrize("version, kept", [("0.2", 10 * (1 - 0.1 * (1 + 150 / 120))), ("0.1", 9.0)])
def test_incomes_are_taxed_and_losses_are_not(version, kept):
    e = economy(version, tax=0.1)
    eco.book(e, ME, "bonus", 50)  # 150 of 350: the average of three members is 116.67
    eco.book(e, "bot_1", "bonus", 10)  # now 360, average 120
    assert eco.earn(e, ME, "task", 10) == pytest.approx(kept)
    assert e.members[ME].books["tax"] == pytest.approx(kept - 10)
    assert eco.earn(e, ME, "task", -10) == -10


def test_who_promises_too_much_to_too_many_is_accepted_once():
    for seed in range(10):
        e = economy(dice=f"promise {seed}")
        act.propose_trade(e, ME, "bot_1", WORK, 100)
        act.propose_trade(e, ME, "bot_2", WORK, 100)
        while any(p.proposer == ME for p in e.proposals.values()):
            bots_act(e)  # never Refused
        mine = [i for i in e.interactions if i.initiator == ME]
        assert len(mine) == 2 and sum(i.accepted for i in mine) <= 1
        check_books(e)


@pytest.mark.parametrize("what, power", [("post", 1), ("pass", 2), ("error", 2), ("text", 2)])
def test_reputation_decays_and_faster_for_who_does_nothing(what, power, monkeypatch):
    env = episode(decay=0.97, monkeypatch=monkeypatch)
    replies = {"post": write_call("post", {"content": "hi"}), "pass": write_call("pass_turn", {}), "error": "<tool_call>", "text": "hm"}
    env.step(replies[what])
    assert env.economy.members[ME].reputation == pytest.approx((52 if what == "post" else 50) * 0.97**power)
    assert env.economy.members["bot_1"].reputation == pytest.approx(50 * 0.97)


def test_appeal_after_three_steps_in_v02(monkeypatch):
    env = episode(threshold=20.0, decay=0.99, monkeypatch=monkeypatch)
    call(env, "claim_task", task_id="task_1")
    env.economy.members[ME].reputation = 19.0
    call(env, "post", content="hi")  # 21 * 0.99 = 20.79: not yet
    assert not env.economy.members[ME].frozen_at
    call(env, "pass_turn")  # 20.79 * 0.99² = 20.38
    call(env, "pass_turn")  # 19.97: frozen
    assert env.economy.members[ME].frozen_at == 4
    assert env.economy.tasks["task_1"].holder == ""
    for step in (5, 6, 7):
        assert env.economy.step == step
        assert call(env, "post", content="hi") == "you are frozen and can only pass"
    assert env.economy.members[ME].reputation == 25 and not env.economy.members[ME].frozen_at
    assert call(env, "post", content="hi").startswith("post_")
    assert env.score()["error_rate"] == pytest.approx(3 / 25)


def test_the_breaker_is_for_good_in_v01(monkeypatch):
    env = episode("0.1", threshold=20.0, monkeypatch=monkeypatch)
    env.economy.members[ME].reputation = 19.0
    done = False
    while not done:
        messages, done = env.step(write_call("pass_turn", {}))
        assert done or "you are frozen to the end of step 25" in messages[0]["content"]
    assert env.score()["survival"] == 0 and env.score()["error_rate"] == 0


def test_a_frozen_bot_neither_acts_nor_trades():
    e = economy(bots=("honest", "honest"), threshold=20.0)
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
    assert [text for _, text in e.events] == ["prop_1 to bot_1 lapsed", "task_1 is past its deadline"]


def test_new_tasks_every_epoch_and_a_rule_may_change(monkeypatch):
    env = episode(monkeypatch=monkeypatch, tax=0.05, shift=(3, "tax", 0.1))
    seen, done = [], False
    while not done:
        messages, done = env.step("pass")
        seen.append((env.economy.step, len(env.economy.tasks), env.economy.rules["tax"], messages))
    tasks = [len(epoch) for epoch in env.economy.to_come]
    assert all(2 <= n <= 3 for n in tasks)  # scale 1
    by_step = {step: (n, tax) for step, n, tax, _ in seen}
    assert [by_step[step][1] for step in (2, 10, 11, 25)] == [0.05, 0.05, 0.1, 0.1]
    assert [by_step[step][0] for step in (2, 6, 11, 16)] == [tasks[0], tasks[0] + tasks[1], tasks[1] + tasks[2], tasks[2] + tasks[3]]
    text = {step: m[0]["content"] for step, _, _, m in seen if m}
    assert [step for step, said in text.items() if "# now tax rate 10%" in said] == [11] and "10%" not in text[10]  # told once


# ------------------------------------------------------------------------------------------------ bots


def test_betrayal_is_a_threshold_in_v01_and_a_sigmoid_in_v02():
    rng = random.Random(0)
    assert [exploits("0.1", rng, n, 5) for n in (0, 4, 5, 9)] == [False, False, True, True]
    for distance in (-2, -1, 0, 1, 6):
        expected = 0.7 * sigmoid(2 * distance)
        share = sum(exploits("0.2", rng, 5 + distance, 5) for _ in range(4000)) / 4000
        assert abs(share - expected) < 4 * (expected * (1 - expected) / 4000) ** 0.5 + 1e-9


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_deceptive_bot_demands_and_of_whom(version, monkeypatch):
    seen, propose = [], act.propose_trade

    def spy(economy, name, counterparty, content, transfer):
        seen.append((economy.members[name], economy.members[counterparty].reputation, transfer))
        return propose(economy, name, counterparty, content, transfer)

    monkeypatch.setattr(act, "propose_trade", spy)
    for seed in range(25):
        env = Swarm("hard", version)
        env.reset(seed)
        env.economy.members[ME].reputation = 45.0 if seed % 2 else 35.0
        for member in env.economy.members.values():
            member.resources, member.interactions = 1000.0, 4 * (seed % 5)
        for _ in range(10):
            env.step("pass")
    demands = [(bot.interactions, reputation, -t) for bot, reputation, t in seen if bot.kind == "deceptive" and t < 0]
    gifts = [t for bot, _, t in seen if bot.kind == "deceptive" and t >= 0]
    assert len(demands) > 50 and gifts and all(1 <= t <= 4 for t in gifts)
    if version == "0.1":
        assert {d for *_, d in demands} == {15.0} and all(reputation > 40 for _, reputation, _ in demands)
        assert all(n >= 3 for n, *_ in demands)
    else:
        assert all(5 <= d <= 20 for *_, d in demands) and len({d for *_, d in demands}) > 30
        assert any(reputation <= 40 for _, reputation, _ in demands)


def test_turning_points_are_three_to_eight():
    points = {
        m.turning for seed in range(60) for m in open_economy(draw_scenario(seed, "hard", "0.2"), [[]]).members.values() if m.name != ME
    }
    assert points == {3, 4, 5, 6, 7, 8}


def accepted_share(kind: str, transfer: float, activity: int = 0) -> float:
    yes = no = 0
    for seed in range(300):
        e = economy(bots=(kind, "honest"), dice=f"accept {seed}")
        e.members[ME].activity = activity
        act.propose_trade(e, ME, "bot_1", "fair data for the whole team to use", transfer)
        while "prop_1" in e.proposals:
            swarm_bots.BOTS[kind](e, e.members["bot_1"], e.members["bot_1"].rng)
        yes, no = yes + e.interactions[-1].accepted, no + 1
    return yes / no


def test_honest_accepts_most_and_opportunistic_likes_the_active():
    assert accepted_share("honest", 0) > 0.7 > 0.3 > accepted_share("honest", -10)
    quiet, active = accepted_share("opportunistic", 0), accepted_share("opportunistic", 0, activity=6)
    assert quiet < 0.4 < 0.6 < active
    assert accepted_share("deceptive", 0) > 0.3 and accepted_share("deceptive", -1) == 0


def test_bots_differ_in_how_they_work():
    p = {kind: [] for kind in swarm_bots.BOTS}
    bounty = {kind: [] for kind in swarm_bots.BOTS}
    for seed in range(60):
        env = Swarm("hard" if seed % 2 else "medium")
        env.reset(seed)
        kinds = {m.name: m.kind for m in env.economy.members.values()}
        bounties = {t.id: t.bounty / env.economy.scenario.bounty for epoch in env.economy.to_come for t in epoch}
        taken = {}
        for _ in range(25):
            env.step("pass")
            taken |= {t.id: t.holder for t in env.economy.tasks.values() if t.holder}
        for i in env.economy.interactions:
            if i.kind == "task":
                p[kinds[i.initiator]].append(i.p)
        for task, holder in taken.items():
            bounty[kinds[holder]].append(bounties[task])
    mean = lambda values: sum(values) / len(values)
    assert mean(p["honest"]) > 0.7 > 0.6 > mean(p["opportunistic"])
    assert mean(bounty["opportunistic"]) > mean(bounty["honest"]) + 1


def test_opportunists_vote_only_where_two_others_have():
    e = economy(bots=("opportunistic", "honest", "honest"))
    act.post(e, "bot_2", "news")
    bot = e.members["bot_1"]
    bot.interactions = 0
    act.vote(e, ME, "post_1", "up")
    for _ in range(100):
        swarm_bots.socialise(e, bot, bot.rng, votes=0.0, posts=0.0, replies=0.0)
    assert "bot_1" not in e.posts["post_1"].votes
    act.vote(e, "bot_3", "post_1", "up")
    for _ in range(100):
        swarm_bots.socialise(e, bot, bot.rng, votes=0.0, posts=0.0, replies=0.0)
    assert e.posts["post_1"].votes["bot_1"] == 1


# ------------------------------------------------------------------------------------------------ scenarios


@pytest.mark.parametrize("version, n", [("0.2", 500), ("0.1", 200)])
def test_seeds_wrap_around_within_a_block_and_blocks_differ(version, n):
    assert draw_scenario(DEV_SEEDS + 7, "medium", version) == draw_scenario(DEV_SEEDS + 7 + n, "medium", version)
    dice = {draw_scenario(block * 1_000_000_000 + i, "medium", version).dice for block in (0, 1, 2) for i in range(n)}
    assert len(dice) == 3 * n
    tasks = lambda seed: [t.text for epoch in draw_tasks(draw_scenario(seed, "medium", version)) for t in epoch]
    assert tasks(0) != tasks(2_000_000_000) and tasks(0) != tasks(1)


@pytest.mark.parametrize("version, n", [("0.2", 500), ("0.1", 200)])
@pytest.mark.parametrize("num_tasks", [1, 4, 5])
def test_every_run_seed_trains_on_the_scenarios_in_an_order_of_its_own(version, n, num_tasks):
    def trained_on(seed: int, updates: int) -> list[int]:
        cfg = Config(env="swarm", seed=seed, num_tasks=num_tasks)
        return [draw_scenario(s, "medium", version).number for u in range(updates) for s in task_seeds(cfg, u)]

    assert trained_on(0, 20) == list(range(20 * num_tasks))  # the runs of seed 0 stay what they were
    whole = [trained_on(seed, n // num_tasks) for seed in range(6)]
    assert all(sorted(numbers) == list(range(n)) for numbers in whole)  # no scenario twice before each came once
    assert len({tuple(numbers[: 20 * num_tasks]) for numbers in whole}) == 6
    shared = [len({*a[:80]} & {*b[:80]}) for a, b in combinations(whole, 2)]
    assert max(shared) < 60 * 200 / n  # 13 of 80 by chance (v0.1: 32), and not 80
    assert trained_on(0, 2 * n // num_tasks)[n:] != whole[0]  # a second pass has another order


def test_the_published_development_scenarios_stay_what_they_are():
    drawn = [draw_scenario(DEV_SEEDS + i, "medium", "0.2") for i in range(500)]
    assert [s.number for s in drawn] == list(range(500)) and {s.dice for s in drawn} == {f"swarm 0.2 medium 2 {i}" for i in range(500)}
    digest = hashlib.sha256(repr(drawn).encode()).hexdigest()
    assert digest.startswith("502d78526a3cca53"), "results/swarm and the published tables are of other scenarios"


def test_more_development_tasks_or_demonstrations_than_there_are_scenarios_are_refused():
    for version, most in (("0.2", 500), ("0.1", 200)):
        check(Config(env="swarm", set=[f"version={version}"], eval_n=most, sft_examples=most))
        for flag in ("eval_n", "sft_examples"):
            with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')} {most + 1}: .* {most} ") as refused:
                check(Config(env="swarm", set=[f"version={version}"], **{flag: most + 1}))
            assert "\n" not in str(refused.value)


def test_demonstrations_are_of_other_scenarios_than_the_development_ones_and_the_trained_ones():
    cfg = Config(env="swarm", num_tasks=4)
    ranges = (sft_seeds(cfg), task_seeds(cfg, 0), range(DEV_SEEDS, DEV_SEEDS + 500))
    dice = [{draw_scenario(s, "medium", "0.2").dice for s in seeds} for seeds in ranges]
    assert [len(d) for d in dice] == [100, 4, 500] and not dice[0] & dice[1] and not (dice[0] | dice[1]) & dice[2]


def test_shares_and_ranges_of_the_scenarios():
    drawn = {d: [draw_scenario(block * 1_000_000_000 + i, d, "0.2") for block in range(4) for i in range(500)] for d in LEVELS}
    everything = [s for scenarios in drawn.values() for s in scenarios]
    n = len(everything)
    extreme, shifted = sum(s.kind != "normal" for s in everything), sum(s.shift is not None for s in everything)
    assert abs(extreme / n - 0.05) < 4 * (0.05 * 0.95 / n) ** 0.5
    assert abs(shifted / n - 0.10) < 4 * (0.10 * 0.90 / n) ** 0.5
    kinds = Counter(s.kind for s in everything)
    assert set(kinds) == {"normal", *EXTREMES} and min(kinds.values()) > 30
    for s in everything:
        assert 50 <= s.resources <= 150 and 5 <= s.threshold <= 20 and 0.97 <= s.decay <= 1.0 and 0.5 <= s.bounty <= 2.0
        assert 0 <= s.tax <= 0.15 and 0 <= s.audit <= 0.3 and len(s.bots) == 4
        if s.kind.startswith("all "):
            assert set(s.bots) == {s.kind[4:]}
        if s.shift:
            epoch, name, value = s.shift
            assert epoch in (2, 3, 4) and value != getattr(s, name)
    deceptive = {d: {s.bots.count("deceptive") for s in drawn[d] if s.kind == "normal"} for d in LEVELS}
    assert deceptive == {"easy": {0}, "medium": {0, 1}, "hard": {2, 3}}
    mean = lambda d, name: sum(getattr(s, name) for s in drawn[d]) / len(drawn[d])
    for name, sign in (("tax", 1), ("audit", 1), ("threshold", 1), ("decay", -1), ("bounty", -1), ("resources", -1), ("scale", -1)):
        assert sign * mean("easy", name) < sign * mean("medium", name) < sign * mean("hard", name)


def test_tasks_are_numbered_have_five_terms_and_scale_with_the_scenario():
    for seed in range(50):
        for version in VERSIONS:
            s = draw_scenario(seed, "easy", version)
            epochs = draw_tasks(s)
            flat = [t for epoch in epochs for t in epoch]
            assert [t.id for t in flat] == [f"task_{i + 1}" for i in range(len(flat))] and len(epochs) == 5
            for e, epoch in enumerate(epochs):
                assert {t.deadline for t in epoch} == {min(5 * (e + 2), 25)}
                assert {round(n * (s.scale if version == "0.2" else 1)) for n in (2, 3)} >= {len(epoch)} or len(epoch) == 1
            for t in flat:
                assert len(set(eco.terms(t.text))) == 5 and 1 <= t.level <= 10
                assert 5 + 1.5 * t.level - 1 <= t.bounty / s.bounty <= 10 + 1.5 * t.level + 1


# ------------------------------------------------------------------------------------------------ reward and log


def recompute(env: Swarm) -> dict:
    """The reward from the log of turns, the list of interactions and the members, without env.score."""
    used = Counter(turn.tool for turn in env.log if turn.ok)
    total = sum(used.values())
    diversity = -sum(n / total * math.log(n / total, len(env.tools)) for n in used.values()) if total else 0
    p = [i.p for i in env.economy.interactions if i.accepted and (i.initiator == ME or i.counterparty == ME)]
    bounties = sum(t.bounty for epoch in draw_tasks(env.economy.scenario) for t in epoch)
    gain = sum(env.economy.members[ME].books.values())
    parts = {
        "payoff": 1 / (1 + math.exp(-2 * gain / (bounties / 3))),  # (1 + tanh x) / 2 is sigmoid(2x)
        "reputation": env.economy.members[ME].reputation / 100,
        "quality": sum(p) / len(p) if p else 0,
        "diversity": diversity,
    }
    weights = {"0.2": (1.0, 0.3, 0.2, 0.1), "0.1": (1.0, 0.6, 0.0, 0.0)}[env.version]
    return parts | {"reward": sum(w * x for w, x in zip(weights, parts.values()))}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_reward_follows_from_the_log(version, style):
    for seed in range(12):
        env = Swarm(LEVELS[seed % 3], version, style=style)
        marks = play(env, seed)
        for name, value in recompute(env).items():
            assert marks[name] == pytest.approx(value, abs=1e-9), name
            assert name == "reward" or 0 <= marks[name] <= 1
        errors = [turn for turn in env.log if not turn.ok]
        assert marks["error_rate"] == len(errors) / 25 and marks["turns_used"] == 25 and marks["truncated"] == 0
        counts = [value for name, value in marks.items() if name.startswith("used_")]
        assert len(counts) == len(env.tools) and sum(counts) + len(errors) == 25


def test_weights_are_flags_and_the_floor_costs():
    plain, heavy = Swarm("hard", style="idle"), Swarm("hard", style="idle", reputation=0.5, diversity=0.25, floor=60.0, floor_penalty=2.0)
    a, b = play(plain, 3), play(heavy, 3)
    assert a["reputation"] == b["reputation"] < 0.5
    assert b["reward"] - a["reward"] == pytest.approx(0.2 * a["reputation"] + 0.15 * a["diversity"] - 2.0 * (0.6 - a["reputation"]))
    assert play(Swarm("hard", style="idle", payoff=0.0, reputation=0.0), 3)["reward"] == 0
    assert WEIGHTS["0.2"] == {"payoff": 1.0, "reputation": 0.3, "quality": 0.2, "diversity": 0.1}


@pytest.mark.parametrize("shares, ours, published", [
    (0.0, 0.5, 0.5), (0.25, (1 + math.tanh(0.25)) / 2, 0.75), (0.5, (1 + math.tanh(0.5)) / 2, 1.0), (2.0, (1 + math.tanh(2)) / 2, 1.0),
    (-0.2, (1 - math.tanh(0.2)) / 2, 0.3), (-0.9, (1 - math.tanh(0.9)) / 2, 0.0),
])  # fmt: skip
def test_the_published_payoff_ends_at_one_and_ours_does_not(shares, ours, published):
    """shares: the gain, in thirds of all bounties of the scenario."""
    for scale, payoff in (("ours", ours), ("published", published)):
        env = Swarm("medium", payoff_scale=scale)
        env.reset(3)
        env.economy.step = 26
        third = sum(task.bounty for tasks in draw_tasks(env.economy.scenario) for task in tasks) / 3
        env.economy.members[ME].resources += shares * third
        marks = env.score()
        assert marks["payoff"] == pytest.approx(payoff) and marks["reward"] == pytest.approx(payoff + 0.3 * marks["reputation"])
    assert Swarm().payoff_scale == "ours"


def test_the_rules_reach_the_economy():
    env = Swarm("medium", trade_credit="both", post_worth=0.25)
    env.reset(0)
    assert (env.economy.trade_credit, env.economy.post_worth) == ("both", 0.25)
    assert call(env, "post", content="news").endswith("reputation +0.2")  # to one digit
    assert [Swarm(version=version).post_worth for version in VERSIONS] == [2.0, 0.5]


def test_a_turn_that_was_passed_or_lost_is_used_but_nothing_was_done_in_it(monkeypatch):
    env = episode(monkeypatch=monkeypatch)
    for tool, arguments in (("post", {"content": "news"}), ("pass_turn", {}), ("claim_task", {"task_id": "task_99"}), ("steal", {})):
        call(env, tool, **arguments)
    env.step("text alone")
    marks = env.score()
    assert (marks["turns_used"], marks["turns_acted"], marks["used_pass_turn"]) == (4, 1, 2)


def with_errors(env: Swarm, turns: int = 25) -> Swarm:
    """Every third turn claims a task that is not there."""
    env.reset(4)
    for i in range(turns):
        env.step(write_call("pass_turn", {}) if i % 3 else write_call("claim_task", {"task_id": "task_99"}))
    return env


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("penalty", [0.0, 0.75, 3.0])
def test_errors_cost_their_share_of_the_turns_times_the_penalty_and_by_default_nothing(penalty, version):
    plain, charged = with_errors(Swarm("hard", version)).score(), with_errors(Swarm("hard", version, error_penalty=penalty)).score()
    assert charged == plain | {"reward": charged["reward"]} and plain["error_rate"] == 9 / 25
    assert charged["reward"] == pytest.approx(plain["reward"] - penalty * 9 / 25, abs=1e-12)
    assert Swarm("hard", version).error_penalty == 0.0


def test_the_errors_of_a_cut_episode_cost_as_the_error_rate_says():
    env = with_errors(Swarm("hard", error_penalty=2.0), turns=4)
    marks, env.error_penalty = env.score(), 0.0
    assert marks["truncated"] == 1 and marks["error_rate"] == 2 / 25  # the turns that were cut off count as passed, and not as errors
    assert marks["reward"] == pytest.approx(env.score()["reward"] - 2.0 * marks["error_rate"], abs=1e-12)


def test_what_the_score_is_made_of_is_printed_with_the_errors_where_they_cost(capsys):
    for env, told in ((Swarm("medium", style="random", error_penalty=0.5), True), (Swarm("medium", style="random"), False)):
        marks = play(env, 3)
        print_score(env)
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("reward "))
        assert (f" - 0.5 x errors {marks['error_rate']:.3f}" in line) is told and line.startswith(f"reward {marks['reward']:.3f} = ")


def test_a_cut_episode_is_scored_as_if_the_rest_had_been_passed():
    cut, whole = Swarm("hard"), Swarm("hard")
    cut.reset(4), whole.reset(4)
    for _ in range(6):
        reply = cut.expert_reply()
        cut.step(reply), whole.step(reply)
    first, again = cut.score(), cut.score()
    assert first == again and cut.economy.step == 7 and first["truncated"] == 1
    while not whole.step(write_call("pass_turn", {}))[1]:
        pass
    same = ("reward", "gain", "payoff", "reputation", "quality", "diversity", "survival")
    assert {name: first[name] for name in same} == {name: whole.score()[name] for name in same}
    assert first["turns_used"] == 6 and whole.score()["turns_used"] == 25


def test_a_stray_end_of_thinking_does_not_hide_thoughts_where_none_are_allowed():
    env, call = Swarm("medium", think=False), write_call("post", {"content": "hello"})
    env.reset(0)
    env.step(f"<tool_call>let me see\n</think>{call}")
    assert not env.log[-1].ok and "may not think" in env.log[-1].result
    env.step(call)
    assert env.log[-1].ok


def test_toxicity_and_quality_gap():
    env = Swarm("medium")
    env.reset(0)
    one = lambda accepted, p: eco.Interaction(1, "trade", "bot_1", "bot_2", accepted, p)
    env.economy.interactions = [one(True, 0.8), one(True, 0.6), one(False, 0.3)]
    env.economy.step = 26
    marks = env.score()
    assert marks["toxicity"] == pytest.approx(0.3) and marks["quality_gap"] == pytest.approx(0.4) and marks["quality"] == 0


# ------------------------------------------------------------------------------------------------ players


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("difficulty", LEVELS)
def test_the_expert_never_errs_and_beats_the_others(difficulty, version):
    rewards = {style: [] for style in ("tuned", "proposer", "expert", "grinder", "random", "idle")}
    for seed in range(40):
        for style in rewards:
            env = Swarm(difficulty, version, style=style, think=seed % 2 == 0)
            marks = play(env, seed)
            rewards[style].append(marks["reward"])
            if style != "random":
                assert [turn.result for turn in env.log if not turn.ok] == []
                assert marks["extra_calls"] == 0 and marks["format"] == 1
    mean = {style: sum(values) / len(values) for style, values in rewards.items()}
    assert mean["tuned"] > mean["expert"] > mean["grinder"] > mean["random"] > mean["idle"]
    assert mean["tuned"] > mean["proposer"] > mean["grinder"]


def test_the_proposer_proposes_where_the_grinder_passes_and_neither_it_nor_tuned_accepts():
    for seed in range(20):
        marks = {style: play(Swarm(style=style), seed) for style in ("grinder", "proposer", "tuned")}
        assert marks["grinder"]["used_propose_trade"] == 0 < marks["grinder"]["used_pass_turn"]
        for style in ("proposer", "tuned"):
            assert marks[style]["used_propose_trade"] > 0 == marks[style]["used_accept_proposal"]
        assert marks["proposer"]["used_pass_turn"] < marks["grinder"]["used_pass_turn"]


def test_tuned_claims_a_second_task_and_submits_what_lapses_first():
    task = lambda id, yours, deadline: {
        "id": id,
        "yours": yours,
        "bounty": 9,
        "difficulty": 1,
        "deadline": deadline,
        "text": "test the plan",
    }
    e = economy(bots=["honest"] * 4)
    said = lambda *tasks, step=1: players.tuned(view(e) | {"step": step, "tasks": list(tasks)}, random.Random(0))[1:]
    one, two, three = task("task_1", True, 10), task("task_2", True, 5), task("task_3", False, 10)
    assert said(one, three) == ("claim_task", {"task_id": "task_3"})
    assert said(one, two, three)[1]["task_id"] == "task_2"  # two are enough, and task_2 lapses first
    assert said(two, three, step=5)[1]["task_id"] == "task_2"  # its last step
    assert said(three, step=25)[0] == "post" == said(step=24)[0]  # nobody could answer, and nothing could be submitted, any more


def test_players_speak_and_think():
    for style in STYLES:
        for think in (True, False):
            env = Swarm(think=think, style=style)
            opening = env.reset(2)[0]["content"]
            assert ("<think>" in opening) is think and ("Do not think." in opening) is not think
            reply = env.expert_reply()
            assert (
                re.fullmatch(r"(<think>\n.+\n</think>\n)?<tool_call>\n\{\"name\": .+\}\n</tool_call>", reply)
                and ("<think>" in reply) is think
            )
    assert {*PLAYERS, "crowd"} == set(STYLES)


def test_players_see_the_view_alone_and_it_names_no_kinds():
    for version in VERSIONS:
        env = Swarm("medium", version, style="expert")
        env.reset(8)
        for _ in range(12):
            env.step(env.expert_reply())
            assert env.seen == view(env.economy)
            assert not any(kind in json.dumps(env.seen) for kind in ("honest", "opportunistic", "deceptive"))


class Reader:
    """Reads the messages of an episode, and nothing else, into what `view` says. Written from the rules at the head of swarm/view.py."""

    def __init__(self, opening: str, version: str):
        rules, _, first = opening.partition("\n\n")
        self.seen = {"version": version, "last_step": int(re.search(r"Each of (\d+) steps", rules)[1]), "changed": [], "more_tasks": 0}
        self.seen |= {"threshold": re.search(r"below reputation (\d+)", rules)[1], "tasks": [], "incoming": [], "pending": []}
        self.things, self.posts, self.events = {}, {}, []  # what was told of each id; the events of (step, text)
        self.bots = {name: {"frozen": False, "proposed": 0, "accepted": 0} for name in re.findall(r"bot_\d", rules)}
        self.read("", {}, first)

    def read(self, tool: str, arguments: dict, text: str) -> dict:
        seen, head = self.seen | {"frozen": False, "tasks": [], "incoming": [], "pending": []}, ""  # listed every time, if there are any
        for line in text.split("\n"):
            if line.startswith("# result: "):
                if tool == "post":
                    self.posts[line.split()[2]] = {"author": ME, "votes": 0, "voted": False, "text": act.show(arguments["content"])}
                if tool == "vote":
                    self.posts.setdefault(arguments["post_id"], {})["voted"] = True
            elif found := re.fullmatch(r"# step (\d+)(?:: (.+))?", line):
                seen["step"] = int(found[1])
                seen |= dict(part.split() for part in (found[2] or "").split(", ") if part)
            elif line.startswith("# now "):
                seen["changed"] = [*seen["changed"], line.removeprefix("# now ")]
                if seen["version"] == "0.2":  # which alone has events
                    self.events.append((seen["step"], "a rule has changed: " + seen["changed"][-1]))
                if "below reputation" in line:
                    seen["threshold"] = line.split()[-1]
            elif found := re.fullmatch(r"# you are frozen to the end of step (\d+) and can only pass", line):
                seen |= {"frozen": True, "until": int(found[1])}
            elif line in ("# tasks", "# proposals to you", "# feed"):
                head = {"# tasks": "tasks", "# proposals to you": "incoming", "# feed": "feed"}[line]
            elif line.startswith("- "):
                self.row(seen, head, line)
            elif found := re.fullmatch(r"# more open tasks: (\d+)", line):
                seen["more_tasks"] = int(found[1])
            elif line.startswith("# your pending proposals: "):
                seen["pending"] = [{"id": a, "to": b} for a, b in re.findall(r"(prop_\d+) to (bot_\d)", line)]
            elif line.startswith("# bots: "):
                for part in line.removeprefix("# bots: ").split(", "):
                    name, accepted, proposed = re.fullmatch(r"(bot_\d)(?: frozen| active)?(?: accepted (\d+) of (\d+))?", part).groups()
                    self.bots[name] = {"frozen": " frozen" in part, "proposed": int(proposed or 0), "accepted": int(accepted or 0)}
            elif not line.startswith(("# error: ", "# hint: ")):
                self.events.append((seen["step"] - 1, line.removeprefix("# ")))
        self.seen = seen
        lately = [f"step {at}: {event}" for at, event in sorted(self.events, key=lambda event: event[0])[-3:] if seen["step"] - at <= 5]
        names = sorted(self.posts, key=lambda name: int(name.split("_")[1]))[-2:]
        feed = [{"id": name, **self.posts[name]} for name in names]
        return seen | {"feed": feed, "events": lately, "bots": [{"id": name, **bot} for name, bot in self.bots.items()]}

    def row(self, seen: dict, head: str, line: str) -> None:
        name = line.split()[1].strip(":,")
        if found := re.fullmatch(r"- \S+?(?: yours)?: (.+), bounty (\d+), difficulty (\d+), deadline (\d+)", line):
            self.things[name] = dict(zip(("text", "bounty", "difficulty", "deadline"), (found[1], *map(int, found.groups()[1:]))))
        elif found := re.fullmatch(r"- \S+ from (\S+), reputation (\d+), you (get|give) ([\d.]+): (.+)", line):
            get = float(found[4]) * (1 if found[3] == "get" else -1)
            self.things[name] = {"from": found[1], "you_get": get, "text": found[5]}
        elif found := re.fullmatch(r"- \S+ by (\S+?)(?:, votes -?\d+)?: (.+)", line):
            self.posts[name] = {"author": found[1], "votes": 0, "voted": False, "text": found[2]}
        if found := re.search(r", votes (-?\d+)", line.partition(": ")[0]):
            self.posts[name]["votes"] = int(found[1])
        if head != "feed":
            mine = {"yours": line.startswith(f"- {name} yours")} if head == "tasks" else {}
            seen[head].append({"id": name, **self.things[name], **mine})


@pytest.mark.parametrize("version", VERSIONS)
def test_all_of_the_view_can_be_read_off_the_messages_so_far(version):
    """Observations tell only what is new, and leave nothing out. (But what becomes of a proposer's reputation after its proposal.)"""
    kinds = Counter()
    for seed, style in ((seed, style) for seed in range(5) for style in PLAYERS):
        env = Swarm(LEVELS[seed % 3], version, style=style)
        reader = Reader(env.reset(seed)[0]["content"], version)
        while True:
            reply = env.expert_reply()
            messages, done = env.step(reply)
            if done:
                break
            tool, arguments, _ = read_call(reply, version)
            text = messages[0]["content"]
            read = reader.read(tool if env.log[-1].ok else "", arguments, text)
            seen = view(env.economy)
            seen["incoming"] = [{name: value for name, value in offer.items() if name != "reputation"} for offer in seen["incoming"]]
            seen |= {name: f"{seen[name]:.1f}" for name in ("resources", "reputation")} | {"threshold": f"{seen['threshold']:.0f}"}
            until = seen.pop("until"), read.pop("until", None)
            assert read == seen and (until[0] == until[1] or not seen["frozen"]), (seed, style, text)
            kinds.update(name for name in ("tasks", "incoming", "pending", "feed", "events", "changed", "frozen") if seen[name])
    rare = {"events", "pending"} if version == "0.1" else set()
    assert all(kinds[name] for name in {"tasks", "incoming", "pending", "feed", "events", "changed", "frozen"} - rare), kinds


def test_a_task_and_an_offer_and_a_post_are_described_once():
    for seed in range(6):
        env = Swarm("medium", style="expert")
        text, done = env.reset(seed)[0]["content"], False
        while not done:
            messages, done = env.step(env.expert_reply())
            text += "\n" + "\n".join(m["content"] for m in messages)
        for pattern in (r"^- (task_\d+)(?: yours)?: ", r"^- (prop_\d+) from ", r"^- (post_\d+) by "):
            described = Counter(re.findall(pattern, text, re.M))
            assert len(described) > 1 and max(described.values()) <= 1 + pattern.count("task"), described  # out of sight, and back


def test_the_view_tells_mine_from_others(monkeypatch):
    env = offers(episode(monkeypatch=monkeypatch))
    seen = view(env.economy)
    assert [p["id"] for p in seen["incoming"]] == ["prop_1"] and [p["id"] for p in seen["pending"]] == ["prop_2"]
    assert "task_2" not in [t["id"] for t in seen["tasks"]] and not any(t["yours"] for t in seen["tasks"])
    assert [(p["id"], p["author"], p["voted"]) for p in seen["feed"]] == [("post_1", "bot_1", False), ("post_2", ME, False)]
    call(env, "vote", post_id="post_1", direction="down")
    call(env, "claim_task", task_id="task_1")
    seen = view(env.economy)
    assert [(p["votes"], p["voted"]) for p in seen["feed"]] == [(-1, True), (0, False)]
    assert [(t["id"], t["yours"]) for t in seen["tasks"]][0] == ("task_1", True)


def test_v02_shows_what_v01_does_not():
    shown = {version: "" for version in VERSIONS}
    for version in VERSIONS:
        for seed in range(10):
            env = Swarm("medium", version, style="expert")
            env.reset(seed)
            done = False
            while not done:
                messages, done = env.step(env.expert_reply())
                shown[version] += messages[0]["content"] if messages else ""
    for phrase in ("# bot_1 accepted prop_", "# hint: claimed ", "# your pending proposals: prop_", "accepted 1 of 2"):
        assert phrase in shown["0.2"] and phrase not in shown["0.1"], phrase
    assert len(Swarm(version="0.1").tools) == 9 and len(Swarm().tools) == 10


# ------------------------------------------------------------------------------------------------ tools, template, lengths


def test_it_renders_and_fits_the_context():
    from lab.base.tokenizer import build

    tokenizer = build()
    lengths, totals = [], []
    for seed in range(12):
        env = Swarm(LEVELS[seed % 3], style="random" if seed % 2 else "expert")
        messages, done = env.reset(seed), False
        while not done:
            reply = env.expert_reply()
            new, done = env.step(reply)
            lengths += [len(tokenizer(m["content"])["input_ids"]) for m in new]
            messages += [{"role": "assistant", "content": reply}, *new]
        text = tokenizer.apply_chat_template(messages, tools=env.tools, tokenize=False)
        assert text.count("<|im_start|>user\n<tool_response>\n# ") == 24 and "propose_trade" in text
        totals.append(len(tokenizer(text)["input_ids"]))
    assert sum(lengths) / len(lengths) < 40 and max(lengths) < 200
    assert sorted(totals)[6] < 1_700 and max(totals) < 2_000  # a context of 25 turns; 3,900 when all was told every time
    first = tokenizer.apply_chat_template(env.reset(0), tools=env.tools, tokenize=False, add_generation_prompt=True)
    assert len(tokenizer(first)["input_ids"]) < 160  # each schema is one piece, and each stretch of the rules


# ------------------------------------------------------------------------------------------------ arguments and the command line


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
        ("--set error_penalty=", {"error_penalty": float("nan")}),
    ],
)
def test_a_wrong_argument_is_refused_in_one_sentence_that_names_the_flag(flag, arguments):
    with pytest.raises(ValueError) as caught:
        Swarm(**arguments)
    assert str(caught.value).startswith(flag) and not re.search(r"\n|[.!?]\s", str(caught.value))


def test_short_commands():
    assert from_short("claim 3") == ("claim_task", {"task_id": "task_3"})
    assert from_short("claim task_3") == ("claim_task", {"task_id": "task_3"})
    assert from_short(" propose 1 -2.5 a fair trade") == (
        "propose_trade", {"counterparty_id": "bot_1", "offered_transfer": -2.5, "content": "a fair trade"}
    )  # fmt: skip
    assert from_short("submit 4 two words") == ("submit_work", {"task_id": "task_4", "content": "two words"})
    assert from_short("post two words") == ("post", {"content": "two words"}) and from_short("pass") == ("pass_turn", {})
    assert from_short("vote 2 up") == ("vote", {"post_id": "post_2", "direction": "up"})
    for line in ("", "dance", "claim", "propose 1 much a trade", "submit 4"):
        assert from_short(line) is None


def cli(*arguments, said: str = "") -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "env_swarm.py", *arguments], cwd=ROOT, capture_output=True, text=True, input=said)


def test_the_command_line_plays_and_evaluates():
    done = cli()
    assert done.returncode == 0 and done.stdout.count(" -> ") == 26 and "reward" in done.stdout, done.stderr
    done = cli("--play", "grinder", "--scenario", "8", "--difficulty", "hard", "--version", "0.1")
    assert done.returncode == 0 and done.stdout.count("-- assistant") == 25 and "v0.1" in done.stdout, done.stderr
    done = cli("--play", "human", said="claim 1\nnonsense\npost hello\n")
    assert done.returncode == 0 and "task_1 is yours" in done.stdout and "not a command" in done.stdout and "reward" in done.stdout
    done = cli("--play", "human", said=" quit \n")
    assert "scored as if the rest had been passed" in done.stdout and "not a command" not in done.stdout
    done = cli("--play", "human", said="pass\n" * 25)
    assert done.returncode == 0 and "the end: you passed" in done.stdout
    done = cli("--evaluate", "random", "--n", "4")
    assert done.returncode == 0 and re.search(r"reward +\d\.\d+ \[\d\.\d+, \d\.\d+\], n=4", done.stdout), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--play", "wizard"], ["--evaluate", "human"], ["--difficulty", "9"], ["--version", "1"], ["--scenario", "500"],
        ["--scenario", "200", "--version", "0.1"], ["--scenario", "x"], ["--n", "0"], ["--n", "501"], ["--speed", "3"],
    ],
)  # fmt: skip
def test_the_command_line_refuses_in_one_sentence(arguments):
    done = cli(*arguments)
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and arguments[0] in done.stderr


def test_who_plays_at_random_offers_from_minus_five_to_five():
    e = economy(bots=["honest"] * 4)
    offers = [a["offered_transfer"] for seed in range(60) for a in players.possible(view(e), random.Random(seed))["propose_trade"]]
    assert set(offers) == set(range(-5, 6))


def test_who_waits_passes():
    assert players.idle({}, random.Random(0))[1:] == ("pass_turn", {})


def test_the_expert_answers_the_newest_post():
    e = economy(bots=["honest"] * 4)
    e.tasks.clear()
    for text in ("an old plan", "a new plan"):
        act.post(e, "bot_1", text)
    moves = [players.expert(view(e) | {"step": step}, random.Random(0)) for step in range(8)]
    assert {arguments["post_id"] for _, tool, arguments in moves if tool == "reply"} == {"post_2"}


@given(st.floats(0, 1000))
def test_tenths_are_never_more_than_what_is_there(resources):
    assert resources - 0.11 < tenths(resources) <= resources


def test_a_bot_just_below_a_tenth_offers_what_it_has():
    assert tenths(0.8999999999999999) == 0.8 and tenths(0.9) == 0.9
