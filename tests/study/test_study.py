import copy
import dataclasses
import functools
import math
import operator
import re
import time
from contextlib import suppress

import numpy as np
import pytest

from consilience import Budget, Ledger, PrivateLogisticRegression
from consilience.aggregators.members import LinearEnsemble
from consilience.blind.roster import Rule
from consilience.errors import ConsilienceError, ContributionRejected, SettingsError
from consilience.files.certificate import of_contribution, of_release
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import Sealed, SigningKey
from consilience.privacy.guarantee import show_bound
from consilience.privacy.ledger import show_amount
from consilience.privacy.spending import Account
from consilience.study.check import StudyRefused
from consilience.study.collect import Publication
from consilience.study.draft import Draft
from consilience.study.pages import of_study, of_training
from consilience.study.records import PublicFile, file_digest
from consilience.study.study import Study, check
from consilience.tables.schema import Schema
from studies import PUBLIC_PART, TRUSTED, records_parts, study, study_text, table

KEYS = [SigningKey.generate() for _ in range(3)]


@pytest.fixture
def public(tmp_path):
    import pyarrow.csv

    pyarrow.csv.write_csv(table(400, seed=99), tmp_path / "public.csv")
    return PublicFile("public.csv", file_digest(tmp_path / "public.csv"))


def contributions(found, folder, sizes=(400, 900), epsilon=1.0):
    made = []
    for i, n in enumerate(sizes):
        ledger = Ledger(folder / f"{i}.sqlite")
        if found.learner not in ledger.datasets():
            ledger.allow("ward", Budget(epsilon=100.0, delta=1e-3, neighbours=found.neighbours))
        facts = {"site": f"site {i}", "signing": KEYS[i], "dataset": "ward"}
        made.append(found.train(table(n, seed=i), ledger, epsilon=epsilon, **facts))
    return made


@pytest.mark.parametrize(
    ("learner", "aggregator", "settings"),
    [
        ("PrivateLogisticRegression", "Average", ""),
        ("PrivateLinearSVC", "PublicBlend", ""),
        ("PrivateLogisticRegression", "FeatureMethod", ""),
        ("PrivateLogisticRegression", "SiteBoosting", ""),
        ("PrivateForestClassifier", "WeightedVote", "n_trees = 5"),
        ("PrivateLogisticRegression", "WeightedVote", ""),
        ("PrivateAdaBoostClassifier", "WeightedVote", ""),
        (
            "PrivateForestClassifier",
            "PooledCounts",
            'splitter = "random"\nrandom_state = 7\nn_trees = 10\nmax_depth = 3',
        ),
    ],
)
def test_the_two_verbs_make_a_release_that_predicts(
    learner, aggregator, settings, public, tmp_path
):
    part = f'[public]\nfile = "public.csv"\nsha256 = "{public.sha256}"\n'
    found = Study.from_text(study_text(learner, aggregator, settings=settings) + part)
    parts = contributions(found, tmp_path, epsilon=3.0)
    records = public.read(found.schema, tmp_path)
    release = found.combine(parts, records, publication=Publication(KEYS[2]))
    release.save(tmp_path / "release")
    again = Release.load(tmp_path / "release", key=KEYS[2].public)
    X = found.schema.encode(table(300, seed=7)).X
    assert (again.predict(X) == release.predict(X)).all()
    assert again.predict_proba(X).shape == (300, 2)
    assert (again.predict(X) == table(300, seed=7)["ill"].to_numpy()).mean() > 0.6
    assert again.guarantee.epsilon == pytest.approx(3.0)
    assert [source.site for source in again.sources] == ["site 0", "site 1"]
    assert again.study == found.reference


def test_a_trusted_hub_hides_whole_sites(public, tmp_path):
    text = study_text(
        aggregator="SoftLabelDistillation", privacy='hub = "trusted"', more="epsilon = 2.0"
    )
    found = Study.from_text(f'{text}[public]\nfile = "public.csv"\nsha256 = "{public.sha256}"\n')
    parts = contributions(found, tmp_path, sizes=(300, 300))
    assert all(math.isinf(part.guarantee.epsilon) for part in parts)
    hub = Ledger(tmp_path / "hub.sqlite")
    hub.allow("release", Budget(epsilon=3.0, unit="site"))
    published = Publication(KEYS[2], account=Account(hub, "release", "first"))
    records = public.read(found.schema, tmp_path)
    release = found.combine(parts, records, publication=published)
    assert (release.guarantee.unit, release.guarantee.epsilon) == ("site", pytest.approx(2.0))
    assert hub.balance("release").left.epsilon == pytest.approx(1.0)
    assert hub.charges()[0].study == found.digest
    assert "nothing against the hub" in of_release(release).as_text()


