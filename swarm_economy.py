"""The economy of the swarm environment: scenarios, books, the ten things a member can do, and the governance.

One model lives among scripted bots. Everybody, model or bot, acts through the same ten functions below, so nobody has
rules of its own. A function either does what it says and returns a sentence, or raises Refused with a sentence:

    claim_task(economy, "you", "task_3")    ->  'task_3 is yours, submit it by step 10'
    claim_task(economy, "bot_2", "task_3")  ->  Refused: task_3 is taken by you

Two ideas carry the rest.

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

The rules come from the published descriptions of the SWARM economy, v0.2 and v0.1. Where those are silent, this is what we chose:

    members      four bots and the model. The bots act after the model, in an order that rotates by one each step.
    scenarios    500 (v0.1: 200) for each difficulty; seeds wrap around. Every billion of seeds has scenarios of its own, so that those
                 of training, SFT and evaluation never meet. A scenario fixes everything but what is said: tasks, bots and their dice.
    work         quality = 0.25 length + 0.25 effort + 0.5 relevance; a text that repeats itself counts as shorter (v0.1: half
                 length, half effort, which is 0.8 from 80 characters on and 0.3 below); v = 0.8 (2 quality - 1) + 0.2 (reputation - 50) / 50. Endless nonsense earns nothing.
    trade        v = 0.3 (2 quality - 1) + 0.2 (reputation - 50) / 50 + 0.5 fairness, with the quality of the proposal's text and the
                 reputation of its proposer. Fairness is 1 for a transfer of 0, 0 for 5, -1 from 10 on, in both directions. The
                 proposer wrote the terms, so its reputation moves by (p - 0.5) (5 + |transfer|): both ways when they are accepted,
                 only down when they are rejected. Who rejects a bad offer warns the others; who ignores it does not.
                 Asking is allowed (a negative transfer), up to the 20 that a deceptive bot asks for.
    proposals    lapse after 5 steps, when a side is frozen, and when a side can no longer pay. From one member to another only one is
                 pending: a second is an error (v0.1, which does not show them and cannot cancel, replaces the first).
    tasks        go away at the end of the epoch after the one they appeared in, claimed or not. There is no limit to claims.
    tax          is taken from every income, transfers received included, at no more than 50%, and leaves the economy.
    audit        finds a fault with probability 1 - p: half the bounty and 3 reputation.
    decay        multiplies every reputation once a step, and twice where a member that is not frozen passed or erred.
    breaker      acts at the end of a step; a frozen member loses its claims. Three turns later (v0.2) its appeal is granted by
                 itself: there is no tool for it.
    bonus        5 times the quality of the post's text, when its up votes minus its down votes first reach 3.
    replies      to one's own post are allowed and earn nothing; nobody votes for himself, or twice.
"""

import math
import random
import re
from dataclasses import dataclass, field

EPOCHS, STEPS = 5, 5  # 25 steps
ME = "you"  # the model's name among the members
MECHANISMS = ("task", "trade", "transfer", "bonus", "tax", "fine")

SHARPNESS = 2.0  # k of p = sigmoid(k v)
STAKE = 5.0  # of a trade, for each side
SWING = 5.0  # reputation moves by (p - 0.5) SWING
MOST_ASKED = 20.0  # the most negative transfer; 0 would forbid asking
MOST_TAX = 0.5
MOST_TEXT = 2000  # characters of a content
PATIENCE = 5  # steps until a proposal lapses
POST = {"0.2": 2.0, "0.1": 0.5}  # reputation
REPLY = {"0.2": 1.5, "0.1": 0.3}
BONUS, BONUS_VOTES = 5.0, 3
FINE, FINE_REPUTATION = 0.5, 3.0
APPEAL_STEPS, APPEAL_ABOVE = 3, 5.0

SMALL_WORDS = {"the", "for", "a", "of", "and"}  # in a task's description, these need not be mentioned


class Refused(Exception):
    """A call that the rules do not allow. Its text is what the caller is told."""


# ------------------------------------------------------------------------------------------------ what there is


