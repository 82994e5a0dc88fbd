"""The sampler: token ids in, sampled token ids out, with the log-prob of each.

RL spends most of its time here, so this is where speed is won. `model.generate` is general and pays
for it at every token. This file does one thing:

    read the prompts -> logits -> draw one token per row -> drop finished rows
                          ^                                     |
                          +-- step with the rows that are left <+

A decoder reads the prompts and takes the steps. `FastDecoder` is our own forward pass for the
Llama/Qwen family; `PlainDecoder` calls the model itself, so any causal LM works.

Each row brings its own random numbers, one per token, so it does not depend on its neighbours: the
same seed gives the same sample, whatever else is in the batch. policy.PlainSampler does the same
without tricks.

Run me: `python -m fast.sampler` samples four answers, and compares them with the plain sampler's.
"""

from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F

from fast.layers import (
    are_known,
    attended,
    copied,
    folded_layers,
    forward,
    product,
    products_dtype,
    rms_norm,
    rope_angles,
)
from fast.logprobs import attention
from fast.machine import NARROW, CannotGoOn, first_line, free_memory, out_of_memory
from policy import Policy, Sample, draw

GROWTH = 32  # tokens by which the rows' own caches grow: products of few shapes, on dense memory
PACK = 8  # finished rows are dropped once they are an eighth of the batch: dropping copies the rest


