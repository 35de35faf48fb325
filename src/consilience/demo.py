"""Six made-up hospitals learn one classifier together on this machine, in about a minute.

The demo runs the whole system: a study, six sites with a key and a ledger each, every one in its
own process, two keyholders, and a hub over HTTP that sees sums only. Sites share the noise of one
sum of moments. One site is late and one adds up its records twice; then the keyholders open the
total. The signed release is fetched, checked, adapted to each hospital's own records, and compared
with what each hospital could do instead. The patients do not exist: `cohort` computes them from a
fixed public formula, chosen so that joining can help. Whether it helps with other records is a
question for `consilience.plan`. Noise is real and unseeded, so the guarantees hold and every run
differs a little.
"""

from __future__ import annotations

import html
import json
import math
import secrets
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
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
from consilience.evaluation.adaptation import adapt
from consilience.evaluation.baselines import (
    ALTERNATIVES,
    BEST,
    EXACT,
    GUESS,
    LOCAL,
    OWN,
    PUBLIC,
    guess,
    public_only,
)
from consilience.evaluation.compare import MAJORITY, Gap, Joining, paired_gap
from consilience.evaluation.measures import AUC, CALIBRATION, ERROR, LOG_LOSS, Predictor, evaluate
from consilience.files.certificate import of_release
from consilience.files.release import Release
from consilience.keyholder.desk import find_desk, serve
from consilience.keyholder.keyholder import Keyholder
from consilience.learners.base import PrivateLearner
from consilience.learners.linear import PrivateLogisticRegression
from consilience.privacy.guarantee import Budget
from consilience.privacy.mechanisms import Noise
from consilience.site.site import Site
from consilience.statistics.base import Statistic
from consilience.study.records import file_digest
from consilience.study.study import Study
from consilience.tables.public import Public

Array = NDArray[Any]
Cells = list[list[str]]

STUDY = "readmission"
DATASET = "patients"
COORDINATOR = "anna"
KEYHOLDERS = ("ethics-office", "university")
SHARES, SPARE = 4, 1
N_PUBLIC, N_TEST = 100, 6_000
SECONDS_TO_START = 60.0
SECONDS_BETWEEN_LOOKS = 0.5  # of a keyholder


@dataclass(frozen=True)
class Hospital:
    """A made-up hospital: how many patients, what a training may cost, and whom it treats."""

    name: str
    n_records: int
    epsilon: float
    case_mix: str  # the kind of patient that it sees more often than others do

    @property
    def slug(self) -> str:
        """The hospital's name as part of a path."""
        return self.name.lower().replace(" ", "-")


HOSPITALS = (
    Hospital("Northgate", 1800, 0.8, "cardiac"),
    Hospital("St Anne", 1500, 1.0, "old"),
    Hospital("Riverside", 1200, 0.8, "surgical"),
    Hospital("Hill Clinic", 200, 1.0, "young"),
    Hospital("Lakeside", 150, 1.0, "medical"),
    Hospital("Coast General", 100, 0.8, "cardiac"),
)
DELTA = 1e-6
BY_NAME = {hospital.name: hospital for hospital in HOSPITALS}
AGAIN = BY_NAME["Lakeside"]  # trains a second time, which replaces its first contribution
LATE = BY_NAME["Coast General"]  # hands over when all others have

