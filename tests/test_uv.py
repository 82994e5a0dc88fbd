"""Protects `uv run train.py`: pyproject.toml, uv.lock and the requirements files name the same versions, from public places, and what pip
installs has none of them. `make test-all` runs the command itself.
"""

import re
import tomllib
from pathlib import Path
from urllib.parse import unquote, urlparse

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GROUPS, UV = PROJECT["dependency-groups"], PROJECT["tool"]["uv"]
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())
OURS = next(package for package in LOCK["package"] if package["name"] == "picoswarm")
FILES = {  # where a wheel may come from
    "https://pypi.org/simple": {"files.pythonhosted.org"},
    "https://download.pytorch.org/whl/cpu": {"download.pytorch.org", "download-r2.pytorch.org"},
}


def pins(file: str) -> set[str]:
    """The requirements of a file, without its comments and the files it includes."""
    lines = (re.split(r"\s*#", line)[0].strip() for line in (ROOT / file).read_text().splitlines())
    return {line for line in lines if line and not line.startswith("-r")}


def plain(requirements: list[str]) -> set[str]:
    """The same without markers."""
    return {line.split(";")[0].strip() for line in requirements}


def locked(name: str) -> dict[str, dict]:
    """{version: entry of uv.lock}."""
    return {package["version"]: package for package in LOCK["package"] if package["name"] == name}


def test_the_groups_are_the_requirements_files():
    assert plain(GROUPS["dev"] + GROUPS["cpu"]) == pins("requirements.txt")
    assert plain(GROUPS["gpu"]) - plain(GROUPS["cpu"]) == pins("requirements/gpu.txt")
    assert [line.split("==")[0] for line in GROUPS["cpu"]] == ["torch"] and GROUPS["cpu"][0] in GROUPS["gpu"]
    assert UV["default-groups"] == ["dev", "cpu"]  # what a bare `uv run` takes


def test_the_lock_was_made_from_these_groups():
    for group, wanted in GROUPS.items():
        asked = {(row["name"], row["specifier"].removeprefix("==")) for row in OURS["metadata"]["requires-dev"][group]}
        assert asked == {tuple(line.split("==")) for line in plain(wanted)}
        for name, version in asked:
            assert {found.split("+")[0] for found in locked(name)} == {version}, name
    assert OURS["source"] == {"virtual": "."}  # nothing of ours is installed


def test_what_pip_installs_asks_for_none_of_it():
    assert [re.split("[=<>~]", line)[0] for line in PROJECT["project"]["dependencies"]] == ["pyspellchecker"]
    extras = PROJECT["project"]["optional-dependencies"]  # of picoswarm-doctor, which reads logs
    assert {name: [re.split("[=<>~]", line)[0] for line in lines] for name, lines in extras.items()} == {"doctor": ["numpy"]}
    assert OURS["metadata"]["provides-extras"] == ["doctor"] and OURS["optional-dependencies"]["doctor"] == [{"name": "numpy"}]


def test_linux_without_a_card_gets_the_cpu_build_of_torch():
    """And no package of CUDA: those that torch's other builds ask for are asked for on no path from the cpu group."""
    assert UV["sources"]["torch"] == {"index": "pytorch-cpu", "group": "cpu", "marker": "sys_platform == 'linux'"}
    torch, plain_build = locked("torch"), GROUPS["cpu"][0].split("==")[1]
    build = f"{plain_build}+cpu"
    assert set(torch) == {plain_build, build} and torch[build]["source"] == {"registry": UV["index"][0]["url"]}
    assert not [row["name"] for row in torch[build]["dependencies"] if re.match("nvidia|cuda|triton", row["name"])]
    asked = [row for row in OURS["dev-dependencies"]["cpu"] if row["name"] == "torch"]
    for row in asked:
        assert ("sys_platform == 'linux'" in row["marker"]) == (row["version"] == build), row
    assert {row["version"] for row in asked} == set(torch)
    wheels = {unquote(wheel["url"]).split("/")[-1] for wheel in torch[build]["wheels"]}
    for python in ("311", "312", "313", "314"):
        for machine in ("x86_64", "aarch64"):
            assert f"torch-{build}-cp{python}-cp{python}-manylinux_2_28_{machine}.whl" in wheels


def test_the_lock_names_public_places_and_a_hash_for_every_file():
    for package in LOCK["package"]:
        if package is OURS:
            continue
        files = package.get("wheels", []) + ([package["sdist"]] if "sdist" in package else [])
        hosts = FILES[package["source"]["registry"]]
        assert files and all(re.fullmatch("sha256:[0-9a-f]{64}", file["hash"]) for file in files), package["name"]
        assert {urlparse(file["url"]).netloc for file in files} <= hosts, package["name"]
