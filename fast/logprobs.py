"""How likely was each sampled token? The forward pass of training, fast and in little memory.

    ids [N, T] -> layers -> hidden [M, D] -> head -> logits [M, V] -> log-probs [M]
                  hidden_states              token_logprobs: a chunk of them at once

M tokens were sampled. All others (prompts, what an environment says, padding) are only read.
policy.plain_forward computes the same in ten lines. These tricks are exact up to rounding:

    run a group's prompt once, its replies attend to it    in letters rows are mostly prompt
    run rows of similar length together                    less padding; on a CPU also few enough
                                                           at once for its caches
    run our own layers, with LoRA folded in (on a CPU)     fewer products
    logits for a chunk of tokens only                      0.8 GB (16,320 tokens, V 151,936)
    for a part of the head only, if the head is frozen,    no logits that overflow the caches, and
    and their gradient at once                             the head is run once and not twice
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import groupby

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from batch import pieces
from fast.layers import (
    are_known,
    attends_to_all,
    by_our_layers,
    only_lora_learns,
    products_dtype,
    written_out,
)
from policy import Output, Policy, logprobs_and_entropy, plain_forward

CHUNK = 512  # tokens in the head at once
FEW_TOKENS = 64  # the same, on a CPU if the head learns; with 32 SmolLM2 takes half as long again
ROWS = 1024  # of a frozen head at once on a CPU
SHORT = 1024  # longer texts go through the model: the mask of our own layers would be large
# Tokens of prompts, or of replies, in the layers at once on a CPU: 4,096 overflow its caches, 1.3
# times slower.
PIECE = 1024


# --------------------------------------------------------------------------------------- the layers


def hidden_states(
    lm: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The last hidden state at each position that predicts a masked token.

    ids [N, T], mask [N, T-1], not all False -> [M, D], row after row. A group's rows begin with the
    same prompt. It is run once, and every row attends to its keys and values; the gradients of all
    rows flow back through them:

        prompt -> keys, values -> reply 1      the same numbers for less work: in letters the
                               -> reply 2      prompt is more than half of a row
                               -> …

    Prompts of one length run together, and so do rows of similar length, which saves padding.
    Tokens after a row's last masked one are not run. dtype: of the products of our own layers.
    (Before prompts ran together, and counted once when a batch is cut, SmolLM2's update took 25 s
    instead of 13.5: at commit 15fcb23 and now, python -m lab.speed --model models/smollm2 --tasks 6
    --k 16 --reply 10 --micro-tokens 992; two cores, twice each.)
    """
    most = PIECE if ids.device.type == "cpu" else 10**9
    ends = (mask * torch.arange(1, mask.shape[1] + 1, device=ids.device)).amax(1).tolist()
    lengths = (mask.int().argmax(1) + 1).tolist()  # [N] tokens before the first masked one
    rows_of: dict[tuple, list[int]] = {}  # {prompt: its rows}
    for n in sorted((n for n, end in enumerate(ends) if end), key=lambda n: ends[n]):
        rows_of.setdefault(tuple(ids[n, : lengths[n]].tolist()), []).append(n)
    saved = sum(len(prompt) * (len(rows) - 1) for prompt, rows in rows_of.items())
    if saved < 0.1 * ids.numel() or not shares_prompts(lm):
        rows_of = {(): sorted(sum(rows_of.values(), []), key=lambda n: ends[n])}
    ours = ids.shape[1] <= SHORT and knows(lm)
    run = partial(by_our_layers, dtype=dtype) if ours else by_the_model
    found = {}  # {row: its hidden states}
    for prompts in together(rows_of, most):
        P, firsts = len(prompts[0]), [rows_of[prompt][0] for prompt in prompts]
        prompt_of = {n: i for i, prompt in enumerate(prompts) for n in rows_of[prompt]}
        rows = sorted(prompt_of, key=lambda n: ends[n])
        padded = lambda some: len(some) * (ends[some[-1]] - P)  # noqa: B023
        read = None
        for piece in pieces(rows, padded, most):
            prompt = torch.tensor([prompt_of[n] for n in piece], device=ids.device)
            last = ends[piece[-1]]  # the last row is the longest
            hidden, read = run(lm, ids[firsts, :P], ids[piece, P:last], prompt, read)
            asked = mask[piece, max(0, P - 1) : last]  # [n, R], as hidden [n, R, D]
            states = hidden[asked].split(asked.sum(1).tolist())
            found |= zip(piece, states)
    return torch.cat([found[n] for n in sorted(found)])


