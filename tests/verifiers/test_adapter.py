"""Protects the adapter's parts: its defaults are those of training, an episode that is cut short
counts as in rollout.py, and a server's failure is not taken for an answer.
"""

import asyncio
import tomllib
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip(
    "verifiers.v1",
    reason="verifiers is not installed here; `make test-all` installs it into a venv of its own",
)

import openai
import picoswarm
import verifiers.v1 as vf
from loopback import chat, completion, make_env, serving
from picoswarm import taskset
from pydantic import ValidationError

import settings
from settings import DEV_SEEDS

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ("letters", "alphabet", "swarm")
CONFIG_FILES = sorted((ROOT / "bridges" / "configs").glob("prime_rl_*.toml"))


def config(environment: str, first_seed: int = DEV_SEEDS, **settings):
    return taskset.SeedsConfig(
        id="picoswarm", first_seed=first_seed, environment={"type": environment, **settings}
    )


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_the_defaults_are_those_of_training(environment):
    """They are declared twice, because settings.py imports torch. Where it goes by the model's
    size, the adapter means the large ones."""
    cfg = settings.Config(env=environment)
    settings.fill(cfg, settings.by_env(environment) | settings.by_size(4_000_000_000, environment))
    given = vars(picoswarm.make_env({"type": environment}))
    trained = settings.make_env(cfg, cfg.difficulty)
    own = {"letters": "reward_kind", "alphabet": "max_turns", "swarm": "version"}
    for name in {f.name for f in fields(picoswarm.WORLDS[environment])} - {"style"}:
        assert given[name] in (None, getattr(trained, name)), name
    assert {"think", own[environment]} <= set(given)


@pytest.mark.parametrize(
    "environment, wrong",
    [("letters", {"difficulty": 11}), ("alphabet", {"min_turns": 4}), ("swarm", {"floor": -1.0})],
)
def test_a_wrong_setting_is_refused_in_a_sentence(environment, wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        config(environment, **wrong)
    with pytest.raises(ValidationError, match="unexpected keyword argument 'no_such_setting'"):
        config(environment, no_such_setting=1)


def launch(environment: str, answer, **how):
    """Play the first task against a server, without the rest of verifiers; (replies, what the trace
    was told)."""
    data = next(iter(vf.load_taskset(config(environment)))).data
    stops, nodes = [], [SimpleNamespace(token_ids=[], mask=[])]
    trace = SimpleNamespace(info={}, nodes=nodes, stop=stops.append)
    ctx = SimpleNamespace(model="policy", client=None)
    with serving(answer) as url:
        harness = picoswarm.InProcess(taskset.InProcessConfig(**how))
        asyncio.run(harness.launch(ctx, trace, None, url, "secret", {}, data))
    return trace.info["replies"], stops


def test_a_template_without_tools_gets_them_as_text():
    asked, no = [], chat(lambda talk: "no")
    launch("swarm", lambda body: (asked.append(body), no(body))[1], tools_as_text=True)
    assert not any("tools" in body for body in asked) and len(asked) == 25
    roles = [m["role"] for m in asked[-1]["messages"]]
    assert roles == ["system", "user", *["assistant", "user"] * 24]
    assert all(t["function"]["name"] in asked[0]["messages"][0]["content"]
               for t in make_env("swarm").tools)  # fmt: skip


def refuses(status: int, why: str, after: int = 0):
    """A server that says "no" to so many messages, and to more of them this."""
    no = chat(lambda talk: "no")

    def answer(body):
        late = len(body["messages"]) > after
        return (status, {"error": {"message": why}}) if late else no(body)

    return answer


TOO_LONG = "the conversation exceeds the model's maximum context length of 100"


@pytest.mark.parametrize(
    "environment, answer, found",
    [
        ("alphabet", lambda _: (200, completion("<sorted>", "length")), (["<sorted>"], [])),
        ("swarm", refuses(400, TOO_LONG, after=3), (["no", "no"], ["context_length"])),
    ],
)
def test_an_episode_that_is_out_of_tokens_counts_and_ends(environment, answer, found):
    assert launch(environment, answer) == found


@pytest.mark.parametrize(
    "environment, answer, error",
    [
        ("swarm", refuses(400, TOO_LONG), openai.BadRequestError),  # the task itself does not fit
        ("alphabet", refuses(404, "no model policy", after=3), openai.NotFoundError),
    ],
)
def test_a_failing_server_is_an_error_and_no_reply(environment, answer, error):
    with pytest.raises(error, match="context length|no model policy"):
        launch(environment, answer)


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.stem)
def test_the_configs_for_prime_rl_name_environments_that_exist(path):
    """tests/test_configs.py has their other keys."""
    written = tomllib.loads(path.read_text())
    (source,) = written["orchestrator"]["train"]["source"]
    (held_out,) = written["orchestrator"]["eval"]["source"]
    name = path.stem.removeprefix("prime_rl_")
    for block in (source, held_out):
        env = vf.resolve_env_config(block["env"])
        assert env.taskset.environment["type"] == name and env.agent.runtime.type == "subprocess"
        assert type(vf.load_environment(env)).__name__ == "Local"
    training, testing = (vf.resolve_env_config(b["env"]).taskset for b in (source, held_out))
    assert training.first_seed == settings.TRAIN_SEEDS and testing.first_seed == DEV_SEEDS
    same = training.environment, testing.environment
    assert picoswarm.make_env(same[0]) == picoswarm.make_env(same[1])
