"""How likely was each sampled token? The forward pass of training, fast and in little memory.

    ids [N, T] -> layers -> hidden [M, D] -> head -> logits [M, V] -> log-probs [M]
                  hidden_states              Head: never more than a chunk of them at once

M tokens were sampled. All others (prompts, what an environment says, padding) are only read.
policy.plain_logprobs computes the same in ten lines. These tricks are exact but for rounding:

    run a group's prompt once, its replies attend to it   0.77 of the time (pico_base, 64 episodes)
    run rows in pieces that fit a CPU's caches            both: 0.37 of the time (1 thread)
    layers of our own on a CPU (fast/trunk.py)            0.5 to 0.9 of what that leaves
    logits for a chunk of tokens only                     0.8 GB (16,320 tokens, V 151,936)
    and their gradient at once, where the head is frozen  0.97; 0.57 (V 151,936)

`python -m lab.speed.bench train` has today's time and memory; the shares above were measured once,
each against the file without it.

Run me: `python -m fast.logprobs` compares a group with the plain way, in numbers and time.
"""

import math
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from fast.products import product
from fast.trunk import trunk_of
from policy import Policy, in_bfloat16

CHUNK = 1024  # tokens whose logits exist at once
LOGITS = 2**18  # but on a CPU no more than so many logits, 1 MB, or FEWEST tokens
FEWEST = 32
PIECE = 1024  # tokens in the layers at once on a CPU: 4,096 do not fit its caches, 1.3 times slower


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
    if device.type == "cpu" and shares_prompts(lm) and (own := trunk_of(lm)):
        return own.hidden_states(ids, mask)
    begin = mask.int().argmax(1) + 1  # [N] what comes before the first masked token is the prompt
    prompts = [tuple(row[:n]) for row, n in zip(ids.tolist(), begin.tolist())]
    place = {prompt: g for g, prompt in enumerate(dict.fromkeys(prompts))}
    saved = sum(map(len, prompts)) - sum(map(len, place))  # tokens that need not be run
    shared = saved > 0.1 * N * T and shares_prompts(lm)
    if shared:
        seen, first, keys = run_prompts(lm, list(place), device)
        which = torch.tensor([place[prompt] for prompt in prompts], device=device)  # [N]
    else:
        begin = torch.zeros_like(begin)  # nothing has been run yet
    rest = torch.arange(T - int(begin.min()), device=device)
    at = begin[:, None] + rest  # [N, R] the positions that are left to run
    # [N, R] is the log-prob of the token there asked for? And how many were, up to here?
    wanted = (at > 0) & (at < T) & mask.gather(1, at.clamp(1, T - 1) - 1)
    number = wanted.flatten().cumsum(0).view_as(wanted)
    widths = (wanted * torch.arange(1, wanted.shape[1] + 1, device=device)).amax(1)  # [N]
    found, numbers = [], []
    for some in pieces(widths.tolist(), PIECE if device.type == "cpu" else 10**9):
        rows, width = torch.tensor(some, device=device), int(widths[some[-1]])
        if width == 0:
            continue
        where = at[rows, : width - 1].clamp(max=T - 1)  # [n, width-1]: the last predicts nothing
        if shared:
            of = which[rows]  # [n]
            hidden = first[of]  # [n, 1, D] predicts a row's first sampled token
            if width > 1:
                known = torch.cat([seen[of], torch.ones_like(where, dtype=torch.bool)], 1)
                reply = trunk(
                    input_ids=ids[rows].gather(1, where),
                    position_ids=where,
                    attention_mask=known.long(),  # [n, P+width-1]
                    past_key_values=cache_of(lm, [(k[of], v[of]) for k, v in keys]),
                    use_cache=True,
                )
                hidden = torch.cat([hidden, reply.last_hidden_state], 1)  # [n, width, D]
        else:
            hidden = trunk(input_ids=ids[rows, : width - 1], use_cache=False).last_hidden_state
            hidden = F.pad(hidden, (0, 0, 1, 0))  # [n, width, D] nothing predicts the first token
        found.append(hidden[wanted[rows, :width]])
        numbers.append(number[rows, :width][wanted[rows, :width]])
    return torch.cat(found)[torch.cat(numbers).argsort()]


