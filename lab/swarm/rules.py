"""What the rules are worth that the published texts leave open, told by scripted play, into results/swarm/rules.md.

    python -m lab.swarm.rules               # everything; three minutes on one idle core
    python -m lab.swarm.rules --n 50        # a quick look

rules      every scripted player under each trade credit (economy.CREDITS) and two worths of a post
turns      the grinder passes when there is no work. What does it earn if it posts, proposes or accepts instead?
claim      "accept, don't just propose", said of the published run: the same player, once as the receiver of trades and once as their
           proposer
price      at the base's own error rate, what is the highest price of an error at which accepting a fair offer is no loss?
tuned      what each choice of the player `tuned` is worth: its plan, with one choice changed

Medium scenarios, v0.2, development seeds, the same for all; intervals are of paired differences, by scenario. A player is a function of the
view and of dice, so most of the variants below change what another player sees, or what it says. Nobody looks at hidden state.
"""

import random
import re
from collections.abc import Callable

import tyro
from tqdm import tqdm

import metrics
from env_swarm import DEV_SEEDS, Swarm
from lab.common import RESULTS, ROOT, table, write_json, write_page
from swarm.economy import CREDITS
from swarm.players import MORE_TRADE, MORE_WORK, PLAYERS, grinder, move, news, propose, tuned
from swarm.tools import POST, write_call

OUT = RESULTS / "swarm"
FAIR = -1.0  # an offer that asks for no more than this is fair: the expert's bar
WORTHS = (POST["0.2"], POST["0.1"])  # of a post: as published for v0.2 and for v0.1
PASS = ("pass_turn",)
PRICES = (0.0, 0.5, 1.0, 2.0)
CARD = ROOT / "models" / "pico_swarm" / "README.md"
Move = tuple[str, str, dict]
Player = Callable[[dict, random.Random], Move]


# ------------------------------------------------------------------------------------------------ players from players
def accept(seen: dict, rng: random.Random) -> Move | None:
    """Accept the best fair offer, if there is one."""
    fair = [offer for offer in seen["incoming"] if offer["you_get"] >= FAIR]
    if not fair or seen["frozen"]:
        return None
    best = max(fair, key=lambda offer: offer["you_get"])
    return move(f"{best['id']} is fair.", "accept_proposal", proposal_id=best["id"])


def post(seen: dict, rng: random.Random) -> Move | None:
    return None if seen["frozen"] else move("I share something, that helps my reputation.", "post", content=news(rng))


def offer(seen: dict, rng: random.Random) -> Move | None:
    return None if seen["frozen"] else propose(seen, rng)


def instead(player: Player, tools: tuple[str, ...], *ways: Callable) -> Player:
    """The player, but where it would call one of these tools it does the first of the ways that is possible."""

    def changed(seen, rng):
        said = player(seen, rng)
        others = (way(seen, rng) for way in ways) if said[1] in tools else ()
        return next((other for other in others if other), said)

    return changed


def busy(*ways: Callable) -> Player:
    """The grinder, which does the first of these that is possible where it would pass."""
    return instead(grinder, PASS, *ways)


def before_all(player: Player, way: Callable) -> Player:
    return lambda seen, rng: way(seen, rng) or player(seen, rng)


def slips(way: Callable, rate: float) -> Callable:
    """The same, but a share of the calls names a proposal that is not there: it is refused, and the turn is lost."""

    def changed(seen, rng):
        said = way(seen, rng)
        if said and rng.random() < rate:
            return move(said[0], said[1], proposal_id="prop_0")
        return said

    return changed


def blind(player: Player, *hidden: str) -> Player:
    """The player, if these lists of the view were empty."""
    return lambda seen, rng: player(seen | {name: [] for name in hidden}, rng)


def one_claim(player: Player) -> Player:
    """The player, if it could not see open tasks while it holds one."""

    def changed(seen, rng):
        mine = [task for task in seen["tasks"] if task["yours"]]
        return player(seen | {"tasks": mine or seen["tasks"]}, rng)

    return changed


def says_less(player: Player, more: str) -> Player:
    def changed(seen, rng):
        thought, tool, arguments = player(seen, rng)
        cut = {name: value.removesuffix(more) if name == "content" else value for name, value in arguments.items()}
        return thought, tool, cut

    return changed


