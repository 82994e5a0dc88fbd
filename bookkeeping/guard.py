"""Other people's code in our loop, and errors as one sentence.

An environment is somebody's code. If it raises, gives no answer within a minute, or answers with
something of the wrong type, that costs its own episode and not a run of days: `guarded` wraps it,
and turns every failure into rollout.EnvironmentFailed with what happened and where, in one line.

Whatever is known to go wrong with a run ends it with one sentence and no traceback: `one_sentence`.

Run me: `python -m bookkeeping.guard` calls an environment that hangs and one that raises.
"""

import json
import math
import signal
import sys
import traceback
from asyncio import CancelledError
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import rollout
import sft
from bookkeeping import folder
from bookkeeping.records import printable
from fast import machine
from fast.ahead import SECONDS
from fast.machine import CannotGoOn, Hung, out_of_memory
from fast.measure import COLUMNS
from rollout import EnvironmentFailed
from settings import DEV_SEEDS, SFT_SEEDS, TRAIN_SEEDS, kind, levels_of, make_env, promote_of

# What a call of an environment may end with. A policy that writes exit() where replies are executed
# would end the run with it; Ctrl-C still does.
ENDS = (Exception, Hung, SystemExit, CancelledError)
ENV_SECONDS = 60.0  # for one call of an environment; one that needs more (a judge over the
#                     network) sets `seconds` on itself


class Guarded:
    """An environment whose methods raise EnvironmentFailed and nothing else."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name: str):  # think, tools, max_turns …
        return getattr(self.env, name)

    def reset(self, seed: int) -> list[dict]:
        return self._call(lambda: self._checked("reset", messages_of, list(self.env.reset(seed))))

    def step(self, reply: str) -> tuple[list[dict], bool]:
        return self._call(lambda: self._checked("step", answer_of, self.env.step(reply)))

    def score(self) -> dict[str, float]:
        return self._call(lambda: numbers(self.env.score()))

    def expert_reply(self) -> str:
        return self._call(lambda: self._checked("expert_reply", text_of, self.env.expert_reply()))

    def _checked(self, method: str, read: Callable, found):
        return checked(self.env, method, read, found)

    def _call(self, call: Callable):
        try:
            return in_time(self.env, call)
        except ENDS as error:
            raise EnvironmentFailed(told(error)) from None


def guarded(make_env: Callable, *given) -> Guarded:
    """make_env(*given), wrapped. partial(guarded, make_env, …) can be pickled."""
    return Guarded(make_env(*given))


# Columns of the logs: an entry of a score with such a name would take their place.
TAKEN = {"update", "stage", "tasks", "trained", "missing", "level", "n", "errors", "reply_tokens"}
TAKEN |= {"reward_low", "reward_high", "exact_reward", *COLUMNS}
TAKEN |= {f"seconds_{part}" for part in SECONDS}


def numbers(marks: dict) -> dict[str, float]:
    """A score, checked: its reward is a finite number, and every other entry a number."""
    marks = {name: float(value) for name, value in dict(marks).items()}
    if not all(isinstance(name, str) for name in marks):
        raise ValueError("an entry's name is no text")
    if not math.isfinite(marks["reward"]):
        raise ValueError(f"the reward is {marks['reward']}")
    if taken := sorted(TAKEN & marks.keys()):
        raise ValueError(f"{taken[0]!r} is a column of the logs: rename that entry")
    return marks


def in_time(env, call: Callable, *given):
    """call(*given), or Hung after env.seconds (ENV_SECONDS); fast/machine.py says how, and where
    only a loop can be ended."""
    return machine.in_time(getattr(env, "seconds", ENV_SECONDS), call, *given)


def told(error: BaseException) -> str:
    """What happened and where, in one line that is safe to print (a reply may stand in it)."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if f.filename not in (__file__, machine.__file__)]
    # The environment's own frames, not those of what it calls.
    own = [f for f in frames if f.filename == frames[0].filename]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    text = printable(" ".join(str(error).split())[:300])
    return f"{type(error).__name__}: {text}{where}"


def other_opening(policy, env, seed: int) -> dict[str, str]:
    """{"template": sentence} if RL's prompt of a task is not that of its demonstration, else {}.

    The cause is most often another chat template. Without an expert there is nothing to compare.
    """
    try:
        prompt = rollout.prompt_ids(policy, env.reset(seed), env.tools, env.think)
        shown = sft.expert_episode(policy, env, seed).token_ids
    except Exception:  # somebody's code, which may have no expert
        return {}
    n = next((i for i, (a, b) in enumerate(zip(prompt, shown)) if a != b), len(shown))
    if n >= len(prompt):
        return {}
    text = lambda ids: repr(policy.tokenizer.decode(ids[n : n + 6]))
    return {
        "template": "the prompts that the policy samples from are not written as those of SFT: "
        f"token {n} on, {text(prompt)} and not {text(shown)}; "
        "make both with the same chat template"
    }


