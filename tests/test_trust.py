"""Protects whoever runs us on what others wrote: model folders, run folders and replies run
nothing, stay text, and are refused in one sentence; secrets stay secret."""

import ast
import json
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
import torch

import train
from bookkeeping.folder import checksum, find_checkpoint
from bookkeeping.guard import Guarded
from bridges import export
from policy import PICO, load_policy
from rollout import EnvironmentFailed, render

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parent.parent
SECRETS = {
    "OPENAI_API_KEY": "sk-proj-4f9c2a7be1d8",
    "HF_TOKEN": "hf_QzXwVtRpNmLkJhGf",
    "WANDB_API_KEY": "5e2b8c1d9f3a7064b2c8d1e9f7a6503b4c8d2e1f",
}
TINY = (
    "--updates 1 --sft-steps 2 --sft-examples 3 --sft-batch 2 --num-tasks 2 --k 2 --eval-n 3 "
    "--save-every 1 --max-tokens 12 --difficulty 2 --reward partial --kl 0.1 --no-eval-other-tiers"
).split()


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

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


def python(monkeypatch, script: str, *words) -> str:
    """What `python script words` says when it refuses."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
    if script == "train.py":
        return said(train.main)
    return said(lambda: runpy.run_path(str(ROOT / script), run_name="__main__"))


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
    return load_policy(str(folder), lora_rank=0, lora_alpha=1, device="cpu")


def test_a_models_own_code_never_runs(model, tmp_path):
    marker = tmp_path / "marker"
    remote = {"AutoConfig": "modeling_x.XConfig", "AutoModelForCausalLM": "modeling_x.X"}
    program = code(marker) + "from transformers import Qwen3Config as XConfig\n"
    program += "from transformers import Qwen3ForCausalLM as X, PreTrainedTokenizerFast as T\n"
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
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(PICO), "task_type": "CAUSAL_LM"}
    adapter |= {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
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


CONFIGS = [
    {"hidden_size": "x"},
    {"hidden_size": 64},
    {"num_hidden_layers": 1e99},
    {"num_attention_heads": 0},
    {"dtype": "evil"},
    {"model_type": ["qwen3"]},
    {"model_type": "\x1b[2J"},
    {"hidden_act": "__import__('os')"},
    {"quantization_config": [1]},
    {"pad_token_id": 10**9},
]
TEXTS = ["[]", "[" * 100_000, "NaN", '{"a']
FILES = ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors.index.json"]


def test_a_model_folder_that_makes_no_sense_is_refused_in_one_sentence(model):
    cases = [{"config.json": config} for config in CONFIGS]
    for file in FILES:
        more = {"model.safetensors": None} if "index" in file else {}
        cases += [{file: text, **more} for text in TEXTS]
    for files in cases:
        folder = model(files)
        assert said(lambda folder=folder: load(folder)), files


# -------------------------------------------------------------------------------------- run folders


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> SimpleNamespace:
    """A whole run with wandb, by a user with secrets: its folder, the user's home, what it said."""
    base = tmp_path_factory.mktemp("played")
    words = [sys.executable, "train.py", "--name", "letters", *TINY, "--runs", str(base / "runs")]
    more = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    # A fresh Python: libraries look at HOME while they are imported.
    env = {**os.environ, **SECRETS, **more, "HOME": str(base)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    printed = done.stdout + done.stderr
    return SimpleNamespace(folder=base / "runs/letters", home=base, printed=printed)


@pytest.fixture
def run(played, tmp_path) -> Path:
    """A copy of it, to be spoilt."""
    return copied(played.folder, tmp_path / "run")


def copied(folder: Path, to: Path) -> Path:
    return shutil.copytree(folder, to, ignore=shutil.ignore_patterns("wandb"))


def seal(folder: Path) -> None:
    """Make the checksum right again, as whoever plants something would."""
    (folder / "checkpoint" / "checksum").write_text(checksum(folder / "checkpoint"))


def plant(run: Path, what: str, marker: Path) -> None:
    """Put something that is no checkpoint where tensors will be read."""
    name = "adapter_model.safetensors" if what == "adapter" else "optimizer.pt"
    bomb, target = {"state": {}, "param_groups": [Bomb(marker)]}, run / "checkpoint" / name
    if what == "other":
        torch.save({"state": {0: {"step": torch.zeros(1)}}, "param_groups": []}, target)
    elif what == "pickle":
        target.write_bytes(pickle.dumps(Bomb(marker)))
    else:
        torch.save(bomb, target)


@pytest.mark.parametrize("what", ["bomb", "pickle", "other", "adapter"])
def test_a_checkpoint_is_data(run, tmp_path, monkeypatch, what):
    plant(run, what, tmp_path / "marker")
    seal(run)
    assert find_checkpoint(run / "checkpoint") is not None
    assert "checkpoint" in python(monkeypatch, "train.py", "--resume", run, "--no-wandb")
    if what in ("bomb", "pickle"):  # neither reads the optimizer
        assert python(monkeypatch, "train.py", "--eval-only", run) == ""
        assert said(lambda: export.main(["merge", str(run), str(tmp_path / "out")])) == ""
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("flag", ["--resume", "--eval-only"])
def test_a_run_folder_cannot_bring_its_own_code(run, tmp_path, monkeypatch, flag):
    """Code that a resumed run's config names has to be typed again, as --env."""
    (tmp_path / "evil.py").write_text(code(tmp_path / "marker") + "class Evil:\n    pass\n")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"env": f"{tmp_path}/evil.py:Evil"}))
    assert "somebody's code" in python(monkeypatch, "train.py", flag, run, "--no-wandb")
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


