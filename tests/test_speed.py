"""Protects lab/speed.py and lab/card.py: every side that is installed gives a number, and the
comparison with a card is exact where both sides are the CPU."""

import json
from importlib import metadata

from grpo import LOSSES
from lab import card, speed

TINY = dict(tasks=2, k=2, reply=4, rounds=1, threads=1)


def test_every_installed_side_gives_tokens_seconds_and_memory(tmp_path, capsys):
    setup = speed.Setup(**TINY, out=str(tmp_path / "speed.json"))
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


def test_a_card_is_compared_with_the_cpu():
    found = card.same("pico_base", rank=0, tasks=2, k=2, longest=8)  # without a card: with itself
    assert (found["equal"], found["replies"], found["most"]) == (2, 2, 0.0)
    assert found["gradients"] == dict.fromkeys(LOSSES, 0.0)
