"""How pico_base/ was made: a 0.9M-parameter Qwen3 from nothing, on two CPU cores, seeded.

    python -m lab.pretrain                # about 20 minutes; writes pico_base/

What the base has to be: a chat model that *can* do the right thing and mostly does not. Then RL has something
to find. It is trained on expert replies in three habits of different worth (env_letters.STYLES):

    bare      the answer at once: a guess, mostly wrong on 60 letters                       most of the time
    states    thinks, but the thinking only states the counts: the same guess, longer       often
    derives   spells the string with a running tally: right in 99% of the cases             in a minority

RL picks among habits far faster than it repairs a skill: a base whose tally was 57% right capped the whole
GRPO run near 66%, one at 92% capped it at 90%. So the skill is trained to the end and only its *frequency*
is kept low: training starts with `derives` alone and moves to the final shares late.

Two phases. `skill` packs tallies back to back with hardly any prompt, so that nearly every token teaches copying
and counting; strings grow from 12 to 80 letters. The loss stands still for some 350 steps, near what letters
cost when guessed, and then falls: the heads that find "what came after this, last time" have formed. `chat` wraps the same in
real prompts, brings in the other habits, and lets the learning rate decay to nothing, because a tally of 60 letters needs
every single token right. Chat prompts from the start did arrive as well, but the fall came after 750 steps of twice
the length: prompts are mostly words that teach nothing.
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
from env_letters import STYLES, Task, make_task, question, write_reply  # noqa: E402
from lab.tokenizer import build  # noqa: E402

SEED_RANGE = 3_000_000_000  # pretraining draws its tasks here; train, SFT and eval seeds lie elsewhere (train.py)


@dataclass
class Pretrain:
    out: str = "pico_base"  # folder to write, in Hugging Face format
    seed: int = 0
    skill_steps: int = 1300  # optimizer steps of the first phase, about 0.3 s each
    chat_steps: int = 1500  # and of the second, about 0.45 s each
    batch: int = 64  # replies a step (chat); the skill phase packs 32 rows of 256 to 320 tokens
    lr: float = 3e-3  # peak; linear warm-up over 100 steps, then cosine to zero over both phases
    mix: list[float] = field(default_factory=lambda: [0.60, 0.28, 0.12])  # final shares: bare, states, derives
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
    """(ids [32, T], mask [32, T-1], longest string): short spec, tally, short spec, tally, …, packed."""
    rng = random.Random(SEED_RANGE + cfg.seed * 1_000_000 + step)
    cap = round(12 + 68 * min(1.0, step / (0.85 * cfg.skill_steps)))
    length = 256 if cap < 50 else 320
    rows = []
    while len(rows) < 32:
        row = []
        while True:
            task = draw_task(rng, cap)
            prompt = tokenizer(f' {", ".join(task.letters)} in "{task.text}".\n')["input_ids"]
            reply = tokenizer(write_reply(task, "derives") + "<|im_end|>\n")["input_ids"]
            if sum(len(p) + len(r) for p, r in row) + len(prompt) + len(reply) > length:
                break
            row.append((prompt, reply))
        rows.append(row)
    return *pad_rows(rows, tokenizer.pad_token_id), cap


def chat_batch(cfg: Pretrain, tokenizer, step: int):
    """(ids [B, T], mask [B, T-1], longest string): one prompt and one reply a row, in the mix of habits."""
    rng = random.Random(SEED_RANGE + cfg.seed * 1_000_000 + 500_000 + step)
    # All derives at first; from 20% to 60% of the phase linearly to the final mix.
    far = min(1.0, max(0.0, (step / cfg.chat_steps - 0.2) / 0.4))
    mix = [(1 - far) * a + far * b for a, b in zip((0.05, 0.05, 0.9), cfg.mix)]
    texts = []
    for _ in range(cfg.batch):
        task = draw_task(rng, 80)
        think = rng.random() < 0.85
        style = rng.choices(list(STYLES), mix)[0] if think else "bare"
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question(task, think)}],
            add_generation_prompt=True, enable_thinking=think, tokenize=False,
        )  # fmt: skip
        texts.append((prompt, write_reply(task, style) + "<|im_end|>"))
    prompts = tokenizer([p for p, _ in texts])["input_ids"]
    replies = tokenizer([r for _, r in texts])["input_ids"]
    return *pad_rows([[pair] for pair in zip(prompts, replies)], tokenizer.pad_token_id), 80


def pad_rows(rows: list[list[tuple[list[int], list[int]]]], pad: int):
    """Rows of (prompt, reply) pairs -> ids [B, T], right-padded, and mask [B, T-1], True where a reply token is predicted."""
    length = max(sum(len(p) + len(r) for p, r in row) for row in rows)
    ids = torch.full((len(rows), length), pad)
    mask = torch.zeros((len(rows), length - 1), dtype=torch.bool)
    for i, row in enumerate(rows):
        n = 0
        for prompt, reply in row:
            ids[i, n : n + len(prompt) + len(reply)] = torch.tensor(prompt + reply)
            mask[i, n + len(prompt) - 1 : n + len(prompt) + len(reply) - 1] = True
            n += len(prompt) + len(reply)
    return ids, mask


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
    start, bar, log = time.time(), tqdm(range(steps), mininterval=5), []
    for step in bar:
        lr = cfg.lr * min((step + 1) / 100, 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        if step < cfg.skill_steps:
            ids, mask, cap = skill_batch(cfg, tokenizer, step)
        else:
            ids, mask, cap = chat_batch(cfg, tokenizer, step - cfg.skill_steps)
        with torch.autocast("cpu", torch.bfloat16):  # 1.5 times float32's speed where the CPU has AVX-512 bfloat16
            hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state  # [B, T-1, D]
        logits = model.lm_head(hidden.float()[mask])  # [N, V], only where a reply token is predicted
        loss = F.cross_entropy(logits, ids[:, 1:][mask])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == steps - 1:
            wrong = (logits.argmax(-1) != ids[:, 1:][mask]).float().mean().item()
            log.append({"step": step, "letters": cap, "loss": round(loss.item(), 4), "wrong": round(wrong, 4)})
            bar.set_postfix(loss=f"{loss.item():.3f}", letters=cap)
            if step % 100 == 0:
                tqdm.write(json.dumps(log[-1]))
    out = Path(cfg.out)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "pretrain_log.json").write_text(json.dumps({"minutes": round((time.time() - start) / 60, 1), "log": log}))
    print(f"wrote {out}/ after {(time.time() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main(tyro.cli(Pretrain))