STUDY_TEXT = """\
# What the six hospitals agreed on. Check it with: consilience study check study.toml
[study]
name = "readmission"
version = 2
purpose = "Predict on discharge who will be readmitted within 30 days. The patients are made up."

[privacy]
neighbours = "replace-one"
epsilon_min = 0.1
epsilon_max = 1.0
delta = 1e-6
min_sites = {least}
hub = "blind"

[statistic]
name = "Moments"

[blind]
shares = {shares}
spare = {spare}
keyholders = {keyholders}

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
PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Six made-up hospitals</title>
<style>
:root {{ color-scheme: light dark; --paper: #f6f7f9; --card: #fff; --ink: #1c2430;
  --quiet: #55606f; --line: #dde2e8; --accent: #1f5fa8 }}
@media (prefers-color-scheme: dark) {{ :root {{ --paper: #12161c; --card: #1a2029;
  --ink: #e6eaf0; --quiet: #a5b0be; --line: #2e3743; --accent: #86b8f2 }} }}
body {{ font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem }}
h2 {{ font-size: 1.15rem; margin: 2.2rem 0 .6rem }}
a {{ color: var(--accent) }}
.quiet {{ color: var(--quiet) }}
.wide, figure {{ overflow-x: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px }}
figure {{ margin: 1.2rem 0; padding: 1rem 1.2rem }}
svg {{ display: block; font-size: .85rem }}
svg text {{ fill: var(--ink) }}
svg .tick {{ fill: var(--quiet) }}
svg .label {{ paint-order: stroke; stroke: var(--card); stroke-width: 5px }}
svg .grid {{ stroke: var(--line) }}
.range, .end {{ stroke: var(--quiet); stroke-width: 2 }}
.dot {{ fill: var(--card); stroke: var(--quiet); stroke-width: 2.5 }}
.study .range, .study .end {{ stroke: var(--accent); stroke-width: 3 }}
.study .dot {{ fill: var(--accent); stroke: var(--accent) }}
figcaption {{ margin-top: .8rem; font-size: .9rem; color: var(--quiet) }}
figcaption b {{ color: var(--accent) }}
@media (max-width: 30rem) {{ figure {{ padding: .6rem .4rem }} svg .label {{ font-size: .7rem }} }}
table {{ border-collapse: collapse; width: 100%; font-size: .92rem }}
th, td {{ padding: .45rem .8rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line) }}
th:first-child, td:first-child {{ text-align: left; white-space: normal; min-width: 10rem }}
tr:last-child td {{ border-bottom: 0 }}
</style>
<main>
<p class="quiet">{about}</p>
<h1>{headline}</h1>
{verdict}
<figure>{chart}
<figcaption>Patients misclassified, with 95 % intervals, among {n_test:,} public test records.
<b>● every record has its site's guarantee</b>, ○ no guarantee for the records
used.</figcaption></figure>
<h2>Ways to a model</h2>
{methods}
<h2>The hospitals</h2>
<p class="quiet">{spending}</p>
{sites}
<p><a href="certificate.html">The release and what it promises</a></p>
</main>
</html>
"""
ABOUT = "Readmission of made-up patients: they are computed from a formula and do not exist."
SPENDING = (
    f"“Spent” is the epsilon per record if at most {SPARE} of the other sites, and not every "
    "keyholder, colludes with the hub; “if all collude” is what holds if everybody else does. Own "
    "exact models and adapted ones are measured on public test records here; at a real site they "
    "never leave it."
)
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
    """Return made-up patients, computed from a public formula: the same ones every time."""
    draw = Noise(seed=1840).open()  # public randomness: there is nothing to hide here

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


def split_patients() -> dict[str, pa.Table]:
    """Return the tables of the hospitals, the public records and the test records, by name."""
    patients = pa.table(cohort())
    age, ward = patients["age"].to_numpy(), np.asarray(patients["ward"].to_pylist())
    draw = Noise(seed=1841).open()
    order = draw.permutation(len(age))
    rows = {"public": order[:N_PUBLIC], "test": order[N_PUBLIC : N_PUBLIC + N_TEST]}
    left = order[N_PUBLIC + N_TEST :]
    kinds = {
        "old": age > 72,
        "young": age < 52,
        **{kind: ward == kind for kind in CATEGORIES["ward"]},
    }
    for hospital in HOSPITALS:
        # A patient of the hospital's own kind is four times as likely to come.
        attraction = np.where(kinds[hospital.case_mix][left], 4.0, 1.0)
        chosen = np.argsort(draw.exponential(len(left)) / attraction)[: hospital.n_records]
        rows[hospital.name] = left[chosen]
        left = np.delete(left, chosen)
    return {name: patients.take(chosen) for name, chosen in rows.items()}