SPOILT = {
    "list": "[]",
    "deep": "[" * 100_000,
    "bytes": b"\xff\xfe\x00",
    "surrogate": '{"update": 1, "stage": "final", "tasks": "\\ud800", "trained": true, '
    '"reward": ["\\ud800"], "source": "eval", "messages": [{}]}',
    "types": '{"update": "x", "stage": [], "tasks": {}, "trained": "no", "reward": "x", '
    '"messages": 5, "segments": {"a": 1}, "exact": [null], "seed": "x"}',
    "NaNs": '{"update": NaN, "stage": "final", "tasks": "tier 2", "trained": true, '
    '"reward": [NaN, 1e999], "exact": [NaN, Infinity], "format": [NaN], "seed": NaN}',
}
READ = {
    "bookkeeping/report.py": ("summary.json", "metrics.jsonl", "evals.jsonl"),
    "bookkeeping/compare.py": ("config.json", "metrics.jsonl", "evals.jsonl"),
    "bridges/export.py": ("summary.json",),
    "train.py": ("config.json", "metrics.jsonl", "checkpoint/state.json"),
}


def spoil(folder: Path, file: str, text: str | bytes) -> None:
    """A JSON file is replaced, in a file of lines the first and the last are."""
    path, new = folder / file, text if isinstance(text, bytes) else text.encode()
    if path.suffix == ".jsonl":
        new = b"\n".join([new, *path.read_bytes().split(b"\n")[1:-2], new, b""])
    path.write_bytes(new)
    seal(folder)


@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.parametrize("script", READ)
@pytest.mark.usefixtures("no_pictures")
def test_a_spoilt_run_folder_ends_in_one_sentence(run, tmp_path, monkeypatch, kind, script):
    for file in READ[script]:
        folder = copied(run, tmp_path / file.replace("/", " "))
        spoil(folder, file, SPOILT[kind])
        words = {
            "bookkeeping/compare.py": [folder, run, "--out", tmp_path / "out"],
            "bridges/export.py": ["adapter", folder, tmp_path / "export"],
            "train.py": ["--resume", folder, "--no-wandb"],
        }
        python(monkeypatch, script, *words.get(script, [folder]))  # any other error is raised


# ----------------------------------------------------------------------------- no door in the code

# Ways to run what was given as data: exec, pickle, marshal, eval, yaml.load, shells.
DOORS = "S102,S301,S302,S307,S506,S602,S604,S605,S606,S609"
ALLOWED = {  # file: why one may be there
    "fast/ahead.py": "what comes through a pipe from a process of its own",
}


def sources() -> list[str]:
    """Every file of code that the repository ships, tests aside."""
    found = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True)
    names = [name for name in found.splitlines() if not name.startswith("tests/")]
    return [name for name in names if (ROOT / name).exists()]


def test_there_is_no_door_in_the_code():
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--ignore-noqa"]
    command += ["--select", DOORS, "--output-format", "json", *sources()]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout)
    assert {str(Path(one["filename"]).relative_to(ROOT)) for one in found} == set(ALLOWED)
    for name in sources():
        doors = r"trust_remote_code\s*[=:]\s*True|allow_pickle=True|"
        doors += r"torch\.load\((?!.*weights_only=True)"
        assert not re.search(doors, (ROOT / name).read_text()), name


# ------------------------------------------------------------------------------ replies do nothing

WATCHED = """
import json, sys
from env_alphabet import Alphabet
from env_letters import Letters
from env_swarm import Swarm

seen, watching = [], False
EVENTS = ("open", "os", "subprocess", "socket", "shutil", "exec", "compile", "import", "pickle")
def hook(event, arguments):
    if watching and event.partition(".")[0] in EVENTS:
        seen.append(event + " " + ascii(arguments)[:100])
sys.addaudithook(hook)
alphabet = Alphabet(3, 3, 1, 4, 8.0, False, True, "states")
for env in (Letters(2, "partial", True, "states"), alphabet, Swarm(), Swarm(version="0.1")):
    env.reset(0)
    env.step("to warm up: a word list is read once")
    for number, reply in enumerate(json.loads(sys.argv[1])):
        watching = True
        env.reset(number)
        if reply == sys.argv[2]:
            open("/dev/null").close()
        env.step(reply)
        env.score()
        watching = False
print(json.dumps(seen))
"""
PAYLOADS = [
    "../../../../etc/passwd",
    "$(touch marker)",
    "`touch marker`",
    "file:///etc/passwd",
    "__import__('os').system('touch marker')",
    "{{ ''.__class__ }}",
    "!!python/object/apply:os.system [touch marker]",
    "marker\x00.txt",
    "${jndi:ldap://127.0.0.1:9/a}",
    "cos\nsystem\n(S'touch marker'\ntR.",
]


