"""How likely did the policy find each token that was sampled? The forward pass of training, fast and in little memory.

    ids [N, T] -> the layers -> hidden [M, D] -> the head -> logits [M, V] -> log-probs [M]
                  hidden_states               Head: never more than a chunk of them at once

M tokens were sampled; all others (prompts, what an environment says, padding) are read and asked nothing. Three tricks, each exact but for rounding:

    a group's prompt is run once, and its k replies attend to it      an update on 64 episodes of pico_base takes 0.77 of the time
    rows go through the layers in pieces that fit a CPU's caches      and with both of them 0.37 (1 thread)
    logits exist for a chunk of tokens only, forward and backward     0.6 GB instead of 11 for 16,320 tokens and a vocabulary of 151,936

`python -m lab.speed.bench train` measures them. Dropped: keeping pico_base's few logits instead of computing them twice (2%); packing rows end to end
under a block mask, which a CPU pays for in attention what it saves in padding (computed, not run).

Run me: `python -m fast.logprobs` compares a group with the plain way, in numbers and time.
"""

import torch
import torch.nn.functional as F

from policy import Policy

CHUNK = 1024  # tokens whose logits exist at once, on a card; on a CPU fewer where the vocabulary is large:
LOGITS = 2**22  # 16 MB
PIECE = 1024  # tokens of rows that go through the layers at once on a CPU: more do not fit its caches (4,096 of them: 1.3 times as slow)