def test_the_page_of_a_study_with_a_trusted_hub_says_what_its_releases_hide(public):
    part = f'[public]\nfile = "public.csv"\nsha256 = "{public.sha256}"\n'
    hub = 'hub = "trusted"'
    for aggregator, more, says in (
        ("SoftLabelDistillation", f"epsilon = 2.0\n{part}", "one whole site"),
        ("Average", "epsilon = 2.0", "one record"),
        ("Average", "", "its releases promise nothing either"),
    ):
        text = study_text(aggregator=aggregator, privacy=hub, more=more)
        page = of_study(Study.from_text(text, stored=True)).as_text()
        assert says in page
        assert "nothing is promised against the hub" in page


@pytest.mark.parametrize("aggregator", ["Average", "WeightedVote", "SiteBoosting"])
def test_a_trusted_study_without_noise_is_refused_and_a_stored_one_is_closed(aggregator, tmp_path):
    text = study_text(aggregator=aggregator, privacy=TRUSTED, more=PUBLIC_PART)
    with pytest.raises(SettingsError, match="draws no noise"):
        Study.from_text(text)
    stored = Study.from_text(text, stored=True)
    assert "nothing: no noise is drawn" in of_study(stored).as_text()
    with pytest.raises(SettingsError, match="draws no noise"):
        stored.train(None, None, epsilon=1.0, site="a", signing=KEYS[0], dataset="ward")
    with pytest.raises(SettingsError, match="draws no noise"):
        stored.accept(contributions(study(), tmp_path)[0])


@pytest.mark.parametrize(
    ("learner", "settings", "neighbours", "person", "says"),
    [
        ("PrivateLogisticRegression", "", "replace-one", False, "the exact number of records"),
        ("PrivateLogisticRegression", "public_size = 50", "add-remove", False, "declared"),
        ("PrivateForestClassifier", "", "add-remove", False, "with noise"),
        ("PrivateAdaBoostClassifier", "", "replace-one", True, "with noise"),
        ("PrivateLogisticRegression", "", "replace-one", True, "the exact number of persons"),
    ],
)
def test_the_approval_page_says_which_number_leaves(
    learner, settings, neighbours, person, says, tmp_path
):
    text = study_text(learner, "WeightedVote", settings=settings)
    text = re.sub('neighbours = "[a-z-]+"', f'neighbours = "{neighbours}"', text)
    if person:
        text = text.replace("[schema]", '[schema]\nperson = "id"\nmax_records_per_person = 2')
    budget = Budget(epsilon=3.0, unit="person" if person else "record")
    balance = Ledger(tmp_path / "books.sqlite").allow("ward", budget)
    asked = {"site": "a", "epsilon": 1.0, "number": 1, "head": "0" * 64}
    page = of_training(Study.from_text(text), **asked, balance=balance)
    assert says in " ".join(page.as_text().split())


def test_noise_drawn_once_by_a_trusted_hub_is_what_the_release_states(tmp_path):
    found = study(privacy='hub = "trusted"', more='weights = "equal"\nepsilon = 1.0')
    parts = contributions(found, tmp_path)
    with pytest.raises(SettingsError, match="charged to the hub's ledger"):
        found.combine(parts, publication=Publication(KEYS[2]))
    hub = Ledger(tmp_path / "hub.sqlite")
    hub.allow("release", Budget(epsilon=3.0))
    published = Publication(KEYS[2], account=Account(hub, "release"))
    release = found.combine(parts, publication=published)
    assert release.guarantee.epsilon == pytest.approx(1.0)
    assert release.guarantee.unit == "record"
    assert hub.balance("release").spent.epsilon == pytest.approx(1.0)
    release.save(tmp_path / "file")
    assert Release.load(tmp_path / "file").guarantee == release.guarantee


def test_earlier_contributions_count_in_a_release(tmp_path):
    found = study()
    parts = contributions(found, tmp_path)
    earlier = {"site 0": [parts[0].guarantee, parts[0].guarantee]}
    release = found.combine(parts, publication=Publication(KEYS[2], earlier=earlier))
    assert release.sources[0].guarantee.epsilon == pytest.approx(3.0)
    assert release.guarantee.epsilon == pytest.approx(3.0)


def test_a_contribution_that_does_not_fit_is_refused_with_the_reason(tmp_path):
    found = study()
    part = contributions(found, tmp_path)[0]
    other = study(settings="regularization = 0.1")
    with pytest.raises(ContributionRejected, match="another study"):
        other.accept(part)
    forged = Sealed.seal(
        "contribution",
        {**part.sealed.facts, "study": other.reference},
        dict(part.sealed.tensors),
        KEYS[0],
    )
    with pytest.raises(ContributionRejected, match="other settings"):
        other.accept(dataclasses.replace(part, sealed=forged))
    with pytest.raises(SettingsError, match=r"from 0\.1 to 3"):
        found.train(table(50), None, epsilon=9.0, site="a", signing=KEYS[0], dataset="ward")


