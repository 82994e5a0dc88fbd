"""lab/speed/memory.py: is what it computes what the code takes? Formulas are compared with bytes counted on small models."""

import importlib.util
import json
import re
import weakref
from dataclasses import fields, replace
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import settings
import train
from fast import ahead, logprobs, plan
from fast.sampler import FastDecoder
from fast.logprobs import token_logprobs
from fast.sampler import TorchSampler
from helpers import SmallCard
from lab.speed import memory
from policy import PICO, Policy, load_policy

torch.set_num_threads(1)
TINY = dict(vocab_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)
CONFIGS = {
    "narrow": TINY | dict(hidden_size=96, intermediate_size=224),
    "wide": TINY | dict(hidden_size=160, intermediate_size=640),
}
CONFIGS["experts"] = CONFIGS["narrow"] | dict(num_experts=8, num_experts_per_tok=4, moe_intermediate_size=64, norm_topk_prob=True)
CASES = [(name, 8) for name in CONFIGS] + [("narrow", 0), ("wide", 0)]  # all weights of the experts are no plan for one card


@pytest.fixture(autouse=True)
def as_on_a_card(monkeypatch):
    """The plan is about cards: transformers' layers, and one buffer for a chunk's logits."""
    monkeypatch.setattr(logprobs, "trunk_of", lambda lm: None)
    monkeypatch.setattr(logprobs.Head, "room", staticmethod(lambda chunk, V, device: torch.empty(chunk, V, device=device)))


def as_on_cuda():
    """On a CPU token_logprobs turns its bfloat16 autocast off. Leave it on; whoever else turns autocast off gives no dtype, and may."""
    real = torch.autocast
    return patch("torch.autocast", lambda device_type, dtype=None, enabled=True: real(device_type, dtype, enabled or dtype is not None))


def small(config: dict, rank: int, checkpointing: bool = False) -> Policy:
    """Random weights, in the dtypes that load_policy chooses on a GPU (a test below)."""
    torch.manual_seed(0)
    model = memory.build(config, rank, torch.bfloat16 if rank else torch.float32).eval()
    policy = Policy(model, None, frozenset(), "small", rank, torch.device("cpu"))
    if checkpointing:  # as train.py does
        policy.lm.gradient_checkpointing_enable()
        policy.lm.enable_input_require_grads()
        model.train()
    return policy


def batch(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 512, (rows, tokens + 1)), torch.ones(rows, tokens, dtype=torch.bool)


def saved(policy: Policy, tokens: int, chunk: int = 64) -> int:
    """Bytes that autograd keeps of token_logprobs over 2 rows, parameters not counted. A storage counts once, and whole."""
    own = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    found = {}  # holds the storages, so that no address is used twice

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return x

    with as_on_cuda(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        token_logprobs(policy, *batch(2, tokens), chunk=chunk)
    return sum(storage.nbytes() for storage in found.values())


def peak(policy: Policy, rows: int, tokens: int, chunk: int = 64) -> int:
    """Bytes alive at the worst moment of one forward and backward pass; weights and gradients are not counted."""
    data, weights = batch(rows, tokens), list(policy.model.parameters())
    for p in weights:
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    with as_on_cuda(), SmallCard(known=[*data, *weights, *(p.grad for p in weights if p.requires_grad)]) as card:
        token_logprobs(policy, *data, chunk=chunk)[0].sum().backward()
    return card.peak


# ---------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    "name, total, outside_embeddings",  # billions, as the model cards give them
    [("Qwen3-0.6B", 0.6, 0.44), ("Qwen3-1.7B", 1.7, 1.4), ("Qwen3-4B", 4.0, 3.6), ("Qwen3-30B-A3B", 30.5, 29.9)],
)
def test_parameters_are_those_of_the_model_cards(name, total, outside_embeddings):
    config, weights = memory.MODELS[name], memory.sizes(name, 32).weights
    embeddings = config["vocab_size"] * config["hidden_size"] * (1 if config["tie_word_embeddings"] else 2)
    assert round(weights / 1e9, 1) == total
    assert round((weights - embeddings) / 1e9, 2 if total < 1 else 1) == outside_embeddings


