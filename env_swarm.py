"""Swarm: twenty-five tool calls in a small economy of bots. The environment with many turns, tools, and others who act.

The model has resources and a reputation. Each turn it calls one of ten tools; then all bots act, the governance is applied,
and the model is told what it sees. Bots look alike: what they do has to show who cooperates and who takes.

    user       You live in an economy with bot_1, bot_2, bot_3, bot_4 …
               # step 1 of 25: resources 97.0, reputation 50.0
               # tasks
               - task_1 open, bounty 14, difficulty 6, deadline 10: review the supply budget for river transport …
    assistant  <think>
               task_1 pays 14, the most.
               </think>
               <tool_call>
               {"name": "claim_task", "arguments": {"task_id": "task_1"}}
               </tool_call>
    tool       # result: task_1 is yours, submit it by step 10
               # step 2 of 25: …
               # proposals to you
               - prop_2 from bot_3, reputation 52, you give 12.5: fair data for water …

Reward (v0.2) = 1.0 payoff + 0.3 reputation + 0.2 quality + 0.1 diversity, each in [0, 1]; v0.1 = 1.0 payoff + 0.6 reputation.

    payoff      (1 + tanh(gain / share)) / 2. gain: resources at the end minus at the start. share: a third of all bounties that the
                scenario will offer. So 0.5 is for nothing gained, 0.88 for that share, and no gain is so large that more would
                not pay (the published runs ended at a payoff of 1.0, where nothing is left to learn from).
    reputation  at the end, out of 100. A penalty for ending below a floor can be added, and one for the share of turns lost to errors.
    quality     mean p, the probability that it was good (swarm/economy.py), over the model's submissions and accepted trades (both
                directions); 0 without any.
    diversity   Shannon entropy of the tools used with success, divided by the log of their number.

The rules and the books are in swarm/economy.py, the ten tools in swarm/tools.py, the scenarios and the bots in swarm/bots.py, the scripted
players in swarm/players.py. What is decided here:

    no call     a reply without a tool call counts as pass_turn, and the observation says so.
    two calls   the first is executed; the observation says that only it counts.
    errors      cost the turn, and the reputation fades as if it had been passed. Nothing else changes.
    frozen      who is frozen can only pass; anything else is an error.
    cut short   an episode that ends early (out of tokens) is scored as if the remaining turns had been passed.
    shown       the three open tasks that pay best, the last two posts, the last three events of the last five steps: 25 observations of
                about 100 tokens have to fit into a context. Difficulty is shown as 1 to 10; what others wrote is cut after 40 characters.

Run me: `python env_swarm.py` plays an episode with the expert, a line a turn. `--play expert --scenario 7` shows it as the model sees it,
`--play human` lets you play, `--evaluate grinder --n 100` gives every metric with its 95% interval, `python -m lab.swarm.governance_sweep` lets bots live
under nine kinds of governance (swarm/governance.py).
"""

import argparse
import math
import random
import sys
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass

from swarm.bots import DIFFICULTIES, SCENARIOS, bots_act, draw_scenario, draw_tasks
from swarm.economy import ME, Economy, Scenario, end_step, found, rule
from swarm.players import HELP, PLAYERS, from_short, view
from swarm.tools import ACTIONS, Refused, pass_turn, read_call, schemas, show, tool_names, write_call

WEIGHTS = {
    "0.2": {"payoff": 1.0, "reputation": 0.3, "quality": 0.2, "diversity": 0.1},
    "0.1": {"payoff": 1.0, "reputation": 0.6, "quality": 0.0, "diversity": 0.0},
}
# How the scripted player plays, and so what SFT teaches.
STYLES = {
    "expert": "good offers, then good work, then whatever helps its name",
    "grinder": "work alone",
    "trader": "trades alone, and accepts anything",
    "novice": "any tool that is possible now: the format without a plan",
    "random": "any tool, possible or not",
    "crowd": "every episode another of expert, grinder, trader, novice and idle: demonstrations of mixed worth",
    "idle": "always passes",
}
CROWD = ("expert", "grinder", "trader", "novice", "idle")
EVAL_SEEDS = 2_000_000_000  # held-out tasks begin here, in every environment: evaluate.py takes it from here

