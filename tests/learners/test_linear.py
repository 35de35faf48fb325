import math
import warnings
from decimal import Context

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import optimize, sparse
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.utils.multiclass import check_classification_targets

from bounded import PrivateRidge
from consilience import Noise, PrivateLinearSVC, PrivateLogisticRegression
from consilience.errors import GuaranteeVoid, SettingsError
from consilience.learners import erm
from consilience.learners.ball import into_ball, out_of_ball
from consilience.learners.erm import Huber, HuberHinge, Logistic, Softmax
from consilience.learners.inputs import read_classes
from consilience.learners.perturbation import LinearTask, logistic_gap, plan_linear
from consilience.tables.chunks import ParquetRows
from consilience.tables.schema import Numeric, Schema


def made_up(n_records=600, n_features=5, n_classes=2, seed=1):
    source = Noise(seed=seed).open()
    X = source.normal(n_records * n_features).reshape(n_records, n_features)
    X /= 1.01 * np.linalg.norm(X, axis=1).max()
    weights = source.normal(n_features * n_classes).reshape(n_features, n_classes) * 8
    return X, (X @ weights + source.normal(n_records * n_classes).reshape(n_records, -1)).argmax(
        axis=1
    )


def task(loss, *, n_units=789, dimension=50, n_problems=1):
    return LinearTask(loss, dimension, n_units, n_units, n_problems, X=np.zeros((0, dimension)))


def test_exact_training_agrees_with_scikit_learn():
    X, y = made_up()
    peer = LogisticRegression(
        C=1 / (len(y) * 1e-2), fit_intercept=False, tol=1e-10, max_iter=1000
    ).fit(X, y)
    ours = PrivateLogisticRegression(
        epsilon=math.inf, regularization=1e-2, fit_intercept=False
    ).fit(X, y)
    np.testing.assert_allclose(ours.coef_, peer.coef_, atol=1e-6)
    np.testing.assert_allclose(ours.predict_proba(X), peer.predict_proba(X), atol=1e-6)


def test_exact_softmax_training_agrees_with_scikit_learn():
    X, y = made_up(n_classes=4)
    peer = LogisticRegression(
        C=1 / (len(y) * 1e-2), fit_intercept=False, tol=1e-10, max_iter=1000
    ).fit(X, y)
    ours = PrivateLogisticRegression(
        epsilon=math.inf, regularization=1e-2, fit_intercept=False
    ).fit(X, y)
    np.testing.assert_allclose(ours.coef_, peer.coef_, atol=1e-6)
    np.testing.assert_allclose(ours.predict_proba(X), peer.predict_proba(X), atol=1e-6)


def test_exact_ridge_agrees_with_scikit_learn_while_residuals_are_small():
    X, _ = made_up()
    y = X @ np.arange(5.0) / 5
    peer = Ridge(alpha=len(y) * 1e-3, fit_intercept=False).fit(X, y)
    ours = PrivateRidge(
        epsilon=math.inf, regularization=1e-3, fit_intercept=False, label_bound=1.0
    ).fit(X, y)
    np.testing.assert_allclose(ours.coef_, peer.coef_, atol=1e-6)


def test_exact_ridge_clips_labels_to_their_bound():
    X, _ = made_up()
    wild = np.where(X[:, 0] > 0, 1e6, -1e6)
    one, two = (
        PrivateRidge(epsilon=math.inf, label_bound=2.0).fit(X, y)
        for y in (wild, np.clip(wild, -2, 2))
    )
    np.testing.assert_allclose(one.coef_, two.coef_, atol=1e-7)


def test_exact_svc_minimises_the_smoothed_hinge():
    X, y = made_up(n_records=80, n_features=3)
    ours = PrivateLinearSVC(
        epsilon=math.inf, regularization=1e-2, fit_intercept=False, huber=0.5
    ).fit(X, y)
    margin = 2.0 * y - 1.0

    def objective(f):
        z = margin * (X @ f)
        loss = np.where(z > 1.5, 0, np.where(z < 0.5, 1 - z, (1.5 - z) ** 2 / 2))
        return loss.mean() + 0.005 * f @ f

    best = optimize.minimize(objective, np.zeros(3), method="BFGS", options={"gtol": 1e-8})
    assert objective(ours.coef_[0]) <= best.fun + 1e-9


def test_the_intercept_is_learned_and_regularised():
    X, _ = made_up()
    fitted = PrivateLogisticRegression(epsilon=math.inf, classes=[0, 1]).fit(
        X, np.ones(len(X), dtype=int)
    )
    assert 0 < fitted.intercept_[0] < 10


