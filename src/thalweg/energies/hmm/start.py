"""Where learning begins: what was given, and the rest from the data."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from thalweg.energies.hmm.emissions import Emission, Limits, carries_graph
from thalweg.energies.hmm.fitting import Data, Parts
from thalweg.energies.hmm.inference import prepared_of
from thalweg.energies.hmm.sequences import Known
from thalweg.energies.hmm.states import States
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.structures.chain import LinearChain
from thalweg.kernels.potentials import SparseTransitions

# No state begins narrower than a share of the data, or a few points would hold it; and nothing begins at 0, where it
# would stay.
_BEGIN = Limits(pseudo_count=1e-3, floor=0.1)


def begin(
    given: tuple[Tensor | None, Tensor | SparseTransitions | None, Emission, Tensor | None],
    size: int,
    kinds: Tensor | None,
    known: Known,
    lengths: Tensor | None,
    generator: torch.Generator,
) -> tuple[States, Emission, Data]:
    """The states and a copy of the emission to start from, in float64 where they come from the data.

    An emission without parameters begins with those of a grouping of the data: along the sequence where states follow
    one another, by a path drawn from the given chain where it has zeros, else by the emission's own guess. Then what is
    not given of the chain begins with the moves of that grouping, unevenly, for states that share an emission must
    differ in something.

    Args:
        given: log pi, log P, the emission, and log p(d | state) (C, K) or None; None for what is not given.
        size: C; kinds: ``(C,)``, the emission of each state, or None.
        known, lengths: the data.
        generator: on the CPU.

    >>> from thalweg.energies.hmm.gaussian import GaussianEmission
    >>> from thalweg.energies.hmm.sequences import known_of
    >>> x = torch.tensor([[[0.0], [0.1], [5.0], [5.1]]])
    >>> found = begin((None, None, GaussianEmission(), None), 2, None, known_of(x, None, None), None, torch.Generator())
    >>> found[1].means.detach().flatten().sort().values
    tensor([0.0500, 5.0500], dtype=torch.float64)
    """
    log_initial, moves, emission, lasting = given
    if emission.fitted_by_em and carries_graph(emission):
        raise ConfigError("`emission` must be detached for `fit`, got tensors that are part of a graph")
    values = known.values
    if emission.fitted_by_em and emission.event_dim and known.present is None and bool((values == values[0]).all()):
        raise ShapeError(
            f"X has one distinct point in {len(values)} sample(s), and a density needs at least two; pass more"
        )
    if emission.fitted_by_em:  # what was given stays as it is, and where it is
        emission = copy.deepcopy(emission).to(known.values.device)
    emission.adopt(known.values, known.present)
    prepared = prepared_of(emission, known)
    count = size if kinds is None else int(kinds.max()) + 1
    if emission.size is None:
        labels = _along(log_initial, _staying(moves, lasting), size, known, lengths, generator)
        if labels is None:
            shares = emission.guess(prepared, count, generator)
        else:
            labels = labels if kinds is None else kinds[labels]
            shares = emission.spread(prepared, nn.functional.one_hot(labels, count).double(), generator)
        emission.maximise(emission.statistics(prepared, shares), _BEGIN)
    if log_initial is None or moves is None:
        with torch.no_grad():
            scores = Parts(_none(), emission, kinds).densities(emission.parts(prepared)).double()
        first, pairs = _counted(known.place(scores.softmax(-1)), generator)
        log_initial = (first / first.sum()).log() if log_initial is None else log_initial
        if lasting is not None and size > 1:  # how long a state lasts is told by its duration
            pairs.fill_diagonal_(0.0)
        moves = (pairs / pairs.sum(1, keepdim=True)).log() if moves is None else moves
    return States(log_initial.detach(), _detached(moves), lasting), emission, Data(known, prepared, lengths)


def _staying(moves: Tensor | SparseTransitions | None, lasting: Tensor | None) -> Tensor | SparseTransitions | None:
    """Moves from position to position of states that last, roughly; scores, not probabilities."""
    if moves is None or lasting is None:
        return moves
    dense = (moves.dense() if isinstance(moves, SparseTransitions) else moves).detach().clone()
    return dense.fill_diagonal_(math.log(lasting.size(1)))


def _none() -> States:
    return States(torch.zeros(1), torch.zeros(1, 1))


def _detached(moves: Tensor | SparseTransitions) -> Tensor | SparseTransitions:
    return moves._replace(scores=moves.scores.detach()) if isinstance(moves, SparseTransitions) else moves.detach()


def _counted(shares: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """First states (C,) and moves (C, C) of (B, T, C) responsibilities, at least 1 each, times 0.5 ... 1.5."""
    C = shares.size(2)
    noise = torch.rand(C + 1, C, generator=generator, dtype=torch.float64).to(shares.device) + 0.5
    pairs = shares[:, :-1].flatten(0, 1).t() @ shares[:, 1:].flatten(0, 1)
    return (shares[:, 0].sum(0) + 1) * noise[0], (pairs + 1) * noise[1:]


def _along(
    log_initial: Tensor | None,
    moves: Tensor | SparseTransitions | None,
    size: int,
    known: Known,
    lengths: Tensor | None,
    generator: torch.Generator,
) -> Tensor | None:
    """A state for each known observation where zeros of the given chain say in which order states come, else None."""
    if moves is None:
        return None
    dense = (moves.dense() if isinstance(moves, SparseTransitions) else moves).detach().cpu()
    allowed = ~torch.isneginf(dense)
    if bool(allowed.all()):
        return None
    B, T = known.shape
    counts = torch.full((B,), T) if lengths is None else lengths.cpu()
    if not bool(allowed.tril(-1).any()):  # never back: as long in each as in any other
        paths = (torch.arange(T) * size // counts.unsqueeze(1)).clamp(max=size - 1)
    else:
        start = torch.zeros(size, dtype=dense.dtype) if log_initial is None else log_initial.detach().cpu()
        prior = LinearChain(dense.new_zeros(B, T, size), dense, start=start, lengths=counts)
        paths = prior.sample(generator=generator).clamp(min=0)
    flat = paths.flatten().to(known.values.device)
    return flat if known.where is None else flat[known.where]
