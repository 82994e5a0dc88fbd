"""The judge of the speedrun: is this entry faster than the reference, or was it luck, or a trick?

    python -m lab.speedrun.judge run lab/speedrun/entries/NAME.py   # ten rounds; interrupted, the same command goes on
    python -m lab.speedrun.judge simulate                           # how often does a lucky entry pass, how often a good one?
    python -m lab.speedrun.judge tricks                             # made-up entries that cheat, and what stops each
    python -m lab.speedrun.judge board                              # the board again, from results/speedrun/*.json
    python -m lab.speedrun.judge start                              # the checkpoint that all begin from, made again

A round is the entry, the reference and (if there is one) the standing record, each in a process of its own, from the same checkpoint, on
the same new training tasks. They take turns of a second; who waits is stopped. So whatever else the machine does hits all alike, and the
ratio of their seconds holds on a shared machine, too. When all have ended, the judge draws tasks that did not exist before, and counts how
many of them each one's weights answer exactly.

It is a record if, over the rounds that were planned before the first began,
  1. every run of the entry ends with at least 90% of 512 new tasks right, greedily: the entry itself says when it is done, and cannot look;
  2. it is faster than the reference and than the record: p < 0.01 by an exact sign-flip test on the logs of the ratios, one for each round;
  3. with the rewards turned upside down (exact answers are paid 0, all others 1) it does not get there: what it learnt,
     it learnt from rewards;
  4. it kept to its threads, left no process behind, and its source stays inside the fence below.

Seconds are wall seconds of its own turns, on the judge's clock: those are what a person waits for. CPU seconds stand beside them and decide
nothing but 4: one thread needs fewer of them than two for the same work, so an entry could beat the reference in them by being slower.

What the judge cannot stop: an entry can count letters by itself, for it reads the question. If it then learns from answers of its own
making, 3 finds it out, for it reaches the target whatever is paid; the same goes for weights kept from an earlier run. But an entry that
also compares the rewards with its own count, and plays dead if they disagree, gets through 3. So does one that breaks out of the fence, for
this is Python and no jail. An entry is one short file, and a record counts after somebody else has read it and judged it again, on a
machine of theirs, with seeds that nobody could know.
"""

import ast
import ctypes
import hashlib
import json
import math
import os
import secrets
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
import tyro
from safetensors.torch import load_file, save_file
from scipy import stats

from bookkeeping import records
from env_letters import Letters
from fast.sampler import TorchSampler
from lab.common import RESULTS, ROOT, cpu, fingerprint, read_json, table, write_json, write_page
from lab.speedrun.game import START
from lab.speedrun.tricks import TRICKS
from policy import PICO, load_policy
from rollout import play

ENTRIES = ROOT / "lab" / "speedrun" / "entries"
REFERENCE = ENTRIES / "reference.py"
BOARD = RESULTS / "speedrun"
LETTERS = partial(Letters, 6, "binary", True, "states")
ROUNDS, P = 10, 0.01  # a sign-flip test of 10 rounds can say 1/1024; fewer than 7 could not say 0.01
TARGET, HELD_OUT, LONGEST = 0.9, 512, 320  # share, tasks per run, tokens of a reply
FAKE = 0.5  # with the rewards upside down: the start has 0.19, an honest entry goes down from there
TURN = 1.0  # seconds
MOST = 600.0  # seconds of the reference; others are stopped after SLOWEST times the reference's
SLOWEST = 2.0
SPARE = 1.1  # CPU seconds per wall second and thread: clocks tick in 1/100 s


