"""Kernel machines: kernels as objects, large-margin classifiers and regressors, and certificates of the optimum."""
