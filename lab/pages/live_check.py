"""Does docs/live compute what torch computes, and how fast? In headless Chromium, into results/live/.

    python -m lab.pages.live_check runs/live-0      # five minutes; the run that the page's data were made from
    python -m lab.pages.live_check --only-pace      # how fast, again, on a machine that does nothing else: a minute

Both sides get the same numbers: the base in bfloat16, and of each snapshot the adapter as it is shipped, in int8. Compared are the ids of
the prompts, logits, greedy replies, replies drawn with the same random numbers, and the adapter after steps of GRPO on the same samples.
tests/test_live.py asks the same functions for a few tasks.
"""

import base64
import os
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import tyro
from safetensors.torch import load_file

import settings
from fast.sampler import TorchSampler
from grpo import advantages_of, update
from lab.common import RESULTS, cpu, read_json, table, write_json, write_page
from lab.pages import live
from policy import PICO, Policy, adam, load_policy
from rollout import Episode, play, prompt_ids

CHROMIUM = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update disable-sync"
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
    for (let i = 0; i < bytes.length; i += 8192) s += String.fromCharCode(...bytes.subarray(i, i + 8192));
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
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        raise Missing("selenium is not installed: pip install selenium") from None
    program, driver = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
    if not (program and driver):
        raise Missing("Chromium or its driver is not installed: apt-get install chromium chromium-driver")
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


def open_page(browser, page: Path = live.PAGE / "index.html", width: int = 1280, height: int = 900, scheme: str = "light") -> float:
    """Open it as a person would from disk; returns the seconds until the model is ready to speak."""
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(page.resolve().as_uri())
    wait(browser, "return document.documentElement.dataset.ready")
    return browser.execute_script("return readyAfter") / 1000


def wait(browser, code: str, seconds: float = 30):
    """Ask until it is true."""
    deadline = time.monotonic() + seconds
    while not (value := browser.execute_script(code)):
        assert time.monotonic() < deadline, f"not within {seconds} seconds: {code}"
        time.sleep(0.02)
    return value


def ask(browser, code: str, *arguments):
    """What an async function of the page returns; `m` is the model, `a` the arguments."""
    body = f"const a = [...arguments], go = a.pop(); (async () => {{ {HELP} {code} }})().then(go, e => go({{failed: String(e.stack)}}));"
    found = browser.execute_async_script(body, *arguments)
    assert not (isinstance(found, dict) and "failed" in found), found
    return found


def floats(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.float32)


# ------------------------------------------------------------------------------------------------ what is compared
def weights_in(browser, name: str) -> dict[str, torch.Tensor] | None:
    """A snapshot's adapter as the page unpacks it, under PEFT's names."""
    code = "const x = await m.adapterOf(a[0]); return x && m.LINEAR.map((n) => [n, m.text(x[n].A), m.text(x[n].B)]);"
    return adapter_of(ask(browser, code, name))


def adapter_of(rows: list | None) -> dict[str, torch.Tensor] | None:
    """[[matrix, A, B], …] as base64 -> {PEFT's name: weight}."""
    found = {}
    for name, a, b in rows or []:
        prefix = f"base_model.model.{live.long_name(name)}"
        found[f"{prefix}.lora_A.weight"] = torch.tensor(floats(a)).view(32, -1)
        found[f"{prefix}.lora_B.weight"] = torch.tensor(floats(b)).view(-1, 32)
    return found or None


def tasks_of(n: int) -> list[tuple[int, str, tuple[str, ...], object]]:
    """(seed, string, letters, environment) of the first development tasks."""
    found = []
    for seed in range(settings.DEV_SEEDS, settings.DEV_SEEDS + n):
        env = new_env()
        env.reset(seed)
        found.append((seed, env.task.text, env.task.letters, env))
    return found


def new_env():
    return settings.make_env(config(), 6)


def config() -> settings.Config:
    """train.py's settings for letters with pico_base."""
    cfg = settings.Config(env="letters")
    settings.check(cfg)
    settings.fill(cfg, settings.by_size(1e6, "letters"))
    return cfg


