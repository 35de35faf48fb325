"""Every reason not to publish a release unasked, and that honest ones have none."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from consilience import Budget, Ledger, Noise, Study
from consilience.aggregators.average import Average
from consilience.aggregators.base import Aggregator, Description
from consilience.aggregators.members import as_members
from consilience.aggregators.outliers import find_far, find_heavy
from consilience.aggregators.registry import AGGREGATORS
from consilience.files.contribution import Contribution
from consilience.files.sealed import Sealed, SigningKey
from consilience.study.collect import Publication, collect
from consilience.study.pages import of_study
from consilience.study.withholding import (
    MOST_LEFT_OUT,
    MOST_RISE,
    Candidate,
    allowed_rise,
    describe_waiting,
)
from consilience.tables.public import Public
from studies import PUBLIC_PART, TRUSTED, overstate, study_text, table

KEY = SigningKey.generate()


def train(study, folder, epsilon=3.0, sizes=(2000,) * 4, table=table):
    made = []
    for i, size in enumerate(sizes):
        site = f"site {i}"
        ledger = Ledger(folder / f"{study.digest}{i}.sqlite")
        ledger.allow("ward", Budget(epsilon=50.0, neighbours=study.neighbours))
        facts = {"site": site, "signing": KEY, "dataset": "ward"}
        made.append(study.train(table(size, seed=i), ledger, epsilon=epsilon, **facts))
    return made


def flip(contribution, share_of_bound=0.99, names=("coef", "intercept")):
    """Return a contribution that says the opposite, as loudly as a hub accepts."""
    tensors = {name: contribution.sealed.tensors[name] for name in names}
    bounds = contribution.learner.implied({k: one.shape for k, one in tensors.items()}).bounds
    most = min(bounds[name].norm / np.linalg.norm(one) for name, one in tensors.items())
    facts = {k: v for k, v in contribution.sealed.facts.items() if k not in ("key", "tensors")}
    wrong = {name: -share_of_bound * most * one for name, one in tensors.items()}
    wrong = contribution.sealed.tensors | wrong
    return Contribution.load(Sealed.seal("contribution", facts, wrong, KEY).to_bytes())


def rare(n, seed):
    """Return records of which one in fourteen has the outcome."""
    drawn = table(n, seed)
    score = (np.asarray(drawn["age"]) - 50) / 30 + (np.asarray(drawn["pressure"]) - 130) / 30
    score = score + 0.5 * Noise(seed=1000 + seed).open().normal(n)
    return drawn.set_column(drawn.num_columns - 1, "ill", [(score > 1.8).astype(np.int64)])


def make_candidate(study, contributions, test=True, table=table, n_records=1500, **facts):
    encoded = study.schema.encode(table(n_records, seed=99))
    records = Public(encoded.X, np.asarray(encoded.y).astype(int)) if test else None
    release = collect(study, contributions, test=records, publication=Publication(KEY))
    names = study.schema.feature_names
    places = find_far([one.learner for one in contributions], records, names=names)
    far = {contributions[place].site: text for place, text in places.items()}
    places = find_heavy(release.ensemble)
    heavy = {contributions[place].site: text for place, text in places.items()}
    return Candidate(study, release, contributions, far, heavy, test=records, **facts)


@pytest.mark.parametrize("aggregator", ["Average", "WeightedVote"])
def test_honest_releases_have_no_reason(aggregator, tmp_path):
    study = Study.from_text(study_text(aggregator=aggregator))
    made = train(study, tmp_path)
    last = None
    for n in (2, 3, 4):
        candidate = make_candidate(study, made[:n], last=last)
        assert candidate.find_reasons() == []
        last = candidate.release


@pytest.mark.parametrize("aggregator", ["Average", "WeightedVote"])
def test_a_release_that_is_better_without_an_unusual_member_names_it(aggregator, tmp_path):
    """No public records to learn from are needed, and no earlier release."""
    study = Study.from_text(study_text(aggregator=aggregator))
    made = train(study, tmp_path)
    reasons = make_candidate(study, [*made[:3], study.accept(flip(made[3]))]).find_reasons()
    (without,) = [one for one in reasons if one.startswith("Without 'site 3' the error is ")]
    better, worse = (float(part.strip("%.")) for part in without.split() if "%" in part)
    assert better < worse - 3
    assert reasons[-1].startswith("'site 3': Its coefficients are")


def test_members_that_lie_together_are_left_out_together(tmp_path):
    study = Study.from_text(study_text())
    made = train(study, tmp_path)
    candidate = make_candidate(study, [*made[:2], flip(made[2]), flip(made[3])])
    candidate = replace(candidate, far={"site 2": "Far.", "site 3": "Far."})
    assert any(one.startswith("Without 'site 2' and 'site 3'") for one in candidate.find_reasons())


def test_a_release_worse_than_guessing_has_a_reason(tmp_path):
    study = Study.from_text(study_text())
    wrong = [flip(one, 0.01) for one in train(study, tmp_path)]  # nobody is unlike the others
    (reason,) = make_candidate(study, wrong).find_reasons()
    assert "worse than always giving the same answer (error" in reason


def test_a_release_worse_than_the_last_one_has_a_reason_only_with_an_unusual_member(tmp_path):
    study = Study.from_text(study_text())
    made = train(study, tmp_path)
    last = make_candidate(study, made).release
    spoilt = make_candidate(study, [*made[:3], flip(made[3])], last=last)
    title = "worse than release 1, which sites have"
    assert not any(title in one for one in replace(spoilt, far={}).find_reasons())
    reasons = replace(spoilt, far={"site 3": "Far."}).find_reasons()
    assert any(title in one for one in reasons)


def test_of_a_release_that_draws_noise_only_what_it_says_itself_is_judged(tmp_path):
    """What exact members make without one of them is known to nobody."""
    study = Study.from_text(study_text())
    noisy = Study.from_text(study_text(privacy=TRUSTED, more="epsilon = 1.0"))
    made = train(study, tmp_path)
    last = make_candidate(study, made[:3]).release
    candidate = make_candidate(study, [*made[:3], flip(made[3])], last=last)
    candidate = replace(candidate, study=noisy, far={}, heavy={}, contributions=())
    reasons = candidate.find_reasons()
    assert any("worse than release 1, which sites have" in one for one in reasons)
    assert not any("site 3" in one for one in reasons)
    honest = replace(candidate, release=make_candidate(study, made).release)
    assert honest.find_reasons() == []


@pytest.mark.parametrize(
    "text",
    [
        study_text(settings='mechanism = "output"'),
        study_text(aggregator="WeightedVote", settings='mechanism = "output"'),
        study_text("PrivateForestClassifier", "WeightedVote"),
    ],
)
def test_one_that_takes_all_of_the_weight_and_spoils_a_release_is_named(text, tmp_path):
    """Nothing else about it is unusual: its noise, by its number of records, explains nothing."""
    study = Study.from_text(text)
    made = train(study, tmp_path)
    last = make_candidate(study, made[:3]).release
    spoilt = [*made[:3], study.accept(overstate(made[3], KEY))]
    candidate = replace(make_candidate(study, spoilt, last=last), far={})
    reasons = candidate.find_reasons()
    assert any("worse than release 1, which sites have" in one for one in reasons)
    assert any(one.startswith("Without 'site 3' the error is ") for one in reasons)
    assert reasons[-1].startswith("'site 3': It has 100% of the weight")
    assert any(one.startswith("Without") for one in replace(candidate, last=None).find_reasons())


def test_a_last_release_that_cannot_be_read_is_a_reason_with_an_unusual_member(tmp_path):
    study = Study.from_text(study_text())
    candidate = make_candidate(study, train(study, tmp_path), unread=7)
    assert replace(candidate, far={}).find_reasons() == []
    reasons = replace(candidate, far={"site 3": "Far."}).find_reasons()
    assert reasons[0] == "Release 7, which sites have, cannot be read to compare it."


def test_an_honest_large_site_is_no_reason_and_one_that_spoils_a_release_is(tmp_path):
    study = Study.from_text(study_text())
    *small, large = train(study, tmp_path, sizes=(400, 400, 400, 3000))
    last = make_candidate(study, small).release

    def find_reasons(noise):
        candidate = make_candidate(study, [*small, shift(large, noise)], last=last)
        assert list(candidate.heavy) == ["site 3"]
        return replace(candidate, far={}).find_reasons()

    for noise in (-0.1, 0.0, 0.1):
        assert find_reasons(noise) == []
    assert any(one.startswith("Without 'site 3'") for one in find_reasons(2.0))


def shift(contribution, intercept):
    """Return a contribution with another intercept, which nothing about it shows."""
    facts = {k: v for k, v in contribution.sealed.facts.items() if k not in ("key", "tensors")}
    tensors = contribution.sealed.tensors
    tensors = tensors | {"intercept": tensors["intercept"] + intercept}
    return Contribution.load(Sealed.seal("contribution", facts, tensors, KEY).to_bytes())


@pytest.mark.parametrize("aggregator", ["Average", "WeightedVote"])
def test_whatever_a_member_that_nobody_names_costs_has_a_limit(aggregator, tmp_path):
    """A member that knows the alerts stays below them; what comes of it is seen all the same."""
    study = Study.from_text(study_text(aggregator=aggregator))
    made = train(study, tmp_path)
    rises = []
    for intercept in np.linspace(0, 3, 9):
        candidate = make_candidate(study, [*made[:3], shift(made[3], intercept)])
        candidate = replace(candidate, far={}, heavy={})  # it may be any that raises no alert
        error, without = (
            np.mean(np.asarray(model.predict(candidate.test.X)) != candidate.test.y)
            for model in (candidate.release.ensemble, candidate._without(["site 3"]))
        )
        reasons = candidate.find_reasons()
        if not reasons:
            rises.append(error - without)
    assert reasons
    assert reasons[0].startswith("Without 'site 3' the error is ")
    assert max(rises) <= MOST_RISE


@pytest.mark.parametrize("n_records", [60, 240])
def test_what_a_member_costs_has_a_limit_with_few_test_records_too(n_records, tmp_path):
    """A member that makes many answers differ, so that no interval shows what it costs."""
    study = Study.from_text(study_text())
    made = train(study, tmp_path)
    allowed, rises = allowed_rise(n_records), []
    for times in np.linspace(0, 3, 7):
        lie = scale(made[3], -times)
        candidate = make_candidate(study, [*made[:3], lie], n_records=n_records)
        candidate = replace(candidate, far={}, heavy={})
        error, without = (
            np.mean(np.asarray(model.predict(candidate.test.X)) != candidate.test.y)
            for model in (candidate.release.ensemble, candidate._without(["site 3"]))
        )
        named = [one for one in candidate.find_reasons() if one.startswith("Without 'site 3'")]
        # AUCs may be a reason too.
        assert named or error - without <= allowed
        rises.append(error - without)
    assert max(rises) > allowed
    assert allowed_rise(500) == allowed_rise(10**6) == MOST_RISE
    assert allowed_rise(125) == 2 * MOST_RISE


def test_a_study_says_when_its_releases_wait():
    tested = study_text() + PUBLIC_PART.replace("public", "test")
    (told,) = of_study(Study.from_text(tested)).sections[-2][1:2]
    assert "costs it more than 2.5% of the test records, or 0.56 / √n of them" in " ".join(told)
    assert "5.0% of the 125 test records" in " ".join(
        describe_waiting(Study.from_text(tested), 125)
    )
    (told,) = of_study(Study.from_text(study_text())).sections[-2][1:2]
    assert "no labelled test records" in " ".join(told)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("aggregator", ["Average", "WeightedVote"])
def test_with_a_rare_outcome_a_release_is_judged_by_its_auc(aggregator, named, tmp_path):
    """Whatever the release says, hardly anybody is told to have it, so errors do not change."""
    study = Study.from_text(study_text(aggregator=aggregator))
    made = train(study, tmp_path, table=rare)
    honest = make_candidate(study, made, table=rare)
    assert 0.04 < honest.test.y.mean() < 0.1
    assert replace(honest, far={}).find_reasons() == []
    lie = flip(made[3], names=("coef",))  # with the constant of an honest model
    spoilt = make_candidate(study, [*made[:3], study.accept(lie)], table=rare)
    spoilt = replace(spoilt, far={"site 3": "Far."} if named else {}, heavy={})
    errors = [
        np.mean(np.asarray(one.release.ensemble.predict(one.test.X)) != one.test.y)
        for one in (honest, spoilt)
    ]
    assert abs(errors[1] - errors[0]) < MOST_RISE
    reasons = spoilt.find_reasons()
    without = [one for one in reasons if one.startswith("Without 'site 3' the AUC is 0.")]
    assert len(without) == 1
    for title in ("always giving the same answer", "the median site's own model")[: 1 + named]:
        assert any(f"worse than {title} (AUC 0." in one for one in reasons)


@pytest.mark.parametrize("aggregator", ["Average", "WeightedVote"])
def test_no_number_of_members_that_hardly_count_hides_the_one_that_costs_most(aggregator, tmp_path):
    """Of 40 members, 36 err more by themselves than the one that spoils the release."""
    study = Study.from_text(study_text(aggregator=aggregator, settings='mechanism = "output"'))
    made = train(study, tmp_path, sizes=(2000,) * 4 + (20,) * 36)
    # Always the one class or always the other, by noise that so few records may well have.
    made[4:] = [shift(one, -10.0 if i % 3 else 10.0) for i, one in enumerate(made[4:])]
    assert replace(make_candidate(study, made), far={}, heavy={}).find_reasons() == []
    lie = make_candidate(study, [shift(made[0], 5.0), *made[1:]])
    wrong = [
        np.mean(np.asarray(one.learner.predict(lie.test.X)) != lie.test.y)
        for one in lie.contributions
    ]
    assert sum(error > wrong[0] for error in wrong[1:]) > MOST_LEFT_OUT
    reasons = replace(lie, far={}, heavy={}).find_reasons()
    assert any(one.startswith("Without 'site 0' the error is ") for one in reasons)


def test_a_regression_is_worded_with_the_title_of_its_measure(tmp_path):
    text = study_text("PrivateRidge").replace("classes = [0, 1]", "label_bound = 1.0")
    study = Study.from_text(text)
    wrong = [flip(one) for one in train(study, tmp_path)]
    encoded = study.schema.encode(table(1500, seed=99))
    test = Public(encoded.X, np.asarray(encoded.y))
    release = collect(study, wrong, test=test, publication=Publication(KEY))
    reasons = Candidate(study, release, wrong, {}, {}, test=test).find_reasons()
    assert any("worse than always giving the same answer (RMSE " in one for one in reasons)


def test_without_test_records_a_study_can_ask_for_a_decision(tmp_path):
    texts = study_text(), study_text(privacy="withhold_far = true")
    plain, careful = map(Study.from_text, texts)
    for study, n_reasons in ((plain, 0), (careful, 2)):
        made = train(study, tmp_path)
        assert make_candidate(study, made, test=False).find_reasons() == []
        spoilt = make_candidate(study, [*made[:3], flip(made[3])], test=False)
        assert len(spoilt.find_reasons()) == n_reasons
    assert "wants a decision" in spoilt.find_reasons()[0]


@dataclass(eq=False)
class Loudest(Aggregator):
    """Take over the member with the longest coefficients: no sum of what members say."""

    combines_coefficients = True

    def describe(self):
        return Description("Loudest", "One member decides.")

    def combine(self, members, public=None, **charge):
        loudest = max(as_members(members), key=lambda one: np.linalg.norm(one.coef))
        made = Average("equal").combine(members)
        return replace(made, coef=loudest.coef, intercept=loudest.intercept)


def scale(contribution, times):
    """Return a contribution with coefficients so many times as long."""
    tensors = {name: one * times for name, one in contribution.sealed.tensors.items()}
    facts = {k: v for k, v in contribution.sealed.facts.items() if k not in ("key", "tensors")}
    return Contribution.load(Sealed.seal("contribution", facts, tensors, KEY).to_bytes())


@pytest.mark.parametrize("n_members", [24, 100])
def test_what_one_of_many_members_does_is_seen_although_no_sum_shows_it(
    n_members, tmp_path, monkeypatch
):
    """Nearly all say the opposite of what is right, and only one of them is heard."""
    monkeypatch.setitem(AGGREGATORS, "Loudest", Loudest)
    study = Study.from_text(study_text(aggregator="Loudest"))
    one = train(study, tmp_path, sizes=(2000,))[0]
    facts = {k: v for k, v in one.sealed.facts.items() if k not in ("key", "tensors")}
    made = []
    for i in range(n_members):
        tensors = {
            name: tensor * (0.5 if i < 3 else -0.2 - 0.0001 * i)
            for name, tensor in one.sealed.tensors.items()
        }
        sealed = Sealed.seal("contribution", facts | {"site": f"site {i}"}, tensors, KEY)
        made.append(study.accept(Contribution.load(sealed.to_bytes())))
    assert replace(make_candidate(study, made), far={}, heavy={}).find_reasons() == []
    lie = make_candidate(study, [*made[:-1], scale(made[-1], 4)])
    reasons = replace(lie, far={}, heavy={}).find_reasons()
    assert any(one.startswith(f"Without 'site {n_members - 1}' the error") for one in reasons)
