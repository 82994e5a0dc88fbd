"""Protects lab/speed.py: every side that is installed gives a number, and a card's smoke run is
right on a CPU."""

import json
from importlib import metadata

from lab import speed

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
    assert f"| {speed.Setup().model} | update_ours |" in capsys.readouterr().out


def test_replies_that_end_by_themselves_are_counted_to_their_end():
    found = speed.sampling_generate(speed.Setup(**TINY | {"reply": 0}))
    assert 4 < found["tokens"] < 4 * speed.LONGEST


def test_the_smoke_run_for_a_card_compares_it_with_the_cpu(tmp_path):
    speed.main(speed.Setup("card", **TINY, out=str(tmp_path / "card.json")))
    arms = json.loads((tmp_path / "card.json").read_text())["arms"]
    assert (arms["same"]["equal"], arms["same"]["replies"]) == (2, 2)
    assert arms["same"]["most"] < 0.1 and arms["update_ours"]["tokens"] == 16
