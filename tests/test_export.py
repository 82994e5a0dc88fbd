"""Out again (bridges/export.py): what is exported computes what was trained, the card says what was measured,
and a hub on loopback takes it."""

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import tyro

import settings
import train
from bookkeeping.checkpoint import find_checkpoint, load_checkpoint
from bridges import chat, export
from bridges.chat import JsonHandler
from policy import PICO, load_policy

ROOT = Path(__file__).resolve().parents[1]
TINY = dict(updates=2, num_tasks=2, k=4, eval_n=4, max_tokens=64, sft_steps=3, sft_examples=4, threads=1, wandb=False, device="cpu",
            lr=3e-3, sft_lr=3e-3, difficulty=2, reward="partial")  # fmt: skip


def tiny_run(folder: Path, name: str, **flags) -> Path:
    cfg = settings.Config(**{**TINY, "runs": str(folder), "name": name, **flags})
    settings.check(cfg)
    return train.train(cfg)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model_folder):
    """{name: folder} of a run with LoRA, one of all weights, one over a base in bfloat16."""
    folder = tmp_path_factory.mktemp("runs")
    half = folder / "half"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(model_folder("qwen3"), dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(model_folder("qwen3")).save_pretrained(half)
    return {
        "lora": tiny_run(folder, "lora"),
        "full": tiny_run(folder, "full", lora_rank=0),
        "half": tiny_run(folder, "half-run", model=str(half), lora_rank=4, lora_alpha=8),
    }


def trained(run: Path):
    config = json.loads((run / "config.json").read_text())
    policy = load_policy(config["model"] if config["model"] != "auto" else str(PICO), config["lora_rank"], config["lora_alpha"], "cpu")
    load_checkpoint(find_checkpoint(run / "checkpoint"), policy)
    return policy


def ids_of(policy) -> torch.Tensor:
    return torch.tensor([policy.tokenizer("Count the letters a and b in abcab. <think> a1")["input_ids"]])


def merge(run: Path, out: Path, *more: str) -> None:
    export.main(["merge", str(run), str(out), *more])


@pytest.mark.parametrize("name", ["lora", "full", "half"])
def test_a_merged_model_computes_what_was_trained(runs, name, tmp_path, capsys):
    merge(runs[name], tmp_path / "out", *(["--dtype", "bfloat16"] if name == "half" else []))
    policy = trained(runs[name])
    ids = ids_of(policy)
    base = export.logprobs(load_policy(export.base_of(json.loads((runs[name] / "summary.json").read_text())), 0, 1, "cpu"), ids)
    then, now = export.logprobs(policy, ids), export.logprobs(load_policy(str(tmp_path / "out"), 0, 1, "cpu"), ids)
    moved = (then - base).abs().max()
    assert moved > 1e-2, "the run has to have changed something"
    rounding = 0.05 if name == "half" else 1e-4
    torch.testing.assert_close(now, then, rtol=0, atol=rounding)
    assert rounding < moved
    dtype = json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
    assert dtype == ("bfloat16" if name == "half" else "float32") and f"saved as {dtype}" in capsys.readouterr().out
    plain = (tmp_path / "out" / "README.md").stat().st_mode  # as the umask says
    assert {file.stat().st_mode for file in (tmp_path / "out").iterdir()} == {plain}


def test_a_merged_model_is_a_base_that_scores_as_the_run_did(runs, tmp_path):
    merge(runs["lora"], tmp_path / "out")
    again = tiny_run(tmp_path, "again", model=str(tmp_path / "out"), updates=1)
    read = lambda run, stage: [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines() if f'"{stage}"' in line]
    final, before = read(runs["lora"], "final"), read(again, "before")
    assert [e["reward"] for e in final] == [e["reward"] for e in before] and sum(sum(e["reward"]) for e in final) > 0


def test_an_exported_adapter_is_loaded_by_peft_and_names_no_path(runs, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export.main(["adapter", str(runs["lora"]), str(tmp_path / "deep" / "out")])
    out = tmp_path / "deep" / "out"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32), out).eval()
    policy = trained(runs["lora"])
    ids = ids_of(policy)
    assert AutoTokenizer.from_pretrained(out)("Count the letters a and b in abcab. <think> a1")["input_ids"] == ids[0].tolist()
    policy_too = trained(runs["lora"])
    policy_too.model = model
    torch.testing.assert_close(export.logprobs(policy_too, ids), export.logprobs(policy, ids), rtol=0, atol=1e-4)
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == "pico_base"
    for file in out.iterdir():
        assert str(ROOT).encode() not in file.read_bytes(), file.name
    assert {"optimizer.pt", "state.json", "checksum"}.isdisjoint(file.name for file in out.iterdir())


