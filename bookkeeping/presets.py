"""Defaults that depend on the environment or on the model's size, and settings of published runs.

A flag whose default is None in settings.Config gets it from here: by_env before a model is loaded,
by_size after (settings.py has the two). PRESETS are whole runs (--preset).
"""

SMALL_MODEL = 50e6  # parameters; up to here pico_base's defaults, above those of published recipes
BY_ENV = {  # defaults that depend on the environment
    "letters": {"difficulty": 6, "sft_style": "states"},
    "alphabet": {"difficulty": 0, "sft_style": "states"},
    "swarm": {"difficulty": "medium", "sft_style": "expert"},
    "yours": {"sft_style": ""},
    "known": {"difficulty": 0, "sft_style": ""},
}
BATCHES = {"num_tasks": 8, "sft_batch": 8, "eval_n": 256}
LONG_BATCHES = {"num_tasks": 4, "sft_batch": 2, "eval_n": 128}  # swarm has 25 replies per episode
# Small models: (lr, updates, max_tokens), what was stable on pico_base (results/).
SMALL = {
    "letters": (3e-4, 150, 320),
    "alphabet": (3e-4, 80, 640),
    "swarm": (5e-4, 150, 160),
    "yours": (3e-4, 80, 160),
    "known": (3e-4, 80, 160),
}
# SmolLM2's size on a CPU. Rate and updates of "known" taught it sums (docs/real.md), with replies
# of 16 tokens; the rest are guesses.
# Replies are short: it does not think at length, and longer ones would take too long.
MEDIUM = {
    "letters": (1e-4, 60, 160),
    "alphabet": (1e-4, 40, 192),
    "swarm": (1e-4, 20, 128),
    "yours": (1e-4, 80, 128),
    "known": (1e-4, 80, 64),
}
RUN_HERE = (  # (up to so many parameters, settings, learning rate of SFT)
    (SMALL_MODEL, SMALL, 1e-4),
    (200e6, MEDIUM, 2e-4),
)
# Large models: settings of published recipes for these sizes. We have not run them on a card.
# prime-rl: github.com/PrimeIntellect-ai/prime-rl at 559b447, examples/basic/…; TRL: its page "LoRA
# Without Regret" (huggingface.co/docs/trl/lora_without_regret); Tinker: tinker-cookbook.
RATES = (  # (up to so many parameters, lr of LoRA with alpha 64)
    # ten times the 3e-6 at which prime-rl trains all weights of a 0.6B (reverse-text); TRL trains
    # that model's LoRA at 5e-5, as prime-rl's own test does, both with alpha 32
    (1e9, 3e-5),
    # prime-rl's LoRA 32/64 on Qwen3-4B (alphabet-sort, wiki-search); TRL's on a 3B; Tinker's is
    # 4e-5 on an 8B (recipes/rl_loop.py), with alpha 32 and 16 times our batch
    (float("inf"), 1e-5),
)
SFT_RATE = 1e-4  # of LoRA: ten times prime-rl's for all weights (wordle, 1.7B); TRL's page has 2e-4
# LoRA needs ten times the rate of full fine-tuning, whatever its rank: found for SFT and RL by
# Schulman et al. 2025 (thinkingmachines.ai/blog/lora), and so in TRL's pair of runs, 1e-5 and 1e-6.
ALL_WEIGHTS = 0.1
# The group size of all these prime-rl examples, and Tinker's; prime-rl's default batch is 8 of 16
LARGE_K = 16
# prime-rl's max_steps in alphabet-sort, wiki-search and wordle. Warm-up and decay are as for small
# models: prime-rl's linear schedule has 10 steps of warm-up, Tinker's loop none
LARGE_UPDATES = 200
LONGEST = {  # tokens of a reply
    "letters": 2048,  # to spell 80 letters with a tally; prime-rl's seq_len, TRL's run had 4096
    "alphabet": 768,  # prime-rl's for this very task
    "swarm": 512,  # prime-rl's for a turn with tools (wiki-search); 25 times 2048 would not fit
    "yours": 512,  # TRL's default
    "known": 1024,  # room for a derivation; our choice
}
# Other people's published runs, as far as described, with a model that fits one A100 instead of a
# 30B: no SFT, prime-rl's constant rate. What they leave open is ours: the loss, the evaluations.
PUBLISHED = {
    "model": "Qwen/Qwen3-4B-Instruct-2507",
    "lora_rank": 32,
    "lora_alpha": 64,
    "lr": 1e-5,
    "warmup": 0,
    "lr_end": 1.0,
    "sft_steps": 0,
    "temperature": 1.0,
}
PRESETS = {
    "seed": {  # picoRL's run: every setting that it relied on
        "think": False,
        "reward": "partial",
        "lr": 5e-6,
        "warmup": 0,
        "lr_end": 1.0,
        "updates": 200,
        "max_tokens": 2048,
        "eval_n": 32,
        "eval_every": 10,
        "k": 8,
        "sft_lr": 1e-5,
    },
    # SWARM v0.2 on Qwen3-30B-A3B-Thinking: batches of 64, 4 rollouts per example. Rank and rate
    # were not published, and are the alphabet's. A conversation may reach 55,900 tokens (25 replies
    # of 2048, and the text in between): to train on it, a 4B needs gradient checkpointing.
    "swarm-published": PUBLISHED
    | {
        "env": "swarm",
        "difficulty": "medium",
        "think": True,
        "set": ["version=0.2", "payoff_scale=published", "error_penalty=0.0"],
        "num_tasks": 16,
        "k": 4,
        "updates": 200,
        "max_tokens": 2048,
        "gradient_checkpointing": True,
        "vllm_memory": 0.7,
    },
    # prime-rl's alphabet-sort on this very model, with the rollouts of the published run of the 30B
    # (its own file has 200 updates of 16 x 16). Tasks as by default.
    "alphabet-published": PUBLISHED
    | {
        "env": "alphabet",
        "think": False,
        "num_tasks": 32,
        "k": 8,
        "updates": 100,
        "max_tokens": 768,
    },
}
# While it samples, a small model makes an error in one call of twelve. Without a penalty, a run
# that posted trades ended at 36% errors; from 0.67 on, trying to accept a fair offer does not pay
# for a policy that errs as often as the base does (measured at commit 22b9273).
SMALL_ERROR_PENALTY = 0.5
