"""Protects docs/live: that its JavaScript computes what torch computes, that its numbers and links are right, and that it is a page.

A few tasks each; `python -m lab.live_check` asks the same of 64. Where there is no Chromium, the half that needs one
is skipped, with the reason.
"""

import base64
import json
import re
import string
from dataclasses import asdict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import env_letters
from fast.sampler import TorchSampler
from lab import live, live_check
from policy import PICO, encode, load_policy
from rollout import prompt_ids

INDEX = (live.PAGE / "index.html").read_text()
RUN = json.loads((live.PAGE / "data" / "run.js").read_text().removeprefix("var LIVE = ").split(";\nLIVE.adapters")[0])
HOSTILE = "<img src=x onerror=\"window.hacked='typed'\"></script><script>window.hacked='ran'</script>"


@pytest.fixture(scope="module")
def policy():
    return load_policy(str(PICO), 32, 64, "cpu", 0)


@pytest.fixture(scope="module")
def sampler(policy):
    return TorchSampler(policy)


@pytest.fixture(scope="module")
def chromium(chromium):
    live_check.open_page(chromium)
    return chromium


# ------------------------------------------------------------------------------------------------ the files


def test_each_link_names_the_line_that_it_shows():
    """If this fails after a chapter has changed: python -m lab.live --lines"""
    assert live.with_lines(INDEX) == INDEX
    assert len(live.LINK.findall(INDEX)) == INDEX.count("data-line=") >= 15  # none is written so that nobody looks at it
    with pytest.raises(SystemExit, match="grpo.py has 0 lines with 'no such line'"):
        live.with_lines('<a data-line="no such line" href="../../grpo.py#L1">grpo.py:1</a>')


def test_other_links_lead_somewhere_inside_the_repository():
    for link in set(re.findall(r'(?:href|src)="([^"]*)"', INDEX)) - {"data:,"}:
        assert (live.PAGE / link.split("#")[0]).resolve().is_file(), link
    code = INDEX + "".join((live.PAGE / file).read_text() for file in ("model.js", "page.js"))
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", code) and "innerHTML" not in code


def test_the_page_is_small_and_its_numbers_are_those_of_its_run(policy):
    assert sum(file.stat().st_size for file in live.PAGE.rglob("*")) < 8e6
    tasks = live.tasks_of(live_check.new_env, live.TASKS)
    assert RUN["tasks"] == [[text, "".join(letters)] for _, text, letters, _ in tasks]
    names = [stop["name"] for stop in RUN["stops"]]
    assert names == ["base", *(f"{update:04}" for update in live.SHOWN)]
    assert {file.stem for file in (live.PAGE / "data").iterdir()} == {*names, "run"}
    for stop in RUN["stops"]:
        assert stop["n"] == 256 and stop["low"] <= stop["exact"] <= stop["high"]
        assert sum(stop[habit] for habit in live.HABITS) == pytest.approx(1, abs=1e-3)
    learn = sum(p.numel() for p in policy.trainable().values())
    assert f"{learn:,} weights" in INDEX and f"its {policy.lm.config.vocab_size} tokens" in INDEX.replace("\n", " ")
    assert "tier 6 | yes | sampled | derives | 13.3% | 97.1%" in (PICO / "README.md").read_text()
    assert "13% of its samples, and 97% of those" in INDEX.replace("\n", " ")


def test_rounding_is_at_most_half_a_step_and_the_files_are_read_back_as_they_were_written(policy):
    rng = torch.Generator().manual_seed(0)
    adapter = {name.replace(".default", ""): torch.randn(p.shape, generator=rng) for name, p in policy.trainable().items()}
    some = next(iter(adapter))
    adapter[some][3] = 0  # a direction that has not learnt anything
    shipped = live.as_shipped(adapter)
    for name, (scales, A, B) in live.rounded(adapter).items():
        key = f"base_model.model.{live.long_name(name)}.lora_"
        assert np.abs(A).max() <= 127 and np.abs(B).max() <= 127
        for part, scale in (("A", scales[: len(A), None]), ("B", scales[None, len(A) :])):
            gap = (shipped[f"{key}{part}.weight"] - adapter[f"{key}{part}.weight"]).abs().numpy()
            assert (gap <= 0.501 * scale).all()


@pytest.mark.parametrize(
    "change, why",
    [
        (None, "it is no run folder; check the path"),
        ({"lora_rank": 8}, "cannot show a run with lora_rank 8"),
        ({"env": "alphabet"}, "cannot show a run with env 'alphabet'"),
        ({"model": "Qwen/Qwen3-0.6B"}, "it must be pico_base"),
        ({}, "it has no checkpoint yet"),
    ],
)
def test_a_run_that_the_page_cannot_show_is_refused_in_one_sentence(tmp_path, change, why):
    if change is not None:
        (tmp_path / "config.json").write_text(json.dumps(asdict(live_check.config()) | change))
    with pytest.raises(SystemExit, match=why):
        live.snapshots_of(tmp_path)


