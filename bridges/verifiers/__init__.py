"""picoswarm as pip installs it: a command that trains, and the environments for other programs.

    picoswarm                         trains: letters, with the model that comes along, in ./runs
    picoswarm train --help            every flag of a run
    picoswarm pico                    the same story in one file
    picoswarm doctor LOG              what is wrong with a run, of ours or of another framework?
    picoswarm compare runs/A runs/B   which is better? (also: report RUN, export)
    picoswarm env_letters             shows an environment (also: env_alphabet, env_swarm)

Where a message says `python train.py` or `python -m ROOM.FILE`, type `picoswarm train` or
`picoswarm ROOM.FILE`.

In Python, `picoswarm.make_env({"type": "swarm"})` is an environment: reset, step, score. For
verifiers, picoswarm is a taskset (taskset.py, which is imported only then).
"""

import runpy
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "world" if (HERE / "world").is_dir() else HERE.parents[1]  # wheel or checkout
__all__ = ["InProcess", "Local", "Seeds"]  # verifiers takes its harness, env and taskset from here


def __getattr__(name: str):
    """What verifiers asks for."""
    if name not in __all__:
        raise AttributeError(f"module 'picoswarm' has no attribute {name!r}")
    return getattr(import_module("picoswarm.taskset"), name)


def import_ours(*names: str) -> list:
    """Modules of the checkout, which import each other by bare names, so that each runs as a file.

    In another program's process the name `swarm` may belong to another package. So other modules
    with our names step aside during the import, and afterwards ours give up their names: only the
    caller holds them. (A trick. Imports from a package would be plainer, but then no chapter could
    be run as `python FILE`.)
    """
    ours = ("env_alphabet", "env_letters", "env_swarm", "swarm", "metrics", "chat")

    def take_out() -> dict:
        return {m: sys.modules.pop(m) for m in list(sys.modules) if m.partition(".")[0] in ours}

    theirs = take_out()
    sys.path.insert(0, str(FOLDER))
    try:
        return [import_module(name) for name in names]
    finally:
        sys.path.remove(str(FOLDER))
        take_out()
        sys.modules.update(theirs)


env_letters, env_alphabet, env_swarm = import_ours("env_letters", "env_alphabet", "env_swarm")
WORLDS = {
    "letters": env_letters.Letters,
    "alphabet": env_alphabet.Alphabet,
    "swarm": env_swarm.Swarm,
}
# Arguments of Letters that are flags of train.py (settings.py, which imports torch; a test
# compares), and the style of the scripted expert, which is not used here.
ASIDE = {"letters": {"difficulty": 6, "reward_kind": "binary", "think": True, "style": "bare"}}


def make_env(environment: dict[str, Any]):
    """A fresh environment from {"type": its name, a field of its class: value, …}.

    To forbid thinking, tell the template too: enable_thinking in chat_template_kwargs, or in the
    renderer.
    """
    name = environment["type"]
    text = {f.name for f in fields(WORLDS[name]) if f.type is str}
    # flags have dashes
    settings = {key.replace("-", "_"): x for key, x in environment.items() if key != "type"}
    # pydantic_config turns version = "0.2" into a number
    settings = {key: str(x) if key in text else x for key, x in settings.items()}
    return WORLDS[name](**ASIDE.get(name, {}) | settings)


# ------------------------------------------------------------------------------ the command

DEFAULT = ["train", "--env", "letters", "--difficulty", "6"]
SHORT = {
    "doctor": "bookkeeping.doctor",
    "compare": "bookkeeping.compare",
    "report": "bookkeeping.report",
    "export": "bridges.export",
}


def main() -> None:
    """`picoswarm WORD …` runs one of the files, as `python FILE …` does in the checkout."""
    words = sys.argv[1:]
    if words in (["-h"], ["--help"]):
        print(__doc__)
        return
    if not words:
        words = DEFAULT
        print(f"picoswarm {' '.join(words)} (what else there is: picoswarm --help)", flush=True)
    name = SHORT.get(words[0], words[0])
    if not (FOLDER / name.replace(".", "/")).with_suffix(".py").exists():
        raise SystemExit(f"picoswarm has no command {words[0]!r}; picoswarm --help lists them")
    sys.argv[1:] = words[1:]
    sys.path.insert(0, str(FOLDER))
    runpy.run_module(name, run_name="__main__", alter_sys=True)
