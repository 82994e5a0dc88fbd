"""Protects the page of a run: its numbers are the report's, what a model said stays text, and keys
change what is seen.

A run folder is made up here, hostile replies included. The first half reads the page as a file and
always runs; the second half opens it in Chromium and is skipped, with the reason, on a machine that
has none. That its numbers are the report's is shown in tests/test_report.py.
"""

import base64
import gzip
import hashlib
import json
import math
import random
import re
from pathlib import Path

import pytest

import made_up
from bookkeeping import records, report
from browser import js, open_page, press, text, texts, wait
from helpers import write_lines

HOSTILE = [
    "</script><img src=x onerror=\"window.hacked='a reply ran'\">",
    "<!--<script>window.hacked='a comment ran'</script>",
    "{{run}} {{episodes}} {{hash}} $& \\1",
    "مرحبا بالعالم \u202eright to left\u202c שלום",
    "👩‍👩‍👧‍👦 naïve \U0001f600 \ud83d alone",  # a lone surrogate too: half an emoji
    "a\tb\r\n\u200b\u2028\x00 </ScRiPt >",
]


def page_of(folder: Path) -> Path:
    """The page alone: no curves.png."""
    (folder / "report.html").write_text(report.page(*report.collect(folder)), encoding="utf-8")
    return folder / "report.html"


def episode(rng, update: int, stage: str, member: int, seed: int, replies: list[str]) -> dict:
    """A conversation as train.py writes it: given text, then the policy's tokens (here: words and
    single spaces)."""
    question, segments = f"Count the letters in task {seed}: <b>bold</b> & such.", []
    messages = [{"role": "user", "content": question}]
    for reply in replies:
        segments.append({"role": "given", "text": f"<|im_start|>user\n{question}<|im_end|>\n"})
        tokens = [*re.findall(r"\s|[^\s]+", reply), "<|im_end|>"]
        ratios = None if stage else [round(math.exp(rng.gauss(0, 0.02)), 4) for _ in tokens]
        logprobs = [round(-rng.expovariate(3), 4) for _ in tokens]
        told = {"role": "policy", "tokens": tokens, "logprobs": logprobs, "ratios": ratios}
        segments.append(told)
        messages.append({"role": "assistant", "content": reply})
    reward = [0.0, 0.25, 1.0][rng.randrange(3)]
    return {
        "update": update,
        "source": "eval" if stage else "rollout",
        "stage": stage,
        "member": member,
        "seed": seed,
        "reward": reward,
        "components": {"format": 1.0},
        "advantage": None if stage else reward - 0.5,
        "stop_reason": "done",
        "error": "",
        "policy_version": max(0, update - 1),
        "messages": messages,
        "segments": segments,
        "reply_tokens": sum(len(s["tokens"]) for s in segments if s["role"] == "policy"),
        **({"tasks": "tier 6"} if stage else {}),
    }


