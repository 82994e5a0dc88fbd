"""Does docs/live compute what torch computes? In headless Chromium, as tests/test_live.py asks it.

    python -m lab.live_check            # 64 tasks, five minutes; results/live.md has what it found

Both sides get the same numbers: the base in bfloat16, and of each snapshot the adapter as it is
shipped, in int8. Compared are the ids of the prompts, logits, greedy replies, replies drawn with
the same random numbers, and the adapter after steps of GRPO on the same samples.
"""

import base64
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import tyro

import settings
from bookkeeping import presets, refusals
from fast.sampler import TorchSampler
from grpo import advantages_of, update
from lab import live
from policy import PICO, Policy, adam, load_policy
from rollout import Episode, play, prompt_ids

CHROMIUM = "headless no-sandbox disable-gpu disable-quic no-first-run disable-sync"
CHROMIUM += " disable-background-networking disable-component-update"
# What the code below calls in the page. Floats travel as base64.
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
  m.adapterOf = async (name) => {
    if (name === "base") return null;
    await script(name);
    return m.unpackAdapter(LIVE.adapters[name]);
  };
  return m;
})();
"""


class Missing(Exception):
    """There is no browser here, told in one line."""


@contextmanager
def chromium():
    """A selenium driver of headless Chromium. Raises Missing."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (program and driver):
        raise Missing("Chromium is not installed: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = program
        for flag in (*CHROMIUM.split(), f"user-data-dir={profile}"):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        browser = webdriver.Chrome(options, Service(driver))
        browser.set_script_timeout(900)
        try:
            yield browser
        finally:
            browser.quit()


def open_page(browser, page: Path = live.PAGE / "index.html", width: int = 1280) -> None:
    """Open it as a person would from disk, and wait until the model is ready to speak."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(page.resolve().as_uri())
    wait(browser, "return document.documentElement.dataset.ready")


def wait(browser, code: str, seconds: float = 30):
    """Ask until it is true."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, seconds, 0.02).until(lambda b: b.execute_script(code), code)


def ask(browser, code: str, *arguments):
    """What an async function of the page returns; `m` is the model, `a` the arguments."""
    body = f"const a = [...arguments], go = a.pop(); (async () => {{ {HELP} {code} }})()"
    body += ".then(go, e => go({failed: String(e.stack)}));"
    found = browser.execute_async_script(body, *arguments)
    assert not (isinstance(found, dict) and "failed" in found), found
    return found


def floats(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.float32)


# ------------------------------------------------------------------------------- what is compared
def weights_in(browser, name: str) -> dict[str, torch.Tensor] | None:
    """A snapshot's adapter as the page unpacks it, under PEFT's names."""
    code = """
      const x = await m.adapterOf(a[0]);
      return x && m.LINEAR.map((n) => [n, m.text(x[n].A), m.text(x[n].B)]);"""
    return adapter_of(ask(browser, code, name))


def adapter_of(rows: list | None) -> dict[str, torch.Tensor] | None:
    """[[matrix, A, B], …] as base64 -> {PEFT's name: weight}."""
    found = {}
    for name, a, b in rows or []:
        prefix = f"base_model.model.{live.long_name(name)}"
        found[f"{prefix}.lora_A.weight"] = torch.tensor(floats(a)).view(32, -1)
        found[f"{prefix}.lora_B.weight"] = torch.tensor(floats(b)).view(-1, 32)
    return found or None


def new_env():
    return settings.make_env(config(), 6)


def config() -> settings.Config:
    """train.py's settings for letters with pico_base."""
    cfg = settings.Config(env="letters")
    refusals.check(cfg)
    settings.fill(cfg, presets.by_size(1e6, "letters"))
    return cfg


@torch.no_grad()
def logits_gap(browser, policy: Policy, name: str, ids: list[int]) -> float:
    """The largest difference between the logits of all tokens at all places of a text."""
    code = """
      const ids = a[1], N = ids.length, w = m.fold(m.base, await m.adapterOf(a[0]));
      const step = { ids: m.ints(N, (i) => ids[i]), place: m.ints(N, (i) => i),
        position: m.ints(N, (i) => i),
        begin: m.ints(N, () => 0), shared: m.ints(N, () => 0) };
      return m.text(m.head(w, m.forward(w, step, m.newCache(N)), N));"""
    ours = floats(ask(browser, code, name, ids)).reshape(len(ids), -1)  # [T, V]
    theirs = policy.model(input_ids=torch.tensor([ids])).logits[0].numpy()  # [T, V]
    return float(np.abs(ours - theirs).max())


def spoken_in(browser, name: str, text: str, letters, temperature: float = 0.0, uniforms=None) -> dict:
    """{prompt, replies, logps} of the page. uniforms [k, max_tokens]: what k replies draw by."""
    code = """
      const [name, text, letters, temperature, uniforms, maxTokens] = a;
      const prompt = m.tok.prompt(m.question(text, letters));
      m.folded ??= {};
      const w = m.folded[name] ??= m.fold(m.base, await m.adapterOf(name)), stop = m.tok.stop;
      const uniform = uniforms.map((row) => { let t = 0; return () => row[t++]; });
      const how = { temperature, maxTokens, stop, uniform };
      const replies = await m.sample(w, prompt, Math.max(1, uniforms.length), how);
      return { prompt, replies: replies.map((r) => r.ids), logps: replies.map((r) => r.logps) };"""
    return ask(browser, code, name, text, list(letters), temperature, uniforms or [], config().max_tokens)


def greedy_in_torch(policy: Policy, sampler: TorchSampler, n: int) -> list[Episode]:
    sampler.sync()
    seeds = [settings.DEV_SEEDS + i for i in range(n)]
    return [g[0] for g in play(policy, sampler, new_env, seeds, 1, config().max_tokens, 0.0, 0)]


def drawn_alike(browser, policy: Policy, sampler: TorchSampler, name: str, task, k: int = 8) -> int:
    """Of k replies drawn with the same random numbers, how many are the same, token for token."""
    seed, text, letters, env = task
    prompt = prompt_ids(policy, env.reset(seed), env.tools, env.think)
    sampler.sync()
    keys, most = [(5, seed, i, 0) for i in range(k)], config().max_tokens
    theirs = sampler.sample([prompt], k, most, 1.0, [keys])[0]
    uniforms = [np.random.default_rng(key).random(most).astype(np.float32).tolist() for key in keys]
    ours = spoken_in(browser, name, text, letters, 1.0, uniforms)
    return sum(a == b.token_ids for a, b in zip(ours["replies"], theirs))


def step_gap(browser, policy: Policy, name: str, task, lr: float = 1e-3, steps: int = 3, k: int = 8) -> dict:
    """GRPO steps on the same samples, by the page and by grpo.update: how far apart are they?

    From the second step on, the ratio is not 1 and Adam has moments. gradient: the largest
    difference of the first one, as a share of its largest entry. After each step, adapter: the
    largest difference of an entry; share: of the norms, difference over change (Adam's first step
    is lr times the gradient's *sign*, so an entry whose gradient is rounding noise may go either
    way); stats: the largest difference of norm, loss and ratio. Rewards are 1 and 0 in turn, so
    that there is always something to learn.
    """
    seed, text, letters, _ = task
    rng, most = np.random.default_rng(3), config().max_tokens
    uniforms = rng.random((k, most)).astype(np.float32).tolist()
    said, rewards = spoken_in(browser, name, text, letters, 1.0, uniforms), [1.0, 0.0] * (k // 2)
    code = """
      const [name, prompt, ids, logps, rewards, lr, steps] = a;
      const adapter = await m.adapterOf(name), adam = m.newAdam();
      const replies = ids.map((x, i) => ({ ids: x, logps: logps[i] }));
      const advantages = m.groupAdvantages(rewards), found = [];
      const packed = (x) => m.LINEAR.map((n) => [n, m.text(x[n].A), m.text(x[n].B)]);
      for (let i = 0; i < steps; i++) {
        const g = m.grpoGradient(m.base, adapter, prompt, replies, advantages);
        const norm = m.adamStep(adapter, g.gradient, adam, lr);
        found.push({ norm, loss: g.loss, ratio: g.ratio, advantages,
          adapter: packed(adapter), gradient: packed(g.gradient) });
      }
      return found;"""
    theirs = ask(browser, code, name, said["prompt"], said["replies"], said["logps"], rewards, lr, steps)
    before = weights_in(browser, name)
    live.put(policy, before)
    cfg, optimizer, P = config(), adam(policy, lr), len(said["prompt"])
    group = []
    for reply, logps, reward in zip(said["replies"], said["logps"], rewards):
        sampled = [False] * P + [True] * len(reply)
        group.append(Episode(seed, 0, said["prompt"] + reply, sampled, [0.0] * P + logps, turns=1, reward=reward))
    advantages, found = advantages_of([group], cfg), {"adapter": [], "share": [], "stats": []}
    named = lambda: {key.replace(".default", ""): p for key, p in policy.trainable().items()}
    for i, their in enumerate(theirs):
        with policy.learning():
            stats = update(policy, optimizer, [group], advantages, cfg)
            if i == 0:  # update() has shortened the gradient, so is theirs here
                shorten = min(1.0, 1 / (their["norm"] + 1e-6))
                g, ours = adapter_of(their["gradient"]), {key: p.grad for key, p in named().items()}
                largest = max(x.abs().max().item() for x in ours.values())
                found["gradient"] = max((g[key] * shorten - ours[key]).abs().max().item() for key in ours) / largest
        after, ours = adapter_of(their["adapter"]), named()
        gaps = {key: (after[key] - p.data).abs() for key, p in ours.items()}
        moved = torch.cat([(p.data - before[key]).flatten() for key, p in ours.items()])
        found["adapter"].append(max(gap.max().item() for gap in gaps.values()))
        every = torch.cat([gap.flatten() for gap in gaps.values()])
        found["share"].append((every.norm() / moved.norm()).item())
        names = zip(("norm", "loss", "ratio"), ("grad_norm", "loss", "ratio"))
        found["stats"].append(max(abs(their[a] - stats[b]) for a, b in names))
    found["advantages"] = float(np.abs(np.array(theirs[0]["advantages"]) - advantages[0].numpy()).max())
    return found


def main(n: int = 64) -> None:
    """n: development tasks whose greedy replies are compared."""
    policy = load_policy(str(PICO), 32, 64, "cpu", 0)
    sampler, tasks = TorchSampler(policy), live.tasks_of(new_env, n)
    with chromium() as browser:
        open_page(browser)
        stops = browser.execute_script("return stops.map((stop) => stop.name)")
        middle = stops[len(stops) // 2 - 1]
        for name in (stops[0], middle, stops[-1]):
            live.put(policy, weights_in(browser, name))
            theirs = greedy_in_torch(policy, sampler, n)
            ours = [spoken_in(browser, name, task[1], task[2]) for task in tasks]
            texts = [reply["prompt"] + reply["replies"][0] for reply in ours]
            same = sum(a == b.token_ids for a, b in zip(texts, theirs))
            gap = max(logits_gap(browser, policy, name, e.token_ids) for e in theirs[:8])
            drawn = drawn_alike(browser, policy, sampler, name, tasks[0])
            print(f"{name}: {same} of {n} greedy and {drawn} of 8 drawn replies, logits {gap:.1e}")
        print(step_gap(browser, policy, middle, tasks[0]))


if __name__ == "__main__":
    tyro.cli(main)
