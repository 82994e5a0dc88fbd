"""How pico_base/ was made: a 0.9M-parameter Qwen3 from nothing, on two CPU cores, seeded.

    python -m lab.pretrain                # about 50 minutes; writes pico_base/

What the base has to be: a chat model that *can* do the right thing and mostly does not. Then RL has something
to find. It is trained on replies in three habits of different worth (env_letters.STYLES):

    bare      the answer at once, from a glance: none, one and two are seen, more is guessed         most of the time
    states    thinks, but the thinking only states what the glance saw: the same guess, longer       often
    derives   spells the string with a running tally: right almost always                            in a minority

The glance is a law, not laziness: shown the true counts, a model this small learns to count 60 letters without
spelling them (62% of tier 6 exactly right, greedy), and there is little left to find by thinking.

RL picks among habits far faster than it repairs a skill: a base whose tally was 57% right capped the whole
GRPO run near 66%, one at 92% capped it at 90%. So the skill is trained to the end and only its *frequency*
is kept low. The two are taken apart by weights: `derives` is 60% of the examples, but the first three
tokens of a reply, where the habit is decided, weigh as if it were 12%. (Fading the examples themselves from 90%
to 12% in the last third left the tally at 82%.)

Three phases. `skill` packs tallies back to back with hardly any prompt, so that nearly every token teaches copying
and counting; strings grow from 12 to 80 letters. The loss stands still for some 250 steps, near what letters
cost when guessed, and then falls: the heads that find "what came after this, last time" have formed. (Chat prompts from
the start did arrive as well, but the fall came after 750 steps of twice the length: prompts are mostly words that
teach nothing.) `chat` wraps the same in real prompts and brings in the other habits. `polish` is more chat, mostly long tallies,
from a fresh learning rate down to nothing: before it a tally was right in 86% of the cases (greedy), its mistakes in copying
where two letters in a row occur twice, and GRPO stood still at that ceiling.
"""

import json
import math
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from env_letters import STYLES, Task, make_task, question, write_reply
from lab.tokenizer import build

SEED_RANGE = 3_000_000_000  # pretraining draws its tasks here; train, SFT and eval seeds lie elsewhere (train.py)


@dataclass
class Pretrain:
    out: str = "pico_base"  # folder to write, in Hugging Face format
    seed: int = 0
    skill_steps: int = 2600  # optimizer steps of the first phase, about 0.32 s each
    chat_steps: int = 800  # and of the second, about 0.5 s each
    batch: int = 64  # replies a step (chat); the skill phase packs 32 rows of 256 to 320 tokens
    lr: float = 3e-3  # peak; linear warm-up over 100 steps, then cosine to zero over both phases
    habits: list[float] = field(default_factory=lambda: [0.60, 0.28, 0.12])  # how often it says: bare, states, derives
    shown: list[float] = field(default_factory=lambda: [0.20, 0.20, 0.60])  # how often each is shown in the chat phase
    polish_steps: list[int] = field(default_factory=lambda: [1000, 500])  # rounds of a third phase: mostly long tallies, each
    # from a fresh and smaller learning rate to zero
    polish_shown: list[float] = field(default_factory=lambda: [0.08, 0.08, 0.84])
    polish_lr: float = 2e-3
    start_from: str = ""  # a folder written by an earlier call: skip the first two phases …
    skip_rounds: int = 0  # … and so many rounds of polish
    threads: int = 2


def draw_task(rng: random.Random, cap: int) -> Task:
    """A task with at most `cap` letters: 70% random strings, 30% of the English tiers that fit."""
    if rng.random() < 0.7 or cap < 18:
        length = rng.randint(max(1, cap // 3), cap)
        text = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))
        letters = rng.sample("abcdefghijklmnopqrstuvwxyz", rng.choice([1, *range(2, 13)]))
        present = sorted(set(text))
        if rng.random() < 0.5:  # as in the tiers, asked letters occur more often than chance
            letters = list(dict.fromkeys([rng.choice(present) if rng.random() < 0.5 else c for c in letters]))
        return Task(text, tuple(letters), tuple(text.count(c) for c in letters))
    while True:
        task = make_task(rng, rng.choice([1, 2, 3, 4, 5, 6]))
        if len(task.text) <= cap:
            return task


def skill_batch(cfg: Pretrain, tokenizer, step: int):
    """(ids [32, T], weights [32, T-1], longest string): short spec, tally, short spec, tally, …, packed."""
    rng = random.Random(SEED_RANGE + cfg.seed * 1_000_000 + step)
    cap = round(12 + 68 * min(1.0, step / (0.42 * cfg.skill_steps)))
    length = 256 if cap < 50 else 320
    rows = []
    while len(rows) < 32:
        row = []
        while True:
            task = draw_task(rng, cap)
            prompt = tokenizer(f' {", ".join(task.letters)} in "{task.text}".\n')["input_ids"]
            reply = tokenizer(write_reply(task, "derives") + "<|im_end|>\n")["input_ids"]
            if sum(len(p) + len(r) for p, r, _ in row) + len(prompt) + len(reply) > length:
                break
            row.append((prompt, reply, 1.0))
        rows.append(row)
    return *pad_rows(rows, tokenizer.pad_token_id), cap


def glance(task: Task, rng: random.Random) -> Task:
    """The task with the counts that one look gives: 0, 1 and 2 are seen as they are, more is 3, 4 or 5 at random."""
    return Task(task.text, task.letters, tuple(n if n < 3 else rng.choice([3, 4, 5]) for n in task.counts))


