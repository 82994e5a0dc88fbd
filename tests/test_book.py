"""Protects the pages: links lead somewhere, commands can be given, each file shows itself, and the
changes of docs/fork.md can be made and work."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from dataclasses import replace

import pytest
import torch

import settings
from lab import site
from rollout import Episode
from steps import FLAGS
from warm import ROOT, run

LISTED = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
PAGES = [n for n in LISTED if n.endswith(".md") and n[:6] != "tests/" and (ROOT / n).exists()]
TEXT = {name: (ROOT / name).read_text(encoding="utf8") for name in PAGES}
FOLDERS = {file.split("/")[0] for file in LISTED if "/" in file and file[0] != "."}
OLD = re.compile(
    r"^## Older evidence\n.*?(?=^## )", re.S | re.M
)  # of trust.md: what is gone, and where
# What else is read: code, its comments, settings. (results/*.json name the commands of their commits.)
KINDS = (".py", ".toml", ".txt", ".js", ".html", ".jinja", ".ipynb", "Makefile", ".ci/run")
SOURCES = [n for n in LISTED if n.endswith(KINDS) and n[:6] != "tests/" and "/data/" not in n]
CHANGES = re.findall(r"```diff\n(.*?)```", TEXT["docs/fork.md"], re.S)


# ------------------------------------------------------------------------------- commands and links
def commands() -> list[str]:
    """Of README.md and docs/: the lines of their plain code blocks that call Python."""
    found = []
    for page in (name for name in PAGES if name == "README.md" or name.startswith("docs/")):
        text = re.sub(r"^```(python|diff)\n.*?^```\n", "", TEXT[page], flags=re.S | re.M)
        for block in re.findall(r"^```\n(.*?)^```\n", text, re.S | re.M):
            found += [re.split(r"\s{2,}#", line)[0].strip() for line in block.splitlines()]
    return [line for line in dict.fromkeys(found) if re.search(r"\b(python|torchrun)\b", line)]


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_pages_can_be_given(command):
    """Its file or module is there, and train.py knows its flags."""
    words = shlex.split(command.replace("$seed", "0"))
    if "train.py" in words:
        settings.command_line(words[words.index("train.py") + 1 :])
    elif "-m" in words:
        place = words[words.index("-m") + 1].replace(".", "/")
        ours = place.split("/")[0] in FOLDERS
        assert not ours or (ROOT / place).is_dir() or (ROOT / f"{place}.py").exists()


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there_and_its_tables_are_whole(page):
    text, folder = re.sub(r"```.*?```", "", TEXT[page], flags=re.S), (ROOT / page).parent
    for words in map(str.split, re.findall(r"`python\s([^`]*)`", OLD.sub("", text))):
        file = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
        assert file in ("FILE", "room/file.py", "pytest.py") or (ROOT / file).exists(), words
    for alt, link in re.findall(r"!?\[([^\]]*)\]\((?!http)([^)\s]+)\)", text):
        file, _, title = link.partition("#")
        target = folder / file if file else ROOT / page
        assert target.exists() and alt, link
        assert not title or title in anchors(target.read_text(encoding="utf8")), link
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}) == 1, block


@pytest.mark.parametrize("file", [*PAGES, *(n for n in SOURCES if (ROOT / n).exists())])
def test_no_sentence_names_a_folder_or_a_command_that_is_gone(file):
    """But in the one section that says what is in which old commit, and placeholders in capitals."""
    text = OLD.sub("", (ROOT / file).read_text(encoding="utf8"))
    if file.endswith(".ipynb"):
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    text = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S)
    there = lambda place: any((up / place).exists() for up in (ROOT, (ROOT / file).parent))
    rooms = "|".join(sorted(FOLDERS - {"docs", "tests", "results", "models", "requirements"}))
    commands = re.findall(rf"-m ((?:{rooms})(?:\.\w+)+)", text)
    for name in commands + re.findall(r"`((?:lab|bridges|bookkeeping|learn)\.\w+)", text):
        place = name.replace(".", "/")
        assert there(f"{place}.py") or there(place), f"{file}: {name}"
    folders = "|".join(sorted(FOLDERS))
    for place in re.findall(rf"(?<![\w./-])((?:{folders})/[\w./-]*+)(?![*{{<…])", text):
        made = re.match("docs/first_run.md|models/smollm2", place)  # by lab/site.py, make smollm2
        made = made or re.search("[A-Z]{4}", place)
        assert made or there(place.rstrip(".")), f"{file}: {place}"


def anchors(text: str) -> set[str]:
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)", text, re.M)
    }


def navigation() -> list[str]:
    """The pages of the docs site, in its order."""
    config = tomllib.loads((ROOT / "docs/zensical.toml").read_text(encoding="utf8"))
    return [page for entry in config["project"]["nav"] for page in entry.values()]


def test_every_page_and_every_chapter_is_in_the_navigation():
    """In the order of docs/README.md's table and of README's part "Read it"."""
    docs = re.findall(r"(?m)^\| \[.+?\]\((.+?)\) \|", TEXT["docs/README.md"])
    read = TEXT["README.md"].partition("## Read it")[2].partition("\n## ")[0]
    book = re.findall(r"`(\w+\.py)`", read)
    assert len(book) == 14
    pages = [site.page_of(os.path.normpath(f"docs/{link}")) for link in docs]
    assert navigation() == ["README.md", *pages, *map(site.page_of, book), "docs/README.md"]


def test_the_flags_and_settings_of_the_flags_page_are_those_of_the_command_line():
    text, known = TEXT["docs/flags.md"], vars(settings.Config())
    flags = {flag.replace("-", "_") for flag in re.findall(r"`--(?:no-)?([a-z][\w-]*)", text)}
    assert len(flags) > 25 and flags <= {name.rstrip("_") for name in known}
    for env in ("alphabet", "swarm"):
        row = re.search(rf"^\| {env} \| ([^\[\n]*)", text, re.M)[1]
        assert set(re.findall(r"`(\w+)", row)) == set(settings.settable(env))


def test_the_answers_of_the_fork_page_stand_where_it_says():
    rows = re.findall(r"^\| .*\? \| `(\w+\.py)` \| `(\w+)` \|$", TEXT["docs/fork.md"], re.M)
    named = lambda file, name: re.search(
        rf"^(def )?{name}( = |\()", (ROOT / file).read_text(), re.M
    )
    assert len(rows) == 5 and all(named(*row) for row in rows)


# ------------------------------------------------------------------------------- chapters
ROOMS = r"((swarm|fast|bookkeeping|bridges|learn)/)?\w+\.py"  # and the chapters
# Those that do not show themselves, and why.
OTHERWISE = {
    "pico.py": "minutes; tests/test_pico.py",
    "train.py": "make train",
    "bookkeeping/compare.py": "needs runs",
    "bookkeeping/report.py": "needs a run",
    "bridges/trl.py": "needs requirements/all.txt; make test-all",
    "bridges/smollm2.py": "downloads 93 MB; make smollm2",
    "bridges/openenv_swarm.py": "a server; tests/test_openenv.py",
    "learn/exercises.py": "exits with 1, being unsolved; tests/test_exercises.py",
}
FILES = {file for file in LISTED if re.fullmatch(ROOMS, file)} - OTHERWISE.keys()


@pytest.mark.parametrize("file", sorted(f for f in FILES if "__main__" in (ROOT / f).read_text()))
def test_every_file_shows_itself(file):
    """Each has asserts of its own in addition to what it prints."""
    done = run(["-m", file.removesuffix(".py").replace("/", ".")] if "/" in file else [file])
    assert done.returncode == 0, done.stderr[-800:]
    assert len(done.stdout) > (60 if "/" in file else 150)  # chapters show more


# ------------------------------------------------------------------------------- forks
@pytest.mark.parametrize("levels", [False, True])
def test_the_environment_of_the_fork_page_takes_any_reply_and_a_setting(tmp_path, levels):
    code = re.search(r"```python\n(# vowels.py\n.*?)```", TEXT["docs/fork.md"], re.S)[1]
    (tmp_path / "vowels.py").write_text(changed(CHANGES[1], code) if levels else code)
    cfg = settings.Config(env=f"{tmp_path}/vowels.py:Vowels", set=["longest=9"])
    env = settings.make_env(cfg, 9)
    for seed in range(50):
        env.reset(seed)
        assert len(env.word) <= 9
        env.step(env.expert_reply())
        assert env.score() == {"reward": 1.0, "exact": 1.0}
        for garbage in ("", "<answer>", "\x00" * 999, f"<answer>{'a' * 10**6}</answer>"):
            env.step(garbage)
            assert 0 <= env.score()["reward"] < 1 and env.score()["exact"] == 0


def changed(change: str, code: str) -> str:
    """The code after a change of the page; what it leaves and takes away stands there once."""
    for hunk in change.split(" …\n"):
        old = "\n" + "".join(row[1:] for row in hunk.splitlines(True) if row[0] in " -")
        new = "\n" + "".join(row[1:] for row in hunk.splitlines(True) if row[0] in " +")
        assert code.count(old) == 1, hunk
        code = code.replace(old, new)
    return code


def module(name: str, change: str):
    """A chapter after a change, as a module of its own."""
    made = types.ModuleType(f"changed_{name}")
    sys.modules[made.__name__] = made  # dataclasses look there
    exec(changed(change, (ROOT / f"{name}.py").read_text(encoding="utf8")), vars(made))
    return made


def test_half_is_paid_for_what_was_not_derived():
    env = module("env_letters", CHANGES[0]).Letters(3, "binary", True, "bare")
    env.reset(0)
    env.step(env.expert_reply())
    assert env.score()["reward"] == 0.5 and env.score()["exact"] == 1


@pytest.mark.parametrize("change", [c for c in CHANGES[2:] if "critic" not in c])
def test_a_loss_of_the_fork_page_trains(change, load):
    grpo, policy = module("grpo", change), load("qwen3", 4, awake=True)
    new = re.search(r'^\+    "(\w+)"', change, re.M)
    cfg = replace(FLAGS, loss=new[1] if new else "reinforce")
    sampled, n = [False, False, True, True], range(2)
    group = [Episode(0, 0, [5, 6, 7, 8 + i], sampled, [-7.0] * 4, turns=1, reward=i) for i in n]
    frozen = torch.optim.SGD(policy.trainable().values(), lr=0.0)
    grpo.compute_advantages([group], cfg)
    assert grpo.update(policy, frozen, group, cfg).grad_norm > 0


def test_the_critic_of_the_fork_page_learns_beside_the_policy(load):
    [change] = [c for c in CHANGES if "critic" in c]
    loop, policy = module("learn/loop", change), load("qwen3", 4, awake=True)
    critic = torch.nn.Linear(policy.lm.config.hidden_size, 1)
    for weight in critic.parameters():
        torch.nn.init.zeros_(weight)
    optimizer = torch.optim.SGD([*policy.trainable().values(), *critic.parameters()], lr=0.5)
    sampled = [False, False, True, True]
    group = [Episode(0, 0, [5, 6, 7, 8], sampled, [-7.0] * 4, turns=1, reward=1.0)] * 2
    # No reward is expected yet, so all tokens have an advantage.
    assert loop.learn(policy, optimizer, group, critic) > 0
    # Four tokens, each off by 1, so the mean of 2 · (0 - 1): its bias goes up by 0.5 · 2.
    assert critic.bias.item() == pytest.approx(1.0)


@pytest.mark.parametrize("change", [c for c in CHANGES if " LOSSES = {" in c])
def test_the_demo_shows_a_loss_of_the_fork_page_beside_the_others(change, capsys):
    exec(changed(change, (ROOT / "grpo.py").read_text(encoding="utf8")), {"__name__": "__main__"})
    new = re.search(r'^\+    "(\w+)"', change, re.M)[1]
    shown = re.findall(r"^(\w+) +(?:none|[\d. ]+) +[+-]", capsys.readouterr().out, re.M)
    assert shown.count(new) == shown.count("grpo") == 2