def test_forests_of_first_studies_predict_as_they_did_and_those_of_later_ones_are_calibrated():
    text = study_text("PrivateForestClassifier", "WeightedVote")
    later = text.replace("[study]", "[study]\nversion = 2")
    assert [Study.from_text(one).build(1.0).calibrate for one in (text, later)] == [False, True]


def test_too_few_sites_make_no_release(tmp_path):
    found = study(privacy="min_sites = 3")
    with pytest.raises(SettingsError, match="at least 3 sites"):
        found.combine(contributions(found, tmp_path), publication=Publication(KEYS[2]))


def test_a_release_whose_promise_was_lowered_is_refused(tmp_path):
    found = study()
    release = found.combine(contributions(found, tmp_path), publication=Publication(KEYS[2]))
    facts = {
        **release.sealed.facts,
        "guarantee": {**release.sealed.facts["guarantee"], "epsilon": 0.01},
    }
    Sealed.seal("release", facts, dict(release.sealed.tensors), KEYS[2]).save(tmp_path / "file")
    with pytest.raises(ContributionRejected, match="guarantee"):
        Release.load(tmp_path / "file")
    release.save(tmp_path / "file")
    with pytest.raises(ContributionRejected, match="another key"):
        Release.load(tmp_path / "file", key=KEYS[0].public)


# ----------------------------------------------------------------------------------------- the file


def test_the_digest_is_that_of_the_facts_not_of_the_layout():
    one = Study.from_text(study_text())
    two = Study.from_text(
        "# a comment\n" + study_text().replace("epsilon_min = 0.1", "epsilon_min   =   0.10")
    )
    assert one.digest == two.digest == Study.from_dict(one.to_dict()).digest
    assert one.digest != Study.from_text(study_text(privacy="min_sites = 5")).digest


