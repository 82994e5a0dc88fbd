"""Protects the soft metrics and the governance: the published formulas, what soft and hard decide, the detectors' mistakes, and the
simulation's books and determinism. Expected numbers are worked out by hand from the formulas, not by the code under test."""

import json
import math
import random
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import lab.swarm.governance as lab
import lab.swarm.governance_sweep as sweep
import warm
from env_swarm import Swarm, play
from lab.swarm.governance import STACKS, World, collapse_epoch, poisson, simulate
from lab.swarm.governance_sweep import calmest, kink
from swarm import economy as eco
from swarm import governance as gov
from swarm.economy import Interaction
from swarm.governance import Belief, Signals, Stack, Watch, decide, measures, over, payoff, proxy, social, thrash, v_hat

ROOT = Path(__file__).resolve().parent.parent


def deal(p: float, accepted: bool = True, who: str = "a", to: str = "b") -> Interaction:
    return Interaction(1, "trade", who, to, accepted, p)


# ------------------------------------------------------------------------------------------------ the formulas


def test_the_proxy_by_hand():
    # 0.4 * 0.5 + 0.2 * (2 * 0.3 - 1) + 0.2 * ((2 * 0.16 - 1) + (2 * 1 - 1)) / 2 + 0.2 * 0.1 = 0.2 - 0.08 + 0.032 + 0.02
    assert v_hat(Signals(0.5, 1, 2, 0, 0.1)) == pytest.approx(0.172)
    assert proxy(Signals(0.5, 1, 2, 0, 0.1)) == pytest.approx(1 / (1 + math.exp(-0.344)))
    assert v_hat(Signals(1, 0, 0, 0, 1)) == pytest.approx(1)
    # misuse alone: half of the verifier's 0.2, so 0.1 * (2 * 0.5 - 1) instead of 0.1
    assert v_hat(Signals(1, 0, 0, 1, 1)) == pytest.approx(0.9)
    assert [gov.from_count(n, 0.5) for n in (0, 1, 2)] == [1, 0, -0.5]


@given(st.floats(-1, 1), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.floats(-1, 1))
def test_v_stays_in_its_range_and_complaints_never_help(progress, rework, rejections, misuse, engagement):
    base = Signals(progress, rework, rejections, misuse, engagement)
    assert -1 - 1e-12 <= v_hat(base) <= 1 + 1e-12 and 0.119 < proxy(base) < 0.881
    for name in ("rework", "rejections", "misuse"):
        assert v_hat(replace(base, **{name: getattr(base, name) + 1})) <= v_hat(base)


def test_payoffs_by_hand():
    # p = 0.7: S = 1.4 - 0.3 = 1.1, E = 0.6
    assert gov.surplus(0.7) == pytest.approx(1.1) and gov.harm(0.7) == pytest.approx(0.6)
    assert payoff(0.7) == pytest.approx(0.55)
    assert payoff(0.7, tau=0.2, c=0.1, rho=0.5, w=2, r=0.3) == pytest.approx(0.55 - 0.2 - 0.1 - 0.3 + 0.6)
    assert social(0.6) == pytest.approx(0) and social(1) == 2 and social(0) == -3


@given(st.floats(0, 1), st.floats(0, 1), st.floats(-5, 5), st.floats(0, 1), st.floats(0, 1))
def test_both_payoffs_and_the_harm_nobody_answers_for_make_the_worth(p, theta, tau, rho_a, rho_b):
    both = payoff(p, theta, tau, rho=rho_a) + payoff(p, 1 - theta, -tau, rho=rho_b)
    assert both - (1 - rho_a - rho_b) * gov.harm(p) == pytest.approx(social(p))


@pytest.mark.parametrize("signals", [Signals(1.5, 0, 0, 0, 0), Signals(0, 0, 0, 0, float("nan")), Signals(0, -1, 0, 0, 0)])
def test_signals_out_of_range_are_one_sentence(signals):
    with pytest.raises(ValueError, match="^v_hat: .* is ") as wrong:
        v_hat(signals)
    assert "\n" not in str(wrong.value)


# ------------------------------------------------------------------------------------------------ the metrics


