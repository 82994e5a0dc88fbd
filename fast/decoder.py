"""Decoders: one step of a language model for many rows at once, with the keys and values of what was read before.

    prefill   run each *prompt* once and keep its keys and values (the KV cache)
    share     its k samples all look at the one cache of their prompt, and each has a cache of its own for what it says
    step      one token for every row: attend to both, append to its own
    move      the last live row takes the name of one that ended, so no step is spent on finished rows; now and then the caches are packed
    resume    in a conversation, a row's cache is kept for its next turn, and only what is new is read

Prompts are padded on the left, so that all end at the same place. fast/sampler.py is the loop around it: which token is drawn, who has ended.

`FastDecoder` is our own forward pass for the Llama/Qwen family: LoRA folded into a private copy of the weights, q, k and v in one matrix
product, gate and up in another, few operations, no copies (`python -m lab.speed.bench_peers sampler` measures what it wins over model.generate and
others). `PlainDecoder` calls the Hugging Face model, so any causal LM works. The fast one is chosen only if its log-probs are those of the model
on a test prompt, but for rounding.

Dropped, each measured with 64 rows of pico_base on one thread: torch.compile of what stands before and after attention (0.8 of the tokens a second,
and 15 s to compile), bfloat16 on a CPU (half, though it has instructions for it), a softmax for the log-prob and the draw in one (2%).

Run me: `python -m fast.decoder` lets both read the same prompts and step side by side, and compares numbers and time.
"""

import torch
import torch.nn.functional as F

from fast.logprobs import attends_to_all
from policy import Policy


