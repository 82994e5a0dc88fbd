"""The ten tools of the swarm: what the model is told of each, how a call is written and read, and what each does.

Everybody, model or bot, acts through the same ten functions below, so nobody has rules of its own. A function either does what it
says and returns a sentence, or changes nothing and raises Refused with a sentence:

    claim_task(economy, "you", "task_3")    ->  'task_3 is yours, submit it by step 10'
    claim_task(economy, "bot_2", "task_3")  ->  Refused: task_3 is taken by you

Bots call them. The model can only write: TOOLS tells it what there is, and read_call takes any string and returns a call, or raises
Refused with what is wrong, so that the model is told what to write next time:

    <tool_call>
    {"name": "claim_task", "arguments": {"task_id": "task_3"}}
    </tool_call>                            ->  ("claim_task", {"task_id": "task_3"}, 1)

    no call     is no error, but ("", {}, 0). So is thinking that never ends; and a call inside the thinking is a thought.
    two calls   the first is read, and their number returned, so that the model can be told that only the first counts.
    errors      not JSON, unknown tool, a missing argument or one of a wrong type (true is not a number, 1e999 is not finite), and then
                anything the rules refuse. Arguments that a tool does not have are ignored.

What a turn with none, two or a bad one costs is decided in env_swarm.py. Where the published rules are silent about a tool, this is what
we chose (what concerns no single tool is in swarm/economy.py):

    trade       the proposer wrote the terms, so its reputation moves by (p - 0.5) (5 + |transfer|): both ways when they are accepted,
                only down when they are rejected. To reject a bad offer warns the others; to ignore it does not.
                Asking is allowed (a negative transfer), up to the 20 that a deceptive bot asks for.
    proposals   from one member to another only one is pending: a second is an error (v0.1, which does not show them and cannot cancel,
                replaces the first).
    claims      have no limit.
    audit       finds a fault with probability 1 - p, which costs half the bounty and 3 of reputation.
    bonus       5 times the quality of the post's text, when its up votes minus its down votes first reach 3.
    replies     to one's own post are allowed and earn nothing; nobody votes for himself, or twice.

Run me: `python -m swarm.tools` reads some replies, good and bad, and says what comes of each.
"""

import json

from env_letters import split_thinking
from swarm.economy import (
    ME,
    Economy,
    Interaction,
    Post,
    Proposal,
    Task,
    book,
    close,
    content_quality,
    earn,
    payable,
    respect,
    tell,
    trade_label,
    work_label,
)

MOST_TEXT = 2000  # characters of a content
MOST_ASKED = 20.0  # resources that a proposal may ask for, as a negative transfer; 0 would forbid asking
STAKE = 5.0  # resources that a trade can bring or cost each side
SWING = 5.0  # reputation moves by (p - 0.5) SWING
POST = {"0.2": 2.0, "0.1": 0.5}  # reputation that a post earns
REPLY = {"0.2": 1.5, "0.1": 0.3}  # … and a reply
BONUS, BONUS_VOTES = 5.0, 3  # resources for a post of quality 1; up votes less down votes that it takes
FINE, FINE_REPUTATION = 0.5, 3.0  # of the bounty; points


class Refused(Exception):
    """A call that cannot be read, or that the rules do not allow. Its text is what the caller is told."""


# ------------------------------------------------------------------------------------------------ what the model is told

# tool: (what the model is told, {argument: JSON type})
TOOLS = {
    "post": ("write to the feed", {"content": "string"}),
    "reply": ("reply to a post", {"post_id": "string", "content": "string"}),
    "vote": ("vote on a post", {"post_id": "string", "direction": "string"}),
    "propose_trade": (
        "propose a trade to a bot, you give offered_transfer (below 0 you get it)",
        {"counterparty_id": "string", "content": "string", "offered_transfer": "number"},
    ),
    "accept_proposal": ("accept a proposal to you", {"proposal_id": "string"}),
    "reject_proposal": ("reject a proposal to you", {"proposal_id": "string"}),
    "cancel_proposal": ("cancel your own proposal", {"proposal_id": "string"}),
    "claim_task": ("claim an open task", {"task_id": "string"}),
    "submit_work": ("submit work on a task of yours", {"task_id": "string", "content": "string"}),
    "pass_turn": ("do nothing", {}),
}


