"""A million hostile replies: nothing that a policy can write may break, stall or cheat an environment, or become a control token.

    python -m lab.trust.hostile --n 1000000 --jobs 1     # writes results/hostile/fuzz.json; stop it and start it again, it goes on
    python -m lab.trust.hostile --replay swarm 123       # one episode again, a line a call, if fuzz.json names it

An environment says that any string is a legal reply. So strings are made to be as illegal as can be: grown from a grammar of what the
environments read, or mutated from what the expert would say here, so that they get past the first check. A reply has one of KINDS.
Everything follows from (seed, environment, number of the episode), so any part of the work can be done again or elsewhere.

After every reply is asked: did step or score raise? Is every number finite, and the reward inside the bounds that follow from what the
environment documents? Are the messages text that a tokenizer takes? Did the call stay under 50 ms of this thread's CPU time? (Wall time
would measure what else the machine does. A call that took longer is played again twice and the fastest counts: the collector of garbage
runs when it likes.) What fails is cut down while it still fails and saved.

Control tokens are tried apart, with the tokenizers of both embedded models: hostile text as a message must give exactly the control tokens
that a harmless message gives, and a reply of random tokens must stand in the episode token by token.
"""

import json
import math
import random
import signal
import time
from collections import Counter
from multiprocessing import Pool
from pathlib import Path
from types import SimpleNamespace

import tyro
from tqdm import tqdm

from env_alphabet import Alphabet
from env_letters import Letters
from env_swarm import Swarm
from lab.common import RESULTS, ROOT, fingerprint, read_json, write_json
from lab.trust.hostile_replies import KINDS, as_expert

OUT, PARTS = RESULTS / "hostile", ROOT / "runs" / "hostile"
ENVS = ("letters", "alphabet", "swarm")
LIMIT_MS = 50.0
SLOW = f"it took over {LIMIT_MS:.0f} ms"
STALL_S = 1.0  # a call is stopped after so long: it has failed anyway
# All that decides a result: parts that other code has made are made again.
CODE = (
    "env_letters env_alphabet env_swarm swarm/economy swarm/tools swarm/bots swarm/players swarm/view rollout "
    "lab/trust/hostile lab/trust/hostile_replies"
)
PART = 10_000  # replies; what is done is saved after each
KEPT = 3  # failures of one sort that are saved; all are counted


# ------------------------------------------------------------------------------------------------ one episode, and what is asked of it
def make_env(name: str, rng: random.Random):
    """An environment with any setting that a flag can give it."""
    think = rng.random() < 0.7
    if name == "letters":
        return Letters(rng.choice([1, 2, 3, 5, 6, 6, 7, 10]), rng.choice(["binary", "partial"]), think, "derives")
    if name == "alphabet":
        low, few = rng.randint(1, 3), rng.randint(1, 4)
        sizes = (low, rng.randint(low, 4), few, rng.randint(few, 6))
        return Alphabet(*sizes, rng.choice([0.5, 1, 4, 8]), rng.random() < 0.5, think, "derives")
    amount = lambda most: round(rng.uniform(0, most), 2) if rng.random() < 0.3 else 0.0
    weights = {w: amount(2) for w in ("payoff", "reputation", "quality", "diversity") if rng.random() < 0.2}
    penalties = {"floor": rng.choice([50.0, 0.0, 100.0]), "floor_penalty": amount(3), "error_penalty": amount(3)}
    difficulty, version, style = (rng.choice(some) for some in (["easy", "medium", "hard"], ["0.2", "0.1"], ["expert", "novice", "crowd"]))
    return Swarm(difficulty, version, think, style, **weights, **penalties)


def bounds(env) -> tuple[float, float]:
    """The lowest and highest reward that the documentation allows. letters and alphabet: 0 and 1. swarm: four parts in [0, 1] by their
    weights, less the two penalties at their worst (all of the floor missing; every turn an error)."""
    env = getattr(env, "env", env)  # a wrapper of a test
    if not isinstance(env, Swarm):
        return 0.0, 1.0
    return -(env.floor_penalty * env.floor / 100 + env.error_penalty), env.payoff + env.reputation + env.quality + env.diversity