class TorchSampler:
    """`sample` is the interface that all engines share; `sync` fetches the newest weights."""

    def __init__(self, policy: Policy, max_rows: int = 256):
        self.policy = policy
        self.max_rows = max_rows  # rows decoded at once; more need more memory for their caches
        # Before a run, bookkeeping/pretrained.py compares what it samples with a plain pass.
        self.decoder = FastDecoder(policy) if are_known(policy.lm.config) else PlainDecoder(policy)
        # The most tokens whose keys and values are in memory at once.
        self.room = 10**12
        if policy.device.type == "cpu":  # it raises no error: the system ends the process
            self.room = int(free_memory() * 2**30 / 2 / cache_bytes(policy.lm.config))
            if policy.lm.config.get_text_config().hidden_size > NARROW:
                # A wide model keeps the cores busy with fewer rows; more only take memory.
                self.max_rows = min(max_rows, 128)
        self.most_kept = self.room  # prompts that are longer together keep no caches
        self.version = 0  # how many updates the sampled policy has had

    def sync(self, version: int = 0) -> None:
        """Sample from the policy's current weights from now on."""
        self.decoder.sync()
        self.version = version

    @contextmanager
    def asleep(self):
        """While the trainer works, it holds neither caches nor weights: `sync` before sampling."""
        self.decoder.layers = None
        yield

    @torch.inference_mode()
    def sample(self, prompts, k, max_tokens, temperature, seeds, caches=None, keep=False):
        """k samples of each prompt: lists of token ids -> [len(prompts)][k] Samples.

        seeds[g][i] is a tuple of ints: the seed of the random numbers for sample i of prompt g.
        keep: give each sample its cache, for the conversation's next turn. caches[g] is the cache
        that an earlier call returned for the beginning of prompt g (then k is 1); it is emptied
        while it is copied. Both only save time, and an engine may ignore them. If memory runs out,
        the kept caches are dropped first, then the rows are halved. CannotGoOn with a one-sentence
        message if not even one prompt fits.
        """
        caches = caches or [None] * len(prompts)
        tokens = k * sum(map(len, prompts))
        keep = keep and tokens < self.most_kept
        # Prompts of similar length share a batch, which saves padding and changes no sample.
        left = sorted(range(len(prompts)), key=lambda g: len(prompts[g]))
        found: dict[int, list[Sample]] = {}  # {prompt: its samples}
        while left:
            rows = min(self.max_rows, self.room // (len(prompts[left[-1]]) + max_tokens))
            batch = left[: max(1, rows // k)]
            some, own, known = ([x[g] for g in batch] for x in (prompts, seeds, caches))
            try:
                found |= zip(batch, self._batch(some, k, max_tokens, temperature, own, known, keep))
                left = left[len(batch) :]
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                if keep or any(caches):  # later calls remember how much was too much
                    keep, self.most_kept = False, min(tokens, self.most_kept)
                    for cache in filter(None, caches):
                        cache.clear()
                    for sample in sum(found.values(), []):
                        sample.cache = None
                elif len(batch) > 1:
                    self.max_rows = (len(batch) + 1) // 2 * k
                else:
                    raise CannotGoOn(
                        f"the card has not enough memory for {k} replies of {max_tokens} tokens to "
                        f"one prompt ({first_line(error)}); lower --k or --max-tokens"
                    ) from error
        return [found[g] for g in range(len(prompts))]

    def _batch(self, prompts, k, max_tokens, temperature, seeds, caches, keep):
        decoder, device = self.decoder, self.policy.device
        # Prompts are padded on the left, so that all end at the same place.
        P = max(map(len, prompts))
        ids = torch.tensor([[0] * (P - len(p)) + p for p in prompts], device=device)  # [G, P]
        pad = torch.tensor([P - len(p) for p in prompts], device=device)  # [G]
        draws = [np.random.default_rng(seed).random(max_tokens) for row in seeds for seed in row]
        uniforms = torch.tensor(np.array(draws), dtype=torch.float32, device=device)  # [B, steps]
        # rows: those that are still decoded.
        rows = samples = [Sample([], [], finished=False) for _ in draws]
        # If only some rows have a cache, all are read again.
        logits = decoder.prefill(ids, pad, k, max_tokens, caches if all(caches) else ())  # [B, V]
        for t in range(max_tokens):
            new, logprobs = draw(logits, uniforms[:, t], temperature)  # [n], [n]
            for n, (sample, token, logp) in enumerate(zip(rows, new.tolist(), logprobs.tolist())):
                if not sample.finished:
                    sample.token_ids.append(token)
                    sample.logprobs.append(logp)
                    sample.finished = token in self.policy.stop_ids
                    if keep and sample.finished:
                        sample.cache = decoder.take(n)
            live = [n for n, sample in enumerate(rows) if not sample.finished]
            if not live or t + 1 == max_tokens:
                break
            if len(live) <= len(rows) * (1 - 1 / PACK):
                decoder.select(torch.tensor(live, device=device))
                rows, new, uniforms = [rows[n] for n in live], new[live], uniforms[live]
            logits = decoder.run(new[:, None])
        decoder.caches, decoder.row_caches = [], []  # the trainer, say, may use their memory
        return [samples[first : first + k] for first in range(0, len(samples), k)]


def cache_bytes(config) -> int:
    """Bytes that the keys and values of one token take, in float32."""
    config = config.get_text_config()
    channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kept = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * kept * channels * 4


# ---------------------------------------------------------------------------------------- decoders


class Decoder:
    """What the two decoders share: the next S tokens of all rows are run at once.

    Prompts end at the same slot of the caches, and are padded on the left:

        slot     0  1  2  3  4  5 | 6  7         pad   position of a token = slot - pad
        row 0    a  b  c  d  e  f | g  h           0
        row 1          i  j  k  l | m  n           2
    """

    def prefill(self, ids: torch.Tensor, pad: torch.Tensor, copies: int, room: int, caches=()):
        """Read prompts: ids [G, P], left-padded by pad [G] -> logits [G·copies, V].

        Each prompt is read once; then its rows share its keys and values, or get copies. room:
        steps that may follow. caches [G][L] hold those of its first tokens, if an earlier turn has
        read them; they are emptied. With them, 64 alphabet episodes of three turns took pico_base
        2.5 s instead of 4.8 (one run).
        """
        self.caches, self.row_caches = [], []  # drops the last batch's, if it ran out of memory
        self.pad, self.slot, self.length = pad, 0, ids.shape[1] + room
        self.begin(ids, caches)
        logits = self.run(ids[:, self.slot :])
        rows = torch.arange(len(ids), device=ids.device).repeat_interleave(copies)
        self.select(rows)
        return logits[rows]


class PlainDecoder(Decoder):
    """A decoder on the Hugging Face model itself: slower, but right for every causal LM.

    It samples from the policy's own weights. It keeps no caches: a conversation's next turn reads
    everything again.
    """

    def __init__(self, policy: Policy):
        self.lm = policy.lm

    def sync(self) -> None:
        """Nothing to copy."""

    def begin(self, ids: torch.Tensor, caches) -> None:
        from transformers import DynamicCache

        self.caches = DynamicCache(config=self.lm.config)

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(self.slot + ids.shape[1], device=ids.device)
        places = {
            "attention_mask": (slots >= self.pad[:, None]).long(),
            "position_ids": (slots[self.slot :] - self.pad[:, None]).clamp(min=0),
        }
        self.slot = len(slots)
        past = {"past_key_values": self.caches, "use_cache": True}
        return self.lm(input_ids=ids, **places, **past, logits_to_keep=1).logits[:, -1].float()

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows. reorder_cache is what every kind of layer has, hybrid ones too."""
        self.caches.reorder_cache(rows)
        self.pad = self.pad[rows]

    def take(self, row: int) -> None:
        """Nothing was kept."""


class FastDecoder(Decoder):
    """fast/layers.py, with the weights of the last `sync`.

    A small model on a CPU does little arithmetic in a step. The time goes into the microseconds
    that each operation takes to start, and into memory that is read twice. So there are few
    operations, and on a CPU the samples of a prompt share its keys and values:

        caches      [2, G, Hkv, P, d]      of each layer: keys and values of a group's prompt
        row_caches  [2, G, Hkv, K, n, d]   those that each row has added, in room that grows

    Shapes: G prompts of P tokens, at most K live rows of each, B in all (G · k, fewer as they
    finish), S new tokens of each (1 in a step), L layers, D channels, Hq query heads and Hkv key
    heads of d channels each, a vocabulary of V.

    Tried and dropped with pico_base: torch.compile around attention (0.8 of the speed), half of the
    rows in each of two threads (no gain), two tokens drafted by the n-grams of the batch and
    checked in one step (no gain).
    """

    def __init__(self, policy: Policy):
        self.lm, self.config, self.dtype = policy.lm, policy.lm.config, products_dtype(policy)
        self.trunk = self.lm.base_model
        self.head_dim = self.trunk.layers[0].self_attn.head_dim
        self.n_q, self.n_kv = self.config.num_attention_heads, self.config.num_key_value_heads
        self.sync()
        # In bfloat16 scores would be rounded, and on a card it was not tried: there each row has
        # its own keys, and torch's attention.
        self.shares = self.embed.device.type == "cpu" and self.embed.dtype == torch.float32

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the current weights. The policy's own are only read."""
        self.layers = None  # first gives back the memory
        self.layers = folded_layers(self.lm, self.dtype)
        self.embed, self.norm = (
            copied(self.trunk.embed_tokens.weight),
            copied(self.trunk.norm.weight),
        )
        head = self.lm.get_output_embeddings().weight
        self.head = self.embed if head is self.trunk.embed_tokens.weight else copied(head)
        self.head = self.head.to(self.dtype)

    def begin(self, ids: torch.Tensor, caches) -> None:
        """Make the caches [L] of [2, G, Hkv, P, d]; fill in what earlier turns have read.

        Then `slot` is the first place that some row has not read. The rows' own caches are emptied
        layer by layer, so no more than one layer is in memory twice. If rows do not share prompts,
        there is room for what follows.
        """
        starts = self.pad.tolist()
        ends = [start + cache[0].shape[2] for start, cache in zip(starts, caches)]
        self.slot, room = min(ends, default=0), ids.shape[1] if self.shares else self.length
        for _ in self.layers:
            # Zeros, because padding is masked, and 0 times garbage may be NaN.
            layer = self.embed.new_zeros(2, len(ids), self.n_kv, room, self.head_dim)
            for row, cache in enumerate(caches):
                layer[:, row, :, starts[row] : ends[row]] = cache.pop(0)
            self.caches.append(layer)
            self.row_caches.append(layer.new_zeros(2, len(ids), self.n_kv, 1, 0, self.head_dim))
        self.angles = rope_angles(self.lm, self.length, self.embed[:1])
        self.prompt_of = self.place = torch.arange(len(ids), device=ids.device)

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        """The next tokens, ids [B, S] -> the logits after the last of them [B, V]."""
        B, S = ids.shape
        slots = torch.arange(self.slot, self.slot + S, device=ids.device)
        positions = (slots - self.pad[self.prompt_of, None]).clamp(min=0).flatten()  # [B·S]
        full = self.slot >= self.caches[0].shape[3]  # what follows goes into the rows' own caches
        attend = self.attend_to_shared() if full else self.attend_row_by_row(slots)
        self.slot += S
        x = F.embedding(ids.flatten(), self.embed)  # [B·S, D]
        angles = [x[positions] for x in self.angles]
        with attention(self.lm, self.slot):
            x = forward(self.config, self.layers, x, angles, attend, product)
        last = rms_norm(self.config, x.view(B, S, -1)[:, -1], self.norm)
        return F.linear(last.to(self.dtype), self.head).float()

    def attend_row_by_row(self, slots: torch.Tensor):
        """Attention of the tokens at these slots [S] of each row to all before them in its row."""
        n_kv, d, S, end = self.n_kv, self.head_dim, len(slots), self.slot + len(slots)
        key, query = torch.arange(end, device=slots.device), slots[:, None]
        # Query i sees key j if j <= i and j is not padding. Padding sees itself: no keys give NaN.
        seen = (key <= query) & (key >= self.pad[:, None, None]) | (key == query)  # [B, S, end]
        mask = torch.where(seen, 0.0, -torch.inf).to(self.embed.dtype)
        mask = mask.repeat_interleave(self.n_q // n_kv, 1)[:, None]  # [B, 1, S·group, end]

        def attend(layer, q, k, v):
            cache = self.caches[layer]
            for kept, new in zip(cache, (k, v)):
                kept[:, :, end - S : end] = new.view(-1, S, n_kv, d).transpose(1, 2)
            return attended(q, *cache[:, :, :, :end], mask)

        return attend

    def attend_to_shared(self):
        """Attention of one token per row to its prompt and to the row's own tokens.

        One product covers a prompt for all of its rows, so its keys are read from memory once and
        not once per row (as in Hydragen, Juravsky et al. 2024, §3): on a CPU, memory is what
        attention waits for. SmolLM2 is sampled in 0.8 of the time, pico_base in 0.7 (64 rows in
        groups of 8, by hand, twice each).
        """
        G, n_kv, P, d = self.caches[0].shape[1:]
        K, t, rows = self.K, self.slot - P, len(self.place)
        if t == self.row_caches[0].shape[4]:
            for n, cache in enumerate(self.row_caches):
                self.row_caches[n] = F.pad(cache, (0, 0, 0, GROWTH))
        later = torch.arange(self.row_caches[0].shape[4]) > t
        mask = torch.zeros(len(later)).masked_fill_(later, -torch.inf)

        def spread(x):  # [B, H, d] -> [G, K, H, d]; nobody reads what a place without a row gets
            if rows < G * K:
                x = x.new_zeros(G * K, *x.shape[1:]).index_copy_(0, self.place, x)
            return x.view(G, K, -1, d)

        def attend(layer, q, k, v):
            prompts, added = self.caches[layer].view(2, -1, P, d), self.row_caches[layer]
            for kept, new in zip(added, (k, v)):
                kept[:, :, :, t] = spread(new).transpose(1, 2)
            keys, values = added.view(2, G * n_kv * K, -1, d)
            q = (spread(q) * d**-0.5).view(G, K, n_kv, -1, d).transpose(1, 2)
            q = q.reshape(G * n_kv, -1, d)  # [G·Hkv, K·group, d]
            far = torch.baddbmm(self.hide, q, prompts[0].mT).view(len(keys), -1, P)
            near = (q.view(len(keys), -1, d) @ keys.mT).add_(mask)  # [G·Hkv·K, group, n]
            weights = torch.cat([far, near], -1).softmax(-1)
            out = (weights[..., :P].reshape(len(q), -1, P) @ prompts[1]).view(len(keys), -1, d)
            out = torch.baddbmm(out, weights[..., P:], values)
            out = out.view(G, n_kv, K, -1, d).transpose(1, 2).reshape(G * K, -1)  # [G·K, Hq·d]
            return out if rows == G * K else out[self.place]

        return attend

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows, in ascending order; one may be named several times."""
        if not self.shares:
            for n, cache in enumerate(self.caches):
                self.caches[n] = cache.index_select(1, rows)
            self.pad = self.pad[rows]
            self.prompt_of = torch.arange(len(rows), device=rows.device)
            return
        # Prompts that still have rows [G], and which of them a row belongs to [B].
        prompts, prompt_of = self.prompt_of[rows].unique(return_inverse=True)
        column = torch.arange(len(rows)) - torch.searchsorted(prompt_of, prompt_of)  # [B]
        K = int(column.max()) + 1
        place = prompt_of * K + column  # [B]: a row's place among G · K
        for n, (cache, added) in enumerate(zip(self.caches, self.row_caches)):
            before = added.transpose(2, 3).flatten(1, 2)  # [2, G·K, Hkv, n, d]
            after = before.new_zeros(2, len(prompts) * K, *before.shape[2:])
            after[:, place] = before[:, self.place[rows]]
            after = after.view(2, len(prompts), K, *before.shape[2:])
            self.row_caches[n] = after.transpose(2, 3).contiguous()  # [2, G, Hkv, K, n, d]
            if len(prompts) < cache.shape[1]:
                self.caches[n] = cache.index_select(1, prompts)
        self.pad, self.prompt_of, self.place, self.K = self.pad[prompts], prompt_of, place, K
        padding = torch.arange(self.caches[0].shape[3]) < self.pad[:, None, None]  # [G, 1, P]
        hide = torch.zeros(padding.shape).masked_fill_(padding, -torch.inf)
        self.hide = hide.repeat_interleave(self.n_kv, 0)  # [G·Hkv, 1, P]: added to the scores

    def take(self, row: int) -> list[torch.Tensor]:
        """What this row has read, [L] of [2, Hkv, n, d], for a later `prefill`."""
        prompt = self.prompt_of[row].item()
        start, end = self.pad[prompt].item(), self.slot
        read = [cache[:, prompt, :, start:end] for cache in self.caches]
        if not self.shares:
            return [x.clone() for x in read]
        column, new = self.place[row].item() % self.K, end - self.caches[0].shape[3]
        added = [cache[:, prompt, :, column, :new] for cache in self.row_caches]
        return [torch.cat(both, 2) for both in zip(read, added)]


# --------------------------------------------------------------------------------------- the demo


if __name__ == "__main__":
    from chat import prompt_ids
    from policy import PICO, PlainSampler, load_policy

    policy = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    question = [{"role": "user", "content": 'Count the letters a, n in "banana".'}]
    prompt = prompt_ids(policy, question, None, think=True)
    seeds = [[(0, i) for i in range(4)]]
    plain = PlainSampler(policy).sample([prompt], 4, 200, 1.0, seeds)[0]
    fast = TorchSampler(policy).sample([prompt], 4, 200, 1.0, seeds)[0]
    for sample, other in zip(fast, plain):
        print(repr(policy.tokenizer.decode(sample.token_ids)))
        assert sample.token_ids == other.token_ids
