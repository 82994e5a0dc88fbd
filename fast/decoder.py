"""Decoders: a language model, one step for many rows at once, that remembers what it has read.

    prefill   run each *prompt* once and keep its keys and values (the KV cache)
    share     its k samples look at the one cache of their prompt, each has its own for its reply
    step      one token for every row: attend to both caches, append to its own
    move      a live row takes the place of a finished one, so that no step is spent on that;
              now and then the caches are packed
    resume    in a conversation, a row's cache is kept for its next turn: read only what is new

Prompts are padded on the left, so that all end at the same place. The loop around it, which draws
tokens and notices the end of a reply, is fast/sampler.py.

`FastDecoder` is our own forward pass for the Llama/Qwen family: LoRA folded into a private copy of
the weights, q, k and v in one matrix product, gate and up in another, few operations, no copies
(`python -m lab.speed.bench_peers sampler` compares it with others). Whether it may be used is
decided in fast/decoders.py, where its substitute is, too.

Tried and dropped, with 64 rows of pico_base on one thread: torch.compile around attention (0.8 of
the speed, and 15 s to compile), bfloat16 on a CPU that has instructions for it (half the speed),
one softmax for both log-prob and draw (2%). On two threads: half of the rows in each of two Python
threads (no gain), the norms' weights folded into the next product (none), a draw that first finds
the block of the vocabulary and then the token in it (2%). Keys with their tokens along the last
axis (4% of forced tokens, else nothing). Caches that grow, so that no room lies between two rows'
keys (1 to 3%), weights packed for oneDNN (2%), one gather for queries and keys (none), small
products by MKL (3% slower). Two tokens drafted by the n-grams of the batch and checked in one step:
1.5 tokens a step would hold (simulated), and three times the products eat that.

Run me: `python -m fast.decoder` writes eight tokens step by step, and reads them again at once.
"""

from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from fast.products import linear, product
from fast.tiles import BLOCK, SCALE, Rows, with_zeros
from fast.tiles import attend as attend_in_tiles
from fast.trunk import effective, paired
from policy import Policy

TILED = ("cpu",)  # devices that read prompts row by row


class Kept(tuple):
    """What a row has read so far: its keys and values, [L][2, Hkv, n, d]."""

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self)


