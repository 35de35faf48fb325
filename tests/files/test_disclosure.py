"""Every field of every file has a reason, and none but noise tells neighbouring data sets apart.

The reasons are the tables of docs/guarantees/disclosure.md, which these tests read.
"""

import json
import math
import re
import sqlite3
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from sklearn.base import clone

from consilience import Budget, Ledger, OwnAxes, Public, start_from
from consilience.aggregators.registry import AGGREGATORS
from consilience.blind.masked import Acknowledgement, Batch, MaskedFile
from consilience.cli.files import make
from consilience.cli.site import write_log
from consilience.errors import SettingsError
from consilience.evaluation.baselines import PUBLIC_ROW
from consilience.evaluation.compare import MAJORITY
from consilience.files.certificate import of_contribution, of_release
from consilience.files.contribution import (
    FACTS,
    MASKED_FACTS,
    PROJECTED_FACTS,
    TUNED_FACTS,
    Contribution,
)
from consilience.files.log import ReleaseLog
from consilience.files.release import MEASURED
from consilience.files.sealed import Sealed, SigningKey
from consilience.learners.registry import LEARNERS
from consilience.learners.tuned import Tuning, tuned
from consilience.privacy.guarantee import Unit, count_is_public
from consilience.privacy.spending import Account
from consilience.site.site import Site
from consilience.statistics.base import Statistic
from consilience.statistics.vote_tally import pack_rows
from consilience.study.collect import Publication, read_records
from consilience.study.pages import of_training
from consilience.study.study import Study
from disclosed import TABLES, differing, listed
from studies import TRUSTED, records_parts, study_text, table
from sums import DELTA, HIDING_RECORDS, MODELS, STATISTICS, WHOLE, Case, records
from wards import Wards

KEYS = [SigningKey.generate() for _ in range(3)]
STUDY = {"name": "a", "digest": "0" * 64}
UNITS, RELATIONS = ("record", "person", "site"), ("replace-one", "add-remove")


# ----------------------------------------------------------------------------------- contributions

TREES = {"classes": [0, 1], "bounds": (-1, 1)}
CASES = [
    Case("logistic", LEARNERS["PrivateLogisticRegression"], {"classes": [0, 1]}, 2),
    Case(
        "logistic, gradients",
        LEARNERS["PrivateLogisticRegression"],
        {"classes": [0, 1], "mechanism": "gradient", "delta": 1e-6},
        2,
    ),
    Case("svc", LEARNERS["PrivateLinearSVC"], {"classes": [0, 1, 2]}, 3),
    Case("ridge", LEARNERS["PrivateRidge"], {"label_bound": 1.0}),
    Case("tree", LEARNERS["PrivateTreeClassifier"], TREES, 2),
    Case("forest", LEARNERS["PrivateForestClassifier"], TREES | {"n_trees": 3, "max_depth": 2}, 2),
    Case("boosting", LEARNERS["PrivateAdaBoostClassifier"], TREES, 2),
    *STATISTICS,
    *HIDING_RECORDS,
    *WHOLE,
]


def test_every_learner_and_statistic_is_among_the_cases():
    ours = {cls for cls in LEARNERS.values() if cls.__module__.startswith("consilience.")}
    assert {case.kind for case in CASES} == ours


def made(case, unit, relation):
    """Return the learner, or None where its class does not allow the unit or the relation."""
    settings = {"epsilon": 0.01, "unit": unit, "neighbours": relation, **case.settings}
    if unit == "person":
        settings["records_per_person"] = 2
    if "public_size" in case.kind._get_param_names():
        settings["public_size"] = 100
    if issubclass(case.kind, Statistic):
        settings["delta"] = DELTA
    asked = settings["unit"], settings["neighbours"]
    if asked != (unit, relation) or unit not in case.kind.units:
        return None
    if unit == "site" and (case not in WHOLE or relation == "add-remove"):
        return None  # sites take part by name, and other cases have the settings for them
    if case in MODELS and relation == "add-remove":
        return None
    return case.kind(**settings)


