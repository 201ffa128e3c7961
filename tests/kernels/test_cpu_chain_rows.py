"""Likelihood and gradient of chains with several items side by side, and how such kernels come to be."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from contracts.callers import found_by_threads
from oracles import chain_passes as oracle
from thalweg.errors import ShapeError
from thalweg.kernels import chain as ops
from thalweg.kernels.potentials import Chain

pytest.importorskip("numba", reason="the CPU kernels need numba")

from thalweg.kernels.cpu import chain as cpu
from thalweg.kernels.cpu import chain_arrays, chain_rows, threads
from thalweg.kernels.cpu.chain_arrays import kernel
from thalweg.kernels.cpu.simd import log_sum_row, top_place

SIZES = [(1, 1, 1), (1, 5, 30), (2, 9, 3), (3, 7, 25), (4, 6, 32), (5, 17, 33), (9, 12, 64), (13, 21, 40), (6, 5, 130)]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10}


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call is shared out, however small."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "LEAST_WORK", 1)
    monkeypatch.setattr(threads, "LEAST_SHARE", 1)
    yield
    torch.set_num_threads(before)


def make(
    size: tuple[int, int, int], dtype: torch.dtype = torch.float64, *, ragged: bool = True, seed: int = 0
) -> Chain:
    generator = torch.Generator().manual_seed(seed)
    B, T, C = size

    def scores(*dims: int) -> Tensor:
        return torch.randn(dims, generator=generator, dtype=torch.float64).to(dtype)

    lengths = torch.randint(1, T + 1, (B,), generator=generator) if ragged else torch.full((B,), T)
    chain = Chain(scores(B, T, C), scores(C, C), scores(C), scores(C), lengths)
    chain.emissions[torch.arange(T) >= lengths.unsqueeze(1)] = math.nan
    return chain


def labels_of(chain: Chain, seed: int = 1) -> Tensor:
    B, T, C = chain.emissions.shape
    return torch.randint(C, (B, T), generator=torch.Generator().manual_seed(seed))


def check(chain: Chain, gold: Tensor | None) -> None:
    found = chain_rows.at_once(chain, gold, False)
    assert found is not None
    values, gradients, finite = found
    assert finite
    given = [x.double().nan_to_num().numpy() for x in ops.inputs_of(chain)]
    want = oracle.loss(*given[:4], lengths=chain.lengths.tolist(), gold=None if gold is None else gold.tolist())
    tolerance = TOLERANCE[chain.emissions.dtype]
    for one, two in zip((values, *gradients), want, strict=True):
        np.testing.assert_allclose(one.double().numpy(), two, rtol=tolerance, atol=4 * tolerance)
    whole = chain_rows.at_once(chain, gold, True)
    assert whole is not None
    assert float(whole[0]) == pytest.approx(want[0].sum(), rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ragged", [True, False], ids=["ragged", "even"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients(size: tuple[int, int, int], ragged: bool, dtype: torch.dtype) -> None:
    chain = make(size, dtype, ragged=ragged)
    check(chain, None)
    check(chain, labels_of(chain))


@pytest.mark.parametrize("batch", range(1, 14))
def test_groups_that_do_not_fill_up(batch: int, two_threads: None) -> None:
    chain = make((batch, 11, 27), seed=batch)
    check(chain, labels_of(chain))


def test_the_oracle_can_fail() -> None:
    chain = make((5, 6, 26))
    wrong = chain._replace(transitions=chain.transitions.T.contiguous())  # type: ignore[union-attr]
    found = chain_rows.at_once(wrong, None, False)
    assert found is not None
    want = oracle.loss(*(x.nan_to_num().numpy() for x in ops.inputs_of(chain)), lengths=chain.lengths.tolist())
    assert np.abs(found[0].numpy() - want[0]).max() > 1e-3
    assert np.abs(found[1][1].numpy() - want[2]).max() > 1e-3


@pytest.mark.parametrize("items", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_every_item_is_in_one_group_and_every_group_in_one_part(items: int, parts: int) -> None:
    for batch in (1, 2, 7, 8, 30):
        for lengths in ([5] * batch, torch.randint(1, 40, (batch,)).tolist(), [100] + [1] * (batch - 1)):
            order, ranges = chain_rows._grouped(lengths, items, parts)
            assert sorted(order.tolist()) == list(range(batch))
            ordered = [lengths[place] for place in order.tolist()]
            assert ordered == sorted(lengths, reverse=True)
            groups = [group for low, high in ranges for group in range(low, high)]
            assert groups == list(range(-(-batch // items)))
            assert len(ranges) <= parts


def test_float32_keeps_its_digits_along_a_long_chain() -> None:
    for batch in (1, 4):
        chain = make((batch, 4096, 30), torch.float32, ragged=False)
        exact = ops.with_inputs(chain, [x.double() for x in ops.inputs_of(chain)])
        got, want = chain_rows.at_once(chain, None, False), chain_rows.at_once(exact, None, False)
        assert got is not None
        assert want is not None
        assert float(((got[0].double() - want[0]) / want[0]).abs().max()) < 1e-6
        torch.testing.assert_close(got[1][0].double(), want[1][0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("weights", ["alike", "different"])
def test_numerical_gradients_and_equal_ones_from_a_second_pass(weights: str) -> None:
    chain = make((3, 4, 26), ragged=False)
    inputs = [x.requires_grad_() for x in ops.inputs_of(chain)]
    gold, factor = labels_of(chain), torch.tensor([0.3, 0.3 if weights == "alike" else -1.2, 0.3]).double()

    def total(*given: Tensor) -> Tensor:
        return (ops.log_likelihood(ops.with_inputs(chain, list(given)), gold, backend="cpu") * factor).sum()

    assert torch.autograd.gradcheck(total, inputs, fast_mode=True)


def test_what_is_out_of_range_goes_another_way() -> None:
    chain = make((5, 6, 26))
    gold = labels_of(chain)
    gold[2, 0] = 26
    assert chain_rows.at_once(chain, gold, False) is None
    with pytest.raises(ShapeError, match=r"0\.\.25, got 26 at position 0 of batch item 2"):
        ops.log_likelihood(ops.with_inputs(chain, [x.requires_grad_() for x in ops.inputs_of(chain)]), gold)
    wide = make((5, 6, 26))
    for place, value in (((3, 4), -math.inf), ((3, 4), math.nan), ((0, 0), 1e4)):
        moves = wide.transitions.clone()  # type: ignore[union-attr]
        moves[place] = value
        assert chain_rows.at_once(wide._replace(transitions=moves), None, False) is None
    lost = make((5, 6, 26))
    lost.emissions[1, 0] = -math.inf
    assert chain_rows.at_once(lost, None, False) is None
    leaves = ops.with_inputs(lost, [x.requires_grad_() for x in ops.inputs_of(lost)])
    values = ops.log_partition(leaves, backend="cpu")
    assert torch.isneginf(values).tolist() == [False, True, False, False, False]
    check(make((5, 6, 26)), None)  # what failed leaves nothing behind


def test_what_a_call_leaves_behind_changes_no_other(two_threads: None) -> None:
    chains = [make((9, 20, 30), seed=seed) for seed in range(3)]
    alone = [chain_rows.at_once(chain, None, False) for chain in chains]
    again = [chain_rows.at_once(chain, None, False) for chain in (*chains, *chains)]
    for one, two in zip((*alone, *alone), again, strict=True):
        assert one is not None
        assert two is not None
        assert torch.equal(one[0], two[0])
        assert all(torch.equal(x, y) for x, y in zip(one[1], two[1], strict=True))


def _loss(seed: int) -> float:
    found = cpu.at_once(make((9, 12, 30), torch.float32, seed=seed), None, True)
    assert found is not None
    return float(found[0]) + float(found[2][0].square().sum())


class _Losses(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return _loss(index)


def test_many_callers_at_once(two_threads: None) -> None:
    expected = [_loss(seed) for seed in range(4)]
    assert found_by_threads(_loss) == {seed: [expected[seed]] * 10 for seed in range(4)}


def _in_child(queue: Any) -> None:
    queue.put(_loss(0))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system with fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_data_loader_and_forks(two_threads: None) -> None:
    expected = [_loss(index) for index in range(4)]  # the parent's threads are running when it forks
    loaded = [float(x) for x in DataLoader(_Losses(), batch_size=None, num_workers=2, multiprocessing_context="fork")]
    assert loaded == pytest.approx(expected, rel=1e-6)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == pytest.approx(expected[0], rel=1e-6)
    child.join(60)


_SCRIPT = """
import sys, torch
from thalweg.inference import LinearChain
import thalweg.kernels.cpu.machine_code as machine_code
if sys.argv[1] == "again":
    def _compile(*_): raise AssertionError("it should come from the disk")
    machine_code._compile = _compile
