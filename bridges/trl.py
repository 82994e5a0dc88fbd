"""Our environments under TRL's GRPOTrainer, on as many processes as `accelerate launch` starts.

    accelerate launch -m bridges.trl --env swarm --model Qwen/Qwen3-8B -- --use_vllm true

Flags before `--` are those of settings.py; flags after it are TRL's own, and take precedence.
docs/hardware.md says when you need this, and which parts have been run.

The division of labour: TRL holds the model (on one card, or spread over many by FSDP or DeepSpeed),
its engine draws the tokens (transformers, or vLLM next to it or on a server), and its loss trains.
We play the episodes: `Rollout` is TRL's rollout_func, and calls rollout.play. So an episode is
ours, token for token, in all three environments. TRL gets

    prompt_ids, completion_ids    the conversation, cut where the first reply begins
    env_mask                      1 where the policy chose the token: Episode.sampled
    reward                        env.score()["reward"], which reward_of passes on

What is the same as in train.py, and what is not:

    same       tasks, prompts, tokens, mask, rewards; k, batch, learning rate; the loss's clip
               (grpo.LOSSES), the gradient's at 1; the KL as DeepSeekMath has it (by default TRL
               1.16 puts the ratio in front: --use_bias_correction_kl true)
    differs    the learning rate starts at 0 and falls to 0; TRL's engine draws, so a seed does
               not repeat our samples; no SFT, no evaluation (train.py does both: docs/hardware.md);
               an episode that fails after its first reply earns 0, where train.py leaves it out.
               With vLLM, TRL drops each reply about which vLLM and the trainer disagree by a factor
               of 3 or more, over all its tokens (--vllm_importance_sampling_mode sequence_mask);
               train.py caps the factor of each token or reply, and drops none
    refused    --loss reinforce, --baseline, --epochs, --importance: TRL has its own, to be set
               after `--`

Run me: `python -m bridges.trl --updates 2 --num-tasks 2 --k 2 --max-tokens 64` is one process, and
trains pico_base on letters (pip install -r requirements/all.txt).
"""

import sys
from collections.abc import Callable
from datetime import date
from functools import partial

import torch

import settings
from bookkeeping import refusals
from chat import about, read_template
from fast.machine import choose_model, in_bfloat16, pick_device
from grpo import LOSSES as OURS
from policy import EMBEDDED, MAX_GRAD_NORM, Policy, Sample, lora_config
from rollout import play

# Our loss -> TRL's loss_type and importance_sampling_level. As with ours, its grpo is the mean over
# each reply, and dapo the mean over all tokens (grpo.py has the table).
LOSSES = {
    "grpo": {"loss_type": "grpo", "importance_sampling_level": "token"},
    "dr_grpo": {"loss_type": "dr_grpo", "importance_sampling_level": "token"},
    "dapo": {"loss_type": "dapo", "importance_sampling_level": "token"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "importance_sampling_level": "token"},
}


