"""The papers' data sets, from the folder CONSILIENCE_DATA or else downloaded by scikit-learn.

Loaders do only what does not depend on the records: choose classes, scale bytes, encode published
categories. What depends on the records (principal axes, ranges) belongs in `prepare` of the
simulate() call. Every loader checks the number of rows, so that a different copy is noticed.
`made_up` makes records of the same kind for tests.
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from scipy import sparse
from sklearn import datasets as sk
from sklearn.decomposition import PCA
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer

from consilience.privacy.mechanisms import Noise

Array = NDArray[Any]
MADE_UP = (
    "MADE-UP records: numbers say nothing about the real set."  # the notes of every made-up set
)


@dataclass(frozen=True)
class Dataset:
    """Records, and what is known about them; `notes` are shown in the report."""

    name: str
    X: Any
    y: Array
    notes: str
    sites: Array | None = None  # whose each record is, where real sites are known
    regions: Array | None = None  # of the sites
    persons: Array | None = None
    test: tuple[Any, Array] | None = None  # where the publisher set records apart
    columns: tuple[str, ...] = ()


class Unavailable(Exception):
    """A data set that cannot be found or downloaded, or is not as expected; says what to do."""


@lru_cache(maxsize=1)  # one at a time: some are large
def load(name: str) -> Dataset:
    """Return a data set by the name in `LOADERS`."""
    loader = LOADERS[name]
    try:
        return loader()
    except KeyError as error:  # of a table
        raise Unavailable(
            f"Its copy lacks columns ({error.args[0]}): it is another edition. {REPLACE}"
        ) from error
    except (OSError, EOFError, pa.ArrowInvalid) as error:
        raise Unavailable(f"Its copy cannot be read ({error}). {REPLACE}") from error


REPLACE = (
    "Put the expected one into the folder CONSILIENCE_DATA, or remove this one from there (or "
    "from scikit-learn's cache) so that it is downloaded."
)


def _local(file: str) -> pd.DataFrame | None:
    folder = os.environ.get("CONSILIENCE_DATA")
    path = Path(folder or ".") / f"{file}.parquet"
    return pd.read_parquet(path) if folder and path.exists() else None


def _expect(name: str, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise Unavailable(
            f"The copy of {name} has {what} {found}, and {expected} was expected: it is another "
            f"edition. {REPLACE}"
        )


def _download(fetch: Callable[..., Any], *given: Any, **settings: Any) -> Any:
    """Return what a function that downloads returns."""
    try:
        return fetch(*given, **settings)
    except (
        OSError,
        HTTPException,
        ValueError,
    ) as error:  # OpenML's refusals and wrong checksums are ValueErrors
        raise Unavailable(
            f"It is not in the folder CONSILIENCE_DATA and could not be downloaded ({error}). "
            "Connect to the internet, or put it into that folder."
        ) from error


def _fetched(url: str, file: str) -> Path:
    """Download once, beside scikit-learn's own downloads."""
    path = Path(sk.get_data_home()) / "consilience" / file
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - https addresses written below
            part.write_bytes(
                answer.read()
            )  # at once: in pieces, a connection that breaks would pass for the end
        part.replace(path)
    return path


# ------------------------------------------ the two sets of Xie's papers, one of them in three ways


def mnist37() -> Dataset:
    """Digits 3 and 7 of the MNIST training file, pixels in [0, 1]; 7 is +1."""
    table = _local("mnist")
    if table is not None:
        pixels = np.frombuffer(b"".join(table["pixels"]), np.uint8).reshape(-1, 784)
        digits = table["label"].to_numpy(dtype=int)
    else:
        found = _download(sk.fetch_openml, "mnist_784", version=1, as_frame=False)
        pixels, digits = np.asarray(found.data), np.asarray(found.target).astype(int)
    _expect("MNIST", "rows", len(digits), 70_000)
    kept = np.flatnonzero(np.isin(digits[:60_000], (3, 7)))
    _expect("MNIST", "threes and sevens in the training file", len(kept), 12_396)
    y = np.where(digits[kept] == 7, 1, -1)
    return Dataset(
        "mnist37",
        pixels[kept] / 255.0,
        y,
        "MNIST digits 3 and 7 of the training file: 12,396 records.",
    )


AXES = 50
_LEARNED: dict[Any, Any] = {}


def axes(seen: Any) -> Callable[[Any], Any]:
    """Learn 50 principal axes, once for each division; rows are then scaled to length one.

    Panels share divisions, and learning the axes again would take most of the time.
    """
    key = (seen.shape, seen.sum(axis=0).tobytes())
    if key not in _LEARNED:
        if len(_LEARNED) > 400:
            _LEARNED.clear()
        _LEARNED[key] = make_pipeline(PCA(AXES), Normalizer()).fit(seen)
    return _LEARNED[key].transform


