"""Will it fit? The memory of a run on one GPU, from first principles, into results/bench/memory.md and memory.json.

    python -m lab.speed.memory             # seconds on one core; no GPU is needed, because everything is computed

A GPU holds two kinds of things. What stays: weights, the adapter, its gradients and AdamW's moments, the sampler's own copy of the weights.
What comes and goes: the activations of a micro-batch, the logits of a chunk, the KV cache. The first is a count of parameters, counted on
models built on the meta device, which have shapes and no memory. The second is a formula per token, read off the forward pass that
policy.py makes on a GPU: bfloat16 autocast, over frozen bfloat16 weights with float32 LoRA or over float32 weights that all learn.
tests/test_memory.py counts what autograd really keeps of small models, and does not let formula and count drift apart.

Nothing of this has been measured on a card yet. `python -m lab.speed.card --only update` does, into results/card/update.json; a row that is
measured there with the settings of its default shows those numbers, and is marked *measured*. GiB are 2^30 bytes.
"""

import inspect
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import torch

from fast.logprobs import CHUNK
from fast.plan import longest
from fast.sampler import TorchSampler
from fast.vllm_engine import LONGEST
from lab.common import RESULTS, read_json, table, write_json, write_page
from policy import attach_lora
from settings import BATCHES, LONG_BATCHES, PRESETS, Config, by_size

OUT = RESULTS / "bench"
LARGE = by_size(4e9, "letters")
GIB = 2**30

# The shapes, from each model's public config.json. 0.6B, 1.7B and 4B use one matrix as embedding and as head.
QWEN3 = dict(vocab_size=151936, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)
EXPERTS = QWEN3 | dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, num_key_value_heads=4,
                       tie_word_embeddings=False)  # fmt: skip
MODELS = {
    "Qwen3-0.6B": QWEN3 | dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "Qwen3-1.7B": QWEN3 | dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16),
    "Qwen3-4B": QWEN3 | dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "Qwen3-30B-A3B": EXPERTS | dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32),
}
CARDS = {"A100 80 GB": 79.1, "16 GB": 15.7, "H200 141 GB": 139.7}  # usable GiB, as torch reports them; Ampere or newer (flash attention)

# Assumptions: nothing here can count these.
CONTEXT = 0.6 * GIB  # the CUDA context
FRAGMENTS = 0.08  # of what comes and goes, lost between blocks
GRAPHS = 1.0 * GIB  # vLLM's CUDA graphs; they stay on the card while it sleeps
VLLM_TOKENS = {"A100 80 GB": 8192, "16 GB": 8192, "H200 141 GB": 16384}  # its max_num_batched_tokens, for which it keeps room
PROMPT = 192  # tokens of a letters prompt; the longest of 200 has 146 in pico_base's tokens

