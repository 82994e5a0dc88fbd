"""A quarter of an hour on a card: is vLLM right there, does train.py learn with it, what takes long?

    python -m lab.card_check start pico_base | tee start.log      # greedy tokens, LoRA, sleep
    python -m lab.card_check learn --model pico_base --env letters --difficulty 6 --updates 10
    python -m lab.card_check big                   # a 4B of random weights: three updates
    python -m lab.card_check big --vllm-memory 0.6 --name asleep    # so much that it has to sleep

`start` prints a line of JSON as soon as a part has ended. The others take train.py's flags and
leave a run folder, whose metrics.jsonl grows with every update: `mismatch` says whether vLLM and
the trainer agree, `seconds_…` where the time went. With `--engine torch` our own sampler does the
same. Small models run in bfloat16 here, in which vLLM has LoRA. Without a card all of this runs in
float32 and with a small "4B": tests/vllm/test_card_check.py.
"""

import json
import sys
import tempfile
import time

import torch

import train
from chat import prompt_ids
from fast import machine, vllm_engine
from lab.speed import SEEDS, new_env, toss
from policy import PICO, load_policy, plain_forward

CARD = torch.cuda.is_available()
SHAPE = {  # Qwen3-4B's
    "hidden_size": 2560 if CARD else 64,
    "num_hidden_layers": 36 if CARD else 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728 if CARD else 64,
    "vocab_size": 151_936,  # pico_base's tokenizer fits in
    "tie_word_embeddings": True,
}
LETTERS = "--env letters --difficulty 6 --max-tokens 256 --updates 3 --sft-steps 0 --eval-n 16"


def say(part: str, **numbers) -> None:
    """Print that a part has ended: when, and with how much of the card free (bytes, of all)."""
    now = {"clock": time.time(), "memory": CARD and torch.cuda.mem_get_info()}
    print(json.dumps({"part": part} | now | numbers), flush=True)


@torch.inference_mode()
def greedy(policy, sampler, prompts: list) -> dict:
    """vLLM's greedy tokens under transformers' forward pass: nats that they are behind the
    likeliest (in bfloat16, near-ties differ), and |difference of the log-probs|."""
    groups = sampler.sample(prompts, 1, 64, 0.0, [[(0, g)] for g in range(len(prompts))])
    behind, gaps = [], []
    for prompt, [sample] in zip(prompts, groups, strict=True):
        ids = torch.tensor([prompt + sample.token_ids], device=policy.device)  # [1, T]
        replied = torch.arange(1, ids.shape[1], device=policy.device)[None] >= len(prompt)
        out = plain_forward(policy, ids, replied)
        behind += (out.logits.log_softmax(-1).max(-1).values - out.logprobs).tolist()
        gaps += (out.logprobs.cpu() - torch.tensor(sample.logprobs)).abs().tolist()
    return {
        "tokens": len(gaps),
        "not_the_likeliest": sum(nats > 0 for nats in behind),
        "most_behind": max(behind),
        "mean_gap": sum(gaps) / len(gaps),
        "largest_gap": max(gaps),
    }


def start(model: str) -> None:
    policy = load_policy(model, 32, 64, bfloat16=CARD)
    prompts = [prompt_ids(policy, new_env().reset(SEEDS + i), None, True) for i in range(8)]
    say("model loaded", torch=torch.__version__, driver=machine.nvidia_driver())
    sampler = vllm_engine.VllmSampler(policy, longest=2048)
    say("vLLM started", vllm=sys.modules["vllm"].__version__)
    say("greedy", **greedy(policy, sampler, prompts))
    for weight in policy.trainable().values():  # LoRA's B is 0: a lost adapter would not show
        weight.data += 0.05 * torch.randn_like(weight)
    sampler.sync(1)
    say("greedy with LoRA", **greedy(policy, sampler, prompts))
    with sampler.asleep():
        say("asleep")
    say("awake")
    say("greedy after sleep", **greedy(policy, sampler, prompts))
    sampler.close()


def learn(*flags: str) -> None:
    """train.py with vLLM, and every model in bfloat16."""
    machine.SMALL = 0
    sys.argv = ["train.py", "--engine", "vllm", "--importance", "token", "--no-wandb", *flags]
    train.main()


def big(*flags: str) -> None:
    """`learn` with a model of a 4B's shape, and 128 replies of 256 tokens."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    train.compute_advantages = lambda groups, cfg: toss(groups)  # random weights earn nothing
    with tempfile.TemporaryDirectory() as folder:
        AutoTokenizer.from_pretrained(PICO).save_pretrained(folder)
        with torch.device("cuda" if CARD else "cpu"):
            Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)
        learn(f"--model={folder}", *LETTERS.split(), *flags)


if __name__ == "__main__":
    {"start": start, "learn": learn, "big": big}[sys.argv[1]](*sys.argv[2:])
