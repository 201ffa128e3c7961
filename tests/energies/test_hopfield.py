from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from oracles import hopfield as oracle
from thalweg.energies.hopfield.memory import HopfieldMemory
from thalweg.energies.hopfield.post import Identity, LayerNorm, UnitNorm, post_transform
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.cccp import NotMonotoneError
from thalweg.kernels import memory as kernels
from thalweg.layers.hopfield.separation_maps import (
    ChainMarginals,
    ChainSparseMAP,
    Entmax,
    KSubsets,
    NormMax,
    Separation,
    Softmax,
)

N, D, B = 6, 4, 9
# The separation, and how the oracle calls it.
SEPARATIONS: dict[str, tuple[Separation, tuple[str, float]]] = {
    "softmax": (Softmax(), ("softmax", 0.0)),
    "sparsemax": (Entmax(2.0), ("entmax", 2.0)),
    "entmax15": (Entmax(1.5), ("entmax", 1.5)),
    "entmax1.3": (Entmax(1.3), ("entmax", 1.3)),
    "entmax4": (Entmax(4.0), ("entmax", 4.0)),
    "normmax2": (NormMax(2.0), ("normmax", 2.0)),
    "normmax5": (NormMax(5.0), ("normmax", 5.0)),
    "2-subsets": (KSubsets(2), ("k-subsets", 2)),
    "4-subsets": (KSubsets(4), ("k-subsets", 4)),
    "chain": (ChainMarginals(0.75), ("chain", 0.75)),
}
# With SparseMAP, whose own tests have its oracle.
EVERY = {name: separation for name, (separation, _) in SEPARATIONS.items()} | {"chain-sparse": ChainSparseMAP(0.75)}
# A masked pattern of a chain is not chosen but keeps its place, so the chain is not that of the others.
UNORDERED = [name for name in SEPARATIONS if name != "chain"]
POSTS = ["identity", "l2", "layernorm"]


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def within(q: Tensor, post: str) -> Tensor:
    """Starts in the domain of the convex part."""
    return q if post == "identity" else post_transform(post)(q)


# H1: the split of the energy


def test_h1_energy_is_the_formula():
    X, q, b = draw(N, D), draw(B, D, seed=1), 1.7
    memory = HopfieldMemory(X, beta=b)
    lse = torch.logsumexp(b * q @ X.T, 1) / b
    level = math.log(N) / b + X.norm(dim=1).max() ** 2 / 2
    torch.testing.assert_close(memory.energy(q), -lse + q.square().sum(1) / 2 + level)
    torch.testing.assert_close(memory.convex(q), q.square().sum(1) / 2 + level)
    torch.testing.assert_close(memory.concave(q), -lse)
    assert (memory.energy(q) >= 0).all()


def test_h1_hessian_of_the_convex_part_is_the_identity():
    memory = HopfieldMemory(draw(N, D), beta=1.7)
    hessian = torch.autograd.functional.hessian(lambda q: memory.convex(q), draw(D, seed=1))
    torch.testing.assert_close(hessian, torch.eye(D, dtype=torch.float64))


@pytest.mark.parametrize("beta", [0.2, 1.7, 9.0])
def test_h1_hessian_of_minus_the_concave_part_is_positive_semidefinite(beta):
    X, q = draw(N, D), draw(D, seed=1)
    memory = HopfieldMemory(X, beta=beta)
    hessian = torch.autograd.functional.hessian(lambda q: -memory.concave(q), q)
    p = torch.softmax(beta * X @ q, 0)
    jacobian = torch.diag(p) - torch.outer(p, p)
    torch.testing.assert_close(hessian, beta * X.T @ jacobian @ X)
    assert torch.linalg.eigvalsh(hessian).min() >= -1e-12
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(lambda q: -memory.concave(q)))(q), hessian)


def test_h1_softmax_jacobian_is_symmetric_diagonally_dominant_and_psd():
    scores = draw(N)
    jacobian = torch.autograd.functional.jacobian(Softmax().weights, scores)
    p = torch.softmax(scores, 0)
    torch.testing.assert_close(jacobian, torch.diag(p) - torch.outer(p, p))
    torch.testing.assert_close(jacobian, jacobian.T)
    others = jacobian.abs().sum(1) - jacobian.diagonal().abs()
    assert (jacobian.diagonal() >= others - 1e-12).all()
    assert torch.linalg.eigvalsh(jacobian).min() >= -1e-12


