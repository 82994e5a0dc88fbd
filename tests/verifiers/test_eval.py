"""Protects what an evaluation by verifiers says: the scores, number by number, that our own loop
gives the same replies, whether a server leaves them as text or takes them apart; and a saved trace
holds all that its score needs. tests/verifiers/test_train.py has the way of tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verifiers.v1", reason="not installed here; `make test-all` does it")

from loopback import chat, ours, player, serving, theirs, vf_eval

from settings import DEV_SEEDS

# The opening, then a reply and what came of it; letters and alphabet end with a reply.
NODES = {"letters": 2, "alphabet": 6, "swarm": 50}


@pytest.mark.parametrize("environment", NODES)
def test_a_player_that_is_good_and_bad_scores_the_same(environment, tmp_path):
    n, say = 8, player(environment, 8)
    with serving(chat(say)) as url:
        traces = vf_eval(environment, n, url, "--no-rich", "-o", str(tmp_path))
    mine = [ours(environment, DEV_SEEDS + i, say) for i in range(n)]
    assert [theirs(trace) for trace in traces] == mine
    assert len({score["reward"] for score, _ in mine}) > 1  # if all are alike, nothing is compared
    assert {len(trace["nodes"]) for trace in traces} == {NODES[environment]}


def test_vf_replay_gives_saved_traces_their_scores_again(tmp_path):
    flags = ["--env.taskset.environment.error-penalty", "0.5", "--no-rich", "-o", str(tmp_path)]
    with serving(chat(player("swarm", 2))) as url:
        traces = vf_eval("swarm", 2, url, *flags)
    folder = next(tmp_path.rglob("traces.jsonl")).parent
    command = [Path(sys.executable).with_name("vf-replay"), folder, "--no-rich"]
    command += ["--output-dir", tmp_path / "again"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    lines = (tmp_path / "again" / "traces.jsonl").read_text().split("\n")
    again = [json.loads(line) for line in lines if line]
    again = [trace for line in again for trace in line.get("traces", [line])]
    scores = lambda some: {trace["id"]: (trace["rewards"], trace["metrics"]) for trace in some}
    assert scores(again) == scores(traces) and len(again) == 2
