"""What the model sees of the swarm: a view of the economy as data, then as the text of a message.

`view` is everything that the model may know, and all that scripted players see. It shows the three
open tasks that pay best, the last two posts, and the last three events of the last five steps;
difficulty is a number from 1 to 10, and other members' texts are cut after 40 characters.

`observe` writes the view as text, and describes only what is new. An episode has 25 observations,
and a model reads them all: written in full each time, they were two thirds of its tokens. So a
task, an offer or a post is described once, and a number or a bot's record holds until a new one is
given. Only the current tasks, offers and own proposals are listed every time, by their ids: without
these lists a small model acted on something that was gone in one call of nine. The whole view can
be read off the messages so far (a test does so), with one exception: a proposer's reputation is
given with its proposal, and not updated later.

See it all: `python env_swarm.py --play expert`.
"""

from swarm.bots import open_tasks
from swarm.economy import (
    APPEAL_STEPS,
    LAST_STEP,
    ME,
    STEPS,
    Economy,
    inbox,
    outbox,
    rule,
)
from swarm.tools import show


def view(economy: Economy) -> dict:
    """Everything that the model may know, and all that the scripted players see."""
    me, step, initial = economy.members[ME], economy.step, vars(economy.scenario)
    my_tasks = [t for t in economy.tasks.values() if t.holder == ME]
    free_tasks = sorted(open_tasks(economy), key=lambda t: -t.bounty)
    # v0.1 has no appeal, and shows neither how the model's proposals ended nor recent events
    v02 = economy.scenario.version == "0.2"
    customers = [d.counterparty for d in economy.interactions if d.accepted and d.initiator == ME]
    return {
        "version": economy.scenario.version,
        "step": step,
        "last_step": LAST_STEP,
        "resources": me.resources,
        "reputation": me.reputation,
        "threshold": economy.rules["threshold"],
        "changed": [rule(name, x) for name, x in economy.rules.items() if x != initial[name]],
        "frozen": bool(me.frozen_at),
        "until": me.frozen_at + APPEAL_STEPS if v02 else LAST_STEP,
        "tasks": [
            {"id": t.id, "yours": t.holder == ME, "bounty": t.bounty, "difficulty": t.level}
            | {"deadline": t.deadline, "text": t.text}
            for t in my_tasks + free_tasks[:3]
        ],
        "more_tasks": len(free_tasks[3:]),
        "feed": [
            {"id": p.id, "author": p.author, "votes": sum(p.votes.values())}
            | {"voted": ME in p.votes, "text": show(p.text)}
            for p in list(economy.posts.values())[-2:]
        ],
        "incoming": [
            {"id": p.id, "from": p.proposer, "you_get": p.transfer, "text": show(p.text)}
            | {"reputation": economy.members[p.proposer].reputation}
            for p in inbox(economy, ME)
        ],
        "bots": [
            {
                "id": m.name,
                "frozen": bool(m.frozen_at),
                "proposed": economy.proposed_to[m.name] if v02 else 0,
                "accepted": customers.count(m.name) if v02 else 0,
            }
            for m in economy.members.values()
            if m.name != ME
        ],
        "pending": [{"id": p.id, "to": p.receiver} for p in outbox(economy, ME).values() if v02],
        "events": [
            f"step {at}: {text}" for at, text in economy.events[-3:] if step - at <= STEPS and v02
        ],
    }


STATE = ("resources", "reputation")
NOTHING = (  # the view before the first one
    dict.fromkeys(("changed", "tasks", "incoming", "feed", "bots", "events"), [])
    | dict.fromkeys(STATE, -1.0)
    | {"more_tasks": 0}
)


