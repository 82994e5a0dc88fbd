"""Protects docs/live: its JavaScript computes what torch computes, its numbers and links are right,
and a person can use it. Without Chromium, the half that needs one is skipped, with the reason."""

import base64
import html
import json
import re
import shutil
import string
import subprocess

import numpy as np
import pytest
import torch

import browser
import env_letters
import settings
from chat import encode, prompt_ids
from fast.sampler import TorchSampler
from grpo import compute_advantages, update
from lab import live
from policy import PICO, adam, load_policy
from rollout import Episode

INDEX = (live.PAGE / "index.html").read_text()
DATA = (live.PAGE / "data" / "run.js").read_text().removeprefix("var LIVE = ")
RUN = json.loads(DATA.split(";\nLIVE.adapters")[0])
CFG = settings.Config(
    sft_style="states", difficulty=6, max_tokens=320, micro_tokens=8192, importance="clip"
)
HOSTILE = (
    "<img src=x onerror=\"window.hacked='typed'\"></script><script>window.hacked='ran'</script>"
)
# What the tests call in the page: `m` is the model, `a` the arguments. Floats travel as base64.
HELP = """
const m = window.checked ??= (() => {
  const m = pico();
  m.tok = m.tokenizer(LIVE.tokenizer);
  m.base = m.unpackBase(LIVE.base, LIVE.entries);
  m.ints = (n, f) => Int32Array.from({ length: n }, (_, i) => f(i));
  m.text = (floats) => {
    const bytes = new Uint8Array(floats.buffer, floats.byteOffset, floats.byteLength);
    let s = "";
    for (let i = 0; i < bytes.length; i += 8192)
      s += String.fromCharCode(...bytes.subarray(i, i + 8192));
    return btoa(s);
  };
  m.packed = (x) => x && m.LINEAR.map((n) => [n, m.text(x[n].A), m.text(x[n].B)]);
  m.adapterOf = async (name) => {
    if (name === "base") return null;
    await script(name);
    return m.unpackAdapter(LIVE.adapters[name]);
  };
  return m;
})();
"""


@pytest.fixture(scope="module")
def policy():
    return load_policy(str(PICO), 32, 64, "cpu", 0)


@pytest.fixture(scope="module")
def page(chromium):
    browser.open_page(chromium, live.PAGE / "index.html")
    return chromium


def call(page, code: str, *arguments):
    """What an async function of the page returns."""
    body = f"""
      const a = [...arguments], go = a.pop();
      (async () => {{ {HELP} {code} }})().then(go, (e) => go({{failed: String(e.stack)}}));"""
    found = page.execute_async_script(body, *arguments)
    assert not (isinstance(found, dict) and "failed" in found), found
    return found


def floats(text: str, *shape: int) -> torch.Tensor:
    return torch.tensor(np.frombuffer(base64.b64decode(text), np.float32)).view(shape)


def adapter_of(rows: list | None) -> dict[str, torch.Tensor] | None:
    """[[matrix, A, B], …] as base64 -> {PEFT's name: weight}."""
    found = {}
    for name, a, b in rows or []:
        found |= dict(zip(live.lora_names(name), (floats(a, 32, -1), floats(b, -1, 32))))
    return found or None


def spoken(page, name: str, text: str, letters: str, uniforms=()) -> dict:
    """{prompt, replies, logps} of the page: greedy, or k drawn by uniforms [k, max_tokens]."""
    code = """
      const [name, text, letters, uniforms, maxTokens] = a;
      const prompt = m.tok.prompt(m.question(text, letters)), stop = m.tok.stop;
      const w = m.fold(m.base, await m.adapterOf(name)), temperature = Number(uniforms.length > 0);
      const uniform = uniforms.map((row) => { let t = 0; return () => row[t++]; });
      const how = { temperature, maxTokens, stop, uniform };
      const replies = await m.sample(w, prompt, Math.max(1, uniforms.length), how);
      return { prompt, replies: replies.map((r) => r.ids), logps: replies.map((r) => r.logps) };"""
    return call(page, code, name, text, list(letters), list(uniforms), CFG.max_tokens)


# ------------------------------------------------------------------------------- the files
def test_each_link_to_code_has_a_line_of_its_file_as_its_title():
    links = re.findall(r'<a\s+title="([^"]*)"\s+href="\.\./\.\./([\w/]+\.py)">\2</a>', INDEX)
    assert len(links) == INDEX.count("title=") >= 15
    for line, file in links:
        assert (live.ROOT / file).read_text().count(html.unescape(line)) == 1, (file, line)


def test_it_asks_no_server_and_what_a_person_types_is_never_html():
    files = ("model.js", "page.js", "picture.js")
    code = INDEX + "".join((live.PAGE / file).read_text() for file in files)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", code) and "innerHTML" not in code


