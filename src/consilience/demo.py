"""Six made-up hospitals learn one classifier together: the whole story on this machine, in about a minute.

A study, six sites with a ledger and a key each, every one in a process of its own, a hub over HTTP,
one site that joins late and one that trains again, a signed release that is fetched and checked,
and the honest baselines beside it. The patients do not exist: `cohort` computes them from a fixed
public formula, chosen so that joining can help; whether it helps with other records is what
`consilience.plan` is for. Noise is real and unseeded, so the guarantees hold, and every run differs
a little.
"""

from __future__ import annotations

import html
import math
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
from numpy.typing import NDArray
from sklearn.base import clone

from consilience.errors import HubUnavailable, SettingsError
from consilience.evaluation.baselines import (
    ALTERNATIVES,
    BEST,
    EXACT,
    LOCAL,
    OWN,
    PUBLIC,
    public_only,
)
from consilience.evaluation.compare import Joining, paired_gap
from consilience.evaluation.measures import evaluate
from consilience.files.certificate import of_release
from consilience.files.release import Release
from consilience.learners.linear import PrivateLogisticRegression
from consilience.privacy.guarantee import Budget
from consilience.privacy.mechanisms import Noise
from consilience.site.site import Site
from consilience.study.records import file_digest
from consilience.study.study import Study
from consilience.tables.public import Public

Array = NDArray[Any]

STUDY = "readmission"
DATASET = "patients"
COORDINATOR = "anna"
N_PUBLIC, N_TEST = 100, 6_000
REGULARIZATION = 1e-3
SECONDS_TO_START = 60.0


@dataclass(frozen=True)
class Hospital:
    """A made-up hospital: how many patients, what it lets a training cost, and whom it treats."""

    name: str
    n_records: int
    epsilon: float
    case_mix: str  # what its patients have more of than others'


HOSPITALS = (
    Hospital("Northgate", 8000, 0.1, "cardiac"),
    Hospital("St Anne", 5000, 0.2, "old"),
    Hospital("Riverside", 3500, 0.15, "surgical"),
    Hospital("Hill Clinic", 2000, 0.4, "young"),
    Hospital("Lakeside", 1000, 0.5, "medical"),
    Hospital("Coast General", 700, 0.8, "cardiac"),  # joins late
)
AGAIN = "Lakeside"  # trains a second time and supersedes its first contribution
LATE = "Coast General"

STUDY_TEXT = """\
# What the six hospitals agreed on. Check it with: consilience study check study.toml
[study]
name = "readmission"
purpose = "Tell on discharge who is likely to come back within 30 days. The patients are made up."

[privacy]
neighbours = "replace-one"
epsilon_min = 0.1
epsilon_max = 3.0
min_sites = 3
hub = "untrusted"

[learner]
name = "PrivateLogisticRegression"
regularization = {regularization}

[aggregator]
name = "PublicBlend"

[schema]
label = "readmitted"
classes = ["no", "yes"]
{columns}
[public]
file = "public.csv"
sha256 = "{public}"

[test]
file = "test.csv"
sha256 = "{test}"
"""
NUMBERS = {
    "age": (30, 95),
    "systolic": (90, 150),
    "cholesterol": (3.5, 7.5),
    "admissions": (0, 5),
    "smoker": (0, 1),
    "diabetic": (0, 1),
}
CATEGORIES = {"sex": ("female", "male"), "ward": ("medical", "surgical", "cardiac")}
N_PATIENTS = 60_000  # from which the hospitals draw theirs


