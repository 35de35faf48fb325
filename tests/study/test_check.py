"""A site checks a release against its study as strictly as a hub checks a contribution."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from consilience import Budget, Ledger
from consilience.errors import ContributionRejected, GuaranteeVoid
from consilience.files.certificate import of_release
from consilience.files.log import ReleaseLog
from consilience.files.release import KIND, Release
from consilience.files.sealed import Sealed, SigningKey
from consilience.privacy.spending import Account
from consilience.site.site import Site
from consilience.study.check import check_release
from consilience.study.collect import Publication, read_records
from consilience.study.study import Study
from studies import TRUSTED, records_parts, study, study_text, table

KEY = SigningKey.generate()


EARLIER = Site(Path(__file__).parents[1] / "fixtures" / "version-0.1" / "site")


def made(folder, found, n_sites=3, epsilon=1.0, *, earlier=False):
    parts = []
    for i in range(n_sites):
        ledger = Ledger(folder / f"ledger-{i}")
        ledger.allow("ward", Budget(epsilon=3.0, delta=1e-3, neighbours=found.neighbours))
        facts = {"site": f"site {i}", "signing": KEY, "dataset": "ward"}
        parts.append(found.train(table(300, seed=i), ledger, epsilon=epsilon, **facts))
    hub = Ledger(folder / "hub")
    unit, neighbours = found.hidden
    hub.allow("release", Budget(epsilon=9.0, delta=1e-3, unit=unit, neighbours=neighbours))
    account = Account(hub, "release") if found.draws_noise else Account()
    public, test = read_records(found, folder)
    again = {"earlier": {"site 0": [replace(parts[0].guarantee, epsilon=1.0)]}} if earlier else {}
    publication = Publication(KEY, account=account, log=ReleaseLog(), **again)
    return found.combine(parts, public, test, publication=publication)


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return made(tmp_path_factory.mktemp("sites"), study(**STUDY))


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    return made(tmp_path_factory.mktemp("exact"), study(more="epsilon = 1.0", privacy=TRUSTED))


def forge(release, change, tensors=None):
    """Return a release whose facts were changed and which its hub signed anew."""
    facts = json.loads(json.dumps(dict(release.sealed.facts)))
    change(facts)
    for part in ("key", "tensors"):
        del facts[part]
    return Release(
        Sealed.seal(KIND, facts, release.sealed.tensors if tensors is None else tensors, KEY)
    )._check()


def all_epsilons(epsilon, **more):
    def change(facts):
        for promise in (facts["guarantee"], *(row["guarantee"] for row in facts["sources"])):
            promise |= {"epsilon": epsilon, **more}

    return change


def all_weights(*weights):
    def change(facts):
        for row, weight in zip(facts["sources"], weights, strict=True):
            row["weight"] = weight

    return change


INTERVAL = ("value", "low", "high")
FORGED = {
    "another study": (lambda f: f["study"].update(digest="0" * 64), "belongs to another study"),
    "other aggregator": (lambda f: f["aggregator"].update(name="WeightedVote"), "aggregator"),
    "other settings": (lambda f: f["aggregator"].update(weights="equal"), "other settings"),
    "other classes": (lambda f: f.update(classes=["no", "yes"]), "other classes"),
    "an invented epsilon": (all_epsilons(0.01), "none of this study"),
    "an epsilon just below the least": (all_epsilons(0.1 * (1 - 1e-5)), "none of this study"),
    "an impossible size": (lambda f: f["sources"][0].update(size=0), "none of this study"),
    "an epsilon that nobody agreed to": (all_epsilons(7.0), "none of this study"),
    "a delta that nobody agreed to": (all_epsilons(1.0, delta=0.5), "none of this study"),
    "another unit": (all_epsilons(1.0, unit="person"), "none of this study"),
    "another relation": (all_epsilons(1.0, neighbours="add-remove"), "none of this study"),
    "a site twice": (lambda f: f["sources"][1].update(site="site 0"), "in it twice"),
    "a contribution twice": (
        lambda f: f["sources"][1].update(digest=f["sources"][0]["digest"]),
        "in it twice",
    ),
    "classes of another type": (lambda f: f.update(classes=[False, True]), "other classes"),
    "classes that are equal": (lambda f: f.update(classes=[0.0, 1.0]), "other classes"),
    "errors on no test records": (
        lambda f: f.update(
            quality=[
                {"method": "Average", "kind": "study", "error": dict.fromkeys(INTERVAL, 0.01)},
            ]
        ),
        "no test records",
    ),
    "a site with a space": (lambda f: f["sources"][1].update(site="site 0 "), "cannot be one"),
    "a Cyrillic letter": (lambda f: f["sources"][1].update(site="s\u0456te 0"), "cannot be one"),
    "a name without ink": (lambda f: f["sources"][1].update(site="\u3164"), "cannot be one"),
    "a digest in prose": (lambda f: f["sources"][1].update(digest="verified"), "cannot be one"),
    "weights beyond the limit": (all_weights(0.7, 0.2, 0.1), "such weights"),
    "negative weights": (all_weights(0.6, 0.6, -0.2), "such weights"),
    "half of the weight": (all_weights(0.2, 0.2, 0.1), "such weights"),
    "a reason with another size": (
        lambda f: f["sources"][0].update(reason="n = 9, epsilon = 1"),
        "does not fit",
    ),
    "a reason with another epsilon": (
        lambda f: f["sources"][0].update(reason="n = 300, epsilon = 0.001"),
        "does not fit",
    ),
    "an assumption in prose": (
        lambda f: f["guarantee"].update(assumptions=["the hub has verified everything"]),
        "assumption",
    ),
    "an assumption of a site in prose": (
        lambda f: f["sources"][0]["guarantee"].update(assumptions=["all is well"]),
        "none of this study",
    ),
    "number 0": (lambda f: f["sources"][0].update(sequence=0), "none of this study"),
}
STUDY = {"privacy": "max_weight = 0.6"}


@pytest.mark.parametrize(("change", "problem"), FORGED.values(), ids=list(FORGED))
def test_a_release_that_the_study_does_not_allow_is_refused(release, change, problem):
    forged = forge(release, change)
    with pytest.raises(ContributionRejected, match=problem):
        check_release(study(**STUDY), forged)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.update(note="x" * 100_000),
        lambda f: f["sources"][0].update(note="verified"),
        lambda f: f["sources"][0].update(reason="counted; the ledger was credited"),
        lambda f: f.update(quality=[{"method": "certified by the data officer", "kind": "study"}]),
        lambda f: f.update(quality=[{"method": "Average", "kind": "study", "note": "certified"}]),
    ],
)
def test_no_text_of_the_hub_travels_in_a_release(release, change):
    with pytest.raises(ContributionRejected, match="not those of a release"):
        forge(release, change)


def test_the_reason_of_a_void_guarantee_is_not_repeated(release):
    void = {"void_reason": "run: consilience site budget raise --epsilon 99"}
    with pytest.raises(GuaranteeVoid) as refused:
        forge(release, lambda facts: facts["guarantee"].update(void))
    assert "budget" not in str(refused.value)


def test_numbers_that_no_site_can_have_sent_are_refused(release):
    tensors = {name: np.full(one.shape, 1e9) for name, one in release.sealed.tensors.items()}
    with pytest.raises(ContributionRejected, match="numbers are larger"):
        check_release(study(**STUDY), forge(release, lambda facts: None, tensors))
    with pytest.raises(ContributionRejected, match="not those of a release"):
        forge(release, lambda facts: None, {**release.sealed.tensors, "more": np.zeros(9)})


def test_an_ensemble_or_learner_that_the_study_does_not_name_is_refused(release, tmp_path):
    """Votes of other learners stand in a release that says it is an average."""
    votes = made(tmp_path, study("PrivateLinearSVC", "WeightedVote", **STUDY))

    def pretend(facts, **agreed):
        kept = {name: facts[name] for name in ("study", "aggregator", "log")} | agreed
        facts |= {**json.loads(json.dumps(dict(votes.sealed.facts))), **kept}

    forged = forge(release, pretend, votes.sealed.tensors)
    with pytest.raises(ContributionRejected, match="does not make such a model"):
        check_release(study(**STUDY), forged)
    named = study("PrivateLogisticRegression", "WeightedVote", **STUDY)
    agreed = {"study": named.reference, "aggregator": {"name": "WeightedVote"}}
    forged = forge(release, lambda facts: pretend(facts, **agreed), votes.sealed.tensors)
    with pytest.raises(ContributionRejected, match="in the model of 'site 0'"):
        check_release(named, forged)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda f: f["learners"][0].update(size=299), "another size or guarantee"),
        (lambda f: f.update(voting="hard"), "other voting"),
        (lambda f: f["learners"][0]["settings"].update(regularization=0.5), "other settings"),
        (lambda f: f["learners"][0]["settings"].update(epsilon=9.0), "its epsilon is not"),
        (lambda f: f["learners"][0]["guarantee"].update(epsilon=2.0), "another size or guarantee"),
    ],
)
def test_members_of_a_vote_are_checked_as_contributions_are(tmp_path, change, problem):
    found = study(aggregator="WeightedVote")
    honest = made(tmp_path, found)
    check_release(found, honest)
    with pytest.raises(ContributionRejected, match=problem):
        check_release(found, forge(honest, change))
    large = {name: one * 1e9 for name, one in honest.sealed.tensors.items()}
    with pytest.raises(ContributionRejected, match="larger than its noise allows"):
        check_release(found, forge(honest, lambda facts: None, large))


FOREST = {"settings": 'splitter = "random"\nrandom_state = 3\nn_trees = 4\nmax_depth = 3'}


@pytest.mark.parametrize(
    "settings",
    [
        {"more": 'weights = "equal"'},
        {"more": 'weights = "size"'},
        {"more": 'robust = "median"'},
        {"privacy": "delta = 1e-6", "settings": 'mechanism = "gradient"'},
        {"learner": "PrivateLinearSVC"},
        {"aggregator": "WeightedVote", "more": 'weights = "equal"'},
        {"learner": "PrivateForestClassifier", "aggregator": "PooledCounts", **FOREST},
        {"learner": "PrivateForestClassifier", "aggregator": "WeightedVote"},
        {"learner": "PrivateTreeClassifier", "aggregator": "WeightedVote"},
        {"learner": "PrivateAdaBoostClassifier", "aggregator": "WeightedVote"},
        {"more": "epsilon = 1.0\ndelta = 1e-6", "privacy": TRUSTED},
        {"more": "epsilon = [1.0, 0.5, 1.0]", "privacy": TRUSTED},
        {"aggregator": "PublicBlend"},
        {"aggregator": "FeatureMethod"},
        {"aggregator": "SiteBoosting"},
        {"aggregator": "FeatureMethod", "more": "epsilon = 0.5"},
        {"aggregator": "FeatureMethod", "more": "epsilon = 2.0"},
        {
            "aggregator": "FeatureMethod",
            "more": 'epsilon = 0.5\nmechanism = "output"',
            "privacy": TRUSTED,
        },
        {"aggregator": "SoftLabelDistillation", "more": "epsilon = 1.0", "privacy": TRUSTED},
        {"aggregator": "VoteDistillation", "more": "epsilon = 1.0", "privacy": TRUSTED},
    ],
    ids=str,
)
def test_honest_releases_of_every_aggregator_fit(tmp_path, settings):
    found = Study.from_text(study_text(**settings) + records_parts(tmp_path))
    check_release(found, made(tmp_path, found))


@pytest.mark.parametrize("name", EARLIER.studies)
def test_honest_releases_of_earlier_versions_fit(name):
    check_release(EARLIER.study(name), EARLIER.release(name))


def test_noise_for_other_records_leaves_the_sites_what_they_paid(tmp_path):
    """At a hub that is not trusted, noise hides aggregation records and no record of a site."""
    more = {"aggregator": "FeatureMethod", "more": "epsilon = 0.5"}
    found = Study.from_text(study_text(**more) + records_parts(tmp_path))
    honest = made(tmp_path, found, epsilon=2.0, earlier=True)
    assert honest.guarantee.epsilon == max(source.guarantee.epsilon for source in honest.sources)
    assert honest.guarantee.epsilon == pytest.approx(3.0)
    check_release(found, honest)
    for change, problem in (
        ({"epsilon": 0.5}, "more than its noise can keep"),
        ({"epsilon": 1000.0}, "less than agreed"),
        ({"delta": 0.9}, "less than agreed"),
    ):
        with pytest.raises(ContributionRejected, match=problem):
            check_release(found, forge(honest, lambda f, c=change: f["guarantee"].update(c)))


def test_an_honest_release_fits(release, noisy):
    check_release(study(**STUDY), release)
    check_release(study(more="epsilon = 1.0", privacy=TRUSTED), noisy)


def made_at_least(folder, **settings):
    """Return a study and a release of it, of sites that all chose the least epsilon."""
    found = study(**settings)
    return found, made(folder, found, epsilon=found.epsilon_range[0])


def test_the_least_epsilon_of_a_papers_noise_is_the_one_that_it_costs(tmp_path):
    """Its constants are loose, so a site is charged less than it asked for: half, and no less."""
    found, honest = made_at_least(tmp_path, settings='mechanism = "generalized"')
    (least,) = {source.guarantee.epsilon for source in honest.sources}
    assert least < 0.9 * found.epsilon_range[0]
    check_release(found, honest)
    with pytest.raises(ContributionRejected, match="none of this study"):
        check_release(found, forge(honest, all_epsilons(least * (1 - 1e-5))))


def test_the_least_epsilon_fits_to_the_last_digits(tmp_path):
    found, honest = made_at_least(
        tmp_path, learner="PrivateForestClassifier", aggregator="WeightedVote"
    )
    check_release(found, honest)


def test_noise_under_another_relation_keeps_no_promise(noisy):
    """The event of add-remove noise costs less than the same noise under replace-one."""

    def change(facts):
        events = json.loads(facts["events"])
        for event in events:
            event["neighbours"] = "add-remove"
        facts["events"] = json.dumps(events)

    with pytest.raises(ContributionRejected, match="more than its noise can keep"):
        check_release(study(more="epsilon = 1.0", privacy=TRUSTED), forge(noisy, change))


def test_a_release_states_the_delta_of_its_noise(tmp_path):
    settings = {"more": "epsilon = 1.0\ndelta = 1e-6", "privacy": TRUSTED}
    found = study(**settings)
    honest = made(tmp_path, found)
    assert honest.guarantee.delta > 0
    check_release(found, honest)
    with pytest.raises(ContributionRejected, match="more than its noise can keep"):
        check_release(found, forge(honest, lambda facts: facts["guarantee"].update(delta=0.0)))


def test_other_columns_or_too_few_sites_are_refused(release):
    found = study(**STUDY)
    few = replace(found, stored=True, min_sites=4)
    object.__setattr__(few, "digest", found.digest)
    with pytest.raises(ContributionRejected, match="at least 4 are needed"):
        check_release(few, release)
    less = replace(found.schema, columns=found.schema.columns[:2])
    narrow = replace(found, stored=True, schema=less)
    object.__setattr__(narrow, "digest", found.digest)
    with pytest.raises(ContributionRejected, match="another number of features"):
        check_release(narrow, release)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda f: f["guarantee"].update(epsilon=0.01), "more than its noise can keep"),
        (lambda f: f["guarantee"].update(epsilon=5.0), "promises less than agreed"),
        (lambda f: f["guarantee"].update(unit="site"), "hides something else"),
        (lambda f: f["guarantee"].update(neighbours="add-remove"), "hides something else"),
        (lambda f: f["guarantee"].update(delta=0.99), "promises less than agreed"),
        (lambda f: f["sources"][0]["guarantee"].update(epsilon=1.0), "none of this study"),
        (lambda f: f["sources"][0]["guarantee"].update(delta=1.0), "none of this study"),
        (lambda f: f["sources"][0].update(sequence=0), "none of this study"),
        (lambda f: f["sources"][0].update(size=-5), "none of this study"),
    ],
)
def test_a_release_with_noise_promises_what_its_noise_keeps(noisy, change, problem):
    with pytest.raises(ContributionRejected, match=problem):
        check_release(study(more="epsilon = 1.0", privacy=TRUSTED), forge(noisy, change))


@pytest.mark.parametrize("number", [0, 2, 2**52])
def test_the_number_of_a_release_is_that_of_its_log(release, number):
    with pytest.raises(ContributionRejected, match="not those of a release"):
        forge(release, lambda facts: facts.update(sequence=number))
    with pytest.raises(ContributionRejected, match="not those of a release"):
        forge(release, lambda facts: facts.update(log={"before": 1, "head": 3, "digests": []}))


IMPOSSIBLE = {
    "an error below zero": ("error", {"value": -3, "low": -9, "high": 1}),
    "an AUC above one": ("auc", {"value": 7.5, "low": 0, "high": 9}),
    "an interval the wrong way round": ("error", {"value": 0.5, "low": 0.9, "high": 0.1}),
    "a calibration below zero": ("calibration", {"value": -1, "low": -2, "high": 0}),
    "fewer than no records": ("n_records", -5),
    "other records": ("n_records", 77),
    "a level beyond certainty": ("level", 17.0),
    "a gain of 500 points": ("gain", {"value": 5, "low": 5, "high": 5}),
    "a second release": ("kind", "study"),
    "an invented baseline": ("method", "EveryOtherModel (checked-by-this-program)"),
    "a method twice": ("method", "always the most frequent class"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_numbers_of_quality_that_cannot_be_are_refused(tmp_path, name):
    text = study_text() + records_parts(tmp_path)
    release = made(tmp_path, Study.from_text(text))
    fact, value = IMPOSSIBLE[name]

    def change(facts):
        rows = facts["quality"]
        assert rows[1]["method"] == "always the most frequent class"
        row = next(row for row in rows[2:] if row["kind"] == "baseline")
        row[fact] = value

    with pytest.raises(ContributionRejected, match="are not those of a release"):
        forge(release, change)


def test_a_method_that_is_not_known_here_is_quoted(tmp_path):
    text = study_text() + records_parts(tmp_path)
    release = made(tmp_path, Study.from_text(text))

    def change(facts):
        other = next(row for row in facts["quality"] if row["kind"] == "other")
        facts["quality"].append({**other, "method": "Approved (by-everyone)"})

    page = of_release(forge(release, change)).as_text()
    assert "| Approved (by-everyone)" in page
    assert "| Average (equal)" not in page
