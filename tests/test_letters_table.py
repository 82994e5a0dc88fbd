"""Protects the letters table: a setting is chosen on development tasks alone, every arm is judged on the same held-out ones, and a
derivation that was begun for the base is part of what it said.
"""

import json
from dataclasses import replace
from functools import partial

import pytest

from env_alphabet import Alphabet
from env_letters import Letters
from fast.sampler import TorchSampler
from lab.claims import alphabet, letters, study
from lab.claims.chance import Chance
from rollout import play

RIGHT = {"grpo": 0.9, "selection": 0.8, "sft_derives": 0.7, "sft_states": 0.5, "no_think_partial": 0.3, "no_think": 0.2, "start": 0.1}
RIGHT["chance"] = RIGHT["start"]


def save(folder, development: float, held_out: float | None = None) -> None:
    folder.mkdir(parents=True)
    tokens = {"sampled": 1_000_000, "trained": 200_000, "sft": 100_000}
    machine = dict.fromkeys(("torch", "transformers", "peft", "device"), "1.0")
    eval_ = {"tier 6": {"final": {"exact": development}}}
    (folder / "summary.json").write_text(json.dumps({"eval": eval_, "trained": "tier 6", "tokens": tokens, "machine": machine}))
    exact = {"after_sft": [0.0] * 256, "final": [float(i < development * 256) for i in range(256)]}
    lines = [{"stage": stage, "tasks": "tier 6", "trained": True, "exact": right} for stage, right in exact.items()]
    if held_out is not None:
        lines.append(
            {
                "stage": "eval_only",
                "tasks": "tier 6, held-out",
                "trained": False,
                "exact": [float(i < held_out * letters.N) for i in range(letters.N)],
            }
        )
    (folder / "evals.jsonl").write_text("\n".join(map(json.dumps, lines)))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Committed runs of all arms; of a swept arm the second setting is best in development, and worst on held-out tasks."""
    monkeypatch.setattr(letters, "STUDY", replace(letters.STUDY, out=tmp_path, seeds=(0, 1, 2)))
    for arm, a in letters.ARMS.items():
        second = list(a.sweep)[min(1, len(a.sweep) - 1)]
        for setting in a.sweep:
            best = setting == second
            for seed in letters.STUDY.seeds if best else (0,):
                share = RIGHT[arm] + 0.01 * seed
                save(tmp_path / study.run_name(arm, setting, seed), share if best else share - 0.05, share if best else None)
    found = {"base": [[0.0] * letters.N], "begun": [[1.0] * letters.N], "best_of": [[1.0, 0.0] * (letters.N // 2)] * 5}
    (tmp_path / "others.json").write_text(json.dumps(found))
    return tmp_path


def test_the_setting_that_is_best_in_development_is_taken_and_the_first_of_equals(kept):
    best = partial(study.best, letters.STUDY)
    assert best("selection") == "lr3e-5" and best("sft_states") == "lr3e-4-n1000" and best("grpo") == ""
    (kept / "selection-lr1e-5-0" / "summary.json").write_text((kept / "selection-lr3e-5-0" / "summary.json").read_text())
    assert best("selection") == "lr1e-5"


def test_the_page_has_every_arm_with_its_seeds_its_interval_and_its_work(kept):
    letters.page()
    rows = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in (kept / "README.md").read_text().splitlines()}
    grpo, selection = rows[letters.ARMS["grpo"].what], rows[letters.ARMS["selection"].what]
    assert grpo[2] == "91.0%" and grpo[3].startswith("**91.1% [") and grpo[4] == "90.0 91.0 92.2" and grpo[5] == ""
    low, high = map(float, grpo[3].strip("*").partition("[")[2].strip("]").split(", "))
    assert low < 90 and high > 92.2, "three seeds and 512 tasks leave more doubt than the seeds alone"
    assert selection[1] == "lr 3e-5" and selection[5].startswith("+10.0 points [") and grpo[6] == f"{1 + 3 * 0.2:.1f}"
    assert (
        "greedy: GRPO, thinking not allowed +21.2 points [" in (kept / "README.md").read_text()
        and "+20.3 +21.1 +22.3" in (kept / "README.md").read_text()
    )
    assert rows["the base, before anything"][3].startswith("**0.0% [0.0, ") and (kept / "letters.png").stat().st_size > 0


def test_a_derivation_that_was_begun_is_read_by_the_model_and_counted_as_said(pico):
    env, seeds = partial(Letters, 6, "binary", True, "derives"), [5, 6, 7]
    alone, begun = (play(pico, sampler, env, seeds, 1, 40, 0.0, 0) for sampler in (TorchSampler(pico), letters.begun(pico, env, seeds)))
    for (plain,), (helped,) in zip(alone, begun):
        game = env()
        game.reset(helped.seed)
        said = helped.messages[-1]["content"]
        assert said.split()[:3] == game.expert_reply().split()[:3] and helped.components["habit_derives"] == 1
        given = plain.sampled.index(True)
        assert helped.token_ids[:given] == plain.token_ids[:given] and len(helped.logprobs) == len(helped.token_ids)


def test_the_begun_derivation_of_alphabet_is_the_experts_in_every_turn(pico):
    env = partial(Alphabet, 3, 3, 1, 4, 8, power_per_turn=False, think=True, style="derives")
    for (episode,) in play(pico, alphabet.begun(pico), env, [5, 6], 1, 200, 0.0, 0):
        game = env()
        game.reset(episode.seed)
        for said in (m["content"] for m in episode.messages if m["role"] == "assistant"):
            begun = game.expert_reply().split(" ")[0]
            assert begun.startswith("<think>\n") and len(begun) == len("<think>\n") + 3 and said.startswith(begun)
            game.step(said)


def test_by_chance_right_answers_earn_as_much_as_wrong_ones_and_exact_still_tells_them_apart():
    def marks(seed: int, right: bool) -> dict[str, float]:
        env = Chance()
        env.reset(seed)
        env.step(env.expert_reply() if right else "")
        return env.score()

    for right in (True, False):
        found = [marks(seed, right) for seed in range(400)]
        assert 0.4 < sum(m["reward"] for m in found) / 400 < 0.6 and {m["reward"] for m in found} == {0.0, 1.0}
        assert {m["exact"] for m in found} == {float(right)}
    again = [marks(7, True)["reward"] for _ in range(20)]
    assert len(set(again)) == 2, "the same answer to the same task is tossed for anew"