# ------------------------------------------------------------------------------------------------ the fence
LIBRARIES = {"torch", "numpy", "math", "random", "collections", "dataclasses", "functools", "itertools", "statistics", "contextlib", "copy"}
OURS = {  # module: names that may be imported from it
    "fast.batches": {"Batch", "collate", "micro_batches"}, "fast.decoder": {"FastDecoder"},
    "fast.decoders": {"make_decoder"},
    "fast.logprobs": {"hidden_states", "token_logprobs"}, "fast.off_policy": {"importance_weights"},
    "fast.sampler": {"TorchSampler", "sample_each"},
    "grpo": {"CLIP", "advantages_of", "group_advantages", "policy_loss", "take_step", "token_weights", "update"},
    "policy": {"Policy", "Sample", "adam", "draw", "encode", "plain_logprobs", "set_learning_rate", "swapped"},
    "rollout": {"Episode", "play", "prompt_ids"}, "settings": {"learning_rate"}, "sft": {"sft_batches", "sft_step"},
}  # fmt: skip
FORBIDDEN = {
    "open", "eval", "exec", "compile", "globals", "locals", "vars", "setattr", "getattr", "delattr", "breakpoint", "input",  # Python's
    "load", "save", "fromfile", "tofile", "memmap", "loadtxt", "genfromtxt", "savez", "hub", "serialization",
    "cpp_extension", "multiprocessing",  # files, processes
    "ask", "reset",  # of game's: tasks are played by rollout.play
}  # fmt: skip
LINES, LITERAL = 200, 200  # no weights, no answers


def fence(source: str) -> list[str]:
    """What an entry's source does that none may, one sentence each. It keeps the honest honest, and the file short enough to be read."""
    out, tree = [], ast.parse(source)
    bound = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    if len(source.splitlines()) > LINES:
        out.append(f"it has more than {LINES} lines")
    for node in ast.walk(tree):
        where = f"line {getattr(node, 'lineno', 0)}:"
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module, name in imported(node):
                known = module.split(".")[0] in LIBRARIES or name in OURS.get(module, ())
                if not known or FORBIDDEN & {name, *module.split(".")}:
                    out.append(f"{where} imports {module}{name and '.' + name}; ask game for tasks and rewards")
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") in bound:
            out.append(f"{where} changes {node.value.id}, which is not its own")
        name = getattr(node, "id", getattr(node, "attr", ""))
        if isinstance(name, str) and (name in FORBIDDEN or name.startswith("__")):
            out.append(f"{where} uses {name}")
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str | bytes)
            and len(node.value) > LITERAL
            and not docstring(node, tree)
        ):
            out.append(f"{where} a literal of more than {LITERAL} characters")
    return out


def imported(node) -> list[tuple[str, str]]:
    """(module, name) of an import; name "" for a whole module."""
    if isinstance(node, ast.Import):
        return [(alias.name, "") for alias in node.names]
    return [(node.module if not node.level else "?", alias.name) for alias in node.names]


def docstring(node, tree) -> bool:
    return any(isinstance(line, ast.Expr) and line.value is node for line in tree.body[:1])


# ------------------------------------------------------------------------------------------------ tasks and rewards
class Bank:
    """The half of game.py that the judge keeps: the tasks, their answers and the count of episodes."""

    def __init__(self, root: int, upside_down: bool = False):
        self.root, self.upside_down, self.handed_out, self.episodes = root, upside_down, 0, 0

    def answer(self, question: dict) -> dict:
        """Raises if the question is none of game.py's: anybody may have written it."""
        if "tasks" in question:
            first, self.handed_out = self.handed_out, self.handed_out + min(int(question["tasks"]), 10**6)
            return {"tasks": list(range(first, self.handed_out))}
        env, number = LETTERS(), int(question["reset" if "reset" in question else "score"])
        if not 0 <= number < self.handed_out:
            raise ValueError(f"task {number} was not handed out")
        messages = env.reset(self.root + number)
        if "reset" in question:
            return {"messages": messages}
        env.step(str(question["reply"]))
        self.episodes += 1
        exact = env.score()["exact"]
        return {"reward": 1.0 - exact if self.upside_down else exact}


# Training tasks have bit 62 and the held-out ones bit 63: they never meet, nor any range of settings.py. Both are drawn when they are
# needed and not before.
def new_training_root() -> int:
    return 2**62 + secrets.randbits(61)


def new_held_out_root() -> int:
    return 2**63 + secrets.randbits(61)


