"""Protects the page of a run: its numbers are the report's, what a model said stays text, and the keyboard reaches all of it.

A run folder is made up here, hostile replies included. The first half reads the page as a file and always runs; the second
half opens it in Chromium and is skipped, with the reason, on a machine that has none.
"""

import base64
import gzip
import hashlib
import json
import math
import random
import re
import runpy
import sys
import time
from pathlib import Path

import pytest

import metrics
import warm
from bookkeeping import behaviour, viewer
from helpers import write_lines
from lab.common import read_lines

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = [
    "</script><img src=x onerror=\"window.hacked='a reply ran'\">",
    "<!--<script>window.hacked='a comment ran'</script>",
    "{{run}} {{episodes}} {{hash}} $& \\1",
    "مرحبا بالعالم \u202eright to left\u202c שלום",
    "👩‍👩‍👧‍👦 naïve \U0001f600 \ud83d alone",  # a lone surrogate too: half an emoji
    "a\tb\r\n\u200b\u2028\x00 </ScRiPt >",
]


def test_a_run_that_is_not_finished_is_described_by_its_settings():
    """There is no summary yet. One that is finished may have chosen its model by itself, so there the summary is right."""
    asked, done = {"env": "letters", "model": "auto", "seed": 3}, {"env": "letters", "model": "pico_base", "seed": 3, "updates": 30}
    state = ["state", "not finished: there is no summary.json yet"]
    assert viewer.facts({}, asked, [{"update": 7}]) == [
        ["environment", "letters"],
        ["model", "auto"],
        ["seed", "3"],
        ["updates", "7"],
        state,
    ]
    assert viewer.facts(done, asked, []) == [["environment", "letters"], ["model", "pico_base"], ["seed", "3"], ["updates", "30"]]


def test_the_colours_range_over_the_rewards_that_there_are():
    paid = lambda *rewards: viewer.scale([{"reward": reward, "advantage": None} for reward in rewards])["reward"]
    assert paid(0.2, 0.9, None) == [0.0, 0.9] and paid(-1.5, -0.5) == [-1.5, 1e-9]


# ------------------------------------------------------------------------------------------------ made-up runs


def segments(rng: random.Random, prompt: str, replies: list[str], trained: bool) -> list[dict]:
    """A conversation as train.py writes it: given text, then the policy's tokens (here: words and single spaces)."""
    out = []
    for turn, reply in enumerate(replies):
        out.append({"role": "given", "text": prompt if turn == 0 else f"<|im_start|>user\nturn {turn}<|im_end|>\n<|im_start|>assistant\n"})
        tokens = [*re.findall(r"\s|[^\s]+", reply), "<|im_end|>"]
        ratios = [round(math.exp(rng.gauss(0, 0.02)), 4) for _ in tokens] if trained else None
        out.append({"role": "policy", "tokens": tokens, "logprobs": [round(-rng.expovariate(3), 4) for _ in tokens], "ratios": ratios})
    return out


