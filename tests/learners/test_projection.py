"""Projections: exact axes without noise, the stated noise with it, one charge, and nothing else."""

import math
import warnings

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import optimize, sparse, stats
from sklearn.utils.estimator_checks import check_estimator

from consilience.errors import BudgetExceeded, ConsilienceError, SchemaMismatch, SettingsError
from consilience.learners.linear import PrivateLogisticRegression
from consilience.learners.projection import (
    MOST_RECORDS,
    PrivatePCA,
    PublicPCA,
    SecondMoment,
    _second_moment,
    as_matrix,
    as_vector,
    combine_moments,
)
from consilience.privacy.accounting import Gaussian, L2Laplace, gaussian_log_delta, total
from consilience.privacy.guarantee import Budget, compose_disjoint
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import Noise, Source, clip_rows

DISJOINT = "no person is at two sites"


@pytest.fixture
def X():
    return table(1000, 5, 3)


def table(n_records: int, n_features: int, seed: int) -> np.ndarray:
    spread = np.linspace(0.5, 0.05, n_features)
    return Noise(seed=seed).open().normal(n_records * n_features).reshape(n_records, -1) * spread


def plan_of(pca: PrivatePCA, n_features: int):
    pca.n_features_in_ = n_features
    return pca._plan(None)


rows = arrays(np.float64, (3, 4), elements=st.floats(-2, 2))


# ------------------------------------------------------------------------------------------ oracles


def test_without_noise_the_axes_are_the_exact_eigenvectors(X):
    inside = X / np.maximum(1.0, np.linalg.norm(X, axis=1, keepdims=True))
    moment = sum(np.outer(row, row) for row in inside)
    values, vectors = np.linalg.eigh(moment)
    for pca in (PrivatePCA(epsilon=math.inf, n_components=3).fit(X), PublicPCA(3).fit(X)):
        for axis, value, exact in zip(
            pca.components_, pca.explained_ratio_, vectors.T[::-1], strict=False
        ):
            assert abs(axis @ exact) == pytest.approx(1, abs=1e-9)
            assert value == pytest.approx(exact @ moment @ exact / values.sum(), rel=1e-9)
    np.testing.assert_allclose(
        PrivatePCA(epsilon=math.inf, n_components=1).fit(X).moment_, moment, rtol=1e-12
    )


def test_the_vector_is_as_long_as_the_matrix_in_the_frobenius_norm():
    half = Noise(seed=1).open().normal(49).reshape(7, 7)
    matrix = half + half.T
    assert np.linalg.norm(as_vector(matrix)) == pytest.approx(
        np.linalg.norm(matrix, "fro"), rel=1e-14
    )
    np.testing.assert_allclose(as_matrix(as_vector(matrix)), matrix, rtol=1e-14)
    assert as_vector(matrix).shape == (28,)


@given(rows, rows)
@settings(max_examples=200, deadline=None)
def test_no_pair_of_neighbours_moves_the_moment_by_more_than_its_sensitivity(theirs, others):
    person, another = ([r for r in clip_rows(part, 1.0)] for part in (theirs, others))
    for k in (1, 2, 3):
        mine = sum(np.outer(r, r) for r in person[:k])
        for fewer in range(k + 1):  # a person may hold fewer records than the cap
            instead = sum((np.outer(r, r) for r in another[:fewer]), np.zeros((4, 4)))
            assert np.linalg.norm(as_vector(mine - instead)) <= k * math.sqrt(2) * (1 + 1e-12)
        assert np.linalg.norm(as_vector(mine)) <= k * (1 + 1e-12)


@pytest.mark.parametrize("cap", [1, 3])
@pytest.mark.parametrize(
    ("neighbours", "factor"), [("replace-one", math.sqrt(2)), ("add-remove", 1.0)]
)
def test_a_search_for_the_worst_neighbours_attains_the_planned_sensitivity(cap, neighbours, factor):
    """No slack and no gap: random restarts of an optimiser reach the sensitivity to 1e-6 and never
    pass it.
    """

    def distance(flat):
        parts = flat.reshape(2, cap, 3)
        parts = parts / np.maximum(1.0, np.linalg.norm(parts, axis=2, keepdims=True))
        first, second = (np.einsum("ni,nj->ij", part, part) for part in parts)
        return -np.linalg.norm(first - (second if neighbours == "replace-one" else 0.0))

    starts = Noise(seed=5).open().normal(12 * 2 * cap * 3).reshape(12, -1)
    found = max(-optimize.minimize(distance, start, method="L-BFGS-B").fun for start in starts)
    learner = PrivatePCA(
        epsilon=1.0,
        n_components=1,
        neighbours=neighbours,
        unit="person",
        records_per_person=cap,
        delta=1e-6,
    )
    planned = plan_of(learner, 3).noise.sensitivity
    assert planned == pytest.approx(cap * factor)
    assert planned * (1 - 1e-6) <= found <= planned * (1 + 1e-9)


