"""Protects the way prime-rl takes: it loads the taskset itself, sends a task's data to an env server over a socket, and trains on the trace
that comes back. Its nodes must hold, token for token, what rollout.play would have trained on, with the same score.
"""

import asyncio
from functools import partial

import pytest

pytest.importorskip("verifiers.v1", reason="verifiers is not installed here; `make test-verifiers` installs it into a venv of its own")

import verifiers.v1 as vf
from verifiers.v1.serve import EnvClient, EnvServer

from fast.sampler import TorchSampler
from lab.trust import verifiers_check as check
from policy import PICO, load_policy
from rollout import play


async def episodes(env: vf.EnvConfig, n: int, **request) -> list:
    """n tasks played by an env server, as prime-rl's orchestrator asks for them."""
    tasks = [task for task, _ in zip(vf.load_taskset(env.taskset), range(n))]
    server = EnvServer(env, "tcp://127.0.0.1:0")
    serving = asyncio.create_task(server.run())
    client = EnvClient(server.address)
    try:
        await client.wait_for_server_startup()
        return await asyncio.gather(*(client.run(task_data=task.data.model_dump(mode="json"), **request) for task in tasks))
    finally:
        await client.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.parametrize("environment, n", [("alphabet", 2), ("swarm", 1)])
def test_an_env_server_gives_prime_rl_the_tokens_of_our_episodes(environment, n, tmp_path):
    path = PICO if environment == "alphabet" else check.cut_like_qwen(check.PICO_SWARM, tmp_path / "pico_swarm")
    policy = load_policy(str(path), lora_rank=0, lora_alpha=64, device="cpu")
    seeds = [7 + i for i in range(n)]
    ours = [group[0] for group in play(policy, TorchSampler(policy), partial(check.make_env, environment), seeds, 1, 160, 0.0, 0)]
    env = vf.resolve_env_config({"taskset": {"id": "picoswarm", "first_seed": 7, "environment": {"type": environment}}})
    with check.running(check.serve_tokens(policy)) as url:
        client = vf.TrainClientConfig(
            base_url=url, api_key_var="NONE", renderer={"name": "qwen3", "thinking_retention": "all"}, renderer_model_name=str(path)
        )
        theirs = asyncio.run(episodes(env, n, client=client, model="policy", sampling=vf.SamplingConfig(temperature=0.0, max_tokens=160)))
    for episode, mine in zip(theirs, ours):
        assert episode.ok
        (trace,) = episode.traces
        (branch,) = trace.branches  # one sample, not one a turn
        assert branch.token_ids == mine.token_ids
        assert branch.sampled_mask == mine.sampled
        assert branch.logprobs == pytest.approx(mine.logprobs, abs=1e-4)
        assert trace.reward == mine.reward
        assert trace.metrics == mine.components
        replies = [m["content"] for m in mine.messages if m["role"] == "assistant"]
        assert trace.info["replies"] == replies
        assert len(trace.nodes) == 1 + len(replies) + (mine.messages[-1]["role"] == "assistant") * (environment == "swarm") + sum(
            m["role"] != "assistant" for m in mine.messages[1:]
        )


def test_a_broken_call_stays_an_error_in_training(tmp_path):
    """The renderer drops a call that is not JSON from the reply; the tokens still have it, and so the environment says what is wrong."""
    import picoswarm as adapter

    policy = load_policy(str(check.PICO_SWARM), lora_rank=0, lora_alpha=64, device="cpu")
    said = "<tool_call>\n{'name': 'pass_turn'}\n</tool_call>"

    class Stubborn:
        """A sampler that always says the same."""

        def sample(self, prompts, k, max_tokens, temperature, seeds, **more):
            from fast.sampler import Sample

            ids = [*policy.tokenizer(said, add_special_tokens=False)["input_ids"], policy.tokenizer.eos_token_id]
            return [[Sample(ids, [0.0] * len(ids), True)] for _ in prompts]

    env = vf.resolve_env_config({"taskset": {"id": "picoswarm", "environment": {"type": "swarm"}}})
    with check.running(check.serve_tokens(policy, Stubborn())) as url:
        renderer = {"name": "qwen3", "thinking_retention": "all"}
        client = vf.TrainClientConfig(base_url=url, api_key_var="NONE", renderer=renderer, renderer_model_name=str(check.PICO_SWARM))
        (episode,) = asyncio.run(
            episodes(env, 1, client=client, model="policy", sampling=vf.SamplingConfig(temperature=0.0, max_tokens=160))
        )
    (trace,) = episode.traces
    assert trace.info["replies"] == [said] * 25
    assert not any(node.message.content or node.message.tool_calls for node in trace.nodes if node.sampled)  # what the renderer made of it
    assert trace.metrics["error_rate"] == 1.0
    data = trace.task.data.model_dump()
    assert trace.reward == adapter.marks("swarm", data["settings"], data["seed"], [said] * 25)["reward"]
