"""Compare fit times with scikit-learn's on the same arrays: of a whole `fit`, and of the solver.

    CONSILIENCE_DATA=FOLDER python benchmarks/fit_time.py

Prints two Markdown tables and writes them to benchmarks/fit_time.md. Both sides use one BLAS
thread. Their runs are interleaved and the median is taken, so that a busy machine slows both alike.
A whole fit is everything between the arrays and the guarantee: checks, calibration, noise, solving,
closing. The solver alone stops at a mean gradient of 1e-9, scikit-learn at its default tolerance.
"""

import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import scipy
import sklearn
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from consilience import PrivateLogisticRegression
from consilience.learners.erm import (
    HuberHinge,
    Logistic,
    Problem,
    Softmax,
    certified_gradient,
    solve,
)
from pages import write_page

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("CONSILIENCE_DATA", ROOT / "data"))
STRENGTHS = [1e-2, 1e-3, 1e-4]
SIZES = (8_678, 346_598)  # records of MNIST 3/7 and of Covertype 1/2
REPEATS = (25, 5)
SITE = 789  # records of MNIST 3/7 at one of eleven sites
FIRST = (5, 5, 3)  # new processes for the first fit in one, of SITE and SIZES
KINDS = {
    "objective": {"mechanism": "objective"},
    "objective, no intercept": {"mechanism": "objective", "fit_intercept": False},
    "gradient, δ = 1e-6": {"mechanism": "gradient", "delta": 1e-6},
}
ABOUT = (
    "`PrivateLogisticRegression(epsilon=1, regularization=Λ).fit(X, y)` beside "
    "`LogisticRegression(C=1/(nΛ)).fit(X, y)`, whose default solver is lbfgs. Ratios are medians "
    "over pairs of runs, one after the other in one process that has fitted before. The last "
    "columns are processor times of the first fit in a new process, after its imports."
)
WHOLE = (
    "| data | n | d | Λ | mechanism | fit, ms | lbfgs, ms | ratio | of processor times "
    "| first fit, ms | first lbfgs, ms |\n"
    "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|"
)
SOLVER = (
    "## The solver alone\n\n"
    "No intercept; tolerance: mean gradient 1e-9. scikit-learn knows no noise vector b and fits "
    "without.\n\n"
    "| data | loss | n | d | Λ | ‖b‖ | ours, s | peer | peer, s | ratio | ours, mean gradient "
    "| peer, mean gradient | extra memory / data |\n"
    "|---|---|---:|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|"
)


def into_unit_ball(X):
    return np.ascontiguousarray(X / np.maximum(1, np.linalg.norm(X, axis=1))[:, None])


def principal(X, n_components):
    centred = X - X.mean(axis=0)
    return centred @ np.linalg.eigh(centred.T @ centred)[1][:, : -n_components - 1 : -1]


def mnist():
    table = pd.read_parquet(DATA / "mnist.parquet").query("split == 'train'")
    pixels = np.frombuffer(b"".join(table.pixels), np.uint8).reshape(-1, 784) / 255
    return pixels, table.label.to_numpy(np.int64)


def threes_and_sevens(pixels, digit):
    chosen = np.random.default_rng(0).permutation(np.flatnonzero((digit == 3) | (digit == 7)))[
        : SIZES[0]
    ]
    return into_unit_ball(principal(pixels[chosen], 50)), np.where(digit[chosen] == 3, 1.0, -1.0)


def covertype():
    table = pd.read_parquet(DATA / "covertype.parquet").query("Cover_Type <= 2")
    table = table.sample(SIZES[1], random_state=0)
    X = table.drop(columns="Cover_Type").to_numpy(float)
    low, high = X.min(axis=0), X.max(axis=0)
    return into_unit_ball((X - low) / np.maximum(high - low, 1)), np.where(
        table.Cover_Type == 1, 1.0, -1.0
    )


def seconds(function):
    begin = time.perf_counter()
    result = function()
    return time.perf_counter() - begin, result


def row(name, X, y, loss, strength, noise, repeats):
    n, d = X.shape
    lam = n * strength
    shape = (d,) if loss.n_outputs == 1 else (loss.n_outputs, d)
    b = np.random.default_rng(1).normal(size=shape)
    b *= noise / np.linalg.norm(b)

    def ours(loss=loss):
        return solve(X, y, Problem(loss, regularization=lam, linear=b), tolerance=1e-9 * n)

    def scikit_learn():
        return LogisticRegression(solver="lbfgs", fit_intercept=False, C=1 / lam).fit(X, y)

    # Nobody else solves the Huber-hinge: our own logistic regression, on the same records and
    # noise, stands in.
    theirs = (lambda: ours(Logistic())) if isinstance(loss, HuberHinge) else scikit_learn
    ours(), theirs()
    runs = [(seconds(ours), seconds(theirs)) for _ in range(repeats)]
    (_, solution), (_, peer) = runs[-1]
    mine = statistics.median(run[0][0] for run in runs)
    other = statistics.median(run[1][0] for run in runs)
    if isinstance(loss, HuberHinge):
        peer_name, peer_gradient = "our Logistic", f"{peer.gradient_norm / n:.1e}"
    else:
        coef = peer.coef_.reshape(shape)
        peer_name = "scikit-learn" + (", b = 0" if noise else "")
        gradient = certified_gradient(X, y, Problem(loss, regularization=lam), coef)
        peer_gradient = f"{np.linalg.norm(gradient) / n:.1e}"
    tracemalloc.start()
    ours()
    extra = tracemalloc.get_traced_memory()[1] / X.nbytes
    tracemalloc.stop()
    return (
        f"| {name} | {type(loss).__name__} | {n:,} | {d} | {strength:g} | {noise:g} | {mine:.4f} "
        f"| {peer_name} | {other:.4f} | {mine / other:.2f} | {solution.gradient_norm / n:.1e} | "
        f"{peer_gradient} | {extra:.2f} |"
    )


