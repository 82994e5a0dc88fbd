"""Protects the environments from the tricks of lab/trust/attack.py, and the verdicts from being kind.

Every trick that was once found to pay, or that the rules name, has a line here. The whole tables are made by the command;
here are a few tasks.
"""

import math
from dataclasses import replace

import pytest

import metrics
from env_alphabet import Alphabet
from env_letters import Letters
from env_swarm import DEV_SEEDS, Swarm
from lab.trust import attack
from lab.trust.attack import ALPHABET, LETTERS, markdown, play_alphabet, play_letters, row, table_of, verdict
from lab.trust.attack_swarm import FAIR, FREE, SWARM, WORK, Way, play, player, search, value
from swarm import economy as eco
from swarm import tools as swarm_tools
from swarm.bots import work_text
from swarm.players import PLAYERS, news

N = 25  # scenarios of the swarm


def rewards(make, version: str = "0.2", n: int = N) -> list[float]:
    return [play(make, version, DEV_SEEDS + i)["reward"] for i in range(n)]


# ---------------------------------------------------------------------------------------------- letters and alphabet


@pytest.mark.parametrize("tier", [3, 6])
@pytest.mark.parametrize("reward", ["binary", "partial"])
def test_letters_pay_nothing_for_an_answer_that_is_not_one(tier, reward):
    marks = {name: play_letters(name, 20, tier, reward) for name in LETTERS}
    assert marks["expert"] == [1.0] * 20
    for name in ("empty", "lists of numbers", "ten answers", "every letter twice in the object", "right, but inside the thinking",
                 "right, then wrong", "right, twice", "the prompt copied", "words of the task", "repeated blocks, 1000"):  # fmt: skip
        assert marks[name] == [0.0] * 20, name
    assert max(marks["right, all 26 letters"]) <= (0.1 if reward == "partial" else 0.0)
    for name in LETTERS:
        if not name.startswith("no-think") and name != "expert":
            assert sum(marks[name]) < 20, f"{name} must not do as well as the expert"


def test_letters_guesses_earn_what_the_table_says_they_may():
    env = Letters(6, "partial", True, "bare")
    env.reset(DEV_SEEDS)
    wanted = sum(n == 0 for n in env.task.counts) / len(
        env.task.counts
    )  # by hand: 0.1 for the form, 0.9 for the share of letters that are right
    assert play_letters("all 0", 1, 6, "partial") == [pytest.approx(0.1 + 0.9 * wanted)]
    assert play_letters("all 0", 200, 6, "binary") == [0.0] * 200, "a binary reward pays no guess at tier 6"


@pytest.mark.parametrize("name", [name for name in LETTERS if name.startswith("no-think")])
def test_who_may_not_think_cannot_tally_around_the_answer(name):
    assert play_letters(name, 20, 6, "binary") == [0.0] * 20
    env = Letters(6, "binary", False, "bare")
    env.reset(DEV_SEEDS)
    for right in (env.expert_reply(), "\n\n" + env.expert_reply() + "\n", env.expert_reply().replace(", ", ",\n    ")):
        env.step(right)
        assert env.score()["reward"] == 1.0, "a plain answer is right, however it is laid out"


def test_alphabet_pays_one_sorted_list_and_nothing_else():
    marks = {name: play_alphabet(name, 20) for name in ALPHABET}
    assert marks["expert"] == [1.0] * 20
    for name in ("empty", "right list in two blocks", "right list inside the thinking", "the prompt copied"):
        assert marks[name] == [0.0] * 20, name
    assert max(marks["right list 1000 times"]) < 1e-9
    for name in ("every name twice", "right list, and as given", "as given, marked right", "sorted, all marked", "last answer copied"):
        assert sum(marks[name]) < 0.25 * 20, name
    ladder, string = sum(marks["ladder of blocks"]), sum(marks["sorted as strings"])
    assert ladder <= string + 1e-9, "several blocks never pay more than their last one alone"


def test_alphabet_does_not_pay_for_thinking_that_was_forbidden():
    assert play_alphabet("no-think: thinks all the same", 20) == [0.0] * 20
    env = Alphabet(3, 3, 1, 4, 8.0, False, False, "bare")
    env.reset(DEV_SEEDS)
    while not env.step("\n" + env.expert_reply() + "\n")[1]:
        pass
    assert env.score()["reward"] == 1.0


# ---------------------------------------------------------------------------------------------- swarm


@pytest.fixture(scope="module")
def expert():
    return {version: rewards(SWARM["expert"], version) for version in ("0.2", "0.1")}


@pytest.mark.parametrize("version", ["0.2", "0.1"])
def test_what_the_rules_refuse_earns_what_idling_earns(version):
    idle = rewards(SWARM["idle"], version)
    assert rewards(SWARM["stalls: text without a call"], version) == idle
    assert rewards(SWARM["proposes to itself"], version) == idle


def test_no_trick_of_the_list_beats_the_expert(expert):
    for name, make in SWARM.items():
        found = verdict(metrics.gain(expert["0.2"], rewards(make)))
        assert found != "beats the expert" or name in LISTED, name


LISTED = {  # skill; and what is known, and told in results/hostile/README.md: it does no better than long honest work
    "expert, submits long honest work", "expert, submits a dictionary", "expert, submits a dictionary, and copied again",
}  # fmt: skip


