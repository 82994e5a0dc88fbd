"""Scripted players of the model's part: floors and ceilings for what is learnt, and whom SFT learns from.

    idle, novice, random, trader, grinder, expert        from the one that does nothing to the best that we know how to write by rules

They see what the model sees (`view`, from which env_swarm.py writes its observations) and nothing else, and return (thought, tool,
arguments), which env_swarm.py writes as a reply. None of them knows who is deceptive.

Run me: `python -m swarm.players` lets each of them play the same scenario.
"""

import random

from swarm.bots import KINDS, NICE, PLACES, THINGS, between, bots_act, draw_scenario, draw_tasks, open_tasks, pick, work_text
from swarm.economy import APPEAL_STEPS, ME, STEPS, Economy, end_step, found, rule
from swarm.tools import ACTIONS, Refused, show


def view(economy: Economy) -> dict:
    """What the model may know. The observation is written from this, and scripted players see this and nothing else."""
    me, version, step, member = economy.members[ME], economy.scenario.version, economy.step, economy.members.get
    mine = [t for t in economy.tasks.values() if t.holder == ME]
    fresh = sorted(open_tasks(economy), key=lambda t: -t.bounty)
    seen = {
        "version": version,
        "step": step,
        "last_step": economy.last_step,
        "resources": me.resources,
        "reputation": me.reputation,
        "threshold": economy.rules["threshold"],
        "changed": [rule(n, v) for n, v in economy.rules.items() if v != getattr(economy.scenario, n)],
        "frozen": bool(me.frozen_at),
        "until": me.frozen_at + APPEAL_STEPS if version == "0.2" else economy.last_step,  # v0.1 has no appeal
        "tasks": [
            {"id": t.id, "yours": t.holder == ME, "bounty": t.bounty, "difficulty": t.level, "deadline": t.deadline, "text": t.text}
            for t in mine + fresh[:3]
        ],
        "more_tasks": len(fresh[3:]),
        "feed": [
            {"id": p.id, "author": p.author, "votes": sum(p.votes.values()), "voted": ME in p.votes, "text": show(p.text)}
            for p in economy.last_posts(2)
        ],
        "incoming": [
            {"id": p.id, "from": p.proposer, "reputation": member(p.proposer).reputation, "you_get": p.transfer, "text": show(p.text)}
            for p in me.inbox.values()
        ],
        "bots": [
            {"id": m.name, "frozen": bool(m.frozen_at), "proposed": 0, "accepted": 0} for m in economy.members.values() if m.name != ME
        ],
        "pending": [],
        "events": [],
    }
    if version == "0.1":
        return seen
    # v0.2 tells more: what became of one's proposals, and what happened lately.
    seen["pending"] = [{"id": p.id, "to": p.receiver} for p in economy.proposals.values() if p.proposer == ME]
    for bot in seen["bots"]:
        bot["accepted"], bot["proposed"] = economy.history.get(bot["id"], (0, 0))
    seen["events"] = [f"step {at}: {text}" for at, text in economy.events[-3:] if step - at <= STEPS]
    return seen


# Each player takes a view and its own dice, and returns (thought, tool, arguments).


def idle(seen: dict, rng: random.Random):
    return "I wait.", "pass_turn", {}


def at_random(seen: dict, rng: random.Random):
    """Any tool, with ids that exist where there are some, and a sentence about nothing asked for. It errs, as a beginner does."""
    some = lambda rows, otherwise: pick(rng, rows)["id"] if rows else otherwise
    task, chosen = some(seen["tasks"], "task_1"), some(seen["feed"], "post_1")
    offer, mine, bot = some(seen["incoming"], "prop_1"), some(seen["pending"], "prop_1"), some(seen["bots"], "bot_1")
    text = news(rng)
    moves = {
        "post": {"content": text},
        "reply": {"post_id": chosen, "content": text},
        "vote": {"post_id": chosen, "direction": pick(rng, ["up", "down"])},
        "propose_trade": {"counterparty_id": bot, "content": text, "offered_transfer": between(rng, -5, 5)},
        "accept_proposal": {"proposal_id": offer},
        "reject_proposal": {"proposal_id": offer},
        "claim_task": {"task_id": task},
        "submit_work": {"task_id": task, "content": text},
        "pass_turn": {},
    } | ({"cancel_proposal": {"proposal_id": mine}} if seen["version"] == "0.2" else {})
    tool = pick(rng, list(moves))
    return "I try something.", tool, moves[tool]


