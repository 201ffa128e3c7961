from __future__ import annotations

import copy
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from thalweg.energies.hopfield.files import FORMAT, read_memory, write_memory
from thalweg.energies.hopfield.memory import HopfieldMemory
from thalweg.energies.hopfield.post import Identity, LayerNorm
from thalweg.energies.hopfield.storage import PatternStore
from thalweg.errors import CheckpointError, ConfigError, DataError, ShapeError
from thalweg.layers.hopfield.separation_maps import (
    ChainMarginals,
    ChainSparseMAP,
    Entmax,
    KSubsets,
    NormMax,
    Separation,
    Softmax,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Growing and shrinking


@pytest.mark.parametrize("masked", [False, True])
def test_a_memory_that_grew_equals_one_made_whole(masked):
    X, V = draw(12, 5), draw(12, 2, seed=1)
    names = [f"p{i}" for i in range(12)]
    mask = torch.arange(3) != 1 if masked else None
    grown = HopfieldMemory(X[:3], 2.0, values=V[:3], names=names[:3], mask=mask)
    assert grown.add(X[3], V[3], names=names[3]) == range(3, 4)
    assert grown.add(X[4:4], V[4:4], names=[]) == range(4, 4)
    for i in range(4, 9):
        grown.add(X[i : i + 1], V[i : i + 1], names=[names[i]])
    assert grown.add(X[9:], V[9:], names=names[9:]) == range(9, 12)
    whole_mask = None if mask is None else torch.cat([mask, torch.ones(9, dtype=torch.bool)])
    whole = HopfieldMemory(X, 2.0, values=V, names=names, mask=whole_mask)
    q = draw(4, 5, seed=2)
    assert grown.names == whole.names
    torch.testing.assert_close(grown.state_dict(), whole.state_dict())
    torch.testing.assert_close(grown.recall(q), whole.recall(q))
    torch.testing.assert_close(grown.retrieve(q).energies, whole.retrieve(q).energies)


def test_the_callers_tensor_is_never_written():
    X = draw(4, 3)
    kept = X.clone()
    store = PatternStore(X[:2])
    store.add(torch.zeros(2, 3))
    store.add(torch.ones(1, 3))
    torch.testing.assert_close(X, kept, atol=0, rtol=0)


def test_growing_is_amortised():
    store = PatternStore(draw(4, 3))
    places = set()
    for _ in range(500):
        store.add(torch.ones(3))
        places.add(store.patterns.data_ptr())
    assert len(store) == 504
    assert len(places) <= 8
    assert (store.patterns[4:] == 1).all()


def test_graphs_made_before_an_addition_stay_valid():
    memory = HopfieldMemory(draw(3, 4), 2.0)
    memory.add(torch.ones(4))
    q = draw(2, 4, seed=1).requires_grad_()
    state = memory.update(q)
    memory.add(torch.zeros(4))
    state.sum().backward()
    assert q.grad is not None


def test_copies_and_moves_grow_apart():
    store = PatternStore(draw(3, 4))
    store.add(torch.ones(4))
    other = copy.deepcopy(store)
    store.add(torch.full((4,), 2.0))
    other.add(torch.full((4,), 3.0))
    assert store.patterns[-1].tolist() == [2.0] * 4
    assert other.patterns[-1].tolist() == [3.0] * 4
    store.double()
    store.add(torch.full((4,), 5.0))
    assert store.patterns.dtype == torch.float64
    assert store.patterns[-2:].tolist() == [[2.0] * 4, [5.0] * 4]


def test_parameters_stay_parameters():
    memory = HopfieldMemory(nn.Parameter(draw(3, 4)), values=nn.Parameter(draw(3, 2)))
    memory.add(torch.ones(4), torch.ones(2))
    memory.remove(0)
    assert {name for name, _ in memory.named_parameters()} == {"patterns", "values"}
    assert memory.patterns.shape == (3, 4)
    frozen = HopfieldMemory(nn.Parameter(draw(3, 4), requires_grad=False))
    frozen.add(torch.ones(4))
    assert not frozen.patterns.requires_grad


def test_added_variables_keep_their_gradient():
    new = torch.ones(1, 3, requires_grad=True)
    memory = HopfieldMemory(torch.eye(3), 1.0)
    memory.add(new)
    memory.update(torch.ones(1, 3)).sum().backward()
    assert new.grad is not None
    assert (new.grad != 0).any()


def test_removal_by_index_name_and_mask():
    def store() -> PatternStore:
        return PatternStore(torch.arange(6.0).view(6, 1), names=["a", "b", "c", "a", "d", "e"])

    for which, left in [
        (0, [1, 2, 3, 4, 5]),
        (-1, [0, 1, 2, 3, 4]),
        ("a", [1, 2, 4, 5]),
        (["e", 1, "a", 0], [2, 4]),
        (range(2), [2, 3, 4, 5]),
        (torch.tensor([5, 5, 1]), [0, 2, 3, 4]),
        (torch.tensor([True, False, False, True, True, True]), [1, 2]),
        ([], [0, 1, 2, 3, 4, 5]),
    ]:
        found = store()
        assert found.remove(which) == 6 - len(left)
        assert found.patterns.flatten().tolist() == left
        assert found.names == [store().names[i] for i in left]  # pyright: ignore


def test_a_removed_pattern_is_no_longer_retrieved():
    memory = HopfieldMemory(5.0 * torch.eye(3), 2.0, values=torch.arange(3.0).view(3, 1))
    q = torch.tensor([[4.0, 3.0, 0.0]])
    assert memory.recall(q).round().item() == 0.0
    memory.remove(0)
    assert memory.recall(q).round().item() == 1.0


@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (lambda s: s.add(torch.ones(2, 5)), ShapeError, "D = 3"),
        (lambda s: s.add(torch.ones(2, 3)), ConfigError, "names"),
        (lambda s: s.add(torch.ones(3), torch.ones(2), names="x"), ConfigError, "values"),
        (lambda s: s.add(torch.ones(2, 3), names=["x"]), ConfigError, "2 strings"),
        (lambda s: s.remove([0, 1, 2]), ConfigError, "must remain"),
        (lambda s: s.remove("z"), DataError, "`z`"),
        (lambda s: s.remove(3), DataError, "-3 ... 2"),
        (lambda s: s.remove(torch.ones(2, dtype=torch.bool)), ShapeError, "(N,)"),
        (lambda s: s.nearest(torch.ones(1, 3), 0), ConfigError, "`k`"),
        (lambda s: PatternStore(torch.ones(2, 3, 4)).add(torch.ones(4)), ConfigError, "batched"),
        (lambda s: PatternStore(torch.ones(2, 3, 4)).remove(0), ConfigError, "batched"),
        (lambda s: PatternStore(torch.ones(2, 3, 4), names=["a", "b", "c"]), ConfigError, "names"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(act, error, says):
    store = PatternStore(torch.eye(3), names=["a", "b", "c"])
    with pytest.raises(error) as caught:
        act(store)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert store.names == ["a", "b", "c"]
    assert torch.equal(store.patterns, torch.eye(3))


def test_the_last_one_present_must_remain():
    store = PatternStore(torch.eye(3), mask=torch.tensor([True, False, False]))
    with pytest.raises(ConfigError, match="present must remain"):
        store.remove(0)


# Search


def test_nearest_is_a_sort():
    X, q = draw(50, 4), draw(2, 3, 4, seed=1)
    mask = torch.arange(50) % 7 != 0
    names = [str(i) for i in range(50)]
    found = PatternStore(X, mask=mask, names=names).nearest(q, 5)
    scores = (q @ X.T).masked_fill(~mask, -math.inf)
    expected = scores.sort(dim=-1, descending=True)
    torch.testing.assert_close(found.scores, expected.values[..., :5])
    assert torch.equal(found.indices, expected.indices[..., :5])
    assert found.names is not None
    assert found.names[1][2] == [str(i) for i in found.indices[1, 2].tolist()]


def test_nearest_of_too_few_and_of_batches():
    few = PatternStore(torch.eye(3), mask=torch.tensor([True, False, True]), names=["a", "b", "c"])
    found = few.nearest(torch.tensor([3.0, 2.0, 1.0]), k=4)
    assert found.indices.tolist() == [0, 2, -1, -1]
    assert found.scores[2:].tolist() == [-math.inf] * 2
    assert found.names == ["a", "c", None, None]
    X, q = draw(3, 6, 4), draw(3, 2, 4, seed=1)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1, :4] = False
    whole = PatternStore(X, mask=mask).nearest(q, 3)
    for item in range(3):
        alone = PatternStore(X[item], mask=mask[item]).nearest(q[item], 3)
        torch.testing.assert_close(whole.scores[item], alone.scores)
        assert torch.equal(whole.indices[item], alone.indices)


def test_many_patterns_without_their_weights():
    X = nn.functional.normalize(draw(200_000, 8))
    memory = HopfieldMemory(X, 400.0, values=torch.arange(200_000.0).view(-1, 1))
    q = X[[5, 123_456]] + 1e-3
    assert memory.nearest(q, 1).indices.flatten().tolist() == [5, 123_456]
    found = memory.retrieve(q, max_steps=3)
    expected = torch.softmax(400.0 * q.double() @ X.double().T, 1) @ X.double()
    torch.testing.assert_close(memory.update(q).double(), expected, atol=1e-5, rtol=0)
    assert found.state.shape == (2, 8)


# Files

SEPARATIONS = [
    Softmax(),
    Entmax(2.0),
    Entmax(nn.Parameter(torch.tensor(1.4))),
    NormMax(3.0),
    NormMax(torch.tensor(3.0)),
    KSubsets(2),
    ChainMarginals(0.7),
    ChainSparseMAP(nn.Parameter(torch.tensor([[0.0, 0.1], [0.2, 0.3]]))),
]


@pytest.mark.parametrize("separation", SEPARATIONS, ids=str)
def test_saved_and_loaded_memories_are_the_same(tmp_path, separation):
    X, V = draw(5, 4), draw(5, 2, seed=1)
    mask = torch.tensor([1, 1, 0, 1, 1], dtype=torch.bool)
    memory = HopfieldMemory(X, 1.3, separation, values=V, mask=mask, names=["ä", "b", "b", "\n", '"'])
    path = tmp_path / "deep" / "memory.safetensors"
    memory.save(path)
    again = HopfieldMemory.load(str(path))
    assert again.names == memory.names
    assert again.beta == 1.3
    assert str(again.separation) == str(separation)
    assert {n for n, _ in again.named_parameters()} == {n for n, _ in memory.named_parameters()}
    torch.testing.assert_close(again.state_dict(), memory.state_dict(), atol=0, rtol=0)
    q = draw(3, 4, seed=2)
    torch.testing.assert_close(again.recall(q), memory.recall(q), atol=0, rtol=0)
    assert os.listdir(path.parent) == ["memory.safetensors"]


@pytest.mark.parametrize(
    "post", ["identity", "l2", "layernorm", LayerNorm(0.5, nn.Parameter(torch.arange(4.0)))], ids=str
)
def test_posts_parameters_types_and_batches_are_kept(tmp_path, post):
    path = tmp_path / "m.safetensors"
    memory = HopfieldMemory(nn.Parameter(draw(2, 5, 4).double()), 0.7, post=post, learn_beta=True)
    assert memory.log_beta is not None
    with torch.no_grad():
        memory.log_beta.add_(0.123)
    memory.save(path)
    again = HopfieldMemory.load(path)
    assert again.patterns.dtype == torch.float64
    assert {n for n, _ in again.named_parameters()} == {n for n, _ in memory.named_parameters()}
    torch.testing.assert_close(again.state_dict(), memory.state_dict(), atol=0, rtol=0)
    torch.testing.assert_close(again.update(draw(2, 4)), memory.update(draw(2, 4)), atol=0, rtol=0)


def test_a_memory_that_grew_is_saved_without_its_room(tmp_path):
    memory = HopfieldMemory(draw(100, 8))
    memory.add(torch.ones(8))
    memory.save(tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").stat().st_size < 101 * 8 * 4 + 1000
    assert len(HopfieldMemory.load(tmp_path / "m.safetensors")) == 101


def test_saving_replaces_in_one_go(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    HopfieldMemory(torch.eye(2), names=["a", "b"]).save(path)
    before = path.read_bytes()

    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        HopfieldMemory(torch.eye(3)).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_what_cannot_be_saved_says_so(tmp_path):
    class Mine(Softmax):
        pass

    class Post(Identity):
        pass

    for memory in (HopfieldMemory(torch.eye(2), 1.0, Mine()), HopfieldMemory(torch.eye(2), 1.0, post=Post())):
        with pytest.raises(ConfigError, match="cannot be saved"):
            memory.save(tmp_path / "m.safetensors")
    assert isinstance(Mine(), Separation)
    assert not os.listdir(tmp_path)


def bad_files(folder: Path) -> dict[str, str]:
    """Files by name, and what the error must say."""
    good = {"patterns": torch.eye(2)}
    meta = {"beta": 1.0, "separation": {"kind": "softmax"}, "post": "identity", "learned": []}
    HopfieldMemory(torch.eye(2)).save(folder / "good")
    whole = (folder / "good").read_bytes()
    (folder / "cut").write_bytes(whole[: len(whole) - 5])
    (folder / "empty").write_bytes(b"")
    (folder / "text").write_text("patterns: 3\n" * 20)
    save_file(good, folder / "foreign")
    head = {"kind": "thalweg-memory", "format": str(FORMAT + 1), "meta": "{}"}
    save_file(good, folder / "newer", metadata=head)
    save_file(good, folder / "unmeta", metadata=head | {"format": str(FORMAT), "meta": "{"})
    write_memory(folder / "no-patterns", {"values": torch.eye(2)}, meta)
    write_memory(folder / "no-beta", good, {key: meta[key] for key in meta if key != "beta"})
    write_memory(folder / "bad-beta", good, meta | {"beta": -1.0})
    write_memory(folder / "bad-post", good, meta | {"post": "batchnorm"})
    write_memory(folder / "bad-map", good, meta | {"separation": {"kind": "hardmax"}})
    write_memory(folder / "bad-alpha", good, meta | {"separation": {"kind": "entmax", "alpha": -3.0}})
    write_memory(folder / "bad-mask", good | {"mask": torch.ones(3, dtype=torch.bool)}, meta)
    write_memory(folder / "bad-names", good | {"names": torch.tensor([1, 2, 3], dtype=torch.uint8)}, meta)
    (folder / "folder").mkdir()
    return {
        "absent": "no such file",
        "folder": "no such file",
        "cut": "cannot be read",
        "empty": "cannot be read",
        "text": "cannot be read",
        "foreign": "another kind",
        "newer": "upgrade",
        "unmeta": "metadata",
        "no-patterns": "incomplete",
        "no-beta": "incomplete",
        "bad-beta": "beta",
        "bad-post": "incomplete",
        "bad-map": "incomplete",
        "bad-alpha": "alpha",
        "bad-mask": "mask",
        "bad-names": "incomplete",
    }


def test_bad_files_are_one_line(tmp_path):
    for name, says in bad_files(tmp_path).items():
        with pytest.raises(CheckpointError) as caught:
            HopfieldMemory.load(tmp_path / name)
        message = str(caught.value)
        assert says in message, name
        assert message.startswith(str(tmp_path / name)), name
        assert "\n" not in message, name


def test_files_are_plain_safetensors(tmp_path):
    HopfieldMemory(torch.eye(2), 3.0, "sparsemax").save(tmp_path / "m.safetensors")
    tensors, meta = read_memory(tmp_path / "m.safetensors")
    assert list(tensors) == ["patterns"]
    assert meta == {
        "beta": 3.0,
        "separation": {"kind": "entmax", "alpha": 2.0},
        "post": "identity",
        "learned": [],
    }
