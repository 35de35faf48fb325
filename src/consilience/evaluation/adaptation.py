"""What a site makes of a release with its own exact records, and whether joining pays for it.

A release has noise in it that the site's own use of its own records does not need. `adapt` fits two
models to the site's records: one by itself, and one that is drawn towards the release. It follows
the second as far as held-out records of the site prove it better. Everything here is an exact
function of records: it costs no privacy as long as it stays at the site.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats
from sklearn.utils.validation import check_array

from consilience.aggregators.labelled import encode_labels
from consilience.aggregators.members import dense
from consilience.aggregators.mixture import (
    N_FOLDS,
    Ball,
    Ridge,
    folds,
    step_between,
    strengths_alone,
    weigh,
)
from consilience.display.html import card
from consilience.errors import SchemaMismatch, SettingsError, shield, shielded
from consilience.evaluation.compare import Gap, Joining, paired_gap
from consilience.evaluation.measures import (
    AUC,
    ERROR,
    RMSE,
    Evaluation,
    Metric,
    Predictor,
    auc_parts,
    evaluate,
)
from consilience.learners.erm import Loss
from consilience.learners.linear import best_class, class_chances
from consilience.progress import Progress, showing
from consilience.tables.groups import identify
from consilience.tables.schema import Schema

Array = NDArray[Any]

OWN, RELEASE, ADAPTED = "own exact model", "release", "adapted"
FEW = 1500  # records; fewer are divided into folds up to three times
# How much it counts against the fit that is drawn to the release if the release alone does worse
# than the site's own model: the fit's gain may then be luck.
DOUBT = 0.5
# Twice the log-likelihood that the release's scores must add to a constant before they count as
# more than noise: about two standard errors of their slope.
EVIDENCE = 4.0
LEAST_CHANCE = 1e-6  # as log-odds of a release that is not linear
SPREAD_OF_CONSTANT = 3.0  # what is expected of log-odds before any label is seen
STAYS = (
    "It was computed from exact records. Its coefficients, its predictions, the measures beside it "
    "and the sentence whether joining pays are exact statements about these records, and nothing "
    "hides one of them. It must not leave the site."
)


# ------------------------------------------------------------------------------- the release


@dataclass(frozen=True)
class _Prior:
    """A release as a site uses it: by its coefficients if it is linear, else by its scores."""

    model: Predictor
    classes: Array | None
    coef: Array | None  # (1 or K, d)

    @classmethod
    def of(cls, release: object) -> Self:
        model = getattr(release, "ensemble", release)
        if not hasattr(model, "predict"):
            raise SettingsError(
                f"A {type(release).__name__} was to be adapted, and it cannot predict. Nothing was "
                "learned. Pass a release, an ensemble or a fitted learner."
            )
        classes = getattr(model, "classes_", None)
        classes = None if classes is None or np.ndim(classes) == 0 else np.asarray(classes)
        coef = getattr(model, "coef", getattr(model, "coef_", None))
        return cls(model, classes, None if coef is None else np.atleast_2d(coef))

    @property
    def n_outputs(self) -> int:
        return 1 if self.classes is None or len(self.classes) <= 2 else len(self.classes)

    def scores(self, X: Array) -> Array:
        """Return what the release says of each record, as log-odds or as a number: (K or 1, n)."""
        if self.coef is not None:
            return np.asarray(self.coef @ X.T)
        if self.classes is None:
            return np.asarray(self.model.predict(X), dtype=np.float64)[None]
        chances_of = getattr(self.model, "predict_proba", None)
        if chances_of is not None:
            chances = np.asarray(chances_of(X), dtype=np.float64)
        else:
            chances = (np.asarray(self.model.predict(X))[:, None] == self.classes).astype(float)
        odds = np.log(np.clip(chances, LEAST_CHANCE, 1.0)).T
        return odds[1:] - odds[:1] if len(odds) == 2 else odds

    def widen(self, X: Array, unit: float) -> Array:
        """Return the records with the release's scores beside them, if it is not linear."""
        return X if self.coef is not None else np.hstack([X, self.scores(X).T / unit])


