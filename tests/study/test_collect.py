import pytest

from consilience import Budget, Ledger
from consilience.errors import SettingsError
from consilience.files.sealed import SigningKey
from consilience.study.collect import Publication, collect, read_records
from consilience.study.study import Study
from studies import records_parts, study_text, table

KEY = SigningKey.generate()


@pytest.fixture
def found(tmp_path):
    return Study.from_text(study_text() + records_parts(tmp_path))


@pytest.fixture
def contributions(found, tmp_path):
    made = []
    for i in range(3):
        ledger = Ledger(tmp_path / f"{i}.sqlite")
        ledger.allow("ward", Budget(epsilon=3.0))
        facts = {"site": f"site {i}", "signing": KEY, "dataset": "ward"}
        made.append(found.train(table(400, seed=i), ledger, epsilon=1.0, **facts))
    return made


def test_a_release_is_measured_beside_public_records_sites_and_other_aggregators(
    found, contributions, tmp_path
):
    public, test = read_records(found, tmp_path)
    release = collect(found, contributions, public=public, test=test, publication=Publication(KEY))
    rows = {row["method"]: row for row in release.sealed.facts["quality"]}
    assert list(rows)[:5] == [
        "Average (precision)",
        "always the most frequent class",
        "public records alone",
        "one site alone (the median site)",
        "one site alone (the best on these records)",
    ]
    assert {"Average (equal)", "Average (size)", "PublicBlend"} <= set(rows)
    error = (release.predict(test.X) != test.y).mean()
    assert rows["Average (precision)"]["error"]["value"] == pytest.approx(error)
    assert all(row["n_records"] == 200 for row in rows.values())


@pytest.mark.parametrize("part", ["public", "test"])
def test_without_the_records_that_the_study_names_nothing_is_combined(
    found, contributions, tmp_path, part
):
    records = dict(zip(("public", "test"), read_records(found, tmp_path), strict=True))
    records[part] = None
    with pytest.raises(SettingsError, match=f"names {part} records"):
        collect(found, contributions, **records, publication=Publication(KEY))


def test_a_site_is_in_a_release_once(found, contributions, tmp_path):
    public, test = read_records(found, tmp_path)
    twice = [*contributions, contributions[0]]
    with pytest.raises(SettingsError, match="only once"):
        collect(found, twice, public=public, test=test, publication=Publication(KEY))
