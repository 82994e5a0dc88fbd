"""Protects whoever runs us on what others wrote: model folders, run folders and replies run nothing, stay text, and are refused in one
sentence; secrets stay secret."""

import ast
import asyncio
import html.parser
import json
import os
import pickle
import runpy
import shutil
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
import torch

import evaluate
import made_up
import train
import warm
from bookkeeping import report, tables
from bookkeeping import run as run_records
from bookkeeping.checkpoint import checksum, find_checkpoint
from bookkeeping.guard import Guarded
from bridges import api, export
from fast import ahead
from fast.memory import memory_folder, sweep
from policy import PICO, load_policy
from rollout import Episode, finish, render, take_turn

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parent.parent
SECRETS = dict(
    OPENAI_API_KEY="sk-proj-4f9c2a7be1d8", HF_TOKEN="hf_QzXwVtRpNmLkJhGf", WANDB_API_KEY="5e2b8c1d9f3a7064b2c8d1e9f7a6503b4c8d2e1f"
)
TINY = [
    "--updates", "1", "--sft-steps", "2", "--sft-examples", "3", "--sft-batch", "2", "--num-tasks", "2", "--k", "2", "--eval-n", "3",
    "--save-every", "1", "--max-tokens", "12", "--difficulty", "2", "--reward", "partial", "--kl", "0.1",
    "--no-eval-other-tiers",
]  # fmt: skip


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return exec, (code(self.marker),)