@pytest.mark.parametrize(
    ("text", "digest"),
    [
        (study_text(), "2b2e1873fe818cc4b87ea7074ed43e6d9c86899152315addb98a8c7033bbc22e"),
        (
            study_text(
                "PrivateForestClassifier",
                "PooledCounts",
                settings='splitter = "random"\nrandom_state = 7',
            ),
            "487191ce70890c2509b585dccec2f760d3633d3d99ef29e2f12f77c21aac2d17",
        ),
        (
            study_text(
                aggregator="SoftLabelDistillation",
                privacy='hub = "trusted"\ndelta = 1e-6',
                more="epsilon = 2.0",
            )
            + f'[public]\nfile = "public.csv"\nsha256 = "{"a" * 64}"\n',
            "9717013cadf6aa8a785c5fcaa5e804175fd450cb7195fe2558576bdc2a07decc",
        ),
    ],
)
def test_digests_stay_what_they_were_when_files_that_carry_them_were_signed(text, digest):
    assert Study.from_text(text).digest == digest


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda text: text.replace("[learner]", "[lerner]"), "there is no part “lerner”"),
        (lambda text: text.replace("epsilon_min = 0.1", ""), "[privacy] lacks 'epsilon_min'"),
        (lambda text: text.replace("epsilon_max = 3.0", "epsilon_max = 0.01"), "in that order"),
        (lambda text: text.replace('"Average"', '"Avrage"'), "none of Average"),
        (lambda text: text.replace('"Average"', '"PublicBlend"'), "needs public records"),
        (
            lambda text: text.replace('"Average"', '"SoftLabelDistillation"\nepsilon = 1.0'),
            'needs hub = "trusted"',
        ),
        (
            lambda text: text.replace('"Average"', '"Average"\nepsilon = 1.0'),
            'needs hub = "trusted"',
        ),
        (
            lambda text: text.replace('"Average"', '"Average"\nepsilon = inf'),
            "draws no noise",
        ),
        (lambda text: text.replace("low = 18", ""), "'age'"),
        (lambda text: text.replace('name = "heart-risk"', 'name = "../Heart"'), "lower-case"),
        (
            lambda text: text.replace('name = "Average"', 'name = "Average"\nnoise = 3'),
            "may not set noise",
        ),
        (lambda text: text.replace("[study]", "[study"), "not valid TOML"),
        (lambda text: text.replace('name = "heart-risk"', "name = 5"), "must be text"),
        (lambda text: text.replace("epsilon_min = 0.1", 'epsilon_min = "much"'), "must be numbers"),
        (lambda text: text.replace("classes = [0, 1]", "classes = 7"), "[schema]"),
        (
            lambda text: text.replace("PrivateLogisticRegression", "PrivateForestClassifier"),
            "use WeightedVote or PooledCounts",
        ),
        (lambda text: text + "[learner.x]\ny = 1\n", "[learner]"),
        (
            lambda text: text + '[public]\nfile = "../secret.csv"\nsha256 = "00"\n',
            "without folders",
        ),
    ],
)
def test_every_problem_of_a_study_file_is_named(broken, says, tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(study_text())
    assert check(path) == []
    path.write_text(broken(study_text()))
    assert any(says in problem for problem in check(path)), check(path)


def test_all_problems_are_listed_together(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(
        study_text().replace("epsilon_min = 0.1", "").replace("[aggregator]\n", "[aggregator]\n#")
        + "[x]\n"
    )
    assert len(check(path)) >= 3


def test_a_public_file_that_was_changed_is_refused(public, tmp_path):
    (tmp_path / "public.csv").write_text("age,sex,pressure,ill\n1,f,1,1\n")
    with pytest.raises(SettingsError, match="differs from the one"):
        public.read(study().schema, tmp_path)


def test_a_draft_reads_names_only_unless_the_table_is_public(tmp_path):
    import pyarrow.csv

    pyarrow.csv.write_csv(table(60), tmp_path / "ward.csv")
    first = Draft(name="first", label="ill").write(tmp_path / "ward.csv")
    assert first.count("FILL IN") >= 5
    for value in table(60)["age"].to_pylist():
        assert str(value) not in first
    declared = Draft(
        name="second",
        label="ill",
        purpose="x",
        classes=["0", "1"],
        numbers={"age": (0, 120), "pressure": (50, 250)},
        categories={"sex": ["f", "m"]},
    ).write(tmp_path / "ward.csv")
    assert Study.from_text(declared).schema.n_features == 4
    known = Draft("third", "ill", purpose="x", is_public=True).write(tmp_path / "ward.csv")
    found = Study.from_text(known)
    assert (found.learner, found.public.file) == ("GradientStep", "ward.csv")
    rows = found.schema.encode(table(60))
    start = found.build(1.0).start
    model = LinearEnsemble(
        np.array([0, 1]), np.array([start[0][:-1]]), np.array([start[0][-1]]), np.ones(1), None, ()
    )
    assert np.mean(model.predict(rows.X) == rows.y) > 0.7
    with pytest.raises(SettingsError, match="no column 'sick'"):
        Draft(name="fourth", label="sick").write(tmp_path / "ward.csv")


@pytest.mark.parametrize(("is_public", "learner"), [(False, "Moments"), (True, "GradientStep")])
def test_a_draft_with_keyholders_shares_noise(is_public, learner, tmp_path):
    import pyarrow.csv

    pyarrow.csv.write_csv(table(60), tmp_path / "ward.csv")
    facts = {
        "purpose": "x",
        "classes": ["0", "1"],
        "numbers": {"age": (0, 120), "pressure": (50, 250)},
        "categories": {"sex": ["f", "m"]},
        "is_public": is_public,
    }
    keys = [key.public for key in KEYS[:2]]
    draft = Draft("shared", "ill", keyholders=keys, sites=10, **facts)
    found = Study.from_text(draft.write(tmp_path / "ward.csv"))
    assert (found.learner, found.aggregator, found.hub) == (learner, "Total", "blind")
    assert found.blind == Rule(8, 1, tuple(keys))
    assert found.min_sites == 9
    with pytest.raises(SettingsError, match="no statistic"):
        Draft("a", "ill", learner="PrivateRidge", keyholders=keys).write(tmp_path / "ward.csv")
    with pytest.raises(SettingsError, match="3 sites or more"):
        Draft("a", "ill", keyholders=keys, sites=2).write(tmp_path / "ward.csv")


def test_a_draft_of_a_public_table_refuses_identifiers_and_labels_that_are_numbers(tmp_path):
    rows = "".join(f"P{i},{i % 2},{i}\n" for i in range(80))
    (tmp_path / "ward.csv").write_text("who,ill,days\n" + rows)
    with pytest.raises(SettingsError, match=r"'who' has a different text .*--drop who"):
        Draft("a", "ill", is_public=True).write(tmp_path / "ward.csv")
    with pytest.raises(SettingsError, match=r"'days' has more than 50 .*--learner PrivateRidge"):
        Draft("a", "days", is_public=True, drop=["who"]).write(tmp_path / "ward.csv")
    text = Draft("a", "ill", is_public=True, drop=["who"]).write(tmp_path / "ward.csv")
    assert 'name = "who"' not in text


def test_a_draft_from_a_code_book_is_complete(tmp_path):
    import pyarrow.csv

    pyarrow.csv.write_csv(table(60), tmp_path / "ward.csv")
    book = tmp_path / "codebook.csv"
    book.write_text(
        "name,kind,low,high,categories,missing,cuts\n"
        "age,numeric,0,120,,middle,18|40|65\nsex,categorical,,,f|m,ignore,\n"
        "pressure,numeric,50,250,,100,8 bins\nill,label,,,0|1,,\n"
    )
    schema = Schema.from_codebook(book)
    text = Draft("fifth", "ill", purpose="x", schema=schema).write(tmp_path / "ward.csv")
    assert Study.from_text(text).schema == schema
    book.write_text(book.read_text().replace("pressure", "weight"))
    with pytest.raises(SettingsError, match="no column 'weight'"):
        Draft("sixth", "ill", schema=Schema.from_codebook(book)).write(tmp_path / "ward.csv")


def test_certificates_say_it_in_words(tmp_path):
    found = study()
    parts = contributions(found, tmp_path)
    release = found.combine(parts, publication=Publication(KEYS[2]))
    for page in (of_study(found), of_contribution(parts[0]), of_release(release)):
        text = page.as_text()
        assert "epsilon" in text
        assert "anonym" not in text.lower()
        assert text.splitlines()[0] in page.as_html().replace("&#x27;", "'")
    assert "73.2 of 100" in of_contribution(parts[0]).as_text()
    assert (
        "<script"
        not in of_study(dataclasses.replace(found, purpose="<script>alert(1)</script>")).as_html()
    )


def test_limits_are_part_of_the_study_only_if_it_sets_them():
    plain = Study.from_text(study_text())
    assert "max_size" not in plain.to_dict()["privacy"]
    stated = Study.from_text(study_text(privacy=f"max_size = {2**31}\nmax_weight = 1.0"))
    assert stated.digest == plain.digest
    limited = Study.from_text(study_text(privacy="max_size = 1000\nmax_weight = 0.4"))
    assert limited.digest != plain.digest
    assert Study.from_dict(limited.to_dict()) == limited
    assert (limited.max_size, limited.build_aggregator().max_weight) == (1000, 0.4)
    careful = Study.from_text(study_text(privacy="withhold_far = true"))
    assert Study.from_dict(careful.to_dict()).withhold_far
    assert Study.from_text(study_text(privacy="withhold_far = false")).digest == plain.digest
    limits = ("max_size = 0", "max_size = 2.5", "max_weight = 0", "max_weight = 1.5")
    for wrong in (*limits, "withhold_far = 1"):
        with pytest.raises(SettingsError, match=wrong.split(maxsplit=1)[0]):
            Study.from_text(study_text(privacy=wrong))


def test_a_study_with_a_random_matrix_says_how_it_is_drawn():
    """Without a seed a hub could compare a site's events only up to the matrix: a factor of 64."""
    for more in ("", "\nrandom_state = [1]"):
        with pytest.raises(StudyRefused, match="random_state"):
            study(settings='mechanism = "matrix"' + more)
    agreed = study(settings='mechanism = "matrix"\nrandom_state = 7')
    stored = Study.from_text(study_text(settings='mechanism = "matrix"'), stored=True)
    assert stored.digest != agreed.digest  # an earlier one can be read, and gets no new release
    with pytest.raises(StudyRefused, match="random_state"):
        stored.require_valid()


ODD = [None, -1, 10**400, float("nan"), float("inf"), "", "\ud800", [], [[0]], {"a": 1}, True]


DEEP = functools.reduce(lambda inner, _: [inner], range(400))


@pytest.mark.parametrize("value", [*ODD, DEEP], ids=range(len(ODD) + 1))
def test_facts_of_any_form_are_a_study_or_an_error_in_words(value, tmp_path):
    """A hub sends a study as JSON: it can put anything anywhere."""
    facts = Study.from_text(study_text(more="weights = 'size'") + records_parts(tmp_path)).to_dict()

    def places(inner, path=()):
        yield path
        if isinstance(inner, dict | list):
            names = inner if isinstance(inner, dict) else range(len(inner))
            for name in names:
                yield from places(inner[name], (*path, name))

    for *path, last in filter(None, places(facts)):
        sent = copy.deepcopy(facts)
        functools.reduce(operator.getitem, path, sent)[last] = value
        with suppress(ConsilienceError):
            made = Study.from_dict(sent)
            assert made.digest
            assert of_study(made).as_text()
    for sent in (value, {}):
        with pytest.raises(SettingsError):
            Study.from_dict(sent)


def test_columns_in_single_brackets_are_refused_with_what_to_write():
    head, _, rest = study_text().partition("[[schema.columns]]")
    text = head + "[schema.columns.age]" + rest.split("[[schema.columns]]")[0] + "[learner]"
    text += study_text().split("[learner]")[1]
    with pytest.raises(SettingsError, match=r"begin each column with \[\[schema.columns\]\]"):
        Study.from_text(text).require_valid()


def test_a_study_without_a_version_keeps_the_defaults_of_the_first():
    old = Study.from_text(study_text())
    assert old.version == 1
    assert "version" not in old.to_dict()["study"]
    first = {"mechanism": "objective", "regularization": 1e-2, "intercept_scaling": 1.0}
    assert {name: getattr(old.build(1.0), name) for name in first} == first
    text = study_text().replace("[study]", "[study]\nversion = 2")
    new = Study.from_text(text)
    assert Study.from_dict(new.to_dict()) == new != old
    assert new.digest != old.digest
    today = PrivateLogisticRegression(epsilon=1.0)
    assert all(getattr(new.build(1.0), name) == getattr(today, name) for name in first)
    trusted = Study.from_text(
        study_text(privacy=TRUSTED, more="epsilon = 1.0").replace("[study]", "[study]\nversion = 2")
    )
    kept = {"regularization": 1e-2, "intercept_scaling": 1.0}
    assert {name: getattr(trusted.build(1.0), name) for name in kept} == kept


@pytest.mark.parametrize("version", ["0", "3", "true", '"2"', "2.0"])
def test_a_version_that_nobody_knows_is_refused(version):
    with pytest.raises(SettingsError, match="version"):
        Study.from_text(study_text().replace("[study]", f"[study]\nversion = {version}"))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("classes = [0, 1]", f"classes = {list(range(501))}", "more than 500 classes"),
        ("classes = [0, 1]", f'classes = ["{"a" * 1_200_000}", "b"]', "more than 100 characters"),
        ('"sex"', f'"{"x" * 101}"', "at most 100 visible characters"),
        ('"sex"', '"s\u2800x"', "at most 100 visible characters"),
        ('["f", "m"]', str([f"{i:040}" for i in range(30_000)]), "too many for a file"),
    ],
    ids=["classes", "long class", "long column", "unseen column", "facts"],
)
def test_what_fits_in_no_file_is_refused_before_anybody_trains(old, new, problem):
    with pytest.raises(StudyRefused, match=problem) as refused:
        Study.from_text(study_text().replace(old, new))
    assert len(str(refused.value)) < 3000


