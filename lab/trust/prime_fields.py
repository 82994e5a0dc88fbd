"""Which fields prime-rl's configs have, where ours write any: from a checkout of prime-rl into bridges/configs/prime_rl_fields.json.

    pip install -r requirements/verifiers.txt        # into a venv that already has the torch of requirements.txt
    git clone https://github.com/PrimeIntellect-ai/prime-rl
    python -m lab.trust.prime_fields prime-rl

No registry has prime-rl, and its own environment is gigabytes of CUDA. But its schema stands in a package without any of that,
packages/prime-rl-configs. This reads it from the checkout, lets it judge bridges/configs/*.toml, and keeps the names of the fields of each
section that they write, with the commit. tests/test_configs.py compares the files with these names, in every `make test`; make them again
when prime-rl has moved on.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

import tyro

from lab.common import ROOT, write_json

CONFIGS = ROOT / "bridges" / "configs"
FIELDS = CONFIGS / "prime_rl_fields.json"
THEIRS = "env"  # what stands below it is read by verifiers: tests/verifiers/test_adapter.py asks the real one


def sections(written, path: str = "") -> dict[str, set[str]]:
    """{section: keys} of a config:
    {"max_steps": 2, "trainer": {"optim": {"lr": 1}}} -> {"": {max_steps, trainer}, "trainer": {optim}, …}."""
    if isinstance(written, list):
        return merge(sections(entry, path) for entry in written)
    if not isinstance(written, dict) or path.split(".")[-1] == THEIRS:
        return {}
    below = merge(sections(value, f"{path}.{key}".strip(".")) for key, value in written.items())
    return {path: set(written)} | below


def merge(found) -> dict[str, set[str]]:
    out: dict[str, set[str]] = {}
    for some in found:
        for path, keys in some.items():
            out[path] = out.get(path, set()) | keys
    return out


def objects(node: dict, definitions: dict) -> list[dict]:
    """The tables that a value may be, of all the choices that a schema leaves it."""
    if "$ref" in node:
        return objects(definitions[node["$ref"].split("/")[-1]], definitions)
    choices = [*node.get("anyOf", []), *node.get("oneOf", []), *node.get("allOf", [])]
    if "items" in node:
        choices.append(node["items"])
    here = [node] if "properties" in node else []
    return here + [found for choice in choices for found in objects(choice, definitions)]


def names(schema: dict, path: str) -> list[str]:
    """The fields of a section."""
    tables = objects(schema, schema["$defs"])
    for key in filter(None, path.split(".")):
        tables = [found for table in tables if key in table["properties"] for found in objects(table["properties"][key], schema["$defs"])]
    return sorted({name for table in tables for name in table["properties"]})


def main(checkout: tyro.conf.Positional[Path]) -> None:
    """Read the schema of a checkout of prime-rl."""
    sys.path.insert(0, str(checkout / "packages" / "prime-rl-configs" / "src"))
    from prime_rl.configs.rl import RLConfig

    written = {file.name: tomllib.loads(file.read_text()) for file in sorted(CONFIGS.glob("*.toml"))}
    for name, config in written.items():
        RLConfig(**config)  # raises where a value is wrong, too
        print(f"{name}: accepted")
    schema = RLConfig.model_json_schema()
    git = lambda *words: subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True, check=True).stdout.strip()
    found = {path: names(schema, path) for path in sorted(merge(map(sections, written.values())))}
    facts = {"repository": "PrimeIntellect-ai/prime-rl", "commit": git("rev-parse", "HEAD"), "date": git("log", "-1", "--format=%cs")}
    write_json(FIELDS, facts | {"fields": found})
    print(f"{FIELDS.relative_to(ROOT)}: {sum(map(len, found.values()))} fields of {len(found)} sections, commit {facts['commit'][:7]}")


if __name__ == "__main__":
    tyro.cli(main)
