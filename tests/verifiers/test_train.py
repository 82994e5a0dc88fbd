"""Protects the way prime-rl takes: it loads the taskset itself, sends a task's data to an env
server over a socket, and trains on the trace that comes back. Its nodes must hold, token for
token, what rollout.play would have trained on, with the same score."""

import asyncio
import json
import shutil
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("verifiers.v1", reason="not installed here; `make test-all` does it")

import verifiers.v1 as vf
from loopback import make_env, serving
from picoswarm import taskset
from verifiers.v1.serve import EnvClient, EnvServer

from fast.sampler import TorchSampler
from helpers import Scripted
from policy import PICO, PICO_SWARM, Sample, load_policy
from rollout import play

TOKENS = 160  # of a reply, at most
RENDERER = {"name": "qwen3", "thinking_retention": "all"}


def cut_like_qwen(folder: Path) -> Path:
    """pico_swarm with a tokenizer that cuts "user\\n" in two, as Qwen3's does: verifiers cuts
    between the two, and pico_swarm's own has one token for both."""
    shutil.copytree(PICO_SWARM, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for entry in tokenizer["model"]["vocab"]:  # of a unigram model: [text, log-probability]
        if entry[0] == "user\n":
            entry[1] = -100.0
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def generates(sampler):
    """vLLM's /inference/v1/generate, as far as it is needed here: token ids in, the sampled ids and
    their log-probs out."""

    def answer(body: dict) -> tuple[int, dict]:
        wanted = body["sampling_params"]
        limits = wanted["max_tokens"], wanted["temperature"]
        sample = sampler.sample([body["token_ids"]], 1, *limits, [[(0, 0)]])[0][0]
        pairs = zip(sample.token_ids, sample.logprobs)
        logprobs = [{"token": f"token_id:{t}", "logprob": p} for t, p in pairs]
        reason = "stop" if sample.finished else "length"
        choice = {"token_ids": sample.token_ids, "logprobs": {"content": logprobs}}
        return 200, {"request_id": "1", "choices": [{**choice, "finish_reason": reason}]}

    return answer


def episodes(environment: str, n: int, sampler, model: Path) -> list:
    """The first n tasks played by an env server, as prime-rl's orchestrator asks for them."""
    taskset = {"id": "picoswarm", "first_seed": 7, "environment": {"type": environment}}
    env = vf.resolve_env_config({"taskset": taskset})
    tasks = [task for task, _ in zip(vf.load_taskset(env.taskset), range(n))]
    sampling = vf.SamplingConfig(temperature=0.0, max_tokens=TOKENS)

    async def ask(url: str) -> list:
        ways = {"renderer": RENDERER, "renderer_model_name": str(model)}
        policy = vf.TrainClientConfig(base_url=url, api_key_var="NONE", **ways)
        server = EnvServer(env, "tcp://127.0.0.1:0")
        running = asyncio.create_task(server.run())
        client = EnvClient(server.address)
        try:
            await client.wait_for_server_startup()
            run = partial(client.run, client=policy, model="policy", sampling=sampling)
            data = [task.data.model_dump(mode="json") for task in tasks]
            return await asyncio.gather(*(run(task_data=its) for its in data))
        finally:
            await client.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    with serving(generates(sampler)) as url:
        return asyncio.run(ask(url))


@pytest.mark.parametrize("environment, n", [("alphabet", 2), ("swarm", 1)])
def test_an_env_server_gives_prime_rl_the_tokens_of_our_episodes(environment, n, tmp_path):
    model = cut_like_qwen(tmp_path / "model") if environment == "swarm" else PICO
    policy = load_policy(str(model), lora_rank=0, lora_alpha=64, device="cpu")
    sampler, make, seeds = TorchSampler(policy), partial(make_env, environment), range(7, 7 + n)
    ours = [group[0] for group in play(policy, sampler, make, list(seeds), 1, TOKENS, 0.0, 0)]
    for episode, mine in zip(episodes(environment, n, sampler, model), ours, strict=True):
        (trace,) = episode.traces
        (branch,) = trace.branches  # one sample, not one per turn
        assert episode.ok
        assert (branch.token_ids, branch.sampled_mask) == (mine.token_ids, mine.sampled)
        assert branch.logprobs == pytest.approx(mine.logprobs, abs=1e-4)
        assert (trace.reward, trace.metrics) == (mine.reward, mine.components)
        replies = [m["content"] for m in mine.messages if m["role"] == "assistant"]
        assert trace.info["replies"] == replies


def test_a_broken_call_stays_an_error_in_training():
    """The renderer drops a call that is not JSON from the reply; the tokens still have it, and so
    the environment says what is wrong."""
    policy = load_policy(str(PICO_SWARM), lora_rank=0, lora_alpha=64, device="cpu")
    said = "<tool_call>\n{'name': 'pass_turn'}\n</tool_call>"
    ids = policy.tokenizer(said, add_special_tokens=False)["input_ids"]
    ids.append(policy.tokenizer.eos_token_id)
    stubborn = Scripted(*[Sample(ids, [0.0] * len(ids), True)] * 25)
    (episode,) = episodes("swarm", 1, stubborn, PICO_SWARM)
    (trace,) = episode.traces
    replies = [node.message for node in trace.nodes if node.sampled]
    assert trace.info["replies"] == [said] * 25
    assert not any(reply.content or reply.tool_calls for reply in replies)  # the renderer's view
    assert trace.metrics["error_rate"] == 1.0
    assert trace.reward == taskset.marks(trace.task.data, [said] * 25)["reward"]
