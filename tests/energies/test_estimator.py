"""Estimators as scikit-learn has them, and tables of numbers as people have them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError as TheirNotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.utils.validation import check_is_fitted
from torch import nn

from thalweg.energies.estimator import Estimator
from thalweg.energies.rows import NotNumbersError, read_rows, read_weights
from thalweg.errors import ConfigError, NotFittedError, ShapeError, ThalwegError


class Centre(Estimator):
    """The smallest estimator: a mean."""

    def __init__(self, scale=1.0, *, inner=None, start=None):
        super().__init__()
        self.scale, self.inner, self.start = scale, inner, start

    def __sklearn_is_fitted__(self):
        return hasattr(self, "centre_")

    def fit(self, X, y=None):
        rows = self._read(X, fitting=True)
        self.centre_ = nn.Parameter(rows.block(0, len(rows)).mean(dim=0))
        return self

    def transform(self, X):
        rows = self._read(X)
        return rows.like(self.scale * (rows.block(0, len(rows)) - self.centre_))


class Frame:
    """As much of a pandas frame as an estimator looks at."""

    def __init__(self, values, columns):
        self.values, self.columns = np.asarray(values), columns

    def to_numpy(self):
        return self.values


def test_settings_are_kept_as_given():
    start = nn.Parameter(torch.ones(2))
    one = Centre(2.0, inner=Centre(3.0), start=start)
    assert one.get_params(deep=False) == {"scale": 2.0, "inner": one.inner, "start": start}
    assert one.get_params()["inner__scale"] == 3.0
    assert [name for name, _ in one.named_parameters()] == []  # a setting is none of the module's parameters
    assert one.set_params(scale=4.0, inner__scale=5.0) is one
    assert (one.scale, one.inner.scale) == (4.0, 5.0)
    with pytest.raises(ConfigError, match="did you mean `scale`"):
        one.set_params(scal=1.0)
    assert repr(one) == "Centre(scale=4.0, inner=Centre(scale=5.0), start=<tensor 2>)"
    assert repr(Centre()) == "Centre()"


def test_clones_and_pickles():
    one = Centre(2.0, inner=Centre(3.0), start=np.ones(2)).fit(np.eye(2))
    other = clone(one)
    assert other.inner is not one.inner
    assert other.start is not one.start
    assert not other.__sklearn_is_fitted__()
    again = pickle.loads(pickle.dumps(one))
    assert np.array_equal(again.transform(np.eye(2)), one.transform(np.eye(2)))
    assert np.array_equal(make_pipeline(Centre(), Centre()).fit_transform(np.eye(2)), np.eye(2) - 0.5)


def test_not_fitted_is_both():
    with pytest.raises(NotFittedError, match="this Centre has no parameters yet: call `fit` first") as ours:
        Centre().transform([[1.0]])
    assert isinstance(ours.value, TheirNotFittedError)
    assert isinstance(ours.value, ThalwegError)
    with pytest.raises(TheirNotFittedError):
        check_is_fitted(Centre())
    check_is_fitted(Centre().fit([[1.0]]))


def test_names_of_features():
    values = [[1.0, 3.0], [2.0, 5.0]]
    frame = Frame(values, ["a", "b"])
    one = Centre().fit(frame)
    assert one.feature_names_in_.tolist() == ["a", "b"]
    assert one.transform(frame).tolist() == [[-0.5, -1.0], [0.5, 1.0]]
    with pytest.raises(ShapeError, match="expected a, b, got b, a"):
        one.transform(Frame(values, ["b", "a"]))
    one.fit(values)
    assert not hasattr(one, "feature_names_in_")
    assert not hasattr(one.fit(Frame(values, [0, 1])), "feature_names_in_")
    with pytest.raises(ShapeError, match="X has 1 features, but Centre is expecting 2 features as input"):
        one.transform([[1.0]])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f8", np.int64, np.bool_, object])
def test_arrays_of_all_kinds(dtype, tmp_path):
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    rows = read_rows(values)
    assert rows.dtype is (torch.float32 if dtype in (np.float16, np.float32) else torch.float64)
    assert rows.block(0, 2).tolist() == [[0, 1, 1], [1, 0, 1]]
    assert isinstance(rows.like(torch.ones(2)), np.ndarray)
    for other in (values[::-1, ::-1], np.asfortranarray(values)):
        assert read_rows(other).block(0, 2).tolist() == other.tolist()


def test_memory_mapped_arrays(tmp_path):
    values = np.arange(12.0).reshape(4, 3)
    np.save(tmp_path / "x.npy", values)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    rows = read_rows(mapped)
    assert rows.table is mapped or np.shares_memory(rows.table, mapped)
    blocks = list(rows.blocks(3))
    assert [(place.start, place.stop) for place, _ in blocks] == [(0, 3), (3, 4)]
    assert torch.cat([block for _, block in blocks]).tolist() == values.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
def test_tensors(dtype):
    rows = read_rows(torch.ones(2, 3, dtype=dtype).requires_grad_(dtype.is_floating_point))
    assert rows.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    answer = rows.like(rows.block(0, 2).sum(dim=1))
    assert isinstance(answer, torch.Tensor)
    assert not answer.requires_grad


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([1.0, 2.0], ShapeError, r"must be \(B, D\), got \(2,\). Reshape your data"),
        (np.zeros((2, 2, 2)), ShapeError, r"\(2, 2, 2\)"),
        (np.zeros((0, 3)), ShapeError, r"0 sample\(s\)"),
        (np.zeros((3, 0)), ShapeError, r"0 feature\(s\) \(shape=\(3, 0\)\)"),
        ([[1.0], [2.0, 3.0]], ShapeError, "as many in each row"),
        ([["one"]], ShapeError, "must hold numbers"),
        (np.array([[{}]], dtype=object), NotNumbersError, "must hold numbers: .* not 'dict'"),
        (np.array([["2020-01-01"]], dtype="datetime64[D]"), NotNumbersError, "datetime64"),
        (np.array([[1j]]), ShapeError, "Complex data not supported"),
        (torch.ones(1, 1, dtype=torch.complex64), ShapeError, "Complex data not supported"),
        (scipy.sparse.csr_array(np.eye(2)), NotNumbersError, "sparse"),
        (torch.eye(2).to_sparse(), ShapeError, "sparse"),
        ([[0.0, 1.0], [0.0, np.nan]], ShapeError, "contains NaN at row 1, column 1"),
        ([[0.0, -np.inf]], ShapeError, r"contains infinity \(inf\) at row 0, column 1"),
    ],
)
def test_what_is_no_table(values, error, message):
    with pytest.raises(error, match=message) as caught:
        read_rows(values)
    assert "\n" not in str(caught.value)


def test_missing_values_are_let_through_where_asked():
    assert read_rows([[np.nan, 1.0]], missing=True).block(0, 1).isnan().tolist() == [[True, False]]
    with pytest.raises(ShapeError, match="inf"):
        read_rows([[np.nan, np.inf]], missing=True)


def test_large_numbers_are_finite():
    assert len(read_rows(np.full((4, 1), 1e308))) == 4  # their sum is not


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], r"\(B,\) with B = 2"),
        ([[1.0], [1.0]], r"\(2, 1\)"),
        ([1.0, -1.0], "0 or more"),
        ([1.0, np.nan], "finite"),
        ([0.0, 0.0], "zero everywhere"),
    ],
)
def test_wrong_weights(weights, message):
    with pytest.raises(ShapeError, match=message):
        read_weights(weights, 2)


def test_weights():
    assert read_weights(None, 2) is None
    assert read_weights(np.array([1, 0]), 2).tolist() == [1.0, 0.0]
