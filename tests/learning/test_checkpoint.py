"""Checkpoints: exact round trips, atomic replacement, and one clear line for every kind of bad file."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from thalweg.errors import CheckpointError
from thalweg.files import write_atomically
from thalweg.learning.checkpoint import (
    FORMAT,
    Checkpoint,
    flatten_optimiser,
    load_checkpoint,
    packed,
    restore_optimiser,
    save_checkpoint,
)

SOURCE = Path(__file__).resolve().parents[2] / "src"
META = {"epoch": 3, "name": "سلام é 🙂", "nested": {"list": [1, 2.5, None, True]}, "best": 0.1 + 0.2}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shared = torch.randn(3, 2)
    return {
        "float32": torch.randn(2, 3),
        "float64": torch.randn(4, dtype=torch.float64),
        "bfloat16": torch.randn(5).bfloat16(),
        "float16": torch.randn(5).half(),
        "int64": torch.tensor([-(2**62), 2**62]),
        "uint8": torch.get_rng_state()[:17],
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "odd values": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "turned": torch.randn(3, 4).t(),
        "slice": torch.randn(6)[::2],
        "one": shared,
        "same storage": shared,
        "needs gradient": torch.randn(2, requires_grad=True),
    }


def test_round_trip_is_exact(tmp_path):
    before = tensors()
    save_checkpoint(tmp_path / "deep" / "er" / "x.safetensors", Checkpoint(before, META))
    after = load_checkpoint(tmp_path / "deep" / "er" / "x.safetensors")
    assert after.meta == META
    assert after.tensors.keys() == before.keys()
    for name, tensor in after.tensors.items():
        assert tensor.dtype == before[name].dtype, name
        assert tensor.shape == before[name].shape, name
        assert not tensor.requires_grad
        ours, theirs = (t.detach().contiguous().flatten().view(torch.uint8) for t in (tensor, before[name]))
        assert torch.equal(ours, theirs), name


def test_packed_tensors_are_near_and_small(tmp_path):
    torch.manual_seed(0)
    own = {
        "matrix": torch.randn(40, 300) * torch.logspace(-3, 3, 40).unsqueeze(1),
        "cube": torch.randn(4, 5, 6),
        "vector": torch.randn(50),
        "zeros": torch.zeros(3, 4),
        "count": torch.tensor(7),
    }
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, Checkpoint(packed(own), META))
    assert path.stat().st_size < 0.3 * sum(4 * tensor.numel() for tensor in own.values()) + 1500
    found = load_checkpoint(path)
    assert set(found.tensors) == set(own)
    for name in ("matrix", "cube"):
        rows, original = found.tensors[name].flatten(1), own[name].flatten(1)
        assert found.tensors[name].dtype == torch.float32
        step = original.abs().amax(dim=1, keepdim=True) / 127
        assert bool(((rows - original).abs() <= 0.5001 * step).all())
    assert torch.allclose(found.tensors["vector"], own["vector"], rtol=1e-3)
    assert torch.equal(found.tensors["zeros"], own["zeros"])
    assert torch.equal(found.tensors["count"], own["count"])


def test_scales_that_do_not_fit_are_one_line(tmp_path):
    wrong = packed({"weight": torch.ones(2, 3)})
    wrong["weight#scale"] = torch.ones(5)
    save_checkpoint(tmp_path / "x.safetensors", Checkpoint(wrong, META))
    with pytest.raises(CheckpointError, match=r"x\.safetensors: expected packed matrices with their scales"):
        load_checkpoint(tmp_path / "x.safetensors")


def test_parts_by_prefix():
    checkpoint = Checkpoint({"model.a": torch.ones(1), "model.b": torch.ones(2), "other.a": torch.ones(3)}, {})
    assert sorted(checkpoint.part("model.")) == ["a", "b"]
    assert checkpoint.part("model.")["b"].shape == (2,)
    assert checkpoint.part("nothing.") == {}


def test_nothing_else_is_left_in_the_folder(tmp_path):
    for epoch in range(3):
        save_checkpoint(tmp_path / "x.safetensors", Checkpoint(tensors(), {"epoch": epoch}))
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]
    assert load_checkpoint(tmp_path / "x.safetensors").meta == {"epoch": 2}


KILLER = """
import os, signal, sys, torch
from pathlib import Path
from thalweg.learning.checkpoint import Checkpoint, save_checkpoint

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def die_half_way(handle, mode):
    class Half:
        def __enter__(self): return self
        def __exit__(self, *args): pass
        def write(self, data):
            os.write(handle, data[: len(data) // 2])
            die()
    return Half()

moment, path = sys.argv[1], Path(sys.argv[2])
setattr(os, moment, die_half_way if moment == "fdopen" else die)
save_checkpoint(path, Checkpoint({"weight": torch.full((1000,), 2.0)}, {"epoch": 2}))
"""


@pytest.mark.parametrize("moment", ["fdopen", "replace"])
def test_a_writer_killed_in_the_middle_leaves_the_old_file_whole(tmp_path, moment):
    path = tmp_path / "x.safetensors"
    save_checkpoint(path, Checkpoint({"weight": torch.ones(1000)}, {"epoch": 1}))
    before = path.read_bytes()
    python_path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", KILLER, moment, str(path)],
        env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert path.read_bytes() == before
    assert load_checkpoint(path).meta == {"epoch": 1}
    # What the kill left over is in nobody's way.
    save_checkpoint(path, Checkpoint({"weight": torch.ones(2)}, {"epoch": 2}))
    assert load_checkpoint(path).meta == {"epoch": 2}


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, moment):
    path = tmp_path / "x.json"
    write_atomically(path, b"old")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, moment, full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_permissions_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "x", b"")
        assert os.umask(umask) == umask, "the umask itself is left alone"
        assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o666 & ~umask
    finally:
        os.umask(before)


def refused(path: Path) -> str:
    """The message with which a file is refused: one line that names it."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 40, -1, -1000])
def test_truncated(tmp_path, keep):
    path = tmp_path / "x.safetensors"
    save_checkpoint(path, Checkpoint(tensors(), META))
    path.write_bytes(path.read_bytes()[:keep])
    assert "expected a whole safetensors file" in refused(path)


def test_a_file_replaced_while_it_is_read_is_read_anew(tmp_path, monkeypatch):
    # safetensors opens the path again for each tensor, so a training that goes on could mix two states.
    path = tmp_path / "last.safetensors"
    states = [Checkpoint({"weight": torch.full((3,), float(step))}, {"step": step}) for step in range(4)]
    save_checkpoint(path, states[0])
    real, opened = safetensors.safe_open, []

    class Replaced:
        def __init__(self, name, framework):
            self.file = real(name, framework=framework)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def metadata(self):
            return self.file.metadata()

        def keys(self):
            opened.append(len(opened) + 1)
            if len(opened) < len(states):
                save_checkpoint(path, states[len(opened)])
            return self.file.keys()

        def get_tensor(self, name):
            with real(str(path), framework="pt") as file:
                return file.get_tensor(name)

    monkeypatch.setattr(safetensors, "safe_open", Replaced)
    found = load_checkpoint(path)
    assert found.meta["step"] == 3
    assert found.tensors["weight"].tolist() == [3.0, 3.0, 3.0]
    assert len(opened) == 4


def test_absent_and_folder(tmp_path):
    assert "got no such file; train first or name another run" in refused(tmp_path / "absent.safetensors")
    refused(tmp_path)


def test_foreign(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    assert "expected a checkpoint, got a safetensors file of another kind" in refused(path)
    save_file({"weight": torch.ones(2)}, path, metadata={"format": "pt"})
    assert "of another kind" in refused(path)
    path.write_text("weights, honestly\n" * 100)
    assert "expected a whole safetensors file" in refused(path)


@pytest.mark.parametrize("version", [str(FORMAT + 1), "99", "1.5", "new", "-1", ""])
def test_newer_or_senseless_version(tmp_path, version):
    path = tmp_path / "x.safetensors"
    meta = {"kind": "thalweg", "format": version, "meta": "{}"}
    save_file({"weight": torch.ones(2)}, path, metadata=meta)
    message = refused(path)
    assert f"expected checkpoint format {FORMAT} or older, got {version}; upgrade thalweg" in message


@pytest.mark.parametrize("text", ["", "{", "not json", "[1, 2]", "3", "null", '"text"', None])
def test_damaged_metadata(tmp_path, text):
    path = tmp_path / "x.safetensors"
    meta = {"kind": "thalweg", "format": str(FORMAT)} | ({} if text is None else {"meta": text})
    save_file({"weight": torch.ones(2)}, path, metadata=meta)
    assert "metadata is damaged; restore it from a copy or train again" in refused(path)


def test_format_1_had_no_checksum(tmp_path):
    path = tmp_path / "x.safetensors"
    meta = {"kind": "thalweg", "format": "1", "meta": json.dumps({"epoch": 1})}
    save_file({"weight": torch.ones(2)}, path, metadata=meta)
    assert load_checkpoint(path).meta == {"epoch": 1}
    for later in ({"format": str(FORMAT)}, {"format": "0"}, {"formas": "1", "format": ""}):
        save_file({"weight": torch.ones(2)}, path, metadata=meta | later)
        assert "checksum" in refused(path) or "upgrade" in refused(path)


class Trap:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("writer", ["pickle", "torch"])
def test_a_pickle_is_refused_and_not_executed(tmp_path, writer):
    mark, path = tmp_path / "executed", tmp_path / "x.safetensors"
    if writer == "pickle":
        path.write_bytes(pickle.dumps(Trap(mark)))
    else:
        torch.save({"weight": Trap(mark)}, path)
    assert "expected a whole safetensors file" in refused(path)
    assert not mark.exists()
    # The trap does spring where something unpickles it.
    if writer == "pickle":
        pickle.loads(path.read_bytes())
        assert mark.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable(tmp_path):
    path = tmp_path / "x.safetensors"
    save_checkpoint(path, Checkpoint(tensors(), {}))
    path.chmod(0)
    refused(path)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_optimisers_go_on_as_if_never_stopped(tmp_path, name):
    options = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {"lr": 0.1}

    def fresh():
        weights = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.full((2, 2), 2.0))]
        return weights, getattr(torch.optim, name)(weights, **options)

    def steps(weights, optimiser, numbers):
        for number in numbers:
            for weight in weights:
                weight.grad = torch.sin(weight.detach() * number)
            optimiser.step()

    whole, optimiser = fresh()
    steps(whole, optimiser, range(1, 7))

    weights, optimiser = fresh()
    steps(weights, optimiser, range(1, 4))
    saved = flatten_optimiser(optimiser, "optimiser.")
    save_checkpoint(tmp_path / "x", Checkpoint(saved | {f"w.{i}": w for i, w in enumerate(weights)}, {}))
    loaded = load_checkpoint(tmp_path / "x")
    again, optimiser = fresh()
    with torch.no_grad():
        for index, weight in enumerate(again):
            weight.copy_(loaded.tensors[f"w.{index}"])
    restore_optimiser(optimiser, loaded.part("optimiser."))
    steps(again, optimiser, range(4, 7))
    for ours, theirs in zip(again, whole, strict=True):
        assert torch.equal(ours, theirs)