# The publisher's table of ranges, columns 1 to 10; the other 44 are 0 or 1.
COVERTYPE_LOW = (1859, 0, 0, 0, -173, 0, 0, 0, 0, 0)
COVERTYPE_HIGH = (3858, 360, 66, 1397, 601, 7117, 254, 254, 254, 7173)


def covertype12() -> Dataset:
    """Covertype, types 1 (+1) and 2 (-1), in published ranges, rows of length one."""
    X, y = _covertype()
    low, high = np.array(COVERTYPE_LOW, dtype=float), np.array(COVERTYPE_HIGH, dtype=float)
    X[:, :10] = np.clip((X[:, :10] - low) / (high - low), 0.0, 1.0)
    return _covertype12("covertype12", "in their published ranges, rows of length 1", X, y)


def covertype12_rows() -> Dataset:
    """Covertype with its columns as they are (metres beside 0 and 1), rows of length one."""
    return _covertype12("covertype12_rows", "as they are, rows of length 1", *_covertype())


def covertype12_longest() -> Dataset:
    """Covertype with its columns as they are, all rows divided by the length of the longest."""
    X, y = _covertype()
    X /= np.linalg.norm(X, axis=1).max()
    notes = "54 columns as they are, all rows divided by the length of the longest record."
    return Dataset("covertype12_longest", X, y, f"{COVERTYPE}: {notes}")


COVERTYPE = "UCI Covertype, cover types 1 and 2: 495,141 records"


def _covertype12(name: str, columns: str, X: Array, y: Array) -> Dataset:
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    return Dataset(name, X, y, f"{COVERTYPE}, 54 columns {columns}.")


def _covertype() -> tuple[Array, Array]:
    """Return the columns as they were published, and the labels."""
    table = _local("covertype")
    if table is not None:
        types, X = (
            table["Cover_Type"].to_numpy(),
            table.drop(columns="Cover_Type").to_numpy(dtype=float),
        )
    else:
        found = _download(sk.fetch_covtype)
        types, X = found.target, np.asarray(found.data, dtype=float)
    _expect("Covertype", "rows", len(types), 581_012)
    kept = types <= 2
    _expect("Covertype", "rows of types 1 and 2", int(kept.sum()), 495_141)
    return np.array(X[kept]), np.where(types[kept] == 1, 1, -1)


# -------------------------------------------------------------------------------- Hamm's three sets

HAR_TRAIN = (1226, 1073, 986, 1286, 1374, 1407)


def har() -> Dataset:
    """Human activities from smartphones, six classes, the publisher's split by person."""
    table = _local("har")
    if table is None:
        found = _download(sk.fetch_openml, data_id=1478, as_frame=False)
        X, y = np.asarray(found.data, dtype=float), np.asarray(found.target).astype(int)
        train, persons = np.arange(len(y)) < 7352, None
        columns = tuple(found.feature_names)
        notes = "UCI HAR smartphones as OpenML has it (no person ids)."
    else:
        features = table.columns[table.columns.get_loc("jerk_exact") + 1 :]
        X, y = table[features].to_numpy(dtype=float), table["activity"].to_numpy(dtype=int)
        train, persons, columns = (
            (table["split"] == "train").to_numpy(),
            table["subject"].to_numpy(),
            tuple(features),
        )
        notes = (
            "UCI HAR smartphones. This copy is a RECONSTRUCTION from the published raw signals, "
            "not the publisher's feature file: most features agree to 1e-4, 12 "
            "(tGravityAcc-arCoeff) do not."
        )
    _expect("HAR", "rows", len(y), 10_299)
    _expect("HAR", "training rows by class", tuple(np.bincount(y[train])[1:].tolist()), HAR_TRAIN)
    return Dataset(
        "har", X[train], y[train], notes, persons=None if persons is None else persons[train],
        test=(X[~train], y[~train]), columns=columns,
    )  # fmt: skip


KDD_TEXT = ("protocol_type", "service", "flag")
KDD_URL = "https://kdd.ics.uci.edu/databases/kddcup99/corrected.gz"


