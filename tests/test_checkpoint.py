"""Protects checkpoints: a round trip is exact to the bit, no kill leaves a run without one, damage
is noticed and the one before is taken. tests/test_faults.py has the bad disks."""

import os
import shutil
from dataclasses import replace

import pytest
import torch
from peft.utils import save_and_load
from safetensors.torch import load_file, save_file

from bookkeeping.checkpoint import (
    find_checkpoint,
    load_checkpoint,
    load_tensors,
    restore,
    save_checkpoint,
    save_tensors,
    set_aside,
)
from fast.logprobs import token_logprobs
from helpers import assert_one_sentence, failing, random_rows, write_folder
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


RANKS = {"qwen3": (4, 0), "qwen3_moe": (4, 0), "llama": (0,), "gpt2": (4, 0)}
ARCHITECTURES = [(kind, rank) for kind, ranks in RANKS.items() for rank in ranks]


@pytest.mark.parametrize("kind, lora_rank", ARCHITECTURES)
def test_a_checkpoint_round_trip_is_bit_exact(load, snapshot, tmp_path, kind, lora_rank):
    policy = load(kind, lora_rank)
    optimizer = train_a_little(policy)
    save_checkpoint(tmp_path / "c", policy, optimizer, STATE)

    other = load(kind, lora_rank, awake=True, seed=5)  # everything that can differ does
    optimizer_state, state = load_checkpoint(find_checkpoint(tmp_path / "c"), other)
    assert_equal(snapshot(other), snapshot(policy))
    assert_equal(optimizer_state, optimizer.state_dict())
    assert state == STATE

    # The proof of the pudding: one more step from either leads to the same bits.
    resumed = torch.optim.AdamW(other.trainable().values(), lr=1.0)
    resumed.load_state_dict(optimizer_state)
    one_step(policy, optimizer, 9)
    one_step(other, resumed, 9)
    assert_equal(snapshot(other), snapshot(policy))


