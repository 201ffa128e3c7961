"""Mixtures of Gaussians: the model, EM and where it begins, missing values, how many components."""
