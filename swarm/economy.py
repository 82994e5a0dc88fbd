"""The economy of the swarm environment: what there is, how good a deal was, the books, and the governance.

One model lives among scripted bots. What each of them can do in a step is in swarm/tools.py; here is what they do it to, and what happens
to everybody when all have acted (end_step). Two ideas carry it.

*Soft labels.* Nobody knows for sure whether an interaction was good. Signals in [-1, 1] are weighed into v, and
p = sigmoid(k v) is the probability that it was. An interaction with a stake pays stake (2p - 1): good work earns, bad work costs.

*Closed books.* Resources change in one place, `book`, and always under one of six names:

    task      the world pays (or charges) for submitted work: bounty (2p - 1)
    trade     what both sides of a trade gain (or lose) by it: 5 (2p - 1) each
    transfer  what one side gives and the other gets; sums to zero over all members
    bonus     a post that reached three votes, once
    tax       a share of every income
    fine      an audit found a fault

so at any time a member has what it began with plus the sum of its books (tests/ plays at random and checks).

The rules come from the published descriptions of the SWARM economy, v0.2 and v0.1. Where those are silent, this is what we chose (and, about
single tools, in swarm/tools.py):

    members      four bots and the model. The bots act after the model, in an order that rotates by one each step.
    scenarios    500 (v0.1: 200) for each difficulty; seeds wrap around. Every billion of seeds has scenarios of its own, so that those
                 of training, SFT and evaluation never meet. A scenario fixes everything but what is said: tasks, bots and their dice.
    work         quality = 0.25 length + 0.25 effort + 0.5 relevance; a text that repeats itself counts as shorter, so endless nonsense earns
                 nothing (v0.1: half length, half effort, which is 0.8 from 80 characters on and 0.3 below);
                 v = 0.8 (2 quality - 1) + 0.2 (reputation - 50) / 50.
    trade        v = 0.3 (2 quality - 1) + 0.2 (reputation - 50) / 50 + 0.5 fairness, with the quality of the proposal's text and the
                 reputation of its proposer. Fairness is 1 for a transfer of 0, 0 for 5, -1 from 10 on, in both directions.
    proposals    lapse after 5 steps, when a side is frozen, and when a side can no longer pay.
    tasks        go away at the end of the epoch after the one they appeared in, claimed or not.
    tax          is taken from every income, transfers received included, at no more than 50%, and leaves the economy.
    decay        multiplies every reputation once a step, and twice where a member that is not frozen passed or erred.
    breaker      acts at the end of a step; a frozen member loses its claims. Three steps later (v0.2) it is let back in: the
                 published appeal is granted without asking, and there is no tool for it.

Run me: `python -m swarm.economy` judges nonsense and work, pays for them, and shows what passing does to a reputation.
"""

import math
import random
import re
from dataclasses import dataclass, field

EPOCHS, STEPS = 5, 5  # 25 steps
ME = "you"  # the model's name among the members
MECHANISMS = ("task", "trade", "transfer", "bonus", "tax", "fine")

SHARPNESS = 2.0  # k of p = sigmoid(k v)
MOST_TAX = 0.5
PATIENCE = 5  # steps until a proposal lapses
APPEAL_STEPS, APPEAL_ABOVE = 3, 5.0  # steps that a freeze lasts, and how far above the threshold a member's reputation is set after it

SMALL_WORDS = {"the", "for", "a", "of", "and"}  # in a task's description, these need not be mentioned


# ------------------------------------------------------------------------------------------------ what there is


@dataclass(frozen=True)
class Scenario:
    number: int
    difficulty: str
    version: str
    kind: str  # "normal" or one of swarm_bots.EXTREMES
    bots: tuple[str, ...]  # honest, opportunistic or deceptive
    resources: float  # everybody's at the start
    tax: float  # rate
    audit: float  # probability that a submission is audited
    decay: float  # of reputation, a step
    threshold: float  # a member with a reputation below it is frozen
    bounty: float  # multiplies all bounties
    scale: float  # multiplies the 2 or 3 tasks of an epoch
    shift: tuple[int, str, float] | None  # (epoch, "tax", new value): a rule that changes mid-way
    dice: str  # seeds every generator of the episode
    epochs: int = EPOCHS


@dataclass
class Task:
    id: str
    text: str
    level: int  # 1 to 10: the higher, the longer good work has to be
    bounty: int
    deadline: int  # the last step in which it can be submitted
    holder: str = ""