def neighbours_of(case, unit, relation):
    """Return two neighbouring tables and a third that is unlike them, as (X, y, persons)."""
    X, y = records(case, 240, seed=4)
    persons = np.arange(240) // 2
    keep = np.ones(240, bool)
    if relation == "add-remove":
        keep[persons == 7 if unit == "person" else 5] = False
    elif unit == "person":
        keep[14] = False  # person 7 has one record instead of two
    other = X.copy()
    other[15] = X[16]
    unlike = (-X[::-1] / 2, y[::-1], persons)
    if unit == "site":
        return (X, y, persons), (X[:90] / 3, y[60:150], persons[:90]), unlike
    return (X, y, persons), (other[keep], y[keep], persons[keep]), unlike


def contributed(learner, rows, folder):
    X, y, persons = rows
    books = Ledger(folder / "books.sqlite")
    if "ward" not in books.datasets():
        limit = Budget(epsilon=999.0, delta=0.1, unit=learner.unit, neighbours=learner.neighbours)
        books.allow("ward", limit)
    whose = {"persons": persons} if learner.unit == "person" else {}
    model = clone(learner).fit(X, y, ledger=books, dataset="ward", **whose)
    return Contribution.make(model, study=STUDY, site="north", sequence=1, key=KEYS[0])


def certificate_rows(page, table):
    """Return the rows of a certificate by name, and everything else that it says."""
    rows = [row for _, _, rows in page.sections for row in rows]
    known = {name: [value for each, value in rows if each == name] for name in TABLES[table]}
    others = [name for name, _ in rows if name not in known]
    said = [(page.title, heading, list(paragraphs)) for heading, paragraphs, _ in page.sections]
    return {name: values for name, values in known.items() if values}, others, said


def leaves(value, place=""):
    """Yield each value of facts, with its place."""
    if isinstance(value, dict | list | tuple):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, f"{place}.{name}")
    else:
        yield place, value


def telling(again, others):
    """Return places whose value stays the same for one table and is another one for others.

    An exact fact does that, under whatever kind it is listed; noise and chance do not stay.
    """
    again, others = ([dict(leaves(each)) for each in group] for group in (again, others))
    assert len({frozenset(each) for each in (*again, *others)}) == 1  # the same places
    return {
        place
        for place, value in again[0].items()
        if all(each[place] == value for each in again)
        and any(each[place] != value for each in others)
    }


def stated(file):
    """Return everything that a file states: facts, numbers, and its certificate."""
    page = of_contribution(file) if isinstance(file, Contribution) else of_release(file)
    numbers = {name: array.tolist() for name, array in file.sealed.tensors.items()}
    return {"facts": file.sealed.facts, "numbers": numbers, "certificate": page.sections}


CONTRIBUTION, CERTIFICATE = "A contribution", "The certificate of a contribution"


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("relation", RELATIONS)
def test_contributions_of_neighbours_differ_in_noise_alone(case, unit, relation, tmp_path):
    learner = made(case, unit, relation)
    if learner is None:
        pytest.skip("the class knows no such unit or relation")
    one, two, unlike = neighbours_of(case, unit, relation)
    again = [contributed(learner, one, tmp_path) for _ in range(4)]
    others = [contributed(learner, rows, tmp_path) for rows in (two, unlike)]
    facts = [file.sealed.facts for file in (again[0], *others)]
    assert set(facts[0]) == set(TABLES[CONTRIBUTION])
    listed(CONTRIBUTION, facts[0])
    rows = [certificate_rows(of_contribution(file), CERTIFICATE) for file in (again[0], *others)]
    assert rows[0][1] == []  # no row has another name
    listed(CERTIFICATE, rows[0][0])
    for i in (1, 2):
        assert differing(CONTRIBUTION, facts[0], facts[i]) == set()
        assert differing(CERTIFICATE, rows[0][0], rows[i][0]) == set()
        assert rows[i][1:] == rows[0][1:]
    # A choice among two that noise makes repeats itself 40 times with a probability of 1e-12.
    while len(again) < 40 and telling(*([*map(stated, files)] for files in (again, others))):
        again.append(contributed(learner, one, tmp_path))
    assert telling(*([*map(stated, files)] for files in (again, others))) == set()
    counted = Unit.RECORD if "trees" in case.kind.__module__ else Unit(unit)
    if unit == "site":
        assert facts[0]["size"] is None
    elif count_is_public(counted, unit=unit, neighbours=relation):
        assert facts[0]["size"] == (240 if counted == "record" else 120)


