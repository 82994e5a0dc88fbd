"""Protects checkpoints: a round trip is exact to the bit, no kill and no full disk leaves a run without one, damage is noticed and the one
before is taken."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft.utils import save_and_load
from safetensors.torch import load_file, save_file

import warm
from bookkeeping import checkpoint
from bookkeeping.checkpoint import find_checkpoint, load_checkpoint, load_tensors, restore, save_checkpoint, save_tensors, set_aside
from fast.logprobs import token_logprobs
from helpers import assert_one_sentence, random_rows, write_folder
from policy import load_policy

ROOT = Path(__file__).resolve().parent.parent


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


STATE = {"update": 7, "lr": 0.1 + 0.2, "tier": None, "seen": [1, 2.5, "é"], "nested": {"done": False}}


def equal(a, b) -> bool:
    """Deep equality that compares tensors bit by bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))
    return a == b


ARCHITECTURES = [("qwen3", 4), ("qwen3", 0), ("qwen3_moe", 4), ("qwen3_moe", 0), ("llama", 0), ("gpt2", 4), ("gpt2", 0)]


@pytest.mark.parametrize("kind, lora_rank", ARCHITECTURES)
def test_a_checkpoint_round_trip_is_bit_exact(load, snapshot, tmp_path, kind, lora_rank):
    policy = load(kind, lora_rank)
    optimizer = train_a_little(policy)
    save_checkpoint(tmp_path / "c", policy, optimizer, STATE)

    other = load(kind, lora_rank, awake=True, seed=5)  # everything that can differ does
    optimizer_state, state = load_checkpoint(find_checkpoint(tmp_path / "c"), other)
    assert equal(snapshot(other), snapshot(policy))
    assert equal(optimizer_state, optimizer.state_dict()) and state == STATE

    # The proof of the pudding: one more step from either leads to the same bits.
    resumed = torch.optim.AdamW(other.trainable().values(), lr=1.0)
    resumed.load_state_dict(optimizer_state)
    one_step(policy, optimizer, 9)
    one_step(other, resumed, 9)
    assert equal(snapshot(other), snapshot(policy))


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
    assert equal(snapshot(again), snapshot(policy)) and again.stop_ids == policy.stop_ids


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


def test_a_checksum_that_is_no_text_is_refused_in_one_sentence(saved, tmp_path):
    folder = write_folder(tmp_path / "c", saved)
    (folder / "checksum").write_bytes(bytes([saved["checksum"][0] ^ 0x80]) + saved["checksum"][1:])
    with pytest.raises(SystemExit) as error:
        find_checkpoint(folder)
    assert_one_sentence(error)


def test_no_checkpoint_is_no_error(saved, tmp_path):
    assert find_checkpoint(tmp_path / "c") is None
    write_folder(tmp_path / "c.new", dict(list(saved.items())[:2]))  # killed while the very first one was written
    assert find_checkpoint(tmp_path / "c") is None


def test_what_a_file_manager_leaves_does_not_damage_a_checkpoint(saved, tmp_path):
    folder = write_folder(tmp_path / "c", saved)
    (folder / ".DS_Store").write_bytes(b"x")
    (folder / ".ipynb_checkpoints").mkdir()
    assert find_checkpoint(folder) == folder


@pytest.mark.parametrize("half_written_new", [False, True])
def test_between_the_two_renames_the_old_checkpoint_is_found(saved, tmp_path, half_written_new):
    old = write_folder(tmp_path / "c.old", saved)
    if half_written_new:
        write_folder(tmp_path / "c.new", {"state.json": b"{"})
    assert find_checkpoint(tmp_path / "c") == old