def _write_study(folder: Path, tables: Mapping[str, pa.Table], keyholders: Sequence[str]) -> Path:
    folder.mkdir()
    for name in ("public", "test"):
        pcsv.write_csv(tables[name], folder / f"{name}.csv")
    columns = [
        f'[[schema.columns]]\nkind = "numeric"\nname = "{name}"\nlow = {low}\nhigh = {high}\n'
        for name, (low, high) in NUMBERS.items()
    ]
    columns += [
        f'[[schema.columns]]\nkind = "categorical"\nname = "{name}"\n'
        f"categories = {json.dumps(values)}\n"
        for name, values in CATEGORIES.items()
    ]
    text = STUDY_TEXT.format(
        columns="".join(columns),
        least=SHARES + SPARE,
        shares=SHARES,
        spare=SPARE,
        keyholders=json.dumps(list(keyholders)),
        public=file_digest(folder / "public.csv"),
        test=file_digest(folder / "test.csv"),
    )
    path = folder / "study.toml"
    path.write_text(text, encoding="utf-8")
    return path


@contextmanager
def _running(code: str, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python code in a process of its own, and end it."""
    with log.open("wb") as said:
        process = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=said)  # noqa: S603
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def _running_hub(folder: Path) -> Iterator[str]:
    """Run a hub in a process of its own, as `consilience hub serve` does; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = (
        "import sys; from pathlib import Path\n"
        "from consilience.hub.hub import Settings\n"
        "from consilience.hub.operating import serve\n"
        "serve(Settings(Path(sys.argv[1])), port=int(sys.argv[2]))"
    )
    address, log = f"http://127.0.0.1:{port}", folder.parent / "hub.log"
    with _running(code, log, str(folder), str(port)) as hub:
        until = time.monotonic() + SECONDS_TO_START
        while not _answers(address):
            if hub.poll() is not None or time.monotonic() > until:
                raise HubUnavailable(
                    f"The hub did not start. Nothing was trained. See its log, {log}."
                )
            time.sleep(0.1)
        yield address


@contextmanager
def _running_keyholders(folder: Path, address: str, told: Mapping[str, str]) -> Iterator[None]:
    """Run the keyholders, each in a process of its own; `told` are the keys as sites tell them."""
    code = (
        "import json, sys; from pathlib import Path\n"
        "from consilience.demo import hold\n"
        "hold(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))"
    )
    with ExitStack() as running:
        for name in KEYHOLDERS:
            place = folder / "keyholders" / name
            log = folder / f"{name}.log"
            running.enter_context(_running(code, log, str(place), address, json.dumps(told)))
        yield


def hold(place: Path, address: str, told: Mapping[str, str]) -> None:
    """Do what a keyholder does: compare the roster's keys, sign it, then answer until stopped."""
    keyholder = Keyholder(place)
    desk = find_desk(address, STUDY, keyholder.key)
    agreed = desk.agree()
    if {name: key for key, name in agreed.roster.names.items()} != told:
        raise SettingsError(
            "The roster lists other keys than the sites told. Nothing was signed. Ask the sites."
        )
    card = keyholder.countersign(agreed.roster, agreed.rule, agreed.hub)
    keyholder.remember(agreed.study.digest, address)
    desk.post_card(card)
    for _ in serve(keyholder, SECONDS_BETWEEN_LOOKS):
        pass


def _answers(address: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{address}/healthz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def join(folder: Path, hospital: Hospital, address: str, invitation: str) -> str:
    """Make a site with a key and a ledger, in its own process, and join; return its public key."""
    place = _place(folder, hospital)
    budget = Budget(epsilon=2 * hospital.epsilon, delta=2 * DELTA)
    site = Site.init(place, name=hospital.name, dataset=DATASET, budget=budget)
    site.join(address, invitation)
    return site.key.public


def contribute(folder: Path, hospital: Hospital, keyholders: Sequence[str]) -> None:
    """Do what a site does once the roster is frozen, in its own process: train and submit."""
    site = Site(_place(folder, hospital))
    _wait_for_signatures(site)
    # The data owner compared these keys with what the keyholders said: the ledger then charges the
    # guarantee that rests on them.
    site.trust_keyholders(STUDY, keyholders)
    # A real site passes approve=..., which shows the page about this training and asks.
    site.train(STUDY, folder / f"{hospital.slug}.csv", epsilon=hospital.epsilon)
    site.submit(STUDY)
    site.ledger.verify()


def _wait_for_signatures(site: Site) -> None:
    """Wait until all pad holders have signed the roster."""
    until = time.monotonic() + SECONDS_TO_START
    while True:
        try:
            site.terms(STUDY)
            return
        except SettingsError:
            if time.monotonic() > until:
                raise
        time.sleep(0.3)


def fetch(folder: Path, n_sites: int) -> Path:
    """Wait, as a site, for a release of so many sites; return its file."""
    site, until = Site(_place(folder, HOSPITALS[0])), time.monotonic() + SECONDS_TO_START
    while time.monotonic() < until:
        release = site.fetch(STUDY)
        if release is not None and len(release.sources) >= n_sites:
            return site.folder / "studies" / STUDY / release.filename
        time.sleep(0.3)
    raise HubUnavailable("The hub published no release in time. Nothing was lost. See hub.log.")


def _place(folder: Path, hospital: Hospital) -> Path:
    return folder / "sites" / hospital.slug


@dataclass(frozen=True)
class SiteState:
    """A site at the end: what it allowed, spent and got."""

    name: str
    n_records: int
    epsilon: float
    spent: float
    alone: float  # what was spent if everybody else colludes
    own_auc: float
    adapted_auc: float
    promised: float
    note: str


@dataclass(frozen=True)
class Method:
    """One way to learn, measured on the public test records; the error with a 95 % interval."""

    name: str
    title: str
    private: bool
    error: float
    low: float
    high: float
    auc: float
    log_loss: float
    calibration: float


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

    def tables(self) -> tuple[Cells, Cells]:
        """Return the sites and the methods as rows of cells, the first row a heading."""
        sites = [["site", "records", "epsilon", "spent", "if all collude", "own AUC", "adapted"]]
        sites += [
            [
                *(s.name, f"{s.n_records:,}", f"{s.epsilon:g}", f"{s.spent:.2f}"),
                *(f"{s.alone:.2f}", f"{s.own_auc:.3f}", f"{s.adapted_auc:.3f}"),
            ]
            for s in self.sites
        ]
        beside = (AUC, LOG_LOSS, CALIBRATION)
        methods = [[f"on {N_TEST:,} public test records", "error", "95 % interval"]]
        methods[0] += [metric.title for metric in beside]
        methods += [
            [
                *(m.title, f"{m.error:.1%}", f"{m.low:.1%} to {m.high:.1%}"),
                *(f"{getattr(m, by.name):.3f}" for by in beside),
            ]
            for m in self.methods
        ]
        return sites, methods

    def __str__(self) -> str:
        sites, methods = self.tables()
        notes = ["", *(site.note for site in self.sites)]
        lines = [
            f"{line}  {note}".rstrip() for line, note in zip(_align(sites), notes, strict=True)
        ]
        verdict = "\n\n".join(textwrap.fill(part, 100) for part in self.verdict.split("\n"))
        return "\n".join([ABOUT, "", *lines, "", *_align(methods), "", verdict])

    def as_html(self) -> str:
        """Return the report as one page that needs no other file."""
        from consilience.hub.dashboard.charts import Interval, draw_intervals

        rows = [
            Interval(m.title, "study" if m.private else "other", m.error, m.low, m.high)
            for m in self.methods
        ]
        headline, _, rest = self.verdict.partition(". ")
        sites, methods = self.tables()
        for row, note in zip(sites, ["note", *(site.note for site in self.sites)], strict=True):
            row.append(note)
        return PAGE.format(
            about=html.escape(ABOUT),
            headline=html.escape(f"{headline}."),
            verdict="".join(f"<p>{html.escape(part)}</p>" for part in rest.split("\n")),
            chart=draw_intervals(
                rows,
                title="The error of each way to a model",
                description="The table below has the same numbers.",
                percent=True,
            ),
            n_test=N_TEST,
            methods=_to_html(methods),
            sites=_to_html(sites),
            spending=html.escape(SPENDING),
        )


def _align(rows: Cells) -> list[str]:
    """Return rows as lines: the first column on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{'>' if at else '<'}{widths[at]}}" for at, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def _to_html(rows: Cells) -> str:
    lines: list[str] = []
    for row in rows:
        kind = "td" if lines else "th"
        lines.append("".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in row))
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide" tabindex="0"><table>\n{body}\n</table></div>'


JOINED, ADAPTED, APART = "joined", "adapted", "joined-apart"
TITLES = {
    ADAPTED: "the release, adapted at each site (mean of six)",
    JOINED: "six sites joined, noise shared: the release",
    APART: "the same sums, whole noise at every site",
    LOCAL: "one site alone, private (mean of six)",
    BEST: "one site alone, private (best, in hindsight)",
    PUBLIC: f"{N_PUBLIC} public records alone, tuned on them",
    OWN: "a site's own exact model (mean of six)",
    EXACT: "all records pooled, no privacy",
    GUESS: MAJORITY,
}


def demo(
    folder: str | Path = "demo-report", *, progress: Callable[[int, int], None] | None = None
) -> DemoReport:
    """Run the whole collaboration on this machine and write a report.

    Afterwards `folder` has everything: the study, the hub, the keyholders, the six sites with their
    ledgers, the release. An earlier demo there is replaced if nothing of it was changed since. A
    folder with anything else in it is refused.

    Privacy
    -------
    Each record of site i has its site's own epsilon (replace-one, delta 1e-6), composed over its
    trainings, against everyone who sees the site's files or the release, if no patient is at two
    sites, at most one other site colludes with the hub, and one keyholder does not; the table shows
    what holds if everybody else colludes. The measures shown are not covered: they come from test
    records, which are made up. Adapted models and own exact ones have no guarantee: here, too, they
    would stay at their sites. The private models that the release is compared with are charged to
    no ledger: a site would pay for one as much again.
    """
    started = time.perf_counter()
    folder = prepare_folder(Path(folder))
    n_steps = 6 + 2 * len(HOSPITALS)
    steps = iter(range(1, 1 + n_steps))

    def done() -> None:
        if progress is not None:
            progress(next(steps), n_steps)

    tables = split_patients()
    holders = [Keyholder.create(folder / "keyholders" / name).key.public for name in KEYHOLDERS]
    study_path = _write_study(folder / "study", tables, holders)
    for hospital in HOSPITALS:
        pcsv.write_csv(tables[hospital.name], folder / f"{hospital.slug}.csv")
    done()
    password = secrets.token_urlsafe(9)
    invitations = _prepare_hub(folder / "hub", study_path, password)
    done()
    release_path = _collaborate(folder, invitations, holders, done)
    # The site checks the signature against the hub's key, which it learned when it joined.
    release = Site(_place(folder, HOSPITALS[0])).release(STUDY)
    (folder / "certificate.html").write_text(of_release(release).as_html(), encoding="utf-8")
    methods, sites, joining = _compare(Study.load(study_path), tables, release, folder)
    report = DemoReport(
        methods,
        tuple(_describe_site(one, folder, release, sites[one.name]) for one in HOSPITALS),
        _verdict(methods, joining, sites),
        tuple(str(folder / name) for name in ("report.html", "certificate.html")),
        str(release_path),
        f"consilience hub serve --folder {folder / 'hub'}   (then log in as {COORDINATOR} with "
        f"password {password})",
        time.perf_counter() - started,
    )
    (folder / "report.html").write_text(report.as_html(), encoding="utf-8")
    (folder / MARKER).write_text(list_files(folder), encoding="utf-8")
    done()
    return report


def prepare_folder(folder: Path) -> Path:
    """Return an empty folder for a demo; an earlier one that nobody used since is removed."""
    marker = folder / MARKER
    if folder.exists() and any(folder.iterdir()) and not _is_demo(folder, marker):
        raise SettingsError(
            f"The folder {str(folder)!r} holds something else than an earlier demo, or one that "
            "was interrupted or used since. Nothing was written. Name another folder with "
            "--folder, or remove this one yourself."
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    marker.write_text(UNFINISHED, encoding="utf-8")
    return folder


MARKER, UNFINISHED = ".consilience-demo", "unfinished\n"


def _is_demo(folder: Path, marker: Path) -> bool:
    """Tell whether all that is in a folder is what a demo left there.

    A site or hub may have been made in it since, or one of the demo's own used: a key and a ledger
    that somebody relies on cannot be had again. A demo that was interrupted has no list of what it
    wrote, and then nothing is taken for its own.
    """
    if not marker.is_file():
        return False
    listed = marker.read_text(encoding="utf-8")
    return listed == list_files(folder) or set(folder.iterdir()) == {marker}


def list_files(folder: Path) -> str:
    """Return all files of a folder with their digests, but for the marker of a demo itself."""
    files = (path for path in sorted(folder.rglob("*")) if path.name != MARKER)
    return "".join(
        f"{file_digest(path) if path.is_file() else '-'} {path.relative_to(folder)}\n"
        for path in files
    )


def _prepare_hub(folder: Path, study_path: Path, password: str) -> dict[str, str]:
    """Create a hub with a coordinator and the study; return an invitation for each site."""
    from consilience.hub.operating import OPERATOR, add_coordinator, add_study, opened

    add_coordinator(folder, COORDINATOR, password)
    add_study(folder, study_path)
    with opened(folder) as hub:
        return {one.name: hub.invite(STUDY, OPERATOR, site=one.name)[0] for one in HOSPITALS}


def _collaborate(
    folder: Path,
    invitations: Mapping[str, str],
    keyholders: Sequence[str],
    done: Callable[[], None],
) -> Path:
    """Let six sites join, freeze the roster, let them contribute; return the release's file."""
    # Each site has a process of its own, two at a time. They are spawned, so that no process starts
    # with a copy of another's memory.
    pool = ProcessPoolExecutor(2, mp_context=get_context("spawn"), max_tasks_per_child=1)
    with _running_hub(folder / "hub") as address, pool:
        joining = {
            name: pool.submit(join, folder, BY_NAME[name], address, code)
            for name, code in invitations.items()
        }
        told = dict[str, str]()
        for name, future in joining.items():
            told[name] = future.result()
            done()
        _freeze_roster(folder / "hub")
        done()
        with _running_keyholders(folder, address, told):

            def contribute_all(*hospitals: Hospital) -> None:
                running = [pool.submit(contribute, folder, one, keyholders) for one in hospitals]
                for future in running:
                    future.result()
                    done()

            contribute_all(*(one for one in HOSPITALS if one is not LATE))
            # Until a batch is listed, a second sum takes the place of the first, and both cost.
            contribute_all(AGAIN)
            contribute_all(LATE)
            release = pool.submit(fetch, folder, len(HOSPITALS)).result()
            done()
    return release


def _freeze_roster(folder: Path) -> None:
    """Freeze the roster as `consilience hub roster` does: the registrar compared all keys."""
    from consilience.hub.operating import OPERATOR, opened

    with opened(folder) as hub:
        (_, study), sites = hub.study(STUDY), hub.store.enrolled_keys(STUDY)
        hub.blind.freeze(study, dict.fromkeys(sites, "the registrar"), OPERATOR)


def _compare(
    study: Study, tables: Mapping[str, pa.Table], release: Release, folder: Path
) -> tuple[tuple[Method, ...], dict[str, Gap], Joining]:
    """Return all methods, what each site gains by adapting the release, and the mean gain."""
    encoded = {name: study.schema.encode(table) for name, table in tables.items()}
    labels = np.asarray(study.schema.classes)
    X, y = encoded["test"].X, labels[encoded["test"].y]
    learner = PrivateLogisticRegression(epsilon=math.inf, classes=list(labels.tolist()))

    def train_exact(*names: str) -> Predictor:
        model: Predictor = clone(learner).fit(
            np.concatenate([encoded[name].X for name in names]),
            labels[np.concatenate([encoded[name].y for name in names])],
        )
        return model

    names = [hospital.name for hospital in HOSPITALS]
    public = Public(encoded["public"].X, labels[encoded["public"].y])
    private = {
        one.name: _train_apart(study, one.epsilon, encoded[one.name].X, labels[encoded[one.name].y])
        for one in HOSPITALS
    }
    apart = study.build_aggregator().combine(list(private.values()), public)
    alone = {name: float(np.mean(model.predict(X) != y)) for name, model in private.items()}
    adapted = {
        name: adapt(release, (encoded[name].X, labels[encoded[name].y]), compare=False)
        for name in names
    }
    models: dict[str, list[Predictor]] = {
        ADAPTED: list(adapted.values()),
        JOINED: [release.ensemble],
        APART: [apart],
        LOCAL: list(private.values()),
        BEST: [private[min(names, key=lambda name: alone[name])]],
        PUBLIC: [public_only(clone(learner), public)],
        OWN: [model.own_ for model in adapted.values()],
        EXACT: [train_exact(*names)],
        GUESS: [guess(y, numeric=False)],
    }
    evaluations = {
        name: [evaluate(model, X, y) for model in of_name] for name, of_name in models.items()
    }
    # Where there are six models, the mean of their six parts of the AUC is compared.
    parts = {
        name: np.mean([evaluation.parts(AUC) for evaluation in of_name], axis=0)
        for name, of_name in evaluations.items()
    }
    gaps = {
        title: paired_gap(parts[name], parts[ADAPTED], metric=AUC)
        for name, title in ALTERNATIVES.items()
        if name in parts
    }
    pays = {
        name: paired_gap(own, model, metric=AUC)
        for name, own, model in zip(names, evaluations[OWN], evaluations[ADAPTED], strict=True)
    }
    methods = tuple(
        Method(
            name,
            TITLES[name],
            name in (JOINED, APART, LOCAL, BEST),
            *np.mean([astuple(one[ERROR.name]) for one in of_name], axis=0).tolist(),
            *(
                float(np.mean([one[metric.name].value for one in of_name]))
                for metric in (AUC, LOG_LOSS, CALIBRATION)
            ),
        )
        for name, of_name in evaluations.items()
    )
    return methods, pays, Joining(gaps, AUC.name)


def _train_apart(study: Study, epsilon: float, X: Array, y: Array) -> PrivateLearner[Any, Any]:
    """Return the sum that a hospital would hand over with all of the noise, at the same epsilon."""
    learner = study.build(epsilon)
    assert isinstance(learner, Statistic)
    learner.sharing = None
    return learner.fit(X, y)


def _describe_site(hospital: Hospital, folder: Path, release: Release, gap: Gap) -> SiteState:
    site = Site(_place(folder, hospital))
    collude = site.alone_balance(site.ledger)
    at = [source.site for source in release.sources].index(hospital.name)
    notes = {LATE.name: "came last", AGAIN.name: "trained twice"}
    return SiteState(
        hospital.name,
        hospital.n_records,
        hospital.epsilon,
        float(site.ledger.balance(DATASET).spent.epsilon or 0.0),
        float(collude.spent.epsilon or 0.0) if collude else math.inf,
        gap.other,
        gap.joined,
        release.sources[at].guarantee.epsilon,
        notes.get(hospital.name, ""),
    )


def _verdict(methods: Sequence[Method], joining: Joining, sites: Mapping[str, Gap]) -> str:
    """Say whether joining pays, for whom, and beside everything that a site could do instead."""
    aucs = {method.name: method.auc for method in methods}
    clear = {
        verdict: [name for name, gap in sites.items() if gap.verdict == verdict]
        for verdict in ("better", "worse")
    }
    best = max(sites, key=lambda name: sites[name].gain.value)
    words = f"It clearly pays for {_listed(clear['better'])}"
    words += f", and not for {_listed(clear['worse'])}." if clear["worse"] else "."
    return (
        f"Joining {joining.answer}. Adapted to a site's own records, the release has an AUC of "
        f"{aucs[ADAPTED]:.3f}, a site's own exact model {aucs[OWN]:.3f}, and the release by itself "
        f"{aucs[JOINED]:.3f} (means of six). {words} {best} gains most: "
        f"{sites[best].other:.3f} becomes {sites[best].joined:.3f}.\nThe adapted models are "
        f"{joining.comparison}. With its whole noise at every site the same sums give "
        f"{aucs[APART]:.3f}, and pooling all records without privacy {aucs[EXACT]:.3f}.\nThe hub "
        f"saw masked numbers only: {len(KEYHOLDERS)} keyholders opened the sum of all six, and "
        f"never open one of fewer than {SHARES + SPARE}."
    )


def _listed(names: Sequence[str]) -> str:
    return " and ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]]) or "nobody"