def test_the_metrics_by_hand():
    deals = [deal(0.9), deal(0.7), deal(0.4), deal(0.3, False), deal(0.6, False)]
    soft, hard = measures(deals), measures(deals, hard=True)
    assert soft["acceptance"] == hard["acceptance"] == 0.6
    assert soft["toxicity"] == pytest.approx(1 / 3) and hard["toxicity"] == pytest.approx(1 / 3)
    assert soft["tail"] == pytest.approx(0.6) and hard["tail"] == 1
    assert soft["quality_gap"] == pytest.approx(2 / 3 - 0.45) and hard["quality_gap"] == pytest.approx(2 / 3 - 1 / 2)
    assert soft["welfare"] == pytest.approx(1.5 + 0.5 - 1.0) and hard["welfare"] == pytest.approx(2 + 2 - 3)


def test_the_tail_tells_two_economies_of_one_toxicity_apart():
    flat, spiky = [deal(0.9)] * 100, [deal(0.95)] * 95 + [deal(0.0)] * 4 + [deal(0.75)]
    assert measures(flat)["toxicity"] == pytest.approx(0.1) and measures(spiky)["toxicity"] == pytest.approx(0.09)
    assert measures(flat)["tail"] == pytest.approx(0.1) and measures(spiky)["tail"] == pytest.approx(4.25 / 5)


def test_adverse_selection_is_a_negative_gap():
    assert measures([deal(0.2), deal(0.8, False)])["quality_gap"] == pytest.approx(-0.6)


def test_nothing_to_average_is_nan_and_not_zero():
    empty = measures([])
    assert all(math.isnan(empty[name]) for name in ("acceptance", "toxicity", "tail", "quality_gap")) and empty["welfare"] == 0
    assert math.isnan(measures([deal(0.5)])["quality_gap"])


def test_intervals_are_over_episodes_and_not_over_deals():
    same = [[deal(0.2)] * 500 + [deal(0.8)] * 500] * 3 + [[deal(0.3)] * 500 + [deal(0.9)] * 500]
    row = over([measures(deals)["toxicity"] for deals in same])
    assert row.n == 4 and row.mean == pytest.approx(0.475) and row.high - row.low > 0.05  # 4000 deals would give 0.02
    one = over([measures(same[0], hard=True)["toxicity"]])
    assert one.n == 1 and one.mean == 0.5 and one.high - one.low > 0.5  # a single one says little
    assert over([1.0, float("nan"), 3.0]).n == 2


def test_a_training_episode_gives_the_metrics_the_environment_gives():
    envs = [Swarm("hard") for _ in range(3)]
    marks = [play(env, 5 + i) for i, env in enumerate(envs)]
    for env, m in zip(envs, marks):
        told = measures(env.economy.interactions)
        assert (told["toxicity"], told["quality_gap"]) == pytest.approx((m["toxicity"], m["quality_gap"]))


def test_thrash_counts_consecutive_decisions_on_one_agent():
    mixed = [deal(0.5, yes, who) for who, yes in (("a", True), ("b", False), ("a", True), ("b", True), ("a", False), ("a", True))]
    assert thrash(mixed) == 3 / 4  # a: yes yes no yes, b: no yes
    assert math.isnan(thrash([deal(0.5, True, "a"), deal(0.5, False, "b")]))


# ------------------------------------------------------------------------------------------------ the watch


def test_the_watch_measures_the_noise_of_a_reading():
    rng, watch = np.random.default_rng(0), Watch()
    assert gov.reading_variance(watch) == 0.01  # nothing known yet
    watch.rereads.extend((0.6 + 0.2 * rng.standard_normal(), 0.6 + 0.2 * rng.standard_normal()) for _ in range(200))
    assert gov.reading_variance(watch) == pytest.approx(0.04, rel=0.3)


def test_the_watch_flags_noise_and_kindness_and_nothing_else():
    rng, calm, wild, kind, fair, strict = np.random.default_rng(1), Watch(), Watch(), Watch(), Watch(), Watch()
    calm.rereads.extend((0.8 + 0.05 * a, 0.8 + 0.05 * b) for a, b in rng.standard_normal((100, 2)))
    wild.rereads.extend((0.55 + 0.2 * a, 0.55 + 0.2 * b) for a, b in rng.standard_normal((100, 2)))
    kind.audits.extend((0.8, float(u < 0.5)) for u in rng.random(100))
    fair.audits.extend((0.8, float(k % 5 > 0)) for k in range(100))
    strict.audits.extend((0.5, 1.0) for _ in range(100))
    assert gov.noisy(calm) == "" and "too noisy" in gov.noisy(wild) and gov.noisy(Watch()) == ""
    assert "too kind" in gov.too_kind(kind) and gov.too_kind(fair) == gov.too_kind(strict) == gov.too_kind(Watch()) == ""
    kind.audits = deque(list(kind.audits)[:29])
    assert gov.too_kind(kind) == ""  # too few to say


