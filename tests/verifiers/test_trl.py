"""TRL plays and trains on the swarm (bridges/trl_swarm.py), with its real GRPOTrainer."""

import pytest
from transformers.utils import get_json_schema

from bridges.trl_swarm import SwarmForTRL, tasks, train
from env_swarm import Swarm
from swarm.tools import TOOLS, schemas, write_call

pytest.importorskip("trl")


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_reads_the_same_for_trl(tool):
    ours = next(s for s in schemas("0.2") if s["function"]["name"] == tool)["function"]
    theirs = get_json_schema(getattr(SwarmForTRL, tool))["function"]
    assert theirs["name"] == tool and theirs["description"] == ours["description"]
    assert theirs["parameters"].get("required", []) == ours["parameters"]["required"]
    types = {name: value["type"] for name, value in theirs["parameters"]["properties"].items()}
    assert types == {name: value["type"] for name, value in ours["parameters"]["properties"].items()}


def test_the_same_calls_earn_the_same_reward():
    env, theirs = Swarm("medium", "0.2"), SwarmForTRL()
    observation = env.reset(5)[-1]["content"]
    assert theirs.reset(seed=5, prompt="ignored") == observation
    done = False
    while not done:
        tool, arguments = env.player(env.seen, env.dice)[1:]
        messages, done = env.step(write_call(tool, arguments))
        told = getattr(theirs, tool)(**arguments)
        assert done or told == messages[-1]["content"]
    assert theirs.get_reward() == env.score()["reward"] > 0.6
    assert theirs.pass_turn() == "the episode is over" and theirs.get_reward() == env.score()["reward"]


def test_trl_trains_on_it(tmp_path):
    log = train(1, str(tmp_path)).state.log_history[0]
    assert log["tools/call_frequency"] > 0 and log["tools/failure_frequency"] == 0
    assert 0.3 < log["reward"] < 1.6 and log["grad_norm"] > 0
    assert tasks(3, first=7)["seed"] == [7, 8, 9]