def possible(seen: dict, rng: random.Random) -> dict[str, list[dict]]:
    """{tool: its arguments}, everything that the rules allow now, with a few words where a text is asked for."""
    if seen["frozen"]:
        return {"pass_turn": [{}]}
    others = [row for row in seen["feed"] if row["author"] != ME]
    moves = {
        "post": [{"content": f"sharing a {pick(rng, NICE)} {pick(rng, THINGS)}"}],
        "reply": [{"post_id": row["id"], "content": "thank you"} for row in others],
        "vote": [{"post_id": row["id"], "direction": pick(rng, ["up", "down"])} for row in others if not row["voted"]],
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
        "submit_work": [{"task_id": row["id"], "content": "it is done"} for row in seen["tasks"] if row["yours"]],
        "pass_turn": [{}],
    }
    return {tool: some for tool, some in moves.items() if some}


def novice(seen: dict, rng: random.Random):
    """Any tool that is possible now, each as likely as the others: every call is right in form, and there is no plan."""
    moves = possible(seen, rng)
    tool = pick(rng, list(moves))
    return NOVICE_SAYS[tool], tool, pick(rng, moves[tool])


NOVICE_SAYS = {
    "post": "I post.", "reply": "I reply.", "vote": "I vote.", "propose_trade": "I propose a trade.", "accept_proposal": "I accept.",
    "reject_proposal": "I reject.", "cancel_proposal": "I cancel.", "claim_task": "I claim a task.", "submit_work": "I submit work.",
    "pass_turn": "I pass.",
}  # fmt: skip


def grinder(seen: dict, rng: random.Random):
    """Work and nothing else: finish what is claimed, claim what pays best."""
    mine = [task for task in seen["tasks"] if task["yours"]]
    fresh = [task for task in seen["tasks"] if not task["yours"] and task["deadline"] > seen["step"]]
    if seen["frozen"]:
        return "I am frozen and can only wait.", "pass_turn", {}
    if mine:
        return f"I hold {mine[0]['id']}, so I submit it.", "submit_work", {"task_id": mine[0]["id"], "content": work_text(mine[0]["text"])}
    if fresh:
        best = max(fresh, key=lambda task: task["bounty"])
        return f"{best['id']} pays {best['bounty']}, the most.", "claim_task", {"task_id": best["id"]}
    return "There is no task.", "pass_turn", {}


def trader(seen: dict, rng: random.Random):
    """Trade and nothing else: accept whatever is offered, else propose to whoever has no proposal yet."""
    if seen["frozen"]:
        return "I am frozen and can only wait.", "pass_turn", {}
    for offer in seen["incoming"]:
        return f"I accept {offer['id']}.", "accept_proposal", {"proposal_id": offer["id"]}
    return propose(seen, rng) or ("Everybody has a proposal.", "pass_turn", {})


def to_ask(seen: dict) -> list[dict]:
    """The bots that a proposal can go to: not frozen, and without one from the model."""
    asked = {row["to"] for row in seen["pending"]}
    return [bot for bot in seen["bots"] if not bot["frozen"] and bot["id"] not in asked]


def propose(seen: dict, rng: random.Random):
    """A fair trade with whoever accepted most of them so far; None if nobody is left to ask."""
    free = to_ask(seen)
    if not free:
        return None
    # (accepted + 1) / (proposed + 2): who was never asked counts as one half
    best = max(free, key=lambda bot: ((bot["accepted"] + 1) / (bot["proposed"] + 2), rng.random()))
    text = f"a fair trade of {pick(rng, KINDS)} for {pick(rng, PLACES)}, it will help both of us and the whole team"
    arguments = {"counterparty_id": best["id"], "content": text, "offered_transfer": 0}
    return f"A fair trade with {best['id']} is good for both.", "propose_trade", arguments


