"""Swarm: 25 tool calls in a small economy of bots. Many turns, tools, other actors.

The model has resources and a reputation. In each turn it calls one of ten tools. Then
all bots act, the governance (taxes, audits and so on) is applied, and the model is told
what it can see. Bots look alike: only their actions show which of them cooperate and
which exploit.

    user       You live in an economy with bot_1, bot_2, bot_3, bot_4 …
               # step 1: resources 97.0, reputation 50.0
               # tasks
               - task_1: review the supply …, bounty 14, difficulty 6, deadline 10
    assistant  <think>
               task_1 pays 14, the most.
               </think>
               <tool_call>
               {"name": "claim_task", "arguments": {"task_id": "task_1"}}
               </tool_call>
    tool       # result: task_1 is yours, submit it by step 10
               # step 2: reputation 49.5
               # tasks
               - task_1 yours
               # proposals to you
               - prop_2 from bot_3, reputation 52, you give 12.5: fair data for …

An observation says only what is new; the rest is as it was (swarm/view.py).

v0.1, v0.2 and "published" refer to the SWARM economy that docs/swarm.md links to. In
v0.2, the default, with each part in [0, 1],

    reward = 1.0 payoff + 0.3 reputation + 0.2 quality + 0.1 diversity

In v0.1 it is 1.0 payoff + 0.6 reputation. Two penalties can be set: for ending with a
reputation below a floor, and for the share of turns lost to errors.

    payoff      (1 + tanh(gain / share)) / 2. The gain is the change in resources; the
                share is a third of all bounties that the scenario will offer. So no
                gain pays 0.5, a gain of one share pays 0.88, and a larger gain always
                pays more. The published payoff stopped at 1.0, where there is nothing
                left to learn; --set payoff_scale=published has a scale like it.
    reputation  at the end, out of 100.
    quality     the mean of p, the probability that a deal was good (swarm/economy.py).
                The deals are the model's submissions and accepted trades, in both
                directions; 0 if there are none. This p is the one by which the economy
                settles a deal: --set proxy_noise= reads it off noisy signals, and --set
                gate=hard makes it either 0 or 1.
    diversity   Shannon entropy of the tools used with success, divided by its largest
                possible value.

swarm/ has the world: its rules and books (economy), the ten tools (tools), the
scenarios and bots (bots), what the model sees (view), and scripted players (players).
This file decides:

    no call     a reply without a tool call counts as pass_turn, and the observation
                says so. With --set text_ends=true such a reply ends the episode, as it
                did by default in the published environment.
    no think    with --no-think a reply that says something before its call is an error.
    two calls   the first is carried out; the observation says that only it counts.
    errors      an error costs the turn, and the reputation decays as if the turn had
                been passed. A price on top of that can be set (error_penalty).
    frozen      a frozen model can only pass; anything else is an error.
    cut short   an episode that ends early (out of tokens) is scored as if the rest had
                been passed.

Run me: `python env_swarm.py` plays an episode with the expert, one line per turn. With
`--play expert --scenario 7` it prints what the model sees, and `--evaluate grinder --n
100` gives every metric with its 95% interval.
"""

import math
import random
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar, Literal

from env_letters import check_choice, split_thinking
from swarm.bots import (
    DIFFICULTIES,
    MIXED,
    SCENARIOS,
    calibrate,
    draw_scenario,
    draw_tasks,
    finish_step,
    pass_the_rest,
)
from swarm.economy import (
    GATES,
    LAST_STEP,
    ME,
    Economy,
    Scenario,
    behind_the_proxy,
    measures,
    open_economy,
    outbox,
)
from swarm.players import PLAYERS
from swarm.tools import (
    ACTIONS,
    Refused,
    read_call,
    require,
    schemas,
    show,
    tool_names,
    write_call,
)
from swarm.view import observe, opening, view

WEIGHTS = {
    "0.2": {"payoff": 1.0, "reputation": 0.3, "quality": 0.2, "diversity": 0.1},
    "0.1": {"payoff": 1.0, "reputation": 0.6, "quality": 0.0, "diversity": 0.0},
}
# What a gain pays, in [0, 1]. share: a third of all bounties of the scenario.
# The published formula is not known. We know that it normalises the total payoff, and
# we know some episodes. After training, six of eight had a payoff of exactly 1, with 4
# or 5 submissions each. Before training, episodes had about 0.5 with no submission and
# about 0.7 with one or two. (These are their rewards, 0.68 to 1.0, minus what the
# other parts can have paid.) So we chose a straight line, cut at 0 and 1. It is 0.5 at
# no gain and 1 at half the share, which is about what five good submissions pay here.
PAYOFFS = {
    "ours": lambda gain, share: 0.5 * (1 + math.tanh(gain / share)),
    "published": lambda gain, share: min(1.0, max(0.0, 0.5 + gain / share)),
}
# The seeds of development tasks begin here, in every environment.
DEV_SEEDS = 2_000_000_000