@pytest.mark.parametrize(
    "kind", [PrivateLogisticRegression, PrivateLinearSVC, PrivateRidge], ids=lambda k: k.__name__
)
def test_what_is_chosen_follows_from_public_facts_and_is_stated(kind):
    X, y = made_up(n_records=600)
    for delta in (0.0, 1e-6):
        learner = kind(epsilon=1.0, delta=delta).fit(X, y)
        other = kind(epsilon=1.0, delta=delta).fit(X[::-1] / 2, 1 - y)
        assert learner.regularization_ == other.regularization_
        more = kind(epsilon=1.0, delta=delta).fit(np.tile(X, (4, 1)), np.tile(y, 4))
        assert more.regularization_ < learner.regularization_
        said = learner.describe_choices(5, 600)
        assert said.endswith(f"regularization = {learner.regularization_:.3g} at 600 records")
        named = kind(epsilon=1.0, delta=delta, mechanism="objective", regularization=0.1)
        assert named.describe_choices(5, 600) is None


@pytest.mark.parametrize(
    "kind", [PrivateLogisticRegression, PrivateLinearSVC, PrivateRidge], ids=lambda k: k.__name__
)
def test_what_is_said_of_choices_repeats_no_setting_and_is_said_of_choices_only(kind):
    """A page shows it as our own words, and a study's author writes the settings."""
    bound = {"label_bound": 3.0} if kind is PrivateRidge else {"classes": [0, 1]}
    with pytest.raises(SettingsError, match="mechanism"):
        kind(epsilon=1.0, mechanism="none needed: APPROVED", **bound).describe_choices(5, None)
    named = kind(epsilon=1.0, mechanism="output", **bound).describe_choices(5, None)
    assert named.startswith("regularization = ")
    # Of an exact model no mechanism is used, and a ridge that is named is not chosen.
    exact = kind(epsilon=math.inf, regularization=1e-2, **bound)
    assert exact.describe_choices(5, None) is None
    # What is declared counts only where the true number is hidden.
    declared = {"epsilon": 1.0, "public_size": 10_000_000, **bound}
    assert " at 100 records, " in kind(**declared).describe_choices(5, None)
    hidden = kind(neighbours="add-remove", **declared).describe_choices(5, None)
    assert hidden.endswith(" at 10,000,000 records")


def test_an_automatic_ridge_beats_a_fixed_one_where_noise_is_large():
    X, y = made_up(n_records=8000)
    former = {"regularization": 1e-2, "intercept_scaling": 1.0}
    auto, fixed = (
        np.mean(
            [
                PrivateLogisticRegression(
                    epsilon=0.05, noise=Noise(seed=seed), classes=[0, 1], **settings
                )
                .fit(X[::2], y[::2])
                .score(X[1::2], y[1::2])
                for seed in range(10)
            ]
        )
        for settings in ({}, former)
    )
    assert auto > fixed + 0.02


def test_papers_mechanisms_keep_the_papers_ridge():
    for settings in ({"mechanism": "generalized"}, {"calibration": "chaudhuri2011"}):
        learner, named = (
            PrivateLinearSVC(epsilon=1.0, regularization=ridge, **settings)
            for ridge in ("auto", 1e-2)
        )
        assert plan_linear(learner, task(HuberHinge(0.5))) == plan_linear(
            named, task(HuberHinge(0.5))
        )


def test_a_large_epsilon_comes_close_to_exact_training():
    X, y = made_up(n_records=5000)
    same = {"regularization": 1e-2}
    exact = PrivateLogisticRegression(epsilon=math.inf, **same).fit(X, y)
    for mechanism in ("objective", "output", "generalized"):
        near = PrivateLogisticRegression(epsilon=1e4, mechanism=mechanism, **same).fit(X, y)
        assert np.linalg.norm(near.coef_ - exact.coef_) < 0.05 * np.linalg.norm(exact.coef_)


def test_multiclass_logistic_spends_one_budget_and_one_draw():
    X, y = made_up(n_classes=5)
    fitted = PrivateLogisticRegression(epsilon=1.0)
    plan = plan_linear(fitted, task(Softmax(5)))
    assert [type(event).__name__ for event in plan.events] == ["ObjectiveL2Laplace", "Closing"]
    assert fitted.fit(X, y).guarantee_.epsilon == pytest.approx(1.0)