def test_its_data_are_those_of_its_run(policy):
    assert RUN["tasks"] == live.tasks_of(lambda: settings.make_env(CFG, 6))
    names = [stop["name"] for stop in RUN["stops"]]
    assert names == ["base", *(f"{update:04}" for update in live.SHOWN)]
    assert {file.stem for file in (live.PAGE / "data").iterdir()} == {*names, "run"}
    assert f"{sum(p.numel() for p in policy.trainable().values()):,} weights" in INDEX


def test_the_pages_data_are_made_of_a_run(tmp_path, monkeypatch, policy):
    """Of a run whose weights are set by hand: a copy is kept of what the slider shows."""

    def run(cfg, typed):
        folder = tmp_path / cfg.name
        for n in (0, 2, 4):
            next(iter(policy.trainable().values())).data.fill_(n)
            live.folder.save_checkpoint(folder / "checkpoint", policy, None, {"updates": n})
        (folder / "config.json").write_text(json.dumps(vars(cfg) | {"max_tokens": 320}))
        machine = {"commit": "c", "torch": "t", "transformers": "f", "python": "p"}
        (folder / "summary.json").write_text(json.dumps({"machine": machine}))
        (folder / "metrics.jsonl").write_text(json.dumps({"update": 1, "exact": 0.5}))
        return folder

    monkeypatch.setattr(live.recipe, "train", run)
    monkeypatch.setattr(live, "EXACT", 2)
    (tmp_path / "live-0").mkdir()
    data = tmp_path / "data"
    live.write(live.train_run(), data)
    assert {file.stem for file in data.iterdir()} == {"base", "0000", "0004", "run"}
    assert (data / "base.js").read_bytes() == (live.PAGE / "data" / "base.js").read_bytes()


def test_readmes_picture_is_what_make_draws_of_these_data(tmp_path):
    """The same words in the same places; another Chromium may round a colour elsewhere."""
    if not shutil.which("chromium"):
        pytest.skip("Chromium is not installed: apt-get install chromium")
    file = tmp_path / "group.svg"
    command = ["make", "picture", f"PICTURE={file}"]
    subprocess.run(command, cwd=live.ROOT, check=True, capture_output=True)
    drawn, kept = file.read_text(), (live.PAGE / "group.svg").read_text()
    number = re.compile(r'opacity="([\d.]+)"')
    assert number.sub("", drawn) == number.sub("", kept)
    shares = [np.array(number.findall(text), float) for text in (drawn, kept)]
    assert len(shares[0]) >= 20 and np.abs(shares[0] - shares[1]).max() < 0.02


def test_readmes_picture_is_a_small_image_that_can_stand_still_and_is_described():
    kept = (live.PAGE / "group.svg").read_text()
    assert len(kept.encode()) < 50_000 and not re.search("<script|<image|@import|url\\(", kept)
    assert "prefers-reduced-motion" in kept and "prefers-color-scheme: dark" in kept
    (words,) = re.findall(
        r"!\[(.+?)\]\(docs/live/group\.svg\)", (live.ROOT / "README.md").read_text()
    )
    assert "strawberry" in words and len(words.split()) > 10


# ------------------------------------------------------------------------------- the same numbers
def test_tokens_are_those_of_the_tokenizer(page, policy):
    odd = "naïve 🙂🙂 \t\x00 <think>a</think> <|im_end|> <0x41> 東京 ﬁ task_12 ' // new name!' "
    texts = [odd + string.printable, "", "strawberry", HOSTILE, '", "arguments": {"task_id": "']
    ours = call(page, "return a[0].map((t) => m.tok.encode(t));", texts)
    assert ours == [encode(policy, text) for text in texts]
    ids = [*ours, [11 + 0xF0, 11 + 0x9F, 50 + 300]]
    back = call(page, "return a[0].map((ids) => m.tok.decode(ids));", ids)
    assert back == [policy.tokenizer.decode(one) for one in ids]
    task = env_letters.Task("ba<|im_end|>nana", ("a", "n"), (0, 0))
    asked = [{"role": "user", "content": env_letters.question(task, think=True)}]
    code = "return m.tok.prompt(m.question(a[0], a[1]));"
    assert call(page, code, task.text, list(task.letters)) == prompt_ids(policy, asked, None, True)


