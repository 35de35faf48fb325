"""Compare training thousands of small models together with a loop over scikit-learn.

    CONSILIENCE_DATA=FOLDER python benchmarks/many_sites.py

Prints Markdown tables and writes them to benchmarks/many_sites.md. scikit-learn is timed on a
sample of sites that have two classes or more (it refuses the others) and extrapolated to all; runs
of both are interleaved and medians taken. Processor time is shown beside elapsed time: on a busy
machine only the former can be compared.
"""

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

import numba
import numpy as np
import pandas as pd
import sklearn
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from consilience.learners.batch import SiteProblems, solve_many
from consilience.learners.erm import (
    HuberHinge,
    Logistic,
    Problem,
    PublicFacts,
    Softmax,
    gradient_error,
    solve,
)
from pages import write_page

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("CONSILIENCE_DATA", ROOT / "data"))
STRENGTH = 1e-4
SITES = (20_000, 1_000)  # of KDD 99 and of HAR
SAMPLE = 100  # sites on which peers are timed and answers compared
REPEATS = 7
ENOUGH = 1e-6  # how close a peer's coefficients must come to count
PEERS = [
    {"solver": "lbfgs"},
    {"solver": "newton-cg"},
    {"solver": "newton-cholesky"},
    {"solver": "liblinear"},
    {"solver": "liblinear", "dual": True},
]
TOLERANCES = [1e-4, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12]
# The services of the full KDD 99 training set; four of them do not occur in its 10 percent.
SERVICES = (
    "IRC X11 Z39_50 aol auth bgp courier csnet_ns ctf daytime discard domain domain_u echo eco_i "
    "ecr_i efs exec finger ftp ftp_data gopher harvest hostnames http http_2784 http_443 "
    "http_8001 imap4 iso_tsap klogin kshell ldap link login mtp name netbios_dgm netbios_ns "
    "netbios_ssn netstat nnsp nntp ntp_u other pm_dump pop_2 pop_3 printer private red_i "
    "remote_job rje shell smtp sql_net ssh sunrpc supdup systat telnet tftp_u tim_i time urh_i "
    "urp_i uucp uucp_path vmnet whois"
).split()
# Public upper bounds of the attributes that count something; all other numbers are rates or flags
# in [0, 1].
BOUNDS = {
    "duration": 6e4,
    "src_bytes": 1.4e9,
    "dst_bytes": 1.4e9,
    "wrong_fragment": 3,
    "urgent": 14,
    "hot": 101,
}
BOUNDS |= {
    "num_failed_logins": 5,
    "num_compromised": 7479,
    "su_attempted": 2,
    "num_root": 7468,
    "num_shells": 5,
}
BOUNDS |= {
    "num_file_creations": 100,
    "num_access_files": 9,
    "num_outbound_cmds": 1,
    "count": 511,
    "srv_count": 511,
}
BOUNDS |= {"dst_host_count": 255, "dst_host_srv_count": 255}


def into_unit_ball(X):
    return np.ascontiguousarray(X / np.maximum(1, np.linalg.norm(X, axis=1))[:, None])


def kdd(n_sites, size):
    """38 numbers, 3 protocols, the services, 11 flags and a constant; normal against attack."""
    table = pd.read_parquet(DATA / "kdd99.parquet").query("split == 'train_10pct'")
    table = table.sample(n_sites * size, random_state=0)
    categories = {"protocol_type": ["icmp", "tcp", "udp"], "service": SERVICES}
    categories["flag"] = [
        "OTH",
        "REJ",
        "RSTO",
        "RSTOS0",
        "RSTR",
        "S0",
        "S1",
        "S2",
        "S3",
        "SF",
        "SH",
    ]
    columns = []
    for name in table.columns.drop(["label", "split"]):
        if name in categories:
            columns += [table[name].to_numpy() == value for value in categories[name]]
        elif name in BOUNDS:
            columns.append(np.log1p(table[name].clip(0, BOUNDS[name])) / np.log1p(BOUNDS[name]))
        else:
            columns.append(table[name].clip(0, 1))
    X = np.column_stack([*columns, np.ones(len(table))]).astype(np.float64)
    return into_unit_ball(X), np.where(table.label == "normal", -1.0, 1.0)


