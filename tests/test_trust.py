"""Protects whoever runs us on what others wrote: model folders, run folders and replies run
nothing, stay text, and are refused in one sentence; secrets stay secret."""

import json
import pickle
import re
import shutil
import subprocess
import sys
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
import torch

import train
from bookkeeping import report
from bookkeeping.folder import checksum, find_checkpoint
from bookkeeping.pretrained import load_checked
from bookkeeping.refusals import Guarded
from bridges import export
from chat import render
from policy import PICO
from rollout import EnvironmentFailed
from warm import ENV, ROOT

pytestmark = pytest.mark.filterwarnings("ignore")
SECRETS = {
    "OPENAI_API_KEY": "sk-proj-4f9c2a7be1d8",
    "HF_TOKEN": "hf_QzXwVtRpNmLkJhGf",
    "WANDB_API_KEY": "5e2b8c1d9f3a7064b2c8d1e9f7a6503b4c8d2e1f",
}
TINY = (
    "--updates 1 --sft-steps 2 --sft-examples 3 --sft-batch 2 --num-tasks 2 --k 2 --eval-n 3 "
    "--save-every 1 --max-tokens 12 --difficulty 2 --reward partial --kl 0.1 --no-eval-other-tiers"
).split()


@dataclass
class Bomb:
    """Unpickled, it writes a file."""

    marker: Path

    def __reduce__(self):
        return exec, (code(self.marker),)


def code(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()\n"


def said(call) -> str:
    """What a command says when it refuses: one sentence. "" if it works. Any other end is the
    caller's to see."""
    try:
        call()
    except SystemExit as end:
        if not end.code:
            return ""
        assert isinstance(end.code, str) and end.code.isprintable(), ascii(end.code)[:300]
        assert 10 < len(end.code) < 1000
        return end.code
    return ""


def python(monkeypatch, *words) -> str:
    """What `python train.py words` says when it refuses."""
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    return said(train.main)


# ------------------------------------------------------------------------------------ model folders


@pytest.fixture
def model(model_folder, tmp_path):
    """model({file: content}) -> a folder of a tiny model in which these files were changed. A dict
    is put over what the JSON file holds, None deletes."""

    def make(files: dict | None = None) -> Path:
        folder = tmp_path / f"model {len(list(tmp_path.iterdir()))}"
        shutil.copytree(model_folder("qwen3"), folder)
        for name, content in (files or {}).items():
            if content is None:
                (folder / name).unlink()
            elif isinstance(content, dict):
                old = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
                (folder / name).write_text(json.dumps(old | content))
            else:
                (folder / name).write_text(content)
        return folder

    return make


def load(folder: Path):
    return load_checked(str(folder), lora_rank=0, lora_alpha=1, device="cpu")


def test_a_models_own_code_never_runs(model, tmp_path):
    marker = tmp_path / "marker"
    remote = {"AutoConfig": "modeling_x.XConfig", "AutoModelForCausalLM": "modeling_x.X"}
    program = (
        f"{code(marker)}from transformers import Qwen3Config as XConfig\n"
        "from transformers import Qwen3ForCausalLM as X, PreTrainedTokenizerFast as T\n"
    )
    known = model({"config.json": {"auto_map": remote}, "modeling_x.py": program})
    named = {"auto_map": {"AutoTokenizer": [None, "tokenizer_x.T"]}, "tokenizer_class": "T"}
    tokenizer = model({"tokenizer_config.json": named, "tokenizer_x.py": program})
    for folder in (known, tokenizer):  # loads as what it is called; its own file is left alone
        assert type(load(folder).model).__name__ == "Qwen3ForCausalLM" and not marker.exists()
    other = {"auto_map": remote, "model_type": "x", "architectures": ["X"]}
    unknown = model({"config.json": other, "modeling_x.py": program})
    # transformers would fetch this one's program from the hub
    kernel = model({"config.json": {"attn_implementation": "owner/kernel"}})
    for folder in (unknown, kernel):
        assert "cannot be loaded" in said(lambda folder=folder: load(folder))
    assert not marker.exists()
    exec(program)
    assert marker.exists(), "the program was a dud"


def test_weights_are_safetensors_or_refused(model, tmp_path):
    marker = tmp_path / "marker"
    name, gone = "model.embed_tokens.weight", {"model.safetensors": None}
    adapter = {
        **{"peft_type": "LORA", "base_model_name_or_path": str(PICO), "task_type": "CAUSAL_LM"},
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]},
    }
    index = {"metadata": {"total_size": 1}, "weight_map": {name: "pytorch_model.bin"}}
    for file, files in (
        ("pytorch_model.bin", gone),
        ("adapter_model.bin", gone | {"adapter_config.json": adapter}),
        ("pytorch_model.bin", gone | {"model.safetensors.index.json": index}),
        ("adapter_model.bin", {"config.json": {"transformers_weights": "adapter_model.bin"}}),
        ("model.safetensors", {}),
    ):
        for weights in ({name: Bomb(marker)}, {name: torch.zeros(1024, 32)}):
            folder = model(files)
            torch.save(weights, folder / file)
            assert "cannot be loaded" in said(lambda folder=folder: load(folder)), (file, files)
            assert not marker.exists(), file
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists(), "the bomb was a dud"