def test_softmax_noise_sums_to_zero_over_the_classes():
    X, y = made_up(n_classes=3)
    for mechanism in ("objective", "output"):
        fitted = PrivateLogisticRegression(epsilon=0.1, mechanism=mechanism).fit(X, y)
        # What remains is closing noise: three Laplace draws, each beyond 25 scales with probability
        # 1e-11.
        assert np.abs(fitted.coef_.sum(axis=0)).max() < 75 * fitted.events_[-1].scale


def test_svc_classes_share_the_budget():
    for mechanism, draws in (("objective", 8), ("gradient", 4)):
        learner = PrivateLinearSVC(epsilon=1.0, delta=1e-6, mechanism=mechanism)
        events = plan_linear(learner, task(HuberHinge(0.5), n_problems=4)).events
        assert len(events) == draws
        assert sum(event.epsilon for event in events) == pytest.approx(1.0)
        assert sum(event.delta for event in events) == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("loss", "mechanism"),
    [
        (loss, mechanism)
        for loss in (Logistic(), HuberHinge(0.5), Softmax(4), Huber(1.0, 1.0))
        for mechanism in ("objective", "output", "generalized", "matrix")
        if mechanism != "matrix" or loss.n_outputs == 1
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("delta", [0.0, 1e-5])
@pytest.mark.parametrize("neighbours", ["replace-one", "add-remove"])
def test_more_epsilon_never_means_more_noise_or_more_ridge(loss, mechanism, delta, neighbours):
    noise, ridge = [], []
    for epsilon in np.geomspace(0.01, 10, 25):
        learner = PrivateLogisticRegression(
            epsilon=epsilon,
            delta=delta,
            mechanism=mechanism,
            neighbours=neighbours,
            public_size=789,
            random_state=0,
        )
        plan = plan_linear(learner, task(loss))
        noise.append(getattr(plan.noise, "scale", None) or plan.noise.sigma)
        ridge.append(plan.regularization)
    assert (np.diff(noise) <= 1e-9 * np.abs(noise[1:])).all()
    assert (np.diff(ridge) <= 0).all()


def test_the_2011_calibration_is_the_papers_and_is_not_monotone():
    # n=789, Λ=.01, c=1: below the threshold 2 ln(1 + 1/7.89) = .239 extra ridge, just above it
    # almost no noise budget.
    def scale(epsilon, calibration):
        learner = PrivateLinearSVC(epsilon=epsilon / 0.99, calibration=calibration)
        plan = plan_linear(learner, task(HuberHinge(0.5)))
        return plan.noise.scale, plan.regularization

    assert scale(0.1, "chaudhuri2011")[0] == pytest.approx(2 / 0.05)
    assert scale(0.1, "chaudhuri2011")[1] == pytest.approx(1 / math.expm1(0.025))
    assert scale(0.25, "chaudhuri2011")[0] == pytest.approx(2 / (0.25 - 2 * math.log1p(1 / 7.89)))
    assert scale(0.25, "chaudhuri2011")[0] > 4 * scale(0.1, "chaudhuri2011")[0]
    assert (
        scale(0.25, "tight")[0]
        < scale(0.1, "tight")[0]
        <= scale(0.1, "chaudhuri2011")[0] * (1 + 1e-9)
    )
    assert scale(0.25, "tight")[0] < scale(0.25, "chaudhuri2011")[0] / 10


def test_the_2011_calibration_states_its_true_guarantee():
    X, y = made_up()
    fitted = PrivateLogisticRegression(epsilon=0.5, calibration="chaudhuri2011").fit(X, y)
    assert 0.2 < fitted.guarantee_.epsilon < 0.5


@pytest.mark.parametrize(
    "settings",
    [{"delta": 1e-5}, {"neighbours": "add-remove", "public_size": 9}, {"mechanism": "generalized"}],
)
def test_the_2011_calibration_is_refused_beyond_its_paper(settings):
    X, y = made_up()
    with pytest.raises(SettingsError, match="chaudhuri2011"):
        PrivateLogisticRegression(epsilon=1.0, calibration="chaudhuri2011", **settings).fit(X, y)


def test_kifers_noise_is_the_papers_and_doubles_under_replacement():
    learner = PrivateLinearSVC(
        epsilon=1 / 0.99,
        delta=1e-5,
        mechanism="generalized",
        neighbours="add-remove",
        public_size=789,
    )
    added = plan_linear(learner, task(HuberHinge(0.5)))
    assert added.noise.sigma == pytest.approx(math.sqrt(8 * math.log(2e5) + 4))
    assert added.regularization == pytest.approx(7.89 + 2)
    replaced = plan_linear(learner.set_params(neighbours="replace-one"), task(HuberHinge(0.5)))
    assert replaced.noise.sigma == pytest.approx(2 * added.noise.sigma)


def test_the_literal_matrix_perturbation_is_refused_with_its_counterexample():
    X, y = made_up()
    with pytest.raises(GuaranteeVoid, match=r"\(x, \+1\) and \(x, -1\)"):
        PrivateLogisticRegression(epsilon=1.0, mechanism="matrix", calibration="thesis").fit(X, y)


def test_the_provable_matrix_perturbation_draws_linear_noise_and_public_matrices():
    learner = PrivateLogisticRegression(epsilon=1.0, mechanism="matrix", random_state=4)
    one, two = (plan_linear(learner, task(Logistic(), dimension=6)) for _ in range(2))
    assert one.noise.scale > 0
    assert np.array_equal(one.matrix, two.matrix)
    assert np.linalg.eigvalsh(one.matrix)[0] >= 0
    assert one.noise.strong_convexity <= one.regularization + np.linalg.eigvalsh(one.matrix)[0]
    with pytest.raises(SettingsError, match="two classes"):
        plan_linear(learner, task(Softmax(3)))


def test_persons_cost_as_many_gradients_as_they_have_records():
    def scale(per_person, mechanism):
        learner = PrivateLinearSVC(
            epsilon=1.0,
            unit="person",
            records_per_person=per_person,
            mechanism=mechanism,
            regularization=10.0,
        )
        return plan_linear(learner, task(HuberHinge(0.5))).noise.scale

    assert scale(3, "output") == pytest.approx(3 * scale(1, "output"))
    assert scale(3, "objective") == pytest.approx(3 * scale(1, "objective"), rel=2e-3)


def test_the_gap_between_logistic_gradients_matches_a_search_over_pairs():
    def longest(radius):
        def gap(v):
            a, b = v[:2], v[2:]
            a, b = a / max(1, np.linalg.norm(a)), b / max(1, np.linalg.norm(b))
            return -np.linalg.norm(
                a / (1 + np.exp(radius * a[0])) - b / (1 + np.exp(radius * b[0]))
            )

        starts = Noise(seed=5).open().normal(32).reshape(8, 4)
        return max(
            -optimize.minimize(
                gap,
                start,
                method="Nelder-Mead",
                options={"xatol": 1e-10, "fatol": 1e-12, "maxiter": 4000},
            ).fun
            for start in starts
        )

    for radius in (0.5, 1.0, 3.0, 10.0):
        assert longest(radius) <= logistic_gap(radius) <= longest(radius) + 2e-3
    assert logistic_gap(0.0) == 1.0
    assert logistic_gap(1e6) == pytest.approx(2.0, abs=1e-3)


def test_output_noise_never_exceeds_what_the_regulariser_allows():
    # J(f) <= J(0) bounds every minimum, so a tiny Λ cannot ask for unbounded noise.
    learner = PrivateLogisticRegression(epsilon=1.0, mechanism="output", regularization=1e-9)
    assert plan_linear(learner, task(Logistic())).noise.sensitivity <= 2 * math.sqrt(
        2 * math.log(2) / 1e-9
    )


def test_the_closing_noise_is_invisible():
    for loss in (Logistic(), HuberHinge(0.5), Softmax(10), Huber(1.0, 1.0)):
        for mechanism in ("objective", "output"):
            plan = plan_linear(
                PrivateLogisticRegression(epsilon=0.1, mechanism=mechanism),
                task(loss, n_units=8678),
            )
            assert plan.closing.epsilon == pytest.approx(0.001)
            assert plan.closing.scale < 1e-3


def test_training_from_parquet_chunks_equals_training_in_memory(tmp_path):
    X, y = made_up(n_records=5000, n_features=4)
    names = [f"c{i}" for i in range(4)]
    table = pa.table(
        {**{name: X[:, i] for i, name in enumerate(names)}, "ill": np.where(y, "yes", "no")}
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=700)
    schema = Schema(
        columns=[Numeric(name=name, low=-1.0, high=1.0) for name in names],
        label="ill",
        classes=("no", "yes"),
    )
    rows = ParquetRows(tmp_path / "t.parquet", schema, chunk_records=512)
    encoded = schema.encode(table)
    for learner in (PrivateLogisticRegression, PrivateLinearSVC):
        settings = {"epsilon": 1.0, "classes": [0, 1], "noise": Noise(seed=1)}
        whole = learner(**settings).fit(encoded.X, encoded.y)
        chunked = learner(**settings).fit(rows)
        np.testing.assert_allclose(chunked.coef_, whole.coef_, atol=1e-5)
    with pytest.raises(SettingsError, match="chunks"):
        PrivateLogisticRegression(epsilon=1.0).fit(rows)


def test_sparse_rows_are_never_made_dense():
    wide = sparse.random_array((200, 50_000), density=1e-4, format="csr", rng=3)
    y = np.arange(200) % 2
    fitted = PrivateLogisticRegression(epsilon=1.0, delta=1e-6).fit(wide, y)
    assert fitted.coef_.shape == (1, 50_000)
    assert fitted.predict(wide).shape == (200,)


def test_real_digits_are_told_apart_at_epsilon_one(data_folder):
    import pandas

    digits = pandas.read_parquet(data_folder / "mnist.parquet")
    digits = digits[digits.label.isin([3, 7])]
    X = np.frombuffer(b"".join(digits.pixels), np.uint8).reshape(-1, 784) / 255.0
    train = (digits.split == "train").to_numpy()
    fitted = PrivateLogisticRegression(epsilon=1.0, delta=1e-5, data_norm=9.0, classes=[3, 7])
    fitted.fit(X[train], digits.label[train])
    assert fitted.score(X[~train], digits.label[~train]) > 0.9


@pytest.mark.parametrize("mechanism", ["objective", "output"])
@pytest.mark.parametrize("kind", [PrivateLogisticRegression, PrivateLinearSVC, PrivateRidge])
def test_no_table_is_too_large_for_the_tolerance_that_was_planned(kind, mechanism, monkeypatch):
    """Its size is private under add-remove, so neither an error nor a refusal may depend on it."""
    X, y = made_up(80)
    more = {"label_bound": 1.0} if kind is PrivateRidge else {"classes": [0, 1]}
    learner = kind(
        epsilon=1.0,
        neighbours="add-remove",
        public_size=1,
        mechanism=mechanism,
        noise=Noise(seed=4),
        **more,
    )
    expected = learner.fit(X, y).coef_.copy()
    bound = erm.gradient_error

    def as_of_many(facts, dtype=np.float64):
        """As if there were so many records that neither precision can vouch for the tolerance."""
        return bound(facts, dtype) * (1 if dtype is erm.Decimal else 1e15)

    monkeypatch.setattr(erm, "gradient_error", as_of_many)
    np.testing.assert_allclose(
        learner.fit(X, y).coef_, expected, rtol=1e-3
    )  # closing noise is never seeded


def test_any_number_of_records_can_be_certified():
    """The planned tolerance of the worst settings, and as many records as there are addresses."""
    for loss in (Logistic(), HuberHinge(1e-3), Softmax(1000), Huber(1e-3, 1.0)):
        for lam in (1e-12, 1e-3, 1e6):
            for noise in (1e-3, 1e6):
                few = erm.PublicFacts(loss, 2**20, 10_000, lam, noise, 0.0, 1e-8 * lam)
                planned = max(1e-8 * lam, 8 * erm.gradient_error(few))
                many = few._replace(n_records=2**60, tolerance=planned)
                steepness = lam + 2**60 * loss.curvature
                error = 4 * erm.gradient_error(many, erm.Decimal)
                assert error * steepness / lam <= planned


@pytest.mark.parametrize("scaling", [1.0, 0.25, 1e-3, 1e3])
@pytest.mark.parametrize("rows", [np.asarray, sparse.csr_array])
def test_a_short_constant_leaves_more_of_the_ball_to_the_records(scaling, rows):
    X, _ = made_up(n_features=7)
    learner = PrivateLogisticRegression(epsilon=1.0, intercept_scaling=scaling)
    inside = into_ball(rows(X / np.linalg.norm(X, axis=1, keepdims=True)), learner)
    inside = inside.toarray() if sparse.issparse(inside) else inside
    lengths = [math.hypot(*row) for row in inside.tolist()]
    assert 1 - 1e-9 < min(lengths)
    assert max(lengths) <= 1
    np.testing.assert_allclose(inside[:, -1] / np.linalg.norm(inside[:, :-1], axis=1), scaling)
    coef, intercept = out_of_ball(np.arange(8.0), learner)
    longer = X / np.linalg.norm(X, axis=1, keepdims=True)
    np.testing.assert_allclose(longer @ coef[0] + intercept, inside @ np.arange(8.0), rtol=1e-9)


def test_the_intercept_does_not_depend_on_its_scaling_where_the_ridge_is_weak():
    X, _ = made_up(n_features=3)
    y = (X[:, 0] > 0.2).astype(int) ^ (np.arange(len(X)) % 5 == 0)
    fits = [
        PrivateLogisticRegression(
            epsilon=math.inf, regularization=1e-9, intercept_scaling=scaling
        ).fit(X, y)
        for scaling in (0.25, 1.0, 4.0)
    ]
    for fit in fits:
        np.testing.assert_allclose(fit.intercept_, fits[0].intercept_, rtol=1e-4)
        np.testing.assert_allclose(fit.coef_, fits[0].coef_, rtol=1e-4)


@pytest.mark.parametrize("scaling", [0.0, -1.0, 1e-4, 1e4, math.nan, "1", None])
def test_an_impossible_scaling_of_the_intercept_is_refused(scaling):
    X, y = made_up()
    with pytest.raises(SettingsError, match="intercept_scaling"):
        PrivateLogisticRegression(epsilon=1.0, intercept_scaling=scaling).fit(X, y)


def test_a_plan_that_the_solver_cannot_follow_is_refused(ledger, monkeypatch):
    X, y = np.zeros((20, 2)), np.arange(20) % 2
    monkeypatch.setattr(erm, "_DECIMAL", Context(prec=10))  # as if a hundred digits were too few
    learner = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], regularization=1e-90)
    learner.set_params(mechanism="output")
    with pytest.raises(SettingsError, match="Raise it or the regularization"):
        learner.fit(X, y, ledger=ledger, dataset="ward")
    assert ledger.charges() == []


