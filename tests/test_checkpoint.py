"""Protects checkpoints: a round trip is exact to the bit, and damage is noticed.

tests/test_train.py goes back to the one before; tests/test_faults.py has the kills and bad disks.
"""

import pytest
import torch

from bookkeeping.folder import find_checkpoint, load_checkpoint, save_checkpoint
from fast.logprobs import token_logprobs
from helpers import random_rows, refusal, write_folder
from policy import load_policy


def train_a_little(policy, steps: int = 3) -> torch.optim.Optimizer:
    """A few AdamW steps on random tokens; returns the optimizer, whose state is then not empty."""
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-2)
    for step in range(steps):
        one_step(policy, optimizer, step)
    return optimizer


def one_step(policy, optimizer, seed: int) -> None:
    ids = random_rows(2, 10, seed)  # [2, 10]
    loss = -token_logprobs(policy, ids, torch.ones(2, 9, dtype=torch.bool))[0].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


STATE = {"update": 7, "lr": 0.1 + 0.2, "tier": None, "seen": [1, 2.5, "é"], "nested": {"a": False}}


def assert_equal(a, b) -> None:
    """To the last bit."""
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("lora_rank", [4, 0])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama", "gpt2"])
def test_a_checkpoint_round_trip_is_bit_exact(load, snapshot, tmp_path, kind, lora_rank):
    policy = load(kind, lora_rank)
    optimizer, reference = train_a_little(policy), policy.trainable()
    save_checkpoint(tmp_path / "c", policy, optimizer, STATE, reference)

    other = load(kind, lora_rank, awake=True, seed=5)  # everything that can differ does
    resumed = torch.optim.AdamW(other.trainable().values(), lr=1.0)
    before_grpo, state = load_checkpoint(find_checkpoint(tmp_path / "c"), other, resumed)
    assert_equal(snapshot(other), snapshot(policy))
    assert_equal(resumed.state_dict(), optimizer.state_dict())
    assert state == STATE
    assert_equal(before_grpo, dict(reference))

    # The proof of the pudding: one more step from either leads to the same bits.
    one_step(policy, optimizer, 9)
    one_step(other, resumed, 9)
    assert_equal(snapshot(other), snapshot(policy))


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_a_checkpoint_of_all_weights_is_a_model_folder_of_its_own(load, snapshot, tmp_path, kind):
    policy = load(kind)
    train_a_little(policy)
    save_checkpoint(tmp_path / "c", policy, None, {})
    again = load_policy(str(tmp_path / "c"), lora_rank=0, lora_alpha=1, device="cpu")
    assert_equal(snapshot(again), snapshot(policy))
    assert again.stop_ids == policy.stop_ids


@pytest.fixture(scope="module")
def saved(load, tmp_path_factory) -> dict[str, bytes]:
    """The files of one good checkpoint, by name."""
    folder = tmp_path_factory.mktemp("saved") / "c"
    policy = load("qwen3", lora_rank=2)
    save_checkpoint(folder, policy, train_a_little(policy, 1), STATE)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# what file managers and others put into a folder
JUNK = [
    "desktop.ini",
    ".DS_Store",
    "Thumbs.db",
    "._state.json",
    "~$state.json",
    "state (1).json",
    "state.sync-conflict-20260101-1.json",
    "optimizer.pt.part",
    ".~lock.state.json#",
]


@pytest.mark.parametrize(
    "harmed",
    [lambda content: bytes([content[0] ^ 1]) + content[1:], lambda content: content[:-1], None],
    ids=["flipped", "cut", "removed"],
)
@pytest.mark.parametrize(
    "name",
    ["adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "state.json", "checksum"],
)
def test_a_damaged_checkpoint_is_refused_in_one_sentence(saved, tmp_path, name, harmed):
    folder = write_folder(tmp_path / "c", saved | dict.fromkeys(JUNK, b"x"))
    assert find_checkpoint(folder) == folder
    (folder / name).unlink()
    if harmed:
        (folder / name).write_bytes(harmed(saved[name]))
    assert "every checkpoint is damaged" in refusal(SystemExit, find_checkpoint, folder)


@pytest.mark.parametrize(
    "saved_on, resumed_on", [(None, True), (True, None)], ids=["cpu to card", "card to cpu"]
)
def test_a_step_is_fused_where_the_run_goes_on_and_not_where_it_was_saved(
    load, tmp_path, saved_on, resumed_on
):
    """A card's optimizer is fused (policy.adam); torch would take that from the checkpoint. A
    CPU's, asked for it, plays the card's."""
    policy = load("qwen3", 4)
    adam = lambda fused: torch.optim.AdamW(policy.trainable().values(), lr=1e-3, fused=fused)
    optimizer = adam(saved_on)
    one_step(policy, optimizer, 1)
    save_checkpoint(tmp_path / "c", policy, optimizer, STATE)
    resumed = adam(resumed_on)
    load_checkpoint(tmp_path / "c", policy, resumed)
    assert resumed.param_groups[0]["fused"] is resumed_on
    one_step(policy, resumed, 2)
    assert {float(state["step"]) for state in resumed.state.values()} == {2.0}
