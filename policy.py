"""The policy: a causal language model, its tokenizer, and its few trainable weights.

    W' = W + (alpha / rank) · B A     LoRA (Hu et al. 2021, §4.1)

W is a matrix of the base model, and frozen. Only A [rank, in] and B [out, rank] learn.

B starts at zero, so the policy starts *exactly* as the base model. `lora_rank=0` trains
every weight instead. The base is never edited in place: in bfloat16, folding LoRA in
(writing W' over W) and out again at every update would lose bits each time. Code that
needs folded weights folds a copy. The embedded `models/pico_base/` (for swarm
`models/pico_swarm/`) loads exactly as `Qwen/Qwen3-4B-Instruct-2507` would: same
classes, same files.

The second half of this file uses a policy the plain way: `plain_forward` computes how
likely each token of a text is, and `PlainSampler` samples a text. A `Backend` says how
an update is computed, by default PLAIN. train.py may pass in the faster one of fast/,
which gives the same numbers.

Run me: `python policy.py` shows how many weights LoRA adds to pico_base, samples one
reply, and finds its log-probs again in one pass over the whole text. `python -m
bridges.export merge runs/NAME out/` turns a trained run into a model of its own.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from chat import read_template

PICO = Path(__file__).resolve().parent / "models" / "pico_base"
# pico_base, trained further on tool calls, which made it worse at lists
PICO_SWARM = PICO.with_name("pico_swarm")
# for strings of 80 to 150 letters (docs/letters.md)
PICO_LONG = PICO.with_name("pico_long")
# a real chat model, 134.5M parameters: `make smollm2` puts it there
SMOLLM2 = PICO.with_name("smollm2")
# {name: path}: a name works in any working directory
EMBEDDED = {p.name: str(p) for p in (PICO, PICO_SWARM, PICO_LONG, SMOLLM2)}


@dataclass
class Policy:
    model: torch.nn.Module  # a PeftModel, or the bare causal LM when lora_rank == 0
    tokenizer: object
    stop_ids: frozenset[int]  # each of these tokens ends a sampled reply
    name: str  # to display: the folder's name, or the hub id
    lora_rank: int  # 0: all weights learn
    device: torch.device
    # recompute activations in the backward pass, to save memory
    checkpointing: bool = False
    today: str = ""  # YYYY-MM-DD, for a chat template that writes the date
    bfloat16: bool = False  # does it compute in bfloat16?

    @property
    def lm(self) -> torch.nn.Module:
        """The causal LM itself (with its LoRA layers inside, if there are any)."""
        return self.model.get_base_model() if self.lora_rank else self.model

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """The trainable weights: {name: weight}."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def n_parameters(self) -> int:
        """Parameters of the model itself, without LoRA."""
        named = self.lm.named_parameters()
        return sum(p.numel() for name, p in named if "lora_" not in name)

    @contextmanager
    def learning(self):
        """`with policy.learning():` around the optimizer steps of SFT and GRPO.

        The model stays in eval mode, without dropout, because we train on the
        distribution that we sampled from. The exception is gradient checkpointing:
        transformers needs training mode for it. A model with dropout is then refused.
        Afterwards the gradients are freed, so that sampling can use their memory.
        """
        self.model.train(self.checkpointing)
        try:
            yield
        finally:
            self.model.eval()
            self.model.zero_grad(set_to_none=True)


