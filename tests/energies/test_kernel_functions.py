"""Kernels as objects, beside their definitions."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.metrics.pairwise import linear_kernel, polynomial_kernel, rbf_kernel
from torch import nn

from oracles import kernel_machines as oracle
from thalweg.energies import (
    RBF,
    Features,
    Fisher,
    GaussianMixture,
    Kernel,
    KernelSVC,
    Linear,
    Normalised,
    Polynomial,
    Prepared,
    ScoreSpace,
    Spectrum,
    Subsequence,
    check_gram,
    gram,
    kernel_named,
)
from thalweg.errors import ConfigError, NotFittedError, ShapeError

RNG = np.random.default_rng(0)
X, Z = RNG.normal(size=(9, 3)), RNG.normal(size=(4, 3))
WORDS, OTHERS = ["banana", "bandana", "ananas", "an", "cabana"], ["havana", "nab"]
VECTORS = {
    Linear(): lambda x, z: oracle.polynomial(x, z, 1, 0.0, 1.0),
    Polynomial(3, 0.5, 0.1): lambda x, z: oracle.polynomial(x, z, 3, 0.5, 0.1),
    RBF(0.7): lambda x, z: oracle.rbf(x, z, 0.7),
    Linear() + RBF(0.7): lambda x, z: oracle.polynomial(x, z, 1, 0.0, 1.0) + oracle.rbf(x, z, 0.7),
    Polynomial() * RBF(0.7): lambda x, z: oracle.polynomial(x, z, 2, 1.0, 1.0) * oracle.rbf(x, z, 0.7),
    3.0 * Linear(): lambda x, z: oracle.polynomial(x, z, 1, 0.0, 3.0),
    Normalised(Linear()): lambda x, z: float(x @ z / np.linalg.norm(x) / np.linalg.norm(z)),
}
STRINGS = {
    Spectrum(1): lambda s, t: oracle.spectrum(s, t, 1),
    Spectrum(2): lambda s, t: oracle.spectrum(s, t, 2),
    Subsequence(1, 0.5): lambda s, t: oracle.subsequence(s, t, 1, 0.5),
    Subsequence(2, 0.3): lambda s, t: oracle.subsequence(s, t, 2, 0.3),
    Subsequence(2, 1.0): lambda s, t: oracle.subsequence(s, t, 2, 1.0),
    Normalised(Spectrum(2)): lambda s, t: (
        oracle.spectrum(s, t, 2) / np.sqrt(oracle.spectrum(s, s, 2) * oracle.spectrum(t, t, 2))
    ),
    Spectrum(1) + 0.5 * Spectrum(2): lambda s, t: oracle.spectrum(s, t, 1) + 0.5 * oracle.spectrum(s, t, 2),
}


@pytest.mark.parametrize("kernel", list(VECTORS), ids=repr)
def test_vectors_by_definition(kernel):
    by_hand = VECTORS[kernel]
    assert kernel(X) == pytest.approx(oracle.gram(by_hand, X), rel=1e-9, abs=1e-12)
    assert kernel(X, Z) == pytest.approx(oracle.gram(by_hand, X, Z), rel=1e-9, abs=1e-12)
    assert kernel.diagonal(X) == pytest.approx(np.diag(oracle.gram(by_hand, X)), rel=1e-9)
    assert kernel(X[:1]).shape == (1, 1)
    table = torch.from_numpy(X).float()
    found = kernel(table)
    assert isinstance(found, torch.Tensor)
    assert found.dtype is torch.float32
    assert found.numpy() == pytest.approx(kernel(X), rel=1e-4, abs=1e-4)
    assert kernel(X.astype(np.float32)).dtype == np.float32


def test_vectors_as_scikit_learn_has_them():
    assert Linear()(X, Z) == pytest.approx(linear_kernel(X, Z))
    assert Polynomial(3, 0.5, 0.1)(X, Z) == pytest.approx(polynomial_kernel(X, Z, 3, gamma=0.1, coef0=0.5))
    assert RBF(0.7)(X, Z) == pytest.approx(rbf_kernel(X, Z, 0.7))


@pytest.mark.parametrize("kernel", list(STRINGS), ids=repr)
def test_strings_by_enumeration(kernel):
    by_hand = STRINGS[kernel]
    assert kernel(WORDS) == pytest.approx(oracle.gram(by_hand, WORDS), rel=1e-12)
    assert kernel(WORDS, OTHERS) == pytest.approx(oracle.gram(by_hand, WORDS, OTHERS), rel=1e-12)
    assert kernel.diagonal(WORDS) == pytest.approx(np.diag(oracle.gram(by_hand, WORDS)), rel=1e-12)
    for word in WORDS:  # padding by longer strings changes nothing
        assert kernel([word]) == pytest.approx(oracle.gram(by_hand, [word]), rel=1e-12)


def test_random_sequences_of_numbers_by_enumeration():
    rng = np.random.default_rng(1)
    items = [rng.integers(-1, 3, size=size).tolist() for size in (3, 4, 5, 7, 8, 9)]
    for n in (1, 2, 3):
        assert Spectrum(n)(items) == pytest.approx(oracle.gram(lambda s, t, n=n: oracle.spectrum(s, t, n), items))
        by_hand = oracle.gram(lambda s, t, n=n: oracle.subsequence(s, t, n, 0.6), items)
        assert Subsequence(n, 0.6)(items) == pytest.approx(by_hand, rel=1e-12)
        check_gram(by_hand)


def test_the_oracles_can_fail():
    """A kernel that forgets the gaps, and one that counts pieces once, are told apart from the right ones."""
    assert Subsequence(2, 0.5)(["aab", "ab"]) != pytest.approx(
        oracle.gram(lambda s, t: 0.5**4 * oracle.spectrum(s, t, 2), ["aab", "ab"])
    )
    once = oracle.gram(lambda s, t: len({*s} & {*t}), ["aab", "ab"])
    assert Spectrum(1)(["aab", "ab"]) != pytest.approx(once)


def test_symbols_are_strings_or_numbers():
    characters = Spectrum(2)(["kat", "tak"])
    assert np.array_equal(Spectrum(2)([["k", "a", "t"], ["t", "a", "k"]]), characters)
    assert np.array_equal(Spectrum(2)(np.array(["kat", "tak"])), characters)
    numbers = [[5, -7, 5], [5, 5, -7]]
    assert np.array_equal(Spectrum(2)(numbers), [[2, 1], [1, 2]])
    assert np.array_equal(Spectrum(2)(torch.tensor(numbers)), [[2, 1], [1, 2]])
    assert isinstance(Spectrum(2)(torch.tensor(numbers)), torch.Tensor)
    words = [["the", "old", "man"], ["the", "old", "sea"]]
    assert np.array_equal(Spectrum(2)(words), [[2, 1], [1, 2]])
    assert np.array_equal(Subsequence(2, 1.0)(words), [[3, 1], [1, 3]])


def test_blocks_are_parts_of_the_matrix():
    for kernel in VECTORS:
        whole = kernel(X)
        items = kernel.prepare(X)
        part = kernel.block(items[2:5], items[torch.tensor([7, 0])]).numpy()
        assert part == pytest.approx(whole[2:5][:, [7, 0]])
        for size in (1, 2, 4, 100):
            in_blocks = gram(kernel, X, block=size)
            assert in_blocks == pytest.approx(whole, rel=1e-12)
            assert np.array_equal(in_blocks, in_blocks.T)
            assert gram(kernel, X, Z, block=size) == pytest.approx(kernel(X, Z), rel=1e-12)
    for kernel in STRINGS:
        assert gram(kernel, WORDS, block=2) == pytest.approx(kernel(WORDS), rel=1e-12)
        assert gram(kernel, WORDS, OTHERS, block=2) == pytest.approx(kernel(WORDS, OTHERS), rel=1e-12)


def test_blocks_take_no_memory_beside_the_answer():
    """The largest tensor that is made beside the answer is a block."""
    sizes = []

    @dataclass(frozen=True)
    class Watched(Kernel):
        inner: Kernel = Linear()  # noqa: RUF009
        positive = True
        vectors = True

        def prepare(self, X, *, device=None):
            return self.inner.prepare(X, device=device)

        def block(self, rows, columns):
            sizes.append((len(rows), len(columns)))
            return self.inner.block(rows, columns)

    gram(Watched(), np.ones((50, 2)), block=16)
    assert max(map(max, sizes)) == 16
    assert len(sizes) == 1 + 10  # a look at the type, then the upper triangle of four columns of blocks


def test_kernels_are_differentiable_in_vectors():
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    z = torch.randn(2, 2, dtype=torch.float64)
    for kernel in VECTORS:
        assert torch.autograd.gradcheck(lambda a, kernel=kernel: kernel(a, z), (x,))


def test_kernels_are_values():
    assert RBF(0.5) == RBF(gamma=0.5) != RBF(0.6)
    assert Linear() + RBF(1.0) == Linear() + RBF(1.0)
    assert len({Linear(), Linear(), Polynomial()}) == 2
    assert repr(2.0 * (Linear() + RBF(1.0))) == "2.0 * (Linear() + RBF(gamma=1.0))"
    assert repr(Normalised(Subsequence(2, 0.5))) == "Normalised(kernel=Subsequence(n=2, decay=0.5))"
    for kernel in [*VECTORS, *STRINGS]:
        assert pickle.loads(pickle.dumps(kernel)) == kernel
        assert copy.deepcopy(kernel) is kernel
        assert clone(KernelSVC(kernel)).kernel == kernel
    with pytest.raises(AttributeError):
        RBF(0.5).gamma = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Linear() + 1.0  # type: ignore[operator]
    assert kernel_named("rbf") == RBF()


def test_scale_is_settled_by_the_training_set():
    gamma = 1 / (3 * X.var())
    assert RBF().settled(X).gamma == pytest.approx(gamma)
    nested = Normalised(2.0 * (Linear() + RBF()))
    assert nested.waits
    assert not nested.settled(X).waits
    assert nested.settled(X)(X, Z) == pytest.approx(Normalised(2.0 * (Linear() + RBF(gamma)))(X, Z))
    assert RBF()(X) == pytest.approx(RBF(gamma)(X))
    assert RBF().settled(np.ones((3, 2))) == RBF(1.0)  # no variance
    with pytest.raises(ConfigError, match="depends on the training set"):
        RBF()(X, Z)


class Encoder(nn.Module):
    """A network whose dropout must not be seen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5))

    def forward(self, x):
        assert not torch.is_grad_enabled()
        return self.layers(torch.as_tensor(x, dtype=torch.float32))