def private(X, y, strength, kind):
    return PrivateLogisticRegression(epsilon=1.0, regularization=strength, **KINDS[kind]).fit(X, y)


def lbfgs(X, y, strength, kind):
    intercept = KINDS[kind].get("fit_intercept", True)
    return LogisticRegression(C=1 / (len(X) * strength), fit_intercept=intercept).fit(X, y)


def timed(fit, *given):
    """Return elapsed and processor seconds."""
    begin, used = time.perf_counter(), time.process_time()
    fit(*given)
    return time.perf_counter() - begin, time.process_time() - used


def first_fits(X, y, strength, kind, processes):
    """Return the processor time of the first fit in new processes, ours and lbfgs, in ms."""
    if not processes:
        return "", ""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.npz"
        np.savez(file, X=X, y=y)
        command = [sys.executable, str(Path(__file__).resolve())]
        medians = []
        for fit in (private, lbfgs):
            call = [*command, fit.__name__, str(file), repr(strength), kind]
            runs = [
                float(subprocess.run(call, check=True, capture_output=True, text=True).stdout)
                for _ in range(processes)
            ]
            medians.append(f"{1e3 * statistics.median(runs):.2f}")
    return medians


def whole_row(name, X, y, strength, kind, repeats, processes):
    given = X, y, strength, kind
    timed(private, *given), timed(lbfgs, *given)
    pairs = [(timed(private, *given), timed(lbfgs, *given)) for _ in range(repeats)]
    mine, other = (1e3 * statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
    ratio, used = (statistics.median(pair[0][i] / pair[1][i] for pair in pairs) for i in (0, 1))
    first = strength == STRENGTHS[0] and KINDS[kind].get("fit_intercept", True)
    cold = first_fits(*given, processes if first else 0)
    return (
        f"| {name} | {len(X):,} | {X.shape[1]} | {strength:g} | {kind} | {mine:.2f} | {other:.2f} "
        f"| {ratio:.2f} | {used:.2f} | {cold[0]} | {cold[1]} |"
    )


def whole_rows(binary):
    (name, X, y, repeats), *_ = binary
    tables = [(f"{name}, a site", X[:SITE].copy(), y[:SITE], 2 * repeats), *binary]
    for (label, rows, signs, times), processes in zip(tables, FIRST, strict=True):
        for kind in KINDS:
            for strength in STRENGTHS:
                yield whole_row(label, rows, signs, strength, kind, times, processes)


def solver_rows(binary, pixels, digit):
    for name, X, y, repeats in binary:
        for loss, noise in [
            (Logistic(), 0),
            (Logistic(), 1500),
            (HuberHinge(), 0),
            (HuberHinge(), 1500),
        ]:
            for strength in STRENGTHS:
                yield row(name, X, y, loss, strength, noise, repeats)
    X = into_unit_ball(principal(pixels, 50))
    for strength in STRENGTHS:
        yield row("MNIST", X, digit, Softmax(10), strength, 0, REPEATS[1])


def main():
    if not (DATA / "mnist.parquet").exists() or not (DATA / "covertype.parquet").exists():
        print(
            "Nothing was measured: set CONSILIENCE_DATA to the folder with mnist.parquet and "
            "covertype.parquet."
        )
        return 0
    warnings.simplefilter("ignore")  # scikit-learn may stop at its limit of 100 iterations
    pixels, digit = mnist()
    binary = [
        ("MNIST 3/7", *threes_and_sevens(pixels, digit), REPEATS[0]),
        ("Covertype 1/2", *covertype(), REPEATS[1]),
    ]
    lines = [
        "# Fit time, one BLAS thread",
        "",
        "`CONSILIENCE_DATA=… python benchmarks/fit_time.py`, "
        f"Python {platform.python_version()}, NumPy {np.__version__}, SciPy {scipy.__version__}, "
        f"scikit-learn {sklearn.__version__}. λ = nΛ. Times are medians of interleaved runs.",
        "",
        "## A whole fit",
        "",
        ABOUT,
        "",
    ]
    print("\n".join(lines), flush=True)
    with threadpool_limits(1):
        for header, lines_of in (
            (WHOLE, whole_rows(binary)),
            (SOLVER, solver_rows(binary, pixels, digit)),
        ):
            for line in itertools.chain(header.split("\n"), lines_of, [""]):
                print(line, flush=True)
                lines.append(line)
    write_page(ROOT / "benchmarks" / "fit_time.md", "\n".join(lines).rstrip())
    return 0


def first_fit(name, file, strength, kind):
    """Print the processor seconds of the first fit in this process."""
    warnings.simplefilter("ignore")
    records = np.load(file)
    with threadpool_limits(1):
        fit = {each.__name__: each for each in (private, lbfgs)}[name]
        print(timed(fit, records["X"], records["y"], float(strength), kind)[1])
    return 0


if __name__ == "__main__":
    sys.exit(first_fit(*sys.argv[1:]) if len(sys.argv) > 1 else main())