def adam(policy: Policy, lr: float) -> torch.optim.Optimizer:
    """AdamW on trainable weights; fused on a GPU, which saves 4 bytes per weight."""
    fused = True if policy.device.type == "cuda" else None
    weights = policy.trainable().values()
    return torch.optim.AdamW(weights, lr=lr, weight_decay=0.0, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def copy_weights(policy: Policy) -> dict[str, torch.Tensor]:
    """{name: weight} of the trainable parameters, as they are now."""
    return {name: p.detach().clone() for name, p in policy.trainable().items()}


@contextmanager
def with_weights(policy: Policy, weights: dict[str, torch.Tensor]):
    """Inside this context the policy has these weights, for example a reference's."""
    parameters = policy.trainable()
    own = {name: p.data for name, p in parameters.items()}
    try:
        for name, p in parameters.items():
            p.data = weights[name]
        yield
    finally:
        for name, p in parameters.items():
            p.data = own[name]


# ------------------------------------------------------------------------------ loading


def load_policy(
    name: str,
    lora_rank: int,
    lora_alpha: int,
    device="auto",
    seed=0,
    today="",
    bfloat16=False,
) -> Policy:
    """Load a causal LM with a chat template, freeze it and attach LoRA.

    name       a folder, a hub id, or one of EMBEDDED
    lora_rank  0: nothing is attached, and all weights learn
    device     "auto": cuda if there is one, else cpu
    today      the date, for a chat template that writes it; "": today's
    bfloat16   compute in it, and keep frozen weights in it. Trainable weights are
               always float32: with the 8 significant bits of bfloat16, an Adam step of
               5e-6 is lost

    train.py has every model checked before use (bookkeeping/pretrained.py).
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = EMBEDDED.get(name, name)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    narrow = bfloat16 and lora_rank > 0
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16 if narrow else torch.float32,
        use_safetensors=True,  # a pickle could run any program
        trust_remote_code=False,
    )
    # A fine-tuned mixture of experts may still ask for its router's loss. Nothing here
    # reads that loss, and computing it fails if there is a cache.
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        model.config.get_text_config().output_router_logits = False
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    stop_ids = find_stops(tokenizer, model)
    torch.manual_seed(seed)  # LoRA's A is drawn at random
    if lora_rank:  # peft freezes the model's own weights
        from peft import get_peft_model

        model = get_peft_model(model, lora_config(model.config, lora_rank, lora_alpha))
    model.to(device).eval()
    return Policy(
        model,
        tokenizer,
        stop_ids,
        name=Path(name).resolve().name if Path(name).exists() else name,
        lora_rank=lora_rank,
        device=torch.device(device),
        today=today,
        bfloat16=bfloat16,
    )


def find_stops(tokenizer, model: torch.nn.Module) -> frozenset[int]:
    """The tokens that end a turn. A tokenizer without an end or padding token gets one.

    ValueError if neither model nor tokenizer names an end-of-turn token.
    """
    ends = model.generation_config.eos_token_id
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id}
    ends -= {None}
    if not ends:
        raise ValueError(
            "neither model nor tokenizer names an end-of-turn token; set eos_token"
        )
    if tokenizer.eos_token_id is None:  # SFT teaches replies to end with it
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(min(ends))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    # The token that the template writes after a reply ends a turn, too. The configs may
    # name another: Qwen2.5's base models have <|im_end|> in the template, <|endoftext|>
    # in the configs.
    ends |= {read_template(tokenizer).end} - {None}
    return frozenset(ends)


def rope_switch(config) -> int | None:
    """The length, in tokens, beyond which *all* tokens of a text are read differently.

    None for most models. But two kinds of RoPE (the position encoding), longrope and
    dynamic, look at the length of the whole text. Once it is longer than this, its
    earlier tokens are no longer read as they were when they were sampled.
    """
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    ropes = [ropes, *ropes.values()]  # Gemma 3 has one for each kind of layer
    switches = [
        rope.get("original_max_position_embeddings") or text.max_position_embeddings
        for rope in ropes
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(switches, default=None)


def lora_config(config, rank: int, alpha: int):
    """peft's config of LoRA: on every linear layer but the output.

    In a mixture of experts LoRA is on attention only, because adapters of rank 32 on
    all 128 experts of a 30B model would be 2 billion parameters.
    """
    from peft import LoraConfig

    counts = ("num_experts", "num_local_experts")  # Qwen's name, and Mixtral's
    text = config.get_text_config()  # the part that reads text, if there is vision
    experts = any(getattr(text, name, None) for name in counts)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if experts else "all-linear"
    return LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM"
    )


# --------------------------------------------------------- log-probs, the plain way


@dataclass
class Output:
    """What the policy says about M sampled tokens, in nats."""

    logprobs: torch.Tensor  # [M], differentiable
    # For the log. It has no gradient, so in a loss it would teach nothing.
    entropy_for_log: torch.Tensor  # [M]
    # The next three are for losses, and have gradients. A fast forward pass returns
    # them only if it is asked for logits (grpo.LossRule.needs_logits).
    entropy: torch.Tensor | None = None  # [M]
    logits: torch.Tensor | None = None  # [M, V], divided by the temperature
    hidden: torch.Tensor | None = None  # [M, D], what the logits are computed from


def plain_forward(
    policy: Policy,
    ids: torch.Tensor,
    mask: torch.Tensor,
    temperature: float = 1.0,
    need_logits: bool = True,
) -> Output:
    """The log-prob of every token that the mask picks, with entropy and logits.

    A faster forward pass leaves the logits out unless need_logits is set; this one has
    them anyway.

    ids [N, T], right-padded. mask [N, T-1]: mask[:, t] picks token t+1, which position
    t predicts. It picks M = mask.sum() tokens, row after row. All but entropy_for_log
    is differentiable, so you can build any loss from it.
    """
    hidden, logits = hidden_and_logits(policy, ids, mask)  # [M, D], [M, V]
    z = logits / temperature
    logprobs, entropy = logprobs_and_entropy(z, ids[:, 1:][mask])  # [M] each
    return Output(logprobs, entropy.detach(), entropy, z, hidden)


def hidden_and_logits(policy: Policy, ids: torch.Tensor, mask: torch.Tensor):
    """Input and output of the head (the last layer) where a picked token is predicted.

    Hidden states [M, D] and logits [M, V], float32. The head is given the hidden states
    of these M positions only. The logits of all positions would be N·T·V numbers, and V
    is 151,936 for Qwen3. Computing them is the most common way for RL code to run out
    of memory.
    """
    kept = []

    def only_masked(head, inputs):
        hidden = inputs[0][mask]  # [N, T-1, D] -> [M, D]
        kept.append(hidden)
        return (hidden,)

    hook = policy.lm.get_output_embeddings().register_forward_pre_hook(only_masked)
    try:
        logits = policy.model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    finally:
        hook.remove()
    return kept[0].float(), logits


def logprobs_and_entropy(
    logits: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [M, V], tokens [M] -> their log-probs [M] and entropies [M], in nats."""
    all_logprobs = logits.log_softmax(-1)  # [M, V]
    logprobs = all_logprobs.gather(-1, tokens[:, None])[:, 0]  # [M]
    entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)  # [M]: -Σ p log p
    return logprobs, entropies


