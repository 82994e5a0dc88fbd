"""Protects what the command line means: a flag that was typed counts as typed in every spelling and with every value, its default included;
and each task, learning rate and refusal is the one that is written.
"""

import json
from dataclasses import asdict, fields

import pytest

import settings
from bookkeeping.folder import resume_folder
from evaluate import take_typed
from settings import Config

FLAGS = {f.name: f.default for f in fields(Config)}


def spelled(name: str) -> list[list[str]]:
    """Every way to type a flag with its default value (1, if that is None)."""
    name, value = name.rstrip("_"), FLAGS[name]
    names = sorted({name, name.replace("_", "-")})
    if isinstance(value, bool):
        return [[f"--{n}"] for n in names] + [[f"--no-{n}"] for n in names] + [[f"--no_{n}"] for n in names]
    text = "1" if value is None else str(value)
    return [[f"--{n}", text] for n in names] + [[f"--{n}={text}"] for n in names]


@pytest.mark.parametrize("name", list(FLAGS))
def test_a_flag_is_typed_in_every_spelling_and_with_its_default_as_well(monkeypatch, name):
    monkeypatch.setattr(settings.tyro, "cli", lambda config, args, default=None: Config())  # the next test asks tyro
    for words in spelled(name):
        assert settings.command_line(words)[1] == {name}, words
        assert settings.command_line(["--env", "letters", *words, "--no-wandb"])[1] == {"env", "wandb", name}, words


def test_tyro_takes_every_spelling():
    for i in range(6):
        words = [word for name in FLAGS for word in spelled(name)[i % len(spelled(name))]]
        cfg, typed = settings.command_line(words)
        assert (
            typed == set(FLAGS) and cfg.k == 8 and cfg.until_converged == ("--no" not in " ".join(w for w in words if "converged" in w))
        ), words


@pytest.mark.parametrize("words, typed", [
    (["--name", "seed"], {"name"}),  # a value that is called like a flag
    (["--preset", "seed"], {"preset"}),
    (["--runs=k"], {"runs"}),
    (["--name", "no_think"], {"name"}),
    ([], set()),
])  # fmt: skip
def test_a_value_is_no_flag(words, typed):
    assert settings.command_line(words)[1] == typed


def saved(folder, **flags) -> Config:
    cfg = Config(**flags)
    settings.check(cfg)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(asdict(cfg)))
    return cfg


def test_eval_only_judges_a_run_of_partial_credit_by_the_default_reward_if_that_is_typed(tmp_path):
    for words, reward in ((["--reward", "binary"], "binary"), (["--reward=binary"], "binary"), ([], "partial")):
        given, typed = settings.command_line(["--eval-only", str(tmp_path), *words])
        cfg = saved(tmp_path, reward="partial")
        take_typed(cfg, given, typed)
        assert cfg.reward == reward and settings.make_env(cfg, 6).reward == reward
    given, typed = settings.command_line(["--eval-only", str(tmp_path), "--lora-rank", "32"])
    with pytest.raises(SystemExit, match="--lora-rank: this run has 8"):
        take_typed(saved(tmp_path, lora_rank=8), given, typed)


@pytest.mark.parametrize("words, after", [
    (["--no-until-converged"], {"until_converged": False}),
    (["--no_until_converged"], {"until_converged": False}),
    (["--max-updates", "400"], {"max_updates": 400}),
    (["--threads=0", "--engine", "auto"], {"threads": 0, "engine": "auto"}),
    ([], {"until_converged": True, "max_updates": 500, "threads": 2, "engine": "torch"}),
])  # fmt: skip
def test_resume_takes_a_flag_that_is_typed_with_its_default(tmp_path, words, after):
    saved(tmp_path, until_converged=True, max_updates=500, threads=2, engine="torch")
    cfg, typed = settings.command_line(["--resume", str(tmp_path), *words])
    *_, lock = resume_folder(cfg, typed)
    lock.release()
    assert {name: getattr(cfg, name) for name in after} == after


@pytest.mark.parametrize("words", [["--loss", "grpo"], ["--k=8"], ["--think"], ["--swarm_version", "0.2"], ["--break", ""]])
def test_resume_refuses_another_experiment_that_is_typed_as_the_default(tmp_path, words):
    saved(tmp_path, loss="gspo", k=4, think=False, swarm_version="0.1", break_="no-baseline")
    cfg, typed = settings.command_line(["--resume", str(tmp_path), *words])
    with pytest.raises(SystemExit, match="cannot change on --resume"):
        resume_folder(cfg, typed)