def episode(
    rng, update: int, stage: str, group: int, member: int, seed: int, reward, advantage, replies: list[str], tasks: str = ""
) -> dict:
    question = f"Count the letters in task {seed}: <b>bold</b> & such."
    messages = [{"role": "user", "content": question}] + [{"role": "assistant", "content": reply} for reply in replies]
    parts = segments(rng, f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", replies, not stage)
    return {
        "update": update, "source": "eval" if stage else "rollout", "stage": stage, "group": group, "member": member, "seed": seed,
        "reward": reward, "advantage": advantage, "components": {"exact": float(reward == 1), "format": 1.0, "habit_bare": 0.0},
        "stop_reason": "done", "error": "", "policy_version": max(0, update - 1), "messages": messages, "segments": parts,
        "reply_tokens": sum(len(s["tokens"]) for s in parts if s["role"] == "policy"), **({"tasks": tasks} if tasks else {}),
    }  # fmt: skip


def make_run(folder: Path, updates: int = 20, tasks: int = 6, k: int = 4, replies=None, text_only: bool = False) -> Path:
    """A whole run folder. replies(rng, update, member) gives the turns of a reply; text_only: rollouts alone, without tokens."""
    rng, folder = random.Random(0), Path(folder)
    folder.mkdir(parents=True)
    replies = replies or (
        lambda rng, update, member: [f"<think>\nupdate {update} sample {member}\n</think>\n<answer>{rng.random():.3f}</answer>"]
    )
    lines = [
        {"update": u, "level": 6, "reward": u / updates, "reward_low": u / updates - 0.1, "reward_high": u / updates + 0.1, "n": 64,
         "exact": u / updates, "format": 1.0, "habit_bare": 1 - u / updates, "habit_derives": u / updates, "reply_tokens": 60.0 + u,
         "groups_with_signal": 0.5, "grad_norm": 0.1, **({} if u % 5 == 0 else {"entropy": 0.2})}
        for u in range(1, updates + 1)
    ]  # fmt: skip
    evals, episodes = [], []
    for u, stage in [(-1, "before"), (0, "after_sft"), *((u, "train") for u in range(10, updates, 10)), (updates, "final")]:
        for tier in (3, 6):
            exact = [float(rng.random() < 0.2 + 0.7 * max(u, 0) / updates) for _ in range(32)]
            kind = {"tasks": f"tier {tier}", "trained": tier == 6}
            evals.append({"update": u, "stage": stage, **kind, "reward": [max(x, 0.25) for x in exact], "exact": exact, "format": exact})
        for i in range(0 if text_only else tasks):
            reward = [0.0, 0.25, 1.0][rng.randrange(3)]
            episodes.append(episode(rng, u, stage, i, 0, 2_000_000_000 + i, reward, None, replies(rng, u, 0), "tier 6"))
        for g in range(2 if u > 0 else 0):
            rewards = [float(m % 3 == 0) for m in range(k)]
            for m, r in enumerate(rewards):
                episodes.append(episode(rng, u, "", g, m, 8 * u + g, r, r - sum(rewards) / k, replies(rng, u, m)))
    for e in episodes if text_only else []:
        for name in ("source", "stage", "segments", "advantage", "error"):
            del e[name]
    interval = {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 32}
    summary = {
        "env": "letters", "model": "pico_base", "seed": 5, "difficulty": 6, "updates": updates, "gain": interval, "collapse": "",
        "seconds": {"total": 150.0}, "machine": {"device": "x86_64 CPU, 2 threads"}, "peak_rss_gb": 1.5,
        "config": {"lr": 0.0003, "env": "letters"},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    for name, records in (("metrics", lines), ("evals", evals), ("episodes", episodes)):
        write_lines(folder / f"{name}.jsonl", records)
    return folder


def hostile_replies(rng, update, member):
    return [HOSTILE[(member + max(update, 0)) % len(HOSTILE)], *HOSTILE]  # many turns, each of them hostile


def script(page: str, name: str) -> str:
    """The text of <script id=name>, found the way a browser finds it: up to the first '</script'."""
    return re.search(rf'<script type="[^"]*" id="{name}">(.*?)</script', page, re.DOTALL | re.IGNORECASE)[1]


def load(page: Path) -> tuple[dict, list[dict]]:
    """The data of a page, read as strictly as a browser reads it: NaN is an error."""

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    text = page.read_text(encoding="utf-8")
    packed = gzip.decompress(base64.b64decode(script(text, "episodes"), validate=True)).decode("ascii")
    bodies = [json.loads(line, parse_constant=refuse) for line in packed.split("\n") if line]
    return json.loads(script(text, "run"), parse_constant=refuse), bodies


# ------------------------------------------------------------------------------------------------ the page as a file


def test_every_placeholder_is_filled_once(tmp_path):
    text = viewer.write_html(make_run(tmp_path / "a")).read_text(encoding="utf-8")
    assert set(re.findall(r"\{\{(\w+)\}\}", viewer.TEMPLATE.read_text(encoding="utf-8"))) == {"title", "hash", "run", "episodes"}
    assert "{{" not in text and "<title>a: a picoswarm run</title>" in text and '<html lang="en">' in text


def test_hostile_text_cannot_leave_its_script(tmp_path):
    page = viewer.write_html(make_run(tmp_path / "a", replies=hostile_replies))
    text, template = page.read_text(encoding="utf-8"), viewer.TEMPLATE.read_text(encoding="utf-8")
    for mark in ("<script", "</script", "<img", "<!--", "<b>"):
        assert text.lower().count(mark) == template.lower().count(mark), mark
    assert re.fullmatch(r"[A-Za-z0-9+/]+=*", script(text, "episodes"))  # packed: there is no character that HTML knows
    assert viewer.write_html(page.parent).read_text(encoding="utf-8") == text  # the same run, the same bytes


def test_hostile_prompts_cannot_leave_theirs(tmp_path):
    """What a task is called in the list is not packed, and may name a placeholder."""
    folder, template = make_run(tmp_path / "a"), viewer.TEMPLATE.read_text(encoding="utf-8")
    text = (folder / "episodes.jsonl").read_text().replace("Count the letters", json.dumps("</script><img> {{run}} {{hash}}")[1:-1])
    (folder / "episodes.jsonl").write_text(text)
    page = viewer.write_html(folder).read_text(encoding="utf-8")
    for mark in ("<script", "</script", "<img", "<!--", "<b>"):
        assert page.lower().count(mark) == template.lower().count(mark), mark
    assert page.count("{{run}}") == page.count("{{hash}}") > 5


def test_the_data_goes_round_unchanged(tmp_path):
    folder = make_run(tmp_path / "a", replies=hostile_replies)
    run, bodies = load(viewer.write_html(folder))
    written = read_lines(folder / "episodes.jsonl")
    assert [b["segments"] for b in bodies] == [e["segments"] for e in written]
    assert [b["components"] for b in bodies] == [e["components"] for e in written]
    for short, e in zip(run["episodes"], written):
        assert (short["reward"], short["advantage"], short["member"], short["end"]) == (e["reward"], e["advantage"], e["member"], "done")
        assert run["stops"][short["at"]]["u"] == e["update"] and run["stops"][short["at"]]["stage"] == e["stage"]
        assert run["tasks"][short["task"]]["seed"] == e["seed"]


def test_the_template_has_no_address_and_never_writes_html():
    template = viewer.TEMPLATE.read_text(encoding="utf-8")
    assert not re.search(r"https?:|//\w+\.\w|@import|url\(", template)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc", template)


def test_the_pages_policy_allows_its_own_script_only(tmp_path):
    text = viewer.write_html(make_run(tmp_path / "a")).read_text(encoding="utf-8")
    inside = re.search("<script>(.*?)</script>", text, re.DOTALL)[1]
    assert (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'" in text
    )


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    folder = make_run(tmp_path / "a")
    lines = read_lines(folder / "metrics.jsonl")
    write_lines(folder / "metrics.jsonl", [*lines, {"update": 21, "reward": float("nan"), "entropy": float("inf"), "habit_bare": None}])
    broken = episode(random.Random(0), 21, "", 0, 0, 1, float("nan"), None, ["x y"]) | {"stop_reason": "error", "error": "ValueError: no"}
    broken["segments"][1]["logprobs"] = [None, float("-inf")]
    with open(folder / "episodes.jsonl", "a") as f:
        f.write(json.dumps(broken) + "\n")
    run, bodies = load(viewer.write_html(folder))
    assert run["episodes"][-1]["reward"] is None and bodies[-1]["segments"][1]["logprobs"] == [None, None]
    reward = next(c for c in run["charts"] if c["title"] == "training reward")
    assert reward["series"][1]["points"][-1][1] is None


def test_intervals_are_those_of_the_report(tmp_path):
    folder = make_run(tmp_path / "a")
    run, _ = load(viewer.write_html(folder))
    evals = read_lines(folder / "evals.jsonl")
    exact, reward = (
        next(c for c in run["charts"] if c["title"].startswith(f"development, {what}")) for what in ("exactly right", "mean reward")
    )
    assert [s["name"] for s in exact["series"]] == ["tier 6", "tier 3"] and exact["series"][1]["plain"]  # what is trained comes first
    for s, chart in ((s, c) for c in (exact, reward) for s in c["series"]):
        mine = [e for e in evals if e["tasks"] == s["name"]]
        for point, e in zip(s["points"], mine, strict=True):
            x = metrics.proportion(sum(e["exact"]), 32) if chart is exact else metrics.mean(e["reward"])
            assert point[0] == e["update"]
            assert point[1:] == pytest.approx(
                [(100 if chart is exact else 1) * v for v in (x.mean, x.low, x.high)], abs=0.051 if chart is exact else 6e-4
            )
    final = next(e for e in evals if (e["stage"], e["tasks"]) == ("final", "tier 6"))
    row = run["headline"]["rows"][0]
    assert row["trained"] and run["headline"]["moments"] == ["before SFT", "after SFT", "update 20"]
    assert " ".join(row["cells"]["update 20"][0]) == metrics.proportion(sum(final["exact"]), 32).percent()
    assert " ".join(row["cells"]["update 20"][1]) == f"reward {metrics.mean(final['reward'])}".partition(", n=")[0]
    assert run["notes"] == ["GRPO over SFT on the same 32 tasks: +50.0 points [+25.0, +75.0] in exact answers, paired by task."]
    assert ["time", "2.5 minutes"] in run["facts"] and ["machine", "x86_64 CPU, 2 threads"] in run["facts"]


def test_habits_are_stacked_and_the_mean_is_of_the_last_ten(tmp_path):
    run, _ = load(viewer.write_html(make_run(tmp_path / "a")))
    bare, derives = next(c for c in run["charts"] if c.get("stacked"))["series"]
    assert bare["points"][3] == pytest.approx([4, 80, 0, 80]) and derives["points"][3] == pytest.approx([4, 20, 80, 100])
    rolling = next(c for c in run["charts"] if c["title"] == "training reward")["series"][0]
    assert rolling["points"][19][1] == pytest.approx(sum(range(11, 21)) / 200) and rolling["points"][0][1] == pytest.approx(1 / 20)


def test_one_task_at_all_evaluations_is_one_task(tmp_path):
    run, _ = load(viewer.write_html(make_run(tmp_path / "a")))
    at = {
        stop["key"]: {e["task"] for e in run["episodes"] if run["stops"][e["at"]] is stop}
        for stop in run["stops"]
        if stop["source"] == "eval"
    }
    assert list(at) == ["-1.before", "0.after_sft", "10.train", "20.final"]
    assert len(set(map(frozenset, at.values()))) == 1 and len(at["20.final"]) == 6


def test_the_same_seed_with_another_prompt_is_another_task(tmp_path):
    folder = make_run(tmp_path / "a")
    mine = episode(random.Random(0), 0, "after_sft", 0, 0, 7, 1.0, None, ["x"])
    other = json.loads(json.dumps(mine).replace("Count", "Sort"))
    write_lines(folder / "episodes.jsonl", [mine, other])
    run, _ = load(viewer.write_html(folder))
    assert [e["task"] for e in run["episodes"]] == [0, 1]


@pytest.mark.parametrize("name", ["metrics", "evals", "episodes", "summary"])
def test_any_one_file_is_enough_and_empty_records_are_survived(tmp_path, name):
    whole = make_run(tmp_path / "whole")
    for empty in (False, True):
        folder = tmp_path / f"part-{empty}"
        folder.mkdir()
        file = "summary.json" if name == "summary" else f"{name}.jsonl"
        text = (whole / file).read_text()
        (folder / file).write_text(text if not empty else '{"update": 1}\n{}\n' if name != "summary" else '{"machine": null, "seed": 0}')
        run, _ = load(viewer.write_html(folder))
        assert (["state", "not finished: there is no summary.json yet"] in run["facts"]) == (name != "summary")


def test_a_runs_name_is_text_too(tmp_path):
    text = viewer.write_html(make_run(tmp_path / "a & <i>b")).read_text(encoding="utf-8")
    assert "<title>a &amp; &lt;i&gt;b: a picoswarm run</title>" in text and "<i>" not in text


def test_errors_are_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    broken = make_run(tmp_path / "broken")
    text = (broken / "metrics.jsonl").read_text()
    (broken / "metrics.jsonl").write_text(text[:40] + "\n" + text)
    cases = {
        tmp_path / "nowhere": "there is no such folder", tmp_path / "empty": "so it is no run folder",
        broken: "metrics.jsonl is damaged: line 1 is not JSON",
    }  # fmt: skip
    for folder, words in cases.items():
        with pytest.raises(ValueError, match=re.escape(words)) as caught:
            viewer.write_html(folder)
        assert "\n" not in str(caught.value)
    (broken / "metrics.jsonl").write_text(text + text[:40])  # a kill cut the last line in two: it is left out
    run, _ = load(viewer.write_html(broken))
    assert len(run["charts"][2]["series"][0]["points"]) == 20


def test_the_command_line(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "a")
    done = warm.run(["-m", "bookkeeping.viewer", str(folder)], ROOT)
    assert done.returncode == 0 and done.stdout == f"{folder}/report.html\n" and not done.stderr

    def told(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["bookkeeping/viewer.py", *arguments])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(ROOT / "bookkeeping/viewer.py"), run_name="__main__")
        return stopped.value.code  # a string: Python prints it and exits with 1

    for arguments in ((), ("--help",), (str(folder), "more")):
        assert told(*arguments).startswith("usage: python -m bookkeeping.viewer runs/NAME") and "\n" not in told(*arguments)
    assert told(str(tmp_path / "nowhere")) == f"{tmp_path}/nowhere: there is no such folder; give a run folder, such as runs/NAME"


# ------------------------------------------------------------------------------------------------ swarm: tables and calls


@pytest.fixture(scope="module")
def swarm(tmp_path_factory):
    """A swarm run of scripted players, with token segments and a few updates; its page."""
    folder = behaviour.made_up(tmp_path_factory.mktemp("swarm"), n=12)
    episodes = read_lines(folder / "episodes.jsonl")
    for e in episodes:
        e["segments"] = [{"role": "given", "text": f"<|im_start|>user\n{e['messages'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"}]
        for m in e["messages"][1:]:
            if m["role"] == "assistant":
                tokens = [*re.findall(r"</?\w+>|\s|[^\s<]+", m["content"]), "<|im_end|>"]
                e["segments"].append({"role": "policy", "tokens": tokens, "logprobs": [-0.5] * len(tokens), "ratios": None})
            else:
                text = f"\n<|im_start|>user\n<tool_response>\n{m['content']}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
                e["segments"].append({"role": "given", "text": text})
    write_lines(folder / "episodes.jsonl", episodes)
    evals = read_lines(folder / "evals.jsonl")
    write_lines(folder / "evals.jsonl", [*evals, evals[-1] | {"stage": "eval_only", "tasks": "hard v0.2", "trained": False}])
    used = {f"used_{tool}": 0.0 for tool in ("post", "vote", "pass_turn")}
    write_lines(
        folder / "metrics.jsonl",
        [{"update": u, "reward": 1.0, **used, "used_claim_task": 10.0, "used_pass_turn": 10.0, "error_rate": 0.2} for u in range(1, 41)],
    )
    return viewer.write_html(folder)


def test_a_run_without_exact_answers_shows_its_reward(swarm):
    run, _ = load(swarm)
    final = read_lines(swarm.parent / "evals.jsonl")[3]
    assert run["headline"]["what"] == "mean reward" and [row["tasks"] for row in run["headline"]["rows"]] == ["medium v0.2"]
    cell = run["headline"]["rows"][0]["cells"]["update 40"]
    assert [" ".join(part) for part in cell] == [str(metrics.mean(final["reward"])).partition(", n=")[0]]
    titles = [c["title"] for c in run["charts"]]
    assert titles[:2] == ["development, mean reward, n=12", "development, the parts of the reward"] and not any(
        "exact" in t for t in titles
    )
    assert all("hard v0.2" != s["name"] for c in run["charts"] for s in c["series"])  # evaluated later: a table of its own
    tables = {t["title"]: t for t in run["tables"]}
    assert tables["Evaluated later"]["rows"][0][0] == "hard v0.2" and "Behaviour: after SFT → update 40 (final)" in tables


def test_tool_use_is_stacked_to_all_the_turns(swarm):
    run, _ = load(swarm)
    tools = next(c for c in run["charts"] if c["title"].startswith("tool use"))["series"]
    shares = {s["name"]: s["points"][0][1] for s in tools}
    assert shares["claim_task"] == shares["pass_turn"] == pytest.approx(40) and shares["errors"] == pytest.approx(20)
    assert tools[-1]["name"] == "pass_turn" and tools[-1]["points"][0][3] == pytest.approx(100)
    css = viewer.TEMPLATE.read_text(encoding="utf-8")
    assert all(f"--{s['colour']}:" in css for s in tools)


def test_every_swarm_episode_has_its_calls_in_short_and_its_scenario_as_title(swarm):
    run, bodies = load(swarm)
    assert all(len(body["calls"]) == 25 for body in bodies)
    assert [t["prompt"].partition(":")[0] for t in run["tasks"]][:8] == [f"scenario {i}" for i in range(8)]
    assert all(t["prompt"].partition(": ")[2].startswith("resources ") for t in run["tasks"])
    assert all("calls" not in body for body in load(viewer.write_html(make_run(swarm.parent / "letters")))[1])


# ------------------------------------------------------------------------------------------------ the page in a browser


class Page:
    """A page with the few verbs that the tests need. wait(...) asks until it is true, for five seconds."""

    def __init__(self, browser):
        self.browser = browser

    def open(self, path: Path, fragment: str = "", width: int = 1280, height: int = 900, **features):
        media = {"prefers-color-scheme": "light", **{name.replace("_", "-"): value for name, value in features.items()}}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": n, "value": v} for n, v in media.items()]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.browser.get("about:blank")  # else only the fragment would change
        self.browser.get_log("browser")
        self.browser.get(path.as_uri() + "#" + fragment)
        self.wait("return document.documentElement.dataset.theme")  # the episodes are unpacked and the first one is drawn
        return self

    def js(self, code: str, *arguments):
        return self.browser.execute_script(
            "const all = s => [...document.querySelectorAll(s)], one = s => document.querySelector(s);" + code, *arguments
        )

    def texts(self, selector: str) -> list[str]:
        return self.js("return all(arguments[0]).map(e => e.textContent.toWellFormed())", selector)

    def text(self, selector: str) -> str:
        return self.texts(selector)[0]

    def keys(self, *keys: str):
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.browser, duration=0).send_keys(key).perform()

    def choose(self, name: str, value: str):
        self.js("const c = one(`[data-key=${arguments[0]}]`); c.value = arguments[1]; c.dispatchEvent(new Event('input'))", name, value)

    def wait(self, code: str, *arguments):
        deadline = time.monotonic() + 5
        while not (value := self.js(code, *arguments)):
            assert time.monotonic() < deadline, f"not within five seconds: {code}"
            time.sleep(0.02)
        return value

    def outside(self, scrolls: str = "") -> list[str]:
        """What reaches past the window's right edge, but for what scrolls by itself; scrolls: more of that, as selectors."""
        return self.js(
            f"return all('body *').filter(e => !e.closest('#samples, svg, dialog, script{scrolls}') && e.getClientRects().length && "
            "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
        )

    def errors(self) -> list[dict]:
        return self.browser.get_log("browser")


