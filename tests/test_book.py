"""Protects the pages: links lead somewhere, commands can be given, each file shows itself, and the
forks of docs/fork.md work."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import settings
import warm
from bookkeeping import refusals
from helpers import example

ROOT = Path(__file__).resolve().parents[1]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
PAGES = [name for name in TRACKED if name.endswith(".md") and not name.startswith("tests/")]
PAGES = [name for name in PAGES if (ROOT / name).exists()]
TEXT = {name: (ROOT / name).read_text(encoding="utf8") for name in PAGES}
BOOK = ["README.md", *(name for name in PAGES if name.startswith("docs/"))]
FOLDERS = {file.split("/")[0] for file in TRACKED if "/" in file and file[0] != "."}
FORK = ROOT / "docs" / "fork.md"
TINY = "--updates 1 --sft-steps 1 --sft-examples 2 --sft-batch 2 --num-tasks 2 --k 2 --eval-n 2 --max-tokens 32 --threads 1 --no-wandb"


def call(words: list[str]):
    return warm.run(words[1:], ROOT, {**os.environ, "OMP_NUM_THREADS": "1"})


# ------------------------------------------------------------------------------- commands and links
def commands() -> list[str]:
    """Of README.md and docs/: the lines of their plain code blocks that call Python."""
    found = []
    for page in BOOK:
        text = re.sub(r"^```(python|diff)\n.*?^```\n", "", TEXT[page], flags=re.S | re.M)
        for block in re.findall(r"^```\n(.*?)^```\n", text, re.S | re.M):
            found += [re.split(r"\s{2,}#", line)[0].strip() for line in block.splitlines()]
    calls = [line for line in found if re.search(r"\b(python|torchrun)\b", line)]
    return [line for line in dict.fromkeys(calls) if "──" not in line]


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_pages_can_be_given(command):
    """Its file or module is there, and train.py knows its flags."""
    words = shlex.split(command)
    if "train.py" in words:
        settings.read_flags(words[words.index("train.py") + 1 :])
    elif "-m" in words and (module := words[words.index("-m") + 1]).split(".")[0] in FOLDERS:
        places = [ROOT / (module.replace(".", "/") + end) for end in (".py", "/__init__.py")]
        assert any(place.exists() for place in places), module


@pytest.mark.parametrize("page", PAGES)
def test_inline_commands_and_paths_name_files_that_are_there(page):
    text, folder = re.sub(r"```.*?```", "", TEXT[page], flags=re.S), (ROOT / page).parent
    for command in re.findall(r"`python ([^`]*)`", text):
        words = command.split()
        file = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
        assert words[0] == "FILE" or file in ("room/file.py", "pytest.py") or (ROOT / file).exists(), command
    for path in re.findall(r"`((?:\w+/)+[\w.-]*)`", text):
        assert path.split("/")[0] not in FOLDERS or (ROOT / path).exists() or (folder / path).exists(), path


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_are_there_and_tables_are_whole(page):
    text, folder = re.sub(r"```.*?```", "", TEXT[page], flags=re.S), (ROOT / page).parent
    for alt, link in re.findall(r"!?\[([^\]]*)\]\(([^)\s]+)\)", text):
        file, _, title = link.partition("#")
        target = folder / file if file else ROOT / page
        if not link.startswith("http"):
            assert target.exists() and alt, link
            assert not title or title in anchors(target.read_text(encoding="utf8")), link
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block[:200]


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_flags_of_the_flags_page_are_those_of_the_command_line():
    known = {name.rstrip("_") for name in settings.Config.__dataclass_fields__}
    flags = re.findall(r"`--(?:no-)?([a-z][\w-]*)", TEXT["docs/flags.md"])
    assert len(flags) > 25 and {flag.replace("-", "_") for flag in flags} <= known


def test_the_answers_of_the_questions_page_stand_where_it_says():
    rows = re.findall(r"^\| .*\? \| `(\w+\.py)` \| `(\w+)` \|$", TEXT["docs/questions.md"], re.M)
    for file, function in rows:
        assert f"\ndef {function}(" in (ROOT / file).read_text(encoding="utf8"), (file, function)
    assert len(rows) == 5


# ------------------------------------------------------------------------------- chapters
CHAPTERS = sorted(file.name for file in ROOT.glob("*.py"))
ROOMS = ("swarm", "fast", "bookkeeping", "bridges", "learn")
FILES = [f"{room}/{file.name}" for room in ROOMS for file in sorted((ROOT / room).glob("*.py"))]
# Those that do not show themselves, and why.
OTHERWISE = {
    "pico.py": "minutes; tests/test_pico.py",
    "train.py": "make train",
    "fast/vllm_engine.py": "make test-vllm",
    "bookkeeping/behaviour.py": "needs a run",
    "bookkeeping/compare.py": "needs runs",
    "bookkeeping/report.py": "needs a run",
    "bridges/trl.py": "needs requirements/all.txt; make test-all",
    "bridges/openenv_swarm.py": "a server; tests/test_openenv.py",
    "learn/exercises.py": "exits with 1, being unsolved; tests/test_exercises.py",
}


def shows_itself(file: str) -> bool:
    return file not in OTHERWISE and "\nif __name__ == " in (ROOT / file).read_text()


@pytest.mark.parametrize("file", filter(shows_itself, [*CHAPTERS, *FILES]))
def test_every_file_shows_itself(file):
    """Each has asserts of its own in addition to what it prints."""
    words = ["-m", file.removesuffix(".py").replace("/", ".")] if "/" in file else [file]
    done = call([sys.executable, *words])
    assert done.returncode == 0, done.stderr[-800:]
    assert len(done.stdout) > (60 if "/" in file else 150)  # chapters show more


# ------------------------------------------------------------------------------- fork it
def test_the_environment_of_the_fork_page_is_short_and_takes_any_reply(tmp_path):
    (tmp_path / "vowels.py").write_text(example(FORK, "vowels.py"))
    assert len([line for line in example(FORK, "vowels.py").splitlines() if line.strip()]) <= 30
    env = settings.yours(f"{tmp_path}/vowels.py:Vowels")()
    for seed in range(50):
        env.reset(seed)
        env.step(env.expert_reply())
        assert env.score() == {"reward": 1.0, "exact": 1.0}
        for garbage in ("", "<answer>", "\x00" * 999, "<answer></answer>", f"<answer>{'a' * 10**6}</answer>"):
            env.step(garbage)
            assert 0 <= env.score()["reward"] < 1 and env.score()["exact"] == 0


def test_an_environment_may_tell_nothing_but_a_reward(tmp_path):
    (tmp_path / "plain.py").write_text("""
