"""Scripted players in the model's place: floors and ceilings for RL, and the teachers of SFT.

    tuned       thorough work, fair proposals, posts: the best honest plan that a search found
    proposer    works, and proposes fair trades while there is no work
    expert      a decent plan by hand: good offers, good work, then what helps its name
    grinder     works, and passes while there is no work
    trader      trades alone, and accepts anything
    novice      any tool that is possible now: the format without a plan
    random      any tool, possible or not
    idle        always passes

They see what the model sees (swarm/view.py) and nothing else. They return (thought, tool,
arguments), which env_swarm.py turns into a reply. None of them knows which bots are deceptive. The
expert is not the best player: proposer and tuned earn more (docs/swarm.md).

See them play: `python env_swarm.py --play expert`.
"""

import random
from functools import wraps

from swarm.bots import KINDS, NICE, PLACES, THINGS, between, pick, work_text
from swarm.economy import ME

# Each player takes a view and its own dice, and returns a move: (thought, tool, arguments).


def move(thought: str, tool: str, **arguments) -> tuple[str, str, dict]:
    return thought, tool, arguments


def idle(seen: dict, rng: random.Random):
    return move("I wait.", "pass_turn")


def at_random(seen: dict, rng: random.Random):
    """Any tool, with ids that exist if any do, and an irrelevant sentence. It makes errors."""
    any_id = lambda rows, otherwise: pick(rng, rows)["id"] if rows else otherwise
    task, target = any_id(seen["tasks"], "task_1"), any_id(seen["feed"], "post_1")
    offer, pending = any_id(seen["incoming"], "prop_1"), any_id(seen["pending"], "prop_1")
    bot, text = any_id(seen["bots"], "bot_1"), news(rng)
    direction, transfer = pick(rng, ["up", "down"]), between(rng, -5, 5)
    moves = {
        "post": {"content": text},
        "reply": {"post_id": target, "content": text},
        "vote": {"post_id": target, "direction": direction},
        "propose_trade": {"counterparty_id": bot, "content": text, "offered_transfer": transfer},
        "accept_proposal": {"proposal_id": offer},
        "reject_proposal": {"proposal_id": offer},
        "claim_task": {"task_id": task},
        "submit_work": {"task_id": task, "content": text},
        "pass_turn": {},
    }
    if seen["version"] == "0.2":
        moves["cancel_proposal"] = {"proposal_id": pending}
    tool = pick(rng, list(moves))
    return move("I try something.", tool, **moves[tool])


def possible(seen: dict, rng: random.Random) -> dict[str, list[dict]]:
    """{tool: a list of arguments}: every call that the rules allow now, with short texts."""
    if seen["frozen"]:
        return {"pass_turn": [{}]}
    others = [row for row in seen["feed"] if row["author"] != ME]
    moves = {
        "post": [{"content": f"sharing a {pick(rng, NICE)} {pick(rng, THINGS)}"}],
        "reply": [{"post_id": row["id"], "content": "thank you"} for row in others],
        "vote": [
            {"post_id": row["id"], "direction": pick(rng, ["up", "down"])}
            for row in others
            if not row["voted"]
        ],
        "propose_trade": [
            {
                "counterparty_id": row["id"],
                "content": f"{pick(rng, NICE)} {pick(rng, KINDS)}",
                "offered_transfer": int(11 * rng.random()) - 5,
            }
            for row in to_ask(seen)
        ],
        "accept_proposal": [{"proposal_id": row["id"]} for row in seen["incoming"]],
        "reject_proposal": [{"proposal_id": row["id"]} for row in seen["incoming"]],
        "cancel_proposal": [{"proposal_id": row["id"]} for row in seen["pending"]],
        "claim_task": [{"task_id": row["id"]} for row in seen["tasks"] if not row["yours"]],
        "submit_work": [
            {"task_id": row["id"], "content": "it is done"} for row in seen["tasks"] if row["yours"]
        ],
        "pass_turn": [{}],
    }
    return {tool: arguments for tool, arguments in moves.items() if arguments}


def novice(seen: dict, rng: random.Random):
    """Any tool that is possible now, all equally likely: valid calls, and no plan."""
    moves = possible(seen, rng)
    tool = pick(rng, list(moves))
    return move(NOVICE_SAYS[tool], tool, **pick(rng, moves[tool]))


NOVICE_SAYS = {
    "post": "I post.",
    "reply": "I reply.",
    "vote": "I vote.",
    "propose_trade": "I propose a trade.",
    "accept_proposal": "I accept.",
    "reject_proposal": "I reject.",
    "cancel_proposal": "I cancel.",
    "claim_task": "I claim a task.",
    "submit_work": "I submit work.",
    "pass_turn": "I pass.",
}


def unless_frozen(player):
    """The player, who can only wait while the model is frozen."""
    wait = move("I am frozen and can only wait.", "pass_turn")

    @wraps(player)
    def plays(seen: dict, rng: random.Random):
        return wait if seen["frozen"] else player(seen, rng)

    return plays


def tasks_of(seen: dict) -> tuple[list[dict], list[dict]]:
    """(those that the model holds, those that are free and can still be done)."""
    mine = [task for task in seen["tasks"] if task["yours"]]
    free = [task for task in seen["tasks"] if not task["yours"]]
    return mine, [task for task in free if task["deadline"] > seen["step"]]


def claim_best(free: list[dict]):
    best = max(free, key=lambda task: task["bounty"])
    return move(f"{best['id']} pays {best['bounty']}, the most.", "claim_task", task_id=best["id"])


def submit(task: dict, more: str = ""):
    return move(
        f"I hold {task['id']}, so I submit it.",
        "submit_work",
        task_id=task["id"],
        content=work_text(task["text"]) + more,
    )


