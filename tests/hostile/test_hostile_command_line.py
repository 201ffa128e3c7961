"""Whatever is written on the command line, into a config or into a file: one clear line and exit status 2."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hostile import command_line_cases
from hostile.forks import Nursery
from thalweg.data import Alphabet, Symbols, read_pairs
from thalweg.data.images.reading import read_images
from thalweg.energies.convnet.config import ConvNetConfig
from thalweg.energies.seq2seq.model import Seq2SeqConfig
from thalweg.energies.transformer.config import TransformerConfig
from thalweg.errors import ConfigError, DataError, OutOfMemoryError, ThalwegError
from thalweg.learning.settings import ClassTraining, TrainingConfig
from thalweg.limits import check_memory, free_memory, within_memory, without_memory
from thalweg.sweeps.settings import SweepConfig
from thalweg.tasks.classify.config import AugmentConfig, ImageDataConfig
from thalweg.tasks.names import check_name, file_name
from thalweg.tasks.registry import build_config
from thalweg.tasks.transduce.codec import Codec
from thalweg.tasks.transduce.models import build_model
from thalweg.tasks.transduce.search_settings import SearchConfig
from thalweg.tasks.yaml_text import parse_word, parse_yaml


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(command_line_cases.HOME, str(tmp_path_factory.mktemp("hostile")))
        nursery = Nursery("hostile.command_line_cases")
    yield nursery
    nursery.close()


@pytest.mark.parametrize("name", command_line_cases.CASES)
def test_one_line_and_status_2(name: str, nursery: Nursery) -> None:
    outcome = nursery.run(name, seconds=30)
    assert outcome.kind == "ok", outcome.text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(400))
def test_at_random(seed: int, nursery: Nursery) -> None:
    outcome = nursery.run(f"at_random({seed})", seconds=120)
    assert outcome.kind == "ok", outcome.text


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    code = "from thalweg.cli.main import run; run()"
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [sys.executable, "-c", code, "data", "--help"], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert ran.stderr == ""


HUGE = 10**30


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((Seq2SeqConfig, {name: HUGE}) for name in ("hidden", "embedding", "encoder_layers", "decoder_layers")),
        *((TransformerConfig, {name: HUGE}) for name in ("width", "heads", "feedforward", "max_positions")),
        *((TransformerConfig, {name: 100_000}) for name in ("encoder_layers", "decoder_layers")),
        *((ConvNetConfig, {name: HUGE}) for name in ("stem", "convolutions", "units", "growth", "squeeze", "pool")),
        *((ConvNetConfig, {name: (HUGE,)}) for name in ("channels", "hidden", "kernel")),
        (ConvNetConfig, {"expansion": math.inf}),
        *((TrainingConfig, {name: HUGE}) for name in ("epochs", "batch_size", "batch_tokens", "seed", "threads")),
        *((ClassTraining, {name: HUGE}) for name in ("warmup", "patience", "checkpoint_every")),
        *((SearchConfig, {name: HUGE}) for name in ("width", "samples", "max_length", "min_length", "sampling_seed")),
        *((SearchConfig, {name: HUGE}) for name in ("max_expansions", "top_k", "length_penalty", "temperature")),
        *((ImageDataConfig, {name: HUGE}) for name in ("size", "workers", "split_seed")),
        *((AugmentConfig, {name: HUGE}) for name in ("crop", "cutout", "scale", "rotate")),
        *((SweepConfig, {"space": {"hidden": [8]}, name: HUGE}) for name in ("trials", "seed", "reduction")),
        (SweepConfig, {"space": {"hidden": [8]}, "seeds": (HUGE,)}),
        (Seq2SeqConfig, {"hidden": "8"}),
        (Seq2SeqConfig, {"hidden": 8.5}),
        (Seq2SeqConfig, {"hidden": True}),
        (Seq2SeqConfig, {"hidden": 10**5000}),
        (TrainingConfig, {"weight_decay": "much"}),
        (TrainingConfig, {"clip": math.nan}),
    ],
)
def test_configs_in_python_refuse_the_same(kind: Callable[..., Any], settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        kind(**settings)
    assert len(str(refused.value)) < 400


def test_a_model_that_does_not_fit_is_refused_before_it_is_built() -> None:
    side = Codec(Symbols(), Alphabet.build(["abc"]))
    with pytest.raises(OutOfMemoryError, match=r"needs [\d,]+\.\d GiB of memory, got .* free; lower model.hidden"):
        build_model(build_config({"model": {"hidden": 1_000_000}}), side, side, trained=True)


def test_counting_a_models_parameters_draws_nothing() -> None:
    import torch
    from torch import nn

    torch.manual_seed(0)
    before = torch.get_rng_state()
    with without_memory():
        built = nn.Sequential(nn.Embedding(3, 4), nn.LSTM(4, 4), nn.Linear(4, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert {p.device.type for p in built.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "expected enough memory, got less"),
        (MemoryError("Unable to allocate 149. GiB for an array"), "enough memory for 149 GiB more, got less"),
        (RuntimeError("can't allocate memory: you tried to allocate 8000000000 bytes."), "for 7.5 GiB more"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."), "for 20.00 GiB more, got less; lower"),
        (RuntimeError("std::bad_alloc"), "expected enough memory, got less"),
    ],
)
def test_lack_of_memory_is_said_as_such(error: Exception, said: str) -> None:
    with pytest.raises(OutOfMemoryError) as refused, within_memory("lower the width"):
        raise error
    assert said in str(refused.value)
    assert str(refused.value).endswith("; lower the width")


def test_other_errors_are_not_taken_for_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="a defect"), within_memory("lower the width"):
        raise RuntimeError("a defect")
    with pytest.raises(ConfigError), within_memory("lower the width"):
        raise ConfigError("out of memory, said otherwise")


def test_memory_that_there_is_is_not_refused() -> None:
    check_memory(1024, "a little", "")
    free = free_memory()
    assert free is None or free > 2**20


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_a_line_may_be_as_long_as_said_and_no_longer(tmp_path: Path, end: str) -> None:
    half = "\N{GRINNING FACE}" * (2**14)  # four bytes each
    path = tmp_path / "x.tsv"
    path.write_bytes(b"\xef\xbb\xbf" + f"{half}\t{half[1:]}{end}".encode())
    assert read_pairs(path).sources() == (half,)
    path.write_text(f"{half}\t{half}{end}", encoding="utf-8", newline="")
    with pytest.raises(DataError, match=r"x\.tsv:1: expected at most 32,768 characters a line"):
        read_pairs(path)


def test_images_too_large_for_memory_are_refused() -> None:
    with pytest.raises(ThalwegError, match=r"lower data\.size"):
        read_images("digits", size=8192)


def test_yaml_aliases_and_merges_stay_allowed() -> None:
    text = "base: &base {hidden: 8, cell: gru}\nmodel: {<<: *base, hidden: 16}\nother: *base\n"
    assert parse_yaml(text, "x")["model"] == {"hidden": 16, "cell": "gru"}
    assert parse_word("{a: [1, 2]}") == {"a": [1, 2]}
    assert parse_word("[1,") == "[1,"


def test_names_that_are_cut_stay_apart() -> None:
    one, two = file_name("é" * 200 + "a"), file_name("é" * 200 + "b")
    assert one != two
    assert max(len(name.encode()) for name in (one, two)) <= 200
    assert check_name("test-2", "--name") == "test-2"
