"""Protects the speedrun's judge: what is faster passes, what is lucky or tricky does not, and the board says what was judged.

Made-up rounds test the verdict, made-up entries (lab/speedrun/tricks.py) the fence and, in processes of their own, the round itself.
"""

import json
import math
from itertools import product

import numpy as np
import pytest
from safetensors.torch import save_file

import settings
from env_letters import write_reply
from lab.common import read_json
from lab.speedrun import game, judge
from lab.speedrun.tricks import TRICKS
from policy import PICO, load_policy

HONEST = judge.REFERENCE.read_text()
DOWN = {"seconds": 9.0, "cpu": 9.0, "episodes": 500, "exact": 0.01, "end": "done"}


def rounds(seconds, exact=0.95, end="done", others=None, n=10):
    """Rounds as play_round gives them. seconds: of the entry, one number or one per round; the reference takes 20 and a bit."""
    line = lambda s, e, end: {"seconds": s, "cpu": 1.5 * s, "episodes": 500, "exact": e, "end": end}
    each = lambda x, i: x[i] if isinstance(x, list) else x
    out = []
    for i in range(n):
        sides = {"reference": line(20 + i / 10, 0.96, "done"), "mine": line(each(seconds, i), each(exact, i), each(end, i))}
        out.append({"sides": sides | {name: line(each(s, i), 0.96, "done") for name, s in (others or {}).items()}})
    return out


def test_a_standing_record_that_was_too_slow_in_a_round_does_not_stop_an_entry():
    """Its seconds are then those at which it was stopped: too few."""
    sides = rounds(9.0, others={"old": 15.0})
    sides[6]["sides"]["old"] |= {"seconds": 60.0, "end": "was not done after 60 s"}
    assert judge.verdict("mine", 10, sides, DOWN, HONEST)["record"]
    sides[6]["sides"]["old"]["end"] = "raised ValueError"
    assert not judge.verdict("mine", 10, sides, DOWN, HONEST)["record"]


def test_a_side_that_never_asked_for_a_reward_ends_in_a_verdict_and_not_in_an_exception():
    sides = rounds(9.0, others={"old": 15.0})
    sides[3]["sides"]["old"] |= {"episodes": 0, "end": "was not ready in 300 s"}
    result = judge.verdict("mine", 10, sides, DOWN, HONEST)
    assert not result["record"] and set(result["against"]) == {"reference"}
    assert "round 3: old was not ready in 300 s" in result["why_not"]


def said(*args, planned=10, upside_down=DOWN, source=HONEST, **kwargs):
    return judge.verdict("mine", planned, rounds(*args, **kwargs), upside_down, source)


# ------------------------------------------------------------------------------------------------ the verdict


def test_p_is_the_share_of_all_signs_that_do_as_well():
    logs = np.array([-0.3, 0.1, -0.2, -0.05, 0.02, -0.4, -0.1])
    by_hand = np.mean([np.dot(signs, logs) <= logs.sum() + 1e-9 for signs in product((1, -1), repeat=7)])
    assert judge.p_values(logs[:, None])[0] == pytest.approx(by_hand)
    assert judge.p_values(np.full((10, 1), -0.1))[0] == 1 / 1024 and judge.p_values(np.full((10, 1), 0.1))[0] == 1


@pytest.mark.parametrize("shape", ["normal", "heavy", "two speeds"])
def test_an_entry_that_is_no_faster_passes_once_in_a_hundred_and_a_good_one_nearly_always(shape):
    rng = np.random.default_rng(0)
    draw = {
        "normal": rng.standard_normal,
        "heavy": lambda size: rng.standard_t(3, size),
        "two speeds": lambda size: rng.choice([-1.0, 3.0], size, p=[0.8, 0.2]),
    }[shape]
    logs = 0.15 * (draw((10, 5000)) - draw((10, 5000)))
    assert (judge.p_values(logs) < judge.P).mean() < 0.014
    assert (judge.p_values(logs + math.log(0.5)) < judge.P).mean() > 0.9