def code(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()\n"


def said(call) -> str:
    """What a command says when it refuses: one sentence. "" if it works. Any other end is the caller's to see."""
    try:
        call()
    except SystemExit as end:
        if not end.code:
            return ""
        assert isinstance(end.code, str) and end.code.isprintable() and 10 < len(end.code) < 1000, ascii(end.code)[:300]
        return end.code
    return ""


# ------------------------------------------------------------------------------------------------ model folders


@pytest.fixture
def model(model_folder, tmp_path):
    """model(file=content, …) -> a folder of a tiny model in which these files were changed. A dict is put over what the JSON file holds,
    None deletes."""

    def make(**files) -> Path:
        folder = shutil.copytree(model_folder("qwen3"), tmp_path / f"model {len(list(tmp_path.iterdir()))}")
        for name, content in files.items():
            name = name.replace("__", ".")
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


REMOTE = {"AutoConfig": "modeling_x.XConfig", "AutoModelForCausalLM": "modeling_x.X"}


def test_a_models_own_code_never_runs(model, tmp_path):
    marker = tmp_path / "marker"
    program = code(marker) + "from transformers import Qwen3Config as XConfig, Qwen3ForCausalLM as X, PreTrainedTokenizerFast as T"
    known = model(config__json={"auto_map": REMOTE}, modeling_x__py=program)
    named = {"auto_map": {"AutoTokenizer": [None, "tokenizer_x.T"]}, "tokenizer_class": "T"}
    tokenizer = model(tokenizer_config__json=named, tokenizer_x__py=program)
    for folder in (known, tokenizer):  # loads as what it is called, and its own file is left alone
        assert type(load(folder).model).__name__ == "Qwen3ForCausalLM" and not marker.exists()
    unknown = model(config__json={"auto_map": REMOTE, "model_type": "x", "architectures": ["X"]}, modeling_x__py=program)
    assert "cannot be loaded" in said(lambda: load(unknown)) and not marker.exists()
    kernel = model(config__json={"attn_implementation": "owner/kernel"})  # transformers would fetch a program from the hub
    assert "cannot be loaded" in said(lambda: load(kernel))

    # In a process of its own: transformers would remember the class for the rest of this one.
    trusting = f"""
from transformers import AutoConfig, dynamic_module_utils
dynamic_module_utils.HF_MODULES_CACHE = {str(tmp_path / "modules")!r}
AutoConfig.from_pretrained({str(unknown)!r}, trust_remote_code=True)"""
    done = warm.run(["-c", trusting], ROOT)
    assert done.returncode == 0 and (tmp_path / "modules").exists(), done.stderr
    assert marker.exists(), "the folder was not armed: this test would pass whatever we did"


def test_weights_are_safetensors_or_refused(model, tmp_path):
    marker = tmp_path / "marker"
    bomb, harmless = {"model.embed_tokens.weight": Bomb(marker)}, {"model.embed_tokens.weight": torch.zeros(1024, 32)}
    adapter = dict(peft_type="LORA", base_model_name_or_path=str(PICO), r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    index = {"metadata": {"total_size": 1}, "weight_map": {"model.embed_tokens.weight": "pytorch_model.bin"}}
    for weights in (bomb, harmless):
        cases = {
            "pytorch_model.bin": model(model__safetensors=None),
            "adapter_model.bin": model(model__safetensors=None, adapter_config__json=adapter),
            "pytorch_model.bin ": model(model__safetensors=None, model__safetensors__index__json=index),
            "adapter_model.bin ": model(config__json={"transformers_weights": "adapter_model.bin"}),
            "model.safetensors": model(),
        }
        for name, folder in cases.items():
            torch.save(weights, folder / name.strip())
            assert "cannot be loaded" in said(lambda folder=folder: load(folder)), (name, weights is bomb)
            assert not marker.exists(), name
    beside = model()  # safetensors are there as well: they are taken
    torch.save(bomb, beside / "pytorch_model.bin")
    load(beside)
    assert not marker.exists()
    with pytest.raises(FileNotFoundError):  # the marker's folder is gone by then: it was the bomb that tried
        pickle.loads(pickle.dumps(Bomb(tmp_path / "nowhere" / "marker")))


TEMPLATES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
    "joiner": "{{ joiner.__init__.__globals__.os.popen('touch MARKER').read() }}",
    "lipsum": "{{ lipsum.__globals__['os'].system('touch MARKER') }}",
    "self": "{{ self.__init__.__globals__.__builtins__['open']('MARKER', 'w') }}",
    "filter": "{{ ''|attr('__class__')|attr('__mro__') }}{{ [''] | map(attribute='__class__') | list }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "helpers": "{{ raise_exception.__globals__['os'].system('touch MARKER') }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.system('touch MARKER') }}",
    "append": "{{ messages.append(1) }}",
    "range": "{% for i in range(10**12) %}x{% endfor %}",
    "syntax": "{{ ",
    "missing": "{{ nobody.knows.it }}",
    "escape": "{{ raise_exception('\x1b]0;title\x07\u202e') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_runs_in_a_sandbox(model, tmp_path, name):
    marker, rendered = tmp_path / "marker", []
    folder = model(chat_template__jinja=TEMPLATES[name].replace("MARKER", str(marker)))
    why = said(lambda: rendered.append(render(load(folder), [{"role": "user", "content": "hi"}], None, True)))
    assert not marker.exists() and ("chat template" in why if why else "object" not in rendered[0] and "class" not in rendered[0])
    if name in ("cycler", "joiner", "lipsum"):  # outside of the sandbox they do what they say
        jinja2.Template((folder / "chat_template.jinja").read_text()).render()
        assert marker.exists()


CONFIGS = {
    "hidden_size": ["x", 64, -1], "num_hidden_layers": [-1, 1e99], "num_attention_heads": [0], "dtype": ["evil"],
    "model_type": [["qwen3"], "\ud800", None, "\x1b[2J"],
    "hidden_act": ["__import__('os')"], "quantization_config": [[1], {"quant_method": "gptq", "bits": 4}], "pad_token_id": [10**9],
}  # fmt: skip
TEXTS = {"a list": "[]", "deep": "[" * 100_000, "NaN": "NaN", "cut": '{"a', "text": '"x"'}


def test_a_model_folder_that_makes_no_sense_is_refused_in_one_sentence(model):
    cases = {f"{key} {value!a}": {"config__json": {key: value}} for key, values in CONFIGS.items() for value in values}
    files = ("config__json", "tokenizer_config__json", "tokenizer__json", "generation_config__json", "model__safetensors__index__json")
    cases |= {f"{file} {kind}": {file: text} for file in files for kind, text in TEXTS.items()}
    failures = []
    for name, files in cases.items():
        folder = model(**files, **({"model__safetensors": None} if "index" in name else {}))
        try:
            if not (why := said(lambda folder=folder: load(folder))) and "generation" not in name:  # without that one a model is whole
                failures.append(f"{name}: loaded")
            assert "Traceback" not in why
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}")
    assert not failures


# ------------------------------------------------------------------------------------------------ run folders


def surroundings(home: Path) -> dict[str, str]:
    """The environment of a user with secrets in it."""
    more = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "HOME": str(home)}
    return {**os.environ, **SECRETS, **more}


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> SimpleNamespace:
    """A whole run with wandb: its folder, the user's home, and what was printed."""
    base = tmp_path_factory.mktemp("played")
    (base / "home").mkdir()
    words = ["train.py", "--name", "letters", *TINY, "--runs", str(base / "runs")]
    # A fresh Python: libraries look at HOME while they are imported.
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=surroundings(base / "home"), capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return SimpleNamespace(folder=base / "runs" / "letters", home=base / "home", printed=done.stdout + done.stderr)