def test_train_keeps_a_copy_of_each_snapshot_and_changes_nothing_else(policy, tmp_path, monkeypatch):
    """A run of train.py with the policy's weights set by hand, which saves after each of these updates."""
    saves, real = (0, 2, 29, 31, 40), live.records.save_checkpoint

    def run(cfg, typed):
        assert (cfg.env, cfg.difficulty, cfg.seed, cfg.updates, cfg.lr) == ("letters", 6, 0, None, None)  # train.py's own
        for update in saves:
            next(iter(policy.trainable().values())).data.fill_(update)
            live.records.save_checkpoint(tmp_path / cfg.name / "checkpoint", policy, None, {"update": update})
        return tmp_path / cfg.name

    (tmp_path / "again").mkdir()
    monkeypatch.setattr(live.recipe, "train", run)
    kept = live.train("again") / "snapshots"
    assert [file.stem for file in sorted(kept.iterdir())] == ["0000", "0002", "0029", "0040"]  # 31 is neither early nor round
    name = next(iter(policy.trainable())).replace(".default", "")
    assert [load_file(file)[name].unique().tolist() for file in sorted(kept.iterdir())] == [[0], [2], [29], [40]]
    assert live.records.save_checkpoint is real


# ------------------------------------------------------------------------------------------------ the same numbers


def test_tokens_are_those_of_the_tokenizer(chromium, policy):
    odd = "naïve 🙂🙂 \t\x00 <think>a</think> <|im_end|> <0x41> 東京 ﬁ resources task_12 ' // new name!' " + string.printable
    texts = [odd, "", "strawberry", 'Count the letters a, n in "banana".', HOSTILE, '", "arguments": {"task_id": "task_1"']
    ours = live_check.ask(chromium, "return a[0].map((t) => m.tok.encode(t));", texts)
    assert ours == [encode(policy, text) for text in texts]
    back = live_check.ask(chromium, "return a[0].map((ids) => m.tok.decode(ids));", [*ours, [11 + 0xF0, 11 + 0x9F, 50 + 300]])
    assert back == [policy.tokenizer.decode(ids) for ids in [*ours, [11 + 0xF0, 11 + 0x9F, 50 + 300]]]
    for text, letters in (("ba<|im_end|>nana", ("a", "n")), ("banana", ("a",))):
        task = env_letters.Task(text, letters, (0,) * len(letters))
        asked = [{"role": "user", "content": env_letters.question(task, think=True)}]
        ids = live_check.ask(chromium, "return m.tok.prompt(m.question(a[0], a[1]));", text, list(letters))
        assert ids == prompt_ids(policy, asked, None, True)


REPLIES = [
    "", "<answer>", '<answer>{"a": 3, "q": 0}</answer>', '<think>\nb a1 n a2 n a3\n</think>\n<answer>{"a": 3, "q": 0}</answer>',
    '<think>x</think><answer>{"a": 3, "q": 0}</answer><answer>1</answer>', '<answer>{"a": 3, "q": 0, "a": 3}</answer>',
    '<answer>{"a": 3.0, "q": 0}</answer>', '<answer>{"a": 3, "q": 0e0}</answer>', '<answer>{"a": 3, "q": true}</answer>',
    '<answer>{"a": 3, "q": "0"}</answer>', '<answer>[["a", 3], ["q", 0]]</answer>', '<answer>{"\\u0061": 3, "q": 0}</answer>',
    '<answer>{"a": 3}</answer>', '<answer>{"a": 3, "q": 0, "z": 0}</answer>', '<answer>{"a": 3, "q": -0}</answer>',
    '<think>one<think>two</think><answer>{"a": 3, "q": 0}</answer>', '<think>never ends <answer>{"a": 3, "q": 0}</answer>',
    '</think><think><answer>{"a": 3, "q": 0}</answer>', '<answer>\n {"a": 3, "q": 0}\x1f</answer>', '<answer>{"a": NaN, "q": 0}</answer>',
    '<answer>{"a": {"b": 1}, "q": 0, "a": 3}</answer>', '<answer>{"__proto__": 1, "a": 3, "q": 0}</answer>', "<answer>null</answer>",
    "<think>\nLet me count. a occurs 3 times.\n</think>\n<answer>3</answer>", "<answer> 3 </answer>", "<answer>0000003</answer>",
    "<answer>٣</answer>", "<answer>3</answer>", "<think>b, a1. c2: word more</think>", "<think>b\x1fa1\x85n</think>", "</answer>3<answer>",
]  # fmt: skip