def test_a_real_entry_is_a_record():
    found = said(10.0)
    assert found["record"] and not found["why_not"]
    assert found["against"]["reference"]["p"] == pytest.approx(1 / 1024, abs=1e-4) and found["against"]["reference"][
        "ratio"
    ] == pytest.approx(0.489, abs=1e-3)


@pytest.mark.parametrize(
    "why, kwargs",
    {
        "a slow one": ("not faster than reference: p = 1.000", dict(seconds=30.0)),
        "one lucky round": ("not faster than reference", dict(seconds=[1.0] + [20.5] * 9)),
        "slower than the record": ("not faster than older", dict(seconds=10.0, others={"older": 9.0})),
        "stopped too early once": ("round 3: it stopped at 89.8%", dict(seconds=10.0, exact=[0.95] * 3 + [0.898] + [0.95] * 6)),
        "crashed once": ("round 9: it stopped: KeyError", dict(seconds=10.0, end=["done"] * 9 + ["stopped: KeyError"])),
        "only nine rounds": ("9 of 10 rounds are done", dict(seconds=10.0, n=9)),
        "nine rounds were planned": ("9 rounds are too few", dict(seconds=10.0, n=9, planned=9)),
        "does not need rewards": ("ends at 94.0% with the rewards upside down", dict(seconds=10.0, upside_down={"exact": 0.94})),
        "was not asked that": ("not yet run with the rewards upside down", dict(seconds=10.0, upside_down=None)),
        "an expert at hand": ("imports env_letters", dict(seconds=10.0, source=TRICKS["expert"][2])),
    }.values(),
)  # fmt: skip
def test_what_is_no_record_is_told_why(why, kwargs):
    found = said(kwargs.pop("seconds"), **kwargs)
    assert not found["record"] and any(why in line for line in found["why_not"]), found["why_not"]


# ------------------------------------------------------------------------------------------------ the fence

BEHIND = {  # line: what the fence says
    "import os": "imports os",
    "from lab.speedrun import judge": "imports lab",
    "from settings import make_env": "imports settings.make_env",
    "from rollout import expert_episode": "imports rollout.expert_episode",
    "from sft import demonstrations": "imports sft.demonstrations",
    "from . import other": "imports ?",
    "from policy import Path": "imports policy.Path",
    "import grpo": "imports grpo",
    "from torch import load as thing": "imports torch.load",
    "import torch.multiprocessing": "imports torch.multiprocessing",
    "x = open('weights')": "uses open",
    "x = ().__class__.__bases__": "uses __class__",
    "import torch; x = torch.hub": "uses hub",
    "import numpy as np; x = np.load('a.npy')": "uses load",
    "game.ask({'reset': 1})": "uses ask",
    "import torch; torch.mm = None": "changes torch",
    f"x = '{'a' * 201}'": "a literal",
    "\n" * 201: "more than 200 lines",
}


@pytest.mark.parametrize("line", BEHIND, ids=list(BEHIND.values()))
def test_the_fence_names_what_no_entry_may_do(line):
    assert any(BEHIND[line] in said for said in judge.fence(HONEST + line))


@pytest.mark.parametrize("file", sorted(judge.ENTRIES.glob("[a-z]*.py")), ids=lambda file: file.stem)
def test_the_committed_entries_are_inside_the_fence(file):
    assert judge.fence(file.read_text()) == []


# ------------------------------------------------------------------------------------------------ tasks and rewards