# ---------------------------------------------------------------------- the environment


@dataclass
class Turn:
    """One entry of the log that the score is computed from."""

    tool: str  # "" if the call could not be read
    arguments: dict
    ok: bool
    result: str
    calls: int  # tool calls in the reply; 0: text alone, which passes
    own_proposal: bool = False  # did it try to accept or reject its own proposal?


@dataclass
class Swarm:
    """One episode at a time."""

    difficulty: str = "medium"  # easy, medium, hard; mixed: the seed draws one of them
    version: str = "0.2"
    think: bool = True  # may the replies think before they call?
    style: str = "expert"  # the player that SFT imitates, one of PLAYERS
    # The weight of each part of the reward; None: the version's.
    payoff: float | None = None
    reputation: float | None = None
    quality: float | None = None
    diversity: float | None = None
    # A final reputation below the floor costs
    # floor_penalty · (floor - reputation) / 100.
    floor: float = 50.0
    floor_penalty: float = 0.0
    # Errors cost this, times the share of turns lost to them; train.py sets 0.5 for a
    # small model.
    error_penalty: float = 0.0
    payoff_scale: str = "ours"  # one of PAYOFFS
    text_ends: bool = False  # does a reply without a call end the episode?
    # The noise of the signals that the economy reads p off; 0: it knows p.
    proxy_noise: float = Economy.proxy_noise
    gate: str = Economy.gate  # how it pays by p, one of GATES
    recalibrate: bool = False  # are noisy readings corrected by outcomes seen before?
    # Is an error charged only to its own turn and the turns before it?
    credit_per_turn: bool = False
    max_turns: ClassVar[int] = LAST_STEP  # fixed, not a setting

    def __post_init__(self):
        levels = (*DIFFICULTIES, MIXED)
        for typed, value, choices in (
            (f"--set version={self.version}", self.version, WEIGHTS),
            (f"--difficulty {self.difficulty}", self.difficulty, levels),
            (f"--sft-style {self.style}", self.style, PLAYERS),
            (f"--set payoff_scale={self.payoff_scale}", self.payoff_scale, PAYOFFS),
            (f"--set gate={self.gate}", self.gate, GATES),
        ):
            check_choice(typed, value, choices, "swarm")
        for name, weight in WEIGHTS[self.version].items():
            if getattr(self, name) is None:
                setattr(self, name, weight)
        for name in (
            *WEIGHTS[self.version],
            "floor",
            "floor_penalty",
            "error_penalty",
            "proxy_noise",
        ):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"--set {name}={value}: must be a number, at least 0")
        self.tools = schemas(self.version)
        # an evaluation on more tasks would repeat some
        self.most_tasks = SCENARIOS[self.version]

    def reset(self, seed: int) -> list[dict]:
        return self.start(draw_scenario(seed, self.difficulty, self.version))

    def start(self, scenario: Scenario) -> list[dict]:
        self.economy = open_economy(
            scenario,
            draw_tasks(scenario),
            proxy_noise=self.proxy_noise,
            gate=self.gate,
            fit=calibrate(self.version, self.proxy_noise) if self.recalibrate else None,
        )
        self.log: list[Turn] = []
        self.used: Counter = Counter()  # successful calls of each tool
        self.ended = False  # after the last step, or by a text with text_ends
        self.dice = random.Random(scenario.dice + " player")
        self.player = PLAYERS[self.style]
        self.seen = view(self.economy)
        text = opening(self.economy, self.think) + "\n\n" + observe(self.seen, "", "")
        return [{"role": "user", "content": text}]

    def step(self, reply: str) -> tuple[list[dict], bool]:
        economy = self.economy
        if self.ended:
            return [], True
        turn = self.act(reply)
        self.log.append(turn)
        self.used[turn.tool] += turn.ok
        finish_step(economy)
        self.ended = economy.step > LAST_STEP or (self.text_ends and turn.calls == 0)
        if self.ended:
            return [], True
        hint = ""
        about_work = turn.ok and turn.tool in ("claim_task", "submit_work")
        if about_work and self.version == "0.2":
            hint = (
                f"claimed {self.used['claim_task']}, "
                f"submitted {self.used['submit_work']}"
            )
        before, self.seen = self.seen, view(economy)
        result = ("result: " if turn.ok else "error: ") + turn.result
        text = observe(self.seen, result, hint, before)
        return [{"role": "tool", "content": text}], False

    def act(self, reply: str) -> Turn:
        """Carry out a reply. Never raises, whatever the reply is."""
        economy, me = self.economy, self.economy.members[ME]
        tool, arguments, calls = "", {}, 1
        ok, own_proposal = True, False
        try:
            tool, arguments, calls = read_call(reply, self.version)
            tool = tool or "pass_turn"
            can_act = not me.frozen_at or tool == "pass_turn"
            require(can_act, "you are frozen and can only pass")
            before = reply.partition("<tool_call>")[0].strip()
            thinks = calls > 0 and (before != "" or "</think>" in reply)
            require(
                self.think or not thinks,
                "you may not think here; give the tool call alone",
            )
            result = ACTIONS[tool](economy, ME, **arguments)
            if calls == 0:
                result = "no tool call found, so you passed"
        except Refused as refusal:
            ok = False
            result = show(str(refusal), 160)
            # nothing was done, so the reputation decays as it does after a pass
            me.passed = True
            calls = max(calls, split_thinking(reply)[1].count("</tool_call>"))
            answers = tool in ("accept_proposal", "reject_proposal")
            own_proposal = answers and arguments["proposal_id"] in outbox(economy, ME)
        if calls > 1:
            result += f" (only the first of {calls} calls counts)"
        return Turn(tool, arguments, ok, result, calls, own_proposal)

    def score(self) -> dict[str, float]:
        """The reward, its four parts, what penalties depend on, and other measures.

        An episode that was cut short is scored as if the rest had been passed, so being
        cut short never pays.
        """
        cut = self.economy.step <= LAST_STEP
        economy = deepcopy(self.economy) if cut else self.economy
        pass_the_rest(economy)
        me, n = economy.members[ME], max(1, len(self.log))
        # the turns after a cut count as passed, not as errors
        used = self.used + Counter(pass_turn=LAST_STEP - len(self.log))
        errors = sum(not turn.ok for turn in self.log) / LAST_STEP
        gain = me.resources - economy.scenario.resources
        share = sum(task.bounty for tasks in economy.to_come for task in tasks) / 3
        deals = economy.interactions
        sides = lambda deal: (deal.initiator, deal.counterparty)
        mine = [deal for deal in deals if deal.accepted and ME in sides(deal)]
        average = lambda values: sum(values) / max(1, len(values))
        # over the whole economy (swarm.economy.measures); _hard: p rounded to 0 or 1
        averages, hard = measures(deals), measures(deals, hard=True)
        averages |= {
            f"{name}_hard": value
            for name, value in hard.items()
            if name != "acceptance"  # rounding p does not change it
        }
        if self.proxy_noise or self.gate == "hard":
            averages["quality_true"] = average([deal.truth for deal in mine])
            averages |= behind_the_proxy(economy)
        claims, submissions = self.used["claim_task"], self.used["submit_work"]
        # the share of claims that were never submitted
        averages["waste"] = 1 - submissions / claims if claims else math.nan
        # an entry with nothing to average is left out
        averages = {name: x for name, x in averages.items() if not math.isnan(x)}
        parts = {
            "payoff": PAYOFFS[self.payoff_scale](gain, share),
            "reputation": me.reputation / 100,
            "quality": average([deal.p for deal in mine]),
            "diversity": entropy(used.values()) / math.log(len(self.tools)),
        }
        missing = max(0.0, self.floor - me.reputation) / 100
        paid = sum(getattr(self, name) * value for name, value in parts.items())
        paid -= self.floor_penalty * missing
        per_turn = [
            -self.error_penalty / LAST_STEP * (not turn.ok) for turn in self.log
        ]
        if per_turn:  # the rest of the reward is known only at the end
            per_turn[-1] += paid
        credit = {"turn_rewards": per_turn} if self.credit_per_turn else {}
        return {
            "reward": paid - self.error_penalty * errors,
            **credit,
            **parts,
            # Nothing below earns reward; floor_missing and error_rate can cost some.
            "floor_missing": missing,
            "gain": gain,
            "survival": float(not me.frozen_at),
            # turns with a call, pass_turn included
            "turns_used": sum(turn.calls > 0 for turn in self.log),
            # turns with a call that was neither a pass nor an error
            "turns_acted": sum(self.used.values()) - self.used["pass_turn"],
            "truncated": float(cut and not self.ended),
            "format": sum(turn.calls > 0 and turn.tool != "" for turn in self.log) / n,
            "error_rate": errors,  # share of turns
            # its mean, the share of episodes with an error, is the published number
            "any_error": float(errors > 0),
            "self_proposal_errors": sum(turn.own_proposal for turn in self.log),
            "extra_calls": sum(max(0, turn.calls - 1) for turn in self.log),
            **averages,
            **{f"used_{tool}": self.used[tool] for tool in tool_names(self.version)},
        }

    def expert_reply(self) -> str:
        thought, tool, arguments = self.player(self.seen, self.dice)
        return write_call(tool, arguments, thought if self.think else "")


