"""The sampler: token ids in; sampled token ids and the log-prob of each out.

In RL most of the time goes into sampling, so this is where speed is won. `model.generate` is general and pays for it at every token; this
does one thing:

    prefill the prompts -> logits -> draw a token for every row -> who has ended leaves -> step with the others -> logits -> …

What reads and steps is a decoder (fast/decoder.py). Same seed, same sample, whatever the batch: each row brings its own random numbers (one
uniform a token, by inverse CDF), so a row does not depend on its neighbours.

Run me: `python -m fast.sampler` samples four answers to one question and checks their log-probs.
"""

import importlib.util
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from fast import parallel
from fast.decoder import FastDecoder, holes, make_decoder
from fast.logprobs import token_logprobs
from policy import Policy, first_line


@dataclass
class Sample:
    token_ids: list[int]  # the end-of-turn token included, if it came
    logprobs: list[float]  # of each token, in nats, under the distribution it was drawn from (temperature included)
    finished: bool  # False: max_tokens came before the end-of-turn token
    cache: torch.Tensor | None = None  # if asked for: keys and values [L, 2, Hkv, n, d] of the conversation's first n tokens


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
        from fast.vllm_engine import VllmSampler

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