# ------------------------------------------------------------------------- labels and plain arrays

LABELS = {
    "whole numbers": np.arange(30) % 3,
    "whole floats": np.arange(30) % 2 * 2.0 - 1,
    "truth values": np.arange(30) % 2 == 0,
    "texts": np.array(["b", "a"] * 15),
    "objects": np.array(["b", "a"] * 15, dtype=object),
    "eleven": np.arange(30) % 11,
    "nearly all different": np.arange(30) % 29,
    "fractions": np.linspace(0, 1, 30),
    "mixed": np.array([1, "a"] * 15, dtype=object),
    "none": np.zeros(0),
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_labels_are_read_as_scikit_learn_reads_them(labels):
    def expected():
        if labels.size:
            check_classification_targets(labels)
        return np.unique(labels)

    def outcome(read):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                answer = read().tolist()
            except (ValueError, TypeError) as problem:
                answer = str(problem)
        return answer, [str(each.message) for each in caught]

    assert outcome(lambda: read_classes(labels)) == outcome(expected)


BAD = {
    "missing": (lambda X, y: (np.where(X == X[3, 1], np.nan, X), y), "NaN"),
    "infinite": (lambda X, y: (np.where(X == X[3, 1], np.inf, X), y), "infinity"),
    "two infinities": (lambda X, y: (np.where(X > 0, np.inf, -np.inf), y), "infinity"),
    "missing label": (lambda X, y: (X, np.where(np.arange(len(y)) == 5, np.nan, y)), "NaN"),
    "a label too few": (lambda X, y: (X, y[1:]), "inconsistent"),
    "labels in a square": (lambda X, y: (X, np.column_stack([y, y])), "1d array"),
    "no records": (lambda X, y: (X[:0], y[:0]), "0 sample"),
    "no columns": (lambda X, y: (X[:, :0], y), "0 feature"),
    "a name": (lambda X, y: (X, "no labels"), "1d array"),
    "no labels": (lambda X, y: (X, None), "target y is None"),
}


@pytest.mark.parametrize(("change", "said"), BAD.values(), ids=BAD)
def test_plain_arrays_are_checked_though_little_is_asked_about_them(change, said):
    X, y = change(*made_up(n_features=4))
    with pytest.raises(ValueError, match=said):
        PrivateLogisticRegression(epsilon=1.0).fit(X, y)


def test_plain_arrays_set_and_meet_the_number_of_columns():
    X, y = made_up(n_features=4)
    learner = PrivateLogisticRegression(epsilon=1.0).fit(X, y)
    assert learner.n_features_in_ == 4
    with pytest.raises(ValueError, match="3 features"):
        learner.predict(X[:, :3])
    frame = pd.DataFrame(X, columns=list("abcd"))
    assert not hasattr(learner.fit(frame, y).fit(X, y), "feature_names_in_")