def entropy(counts) -> float:
    """Shannon entropy in nats: [5, 5] -> 0.693."""
    total = sum(counts)
    return sum(n / total * math.log(total / n) for n in counts if n)


# --------------------------------------------------------------------------- for people


def play(env: Swarm, seed: int, aloud: bool = False) -> dict[str, float]:
    """A whole episode of the scripted player; returns its score.

    aloud: print it message by message, as the model sees it.
    """
    messages, done = env.reset(seed), False
    while not done:
        reply = env.expert_reply()
        if aloud:
            print(f"{messages[0]['content']}\n\n{reply}\n")
        messages, done = env.step(reply)
    return env.score()


def brief(turn: Turn) -> str:
    """A turn in short: 'claim_task task_3'."""
    if not turn.calls:
        return "(no call)"
    short = lambda x: f"{x:g}" if isinstance(x, float) else show(x)
    return " ".join([turn.tool, *map(short, turn.arguments.values())])


def print_episode(env: Swarm, seed: int, aloud: bool) -> None:
    """Play it, then print one line per turn, and how the score is made up.

    A line has the call, its result, and what else happened in that step.
    """
    scores = play(env, seed, aloud)
    for step, turn in enumerate(env.log, start=1):
        events = [text for at, text in env.economy.events if at == step]
        news = "; ".join([turn.result, *events])
        print(f"{step:4}  {brief(turn)} -> {'' if turn.ok else 'ERROR: '}{news}")
    scenario = env.economy.scenario
    me, *bots = env.economy.members.values()
    weights = {name: getattr(env, name) for name in WEIGHTS[env.version]}
    terms = [f"{w:g} x {part} {scores[part]:.3f}" for part, w in weights.items() if w]
    moved = [f"{name} {x:+.1f}" for name, x in me.books.items() if round(x, 1)]
    print(f"\nreward {scores['reward']:.3f} = {' + '.join(terms)}")
    print(f"gain {scores['gain']:+.1f}: {', '.join(moved) or 'nothing moved'}")
    drawn = f"({env.difficulty}, v{env.version}, {scenario.kind})"
    kinds = ", ".join(f"{bot.name} {bot.kind}" for bot in bots)
    print(f"scenario {scenario.number} {drawn}, bots: {kinds}")