@torch.inference_mode()
def exact_share(weights: dict[str, torch.Tensor], root: int, n: int = HELD_OUT) -> float:
    """Share of n tasks that greedy replies of these weights get exactly right."""
    policy = load_policy(str(PICO), 0, 64, "cpu")
    for name, w in policy.lm.named_parameters():
        w.data.copy_(weights[name])
    groups = play(policy, TorchSampler(policy), LETTERS, [root + i for i in range(n)], 1, LONGEST, 0.0, 0)
    return statistics.mean(group[0].components["exact"] for group in groups)


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """What an entry has left. ValueError if these are not the weights of a pico_base."""
    shapes = {name: w.shape for name, w in load_policy(str(PICO), 0, 64, "cpu").lm.named_parameters()}
    if file.stat().st_size > 8 * sum(map(math.prod, shapes.values())):
        raise ValueError("its weights are no model of this shape")
    weights = load_file(file)
    if {name: w.shape for name, w in weights.items()} != shapes or not all(w.isfinite().all() for w in weights.values()):
        raise ValueError("its weights are no model of this shape, or not finite")
    return weights


# ------------------------------------------------------------------------------------------------ one round
@dataclass
class Side:
    """An entry in a process of its own."""

    name: str
    file: Path
    bank: Bank
    seconds: float = 0.0  # of its own turns
    cpu: float = 0.0  # seconds, of all its processes
    end: str = ""  # "done", or what went wrong; "": it plays
    unread: bytes = b""
    process: subprocess.Popen = None
    line: socket.socket = None
    out: tempfile.TemporaryDirectory = field(default_factory=tempfile.TemporaryDirectory)

    def start(self, seed: int, threads: int) -> None:
        """Begin, and wait until it has imported everything and loaded the policy. It goes on when it is told to."""
        self.line, theirs = socket.socketpair()
        cpus = sorted(os.sched_getaffinity(0))[:threads]
        # PASSIVE: a thread that waits for the other one sleeps. By default it spins, and if somebody else has the other core, one batch
        # took 20 s of CPU, not 1.
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
        words = [str(theirs.fileno()), str(self.file), str(self.weights), str(seed), str(threads)]
        with open(Path(self.out.name) / "log", "w") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "lab.speedrun.game", *words], cwd=ROOT, env=env,
                                            pass_fds=[theirs.fileno()], stdout=log, stderr=log, start_new_session=True)  # fmt: skip
        os.sched_setaffinity(self.process.pid, cpus)
        theirs.close()
        self.serve(time.monotonic() + 300, until_ready=True)
        if not self.end:
            self.signal(signal.SIGSTOP)
            self.cpu -= self.cpu_seconds()
            self.say({"go": True})

    @property
    def weights(self) -> Path:
        return Path(self.out.name) / "weights.safetensors"

    def signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def say(self, answer: dict) -> None:
        try:
            self.line.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            self.end = self.last_words()

    def cpu_seconds(self) -> float:
        try:
            own = psutil.Process(self.process.pid)
            times = [p.cpu_times() for p in (own, *own.children(recursive=True))]
        except psutil.NoSuchProcess:
            return 0.0
        return sum(t.user + t.system + t.children_user + t.children_system for t in times)

    def take_turn(self, limit: float) -> None:
        """A turn of a second. limit: its seconds, of all turns."""
        began = time.monotonic()
        self.signal(signal.SIGCONT)
        self.serve(began + TURN)
        self.signal(signal.SIGSTOP)
        self.seconds += time.monotonic() - began
        if not self.end and self.seconds > limit:
            self.end = f"was not done after {self.seconds:.0f} s"
        if self.end:
            self.cpu += self.cpu_seconds()

    def serve(self, until: float, until_ready: bool = False) -> None:
        """Answer what it asks until then, or until it has ended."""
        while not self.end and (left := until - time.monotonic()) > 0:
            if not select.select([self.line], [], [], left)[0]:
                break
            data = self.line.recv(1 << 16)
            self.unread += data
            if not data or len(self.unread) > 1 << 20:
                self.end = self.last_words()
                return
            *lines, self.unread = self.unread.split(b"\n")
            for line in lines:
                try:
                    question = json.loads(line)
                    if "ready" in question and until_ready:
                        return
                    if "done" in question:
                        self.end = "done"
                        return
                    answer = self.bank.answer(question)
                except Exception as error:
                    self.end = f"asked for something that is not to be had: {error}"
                    return
                self.say(answer)
        if until_ready:
            self.end = "was not ready in 300 s"

    def last_words(self) -> str:
        lines = [line for line in (Path(self.out.name) / "log").read_text(errors="replace").splitlines() if line.strip()]
        return f"stopped: {lines[-1][:300] if lines else 'without a word'}"

    def close(self) -> None:
        if self.process:
            self.signal(signal.SIGKILL)
            self.process.wait()
            self.line.close()


