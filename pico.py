"""pico.py: RL in one file. A language model learns to spell before it counts.

    python pico.py        # a CPU, five minutes; needs torch and nothing else

The model (0.9M parameters, models/pico_base) is asked how often certain letters occur
in a string. We pretrained it on this very task, with three styles of answer. In two of
them the counts that we showed were rough: 0, 1 and 2 were true, anything larger was 3,
4 or 5 at random. (From true counts it would have learned to count without spelling.)
The third style spells the string out, and we made it rare. Asked how often a and q
occur in banana,

    it answers at once   <answer>{"a": 5, "q": 0}</answer>              mostly wrong
    it states the counts <think> Let me count. a occurs 4 times, …      mostly wrong
    it spells it out     <think> b a1 n a2 n a3 </think> <answer>…      right, but rare

(n carries no number, because the task does not ask about n.) Nothing tells the model
which style is best. It answers each task eight times, and each reply is scored. Those
that score above the mean of the eight are made likelier, those below it less likely.
With seed 0 you will see this, and its replies to two tasks (95% intervals in brackets):

    before      exact  9.8% [ 6.7%, 14.0%]  n = 256  spells it out   0%
    after SFT   exact 19.1% [14.8%, 24.4%]  n = 256  spells it out   0%
    update   1  reward 0.06  spells it out   5%  grad norm 0.05
    …
    update 150  reward 0.97  spells it out 100%  grad norm 0.04
    after GRPO  exact 96.9% [94.0%, 98.4%]  n = 256  spells it out 100%

SFT, the stage between, imitates the second style, now with true counts.

Why is the reward 0.06, when 19% were right just before? For two reasons. An evaluation
is greedy: it takes the likeliest token each time. In training, tokens are sampled at
random, and a sampled reply is right less often (14%, docs/why_rl.md). And 64 replies,
to eight tasks, are few. Sampling also shows what greedy decoding hides: 5% of the
samples spell the string out. (Before SFT, which shows another style, it was 13%.) These
are right far more often than the rest, so spelling becomes likelier.

Read from the top: the task and its reward, the loop, the loss, sampling, then SFT and
evaluation. The model and its tokenizer come last; RL does not depend on how they work.

The .py files beside this one, "the book", do the same jobs faster, more safely and for
other tasks; the heading of each part below names the file. tests/test_pico.py compares
the two. docs/pico.md shows the tensors of one update.
"""

import argparse
import json
import random
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

if __name__ == "__main__":  # torch takes seconds to load, so speak first
    print(
        "pico.py: by trial and error a small model learns to spell a string out\n"
        "before it counts. Five minutes on a CPU. First it loads torch and plays 256\n"
        "tasks, to see what the model can do before any training: 10 to 30 seconds.\n\n"
        "exact   the share of tasks with every count right, and its 95% interval\n"
        "reward  the same share among training samples, whose tokens are random; so\n"
        "        it is lower\n",
        flush=True,
    )
# torch warns if NumPy is missing; it is not needed here.
warnings.filterwarnings("ignore", "Failed to initialize NumPy")

try:
    import torch
except ModuleNotFoundError:
    sys.exit("pico.py needs torch: pip install torch")
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

# ---------------------------------------------------------------- numbers to play with
# Tasks per update.
TASKS = 8
# Replies to each task. With K = 1 a reply has nothing to be compared with: every
# advantage is 0, and nothing is learned.
K = 8
# The longest reply. If you set it to 64, a spelled-out reply is cut off before its
# answer ends, so spelling is never rewarded.
MAX_TOKENS = 320
# The learning rate. With 0.1 the model babbles after a few updates, and the reward
# stays at 0.
LR = 3e-4
# The rate rises to LR over the first WARMUP updates, then falls linearly, to LR_END
# times LR at the end: see schedule().
WARMUP = 5
LR_END = 0.1
# A gradient whose norm is larger is scaled down to this norm.
MAX_NORM = 1.0

SFT_STEPS = 50
SFT_BATCH = 8
SFT_LR = 1e-4

