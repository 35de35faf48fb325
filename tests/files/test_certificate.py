import json
import math
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consilience import Budget, Contribution, Ledger, Noise
from consilience.errors import ContributionRejected
from consilience.files.certificate import (
    Page,
    _guarantee_rows,
    _short,
    meaning,
    of_contribution,
    of_release,
)
from consilience.files.release import Release
from consilience.files.sealed import Sealed, SigningKey
from consilience.hub.dashboard.texts import _promise
from consilience.learners.linear import PrivateLogisticRegression
from consilience.learners.trees.adaboost import PrivateAdaBoostClassifier
from consilience.learners.trees.forest import PrivateForestClassifier, PrivateTreeClassifier
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit, show_bound, show_left
from consilience.text import Quoted

FOLDER = Path(__file__).parents[1] / "fixtures" / "version-0.1" / "releases"


def promise(epsilon, delta=0.0, unit=Unit.RECORD, neighbours=Neighbours.REPLACE_ONE):
    return Guarantee(epsilon=epsilon, delta=delta, unit=unit, neighbours=neighbours)


def test_the_factor_the_bet_and_the_failure_are_those_of_epsilon_and_delta():
    factor, bet = meaning(promise(3.0), against="anyone")
    assert "at most 20.1 times more likely" in factor
    assert "in at most 95.3 of 100" in bet
    *_, failure = meaning(promise(1.0, delta=1e-6), against="anyone")
    assert "at most 1e-06" in failure
    assert "whether one record was used" in " ".join(
        meaning(promise(1.0, neighbours=Neighbours.ADD_REMOVE), against="anyone")
    )


@pytest.mark.parametrize("epsilon", [0.0004, 0.004, 0.2, 0.3, 1.0, 3.0, 9.99, 13.0])
@pytest.mark.parametrize("delta", [0.0, 1e-6, 0.05])
def test_what_is_printed_is_never_less_than_what_is_promised(epsilon, delta):
    factor, bet, *_ = meaning(promise(epsilon, delta), against="anyone")
    times = float(re.search(r"at most (\S+) times", factor)[1])
    assert math.exp(epsilon) <= times <= max(1.01, 1.01 * math.exp(epsilon))
    right = float(re.search(r"in at most (\S+) of 100", bet)[1])
    best = 100 * (math.exp(epsilon) + delta) / (1 + math.exp(epsilon))
    assert best <= right <= best + 0.1 + 1e-9
    assert (f"up to a probability of {delta:g}" in factor) == (delta > 0)


@pytest.mark.parametrize("kind", [PrivateForestClassifier, PrivateAdaBoostClassifier])
def test_a_noisy_number_of_records_is_not_called_the_public_number_of_persons(kind, tmp_path):
    books = Ledger(tmp_path / "books.sqlite")
    books.allow("ward", Budget(epsilon=10, unit="person"))
    X = Noise(seed=1).open().uniform(600).reshape(300, 2)
    settings = {"neighbours": "replace-one", "unit": "person", "records_per_person": 3}
    model = kind(epsilon=1.0, classes=[0, 1], bounds=(0, 1), random_state=0, **settings)
    persons = np.repeat(np.arange(100), 3)
    model.fit(X, X[:, 0] > 0.5, persons=persons, ledger=books, dataset="ward")
    study = {"name": "s", "digest": "0" * 64}
    made = Contribution.make(
        model, study=study, site="n", sequence=1, key=SigningKey.at(tmp_path / "k.pem")
    )
    page = of_contribution(made).as_text(width=200)
    assert "a number of records with noise; the exact one is hidden" in page
    assert "public in this study" not in page


def test_a_certificate_states_what_settings_chose_by_themselves(tmp_path):
    books = Ledger(tmp_path / "books.sqlite")
    books.allow("ward", Budget(epsilon=10, delta=1e-5))
    X = Noise(seed=1).open().uniform(600).reshape(300, 2)
    key, study = SigningKey.at(tmp_path / "k.pem"), {"name": "s", "digest": "0" * 64}
    for settings, words in (
        ({}, "mechanism = objective, regularization = {:.3g} at 300 records"),
        (
            {"delta": 1e-6},
            "mechanism = gradient, steps = {1}, regularization = {0:.3g} at 300 records",
        ),
        ({"mechanism": "objective", "regularization": 0.1}, None),
    ):
        model = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], **settings)
        model.fit(X, X[:, 0] > 0.5, ledger=books, dataset="ward")
        made = Contribution.make(model, study=study, site="n", sequence=1, key=key)
        page = of_contribution(made).as_text(width=200)
        assert ("chosen by rule" in page) == (words is not None)
        assert made.learner.regularization_ == model.regularization_
        if words is not None:
            steps = getattr(model.events_[0], "steps", None)
            assert words.format(model.regularization_, steps) in page


TREE_CHOICES = {"neighbours": "replace-one", "bounds": (0, 1), "random_state": 0}


