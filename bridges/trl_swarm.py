"""The swarm for TRL: its GRPOTrainer plays and trains on our economy through `environment_factory`.

    from bridges.trl_swarm import SwarmForTRL, tasks
    args = GRPOConfig(max_tool_calling_iterations=25, max_completion_length=8192, …)
    GRPOTrainer(model="Qwen/Qwen3-0.6B", environment_factory=SwarmForTRL, args=args,
                train_dataset=tasks(1000)).train()

TRL makes one object per rollout, calls reset with the example's columns, offers every public method
as a tool, and asks get_reward at the end. So it wants a class, whose ten methods are made from
swarm.tools.TOOLS, to be declared once. Two things differ from our own loop, so a score from there
is not exactly comparable with one from here: a reply without a tool call ends TRL's episode (the
remaining turns count as passed), and TRL gives up on a call that it cannot parse, while we tell the
model what was wrong with it.

letters and alphabet need no adapter: one is a reward function of one reply
(`Letters(…).reset(seed)`, `step(reply)`, `score()`), the other has no tools.

Run me: `python -m bridges.trl_swarm --steps 2` lets TRL train pico_swarm for two steps on two tasks
(pip install -r requirements/verifiers.txt).
"""

import argparse
import inspect

from env_swarm import Swarm
from swarm.tools import TOOLS, write_call

TYPES = {"string": str, "number": float}
# What a tool's argument is, for the docstring from which TRL makes its schema.
ARGUMENTS = {
    "content": "what to write",
    "post_id": "such as post_3",
    "direction": "up or down",
    "counterparty_id": "such as bot_2",
    "proposal_id": "such as prop_4",
    "task_id": "such as task_1",
    "offered_transfer": "what you give; below 0 you get it",
}


class SwarmForTRL:
    difficulty, version = "medium", "0.2"

    def reset(self, seed: int, **_) -> str:
        self.env = Swarm(self.difficulty, self.version)
        self.done = False
        return self.env.reset(seed)[-1]["content"]

    def get_reward(self) -> float:
        return self.env.score()["reward"]

    def _call(self, tool: str, arguments: dict) -> str:
        if self.done:
            return "the episode is over"
        messages, self.done = self.env.step(write_call(tool, arguments))
        return messages[-1]["content"] if messages else "the episode is over"


def method(tool: str):
    """A method of SwarmForTRL that makes this call. TRL reads its schema from the signature and the
    docstring."""
    told, arguments = TOOLS[tool]

    def call(self, **given) -> str:
        return self._call(tool, given)

    def parameter(name: str, **more) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, **more)

    types = {name: TYPES[kind] for name, kind in arguments.items()}
    lines = [f"    {name}: {ARGUMENTS[name]}\n" for name in arguments]
    by_name = [parameter(name, annotation=kind) for name, kind in types.items()]
    call.__name__ = call.__qualname__ = tool
    call.__doc__ = f"{told}\n\nArgs:\n" + "".join(lines) if arguments else told
    call.__annotations__ = types | {"return": str}
    call.__signature__ = inspect.Signature([parameter("self"), *by_name], return_annotation=str)
    return call


for tool in TOOLS:
    setattr(SwarmForTRL, tool, method(tool))


def tasks(n: int, first: int = 0):
    """A datasets.Dataset of n tasks: an empty question, to which TRL adds what reset returns, and
    the seed for reset."""
    from datasets import Dataset

    question = [{"role": "user", "content": ""}]
    return Dataset.from_list([{"prompt": question, "seed": first + i} for i in range(n)])


def train(steps: int, folder: str):
    """GRPOTrainer on pico_swarm. Returns the trainer, whose state has the logs."""
    from pathlib import Path

    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from policy import PICO_SWARM

    tokenizer = AutoTokenizer.from_pretrained(PICO_SWARM)
    # TRL recognizes a template by its exact text, and only then can read tool calls. Ours says what
    # Qwen3's says, in other words. A Qwen3 does not need this line.
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    args = trl.GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=1024,
        max_tool_calling_iterations=4,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        seed=0,
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            PICO_SWARM, dtype="float32", use_safetensors=True
        ),
        processing_class=tokenizer,
        args=args,
        train_dataset=tasks(2),
        environment_factory=SwarmForTRL,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2)
    columns = ("reward", "loss", "grad_norm", "tools/call_frequency", "tools/failure_frequency")
    with tempfile.TemporaryDirectory() as folder:
        for line in train(parser.parse_args().steps, folder).state.log_history[:-1]:
            print({name: line[name] for name in (*columns, "step") if name in line})