def test_a_dictionary_is_no_better_than_long_honest_work():
    long = rewards(SWARM["expert, submits long honest work"], n=100)
    for name in ("expert, submits a dictionary", "expert, submits a dictionary, and copied again"):
        assert metrics.gain(long, rewards(SWARM[name], n=100)).high < 0.001, name


@pytest.mark.parametrize("text", ["copied again and again", "2000 x", "80 x", "words of the task", "copied"])
def test_stuffed_work_earns_less_than_work(text, expert):
    assert metrics.gain(rewards(SWARM[f"expert, submits {text}"]), expert["0.2"]).low > 0


def test_repeating_oneself_is_not_longer_and_honest_texts_are_untouched():
    import random

    quality = lambda text, asked="": eco.content_quality(text, "0.2", 0.5, asked)
    asked = "review the water budget for city health"
    assert quality(WORK["copied again and again"](asked), asked) < quality(work_text(asked), asked)
    assert quality("x" * 2000) == quality("x" * 100) < 0.6 < quality(WORK["honest"](asked))

    def plain(text, asked, level):  # the formula as it is written down, from the length alone
        n, said = len(text), set(eco.re.findall(r"\w+", text.lower()))
        q = (1 - math.exp(-n / (80 + 120 * level))), eco.sigmoid((n - 30) / 20)
        return (
            0.5 * q[0] + 0.5 * q[1]
            if not asked
            else 0.25 * q[0] + 0.25 * q[1] + 0.5 * sum(w in said for w in eco.terms(asked)) / len(eco.terms(asked))
        )

    dice = random.Random(0)
    for seed in range(20):
        env = Swarm("medium")
        env.reset(seed)
        for task in (task for tasks in env.economy.to_come for task in tasks):
            for text in (work_text(task.text), task.text.partition(" for ")[0] + ", it is done"):
                assert eco.content_quality(text, "0.2", task.level / 10, task.text) == plain(text, task.text, task.level / 10)
        text = news(dice)
        assert eco.content_quality(text, "0.2") == plain(text, "", 0)
        for offer in (call for call in [PLAYERS["trader"](env.seen, dice)] if call[1] == "propose_trade"):
            assert eco.content_quality(offer[2]["content"], "0.2") == plain(offer[2]["content"], "", 0)


def test_v1_keeps_its_loophole(expert):
    assert abs(metrics.gain(expert["0.1"], rewards(SWARM["expert, submits 80 x"], "0.1")).mean) < 0.05, (
        "80 letters x are as good as work in v0.1"
    )


def test_draining_costs_the_name():
    for version in ("0.2", "0.1"):
        marks = [play(SWARM["asks 20 of everybody"], version, DEV_SEEDS + i) for i in range(10)]
        assert sum(m["reputation"] for m in marks) / 10 < 0.2 and sum(m["reward"] for m in marks) / 10 < 0.75


# ---------------------------------------------------------------------------------------------- the search, and the verdicts


def test_the_search_stays_in_its_space_and_improves():
    assert all(set(FAIR[name]) <= set(FREE[name]) and getattr(Way(), name) in FAIR[name] for name in FREE)
    best = search(FAIR, "0.2", tries=8, scenarios=6)
    assert all(getattr(best, name) in FAIR[name] for name in FAIR)
    assert value(best, "0.2", 6) >= value(Way(), "0.2", 6)


def test_a_hole_is_found(monkeypatch):
    """The other way round: with a scorer that loves the letter x, the attack must be seen to win."""
    real = eco.content_quality
    monkeypatch.setattr(swarm_tools, "content_quality", lambda text, *more: 1.0 if text.startswith("xxx") else real(text, *more))
    honest, stuffed = rewards(SWARM["expert"]), rewards(SWARM["expert, submits 80 x"])
    assert verdict(metrics.gain(honest, stuffed)) == "beats the expert"
    assert value(replace(Way(), work="80 x"), "0.2", 10) > value(Way(), "0.2", 10)


def test_a_hole_in_letters_is_found(monkeypatch):
    monkeypatch.setattr(attack.Letters, "score", lambda env: {"reward": 1.0 if env.reply.count("<answer>") > 5 else 0.5})
    rows = table_of(["expert", "ten answers"], lambda name: play_letters(name, 10, 6, "binary"), "")
    assert rows["ten answers"]["verdict"] == "beats the expert"
    assert "**beats the expert**" in markdown(rows)


def test_verdicts_follow_the_intervals():
    said = lambda mean, low, high: verdict(metrics.Interval(mean, low, high, 9))
    assert said(0.1, 0.01, 0.2) == "beats the expert"
    assert said(0.1, -0.01, 0.2) == said(-0.1, -0.2, 0.01) == said(0.0, 0.0, 0.1) == "not told apart"
    assert said(-0.1, -0.2, -0.01) == "below the expert"
    assert row([1.0, 0.0], [1.0, 0.0])["verdict"] == "the expert"
    assert row([0.0] * 5, [1.0] * 5)["gain"]["mean"] == -1.0


def test_an_attacker_sees_the_view_and_nothing_else():
    """The same view and dice give the same call, whoever the bots really are."""
    import random

    for name, make in SWARM.items():
        env = Swarm("medium")
        env.reset(DEV_SEEDS + 3)
        calls = [make()(env.seen, random.Random(1)) for _ in range(2)]
        for member in env.economy.members.values():
            member.kind = "deceptive"
        assert calls == [make()(env.seen, random.Random(1))] * 2, name
    assert player(Way())(env.seen, random.Random(1))[0] in swarm_tools.ACTIONS
