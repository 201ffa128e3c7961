"""Kernel machines beside scikit-learn: Gram matrices in blocks, and support vector classifiers, in one run.

    python -m benchmarks kernel_machine --write                  on this CPU
    python -m benchmarks kernel_machine --device cuda --write    Gram matrices on a GPU, scikit-learn on the CPU beside

Gram matrices must agree to 1e-9 in float64, and to 1e-4 in float32. A classifier that libsvm fits must have the support
vectors of scikit-learn's SVC, the same decisions to 1e-6 and the same dual objective; one by its Gram matrix the same
objective to 1e-4. Only then are they timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.harness.declaration import Benchmark, Facts, NothingToCompareError, Run, demand
from benchmarks.harness.report import comparison, heading
from benchmarks.harness.timing import Job
from thalweg.diagnostics import kkt_report
from thalweg.energies import RBF, KernelSVC, Linear, Polynomial, gram

OURS, PEER, SUMMED = "Thalweg", "scikit-learn", "Thalweg, Gram matrix"
GAMMA, C = 0.05, 1.0
GRAM_SIZES, GRAM_TINY = [(2_000, 32), (8_000, 32)], [(60, 4)]
SVC_SIZES, SVC_TINY = [(2_000, 2), (2_000, 10), (8_000, 2)], [(90, 3)]


def find_peer(run: Run) -> Any:
    """scikit-learn, with as many threads as ours."""
    try:
        import sklearn
        from threadpoolctl import threadpool_limits
    except ImportError:
        raise NothingToCompareError(
            "scikit-learn is not installed, nothing is measured; run: pip install scikit-learn"
        ) from None
    threadpool_limits(run.args.threads)
    return sklearn


def kernels() -> dict[str, tuple[Any, Callable[[np.ndarray], np.ndarray]]]:
    """Ours and theirs by name."""
    from sklearn.metrics.pairwise import linear_kernel, polynomial_kernel, rbf_kernel

    return {
        "linear": (Linear(), linear_kernel),
        "polynomial": (Polynomial(3, 1.0, GAMMA), lambda X: polynomial_kernel(X, degree=3, gamma=GAMMA, coef0=1.0)),
        "RBF": (RBF(GAMMA), lambda X: rbf_kernel(X, gamma=GAMMA)),
    }


def gram_part(run: Run) -> Facts:
    """Gram matrices of three kernels in two types, in blocks; scikit-learn makes them whole."""
    cells = []
    for N, D in GRAM_TINY if run.args.quick else GRAM_SIZES:
        wide = np.random.default_rng(0).normal(size=(N, D))
        for dtype, limit in (("float64", 1e-9), ("float32", 1e-4)):
            table = wide.astype(dtype)
            given = torch.from_numpy(table).to(run.args.device)
            for name, (ours, theirs) in kernels().items():
                print(f" gram {name} {dtype} (N, D) = {(N, D)}", flush=True)

                def check(answers: dict[str, Any], name: str = name, limit: float = limit) -> float:
                    mine, other = answers[OURS].cpu().numpy(), answers[PEER]
                    worst = float((np.abs(mine - other) / (1 + np.abs(other))).max())
                    demand(f"{name}, Gram matrix beside scikit-learn's", worst, limit)
                    return worst

                jobs = [
                    Job(OURS, lambda ours=ours, given=given: _waited(gram(ours, given), given)),
                    Job(PEER, lambda theirs=theirs, table=table: theirs(table)),
                ]
                compared = run.compare(jobs, check=check, over=lambda side: (PEER, OURS) if side == OURS else None)
                cell = {"kernel": name, "type": dtype, "size": [N, D], "difference": compared.checked}
                cells.append({**cell, **compared.to_json()})
    return {"gram": cells}


def _waited(answer: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    if given.is_cuda:
        torch.cuda.synchronize()
    return answer


def blobs(N: int, K: int, D: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """K Gaussians that overlap, so that many points are support vectors."""
    rng = np.random.default_rng(0)
    labels = np.arange(N) % K
    return rng.normal(size=(N, D)) + rng.normal(size=(K, D))[labels], labels


def svc_part(run: Run) -> Facts:
    """The same dual by libsvm: natively, by our Gram matrix, and by scikit-learn."""
    from sklearn.svm import SVC

    cells = []
    for N, K in SVC_TINY if run.args.quick else SVC_SIZES:
        print(f" svc N = {N}, {K} classes", flush=True)
        X, y = blobs(N, K)

        def check(answers: dict[str, Any], X: np.ndarray = X, y: np.ndarray = y) -> float:
            mine, summed, other = answers[OURS], answers[SUMMED], answers[PEER]
            if not np.array_equal(mine.support_, other.support_):
                demand("support vectors beside scikit-learn's", float("nan"), 0.0)
            apart = float(np.abs(mine.decision_function(X) - other.decision_function(X)).max())
            demand("decisions beside scikit-learn's", apart, 1e-6)
            duals = [sum(pair.dual for pair in kkt_report(each, X, y).pairs) for each in (mine, summed, other)]
            demand("dual objective by the Gram matrix", abs(duals[1] / duals[2] - 1), 1e-4)
            return apart

        jobs = [
            Job(OURS, lambda X=X, y=y: KernelSVC(RBF(GAMMA), C=C).fit(X, y)),
            Job(SUMMED, lambda X=X, y=y: KernelSVC(1.0 * RBF(GAMMA), C=C).fit(X, y)),
            Job(PEER, lambda X=X, y=y: SVC(kernel="rbf", gamma=GAMMA, C=C, cache_size=500).fit(X, y)),
        ]
        compared = run.compare(jobs, check=check, over=lambda side: (PEER, side) if side != PEER else None)
        cells.append({"size": [N, K], "difference": compared.checked, **compared.to_json()})
    return {"svc": cells}


def report(facts: Facts) -> list[str]:
    """The tables for people."""
    lines = heading(facts, "; every result is compared with scikit-learn's first")
    for name, table in TABLES.items():
        if facts.get(name):
            lines += table(facts[name])
    return lines


def gram_table(cells: list[Facts]) -> list[str]:
    """Gram matrices."""
    worst = {kind: max(cell["difference"] for cell in cells if cell["type"] == kind) for kind in ("float64", "float32")}
    return [
        "## Gram matrices, ms",
        "",
        "Median and quartiles; in bold how many times faster than scikit-learn. They agree to "
        f"{worst['float64']:.0e} in float64 and {worst['float32']:.0e} in float32.",
        "",
        *comparison(
            cells,
            ["kernel", "type", "points", "dimensions"],
            lambda cell: [cell["kernel"], cell["type"], *(f"{count:,}" for count in cell["size"])],
        ),
    ]


def svc_table(cells: list[Facts]) -> list[str]:
    """Classifiers."""
    return [
        "## Support vector classifiers by libsvm, RBF, 20 dimensions: `fit`, ms",
        "",
        "Median and quartiles; in bold how many times faster than scikit-learn. The support vectors are the same, "
        f"decisions agree to {max(cell['difference'] for cell in cells):.0e}. Thalweg hands this kernel to libsvm as "
        "it is; kernels that libsvm does not know go by their Gram matrix, as in the other column.",
        "",
        *comparison(cells, ["points", "classes"], lambda cell: [f"{count:,}" for count in cell["size"]]),
    ]


# A part is a function of a run that gives cells under its name, and a table of these cells.
PARTS = {"gram": gram_part, "svc": svc_part}
TABLES = {"gram": gram_table, "svc": svc_table}
BENCHMARK = Benchmark(parts=PARTS, begin=find_peer, report=report, budget=20.0, packages=("scikit-learn",))