def test_lora_is_counted_as_load_policy_attaches_it(load):
    policy = load("qwen3", 4)
    c = policy.lm.config
    config = {name: getattr(c, name) for name in (*TINY, "hidden_size", "intermediate_size")}
    assert memory.count(config, 4).lora == sum(p.numel() for p in policy.trainable().values())
    assert memory.count(config, 0).weights == memory.count(config, 4).weights == policy.n_parameters
    attention = lambda c: 2 * (c["hidden_size"] + c["num_attention_heads"] * 128) + 2 * (c["hidden_size"] + c["num_key_value_heads"] * 128)
    c = memory.MODELS["Qwen3-4B"]  # and by hand: rank · (in + out) of seven matrices a layer
    assert memory.sizes("Qwen3-4B", 32).lora == 36 * 32 * (attention(c) + 3 * (c["hidden_size"] + c["intermediate_size"]))
    assert memory.sizes("Qwen3-30B-A3B", 32).lora == 48 * 32 * attention(memory.MODELS["Qwen3-30B-A3B"])  # of four: no expert, no router


@pytest.mark.parametrize("rank, base", [(4, torch.bfloat16), (0, torch.float32)])
def test_dtypes_on_a_device(model_folder, rank, base):
    """2 bytes a frozen weight and 4 a learning one: the meta device is no CPU, so load_policy takes a GPU's dtypes."""
    policy = load_policy(model_folder("qwen3"), rank, 8, device="meta")
    assert {p.dtype for name, p in policy.model.named_parameters() if "lora_" not in name} == {base}
    assert {p.dtype for p in policy.trainable().values()} == {torch.float32}


# ---------------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name, rank", CASES)
def test_what_autograd_keeps(name, rank, checkpointing):
    config, policy = CONFIGS[name], small(CONFIGS[name], rank, checkpointing)
    formula = [memory.kept(config, memory.count(config, rank), rank, 2 * T, checkpointing)[0] for T in (100, 300)]
    counted = [saved(policy, T) for T in (100, 300)]
    assert formula == pytest.approx(counted, rel=0.05)
    assert formula[1] - formula[0] == pytest.approx(counted[1] - counted[0], rel=0.05)  # per token, without what is fixed


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name, rank", CASES)
def test_peak_of_forward_and_backward(name, rank, checkpointing):
    config, z = CONFIGS[name], memory.count(CONFIGS[name], rank)
    policy = small(config, rank, checkpointing)
    for T in (100, 300):
        formula = memory.activations(config, z, rank, 2 * T, checkpointing, chunk=64)
        assert formula == pytest.approx(peak(policy, 2, T), rel=0.15), f"{2 * T} tokens"


@pytest.mark.parametrize("rank", [8, 0])
def test_logits_cost_a_chunk_and_not_the_length(rank):
    config = CONFIGS["narrow"] | {"vocab_size": 20_000, "num_hidden_layers": 1}
    policy, z = small(config, rank), memory.count(config, rank)
    assert saved(policy, 300) < 300 * config["vocab_size"]  # a byte a logit would be more, and a logit has four
    for T in (50, 150):
        assert peak(policy, 2, T) == pytest.approx(memory.activations(config, z, rank, 2 * T, False, chunk=64), rel=0.05)


# ---------------------------------------------------------------------------------------------- what stays