@pytest.mark.parametrize("name", EVERY)
def test_gradient_of_the_concave_part_is_minus_the_mixture(name):
    memory = HopfieldMemory(draw(N, D), beta=0.8, separation=EVERY[name])
    q = draw(B, D, seed=1).requires_grad_()
    (slope,) = torch.autograd.grad(memory.concave(q).sum(), q)
    torch.testing.assert_close(slope, -memory.update(q).detach(), atol=1e-9, rtol=0)


# H2: CCCP never raises the energy


@pytest.mark.parametrize("post", POSTS)
@pytest.mark.parametrize("name", EVERY)
def test_h2_energy_never_rises(name, post):
    for seed in range(2):
        for beta in (0.1, 2.0):
            memory = HopfieldMemory(draw(N, D, seed=seed, scale=1.5), beta, EVERY[name], post=post)
            q = within(draw(4, D, seed=seed + 50, scale=2.0), post)
            found = memory.retrieve(q, max_steps=12, tol=1e-9)
            assert found.energies.isfinite().all()
            assert (found.energies.diff() <= 1e-10).all()
            assert (found.energies.diff() < -1e-9).any()  # and it does fall
            torch.testing.assert_close(found.energies[:, 0], memory.energy(q))
            torch.testing.assert_close(found.energies[:, -1], memory.energy(found.state))
            if isinstance(memory.separation, Softmax | Entmax | NormMax):  # onto the simplex
                assert (found.energies >= -1e-9).all()


@pytest.mark.parametrize("post", POSTS)
@pytest.mark.parametrize("name", SEPARATIONS)
def test_retrieval_matches_the_oracle(name, post):
    X, q = draw(N, D), within(draw(5, D, seed=1), post)
    separation, called = SEPARATIONS[name]
    memory = HopfieldMemory(X, 0.9, separation, post=post)
    found = memory.retrieve(q, max_steps=12, tol=1e-4)
    weights = memory.weights(q)
    for row in range(5):
        state, energies, converged = oracle.retrieve(X.numpy(), q[row].numpy(), 0.9, *called, post, 12, 1e-4)
        steps = int(found.steps[row])
        assert steps == len(energies) - 1
        assert bool(found.converged[row]) == converged
        assert found.state[row].tolist() == pytest.approx(state, abs=1e-8)
        assert found.energies[row, : steps + 1].tolist() == pytest.approx(energies, abs=1e-8)
        assert (found.energies[row, steps:] == found.energies[row, steps]).all()
        expected = oracle.weights(0.9 * (X @ q[row]).numpy(), *called)
        assert weights[row].tolist() == pytest.approx(expected, abs=1e-8)


def test_oracle_can_fail():
    X, q = draw(N, D), draw(1, D, seed=1)
    right = oracle.update(X.numpy(), q[0].numpy(), 0.9, "entmax", 2.0, "identity")
    broken = oracle.update(X.numpy(), q[0].numpy(), 1.0, "entmax", 2.0, "identity")  # another temperature
    update = HopfieldMemory(X, 0.9, "sparsemax").update(q)[0].tolist()
    assert update == pytest.approx(right, abs=1e-9)
    assert update != pytest.approx(broken, abs=1e-3)