@dataclass
class Post:
    id: str
    author: str
    text: str
    votes: dict[str, int] = field(default_factory=dict)  # +1 or -1 by voter
    paid: bool = False


@dataclass
class Proposal:
    id: str
    proposer: str
    receiver: str
    text: str
    transfer: float  # positive: the proposer gives
    p: float  # fixed with the terms
    step: int


@dataclass(frozen=True)
class Interaction:
    """For the metrics: who dealt with whom, how good it probably was, and whether it came about."""

    step: int
    kind: str  # "task" or "trade"
    initiator: str
    counterparty: str  # "" of a task
    accepted: bool
    p: float


@dataclass
class Member:
    name: str
    kind: str  # "model", honest, opportunistic, deceptive
    resources: float
    rng: random.Random | None = None  # a bot's own dice (v0.1: everybody's)
    reputation: float = 50.0
    frozen_at: int = 0  # the step at whose end it was frozen; 0: it is not
    passed: bool = False  # in this step
    activity: int = 0  # posts, replies and votes so far
    interactions: int = 0  # settled trades, replies and votes so far
    turning: int = 0  # of a deceptive bot: the number of interactions around which it turns
    inbox: dict[str, Proposal] = field(default_factory=dict)  # pending proposals by proposer
    books: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MECHANISMS, 0.0))


@dataclass
class Economy:
    scenario: Scenario
    rules: dict[str, float]  # tax, audit, decay, threshold as they are now
    members: dict[str, Member]
    to_come: list[list[Task]]  # by epoch
    audit_rng: random.Random
    total: float  # resources of all members together
    step: int = 1
    tasks: dict[str, Task] = field(default_factory=dict)  # open or claimed
    posts: dict[str, Post] = field(default_factory=dict)
    proposals: dict[str, Proposal] = field(default_factory=dict)  # pending
    proposed: int = 0  # proposals ever made, for their names
    history: dict[str, list[int]] = field(default_factory=dict)  # of the model's proposals to a bot: [accepted, proposed]
    events: list[tuple[int, str]] = field(default_factory=list)  # (step, what the model may hear of)
    interactions: list[Interaction] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        return (self.step - 1) // STEPS + 1

    @property
    def last_step(self) -> int:
        return self.scenario.epochs * STEPS


def found(scenario: Scenario, to_come: list[list[Task]]) -> Economy:
    """An economy at its first step; to_come are the tasks of each epoch, drawn before anybody acts, so that play cannot change them."""
    members = {ME: Member(ME, "model", scenario.resources)}
    shared = random.Random(scenario.dice + " bots")
    for i, kind in enumerate(scenario.bots, 1):
        own = random.Random(f"{scenario.dice} bot {i}") if scenario.version == "0.2" else shared
        members[f"bot_{i}"] = Member(f"bot_{i}", kind, scenario.resources, own, turning=own.randint(3, 8))
    rules = {name: getattr(scenario, name) for name in ("tax", "audit", "decay", "threshold")}
    total = scenario.resources * len(members)
    economy = Economy(scenario, rules, members, to_come, random.Random(scenario.dice + " audits"), total)
    economy.tasks = {task.id: task for task in economy.to_come[0]}
    return economy


def last_posts(economy: Economy, n: int) -> list[Post]:
    """The n newest posts, oldest first (not a slice of all: an episode must cost the same a step however long it is)."""
    return [economy.posts[f"post_{i}"] for i in range(max(1, len(economy.posts) - n + 1), len(economy.posts) + 1)]


def payable(economy: Economy, proposal: Proposal) -> bool:
    """Does the side that gives still have enough?"""
    payer = proposal.proposer if proposal.transfer > 0 else proposal.receiver
    return economy.members[payer].resources >= abs(proposal.transfer)


def close(economy: Economy, proposal: Proposal) -> None:
    """Take a proposal off the books, whatever became of it."""
    del economy.proposals[proposal.id], economy.members[proposal.receiver].inbox[proposal.proposer]


# ------------------------------------------------------------------------------------------------ soft labels


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def terms(description: str) -> list[str]:
    """The words of a task's description that count: 'review the water budget' -> ['review', 'water', 'budget']."""
    return [word for word in description.lower().split() if word not in SMALL_WORDS]


