"""The hidden Markov model: a Markov chain of states, each of which emits an observation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from thalweg.energies.estimator import Estimator
from thalweg.energies.hmm.emissions import CategoricalEmission, DistributionEmission, Emission, Limits, Trouble
from thalweg.energies.hmm.fitting import Parts, Progress, Schedule, climb, expectation_maximisation
from thalweg.energies.hmm.gaussian import Covariance, GaussianEmission
from thalweg.energies.hmm.inference import Inference
from thalweg.energies.hmm.mixture import MixtureEmission
from thalweg.energies.hmm.probabilities import floats, row_logarithms, sparse_logarithms
from thalweg.energies.hmm.sequences import Known, Sequences, known_of, read_sequences
from thalweg.energies.hmm.start import begin
from thalweg.energies.hmm.states import States, kinds_of, lasting_of, moved
from thalweg.errors import ConfigError, ShapeError, nearest
from thalweg.kernels.potentials import SparseTransitions
from thalweg.limits import COUNT, SEED, check_numbers

_KINDS = ("categorical", "gaussian", "mixture")
_MODEL = {
    "initial",
    "transition",
    "emission",
    "n_states",
    "durations",
    "covariance_type",
    "n_mix",
    "tied",
    "logarithms",
}


class HMM(Inference, Estimator):
    r"""States z_1..z_T (a Markov chain) and observations x_1..x_T, each drawn given its state.

    .. math:: p(z, x) = \pi(z_1) \prod_{t<T} P(z_t, z_{t+1}) \prod_t p(x_t | z_t)

    Given observations the states are a linear chain, whose log Z is log p(x): :meth:`chain` gives it, and smoothing,
    Viterbi decoding and the likelihood are its marginals, mode and log-partition. Rabiner (1989).

    What is given is the model until :meth:`fit`, and where :meth:`fit` begins; what is not given begins with the data.
    Probabilities of 0 are structure: they stay 0, and their gradient is 0. The parameters are those of a module
    (logits, means, log-scales) and can be trained by any optimiser on :meth:`log_likelihood`, the energies or
    :meth:`chain`; where tensors are given that are part of a graph, derivatives reach those instead.

    Observations are ``(B, T)``, or ``(B, T, D)`` where one is a vector. Two arguments go with them everywhere:
    ``lengths`` (B,) where sequences differ in length (what lies past one counts for nothing), and ``observed`` (B, T)
    bool, false where an observation is missing and so gives no evidence; what stands there is not looked at. With
    diagonal Gaussians it may be (B, T, D), for vectors known in part. The methods of scikit-learn's interface also take
    a list of sequences, and all of them one after the other in one array, ``(n, D)`` or ``(n, 1)``, with lengths that
    sum to n; their answers have the form of the question, arrays for arrays.

    Args:
        initial: ``(C,)``, pi; sums to one.
        transition: ``(C, C)``, ``transition[i, j]`` the probability of j after i; rows sum to one. Or
            :class:`~thalweg.inference.SparseTransitions` holding the same, of which only the edges cost.
        emission: ``(C, V)``, the probability of each of V symbols in each state; rows sum to one. Or an
            :class:`Emission` with or without parameters; its name, ``categorical``, ``gaussian`` or ``mixture``; or a
            ``torch.distributions.Distribution`` with batch shape (C,), which :meth:`fit` leaves as it is.
        n_states: C, where nothing that is given says so.
        durations: where a state lasts for a number of positions that is drawn when it is entered, an explicit-duration
            model: ``(C, K)``, ``durations[c, d - 1]`` the probability of d positions, or K alone, from which a fit
            begins with all alike. Moves then go from one such stay to the next, the last of which ends with the
            sequence; given the observations, :meth:`chain` is a :class:`~thalweg.inference.SemiMarkov`. Time
            O(B T (K C + C^2)). Ferguson (1980).
        covariance_type, n_mix: of a Gaussian or a mixture by name.
        tied: ``(C,)``, the number of each state's emission where states share some: ``[0, 0, 1]``.
        logarithms: the tensors given are log-probabilities.
        backend: as in :class:`~thalweg.inference.LinearChain`.
        method: ``em`` (Baum-Welch) or ``gradient`` (L-BFGS).
        max_iter: at most so many steps.
        tol: stop when log p(x) gains less than this for each observation; -inf never stops early.
        n_restarts: beginnings to try, of which the most likely end is kept.
        floor: the least variance, as a share of the data's.
        pseudo_count: added to every expected count of first states, moves, symbols and parts of mixtures.
        random_state: the seed of all that is drawn.
        warm_start: :meth:`fit` goes on from the parameters that are there, if any.

    Attributes:
        history_: log p(x) before each step; n_iter_: their number; converged_: whether the last gain was below ``tol``.
        degenerate_: a :class:`Trouble` for each state that was never visited or whose variance stands at the floor.

    >>> fair_or_loaded = HMM([0.5, 0.5], [[0.9, 0.1], [0.2, 0.8]], [[1 / 6] * 6, [0.1] * 5 + [0.5]])
    >>> rolls = torch.tensor([[0, 3, 1, 4, 5, 5, 5, 5]])
    >>> fair_or_loaded.viterbi(rolls)[1]
    tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    >>> steps = HMM(n_states=2).fit(np.array([[0.0], [0.2], [5.0], [5.2], [0.1], [0.3]]))
    >>> steps.predict(np.array([[0.1], [5.1]])).tolist() in ([0, 1], [1, 0])
    True
    """

    kinds: Tensor | None
    covariance_type: Covariance
    history_: list[float]
    n_iter_: int
    converged_: bool
    degenerate_: list[Trouble]

    def __init__(
        self,
        initial: Any = None,
        transition: Any = None,
        emission: Any = "gaussian",
        *,
        n_states: int | None = None,
        durations: Any = None,
        covariance_type: Covariance = "diagonal",
        n_mix: int = 2,
        tied: Sequence[int] | None = None,
        logarithms: bool = False,
        backend: str = "auto",
        method: Literal["em", "gradient"] = "em",
        max_iter: int = 100,
        tol: float = 1e-5,
        n_restarts: int = 1,
        floor: float = 1e-6,
        pseudo_count: float = 0.0,
        random_state: int = 0,
        warm_start: bool = False,
    ) -> None:
        super().__init__()
        self.initial, self.transition, self.emission = initial, transition, emission
        self.n_states, self.covariance_type, self.n_mix, self.tied = n_states, covariance_type, n_mix, tied
        self.durations = durations
        self.logarithms, self.backend, self.method = logarithms, backend, method
        self.max_iter, self.tol, self.n_restarts = max_iter, tol, n_restarts
        self.floor, self.pseudo_count = floor, pseudo_count
        self.random_state, self.warm_start = random_state, warm_start
        self._adopt()

    def __setattr__(self, name: str, value: Any) -> None:
        # The emission among the settings is not the one that is fitted.
        object.__setattr__(self, name, value) if name == "emission" else super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        # A property that found no parameters raised what Python takes for a missing attribute.
        if isinstance(getattr(type(self), name, None), property):
            self._check_fitted()
        return super().__getattr__(name)

    def set_params(self, **params: Any) -> Self:
        """Change settings by name; those that say what the model is make it the one given again."""
        super().set_params(**params)
        if _MODEL & params.keys():
            self._adopt()
        return self

    def _adopt(self) -> None:
        """Take the parameters that are given; a model only where all are."""
        self.register_buffer("kinds", None if self.tied is None else kinds_of(self.tied))
        self.states = self.emits = None
        log_initial, moves, emission = self._given()
        if log_initial is not None and moves is not None and emission.size is not None:
            self.states, self.emits = States(log_initial, moves, self._lasting(log_initial.dtype)), emission

    def _lasting(self, dtype: torch.dtype) -> Tensor | None:
        return lasting_of(self.durations, self._size, dtype, self.logarithms)

    def _given(self, detached: bool = False) -> tuple[Tensor | None, Tensor | SparseTransitions | None, Emission]:
        """log pi, log P and the emission as the settings have them, checked and in one type; None where not given."""
        initial = None if self.initial is None else floats("initial", self.initial)
        if initial is not None and (initial.dim() != 1 or not len(initial)):
            raise ShapeError(f"`initial` must be (C,) with C at least 1, got {tuple(initial.shape)}")
        given = self.transition
        moves = given if given is None or isinstance(given, SparseTransitions) else floats("transition", given)
        scores = moves.scores if isinstance(moves, SparseTransitions) else moves
        emission = self._emission(detached)
        types = [x.dtype for x in (initial, scores) if x is not None] + [x.dtype for x in emission.parameters()]
        dtype = torch.get_default_dtype() if not types else types[0]
        for each in types[1:]:
            dtype = torch.promote_types(dtype, each)
        self._check_sizes(initial, moves, emission)
        log_initial = initial if initial is None else row_logarithms("initial", initial.to(dtype), self.logarithms)
        if isinstance(moves, SparseTransitions):
            moves = sparse_logarithms(moves._replace(scores=moves.scores.to(dtype)), self.logarithms)
        elif moves is not None:
            moves = row_logarithms("transition", moves.to(dtype), self.logarithms)
        return log_initial, moves, emission

    def _emission(self, detached: bool) -> Emission:
        given = self.emission
        if isinstance(given, Emission):
            return given
        if isinstance(given, Distribution):
            return DistributionEmission(given)
        if isinstance(given, str):
            if given == "categorical":
                return CategoricalEmission()
            if given == "gaussian":
                return GaussianEmission(covariance_type=self.covariance_type)
            if given == "mixture":
                return MixtureEmission(covariance_type=self.covariance_type, n_mix=self.n_mix)
            raise ConfigError(f"`emission` is unknown: {given!r}; {nearest(given, _KINDS)}")
        table = floats("emission", given)
        return CategoricalEmission(table.detach() if detached else table, logarithms=self.logarithms)

    def _check_sizes(
        self, initial: Tensor | None, moves: Tensor | SparseTransitions | None, emission: Emission
    ) -> None:
        """Note C, and that all agree on it."""
        C, source = (len(initial), "`initial`") if initial is not None else (None, "")
        shape = None
        if moves is not None:
            shape = (moves.size, moves.size) if isinstance(moves, SparseTransitions) else tuple(moves.shape)
            if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1 or shape[0] != (C or shape[0]):
                wanted = f" with C = {C} as in {source}" if C else ""
                raise ShapeError(f"`transition` must be (C, C){wanted}, got {shape}")
            C, source = shape[0], source or "`transition`"
        told = [] if self.n_states is None else [(self.n_states, "`n_states`")]
        told += [] if self.kinds is None else [(len(self.kinds), "`tied`")]
        for count, name in told:
            if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {count!r}")
            if C is not None and count != C:
                raise ShapeError(f"{name} must say C = {C} states as {source}, got {count}")
            C, source = int(count), name
        K = emission.size
        if K is not None:
            wanted = C if self.kinds is None else int(self.kinds.max()) + 1
            if wanted is not None and wanted != K:
                if isinstance(emission, CategoricalEmission):
                    raise ShapeError(f"`emission` must be (C, V) with C = {wanted} as in {source}, got C = {K}")
                raise ShapeError(
                    f"`emission` must have batch shape (C,) = ({wanted},) as {source}, one distribution for each "
                    f"state, got ({K},); see torch.distributions.Independent"
                )
            C = K if C is None else C
        self._size = C

    @property
    def parts(self) -> Parts:
        """States and emissions; a NotFittedError before there are any."""
        if self.states is None or self.emits is None:
            self._check_fitted()
        return Parts(self.states, self.emits, self.kinds, self.backend)  # type: ignore[arg-type]

    def __sklearn_is_fitted__(self) -> bool:
        return self.states is not None

    def fit(self, X: Any, lengths: Any = None, *, observed: Any = None) -> Self:
        """Learn all parameters from observations alone, beginning with those given; returns itself.

        Args:
            X, lengths, observed: in any form that the class describes. The work is done where a tensor lies.

        The likelihood never falls from step to step (EM); a state that was never visited, or whose variance stands at
        the floor, is told of by a warning and in ``degenerate_``. Time O(B T C^2) a step.

        >>> model = HMM([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]], [[0.8, 0.2], [0.2, 0.8]], max_iter=3)
        >>> model.fit(torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0]])).n_iter_
        3
        """
        self._check_settings()
        batch = self._sequences(X, lengths, observed, fitting=True)
        values = batch.values.to(self._device()) if batch.array else batch.values
        log_initial, moves, emission = self._present() or self._given(detached=True)
        dtype = self._type(values, batch.array, emission)
        there = self.states is not None and self.warm_start
        lasting = self.states.log_duration if there else self._lasting(dtype)  # type: ignore[union-attr]
        lasting = None if lasting is None else lasting.detach().to(values.device)
        given = moved(log_initial, values.device), moved(moves, values.device), emission, lasting
        kinds = None if self.kinds is None else self.kinds.to(values.device)
        known = known_of(values, batch.lengths, batch.observed)
        size = self._states_for(known, emission)
        schedule = Schedule(self.max_iter, self.tol, Limits(float(self.pseudo_count), float(self.floor)))
        learn = expectation_maximisation if self.method == "em" else climb
        complete = log_initial is not None and moves is not None and emission.size is not None
        best: tuple[Progress, Parts] | None = None
        for restart in range(1 if complete else self.n_restarts):
            generator = torch.Generator().manual_seed(self.random_state + restart)
            states, emits, data = begin(given, size, kinds, known, batch.lengths, generator)
            for parameter in [*states.parameters(), *emits.parameters()]:
                parameter.data = parameter.data.to(dtype)
            model = Parts(states, emits, kinds, self.backend)
            progress = learn(model, data, schedule)
            if best is None or progress.history[-1] > best[0].history[-1]:
                best = progress, model
        assert best is not None
        self._install(*best)
        return self

    def _present(self) -> tuple[Tensor, Tensor | SparseTransitions, Emission] | None:
        """What is there already, where a fit is to go on from that."""
        if not self.warm_start or self.states is None or self.emits is None:
            return None
        return self.states.log_initial, self.states.log_transition, self.emits

    def _install(self, progress: Progress, model: Parts) -> None:
        self.states, self.emits = model.states, model.emission
        if self.kinds is not None:
            self.kinds = model.kinds
        self.history_, self.n_iter_ = progress.history, len(progress.history)
        self.converged_, self.degenerate_ = progress.converged, progress.troubles
        if progress.troubles:
            said = ", ".join(f"{each.state} ({each.why})" for each in progress.troubles)
            warnings.warn(
                f"degenerate states after fitting: {said}; ask for fewer states, or change `random_state` or `floor`",
                stacklevel=3,
            )

    def _check_settings(self) -> None:
        check_numbers(self, "HMM", 1, COUNT, "max_iter", "n_restarts")
        check_numbers(self, "HMM", -float("inf"), float("inf"), "tol", whole=False)
        check_numbers(self, "HMM", 0, 1, "floor", whole=False, strict=True)
        check_numbers(self, "HMM", 0, COUNT, "pseudo_count", whole=False)
        check_numbers(self, "HMM", 0, SEED - COUNT, "random_state")
        if self.method not in ("em", "gradient"):
            raise ConfigError(f"`method` is unknown: {self.method!r}; {nearest(str(self.method), ('em', 'gradient'))}")

    def _states_for(self, known: Known, emission: Emission) -> int:
        if self._size is None:
            raise ConfigError("`n_states` must be given where nothing else says how many states there are")
        if len(known.values) < self._size:
            raise ShapeError(
                f"`n_states` must be at most the number of observations, got {self._size} states for "
                f"n_samples = {len(known.values)}; ask for fewer, or bring more data"
            )
        parts = getattr(emission, "n_mix", 1)
        if len(known.values) < parts:
            raise ShapeError(
                f"`n_mix` must be at most the number of observations, got {parts} for n_samples = {len(known.values)}; "
                "lower it, or bring more data"
            )
        return self._size

    def _type(self, values: Tensor, array: bool, emission: Emission) -> torch.dtype:
        """The type of the data where it has one, and no less than that of what is given."""
        if values.is_floating_point():
            dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        else:
            dtype = torch.float64 if array else torch.get_default_dtype()
        given = [floats("", x).dtype for x in (self.initial, self.transition) if isinstance(x, Tensor | np.ndarray)]
        for each in [*given, *(x.dtype for x in emission.parameters())]:
            dtype = torch.promote_types(dtype, each)
        return dtype

    def _device(self) -> torch.device:
        return next((x.device for x in self.parameters()), torch.device("cpu"))

    def _sequences(self, X: Any, lengths: Any, observed: Any, *, fitting: bool = False) -> Sequences:
        """X as a padded batch; ``fitting`` notes its width and the names of a frame, otherwise they must be those."""
        if not fitting:
            self._check_fitted()
        emission = self._emission(True) if fitting else self.parts.emission
        names = list(getattr(X, "columns", []))
        batch = read_sequences(X, emission.event_dim, lengths, observed)
        width = batch.values.size(2) if batch.values.dim() > 2 else 1
        noted = self.__dict__.get("n_features_in_")
        if fitting:
            self.n_features_in_ = width
            self.__dict__.pop("feature_names_in_", None)
            if names and all(isinstance(name, str) for name in names):
                self.feature_names_in_ = np.array(names, dtype=object)
        elif noted is not None and width != noted:
            raise ShapeError(
                f"X has {width} features, but {type(self).__name__} is expecting {noted} features as input"
            )
        else:
            own = self.__dict__.get("feature_names_in_")
            if own is not None and names and list(own) != names:
                raise ShapeError("the feature names of X must be those of `fit` in the same order")
        emission.check(tuple(batch.values.shape[2:]))
        return batch

    def _asked(self, X: Any, lengths: Any, observed: Any) -> tuple[Sequences, tuple[Any, ...], dict[str, Any]]:
        batch = self._sequences(X, lengths, observed)
        mask = None if batch.observed is None else batch.observed.to(self._device())
        return batch, (batch.values.to(self._device()), batch.lengths), {"observed": mask}

    def predict(self, X: Any, lengths: Any = None, *, observed: Any = None) -> Any:
        """The most probable states (Viterbi), in the form of X; -1 past a length of a padded batch.

        >>> model = HMM([0.5, 0.5], [[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]])
        >>> model.predict([[0, 1, 1], [0]])
        [array([0, 1, 1]), array([0])]
        """
        batch, where, how = self._asked(X, lengths, observed)
        return batch.like(self.viterbi(*where, **how)[1])

    def predict_proba(self, X: Any, lengths: Any = None, *, observed: Any = None) -> Any:
        """The probabilities of the states given all of a sequence (smoothing), in the form of X with C at the end.

        >>> model = HMM([0.5, 0.5], [[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]])
        >>> model.predict_proba(np.array([[0], [1]]))
        array([[1., 0.],
               [0., 1.]], dtype=float32)
        """
        batch, where, how = self._asked(X, lengths, observed)
        return batch.like(self.smooth(*where, **how))

    def score_samples(self, X: Any, lengths: Any = None, *, observed: Any = None) -> Any:
        """log p(x) of each sequence, ``(B,)``.

        >>> HMM([1.0], [[1.0]], [[0.5, 0.5]]).score_samples(np.array([[0, 1], [1, 1]]))
        array([-1.3862944, -1.3862944], dtype=float32)
        """
        batch, where, how = self._asked(X, lengths, observed)
        with torch.no_grad():
            return batch.like(self.log_likelihood(*where, **how))

    def score(self, X: Any, lengths: Any = None, *, observed: Any = None) -> float:
        """log p(x) of all sequences together.

        >>> round(HMM([1.0], [[1.0]], [[0.5, 0.5]]).score([[0, 1], [1, 1]]), 4)
        -2.7726
        """
        _, where, how = self._asked(X, lengths, observed)
        with torch.no_grad():
            return float(self.log_likelihood(*where, **how).double().sum())

    @property
    def free_parameters(self) -> int:
        """How many numbers a fit chooses: what an information criterion counts."""
        model = self.parts
        return model.states.free_parameters + model.emission.free_parameters

    def bic(self, X: Any, lengths: Any = None, *, observed: Any = None) -> float:
        r"""The Bayesian information criterion, lower is better: -2 log p(x) + k log n for k parameters, n observations.

        >>> round(HMM([1.0], [[1.0]], [[0.5, 0.5]]).bic([[0, 1], [1, 1]]), 4)
        6.9315
        """
        _, where, how = self._asked(X, lengths, observed)
        count = max(1, len(known_of(*where, **how).values))
        return -2 * self.score(X, lengths, observed=observed) + self.free_parameters * math.log(count)

    def aic(self, X: Any, lengths: Any = None, *, observed: Any = None) -> float:
        """Akaike's information criterion, lower is better: -2 log p(x) + 2 k for k parameters.

        >>> round(HMM([1.0], [[1.0]], [[0.5, 0.5]]).aic([[0, 1], [1, 1]]), 4)
        7.5452
        """
        return -2 * self.score(X, lengths, observed=observed) + 2 * self.free_parameters