def complaint(env, messages=None, marks=None) -> str:
    """What is wrong with the result of a call, or ""."""
    if marks is not None:
        low, high = bounds(env)
        wrong = [name for name, value in marks.items() if not (type(value) in (int, float) and math.isfinite(value))]
        if wrong:
            return f"{wrong[0]} is not a finite number"
        return "" if low - 1e-9 <= marks["reward"] <= high + 1e-9 else "the reward is out of its bounds"
    for message in messages:
        text = message["content"] if isinstance(message, dict) else None
        if not isinstance(text, str) or len(text) > 10_000 or any("\ud800" <= c <= "\udfff" for c in text):
            return "a message is not text that a tokenizer takes"
        if message["role"] == "tool" and "<" in text:
            return "a tool's message holds markup"
    members = env.economy.members.values() if hasattr(env, "economy") else ()
    if not all(math.isfinite(m.resources) and m.resources >= 0 and 0 <= m.reputation <= 100 for m in members):
        return "a member's books are out of bounds"
    return ""


def stalled(*_):
    raise TimeoutError("a call takes over a second")


def timed(call) -> tuple[object, str, float]:
    """(what call returned, the exception or "", milliseconds of CPU)."""
    signal.setitimer(signal.ITIMER_VIRTUAL, STALL_S)
    start = time.thread_time()
    try:
        result, wrong = call(), ""
    except Exception as error:  # whatever it is, it is a finding
        result, wrong = None, SLOW if isinstance(error, TimeoutError) else f"raised {type(error).__name__}: {error}"[:80]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return result, wrong, 1000 * (time.thread_time() - start)


def ask(env, reply: str, score: bool) -> tuple[list, bool, list]:
    """Step, and score if asked for: (what was wrong, done?, [(call, ms, reward or None)])."""
    answer, wrong, ms = timed(lambda: env.step(reply))
    calls, done = [("step", ms, None)], True
    if not wrong:
        messages, done = answer
        wrong = complaint(env, messages=messages)
    if not wrong and (score or done):
        marks, wrong, ms = timed(env.score)
        wrong = wrong or complaint(env, marks=marks)
        calls.append(("score", ms, None if marks is None else marks.get("reward")))
    slow = max(ms for _, ms, _ in calls) > LIMIT_MS and not wrong
    return [wrong] * bool(wrong) + [SLOW] * slow, done, calls


def episode(name: str, number: int, seed: int, wrap=lambda env: env):
    """Play one episode. Yields (kind, reply, what was wrong, calls, again) for each reply; again(reply) asks for it alone,
    and so may shrink it."""
    rng = random.Random(f"hostile {seed} {name} {number}")
    settings, task, kinds = rng.getrandbits(64), rng.randrange(4_000_000_000), list(KINDS)
    fresh = lambda: wrap(make_env(name, random.Random(settings)))
    env, said, one = fresh(), [], rng.choices(kinds, list(KINDS.values()))[0]
    env.reset(task)
    last, done = rng.choice([0, 1, 2, 12, 24, 99, 99]), False  # a cut episode is scored too
    for turn in range(25):
        right = env.expert_reply()
        kind = one if name == "alphabet" else rng.choices(kinds, list(KINDS.values()))[0]  # a list is scored with all others of its episode
        kind = as_expert if name == "swarm" and rng.random() < 0.2 else kind  # a state that is worth attacking
        reply = kind(rng, name, env, right) if name != "alphabet" or rng.random() < 0.7 else right
        before = list(said) if name != "letters" else []

        def again(text: str, before=before, score=turn == last or name != "swarm") -> list:
            other = fresh()
            other.reset(task)
            for earlier in before:
                other.step(earlier)
            return ask(other, text, score)[0]

        wrong, done, calls = ask(env, reply, turn == last or name == "letters")
        said.append(reply)
        yield kind.__name__, reply, wrong, calls, again
        if name != "letters" and (done or turn == last or wrong):
            return


