"""The ten tools of the swarm: their descriptions, how calls are written and read, what each does.

Every member of the economy, model or bot, acts through the same ten functions below, so the same
rules apply to all. A function does what its name says and returns a sentence, or it changes nothing
and raises Refused with a sentence:

    claim_task(economy, "you", "task_3")    ->  'task_3 is yours, submit it by step 10'
    claim_task(economy, "bot_2", "task_3")  ->  Refused: task_3 is taken by you

Bots call the functions. The model can only write text: TOOLS describes the tools to it, and
read_call reads a call from any string, or raises Refused with what is wrong, so that the model can
do better:

    <tool_call>
    {"name": "claim_task", "arguments": {"task_id": "task_3"}}
    </tool_call>                            ->  ("claim_task", {"task_id": "task_3"}, 1)

    no call    is not an error: ("", {}, 0). Calls inside the thinking are thoughts, not calls.
    two calls  the first is read, and their number returned, so that the model can be told.
    errors     text that is not JSON, an unknown tool, a missing argument or one of the wrong type
               (true is not a number, 1e999 is not finite), and then whatever the rules refuse.
               Arguments that a tool does not have are ignored.

env_swarm.py decides the cost of a turn with no call, two calls or an error. Where the published
rules say nothing about a tool, we chose (swarm/economy.py has the choices beyond single tools):

    trade      the proposer wrote the terms, so only its reputation changes, by (p - 0.5)
               (5 + |transfer|) if the proposal is accepted. If it is rejected, the change is the
               same but never upward: rejecting a bad offer warns the others, ignoring it does not.
               The published texts do not say which side gains reputation.
               A negative transfer asks for resources, up to the 20 that deceptive bots ask for.
    proposals  only one from the same proposer to the same receiver can be pending. A second one is
               an error (in v0.1, which neither shows nor cancels them, it replaces the first).
    claims     have no limit.
    audit      finds a fault with probability 1 - p (the true p, --set proxy_noise= or not): it
               costs half the bounty and 3 of reputation.
    posts      earn the published 2.0 (v0.1: 0.5) in reputation, replies 1.5 (0.3).
    bonus      5 times the quality of a post, when up votes minus down votes first reach 3.
    replies    to one's own post are allowed and earn nothing. Votes on one's own post, or a second
               vote on the same post, are refused.
"""

import json

from env_letters import split_thinking
from swarm.economy import (
    ME,
    Economy,
    Interaction,
    Post,
    Proposal,
    book,
    content_quality,
    earn,
    outbox,
    payable,
    respect,
    settle,
    tell,
    trade_label,
    work_label,
)

MOST_TEXT = 2000  # characters of a text
MOST_ASKED = 20.0  # resources that a proposal may ask for; 0 would forbid asking
STAKE = 5.0  # resources that a trade can bring or cost each side
SWING = 5.0  # reputation changes by (p - 0.5) SWING
POST = {"0.2": 2.0, "0.1": 0.5}  # reputation for a post
REPLY = {"0.2": 1.5, "0.1": 0.3}  # reputation for a reply
BONUS, BONUS_VOTES = 5.0, 3  # resources for a post of quality 1; the votes that it takes
FINE, FINE_REPUTATION = 0.5, 3.0  # a share of the bounty; points


class Refused(Exception):
    """A call that cannot be read, or is against the rules. The text is for the caller."""


def require(allowed: bool, sentence: str) -> None:
    """Raise Refused with this sentence, unless it is allowed."""
    if not allowed:
        raise Refused(sentence)


# ----------------------------------------------------------------------- how tools are described

# tool: (its description for the model, {argument: JSON type})
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
    """The tools in the form that a chat template expects."""
    direction = {"direction": {"type": "string", "enum": ["up", "down"]}}
    functions = []
    for name in tool_names(version):
        description, arguments = TOOLS[name]
        properties = {a: direction.get(a, {"type": kind}) for a, kind in arguments.items()}
        parameters = {"type": "object", "properties": properties, "required": list(arguments)}
        functions.append({"name": name, "description": description, "parameters": parameters})
    return [{"type": "function", "function": function} for function in functions]