def test_a_wrong_post_transform_is_noticed():
    class Wrong(Identity):
        def forward(self, z: Tensor) -> Tensor:
            return 3.0 * z

    memory = HopfieldMemory(draw(N, D), 5.0, post=Wrong())
    with pytest.raises(NotMonotoneError, match="row"):
        memory.retrieve(draw(B, D, seed=1), max_steps=5)
    assert memory.retrieve(draw(B, D, seed=1), max_steps=5, check=False).steps.shape == (B,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_rise(dtype):
    for name, separation in EVERY.items():
        for post in POSTS:
            memory = HopfieldMemory(draw(16, 16, scale=10.0).to(dtype), 0.05, separation, post=post)
            q = draw(4, 16, seed=1, scale=12.0).to(dtype)
            found = memory.retrieve(q, max_steps=8)
            assert found.state.dtype == dtype, name
            assert found.energies.dtype == torch.float32


# H3: attention


def test_h3_one_update_is_cross_attention():
    q, X = draw(2, 3, 5, D), draw(2, 3, N, D, seed=1)
    expected = nn.functional.scaled_dot_product_attention(q, X, X)
    by_formula = torch.softmax(q @ X.mT / math.sqrt(D), -1) @ X
    memory = HopfieldMemory(X.flatten(0, 1))  # beta is 1/sqrt(D)
    torch.testing.assert_close(memory.update(q.flatten(0, 1)).view_as(q), expected)
    torch.testing.assert_close(expected, by_formula)
    shared = HopfieldMemory(X[0, 0])
    torch.testing.assert_close(
        shared.update(q), nn.functional.scaled_dot_product_attention(q, X[:1, :1].expand_as(X), X[:1, :1].expand_as(X))
    )


def test_h3_reading_is_attention_with_values_and_masks():
    q, X, V = draw(2, 5, D), draw(2, N, D, seed=1), draw(2, N, 3, seed=2)
    mask = torch.tensor([[1, 1, 0, 1, 0, 1], [0, 1, 1, 1, 1, 1]], dtype=torch.bool)
    expected = nn.functional.scaled_dot_product_attention(q, X, V, attn_mask=mask.unsqueeze(1))
    broken = X.masked_fill(~mask.unsqueeze(2), math.nan)
    memory = HopfieldMemory(broken, values=V.masked_fill(~mask.unsqueeze(2), math.nan), mask=mask)
    torch.testing.assert_close(memory.recall(q, max_steps=0), expected)


# H4: exact retrieval in one step; the margin's own tests are in test_hopfield_analysis.py


@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax1.3", "entmax4", "normmax2", "normmax5"])
def test_h4_one_step_is_exact_where_the_softmax_is_not(name):
    X = 3.0 * torch.eye(4, dtype=torch.float64)
    q = X + draw(4, 4, scale=0.1)
    sparse = HopfieldMemory(X, 1.0, SEPARATIONS[name][0]).retrieve(q)
    assert torch.equal(sparse.state, X)
    assert sparse.steps.tolist() == [2] * 4  # one to arrive, one to see that nothing moves
    soft = HopfieldMemory(X, 1.0).update(q)
    assert ((soft - X).norm(dim=1) > 1e-4).all()


# Masks, batches, sizes, types


@pytest.mark.parametrize("post", POSTS)
@pytest.mark.parametrize("name", UNORDERED)
def test_batched_memories_equal_a_loop(name, post):
    X, q = draw(3, N, D), within(draw(3, 2, D, seed=1), post)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    separation = SEPARATIONS[name][0]
    hidden = X.masked_fill(~mask.unsqueeze(2), math.nan)
    whole = HopfieldMemory(hidden, 1.2, separation, post=post, mask=mask)
    found = whole.retrieve(q, max_steps=25, tol=1e-7)
    assert found.weights.shape == (3, 2, N)
    for item in range(3):
        alone = HopfieldMemory(X[item, mask[item]], 1.2, separation, post=post)
        expected = alone.retrieve(q[item], max_steps=25, tol=1e-7)
        torch.testing.assert_close(found.state[item], expected.state)
        torch.testing.assert_close(found.steps[item], expected.steps)
        torch.testing.assert_close(found.converged[item], expected.converged)
        torch.testing.assert_close(found.energies[item, :, : expected.energies.size(1)], expected.energies)
        torch.testing.assert_close(found.weights[item][:, mask[item]], expected.weights)
        assert (found.weights[item][:, ~mask[item]] == 0).all()
        torch.testing.assert_close(whole.energy(q)[item], alone.energy(q[item]))
        torch.testing.assert_close(whole.update(q)[item], alone.update(q[item]))


@pytest.mark.parametrize("name", UNORDERED)
def test_masked_patterns_may_hold_anything(name):
    X, q = draw(N, D), draw(B, D, seed=1).requires_grad_()
    mask = torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.bool)
    hidden = X.masked_fill(~mask.unsqueeze(1), math.nan)
    masked = HopfieldMemory(hidden, 1.2, SEPARATIONS[name][0], mask=mask)
    plain = HopfieldMemory(X[mask], 1.2, SEPARATIONS[name][0])
    one, other = masked.retrieve(q, 20), plain.retrieve(q, 20)
    torch.testing.assert_close(one.state, other.state)
    torch.testing.assert_close(one.energies, other.energies)
    torch.testing.assert_close(*(torch.autograd.grad(found.state.sum(), q)[0] for found in (one, other)))
    torch.testing.assert_close(masked.recall(q), plain.recall(q))


