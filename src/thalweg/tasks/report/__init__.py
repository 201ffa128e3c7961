"""The report of a run: one self-contained HTML page made from the files in its directory."""

from __future__ import annotations

from pathlib import Path

from thalweg.errors import DataError
from thalweg.tasks.report.page import write_page
from thalweg.tasks.report.parts import commands, config_section, header, results, training
from thalweg.tasks.report.run import RunRecord, read_run
from thalweg.tasks.report.text import foreign

__all__ = ["write_report"]


def write_report(run: Path) -> Path:
    """Writes ``run/report.html`` and returns its path.

    Reads `config.yaml`, `log.jsonl` and `evaluation/*/` of the run and nothing else, so it needs neither the
    model nor the data; where one of them is absent or damaged, the page says so. The page loads nothing from
    elsewhere, runs no script, and depends on those files alone: the same run gives the same page. It is
    replaced in one step, so a reader never sees half a page.

    Raises:
        DataError: `run` is not a directory.

    Time is linear in the size of the files (predictions are streamed), plus some 30 ms for each curve.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_report(Path(folder)).read_text(encoding="utf-8")
    >>> "This run has not been evaluated yet" in page
    True
    """
    run = Path(run)
    if not run.is_dir():
        raise DataError(
            f"{run}: expected a run directory, got {'a file' if run.exists() else 'nothing there'}; "
            "give the directory that `thalweg train --out` wrote."
        )
    record = read_run(run)
    return write_page(run / "report.html", record.name, _body(record))


def _body(record: RunRecord) -> str:
    numbered = list(enumerate(record.evaluations, start=1))
    answers = "".join(record.part.section(evaluation, place) for place, evaluation in numbered)
    links = [("results", "Results"), ("training", "Training")]
    links = [f'<a href="#{target}">{name}</a>' for target, name in links]
    links += [f'<a href="#evaluation-{place}">{foreign(each.name)}</a>' for place, each in numbered]
    links += ['<a href="#commands">Commands</a>', '<a href="#config">Configuration</a>']
    return (
        f"{header(record)}<nav>{''.join(links)}</nav><main>{results(record)}{training(record.log)}{answers}"
        f"{commands(record)}{config_section(record)}</main>"
    )