def test_adamw_takes_two_moments_and_while_it_steps_nothing_more():
    weight = torch.nn.Parameter(torch.randn(1000, 100))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight], weight_decay=0.0, fused=True)  # as train.py asks for on a GPU
    optimizer.step()
    kept = [t for t in optimizer.state[weight].values() if t.numel() > 1]
    assert sum(t.nbytes for t in kept) == 8 * weight.numel()
    with SmallCard(known=[weight, weight.grad, *kept]) as card:
        optimizer.step()
    assert card.peak < 0.01 * weight.numel()


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])  # gpt2: PlainDecoder
def test_sampler_holds_a_copy_and_while_it_is_awake_a_cache(load, kind):
    policy = load(kind)
    sampler = TorchSampler(policy)
    ask = lambda: sampler.sample([[5] * 10, [6] * 10], 3, 20, 1.0, [[(g, i) for i in range(3)] for g in range(2)])
    first, d, c = ask(), sampler.decoder, policy.lm.config
    if kind == "qwen3":
        copied = [d.embed, d.norm, *(t for w in d.layers for x in w.values() for t in (x if isinstance(x, tuple) else [x]))]
        copied = sum(t.nbytes for t in copied if isinstance(t, torch.Tensor))
        assert copied == pytest.approx(4 * policy.n_parameters, rel=0.01)  # but for the norms of q and k, one a head
        kv = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
        assert sum(t.nbytes for t in cached(d)) == 4 * kv * 2 * (10 + 3 * 20)  # two prompts once, six replies
    assert cached(d)
    with sampler.asleep():
        assert not cached(d)
    assert ask() == first  # it wakes up by itself


def cached(decoder) -> list:
    """What a decoder holds of the last batch."""
    if isinstance(decoder, FastDecoder):
        return decoder.prompts + decoder.own
    return [decoder.cache] if decoder.cache else []