class Plain:
    think, tools = False, None
    reset = lambda self, seed: [{"role": "user", "content": f"Say a, {seed % 9} times."}]
    step = lambda self, reply: (setattr(self, "said", reply), ([], True))[1]
    score = lambda self: {"reward": self.said.count("a") - 0.5}
    expert_reply = lambda self: "a a a"
""")
    done = call(
        [sys.executable, "train.py", "--env", f"{tmp_path}/plain.py:Plain", *TINY.split(), "--runs", str(tmp_path), "--name", "run"]
    )
    assert done.returncode == 0, done.stderr[-800:]
    assert "update    1  reward" in done.stdout + done.stderr and "mean reward" in (tmp_path / "run" / "report.md").read_text()


def test_an_environment_that_cannot_be_used_is_told_in_one_sentence(tmp_path):
    (tmp_path / "bad.py").write_text("class Half:\n    think = False\nraise RuntimeError('no') if False else None\n")
    (tmp_path / "half.py").write_text("class Half:\n    think = False\n")
    for env, words in (("nowhere.py:X", "there is no file nowhere.py"), (f"{tmp_path}/bad.py:Half", "TypeError"),
                       (f"{tmp_path}/half.py:Half", "tools"), (f"{tmp_path}/half.py:Whole", "Whole"),
                       ("env_letters.py:Letters", "missing 4 required"), ("yours", "no such environment"),
                       ("chess", "FILE.py:CLASS")):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(words)) as told:
            refusals.check(settings.Config(env=env))
        assert "\n" not in str(told.value)


def test_a_run_folder_cannot_bring_its_own_code(tmp_path):
    """--resume and --eval-only of a folder from anywhere must not run the file that its config names."""
    flags = [*TINY.split(), "--difficulty", "2", "--no-eval-other-tiers"]
    done = call([sys.executable, "train.py", *flags, "--runs", str(tmp_path), "--name", "run"])
    assert done.returncode == 0, done.stderr[-800:]
    folder = tmp_path / "run"
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + example(FORK, "vowels.py"))
    config = json.loads((folder / "config.json").read_text()) | {"env": f"{tmp_path}/evil.py:Vowels"}
    (folder / "config.json").write_text(json.dumps(config))
    for flag in ("--resume", "--eval-only"):
        done = call([sys.executable, "train.py", flag, str(folder)])
        assert done.returncode == 1 and "somebody's code" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("change", re.findall(r"```diff\n(.*?)```", FORK.read_text(encoding="utf8"), re.S))
def test_a_change_of_the_fork_page_can_still_be_made(change):
    """What it leaves and what it takes away stands, once, in a file of the book or in the class of
    the page."""
    files = [(ROOT / name).read_text(encoding="utf8") for name in CHAPTERS] + [example(FORK, "vowels.py")]
    kept = [line[1:] for line in change.splitlines() if line[:1] in " -" and line.strip(" -…")]
    assert any(all(file.count(f"{line}\n") == 1 for line in kept) for file in files)