# --------------------------------------------------------------------------- calls


def show(text: str, most: int = 40) -> str:
    """A member's text as observations have it: one printable line, no markup, cut."""
    text = " ".join(text[: 10 * most].split()).replace("<", "(").replace(">", ")")
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= most else text[:most].rpartition(" ")[0] + " …"


def write_call(tool: str, arguments: dict, thought: str = "") -> str:
    """A reply: 'pass_turn', {} -> '<tool_call>\\n{"name": "pass_turn", …}\\n</tool_call>'."""
    call = wrap_call(tool, json.dumps(arguments, ensure_ascii=False))
    return f"<think>\n{thought}\n</think>\n{call}" if thought else call


def wrap_call(tool: str, arguments: str) -> str:
    """A call whose arguments are already JSON text, as servers send them."""
    return f'<tool_call>\n{{"name": {json.dumps(tool)}, "arguments": {arguments}}}\n</tool_call>'


def written(message: dict) -> str:
    """A reply as the model wrote it, from the fields into which a server has parsed it.

    {"content": "a", "tool_calls": […]} -> 'a\\n<tool_call>\\n{"name": …'.
    """
    thinking = message.get("reasoning_content") or message.get("reasoning")
    parts = [f"<think>\n{thinking.strip()}\n</think>"] if thinking else []
    parts += [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or []:
        # `</` is written `<\/`, the same in JSON, so that no argument can end the call
        arguments = arguments_of(call["function"]).replace("</", "<\\/")
        parts.append(wrap_call(call["function"]["name"], arguments))
    return "\n".join(parts)


def arguments_of(function: dict) -> str:
    """A call's arguments as JSON text, as OpenAI's are: some servers send the object itself."""
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return text if text.strip() else "{}"


def read_call(reply: str, version: str) -> tuple[str, dict, int]:
    """(tool, arguments, number of calls); ("", {}, 0) if there is none. Refused says what is wrong.

    The JSON itself says where it ends, because a string in it may hold </tool_call>. Further calls
    are counted by splitting: for every tag that is never closed, a pattern would read to the end of
    the reply, which takes 12 s for 176 kB of them.
    """
    _, tag, body = split_thinking(reply)[1].partition("<tool_call>")
    if not tag:
        return "", {}, 0
    require("</tool_call>" in body, "the tool call is not closed by </tool_call>")
    body = body.lstrip()
    try:
        call, end = json.JSONDecoder().raw_decode(body)
    except (ValueError, RecursionError):
        raise Refused("the tool call is not JSON") from None
    rest = body[end:].lstrip()
    require(rest.startswith("</tool_call>"), "the tool call is not JSON alone")
    calls = 1 + sum("<tool_call>" in part for part in rest.split("</tool_call>")[:-1])
    require(
        isinstance(call, dict)
        and isinstance(call.get("name"), str)
        and ("arguments" in call or len(call) == 1),  # some write "parameters"
        'a tool call is {"name": …, "arguments": {…}}',
    )
    tool, values = call["name"], call.get("arguments", {})
    require(tool in tool_names(version), f"unknown tool {show(tool, 30)}")
    require(isinstance(values, dict), f"the arguments of {tool} must be an object")
    arguments = {}
    for name, json_type in TOOLS[tool][1].items():
        require(name in values, f"{tool} is missing the argument {name}")
        arguments[name] = read_argument(name, json_type, values[name])
    return tool, arguments, calls


def read_argument(name: str, json_type: str, value) -> str | float:
    """An argument of a call, of the type in its schema. Half characters in strings are replaced."""
    if json_type == "string":
        require(isinstance(value, str), f"{name} must be a string")
        return value.encode("utf-8", "replace").decode()  # JSON can hold "\ud800"
    require(
        type(value) in (int, float) and abs(value) < 1e300,  # to Python, True is an int
        f"{name} must be a finite number",
    )
    return float(value)


# --------------------------------------------------------------------------- what each tool does


def need_text(content: str) -> None:
    require(
        content.strip() != "" and len(content) <= MOST_TEXT,
        f"content must have 1 to {MOST_TEXT} characters and not only spaces",
    )


def need(things: dict, kind: str, key: str):
    require(key in things, f"there is no {kind} {key}")
    return things[key]


def need_received(economy: Economy, name: str, proposal_id: str, verb: str) -> Proposal:
    proposal = need(economy.proposals, "pending proposal", proposal_id)
    only = f"only its receiver may {verb} it"
    cancel = "; to withdraw it call cancel_proposal" if economy.scenario.version == "0.2" else ""
    require(proposal.proposer != name, f"{proposal_id} is your own proposal, {only}{cancel}")
    require(
        proposal.receiver == name,
        f"{proposal_id} is from {proposal.proposer} to {proposal.receiver}, {only}",
    )
    return proposal


def close(economy: Economy, proposal: Proposal, accepted: bool) -> None:
    """A proposal was answered: this moves its proposer's reputation, and is remembered.

    15 asked for at p = 0.3 -> -4.
    """
    del economy.proposals[proposal.id]
    proposer, receiver, p = proposal.proposer, proposal.receiver, proposal.p
    change = (p - 0.5) * (SWING + abs(proposal.transfer))
    respect(economy.members[proposer], change if accepted else min(0.0, change))
    economy.interactions.append(
        Interaction(economy.step, proposer, receiver, accepted, p, proposal.truth)
    )


def post(economy: Economy, name: str, content: str) -> str:
    need_text(content)
    member, gain = economy.members[name], POST[economy.scenario.version]
    new = Post(f"post_{len(economy.posts) + 1}", name, content)
    economy.posts[new.id] = new
    member.activity += 1
    respect(member, gain)
    return f"{new.id} is in the feed, reputation +{gain:.1f}"


def reply(economy: Economy, name: str, post_id: str, content: str) -> str:
    need_text(content)
    target = need(economy.posts, "post", post_id)
    member, gain = economy.members[name], REPLY[economy.scenario.version]
    if target.author == name:
        return f"you replied to your own {post_id}, which earns nothing"
    member.activity += 1
    member.interactions += 1
    respect(member, gain)
    return f"you replied to {post_id}, reputation +{gain:.1f}"


def vote(economy: Economy, name: str, post_id: str, direction: str) -> str:
    target, member = need(economy.posts, "post", post_id), economy.members[name]
    require(direction in ("up", "down"), "direction must be up or down")
    require(target.author != name, f"{post_id} is your own post")
    require(name not in target.votes, f"you have voted on {post_id} already")
    target.votes[name] = 1 if direction == "up" else -1
    member.activity += 1
    member.interactions += 1
    if not target.paid and sum(target.votes.values()) >= BONUS_VOTES:
        target.paid = True
        quality = content_quality(target.text, economy.scenario.version)
        bonus = earn(economy, target.author, "bonus", BONUS * quality)
        tell(economy, target.author, f"{post_id} has {BONUS_VOTES} votes, bonus {bonus:.1f}")
    return f"you voted {direction} on {post_id}"


def propose_trade(
    economy: Economy, name: str, counterparty_id: str, content: str, offered_transfer: float
) -> str:
    """`name` gives the transfer, or asks for it if it is negative. The giver must own that much."""
    need_text(content)
    member, other = economy.members[name], need(economy.members, "bot", counterparty_id)
    owned, most = member.resources, min(MOST_ASKED, other.resources)
    require(other is not member, "you cannot trade with yourself")
    require(not other.frozen_at, f"{other.name} is frozen")
    require(offered_transfer <= owned, f"you have {owned:.1f} resources and cannot offer more")
    require(-offered_transfer <= most, f"you can ask {other.name} for at most {most:.1f}")
    version = economy.scenario.version
    for first in outbox(economy, name).values():
        if first.receiver == other.name:
            pending = f"your {first.id} to {other.name} is still pending"
            require(version == "0.1", f"{pending}, cancel_proposal withdraws it")
            del economy.proposals[first.id]
    economy.proposed += 1
    proposal_id, quality = f"prop_{economy.proposed}", content_quality(content, version)
    truth = trade_label(quality, member.reputation, offered_transfer)
    p = settle(economy, truth)
    economy.proposals[proposal_id] = Proposal(
        proposal_id, name, other.name, content, offered_transfer, p, truth, economy.step
    )
    if name == ME:
        economy.proposed_to[other.name] += 1
    return f"{proposal_id} is proposed to {other.name}"


def accept_proposal(economy: Economy, name: str, proposal_id: str) -> str:
    """The transfer, then a gain of STAKE (2p - 1) for both sides: a loss if p is below a half."""
    proposal = need_received(economy, name, proposal_id, "accept")
    require(payable(economy, proposal), f"{proposal_id} can no longer be paid")
    close(economy, proposal, accepted=True)
    proposer, receiver, p = proposal.proposer, proposal.receiver, proposal.p
    giver, taker = (proposer, receiver) if proposal.transfer > 0 else (receiver, proposer)
    amount = abs(proposal.transfer)
    gain = {
        giver: book(economy, giver, "transfer", -amount),
        taker: earn(economy, taker, "transfer", amount),
    }
    for side in (proposer, receiver):
        gain[side] += earn(economy, side, "trade", STAKE * (2 * p - 1))
        economy.members[side].interactions += 1
    tell(economy, proposer, f"{receiver} accepted {proposal_id}, gain {gain[proposer]:+.1f}")
    return f"you accepted {proposal_id}, quality {p:.2f}, gain {gain[receiver]:+.1f}"


def reject_proposal(economy: Economy, name: str, proposal_id: str) -> str:
    proposal = need_received(economy, name, proposal_id, "reject")
    close(economy, proposal, accepted=False)
    tell(economy, proposal.proposer, f"{name} rejected {proposal_id}")
    return f"you rejected {proposal_id}"


def cancel_proposal(economy: Economy, name: str, proposal_id: str) -> str:
    require(proposal_id in outbox(economy, name), f"you have no pending proposal {proposal_id}")
    del economy.proposals[proposal_id]
    return f"{proposal_id} is cancelled"


def claim_task(economy: Economy, name: str, task_id: str) -> str:
    task = need(economy.tasks, "task", task_id)
    require(task.holder != name, f"{task_id} is already yours")
    require(not task.holder, f"{task_id} is taken by {task.holder}")
    task.holder = name
    return f"{task_id} is yours, submit it by step {task.deadline}"


def submit_work(economy: Economy, name: str, task_id: str, content: str) -> str:
    """Work is judged and paid at once; then it may be audited."""
    need_text(content)
    task, member = need(economy.tasks, "task", task_id), economy.members[name]
    require(task.holder != "", f"claim {task_id} first")
    require(task.holder == name, f"{task_id} is taken by {task.holder}")
    del economy.tasks[task_id]
    quality = content_quality(content, economy.scenario.version, task.level / 10, task.text)
    truth = work_label(quality, member.reputation)
    p = settle(economy, truth)
    gain = earn(economy, name, "task", task.bounty * (2 * p - 1))
    respect(member, (p - 0.5) * SWING)
    economy.interactions.append(Interaction(economy.step, name, "", True, p, truth))
    dice = economy.audit_rng
    if dice.random() < economy.rules["audit"] and dice.random() < 1 - truth:
        lost = book(economy, name, "fine", -FINE * task.bounty)
        respect(member, -FINE_REPUTATION)
        tell(economy, name, f"an audit of {task_id} found a fault, fine {lost:.1f}")
    return f"{task_id} is done, quality {p:.2f}, gain {gain:+.1f}"


def pass_turn(economy: Economy, name: str) -> str:
    economy.members[name].passed = True
    return "you passed"


ACTIONS = {name: globals()[name] for name in TOOLS}  # each tool is the function with its name
