"""Densities of tables of numbers: mixtures, hidden Markov models, variational autoencoders; what is unusual."""