@pytest.mark.parametrize("post", POSTS)
@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax1.3", "normmax2"])
def test_smallest_sizes(name, post):
    for count, features, queries in ((1, 1, 1), (1, 3, 2), (3, 1, 2), (2, 2, 0)):
        memory = HopfieldMemory(draw(count, features), 1.0, SEPARATIONS[name][0], post=post)
        found = memory.retrieve(within(draw(queries, features, seed=1), post), max_steps=500)
        assert found.state.shape == (queries, features)
        assert found.energies.size(0) == queries
        assert found.state.isfinite().all()
        if count == 1 and post == "identity":
            torch.testing.assert_close(found.state, memory.patterns.expand_as(found.state))
    alone = memory.retrieve(within(draw(2, seed=2), post))
    assert alone.state.shape == (2,)
    assert alone.steps.shape == ()
    assert alone.energies.dim() == 1


def test_empty_batches():
    for separation in ("softmax", "sparsemax"):
        for X, q in ((draw(N, D), draw(0, D)), (draw(0, N, D), draw(0, D)), (draw(2, N, D), draw(2, 0, D))):
            memory = HopfieldMemory(X, 1.0, separation)
            found = memory.retrieve(q)
            assert found.state.shape == memory.update(q).shape == memory.recall(q).shape == q.shape
            assert found.steps.shape == memory.energy(q).shape == q.shape[:-1]
            assert found.weights.shape == (*q.shape[:-1], N)


def test_any_leading_shape():
    memory, q = HopfieldMemory(draw(N, D), 1.2), draw(2, 3, D, seed=1)
    found = memory.retrieve(q)
    flat = memory.retrieve(q.view(6, D))
    torch.testing.assert_close(found.state.view(6, D), flat.state)
    assert found.energies.shape == (2, 3, flat.energies.size(1))
    assert found.weights.shape == (2, 3, N)
    assert memory.energy(q).shape == (2, 3)


# The compiled retrieval and blocks


def test_fast_path_equals_cccp_and_is_taken(monkeypatch):
    X, q = draw(N, D), draw(B, D, seed=1)
    memory = HopfieldMemory(X, 1.7)
    fast = memory.retrieve(q, 60, 1e-8)
    slow = memory.retrieve(q.clone().requires_grad_(), 60, 1e-8)
    for name in ("state", "energies", "steps", "converged", "weights"):
        torch.testing.assert_close(getattr(fast, name), getattr(slow, name).detach())
    assert slow.state.requires_grad
    assert slow.energies.requires_grad
    called = []
    settle = kernels.settle
    monkeypatch.setattr(kernels, "settle", lambda *a, **k: called.append(1) or settle(*a, **k))
    memory.retrieve(q)
    with torch.no_grad():
        memory.retrieve(q.clone().requires_grad_())
    assert len(called) == 2
    memory.retrieve(q.clone().requires_grad_())
    HopfieldMemory(X, 1.7, post="l2").retrieve(q)
    HopfieldMemory(X, 1.7, "sparsemax").retrieve(q)
    HopfieldMemory(X, 1.7, learn_beta=True).retrieve(q)
    assert len(called) == 2


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "2-subsets"])
@pytest.mark.parametrize("post", ["identity", "l2"])
def test_blocks_change_nothing(name, post, monkeypatch):
    X, q = draw(N, D).requires_grad_(), within(draw(B, D, seed=1), post)
    V = draw(N, 2, seed=3)

    def results() -> list[Tensor]:
        memory = HopfieldMemory(X, 1.3, SEPARATIONS[name][0], post=post, values=V)
        found = memory.retrieve(q, 10)
        (gradient,) = torch.autograd.grad(found.state.square().sum() + found.energies.sum(), X)
        with torch.no_grad():
            quiet = memory.retrieve(q, 10).state
        return [found.state, found.energies, gradient, quiet, memory.recall(q), memory.concave(q)]

    whole = results()
    monkeypatch.setattr("thalweg.energies.hopfield.landscape._HELD", 2 * N)
    for one, other in zip(whole, results(), strict=True):
        torch.testing.assert_close(one, other)


# Gradients