MAX_ROWS = inspect.signature(TorchSampler).parameters["max_rows"].default


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters."""

    weights: int  # all of the model, LoRA not counted
    lora: int
    linear: int  # of the matrices in the layers, which autocast copies to bfloat16 when they are float32


@dataclass(frozen=True)
class Setting:
    model: str
    card: str
    rank: int = Config.lora_rank
    engine: str = "vllm"
    share: float = Config.vllm_memory
    max_tokens: int = LARGE["max_tokens"]
    num_tasks: int = BATCHES["num_tasks"]
    k: int = LARGE["k"]
    eval_n: int = BATCHES["eval_n"]
    micro_tokens: int = LARGE["micro_tokens"]
    checkpointing: bool = Config.gradient_checkpointing
    ahead: bool = False  # --async-rollouts: a second process samples on the same card


@dataclass(frozen=True)
class Plan:
    setting: Setting
    phases: dict[str, float]  # bytes on the card at the peak of each phase
    parts: dict[str, float]  # bytes of what they are made of
    host: float  # bytes of main memory
    cache_tokens: int  # that the KV cache holds
    why: list[str]  # what does not fit; empty where everything does


# ---------------------------------------------------------------------------------------------- parameters
def build(config: dict, rank: int, dtype: torch.dtype = torch.float32):
    """A model with random weights, of which those learn that policy.load_policy would let learn (a test compares)."""
    import transformers as t

    kind = (t.Qwen3MoeConfig, t.Qwen3MoeForCausalLM) if "num_experts" in config else (t.Qwen3Config, t.Qwen3ForCausalLM)
    lm = kind[1](kind[0](**config)).to(dtype).requires_grad_(rank == 0)
    return attach_lora(lm, rank, 2 * rank) if rank else lm


def count(config: dict, rank: int) -> Sizes:
    with torch.device("meta"):
        named = list(build(config, rank).named_parameters())
    own = [(name, p) for name, p in named if "lora_" not in name]
    linear = sum(p.numel() for name, p in own if ".layers." in name and p.ndim == 2)
    return Sizes(sum(p.numel() for _, p in own), sum(p.numel() for name, p in named if "lora_" in name), linear)


sizes = lru_cache(lambda model, rank: count(MODELS[model], rank))


# ---------------------------------------------------------------------------------------------- activations
def layer_bytes(c: dict, rank: int) -> dict[str, int]:
    """What autograd keeps of one layer, bytes a token. SDPA keeps no [T, T]. Autocast makes a copy for each matrix that an input meets."""
    D, Q, K = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    heads, full = c["num_attention_heads"] + c["num_key_value_heads"], rank == 0
    parts = {
        "two norms": 2 * (4 * D + 4 + 4 * D * full),  # the input in float32, 1/rms; where the gain learns, the normed input too
        "inputs of q, k, v": 3 * 2 * D,
        "norms of q and k": 4 * (Q + K) + 4 * heads + 2 * (Q + K) * full,
        "attention": 2 * (Q + 2 * K + Q) + 4 * c["num_attention_heads"],  # q, k, v, the output; logsumexp
        "input of o": 0 if full else 2 * Q,  # LoRA makes a copy of the attention's output
        "LoRA": 4 * 2 * rank,  # A x of q, k, v, o
    }
    if "num_experts" not in c:
        F = c["intermediate_size"]
        return parts | {"MLP": 2 * 2 * D + 3 * 2 * F + 2 * F + 3 * 2 * rank}  # inputs of gate, up; gate, silu(gate), up; input of down
    E, k, F = c["num_experts"], c["num_experts_per_tok"], c["moe_intermediate_size"]
    # The softmax; of the k chosen int64 indices and places, weights, gate and up, silu(gate), output. Frozen matrices need no inputs kept.
    return parts | {"router": 4 * E + 38 * k + 4, "experts": k * 2 * (D + 3 * F)}


def kept(c: dict, z: Sizes, rank: int, tokens: int, checkpointing: bool) -> tuple[float, float]:
    """Bytes that autograd keeps after the forward pass over `tokens` tokens, all of them trained; and those of one layer alone."""
    D, L, full = c["hidden_size"], c["num_hidden_layers"], rank == 0
    layer = tokens * sum(layer_bytes(c, rank).values()) + 2 * (z.linear if full else z.lora) / L  # bfloat16 copies of float32 matrices
    stream = (4 if full else 2) * D  # a layer's input: the residual stream
    outside = 4 * D + 4 + stream * (1 + full) + 9 + 8 * full  # last norm, trained positions for the head, token ids
    return tokens * outside + L * (tokens * stream if checkpointing else layer), layer


def activations(c: dict, z: Sizes, rank: int, tokens: int, checkpointing: bool, chunk: int = CHUNK) -> float:
    """Bytes at the peak of one forward and backward pass over `tokens` tokens; gradients of the weights stand elsewhere."""
    D, F, V, k = c["hidden_size"], c["intermediate_size"], c["vocab_size"], c.get("num_experts_per_tok", 0)
    saved, layer = kept(c, z, rank, tokens, checkpointing)
    logits, end = 4 * min(chunk, tokens) * V, 0  # of one chunk, whatever the length, float32 [chunk, V]
    head = 2 * logits  # forward they have company: their exp
    # Alive at the busiest moment and not kept, as measured by the tests.
    if k:  # at the last layer's experts, when the last norm is free: their k outputs, as weighed and as summed, and its own gradient
        busy = tokens * (6 * k + 2) * D
    elif rank:  # in the MLP: down's input, also as float32
        busy = tokens * (4 * D + 6 * F)
    else:  # at the last norm, or in an MLP when the last norm is free; all the time the gradient of the head, which is the embedding's too
        head, end = max(head, logits + 4 * V * D), 12 * V * D  # … which in the end stands beside that of the embedding and their sum
        busy = 4 * V * D + tokens * (4 * F - 12 * D if checkpointing else max(12 * D, 4 * F - 8 * D))
    if not checkpointing:
        return max(saved + max(busy, head), end)
    forward = 2 * z.linear * (rank == 0) + tokens * (4 * D + 6 * F)  # autocast keeps its copies until the forward pass ends
    return max(saved + max(forward, head, layer + busy), end)


# ---------------------------------------------------------------------------------------------- the plan of a run
def own_sampler(s: Setting, token: int, free: float) -> list[tuple[float, int]]:
    """(bytes while it samples, its copy of the weights not counted; tokens that its rows see, a shared prompt once a row), in the
    evaluation and then in the rollout. token: bytes of a token's keys and values. Where it runs out of memory, TorchSampler tries half as
    many prompts, and stays there."""
    c, row, most, found = MODELS[s.model], PROMPT + s.max_tokens, MAX_ROWS, []

    def needed(groups: int, k: int) -> float:
        cache = token * groups * (PROMPT + k * s.max_tokens)  # made whole at once, so it never doubles; a prompt's own only once
        # Logits, log-probs, their exp and its sum; or, when weights are copied, one matrix folded in float32.
        draw = max(16 * groups * k * c["vocab_size"], 12 * c["intermediate_size"] * c["hidden_size"])
        return (1 + FRAGMENTS) * (cache + draw)

    for prompts, k in ((s.eval_n, 1), (s.num_tasks, s.k)):
        groups = min(prompts, max(1, most // k))
        while needed(groups, k) > free and groups > 1:
            groups = (groups + 1) // 2
            most = groups * k
        found.append((needed(groups, k), groups * k * row))
    return found


def plan(s: Setting) -> Plan:
    c, z, card = MODELS[s.model], sizes(s.model, s.rank), CARDS[s.card] * GIB
    b = 2 if s.rank else 4  # bytes a weight: policy.load_policy
    weights, adapter, learn = b * z.weights, 4 * z.lora, z.lora if s.rank else z.weights
    gradients, moments = 4 * learn, 8 * learn  # in float32, as all that learns
    held = CONTEXT + weights + adapter
    row, kv = PROMPT + s.max_tokens, 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"]  # tokens; numbers a token
    host, why = weights, []  # the model is loaded there first
    # The sampler: what it takes while it samples, in rollout and evaluation; and what stays of it on the card while the trainer works.
    if s.engine == "torch":
        assert "num_experts" not in c, "FastDecoder knows no experts"
        copy, idle, held = weights, 0, held + weights
        (evaluation, _), (rollout, cache_tokens) = own_sampler(s, b * kv, card - held - moments)
    else:
        wide, slots = c["intermediate_size"], z.lora
        if "num_experts" in c:  # vLLM makes room for LoRA on the experts too, used or not
            wide = c["num_experts_per_tok"] * c["moe_intermediate_size"]
            slots += s.rank * c["num_hidden_layers"] * c["num_experts"] * 3 * (c["hidden_size"] + c["moe_intermediate_size"])
        copy, idle = 2 * z.weights + 2 * slots, GRAPHS
        # Room that vLLM keeps for activations (6 bytes a wide number, 8 a narrow one) and for the logits of 256 rows.
        room = VLLM_TOKENS[s.card] * (6 * wide + 8 * c["hidden_size"]) + 16 * 256 * c["vocab_size"] + GRAPHS
        cache_tokens = max(0, int((s.share * card - copy - room) / (2 * kv)))
        if cache_tokens < max(LONGEST, row):
            why = [f"vLLM does not start (no room for {max(LONGEST, row):,} tokens)"]
        rollout = evaluation = s.share * card
        host = max(host, copy + 2 * adapter)  # asleep: its weights; and two adapters on their way, in /dev/shm

    tokens = max(row, s.micro_tokens)
    work = lambda checkpointing: (1 + FRAGMENTS) * activations(c, z, s.rank, tokens, checkpointing)
    phases = {  # gradients are dropped when an update ends; SFT has the same, with shorter episodes, and drops its moments
        "rollout": held + moments + rollout,
        "evaluation": held + moments + evaluation,
        "update": held + moments + gradients + idle + work(s.checkpointing),
    }
    if s.ahead:  # nothing is lent: while one trains, the other holds a model of its own, and what it samples in
        at_once = phases["update"] - idle + CONTEXT + weights + adapter + rollout
        phases = dict.fromkeys(phases, at_once)
    parts = {
        "context": CONTEXT, "weights": weights, "LoRA": adapter, "gradients": gradients, "moments": moments, "sampler's weights": copy,
        "KV cache": (b if s.engine == "torch" else 2) * kv * cache_tokens, "activations": work(False), "… checkpointed": work(True),
    }  # fmt: skip
    return Plan(s, phases, parts, host, cache_tokens, [name for name, size in phases.items() if size > card] + why)


def mend(s: Setting) -> Plan | None:
    """The first plan that fits. What costs the experiment least is tried first, and so stands last here."""
    tries = {
        "share": [s.share, 0.25, 0.2, 0.15, 0.35, 0.4, 0.45, 0.5, 0.55] if s.engine == "vllm" else [s.share],
        "checkpointing": [False, True],
        "micro_tokens": [s.micro_tokens >> i for i in range(6)],
    }
    plans = (plan(replace(s, **dict(zip(tries, values)))) for values in product(*tries.values()))
    return next((p for p in plans if not p.why), None)


def flags(s: Setting) -> str:
    """Where a setting differs from the defaults, as it is typed."""
    default, names = Setting(s.model, s.card), {"rank": "lora-rank", "share": "vllm-memory", "micro_tokens": "micro-tokens"}
    text = [f" --{flag} {getattr(s, name)}" for name, flag in names.items() if getattr(s, name) != getattr(default, name)]
    return f"`--engine {s.engine}{''.join(text)}{' --gradient-checkpointing' * s.checkpointing}{' --async-rollouts 1' * s.ahead}`"


# ---------------------------------------------------------------------------------------------- the table
def published(preset: str) -> Setting:
    """The row of a preset of settings.py: its conversations as long as they can get."""
    p = PRESETS[preset]
    return Setting(
        p["model"].removeprefix("Qwen/").removesuffix("-Instruct-2507"), "A100 80 GB", p["lora_rank"],
        share=p.get("vllm_memory", Config.vllm_memory),
        max_tokens=longest(p["env"], p["max_tokens"]) - PROMPT, num_tasks=p["num_tasks"], k=p["k"],
        eval_n=(LONG_BATCHES if p["env"] == "swarm" else BATCHES)["eval_n"], checkpointing=p.get("gradient_checkpointing", False),
    )  # fmt: skip


ASKED = {
    "4b-lora": Setting("Qwen3-4B", "A100 80 GB"),
    "4b-lora-torch": Setting("Qwen3-4B", "A100 80 GB", engine="torch"),
    "4b-full": Setting("Qwen3-4B", "A100 80 GB", rank=0),
    "4b-full-torch": Setting("Qwen3-4B", "A100 80 GB", rank=0, engine="torch"),
    "4b-swarm": Setting("Qwen3-4B", "A100 80 GB", max_tokens=longest("swarm") - PROMPT, num_tasks=4, eval_n=128),
    "4b-swarm-published": published("swarm-published"),
    "4b-alphabet-published": published("alphabet-published"),
    "4b-ahead": Setting("Qwen3-4B", "A100 80 GB", ahead=True),
    "30b-lora-a100": Setting("Qwen3-30B-A3B", "A100 80 GB"),
    "30b-lora-h200": Setting("Qwen3-30B-A3B", "H200 141 GB"),
    "0.6b-lora": Setting("Qwen3-0.6B", "16 GB", engine="torch"),
    "1.7b-lora": Setting("Qwen3-1.7B", "16 GB", engine="torch"),
}


def cases() -> dict[str, Plan | None]:
    """The defaults of each case and, where they do not fit, the first settings that do (None: no settings do)."""
    plans = {}
    for name, setting in ASKED.items():
        plans[f"{name}-default"] = plan(setting)
        if plans[f"{name}-default"].why:
            plans[f"{name}-fits"] = mend(setting)
    return plans


def rows(plans: dict[str, Plan | None], measured: dict) -> list[str]:
    cells = []
    for key, p in plans.items():
        s = p.setting if p else ASKED[key.removesuffix("-fits")]
        row = [key, f"{s.model}, " + (f"LoRA {s.rank}" if s.rank else "all weights"), s.card]
        if p:
            w, g, m = (f"{p.parts[name] / GIB:.1f}" for name in ("weights", "gradients", "moments"))
            row += [flags(s), f"{w} ({'bfloat16' if s.rank else 'float32'}) + {g} + {m}"]
            shown = measured.get(key) or {name: size / GIB for name, size in p.phases.items()}
            row += [f"{shown[name]:.1f}" for name in p.phases]
            row += ["*measured*" if key in measured else "*computed*", f"{p.cache_tokens / (PROMPT + s.max_tokens):.0f}"]
            row += [f"{p.host / GIB:.0f}", "no: " + ", ".join(p.why) if p.why else "**yes**"]
        else:
            row += ["none of those tried", *[""] * 7, "**no**"]
        cells.append(row)
    head = (
        "| row | model | card | settings | weights + gradients + moments | rollout | evaluation | update |  | rows at once | "
        "main memory | fits |"
    )
    return table(head, cells)


def page(plans: dict[str, Plan | None], measured: dict) -> str:
    names = list(next(iter(plans.values())).parts)
    made_of = []
    for key, p in plans.items():
        if p:
            z = sizes(p.setting.model, p.setting.rank)
            counts = [f"{z.weights / 1e9:.2f} B", f"{z.lora / 1e6:.0f} M", f"{p.cache_tokens:,}"]
            made_of.append([key, *counts, *(f"{size / GIB:.1f}" for size in p.parts.values())])
    return "\n".join([
        "# The memory of a run on one GPU", "",
        "`python -m lab.speed.memory`; how it is computed and what is assumed stands in lab/speed/memory.py. All sizes in GiB, 2^30 bytes.",
        "",
        f"Letters, thinking allowed: prompts of {PROMPT} tokens, replies of up to 2,048, {BATCHES['num_tasks']} tasks x {LARGE['k']} "
        "samples, unless a row says otherwise.",
        "*4b-swarm-published*, *4b-alphabet-published*: the presets of settings.py, conversations as long as they can get.",
        f"*4b-swarm*: conversations of up to {longest('swarm'):,} tokens, {LONG_BATCHES['num_tasks']} tasks x {LARGE['k']} samples; "
        "one of them alone exceeds --micro-tokens.",
        "*4b-ahead*: several cards with vLLM, each with a trainer and a second process; both work at the same time.",
        "*update*: forward and backward of a micro-batch; SFT takes less. *rows at once*: replies of full length in the KV cache.",
        "*main memory*: while the model loads or vLLM sleeps, whichever is more; the process itself takes some 4 beside it.", "",
        *rows(plans, measured), "",
        f"Assumed: a CUDA context of {CONTEXT / GIB:.1f}, {FRAGMENTS:.0%} of what comes and goes lost to fragmentation,",
        f"{GRAPHS / GIB:.0f} for vLLM's CUDA graphs; usable are {', '.join(f'{size} of {card}' for card, size in CARDS.items())}.", "",
        "What it is made of; activations: those of the update with the logits of one chunk, without and with gradient checkpointing:", "",
        *table(["row", "parameters", "of LoRA", "tokens of KV", *names], made_of), "",
    ])  # fmt: skip


def on_a_card(file: Path = RESULTS / "card" / "update.json") -> dict[str, dict[str, float]]:
    """{row: GiB at the peak of each phase}, as far as a card was asked (lab/speed/card.py)."""
    found = read_json(file) if file.exists() else {}
    return {f"{name}-default": found[name]["peak_gib"] for name in ASKED.keys() & found.keys()
            if len(found[name].get("peak_gib", {})) == 3 and not found[name]["checkpointing"]}  # fmt: skip


def main() -> None:
    measured = on_a_card()
    plans = cases()
    text = page(plans, measured)
    write_page(OUT / "memory.md", [text])
    found = {key: p and {**asdict(p), "measured_gib": measured.get(key)} for key, p in plans.items()}
    write_json(OUT / "memory.json", {"command": "python -m lab.speed.memory", "rows": found})
    print(text)


if __name__ == "__main__":
    main()