@pytest.fixture
def page(chromium):
    page = Page(chromium)
    yield page
    assert page.errors() == []  # every test ends with a silent console


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return viewer.write_html(make_run(tmp_path_factory.mktemp("plain") / "run", tasks=8))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return viewer.write_html(make_run(tmp_path_factory.mktemp("hostile") / "run", replies=hostile_replies))


def test_it_opens_and_asks_nobody_for_anything(page, plain):
    page.open(plain)
    assert page.js("return [document.title, document.documentElement.lang]") == ["run: a picoswarm run", "en"]
    assert page.js("return performance.getEntriesByType('resource').length") == 0
    assert page.text("h1") == "run" and "pico_base" in page.text("#facts") and "+50.0 points [+25.0, +75.0]" in page.text("#notes")
    assert len(page.texts("figure svg")) == 8 and page.text("#status") == "update 20 (final): task 1 of 8, 1 sample."


@pytest.mark.parametrize("keep", ["metrics.jsonl", "evals.jsonl", "episodes.jsonl", "summary.json", "text"])
def test_parts_of_a_run_open_too(page, tmp_path, keep):
    folder = make_run(tmp_path / "run", text_only=keep == "text")
    for file in folder.iterdir():
        if keep not in (file.name, "text"):
            file.unlink()
    page.open(viewer.write_html(folder))
    page.keys("j", "]", "[", "s", "2", "c", "w", "l", "e")
    assert page.text("#status") != "" and (keep == "episodes.jsonl" or len(page.texts("figure")) > 0 or keep == "summary.json")
    if keep == "text":
        page.open(folder / "report.html")
        assert page.texts(".token") == [] and "</answer>" in page.text("#samples .said") and len(page.texts("#samples article")) == 4