@pytest.mark.parametrize(
    ("name", "post"),
    [(name, post) for name in ("softmax", "sparsemax", "2-subsets") for post in POSTS]
    + [(name, "identity") for name in ("entmax15", "chain")],
)
def test_gradients_in_queries_patterns_and_beta(name, post):
    separation = EVERY[name]
    inputs = (within(draw(3, D, seed=1), post).requires_grad_(), draw(N, D).requires_grad_())
    beta = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)

    def results(q: Tensor, X: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        memory = HopfieldMemory(X, b, separation, post=post, values=X[:, :2])
        found = memory.retrieve(q, max_steps=2, tol=0.0)
        # The domain of the convex part is a thin set after these post-transforms: energies of free points are infinite.
        values = (memory.energy(q),) if post == "identity" else (memory.concave(q),)
        return (memory.update(q), found.state, memory.recall(q, max_steps=1), *values)

    assert torch.autograd.gradcheck(results, (*inputs, beta), atol=1e-5, fast_mode=True)


def test_gradient_in_alpha():
    X, q = draw(N, D), draw(3, D, seed=1)

    def results(alpha: Tensor) -> tuple[Tensor, Tensor]:
        memory = HopfieldMemory(X, 0.6, Entmax(alpha))
        return memory.retrieve(q, max_steps=2, tol=0.0).state, memory.energy(q)

    assert torch.autograd.gradcheck(results, torch.tensor(1.4, dtype=torch.float64, requires_grad=True), atol=1e-5)


def test_learned_beta_and_alpha_are_parameters_and_learn():
    memory = HopfieldMemory(nn.Parameter(draw(N, D)), 2.0, Entmax(nn.Parameter(torch.tensor(1.5))), learn_beta=True)
    assert {name for name, _ in memory.named_parameters()} == {"patterns", "log_beta", "separation.alpha"}
    assert memory.beta_value == pytest.approx(2.0)
    memory.retrieve(draw(B, D, seed=1), max_steps=3).state.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in memory.parameters())
    fixed = HopfieldMemory(draw(N, D))
    assert list(fixed.parameters()) == []
    assert fixed.beta == 0.5
    assert "patterns" in fixed.state_dict()


# Post-transforms


@pytest.mark.parametrize("post", [Identity(), UnitNorm(), LayerNorm(), LayerNorm(0.7, draw(D, seed=9))])
def test_post_transforms_are_gradients_and_pairs(post):
    z = draw(B, D).requires_grad_()
    q = post(z)
    (slope,) = torch.autograd.grad(post.conjugate(z).sum(), z)
    torch.testing.assert_close(slope, q)
    # Fenchel and Young: Psi(q) + Psi*(z) >= <q, z>, with equality at q = grad Psi*(z).
    torch.testing.assert_close(post.value(q) + post.conjugate(z), (q * z).sum(1))
    others = post(draw(B, D, seed=3))
    assert (post.value(others) + post.conjugate(z) >= (others * z).sum(1) - 1e-12).all()
    assert torch.autograd.gradcheck(post, z)
    assert torch.autograd.gradcheck(post.conjugate, z)


def test_layer_norm_is_torchs():
    z, bias = draw(B, D), draw(D, seed=9)
    ours = LayerNorm(0.7, bias)(z)
    torch.testing.assert_close(ours, nn.functional.layer_norm(z, (D,), 0.7 * torch.ones(D).double(), bias, eps=0.0))
    memory = HopfieldMemory(draw(N, D), 1.5, post=LayerNorm(0.7, bias))
    found = memory.retrieve(ours, 40)
    assert found.energies.isfinite().all()
    assert (found.energies.diff() <= 1e-10).all()


@pytest.mark.parametrize("post", [UnitNorm(), LayerNorm()])
def test_nothing_to_normalise_is_the_origin(post):
    z = torch.full((2, 3), 0.0, requires_grad=True)
    q = post(z)
    q.sum().backward()
    assert (q == 0).all()
    assert z.grad is not None
    assert (z.grad == 0).all()
    tiny = post(torch.tensor([[3e-30, 4e-30, 0.0]]))
    assert tiny.norm() > 0.9  # a direction all the same
    assert post.value(torch.tensor([[100.0, 0.0, 0.0]])).item() == math.inf


def test_starts_outside_the_domain_have_infinite_energy_and_fall():
    found = HopfieldMemory(draw(N, D), 2.0, post="l2").retrieve(draw(B, D, seed=1, scale=9.0))
    assert torch.isposinf(found.energies[:, 0]).all()
    assert found.energies[:, 1:].isfinite().all()


# Hetero-association, and mistakes