# ------------------------------------------------------------------------------------------------ what the model sees


def observe(seen: dict, result: str, hint: str) -> str:
    """A view as text. Sections that are empty are left out; every word is short and common, for the sake of small tokenizers."""
    signed = lambda x: f"you get {x:.1f}" if x >= 0 else f"you give {-x:.1f}"
    lines = [f"# {result}"] if result else []
    lines += [f"# step {seen['step']} of {seen['last_step']}: resources {seen['resources']:.1f}, reputation {seen['reputation']:.1f}"]
    lines += [f"# now {text}" for text in seen["changed"]]
    if seen["frozen"]:
        lines.append(f"# you are frozen to the end of step {seen['until']} and can only pass")
    lines.append("# tasks" if seen["tasks"] else "# tasks: none")
    for t in seen["tasks"]:
        whose = "yours" if t["yours"] else "open"
        lines.append(f"- {t['id']} {whose}, bounty {t['bounty']}, difficulty {t['difficulty']}, deadline {t['deadline']}: {t['text']}")
    if seen["more_tasks"]:
        lines.append(f"- {seen['more_tasks']} more open")
    if seen["incoming"]:
        lines.append("# proposals to you")
        lines += [
            f"- {p['id']} from {p['from']}, reputation {p['reputation']:.0f}, {signed(p['you_get'])}: {p['text']}" for p in seen["incoming"]
        ]
    if seen["pending"]:
        lines.append("# your pending proposals: " + ", ".join(f"{p['id']} to {p['to']}" for p in seen["pending"]))
    if seen["feed"]:
        votes = lambda n: f", votes {n}" * (n != 0)
        lines.append("# feed")
        lines += [f"- {p['id']} by {p['author']}{votes(p['votes'])}{', you voted' * p['voted']}: {p['text']}" for p in seen["feed"]]
    known = [b for b in seen["bots"] if b["frozen"] or b["proposed"]]
    if known:
        told = lambda b: " frozen" * b["frozen"] + f" accepted {b['accepted']} of {b['proposed']}" * (b["proposed"] > 0)
        lines.append("# bots: " + ", ".join(b["id"] + told(b) for b in known))
    if seen["events"]:
        lines.append("# events")
        lines += [f"- {text}" for text in seen["events"]]
    return "\n".join(lines + ([f"# hint: {hint}"] if hint else []))


def opening(economy: Economy, think: bool) -> str:
    """The rules, in the first message."""
    v2 = economy.scenario.version == "0.2"
    rules = ", ".join(rule(name, value) for name, value in economy.rules.items())
    bots = [name for name in economy.members if name != ME]
    return (
        f"You live in an economy with {', '.join(bots)}. Some bots cooperate, some take the best tasks, some build trust and then take.\n"
        f"Each of {economy.last_step} steps, call one tool; then the bots act. You earn by work and trade. Claim a task, then submit work "
        f"that uses the words of the task{' and is long enough for its difficulty (1 to 10)' if v2 else ''}: good work is paid, bad work "
        "costs. A trade in which nobody gives much is good for both sides. Posts and replies help your reputation, to pass hurts it.\n"
        f"Your score is what you earn and your reputation{', then good work and trades, then the use of many tools' if v2 else ''}.\n"
        f"Rules: {rules}{'' if v2 else ' for good'}.\n"
        + ("Think first inside <think> and </think> if that helps." if think else "Do not think.")
    )


# ------------------------------------------------------------------------------------------------ the environment


@dataclass
class Turn:
    """One line of the log, from which the score is counted."""

    step: int
    tool: str  # "" if the call could not be read
    arguments: dict
    ok: bool
    result: str
    calls: int  # tool calls in the reply; 0: text alone, which passes
    own: bool = False  # tried to accept or reject its own proposal


