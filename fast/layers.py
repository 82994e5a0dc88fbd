"""Our own forward pass for the Llama/Qwen family: the sampler and, on a CPU, the trainer run it.

    x [T, D] -> norm -> q, k, v -> RoPE -> attend -> o ->(+ x)-> norm -> gate, up -> down ->(+ x)->

T tokens of any rows are run as one tensor [T, D]. q, k and v are one product, gate and up another,
and LoRA is folded into a copy of the weights, which sampler and trainer share. The caller passes
two functions: `attend` knows which tokens see each other, and `product` multiplies.

On a CPU that multiplies bfloat16 in hardware, the products can be in it (--dtype). Residual sums,
norms, RoPE and attention stay in float32 then, as do log-probs and LoRA's own weights.

Models differ in a hundred details, and this file knows four families. The others are run as they
are. Before a run, bookkeeping/pretrained.py compares sampling and training with one plain pass of
the model. Training SmolLM2 takes 0.8 of the time that it takes with the model (docs/hardware.md).

Shapes: D channels, Hq query heads and Hkv key heads of d channels each.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from policy import Policy, rope_switch

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose layers these are


def attends_to_all(config) -> bool:
    """Does every layer attend to all earlier tokens, at angles that ignore the text's length?"""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    return kinds == {DynamicLayer} and rope_switch(config) is None


def are_known(config) -> bool:
    """Are these the layers of this file? Then the length of a text changes nothing in them."""
    family = config.model_type in FAMILIES and config.hidden_act == "silu"
    return family and attends_to_all(config)


def copied(weight: torch.Tensor) -> torch.Tensor:
    """The weight as it is now: one that learns is copied, so no later step changes it."""
    return weight.clone() if weight.requires_grad else weight


def layers_of(lm: torch.nn.Module, dtype: torch.dtype) -> Iterator[dict]:
    """The parts of each layer, as they are now: norms as weights, and what reads the same x as one.

    dtype: of the linear layers. Norms keep that of the model.
    """
    for layer in lm.base_model.layers:
        a, m = layer.self_attn, layer.mlp
        w = {
            "norm1": copied(layer.input_layernorm.weight),
            "qkv": joined((a.q_proj, a.k_proj, a.v_proj), dtype),
            "qk_norm": None,
            "o": joined((a.o_proj,), dtype),
            "norm2": copied(layer.post_attention_layernorm.weight),
            "gate_up": joined((m.gate_proj, m.up_proj), dtype),
            "down": joined((m.down_proj,), dtype),
        }
        if hasattr(a, "q_norm"):  # Qwen3 normalises queries and keys; both go through together
            n_q, n_kv = lm.config.num_attention_heads, lm.config.num_key_value_heads
            q_norm = a.q_norm.weight.expand(n_q, -1)
            w["qk_norm"] = torch.cat([q_norm, a.k_norm.weight.expand(n_kv, -1)])  # [Hq+Hkv, d]
        yield w


def rms_norm(config, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, config.rms_norm_eps)


