"""A hidden Markov model as an estimator of scikit-learn."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from thalweg.energies import HMM, GaussianEmission

# A table there is one sequence of as many vectors as it has rows.
EXPECTED = {
    "check_no_attributes_set_in_init": "a module has attributes of its own, and what is given is a model at once",
    "check_do_not_raise_errors_in_init_or_set_params": "parameters that are given are checked when they are given",
    "check_methods_sample_order_invariance": "the order of observations is what the model is about",
    "check_methods_subset_invariance": "the states of a sequence depend on all of it",
}


class Unlabelled(HMM):
    """The checks hand labels to `fit` and `score`, in the place where hmmlearn and we have lengths."""

    def fit(self, X, y=None):
        return super().fit(X)

    def score(self, X, y=None):
        return super().score(X)


@pytest.mark.parametrize("kind", ["gaussian", "mixture"])
def test_the_checks_pass_but_for_those_named(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tiny tables leave degenerate states, which is told of
        found = check_estimator(
            Unlabelled(n_states=2, emission=kind, max_iter=3),
            expected_failed_checks=EXPECTED,
            on_skip=None,
            on_fail=None,
        )
    failed = {each["check_name"]: each["exception"] for each in found if each["status"] == "failed"}
    assert not failed, failed
    assert len(found) > 30
    assert {each["check_name"] for each in found if each["status"] == "xfail"} == set(EXPECTED)


def test_searches_pipelines_and_clones():
    rng = np.random.default_rng(0)
    x = np.repeat([[0.0], [6.0]] * 10, 6, axis=0) + rng.normal(size=(120, 1))
    search = GridSearchCV(HMM(max_iter=20), {"n_states": [1, 2]}, cv=3).fit(x)
    assert search.best_params_ == {"n_states": 2}
    assert make_pipeline(StandardScaler(), HMM(n_states=2)).fit(x).predict(x).shape == (120,)
    given = HMM([0.5, 0.5], [[0.5, 0.5], [0.5, 0.5]], GaussianEmission([[0.0], [6.0]]), max_iter=3)
    other = clone(given)
    assert other.emission is not given.emission
    assert other.score(x) == pytest.approx(given.score(x))
    assert clone(other.fit(x)).score(x) == pytest.approx(given.score(x))
    assert other.score(x) > given.score(x)