@dataclass(frozen=True)
class _Line:
    """Scores that are linear in widened records."""

    coef: Array  # (K or 1, d)
    intercept: Array

    def scores(self, rows: Array) -> Array:
        return np.asarray(self.coef @ rows.T + self.intercept[:, None])

    def towards(self, other: _Line, share: float) -> _Line:
        return _Line(
            (1 - share) * self.coef + share * other.coef,
            (1 - share) * self.intercept + share * other.intercept,
        )


# ------------------------------------------------------------------------------- fitting


@dataclass(frozen=True)
class _Fit:
    """The site's own model, the one that is drawn to the release, and how far that is followed."""

    prior: _Prior
    unit: float
    own: _Line
    near: _Line
    share: float

    @property
    def adapted(self) -> _Line:
        return self.own.towards(self.near, self.share)

    def scores(self, line: _Line, X: Array) -> Array:
        return line.scores(self.prior.widen(X, self.unit))


@dataclass(frozen=True)
class _Candidates:
    """Ridges of all strengths around zero, and around the release, over some of the records."""

    ridge: Ridge
    centre: Array  # the release's coefficients, its constant 0
    theirs: Array  # marks the coordinates that hold the release's scores
    alone: Array
    around: Array

    def own(self, rows: Array) -> list[Array]:
        """Return the fits by the site's own records alone, which do not see the release."""
        ridge, kept = self.ridge.at(rows), ~self.theirs
        ridge = replace(ridge, Z=ridge.Z[:, kept])
        start, found = np.zeros_like(self.centre[..., kept]), []
        for strength in self.alone:
            start = ridge.fit(np.zeros_like(start), strength, start)
            whole = np.zeros_like(self.centre)
            whole[..., kept] = start
            found.append(whole)
        return found

    def near(self, rows: Array) -> list[Array]:
        """Return the fits around the release: first the release alone, scaled, constant refitted.

        How far to go in the release's direction is read off the same rows.
        """
        ridge = self.ridge.at(rows)
        centre = _scale(ridge, self.centre)
        found = [centre]
        for strength in self.around:
            found.append(ridge.fit(centre, strength, found[-1]))
        return found


def _scale(ridge: Ridge, centre: Array) -> Array:
    """Return the release scaled by the k >= 0 that fits best, with the constant that fits best.

    k falls to zero where the release's scores explain no more than noise would.
    """
    s = np.atleast_2d(centre @ ridge.Z.T)
    middle = s.mean(axis=1, keepdims=True)
    size = math.sqrt(float(np.mean((s - middle) ** 2))) or 1.0
    u, n, loss, outputs = (s - middle) / size, len(ridge.y), ridge.loss, len(s)

    def objective(p: Array, free: bool) -> tuple[float, Array]:
        z = p[0] * u + p[1:, None]
        flat = z[0] if outputs == 1 else z
        slope = np.atleast_2d(loss.slope(flat, ridge.y))
        ridges = np.concatenate([[5e-4 * n], np.full(outputs, 0.5 / SPREAD_OF_CONSTANT**2)])
        value = float(loss.value(flat, ridge.y).sum() + ridges @ (p * p))
        gradient = np.concatenate([[(slope * u).sum() * free], slope.sum(axis=1)]) + 2 * ridges * p
        return value / n, gradient / n

    def fit(start: Array, free: bool) -> tuple[Array, float]:
        bounds = [(0.0, None if free else 0.0), *[(None, None)] * outputs]
        found = optimize.minimize(
            objective, start, args=(free,), jac=True, method="L-BFGS-B", bounds=bounds
        )
        return found.x, n * float(found.fun)

    constant, without = fit(np.zeros(1 + outputs), False)
    best, least = fit(np.concatenate([[1.0], constant[1:]]), True)
    evidence = 2 * (without - least)
    if outputs == 1 and not loss.monotone:  # squares: in units of the residuals' variance
        evidence *= n / max(2 * least, np.finfo(float).tiny)
    k = best[0] * max(0.0, 1 - EVIDENCE / evidence) if evidence > 0 else 0.0
    theta = np.atleast_2d(centre) * (k / size)
    # The rows of the ball end in √½.
    theta[:, -1] = (best[1:] - k / size * middle[:, 0]) * math.sqrt(2)
    return np.asarray(theta[0] if outputs == 1 else theta)


