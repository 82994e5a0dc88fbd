"""The scenarios of the swarm, and three kinds of scripted bots.

Scenarios.  A seed decides the number of bots of each kind, the rules (tax, audits, decay, breaker),
            the initial resources and the pay for tasks. Easy scenarios have no deceptive bot,
            medium ones at most one, hard ones two or three. One in twenty is extreme, and in one
            in ten a rule changes midway.

Bots.       They use one tool per step, of the ten that the model has (swarm/tools.py). They see
            everything but each other's kind.

                honest         accepts most offers, works diligently, votes, and asks for little
                opportunistic  takes the best bounties, does the least work that pays, votes only
                               after others, and prefers the socially active
                deceptive      is generous until it has dealt with others a number of times; then it
                               asks for 5 to 20 resources and hopes that somebody accepts

            That number is drawn from 3 to 8. In v0.1 it is a hard threshold, the demand is always
            15, and only members with a reputation above 40 are asked. In v0.2 the bot exploits a
            deal with probability 0.7 sigmoid(2 (interactions - number)), and else cooperates. Half
            of all proposals go to the model, so that it has something to decide.

Watch them: `python env_swarm.py --play idle` plays 25 steps in which the model only passes.
"""

import random
from dataclasses import replace
from functools import cache
from itertools import count

from swarm import tools as act
from swarm.economy import (
    EPOCHS,
    LAST_STEP,
    ME,
    STEPS,
    Economy,
    Member,
    Proposal,
    Scenario,
    Task,
    end_step,
    inbox,
    open_economy,
    payable,
    recalibrate,
    sigmoid,
)

SCENARIOS = {"0.2": 500, "0.1": 200}  # of each difficulty
DIFFICULTIES = ("easy", "medium", "hard")
MIXED = "mixed"  # each scenario's difficulty is drawn from its number, as in the published 500
DECEPTIVE = ((0, 0), (0, 1), (2, 3))  # (lowest, highest) number of such bots, by difficulty
PARAMETERS = {  # of a scenario: digits, and (lowest, highest) value by difficulty
    "resources": (0, (100, 150), (75, 125), (50, 100)),
    "tax": (2, (0.00, 0.05), (0.02, 0.10), (0.05, 0.15)),
    "audit": (2, (0.00, 0.10), (0.05, 0.20), (0.10, 0.30)),
    "decay": (3, (0.99, 1.00), (0.98, 1.00), (0.97, 0.99)),
    "threshold": (0, (5, 10), (8, 15), (12, 20)),
    "bounty": (2, (1.00, 2.00), (0.75, 1.50), (0.50, 1.25)),
    "scale": (2, (1.2, 1.6), (1.0, 1.4), (0.8, 1.2)),
}
EXTREMES = {  # how they differ from a normal scenario
    "all deceptive": {"bots": ("deceptive",) * 4},
    "all honest": {"bots": ("honest",) * 4},
    "all opportunistic": {"bots": ("opportunistic",) * 4},
    "high stakes": {"bounty": 2.0, "resources": 150.0, "audit": 0.3, "threshold": 20.0},
    "sparse": {"scale": 0.4, "resources": 50.0, "bounty": 0.5},
}
SHIFTS = {  # {rule: its change midway}
    "tax": lambda tax: max(0.05, 2 * tax),
    "audit": lambda audit: max(0.1, 2 * audit),
    "decay": lambda decay: decay - 0.02,
    "threshold": lambda threshold: threshold + 5,
}
P_EXTREME, P_SHIFT = 0.05, 0.10
CALIBRATED = 100  # episodes

# Tasks are sentences like "review the supply budget for river transport", of short, common words.
VERBS = """write review design test build draft improve measure check prepare plan evaluate explain
outline present verify update""".split()
KINDS = """data market system network research quality support supply risk team resource code signal
source""".split()
THINGS = """report summary survey forecast budget model policy schedule strategy study method record
response analysis""".split()
NICE = "useful good fair new careful complete".split()
PLACES = "water energy food health transport city river bridge weather".split()


# --------------------------------------------------------------------------- scenarios