def test_contributions_along_axes_of_neighbours_differ_in_noise_alone(tmp_path):
    learner = LEARNERS["PrivateLogisticRegression"](
        epsilon=0.1, classes=[0, 1], projection=OwnAxes(2, 0.5)
    )
    one, two, unlike = neighbours_of(CASES[0], "record", "replace-one")
    again = [contributed(learner, one, tmp_path) for _ in range(4)]
    others = [contributed(learner, rows, tmp_path) for rows in (two, unlike)]
    table = f"{CONTRIBUTION} + A contribution along axes"
    listed(table, again[0].sealed.facts)
    for other in others:
        assert differing(table, again[0].sealed.facts, other.sealed.facts) == set()
    assert set(again[0].sealed.facts["tensors"]) == {"coef", "intercept"}
    while len(again) < 40 and telling(*([*map(stated, files)] for files in (again, others))):
        again.append(contributed(learner, one, tmp_path))
    assert telling(*([*map(stated, files)] for files in (again, others))) == set()


TUNED = f"{CONTRIBUTION} + A contribution of a chosen candidate"


def with_candidates(unit="record", relation="replace-one"):
    learner = made(CASES[0], unit, relation)
    settings = {"tuning": Tuning({"intercept_scaling": [0.3, 1.0]}), "epsilon": 0.1}
    return tuned(type(learner))(**learner.get_params(deep=False) | settings)


@pytest.mark.parametrize("unit", ["record", "person"])
@pytest.mark.parametrize("relation", ["replace-one", "add-remove"])
def test_contributions_of_chosen_candidates_differ_in_noise_alone(unit, relation, tmp_path):
    learner = with_candidates(unit, relation)
    one, two, unlike = neighbours_of(CASES[0], unit, relation)
    again = [contributed(learner, one, tmp_path) for _ in range(4)]
    others = [contributed(learner, rows, tmp_path) for rows in (two, unlike)]
    listed(TUNED, again[0].sealed.facts)
    for other in others:
        assert differing(TUNED, again[0].sealed.facts, other.sealed.facts) == set()
    rows = [certificate_rows(of_contribution(file), CERTIFICATE) for file in (again[0], *others)]
    assert all(each[1] == [] and each[2] == rows[0][2] for each in rows)
    assert differing(CERTIFICATE, rows[0][0], rows[1][0]) == set()
    while len(again) < 40 and telling(*([*map(stated, files)] for files in (again, others))):
        again.append(contributed(learner, one, tmp_path))
    assert telling(*([*map(stated, files)] for files in (again, others))) == set()
    units = 240 if unit == "record" else 120
    assert again[0].sealed.facts["size"] == (units if relation == "replace-one" else 100) // 3


@pytest.mark.parametrize("unit", list(Unit))
@pytest.mark.parametrize("relation", ["replace-one", "add-remove"])
def test_one_rule_says_which_numbers_are_public(unit, relation):
    public = {of for of in Unit if count_is_public(of, unit=unit, neighbours=relation)}
    assert public == ({unit} if relation == "replace-one" else set())


# ---------------------------------------------------------------------------------------- releases


def released(folder, text, tables):
    """Return the release of a study with one site for each table."""
    study = Study.from_text(text)
    folder.mkdir(exist_ok=True)
    public, test = read_records(study, folder.parent)
    contributions = []
    for i, rows in enumerate(tables):
        books = Ledger(folder / f"{i}.sqlite")
        books.allow("ward", Budget(epsilon=999.0, delta=0.1, neighbours=study.neighbours))
        sender = {"site": f"site {i}", "signing": KEYS[i], "dataset": "ward"}
        contributions.append(study.train(rows, books, epsilon=0.1, **sender))
    account = Account()
    if study.draws_noise:
        unit, relation = study.hidden
        hub = Ledger(folder / "hub.sqlite")
        hub.allow("release", Budget(epsilon=999.0, delta=0.1, unit=unit, neighbours=relation))
        account = Account(hub, "release")
    publication = Publication(KEYS[2], account=account, log=ReleaseLog())
    return study.combine(contributions, public=public, test=test, publication=publication)