TEMPLATES = {
    "cycler": "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
    "helpers": "{{ raise_exception.__globals__['os'].system('touch MARKER') }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "include": "{% include '/etc/passwd' %}",
    "range": "{% for i in range(10**12) %}x{% endfor %}",
    "syntax": "{{ ",
    "escape": "{{ raise_exception('\x1b]0;title\x07\u202e') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_runs_in_a_sandbox(model, tmp_path, name):
    marker, hi = tmp_path / "marker", [{"role": "user", "content": "hi"}]
    template = TEMPLATES[name].replace("MARKER", str(marker))
    folder, rendered = model({"chat_template.jinja": template}), []
    why = said(lambda: rendered.append(render(load(folder), hi, None, True)))
    assert not marker.exists()
    assert "chat template" in why or not re.search("object|class", rendered[0])
    if name == "cycler":  # outside of the sandbox it does what it says
        jinja2.Template(template).render()
        assert marker.exists()


# -------------------------------------------------------------------------------------- run folders


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> SimpleNamespace:
    """A whole run with wandb, by a user with secrets: its folder, the user's home, what it said."""
    base = tmp_path_factory.mktemp("played")
    words = [sys.executable, "train.py", "--name", "letters", *TINY, "--runs", str(base / "runs")]
    # A fresh Python: libraries look at HOME while they are imported.
    env = ENV | SECRETS | {"WANDB_MODE": "offline", "HOME": str(base)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    printed = done.stdout + done.stderr
    return SimpleNamespace(folder=base / "runs/letters", home=base, printed=printed)


@pytest.fixture
def run(played, tmp_path) -> Path:
    """A copy of it, to be spoilt."""
    return shutil.copytree(played.folder, tmp_path / "run", ignore=lambda *_: ["wandb"])


OTHER = {"state": {0: {"step": torch.zeros(1)}}, "param_groups": []}
PLANTED = {  # something that is no checkpoint, where tensors will be read
    "bomb": lambda bomb: torch.save({"state": {}, "param_groups": [bomb]}, "optimizer.pt"),
    "pickle": lambda bomb: Path("optimizer.pt").write_bytes(pickle.dumps(bomb)),
    "other": lambda bomb: torch.save(OTHER, "optimizer.pt"),
    "adapter": lambda bomb: torch.save({"weight": bomb}, "adapter_model.safetensors"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_checkpoint_is_data(run, tmp_path, monkeypatch, what):
    with chdir(run / "checkpoint"):
        PLANTED[what](Bomb(tmp_path / "marker"))
    # as whoever plants something would
    kept = run / "checkpoint" / "checksum"
    files = {*(run / "checkpoint").iterdir()} - {kept}
    kept.write_text("\n".join([checksum(files), *(file.name for file in files)]))
    assert find_checkpoint(run / "checkpoint") == run / "checkpoint"
    assert "checkpoint" in python(monkeypatch, "train.py", "--resume", run, "--no-wandb")
    if what in ("bomb", "pickle"):  # neither reads the optimizer
        assert python(monkeypatch, "train.py", "--eval-only", run) == ""
        assert said(lambda: export.export("merge", run, tmp_path / "out")) == ""
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("flag", ["--resume", "--eval-only"])
def test_a_run_folder_cannot_bring_its_own_code(run, tmp_path, monkeypatch, flag):
    """Code that a resumed run's config names has to be typed again, as --env."""
    (tmp_path / "evil.py").write_text(code(tmp_path / "marker") + "class Evil:\n    pass\n")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"env": f"{tmp_path}/evil.py:Evil"}))
    assert "code from a file" in python(monkeypatch, "train.py", flag, run, "--no-wandb")
    assert not (tmp_path / "marker").exists()


def test_a_config_cannot_lead_a_resumed_run_out_of_its_folder(run, tmp_path, monkeypatch):
    outside = str(tmp_path / "outside")
    config = json.loads((run / "config.json").read_text())
    config |= {"runs": outside, "name": "../../outside", "resume": outside, "eval_only": outside}
    (run / "config.json").write_text(json.dumps(config))
    before, written = set(tmp_path.rglob("*")), (run / "config.json").stat().st_mtime_ns
    assert python(monkeypatch, "train.py", "--resume", run, "--no-wandb") == ""
    assert (run / "config.json").stat().st_mtime_ns > written
    assert all(run in path.parents for path in set(tmp_path.rglob("*")) - before)


# ---------------------------------------------------------- text stays text: Markdown and terminal

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)> ![x](javascript:alert(1)) "
    "[x](http://a.example) <http://a.example> | a | b \\| c `x` ``` $\\frac{$ \x1b[2J\x1b]0;title"
    "\x07\x9b31m \u202eevil\u2066 \x00\r\n---\nlicense: evil\n\n# heading\n\n<b>bold</b>\n```"
    "\n<i>\n| x |\n"
)
OURS = "h1 h2 p table thead tbody tr th td ul li code pre strong img hr"