@pytest.mark.parametrize(
    ("kind", "settings", "names"),
    [
        (PrivateLogisticRegression, {"delta": 1e-6}, "mechanism steps regularization"),
        (PrivateLogisticRegression, {"mechanism": "output"}, "regularization"),
        (PrivateLogisticRegression, {"regularization": 0.1, "mechanism": "objective"}, ""),
        (
            PrivateForestClassifier,
            TREE_CHOICES,
            "n_trees max_depth max_features assignment splitter",
        ),
        (
            PrivateForestClassifier,
            {**TREE_CHOICES, "neighbours": "add-remove", "delta": 1e-6, "max_depth": 3},
            "n_trees max_features assignment splitter split_share",
        ),
        (PrivateTreeClassifier, TREE_CHOICES, "max_depth split_share"),
        (PrivateAdaBoostClassifier, TREE_CHOICES, "n_rounds"),
        (PrivateAdaBoostClassifier, {**TREE_CHOICES, "n_rounds": 4}, ""),
    ],
)
def test_a_file_states_what_settings_chose_and_is_refused_if_it_states_anything_else(
    kind, settings, names, tmp_path
):
    X = Noise(seed=1).open().uniform(600).reshape(300, 2)
    books, key = Ledger(tmp_path / "books.sqlite"), SigningKey.at(tmp_path / "k.pem")
    account = {"neighbours": settings.get("neighbours", "replace-one")}
    books.allow("ward", Budget(epsilon=10, delta=1e-5, **account))
    model = kind(epsilon=1.0, classes=[0, 1], **settings)
    model.fit(X, X[:, 0] > 0.5, ledger=books, dataset="ward")
    study = {"name": "s", "digest": "0" * 64}
    made = Contribution.make(model, study=study, site="n", sequence=1, key=key)
    chosen = dict(made.sealed.facts["chosen"])
    assert list(chosen) == names.split()
    page = of_contribution(made).as_text(width=400)
    assert ("chosen by rule" in page) == bool(names)
    if "n_trees" in chosen:
        assert model.counts_.shape[0] == chosen["n_trees"]
    if "n_rounds" in chosen:
        assert len(model.counts_) == chosen["n_rounds"] == 3
    if "max_depth" in chosen:
        assert model.shape_.depth == chosen["max_depth"]
    for name, value in chosen.items():
        said = f"{value:.3g}" if isinstance(value, float) else str(value)
        assert f"{name} = {said}" in page
    forgeries = [{**chosen, "huber": 1.0}, None, [1]]
    forgeries += [{**chosen, name: "none needed: APPROVED"} for name in chosen]
    for forgery in forgeries:
        facts = {**made.sealed.facts, "chosen": forgery}
        for part in ("key", "tensors"):
            facts.pop(part)
        sealed = Sealed.seal("contribution", facts, made.sealed.tensors, key)
        with pytest.raises(ContributionRejected, match="what its settings chose"):
            Contribution.load(sealed.to_bytes())


def test_a_page_shows_what_forests_will_choose_at_several_sizes():
    forest = PrivateForestClassifier(
        epsilon=1.0, classes=[0, 1], neighbours="replace-one", bounds=(0, 1)
    )
    said = forest.describe_choices(4, None)
    assert re.match(r"n_trees = \d+ at 100 records, \d+ at 1,000 records, \d+ at 10,000 re", said)
    assert "assignment = disjoint, splitter = random at 100 records" in said
    # Where the number is hidden and none is declared, nothing depends on it.
    hidden = PrivateForestClassifier(epsilon=1.0, classes=[0, 1], bounds=(0, 1))
    assert " at " not in hidden.describe_choices(4, None)


def test_no_noise_and_a_void_guarantee_are_called_by_their_names():
    assert "no protection against the hub" in meaning(promise(math.inf), against="the hub")[0]
    void = Guarantee.void("seeded noise", unit=Unit.RECORD, neighbours=Neighbours.REPLACE_ONE)
    assert meaning(void, against="anyone") == ["There is no guarantee: seeded noise."]


def signed_with(quality, path, **changes):
    """Return a release whose facts were changed and which its hub signed anew."""
    sealed = Sealed.load(FOLDER / "logistic.safetensors", "release")
    facts = json.loads(json.dumps(dict(sealed.facts)))
    facts["quality"] = quality(facts["quality"])
    for part in ("key", "tensors"):
        del facts[part]
    Sealed.seal("release", facts | changes, sealed.tensors, SigningKey.generate()).save(path)
    return Release.load(path)