def replaced(rows):
    """Return a table with one record replaced."""
    columns = rows.to_pydict()
    columns["age"][3] = 18.0 if columns["age"][3] > 50 else 90.0
    return rows.from_pydict(columns)


FOREST = 'n_trees = 3\nmax_depth = 2\nsplitter = "random"'
ROW = [1.5, 0.5, -0.5, 1.0, 0.2]
EPSILON = "epsilon = 0.1"
STUDIES = {  # by the name of the aggregator, and what is special
    "Average": {},
    "Average, sizes": {"privacy": TRUSTED, "more": f'weights = "size"\n{EPSILON}'},
    "PublicBlend": {"aggregator": "PublicBlend"},
    "FeatureMethod": {"aggregator": "FeatureMethod"},
    "FeatureMethod, noise": {
        "aggregator": "FeatureMethod",
        "privacy": TRUSTED,
        "more": f'mechanism = "output"\n{EPSILON}',
    },
    "SiteBoosting": {"aggregator": "SiteBoosting"},
    "WeightedVote": {"aggregator": "WeightedVote"},
    "WeightedVote, forests": {
        "learner": "PrivateForestClassifier",
        "settings": FOREST,
        "aggregator": "WeightedVote",
    },
    "PooledCounts": {
        "learner": "PrivateForestClassifier",
        "settings": f"{FOREST}\nrandom_state = 1",
        "aggregator": "PooledCounts",
    },
    "SoftLabelDistillation": {
        "aggregator": "SoftLabelDistillation",
        "privacy": TRUSTED,
        "more": EPSILON,
    },
    "VoteDistillation": {
        "learner": "PrivateForestClassifier",
        "aggregator": "VoteDistillation",
        "privacy": TRUSTED,
        "more": EPSILON,
    },
}
SUMS = {
    "Moments": "",
    "MomentsRegressor": "",
    "GradientStep": "start",
    "ModelSum": "",
    "VoteTally": "records",
    "LabelTables": "",
    "LeafCounts": "n_trees = 3\nmax_depth = 2",
    "Score": f"model = [{ROW}]",
    "Summary": "",
    "NumberSummary": "",
}


def test_every_aggregator_and_statistic_is_among_the_studies():
    ours = {x.__name__ for x in AGGREGATORS.values() if x.__module__.startswith("consilience.")}
    assert {name.split(",")[0] for name in STUDIES} | {"Total"} == ours
    sums = {case.kind.__name__ for case in (*STATISTICS, *HIDING_RECORDS, *WHOLE)}
    assert set(SUMS) == sums


def compared(tmp_path, text, unit):
    """Compare releases of one study, of tables of which one is a neighbour of the other's."""
    first, second = table(120, seed=1), table(100, seed=2)
    rows = replaced(first) if unit == "record" else table(90, seed=5)

    def made(place, one):
        return released(tmp_path / place, text, (one, second))

    again = [made("one", first) for _ in range(3)]
    others = [made("two", rows)]
    facts = [release.sealed.facts for release in (again[0], *others)]
    heading = "A release + Facts of some ensembles"
    listed(heading, facts[0])
    assert set(TABLES["A release"]) <= set(facts[0])
    assert differing(heading, *facts) == set()
    known = [certificate_rows(of_release(file), "The certificate of a release") for file in again]
    listed("The certificate of a release", known[0][0])
    named = {f"site {i}" for i in range(2)} | {row["method"] for row in facts[0]["quality"]}
    assert set(map(str, known[0][1])) <= named
    # What depends on noise may take few values, such as places in a list: it does not stay.
    while len(again) < 40 and telling(*([*map(stated, files)] for files in (again, others))):
        again.append(made("one", first))
    assert telling(*([*map(stated, files)] for files in (again, others))) == set()
    return facts