def hidden_states(lm: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The last hidden state at each position that predicts a masked token: ids [N, T], mask [N, T-1] -> [M, D], in row order.

    A group's rows begin with the same prompt. It is run once, and every row attends to its keys and values, through which the gradients of
    all rows flow back:

        prompt -> keys, values  ->  reply 1        the numbers of whole rows, for less work:
                                ->  reply 2        of a row of letters the prompt is more than half
                                ->  …

    Rows of similar length go together, so there is little padding, and tokens after a row's last masked one are not run.
    """
    trunk, (N, T), device = getattr(lm, lm.base_model_prefix), ids.shape, ids.device
    if not mask.any():
        return torch.zeros(0, lm.config.get_text_config().hidden_size, device=device)
    begin = mask.int().argmax(1) + 1  # [N] a row's prompt is what comes before its first masked token
    prompts = [tuple(row[:n]) for row, n in zip(ids.tolist(), begin.tolist())]
    place = {prompt: g for g, prompt in enumerate(dict.fromkeys(prompts))}
    shared = sum(map(len, prompts)) - sum(map(len, place)) > 0.1 * N * T and shares_prompts(lm)
    if shared:
        seen, first, keys = run_prompts(lm, list(place), device)
        which = torch.tensor([place[prompt] for prompt in prompts], device=device)  # [N]
    else:
        begin = torch.zeros_like(begin)  # nothing has been run yet
    at = begin[:, None] + torch.arange(T - int(begin.min()), device=device)  # [N, R] the places that are left to run
    wanted = (at > 0) & (at < T) & mask.gather(1, at.clamp(1, T - 1) - 1)  # [N, R] a token whose log-prob is asked for
    number = wanted.flatten().cumsum(0).view_as(wanted)  # [N, R] how many of them there are up to here, in row order
    widths = (wanted * torch.arange(1, wanted.shape[1] + 1, device=device)).amax(1)  # [N]
    found, numbers = [], []
    for some in pieces(widths.tolist(), PIECE if device.type == "cpu" else 10**9):
        rows, width = torch.tensor(some, device=device), int(widths[some[-1]])
        if width == 0:
            continue
        where = at[rows, : width - 1].clamp(max=T - 1)  # [n, width-1]: the last token predicts nothing
        if shared:
            hidden = first[which[rows]]  # [n, 1, D] what the prompt says about the first token
            if width > 1:
                cache = cache_of(lm, [(k[which[rows]], v[which[rows]]) for k, v in keys])
                attend = torch.cat([seen[which[rows]], torch.ones_like(where, dtype=torch.bool)], 1)  # [n, P+width-1]
                rest = trunk(
                    input_ids=ids[rows].gather(1, where),
                    position_ids=where,
                    attention_mask=attend.long(),
                    past_key_values=cache,
                    use_cache=True,
                )
                hidden = torch.cat([hidden, rest.last_hidden_state], 1)  # [n, width, D]
        else:
            hidden = trunk(input_ids=ids[rows, : width - 1], use_cache=False).last_hidden_state
            hidden = F.pad(hidden, (0, 0, 1, 0))  # [n, width, D] nothing predicts the very first token
        found.append(hidden[wanted[rows, :width]])
        numbers.append(number[rows, :width][wanted[rows, :width]])
    return torch.cat(found)[torch.cat(numbers).argsort()]


def run_prompts(lm: torch.nn.Module, prompts: list[tuple[int, ...]], device) -> tuple[torch.Tensor, torch.Tensor, list]:
    """Run each prompt once, padded on the left, so that all end at the same place.

    Returns what is no padding [G, P] bool, the last hidden state [G, 1, D], and every layer's keys and values, each [G, Hkv, P, d].
    """
    P = max(map(len, prompts))
    pad = torch.tensor([P - len(prompt) for prompt in prompts], device=device)[:, None]  # [G, 1]
    ids = torch.tensor([[0] * (P - len(prompt)) + list(prompt) for prompt in prompts], device=device)  # [G, P]
    place, cache = torch.arange(P, device=device), cache_of(lm, [])
    out = getattr(lm, lm.base_model_prefix)(
        input_ids=ids, attention_mask=(place >= pad).long(), position_ids=(place - pad).clamp(min=0), past_key_values=cache, use_cache=True
    )
    return place >= pad, out.last_hidden_state[:, -1:], [(layer.keys, layer.values) for layer in cache.layers]


def cache_of(lm: torch.nn.Module, keys: list):
    """transformers' cache, holding these: one (keys, values) a layer, each [n, Hkv, P, d]; [] is an empty one."""
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
    """Can rows attend to the keys of a prompt that was run once? Not with sliding windows, nor with gradient checkpointing, which keeps no keys."""
    checkpoints = lm.training and getattr(lm, "is_gradient_checkpointing", False)
    return not checkpoints and attends_to_all(lm.config)


def attends_to_all(config) -> bool:
    """Does every layer attend to all that came before, without a window?"""
    if kinds := getattr(config, "layer_types", None):
        return all(kind == "full_attention" for kind in kinds)
    return hasattr(config, "num_attention_heads") and not (
        getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    )


def token_logprobs(
    policy: Policy, ids: torch.Tensor, mask: torch.Tensor, temperature: float = 1.0, chunk: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of every masked token given those before it, and the entropy it was drawn from.

    ids   [N, T] int64, right-padded. Attention is causal and the padding comes last, so no mask is needed.
    mask  [N, T-1] bool: mask[:, t] asks for token t+1, the one that position t predicts (the causal shift):

              position   0    1    2    3
              token      <u>  how  many <a>
              predicts   how  many <a>  ...

    returns logprobs, entropies: [M] float32, M = mask.sum(), in row order; nats, at `temperature`.

    The logits of all positions at once, N·T·V floats, are the commonest out-of-memory of RL code (V is 151,936 for
    Qwen3). So: the trunk runs once, only masked positions go on to the head, `chunk` of them at a time (None: CHUNK), and each
    chunk's logits are thrown away and computed again in the backward pass (Head).
    """
    lm = policy.lm
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        hidden, targets = hidden_states(lm, ids, mask), ids[:, 1:][mask]  # [M, D], [M]
    head = lm.get_output_embeddings()
    cap = getattr(lm.config, "final_logit_softcapping", None)  # Gemma 2 and 3
    chunk = chunk or (CHUNK if ids.is_cuda else max(16, min(CHUNK, LOGITS // head.weight.shape[0])))
    return Head.apply(hidden.to(head.weight.dtype), head.weight, head.bias, targets, temperature, cap, chunk)


class Head(torch.autograd.Function):
    """Hidden states [M, D] -> log-probs and entropies [M] of the targets, through the logits of `chunk` tokens at a time, in one buffer.

    Forward keeps of a token's V logits only log Σ exp. Backward computes them again, and with p = softmax(logits / temperature)
    the gradient of log p[target] to the logits is (1[target] - p) / temperature. Autograd with a checkpoint a chunk does the same with six
    such buffers, which took 1.4 times as long, and 11 GB instead of 0.7 for 16,320 tokens and V = 151,936: glibc's heap does not fill the
    holes that they leave.
    """

    @staticmethod
    def logits(ctx, some: slice, hidden, weight, bias) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The logits of C tokens over temperature, [C, V] float32, in the buffer; and, where they are capped, the cap's derivative [C, V]."""
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
    def forward(ctx, hidden, weight, bias, targets, temperature: float, cap: float | None, chunk: int):
        M, V = len(targets), len(weight)
        ctx.temperature, ctx.cap, ctx.chunk = temperature, cap, chunk
        ctx.buffer = torch.empty(min(chunk, M), V, device=hidden.device)
        logprobs, entropies, totals = (torch.empty(M, device=hidden.device) for _ in range(3))
        for first in range(0, M, chunk):
            some = slice(first, first + chunk)
            z, _ = Head.logits(ctx, some, hidden, weight, bias)
            totals[some] = z.logsumexp(-1)
            logprobs[some] = z.gather(-1, targets[some, None])[:, 0] - totals[some]
            entropies[some] = totals[some] - (z - totals[some, None]).exp_().mul_(z).sum(-1)  # - Σ p log p = log Σ exp - Σ p z
        ctx.save_for_backward(hidden, weight, bias, targets, totals)
        ctx.mark_non_differentiable(entropies)
        ctx.buffer = None
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, bias, targets, totals = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        ctx.buffer = torch.empty(min(ctx.chunk, len(targets)), len(weight), device=hidden.device)
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        to_weight = torch.zeros_like(weight) if needs_weight else None
        to_bias = torch.zeros_like(bias) if needs_bias else None
        for first in range(0, len(targets), ctx.chunk):
            some = slice(first, first + ctx.chunk)
            z, slope = Head.logits(ctx, some, hidden, weight, bias)
            g = z.sub_(totals[some, None]).exp_().neg_()  # -p
            g.scatter_add_(1, targets[some, None], torch.ones_like(g[:, :1]))
            g.mul_(grad[some, None] / ctx.temperature)
            if slope is not None:
                g.mul_(slope)
            g = g.to(weight.dtype)
            if needs_hidden:
                to_hidden[some] = g @ weight
            if needs_weight:
                to_weight.addmm_(g.t(), hidden[some])
            if needs_bias:
                to_bias += g.sum(0)
        ctx.buffer = None
        return to_hidden, to_weight, to_bias, None, None, None, None


if __name__ == "__main__":
    import time

    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=32, lora_alpha=64)
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(11, 1024, (8, 184), generator=rng)  # [k, T] a group: eight replies of 64 tokens …
    ids[:, :120] = ids[0, :120]  # … to one prompt of 120
    mask = torch.zeros(8, 183, dtype=torch.bool)
    mask[:, 119:] = True
    learn = list(policy.trainable().values())

    def plain():
        logits = policy.lm(input_ids=ids[:, :-1], use_cache=False).logits  # [k, T-1, V], all of them
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0][mask]  # [M]

    found = {}
    for name, how in (("plain", plain), ("shared", lambda: token_logprobs(policy, ids, mask)[0])) * 3:
        started = time.perf_counter()
        logprobs = how()
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(logprobs.sum(), learn)])
        found[name] = logprobs.detach(), gradient, time.perf_counter() - started
    (a, ga, slow), (b, gb, fast) = found["plain"], found["shared"]
    print(f"a group of {len(ids)}: {int(mask.sum())} sampled tokens of {ids.numel()}; the prompt's {8 * 120} are run as 120")
    print(
        f"log-probs differ by {(a - b).abs().max():.0e} at most, gradients by {((ga - gb).abs().max() / ga.abs().max()):.0e} of the largest"
    )
    print(f"forward and backward: {1000 * slow:.0f} ms plain, {1000 * fast:.0f} ms shared")
    print("the first reply begins:", [f"{p:.2f}" for p in b[:6].tolist()], "nats; chance would be", f"{-torch.tensor(1024.0).log():.2f}")
    assert (a - b).abs().max() < 1e-4 and (ga - gb).abs().max() < 1e-4 * ga.abs().max()