DEVICE = "cpu"  # or "cuda"; "mps" on a Mac was not run

# A task is generated from an integer, its seed. These seeds are reserved for SFT's
# demonstrations and for evaluation. GRPO's seeds count up from 0 (with --seed 0) and
# never reach them, so the model is not tested on tasks that it trained on.
SFT_SEEDS = range(10**9, 10**9 + 100)
DEV_SEEDS = range(2 * 10**9, 2 * 10**9 + 256)


# ---------------------------------------------- task and reward (book: env_letters.py)
def make_task(seed: int) -> tuple[str, dict[str, int]]:
    """(the question, the right answer: {letter: how often it occurs in the string})."""
    rng = random.Random(seed)
    length = rng.randint(40, 80)
    text = "".join(rng.choice(ascii_lowercase) for _ in range(length))
    # Drawn and dropped. env_letters.py uses this number. Without it all later draws
    # would differ, and so would a seed's task.
    rng.random()
    n_letters = rng.randint(8, 12)
    p_present = rng.uniform(0.3, 0.9)  # the chance that a requested letter occurs
    present = sorted(set(text))
    absent = sorted(set(ascii_lowercase) - set(text))
    rng.shuffle(present)
    rng.shuffle(absent)
    letters = []
    for _ in range(n_letters):
        if rng.random() < p_present:
            pool = present or absent  # the other list, if this one is used up
        else:
            pool = absent or present
        letters.append(pool.pop())
    ask = (
        f'Count the letters {", ".join(letters)} in "{text}". '
        "Think first inside <think> and </think> if that helps. "
        "Then give the counts as JSON inside <answer> and </answer>."
    )
    return ask, {letter: text.count(letter) for letter in letters}


def reward_of(counts: dict[str, int], reply: str) -> float:
    """1.0 if every count is right, else 0.0. Any string is a legal reply.

    If you change one thing in this file, change this function.
    """
    # What follows the last </think>, or everything if there is none.
    rest = reply.rpartition("</think>")[2]
    if "<think>" in rest:  # an unclosed <think>: what follows is thought, not answer
        return 0.0
    if re.findall("</?answer>", rest) != ["<answer>", "</answer>"]:
        return 0.0
    body = rest.partition("<answer>")[2].partition("</answer>")[0]
    try:
        answer = json.loads(body.strip(), object_pairs_hook=each_letter_once)
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return 0.0
    # In Python True == 1 and 1.0 == 1, so each count must also be an int. (If answer ==
    # counts, it is a dict.)
    return float(answer == counts and all(type(n) is int for n in answer.values()))


def each_letter_once(pairs: list[tuple]) -> dict:
    """Build a JSON object; refuse a repeated letter.

    (json alone keeps the last: {"a": 3, "a": 4} would become {"a": 4}.)
    """
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a letter was answered twice")
    return dict(pairs)