def test_a_model_that_fits_in_no_file_is_refused_before_anybody_trains():
    large = {"settings": "n_trees = 9000\nmax_depth = 16"}
    with pytest.raises(StudyRefused, match="too large for a file"):
        study("PrivateForestClassifier", "WeightedVote", **large)
    study("PrivateForestClassifier", "WeightedVote", settings="n_trees = 60\nmax_depth = 12")


def test_the_page_of_a_study_names_every_column_that_is_read():
    person = 'label = "ill"\nperson = "number"\nmax_records_per_person = 2'
    page = of_study(Study.from_text(study_text().replace('label = "ill"', person))).as_text()
    for column in ("age", "sex", "pressure", "ill", "number"):
        assert re.search(rf"^\| {column} ", page, re.MULTILINE)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (".".join(["a"] * 20_000) + " = 1", "more than 32 parts"),
        ('"\\"".' * 20_000 + "a = 1", "more than 32 parts"),
        ("''  . " * 20_000 + "a = 1", "more than 32 parts"),
        ("[" + "a." * 20_000 + "a]", "more than 32 parts"),
        ("x = " + "9" * 5000, "not valid TOML"),
        ("x = " + "9" * 4000, "a number that is too large"),
        ("x = {y = [0x" + "f" * 4000 + "]}", "a number that is too large"),
    ],
)
def test_a_study_file_is_read_in_time_that_grows_with_its_length(part, why):
    began = time.process_time()
    with pytest.raises(StudyRefused, match=why):
        Study.from_text(study_text() + "\n" + part + "\n")
    assert time.process_time() - began < 1.0