def test_the_watch_seldom_cries_wolf_at_a_calibrated_proxy():
    rng, cries = np.random.default_rng(2), 0
    for _ in range(400):
        p = rng.uniform(0.3, 0.9, 60)
        cries += bool(gov.too_kind(Watch(audits=deque(zip(p, (rng.random(60) < p).astype(float))))))
    assert cries / 400 < 0.06  # 2.5% are meant; 6% is 4.5 standard errors above


# ------------------------------------------------------------------------------------------------ the gates


def decisions(gate: str, readings, noise: float, bar: float = 0.5) -> list[Interaction]:
    belief, dice = Belief(), random.Random(0)
    return [deal(p, decide(gate, belief, p, noise, bar, dice.random())) for p in readings]


def test_kalman_by_hand():
    belief = Belief(mean=0.5, var=0.0625)
    gov.learn(belief, 0.9, 0.0625)
    assert belief.mean == pytest.approx(0.7) and belief.var == pytest.approx(0.0625 / 2 + gov.DRIFT)
    # the deals of this agent vary by 0.05 beyond its readings: prior 0.01 + 0.05 - 0.02 = 0.04, gain 0.04 / 0.06
    assert gov.expect(Belief(mean=0.6, var=0.01, spread=0.05), 0.3, 0.02) == pytest.approx(0.6 - 0.3 * 2 / 3)
    # and this one is steady: its record speaks
    assert gov.expect(Belief(mean=0.6, var=0.0, spread=0.02), 0.1, 0.02) == pytest.approx(0.6)


@pytest.mark.parametrize("truth", [0.45, 0.5, 0.55, 0.6, 0.7])
def test_soft_thrashes_no_more_than_hard_on_an_agent_that_does_not_change(truth):
    readings = np.clip(truth + 0.15 * np.random.default_rng(0).standard_normal(400), 0, 1)
    hard, soft = thrash(decisions("hard", readings, 0.15**2)), thrash(decisions("soft", readings, 0.15**2))
    assert soft < hard and hard > 0.1


def test_soft_without_noise_is_hard():
    """Payoffs are linear in p: an expectation over a distribution of no width decides as the point does."""
    readings = np.random.default_rng(3).random(200)
    accepted = lambda deals: [d.accepted for d in deals]
    assert accepted(decisions("soft", readings, 0.0)) == accepted(decisions("hard", readings, 0.0))


def test_soft_still_tells_the_deals_of_a_changeable_agent_apart():
    readings = np.tile([0.9, 0.25], 60)
    late = decisions("soft", readings, 0.01)[40:]
    assert all(d.accepted == (d.p > 0.5) for d in late)
    assert len({d.accepted for d in decisions("agent", readings, 0.01)[40:]}) == 1  # by the record alone it cannot


def test_the_other_gates():
    assert [d.accepted for d in decisions("open", [0.0, 1.0], 0.01)] == [True, True]
    # latch, from yes: stays above 0.4, then needs 0.6 to return
    assert [d.accepted for d in decisions("latch", [0.45, 0.39, 0.55, 0.61], 0.01)] == [True, False, False, True]
    # mean of the last six
    assert [d.accepted for d in decisions("mean", [1, 0, 0, 0, 0, 0, 0], 0.01)] == [True, True, False, False, False, False, False]
    assert 0.4 < measures(decisions("chance", [0.5] * 400, 0.01))["acceptance"] < 0.6
    with pytest.raises(ValueError, match="decide: there is no gate 'iron'; choose open"):
        decide("iron", Belief(), 0.5, 0.01, 0.5, 0.5)


# ------------------------------------------------------------------------------------------------ collusion