def test_hostile_text_stays_text(page, hostile):
    page.open(hostile)
    for _ in range(3):
        for key in ("j", "]", "w", "w"):
            page.keys(key)
        page.js("for (const token of all('.token')) token.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))")
    assert page.js(
        "return [window.hacked ?? null, document.images.length, document.scripts.length, "
        "all('b').every(b => b.closest('#headline, #scale'))]"
    ) == [None, 0, 3, True]
    said = page.texts("#samples article:last-child .text")[0]
    assert all(text in said for text in HOSTILE if "\ud83d" not in text and "\x00" not in text) and "<b>bold</b>" in page.text("#prompt")


def test_what_cannot_be_seen_is_shown_on_demand(page, hostile):
    page.open(hostile, "spaces=true")
    said = page.texts("#samples article:last-child .text")[0]
    assert "⟨U+202E⟩right·" in said and "a→\tb⟨U+000D⟩↵\n⟨U+200B⟩⟨U+2028⟩⟨U+0000⟩·" in said
    page.keys("w")
    assert "⟨U+" not in page.texts("#samples article:last-child .text")[0]


def test_a_reply_of_a_megabyte_does_not_freeze_the_page(page, tmp_path):
    replies = [iter(["thirty-four letters and no space… " * 30_000])]
    pick = lambda rng, update, member: [next(replies[0], "short")] if update == 10 else [""]
    long = viewer.write_html(make_run(tmp_path / "run", updates=10, tasks=1, replies=pick))
    assert sum(len(json.dumps(body)) for body in load(long)[1]) > 4e6 > 3 * long.stat().st_size  # packed
    began = time.monotonic()
    page.open(long)
    page.keys("j", "k", "2", "w", "w")
    assert time.monotonic() - began < 15
    drawn = page.js("return all('.token').length")
    assert 200 < drawn < 5000  # of 300,000: no more than can be seen
    page.js("const text = all('#samples .text').at(-1); text.scrollIntoView(); text.scrollTop = text.scrollHeight")
    page.wait("return all('.token').length > arguments[0]", drawn)
    drawn = page.js(
        "const text = all('#samples .text').at(-1); text.focus(); [...text.querySelectorAll('.token')].at(-1).click(); "
        "return all('.token').length"
    )
    page.keys("\ue014")  # the right arrow on the last token that is drawn draws more
    page.wait("return all('.token').length > arguments[0] && all('.token').indexOf(one('.token.at')) >= arguments[0] - 1", drawn)
    page.open(long, "u=0&against=")
    assert page.texts("#samples .text .token") == ["<|im_end|>"]


