"""`Total` adds up what sites released, weighs by public facts, and finishes the sum."""

import math

import numpy as np
import pytest

from consilience import Budget, Ledger, Noise, PrivateLogisticRegression
from consilience.errors import ContributionRejected, SchemaMismatch, SettingsError
from consilience.files.contribution import Contribution, rebuild, take_apart
from consilience.files.sealed import Sealed, SigningKey
from consilience.statistics.moments import Moments
from consilience.statistics.total import Total
from consilience.tables.public import Public
from studies import table
from sums import DELTA, STATISTICS, exact, make, records
from wards import Wards

KEY = SigningKey.generate()


def sites(statistic, sizes, *, epsilon=math.inf, first=0):
    fitted = []
    for i, n in enumerate(sizes):
        X, y = records(statistic, n, seed=first + i)
        delta = 0.0 if math.isinf(epsilon) else DELTA
        noise = Noise(seed=i)
        fitted.append(make(statistic, epsilon=epsilon, delta=delta, noise=noise).fit(X, y))
    return fitted


@pytest.mark.parametrize("statistic", STATISTICS)
def test_the_total_of_exact_sums_is_the_sum_of_all_records(statistic):
    parts = [records(statistic, n, seed=n) for n in (50, 80)]
    pooled = exact(statistic, *map(np.concatenate, zip(*parts, strict=True)))
    joined = Total().combine([exact(statistic, *part) for part in parts])
    X, _ = records(statistic, 200, seed=9)
    assert joined.predict(X) == pytest.approx(pooled.predict(X))
    assert joined.weights == pytest.approx([50 / 130, 80 / 130])


@pytest.mark.parametrize("statistic", STATISTICS)
def test_joining_beats_a_site_alone(statistic):
    # The noise is seeded: with some draws a step from a public model is as good alone as joined.
    X, y = records(statistic, 2000, seed=99)
    members = sites(statistic, [300] * 10, epsilon=1.0)

    def loss(model):
        found = model.predict(X)
        return np.mean((found - y) ** 2) if statistic.classes is None else np.mean(found != y)

    assert loss(Total().combine(members)) <= np.mean([loss(member) for member in members])


@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_total_states_the_guarantee_of_each_site(statistic):
    members = [make(statistic, epsilon=1.0).fit(*records(statistic, 30, seed=i)) for i in range(3)]
    joined = Total().combine(members)
    assert joined.guarantee.epsilon == pytest.approx(1.0)
    assert len(joined.guarantees) == 3


def test_a_site_with_little_beside_its_noise_counts_for_less_than_its_records():
    few, many = Moments(epsilon=0.1, delta=DELTA), Moments(epsilon=1.0, delta=DELTA)
    two = STATISTICS[0]
    members = [few.fit(*records(two, 300, seed=1)), many.fit(*records(two, 300, seed=2))]
    precise, equal = Total().combine(members), Total("equal").combine(members)
    assert precise.weights[0] < 0.1
    assert equal.weights == pytest.approx([0.5, 0.5])


def test_a_site_counts_for_what_the_page_says(tmp_path):
    said, statistic = Total().describe().weighing, STATISTICS[0]
    assert "a site with few records beside its noise counts for less" in said
    few = Total().combine(sites(statistic, [20, 400], epsilon=1.0))
    assert few.weights[0] < 20 / 420
    assert "where numbers of records are hidden, one with more noise does" in said
    hidden = [
        make(statistic, epsilon=epsilon, neighbours="add-remove").fit(*records(statistic, n))
        for epsilon, n in ((0.5, 400), (2.0, 20), (2.0, 400))
    ]
    weights = Total().combine(hidden).weights
    assert weights[0] < weights[1] == weights[2]
    assert "Unless sums are masked" in said
    wards = Wards(tmp_path)
    masked = [wards.mask(i, rows=table(n, seed=i)) for i, n in enumerate((20, 400, 400))]
    shares = wards.release(masked).ensemble.weights
    assert shares == pytest.approx([20 / 820, 400 / 820, 400 / 820])


def test_the_cap_of_a_study_limits_a_large_site():
    total = Total()
    total.max_weight = 0.4
    joined = total.combine(sites(STATISTICS[0], [100, 100, 5000]))
    assert joined.weights.max() <= 0.4 + 1e-9
    assert total.may_weigh(joined.weights)


def test_labelled_public_records_join_as_a_site_without_noise():
    statistic = STATISTICS[0]
    member, public = sites(statistic, [60])[0], Public(*records(statistic, 90, seed=5))
    joined = Total().combine([member], public)
    parts = [records(statistic, 60, seed=0), (public.X, public.y)]
    pooled = exact(statistic, *map(np.concatenate, zip(*parts, strict=True)))
    assert joined.coef == pytest.approx(pooled._finished.coef)


def test_other_settings_or_other_learners_are_not_added_up():
    one, two = sites(STATISTICS[0], [50, 50])
    other = make(STATISTICS[0], intercept_scaling=0.5, noise=Noise(seed=1))
    with pytest.raises(SchemaMismatch, match="differ in their settings"):
        Total().combine([one, other.fit(*records(STATISTICS[0], 50))])
    X, y = records(STATISTICS[0], 50)
    with pytest.raises(SettingsError, match="no fitted statistic"):
        Total().combine([two, PrivateLogisticRegression(epsilon=1.0).fit(X, y)])
    assert "needs a statistic" in Total().problem_with(PrivateLogisticRegression, {})
    assert Total().problem_with(Moments, {}) is None


@pytest.mark.parametrize("neighbours", ["replace-one", "add-remove"])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_sum_survives_its_file_and_a_forged_one_does_not(statistic, neighbours, tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.allow("ward", Budget(epsilon=1.0, delta=1e-5, neighbours=neighbours))
    model = make(statistic, epsilon=0.5, neighbours=neighbours)
    model.fit(*records(statistic, 50), ledger=ledger, dataset="ward")
    study = {"name": "toy", "digest": "0" * 64}
    file = Contribution.make(model, study=study, site="north", sequence=1, key=KEY)
    file.save(tmp_path / "sum")
    again = Contribution.load(tmp_path / "sum")
    assert np.array_equal(again.learner.total_, model.total_)
    X, _ = records(statistic, 20)
    assert np.array_equal(again.learner.predict(X), model.predict(X))
    facts, tensors = file.sealed.facts, file.sealed.tensors
    forged = [
        (facts, {"total": tensors["total"][:-1]}),
        (facts, {"total": tensors["total"].astype(float)}),
        ({**facts, "events": facts["events"].replace('"sigma":', '"sigma":1')}, tensors),
        ({**facts, "size": 7 if neighbours == "add-remove" else None}, tensors),
    ]
    if neighbours == "replace-one":  # beyond what so many records and the noise can reach
        forged.append((facts, {"total": tensors["total"] + 2**60}))
    drop = {"key", "tensors"}
    for changed, numbers in forged:
        kept = {name: value for name, value in changed.items() if name not in drop}
        with pytest.raises(ContributionRejected):
            Contribution(Sealed.seal("contribution", kept, numbers, KEY))._check(False)


def test_exact_sums_can_be_taken_apart_and_rebuilt():
    member = sites(STATISTICS[1], [40])[0]
    again = rebuild(*take_apart(member))
    assert np.array_equal(again.total_, member.total_)
