"""What can the base do, exactly? Sample it, sort the replies by habit, count. Writes the README.md of models/pico_base/,
pico_swarm/ or pico_long/.

    python -m lab.base.card                                             # about two minutes on two cores
    python -m lab.base.card --model models/pico_swarm --tasks 48       # about as long; so is models/pico_long

Per habit: how often (share of sampled replies) and how right (exact answers among them), with Wilson intervals over
replies. Samples of one task are not quite independent, so these intervals are a little too narrow.
"""

from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

import env_alphabet
import env_letters
from env_alphabet import Alphabet
from env_letters import Letters
from env_swarm import Swarm
from fast.sampler import TorchSampler
from lab.common import read_json, table
from metrics import mean, proportion
from policy import PICO, load_policy
from rollout import play

CARD_SEEDS = 2_500_000_000  # neither trained nor evaluated on by train.py


def measure(policy, make_env, habits, tasks: int, k: int, max_tokens: int, temperature: float) -> list[list[str]]:
    """One table row a habit: how often, how right, mean reward, n, tokens an episode."""
    groups = play(policy, TorchSampler(policy), make_env, [CARD_SEEDS + i for i in range(tasks)], k, max_tokens, temperature, 0)
    rows = []
    for habit in habits:
        mine = [e for g in groups for e in g if e.components[f"habit_{habit}"]]
        if mine:
            right, reward = proportion(sum(e.components["exact"] for e in mine), len(mine)), mean([e.reward for e in mine])
            tokens, often = np.mean([e.reply_tokens for e in mine]), len(mine) / (tasks * k)
            rows.append([habit, f"{100 * often:.1f}%", right.percent(), f"{reward.mean:.2f}", len(mine), f"{tokens:.0f}"])
    return rows


how = lambda think, temperature: ("yes" if think else "no", "sampled" if temperature else "greedy")


def measure_swarm(policy, episodes: int) -> tuple[list[list], list[list]]:
    """(cells a tool: how often it is called, how often refused; cells a decoding: reward and its parts)."""
    rows, tools = [], {}
    for think, temperature in ((True, 1.0), (False, 1.0), (True, 0.0)):
        envs = []

        def make_env(think=think, envs=envs):
            envs.append(Swarm("medium", think=think))
            return envs[-1]

        play(policy, TorchSampler(policy), make_env, [CARD_SEEDS + i for i in range(episodes)], 1, 160, temperature, 0)
        marks, parts = [env.score() for env in envs], ("reward", "payoff", "reputation", "quality", "diversity", "error_rate")
        rows.append([*how(think, temperature), *(mean([m[name] for m in marks]).text() for name in parts), len(marks)])
        if think and temperature:
            for turn in (turn for env in envs for turn in env.log):
                tools.setdefault(turn.tool or "(unreadable)", []).append(turn)
    n = sum(map(len, tools.values()))
    wrong = lambda turns: proportion(sum(not turn.ok for turn in turns), len(turns)).percent()
    calls = sorted(tools.items(), key=lambda item: -len(item[1]))
    return [[tool, f"{100 * len(turns) / n:.1f}%", wrong(turns), len(turns)] for tool, turns in calls], rows


def main(model: str = str(PICO), tasks: int = 128, k: int = 8) -> None:
    policy = load_policy(model, 0, 64, "cpu")
    letters = lambda tier, think: lambda: Letters(tier, "binary", think, "states")
    alphabet = lambda think: lambda: Alphabet(3, 3, 1, 4, 8.0, False, think, "states")
    settings = [(f"letters, tier {tier}", think, t, letters(tier, think), env_letters.STYLES, 400)
                for tier, think, t in ((3, True, 1.0), (5, True, 1.0), (6, True, 1.0), (6, False, 1.0), (6, True, 0.0))]  # fmt: skip
    is_long = Path(model).name == "pico_long"
    if is_long:
        settings += [("letters, tier 7", True, t, letters(7, True), env_letters.STYLES, 448) for t in (1.0, 0.0)]
    else:
        settings += [("alphabet, 3 turns, 1-4 names, power 8", think, t, alphabet(think), env_alphabet.HABITS, 640)
                     for think, t in ((True, 1.0), (False, 1.0), (True, 0.0))]  # fmt: skip
    rows = []
    for name, think, temperature, make_env, habits, max_tokens in tqdm(settings):
        found = measure(policy, make_env, habits, tasks, k if temperature else 1, max_tokens, temperature)
        rows += [[name, *how(think, temperature), *row] for row in found]
    lines = table("| tasks | may think | decoding | habit | how often | how right (exact) [95%] | mean reward | n | tokens |", rows)
    swarm = []
    if Path(model).name == "pico_swarm":
        tools, rewards = measure_swarm(policy, tasks)
        swarm = [SWARM, *table("| may think | decoding | reward | payoff | reputation | quality | diversity | error rate | episodes |",
                               rewards), "",
                 *table("| tool (sampled, may think) | of all calls | refused or unreadable [95%] | calls |", tools), ""]  # fmt: skip
    print(*lines, *swarm, sep="\n")
    config = read_json(Path(model) / "config.json")
    facts = {"vocab": config["vocab_size"], "layers": config["num_hidden_layers"], "width": config["hidden_size"], "tasks": tasks, "k": k}
    facts["millions"] = sum(p.numel() for p in policy.lm.parameters()) / 1e6
    taught = TAUGHT + (FURTHER if is_long else "\n" + PLAYED if swarm else ONLY_HOW_OFTEN)
    facts |= {
        "what": WHAT_LONG if is_long else WHAT.format(more=TOOLS if swarm else ""),
        "lists": "" if is_long else LISTS,
        "can": CAN_LONG if is_long else CAN,
    }
    text = CARD.format(name=Path(model).name, table="\n".join(lines), swarm="\n".join(swarm), taught=taught, **facts)
    (Path(model) / "README.md").write_text(text)