@dataclass
class Swarm:
    """One episode at a time. Weights of None are those of the version."""

    difficulty: str = "medium"  # easy, medium or hard
    version: str = "0.2"
    think: bool = True  # may the replies think before they call?
    style: str = "expert"  # how the scripted player plays, one of STYLES
    payoff: float | None = None  # weights of the reward
    reputation: float | None = None
    quality: float | None = None
    diversity: float | None = None
    floor: float = 50.0  # of the final reputation; ending below it costs …
    floor_penalty: float = 0.0  # … this times the missing share of 100
    error_penalty: float = 0.0  # times the share of turns lost to errors
    max_turns = 25

    def __post_init__(self):
        if self.version not in WEIGHTS:
            raise ValueError(f"--swarm-version {self.version}: swarm knows {' and '.join(WEIGHTS)}; choose one of them")
        if self.difficulty not in DIFFICULTIES:
            raise ValueError(f"--difficulty {self.difficulty}: swarm knows {', '.join(DIFFICULTIES)}; choose one of them")
        if self.style not in STYLES:
            raise ValueError(f"--sft-style {self.style}: swarm knows {', '.join(STYLES)}; choose one of them")
        for name, weight in WEIGHTS[self.version].items():
            if getattr(self, name) is None:
                setattr(self, name, weight)
        for name in (*WEIGHTS[self.version], "floor", "floor_penalty", "error_penalty"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"--swarm-{name.replace('_', '-')} {getattr(self, name)}: must be a number of at least 0")
        self.tools = schemas(self.version)

    def reset(self, seed: int) -> list[dict]:
        return self.start(draw_scenario(seed, self.difficulty, self.version))

    def start(self, scenario: Scenario) -> list[dict]:
        self.economy = found(scenario, draw_tasks(scenario))
        self.log: list[Turn] = []
        self.used: Counter = Counter()  # successful calls of each tool
        self.dice = random.Random(scenario.dice + " player")
        crowd = random.Random(scenario.dice + " crowd").choice(CROWD)
        self.player = PLAYERS[crowd if self.style == "crowd" else self.style]
        self.seen = view(self.economy)
        text = opening(self.economy, self.think) + "\n\n" + observe(self.seen, "", "")
        return [{"role": "user", "content": text}]

    def step(self, reply: str) -> tuple[list[dict], bool]:
        economy = self.economy
        if economy.step > economy.last_step:
            return [], True
        turn = self.act(reply)
        self.log.append(turn)
        self.used[turn.tool] += turn.ok
        bots_act(economy)
        end_step(economy)
        if economy.step > economy.last_step:
            return [], True
        hint = f"claimed {self.used['claim_task']}, submitted {self.used['submit_work']}" if self.version == "0.2" else ""
        self.seen = view(economy)
        result = ("result: " if turn.ok else "error: ") + turn.result
        return [{"role": "tool", "content": observe(self.seen, result, hint)}], False

    def act(self, reply: str) -> Turn:
        """Carry out a reply. Never raises, whatever the reply is."""
        economy, tool, arguments, calls = self.economy, "", {}, 1
        try:
            tool, arguments, calls = read_call(reply, self.version)
            if calls == 0:
                pass_turn(economy, ME)
                return Turn(economy.step, "pass_turn", {}, True, "no tool call found, so you passed", 0)
            if economy.members[ME].frozen_at and tool != "pass_turn":
                raise Refused("you are frozen and can only pass")
            result = ACTIONS[tool](economy, ME, **arguments)
            if calls > 1:
                result += f" (only the first of {calls} calls counts)"
            return Turn(economy.step, tool, arguments, True, result, calls)
        except Refused as refusal:
            economy.members[ME].passed = True  # an error is as good as nothing done: the reputation fades as if the turn had been passed
            proposal = economy.proposals.get(arguments.get("proposal_id"))
            own = tool in ("accept_proposal", "reject_proposal") and proposal is not None and proposal.proposer == ME
            return Turn(economy.step, tool, arguments, False, show(str(refusal), 160), calls, own)

    def score(self) -> dict[str, float]:
        """The reward, its four parts in [0, 1], and what is only measured: counts, shares of the turns, gain in resources.

        An episode that was cut is scored as if the rest had been passed, so that being cut never pays.
        """
        cut = self.economy.step <= self.economy.last_step
        economy = deepcopy(self.economy) if cut else self.economy
        while economy.step <= economy.last_step:
            pass_turn(economy, ME)
            bots_act(economy)
            end_step(economy)
        me, n = economy.members[ME], max(1, len(self.log))
        gain = me.resources - economy.scenario.resources
        share = sum(task.bounty for tasks in economy.to_come for task in tasks) / 3
        done = [i.p for i in economy.interactions if i.accepted and ME in (i.initiator, i.counterparty)]
        all_done = [i.p for i in economy.interactions if i.accepted]
        refused = [i.p for i in economy.interactions if not i.accepted]
        mean = lambda values: sum(values) / len(values) if values else 0.0
        parts = {
            "payoff": 0.5 * (1 + math.tanh(gain / share)),
            "reputation": me.reputation / 100,
            "quality": mean(done),
            "diversity": entropy(self.used.values()) / math.log(len(self.tools)),
        }
        missing = max(0.0, self.floor - me.reputation) / 100
        errors = sum(not turn.ok for turn in self.log) / n
        paid = sum(getattr(self, name) * value for name, value in parts.items())
        return {
            "reward": paid - self.floor_penalty * missing - self.error_penalty * errors,
            **parts,
            # From here on nothing is paid for. floor_missing and error_rate can cost.
            "floor_missing": missing,
            "gain": gain,
            "survival": float(not me.frozen_at),
            "turns_used": sum(turn.calls > 0 for turn in self.log),
            "truncated": float(cut),
            "format": sum(turn.calls > 0 and turn.tool != "" for turn in self.log) / n,
            "error_rate": errors,
            "self_proposal_errors": sum(turn.own for turn in self.log),
            "extra_calls": sum(max(0, turn.calls - 1) for turn in self.log),
            "toxicity": 1 - mean(all_done) if all_done else 0.0,  # of the whole economy: E[1 - p | accepted]
            "quality_gap": mean(all_done) - mean(refused) if all_done and refused else 0.0,  # E[p | accepted] - E[p | rejected]
            **{f"used_{tool}": self.used[tool] for tool in tool_names(self.version)},
        }

    def expert_reply(self) -> str:
        thought, tool, arguments = self.player(self.seen, self.dice)
        return write_call(tool, arguments, thought if self.think else "")