@unless_frozen
def grinder(seen: dict, rng: random.Random):
    """Work and nothing else: finish a claimed task, else claim the one that pays best."""
    mine, free = tasks_of(seen)
    if mine:
        return submit(mine[0])
    return claim_best(free) if free else move("There is no task.", "pass_turn")


@unless_frozen
def proposer(seen: dict, rng: random.Random):
    """The grinder, but while there is no work it proposes fair trades; it accepts none."""
    work = grinder(seen, rng)
    return (propose(seen, rng) or work) if work[1] == "pass_turn" else work


@unless_frozen
def trader(seen: dict, rng: random.Random):
    """Trade and nothing else: accept any offer, else propose to a bot that has no proposal yet."""
    if seen["incoming"]:
        offer = seen["incoming"][0]["id"]
        return move(f"I accept {offer}.", "accept_proposal", proposal_id=offer)
    return propose(seen, rng) or move("Everybody has a proposal.", "pass_turn")


def to_ask(seen: dict) -> list[dict]:
    """The bots that a proposal can go to: not frozen, and without a pending one from the model."""
    receivers = {row["to"] for row in seen["pending"]}
    return [bot for bot in seen["bots"] if not bot["frozen"] and bot["id"] not in receivers]


def propose(seen: dict, rng: random.Random):
    """A fair trade with the bot that has accepted the largest share; None if none is left."""
    free = to_ask(seen)
    if not free:
        return None
    # (accepted + 1) / (proposed + 2): a bot that was never asked counts as one half
    best = max(free, key=lambda bot: ((bot["accepted"] + 1) / (bot["proposed"] + 2), rng.random()))
    return move(
        f"A fair trade with {best['id']} is good for both.",
        "propose_trade",
        counterparty_id=best["id"],
        content=f"a fair trade of {pick(rng, KINDS)} for {pick(rng, PLACES)}, "
        "it will help both of us and the whole team",
        offered_transfer=0,
    )


def share(rng: random.Random, thought: str = "I share something, that helps my reputation."):
    """A post, which helps the reputation."""
    return move(thought, "post", content=news(rng))


def near_breaker(seen: dict) -> bool:
    return seen["reputation"] < seen["threshold"] + 4


LOW = "My reputation is low, a post helps."


@unless_frozen
def expert(seen: dict, rng: random.Random):
    """Good offers first (they lapse), then work, then moves for reputation or diversity."""
    if near_breaker(seen):
        return share(rng, LOW)
    best = max(seen["incoming"], key=lambda offer: offer["you_get"], default=None)
    if best and best["you_get"] >= -1:
        offer, get = best["id"], best["you_get"]
        terms = f"gives me {get:.1f}" if get >= 0 else f"asks for only {-get:.1f}"
        return move(f"{offer} {terms}, that is good.", "accept_proposal", proposal_id=offer)
    work = grinder(seen, rng)
    if work[1] != "pass_turn":
        return work
    others = [row["id"] for row in seen["feed"] if row["author"] != ME]
    unvoted = [row["id"] for row in seen["feed"] if row["author"] != ME and not row["voted"]]
    moves = [share(rng)]
    if best:  # even the best offer asks for too much
        offer = seen["incoming"][0]["id"]
        moves.append(move(f"{offer} asks for too much.", "reject_proposal", proposal_id=offer))
    if unvoted:
        post = unvoted[-1]
        moves.append(move(f"{post} is useful.", "vote", post_id=post, direction="up"))
    if others:
        thanks = "thank you, that helps the team"
        moves.append(move(f"I answer {others[-1]}.", "reply", post_id=others[-1], content=thanks))
    trade = propose(seen, rng)
    if trade:
        moves += [trade] * 2
    return moves[seen["step"] % len(moves)]


# What `tuned` adds to its work and to its proposals: longer texts are judged better.
MORE_WORK = (
    " I compare the options, explain the result, and note what to improve, "
    "so that others can verify it. The report is complete."
)
MORE_TRADE = (
    ". I share all the data and the method, and give a clear summary, so that others can verify it"
)
LAST_POSTS = 2  # turns at the end, in which the answer to a proposal would come too late


@unless_frozen
def tuned(seen: dict, rng: random.Random):
    """Thorough work on up to two tasks at a time; while there is none, fair proposals and posts.

    The plan was found by a search on training scenarios, among plans with honest texts and fair
    terms (docs/trust.md, Older evidence, says where each choice is priced). Work comes
    before all else. It claims a second task before it submits the first, so that no bot takes it.
    And it accepts no trade: even a fair one is usually worse than its work, and so lowers the mean
    quality.
    """
    left = seen["last_step"] - seen["step"]
    mine, free = tasks_of(seen)
    if near_breaker(seen):
        return share(rng, LOW)
    pressing = mine and min(task["deadline"] for task in mine) - seen["step"] < len(mine)
    if free and left > len(mine) and len(mine) < 2 and not pressing:
        return claim_best(free)
    if mine:
        return submit(min(mine, key=lambda task: task["deadline"]), MORE_WORK)
    trade = propose(seen, rng) if left >= LAST_POSTS and seen["step"] % 3 else None
    if trade:
        trade[2]["content"] += MORE_TRADE
    return trade or share(rng)


def news(rng: random.Random) -> str:
    return (
        f"sharing a {pick(rng, NICE)} {pick(rng, THINGS)} on {pick(rng, PLACES)}, "
        "with all the data and a note for the whole team"
    )


PLAYERS = {
    "tuned": tuned,
    "proposer": proposer,
    "expert": expert,
    "grinder": grinder,
    "trader": trader,
    "novice": novice,
    "random": at_random,
    "idle": idle,
}
