"""The sampler: token ids in, sampled token ids out, with the log-prob of each.

RL spends most of its time here, so this is where speed is won. `model.generate` is general and pays
for it at every token. This file does one thing:

    read the prompts -> logits -> draw one token per row -> drop finished rows
                          ^                                     |
                          +-- step with the rows that are left <+

A decoder reads the prompts and takes the steps. `FastDecoder` is our own forward pass for the
Llama/Qwen family; `PlainDecoder` calls the model itself, so any causal LM works. `make_decoder`
takes the fast one only if it computes what the model computes.

Each row brings its own random numbers, one per token, so it does not depend on its neighbours: the
same seed gives the same sample, whatever else is in the batch. policy.PlainSampler is the same
without tricks.

Run me: `python -m fast.sampler` samples four answers to one question and checks their log-probs.
"""

from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F

from fast.logprobs import attends_to_all, grows
from fast.machine import CannotGoOn, out_of_memory
from policy import Policy, Sample, draw, first_line, plain_logprobs

SLICE = 32  # conversations of an evaluation at a time, on a card: a small model's batch of swarm
PACK = 8  # finished rows are dropped once they are an eighth of the batch: dropping copies the rest


class TorchSampler:
    """`sample` is the interface that all engines share; `sync` fetches the newest weights."""

    def __init__(self, policy: Policy, max_rows: int = 256):
        self.policy = policy
        self.max_rows = max_rows  # rows decoded at once; more need more memory for their caches
        self.most_kept = 10**12  # tokens: conversations this long together keep no caches
        self.decoder = make_decoder(policy)
        self.version = 0  # how many updates the policy that it samples from has seen
        # An evaluation has more tasks than a batch. A CPU's memory takes the caches of all.
        self.conversations = SLICE if policy.device.type == "cuda" else None

    def sync(self, version: int = 0) -> None:
        """Sample from the policy's current weights from now on."""
        self.decoder.sync()
        self.version = version

    @contextmanager
    def asleep(self):
        """`with sampler.asleep():` the trainer works, and may have the memory of our cache."""
        self.decoder.forget()
        yield

    @torch.inference_mode()
    def sample(self, prompts, k, max_tokens, temperature, seeds, caches=None, keep=False):
        """k samples of each prompt: lists of token ids -> [len(prompts)][k] Samples.

        seeds[g][i] is a tuple of ints: the seed of the random numbers for sample i of prompt g.
        keep: give each sample its cache, for the conversation's next turn. caches[g] is the cache
        that an earlier call gave for the beginning of prompt g (then k is 1); it is emptied while
        it is copied. Both only save time, and an engine may ignore them. Out of memory? First the
        kept caches go, then the rows are halved.
        CannotGoOn with a one-sentence message if not even one prompt fits.
        """
        out, tokens = [], k * sum(map(len, prompts))
        groups = max(1, self.max_rows // k)
        caches = caches if caches and k == 1 else [None] * len(prompts)
        keep = keep and tokens < self.most_kept and isinstance(self.decoder, FastDecoder)
        # Prompts of similar length share a batch, which saves padding and changes no sample.
        order = sorted(range(len(prompts)), key=lambda g: len(prompts[g]))
        while len(out) < len(order):
            batch = order[len(out) : len(out) + groups]
            some, own, known = ([x[g] for g in batch] for x in (prompts, seeds, caches))
            uses_caches = keep or any(caches)
            try:
                out += self._batch(some, k, max_tokens, temperature, own, known, keep)
                continue
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                if len(batch) == 1 and not uses_caches:
                    what = f"{k} replies of {max_tokens} tokens to one prompt ({first_line(error)})"
                    raise CannotGoOn(
                        f"the card has not enough memory for {what}; lower --k or --max-tokens"
                    ) from error
            # Out here, because the exception keeps the failed batch alive. Later calls remember.
            self.decoder.forget()
            if uses_caches:
                self.most_kept, keep = min(tokens, self.most_kept), False
                for cache in filter(None, caches):
                    cache.clear()
                for sample in (s for samples in out for s in samples):
                    sample.cache = None
            else:
                groups = (len(batch) + 1) // 2
                self.max_rows = groups * k
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return [samples for _, samples in sorted(zip(order, out), key=lambda pair: pair[0])]

    def _batch(self, prompts, k, max_tokens, temperature, seeds, known, keep):
        self.decoder.forget()  # the cache of the batch before
        G, B, device = len(prompts), len(prompts) * k, self.policy.device
        P = max(map(len, prompts))
        # Prompts are padded on the left, so that all end at the same place.
        ids = torch.tensor([[0] * (P - len(p)) + p for p in prompts], device=device)  # [G, P]
        pad = torch.tensor([P - len(p) for p in prompts], device=device)  # [G]
        uniforms = np.zeros((B, max_tokens))
        if temperature > 0:
            for row, seed in enumerate(seed for group in seeds for seed in group):
                uniforms[row] = np.random.default_rng(seed).random(max_tokens)
        uniforms = torch.tensor(uniforms, dtype=torch.float32, device=device)  # [B, max_tokens]
        stops = torch.tensor(sorted(self.policy.stop_ids), device=device)

        # What was sampled, by original row. `row` [n] says which of them each decoded row is.
        tokens = torch.zeros((B, max_tokens), dtype=torch.long, device=device)
        logps = torch.zeros((B, max_tokens), device=device)
        lengths = torch.full((B,), max_tokens, device=device)
        finished = torch.zeros(B, dtype=torch.bool, device=device)
        row = torch.arange(B, device=device)
        kept: list[list | None] = [None] * B
        if not all(known):
            for cache in filter(None, known):  # of some rows only: all are read again
                cache.clear()
            known = []
        logits = self.decoder.prefill(ids, pad, k, max_tokens, known)  # [B, V]
        for t in range(max_tokens):
            new, logp = draw(logits, uniforms[row, t], temperature)  # [n], [n]
            tokens[row, t], logps[row, t] = new, logp
            ended = torch.isin(new, stops) & ~finished[row]  # [n]
            if ended.any():  # on a GPU it waits for the answer, once per token
                lengths[row[ended]], finished[row[ended]] = t + 1, True
                if keep:
                    places = torch.nonzero(ended)[:, 0]
                    for b, cache in zip(row[places].tolist(), self.decoder.take(places)):
                        kept[b] = cache
                live = torch.nonzero(~finished[row])[:, 0]
                if len(live) == 0:
                    break
                if len(live) <= len(row) * (1 - 1 / PACK):
                    self.decoder.select(live)
                    row, new = row[live], new[live]
            if t + 1 < max_tokens:
                logits = self.decoder.step(new)
        tokens, logps, finished = (x.cpu().numpy() for x in (tokens, logps, finished))
        rows = [
            Sample(tokens[b, :n].tolist(), logps[b, :n].tolist(), bool(finished[b]), kept[b])
            for b, n in enumerate(lengths.tolist())
        ]
        return [rows[g * k : (g + 1) * k] for g in range(G)]


def sample_each(
    sampler,
    prompts: list[list[int]],
    seeds: list[tuple],
    caches: list,
    max_tokens: int,
    temperature: float,
    keep: bool,
) -> list[Sample]:
    """One sample per prompt, [n]; equal prompts that nothing was read of yet are read once.

    prompts [n] of token ids; seeds [n]: what each sample draws its random numbers from; caches [n]:
    what an earlier sample kept of its prompt, or None. keep: keep caches for the next turn.
    """
    alike: dict[tuple, list[int]] = {}  # {a prompt that is read once: its samples}
    for i, (prompt, cache) in enumerate(zip(prompts, caches)):
        alike.setdefault((i, "cached") if cache else tuple(prompt), []).append(i)
    found: dict[int, Sample] = {}
    for k in sorted({len(members) for members in alike.values()}):  # one, if no episode failed
        groups = [members for members in alike.values() if len(members) == k]
        asked = [prompts[group[0]] for group in groups]
        known = [caches[group[0]] for group in groups]
        own = [[seeds[i] for i in group] for group in groups]
        samples = sampler.sample(asked, k, max_tokens, temperature, own, caches=known, keep=keep)
        for group, some in zip(groups, samples):
            found |= dict(zip(group, some))
    return [found[i] for i in range(len(prompts))]


# ---------------------------------------------------------------------------------------- decoders


class PlainDecoder:
    """A decoder on the Hugging Face model itself: slower, and right for every causal LM.

    It keeps no caches: a conversation's next turn reads all of it again.
    """

    def __init__(self, policy: Policy):
        self.lm = policy.lm

    def sync(self) -> None:
        pass  # it samples from the policy's own weights

    def forget(self) -> None:
        self.cache = None

    def prefill(self, ids: torch.Tensor, pad: torch.Tensor, copies: int, room: int, caches=()):
        """ids [G, P], left-padded by pad [G] -> logits [G·copies, V].

        `room` and `caches` are FastDecoder's.
        """
        from transformers import DynamicCache

        here = torch.arange(ids.shape[1], device=ids.device)
        self.seen = here >= pad[:, None]  # [G, P] attention mask
        self.position = ids.shape[1] - pad  # [G], of the next token
        positions = (torch.cumsum(self.seen, 1) - 1).clamp(min=0)
        self.cache = DynamicCache(config=self.lm.config)
        logits = self.run(ids, positions, logits_to_keep=1).repeat_interleave(copies, 0)
        self.select(torch.arange(len(ids), device=ids.device).repeat_interleave(copies))
        return logits

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [B], the tokens just sampled -> the logits of the next ones [B, V]."""
        self.seen = torch.cat([self.seen, torch.ones_like(self.seen[:, :1])], 1)
        logits = self.run(ids[:, None], self.position[:, None])
        self.position = self.position + 1
        return logits

    def run(self, ids: torch.Tensor, positions: torch.Tensor, **more) -> torch.Tensor:
        past = {"past_key_values": self.cache, "use_cache": True, **more}
        seen = self.seen.long()
        out = self.lm(input_ids=ids, attention_mask=seen, position_ids=positions, **past)
        self.cache = out.past_key_values
        return out.logits[:, -1].float()

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows. reorder_cache is what every kind of layer has, hybrid ones too."""
        self.cache.reorder_cache(rows)
        self.seen, self.position = self.seen[rows], self.position[rows]


class FastDecoder:
    """Our forward pass for the Llama/Qwen family, on a private copy of the weights, LoRA included.

    A small model on a CPU does little arithmetic in a step. What costs are the microseconds that
    each operation takes to start, and memory that is read twice. So: LoRA folded into the weights,
    q, k and v in one product, gate and up in another; few operations, no copies.

    Shapes: G prompts of P tokens, B rows (G · k samples, fewer as they finish), L layers, D
    channels, Hq query heads and Hkv key heads of d channels each, a vocabulary of V. N tokens are
    run at once: B in a step, all new ones when prompts are read.

    Tried and dropped with pico_base: torch.compile around attention (0.8 of the speed), bfloat16 on
    a CPU that has it (half the speed), half of the rows in each of two threads (no gain), two
    tokens drafted by the n-grams of the batch and checked in one step (no gain), and one copy of a
    prompt's keys for all its rows, which needs tables of who looks where (hardly any gain).
    """

    def __init__(self, policy: Policy):
        self.lm, self.config = policy.lm, policy.lm.config
        self.trunk = getattr(self.lm, self.lm.base_model_prefix)
        self.head_dim = self.trunk.layers[0].self_attn.head_dim
        self.n_kv = self.config.num_key_value_heads
        self.n_q = self.config.num_attention_heads
        self.forget()
        self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the current weights. The policy's own are only read."""

        def join(*linears):  # several projections of the same input become one
            biases = [linear.bias for linear in linears]
            bias = None if biases[0] is None else torch.cat(biases)
            return torch.cat([folded(linear) for linear in linears]), bias

        copy = lambda module: module.weight.clone()
        self.layers = []
        for layer in self.trunk.layers:
            a, m = layer.self_attn, layer.mlp
            w = {
                "norm1": copy(layer.input_layernorm),
                "qkv": join(a.q_proj, a.k_proj, a.v_proj),
                "qk_norm": None,
                "o": join(a.o_proj),
                "norm2": copy(layer.post_attention_layernorm),
                "gate_up": join(m.gate_proj, m.up_proj),
                "down": join(m.down_proj),
            }
            if hasattr(a, "q_norm"):  # Qwen3 normalises queries and keys; both go through together
                q_norm = a.q_norm.weight.expand(self.n_q, -1)
                w["qk_norm"] = torch.cat([q_norm, a.k_norm.weight.expand(self.n_kv, -1)])  # [H, d]
            self.layers.append(w)
        self.embed, self.norm = copy(self.trunk.embed_tokens), copy(self.trunk.norm)
        head = self.lm.get_output_embeddings().weight
        self.head = self.embed if head is self.trunk.embed_tokens.weight else head.clone()

    def forget(self) -> None:
        """Give the memory of the caches back."""
        self.caches = []

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend, last=None):
        """Run ids [N] at positions [N]; returns logits [N, V], or those of the tokens `last` [B].

        attend(layer, heads) -> [N, Hq·d] gets queries, keys and values [N, Hq+2Hkv, d], stores the
        latter two, and attends to them and those before.
        """
        x = F.embedding(ids, self.embed)  # [N, D]
        cos, sin = self.cos[positions], self.sin[positions]  # [N, 1, d] each
        N, n_qk, d = len(x), self.n_q + self.n_kv, self.head_dim
        eps = self.config.rms_norm_eps
        norm = lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, eps)
        for layer, w in enumerate(self.layers):
            heads = F.linear(norm(x, w["norm1"]), *w["qkv"]).view(N, -1, d)  # [N, Hq+2Hkv, d]
            qk = heads[:, :n_qk]
            if w["qk_norm"] is not None:
                qk = norm(qk, None) * w["qk_norm"]
            # RoPE (Su et al. 2021, §3.4) rotates the channels i and i + d/2 of a head together.
            heads[:, :n_qk] = torch.addcmul(qk * cos, qk.roll(d // 2, -1), sin)
            x = F.linear(attend(layer, heads), *w["o"]).add_(x)
            gate, up = F.linear(norm(x, w["norm2"]), *w["gate_up"]).chunk(2, -1)
            x = F.linear(F.silu(gate).mul_(up), *w["down"]).add_(x)
        x = norm(x if last is None else x[last], self.norm)
        return F.linear(x, self.head).float()

    def prefill(self, ids: torch.Tensor, pad: torch.Tensor, copies: int, room: int, caches=()):
        """Read prompts: ids [G, P], left-padded by pad [G] -> logits [G·copies, V].

        Each prompt is read once, then its keys and values are copied. caches [G][L] hold those of
        its first tokens, if an earlier turn has read them; they are emptied layer by layer, so no
        more than one layer is in memory twice.
        64 alphabet episodes of three turns took pico_base 2.5 s instead of 4.8 (one run).
        """
        (G, P), device, starts = ids.shape, ids.device, pad.tolist()
        known = [cache[0].shape[2] for cache in caches] or [0] * G
        self.caches, self.pad, self.slot = [], pad, P
        for layer in range(len(self.layers)):
            # Zeros, because padding is masked, and 0 times garbage may be NaN.
            cache = self.embed.new_zeros(2, G, self.n_kv, P + room * (copies == 1), self.head_dim)
            for row, (start, n) in enumerate(zip(starts, known)):
                if n:
                    cache[:, row, :, start : start + n] = caches[row][layer]
                    caches[row][layer] = None
            self.caches.append(cache)
        for cache in caches:
            cache.clear()
        everywhere = torch.arange(P + room, device=device)
        cos, sin = self.trunk.rotary_emb(self.embed[:1], everywhere[None])  # [1, P+room, d] each
        self.cos, self.sin = cos[0, :, None], sin[0, :, None].clone()  # [P+room, 1, d]
        self.sin[..., : self.head_dim // 2].neg_()
        # Run the tokens that are neither padding nor known, all rows' end to end.
        begins = [start + n for start, n in zip(starts, known)]
        places = [(row, slot) for row, begin in enumerate(begins) for slot in range(begin, P)]
        row, slot = torch.tensor(places, device=device).T  # [N] each
        last = torch.tensor([P - begin for begin in begins], device=device).cumsum(0) - 1  # [G]
        key, first = everywhere[:P], min(begins)
        # Query i sees key j if j <= i and j is no padding. Padding sees itself: no key gives NaN.
        mask = (key <= key[first:, None]) & (key >= pad[:, None, None])  # [G, P-first, P]
        mask = (mask | (key == key[first:, None]))[:, None]

        def attend(layer, heads):
            queries = heads.new_zeros(G, P - first, self.n_q, self.head_dim)
            queries[row, slot - first] = heads[:, : self.n_q]
            cache = self.caches[layer]
            cache[:, row, :, slot] = heads[:, self.n_q :].view(len(row), 2, self.n_kv, -1)
            keys, values = cache[:, :, :, :P]  # [G, Hkv, P, d]
            out = grouped_attention(queries.transpose(1, 2), keys, values, mask)
            return out.transpose(1, 2)[row, slot - first].flatten(1)

        logits = self.forward(ids[row, slot], slot - pad[row], attend, last)
        if copies > 1:
            for layer, read in enumerate(self.caches):
                cache = read.new_empty(2, G, copies, self.n_kv, P + room, self.head_dim)
                cache[..., :P, :] = read[:, :, None]
                self.caches[layer] = cache.flatten(1, 2)  # [2, B, Hkv, P+room, d]
            self.pad = pad.repeat_interleave(copies)
            logits = logits.repeat_interleave(copies, 0)
        return logits

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [B], the tokens just sampled -> the logits of the next ones [B, V]."""
        B, end = len(ids), self.slot + 1
        mask = (torch.arange(end, device=ids.device) >= self.pad[:, None])[:, None, None]

        def attend(layer, heads):
            cache = self.caches[layer]
            kv = heads[:, self.n_q :].view(B, 2, self.n_kv, -1)
            cache[:, :, :, self.slot] = kv.transpose(0, 1)
            keys, values = cache[:, :, :, :end]  # [B, Hkv, end, d]
            return grouped_attention(heads[:, : self.n_q, None], keys, values, mask).view(B, -1)

        logits = self.forward(ids, self.slot - self.pad, attend)
        self.slot = end
        return logits

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows only."""
        for layer, cache in enumerate(self.caches):
            kept = torch.empty_like(cache[:, : len(rows)])
            kept[:, :, :, : self.slot] = cache[:, rows, :, : self.slot]
            self.caches[layer] = kept
        self.pad = self.pad[rows]

    def take(self, rows: torch.Tensor) -> list[list[torch.Tensor]]:
        """What each of these rows has read, [L] of [2, Hkv, n, d], for a later `prefill`."""
        starts = self.pad[rows].tolist()  # one wait for a GPU, not one per row and layer
        place = lambda cache, row, start: cache[:, row, :, start : self.slot].clone()
        return [
            [place(cache, row, start) for cache in self.caches]
            for row, start in zip(rows.tolist(), starts)
        ]


def folded(linear: torch.nn.Module) -> torch.Tensor:
    """The weight [out, in] that a linear layer computes with, its LoRA included."""
    if not hasattr(linear, "lora_A"):
        return linear.weight
    weight = linear.base_layer.weight
    for name in linear.active_adapters:
        A, B = linear.lora_A[name].weight, linear.lora_B[name].weight  # [r, in], [out, r]
        weight = weight + linear.scaling[name] * (B @ A)
    return weight.to(linear.weight.dtype)


def grouped_attention(q, keys, values, mask) -> torch.Tensor:
    """Queries [G, Hq, S, d] attend to keys and values [G, Hkv, n, d] where mask [G, 1, S, n] says.

    With a mask, enable_gqa leaves a card only the kernel that writes all scores down, [G, Hq, S, n]
    in float32: 20 GB in swarm. So the queries that share a head of keys become more queries of that
    head, which any kernel can do; no keys are copied.
    """
    (G, Hq, S, d), H = q.shape, keys.shape[1]
    g = Hq // H
    q = q.reshape(G, H, g * S, d)  # heads h·g … h·g+g-1 look at head h
    out = F.scaled_dot_product_attention(q, keys, values, mask.repeat(1, 1, g, 1))
    return out.view(G, Hq, S, d)


# ------------------------------------------------------------------------------------ which decoder


def make_decoder(policy: Policy):
    """The fast decoder if it computes what the model computes, else the plain one; `why` tells.

    Raises what the card or its memory did wrong: that says nothing about the architecture.
    """
    fast = None
    try:
        if grows(policy.lm.config):
            why = "RoPE's angles depend on how long the text is"
        elif not attends_to_all(policy.lm.config):
            why = "not every layer attends to all that came before"
        else:  # the two cases above would not show in a short test prompt
            fast = FastDecoder(policy)
            gap, rounding = differences(fast, PlainDecoder(policy), policy)
            why = (
                f"its log-probs are {gap:.1g} nats from the model's, rounding alone {rounding:.1g}"
            )
            limit = 1e-4 if fast.embed.dtype == torch.float32 else 0.03
            fast = fast if gap < max(limit, TIMES * rounding) else None
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        if isinstance(error, CARD) or any(word in str(error) for word in ("CUDA", "cuDNN")):
            raise
        fast, why = None, f"another architecture ({first_line(error)})"
    decoder = fast or PlainDecoder(policy)
    taken = "fast decoder: " if fast else "plain decoder, many times slower than the fast one: "
    decoder.why = taken + why
    return decoder


CARD = (torch.OutOfMemoryError, torch.AcceleratorError)  # out of memory, or it has met an error
# In bfloat16, models of 24 and 36 layers and random weights differ from themselves by 0.03 to 0.06
# nats if they are padded, and the fast decoder from them by 1.5 to 2.9 times as much (16 models). A
# forgotten norm in one layer of 36 makes it more than 6 times (tests/test_sampler.py).
TIMES = 6


@torch.no_grad()
def differences(fast: FastDecoder, plain: PlainDecoder, policy: Policy) -> tuple[float, float]:
    """Nats between the log-probs of both; and of the plain one with itself, if it reads padding.

    The mean over 4 prompts of 16 tokens and 4 steps of what a sampled token's log-prob is off by.
    bfloat16 rounds a logit of 20 by 0.06, also those of tokens that are never sampled. In float32,
    where rounding is small, the largest of all differences instead.
    """
    V, device, (G, P, steps) = policy.lm.config.vocab_size, policy.device, (4, 16, 4)
    text = torch.arange(1, 1 + G * (P + steps), device=device).view(G, -1)
    text = text * 37 % V  # [G, P + steps]

    def logprobs(decoder, padding: int) -> torch.Tensor:  # [G, steps + 1, V]
        ids = torch.cat([text.new_zeros(G, padding), text[:, :P]], 1)  # [G, padding + P]
        logits = [decoder.prefill(ids, text.new_full((G,), padding), 1, steps)]
        logits += [decoder.step(token) for token in text[:, P:].T]
        return torch.stack(logits, 1).log_softmax(-1)

    exact = logprobs(plain, 0)
    own, other = logprobs(plain, 5), logprobs(fast, 0)
    fast.forget()
    if fast.embed.dtype == torch.float32:
        return (other - exact).abs().max().item(), (own - exact).abs().max().item()
    mean = lambda x: (exact.exp() * (x - exact).abs()).sum(-1).mean().item()
    return mean(other), mean(own)


# --------------------------------------------------------------------- for the demos of the engines


def demo_prompt(policy: Policy) -> list[int]:
    """Token ids of a question about letters."""
    text = 'Count the letters a, n in "banana". Think first inside <think> and </think> if that '
    text += "helps. Then give the counts as JSON inside <answer> and </answer>."
    return policy.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )


def largest_gap(policy: Policy, prompt: list[int], sample: Sample) -> float:
    """The most by which a sample's log-probs differ from a plain forward pass, in nats."""
    ids = torch.tensor([prompt + sample.token_ids], device=policy.device)  # [1, T]
    mask = torch.arange(ids.shape[1] - 1, device=policy.device)[None] >= len(prompt) - 1
    with torch.no_grad():
        again = plain_logprobs(policy, ids, mask)[0]  # [sampled]
    return (again.cpu() - torch.tensor(sample.logprobs)).abs().max().item()


if __name__ == "__main__":
    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    sampler, prompt = TorchSampler(policy), demo_prompt(policy)
    for s in sampler.sample([prompt], 4, 200, 1.0, [[(0, i) for i in range(4)]])[0]:
        gap, text = largest_gap(policy, prompt, s), policy.tokenizer.decode(s.token_ids)
        print(f"log-prob {sum(s.logprobs):7.2f}, {gap:.0e} from a plain forward pass   {text!r}")
        assert gap < 1e-4
    print(sampler.decoder.why)
