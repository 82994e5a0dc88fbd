"""Is it a model that can be trained in a chat, and is it safe to load? Said in one sentence.

A folder may come from anywhere. What is loaded is safetensors, without code of the model's own; and
a model needs a chat template, an end-of-turn token, and a tokenizer that can write replies.

Run me: `python -m bookkeeping.pretrained` loads pico_base and says how it ends a turn.
"""

import json
from pathlib import Path

import torch

from bookkeeping.records import printable


def load_checked(name: str, dtype: torch.dtype):
    """(tokenizer, causal LM) of a folder or hub id. ValueError if it is no model for chatting."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = name.startswith(("runs/", "models/"))  # mistyped: nobody's name on the hub
    if not Path(name).exists() and (ours or name.count("/") != 1):
        raise ValueError("no such folder, and no hub id of the form owner/name; check the spelling")
    safe = {"trust_remote_code": False}
    try:
        refuse_pickles(Path(name))
        tokenizer = AutoTokenizer.from_pretrained(name, **safe)
        lm = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, use_safetensors=True, **safe)
    except Exception as error:  # a folder may hold anything, and transformers raises anything
        raise ValueError(
            f"cannot be loaded ({first_line(error)}); give a folder or a hub id of a causal LM"
        ) from None
    return tokenizer, lm


def refuse_pickles(folder: Path) -> None:
    """ValueError if a folder's index or config leads to code, or to weights in another format.

    transformers' use_safetensors is not enough: it looks at the name of one file only.
    """
    files = [folder / name for name in ("model.safetensors.index.json", "config.json")]
    index, config = (json.loads(f.read_bytes()) if f.exists() else {} for f in files)
    named = config.get("transformers_weights") or "model.safetensors"
    for file in {str(f) for f in (named, *index.get("weight_map", {}).values())}:
        elsewhere = any(c in file for c in "/\\:")  # Windows knows three ways into another folder
        if elsewhere or not file.endswith((".safetensors", ".safetensors.index.json")):
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
    probe = 'Count: <answer>{"a": 10, "z": 3}</answer> <think>b1 c2</think>\n'
    probe += "Mary Ann O'Neil // new name! 456789"  # what replies in our environments are made of
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
    hello = [{"role": "user", "content": "?"}]
    try:
        tokenizer.apply_chat_template(hello, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program in a sandbox, and may raise anything
        raise ValueError(
            f"it has no chat template, or one that fails ({first_line(error)[:120]}); mend "
            "chat_template.jinja, or use an instruct version of the model"
        ) from None


def first_line(error: Exception) -> str:
    """An error in one line. It may quote a hostile file: control characters become '?'."""
    line = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    return printable(line[:300])


if __name__ == "__main__":
    models = Path(__file__).resolve().parents[1] / "models"
    tokenizer, lm = load_checked(str(models / "pico_base"), torch.float32)
    print(
        "pico_base ends a turn with", tokenizer.convert_ids_to_tokens([*find_stops(tokenizer, lm)])
    )
