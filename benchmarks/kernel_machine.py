"""Kernel machines beside scikit-learn: Gram matrices in blocks, classifiers and their decisions, in one run.

    python -m benchmarks kernel_machine --write                  on this CPU
    python -m benchmarks kernel_machine --device cuda --write    Gram matrices on a GPU, scikit-learn on the CPU beside

Gram matrices must agree to 1e-9 in float64, and to 1e-4 in float32. A classifier that libsvm fits must have the support
vectors of scikit-learn's SVC, the same decisions to 1e-6 and the same dual objective; one by its Gram matrix the same
objective to 1e-4; the dual of many points within 1e-3 of scikit-learn's. Only then are they timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.harness.declaration import Benchmark, Facts, Run, demand
from benchmarks.harness.report import comparison, heading
from benchmarks.harness.timing import Job
from thalweg.diagnostics import kkt_report
from thalweg.energies import RBF, KernelSVC, Linear, Polynomial, gram, solve_dual

OURS, PEER, SUMMED = "Thalweg", "scikit-learn", "Thalweg, Gram matrix"
GAMMA, C = 0.05, 1.0
GRAM_SIZES, GRAM_TINY = [(2_000, 32), (8_000, 32)], [(60, 4)]
# Beyond so many points scikit-learn is not waited for.
SOLVER_SIZES, SOLVER_TINY, LIBSVM_MOST = [20_000], [300], 20_000
SVC_SIZES, SVC_TINY = [(2_000, 2), (2_000, 10), (8_000, 2)], [(90, 3)]


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


def _waited(answer: Any, given: torch.Tensor) -> Any:
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


def predict_part(run: Run) -> Facts:
    """Decisions of the same machine on as many points as it was fitted on: by torch in blocks, and by libsvm."""
    from sklearn.svm import SVC

    cells = []
    for N, K in SVC_TINY if run.args.quick else SVC_SIZES:
        print(f" predict N = {N}, {K} classes", flush=True)
        X, y = blobs(N, K)
        mine, other = KernelSVC(RBF(GAMMA), C=C).fit(X, y), SVC(kernel="rbf", gamma=GAMMA, C=C).fit(X, y)

        def check(answers: dict[str, Any]) -> float:
            apart = float(np.abs(answers[OURS] - answers[PEER]).max())
            demand("decisions beside scikit-learn's", apart, 1e-6)
            return apart

        jobs = [
            Job(OURS, lambda mine=mine, X=X: mine.decision_function(X)),
            Job(PEER, lambda other=other, X=X: other.decision_function(X)),
        ]
        compared = run.compare(jobs, check=check, over=lambda side: (PEER, OURS) if side == OURS else None)
        cells.append({"size": [N, K], "difference": compared.checked, **compared.to_json()})
    return {"predict": cells}


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


def predict_table(cells: list[Facts]) -> list[str]:
    """Decisions."""
    return [
        "## Decisions of these classifiers on as many points, ms",
        "",
        "Median and quartiles; in bold how many times faster than scikit-learn. Decisions agree to "
        f"{max(cell['difference'] for cell in cells):.0e}.",
        "",
        *comparison(cells, ["points", "classes"], lambda cell: [f"{count:,}" for count in cell["size"]]),
    ]


def solver_part(run: Run) -> Facts:
    """Many points: the dual to a gap of a thousandth, by the solver that never holds the Gram matrix."""
    from sklearn.svm import SVC

    cells = []
    sizes = SOLVER_SIZES + [200_000] * (run.args.device != "cpu")
    for N in SOLVER_TINY if run.args.quick else sizes:
        print(f" solver N = {N}", flush=True)
        X, y = noisy(N)
        gamma = 1 / (X.shape[1] * X.var())
        given = torch.from_numpy(X).to(run.args.device)
        kernel, most = RBF(float(gamma)), {}

        def check(answers: dict[str, Any], problem: Any = (kernel, given, y), most: dict[str, Any] = most) -> float:
            kernel, given, y = problem
            mine, other = answers[OURS], answers.get(PEER)
            most |= {"gap": mine.gap / mine.objective, "steps": mine.steps, "support": int((mine.alpha > 0).sum())}
            demand("relative gap", most["gap"], 1e-3)
            if other is None:
                return 0.0
            # Both by the same sums, in float64.
            alpha = np.zeros(len(y))
            alpha[other.support_] = np.abs(other.dual_coef_[0])
            duals = [dual_of(kernel, given, y, each) for each in (mine.alpha.double().cpu().numpy(), alpha)]
            demand("dual objective beside scikit-learn's", abs(duals[0] / duals[1] - 1), 1e-3)
            return abs(duals[0] / duals[1] - 1)

        t = torch.from_numpy(y).to(given)
        jobs = [
            Job(OURS, lambda k=kernel, g=given, t=t: _waited(solve_dual(k, k.prepare(g), t, torch.full_like(t, C)), g))
        ]
        if N <= LIBSVM_MOST:
            jobs.append(Job(PEER, lambda X=X, y=y, g=gamma: SVC(kernel="rbf", gamma=g, C=C, cache_size=500).fit(X, y)))
        compared = run.compare(jobs, check=check, over=lambda side: (PEER, OURS) if side == OURS else None)
        cells.append({"size": [N, X.shape[1]], "difference": compared.checked, **most, **compared.to_json()})
    return {"solver": cells}


def noisy(N: int) -> tuple[np.ndarray, np.ndarray]:
    """Eight clusters in 20 dimensions with 15 % of the labels wrong, in float32; labels 1 and -1."""
    from sklearn.datasets import make_classification

    X, y = make_classification(
        N, 20, n_informative=10, n_redundant=0, n_clusters_per_class=4, class_sep=0.5, flip_y=0.3, random_state=0
    )
    return X.astype(np.float32), np.where(y > 0, 1.0, -1.0)


def dual_of(kernel: Any, X: torch.Tensor, y: np.ndarray, alpha: np.ndarray) -> float:
    """The dual's value, in float64."""
    X, weights = X.double(), torch.from_numpy(alpha * y).to(X.device)
    held = weights.nonzero().squeeze(1)
    sums = torch.cat([kernel(X[held[i : i + 2048]], X[held]) @ weights[held] for i in range(0, len(held), 2048)])
    return float(alpha.sum() - weights[held] @ sums / 2)


def solver_table(cells: list[Facts]) -> list[str]:
    """Many points."""
    return [
        "## Many points, RBF, 20 dimensions, C = 1: the dual to a gap of a thousandth, ms",
        "",
        "Median and quartiles; in bold how many times faster than scikit-learn, whose objective differs by at most "
        f"{max(cell['difference'] for cell in cells):.0e} of it. 15 % of the labels are wrong.",
        "",
        *comparison(
            cells,
            ["points", "support vectors", "steps", "gap"],
            lambda cell: [f"{cell['size'][0]:,}", f"{cell['support']:,}", str(cell["steps"]), f"{cell['gap']:.1e}"],
        ),
    ]


# A part is a function of a run that gives cells under its name, and a table of these cells.
PARTS = {"gram": gram_part, "svc": svc_part, "predict": predict_part, "solver": solver_part}
TABLES = {"gram": gram_table, "svc": svc_table, "predict": predict_table, "solver": solver_table}
BENCHMARK = Benchmark(
    parts=PARTS,
    begin=lambda run: run.only_peer("sklearn.svm", "scikit-learn"),
    report=report,
    budget=20.0,
    packages=("scikit-learn",),
)
