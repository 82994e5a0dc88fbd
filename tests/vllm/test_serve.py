"""Protects the way out: an exported adapter is served by vLLM's own server under --lora-modules,
and evaluated over the API like any other model.

letters has one turn, so what vLLM's server makes of the messages is what our loop makes of them,
and the greedy scores are those of the run itself.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from test_train import TINY, lines, run
from warm import ENV, ROOT, free_port


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """(a run folder, its adapter exported)."""
    folder = tmp_path_factory.mktemp("served")
    flags = "--sft-lr 3e-3 --lr 3e-3 --engine torch --name run".split()
    run("train.py", *TINY, *flags, "--runs", str(folder))
    run("-m", "bridges.export", "adapter", str(folder / "run"), str(folder / "adapter"))
    return folder / "run", folder / "adapter"


@pytest.fixture(scope="module")
def server(trained):
    """The address of vLLM's server with pico_base and, as `trained`, the adapter."""
    port = free_port()
    env = ENV | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    flags = (
        "--model models/pico_base --served-model-name pico_base --dtype float32 "
        "--max-model-len 2048 --enforce-eager --block-size 32 --generation-config vllm "
        f"--host 127.0.0.1 --port {port} --enable-lora --max-lora-rank 32 --lora-modules"
    ).split()
    adapter = f"trained={trained[1]}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags, adapter]
    log = open(trained[1].parent / "server.log", "w")
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
    )
    try:
        for _ in range(600):
            assert process.poll() is None, (trained[1].parent / "server.log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def test_an_exported_adapter_scores_the_same_behind_vllms_server(trained, server, tmp_path):
    of_run = {e["stage"]: e for e in lines(trained[0] / "evals.jsonl") if e["tasks"] == "tier 6"}
    for model, stage in (("trained", "final"), ("pico_base", "before")):
        flags = (
            f"--api-base {server} --model {model} --name {model} --runs {tmp_path} --env letters "
            f"--difficulty 6 --reward partial --max-tokens 64 --eval-n {len(of_run[stage]['reward'])}"
        )
        run("train.py", *flags.split())
        got = lines(tmp_path / model / "evals.jsonl")[-1]
        for what in ("reward", "reply_tokens", "truncated"):
            assert got[what] == of_run[stage][what], (model, what)
    assert of_run["final"]["reply_tokens"] != of_run["before"]["reply_tokens"], (
        "the adapter has to do something"
    )
    assert json.loads((tmp_path / "trained" / "summary.json").read_text())["api"]["failed"] == 0
