"""Thalweg beside its peers, a file or folder for each capability: ``python -m benchmarks`` lists them."""