torch.manual_seed(0)
for labels in (9, 30):
    x, moves = torch.randn(16, 5, labels).requires_grad_(), torch.randn(labels, labels)
    chain = LinearChain(x, moves)
    chain.log_prob(torch.zeros(16, 5).long()).sum().backward()
    plain = LinearChain(x.detach(), moves)
    print(float(x.grad.square().sum()), plain.mode.sum().item(), plain.marginals.square().sum().item())
forbidden = moves.masked_fill(torch.eye(30) > 0, -torch.inf)
print(LinearChain(x.detach(), forbidden).log_partition.sum().item(), plain.top_k(2)[0].sum().item())
print("numba" in sys.modules)
"""


def test_another_process_finds_the_code_and_none_needs_numba(tmp_path: Path) -> None:
    def ran(which: str) -> list[str]:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", _SCRIPT, which]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first = ran("first")
    assert first[-1] == "False"
    assert list(tmp_path.glob("thalweg/*.o"))
    assert ran("again") == first


@kernel
def _features(x, counts, truths, matrix, factor, shift, out):
    rows, last = x[1:3], x[-1]
    out[0] = rows[1, 0] + last[-1]
    total = 0
    for n in range(len(counts) - 1, -1, -1):
        if truths[n]:
            total += counts[n]
    out[1] = total
    one, two = x[0], x[1]
    one, two = two, one
    out[2] = one[0] - two[0]
    out[3] = x.shape[1] + len(x)
    out[4] = x.dtype.type(1) / 3
    out[5] += 2
    out[6] = math.isnan(out[7])
    m, s = log_sum_row(x[0], x[1], 2, matrix[0])
    out[8] = m + math.log(s)
    out[9] = top_place(x[2], x[0], x.shape[1]) + factor * shift
    return total


def test_what_kernels_over_arrays_understand() -> None:
    x = torch.arange(8.0, dtype=torch.float64).view(4, 2).square()
    wide = torch.zeros(4, 8, dtype=torch.float64)
    wide[:, :2] = x
    counts, truths = np.array([5, -7, 11], np.int32), np.array([True, False, True])
    out = np.full(10, np.nan)
    out[5] = 1
    total = _features(wide, counts, truths, np.zeros((1, 8)), 2, np.float32(0.25), out)
    assert total == 16
    want = [16 + 0, 16, 4 - 0, 8 + 4, 1 / 3, 3, 1, math.nan, math.log(math.exp(0 + 4) + math.exp(1 + 9)), 1.5]
    np.testing.assert_allclose(out, want)
    with pytest.raises(ValueError, match="C-contiguous"):
        _features(wide.T, counts, truths, np.zeros((1, 8)), 2, np.float32(0.25), out)


@kernel
def _mark(out, part, low, high):
    for n in range(low, high):
        out[n] += part + 1


def test_a_kernel_is_called_once_for_every_range(two_threads: None) -> None:
    for _ in range(20):
        out = torch.zeros(7)
        _mark.share([(0, 3), (3, 4), (4, 7)], out)
        assert out.tolist() == [1, 1, 1, 2, 3, 3, 3]


def test_no_more_threads_than_torch_has(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(chain_arrays, "enter", lambda entry, table, count: (asked.append(count), entry.call(table)))
    for ranges in ([(0, 7)], [(0, 3), (3, 7)], [(n, n + 1) for n in range(7)]):
        _mark.share(ranges, torch.zeros(7))
    assert asked == [1, 2, 2]


@kernel
def _unknown(x):
    x[0] = {}


def test_what_a_kernel_does_not_understand_is_told() -> None:
    with pytest.raises(NotImplementedError, match="cannot say"):
        _unknown(np.zeros(1))
