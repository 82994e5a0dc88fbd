"""Protects the pages: their numbers are those of results/, every command runs, links lead somewhere, and the forks work."""

import ast
import inspect
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import grpo
import rollout
import settings
import warm
from lab.claims.fork import example
from lab.pages import book, walk

ROOT = book.ROOT
README, FORK, FLAGS, QUESTIONS = ((ROOT / page).read_text() for page in ("README.md", "docs/fork.md", "docs/flags.md", "docs/questions.md"))
BOOK = {page: (ROOT / page).read_text() for page in book.PAGES}
PAGES = [
    *(ROOT / page for page in [*BOOK, "AGENTS.md", "learn/FAILURES.md"]),
    *(ROOT / "models").rglob("*.md"),
    *sorted((ROOT / "results").rglob("*.md")),
]
TINY = "--updates 1 --sft-steps 1 --sft-examples 2 --sft-batch 2 --num-tasks 2 --k 2 --eval-n 2 --max-tokens 32 --threads 1 --no-wandb"

# Every command of README.md and docs/, without its comment: the words that make it small, or why it is not run here.
COMMANDS = {
    "python pico.py": "minutes; tests/test_pico.py",
    "make train": "the next ones are what it does; CI makes a venv and runs `make test`",
    "make test": "this is it",
    "source .venv/bin/activate": "the Makefile has made it",
    **dict.fromkeys(("py -m venv .venv", r".venv\Scripts\activate", "pip install torch==2.13.0", "pip install -r requirements.txt"),
                    "Windows; not run"),
    "python train.py --env letters --difficulty 6": "make train",
    "python env_swarm.py": "",
    "python env_swarm.py --evaluate grinder --n 100": "",
    "python -m lab.swarm.governance_sweep": "five minutes; tests/test_governance.py",
    "python train.py --env alphabet": TINY,
    "python train.py --env swarm":  # 25 turns each
        TINY.replace("--num-tasks 2", "--num-tasks 1").replace("--eval-n 2", "--eval-n 1").replace("--max-tokens 32", "--max-tokens 8"),
    "python train.py --eval-only runs/NAME --env swarm --difficulty hard": "parsed: the run is one of letters",
    "python train.py --preset seed": TINY + " --no-eval-other-tiers",
    "python train.py --break stale-adapter": "tests/test_failures.py",
    "python train.py --env vowels.py:Vowels --sft-steps 100 --sft-lr 3e-4": TINY,
    "python train.py --env jsonl:learn/vowels.jsonl,held_out=learn/vowels_held_out.jsonl --sft-steps 70 --sft-lr 3e-4": TINY,
    "python train.py --env jsonl:learn/vowels.jsonl,scorer=exact --sft-steps 0": TINY.replace("--sft-steps 1 ", ""),
    "python train.py --env jsonl:train.jsonl,held_out=test.jsonl --model Qwen/Qwen3-0.6B": "needs GSM8K's files; tests/test_known.py",
    "python train.py --env lab/claims/lengths.py:Lengths --model models/pico_long --sft-steps 0 --max-tokens 448 --updates 250 "
    "--curriculum":
        "parsed: a quarter of an hour; tests/test_longer.py",
    "pip install -r requirements/tasks.txt": "make test-verifiers",
    "python -m bridges.gym": "make test-verifiers",
    "python -m bridges.gym letter_counting": "make test-verifiers",
    "python train.py --env reasoning_gym:letter_counting,min_words=2,max_words=5,expert=spells.py:spell --sft-steps 200 --sft-lr 1e-3":
        "make test-verifiers",
    "torchrun --standalone --nproc-per-node 2 train.py --env letters": "tests/test_parallel.py",
    "OPENAI_API_KEY=… python train.py --eval-only --api-base https://HOST/v1 --model NAME --env letters":
        "parsed: needs a host; tests/test_api.py",
    "python -m bookkeeping.compare runs/NAME-letters-6-… runs/my-run": "the next one is the same",
    "python -m bookkeeping.compare runs/A runs/B": "",
    "python -m bookkeeping.doctor runs/NAME": "",
    "python -m bookkeeping.doctor trainer_state.json": "needs a log: tests/test_foreign.py",
    'pip install ".[doctor]"': "make test-verifiers",
    "picoswarm-doctor FILE_OR_FOLDER --json": "the one before installs it; tests/test_foreign.py",
    "python -m bridges.export merge runs/NAME out/": "",
    "python -m bridges.export adapter runs/NAME adapter/": "",
    "python -m bridges.export merge runs/NAME pushed/ --push owner/name": "needs the hub; tests/test_export.py",
    "python -m lab.claims.ablate thinking --seeds 3": "a quarter of an hour; tests/test_ablate.py",
    "python -m lab.speed.bench_peers update": "needs requirements/peers.txt",
    "python -m lab.speed.bench train": "minutes",
    "python -m lab.speed.limits": "minutes; tests/test_limits.py",
    "python -m lab.speed.scale tokens": "minutes; tests/test_scale.py",
    "python -m lab.speed.card": "needs a card; tests/test_card.py",
    "cp lab/speedrun/entries/reference.py lab/speedrun/entries/mine.py": "the next one needs it",
    "python -m lab.speedrun.judge run lab/speedrun/entries/mine.py": "minutes; tests/test_speedrun.py",
    "python -m learn.exercises": "exit 1: tests/test_exercises.py",
    "pip install -e . && pip install verifiers==0.4.0": "make test-verifiers",
    "vf-eval picoswarm --env.taskset.environment.type swarm -n 8 -r 2 -m MODEL --client.base-url http://127.0.0.1:8000/v1 --no-push":
        "make test-verifiers",
    "uv pip install -e PICOSWARM": "needs prime-rl",
    "uv run --no-sync rl @ PICOSWARM/bridges/configs/prime_rl_swarm.toml": "needs prime-rl and a GPU; tests/verifiers reads the config",
    "make test-verifiers": "CI",
    "pip install -r requirements/verifiers.txt": "make test-verifiers",
    "python train.py --env swarm --updates 0":
        TINY.replace("--updates 1 ", "").replace("--num-tasks 2", "--num-tasks 1").replace("--eval-n 2", "--eval-n 1")
        .replace("--max-tokens 32", "--max-tokens 8"),
    "accelerate launch --num_processes 4 -m bridges.trl --env swarm --model out/ -- --use_vllm true":
        "needs TRL; tests/verifiers/test_trl.py",
    "vllm serve out/ --enable-lora --max-lora-rank 32 --lora-modules trained=runs/trl-swarm": "needs vLLM's server; not run",
    "python train.py --eval-only --api-base http://127.0.0.1:8000/v1 --model trained --env swarm":
        "parsed: needs a server; tests/test_api.py",
    "pip install -r requirements/openenv.txt": "make test-openenv",
    "python -m bridges.openenv_swarm --port 8000 --difficulty medium": "a server; make test-openenv",
    "make test-openenv": "CI",
    "uv run train.py --env letters --difficulty 6": "make test-entrance",
    "uv sync --no-group cpu --group gpu": "needs a card; tests/test_uv.py reads the lock",
    "uv run --no-sync train.py --env letters": "make test-entrance",
}  # fmt: skip


TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
FOLDERS = {file.split("/")[0] for file in TRACKED if "/" in file and file[0] != "."}


def commands() -> list[str]:
    blocks = [block for text in BOOK.values() for block in re.findall(r"^```\n(.*?)^```\n", without_code(text), re.S | re.M)]
    lines = [re.split(r"\s{2,}#", line)[0].strip() for block in blocks if "──" not in block for line in block.splitlines()]
    return [line for line in dict.fromkeys(lines) if line]


def without_code(text: str) -> str:
    return re.sub(r"^```(python|diff)\n.*?^```\n", "", text, flags=re.S | re.M)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A run of letters that took seconds."""
    runs = tmp_path_factory.mktemp("runs")
    done = call(
        [sys.executable, "train.py", *TINY.split(), "--difficulty", "2", "--no-eval-other-tiers", "--runs", str(runs), "--name", "run"],
        pictures=True,
    )
    assert done.returncode == 0, done.stderr[-500:]
    return runs / "run"


def call(words: list[str], cwd: Path = ROOT, pictures: bool = False):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if words[0] == sys.executable:
        return warm.run(words[1:], cwd, env, pictures=pictures)
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=env, timeout=300)


def test_every_command_is_known_here_and_there():
    assert set(commands()) == COMMANDS.keys()


@pytest.mark.parametrize("command", [c for c in commands() if COMMANDS.get(c, "")[:9] in ("", TINY[:9])])
def test_a_command_of_the_pages_runs(command, finished, tmp_path):
    (tmp_path / "vowels.py").write_text(example())
    places = {"runs/NAME": finished, "out/": tmp_path / "out", "adapter/": tmp_path / "adapter"}
    places["vowels.py:Vowels"] = f"{tmp_path}/vowels.py:Vowels"
    for name, run in (("runs/A", "grpo-0"), ("runs/B", "no_think-0")):
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
    cfg, _ = settings.command_line(words[words.index("train.py") + 1 :])
    settings.check(cfg)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_inline_commands_and_paths_name_files_that_are_there(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for command in re.findall(r"`python ([^`]*)`", text):
        words = command.split()
        file = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
        assert words[0] == "FILE" or file in ("room/file.py", "pytest.py") or (ROOT / file).exists(), command
    for path in re.findall(r"`((?:\w+/)+[\w.-]*)`", text):
        assert path.split("/")[0] not in FOLDERS or (ROOT / path).exists() or (page.parent / path).exists(), path


def test_python_is_called_in_one_way():
    """After `source .venv/bin/activate`, which the README says once."""
    assert sum(text.count(".venv/bin") for text in BOOK.values()) == 1 == README.count("source .venv/bin/activate")


def test_the_flags_are_those_of_the_command_line():
    """Of --swarm-payoff, `-reputation` the second is --swarm-reputation."""
    known = {name.rstrip("_") for name in settings.Config.__dataclass_fields__}
    for row in re.findall(r"^\| (`-.*?) \| ", FLAGS, re.M):
        prefix = ""
        for words in re.findall(r"`(.*?)`", row):
            for flag in re.findall(r"(?:^| )-(-?[a-z][\w-]*)", words):
                name = flag.lstrip("-") if flag.startswith("-") else f"{prefix}-{flag}"
                prefix = prefix or name.split("-")[0]
                assert re.sub("^no-", "", name).replace("-", "_") in known, name
    assert FLAGS.count("| `--") > 25


# ------------------------------------------------------------------------------------------------ chapters

CHAPTERS = sorted(file.name for file in ROOT.glob("*.py"))
ROOMS = ("swarm", "fast", "bookkeeping", "bridges", "learn")
FILES = [f"{room}/{file.name}" for room in ROOMS for file in sorted((ROOT / room).glob("*.py"))]
# Those that do not show themselves, and why.
OTHERWISE = {
    "pico.py": "minutes; tests/test_pico.py",
    "train.py": "make train",
    "fast/vllm_engine.py": "make test-vllm",
    "bookkeeping/compare.py": "needs runs",
    "bookkeeping/report.py": "needs a run",
    "bookkeeping/viewer.py": "needs a run",
    "bridges/serve.py": "a server; tests/test_api.py",
    "bridges/trl.py": "needs requirements/verifiers.txt; make test-verifiers",
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


def test_every_chapter_has_something_to_show():
    assert all(shows_itself(file) or file in OTHERWISE for file in CHAPTERS)
    assert all((ROOT / file).exists() for file in OTHERWISE)


def test_the_book_is_a_handful_and_its_cover_is_short():
    lines = README.splitlines()
    assert len(CHAPTERS) <= 12 and len(lines) <= 160
    assert not [line for line in lines if len(line) > 100 and line[0] not in "|!["]
    assert not [page for page, text in BOOK.items() if "<!--" in text]
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 40


def test_the_story_is_short_enough_for_an_afternoon():
    """The limits of the house: a longer story wants a helper elsewhere, or fewer words."""
    length = lambda name: len((ROOT / f"{name}.py").read_text().splitlines())
    assert sum(map(length, ("env_letters", "rollout", "sft", "grpo", "train"))) <= 1000
    assert length("train") <= 110


def test_the_reading_order_has_every_chapter_and_every_folder_and_nothing_else():
    section = README.split("## Reading order")[1].split("\n## ")[0]
    rows = [line.split("|")[1].strip(" *`") for line in section.splitlines() if line.startswith("| ")]
    assert sorted(row for row in rows if row.endswith(".py")) == CHAPTERS
    assert {row for row in rows if row.endswith("/")} == {f"{folder}/" for folder in FOLDERS}


def test_the_map_has_every_file_of_every_room_and_every_chapter_of_the_docs():
    page = (ROOT / "docs" / "README.md").read_text()
    for room in ROOMS:
        named = re.findall(r"^\| `([^`]*)` \|", page.split(f"| `{room}/` |")[1].split("\n\n")[0], re.M)
        there = {p.name + "/" * p.is_dir() for p in (ROOT / room).iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
        assert set(named) == there - {"__init__.py"}, room
    lab = {f"lab/{p.parent.name}/" for p in (ROOT / "lab").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(lab/\w+/)` \|", page, re.M)) == lab
    assert set(re.findall(r"\]\(([a-z]+\.md)\)", page)) == {p.name for p in (ROOT / "docs").glob("[a-z]*.md")}


# ------------------------------------------------------------------------------------------------ five questions


def test_the_five_answers_stand_where_docs_questions_says():
    rows = re.findall(r"^\| .*\? \| `(\w+\.py)` \| `(\w+)` \|$", QUESTIONS, re.M)
    assert len(rows) == 5
    for file, function in rows:
        tree = ast.parse((ROOT / file).read_text())
        assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], (file, function)


def test_a_loss_is_a_name_in_clip_and_a_branch_of_policy_loss(monkeypatch):
    monkeypatch.setitem(grpo.CLIP, "mine", (0.2, 0.2))
    settings.check(settings.Config(env="letters", loss="mine"))
    assert 'if loss == "reinforce"' in inspect.getsource(grpo.policy_loss)


def test_take_turn_appends_what_was_sampled_and_mismatch_says_so():
    source = inspect.getsource(rollout.take_turn)
    assert "episode.token_ids += sample.token_ids" in source and "encode(" not in source
    lines = book.read("letters/grpo-0/metrics.jsonl")
    mismatch = [line["mismatch"] for line in lines if "mismatch" in line]  # an update without signal computes none
    assert len(mismatch) > 100 and max(mismatch) < 5e-6  # nats: the README says "about a millionth"
    assert math.isclose(sum(mismatch) / len(mismatch), 1e-6, rel_tol=0.9)


# ------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("page", BOOK)
def test_the_tables_are_made_from_results(page):
    assert book.remake(page, BOOK[page]) == BOOK[page]


@pytest.mark.parametrize("page", BOOK)
def test_every_number_of_the_prose_stands_in_a_file_that_it_quotes(page):
    assert book.wrong(page, BOOK[page]) == []


def test_the_plan_is_about_pages_that_are_there_and_makes_every_table_once():
    assert book.PLAN.keys() <= BOOK.keys()
    used = [name for page in book.PLAN.values() for rule in page.values() for name in rule.get("tables", ())]
    assert sorted(used) == sorted(book.TABLES)


CHANGES = [
    ("README.md", "79.9% [76.3, 83.5]", "79.9% [76.3, 83.6]"),
    ("README.md", "**96.8%", "**98.2%"),
    ("README.md", "0.883", "0.884"),
    ("docs/letters.md", "[+13.1, +20.7]", "[+13.1, +20.8]"),
    ("docs/speed.md", "1.26 times", "1.27 times"),
    ("docs/swarm.md", "1.089 [1.064, 1.114]", "1.088 [1.064, 1.114]"),
]


@pytest.mark.parametrize("page, was, now", CHANGES)
def test_a_changed_number_is_noticed(page, was, now):
    assert was in BOOK[page]
    changed = BOOK[page].replace(was, now)
    assert book.remake(page, changed) != changed or book.wrong(page, changed)


def test_a_number_without_a_source_is_noticed(monkeypatch):
    wrong = lambda text: book.wrong("new.md", "# New\n\n" + text)
    assert len(wrong("It gained 3.2 points [1.1, 5.3].")) == 1
    assert len(wrong("It gained 3.2 points.")) == 1
    assert wrong("It took 3 minutes with torch==2.13.0 and `0.5`.") == []
    for rule, said in (({"from": ["results/nothing.md"]}, 2), ({"free": ["3.2"]}, 0), ({"form": []}, 2)):
        monkeypatch.setitem(book.PLAN, "new.md", {"New": rule})
        assert len(wrong("It gained 3.2 points.")) == said
    monkeypatch.setitem(book.PLAN, "new.md", {"Old": {}})
    assert "has not: Old" in wrong("")[0]


# ------------------------------------------------------------------------------------------------ how it renders


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_are_there_and_tables_are_whole(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for alt, link in re.findall(r"!?\[([^\]]*)\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        file, _, title = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not title or title in anchors(target.read_text()), link
        assert alt or "![](" not in text, link
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block[:200]


def anchors(text: str) -> set[str]:
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)", text, re.M)}


# ------------------------------------------------------------------------------------------------ fork it


def test_the_environment_of_the_fork_page_is_short_and_takes_any_reply(tmp_path):
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
    for env, words in (("nowhere.py:X", "there is no file nowhere.py"), (f"{tmp_path}/bad.py:Half", "TypeError"),
                       (f"{tmp_path}/half.py:Half", "tools"), (f"{tmp_path}/half.py:Whole", "Whole"),
                       ("env_letters.py:Letters", "missing 4 required"), ("yours", "no such environment"),
                       ("chess", "FILE.py:CLASS")):  # fmt: skip
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
        assert done.returncode == 1 and "somebody's code" in done.stderr and done.stderr.count("\n") == 1
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
    added = [line for block in re.findall(r"```diff\n(.*?)```", FORK, re.S) for line in re.findall(r"^\+ *(.*)", block, re.M)]
    assert not changes or any(line in text for line in added)
    assert f"touched: `{file}`" in (ROOT / "results" / "walk.md").read_text() and flags