def test_an_empty_reply_and_an_error_are_told(page, tmp_path):
    folder = make_run(tmp_path / "run", updates=10)
    failed = episode(random.Random(0), 10, "final", 9, 0, 5, None, None, []) | {
        "stop_reason": "error",
        "error": "ValueError: <b>no</b>",
        "segments": [],
    }
    write_lines(folder / "episodes.jsonl", [failed | {"messages": failed["messages"] + [{"role": "assistant", "content": ""}]}])
    page.open(viewer.write_html(folder))
    assert "(an empty reply)" in page.text("#samples article") and page.texts("#samples .bad") == ["error", "ValueError: <b>no</b>"]
    assert "reward —" in page.text("#tasks")


def test_keys_change_the_episode(page, plain):
    page.open(plain)
    first = page.text("#prompt .text")
    page.keys("j", "j")
    assert page.text("#status").startswith("update 20 (final): task 3 of 8") and page.text("#prompt .text") != first
    page.keys("k", "k", "k")
    assert page.text("#status").startswith("update 20 (final): task 1 of 8") and page.text("#prompt .text") == first
    page.js("one('#tasks').focus()")
    page.keys("\ue015", "\ue015")  # arrow down, in the list
    assert page.text("#status").startswith("update 20 (final): task 3 of 8")
    assert page.js("return one('#tasks [aria-selected=true]').id === one('#tasks').getAttribute('aria-activedescendant')")
    page.keys("[")
    assert page.text("#where") == "update 10" and page.text("#status").startswith("update 10: task 3 of 8")  # the same task
    page.keys("s")
    assert page.text("#status") == "update 10: task 2 of 2, 4 samples." and len(page.texts("#samples article")) == 4
    page.keys("?")
    assert page.js("return one('dialog').open && document.activeElement.textContent === 'Close'")
    page.keys("j", "\ue00c")  # keys do nothing behind the dialog; Escape closes it
    assert page.js("return !one('dialog').open") and page.text("#status") == "update 10: task 2 of 2, 4 samples."