def test_a_bound_beyond_all_numbers_is_refused():
    text = study_text()
    assert "epsilon_max = " in text
    text = re.sub(r"epsilon_max = [0-9.]+", "epsilon_max = " + "9" * 4000, text)
    with pytest.raises(StudyRefused, match="a number that is too large"):
        Study.from_text(text)


WORDS = "x' would be charged twice. The ledger was restored. Run: consilience site budget raise"


@pytest.mark.parametrize(
    "text",
    [
        study_text(settings=f'"{WORDS}" = 1'),
        study_text(more=f'"{WORDS}" = 1'),
        study_text() + f'["{WORDS}"]\nx = 1\n',
        study_text().replace("[privacy]", f'[privacy]\n"{WORDS}" = 1'),
        study_text(learner=WORDS),
        study_text(aggregator=WORDS),
    ],
    ids=["learner", "aggregator", "part", "setting", "name", "name of the aggregator"],
)
def test_words_of_a_study_stand_in_quotation_marks_that_they_cannot_end(text):
    """Whoever reads an error would take them for words of this program."""
    with pytest.raises(SettingsError) as refused:
        Study.from_text(text)
    said = str(refused.value)
    assert f"“{WORDS}”" in said
    assert said.count(WORDS) == 1
    assert "keyword argument" not in said


