"""Protects `uv run train.py` and what pip installs: pyproject.toml, uv.lock and the requirements
files name the same versions, from public places.
"""

import re
import tomllib
from urllib.parse import urlparse

from warm import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GROUPS = PROJECT["dependency-groups"]
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())
OURS = next(package for package in LOCK["package"] if package["name"] == "picoswarm")
FILES = {  # where a wheel may come from
    "https://pypi.org/simple": {"files.pythonhosted.org"},
    "https://download.pytorch.org/whl/cpu": {"download.pytorch.org", "download-r2.pytorch.org"},
}


def pins(file: str) -> set[str]:
    """The requirements of a file, without its comments and the files it includes."""
    lines = (re.split(r"\s*#", line)[0] for line in (ROOT / file).read_text().splitlines())
    return {line.strip() for line in lines if line.strip() and not line.startswith("-r")}


def plain(requirements: list[str]) -> set[str]:
    """The same without markers."""
    return {line.split(";")[0].strip() for line in requirements}


def test_groups_requirements_files_and_lock_name_the_same_versions():
    tested = pins("requirements.txt") | pins("requirements/dev.txt")
    assert plain(GROUPS["dev"] + GROUPS["cpu"]) == tested
    assert plain(GROUPS["gpu"]) - plain(GROUPS["cpu"]) == pins("requirements/gpu.txt")
    assert PROJECT["tool"]["uv"]["default-groups"] == ["dev", "cpu"]  # of a bare `uv run`
    for name, version in (line.split("==") for group in GROUPS.values() for line in plain(group)):
        locked = [package["version"] for package in LOCK["package"] if package["name"] == name]
        assert {found.split("+")[0] for found in locked} == {version}, name
    assert OURS["source"] == {"virtual": "."}  # nothing of ours is installed


def test_pip_brings_what_a_run_needs_from_the_tested_versions_on():
    """But wandb and openai, which a run does without, and torch, which comes with peft."""
    asked = {line.replace(">=", "==") for line in PROJECT["project"]["dependencies"]}
    left_out = {pin.split("==")[0] for pin in pins("requirements.txt") - asked}
    assert asked < pins("requirements.txt") and left_out == {"torch", "wandb", "openai"}
    (peft,) = (package for package in LOCK["package"] if package["name"] == "peft")
    assert "torch" in {need["name"] for need in peft["dependencies"]}


def test_the_lock_names_public_places_and_a_hash_for_every_file():
    for package in (package for package in LOCK["package"] if package is not OURS):
        files = package.get("wheels", []) + ([package["sdist"]] if "sdist" in package else [])
        assert files and all(re.fullmatch("sha256:[0-9a-f]{64}", file["hash"]) for file in files)
        hosts = {urlparse(file["url"]).netloc for file in files}
        assert hosts <= FILES[package["source"]["registry"]], package["name"]