@torch.no_grad()
def logits_gap(browser, policy: Policy, name: str, ids: list[int]) -> float:
    """The largest difference between the logits of all tokens at all places of a text."""
    code = """
      const ids = a[1], N = ids.length, w = m.fold(m.base, await m.adapterOf(a[0]));
      const step = { ids: m.ints(N, (i) => ids[i]), place: m.ints(N, (i) => i), position: m.ints(N, (i) => i),
        begin: m.ints(N, () => 0), shared: m.ints(N, () => 0) };
      return m.text(m.head(w, m.forward(w, step, m.newCache(N)), N));"""
    ours = floats(ask(browser, code, name, ids)).reshape(len(ids), -1)  # [T, V]
    theirs = policy.model(input_ids=torch.tensor([ids])).logits[0].numpy()  # [T, V]
    return float(np.abs(ours - theirs).max())


def spoken_in(browser, name: str, text: str, letters, temperature: float = 0.0, uniforms=None) -> dict:
    """{prompt, replies, logps} of the page; uniforms [k, max_tokens]: the random numbers of k replies."""
    code = """
      const [name, text, letters, temperature, uniforms, maxTokens] = a, prompt = m.tok.prompt(m.question(text, letters));
      m.folded ??= {};
      const w = m.folded[name] ??= m.fold(m.base, await m.adapterOf(name)), stop = m.tok.stop;
      const uniform = uniforms.map((row) => { let t = 0; return () => row[t++]; });
      const replies = await m.sample(w, prompt, Math.max(1, uniforms.length), { temperature, maxTokens, stop, uniform });
      return { prompt, replies: replies.map((r) => r.ids), logps: replies.map((r) => r.logps) };"""
    return ask(browser, code, name, text, list(letters), temperature, uniforms or [], config().max_tokens)


