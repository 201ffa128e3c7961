"""Compiled kernels of segmentations equal the reference, from the smallest sizes to a hundred thousand positions."""

from __future__ import annotations

import math
import resource
from typing import Any

import pytest
import torch

from thalweg.errors import ShapeError
from thalweg.inference import LinearChain, SemiMarkov

_kernels: Any = pytest.importorskip("thalweg._kernels", reason="the extension is not compiled")

from thalweg.kernels.cpu import segments as cpu  # noqa: E402


def problem(batch, steps, most, size, *, scale=1.0, forbidden=0.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        x = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.masked_fill(torch.rand(x.shape, generator=generator) < forbidden, -math.inf).to(dtype)

    lengths = torch.randint(1, steps + 1, (batch,), generator=generator)
    lengths[0] = steps
    scores = draw(batch, steps, size), draw(most, size), draw(size, size)
    return scores, {"begins": draw(batch, steps, size), "lengths": lengths}


def compared(scores, settings, **tolerance):
    """Values, gradients in all scores and modes of both backends; items without any segmentation are told alike."""
    found = []
    for backend in ("cpu", "reference"):
        inputs = [x.clone().requires_grad_() for x in (*scores, settings["begins"])]
        own = {**settings, "begins": inputs[3], "backend": backend, "validate_args": False}
        p = SemiMarkov(*inputs[:3], **own)
        values = p.log_partition
        feasible = values.detach() > -math.inf
        gradients = torch.autograd.grad(values[feasible].sum(), inputs, materialize_grads=True)
        best = torch.where(feasible, p.score(p.mode.clamp(min=0)), 0.0) if feasible.all() else values
        found.append((values, best, *gradients))
    assert all(x.isfinite().all() for x in found[0][2:])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one.detach(), two.detach(), **tolerance)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 7, 1, 3), (2, 5, 9, 1), (3, 40, 12, 9), (2, 30, 30, 17)])
def test_equal_to_the_reference(level, sizes):
    compared(*problem(*sizes), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [30.0, 300.0, 3000.0])
