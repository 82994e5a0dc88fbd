"""What an entry of the speedrun is given, and the process that it runs in.

    def train(policy, game): ...        # an entry: a file with this function

policy is pico_base after SFT, with LoRA, as results/speedrun/start.safetensors has it. game gives tasks and rewards, and nothing else:

    game.tasks(n)       numbers of n training tasks that nobody has seen
    game.env()          an environment for rollout.play: it asks the task with that number, and scores a reply
    game.config(...)    train.py's settings of `--env letters`, for grpo.update
    game.seed           another one in each run

The tasks live in the judge's process. What is in the entry's process is a socket: a question comes out of it, and a reward of 0 or 1 per
reply goes in. There is no answer, no expert and no held-out task in the entry's process to be found. (The string stands in the question, as
the policy must read it: an entry could count its letters itself. lab/speedrun/judge.py says what is done about that.)

The process says when it is ready, so that nobody's seconds have the imports in them, and waits for the judge's word.
It imports the entry only then.
"""

import ctypes
import importlib.util
import json
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file, save_file

import settings
from lab.common import RESULTS
from policy import PICO, Policy, load_policy

START = RESULTS / "speedrun" / "start.safetensors"  # `python -m lab.speedrun.judge start` makes it
PR_SET_PDEATHSIG = 1


class Env:
    """An environment as rollout.py plays it (env_letters.py), whose other half is with the judge."""

    think, tools, max_turns = True, None, 1

    def __init__(self, ask: Callable[[dict], dict]):
        self.ask = ask

    def reset(self, seed: int) -> list[dict]:
        self.task = seed
        return self.ask({"reset": seed})["messages"]

    def step(self, reply: str) -> tuple[list[dict], bool]:
        self.reply = reply
        return [], True

    def score(self) -> dict[str, float]:
        return {"reward": self.ask({"score": self.task, "reply": self.reply})["reward"]}


class Game:
    """ask(question) -> answer, both JSON: a socket to the judge, or the judge's Bank itself in a test."""

    def __init__(self, seed: int, ask: Callable[[dict], dict]):
        self.seed, self.ask = seed, ask

    def tasks(self, n: int) -> list[int]:
        return self.ask({"tasks": n})["tasks"]

    def env(self) -> Env:
        return Env(self.ask)

    def config(self, **changes) -> settings.Config:
        """train.py's, with what it fills in for pico_base."""
        cfg = settings.Config(env="letters", **changes)
        for defaults in (settings.by_env("letters"), settings.by_size(1e6, "letters")):
            settings.fill(cfg, defaults)
        return cfg


def start_policy(threads: int) -> Policy:
    torch.set_num_threads(threads)
    policy = load_policy(str(PICO), 32, 64, "cpu")
    set_peft_model_state_dict(policy.model, load_file(START))
    return policy


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    """The whole model in float32, LoRA folded in: {name: weight} as pico_base names them (the head is the embedding)."""
    lm = policy.model.merge_and_unload() if policy.lora_rank else policy.lm
    return {name: w.detach().float().contiguous() for name, w in lm.named_parameters()}


def load_entry(file: Path) -> Callable:
    spec = importlib.util.spec_from_file_location("entry", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train


def main(fd: int, file: str, out: str, seed: int, threads: int) -> None:
    """The entry's process. Messages are lines of JSON; the judge reads no pickle of an entry's."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # Linux: if the judge is killed, so is this
    lines = socket.socket(fileno=fd).makefile("rw", encoding="utf-8")

    def ask(question: dict) -> dict:
        lines.write(json.dumps(question) + "\n")
        lines.flush()
        return json.loads(lines.readline())

    policy = start_policy(threads)
    ask({"ready": True})  # the answer is the word to go
    policy = load_entry(Path(file))(policy, Game(seed, ask)) or policy
    save_file(weights_of(policy), out)
    ask({"done": True})


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
