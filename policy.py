"""The policy: a causal language model, its tokenizer, and the few weights that learn.

    W' = W + (alpha / rank) · B A        LoRA (Hu et al. 2021, §4.1): W is frozen, only A [r, in], B [out, r] learn

B starts at zero, so the policy starts *exactly* as the base model. `lora_rank=0` trains every weight instead.

The embedded `models/pico_base/` (`models/pico_swarm/` for swarm) is loaded just as `Qwen/Qwen3-4B-Instruct-2507` would be: same classes, same files,
no special path. Nothing here edits the base in place: folding LoRA into bfloat16 weights and out again at every update loses bits each
time (28% of mean |W| after 100 rounds was measured elsewhere). The sampler folds it into a copy of its own.

Run me: `python policy.py` shows what LoRA adds to pico_base and what that costs.
`python -m bridges.export merge runs/NAME out/` makes a trained run a model of its own.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from bookkeeping.records import printable

PICO = Path(__file__).resolve().parent / "models" / "pico_base"
PICO_SWARM = PICO.with_name(
    "pico_swarm"
)  # the same model after more pretraining, on tool calls: worse at lists, so a folder of its own
BIG = "Qwen/Qwen3-4B-Instruct-2507"


@dataclass
class Policy:
    model: torch.nn.Module  # a PeftModel, or the bare causal LM when lora_rank == 0
    tokenizer: object
    stop_ids: frozenset[int]  # a sampled reply ends with one of these
    name: str  # for people: the folder's name, or the hub id
    lora_rank: int  # 0: all weights learn
    device: torch.device

    @property
    def lm(self) -> torch.nn.Module:
        """The causal LM itself (with its LoRA layers inside, when there are any)."""
        return self.model.get_base_model() if self.lora_rank else self.model

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """{name: weight} of what learns."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def n_parameters(self) -> int:
        """Of the model itself, LoRA not counted."""
        return sum(p.numel() for name, p in self.lm.named_parameters() if "lora_" not in name)


# ---------------------------------------------------------------------------------------------- loading


def choose_model(name: str, env: str = "letters") -> tuple[str, str]:
    """(path or hub id, one line that says why). `auto` is the 4B where it can run, and elsewhere pico_base, or for swarm pico_swarm."""
    if name != "auto":
        return name, f"model {name}, as asked"
    small = PICO_SWARM if env == "swarm" else PICO
    if not torch.cuda.is_available():
        return str(
            small
        ), f"no CUDA device, so the embedded {small.name} (0.9M parameters) plays the policy"
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    if memory < 30:
        return (
            str(small),
            f"{memory:.0f} GB of GPU memory are too few for {BIG}, so {small.name}; --model takes any other",
        )
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(BIG, "config.json"), str):
        return BIG, f"{BIG} from the local cache"
    try:
        HfApi().model_info(BIG, timeout=5)
        return BIG, f"{BIG} from the hub"
    except (
        Exception
    ):  # no network, a proxy that says no, a hub that is down: all mean the same here
        return str(
            small
        ), f"the hub cannot be reached for {BIG}, so the embedded {small.name} plays the policy"


