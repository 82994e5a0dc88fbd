"""Can this model be trained to chat, and is it safe to load? If not, one sentence says why.

A folder may come from anywhere. Only safetensors are loaded, and none of the model's own code. A
model needs a chat template, an end-of-turn token, and a tokenizer that can write replies.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bookkeeping.records import printable
from fast.machine import first_line, in_bfloat16, pick_device
from policy import EMBEDDED, SMOLLM2, Policy, load_policy


def load_checked(
    name: str, lora_rank: int, lora_alpha: int, device="auto", seed=0, today=""
) -> Policy:
    """policy.load_policy of a folder or hub id that may come from anywhere.

    It computes in bfloat16 if the device has it and the model is not small. SystemExit with one
    sentence if it cannot be loaded, or cannot chat, or there is no such device.
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
    except ValueError as error:
        raise SystemExit(f"--model {name}: {error}") from None
    policy.model.to(place)
    policy.device = torch.device(place)
    return policy


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
    """ValueError if it cannot write replies, has tokens that the model lacks, or a bad template."""
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
    last = max(tokenizer.get_vocab().values())
    rows = policy.lm.get_input_embeddings().weight.shape[0]
    if last >= rows:
        raise ValueError(
            f"its tokenizer has a token {last} and the model embeds {rows}; the two do not belong "
            "together"
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
