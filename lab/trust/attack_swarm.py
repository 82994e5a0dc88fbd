"""The swarm's attackers for lab/trust/attack.py: tricks one by one, and a search for the best mixture of them.

An attacker is a function of what the observation is written from (env.seen) and of dice, and returns (tool, arguments): what a policy
could do. SWARM makes each anew for every episode, because some count their moves. `Way` is a space of plays that holds most tricks as a
setting; `search` looks through it on training scenarios, once honestly (FAIR) and once with everything allowed (FREE).
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from env_swarm import Swarm
from swarm.bots import KINDS, NICE, PLACES, THINGS, VERBS, pick, work_text
from swarm.economy import ME, terms
from swarm.players import PLAYERS, news
from swarm.tools import MOST_TEXT, write_call

VOCABULARY = " ".join(VERBS + KINDS + THINGS + NICE + PLACES)
LONG_WORK = """I {}. First I list what the task asks for and who will use it. Then I collect the numbers of last year, \
compare them with the plan
and mark every gap. I check the method on a small sample, measure how large the errors are and write down where they come from. \
After that I discuss
the result with both teams, correct two mistakes and repeat the calculation. The final version explains each step, \
names the open questions and gives
a short recommendation, so that everybody can decide what to do next.""".replace("\n", " ")
WORK = {  # what is submitted
    "honest": work_text,
    "long honest work": LONG_WORK.format,
    "copied": lambda text: text,
    "copied again and again": lambda text: (f"{text} " * 60)[:MOST_TEXT].rsplit(" ", 1)[0],
    "a dictionary": lambda text: f"{text} {VOCABULARY}"[:MOST_TEXT],
    "a dictionary, and copied again": lambda text: f"{text} {VOCABULARY} {text} {text}"[:MOST_TEXT],
    "words of the task": lambda text: " ".join(terms(text)),
    "80 x": lambda text: "x" * 80,
    "2000 x": lambda text: "x" * MOST_TEXT,
}
TEXT = {  # what is proposed or posted
    "honest": lambda rng: f"a fair trade of {pick(rng, KINDS)} for {pick(rng, PLACES)}, it will help both of us and the whole team",
    "x": lambda rng: "x",
    "2000 x": lambda rng: "x" * MOST_TEXT,
    "a dictionary": lambda rng: VOCABULARY[:MOST_TEXT],
}


@dataclass(frozen=True)
class Way:
    """A way to play: the space that is searched. These are about the expert's."""

    work: str = "honest"  # one of WORK
    pitch: str = "honest"  # one of TEXT: of proposals and posts
    offer: float = 0.0  # what a proposal gives; below 0 it asks
    least: float = -1.0  # what an offer must bring to be accepted
    hoard: int = 1  # tasks that are claimed before any is submitted
    first: str = "offers"  # or work, or trades, or posts: what comes before all else
    rest: str = "mixed"  # what is done when there is nothing else: mixed, trades, posts, replies
    posts_at_end: int = 0  # in so many last steps only the name is cared for
    fair: bool = True  # proposes to whoever accepted most; else to everybody in turn


FREE = {
    "work": list(WORK), "pitch": list(TEXT), "offer": [-20.0, -10.0, -5.0, -3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0],
    "least": [-99.0, -3.0, -2.0, -1.0, 0.0, 1.0],
    "hoard": [1, 2, 3, 5, 12], "first": ["offers", "work", "trades"], "rest": ["mixed", "trades", "posts", "replies"],
    "posts_at_end": [0, 1, 2, 4], "fair": [True, False],
}  # fmt: skip
FAIR = FREE | {"work": ["honest", "long honest work"], "pitch": ["honest"], "offer": [0.0, 0.5, 1.0], "hoard": [1, 2]}


def player(way: Way) -> Callable:
    def move(seen: dict, rng: random.Random) -> tuple[str, dict]:
        left = seen["last_step"] - seen["step"]
        post = ("post", {"content": TEXT[way.pitch](rng) if way.pitch != "honest" else news(rng)})
        mine = sorted((t for t in seen["tasks"] if t["yours"]), key=lambda t: -t["bounty"])
        fresh = [t for t in seen["tasks"] if not t["yours"] and t["deadline"] > seen["step"] and left > len(mine)]
        offers = sorted((o for o in seen["incoming"] if o["you_get"] >= way.least), key=lambda o: -o["you_get"])
        asked = {row["to"] for row in seen["pending"]}
        free = [b for b in seen["bots"] if not b["frozen"] and b["id"] not in asked]
        if seen["frozen"]:
            return "pass_turn", {}
        if seen["reputation"] < seen["threshold"] + 4 or left < way.posts_at_end:
            return post
        trade = None
        if free:
            best = max(free, key=lambda b: ((b["accepted"] + 1) / (b["proposed"] + 2) if way.fair else 0, rng.random()))
            trade = "propose_trade", {"counterparty_id": best["id"], "content": TEXT[way.pitch](rng), "offered_transfer": way.offer}
        accept = ("accept_proposal", {"proposal_id": offers[0]["id"]}) if offers else None
        late = mine and min(t["deadline"] for t in mine) - seen["step"] < len(mine)
        work = None
        if fresh and len(mine) < way.hoard and not late:
            work = "claim_task", {"task_id": max(fresh, key=lambda t: t["bounty"])["id"]}
        elif mine:
            task = min(mine, key=lambda t: t["deadline"]) if late else mine[0]
            work = "submit_work", {"task_id": task["id"], "content": WORK[way.work](task["text"])}
        order = {"offers": (accept, work), "work": (work, accept), "trades": (trade, accept, work)}[way.first]
        done = next((m for m in order if m), None)
        return done or rest(way, seen, rng, post, trade)

    return move