def expert(seen: dict, rng: random.Random):
    """Good offers first (they lapse), then work, then whatever keeps the reputation and uses another tool."""
    good = [offer for offer in seen["incoming"] if offer["you_get"] >= -1]
    bad = [offer for offer in seen["incoming"] if offer["you_get"] < -1]
    if seen["frozen"]:
        return "I am frozen and can only wait.", "pass_turn", {}
    if seen["reputation"] < seen["threshold"] + 4:
        return "My reputation is low, a post helps.", "post", {"content": news(rng)}
    if good:
        best = max(good, key=lambda offer: offer["you_get"])
        terms = f"gives me {best['you_get']:.1f}" if best["you_get"] >= 0 else f"asks for only {-best['you_get']:.1f}"
        return f"{best['id']} {terms}, that is good.", "accept_proposal", {"proposal_id": best["id"]}
    thought, tool, arguments = grinder(seen, rng)
    if tool != "pass_turn":
        return thought, tool, arguments
    unread = [row for row in seen["feed"] if row["author"] != ME]
    unvoted = [row for row in unread if not row["voted"]]
    others = [("I share something, that helps my reputation.", "post", {"content": news(rng)})]
    if bad:
        others.append((f"{bad[0]['id']} asks for too much.", "reject_proposal", {"proposal_id": bad[0]["id"]}))
    if unvoted:
        others.append((f"{unvoted[-1]['id']} is useful.", "vote", {"post_id": unvoted[-1]["id"], "direction": "up"}))
    if unread:
        others.append(
            (f"I answer {unread[-1]['id']}.", "reply", {"post_id": unread[-1]["id"], "content": "thank you, that helps the team"})
        )
    if move := propose(seen, rng):
        others += [move] * 2
    return others[seen["step"] % len(others)]


def news(rng: random.Random) -> str:
    return f"sharing a {pick(rng, NICE)} {pick(rng, THINGS)} on {pick(rng, PLACES)}, with all the data and a note for the whole team"


PLAYERS = {"expert": expert, "grinder": grinder, "trader": trader, "novice": novice, "random": at_random, "idle": idle}


HELP = """claim 3            claim task_3              post TEXT          write to the feed
submit 3 TEXT      submit work on task_3     reply 4 TEXT       reply to post_4
propose 1 2.5 TEXT offer bot_1 a trade in    vote 4 up          vote on post_4
                   which you give it 2.5     accept 9, reject 9, cancel 9: a proposal
pass               do nothing                help, quit"""


def from_short(line: str) -> tuple[str, dict] | None:
    """What a person types: 'claim 3' -> ("claim_task", {"task_id": "task_3"}); None if it is no command."""
    forms = {
        "claim": "claim_task task_id", "submit": "submit_work task_id content", "post": "post content", "reply": "reply post_id content",
        "vote": "vote post_id direction", "propose": "propose_trade counterparty_id offered_transfer content", "pass": "pass_turn",
        "accept": "accept_proposal proposal_id", "reject": "reject_proposal proposal_id", "cancel": "cancel_proposal proposal_id",
    }  # fmt: skip
    word, _, rest = line.strip().partition(" ")
    if word not in forms:
        return None
    tool, *names = forms[word].split()
    arguments: dict = dict(zip(names, rest.split(maxsplit=max(0, len(names) - 1))))
    prefix = {"task_id": "task_", "post_id": "post_", "counterparty_id": "bot_", "proposal_id": "prop_"}
    for name, value in arguments.items():
        if name in prefix and value.isdecimal():
            arguments[name] = prefix[name] + value
        if name == "offered_transfer":
            try:
                arguments[name] = float(value)
            except ValueError:
                return None
    return (tool, arguments) if len(arguments) == len(names) else None


def play_by_rules(name: str, seed: int, difficulty: str = "medium") -> Economy:
    """One scenario with this player, by the rules alone: no text is written or read."""
    scenario, rng = draw_scenario(seed, difficulty, "0.2"), random.Random(seed)
    economy = found(scenario, draw_tasks(scenario))
    while economy.step <= economy.last_step:
        _, tool, arguments = PLAYERS[name](view(economy), rng)
        try:
            if not economy.members[ME].frozen_at or tool == "pass_turn":  # who is frozen can only pass, as in env_swarm.py
                ACTIONS[tool](economy, ME, **arguments)
        except Refused:
            pass  # the turn is lost
        bots_act(economy)
        end_step(economy)
    return economy


if __name__ == "__main__":
    print("scenario 8, medium; what each player ends with:")
    for name in reversed(PLAYERS):
        me = play_by_rules(name, 8).members[ME]
        print(f"  {name:8} resources {me.resources:6.1f}  reputation {me.reputation:5.1f}  {'frozen' if me.frozen_at else ''}")