def kdd99() -> Dataset:
    """KDD Cup 1999, normal (-1) or attack (+1): train on 10 percent, test on the corrected file."""
    table = _local("kdd99")
    if table is None:
        found = _download(sk.fetch_kddcup99, percent10=True, as_frame=True)
        table = found.frame.rename(columns={"labels": "label"})
        for name in table.select_dtypes("object").columns:
            table[name] = table[name].map(
                lambda cell: cell.decode() if isinstance(cell, bytes) else cell
            )
        file = _download(_fetched, KDD_URL, "kdd_corrected.gz")
        test = pd.read_csv(file, names=list(table.columns), compression="gzip")
        table = pd.concat([table.assign(split="train_10pct"), test.assign(split="test_corrected")])
        table["label"] = table["label"].str.rstrip(".")
    train = (table["split"] == "train_10pct").to_numpy()
    _expect("KDD-99", "rows", (int(train.sum()), int((~train).sum())), (494_021, 311_029))
    y = np.where(table["label"] == "normal", -1, 1)
    attributes = table.drop(columns=["label", "split"])
    coded = pd.get_dummies(attributes, columns=list(KDD_TEXT), dtype=float)
    X = coded.to_numpy(dtype=float)
    notes = (
        "KDD Cup 1999: 10 percent file (494,021) and corrected test file (311,029), "
        f"one-hot {X.shape[1]} columns."
    )
    return Dataset(
        "kdd99",
        X[train],
        y[train],
        notes,
        test=(X[~train], y[~train]),
        columns=tuple(coded.columns),
    )


URL_FEATURES = 1024


def malicious_url() -> Dataset:
    """URLs, benign (-1) or malicious (+1), as hashed counts of three-letter pieces."""
    table = _local("malicious_url")
    if table is None:
        raise Unavailable(
            "It cannot be downloaded by a program: its publisher (ISCX-URL2016, University of "
            "New Brunswick) asks for a form. Put malicious_url.parquet with the columns url, "
            "class, label into the folder CONSILIENCE_DATA."
        )
    _expect("malicious_url", "rows", len(table), 155_254)
    pieces = HashingVectorizer(
        analyzer="char", ngram_range=(3, 3), n_features=URL_FEATURES, alternate_sign=False
    )
    X = sparse.csr_array(pieces.transform(table["url"].astype(str)))
    notes = (
        "ISCX-URL2016, a SUBSTITUTE for the url_svmlight set (Ma et al. 2009), which could not "
        f"be obtained: lexical features only ({URL_FEATURES} hashed three-letter pieces), no "
        "days, 77 percent malicious."
    )
    return Dataset("malicious_url", X, np.where(table["label"] == 1, 1, -1), notes)


# --------------------------------------------------------------------------- Xiang's set, and sites


def credit_default() -> Dataset:
    """Default of credit-card clients (1) or not (0), the 23 attributes as published."""
    table = _local("credit_default")
    if table is not None:
        y, X = (
            table["default_next_month"].to_numpy(dtype=int),
            table.drop(columns=["ID", "default_next_month"]),
        )
    else:
        found = _download(sk.fetch_openml, data_id=42477, as_frame=True)
        y, X = found.target.astype(int).to_numpy(), found.data
    _expect("credit default", "rows and defaults", (len(y), int(y.sum())), (30_000, 6_636))
    notes = "UCI default of credit-card clients: 30,000 records, 23 attributes."
    return Dataset(
        "credit_default", X.to_numpy(dtype=float), y, notes, columns=tuple(map(str, X.columns))
    )


HEART = {
    "cleveland": "cleveland",
    "hungarian": "hungary",
    "switzerland": "switzerland",
    "va": "va_long_beach",
}
HEART_URL = (
    "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/processed.{}.data"
)
HEART_COLUMNS = (
    "age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal num".split()
)


def heart_disease() -> Dataset:
    """Heart disease (1) or none (0) at four hospitals; missing values are NaN."""
    table = _local("heart_disease")
    if table is None:
        files = {
            site: _download(_fetched, HEART_URL.format(file), f"heart_{file}.csv")
            for file, site in HEART.items()
        }
        parts = [
            pd.read_csv(f, names=HEART_COLUMNS, na_values="?").assign(site=site)
            for site, f in files.items()
        ]
        table = pd.concat(parts)
    sites = table["site"].astype(str).to_numpy()
    counts = {
        str(site): int(n) for site, n in zip(*np.unique(sites, return_counts=True), strict=True)
    }
    expected = {"cleveland": 303, "hungary": 294, "switzerland": 123, "va_long_beach": 200}
    _expect("heart disease", "records by hospital", counts, expected)
    X = np.array(table[HEART_COLUMNS[:-1]], dtype=float)
    notes = (
        "UCI Heart Disease: 920 patients of four hospitals; "
        "cholesterol 0 means missing there and is NaN here."
    )
    X[X[:, 4] == 0, 4] = np.nan
    y = (table["num"].to_numpy() > 0).astype(int)
    return Dataset("heart_disease", X, y, notes, sites=sites, columns=tuple(HEART_COLUMNS[:-1]))


