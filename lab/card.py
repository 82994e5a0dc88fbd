"""On a card: is by_rows right and fast there, do CUDA and the CPU agree, what does a 4B take?

OUT=FOLDER python -m lab.card [head_check] [pico] [smol] [smol_update] [big]
"""
# ruff: noqa: B023, F821

import json
import os
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import checkpoint

import fast.logprobs as FL
import grpo
from fast import machine
from fast.sampler import TorchSampler
from lab.speed import SEEDS, new_env, tossed
from policy import PICO, SMOLLM2, adam, load_policy, logprobs_and_entropy, plain_logprobs
from rollout import play
from settings import Config

OUT = Path(os.environ.get("OUT", "/tmp/out"))
OUT.mkdir(exist_ok=True)
CUDA = torch.cuda.is_available()
DEV = "cuda" if CUDA else "cpu"
found = {"machine": torch.cuda.get_device_name() if CUDA else "cpu", "torch": torch.__version__}


def note(**k):
    found.update(k)
    (OUT / "card.json").write_text(json.dumps(found, indent=1))
    print(k, flush=True)


def sync():
    if CUDA:
        torch.cuda.synchronize()


def clocked(act):
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    sync()
    t = time.perf_counter()
    r = act()
    sync()
    return r, {
        "seconds": time.perf_counter() - t,
        "gib": torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0,
    }


# the former head: all logits of a chunk, again in the backward pass
def former(head, n, scale, hidden, targets):
    def again(hidden, targets):
        return logprobs_and_entropy(
            torch.nn.functional.linear(hidden, head).float() * scale, targets
        )

    return checkpoint(again, hidden, targets, use_reentrant=False)


ours = FL.by_rows


