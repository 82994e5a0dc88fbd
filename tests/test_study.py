"""Protects lab/study.py: the best setting of a sweep gets the seeds, what is there is not run
again, and what is kept of a held-out task is what was played."""

import json
import re
from functools import partial
from types import SimpleNamespace

import pytest

import settings
import warm
from bridges import api
from endpoint import say, serving
from env_alphabet import Alphabet
from env_letters import Letters
from env_swarm import play as play_scripted
from fast.sampler import TorchSampler
from helpers import put, write_lines
from lab import environments, study, tables
from policy import PICO, load_policy
from rollout import play
from steps import stir

TINY = """--env letters --difficulty 1 --updates 1 --sft-steps 1 --sft-examples 2 --sft-batch 2
--num-tasks 2 --k 2 --eval-n 4 --max-tokens 32 --no-eval-other-tiers"""
WORLDS = {"tier 1": "--eval-n 6", "tier 2": "--difficulty 2"}
ARMS = {
    "swept": {"what": "two rates", "sweep": ["--lr 1e-4", "--lr 3e-4"], "seeds": 2},
    "best_of": {"what": "the best of four", "of": "base", "best_of": 4},
    "base": {"what": "the base", "flags": "--updates 0 --sft-steps 0"},
}


def test_a_tiny_table_from_nothing(tmp_path, monkeypatch):
    said = []

    def run(words, cwd, check):
        said.append(words)
        assert warm.run(words[1:], pictures=False).returncode == 0

    # without the seconds to import torch anew
    monkeypatch.setattr(study, "subprocess", SimpleNamespace(run=run))
    table = {
        "flags": TINY,
        "seeds": 1,
        "measures": ["reward", "exact", "of another world"],
        "worlds": WORLDS,
        "arms": ARMS,
    }
    one = study.Table("tiny", table, tmp_path / "runs", tmp_path)
    for arm in ARMS:
        one.grow(arm, seeds=9)
    data = json.loads(one.file.read_text())
    assert len(said) == 3, "two settings, and the base once"
    assert data["made_by"] == "python -m lab.study tiny" and list(data["arms"]) == list(ARMS)
    swept, best_of, base = data["arms"].values()
    assert len(swept["swept"]) == 2 and len(swept["seeds"]) == 1, "one seed was planned"
    held, best = base["seeds"][0]["held_out"], best_of["seeds"][0]
    assert [len(held[world]["greedy"]["exact"]) for world in WORLDS] == [6, 4]
    assert set(held["tier 1"]["greedy"]) == {"reward", "exact"}, "what a score lacks is left out"
    assert set(best["held_out"]["tier 1"]) == {"sampled"} and "work" not in best
    assert base["seeds"][0]["work"] == 0 and len(base["seeds"][0]["development"]["final"]) == 4
    (tmp_path / "runs" / "tiny" / "swept-lr-1e-4-0" / "summary.json").unlink()
    one.grow("swept", seeds=9)
    assert len(said) == 3, "what stands in the results is not run again"
    one.file.unlink()
    one.grow("swept", seeds=9)
    assert len(said) == 4 and "--resume" in said[-1], "a run that was cut goes on"
    assert one.kept("swept")["swept"] == swept["swept"]


