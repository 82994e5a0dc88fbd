"""How models/pico_base/ and models/pico_swarm/ were made: a Qwen3 of 0.9M parameters, from nothing.

    python -m lab.base.pretrain --stop-after 6 --out models/pico_base      # two to three hours
    python -m lab.base.pretrain --start-from models/pico_base --skip-rounds 6 --threads 1

The second makes models/pico_swarm, in 90 minutes on a busy machine. Both are seeded, and run on two
CPU cores.

What the base has to be: a chat model that *can* do the right thing and mostly does not. Then RL has
something to find. So it is trained on replies in habits of different worth; lab/base/corpus.py says
which, and writes them.

RL picks among habits far faster than it repairs a skill: a base whose tally was 57% right capped
the whole GRPO run near 66%, one at 92% capped it at 90%. So the skill is trained to the end and
only its *frequency* is kept low. The two are taken apart by weights: `derives` is most of the
examples, but the first three tokens of a conversation's first reply, where the habit is decided,
weigh as if it were 12%. (Fading the examples themselves from 90% to 12% in the last third left the
tally at 82%.)

Rounds, each from a fresh learning rate down to nothing:

    skill    tallies back to back with hardly any prompt, so that nearly every token teaches copying
             and counting; strings grow from 12 to 80 letters. The loss stands still for some 250
             steps, near what letters cost when guessed, and then falls: the heads that find "what
             came after this, last time" have formed. (With chat prompts from the start: after 750
             steps of twice the length.)
    polish   more chats, mostly long tallies. Before it a tally was right in 86% of the cases
             (greedy), and GRPO stood still at that ceiling.
    lists    the same for alphabet: lists back to back, growing from 2 to 5 names a turn, with a
             third of tallies so that they are not forgotten
    both     chats of both environments in all habits
    calls    skill first again, for swarm: all that there is to see, six calls that would be
             possible on it, the next, …, packed. (Stretches of episodes, with one call after each
             observation: after 220 steps hardly an id was copied right.)
    all      chats of all three, swarm's as whole episodes of 1,300 tokens, and some of the drill,
             since observations describe things only once. Three rounds of it: after the first, the
             second and the third, 12%, 11% and 8% of the sampled calls were refused or unreadable.

The figures above, and those in the comments, were seen on the way; their runs are not kept.

pico_swarm is a folder of its own because the last rounds cost something: it sorts lists worse than
pico_base (both cards). Neither was made in one go: every round was added when its environment came,
with --start-from, and pico_base keeps the tokenizer of its time, which cuts letters and alphabet
just as today's does. pico_swarm's rounds up to the second `all` read observations in which a list
of ids was told again only if it had changed; in 60 of its 75 errors on offers there was no offer.
The last round reads today's.
"""

import json
import math
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from tqdm import tqdm
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from lab.base.corpus import (
    SEED_RANGE,
    alphabet_rows,
    draw_task,
    drill_rows,
    heavier,
    letters_rows,
    lists_rows,
    pad_rows,
    swarm_rows,
    tally_rows,
)
from lab.base.tokenizer import build


@dataclass
class Pretrain:
    out: str = "models/pico_swarm"  # folder to write, in Hugging Face format
    seed: int = 0
    skill_steps: int = 2600  # optimizer steps of the first phase, about 0.32 s each
    chat_steps: int = 800  # and of the second, about 0.5 s each
    batch: int = 64  # replies a step (chat); the skill phase packs 32 rows of 256 to 320 tokens
    lr: float = 3e-3  # peak; linear warm-up over 100 steps, then cosine to zero over both phases
    # how often it says: bare, states, derives
    habits: list[float] = field(default_factory=lambda: [0.60, 0.28, 0.12])
    # how often each is shown in the chat phase
    shown: list[float] = field(default_factory=lambda: [0.20, 0.20, 0.60])
    # rounds of a third phase, mostly long tallies, each from a fresh learning rate to zero
    polish_steps: list[int] = field(default_factory=lambda: [1000, 500])
    polish_shown: list[float] = field(default_factory=lambda: [0.08, 0.08, 0.84])
    polish_lr: float = 2e-3  # of every round after the first
    lists_steps: int = 2000  # lists packed back to back, with rows of tallies beside them
    # rounds of chats of both environments
    both_steps: list[int] = field(default_factory=lambda: [800, 600])
    calls_steps: int = 300  # swarm's tool calls, with some lists and tallies beside them
    # rounds of chats of all three environments
    all_steps: list[int] = field(default_factory=lambda: [300, 260, 180])
    start_from: str = ""  # a folder written by an earlier call
    skip_rounds: int = 0  # those that it has been through (the first is skill and chat)
    stop_after: int = 0  # stop after so many rounds; 0 does all
    threads: int = 2


