"""Files that are damaged, and disks that are full: one line each, and what was whole stays whole."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from thalweg.errors import CheckpointError, ThalwegError, WriteError
from thalweg.files import append, write_atomically
from thalweg.learning.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from thalweg.tasks.registry import build_config, train
from thalweg.tasks.transduce.transducer import load

TINY = ("hidden=8", "embedding=8", "epochs=2", "batch_size=16", "device=cpu", "threads=1")
HUGE = [10**9, 10**30, -1, 0, 1e999, float("nan"), True, None, "x", [], {}, [[]], "a" * 5000]


def cli(*args: object) -> Result:
    from thalweg.cli.main import app

    return CliRunner().invoke(app, [str(arg) for arg in args])


def one_line(result: Result) -> str:
    """The error of a command that was refused: one line, status 2, no traceback."""
    told = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.exit_code == 2, (result.exit_code, result.exception, result.stderr)
    assert len(told) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return told[0]


def refusal(call: Callable[[], object], what: str = "") -> str:
    """What the error of a call says, one line; empty where nothing was wrong. Any other error is a fault."""
    try:
        call()
    except ThalwegError as error:
        told = str(error)
    except BaseException as error:
        raise AssertionError(what) from error
    else:
        return ""
    assert told, what
    assert "\n" not in told, what
    return told


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdef", k=rng.randint(2, 5))) for _ in range(40)]
    path.write_text("".join(f"{word}\t{word[::-1]}\n" for word in words), encoding="utf-8")
    return path


def words(pairs: Path, out: Path) -> list[object]:
    return ["train", "--data", pairs, "--dev", pairs, "--out", out, *TINY]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, pairs: Path) -> Path:
    """A run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert cli(*words(pairs, out)).exit_code == 0
    return out


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def assert_same(one: Path, other: Path) -> None:
    for name in ("model.safetensors", "last.safetensors"):
        first, second = load_checkpoint(one / name).tensors, load_checkpoint(other / name).tensors
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), name


# A disk that is full from the n-th write on.