# --------------------------------------------------------------- before a model is loaded

MOST_TURNS = 100


def preflight(cfg) -> None:
    """Try out an environment that is not ours. ValueError says what is wrong with it, and where."""
    page = {"yours": "docs/fork.md", "known": "docs/tasks.md"}.get(kind(cfg.env))
    if page is None:
        return
    try:
        for level in levels_of(cfg.env) or [cfg.difficulty]:
            check_environment(partial(make_env, cfg, level), cfg.sft_steps > 0)
        if cfg.curriculum:
            check_promotion(make_env(cfg, cfg.difficulty), promote_of(cfg.env))
    except ValueError as wrong:
        raise ValueError(f"--env {cfg.env}: {wrong}; see {page}") from None
    if kind(cfg.env) == "known":
        print(make_env(cfg, cfg.difficulty).source.about)


def check_environment(new_env: Callable, expert: bool = True) -> None:
    """Play a task of each range of seeds, with the expert and with empty replies.

    new_env() -> an environment; expert: is there one to learn from? ValueError if an answer is of
    the wrong type, a seed is not a task, or the expert earns no more than silence.
    """
    env = new_env()
    if not isinstance(env.think, bool):
        raise ValueError(f"think is {shown(env.think)}, and not True or False")
    if not isinstance(env.tools, list | None):
        raise ValueError(f"tools is {shown(env.tools)}, and not None or a list of JSON schemas")
    seeds = (TRAIN_SEEDS, TRAIN_SEEDS + 1, SFT_SEEDS, DEV_SEEDS)
    openings = [ask(new_env(), "reset", messages_of, seed) for seed in seeds]
    again = [ask(env, "reset", messages_of, seed) for seed in seeds]
    if openings != again:
        raise ValueError(f"{place(env, 'reset')} gave two openings for one seed")
    if all(opening == openings[0] for opening in openings):
        raise ValueError(f"{place(env, 'reset')} gave the same opening for every seed")
    say_nothing = lambda env: ""
    reward_of(new_env(), seeds[0], say_nothing, 1)  # a run may cut an episode after any reply
    silence = [reward_of(new_env(), seed, say_nothing, MOST_TURNS) for seed in seeds]
    if expert:
        speak = partial(ask, method="expert_reply", read=text_of)
        right = [reward_of(new_env(), seed, speak, MOST_TURNS, must_end=True) for seed in seeds]
        if sum(right) <= sum(silence):
            mean = lambda rewards: f"{sum(rewards) / len(rewards):g}"
            raise ValueError(
                f"the expert earns {mean(right)} and an empty reply {mean(silence)}; "
                "SFT learns from the expert, so it should earn more"
            )


def check_promotion(env, promote: tuple[str, float]) -> None:
    """A curriculum goes up by a measure that every score has."""
    match promote:
        case (str(measure), int() | float()):
            pass
        case _:
            example = 'it is a measure and how high its mean has to be, as in ("reward", 0.75)'
            raise ValueError(f"promote is {shown(promote)}; {example}")
    ask(env, "reset", messages_of, TRAIN_SEEDS)
    ask(env, "step", answer_of, "")
    if measure not in ask(env, "score", numbers_of):
        raise ValueError(
            f"{place(env, 'score')} has no {measure!r}, by which a curriculum goes up; "
            'add it, or say promote = ("reward", 0.75) in the class'
        )


def reward_of(env, seed: int, speak: Callable, most: int, must_end: bool = False) -> float:
    """The reward of an episode of at most so many turns."""
    ask(env, "reset", messages_of, seed)
    over, turns = False, 0
    while not over and turns < most:
        over, turns = ask(env, "step", answer_of, speak(env))[1], turns + 1
    if must_end and not over:
        where = place(env, "step")
        raise ValueError(f"{where} did not end an episode of the expert in {most} turns")
    return ask(env, "score", numbers_of)["reward"]


def ask(env, method: str, read: Callable, *given):
    """read(env.method(*given)). ValueError says what happened, in which method and line."""
    try:
        found = in_time(env, getattr(env, method), *given)
    except ENDS as error:
        raise ValueError(f"{method} failed: {told(error)}") from None
    return checked(env, method, read, found)


def checked(env, method: str, read: Callable, found):
    """read(found). ValueError says what the method returned, and what it should have."""
    try:
        return read(found)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{place(env, method)} returned {shown(found)}, and not {error}") from None


