"""Ground truth for bookkeeping/foreign: TRL's real GRPOTrainer, with mistakes made on purpose and without.

    python -m lab.trust.foreign_truth              # make the runs that are missing, one after another (needs requirements/doctor.txt)
    python -m lab.trust.foreign_truth --only dropout --seeds 0
    python -m lab.trust.foreign_truth --page       # judge them all again, and write results/doctor/README.md and truth.json

Each run is pico_base on easy letters for 30 steps, and leaves what TRL leaves: trainer_state.json, unchanged but for gzip. All columns are
computed by TRL's code. Replies are sampled by fast/sampler.py, which takes a third of model.generate's time, from a copy of the weights
that is made when TRL asks for one; `plain` has TRL's own model.generate. Most arms log what TRL logs without an engine. Those marked
`engine` go through TRL's path for vLLM, because only that one logs how far trainer and sampler disagree; there our sampler stands in for
vLLM.

Seed 0 is the development seed: rules and thresholds were chosen with it in view. Seeds 1 and 2 are the test, and were made before and
looked at after.
"""

import copy
import gzip
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import tyro

import metrics
from bookkeeping import doctor, foreign, logs, symptoms
from lab.common import RESULTS, read_json, table, write_json, write_page

OUT = RESULTS / "doctor"
RUNS = OUT / "trl"
SEEDS, DEVELOPMENT = (0, 1, 2), 0
TASKS, K, STEPS = 4, 4, 30
FIRST_TASK = 2_600_000_000  # tasks that nothing else of ours plays
BASE = {
    "max_steps": STEPS, "per_device_train_batch_size": TASKS * K, "num_generations": K, "learning_rate": 5e-4, "max_completion_length": 48,
    "lr_scheduler_type": "constant", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none",
    "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "shuffle_dataset": False, "weight_decay": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One setting. What is not named is as in BASE."""

    what: str
    mistake: bool
    told: tuple[str, ...] = ()  # the symptoms that name this mistake; any of them counts
    args: dict = field(default_factory=dict)  # of GRPOConfig
    tier: int = 3
    rewards: tuple[str, ...] = ("exact",)
    engine: bool = False  # through TRL's path for vLLM
    generate: bool = False  # TRL's own model.generate
    every: int = 1  # the engine takes new weights at every n-th step; 0: never
    temperature: float = 1.0  # of the engine
    dtype: str = "float32"  # to which the engine's merged weights are rounded; it computes in float32
    dropout: float = 0.0
    lora: bool = True


HEALTHY = {
    "plain": Arm("TRL's defaults but for the learning rate, 5e-4 (LoRA)", False, generate=True),
    "dr-grpo": Arm("dr_grpo, rewards not scaled, warm-up and linear decay", False, args={
        "loss_type": "dr_grpo", "scale_rewards": "none", "lr_scheduler_type": "linear", "warmup_steps": 4, "learning_rate": 1e-3}),
    "kl": Arm("a KL term, beta 0.04", False, args={"beta": 0.04, "loss_type": "grpo"}),
    "two-epochs": Arm("each batch used twice, clipped", False, args={"num_iterations": 2}),
    "two-rewards": Arm("partial credit, and a reward for the format", False, rewards=("partial", "format")),
    "full": Arm("all weights, cosine, learning rate 1e-4", False, lora=False, args={"learning_rate": 1e-4, "lr_scheduler_type": "cosine"}),
    "nearly-solved": Arm("an easy tier: many groups are all right", False, tier=1, args={"learning_rate": 5e-4}),
    "thinks-longer": Arm("tier 5: replies grow because thinking pays", False, tier=5,
                         args={"max_completion_length": 96, "learning_rate": 5e-4}),
    "engine-bf16": Arm("through an engine whose merged weights are rounded to bfloat16, corrected", False, engine=True, dtype="bfloat16"),
}  # fmt: skip
MISTAKES = {
    "learning-rate": Arm("the learning rate × 100", True, ("broken", "collapse", "noise", "KL", "stuck", "no signal", "entropy collapse"),
                         args={"learning_rate": 0.05}),
    "cut-short": Arm("a limit of 24 tokens, where answers need 27 to 70", True, ("cut short",), tier=5, args={"max_completion_length": 24}),
    "equal-rewards": Arm("the reward is always 0: it looks for a tag that the prompt does not ask for", True, ("no signal",),
                         rewards=("boxed",)),
    "generous": Arm("any well-formed answer earns 1; exact answers are logged, weight 0", True, ("pays something else",),
                    rewards=("format", "exact"), args={"reward_weights": [1.0, 0.0]}),
    "stale": Arm("the engine never gets new weights", True, ("stale",), engine=True, every=0),
    "temperature": Arm("the engine samples at 1.5, the loss thinks 1.0", True, ("two distributions",), engine=True, temperature=1.5),
    "dropout": Arm("lora_dropout 0.3, through an engine", True, ("dropout", "two distributions"), engine=True, dropout=0.3),
    "off-policy": Arm("samples up to 10 steps old, vllm_importance_sampling_correction=False", True,
                      ("uncorrected", "stale", "collapse", "broken"), engine=True,
                      every=10, args={"vllm_importance_sampling_correction": False}),
    "warm-up": Arm("a warm-up of 2,000 steps in a run of 30", True, ("warm-up",),
                   args={"lr_scheduler_type": "linear", "warmup_steps": 2000}),
}  # fmt: skip
ARMS = HEALTHY | MISTAKES


# ------------------------------------------------------------------------------------------------ rewards
def scorer(name: str, tier: int):
    """A reward function as TRL calls it, under this name in the log."""
    from env_letters import Letters

    def score(completions, seed, **_):
        out = []
        for completion, task in zip(completions, seed):
            reply = completion[0]["content"]
            env = Letters(tier, "partial", True, "states")
            env.reset(task)
            env.step(reply)
            found = env.score()
            out.append({"exact": found["exact"], "partial": found["reward"], "format": found["format"],
                        "boxed": float("\\boxed" in reply)}[name])  # fmt: skip
        return out

    score.__name__ = name
    return score


# ------------------------------------------------------------------------------------------------ an engine
class Engine:
    """What TRL calls for vLLM's samples: generate and sync_weights. The samples are those of fast/sampler.py,
    from a copy of the weights."""

    def __init__(self, trainer, arm: Arm, seed: int):
        self.trainer, self.arm, self.seed = trainer, arm, seed
        self.version, self.sampler, self.asked = -1, None, 0
        self.sync_weights()

    def sync_weights(self) -> None:
        """A copy of the trainer's weights, if it is time for one."""
        import torch

        from fast.sampler import TorchSampler
        from policy import Policy

        step = self.trainer.state.global_step
        if self.sampler is not None and (not self.arm.every or step - self.version < self.arm.every):
            return
        self.version = step
        model = copy.deepcopy(self.trainer.accelerator.unwrap_model(self.trainer.model)).eval()
        rank = 16 if self.arm.lora else 0
        if self.arm.dtype != "float32":  # as TRL hands weights to vLLM: merged, then rounded
            model, rank = model.merge_and_unload().to(getattr(torch, self.arm.dtype)).to(torch.float32), 0
        for module in model.modules():
            module.__dict__.pop("forward", None)  # accelerate's wrapper, which would call the trainer's own weights
        tokenizer = self.trainer.processing_class
        stops = frozenset(self.trainer.eos_token_ids)
        self.sampler = TorchSampler(Policy(model, tokenizer, stops, "copy", rank, torch.device("cpu")))

    def generate(self, prompts, images=None, num_generations=1, profiler=None, **_):
        self.asked += 1
        seeds = [[(self.seed, self.asked, i)] for i in range(len(prompts))]
        limit = self.trainer.max_completion_length
        samples = [group[0] for group in self.sampler.sample(prompts, 1, limit, self.arm.temperature, seeds)]
        return None, [list(s.token_ids) for s in samples], [[[float(x)] for x in s.logprobs] for s in samples], None

    def in_place_of_generate(self, prompt_ids, *_, **__):
        """What TRL's _generate_single_turn returns without an engine: token ids, and no log-probs."""
        self.sync_weights()
        return self.generate(prompt_ids)[1], None


# ------------------------------------------------------------------------------------------------ a run
def train(arm: Arm, seed: int, folder: Path):
    """A GRPOTrainer of this arm in `folder`."""
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    from env_letters import Letters
    from policy import PICO

    set_seed(seed)
    torch.manual_seed(seed)
    env = Letters(arm.tier, "partial", True, "states")
    tasks = [FIRST_TASK + seed * 100_000 + i for i in range(TASKS * STEPS)]
    prompts = Dataset.from_list([{"prompt": env.reset(task), "seed": task} for task in tasks])
    args = trl.GRPOConfig(output_dir=str(folder), seed=seed, **(BASE | arm.args))
    lora = (
        LoraConfig(r=16, lora_alpha=32, lora_dropout=arm.dropout, target_modules="all-linear", task_type="CAUSAL_LM") if arm.lora else None
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(PICO, dtype="float32", use_safetensors=True),
        processing_class=AutoTokenizer.from_pretrained(PICO),
        args=args, train_dataset=prompts, reward_funcs=[scorer(name, arm.tier) for name in arm.rewards], peft_config=lora,
    )  # fmt: skip
    engine = Engine(trainer, arm, seed)
    if arm.engine:
        trainer.vllm_generation, trainer.use_vllm = engine, True
        trainer._last_loaded_step = 0
    elif not arm.generate:
        trainer._generate_single_turn = engine.in_place_of_generate
    return trainer


def make(name: str, seed: int) -> None:
    arm = ARMS[name]
    start = time.perf_counter()
    folder = Path(tempfile.mkdtemp())
    try:
        trainer = train(arm, seed, folder)
        trainer.train()
        trainer.state.save_to_json(str(folder / "trainer_state.json"))
        RUNS.mkdir(parents=True, exist_ok=True)
        packed = gzip.compress((folder / "trainer_state.json").read_bytes(), mtime=0)
        (RUNS / f"{name}-{seed}.json.gz").write_bytes(packed)
    finally:
        shutil.rmtree(folder)
    log = [line for line in trainer.state.log_history if "reward" in line]
    print(f"{name}-{seed}: {time.perf_counter() - start:.0f} s, reward {log[0]['reward']:.2f} -> {log[-1]['reward']:.2f}", flush=True)


# ------------------------------------------------------------------------------------------------ judging
# Our own committed runs that nothing is wrong with (tests/test_doctor.py says why these are not among them).
NOT_WELL = ("failures/", "eight_blind", "stale", "lora_rank/full_1e-3", "lora_rank/rank1_", "lora_rank/rank8_1e-2", "lora_rank/rank32_3e-3",
            "curriculum/fixed_bare-4")  # fmt: skip


# What a log must have for a rule to have anything to look at; "part" is the one of right answers.
NEEDS = {
    "collapse": "reward", "stuck": "groups_with_signal", "broken": "format",
    "no signal": "groups_with_signal", "noise": "entropy", "cut short": "truncated",
    "stop token": "stop_trained", "sequence ratio": "stretch", "not exact": "exact",
    "stale": "mismatch", "two distributions": "mismatch", "dropout": "twice",
    "uncorrected": "ratio", "not a number": "loss", "cut off more": "truncated", "KL": "kl",
    "entropy collapse": "entropy", "learning rate": "lr", "far off": "clip_fraction",
    "engine": "mismatch_kl", "thrown away": "kept_ratio", "errors": "errors_share",
    "pays length": "part", "pays something else": "part", "only in training": "eval_reward",
    "still": "entropy", "warm-up": "lr", "resumed": "lr",
}  # fmt: skip


def told_of(log: logs.Log) -> list[str]:
    """The symptoms, remarks left out, that the doctor tells of a log."""
    return [one.name for one in symptoms.look_at(log, foreign.goal_of(log), doctor.symptoms) if not one.remark]


def judged(name: str, seed: int) -> dict:
    """One run: what it is, and what the doctor tells of it."""
    arm = ARMS[name]
    _, rows, planned = logs.rows_of(gzip.decompress((RUNS / f"{name}-{seed}.json.gz").read_bytes()))
    log = logs.collect(list(rows))
    log.planned = planned
    told = told_of(log)
    has = {*log.columns, *(["part"] if foreign.goal_of(log) else [])}
    tried = sorted(rule for rule, column in NEEDS.items() if column in has)
    rewards = [x for x in log.columns["reward"] if x == x]
    return {"arm": name, "seed": seed, "mistake": arm.mistake, "told": told, "tried": tried, "named": bool(set(told) & set(arm.told)),
            "first_reward": round(sum(rewards[:5]) / 5, 3), "last_reward": round(sum(rewards[-5:]) / 5, 3)}  # fmt: skip


def ours() -> dict[str, list[str]]:
    """{our own run: what the rules for others tell of it}"""
    found = {}
    for path in sorted(RESULTS.rglob("metrics.jsonl")):
        name = path.parent.relative_to(RESULTS).as_posix()
        if "healthy" in name or not any(part in name for part in NOT_WELL):
            found[name] = told_of(logs.read(path))
    return found


def share(hits: int, n: int) -> str:
    return f"{hits} of {n}: {metrics.proportion(hits, n).percent()}" if n else "-"


def judge() -> None:
    """results/doctor/truth.json and README.md from the runs that are there."""
    runs = [judged(name, seed) for seed in SEEDS for name in ARMS if (RUNS / f"{name}-{seed}.json.gz").exists()]
    test = [run for run in runs if run["seed"] != DEVELOPMENT]
    healthy, sick = ([run for run in test if run["mistake"] is which] for which in (False, True))
    own = ours()
    measured = {rule: (sum(rule in run["told"] for run in healthy), sum(rule in run["tried"] for run in healthy)) for rule in NEEDS}
    own_alarms = Counter(name for told in own.values() for name in told)
    truth = {"command": "python -m lab.trust.foreign_truth --page", "trl": "1.16.0", "development_seed": DEVELOPMENT,
             "measured": {rule: both for rule, both in measured.items() if both[1]}, "our_runs": len(own),
             "our_alarms": {n: told for n, told in own.items() if told}, "runs": runs}  # fmt: skip
    write_json(OUT / "truth.json", truth)

    def row(name: str) -> list:
        of = lambda seeds: [run for run in runs if run["arm"] == name and run["seed"] in seeds]
        dev, later = of([DEVELOPMENT]), of([seed for seed in SEEDS if seed != DEVELOPMENT])
        said = lambda some: ", ".join(sorted({n for run in some for n in run["told"]})) or "nothing"
        hit = f"{sum(run['named'] for run in later)} of {len(later)}" if ARMS[name].mistake else ""
        rewards = "; ".join(f"{run['first_reward']:.2f} to {run['last_reward']:.2f}" for run in of(SEEDS))
        return [name, ARMS[name].what, hit, said(dev), said(later), rewards]

    named, wrong = sum(run["named"] for run in sick), sum(bool(run["told"]) for run in healthy)
    arms = {run["arm"] for run in sick}
    well = {run["arm"] for run in healthy}
    alarmed = sum(any(run["told"] for run in healthy if run["arm"] == arm) for arm in well)
    always = sum(all(run["named"] for run in sick if run["arm"] == arm) for arm in arms)
    climbs = lambda name: read_json(RESULTS / name / "config.json")["curriculum"]
    climbing = sum(climbs(name) for name, told in own.items() if "collapse" in told)
    head = [
        "arm",
        "what it is",
        "named, of the test runs",
        "told on the development seed",
        "told on the test seeds",
        "reward, first 5 to last 5 steps",
    ]
    clean = sum(not told for told in own.values())
    write_page(OUT / "README.md", [
        "# How often is the doctor of other people's runs right?", "",
        "Real runs of TRL 1.16.0 on a CPU, made by `python -m lab.trust.foreign_truth` and judged by `--page`: pico_base on easy letters,",
        f"{STEPS} steps of {TASKS} prompts with {K} replies each. `trl/` has the trainer_state.json of each. Rules and thresholds were "
        "chosen with seed",
        f"{DEVELOPMENT} in view (development), and are judged on the other two seeds (test), with Wilson's 95% intervals.", "",
        f"* **Named**: {share(always, len(arms))} mistakes in all of their test runs; of the {len(sick)} runs {named}. The two "
        "seeds of a mistake resemble each other, so the interval is over mistakes.",
        f"* **False alarms**: a symptom was told of {share(alarmed, len(well))} healthy arms; of their {len(healthy)} test runs {wrong}.",
        f"* **Our own runs**: of {len(own)} committed runs of ours that nothing is wrong with, the same rules said nothing of "
        f"{share(clean, len(own))}. They told "
        + (", ".join(f"{name} ({n})" for name, n in own_alarms.most_common()) or "nothing")
        + f". Of the collapses {climbing} are of a curriculum that went on to harder tasks, which these logs do not show. Left out is a "
        "run that lost the format and came back (claims/curriculum/fixed_bare-4): there both alarms, collapse and broken, are true.", "",
        "Two test seeds each are few: an interval over arms is one over *these* mistakes, of this size, on this small model. Runs in "
        "which a mistake did",
        "no harm that a log shows count as missed.", "", "## Mistakes", "", *table(head, map(row, MISTAKES)), "", "## Healthy", "",
        *table([*head[:2], "", *head[3:]], map(row, HEALTHY)), "", "## What these runs cannot show", "",
        "* Without an engine TRL logs no number that tells a temperature, a dropout or old weights; "
        "no rule can, and the doctor says which setting logs one.",
        "* `off-policy` has TRL's correction switched off, and with it the columns that would show the age of the samples. It is named "
        "only if it does harm.",
        "* Replies are sampled by our own sampler in place of vLLM's (or of model.generate, but for `plain`): rounding of a real "
        "engine is larger.",
        "* On the first development runs two healthy arms, `nearly-solved` and `thinks-longer`, had a learning rate of 2e-3 and fell "
        "apart. Their rate was",
        "  lowered before any test run was made.",
        "* Dropout of 0.3 in a LoRA this small moves log-probs by 0.002 to 0.006 nats, less than a bfloat16 engine's rounding may. The "
        "doctor is silent.",
        "* `resumed` without an optimizer, KL that runs away, entropy collapse and evaluations that disagree are held by made-up logs only "
        "(tests/test_foreign.py).",
        "* No run here is of verl, prime-rl or Unsloth: they need a GPU. `samples/` has logs in their documented formats "
        "(lab/trust/foreign_samples.py).", "",
    ])  # fmt: skip
    print(
        f"named {share(named, len(sick))}; false alarms {share(wrong, len(healthy))}; "
        f"of ours {len(own) - clean} of {len(own)}: {dict(own_alarms)}"
    )


def main(only: tuple[str, ...] = (), seeds: tuple[int, ...] = SEEDS, page: bool = False) -> None:
    for seed in seeds:
        for name in only or ARMS:
            if not page and not (RUNS / f"{name}-{seed}.json.gz").exists():
                make(name, seed)
    judge()


if __name__ == "__main__":
    tyro.cli(main)
