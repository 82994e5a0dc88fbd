"""The three environments as one taskset of verifiers (v1), and so for prime-rl, which needs v1.

    pip install -e . verifiers==0.4.0     # picoswarm: the environments, and this file
    vf-eval picoswarm --env.taskset.environment.type swarm -n 8 -r 2 -m MODEL \\
            --client.base-url http://127.0.0.1:8000/v1 --no-push

An id in verifiers is the name of a module that exports one taskset, so the id is `picoswarm`, and a
setting chooses the environment. The environments know nothing of this file, and picoswarm imports
it only when it is asked for one of the three classes that verifiers wants.

    Taskset   an endless series of tasks, one per seed. A task carries the environment's settings
              and the seed: enough to play it anywhere.
    Harness   plays one episode in this process: ask the model, let the environment answer, repeat.
              Every request goes to the endpoint that verifiers gives us, which records it.
    Env       one agent, on this machine. Without it verifiers would ask for a remote sandbox, and
              there is nothing here to lock up.
    Score     is computed afterwards, from the seed and the replies as text. So
              `vf-replay RUN --no-rich` can compute it again from saved traces.

A trace of 25 turns has 50 nodes: the opening, then 25 replies with the results between them. (The
result of the last reply is not shown, because the model is not asked again.)

What is the same as in rollout.py, and what is not:

    same      tasks, messages, tools, rules, and the score of the same replies, to the last bit. A
              reply that ran out of tokens counts and ends the episode; a conversation that outgrows
              the context ends there.
    training  verifiers hands over the sampled tokens. The reply is decoded from them, as rollout.py
              does, because the parsed form drops a broken tool call. Turns are joined as tokens
              too, if the renderer keeps the thinking of earlier turns: thinking_retention = "all",
              as in bridges/configs/. Qwen3's own template drops it.
    eval      a chat endpoint takes text. Whether the model sees its earlier thinking is up to the
              server: vLLM with Qwen3's template drops it. Thinking and tool calls that the server
              has parsed out of a reply are written back as the model writes them; what its parser
              dropped is lost.
    strict    an endpoint that demands one tool message per tool call (OpenAI's own) refuses to
              continue after a swarm reply with no call, or with two.
"""

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import openai
import verifiers.v1 as vf
from picoswarm import WORLDS, env_swarm, import_ours, make_env
from pydantic import field_validator

chat, tools = import_ours("chat", "swarm.tools")


# ------------------------------------------------------------------------------ tasks and settings


class SeedsConfig(vf.TasksetConfig):
    environment: dict[str, Any] = {"type": "letters"}
    # development tasks, as in our own evaluations; for training set 0
    first_seed: int = env_swarm.DEV_SEEDS

    @field_validator("environment")
    @classmethod
    def check(cls, environment: dict) -> dict:
        try:
            make_env(environment)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{error}; type is {', '.join(WORLDS)}, and what else there is its class says"
            ) from None
        return environment


class SeedData(vf.TaskData):
    environment: dict[str, Any]
    seed: int


def marks(data: SeedData, replies: list[str]) -> dict[str, float]:
    """The score of an episode, from nothing but its seed and its replies."""
    env = make_env(data.environment)
    env.reset(data.seed)
    for reply in replies:
        env.step(reply)
    return env.score()


class SeedTask(vf.Task[SeedData]):
    """One seed of one environment. The replies are in trace.info, where the harness puts them."""

    @property
    def key(self) -> str:
        return str(self.data.seed)

    @vf.reward
    async def reward(self, trace: vf.Trace) -> float:
        return marks(self.data, trace.info.get("replies", []))["reward"]

    @vf.metric
    async def components(self, trace: vf.Trace) -> dict[str, float]:
        score = marks(self.data, trace.info.get("replies", []))
        return {name: value for name, value in score.items() if name != "reward"}


