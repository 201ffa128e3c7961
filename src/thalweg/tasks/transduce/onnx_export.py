"""A run as ONNX files: two graphs, the alphabets and the search beside them, verified before they are given."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

import thalweg
from thalweg.data import Symbols
from thalweg.data.text.named_pairs import open_pairs
from thalweg.energies.onnx.building import build_graphs
from thalweg.energies.onnx.graph import package
from thalweg.energies.onnx.sequences import Graphs
from thalweg.errors import ConfigError, ThalwegError
from thalweg.files import write_atomically
from thalweg.inference import Hypotheses
from thalweg.learning.checkpoint import MODEL
from thalweg.tasks.base import Exported
from thalweg.tasks.runs import Listener, opened
from thalweg.tasks.transduce import onnx_runner
from thalweg.tasks.transduce.answers import Source
from thalweg.tasks.transduce.config import TransduceConfig
from thalweg.tasks.transduce.models import longest_answer
from thalweg.tasks.transduce.onnx_runner import Found, Runner
from thalweg.tasks.transduce.search_settings import SearchConfig, SearchName
from thalweg.tasks.transduce.training import read_splits
from thalweg.tasks.transduce.transducer import Transducer, load, members_of

ALIKE = 1e-4
"""How far log-probabilities may be apart; beyond ten nats a hundred-thousandth of them."""

FILES = {
    "encoder.onnx": "source symbols to memory and first state",
    "step.onnx": "a symbol and a state to log-probabilities and the next state",
    "model.json": "alphabets, names of tensors, search settings",
    "runner.py": "greedy and beam search with numpy and onnxruntime alone",
}


def export_onnx(
    run: str | Path,
    out: str | Path,
    *,
    data: str | None = None,
    text: Sequence[str] = (),
    root: Path | None = None,
    listener: Listener | None = None,
) -> Exported:
    """Write a run's model as ONNX files, once its answers are those of the run.

    Args:
        out: the folder that gets the files.
        data: pairs whose sources are compared; the run's own dev data by default.
        text: words to compare instead.
        root: folder of known data sets.

    >>> export_onnx("absent", "onnx")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent/model.safetensors: expected a checkpoint, got no such file; ...
    """
    if (count := len(members_of(run))) > 1:
        raise ConfigError(f"ONNX export is of one model, got an ensemble of {count}; name one: {Path(run) / MODEL}")
    transducer = load(run, device="cpu")
    for name in ("onnx", "onnxruntime"):
        package(name)
    for side in (transducer.source, transducer.target):
        if not isinstance(side.symbols, Symbols):
            raise ConfigError(f"ONNX export is of characters, graphemes and spaced symbols, got {side.symbols}")
    assert isinstance(transducer.model, nn.Module)
    graphs = build_graphs(transducer.model)
    sources, of = _sources(run, data, text, root)
    files = _files(transducer, graphs)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        compared = verify(transducer, Runner(folder), sources, listener=listener)
    for name, content in files.items():
        write_atomically(Path(out) / name, content)
    said = (
        f"verified on {compared.items:,} sources of {of}: greedy and beam {compared.width} give the same symbols, "
        f"log-probabilities differ by {compared.apart:.1g} at most"
    )
    if compared.ties:
        said += f"; {compared.ties} ties within {ALIKE:g} stand in another order"
    return Exported(Path(out), {Path(out) / name: about for name, about in FILES.items()}, said)


def _files(transducer: Transducer, graphs: Graphs) -> dict[str, bytes]:
    limit = longest_answer(transducer.model, transducer.longest)
    causal = bool(getattr(transducer.model, "causal", False))
    if graphs.reach is not None and not causal:
        limit = min(limit, graphs.reach)
    settings: dict[str, Any] = {
        "version": thalweg.__version__,
        "source": transducer.source.to_json(),
        "target": transducer.target.to_json(),
        "special": transducer.target.special,
        "memory": graphs.memory,
        "state": graphs.state,
        "reach": graphs.reach,
        "in_a_row": causal,
        "max_length": limit,
        "search": {"name": "beam", "width": transducer.usual.width},
    }
    runner = Path(onnx_runner.__file__).read_bytes()
    text = json.dumps(settings, ensure_ascii=False, indent=2) + "\n"
    graph = {"encoder.onnx": graphs.encoder.SerializeToString(), "step.onnx": graphs.step.SerializeToString()}
    return {**graph, "model.json": text.encode(), "runner.py": runner}


def _sources(run: str | Path, data: str | None, text: Sequence[str], root: Path | None) -> tuple[list[Source], str]:
    """What answers are compared on, and what to call it."""
    if text and data is not None:
        raise ConfigError(f"give --data or --text, got both (`{data}` and `{text[0]}`)")
    if text:
        return [Source(word) for word in text], "--text"
    if data is not None:
        pairs = open_pairs(data, root)
    else:
        with opened(run, "transduction", TransduceConfig) as (_, config):
            pass
        pairs = read_splits(config, root)[1]
    return [Source(*asked) for asked in pairs.questions()], pairs.path


@dataclass(frozen=True)
class Compared:
    """What a comparison found: items, the beam's width, the largest difference, and ties in another order.

    >>> Compared(10, 5, 1e-6).ties
    0
    """

    items: int
    width: int
    apart: float
    ties: int = 0


def verify(
    transducer: Transducer, runner: Runner, sources: Sequence[Source], *, listener: Listener | None = None
) -> Compared:
    """Compare greedy and beam search of both on every source; a difference is an error that names the first.

    Symbols must be equal and log-probabilities :data:`ALIKE`; two hypotheses that are as near to one another may change
    places.

    >>> verify(load("english", device="cpu"), Runner("absent"), [])
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: english/model.safetensors: expected a checkpoint, got no such file; ...
    """
    rows = [transducer.source.encode(source.text, source.features) for source in sources]
    rows = [row for row in rows if row]
    if not rows:
        raise ConfigError("expected sources to compare answers on, got none; give --data or --text")
    width, limit = transducer.usual.width, int(runner.settings["max_length"])
    found: list[_Apart] = []
    searches: list[tuple[int, SearchName]] = [(1, "greedy"), (width, "beam")]
    for k, search in searches:
        how = SearchConfig(search=search, width=k, max_length=limit)
        for first in range(0, len(rows), 256):
            group = rows[first : first + 256]
            ours, theirs = _found(transducer.search(group, k=k, how=how)), runner.search(group, k=k, width=k)
            for row, own, other in zip(group, ours, theirs, strict=True):
                found.append(_difference(own, other))
                if found[-1].share > 1:
                    raise _otherwise(transducer, row, own, other, how.search)
            if listener is not None:
                listener({"event": "predicted", "done": first + len(group), "of": len(rows)})
    return Compared(len(rows), width, max(each.nats for each in found), sum(each.tied for each in found))


def _found(hypotheses: Hypotheses) -> list[list[Found]]:
    """Hypotheses as the runner has them."""
    columns = (hypotheses.scores.tolist(), hypotheses.finished.tolist())
    return [
        [Found(tuple(said), score, ended) for said, score, ended in zip(each, *own, strict=False)]
        for each, *own in zip(hypotheses.sequences(), *columns, strict=True)
    ]


def _otherwise(
    transducer: Transducer, row: Sequence[int], ours: Sequence[Found], theirs: Sequence[Found], search: str
) -> ThalwegError:
    shown = [
        " | ".join(f"{transducer.target.decode(one.tokens)} ({one.log_prob:.5f})" for one in x) for x in (ours, theirs)
    ]
    return ThalwegError(
        f"the exported model answers `{transducer.source.decode(row)}` otherwise by {search} search: expected "
        f"{shown[0]}, got {shown[1]}; keep the run and report this"
    )


class _Apart(NamedTuple):
    """How far two lists are apart: in nats, as a share of what is allowed, and whether ties changed places."""

    nats: float
    share: float
    tied: bool = False


def _difference(ours: Sequence[Found], theirs: Sequence[Found]) -> _Apart:
    """Rank by rank; infinitely far where symbols differ."""
    if len(ours) != len(theirs):
        return _Apart(math.inf, math.inf)
    pairs = list(zip(ours, theirs, strict=True))
    nats = max((abs(a.log_prob - b.log_prob) for a, b in pairs), default=0.0)
    share = max((_share(a, b) for a, b in pairs), default=0.0)
    if all(a.tokens == b.tokens for a, b in pairs):
        return _Apart(nats, share)
    # The scores agree rank by rank. The symbols too, up to places; the last may be another that is as good.
    same = {one.tokens: one for one in ours}
    alike = all(_share(same.get(one.tokens, ours[-1]), one) <= 1 for one in theirs)
    missing = sum(one.tokens not in same for one in theirs)
    return _Apart(nats, share, tied=True) if alike and missing <= 1 else _Apart(math.inf, math.inf)


def _share(a: Found, b: Found) -> float:
    return abs(a.log_prob - b.log_prob) / (ALIKE * max(1.0, abs(a.log_prob) / 10))
