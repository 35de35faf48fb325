"""Ways in which a newcomer goes wrong: each does what docs/newcomers.md says that they see.

The page is compared with what happens, row by row: a row without a way fails, and so does a way
without a row.
"""

import re
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pytest
from scipy import sparse
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.ensemble import BaggingClassifier
from sklearn.impute import SimpleImputer
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler

import consilience as cs
from consilience.errors import ConsilienceError
from consilience.study.draft import Draft

PAGE = Path(__file__).parents[1] / "docs" / "newcomers.md"
N = 200
DRAWN = np.random.default_rng(0).normal(size=(N, 3))
X = DRAWN / 10  # rows of norm <= 1, mostly
Y = (DRAWN[:, 0] > 0).astype(int)
RAW = DRAWN * [15.0, 900.0, 4.0] + [50.0, 3000.0, 20.0]
SCHEMA = cs.Schema(
    [cs.Numeric("age", 0, 120), cs.Categorical("sex", ("f", "m"))], "ill", classes=("no", "yes")
)
WAYS = {}


def way(title):
    def add(function):
        WAYS[title] = function
        return function

    return add


def frame():
    return pd.DataFrame(
        {
            "age": np.linspace(20, 90, N),
            "sex": ["f", "m"] * (N // 2),
            "ill": ["no"] * (N // 2) + ["yes"] * (N // 2),
        }
    )


def logistic(**settings):
    return cs.PrivateLogisticRegression(**{"epsilon": 1.0, "classes": [0, 1], **settings})


def ledger(folder):
    made = cs.Ledger(folder / "ward.ledger")
    made.allow("ward", cs.Budget(epsilon=1.0))
    return made


def with_schema(**settings):
    return cs.PrivateLogisticRegression(epsilon=1.0, schema=SCHEMA, **settings)


# ------------------------------------------------------------------------------------------ values


@way("Columns in their own units, without a schema")
def _(_):
    logistic().fit(RAW, Y)


@way("A missing value")
def _(_):
    logistic().fit(np.where(X > 0.2, np.nan, X), Y)


@way("A missing value of pandas")
def _(_):
    number = pd.array([1, None] * (N // 2), dtype="Int64")
    logistic().fit(pd.DataFrame({"number": number}), Y)


@way("A masked array")
def _(_):
    logistic().fit(np.ma.masked_array(X, mask=X > 0.2), Y)


@way("An infinite value")
def _(_):
    logistic().fit(np.where(X > 0.2, np.inf, X), Y)


@way("A column of text, without a schema")
def _(_):
    logistic().fit(frame()[["age", "sex"]], Y)


@way("A column of dates, without a schema")
def _(_):
    days = pd.date_range("2024-01-01", periods=N)
    logistic().fit(frame()[["age"]].assign(seen=days), Y)


@way("A data frame of numbers, without a schema")
def _(_):
    return str(logistic().fit(pd.DataFrame(X), Y).guarantee_)


@way("Two columns of one name")
def _(_):
    logistic().fit(pd.DataFrame(X, columns=["a", "a", "b"]), Y)


@way("Names of columns of which some are numbers")
def _(_):
    logistic().fit(pd.DataFrame(X, columns=["a", 1, "b"]), Y)


@way("A path without a schema")
def _(_):
    logistic().fit("ward.csv", Y)


@way("Numbers in single precision")
def _(_):
    return f"{logistic().fit(X.astype(np.float32), Y).coef_.dtype} coefficients"


@way("A list of lists")
def _(_):
    return f"{logistic().fit(X.tolist(), Y.tolist()).n_features_in_} columns"


@way("Sparse rows for a linear learner")
def _(_):
    return f"{logistic().fit(sparse.csr_matrix(X), Y).n_features_in_} columns"


@way("Sparse rows for trees")
def _(_):
    cs.PrivateForestClassifier(epsilon=1.0, bounds=(-1, 1)).fit(sparse.csr_matrix(X), Y)


@way("A constant column")
def _(_):
    constant = np.column_stack([X, np.ones(N)])
    return f"{logistic(data_norm=2.0).fit(constant, Y).n_features_in_} columns"


@way("More columns than records")
def _(_):
    wide = np.tile(X[:20], 10) / 10
    return f"{logistic().fit(wide, Y[:20]).coef_.shape[1]} coefficients from {len(wide)} records"


@way("A single column without its second dimension")
def _(_):
    logistic().fit(X[:, 0], Y)


@way("A table without records")
def _(_):
    logistic().fit(X[:0], Y[:0])


# ------------------------------------------------------------------------------------------ leaks


@way("A `StandardScaler` in a pipeline")
def _(_):
    make_pipeline(StandardScaler(), logistic(data_norm=9.0)).fit(RAW, Y)


@way("An imputer in a pipeline")
def _(_):
    make_pipeline(SimpleImputer(), logistic()).fit(X, Y)


@way("A PCA in a pipeline")
def _(_):
    make_pipeline(PCA(2), logistic()).fit(X, Y)


@way("A `StandardScaler` before the learner")
def _(_):
    logistic(data_norm=9.0).fit(StandardScaler().fit_transform(RAW), Y)


@way("A `MinMaxScaler` before the learner")
def _(_):
    logistic(data_norm=2.0).fit(MinMaxScaler().fit_transform(RAW), Y)


@way("`GridSearchCV` on private records")
def _(_):
    GridSearchCV(logistic(), {"regularization": [1e-3, 1e-1]}, cv=2).fit(X, Y)


@way("`cross_val_score` on private records")
def _(_):
    cross_val_score(logistic(), X, Y, cv=2)


@way("`OneVsRestClassifier`, for several classes")
def _(_):
    OneVsRestClassifier(cs.PrivateLogisticRegression(epsilon=1.0)).fit(X, np.arange(N) % 3)


@way("`CalibratedClassifierCV`")
def _(_):
    CalibratedClassifierCV(cs.PrivateLogisticRegression(epsilon=1.0), cv=2).fit(X, Y)


@way("`BaggingClassifier`")
def _(_):
    BaggingClassifier(cs.PrivateLogisticRegression(epsilon=1.0), n_estimators=2).fit(X, Y)


# ----------------------------------------------------------------------------------------- labels


@way("Labels that are text, undeclared")
def _(_):
    learner = cs.PrivateLogisticRegression(epsilon=1.0).fit(X, np.where(Y, "yes", "no"))
    return str(learner.guarantee_)


@way("Labels that are truth values")
def _(_):
    return f"classes_ {logistic(classes=[False, True]).fit(X, Y > 0).classes_.tolist()}"


@way("Labels of another type than the classes")
def _(_):
    logistic().fit(X, Y.astype(str))


@way("Truth values as labels, and numbers as classes")
def _(_):
    return f"classes_ {logistic().fit(X, Y > 0).classes_.tolist()}"


@way("Classes as a set")
def _(_):
    logistic(classes={0, 1}).fit(X, Y)


@way("A label that is not among the classes")
def _(_):
    logistic().fit(X, Y + 1)


@way("A classifier for a number")
def _(_):
    cs.PrivateLogisticRegression(epsilon=1.0).fit(X, X[:, 0])


@way("Labels in two columns")
def _(_):
    logistic().fit(X, np.column_stack([Y, Y]))


@way("Labels as a frame of one column")
def _(_):
    logistic().fit(X, pd.DataFrame({"ill": Y}))


@way("The labels among the columns")
def _(_):
    logistic(data_norm=2.0).fit(np.column_stack([X, Y]), Y)


@way("Rows and labels in another order")
def _(_):
    logistic().fit(pd.DataFrame(X), pd.Series(Y)[::-1])


@way("Fewer labels than rows")
def _(_):
    logistic().fit(X, Y[:-1])


@way("No labels")
def _(_):
    logistic().fit(X)


@way("A label that is missing")
def _(_):
    logistic().fit(X, [None, *Y[1:].tolist()])


@way("Weights of records")
def _(_):
    logistic().fit(X, Y, sample_weight=np.ones(N))


@way("One class in all records, undeclared")
def _(_):
    cs.PrivateLogisticRegression(epsilon=1.0).fit(X, np.zeros(N, int))


@way("One class in all records, both declared")
def _(_):
    return f"classes_ {logistic().fit(X, np.zeros(N, int)).classes_.tolist()}"


@way("One record in a hundred is positive")
def _(_):
    rows = np.tile(X, (10, 1))
    rare = np.argsort(np.argsort(-rows[:, 0])) < len(rows) // 100
    model = logistic(epsilon=5.0).fit(rows, rare.astype(int))
    chances = model.predict_proba(rows)[:, 1]
    found = model.predict(rows)[rare].mean() > 0.5
    ranked = roc_auc_score(rare, chances) > 0.9
    return f"{'most' if found else 'few or none'} found, {'well' if ranked else 'badly'} ranked"


@way("A regression without a bound on the label")
def _(_):
    cs.PrivateRidge(epsilon=1.0).fit(X, X[:, 0])


@way("A regression on labels that are text")
def _(_):
    cs.PrivateRidge(epsilon=1.0, label_bound=1.0).fit(X, np.where(Y, "yes", "no"))


@way("A bound on the label that is far too small")
def _(_):
    cs.PrivateRidge(epsilon=1.0, label_bound=1.0).fit(X, RAW[:, 0])


# ----------------------------------------------------------------------------------------- schemas


@way("Bounds left out of a schema")
def _(_):
    cs.Numeric("age")


@way("Categories left out of a schema")
def _(_):
    cs.Categorical("sex")


@way("Columns as a dictionary")
def _(_):
    cs.Schema({"age": (0, 120)}, "ill", classes=("no", "yes"))


@way("A label that is also a feature")
def _(_):
    columns = [cs.Numeric("age", 0, 120), cs.Categorical("ill", ("no", "yes"))]
    cs.Schema(columns, "ill", classes=("no", "yes"))


@way("A regression with a schema that has classes")
def _(_):
    cs.PrivateRidge(epsilon=1.0, schema=SCHEMA).fit(frame())


@way("A logarithm of a column that may be negative")
def _(_):
    cs.Numeric("change", -5, 100, transform="log")


@way("An array for a learner with a schema")
def _(_):
    with_schema().fit(X, np.where(Y, "yes", "no"))


@way("One record without its table")
def _(_):
    with_schema().fit(frame()).predict({"age": 50, "sex": "f"})


@way("A row of a frame")
def _(_):
    with_schema().fit(frame()).predict(frame().iloc[0])


@way("A CSV file with semicolons")
def _(folder):
    frame().to_csv(folder / "ward.csv", sep=";", index=False)
    with_schema().fit(folder / "ward.csv")


@way("An Arrow table with encoded categories")
def _(_):
    table = pa.table({name: pa.array(held) for name, held in frame().items()})
    encoded = table.set_column(1, "sex", table["sex"].dictionary_encode())
    model = with_schema().fit(encoded)
    same = (model.predict(encoded) == model.predict(table)).all()
    return "the same predictions" if same else "other predictions"


@way("A column of the schema is not in the table")
def _(_):
    with_schema().fit(frame().drop(columns=["sex"]))


@way("A column too many, with a schema")
def _(_):
    model = with_schema().fit(frame().assign(note="text"))
    return f"{model.n_features_in_} features"


@way("Columns in another order, with a schema")
def _(_):
    table = frame()
    model = with_schema().fit(table)
    same = (model.predict(table[["sex", "age"]]) == model.predict(table)).all()
    return "the same predictions" if same else "other predictions"


@way("Columns in another order, without a schema")
def _(_):
    table = pd.DataFrame(X, columns=["a", "b", "c"])
    logistic().fit(table, Y).predict(table[["b", "a", "c"]])


@way("A column too many, without a schema")
def _(_):
    logistic().fit(X, Y).predict(np.column_stack([X, Y]))


@way("A category that is not declared")
def _(_):
    with_schema().fit(frame().assign(sex="x"))


@way("A category that is not declared, in a prediction")
def _(_):
    with_schema().fit(frame()).predict(frame().assign(sex="x"))


@way("A missing value, with a schema")
def _(_):
    with_schema().fit(frame().assign(age=np.nan))


@way("A number beyond its bounds, with a schema")
def _(_):
    model = with_schema().fit(frame())
    chances = model.predict_proba({"age": [120, 700], "sex": ["f", "f"]})
    return "the bound's prediction" if chances[0, 0] == chances[1, 0] else "another"


@way("Most numbers beyond their bounds, with a schema")
def _(_):
    with_schema().fit(frame().assign(age=frame()["age"] * 12))


@way("A setting that contradicts the schema")
def _(_):
    with_schema(classes=[0, 1]).fit(frame())


@way("Trees without bounds")
def _(_):
    cs.PrivateForestClassifier(epsilon=1.0).fit(X, Y)


@way("An identifier among the columns of a public table")
def _(folder):
    table = {"patient": [f"P{i}" for i in range(N)], "age": frame()["age"], "ill": Y}
    pa.csv.write_csv(pa.table(table), folder / "public.csv")
    Draft("first", "ill", is_public=True).write(folder / "public.csv")


@way("Dates among the columns of a public table")
def _(folder):
    days = pd.date_range("2024-01-01", periods=N).strftime("%Y-%m-%d")
    pa.csv.write_csv(pa.table({"seen": days, "ill": Y}), folder / "public.csv")
    Draft("first", "ill", is_public=True).write(folder / "public.csv")


# ----------------------------------------------------------------------------------------- persons


@way("Several records of each person, as records")
def _(_):
    return repr(with_schema().fit(frame()).guarantee_)


@way("Persons for a learner that hides records")
def _(_):
    logistic().fit(X, Y, persons=np.arange(N) // 2)


@way("Persons without a cap")
def _(_):
    logistic(unit="person").fit(X, Y, persons=np.arange(N) // 2)


@way("A cap without persons")
def _(_):
    logistic(unit="person", records_per_person=2).fit(X, Y)


@way("A hidden number of records without a public size")
def _(_):
    logistic(neighbours="add-remove").fit(X, Y)


# ------------------------------------------------------------------------------------------ budget


@way("No epsilon")
def _(_):
    cs.PrivateLogisticRegression()


@way("An epsilon of 0")
def _(_):
    logistic(epsilon=0).fit(X, Y)


@way("An epsilon that is text")
def _(_):
    logistic(epsilon="1").fit(X, Y)


@way("An epsilon in single precision")
def _(_):
    return str(logistic(epsilon=np.float32(0.5)).fit(X, Y).guarantee_)


@way("A delta of 1")
def _(_):
    logistic(delta=1).fit(X, Y)


@way("Gaussian noise without a delta")
def _(_):
    logistic(mechanism="gradient").fit(X, Y)


@way("A seed for the noise")
def _(_):
    return repr(logistic(noise=cs.Noise(seed=1)).fit(X, Y).guarantee_)


@way("A seed for the noise, with a ledger")
def _(folder):
    logistic(noise=cs.Noise(seed=1)).fit(X, Y, ledger=ledger(folder), dataset="ward")


@way("A `random_state` that should fix the noise")
def _(_):
    one, other = (logistic(random_state=0).fit(X, Y) for _ in range(2))
    return "the same coefficients" if (one.coef_ == other.coef_).all() else "other coefficients"


@way("A ledger without the name of the data set")
def _(folder):
    logistic().fit(X, Y, ledger=ledger(folder))


@way("The name of a data set without a ledger")
def _(_):
    logistic().fit(X, Y, dataset="ward")


@way("The path of a ledger")
def _(folder):
    logistic().fit(X, Y, ledger=folder / "ward.ledger", dataset="ward")


@way("A data set that has no budget")
def _(folder):
    logistic().fit(X, Y, ledger=ledger(folder), dataset="ward-2")


@way("A second fit on a spent budget")
def _(folder):
    charge = {"ledger": ledger(folder), "dataset": "ward"}
    logistic().fit(X, Y, **charge).fit(X, Y, **charge)


@way("Ten records")
def _(_):
    coefs = [logistic().fit(X[:10], Y[:10]).coef_ for _ in range(20)]
    return "another model each time" if np.std(coefs) > np.abs(np.mean(coefs)) else "the same"


# ----------------------------------------------------------------------------------- fitted models


@way("A prediction before the fit")
def _(_):
    logistic().predict(X)


@way("An average of learners before the fit")
def _(_):
    cs.Average().combine([logistic(), logistic()])


@way("An average of one learner, without a list")
def _(_):
    cs.Average().combine(logistic().fit(X, Y))


@way("A parameter changed after the fit")
def _(_):
    members = [logistic().fit(X, Y) for _ in range(2)]
    members[0].epsilon = 0.1
    cs.Average().combine(members)


def see(function, folder):
    """Return the kind and the text of what a newcomer sees."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        try:
            said = function(folder)
        except Exception as problem:
            return type(problem).__name__, str(problem)
    kinds = {(one.category.__name__, str(one.message)) for one in recorded}
    if kinds:
        assert len(kinds) == 1, kinds
        return kinds.pop()
    return "", said


def rows():
    """Return the cells of the page's tables by the first one: what is seen, and what to do."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {first: rest for first, *rest in cells if first not in ("you do", "---")}


def test_every_row_of_the_page_is_a_way_and_every_way_has_a_row():
    assert list(rows()) == list(WAYS)
    assert len(WAYS) >= 30


@pytest.mark.parametrize("title", WAYS)
def test_a_newcomer_sees_what_the_page_says(title, tmp_path):
    kind, text = see(WAYS[title], tmp_path)
    seen, advice = rows()[title]
    if kind:
        stated, _, seen = seen.partition(": ")
        assert stated == f"`{kind}`", text
    # The page leaves out parts of a message at each "…".
    parts = [part.strip() for part in seen.split("…")]
    pattern = ".*".join(map(re.escape, parts))
    shown = " ".join(text.split())
    assert re.fullmatch(pattern, shown), shown
    assert advice.endswith(".")


@pytest.mark.parametrize("title", WAYS)
def test_every_message_says_in_which_state_things_are_and_what_to_do(title, tmp_path):
    kind, text = see(WAYS[title], tmp_path)
    own = issubclass(getattr(cs, kind or "", object), ConsilienceError | UserWarning)
    if own:
        assert re.search(r"Nothing was|No record was|Training goes on", text), text
        state = re.search(r"(Nothing was|No record was|Training goes on)[^.]*\.", text)
        told = text[: state.start()] + text[state.end() :]
        assert re.search(
            r"\b(Pass|Declare|Set|Use|use|Drop|Leave|Ask|Add|Check|Correct|Fix|Fit|Reshape|Write|"
            r"Change|must be|take)\b",
            told,
        ), text
