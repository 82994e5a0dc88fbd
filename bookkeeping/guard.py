"""Other people's code in our loop, and errors as one sentence.

An environment is somebody's code. If it raises, gives no answer within a minute, or answers with
something of the wrong type, that costs its own episode and not a run of days: `guarded` wraps it,
and turns every failure into rollout.EnvironmentFailed with what happened and where, in one line.

Whatever is known to go wrong with a run ends it with one sentence and no traceback: `one_sentence`.

Run me: `python -m bookkeeping.guard` calls an environment that hangs and one that raises.
"""

import math
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import rollout
import sft
from bookkeeping.records import printable
from rollout import EnvironmentFailed

ENV_SECONDS = 60.0  # for one call of an environment; one that needs more (a judge over the
#                     network) sets `seconds` on itself


class Hung(BaseException):
    """No answer in time. No Exception, so that an environment's own `except` cannot swallow it."""


class Guarded:
    """An environment whose methods raise EnvironmentFailed and nothing else."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name: str):  # think, tools, max_turns, expert_reply …
        return getattr(self.env, name)

    def reset(self, seed: int) -> list[dict]:
        return self._call(lambda: list(self.env.reset(seed)))

    def step(self, reply: str) -> tuple[list[dict], bool]:
        return self._call(lambda: self.env.step(reply))

    def score(self) -> dict[str, float]:
        return self._call(lambda: numbers(self.env.score()))

    def _call(self, call: Callable):
        try:
            return in_time(self.env, call)
        except (Exception, Hung) as error:
            raise EnvironmentFailed(told(error)) from None


def guarded(make_env: Callable, *given) -> Guarded:
    """make_env(*given), wrapped. partial(guarded, make_env, …) can be pickled."""
    return Guarded(make_env(*given))


def numbers(marks: dict) -> dict[str, float]:
    """A score, checked: its reward is a finite number, and every other entry a number."""
    marks = {name: float(value) for name, value in dict(marks).items()}
    if not math.isfinite(marks["reward"]):
        raise ValueError(f"the reward is {marks['reward']}")
    return marks


def in_time(env, call: Callable, *given):
    """call(*given), or Hung after env.seconds (ENV_SECONDS).

    A timer signal interrupts whatever Python is doing, loops, sleeps and regular expressions
    included, but not C code that never comes back to Python. A thread with a deadline would not do:
    nobody can end it, and a loop in it would take every second turn of the interpreter from then
    on. Outside a main thread, and on Windows, there is no time limit: signals need both.
    """
    main = threading.current_thread() is threading.main_thread()
    if not (main and hasattr(signal, "setitimer")):
        return call(*given)
    armed = True

    def ring(*_):
        if armed:
            raise Hung(f"no answer within {seconds:g} seconds")

    seconds = getattr(env, "seconds", ENV_SECONDS)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again every second, if swallowed
        return call(*given)
    finally:
        while True:  # it may ring in these very lines
            try:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
                break
            except Hung:
                pass


def told(error: BaseException) -> str:
    """What happened and where, in one line that is safe to print (a reply may stand in it)."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    # The environment's own frames, not those of what it calls.
    own = [f for f in frames if f.filename == frames[0].filename]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    text = printable(" ".join(str(error).split())[:300])
    return f"{type(error).__name__}: {text}{where}"


def other_opening(policy, env, seed: int) -> dict[str, str]:
    """{"template": sentence} if RL's prompt of a task is not that of its demonstration, else {}.

    The cause is most often another chat template.
    """
    try:
        prompt = rollout.prompt_ids(policy, env.reset(seed), env.tools, env.think)
        shown = sft.expert_episode(policy, env, seed).token_ids
    except EnvironmentFailed:
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


@contextmanager
def one_sentence():
    """Whatever is known to go wrong with a run leaves as SystemExit with one sentence."""
    import torch

    try:
        yield
    except ValueError as error:
        raise SystemExit(str(error)) from None
    except torch.OutOfMemoryError as error:
        first = (str(error).splitlines() or ["no more is known"])[0]
        raise SystemExit(
            f"out of GPU memory ({first}); the last checkpoint is kept: --resume it with a lower "
            "--micro-tokens, or start again with --gradient-checkpointing"
        ) from None
    except FloatingPointError as error:
        raise SystemExit(
            f"training stopped: {error}; the last good checkpoint is kept for --eval-only, "
            "start a run with a lower --lr"
        ) from None
    except OSError as error:
        if error.errno is None:
            raise
        raise SystemExit(
            f"{error.strerror}: {error.filename or 'writing the run folder'}; the last checkpoint "
            "is kept, make room or mend the path, then --resume"
        ) from None
    finally:
        close_bars()


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