def test_the_first_of_the_best_on_development_tasks_gets_the_seeds(tmp_path, monkeypatch):
    """Runs that are made up: "b" is best on development tasks, and worst on held-out."""

    def train(flags, folder, threads):
        right = {"a": 1, "b": 3, "c": 3}[folder.name.split("-")[1]]
        folder.mkdir(parents=True, exist_ok=True)
        summary = {
            "tokens": {"sampled": 1_000_000, "trained": 200_000, "sft": 100_000},
            "seconds": {"total": 9.0},
            "machine": {"device": "CPU", "commit": "abc"},
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        final = {"stage": "final", "trained": True, "exact": [1] * right + [0] * (4 - right)}
        write_lines(folder / "evals.jsonl", [final])
        off = [{"mismatch": 0.25, "clip_fraction": 0.5}, {"mismatch": 0.75, "clip_fraction": 0.0}]
        write_lines(folder / "metrics.jsonl", off)

    held = lambda table, arm, flags, folder, seed: {"greedy": {"exact": f"{'--b' not in flags:d}"}}
    put(monkeypatch, study, train=train, play_world=held)
    table = {
        "flags": "--env letters",
        "seeds": 3,
        "measures": ["exact"],
        "worlds": {"tier 6": ""},
        "arms": {"swept": {"what": "swept", "sweep": ["--a", "--b", "--c"]}},
    }
    made_up = study.Table("made", table, tmp_path / "runs", tmp_path)
    made_up.grow("swept", 2)
    arm = made_up.kept("swept")
    assert arm["settings"].endswith("--b") and arm["swept"]["--b"]["development"] == 0.75
    assert [seed["held_out"]["tier 6"]["greedy"]["exact"] for seed in arm["seeds"]] == ["0", "0"]
    assert arm["seeds"][0]["work"] == 1 + 3 * 0.2
    assert (arm["seeds"][0]["mismatch"], arm["seeds"][0]["clip_fraction"]) == (0.5, 0.25)
    made_up.grow("swept", 99)
    again = made_up.kept("swept")["seeds"]
    assert again[:2] == arm["seeds"] and [seed["seed"] for seed in again] == [0, 1, 2]


@pytest.mark.parametrize("name", study.read_tables(tables.ROOT))
def test_every_arm_can_be_run_and_the_results_say_what_was_planned(name):
    table = study.read_tables(tables.ROOT)[name]
    results = tables.read(name)["arms"]
    assert set(results) <= set(table.arms), "an arm may be planned and not yet run"
    for arm in results:
        a, kept = table.arms[arm], table.kept(arm)
        assert a.keys() == {"what", *study.ARM}, "nothing unknown is said of an arm"
        assert kept["what"] == a["what"] and set(kept["swept"]) == set(a["sweep"])
        planned, done = min(table.seeds, a["seeds"]), [seed["seed"] for seed in kept["seeds"]]
        assert done == list(range(len(done))) and 0 < len(done) <= planned
        assert kept.get("planned", len(done)) == planned, "fewer are done only where it says so"
        assert set(a["worlds"]) <= table.worlds.keys() and (a["of"] or arm) in table.arms
    for arm, a in table.arms.items():
        for flags in {*a["sweep"]} or {""}:
            settings.command_line(table.flags_of(arm, flags).split())
    for flags in table.worlds.values():
        settings.command_line(f"{table.flags} {flags}".split())


# ------------------------------------------------------------------------------- in a policy's place
PASSES = '<tool_call>\n{"name": "pass_turn", "arguments": {}}\n</tool_call>'
WAITS = {"measures": ["reward", "turns_used"], "worlds": {"medium": "--eval-n 2"}, "seeds": 1}


def play_in_place(tmp_path, player: str) -> dict:
    arms = {"one": {"what": "one", "player": player}}
    one = study.Table(
        "made", WAITS | {"flags": "--env swarm", "arms": arms}, tmp_path / "runs", tmp_path
    )
    one.grow("one", seeds=1)
    [seed] = one.kept("one")["seeds"]
    return seed


def test_a_model_behind_an_endpoint_plays_the_scenarios_of_a_scripted_player(tmp_path):
    with serving(lambda handler, request: say(PASSES)) as (url, seen):
        theirs = play_in_place(tmp_path / "theirs", f"any@{url}")
    ours = play_in_place(tmp_path / "ours", "idle")
    assert theirs["held_out"]["medium"]["greedy"] == ours["held_out"]["medium"]["scripted"]
    assert len(seen) == 2 * 25 and {request["model"] for request in seen} == {"any"}
    for seed in (ours, theirs):
        assert seed["machine"] and re.match("[0-9a-f]{40}", seed["commit"])


def test_a_scenario_that_failed_ends_the_arm_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(api, "RETRIES", 0)
    with (
        serving(lambda handler, request: (404, {"error": "no such model"})) as (url, _),
        pytest.raises(SystemExit, match="^any: scenario 0 failed: .*no such model"),
    ):
        play_in_place(tmp_path, f"any@{url}")


# ---------------------------------------------------------------------------- replies prefilled
ALPHABET = partial(Alphabet, 3, 3, 1, 4, 8, power_per_turn=False, think=True, style="states")


@pytest.mark.parametrize(
    "make_env, words, size",
    [
        (partial(Letters, 6, "binary", True, "states"), 2, 40),
        (ALPHABET, 1, 200),
    ],
)
def test_each_reply_begins_as_the_expert_does_and_the_rest_is_the_models_own(
    pico, make_env, words, size
):
    sampler = study.Prefilled(TorchSampler(pico), words)
    (((episode,),)) = play(pico, sampler, partial(sampler.watch, make_env), [5], 1, size, 0.0, 0)
    game = make_env(style="derives") if make_env is ALPHABET else make_env()
    game.style = "derives"
    game.reset(5)
    for said in (m["content"] for m in episode.messages if m["role"] == "assistant"):
        given = " ".join(game.expert_reply().split(" ")[:words])
        assert given.startswith("<think>\n") and said.startswith(given) and len(said) > len(given)
        game.step(said)
    assert len(episode.logprobs) == len(episode.token_ids)


def test_the_base_has_not_moved_and_a_policy_with_other_weights_has():
    policy = load_policy(str(PICO), 4, 8, "cpu")
    moved = partial(study.moved, policy, partial(Letters, 1, "binary", True, "bare"), range(8), 24)
    assert moved() == pytest.approx([0.0] * 8, abs=1e-4)
    stir(policy, 0.1)
    assert sum(moved()) / 8 > 0.1, "a KL divergence, estimated"
    assert moved() == moved(), "of the same samples, those of the base"


# ------------------------------------------------------------------------------- environments
@pytest.mark.parametrize("right", [True, False])
def test_by_chance_right_answers_earn_as_much_as_wrong_ones_and_exact_tells_them_apart(right):
    env, found = environments.Chance(), []
    for seed in range(400):
        env.reset(seed % 200)  # the same answer to the same task is tossed for anew
        env.step(env.expert_reply() if right else "")
        found.append(env.score())
    assert 0.4 < sum(m["reward"] for m in found) / 400 < 0.6
    assert {m["exact"] for m in found} == {float(right)}
    assert [m["reward"] for m in found[:200]] != [m["reward"] for m in found[200:]]


def test_the_player_that_leaves_ends_its_episodes_by_a_text_after_12_8_turns_on_average():
    """As the published base did. So what SFT shows of it stops early, too."""
    env, turns = environments.Leaves(), []
    for seed in range(200):
        marks = play_scripted(env, seed)
        turns.append(len(env.log))
        left = env.log[-1].calls == 0
        assert marks["turns_used"] == turns[-1] - left, "all but the last turn have a call"
    assert 11.3 < sum(turns) / 200 < 14.3 and min(turns) <= 3 and turns.count(25) > 20
    assert (env.payoff_scale, env.text_ends) == ("published", True)


@pytest.mark.parametrize("expression", ["57 + 62", "15 - 43", "40 - 17", "99 + 10", "12 - 12"])
def test_the_expert_of_sums_goes_over_the_tens_and_each_of_its_steps_is_true(expression):
    entry = {"metadata": {"expression": expression}, "answer": str(eval(expression))}
    reply = environments.in_two_steps(entry)
    first, second = [step.split(" = ") for step in reply.split("\n")[1:3]]
    assert eval(first[0]) == int(first[1]) and eval(second[0]) == int(second[1])
    assert first[0].startswith(expression[:-1]) and second[0].startswith(f"{first[1]} ")
    assert second[1] == entry["answer"] and reply.endswith(f"<answer>{second[1]}</answer>")