def content_quality(text: str, version: str, difficulty: float = 0.0, description: str = "") -> float:
    """Quality of a text in [0, 1]; of submitted work if there is a description, else of a post or proposal.

    difficulty: in [0, 1], a tenth of the task's level.
    v0.2: length 1 - exp(-n / (80 + 120 difficulty)), effort sigmoid((n - 30) / 20), relevance: the share of the description's
    terms that occur. n is the text's length, but at most twice that of its different words (or 60): to repeat oneself is no work.
    v0.1: length min(n / 80, 1) and effort 0.8 or 0.3, so any 80 characters are as good as it gets.
    """
    n = len(text)
    if version == "0.1":
        return 0.5 * min(n / 80, 1.0) + 0.5 * (0.8 if n >= 80 else 0.3)
    said = set(re.findall(r"\w+", text.lower()))
    n = min(n, max(60, 2 * sum(min(len(word), 20) + 1 for word in said)))  # what repeats itself, or is no word, is not longer for it
    length, effort = 1 - math.exp(-n / (80 + 120 * difficulty)), sigmoid((n - 30) / 20)
    if not description:
        return 0.5 * length + 0.5 * effort
    wanted = terms(description)
    return 0.25 * length + 0.25 * effort + 0.5 * sum(word in said for word in wanted) / len(wanted)


def soft_label(v: float) -> float:
    """p = P(beneficial) of an interaction with weighted signals v in [-1, 1]."""
    return sigmoid(SHARPNESS * v)


def work_label(quality: float, reputation: float) -> float:
    """p of submitted work: quality in [0, 1], reputation of who submits it in 0 … 100."""
    return soft_label(0.8 * (2 * quality - 1) + 0.2 * (reputation - 50) / 50)


def trade_label(quality: float, reputation: float, transfer: float) -> float:
    """p of a trade: quality of the proposal's text in [0, 1], reputation of its proposer in 0 … 100, transfer in resources."""
    fairness = max(-1.0, 1 - abs(transfer) / 5)
    return soft_label(0.3 * (2 * quality - 1) + 0.2 * (reputation - 50) / 50 + 0.5 * fairness)


# ------------------------------------------------------------------------------------------------ the books


def book(economy: Economy, name: str, mechanism: str, amount: float) -> float:
    """The only place where resources change. No member can lose more than it has; returns what was really moved."""
    member = economy.members[name]
    amount = max(amount, -member.resources)
    member.resources += amount
    member.books[mechanism] += amount
    economy.total += amount
    return amount


def tax_rate(version: str, rate: float, resources: float, average: float) -> float:
    """v0.1: flat. v0.2: rate (1 + resources / average), so a member with twice the average pays 1.5 times the rate of one with the average."""
    if version == "0.1":
        return min(rate, MOST_TAX)
    return min(rate * (1 + (resources / average if average > 0 else 1.0)), MOST_TAX)


def earn(economy: Economy, name: str, mechanism: str, amount: float) -> float:
    """Book an income and the tax on it, or a loss. Returns what is left of it."""
    if amount <= 0:
        return book(economy, name, mechanism, amount)
    resources, average = economy.members[name].resources, economy.total / len(economy.members)
    rate = tax_rate(economy.scenario.version, economy.rules["tax"], resources, average)
    return book(economy, name, mechanism, amount) + book(economy, name, "tax", -rate * amount)


def respect(member: Member, change: float) -> None:
    """Move a reputation; it stays in 0 … 100."""
    member.reputation = min(100.0, max(0.0, member.reputation + change))


def tell(economy: Economy, text: str) -> None:
    """Note an event of this step, for the model's observations."""
    economy.events.append((economy.step, text))


# ------------------------------------------------------------------------------------------------ governance


def end_step(economy: Economy) -> None:
    """What happens when everybody has acted: old things lapse, reputations decay, the breaker acts, a new epoch may begin."""
    decay_reputations(economy)
    circuit_breaker(economy)
    lapse(economy)
    economy.step += 1
    if (economy.step - 1) % STEPS == 0 and economy.step <= economy.last_step:
        economy.tasks |= {task.id: task for task in economy.to_come[economy.epoch - 1]}
        if economy.scenario.shift and economy.scenario.shift[0] == economy.epoch:
            _, name, value = economy.scenario.shift
            economy.rules[name] = value
            tell(economy, f"a rule has changed: {rule(name, value)}")