@pytest.mark.parametrize("name", STUDIES)
def test_releases_of_neighbours_differ_in_noise_alone(name, tmp_path):
    settings = STUDIES[name]
    parts = records_parts(tmp_path)
    text = study_text(**settings) + parts[: parts.index("[test]")]
    unit = Study.from_text(text).hidden[0]
    assert unit == ("site" if "Distillation" in name else "record")
    facts = compared(tmp_path, text, unit)
    if "privacy" in settings:  # weights of exact members may tell nothing
        told = [[(row["reason"], row["weight"]) for row in one["sources"]] for one in facts]
        assert told[0] == told[1]
    if unit == "site":
        assert {row["size"] for one in facts for row in one["sources"]} == {None}
        assert not re.search(r"\bn = ", str(facts[0]["sources"]))


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("relation", RELATIONS)
def test_totals_of_neighbours_differ_in_noise_alone(name, relation, tmp_path):
    parts = records_parts(tmp_path)
    files, settings = "", SUMS[name]
    text = study_text(privacy="delta = 1e-6").replace("replace-one", relation)
    if LEARNERS[name].predicts_number:
        text = text.replace('label = "ill"\nclasses = [0, 1]', 'label = "ill"\nlabel_bound = 1.0')
    head = text[: text.index("[learner]")]
    schema = Study.from_text(study_text()).schema
    public = Public(*schema.encode(tmp_path / "public.csv")[:2])
    if settings == "records":
        settings = f'records = "{pack_rows(public)}"'
    if settings == "start":
        files = parts[: parts.index("[test]")]
        settings = f"start = {json.dumps(start_from(public, classes=[0, 1]))}"
    if name == "ModelSum" and relation == "add-remove":
        settings = "regularization = 1.0"
    text = f'{head}[statistic]\nname = "{name}"\n{settings}\n{files}'
    units = LEARNERS[name].units
    if relation == "add-remove" and units == ("site",):
        with pytest.raises(SettingsError, match="neighbours"):
            Study.from_text(text)
        return
    compared(tmp_path, text, units[0])


def test_the_quality_of_a_release_hides_exact_members(tmp_path):
    text = study_text(**STUDIES["SoftLabelDistillation"]) + records_parts(tmp_path)
    made = released(tmp_path / "made", text, (table(120, seed=1), table(100, seed=2)))
    methods = [row["method"] for row in made.sealed.facts["quality"][1:]]
    assert methods == [MAJORITY, PUBLIC_ROW]  # nothing that was made of exact members


def test_every_measure_of_a_release_has_a_reason_and_no_other_is_taken(tmp_path):
    text = study_text(aggregator="PublicBlend") + records_parts(tmp_path)
    made = released(tmp_path / "made", text, (table(300, seed=1), table(200, seed=2)))
    listed("A release", made.sealed.facts)
    quality = TABLES["A row of the quality of a release"]
    found = {name for row in made.sealed.facts["quality"] for name in row}
    assert found == set(quality) - {"rmse", "r2"}
    assert set(quality) == {"method", "kind", "n_records", "level", *MEASURED}


def test_the_digest_of_an_exact_contribution_confirms_no_guess(tmp_path):
    settings = STUDIES["SoftLabelDistillation"]
    text = study_text(**settings) + records_parts(tmp_path)
    rows = (table(300, seed=1), table(200, seed=2))
    seen = released(tmp_path / "real", text, rows).sources[0].digest
    guessed = released(tmp_path / "guess", text, rows).sources[0].digest
    assert seen != guessed


def test_an_exact_contribution_without_a_nonce_is_refused_where_it_would_be_hidden(tmp_path):
    from consilience.errors import ContributionRejected

    settings = STUDIES["SoftLabelDistillation"]
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
    masked = f"{CONTRIBUTION} + A masked contribution"
    listed(masked, facts[0])
    assert differing(masked, *facts) == set()
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
    found = listed("A release + A release of opened totals", facts)
    assert ("A release of opened totals", "total") in found