def har(n_sites, size):
    """50 principal components of the features that could be rebuilt; 6 activities."""
    table = pd.read_parquet(DATA / "har.parquet").query("split == 'train'")
    X = table.iloc[:, -561:]
    X = X.drop(
        columns=[name for name in X.columns if name.startswith("tGravityAcc-arCoeff")]
    ).to_numpy(np.float64)
    X = X - X.mean(axis=0)
    X = into_unit_ball(X @ np.linalg.eigh(X.T @ X)[1][:, :-51:-1])
    chosen = np.random.default_rng(0).permutation(len(X))[: n_sites * size]
    return np.ascontiguousarray(X[chosen]), table.activity.to_numpy()[chosen].astype(np.int64) - 1


def clocks(function):
    wall, processor = time.perf_counter(), time.process_time()
    result = function()
    return (time.perf_counter() - wall, time.process_time() - processor), result


def medians(pairs):
    return tuple(statistics.median(pair[i] for pair in pairs) for i in (0, 1))


def fit_peers(settings, tolerance, lam, sample):
    learner = LogisticRegression(
        C=1 / lam, fit_intercept=False, tol=tolerance, max_iter=100_000, **settings
    )
    # copies of the coefficients only: one learner refitted spares scikit-learn the construction
    return [learner.fit(X, y).coef_.copy() for X, y in sample]


def fastest_peer(lam, sample, answers, several_classes):
    """Return lines about each solver at its loosest sufficient tolerance, and the fastest."""
    lines, best = [], None
    for settings in PEERS[:3] if several_classes else PEERS:
        name = settings["solver"] + (" (dual)" if "dual" in settings else "")
        for tolerance in TOLERANCES:
            times, coefs = clocks(lambda s=settings, t=tolerance: fit_peers(s, t, lam, sample))
            off = max(
                np.abs(mine - theirs).max() for mine, theirs in zip(answers, coefs, strict=True)
            )
            if off <= ENOUGH:
                break
        per_site = 1e3 * times[1] / len(sample)
        lines.append(
            f"| {name} | {tolerance:g} | {off:.1e} | {per_site:.2f} "
            f"|{' misses' if off > ENOUGH else ''} |"
        )
        if off <= ENOUGH and (best is None or times[1] < best[0]):
            best = times[1], name, settings, tolerance
    return lines, best


def first_calls():
    """Return the seconds of the first call in a new process, compiling and then from the cache."""
    code = (
        "import time, numpy as np; from consilience.learners.erm import Logistic; begin = "
        "time.perf_counter();c = time.process_time(); from consilience.learners.batch import "
        "SiteProblems, solve_many; solve_many(np.zeros((2, 3)), np.ones(2), "
        "SiteProblems(Logistic(), np.zeros(2, int), n_sites=1, regularization=1.0, "
        "tolerance=1e-6)); print(time.perf_counter() - begin, "
        "time.process_time() - c)"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder}
        run = [sys.executable, "-c", code]
        return [
            [
                float(word)
                for word in subprocess.run(
                    run, env=environment, check=True, capture_output=True
                ).stdout.split()
            ]
            for _ in range(2)
        ]