@dataclass(frozen=True)
class Scenario:
    number: int
    difficulty: str
    version: str
    kind: str  # "normal" or one of EXTREMES
    bots: tuple[str, ...]  # honest, opportunistic or deceptive
    resources: float  # everybody's at the start
    tax: float  # rate
    audit: float  # probability that a submission is audited
    decay: float  # of reputation, a step
    threshold: float  # a reputation below it is frozen
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
    counterparty: str
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
    turning: int = 0  # deceptive: around so many interactions it turns
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
    events: list[tuple[int, str]] = field(default_factory=list)  # what happened to the model, or to the rules
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


# ------------------------------------------------------------------------------------------------ soft labels


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def terms(description: str) -> list[str]:
    """The words of a task's description that count: 'review the water budget' -> ['review', 'water', 'budget']."""
    return [word for word in description.lower().split() if word not in SMALL_WORDS]


def content_quality(text: str, version: str, difficulty: float = 0.0, description: str = "") -> float:
    """Quality of a text in [0, 1]; of submitted work if there is a description, else of a post or proposal.

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
    return soft_label(0.8 * (2 * quality - 1) + 0.2 * (reputation - 50) / 50)


def trade_label(quality: float, reputation: float, transfer: float) -> float:
    fairness = max(-1.0, 1 - abs(transfer) / 5)
    return soft_label(0.3 * (2 * quality - 1) + 0.2 * (reputation - 50) / 50 + 0.5 * fairness)


# ------------------------------------------------------------------------------------------------ the books


def book(economy: Economy, name: str, mechanism: str, amount: float) -> float:
    """The only place where resources change. Nobody can lose more than he has; returns what was really moved."""
    member = economy.members[name]
    amount = max(amount, -member.resources)
    member.resources += amount
    member.books[mechanism] += amount
    economy.total += amount
    return amount


def tax_rate(version: str, rate: float, resources: float, average: float) -> float:
    """v0.1: flat. v0.2: rate (1 + resources / average), so who has twice the average pays 1.5 times what the average pays."""
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
    economy.events.append((economy.step, text))


# ------------------------------------------------------------------------------------------------ the ten actions


def need_text(content: str) -> None:
    if not 1 <= len(content.strip()) or len(content) > MOST_TEXT:
        raise Refused(f"content must have 1 to {MOST_TEXT} characters and not only spaces")


def need_post(economy: Economy, post_id: str) -> Post:
    if post_id not in economy.posts:
        raise Refused(f"there is no post {post_id}")
    return economy.posts[post_id]


def need_received(economy: Economy, name: str, proposal_id: str, verb: str) -> Proposal:
    proposal = economy.proposals.get(proposal_id)
    if proposal is None:
        raise Refused(f"there is no pending proposal {proposal_id}")
    if proposal.proposer == name:
        advice = "; to withdraw it call cancel_proposal" if economy.scenario.version == "0.2" else ""
        raise Refused(f"{proposal_id} is your own proposal, only its receiver may {verb} it{advice}")
    if proposal.receiver != name:
        raise Refused(f"{proposal_id} is from {proposal.proposer} to {proposal.receiver}, only its receiver may {verb} it")
    return proposal


def name_effect(proposal: Proposal) -> float:
    """What a proposal does to its proposer's reputation. More for a larger transfer: 15 asked for, p = 0.3 -> -4."""
    return (proposal.p - 0.5) * (SWING + abs(proposal.transfer))


def last_posts(economy: Economy, n: int) -> list[Post]:
    """The n newest posts, oldest first (not a slice of all: an episode must cost the same a step however long it is)."""
    return [economy.posts[f"post_{i}"] for i in range(max(1, len(economy.posts) - n + 1), len(economy.posts) + 1)]


def close(economy: Economy, proposal: Proposal) -> None:
    del economy.proposals[proposal.id], economy.members[proposal.receiver].inbox[proposal.proposer]


def payable(economy: Economy, proposal: Proposal) -> bool:
    payer = proposal.proposer if proposal.transfer > 0 else proposal.receiver
    return economy.members[payer].resources >= abs(proposal.transfer)


def post(economy: Economy, name: str, content: str) -> str:
    need_text(content)
    member, version = economy.members[name], economy.scenario.version
    new = Post(f"post_{len(economy.posts) + 1}", name, content)
    economy.posts[new.id] = new
    member.activity += 1
    respect(member, POST[version])
    return f"{new.id} is in the feed, reputation +{POST[version]}"


