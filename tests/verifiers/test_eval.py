"""Protects what an evaluation by verifiers says: the scores, number by number, that our own loop gives the same replies; whether a server
leaves them as text, takes them apart, serves our policy, or gives tokens as in prime-rl's training, where a trace must hold the very tokens
of an Episode.
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("verifiers.v1", reason="verifiers is not installed here; `make test-verifiers` installs it into a venv of its own")

from bridges.chat import listen, scripted
from lab.trust import verifiers_check as check
from settings import DEV_SEEDS

NODES = {"letters": 2, "alphabet": 6, "swarm": 51}  # the opening, then a reply and what came of it; letters and alphabet end with a reply


def assert_same(found: dict, replies: bool = True) -> None:
    assert found["differ"] == []
    assert found["same_score"] == found["same_reward"] == found["episodes"]
    assert found["distinct_rewards"] > 1  # where all are alike, nothing was compared
    if replies:
        assert found["same_replies"] == found["episodes"]


@pytest.mark.parametrize("environment", check.ENVIRONMENTS)
def test_a_scripted_player_scores_the_same(environment):
    n, r = 8, 2
    say = check.make_player(environment, n)
    with check.running(listen(scripted(say), "policy")) as url:
        traces = check.vf_eval(environment, n, url, r=r)
    seeds = [DEV_SEEDS + i for i in range(n) for _ in range(r)]
    assert [t["task"]["data"]["seed"] for t in traces] == seeds
    found = check.compare([check.ours(environment, seed, say) for seed in seeds], traces)
    assert_same(found)
    assert found["nodes"] == [NODES[environment]]
    assert [len(t["nodes"]) - 1 for t in traces] == [t["nodes"][-1]["parent"] + 1 for t in traces]  # one conversation, no branches


def test_a_server_that_takes_replies_apart_changes_no_score():
    n = 6
    say = check.make_player("swarm", n)
    seen = []
    answer = lambda body: seen.append(check.parse(scripted(say), body)) or seen[-1]
    with check.running(listen(answer, "policy")) as url:
        traces = check.vf_eval("swarm", n, url)
    messages = [response["choices"][0]["message"] for response in seen]
    assert any("tool_calls" in m for m in messages) and any("reasoning_content" in m for m in messages)  # it did take them apart
    assert_same(check.compare([check.ours("swarm", DEV_SEEDS + i, say) for i in range(n)], traces), replies=False)


@pytest.mark.parametrize("environment, n", [("letters", 6), ("alphabet", 3), ("swarm", 2)])
def test_our_policy_scores_the_same_as_text_and_as_tokens(environment, n, tmp_path):
    found = check.check_policy(environment, n, tmp_path)
    for way in ("policy", "tokens"):
        assert_same(found[way])
    assert found["tokens"]["same_tokens"] == n
    assert found["tokens"]["largest_logprob_gap"] < 1e-4  # a saved trace keeps four decimals


def test_a_saved_trace_holds_all_that_its_score_needs():
    import picoswarm as adapter

    say = check.make_player("swarm", 2)
    with check.running(listen(partial(check.parse, scripted(say)), "policy")) as url:
        traces = check.vf_eval("swarm", 2, url, "--env.taskset.environment.error-penalty", "0.5")
    for trace in traces:
        data = trace["task"]["data"]
        assert data["settings"]["error_penalty"] == 0.5
        again = adapter.marks(data["environment"], data["settings"], data["seed"], trace["info"]["replies"])
        assert again == check.theirs(trace)["marks"]
        assert again["error_rate"] > 0  # so the penalty was paid
        assert (
            again["reward"]
            < adapter.marks("swarm", {**data["settings"], "error_penalty": 0.0}, data["seed"], trace["info"]["replies"])["reward"]
        )


def test_the_command_of_the_readme_and_scoring_its_traces_again(tmp_path):
    """As a person types it, dashboard and all; vf-replay then gives every trace its score again, from what was saved."""
    program = Path(sys.executable)
    say = check.make_player("letters", 8)
    with check.running(listen(scripted(say), "policy")) as url:
        flags = ["picoswarm", "-n", "8", "-r", "2", "-m", "policy", "--client.base-url", url, "--no-push", "--run.name", "mine"]
        subprocess.run([program.with_name("vf-eval"), *flags], cwd=tmp_path, check=True, capture_output=True)
    # --no-rich: verifiers 0.4.0 saves the eval's dashboard settings in a form that vf-replay does not read
    replay = [program.with_name("vf-replay"), "outputs/mine", "--output-dir", "again", "--no-rich"]
    subprocess.run(replay, cwd=tmp_path, check=True, capture_output=True)
    lines = (tmp_path / "outputs" / "mine" / "traces.jsonl").read_text().split("\n")
    first = {t["id"]: (t["rewards"], t["metrics"]) for line in lines if line for t in json.loads(line)["traces"]}
    lines = (tmp_path / "again" / "traces.jsonl").read_text().split("\n")
    again = [t for line in lines if line for t in json.loads(line).get("traces", [json.loads(line)])]
    assert len(again) == len(first) == 16
    assert {t["id"]: (t["rewards"], t["metrics"]) for t in again} == first
    assert {rewards["reward"]["score"] for rewards, _ in first.values()} == {0.0, 1.0}