def test_a_token_tells_its_numbers_to_keyboard_and_pointer(page, plain):
    page.open(plain, "source=rollout")
    page.keys("l", "\ue014", "\ue014")  # into the first sample, then two tokens on
    text, *numbers = page.js("return [...one('#tip').children].map(e => e.textContent)")
    assert page.js("return !one('#tip').hidden && all('.token.at').length === 1 && all('.token').indexOf(one('.token.at')) === 2")
    assert text == '"update"' and [n.split(" ")[0] for n in numbers] == ["log-prob", "probability", "ratio", "advantage"]
    logprob, percent = (float(n.split(" ")[1].strip("%").replace("−", "-")) for n in numbers[:2])
    assert percent == pytest.approx(100 * math.exp(logprob), rel=0.02)
    page.keys("\ue00c")
    assert page.js("return one('#tip').hidden && all('.token.at').length === 0")
    page.js("all('.token')[1].dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))")
    assert page.js("return !one('#tip').hidden && one('#tip code').textContent") == '"\\n"'
    page.js("all('.token')[5].click()")
    assert page.js("return all('.token')[5].classList.contains('at') && !one('#tip').hidden")
    page.keys("l", "h", "l")
    assert page.js("return all('#samples .text').indexOf(document.activeElement)") == 1


def test_colours_follow_the_choice(page, plain):
    page.open(plain, "source=rollout", prefers_reduced_motion="reduce")  # without transitions, colours are there at once
    seen = {}
    for key, name in enumerate(("logprob", "advantage", "ratio", "none"), start=1):
        page.keys(str(key))
        seen[name] = page.js("return all('.token').map(t => getComputedStyle(t).backgroundColor)"), page.text("#scale")
        assert page.js("return one('[data-key=colour]').value") == name
    assert len({str(colours) for colours, _ in seen.values()}) == 4 and len({legend for _, legend in seen.values()}) == 4
    assert len(set(seen["none"][0])) == 1 and len(set(seen["logprob"][0])) > 3 and len(set(seen["ratio"][0])) > 3
    assert len(set(seen["advantage"][0])) == 2  # an episode has one advantage, and its samples scored 0 or 1
    page.keys("s", "2")
    assert (
        "no advantages" in page.text("#scale")
        and page.js("return new Set(all('.token').map(t => getComputedStyle(t).backgroundColor)).size") == 1
    )