def cohort(n_patients: int = N_PATIENTS) -> dict[str, Array]:
    """Return made-up patients: the same ones every time, computed from a public formula and about no one."""
    draw = Noise(seed=1840).open()  # public randomness; nothing here needs hiding

    def chance(probability: Array | float) -> Array:
        return np.asarray(draw.uniform(n_patients) < probability)

    age = np.clip(62 + 16 * draw.normal(n_patients), 18, 100)
    smoker, diabetic = chance(0.3), chance(0.1 + 0.003 * (age - 18))
    systolic = 118 + 0.35 * (age - 60) + 6 * diabetic + 16 * draw.normal(n_patients)
    cholesterol = 5.4 + 0.5 * smoker + draw.normal(n_patients)
    admissions = np.floor(1.3 * draw.exponential(n_patients) * (1 + 0.02 * (age - 60)))
    male = chance(0.5)
    ward = np.searchsorted([0.5, 0.8], draw.uniform(n_patients))
    score = (
        -1.6
        + 0.05 * (age - 62)
        + 0.025 * (systolic - 118)
        + 0.5 * (cholesterol - 5.4)
        + 0.8 * (np.minimum(admissions, 5) - 1)
        + 1.3 * smoker
        + 1.2 * diabetic
        + 0.3 * male
        + np.array([0.0, -0.5, 0.9])[ward]
    )
    return {
        "age": age,
        "systolic": systolic,
        "cholesterol": cholesterol,
        "admissions": admissions,
        "smoker": smoker.astype(int),
        "diabetic": diabetic.astype(int),
        "sex": np.where(male, "male", "female"),
        "ward": np.array(["medical", "surgical", "cardiac"])[ward],
        "readmitted": np.where(chance(1 / (1 + np.exp(-score))), "yes", "no"),
    }


def _tables() -> dict[str, pa.Table]:
    """Deal the patients out: to the public, to the test, and to each hospital more of those it treats."""
    patients = pa.table(cohort())
    age, ward = patients["age"].to_numpy(), np.asarray(patients["ward"].to_pylist())
    draw = Noise(seed=1841).open()
    order = draw.permutation(len(age))
    dealt = {"public": order[:N_PUBLIC], "test": order[N_PUBLIC : N_PUBLIC + N_TEST]}
    left = order[N_PUBLIC + N_TEST :]
    fitting = {
        "old": age > 72,
        "young": age < 52,
        **{kind: ward == kind for kind in CATEGORIES["ward"]},
    }
    for hospital in HOSPITALS:
        # Its own kind of patient is four times as likely to come.
        ease = np.where(fitting[hospital.case_mix][left], 4.0, 1.0)
        chosen = np.argsort(draw.exponential(len(left)) / ease)[: hospital.n_records]
        dealt[hospital.name] = left[chosen]
        left = np.delete(left, chosen)
    return {name: patients.take(rows) for name, rows in dealt.items()}


