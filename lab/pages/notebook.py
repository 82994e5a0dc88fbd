"""docs/first_run.ipynb: the first run as a notebook, with the outputs of its own execution.

    python -m lab.pages.notebook                 # execute and write; some minutes on two cores. Needs requirements/all.txt
    python -m lab.pages.notebook --sources       # write the cells without executing, to look at them while you edit

STORY is the notebook: prose as it stands, code between ``` lines. It is executed in a copy of what git tracks, in the notebook's own
folder, so nothing of this checkout's runs/ takes part, and the cells meet what a reader meets. tests/test_notebook.py holds that the
committed cells are these, that none of them failed, and that no output names a machine; `make test-all` executes them again.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tyro

from lab.common import ROOT

PAGE = ROOT / "docs" / "first_run.ipynb"
SECONDS = 3600  # for one cell, on a machine that has other work

STORY = r'''
# A first run

A small language model learns to count letters, by trial and error, while you watch. Then you change
what it is paid for, and watch it learn something else. It takes some minutes on two CPU cores and
needs no GPU: on Colab, a runtime without one is right.

This notebook runs in a checkout of picoswarm as well as on Colab. Run the cells from top to bottom.

## The code

In a checkout this cell does nothing. Elsewhere it clones the repository; write down where yours is.

```
REPOSITORY = ""  # on Colab: the address that you would give to `git clone`
```

```
import os
import subprocess
from pathlib import Path

checkout = next((place for place in (Path(), Path("..")) if (place / "pico.py").exists()), None)
if checkout is None:
    assert REPOSITORY, "fill in REPOSITORY above: this is not a checkout of picoswarm"
    subprocess.run(["git", "clone", "--depth", "1", REPOSITORY, "picoswarm"], check=True)
    checkout = Path("picoswarm")
os.chdir(checkout)
print("the book:", *sorted(file.name for file in Path().glob("*.py")))
```

The packages, in the versions of `requirements.txt`. If torch is there already, as on Colab, it stays
as it is: another build of it would be gigabytes.

```
import sys
from importlib.metadata import distributions

have = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in distributions()}
lines = [line.split("#")[0].strip() for line in Path("requirements.txt").read_text().splitlines()]
pins = [line.split("==") for line in lines if line]
keep = {"torch"} & have.keys()
missing = [f"{name}=={v}" for name, v in pins if have.get(name) != v and name not in keep]
if missing:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *missing], check=True)
print(f"{len(missing)} of {len(pins)} packages installed; torch {have.get('torch', 'is new')}")
```

## The task

An *environment* gives a task from a seed and scores any reply. An expert shows how it can be done.

```
from env_letters import Letters

env = Letters(difficulty=6, reward="binary", think=True, style="derives")
print(env.reset(seed=2_000_000_001)[0]["content"])
print("\nan expert:", env.expert_reply(), sep="\n")
for reply in (env.expert_reply(), "<answer>{}</answer>", "no idea"):
    env.step(reply)
    print(env.score()["reward"], "for", repr(reply[:40]))
```

## Train

The model comes with the repository. First it imitates a hundred replies that are right and show no counting
(SFT); then it tries each task eight times and makes more likely what was better than its siblings (GRPO).
`train.py` is that loop. Here it does fewer updates than by default, which is enough to see it happen.

```
import shutil

FLAGS = "--model models/pico_base --device cpu --updates 30 --eval-every 5 --eval-n 128 --no-wandb"


def train(name, *flags):
    # Show what train.py prints, without its progress bars. A second try replaces the first.
    shutil.rmtree(Path("runs", name), ignore_errors=True)
    command = [sys.executable, "train.py", "--name", name, *FLAGS.split(), *flags]
    Path("runs").mkdir(exist_ok=True)
    with open("runs/train.log", "w") as bars:
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=bars, text=True)
        for line in run.stdout:
            if line.strip():
                print(line.rstrip()[:150], flush=True)
    if run.wait():
        raise RuntimeError(Path("runs/train.log").read_text()[-2000:])
```

```
train("notebook-first", "--env", "letters", "--difficulty", "6", "--no-eval-other-tiers")
```

`exact` is the share of development tasks that are exactly right, with its 95% interval. Nothing was
trained on those tasks.

## Look

The curves. *Habits* is how the model goes about it: an answer alone (`bare`), counts stated without
counting (`states`), or the string spelled out with a running tally (`derives`).

```
from IPython.display import Image

Image("runs/notebook-first/curves.png", width=900)
```

Read what it says. Here is one development task, before training and after it:

```
import json


def replies(name, seed=2_000_000_001):
    # {update: (reward, reply)} of one development task; update -1 is the model before anything.
    lines = map(json.loads, Path("runs", name, "episodes.jsonl").read_text().splitlines())
    same = [e for e in lines if e["source"] == "eval" and e["seed"] == seed]
    return {e["update"]: (e["reward"], e["messages"][-1]["content"]) for e in same}


found = replies("notebook-first")
for update in (-1, 0, max(found)):
    print(f"after update {update}, reward {found[update][0]}:", found[update][1], "", sep="\n")
```

`runs/notebook-first/report.html` has all of it to click through: open it in a browser.

## Change the reward

Whatever is paid is what is learnt. Suppose somebody wants short answers, and pays for a well-formed
answer by how short the reply is. Whether it is right is still measured, as `exact`; it is not paid.

SFT is as before, so it shows long replies, and `train.py` warns that it has made the reward worse.
What follows earns it back.

```
SHORT = """
from env_letters import Letters