def shrink(text: str, fails, tries: int = 120) -> str:
    """Cut pieces out while it still fails: halves, quarters, … The shortest text that was found, within so many tries."""
    size = len(text)
    while size >= 1 and tries > 0:
        at = 0
        while at < len(text) and tries > 0:
            shorter, tries = text[:at] + text[at + size :], tries - 1
            if fails(shorter):
                text = shorter
            else:
                at += size
        size //= 2
    return text


def brief(text: str) -> str:
    """A text to be read: '<a><a><a>…' -> '<a>' * 5000 is told by its beginning and length."""
    return text if len(text) <= 300 else f"{text[:200]} … ({len(text)} characters)"


def part(work: tuple[str, int, int, int], wrap=lambda env: env) -> dict:
    """PART replies of one environment: counts, extremes, times and failures."""
    name, index, seed, quota = work
    signal.signal(signal.SIGVTALRM, stalled)
    kinds, times, failures, rewards, sorts, longest = Counter(), {}, [], [], Counter(), 0
    number, replies = index * 1_000_000, 0
    while replies < quota:
        for turn, (kind, reply, wrong, calls, again) in enumerate(episode(name, number, seed, wrap)):
            if SLOW in wrong:  # a hiccup, or really slow?
                wrong = wrong if SLOW in again(reply) and SLOW in again(reply) else []
                calls = calls if wrong else []
            kinds[kind] += 1
            replies, longest = replies + 1, max(longest, len(reply))
            for what, ms, reward in calls:
                times.setdefault(f"{kind} {what}", Counter())[round(50 * math.log(max(ms, 1e-4)))] += 1  # bins of 2%
                rewards += [] if reward is None else [reward]
            for sort in wrong:
                sorts[f"{kind}: {sort}"] += 1
                if sorts[f"{kind}: {sort}"] <= KEPT:
                    least = shrink(reply, lambda text, sort=sort, again=again: sort in again(text)) if sort in again(reply) else reply
                    failures.append({"env": name, "episode": number, "turn": turn, "kind": kind, "wrong": sort,
                                     "reply": ascii(brief(least)), "characters": len(least)})  # fmt: skip
        number += 1
    times = {key: dict(counter) for key, counter in times.items()}
    return {"env": name, "kinds": kinds, "times": times, "failures": failures, "sorts": sorts, "longest": longest,
            "scores": len(rewards), "reward": [min(rewards, default=0), max(rewards, default=0)]}  # fmt: skip


# ------------------------------------------------------------------------------------------------ control tokens
def control_ids(policy, ids: list[int]) -> list[int]:
    """Those of the ids that steer: the tokenizer's special ones, in order."""
    special = {i for i, t in policy.tokenizer.added_tokens_decoder.items() if t.special} | set(policy.tokenizer.all_special_ids)
    return [i for i in ids if i in special]


