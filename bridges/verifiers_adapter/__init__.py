"""The three environments as tasksets of verifiers (v1), and so of prime-rl, whose current main takes v1 only.

    pip install -e .        # makes the ids picoswarm-letters, picoswarm-alphabet and picoswarm-swarm importable
    vf-eval picoswarm-swarm -n 8 -r 2 -m MODEL --client.base-url http://127.0.0.1:8000/v1 --no-push

The environments know nothing of this file; whoever does not use verifiers never imports it. An id of verifiers is the name of a module that
exports one taskset. So pyproject.toml installs this one file under three names, and under each it exports that name's taskset (see the end).

    Taskset   an endless row of tasks, one a seed. What a task carries is the environment's settings and the seed: enough to play it anywhere.
    Harness   plays one episode in this process: ask the model, let the environment answer, go on. Every question goes to the endpoint that
              verifiers gives us, which records it.
    Env       one agent, on this machine: without it verifiers would ask for a remote sandbox, and there is nothing here to lock up.
    Score     is computed from the seed and the replies as text, afterwards. So `vf-replay RUN --no-rich` can compute it again from saved traces.

A trace of 25 turns has 51 nodes: the opening, then 25 times a reply and what came of it. (Our own loop does not say what came of the last
reply, because nobody is asked again. It is added to the trace for its readers, and no model ever sees it.)

What is the same as in rollout.py, and what is not:

    same      tasks, messages, tools, rules, and the score of the same replies, to the last bit; what happens to a reply that ran out of
              tokens (it counts, and ends the episode) and to a conversation that outgrows the context (it ends there).
    training  verifiers hands over the tokens that were sampled. The reply is decoded from them, as rollout.py does, because its parsed form
              drops a tool call that is broken. Two turns are joined by tokens too, if the renderer keeps the thinking of earlier
              turns: thinking_retention = "all", as in configs/. Qwen3's own template drops it.
    eval      a chat endpoint takes text. Whether the model sees its earlier thinking is up to the server: vLLM with Qwen3's template drops
              it, bridges/serve.py keeps it. What the server has parsed out of a reply (thinking, tool calls) is written back as the model writes it,
              but what its parser dropped is lost.
    strict    an endpoint that demands one tool message for every tool call (OpenAI's own) refuses to go on after a swarm reply with none, or
              with two.
"""

import itertools
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import openai
import verifiers.v1 as vf
from pydantic import model_validator

from env_alphabet import Alphabet
from env_letters import Letters
from env_swarm import EVAL_SEEDS, Swarm


def make_env(environment: str, settings: dict[str, Any]):
    """A fresh environment. `style` is how the scripted expert speaks, who is silent here."""
    if environment == "letters":
        return Letters(**settings, style="bare")
    if environment == "alphabet":
        return Alphabet(**settings, style="bare")
    return Swarm(**settings)


def marks(environment: str, settings: dict[str, Any], seed: int, replies: list[str]) -> dict[str, float]:
    """The score of an episode, from nothing but its seed and its replies."""
    env = make_env(environment, settings)
    env.reset(seed)
    for reply in replies:
        env.step(reply)
    return env.score()


# ------------------------------------------------------------------------------------------------ tasks and their settings


class SeededConfig(vf.TasksetConfig):
    """What all three share. Defaults are those of settings.py, which is not imported here, because it imports torch; a test compares them."""

    first_seed: int = EVAL_SEEDS  # held-out tasks, as in every evaluation of ours; for training set 0
    think: bool = (
        True  # does the prompt invite thinking? To forbid it, tell the template too: enable_thinking of chat_template_kwargs or renderer
    )

    def settings(self) -> dict[str, Any]:
        return self.model_dump(include=set(type(self).model_fields) - set(vf.TasksetConfig.model_fields) - {"first_seed"})


class LettersConfig(SeededConfig):
    difficulty: int = 6
    reward: str = "binary"

    @model_validator(mode="after")
    def check(self):
        make_env("letters", self.settings())
        return self


class AlphabetConfig(SeededConfig):
    min_turns: int = 3
    max_turns: int = 3
    min_names: int = 1
    max_names: int = 4
    similarity_power: float = 8.0
    power_per_turn: bool = False

    @model_validator(mode="after")
    def check(self):
        make_env("alphabet", self.settings())
        return self


class SwarmConfig(SeededConfig):
    difficulty: str = "medium"
    version: str = "0.2"
    payoff: float | None = None
    reputation: float | None = None
    quality: float | None = None
    diversity: float | None = None
    floor: float = 50.0
    floor_penalty: float = 0.0
    error_penalty: float = 0.0

    @model_validator(mode="after")
    def check(self):
        make_env("swarm", self.settings())
        return self


class SeedData(vf.TaskData):
    environment: str
    settings: dict[str, Any]
    seed: int


class SeedTask(vf.Task[SeedData]):
    """One seed of one environment. The replies are read from trace.info, where the harness puts them."""

    @property
    def key(self) -> str:
        return str(self.data.seed)

    def marks(self, trace: vf.Trace) -> dict[str, float]:
        return marks(self.data.environment, self.data.settings, self.data.seed, trace.info.get("replies", []))

    @vf.reward
    async def reward(self, trace: vf.Trace) -> float:
        return self.marks(trace)["reward"]

    @vf.metric
    async def components(self, trace: vf.Trace) -> dict[str, float]:
        return {name: value for name, value in self.marks(trace).items() if name != "reward"}