def test_the_bank_gives_questions_and_pays_exact_answers_and_nothing_else():
    bank = judge.Bank(judge.new_training_root())
    mine = game.Game(7, lambda question: json.loads(json.dumps(bank.answer(question))))
    assert mine.tasks(3) == [0, 1, 2] and mine.tasks(2) == [3, 4]
    truth, env = judge.LETTERS(), mine.env()
    assert env.reset(4) == truth.reset(bank.root + 4) and not hasattr(env, "expert_reply")
    for reply, reward in ((write_reply(truth.task, "derives"), 1.0), ("no idea", 0.0)):
        assert env.step(reply) == ([], True) and env.score() == {"reward": reward}
        upside_down = judge.Bank(bank.root, upside_down=True)
        upside_down.answer({"tasks": 5})
        assert upside_down.answer({"score": 4, "reply": reply}) == {"reward": 1 - reward}
    assert bank.episodes == 2
    for number in (5, -1, bank.root):
        with pytest.raises(ValueError, match="was not handed out"):
            bank.answer({"reset": number})


def test_tasks_for_training_and_for_the_end_never_meet_and_are_never_the_same_twice():
    training, held_out = {judge.new_training_root() for _ in range(50)}, {judge.new_held_out_root() for _ in range(50)}
    assert len(training) == len(held_out) == 50
    assert max(training) + 10**9 < min(held_out) and min(training) > 1000 * settings.DEV_SEEDS


def test_the_settings_of_an_entry_are_those_of_train_py():
    cfg = game.Game(0, None).config(epochs=2)
    assert (cfg.lr, cfg.num_tasks, cfg.k, cfg.updates, cfg.max_tokens, cfg.importance, cfg.epochs) == (
        3e-4,
        8,
        8,
        150,
        judge.LONGEST,
        "clip",
        2,
    )


# ------------------------------------------------------------------------------------------------ whole rounds


def test_a_round_with_entries_that_cheat(tmp_path):
    """One that stops at once, one that never ends, and one that leaves a process behind. Each needs seconds to import torch; the other
    tricks do without."""
    names = ["lazy", "sleeper", "helper"]
    for name in names:
        (tmp_path / f"{name}.py").write_text(TRICKS[name][2])
    played = judge.play_round({name: tmp_path / f"{name}.py" for name in names}, 1, tasks=24, most=20.0)["sides"]
    assert played["lazy"]["end"] == "done" and 0 < played["lazy"]["exact"] < 0.6 and played["lazy"]["episodes"] == 1
    assert "was not done after" in played["sleeper"]["end"] and played["sleeper"]["seconds"] < 20
    assert played["helper"]["end"] == "left a process behind: sleep 1000"


def test_weights_are_read_with_care(tmp_path):
    policy, file = load_policy(str(PICO), 0, 64, "cpu"), tmp_path / "weights"
    good = game.weights_of(policy)
    save_file(good, file)
    assert judge.read_weights(file).keys() == good.keys()
    name = next(iter(good))
    for bad in (good | {name: good[name] * float("nan")}, good | {name: good[name][:1].clone()}, good | {"more": good[name].clone()}):
        save_file(bad, file)
        with pytest.raises(ValueError, match="no model of this shape"):
            judge.read_weights(file)


# ------------------------------------------------------------------------------------------------ the board


@pytest.mark.parametrize("result", judge.judged(), ids=lambda r: r["name"])
def test_a_verdict_of_the_board_follows_from_its_rounds_and_its_source(result):
    source = judge.ROOT / result["entry"]
    assert judge.digest(source) == result["source"], "the entry was changed after it was judged"
    again = judge.verdict(result["name"], result["rounds"], result["played"], result["upside_down"], source.read_text())
    assert again == {key: result[key] for key in again}


def test_the_made_up_entries_were_stopped_when_they_were_played():
    seen = read_json(judge.BOARD / "tricks.json")["tricks"]
    assert {name: entry["the fence says"] for name, entry in seen.items()} == {n: judge.fence(t[2]) for n, t in TRICKS.items()}
    assert seen["solver"]["played"]["upside down"]["exact"] > judge.FAKE


def test_the_page_shows_the_reference_as_it_is():
    assert f"```python\n{HONEST.rstrip()}\n```" in (judge.ROOT / "docs" / "speedrun.md").read_text()