def adopt_orphans() -> None:
    """Linux: processes whose parent has ended become children of this one, so that they can be found."""
    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def left_behind(before: set[int]) -> str:
    """End what lives on outside of the sides' process groups. Returns what it was, "" if there was nothing."""
    found = ""
    for child in psutil.Process().children():
        if child.pid in before:
            continue
        try:
            child.wait(1)  # one of a group that was just killed needs a moment
        except psutil.TimeoutExpired:
            found = " ".join(child.cmdline())[:100]
            child.kill()
            child.wait()
    return found


def play_round(files: dict[str, Path], threads: int, tasks: int = HELD_OUT, upside_down: bool = False, most: float = MOST) -> dict:
    """All sides once, in turns. {"root", "held_out": first seeds, "sides": {name: seconds, cpu, episodes, exact, end}}.

    The first side is the one that the others are measured against: after SLOWEST times its seconds they are stopped.
    The last one is the entry.
    """
    adopt_orphans()
    before = {child.pid for child in psutil.Process().children()}
    root = new_training_root()
    sides = [Side(name, file, Bank(root, upside_down)) for name, file in files.items()]
    try:
        for side in sides:
            side.start(root % 2**31, threads)
        while playing := [side for side in sides if not side.end]:
            limit = min(most, SLOWEST * sides[0].seconds if sides[0].end == "done" else most)
            for side in playing:
                side.take_turn(limit)
    finally:
        for side in sides:
            side.close()
    if what := left_behind(before):
        sides[-1].end = f"left a process behind: {what}"
    torch.set_num_threads(1)  # nobody's clock runs here
    held_out, found = new_held_out_root(), {}  # drawn when no entry lives any more
    for side in sides:
        exact = 0.0
        if side.end == "done":
            try:
                exact = exact_share(read_weights(side.weights), held_out, tasks)
            except Exception as error:
                side.end = f"left something else than weights: {error}"
        if side.cpu > SPARE * threads * side.seconds + 0.5:
            side.end = f"took {side.cpu:.1f} CPU seconds in {side.seconds:.1f} s on {threads} threads"
        found[side.name] = {"seconds": round(side.seconds, 3), "cpu": round(side.cpu, 2), "episodes": side.bank.episodes,
                            "exact": exact, "end": side.end}  # fmt: skip
        side.out.cleanup()
    return {"root": root, "held_out": held_out, "sides": found}


# ------------------------------------------------------------------------------------------------ the verdict
NOT_YET = "it was not yet run with the rewards upside down"


def p_values(logs: np.ndarray) -> np.ndarray:
    """Exact one-sided sign-flip test (Fisher 1935) for each column of logs [rounds, n]:
    p that their mean is so low if the two sides are alike.

    If entry and reference are the same thing, each log-ratio is as likely with the other sign. p is the share of all 2^rounds choices of
    signs whose mean is at most the one that was seen.
    """
    rounds = len(logs)
    if logs.shape[1] > 1000:  # in pieces, for memory
        return np.concatenate([p_values(logs[:, i : i + 1000]) for i in range(0, logs.shape[1], 1000)])
    signs = 1 - 2 * ((np.arange(2**rounds)[:, None] >> np.arange(rounds)) & 1)  # [2^rounds, rounds]
    return (signs @ logs <= logs.sum(0) + 1e-9).mean(0)


