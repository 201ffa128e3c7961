"""Exact inference: the contract of structures, and one module for each."""