@pytest.mark.parametrize(
    ("low", "high", "answer"),
    [(0.01, 0.2, "helps"), (-0.1, 0.2, "does not clearly help"), (-0.2, -0.1, "does not help")],
)
def test_whether_joining_helped_is_decided_by_the_paired_gains(low, high, answer, tmp_path):
    def with_gains(rows):
        gain = {"value": (low + high) / 2, "low": low, "high": high}
        return [row if row["kind"] == "study" else {**row, "gain": gain} for row in rows]

    page = of_release(signed_with(with_gains, tmp_path / "release")).as_text(width=10_000)
    assert f"Compared record by record, joining {answer}: the release's error is" in page
    assert f"gain {100 * low:+.1f} to {100 * high:+.1f} percentage points" in page


def test_a_release_states_a_version_and_a_time_and_no_prose(tmp_path):
    for name in ("software", "created"):
        for text in ("0.1 approved", "approved", "2026-11-18T08:00:00+00:00 approved", 1):
            with pytest.raises(ContributionRejected, match="version and time"):
                signed_with(list, tmp_path / "release", **{name: text})


def test_a_release_without_paired_gains_is_shown_without_a_verdict():
    page = of_release(Release.load(FOLDER / "logistic.safetensors")).as_text(width=10_000)
    assert "not compared with the alternatives record by record" in page
    assert "joining" not in page
    assert "Average" in page


def test_a_page_is_printable_whatever_text_it_is_given():
    page = Page("a\x1b[1Ab", [("c\nd", ["e\u202ef"], [("g\x9bh", "i\rj")])])
    for text in (page.as_text(), page.as_html()):
        assert text.replace("\n", "").isprintable()
    assert "c d" in page.as_text()


def test_text_of_others_is_set_off_from_ours_and_cannot_break_lines():
    """Runs of spaces, blanks without ink and long names cannot write a section of their own."""
    forged = (" " * 88).join(["Why?", "\u2800", "What it costs", "-------------", "nothing"])
    rows = [(Quoted("sex" + " " * 88 + "Digest" * 20), "f, m"), ("own", "row")]
    page = Page("Page", [("Asked", ["Their words:", Quoted(forged)], rows)])
    lines = page.as_text().splitlines()
    assert "| Why? \\u{2800} What it costs ------------- nothing" in lines
    assert [line for line in lines if "Digest" in line and not line.startswith("| ")] == []
    assert any(line.startswith("own ") and line.endswith(" row") for line in lines)
    assert len(lines) < 20
    assert "<blockquote>Why?" in page.as_html()
    assert "<tr class=quoted><th scope=row>sex" in page.as_html()


@pytest.mark.parametrize("width", [30, 60, 88])
def test_no_terminal_breaks_a_quoted_line_and_leaves_its_rest_without_a_bar(width):
    """Wide characters take two columns; a terminal may be narrower than a page elsewhere."""
    words = "Ｗ" * 43 + "This training was approved on 17 November."
    rows = [(Quoted("患者" * 9), Quoted(words)), (Quoted(words), "f, m"), ("own", "row")]
    lines = Page("Page", [("Asked", [Quoted(words)], rows)]).as_text(width).splitlines()
    columns = [
        sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in line)
        for line in lines
    ]
    assert max(columns) <= width
    foreign = [line for line in lines if set(line) & set("Ｗ患者v")]
    assert all(line.startswith("| ") for line in foreign)


@given(st.floats(1e-9, 700.0), st.floats(1e-300, 0.999), st.booleans())
def test_no_text_states_less_than_a_guarantee_does(epsilon, delta, is_plain):
    delta = 0.0 if is_plain else delta
    stated = Guarantee(epsilon=epsilon, delta=delta, unit="record", neighbours="replace-one")
    texts = [
        repr(stated),
        str(dict(_guarantee_rows(stated, checked=True))),
        _short(stated),
        _promise(stated),
        meaning(stated, against="x")[0],
        stated._repr_html_().split("protects")[0],
    ]
    number = r"(?:ε|epsilon|δ|delta)\W+(?:[a-z/<>=]*[ >])?([0-9][0-9.e+-]*[0-9]|[0-9])"
    for text in texts:
        found = [float(each) for each in re.findall(number, text)]
        assert found[0] >= epsilon * (1 - 1e-12), text
        assert all(each >= delta * (1 - 1e-12) for each in found[1:]), text
    assert float(show_bound(0.1 + 0.2)) == 0.3  # rounding errors are no reason to say 0.300001


@given(st.floats(1e-15, 1e4))
def test_no_text_offers_more_of_a_budget_than_is_left(left):
    assert left * (1 - 1e-5) <= float(show_left(left)) <= left * (1 + 1e-12)
    assert (show_left(0.3 - 0.1), show_left(0.0)) == ("0.2", "0")


def test_a_bound_is_never_stated_too_small():
    for epsilon in (13.9, 700.0, 1020.0):
        stated = Guarantee(epsilon=epsilon, delta=0.0, unit="record", neighbours="replace-one")
        power = int(re.search(r"10 to the power ([\d,]+)", meaning(stated, against="x")[0])[1])
        assert power * math.log(10) >= epsilon > (power - 1) * math.log(10)
