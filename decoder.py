"""Decoders: one step of a language model for many rows at once, with the keys and values of what was read before.

    prefill   run each *prompt* once and keep its keys and values (the KV cache)
    share     its k samples all look at the one cache of their prompt, and each has a cache of its own for what it says
    step      one token for every row: attend to both, append to its own
    move      a row that ended is overwritten by the last live row, so no step is spent on finished rows
    resume    in a conversation, a row's cache is kept for its next turn, and only what is new is read

Prompts are padded on the left, so that all end at the same place. sampler.py is the loop around it: which token is drawn, who has ended.

`FastDecoder` is our own forward pass for the Llama/Qwen family: LoRA folded into a private copy of the weights, q, k and v in one matrix
product, gate and up in another (`python -m lab.bench_peers sampler` measures what it wins over model.generate and others). `PlainDecoder`
calls the Hugging Face model, so any causal LM works. The fast one is chosen only if its log-probs are those of the model on a test prompt,
but for rounding.

Run me: `python decoder.py` lets both read the same prompts and step side by side, and compares numbers and time.
"""

import torch
import torch.nn.functional as F

from logprobs import attends_to_all
from policy import Policy


class FastDecoder:
    """Our forward pass for decoders of the Llama/Qwen family, on a private copy of the weights with LoRA folded in.

    In the shapes below: G prompts of P tokens, B rows (G · k samples, fewer as they end), L layers, D channels, Hq heads of queries and
    Hkv of keys with d channels each, a vocabulary of V.
    """

    def __init__(self, policy: Policy):
        self.lm = policy.lm
        self.trunk = getattr(self.lm, self.lm.base_model_prefix)
        self.config = self.lm.config
        first = self.trunk.layers[0].self_attn
        self.head_dim = first.head_dim
        self.n_kv = self.config.num_key_value_heads
        self.n_q = self.config.num_attention_heads
        self.eps = self.config.rms_norm_eps
        self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the current weights. The policy's own are only read."""

        def join(*linears):  # several projections of the same input become one
            biases = [linear.bias for linear in linears]
            bias = None if biases[0] is None else torch.cat(biases).clone()
            return torch.cat([folded(linear) for linear in linears]), bias

        self.layers = []
        for layer in self.trunk.layers:
            a, m = layer.self_attn, layer.mlp
            scale = torch.ones(self.n_q + self.n_kv, self.head_dim, device=folded(a.q_proj).device)
            if hasattr(a, "q_norm"):  # Qwen3 normalises queries and keys; q's and k's heads go through it together
                scale = torch.cat([a.q_norm.weight.expand(self.n_q, -1), a.k_norm.weight.expand(self.n_kv, -1)]).clone()
            self.layers.append(
                {
                    "norm1": layer.input_layernorm.weight.clone(), "norm2": layer.post_attention_layernorm.weight.clone(),
                    "qkv": join(a.q_proj, a.k_proj, a.v_proj), "o": join(a.o_proj), "qk_scale": scale,
                    "qk_norm": hasattr(a, "q_norm"), "gate_up": join(m.gate_proj, m.up_proj), "down": join(m.down_proj),
                }
            )  # fmt: skip
        self.embed = self.trunk.embed_tokens.weight.clone()
        self.norm = self.trunk.norm.weight.clone()
        tied = self.lm.get_output_embeddings().weight is self.trunk.embed_tokens.weight
        self.head = self.embed if tied else self.lm.get_output_embeddings().weight.clone()

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend) -> torch.Tensor:
        """Run ids [B, S] at positions [B, S]; returns logits of the last position [B, V].

        attend(layer, q [B, S, Hq, d], k, v [B, S, Hkv, d]) -> [B, S, Hq·d] stores the keys and values, and looks at them and at those before.
        """
        B, S = ids.shape
        x = F.embedding(ids, self.embed)  # [B, S, D]
        cos, sin = self.trunk.rotary_emb(x, positions.clamp(min=0))  # [B, S, d] each
        cos, sin = cos[:, :, None], sin[:, :, None]  # [B, S, 1, d]
        n_qk, half = self.n_q + self.n_kv, self.head_dim // 2
        for layer, w in enumerate(self.layers):
            h = F.rms_norm(x, x.shape[-1:], w["norm1"], self.eps)
            qkv = F.linear(h, *w["qkv"]).view(B, S, n_qk + self.n_kv, self.head_dim)
            qk = qkv[:, :, :n_qk]  # [B, S, Hq+Hkv, d]
            if w["qk_norm"]:
                qk = F.rms_norm(qk, qk.shape[-1:], None, self.eps) * w["qk_scale"]
            qk = qk * cos + torch.cat([-qk[..., half:], qk[..., :half]], -1) * sin  # RoPE (Su et al. 2021, §3.4)
            out = attend(layer, qk[:, :, : self.n_q], qk[:, :, self.n_q :], qkv[:, :, n_qk:])
            x = x + F.linear(out, *w["o"])
            h = F.rms_norm(x, x.shape[-1:], w["norm2"], self.eps)
            gate, up = F.linear(h, *w["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, *w["down"])
        x = F.rms_norm(x[:, -1], x.shape[-1:], self.norm, self.eps)
        return F.linear(x, self.head).float()

    def read(self, ids: torch.Tensor, slot: int) -> torch.Tensor:
        """Run the prompts' tokens ids [G, S], whose keys go to slots slot … slot+S-1 of the prompts' cache; returns logits [G, V]."""
        G, S = ids.shape
        here = torch.arange(slot, slot + S, device=ids.device)  # [S]
        key = torch.arange(slot + S, device=ids.device)
        # Key j is visible to query i if j <= i and j is no padding. Padding sees itself: a row without any key would be NaN.
        mask = (key <= here[:, None]) & (key >= self.pad[:, None, None]) | (key == here[:, None])  # [G, S, slot+S]

        def attend(layer, q, k, v):
            keys, values = self.keys[layer], self.values[layer]  # [G, Hkv, P, d]
            keys[:, :, slot : slot + S], values[:, :, slot : slot + S] = k.transpose(1, 2), v.transpose(1, 2)
            seen = keys[:, :, : slot + S], values[:, :, : slot + S]
            out = F.scaled_dot_product_attention(q.transpose(1, 2), *seen, attn_mask=mask[:, None], enable_gqa=True)
            return out.transpose(1, 2).reshape(G, S, -1)

        return self.forward(ids, here - self.pad[:, None], attend)

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
        known = torch.tensor([c.shape[2] for c in caches], device=ids.device)
        S = int((ids.shape[1] - pad - known).max())
        self.open(ids, pad, 1, room)
        for row, (cache, start) in enumerate(zip(caches, pad.tolist())):
            n = cache.shape[2]
            for layer, wide in enumerate(self.keys + self.values):
                wide[row, :, :start] = 0  # masked; but 0 · garbage may be NaN
                wide[row, :, start : start + n] = cache[layer]
        return self.read(ids[:, -S:], ids.shape[1] - S)

    def open(self, ids: torch.Tensor, pad: torch.Tensor, copies: int, room: int) -> None:
        """Empty caches: one for the prompts, which copies share, and one for each row's own tokens."""
        (G, P), device = ids.shape, ids.device
        make = lambda n, length: [
            torch.empty((n, self.n_kv, length, self.head_dim), dtype=self.embed.dtype, device=device) for _ in self.layers
        ]
        self.keys, self.values = make(G, P), make(G, P)  # of the prompts
        self.own_keys, self.own_values = make(G * copies, room), make(G * copies, room)
        self.pad, self.prompt, self.slot = pad, torch.arange(G, device=device).repeat_interleave(copies), 0
        self.sort()

    def sort(self) -> None:
        """Who belongs to which prompt: self.prompt [n] -> member [G, C], the rows of every prompt, and spot [n], where a row stands in that table.

        A prompt with fewer than C rows fills its line with row 0, whose results there nobody reads.
        """
        n, G = len(self.prompt), int(self.prompt.max()) + 1
        counts = torch.bincount(self.prompt, minlength=G)  # [G]
        order = self.prompt.argsort(stable=True)  # [n]
        column = torch.arange(n, device=order.device) - (counts.cumsum(0) - counts)[self.prompt[order]]
        C = int(counts.max())
        self.member = order.new_zeros(G, C)
        self.member[self.prompt[order], column] = order
        self.spot = torch.empty_like(order)
        self.spot[order] = self.prompt[order] * C + column
        padding = torch.arange(self.keys[0].shape[2], device=order.device) < self.pad[:G, None]  # [G, P]
        self.hide = padding[:, None, None] if padding.any() else None  # [G, 1, 1, P]

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [B], the tokens just sampled; returns the logits of the next ones [B, V].

        A row looks at its prompt and at its own tokens. All rows of a prompt look at it in one matrix product, which reads its keys from memory
        once and not once a row (as in Hydragen, Juravsky et al. 2024, §3): on a CPU memory is what attention waits for. One softmax over both
        parts. 64 rows of pico_base took 0.90 of the time (to their end-of-turn token, and to 256 tokens; 1 thread), and a long prompt is held once.
        """
        B, t, scale = len(ids), self.slot + 1, self.head_dim**-0.5
        (G, C), Hkv, g, d = self.member.shape, self.n_kv, self.n_q // self.n_kv, self.head_dim
        P = self.keys[0].shape[2]

        def attend(layer, q, k, v):
            keys, values = self.own_keys[layer][:B], self.own_values[layer][:B]  # [B, Hkv, room, d]
            keys[:, :, self.slot], values[:, :, self.slot] = k[:, 0], v[:, 0]
            q = (q * scale).view(B, Hkv, g, d)
            by_prompt = q[self.member].transpose(1, 2).reshape(G, Hkv, C * g, d)
            scores = by_prompt @ self.keys[layer][:G].transpose(2, 3)  # [G, Hkv, C·g, P]
            if self.hide is not None:
                scores.masked_fill_(self.hide, -torch.inf)
            scores = scores.view(G, Hkv, C, g, P).transpose(1, 2).reshape(G * C, Hkv, g, P)[self.spot]  # [B, Hkv, g, P]
            weights = torch.cat([scores, q @ keys[:, :, :t].transpose(2, 3)], -1).softmax(-1)  # [B, Hkv, g, P+t]
            by_prompt = weights[..., :P][self.member].transpose(1, 2).reshape(G, Hkv, C * g, P)
            out = (by_prompt @ self.values[layer][:G]).view(G, Hkv, C, g, d).transpose(1, 2).reshape(G * C, Hkv, g, d)[self.spot]
            return (out + weights[..., P:] @ values[:, :, :t]).view(B, 1, -1)

        logits = self.forward(ids[:, None], (P - self.pad[self.prompt] + self.slot)[:, None], attend)
        self.slot = t
        return logits

    def forget(self) -> None:
        """Give the memory of the caches back."""
        self.keys, self.values, self.own_keys, self.own_values = [], [], [], []

    def take(self, places: torch.Tensor) -> list[torch.Tensor]:
        """The caches of these rows, [2L, Hkv, n, d] each, for a later resume."""
        whole = lambda i, g: [torch.cat([c[g, :, self.pad[g] :], o[i, :, : self.slot]], 1)
                              for c, o in zip(self.keys + self.values, self.own_keys + self.own_values)]  # fmt: skip
        return [torch.stack(whole(i, g)) for i, g in zip(places.tolist(), self.prompt[places].tolist())]

    def move(self, source: torch.Tensor, target: torch.Tensor, n: int) -> None:
        """Rows `source` take the places `target` of rows that ended; n rows are left. Then the same for prompts that no row looks at any more."""
        for cache in self.own_keys + self.own_values:
            cache[target, :, : self.slot] = cache[source, :, : self.slot]
        self.prompt[target] = self.prompt[source]
        self.prompt = self.prompt[:n]
        gone = torch.bincount(self.prompt, minlength=len(self.member)) == 0  # [G]
        if gone.any():
            source, target, _ = holes(gone)
            for cache in self.keys + self.values:
                cache[target] = cache[source]
            self.pad[target] = self.pad[source]
            name = torch.arange(len(gone), device=gone.device)
            name[source] = target
            self.prompt = name[self.prompt]
        self.sort()


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
        tolerance = 1e-4 if fast.embed.dtype == torch.float32 else 0.1
        if (a - b).abs().max() < tolerance and attends_to_all(config):  # a short test prompt does not show a window
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
