"""Every field of every file has a reason, and none but noise tells neighbouring data sets apart.

The reasons are the tables of docs/guarantees/disclosure.md, which these tests read.
"""

import math
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from bounded import PrivateRidge
from consilience import (
    Budget,
    Ledger,
    PrivateAdaBoostClassifier,
    PrivateForestClassifier,
    PrivateLinearSVC,
    PrivateLogisticRegression,
    PrivateTreeClassifier,
)
from consilience.evaluation.baselines import PUBLIC_ROW
from consilience.evaluation.compare import MAJORITY
from consilience.files.contribution import FACTS, MASKED_FACTS, Contribution
from consilience.files.log import ReleaseLog
from consilience.files.release import MEASURED
from consilience.files.sealed import SigningKey
from consilience.privacy.guarantee import Unit, count_is_public
from consilience.privacy.spending import Account
from consilience.study.collect import Publication, read_records
from consilience.study.pages import of_training
from consilience.study.study import Study
from studies import TRUSTED, records_parts, study_text, table
from wards import Wards

PAGE = Path(__file__).parents[2] / "docs" / "guarantees" / "disclosure.md"
KEYS = [SigningKey.generate() for _ in range(3)]
TREES = (PrivateTreeClassifier, PrivateForestClassifier, PrivateAdaBoostClassifier)
LINEAR = (PrivateLogisticRegression, PrivateLinearSVC, PrivateRidge)


def listed(heading):
    """Return field: kind, from a table of the page."""
    section = PAGE.read_text().split(f"# {heading}\n")[1].split("\n##")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE))


CONTRIBUTION, MASKED, RELEASE, SOURCE, QUALITY = map(
    listed,
    (
        "A contribution",
        "A masked contribution",
        "A release",
        "A source of a release",
        "A row of the quality of a release",
    ),
)


def differing(kinds, one, two):
    """Return the fields that are called public and are not the same."""
    return {name for name, kind in kinds.items() if kind == "public" and one[name] != two[name]}


# ----------------------------------------------------------------------------------- contributions


def neighbours_of(unit, relation):
    """Return two neighbouring tables, as (X, y, persons): persons have one to three records."""
    rng = np.random.default_rng(4)
    X = rng.uniform(-0.5, 0.5, (240, 3))
    y = (X[:, 0] > 0).astype(int)
    persons = np.arange(240) // 2
    keep = np.ones(240, bool)
    if relation == "add-remove":
        keep[persons == 7 if unit == "person" else 5] = False
    elif unit == "person":
        keep[14] = False  # person 7 has one record instead of two
    other = X.copy()
    other[15] = 0.4
    return (X, y, persons), (other[keep], y[keep], persons[keep])


def contributed(kind, rows, unit, relation, folder):
    X, y, persons = rows
    settings = {"epsilon": 1.0, "unit": unit, "neighbours": relation}
    if unit == "person":
        settings["records_per_person"] = 2
    settings |= {"bounds": (-1, 1)} if kind in TREES else {"public_size": 100}
    if kind is not PrivateRidge:
        settings["classes"] = [0, 1]
    books = Ledger(folder / "books.sqlite")
    if "ward" not in books.datasets():
        books.allow("ward", Budget(epsilon=999.0, unit=unit, neighbours=relation))
    whose = {"persons": persons} if unit == "person" else {}
    model = kind(**settings).fit(X, y, ledger=books, dataset="ward", **whose)
    made = {"study": {"name": "a", "digest": "0" * 64}, "site": "north", "sequence": 1}
    return Contribution.make(model, **made, key=KEYS[0])


