"""Protects the README: its numbers are those of results/, every command in it runs, its links and pictures are there, and the environment in it learns."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
import warm

import settings
import train
from lab.pages import book, walk

ROOT = book.ROOT
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "learn/FAILURES.md", *sorted((ROOT / "results").rglob("*.md"))]
TINY = "--updates 1 --sft-steps 1 --sft-examples 2 --sft-batch 2 --num-tasks 2 --k 2 --eval-n 2 --max-tokens 32 --threads 1 --no-wandb"

# Every command of the README, without its comment: the words that make it small, or why it is not run here. {run}: a tiny finished run; {tmp}: a folder.
NAMED, HOST = ("runs/NAME", "{run}"), "needs a host"
COMMANDS = {
    "make train": "the next ones are what it does; CI makes a venv and runs `make test`",
    "make test": "this is it",
    ".venv/bin/python train.py --env alphabet": TINY,
    ".venv/bin/python env_swarm.py": "",
    ".venv/bin/python env_swarm.py --evaluate grinder --n 100": "",
    ".venv/bin/python train.py --env swarm": TINY.replace("--num-tasks 2", "--num-tasks 1").replace("--eval-n 2", "--eval-n 1"),  # 25 turns each
    ".venv/bin/python train.py --eval-only runs/NAME --env swarm --difficulty hard": "parsed: the run is one of letters",
    ".venv/bin/python env_swarm.py --governance-sweep": "an hour; tests/test_governance.py",
    ".venv/bin/python train.py --preset seed": TINY,
    ".venv/bin/torchrun --standalone --nproc-per-node 2 train.py --env letters": "tests/test_parallel.py",
    ".venv/bin/python policy.py merge runs/NAME out/": "",
    ".venv/bin/python policy.py adapter runs/NAME out/": "",
    ".venv/bin/python policy.py merge runs/NAME out/ --push owner/name": "needs the hub; tests/test_export.py",
    "pip install -e . && pip install verifiers==0.4.0": "make test-verifiers",
    "vf-eval picoswarm-swarm -n 8 -r 2 -m MODEL --client.base-url http://127.0.0.1:8000/v1 --no-push": "make test-verifiers",
    "uv run rl @ bridges/configs/prime_rl_swarm.toml": "needs prime-rl and a GPU; tests/verifiers reads the config",
    "make test-verifiers": "CI",
    "OPENAI_API_KEY=… .venv/bin/python train.py --eval-only --api-base https://HOST/v1 --model NAME --env letters": "parsed: needs a host; tests/test_api.py",
    ".venv/bin/python -m bookkeeping.report compare runs/NAME-letters-6-… runs/my-run": "the next one is the same",
    "python bookkeeping/report.py compare runs/A runs/B …": "",
    "python -m lab.claims.ablate thinking --seeds 3": "a quarter of an hour; tests/test_ablate.py",
    ".venv/bin/python train.py --break stale-adapter": "tests/test_failures.py",
    ".venv/bin/python -m bookkeeping.doctor runs/NAME": "",
    ".venv/bin/python train.py --env vowels.py:Vowels --sft-steps 200 --sft-lr 1e-3": TINY,
    ".venv/bin/python -m learn.exercises": "exit 1: tests/test_exercises.py",
}  # fmt: skip


def commands() -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```", re.sub(r"^```python\n.*?^```", "", README, flags=re.S | re.M), re.S | re.M)
    lines = [re.split(r"\s{2,}#", line)[0].strip() for block in blocks if "──" not in block for line in block.splitlines()]
    return [line for line in dict.fromkeys(lines) if line]


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A run of letters that took seconds."""
    runs = tmp_path_factory.mktemp("runs")
    done = call([sys.executable, "train.py", *TINY.split(), "--difficulty", "2", "--runs", str(runs), "--name", "run"])
    assert done.returncode == 0, done.stderr[-500:]
    return runs / "run"


def call(words: list[str], cwd: Path = ROOT):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if words[0] == sys.executable:
        return warm.run(words[1:], cwd, env)
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=env, timeout=300)


def test_every_command_is_known_here():
    assert set(commands()) <= COMMANDS.keys()


@pytest.mark.parametrize("command", [c for c in commands() if COMMANDS.get(c, "")[:9] in ("", TINY[:9])])
def test_a_command_of_the_readme_runs(command, finished, tmp_path):
    (tmp_path / "vowels.py").write_text(example())
    places = {"runs/NAME": finished, "out/": tmp_path / "out", "vowels.py:Vowels": f"{tmp_path}/vowels.py:Vowels"}
    for name, run in (("runs/A", "grpo-0"), ("runs/B", "no_think-0"), ("…", "more_sft-0")):
        places[name] = shutil.copytree(ROOT / "results" / "letters" / run, tmp_path / run) if name in command else ""
    words = [str(places.get(word, word)) for word in shlex.split(command)]
    words[0] = sys.executable
    if "train.py" in words:
        words += [*COMMANDS[command].split(), "--runs", str(tmp_path)]
    done = call(words)
    assert done.returncode == 0, f"{done.stdout[-300:]}\n{done.stderr[-800:]}"