def test_the_card_says_what_was_measured(runs, tmp_path):
    from huggingface_hub import ModelCard

    summary = json.loads((runs["lora"] / "summary.json").read_text())
    text = export.card(summary, "adapter")
    card = ModelCard(text)
    assert card.data.library_name == "peft" and "grpo" in card.data.tags and card.data.base_model is None  # pico_base is no id of the hub
    final = summary["eval"]["tier 2"]["final"]
    assert f"{final['reward']:.3f} [{final['reward_low']:.3f}, {final['reward_high']:.3f}] | 4 |" in text
    assert "--reward partial" in text and "--lr 0.003" in text and "100 scripted" not in text
    full = export.card(json.loads((runs["full"] / "summary.json").read_text()), "merge", "owner/name")
    assert 'from_pretrained("owner/name")' in full and "all weights" in full and "lora" not in ModelCard(full).data.tags
    big = json.loads(json.dumps(summary))
    big["config"]["model"] = "Qwen/Qwen3-0.6B"
    assert ModelCard(export.card(big, "merge")).data.base_model == "Qwen/Qwen3-0.6B"
    assert 'from_pretrained("models/pico_base")' in text  # it is on no hub, and the card is read elsewhere
    big["config"]["lora_rank"] = 12
    assert "--max-lora-rank 16 " in export.card(big, "adapter")  # vLLM takes no 12
    assert "collapse: update 7" in export.card({**summary, "warnings": {"collapse": "update 7: fell"}}, "merge")


def test_what_fails_half_way_leaves_no_folder(runs, tmp_path, monkeypatch):
    gone = shutil.copytree(runs["lora"], tmp_path / "gone")
    summary = json.loads((gone / "summary.json").read_text())
    (gone / "summary.json").write_text(json.dumps({**summary, "config": {**summary["config"], "model": "no-such-base"}}))
    with pytest.raises(SystemExit, match="--model no-such-base"):
        merge(gone, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="Not a directory.*; nothing was exported, make room"):
        merge(runs["lora"], tmp_path / "file" / "out")
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(export, "readable", lambda folder: (_ for _ in ()).throw(full))
    with pytest.raises(SystemExit, match="out: .*No space left on device; nothing was exported"):
        merge(runs["lora"], tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"gone", "file"}


@pytest.mark.parametrize("words", ["", "--lora-rank 0 --loss dapo --no-think", "--difficulty 3 --curriculum --kl 0.1 --seed 4",
                                   "--env swarm --swarm-version 0.1", "--env alphabet --max-turns 5 --power-per-turn",
                                   "--preset swarm-published --async-rollouts 2 --importance token"])  # fmt: skip
def test_the_flags_on_the_card_give_the_run_again(words):
    cfg = tyro.cli(settings.Config, args=words.split())
    settings.check(cfg)
    settings.fill(cfg, settings.by_size(900_000, cfg.env))
    again = tyro.cli(settings.Config, args=export.flags(asdict(cfg), 900_000).split())
    settings.check(again)
    settings.fill(again, settings.by_size(900_000, again.env))
    assert again == cfg
    assert all(word in export.flags(asdict(cfg), 900_000) for word in words.split())


