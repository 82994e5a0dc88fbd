"""Protects lab/speed.py: every side that is installed gives a number."""

import json
from importlib import metadata

from lab import speed


def test_every_installed_side_gives_tokens_seconds_and_memory(tmp_path, capsys):
    out = str(tmp_path / "speed.json")
    setup = speed.Setup(tasks=2, k=2, reply=4, rounds=1, threads=1, out=out)
    (tmp_path / "speed.json").write_text('{"arms": {"another": {}}}')
    speed.main(setup)
    arms = json.loads((tmp_path / "speed.json").read_text())["arms"]
    assert arms.pop("another") == {}  # what was measured before stays
    here = [
        side for side, package in speed.SIDES.items() if any(metadata.distributions(name=package))
    ]
    assert [name.split(", ")[1] for name in arms] == here and len(here) >= 3
    for name, arm in arms.items():
        [found] = arm["rounds"]
        assert found["tokens"] == 16 and found["seconds"] > 0 and found["mb"] > 50, name
    assert f"| {speed.Setup().model} | update, ours (torch " in capsys.readouterr().out