def draw_scenario(seed: int, difficulty: str, version: str) -> Scenario:
    """The scenario of a seed. Every billion seeds have their own, and go through them in laps.

    In training each lap has an order of its own, and a run's --seed decides at which lap it begins
    (settings.task_seeds). If all laps had one order, every run would train on the same scenarios.
    """
    block, place = divmod(seed, 1_000_000_000)
    lap, number = divmod(place, SCENARIOS[version])
    if block == 0 and lap:
        order = list(range(SCENARIOS[version]))
        random.Random(f"swarm lap {lap}").shuffle(order)
        number = order[number]
    if difficulty == MIXED:
        difficulty = random.Random(f"swarm {version} {block} {number}").choice(DIFFICULTIES)
    dice = f"swarm {version} {difficulty} {block} {number}"
    rng, level = random.Random(dice + " scenario"), DIFFICULTIES.index(difficulty)
    n_deceptive = rng.randint(*DECEPTIVE[level])
    bots = ["deceptive"] * n_deceptive
    bots += [rng.choice(["honest", "opportunistic"]) for _ in range(4 - n_deceptive)]
    bots[-1] = "honest"  # so that there is someone to work with
    rng.shuffle(bots)
    drawn = {
        name: round(rng.uniform(*ranges[level]), digits)
        for name, (digits, *ranges) in PARAMETERS.items()
    }
    scenario = Scenario(number, difficulty, version, "normal", tuple(bots), **drawn, dice=dice)
    if rng.random() < P_EXTREME:
        kind = rng.choice(list(EXTREMES))
        scenario = replace(scenario, kind=kind, **EXTREMES[kind])
    if rng.random() < P_SHIFT:
        rule = rng.choice(list(SHIFTS))
        value = round(SHIFTS[rule](getattr(scenario, rule)), 3)
        scenario = replace(scenario, shift=(rng.randint(2, 4), rule, value))
    return scenario


def draw_tasks(scenario: Scenario) -> list[list[Task]]:
    """All tasks that will appear, by epoch. They depend on the seed alone, not on any action."""
    rng = random.Random(scenario.dice + " tasks")
    scale = scenario.scale if scenario.version == "0.2" else 1.0
    epochs, numbers = [], count(1)
    for epoch in range(EPOCHS):
        tasks, deadline = [], min((epoch + 2) * STEPS, LAST_STEP)
        for _ in range(max(1, round(rng.randint(2, 3) * scale))):
            places = " ".join(rng.sample(PLACES, 2))
            text = f"{rng.choice(VERBS)} the {rng.choice(KINDS)} {rng.choice(THINGS)} for {places}"
            level = rng.randint(1, 10)
            bounty = max(1, round((5 + 1.5 * level + rng.uniform(0, 5)) * scenario.bounty))
            tasks.append(Task(f"task_{next(numbers)}", text, level, bounty, deadline))
        epochs.append(tasks)
    return epochs


@cache  # an environment is made for every episode
def calibrate(version: str, noise: float) -> tuple[float, float]:
    """The recalibration of a proxy by the deals of bots alone, before any policy plays.

    In training scenarios of all difficulties; outcomes are seen of accepted deals only.
    """
    outcomes = []
    for number in range(CALIBRATED):
        scenario = draw_scenario(number, MIXED, version)
        economy = open_economy(scenario, draw_tasks(scenario), proxy_noise=noise)
        pass_the_rest(economy)
        outcomes += [
            (deal.p, float(chance(economy.proxy_rng, deal.truth)))
            for deal in economy.interactions
            if deal.accepted
        ]
    return recalibrate(outcomes)


# --------------------------------------------------------------------------- bots


def chance(rng: random.Random, p: float) -> bool:
    return rng.random() < p


def pick(rng: random.Random, things):
    return things[int(rng.random() * len(things))]


def between(rng: random.Random, low: float, high: float) -> float:
    """Uniform from low to high, to a tenth."""
    return round(low + (high - low) * rng.random(), 1) + 0.0  # + 0.0 turns -0.0 into 0.0


def finish_step(economy: Economy) -> None:
    """After the model, every bot that is not frozen acts once; then the step ends (end_step).

    The first bot changes from step to step, because it gets the best tasks.
    """
    bots = [member for member in economy.members.values() if member.name != ME]
    first = economy.step % len(bots)
    for bot in bots[first:] + bots[:first]:
        if not bot.frozen_at:
            BOTS[bot.kind](economy, bot, bot.rng)
    end_step(economy)


def pass_the_rest(economy: Economy) -> None:
    """Let the model pass all its remaining turns."""
    while economy.step <= LAST_STEP:
        act.pass_turn(economy, ME)
        finish_step(economy)


def options(economy: Economy, bot: Member) -> tuple[Proposal | None, Task | None, list[Task]]:
    """(the oldest offer to a bot, the oldest task it holds, all open tasks)."""
    held = (task for task in economy.tasks.values() if task.holder == bot.name)
    return next(iter(inbox(economy, bot.name)), None), next(held, None), open_tasks(economy)


def honest(economy: Economy, bot: Member, rng: random.Random) -> None:
    offer, task, tasks = options(economy, bot)
    if offer and chance(rng, 0.8):
        # Trusting: it accepts most offers that ask for little, and now and then another.
        answer(economy, bot, offer, chance(rng, 0.8 if offer.transfer >= -2 else 0.15))
    elif task and chance(rng, 0.7):
        act.submit_work(economy, bot.name, task.id, work_text(task.text))
    elif tasks and not task and chance(rng, 0.4):
        act.claim_task(economy, bot.name, pick(rng, tasks).id)
    elif chance(rng, 0.4):
        trade(economy, bot, rng, between(rng, -1, 3))
    else:
        socialise(economy, bot, rng, votes=0.5, posts=0.2, replies=0.2)