def test_features_of_an_encoder():
    torch.manual_seed(0)
    network = Encoder()
    kernel = Features(network, RBF(), batch=4)
    found = kernel(X)
    with torch.no_grad():
        by_hand = network.layers[0](torch.from_numpy(X).float()).numpy().astype(np.float64)
    gamma = 1 / (5 * by_hand.var())
    assert found == pytest.approx(oracle.gram(lambda x, z: oracle.rbf(x, z, gamma), by_hand), rel=1e-4)
    assert isinstance(found, np.ndarray)
    assert network.training
    assert isinstance(kernel(torch.from_numpy(X)), torch.Tensor)
    assert Features(lambda words: [[len(word)] for word in words])(["a", "bcd"]).tolist() == [[1, 3], [3, 9]]


def test_fisher_kernel_of_a_mixture():
    model = GaussianMixture(means=[[-1.0], [1.0]], covariances=[[[1.0]], [[0.5]]])
    rng = np.random.default_rng(0)
    sequences = [rng.normal(size=(length, 1)) for length in (3, 5, 2, 8, 4)]
    space = ScoreSpace(model, order=2, whiten="diagonal").fit(sequences)
    scores = space.transform(sequences)
    assert Fisher(space)(sequences) == pytest.approx(scores @ scores.T, rel=1e-5)
    assert Fisher(space)(sequences[:2], sequences[2:]) == pytest.approx(scores[:2] @ scores[2:].T, rel=1e-5)
    waiting = Fisher(ScoreSpace(model, order=2, whiten="diagonal"))
    assert waiting.waits
    assert waiting(sequences) == pytest.approx(scores @ scores.T, rel=1e-5)
    assert waiting.settled(sequences)(sequences[:1], sequences) == pytest.approx(scores[:1] @ scores.T, rel=1e-5)
    assert waiting.waits  # it is another one that was settled
    with pytest.raises(NotFittedError):
        waiting(sequences, sequences)


