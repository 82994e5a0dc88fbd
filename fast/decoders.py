"""Which decoder: our own forward pass if it computes what the model computes, else the model's.

`PlainDecoder` has the interface of fast/decoder.py's `FastDecoder` and calls the model itself, so
any causal LM works. `make_decoder` tries the fast one on a test prompt, and takes it only if its
log-probs are the model's, but for rounding.

Run me: `python -m fast.decoders` steps both side by side and compares numbers and time.
"""

import torch

from fast.decoder import FastDecoder
from fast.logprobs import attends_to_all, grows
from policy import Policy, first_line


class PlainDecoder:
    """The same interface on the Hugging Face model itself: slower, and right for every causal LM.

    There is no resume: a conversation's next turn reads all of it again.
    """

    def __init__(self, policy: Policy):
        self.lm = policy.lm

    def sync(self) -> None:
        pass  # it samples from the policy's own weights

    def prefill(self, ids: torch.Tensor, pad: torch.Tensor, copies: int, room: int):
        """ids [G, P], left-padded by pad [G] -> logits [G·copies, V]. The cache needs no `room`."""
        from transformers import DynamicCache

        here = torch.arange(ids.shape[1], device=ids.device)
        self.seen = here >= pad[:, None]  # [G, P] attention mask
        self.position = ids.shape[1] - pad  # [G], of the next token
        positions = (torch.cumsum(self.seen, 1) - 1).clamp(min=0)
        self.cache = DynamicCache(config=self.lm.config)
        logits = self.run(ids, positions, logits_to_keep=1).repeat_interleave(copies, 0)
        self.pick(torch.arange(len(ids), device=ids.device).repeat_interleave(copies))
        return logits

    def pick(self, rows: torch.Tensor) -> None:
        """Go on with these rows. reorder_cache is what every kind of layer has, hybrid ones too."""
        self.cache.reorder_cache(rows)
        self.seen, self.position = self.seen[rows], self.position[rows]

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

    def forget(self) -> None:
        self.cache = None

    def move(self, source: torch.Tensor, target: torch.Tensor, n: int) -> None:
        order = torch.arange(len(self.position), device=source.device)
        order[target] = source
        self.pick(order[:n])


def holes(ended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """ended [n] bool -> (source, target, left): how to close the gaps that finished rows leave.

    `left` rows live on. Those behind the first `left` places move from source to target.
    """
    left = int((~ended).sum())
    source = torch.nonzero(~ended[left:])[:, 0] + left
    return source, torch.nonzero(ended[:left])[:, 0], left


def make_decoder(policy: Policy):
    """The fast decoder if it computes what the model computes, else the plain one; `why` tells.

    Raises what the card or its memory did wrong: that says nothing about the architecture.
    """
    fast, why = None, ""
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


# A card that is out of memory, or has met an error.
CARD = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
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
    own, other = (logprobs(*how) for how in ((plain, 5), (fast, 0)))
    fast.forget()
    if fast.embed.dtype == torch.float32:
        return (other - exact).abs().max().item(), (own - exact).abs().max().item()
    mean = lambda x: (exact.exp() * (x - exact).abs()).sum(-1).mean().item()
    return mean(other), mean(own)


if __name__ == "__main__":
    import time

    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    rng, (G, k, P, steps) = torch.Generator().manual_seed(0), (4, 8, 100, 40)
    prompts = torch.randint(11, 1024, (G, P), generator=rng)  # [G, P]
    pad = torch.tensor([0, 3, 10, 40])  # as if the last three were shorter
    said = torch.randint(11, 1024, (steps, G * k), generator=rng)  # the same tokens for both
    found = []
    for decoder in (PlainDecoder(policy), FastDecoder(policy)):
        started = time.perf_counter()
        with torch.inference_mode():
            logits = [decoder.prefill(prompts, pad, k, steps), *map(decoder.step, said)]
        seconds = time.perf_counter() - started
        print(
            f"{type(decoder).__name__:13} {1000 * seconds / steps:.1f} ms per step of {G * k} rows"
        )
        found.append(torch.stack(logits).log_softmax(-1))  # [steps+1, G*k, V]
    gap = (found[0] - found[1]).abs().max().item()
    print(f"{G} prompts, {k} samples each, {steps} steps; log-probs differ by {gap:.0e} at most")
    print("chosen for pico_base:", make_decoder(policy).why)
    assert gap < 1e-4