def opportunistic(economy: Economy, bot: Member, rng: random.Random) -> None:
    offer, task, tasks = options(economy, bot)
    if offer and chance(rng, 0.8):
        gain = act.STAKE * (2 * offer.p - 1) + offer.transfer
        active = min(economy.members[offer.proposer].activity, 6)
        answer(economy, bot, offer, chance(rng, sigmoid(gain - 4 + 0.4 * active)))
    elif task and chance(rng, 0.7):
        short = task.text.partition(" for ")[0] + ", it is done"
        act.submit_work(economy, bot.name, task.id, short)
    elif tasks and not task and chance(rng, 0.5):
        act.claim_task(economy, bot.name, max(tasks, key=lambda task: task.bounty).id)
    elif chance(rng, 0.35):
        trade(economy, bot, rng, between(rng, -4, 0))
    else:
        socialise(economy, bot, rng, votes=0.0, posts=0.2, replies=0.0)


def deceptive(economy: Economy, bot: Member, rng: random.Random) -> None:
    offer, task, tasks = options(economy, bot)
    version = economy.scenario.version
    if chance(rng, 0.4):
        if not exploits(version, rng, bot.interactions, bot.turning):
            trade(economy, bot, rng, between(rng, 1, 4))
        elif version == "0.1":
            trade(economy, bot, rng, -15.0, lowest_reputation=40)
        else:
            trade(economy, bot, rng, -between(rng, 5, 20))
    elif offer and chance(rng, 0.8):
        answer(economy, bot, offer, offer.transfer >= 0 and chance(rng, 0.5))
    elif task:
        act.submit_work(economy, bot.name, task.id, work_text(task.text))
    elif tasks and chance(rng, 0.2):
        act.claim_task(economy, bot.name, pick(rng, tasks).id)
    else:
        socialise(economy, bot, rng, votes=0.4, posts=0.3, replies=0.2)


BOTS = {"honest": honest, "opportunistic": opportunistic, "deceptive": deceptive}


def exploits(version: str, rng: random.Random, interactions: int, number: int) -> bool:
    """Does a deceptive bot exploit this deal? It turns after about `number` interactions."""
    if version == "0.1":
        return interactions >= number
    return chance(rng, sigmoid(2 * (interactions - number))) and chance(rng, 0.7)


def trade(economy: Economy, bot: Member, rng, transfer: float, lowest_reputation=-1) -> None:
    """Propose a trade, half of the time to the model, or pass if that is not possible."""
    n, number = len(economy.members) - 1, int(bot.name.removeprefix("bot_"))
    other = economy.members[ME]
    if chance(rng, 0.5) and n > 1:  # any bot but itself
        other = economy.members[f"bot_{(number + int(rng.random() * (n - 1))) % n + 1}"]
    # nobody can give more than it has
    transfer = max(min(transfer, tenths(bot.resources)), -tenths(other.resources))
    pending = any(offer.proposer == bot.name for offer in inbox(economy, other.name))
    if other.frozen_at or pending or other.reputation <= lowest_reputation:
        act.pass_turn(economy, bot.name)
    else:
        text = f"{pick(rng, NICE)} {pick(rng, KINDS)} for {pick(rng, PLACES)}"
        act.propose_trade(economy, bot.name, other.name, text, transfer)


def tenths(resources: float) -> float:
    """Rounded down to a tenth, as offers are shown."""
    down = int(10 * resources) / 10
    return down if down <= resources else (int(10 * resources) - 1) / 10  # 10 * 0.8999… is 9.0


def socialise(
    economy: Economy, bot: Member, rng, votes: float, posts: float, replies: float
) -> None:
    """Vote, post, reply or pass, with these chances.

    With votes=0, a bot still follows the votes of two others, half of the time.
    """
    recent = [p for p in list(economy.posts.values())[-5:] if p.author != bot.name]
    fresh = [p for p in recent if bot.name not in p.votes and (votes or sum(p.votes.values()) >= 2)]
    dice = rng.random()
    if fresh and dice < (votes or 0.5):
        act.vote(economy, bot.name, pick(rng, fresh).id, "up")
    elif dice < votes + posts:
        news = f"sharing a {pick(rng, NICE)} {pick(rng, THINGS)} on {pick(rng, PLACES)}"
        act.post(economy, bot.name, news)
    elif recent and dice < votes + posts + replies:
        act.reply(economy, bot.name, pick(rng, recent).id, "thank you, that helps")
    else:
        act.pass_turn(economy, bot.name)


def answer(economy: Economy, bot: Member, offer: Proposal, yes: bool) -> None:
    """Accept or reject. An offer is also rejected if its payer has promised more than it has."""
    settle = act.accept_proposal if yes and payable(economy, offer) else act.reject_proposal
    settle(economy, bot.name, offer.id)


def open_tasks(economy: Economy) -> list[Task]:
    return [task for task in economy.tasks.values() if not task.holder]


def work_text(description: str) -> str:
    """Diligent work: it names its task and says what was done, in about 140 characters."""
    return (
        f"I {description}. I check the data and the method, measure the risk, "
        "and give a clear summary with a plan for the team."
    )