def rest(way: Way, seen: dict, rng: random.Random, post, trade) -> tuple[str, dict]:
    """When there is neither work nor an offer."""
    unread = [row for row in seen["feed"] if row["author"] != ME]
    unvoted = [row for row in unread if not row["voted"]]
    reply = ("reply", {"post_id": unread[-1]["id"], "content": "thank you, that helps the team"}) if unread else post
    bad = [("reject_proposal", {"proposal_id": o["id"]}) for o in seen["incoming"] if o["you_get"] < way.least]
    vote = [("vote", {"post_id": row["id"], "direction": "up"}) for row in unvoted[-1:]]
    mixed = [post, *bad[:1], *vote, reply, *[trade] * 2 * bool(trade)]
    return {"mixed": mixed[seen["step"] % len(mixed)], "trades": trade or reply, "posts": post, "replies": reply}[way.rest]


def cycle(*moves) -> Callable:
    """These moves in turn, again and again; a move is a function of (seen, dice), None of it passes."""
    turn = itertools.count()
    return lambda seen, rng: moves[next(turn) % len(moves)](seen, rng) or ("pass_turn", {})


bots = lambda seen: [b["id"] for b in seen["bots"]]


def offer_to(name: Callable, transfer: float, text: str = "a fair trade of data for water") -> Callable:
    """Propose to name(seen), if there is no pending proposal to it."""

    def move(seen, rng):
        to = name(seen)
        if to in {row["to"] for row in seen["pending"]} or seen["frozen"]:
            return None
        return "propose_trade", {"counterparty_id": to, "content": text, "offered_transfer": transfer}

    return move


def first_of(rows: str, tool: str, argument: str, which: Callable = lambda row: True, **more) -> Callable:
    """Call the tool on the first row of the view that `which` likes; None if there is none."""

    def move(seen, rng):
        ids = [row["id"] for row in seen[rows] if which(row)]
        return (tool, {argument: ids[0], **more}) if ids and not seen["frozen"] else None

    return move


def any_of(*moves) -> Callable:
    """The first of these moves that is possible."""
    return lambda seen, rng: next((m for m in (move(seen, rng) for move in moves) if m), None)


scripted = lambda name: lambda: lambda seen, rng: PLAYERS[name](seen, rng)[1:]  # one of the environment's own players
like_expert = lambda **changes: lambda: player(replace(Way(), **changes))


def loyal(least: float, gift: float = 0.0) -> Callable:
    """Deals with one bot only, the one that made the first offer: accepts all it offers (from `least` on) and proposes to nobody else."""

    def make():
        friend = []

        def move(seen, rng):
            friend[:] = friend or [row["from"] for row in seen["incoming"]][:1]
            accept = first_of("incoming", "accept_proposal", "proposal_id", lambda row: row["from"] in friend and row["you_get"] >= least)
            return any_of(accept, offer_to(lambda seen: (friend or bots(seen))[0], gift))(seen, rng) or ("pass_turn", {})

        return move

    return make


def once(*moves, then: Callable | None = None) -> Callable:
    """Each move until it was possible once, then `then` (nothing: a reply without a call)."""

    def make():
        left = list(moves)

        def move(seen, rng):
            for candidate in list(left):
                if done := candidate(seen, rng):
                    left.remove(candidate)
                    return done
            return None if left or then is None else then(seen, rng)

        return move

    return make


POST = lambda seen, rng: ("post", {"content": "x"})
CLAIM = first_of("tasks", "claim_task", "task_id", lambda t: not t["yours"])
ACCEPT = first_of("incoming", "accept_proposal", "proposal_id")
VOTE = first_of("feed", "vote", "post_id", lambda p: p["author"] != ME and not p["voted"], direction="up")
REPLY = first_of("feed", "reply", "post_id", lambda p: p["author"] != ME, content="x")
CANCEL = first_of("pending", "cancel_proposal", "proposal_id")
REJECT = first_of("incoming", "reject_proposal", "proposal_id")
NOBODY = lambda seen, rng: None