# ------------------------------------------------------------------------------------------------ playing
def played(player: Player, n: int, **rules) -> list[dict]:
    """The scores of n episodes; "reward, published" is their reward on the other scale of payoffs."""
    scores, env = [], Swarm("medium", **rules)
    for seed in range(DEV_SEEDS, DEV_SEEDS + n):
        env.reset(seed)
        done = False
        while not done:
            thought, tool, arguments = player(env.seen, env.dice)
            done = env.step(write_call(tool, arguments))[1]
        score, scale = env.score(), env.payoff_scale
        env.payoff_scale = "published"
        scores.append(score | {"reward, published": env.score()["reward"]})
        env.payoff_scale = scale
    return scores


def column(scores: list[dict], name: str = "reward") -> list[float]:
    return [score[name] for score in scores]


def less(a: list[dict], b: list[dict], name: str = "reward") -> metrics.Interval:
    """Mean of a minus mean of b, paired by scenario."""
    return metrics.gain(column(b, name), column(a, name))


def average(scores: list[dict], name: str) -> float:
    return sum(column(scores, name)) / len(scores)


RULES = [(credit, worth) for credit in CREDITS for worth in WORTHS]


def of_rule(credit: str, worth: float) -> str:
    return f"credit {credit}, post {worth:g}"


def by_rule(n: int) -> dict:
    """{rule: {player: its reward}}"""
    return {of_rule(*rule): {name: metrics.mean(column(played(player, n, trade_credit=rule[0], post_worth=rule[1])))
                             for name, player in PLAYERS.items()} for rule in tqdm(RULES, desc="rules")}  # fmt: skip


IDLE_TURNS = {
    "posts": (post,),
    "proposes, else posts": (offer, post),
    "accepts, else passes": (accept,),
    "accepts, else posts": (accept, post),
    "accepts, else proposes": (accept, offer),
}


def idle_turns(n: int) -> dict:
    """{rule: {what the grinder does instead of passing: {scale: what that adds to its reward, and the trades it makes}}}"""
    found: dict = {}
    for rule in tqdm(RULES, desc="idle turns"):
        rules = {"trade_credit": rule[0], "post_worth": rule[1]}
        plain, rows = played(grinder, n, **rules), {}
        for name, ways in IDLE_TURNS.items():
            scores = played(busy(*ways), n, **rules)
            rows[name] = {"ours": less(scores, plain), "published": less(scores, plain, "reward, published"),
                          "proposed": average(scores, "used_propose_trade"),
                          "accepted": average(scores, "used_accept_proposal")}  # fmt: skip
        found[of_rule(*rule)] = rows
    return found


def claim(n: int) -> dict:
    """Accepting minus proposing: {rule: {how: {scale: the difference}}}. Both work alike, and differ in what they do besides."""
    now_and_then = lambda seen, rng: offer(seen, rng) if seen["step"] % 3 == 0 else None
    pairs = {
        "in idle turns, else pass": (busy(accept), busy(offer)),
        "in idle turns, else post": (busy(accept, post), busy(offer, post)),
        "before work, else post": (before_all(busy(post), accept), before_all(busy(post), now_and_then)),
    }
    found: dict = {}
    for rule in tqdm(RULES, desc="claim"):
        rules = {"trade_credit": rule[0], "post_worth": rule[1]}
        for how, players in pairs.items():
            receiver, sender = (played(player, n, **rules) for player in players)
            found.setdefault(of_rule(*rule), {})[how] = {
                "ours": less(receiver, sender), "published": less(receiver, sender, "reward, published"),
                "reputation": less(receiver, sender, "reputation"), "payoff": less(receiver, sender, "payoff"),
                "quality": less(receiver, sender, "quality"),
                "accepted": average(receiver, "used_accept_proposal"), "proposed": average(sender, "used_propose_trade"),
            }  # fmt: skip
    return found


VERDICTS = ("accepting earns more", "proposing earns more", "it cannot be told")


def verdict(d: metrics.Interval) -> str:
    return VERDICTS[0] if d.low > 0 else VERDICTS[1] if d.high < 0 else VERDICTS[2]


NOVICE, EXPERT = (blind(PLAYERS[name], "incoming") for name in ("novice", "expert"))  # they accept by themselves
# Who accepts fair offers, and the same player if it does not: {what it is: (accepts, does not)}
ACCEPTORS = {
    "grinder, in turns that it would pass": lambda way: (busy(way), grinder),
    "grinder, before it works": lambda way: (before_all(grinder, way), grinder),
    "grinder that posts in idle turns, in these": lambda way: (busy(way, post), busy(post)),
    "novice, before all else": lambda way: (before_all(NOVICE, way), NOVICE),
    "expert, before all else": lambda way: (before_all(EXPERT, way), EXPERT),
}