@contextmanager
def full_after(writes: int) -> Iterator[list[Path]]:
    """Inside, writes fail with ENOSPC after so many; gives what was tried in vain."""
    count, refused = [0], list[Path]()
    fsync, opened = os.fsync, Path.open

    def refuse() -> None:
        count[0] += 1
        if count[0] > writes:
            refused.append(Path())
            raise OSError(errno.ENOSPC, "No space left on device")

    def full_fsync(handle: int) -> None:
        refuse()
        fsync(handle)

    def full_open(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "a" in mode:
            refuse()
        return opened(path, mode, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full_fsync)
        patch.setattr(Path, "open", full_open)
        yield refused


def check_full_disk_in_training(pairs: Path, whole: Path, out: Path, writes: int) -> bool:
    """A training whose disk is full after so many writes; False where it needs no more than those."""
    with full_after(writes) as refused:
        done = cli(*words(pairs, out))
    if not refused:
        assert done.exit_code == 0
        return False
    message = one_line(done)
    assert "cannot be written (No space left on device); make room and try again" in message
    assert str(out) in message
    assert not list(out.glob(".*.tmp"))
    last = out / "last.safetensors"
    assert ("last.safetensors, is whole" in message) is last.exists()
    if last.exists():
        load_checkpoint(last)
    begun = (out / "config.yaml").exists()
    assert cli(*(["train", "--resume", "--out", out] if begun else words(pairs, out))).exit_code == 0
    assert_same(out, whole)
    return True


@pytest.mark.parametrize("writes", [0, 3, 5, 8])
def test_a_full_disk_in_training_is_one_line_and_resuming_gives_the_same(tmp_path, pairs, whole, writes):
    assert check_full_disk_in_training(pairs, whole, tmp_path / "run", writes)


@pytest.mark.slow
def test_a_full_disk_at_every_moment_of_a_training(tmp_path, pairs, whole):
    writes = 0
    while check_full_disk_in_training(pairs, whole, tmp_path / f"run-{writes}", writes):
        writes += 1
    assert writes > 8


@pytest.mark.parametrize("writes", [0, 4])
def test_a_full_disk_while_resuming_leaves_the_checkpoint_whole(tmp_path, whole, run, writes):
    other = shutil.copytree(whole, tmp_path / "other")
    with full_after(writes):
        done = cli("train", "--resume", "--out", run, "epochs=4")
    assert "last.safetensors, is whole" in one_line(done)
    for again in (run, other):
        assert cli("train", "--resume", "--out", again, "epochs=4").exit_code == 0
    assert load_checkpoint(run / "last.safetensors").meta["progress"]["epoch"] == 4
    assert_same(run, Path(other))


@pytest.mark.parametrize("writes", [0, 2])
@pytest.mark.parametrize("command", ["evaluate", "diagnose"])
def test_a_full_disk_while_measuring_is_one_line(pairs, run, command, writes):
    before = (run / "model.safetensors").read_bytes()
    with full_after(writes) as refused:
        done = cli("evaluate", run, pairs) if command == "evaluate" else cli("diagnose", run, "--rows", 4, "--steps", 2)
    if refused:
        message = one_line(done)
        assert "cannot be written (No space left on device)" in message
        assert "last.safetensors, is whole" in message
    assert (run / "model.safetensors").read_bytes() == before
    assert not list(run.rglob(".*.tmp"))


@pytest.mark.parametrize("writes", [1, 12])
def test_a_full_disk_in_a_sweep_is_one_line_and_it_goes_on(tmp_path, pairs, writes):
    config, out = tmp_path / "config.yaml", tmp_path / "sweep"
    model = {"hidden": 8, "embedding": 8}
    training = {"epochs": 1, "device": "cpu", "threads": 1}
    space = {"space": {"batch_size": [16, 32]}, "method": "grid"}
    data = {"train": str(pairs), "dev": str(pairs)}
    config.write_text(json.dumps({"data": data, "model": model, "training": training, "sweep": space}))
    with full_after(writes):
        done = cli("sweep", config, "--out", out, "--workers", 0)
    assert "cannot be written (No space left on device)" in one_line(done)
    done = cli("sweep", config, "--out", out, "--workers", 0, "--resume")
    assert done.exit_code == 0, done.stderr
    trials = json.loads((out / "sweep.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["complete", "complete"], "no setting is to blame for the disk"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_disk_that_is_really_full(tmp_path, pairs, whole):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        size = (whole / "last.safetensors").stat().st_size
        os.posix_fallocate(ballast := os.open(disk / "ballast", os.O_CREAT | os.O_WRONLY), 0, 256 * 1024 - 2 * size)
        os.close(ballast)
        assert "No space left on device" in one_line(cli(*words(pairs, disk / "run")))
        (disk / "ballast").unlink()
        if (disk / "run" / "last.safetensors").exists():
            load_checkpoint(disk / "run" / "last.safetensors")
        assert not list(disk.rglob(".*.tmp"))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_limit_on_the_size_of_files(tmp_path, pairs):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        done = cli(*words(pairs, tmp_path / "run"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "last.safetensors: cannot be written (File too large); raise the limit" in one_line(done)


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("x" * 300, "File name too long"),
        ("/".join(["deep"] * 2000), "File name too long"),
        ("file/run", "Not a directory"),
        ("file", "got a file"),
    ],
)
def test_a_run_directory_that_cannot_be(tmp_path, pairs, out, said):
    (tmp_path / "file").write_text("in the way")
    assert said in one_line(cli(*words(pairs, tmp_path / out)))


@pytest.mark.parametrize("write", [write_atomically, append])
def test_what_cannot_be_written_names_the_file(tmp_path, write):
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / "file" / "below"
    with pytest.raises(WriteError, match="cannot be written") as caught:
        write(path, b"" if write is write_atomically else "")
    assert caught.value.path == path
    longest = tmp_path / ("n" * 255)
    write(longest, b"x" if write is write_atomically else "x")
    assert longest.read_text() == "x", "a name may be as long as names may be"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_standard_output_on_a_full_disk(whole, pairs, stream):
    with open("/dev/full", "w") as full:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        command = [sys.executable, "-m", "thalweg", "evaluate", str(whole), str(pairs), "--name", "x"]
        done = subprocess.run(command, text=True, check=False, **streams)
    assert done.returncode == 2
    assert stream == "stderr" or "error: standard output or error: No space left on device" in done.stderr
    assert "Traceback" not in (done.stderr or "")


# Sweeps: the record.


def record(tmp_path: Path) -> tuple[Path, Callable[[], Any]]:
    from thalweg.sweeps.settings import SweepConfig
    from thalweg.sweeps.store import Store

    config = SweepConfig(space={"x": [1, 2, 3]}, method="grid")
    store = Store(tmp_path, config, higher=True)
    for _ in range(2):
        trial = store.ask()
        assert trial is not None
        store.finish_run(trial, 0, {"value": 0.5})
    return tmp_path / "journal.jsonl", lambda: Store(tmp_path, config, higher=True)


@pytest.mark.parametrize("tail", [b'{"op_co', b"\0" * 300, b"\0" * 300 + b"\n", b"{\n", b"[" * 3000 + b"\n", b"\xff\n"])
def test_a_torn_last_line_of_a_sweeps_record_is_cut(tmp_path, tail):
    journal, again = record(tmp_path)
    good = journal.read_bytes()
    journal.write_bytes(good + tail)
    assert [trial.state for trial in again().trials] == ["complete", "complete"]
    after = journal.read_bytes()
    assert after.startswith(good)
    assert all(isinstance(json.loads(line), dict) for line in after.splitlines())


@pytest.mark.parametrize("line", [b"\0" * 40, b'{"op_code": 4, "wor', b"", b"3", b"[" * 3000, b"\xff\xfe"])
@pytest.mark.parametrize("place", [0, 3])
def test_a_damaged_line_of_a_sweeps_record_is_named(tmp_path, line, place):
    journal, again = record(tmp_path)
    lines = journal.read_bytes().splitlines()
    lines[place] = line
    damaged = b"\n".join(lines) + b"\n"
    journal.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=rf"journal.jsonl:{place + 1}: expected a record .* choose another --out"):
        again()
    assert journal.read_bytes() == damaged, "it is left as it is"


@pytest.mark.parametrize("line", ["{}", '{"op_code": 99}', '{"op_code": 4}', '{"op_code": "x"}'])
def test_a_foreign_line_of_a_sweeps_record_is_one_line(tmp_path, line):
    journal, again = record(tmp_path)
    lines = journal.read_text().splitlines()
    lines[3] = line
    journal.write_text("\n".join(lines) + "\n")
    told = refusal(again)
    assert not told or told.startswith(str(journal))


# Runs with pieces missing.


def test_a_run_without_its_checkpoint_is_not_begun_again(run, pairs):
    before = (run / "model.safetensors").read_bytes()
    (run / "last.safetensors").unlink()
    message = one_line(cli("train", "--resume", "--out", run))
    assert "expected last.safetensors" in message
    assert "restore it from a copy, use the model as it is, or train anew with another --out" in message
    assert "holds a run already" in one_line(cli(*words(pairs, run)))
    assert (run / "model.safetensors").read_bytes() == before


def test_a_run_without_its_best_model_does_not_go_on(run):
    (run / "model.safetensors").unlink()
    assert "expected the best model so far, of epoch" in one_line(cli("train", "--resume", "--out", run, "epochs=3"))
    (run / "model.safetensors").write_bytes(b"\0" * 1000)
    assert "expected a whole safetensors file" in one_line(cli("train", "--resume", "--out", run, "epochs=3"))


def test_a_model_is_never_there_without_its_checkpoint(tmp_path, pairs):
    seen = []
    config = build_config(
        {"data": {"train": str(pairs), "dev": str(pairs)}, "model": {"hidden": 8}, "training": {"epochs": 2}}
    )

    def look(event: dict[str, Any]) -> None:
        seen.append(
            ((tmp_path / "run" / "model.safetensors").exists(), (tmp_path / "run" / "last.safetensors").exists())
        )

    train(config, tmp_path / "run", listener=look)
    assert (True, True) in seen
    assert (True, False) not in seen


@pytest.mark.parametrize("log", [b"3\n", b"{}\n[]\nnull\n", b'{"event": "epoch"}\n', b"\xff\n", b"[" * 5000, b""])
def test_a_damaged_log_does_not_keep_a_run_from_going_on(run, log):
    (run / "log.jsonl").write_bytes(log)
    config = build_config(copy.deepcopy(load_checkpoint(run / "last.safetensors").meta["config"]))
    assert train(config, run, resume=True).reason == "epochs"


# Checkpoints.


def mutants(whole: Path, name: str, rng: random.Random, count: int) -> Iterator[tuple[str, Checkpoint]]:
    """Checkpoints that are well written and senseless: one value of the metadata or one tensor is another."""
    good = load_checkpoint(whole / name)
    places = [place for place in _places(good.meta) if place]
    for _ in range(count):
        meta, tensors = copy.deepcopy(good.meta), dict(good.tensors)
        if rng.random() < 0.7:
            place, value = rng.choice(places), rng.choice(HUGE)
            home: Any = meta
            for key in place[:-1]:
                home = home[key]
            if rng.random() < 0.2:
                home.pop(place[-1])
            else:
                home[place[-1]] = value
            what = f"{place} = {value!r:.40}"
        else:
            key = rng.choice(sorted(tensors))
            tensor = tensors[key]
            kinds: list[Callable[[], torch.Tensor | None]] = [
                lambda tensor=tensor: torch.cat([tensor.flatten()] * 2),
                lambda tensor=tensor: torch.zeros(0),
                lambda tensor=tensor: tensor.to(torch.int64),
                lambda tensor=tensor: torch.full_like(tensor, 255 if tensor.dtype == torch.uint8 else float("nan")),
                lambda tensor=tensor: tensor.unsqueeze(0),
                lambda: torch.zeros(0, 2**40),
                lambda: None,
            ]
            changed = rng.choice(kinds)()
            tensors.pop(key)
            if changed is not None:
                tensors[rng.choice([key, f"{key}x"])] = changed
            what = f"{key} -> {None if changed is None else tuple(changed.shape)}"
        yield what, Checkpoint(tensors, meta)


def _places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield before
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, each in items:
        yield from _places(each, (*before, key))


@contextmanager
def little_memory(more: int = 2**31) -> Iterator[None]:
    """Inside, no more than so many bytes can be allocated: an absurd size fails rather than fills the machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def check_senseless_models(whole: Path, folder: Path, seed: int, count: int) -> None:
    """A model loads and answers, or is refused in one line."""
    path = folder / "model.safetensors"
    with little_memory():
        for what, checkpoint in mutants(whole, "model.safetensors", random.Random(seed), count):
            save_checkpoint(path, checkpoint)
            refusal(lambda: list(load(path, device="cpu").predict(["ab"], k=2)), what)


def check_senseless_runs(whole: Path, folder: Path, seed: int, count: int) -> None:
    """A run goes on, or is refused in one line."""
    for number, (what, checkpoint) in enumerate(mutants(whole, "last.safetensors", random.Random(seed), count)):
        run = Path(shutil.copytree(whole, folder / str(number)))
        save_checkpoint(run / "last.safetensors", checkpoint)
        config = build_config(load_checkpoint(whole / "last.safetensors").meta["config"])
        with little_memory():
            refusal(lambda config=config, run=run: train(config, run, resume=True), what)


def test_senseless_models_are_refused(tmp_path, whole):
    check_senseless_models(whole, tmp_path, 0, 40)


def test_senseless_runs_are_refused(tmp_path, whole):
    check_senseless_runs(whole, tmp_path, 0, 12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_senseless_checkpoints_are_refused(tmp_path, whole, seed):
    check_senseless_models(whole, tmp_path, seed, 500)
    check_senseless_runs(whole, tmp_path, seed, 200)


def check_flips(whole: Path, folder: Path, seed: int, count: int) -> None:
    """A file with some bytes changed, cut or added is refused, or is the same file to the last number."""
    data, rng = (whole / "model.safetensors").read_bytes(), random.Random(seed)
    good = load_checkpoint(whole / "model.safetensors")
    path = folder / "flipped.safetensors"
    header = int.from_bytes(data[:8], "little")
    for _ in range(count):
        changed = bytearray(data)
        end = rng.choice([8, 8 + header, len(data)])
        match rng.randrange(4):
            case 0:
                del changed[rng.randrange(end) :]
            case 1:
                changed[rng.randrange(end) : rng.randrange(end)] = rng.randbytes(rng.randrange(9))
            case _:
                for _ in range(rng.choice([1, 1, 2, 8])):
                    changed[rng.randrange(end)] = rng.randrange(256)
        path.write_bytes(changed)
        found: list[Checkpoint] = []
        told = refusal(lambda found=found: found.append(load_checkpoint(path)))
        if told:
            assert told.startswith(f"{path}: ")
            continue
        assert found[0].meta == good.meta
        assert found[0].tensors.keys() == good.tensors.keys()
        assert all(torch.equal(found[0].tensors[key], good.tensors[key]) for key in good.tensors)


def test_a_lost_checksum_is_noticed(tmp_path, whole):
    data, path = (whole / "model.safetensors").read_bytes(), tmp_path / "changed.safetensors"
    assert data.count(b'"checksum"') == 1
    path.write_bytes(data.replace(b'"checksum"', b'"checksun"')[:-1] + bytes([data[-1] ^ 1]))
    assert "checksum" in refusal(lambda: load_checkpoint(path))


def test_changed_bytes_of_a_checkpoint_are_noticed(tmp_path, whole):
    check_flips(whole, tmp_path, 0, 300)


@pytest.mark.slow
def test_many_changed_bytes_of_a_checkpoint_are_noticed(tmp_path, whole):
    check_flips(whole, tmp_path, 1, 5000)


def written(path: Path, header: object, data: bytes = b"") -> None:
    """A safetensors file by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


KNOWN = {"kind": "thalweg", "format": "1", "meta": "{}"}
HEADERS: dict[str, Any] = {
    "nested": b"[" * 3000 + b"]" * 3000,
    "nested metadata": {"__metadata__": {**KNOWN, "meta": '{"a": ' + "[" * 3000 + "]" * 3000 + "}"}},
    "nested value": b'{"a": ' * 3000 + b"1" + b"}" * 3000,
    "negative offsets": {"__metadata__": KNOWN, "a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}},
    "backward offsets": {"__metadata__": KNOWN, "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
    "huge shape": {"__metadata__": KNOWN, "a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}},
    "huge size": {"__metadata__": KNOWN, "a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}},
    "empty and huge": {"__metadata__": KNOWN, "a": {"dtype": "F32", "shape": [0, 2**60], "data_offsets": [0, 0]}},
    "unknown type": {"__metadata__": KNOWN, "a": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 4]}},
    "metadata of numbers": {"__metadata__": {"kind": 3}},
    "no metadata": {},
    "a list": [],
    "long version": {"__metadata__": {**KNOWN, "format": "9" * 10_000}},
    "other digits": {"__metadata__": {**KNOWN, "format": "²"}},
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_by_hand(tmp_path, name):
    path = tmp_path / "x.safetensors"
    written(path, HEADERS[name], b"\0" * 4)
    with little_memory(), pytest.raises(CheckpointError, match=r"x\.safetensors: ") as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_a_header_longer_than_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    for size in (2**63, 2**64 - 1, 2**40, 100_000_000):
        path.write_bytes(size.to_bytes(8, "little") + b"{}")
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


@pytest.mark.parametrize("longest", [10**9, 10**30, 0, -1, "x", 1e999])
def test_a_longest_length_that_cannot_be(run, longest):
    path = run / "model.safetensors"
    checkpoint = load_checkpoint(path)
    save_checkpoint(path, Checkpoint(checkpoint.tensors, {**checkpoint.meta, "longest": longest}))
    assert "model.safetensors: expected a transduction model" in one_line(cli("predict", run, "--text", "ab"))


def test_a_model_larger_than_its_file_is_not_built(run):
    path = run / "model.safetensors"
    checkpoint = load_checkpoint(path)
    checkpoint.meta["config"]["model"]["hidden"] = 100_000
    save_checkpoint(path, checkpoint)
    with little_memory(2**28):
        assert "expected a transduction model, got something else" in one_line(cli("predict", run, "--text", "ab"))


def test_a_damaged_memory_is_refused(tmp_path):
    from thalweg.energies import HopfieldMemory

    path, rng = tmp_path / "memory.safetensors", random.Random(0)
    HopfieldMemory(torch.eye(4), names=list("abcd")).save(path)
    data = path.read_bytes()
    for _ in range(100):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        found: list[HopfieldMemory] = []
        if not refusal(lambda found=found: found.append(HopfieldMemory.load(path))):
            assert torch.equal(found[0].patterns, torch.eye(4))