def test_the_one_before_is_kept_and_taken_and_told_where_the_newer_is_damaged(load, tmp_path, capsys):
    policy, folder = load("qwen3", lora_rank=2), tmp_path / "c"
    for update in (1, 2, 3):
        save_checkpoint(folder, policy, None, {"update": update})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "c.old"]
    assert load_checkpoint(find_checkpoint(folder), policy)[1] == {"update": 3} and not capsys.readouterr().out
    (folder / "state.json").write_text('{"update": 4}')
    found = find_checkpoint(folder)
    assert load_checkpoint(found, policy)[1] == {"update": 2}
    told = capsys.readouterr().out
    assert "damaged" in told and "c.old" in told and told.count("\n") == 1

    set_aside(folder)  # as a run does before it goes on: its next save must not give up the good one for the damaged one
    save_checkpoint(folder, policy, None, {"update": 5})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "c.damaged", "c.old"]
    assert load_checkpoint(folder, policy)[1] == {"update": 5} and load_checkpoint(find_checkpoint(tmp_path / "c.old"), policy)[1] == {
        "update": 2
    }


def test_two_damaged_checkpoints_are_one_sentence(saved, tmp_path):
    for name in ("c", "c.old"):
        write_folder(tmp_path / name, {**saved, "state.json": b"{}"})
    with pytest.raises(SystemExit) as error:
        find_checkpoint(tmp_path / "c")
    assert_one_sentence(error)


def test_a_disk_that_fills_up_is_an_os_error_and_leaves_the_last_checkpoint(model_folder, tmp_path):
    """In a process of its own, whose files may have 20 kB: the kernel then fails a write in the middle, as a full disk does."""
    script = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from types import SimpleNamespace
from bookkeeping.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from policy import load_policy
import torch
policy, folder = load_policy({model_folder("qwen3")!r}, {{rank}}, 4, device="cpu"), Path({str(tmp_path)!r}) / "c"
optimizer = torch.optim.AdamW(policy.trainable().values())
save_checkpoint(folder, policy, optimizer, {{{{"update": 1}}}})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
try:
    save_checkpoint(folder, policy, optimizer, {{{{"update": 2}}}})
except OSError as error:
    print("told", error.errno, error.strerror, error.filename)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("state", load_checkpoint(find_checkpoint(folder), policy)[1], sorted(p.name for p in folder.parent.iterdir()))
