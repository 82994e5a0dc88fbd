"""The sampler: token ids in, sampled token ids out, with the log-prob of each.

RL spends most of its time here, so this is where speed is won. `model.generate` is general and pays
for it at every token. This file does one thing:

    prefill the prompts -> logits -> draw one token per row -> drop finished rows
                             ^                                        |
                             +-- step with the rows that are left <---+

A decoder (fast/decoder.py) reads the prompts and takes the steps. Each row brings its own random
numbers, one per token, so it does not depend on its neighbours: the same seed gives the same
sample, whatever else is in the batch. policy.PlainSampler is the same without tricks.

Run me: `python -m fast.sampler` samples four answers to one question and checks their log-probs.
"""

from contextlib import contextmanager

import numpy as np
import torch

from fast.decoder import FastDecoder, Kept
from fast.decoders import holes, make_decoder
from fast.memory import CannotGoOn, out_of_memory
from policy import Policy, Sample, draw, first_line, plain_logprobs

SLICE = 32  # conversations of an evaluation at a time, on a card: a batch of a small model's


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
        keep: give each sample its cache, for the conversation's next turn. caches[g] is what an
        earlier call gave for the beginning of prompt g (then k is 1); a list's memory is given back
        while it is copied. Both only save time, and an engine may ignore them. Out of
        memory? First the kept caches go, then the rows are halved.
        CannotGoOn with a one-sentence message if not even one prompt fits.
        """
        out, tokens = [], k * sum(map(len, prompts))
        groups = max(1, self.max_rows // k)
        caches = caches if caches and k == 1 else [None] * len(prompts)
        caches = [list(c) if isinstance(c, Kept) else c for c in caches]  # a Kept stays its owner's
        keep = keep and tokens < self.most_kept and isinstance(self.decoder, FastDecoder)
        # Prompts of similar length share a batch, which saves padding and changes no sample.
        order = sorted(range(len(prompts)), key=lambda g: len(prompts[g]))
        while len(out) < len(order):
            some = order[len(out) : len(out) + groups]
            batch, batch_seeds = [prompts[g] for g in some], [seeds[g] for g in some]
            known, holds = [caches[g] for g in some], keep or any(caches)
            try:
                out += self._batch(batch, k, max_tokens, temperature, batch_seeds, known, keep)
                continue
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                if len(some) == 1 and not holds:
                    what = f"{k} replies of {max_tokens} tokens to one prompt ({first_line(error)})"
                    raise CannotGoOn(
                        f"the card has not enough memory for {what}; lower --k or --max-tokens"
                    ) from error
            # Out here, because the exception keeps the failed batch alive. Later calls remember.
            self.decoder.forget()
            if holds:
                self.most_kept, keep = min(tokens, self.most_kept), False
                for cache in filter(None, caches):
                    cache.clear()
                for sample in (s for samples in out for s in samples):
                    sample.cache = None
            else:
                groups = (len(some) + 1) // 2
                self.max_rows = groups * k
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return [samples for _, samples in sorted(zip(order, out), key=lambda pair: pair[0])]

    def _batch(self, prompts, k, max_tokens, temperature, seeds, known, keep):
        self.decoder.forget()  # the cache of the batch before
        G, B, device = len(prompts), len(prompts) * k, self.policy.device
        P = max(map(len, prompts))
        ids = torch.tensor([[0] * (P - len(p)) + p for p in prompts], device=device)  # [G, P]
        pad = torch.tensor([P - len(p) for p in prompts], device=device)  # [G]
        uniforms = np.zeros((B, max_tokens))
        if temperature > 0:
            for row, seed in enumerate(seed for group in seeds for seed in group):
                uniforms[row] = np.random.default_rng(seed).random(max_tokens)
        uniforms = torch.tensor(uniforms, dtype=torch.float32, device=device)  # [B, max_tokens]
        stops = torch.tensor(sorted(self.policy.stop_ids), device=device)

        # What was sampled, by original row. `row` [n] says which of them sits in each live place.
        tokens = torch.zeros((B, max_tokens), dtype=torch.long, device=device)
        logps = torch.zeros((B, max_tokens), device=device)
        lengths = torch.full((B,), max_tokens, device=device)
        finished = torch.zeros(B, dtype=torch.bool, device=device)
        row = torch.arange(B, device=device)
        kept: list[list | None] = [None] * B
        if all(known):
            logits = self.decoder.resume(ids, pad, known, max_tokens)  # [B, V]
        else:
            for cache in filter(None, known):  # of some rows only: all are read again
                cache.clear()
            logits = self.decoder.prefill(ids, pad, k, max_tokens)  # [B, V]
        for t in range(max_tokens):
            new, logp = draw(logits, uniforms[row, t], temperature)  # [n], [n]
            tokens[row, t], logps[row, t] = new, logp
            ended = torch.isin(new, stops)  # [n]
            if ended.any():  # on a GPU it waits for the answer, once per token
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
        tokens, logps, finished = (x.cpu().numpy() for x in (tokens, logps, finished))
        rows = [
            Sample(tokens[b, :n].tolist(), logps[b, :n].tolist(), bool(finished[b]), kept[b])
            for b, n in enumerate(lengths.tolist())
        ]
        return [rows[g * k : (g + 1) * k] for g in range(G)]


def sample_each(
    sampler, prompts: list[list[int]], seeds: list[tuple], caches: list, max_tokens: int,
    temperature: float, keep: bool,
) -> list[Sample]:  # fmt: skip
    """One sample per prompt, [n]; equal prompts that nothing was read of yet are read once.

    prompts [n] of token ids; seeds [n]: what each sample draws its random numbers from; caches [n]:
    what an earlier sample kept of its prompt, or None. keep: keep caches for the next turn.
    """
    alike: dict[tuple, list[int]] = {}
    for i, (prompt, cache) in enumerate(zip(prompts, caches)):
        alike.setdefault((i, "cached") if cache else tuple(prompt), []).append(i)
    found: dict[int, Sample] = {}
    for k in sorted({len(some) for some in alike.values()}):  # one k, unless an environment failed
        groups = [some for some in alike.values() if len(some) == k]
        samples = sampler.sample(
            [prompts[group[0]] for group in groups], k, max_tokens, temperature,
            [[seeds[i] for i in group] for group in groups],
            caches=[caches[group[0]] for group in groups], keep=keep,
        )  # fmt: skip
        for group, some in zip(groups, samples):
            found |= dict(zip(group, some))
    for sample in found.values():  # as lists, so that their memory can be given back
        sample.cache = sample.cache and list(sample.cache)
    return [found[i] for i in range(len(prompts))]


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
