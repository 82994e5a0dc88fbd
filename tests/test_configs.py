"""Protects the configs for prime-rl: every key that they write is a field of its schema.

No registry has prime-rl. bridges/configs/prime_rl_fields.json has the fields of the sections that
ours write, read from its schema at the commit that the file names (commit 22b9273 had the reader).
"""

import json
import tomllib
from pathlib import Path

import pytest

from env_swarm import Swarm
from settings import make_env
from test_settings import chosen

CONFIGS = Path(__file__).resolve().parents[1] / "bridges" / "configs"
FACTS = json.loads((CONFIGS / "prime_rl_fields.json").read_text())


def unknown(written, path: str = "") -> list[str]:
    """The keys that prime-rl does not have. What stands below `env` is read by verifiers."""
    if isinstance(written, list):
        return [key for entry in written for key in unknown(entry, path)]
    if not isinstance(written, dict) or path.endswith(".env"):
        return []
    found = [f"{path}.{key}".strip(".") for key in written.keys() - set(FACTS["fields"][path])]
    for key, value in written.items():
        if key in FACTS["fields"][path]:
            found += unknown(value, f"{path}.{key}".strip("."))
    return found


@pytest.mark.parametrize("env", ["alphabet", "letters", "swarm"])
def test_every_key_is_a_field_of_prime_rl(env):
    """And `prime train` (0.18.0) does not refuse it, as it does a config of the retired kind."""
    written = tomllib.loads((CONFIGS / f"prime_rl_{env}.toml").read_text())
    assert unknown(written) == []
    assert isinstance(written["model"], dict) and "inference" in written
    assert not written.keys() & {"env", "k8s", "clean"}


@pytest.mark.parametrize("part", ["train", "eval"])
def test_the_swarm_has_the_published_rules_of_the_preset(part):
    written = tomllib.loads((CONFIGS / "prime_rl_swarm.toml").read_text())
    (source,) = written["orchestrator"][part]["source"]
    rules = source["env"]["taskset"]["environment"]
    assert rules.pop("type") == "swarm"
    env = Swarm(**rules)
    assert env == make_env(chosen(4e9, "--preset", "swarm-published"), "medium")
    assert env.text_ends and env.payoff_scale == "published" and env.error_penalty == 0