def forward(
    config, layers: list[dict], x: torch.Tensor, angles: tuple, attend: Callable, product: Callable
) -> torch.Tensor:
    """Embeddings x [T, D] -> hidden states [T, D], before the last norm.

    layers: of folded_layers. angles: those of rope_angles at the positions of x, [T, 1, d] each.
    attend(layer, q [T, Hq, d], k [T, Hkv, d], v) -> [T, Hq·d]. product(x, Linears) -> [T, out].
    """
    n_qk = config.num_attention_heads + config.num_key_value_heads
    cos, sin = angles
    d = cos.shape[-1]
    for n, w in enumerate(layers):
        heads = product(rms_norm(config, x, w["norm1"]), w["qkv"]).view(len(x), -1, d)
        qk, v = heads.to(x.dtype).split([n_qk, heads.shape[1] - n_qk], 1)
        if w["qk_norm"] is not None:
            qk = rms_norm(config, qk, None) * w["qk_norm"]
        # RoPE (Su et al. 2021, §3.4) rotates the channels i and i + d/2 of a head together.
        qk = torch.addcmul(qk * cos, qk.roll(d // 2, -1), sin)
        out = attend(n, *qk.split([config.num_attention_heads, config.num_key_value_heads], 1), v)
        x = x + product(out, w["o"])
        gate, up = product(rms_norm(config, x, w["norm2"]), w["gate_up"]).chunk(2, -1)
        x = x + product(F.silu(gate) * up, w["down"])
    return x


def rope_angles(
    lm: torch.nn.Module, length: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of RoPE at each position, [length, 1, d], in the dtype and place of `like`.

    The first half of the sines is negative, so that x · cos + roll(x) · sin rotates.
    """
    everywhere = torch.arange(length, device=like.device)[None]
    cos, sin = lm.base_model.rotary_emb(like, everywhere)  # [1, length, d] each
    cos, sin = cos[0, :, None], sin[0, :, None].clone()
    sin[..., : sin.shape[-1] // 2].neg_()
    return cos, sin


# --------------------------------------------------------------------------------- linear layers


class Linears(NamedTuple):
    """Several linear layers as one; LoRA is folded in: W' = W + s · B A."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]
    parts: tuple  # the layers themselves
    packed: torch.Tensor | None = None  # the weight again, in oneDNN's own order


def joined(linears: tuple, dtype: torch.dtype) -> Linears:
    """Linear layers that read the same x -> one, whose products are in this dtype.

    In memory its weight stands transposed: for few rows, oneDNN is 1.2 to 1.6 times as fast.
    """
    bias = torch.cat([x.bias for x in linears]).to(dtype) if linears[0].bias is not None else None
    weight = torch.cat([folded(x, dtype) for x in linears])
    if packs(weight):
        return Linears(weight, bias, linears, torch.ops.mkldnn._reorder_linear_weight(weight, 64))
    return Linears(weight.t().contiguous().t(), bias, linears)


def packs(weight: torch.Tensor) -> bool:
    """Does oneDNN multiply bfloat16 here? Then a frozen weight is kept in its own order, too.

    A step of the sampler has few rows, and putting [3072, 576] in order each time took half as long
    as multiplying 64 rows by it: 308 GFLOP/s instead of 213 (two cores of an EPYC, by hand).
    """
    known = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and known()


def folded(linear: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out, in] that a linear layer computes with, its LoRA included."""
    changes = [linear.get_delta_weight(name) for name in getattr(linear, "active_adapters", ())]
    return sum(changes, linear.weight).to(dtype)


def products_dtype(policy: Policy) -> torch.dtype:
    """What linear layers multiply in: on a CPU maybe bfloat16, while the model is float32."""
    narrow = policy.bfloat16 and policy.device.type == "cpu"
    return torch.bfloat16 if narrow else policy.lm.dtype


# {model: (copies of the trainable weights, its layers with these)}
KEPT: WeakKeyDictionary = WeakKeyDictionary()


@torch.no_grad()
def folded_layers(lm: torch.nn.Module, dtype: torch.dtype) -> list[dict]:
    """layers_of with the current weights, LoRA folded in; whatever is frozen is shared.

    On a CPU, if only LoRA learns, they are kept until a trainable weight has changed: sampler and
    trainer need one copy, and make it once per update. Comparing the weights takes 5 ms for
    SmolLM2, and also notices writes to `p.data`.
    """
    if lm.device.type != "cpu" or not only_lora_learns(lm):
        return list(layers_of(lm, dtype))
    now = [p for p in lm.parameters() if p.requires_grad]
    before, layers = KEPT.pop(lm, ([], []))
    same = layers and layers[0]["o"].weight.dtype == dtype and len(now) == len(before)
    if not (same and all(map(torch.equal, now, before))):
        del layers  # its memory first
        before, layers = [p.clone() for p in now], list(layers_of(lm, dtype))
    KEPT[lm] = before, layers
    return layers


def only_lora_learns(lm: torch.nn.Module) -> bool:
    """Does LoRA learn, and nothing else? (policy.lora_config puts it on every linear layer.)"""
    learn = [name for name, p in lm.named_parameters() if p.requires_grad]
    return learn != [] and all("lora_" in name for name in learn)


def product(x: torch.Tensor, w: Linears) -> torch.Tensor:
    """x [T, in] -> [T, out], in the dtype of the weight."""
    x = x.to(w.weight.dtype)
    if w.packed is not None:
        return torch.ops.mkldnn._linear_pointwise(x, w.packed, w.bias, "none", [], "")
    return F.linear(x, w.weight, w.bias)


class LoraProduct(torch.autograd.Function):
    """`product`, with gradients for x and for LoRA; W itself is frozen.

    Written as x Wᵀ + s · (x Aᵀ) Bᵀ, LoRA takes two more products forward and four backward, and two
    sums over [T, out]. Here it takes one forward and three backward, and the sums are in W'. Where
    products are in bfloat16, autograd returns the gradients in float32, as x and LoRA are.
    """

    @staticmethod
    def forward(ctx, x, w: Linears, scales: list, *pairs):
        """pairs: A [r, in] and B [out, r] of the first part, then of the next one, …"""
        ctx.weight, ctx.scales = w.weight, scales
        x = x.to(w.weight.dtype)
        pairs = [weight.to(x.dtype) for weight in pairs]
        inside = [F.linear(x, A).mul_(s) for s, A in zip(scales, pairs[::2])]  # s · x Aᵀ, [T, r]
        ctx.save_for_backward(x, *inside, *pairs)
        return product(x, w)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        n, (x, *saved) = len(ctx.scales), ctx.saved_tensors
        inside, Bs = saved[:n], saved[n + 1 :: 2]
        found = []
        for g, xa, B, s in zip(grad.split([len(B) for B in Bs], 1), inside, Bs, ctx.scales):
            behind = (g @ B).mul_(s)  # [T, r]: the gradient of x Aᵀ
            found += [behind.t() @ x, g.t() @ xa]
        return grad @ ctx.weight if ctx.needs_input_grad[0] else None, None, None, *found


def lora_product(x: torch.Tensor, w: Linears) -> torch.Tensor:
    """`product` by LoRA layers that learn."""
    names = [(m, *m.active_adapters) for m in w.parts]
    pairs = [(m.lora_A[name].weight, m.lora_B[name].weight) for m, name in names]
    return LoraProduct.apply(x, w, [m.scaling[name] for m, name in names], *sum(pairs, ()))


# ------------------------------------------------------------------------------------- the trainer


def by_our_layers(
    lm, prompts: torch.Tensor, ids: torch.Tensor, prompt_of: torch.Tensor, read, dtype
):
    """Hidden states of rows that go on after prompts; gradients go to LoRA alone.

    dtype: of the products. Other arguments and results are those of
    logprobs.by_the_model. New prompts run together with the rows that read them: [G·P + n·S, D].
    """
    (G, P), (n, S) = prompts.shape, ids.shape
    new = prompts if read is None else prompts[:0]  # [G, P], or none that were read before
    tokens = torch.cat([new.flatten(), ids.flatten()])
    positions = torch.cat([torch.arange(P).repeat(len(new)), torch.arange(P, P + S).repeat(n)])
    keys = [] if read is None else read[1]  # [L] of the prompts' keys and values
    angles = [x[positions] for x in rope_angles(lm, P + S, lm.base_model.norm.weight)]
    sizes = [new.numel(), n * S]
    of_rows = lambda x: x.expand(n, *x.shape[1:]) if G == 1 else x.index_select(0, prompt_of)
    group = lm.config.num_attention_heads // lm.config.num_key_value_heads
    mask, prompt_mask = causal_mask(S, P + S, group), causal_mask(P, P, group)

    def attend(layer, q, k, v):
        (prompt_q, q), (prompt_k, k), (prompt_v, v) = (x.split(sizes) for x in (q, k, v))
        k, v = by_head(k, n), by_head(v, n)
        out = []
        if new.numel():
            keys.append((by_head(prompt_k, G), by_head(prompt_v, G)))
            out.append(attended(prompt_q, *keys[layer], prompt_mask, written_out(P)))
        if P:
            k, v = (torch.cat([of_rows(x), y], 2) for x, y in zip(keys[layer], (k, v)))
        return torch.cat([*out, attended(q, k, v, mask, written_out(P + S))])

    x = F.embedding(tokens, lm.base_model.embed_tokens.weight)
    x = forward(lm.config, folded_layers(lm, dtype), x, angles, attend, lora_product)
    x = rms_norm(lm.config, x, lm.base_model.norm.weight)
    prompt, rows = x.split(sizes)
    if read is None:
        read = prompt.view(G, P, x.shape[1])[:, -1:], keys  # without a prompt: [G, 0, D]
    return torch.cat([of_rows(read[0]), rows.view(n, S, x.shape[1])], 1), read


def by_head(x: torch.Tensor, n: int) -> torch.Tensor:
    """[n·S, H, d] -> [n, H, S, d]."""
    return x.view(n, len(x) // n, *x.shape[1:]).transpose(1, 2)


def causal_mask(S: int, E: int, group: int) -> torch.Tensor:
    """What is added to the scores of the last S tokens among E: -inf for tokens that come later.

    Returns [S·group, E]: queries that share a head of keys become more queries of that head.
    """
    return torch.full((S, E), -torch.inf).triu(E - S + 1).repeat_interleave(group, 0)


def attended(q, k, v, mask: torch.Tensor, written: bool = False) -> torch.Tensor:
    """Attention of the last S tokens to all E: q [n·S, Hq, d], k, v [n, Hkv, E, d] -> [n·S, Hq·d].

    mask [S·group, E] is added to the scores: with it, enable_gqa leaves a card only the kernel that
    writes out all scores. So the queries that share a head of keys become more queries of that
    head; no keys are copied. written: as two products and a softmax.
    """
    (n, n_kv, _, d), S, group = k.shape, len(q) // len(k), q.shape[1] // k.shape[1]
    q = q.reshape(n, S, n_kv, group, d).transpose(1, 2).flatten(2, 3)  # [n, Hkv, S·group, d]
    if written:
        out = ((q * d**-0.5) @ k.mT).add_(mask).softmax(-1) @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask)
    return out.view(n, n_kv, S, group, d).transpose(1, 2).reshape(n * S, n_kv * group * d)


def written_out(keys: int) -> bool:
    """Is attention to so many tokens written out? (fast/logprobs.py says why: `attention`.)"""
    most = 256 if torch.is_grad_enabled() else 512
    return torch.get_float32_matmul_precision() == "medium" and keys <= most  # medium: oneDNN
