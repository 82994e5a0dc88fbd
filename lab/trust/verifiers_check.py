"""Does verifiers give our environments' replies the scores that our own loop gives them? Runs vf-eval for real, on loopback,
into results/verifiers/.

    pip install -r requirements/verifiers.txt && pip install -e .       # into a venv that already has the torch of requirements.txt
    python -m lab.trust.verifiers_check                                       # 3 minutes
    python -m lab.trust.verifiers_check --n 8 --policy-n 2 --swarm-n 1        # a quick look

Four ways to the same replies, on the same development seeds, compared number by number and without tolerance:

    text      a scripted player behind /v1/chat/completions; what it says arrives as it was said
    parsed    the same player behind a server that, as vLLM does, takes thinking and tool calls out of the text
    policy    our policy, greedy, served by bridges/serve.py; compared with rollout.play
    tokens    the same policy the way prime-rl trains: verifiers cuts the text into tokens itself and asks /inference/v1/generate. Compared
              token by token with rollout.play: which were given, which were sampled, and with which log-probs

The scripted player is good and bad: a hash of what it was told decides whether it answers as the expert (three times in four) or spoils the
expert's answer in one of twelve ways: nothing, half of it, twice, broken JSON, a tool that does not exist, thinking without an end …
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import tyro

import settings
from bridges.chat import JsonHandler, listen, scripted
from bridges.replies import split_calls
from bridges.serve import serve_policy
from env_letters import split_thinking
from fast.sampler import TorchSampler
from lab.common import RESULTS, read_json, write_json, write_page
from lab.common import table as rows_of
from policy import PICO, PICO_SWARM, Policy, load_policy
from rollout import play
from settings import DEV_SEEDS

OUT = RESULTS / "verifiers"
ENVIRONMENTS = ("letters", "alphabet", "swarm")
STYLE = {"letters": "derives", "alphabet": "derives", "swarm": "expert"}


def make_env(environment: str):
    """The environment as train.py makes it, with its defaults; nothing of the adapter is involved."""
    cfg = settings.Config(env=environment, sft_style=STYLE[environment])
    settings.fill(cfg, settings.by_env(environment))
    return settings.make_env(cfg, cfg.difficulty)


# ------------------------------------------------------------------------------------------------ the scripted player
SPOIL: list[Callable[[str], str]] = [
    lambda said: "",
    lambda said: "no",
    lambda said: said[: len(said) // 2],
    lambda said: said + "\n" + said,
    lambda said: said.replace('"', "'"),
    lambda said: said.replace("1", "2").replace("a", "b"),
    lambda said: "<think>\nI cannot stop.\n" + split_thinking(said)[1].lstrip("\n"),
    lambda said: split_thinking(said)[1].strip("\n"),
    lambda said: "Well, \u00e9\u4e2d\U0001f600 <|im_end|> \u2028 " + said,
    lambda said: '<tool_call>\n{"name": "steal", "arguments": {}}\n</tool_call>',
    lambda said: (
        '<tool_call>\n{"name": "post", "arguments": {"content": 3}}\n</tool_call>\n<tool_call>\n{"name": "pass_turn", "arguments": {}}\n'
        "</tool_call>"
    ),
    lambda said: '<tool_call>{"name": "submit_work", "arguments": {"task_id": "task_1"}}',
]


def make_player(environment: str, n: int) -> Callable[[list[dict]], str]:
    """say(conversation) -> the reply. Without memory: where an episode stands is found by playing its replies again."""
    env = make_env(environment)
    seeds = {env.reset(DEV_SEEDS + i)[0]["content"]: DEV_SEEDS + i for i in range(n)}

    def say(talk: list[dict]) -> str:
        told = [m["content"] for m in talk if m["role"] != "assistant"]
        env = make_env(environment)
        env.reset(seeds[told[0]])
        for message in talk:
            if message["role"] == "assistant":
                env.step(message["content"])
        number = int(hashlib.sha256(json.dumps([told[0], told[-1], len(told)]).encode()).hexdigest(), 16)
        return env.expert_reply() if number % 4 else SPOIL[number // 4 % len(SPOIL)](env.expert_reply())

    return say


def ours(environment: str, seed: int, say: Callable[[list[dict]], str]) -> dict:
    """The player in the environment itself: {"marks", "replies"}."""
    env, replies, done = make_env(environment), [], False
    talk = env.reset(seed)
    while not done:
        replies.append(say(talk))
        new, done = env.step(replies[-1])
        talk = [*talk, {"role": "assistant", "content": replies[-1]}, *new]
    return {"marks": env.score(), "replies": replies}


def parse(answer: Callable[[dict], dict], body: dict) -> dict:
    """An answer as vLLM gives it with a reasoning parser and a tool parser: thinking and well-formed calls are taken out of the text."""
    response = answer(body)
    message = response["choices"][0]["message"]
    text = message["content"]
    if text.startswith("<think>"):
        thinking, rest = split_thinking(text)
        message["reasoning_content"], text = thinking.strip("\n"), rest.lstrip("\n")
    calls = []
    if body.get("tools"):
        text, calls = split_calls(text)
    message["content"] = text or None
    if calls:
        message["tool_calls"], response["choices"][0]["finish_reason"] = calls, "tool_calls"
    return response


# ------------------------------------------------------------------------------------------------ servers
@contextmanager
def running(server: ThreadingHTTPServer):
    """The server's address, while it serves."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def serve_tokens(policy: Policy, sampler=None) -> ThreadingHTTPServer:
    """vLLM's /inference/v1/generate as far as it is needed here: token ids in, sampled ids and their log-probs out."""
    sampler, alone = sampler or TorchSampler(policy), threading.Lock()

    class Handler(JsonHandler):
        def do_GET(self):
            self.reply(404, {"error": {"message": "only /inference/v1/generate is here"}})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            wanted = body["sampling_params"]
            with alone:
                sample = sampler.sample([body["token_ids"]], 1, wanted["max_tokens"], wanted["temperature"], [[(0, 0)]])[0][0]
            logprobs = [{"token": f"token_id:{t}", "logprob": p} for t, p in zip(sample.token_ids, sample.logprobs)]
            reason = "stop" if sample.finished else "length"
            choice = {"token_ids": sample.token_ids, "logprobs": {"content": logprobs}, "finish_reason": reason}
            self.reply(200, {"request_id": "1", "choices": [choice]})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    return server