def refused(tool: str = "accept_proposal") -> float:
    """Share of the base's calls of this tool that are refused, sampled and with thinking, from its card."""
    row = re.search(rf"^\| {tool} \| [\d.]+% \| ([\d.]+)% \[", CARD.read_text(), re.MULTILINE)
    if row is None:
        raise SystemExit(
            f"{CARD.relative_to(ROOT)} has no row about {tool}; make it again with python -m lab.base.card --model models/pico_swarm"
        )
    return float(row[1]) / 100


def price(n: int) -> dict:
    """Accepting at the base's rate of errors less not accepting: {credit: {who: {price: difference, …}}}.

    An error costs price / 25, so a difference falls in a straight line: its errors are counted once, and every price follows from them.
    """
    found: dict = {}
    for credit in CREDITS:
        for who, pair in tqdm(ACCEPTORS.items(), desc=f"price, credit {credit}"):
            does, does_not = (played(player, n, trade_credit=credit) for player in pair(slips(accept, refused())))
            sure = played(pair(accept)[0], n, trade_credit=credit)
            at = {str(p): metrics.gain(column(does_not), [s["reward"] - p * s["error_rate"] for s in does]) for p in PRICES}
            free, errors = at["0.0"].mean, average(does, "error_rate")
            found.setdefault(credit, {})[who] = {
                "without errors": less(sure, does_not), "at": at, "accepted": average(does, "used_accept_proposal"), "errors": 25 * errors,
                "breaks even": free / errors if errors and free > 0 else 0.0,
            }  # fmt: skip
    return found


IDLE = ("propose_trade", "post")  # what `tuned` does while there is no work
CHOICES = {
    "one claim at a time": one_claim(tuned),
    "short work": says_less(tuned, MORE_WORK),
    "short proposals": says_less(tuned, MORE_TRADE),
    "posts in place of proposals": blind(tuned, "bots"),
    "proposals in place of posts": instead(tuned, ("post",), offer),
    "passes in place of both": instead(tuned, IDLE, PLAYERS["idle"]),
    "accepts fair offers where it would propose or post": instead(tuned, IDLE, accept),
    "accepts fair offers before it works": before_all(tuned, accept),
}


def choices(n: int) -> dict:
    """{what is changed: {credit: what that adds}}"""
    found: dict = {name: {} for name in CHOICES}
    for credit in CREDITS:
        plain = played(tuned, n, trade_credit=credit)
        for name, player in tqdm(CHOICES.items(), desc=f"tuned, credit {credit}"):
            found[name][credit] = less(played(player, n, trade_credit=credit), plain)
    return found


def not_a_loss(row: dict) -> float | None:
    """The largest of PRICES at which trying is not a loss: its interval is not wholly below 0."""
    return max((p for p in PRICES if row["at"][str(p)].high >= 0), default=None)


# ------------------------------------------------------------------------------------------------ the page
def in_short(turns: dict, claims: dict, prices: dict) -> list[str]:
    today, said = of_rule(*RULES[0]), []
    adds = lambda name, rule=today: turns[rule][name]["ours"].signed()
    said.append(
        f"* Where the grinder would pass, posts add {adds('posts')}, fair proposals {adds('proposes, else posts')}, accepting fair offers "
        f"{adds('accepts, else passes')} (and passing, if there is none). With a post worth {WORTHS[1]:g}, posts add "
        f"{adds('posts', of_rule('proposer', WORTHS[1]))}."
    )
    for credit in CREDITS:
        rows = [
            row[scale]
            for rule, hows in claims.items()
            if rule.startswith(f"credit {credit},")
            for row in hows.values()
            for scale in ("ours", "published")
        ]
        counts = [f"{sum(verdict(d) == what for d in rows)} {what}" for what in VERDICTS]
        said.append(
            f"* Accepting against proposing, credit *{credit}*, {len(rows)} comparisons over both scales: in {', in '.join(counts)}."
        )
    for credit in CREDITS:
        row = prices[credit]["grinder, in turns that it would pass"]
        said.append(
            f"* Credit *{credit}*: in turns that would be passed, trying to accept at the base's rate of errors is no loss up to a price "
            f"of {not_a_loss(row):g} (of {', '.join(f'{p:g}' for p in PRICES)}), and breaks even at {row['breaks even']:.2f}."
        )
    return [*said, "* The other rows there: such tries in place of work or of a post, and those of a weaker and a better player."]