@dataclass(frozen=True)
class Backend:
    """How an update is computed. It changes time and memory, never what is learned.

    The defaults are for one process and plain torch; train.py hands in faster ones.
    """

    # (policy, ids, mask, temperature, need_logits) -> Output
    forward: Callable[..., Output] = plain_forward
    shares_prompts: bool = False  # does forward run a prompt once for all its rows?
    # With several processes: picks this process's share of the episodes.
    shard: Callable[[list], list] = lambda episodes: episodes
    # With several processes: sums their gradients in place; returns the summed loss.
    all_reduce: Callable[[Iterable, float], float] = lambda parameters, loss: loss
    # A progress bar around the steps of SFT.
    bar: Callable[[list], Iterable] = lambda steps: steps


PLAIN = Backend()

# ------------------------------------------------------------- the optimizer's step

MAX_GRAD_NORM = 1.0  # gradient clipping: one bad batch must not break the policy


def take_step(
    policy: Policy, optimizer, loss: float, backend: Backend = PLAIN
) -> tuple[float, float]:
    """One optimizer step; returns (loss, norm of the gradient before it is clipped).

    `loss` is that of this process. Several processes first add up their losses and
    gradients. Raises FloatingPointError before the step if loss or norm is not finite.
    """
    parameters = list(policy.trainable().values())
    loss = backend.all_reduce(parameters, loss)
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM).item()
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(
            f"loss {loss} and gradient norm {grad_norm} are not both finite"
        )
    optimizer.step()
    return loss, grad_norm


# ---------------------------------------------------------- sampling, the plain way


@dataclass
class Sample:
    token_ids: list[int]  # the end-of-turn token included, if it came
    # of each token, in nats, in the distribution it was drawn from (with temperature)
    logprobs: list[float]
    finished: bool  # False: max_tokens came before the end-of-turn token
    cache: object = None  # keys and values of all tokens but the last, if kept