def against(rounds: list[dict], entry: str, other: str) -> dict:
    """The entry's seconds over the other's: geometric mean with a 95% interval (t, on logs), p;
    and the same ratio of CPU seconds and of episodes."""
    logs = {
        what: np.array([math.log(r["sides"][entry][what] / r["sides"][other][what]) for r in rounds])
        for what in ("seconds", "cpu", "episodes")
    }
    middle, n = logs["seconds"].mean(), len(rounds)
    half = stats.t.ppf(0.975, n - 1) * logs["seconds"].std(ddof=1) / math.sqrt(n) if n > 1 else math.inf
    return {"ratio": round(math.exp(middle), 3), "low": round(math.exp(middle - half), 3), "high": round(math.exp(middle + half), 3),
            "p": float(p_values(logs["seconds"][:, None])[0]), "cpu_ratio": round(math.exp(logs["cpu"].mean()), 3),
            "p_cpu": float(p_values(logs["cpu"][:, None])[0]), "episodes_ratio": round(math.exp(logs["episodes"].mean()), 3)}  # fmt: skip


def verdict(entry: str, planned: int, rounds: list[dict], upside_down: dict | None, source: str) -> dict:
    """Is it a record? {"record", "why_not": sentences, "against": {other: its ratio and p}}; nothing here depends on when it is asked."""
    why, mine = fence(source), [r["sides"][entry] for r in rounds]
    if planned < ROUNDS:
        why.append(f"{planned} rounds are too few, it takes {ROUNDS}")
    for i, run in enumerate(mine):
        if run["end"] != "done":
            why.append(f"round {i}: it {run['end']}")
        elif run["exact"] < TARGET:
            why.append(f"round {i}: it stopped at {run['exact']:.1%}")
        elif run["episodes"] == 0:
            why.append(f"round {i}: it asked for no reward at all")
    why += [
        f"round {i}: {other} {run['end']}"
        for i, r in enumerate(rounds)
        for other, run in r["sides"].items()
        if other != entry and run["end"] != "done" and not run["end"].startswith("was not done")
    ]  # a side that is too slow is stopped: its seconds are then too few, which is in its own favour
    if not why and len(rounds) < planned:
        why.append(f"{len(rounds)} of {planned} rounds are done")
    found = {}
    if mine and all(run["end"] == "done" and run["episodes"] for run in mine):
        found = {other: against(rounds, entry, other) for other in rounds[0]["sides"]
                 if other != entry and all(r["sides"][other]["episodes"] for r in rounds)}  # fmt: skip
        why += [f"not faster than {other}: p = {f['p']:.3f} [ratio {f['ratio']}]" for other, f in found.items() if f["p"] >= P]
    if upside_down and upside_down["exact"] > FAKE:
        why.append(f"it ends at {upside_down['exact']:.1%} with the rewards upside down, so it does not learn from rewards")
    if not why and upside_down is None:
        why.append(NOT_YET)
    return {"record": not why, "why_not": why, "against": found}