# ------------------------------------------------------------------------------------------------ vf-eval
def vf_eval(environment: str, n: int, url: str, *flags: str, r: int = 1) -> list[dict]:
    """Run vf-eval in a process of its own; its traces, in the order of the seeds."""
    program = Path(sys.executable).with_name("vf-eval")
    if not program.exists():
        raise SystemExit("there is no vf-eval beside this Python; pip install -r requirements/verifiers.txt && pip install -e .")
    with tempfile.TemporaryDirectory() as out:
        command = [str(program), "picoswarm", "-n", str(n), "-r", str(r), "-m", "policy", "--client.base-url", url]
        command += ["--env.taskset.environment.type", environment, "--no-push", "--no-rich", "-o", out, *flags]
        quiet = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=out, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        files = list(Path(out).rglob("traces.jsonl"))
        if done.returncode or not files:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        traces = [trace for line in files[0].read_text().split("\n") if line for trace in json.loads(line)["traces"]]
    broken = [t for t in traces if t["errors"]]
    if broken:
        raise SystemExit(f"{len(broken)} of {len(traces)} traces have errors, the first: {broken[0]['errors'][0]}")
    return sorted(traces, key=lambda t: t["task"]["data"]["seed"])


def theirs(trace: dict) -> dict:
    score = {"reward": trace["rewards"]["reward"]["score"], **trace["metrics"]}
    return {"marks": score, "replies": trace["info"]["replies"], "nodes": len(trace["nodes"])}


def compare(mine: list[dict], traces: list[dict]) -> dict:
    """What is the same, counted; equality is ==, on every number of every score."""
    other = [theirs(trace) for trace in traces]
    if len(mine) != len(other):
        raise SystemExit(f"{len(other)} traces for {len(mine)} episodes; vf-eval dropped some")
    pairs = list(zip(mine, other))
    names = [[name for name in a["marks"] | b["marks"] if a["marks"].get(name) != b["marks"].get(name)] for a, b in pairs]
    return {
        "episodes": len(pairs),
        "same_reward": sum(a["marks"]["reward"] == b["marks"]["reward"] for a, b in pairs),
        "same_score": sum(not different for different in names),
        "numbers_a_score": len(mine[0]["marks"]),
        "differ": sorted({name for different in names for name in different}),
        "same_replies": sum(a["replies"] == b["replies"] for a, b in pairs),
        "replies": sum(len(a["replies"]) for a in mine),
        "mean_reward": sum(a["marks"]["reward"] for a in mine) / len(mine),
        "mean_reward_verifiers": sum(b["marks"]["reward"] for b in other) / len(other),
        "distinct_rewards": len({a["marks"]["reward"] for a in mine}),
        "nodes": sorted({b["nodes"] for b in other}),
    }