def test_normalised_of_nothing_is_nothing():
    assert Normalised(Linear())([[0.0, 0.0], [0.0, 2.0]]).tolist() == [[0, 0], [0, 1]]
    assert Normalised(Linear()).diagonal([[0.0, 0.0], [0.0, 2.0]]).tolist() == [0, 1]


def test_the_default_diagonal_is_that_of_the_matrix():
    @dataclass(frozen=True)
    class Plain(Kernel):
        vectors = True

        def prepare(self, X, *, device=None):
            return Linear().prepare(X, device=device)

        def block(self, rows, columns):
            return Linear().block(rows, columns)

    many = np.random.default_rng(0).normal(size=(37, 2))
    assert Plain().diagonal(many) == pytest.approx(np.diag(many @ many.T))
    assert (Plain() + Linear()).diagonal(many) == pytest.approx(2 * np.diag(many @ many.T))
    assert not (Plain() + Linear()).positive
    assert (RBF(1.0) * Linear()).positive


def test_check_gram():
    for kernel in VECTORS:
        assert check_gram(kernel(X)) > -1e-9
        assert check_gram(kernel(torch.from_numpy(X).float())) > -1e-3
    lopsided = np.eye(3)
    lopsided[0, 2] = 0.5
    for matrix, message in [
        ([[1.0, 2.0], [2.0, 1.0]], "positive semi-definite, got a smallest eigenvalue of -1 "),
        (lopsided, r"symmetric, got 0.5 at \(0, 2\) and 0 at \(2, 0\)"),
        (np.ones((2, 3)), r"\(N, N\), got \(2, 3\)"),
        (np.ones(3), r"\(N, N\), got \(3,\)"),
        ([[1.0, np.nan], [np.nan, 1.0]], r"finite, got nan at \(0, 1\)"),
    ]:
        with pytest.raises(ShapeError, match=message) as caught:
            check_gram(matrix)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Polynomial(degree=0), "Polynomial.degree must be at least 1, got 0"),
        (lambda: Polynomial(degree=2.5), "Polynomial.degree must be a whole number"),
        (lambda: Polynomial(offset=-1.0), "Polynomial.offset must be 0 or more"),
        (lambda: RBF(gamma=0.0), "RBF.gamma must be above 0"),
        (lambda: RBF(gamma=float("nan")), "RBF.gamma must be above 0"),
        (lambda: RBF(gamma="auto"), "RBF.gamma must be a number above 0 or `scale`, got `auto`"),
        (lambda: -1.0 * Linear(), "Scaled.factor must be above 0"),
        (lambda: Spectrum(0), "Spectrum.n must be at least 1"),
        (lambda: Subsequence(2, 1.5), "Subsequence.decay must be at most 1"),
        (lambda: Features(3), "Features.function must be a function or a module, got int"),
        (lambda: Features(len, Spectrum(2)), "Features.kernel must be a kernel of vectors"),
        (lambda: Fisher("space"), "Fisher needs a ScoreSpace, got str"),
        (lambda: kernel_named("sigmoid"), "`kernel` must be linear, poly, rbf or a Kernel"),
        (lambda: gram(Linear(), X, block=0), "`block` must be a whole number above 0"),
    ],
)
def test_wrong_settings(make, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: Linear()([[1.0, np.nan]]), "contains NaN at row 0, column 1"),
        (lambda: Linear()([1.0, 2.0]), r"must be \(B, D\), got \(2,\)"),
        (lambda: Linear()(X, Z[:, :2]), "vectors of 3 numbers and vectors of 2 numbers"),
        (lambda: Linear()(["text"]), "must hold numbers|must be"),
        (lambda: Spectrum(3)(["abc", "ab"]), "sequence 1 has 2 symbols, fewer than the n = 3 of the kernel; lower n"),
        (lambda: Subsequence(2)(["abc", "x"]), "sequence 1 has 1 symbol, fewer than"),
        (lambda: Spectrum(2)("abc"), "must be a list of strings or of sequences of symbols, got str"),
        (lambda: Spectrum(2)([]), r"0 sample\(s\)"),
        (lambda: Spectrum(2)(["abc", 3.5]), "sequence 1 must be a string or a sequence of symbols, got float: 3.5"),
        (lambda: Spectrum(2)(["abc", None]), "got NoneType"),
        (lambda: Spectrum(2)([[1, 2], [1, 0.5]]), "sequence 1 must have strings or whole numbers .* got float: 0.5"),
        (lambda: Spectrum(2)([["a", 2]]), "one or the other, got str"),
        (lambda: Spectrum(2)(["abc", [1, 2]]), "characters or words in sequence 0 and whole numbers in sequence 1"),
        (lambda: Spectrum(2)(["abc"], [[1, 2]]), "sequences of characters or words and sequences of whole numbers"),
        (
            lambda: Features(lambda x: np.ones(len(x)))([1, 2]),
            r"must give \(N, F\) numbers for N = 2 items, got \(2,\)",
        ),
        (lambda: Features(lambda x: [[np.nan]])([1]), "contains NaN"),
    ],
)
def test_wrong_items(ask, message):
    with pytest.raises(ShapeError, match=message) as caught:
        ask()
    assert "\n" not in str(caught.value)


def test_prepared_moves_and_changes_type():
    items = (Linear() + RBF(1.0)).prepare(torch.from_numpy(X).float())
    wide = items.to("cpu", torch.float64)
    assert isinstance(wide, Prepared)
    assert wide.inner[1].tensors[1].dtype is torch.float64
    assert Spectrum(2).prepare(WORDS).to(dtype=torch.float64).tensors[0].dtype is torch.int64
    assert len(items) == 9