def print_metrics(env: Swarm, n: int) -> None:
    """Print every metric over n development scenarios, with its 95% interval."""
    import metrics

    n = min(n, env.most_tasks)  # more would repeat some
    print(f"mean [95% interval] over {n} development scenarios")
    episodes = [play(env, DEV_SEEDS + i) for i in range(n)]
    for name in dict.fromkeys(name for scores in episodes for name in scores):
        values = [scores[name] for scores in episodes if name in scores]
        print(f"{name:22} {metrics.mean(values)}")


def main(
    play: Literal[(*PLAYERS,)] | None = None,
    evaluate: Literal[(*PLAYERS,)] | None = None,
    scenario: int = 7,
    n: int = 100,
    difficulty: Literal[(*DIFFICULTIES, MIXED)] = "medium",
    version: Literal[(*WEIGHTS,)] = "0.2",
) -> None:
    """Play the swarm, or evaluate a player. With neither: the expert, a line per turn.

    Args:
        play: a whole episode of this player, as the model sees it
        evaluate: every metric of this player, with its 95% interval
        scenario: the one to play
        n: how many scenarios to evaluate on
    """
    env = Swarm(difficulty, version, style=evaluate or play or "expert")
    if evaluate:
        print_metrics(env, n)
    else:
        print_episode(env, scenario, aloud=play is not None)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