@dataclass(frozen=True)
class _Task:
    """A site's records beside a release."""

    prior: _Prior
    X: Array
    labels: Array
    persons: Array  # numbers from 0 on
    random_state: int

    def at(self, rows: Array) -> _Task:
        """Return the same with some of the records."""
        persons = np.unique(self.persons[rows], return_inverse=True)[1]
        return replace(self, X=self.X[rows], labels=self.labels[rows], persons=persons)

    def fit(self) -> _Fit:
        """Fit both models, and decide by held-out records how far the release is followed."""
        prior, d = self.prior, self.X.shape[1]
        y, loss, scale = encode_labels(self.labels, prior.classes, None, "An adapted model")
        reach = math.sqrt(float(np.square(self.X).sum(axis=1).max())) or 1.0
        longest = np.abs(prior.scores(self.X)).max() if prior.coef is None else reach
        unit = float(longest / reach) or 1.0
        rows = prior.widen(self.X, unit)
        ball = Ball.around(rows, with_intercept=True, outputs=prior.n_outputs, label_scale=scale)
        coef = prior.coef
        if coef is None:
            coef = np.hstack([np.zeros((prior.n_outputs, d)), unit * np.eye(prior.n_outputs)])
        step = step_between(len(y))
        candidates = _Candidates(
            Ridge(ball.records(rows), y, loss),
            ball.enter(coef, np.zeros(prior.n_outputs)),
            np.concatenate([np.zeros(d, bool), np.ones(rows.shape[1] - d, bool), [False]]),
            10.0 ** strengths_alone(len(y)),
            10.0 ** np.arange(1.0, -3.6, -step),
        )
        own, near, share = self._weigh(candidates)
        return _Fit(prior, unit, _Line(*ball.leave(own)), _Line(*ball.leave(near)), share)

    def _weigh(self, candidates: _Candidates) -> tuple[Array, Array, float]:
        ridge = candidates.ridge
        y, every = ridge.y, np.arange(len(ridge.y))
        n_persons = int(self.persons.max()) + 1
        if n_persons < 2:  # nothing can be held out
            return np.zeros_like(candidates.centre), _scale(ridge, candidates.centre), 1.0
        times = int(np.clip(FEW // len(y), 1, 3))
        tests = folds(y, self.random_state, persons=self.persons, times=times)
        place = np.concatenate([np.flatnonzero(test) for test in tests])

        def score(fit: Callable[[Array], list[Array]]) -> list[Array]:
            """Return each candidate's scores of held-out records."""
            parts = [
                [theta @ ridge.Z[test].T for theta in fit(np.flatnonzero(~test))] for test in tests
            ]
            return [np.concatenate(of_one, axis=-1) for of_one in zip(*parts, strict=True)]

        def mix(fit: Callable[[Array], list[Array]], held_out: list[Array]) -> tuple[Array, Array]:
            """Return a mixture of all strengths, and its scores of held-out records."""
            even = np.ones(len(held_out))
            weights, scales = weigh(ridge.loss, held_out, y[place], times=times, prior=even)
            shares = weights * scales
            theta = sum(share * one for share, one in zip(shares, fit(every), strict=True))
            return np.asarray(theta), np.asarray(
                sum(share * one for share, one in zip(shares, held_out, strict=True))
            )

        around = score(candidates.near)
        own, before = mix(candidates.own, score(candidates.own))
        near, after = mix(candidates.near, around)
        if self.prior.classes is not None and len(np.unique(y)) < 2:
            return own, near, 1.0  # one class: the records cannot rank, and only the release does

        def evidence(scores: Array) -> float:
            """Return by how many standard errors scores are better than those of the own model."""
            gains = self._gains(ridge.loss, y, place, before, scores)
            return min(_in_standard_errors(gain, self.persons) for gain in gains)

        better = evidence(after) + DOUBT * min(0.0, evidence(around[0]))
        return own, near, float(stats.norm.cdf(better)) if better > 0 else 0.0

    def _gains(
        self, loss: Loss, y: Array, place: Array, before: Array, after: Array
    ) -> list[Array]:
        """Return each record's part in what the release gains: in likelihood and in AUC."""
        n = len(y)
        often = np.bincount(place, minlength=n)

        def settle(values: Array) -> Array:  # the mean over the times a record was held out
            return np.bincount(place, values, n) / often

        gain = loss.value(before, y[place]) - loss.value(after, y[place])
        gains = [settle(np.asarray(gain))]
        if self.prior.classes is not None:
            codes = y if loss.n_outputs > 1 else (y > 0).astype(int)
            ranked = [
                auc_parts(_as_columns(np.array([settle(row) for row in np.atleast_2d(one)])), codes)
                for one in (before, after)
            ]
            gains.append(np.asarray(ranked[1]) - np.asarray(ranked[0]))
        return gains


def _as_columns(scores: Array) -> Array:
    """Return (n,) of one score per record, or (n, K)."""
    return np.asarray(scores[0] if len(scores) == 1 else scores.T)


def _by_person(parts: Array, persons: Array) -> Array:
    """Return one number for each person, with the same mean: persons are independent."""
    n_persons = int(persons.max()) + 1
    if n_persons == len(parts):
        return parts
    return np.asarray(np.bincount(persons, parts, n_persons) * (n_persons / len(parts)))


def _in_standard_errors(parts: Array, persons: Array) -> float:
    parts = _by_person(parts, persons)
    spread = float(parts.std(ddof=1))
    return float(parts.mean()) / spread * math.sqrt(len(parts)) if spread > 0 else 0.0


# ------------------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class _HeldOut:
    """The answers of models to records that each was not fitted to, as one model."""

    classes_: Array | None
    scores: Array  # (n,) or (n, K)

    def decision_function(self, X: object) -> Array:
        return self.scores

    def predict(self, X: object) -> Array:
        return self.scores if self.classes_ is None else best_class(self.classes_, self.scores)

    def _answers(self, scores: Array) -> tuple[Array, Array | None]:
        if self.classes_ is None:
            return scores, None
        return self.predict(None), class_chances(self.classes_, scores)


@dataclass(frozen=True)
class Comparison:
    """A site's own exact model, the release and the adapted model on the site's own records.

    ``evaluations`` has one for each. Own and adapted model were fitted, and all choices made,
    without the records that they are measured on. The release has seen all of them through its
    noise: its guarantee bounds what that is worth.
    """

    evaluations: Mapping[str, Evaluation]
    persons: Array = field(repr=False)
    share: float  # of the adapted model that was fitted to all records

    @property
    def metric(self) -> Metric:
        """What decides: the AUC where the records have one; else the error, or the RMSE."""
        found = [evaluation.measures for evaluation in self.evaluations.values()]
        if all(AUC.name in measures for measures in found):
            return AUC
        return RMSE if RMSE.name in found[0] else ERROR

    def gap(self, other: str = OWN, metric: Metric | None = None) -> Gap:
        """Return what the adapted model gains over another one, person by person."""
        metric = metric or self.metric
        parts = [
            np.asarray(self.evaluations[name].parts(metric), dtype=np.float64)
            for name in (other, ADAPTED)
        ]
        return paired_gap(*(_by_person(part, self.persons) for part in parts), metric=metric)

    def standard_error(self, name: str, metric: Metric) -> float:
        """Return the standard error of a measure of one model."""
        parts = np.asarray(self.evaluations[name].parts(metric), dtype=np.float64)
        parts = _by_person(parts, self.persons)
        return float(parts.std(ddof=1) / math.sqrt(len(parts))) if len(parts) > 1 else math.nan

    @property
    def joining(self) -> Joining:
        """The adapted model beside the own one, by the rule of `evaluation.compare`."""
        return Joining({"this site's own exact model": self.gap()}, self.metric.name)

    @property
    def sentence(self) -> str:
        """Whether joining pays for this site."""
        joining = self.joining
        answer = {
            True: "Joining pays for this site",
            False: "Joining does not pay for this site",
            None: "It is not clear whether joining pays for this site",
        }[joining.helps]
        kept = (
            " On held-out records of this site the release brings nothing, so the adapted model is "
            "the site's own."
            if self.share == 0
            else ""
        )
        value = self.evaluations[ADAPTED][self.metric.name].value
        return (
            f"{answer}: the {self.metric.title} of the adapted model, {self.metric.show(value)}, "
            f"is {joining.comparison}.{kept}"
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return each model's name and its measures with standard errors, in words."""
        found = []
        for name, evaluation in self.evaluations.items():
            parts = [
                f"{metric.title} {evaluation[metric.name].value:.3f} "
                f"± {self.standard_error(name, metric):.3f}"
                for metric in (AUC, ERROR, RMSE)
                if metric.name in evaluation.measures
            ]
            found.append((name, ", ".join(parts)))
        return found


def _compare(task: _Task, release: _Prior, share: float, report: Progress) -> Comparison | None:
    """Measure all three on records that their fits and choices have not seen; None if too few."""
    if int(task.persons.max()) < 1:
        return None
    n = len(task.labels)
    found = {name: np.zeros((task.prior.n_outputs, n)) for name in (OWN, ADAPTED)}
    order = task.labels if task.prior.classes is None else identify(task.labels.astype(str))
    tests = folds(order, task.random_state + 1, persons=task.persons, times=1)
    for done, test in enumerate(tests):
        fit = task.at(np.flatnonzero(~test)).fit()
        for name, line in ((OWN, fit.own), (ADAPTED, fit.adapted)):
            found[name][:, test] = fit.scores(line, task.X[test])
        report(done + 2, N_FOLDS + 1)
    models: dict[str, Predictor] = {
        OWN: _HeldOut(task.prior.classes, _as_columns(found[OWN])),
        RELEASE: release.model,
        ADAPTED: _HeldOut(task.prior.classes, _as_columns(found[ADAPTED])),
    }
    kind = "regression" if task.prior.classes is None else "classification"
    return Comparison(
        {name: evaluate(model, task.X, task.labels, task=kind) for name, model in models.items()},
        task.persons,
        share,
    )


# ------------------------------------------------------------------------------- what users call


@shield
@dataclass(frozen=True, repr=False)
class Adapted:
    """A model of one site's exact records and a release, which never leaves the site.

    It predicts like a fitted scikit-learn estimator. ``share_`` says how much of it is drawn to the
    release; at 0 it is the site's own model. ``comparison_`` has the site's own exact model, the
    release and the adapted model side by side.

    Privacy
    -------
    None: an exact function of the site's records. Do not hand it on, nor what it predicts or says.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.sin(np.arange(1200.0)).reshape(400, 3) / 2
    >>> y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
    >>> release = cs.PrivateLogisticRegression(epsilon=5.0, classes=[0, 1]).fit(X[100:], y[100:])
    >>> model = cs.adapt(release, (X[:100], y[:100]), compare=False)
    >>> isinstance(model, cs.Adapted), 0 <= model.share_ <= 1
    (True, True)
    """

    stays_at_site: ClassVar[bool] = True  # no aggregator takes it

    classes_: Array | None
    line: _Line
    own: _Line
    share_: float
    comparison_: Comparison | None = None
    schema: Schema | None = None
    prior: _Prior | None = None  # of a release that is not linear
    unit: float = 1.0

    @classmethod
    def of_parts(
        cls,
        *,
        classes: Array | None,
        lines: Sequence[tuple[Array, Array]],
        share: float,
        schema: Schema | None,
        release: object,
        unit: float,
    ) -> Self:
        """Return the model of coefficients and constants, adapted ones first, then the own ones.

        `release` is needed if it is not linear.
        """
        prior = None if release is None else _Prior.of(release)
        line, own = (_Line(*each) for each in lines)
        return cls(classes, line, own, share, None, schema, prior, unit)

    @property
    def is_linear(self) -> bool:
        """Whether coefficients say everything; else the release's scores are needed too."""
        return self.prior is None

    @property
    def own_(self) -> Adapted:
        """The site's own exact model, which no release has touched."""
        return replace(self, line=self.own, share_=0.0)

    @property
    def n_features_in_(self) -> int:
        """Number of encoded columns."""
        return int(self.line.coef.shape[1]) - (0 if self.prior is None else self.prior.n_outputs)

    @property
    def coef_(self) -> Array:
        """Coefficients of encoded records, (1 or K, d), where release and model are linear."""
        if self.prior is not None:
            raise AttributeError("A release that is not linear was adapted: there is no 'coef_'.")
        return self.line.coef

    @property
    def intercept_(self) -> Array:
        """The constants, (1 or K,)."""
        return self.line.intercept

    def decision_function(self, X: object) -> Array:
        """Return the log-odds of the second class, one score per class, or the number."""
        if self.schema is not None and not isinstance(X, np.ndarray):
            X = self.schema.encode_features(X)
        rows = check_array(dense(X), dtype=np.float64)
        if rows.shape[1] != self.n_features_in_:
            raise SchemaMismatch(
                f"The adapted model is of {self.n_features_in_} features, and was given "
                f"{rows.shape[1]}. Nothing was predicted. Encode the table with the study's schema."
            )
        wide = rows if self.prior is None else self.prior.widen(rows, self.unit)
        return _as_columns(self.line.scores(wide))

    def predict(self, X: object) -> Array:
        """Return each record's class, or number."""
        scores = self.decision_function(X)
        return scores if self.classes_ is None else best_class(self.classes_, scores)

    def predict_proba(self, X: object) -> Array:
        """Return class probabilities."""
        if self.classes_ is None:
            raise SettingsError("A regressor has no class probabilities. Use predict.")
        return class_chances(self.classes_, self.decision_function(X))

    @cached_property
    def says(self) -> list[str]:
        """What the model is and whether joining pays for the site, as sentences."""
        pays = (
            "There are too few records to hold some out, so nothing tells whether joining pays for "
            "this site: the adapted model is the release with its constant refitted."
            if self.comparison_ is None
            else self.comparison_.sentence
        )
        return [pays, STAYS]

    def __repr__(self) -> str:
        return f"Adapted(share_={self.share_:.2f})"  # a printed coefficient would be a leak

    def _repr_html_(self) -> str:
        rows = [] if self.comparison_ is None else self.comparison_.rows()
        return card("Adapted model", ("", self.says, rows))


@shielded
def adapt(
    release: object,
    records: object,
    *,
    schema: Schema | None = None,
    persons: ArrayLike | None = None,
    others: object = None,
    compare: bool = True,
    random_state: int = 0,
    progress: Progress | None = None,
) -> Adapted:
    """Adapt a release to a site's own exact records, at no privacy cost: the result stays there.

    Two ridge regressions (logistic, softmax or squared loss) are fitted to the records: one around
    zero, the site's own model; one around the release, scaled to fit and with its constant
    refitted. Each is a mixture over the strengths of the ridge, from records alone to the release
    alone, by cross-validated likelihood. If the second is better on held-out records, both in
    likelihood and in AUC, the result moves from the first towards it, the further the clearer that
    is, and less readily where the release alone is worse; else the result is the site's own model.
    Releases that are not linear enter by their log-odds, as further columns of the second fit.

    Parameters
    ----------
    release
        A `Release`, an ensemble, or a fitted learner.
    records
        The pair of encoded records X and labels y; or with `schema` any table of such records.
    schema
        The study's schema: encodes `records`, and later what is predicted.
    persons
        The person of each record: the records of one person are held out together. With `schema`
        they are read from the table.
    others
        The part of the release that other sites made, where it is known: it is used instead of the
        release, which has seen these very records (`Aggregator.leave_out`).
    compare
        Whether own model, release and adapted model are compared on the site's own folds. That
        takes five times as long.
    random_state
        Which records are held out together.
    progress
        A function of the work done and all of it; by default a bar on a terminal.

    Privacy
    -------
    None: the result is an exact function of the records, and must stay at the site. Nothing is
    charged, because nothing leaves. The release has seen the records too; its epsilon bounds how
    far it can have fitted to any one of them, and so how much it is flattered here.

    Examples
    --------
    >>> import numpy as np
    >>> from consilience import Noise, PrivateLogisticRegression
    >>> X = np.sin(np.arange(1200.0)).reshape(400, 3) / 2
    >>> y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
    >>> learner = PrivateLogisticRegression(epsilon=1.0, noise=Noise(seed=1))
    >>> model = adapt(learner.fit(X[100:], y[100:]), (X[:100], y[:100]), compare=False)
    >>> model.predict(X[:3]).shape
    (3,)
    """
    whole = _Prior.of(release)
    prior = whole if others is None else _Prior.of(others)
    X, labels, people = _read(records, schema, persons, prior)
    task = _Task(prior, X, labels, people, random_state)
    with showing("Adapting", progress) as report:
        fit = task.fit()
        report(1, N_FOLDS + 1)
        comparison = _compare(task, whole, fit.share, report) if compare else None
    return Adapted(
        prior.classes,
        fit.adapted,
        fit.own,
        fit.share,
        comparison,
        schema,
        None if prior.coef is not None else prior,
        fit.unit,
    )


def _read(
    records: object, schema: Schema | None, persons: ArrayLike | None, prior: _Prior
) -> tuple[Array, Array, Array]:
    """Return records, labels and persons' numbers, checked against the release."""
    if schema is not None:
        rows = schema.encode(records)
        records, persons = (rows.X, schema.name_labels(rows.y)), rows.persons
    if not (isinstance(records, Sequence) and len(records) == 2):
        raise SettingsError(
            "The records to adapt a release to are a pair (X, y), or a table with schema=. Nothing "
            "was learned."
        )
    try:
        X, labels = check_array(dense(records[0]), dtype=np.float64), np.asarray(records[1])
    except ValueError:
        raise SchemaMismatch(
            "The records to adapt a release to are none, or not all finite numbers. Nothing was "
            "learned. Encode the table with the study's schema."
        ) from None
    if labels.shape != (len(X),):
        raise SchemaMismatch(
            "A release is adapted to records with one label each. Nothing was learned. Check the "
            "shapes of X and y."
        )
    if prior.classes is not None and not np.isin(labels, prior.classes).all():
        raise SchemaMismatch(
            "A record has a label that the release does not know. Nothing was learned. Leave out "
            "such records."
        )
    if prior.coef is not None and prior.coef.shape[1] != X.shape[1]:
        raise SchemaMismatch(
            f"The release is of {prior.coef.shape[1]} features, and the records have {X.shape[1]}. "
            "Nothing was learned. Encode the table with the study's schema."
        )
    people = np.arange(len(X)) if persons is None else identify(persons)
    if people.shape != labels.shape:
        raise SchemaMismatch(
            "A release is adapted to records with one person each, where persons are given. "
            "Nothing was learned. Check the shape of 'persons'."
        )
    return X, labels, people