def by_the_model(lm, prompts: torch.Tensor, ids: torch.Tensor, prompt_of: torch.Tensor, read=None):
    """Hidden states of rows that go on after prompts, and what was read of the prompts.

    prompts [G, P], ids [n, S], prompt_of [n]: which prompt a row continues. Returns [n, S, D], or
    [n, 1+S, D] with the last one of the prompt (if P > 0), and `read` for the next rows.
    """
    from transformers import DynamicCache

    hidden, cache, P = [], None, prompts.shape[1]
    if P:
        read = read or lm.base_model(input_ids=prompts, use_cache=True)
        of_rows = lambda x: x.index_select(0, prompt_of)
        hidden.append(of_rows(read.last_hidden_state[:, -1:]))
        layers = read.past_key_values.layers
        cache = DynamicCache([(of_rows(layer.keys), of_rows(layer.values)) for layer in layers])
    if ids.numel():
        more = lm.base_model(input_ids=ids, past_key_values=cache, use_cache=P > 0)
        hidden.append(more.last_hidden_state)
    return torch.cat(hidden, 1), read


def knows(lm: torch.nn.Module) -> bool:
    """Does fast/layers.py train this model, here? Untried: on a card, and with bfloat16 weights.

    In training mode there may be dropout or checkpoints. A reference (--kl) runs the same layers,
    so that its KL is exactly 0 at first; its weights are folded in anew for each micro-batch.
    """
    return (
        not lm.training
        and lm.device.type == "cpu"
        and lm.dtype == torch.float32
        and are_known(lm.config)
        and only_lora_learns(lm)
    )


def together(prompts: Iterable[tuple], most: int) -> Iterator[list[tuple]]:
    """Prompts to run at once: of one length, so that none is padded, and at most `most` tokens."""
    for length, same in groupby(sorted(prompts, key=len), key=len):
        yield from pieces(same, lambda some: len(some) * length, most)  # noqa: B023


def attention(lm: torch.nn.Module, keys: int):
    """A context: inside it, attention to so many tokens is computed in the way that is fast here.

    Where oneDNN multiplies float32 (fast/machine.py), flash attention is slow: it makes hundreds of
    products that take longer to start than to compute. Written out as two products and a softmax,
    attention to 130 tokens takes a third of its time, and to 500 as long. Flash attention took 10 s
    of an update of SmolLM2 that lasted 36; this takes 3 (64 replies of 64 tokens, an AMD EPYC).
    Training keeps all scores in memory, so there it is for texts of half that length.
    """
    written = written_out(keys) and not checkpointed(lm)
    return sdpa_kernel(SDPBackend.MATH) if written else nullcontext()


def checkpointed(lm: torch.nn.Module) -> bool:
    """Will the backward pass run the layers again? Then it is outside all contexts of the first."""
    return lm.training and lm.is_gradient_checkpointing


def shares_prompts(lm: torch.nn.Module) -> bool:
    """Can rows attend to a prompt that was run once? Gradient checkpointing keeps no keys."""
    return not checkpointed(lm) and attends_to_all(lm.config)


# ----------------------------------------------------------------------------------------- the head


def token_logprobs(policy: Policy, ids, mask, temperature: float = 1.0):
    """Log-prob of every masked token given those before it, and the entropy of its choice.

    ids   [N, T] int64, right-padded. Attention is causal and padding comes last, so it needs no
          mask.
    mask  [N, T-1] bool: mask[:, t] asks for token t+1, which position t predicts (causal shift):

              position   0    1    2    3
              token      <u>  how  many <a>
              predicts   how  many <a>  ...

    Returns logprobs, entropies: [M] float32, M = mask.sum(), row after row; nats, at `temperature`.
    Gradients flow through the log-probs only; policy.plain_forward has them for both.

    The logits of all positions at once, N·T·V floats, are the most common way for RL code to run
    out of memory (V is 151,936 for Qwen3). So the layers run once, and only masked positions go on
    to the head, a chunk at a time.
    """
    if not mask.any():
        return torch.zeros(2, 0, device=ids.device).unbind()
    lm, kind, dtype = policy.lm, ids.device.type, products_dtype(policy)
    with (
        torch.autocast(kind, torch.bfloat16, enabled=policy.bfloat16 and not knows(lm)),
        attention(lm, ids.shape[1]),
    ):
        hidden, targets = hidden_states(lm, ids, mask, dtype), ids[:, 1:][mask]  # [M, D], [M]
    head, scale = lm.get_output_embeddings(), logit_scale(lm) / temperature
    if head.weight.requires_grad or head.bias is not None or soft_cap(lm):
        hidden = hidden.to(head.weight.dtype)
        all_logits = lambda h, tokens: logprobs_and_entropy(head_outputs(lm, h) * scale, tokens)
        predict = partial(checkpoint, all_logits, use_reentrant=False)  # again, going backward
        chunk = CHUNK if kind == "cuda" else FEW_TOKENS
    else:
        rows = len(head.weight) if kind == "cuda" else ROWS  # a card has room for all of them
        predict, chunk = partial(by_rows, head.weight.to(dtype), rows, scale), CHUNK
        hidden = hidden.to(dtype)
    parts = zip(hidden.split(chunk), targets.split(chunk))
    logprobs, entropies = map(torch.cat, zip(*(predict(*part) for part in parts)))
    return logprobs, entropies.detach()


