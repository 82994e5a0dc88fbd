"""The sampler: token ids in; sampled token ids and the log-prob of each out.

In RL most of the time goes into sampling, so this is where speed is won. `model.generate` is general and pays for
it at every token; this does one thing. The whole of it:

    prefill   run each *prompt* once and keep its keys and values (the KV cache)
    share     its k samples all look at the one cache of their prompt, and each has a cache of its own for what it says
    step      one token for every row: attend to both, append to its own
    leave     a row that ends is overwritten by the last live row, so no step is spent on finished rows
    resume    in a conversation, a row's cache is kept for its next turn, and only what is new is read

Prompts are padded on the left, so that all end at the same place.

Two decoders stand behind that loop. `FastDecoder` is our own forward pass for the Llama/Qwen family: LoRA folded
into a private copy of the weights, q, k and v in one matrix product, gate and up in another (`python -m lab.bench_peers sampler`
measures what it wins over model.generate and others). `PlainDecoder` calls the Hugging Face model, so any causal LM works. The fast one
is chosen only if its log-probs are those of the model on a test prompt, but for rounding.

Same seed, same sample, whatever the batch: each row brings its own random numbers (one uniform a token, by
inverse CDF), so a row does not depend on its neighbours.

Run me: `python sampler.py` samples four answers to one question and checks their log-probs.
"""

import importlib.util
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import parallel
from logprobs import attends_to_all, token_logprobs
from policy import Policy, first_line


@dataclass
class Sample:
    token_ids: list[int]  # the end-of-turn token included, if it came
    logprobs: list[float]  # of each token, in nats, under the distribution it was drawn from (temperature included)
    finished: bool  # False: max_tokens came before the end-of-turn token
    cache: torch.Tensor | None = None  # if asked for: keys and values [2L, Hkv, n, d] of the conversation's first n tokens


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


