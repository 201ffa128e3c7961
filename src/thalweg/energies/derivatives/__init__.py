"""Derivatives of a sequence's log-likelihood in the parameters of a mixture or a hidden Markov model."""