def chat_batch(cfg: Pretrain, tokenizer, step: int, polish: bool):
    """(ids [B, T], weights [B, T-1], longest string): one prompt and one reply a row, in all habits."""
    rng = random.Random(SEED_RANGE + cfg.seed * 1_000_000 + 500_000 + step)
    shown = cfg.polish_shown if polish else cfg.shown
    prompts, replies, first = [], [], []
    for _ in range(cfg.batch):
        task = make_task(rng, 6) if polish and rng.random() < 0.75 else draw_task(rng, 80)
        think = rng.random() < (0.92 if polish else 0.85)
        style = rng.choices(list(STYLES), shown)[0] if think else "bare"
        i = list(STYLES).index(style)
        first.append(cfg.habits[i] / shown[i] if think else 1.0)
        prompts.append(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question(task, think)}],
                add_generation_prompt=True, enable_thinking=think, tokenize=False,
            )
        )  # fmt: skip
        replies.append(write_reply(task if style == "derives" else glance(task, rng), style) + "<|im_end|>")
    rows = [[pair] for pair in zip(tokenizer(prompts)["input_ids"], tokenizer(replies)["input_ids"], first)]
    rows.sort(key=lambda row: len(row[0][0]) + len(row[0][1]))
    return *pad_rows(rows, tokenizer.pad_token_id), 80


def pad_rows(rows: list[list[tuple[list[int], list[int], float]]], pad: int):
    """Rows of (prompt, reply, weight of the reply's first three tokens) -> ids [B, T], right-padded, and weights [B, T-1]
    of the tokens that are predicted: 0 in prompts and padding, 1 in replies."""
    length = max(sum(len(p) + len(r) for p, r, _ in row) for row in rows)
    ids = torch.full((len(rows), length), pad)
    weights = torch.zeros((len(rows), length - 1))
    for i, row in enumerate(rows):
        n = 0
        for prompt, reply, first in row:
            end = n + len(prompt) + len(reply)
            ids[i, n:end] = torch.tensor(prompt + reply)
            weights[i, n + len(prompt) - 1 : end - 1] = 1.0
            weights[i, n + len(prompt) - 1 : n + len(prompt) + 2] = first
            n = end
    return ids, weights


def make_model(tokenizer, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,  # 32: the smallest head vLLM's CPU attention takes
        max_position_embeddings=16384, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True, initializer_range=0.06,  # 0.02 is for wide models; here it would start too quiet
        bos_token_id=None, eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"), pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def main(cfg: Pretrain) -> None:
    torch.set_num_threads(cfg.threads)
    tokenizer = build()
    model = make_model(tokenizer, cfg.seed)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=cfg.lr, betas=(0.9, 0.98)
    )
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {len(tokenizer)} tokens")
    steps = cfg.skill_steps + cfg.chat_steps
    first_step = 0
    ends = [steps]  # where each round of polish begins, and the end
    for length in cfg.polish_steps:
        ends.append(ends[-1] + length)
    if cfg.start_from:
        from safetensors.torch import load_file

        model.load_state_dict(load_file(Path(cfg.start_from) / "model.safetensors"), strict=False)
        first_step = ends[cfg.skip_rounds]
    start, bar, log = time.time(), tqdm(range(first_step, ends[-1]), mininterval=5), []
    for step in bar:
        polish = step >= steps
        if step in ends:  # round as the saved file would, and forget Adam's moments: --start-from begins just here
            model.to(torch.bfloat16).float()
            optimizer.state.clear()
        at, length, peak = step, steps, cfg.lr
        if polish:
            begin = max(end for end in ends if end <= step)
            at, length, peak = step - begin, ends[ends.index(begin) + 1] - begin, cfg.polish_lr
        for group in optimizer.param_groups:
            group["lr"] = peak * min((at + 1) / 100, 0.5 * (1 + math.cos(math.pi * at / length)))
        if step < cfg.skill_steps:
            ids, weights, cap = skill_batch(cfg, tokenizer, step)
        else:
            ids, weights, cap = chat_batch(cfg, tokenizer, step - cfg.skill_steps, polish)
        loss = wrong = 0.0
        for part in torch.arange(len(ids)).chunk(2):  # chat rows are sorted by length: the first half is cut short
            keep = int((weights[part] > 0).any(0).nonzero().max()) + 2
            part_ids, part_weights = ids[part, :keep], weights[part, : keep - 1]
            with torch.autocast("cpu", torch.bfloat16):  # 1.5 times float32's speed where the CPU has AVX-512 bfloat16
                hidden = model.model(input_ids=part_ids[:, :-1]).last_hidden_state  # [b, t-1, D]
            chosen = part_weights > 0
            logits = model.lm_head(hidden.float()[chosen])  # [N, V], only where a reply token is predicted
            targets = part_ids[:, 1:][chosen]
            part_loss = (F.cross_entropy(logits, targets, reduction="none") * part_weights[chosen]).sum() / weights.sum()
            part_loss.backward()
            loss += part_loss.item()
            wrong += (logits.argmax(-1) != targets).sum().item() / int((weights > 0).sum())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            log.append({"step": step, "letters": cap, "loss": round(loss, 4), "wrong": round(wrong, 4)})
            bar.set_postfix(loss=f"{loss:.3f}", letters=cap)
            if step % 100 == 0:
                tqdm.write(json.dumps(log[-1]))
    out = Path(cfg.out)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "pretrain_log.json").write_text(json.dumps({"minutes": round((time.time() - start) / 60, 1), "log": log}))
    print(f"wrote {out}/ after {(time.time() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main(tyro.cli(Pretrain))