# --------------------------------------------------------------------------------------- the rounds
# Each gives the parts of one step, [(ids [B, T], weights [B, T-1])], and a size for the log: the
# longest string, the most names a turn, calls, turns.
dice = lambda cfg, at: random.Random(SEED_RANGE + cfg.seed * 1_000_000 + at)


def halves(rows: list[list], tokenizer) -> list[tuple]:
    half = len(rows) // 2
    return [pad_rows(part, tokenizer.pad_token_id) for part in (rows[:half], rows[half:])]


def skill_batch(cfg: Pretrain, tokenizer, step: int):
    """32 rows of tallies, whose strings grow."""
    rng = dice(cfg, step)
    cap = round(12 + 68 * min(1.0, step / (0.42 * cfg.skill_steps)))
    rows = tally_rows(tokenizer, rng, 32, 256 if cap < 50 else 320, lambda rng: draw_task(rng, cap))
    return halves(rows, tokenizer), cap


def chat_batch(cfg: Pretrain, tokenizer, step: int, polish: bool):
    """Chats of letters in all habits."""
    rng, shown = dice(cfg, 500_000 + step), cfg.polish_shown if polish else cfg.shown
    rows = letters_rows(tokenizer, rng, cfg.batch, shown, cfg.habits, polish)
    rows.sort(key=lambda row: len(row[0][0]) + len(row[0][1]))  # the shorter half is padded less
    return halves(rows, tokenizer), 80


def skill_round(cfg: Pretrain, tokenizer, step: int):
    """Tallies, then chats."""
    if step < cfg.skill_steps:
        return skill_batch(cfg, tokenizer, step)
    return chat_batch(cfg, tokenizer, step - cfg.skill_steps, False)


def polish_batch(cfg: Pretrain, tokenizer, step: int):
    return chat_batch(cfg, tokenizer, cfg.chat_steps + step, True)


def lists_batch(cfg: Pretrain, tokenizer, step: int):
    """20 rows of lists, which grow, and 16 shorter rows of tallies."""
    cap = 2 + int(3 * min(1.0, step / (0.3 * cfg.lists_steps)))  # 2 … 5 names a turn
    lists = halves(lists_rows(tokenizer, dice(cfg, 700_000 + step), 20, cap, 640), tokenizer)
    tallies, _ = skill_batch(cfg, tokenizer, cfg.skill_steps + step)
    return [tallies[0], *lists], cap


