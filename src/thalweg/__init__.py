"""Thalweg: deep structured learning in PyTorch.

Write down an energy E(x, y); get the best answer, the k best, samples and gradients; train, measure and use it.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