def test_the_problems_of_facts_are_quoted_and_few():
    evil = "x] in a study.\n\nThe ledger was repaired."
    with pytest.raises(SettingsError) as refused:
        Study.from_dict({evil: {}, "b" * 3_000_000: {}, **{f"part {i}": {} for i in range(1000)}})
    said = str(refused.value)
    assert "there is no part “x] in a study. The ledger was repaired.” in a study" in said
    assert "\n" not in said
    assert "more" in said
    assert len(said) < 10_000


def test_a_study_asks_for_no_training_without_an_end():
    """A site is charged before it trains; it could only kill a training that takes years."""
    for learner, setting in (
        ("PrivateAdaBoostClassifier", "n_rounds = 2000000\nmax_depth = 1"),
        ("PrivateForestClassifier", "n_trees = 400000\nmax_depth = 4"),
        ("PrivateTreeClassifier", "max_depth = 17"),
    ):
        with pytest.raises(SettingsError, match="must be a whole number"):
            study(learner, "WeightedVote", settings=setting)
    assert study("PrivateAdaBoostClassifier", "WeightedVote", settings="n_rounds = 1000")


MADE_UP = "none needed, because nothing is hidden. APPROVED: this costs epsilon = 0"
BOOSTED = ("PrivateAdaBoostClassifier", "WeightedVote")


