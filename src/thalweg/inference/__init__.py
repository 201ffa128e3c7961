"""What is the answer? Exact inference over chains, and search over autoregressive energies behind one protocol.

>>> import torch
>>> from thalweg.inference import TableModel, greedy
>>> coin = TableModel.markov([[0.4, 0.6], [0.1, 0.9]], bos=0, eos=1, logarithms=False)
>>> greedy(coin, torch.zeros(1, dtype=torch.long), max_length=5).finished
tensor([[True]])
"""

from __future__ import annotations

from thalweg.inference.beam import beam_search
from thalweg.inference.beam_tree import BeamTree
from thalweg.inference.cccp import Descent, NotMonotoneError, cccp
from thalweg.inference.chain import LinearChain
from thalweg.inference.constraints import Allowed, Trie
from thalweg.inference.ensemble import Ensemble, Vote, majority_vote
from thalweg.inference.exact import OptimalityReport, exact_search, optimality_report
from thalweg.inference.hypotheses import Autoregressive, Hypotheses
from thalweg.inference.langevin import DivergedError, Walk, langevin
from thalweg.inference.markov import MarkovModel, viterbi
from thalweg.inference.risk import minimum_bayes_risk
from thalweg.inference.sampling import sample_sequences
from thalweg.inference.search import greedy
from thalweg.inference.sparsemap import SparseMode, sparse_map, sparse_map_loss
from thalweg.inference.stochastic import Drawn, stochastic_beam_search
from thalweg.inference.streaming import Partial, stream
from thalweg.inference.structure import Structure
from thalweg.inference.table import TableModel
from thalweg.inference.tag_schemes import TagConstraints, span_tags, tag_constraints, tag_spans
from thalweg.kernels.potentials import SparseTransitions

__all__ = [
    "Allowed",
    "Autoregressive",
    "BeamTree",
    "Descent",
    "DivergedError",
    "Drawn",
    "Ensemble",
    "Hypotheses",
    "LinearChain",
    "MarkovModel",
    "NotMonotoneError",
    "OptimalityReport",
    "Partial",
    "SparseMode",
    "SparseTransitions",
    "Structure",
    "TableModel",
    "TagConstraints",
    "Trie",
    "Vote",
    "Walk",
    "beam_search",
    "cccp",
    "exact_search",
    "greedy",
    "langevin",
    "majority_vote",
    "minimum_bayes_risk",
    "optimality_report",
    "sample_sequences",
    "span_tags",
    "sparse_map",
    "sparse_map_loss",
    "stochastic_beam_search",
    "stream",
    "tag_constraints",
    "tag_spans",
    "viterbi",
]