@pytest.mark.parametrize("command", [c for c in commands() if COMMANDS.get(c, "").startswith("parsed")])
def test_a_command_that_cannot_run_here_is_at_least_understood(command):
    words = shlex.split(command)
    cfg = tyro.cli(settings.Config, args=train.arguments(words[words.index("train.py") + 1 :]))
    settings.check(cfg)


def test_inline_commands_name_files_that_are_there():
    for command in re.findall(r"`(?:\.venv/bin/)?python ([^`\n]*)`", README):
        words = command.split()
        file = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
        assert file == "FILE" or (ROOT / file).exists(), command


# ------------------------------------------------------------------------------------------------ chapters

CHAPTERS = sorted(file.name for file in ROOT.glob("*.py"))
LAB = sorted(file.name for file in (ROOT / "lab").glob("*.py") if file.name != "__init__.py")
OTHERWISE = {"train.py": "make train", "bookkeeping/compare.py": "needs runs", "learn/exercises.py": "exits with 1, being unsolved", "fast/vllm_engine.py": "make test-vllm", "bookkeeping/report.py": "needs a run",
             "bookkeeping/viewer.py": "needs a run"}  # fmt: skip


@pytest.mark.parametrize("chapter", [name for name in CHAPTERS if name not in OTHERWISE])
def test_every_chapter_shows_itself(chapter, tmp_path):
    """Each has asserts of its own beside what it prints."""
    done = call([sys.executable, chapter])
    assert done.returncode == 0, done.stderr[-800:]
    assert len(done.stdout) > 150


def test_the_reading_order_has_every_chapter_and_nothing_else():
    section = README.split("## Reading order")[1].split("\n## ")[0]
    for table, files in zip(section.split("### The lab"), (CHAPTERS, LAB)):
        rows = [re.findall(r"`(\w+\.py)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| ")]
        assert sorted(name for row in rows for name in row) == files


# ------------------------------------------------------------------------------------------------ numbers


def test_the_tables_are_made_from_results():
    assert book.made(README) == README


def test_every_number_of_the_prose_stands_in_the_file_that_it_quotes():
    assert book.wrong(README) == []


@pytest.mark.parametrize("was, now", [("[+25.4, +37.1]", "[+25.4, +37.2]"), ("**97.7%", "**98.7%"), ("4.5 minutes", "4.6 minutes")])
def test_a_changed_number_is_noticed(was, now):
    assert was in README
    changed = README.replace(was, now)
    assert book.made(changed) != changed or book.wrong(changed)


def test_a_number_without_a_source_is_noticed():
    assert len(book.wrong("It gained 3.2 points [1.1, 5.3].")) == 1
    assert len(book.wrong("It gained 3.2 points.")) == 1
    assert len(book.wrong("<!-- from: results/nothing.md -->\nIt gained 3.2.")) == 2
    assert book.wrong("It took 3 minutes with torch==2.13.0 and `0.5`.") == []


# ------------------------------------------------------------------------------------------------ how it renders


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_are_there_and_tables_are_whole(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    titles = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)", text, re.M)}
    for alt, link in re.findall(r"!?\[([^\]]*)\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        file, _, title = link.partition("#")
        assert not file or (page.parent / file).exists(), link
        assert file or not title or title in titles, link
        assert alt or "![](" not in text, link
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block[:200]


# ------------------------------------------------------------------------------------------------ fork it


def example() -> str:
    return re.search(r"```python\n(# vowels.py\n.*?)```", README, re.S)[1]


def test_the_environment_in_the_readme_is_short_and_takes_any_reply(tmp_path):
    (tmp_path / "vowels.py").write_text(example())
    assert len([line for line in example().splitlines() if line.strip()]) <= 30
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
    for env, words in (("nowhere.py:X", "there is no file nowhere.py"), (f"{tmp_path}/bad.py:Half", "TypeError"), (f"{tmp_path}/half.py:Half", "tools"),
                       (f"{tmp_path}/half.py:Whole", "Whole"), ("env_letters.py:Letters", "missing 4 required"), ("yours", "no such environment"), ("chess", "FILE.py:CLASS")):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(words)) as told:
            settings.check(settings.Config(env=env))
        assert "\n" not in str(told.value)


def test_a_run_folder_cannot_bring_its_own_code(tmp_path, finished):
    """--resume and --eval-only of a folder from anywhere must not run the file that its config names."""
    folder = tmp_path / "run"
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + example())
    config = json.loads((finished / "config.json").read_text()) | {"env": f"{tmp_path}/evil.py:Vowels"}
    subprocess.run(["cp", "-r", finished, folder], check=True)
    (folder / "config.json").write_text(json.dumps(config))
    for flag in ("--resume", "--eval-only"):
        done = call([sys.executable, "train.py", flag, str(folder)])
        assert done.returncode == 1 and "code of somebody's" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("what", walk.FORKS)
def test_each_fork_is_a_change_of_one_file_that_can_still_be_made(what, tmp_path):
    """lab/pages/walk.py makes and runs them; here only whether the text that they change is there, once, and is valid Python afterwards."""
    file, changes, flags = walk.FORKS[what]
    text = (ROOT / file).read_text() if changes else example()
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    compile(text, file, "exec")
    assert f"touched: `{file}`" in (ROOT / "results" / "walk.md").read_text() and flags