def _write_study(folder: Path, tables: dict[str, pa.Table]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("public", "test"):
        pcsv.write_csv(tables[name], folder / f"{name}.csv")
    columns = "".join(
        f'[[schema.columns]]\nkind = "numeric"\nname = "{name}"\nlow = {low}\nhigh = {high}\n'
        for name, (low, high) in NUMBERS.items()
    )
    columns += "".join(
        f'[[schema.columns]]\nkind = "categorical"\nname = "{name}"\ncategories = {list(values)!r}\n'.replace(
            "'", '"'
        )
        for name, values in CATEGORIES.items()
    )
    digests = {name: file_digest(folder / f"{name}.csv") for name in ("public", "test")}
    path = folder / "study.toml"
    path.write_text(
        STUDY_TEXT.format(columns=columns, regularization=REGULARIZATION, **digests),
        encoding="utf-8",
    )
    return path


@contextmanager
def _running_hub(folder: Path) -> Iterator[str]:
    """Run a hub in a process of its own, as `consilience hub serve` does; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "import sys; from consilience.hub.operating import serve; serve(sys.argv[1], port=int(sys.argv[2]))"
    log = (folder.parent / "hub.log").open("wb")
    hub = subprocess.Popen([sys.executable, "-c", code, str(folder), str(port)], stderr=log)  # noqa: S603
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + SECONDS_TO_START
        while not _answers(address):
            if hub.poll() is not None or time.monotonic() > until:
                raise HubUnavailable(
                    f"The hub did not start. Nothing was lost. Its log is in {log.name}."
                )
            time.sleep(0.1)
        yield address
    finally:
        hub.terminate()
        hub.wait(30)
        log.close()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/healthz", timeout=2) as answer:  # noqa: S310 - our own http address
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def contribute(
    folder: str, address: str, invitation: str, table: str, name: str, epsilon: float
) -> dict[str, Any]:
    """Do what a site does, in its own process: make a key and a ledger, join, train, submit."""
    if invitation:
        site = Site.init(folder, name=name, dataset=DATASET, budget=Budget(epsilon=2 * epsilon))
        site.join(address, invitation)
    else:
        site = Site(folder)
    site.train(STUDY, table, epsilon=epsilon)  # in earnest: approve=... shows the page and asks
    answer = site.submit(STUDY)
    balance = site.ledger.balance(DATASET)
    head = site.ledger.verify()
    spent, left = (float(amounts.epsilon or 0.0) for amounts in (balance.spent, balance.left))
    return {"spent": spent, "left": left, "head": head, "digest": answer["digest"]}


def fetch(folder: str, least: int) -> str:
    """Wait, as a site, for a release with at least so many sites in it; return where it was kept."""
    site, until = Site(folder), time.monotonic() + SECONDS_TO_START
    while time.monotonic() < until:
        release = site.fetch(STUDY)
        if release is not None and len(release.sources) >= least:
            return str(site.folder / "studies" / STUDY / release.filename)
        time.sleep(0.3)
    raise HubUnavailable("The hub published no release in time. Nothing was lost. Look at hub.log.")


@dataclass(frozen=True)
class SiteState:
    """A site at the end: what it allowed, spent and got."""

    name: str
    n_records: int
    epsilon: float
    spent: float
    left: float
    error_alone: float
    weight: float
    promised: float
    note: str


@dataclass(frozen=True)
class Method:
    """One way to learn: its error on the public test records, with a 95 % interval."""

    name: str
    title: str
    private: bool
    error: float
    low: float
    high: float


@dataclass(frozen=True)
class DemoReport:
    """The outcome of `demo`; prints as two tables, a verdict, and what to look at next."""

    methods: tuple[Method, ...]
    sites: tuple[SiteState, ...]
    verdict: str
    files: tuple[str, ...]
    release: str
    dashboard: str
    seconds: float

    def method(self, name: str) -> Method:
        """Return the method of that name."""
        return next(method for method in self.methods if method.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            "Readmission of made-up patients: they are computed from a formula and are about no "
            "one.",
            "",
            f"{'site':<14} {'records':>7} {'epsilon':>7} {'spent':>6} {'left':>5}  "
            f"{'error alone':>11}  {'weight':>6}",
        ]
        lines += [
            f"{s.name:<14} {s.n_records:>7,} {s.epsilon:>7g} {s.spent:>6.2g} {s.left:>5.2g}  "
            f"{s.error_alone:>11.1%}  {s.weight:>6.2f}  {s.note}"
            for s in self.sites
        ]
        width = max(len(method.title) for method in self.methods)
        heading = f"errors on {N_TEST:,} public test records"
        lines += ["", f"{heading:<{width}}   error  95 % interval"]
        lines += [
            f"{m.title:<{width}}  {m.error:>6.1%}  {m.low:.1%} to {m.high:.1%}"
            for m in self.methods
        ]
        return "\n".join([*lines, "", self.verdict])


JOINED = "joined"
TITLES = {
    JOINED: "six sites joined: the release",
    LOCAL: "one site alone, private (mean of six)",
    BEST: "one site alone, private (best, in hindsight)",
    PUBLIC: f"{N_PUBLIC} public records alone, tuned on them",
    OWN: "one site alone, no privacy (mean of six)",
    EXACT: "all records pooled, no privacy",
}


def demo(
    folder: str | Path = "demo-report", *, progress: Callable[[int, int], None] | None = None
) -> DemoReport:
    """Play the whole collaboration on this machine and write a report.

    Everything lies in `folder` afterwards: the study, the hub, the six sites with their ledgers,
    the release. An earlier demo there is replaced; any other content is refused.

    Privacy
    -------
    Each record of site i has its site's own epsilon (pure, replace-one), summed over its trainings,
    against everyone who sees the site's files or the release, if no patient is at two sites. The
    errors shown are not part of that: they come from test records, which are made up.
    """
    started = time.perf_counter()
    folder = _emptied(Path(folder))
    steps = iter(range(1, 100))

    def done() -> None:
        if progress is not None:
            progress(next(steps), 6 + len(HOSPITALS))

    tables = _tables()
    study_path = _write_study(folder / "study", tables)
    study = Study.load(study_path)
    for hospital in HOSPITALS:
        pcsv.write_csv(tables[hospital.name], folder / f"{_slug(hospital.name)}.csv")
    done()
    password = secrets.token_urlsafe(9)
    codes = _prepared_hub(folder / "hub", study_path, password)
    done()
    first = [hospital for hospital in HOSPITALS if hospital.name != LATE]
    states: dict[str, dict[str, Any]] = {}
    # A process for each site, two at a time; spawned, so that nothing of one is in another.
    pool = ProcessPoolExecutor(2, mp_context=get_context("spawn"), max_tasks_per_child=1)
    with _running_hub(folder / "hub") as address, pool:

        def submit(hospital: Hospital, invitation: str) -> Any:
            place, table = (
                str(folder / "sites" / _slug(hospital.name)),
                str(folder / f"{_slug(hospital.name)}.csv"),
            )
            return pool.submit(
                contribute, place, address, invitation, table, hospital.name, hospital.epsilon
            )

        running = {hospital.name: submit(hospital, codes[hospital.name]) for hospital in first}
        for name, future in running.items():
            states[name] = future.result()
            done()
        early = Release.load(
            pool.submit(fetch, str(folder / "sites" / _slug(first[0].name)), len(first)).result()
        )
        done()
        again = next(hospital for hospital in HOSPITALS if hospital.name == AGAIN)
        late = next(hospital for hospital in HOSPITALS if hospital.name == LATE)
        running = {AGAIN: submit(again, ""), LATE: submit(late, codes[LATE])}
        for name, future in running.items():
            states[name] = future.result()
            done()
        path = pool.submit(
            fetch, str(folder / "sites" / _slug(first[0].name)), len(HOSPITALS)
        ).result()
        until = time.monotonic() + SECONDS_TO_START
        while (
            release := Release.load(path)
        ).guarantee.epsilon < 2 * again.epsilon - 1e-6 and time.monotonic() < until:
            path = pool.submit(
                fetch, str(folder / "sites" / _slug(first[0].name)), len(HOSPITALS)
            ).result()
        done()
    site = Site(folder / "sites" / _slug(first[0].name))
    release = site.release(
        STUDY
    )  # checks the signature against the hub's key, which the site learned when it joined
    (folder / "certificate.html").write_text(of_release(release).as_html(), encoding="utf-8")
    methods, alone, joining = _compare(study, tables, release, folder)
    report = DemoReport(
        methods,
        tuple(
            _state(hospital, states[hospital.name], release, alone[hospital.name])
            for hospital in HOSPITALS
        ),
        _verdict(methods, joining, len(early.sources)),
        tuple(str(folder / name) for name in ("report.html", "errors.png", "certificate.html")),
        str(path),
        f"consilience hub serve --folder {folder / 'hub'}   (then log in as {COORDINATOR} with "
        f"password {password})",
        time.perf_counter() - started,
    )
    draw_errors(report, folder / "errors.png")
    text = f"<pre>{html.escape(str(report))}</pre>"
    head = (
        '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    )
    more = '<p><a href="certificate.html">The release and what it promises</a></p>'
    style = "body{font:16px/1.5 system-ui;margin:2rem;max-width:70rem}img{max-width:100%}pre{overflow:auto}"
    page = f"{head}<title>consilience demo</title><style>:root{{color-scheme:light dark}}{style}</style>"
    page += '<h1>Six made-up hospitals</h1><img src="errors.png" alt="Errors of each method">'
    (folder / "report.html").write_text(f"{page}{more}{text}\n", encoding="utf-8")
    done()
    return report


def _emptied(folder: Path) -> Path:
    marker = folder / ".consilience-demo"
    if folder.exists() and any(folder.iterdir()) and not marker.exists():
        raise SettingsError(
            f"The folder {str(folder)!r} holds something else than an earlier demo. Nothing was "
            "written. Name another with --folder."
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    marker.touch()
    return folder


def _prepared_hub(folder: Path, study_path: Path, password: str) -> dict[str, str]:
    """Make the hub, its coordinator, the study and an invitation for each site; return the invitations."""
    from consilience.hub.operating import add_coordinator, add_study, invite

    add_coordinator(folder, COORDINATOR, password)
    add_study(folder, study_path)
    return {hospital.name: invite(folder, STUDY, site=hospital.name)[0] for hospital in HOSPITALS}


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-")


def _compare(
    study: Study, tables: dict[str, pa.Table], release: Release, folder: Path
) -> tuple[tuple[Method, ...], dict[str, float], Joining]:
    """Return the release beside the baselines, each site's error alone, and the verdict."""
    encoded = {name: study.schema.encode(table) for name, table in tables.items()}
    labels = np.asarray(study.schema.classes)
    X, y = encoded["test"].X, labels[encoded["test"].y]

    learner = PrivateLogisticRegression(
        epsilon=math.inf, regularization=REGULARIZATION, classes=list(labels.tolist())
    )

    def exact(*names: str) -> Any:
        return clone(learner).fit(
            np.concatenate([encoded[name].X for name in names]),
            labels[np.concatenate([encoded[name].y for name in names])],
        )

    names = [hospital.name for hospital in HOSPITALS]
    from consilience.files.contribution import Contribution

    alone = {}
    private = {}
    for name in names:
        newest = Site(folder / "sites" / _slug(name)).contribution(STUDY)
        private[name] = Contribution.load(newest).learner
        alone[name] = float(np.mean(private[name].predict(X) != y))
    public = Public(encoded["public"].X, labels[encoded["public"].y])
    models: dict[str, list[Any]] = {
        JOINED: [release.ensemble],
        LOCAL: list(private.values()),
        BEST: [private[min(names, key=lambda name: alone[name])]],
        PUBLIC: [public_only(clone(learner), public)],
        OWN: [exact(name) for name in names],
        EXACT: [exact(*names)],
    }
    found = {name: [evaluate(model, X, y) for model in made] for name, made in models.items()}
    # Where there are six models, the mean of their six losses on a record is compared.
    losses = {
        name: np.mean([evaluation.losses for evaluation in made], axis=0)
        for name, made in found.items()
    }
    gaps = {title: paired_gap(losses[name], losses[JOINED]) for name, title in ALTERNATIVES.items()}
    methods = tuple(
        Method(
            name,
            TITLES[name],
            name in (JOINED, LOCAL, BEST),
            *np.mean([astuple(evaluation["error"]) for evaluation in made], axis=0).tolist(),
        )
        for name, made in found.items()
    )
    return methods, alone, Joining(gaps)


def _state(hospital: Hospital, state: dict[str, Any], release: Release, error: float) -> SiteState:
    row = next(row for row in release.sealed.facts["sources"] if row["site"] == hospital.name)
    promised = next(
        source.guarantee.epsilon for source in release.sources if source.site == hospital.name
    )
    note = {LATE: "joined late", AGAIN: "trained twice, so it spent twice"}.get(hospital.name, "")
    return SiteState(
        hospital.name,
        hospital.n_records,
        hospital.epsilon,
        state["spent"],
        state["left"],
        error,
        float(row["weight"]),
        promised,
        note,
    )


def _verdict(methods: Sequence[Method], joining: Joining, n_early: int) -> str:
    """Say whether joining helped, beside everything that a site could do instead."""
    found = {method.name: method for method in methods}
    return (
        f"Joining {joining.answer}. The error of the release is {found[JOINED].error:.1%}: "
        f"{joining.comparison}. Pooling all records without privacy gives "
        f"{found[EXACT].error:.1%}. The first release had {n_early} sites, the last one "
        f"{len(HOSPITALS)}."
    )


def draw_errors(report: DemoReport, path: Path) -> None:
    """Draw the errors of all methods with their intervals."""
    from matplotlib.figure import Figure  # loaded here: a second that only the chart needs

    private, none = (
        "#0072B2",
        "#D55E00",
    )  # Okabe and Ito's blue and vermilion: distinct to every eye
    figure = Figure(figsize=(9, 3.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for height, method in enumerate(reversed(report.methods)):
        colour, marker = (private, "o") if method.private else (none, "s")
        axes.plot(
            [100 * method.low, 100 * method.high],
            [height, height],
            color=colour,
            linewidth=2.5,
            alpha=0.55,
        )
        axes.plot(100 * method.error, height, marker, color=colour, markersize=8)
        at, up = (100 * method.error, height), (0, 7)
        axes.annotate(
            f"{method.error:.1%}", at, up, textcoords="offset points", ha="center", fontsize=9
        )
    axes.set_yticks(
        range(len(report.methods)), [method.title for method in reversed(report.methods)]
    )
    axes.set_ylim(-0.5, len(report.methods) - 0.3)
    axes.set_xlabel(f"patients misclassified, % (95 % interval; {N_TEST:,} public test records)")
    axes.set_title("Six made-up hospitals: what joining brings", loc="left")
    axes.plot([], [], "o-", color=private, label="every record has its site's guarantee")
    axes.plot([], [], "s-", color=none, label="no guarantee for the records used")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.4, -0.16), ncols=2, fontsize=9)
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path)
