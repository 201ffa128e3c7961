"""What is the answer? Exact inference over chains, and search over autoregressive energies behind one protocol.

>>> import torch
>>> from thalweg.inference import TableModel, greedy
>>> coin = TableModel.markov([[0.4, 0.6], [0.1, 0.9]], bos=0, eos=1, logarithms=False)
>>> greedy(coin, torch.zeros(1, dtype=torch.long), max_length=5).finished
tensor([[True]])
"""

from __future__ import annotations

from thalweg.inference.cccp import Descent, NotMonotoneError, cccp
from thalweg.inference.langevin import DivergedError, Walk, langevin
from thalweg.inference.search.beam.search import beam_search
from thalweg.inference.search.beam.tree import BeamTree
from thalweg.inference.search.constraints import Allowed, NoRepeat, Trie, Without
from thalweg.inference.search.ensemble import Ensemble, Vote, majority_vote
from thalweg.inference.search.exact import OptimalityReport, exact_search, optimality_report
from thalweg.inference.search.greedy import greedy
from thalweg.inference.search.loops import Loop, loop_at_end
from thalweg.inference.search.markov import MarkovModel, viterbi
from thalweg.inference.search.protocol import Autoregressive, Hypotheses
from thalweg.inference.search.risk import minimum_bayes_risk
from thalweg.inference.search.sampling import sample_sequences
from thalweg.inference.search.stochastic import Drawn, stochastic_beam_search
from thalweg.inference.search.streaming import Partial, stream
from thalweg.inference.search.table import TableModel
from thalweg.inference.structures.alignment import Alignment
from thalweg.inference.structures.base import Structure
from thalweg.inference.structures.chain import LinearChain
from thalweg.inference.structures.ctc import CTC, CTCLabellings
from thalweg.inference.structures.semi_markov import Segment, SemiMarkov
from thalweg.inference.structures.sparsemap import SparseMode, sparse_map, sparse_map_loss
from thalweg.inference.structures.tag_schemes import TagConstraints, tag_constraints, tag_spans
from thalweg.inference.variational.bounds import cyclic_anneal, elbo, free_bits, importance_bound, linear_anneal
from thalweg.inference.variational.expectations import expectation, leave_one_out
from thalweg.kernels.potentials import SparseTransitions

__all__ = [
    "CTC",
    "Alignment",
    "Allowed",
    "Autoregressive",
    "BeamTree",
    "CTCLabellings",
    "Descent",
    "DivergedError",
    "Drawn",
    "Ensemble",
    "Hypotheses",
    "LinearChain",
    "Loop",
    "MarkovModel",
    "NoRepeat",
    "NotMonotoneError",
    "OptimalityReport",
    "Partial",
    "Segment",
    "SemiMarkov",
    "SparseMode",
    "SparseTransitions",
    "Structure",
    "TableModel",
    "TagConstraints",
    "Trie",
    "Vote",
    "Walk",
    "Without",
    "beam_search",
    "cccp",
    "cyclic_anneal",
    "elbo",
    "exact_search",
    "expectation",
    "free_bits",
    "greedy",
    "importance_bound",
    "langevin",
    "leave_one_out",
    "linear_anneal",
    "loop_at_end",
    "majority_vote",
    "minimum_bayes_risk",
    "optimality_report",
    "sample_sequences",
    "sparse_map",
    "sparse_map_loss",
    "stochastic_beam_search",
    "stream",
    "tag_constraints",
    "tag_spans",
    "viterbi",
]