class Short(Letters):
    def __init__(self):
        super().__init__(difficulty=6, reward="binary", think=True, style="states")

    def score(self):
        score = super().score()
        score["reward"] = score["format"] * min(1, 100 / max(1, len(self.reply)))
        return score
"""
Path("runs/short.py").write_text(SHORT)
train("notebook-short", "--env", "runs/short.py:Short")
```

Both runs side by side. The second gets nearly all that can be paid, and does not count any more.
`train.py` has noticed: *PAYS SOMETHING ELSE*, it says above, when the reward rises and `exact` does not.

```
%matplotlib inline
import matplotlib.pyplot as plt

runs = {"notebook-first": "paid for exact answers", "notebook-short": "paid for short replies"}
measures = {"reward": "reward", "exact": "exactly right", "reply_tokens": "tokens per reply"}
figure, axes = plt.subplots(1, 3, figsize=(11, 3))
for name, label in runs.items():
    lines = map(json.loads, Path("runs", name, "evals.jsonl").read_text().splitlines())
    evals = [line for line in lines if line["update"] >= 0]  # from the end of SFT on
    for axis, (measure, title) in zip(axes, measures.items()):
        mean = [sum(line[measure]) / len(line[measure]) for line in evals]
        axis.plot([line["update"] for line in evals], mean, marker="o", label=label)
        axis.set(title=title, xlabel="update")
axes[0].legend()
figure.tight_layout()
plt.show()
```

```
found = replies("notebook-short")
print(f"reward {found[max(found)][0]:.2f}:", found[max(found)][1], sep="\n")
```

## Go on

* **Your turn:** pay for both, `score["exact"]` and a short reply. How much may brevity be worth
  before counting stops being worth its tokens? Run the last three cells again.
* [What each line of the algorithm does](pico.md), in one file of 300 lines.
* [An environment or a loss of your own](fork.md), and exercises.
* [Is it the reward?](letters.md) The controls, with intervals and seeds.
'''


def cells() -> list[dict]:
    """The cells of STORY, in nbformat's form, without outputs."""
    made = []
    for k, part in enumerate(re.split(r"^```\n(.*?)^```\n", STORY, flags=re.S | re.M)):
        text = part.strip("\n")
        if not text:
            continue
        cell = {"cell_type": "code" if k % 2 else "markdown", "id": f"cell-{len(made)}", "metadata": {}, "source": text}
        made.append(cell | ({"execution_count": None, "outputs": []} if k % 2 else {}))
    return made


def notebook() -> dict:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells(), "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 5}


def copy_of_checkout(folder: Path) -> Path:
    """What git tracks, as it stands in the working tree."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for file in filter(None, files):
        if (ROOT / file).exists():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)
    return folder


def execute(folder: Path) -> dict:
    """The notebook with its outputs, executed in folder/docs. The first cell that fails is raised."""
    try:
        import nbformat
        from nbclient import NotebookClient
    except ImportError:
        raise SystemExit("nbclient is not installed: `pip install -r requirements/all.txt`, or `make test-all`") from None
    page = nbformat.from_dict(notebook())
    NotebookClient(page, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder / "docs")}}).execute()
    for cell in page.cells:
        cell.metadata.pop("execution", None)  # clock times, which differ by run and say nothing
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return json.loads(nbformat.writes(page))


def joined(outputs: list) -> list:
    """Text that was printed in pieces becomes one output."""
    made: list = []
    for output in outputs:
        if made and output.output_type == "stream" == made[-1].output_type and output.name == made[-1].name:
            made[-1].text += output.text
        else:
            made.append(output)
    return made


def main(sources: bool = False) -> None:
    """sources: write the cells without executing them."""
    if sources:
        page = notebook()
    else:
        with tempfile.TemporaryDirectory() as folder:
            page = execute(copy_of_checkout(Path(folder)))
    PAGE.write_text(json.dumps(page, indent=1, ensure_ascii=False) + "\n")
    print(PAGE.relative_to(ROOT), f"{PAGE.stat().st_size / 1000:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    tyro.cli(main)