class FastDecoder:
    """Our forward pass for decoders of the Llama/Qwen family, on a private copy of the weights with LoRA folded in.

    A small model on a CPU does little arithmetic in a step. What counts are the microseconds that each operation takes to begin, and memory that is
    read twice. So: few operations, and what can be looked at where it lies is not copied.

    In the shapes below: G prompts of P tokens, B rows (G · k samples, fewer as they end), L layers, D channels, Hq heads of queries and
    Hkv of keys with d channels each, g = Hq/Hkv, a vocabulary of V. N tokens are run at once: B in a step, and G · S where prompts are read.
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

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the current weights. The policy's own are only read.

        RoPE turns the channels i and i + d/2 of a head together. Here they stand side by side, so that a pair is one complex number and to turn all
        of them is one multiplication (6% of a step). Queries and keys change places alike, so their products stay what they are.
        """

        def join(*linears):  # several projections of the same input become one
            biases = [linear.bias for linear in linears]
            bias = None if biases[0] is None else torch.cat(biases).clone()
            return torch.cat([folded(linear) for linear in linears]), bias

        def paired(x):  # [H·d, …]: of each head the channels 0, d/2, 1, d/2 + 1, …
            return x.unflatten(0, (-1, 2, self.head_dim // 2)).transpose(1, 2).flatten(0, 2)

        turned = (self.n_q + self.n_kv) * self.head_dim  # channels of queries and keys
        self.layers = []
        for layer in self.trunk.layers:
            a, m = layer.self_attn, layer.mlp
            qkv, qk_norm = join(a.q_proj, a.k_proj, a.v_proj), None
            for x in qkv:
                if x is not None:
                    x[:turned] = paired(x[:turned])
            if hasattr(a, "q_norm"):  # Qwen3 normalises queries and keys; q's and k's heads go through it together
                qk_norm = torch.cat([paired(a.q_norm.weight).expand(self.n_q, -1), paired(a.k_norm.weight).expand(self.n_kv, -1)])
            self.layers.append(
                {
                    "norm1": layer.input_layernorm.weight.clone(), "norm2": layer.post_attention_layernorm.weight.clone(), "qk_norm": qk_norm,
                    "qkv": qkv, "o": join(a.o_proj), "gate_up": join(m.gate_proj, m.up_proj), "down": join(m.down_proj),
                }
            )  # fmt: skip
        self.embed = self.trunk.embed_tokens.weight.clone()
        self.norm = self.trunk.norm.weight.clone()
        tied = self.lm.get_output_embeddings().weight is self.trunk.embed_tokens.weight
        self.head = self.embed if tied else self.lm.get_output_embeddings().weight.clone()

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend) -> torch.Tensor:
        """Run ids [B, S] at positions [B, S]; returns logits of the last position [B, V].

        attend(layer, heads [N, Hq+2Hkv, d]: queries, keys, values) -> [N, Hq·d] stores the keys and values, and looks at them and at those before.
        """
        x = F.embedding(ids.flatten(), self.embed)  # [N, D]
        turns = self.turns[positions.flatten()][:, None]  # [N, 1, d/2]
        (N, D), n_qk, d = x.shape, self.n_q + self.n_kv, self.head_dim
        for layer, w in enumerate(self.layers):
            h = F.rms_norm(x, (D,), w["norm1"], self.eps)
            heads = F.linear(h, *w["qkv"]).view(N, -1, d)  # [N, Hq+2Hkv, d]
            qk = heads[:, :n_qk]
            if w["qk_norm"] is not None:
                torch.mul(F.rms_norm(qk, (d,), None, self.eps), w["qk_norm"], out=qk)
            pairs = qk.float().view(N, n_qk, d // 2, 2)  # of float32 it is no copy
            torch.view_as_complex(pairs).mul_(turns)  # RoPE (Su et al. 2021, §3.4), in place
            if qk.dtype != torch.float32:
                qk.copy_(pairs.flatten(-2))
            x = x + F.linear(attend(layer, heads), *w["o"])
            h = F.rms_norm(x, (D,), w["norm2"], self.eps)
            gate, up = F.linear(h, *w["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, *w["down"])
        x = F.rms_norm(x.view(*ids.shape, D)[:, -1], (D,), self.norm, self.eps)
        return F.linear(x, self.head).float()

    def read(self, ids: torch.Tensor, slot: int) -> torch.Tensor:
        """Run the prompts' tokens ids [G, S], whose keys go to slots slot … slot+S-1 of the prompts' cache; returns logits [G, V]."""
        G, S = ids.shape
        here = torch.arange(slot, slot + S, device=ids.device)  # [S]
        key = torch.arange(slot + S, device=ids.device)
        # Key j is visible to query i if j <= i and j is no padding. Padding sees itself: a row without any key would be NaN.
        mask = (key <= here[:, None]) & (key >= self.pad[:, None, None]) | (key == here[:, None])  # [G, S, slot+S]

        def attend(layer, heads):
            q, k, v = heads.view(G, S, -1, self.head_dim).transpose(1, 2).split([self.n_q, self.n_kv, self.n_kv], 1)  # [G, H, S, d] each
            keys, values = self.prompts[layer][:, :, :, : slot + S]  # [G, Hkv, slot+S, d]
            keys[:, :, slot:], values[:, :, slot:] = k, v
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask[:, None], enable_gqa=True)
            return out.transpose(1, 2).reshape(G * S, -1)

        return self.forward(ids, (here - self.pad[:, None]).clamp(min=0), attend)

    def prefill(self, ids: torch.Tensor, pad: torch.Tensor, copies: int, room: int) -> torch.Tensor:
        """ids [G, P], left-padded by pad [G]; returns logits [G·copies, V]. The copies of a prompt will share its keys and values."""
        self.open(ids, pad, copies, room)
        return self.read(ids, 0).repeat_interleave(copies, 0)

    def resume(self, ids: torch.Tensor, pad: torch.Tensor, caches: list[torch.Tensor], room: int) -> torch.Tensor:
        """As prefill with one copy, but a row's first tokens are in its cache: ids [B, P] -> logits [B, V].

        Every row runs its last S tokens, as many as the row with the most new ones needs. Rows with fewer new tokens run some old ones again:
        the same tokens at the same places give the same keys, so that is a little work and no harm.
        What it wins: 64 alphabet episodes of three turns took pico_base 2.5 s instead of 4.8 (one run, two threads, the same tokens).
        """
        known = torch.tensor([c.shape[3] for c in caches], device=ids.device)
        S = int((ids.shape[1] - pad - known).max())
        self.open(ids, pad, 1, room)
        for row, (cache, start) in enumerate(zip(caches, pad.tolist())):
            for prompts, kept in zip(self.prompts, cache):
                prompts[:, row, :, :start] = 0  # masked; but 0 · garbage may be NaN
                prompts[:, row, :, start : start + cache.shape[3]] = kept
        return self.read(ids[:, -S:], ids.shape[1] - S)

    def open(self, ids: torch.Tensor, pad: torch.Tensor, copies: int, room: int) -> None:
        """Empty caches: a line for each prompt, where its keys lie once, and in it a place for the own tokens of each copy."""
        (G, P), H, d, device = ids.shape, self.n_kv, self.head_dim, ids.device
        empty = lambda *shape: [torch.empty(shape, dtype=self.embed.dtype, device=device) for _ in self.layers]
        self.prompts, self.own = empty(2, G, H, P, d), empty(2, G, H, copies, room, d)  # keys and values
        self.pad, self.slot = pad, 0
        self.place = torch.arange(G * copies, device=device)  # [B] where a row's own tokens are: line · copies + column
        cos, sin = self.trunk.rotary_emb(self.embed[:1], torch.arange(P + room, device=device)[None])  # [1, P+room, d] each
        self.turns = torch.complex(cos[0].float(), sin[0].float())[:, : d // 2].contiguous()  # [P+room, d/2]: the halves were alike
        self.columns = copies
        self.look_up()

    def look_up(self) -> None:
        """The tables by which `step` brings heads [B, Hq+2Hkv, d] into the order of the caches, [lines, Hkv, columns, …], and back."""
        lines, columns, device = len(self.pad), self.columns, self.place.device
        H, g = self.n_kv, self.n_q // self.n_kv
        # Who is at a place. Where nobody is, row 0 works once more, and nobody reads what it finds.
        row = self.place.new_zeros(lines * columns)
        row[self.place] = torch.arange(len(self.place), device=device)
        line, column = self.place // columns, self.place % columns  # [B]
        h, j = torch.arange(H, device=device)[:, None], torch.arange(g, device=device)
        first = row.view(lines, 1, columns) * (self.n_q + 2 * H)  # the row's first query, of all heads in a line
        self.q_from = (first[..., None] + h[..., None] * g + j).flatten()  # [lines·Hkv·columns·g]
        self.kv_from = torch.stack([first + self.n_q + h, first + self.n_q + H + h]).flatten()  # [2·lines·Hkv·columns]
        self.back = (((line[:, None, None] * H + h) * columns + column[:, None, None]) * g + j).flatten()  # [B·Hkv·g]
        P = self.prompts[0].shape[3]
        self.position = P - self.pad[line]  # [B] of a row's first own token
        hide = torch.zeros(lines, 1, P, dtype=self.embed.dtype, device=device)
        hide.masked_fill_(torch.arange(P, device=device) < self.pad[:, None, None], -torch.inf)
        self.hide = hide.repeat_interleave(H, 0)  # [lines·Hkv, 1, P] is added to the scores

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [B], the tokens just sampled; returns the logits of the next ones [B, V].

        A row looks at its prompt and at its own tokens. All rows of a line look at its prompt in one matrix product, which reads the keys from memory
        once and not once a row (as in Hydragen, Juravsky et al. 2024, §3): on a CPU memory is what attention waits for. One softmax over both parts.
        64 rows of pico_base, 8 to a prompt, each with a copy of its prompt instead: 1.15 times the time to their end-of-turn token, 1.16 to 256 tokens.
        """
        t, d, g = self.slot, self.head_dim, self.n_q // self.n_kv
        lines = len(self.pad) * self.n_kv  # a head of keys in a line
        n = lines * self.columns  # and in one of its places
        P = self.hide.shape[-1]

        def attend(layer, heads):
            flat, own = heads.view(-1, d), self.own[layer].view(2, n, -1, d)
            own[:, :, t] = flat.index_select(0, self.kv_from).view(2, n, d)
            q = flat.index_select(0, self.q_from) * d**-0.5  # [n·g, d]
            (keys, values), (far_keys, far_values) = own[:, :, : t + 1], self.prompts[layer].view(2, lines, P, d)
            far = torch.baddbmm(self.hide, q.view(lines, -1, d), far_keys.transpose(1, 2))  # [lines, columns·g, P]
            near = q.view(n, g, d) @ keys.transpose(1, 2)  # [n, g, t+1]
            weights = torch.cat([far.view(n, g, P), near], -1).softmax(-1)  # [n, g, P+t+1]
            out = weights[..., :P].view(lines, -1, P) @ far_values  # [lines, columns·g, d]
            out = torch.baddbmm(out.view(n, g, d), weights[..., P:], values)
            return out.view(-1, d).index_select(0, self.back).view(len(ids), -1)

        logits = self.forward(ids[:, None], (self.position + t)[:, None], attend)
        self.slot = t + 1
        return logits

    def forget(self) -> None:
        """Give the memory of the caches back."""
        self.prompts, self.own = [], []

    def take(self, places: torch.Tensor) -> list[torch.Tensor]:
        """The caches of these rows, keys and values [L, 2, Hkv, n, d] each, for a later resume."""
        where = [divmod(place, self.columns) for place in self.place[places].tolist()]
        return [torch.stack([torch.cat([prompts[:, line, :, self.pad[line] :], own[:, line, :, column, : self.slot]], 2)
                             for prompts, own in zip(self.prompts, self.own)]) for line, column in where]  # fmt: skip

    def move(self, source: torch.Tensor, target: torch.Tensor, n: int) -> None:
        """Rows `source` take the names `target` of rows that ended; n rows are left. What they said stays where it is, until a quarter of the places
        or more would be saved by packing: the prompts that still have rows, as many columns as one of them has rows at most.

        (Packing at every chance or only at half was 3 to 6% slower, 64 rows of pico_base with real stopping. A prompt with many rows in several
        lines, so that fewer places are empty: no gain.)
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
        """New caches for these lines alone, with so many columns. A place that stays free gets what the line's first row has."""
        lines, device = torch.tensor(list(rows), device=self.place.device), self.place.device
        seats = torch.tensor([some + some[:1] * (columns - len(some)) for some in rows.values()], device=device)  # [lines, columns] rows
        seat = (self.place % self.columns)[seats][:, None]  # [lines, 1, columns] the old column of each
        head = torch.arange(self.n_kv, device=device)[:, None]
        for i, own in enumerate(self.own):
            self.own[i] = own.new_empty(2, len(rows), self.n_kv, columns, *own.shape[4:])
            self.own[i][..., : self.slot, :] = own[:, lines[:, None, None], head, seat, : self.slot]
            self.prompts[i] = self.prompts[i][:, lines]
        self.pad, self.columns = self.pad[lines], columns
        for i, some in enumerate(rows.values()):
            self.place[some] = torch.arange(len(some), device=device) + i * columns


class PlainDecoder:
    """sync, prefill, step, forget and move by the Hugging Face model itself: slower, and right for every causal LM.

    Each row has a cache of its own here, so there is no resume: a conversation's next turn reads all of it again.
    """

    def __init__(self, policy: Policy):
        self.lm = policy.lm

    def sync(self) -> None:
        pass  # it samples from the policy's own weights

    def prefill(self, ids: torch.Tensor, pad: torch.Tensor, copies: int, room: int) -> torch.Tensor:
        """ids [G, P], left-padded by pad [G]; returns logits [G·copies, V]. transformers' cache grows by itself, whatever `room` says."""
        from transformers import DynamicCache

        self.seen = torch.arange(ids.shape[1], device=ids.device) >= pad[:, None]  # [G, P] attention mask
        self.position = ids.shape[1] - pad  # [G], of the next token
        positions = (torch.cumsum(self.seen, 1) - 1).clamp(min=0)
        out = self.lm(
            input_ids=ids, attention_mask=self.seen.long(), position_ids=positions,
            past_key_values=DynamicCache(config=self.lm.config), use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        self.cache = out.past_key_values
        self.cache.batch_repeat_interleave(copies)
        self.seen, self.position = self.seen.repeat_interleave(copies, 0), self.position.repeat_interleave(copies)
        return out.logits[:, -1].float().repeat_interleave(copies, 0)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [B], the tokens just sampled; returns the logits of the next ones [B, V]."""
        self.seen = torch.cat([self.seen, torch.ones_like(self.seen[:, :1])], 1)
        out = self.lm(
            input_ids=ids[:, None], attention_mask=self.seen.long(), position_ids=self.position[:, None],
            past_key_values=self.cache, use_cache=True,
        )  # fmt: skip
        self.position = self.position + 1
        return out.logits[:, -1].float()

    def forget(self) -> None:
        self.cache = None

    def move(self, source: torch.Tensor, target: torch.Tensor, n: int) -> None:
        order = torch.arange(len(self.position), device=source.device)
        order[target] = source
        self.cache.batch_select_indices(order[:n])
        self.seen, self.position = self.seen[order[:n]], self.position[order[:n]]


def holes(ended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """ended [n] bool -> (source, target, left): `left` rows live on; those behind the first `left` places move from source to target."""
    left = int((~ended).sum())
    return torch.nonzero(~ended[left:])[:, 0] + left, torch.nonzero(ended[:left])[:, 0], left


def folded(linear: torch.nn.Module) -> torch.Tensor:
    """The weight [out, in] that a linear layer computes with: W, or W + scale · B A where LoRA sits on it."""
    if not hasattr(linear, "lora_A"):
        return linear.weight.clone()
    weight = linear.base_layer.weight.float()
    for name in linear.active_adapters:
        weight = weight + linear.scaling[name] * (linear.lora_B[name].weight @ linear.lora_A[name].weight).float()
    return weight.to(linear.base_layer.weight.dtype)


def grows(config) -> bool:
    """Do RoPE's angles depend on how long the text is? The table of `open` is of one length."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type") in ("dynamic", "longrope")


def make_decoder(policy: Policy):
    """The fast decoder if it computes what the model computes, else the plain one."""
    config = policy.lm.config
    plain = PlainDecoder(policy)
    try:
        fast = FastDecoder(policy)
        ids = torch.arange(1, 17, device=policy.device)[None] % config.vocab_size  # [1, 16]
        pad = torch.zeros(1, dtype=torch.long, device=policy.device)
        with torch.no_grad():
            a = torch.cat([fast.prefill(ids, pad, 1, 1), fast.step(ids[:, 0])]).log_softmax(-1)
            b = torch.cat([plain.prefill(ids, pad, 1, 1), plain.step(ids[:, 0])]).log_softmax(-1)
        if fast.embed.dtype == torch.float32:
            same = (a - b).abs().max() < 1e-4
        else:  # bfloat16 rounds a logit of 20 by 0.06, and unlikely tokens' by as much: what counts is how far off a sampled token's log-prob is
            same = (b.exp() * (a - b).abs()).sum(-1).max() < 0.1
        if (
            same and attends_to_all(config) and not grows(config)
        ):  # a short test prompt shows neither a window nor turns that change with length
            return fast
    except torch.OutOfMemoryError:
        raise  # it is a RuntimeError too, and says nothing about the architecture
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError):
        pass  # another architecture: no such layers, other shapes
    return plain


if __name__ == "__main__":
    import time

    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    rng, (G, k, P, steps) = torch.Generator().manual_seed(0), (4, 8, 100, 40)
    prompts = torch.randint(11, 1024, (G, P), generator=rng)  # [G, P]
    pad = torch.tensor([0, 3, 10, 40])  # as if the last three were shorter
    said = torch.randint(11, 1024, (steps, G * k), generator=rng)  # the same tokens for both: a row a sample
    found, seconds = {}, {}
    with torch.inference_mode():
        for decoder in (PlainDecoder(policy), FastDecoder(policy)):
            name, started = type(decoder).__name__, time.perf_counter()
            logits = [decoder.prefill(prompts, pad, k, steps), *(decoder.step(tokens) for tokens in said)]  # steps+1 of [G*k, V]
            found[name], seconds[name] = torch.stack(logits).log_softmax(-1), time.perf_counter() - started
    gap = (found["PlainDecoder"] - found["FastDecoder"]).abs().max().item()
    print(f"{G} prompts of up to {P} tokens, {k} samples each, {steps} steps; log-probs differ by {gap:.0e} at most")
    for name in found:
        print(f"{name:13} {1000 * seconds[name] / steps:5.1f} ms a step of {G * k} rows")
    print("chosen for pico_base:", type(make_decoder(policy)).__name__)
    assert gap < 1e-4
