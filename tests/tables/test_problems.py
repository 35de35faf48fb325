"""Tables that do not fit are refused, and no refusal shows a value."""

import datetime
import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from consilience.tables.chunks import ParquetRows
from consilience.tables.groups import cap_records, split_sites
from consilience.tables.schema import Categorical, Numeric, Schema
from tabular import GOOD, MARK, STRICT, refusal


class Opaque:
    def __repr__(self):
        return MARK


BAD_TABLES = {
    "missing number": ({"age": [None, 73515.0]}, ["'age'", "a number in [0, 120]"]),
    "NaN": ({"age": [math.nan, 73515.0]}, ["'age'"]),
    "text for a number": ({"age": [MARK, "1"]}, ["'age'", "a number in [0, 120]"]),
    "mixed kinds": ({"age": [1, MARK]}, ["'age'", "a number in [0, 120]"]),
    "objects": ({"age": [Opaque(), Opaque()]}, ["'age'", "neither text nor number"]),
    "one object": ({"sex": ["f", Opaque()]}, ["'sex'", "neither text nor number"]),
    "one date": ({"pid": ["a", datetime.date(2020, 7, 3)]}, ["'pid'", "neither text nor number"]),
    "booleans for numbers": ({"age": np.array([True, False])}, ["'age'", "bool"]),
    "dates for numbers": ({"age": np.array(["2020-07-31"] * 2, "M8[D]")}, ["'age'", "date32"]),
    "lists for categories": ({"sex": pa.array([[MARK], [MARK]])}, ["'sex'", "list"]),
    "mappings for categories": (
        {"sex": pa.array([{MARK: 1}, {MARK: 2}])},
        ["'sex'", "struct"],
    ),
    "bytes for categories": ({"sex": [MARK.encode()] * 2}, ["'sex'", "neither text nor number"]),
    "text for a column": ({"sex": "fm"}, ["'sex'"]),
    "two dimensions": ({"age": np.full((2, 2), 7351.0)}, ["'age'"]),
    "unequal lengths": ({"age": [7351.0]}, ["length"]),
    "missing category": ({"sex": [None, MARK]}, ["'sex'", "missing"]),
    "unseen category": ({"sex": ["f", MARK]}, ["'sex'", "not declared"]),
    "unknown class": ({"ill": [0, 7351]}, ["'ill'", "not declared"]),
    "missing label": ({"ill": [0, None]}, ["'ill'", "missing"]),
    "missing person": ({"pid": [MARK, None]}, ["'pid'", "person id"]),
}


@pytest.mark.parametrize(("change", "named"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_refused_table_names_columns_and_never_a_value(change, named):
    message = refusal(lambda: STRICT.encode(GOOD | change))
    assert all(part in message for part in named)


def test_a_frame_with_mixed_kinds_names_the_column_and_never_a_value():
    frame = pd.DataFrame(GOOD).astype({"age": object})
    frame.loc[1, "age"] = MARK
    assert "'age'" in refusal(lambda: STRICT.encode(frame))
    doubled = pd.DataFrame(np.full((2, 2), MARK), columns=["age", "age"])
    refusal(lambda: STRICT.encode(doubled))


def test_structural_problems_are_listed_all_at_once():
    wrong = pa.table(
        {"age": pa.array([True]), "ill": pa.array([[7351]]), "other": pa.array([MARK])}
    )
    message = refusal(lambda: STRICT.encode(wrong))
    for part in ("'age' holds bool", "'sex' is absent", "'ill' holds list", "'pid' is absent"):
        assert part in message
    twice = pa.table([pa.array([1.0]), pa.array([2.0])], names=["age", "age"])
    assert "'age' is there more than once" in refusal(lambda: STRICT.encode_features(twice))


def test_value_problems_are_listed_all_at_once_and_once_each():
    table = pa.table(
        GOOD | {"age": pa.array([None, None], pa.float64()), "sex": ["f", MARK], "ill": [0, 7351]}
    )
    message = refusal(lambda: STRICT.encode(pa.concat_tables([table, table])))
    assert message.count("'age'") == message.count("'sex'") == message.count("'ill'") == 1


@pytest.mark.parametrize(
    "text",
    [
        f"age,sex,ill,pid\n{MARK},f,0,a\n",
        f"age,sex,ill,pid\n50,f,0,a\n60,m,1,b,{MARK}\n",
        f"age,sex,ill,pid\n50,f,0,a\n{MARK}\n",
        f"age,sex,age,ill,pid\n50,f,{MARK},0,a\n",
        f"age,sex,ill,pid\n50,{MARK}\udcff,0,a\n",
        f"{MARK},f,0,a\n50,f,0,a\n",
        "",
    ],
    ids=[
        "text for a number",
        "long line",
        "short line",
        "column twice",
        "not UTF-8",
        "no header",
        "empty file",
    ],
)
def test_a_bad_csv_is_refused_without_a_value(tmp_path, text):
    path = tmp_path / "records.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    refusal(lambda: STRICT.encode(path))


def test_a_damaged_parquet_file_is_refused_without_a_value(tmp_path):
    path = tmp_path / "records.parquet"
    path.write_text(MARK)
    refusal(lambda: STRICT.encode(path))
    refusal(lambda: ParquetRows(path, STRICT))
    pq.write_table(
        pa.table(GOOD | {"sex": [MARK * 1000, "m"]}), path, compression="none", use_dictionary=False
    )
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)
    refusal(lambda: STRICT.encode(path))
    rows = ParquetRows(path, STRICT, keep=[True, True])
    refusal(lambda: list(rows.chunks()))


def garbled(*texts):
    """Return text that is not UTF-8, as a foreign Parquet writer may leave it."""
    return pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())


def test_other_refusals_show_no_value():
    nonsense = garbled(MARK.encode() + b"\xff", b"\xfe")
    assert "'pid'" in refusal(lambda: STRICT.encode(GOOD | {"pid": nonsense}))
    assert "'sex'" in refusal(lambda: STRICT.encode(GOOD | {"sex": nonsense}))
    refusal(lambda: cap_records(nonsense, 1, [0.1, 0.2]))
    refusal(lambda: cap_records([MARK, None], 1, [0.1, 0.2]))
    refusal(lambda: cap_records([MARK, Opaque()], 1, [0.1, 0.2]))
    refusal(lambda: split_sites(2, [MARK, math.nan]))
    refusal(lambda: split_sites(2, ["a", "b"], persons=[MARK, MARK]))


def test_lenient_policies_never_refuse_a_value():
    lenient = Schema(
        [
            Numeric("age", 0, 120, missing="middle"),
            Categorical("sex", ("f", "m"), missing="ignore", unseen="ignore"),
        ],
        *("ill",),
        classes=(0, 1),
        unknown_label=0,
    )
    strange = [None, "", "f", "50", "1e999", "nan", "-inf", "true", "\x00", "💥", "1.0", MARK]
    for column in (strange, garbled(b"\xff\xfe", b"\x80")):
        X = lenient.encode({"age": column, "sex": column, "ill": column}).X
        assert np.isfinite(X).all()
        assert (np.linalg.norm(X, axis=1) <= 1).all()