def test_scores_of_any_range(scale):
    """Weights that leave the range of float64 within a window are found in the log domain."""
    compared(*problem(3, 60, 20, 5, scale=scale), rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize(("forbidden", "scale"), [(0.05, 1.0), (0.3, 1.0), (0.15, 200.0)])
def test_constraints(forbidden, scale):
    for seed in range(4):
        compared(*problem(4, 30, 8, 4, scale=scale, forbidden=forbidden, seed=seed), rtol=1e-9, atol=1e-8)


def test_a_label_that_was_bad_for_long_becomes_the_best():
    (content, durations, moves), settings = problem(1, 160, 10, 3)
    content[:, :80, 1] -= 40.0
    content[:, 80:, 0] -= 40.0
    compared((content, durations, moves), settings, rtol=1e-9, atol=1e-9)


def test_float32_keeps_its_digits_along_any_length():
    scores, settings = problem(1, 3000, 4, 3, dtype=torch.float32)
    scores = (scores[0] - 20.0, *scores[1:])  # log Z near -60,000, of which float32 has two digits behind the point
    wide = SemiMarkov(*(x.double() for x in scores), begins=settings["begins"].double())
    p = SemiMarkov(*scores, begins=settings["begins"])
    torch.testing.assert_close(p.marginals.double(), wide.marginals, rtol=1e-6, atol=1e-6)
    y = p.mode
    torch.testing.assert_close(p.log_prob(y).double(), wide.log_prob(y), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        SemiMarkov(*(x.bfloat16() for x in scores)).log_partition,
        SemiMarkov(*(x.bfloat16().float() for x in scores)).log_partition,
    )


def test_segments_of_one_position_are_a_chain():
    """The other algorithm: what two kernels that share nothing must agree on."""
    (content, durations, moves), settings = problem(3, 12, 1, 4)
    del settings["begins"]
    p = SemiMarkov(content, durations, moves, **settings)
    chain = LinearChain(content + durations[0], moves, **settings)
    torch.testing.assert_close(p.log_partition, chain.log_partition)
    torch.testing.assert_close(p.marginals[:, :, 0], chain.marginals)
    assert torch.equal(p.mode, chain.mode)
    torch.testing.assert_close(p.entropy(), chain.entropy())


def test_ties_go_to_the_shorter_last_segment_and_the_lower_label():
    for backend in ("cpu", "reference"):
        tied = SemiMarkov(torch.zeros(1, 4, 3), torch.zeros(2, 3), torch.zeros(3, 3), backend=backend)
        assert tied.mode.tolist() == [[0, 0, 0, 0]]


def test_equal_calls_give_equal_bits_whatever_the_threads(two_threads):
    scores, settings = problem(9, 50, 7, 5)
    found = []
    for number in (2, 1):
        torch.set_num_threads(number)
        p = SemiMarkov(*scores, **settings)
        found.append((p.log_partition, p.marginals, p.mode))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_shapes_and_lengths_are_looked_at():
    good = torch.zeros(2, 3, 2, 2), torch.zeros(4, 2), torch.zeros(2, 2)
    lengths = torch.tensor([3, 2])
    cpu.viterbi(good, lengths)
    for bad in (
        (good[0][:, :, :1].contiguous(), *good[1:]),
        (good[0], torch.zeros(4, 3), good[2]),
        (good[0], torch.zeros(3, 4, 2), good[2]),
        (*good[:2], torch.zeros(2, 3)),
        (good[0], torch.zeros(0, 2), good[2]),
    ):
        for ask in (cpu.viterbi, lambda *x: cpu.likelihood(*x, gradient=True)):
            with pytest.raises(ShapeError, match="must"):
                ask(bad, lengths)
    for wrong in ([0, 3], [4, 1], [3], [3, 2, 1], [-1, 2]):
        with pytest.raises(ShapeError, match="lengths"):
            cpu.viterbi(good, torch.tensor(wrong))
    with pytest.raises(ShapeError, match="uniforms"):
        cpu.sample(good, lengths, torch.zeros(1, 2, 3, 1))
    numbers = [x.double().numpy() for x in (good[0], good[1][None], good[2][None])]
    given, values = (*numbers, lengths.numpy()), numbers[0][:, 0, 0, 0].copy()
    for gradients in ((numbers[0], None, None), numbers[:2]):  # all or none
        with pytest.raises(TypeError):
            _kernels.segments_likelihood(given, values, tuple(gradients), 1)
    with pytest.raises(ShapeError, match="d_durations"):
        _kernels.segments_likelihood(given, values, (numbers[0], numbers[1], numbers[2]), 1)
    with pytest.raises(TypeError):
        _kernels.segments_viterbi((*(x.astype("f4") for x in numbers), lengths.numpy()), lengths.numpy()[:, None], 1)


@pytest.mark.slow
def test_a_hundred_thousand_positions_take_memory_of_their_number():
    """Forward, gradient, mode and sample; T x K x C alone would be 10 GB, T x K x C x C 200 GB."""
    steps, most, size = 100_000, 600, 20
    content = torch.randn(1, steps, size, generator=torch.Generator().manual_seed(0), requires_grad=True)
    durations = (-torch.arange(most) / 50.0).unsqueeze(1).repeat(1, size).requires_grad_()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    p = SemiMarkov(content, durations, torch.zeros(size, size))
    p.log_partition.sum().backward()
    torch.testing.assert_close(content.grad.sum(-1), torch.ones(1, steps))
    with torch.no_grad():
        best = p.mode
        assert float(p.score(best)) > float(p.score(p.sample()))
        assert float(p.log_partition) > float(p.max_score)
    sizes = torch.tensor([s.past - s.first for s in p.segments(best)[0]])
    assert int(sizes.sum()) == steps
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert more < 1000, f"{more:.0f} MB"
