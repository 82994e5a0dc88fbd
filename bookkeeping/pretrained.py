"""Can this model be trained to chat, and is it safe to load? If not, one sentence says why.

A folder may come from anywhere. Only safetensors are loaded, and none of the model's own code. A
model needs a chat template, an end-of-turn token, and a tokenizer that can write replies. The end
of the file chooses the device it runs on, and the number format.
"""

import json
import re
from functools import partial
from math import inf
from pathlib import Path

import torch
import torch.distributed as dist

from bookkeeping.records import printable


def load_checked(name: str, device: str, frozen: bool) -> tuple:
    """(tokenizer, causal LM, the tokens that end a turn, device) of a folder or hub id.

    frozen: its weights will not learn. They are then bfloat16 if the device has it and the model is
    not small, else float32: an Adam step of 5e-6 is lost in bfloat16's 8 bits. ValueError if it is
    not a chat model, SystemExit if there is no such device.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    on = pick_device(device)
    narrow = frozen and in_bfloat16(on)
    ours = name.startswith(("runs/", "models/"))  # if not there, mistyped: not a hub id
    if not Path(name).exists() and (ours or name.count("/") != 1):
        raise ValueError("no such folder, and no hub id of the form owner/name; check the spelling")
    try:
        refuse_pickles(Path(name))
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        load = partial(
            AutoModelForCausalLM.from_pretrained,
            name,
            use_safetensors=True,
            trust_remote_code=False,
        )
        lm = load(dtype=torch.bfloat16 if narrow else torch.float32)
        if narrow and not in_bfloat16(on, lm.num_parameters()):
            lm = load(dtype=torch.float32)  # its size is known only now
    except Exception as error:  # a folder may hold anything, and transformers raises anything
        raise ValueError(
            f"cannot be loaded ({first_line(error)}); give a folder or a hub id of a causal LM"
        ) from None
    stop_ids = find_stops(tokenizer, lm)
    check_tokenizer(tokenizer, lm)
    # cuDNN plans attention anew for each shape, and each of our batches has another. It has also
    # misread masks without an error (pytorch#191612). torch's other kernels stay on.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return tokenizer, lm, stop_ids, pick_device(device, lm.num_parameters())


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


def find_stops(tokenizer, lm: torch.nn.Module) -> frozenset[int]:
    """The tokens that end a turn. A tokenizer that lacks an end or a padding token gets one."""
    ends = lm.generation_config.eos_token_id
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    if not ends:
        raise ValueError("neither model nor tokenizer names an end-of-turn token; set eos_token")
    if tokenizer.eos_token_id is None:  # SFT teaches replies to end with it
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(min(ends))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return frozenset(ends)


def check_tokenizer(tokenizer, lm: torch.nn.Module) -> None:
    """ValueError if it cannot write replies, has tokens that the model lacks, or a bad template."""
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
    last, rows = max(tokenizer.get_vocab().values()), lm.get_input_embeddings().weight.shape[0]
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
            f"it has no chat template, or one that fails ({first_line(error)[:120]}); mend "
            "chat_template.jinja, or use an instruct version of the model"
        ) from None


def first_line(error: Exception) -> str:
    """An error in one line. It may quote a hostile file: control characters become '?'."""
    line = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    return printable(line[:300])


# ----------------------------------------------------------------------------------------- devices

FOR_MPS = 50e6  # parameters from which a Mac's GPU is used: a guess, not measured


def pick_device(device: str, n_parameters: float = 0) -> str:
    """What --device means here, for a model of that size.

    auto: an NVIDIA card; else a Mac's GPU (MPS), but not for a model as small as the embedded ones,
    whose steps are dominated by the time it takes to start each operation; else the CPU. SystemExit
    if there is no such device.
    """
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
        "meta": True,  # it holds no numbers: tests plan on it
    }
    if device == "auto":
        # gloo, which adds up gradients of several processes, cannot do so on MPS
        on_mac = there["mps"] and n_parameters > FOR_MPS and not dist.is_initialized()
        return "cuda" if there["cuda"] else "mps" if on_mac else "cpu"
    kind, _, index = device.partition(":")
    in_range = not index or (index.isdigit() and int(index) < torch.cuda.device_count())
    if not (there.get(kind) and in_range):
        known = [name for name, is_here in there.items() if is_here and name != "meta"]
        raise SystemExit(f"--device {device}: torch finds none here; there is {', '.join(known)}")
    return device


# Parameters up to which a model computes in float32 on every card. SmolLM2 (135M) took no more time
# in it on an H200, and clip, the default of --importance for its size, goes wrong in bfloat16
# (grpo.py; results/card.json). 200M is a guess from that one model.
SMALL = 200e6


def in_bfloat16(device, n_parameters: float = inf) -> bool:
    """Does a model of this size compute in bfloat16 on this device?

    Not on CPUs, Macs, or cards older than Ampere (a T4): those use float32. float16, which a T4
    would compute faster, ends at 65,504: its gradients would need to be scaled, and nothing here
    does that.
    """
    kind = torch.device(device).type
    ampere = kind == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
    return (ampere or kind == "meta") and n_parameters > SMALL