def run_prompts(lm: torch.nn.Module, prompts: list[tuple[int, ...]], device):
    """Run each prompt once, padded on the left, so that all end at the same place.

    Returns what is no padding [G, P] bool, the last hidden state [G, 1, D], and for every layer its
    keys and values, each [G, Hkv, P, d].
    """
    P = max(map(len, prompts))
    pad = torch.tensor([P - len(prompt) for prompt in prompts], device=device)[:, None]  # [G, 1]
    padded = [[0] * (P - len(prompt)) + list(prompt) for prompt in prompts]
    place, cache = torch.arange(P, device=device), cache_of(lm, [])
    out = getattr(lm, lm.base_model_prefix)(
        input_ids=torch.tensor(padded, device=device),  # [G, P]
        attention_mask=(place >= pad).long(),
        position_ids=(place - pad).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
    )
    keys = [(layer.keys, layer.values) for layer in cache.layers]
    return place >= pad, out.last_hidden_state[:, -1:], keys


def cache_of(lm: torch.nn.Module, keys: list):
    """transformers' cache with one (keys, values) per layer, each [n, Hkv, P, d]; [] is empty."""
    from transformers import DynamicCache

    cache = DynamicCache(config=lm.config)
    for layer, (k, v) in enumerate(keys):
        cache.update(k, v, layer)
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
    windows = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    return hasattr(config, "num_attention_heads") and not windows


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
    """What a model multiplies its head's outputs by: Granite, Cohere, Falcon-H1. Each has another
    name for it, so it is measured, once. ValueError if it does something else with them."""
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
    """e^x in place. On a CPU by way of 2^x: torch's exp takes four times as long, and where its
    result is below 1e-38 a hundred times."""
    return x.mul_(math.log2(math.e)).exp2_()