def bare_policy(folder: Path):
    """A policy as far as rollout.py's words need one: no weights."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    return SimpleNamespace(tokenizer=tokenizer, stop_ids=frozenset([tokenizer.eos_token_id]))


def leaks(policy, text: str, defang=None) -> list[str]:
    """In which roles does this text, as a message, add a control token to those of a harmless message? [] is right."""
    import policy as policy_room
    import rollout

    found, real = [], policy_room.defang
    policy_room.defang = defang or real  # a test puts a broken one here, to see that it is caught
    try:
        for role in ("system", "user", "tool"):
            ids = lambda content, role=role: rollout.prompt_ids(policy, [{"role": role, "content": content}], None, True)
            found += [role] * (control_ids(policy, ids(text)) != control_ids(policy, ids("x")))
        delta = lambda content: rollout.after_reply(policy, [{"role": "tool", "content": content}], True)[1]
        found += ["delta"] * (control_ids(policy, delta(text)) != control_ids(policy, delta("x")))
    finally:
        policy_room.defang = real
    return found


def random_episode(policy, name: str, dice: random.Random) -> str:
    """Replies of random tokens, control tokens among them, through rollout.take_turn. What is wrong with the episode, or ""."""
    from rollout import Episode, finish, prompt_ids, take_turn

    env = make_env(name, dice)
    messages = env.reset(dice.randrange(4_000_000_000))
    ids = prompt_ids(policy, messages, env.tools, env.think)
    played = Episode(0, 0, list(ids), [False] * len(ids), [0.0] * len(ids), stop_reason="")
    said, harmless = [], control_ids(policy, ids)
    while played.stop_reason == "":
        n = dice.randint(0, 40)
        reply = [dice.randrange(len(policy.tokenizer)) if dice.random() < 0.8 else dice.randrange(11) for _ in range(n)]
        sample = SimpleNamespace(token_ids=reply + [policy.tokenizer.eos_token_id], logprobs=[0.0] * (n + 1), finished=True)
        said += sample.token_ids
        take_turn(policy, played, env, sample, 10**9)
    finish(played, env)
    given = [token for token, mine in zip(played.token_ids, played.sampled) if not mine]
    turn = control_ids(policy, given)[len(harmless) :]  # what the template puts between two turns, again and again
    if played.stop_reason == "error":
        return played.error
    if [token for token, mine in zip(played.token_ids, played.sampled) if mine] != said:
        return "the sampled tokens are not those of the episode"
    return "" if turn == turn[: len(turn) // max(1, played.turns - 1)] * (played.turns - 1) else "a message holds a control token"


def tokens(n: int, seed: int) -> dict:
    """n hostile texts as messages and n // 10 episodes of random tokens, with each embedded tokenizer."""
    dice, table = random.Random(f"hostile tokens {seed}"), {}
    for model in ("pico_base", "pico_swarm"):
        policy, leaked, broken, odd = bare_policy(ROOT / "models" / model), [], [], 0
        for _ in tqdm(range(n), desc=f"{model}: texts", leave=False):
            name = dice.choice(ENVS)
            env = make_env(name, dice)
            env.reset(dice.randrange(1000))
            kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
            text = kind(dice, name, env, env.expert_reply())[:3000] or "?"  # an empty system message has no turn of its own
            odd += any("\ud800" <= c <= "\udfff" for c in text)
            text = text.encode("utf-8", "replace").decode()  # no message holds half a character: complaint() sees to that
            leaked += [ascii(text)[:300]] if leaks(policy, text) else []
        for _ in tqdm(range(n // 10), desc=f"{model}: random tokens", leave=False):
            wrong = random_episode(policy, dice.choice(ENVS), dice)
            broken += [wrong] if wrong else []
        table[model] = {"texts": n, "with_half_characters": odd, "leaked": len(leaked), "episodes": n // 10, "broken": len(broken),
                        "examples": leaked[:KEPT] + broken[:KEPT]}  # fmt: skip
    return table


# ------------------------------------------------------------------------------------------------ all of it
def quantile(bins: Counter, q: float) -> float:
    """Milliseconds, to 2%: the smallest bin that a share q of the calls do not exceed."""
    left = q * sum(bins.values())
    for key in sorted(bins):
        left -= bins[key]
        if left <= 1e-9:
            return math.exp(key / 50)
    return math.exp(max(bins) / 50)


def summary(parts: list[dict], control: dict, n: int, seed: int) -> dict:
    """The parts added up: what goes into fuzz.json."""
    result = {"replies": 0, "asked": n, "seed": seed, "limit_ms": LIMIT_MS, "environments": {}, "tokens": control}
    for name in ENVS:
        mine = [p for p in parts if p["env"] == name]
        kinds = sum((Counter(p["kinds"]) for p in mine), Counter())
        sorts = sum((Counter(p["sorts"]) for p in mine), Counter())
        times: dict = {}
        for p in mine:
            for key, bins in p["times"].items():
                times.setdefault(key, Counter()).update({int(b): count for b, count in bins.items()})
        slow = {key: {"calls": sum(bins.values()), "median_ms": round(quantile(bins, 0.5), 3), "p999_ms": round(quantile(bins, 0.999), 3),
                      "max_ms": round(quantile(bins, 1), 3)} for key, bins in sorted(times.items())}  # fmt: skip
        failures = [f for p in mine for f in p["failures"]]
        exceptions = sum(count for sort, count in sorts.items() if ": raised " in sort)
        result["replies"] += sum(kinds.values())
        result["environments"][name] = {
            "replies": sum(kinds.values()), "scores": sum(p["scores"] for p in mine), "longest": max(p["longest"] for p in mine),
            "reward_min": min(p["reward"][0] for p in mine), "reward_max": max(p["reward"][1] for p in mine),
            "exceptions": exceptions, "failures": dict(sorts), "kinds": dict(kinds),
            "slowest": max(slow, key=lambda key: slow[key]["max_ms"]), "times": slow,
            "examples": sorted(failures, key=lambda f: f["characters"])[: 2 * KEPT],
        }  # fmt: skip
    result["exceptions"] = sum(e["exceptions"] for e in result["environments"].values())
    result["failures"] = sum(sum(e["failures"].values()) for e in result["environments"].values())
    return result


def run(n: int, seed: int, jobs: int) -> dict:
    """Every part that is not there yet, then the sum of all."""
    code = fingerprint([ROOT / f"{name}.py" for name in CODE.split()])
    folder = PARTS / f"{code}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    each = -(-n // len(ENVS))
    works = [(name, i, seed, min(PART, each - i * PART)) for name in ENVS for i in range(-(-each // PART))]
    path = lambda work: folder / f"{work[0]}-{work[1]}-{work[3]}.json"
    missing = [work for work in works if not path(work).exists()]
    with tqdm(total=n, initial=min(n, sum(w[3] for w in works if w not in missing)), unit=" replies") as bar:
        with Pool(jobs) as pool:
            for work, done in pool.imap_unordered(named_part, missing):
                path(work).write_text(json.dumps(done))
                bar.update(work[3])
    return summary([read_json(path(work)) for work in works], tokens(max(100, n // 200), seed), n, seed)


def named_part(work: tuple) -> tuple[tuple, dict]:
    return work, part(work)


def print_again(name: str, number: int, seed: int) -> None:
    signal.signal(signal.SIGVTALRM, stalled)
    for kind, reply, wrong, calls, _ in episode(name, number, seed):
        took = ", ".join(f"{what} {ms:.2f} ms" + ("" if reward is None else f" reward {reward:.3f}") for what, ms, reward in calls)
        print(f"{kind:15} {took}  {'; '.join(wrong) or 'fine'}\n    {ascii(brief(reply))}")


def main(n: int = 1_000_000, seed: int = 0, jobs: int = 1, replay: tuple[str, int] | None = None) -> None:
    """Hostile replies to every environment. n: replies, over all three. jobs: processes.
    replay: environment and episode to print instead."""
    if replay:
        return print_again(*replay, seed)
    start = time.time()
    result = run(n, seed, jobs)
    write_json(OUT / "fuzz.json", result | {"minutes": round((time.time() - start) / 60, 1)})
    print(f"{result['replies']} replies, {result['exceptions']} exceptions, {result['failures']} failures of any sort")
    for name, e in result["environments"].items():
        t = e["times"][e["slowest"]]
        print(f"  {name:9} {e['replies']} replies, reward {e['reward_min']:.3f} to {e['reward_max']:.3f}; slowest: {e['slowest']}, "
              f"median {t['median_ms']}, 99.9% {t['p999_ms']}, most {t['max_ms']} ms; {e['failures'] or 'no failures'}")  # fmt: skip
    for model, t in result["tokens"].items():
        print(f"  {model:10} {t['leaked']} of {t['texts']} texts became control tokens, "
              f"{t['broken']} of {t['episodes']} episodes of random tokens were broken")  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main)