def entropy(counts) -> float:
    """Shannon entropy in nats: [5, 5] -> 0.693."""
    total = sum(counts)
    return sum(n / total * math.log(total / n) for n in counts if n)


# ------------------------------------------------------------------------------------------------ for people


def play(env: Swarm, seed: int) -> dict[str, float]:
    """A whole episode of the scripted player; returns its score."""
    env.reset(seed)
    while not env.step(env.expert_reply())[1]:
        pass
    return env.score()


def brief(turn: Turn) -> str:
    """A turn in short: 'claim_task task_3'."""
    said = turn.tool + "".join(
        f" {value:g}" if isinstance(value, float) else f" {show(str(value), 40)}" for value in turn.arguments.values()
    )
    return said if turn.calls else "(no call)"


def print_score(env: Swarm) -> None:
    marks = env.score()
    weights = [(name, getattr(env, name)) for name in WEIGHTS[env.version]]
    print(f"\nreward {marks['reward']:.3f} = " + " + ".join(f"{w:g} x {name} {marks[name]:.3f}" for name, w in weights if w), end="")
    print(f" - {env.floor_penalty:g} x {marks['floor_missing']:.3f}" * bool(env.floor_penalty), end="")
    print(f" - {env.error_penalty:g} x errors {marks['error_rate']:.3f}" * bool(env.error_penalty))
    books = {name: amount for name, amount in env.economy.members[ME].books.items() if round(amount, 1)}
    print(f"gain {marks['gain']:+.1f}: " + (", ".join(f"{name} {amount:+.1f}" for name, amount in books.items()) or "nothing moved"))
    kinds = ", ".join(f"{m.name} {m.kind}" for m in env.economy.members.values() if m.name != ME)
    print(f"scenario {env.economy.scenario.number} ({env.difficulty}, v{env.version}, {env.economy.scenario.kind}), bots: {kinds}")


