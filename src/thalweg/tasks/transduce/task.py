"""The task of turning strings into strings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from thalweg.data import Alphabet, Symbols, pad
from thalweg.errors import ConfigError
from thalweg.tasks.base import Exported, Shown, Task
from thalweg.tasks.runs import RunLog, TrainResult
from thalweg.tasks.transduce.answers import Prediction
from thalweg.tasks.transduce.codec import Codec
from thalweg.tasks.transduce.config import TransduceConfig
from thalweg.tasks.transduce.models import build_model
from thalweg.tasks.transduce.presets import PRESETS
from thalweg.tasks.transduce.search_settings import SearchConfig
from thalweg.tasks.transduce.transducer import Transducer, load

if TYPE_CHECKING:
    from thalweg.tasks.transduce.evaluation import PairEvaluation
    from thalweg.tasks.transduce.report import StringReport
    from thalweg.tasks.transduce.serving import StringServant
    from thalweg.tasks.transduce.subject import PairSubject


SEARCH = {field.name for field in dataclasses.fields(SearchConfig)} - {"sampling_seed"} | {"seed"}


class Transduction(Task):
    """Strings to strings, from pairs; methods that are not described are as :class:`~thalweg.tasks.base.Task` says.

    >>> TASK.configure({"model": {"family": "transformer", "heads": 2}}).model.positions
    'sinusoidal'
    """

    name = "transduce"
    about = "strings to strings, from pairs"
    noun = "transduction"
    items = "pairs"
    kind = TransduceConfig
    data = "data.train"
    missing = "no training data; give `--data train.tsv`, or a config file with `data: {train: ...}`"
    presets = PRESETS
    default_model = "auto"
    takes = frozenset(SEARCH) | {
        *("ensemble", "vote", "precision", "references"),
        *("text", "features", "unknown", "attention", "tree", "batch_size"),
    }

    def with_default(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """As they are: the config's own model is the default one, and words may still name another family."""
        return settings

    def data_settings(self, data: str | None, dev: str | None) -> dict[str, str]:
        """Training and dev pairs."""
        return {key: value for key, value in ((self.data, data), ("data.dev", dev)) if value is not None}

    def fit(self, config: TransduceConfig, log: RunLog, root: Path | None) -> TrainResult:
        """Train on pairs of strings."""
        from thalweg.tasks.transduce.training import fit

        return fit(config, log, root)

    def load(self, run: str | Path, *, device: str = "auto", precision: str = "float32", **options: Any) -> Transducer:
        """The best model, or all of an ensemble as one; on the CPU with ``precision`` ``bf16`` or ``int8``."""
        from thalweg.tasks.transduce.ensembles import open_runs

        self.check_options(options)
        return open_runs([run], device=device, precision=precision)

    def evaluate(self, run: str | Path, data: str | None = None, **options: Any) -> PairEvaluation:
        """Measure on a TSV file or ``NAME:SPLIT``; see :func:`~thalweg.tasks.transduce.evaluation.evaluate`."""
        from thalweg.tasks.transduce.evaluation import evaluate

        if data is None:
            raise ConfigError("no test pairs; give a file: `thalweg evaluate RUN test.tsv`")
        return evaluate(run, data, **self._searching(options))

    def predict(self, run: str | Path, inputs: Any = (), **options: Any) -> Iterator[Prediction]:
        """Answer the lines of a file; see :func:`~thalweg.tasks.transduce.prediction.predict_lines`."""
        from thalweg.tasks.transduce.prediction import predict_lines

        return predict_lines(run, inputs, **self._searching(options))

    def export(self, run: str | Path, out: str | Path, *, layout: str, **options: Any) -> Exported:
        """As ONNX files; see :func:`~thalweg.tasks.transduce.onnx_export.export_onnx`."""
        from thalweg.tasks.transduce.onnx_export import export_onnx

        if layout != "onnx":
            return super().export(run, out, layout=layout)
        return export_onnx(run, out, **options)

    def _searching(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with those of a search as ``how``."""
        given = {key: value for key, value in options.items() if key in SEARCH}
        rest = {key: value for key, value in options.items() if key not in SEARCH}
        if "seed" in given:
            given["sampling_seed"] = given.pop("seed")
        how = rest.pop("how", None)
        if given and how is not None:
            raise ConfigError(f"give the search as `how`, or its settings, got both (`{next(iter(given))}`)")
        if rest.get("vote") and not rest.get("ensemble"):
            raise ConfigError("--vote needs other runs to vote with; add `--ensemble RUN2`")
        return {**rest, "how": given if how is None else how}

    def serving(self, run: str | Path, *, device: str = "auto") -> StringServant:
        """Words as they come, with any search that needs no file."""
        transducer = self.load(run, device=device)

        def searching(**given: Any) -> SearchConfig:
            if "seed" in given:
                given["sampling_seed"] = given.pop("seed")
            return transducer.settled(given)

        takes = self.takes & (SEARCH - {"lexicon"} | {"attention", "unknown"}) | {"k"}
        return self._servant()(transducer, searching, takes=takes, run=run)

    def _servant(self) -> type[StringServant]:
        from thalweg.tasks.transduce.serving import StringServant

        return StringServant

    def next_steps(self, run: str) -> list[str]:
        """A test file, a word, and a page for any number of them."""
        use = [f"thalweg evaluate {run} test.tsv", f"thalweg predict {run} --k 5 --text WORD"]
        return [*use, f"thalweg serve {run}"]

    def report(self) -> StringReport:
        """Answers, attention, confusions and the worst errors."""
        from thalweg.tasks.transduce.report import StringReport

        return StringReport()

    def subject(self, config: TransduceConfig | None, run: Path | None = None, **options: Any) -> PairSubject:
        """A transducer with pairs to run it on."""
        from thalweg.tasks.transduce.subject import open_pairs_subject

        return open_pairs_subject(config, run, **options)

    def example(self, config: TransduceConfig, run: Path | None = None, **sizes: Any) -> Shown:
        """A model with a source and a target of ``length`` symbols, for ``symbols`` a side where there is no run."""
        if run is not None:
            trained = load(run, device="cpu")
            model, side = trained.model, trained.target
            assert isinstance(model, nn.Module)
        else:
            side = Codec(Symbols(), Alphabet.build([[str(n)] for n in range(sizes.get("symbols", 40))]))
            model = build_model(config, side, side)
        length = sizes.get("length", 10)
        row = pad([[side.alphabet.unk] * (length - 1)], end=side.alphabet.eos)
        return Shown(model, (row, row), f"a source and a target of {length} symbols")


TASK = Transduction()
"""The task."""