@pytest.mark.parametrize("neighbours", ["replace-one", "add-remove"])
@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("epsilon", [0.05, 0.7, 3.0])
def test_the_events_cost_what_was_asked_and_the_noise_follows_them(neighbours, delta, epsilon):
    plan = plan_of(
        PrivatePCA(epsilon=epsilon, delta=delta, n_components=1, neighbours=neighbours), 6
    )
    whole = total(plan.events)
    assert whole.epsilon == pytest.approx(epsilon, rel=1e-9)
    assert whole.epsilon <= epsilon * (1 + 2**-50)
    assert whole.delta == delta
    if delta:  # against the closed form
        assert isinstance(plan.noise, Gaussian)
        mu = plan.noise.sensitivity / plan.noise.sigma
        assert gaussian_log_delta(0.99 * epsilon, mu) == pytest.approx(math.log(delta), rel=1e-6)
    else:
        assert isinstance(plan.noise, L2Laplace)
        assert plan.noise.scale == pytest.approx(plan.noise.sensitivity / (0.99 * epsilon))


@pytest.mark.parametrize("n_features", [2, 100, 784])
@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_closing_noise_is_invisible_beside_the_noise_that_protects(n_features, delta):
    plan = plan_of(PrivatePCA(epsilon=1.0, delta=delta, n_components=1), n_features)
    dimension = n_features * (n_features + 1) // 2
    each = plan.noise.sigma if delta else plan.noise.scale * math.sqrt(dimension + 1)
    assert math.sqrt(2) * plan.closing.scale < 0.1 * each


@pytest.mark.statistical
@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_noise_has_the_stated_variance_on_and_off_the_diagonal(delta):
    """Mean square of 1200 draws against its distribution, two-sided 1e-6; off-diagonals carry half
    the variance.

    Pure noise is not Gaussian, so there the bound is Chebyshev's in place of chi-square's, at 1e-3
    of 3000 draws (fixed seeds).
    """
    n_fits, d = (400 if delta else 1000), 3
    empty = np.zeros((1, d))
    fits = [
        PrivatePCA(epsilon=1.0, delta=delta, n_components=1, noise=Noise(seed=i)).fit(empty).moment_
        for i in range(n_fits)
    ]
    draws = np.stack(fits)
    plan = plan_of(PrivatePCA(epsilon=1.0, delta=delta, n_components=1), d)
    assert np.array_equal(draws, draws.transpose(0, 2, 1))
    for where, share in ((np.eye(d, dtype=bool), 1.0), (np.triu(np.ones((d, d), bool), 1), 0.5)):
        sample = draws[:, where]
        if delta:
            low, high = (
                stats.chi2.ppf([5e-7, 1 - 5e-7], sample.size)
                / sample.size
                * share
                * plan.noise.sigma**2
            )
        # E b⁴ = 3 D(D+1)(D+2)(D+3)/(D(D+2)) s⁴ for one coordinate of D = 6, correlated ones at
        # worst equal
        else:
            variance, fourth = 7 * plan.noise.scale**2, 3 * 7 * 9 * plan.noise.scale**4
            slack = math.sqrt((fourth - variance**2) / n_fits / 1e-3)
            low, high = share * (variance - slack), share * (variance + slack)
        assert low < np.mean(sample**2) < high


def test_the_moment_on_the_grid_is_exact_whatever_the_order_and_the_blocks():
    X = table(5000, 6, 9)
    steps = np.trunc(clip_rows(X, 1.0) * 2**21).astype(np.int64).astype(object)
    exact = steps.T.dot(steps)  # Python integers
    computed = _second_moment(X, 6, 1.0, on_grid=True)
    assert all(
        float(computed[i, j]) == float(exact[i, j]) / 2**42 for i in range(6) for j in range(6)
    )
    shuffled = X[Noise(seed=1).open().permutation(len(X))]
    assert np.array_equal(_second_moment(shuffled, 6, 1.0, on_grid=True), computed)
    np.testing.assert_allclose(computed, _second_moment(X, 6, 1.0, on_grid=False), atol=5000 * 4e-6)