def draw(logits: torch.Tensor, uniform: torch.Tensor, temperature: float):
    """Draw a token per row by inverse CDF (Devroye 1986, §II.2).

    logits [B, V], uniform [B] in [0, 1) -> tokens [B], log-probs [B] in nats.
    temperature 0 is greedy: the likeliest token, with its log-prob at temperature 1.
    """
    logp = (logits / (temperature or 1.0)).log_softmax(-1)  # [B, V]
    if temperature == 0:
        tokens = logits.argmax(-1)
    else:
        cdf = logp.exp().cumsum(-1)  # [B, V]; its last entry is 1 up to rounding
        total = cdf[:, -1:]
        # the largest number below the total, in case a uniform rounds to 1
        inside = torch.nextafter(total, torch.zeros_like(total))
        target = torch.minimum(uniform[:, None] * total, inside)
        tokens = torch.searchsorted(cdf, target, right=True)[:, 0]
        # in case logits are NaN; rollout.take_turn will notice
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens, logp.gather(-1, tokens[:, None])[:, 0]


class PlainSampler:
    """Samples a group at a time: the k replies to a prompt grow together.

    TorchSampler in fast/sampler.py samples all groups at once, and is faster; the same
    seeds give the same tokens.
    """

    asleep = nullcontext  # it holds no memory that the trainer could use

    def __init__(self, policy: Policy):
        self.policy, self.version = policy, 0

    def sync(self, version: int = 0) -> None:
        # Nothing to copy: it samples from the policy's own weights.
        self.version = version

    def sample(
        self, prompts, k, max_tokens, temperature, seeds, caches=None, keep=False
    ):
        """k samples of each prompt, [len(prompts)][k].

        seeds[g][i] is for sample i of prompt g. caches and keep are for faster
        samplers; this one ignores them.
        """
        return [
            self.sample_group(prompt, max_tokens, temperature, row[:k])
            for prompt, row in zip(prompts, seeds)
        ]

    @torch.inference_mode()
    def sample_group(
        self, prompt: list[int], max_tokens: int, temperature: float, seeds: list
    ) -> list[Sample]:
        """One sample per seed. All begin with the same prompt, so nothing is padded."""
        lm, device = self.policy.lm, self.policy.device
        rows = [np.random.default_rng(seed).random(max_tokens) for seed in seeds]
        uniforms = torch.tensor(np.array(rows)).float().to(device)  # [k, max_tokens]
        samples = [Sample([], [], finished=False) for _ in seeds]
        text = torch.tensor([prompt] * len(seeds), device=device)  # [k, T]
        unread, cache = text, None
        for uniform in uniforms.T:  # [k]
            # cache: what the model keeps of the text that it has read. Some models
            # (Mamba) return no past_key_values; they read the whole text each time.
            output = lm(unread, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = getattr(output, "past_key_values", None)
            last = output.logits[:, -1].float()  # [k, V]
            tokens, logprobs = draw(last, uniform, temperature)  # [k], [k]
            text = torch.cat([text, tokens[:, None]], 1)
            unread = text if cache is None else tokens[:, None]
            drawn = zip(samples, tokens.tolist(), logprobs.tolist())
            for sample, token, logprob in drawn:
                if not sample.finished:  # a finished one keeps drawing; that is dropped
                    sample.token_ids.append(token)
                    sample.logprobs.append(logprob)
                    sample.finished = token in self.policy.stop_ids
            if all(sample.finished for sample in samples):
                break
        return samples


if __name__ == "__main__":
    policy = load_policy(str(PICO), lora_rank=32, lora_alpha=64)
    learn = sum(p.numel() for p in policy.trainable().values())
    print(
        f"pico_base: {policy.n_parameters:,} parameters; LoRA adds {learn:,} that learn"
    )
    hello = "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    prompt = policy.tokenizer.encode(hello)
    sample = PlainSampler(policy).sample([prompt], 1, 100, 1.0, [[(0,)]])[0][0]
    print(f"sampled: {policy.tokenizer.decode(sample.token_ids)!r}")
    ids = torch.tensor([prompt + sample.token_ids])  # [1, T]
    mask = torch.arange(ids.shape[1] - 1)[None] >= len(prompt) - 1  # [1, T-1]
    with torch.no_grad():
        now = plain_forward(policy, ids, mask).logprobs  # [M]
    gap = (now - torch.tensor(sample.logprobs)).abs().max().item()
    print(f"one pass over all tokens finds the same log-probs, but for {gap:.0e} nats")