@pytest.mark.parametrize(
    "text",
    [
        study_text(settings=f'mechanism = "{MADE_UP}"'),
        study_text("PrivateLinearSVC", settings=f'mechanism = "{MADE_UP}"'),
        study_text(settings="regularization = 0"),
        study_text(settings="regularization = [1, 2]"),
        study_text(settings='public_size = "x"'),
        study_text(settings="public_size = 0"),
        study_text(settings='fit_intercept = "no"'),
        study_text(settings='random_state = "seed"'),
        study_text(settings='mechanism = "gradient"'),
        study_text(settings="intercept_scaling = inf"),
        study_text(*BOOSTED, settings="max_features = [1, 2]"),
        study_text(*BOOSTED, settings="max_features = inf"),
        study_text(*BOOSTED, settings='max_features = "half"'),
        study_text(*BOOSTED, settings="max_features = -3"),
        study_text(*BOOSTED, settings="max_features = 2.5"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_settings_of_a_learner_are_refused_with_the_study(text, version):
    """What only a training refuses, a site has approved and perhaps paid for."""
    text = text.replace("[study]", f"[study]\nversion = {version}")
    with pytest.raises(StudyRefused, match=r"\[learner\]: "):
        Study.from_text(text)


@pytest.mark.parametrize(
    ("aggregator", "more"),
    [
        ("Average", 'curvature = "text"'),
        ("Average", "curvature = -1"),
        ("Average", "delta = 2"),
        ("WeightedVote", "weights = -1"),
        ("WeightedVote", "weights = [0, 0]"),
        ("SiteBoosting", 'n_rounds = "text"'),
        ("SiteBoosting", "shrinkage = 7"),
        ("SiteBoosting", 'coordinates = "no"'),
        ("FeatureMethod", 'mechanism = "text"'),
        ("PublicBlend", 'huber = "text"'),
        ("PublicBlend", 'random_state = "text"'),
    ],
)
def test_settings_of_an_aggregator_are_refused_with_the_study(aggregator, more):
    """What only combining refuses, sites have paid for, and no release can be made of it."""
    text = study_text(aggregator=aggregator, more=more) + PUBLIC_PART
    with pytest.raises(StudyRefused, match=r"\[aggregator\]: "):
        Study.from_text(text)


@pytest.mark.parametrize(
    ("aggregator", "more"),
    [
        ("Average", "epsilon = -1"),
        ("Average", "epsilon = 0"),
        ("Average", 'epsilon = "one"'),
        ("Average", "epsilon = [1.0, -1.0]"),
        ("Average", "epsilon = nan"),
        ("SoftLabelDistillation", "epsilon = -1"),
        ("SoftLabelDistillation", 'epsilon = 1.0\nneighbours = "text"'),
        ("FeatureMethod", 'mechanism = "output"\nepsilon = -1'),
    ],
)
def test_no_exact_model_is_asked_for_where_the_aggregators_noise_cannot_be(aggregator, more):
    text = study_text(aggregator=aggregator, more=more, privacy=TRUSTED) + PUBLIC_PART
    with pytest.raises(StudyRefused, match=r"\[aggregator\]|draws no noise"):
        Study.from_text(text)


def test_a_registered_learner_that_breaks_on_its_settings_is_a_problem_of_the_study(monkeypatch):
    monkeypatch.setattr(PrivateLogisticRegression, "planned", lambda *_: 1 / 0)
    with pytest.raises(StudyRefused, match="no training can be planned") as refused:
        study()
    assert "division" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        study_text(settings=f"random_state = {10**20}"),
        study_text(settings=f"regularization = {10**20}"),
        study_text(more=f"curvature = {10**20}"),
        study_text().replace("high = 250", f"high = {10**20}"),
        study_text(settings=f"regularization = -{10**19}"),
    ],
)
def test_a_number_that_no_file_can_hold_is_refused_with_the_study(text):
    """A writer has its reader's limits, before anybody is charged for what is written."""
    with pytest.raises(StudyRefused, match="a number that is too large"):
        Study.from_text(text)


def test_a_study_that_is_made_in_python_is_read_back_before_it_is_agreed():
    found = study()
    with pytest.raises(StudyRefused, match="too large"):
        dataclasses.replace(found, max_size=10**20)


def test_a_file_that_could_not_be_read_is_found_before_the_charge(tmp_path, monkeypatch):
    found, ledger = study(), Ledger(tmp_path / "ledger")
    ledger.allow("ward", Budget(epsilon=3.0))
    facts = {"epsilon": 1.0, "signing": KEYS[0], "dataset": "ward"}
    odd = found.build(1.0).stated_settings() | {"random_state": 10**20}
    with monkeypatch.context() as patched:
        patched.setattr(PrivateLogisticRegression, "stated_settings", lambda _: odd)
        with pytest.raises(SettingsError, match="could not be read again"):
            found.train(table(300), ledger, site="north", **facts)
    with pytest.raises(SettingsError, match="could not be read again"):
        found.train(table(300), ledger, site="n" * 201, **facts)
    assert ledger.balance("ward").spent.epsilon == 0
    assert found.train(table(300), ledger, site="north", **facts)


@pytest.mark.parametrize("mechanism", ["objective", "output", "generalized", "gradient"])
def test_a_ledger_of_another_relation_charges_what_the_page_and_the_file_say(tmp_path, mechanism):
    """The ledger converts event by event; whoever converts their sum states a larger delta."""
    text = study_text(
        settings=f'public_size = 300\nmechanism = "{mechanism}"', privacy="delta = 1e-6"
    ).replace('"replace-one"', '"add-remove"')
    found, ledger = Study.from_text(text), Ledger(tmp_path / "ledger")
    ledger.allow("ward", Budget(epsilon=9.0, delta=1e-3))
    before = ledger.balance("ward")
    who = {"site": "north", "number": 1, "head": "0" * 64}
    page = of_training(found, epsilon=1.0, balance=before, **who).as_text(200)
    facts = {"site": "north", "signing": KEYS[0], "dataset": "ward"}
    made = found.train(table(300), ledger, epsilon=1.0, **facts)
    made.save(tmp_path / "file")
    assert Contribution.load(tmp_path / "file").digest == made.digest
    spent = ledger.balance("ward").spent
    assert f"epsilon = {show_amount(spent.epsilon)}, delta = {show_bound(spent.delta)} (" in page


@pytest.mark.parametrize(
    ("settings", "max_size"),
    [
        ('calibration = "chaudhuri2011"', None),
        ('calibration = "chaudhuri2011"', 400),
        ('mechanism = "generalized"', None),
    ],
)
def test_a_page_says_at_most_wherever_the_cost_depends_on_the_size(tmp_path, settings, max_size):
    privacy = "" if max_size is None else f"max_size = {max_size}"
    found, ledger = study(settings=settings, privacy=privacy), Ledger(tmp_path / "ledger")
    ledger.allow("ward", Budget(epsilon=5.0))
    who = {"site": "north", "number": 1, "head": "0" * 64}
    page = of_training(found, epsilon=1.0, balance=ledger.balance("ward"), **who).as_text(200)
    assert "at most epsilon = 1" in page
    assert "at least epsilon = 4 of 5" in page


def test_a_study_of_persons_with_many_records_is_read_at_once():
    """A plan for thousands of records of one person can take a quarter of a minute."""
    text = study_text(settings='mechanism = "objective"', privacy="delta = 1e-6").replace(
        'label = "ill"', 'label = "ill"\nperson = "pid"\nmax_records_per_person = 10000'
    )
    began = time.process_time()
    assert Study.from_text(text)
    assert time.process_time() - began < 5.0