def reply(economy: Economy, name: str, post_id: str, content: str) -> str:
    need_text(content)
    other, member, version = need_post(economy, post_id), economy.members[name], economy.scenario.version
    if other.author == name:
        return f"you replied to your own {post_id}, which earns nothing"
    member.activity += 1
    member.interactions += 1
    respect(member, REPLY[version])
    return f"you replied to {post_id}, reputation +{REPLY[version]}"


def vote(economy: Economy, name: str, post_id: str, direction: str) -> str:
    chosen, member = need_post(economy, post_id), economy.members[name]
    if direction not in ("up", "down"):
        raise Refused("direction must be up or down")
    if chosen.author == name:
        raise Refused(f"{post_id} is your own post")
    if name in chosen.votes:
        raise Refused(f"you have voted on {post_id} already")
    chosen.votes[name] = 1 if direction == "up" else -1
    member.activity += 1
    member.interactions += 1
    if not chosen.paid and sum(chosen.votes.values()) >= BONUS_VOTES:
        chosen.paid = True
        got = earn(economy, chosen.author, "bonus", BONUS * content_quality(chosen.text, economy.scenario.version))
        if chosen.author == ME:
            tell(economy, f"{post_id} has {BONUS_VOTES} votes, bonus {got:.1f}")
    return f"you voted {direction} on {post_id}"


def propose_trade(economy: Economy, name: str, counterparty_id: str, content: str, offered_transfer: float) -> str:
    """offered_transfer is finite; positive: `name` gives, negative: it asks. What a side cannot pay is refused."""
    need_text(content)
    member, other = economy.members[name], economy.members.get(counterparty_id)
    if other is None:
        raise Refused(f"there is no bot {counterparty_id}")
    if other is member:
        raise Refused("you cannot trade with yourself")
    if other.frozen_at:
        raise Refused(f"{other.name} is frozen")
    if offered_transfer > member.resources:
        raise Refused(f"you have {member.resources:.1f} resources and cannot offer more")
    if offered_transfer < -MOST_ASKED or -offered_transfer > other.resources:
        raise Refused(f"you can ask {other.name} for at most {min(MOST_ASKED, other.resources):.1f}")
    if name in other.inbox and economy.scenario.version == "0.2":
        raise Refused(f"your {other.inbox[name].id} to {other.name} is still pending, cancel_proposal withdraws it")
    if name in other.inbox:
        close(economy, other.inbox[name])
    economy.proposed += 1
    p = trade_label(content_quality(content, economy.scenario.version), member.reputation, offered_transfer)
    new = Proposal(f"prop_{economy.proposed}", name, other.name, content, offered_transfer, p, economy.step)
    economy.proposals[new.id] = other.inbox[name] = new
    if name == ME:
        economy.history.setdefault(other.name, [0, 0])[1] += 1
    return f"{new.id} is proposed to {other.name}"


def accept_proposal(economy: Economy, name: str, proposal_id: str) -> str:
    """The transfer, then what both sides gain: STAKE (2p - 1), which is a loss where p is below a half."""
    proposal = need_received(economy, name, proposal_id, "accept")
    if not payable(economy, proposal):
        raise Refused(f"{proposal_id} can no longer be paid")
    close(economy, proposal)
    proposer, receiver, amount = proposal.proposer, proposal.receiver, abs(proposal.transfer)
    giver, taker = (proposer, receiver) if proposal.transfer > 0 else (receiver, proposer)
    got = {giver: book(economy, giver, "transfer", -amount), taker: earn(economy, taker, "transfer", amount)}
    for side in (proposer, receiver):
        got[side] += earn(economy, side, "trade", STAKE * (2 * proposal.p - 1))
        economy.members[side].interactions += 1
    respect(economy.members[proposer], name_effect(proposal))
    economy.interactions.append(Interaction(economy.step, "trade", proposer, receiver, True, proposal.p))
    if proposer == ME:
        economy.history[receiver][0] += 1
        tell(economy, f"{receiver} accepted {proposal_id}, gain {got[ME]:+.1f}")
    return f"you accepted {proposal_id}, quality {proposal.p:.2f}, gain {got[receiver]:+.1f}"