class Engine:
    """TRL's engine as a sampler of ours: token ids in, sampled ids out (fast/sampler.py).

    If the engine is spread over processes, all of them call it at once, each for the same number of
    replies. So a process with fewer conversations left requests some that nobody reads, and one
    with none left keeps requesting until the last is done.
    """

    version = 0

    def __init__(self, trainer, stop_ids: frozenset[int], rows: int):
        self.trainer, self.stop_ids, self.rows = trainer, stop_ids, rows
        self.told = True  # does the engine report log-probs? transformers' does not
        self.spare: list[int] = []  # a prompt to request when there is no other

    def sample(self, prompts, k, max_tokens, temperature, seeds, caches=None, keep=False):
        """k samples of each prompt -> [len(prompts)][k] Samples.

        max_tokens and temperature are the trainer's own (max_completion_length), and seeds are not
        used: the engine draws. Log-probs are 0 if it does not report them.
        """
        asked = [prompt for prompt in prompts for _ in range(k)]
        self.spare = min(asked, key=len)
        self.anybody(True)
        samples = [
            Sample(ids, logprobs, bool(ids) and ids[-1] in self.stop_ids)
            for ids, logprobs in self.draw(asked)
        ]
        return [samples[g * k : (g + 1) * k] for g in range(len(prompts))]

    def draw(self, asked: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        alone = self.trainer.accelerator.num_processes == 1
        idle = [] if alone else [self.spare] * (self.rows - len(asked))
        ids, logprobs = self.trainer._generate_single_turn(asked + idle, None, {}, 1)
        self.told = logprobs is not None
        logprobs = logprobs or [[0.0] * len(reply) for reply in ids]
        return [(list(reply), list(said)) for reply, said in zip(ids, logprobs)][: len(asked)]

    def anybody(self, active: bool) -> bool:
        """Does any process have a conversation left?"""
        accelerator = self.trainer.accelerator
        return bool(accelerator.gather(torch.tensor([active], device=accelerator.device)).any())


class Rollout:
    """TRL's rollout_func: plays the tasks that this process was given, one episode per prompt.

    A prompt is a task's seed as text; the environment makes the real one from it.
    """

    __name__ = "rollout"  # TRL reads it

    def __init__(self, make_env: Callable[[], object], today: str = ""):
        self.make_env, self.today = make_env, today  # as policy.Policy has it

    def __call__(self, prompts: list[str], trainer) -> dict[str, list]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        stop_ids, tokenizer = frozenset(trainer.eos_token_ids), trainer.processing_class
        if not stop_ids >= {read_template(tokenizer).end} - {None}:
            raise ValueError("TRL's eos_token is not the chat template's end of a turn; set it")
        device, args = trainer.accelerator.device, trainer.args
        policy = Policy(model, tokenizer, stop_ids, "TRL's", 0, device, today=self.today)
        engine = Engine(trainer, stop_ids, len(prompts))
        how = (1, args.max_completion_length, args.temperature, 0)
        groups = play(policy, engine, self.make_env, list(map(int, prompts)), *how)
        while engine.anybody(False):  # until every process has played its episodes to the end
            engine.draw([])
        episodes = [group[0] for group in groups]
        if mute := [e for e in episodes if True not in e.sampled]:  # TRL cannot use those
            raise ValueError(f"task {mute[0].seed} could not be played: {mute[0].error}")
        first = [e.sampled.index(True) for e in episodes]  # where the policy begins to speak
        cut = lambda name: [list(getattr(e, name)[i:]) for e, i in zip(episodes, first)]
        return {
            "prompt_ids": [e.token_ids[:i] for e, i in zip(episodes, first)],
            "completion_ids": cut("token_ids"),
            "env_mask": [[int(chosen) for chosen in mask] for mask in cut("sampled")],
            "logprobs": cut("logprobs") if engine.told else None,
            "earned": [e.reward for e in episodes],
        }


def reward_of(earned: list[float], **_) -> list[float]:
    """TRL's reward function: it returns what the environment has already given."""
    return earned


def arguments(cfg: settings.Config, processes: int) -> dict:
    """Our settings as those of TRL's GRPOConfig. ValueError if TRL has no such setting."""
    if cfg.loss not in LOSSES:
        refusals.refuse(cfg, "loss", f"TRL has {', '.join(LOSSES)}; choose one of them")
    batch = cfg.num_tasks * cfg.k
    if batch % processes:
        refusals.refuse(
            cfg,
            "num_tasks",
            f"{batch} episodes (--num-tasks times --k) cannot be shared by {processes} processes; "
            "use a multiple",
        )
    low, high = OURS[cfg.loss].clip
    if cfg.loss == "cispo":  # there TRL's value is the largest ratio itself
        high += 1
    device = pick_device(cfg.device)
    narrow = in_bfloat16(device) and cfg.model not in EMBEDDED  # those are small: float32
    return {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": batch // processes,  # one optimizer step per batch
        "num_generations": cfg.k,
        "max_steps": cfg.updates,
        "learning_rate": cfg.lr,
        "warmup_steps": cfg.warmup,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "max_completion_length": cfg.max_tokens,  # of one reply: TRL cuts no episode
        "temperature": cfg.temperature,
        "top_k": 0,
        "top_p": 1.0,
        "beta": cfg.kl,
        "use_bias_correction_kl": False,
        **LOSSES[cfg.loss],
        "epsilon": low,
        "epsilon_high": high,
        "scale_rewards": "group" if cfg.normalize and cfg.loss != "dr_grpo" else "none",
        "shuffle_dataset": False,
        "seed": cfg.seed,
        "gradient_checkpointing": cfg.gradient_checkpointing,
        "use_cpu": device == "cpu",
        "bf16": narrow,
        "output_dir": f"{cfg.runs}/{cfg.name or 'trl-' + settings.env_name(cfg.env)}",
        "save_steps": cfg.save_every,
        "logging_steps": 1,
        "report_to": "none",
        # as policy.load_policy: what learns is float32, what is frozen may be bfloat16
        "model_init_kwargs": {
            "dtype": "bfloat16" if cfg.lora_rank and narrow else "float32",
            "use_safetensors": True,
        },
    }


def size_of(model: str) -> int:
    """Parameters of a model, from its config alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return sum(p.numel() for p in lm.parameters())


# Beginnings of flags that would change nothing here.
UNREAD = tuple(
    "curriculum until_converged stop_when_settled max_updates async_rollouts max_staleness resume "
    "held_out break_ plain engine lr_end baseline epochs importance micro_tokens threads sft_ "
    "eval_ vllm_ api_".split()
)


def make_trainer(ours: list[str], theirs: list[str]):
    """TRL's trainer, from flags of settings.py and flags of TRL."""
    try:
        import trl
    except ImportError:
        raise ValueError("bridges/trl.py needs trl; pip install trl==1.16.0") from None
    from accelerate import PartialState
    from datasets import Dataset
    from transformers import AutoConfig, AutoTokenizer, HfArgumentParser

    cfg, typed = settings.command_line(ours)
    refusals.check(cfg)
    if unread := sorted(name for name in typed if name.startswith(UNREAD)):
        refusals.refuse(
            cfg, unread[0], "TRL has its own, to be set behind `--`, or none; leave it out"
        )
    model, why, _ = choose_model(cfg.model, cfg.env, cfg.device)
    print(why)
    cfg = settings.complete(cfg, size_of(model), model, {})
    parser = HfArgumentParser(trl.GRPOConfig)
    parser.set_defaults(**arguments(cfg, PartialState(cpu=cfg.device == "cpu").num_processes))
    (args,) = parser.parse_args_into_dataclasses(theirs, look_for_args_file=False)
    seeds = [seed for update in range(cfg.updates) for seed in settings.task_seeds(cfg, update)]
    tokenizer, today = AutoTokenizer.from_pretrained(model), cfg.today or date.today().isoformat()
    if (end := read_template(tokenizer).end) is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)  # TRL's engine stops there
    print(about(tokenizer, today))
    lora = lora_config(AutoConfig.from_pretrained(model), cfg.lora_rank, cfg.lora_alpha)
    return trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=args,
        reward_funcs=reward_of,
        train_dataset=Dataset.from_list([{"prompt": str(seed)} for seed in seeds]),
        rollout_func=Rollout(
            partial(refusals.guarded, settings.make_env, cfg, cfg.difficulty), today
        ),
        peft_config=lora if cfg.lora_rank else None,
    )


def main(words: list[str]) -> None:
    behind = words.index("--") if "--" in words else len(words)
    with refusals.errors_in_one_sentence():
        trainer = make_trainer(words[:behind], words[behind + 1 :])
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(sys.argv[1:])