def hostile_replies() -> list[str]:
    from swarm.tools import TOOLS, write_call

    replies = []
    for text in PAYLOADS:
        tags = ("answer", "alphabetical_sorted", "combined_alphabetical_sorted")
        replies += [text, *(f"<{tag}>{text}</{tag}>" for tag in tags), write_call(text, {})]
        replies.append(f"<answer>{json.dumps({text: 1})}</answer>")
        replies += [write_call(tool, dict.fromkeys(TOOLS[tool][1], text)) for tool in TOOLS]
    return replies


@pytest.mark.parametrize("leaks", [False, True])
def test_a_reply_opens_no_file_starts_no_process_and_calls_nobody(tmp_path, leaks):
    words = [json.dumps(hostile_replies()), PAYLOADS[0] if leaks else ""]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *words],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert bool(json.loads(done.stdout)) == leaks  # one that does is caught
    assert not list(tmp_path.iterdir())


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


@pytest.fixture
def poisoned(run) -> Path:
    for file in (f for f in run.iterdir() if f.suffix in (".json", ".jsonl")):
        texts = file.read_text().split("\n") if file.suffix == ".jsonl" else [file.read_text()]
        lines = [json.dumps(poison(json.loads(text))) if text else "" for text in texts]
        file.write_text("\n".join(lines))
    return run


ODD = "<img src=x onerror=alert(1)> \x1b[2J $\\frac{$ [x](http:a) `|"


@pytest.mark.parametrize("script", ["report", "compare"])
def test_the_page_of_a_hostile_run_is_text(poisoned, played, tmp_path, monkeypatch, capsys, script):
    folder = poisoned.rename(poisoned.with_name(ODD))
    out = tmp_path / "out" if script == "compare" else folder
    more = [played.folder, "--out", out] if script == "compare" else []
    assert python(monkeypatch, f"bookkeeping/{script}.py", folder, *more) == ""
    check_terminal(capsys.readouterr().out)
    check_markdown((out / f"{script}.md").read_text())
    if script == "report":
        assert "evil" in (out / "report.md").read_text()  # what is no steering is still there
        assert (out / "curves.png").stat().st_size > 10_000  # and $ is no formula


def test_a_card_cannot_be_broken_out_of(poisoned, played, tmp_path, capsys):
    yaml = pytest.importorskip("yaml", reason="pip install pyyaml")
    assert said(lambda: export.main(["adapter", str(poisoned), str(tmp_path / "out")])) == ""
    check_terminal(capsys.readouterr().out)
    summary = json.loads((played.folder / "summary.json").read_text())
    name = 'a/b", trust_remote_code=True, x="\nlicense: evil\n---\n# heading'
    summary["config"] |= {"model": name, "preset": "x; touch marker"}
    cards = [export.card(summary, kind) for kind in ("adapter", "merge")]
    cards.insert(0, (tmp_path / "out" / "README.md").read_text())
    assert all("--preset 'x; touch marker'" in card for card in cards[1:])  # to paste into a shell
    for card in cards:
        _, front, body = card.split("---\n", 2)
        fields = {"base_model", "library_name", "pipeline_tag", "tags"}
        assert set(yaml.safe_load(front)) <= fields
        check_markdown(body)
        check_terminal(card)
        programs = re.findall(r"```python\n(.*?import.*?)```", body, re.S)
        nodes = [node for text in programs for node in ast.walk(ast.parse(text))]
        assert programs and not any(isinstance(node, ast.keyword) and node.arg for node in nodes)


def test_an_environments_error_cannot_steer_the_terminal():
    """It repeats the reply, and is printed when all episodes of an update fail."""

    class Raises:
        def step(self, reply: str):
            raise ValueError(reply)

    with pytest.raises(EnvironmentFailed) as error:
        Guarded(Raises()).step(HOSTILE)
    check_terminal(str(error.value))
    assert "evil" in str(error.value) and "\n" not in str(error.value)


# -------------------------------------------------------------------------- secrets and permissions


def leaks(folder: Path) -> list[tuple[str, str]]:
    """(file, secret) for every secret in the bytes or the name of a file."""
    texts = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    return [
        (file.name, name)
        for file, text in texts.items()
        for name, secret in SECRETS.items()
        if secret.encode() in text + str(file).encode()
    ]


def test_no_secret_is_in_a_run_or_on_the_terminal(played):
    (log,) = (played.folder / "wandb").rglob("*.wandb")
    assert b"partial" in log.read_bytes()  # the settings can be read: so could a secret be
    assert not leaks(played.home)
    assert not [name for name, secret in SECRETS.items() if secret.encode() in played.printed]
