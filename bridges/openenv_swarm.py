"""The swarm as an OpenEnv server: any OpenEnv client plays our economy over a socket.

    pip install openenv
    python -m bridges.openenv_swarm --port 8000 --difficulty medium        # flags of settings.py

    from openenv.core import GenericEnvClient
    with GenericEnvClient(base_url="http://127.0.0.1:8000").sync() as env:
        prompt = env.reset(seed=7).observation["prompt"]
        call = {"type": "call_tool", "tool_name": "claim_task", "arguments": {"task_id": "task_1"}}
        told = env.step(call)        # told.observation["result"], told.reward, told.done

A connection is a session with its own economy. A call is written as a model would write it and
given to env_swarm.Swarm, so the same seed and the same calls earn the same score as in our own
loop, to the last bit (JSON carries a float exactly). As there, an unknown tool or a wrong argument
is an error and uses up the turn. A request that OpenEnv itself refuses (not JSON, an action without
a tool) never reaches the economy, and costs nothing.

    reward   0 until the last turn, then the score: the sum of the rewards and the last reward are
             both the score. All parts of the score are in the last observation's metadata.
    state    seed, turns played, and the score as if the rest were passed: for a client that stops
             early, as rollout.py scores an episode that was cut.
    tools    {"type": "list_tools"} lists the ten, and so do tools/list and tools/call on /mcp.
    seed     reset without one draws a training seed, and state says which.

The server has no password, so it listens only on this machine unless --host says otherwise.

Run me: `python -m bridges.openenv_swarm` serves until Ctrl-C.
"""

import argparse
import secrets
from functools import partial

from openenv.core.env_server import Environment, create_fastapi_app
from openenv.core.env_server.mcp_types import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
)
from openenv.core.env_server.types import ConcurrencyConfig, Observation, State

import settings
from bookkeeping import refusals
from env_swarm import Swarm
from swarm.tools import show, write_call

SESSIONS = 64  # that may be open at once
IDLE = 600.0  # seconds after which an unused session over HTTP (/mcp) is closed


class Opening(Observation):
    """What reset returns: the first message of the episode."""

    prompt: str


class Played(State):
    """What state returns. score: as if the rest were passed; empty before reset."""

    seed: int | None = None
    score: dict[str, float] = {}


class SwarmSession(Environment):
    """One client's economy. make_swarm: () -> Swarm."""

    SUPPORTS_CONCURRENT_SESSIONS = True  # nothing is shared between two of them

    def __init__(self, make_swarm):
        super().__init__()
        self.make_swarm = make_swarm
        self.swarm: Swarm | None = None
        self.seed = self.episode_id = None
        self.done = True

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Opening:
        """Start an episode, even if the previous one has not ended."""
        if seed is None:
            seed = secrets.randbelow(settings.SFT_SEEDS - settings.TRAIN_SEEDS)
        if type(seed) is not int or seed < 0:  # a bool is an int, but not a seed
            raise ValueError(f"seed {show(repr(seed))}: must be a whole number of at least 0")
        swarm = self.make_swarm()
        prompt = swarm.reset(seed)[-1]["content"]
        self.swarm, self.seed, self.episode_id, self.done = swarm, seed, episode_id, False
        return Opening(prompt=prompt, reward=0.0)

    def step(self, action: CallToolAction | ListToolsAction) -> Observation:
        if isinstance(action, ListToolsAction):  # only a question: it takes no turn
            functions = [schema["function"] for schema in self.make_swarm().tools]
            return ListToolsObservation(
                tools=[
                    Tool(name=f["name"], description=f["description"], input_schema=f["parameters"])
                    for f in functions
                ]
            )
        if self.done:
            raise ValueError("there is no episode, or it is over; call reset")
        messages, self.done = self.swarm.step(write_call(action.tool_name, action.arguments))
        last = f"# {self.swarm.log[-1].result}\n# the end"
        score = self.swarm.score() if self.done else {}
        return CallToolObservation(
            tool_name=show(action.tool_name),  # it may be any string
            result=messages[-1]["content"] if messages else last,
            done=self.done,
            reward=score.get("reward", 0.0),
            metadata=score,
        )

    @property
    def state(self) -> Played:
        if self.swarm is None:
            return Played()
        return Played(
            episode_id=self.episode_id,
            step_count=len(self.swarm.log),
            seed=self.seed,
            score=self.swarm.score(),
        )


def app(cfg: settings.Config):
    """The FastAPI application."""
    return create_fastapi_app(
        partial(SwarmSession, partial(settings.make_env, cfg, cfg.difficulty)),
        CallToolAction,
        CallToolObservation,
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=SESSIONS, session_timeout=IDLE),
        env_name="picoswarm",
        state_cls=Played,
        mode="simulation",  # with reset, step and state; "production" would offer the tools alone
        reset_observation_cls=Opening,
    )


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args, words = parser.parse_known_args()
    with refusals.errors_in_one_sentence():
        cfg, _ = settings.command_line(["--env", "swarm", *words])
        refusals.check(cfg)
    uvicorn.run(app(cfg), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