def test_a_class_without_levels_has_no_difficulty_on_the_card(tmp_path):
    (tmp_path / "one.py").write_text("class One:\n    think = tools = reset = step = score = expert_reply = most_tasks = None\n")
    settings.check(cfg := settings.Config(env=f"{tmp_path}/one.py:One"))
    assert "--difficulty" not in export.flags(asdict(cfg), 900_000)


def test_what_cannot_be_exported_is_said_in_a_sentence(runs, tmp_path):
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "summary.json").write_text(json.dumps({"config": {"api_base": "http://127.0.0.1:1/v1"}, "machine": {}}))
    cases = [
        (["merge", str(tmp_path / "none"), str(tmp_path / "out")], "there is no summary.json"),
        (["merge", str(tmp_path / "api"), str(tmp_path / "out")], "over an API has no weights"),
        (["adapter", str(runs["full"]), str(tmp_path / "out")], "there is no adapter; use: python -m bridges.export merge"),
        (["merge", str(runs["lora"]), str(runs["full"])], "is there already"),
        (["merge", str(runs["lora"]), str(tmp_path / "out"), "--push", "name"], "give owner/name"),
    ]
    for words, why in cases:
        with pytest.raises(SystemExit, match=why):
            export.main(words)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.new").exists()


def test_arguments_of_a_tool_call_are_text_or_the_call_is_refused():
    call = lambda given: {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "post", "arguments": given}}]}
    assert '{"content": "hi"}' in chat.text_of(call('{"content": "hi"}'))
    for given in ({"content": "hi"}, None):
        with pytest.raises(chat.Refused, match="a tool call is"):
            chat.text_of(call(given))


# ------------------------------------------------------------------------------------------------ a hub on loopback


class Hub(JsonHandler):
    """As much of the hub's API as an upload of small files needs."""

    files: dict[str, bytes] = {}
    refuse = False

    def do_GET(self):
        self.reply(200, {"id": "owner/name", "sha": "0" * 40, "siblings": []})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.refuse or "Bearer test-token" not in (self.headers.get("Authorization") or ""):
            self.reply(401, {"error": "who are you?"})
        elif self.path.endswith("/repos/create"):
            self.reply(200, {"url": f"http://{self.headers['Host']}/owner/name", "name": "owner/name"})
        elif "/preupload/" in self.path:
            self.reply(
                200, {"files": [{**f, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for f in json.loads(body)["files"]]}
            )
        elif "/commit/" in self.path:
            for line in body.splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    Hub.files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            self.reply(200, {"commitUrl": f"http://{self.headers['Host']}/owner/name/commit/1", "commitOid": "1" * 40, "hookOutput": ""})
        else:
            self.reply(200, {})

    def log_message(self, *_):
        pass


def test_push_uploads_the_folder_and_a_refusal_is_a_sentence(runs, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": "test-token", "HF_HUB_OFFLINE": "0",
           "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip
    # One Python for both, a fresh one: HF_ENDPOINT is read while the library is imported.
    twice = f"""
import os
from bridges.export import main
push = lambda out: main(["adapter", {str(runs["lora"])!r}, out, "--push", "owner/name"])
push({str(tmp_path / "out")!r})
print("pushed", flush=True)
os.environ["HF_TOKEN"] = "another"
push({str(tmp_path / "refused")!r})
"""
    try:
        done = subprocess.run([sys.executable, "-c", twice], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        assert "pushed" in done.stdout, done.stderr
        assert Hub.files.keys() >= {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
        assert all(content == (tmp_path / "out" / name).read_bytes() for name, content in Hub.files.items() if name != ".gitattributes")
        assert b'"owner/name"' in Hub.files["README.md"]
        assert done.returncode == 1 and "the hub did not take it" in done.stderr and "Traceback" not in done.stderr
        assert "another" not in done.stderr and (tmp_path / "refused" / "README.md").exists()
    finally:
        server.shutdown()
        server.server_close()