CONTRAST = """
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const luminance = colours => {
  for (const c of colours) { canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1); }
  const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(page, plain, scheme):
    page.open(plain, "source=rollout", prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
    dark = page.js(CONTRAST + "return luminance([getComputedStyle(document.body).backgroundColor]) < 0.2")
    assert dark == (scheme == "dark")
    page.js(
        "for (const t of all('.token')) t.style.setProperty('--share', '100%'); "
        "for (const b of all('#history button')) b.style.setProperty('--share', '100%')"
    )
    worst = page.js(CONTRAST + """
      const found = {};
      for (const colour of ['--up', '--down', '--surprise']) {
        all('.token').forEach(t => t.style.setProperty('--tint', `var(${colour})`));
        const t = one('.token'); found[colour] = contrast([getComputedStyle(t).color], [getComputedStyle(one('article')).backgroundColor, \
getComputedStyle(t).backgroundColor]);
      }
      const behind = e => { const out = []; for (; e; e = e.parentElement) out.unshift(getComputedStyle(e).backgroundColor); return out; };
      for (const s of ['.hint', '.muted', 'h1', '#facts dt', '#facts dd', 'figcaption', '.legend li', '#status', \
'#tasks [aria-selected=true] .muted', '.prompt summary', '.text', '.facts', 'select', 'button', '#headline small', '.controls label'])
        for (const e of all(s)) found[s] = Math.min(found[s] ?? 99, contrast([getComputedStyle(e).color], behind(e)));
      found.axis = contrast([getComputedStyle(one('figure svg text')).fill], behind(one('figure')));
      found.bad = contrast([getComputedStyle(document.documentElement).getPropertyValue('--warn').replace(/light-dark\\((.*), *(.*)\\)/, \
one('html') && arguments[0] ? '$2' : '$1')], behind(one('article')));
      return found""", dark)  # fmt: skip
    assert {name: value for name, value in worst.items() if value < 4.5} == {}
    page.open(plain, prefers_color_scheme=scheme)
    assert (
        page.js(
            CONTRAST
            + "return Math.min(...all('#history button').map(b => { b.style.setProperty('--share', '100%'); const s = getComputedStyle(b); "
            "return contrast([s.color], [s.backgroundColor]); }))"
        )
        >= 4.5
    )


def test_the_theme_can_be_chosen(page, plain):
    page.open(plain)
    seen = []
    for _ in range(4):
        seen.append((page.text("#theme"), page.js("return getComputedStyle(document.body).backgroundColor")))
        page.keys("t")
    light, dark = seen[0][1], seen[2][1]
    assert [name for name, _ in seen] == [f"Theme: {t}" for t in ("auto", "light", "dark", "auto")] and light != dark
    assert [colour for _, colour in seen] == [light, light, dark, light]


def test_two_updates_side_by_side(page, plain):
    page.open(plain)
    titles = lambda: page.js("return all('#samples h3').map(h => h.firstChild.textContent)")
    replies = lambda: page.texts("#samples .text")
    assert titles() == ["before SFT", "update 20 (final)"] and "update -1 " in replies()[0] and "update 20 " in replies()[1]
    page.choose("against", "10.train")
    assert titles() == ["update 10", "update 20 (final)"]
    page.keys("j")
    assert titles() == ["update 10", "update 20 (final)"]
    page.keys("[")
    assert titles() == ["update 10"]  # an update is not compared with itself
    page.keys("e")
    assert titles() == ["before SFT", "update 20 (final)"]
    page.keys("c")
    assert titles() == ["update 20 (final)"]
    buttons = page.texts("#history button")
    assert [b.split(":")[0] for b in buttons] == ["before SFT", "after SFT", "10", "20 (final)"]
    page.js("all('#history button')[1].click()")
    assert titles() == ["after SFT"] and page.text("#status").startswith("after SFT: task 2 of 8")


def test_the_address_holds_the_view(page, plain):
    page.open(plain)
    page.keys("[", "s", "j", "3", "w", "t")
    page.choose("sort", "best")
    page.choose("low", "0")
    view = (
        "return [one('#status').textContent, one('#samples').textContent, ...all('[data-key]').map(c => c.type === 'checkbox' ? "
        "c.checked : c.value), document.documentElement.dataset.theme]"
    )
    before = page.js(view)
    page.wait("return location.hash.includes('sort=best') && location.hash.includes('low=0')")
    fragment = page.js("return location.hash.slice(1)")
    page.open(plain)
    assert page.js(view) != before
    page.open(plain, fragment)
    assert page.js(view) == before
    page.js("location.hash = 'source=eval&u=0'")  # an address typed by hand acts at once
    page.wait("return one('#status').textContent.startsWith('after SFT')")
    page.open(plain, "source=constructor&colour=nonsense&sort=__proto__&theme=x&u=NaN&low=abc&task=99999&against=zzz&spaces=1&junk=%3Cb%3E")
    assert page.text("#status") == "update 20 (final): task 1 of 8, 1 sample."


def test_curves_choose_the_update(page, plain):
    page.open(plain)
    numbers = page.js("const plot = one('.plot'); plot.focus(); return plot.getAttribute('aria-valuetext')")
    assert re.fullmatch(r"update 20: tier 6 \d+\.\d% \[\d+\.\d, \d+\.\d\]; tier 3 \d+\.\d% \[.*\]", numbers)
    page.keys("\ue012")  # arrow left, on the first chart: to the evaluation before
    assert page.text("#where") == "update 10" and page.js("return one('.plot').getAttribute('aria-valuenow')") == "10"
    page.keys("\ue011")  # home
    assert page.text("#where") == "before SFT" and page.text(".legend .muted") == "before SFT"
    move = (
        "const r = all('.plot')[2].getBoundingClientRect(); all('.plot')[2].dispatchEvent(new MouseEvent(arguments[0], {bubbles: true, "
        "clientX: r.left + 38 + (r.width - 48) * 0.6, clientY: r.top + 50}))"
    )
    page.js(move.replace("MouseEvent", "PointerEvent"), "pointermove")
    assert page.texts("figure .legend")[2] == "update 12mean of the last 10 0.375each update 0.6 [0.5, 0.7]"
    assert page.text("#where") == "before SFT"  # pointing is not choosing
    page.js(move, "click")
    assert page.text("#status").startswith("update 10: ") and page.text("#status").endswith(
        "At update 12 none were saved; this is the nearest."
    )
    page.js("const s = one('#slider'); s.value = 1; s.dispatchEvent(new Event('input'))")
    assert page.text("#where") == "after SFT"


def test_rewards_filter_and_sort(page, plain):
    page.open(plain, "source=rollout")
    rewards = "return all('#samples h3 .chips').map(c => +c.textContent.split(' ')[1])"
    page.choose("sort", "best")
    best = page.js(rewards)
    page.choose("sort", "worst")
    assert best == sorted(best, reverse=True) and page.js(rewards)[0] <= best[0]
    page.choose("low", "1")
    assert set(page.js(rewards)) == {1.0}
    page.choose("low", "2")
    assert page.text("#status") == "update 20: no episode has such a reward." and page.texts("#samples article") == []
    page.choose("low", "")
    assert len(page.js(rewards)) == 4


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_never_scrolls_sideways(page, plain, hostile, width):
    for path, fragment in ((plain, ""), (plain, "source=rollout&colour=ratio"), (hostile, ""), (hostile, "source=rollout&spaces=true")):
        page.open(path, fragment, width)
        page.js("one('details').open = true")
        assert page.js("return document.documentElement.scrollWidth") <= width, (path, fragment)
        assert page.outside() == []
    side_by_side = page.js(
        "const [a, b] = all('#samples article').map(e => e.getBoundingClientRect()); return b.left > a.left && b.top === a.top"
    )
    assert side_by_side


def test_tab_reaches_every_control_and_each_has_a_name(page, plain):
    page.open(plain)
    page.js("document.body.focus()")
    reached = set()
    for _ in range(60):
        page.keys("\ue004")
        here = page.js(
            "const e = document.activeElement; if (e === document.body) return null; const s = getComputedStyle(e); "
            "return [e.id || e.dataset.key || e.dataset.press || e.className || e.tagName, e.matches(':focus-visible') "
            "&& s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2]"
        )
        if here is None:
            break
        assert here[1], f"focus cannot be seen on {here[0]}"
        reached.add(here[0])
    controls = {
        "theme",
        "?",
        "source",
        "earlier",
        "slider",
        "against",
        "ends",
        "colour",
        "low",
        "high",
        "sort",
        "spaces",
        "tasks",
        "plot",
        "text",
    }
    assert controls <= reached
    nameless = (
        "return all('button, select, input, [tabindex]').filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() && "
        "!e.matches('select') || e.labels?.length)).map(e => e.outerHTML)"
    )
    assert page.js(nameless) == []


def test_motion_is_left_out_where_it_is_not_wanted(page, plain):
    for wish, moves in (("no-preference", True), ("reduce", False)):
        page.open(plain, prefers_reduced_motion=wish)
        seen = page.js("return [getComputedStyle(one('.token')).transitionDuration, getComputedStyle(one('#samples')).scrollBehavior]")
        assert seen == (["0.15s", "smooth"] if moves else ["0s", "auto"])


def test_tables_and_calls_in_the_page(page, swarm):
    page.open(swarm)
    assert page.text("#headline th") == "mean reward (dev)"
    assert page.js("return !one('#behaviour').hidden && all('#tables section').length") == 7
    rows = page.texts("#tables section:first-child td:last-child")
    assert set(rows) <= {"up", "down", "cannot tell"} and {"up", "down"} <= set(page.texts("#tables td.up, #tables td.down"))
    assert page.js("return one('#tables details').open") is False and len(page.texts("#tables details tr")) == 26
    assert page.js("return one('#prompt details').open") is False  # rules and tools are long: folded
    assert len(page.texts("#samples article:last-child .calls li")) == 25
    page.js("one('#tables a').click()")
    page.wait("return one('#status').textContent.startsWith('update 40 (final)') && all('#samples article').length === 1")
    best = next(t for t in load(swarm)[0]["tables"] if t["title"] == "The best episode")
    assert best["text"][0].startswith(f"Scenario {page.text('#tasks [aria-selected=true] p').split()[1].strip(':')} earned")
    assert page.text("#samples h3").endswith(f"reward {float(best['rows'][0][1]):.3g}")


def test_calls_and_observations_look_different(page, swarm):
    page.open(swarm, "against=")
    called = page.js("return all('#samples .call').map(e => e.textContent).join('')")
    assert called.startswith('<tool_call>\n{"name": "')
    assert called.count("<tool_call>") == called.count("</tool_call>") + 1 > 4  # one reply breaks off in its call (behaviour.made_up)
    assert "<think>" not in called and "<|im_end|>" not in called
    blocks = page.texts("#samples .given")
    assert blocks and all("# step " in text and "<tool_response>" in text for text in blocks)
    assert page.js("return all('#samples .given').every(e => getComputedStyle(e).display === 'block')")
    assert page.texts("#samples .given .answer")[0].startswith("# result: ")


def test_a_letters_page_has_no_behaviour(page, plain):
    page.open(plain)
    assert page.js("return one('#behaviour').hidden && one('#prompt details').open") and page.texts("#samples .calls") == []


@pytest.mark.parametrize("width", [1280, 390])
def test_the_swarm_page_never_scrolls_sideways(page, swarm, width):
    page.open(swarm, "", width)
    page.js("all('details').forEach(d => d.open = true)")
    assert page.js("return document.documentElement.scrollWidth") <= width
    assert page.outside(", .wide") == []
