"""Protects the configs for prime-rl: every key that they write is a field of its schema,
read from the commit that bridges/configs/prime_rl_fields.json names."""

import copy
import json
import re
import tomllib

import pytest

from lab.trust.prime_fields import CONFIGS, FIELDS, names, objects, sections

FACTS = json.loads(FIELDS.read_text())
FILES = sorted(CONFIGS.glob("*.toml"))


def unknown(config: dict) -> list[str]:
    """The keys that prime-rl does not have, as it would name them."""
    fields = FACTS["fields"]
    return sorted(f"{path}.{key}".strip(".") for path, keys in sections(config).items() for key in keys if key not in fields.get(path, ()))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_key_is_a_field_of_prime_rl(file):
    assert unknown(tomllib.loads(file.read_text())) == []


def test_there_is_one_for_every_environment_and_the_commit_is_named():
    assert [file.stem for file in FILES] == ["prime_rl_alphabet", "prime_rl_letters", "prime_rl_swarm"]
    assert re.fullmatch(r"[0-9a-f]{40}", FACTS["commit"]) and re.fullmatch(r"\d{4}-\d\d-\d\d", FACTS["date"])


@pytest.mark.parametrize("path, wrong", [
    ((), "max_step"),
    (("trainer", "optim"), "learning_rate"),
    (("trainer", "model", "lora"), "r"),
    (("orchestrator",), "rollouts_per_example"),
    (("orchestrator", "train", "sampling"), "max_tokens"),
    (("orchestrator", "train", "source", 0), "id"),
    (("inference",), "tensor_parallel"),
])  # fmt: skip
def test_a_misspelt_key_is_found_wherever_it_stands(path, wrong):
    config = tomllib.loads(FILES[1].read_text())
    table = copy.deepcopy(config)
    place = table
    for key in path:
        place = place[key]
    place[wrong] = 1
    dotted = ".".join(str(key) for key in (*path, wrong) if key != 0)
    assert unknown(table) == [dotted] and unknown(config) == []


def test_the_fields_of_a_schema_are_found_through_references_lists_and_choices():
    inner = {"type": "object", "properties": {"lr": {"type": "number"}}}
    other = {"type": "object", "properties": {"lr": {}, "betas": {}}}
    schema = {
        "$defs": {"Adam": inner, "Muon": other, "Source": {"properties": {"name": {}}}},
        "properties": {
            "optim": {"oneOf": [{"$ref": "#/$defs/Adam"}, {"$ref": "#/$defs/Muon"}]},
            "sources": {"type": "array", "items": {"$ref": "#/$defs/Source"}},
            "steps": {"type": "integer"},
        },
    }
    assert names(schema, "") == ["optim", "sources", "steps"]
    assert names(schema, "optim") == ["betas", "lr"] and names(schema, "sources") == ["name"] and names(schema, "nothing") == []
    assert objects(schema["properties"]["steps"], schema["$defs"]) == []
    written = {"steps": 1, "sources": [{"name": "a"}, {"env": {"taskset": {"any": 1}}}]}
    assert sections(written) == {"": {"steps", "sources"}, "sources": {"name", "env"}}


def test_prime_rl_itself_accepts_them_where_it_is_installed():
    rl = pytest.importorskip("prime_rl.configs.rl", reason="prime-rl is not installed here")
    for file in FILES:
        assert rl.RLConfig(**tomllib.loads(file.read_text())).max_steps > 0