def load_policy(
    name: str, lora_rank: int, lora_alpha: int, device: str = "auto", seed: int = 0
) -> Policy:
    """Load a causal LM with a chat template, freeze it and attach LoRA (or set every weight free with rank 0).

    Weights are float32 on CPU and where all of them learn (an Adam step of 5e-6 is lost in bfloat16's 8 bits),
    bfloat16 where a GPU holds them frozen. Adapters are always float32.
    Raises SystemExit with one sentence if the model cannot be had, or cannot chat.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device != "cpu" and lora_rank else torch.float32
    if not Path(name).exists() and name.count("/") != 1:
        raise SystemExit(
            f"--model {name}: no such folder, and not a hub id of the form owner/name; check the spelling"
        )
    try:
        refuse_pickles(Path(name))
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        lm = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, trust_remote_code=False, use_safetensors=True
        )
    except (
        Exception
    ) as error:  # a folder may hold anything, and transformers meets it with every kind of error
        raise SystemExit(
            f"--model {name}: cannot be loaded ({first_line(error)}); give a folder or a hub id of a causal LM"
        ) from None
    if not getattr(tokenizer, "chat_template", None):
        raise SystemExit(
            f"--model {name}: its tokenizer has no chat template; use an instruct or chat version of it"
        )
    stops = lm.generation_config.eos_token_id
    stops = set(stops if isinstance(stops, list) else [stops]) | {tokenizer.eos_token_id}
    stops = frozenset(s for s in stops if s is not None)
    if not stops:
        raise SystemExit(
            f"--model {name}: neither model nor tokenizer names an end-of-turn token; set eos_token"
        )
    if (
        tokenizer.eos_token_id is None
    ):  # only the model names one: SFT teaches replies to end with it
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(min(stops))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    check_tokenizer(name, tokenizer, lm)

    lm.requires_grad_(lora_rank == 0)
    torch.manual_seed(seed)  # A is drawn at random
    model = attach_lora(lm, lora_rank, lora_alpha) if lora_rank else lm
    model.to(
        device
    ).eval()  # eval: no dropout, so the log-probs we train on are those that were sampled
    shown = Path(name).resolve().name if Path(name).exists() else name
    return Policy(model, tokenizer, stops, shown, lora_rank, torch.device(device))


def check_tokenizer(name: str, tokenizer, lm: torch.nn.Module) -> None:
    """SystemExit if the tokenizer cannot write what the environments read, or has tokens that the model does not know."""
    probe = 'Count: <answer>{"a": 10, "z": 3}</answer> <think>b1 c2</think>\nMary Ann O\'Neil // new name! 456789'
    read = tokenizer.decode(
        tokenizer(probe, add_special_tokens=False)["input_ids"], skip_special_tokens=False
    )
    if "".join(read.split()) != "".join(
        probe.split()
    ):  # how spaces are treated differs between good tokenizers
        raise SystemExit(
            f"--model {name}: its tokenizer cannot write {probe!r}, it comes back as {read!r}; use a model that knows these characters"
        )
    most, rows = max(tokenizer.get_vocab().values()), lm.get_input_embeddings().weight.shape[0]
    if most >= rows:
        raise SystemExit(
            f"--model {name}: its tokenizer has a token {most} and the model embeds {rows}; the two do not belong together"
        )
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], add_generation_prompt=True, tokenize=False
        )
    except (
        Exception
    ) as error:  # a template is a program, in a sandbox, and may raise whatever it likes
        raise SystemExit(
            f"--model {name}: its chat template fails ({first_line(error)}); mend chat_template.jinja or use another model"
        ) from None


def refuse_pickles(folder: Path) -> None:
    """ValueError if a folder's index or config leads to weights that are not safetensors, or to code.

    transformers' use_safetensors would not do: it looks at one file's name only.
    """
    read = lambda name: json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    index, config = read("model.safetensors.index.json"), read("config.json")
    files = {
        *index.get("weight_map", {}).values(),
        config.get("transformers_weights") or "model.safetensors",
    }
    if strange := sorted(
        str(f)
        for f in files
        if not str(f).endswith((".safetensors", ".safetensors.index.json")) or "/" in str(f)
    ):
        raise ValueError(
            f"its weights are said to be in {strange[0]}, and only safetensors beside the config are read"
        )
    if "/" in str(config.get("attn_implementation")):
        raise ValueError("its config asks for attention code from the hub")


def first_line(error: Exception) -> str:
    """An error in one line. Its text may hold a reply, or a file's content: what could steer a terminal becomes a question mark."""
    line = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    return printable(line[:300])


def attach_lora(lm: torch.nn.Module, rank: int, alpha: int) -> torch.nn.Module:
    """LoRA on every linear layer; in a mixture of experts on attention only.

    Adapters of rank 32 on all 128 experts of a 30B would be 2 billion parameters.
    """
    from peft import LoraConfig, get_peft_model

    experts = getattr(lm.config, "num_experts", None) or getattr(
        lm.config, "num_local_experts", None
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if experts else "all-linear"
    return get_peft_model(
        lm, LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    )


if __name__ == "__main__":
    from fast.logprobs import token_logprobs

    base = load_policy(str(PICO), lora_rank=0, lora_alpha=64)
    policy = load_policy(str(PICO), lora_rank=32, lora_alpha=64)
    learn = sum(p.numel() for p in policy.trainable().values())
    print(f"pico_base: {base.n_parameters:,} parameters; LoRA rank 32 adds {learn:,} that learn")
    print(
        "Adam keeps two numbers beside each learning weight: LoRA is cheap because of *that*, most of all in large models:"
    )
    for label, n, lora in (("pico_base", base.n_parameters, learn), ("Qwen3-4B ", 4.02e9, 66e6)):
        full = n * (4 + 4 + 8) / 2**30
        small = (n * 2 + lora * (4 + 4 + 8)) / 2**30
        print(
            f"  {label}  full, float32: {full:8.3f} GB   frozen bfloat16 + LoRA 32: {small:8.3f} GB   (computed)"
        )
    ids = torch.tensor([policy.tokenizer("Count the letters")["input_ids"]])
    mask = torch.ones(1, ids.shape[1] - 1, dtype=torch.bool)
    with torch.no_grad():
        a, b = token_logprobs(base, ids, mask)[0], token_logprobs(policy, ids, mask)[0]
    print(
        "largest difference of log-probs before training:",
        (a - b).abs().max().item(),
        "(B is zero)",
    )
    assert torch.equal(a, b) or (a - b).abs().max() < 1e-5