def dealings(rng, ring=(), share=0.5, n=8, steps=75, better=0.0, popular=None):
    """counts and quality of n agents that take partners at random (`popular` three times as often); a ring deals inside with this share."""
    weights = np.ones(n)
    if popular is not None:
        weights[popular] = 3.0
    counts, quality = np.zeros((n, n)), [[[] for _ in range(n)] for _ in range(n)]
    for i in range(n):
        for _ in range(steps):
            others = [j for j in range(n) if j != i]
            j = int(rng.choice(others, p=weights[others] / weights[others].sum()))
            if i in ring and rng.random() < share:
                j = int(rng.choice([k for k in ring if k != i]))
            counts[i, j] += 1
            quality[i][j].append(0.5 + 0.1 * i / n + 0.1 * rng.standard_normal() + better * (i in ring and j in ring))
    return counts, quality


def evenly(counts):
    n = len(counts)
    return np.repeat(counts.sum(1)[:, None], n, 1) / (n - 1) * (1 - np.eye(n))


@pytest.mark.parametrize("known", [True, False])
def test_honest_agents_are_seldom_named(known):
    rng, alarms, looks = np.random.default_rng(0), 0, 300
    for _ in range(looks):
        counts, quality = dealings(rng, steps=40)
        alarms += bool(gov.colluding(counts, quality, evenly(counts) if known else None))
    assert alarms <= 10  # 3 are meant at alpha = 0.01; more than 10 has a chance of 0.0003


def test_a_looser_alpha_names_more():
    rng, alarms = np.random.default_rng(0), {0.01: 0, 0.5: 0}
    for _ in range(60):
        counts, quality = dealings(rng, steps=40)
        for alpha in alarms:
            alarms[alpha] += bool(gov.colluding(counts, quality, evenly(counts), alpha))
    assert alarms[0.5] > 6 > alarms[0.01]


@pytest.mark.parametrize("ring", [(1, 4), (0, 3, 6)])
def test_a_ring_is_named_and_nobody_else(ring):
    counts, quality = dealings(np.random.default_rng(1), ring, 0.5)
    pairs = [(i, j) for i in ring for j in ring if i < j]
    assert gov.colluding(counts, quality, evenly(counts)) == pairs


def test_a_ring_that_does_not_deal_often_but_well_is_named():
    counts, quality = dealings(np.random.default_rng(1), (2, 5), 0.0, better=0.4)
    assert gov.colluding(counts, quality, evenly(counts)) == [(2, 5)]


def test_who_is_sought_after_is_no_ring_if_the_margins_are_fitted():
    counts, quality = dealings(np.random.default_rng(2), popular=0)
    assert gov.colluding(counts, quality) == []
    assert gov.colluding(counts, quality, evenly(counts))  # told that everybody chooses evenly, it must wonder


def test_half_in_a_ring_makes_the_rest_look_like_one_if_the_margins_are_fitted():
    """The reason for `expected`: who stays outside of a large ring deals with the others outside more than the margins explain."""
    rng = np.random.default_rng(3)
    blamed = {True: 0, False: 0}
    for _ in range(20):
        counts, quality = dealings(rng, (0, 1, 2, 3), 0.7, steps=150)
        for known in blamed:
            found = gov.colluding(counts, quality, evenly(counts) if known else None)
            blamed[known] += any(i > 3 for i, _ in found)
    assert blamed[False] > 15 and blamed[True] <= 2


def test_pair_tests_want_matching_arguments():
    with pytest.raises(ValueError, match="^pair_tests: counts are .*; give all for the same ones$"):
        gov.colluding(np.ones((3, 3)), [[[]]])


def test_the_graph_counts_proposals_and_leaves_work_out():
    deals = [deal(0.5), deal(0.7, False), deal(0.9, True, "b", "a"), Interaction(1, "task", "a", "", True, 0.3)]
    counts, quality = gov.graph(deals, ["a", "b"])
    assert counts.tolist() == [[0, 2], [1, 0]] and quality == [[[], [0.5, 0.7]], [[0.9], []]]


# ------------------------------------------------------------------------------------------------ the tiers


def test_more_than_the_majority_of_all_voters_freezes():
    ballots = {"a": {"d"}, "b": {"d"}, "c": {"a"}, "d": {"a"}}
    assert gov.outvoted(ballots, 0.5) == []  # two of four are a tie
    assert gov.outvoted(ballots | {"e": {"d"}}, 0.5) == ["d"]
    assert gov.outvoted(ballots | {"e": {"d"}}, 2 / 3) == [] and gov.outvoted({}, 0.5) == []