@pytest.mark.parametrize("kind", [np.float32, np.int8])
@pytest.mark.parametrize("form", [np.asarray, sparse.csr_array])
def test_the_moment_of_short_numbers_is_exact_too(kind, form):
    class Whole(Chunks):
        def chunks(self):
            yield self.X, np.zeros(self.X.shape[0])

    X = table(5000, 6, 9) if np.issubdtype(kind, np.floating) else np.eye(6)[np.arange(5000) % 6]
    expected = _second_moment(X.astype(kind).astype(np.float64), 6, 1.0, on_grid=True)
    given = Whole(form(X.astype(kind)))
    assert np.array_equal(_second_moment(given, 6, 1.0, on_grid=True), expected)


def test_blocks_of_the_longest_rows_do_not_overflow():
    X = np.ones((3 * 2048 + 5, 1))
    moment = _second_moment(X, 1, 1.0, on_grid=True)
    assert moment[0, 0] == pytest.approx(len(X), rel=1e-5)
    assert moment[0, 0] <= len(X) < MOST_RECORDS


class Chunks:
    """A table that comes in uneven pieces."""

    def __init__(self, X):
        self.X, self.n_features, self.n_records = X, X.shape[1], X.shape[0]

    def chunks(self):
        for piece in np.array_split(self.X, [1, 700, 703]):
            yield piece, np.zeros(len(piece))


def test_dense_sparse_framed_and_chunked_tables_release_the_same(X):
    pandas = pytest.importorskip("pandas")
    forms = [X, sparse.csr_array(X), pandas.DataFrame(X, columns=list("abcde")), Chunks(X)]
    found = [
        PrivatePCA(epsilon=1.0, delta=1e-5, n_components=2, noise=Noise(seed=1)).fit(form).moment_
        for form in forms
    ]
    assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_row_in_a_late_chunk_is_refused_before_the_charge(X, value, tmp_path):
    books = Ledger(tmp_path / "books.sqlite")
    books.allow("ward", Budget(epsilon=3.0))
    bad = X.copy()
    bad[-1, 0] = value
    with pytest.raises(SchemaMismatch, match="Nothing was trained or charged"):
        PrivatePCA(epsilon=1.0, n_components=2).fit(Chunks(bad), ledger=books, dataset="ward")
    assert books.charges() == []


@pytest.mark.parametrize("norm", [1e-6, 0.25, 3.0, 1e9])
def test_rescaling_the_data_and_its_declared_norm_rescales_the_moment(X, norm):
    pca = PrivatePCA(epsilon=1.0, n_components=2, noise=Noise(seed=1))
    scaled = PrivatePCA(epsilon=1.0, n_components=2, noise=Noise(seed=1), data_norm=norm).fit(
        X * norm
    )
    np.testing.assert_allclose(scaled.moment_ / norm**2, pca.fit(X).moment_, atol=len(X) * 1e-6)


@pytest.mark.parametrize("longest", [1e3, 1e200, 1e308])
def test_a_row_of_any_length_counts_as_a_row_of_the_declared_norm_at_most(longest):
    X = np.array([[longest, longest]])
    moment = _second_moment(X, 2, 1e-3, on_grid=True)
    assert np.trace(moment) <= 1


@given(arrays(np.float64, (4, 5), elements=st.floats(-1e3, 1e3)))
@settings(max_examples=50, deadline=None)
def test_projecting_never_lengthens_a_row(rows):
    pca = PublicPCA(3).fit(table(50, 5, 2))
    np.testing.assert_allclose(pca.components_ @ pca.components_.T, np.eye(3), atol=1e-12)
    before, after = (np.linalg.norm(r, axis=1) for r in (rows, pca.transform(rows)))
    assert (after <= before * (1 + 1e-12) + 1e-300).all()


# ---------------------------------------------------------------------------------------- guarantee