def test_the_reward_and_the_habit_are_those_of_the_environment(chromium):
    ours = live_check.ask(chromium, "return a[0].map((r) => [['a', 'q'], ['a']].map((l) => m.score('banana', l, r)));", REPLIES)
    for reply, (several, single) in zip(REPLIES, ours):
        for found, task in ((several, env_letters.Task("banana", ("a", "q"), (3, 0))), (single, env_letters.Task("banana", ("a",), (3,)))):
            theirs = env_letters.score_reply(task, reply, "binary", think=True)
            assert (found["reward"], found["format"]) == (theirs["reward"], theirs["format"]), reply
            assert theirs[f"habit_{found['habit']}"] == 1, reply


@pytest.mark.parametrize("name", ["base", "0012", "0150"])
def test_logits_greedy_replies_and_samples_are_those_of_torch(chromium, policy, sampler, name):
    shipped = live_check.weights_in(chromium, name)
    live.put(policy, shipped)
    theirs = live_check.greedy_in_torch(policy, sampler, 1)
    for (_, text, letters, _), episode in zip(live.tasks_of(live_check.new_env, 1), theirs):
        ours = live_check.spoken_in(chromium, name, text, letters)
        assert ours["prompt"] + ours["replies"][0] == episode.token_ids
    assert live_check.logits_gap(chromium, policy, name, theirs[0].token_ids) < 1e-3
    if name == "0012":  # where replies differ most; the same random numbers give the same replies
        assert live_check.drawn_alike(chromium, policy, sampler, name, live.tasks_of(live_check.new_env, 1)[0], k=4) == 4


def test_a_step_is_that_of_grpo_update(chromium, policy):
    """Two, on the same samples: in the second the ratio is not 1, and Adam has moments. A step that did nothing would have a share of 1."""
    task = (0, "hqzxkhvnzbwqr", tuple("hqzka"), None)  # a short one
    found = live_check.step_gap(chromium, policy, "0012", task, lr=3e-4, steps=2, k=4)
    assert found["advantages"] < 1e-6 and found["gradient"] < 1e-3
    assert max(found["adapter"]) < 1e-3 and max(found["share"]) < 5e-3 and max(found["stats"]) < 1e-4


# ------------------------------------------------------------------------------------------------ a page for a person


def text_of(browser, selector: str) -> str:
    return browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def keys(browser, *some: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser, duration=0).send_keys(*some).perform()


def answered(browser, stop: int) -> None:
    live_check.wait(browser, f"return document.querySelector('#reply').dataset.done === stops[{stop}].name")


def at_the_page(browser) -> None:
    """Open the committed page, if it is not the one that stands there, with its worker."""
    elsewhere = "return typeof inWorker === 'undefined' || !inWorker || location.href !== arguments[0]"
    if browser.execute_script(elsewhere, (live.PAGE / "index.html").as_uri()):
        live_check.open_page(browser)


def ask(browser, text: str, letters: str) -> None:
    """Type a question, and wait for the answer."""
    code = "for (const [id, v] of [['#text', arguments[0]], ['#letters', arguments[1]]]) {"
    code += "const e = document.querySelector(id); e.value = v; e.dispatchEvent(new Event('input')); }"
    live_check.wait(browser, "return document.querySelector('#reply').dataset.done")
    browser.execute_script("delete document.querySelector('#reply').dataset.done;" + code, text, letters)
    live_check.wait(browser, f"return document.querySelector('#reply').dataset.done && task.text === {json.dumps(text)}")