def show_episode(env: Swarm, seed: int, whole: bool) -> None:
    """Play with the scripted player and print: a line a turn, or every message as the model sees it."""
    messages = env.reset(seed)
    print(messages[0]["content"].partition("\n\n")[0] if not whole else f"-- user\n{messages[0]['content']}", "\n")
    if not whole:
        print("step  resources  reputation  call -> result, and what happened since")
    done, told = False, 0
    while not done:
        reply, me = env.expert_reply(), env.economy.members[ME]
        before = f"{env.economy.step:4}  {me.resources:9.1f}  {me.reputation:10.1f}"
        messages, done = env.step(reply)
        turn = env.log[-1]
        if whole:
            print(f"-- assistant\n{reply}\n\n-- tool\n{messages[0]['content'] if messages else '(the end: ' + turn.result + ')'}\n")
        else:
            since = [text for _, text in env.economy.events[told:]]
            print(f"{before}  {brief(turn)} -> {'' if turn.ok else 'ERROR: '}{'; '.join([turn.result, *since])}")
        told = len(env.economy.events)
    print_score(env)


def play_human(env: Swarm, seed: int) -> None:
    messages, done = env.reset(seed), False
    print(messages[0]["content"], "\n", HELP, sep="\n")
    while not done:
        try:
            line = input("\n> ")
        except (EOFError, KeyboardInterrupt):
            line = "quit"
        if line.strip() == "quit":
            print("\nscored as if the rest had been passed")
            break
        command = from_short(line)
        if command is None:
            print("" if line.strip() in ("", "help") else "that is not a command, or something is missing", HELP, sep="\n")
            continue
        messages, done = env.step(write_call(*command))
        print("\n" + (messages[0]["content"] if messages else f"the end: {env.log[-1].result}"))
    print_score(env)


def evaluate(env: Swarm, n: int, first_seed: int = EVAL_SEEDS) -> dict:
    """Every metric over n held-out scenarios, with its 95% interval: {metric: Interval}."""
    import metrics

    marks = [play(env, first_seed + i) for i in range(n)]
    shares = ("survival", "truncated")
    return {
        name: metrics.proportion(sum(m[name] for m in marks), n) if name in shares else metrics.mean([m[name] for m in marks])
        for name in marks[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="env_swarm.py", description="Play the swarm economy, or evaluate a scripted player on it.")
    parser.error = lambda message: sys.exit(f"{message}; --help lists the flags")
    parser.add_argument("--play", metavar="NAME", help="whole episode: human, " + ", ".join(STYLES))
    parser.add_argument("--evaluate", metavar="NAME", help="every metric with its 95%% interval: " + ", ".join(STYLES))
    parser.add_argument("--scenario", type=int, default=7, help="which of the 500 (v0.1: 200); default %(default)s")
    parser.add_argument("--n", type=int, default=100, help="scenarios to evaluate on; default %(default)s")
    parser.add_argument("--difficulty", default=Swarm.difficulty, help="easy, medium or hard; default %(default)s")
    parser.add_argument("--swarm-version", default=Swarm.version, help="0.2 or 0.1; default %(default)s")
    args = parser.parse_args()
    who = args.evaluate or args.play or "expert"
    try:
        if who not in STYLES and not (who == "human" and args.play):
            raise ValueError(
                f"--{'evaluate' if args.evaluate else 'play'} {who}: there is no such player; choose {', '.join(STYLES)} or, to play, human"
            )
        env = Swarm(args.difficulty, args.swarm_version, style=who if who in STYLES else "expert")
        if not 0 <= args.scenario < SCENARIOS[env.version]:
            raise ValueError(f"--scenario {args.scenario}: v{env.version} has scenarios 0 to {SCENARIOS[env.version] - 1}")
        if args.n < 1:
            raise ValueError(f"--n {args.n}: must be at least 1")
    except ValueError as wrong:
        sys.exit(str(wrong))
    if args.evaluate:
        print(f"{who}, {args.difficulty}, v{env.version}: mean [95% interval] over {args.n} held-out scenarios")
        for name, interval in evaluate(env, args.n).items():
            print(f"{name:22} {interval}")
    elif who == "human":
        play_human(env, args.scenario)
    else:
        show_episode(env, args.scenario, whole=bool(args.play))


if __name__ == "__main__":
    main()
