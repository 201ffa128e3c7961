"""What is counted of a service, for Prometheus; with several processes, of all of them together."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

if TYPE_CHECKING:
    from thalweg.serve.library import Library

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable that names the folder in which processes share their counts; the client reads it."""

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Meters:
    """Counters and histograms by model.

    >>> meters = Meters()
    >>> meters.request("demo", 3, 0.01)
    >>> b'thalweg_inputs_total{model="demo"} 3.0' in meters.exposition()[0]
    True
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = {"labelnames": ("model",), "registry": self.registry}
        self._requests = Counter("thalweg_requests", "Requests answered", **own)
        self._inputs = Counter("thalweg_inputs", "Inputs answered", **own)
        self._seconds = Histogram("thalweg_request_seconds", "From request to answer", buckets=_SECONDS, **own)
        self._batches = Histogram("thalweg_batch_inputs", "Inputs answered together", buckets=_COUNTS, **own)
        self._computing = Counter("thalweg_computing_seconds", "Time that the model computed", **own)
        self._own: dict[str, tuple[Counter, Counter, Histogram]] = {}
        self._waiting = Gauge("thalweg_waiting_inputs", "Inputs in the queue", multiprocess_mode="livesum", **own)

    def watch(self, library: Library) -> None:
        """Show the queues of a library, and every model from the start."""
        for name, shelf in library.shelves.items():
            for meter in (self._requests, self._inputs, self._computing):
                meter.labels(name)
            if FOLDER not in os.environ:  # values shared through files cannot be asked for
                self._waiting.labels(name).set_function(lambda batcher=shelf.batcher: batcher.waiting)

    def request(self, model: str, inputs: int, seconds: float) -> None:
        """Count a request that was answered."""
        if model not in self._own:  # to look a label up takes longer than to count
            self._own[model] = self._requests.labels(model), self._inputs.labels(model), self._seconds.labels(model)
        requests, asked, taken = self._own[model]
        requests.inc()
        asked.inc(inputs)
        taken.observe(seconds)

    def batch(self, model: str, inputs: int, seconds: float) -> None:
        """Count a batch that was computed."""
        self._batches.labels(model).observe(inputs)
        self._computing.labels(model).inc(seconds)

    def exposition(self) -> tuple[bytes, str]:
        """All figures as Prometheus reads them, and what kind of text that is."""
        if FOLDER not in os.environ:
            return generate_latest(self.registry), CONTENT_TYPE_LATEST
        everything = CollectorRegistry()
        MultiProcessCollector(everything)
        return generate_latest(everything), CONTENT_TYPE_LATEST