# ----------------------------------------------------------- the loop (book: train.py)
def main(seed: int, updates: int) -> None:
    """Some imitation (SFT), then the loop of GRPO: sample, compare, learn, look."""
    first_seed = first_task_seed(seed, updates)
    torch.manual_seed(seed)
    lora = new_lora()  # the trainable weights: small additions to the frozen ones
    # Show two tasks; evaluate prints the replies to them.
    for name, task_seed in zip("AB", DEV_SEEDS[-2:]):
        ask, counts = make_task(task_seed)
        print(f"Task {name}: {ask}\nRight: {json.dumps(counts)}\n", flush=True)
    evaluate(weights_of(lora), "before")
    imitate(lora, seed)
    evaluate(weights_of(lora), "after SFT")
    # GRPO gets a new optimizer: Adam's running averages from SFT are not carried over
    optimizer = torch.optim.AdamW(lora.values(), weight_decay=0)
    curve = []
    try:
        for i in range(updates):
            # 1 sample: K replies to each task, drawn token by token at random.
            seeds = range(first_seed + i * TASKS, first_seed + (i + 1) * TASKS)
            # one random number in [0, 1) per token; draw() turns it into a choice
            uniforms = torch.rand(TASKS * K, MAX_TOKENS).to(DEVICE)
            groups = play(weights_of(lora), seeds, K, uniforms)

            # 2 compare: how much better was each reply than the others of its group?
            rewards = torch.tensor(
                [[e.reward for e in group] for group in groups]
            )  # [TASKS, K]
            advantages = advantages_of(rewards).to(DEVICE)  # [TASKS, K]

            # 3 learn: the better ones become likelier, the worse ones less likely. One
            # group at a time, to save memory: each backward() adds to the gradients and
            # frees its activations. grpo_loss sums over a group's replies; dividing by
            # the number of all replies makes the total a mean.
            for group, group_advantages in zip(groups, advantages):
                if group_advantages.any():  # else all scored alike: nothing to learn
                    loss = grpo_loss(weights_of(lora), group, group_advantages)
                    (loss / (TASKS * K)).backward()
            grad_norm = adam_step(
                optimizer, lora, LR * schedule(i, updates, WARMUP, LR_END)
            )

            # 4 look.
            spelled = [spells_it_out(e.text) for group in groups for e in group]
            curve.append(rewards.mean().item())
            print(
                f"update {i + 1:3}  reward {curve[-1]:.2f}  "
                f"spells it out {sum(spelled) / len(spelled):4.0%}  "
                f"grad norm {grad_norm:.2f}",
                flush=True,
            )
    except KeyboardInterrupt:
        print("stopped early; what it has learned so far:")
    evaluate(weights_of(lora), "after GRPO")
    draw_curve(curve)


# ------------------------------------------------- advantage and loss (book: grpo.py)
def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards [G, k] -> advantages [G, k]: [1, 0, 0, 1] -> [+1, -1, -1, +1].

    Zeros if all rewards of a group are equal: there is nothing to learn from it.
    """
    rewards = rewards.double()
    centered = rewards - rewards.mean(1, keepdim=True)
    # Equal rewards must give exactly 0, or main would not skip the group. (If all
    # are 0.1, say, rounding leaves 1e-17.)
    centered[centered.abs() < 1e-12] = 0
    std = rewards.std(1, keepdim=True, correction=0)  # divided by k, not by k - 1
    return (centered / (std + 1e-6)).float()


def grpo_loss(weights: dict, group: list, advantages: torch.Tensor) -> torch.Tensor:
    """The loss of one group. advantages [k], one per reply.

    A token's gain is its advantage times its log-prob. A reply's gain is the mean over
    its tokens. The loss is minus the sum of the replies' gains; main divides it by the
    number of replies.

    Why log-probs? A task's expected reward is the sum of p(reply) * reward over all
    replies. Since grad p = p * grad log p, its gradient is the mean, over sampled
    replies, of reward * grad log p(reply): the policy gradient (Williams 1992). And
    log p(reply) is the sum of the log-probs of its tokens.

    Why minus the mean? Subtracting the same number from all rewards does not change
    the gradient, but makes it less noisy. The group's mean contains the reply's own
    reward; that only shrinks the gradient, on average to 1 - 1/k of it.

    Dividing by the std and by the length changes how much each group and each reply
    counts, so this is no longer exactly the gradient of the expected reward.

    GRPO's formula also has a ratio, p / p_old. With one optimizer step per batch, as
    here, it is 1 and changes no gradient, so it is left out. (grpo.py has it.)
    """
    # for each of the M reply tokens: its log-prob, and which reply it belongs to
    logp, reply_of = logprobs_of(weights, group)
    gain = logp * advantages[reply_of]  # [M]
    # The mean over a reply's tokens: a long one weighs no more than a short one.
    lengths = torch.tensor([len(e.reply) for e in group], device=DEVICE)  # [k]
    return -(gain / lengths[reply_of]).sum()


def logprobs_of(weights: dict, episodes: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors [M], an entry per reply token: its log-prob now, its reply's row."""
    rows = [torch.tensor(e.prompt + e.reply) for e in episodes]
    ids = pad_sequence(rows, batch_first=True).to(DEVICE)  # [N, T]
    # Position t predicts token t + 1: the shift that everybody gets wrong once. The
    # mask is True at the positions whose next token is in the reply. With a prompt of 3
    # tokens and a reply of 2:
    #
    #     position   0       1       2       3
    #     token      prompt  prompt  prompt  reply
    #     predicts   prompt  prompt  reply   reply
    #     mask       0       0       1       1
    #
    # The reply's last token (position 4) predicts nothing that is needed.
    mask = torch.zeros_like(ids[:, 1:], dtype=torch.bool)  # [N, T-1]
    for n, e in enumerate(episodes):
        mask[n, len(e.prompt) - 1 : len(rows[n]) - 1] = True
    # Here padding is on the right, where no real token can see it. forward's `pad`
    # counts padding on the left: none.
    no_pad = torch.zeros_like(ids[:, 0])  # [N]
    logp = forward(weights, ids[:, :-1], no_pad, wanted=mask)  # [M, V]
    chosen = ids[:, 1:][mask]  # [M]
    reply_of = mask.nonzero()[:, 0]  # [M], the row of each True
    return logp.gather(1, chosen[:, None])[:, 0], reply_of


