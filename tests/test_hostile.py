"""Protects the claim that any string is a legal reply: a share of lab/trust/hostile.py's million,
and proof that its fuzzer sees what it is to see.

A fuzzer that finds nothing may be blind. So every complaint it can make is provoked once, by an environment that is broken on purpose.
"""

import json
import math
import random
import signal
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout
from env_alphabet import find_blocks
from env_letters import Letters
from env_swarm import Swarm
from lab.trust import hostile
from lab.trust.hostile import ENVS, SLOW, bounds, complaint, leaks, make_env, part, quantile, random_episode, shrink, summary, tokens
from lab.trust.hostile_replies import KINDS
from swarm.tools import Refused, write_call

REPLIES = 2000  # of each environment; the whole million is for the command


class Broken:
    """An environment with a fault: every attribute is the real one's, but step and score go through the fault."""

    def __init__(self, env, step=None, score=None):
        self.env, self.bad_step, self.bad_score = env, step or (lambda answer, reply: answer), score or (lambda marks, reply: marks)

    def __getattr__(self, name):
        return getattr(self.env, name)

    def step(self, reply):
        self.last = reply
        return self.bad_step(self.env.step(reply), reply)

    def score(self):
        return self.bad_score(self.env.score(), self.last)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(hostile, "KEPT", 1)  # to shrink one failure of a sort is enough here


def found(name: str, n: int = 300, **faults) -> dict:
    return part((name, 0, 0, n), lambda env: Broken(env, **faults))


def refuse(answer, reply):
    if "\ud800" in reply:
        raise KeyError("half a character")
    return answer


@pytest.fixture(scope="module")
def results():
    return {name: part((name, 0, 1, REPLIES)) for name in ENVS}


# ---------------------------------------------------------------------------------------------- the environments hold


@pytest.mark.parametrize("name", ENVS)
def test_no_hostile_reply_raises_or_leaves_the_bounds(results, name):
    got = results[name]
    assert [sort for sort in got["sorts"] if SLOW not in sort] == [], got["failures"]  # time is for the command: this machine may be busy
    assert sum(got["kinds"].values()) >= REPLIES and got["scores"] >= REPLIES / 30
    assert set(got["kinds"]) == {kind.__name__ for kind in KINDS}, "every kind was tried"
    assert got["longest"] > 10_000
    low, high = (0.0, 1.0) if name != "swarm" else (-6.0, 8.0)
    assert low <= got["reward"][0] < got["reward"][1] <= high, "the expert's replies are among them, and so are bad ones"


def test_the_same_seed_gives_the_same_replies():
    said = lambda seed: [(kind, reply) for n in range(4) for kind, reply, *_ in hostile.episode("swarm", n, seed)]
    assert said(3) == said(3) != said(4)


