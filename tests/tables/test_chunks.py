"""Tables larger than memory."""

import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from consilience.errors import SettingsError
from consilience.tables.chunks import ParquetRows
from consilience.tables.schema import Numeric, Schema
from tabular import RECORDS, SCHEMA, STRICT, refusal, sources


def peaks(path, n_records):
    """Return the size of the table, and the most memory that reading it in chunks took."""
    rng = np.random.default_rng(0)
    table = pa.table(
        {f"v{i}": rng.normal(size=n_records) for i in range(10)}
        | {"y": rng.integers(0, 2, n_records)}
    )
    pq.write_table(
        table, path, row_group_size=n_records, use_dictionary=False
    )  # one row group: the hardest case
    whole = table.nbytes
    del table
    schema = Schema([Numeric(f"v{i}", -4, 4) for i in range(10)], "y", classes=(0, 1))
    rows = ParquetRows(path, schema, chunk_records=8192)
    assert (rows.n_records, rows.n_features) == (n_records, 10)
    pool = pa.default_memory_pool()
    before, arrow, seen = pool.bytes_allocated(), 0, 0
    tracemalloc.start()
    try:
        for X, y in rows.chunks():
            arrow = max(arrow, pool.bytes_allocated() - before)
            seen += len(y)
            assert X.shape == (len(y), 10)
            assert len(y) <= 8192
        numpy = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen == n_records
    return whole, arrow, numpy


def test_chunks_take_little_memory_and_no_more_for_more_records(tmp_path):
    whole, arrow, numpy = peaks(tmp_path / "large.parquet", 500_000)
    assert arrow < whole / 8
    assert numpy < whole / 8
    _, arrow_half, numpy_half = peaks(tmp_path / "half.parquet", 250_000)
    assert arrow < 1.2 * arrow_half
    assert numpy < 1.2 * numpy_half


def test_chunks_repeat_and_equal_the_whole(tmp_path):
    for source in sources(tmp_path):
        if isinstance(source, Path) and source.suffix in {".parquet", ""}:
            rows = ParquetRows(
                source, SCHEMA, chunk_records=2, keep=[True, False, True, True, True]
            )
            whole = SCHEMA.encode(source)
            for _ in range(2):
                X, y = together(rows.chunks())
                kept = [0, 2, 3, 4]
                assert np.array_equal(X, whole.X[kept])
                assert np.array_equal(y, whole.y[kept])
                for every in (1, 2, 3):
                    ((X, y),) = rows.gather(
                        lambda blocks: together((X.copy(), y) for X, y in blocks), every
                    )
                    assert np.array_equal(X, whole.X[kept[::every]])
                    assert np.array_equal(y, whole.y[kept[::every]])
            assert rows.n_records == 4
            assert rows.passes == 8
            assert rows.persons().tolist() == whole.persons.tolist()


def together(chunks):
    return tuple(np.concatenate(part) for part in zip(*chunks, strict=True))


def test_chunks_refuse_uncapped_persons_and_wrong_masks(tmp_path):
    pq.write_table(pa.table(RECORDS), tmp_path / "r.parquet")
    with pytest.raises(SettingsError, match="max_records_per_person=2"):
        list(ParquetRows(tmp_path / "r.parquet", SCHEMA).chunks())
    with pytest.raises(SettingsError, match="keep"):
        ParquetRows(tmp_path / "r.parquet", SCHEMA, keep=[True])
    with pytest.raises(SettingsError, match="chunk_records"):
        ParquetRows(tmp_path / "r.parquet", SCHEMA, chunk_records=0)
    unaware = Schema([Numeric("age", 0, 1, missing="middle")], "ill", classes=("no", "yes"))
    with pytest.raises(SettingsError, match="person"):
        ParquetRows(tmp_path / "r.parquet", unaware).persons()
    assert "'sex' is absent" in refusal(lambda: ParquetRows(tmp_path / "r.parquet", STRICT))
    anonymous = pa.table(RECORDS | {"pid": pa.array([None] * 5, pa.string())})
    pq.write_table(anonymous, tmp_path / "r.parquet")
    assert "'pid'" in refusal(ParquetRows(tmp_path / "r.parquet", SCHEMA).persons)