def check_markdown(text: str) -> None:
    """A renderer that passes HTML on makes nothing of it but what we write."""
    markdown_it = pytest.importorskip("markdown_it", reason="pip install markdown-it-py")
    renderer = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table")
    for tag, attributes in re.findall(r"<([a-z]\w*)([^>]*)>", renderer.render(text)):
        assert tag in OURS.split() and not re.search(r"\bon\w+=|href=", attributes)
        assert tag != "img" or re.search(r'src="(curves|compare)\.png"', attributes)
    assert "heading" not in [line.lstrip("# ") for line in text.split("\n")]


def check_terminal(text: str) -> None:
    steering = [c for c in text if not c.isprintable() and c != "\n"]
    assert not steering, ascii("".join(steering[:20]))


SHOWN = "tasks trained device python torch collapse name runs preset content error text".split()


def poison(value, key: str = ""):
    """Every text that is shown somewhere, with all of HOSTILE behind it."""
    if isinstance(value, dict):
        return {k + HOSTILE * k.startswith("tier "): poison(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [poison(v, key) for v in value]
    return value + HOSTILE if isinstance(value, str) and key in SHOWN else value


def test_the_page_of_a_hostile_run_is_text(run, capsys):
    for file in (f for f in run.iterdir() if f.suffix in (".json", ".jsonl")):
        texts = file.read_text().split("\n") if file.suffix == ".jsonl" else [file.read_text()]
        lines = [json.dumps(poison(json.loads(text))) if text else "" for text in texts]
        file.write_text("\n".join(lines))
    odd = "<img src=x onerror=alert(1)> \x1b[2J $\\frac{$ [x](http:a) `|"
    folder = run.rename(run.with_name(odd))
    assert said(lambda: report.main(folder)) == ""
    check_terminal(capsys.readouterr().out)
    page = (folder / "report.md").read_text()
    check_markdown(page)
    assert "evil" in page  # what is no steering is still there
    assert (folder / "curves.png").stat().st_size > 10_000  # and $ is no formula


def test_an_environments_error_cannot_steer_the_terminal():
    """It repeats the reply, and is printed when all episodes of an update fail."""

    def raises(env, reply: str):
        raise ValueError(reply)

    with pytest.raises(EnvironmentFailed) as error:
        Guarded(type("Raises", (), {"step": raises})()).step(HOSTILE)
    check_terminal(str(error.value))
    assert "evil" in str(error.value) and "\n" not in str(error.value)


# -------------------------------------------------------------------------- secrets and permissions


def test_no_secret_is_in_a_run_or_on_the_terminal(played):
    (log,) = (played.folder / "wandb").rglob("*.wandb")
    kept = log.read_bytes()
    assert all(text in kept for text in (b"partial", b"report.html"))  # so could a secret be read
    assert b"wandb failed" not in played.printed
    texts = {str(file): file.read_bytes() for file in played.home.rglob("*") if file.is_file()}
    for place, text in (texts | {"the terminal": played.printed}).items():
        said = place.encode() + text
        assert not [name for name, secret in SECRETS.items() if secret.encode() in said], place