@given(st.text(max_size=300), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_any_text_is_a_legal_reply(text, number):
    for name in ENVS:
        env = make_env(name, random.Random(number))
        env.reset(number)
        for reply in (text, f"<answer>{text}</answer>", f"<tool_call>{text}</tool_call>", env.expert_reply() + text):
            messages, done = env.step(reply)
            assert complaint(env, messages=messages) == ""
            if done:
                break
        assert complaint(env, marks=env.score()) == ""


def test_bounds_are_those_of_the_documents():
    assert bounds(Letters(6, "partial", True, "bare")) == (0.0, 1.0)
    assert bounds(Swarm()) == pytest.approx((0.0, 1.6))
    assert bounds(Swarm(version="0.1")) == pytest.approx((0.0, 1.6))
    assert bounds(Swarm(floor=80, floor_penalty=2, error_penalty=0.5, payoff=0)) == pytest.approx((-2.1, 0.6))
    env = Swarm(floor=100, floor_penalty=3, error_penalty=3)
    env.reset(0)
    while not env.step("<tool_call>")[1]:
        pass
    low, high = bounds(env)
    assert low <= env.score()["reward"] < -3, "only errors: close to the lowest there is"


# ---------------------------------------------------------------------------------------------- the fuzzer sees


@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize(
    "sort, faults",
    [
        ("raised KeyError", {"step": refuse}),
        ("raised KeyError", {"score": lambda marks, reply: refuse(marks, "\ud800" if reply else "")}),
        ("raised Refused", {"step": lambda answer, reply: (_ for _ in ()).throw(Refused("no")) if len(reply) > 100 else answer}),
        ("the reward is out of its bounds", {"score": lambda marks, reply: marks | {"reward": 8.5}}),
        ("the reward is out of its bounds", {"score": lambda marks, reply: marks | {"reward": -6.5}}),
        ("reward is not a finite number", {"score": lambda marks, reply: marks | {"reward": math.nan if "<think>" in reply else 0.0}}),
        ("exact is not a finite number", {"score": lambda marks, reply: marks | {"exact": math.inf}}),
        ("a message is not text", {"step": lambda answer, reply: ([{"role": "user", "content": None}], answer[1])}),
        ("a message is not text", {"step": lambda answer, reply: ([{"role": "tool", "content": "\udfff"}], answer[1])}),
        ("a message is not text", {"step": lambda answer, reply: ([{"role": "tool", "content": "x" * 20_000}], answer[1])}),
        ("a tool's message holds markup", {"step": lambda answer, reply: ([{"role": "tool", "content": "<|im_end|>"}], answer[1])}),
    ],
)
def test_a_broken_environment_is_caught(name, sort, faults):
    got = found(name, **faults)
    assert any(sort in said for said in got["sorts"]), got["sorts"]
    assert all(sort in failure["wrong"] for failure in got["failures"])


def test_books_that_do_not_balance_are_caught():
    env = Swarm()
    env.reset(1)
    assert complaint(env, messages=[]) == ""
    env.economy.members["bot_2"].reputation = 100.5
    assert complaint(env, messages=[]) == "a member's books are out of bounds"


def test_a_slow_environment_is_caught_and_a_stalled_one_stopped(monkeypatch):
    def slow(answer, reply):
        start = time.thread_time()
        while "<think>" in reply and time.thread_time() < start + 0.055:
            pass
        return answer

    monkeypatch.setattr(hostile, "KEPT", 0)  # to shrink a slow reply is slow
    got = found("letters", n=20, step=slow)
    assert got["sorts"] and all(SLOW in sort for sort in got["sorts"])
    assert sum(got["sorts"].values()) < 20, "and the others were not blamed"

    def stalls(answer, reply):
        while True:
            pass

    signal.signal(signal.SIGVTALRM, hostile.stalled)
    assert hostile.timed(lambda: stalls(None, ""))[1] == SLOW, "the loop never ends of itself"


def test_failures_are_saved_small():
    fails = lambda text: "<a>" in text and "Z" in text
    assert shrink("x" * 500 + "<a>" + "y" * 700 + "Z" + "w" * 100, fails) == "<a>Z"
    got = found("letters", step=refuse)
    assert any(failure["reply"] == r"'\ud800'" for failure in got["failures"])
    assert max(list(got["sorts"].values())) >= 1 and len(got["failures"]) <= hostile.KEPT * len(got["sorts"])


def test_what_is_written_counts_everything(results):
    parts = [json.loads(json.dumps(results[name])) for name in ENVS]  # as it comes back from the disk: keys are text
    parts += [json.loads(json.dumps(found("letters", step=refuse)))]
    total = summary(parts, {}, 6000, 1)
    letters = total["environments"]["letters"]
    assert letters["replies"] == sum(letters["kinds"].values()) >= REPLIES + 300
    assert total["exceptions"] == letters["exceptions"] == sum(c for s, c in letters["failures"].items() if "KeyError" in s) > 0
    assert total["replies"] == sum(e["replies"] for e in total["environments"].values())
    for row in letters["times"].values():
        assert 0 < row["median_ms"] <= row["p999_ms"] <= row["max_ms"]


def test_quantiles_are_right_to_two_percent():
    from collections import Counter

    bins = Counter(round(50 * math.log(ms)) for ms in range(1, 1001))
    assert quantile(bins, 0.5) == pytest.approx(500, rel=0.02)
    assert quantile(bins, 0.999) == pytest.approx(999, rel=0.02)
    assert quantile(bins, 1) == pytest.approx(1000, rel=0.02)


# ---------------------------------------------------------------------------------------------- control tokens


def test_text_never_becomes_a_control_token():
    for model, row in tokens(60, 5).items():
        assert (row["leaked"], row["broken"]) == (0, 0), (model, row["examples"])


def test_a_broken_defang_is_caught():
    policy = hostile.bare_policy(hostile.ROOT / "models" / "pico_base")
    text = "so I say <|im_end|> and go on"
    assert leaks(policy, text) == []
    assert leaks(policy, text, defang=lambda tokenizer, text: text) == ["system", "user", "tool", "delta"]
    assert leaks(policy, "harmless <answer> text", defang=lambda tokenizer, text: text) == []
    # One pass that removes the token, where ours breaks it up, would join what stands around it.
    joined = "<|im_<|im_end|>end|>"
    assert leaks(policy, joined) == []
    assert leaks(policy, joined, defang=lambda tokenizer, text: text.replace("<|im_end|>", "")) != []


def test_a_reply_of_random_tokens_is_kept_token_by_token(monkeypatch):
    policy = hostile.bare_policy(hostile.ROOT / "models" / "pico_swarm")
    assert [random_episode(policy, name, random.Random(n)) for name in ENVS for n in range(5)] == [""] * 15
    real = rollout.take_turn

    def cuts_again(policy, episode, env, sample, room):  # decodes the reply and tokenizes the text: what must not be done
        ids = policy.tokenizer(policy.tokenizer.decode(sample.token_ids), add_special_tokens=False)["input_ids"]
        sample.token_ids, sample.logprobs = ids, [0.0] * len(ids)
        return real(policy, episode, env, sample, room)

    monkeypatch.setattr(rollout, "take_turn", cuts_again)
    assert "the sampled tokens are not those of the episode" in [random_episode(policy, "swarm", random.Random(n)) for n in range(5)]


# ---------------------------------------------------------------------------------------------- what the million found, and was mended


def fast(call) -> bool:
    """Generous: ten times the limit, on the fastest of three. What is guarded against took 160 ms to 12 s."""
    return min(hostile.timed(call)[2] for _ in range(3)) < 10 * hostile.LIMIT_MS


def test_a_megabyte_of_open_tags_does_not_stall_the_swarm():
    env = Swarm()
    env.reset(1)
    signal.signal(signal.SIGVTALRM, hostile.stalled)
    assert fast(lambda: env.step("<tool_call>" * 90_000))
    assert fast(lambda: env.step("<tool_call>" * 90_000 + write_call("pass_turn", {})))


def test_a_megabyte_of_blocks_holds_no_list():
    assert find_blocks("<alphabetical_sorted>\nMariaSilva\n</alphabetical_sorted>", 0) == ["\nMariaSilva\n"]
    assert find_blocks("<alphabetical_sorted>\nMariaSilva\n</alphabetical_sorted>" + "x" * 1_000_000, 0) == []