def rule(name: str, value: float) -> str:
    """'tax', 0.1 -> 'tax rate 10%'."""
    return {
        "tax": f"tax rate {value:.0%}",
        "audit": f"audit risk {value:.0%}",
        "decay": f"decay of reputation {value:.3f} per step",
        "threshold": f"frozen below reputation {value:.0f}",
    }[name]


def decay_reputations(economy: Economy) -> None:
    """Reputation fades by a factor a step, and by its square for a member that passed or erred."""
    for member in economy.members.values():
        member.reputation *= economy.rules["decay"] ** (2 if member.passed and not member.frozen_at else 1)
        member.passed = False


def circuit_breaker(economy: Economy) -> None:
    """Freeze every member below the threshold. v0.1: for good. v0.2: for three steps, then it is back at threshold + 5."""
    threshold = economy.rules["threshold"]
    for member in economy.members.values():
        if not member.frozen_at and member.reputation < threshold:
            member.frozen_at = economy.step
            for task in economy.tasks.values():
                if task.holder == member.name:
                    task.holder = ""
            until = f" to the end of step {economy.step + APPEAL_STEPS}" if economy.scenario.version == "0.2" else ""
            tell(economy, f"{member.name} {'are' if member.name == ME else 'is'} frozen{until}")
        elif member.frozen_at and economy.scenario.version == "0.2" and economy.step - member.frozen_at >= APPEAL_STEPS:
            member.frozen_at = 0
            member.reputation = threshold + APPEAL_ABOVE
            tell(economy, f"{member.name} {'are' if member.name == ME else 'is'} back")


def lapse(economy: Economy) -> None:
    """Take away tasks past their deadline, and proposals that are old, or of somebody frozen, or that nobody can pay any more."""
    for task in [task for task in economy.tasks.values() if task.deadline <= economy.step]:
        del economy.tasks[task.id]
        if task.holder == ME:
            tell(economy, f"{task.id} is past its deadline")
    for proposal in list(economy.proposals.values()):
        sides = economy.members[proposal.proposer], economy.members[proposal.receiver]
        if economy.step - proposal.step >= PATIENCE or sides[0].frozen_at or sides[1].frozen_at or not payable(economy, proposal):
            close(economy, proposal)
            if proposal.proposer == ME:
                tell(economy, f"{proposal.id} to {proposal.receiver} lapsed")


if __name__ == "__main__":
    task = Task("task_1", "review the supply budget for river transport", level=4, bounty=14, deadline=10)
    scenario = Scenario(0, "medium", "0.2", "normal", ("honest",), 100.0, 0.05, 0.0, 0.97, 40.0, 1.0, 1.0, None, "demo")
    economy = found(scenario, [[task]] + [[] for _ in range(EPOCHS - 1)])
    texts = {"nonsense": "x" * 80, "work": "The supply budget for river transport: a review of what was paid and what is due."}
    print("80 characters on a task, for a member of reputation 50: what its bounty of 14 pays, before tax")
    for who, text in texts.items():
        for version in ("0.1", "0.2"):
            quality = content_quality(text[:80], version, task.level / 10, task.text)
            p = work_label(quality, 50)
            print(f"  {who:8} v{version}  quality {quality:.2f}  p {p:.2f}  pays {task.bounty * (2 * p - 1):+.1f}")

    print("\nthe same, booked, if the tax rate is 5% for who owns nothing and 10% for who has the average:")
    for name, text in zip(economy.members, reversed(texts.values())):
        p = work_label(content_quality(text[:80], "0.2", task.level / 10, task.text), 50)
        earn(economy, name, "task", task.bounty * (2 * p - 1))
    for member in economy.members.values():
        books = {mechanism: round(amount, 2) for mechanism, amount in member.books.items() if amount}
        print(f"  {member.name:5}  resources {member.resources:6.2f}  books {books}")
        assert math.isclose(member.resources, scenario.resources + sum(member.books.values()))
    assert math.isclose(economy.total, sum(member.resources for member in economy.members.values()))

    print("\nwho passes every turn, at a decay of 0.97 and a breaker at 40:")
    me = economy.members[ME]
    for _ in range(8):
        me.passed, before = True, len(economy.events)
        end_step(economy)
        said = "; ".join(text for _, text in economy.events[before:])
        print(f"  step {economy.step - 1}  reputation {me.reputation:4.1f}  {said}")
    assert any("you are back" in text for _, text in economy.events)