def head_check():
    rows = []
    for D, V, C, dtype in (
        (576, 49152, 512, torch.float32),
        (2560, 151936, 512, torch.float32),
        (2560, 151936, 512, torch.bfloat16),
    ):
        torch.manual_seed(0)
        head = torch.randn(V, D, device=DEV) * (0.02 if D > 1000 else 0.04)
        h = torch.randn(C, D, device=DEV) * 3
        head, h = head.to(dtype), h.to(dtype)
        t = torch.randint(V, (C,), device=DEV)
        t[: C // 2] = (h.float() @ head.float().T).argmax(-1)[: C // 2]  # likely tokens too
        h64 = h.double().requires_grad_()
        lp64, en64 = logprobs_and_entropy(h64 @ head.double().T, t)
        (g64,) = torch.autograd.grad(lp64.sum(), h64)
        row = {"D": D, "V": V, "C": C, "dtype": str(dtype)}
        for name, way in (("by_rows", ours), ("former", former)):
            x = h.clone().requires_grad_()
            act = lambda: (lambda out: (out, torch.autograd.grad(out[0].sum(), x)[0]))(
                way(head, V, 1.0, x, t)
            )
            act()
            times = []
            for _ in range(5):
                (out, g), c = clocked(act)
                times.append(c["seconds"])
            rel = (g.double() - g64).norm(dim=1) / g64.norm(dim=1)
            row[name] = {
                "ms": sorted(times)[2] * 1e3,
                "gib": c["gib"],
                "logprob_max_error": (out[0].double() - lp64).abs().max().item(),
                "entropy_max_error": (out[1].double() - en64).abs().max().item(),
                "grad_median_error": rel.median().item(),
                "grad_max_error": rel.max().item(),
            }
        rows.append(row)
        del head, h, h64, lp64, en64, g64
    note(head=rows)


def agree(model):
    """CPU and card: the same groups, log-probs, gradients."""
    grads, lps = {}, {}
    policies = {d: load_policy(str(model), 32, 64, d) for d in dict.fromkeys(["cpu", DEV])}
    groups = None
    for d, policy in policies.items():
        sampler = TorchSampler(policy)
        seeds = [SEEDS + i for i in range(2)]
        mine = play(policy, sampler, new_env, seeds, 4, 48, 1.0, 0)
        if groups is None:
            groups = mine
        toks = lambda gs: [e.token_ids for g in gs for e in g]
        same = sum(a == b for a, b in zip(toks(mine), toks(groups)))
        es = [e for g in groups for e in g]
        T = max(len(e.token_ids) for e in es)
        ids = torch.zeros(len(es), T, dtype=torch.long)
        mask = torch.zeros(len(es), T - 1, dtype=torch.bool)
        for n, e in enumerate(es):
            ids[n, : len(e.token_ids)] = torch.tensor(e.token_ids)
            mask[n, : len(e.token_ids) - 1] = torch.tensor(e.sampled[1:])
        ids, mask = ids.to(d), mask.to(d)
        w = list(policy.trainable().values())
        for q in w:
            q.data.add_(0)
        for name, way in (("plain", plain_logprobs), ("ours", FL.token_logprobs)):
            lp, en = way(policy, ids, mask)
            g = torch.autograd.grad(lp.sum(), w)
            lps[d, name] = lp.detach().cpu()
            grads[d, name] = parameters_to_vector(g).cpu()
        lps[d, "same_replies"] = same
    top = grads["cpu", "plain"].abs().max()
    note(
        **{
            f"agree_{model.name}": {
                "same_replies_of_8": lps[DEV, "same_replies"],
                "logprobs_card_plain_vs_cpu_plain": (lps[DEV, "plain"] - lps["cpu", "plain"])
                .abs()
                .max()
                .item(),
                "logprobs_card_ours_vs_card_plain": (lps[DEV, "ours"] - lps[DEV, "plain"])
                .abs()
                .max()
                .item(),
                "grads_card_plain_vs_cpu_plain": (
                    (grads[DEV, "plain"] - grads["cpu", "plain"]).abs().max() / top
                ).item(),
                "grads_card_ours_vs_cpu_plain": (
                    (grads[DEV, "ours"] - grads["cpu", "plain"]).abs().max() / top
                ).item(),
                "grads_cpu_ours_vs_cpu_plain": (
                    (grads["cpu", "ours"] - grads["cpu", "plain"]).abs().max() / top
                ).item(),
            }
        }
    )


def smol_update():
    """64 replies of 64 tokens, three updates by either head."""
    policy = load_policy(str(SMOLLM2), 32, 64, DEV)
    from dataclasses import replace

    policy = replace(policy, stop_ids=frozenset([-1]))
    sampler, optimizer = TorchSampler(policy), adam(policy, 1e-12)
    cfg = Config(importance="clip", max_tokens=64, micro_tokens=8192)
    rows = []
    for step in range(7):
        FL.by_rows = former if step % 2 == 0 else ours
        sampler.sync(step)
        seeds = [SEEDS + step * 4 + i for i in range(4)]
        groups, s = clocked(partial(play, policy, sampler, new_env, seeds, 16, 64, 1.0, step))
        with sampler.asleep(), policy.learning():
            (stats), t = clocked(
                partial(grpo.update, policy, optimizer, groups, tossed(4, 16), cfg)
            )
        rows.append(
            {
                "head": "former" if step % 2 == 0 else "ours",
                "sampling": s,
                "training": t,
                "mismatch": stats["mismatch"],
            }
        )
    FL.by_rows = ours
    note(smollm2_updates=rows)


SHAPE = dict(
    hidden_size=2560,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=9728,
    vocab_size=151_936,
    tie_word_embeddings=True,
    max_position_embeddings=40_960,
)
if not CUDA:
    SHAPE.update(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=64,
    )


def big():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with tempfile.TemporaryDirectory(dir="/dev/shm") as room:
        folder = Path(room) / "model"
        shutil.copytree(PICO, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        config = Qwen3Config(**SHAPE, eos_token_id=2, pad_token_id=0, dtype=torch.bfloat16)
        with torch.device(DEV):
            Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        policy = load_policy(str(folder), 32, 64, DEV)
    from dataclasses import replace

    policy = replace(policy, stop_ids=frozenset([-1]))
    sampler, optimizer = TorchSampler(policy), adam(policy, 1e-12)
    seeds = [SEEDS + i for i in range(4)]
    longest = 256 if CUDA else 8
    rows = []
    for n in (1, 4):
        groups, s = clocked(partial(play, policy, sampler, new_env, seeds[:n], 16, longest, 1.0, 0))
        rows.append(
            {
                "tasks": n,
                "k": 16,
                "longest": longest,
                "sampling": s,
                "tokens": sum(sum(e.sampled) for g in groups for e in g),
                "all_tokens": sum(len(e.token_ids) for g in groups for e in g),
            }
        )
        note(big_sampling=rows)
    trained = []
    for more, n, heads in (
        ({}, 4, (former, ours, former, ours, former, ours)),
        ({"micro_tokens": 4096}, 4, (ours, ours)),
        ({"gradient_checkpointing": True}, 4, (former, ours, former, ours)),
    ):
        cfg = Config(importance="clip", max_tokens=longest, k=16, **{"micro_tokens": 8192} | more)
        if cfg.gradient_checkpointing:
            machine.checkpoint_activations(policy)
        for head in heads:
            FL.by_rows = head
            with sampler.asleep(), policy.learning():
                stats, line = clocked(
                    partial(grpo.update, policy, optimizer, groups[:n], tossed(n, 16), cfg)
                )
            trained.append(
                {
                    "head": head.__name__,
                    "settings": more,
                    "tasks": n,
                    **line,
                    "tokens": stats["trained_tokens"],
                    "mismatch": stats["mismatch"],
                }
            )
            note(big_training=trained)
    FL.by_rows = ours


for name in sys.argv[1:] or ["head_check", "pico", "smol", "smol_update", "big"]:
    try:
        {
            "head_check": head_check,
            "pico": lambda: agree(PICO),
            "smol": lambda: agree(SMOLLM2),
            "smol_update": smol_update,
            "big": big,
        }[name]()
    except Exception as e:
        import traceback

        traceback.print_exc()
        note(**{f"error_{name}": repr(e)[:500]})
