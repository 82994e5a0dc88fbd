"""Protects what an evaluation by verifiers says: the scores, number by number, that our own loop
gives the same replies. tests/verifiers/test_train.py has the way of tokens."""

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