@pytest.mark.parametrize("n_components", [1, 3, 20])
def test_a_rows_coordinates_do_not_depend_on_its_company(n_components):
    X = np.random.default_rng(5).normal(size=(1100, 129))  # a matrix product's last bits differ
    for kind in (PublicPCA(n_components), PrivatePCA(epsilon=1.0, n_components=n_components)):
        pca = kind.fit(X[:300])
        whole = pca.transform(X)
        for few in (1, 2, 3, 7, 1023, 1099):
            for rows in (X[:few], np.asfortranarray(X)[:few], sparse.csr_array(X[:few])):
                np.testing.assert_array_equal(pca.transform(rows), whole[:few], strict=True)
        order = np.argsort(X[:, 0])
        np.testing.assert_array_equal(pca.transform(X[order]), whole[order])
        np.testing.assert_allclose(whole, X @ pca.components_.T, atol=1e-12)


def test_the_guarantee_says_what_was_asked(X):
    persons = np.arange(len(X)) // 2
    one = PrivatePCA(epsilon=0.5, n_components=2).fit(X).guarantee_
    assert (one.unit, one.neighbours, one.delta, one.holds) == ("record", "replace-one", 0.0, True)
    assert one.epsilon == pytest.approx(0.5)
    learner = PrivatePCA(
        epsilon=0.5,
        delta=1e-6,
        n_components=2,
        unit="person",
        records_per_person=2,
        neighbours="add-remove",
    )
    two = learner.fit(X, persons=persons).guarantee_
    assert (two.unit, two.neighbours, two.delta) == ("person", "add-remove", 1e-6)
    assert not PrivatePCA(epsilon=0.5, n_components=2, noise=Noise(seed=1)).fit(X).guarantee_.holds
    assert math.isinf(PrivatePCA(epsilon=math.inf, n_components=2).fit(X).guarantee_.epsilon)


def test_a_persons_records_beyond_the_cap_do_not_count():
    X = np.tile([[1.0, 0.0]], (500, 1))
    learner = PrivatePCA(
        epsilon=1e6,
        n_components=1,
        unit="person",
        records_per_person=3,
        noise=Noise(seed=1),
        delta=1e-5,
    )
    moment = learner.fit(X, persons=np.zeros(500)).moment_
    assert moment[0, 0] == pytest.approx(3, abs=0.1)


def test_a_fit_is_charged_once_before_anything_is_drawn_and_a_retry_not_again(
    ledger, X, monkeypatch
):
    spent_at_first_draw = []
    words = Source.words

    def watched(self, n):
        spent_at_first_draw.append(Ledger(ledger.path).balance("ward").spent.epsilon)
        return words(self, n)

    monkeypatch.setattr(Source, "words", watched)
    asked = PrivatePCA(epsilon=0.7, delta=1e-5, n_components=2)
    first = asked.fit(X, ledger=ledger, dataset="ward", key="k")
    assert min(spent_at_first_draw) == 0.7
    assert [charge.purpose for charge in ledger.charges("ward")] == ["PrivatePCA"]
    assert first.receipt_["delta"] == 1e-5
    drawn = len(spent_at_first_draw)
    again = PrivatePCA(epsilon=0.7, delta=1e-5, n_components=2).fit(
        X, ledger=ledger, dataset="ward", key="k"
    )
    assert len(spent_at_first_draw) == drawn
    assert np.array_equal(again.moment_, first.moment_)
    assert np.array_equal(again.components_, first.components_)
    with pytest.raises(BudgetExceeded):
        PrivatePCA(epsilon=0.7, n_components=2).fit(X, ledger=ledger, dataset="ward")


def test_the_whole_budget_of_a_data_set_can_be_spent_on_one_fit(tmp_path, X):
    """Calibration must not overshoot by a rounding unit; 0.7 is where a bisection in sigma does."""
    for epsilon in (0.1, 0.3, 0.7, 1.0):
        ledger = Ledger(tmp_path / f"{epsilon}.db")
        ledger.allow("ward", Budget(epsilon=epsilon, delta=1e-5))
        PrivatePCA(epsilon=epsilon, delta=1e-5, n_components=1).fit(
            X, ledger=ledger, dataset="ward"
        )
        assert ledger.balance("ward").left.epsilon == 0


def test_nothing_but_the_release_stays_in_a_fitted_projection(X):
    fitted = PrivatePCA(epsilon=0.5, n_components=2).fit(X)
    released = {
        "n_features_in_",
        "moment_",
        "components_",
        "explained_ratio_",
        "events_",
        "guarantee_",
        "receipt_",
        "_fitted_with",
    }
    assert set(vars(fitted)) - set(fitted.get_params()) == released
    from_moment = PrivatePCA(epsilon=0.5, n_components=2)
    from_moment.restore_state({"moment": fitted.moment_})
    assert np.array_equal(from_moment.components_, fitted.components_)
    assert np.array_equal(from_moment.explained_ratio_, fitted.explained_ratio_)