@pytest.mark.parametrize("kind", [*LINEAR, *TREES], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("unit", ["record", "person"])
@pytest.mark.parametrize("relation", ["replace-one", "add-remove"])
def test_contributions_of_neighbours_differ_in_noise_alone(kind, unit, relation, tmp_path):
    one, two = neighbours_of(unit, relation)
    files = [contributed(kind, rows, unit, relation, tmp_path) for rows in (one, two)]
    facts = [file.sealed.facts for file in files]
    assert set(facts[0]) == set(CONTRIBUTION)
    assert differing(CONTRIBUTION, *facts) == set()
    forms = [
        {name: (form["dtype"], form["shape"]) for name, form in each["tensors"].items()}
        for each in facts
    ]
    assert forms[0] == forms[1]
    assert facts[0]["nonce"] != facts[1]["nonce"]
    counted = Unit.RECORD if kind in TREES else Unit(unit)
    sizes = [each["size"] for each in facts]
    if count_is_public(counted, unit=unit, neighbours=relation):
        assert sizes == [len(one[1]) if counted == "record" else 120] * 2
    elif kind in LINEAR:
        assert sizes == [100, 100]
    else:  # the exact number would be the same in every file
        more = [contributed(kind, one, unit, relation, tmp_path) for _ in range(6)]
        assert len({file.sealed.facts["size"] for file in more}) > 1


@pytest.mark.parametrize("unit", list(Unit))
@pytest.mark.parametrize("relation", ["replace-one", "add-remove"])
def test_one_rule_says_which_numbers_are_public(unit, relation):
    public = {of for of in Unit if count_is_public(of, unit=unit, neighbours=relation)}
    assert public == ({unit} if relation == "replace-one" else set())


# ---------------------------------------------------------------------------------------- releases


def released(folder, text, tables, epsilon=1.0):
    """Return the release of a study with one site for each table."""
    study = Study.from_text(text)
    folder.mkdir(exist_ok=True)
    public, test = read_records(study, folder.parent)
    parts = []
    for i, rows in enumerate(tables):
        books = Ledger(folder / f"{i}.sqlite")
        books.allow("ward", Budget(epsilon=99.0, delta=0.1, neighbours=study.neighbours))
        sender = {"site": f"site {i}", "signing": KEYS[i], "dataset": "ward"}
        parts.append(study.train(rows, books, epsilon=epsilon, **sender))
    account = Account()
    if study.draws_noise:
        unit, relation = study.hidden
        hub = Ledger(folder / "hub.sqlite")
        hub.allow("release", Budget(epsilon=9.0, delta=0.1, unit=unit, neighbours=relation))
        account = Account(hub, "release")
    publication = Publication(KEYS[2], account=account, log=ReleaseLog())
    return study.combine(parts, public=public, test=test, publication=publication)


def replaced(rows):
    """Return a table with one record replaced."""
    columns = rows.to_pydict()
    columns["age"][3] = 18.0 if columns["age"][3] > 50 else 90.0
    return rows.from_pydict(columns)


STUDIES = {
    "average": ({}, "record"),
    "boosting": ({"aggregator": "SiteBoosting"}, "record"),
    "noise for a record": (
        {"privacy": TRUSTED, "more": 'weights = "size"\nepsilon = 1.0'},
        "record",
    ),
    "noise for a site": (
        {"aggregator": "SoftLabelDistillation", "privacy": TRUSTED, "more": "epsilon = 1.0"},
        "site",
    ),
    "noise for a site, of trees": (
        {
            "learner": "PrivateForestClassifier",
            "aggregator": "VoteDistillation",
            "privacy": TRUSTED,
            "more": "epsilon = 1.0",
        },
        "site",
    ),
}


@pytest.mark.parametrize("name", STUDIES)
def test_releases_of_neighbours_differ_in_noise_alone(name, tmp_path):
    settings, unit = STUDIES[name]
    text = study_text(**settings) + records_parts(tmp_path)
    assert Study.from_text(text).hidden[0] == unit
    first, second = table(300, seed=1), table(200, seed=2)
    other = replaced(first) if unit == "record" else table(90, seed=5)
    releases = [
        released(tmp_path / str(i), text, (rows, second)) for i, rows in enumerate((first, other))
    ]
    facts = [release.sealed.facts for release in releases]
    members = {"members"} if "members" in facts[0] else set()
    assert set(facts[0]) - members == set(RELEASE)
    assert differing(RELEASE, *facts) == set()
    for one, two in zip(facts[0]["sources"], facts[1]["sources"], strict=True):
        assert set(one) == set(SOURCE)
        assert differing(SOURCE, one, two) == set()
        # Noisy members may weigh otherwise; exact ones may not.
        exact = "trusted" in settings.get("privacy", "")
        if exact:
            assert (one["size"], one["reason"], one["weight"]) == (
                two["size"],
                two["reason"],
                two["weight"],
            )
    if unit == "site":
        assert {source.size for release in releases for source in release.sources} == {None}
        assert not re.search(r"\bn = ", str(facts[0]["sources"]))
        methods = [row["method"] for row in facts[0]["quality"][1:]]
        assert methods == [MAJORITY, PUBLIC_ROW]  # nothing that was made of exact members


def test_every_measure_of_a_release_has_a_reason_and_no_other_is_taken(tmp_path):
    text = study_text(aggregator="PublicBlend") + records_parts(tmp_path)
    made = released(tmp_path / "made", text, (table(300, seed=1), table(200, seed=2)))
    stated = {name for row in made.sealed.facts["quality"] for name in row}
    assert stated == set(QUALITY) - {"rmse", "r2"}
    assert set(QUALITY) == {"method", "kind", "n_records", "level", *MEASURED}


def test_the_digest_of_an_exact_contribution_confirms_no_guess(tmp_path):
    settings, _ = STUDIES["noise for a site"]
    text = study_text(**settings) + records_parts(tmp_path)
    rows = (table(300, seed=1), table(200, seed=2))
    seen = released(tmp_path / "real", text, rows).sources[0].digest
    guessed = released(tmp_path / "guess", text, rows).sources[0].digest
    assert seen != guessed


def test_an_exact_contribution_without_a_nonce_is_refused_where_it_would_be_hidden(tmp_path):
    from consilience.errors import ContributionRejected
    from consilience.files.sealed import Sealed

    settings, _ = STUDIES["noise for a site"]
    study = Study.from_text(study_text(**settings) + records_parts(tmp_path))
    sender = {"site": "site 0", "signing": KEYS[0], "dataset": "ward"}
    made = study.train(table(300), None, epsilon=1.0, **sender)
    assert math.isinf(made.guarantee.epsilon)
    assert study.accept(made) is made
    facts = {k: v for k, v in made.sealed.facts.items() if k not in ("nonce", "key", "tensors")}
    earlier = Sealed.seal("contribution", facts, made.sealed.tensors, KEYS[0])
    with pytest.raises(ContributionRejected, match="without a nonce"):
        study.accept(Contribution.load(earlier.to_bytes(), trusted=True))


def test_masked_contributions_of_neighbours_differ_in_chance_alone(tmp_path):
    wards = Wards(tmp_path)
    one = table(300, seed=3)
    two = one.set_column(0, one.column_names[0], pa.array([99, *one.column(0).to_pylist()[1:]]))
    assert one != two
    facts = [wards.mask(0, rows=rows).sealed.facts for rows in (one, two)]
    assert set(facts[0]) == set(CONTRIBUTION) | set(MASKED)
    assert differing(CONTRIBUTION | MASKED, *facts) == set()
    drawn = {"nonce", "seeds"}
    blind = [{k: v for k, v in each["blind"].items() if k not in drawn} for each in facts]
    assert blind[0] == blind[1]
    assert all(facts[0]["blind"][name] != facts[1]["blind"][name] for name in drawn)
    forms = [
        {name: (form["dtype"], form["shape"]) for name, form in each["tensors"].items()}
        for each in facts
    ]
    assert forms[0] == forms[1]


def test_a_release_of_opened_totals_states_no_more(tmp_path):
    wards = Wards(tmp_path)
    facts = wards.release([wards.mask(i) for i in range(3)]).sealed.facts
    more = set(listed("A release of opened totals"))
    assert more == {"total"}
    assert set(facts) - {"coef", "intercept"} <= set(RELEASE) | more
    assert set(facts["total"]) == {"files", "size", "squares"}


def test_the_page_to_approve_lists_every_field_of_a_contribution(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    balance = ledger.allow("ward", Budget(epsilon=3.0))
    facts = {"site": "north", "epsilon": 1.0, "balance": balance, "number": 1, "head": "0" * 64}
    page = of_training(Study.from_text(study_text()), **facts).as_text(width=10_000)
    assert set(FACTS) == set(CONTRIBUTION)
    assert set(MASKED_FACTS) == set(MASKED)
    assert all(words in page for words in FACTS.values())
    assert "Nothing is sent" not in page
    assert "chosen by rule" not in page
    today = Study.from_text(study_text().replace("[study]", "[study]\nversion = 2"))
    page = of_training(today, **facts).as_text(width=10_000)
    assert re.search(
        r"mechanism = objective, regularization = \S+ at 100 records, \S+ at 1,000", page
    )
