"""What is the answer? Exact inference over chains, and search over autoregressive energies behind one protocol.

>>> import torch
>>> from thalweg.inference import TableModel, greedy
>>> coin = TableModel.markov([[0.4, 0.6], [0.1, 0.9]], bos=0, eos=1, logarithms=False)
>>> greedy(coin, torch.zeros(1, dtype=torch.long), max_length=5).finished
tensor([[True]])
"""

from __future__ import annotations

from thalweg.inference.beam import Allowed, beam_search
from thalweg.inference.chain import LinearChain
from thalweg.inference.hypotheses import Autoregressive, Hypotheses
from thalweg.inference.markov import MarkovModel, viterbi
from thalweg.inference.search import greedy, sample_sequences
from thalweg.inference.structure import Structure
from thalweg.inference.table import TableModel
from thalweg.inference.tag_schemes import TagConstraints, span_tags, tag_constraints, tag_spans
from thalweg.kernels.potentials import SparseTransitions

__all__ = [
    "Allowed",
    "Autoregressive",
    "Hypotheses",
    "LinearChain",
    "MarkovModel",
    "SparseTransitions",
    "Structure",
    "TableModel",
    "TagConstraints",
    "beam_search",
    "greedy",
    "sample_sequences",
    "span_tags",
    "tag_constraints",
    "tag_spans",
    "viterbi",
]
