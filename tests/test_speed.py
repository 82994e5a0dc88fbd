"""Protects lab/speed.py: every side that is installed gives a number."""

import json
from importlib import metadata

import pytest

from lab import speed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_installed_side_gives_tokens_seconds_and_memory(tmp_path, capsys, dtype):
    out, narrow = str(tmp_path / "speed.json"), dtype == "bfloat16"
    setup = speed.Setup(tasks=2, k=2, reply=4, rounds=1, threads=1, out=out, dtype=dtype)
    (tmp_path / "speed.json").write_text('{"arms": {"another": {}}}')
    speed.main(setup)
    arms = json.loads((tmp_path / "speed.json").read_text())["arms"]
    assert arms.pop("another") == {}  # what was measured before stays
    here = [
        side
        for side, package in speed.SIDES.items()
        if any(metadata.distributions(name=package)) and (narrow or "float32" not in side)
    ]
    assert [name.split(", ")[1] for name in arms] == here and len(here) >= 3
    for name, arm in arms.items():
        [found] = arm["rounds"]
        assert found["tokens"] == 16 and found["seconds"] > 0 and found["mb"] > 50, name
    assert f"| pico_base{' in bfloat16' * narrow} | update, ours (torch " in capsys.readouterr().out