def schedule(i: int, steps: int, warmup: float, end: float) -> float:
    """The learning rate of step i, as a fraction of the peak.

    The lower of two lines: one rises to 1 over the first `warmup` steps, the other
    falls from 1 at step 0 to `end` at step `steps`.
    """
    up = (i + 1) / warmup
    down = 1 - (1 - end) * i / steps
    return min(up, down)


def adam_step(optimizer, lora: dict, lr: float) -> float:
    """One step of Adam; returns the norm of the gradient before it was clipped."""
    optimizer.param_groups[0]["lr"] = lr
    norm = torch.nn.utils.clip_grad_norm_(lora.values(), MAX_NORM).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm


# ------------------------------------------ sample (book: rollout.py, fast/sampler.py)
@dataclass
class Episode:
    """One play of one task. We train on exactly the tokens that were sampled."""

    prompt: list[int]
    reply: list[int]  # token ids, the end-of-turn token included
    text: str = ""
    reward: float = 0.0


@torch.no_grad()
def play(weights: dict, seeds: range, k: int, uniforms=None) -> list[list[Episode]]:
    """k episodes of each of G tasks, [G][k].

    uniforms [G · k, MAX_TOKENS]: random in [0, 1), one per token, for draw(). None:
    greedy, the likeliest token each time. (PROMPT, STOP and TEXTS come at the end of
    the file.)
    """
    tasks = [make_task(seed) for seed in seeds]
    prompts = [encode(PROMPT.format(ask)) for ask, _ in tasks]
    # Padded on the left, so that all replies begin in the same column.
    rows = [torch.tensor(p) for p in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_side="left").to(DEVICE)  # [G, P]
    longest = ids.shape[1]
    pad = torch.tensor([longest - len(p) for p in prompts], device=DEVICE)  # [G]

    # Read each prompt once, in G rows; then copy its cache k times, B = G · k.
    # keys and values (2) of each layer
    size = (LAYERS, 2, len(tasks), KV_HEADS, longest + MAX_TOKENS, HEAD_DIM)
    cache = torch.zeros(size, device=DEVICE)
    logp = forward(weights, ids, pad, cache=cache)  # [G, V]
    logp = logp.repeat_interleave(k, 0)  # [B, V]
    pad = pad.repeat_interleave(k)  # [B]
    cache = cache.repeat_interleave(k, dim=2)  # G -> B

    drawn = []  # a tensor [B] per step
    done = torch.zeros_like(pad, dtype=torch.bool)  # [B]
    for t in range(MAX_TOKENS):
        if uniforms is None:
            token = logp.argmax(-1)  # [B]
        else:
            token = draw(logp, uniforms[:, t])  # [B]
        drawn.append(token)
        # A finished row draws on until all are done; below, it is cut at STOP.
        done = done | (token == STOP)
        if done.all():
            break
        logp = forward(weights, token[:, None], pad, cache=cache, start=longest + t)

    episodes = []
    for b, reply in enumerate(torch.stack(drawn, 1).tolist()):  # [B][t]
        if STOP in reply:
            reply = reply[: reply.index(STOP) + 1]
        text = "".join(TEXTS[i] for i in reply if i != STOP)
        _, counts = tasks[b // k]
        reward = reward_of(counts, text)
        episodes.append(Episode(prompts[b // k], reply, text, reward))
    return [episodes[b : b + k] for b in range(0, len(episodes), k)]


def draw(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One token per row, [B]: the first whose cumulative probability exceeds a number.

    logprobs [B, V]; uniforms, the numbers, [B], in [0, 1). torch.multinomial would do,
    too. With the random numbers as an argument, a test can hand the same ones to the
    book, and expect the same tokens.
    """
    cdf = logprobs.exp().cumsum(-1)  # [B, V]
    # Rounding leaves the last sum slightly off 1, so the number is scaled by that sum.
    # If rounding still pushes it past the end, clamp picks the last token.
    target = uniforms[:, None] * cdf[:, -1:]
    # right=True: the first entry that is greater than target
    token = torch.searchsorted(cdf, target, right=True)[:, 0]
    return token.clamp(max=cdf.shape[1] - 1)


# ------------------------------ before and after the loop (book: sft.py, evaluate.py)
def demonstration(counts: dict[str, int]) -> str:
    """What SFT imitates: true counts, stated without the way to them."""
    stated = ", ".join(f"{c} occurs {n} times" for c, n in counts.items())
    answer = json.dumps(counts)
    return f"<think>\nLet me count. {stated}.\n</think>\n<answer>{answer}</answer>"


def imitate(lora: dict, seed: int) -> None:
    """SFT: make demonstrations likelier. They never spell the string out."""
    optimizer = torch.optim.AdamW(lora.values(), weight_decay=0)
    rng = random.Random(seed)
    demos = []
    for ask, counts in map(make_task, SFT_SEEDS):
        prompt = encode(PROMPT.format(ask))
        reply = [*encode(demonstration(counts)), STOP]
        demos.append(Episode(prompt, reply))
    for i in range(SFT_STEPS):
        print(f"SFT, step {i + 1} of {SFT_STEPS}", end="\r", flush=True)
        batch = rng.sample(demos, SFT_BATCH)
        logp, _ = logprobs_of(weights_of(lora), batch)  # [M]
        # the mean over tokens, not over replies: here a long reply weighs more
        loss = -logp.mean()
        loss.backward()
        adam_step(
            optimizer, lora, SFT_LR * schedule(i, SFT_STEPS, SFT_STEPS / 10, end=0)
        )


def spells_it_out(reply: str) -> bool:
    """Does it think letter by letter, "b a1 n a2"? We watch this; it earns nothing."""
    thought, _, rest = reply.rpartition("</think>")  # without one, thought is ""
    if "<think>" in rest:  # never closed: the whole reply is a thought
        thought = reply
    items = thought.replace("<think>", "", 1).split()
    # more than half of the items must be a letter, with or without a number
    spelled = [item for item in items if re.fullmatch("[a-z][0-9]*[,.:]?", item)]
    return len(spelled) > len(items) / 2


def evaluate(weights: dict, stage: str) -> None:
    """Play the development tasks greedily: how many are right, with what interval?"""
    episodes = [group[0] for group in play(weights, DEV_SEEDS, 1)]
    n = len(episodes)
    p = sum(e.reward for e in episodes) / n
    low, high = interval_of(p, n)
    spelled = sum(spells_it_out(e.text) for e in episodes) / n
    print(
        f"{stage:10}  exact {p:5.1%} [{low:5.1%}, {high:5.1%}]  n = {n}  "
        f"spells it out {spelled:4.0%}"
    )
    for name, e in zip("AB", episodes[-2:]):
        print(f"Task {name}, reward {e.reward:.0f}: {e.text}\n", flush=True)


def interval_of(p: float, n: int) -> tuple[float, float]:
    """Wilson's 95% interval (1927) for a share p of n tasks; it stays within [0, 1]."""
    z2 = 1.96**2
    center = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = (z2 * (p * (1 - p) / n + z2 / (4 * n * n))) ** 0.5 / (1 + z2 / n)
    return center - half, center + half


def draw_curve(rewards: list[float]) -> None:
    """The mean reward of every ten updates, as a bar."""
    for i in range(0, len(rewards), 10):
        ten = rewards[i : i + 10]
        mean = sum(ten) / len(ten)
        print(f"updates from {i + 1:3}  {mean:4.2f} {'#' * round(50 * mean)}")


def first_task_seed(seed: int, updates: int) -> int:
    """The seed of a run's first task. Runs with other seeds have other tasks."""
    # Each --seed has its own block of task seeds: 100,000 updates of TASKS tasks. The
    # last block ends before SFT_SEEDS begins.
    max_updates = 100_000
    max_run_seed = SFT_SEEDS[0] // (max_updates * TASKS) - 1
    if not (0 <= seed <= max_run_seed and updates <= max_updates):
        sys.exit(
            f"pico.py: choose a --seed from 0 to {max_run_seed}, and at most "
            f"{max_updates:,} --updates"
        )
    return seed * max_updates * TASKS


# --------------------------------------------- model: Qwen3 and LoRA (book: policy.py)
MODEL = Path(__file__).resolve().parent / "models" / "pico_base"
# Both checks stand here because the weights are read as soon as the file is loaded.
# (padding_side and enable_gqa need torch 2.5.)
if not (MODEL / "model.safetensors").exists():
    sys.exit(
        f"pico.py: there is no model in {MODEL}; "
        "run it inside a clone of the repository"
    )
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5):
    sys.exit(
        f"pico.py: torch {torch.__version__} is too old; pip install --upgrade torch"
    )

# As in its config.json.
LAYERS = 4
HEADS = 4  # query heads
KV_HEADS = 2  # key and value heads: two query heads share one
HEAD_DIM = 32
EPS = 1e-6
ROPE_BASE = 10_000.0

# LoRA: a weight W stays frozen. Only the product B A, of rank RANK, is trained; it is
# added to W, scaled by ALPHA / RANK.
RANK = 32
ALPHA = 64


def forward(
    weights: dict,
    ids: torch.Tensor,
    pad: torch.Tensor,
    wanted=None,
    cache=None,
    start=0,
) -> torch.Tensor:
    """Log-probs of every possible next token at M positions: [M, V].

    ids     [B, T]
    pad     [B]; the first pad[b] tokens of row b are padding, and do not count
    wanted  a mask [B, T] with the M positions; None: the last one of each row, so that
            M = B
    cache   [LAYERS, 2, B, KV_HEADS, columns, HEAD_DIM]: the keys and values of the
            tokens that earlier calls have read; this call writes its own after them
    start   how many columns of the cache earlier calls have filled, padding included
    """
    B, T = ids.shape

    # Weights go by short names: rms_norm(x, "norm") takes "model.norm.weight", and
    # linear(x, "layers.0.self_attn.q") takes "model.layers.0.self_attn.q_proj.weight".
    def rms_norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[f"model.{name}.weight"], EPS)

    def linear(x, name):
        return x @ weights[f"model.{name}_proj.weight"].T

    def heads(x, name):
        x = linear(x, name).view(B, T, -1, HEAD_DIM)
        return x.transpose(1, 2)  # [B, heads, T, d]

    # What may a token see? With T = 4 and pad = 2 (x: the query sees the key):
    #
    #     key       0 1 2 3
    #     query 0   x         padding sees itself: a row without any x would give NaN
    #     query 1     x       padding
    #     query 2       x
    #     query 3       x x
    keys = torch.arange(start + T, device=DEVICE)
    columns = keys[start:, None]  # [T, 1], of the queries
    # The first column each query may see, [B, T, 1] (in the picture 0, 1, 2, 2):
    # padding sees only itself; real tokens see back to the row's first real token.
    first_key = pad[:, None, None].minimum(columns)
    mask = (keys <= columns) & (keys >= first_key)  # [B, T, start + T]

    # RoPE tells attention where a token is: it turns pairs of numbers by angles that
    # grow with the position. Dimensions i and i + d/2 turn by position ·
    # ROPE_BASE^(-2i/d), where d is HEAD_DIM. The position is counted from the row's
    # first real token: columns - pad.
    even = torch.arange(0, HEAD_DIM, 2, device=DEVICE)  # 2i
    inv_freq = ROPE_BASE ** -(even / HEAD_DIM)  # [d/2]
    angle = (columns - pad[:, None, None]) * inv_freq  # [B, T, d/2]
    angle = angle.repeat(1, 1, 2)[:, None]  # [B, 1, T, d]: both halves turn alike

    x = F.embedding(ids, weights["model.embed_tokens.weight"])  # [B, T, D]
    for layer in range(LAYERS):
        attn = f"layers.{layer}.self_attn"
        mlp = f"layers.{layer}.mlp"
        h = rms_norm(x, f"layers.{layer}.input_layernorm")
        q = rms_norm(heads(h, f"{attn}.q"), f"{attn}.q_norm")
        k = rms_norm(heads(h, f"{attn}.k"), f"{attn}.k_norm")
        q = rotate(q, angle)  # [B, HEADS, T, d]
        k = rotate(k, angle)  # [B, KV_HEADS, T, d]
        v = heads(h, f"{attn}.v")
        if cache is not None:
            kv = cache[layer]  # a view of the cache, [2, B, KV_HEADS, columns, d]
            kv[:, :, :, start : start + T] = torch.stack([k, v])
            k, v = kv[:, :, :, : start + T]
        # enable_gqa: HEADS / KV_HEADS query heads share one head of keys and values.
        y = F.scaled_dot_product_attention(q, k, v, mask[:, None], enable_gqa=True)
        y = y.transpose(1, 2).reshape(B, T, HEADS * HEAD_DIM)
        x = x + linear(y, f"{attn}.o")

        h = rms_norm(x, f"layers.{layer}.post_attention_layernorm")
        gate = F.silu(linear(h, f"{mlp}.gate"))
        x = x + linear(gate * linear(h, f"{mlp}.up"), f"{mlp}.down")
    # logits only at the wanted positions: this saves memory
    x = x[:, -1] if wanted is None else x[wanted]  # [M, D]
    logits = rms_norm(x, "norm") @ weights["model.embed_tokens.weight"].T  # [M, V]
    return logits.log_softmax(-1)


def rotate(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """RoPE (Su et al. 2021): rotate pairs of dimensions of x [B, H, T, d] by `angle`.

    Dimensions i and i + d/2 are a pair (l, r), which becomes (l cos - r sin,
    r cos + l sin). angle [B, 1, T, d] grows with position, so attention sees how far
    apart tokens are.
    """
    left, right = x.chunk(2, dim=-1)
    swapped = torch.cat([-right, left], dim=-1)
    return x * angle.cos() + swapped * angle.sin()


def weights_of(lora: dict) -> dict[str, torch.Tensor]:
    """The policy's weights: W + (ALPHA / RANK) · B A per linear layer (Hu et al. 2021).

    Gradients flow through it to A and B.
    """
    weights = dict(BASE)
    for name in BASE:
        if "_proj" in name:
            change = lora[name + ".B"] @ lora[name + ".A"]  # [out, in]
            weights[name] = BASE[name] + ALPHA / RANK * change
    return weights


def new_lora() -> dict[str, torch.Tensor]:
    """The trainable weights: per linear layer A [r, in], random; B [out, r], zeros."""
    shapes = {name: w.shape for name, w in BASE.items() if "_proj" in name}
    lora = {}
    for name, (n_out, n_in) in shapes.items():
        # uniform between -1/√n_in and 1/√n_in, as in peft
        lora[name + ".A"] = (2 * torch.rand(RANK, n_in) - 1) / n_in**0.5
        lora[name + ".B"] = torch.zeros(n_out, RANK)  # the policy starts as the base
    return {name: x.to(DEVICE).requires_grad_() for name, x in lora.items()}


def read_weights() -> dict[str, torch.Tensor]:
    """{name: weight} from a safetensors file.

    The file: 8 bytes with the length of a JSON header, the header, then the numbers.
    """
    raw = bytearray((MODEL / "model.safetensors").read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    numbers = torch.frombuffer(raw, dtype=torch.bfloat16, offset=start)  # 2 bytes each
    weights = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]  # in bytes
        weight = numbers[begin // 2 : end // 2].view(entry["shape"])
        weights[name] = weight.float().to(DEVICE)
    return weights


BASE = read_weights()  # frozen


# --------------------------------------------------------- tokens (book: policy.py)
def encode(text: str) -> list[int]:
    """Token ids: the segmentation with the highest total score.

    best[n] is the best way to cut the first n characters. Each possible last piece is
    tried after the best cut of what comes before it (dynamic programming).
    """
    best = [(0.0, [])]  # best[n] is (score, ids)
    for end in range(1, len(text) + 1):
        # each way to cut the first `end` characters; longest last piece first
        ways = []
        for begin in range(max(0, end - LONGEST_PIECE), end):
            piece = text[begin:end]
            if piece in PIECES:
                score, token_id = PIECES[piece]
                total, ids = best[begin]
                ways.append((total + score, ids + [token_id]))
        if not ways:  # the book falls back on bytes
            raise ValueError(f"pico.py has no token for {text[end - 1]!r}")
        # Of equal scores max takes the first, with the longest last piece.
        best.append(max(ways, key=lambda way: way[0]))
    return best[-1][1]


def read_tokenizer() -> tuple[list[str], dict[str, tuple[float, int]]]:
    """(the text of each token id, {piece: (its score, its id)}) from tokenizer.json.

    A piece is a text that is one token. Its score is a log-probability: a unigram
    tokenizer (Kudo 2018).
    """
    file = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    texts, pieces = [], {}
    for token_id, (piece, score) in enumerate(file["model"]["vocab"]):
        pieces[piece] = (score, token_id)
        # <0x41> stands for the byte 0x41, an A. (é is two bytes; one of them alone is
        # shown as "�".)
        if re.fullmatch("<0x..>", piece):
            piece = bytes([int(piece[3:5], 16)]).decode(errors="replace")
        texts.append(piece)
    # Tokens such as <think> are in vocab, too, and must never be split. Ordinary scores
    # are negative; these get a huge positive one, which always wins.
    for token in file["added_tokens"]:
        pieces[token["content"]] = (10**6, token["id"])
    return texts, pieces


TEXTS, PIECES = read_tokenizer()
STOP = PIECES["<|im_end|>"][1]  # ends each turn; the policy must learn to write it, too
# The chat template, up to where the reply begins. {} is the question.
PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
LONGEST_PIECE = max(len(piece) for piece in PIECES)  # in characters


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument(
        "--seed",
        type=int,
        default=0,
        help="random seed of LoRA's start, the tasks and the samples",
    )
    flags.add_argument(
        "--updates", type=int, default=150, help="number of GRPO updates"
    )
    try:
        main(**vars(flags.parse_args()))
    except (RuntimeError, MemoryError) as error:
        if "memory" not in repr(error).lower():
            raise
        sys.exit(
            "pico.py: out of memory; "
            "lower TASKS, or shorten DEV_SEEDS, at the top of the file"
        )
    print(
        "\nNext: change one line of pico.py and run it again. Try another reward in\n"
        "reward_of, or LR near the top. docs/pico.md shows the tensors of an update.\n"
        "`make train` does the same by the book: faster, and with a report."
    )