# ------------------------------------------------------------------------------------------------ the four ways
def check_scripted(environment: str, n: int) -> dict[str, dict]:
    say = make_player(environment, n)
    mine = [ours(environment, DEV_SEEDS + i, say) for i in range(n)]
    answer = scripted(say)
    with running(listen(answer, "policy")) as url:
        found = {"text": compare(mine, vf_eval(environment, n, url, "-c", "32"))}
    with running(listen(partial(parse, answer), "policy")) as url:
        found["parsed"] = compare(mine, vf_eval(environment, n, url, "-c", "32"))
    return found


def cut_like_qwen(base: Path, folder: Path) -> Path:
    """A copy of a base whose tokenizer cuts "user\n" in two, as Qwen3's does,
    so that it does not matter where verifiers cuts between the two."""
    shutil.copytree(base, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for entry in tokenizer["model"]["vocab"]:  # of a unigram model: [text, log-probability]
        if entry[0] == "user\n":
            entry[1] = -100.0
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def check_policy(environment: str, n: int, folder: Path) -> dict[str, dict]:
    """The base model, greedy, through text and through tokens."""
    path = cut_like_qwen(PICO_SWARM, folder / "pico_swarm") if environment == "swarm" else PICO
    policy = load_policy(str(path), lora_rank=0, lora_alpha=64, device="cpu")
    max_tokens = settings.by_size(policy.n_parameters, environment)["max_tokens"]
    groups = play(policy, TorchSampler(policy), partial(make_env, environment), [DEV_SEEDS + i for i in range(n)], 1, max_tokens, 0.0, 0)
    episodes = [group[0] for group in groups]
    spoken = lambda e: [m["content"] for m in e.messages if m["role"] == "assistant"]
    mine = [{"marks": {"reward": e.reward, **e.components}, "replies": spoken(e)} for e in episodes]
    greedy = ("--sampling.temperature", "0", "--sampling.max-tokens", str(max_tokens), "-c", "16")
    with running(serve_policy(policy, "policy")) as url:
        found = {"policy": compare(mine, vf_eval(environment, n, url, *greedy))}
    as_tokens = ("--client.type", "train", "--client.renderer.name", "qwen3", "--client.renderer.thinking-retention", "all")
    with running(serve_tokens(policy)) as url:
        traces = vf_eval(environment, n, url, *greedy, *as_tokens, "--client.renderer-model-name", str(path))
    found["tokens"] = compare(mine, traces) | compare_tokens(episodes, traces)
    return found


def compare_tokens(episodes: list, traces: list[dict]) -> dict:
    """A trace's nodes one after the other are what prime-rl trains on; an Episode is what grpo.py trains on."""
    same, gap = 0, 0.0
    for episode, trace in zip(episodes, traces):
        ids = [t for node in trace["nodes"] for t in node["token_ids"]]
        mask = [m for node in trace["nodes"] for m in node["mask"]]
        equal = ids == episode.token_ids and mask == episode.sampled
        same += equal
        if equal:
            saved = [p for node in trace["nodes"] for p in node["logprobs"]]
            drawn = [p for p, m in zip(episode.logprobs, episode.sampled) if m]
            gap = max(gap, *(abs(a - b) for a, b in zip(saved, drawn)))
    return {"same_tokens": same, "tokens": sum(len(e.token_ids) for e in episodes), "largest_logprob_gap": gap}


PRIME_RL = """
## prime-rl

No registry has prime-rl, so nothing here installs it, and no run of it has been made. What was checked by hand, once: \
the three files in `bridges/configs/`
are accepted by `RLConfig` of prime-rl at commit 559b447 (21 August 2026), with verifiers 0.4.0 \
and with the commit of verifiers that this prime-rl
pins (a60a606), under which `vf-eval` gives the same scores as ours too (8 seeds each). Misspelt keys are refused: `max_offpolicy_steps`,
`rollouts_per_example`, `max_tokens`, `lora.r`, a taskset's `versions`, a difficulty `mad`.

`tokens` is how prime-rl samples: verifiers' train client. The env server, which prime-rl puts in between, \
is run in tests/verifiers/test_train.py.
"""


def write_table() -> None:
    """README.md from check.json."""
    facts = read_json(OUT / "check.json")
    versions = ", ".join(f"{name} {v}" for name, v in facts["versions"].items())
    lines = [
        "# verifiers against our own loop", "",
        f"`{facts['command']}`, {facts['seconds'] / 60:.0f} minutes with {versions}. Every `vf-eval` was a process of "
        "its own that spoke to a server on loopback. Development seeds from 2,000,000,000; "
        "the same means `==` on every number of a score, nothing is rounded.", "",
    ]  # fmt: skip
    cells = []
    for environment, ways in facts["found"].items():
        for way, c in ways.items():
            some = f"{c['same_score']}, of {c['numbers_a_score']} numbers" + f" (differ: {', '.join(c['differ'])})" * bool(c["differ"])
            cells.append([environment, way, c["episodes"], c["same_reward"], some, c["same_replies"], f"{c['mean_reward']:.6f}",
                          f"{c['mean_reward_verifiers']:.6f}", ", ".join(map(str, c["nodes"]))])  # fmt: skip
    lines += [
        *rows_of("| environment | way | episodes | same reward | same score, all numbers | same replies as text | mean reward, ours | "
                 "verifiers | nodes a trace |", cells),
        "",
        "* `text`: a scripted player, the expert three times in four, else one of twelve ways to spoil its answer. What it says arrives "
        "as it was said.",
        "* `parsed`: the same behind a server that, as vLLM, takes thinking and tool calls out of the text. The adapter writes them back; "
        "where the player was broken the text may differ from what was said (thinking that never ended gets an end, what stood between two "
        "calls is lost), the score does not.",
        "* `policy`: the base model, greedy, served by bridges/serve.py; ours is rollout.play.",
        "* `tokens`: the same model as prime-rl samples it, compared token by token (below). In swarm, for `policy` and `tokens`, with a "
        "tokenizer that cuts `user` from the end of its line, as Qwen3's does: pico_swarm's own has one token for both, and verifiers "
        "cuts between them.", "",
    ]  # fmt: skip
    for environment, ways in facts["found"].items():
        if c := ways.get("tokens"):
            same = f"{c['same_tokens']} of {c['episodes']} episodes hold the very same tokens ({c['tokens']:,} in all), given and sampled"
            gap = f"log-probs, which a trace keeps to four decimals, differ by at most {c['largest_logprob_gap']:.6f}"
            lines.append(f"* {environment}, tokens: {same}; {gap}.")
    write_page(OUT / "README.md", [*lines, PRIME_RL])


def main(n: int = 100, policy_n: int = 32, swarm_n: int = 8, environments: str = ",".join(ENVIRONMENTS), table: bool = False) -> None:
    """Compare, print, and write results/verifiers/.

    Args:
        n: seeds of the scripted player, in each environment.
        policy_n: seeds of the policy in letters and alphabet; 0 leaves it out.
        swarm_n: the same in swarm, where an episode has 25 turns.
        environments: which, with commas. Only a check of all three is written down.
        table: only write the README again, from check.json."""
    if table:
        return write_table()
    chosen, found, started = environments.split(","), {}, time.perf_counter()
    if unknown := set(chosen) - set(ENVIRONMENTS):
        raise SystemExit(f"--environments {', '.join(unknown)}: choose from {', '.join(ENVIRONMENTS)}")
    for environment in chosen:
        found[environment] = check_scripted(environment, n)
        count = swarm_n if environment == "swarm" else policy_n
        if count:
            with tempfile.TemporaryDirectory() as folder:
                found[environment] |= check_policy(environment, count, Path(folder))
        for way, c in found[environment].items():
            print(f"{environment:9} {way:7}", json.dumps(c), flush=True)
    versions = {name: version(name) for name in ("verifiers", "renderers", "openai", "torch", "transformers")}
    command = f"python -m lab.trust.verifiers_check --n {n} --policy-n {policy_n} --swarm-n {swarm_n}"
    versions = {"Python": platform.python_version(), **versions}
    facts = {"command": command, "versions": versions, "seconds": round(time.perf_counter() - started)}
    if set(chosen) == set(ENVIRONMENTS):
        write_json(OUT / "check.json", {**facts, "found": found})
        write_table()


if __name__ == "__main__":
    tyro.cli(main)