def test_audits_follow_surprise_and_a_flagged_proxy():
    stack, belief = Stack(local=True), Belief(mean=0.7, var=0.005, spread=0.005)  # two standard deviations are 0.2
    assert gov.audit_rate(stack, belief, 0.6, False) == 0.1 and gov.audit_rate(stack, belief, 0.6, True) == 0.2
    assert gov.audit_rate(stack, belief, 0.45, False) == 0.5 and gov.audit_rate(stack, belief, 0.45, True) == 1.0
    assert [gov.audit_rate(stack, belief, 0.7 + sign * d, False) for sign in (-1, 1) for d in (0.17, 0.19, 0.21)] == [0.1, 0.1, 0.5] * 2


def test_the_council_waits_for_a_signal():
    rng, stack, kind = np.random.default_rng(0), Stack(vote=True), Watch()
    flat = list(0.7 + 0.02 * rng.standard_normal(60))
    fallen = flat + list(0.6 + 0.02 * rng.standard_normal(15))
    kind.audits.extend((0.8, 0.0) for _ in range(50))
    assert not gov.call_council(stack, flat, Watch(), 50) and gov.call_council(stack, fallen, Watch(), 1)
    assert gov.call_council(stack, flat, kind, 5) and not gov.call_council(stack, flat, kind, 4)
    assert gov.call_council(replace(stack, always=True), [], Watch(), 1)


# ------------------------------------------------------------------------------------------------ the simulation


SHORT = World(least=6, most=6)


@pytest.mark.parametrize("name", list(STACKS))
@pytest.mark.parametrize("adversaries", [0, 3, 5])
def test_the_books_balance(name, adversaries):
    run = simulate(replace(SHORT, adversaries=adversaries), STACKS[name], 1)
    members = run.economy.members.values()
    for m in members:
        assert m.resources == pytest.approx(100 + math.fsum(m.books.values())) and m.resources >= 0
        assert m.books["fine"] <= 0 and m.books["tax"] <= 0 and m.books["bonus"] == 0
    assert math.fsum(m.books["transfer"] for m in members) == pytest.approx(0, abs=1e-6)
    assert run.economy.total == pytest.approx(math.fsum(m.resources for m in members))
    assert len(run.deals) == len(run.truth) and len(run.welfare) == len(run.accepted) == 6
    audits = run.audits * STACKS[name].audit_cost
    assert 40 * sum(run.welfare) == pytest.approx(measures(run.true_deals())["welfare"] - audits)


def test_the_same_seed_gives_the_same_run_and_another_another():
    once, again, other = (simulate(replace(SHORT, adversaries=3), STACKS["full"], seed) for seed in (4, 4, 5))
    assert once.deals == again.deals and once.truth == again.truth and once.welfare == again.welfare
    assert once.deals != other.deals


def test_every_stack_meets_the_same_luck():
    a, b = (simulate(SHORT, STACKS[name], 2) for name in ("open", "hard"))
    assert [(d.initiator, d.counterparty, d.p) for d in a.deals] == [(d.initiator, d.counterparty, d.p) for d in b.deals]
    assert a.deals != b.deals


def test_the_hard_gate_accepts_exactly_what_is_read_above_the_bar():
    run = simulate(replace(SHORT, adversaries=2), Stack("hard", bar=0.6), 0)
    assert all(d.accepted == (d.p >= 0.6) for d in run.deals) and 0 < measures(run.deals)["acceptance"] < 1


def test_without_governance_nothing_is_fined_taxed_audited_or_frozen():
    run = simulate(replace(SHORT, adversaries=4), STACKS["open"], 0)
    assert run.audits == run.meetings == 0 and all(d.accepted for d in run.deals) and len(run.deals) == 6 * 40
    assert all(m.books["tax"] == m.books["fine"] == 0 and not m.frozen_at for m in run.economy.members.values())