def make_run(folder: Path, replies=None) -> Path:
    """A run folder with episodes. replies(update, member): the turns of a reply."""
    rng, episodes = random.Random(0), []
    replies = replies or (lambda update, member: [f"<think>\nupdate {update}\n</think>\n<answer>1"])
    made_up.letters(folder, made_up.growing(20))
    for u, stage in ((0, "before"), (0, "after_sft"), (10, "train"), (20, "final")):
        for i in range(8):
            episodes.append(episode(rng, u, stage, 0, 2_000_000_000 + i, replies(u, 0)))
        for i in range(8 if u > 0 else 0):
            episodes.append(episode(rng, u, "", i % 4, 8 * u + i // 4, replies(u, i)))
    write_lines(folder / "episodes.jsonl", episodes)
    return folder


def hostile_replies(update, member):
    return [HOSTILE[(member + update) % len(HOSTILE)], *HOSTILE]  # many turns, all hostile


def script(page: str, name: str) -> str:
    """The text of <script id=name>, found as a browser finds it: up to the first '</script'."""
    return re.search(rf'<script type="[^"]*" id="{name}">(.*?)</script', page, re.S | re.I)[1]


def load(page: Path) -> tuple[dict, list[dict]]:
    """The data of a page, read as strictly as a browser reads it: NaN is an error."""
    text, strict = page.read_text(encoding="utf-8"), {"parse_constant": {}.__getitem__}
    packed = gzip.decompress(base64.b64decode(script(text, "episodes"), validate=True))
    bodies = [json.loads(line, **strict) for line in packed.decode("ascii").split("\n") if line]
    return json.loads(script(text, "run"), **strict), bodies


# ---------------------------------------------------------------------------- the page as a file


def test_hostile_text_cannot_leave_its_script(tmp_path):
    """What a model said, and what the run and a task are called: that may name a placeholder."""
    folder = make_run(tmp_path / "a & <i>b", replies=hostile_replies)
    template = report.TEMPLATE.read_text(encoding="utf-8")
    said = json.dumps("</script><img> {{run}} {{hash}}")[1:-1]
    text = (folder / "episodes.jsonl").read_text().replace("Count the letters", said)
    (folder / "episodes.jsonl").write_text(text)
    page = page_of(folder).read_text(encoding="utf-8")
    for mark in ("<script", "</script", "<img", "<!--", "<b>", "<i>"):
        assert page.lower().count(mark) == template.lower().count(mark), mark
    assert re.fullmatch(r"[A-Za-z0-9+/]+=*", script(page, "episodes"))  # packed
    assert page.count("{{run}}") == page.count("{{hash}}") > 5
    assert "<title>a &amp; &lt;i&gt;b: a picoswarm run</title>" in page
    assert page_of(folder).read_text(encoding="utf-8") == page  # the same run, the same bytes


def test_the_data_goes_round_unchanged(tmp_path):
    folder = make_run(tmp_path / "a", replies=hostile_replies)
    run, bodies = load(page_of(folder))
    written = records.lines(folder / "episodes.jsonl")
    for short, body, e in zip(run["episodes"], bodies, written, strict=True):
        assert {name: e[name] for name in body} == body
        assert all(short[name] == e[name] for name in report.SHORT)
        assert run["stops"][short["at"]]["stage"] == e["stage"]
        assert run["tasks"][short["task"]]["seed"] == e["seed"]
    stops = [(stop["u"], stop["stage"]) for stop in run["stops"] if stop["source"] == "eval"]
    assert stops == [(-1, "before"), (0, "after_sft"), (10, "train"), (20, "final")]
    assert len(run["tasks"]) == 12


def test_the_page_allows_its_own_script_only_and_has_no_address(tmp_path):
    text = page_of(make_run(tmp_path / "a")).read_text(encoding="utf-8")
    inside = re.search("<script>(.*?)</script>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    template = report.TEMPLATE.read_text(encoding="utf-8")
    assert not re.search(r"https?:|//\w+\.\w|@import|url\(", template)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc",
        template,
    )


# ------------------------------------------------------------------------------ the page in a browser


@pytest.fixture
def page(chromium):
    yield chromium
    assert chromium.get_log("browser") == []  # every test ends with a silent console


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return page_of(make_run(tmp_path_factory.mktemp("plain") / "run"))


def test_it_opens_asks_nobody_for_anything_and_explains_its_words(page, plain):
    open_page(page, plain)
    assert js(page, "return document.title") == "run: a picoswarm run"
    assert js(page, "return performance.getEntriesByType('resource').length") == 0
    rows = texts(page, "#headline tr")
    assert len(rows) == 4 and rows[1].startswith("tier 6trained0.0%[0.0, 5.7]reward")
    opened = text(page, "#status")
    assert opened.startswith("update 20 (final): task ") and opened.endswith(" of 8, 1 sample.")
    first, *_, last = texts(page, "#history button")  # of the task whose reward rose most
    assert (first, last) == ("before SFT: 0.25", "20 (final): 1")
    assert texts(page, "#tables h3") == ["Observations (computed)"]
    assert texts(page, "#tables summary") == ["Evaluation", "Trajectory"]
    assert texts(page, "#samples .calls") == [] and js(page, "return one('#prompt details').open")
    assert {"entropy", "nats", "groups with signal"} <= set(texts(page, "#charts .term"))
    assert {"log-prob", "nats", "policy version"} <= {*texts(page, "#scale .term, #samples .term")}
    js(page, "one('#charts .term').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))")
    assert "GRPO learn" in text(page, "#tip")
    habits = js(page, "return all('figure').find(f => f.innerText.match('habits')).innerHTML")
    assert habits.count('class="layer"') == 2 and "light-dark(#8cc3ec,#1f5f98)" in habits
    assert habits.index("answers at once") < habits.index("spells it out")  # as they lie


def test_hostile_text_stays_text(page, tmp_path):
    hostile = page_of(make_run(tmp_path / "run", replies=hostile_replies))
    open_page(page, hostile)
    press(page, "j", "]", "w", "w", "j", "]")
    js(
        page,
        "for (const t of all('.token')) t.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))",
    )
    found = "[window.hacked ?? null, document.images.length, document.scripts.length]"
    assert js(page, f"return {found}") == [None, 0, 3]
    said = texts(page, "#samples article:last-child .text")[0]
    assert all(text in said for text in HOSTILE if "\ud83d" not in text and "\x00" not in text)
    assert "<b>bold</b>" in text(page, "#prompt")
    open_page(page, hostile, "spaces=true")  # what cannot be seen is shown on demand
    said = texts(page, "#samples article:last-child .text")[0]
    assert "⟨U+202E⟩right·" in said and "a→\tb⟨U+000D⟩↵\n⟨U+200B⟩⟨U+2028⟩⟨U+0000⟩·" in said


def test_keys_change_the_episode(page, plain):
    open_page(page, plain, "task=0")
    first, titles = text(page, "#prompt .text"), "return all('#samples h3').map(h => h.innerText)"
    assert len(js(page, titles)) == 2  # two updates side by side
    press(page, "c", "j", "j")
    assert text(page, "#status").startswith("update 20 (final): task 3 of 8")
    assert text(page, "#prompt .text") != first and len(js(page, titles)) == 1
    js(page, "one('#tasks').focus()")
    press(page, "\ue013", "[")  # arrow up, in the list; the same task, earlier
    assert text(page, "#status").startswith("update 10: task 2 of 8")
    press(page, "s", "?", "j", "\ue00c")  # keys do nothing behind the dialog; Escape closes it
    assert js(page, "return !one('dialog').open")
    assert text(page, "#status") == "update 10: task 2 of 2, 4 samples."


def test_a_token_tells_its_numbers_to_keyboard_and_pointer(page, plain):
    open_page(page, plain, "source=rollout")
    press(page, "l", "\ue014", "\ue014")  # into the first sample, then two tokens on
    text, *numbers = js(page, "return [...one('#tip').children].map(e => e.textContent)")
    assert js(page, "return all('.token').indexOf(one('.token.at'))") == 2 and text == '"update"'
    names, values = zip(*(n.replace("−", "-").split(" ") for n in numbers))
    assert names == ("log-prob", "probability", "ratio", "advantage")
    assert float(values[1].strip("%")) == pytest.approx(100 * math.exp(float(values[0])), rel=0.02)
    press(page, "\ue00c")
    assert js(page, "return one('#tip').hidden && all('.token.at').length === 0")
    js(page, "all('.token')[1].dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))")
    assert js(page, "return !one('#tip').hidden && one('#tip code').textContent") == '"\\n"'


def test_tables_and_calls_in_the_page(page, tmp_path):
    swarm = page_of(made_up.swarm(tmp_path))
    open_page(page, swarm)
    assert text(page, "#headline th") == "mean reward (dev)"
    assert {"up", "down"} <= set(texts(page, "#tables td.up, #tables td.down"))
    assert js(page, "return one('#prompt details').open") is False  # rules and tools: folded
    assert len(texts(page, "#samples article:last-child .calls li")) == 25
    js(page, "one('#tables a').click()")
    wait(page, "return document.querySelectorAll('#samples article').length === 1")
    best = next(t for t in load(swarm)[0]["tables"] if t["title"] == "The best episode")
    scenario = text(page, "#tasks [aria-selected=true] p").split()[1].strip(":")
    assert best["text"][0].startswith(f"Scenario {scenario} earned")
    assert text(page, "#samples h3").endswith(f"reward {float(best['rows'][0][1]):.3g}")