# In this order: hospitals/figures.py knows their bounds by place.
EICU_MEASURED = tuple(
    f"aps_{name}"
    for name in (
        "intubated vent dialysis eyes motor verbal meds urine wbc temperature respiratoryrate "
        "sodium heartrate meanbp ph hematocrit creatinine albumin pao2 pco2 bun glucose "
        "bilirubin fio2"
    ).split()
)


def eicu_demo() -> Dataset:
    """Death in hospital (1) or not (0) from the first day; sites are hospitals."""
    table = _local("eicu_demo")
    if table is None:
        raise Unavailable(
            "It is open but has no download a program may assume. Get eicu-crd-demo 2.0 from "
            "PhysioNet, join patient, hospital, apacheApsVar (as aps_...) and apachePredVar (as "
            "pred_...) on patientunitstayid into eicu_demo.parquet in the folder "
            "CONSILIENCE_DATA."
        )
    _expect("eICU demo", "rows", len(table), 2_520)
    known = table["hospitaldischargestatus"].isin(["Alive", "Expired"]).to_numpy()
    table = table[known]
    age = table["age"].astype(str).str.replace("> 89", "90").pipe(pd.to_numeric, errors="coerce")
    numbers = table[list(EICU_MEASURED)].apply(pd.to_numeric, errors="coerce").replace(-1, np.nan)
    X = np.column_stack(
        [age, (table["gender"] == "Female").to_numpy(dtype=float), numbers.to_numpy(dtype=float)]
    )
    y = (table["hospitaldischargestatus"] == "Expired").to_numpy().astype(int)
    return Dataset(
        "eicu_demo", X, y, "eICU demo 2.0: stays with a known outcome; unmeasured is NaN.",
        sites=table["hospitalid"].to_numpy(), regions=table["region"].to_numpy(dtype=object),
        persons=table["uniquepid"].astype(str).to_numpy(),
        columns=("age", "female", *EICU_MEASURED),
    )  # fmt: skip


LOADERS: dict[str, Callable[[], Dataset]] = {
    one.__name__: one
    for one in (
        mnist37,
        covertype12,
        covertype12_rows,
        covertype12_longest,
        har,
        kdd99,
        malicious_url,
        credit_default,
        heart_disease,
        eicu_demo,
    )
}
# Roughly how many records a full panel trains on: used only to estimate the time left.
SIZES = {
    "mnist37": 12_396,
    "covertype12": 495_141,
    "covertype12_rows": 495_141,
    "covertype12_longest": 495_141,
    "har": 10_299,
    "kdd99": 494_021,
    "malicious_url": 155_254,
    "credit_default": 30_000,
    "heart_disease": 920,
    "eicu_demo": 2_492,
}


# ------------------------------------------------------------------------------------------ made up

# features, labels, whether the real set has sites, persons, a test part, missing values, is sparse
_KINDS: dict[str, tuple[int, tuple[int, ...], str]] = {
    "mnist37": (60, (-1, 1), ""),
    "covertype12": (54, (-1, 1), ""),
    "covertype12_rows": (54, (-1, 1), ""),
    "covertype12_longest": (54, (-1, 1), ""),
    "har": (60, (1, 2, 3, 4, 5, 6), "persons test"),
    "kdd99": (60, (-1, 1), "test"),
    "malicious_url": (60, (-1, 1), "sparse"),
    "credit_default": (23, (0, 1), ""),
    "heart_disease": (13, (0, 1), "sites missing"),
    "eicu_demo": (30, (0, 1), "sites persons missing"),
}


@lru_cache
def made_up(name: str, n_records: int = 900) -> Dataset:
    """Return made-up records of the same kind: classes are clouds in the unit cube."""
    n_features, labels, has = _KINDS[name]
    source = Noise(seed=sum(map(ord, name))).open()
    total = n_records + (300 if "test" in has else 0)
    y = np.asarray(labels)[(source.uniform(total) * len(labels)).astype(int)]
    centres = source.uniform(len(labels) * n_features).reshape(len(labels), -1)
    X = centres[np.searchsorted(labels, y)] + 0.4 * source.normal(total * n_features).reshape(
        total, -1
    )
    X = np.clip(X, 0.0, 1.0)
    if "missing" in has:
        X[source.uniform(X.size).reshape(X.shape) < 0.05] = np.nan
    kept: Any = sparse.csr_array(X) if "sparse" in has else X
    whose = np.array([f"site {place % 4}" for place in range(total)])
    return Dataset(
        name,
        kept[:n_records],
        y[:n_records],
        MADE_UP,
        sites=whose[:n_records] if "sites" in has else None,
        persons=np.arange(n_records) // 2 if "persons" in has else None,
        test=(kept[n_records:], y[n_records:]) if "test" in has else None,
        columns=tuple(f"column {place}" for place in range(n_features)),
    )