def test_the_adapter_is_one_that_peft_can_load(load, model_folder, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = load("qwen3", lora_rank=4, awake=True)
    save_checkpoint(tmp_path / "c", policy, None, {})
    base = AutoModelForCausalLM.from_pretrained(model_folder("qwen3"))
    ids = random_rows(2, 15)
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        theirs = PeftModel.from_pretrained(base, tmp_path / "c").eval()(input_ids=ids).logits
        ours = policy.model(input_ids=ids).logits
    assert torch.equal(theirs, ours) and not torch.allclose(plain, ours, atol=1e-2)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_a_checkpoint_of_all_weights_is_a_model_folder_of_its_own(load, snapshot, tmp_path, kind):
    policy = load(kind)
    train_a_little(policy)
    save_checkpoint(tmp_path / "c", policy, None, {})
    again = load_policy(str(tmp_path / "c"), lora_rank=0, lora_alpha=1, device="cpu")
    assert_equal(snapshot(again), snapshot(policy))
    assert again.stop_ids == policy.stop_ids


@pytest.mark.parametrize("kind, lora_rank", [("qwen3", 4), ("qwen3", 0), ("qwen3_moe", 0)])
@pytest.mark.parametrize("change", ["a weight less", "a weight more"])
def test_a_checkpoint_whose_weights_are_not_exactly_the_policys_is_refused(load, tmp_path, kind, lora_rank, change):
    policy = load(kind, lora_rank, awake=True)
    save_checkpoint(tmp_path / "c", policy, None, STATE)
    file = next((tmp_path / "c").glob("*.safetensors"))
    weights = load_file(file)
    name = sorted(name for name in weights if "norm" not in name)[-1]
    weights[f"{name}.more"] = weights[name].clone()
    if change == "a weight less":
        del weights[name], weights[f"{name}.more"]
    save_file(weights, file)
    with pytest.raises(SystemExit, match="not a checkpoint of this run") as error:
        load_checkpoint(tmp_path / "c", policy)
    assert_one_sentence(error)
    assert name.split(".")[-2] in str(error.value)


@pytest.fixture(scope="module")
def saved(load, tmp_path_factory) -> dict[str, bytes]:
    """The files of one good checkpoint, by name."""
    folder = tmp_path_factory.mktemp("saved") / "c"
    policy = load("qwen3", lora_rank=2)
    save_checkpoint(folder, policy, train_a_little(policy, 1), STATE)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


FILES = ["adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "state.json", "checksum"]


@pytest.mark.parametrize("harm", ["flip", "truncate", "empty", "remove", "rename"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_refused_in_one_sentence(saved, tmp_path, name, harm):
    folder = write_folder(tmp_path / "c", saved)
    assert find_checkpoint(folder) == folder
    content = saved[name]
    if harm == "remove":
        (folder / name).unlink()
    elif harm == "rename":
        (folder / name).rename(folder / f"{name}~")
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        (folder / name).write_bytes({"flip": flipped, "truncate": content[:-1], "empty": b""}[harm])
    with pytest.raises(SystemExit) as error:
        find_checkpoint(folder)
    assert_one_sentence(error)


def test_a_checkpoint_that_is_half_written_is_none(saved, tmp_path):
    write_folder(tmp_path / "c.new", {"state.json": saved["state.json"]})
    assert find_checkpoint(tmp_path / "c") is None
    old = write_folder(tmp_path / "c.old", saved)  # between the two renames
    assert find_checkpoint(tmp_path / "c") == old


def test_what_a_file_manager_leaves_does_not_damage_a_checkpoint(saved, tmp_path):
    folder = write_folder(tmp_path / "c", {**saved, ".DS_Store": b"x"})
    (folder / ".ipynb_checkpoints").mkdir()
    assert find_checkpoint(folder) == folder


def test_the_one_before_is_kept_and_taken_if_the_newer_is_damaged(load, tmp_path, capsys):
    policy, folder = load("qwen3", lora_rank=2), tmp_path / "c"
    found = lambda place=folder: load_checkpoint(find_checkpoint(place), policy)[1]["update"]
    names = lambda: sorted(path.name for path in tmp_path.iterdir())
    for update in (1, 2, 3):
        save_checkpoint(folder, policy, None, {"update": update})
    assert names() == ["c", "c.old"]
    assert found() == 3 and not capsys.readouterr().out
    (folder / "state.json").write_text('{"update": 4}')
    assert found() == 2
    told = capsys.readouterr().out
    assert "damaged" in told and "c.old" in told and told.count("\n") == 1

    # As a run does before it goes on: its next save must not give up the good one for the damaged.
    set_aside(folder)
    save_checkpoint(folder, policy, None, {"update": 5})
    assert names() == ["c", "c.damaged", "c.old"]
    assert found() == 5 and found(tmp_path / "c.old") == 2


@pytest.mark.parametrize("harm", ["flip", "truncate", "empty"])
def test_a_reference_that_is_damaged_is_called_damaged_and_not_hostile(tmp_path, harm):
    file, tensors = tmp_path / "reference.pt", {"a": torch.randn(2, 30)}
    save_tensors(file, tensors)
    assert_equal(load_tensors(file), tensors)
    content = file.read_bytes()
    place = content.index(tensors["a"].numpy().tobytes())
    flipped = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    file.write_bytes({"flip": flipped, "truncate": content[:-9], "empty": b""}[harm])
    with pytest.raises(SystemExit, match="damaged") as error:
        load_tensors(file)
    assert_one_sentence(error)


def test_the_umask_decides_who_may_read_a_checkpoint(load, tmp_path):
    """safetensors would have made 0600 of it: a colleague could resume the run from nothing but its state."""
    before = os.umask(0o027)
    try:
        save_checkpoint(tmp_path / "checkpoint", load("qwen3", 4), None, {"update": 1})
    finally:
        os.umask(before)
    files = list((tmp_path / "checkpoint").iterdir())
    assert len(files) > 3 and {file.stat().st_mode & 0o777 for file in files} == {0o640}


def test_moments_are_loaded_onto_the_cpu_and_only_an_optimizer_takes_them_to_its_device(load, tmp_path):
    """--eval-only takes no step, and the moments of all weights are twice the weights. "meta" plays the card."""
    policy = load("qwen3", 4)
    save_checkpoint(tmp_path / "c", policy, train_a_little(policy), STATE)
    moments, _ = load_checkpoint(tmp_path / "c", replace(policy, device=torch.device("meta")))
    assert {m.device.type for state in moments["state"].values() for m in state.values()} == {"cpu"}
    on_card = torch.optim.AdamW([torch.empty_like(p, device="meta") for p in policy.trainable().values()])
    on_card.load_state_dict(moments)
    assert {state["exp_avg"].device.type for state in on_card.state.values()} == {"meta"}


@pytest.mark.parametrize("saved_on, resumed_on", [(None, True), (True, None)], ids=["cpu to card", "card to cpu"])
def test_a_step_is_fused_where_the_run_goes_on_and_not_where_it_was_saved(load, tmp_path, saved_on, resumed_on):
    """A card's optimizer is fused (policy.adam); torch would take that from the checkpoint. A CPU's, asked for it, plays the card's."""
    policy = load("qwen3", 4)
    adam = lambda fused: torch.optim.AdamW(policy.trainable().values(), lr=1e-3, fused=fused)
    optimizer = adam(saved_on)
    one_step(policy, optimizer, 1)
    state = STATE | {"seconds": {}}
    save_checkpoint(tmp_path / "c", policy, optimizer, state)
    resumed = adam(resumed_on)
    restore(tmp_path / "c", policy, resumed, state)
    assert resumed.param_groups[0]["fused"] is resumed_on
    one_step(policy, resumed, 2)
    assert {float(state["step"]) for state in resumed.state.values()} == {2.0}


def test_saving_an_adapter_asks_the_hub_nothing(load, tmp_path, monkeypatch):
    """peft asks it about the embeddings unless it is told; without a network that waits."""
    policy, asked = load("qwen3", 4), []
    monkeypatch.setattr(policy.model.peft_config["default"], "base_model_name_or_path", "owner/name")
    monkeypatch.setattr(save_and_load, "check_file_exists_on_hf_hub", lambda *given, **_: asked.append(given))
    save_checkpoint(tmp_path / "c", policy, None, STATE)
    assert asked == [] and all("lora_" in name for name in load_file(tmp_path / "c" / "adapter_model.safetensors"))


@pytest.mark.parametrize(
    "change, ours",
    [
        ({}, True),
        # a level may be a word, and there may be a clock that is new since
        ({"level": "easy", "seconds": {"total": 1.0, "sft": 2.0, "sync": 3.0}}, True),
        ({"rewards": {}}, False),  # one entry of another type
        ({"seconds": {"total": 1.0}}, False),  # a clock less
        ({"mood": "good"}, False),  # an entry of another version
    ],
)
def test_a_state_is_that_of_a_run_if_every_entry_is(load, tmp_path, change, ours):
    policy = load("qwen3", 4)
    optimizer = train_a_little(policy, 1)
    start = {"update": -1, "level": 6, "rewards": [], "seconds": {"total": 0.0, "sft": 0.0}}
    kept = start | {"update": 3, "rewards": [0.5]} | change
    save_checkpoint(tmp_path / "c", policy, optimizer, kept)
    if ours:
        assert restore(tmp_path / "c", policy, optimizer, start) == kept
        return
    with pytest.raises(SystemExit, match="is not that of this run") as error:
        restore(tmp_path / "c", policy, optimizer, start)
    assert_one_sentence(error)


class Killed(BaseException):
    """As a kill would: nothing in the code may catch it."""


MOMENTS = {  # the call in which it comes
    "the optimizer is written": (torch, ["save"], 1),
    "a file is flushed": (os, ["fsync"], 2),
    "the first rename": (os, ["rename", "replace"], 1),
    "the second rename": (os, ["rename", "replace"], 2),
    "the older one is removed": (shutil, ["rmtree"], 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(load, tmp_path, moment):
    policy, folder = load("qwen3", lora_rank=2), tmp_path / "c"
    save = lambda update: save_checkpoint(folder, policy, None, {"update": update})
    found = lambda: load_checkpoint(find_checkpoint(folder), policy)[1]["update"]
    save(1)
    module, names, nth = MOMENTS[moment]
    with failing(module, names, Killed(), nth), pytest.raises(Killed):
        save(2)
    assert found() == 1
    save(3)  # and the next one clears up what was left
    assert found() == 3
    assert {path.name for path in tmp_path.iterdir()} <= {"c", "c.old"}


@pytest.mark.parametrize("older", [False, True])
def test_of_damaged_checkpoints_it_is_told_whether_an_older_one_is_left(saved, tmp_path, older):
    for name in ("c", "c.old")[: 1 + older]:
        write_folder(tmp_path / name, {**saved, "state.json": b"{}"})
    why = "so is the one before" if older else "there is no older one"
    with pytest.raises(SystemExit, match=why) as error:
        find_checkpoint(tmp_path / "c")
    assert_one_sentence(error)


def test_a_card_without_room_does_not_make_a_checkpoint_damaged(load, tmp_path):
    policy = load("qwen3", 4)
    save_checkpoint(tmp_path / "c", policy, None, STATE)
    error = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    with failing(torch, ["load"], error), pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        load_checkpoint(tmp_path / "c", policy)
    assert load_checkpoint(tmp_path / "c", policy)[1] == STATE