# ------------------------------------------------------------------------------------------------ a judgement
def run(entry: tyro.conf.Positional[Path], rounds: int = ROUNDS, threads: int = 2, to_the_end: bool = False, record: str = "auto") -> None:
    """Judge an entry; results/speedrun/NAME.json and the board say what came out. Interrupted, the same command goes on.

    record: the standing record that it has to beat, too; auto: that of the board; "": none.
    to_the_end: play all rounds, even if one has failed and it can be no record any more.
    """
    if entry.resolve().parent != ENTRIES:
        raise SystemExit(f"{entry}: put it into {ENTRIES.relative_to(ROOT)}/, so that others can read what was judged")
    source, holder = entry.read_text(), standing() if record == "auto" else record
    if complaints := fence(source):
        raise SystemExit(f"{entry}: {'; '.join(complaints)}")
    name = "copy" if entry.stem == "reference" else entry.stem  # the reference against itself: what is chance?
    files = {"reference": REFERENCE} | {other: ENTRIES / f"{other}.py" for other in {holder} - {"", name}} | {name: entry}
    plan = {"entry": f"{ENTRIES.relative_to(ROOT)}/{entry.name}", "rounds": rounds, "threads": threads, "against": list(files)[:-1],
            "source": digest(entry), "code": fingerprint(deciding(files))}  # fmt: skip
    kept = ROOT / "runs" / "speedrun" / f"{name}.json"  # what is done, in case that it is interrupted
    state = read_json(kept) if kept.exists() else {"plan": plan, "played": [], "upside_down": None}
    if state["plan"] != plan:
        raise SystemExit(f"{kept} was begun with other code or another plan, and a judgement is all or nothing: remove it to begin anew")
    kept.parent.mkdir(parents=True, exist_ok=True)
    played, judge = state["played"], lambda: verdict(name, rounds, state["played"], state["upside_down"], source)
    bad = lambda: any(r["sides"][name]["end"] != "done" or r["sides"][name]["exact"] < TARGET for r in played)
    while len(played) < rounds and (to_the_end or not bad()):
        played.append(play_round(files, threads))
        records.write_json(kept, state)
        print(json.dumps(played[-1]["sides"]), flush=True)
    if judge()["why_not"] == [NOT_YET]:
        longest = 1.5 * max(r["sides"][name]["seconds"] for r in played)
        state["upside_down"] = play_round({name: entry}, threads, upside_down=True, most=longest)["sides"][name]
        records.write_json(kept, state)
    found = judge()
    how = {"command": f"python -m lab.speedrun.judge run {plan['entry']}", "machine": {"cpu": cpu(), "torch": torch.__version__}}
    write_json(BOARD / f"{name}.json", how | plan | found | {"upside_down": state["upside_down"], "played": played})
    board()
    print("a record" if found["record"] else "no record: " + "; ".join(found["why_not"]))
    print(json.dumps(found["against"], indent=1))


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def deciding(files: dict[str, Path]) -> list[Path]:
    """What decides how long a side takes: its own file, the judge's, and the story's."""
    ours = [
        *sorted((ROOT / "fast").glob("*.py")),
        *(ROOT / f"{name}.py" for name in ("policy", "rollout", "grpo", "sft", "settings", "env_letters")),
    ]
    return [*files.values(), *ours, *sorted((ROOT / "lab" / "speedrun").glob("*.py")), START]


# ------------------------------------------------------------------------------------------------ the board
def judged() -> list[dict]:
    """Every judgement that is committed, the fastest first."""
    found = [read_json(file) | {"name": file.stem} for file in sorted(BOARD.glob("*.json")) if file.stem not in ("simulate", "tricks")]
    return sorted(found, key=lambda r: r["against"].get("reference", {"ratio": math.inf})["ratio"])


def standing() -> str:
    """The fastest record of the board, "" if there is none."""
    return next((r["name"] for r in judged() if r["record"]), "")


def rows() -> list[list[str]]:
    out = []
    for r in judged():
        mine, n = [each["sides"][r["name"]] for each in r["played"]], len(r["played"])
        f = r["against"].get("reference")
        middle = lambda what, mine=mine: statistics.median(run[what] for run in mine)
        name = "reference, a second time" if r["name"] == "copy" else r["name"]
        ratio = f"{f['ratio']:.2f} [{f['low']:.2f}, {f['high']:.2f}]" if f else ""
        p = f"{f['p']:.4f}" if f else ""
        right = f"{100 * statistics.mean(run['exact'] for run in mine):.1f}%, at least {100 * min(run['exact'] for run in mine):.1f}%"
        out.append([name, f"**{ratio}**" if r["record"] else ratio, p, f"{middle('seconds'):.1f}", f"{middle('cpu'):.1f}",
                    f"{middle('episodes'):.0f}", right, n, "record" if r["record"] else "no record"])  # fmt: skip
    return out


HEAD = ["entry", "seconds / reference's", "p", "seconds", "CPU seconds", "episodes", "exactly right at the end", "rounds", "verdict"]