def test_the_truth_of_a_ring_is_bad_and_it_looks_good():
    run = simulate(World(adversaries=4, least=15, most=15), STACKS["open"], 0)
    inside = [(d.p, q) for d, q in zip(run.deals, run.truth) if run.kinds[d.initiator] == run.kinds[d.counterparty] == "deceptive"]
    honest = [(d.p, q) for d, q in zip(run.deals, run.truth) if run.kinds[d.initiator] == "honest"]
    assert {q for _, q in inside} == {0.1} and {q for _, q in honest} == {0.9}
    assert np.mean([p for p, _ in inside]) == pytest.approx(np.mean([p for p, _ in honest]), abs=0.03)


def test_a_meeting_costs_a_step_and_freezes_for_the_epochs_of_the_stack():
    run = simulate(SHORT, STACKS["full, every epoch"], 0)
    assert run.meetings == 6 and len(run.deals) == 6 * 40 - 5 * 8  # the sixth would cost a step of the seventh epoch
    stack = replace(STACKS["full, every epoch"], vote=False, freeze=2)
    frozen = simulate(World(adversaries=2, least=20, most=20), stack, 0)
    assert frozen.frozen["deceptive"] > 0
    steps = {
        name: sorted({d.step for d in frozen.deals if d.initiator == name}) for name, kind in frozen.kinds.items() if kind == "deceptive"
    }
    assert any(b - a == 12 for row in steps.values() for a, b in zip(row, row[1:]))  # away for the meeting and the ten steps after it


def test_a_majority_of_adversaries_takes_the_council():
    run = simulate(World(adversaries=5, least=10, most=10), STACKS["full, every epoch"], 0)
    assert run.frozen["honest"] + run.frozen["opportunistic"] > run.frozen["deceptive"]


def test_deals_follow_their_poisson():
    draws = [poisson(1.5, u) for u in (np.arange(4000) + 0.5) / 4000]
    for n in range(4):
        assert draws.count(n) / 4000 == pytest.approx(math.exp(-1.5) * 1.5**n / math.factorial(n), abs=0.001)


def test_it_stops_when_settled_and_not_before():
    run = simulate(World(most=60), STACKS["open"], 0)
    assert run.settled and 25 <= len(run.welfare) < 60
    assert not simulate(World(least=6, most=6), STACKS["open"], 0).settled  # six epochs cannot be told


@pytest.mark.parametrize(
    ("world", "stack", "says"),
    [
        (World(), Stack("iron"), "there is no gate 'iron'"),
        (World(adversaries=7), Stack(), "7 adversaries and 2 opportunists of 8"),
        (World(adversaries=-1), Stack(), "-1 adversaries"),
        (World(agents=2, opportunists=0), Stack(), "3 agents or more"),
        (World(least=30, most=20), Stack(), "at least 30 and at most 20"),
        (World(), Stack(bar=1.5), "the bar is 1.5"),
    ],
)
def test_wrong_arguments_are_one_sentence(world, stack, says):
    with pytest.raises(ValueError, match=says) as wrong:
        simulate(world, stack, 0)
    assert "\n" not in str(wrong.value)


# ------------------------------------------------------------------------------------------------ the sweep


def test_collapse_is_for_good():
    assert collapse_epoch([1.0] * 20) is None and collapse_epoch([-1.0] * 20) == 1
    # mean of epochs 9 to 13 is (1 + 1 + 1 - 2 - 2) / 5 < 0: windows begin with epoch 9 (index 8)
    assert collapse_epoch([1.0] * 11 + [-2.0] * 9) == 9
    assert collapse_epoch([-1.0] * 10 + [5.0] + [-1.0] * 4 + [5.0] * 5) is None


def test_a_straight_line_has_no_kink_and_a_cliff_has():
    cells = lambda values: {n: [{"welfare": v + 0.01 * seed} for seed in range(4)] for n, v in enumerate(values)}
    assert kink(cells([1, 0.8, 0.6, 0.4, 0.2, 0])).mean == pytest.approx(0)
    assert kink(cells([1, 0.9, 0.8, 0.7, 0, 0])).mean == pytest.approx(0.7 - 0.3 / 4)


def test_the_calmest_bar_keeps_to_toxicity_and_openness():
    bars = len(sweep.BARS)
    line = lambda low, high: np.repeat(np.linspace(low, high, bars)[:, None], 3, 1)
    cell = {"toxicity": line(0.5, 0.1), "thrash": line(0.2, 0.4), "thrash_honest": line(0, 0), "acceptance_honest": line(1, 0.5)}
    seeds = np.arange(3)
    at = calmest(cell, 0.3, seeds)
    assert at["thrash"] == pytest.approx(0.3, abs=0.003) and at["toxicity"] <= 0.3
    assert math.isnan(calmest(cell, 0.05, seeds)["thrash"])
    assert math.isnan(calmest(cell, 0.3, seeds, floor=0.9)["thrash"])  # no bar is that open and that clean