def tool_names(version: str) -> list[str]:
    """All ten, but v0.1 cannot cancel."""
    return [name for name in TOOLS if version == "0.2" or name != "cancel_proposal"]


def schemas(version: str) -> list[dict]:
    """The tools as the chat template wants them."""
    types = {"string": {"type": "string"}, "number": {"type": "number"}, "direction": {"type": "string", "enum": ["up", "down"]}}
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": TOOLS[name][0],
                "parameters": {
                    "type": "object",
                    "properties": {a: types.get(a, types[kind]) for a, kind in TOOLS[name][1].items()},
                    "required": list(TOOLS[name][1]),
                },
            },
        }
        for name in tool_names(version)
    ]


# ------------------------------------------------------------------------------------------------ how a call is written and read


def show(text: str, most: int = 40) -> str:
    """A text that somebody wrote, as it appears in an observation: one line, printable, no markup, cut."""
    text = " ".join(text[: 10 * most].split()).replace("<", "(").replace(">", ")")
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= most else text[:most].rpartition(" ")[0] + " …"


def write_call(tool: str, arguments: dict, thought: str = "") -> str:
    """A reply: 'claim_task', {"task_id": "task_3"} -> '<tool_call>\\n{"name": "claim_task", …}\\n</tool_call>'."""
    call = json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)
    return (f"<think>\n{thought}\n</think>\n" if thought else "") + f"<tool_call>\n{call}\n</tool_call>"


def read_call(reply: str, version: str) -> tuple[str, dict, int]:
    """(tool, arguments, number of calls) of a reply. No call at all: ("", {}, 0). A bad one raises Refused, which says why."""
    rest = split_thinking(reply)[1]
    # Split, not matched by a pattern: that would read on to the end of the reply for every tag that is never closed, 12 s for 176 kB of them.
    calls = [part.partition("<tool_call>")[2] for part in rest.split("</tool_call>")[:-1] if "<tool_call>" in part]
    if not calls:
        if "<tool_call>" in rest:
            raise Refused("the tool call is not closed by </tool_call>")
        return "", {}, 0
    try:
        call = json.loads(calls[0])
    except (ValueError, RecursionError):
        raise Refused("the tool call is not JSON") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise Refused('a tool call is {"name": …, "arguments": {…}}')
    tool, given = call["name"], call.get("arguments", {})
    if tool not in tool_names(version):
        raise Refused(f"unknown tool {show(tool, 30)}")
    if not isinstance(given, dict):
        raise Refused(f"the arguments of {tool} must be an object")
    arguments = {}
    for name, kind in TOOLS[tool][1].items():
        if name not in given:
            raise Refused(f"{tool} is missing the argument {name}")
        value = given[name]
        if kind == "string" and isinstance(value, str):
            arguments[name] = value.encode("utf-8", "replace").decode()  # JSON can hold half a character: "\ud800"
        elif kind == "number" and type(value) in (int, float) and abs(value) < 1e300:  # type: True is an int; also refuses NaN and 1e999
            arguments[name] = float(value)
        else:
            raise Refused(f"{name} must be a {'finite number' if kind == 'number' else 'string'}")
    return tool, arguments, len(calls)


# ------------------------------------------------------------------------------------------------ what each tool does


def need_text(content: str) -> None:
    if not 1 <= len(content.strip()) or len(content) > MOST_TEXT:
        raise Refused(f"content must have 1 to {MOST_TEXT} characters and not only spaces")


def need_post(economy: Economy, post_id: str) -> Post:
    if post_id not in economy.posts:
        raise Refused(f"there is no post {post_id}")
    return economy.posts[post_id]


def need_task(economy: Economy, task_id: str) -> Task:
    if task_id not in economy.tasks:
        raise Refused(f"there is no task {task_id}")
    return economy.tasks[task_id]


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