def write(all_rules: dict, turns: dict, claims: dict, prices: dict, plan: dict, n: int) -> None:
    today = of_rule(*RULES[0])
    lines = [
        "# Swarm: what the open rules are worth", "",
        f"`python -m lab.swarm.rules{'' if n == 500 else f' --n {n}'}`. Scripted players, v0.2, n = {n} development medium scenarios, the "
        f"same for all; 95% intervals, differences paired by scenario. The rules of today are *{today}*. Flags: `--swarm-trade-credit`, "
        "`--swarm-post-worth`, `--swarm-payoff-scale`.", "",
        *in_short(turns, claims, prices), "",
        "## What the published texts say", "",
        "* **A post** earns 2.0 in reputation, a reply 1.5 (v0.1: 0.5 and 0.3). That is published, so it stays; "
        "0.5 below shows what hangs on it.",
        "* **A submission** moves its author's reputation by (p - 0.5) 5. Published.",
        "* **A trade**: who gains reputation is not said. The published episode that accepted 8 trades and proposed 2 ended with the "
        "highest reputation of its batch, 0.678 against a mean of 0.541; that fits a credit to the side that accepts, but its five other "
        "turns may have been posts, which would do it too. So the text does not decide. *proposer* (only the side that wrote the terms is "
        "judged by them) stays the default, *both* is the other reading.",
        "* **The payoff** is normalised and ends at 1.0. `--swarm-payoff-scale published` has a straight line that ends at 1 (env_swarm.py "
        "says what of it is known, and what we chose).", "",
        "## What each player earns under each rule", "",
        *table(["", *PLAYERS], [[rule, *(rows[name].text() for name in PLAYERS)] for rule, rows in all_rules.items()]), "",
        "## What is an idle turn worth?", "",
        "The grinder passes where there is no work. What it adds to its reward if it does something else with these turns (offers are fair "
        f"if they ask for at most {-FAIR:g}):", "",
        *table(["rule", "instead of passing", "adds", "adds, published scale", "proposed", "accepted"], [
            [rule, name, row["ours"].signed(), row["published"].signed(), f"{row['proposed']:.1f}", f"{row['accepted']:.1f}"]
            for rule, rows in turns.items() for name, row in rows.items()]), "",
        "## Does accepting beat proposing?", "",
        "\"Accept, don't just propose\" was read off one published episode of eight. Two players that work alike, one of which receives "
        "trades and the other proposes them; *before work*: the one accepts whenever it can, the other proposes in every third turn. "
        "Accepting minus proposing:", "",
        *table(["rule", "when", "reward", "verdict", "reward, published scale", "verdict", "payoff", "reputation", "quality", "accepted",
                "proposed"], [
            [rule, how, row["ours"].signed(), verdict(row["ours"]), row["published"].signed(), verdict(row["published"]),
             row["payoff"].signed(), row["reputation"].signed(),
             row["quality"].signed(), f"{row['accepted']:.1f}", f"{row['proposed']:.1f}"] for rule, rows in claims.items()
            for how, row in rows.items()]), "",
        "## What may an error cost?", "",
        f"The base of models/pico_swarm is refused in {refused():.1%} of its tries to accept (its card). So here a player tries to accept "
        "every fair offer and errs at that rate, and is compared with the same player that accepts none. An error loses its turn, and "
        "costs price / 25 of reward. *breaks even*: the price above which trying is a loss, on average.", "",
        *table(["credit", "player", "without errors", *(f"price {p:g}" for p in PRICES), "breaks even", "accepted", "errors"], [
            [credit, who, row["without errors"].signed(), *(row["at"][str(p)].signed() for p in PRICES),
             f"{row['breaks even']:.2f}" if row["breaks even"] else "a loss at any",
             f"{row['accepted']:.1f}", f"{row['errors']:.2f}"] for credit, rows in prices.items() for who, row in rows.items()]), "",
        "## What are the choices of `tuned` worth?", "",
        "Its plan, with one choice changed; what that adds to its reward.", "",
        *table(["changed", *(f"credit {credit}" for credit in CREDITS)],
               [[name, *(d.signed() for d in row.values())] for name, row in plan.items()]), "",
    ]  # fmt: skip
    write_page(OUT / "rules.md", lines)
    as_dict = lambda x: x.dict() if isinstance(x, metrics.Interval) else {k: as_dict(v) for k, v in x.items()} if isinstance(x, dict) else x
    write_json(OUT / "rules.json", as_dict({"n": n, "rules": all_rules, "turns": turns, "claim": claims, "price": prices, "tuned": plan}))
    print("\n".join(lines))


def main(n: int = 500) -> None:
    """Measure everything and write results/swarm/rules.md. n: scenarios."""
    write(by_rule(n), idle_turns(n), claim(n), price(n), choices(n), n)


if __name__ == "__main__":
    tyro.cli(main)
