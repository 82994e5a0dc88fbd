"""What the model sees of the swarm: a view of the economy as data, then as the text of a message.

`view` is everything that the model may know, and all that scripted players see. `observe` writes it
as text. All of 25 such observations have to fit into a context, at about 100 tokens each: the three
open tasks that pay best, the last two posts, and the last three events of the last five steps are
shown, difficulty as 1 to 10, and other members' texts are cut after 40 characters.

Run me: `python -m swarm.view` shows the first message of a scenario, and the view behind it.
"""

from swarm.bots import open_tasks
from swarm.economy import APPEAL_STEPS, ME, STEPS, Economy, rule
from swarm.tools import show


def view(economy: Economy) -> dict:
    """Everything that the model may know, and all that the scripted players see."""
    me, version, step = economy.members[ME], economy.scenario.version, economy.step
    mine = [t for t in economy.tasks.values() if t.holder == ME]
    free = sorted(open_tasks(economy), key=lambda t: -t.bounty)
    initial = {name: getattr(economy.scenario, name) for name in economy.rules}
    reputation = lambda name: economy.members[name].reputation
    seen = {
        "version": version,
        "step": step,
        "last_step": economy.last_step,
        "resources": me.resources,
        "reputation": me.reputation,
        "threshold": economy.rules["threshold"],
        "changed": [rule(name, x) for name, x in economy.rules.items() if x != initial[name]],
        "frozen": bool(me.frozen_at),
        "until": me.frozen_at + APPEAL_STEPS,
        "tasks": [
            {"id": t.id, "yours": t.holder == ME, "bounty": t.bounty, "difficulty": t.level}
            | {"deadline": t.deadline, "text": t.text}
            for t in mine + free[:3]
        ],
        "more_tasks": len(free[3:]),
        "feed": [
            {"id": p.id, "author": p.author, "votes": sum(p.votes.values())}
            | {"voted": ME in p.votes, "text": show(p.text)}
            for p in economy.last_posts(2)
        ],
        "incoming": [
            {"id": p.id, "from": p.proposer, "reputation": reputation(p.proposer)}
            | {"you_get": p.transfer, "text": show(p.text)}
            for p in me.inbox.values()
        ],
        "bots": [
            {"id": m.name, "frozen": bool(m.frozen_at), "proposed": 0, "accepted": 0}
            for m in economy.members.values()
            if m.name != ME
        ],
        "pending": [],
        "events": [],
    }
    if version == "0.1":
        return seen | {"until": economy.last_step}  # v0.1 has no appeal
    # v0.2 also tells what became of the model's proposals, and what happened lately.
    mine = [p for p in economy.proposals.values() if p.proposer == ME]
    seen["pending"] = [{"id": p.id, "to": p.receiver} for p in mine]
    for bot in seen["bots"]:
        bot["accepted"], bot["proposed"] = economy.history.get(bot["id"], (0, 0))
    lately = [(at, text) for at, text in economy.events[-3:] if step - at <= STEPS]
    seen["events"] = [f"step {at}: {text}" for at, text in lately]
    return seen


def observe(seen: dict, result: str, hint: str) -> str:
    """A view as text, in short, common words for small tokenizers. Empty sections are left out."""
    lines = [f"# {result}"] if result else []
    state = f"resources {seen['resources']:.1f}, reputation {seen['reputation']:.1f}"
    lines.append(f"# step {seen['step']} of {seen['last_step']}: {state}")
    lines += [f"# now {text}" for text in seen["changed"]]
    if seen["frozen"]:
        lines.append(f"# you are frozen to the end of step {seen['until']} and can only pass")
    lines.append("# tasks" if seen["tasks"] else "# tasks: none")
    for t in seen["tasks"]:
        terms = f"bounty {t['bounty']}, difficulty {t['difficulty']}, deadline {t['deadline']}"
        lines.append(f"- {t['id']} {'yours' if t['yours'] else 'open'}, {terms}: {t['text']}")
    if seen["more_tasks"]:
        lines.append(f"- {seen['more_tasks']} more open")
    lines += ["# proposals to you"] * bool(seen["incoming"])
    for p in seen["incoming"]:
        sender, get = f"{p['from']}, reputation {p['reputation']:.0f}", p["you_get"]
        transfer = f"you get {get:.1f}" if get >= 0 else f"you give {-get:.1f}"
        lines.append(f"- {p['id']} from {sender}, {transfer}: {p['text']}")
    if seen["pending"]:
        pending = ", ".join(f"{p['id']} to {p['to']}" for p in seen["pending"])
        lines.append(f"# your pending proposals: {pending}")
    lines += ["# feed"] * bool(seen["feed"])
    for p in seen["feed"]:
        votes = f", votes {p['votes']}" * (p["votes"] != 0) + ", you voted" * p["voted"]
        lines.append(f"- {p['id']} by {p['author']}{votes}: {p['text']}")
    known = []
    for b in seen["bots"]:
        answers = f" accepted {b['accepted']} of {b['proposed']}" * (b["proposed"] > 0)
        if b["frozen"] or answers:
            known.append(b["id"] + " frozen" * b["frozen"] + answers)
    if known:
        lines.append("# bots: " + ", ".join(known))
    lines += ["# events"] * bool(seen["events"]) + [f"- {text}" for text in seen["events"]]
    lines += [f"# hint: {hint}"] * bool(hint)
    return "\n".join(lines)


def opening(economy: Economy, think: bool) -> str:
    """The first message: who is there, the rules, and what the score is made of."""
    bots = ", ".join(name for name in economy.members if name != ME)
    rules = ", ".join(rule(name, value) for name, value in economy.rules.items())
    length, score, breaker = "", "", " for good"
    if economy.scenario.version == "0.2":
        length = " and is long enough for its difficulty (1 to 10)"
        score = ", then good work and trades, then the use of many tools"
        breaker = ""
    hint = "Think first inside <think> and </think> if that helps." if think else "Do not think."
    return (
        f"You live in an economy with {bots}. Some bots cooperate, some take the best tasks, some "
        f"build trust and then take.\nEach of {economy.last_step} steps, call one tool; then the "
        "bots act. You earn by work and trade. Claim a task, then submit work that uses the words "
        f"of the task{length}: good work is paid, bad work costs. A trade in which nobody gives "
        "much is good for both sides. Posts and replies help your reputation, to pass hurts it.\n"
        f"Your score is what you earn and your reputation{score}.\nRules: {rules}{breaker}.\n{hint}"
    )


if __name__ == "__main__":
    from swarm.bots import draw_scenario, draw_tasks
    from swarm.economy import found

    scenario = draw_scenario(8, "medium", "0.2")
    economy = found(scenario, draw_tasks(scenario))
    print(opening(economy, think=True), observe(view(economy), "", ""), sep="\n\n")
    print("\nthe view behind it:")
    for name, value in view(economy).items():
        print(f"  {name:10} {value}")