def test_the_page_to_approve_lists_every_field_of_a_contribution(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    balance = ledger.allow("ward", Budget(epsilon=3.0))
    facts = {"site": "north", "epsilon": 1.0, "balance": balance, "number": 1, "head": "0" * 64}
    page = of_training(Study.from_text(study_text()), **facts).as_text(width=10_000)
    assert set(FACTS) == set(TABLES[CONTRIBUTION])
    assert set(MASKED_FACTS) == set(TABLES["A masked contribution"])
    assert set(PROJECTED_FACTS) == set(TABLES["A contribution along axes"])
    assert set(TUNED_FACTS) == set(TABLES["A contribution of a chosen candidate"]) - set(FACTS)
    assert all(words in page for words in FACTS.values())
    assert "Nothing is sent" not in page
    assert "chosen by rule" not in page
    today = Study.from_text(study_text().replace("[study]", "[study]\nversion = 2"))
    page = of_training(today, **facts).as_text(width=10_000)
    assert re.search(
        r"mechanism = objective, regularization = \S+ at 100 records, \S+ at 1,000", page
    )


# ---------------------------------------------------------------------- notes, papers, and all rows


def papers(wards, rows, sequence=1):
    """Return all papers of a blind study on the way to a total, by their tables."""
    file = wards.mask(0, rows=rows, sequence=sequence)
    files = [file, wards.mask(1, sequence=sequence), wards.mask(2, sequence=sequence)]
    opened = wards.open(files)
    described = [MaskedFile.of(each.sealed) for each in files]
    acknowledged = Acknowledgement.make(described[0], wards.keys[0])
    return {
        f"{CONTRIBUTION} + A masked contribution": file.sealed.facts,
        "The roster of a blind study": wards.roster.sealed.facts,
        "The card of a pad holder": wards.cards[0].sealed.facts,
        "The acknowledgement of a file": acknowledged.sealed.facts,
        "A batch": Batch.of(described).sign(KEYS[0]).as_dict(),
        "The opening of a batch": opened.batches[0][1][0].sealed.facts,
    }


def test_papers_of_neighbours_differ_in_chance_alone(tmp_path):
    wards = Wards(tmp_path)
    one, two = table(300, seed=3), replaced(table(300, seed=3))
    both = [papers(wards, rows, sequence) for rows, sequence in ((one, 1), (two, 2))]
    for heading, facts in both[0].items():
        listed(heading, facts)
        # No keyholder opens two files of a site with one number.
        expected = {f"{heading}: sequence"} if "masked" in heading else set()
        assert differing(heading, facts, both[1][heading]) == expected


def notes(folder, rows):
    """Return what a site leaves in a shared folder, and what its owner writes, by their tables."""
    shared = folder / "shared"
    shared.mkdir(parents=True)
    (shared / "study.toml").write_text(study_text())
    sites = []
    for name, own in (("north", rows), ("south", table(100, seed=2))):
        site = Site.init(folder / name, name=name, dataset="ward", budget=Budget(epsilon=3.0))
        site.join_folder(shared)
        site.train("heart-risk", own, epsilon=1.0, approve=lambda _: True)
        site.submit("heart-risk")
        sites.append(site)
    make(shared, folder / "coordinator.pem")
    site = sites[0]
    site.fetch("heart-risk")
    write_log("heart-risk", folder / "log.json", site.folder)
    log = json.loads((folder / "log.json").read_text())
    aside = replace(site.seen("heart-risk"), aside=(site.seen("heart-risk"),)).as_dict()["aside"]
    site.backup(folder / "copy.sqlite")
    with sqlite3.connect(folder / "copy.sqlite") as books:
        books.row_factory = sqlite3.Row
        found = [dict(row) for row in books.execute("SELECT * FROM entries ORDER BY number")]
        kept = books.execute("SELECT * FROM payloads").fetchall()
        kinds = books.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    assert {row["name"] for row in kinds} == {"entries", "payloads", "head"}
    assert set(kept[0].keys()) == {"key", "payload"}
    site.rotate_key()
    site.submit("heart-risk")
    site.withdraw("heart-risk")
    (note,), (change,) = shared.glob("*.withdrawn"), shared.glob("*.rotated")
    return {
        "The note of a withdrawal": [Sealed.load(note, "withdrawal").facts],
        "The note of a changed key": [Sealed.load(change, "rotation").facts],
        "The log of a site": [log | {"aside": aside}],
        "The backup of a ledger": [*found, {"payload": kept[0]["payload"]}],
    }


def test_notes_of_neighbours_differ_in_noise_and_chance_alone(tmp_path):
    rows = table(120, seed=1)
    both = [notes(tmp_path / str(i), each) for i, each in enumerate((rows, replaced(rows)))]
    for heading, found in both[0].items():
        assert len(found) == len(both[1][heading])
        seen = set()
        for one, two in zip(found, both[1][heading], strict=True):
            seen |= listed(heading, one)
            assert differing(heading, one, two) == set()
        assert {name for table, name in seen if table == heading} == set(TABLES[heading])


def test_every_row_of_the_page_is_a_field_of_some_file(tmp_path):
    seen, rows = set(), (table(120, seed=1), table(100, seed=2))
    parts = records_parts(tmp_path)
    public = parts[: parts.index("[test]")]
    texts = [study_text(**STUDIES[name]) + public for name in ("WeightedVote", "PooledCounts")]
    numbers = study_text(privacy="delta = 1e-6").replace("classes = [0, 1]", "label_bound = 1.0")
    head = numbers[: numbers.index("[learner]")]
    texts += [f'{head}[statistic]\nname = "NumberSummary"\n']
    texts += [f'{head}[statistic]\nname = "MomentsRegressor"\n{parts}']
    texts += [study_text(aggregator="PublicBlend") + parts]
    for i, text in enumerate(texts):
        release = released(tmp_path / f"made {i}", text, rows)
        seen |= listed("A release + Facts of some ensembles", release.sealed.facts)
        page = certificate_rows(of_release(release), "The certificate of a release")
        seen |= listed("The certificate of a release", page[0])
    wards = Wards(tmp_path)
    total = wards.release([wards.mask(i) for i in range(3)]).sealed.facts
    seen |= listed("A release + A release of opened totals", total)
    for heading, facts in papers(wards, rows[0], 2).items():
        seen |= listed(heading, facts)
    case = CASES[0]
    learner = made(case, "record", "replace-one")
    for each in (learner, clone(learner).set_params(projection=OwnAxes(2, 0.5))):
        file = contributed(each, neighbours_of(case, "record", "replace-one")[0], tmp_path)
        page = certificate_rows(of_contribution(file), CERTIFICATE)
        seen |= listed(f"{CONTRIBUTION} + A contribution along axes", file.sealed.facts)
        seen |= listed(CERTIFICATE, page[0])
    file = contributed(with_candidates(), neighbours_of(case, "record", "replace-one")[0], tmp_path)
    seen |= listed(TUNED, file.sealed.facts)
    seen |= listed(CERTIFICATE, certificate_rows(of_contribution(file), CERTIFICATE)[0])
    elsewhere = (
        "A contribution of weights",
        "The note of",
        "The log of a site",
        "The backup of",
        "The hub's",
    )
    assert {
        (heading, name)
        for heading, fields in TABLES.items()
        for name in fields
        if not heading.startswith(elsewhere)
    } <= seen


def test_the_comparison_finds_what_it_should():
    facts = {"a": 1, "b": [0.5, {"c": "x"}], "d": 7}
    assert telling([facts, {**facts, "d": 8}], [{**facts, "d": 9}]) == set()
    assert telling([facts, facts], [{**facts, "b": [0.5, {"c": "y"}]}]) == {".b.1.c"}
    study = {"name": "a", "digest": "b"}
    with pytest.raises(AssertionError, match="n_records"):
        listed("The name of a study", {**study, "n_records": 240})
    note = {"site": "a", "study": study, "tensors": {}}
    assert differing("The note of a changed key", note, {**note, "study": {**study, "name": "c"}})
    assert differing("The note of a changed key", note, {**note, "tensors": {"a": 1}})
    assert not differing("The note of a changed key", note, dict(note))