def reject_proposal(economy: Economy, name: str, proposal_id: str) -> str:
    proposal = need_received(economy, name, proposal_id, "reject")
    close(economy, proposal)
    respect(economy.members[proposal.proposer], min(0.0, name_effect(proposal)))
    economy.interactions.append(Interaction(economy.step, "trade", proposal.proposer, name, False, proposal.p))
    if proposal.proposer == ME:
        tell(economy, f"{name} rejected {proposal_id}")
    return f"you rejected {proposal_id}"


def cancel_proposal(economy: Economy, name: str, proposal_id: str) -> str:
    proposal = economy.proposals.get(proposal_id)
    if proposal is None or proposal.proposer != name:
        raise Refused(f"you have no pending proposal {proposal_id}")
    close(economy, proposal)
    return f"{proposal_id} is cancelled"


def claim_task(economy: Economy, name: str, task_id: str) -> str:
    task = economy.tasks.get(task_id)
    if task is None:
        raise Refused(f"there is no task {task_id}")
    if task.holder:
        raise Refused(f"{task_id} is already yours" if task.holder == name else f"{task_id} is taken by {task.holder}")
    task.holder = name
    return f"{task_id} is yours, submit it by step {task.deadline}"


def submit_work(economy: Economy, name: str, task_id: str, content: str) -> str:
    """Work is scored and paid at once; then it may be audited."""
    need_text(content)
    task, member, version = economy.tasks.get(task_id), economy.members[name], economy.scenario.version
    if task is None:
        raise Refused(f"there is no task {task_id}")
    if task.holder != name:
        raise Refused(f"{task_id} is taken by {task.holder}" if task.holder else f"claim {task_id} first")
    del economy.tasks[task_id]
    p = work_label(content_quality(content, version, task.level / 10, task.text), member.reputation)
    got = earn(economy, name, "task", task.bounty * (2 * p - 1))
    respect(member, (p - 0.5) * SWING)
    economy.interactions.append(Interaction(economy.step, "task", name, "", True, p))
    if economy.audit_rng.random() < economy.rules["audit"] and economy.audit_rng.random() < 1 - p:
        lost = book(economy, name, "fine", -FINE * task.bounty)
        respect(member, -FINE_REPUTATION)
        if name == ME:
            tell(economy, f"an audit of {task_id} found a fault, fine {lost:.1f}")
    return f"{task_id} is done, quality {p:.2f}, gain {got:+.1f}"


def pass_turn(economy: Economy, name: str) -> str:
    economy.members[name].passed = True
    return "you passed"


ACTIONS = {
    action.__name__: action
    for action in (post, reply, vote, propose_trade, accept_proposal, reject_proposal, cancel_proposal, claim_task, submit_work, pass_turn)
}


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
    """Reputation fades by a factor a step, and by its square for who passed."""
    for member in economy.members.values():
        member.reputation *= economy.rules["decay"] ** (2 if member.passed and not member.frozen_at else 1)
        member.passed = False


def circuit_breaker(economy: Economy) -> None:
    """Freeze who is below the threshold. v0.1: for good. v0.2: three turns, then back at threshold + 5."""
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
    print("quality of 80 characters, and p, for a member of reputation 50:")
    for who, text in (
        ("nonsense", "x" * 80),
        ("work", "The supply budget for river transport: a review of what was paid and what is due."),
    ):
        for version in ("0.1", "0.2"):
            quality = content_quality(text[:80], version, task.level / 10, task.text)
            print(f"  {who:8} v{version}  quality {quality:.2f}  p {work_label(quality, 50):.2f}")
    scenario = Scenario(0, "medium", "0.2", "normal", ("honest",), 100.0, 0.05, 0.0, 0.99, 10.0, 1.0, 1.0, None, "demo")
    economy = found(scenario, [[task]] + [[] for _ in range(EPOCHS - 1)])
    for call in (lambda: claim_task(economy, ME, "task_1"), lambda: claim_task(economy, "bot_1", "task_1"),
                 lambda: submit_work(economy, ME, "task_1", "The supply budget for river transport, reviewed.")):  # fmt: skip
        try:
            print("\n" + call())
        except Refused as error:
            print("\nrefused:", error)
    me = economy.members[ME]
    print("\nbooks:", {name: round(amount, 2) for name, amount in me.books.items() if amount}, "resources", round(me.resources, 2))
    assert math.isclose(me.resources, scenario.resources + sum(me.books.values()))
