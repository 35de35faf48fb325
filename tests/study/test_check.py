"""A site checks a release against its study as strictly as a hub checks a contribution."""

import json
from dataclasses import replace

import pytest

from consilience import Budget, Ledger
from consilience.errors import ContributionRejected
from consilience.files.log import ReleaseLog
from consilience.files.release import KIND, Release
from consilience.files.sealed import Sealed, SigningKey
from consilience.privacy.spending import Account
from consilience.study.check import check_release
from consilience.study.collect import Publication
from studies import TRUSTED, study, table

KEY = SigningKey.generate()


def made(folder, found, n_sites=3, epsilon=1.0):
    parts = []
    for i in range(n_sites):
        ledger = Ledger(folder / f"ledger-{i}")
        ledger.allow("ward", Budget(epsilon=3.0, neighbours=found.neighbours))
        facts = {"site": f"site {i}", "signing": KEY, "dataset": "ward"}
        parts.append(found.train(table(300, seed=i), ledger, epsilon=epsilon, **facts))
    hub = Ledger(folder / "hub")
    hub.allow("release", Budget(epsilon=9.0, delta=1e-3))
    account = Account(hub, "release") if found.draws_noise else Account()
    return found.combine(parts, publication=Publication(KEY, account=account, log=ReleaseLog()))


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return made(tmp_path_factory.mktemp("sites"), study())


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    return made(tmp_path_factory.mktemp("exact"), study(more="epsilon = 1.0", privacy=TRUSTED))


def forge(release, change):
    """Return a release whose facts were changed and which its hub signed anew."""
    facts = json.loads(json.dumps(dict(release.sealed.facts)))
    change(facts)
    for part in ("key", "tensors"):
        del facts[part]
    return Release(Sealed.seal(KIND, facts, release.sealed.tensors, KEY))._check()


def all_epsilons(epsilon, **more):
    def change(facts):
        for promise in (facts["guarantee"], *(row["guarantee"] for row in facts["sources"])):
            promise |= {"epsilon": epsilon, **more}

    return change


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
}


@pytest.mark.parametrize(("change", "problem"), FORGED.values(), ids=list(FORGED))
def test_a_release_that_the_study_does_not_allow_is_refused(release, change, problem):
    forged = forge(release, change)
    with pytest.raises(ContributionRejected, match=problem):
        check_release(study(), forged)


def test_an_honest_release_fits(release, noisy):
    check_release(study(), release)
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
    found = study()
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
        (lambda f: f["sources"][0]["guarantee"].update(epsilon=1.0), "none of this study"),
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