REPLIES = r"""
<answer>|<answer>{"a": 3, "q": 0}</answer>|<think> b a1 n a2 n a3 </think><answer>{"a": 3, "q": 0}</answer>
<think>x</think><answer>{"a": 3, "q": 0}</answer><answer>1</answer>|<answer>{"a": 3, "q": 0, "a": 3}</answer>
<answer>{"a": 3.0, "q": 0}</answer>|<answer>{"a": 3, "q": 0e0}</answer>|<answer>{"a": 3, "q": true}</answer>
<answer>{"a": 3, "q": "0"}</answer>|<answer>[["a", 3], ["q", 0]]</answer>|<answer>{"\u0061": 3, "q": 0}</answer>
<answer>{"a": 3}</answer>|<answer>{"a": 3, "q": 0, "z": 0}</answer>|<answer>{"a": 3, "q": -0}</answer>
<think>one<think>two</think><answer>{"a": 3, "q": 0}</answer>|<think>never ends <answer>{"a": 3, "q": 0}</answer>
</think><think><answer>{"a": 3, "q": 0}</answer>|<answer>{"a": NaN, "q": 0}</answer>|<answer>null</answer>
<answer>{"a": {"b": 1}, "q": 0, "a": 3}</answer>|<answer>{"__proto__": 1, "a": 3, "q": 0}</answer>
<think>Let me count. a occurs 3 times.</think><answer>3</answer>|<answer> 3 </answer>|<answer>0000003</answer>
<answer>٣</answer>|<answer>3</answer>|<think>b, a1. c2: word more</think>|</answer>3<answer>"""


def test_the_reward_and_the_habit_are_those_of_the_environment(page):
    replies = ["", "<think>b\x1fa1\x85n</think>", *re.split(r"[\n|]", REPLIES)]
    for task in [
        env_letters.Task("banana", ("a", "q"), (3, 0)),
        env_letters.Task("banana", ("a",), (3,)),
    ]:
        code = "return a[0].map((r) => m.score('banana', a[1], r));"
        for reply, found in zip(replies, call(page, code, replies, list(task.letters))):
            theirs = env_letters.score_reply(task, reply, "binary", think=True)
            assert [found[x] for x in ("reward", "format")] == [theirs["reward"], theirs["format"]]
            assert theirs[f"habit_{found['habit']}"] == 1, reply


@pytest.mark.parametrize("name", ["base", "0012", "0150"])
@torch.no_grad()
def test_logits_greedy_replies_and_samples_are_those_of_torch(page, policy, name):
    live.put(policy, adapter_of(call(page, "return m.packed(await m.adapterOf(a[0]));", name)))
    sampler, task = TorchSampler(policy), RUN["tasks"][0]
    sampler.sync()
    said = spoken(page, name, *task)
    keys = [(5, i) for i in range(4)]
    ((greedy,),) = sampler.sample([said["prompt"]], 1, CFG.max_tokens, 0.0, [keys[:1]])
    assert said["replies"] == [greedy.token_ids]
    ids = said["prompt"] + greedy.token_ids
    code = """
      const ids = a[1], N = ids.length, w = m.fold(m.base, await m.adapterOf(a[0]));
      const zero = m.ints(N, () => 0), at = m.ints(N, (i) => i);
      const step = { ids: m.ints(N, (i) => ids[i]), place: at, position: at, begin: zero, shared: zero };
      return m.text(m.head(w, m.forward(w, step, m.newCache(N)), N));"""
    ours, theirs = call(page, code, name, ids), policy.model(input_ids=torch.tensor([ids])).logits
    assert (floats(ours, len(ids), -1) - theirs[0]).abs().max() < 1e-3  # [T, V]
    # the same random numbers give the same replies
    (drawn,) = sampler.sample([said["prompt"]], 4, CFG.max_tokens, 1.0, [keys])
    uniforms = [
        np.random.default_rng(key).random(CFG.max_tokens).astype("f").tolist() for key in keys
    ]
    assert spoken(page, name, *task, uniforms)["replies"] == [one.token_ids for one in drawn]


def test_a_step_is_that_of_grpo_update(page, policy):
    """Two on the same samples: in the second the ratio is not 1, and Adam has moments. Compared is
    how far both are apart, as a share of what the steps have changed."""
    uniforms = np.random.default_rng(3).random((4, CFG.max_tokens)).tolist()
    said = spoken(page, "0012", "hqzxkhvnzbwqr", "hqzka", uniforms)
    rewards, lr = [1.0, 0.0, 1.0, 0.0], 3e-4
    code = """
      const [prompt, ids, logps, rewards, lr] = a, adam = m.newAdam();
      const adapter = await m.adapterOf("0012"), advantages = m.groupAdvantages(rewards);
      const replies = ids.map((x, i) => ({ ids: x, logps: logps[i] })), found = [m.packed(adapter)];
      for (let i = 0; i < 2; i++) {
        const g = m.grpoGradient(m.base, adapter, prompt, replies, advantages);
        const norm = m.adamStep(adapter, g.gradient, adam, lr);
        found.push([[norm, g.loss, g.ratio], m.packed(adapter)]);
      }
      return [advantages, ...found];"""
    P, given = said["prompt"], (said["replies"], said["logps"])
    advantages, before, *steps = call(page, code, P, *given, rewards, lr)
    before = adapter_of(before)
    live.put(policy, before)
    optimizer, group = adam(policy, lr), []
    for reply, logps, reward in zip(*given, rewards):
        sampled = [False] * len(P) + [True] * len(reply)
        logps = [0.0] * len(P) + logps
        group.append(Episode(0, 0, P + reply, sampled, logps, turns=1, reward=reward))
    compute_advantages([group], CFG)
    assert advantages == pytest.approx([e.advantages[0] for e in group], abs=1e-6)
    flat = lambda weights: torch.cat([weights[name].detach().flatten() for name in sorted(weights)])
    for numbers, adapter in steps:
        with policy.learning():
            stats = update(policy, optimizer, group, CFG)
        ratio = sum(found["ratio"].sum().item() for _, found in stats.epochs[0])
        ratio /= sum(e.reply_tokens for e in group)
        assert numbers[0] == pytest.approx(stats.grad_norm, abs=1e-4)
        assert numbers[1:] == pytest.approx([stats.loss, ratio], abs=1e-5)
        mine = flat({key.replace(".default", ""): p for key, p in policy.trainable().items()})
        gap, moved = mine - flat(adapter_of(adapter)), mine - flat(before)
        assert gap.norm() < 5e-3 * moved.norm() and gap.abs().max() < 1e-3