# -------------------------------------------------------------------------------------------- sites


def test_sites_moments_add_up_to_the_pooled_axes():
    tables = [table(400, 4, seed) for seed in range(3)]
    sites = [PrivatePCA(epsilon=math.inf, n_components=1).fit(X).second_moment_ for X in tables]
    joint = combine_moments(sites, n_components=2, assumption=DISJOINT)
    pooled = PublicPCA(2).fit(np.vstack(tables))
    np.testing.assert_allclose(joint.components_, pooled.components_, atol=1e-9)
    np.testing.assert_allclose(joint.transform(tables[0]), pooled.transform(tables[0]), atol=1e-9)
    alone = combine_moments(sites, n_components=2, assumption=DISJOINT, weights=[0, 2, 0])
    np.testing.assert_allclose(
        alone.components_, PublicPCA(2).fit(tables[1]).components_, atol=1e-9
    )


def test_more_sites_give_better_axes_than_one():
    tables = [table(300, 6, seed) for seed in range(20)]
    sites = [
        PrivatePCA(epsilon=1.0, delta=1e-5, n_components=2, noise=Noise(seed=seed)).fit(X)
        for seed, X in enumerate(tables)
    ]
    exact = PublicPCA(2).fit(np.vstack(tables)).components_

    def overlap(pca):
        return np.linalg.norm(exact @ pca.components_.T) ** 2 / 2

    joint = combine_moments([s.second_moment_ for s in sites], n_components=2, assumption=DISJOINT)
    assert overlap(joint) > 0.98
    assert overlap(joint) > np.mean([overlap(site) for site in sites])


def test_a_joint_projection_promises_the_largest_epsilon_under_a_stated_assumption(X):
    sites = [PrivatePCA(epsilon=e, n_components=1).fit(X).second_moment_ for e in (0.2, 0.9)]
    joint = combine_moments(sites, n_components=1, assumption=DISJOINT).guarantee_
    assert joint == compose_disjoint(*(s.guarantee for s in sites), assumption=DISJOINT)
    assert joint.epsilon == pytest.approx(0.9)
    assert DISJOINT in joint.assumptions
    seeded = PrivatePCA(epsilon=1.0, n_components=1, noise=Noise(seed=1)).fit(X).second_moment_
    assert not combine_moments(
        [*sites, seeded], n_components=1, assumption=DISJOINT
    ).guarantee_.holds


def test_moments_that_cannot_be_added_are_refused(X):
    site = PrivatePCA(epsilon=1.0, n_components=1).fit(X).second_moment_
    other = PrivatePCA(epsilon=1.0, n_components=1).fit(X[:, :3]).second_moment_
    with pytest.raises(SchemaMismatch, match="columns"):
        combine_moments([site, other], n_components=1, assumption=DISJOINT)
    with pytest.raises(SettingsError, match="at least one"):
        combine_moments([], n_components=1, assumption=DISJOINT)
    with pytest.raises(SettingsError, match="assumption"):
        combine_moments([site], n_components=1, assumption="")
    for weights in ([1, 1], [-1], [0], [math.nan]):
        with pytest.raises(SettingsError, match="weights"):
            combine_moments([site], n_components=1, assumption=DISJOINT, weights=weights)
    for broken in (
        site.moment[:2],
        site.moment + np.triu(np.ones((5, 5)), 1),
        np.full((2, 2), math.nan),
    ):
        with pytest.raises(SchemaMismatch, match="second moment"):
            SecondMoment(broken, site.guarantee)


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "wrong",
    [
        {"epsilon": 0},
        {"epsilon": "1"},
        {"delta": 1.0},
        {"n_components": 0},
        {"n_components": 6},
        {"n_components": 1.5},
        {"n_components": True},
        {"data_norm": 0},
        {"data_norm": math.inf},
        {"neighbours": "both"},
        {"unit": "family"},
        {"unit": "person"},
        {"noise": 3},
    ],
    ids=str,
)
def test_a_bad_setting_is_named_before_anything_is_charged(wrong, ledger, X):
    with pytest.raises(SettingsError) as caught:
        PrivatePCA(**{"epsilon": 0.5, "n_components": 2, **wrong}).fit(
            X, ledger=ledger, dataset="ward"
        )
    assert all(name in str(caught.value) or name == "unit" for name in wrong)
    assert ledger.charges() == []