def measure(name, X, y, loss, n_sites, size):
    d, lam = X.shape[1], STRENGTH * size
    facts = {"n_records": size, "n_features": d, "regularization": lam, "tolerance": 1e-8 * lam}
    tolerance = max(1e-8 * lam, 8 * gradient_error(PublicFacts(loss, **facts)))
    sites = np.repeat(np.arange(n_sites), size)

    def ours(n_threads):
        how = {"sites": sites, "n_sites": n_sites, "regularization": lam, "tolerance": tolerance}
        return solve_many(X, y, SiteProblems(loss, **how), n_threads=n_threads)

    found = ours(1)
    rows = [slice(size * site, size * (site + 1)) for site in range(n_sites)]
    # The oracle: the solver that takes one site at a time, which also knows sites of one class.
    step = max(1, n_sites // (3 * SAMPLE))
    exact = {
        j: solve(X[rows[j]], y[rows[j]], Problem(loss, regularization=lam), tolerance=tolerance)
        for j in range(0, n_sites, step)
    }
    off = max(np.abs(found.coef[j] - one.coef).max() for j, one in exact.items())
    single = sum(len(np.unique(y[rows[j]])) == 1 for j in exact)
    several = [j for j in range(n_sites) if len(np.unique(y[rows[j]])) > 1][
        :: max(1, n_sites // SAMPLE)
    ][:SAMPLE]
    sample = [(X[rows[j]], y[rows[j]]) for j in several]
    lines = []
    if isinstance(loss, HuberHinge):
        peer_name = "erm.solve in a loop (scikit-learn has no such loss)"

        def theirs() -> list:
            return [
                solve(A, b, Problem(loss, regularization=lam), tolerance=tolerance)
                for A, b in sample
            ]
    elif loss.n_outputs == 1:
        lines, best = fastest_peer(lam, sample, [found.coef[j] for j in several], False)
        peer_name = f"scikit-learn {best[1]}, tol={best[3]:g}"

        def theirs() -> list:
            return fit_peers(best[2], best[3], lam, sample)
    else:
        # Few sites hold all classes and scikit-learn fits those it sees, so its coefficients cannot
        # be compared; it has less to do and gets the tolerance that sufficed for two classes.
        peers = {
            s["solver"]: clocks(lambda s=s: fit_peers(s, 1e-8, lam, sample))[0][1]
            for s in PEERS[:3]
        }
        fastest = min(peers, key=peers.get)
        peer_name = f"scikit-learn {fastest}, tol=1e-08"
        theirs = lambda: fit_peers({"solver": fastest}, 1e-8, lam, sample)  # noqa: E731
    ours(None), theirs()
    runs = [
        (clocks(lambda: ours(1))[0], clocks(lambda: ours(None))[0], clocks(theirs)[0])
        for _ in range(REPEATS)
    ]
    one, all_cores, peer = (medians([run[i] for run in runs]) for i in range(3))
    peer = tuple(value * n_sites / len(sample) for value in peer)
    tracemalloc.start()
    ours(None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    row = (
        f"| {name} | {type(loss).__name__} | {n_sites:,} × {size} × {d} | {one[0]:.3f} | "
        f"{one[1]:.3f} | {all_cores[0]:.3f} | {peer_name} | {peer[0]:.1f} | {peer[1]:.1f} | "
        f"**{peer[1] / one[1]:.0f}** | {peer[0] / all_cores[0]:.0f} | {off:.1e} ({single} of "
        f"{len(exact)}) | {found.gradient_norm.max() / tolerance:.2f} | {len(found.alone)} | "
        f"{(peak - found.coef.nbytes) / 1e6:.0f} + {found.coef.nbytes / 1e6:.0f} |"
    )
    return row, lines


def main():
    if not all((DATA / name).exists() for name in ("kdd99.parquet", "har.parquet")):
        print(
            "Nothing was measured: set CONSILIENCE_DATA to the folder with kdd99.parquet and "
            "har.parquet."
        )
        return 0
    warnings.simplefilter("ignore")
    (cold, cold_cpu), (cached, _) = first_calls()
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    X, y = kdd(SITES[0], 22)
    with threadpool_limits(1):
        logistic, peers = measure("KDD 99", X, y, Logistic(), SITES[0], 22)
        hinge, _ = measure("KDD 99", X, y, HuberHinge(), SITES[0], 22)
        softmax, _ = measure("HAR", *har(SITES[1], 6), Softmax(6), SITES[1], 6)
    load = max(load, os.getloadavg()[0])
    text = f"""# Many small sites at once

`CONSILIENCE_DATA=… python benchmarks/many_sites.py`, Python {platform.python_version()}, \
NumPy {np.__version__}, numba {numba.__version__}, scikit-learn {sklearn.__version__}, \
{cores} cores, load average up to {load:.0f}.

No intercept, Λ = {STRENGTH:g}, so λ = {STRENGTH:g} n. Ours stops at a certified gradient of 1e-8 λ
or the rounding floor. scikit-learn is timed on {SAMPLE} sites and extrapolated. The ratio in bold
compares processor time, one thread each; the next one elapsed time, ours on all cores. Differences
are the largest in any coefficient against `erm.solve` site by site, in brackets how many of these
sites hold one class only. Memory is the peak beyond the records, workspace + answer, in MB.

| data | loss | sites × records × features | ours, 1 thread, s | … processor s \
| ours, all cores, s | peer | peer, s | … processor s | ratio | elapsed ratio \
| largest difference | largest gradient / tolerance | solved alone \
| memory, MB |
|---|---|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|
{logistic}
{hinge}
{softmax}

First call in a new process: {cold:.1f} s ({cold_cpu:.1f} s of processor time) while it compiles, \
{cached:.1f} s once the compiled code is on disk.

## scikit-learn on the logistic rows, \
at the loosest tolerance that comes within {ENOUGH:g} of the answer

| solver | tol | largest difference | processor ms per site | |
|---|---:|---:|---:|---|
""" + "\n".join(peers)
    print(text)
    write_page(ROOT / "benchmarks" / "many_sites.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