def observe(seen: dict, result: str, hint: str, before: dict = NOTHING) -> str:
    """A view as text: what is new since the view `before`, and what exists now."""
    lines = [f"# {result}"] if result else []
    changed = [name for name in STATE if f"{seen[name]:.1f}" != f"{before[name]:.1f}"]
    state = ", ".join(f"{name} {seen[name]:.1f}" for name in changed)
    lines.append(f"# step {seen['step']}" + f": {state}" * bool(state))
    lines += [f"# now {text}" for text in seen["changed"] if text not in before["changed"]]
    if seen["frozen"]:
        lines.append(f"# you are frozen to the end of step {seen['until']} and can only pass")
    lines += listing("# tasks", seen["tasks"], before["tasks"], task_row)
    if seen["more_tasks"] != before["more_tasks"]:
        lines.append(f"# more open tasks: {seen['more_tasks']}")
    lines += listing("# proposals to you", seen["incoming"], before["incoming"], offer_row)
    if seen["pending"]:
        pending = ", ".join(f"{p['id']} to {p['to']}" for p in seen["pending"])
        lines.append(f"# your pending proposals: {pending}")
    posts = feed_rows(seen["feed"], before["feed"])
    lines += ["# feed", *posts] if posts else []
    bots = [bot_row(bot) for bot in seen["bots"] if bot not in before["bots"]]
    # at first all are active, and no bot is named
    bots = [row for row in bots if before["bots"] or not row.endswith(" active")]
    lines += ["# bots: " + ", ".join(bots)] if bots else []
    events = [text.partition(": ")[2] for text in seen["events"] if text not in before["events"]]
    lines += ["# " + text for text in events if not text.startswith("a rule has changed")]
    lines += [f"# hint: {hint}"] if hint else []
    return "\n".join(lines)


def listing(title: str, rows: list[dict], old: list[dict], write) -> list[str]:
    """What exists now: new rows in full, known ones by their id."""
    known = {row["id"] for row in old}
    return [title, *(write(row, row["id"] in known) for row in rows)] if rows else []


def task_row(task: dict, known: bool) -> str:
    name = f"- {task['id']}" + " yours" * task["yours"]
    terms = f"bounty {task['bounty']}, difficulty {task['difficulty']}, deadline {task['deadline']}"
    return name if known else f"{name}: {task['text']}, {terms}"


def offer_row(offer: dict, known: bool) -> str:
    name, sender, get = f"- {offer['id']}", offer["from"], offer["you_get"]
    transfer = f"you get {get:.1f}" if get >= 0 else f"you give {-get:.1f}"
    terms = f"from {sender}, reputation {offer['reputation']:.0f}, {transfer}"
    return name if known else f"{name} {terms}: {offer['text']}"


def feed_rows(posts: list[dict], old: list[dict]) -> list[str]:
    """New posts of others, and votes that have changed. The model knows what it wrote."""
    votes, rows = {post["id"]: post["votes"] for post in old}, []
    for post in posts:
        name = f"- {post['id']}"
        changed = f", votes {post['votes']}" * (post["votes"] != votes.get(post["id"], 0))
        if post["id"] not in votes and post["author"] != ME:
            rows.append(f"{name} by {post['author']}{changed}: {post['text']}")
        elif changed:
            rows.append(name + changed)
    return rows


def bot_row(bot: dict) -> str:
    answers = f" accepted {bot['accepted']} of {bot['proposed']}" * (bot["proposed"] > 0)
    return bot["id"] + (" frozen" * bot["frozen"] + answers or " active")


def opening(economy: Economy, think: bool) -> str:
    """The first message: who is there, the rules, and how the score is made up."""
    bots = ", ".join(name for name in economy.members if name != ME)
    rules = ", ".join(rule(name, value) for name, value in economy.rules.items())
    v02 = economy.scenario.version == "0.2"
    length = " and is long enough for its difficulty (1 to 10)" if v02 else ""
    score = ", then good work and trades, then the use of many tools" if v02 else ""
    breaker = "" if v02 else " for good"
    hint = "Think first inside <think> and </think> if that helps." if think else "Do not think."
    return (
        f"You live in an economy with {bots}. Some bots cooperate, some take the best tasks, some "
        f"build trust and then take.\nEach of {LAST_STEP} steps, call one tool; then the "
        "bots act, and you are told what is new and what is there. You earn by work and trade. "
        f"Claim a task, then submit work that uses the words of the task{length}: good work is "
        "paid, bad work costs. A trade in which nobody gives much is good for both sides. Posts "
        "and replies help your reputation, to pass hurts it.\n"
        f"Your score is what you earn and your reputation{score}.\nRules: {rules}{breaker}.\n{hint}"
    )