def test_no_error_repeats_a_record(X):
    marked = "TOPSECRET-4711"
    cells = X.astype(object)
    cells[5, 1] = marked
    fitted = PrivatePCA(epsilon=0.5, n_components=1).fit(X)
    attempts = [
        lambda: PrivatePCA(epsilon=0.5, n_components=1).fit(cells),
        lambda: PublicPCA(1).fit(cells),
        lambda: fitted.transform(cells),
        lambda: PrivatePCA(epsilon=0.5, n_components=1).fit(X, persons=[marked] * len(X)),
        lambda: PrivatePCA(epsilon=0.5, n_components=1, unit="person", records_per_person=1).fit(
            X, persons=[marked]
        ),
        lambda: PrivatePCA(epsilon=0.5, n_components=1, unit="person", records_per_person=1).fit(X),
        lambda: PrivatePCA(epsilon=0.5, n_components=1, unit="person", records_per_person=1).fit(
            Chunks(X)
        ),
    ]
    for attempt in attempts:
        with pytest.raises(ConsilienceError) as caught:
            attempt()
        assert marked not in str(caught.value)
        assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_under_add_remove_an_empty_table_trains_and_under_replace_one_it_is_refused():
    empty = np.zeros((0, 3))
    fitted = PrivatePCA(epsilon=1.0, n_components=1, neighbours="add-remove").fit(empty)
    assert np.isfinite(fitted.components_).all()
    with pytest.raises(ValueError, match="minimum of 1 is required"):
        PrivatePCA(epsilon=1.0, n_components=1).fit(empty)


@pytest.mark.parametrize(
    ("pca", "expected"),
    [
        (PublicPCA(1), set()),
        (PrivatePCA(epsilon=math.inf, n_components=1), set()),
        # Compares two fits of the same data, which differ because each draws its own noise.
        (PrivatePCA(epsilon=1.0, delta=1e-5, n_components=1), {"check_fit_idempotent"}),
        # That a table is empty is about its records, and hidden.
        (
            PrivatePCA(epsilon=1.0, n_components=1, neighbours="add-remove", noise=Noise(seed=1)),
            {"check_estimators_empty_data_messages"},
        ),
    ],
    ids=["public", "exact", "private", "add-remove"],
)
def test_scikit_learns_checks_pass(pca, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite warns about what it skips
        results = check_estimator(pca, on_fail=None)
    assert len(results) > 40
    assert {r["check_name"] for r in results if r["status"] == "failed"} <= expected


# ------------------------------------------------------------------------------------------ utility


def test_private_axes_of_real_digits_serve_a_learner_almost_as_well_as_public_ones(data_folder):
    """MNIST 3 against 7, pixels averaged two by two (196 columns), ε=1, δ=1e-5: nearly the error of
    exact axes.
    """
    digits = pq.read_table(data_folder / "mnist.parquet")
    label, split = digits["label"].to_numpy(), np.array(digits["split"].to_pylist())
    kept = np.flatnonzero(np.isin(label, [3, 7]))
    pixels = np.frombuffer(b"".join(digits["pixels"].take(kept).to_pylist()), np.uint8)
    X = pixels.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)).reshape(-1, 196)
    X = X / np.linalg.norm(X, axis=1, keepdims=True)
    y, train = label[kept], split[kept] == "train"
    public, private = np.flatnonzero(train)[:500], np.flatnonzero(train)[500:]
    settings = {"n_components": 20, "epsilon": 1.0, "noise": Noise(seed=1)}
    projections = {
        "public": PublicPCA(20).fit(X[public]),
        "gaussian": PrivatePCA(delta=1e-5, **settings).fit(X[private]),
        "pure": PrivatePCA(**settings).fit(X[private]),
    }
    errors = {}
    for name, pca in projections.items():
        learner = PrivateLogisticRegression(
            epsilon=1.0, delta=1e-5, regularization=1e-3, classes=[3, 7], noise=Noise(seed=2)
        )
        learner.fit(pca.transform(X[private]), y[private])
        errors[name] = 1 - learner.score(pca.transform(X[~train]), y[~train])
    assert errors["public"] < 0.045, errors
    assert errors["gaussian"] < errors["public"] + 0.015, errors
    assert errors["gaussian"] < errors["pure"], errors