class Head(torch.autograd.Function):
    """Hidden states [M, D] -> log-probs and entropies [M] of the targets, `chunk` tokens at a time.

    With p = softmax(logits / temperature), the gradient of log p[target] to the logits is
    (1[target] - p) / temperature. On a CPU whose head is frozen, as with LoRA, forward takes it on
    to the hidden states at once, while the logits are there: a direction [D] per token, which
    backward only has to multiply by a number. Else forward keeps only log Σ exp, and backward
    computes the logits again. (A card would need 0.3 GB more, and nobody has measured it there.)

    Two tensors [chunk, V] exist at once. Autograd with a checkpoint per chunk takes six, and 11 GB
    instead of 0.7 for 16,320 tokens and V = 151,936, since glibc's heap does not fill the holes
    that they leave.
    """

    @staticmethod
    def room(chunk: int, V: int, device) -> torch.Tensor | None:
        """The buffer; oneDNN brings its own."""
        return None if device.type == "cpu" else torch.empty(chunk, V, device=device)

    @staticmethod
    def logits(ctx, some: slice, hidden, weight, bias) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The logits of C tokens over temperature, [C, V] float32, in the buffer.

        If they are capped, also the cap's derivative [C, V].
        """
        if ctx.buffer is None:
            z = product(hidden[some], weight).float()
        else:
            z = ctx.buffer[: len(hidden[some])]
            if weight.dtype == torch.float32:
                torch.mm(hidden[some], weight.t(), out=z)
            else:
                z.copy_(hidden[some] @ weight.t())
        if bias is not None:
            z.add_(bias)
        slope = None
        if ctx.cap:  # cap · tanh(z / cap)
            z.div_(ctx.cap).tanh_()
            slope = 1 - z**2
            z.mul_(ctx.cap)
        return z.div_(ctx.temperature), slope

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, targets, temperature: float, cap: float | None, chunk: int
    ):
        M, V = len(targets), len(weight)
        ctx.temperature, ctx.cap, ctx.chunk = temperature, cap, chunk
        ctx.buffer = Head.room(min(chunk, M), V, hidden.device)
        logprobs, entropies, totals = (torch.empty(M, device=hidden.device) for _ in range(3))
        needs_hidden, *learns = ctx.needs_input_grad[:3]
        ctx.once = needs_hidden and not any(learns) and ctx.buffer is None
        directions = torch.empty_like(hidden) if ctx.once else None
        for first in range(0, M, chunk):
            some = slice(first, first + chunk)
            z, slope = Head.logits(ctx, some, hidden, weight, bias)
            most = z.amax(-1, keepdim=True)
            p = exp(z - most)
            sums = p.sum(-1, keepdim=True)
            totals[some] = sums.log().add_(most)[:, 0]
            logprobs[some] = z.gather(-1, targets[some, None])[:, 0] - totals[some]
            p_z = z.mul_(p.div_(sums)).sum(-1)  # [C], Σ p z
            entropies[some] = totals[some] - p_z  # -Σ p log p = log Σ exp - Σ p z
            if ctx.once:
                p = Head.to_logits(ctx, p, targets[some], slope).to(weight.dtype)
                directions[some] = product(p, weight.t())
            p = None  # or the next chunk's would stand beside it
        if ctx.once:
            ctx.save_for_backward(directions)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, totals)
        ctx.mark_non_differentiable(entropies)
        ctx.buffer = None
        return logprobs, entropies

    @staticmethod
    def to_logits(ctx, p, targets, slope) -> torch.Tensor:
        """The gradient of log p[target] to the logits before cap and temperature, in place of p."""
        up = p.neg_().scatter_add_(1, targets[:, None], torch.ones_like(p[:, :1]))
        return up.div_(ctx.temperature) if slope is None else up.mul_(slope).div_(ctx.temperature)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        if ctx.once:
            (directions,) = ctx.saved_tensors
            return (grad[:, None] * directions).to(directions.dtype), *[None] * 6
        hidden, weight, bias, targets, totals = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        ctx.buffer = Head.room(min(ctx.chunk, len(targets)), len(weight), hidden.device)
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        to_weight = torch.zeros_like(weight) if needs_weight else None
        to_bias = torch.zeros_like(bias) if needs_bias else None
        for first in range(0, len(targets), ctx.chunk):
            some = slice(first, first + ctx.chunk)
            z, slope = Head.logits(ctx, some, hidden, weight, bias)
            p = exp(z.sub_(totals[some, None]))
            up = Head.to_logits(ctx, p, targets[some], slope).mul_(grad[some, None])
            up = up.to(weight.dtype)
            if needs_hidden:
                to_hidden[some] = product(up, weight.t())
            if needs_weight:
                to_weight.addmm_(up.t(), hidden[some])
            if needs_bias:
                to_bias += up.sum(0)
        ctx.buffer = None
        return to_hidden, to_weight, to_bias, None, None, None, None


if __name__ == "__main__":
    import time

    from policy import PICO, load_policy, plain_logprobs

    policy = load_policy(str(PICO), lora_rank=32, lora_alpha=64)
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(11, 1024, (8, 184), generator=rng)  # [k, T] eight replies of 64 tokens …
    ids[:, :120] = ids[0, :120]  # … to one prompt of 120
    mask = torch.zeros(8, 183, dtype=torch.bool)
    mask[:, 119:] = True
    weights, found = list(policy.trainable().values()), {}
    for how in (plain_logprobs, token_logprobs) * 3:
        started = time.perf_counter()
        logprobs, _ = how(policy, ids, mask)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(logprobs.sum(), weights)])
        found[how] = logprobs.detach(), gradient, time.perf_counter() - started
    (a, ga, slow), (b, gb, fast) = found[plain_logprobs], found[token_logprobs]
    gap, gradient_gap = (a - b).abs().max(), (ga - gb).abs().max() / ga.abs().max()
    print(f"{len(b)} sampled tokens of {ids.numel()}; eight prompts of 120 tokens are run as one")
    print(f"log-probs differ by at most {gap:.0e}, gradients by {gradient_gap:.0e} of the largest")
    print(f"forward and backward: {1000 * slow:.0f} ms plain, {1000 * fast:.0f} ms fast")
    assert gap < 1e-4 and gradient_gap < 1e-4