def test_numbers_become_json_without_nan():
    said = json.dumps(sweep.numbers({"a": over([]), 3: [1, {"b": None}]}), allow_nan=False)
    assert json.loads(said) == {"a": [None, None, None, 0], "3": [1, {"b": None}]}


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 5), st.sampled_from(list(STACKS)), st.integers(0, 10_000))
def test_no_population_and_no_stack_breaks_it(adversaries, name, seed):
    run = simulate(World(adversaries=adversaries, least=2, most=2), STACKS[name], seed)
    assert all(0 <= d.p <= 1 for d in run.deals) and all(0 <= m.reputation <= 100 for m in run.economy.members.values())


def test_it_shows_itself_and_refuses_in_one_sentence():
    call = lambda *flags: warm.run(["-m", "swarm.governance", *flags], ROOT)
    shown = call()
    assert shown.returncode == 0 and "bot_6" in shown.stdout and "thrash" in shown.stdout
    wrong = warm.run(["-m", "lab.swarm.governance_sweep", "--seeds", "1"], ROOT)
    assert wrong.returncode != 0 and wrong.stderr == "--seeds 1: an interval needs at least 2 runs of each kind\n"


def test_the_economy_is_untouched():
    """The simulation uses two facts of swarm/economy.py: a freeze lasts APPEAL_STEPS,
    and a proposal's label can be set before it is settled."""
    economy = lab.start(World(), STACKS["local"], 0)
    assert eco.ME not in economy.members and economy.total == 800
    economy.members["bot_1"].frozen_at = economy.step + 5 * 2 - eco.APPEAL_STEPS
    for _ in range(10):
        eco.end_step(economy)
        assert economy.members["bot_1"].frozen_at
    eco.end_step(economy)
    assert not economy.members["bot_1"].frozen_at


def test_pair_tests_by_hand():
    """Three agents, the last the busiest. Ties have the mean of their ranks;
    who has one partner only says nothing of how well they deal."""
    quality = [[[], [0.1, 0.9], [0.5]], [[0.4, 0.6, 0.6], [], []], [[0.2, 0.3], [0.8, 0.9, 0.7], []]]
    counts = np.array([[len(p) for p in row] for row in quality], dtype=float)
    expected = np.array([[0, 1.0, 2.0], [1.5, 0, 0.5], [2.0, 2.5, 0]])
    found = gov.pair_tests(counts, quality, expected)
    often = {(0, 1): stats.poisson.sf(4, 2.5), (0, 2): stats.poisson.sf(2, 4.0), (1, 2): stats.poisson.sf(2, 3.0)}
    # ranks of agent 0: with 1 they are 1 and 3, with 2 it is 2 of 3; of agent 2: with 0 they are 1 and 2, with 1 they are 4, 5, 3 of 5
    zs = {(0, 1): 0.0, (1, 0): 0.0, (0, 2): 0.0, (1, 2): 0.0, (2, 0): -1.5 / math.sqrt(6 * 3 / 24), (2, 1): 1.0 / math.sqrt(6 * 2 / 36)}
    for (i, j), (p_often, p_well) in found.items():
        assert p_often == pytest.approx(often[i, j])
        assert p_well == pytest.approx(stats.norm.sf((zs[i, j] + zs[j, i]) / math.sqrt(2)))
    assert sorted(found) == [(0, 1), (0, 2), (1, 2)]


def test_where_nothing_is_expected_the_margins_are_kept():
    """Fitted, the expected numbers of i's and of j's deals add up to what they were: nobody is blamed for being busy."""
    outer = np.outer([1.0, 2.0, 4.0, 3.0], [2.0, 1.0, 1.0, 3.0])
    counts = np.round(20 * (outer - np.diag(np.diag(outer))))
    fitted = [often for often, _ in gov.pair_tests(counts, [[[] for _ in row] for row in counts]).values()]
    assert all(0.3 < p < 0.7 for p in fitted), fitted
