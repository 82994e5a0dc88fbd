"""How likely was each sampled token? The forward pass of training, fast and in little memory.

    ids [N, T] -> layers -> hidden [M, D] -> head -> logits [M, V] -> log-probs [M]
                  hidden_states              Head: never more than a chunk of them at once

M tokens were sampled. All others (prompts, what an environment says, padding) are only read.
policy.plain_logprobs computes the same in ten lines. These tricks are exact but for rounding:

    run a group's prompt once, its replies attend to it    rows are mostly prompt in letters
    run rows of similar length together                    less padding; on a CPU also few enough
                                                           at once for its caches
    logits for a chunk of tokens only                      0.8 GB (16,320 tokens, V 151,936)
    and their gradient at once, where the head is frozen   the head is run once and not twice

Run me: `python -m fast.logprobs` compares a group with the plain way.
"""

import math
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from policy import Policy, in_bfloat16

CHUNK = 1024  # tokens whose logits exist at once
LOGITS = 2**18  # but on a CPU no more than so many logits, 1 MB, or FEWEST tokens
FEWEST = 32
PIECE = 1024  # tokens in the layers at once on a CPU: 4,096 do not fit its caches, 1.3 times slower


# --------------------------------------------------------------------------------------- the layers


def hidden_states(lm: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The last hidden state at each position that predicts a masked token.

    ids [N, T], mask [N, T-1] -> [M, D], row after row. A group's rows begin with the same prompt.
    It is run once, and every row attends to its keys and values, through which the gradients of all
    rows flow back:

        prompt -> keys, values -> reply 1      the numbers of whole rows for less work: in letters
                               -> reply 2      the prompt is more than half of a row
                               -> …

    Rows of similar length go together, which saves padding, and tokens after a row's last masked
    one are not run.
    """
    trunk, (N, T), device = getattr(lm, lm.base_model_prefix), ids.shape, ids.device
    if not mask.any():
        return torch.zeros(0, lm.config.get_text_config().hidden_size, device=device)
    asked = F.pad(mask, (1, 0))  # [N, T]: is this token's log-prob asked for?
    number = asked.flatten().cumsum(0).view_as(asked)  # [N, T] how many were, up to here
    end = (asked * torch.arange(1, T + 1, device=device)).amax(1).tolist()  # after the last one
    rows_of: dict[tuple, list[int]] = {}  # {prompt, what comes before the first: its rows}
    for n, (row, length) in enumerate(zip(ids.tolist(), asked.int().argmax(1).tolist())):
        rows_of.setdefault(tuple(row[:length]), []).append(n)
    saved = sum(len(prompt) * (len(rows) - 1) for prompt, rows in rows_of.items())
    if saved < 0.1 * N * T or not shares_prompts(lm):
        rows_of = {(): list(range(N))}
    found, numbers = [], []
    for prompt, rows in rows_of.items():
        P = len(prompt)
        if P:
            read = trunk(input_ids=ids[rows[:1], :P], past_key_values=cache_of(lm), use_cache=True)
            keys = [(layer.keys, layer.values) for layer in read.past_key_values.layers]
        for piece in pieces([end[n] - P for n in rows], PIECE if device.type == "cpu" else 10**9):
            chosen = [rows[i] for i in piece]
            last = end[chosen[-1]]  # the longest row's; what it predicts is not run
            if last == 0:
                continue
            some = ids[chosen, P : last - 1]  # [n, R-1]
            if not P:
                hidden = trunk(input_ids=some, use_cache=False).last_hidden_state
                hidden = F.pad(hidden, (0, 0, 1, 0))  # nothing predicts the first token
            else:
                hidden = read.last_hidden_state[:, -1:].expand(len(chosen), -1, -1)
                if last - 1 > P:
                    cache = cache_of(lm, keys, len(chosen))
                    reply = trunk(input_ids=some, past_key_values=cache, use_cache=True)
                    hidden = torch.cat([hidden, reply.last_hidden_state], 1)
            here = asked[chosen, P:last]  # [n, R], as hidden [n, R, D]
            found.append(hidden[here])
            numbers.append(number[chosen, P:last][here])
    return torch.cat(found)[torch.cat(numbers).argsort()]


def cache_of(lm: torch.nn.Module, keys=(), n: int = 1):
    """transformers' cache that holds (keys, values) of each layer, [1, Hkv, P, d], for n rows."""
    from transformers import DynamicCache

    cache = DynamicCache(config=lm.config)
    for layer, pair in enumerate(keys):
        cache.update(*(x.expand(n, -1, -1, -1) for x in pair), layer)
    return cache


def pieces(widths: list[int], most: int) -> list[list[int]]:
    """Indices of rows, the short ones first, cut so that rows · widest <= most."""
    out: list[list[int]] = []
    for i in sorted(range(len(widths)), key=lambda i: widths[i]):
        if not out or (len(out[-1]) + 1) * widths[i] > most:
            out.append([])
        out[-1].append(i)
    return out


def shares_prompts(lm: torch.nn.Module) -> bool:
    """Can rows attend to a prompt that was run once?

    Not with sliding windows, nor with gradient checkpointing, which keeps no keys, nor if a token's
    angle depends on how long the text is.
    """
    checkpoints = lm.training and getattr(lm, "is_gradient_checkpointing", False)
    return not checkpoints and attends_to_all(lm.config) and not grows(lm.config)


def grows(config) -> bool:
    """Do RoPE's angles depend on how long the text is? Then no table is right for all lengths."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type") in ("dynamic", "longrope")


def attends_to_all(config) -> bool:
    """Does every layer attend to all that came before, without a window?"""
    if kinds := getattr(config, "layer_types", None):
        return all(kind == "full_attention" for kind in kinds)
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return hasattr(config, "num_attention_heads") and not window


# ----------------------------------------------------------------------------------------- the head


def token_logprobs(policy: Policy, ids, mask, temperature: float = 1.0, chunk: int | None = None):
    """Log-prob of every masked token given those before it, and the entropy of its choice.

    ids   [N, T] int64, right-padded. Attention is causal and padding comes last, so it needs no
          mask.
    mask  [N, T-1] bool: mask[:, t] asks for token t+1, which position t predicts (causal shift):

              position   0    1    2    3
              token      <u>  how  many <a>
              predicts   how  many <a>  ...

    Returns logprobs, entropies: [M] float32, M = mask.sum(), row after row; nats, at `temperature`.
    Gradients flow through the log-probs only; policy.plain_logprobs has them for both.

    The logits of all positions at once, N·T·V floats, are the commonest out-of-memory of RL code (V
    is 151,936 for Qwen3). So the layers run once, and only masked positions go on to the head,
    `chunk` at a time (None: CHUNK).
    """
    lm, cuda = policy.lm, ids.device.type == "cuda"
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=in_bfloat16(ids.device)):
        hidden, targets = hidden_states(lm, ids, mask), ids[:, 1:][mask]  # [M, D], [M]
    head = lm.get_output_embeddings()
    cap = getattr(lm.config, "final_logit_softcapping", None)  # Gemma 2 and 3
    if chunk is None:
        chunk = CHUNK if cuda else max(FEWEST, min(CHUNK, LOGITS // head.weight.shape[0]))
    hidden = hidden.to(head.weight.dtype)
    heat = temperature / logit_scale(lm)
    return Head.apply(hidden, head.weight, head.bias, targets, heat, cap, chunk)


SCALES: WeakKeyDictionary = WeakKeyDictionary()  # {model: logit_scale}


@torch.no_grad()
def logit_scale(lm: torch.nn.Module) -> float:
    """What a model multiplies its head's outputs by: Granite, Cohere, Falcon-H1.

    Each has another name for it, so it is measured, once. ValueError if it does something else
    with them.
    """
    if lm not in SCALES:
        head, cap = lm.get_output_embeddings(), getattr(lm.config, "final_logit_softcapping", None)
        outputs: list[torch.Tensor] = []
        hook = head.register_forward_hook(lambda module, given, out: outputs.append(out))
        ids = (torch.arange(1, 9, device=head.weight.device) * 37 % len(head.weight))[None]
        logits = lm(input_ids=ids, use_cache=False).logits.float()
        hook.remove()
        own = outputs[-1].float()
        own = cap * torch.tanh(own / cap) if cap else own
        scale = float((own * logits).sum() / (own * own).sum())
        if (scale * own - logits).abs().max() > 0.05 * logits.abs().max():
            raise ValueError("this model's logits are not its head's times a number: take --plain")
        SCALES[lm] = 1.0 if abs(scale - 1) < 1e-3 else scale  # rounding is not a scale
    return SCALES[lm]


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x in place, by way of 2^x.

    On a CPU torch's exp takes four times as long, and where its result is below 1e-38 a hundred
    times.
    """
    return x.mul_(math.log2(math.e)).exp2_()


class Head(torch.autograd.Function):
    """Hidden states [M, D] -> log-probs and entropies [M] of the targets, `chunk` tokens at a time.

    With p = softmax(logits / temperature), the gradient of log p[target] to the logits is
    (1[target] - p) / temperature. If the head is frozen, as with LoRA, forward takes it on to the
    hidden states at once, while the logits are there: a direction [D] per token, which backward
    only has to multiply by a number. Else forward keeps only log Σ exp, and backward computes the
    logits again.

    Two tensors [chunk, V] exist at once. Autograd with a checkpoint per chunk takes six, and 11 GB
    instead of 0.7 for 16,320 tokens and V = 151,936, since glibc's heap does not fill the holes
    that they leave.
    """

    @staticmethod
    def logits(ctx, hidden, weight, bias) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The logits of C tokens over temperature, [C, V] float32.

        If they are capped, also the cap's derivative [C, V].
        """
        z, slope = F.linear(hidden, weight, bias).float(), None
        if ctx.cap:  # cap · tanh(z / cap)
            z.div_(ctx.cap).tanh_()
            slope = 1 - z**2
            z.mul_(ctx.cap)
        return z.div_(ctx.temperature), slope

    @staticmethod
    def to_logits(ctx, p, targets, slope) -> torch.Tensor:
        """The gradient of log p[target] to the logits before cap and temperature, in place of p."""
        up = p.neg_().scatter_add_(1, targets[:, None], torch.ones_like(p[:, :1]))
        return up.div_(ctx.temperature) if slope is None else up.mul_(slope).div_(ctx.temperature)

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature: float, cap: float | None, chunk):
        ctx.temperature, ctx.cap, ctx.chunk = temperature, cap, chunk
        M = len(targets)
        logprobs, entropies, totals = (torch.empty(M, device=hidden.device) for _ in range(3))
        needs_hidden, *learns = ctx.needs_input_grad[:3]
        ctx.once = needs_hidden and not any(learns)
        directions = torch.empty_like(hidden) if ctx.once else None
        for first in range(0, M, chunk):
            some = slice(first, first + chunk)
            z, slope = Head.logits(ctx, hidden[some], weight, bias)
            most = z.amax(-1, keepdim=True)
            p = exp(z - most)
            sums = p.sum(-1, keepdim=True)
            totals[some] = sums.log().add_(most)[:, 0]
            logprobs[some] = z.gather(-1, targets[some, None])[:, 0] - totals[some]
            p_z = z.mul_(p.div_(sums)).sum(-1)  # [C], Σ p z
            entropies[some] = totals[some] - p_z  # -Σ p log p = log Σ exp - Σ p z
            if ctx.once:
                up = Head.to_logits(ctx, p, targets[some], slope)
                directions[some] = up.to(weight.dtype) @ weight
            p = up = None  # or the next chunk's would stand beside them
        if ctx.once:
            ctx.save_for_backward(directions)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, totals)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        if ctx.once:
            (directions,) = ctx.saved_tensors
            return (grad[:, None] * directions).to(directions.dtype), *[None] * 6
        hidden, weight, bias, targets, totals = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        to_weight = torch.zeros_like(weight) if needs_weight else None
        to_bias = torch.zeros_like(bias) if needs_bias else None
        for first in range(0, len(targets), ctx.chunk):
            some = slice(first, first + ctx.chunk)
            z, slope = Head.logits(ctx, hidden[some], weight, bias)
            p = exp(z.sub_(totals[some, None]))
            up = Head.to_logits(ctx, p, targets[some], slope).mul_(grad[some, None])
            up = up.to(weight.dtype)
            if needs_hidden:
                to_hidden[some] = up @ weight
            if needs_weight:
                to_weight.addmm_(up.t(), hidden[some])
            if needs_bias:
                to_bias += up.sum(0)
        return to_hidden, to_weight, to_bias, None, None, None, None


if __name__ == "__main__":
    from policy import PICO, load_policy, plain_logprobs

    policy = load_policy(str(PICO), lora_rank=32, lora_alpha=64)
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(11, 1024, (8, 184), generator=rng)  # [k, T] eight replies of 64 tokens …
    ids[:, :120] = ids[0, :120]  # … to one prompt of 120
    mask = torch.arange(183).expand(8, -1) >= 119
    weights, found = list(policy.trainable().values()), []
    for how in (plain_logprobs, token_logprobs):
        logprobs, _ = how(policy, ids, mask)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(logprobs.sum(), weights)])
        found.append((logprobs.detach(), gradient))
    (a, ga), (b, gb) = found
    gap, gradient_gap = (a - b).abs().max(), (ga - gb).abs().max() / ga.abs().max()
    print(f"{len(b)} sampled tokens of {ids.numel()}; eight prompts of 120 tokens are run as one")
    print(f"log-probs differ by at most {gap:.0e}, gradients by {gradient_gap:.0e} of the largest")
    assert gap < 1e-4 and gradient_gap < 1e-4
