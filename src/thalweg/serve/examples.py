"""Answers as they look, for the OpenAPI description; those to what is asked are beside each request."""

from __future__ import annotations

from typing import Any

_ANSWER = {"text": "M AY", "log_prob": -0.815, "probability": 0.443, "share": 1.0, "finished": True, "optimal": True}
_RECORD = {"source": "my", "answers": [_ANSWER], "unknown": []}

PREDICTED = {"model": "demo", "records": [_RECORD], "milliseconds": 2.1}

GROWN = {
    "model": "demo",
    "source_symbols": ["m", "y"],
    "nodes": [
        {"id": 0, "parent": None, "symbol": "", "score": 0.0, "fate": "kept", "step": 0},
        {"id": 1, "parent": 0, "symbol": "M", "score": -0.11, "fate": "kept", "step": 1},
        {"id": 2, "parent": 0, "symbol": "EH", "score": -4.905, "fate": "dropped", "step": 1},
        {"id": 3, "parent": 1, "symbol": "AY", "score": -0.72, "fate": "kept", "step": 2},
        {"id": 4, "parent": 3, "symbol": "</s>", "score": -0.815, "fate": "finished", "step": 3},
    ],
    "best": [0, 1, 3, 4],
    "exact": {"symbols": ["M", "AY"], "log_prob": -0.815, "optimal": True},
}

INFERRED = {
    "log_partition": 3.301,
    "free_log_partition": 4.197,
    "marginals": [[0.881, 0.119], [1.0, 0.0], [0.378, 0.622]],
    "best": [
        {"labels": [0, 0, 1], "score": 2.7, "probability": 0.548},
        {"labels": [0, 0, 0], "score": 2.2, "probability": 0.333},
    ],
    "samples": [[1, 0, 1], [1, 0, 1], [0, 0, 1]],
    "entropy": 1.028,
}

MEASURED = """event: records
data: [{"source": "my", "answers": [{"text": "M AY", "log_prob": -0.815, "probability": 0.443, "share": 1.0, \
"finished": true, "optimal": true}], "unknown": [], "references": ["M AY"], "correct": true, "edits": 0}]

event: progress
data: {"done": 1, "of": 1}

event: scores
data: {"items": 1, "scores": {"wer": {"name": "WER", "value": 0.0, "low": 0.0, "high": 0.0, "n": 1, \
"higher_is_better": false}}}

event: done
data: {"items": 1}
"""


def answered(example: Any, kind: str = "application/json") -> dict[str, Any]:
    """What OpenAPI says of an answer.

    >>> answered(PREDICTED)["responses"]["200"]["content"]["application/json"]["example"]["model"]
    'demo'
    """
    return {"responses": {"200": {"content": {kind: {"example": example}}}}}