def greedy_in_torch(policy: Policy, sampler: TorchSampler, n: int) -> list[Episode]:
    sampler.sync()
    seeds = [task[0] for task in tasks_of(n)]
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
    """GRPO steps on the same samples, here by grpo.update. From the second on, the ratio is not 1 and Adam has moments.

    gradient: the largest difference of the first one, as a share of its largest entry. After each step, adapter: the largest difference of
    an entry. share: of the norms, difference over change. far: the share of entries that are off by more than a hundredth of lr. Adam's
    first step is lr times the gradient's *sign*, so an entry whose gradient is rounding noise may go either way; share and far tell more.
    Rewards are 1 and 0 in turn, so that there is always something to learn.
    """
    seed, text, letters, _ = task
    rng, most = np.random.default_rng(3), config().max_tokens
    uniforms = rng.random((k, most)).astype(np.float32).tolist()
    said, rewards = spoken_in(browser, name, text, letters, 1.0, uniforms), [1.0, 0.0] * (k // 2)
    code = """
      const [name, prompt, ids, logps, rewards, lr, steps] = a, adapter = (await m.adapterOf(name)), adam = m.newAdam();
      const replies = ids.map((x, i) => ({ ids: x, logps: logps[i] })), advantages = m.groupAdvantages(rewards), found = [];
      const packed = (x) => m.LINEAR.map((n) => [n, m.text(x[n].A), m.text(x[n].B)]);
      for (let i = 0; i < steps; i++) {
        const g = m.grpoGradient(m.base, adapter, prompt, replies, advantages);
        const norm = m.adamStep(adapter, g.gradient, adam, lr);
        found.push({ norm, loss: g.loss, ratio: g.ratio, clipped: g.clipped, advantages, adapter: packed(adapter), \
gradient: packed(g.gradient) });
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
    advantages, found = advantages_of([group], cfg), {"adapter": [], "share": [], "far": [], "stats": []}
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
        found["far"].append((every > 0.01 * lr).float().mean().item())
        found["stats"].append({
            "norm": abs(their["norm"] - stats["grad_norm"]), "loss": abs(their["loss"] - stats["loss"]),
            "ratio": abs(their["ratio"] - stats["ratio"]), "clipped": [their["clipped"], stats["clip_fraction"]],
        })  # fmt: skip
    found["advantages"] = float(np.abs(np.array(theirs[0]["advantages"]) - advantages[0].numpy()).max())
    return found


def pace(browser) -> dict:
    """How fast the page is for a person: its own readings, worker included."""
    click = lambda selector: browser.execute_script("document.querySelector(arguments[0]).click()", selector)
    browser.execute_script("goTo(stops.length - 1)")
    last = "return document.querySelector('#reply').dataset.done === stops.at(-1).name"
    wait(browser, last)
    browser.execute_script("goTo(stops.length - 1)")  # once more: now its code is compiled
    wait(browser, last)
    first = browser.execute_script("return document.querySelector('#speed').textContent")
    found = {"one reply, tokens per second": float(first.split(" s, ")[1].split()[0])}
    browser.execute_script("document.querySelector('#from').value = 4; document.querySelector('#auto').checked = false")
    click("#reset")
    time.sleep(0.5)
    seconds, speeds = [], []
    for _ in range(6):
        click("#draw")
        wait(browser, "return !busy && group?.replies", 120)
        speeds.append(float(browser.execute_script("return document.querySelector('#speed2').textContent").split(" s, ")[1].split()[0]))
        browser.execute_script("group.cards.forEach((card, i) => { card.good = i % 2 === 0; }); judge();")
        n = browser.execute_script("return history.length")
        click("#step")
        wait(browser, f"return !busy && history.length > {n} && group?.replies", 120)
        seconds.append(
            float(browser.execute_script("return document.querySelector('#steps tbody').lastElementChild.lastElementChild.textContent"))
        )
    found["eight replies, tokens per second"] = max(speeds)
    found["seconds per step of GRPO"] = [float(np.median(seconds)), max(seconds)]
    return found


def main(run: tyro.conf.Positional[str] = "runs/live-0", n: int = 64, only_pace: bool = False) -> None:
    """run: the run that the page's data were made from. n: development tasks whose greedy replies are compared."""
    if only_pace:
        file = RESULTS / "live" / "check.json"
        return write({**read_json(file), **how_fast()})
    kept, started = live.snapshots_of(Path(run)), time.monotonic()
    policy = load_policy(str(PICO), 32, 64, "cpu", 0)
    sampler, tasks, found = TorchSampler(policy), tasks_of(n), {"snapshots": {}}
    with chromium() as browser:
        open_page(browser)
        found["browser"] = f"Chromium {browser.capabilities['browserVersion']}"
        stops = browser.execute_script("return stops.map((stop) => stop.name)")
        files = {f"{update:04}": file for update, file in kept.items()}
        for name in (stops[0], stops[len(stops) // 2 - 1], stops[-1]):
            shipped = weights_in(browser, name)
            if shipped is not None:
                mine = live.as_shipped(load_file(files[name]))
                assert all(torch.equal(mine[key], shipped[key]) for key in mine), f"{name} is not the snapshot of {run}"
            live.put(policy, shipped)
            theirs = greedy_in_torch(policy, sampler, n)
            ours = [spoken_in(browser, name, text, letters) for _, text, letters, _ in tasks]
            same = [a["prompt"] + a["replies"][0] == b.token_ids for a, b in zip(ours, theirs)]
            gaps = [logits_gap(browser, policy, name, episode.token_ids) for episode in theirs[:8]]
            row = {"greedy replies that are the same": sum(same), "of": n, "largest difference of logits": max(gaps),
                   "drawn replies that are the same": drawn_alike(browser, policy, sampler, name, tasks[0])
                   + drawn_alike(browser, policy, sampler, name, tasks[1]), "of drawn": 16}  # fmt: skip
            if shipped is not None:
                row |= rounding(policy, sampler, load_file(files[name]), theirs, n)
            found["snapshots"][name] = row
            print(name, row, flush=True)
        middle = stops[len(stops) // 2 - 1]
        found["step"] = step_gap(browser, policy, middle, tasks[0])
        print(found["step"], flush=True)
    found |= {"run": Path(run).name, "middle": middle, "machine": cpu(), "torch": torch.__version__, "seconds": time.monotonic() - started}
    write(found | how_fast())


def how_fast() -> dict:
    """What depends on the machine and on what else it does."""
    with chromium() as browser:
        ready = [open_page(browser) for _ in range(3)]
        found = pace(browser)
    print(found)
    size = sum(file.stat().st_size for file in live.PAGE.rglob("*") if file.is_file()) / 1e6
    return {"seconds until it is ready": max(ready), "pace": found, "megabytes": size, "load": os.getloadavg()[0]}


def write(found: dict) -> None:
    write_json(RESULTS / "live" / "check.json", found)
    write_page(RESULTS / "live" / "README.md", page_of(found))


@torch.no_grad()
def rounding(policy: Policy, sampler: TorchSampler, exact: dict, shipped: list[Episode], n: int) -> dict:
    """How far the int8 adapter is from the float32 one that the run saved. shipped: the greedy replies of the int8 one."""
    logits = lambda ids: policy.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    some = [e.token_ids for e in shipped[:8]]
    rounded = [logits(ids) for ids in some]
    live.put(policy, exact)
    pairs = [(a, logits(ids), ids) for a, ids in zip(rounded, some)]
    chosen = lambda logp, ids: logp[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    prompt = [len(e.token_ids) - e.reply_tokens for e in shipped[:8]]
    gaps = torch.cat([(chosen(a, ids) - chosen(b, ids)).abs()[p - 1 :] for (a, b, ids), p in zip(pairs, prompt)])
    whole = greedy_in_torch(policy, sampler, n)
    return {
        "int8: mean difference of a reply token's log-prob": gaps.mean().item(), "int8: largest": gaps.max().item(),
        "int8: same greedy replies": sum(a.token_ids == b.token_ids for a, b in zip(shipped, whole)),
        "exact, int8": sum(e.components["exact"] for e in shipped), "exact, float32": sum(e.components["exact"] for e in whole),
    }  # fmt: skip


def page_of(found: dict) -> list[str]:
    """results/live/README.md."""
    name = lambda stop: {"base": "the base", "0000": "after SFT"}.get(stop, f"update {stop.lstrip('0')}")
    rows = [[name(stop), f"{x['largest difference of logits']:.1e}", f"{x['greedy replies that are the same']} of {x['of']}",
             f"{x['drawn replies that are the same']} of {x['of drawn']}"] for stop, x in found["snapshots"].items()]  # fmt: skip
    ints = [[name(stop), f"{x['int8: mean difference of a reply token' + chr(39) + 's log-prob']:.1e}", f"{x['int8: largest']:.1e}",
             f"{x['int8: same greedy replies']} of {x['of']}", f"{x['exact, int8']:.0f} and {x['exact, float32']:.0f}"]
            for stop, x in found["snapshots"].items() if "int8: largest" in x]  # fmt: skip
    step, speed = found["step"], found["pace"]
    steps = [[i + 1, f"{gap:.1e}", f"{share:.1e}", f"{far:.1e}", f"{x['ratio']:.1e}", f"{x['norm']:.1e}"]
             for i, (gap, share, far, x) in enumerate(zip(step["adapter"], step["share"], step["far"], step["stats"]))]  # fmt: skip
    return [
        "# docs/live against torch", "",
        f"`python -m lab.pages.live_check`: [the page](../../docs/live/index.html) in headless {found['browser']} against torch "
        f"{found['torch']}, float32, on two cores of an {found['machine']}, run {found['run']}.", "",
        "## The same model", "",
        f"Both compute with the adapters as shipped. Logits: all places of eight conversations, all tokens. Greedy: the first "
        f"{next(iter(found['snapshots'].values()))['of']} development tasks, token for token, prompts included. Drawn: eight replies to "
        "each of two tasks at temperature 1, with the same random numbers.", "",
        *table(["snapshot", "largest difference of logits", "greedy replies that are the same", "drawn replies that are the same"], rows),
        "",
        "## The same step", "",
        f"Steps of GRPO by the page and by `grpo.update`, from {name(found['middle'])}, learning rate 0.001, all on the same eight "
        "samples: from the second on the ratio is not 1, and Adam has moments. The largest difference of the first gradient is "
        f"{step['gradient']:.1e} of its largest entry. Adam's first step is the learning rate times the gradient's sign, so an entry whose "
        "gradient is rounding noise may go either way.", "",
        *table(["after step", "largest difference of the adapter", "as a share of the change (norms)", "entries off by over 1% of the rate",
                "of the mean ratio", "of the gradient norm"], steps), "",
        "## What int8 costs", "",
        "Adapters are shipped in int8 with a scale per direction. Against the float32 ones that the run saved, on the replies of "
        "the rounded one:", "",
        *table(["snapshot", "mean difference of a token's log-prob, nats", "largest", "same greedy replies", "exact: int8 and float32"],
               ints), "",
        "## How fast", "",
        f"As the page itself tells it, its worker included; two cores, on which {found['load']:.1f} processes wanted to run at the end. "
        "Only Chromium was tried, no other browser and no phone.", "",
        *table(["what", "measured"], [
            ["tokens per second, one reply", f"{speed['one reply, tokens per second']:.0f}"],
            ["tokens per second, eight replies at once", f"{speed['eight replies, tokens per second']:.0f}"],
            ["seconds per step of GRPO on eight samples, median and slowest of 6",
             " and ".join(f"{x:.1f}" for x in speed["seconds per step of GRPO"])],
            ["seconds from opening the file until the model is ready, slowest of 3", f"{found['seconds until it is ready']:.2f}"],
            ["the page with its data, MB", f"{found['megabytes']:.1f}"],
        ]), "",
    ]  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main)