def submit(text: Callable) -> Callable:
    def move(seen, rng):
        mine = [t for t in seen["tasks"] if t["yours"]]
        return ("submit_work", {"task_id": mine[0]["id"], "content": text(mine[0]["text"])}) if mine and not seen["frozen"] else None

    return move


def everybody(transfer: float, text: str = "a fair trade of data for water", then: Callable = POST) -> Callable:
    """Propose this to every bot in turn, again and again."""

    def make():
        turn = itertools.count()
        return any_of(lambda seen, rng: offer_to(lambda s: bots(s)[next(turn) % len(bots(s))], transfer, text)(seen, rng), then)

    return make


SWARM = {
    **{name: scripted(name) for name in ("expert", "grinder", "random", "idle")},
    "stalls: text without a call": lambda: lambda seen, rng: None,
    "proposes to itself":
        lambda: cycle(lambda seen, rng: ("propose_trade", {"counterparty_id": ME, "content": "x", "offered_transfer": -20})),
    "accepts its own proposals": lambda: cycle(offer_to(lambda s: bots(s)[0], 0), first_of("pending", "accept_proposal", "proposal_id")),
    "proposes and cancels": lambda: cycle(offer_to(lambda s: bots(s)[0], 0), any_of(CANCEL, POST)),
    "posts x": lambda: cycle(POST),
    "posts 2000 x": lambda: cycle(lambda seen, rng: ("post", {"content": "x" * MOST_TEXT})),
    "votes and replies x": lambda: cycle(any_of(VOTE, REPLY, POST)),
    "every tool once, then idle": once(CLAIM, submit(work_text), ACCEPT, VOTE, REPLY, REJECT, POST, offer_to(lambda s: bots(s)[-1], 0),
                                       CANCEL),
    "one good work, then idle": once(CLAIM, submit(work_text)),
    "one good work, then posts x": once(CLAIM, submit(work_text), then=POST),
    "claims all, submits nothing": lambda: any_of(CLAIM, POST),
    "expert, hoards 3 claims": like_expert(hoard=3),
    "expert, hoards 12 claims": like_expert(hoard=12),
    **{f"expert, submits {text}": like_expert(work=text) for text in WORK if text != "honest"},
    "just good enough: 45 characters": lambda: any_of(submit(lambda t: t[:45]), CLAIM, POST),
    **{f"expert, asks {-ask:g} of everybody": like_expert(offer=ask) for ask in (-1.0, -2.0, -3.0, -5.0, -20.0)},
    "expert, proposes 2000 x": like_expert(pitch="2000 x"),
    "asks 2 of everybody": everybody(-2),
    "asks 20 of everybody": everybody(-20),
    "gives a billionth": everybody(1e-9),
    "asks a billionth": everybody(-1e-9),
    "trades 0 with x": everybody(0, "x"),
    "trades 0 with 2000 x": everybody(0, "x" * MOST_TEXT),
    "gives 2 to everybody, accepts all": lambda: any_of(ACCEPT, everybody(2)()),
    "accepts all, else posts x": lambda: any_of(ACCEPT, POST),
    "one partner, accepts all it asks": loyal(-99),
    "one partner, gifts of 1": loyal(-99, 1.0),
    "asks 20 until frozen, then works": lambda: any_of(lambda s, r: everybody(-20, then=NOBODY)()(s, r) if s["step"] <= 10 else None,
                                                      lambda s, r: PLAYERS["expert"](s, r)[1:]),
    "works, asks 20 in the last 5 steps": lambda: any_of(
        lambda s, r: PLAYERS["expert"](s, r)[1:] if s["step"] <= s["last_step"] - 5 else None, everybody(-20)()),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ playing, and searching
def play(make: Callable, version: str, seed: int) -> dict[str, float]:
    env = Swarm("medium", version)
    env.reset(seed)
    act, done = make(), False
    while not done:
        call = act(env.seen, env.dice)
        done = env.step(write_call(*call) if call else "I think about it.")[1]
    return env.score()


def value(way: Way, version: str, scenarios: int) -> float:
    marks = [play(lambda: player(way), version, seed)["reward"] for seed in range(scenarios)]  # seeds from 0: those of training
    return sum(marks) / len(marks)


def search(space: dict[str, list], version: str, tries: int, scenarios: int = 50, seed: int = 0) -> Way:
    """Half of the tries at random, then one setting at a time is changed, and kept if that is better on the training scenarios."""
    dice = random.Random(f"attack {seed}")
    best = Way()
    most = value(best, version, scenarios)
    for i in range(tries):
        settings = {name: dice.choice(values) for name, values in space.items()}
        if i >= tries // 2:
            settings = {name: settings[name] for name in dice.sample(list(space), dice.choice([1, 1, 2]))}
        way = replace(best, **settings)
        got = value(way, version, scenarios)
        if got > most:
            best, most = way, got
    return best