@pytest.fixture
def run(played, tmp_path) -> Path:
    """A copy of it, to be spoilt."""
    return shutil.copytree(played.folder, tmp_path / "run", ignore=shutil.ignore_patterns("wandb"))


@pytest.fixture(scope="module")
def swarm(tmp_path_factory) -> Path:
    return made_up.swarm(tmp_path_factory.mktemp("swarm"), n=3)


def seal(folder: Path) -> None:
    """Make the checksum right again, as whoever plants something would."""
    (folder / "checkpoint" / "checksum").write_text(checksum(folder / "checkpoint"))


def python(monkeypatch, script: str, *words) -> str:
    """What `python script words` says."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
    return said(lambda: runpy.run_path(str(ROOT / script), run_name="__main__") if script != "train.py" else train.main())


class Read(BaseException):
    """All files of the run have been read; what follows is training."""


@pytest.fixture
def reads_only(monkeypatch):
    """train.py stops when it has read its files."""

    def stop(*_):
        raise Read

    monkeypatch.setattr(run_records, "StopSignal", stop)
    for room in (ahead, evaluate):
        monkeypatch.setattr(room, "make_sampler", lambda *_: SimpleNamespace(asleep=None, sync=stop))


def plant(folder: Path, what: str, marker: Path) -> None:
    """Put something that is no checkpoint where torch.load will read it."""
    (folder / "optimizer.pt" if what != "reference" else folder.parent / "reference.pt").unlink()
    target = folder.parent / "reference.pt" if what == "reference" else folder / "optimizer.pt"
    if what in ("bomb", "reference"):
        torch.save({"state": {}, "param_groups": [Bomb(marker)]}, target)
    elif what == "script":
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), target)
    elif what == "other":
        torch.save({"state": {0: {"step": torch.zeros(1)}}, "param_groups": []}, target)
    else:
        target.write_bytes({"pickle": pickle.dumps(Bomb(marker)), "empty": b"", "text": b"hello"}[what])


@pytest.mark.parametrize("what", ["bomb", "pickle", "empty", "text", "script", "other", "reference"])
def test_a_checkpoint_is_data(run, tmp_path, monkeypatch, what):
    plant(run / "checkpoint", what, tmp_path / "marker")
    seal(run)
    assert find_checkpoint(run / "checkpoint") is not None
    monkeypatch.setattr(run_records, "StopSignal", lambda: SimpleNamespace(asked=False))
    why = python(monkeypatch, "train.py", "--resume", run, "--no-wandb")
    assert ("reference.pt" if what == "reference" else "checkpoint") in why and not (tmp_path / "marker").exists()
    if what in ("bomb", "pickle"):
        assert "optimizer.pt" in python(monkeypatch, "train.py", "--eval-only", run)
        assert "optimizer.pt" in said(lambda: export.main(["merge", str(run), str(tmp_path / "out")]))
        assert not (tmp_path / "marker").exists() and not (tmp_path / "out").exists()


def test_an_adapter_that_is_a_pickle_is_not_read(run, tmp_path, monkeypatch, reads_only):
    weights = run / "checkpoint" / "adapter_model.safetensors"
    torch.save({"lora": Bomb(tmp_path / "marker")}, weights)
    seal(run)
    assert "checkpoint" in python(monkeypatch, "train.py", "--resume", run, "--no-wandb")
    weights.rename(weights.with_name("adapter_model.bin"))
    seal(run)
    assert "adapter_model.safetensors" in python(monkeypatch, "train.py", "--resume", run, "--no-wandb")
    assert not (tmp_path / "marker").exists()


SPOILT = {
    "NaN": "NaN", "list": "[]", "deep": "[" * 100_000, "empty": "{}", "number": '{"update": 1' + "0" * 5000 + "}", "bytes": b"\xff\xfe\x00",
    "surrogate": '{"update": 1, "stage": "final", "tasks": "\\ud800", "trained": true, "reward": ["\\ud800"], "source": "eval", '
                 '"messages": [{}]}',
    "types": '{"update": "x", "stage": [], "tasks": {}, "trained": "no", "reward": "x", "messages": 5, "segments": {"a": 1}, "exact": '
             '[null], "seed": "x"}',
    "NaNs": '{"update": NaN, "stage": "final", "tasks": "tier 2", "trained": true, "reward": [NaN, 1e999], "exact": [NaN, Infinity], '
            '"format": [NaN], "seed": NaN}',
}  # fmt: skip


def spoil(folder: Path, file: str, text: str | bytes) -> None:
    """A JSON file is replaced, in a file of lines the first and the last are."""
    path, new = folder / file, text if isinstance(text, bytes) else text.encode()
    lines = path.read_bytes().split(b"\n")[1:-2] if path.suffix == ".jsonl" and path.exists() else None
    path.write_bytes(new if lines is None else b"\n".join([new, *lines, new, b""]))


@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_run_folder_ends_every_command_in_one_sentence(played, tmp_path, monkeypatch, kind):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)  # what is drawn is not looked at, and takes long
    good = shutil.copytree(played.folder, tmp_path / "good", ignore=shutil.ignore_patterns("wandb"))
    reads = {
        "bookkeeping/report.py": ("config.json", "summary.json", "metrics.jsonl", "evals.jsonl", "episodes.jsonl"),
        "bookkeeping/compare.py": ("config.json", "metrics.jsonl", "evals.jsonl"), "bridges/export.py": ("summary.json",),
    }  # fmt: skip
    failures = []
    for script, file in ((script, file) for script, files in reads.items() for file in files):
        folder = shutil.copytree(good, tmp_path / f"{script} {file}")
        spoil(folder, file, SPOILT[kind])
        words = {
            "bookkeeping/compare.py": [folder, good, "--out", tmp_path / "out"],
            "bridges/export.py": ["adapter", folder, tmp_path / "export"],
        }
        try:
            python(monkeypatch, script, *words.get(script, [folder]))
        except Exception as error:
            failures.append(f"{script} on {file}: {type(error).__name__}")
    assert not failures


@pytest.mark.parametrize("kind", SPOILT)
def test_a_run_whose_files_are_spoilt_is_resumed_or_refused_in_one_sentence(played, tmp_path, monkeypatch, reads_only, kind):
    failures = []
    for file in ("config.json", "metrics.jsonl", "evals.jsonl", "checkpoint/state.json"):
        folder = shutil.copytree(played.folder, tmp_path / file.replace("/", " "), ignore=shutil.ignore_patterns("wandb"))
        spoil(folder, file, SPOILT[kind])
        seal(folder)
        for words in (["--resume", folder, "--no-wandb"], ["--eval-only", folder]):
            try:
                why = python(monkeypatch, "train.py", *words)
                assert why, "it went on"
            except Read:
                pass
            except Exception as error:
                failures.append(f"{words[0]} with {file}: {type(error).__name__} {error}"[:200])
    assert not failures


def test_a_config_cannot_lead_a_resumed_run_out_of_its_folder(run, tmp_path, monkeypatch):
    outside = tmp_path / "outside"
    config = json.loads((run / "config.json").read_text())
    config |= {"runs": str(outside), "name": "../../outside", "resume": str(outside), "eval_only": str(outside)}
    (run / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(run_records, "StopSignal", lambda: SimpleNamespace(asked=False))
    before, written = set(tmp_path.rglob("*")), (run / "config.json").stat().st_mtime_ns
    assert python(monkeypatch, "train.py", "--resume", run, "--no-wandb") == "" and (run / "config.json").stat().st_mtime_ns > written
    assert not outside.exists() and all(run in path.parents for path in set(tmp_path.rglob("*")) - before)


# ------------------------------------------------------------------------------------------------ no door in the code

# (file, what): why it may be there
ALLOWED = {
    ("fast/ahead.py", "pickle.loads"): "its own files, in a folder that only its own user can open",
    ("lab/trust/places.py", "importlib.import_module"): "the modules that its own table PLACES names",
    ("lab/trust/marks.py", "runpy"): "a file of ours as `python FILE` runs it, in a private copy",
    ("lab/trust/marks.py", "compile"): "files of ours, with a mark before each statement",
    ("lab/trust/mutate.py", "importlib.import_module"): "its own list LIBRARIES",
    ("lab/pages/pico.py", "compile"): "lines of pico.py and of its own table, for docs/pico.md",
    ("lab/pages/pico.py", "exec"): "the same",
    ("lab/pages/pico.py", "eval"): "the same",
    ("lab/speed/scale.py", "pickle.loads"): "what it has pickled in the same line, to time it",
    ("fast/parallel.py", "all_gather_object"): "between the processes of one run, which torchrun has started",
    ("fast/parallel.py", "broadcast_object_list"): "the same",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
MODULES = {"marshal", "shelve", "dill", "cloudpickle", "joblib", "pty", "code", "runpy"}
CALLS = {
    "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
    "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell", "torch.hub.load", "torch.jit.load",
    "pandas.read_pickle", "importlib.import_module", "tempfile.mktemp",
}  # fmt: skip
OBJECTS = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list", "recv_object_list"}


def doors(source: str) -> list[str]:
    """Every way in a program to run what it was given as data."""
    found, names = [], {}  # names: what an imported name stands for
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            top = lambda alias: alias.name if alias.asname else alias.name.partition(".")[0]
            names |= {alias.asname or top(alias): top(alias) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found += [name for name in names.values() if name.partition(".")[0] in MODULES]

    def dotted(node) -> str:
        if isinstance(node, ast.Name):
            return names.get(node.id, node.id)
        return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""

    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            pairs = [(key.value, value) for key, value in zip(node.keys, node.values) if isinstance(key, ast.Constant)]
        elif isinstance(node, ast.keyword):
            pairs = [(node.arg, node.value)]
        else:
            pairs = []
        for name, value in pairs:
            good = isinstance(value, ast.Constant) and value.value is False
            found += [str(name)] if name in ("trust_remote_code", "shell", "allow_pickle") and not good else []
        if isinstance(node, ast.Name | ast.Attribute):
            name = dotted(node)
            last = name.rpartition(".")[2]
            found += [name] if name in CALLS or name.removeprefix("builtins.") in BUILTINS else []
            found += [last] if last in OBJECTS or name.startswith(("os.exec", "os.spawn", "os.posix_spawn")) else []
        if isinstance(node, ast.Call):
            name = dotted(node.func) or getattr(node.func, "attr", "")
            given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
            found += ["torch.load"] if name == "torch.load" and given.get("weights_only") is not True else []
            model = name.endswith(".from_pretrained") and "Model" in name
            found += ["from_pretrained"] if model and given.get("use_safetensors") is not True else []
    return found


@pytest.mark.parametrize("bad", [
    "eval('1')", "f = exec", "import builtins; builtins.eval('1')", "__import__('os')", "compile(x, '', 'eval')",
    "import os; os.system('ls')", "from os import popen as p; p('ls')",
    "import os as o; o.execvp('ls', [])", "import subprocess; subprocess.run('ls', shell=True)", "run(['ls'], shell=flag)",
    "import subprocess as s; s.getoutput('ls')", "import pickle; pickle.load(f)", "from pickle import loads; loads(b)", "import marshal",
    "import shelve", "import joblib.numpy_pickle", "import yaml; yaml.load(f)",
    "import torch; torch.load(f)", "import torch; torch.load(f, weights_only=False)", "from torch import load; load(f)",
    "import torch; torch.load(f, weights_only=x)",
    "AutoModelForCausalLM.from_pretrained(x)", "AutoTokenizer.from_pretrained(x, trust_remote_code=True)",
    "options = {'trust_remote_code': yes}",
    "AutoModelForCausalLM.from_pretrained(x, use_safetensors=False)", "import transformers; transformers.AutoModel.from_pretrained(x)",
    "import numpy as np; np.load(f, allow_pickle=True)", "import torch.distributed as dist; dist.all_gather_object(a, b)",
    "import importlib; importlib.import_module(x)",
])  # fmt: skip
def test_the_search_for_doors_finds_them(bad):
    assert doors(bad)


def test_the_search_for_doors_leaves_the_rest_alone():
    good = ["import re; re.compile('x')", "model.eval()", "import torch; torch.load(f, weights_only=True)",
            "import subprocess; subprocess.run(['ls'])",
            "AutoTokenizer.from_pretrained(x, trust_remote_code=False)", "import yaml; yaml.safe_load(f)",
            "import pickle; pickle.dumps(x)"]  # fmt: skip
    assert not [door for text in good for door in doors(text)]


def sources() -> list[str]:
    """Every file of code that the repository ships, tests aside."""
    found = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [name for name in found.splitlines() if not name.startswith("tests/") and (ROOT / name).exists()]


def test_there_is_no_door_in_the_code():
    files = [ROOT / name for name in sources()]
    assert len(files) > 30
    found = {(str(file.relative_to(ROOT)), door) for file in files for door in doors(file.read_text())}
    assert found == set(ALLOWED)


def test_the_embedded_models_hold_no_program():
    for folder in (PICO, PICO.with_name("pico_swarm")):
        assert {file.suffix for file in folder.rglob("*")} <= {".json", ".safetensors", ".jinja", ".md"}
        assert "auto_map" not in (folder / "config.json").read_text() + (folder / "tokenizer_config.json").read_text()


# ------------------------------------------------------------------------------------------------ replies do nothing

WATCHED = """
import json, sys
sys.path.insert(0, {root!r})
from env_alphabet import Alphabet
from env_letters import Letters
from env_swarm import Swarm