class Seeds:
    """Endless: -n says how many tasks an evaluation takes, and training sees no task twice (swarm: scenarios come again after 500)."""

    INFINITE = True
    environment: str

    def load(self) -> Iterator[SeedTask]:
        settings = self.config.settings()
        for seed in itertools.count(self.config.first_seed):
            opening = make_env(self.environment, settings).reset(seed)
            data = SeedData(name=f"{self.environment} {seed}", prompt=opening, environment=self.environment, settings=settings, seed=seed)
            yield SeedTask(data, self.config.task)


class LettersTaskset(Seeds, vf.Taskset[SeedTask, LettersConfig]):
    environment = "letters"


class AlphabetTaskset(Seeds, vf.Taskset[SeedTask, AlphabetConfig]):
    environment = "alphabet"


class SwarmTaskset(Seeds, vf.Taskset[SeedTask, SwarmConfig]):
    environment = "swarm"


# ------------------------------------------------------------------------------------------------ replies, as text


SAID = (
    "content",
    "tool_calls",
    "reasoning",
    "reasoning_content",
    "reasoning_details",
)  # what of a reply is sent back with the next question


def written(message: dict[str, Any]) -> str:
    """A reply as the model writes it, from what a server made of it: {"content": "a", "tool_calls": […]} -> 'a\\n<tool_call>\\n{…'."""
    thinking = message.get("reasoning_content") or message.get("reasoning")
    parts = [f"<think>\n{thinking.strip()}\n</think>"] if thinking else []
    parts += [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or []:
        name, arguments = json.dumps(call["function"]["name"]), call["function"]["arguments"] or "{}"
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)


@lru_cache(maxsize=4)
def tokenizer(model: str):
    from renderers.base import load_tokenizer

    return load_tokenizer(model)


def sampled(ctx: vf.ModelContext, trace: vf.Trace, finished: bool) -> str | None:
    """The last reply from the tokens that were sampled; None where verifiers has none (an eval client sees text only)."""
    node = trace.nodes[-1]
    ids = [token for token, mine in zip(node.token_ids, node.mask) if mine]
    if not ids:
        return None
    cutter = tokenizer(getattr(ctx.client, "renderer_model_name", None) or ctx.model)
    if finished and ids[-1] in cutter.all_special_ids:
        ids = ids[:-1]  # the end of the turn
    return cutter.decode(ids, skip_special_tokens=False)


def answers(new: list[dict], calls: list[dict], turn: int) -> list[dict]:
    """The environment's messages. The API wants a tool message to name the call that it answers: the first, because only that counts."""
    name = calls[0]["id"] if calls else f"turn_{turn}"
    return [{**message, "tool_call_id": name} if message["role"] == "tool" else message for message in new]


def last_words(env) -> str:
    """What came of the last call of a swarm episode; '' where an episode ends with the reply."""
    log = getattr(env, "log", None)
    return f"# {'result' if log[-1].ok else 'error'}: {log[-1].result}\n# the end" if log else ""


# ------------------------------------------------------------------------------------------------ the episode


class Here(vf.Harness[vf.HarnessConfig]):
    """Plays the episode in this process: the model gets no computer to use, only somebody to talk to."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data: SeedData) -> vf.ProgramResult:
        env, replies = make_env(data.environment, data.settings), []
        system, _ = self.resolve_prompt(data)
        talk = [{"role": "system", "content": system}] * bool(system) + env.reset(data.seed)
        tools = {"tools": env.tools} if env.tools else {}
        trace.info["replies"] = replies
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as client:
            while True:
                try:
                    completion = await client.chat.completions.create(model=ctx.model, messages=talk, **tools)
                except openai.BadRequestError as refusal:
                    if replies and "context length" in str(refusal):
                        trace.stop("context_length")  # what was played counts, as in rollout.py
                        break
                    raise
                choice = completion.choices[0]
                message = choice.message.model_dump(exclude_none=True)
                calls = message.get("tool_calls") or []
                reply = sampled(ctx, trace, finished=choice.finish_reason != "length")
                replies.append(written(message) if reply is None else reply)
                new, done = env.step(replies[-1])
                if done or choice.finish_reason == "length":
                    break
                talk.append({"role": "assistant", "content": None, **{name: message[name] for name in SAID if name in message}})
                talk += answers(new, calls, len(replies))
        if words := last_words(env):
            (last,) = answers([{"role": "tool", "content": words}], calls, len(replies))
            trace.nodes.append(vf.MessageNode(parent=len(trace.nodes) - 1, message=vf.ToolMessage(**last)))
        return vf.ProgramResult(0, "", "")


class LocalConfig(vf.SingleAgentEnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class Local(vf.SingleAgentEnv, vf.Env[LocalConfig]):
    """verifiers' own environment for one agent, with another default."""


# This file is imported under three names, each the module of an id.
TASKSETS = {"picoswarm_letters": LettersTaskset, "picoswarm_alphabet": AlphabetTaskset, "picoswarm_swarm": SwarmTaskset}
__all__ = ["Here", "Local", *(taskset.__name__ for name, taskset in TASKSETS.items() if name == __name__)]
