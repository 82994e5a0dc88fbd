"""Can this model be trained to chat, and is it safe to load? If not, one sentence says why.

A folder may come from anywhere. Only safetensors are loaded, and none of the model's own code. A
model needs a chat template, an end-of-turn token, and a tokenizer that can write replies. Sampled
token by token and trained on as a whole, it has to say the same: `check_passes` measures it.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from batch import collate
from bookkeeping.records import printable
from chat import prompt_ids
from fast import layers
from fast.machine import (
    first_line,
    in_bfloat16,
    longest_conversation,
    out_of_memory,
    pick_device,
    which,
)
from fast.sampler import TorchSampler
from policy import (
    EMBEDDED,
    SMOLLM2,
    Backend,
    PlainSampler,
    Policy,
    load_policy,
    plain_forward,
    rope_switch,
)
from rollout import Episode


def load_checked(
    name: str, lora_rank: int, lora_alpha: int, device="auto", seed=0, today="", dtype="float32"
) -> Policy:
    """policy.load_policy of a folder or hub id that may come from anywhere.

    On a card it computes in bfloat16 if the card has it and the model is not small. dtype: in what
    it multiplies on a CPU (fast/layers.py). SystemExit with one sentence if it cannot be loaded, or
    cannot chat, or there is no such device.
    """
    folder = EMBEDDED.get(name, name)
    if folder == str(SMOLLM2) and not SMOLLM2.exists():
        raise SystemExit("--model smollm2 is not here yet; fetch it: make smollm2")
    # cuDNN plans attention anew for each shape, and each of our batches has another. It has also
    # misread masks without an error (pytorch#191612). torch's other kernels stay on.
    torch.backends.cuda.enable_cudnn_sdp(False)
    load = partial(load_policy, name, lora_rank, lora_alpha, "cpu", seed, today)
    try:
        policy = loaded(folder, load, in_bfloat16(pick_device(device)))
        # Its size is known only now.
        place = pick_device(device, policy.n_parameters)
        if policy.bfloat16 and not in_bfloat16(place, policy.n_parameters):
            policy = loaded(folder, load, False)
        check_tokenizer(policy)
        if dtype == "bfloat16" and place == "cpu":
            if not layers.are_known(policy.lm.config):
                raise ValueError("fast/layers.py does not know it; leave out --dtype bfloat16")
            policy.bfloat16 = True
    except ValueError as error:
        raise SystemExit(f"--model {name}: {error}") from None
    policy.model.to(place)
    policy.device = torch.device(place)
    return policy


def load_teacher(cfg, policy: Policy, prompt: list[int], opening: list[dict], env) -> Policy:
    """The model of --teacher. ValueError if it would read other tokens than the policy.

    prompt: the first task's, as the policy reads it.
    """
    teacher = load_checked(cfg.teacher, 0, cfg.lora_alpha, cfg.device, today=policy.today)
    teacher.model.requires_grad_(False)
    same = teacher.tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    if not same or prompt_ids(teacher, opening, env.tools, env.think) != prompt:
        raise ValueError(
            f"--teacher {cfg.teacher}: it has another tokenizer or chat template, so it cannot "
            "judge the policy's tokens; give a model with the policy's own"
        )
    return teacher


def loaded(folder: str, load: Callable, bfloat16: bool) -> Policy:
    """load(bfloat16=…); ValueError with one sentence if the folder or hub id cannot be loaded."""
    ours = folder.startswith(("runs/", "models/"))  # if not there, mistyped: not a hub id
    if not Path(folder).exists() and (ours or folder.count("/") != 1):
        raise ValueError(
            "no such folder, and no hub id of the form owner/name; check the spelling, or give its "
            "new place if it has moved"
        )
    try:
        refuse_pickles(Path(folder))
        return load(bfloat16=bfloat16)
    except Exception as error:  # a folder may hold anything, and transformers raises anything
        raise ValueError(
            f"cannot be loaded ({printable(first_line(error))}); give a folder or a hub id of a "
            "causal LM"
        ) from None


def refuse_pickles(folder: Path) -> None:
    """ValueError if a folder's index or config points to code, or to weights in another format.

    transformers' use_safetensors is not enough: it checks the name of one file only.
    """
    index, config = (
        json.loads(file.read_bytes()) if file.exists() else {}
        for file in (folder / "model.safetensors.index.json", folder / "config.json")
    )
    named = config.get("transformers_weights") or "model.safetensors"
    for file in {str(f) for f in (named, *index.get("weight_map", {}).values())}:
        # Windows has three ways into another folder: / and \ and :
        if not re.fullmatch(r"[^/\\:]*\.safetensors(\.index\.json)?", file):
            raise ValueError(
                f"its weights are said to be in {file}, and only safetensors beside the config are "
                "read"
            )
    if "/" in str(config.get("attn_implementation")):
        raise ValueError("its config asks for attention code from the hub")


def check_tokenizer(policy: Policy) -> None:
    """ValueError if it cannot write replies, or has no chat template that works."""
    tokenizer = policy.tokenizer
    probe = (  # the characters of replies in our environments
        'Count: <answer>{"a": 10, "z": 3}</answer> <think>b1 c2</think>\n'
        "Mary Ann O'Neil // new name! 456789"
    )
    ids = tokenizer(probe, add_special_tokens=False)["input_ids"]
    back = tokenizer.decode(ids, skip_special_tokens=False)
    if "".join(back.split()) != "".join(probe.split()):  # good tokenizers may differ in spaces
        raise ValueError(
            f"its tokenizer cannot write {probe!r}, it comes back as {back!r}; use a model that "
            "knows these characters"
        )
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # a template is a program in a sandbox, and may raise anything
        raise ValueError(
            f"it has no chat template, or one that fails ({printable(first_line(error))[:120]}); "
            "mend chat_template.jinja, or use an instruct version of the model"
        ) from None


# ------------------------------------------------------------------- one text, read in several ways

START, STEPS = 16, 4  # tokens before the first steps, and how many steps
MOST_NATS = {True: 0.3, False: 1e-4}  # {bfloat16?: more than that per token is not rounding}
ENOUGH = 64  # tokens, if a layer does the same however long the text is


def check_passes(
    policy: Policy, cfg, prompt: list[int], turns: int | None, backend: Backend
) -> None:
    """ValueError if this model would be sampled from one distribution and trained on another.

    A text of the longest planned conversation's length, the first prompt again and again, is read
    as it is sampled, near its start and at its end, and as it is trained on. Both are compared with
    one plain pass over the whole text. turns: the most replies, if the environment says.
    """
    config = policy.lm.config.get_text_config()
    longest = longest_conversation(cfg.env, cfg.max_tokens, len(prompt), turns)
    n = min(longest, getattr(config, "max_position_embeddings", None) or longest)
    switch = rope_switch(config) or n
    if switch < n:
        raise ValueError(
            f"--model {policy.name}: its RoPE turns all tokens by other angles once a text has "
            f"more than {switch}, and a conversation here may have {longest}: what was sampled "
            "before would be trained on as something else; lower --max-tokens, or take another "
            "model"
        )
    if layers.are_known(policy.lm.config):
        n = min(n, ENOUGH)
    other = "another model" if cfg.plain else "--plain, or another model"
    try:
        off = nats_off(policy, cfg, (prompt * (n // len(prompt) + 1))[:n], backend)
    except Exception as error:  # a model's code may raise anything
        if out_of_memory(error):
            raise
        raise ValueError(
            f"--model {policy.name}: it cannot read a text as it would be sampled or trained on "
            f"({first_line(error)}); take {other}"
        ) from None
    way = max(off, key=off.get)
    if off[way] > MOST_NATS[policy.bfloat16]:
        raise ValueError(
            f"--model {policy.name}: its tokens' log-probs {way} are {off[way]:.2g} nats from "
            f"those of one plain pass over the whole text; take {other}"
        )
    layers.KEPT.clear()  # this copy of the weights is counted later, by fit_memory


@torch.no_grad()
def nats_off(policy: Policy, cfg, text: list[int], backend: Backend) -> dict[str, float]:
    """{where: nats per token that its log-probs differ by from those of one plain pass}."""
    cuts = sorted({min(START, len(text) - STEPS), len(text) - STEPS})
    engine, _ = which(cfg, policy.device, policy.n_parameters)
    sampler = TorchSampler if engine == "torch" else PlainSampler
    endless = sampler(replace(policy, stop_ids=frozenset()))
    seeds = [[(0,), (1,)]] * len(cuts)
    groups = endless.sample([text[:cut] for cut in cuts], 2, STEPS, 1.0, seeds)
    episodes = [
        Episode(
            seed=0,
            group=0,
            token_ids=text[:cut] + sample.token_ids + text[cut + STEPS :],
            sampled=[cut <= i < cut + STEPS for i in range(len(text))],
            logprobs=[0.0] * cut + sample.logprobs + [0.0] * (len(text) - cut - STEPS),
        )
        for cut, samples in zip(cuts, groups)
        for sample in samples
    ]
    batch = collate(episodes, 0, policy.device)
    whole = plain_forward(policy, batch.ids, batch.mask).logprobs
    trained = backend.forward(policy, batch.ids, batch.mask, 1.0, False).logprobs
    gap = lambda logprobs: (logprobs - whole).abs().mean().item()
    return {"in sampling": gap(batch.sampler_logprobs), "in an update": gap(trained)}
