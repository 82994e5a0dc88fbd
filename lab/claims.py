"""Sixteen lessons of the documents that this project grew out of, tested again.

    python -m lab.claims                    # every claim with its verdict
    python -m lab.claims thinking           # one: its source, its numbers, the commands of its runs
    python -m lab.claims thinking runs      # the same numbers, of runs that these commands made

A claim is data: its sentence, where it is from, how it was read, the arms that test it (flags of
train.py), and checks: each is one number, with what is predicted of it. results/claims.json has
that number for every seed, or for every unit that scripts played (a scenario, or a seed of a
simulation). Everything else is computed here: interval, verdict, and the tables of docs/trust.md.

The verdict comes from the interval of a number, never from the means alone:

    holds      above (below): the whole interval lies above (below) the number. equal: it lies
               within the margin (a test of equivalence: no difference found is no evidence of none)
    fails      it lies on the other side; or below the smallest difference that would matter; or,
               for equal, outside the margin
    undecided  anything else; more seeds make the interval narrower

A claim of several parts is reported part by part. No correction is made for the number of checks:
of forty predictions that are not so, one holds by luck.
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from bookkeeping import significance
from metrics import Interval

ROOT = Path(__file__).resolve().parents[1]
__path__ = [str(ROOT / "lab/claims")]  # the older files of this name, until they have moved
# The rule for seeds, written down before they are run: 3 seeds; 6 and then 12 while a part that
# decides is undecided. Who looks three times may be wrong three times, so each look asks for the
# interval at 98.3%: three looks at 1.7% err in 5% of the cases at most, however they hang together
# (Bonferroni). On made-up claims with normal noise, "above 0" was said to hold of a truth of 0 in
# 2.4% of 4,000 cases, and in 5.4% by three looks at 95% (22b9273, results/claims/rule.md).
# Scripts play a number of units that was fixed before: one look, at 95%.
LOOKS = (3, 6, 12)
LEVEL = 1 - 0.05 / len(LOOKS)


@dataclass(frozen=True)
class Check:
    text: str  # what the number is
    value: Callable | None  # {arm: {seed: Run}} -> rows; None: only 22b9273 can make it again
    expect: str = ""  # above, below, equal; empty: only measured
    than: float = 0.0  # what is predicted: above, below or equal to this
    margin: float = 0.0  # equal: within so much; above, below: the least that would matter
    figure: float | None = None  # what the document says the number is
    most: float = 1.0  # how large it can be, either way: what all units agree in is not certain
    decides: bool = True  # False: it stands beside the claim, and a page cites it
    scale: float = 1.0  # pages show scale times the number, in this unit
    unit: str = ""
    share: bool = False  # between 0 and 1, and so is its interval


@dataclass(frozen=True)
class Claim:
    name: str
    sentence: str
    source: str
    reading: str  # how the sentence became numbers, and what is ours in it
    arms: dict[str, str]  # flags of train.py
    checks: tuple[Check, ...]
    ours: str = ""  # if the rules that decide it are ours: which, and so what it cannot tell


@dataclass(frozen=True)
class Run:
    summary: dict
    lines: list[dict]  # metrics.jsonl
    evals: list[dict]  # evals.jsonl, of the tasks that it trained for


# ------------------------------------------------------------------------------- numbers of a run
def held(run: Run, what: str = "exact", stage: str = "final") -> np.ndarray:
    """[tasks] of the development tasks, at a stage: before, after_sft, final."""
    return np.array(next(e[what] for e in run.evals if e["stage"] == stage), float)


def gained(run: Run, what: str = "exact") -> np.ndarray:
    """[tasks] what GRPO added to the SFT."""
    return held(run, what) - held(run, what, "after_sft")


def during(run: Run, what: str, first: int, last: int) -> float:
    """Mean over the updates first to last, both included, of sampled replies."""
    some = [line for line in run.lines if first <= line["update"] <= last]
    return float(np.mean([line[what] for line in some if what in line]))


def signal_by_episode(run: Run) -> float:
    """Groups with a signal per episode; most is learnt in the first ten updates."""
    return during(run, "groups_with_signal", 1, 10) / run.summary["config"]["k"]


# ------------------------------------------------------------------------------- numbers of arms
def both(arms: dict, *names: str) -> list[int]:
    """The seeds that all of these arms have."""
    return sorted(set.intersection(*(set(arms[name]) for name in names)))


def less(a: str, b: str, of: Callable = held) -> Callable:
    """By seed: a minus b."""
    return lambda arms: [of(arms[a][s]) - of(arms[b][s]) for s in both(arms, a, b)]


def own(a: str, of: Callable) -> Callable:
    """By seed: a number of one arm."""
    return lambda arms: [of(arms[a][s]) for s in both(arms, a)]


# ------------------------------------------------------------------------------- the claims
POINTS = {"scale": 100, "unit": " points"}
PERCENT = {"scale": 100, "unit": "%"}
SHARE = PERCENT | {"share": True}


def words(text: str) -> str:
    """A text of several lines as one."""
    return " ".join(text.split())


def letters_run(more: str = "", tier: int = 6, updates: int = 40) -> str:
    """40 updates: with the default settings accuracy has settled after 20."""
    much = f"--updates {updates} --eval-n 256 --eval-every 20 --no-eval-other-tiers"
    return f"--env letters --difficulty {tier} {much} {more}".strip()


def swarm_run(more: str = "") -> str:
    """Tiny: 20 updates of 16 episodes. The novice tries every tool: there is diversity to lose."""
    sft = "--env swarm --difficulty medium --sft-style novice --sft-steps 20"
    grpo = "--updates 20 --warmup 2 --lr 1e-3 --num-tasks 2 --k 8"
    return f"{sft} {grpo} --eval-n 24 --eval-every 1000 {more}".strip()


late_gain = lambda run: during(run, "reward", 91, 100) - during(run, "reward", 41, 50)
part = lambda what, first, last: partial(during, what=what, first=first, last=last)
SIGNAL = part("groups_with_signal", 1, 10)
reputation = partial(held, what="reputation")
diversity = partial(held, what="diversity")
UPDATES_100 = {
    "think": letters_run(updates=100),
    "no_think": letters_run("--no-think", updates=100),
    "no_think_partial": letters_run("--no-think --reward partial", updates=100),
}
# Three rates for each, and more where the highest was the best: then the best was not yet found.
RATES = {
    "full": ("3e-5", "1e-4", "3e-4", "1e-3"),
    "rank1": ("3e-4", "1e-3", "3e-3", "1e-2", "3e-2"),
    "rank8": ("3e-4", "1e-3", "3e-3", "1e-2"),
    "rank32": ("3e-4", "1e-3", "3e-3"),
}
RANKS = {"full": "--lora-rank 0"}
RANKS |= {f"rank{r}": f"--lora-rank {r} --lora-alpha {2 * r}" for r in (1, 8, 32)}
K_ARMS = {f"k{k}": letters_run(f"--k {k} --num-tasks {64 // k}") for k in (2, 4, 16, 32)}
ALL_RATES = {}
for kind, rates in RATES.items():
    for rate in rates:
        ALL_RATES[f"{kind}_{rate}"] = letters_run(f"{RANKS[kind]} --lr {rate}")
CLAIMS = (
    Claim(
        "thinking",
        "Without thinking GRPO plateaus on tier 6; with it, it does not.",
        words("""
            picoRL Training Report, "Why It Plateaued": "No CoT = no learning signal … hard
            ceiling" (40.6% → 43.8% on 32 tasks)
        """),
        words("""
            A plateau: the gain of GRPO over SFT is 0 within 5 points, after 100 updates. The
            report paid partial credit, so both rewards are tried. With thinking it must gain at
            least 20 points; it ends at a ceiling of its own, near 100%. This is of 100 updates,
            over which the rate falls to a tenth: in runs of 150 (results/letters, five seeds) the
            binary reward is undecided.
        """),
        UPDATES_100,
        (
            Check(
                "gain of GRPO over SFT, thinking allowed",
                own("think", gained),
                "above",
                margin=0.2,
                **POINTS,
            ),
            Check(
                "gain of GRPO over SFT, not allowed, binary reward",
                own("no_think", gained),
                "equal",
                margin=0.05,
                **POINTS,
            ),
            Check(
                "gain of GRPO over SFT, not allowed, partial reward (the report's)",
                own("no_think_partial", gained),
                "equal",
                margin=0.05,
                figure=0.032,
                **POINTS,
            ),
        ),
    ),
    Claim(
        "invention",
        words("""
            RL reinforces what was seeded and cannot invent the algorithm: once SFT has removed
            it, 40 updates do not bring it back.
        """),
        words("""
            picoRL Training Report, "Why It Plateaued": "RL can only reinforce existing reasoning
            patterns; it can't invent new ones"
        """),
        words("""
            Seeded is whatever a policy does before RL, and pico_base derives in 13% of its
            replies, whatever its SFT shows. So three starts: SFT that states (the claim's words;
            the base still derives now and then), SFT that states until deriving is gone (200
            steps at ten times the rate; 60 leave it in 1% of the replies), SFT that derives. Not
            invented: replies that derive stay within 2% of none, over the last ten updates.
        """),
        {
            "states": letters_run(),
            "states_only": letters_run("--sft-steps 200 --sft-lr 1e-3"),
            "derives": letters_run("--sft-style derives"),
        },
        (
            Check(
                "nothing left to reinforce: replies that derive in the end",
                own("states_only", part("habit_derives", 31, 40)),
                "equal",
                margin=0.02,
                **SHARE,
            ),
            Check(
                "SFT that derives minus nothing left, at the end",
                less("derives", "states_only"),
                "above",
                margin=0.05,
                **POINTS,
            ),
            Check(
                "follow-up: nothing left: gain of GRPO",
                own("states_only", gained),
                decides=False,
                **POINTS,
            ),
        ),
    ),
    Claim(
        "partial_credit",
        words("""
            Partial credit compresses the variance within groups, so gradients vanish; binary
            gives fewer but larger signals.
        """),
        words("""
            picoRL Training Report, "Why It Plateaued": "Partial credit compresses variance …
            advantages are near-zero"; grad_norm 0.02 to 0.04
        """),
        words("""
            The spread: mean |reward - group mean| without the division by the standard deviation
            (which hides it), first ten updates. The gradient: its norm, with that division, as in
            the report. Which reward wins is asked at four starts: SFT that answers bare, that
            states, tier 5, SFT that derives. Does partial credit pay the guess first? Then
            replies get shorter before they get longer.
        """),
        {
            "binary": letters_run(),
            "partial": letters_run("--reward partial"),
            "binary_raw": letters_run("--no-normalize"),
            "partial_raw": letters_run("--reward partial --no-normalize"),
            "binary_bare": letters_run("--sft-style bare"),
            "partial_bare": letters_run("--sft-style bare --reward partial"),
            "binary_tier5": letters_run(tier=5),
            "partial_tier5": letters_run("--reward partial", tier=5),
            "binary_derives": letters_run("--sft-style derives"),
            "partial_derives": letters_run("--sft-style derives --reward partial"),
        },
        (
            Check(
                "spread within groups: partial minus binary",
                less("partial_raw", "binary_raw", part("advantage_abs", 1, 10)),
                "below",
            ),
            Check(
                "gradient norm: partial minus binary",
                less("partial", "binary", part("grad_norm", 1, 10)),
                "below",
            ),
            Check(
                "groups with a signal: binary minus partial",
                less("binary", "partial", SIGNAL),
                "below",
                **POINTS,
            ),
        ),
    ),
    Claim(
        "larger_k",
        "Larger k: more groups with signal per episode, at equal episode budget.",
        words("""
            picoRL Training Report, "What Would Improve Results": "Larger k: more rollouts per
            task increases chance of finding winning strategies"
        """),
        words("""
            64 episodes an update in all arms; k = 16 against k = 4, first ten updates. The report
            speaks of a group's chance, the claim of groups per episode: the second is the first
            divided by k. Both are judged, and what it brings stands beside them.
        """),
        K_ARMS | {"k8": letters_run()},
        (
            Check(
                "share of the groups with a signal: k = 16 minus k = 4",
                less("k16", "k4", SIGNAL),
                "above",
                **POINTS,
            ),
            Check(
                "groups with a signal per 100 episodes: k = 16 minus k = 4",
                less("k16", "k4", signal_by_episode),
                "above",
                scale=100,
            ),
        ),
    ),
    Claim(
        "curriculum",
        "A curriculum beats training on tier 6 all along.",
        words("""
            picoRL Training Report, "What Would Improve Results": "Curriculum learning: start at
            easier difficulty, gradually increase"
        """),
        words("""
            60 updates each; tier 1 first, up when the last five updates have 75% right; judged on
            tier 6. Its early updates are cheaper: the work stands below the table. Once more from
            a weaker start (SFT that answers bare), where tier 6 says less. The curves are of the
            tier that is played at the time, and fall where a harder one begins.
        """),
        {
            "fixed": letters_run(updates=60),
            "curriculum": letters_run("--curriculum", updates=60),
            "fixed_bare": letters_run("--sft-style bare", updates=60),
            "curriculum_bare": letters_run("--sft-style bare --curriculum", updates=60),
        },
        (
            Check(
                "curriculum minus fixed, end",
                less("curriculum", "fixed"),
                "above",
                margin=0.02,
                **POINTS,
            ),
        ),
    ),
    Claim(
        "lora_rank",
        words("""
            LoRA of rank 1, 8 and 32 does as well as full fine-tuning, each at its own best
            learning rate.
        """),
        words("""
            picoRL Training Report, "Config" and "Previous Runs Summary": rank 32 because full
            fine-tuning did not fit; nothing is said of what that costs
        """),
        words("""
            The documents make no prediction, so ours is: no difference, within 5 points at the
            end. Three to five learning rates each, so that the best is not the highest; alpha
            twice the rank. The best rate is the one whose other seeds have most of the number
            that is judged, so a run never chooses its own. The warm-up by SFT has one rate for
            all.
        """),
        ALL_RATES | {"twice": letters_run("--lora-rank 0 --lr 3e-4", updates=80)},
        (
            Check("rank 1 minus full, end", None, "equal", margin=0.05, **POINTS),
            Check("rank 8 minus full, end", None, "equal", margin=0.05, **POINTS),
            Check("rank 32 minus full, end", None, "equal", margin=0.05, **POINTS),
        ),
    ),
    Claim(
        "baselines",
        words("""
            A group's mean is a better baseline than the batch's; whether advantages are divided
            by the standard deviation, and whether a loss weighs sequences or tokens, does not
            matter in the end.
        """),
        words("""
            the variants in grpo.py; the documents use one (GRPO: the group's mean, divided, a
            sequence at a time) and compare none
        """),
        words("""
            Ours to predict. Better: more exact answers in the first 20 updates (in the end all
            are near 100%). Does not matter: equal at the end, within 5 points. Sequence against
            token level is grpo against dapo; on-policy gspo has the gradient of grpo, and dapo's
            higher clip never acts.
        """),
        {
            "group": letters_run(),
            "batch": letters_run("--baseline batch"),
            "no_std": letters_run("--no-normalize"),
            "token": letters_run("--loss dapo"),
        },
        (
            Check(
                "group minus batch baseline, first 20 updates",
                less("group", "batch", part("exact", 1, 20)),
                "above",
                **POINTS,
            ),
            Check(
                "with minus without the division, end",
                less("group", "no_std"),
                "equal",
                margin=0.05,
                **POINTS,
            ),
            Check(
                "sequence minus token level, end",
                less("group", "token"),
                "equal",
                margin=0.05,
                **POINTS,
            ),
        ),
    ),
    Claim(
        "single_steps",
        "Single-step reward is noise: the peak overstates the mean.",
        words("""
            RL Training Lessons for Multi-Agent Governance, "The reward signal is noisier than you
            think" and "Peak vs. average" (peak 0.70, mean 0.53: 32%)
        """),
        words("""
            From the training rewards of the first claim. Noise: where it learns so slowly that
            the report saw a plateau (no thinking, partial reward), single steps turn around as
            often as white noise does (2/3), within 0.1. Overstates: by more than 10%. Detectable:
            in four runs of five, from so many updates before and after; 64 episodes each.
        """),
        UPDATES_100,
        (
            Check(
                "share of the steps that turn around, plateau",
                None,
                "equal",
                than=2 / 3,
                margin=0.1,
            ),
            Check("peak over mean, plateau", None, "above", than=0.1, figure=0.32, **PERCENT),
        ),
    ),
    Claim(
        "too_short",
        words("""
            100 steps was not enough: the model was still improving, and a test for convergence
            would have told so half-way.
        """),
        words("""
            RL Training Lessons for Multi-Agent Governance, "100 steps wasn't enough" (halves of
            0.50 and 0.55); "Run longer. Or … measure whether the system has converged"
        """),
        words("""
            From the runs of the first claim, also 100 updates. Still improving: the reward of the
            last ten updates minus that of 41 to 50. The detector (metrics.trend) is right at
            half-way if it says settled and the last 20 updates stay within 0.05 of 41 to 50, or
            says anything else and they do not; it must be right in more than half of the runs.
            Letters, not alphabet sort: what is judged is the way to look, more than the run.
        """),
        UPDATES_100,
        (
            Check(
                "reward after update 90 minus around 50, a run that learns",
                own("think", late_gain),
                "above",
                margin=0.02,
                figure=0.05,
            ),
            Check(
                "at half-way the detector is right, share of the arms",
                None,
                "above",
                than=0.5,
                **SHARE,
            ),
        ),
    ),
    Claim(
        "off_policy",
        "One step off-policy costs nothing with a correction; eight steps without one ruin a run.",
        words("""
            Qwen3-30B v0.2 Training, "Off-Policy Level Rising" (from 2 to 10 in 15 steps); RL
            Training Lessons for Multi-Agent Governance, "Async coordination costs dominate"
        """),
        words("""
            Nothing: the end is within 5 points of strictly on-policy. The correction is truncated
            importance sampling of whole sequences. Follow-ups: one step without, eight with.
        """),
        {
            "in_turn": letters_run(),
            "one_weighed": letters_run("--async-rollouts 1 --importance sequence"),
            "one_blind": letters_run("--async-rollouts 1 --importance none"),
            "eight_weighed": letters_run("--async-rollouts 8 --importance sequence"),
            "eight_blind": letters_run("--async-rollouts 8 --importance none"),
        },
        (
            Check(
                "one step, corrected, minus on-policy",
                less("one_weighed", "in_turn"),
                "equal",
                margin=0.05,
                **POINTS,
            ),
            Check(
                "eight steps, not corrected, minus on-policy",
                less("eight_blind", "in_turn"),
                "below",
                margin=0.05,
                **POINTS,
            ),
        ),
    ),
    Claim(
        "swarm_weights",
        words("""
            A higher weight on reputation, or a floor, raises reputation; diversity falls under RL
            (judged on greedy play), and a higher weight keeps it up; to accept beats to propose.
        """),
        words("""
            Qwen3-30B v0.2 Training, "Reputation Stagnation" and "Accept, Don't Just Propose";
            published: diversity 0.70 → 0.60 under RL
        """),
        words("""
            A tiny training (20 updates of 16 episodes) from the novice's demonstrations, who
            tries every tool; only the weights differ, and the parts are compared, not the
            rewards. Accepting against proposing is played by scripts: the expert, blind for
            offers to it, or without anybody to propose to.
        """),
        {
            "base": swarm_run(),
            "reputation_half": swarm_run("--swarm-reputation 0.5"),
            "floor": swarm_run("--swarm-floor 50 --swarm-floor-penalty 2"),
            "diversity_quarter": swarm_run("--swarm-diversity 0.25"),
        },
        (
            Check(
                "reputation: weight 0.5 minus 0.3",
                less("reputation_half", "base", reputation),
                "above",
            ),
            Check(
                "reputation: with a floor of 50 minus without",
                less("floor", "base", reputation),
                "above",
            ),
            Check(
                "diversity: after RL minus after SFT",
                own("base", partial(gained, what="diversity")),
                "below",
                figure=-0.1,
            ),
            Check(
                "diversity: weight 0.25 minus 0.1",
                less("diversity_quarter", "base", diversity),
                "above",
            ),
            Check("reward: only accepts minus only proposes", None, "above"),
        ),
        ours=words("""
            In our economy only who proposes gains reputation by a trade (env_swarm.py), and the
            documents do not say who did in theirs. So the part on accepting and proposing, played
            by scripts, tells of our rules; the four other parts are of trained runs.
        """),
    ),
    Claim(
        "swarm_versions",
        "v0.1 has a low ceiling and an exploit; v0.2 raises the one and closes the other.",
        words("""
            Qwen3-30B v0.2 Training, "v0.1 vs v0.2" (1.131 → 1.377; ceiling 1.14 → 1.40) and
            "Interaction Quality": v0.1's "keyword-gameable heuristic"
        """),
        words("""
            Scripted players, 200 scenarios of each difficulty. The exploit: 80 times the letter x
            instead of work; open if that earns the same reward within 0.02, closed if it earns
            less. The ceiling: the reward of the expert (1.6 is the most in both). Ours cannot
            saturate at a payoff of 1 as theirs did (env_swarm.py), so only the direction is
            tested. Other scenarios in each version.
        """),
        {},
        (
            Check("v0.1: reward of nonsense minus work", None, "equal", margin=0.02, most=1.6),
            Check("v0.2: reward of nonsense minus work", None, "below", margin=0.02),
            Check("the expert's reward: v0.2 minus v0.1", None, "above", figure=0.246),
        ),
        ours=words("""
            We wrote both versions from the description, the loophole of v0.1 among them. That
            ours has it and that v0.2 closes it shows that they are built as described, and
            nothing of the published environment.
        """),
    ),
    Claim(
        "stop_rule",
        words("""
            A text-only turn that ends the episode hides behaviour: the same player shows, and
            earns, much more where it only passes.
        """),
        words("""
            published: an early-termination default hid 62.5% of behaviour; with the pass rule the
            same model went from 0.83 to 1.18
        """),
        words("""
            The scripted expert, which writes text alone with a given chance a turn. Hidden: of
            the calls of an episode that goes on, the share that the rule cuts off. How often the
            published model wrote text alone is not told; at 10% a turn about as much is hidden as
            it says, so there it is asked whether the reward differs, by 0.05 at least. How much
            is hidden at other rates stands beside it: it depends on the rate alone.
        """),
        {},
        (
            Check(
                "reward, text in 10% of the turns: passes minus ends",
                None,
                "above",
                margin=0.05,
                figure=0.35,
            ),
        ),
        ours=words("""
            Player, economy and both stop rules are ours: an episode that ends early earns less
            here by construction. What the rule hides in an episode depends on how often a player
            only talks, and how often the published model did is not told.
        """),
    ),
    Claim(
        "governance",
        words("""
            Decisions by expectation thrash less than hard thresholds; adaptive windows beat fixed
            ones; what works at 37.5% adversarial fails at 50%, and collusion detection decides
            the first.
        """),
        words("""
            RL Training Lessons for Multi-Agent Governance, "The reward signal …", "Non-monotonic
            improvement …", "Async coordination …"; published: pair-wise detection let 37.5%
            survive
        """),
        words("""
            Scripted bots (swarm/governance.py), 24 seeds. Thrash: gates alone at a bar of 0.5, 25
            epochs. Windows: how far each mean is from the present on four shapes of made-up
            rewards, against the fixed window that turned out best. Works: welfare above 0 in the
            last ten epochs. Decides: without the detection welfare at 37.5% is below 0. The whole
            sweep: results/governance.
        """),
        {},
        (
            Check("thrash: soft minus hard gate", None, "below"),
            Check("error of the adaptive window minus the best fixed one", None, "below"),
            Check("welfare at 37.5%, with detection", None, "above"),
            Check("welfare at 50%, with detection", None, "below"),
            Check("welfare at 37.5%, without detection", None, "below"),
        ),
        ours=words("""
            Bots, economy, proxy and gates are ours. At equal toxicity the soft gate thrashes less
            by 0.012 only, and its memory does that, not its softness (22b9273,
            results/governance).
        """),
    ),
    Claim(
        "more_sft",
        words("""
            RL buys more than the same compute spent on more SFT on demonstrations that do not
            derive, be they scarce or plenty.
        """),
        words("""
            picoRL Training Report, "What Would Improve Results": "CoT SFT" beside RL; and "SFT
            works, RL flat" of a small model
        """),
        words("""
            Scarce: 100 demonstrations. Plenty: 3,600, so that no batch of the longer SFT sees one
            twice. 450 SFT steps are meant to be at least as much work as 50 steps and 40 updates
            (tokens sampled, and three times the tokens trained: a backward pass is two forward
            ones); if SFT got less the comparison is not fair. The demonstrations state counts and
            do not derive them; if they derived, SFT alone might do: the follow-up. SFT has its
            default rate; tuned, and with as much work, it is behind by less (results/letters).
        """),
        {
            "rl": letters_run(),
            "sft": letters_run("--sft-steps 450", updates=0),
            "rl_plenty": letters_run("--sft-examples 3600"),
            "sft_plenty": letters_run("--sft-examples 3600 --sft-steps 450", updates=0),
            "sft_derives": letters_run("--sft-style derives --sft-steps 450", updates=0),
        },
        (
            Check(
                "RL minus more SFT, 100 demonstrations",
                less("rl", "sft"),
                "above",
                margin=0.05,
                **POINTS,
            ),
            Check(
                "RL minus more SFT, 3,600 demonstrations",
                less("rl_plenty", "sft_plenty"),
                "above",
                margin=0.05,
                **POINTS,
            ),
        ),
    ),
    Claim(
        "sharpening",
        "RL sharpens rather than extends: pass@1 rises, pass@k does not.",
        words("""
            picoRL Training Report, "Why It Plateaued": "RL can only reinforce existing reasoning
            patterns"
        """),
        words("""
            32 samples at temperature 1 of 64 development tasks, after SFT and after 40 updates of
            GRPO. Does not rise: pass@32 is equal within 5 points. Near 100% before RL it could
            not rise: read it beside its own height. Follow-up: SFT that states until deriving is
            gone, where there is room.
        """),
        {
            "sft": letters_run(updates=0),
            "rl": letters_run(),
            "sft_states_only": letters_run("--sft-steps 200 --sft-lr 1e-3", updates=0),
            "rl_states_only": letters_run("--sft-steps 200 --sft-lr 1e-3"),
        },
        (
            Check("pass@1: after RL minus before", None, "above", margin=0.05, **POINTS),
            Check("pass@32: after RL minus before", None, "equal", margin=0.05, **POINTS),
        ),
    ),
)


# ------------------------------------------------------------------------------- verdicts
def interval(rows: list | tuple, level: float = 0.95, most: float = 1.0) -> Interval:
    """The mean with its interval; n is the number of seeds, or of units.

    rows: a number per seed; or an array [tasks] per seed, the same tasks for all; or a pair of
    independent samples. most: how large a number can be, either way, if all that were seen agree.

        Var = Var_seeds(differences) / S + Var_tasks(difference averaged over seeds) / T

    with Student's t and Satterthwaite's degrees of freedom (1946). What varies within a run is
    counted in both terms, which errs to the safe side. One seed has no interval: -inf to inf.
    """
    part = significance.variance_of_mean
    if isinstance(rows, tuple):
        a, b = (np.asarray(side, float) for side in rows)
        n, mean, parts = min(len(a), len(b)), a.mean() - b.mean(), [part(a), part(b)]
        return significance.by_variance(float(mean), parts, n, (-most, most), level)[0]
    means = np.array([np.mean(row) for row in rows], float)
    if len(means) < 2:
        return Interval(float(means[0]), -math.inf, math.inf, 1)
    parts, n = [part(means)], len(means)
    if np.ndim(rows[0]):
        parts.append(part(np.mean(rows, axis=0)))
        n = len(rows[0])  # if all seeds agree in all tasks, the tasks say how sure that is
    found = significance.by_variance(float(means.mean()), parts, n, (-most, most), level)[0]
    return replace(found, n=len(means))


def as_share(i: Interval) -> Interval:
    """Cut to between 0 and 1."""
    return replace(i, low=max(0.0, i.low), high=min(1.0, i.high))


def of_units(rows: list | tuple) -> bool:
    """Are these units of a script? They are dozens; seeds are LOOKS[-1] at most."""
    return isinstance(rows, tuple) or len(rows) > LOOKS[-1]


def judged_by(check: Check, rows: list | tuple) -> Interval:
    """The interval that gives the verdict: wider for seeds, of which more may follow."""
    return interval(rows, 0.95 if of_units(rows) else LEVEL, check.most)


def verdict(check: Check, i: Interval) -> str:
    """holds, fails or undecided; empty if nothing is predicted."""
    if not check.expect:
        return ""
    low, high, margin = i.low - check.than, i.high - check.than, check.margin
    if check.expect == "equal":
        if -margin < low and high < margin:
            return "holds"
        return "fails" if low > margin or high < -margin else "undecided"
    if check.expect == "below":
        low, high = -high, -low
    if high < max(margin, 0.0):
        return "fails"
    return "holds" if low > 0 else "undecided"


def in_parts(verdicts: list[str]) -> str:
    """'2 hold, 1 fails' of a claim of several parts that differ; else the verdict of all."""
    counts = [(verdicts.count(v), v) for v in ("holds", "fails", "undecided") if v in verdicts]
    if len(counts) == 1:
        return verdicts[0]
    plural = {"holds": "hold", "fails": "fail"}
    return ", ".join(f"{n} {v if n == 1 else plural.get(v, v)}" for n, v in counts)


def stored(claim: Claim) -> dict:
    """What results/claims.json has of a claim."""
    text = (ROOT / "results/claims.json").read_text(encoding="utf8")
    return json.loads(text)["claims"][claim.name]


def unpacked(rows: list | dict) -> list | tuple:
    """A text is a seed with one sign per task: '-0+' -> [-1.0, 0.0, 1.0]."""
    if isinstance(rows, dict):
        return rows["a"], rows["b"]
    signs = {"-": -1.0, "0": 0.0, "+": 1.0}
    return [[signs[s] for s in row] if isinstance(row, str) else row for row in rows]


def kept(claim: Claim) -> dict[str, list | tuple]:
    """{text of a check: its rows}"""
    return {text: unpacked(rows) for text, rows in stored(claim)["checks"].items()}


def beside(claim: Claim) -> list[tuple[Check, list | tuple, str]]:
    """Numbers that were measured beside the claim, as judge gives those of the claim."""
    found = []
    for text, how in stored(claim)["beside"].items():
        rows = unpacked(how.pop("rows"))
        found.append((Check(text, None, decides=False, **how), rows, ""))
    return found


def judge(claim: Claim, rows: dict[str, list | tuple]) -> list[tuple[Check, list | tuple, str]]:
    """Every check that has rows, with them and its verdict."""
    some = [(check, rows[check.text]) for check in claim.checks if len(rows.get(check.text, ()))]
    return [(check, row, verdict(check, judged_by(check, row))) for check, row in some]


def parts(claim: Claim) -> str:
    """The verdict of a claim, in parts."""
    return in_parts([said for check, _, said in judge(claim, kept(claim)) if check.decides])


# ------------------------------------------------------------------------------- words
def number(x: float, check: Check, like: float, sign: str = "") -> str:
    """One digit for points, percent and what is large. like: the mean that it stands beside."""
    digits = 1 if check.scale == 100 or abs(like) >= 10 else 3
    return f"{check.scale * x:{sign}.{digits}f}"


def sign(check: Check) -> str:
    """A difference is written with its sign."""
    return "+" if " minus " in check.text or "gain" in check.text else ""


def measured(check: Check, rows: list | tuple) -> str:
    """'+12.5 points [+3.0, +22.0]'"""
    i = interval(rows, most=check.most)
    i = as_share(i) if check.share else i
    mean, low, high = (number(x, check, i.mean, sign(check)) for x in (i.mean, i.low, i.high))
    return f"{mean}{check.unit} [{low}, {high}]".replace("inf", "∞")


def predicted(check: Check) -> str:
    than, margin = (number(x, check, x) for x in (check.than, check.margin))
    if check.expect == "equal":
        return f"equal to {than} within {margin}"
    least = f"; {margin} would matter" if check.margin else ""
    return f"{check.expect} {than}{least}" if check.expect else "(measured)"


def many(rows: list | tuple) -> str:
    """'3 seeds', or '200 units' of a script."""
    n = min(map(len, rows)) if isinstance(rows, tuple) else len(rows)
    return f"{n} {'units' if of_units(rows) else 'seed' if n == 1 else 'seeds'}"


# ------------------------------------------------------------------------------- runs
def home(flags: str) -> str:
    """CLAIM-ARM of the first claim with these flags: equal flags are one run, made once."""
    names = {arm: f"{c.name}-{name}" for c in CLAIMS[::-1] for name, arm in c.arms.items()}
    return names[flags]


def read(folder: Path) -> Run:
    lines = lambda name: [json.loads(x) for x in (folder / name).read_text().splitlines()]
    evals = [e for e in lines("evals.jsonl") if e["trained"]]
    updates = lines("metrics.jsonl") if (folder / "metrics.jsonl").exists() else []  # SFT has none
    return Run(json.loads((folder / "summary.json").read_text()), updates, evals)


def from_runs(claim: Claim, runs: Path) -> dict[str, list]:
    """{text of a check: its rows}, from the finished runs in a folder."""
    arms: dict = {name: {} for name in claim.arms}
    for name, flags in claim.arms.items():
        for seed in range(LOOKS[-1]):
            folder = runs / f"{home(flags)}-{seed}"
            if (folder / "summary.json").exists():
                arms[name][seed] = read(folder)
    return {check.text: check.value(arms) for check in claim.checks if check.value}


def show(found: list[tuple[Check, list | tuple, str]]) -> None:
    """A line per number; those with a star decide."""
    for check, rows, said in found:
        star = "*" if check.decides else " "
        line = f"  {star} {check.text}: {measured(check, rows)}, {many(rows)}"
        if check.figure is not None:
            line += f"; the document: {number(check.figure, check, check.figure)}"
        if said:
            line += f"; predicted: {predicted(check)} -> {said}"
        print(line)


def main(name: str = "", runs: str = "") -> None:
    if not name:
        for claim in CLAIMS:
            print(f"{claim.name:15} {parts(claim)}: {claim.sentence}")
        return
    claim = next((claim for claim in CLAIMS if claim.name == name), None)
    if claim is None:
        names = ", ".join(claim.name for claim in CLAIMS)
        sys.exit(f"{name}: there is no such claim; choose one of {names}")
    print(f"{claim.sentence}\n\nSource: {claim.source}.\nAs tested: {claim.reading}\n{claim.ours}")
    print("\nresults/claims.json (* decides the claim):")
    show(judge(claim, kept(claim)) + beside(claim))
    if any(check.value is None for check in claim.checks):
        print("Commit 22b9273 alone can make some of these again: its lab/claims/quantities.py.")
    if claim.arms:
        print(f"\nIts runs, for the seeds 0 to {LOOKS[0] - 1} (more: LOOKS in lab/claims.py):")
    for flags in claim.arms.values():
        print(f"  python train.py {flags} --runs runs --name {home(flags)}-SEED --seed SEED")
    if runs:
        print(f"\n{runs}:")
        show(judge(claim, from_runs(claim, Path(runs))))


if __name__ == "__main__":
    main(*sys.argv[1:3])
