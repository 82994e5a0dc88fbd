"""Made-up entries that try to win without learning faster, and what stops each. `python -m lab.speedrun.judge tricks` plays them; the fence
is looked at apart.

Read them as the rules by example: an entry that does one of these is none.
"""

# name: (what it tries, what stops it, its source)
TRICKS = {
    "solver": (
        "counts the letters by itself, and learns to imitate that: demonstrations in disguise",
        "the rewards upside down",
        '''
import random
from collections import Counter
from policy import adam, encode
from rollout import Episode, prompt_ids
from sft import sft_batches, sft_step

def train(policy, game):
    cfg, episodes = game.config(), []
    for task in game.tasks(200):
        env = game.env()
        messages = env.reset(task)
        asked, text = messages[0]["content"].split("letters ")[1].split(' in "')
        text, tally, items = text.split('"')[0], Counter(), []
        for c in text:
            tally[c] += 1
            items.append(f"{c}{tally[c]}" if c in asked else c)
        counts = ", ".join(f'"{c}": {tally[c]}' for c in asked.split(", "))
        reply = f"<think>\\n{' '.join(items)}\\n</think>\\n<answer>{{{counts}}}</answer>"
        env.step(reply)
        env.score()
        prompt, said = prompt_ids(policy, messages, None, True), encode(policy, reply) + [policy.tokenizer.eos_token_id]
        sampled = [False] * len(prompt) + [True] * len(said)
        episodes.append(Episode(task, 0, prompt + said, sampled, [0.0] * len(sampled), 1))
    optimizer = adam(policy, 1e-3)
    with policy.learning():
        for batch in sft_batches(episodes, 8, 60, 0):
            sft_step(policy, optimizer, batch, cfg.micro_tokens)
''',
    ),
    "cached": (
        "brings weights from an earlier run",
        "the fence; and the rewards upside down",
        '''
import torch

def train(policy, game):
    policy.lm.load_state_dict(torch.load("weights.pt"))
''',
    ),
    "expert": (
        "asks the scripted expert",
        "the fence; and the environment that it is given has none",
        '''
from env_letters import Letters

def train(policy, game):
    env = Letters(6, "binary", True, "derives")
    env.reset(1)
    env.expert_reply()
''',
    ),
    "peeper": (
        "asks for tasks that were not handed out, hoping for held-out ones",
        "the judge's bank, which knows no others; the held-out seeds are drawn when the entry has ended",
        '''
def train(policy, game):
    game.tasks(8)
    game.env().reset(4_000_000)
''',
    ),
    "clock": (
        "turns the clock of its own process back",
        "the judge's clock is in another process; and the fence",
        '''
import time

def train(policy, game):
    time.monotonic = time.perf_counter = time.time = lambda: 0.0
    game.env().reset(game.tasks(1)[0])
    until = time.process_time() + 1.0
    while time.process_time() < until:
        pass
''',
    ),
    "sleeper": (
        "sleeps, in the hope that its seconds are not counted while it does",
        "they are; and after twice the reference's it is stopped",
        '''
import time

def train(policy, game):
    time.sleep(10_000)
''',
    ),
    "threads": (
        "works on more threads than two",
        "it may use two processors, whatever it asks torch for; and CPU seconds are counted",
        '''
import torch

def train(policy, game):
    torch.set_num_threads(16)
    x = torch.ones(800, 800)
    for _ in range(100):
        x = (x @ x).clamp(-1, 1)
''',
    ),
    "helper": (
        "leaves the work to a process that is not stopped when it is another's turn",
        "the fence; and the judge looks for what lives on",
        '''
import subprocess

def train(policy, game):
    subprocess.Popen(["setsid", "sleep", "1000"])
''',
    ),
    "broken": (
        "leaves weights that are not finite",
        "the judge reads them before it plays them",
        '''
def train(policy, game):
    for w in policy.trainable().values():
        w.data.fill_(float("nan"))
''',
    ),
    "lazy": (
        "stops before it has learnt anything",
        "it has to be at 90% in every round",
        '''
def train(policy, game):
    env = game.env()
    env.reset(game.tasks(1)[0])
    env.step("0")
    env.score()
''',
    ),
}  # fmt: skip