def reputation_change(proposal: Proposal) -> float:
    """What a proposal does to its proposer's reputation. More for a larger transfer: 15 asked for, p = 0.3 -> -4."""
    return (proposal.p - 0.5) * (SWING + abs(proposal.transfer))


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
    chosen, member, version = need_post(economy, post_id), economy.members[name], economy.scenario.version
    if chosen.author == name:
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
    respect(economy.members[proposer], reputation_change(proposal))
    economy.interactions.append(Interaction(economy.step, "trade", proposer, receiver, True, proposal.p))
    if proposer == ME:
        economy.history[receiver][0] += 1
        tell(economy, f"{receiver} accepted {proposal_id}, gain {got[ME]:+.1f}")
    return f"you accepted {proposal_id}, quality {proposal.p:.2f}, gain {got[receiver]:+.1f}"


def reject_proposal(economy: Economy, name: str, proposal_id: str) -> str:
    proposal = need_received(economy, name, proposal_id, "reject")
    close(economy, proposal)
    respect(economy.members[proposal.proposer], min(0.0, reputation_change(proposal)))
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
    task = need_task(economy, task_id)
    if task.holder:
        raise Refused(f"{task_id} is already yours" if task.holder == name else f"{task_id} is taken by {task.holder}")
    task.holder = name
    return f"{task_id} is yours, submit it by step {task.deadline}"


def submit_work(economy: Economy, name: str, task_id: str, content: str) -> str:
    """Work is scored and paid at once; then it may be audited."""
    need_text(content)
    task, member, version = need_task(economy, task_id), economy.members[name], economy.scenario.version
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


if __name__ == "__main__":
    import inspect

    from swarm.economy import Scenario, found

    for tool, (_, arguments) in TOOLS.items():  # what is told is what there is
        assert list(inspect.signature(ACTIONS[tool]).parameters) == ["economy", "name", *arguments]
    print("of claim_task the model is told:", json.dumps(schemas("0.2")[list(TOOLS).index("claim_task")]["function"]))

    scenario = Scenario(0, "medium", "0.2", "normal", ("honest", "deceptive"), 100.0, 0.05, 0.0, 1.0, 10.0, 1.0, 1.0, None, "demo")
    tasks = [
        Task("task_1", "review the supply budget for river transport", 4, 14, 10),
        Task("task_2", "test the team plan for city health", 2, 9, 10),
    ]
    economy = found(scenario, [tasks])
    claim_task(economy, "bot_1", "task_2")
    propose_trade(economy, "bot_2", ME, "good data for water", -15.0)
    first = {"name": "claim_task", "arguments": {"task_id": "task_1"}}
    replies = (
        ("I will wait and see.", "no call"),
        (f"<think>\n{write_call('post', {'content': 'hm'})}\n</think>", "no call"),
        (f"<tool_call>{json.dumps(first)}", "not closed"),
        ("<tool_call>{name: claim_task}</tool_call>", "not JSON"),
        (write_call("steal", {"task_id": "task_1"}), "unknown tool"),
        (write_call("claim_task", {"task_id": 1}), "must be a string"),
        (write_call("submit_work", {"task_id": "task_1", "content": "done"}), "claim task_1 first"),
        (write_call("claim_task", {"task_id": "task_2"}), "taken by bot_1"),
        (write_call("claim_task", {"task_id": "task_1"}, "task_1 pays 14."), "task_1 is yours"),
        (write_call("submit_work", {"task_id": "task_1", "content": "The supply budget for river transport, reviewed."}), "gain +"),
        (write_call("accept_proposal", {"proposal_id": "prop_1"}), "gain -"),  # it asked for 15, and its p is low
    )
    me = economy.members[ME]
    for said, expected in replies:
        before = me.resources, me.reputation
        try:
            tool, arguments, calls = read_call(said, "0.2")
            told = ACTIONS[tool](economy, ME, **arguments) if calls else "no call"
        except Refused as refusal:
            told = f"refused: {refusal}"
            assert (me.resources, me.reputation) == before
        assert expected in told, told
        print(f"\n{' '.join(said.split())}\n  -> {told}")
    print(
        "\nafter that:",
        ", ".join(f"{m.name} resources {m.resources:.1f}, reputation {m.reputation:.1f}" for m in (me, economy.members["bot_2"])),
    )
    assert economy.members["bot_2"].reputation < 50  # to ask for 15 costs reputation, even where it is accepted