def forward(policy: Policy, ids, mask, temperature=1.0, need_logits: bool = False) -> Output:
    """policy.plain_forward, fast. A loss that reads the logits gets the plain way itself."""
    if need_logits:
        return plain_forward(policy, ids, mask, temperature)
    return Output(*token_logprobs(policy, ids, mask, temperature))


def by_rows(head, n: int, scale: float, hidden: torch.Tensor, targets: torch.Tensor):
    """Log-probs and entropies [C] by a frozen head [V, D], n of its rows at once.

    hidden [C, D], targets [C]. As flash attention goes over keys, this goes over the head, with the
    maximum and the sums so far (Milakov & Gimelshein 2018). If n < V, the logits z [C, V] never
    exist as a whole (Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models").
    The same pass finds the gradient, a direction [D] per token, which is all that is kept:

        z(token)         = scale · hidden · row(token)
        log p(token)     = log sigmoid(z(token) - log Σ exp z(others))
        its gradient     = scale · (1 - p(token)) · (row(token) - mean row of the others)

    The token itself is left out of the sums, because 1 - p, and the difference of rows, would be
    rounding errors where p is almost 1. SmolLM2's head, with 49,152 rows, takes 0.6 of the time
    that it takes with all logits of 64 tokens (timed by hand, two cores).
    """
    top = torch.full((len(hidden), 1), -torch.inf, device=hidden.device)  # [C, 1], as both sums
    sum_p, sum_z, sum_row = torch.zeros_like(top), torch.zeros_like(top), 0.0  # sum_row: [C, D]
    with torch.no_grad():
        for first, rows in zip(range(0, len(head), n), head.split(n)):
            z = F.linear(hidden, rows).float().mul_(scale)  # [C, n]
            here = ((targets >= first) & (targets < first + n)).nonzero()[:, 0]
            z[here, targets[here] - first] = -1e30  # not infinite: z · p is a product below
            higher = torch.maximum(top, z.amax(-1, keepdim=True))
            p, shrink = (z - higher).exp_(), (top - higher).exp()
            sum_p = sum_p * shrink + p.sum(-1, keepdim=True)
            if hidden.requires_grad:
                sum_row = sum_row * shrink + p.to(rows.dtype) @ rows
            sum_z = sum_z * shrink + z.mul_(p).sum(-1, keepdim=True)
            top = higher
        own = head[targets]  # [C, D]
        z = F.linear(hidden, own).diagonal()[:, None].float() * scale  # rounded as the others are
        lead = z - top - sum_p.log()  # [C, 1]: log p(token) - log p(others)
        logprobs, others = F.logsigmoid(lead), (-lead).sigmoid()  # others: their probability
        entropies = others * (z - sum_z / sum_p) - logprobs  # -Σ p log p
        directions = scale * others * (own - sum_row / sum_p)  # [C, D]
    nothing = (hidden - hidden.detach()).float()  # 0, but its gradient flows on
    return logprobs[:, 0] + (nothing * directions).sum(-1), entropies[:, 0]


def head_outputs(lm: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states [C, D] -> logits [C, V], before the factor that some models apply."""
    outputs, cap = lm.get_output_embeddings()(hidden).float(), soft_cap(lm)
    return cap * torch.tanh(outputs / cap) if cap else outputs


def soft_cap(lm: torch.nn.Module) -> float | None:
    """No logit of Gemma 2 is larger."""
    return getattr(lm.config.get_text_config(), "final_logit_softcapping", None)


@lru_cache(maxsize=1)
@torch.no_grad()
def logit_scale(lm: torch.nn.Module) -> float:
    """The factor that a model multiplies its head's outputs by: Granite, Cohere, Falcon-H1.

    Each names it differently, so it is measured, once. (A model that does something else with them
    is refused before the run: bookkeeping/pretrained.py.)
    """
    ids = torch.arange(1, 9, device=lm.device)[None] * 37 % lm.config.get_text_config().vocab_size
    own = head_outputs(lm, lm.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    logits = lm(input_ids=ids, use_cache=False).logits.float()
    scale = ((own * logits).sum() / (own * own).sum()).item()
    return 1.0 if abs(scale - 1) < 1e-3 else scale  # rounding is not a scale