class FastDecoder:
    """Our forward pass for the Llama/Qwen family, on a private copy of the weights, LoRA included.

    A small model on a CPU does little arithmetic in a step. What costs are the microseconds that
    each operation takes to start, and memory that is read twice. So: few operations, no copies.

    Shapes: G prompts of P tokens, B rows (G · k samples, fewer as they finish), L layers, D
    channels, Hq query heads and Hkv key heads of d channels each, g = Hq/Hkv, a vocabulary of V.
    N tokens are run at once: B in a step, G · S when prompts are read.
    """

    def __init__(self, policy: Policy):
        self.lm = policy.lm
        self.trunk = getattr(self.lm, self.lm.base_model_prefix)
        self.config = self.lm.config
        self.head_dim = self.trunk.layers[0].self_attn.head_dim
        self.n_kv = self.config.num_key_value_heads
        self.n_q = self.config.num_attention_heads
        self.eps = self.config.rms_norm_eps
        self.sync()
        self.sides = {}  # {n: (√(n · eps), 1/√n)}, for rms_norm over n channels
        for n in (self.config.hidden_size, self.head_dim):
            self.sides[n] = self.embed.new_tensor((n * self.eps) ** 0.5), n**-0.5

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the current weights. The policy's own are only read.

        RoPE rotates the channels i and i + d/2 of a head together. Here they stand side by side, so
        that a pair is one complex number and one multiplication rotates them all (saves 6% of a
        step). Queries and keys are reordered alike, so their products stay the same.
        """

        def join(*linears):  # several projections of the same input become one
            biases = [linear.bias for linear in linears]
            bias = None if biases[0] is None else torch.cat(biases).clone()
            folded = [effective(linear).to(linear.weight.dtype) for linear in linears]
            return torch.cat(folded), bias

        d = self.head_dim
        copy = lambda module: module.weight.clone()
        turned = (self.n_q + self.n_kv) * self.head_dim  # channels of queries and keys
        self.layers = []
        for layer in self.trunk.layers:
            a, m = layer.self_attn, layer.mlp
            qkv, qk_norm = join(a.q_proj, a.k_proj, a.v_proj), None
            for x in qkv:
                if x is not None:
                    x[:turned] = paired(x[:turned], d)
            if hasattr(a, "q_norm"):  # Qwen3 normalises queries and keys; both go through together
                q_norm = paired(a.q_norm.weight, d).expand(self.n_q, -1)
                qk_norm = torch.cat([q_norm, paired(a.k_norm.weight, d).expand(self.n_kv, -1)])
            w = {"norm1": copy(layer.input_layernorm), "qkv": qkv, "qk_norm": qk_norm}
            w |= {"o": join(a.o_proj), "norm2": copy(layer.post_attention_layernorm)}
            w |= {"gate_up": join(m.gate_proj, m.up_proj), "down": join(m.down_proj)}
            self.layers.append(w)
        self.embed = copy(self.trunk.embed_tokens)
        self.norm = copy(self.trunk.norm)
        head = self.lm.get_output_embeddings().weight
        self.head = self.embed if head is self.trunk.embed_tokens.weight else head.clone()

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend, last=None):
        """Run ids [N] at positions [N]; returns logits [N, V], or those of the tokens `last` [B].

        attend(layer, heads) -> [N, Hq·d] gets queries, keys and values [N, Hq+2Hkv, d], stores the
        latter two, and attends to them and those before.
        """
        x = F.embedding(ids, self.embed)  # [N, D]
        turns = self.turns[positions][:, None]  # [N, 1, d/2]
        N, n_qk, d = len(x), self.n_q + self.n_kv, self.head_dim
        for layer, w in enumerate(self.layers):
            h = self.rms_norm(x, w["norm1"])
            heads = linear(h, *w["qkv"]).view(N, -1, d)  # [N, Hq+2Hkv, d]
            qk = heads[:, :n_qk]
            if w["qk_norm"] is not None:
                qk.copy_(self.rms_norm(qk, w["qk_norm"]))
            pairs = qk.float().view(N, n_qk, d // 2, 2)  # no copy in float32
            torch.view_as_complex(pairs).mul_(turns)  # RoPE (Su et al. 2021, §3.4), in place
            if qk.dtype != torch.float32:
                qk.copy_(pairs.flatten(-2))
            x = linear(attend(layer, heads), *w["o"]).add_(x)
            h = self.rms_norm(x, w["norm2"])
            gate, up = linear(h, *w["gate_up"]).chunk(2, -1)
            x = linear(F.silu(gate).mul_(up), *w["down"]).add_(x)
        x = self.rms_norm(x if last is None else x[last], self.norm)
        return product(x, self.head).float()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """weight · x / √(mean x² + eps), over the last axis (Zhang & Sennrich 2019, eq. 4).

        A card has a kernel for it. On a CPU torch's rms_norm is eight operations, and these are
        five: |x| and √(D · eps) are the sides of a right triangle. Saves 3% of sampling.
        """
        if x.device.type not in TILED or x.dtype != torch.float32:
            if weight.ndim == 1:
                return F.rms_norm(x, x.shape[-1:], weight, self.eps)
            return F.rms_norm(x, x.shape[-1:], None, self.eps) * weight  # [H, d], each head its own
        side, root = self.sides[x.shape[-1]]
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(side).mul_(root)
        return (x / norm).mul_(weight)

    def read(self, ids: torch.Tensor, slot: int, new: torch.Tensor) -> torch.Tensor:
        """Run the last `new` [G] tokens of each row of ids [G, S] -> logits [G, V].

        Their keys go to slots up to slot + S - 1. A card runs all S of every row at once, padding
        and tokens that it has read before too: the same tokens give the same keys.
        """
        (G, S), device = ids.shape, ids.device
        here = torch.arange(slot, slot + S, device=device)  # [S]
        positions = (here - self.pad[:, None]).clamp(min=0)  # [G, S]
        if device.type in TILED:
            run = torch.arange(S) >= S - new[:, None]  # [G, S]
            attend = self.row_by_row(slot + S, new.tolist())
            return self.forward(ids[run], positions[run], attend, new.cumsum(0) - 1)
        last = torch.arange(1, G + 1, device=device) * S - 1
        return self.forward(ids.flatten(), positions.flatten(), self.all_at_once(slot, S), last)

    def row_by_row(self, end: int, new: list[int]):
        """Attention of new tokens whose row has all its keys up to slot `end`, in tiles.

        Eight episodes of swarm are sampled in 0.71 of the time that one masked attention takes.
        """
        n_q, H, d, starts = self.n_q, self.n_kv, self.head_dim, self.pad.tolist()
        queries, stretch = [0, *accumulate(new)], [0, *accumulate(end - start for start in starts)]
        rows = Rows(list(pairwise(queries)), list(pairwise(stretch)))
        N, E = queries[-1], stretch[-1]
        seen = self.embed.new_zeros(2, H, E + BLOCK + 64, d)

        def attend(layer, heads):
            heads = heads.view(N, -1, d).transpose(0, 1)  # [Hq+2Hkv, N, d]
            q = heads[:n_q].view(H, -1, N, d).transpose(1, 2) * (SCALE * d**-0.5)  # [Hkv, N, g, d]
            kv = heads[n_q:].view(2, H, N, d)
            for row, ((a, b), (k0, k1)) in enumerate(zip(rows.queries, rows.stretch)):
                line = self.prompts[layer][:, row, :, starts[row] : end]  # [2, Hkv, k1-k0, d]
                line[:, :, a - b :] = kv[:, :, a:b]
                seen[:, :, k0:k1] = line
            out = attend_in_tiles(with_zeros(q, BLOCK), *seen, rows)[0]  # [Hkv, N + BLOCK, g, d]
            return out[:, :N].transpose(0, 1).reshape(N, -1)

        return attend

    def all_at_once(self, slot: int, S: int):
        """Attention of all rows' tokens from `slot` on to all that came before, masked."""
        G, end = len(self.pad), slot + S
        key = torch.arange(end, device=self.pad.device)
        here = key[slot:]  # [S]
        # Query i sees key j if j <= i and j is no padding. Padding sees itself: no key gives NaN.
        mask = (key <= here[:, None]) & (key >= self.pad[:, None, None])  # [G, S, end]
        mask = (mask | (key == here[:, None]))[:, None]

        def attend(layer, heads):
            heads = heads.view(G, S, -1, self.head_dim).transpose(1, 2)
            q, k, v = heads.split([self.n_q, self.n_kv, self.n_kv], 1)  # [G, H, S, d] each
            keys, values = self.prompts[layer][:, :, :, :end]  # [G, Hkv, end, d]
            keys[:, :, end - S :], values[:, :, end - S :] = k, v
            out = grouped_attention(q, keys, values, mask)
            return out.transpose(1, 2).reshape(G * S, -1)

        return attend

    def prefill(self, ids: torch.Tensor, pad: torch.Tensor, copies: int, room: int):
        """ids [G, P], left-padded by pad [G] -> logits [G·copies, V]. Copies share their prompt."""
        self.open(ids, pad, copies, room)
        return self.read(ids, 0, ids.shape[1] - pad).repeat_interleave(copies, 0)

    def resume(self, ids: torch.Tensor, pad: torch.Tensor, caches: list[list], room: int):
        """As prefill with one copy, but a row's first tokens come from its cache. -> logits [B, V].

        The caches are emptied layer by layer as they are copied: whoever still holds them holds
        nothing, and no more than one layer is in memory twice.
        64 alphabet episodes of three turns took pico_base 2.5 s instead of 4.8 (one run).
        """
        known = torch.tensor([cache[0].shape[2] for cache in caches], device=ids.device)
        new = ids.shape[1] - pad - known  # [B]
        S = int(new.max())
        self.open(ids, pad, 1, room, caches)
        return self.read(ids[:, -S:], ids.shape[1] - S, new)

    def open(
        self, ids: torch.Tensor, pad: torch.Tensor, copies: int, room: int, caches: list[list] = ()
    ) -> None:
        """New caches: for each prompt a line that holds its keys once, and a column per copy.

        Lines begin with what caches [G][L] hold of their prompts, if there are any.
        """
        (G, P), H, d, device = ids.shape, self.n_kv, self.head_dim, ids.device
        empty = lambda *shape: torch.empty(2, *shape, dtype=self.embed.dtype, device=device)
        self.prompts, starts = [], pad.tolist()
        for layer in range(len(self.layers)):
            lines = empty(G, H, P, d)  # keys and values
            for row, start in enumerate(starts):
                lines[:, row, :, :start] = 0  # padding is masked, but 0 times garbage may be NaN
            for row, (cache, start) in enumerate(zip(caches, starts)):
                kept, cache[layer] = cache[layer], None
                lines[:, row, :, start : start + kept.shape[2]] = kept
            self.prompts.append(lines)
        for cache in caches:
            cache.clear()
        self.own = [empty(G, H, copies, room, d) for _ in self.layers]
        self.pad, self.slot = pad, 0
        self.place = torch.arange(G * copies, device=device)  # [B] of a row: line · copies + column
        everywhere = torch.arange(P + room, device=device)[None]  # [1, P+room]
        cos, sin = self.trunk.rotary_emb(self.embed[:1], everywhere)  # [1, P+room, d] each
        turns = torch.complex(cos[0].float(), sin[0].float())
        self.turns = turns[:, : d // 2].contiguous()  # [P+room, d/2]: both halves are alike
        self.columns = copies
        self.look_up()

    def look_up(self) -> None:
        """Tables for `step`: heads [B, Hq+2Hkv, d] to caches [lines, Hkv, columns, …] and back."""
        lines, columns, device = len(self.pad), self.columns, self.place.device
        H, g = self.n_kv, self.n_q // self.n_kv
        # Which row is at each place. At a free one it is row 0 again, and nobody reads the result.
        row = self.place.new_zeros(lines * columns)
        row[self.place] = torch.arange(len(self.place), device=device)
        line, column = self.place // columns, self.place % columns  # [B]
        h, j = torch.arange(H, device=device)[:, None], torch.arange(g, device=device)
        first = row.view(lines, 1, columns) * (self.n_q + 2 * H)  # where the row's queries begin
        keys = first + self.n_q + h
        self.q_from = (first[..., None] + h[..., None] * g + j).flatten()  # [lines·Hkv·columns·g]
        self.kv_from = torch.stack([keys, keys + H]).flatten()  # [2·lines·Hkv·columns]
        line_head, column = line[:, None, None] * H + h, column[:, None, None]
        self.back = ((line_head * columns + column) * g + j).flatten()  # [B·Hkv·g]
        P = self.prompts[0].shape[3]
        self.position = P - self.pad[line]  # [B] of a row's first own token
        hide = torch.zeros(lines, 1, P, dtype=self.embed.dtype, device=device)
        hide.masked_fill_(torch.arange(P, device=device) < self.pad[:, None, None], -torch.inf)
        self.hide = hide.repeat_interleave(H, 0)  # [lines·Hkv, 1, P] is added to the scores

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [B], the tokens just sampled -> the logits of the next ones [B, V].

        A row attends to its prompt and to its own tokens, in one softmax. One matrix product covers
        the prompt for all rows of a line, so its keys are read from memory once and not once per
        row (as in Hydragen, Juravsky et al. 2024, §3): memory is what attention waits for on a CPU.
        With a copy per row, 64 rows of pico_base in groups of 8 took 1.15 times as long.
        """
        t, d, g = self.slot, self.head_dim, self.n_q // self.n_kv
        lines = len(self.pad) * self.n_kv  # a head of keys in a line
        n = lines * self.columns  # and in one of its places
        P = self.hide.shape[-1]

        def attend(layer, heads):
            flat, own = heads.view(-1, d), self.own[layer].view(2, n, -1, d)
            own[:, :, t] = flat.index_select(0, self.kv_from).view(2, n, d)
            q = flat.index_select(0, self.q_from) * d**-0.5  # [n·g, d]
            keys, values = own[:, :, : t + 1]
            far_keys, far_values = self.prompts[layer].view(2, lines, P, d)
            # [lines, columns·g, P]
            far = torch.baddbmm(self.hide, q.view(lines, -1, d), far_keys.transpose(1, 2))
            near = q.view(n, g, d) @ keys.transpose(1, 2)  # [n, g, t+1]
            weights = torch.cat([far.view(n, g, P), near], -1).softmax(-1)  # [n, g, P+t+1]
            out = weights[..., :P].view(lines, -1, P) @ far_values  # [lines, columns·g, d]
            out = torch.baddbmm(out.view(n, g, d), weights[..., P:], values)
            return out.view(-1, d).index_select(0, self.back).view(len(ids), -1)

        logits = self.forward(ids, self.position + t, attend)
        self.slot = t + 1
        return logits

    def forget(self) -> None:
        """Give the memory of the caches back."""
        self.prompts, self.own = [], []

    def take(self, places: torch.Tensor) -> list[Kept]:
        """Keys and values of each of these rows, for a later resume."""
        out, starts = [], self.pad.tolist()  # one wait for a GPU, not one per row and layer
        for place in self.place[places].tolist():
            line, column = divmod(place, self.columns)
            layers = []
            for prompts, own in zip(self.prompts, self.own):
                read = prompts[:, line, :, starts[line] :]  # without the padding
                layers.append(torch.cat([read, own[:, line, :, column, : self.slot]], 2))
            out.append(Kept(layers))
        return out

    def move(self, source: torch.Tensor, target: torch.Tensor, n: int) -> None:
        """Rows `source` take the numbers `target` of finished rows; n rows are left.

        Their caches stay where they are, until packing would save a quarter of the places: then
        only prompts with live rows remain, and as many columns as the fullest of them needs.
        (Packing at every chance, or only at half, was 3 to 6% slower for 64 rows of pico_base.
        Several lines for a prompt with many rows, so that fewer places are empty: no gain.)
        """
        self.place[target] = self.place[source]
        self.place = self.place[:n]
        rows: dict[int, list[int]] = {}  # of each line
        for row, line in enumerate((self.place // self.columns).tolist()):
            rows.setdefault(line, []).append(row)
        columns = max(map(len, rows.values()))
        if len(rows) * columns <= 0.75 * len(self.pad) * self.columns:
            self.pack(rows, columns)
        self.look_up()

    def pack(self, rows: dict[int, list[int]], columns: int) -> None:
        """New caches for these lines and so many columns. Free places repeat a line's first row."""
        device = self.place.device
        lines = torch.tensor(list(rows), device=device)
        filled = [some + some[:1] * (columns - len(some)) for some in rows.values()]
        filled = torch.tensor(filled, device=device)  # [lines, columns] row numbers
        seat = (self.place % self.columns)[filled][:, None]  # [lines, 1, columns] their old columns
        head = torch.arange(self.n_kv, device=device)[:, None]
        for i, own in enumerate(self.own):
            self.own[i] = own.new_empty(2, len(rows), self.n_kv, columns, *own.shape[4:])
            self.own[i][..., : self.slot, :] = own[:, lines[:, None, None], head, seat, : self.slot]
            self.prompts[i] = self.prompts[i][:, lines]
        self.pad, self.columns = self.pad[lines], columns
        for i, some in enumerate(rows.values()):
            self.place[some] = torch.arange(len(some), device=device) + i * columns


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


if __name__ == "__main__":
    import time

    from policy import PICO, load_policy

    decoder = FastDecoder(load_policy(str(PICO), lora_rank=0, lora_alpha=64))
    (G, k, P, steps), rng = (4, 8, 100, 8), torch.Generator().manual_seed(0)
    prompts = torch.randint(11, 1024, (G, P), generator=rng)  # [G, P]
    said = torch.randint(11, 1024, (steps, G * k), generator=rng)  # the tokens of each step
    none = torch.zeros(G * k, dtype=torch.long)  # no padding
    with torch.inference_mode():
        decoder.prefill(prompts, none[:G], k, steps)
        started = time.perf_counter()
        logits = [decoder.step(tokens) for tokens in said][-1]  # [G·k, V]
        seconds = time.perf_counter() - started
        whole = torch.cat([prompts.repeat_interleave(k, 0), said.T], 1)  # [G·k, P + steps]
        again = decoder.prefill(whole, none, 1, 1)
    gap = (logits - again).abs().max().item()
    print(f"{G} prompts of {P} tokens, {k} replies each: {1000 * seconds / steps:.1f} ms per step")
    print(f"after {steps} steps the logits are {gap:.0e} from those of reading it all at once")
    assert gap < 1e-3