seen, watching = [], False
def hook(event, arguments):
    if watching and event.partition(".")[0] in ("open", "os", "subprocess", "socket", "shutil", "exec", "compile", "import", "marshal", \
"pickle", "ctypes", "tempfile", "urllib"):
        seen.append(event + " " + ascii(arguments)[:100])
sys.addaudithook(hook)
envs = [Letters(2, "partial", True, "states"), Letters(3, "binary", False, "bare"), Alphabet(3, 3, 1, 4, 8.0, False, True, "states"), \
Swarm(), Swarm(version="0.1")]
replies, n = json.loads(sys.stdin.read()), 0
for env in envs:
    env.reset(0)  # the word list of a tier is read once
for env in envs:
    queue = ["warm up", *replies[type(env).__name__]]
    while queue:
        env.reset(n)
        done = False
        while not done:
            reply = queue.pop(0) if queue else "nothing"
            if {leak} and reply != "warm up":
                open(reply.encode().hex()[:20], "ab").close()
            done, n = env.step(reply)[1], n + 1
            watching = True
        env.score()
watching = False
print(json.dumps([n, seen]))
"""
PAYLOADS = [
    "../../../../etc/passwd", "/etc/passwd", "$(touch marker)", "`touch marker`", "; touch marker #", "| touch marker",
    "' && touch marker '", "file:///etc/passwd", "__import__('os').system('touch marker')", "open('marker', 'w')", "{{ ''.__class__ }}",
    "%s%s%n", "http://127.0.0.1:9/", "!!python/object/apply:os.system [touch marker]",
    "marker\x00.txt", "${jndi:ldap://127.0.0.1:9/a}", "cos\nsystem\n(S'touch marker'\ntR.", "\\\\127.0.0.1\\share",
]  # fmt: skip


def hostile_replies() -> dict[str, list[str]]:
    from swarm.tools import TOOLS, write_call

    calls = []
    for text in PAYLOADS:
        calls += [text, write_call(text, {}), write_call("post", {text: text})]
        calls += [write_call(tool, {name: text if kind == "string" else 1 for name, kind in TOOLS[tool][1].items()}) for tool in TOOLS]
    tags = ("alphabetical_sorted", "combined_alphabetical_sorted")
    return {
        "Letters": [reply for text in PAYLOADS
                    for reply in (text, f"<answer>{text}</answer>", f"<answer>{json.dumps({text: 1})}</answer>")],
        "Alphabet": [f"<think>{text}</think><{tag}>\n{text}\n</{tag}>" for text in PAYLOADS for tag in tags], "Swarm": calls,
    }  # fmt: skip


@pytest.mark.parametrize("leak", [False, True])
def test_a_reply_opens_no_file_starts_no_process_and_calls_nobody(tmp_path, leak):
    script = WATCHED.format(root=str(ROOT), leak=leak)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, input=json.dumps(hostile_replies()), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    n, seen = json.loads(done.stdout)
    assert n > 600
    if leak:  # an environment that does is caught
        assert len(seen) > 100 and seen[0].startswith("open")
    else:
        assert not seen and not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ text stays text: Markdown and terminal

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)> ![x](javascript:alert(1)) [x](http://a.example) <http://a.example> | a | "
    "b \\| c `x` ``` $\\frac{$ \x1b[2J\x1b]0;title\x07\x9b31m \u202eevil\u2066 \x00\r\n---\nlicense: evil\n\n# heading\n\n<b>bold</b>\n"
    "```\n<i>\n| x |\n"
)


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def check_markdown(text: str) -> None:
    """A renderer that passes HTML on makes nothing of it but what we write: headings, tables, lists, code, one picture."""
    markdown_it = pytest.importorskip("markdown_it", reason="markdown-it-py is not installed: pip install markdown-it-py")
    tags = Tags()
    tags.feed(markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").render(text))
    ours = {"h1", "h2", "p", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "code", "pre", "strong", "img", "hr"}
    assert {tag for tag, _ in tags.found} <= ours, {tag for tag, _ in tags.found} - ours
    assert all(attributes["src"] in ("curves.png", "compare.png") for tag, attributes in tags.found if tag == "img")
    assert not any(name.startswith("on") or name == "href" for _, attributes in tags.found for name in attributes)
    assert "heading" not in [line.lstrip("# ") for line in text.split("\n")]


def check_terminal(text: str) -> None:
    steering = [c for c in text if not c.isprintable() and c != "\n"]
    assert not steering, ascii("".join(steering[:20]))


def poisoned(folder: Path) -> Path:
    """Every text of a run's files that is shown somewhere, with all of HOSTILE behind it."""
    for file in (f for f in folder.iterdir() if f.suffix in (".json", ".jsonl")):
        texts = file.read_text().split("\n") if file.suffix == ".jsonl" else [file.read_text()]
        file.write_text("\n".join(json.dumps(poison(json.loads(text))) if text else "" for text in texts))
    return folder