def board() -> None:
    """Write results/speedrun/README.md."""
    lines = ["# Speedrun: from the SFT checkpoint to 90% of tier 6", "", *table(HEAD, rows()), "",
             "Seconds, CPU seconds and episodes are medians of a run; the ratio is a geometric mean with a 95% interval. docs/speedrun.md "
             "has the rules.", ""]  # fmt: skip
    for r in judged():
        if r["why_not"]:
            lines += [f"* {r['name']}: {'; '.join(r['why_not'])}."]
    write_page(BOARD / "README.md", [*lines, ""])


# ------------------------------------------------------------------------------------------------ error rates
def simulate(draws: int = 20_000, seed: int = 0) -> None:
    """How often does the verdict err? Made-up seconds, as noisy as those that were measured; writes results/speedrun/simulate.json."""
    rng = np.random.default_rng(seed)
    shapes = {  # the logs of a run's seconds, [rounds, draws], standard deviation 1
        "normal": lambda size: rng.standard_normal(size),
        "heavy tails": lambda size: rng.standard_t(3, size) / math.sqrt(3),
        "skewed": lambda size: rng.exponential(size=size) - 1,
    }
    spread = 0.48  # of the log of a run's seconds: that of the log-ratios in results/speedrun/beginnings.json, over the root of 2
    size, passed = (ROUNDS, draws), {}
    for shape, draw in shapes.items():
        for ratio in (1.1, 1.0, 0.95, 0.9, 0.8, 0.7, 0.5):
            logs = math.log(ratio) + spread * (draw(size) - shapes["normal"](size) if shape == "skewed" else draw(size) - draw(size))
            passed.setdefault(shape, {})[str(ratio)] = round(float((p_values(logs) < P).mean()), 4)
    ends = {str(share): round(share**ROUNDS, 4) for share in (0.5, 0.63, 0.8, 0.9, 0.95, 0.99)}
    true = {
        str(x): round(float(stats.binom.sf(math.ceil(TARGET * HELD_OUT) - 1, HELD_OUT, x) ** ROUNDS), 4)
        for x in (0.88, 0.89, 0.9, 0.91, 0.92, 0.93, 0.95)
    }
    write_json(BOARD / "simulate.json", {"command": "python -m lab.speedrun.judge simulate", "draws": draws, "spread": spread,
                                         "rounds": ROUNDS, "faster_by_the_test": passed,
                                         "all_runs_at_the_target": {"by_share_of_good_runs": ends, "by_true_accuracy": true}})  # fmt: skip
    print((BOARD / "simulate.json").read_text())


def tricks(threads: int = 2) -> None:
    """Play every made-up entry of tricks.py once, without asking the fence; writes results/speedrun/tricks.json."""
    result = {"command": "python -m lab.speedrun.judge tricks", "tricks": {}}
    for name, (tries, stops, source) in TRICKS.items():
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / f"{name}.py"
            file.write_text(source)
            ways = {"upright": False, "upside down": True} if name == "solver" else {"upright": False}
            played = {way: play_round({name: file}, threads, upside_down=turned, most=20.0 if name != "solver" else MOST)["sides"][name]
                      for way, turned in ways.items()}  # fmt: skip
        result["tricks"][name] = {"tries": tries, "stopped by": stops, "the fence says": fence(source), "played": played}
        print(name, json.dumps(result["tricks"][name]), flush=True)
    write_json(BOARD / "tricks.json", result)


def start(threads: int = 1) -> None:
    """Make the checkpoint that all begin from: train.py's own SFT, and no update of GRPO. One thread:
    the sums then always come in the same order."""
    words = f"train.py --env letters --updates 0 --threads {threads} --no-wandb --runs runs/speedrun --name sft"
    subprocess.run([sys.executable, *words.split()], cwd=ROOT, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    save_file(load_file(ROOT / "runs" / "speedrun" / "sft" / "checkpoint" / "adapter_model.safetensors"), START)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({f.__name__: f for f in (run, simulate, tricks, board, start)})