# ---------------------------------------------------------------------------------------------- a run keeps nothing it need not


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A tiny run without and one with gradient checkpointing: {checkpointing: what was seen on the way}."""
    return {checkpointing: tiny_run(tmp_path_factory.mktemp("runs"), checkpointing) for checkpointing in (False, True)}


def tiny_run(folder, checkpointing: bool) -> SimpleNamespace:
    """plays: (names of gradients, optimizers alive, training mode?); updates: (the sampler's cache, forward passes, gradients?);
    synced: (the sampler's version, are its folded weights the policy's?) at every play."""
    seen = SimpleNamespace(sampler=None, plays=[], synced=[], updates=[], forwards=0, lines=[], asked=[])
    optimizers, real_init = weakref.WeakSet(), torch.optim.Optimizer.__init__

    def init(self, *args, **kwargs):
        real_init(self, *args, **kwargs)
        optimizers.add(self)

    def load_policy(*args, real=train.load_policy):
        policy = real(*args)
        policy.lm.model.layers[0].self_attn.register_forward_hook(lambda *_: setattr(seen, "forwards", seen.forwards + 1))
        return policy

    def make_sampler(cfg, policy, real=ahead.make_sampler):
        seen.sampler = real(cfg, policy)
        return seen.sampler

    def spied_play(policy, *args, real=ahead.play, **more):
        gradients = [name for name, p in policy.model.named_parameters() if p.grad is not None]
        seen.plays.append((gradients, len(optimizers), policy.model.training))
        seen.synced.append((seen.sampler.version, same_weights(seen.sampler.decoder, FastDecoder(policy))))
        groups = real(policy, *args, **more)
        for group in groups:
            for i, episode in enumerate(group):
                episode.reward = float(i % 2)  # replies of 16 tokens earn nothing, and then nothing is trained
        return groups

    def update(policy, *args, real=train.update, **kwargs):
        cache, before = cached(seen.sampler.decoder), seen.forwards
        stats = real(policy, *args, **kwargs)
        seen.updates.append((cache, seen.forwards - before, any(p.grad is not None for p in policy.model.parameters())))
        return stats

    cfg = settings.Config(
        updates=2, num_tasks=2, k=2, eval_n=2, max_tokens=16, sft_steps=2, sft_examples=2, threads=1, wandb=False,
        eval_other_tiers=False,
        runs=str(folder), name="tiny", device="cpu",
    )  # fmt: skip
    settings.check(cfg)
    fits = {"gradient_checkpointing": checkpointing}  # as --model auto does on a small card
    choose = lambda *asked: (seen.asked.append(asked), (str(PICO), "as planned", fits))[1]
    spies = patch.multiple(train, load_policy=load_policy, update=update, choose_model=choose)
    rollouts = patch.multiple(ahead, make_sampler=make_sampler, play=spied_play)
    whole_rows = patch("fast.logprobs.shares_prompts", lambda lm: False)  # else the plain run has another number of passes
    with spies, rollouts, whole_rows, patch.object(torch.optim.Optimizer, "__init__", init):
        folder = train.train(cfg, {"device", "vllm_sleep"})
    seen.lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    seen.config = json.loads((folder / "config.json").read_text())
    return seen


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_gradients_and_one_optimizer_while_the_sampler_works(runs, checkpointing):
    assert runs[checkpointing].plays == [([], 1, False)] * (3 + 2)  # three evaluations, two rollouts


def same_weights(a: FastDecoder, b: FastDecoder) -> bool:
    """Do both hold the same folded weights, to the last bit?"""
    flat = lambda d: [d.embed, d.norm, *(t for w in d.layers for x in w.values() for t in (x if isinstance(x, tuple) else [x]))]
    return all(x is y is None or torch.equal(x, y) for x, y in zip(flat(a), flat(b), strict=True))


def test_whatever_is_sampled_is_sampled_from_the_policy_as_it_is_then(runs):
    """Once "before", once "after_sft", two batches, once "final"; SFT and both updates have moved the weights."""
    assert runs[False].synced == [(version, True) for version in [0, 0, 0, 1, 2]]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_cache_while_the_trainer_works(runs, checkpointing):
    assert [(cache, gradients) for cache, _, gradients in runs[checkpointing].updates] == [([], True)] * 2


def test_what_auto_sets_is_what_runs_and_is_kept(runs):
    for checkpointing, run in runs.items():
        assert (run.config["model"], run.config["gradient_checkpointing"]) == ("pico_base", checkpointing)
        [(model, env, device, asked)] = run.asked
        assert (model, env, device) == ("auto", "letters", "cpu")
        assert asked["max_tokens"] == 16 and asked["vllm_sleep"] is True and "vllm_memory" not in asked and "micro_tokens" not in asked


def test_gradient_checkpointing_changes_the_memory_and_not_the_run(runs):
    plain, checked = runs[False], runs[True]
    assert type(plain.sampler.decoder) is type(checked.sampler.decoder) is FastDecoder
    for (_, once, _), (_, twice, _) in zip(plain.updates, checked.updates, strict=True):
        assert twice == 2 * once > 0  # every layer is computed again in the backward pass
    for a, b in zip(plain.lines, checked.lines, strict=True):
        assert a["grad_norm"] > 0 and a.keys() == b.keys()
        for name in a:
            assert name.startswith("seconds_") or a[name] == pytest.approx(b[name], abs=1e-4), name


# ---------------------------------------------------------------------------------------------- the plan


@pytest.fixture
def a100(monkeypatch):
    """This machine has a card of 80 GB, with vLLM."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(plan, "card_memory", lambda _: memory.CARDS["A100 80 GB"])
    monkeypatch.setattr(plan, "engine_of", lambda _: "vllm")


@pytest.mark.parametrize("engine", ["torch", "vllm"])
@pytest.mark.parametrize("rank", [32, 8, 0])
@pytest.mark.parametrize("ahead", [False, True])
def test_the_small_plan_of_auto_is_this_one(a100, engine, rank, ahead):
    """It may say up to 2 GiB or 10% too much, and nothing too little."""
    for model, env, mend in product(plan.SIZES, plan.TALK, plan.MENDS):
        name = model.removeprefix("Qwen/").removesuffix("-Instruct-2507")
        asked = memory.Setting(name, "A100 80 GB", rank, engine, max_tokens=plan.longest(env) - memory.PROMPT, ahead=ahead)
        asked = replace(asked, micro_tokens=mend.get("micro_tokens", 8192), checkpointing="gradient_checkpointing" in mend)
        alone = {} if plan.TALK[env][0] == 1 else {"k": plan.ROWS}  # from the second turn on a conversation is sampled by itself
        least = replace(asked, num_tasks=1, eval_n=1, **alone) if engine == "torch" else asked  # one group at a time
        update = memory.plan(least if ahead else asked).phases["update"]
        peak = max(update, memory.plan(least).phases["rollout"]) / memory.GIB
        small = plan.needed(model, env, "cuda", engine, mend | {"lora_rank": rank}, ahead)
        assert peak - 0.1 < small < max(peak + 2, 1.1 * peak), (model, env, mend)


def test_the_small_plan_has_the_defaults_of_the_settings():
    """fast/ may not import settings.py, where each is declared."""
    for env, (turns, tokens, between) in plan.TALK.items():
        large = settings.by_size(1e9, env)
        assert (turns, tokens) == ({"letters": 1, "alphabet": settings.Config.max_turns, "swarm": 25, "yours": 1}[env], large["max_tokens"])
        assert between > 150 and plan.longest(env) == turns * tokens + between
        defaults = {name: getattr(settings.Config, name) for name in plan.DEFAULTS}
        assert plan.DEFAULTS == defaults | {name: large[name] for name in ("micro_tokens", "k")}
    assert plan.longest("letters", 100) == 100 + 192 and plan.longest("mine.py:Mine") == plan.longest("yours")
    assert {f.name for f in fields(settings.Config)} >= plan.READ


PAGES = {
    name: " ".join((memory.RESULTS.parent / name).read_text().replace("# ", "").split())
    for name in ("docs/gpu.md", "docs/scale.md", "fast/ahead.py", "settings.py")
}


def test_what_the_pages_say_of_the_cases_that_do_not_fit():
    """In whole GiB. Each number is looked up in its sentence."""
    update = lambda key, **more: round(memory.plan(replace(memory.ASKED[key], **more)).phases["update"] / memory.GIB)
    part = lambda key, name: round(memory.plan(memory.ASKED[key]).parts[name] / memory.GIB)
    checked, half = {"checkpointing": True}, {"micro_tokens": 4096}
    weights, theirs = (part("30b-lora-a100", name) for name in ("weights", "sampler's weights"))
    copy = part("4b-full-torch", "sampler's weights")
    room, two = int(memory.CARDS["A100 80 GB"]), update("4b-ahead")
    longest, reply = f"{plan.longest('swarm'):,}", plan.TALK["swarm"][1]
    gpu = (
        f"does not fit an A100 of 80 GB: the trainer's weights take {weights} GiB and vLLM's copy {theirs}",
        f"{copy} GiB for a 4B, and even with `--gradient-checkpointing` an update takes {update('4b-full-torch', **checked)}",
        f"up to {longest} tokens (25 replies of {reply},",
        f"then takes {update('4b-swarm')} GiB to train on one, and {update('4b-swarm', **checked)} with `--gradient-checkpointing`",
    )
    scale = f"takes {two} GiB of a card's {room} and is refused; with `--micro-tokens 4096` it takes {update('4b-ahead', **half)}"
    assert scale in PAGES["docs/scale.md"]
    assert not [sentence for sentence in gpu if sentence not in PAGES["docs/gpu.md"]]
    assert f"{two} GiB for Qwen3-4B and the defaults, {update('4b-ahead', **half)} with --micro-tokens 4096" in PAGES["fast/ahead.py"]
    doubled = update("4b-lora", micro_tokens=16384)
    assert f"a 4B then takes {update('4b-lora')} of an A100's 80 GB, with 16,384 it would take {doubled}" in PAGES["settings.py"]
    assert not memory.plan(replace(memory.ASKED["4b-ahead"], **half)).why


def test_a_conversation_of_swarm_ends_the_memory_of_80_gb_where_the_page_says(a100):
    """A24: an episode alone may exceed micro_tokens; auto then turns gradient checkpointing on."""
    said = int(re.search(r"memory ends at a conversation of about ([\d,]+) tokens", PAGES["docs/gpu.md"])[1].replace(",", ""))
    fits = lambda tokens: plan.needed(plan.BIG, "letters", "cuda", "vllm", {"max_tokens": tokens - 192}) < 79.1
    assert fits(said) and not fits(said + 100)
    whole = lambda tokens: memory.plan(replace(memory.ASKED["4b-swarm"], max_tokens=tokens - memory.PROMPT)).why
    assert not whole(said) and whole(said + 200) == ["update"]
    for tokens, settings_ in ((said, {}), (said + 100, {"gradient_checkpointing": True})):
        each = (tokens - plan.TALK["swarm"][2]) / 25
        assert plan.settings_that_fit(plan.BIG, "swarm", "cuda", {"max_tokens": each})[0] == settings_


@pytest.mark.parametrize("preset", ["swarm-published", "alphabet-published"])
def test_a_published_preset_fits_a_card_of_80_gb_in_both_plans(a100, preset):
    p = settings.PRESETS[preset]
    asked = {name: p[name] for name in plan.READ & p.keys()}
    found, peak = plan.settings_that_fit(p["model"], p["env"], "cuda", asked)
    row = memory.plan(memory.published(preset))
    computed = max(row.phases.values()) / memory.GIB
    assert found == {} and not row.why and computed - 0.1 < peak < max(computed + 2, 1.1 * computed)
    # vLLM holds a whole conversation, and without checkpointing the swarm's could not be trained on.
    assert row.cache_tokens > plan.longest(p["env"], p["max_tokens"])
    without = memory.plan(replace(memory.published(preset), checkpointing=False)).why
    assert without == (["update"] if preset == "swarm-published" else [])


def test_vllm_needs_room_for_the_longest_conversation(a100):
    """25 replies of 2,048 are longer than the 32,768 tokens that it has room for otherwise."""
    long, share = {"max_tokens": 2048, "gradient_checkpointing": True}, (7.5 + plan.VLLM_ROOM + 6) / 79.1
    assert plan.longest("swarm", 2048) == 55_900
    assert plan.needed(plan.BIG, "swarm", "cuda", "vllm", long | {"vllm_memory": share}) == float("inf")
    assert plan.needed(plan.BIG, "swarm", "cuda", "vllm", {"gradient_checkpointing": True, "vllm_memory": share}) < 79.1
    small = replace(memory.published("swarm-published"), share=share)
    assert any("no room for 55,900 tokens" in why for why in memory.plan(small).why)


def test_a_row_is_measured_when_a_card_was_asked(tmp_path):
    peaks = {"rollout": 55.0, "evaluation": 58.0, "update": 70.0}
    (tmp_path / "update.json").write_text(json.dumps({
        "command": "…", "4b-lora-torch": {"peak_gib": peaks, "checkpointing": False},
        "4b-full-torch": {"peak_gib": peaks, "checkpointing": True},
        "4b-lora": {"failed_while": "learning: out of memory", "checkpointing": False},
    }))  # fmt: skip
    assert memory.on_a_card(tmp_path / "update.json") == {"4b-lora-torch-default": peaks}
    assert memory.on_a_card(tmp_path / "nothing.json") == {}


CARDS = {"T4, 15 GB": (14.6, (7, 5)), "Ampere, 16 GB": (15.7, (8, 6)), "Ampere, 24 GB": (23.6, (8, 6)), "A100, 40 GB": (39.4, (8, 0)),
         "Ampere, 48 GB": (47.4, (8, 6)), "A100, 80 GB": (79.1, (8, 0)), "H200, 141 GB": (139.7, (9, 0))}  # fmt: skip


def test_the_pages_table_of_what_auto_takes_is_the_plan(monkeypatch):
    page = (memory.RESULTS.parent / "docs" / "gpu.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ") and line[2:].split(" |")[0] in CARDS]
    assert [row[0] for row in rows] == list(CARDS)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(plan, "where_is", lambda model: "the hub")
    for name, *cells in rows:
        monkeypatch.setattr(plan, "card_memory", lambda _, name=name: CARDS[name][0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, name=name: CARDS[name][1])
        for env, cell in zip(("letters", "alphabet", "swarm"), (cells[0], *cells), strict=True):
            path, _, fits = plan.choose_model("auto", env, "cuda", {})
            shown = path.split("/")[-1].removesuffix("-Instruct-2507") + (f" `{plan.typed(fits)}`" if fits else "")
            assert cell == shown, (name, env)


def test_first_settings_that_fit():
    assert not memory.plan(memory.ASKED["4b-lora"]).why  # the defaults
    asked = memory.ASKED["0.6b-lora"]
    assert memory.plan(asked).why == ["update"]
    fits = memory.mend(asked)
    assert not fits.why and fits.setting == replace(asked, micro_tokens=fits.setting.micro_tokens)
    assert memory.plan(replace(asked, micro_tokens=2 * fits.setting.micro_tokens)).why
    assert not memory.plan(replace(asked, checkpointing=True)).why


def test_a_plan_adds_up():
    asked = memory.ASKED["4b-lora"]
    p = memory.plan(asked)
    # by hand: vLLM's share is what it samples in; weights, adapter and moments, and a context beside it; gradients while it trains
    z = memory.sizes("Qwen3-4B", 32)
    held = 2 * z.weights + (4 + 8) * z.lora + memory.CONTEXT
    assert p.phases["rollout"] == p.phases["evaluation"] == pytest.approx(0.3 * 79.1 * memory.GIB + held)
    assert p.phases["update"] == pytest.approx(held + 4 * z.lora + memory.GRAPHS + p.parts["activations"])
    assert p.cache_tokens == pytest.approx(p.parts["KV cache"] / (2 * 2 * 36 * 8 * 128), rel=1e-6)
    assert memory.plan(replace(asked, share=0.15)).why[-1].startswith("vLLM does not start")
    larger = [memory.plan(replace(asked, micro_tokens=n)).phases["update"] for n in (16384, 32768)]
    per_token = (larger[1] - larger[0]) / 16384 / (1 + memory.FRAGMENTS) / 36
    assert per_token == pytest.approx(sum(memory.layer_bytes(memory.MODELS["Qwen3-4B"], 32).values()), rel=0.05)


def test_our_sampler_takes_fewer_rows_where_it_runs_out_of_memory():
    asked, row = memory.ASKED["0.6b-lora"], memory.PROMPT + 2048
    token = 2 * 2 * 28 * 8 * 128
    (evaluation, _), (rollout, tokens) = memory.own_sampler(asked, token, float("inf"))
    assert tokens == 128 * row and 256 * row * token < evaluation < 1.3 * 256 * row * token
    for free in (evaluation / 3, evaluation / 9, 0):
        (needed, _), (later, fewer) = memory.own_sampler(asked, token, free)
        assert fewer <= 128 * row and (free == 0 or needed <= free and later <= free)
    assert fewer == 16 * row  # one group at least
    assert memory.own_sampler(replace(asked, eval_n=16), token, float("inf"))[1][1] == 128 * row  # a short evaluation sets no limit


def test_rows_say_whether_they_were_measured():
    plans = {"4b-lora-default": memory.plan(memory.ASKED["4b-lora"]), "30b-lora-a100-fits": None}
    computed = memory.page(plans, {})
    assert computed.count("*computed*") == 1 and "*measured*\n" not in computed and "| *measured* |" not in computed
    shown = memory.page(plans, {"4b-lora-default": {"rollout": 12.3, "evaluation": 23.4, "update": 34.5}})
    assert "| 12.3 | 23.4 | 34.5 | *measured* |" in shown


def test_committed_table_is_what_the_code_computes():
    plans, rows = memory.cases(), json.loads((memory.OUT / "memory.json").read_text())["rows"]
    assert rows.keys() == plans.keys()
    assert {key: row and row["phases"] for key, row in rows.items()} == {key: p and pytest.approx(p.phases) for key, p in plans.items()}