def test_recall_gives_the_values_of_what_is_found():
    X, V = 5.0 * torch.eye(3), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    memory = HopfieldMemory(X, 2.0, values=V)
    q = X[[2, 0]] + 0.3
    torch.testing.assert_close(memory.recall(q), V[[2, 0]])
    torch.testing.assert_close(memory(q), memory.recall(q))
    sparse = HopfieldMemory(X, 2.0, "sparsemax", values=V)
    assert torch.equal(sparse.recall(q), V[[2, 0]])
    plain = HopfieldMemory(X, 2.0)
    torch.testing.assert_close(plain.recall(q, max_steps=0), plain.update(q))
    learned = HopfieldMemory(X, 2.0, values=nn.Parameter(V))
    assert learned.recall(q).requires_grad
    assert not learned.retrieve(q).state.requires_grad


def test_weights_are_of_the_memory_as_it_was():
    memory = HopfieldMemory(3.0 * torch.eye(3), 2.0)
    found = memory.retrieve(torch.eye(3))
    memory.remove(0)
    memory.add(torch.ones(2, 3))
    assert found.weights.shape == (3, 3)
    assert found.weights.argmax(1).tolist() == [0, 1, 2]
    assert found.weights is found.weights  # made once


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: HopfieldMemory(torch.zeros(3)), ShapeError, "(N, D)"),
        (lambda: HopfieldMemory(torch.zeros(0, 3)), ShapeError, "at least 1"),
        (lambda: HopfieldMemory(torch.eye(2), 0.0), ConfigError, "positive"),
        (lambda: HopfieldMemory(torch.eye(2), math.inf), ConfigError, "finite"),
        (lambda: HopfieldMemory(torch.eye(2), torch.ones(2)), ConfigError, "one number"),
        (lambda: HopfieldMemory(torch.eye(2), separation="softmx"), ConfigError, "did you mean"),
        (lambda: HopfieldMemory(torch.eye(2), post="layer"), ConfigError, "did you mean"),
        (lambda: HopfieldMemory(torch.eye(2), mask=torch.zeros(2, dtype=torch.bool)), ShapeError, "at least one"),
        (lambda: HopfieldMemory(torch.eye(2), mask=torch.ones(3, dtype=torch.bool)), ShapeError, "mask"),
        (lambda: HopfieldMemory(torch.eye(2), values=torch.ones(3, 1)), ShapeError, "values"),
        (lambda: HopfieldMemory(torch.eye(2), names=["a"]), ConfigError, "names"),
        (lambda: HopfieldMemory(torch.eye(2)).update(torch.ones(2, 3)), ShapeError, "(..., 2)"),
        (lambda: HopfieldMemory(torch.ones(4, 2, 2)).update(torch.ones(3, 2)), ShapeError, "(4, ..., 2)"),
        (lambda: HopfieldMemory(torch.eye(2)).update(torch.ones(2, 2).long()), ShapeError, "floating"),
        (lambda: HopfieldMemory(torch.eye(2)).retrieve(torch.ones(2, 2), -1), ConfigError, "max_steps"),
        (lambda: HopfieldMemory(torch.eye(2)).retrieve(torch.ones(2, 2), tol=-1.0), ConfigError, "tol"),
        (lambda: LayerNorm(torch.ones(3)), ConfigError, "share a gain"),
    ],
)
def test_mistakes_are_one_line(make, error, says):
    with pytest.raises(error) as caught:
        make()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_describes_itself():
    shown = repr(HopfieldMemory(torch.eye(3), 2.0, "sparsemax"))
    assert "patterns=3, features=3, beta=2" in shown
    assert "sparsemax" in shown


@pytest.mark.parametrize("size", [(3, 5, 4), (64, 100, 64), (40, 700, 16)])
def test_the_short_way_of_plain_memories_is_the_update(size: tuple[int, int, int]) -> None:
    """float32, softmax, identity and no gradient: a kernel, straight away."""
    Q, N, D = size
    generator = torch.Generator().manual_seed(0)
    patterns, queries = torch.randn(N, D, generator=generator), torch.randn(Q, D, generator=generator)
    memory = HopfieldMemory(patterns, beta=0.7)
    exact = patterns.double()
    expected = torch.softmax(0.7 * queries.double() @ exact.T, dim=1) @ exact
    assert memory._is_attention(queries)
    torch.testing.assert_close(memory.update(queries).double(), expected, atol=2e-5, rtol=0)
    found = memory.retrieve(queries, max_steps=1, tol=0.0)
    torch.testing.assert_close(found.state.double(), expected, atol=2e-5, rtol=0)
    weights = torch.softmax(0.7 * found.state.double() @ exact.T, dim=1)
    torch.testing.assert_close(found.weights.double(), weights, atol=1e-5, rtol=0)
    assert not memory._is_attention(queries.requires_grad_())