def test_it_slides_by_keyboard_and_tells_of_each_token(chromium):
    from selenium.webdriver.common.keys import Keys

    at_the_page(chromium)
    chromium.execute_script("document.querySelector('#slider').focus()")
    keys(chromium, Keys.END)
    answered(chromium, len(RUN["stops"]) - 1)
    assert text_of(chromium, "#moment") == "after update 150 of 150" and text_of(chromium, "#verdict").startswith(
        "Exactly right. It spells it out."
    )
    last = RUN["stops"][-1]
    assert text_of(chromium, "#exact") == f"{last['exact']:.1%} [{100 * last['low']:.1f}, {100 * last['high']:.1f}]"
    chromium.find_elements("css selector", ".token")[0].click()
    assert text_of(chromium, "#token").startswith("Token 1: <think> has probability 99.9")
    keys(chromium, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert text_of(chromium, "#token").startswith("Token 3: ") and "At update 60 it had " in text_of(chromium, "#token")
    assert chromium.get_log("browser") == []


def test_what_a_person_types_stays_text(chromium):
    at_the_page(chromium)
    ask(chromium, HOSTILE, '<>"a')
    assert "<" in text_of(chromium, "#verdict") and chromium.execute_script("return document.querySelector('#unusual').hidden") is False
    chromium.execute_script(
        "reply.clear(); tokens.encode(arguments[0]).forEach((id) => reply.push({ id, logp: -1 })); reply.choose(0)", HOSTILE
    )
    assert text_of(chromium, "#reply") == HOSTILE
    assert chromium.execute_script("return [window.hacked ?? null, document.images.length]") == [None, 0]
    assert chromium.get_log("browser") == []


def test_a_person_is_the_reward_and_can_undo_it(chromium):
    live_check.open_page(chromium, width=390)
    ask(chromium, "abacab", "abc")  # a short question, for short replies
    click = lambda selector: chromium.execute_script("document.querySelector(arguments[0]).click()", selector)
    rest = lambda: live_check.wait(chromium, "return !busy && group?.replies")
    click("#draw")
    rest()
    chromium.execute_script("group.cards.forEach((card) => { if (card.good) card.button.click(); })")  # nothing is good
    assert chromium.execute_script("return [one('#step').disabled, one('#auto').checked]")[0] is True
    assert "there is nothing to learn" in text_of(chromium, "#signal")
    click(".card .thumb")
    advantages = chromium.execute_script("return group.cards.map((card) => card.advantage.textContent)")
    assert advantages == ["advantage +2.65"] + ["advantage -0.38"] * 7  # (1 - 1/8) and (0 - 1/8), over the deviation
    before = chromium.execute_script("return group.replies.map((r) => r.ids)")
    click("#step")
    live_check.wait(chromium, "return !busy && history.length === 2")
    cells = chromium.execute_script("return [...document.querySelectorAll('#steps tbody td')].map((e) => e.textContent)")
    assert cells[:4] == ["1", "0.13", "0.0000", "1.000"] and float(cells[6]) > 0 > float(cells[7])  # good up, bad down
    click("#undo")
    live_check.wait(chromium, "return !busy && history.length === 1")
    assert text_of(chromium, "#since") == "No step from the base"
    click("#reset")
    live_check.wait(chromium, "return !busy && history.length === 0")
    click("#draw")
    rest()
    assert chromium.execute_script("return group.replies.map((r) => r.ids)") == before  # the same seed, the same replies
    wide = chromium.execute_script("return document.documentElement.scrollWidth")
    assert wide <= 390, "it scrolls sideways on a phone"
    outside = chromium.execute_script(
        "return performance.getEntriesByType('resource').map((e) => e.name).filter((n) => !/^(file|blob):/.test(n))"
    )
    assert outside == [] and chromium.get_log("browser") == []


@pytest.mark.parametrize("refusal", ["throw new Error('no workers here')", "setTimeout(() => this.onerror(new Event('error')), 0)"])
def test_without_a_worker_the_page_computes_by_itself(chromium, refusal):
    """Some browsers allow a page from disk no worker, and say so at once or later."""
    source = f"window.Worker = class {{ constructor() {{ {refusal} }} postMessage() {{}} }};"
    script = chromium.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    try:
        live_check.open_page(chromium)
        ask(chromium, "banana", "an")
        assert "in the page itself" in text_of(chromium, "#facts") and text_of(chromium, "#reply").endswith("■")
    finally:
        chromium.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def test_a_run_with_a_final_checkpoint_only_has_two_stops(chromium, policy, tmp_path, monkeypatch):
    cfg = live_check.config()
    run = tmp_path / "mine"
    policy.model.save_pretrained(run / "checkpoint", safe_serialization=True)
    (run / "checkpoint" / "state.json").write_text('{"update": 7}')
    (run / "config.json").write_text(json.dumps(asdict(cfg) | {"updates": 7, "seed": 3, "name": "mine"}))
    assert [*live.snapshots_of(run)] == [7]
    monkeypatch.setattr(live, "SAMPLED", 1)
    live.write(run, run / "live", eval_n=2)
    live_check.open_page(chromium, run / "live" / "index.html")
    answered(chromium, 0)
    chromium.execute_script("goTo(1)")
    answered(chromium, 1)
    assert text_of(chromium, "#moment") == "after update 7 of 7" and "The run: mine, letters, tier 6, seed 3" in text_of(chromium, "#facts")
    link = chromium.execute_script("return document.querySelector('[data-line]').href")
    assert link.startswith((live.ROOT / "env_letters.py").as_uri())
    saved = live.as_shipped(load_file(run / "checkpoint" / "adapter_model.safetensors"))
    shipped = live_check.weights_in(chromium, "0007")
    assert all(torch.equal(saved[key], shipped[key]) for key in saved)
    assert len(base64.b64decode((run / "live" / "data" / "0007.js").read_text().split('"')[3])) == 311_296 + 28 * 64 * 4