def both_batch(cfg: Pretrain, tokenizer, step: int):
    """Chats in all habits: 32 of letters and 16 of alphabet, which are four times as long."""
    letters, _ = chat_batch(cfg, tokenizer, 100_000 + step, polish=True)
    rng = dice(cfg, 800_000 + step)
    lists = alphabet_rows(tokenizer, rng, cfg.batch // 4, cfg.polish_shown, cfg.habits)
    return [letters[step % 2], pad_rows(lists, tokenizer.pad_token_id)], 80


def calls_batch(cfg: Pretrain, tokenizer, step: int):
    """32 rows of drill; beside them, every other step, 16 rows of tallies or 10 of lists, so that
    they are not forgotten."""
    drill = heavier(drill_rows(tokenizer, dice(cfg, 900_000 + step), 32, 512), tokenizer, 8.0)
    if step % 2:
        return [drill], 6
    (tallies, *lists), _ = lists_batch(cfg, tokenizer, cfg.lists_steps + step)
    return [drill, [tallies, lists[0]][step // 2 % 2]], 6


def all_batch(cfg: Pretrain, tokenizer, step: int):
    """8 whole episodes of swarm, 4 rows of drill, and 32 chats of letters or 6 of alphabet in turn.

    After the first round, 12% of the calls that were sampled named something that was not there,
    and 3% of the lists were right: in the second, what has to be copied weighs twice as much, and
    there are 10 chats of alphabet.
    """
    rng, again = dice(cfg, 950_000 + step), step >= cfg.all_steps[0]
    whole = heavier(swarm_rows(tokenizer, rng, 8, None), tokenizer, 8.0 if again else 4.0)
    drill = heavier(drill_rows(tokenizer, rng, 4, 512), tokenizer, 8.0)
    if step % 2:
        letters, _ = chat_batch(cfg, tokenizer, 200_000 + step, polish=True)
        return [whole, drill, letters[step // 2 % 2]], 25
    lists = alphabet_rows(tokenizer, rng, 10 if again else 6, cfg.polish_shown, cfg.habits)
    return [whole, drill, pad_rows(lists, tokenizer.pad_token_id)], 25


BATCHES = {
    "skill": skill_round,
    "polish": polish_batch,
    "lists": lists_batch,
    "both": both_batch,
    "calls": calls_batch,
    "all": all_batch,
}


# ------------------------------------------------------------------------------------- the training
def make_model(tokenizer, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        # 32: the smallest head vLLM's CPU attention takes
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=16384, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        # 0.02 is for wide models; here it would start too quiet
        tie_word_embeddings=True, initializer_range=0.06,
        bos_token_id=None, eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"), pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def start_from(model: Qwen3ForCausalLM, tokenizer, folder: Path) -> int:
    """Load an older base's weights, every one of them; returns how many pieces its tokenizer knows.

    Pieces that the older tokenizer has too keep their rows; new ones start as they are.
    RuntimeError if the base lacks a weight of the model, or has one that the model lacks.
    """
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    old, new = AutoTokenizer.from_pretrained(folder).get_vocab(), tokenizer.get_vocab()
    kept, name = [piece for piece in new if piece in old], "model.embed_tokens.weight"
    rows = model.model.embed_tokens.weight.detach().clone()  # [V, D]
    rows[[new[piece] for piece in kept]] = weights[name][[old[piece] for piece in kept]].float()
    # The head is the embedding, and stands in no file: with its name the loading can be strict.
    model.load_state_dict({**weights, name: rows, "lm_head.weight": rows})
    return len(kept)


def optimizer_of(model: Qwen3ForCausalLM) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def take_step(model, optimizer: torch.optim.Optimizer, parts: list[tuple]):
    """(loss, share of wrong tokens by part) of one step on [(ids [B, T], weights [B, T-1])]."""
    total = sum(weights.sum() for _, weights in parts)
    loss, wrong = 0.0, []
    for ids, weights in parts:
        # 1.5 times float32's speed where the CPU has AVX-512 bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state  # [B, T-1, D]
        chosen = weights > 0  # [B, T-1]: where a reply token is predicted
        logits = model.lm_head(hidden.float()[chosen])  # [N, V]
        targets = ids[:, 1:][chosen]  # [N]
        token_loss = F.cross_entropy(logits, targets, reduction="none")  # [N]
        part_loss = (token_loss * weights[chosen]).sum() / total
        part_loss.backward()
        loss += part_loss.item()
        misses = (logits.argmax(-1) != targets).float()
        wrong.append(round(misses.mean().item(), 4))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss, wrong


def train_round(model, optimizer, batch, length: int, peak: float, name: str, log: list) -> None:
    """Steps on batch(0), batch(1), …, from a fresh learning rate down to nothing."""
    for at in (bar := tqdm(range(length), desc=name, mininterval=5)):
        for group in optimizer.param_groups:  # up over 100 steps, then along a cosine
            group["lr"] = peak * min((at + 1) / 100, 0.5 * (1 + math.cos(math.pi * at / length)))
        parts, size = batch(at)
        loss, wrong = take_step(model, optimizer, parts)
        if at % 20 == 0:
            said = {"round": name, "step": at, "size": size, "loss": round(loss, 4), "wrong": wrong}
            log.append(said)
            bar.set_postfix(said)


def save(model, tokenizer, out: Path, began: float, log: list) -> None:
    """In Hugging Face format."""
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    minutes = round((time.time() - began) / 60, 1)
    (out / "pretrain_log.json").write_text(json.dumps({"minutes": minutes, "log": log}))
    print(f"wrote {out}/ after {minutes} minutes")


def main(cfg: Pretrain) -> None:
    torch.set_num_threads(cfg.threads)
    tokenizer, began, log = build(), time.time(), []
    model = make_model(tokenizer, cfg.seed)
    optimizer = optimizer_of(model)
    lr = cfg.polish_lr
    rounds = [
        ("skill", cfg.skill_steps + cfg.chat_steps, cfg.lr),
        *(("polish", n, lr) for n in cfg.polish_steps),
        ("lists", cfg.lists_steps, lr),
        *(("both", n, lr) for n in cfg.both_steps),
        ("calls", cfg.calls_steps, lr),
        *(("all", n, lr) for n in cfg.all_steps),
    ]
    rounds = rounds[: cfg.stop_after or None]
    if cfg.start_from:
        start_from(model, tokenizer, Path(cfg.start_from))
    for number, (name, length, peak) in list(enumerate(rounds))[cfg.skip_rounds :]:
        # A second round of a kind draws new tasks.
        before = sum(n for other, n, _ in rounds[:number] if other == name)
        # Round as the saved file does, and forget Adam's moments: --start-from begins just here.
        model.to(torch.bfloat16).float()
        optimizer.state.clear()
        batch = lambda at, name=name, before=before: BATCHES[name](cfg, tokenizer, before + at)
        train_round(model, optimizer, batch, length, peak, f"{number} {name}", log)
    save(model, tokenizer, Path(cfg.out), began, log)


if __name__ == "__main__":
    main(tyro.cli(Pretrain))