def poison(value, key: str = ""):
    if isinstance(value, dict):
        return {k + HOSTILE * k.startswith("tier "): poison(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [poison(v, key) for v in value]
    shown = ("tasks", "trained", "device", "python", "torch", "collapse", "name", "runs", "preset", "content", "error", "text")
    return value + HOSTILE if isinstance(value, str) and key in shown else value


def test_the_report_of_a_hostile_run_is_text(run, monkeypatch, capsys):
    folder = run.rename(run.with_name("<img src=x onerror=alert(1)> \x1b[2J $\\frac{$ [x](http:a)"))
    poisoned(folder)
    assert python(monkeypatch, "bookkeeping/report.py", folder) == ""
    check_terminal(capsys.readouterr().out)
    report = (folder / "report.md").read_text()
    check_markdown(report)
    assert "evil" in report and (folder / "curves.png").stat().st_size > 10_000  # what is no steering is still there, $ is no formula


def test_a_comparison_with_a_hostile_run_is_text(run, played, monkeypatch, capsys):
    folder = run.rename(run.with_name("<b> \x1b[2J $\\frac{$ `|"))
    poisoned(folder)
    assert python(monkeypatch, "bookkeeping/compare.py", folder, played.folder, "--out", run.with_name("out")) == ""
    check_terminal(capsys.readouterr().out)
    check_markdown((run.with_name("out") / "compare.md").read_text())


def test_the_behaviour_of_a_hostile_run_is_text(swarm, tmp_path):
    folder = shutil.copytree(swarm, tmp_path / "swarm")
    lines = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    call = f"<tool_call>{json.dumps({'name': 'post', 'arguments': {'content': HOSTILE}})}</tool_call>"
    for episode in lines:
        for i, message in enumerate(episode["messages"][1:]):
            message["content"] = HOSTILE.partition("\r")[0] if message["role"] == "tool" else call if i % 4 else HOSTILE
    (folder / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = tables.markdown(report.collect(folder)[0]["tables"])
    check_terminal(text)
    check_markdown(text)
    assert "post" in text and "evil" in text


def test_a_card_cannot_be_broken_out_of(run, model_folder, tmp_path, capsys):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    poisoned(run)
    assert said(lambda: export.main(["adapter", str(run), str(tmp_path / "out")])) == ""
    check_terminal(capsys.readouterr().out)
    cards = [(tmp_path / "out" / "README.md").read_text()]
    summary = json.loads((run / "summary.json").read_text())
    folder = shutil.copytree(
        model_folder("qwen3"), tmp_path / "models" / "<img src=x> `x` \x1b[2J ![x](a) | ---\nlicense: evil\n---\n# heading"
    )
    for name in (str(folder), "owner/name\nlicense: evil\n---\n# heading", 'owner/name", trust_remote_code=True, x="'):
        clean = {**json.loads(json.dumps(summary).replace(json.dumps(HOSTILE)[1:-1], "")), "collapse": ""}
        clean["config"] |= {"model": name, "preset": "x; touch marker"}
        cards += [export.card(clean, kind) for kind in ("adapter", "merge")]
    assert all("--preset 'x; touch marker'" in card for card in cards[1:])  # to be pasted into a shell
    for card in cards:
        _, front, body = card.split("---\n", 2)
        assert set(yaml.safe_load(front)) <= {"base_model", "library_name", "pipeline_tag", "tags"}
        check_markdown(body)
        check_terminal(card)
        programs = [part.removeprefix("python\n") for part in body.split("```")[1::2] if part.startswith("python\n") and "import" in part]
        assert programs and not any(
            keyword.arg for text in programs for keyword in ast.walk(ast.parse(text)) if isinstance(keyword, ast.keyword)
        )


class Raises:
    """An environment with a bug: its error repeats the reply."""

    think, tools, max_turns = True, None, 1

    def reset(self, seed: int) -> list[dict]:
        return [{"role": "user", "content": "?"}]

    def step(self, reply: str):
        raise ValueError(reply)

    def score(self) -> dict:
        raise KeyError(HOSTILE)


def test_an_environments_error_cannot_steer_the_terminal(monkeypatch):
    """It is printed when all episodes of an update fail, and stands in the report of an evaluation over an API."""
    policy = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, skip_special_tokens: HOSTILE))
    episode, other = Episode(0, 0, [1], [False], [0.0]), Episode(0, 0, [1], [False], [0.0])
    take_turn(policy, episode, Guarded(Raises()), SimpleNamespace(token_ids=[2], logprobs=[0.0], finished=True), 100)
    finish(other, Guarded(Raises()))

    async def ask(*_):
        return SimpleNamespace(text=HOSTILE, tokens=1, cut=False, message={})

    monkeypatch.setattr(api, "ask", ask)
    end = SimpleNamespace(key="", counts=Counter(), options={}, notes=[])
    third = asyncio.run(api.play_one(end, Raises, 0, 0))
    for e in (episode, other, third):
        assert e.stop_reason == "error" and "Error: " in e.error
        check_terminal(e.error)
        assert "\n" not in e.error
    cfg = SimpleNamespace(model="m", env="letters", max_tokens=1)
    reasons = [third.error, "HTTP 400: <img src=x onerror=alert(1)> ![x](http://a.example)"]
    check_markdown(api.tell(cfg, end, "tier 2", {}, [], reasons, 1.0, "HTTP 400: <script>alert(1)</script>"))


# ------------------------------------------------------------------------------------------------ secrets and permissions


def leaks(folder: Path) -> list[tuple[str, str]]:
    """(file, secret) for every secret in the bytes or the name of a file."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [
        (file.name, name) for file in files for name, secret in SECRETS.items() if secret.encode() in file.read_bytes() + str(file).encode()
    ]


def test_no_secret_is_in_a_run_or_on_the_terminal(played):
    wandb = [file for file in (played.folder / "wandb").rglob("*.wandb") if file.is_file()]
    assert len(wandb) == 1 and b"partial" in wandb[0].read_bytes()  # the settings are there to be read: so would a secret be
    assert not leaks(played.folder) and not leaks(played.home)
    assert not [name for name, secret in SECRETS.items() if secret.encode() in played.printed]


def test_no_secret_is_left_by_a_crash(tmp_path):
    script = (
        "import train\ndef boom(*_):\n    raise RuntimeError('boom')\ntrain.evaluate_policy = boom\ntrain.main()"  # wandb is open by then
    )
    (tmp_path / "home").mkdir()
    words = ["-c", script, "--name", "crash", *TINY, "--runs", str(tmp_path / "runs")]
    done = warm.run(words, ROOT, surroundings(tmp_path / "home"))
    assert done.returncode == 1 and "boom" in done.stderr and list((tmp_path / "runs" / "crash" / "wandb").rglob("*.wandb"))
    assert not leaks(tmp_path / "runs") and not leaks(tmp_path / "home")
    assert not [name for name, secret in SECRETS.items() if secret in done.stdout + done.stderr]


def test_folders_in_memory_are_closed_to_others():
    old = os.umask(0)
    try:
        homes = [memory_folder(), memory_folder(2**60)]  # in memory, and on the disk where there is too little
    finally:
        os.umask(old)
    for home in homes:
        assert stat.S_IMODE(os.stat(home.name).st_mode) == 0o700 and os.stat(home.name).st_uid == os.getuid()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs /dev/shm")
def test_what_is_swept_is_never_what_a_link_points_to(tmp_path):
    (tmp_path / "precious").write_text("x")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    link = Path(f"/dev/shm/picoswarm-held-{gone.pid}-link")
    link.symlink_to(tmp_path)
    try:
        sweep()
        assert (tmp_path / "precious").exists()
    finally:
        link.unlink(missing_ok=True)