"""
    done = warm.run(["-c", script.format(rank=8)], ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    told, state = done.stdout.strip().splitlines()
    assert told.startswith("told") and "\n" not in told and int(told.split()[1]) in (errno.EFBIG, errno.EIO, errno.ENOSPC)
    assert state == "state {'update': 1} ['c']"  # half of the new one is gone: it would take room that is needed


def test_an_optimizer_that_is_a_program_is_not_run(tmp_path):
    class Program:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"state": Program()}, tmp_path / "optimizer.pt")
    with pytest.raises(SystemExit) as error:
        load_tensors(tmp_path / "optimizer.pt")
    assert "more than tensors" in str(error.value)
    assert_one_sentence(error)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("harm", ["flip", "truncate", "empty"])
def test_a_reference_that_is_damaged_is_called_damaged_and_not_hostile(tmp_path, harm):
    file, tensors = tmp_path / "reference.pt", {"a": torch.randn(2, 30)}
    save_tensors(file, tensors)
    assert equal(load_tensors(file), tensors) and sorted(p.name for p in tmp_path.iterdir()) == ["reference.checksum", "reference.pt"]
    content = file.read_bytes()
    place = content.index(tensors["a"].numpy().tobytes())
    flipped = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    file.write_bytes({"flip": flipped, "truncate": content[:-9], "empty": b""}[harm])
    for checked in (True, False):  # a run from before there was a checksum
        if not checked:
            (tmp_path / "reference.checksum").unlink()
        if checked or harm != "flip":
            with pytest.raises(SystemExit, match="damaged") as error:
                load_tensors(file)
            assert_one_sentence(error)
            assert "more than tensors" not in str(error.value)


class Killed(BaseException):
    """As a kill would: nothing in the code may catch it."""


@pytest.mark.parametrize("moment, expected", [("write", 1), ("rename 1", 1), ("rename 2", 1), ("cleanup", 1)])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(load, tmp_path, monkeypatch, moment, expected):
    policy, folder = load("qwen3", lora_rank=2), tmp_path / "c"
    save_checkpoint(folder, policy, None, {"update": 1})
    calls = {"rename": 0}
    rename, rmtree = Path.rename, checkpoint.shutil.rmtree

    def kill(*_, **__):
        raise Killed

    def killing_rename(self, target):
        calls["rename"] += 1
        return kill() if moment == f"rename {calls['rename']}" else rename(self, target)

    def killing_rmtree(path, **kwargs):
        return kill() if moment == "cleanup" else rmtree(path, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killing_rename)
        patch.setattr(checkpoint.shutil, "rmtree", killing_rmtree)
        if moment == "write":
            patch.setattr(checkpoint.torch, "save", kill)
        with pytest.raises(Killed):
            save_checkpoint(folder, policy, None, {"update": 2})
    assert load_checkpoint(find_checkpoint(folder), policy)[1] == {"update": expected}

    save_checkpoint(folder, policy, None, {"update": 3})  # and the next one clears up what was left
    assert load_checkpoint(find_checkpoint(folder), policy)[1] == {"update": 3}
    assert {path.name for path in tmp_path.iterdir()} <= {"c", "c.old"}


def test_the_umask_decides_who_may_read_a_checkpoint(load, tmp_path):
    """safetensors would have made 0600 of it: a colleague could resume the run from nothing but its state."""
    before = os.umask(0o027)
    try:
        save_checkpoint(tmp_path / "checkpoint", load("qwen3", 4), None, {"update": 1})
    finally:
        os.umask(before)
    files = list((tmp_path / "checkpoint").iterdir())
    assert len(files) > 3 and {file.stat().st_mode & 0o777 for file in files} == {0o640}


def test_whether_an_older_checkpoint_is_left_is_told(saved, tmp_path):
    for name, older in (("c", "there is no older one"), ("c.old", "so is the one before")):
        write_folder(tmp_path / name, {**saved, "state.json": b"{}"})
        with pytest.raises(SystemExit, match=older):
            find_checkpoint(tmp_path / "c")


NO_ROOM = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


def fails(*_, **__):
    raise RuntimeError(NO_ROOM)


def test_a_card_without_room_does_not_make_a_checkpoint_anothers_or_damaged(load, tmp_path, monkeypatch):
    policy = load("qwen3", 4)
    save_checkpoint(tmp_path / "c", policy, None, STATE)
    for room, name in ((checkpoint, "load_weights"), (torch, "load")):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="CUBLAS_STATUS_ALLOC_FAILED"):
            patch.setattr(room, name, fails)
            load_checkpoint(tmp_path / "c", policy)
    assert load_checkpoint(tmp_path / "c", policy)[1] == STATE


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
        ({"level": "easy", "seconds": {"total": 1.0, "sft": 2.0, "sync": 3.0}}, True),  # a level may be a word; a clock that is new since
        ({"rewards": {}}, False),  # one entry of another type
        ({"seconds": {"total": 1.0}}, False),  # a clock less
        ({"mood": "good"}, False),  # an entry of another version
    ],
)
def test_a_state_is_that_of_a_run_if_every_entry_is(monkeypatch, tmp_path, change, ours):
    start = {"update": -1, "level": 6, "rewards": [], "seconds": {"total": 0.0, "sft": 0.0}}
    kept = {"update": 3, "level": 6, "rewards": [0.5], "seconds": {"total": 1.0, "sft": 2.0}} | change
    monkeypatch.setattr(checkpoint, "load_checkpoint", lambda folder, policy: ({"param_groups": []}, kept))
    optimizer = SimpleNamespace(param_groups=[], load_state_dict=lambda moments: None)
    restore = lambda: checkpoint.restore(tmp_path, None, optimizer, start)
    if ours:
        assert restore() == kept
        return
    with pytest.raises(SystemExit, match="is not that of this run") as error:
        restore()
    assert_one_sentence(error)