# ------------------------------------------------------------------------------- for a person
def ask(page, text: str, letters: str) -> None:
    """Type a question, and wait for the answer."""
    done = "return document.querySelector('#reply').dataset.done"
    code = """
      delete document.querySelector('#reply').dataset.done;
      for (const [id, v] of [['#text', arguments[0]], ['#letters', arguments[1]]]) {
        const e = document.querySelector(id);
        e.value = v;
        e.dispatchEvent(new Event('input'));
      }"""
    browser.wait(page, done)
    page.execute_script(code, text, letters)
    browser.wait(page, f"{done} && task.text === {json.dumps(text)}")


def test_it_slides_by_keyboard_and_tells_of_each_token(chromium):
    from selenium.webdriver.common.keys import Keys

    browser.open_page(chromium, live.PAGE / "index.html")
    chromium.execute_script("document.querySelector('#slider').focus()")
    browser.press(chromium, Keys.END)
    browser.wait(
        chromium, "return document.querySelector('#reply').dataset.done === stops.at(-1).name"
    )
    assert browser.text(chromium, "#moment") == "after update 150 of 150"
    assert browser.text(chromium, "#verdict").startswith("Exactly right. It spells it out.")
    last = RUN["stops"][-1]
    ends = f"[{100 * last['low']:.1f}, {100 * last['high']:.1f}]"
    assert browser.text(chromium, "#exact") == f"{last['exact']:.1%} {ends}"
    chromium.find_elements("css selector", ".token")[0].click()
    assert browser.text(chromium, "#token").startswith("Token 1: <think> has probability 99.9")
    ask(chromium, HOSTILE, '<>"a')  # what a person types stays text
    code = """
      reply.clear();
      for (const id of tokens.encode(arguments[0])) reply.push({ id, logp: -1, others: [] });
      reply.choose(0);"""
    chromium.execute_script(code, HOSTILE)
    assert "<" in browser.text(chromium, "#verdict") and browser.text(chromium, "#reply") == HOSTILE
    hacked = "return [window.hacked ?? null, document.images.length]"
    assert chromium.execute_script(hacked) == [None, 0] and chromium.get_log("browser") == []


def test_a_person_is_the_reward_and_can_undo_it(chromium):
    browser.open_page(chromium, live.PAGE / "index.html", width=390)
    ask(chromium, "abacab", "abc")  # a short question, for short replies
    do = lambda code: browser.js(chromium, code)
    click = lambda selector: do(f"one('{selector}').click()")
    until = lambda code: browser.wait(chromium, f"return !busy && {code}")
    click("#draw")
    until("group?.replies")
    do("group.cards.forEach((card) => { if (card.good) card.button.click(); })")  # nothing is good
    assert do("return one('#step').disabled")
    assert "there is nothing to learn" in browser.text(chromium, "#signal")
    click(".card .thumb")
    advantages = do("return group.cards.map((card) => card.advantage.textContent)")
    # (1 - 1/8) and (0 - 1/8), over the deviation
    assert advantages == ["advantage +2.65"] + ["advantage -0.38"] * 7
    click("#step")
    until("history.length === 2")
    cells = browser.texts(chromium, "#steps tbody td")
    assert cells[:4] == ["1", "0.13", "0.0000", "1.000"]
    assert float(cells[6]) > 0 > float(cells[7])  # good up, bad down
    click("#undo")
    until("history.length === 1")
    assert do("return document.documentElement.scrollWidth") <= 390, "it scrolls on a phone"
    assert chromium.get_log("browser") == []