def messages_of(found) -> list[dict]:
    if not isinstance(found, list) or not found or not all(map(is_message, found)):
        example = '{"role": "user", "content": "1 + 1?"}'
        raise ValueError(f"a list of messages such as {example}, with a role of {', '.join(ROLES)}")
    try:
        json.dumps(found)  # episodes.jsonl keeps them, and what else a message may hold
    except (TypeError, ValueError, RecursionError):
        raise ValueError("a list of messages that JSON can write") from None
    return found


ROLES = ("system", "user", "assistant", "tool")  # templates leave messages of others out


def is_message(m) -> bool:
    return isinstance(m, dict) and m.get("role") in ROLES and is_text(m.get("content"))


def is_text(found) -> bool:
    """A str of whole characters: half of a surrogate pair is none, and no tokenizer takes it."""
    if not isinstance(found, str):
        return False
    try:
        found.encode()
    except UnicodeEncodeError:
        return False
    return True


def answer_of(found) -> tuple[list[dict], bool]:
    try:
        messages, over = found
        if type(over).__name__ in ("bool", "bool_") and (over or messages_of(messages)):
            return messages, bool(over)
    except (TypeError, ValueError):
        pass
    raise ValueError("(new messages, is it over?), with a message to answer unless it is over")


def numbers_of(found) -> dict[str, float]:
    if isinstance(found, dict) and (taken := sorted(TAKEN & found.keys())):
        raise ValueError(f"a dict without {taken[0]!r}, which is a column of the logs: rename it")
    try:
        return numbers(found)
    except (TypeError, KeyError, ValueError):
        raise ValueError('a dict of named numbers with a finite "reward"') from None


def text_of(found) -> str:
    if not is_text(found):
        raise ValueError("a text")
    return found


def place(env, method: str) -> str:
    """'step (vowels.py:20)': where a method begins."""
    code = getattr(getattr(type(env), method, None), "__code__", None)
    return f"{method} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else method


def shown(value) -> str:
    return printable(repr(value)[:100])


@contextmanager
def one_sentence():
    """Whatever is known to go wrong with a run leaves as SystemExit with one sentence.

    It speaks of a checkpoint only if there is one, and a run that never began leaves no folder.
    """
    folder.own.clear()
    try:
        yield
    except (ValueError, CannotGoOn) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = (last.line or "").startswith("raise")  # else Python's own: it does not say where
        where = "" if ours else f" ({last.filename}:{last.lineno})"
        raise SystemExit(f"{error}{where}") from None
    except KeyboardInterrupt:
        close_bars()
        print(f"stopped at once{how_to_go_on()}", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        first = (str(error).splitlines() or ["no more is known"])[0]
        cure = "start again with a lower --micro-tokens, or with --gradient-checkpointing"
        if folder.has_checkpoint():
            cure = (
                "the last checkpoint is kept: --resume it with a lower --micro-tokens, or start "
                "again with --gradient-checkpointing"
            )
        raise SystemExit(f"out of GPU memory ({first}); {cure}") from None
    except FloatingPointError as error:
        cure = "nothing was saved yet, start again with a lower --sft-lr"
        if folder.has_checkpoint():
            cure = "the last good checkpoint is kept for --eval-only, start a run with a lower --lr"
        raise SystemExit(f"training stopped: {error}; {cure}") from None
    except OSError as error:
        if error.errno is None:
            raise
        cure = "nothing was saved yet, make room or mend the path, then start again"
        if folder.has_checkpoint():
            cure = "the last checkpoint is kept, make room or mend the path, then --resume"
        what = error.filename or "writing the run folder"
        raise SystemExit(f"{error.strerror}: {what}; {cure}") from None
    finally:
        folder.discard_unbegun()
        close_bars()


def how_to_go_on() -> str:
    """For the last word of a run that was stopped at once."""
    if not folder.own or not (folder.own[0] / "config.json").exists():
        return "; nothing was written"
    start = "" if folder.has_checkpoint() else ", from its start: nothing was saved yet"
    return f"; go on with: python train.py --resume {folder.own[0]}{start}"


def close_bars() -> None:
    """Close every progress bar, or the sentence is glued to one that is still open."""
    from tqdm import tqdm

    for bar in list(tqdm._instances):
        bar.close()


if __name__ == "__main__":

    class Bad:
        seconds = 0.2

        def reset(self, seed):
            while True:
                pass

        def step(self, reply):
            return {}[reply]

    for name, given in (("reset", 1), ("step", "hello")):
        try:
            getattr(Guarded(Bad()), name)(given)
        except EnvironmentFailed as failed:
            print(f"{name}: {failed}")