def draw(logits: torch.Tensor, uniform: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token a row by inverse CDF (Devroye 1986, §II.2). logits [B, V], uniform [B] in [0, 1) -> tokens [B], log-probs [B] in nats.

    temperature 0 is greedy: the likeliest token, its log-prob that of temperature 1.
    """
    if temperature == 0:
        tokens = logits.argmax(-1)
        logp = logits.log_softmax(-1)
    else:
        logp = (logits / temperature).log_softmax(-1)  # [B, V]
        cdf = logp.exp().cumsum(-1)  # [B, V]; its last entry is 1 but for rounding
        below = torch.nextafter(cdf[:, -1:], torch.zeros_like(cdf[:, -1:]))  # a uniform that rounds to 1 must not fall off the end
        tokens = torch.searchsorted(cdf, torch.minimum(uniform[:, None] * cdf[:, -1:], below), right=True)[:, 0]
        tokens = tokens.clamp(max=logits.shape[-1] - 1)  # NaN falls off the end all the same; its log-prob tells (rollout.take_turn)
    return tokens, logp.gather(-1, tokens[:, None])[:, 0]


class TorchSampler:
    """`sample` is the interface that every engine shares; `sync` makes it sample from the policy's newest weights."""

    def __init__(self, policy: Policy, max_rows: int = 256):
        self.policy = policy
        self.max_rows = max_rows  # rows decoded at once; more need more cache memory
        self.decoder = make_decoder(policy)
        self.version = 0  # which policy it samples from: how many updates that one has seen

    def sync(self, version: int = 0) -> None:
        """Sample from the policy's current weights from now on."""
        self.decoder.sync()
        self.version = version

    @contextmanager
    def asleep(self):
        """`with sampler.asleep():` the trainer works, and the cache of the last batch need not stand in its way."""
        self.decoder.forget()
        yield

    @torch.inference_mode()
    def sample(
        self, prompts: list[list[int]], k: int, max_tokens: int, temperature: float, seeds: list[list[tuple[int, ...]]],
        caches: list[torch.Tensor | None] | None = None, keep: bool = False,
    ) -> list[list[Sample]]:  # fmt: skip
        """k samples of each prompt, [len(prompts)][k]. seeds[g][i]: what sample i of prompt g draws its random numbers from.

        keep: give each sample its cache, for the conversation's next turn; caches[g] is what an earlier call gave for the beginning of
        prompt g (k is 1 then). Both change the time only. An engine that cannot do it may ignore them.
        Raises RuntimeError with one sentence where not even one prompt fits into the card's memory.
        """
        out = []
        groups = max(1, self.max_rows // k)
        # Prompts of similar length share a batch: less padding. The order does not change what is sampled.
        order = sorted(range(len(prompts)), key=lambda g: len(prompts[g]))
        while len(out) < len(order):
            some = order[len(out) : len(out) + groups]
            known = [caches[g] for g in some] if caches and k == 1 else [None]
            try:
                out += self._batch([prompts[g] for g in some], k, max_tokens, temperature, [seeds[g] for g in some], known, keep)
                continue
            except torch.OutOfMemoryError as error:
                if len(some) == 1:
                    raise RuntimeError(f"the card has not enough memory for {k} replies of {max_tokens} tokens to one prompt ({first_line(error)}); "
                                       "lower --k or --max-tokens") from error  # fmt: skip
            groups = (len(some) + 1) // 2  # from here on, in this and all later calls; nothing of the failed try is kept
            self.max_rows = groups * k
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return [samples for _, samples in sorted(zip(order, out), key=lambda pair: pair[0])]

    def _batch(self, prompts, k, max_tokens, temperature, seeds, known, keep) -> list[list[Sample]]:
        self.decoder.forget()  # the cache of the batch before
        G, B, device = len(prompts), len(prompts) * k, self.policy.device
        P = max(map(len, prompts))
        ids = torch.tensor([[0] * (P - len(p)) + p for p in prompts], device=device)  # [G, P]
        pad = torch.tensor([P - len(p) for p in prompts], device=device)  # [G]
        uniforms = np.zeros((B, max_tokens))
        if temperature > 0:
            for row, seed in enumerate(s for group in seeds for s in group):
                uniforms[row] = np.random.default_rng(seed).random(max_tokens)
        uniforms = torch.tensor(uniforms, dtype=torch.float32, device=device)  # [B, max_tokens]
        stops = torch.tensor(sorted(self.policy.stop_ids), device=device)

        tokens = torch.zeros((B, max_tokens), dtype=torch.long, device=device)  # what was sampled, by original row
        logps = torch.zeros((B, max_tokens), device=device)
        lengths = torch.full((B,), max_tokens, device=device)
        finished = torch.zeros(B, dtype=torch.bool, device=device)
        row = torch.arange(B, device=device)  # [n] which original row sits in each live place
        keep = keep and isinstance(self.decoder, FastDecoder)
        kept: list[torch.Tensor | None] = [None] * B
        if all(cache is not None for cache in known):
            logits = self.decoder.resume(ids, pad, known, max_tokens)  # [B, V]
        else:
            logits = self.decoder.prefill(ids, pad, k, max_tokens)  # [B, V]
        for t in range(max_tokens):
            new, logp = draw(logits, uniforms[row, t], temperature)  # [n], [n]
            tokens[row, t], logps[row, t] = new, logp
            ended = torch.isin(new, stops)  # [n]
            if ended.any():  # one host sync a token; on CPU it is free
                lengths[row[ended]], finished[row[ended]] = t + 1, True
                if keep:
                    places = torch.nonzero(ended)[:, 0]
                    for b, cache in zip(row[places].tolist(), self.decoder.take(places)):
                        kept[b] = cache
                source, target, n = holes(ended)
                if n == 0:
                    break
                self.decoder.move(source, target, n)
                row[target], new[target] = row[source], new[source]
                row, new = row[:n], new[:n]
            if t + 1 < max_tokens:
                logits = self.decoder.step(new)
        tokens, logps = tokens.cpu().numpy(), logps.cpu().numpy()
        lengths, finished = lengths.cpu().numpy(), finished.cpu().numpy()
        rows = [Sample(tokens[b, :n].tolist(), logps[b, :n].tolist(), bool(finished[b]), kept[b]) for b, n in enumerate(lengths)]
        return [rows[g * k : (g + 1) * k] for g in range(G)]


def make_sampler(cfg, policy: Policy):
    """The engine that samples from the policy: vLLM where asked for (cfg.engine), or beside a GPU that has it; else our own."""
    beside_a_gpu = policy.device.type == "cuda" and importlib.util.find_spec("vllm")
    if beside_a_gpu and cfg.engine == "auto" and parallel.world() > 1:  # vLLM would take our process group for its own
        print("our own sampler samples, because several processes train; --async-rollouts 1 gives vLLM a process of its own beside each")
        return TorchSampler(policy)
    if cfg.engine == "vllm" or (cfg.engine == "auto" and beside_a_gpu):
        from vllm_engine import VllmSampler

        return VllmSampler(policy, cfg.vllm_memory)
    return TorchSampler(policy)


# ------------------------------------------------------------------------------------------------ shown by each engine's file


def demo_prompt(policy: Policy) -> list[int]:
    """Token ids of a question about letters."""
    question = [{"role": "user", "content": 'Count the letters a, n in "banana". Think first inside <think> and </think> if '
                 "that helps. Then give the counts as JSON inside <answer> and </answer>."}]  # fmt: skip
    return policy.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)


def largest_gap(policy: Policy, prompt: list[int], sample: Sample) -> float:
    """How far a sample's log-probs are from those of a plain forward pass, at most, in nats."""
    ids = torch.tensor([prompt + sample.token_ids], device=policy.device)  # [1, T]
    mask = torch.arange(ids.shape[1] - 1, device=policy.device)[None] >= len(prompt) - 1
    with torch.no_grad():
        again = token_logprobs(policy, ids, mask)[0]
    return (again.cpu() - torch.tensor(sample.logprobs)).abs().max().item()


if __name__ == "__main__":
    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    sampler, prompt = TorchSampler(policy), demo_prompt(policy)
    samples = sampler.sample([prompt], 4, 200, 1.0, [[(0, i) for i in range(4)]])[0]
    for s in samples:
        gap = largest_gap(policy, prompt, s)
        print(f"log-prob {sum(s.logprobs):7.2f}, differs from a plain forward pass by {gap:.0e}   {policy.tokenizer.decode(s.token_ids)!r}")
        assert gap < 1e-4
    print("decoder:", type(sampler.decoder).__name__)
