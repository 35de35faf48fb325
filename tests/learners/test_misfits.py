"""Records that do not fit what was declared are warned of where they are, and in no file."""

import json
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from scipy import sparse

from consilience import (
    Budget,
    FeatureMethod,
    Noise,
    Numeric,
    PrivateForestClassifier,
    PrivateLogisticRegression,
    PrivateRidge,
    Public,
    Schema,
    audit,
)
from consilience.cli.app import main
from consilience.errors import ConsilienceError, RecordsWarning
from consilience.site.site import Site
from consilience.tables.encoding import FEW
from studies import study_text, table

N = 60
RAW = np.column_stack([np.arange(N) + 18.0, np.arange(N) * 900.0 + 10_000])
LABELS = np.arange(N) % 2


def fit(rows=RAW, labels=LABELS, kind=PrivateLogisticRegression, **settings):
    return kind(epsilon=1.0, **settings).fit(rows, labels)


@pytest.mark.parametrize("rows", [RAW, sparse.csr_array(RAW)], ids=["dense", "sparse"])
def test_rows_that_are_clipped_to_nothing_are_warned_of(rows):
    with pytest.warns(RecordsWarning, match=r"twice as long as data_norm=1 .*goes on.*domain know"):
        fit(rows)


def test_labels_beyond_their_bound_are_warned_of():
    with pytest.warns(RecordsWarning, match="labels are beyond label_bound=3"):
        fit(RAW / 1e5, RAW[:, 0], PrivateRidge, label_bound=3)


@pytest.mark.parametrize("bounds", [(0, 1), [(0, 1), (0, 1)]])
def test_values_beyond_the_bounds_of_trees_are_warned_of(bounds):
    with pytest.warns(RecordsWarning, match="values are beyond 'bounds'"):
        fit(kind=PrivateForestClassifier, bounds=bounds)


def test_columns_beyond_the_bounds_of_a_schema_are_named():
    schema = Schema(
        [Numeric("age", 0, 10, missing_values=(999,)), Numeric("cost", 0, 1e5, cuts=4)],
        "days",
        label_bound=2.0,
    )
    days = [1.0, 5.0, 6.0] * 20
    columns = {"age": RAW[:, 0], "cost": RAW[:, 1], "days": days}
    with pytest.warns(RecordsWarning) as recorded:
        PrivateRidge(epsilon=1.0, schema=schema).fit(columns)
    assert [str(one.message).split("'")[1] for one in recorded] == ["age", "days"]
    with pytest.warns(RecordsWarning, match="'days'"):
        PrivateRidge(epsilon=1.0, schema=schema).fit(
            {"age": [999, 5] * 30, "cost": RAW[:, 1]} | {"age": ["5"] * N}, days
        )


@pytest.mark.parametrize(
    "given",
    [
        (RAW[: FEW - 1], LABELS[: FEW - 1]),  # too few to say
        (np.vstack([RAW[: N // 2], np.zeros((N // 2, 2))]), LABELS),  # only half of them
        (np.full((N, 2), 0.9), LABELS),  # longer, but not much
    ],
    ids=["few", "half", "a little"],
)
def test_what_may_well_be_right_is_not_warned_of(given, recwarn):
    fit(*given)
    fit(*given, PrivateRidge, label_bound=1.0)
    assert not recwarn.list


def test_experiments_and_audits_are_not_warned_of(recwarn):
    fit(noise=Noise(seed=1))
    PrivateLogisticRegression(epsilon=np.inf).fit(RAW, LABELS)
    assert audit(
        PrivateLogisticRegression(epsilon=1.0, data_norm=0.1), n_records=40, runs=50
    ).passed
    assert not recwarn.list


def test_a_hub_that_trains_on_private_labels_says_nothing_of_them(recwarn):
    members = [
        PrivateRidge(epsilon=5.0, label_bound=1.0).fit(RAW / 1e5, LABELS / 2) for _ in range(2)
    ]
    FeatureMethod(epsilon=1.0, label_bound=0.1).combine(members, Public(RAW / 1e5, LABELS + 1.0))
    assert not recwarn.list


def test_a_warning_that_was_made_an_error_keeps_its_text_and_charges_nothing(ledger):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RecordsWarning, match="twice as long"):
            PrivateLogisticRegression(epsilon=1.0).fit(RAW, LABELS, ledger=ledger, dataset="ward")
    assert ledger.charges() == []


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_site_sees_warnings_on_its_terminal_and_no_file_has_them(
    ending, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "study.toml").write_text(study_text())
    site = Site.init("site", name="north", dataset="ward", budget=Budget(epsilon=3.0))
    site.join_folder("shared")
    months = table(300).to_pydict()
    months["age"] = [12.0 * age for age in months["age"]]
    path = tmp_path / f"ward.{ending}"
    write = pa.csv.write_csv if ending == "csv" else pa.parquet.write_table
    write(pa.table(months), path)

    def run(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main(["site", *arguments, "--folder", "site"])
        printed = capsys.readouterr()
        assert not leaving.value.code, printed.err
        return printed

    train = ("train", "heart-risk", str(path), "--epsilon", "1")
    digest = json.loads(run(*train, "--dry-run", "--json").out)["digest"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        printed = run(*train, "--approved", digest)
    run("submit", "heart-risk")
    said = "consilience: More than half of the values in column 'age'"
    assert [line[: len(said)] for line in printed.err.splitlines() if "half" in line] == [said]
    assert "More than half" not in printed.out
    written = [file for file in tmp_path.rglob("*") if file.is_file() and file != path]
    assert any(file.suffix == ".safetensors" for file in written)
    for file in written:
        content = file.read_bytes().lower()
        assert b"more than half" not in content, file
        assert b"recordswarning" not in content, file


def test_warnings_are_no_errors_of_this_package():
    assert not issubclass(RecordsWarning, ConsilienceError)
