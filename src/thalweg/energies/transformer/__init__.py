"""Transformers: model, cache, and the programs that search them on CPU and GPU."""
