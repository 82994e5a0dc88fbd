"""Protects swarm/governance.py: the published formulas, what soft and hard decide, the detectors'
mistakes, and the simulation's books. Expected numbers are worked out by hand from the formulas."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import logit

from swarm import governance as gov
from swarm.economy import Interaction, correct, in_truth, noisy, proxy, recalibrate
from swarm.governance import (
    STACKS,
    Belief,
    Run,
    Watch,
    decide,
    measures,
    over,
    thrash,
)
from test_env_swarm import check_books
from warm import ROOT


def deal(p: float, accepted: bool = True, who: str = "a", to: str = "b") -> Interaction:
    return Interaction(1, who, to, accepted, p, p)


# ------------------------------------------------------------------------- the formulas
@pytest.mark.parametrize(
    "signals, v_hat",
    [
        # 0.4 * 0.5 + 0.2 * (2 * 0.3 - 1) + 0.2 * ((2 * 0.16 - 1) + (2 * 1 - 1)) / 2 + 0.2 * 0.1
        ((0.5, 1, 2, 0, 0.1), 0.2 - 0.08 + 0.032 + 0.02),
        ((1, 0, 0, 0, 1), 1),
        ((-1, 99, 99, 99, -1), -1),
        # misuse alone: half of the verifier's 0.2, so 0.1 * (2 * 0.5 - 1) instead of 0.1
        ((1, 0, 0, 1, 1), 0.9),
    ],
)
def test_the_proxy_by_hand(signals, v_hat):
    assert logit(proxy(*signals)) / 2 == pytest.approx(v_hat)


# ------------------------------------------------------------------------- the measures
def test_the_measures_by_hand():
    deals = [deal(0.9), deal(0.7), deal(0.4), deal(0.3, False), deal(0.6, False)]
    soft = {"acceptance": 3 / 5, "toxicity": 1 / 3, "tail": 0.6, "quality_gap": 2 / 3 - 0.45}
    hard = {"acceptance": 3 / 5, "toxicity": 1 / 3, "tail": 1.0, "quality_gap": 2 / 3 - 1 / 2}
    # a deal is worth 5p - 3 to everybody
    assert measures(deals) == pytest.approx(soft | {"welfare": 1.5 + 0.5 - 1.0})
    assert measures(deals, hard=True) == pytest.approx(hard | {"welfare": 2 + 2 - 3})
    empty = measures([])  # nothing to average is NaN, and not 0
    assert empty.pop("welfare") == 0 and all(math.isnan(x) for x in empty.values())
    assert over([1.0, float("nan"), 3.0]).n == 2
    # adverse selection is a negative gap
    assert measures([deal(0.2), deal(0.8, False)])["quality_gap"] == pytest.approx(-0.6)


def test_thrash_counts_consecutive_decisions_on_one_agent():
    a, b = [True, True, False, True], [False, True]
    mixed = [deal(0.5, yes, "a") for yes in a] + [deal(0.5, yes, "b") for yes in b]
    assert thrash(mixed) == 3 / 4 == thrash(mixed[::-1])
    assert math.isnan(thrash([deal(0.5, True, "a"), deal(0.5, False, "b")]))


# ------------------------------------------------------------------------- the watch
def read_twice(rng, truth, noise, n=100) -> Watch:
    return Watch([(truth + noise * a, truth + noise * b) for a, b in rng.normal(size=(n, 2))])


def test_the_watch_flags_noise_and_kindness_and_nothing_else():
    rng = np.random.default_rng(1)
    wild = read_twice(rng, 0.55, 0.2)
    assert gov.reading_variance(wild) == pytest.approx(0.04, rel=0.3)
    assert not noisy(read_twice(rng, 0.8, 0.05).rereads, 0.5) and not noisy([], 0.5)
    assert noisy(wild.rereads, 0.5)
    kind, fair, strict = ([(0.8, k % 5 > least) for k in range(100)] for least in (2, 0, -1))
    said = [gov.too_kind(Watch(audits=a)) for a in (kind, kind[:29], fair, strict)]
    assert said == [True, False, False, False]  # 29 are too few to say


def test_windows_grow_with_noise_and_end_where_the_noise_changed():
    rng = np.random.default_rng(2)
    steady, wild = read_twice(rng, 0.6, 0.02, 300).rereads, read_twice(rng, 0.6, 0.2, 60).rereads
    assert len(gov.recent_rereads(Watch(steady))) > 200
    assert len(gov.recent_rereads(Watch(steady + wild))) == pytest.approx(60, abs=5)
    assert len(gov.recent_rereads(Watch(steady + wild, fixed=True))) == 200
    assert gov.reading_variance(Watch(steady + wild)) == pytest.approx(0.04, rel=0.4)
    rising = list(0.01 * np.arange(100))  # a clear trend shortens it, noise around it does not
    noise = list(rng.normal(size=100))
    assert len(gov.recent(rising, rising)) == 10 and len(gov.recent(noise, noise)) == 100
    # a proxy that was too kind, and is no more
    kind, fair = ([(0.8, float(k % 10 < good)) for k in range(60)] for good in (2, 8))
    assert not gov.too_kind(Watch(audits=kind + fair)) and gov.too_kind(Watch(audits=fair + kind))


def test_a_watch_that_corrects_p_is_no_longer_too_kind():
    """Of readings of 0.8, and of 0.6, only half were good: both become about a half."""
    kind = Watch(audits=[((0.8, 0.6)[k % 2], float(k % 4 < 2)) for k in range(100)])
    assert gov.too_kind(kind)
    kind.fit = recalibrate(kind.audits)
    assert [correct(p, kind.fit) for p in (0.8, 0.6)] == pytest.approx([0.5, 0.5], abs=0.08)
    assert not gov.too_kind(kind)


def test_correction_brings_toxicity_as_p_says_to_the_truth_and_stops_what_cannot_pay():
    """Under the rules of before, when the deceptive minded no audits."""
    plain, corrected = (
        [
            Run(replace(STACKS[name], **gov.BEFORE), n, 0, least=20, most=20).numbers()
            for n in (0, 3, 5)
        ]
        for name in ("fast tier", "fast, p corrected")
    )
    assert {row["seven_tenths"] for row in plain} == {0.7}
    good, mixed, bad = (row["seven_tenths"] for row in corrected)
    assert good > 0.75 > 0.7 > mixed > bad and bad < 0.5
    lie = lambda row: abs(row["toxicity"] - row["toxicity_soft"])
    assert lie(corrected[1]) < lie(plain[1]) / 2
    assert corrected[2]["welfare"] == 0 > -0.8 > plain[2]["welfare"]


def test_nothing_is_corrected_before_there_are_enough_audits():
    run = Run(STACKS["fast, p corrected"], 3, 0, least=1, most=1)
    assert len(run.watch.audits) < gov.ENOUGH and run.watch.fit is None


# ------------------------------------------------------------------------- the gates
def accepted(gate: str, readings, noise=0.01, flagged=False) -> list[bool]:
    belief = Belief()
    return [decide(gate, belief, p, noise, 0.5, flagged) for p in readings]


def test_kalman_by_hand():
    belief = Belief(mean=0.5, var=0.0625)
    gov.learn(belief, 0.9, 0.0625)
    assert belief.mean == pytest.approx(0.7)
    assert belief.var == pytest.approx(0.0625 / 2 + gov.DRIFT)
    # deals vary by 0.05 beyond their readings: prior 0.01 + 0.05 - 0.02 = 0.04, gain 0.04 / 0.06
    assert gov.expect(Belief(0.6, 0.01, 0.05), 0.3, 0.02) == pytest.approx(0.6 - 0.3 * 2 / 3)
    # the record of a steady agent speaks
    assert gov.expect(Belief(0.6, 0.0, 0.02), 0.1, 0.02) == pytest.approx(0.6)


def test_the_other_gates():
    assert accepted("open", [0.0, 1.0]) == [True, True]
    # latch, from yes: stays above 0.4, then needs 0.6 to return
    assert accepted("latch", [0.45, 0.39, 0.55, 0.61]) == [True, False, False, True]
    readings = np.random.default_rng(3).random(200)
    hard, soft = accepted("hard", readings, 0.05), accepted("soft", readings, 0.05)
    assert accepted("soft", readings, 0.0) == hard != soft  # no width, no difference: p is linear
    assert accepted("watched", readings, 0.05) == hard  # a flagged reading is not thresholded
    assert accepted("watched", readings, 0.05, flagged=True) == soft


# ------------------------------------------------------------------------- collusion
def named(rng, ring=(), share=0.5, steps=75, better=0.0):
    """The pairs named among eight agents who take partners at random, a ring with this share."""
    quality = [[[] for _ in range(8)] for _ in range(8)]
    for i in range(8):
        for _ in range(steps):
            j = int(rng.choice([j for j in range(8) if j != i]))
            if i in ring and rng.random() < share:
                j = int(rng.choice([k for k in ring if k != i]))
            p = 0.5 + 0.01 * i + 0.1 * rng.standard_normal() + better * (i in ring and j in ring)
            quality[i][j].append(p)
    return gov.colluding(quality, steps / 7 * (1 - np.eye(8)))


@pytest.mark.parametrize("ring", [(), (1, 4), (0, 3, 6)])
def test_a_ring_is_named_and_nobody_else(ring):
    pairs = [(i, j) for i in ring for j in ring if i < j]
    assert named(np.random.default_rng(1), ring) == pairs
    # dealing no more often than others, but better
    assert named(np.random.default_rng(1), ring, 0.0, better=0.4) == pairs


def test_how_unlike_chance_an_epoch_is_by_hand():
    expected = 5 / 7 * (1 - np.eye(8))
    assert gov.unlike_chance(expected, expected) == 0
    # 8 agents, five deals each, all with one partner: 8 ((5 - 5/7)² + 6 (5/7)²) / 40
    one = 5.0 * np.roll(np.eye(8), 1, axis=1)
    assert gov.unlike_chance(one, expected) == pytest.approx((30**2 + 6 * 25) / 49 / 5)
    chosen = np.random.default_rng(0).multinomial(5, [1 / 7] * 7, size=(500, 8))
    assert np.mean([gov.unlike_chance(c, np.full((8, 7), 5 / 7)) for c in chosen]) == pytest.approx(
        6 / 7, rel=0.05
    )
    assert gov.unlike_chance(np.zeros((8, 8)), np.zeros((8, 8))) == 0  # nobody dealt


# ------------------------------------------------------------------------- the tiers
@pytest.mark.parametrize(
    "more, frozen",
    [
        ({}, []),  # two of four are a tie
        ({"e": {"d"}}, ["d"]),
        ({"e": set(), "f": {"d"}}, []),  # three of six, too
    ],
)
def test_more_than_the_majority_of_all_voters_freezes(more, frozen):
    assert gov.outvoted({"a": {"d"}, "b": {"d"}, "c": {"a"}, "d": {"a"}} | more) == frozen


@pytest.mark.parametrize(
    "p, rate", [(0.6, 0.1), (0.51, 0.1), (0.89, 0.1), (0.49, 0.5), (0.91, 0.5)]
)
def test_audits_follow_surprise_and_a_flagged_proxy(p, rate):
    belief = Belief(mean=0.7, var=0.005, spread=0.005)  # two standard deviations are 0.2
    assert [gov.audit_rate(belief, p, flagged) for flagged in (False, True)] == [rate, 2 * rate]


def test_the_council_waits_for_a_signal():
    rng, kind = np.random.default_rng(0), Watch()
    flat = list(0.7 + 0.02 * rng.standard_normal(60))
    fallen = flat + list(0.6 + 0.02 * rng.standard_normal(15))
    kind.audits.extend((0.8, 0.0) for _ in range(50))
    assert not gov.call_council(flat, Watch(), 50) and gov.call_council(fallen, Watch(), 1)
    assert gov.call_council(flat, kind, 5) and not gov.call_council(flat, kind, 4)


LUCK = np.random.default_rng(5).random((5, gov.AGENTS, 22)).tolist()  # of an epoch


def after_a_fall(name: str, **rules) -> tuple[Run, list[int]]:
    """An epoch after an honest bot lost its reputation, and one more: (the run, its deals)."""
    run = Run(replace(STACKS[name], **rules), 0, 1, least=1, most=1)
    run.members[4].reputation = 0.0
    for epoch in (2, 3):
        run.epoch(epoch, LUCK)
    who = run.members[4].name
    of = lambda epoch: range(5 * epoch - 4, 5 * epoch + 1)
    count = lambda epoch: sum(d.initiator == who and d.step in of(epoch) for d in run.deals)
    return run, [count(epoch) for epoch in (2, 3)]


def test_the_breaker_trips_only_where_the_council_meets():
    deals = {breaker: after_a_fall("fast tier", breaker=breaker)[1] for breaker in ("fast", "slow")}
    # At once it is away for three steps of the five; or never, as there is no council.
    assert deals["fast"][0] == 2 and deals["slow"] == [5, 5]
    # with a council, after the epoch in which it met
    assert after_a_fall("slow every epoch", breaker="slow", lag=0)[1] == [4, 0]


def test_a_meeting_answers_an_epoch_later_and_those_it_freezes_go_on_until_then():
    at_once, later = (after_a_fall("slow every epoch", lag=lag) for lag in (0, 1))
    assert [deals for _, deals in (at_once, later)] == [[4, 0], [4, 4]]
    assert later[0].members[4].frozen_at
    # the signal counts from the answer on
    assert [max(run.answers) for run, _ in (at_once, later)] == [3, 4]
    # what they do until then has its price
    slow = lambda lag, seed: np.mean(
        Run(
            replace(STACKS["slow every epoch"], lag=lag, nerve=None), 3, seed, least=30, most=30
        ).welfare
    )
    assert all(slow(0, seed) > slow(6, seed) + 0.02 for seed in (100, 101, 102))


def test_the_deceptive_lie_low_when_they_are_audited_more_than_others():
    assert gov.boldness([]) == 1.0 == gov.boldness([False] * 90 + [True] * 9)
    assert gov.boldness([True]) == pytest.approx(0.1 / (2 / 11))
    assert gov.boldness([False] * 15 + [True] * 15) == pytest.approx(0.1 / (16 / 40))  # frozen
    # one that lies low deals like the honest, with whom the dice say
    run = Run(STACKS["open"], 3, 0, least=1, most=1)
    agent, others = run.members[0], run.members[1:]
    agent.interactions = 1000
    dice = lambda: gov.dice_of([0.99, 0.1, 0.0, 0.5, 0.1, 0.1])
    assert gov.choose(agent, others, dice(), bold=True)[:2] == (others[0], gov.BAD)
    assert gov.choose(agent, others, dice(), bold=False) == (others[-1], gov.GOOD, gov.GOOD, 0.0)
    # in a run: fewer bad deals if audits follow suspicion, no difference if there are none
    bad = lambda name, nerve, seed: sum(
        d.truth < 0.5
        for d in Run(replace(STACKS[name], nerve=nerve), 3, seed, least=30, most=30).deals
    )
    for seed in (100, 101):
        assert bad("fast tier", 1.0, seed) < 0.9 * bad("fast tier", None, seed)
        assert bad("fast tier", 1.0, seed) < bad("fast tier", 3.0, seed)
        assert bad("soft", 1.0, seed) == bad("soft", None, seed)


def test_a_frozen_agent_takes_every_step_for_an_audit():
    run, _ = after_a_fall("slow every epoch", lag=0)
    # four steps of the epoch for which it was frozen: in the first the council met
    assert run.suspected[4][-4:] == [True] * 4 and not all(run.suspected[4][:-4])


@pytest.mark.parametrize("windows", ["adaptive", "fixed"])
def test_the_council_looks_back_as_far_as_the_dealings_are_alike(windows, monkeypatch):
    looked, detect = [], gov.colluding
    see = lambda quality, expected: looked.append(expected.sum()) or detect(quality, expected)
    monkeypatch.setattr(gov, "colluding", see)
    Run(replace(STACKS["slow every epoch"], windows=windows), 0, 100, least=40, most=40)
    # 15 epochs of at most 40 proposals, or more than 30 of 32
    assert max(looked) <= 15 * 40 if windows == "fixed" else max(looked) > 30 * 32


def test_a_ballot_counts_as_many_deals_as_describe_the_present():
    run = Run(STACKS["slow every epoch"], 0, 0, least=1, most=1)
    noise = 0.15 * np.random.default_rng(3).normal(size=40)
    noisy = 0.49 - noise[-10:].mean() + noise  # the last ten are below 0.5, all together are not
    fallen = np.r_[0.8 + noise, 0.3 + noise[:12]]
    for quality, named in ((noisy, set()), (fallen, {"bot_4"})):
        run.deals = [deal(p, True, "bot_4", "bot_1") for p in quality]
        assert run.ballots()["bot_1"] == named


# ------------------------------------------------------------------------- the simulation
def short(name: str, adversaries: int, seed: int) -> Run:
    return Run(STACKS[name], adversaries, seed, least=6, most=6)


@pytest.mark.parametrize("adversaries", [0, 3, 5])
@pytest.mark.parametrize("name", list(STACKS))
def test_the_books_balance(name, adversaries):
    run = short(name, adversaries, 1)
    check_books(run.economy)
    assert all(m.books["bonus"] == m.books["task"] == 0 for m in run.members)
    if name == "open":
        assert not run.watch.audits and not run.answers and all(d.accepted for d in run.deals)
    assert 40 * sum(run.welfare) == pytest.approx(
        measures(in_truth(run.deals))["welfare"] - len(run.watch.audits) * STACKS[name].audit_cost
    )


def test_the_same_seed_gives_the_same_table_and_another_another():
    once, again, other, hard = (
        short(name, 3, seed) for name, seed in (("soft", 4), ("soft", 4), ("soft", 5), ("hard", 4))
    )
    assert once.deals == again.deals and once.numbers() == again.numbers() != other.numbers()
    first = lambda run: [(d.initiator, d.counterparty, d.p) for d in run.deals[:8]]
    assert first(hard) == first(once) != first(other)  # the same luck, whatever the governance


def test_a_meeting_costs_a_step_and_freezes_for_the_epochs_of_the_stack():
    often = STACKS["slow every epoch"]
    run = short("slow every epoch", 0, 0)
    assert (
        len(run.answers) == 6 and len(run.deals) == 6 * 40 - 5 * 8
    )  # the sixth would stop epoch 7
    run = Run(replace(often, vote=False, freeze=2), 2, 0, least=20, most=20)
    rogues = [m.name for m in run.members if m.kind == "deceptive"]
    steps = [sorted({d.step for d in run.deals if d.initiator == name}) for name in rogues]
    gaps = [b - a for row in steps for a, b in zip(row, row[1:])]
    assert 12 in gaps  # away for the meeting and the ten steps after it


def test_the_rules_of_before_play_what_they_played_then():
    """The welfare of commit eedab5ed: so what --changes compares with is what it was."""
    then = {"fast": -0.5385, "slow": 0.1135, "always": -0.83225}
    assert {
        name: Run(gov.CHANGES[f"{name}: before"], 4, 0).numbers()["welfare"] for name in then
    } == pytest.approx(then, abs=1e-9)
    changed = lambda change: {
        rule
        for rule, value in vars(gov.CHANGES[f"slow: {change}"]).items()
        if value != vars(gov.CHANGES["slow: before"])[rule]
    }
    assert all(changed(rule) == {rule} for rule in gov.BEFORE)
    assert changed("all") == {*gov.BEFORE}


def test_it_stops_when_settled_and_not_before():
    run = Run(STACKS["open"], 0, 0, most=60)
    assert run.settled() and 25 <= len(run.welfare) < 60
    assert not short("open", 0, 0).settled()  # six epochs cannot be told


# ------------------------------------------------------------------------- the command
@pytest.mark.parametrize(
    "changes, arms, shares",
    [(False, ("open", "soft"), (0, 3)), (True, ("slow: before", "slow: lag"), (3, 4))],
)
def test_the_command_prints_one_table_and_saves_every_seed(
    changes, arms, shares, tmp_path, monkeypatch, capsys
):
    kind = "CHANGES" if changes else "STACKS"
    stacks = {name: getattr(gov, kind)[name] for name in arms}
    monkeypatch.setattr(gov, kind, stacks)
    monkeypatch.setattr(gov, "SHARES", (0, 3))
    save, plot = tmp_path / "g.json", tmp_path / "g.png"
    gov.main(seeds=2, save=str(save), plot=str(plot), changes=changes)
    told = capsys.readouterr().out.splitlines()
    assert [line[:30].split()[-1] for line in told[1:5]] == [f"{n / 8:.1%}" for n in shares] * 2
    saved = json.loads(save.read_text())
    assert saved["made_by"].endswith("--seeds 2 --noise 0.5" + " --changes" * changes)
    second = saved["arms"][arms[1]]
    assert second["settings"] == vars(stacks[arms[1]])
    numbers = {key: row[1] for key, row in second["shares"]["3"].items()}
    assert numbers == Run(stacks[arms[1]], 3, 1).numbers()
    assert (plot.exists() and plot.stat().st_size > 5000) != changes


def test_the_claim_is_judged_by_the_welfare_of_the_sweep():
    """results/claims.json repeats it, so a new sweep must reach it."""
    read = lambda name: json.loads((ROOT / f"results/{name}.json").read_text())
    found, arms = read("claims")["claims"]["governance"], read("governance")["arms"]
    for percent, share in (("37.5", "3"), ("50", "4")):
        pairs, fast = (
            np.array(arms[name]["shares"][share]["welfare"])
            for name in ("fast + pairs", "fast tier")
        )
        checked = found["checks"][f"welfare at {percent}%, with detection"]
        gained = found["beside"][f"welfare: detection at {percent}%"]["rows"]
        assert checked == pytest.approx(pairs, abs=1e-9) and gained == pytest.approx(pairs - fast)