SWARM = """Swarm, medium scenarios, v0.2, whole episodes of 25 turns (scripted players on such scenarios: docs/swarm.md). \
An episode mixes ways to
play, from passing to careful work, in shares of its own (`CHARACTERS` in `lab/base/corpus.py`). The rounds that taught this cost some of \
the lists above:
that is why there are two folders.
"""

TAUGHT = """## What it was taught, and what was made rare

It was taught the very tasks that GRPO trains it on later (other strings, other names): their prompts, their answer formats, and the right
algorithm. For letters that was 2,600 steps of running tallies back to back, 32 packed rows each, then 2,300 steps of 64 chats, of which 60%
and later 84% spell the string with a tally.

Then the right habit was made rare. The first three tokens of a reply, where the habit is decided, weighed as if 60% of the replies answered
at once, 28% stated counts and 12% derived them. And the two other habits were taught from a glance, not from the truth: counts of none, one
and two are right in them, larger counts become 3, 4 or 5 at random (`glance` in `lab/base/corpus.py`). Shown the true counts, \
a model of this size learns
to count most strings without spelling them.

The recipe is fragile. Run again with seeds 1 and 2 it made bases whose tallies are right in 5.7% and 0.0% of the samples that use one
(docs/letters.md).
"""

ONLY_HOW_OFTEN = """
So what GRPO changes on letters is how *often* the model derives, and not how *well*: the skill was there before. \
"It learns to think because
thinking pays" means that much and no more.
"""

PLAYED = """No run of ours has trained this model on letters; pico_base is for that.

For the swarm, a turn of its pretraining text is played in one of ten ways (`CHARACTERS` in `lab/base/corpus.py`): \
in 40% of the turns by any
legal call, all tools alike; 12% hand in work that is too short to be paid, 20% work of three better lengths (the longest is the text of
`tuned`, the best scripted player), 8% are the expert's, 6% only pass. No share was chosen for what the base then earns. \
That was not so before:
an older base had 30% shirkers, raised from 12% because the greedy base then earned 1.078 before any training, which left RL little to gain;
runs from that base are marked as such. What this one earns stands above.

An observation describes only what is new, and each fixed stretch of a prompt, a call or an observation is one piece of the tokenizer: \
an episode
has about 1,300 tokens, where it had 3,900.
"""

FURTHER = """
All this is pico_base. This one was then taught three things more, by `python -m lab.base.long`, and no string of more than 80 letters: to
find its place in a string when other words stand between the string and the tally, and when pairs of letters come twice; and to be asked
for up to 20 letters. Tier 7 has 80 to 150 letters and 12 to 20 asked: whatever it can do there is generalization.

So on strings of up to 80 letters GRPO changes how *often* the model derives, and not how *well*: the skill was there before. On longer ones
it changes both (`docs/longer.md`). Lists of names it has not seen since, and sorts them no more.
"""

WHAT = """made in rounds, which were added over time, by `python -m lab.base.pretrain` (seeded, two CPU cores). It \
counts letters and sorts names over
several turns{more}, each in habits of different worth"""
TOOLS = ", and calls the ten tools of a small economy"
WHAT_LONG = """made from pico_base by `python -m lab.base.long` (seeded, one CPU core). It counts letters in strings that may be
long, in habits of different worth"""

LISTS = """ Alphabet: `given` lists the names as they came,
`string` sorts by what a line begins with (right for first names, wrong for last names), `derives` cuts out the keys, \
sorts by them and copies."""

CAN = """the prompts of the environments named above, strings of up to 80 letters, lists of up to
15 names, and the names of that pool"""
CAN_LONG = "the prompts of letters"

CARD = """---
license: mit
library_name: transformers
---
# {name}

A Qwen3-architecture chat model of {millions:.2f}M parameters ({layers} layers, width {width}, head_dim 32, {vocab} tokens, tied
embeddings, bfloat16), {what}, and is
meant as a place for RL to start from: it knows the right way to answer, and seldom takes it.

{table}

Measured by `python -m lab.base.card --model models/{name} --tasks {tasks}`: {tasks} tasks a row group, \
{k} samples a task at temperature 1 (one where greedy); intervals take replies as independent, which the samples of a task are not. \
Letters: `bare` answers at once,
`states` thinks but only states counts, `derives` spells the string with a running tally.{lists}

{swarm}
{taught}
What it cannot do: anything else. It knows {can}; it has seen no prose. Its tokenizer (`lab/base/tokenizer.py`) splits \
quoted strings and names into \
letters and words of
prose into whole pieces; its chat template is Qwen3's ChatML, thinking and tools included.
"""

if __name__ == "__main__":
    tyro.cli(main)