class Seeds(vf.Taskset[SeedTask, SeedsConfig]):
    """Endless: -n says how many tasks an evaluation takes.

    Training sees no task twice (but the 500 scenarios of the swarm come again).
    """

    INFINITE = True

    def load(self) -> Iterator[SeedTask]:
        environment = self.config.environment
        for seed in itertools.count(self.config.first_seed):
            name, opening = f"{environment['type']} {seed}", make_env(environment).reset(seed)
            data = SeedData(name=name, prompt=opening, environment=environment, seed=seed)
            yield SeedTask(data, self.config.task)


# --------------------------------------------------------------------------------- replies as text

# The parts of a reply that are sent back with the next request.
SENT_BACK = ("content", "tool_calls", "reasoning", "reasoning_content", "reasoning_details")


@lru_cache(maxsize=4)
def tokenizer_of(model: str):
    from renderers.base import load_tokenizer

    return load_tokenizer(model)


def sampled_text(ctx: vf.ModelContext, trace: vf.Trace, finished: bool) -> str | None:
    """The last reply, decoded from the sampled tokens; None if there are none.

    (An eval client sees text only.)
    """
    node = trace.nodes[-1]
    ids = [token for token, sampled in zip(node.token_ids, node.mask) if sampled]
    if not ids:
        return None
    tokenizer = tokenizer_of(getattr(ctx.client, "renderer_model_name", None) or ctx.model)
    if finished and ids[-1] in tokenizer.all_special_ids:
        ids = ids[:-1]  # the end of the turn
    return tokenizer.decode(ids, skip_special_tokens=False)


# -------------------------------------------------------------------------------------- the episode


class InProcessConfig(vf.HarnessConfig):
    tools_as_text: bool = False  # for a model whose chat template leaves tools out


class InProcess(vf.Harness[InProcessConfig]):
    """Plays the episode in this process: the model gets no computer, only a conversation."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data: SeedData
    ) -> vf.ProgramResult:
        env, replies = make_env(data.environment), []
        system, _ = self.resolve_prompt(data)
        talk = [{"role": "system", "content": system}] if system else []
        talk += env.reset(data.seed)
        # As chat.render does for a chat template that leaves tools out. A renderer shows its
        # template, but a chat server does not: there you have to say so (tools_as_text).
        model = getattr(ctx.client, "renderer_model_name", None)
        template = chat.read_template(tokenizer_of(model)) if model else chat.QWEN
        as_text = self.config.tools_as_text or not template.tools
        opened = template.opens if env.think else ""  # the prompt's own <think>, not sampled
        request = {"model": ctx.model}
        request |= {"tools": env.tools} if env.tools and not as_text else {}
        trace.info["replies"] = replies
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as client:
            while True:
                plain = chat.in_plain_words(talk, env.tools, chat.QWEN)
                request["messages"] = plain if as_text else talk
                try:
                    completion = await client.chat.completions.create(**request)
                except openai.BadRequestError as refusal:
                    if replies and "context length" in str(refusal):
                        trace.stop("context_length")  # what was played counts, as in rollout.py
                        break
                    raise
                choice = completion.choices[0]
                message = choice.message.model_dump(exclude_none=True)
                calls = message.get("tool_calls") or []
                reply = sampled_text(ctx, trace, finished=choice.finish_reason != "length")
                replies.append(tools.written(message) if reply is None else opened + reply)
                new, done = env.step(replies[-1])
                if done or choice.finish_reason == "length":
                    break
                said = {name: message[name] for name in SENT_BACK if name in message}
                talk.append({"role": "assistant", "content": None} | said)
                # The API wants the id of the answered call: the first one, as only that counts.
                called = {"tool_call_id": calls[0]["id"] if calls else f"turn_{len(replies)}"}
                talk += [m | called if m["role"] == "tool" else m for m in new]
        return vf.ProgramResult(0, "", "")


class LocalConfig(vf.SingleAgentEnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class Local(vf.SingleAgentEnv, vf.Env[LocalConfig]):
    """verifiers' own environment for one agent, with this machine as its default."""
