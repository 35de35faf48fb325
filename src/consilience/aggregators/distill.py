"""Distillation: members label public records, and one linear model learned from the labels hides any single site.

Members may be classifiers of any kind: only what they say about public records is used. Counts are exact integers and
every member keeps its own slot, so that one site moves its own votes and nothing else, rounding included. What is then
hidden is a whole site (``unit="site"``), by a hub that is trusted with the exact members. Proofs:
docs/guarantees/distillation.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.linalg import helmert
from sklearn.utils.validation import check_array

from consilience.data import Public
from consilience.errors import SettingsError
from consilience.learners.base import is_positive, run_charged
from consilience.learners.erm import Logistic, Loss, Softmax, gradient_error, solve
from consilience.learners.perturbation import CLOSING_SHARE, TOLERANCE, public_radius
from consilience.privacy.accounting import (
    Closing,
    DiscreteGaussian,
    Event,
    Gaussian,
    L2Laplace,
    ObjectiveL2Laplace,
    calibrate_scale,
    gaussian_sigma,
    total,
)
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import (
    Noise,
    Source,
    clip_rows,
    close,
    draw_error,
    gaussian,
    gaussian_counts,
    l2_laplace,
)

from .average import TRUSTED
from .members import DISJOINT, LinearEnsemble, aligned
from .votes import Tally, count_votes, voters

Array = NDArray[Any]

OPEN_RECORDS = "the records that members labelled are public"
READ_CLASSES = "the set of labels is public: it was read from the members"
STRENGTHS = tuple(10.0 ** (-half / 2) for half in range(13))  # regularization="auto": from 1 down to 1e-6
LEAST_EIGENVALUE = 1e-9  # of the public second moment, relative to the largest: flatter directions say nothing


@dataclass(frozen=True)
class DistilledEnsemble(LinearEnsemble):
    """A linear classifier that hides any one site; predicts like a fitted scikit-learn estimator.

    ``guarantee`` is per site, ``public_guarantee`` per record of the aggregation data where that is protected too.
    ``statistic`` is the noisy statistic, if that was released: more models may be computed from it at no cost.
    """

    events: tuple[Event, ...] = ()
    regularization: float = math.nan
    public_guarantee: Guarantee | None = None
    statistic: Array | None = field(default=None, repr=False)


@dataclass(frozen=True)
class _Rows:
    """Public records in the unit ball, and the facts about them that calibrations use."""

    X: Array
    n_classes: int
    n_members: int

    @property
    def logistic(self) -> bool:
        return self.n_classes == 2

    @property
    def loss(self) -> Loss:
        return Logistic() if self.logistic else Softmax(self.n_classes)

    @property
    def contrasts(self) -> Array:
        """Orthonormal rows that span what can differ between classes: shares of votes sum to one."""
        return np.asarray(helmert(self.n_classes))


def _largest_mean(Y: Array) -> float:
    """Bound (1/n)·‖Σ tᵢ yᵢᵀ‖ over all tᵢ of length <= 1, from above and over the reals."""
    n, d = Y.shape
    moment = Y.T @ Y / n
    spread = float(np.trace(moment))
    spectral = math.sqrt(max(float(np.linalg.eigvalsh(moment)[-1]), 0.0) + (n + 16 * d) * 2.0**-52 * spread)
    lengths = np.sqrt(np.einsum("ij,ij->i", Y, Y))
    return float(min(spectral, lengths.mean() * (1 + (n + d) * 2.0**-52)))


def _shares_moved(n_classes: int, neighbours: str) -> float:
    """Bound how far one member's shares of one record move: e_a to e_b, or e_a to the even split."""
    return math.sqrt(2) if neighbours == "replace-one" else math.sqrt(1 - 1 / n_classes)


def _statistic(counts: Array, whole: int, Y: Array) -> Array:
    """Return (1/n) Σ (share - 1/K) yᵀ as (K, d), rounded by at most `_statistic_error`."""
    n, n_classes = counts.shape
    centred = (counts - whole // n_classes).astype(np.float64)  # exact: below 2^53
    return np.asarray(centred.T @ Y / (float(whole) * n))


def _statistic_error(Y: Array, n_classes: int) -> float:
    """Bound, by public facts, the rounding of the statistic and of its contrasts in the Frobenius norm."""
    n = len(Y)
    size = math.sqrt(n_classes * float(np.einsum("ij,ij->", Y, Y)) / n)
    return (n + n_classes**2 + 32) * 2.0**-52 * size


def _minimum(rows: _Rows, S: Array, ridge: float, tolerance: float, start: Array | None = None) -> Array:
    """Return the minimum of Σ lse(W x) - n<S, W> + (ridge/2)‖W‖², or for a vector S of its logistic form.

    The solver knows labels, so every record gets the first class, and the linear term takes it away again.
    """
    n = len(rows.X)
    loss: Loss
    linear = -n * S
    if S.ndim == 1:
        loss, y = Logistic(), np.full(n, -1.0)
    else:
        loss, y = Softmax(rows.n_classes), np.zeros(n, dtype=np.int64)
        linear[0] += rows.X.sum(axis=0)
    found = solve(rows.X, y, loss, regularization=ridge, tolerance=tolerance, linear=linear, start=start)
    return np.asarray(found.coef, dtype=np.float64)


def _loose_tolerance(rows: _Rows, target: Array, strength: float) -> float:
    """Return a tolerance for post-processing, which owes nobody an exact minimum."""
    n, d = rows.X.shape
    linear_norm = n * (float(np.linalg.norm(target)) + 1)
    facts: Any = {"n_records": n, "n_features": d, "regularization": strength * n, "linear_norm": linear_norm}
    return float(max(1e-7 * n, 8 * gradient_error(rows.loss, **facts)))


class _Plan:
    """What will be drawn, decided from public facts; `draw` then sees the counts."""

    def __init__(self, settings: Any, rows: _Rows) -> None:
        self.settings, self.rows = settings, rows
        self.noise: Any = None
        self.closing: Closing | None = None
        self.private = math.isfinite(settings.epsilon)
        self.who: dict[str, Any] = {"unit": Unit.SITE, "neighbours": Neighbours(settings.neighbours)}

    @property
    def events(self) -> list[Event]:
        return [event for event in (self.noise, self.closing) if event is not None]

    def _calibrate(self, sensitivity: float) -> None:
        epsilon = (1 - CLOSING_SHARE) * self.settings.epsilon
        if self.settings.delta > 0:
            sigma = gaussian_sigma(epsilon=epsilon, delta=self.settings.delta, sensitivity=sensitivity)
            self.noise = Gaussian(sensitivity=sensitivity, sigma=sigma, at_delta=self.settings.delta, **self.who)
        else:
            self.noise = L2Laplace(sensitivity=sensitivity, scale=sensitivity / epsilon, **self.who)

    def _close(self, dimension: int, distance: float) -> None:
        scale = 2 * math.sqrt(dimension) * distance / (CLOSING_SHARE * self.settings.epsilon)
        self.closing = Closing(dimension=dimension, distance=distance, scale=scale, **self.who)

    def _drawn(self, dimension: int, source: Source) -> Array:
        if self.noise is None:
            return np.zeros(dimension)
        draw: Any = gaussian if isinstance(self.noise, Gaussian) else l2_laplace
        return np.asarray(draw(dimension, event=self.noise, source=source))

    def _closed(self, vector: Array, source: Source) -> Array:
        return vector if self.closing is None else close(vector, event=self.closing, source=source)

    def draw(self, tally: Tally, source: Source) -> dict[str, Array]:
        raise NotImplementedError  # pragma: no cover - every plan defines it


class _StatisticPlan(_Plan):
    """Noise on the one statistic through which votes enter the objective; the rest is post-processing."""

    def __init__(self, settings: Any, rows: _Rows) -> None:
        super().__init__(settings, rows)
        values, vectors = np.linalg.eigh(rows.X.T @ rows.X / len(rows.X))
        kept = values > LEAST_EIGENVALUE * values[-1]
        if not kept.any():
            raise SettingsError("The public records are all zero. Nothing was combined. Check their encoding.")
        self.roots, self.vectors = np.sqrt(values[kept]), vectors[:, kept]
        self.whitened = rows.X @ (self.vectors / self.roots)
        self.dimension = len(rows.contrasts) * len(self.roots)
        if self.private:
            moved = _shares_moved(rows.n_classes, settings.neighbours)
            self._calibrate(moved * _largest_mean(self.whitened) / rows.n_members)
            drawn = 2 * draw_error(self.dimension) * public_radius(self.noise, self.dimension)
            self._close(self.dimension, _statistic_error(self.whitened, rows.n_classes) + drawn)

    @property
    def variance(self) -> float:
        """Variance of the noise in each contrast and whitened direction; known, since the event states it."""
        if self.noise is None:
            return 0.0
        if isinstance(self.noise, Gaussian):
            return self.noise.sigma**2
        return float(self.noise.scale**2 * (self.dimension + 1))

    def draw(self, tally: Tally, source: Source) -> dict[str, Array]:
        contrasts = self.rows.contrasts
        exact = _statistic(tally.counts, tally.n_members * tally.unit, self.whitened)
        noisy = contrasts @ exact + self._drawn(self.dimension, source).reshape(len(contrasts), -1)
        noisy = self._closed(noisy, source)
        S = contrasts.T @ noisy * self.roots @ self.vectors.T + self.rows.X.mean(axis=0) / self.rows.n_classes
        return {"statistic": S, **self._learn(S, noisy, tally.public.y, tally.classes)}

    def _learn(self, S: Array, noisy: Array, y: Any, classes: Array) -> dict[str, Array]:
        """Solve, at the strength asked for or at the best of a grid: all of it computed from what is released."""
        target = S[1] if self.rows.logistic else S
        strengths = [self.settings.regularization]
        if strengths == ["auto"]:
            strengths = [self._strength(noisy)] if y is None else list(STRENGTHS)
        best, coef, chosen = math.inf, None, {}
        for strength in strengths:
            tolerance = _loose_tolerance(self.rows, target, strength)
            coef = _minimum(self.rows, target, strength * len(self.rows.X), tolerance, coef)
            wrong = 0.0 if y is None else _error(self.rows.X @ coef.T, y, classes)
            if wrong < best:
                best, chosen = wrong, {"coef": coef, "regularization": np.array(strength)}
        return chosen

    def _strength(self, noisy: Array) -> float:
        """Return the λ with the least estimated loss without noise, from the noisy statistic and the noise's variance.

        To second order around W = 0 the loss is that of a linear model: in whitened contrasts with curvature e/K along
        a direction of eigenvalue e, the minimum is W = √e·c/(e/K + λ), and Stein's estimate of its loss is unbiased.
        """
        e = self.roots**2
        square = np.square(noisy).sum(axis=0)
        variance = self.variance * len(noisy)
        losses = []
        for strength in STRENGTHS:
            slope = e / (e / self.rows.n_classes + strength)
            losses.append(((slope**2 / self.rows.n_classes / 2 - slope) * square + slope * variance).sum())
        return float(STRENGTHS[int(np.argmin(losses))])


def _error(z: Array, y: Any, classes: Array) -> float:
    said = (z > 0).astype(int) if z.ndim == 1 else z.argmax(axis=1)
    return float(np.mean(classes[said] != np.asarray(y)))


class _OutputPlan(_Plan):
    """Noise on the minimum of the distilled loss (Hamm et al. 2016, algorithms 1 and 2)."""

    def __init__(self, settings: Any, rows: _Rows) -> None:
        super().__init__(settings, rows)
        n, d = rows.X.shape
        self.ridge = settings.regularization * n
        self.paper = settings.calibration == "hamm2016"
        self.classes_drawn = 1 if rows.logistic else rows.n_classes - (not self.paper)
        rounding = gradient_error(
            rows.loss,
            n_records=n,
            n_features=d,
            regularization=self.ridge,
            linear_norm=2.0 * n,
            tolerance=TOLERANCE * self.ridge,
        )
        rounding += n * _statistic_error(np.ones((n, 1)), rows.n_classes)  # whatever the records: ‖x‖ <= 1
        self.tolerance = max(TOLERANCE * self.ridge, 8 * rounding)
        if self.private:
            self._calibrate(self._paper_sensitivity() if self.paper else self._sensitivity())
            distance = (self.tolerance + rounding) / self.ridge
            radius = public_radius(self.noise, self.classes_drawn * d)
            released = d * rows.loss.n_outputs
            self._close(released, distance + 2 * draw_error(released) * radius)

    def _sensitivity(self) -> float:
        settings, rows, n = self.settings, self.rows, len(self.rows.X)
        voters = 1 if settings.majority else rows.n_members
        # Two classes have one vector of coefficients: a share of votes moves by 1 where the pair of them moves by √2.
        pair = math.sqrt(2) if rows.logistic else 1.0
        relation = "replace-one" if settings.majority else settings.neighbours
        moved = _shares_moved(rows.n_classes, relation) / pair / voters
        reach, steepest = 1.0, math.sqrt(2) / pair
        if settings.protect_public:
            gap = ((n - 1) * moved + 2 * steepest) / n
        else:
            reach = min(1.0, _largest_mean(rows.X))
            gap = moved * reach
        strength = settings.regularization
        longest = min(math.sqrt(2 * math.log(rows.n_classes) / strength), steepest * reach / strength)
        return float(min(gap / strength, 2 * longest))

    def _paper_sensitivity(self) -> float:
        n, m = len(self.rows.X), self.rows.n_members
        if self.settings.majority:
            return 2 / float(self.settings.regularization)
        extended = (n + m - 1) / n if self.settings.protect_public else 1.0
        return extended * 2 / (m * float(self.settings.regularization))

    def draw(self, tally: Tally, source: Source) -> dict[str, Array]:
        rows, counts, whole = self.rows, tally.counts, tally.n_members * tally.unit
        if self.settings.majority:
            # A tie of two classes goes to the second, as in the paper; of more, to the first.
            code = (counts[:, 1] >= counts[:, 0]).astype(int) if rows.logistic else counts.argmax(axis=1)
            whole = rows.n_classes
            counts = np.zeros_like(counts)
            counts[np.arange(len(code)), code] = whole
        S = _statistic(counts, whole, rows.X) + rows.X.mean(axis=0) / rows.n_classes
        coef = _minimum(rows, S[1] if rows.logistic else S, self.ridge, self.tolerance)
        drawn = self._drawn(self.classes_drawn * rows.X.shape[1], source)
        if not rows.logistic:
            coef = coef - coef.mean(axis=0)  # where the exact minimum is: nearer to it
            drawn = drawn.reshape(self.classes_drawn, -1)
            drawn = drawn if self.paper else rows.contrasts.T @ drawn
        return {
            "coef": self._closed(coef + drawn, source),
            "regularization": np.array(float(self.settings.regularization)),
        }


class _ObjectivePlan(_Plan):
    """Noise in the objective: hides a site, a record of the aggregation data, or both at once.

    Neighbours are two steps apart, and the same noise pays for each: `noise` for one record with all its labels,
    `shift` for one member's votes on the others, which only move the linear term. Pure epsilons of two steps add;
    deltas do not, so there is no Gaussian form.
    """

    def __init__(self, settings: Any, rows: _Rows) -> None:
        super().__init__(settings, rows)
        n, d = rows.X.shape
        K = rows.n_classes
        self.loss = Softmax(K)
        self.shift: L2Laplace | None = None
        # Two classes as a softmax of two: W = (-w/2, w/2) has half the square of w.
        self.ridge = settings.regularization * n * (2 if rows.logistic else 1)
        radius = 0.0
        if self.private:
            epsilon = (1 - CLOSING_SHARE) * settings.epsilon
            # At most half of epsilon for the Jacobian, by more ridge where the asked one is too small.
            self.ridge = max(self.ridge, 1 / (K * math.expm1(min(epsilon / 2 / (K - 1), 700.0))))
            moved = (n - 1) * _shares_moved(K, settings.neighbours) / rows.n_members
            facts: dict[str, Any] = {"loss": "softmax", "n_classes": K, "curvature": self.loss.curvature}
            facts |= {"lipschitz": self.loss.lipschitz, "strong_convexity": self.ridge, "records_per_unit": 1}
            jacobian = ObjectiveL2Laplace(scale=1.0, **facts, **self.who).jacobian
            scale = (moved + 2 * self.loss.lipschitz) / (epsilon - jacobian) * (1 + 1e-12)
            self.noise = ObjectiveL2Laplace(scale=scale, **facts, **self.who)
            self.shift = L2Laplace(sensitivity=moved, scale=scale, **self.who)
            radius = public_radius(self.noise, (K - 1) * d)
        rounding = gradient_error(
            self.loss,
            n_records=n,
            n_features=d,
            regularization=self.ridge,
            linear_norm=2.0 * n + radius,
            tolerance=TOLERANCE * self.ridge,
        )
        rounding += n * _statistic_error(np.ones((n, 1)), K)
        self.tolerance = max(TOLERANCE * self.ridge, 8 * rounding)
        if self.private:
            distance = (self.tolerance + rounding + draw_error(K * d) * radius) / self.ridge
            self._close(K * d, distance)

    @property
    def events(self) -> list[Event]:
        return [*super().events, *([] if self.shift is None else [self.shift])]

    def draw(self, tally: Tally, source: Source) -> dict[str, Array]:
        rows = self.rows
        n, d = rows.X.shape
        S = _statistic(tally.counts, tally.n_members * tally.unit, rows.X) + rows.X.mean(axis=0) / rows.n_classes
        drawn = rows.contrasts.T @ self._drawn((rows.n_classes - 1) * d, source).reshape(-1, d)
        W = self._closed(_minimum(rows, S - drawn / n, self.ridge, self.tolerance), source)
        strength = self.ridge / n / (2 if rows.logistic else 1)
        return {"coef": W[1] - W[0] if rows.logistic else W, "regularization": np.array(strength)}


@dataclass(frozen=True)
class _Question:
    """What members will be asked, and what is known before they are: `count` asks."""

    count: Callable[[], Tally]
    public: Public
    classes: Array
    declared: bool
    own: tuple[Guarantee | None, ...]


def _require(settings: Any, name: str, fits: bool, must: str) -> None:
    if not fits:
        raise SettingsError(
            f"The {name!r} parameter of {type(settings).__name__} must be {must}. "
            f"Got {getattr(settings, name)!r} instead."
        )


def _check(settings: Any) -> None:
    epsilon, delta = settings.epsilon, settings.delta
    infinite = isinstance(epsilon, float) and epsilon == math.inf
    _require(settings, "epsilon", infinite or is_positive(epsilon), "a number > 0, or math.inf")
    no_delta = not isinstance(delta, bool) and delta == 0
    _require(settings, "delta", no_delta or (is_positive(delta) and delta < 1), "a number in [0, 1)")
    _require(settings, "neighbours", settings.neighbours in ("replace-one", "null-one"), "'replace-one' or 'null-one'")
    _require(settings, "data_norm", is_positive(settings.data_norm), "a finite number > 0")
    _require(settings, "noise", settings.noise is None or isinstance(settings.noise, Noise), "None or a Noise value")


def _ball(settings: Any, X: Any) -> Array:
    """Return public records as dense rows of length <= 1, with a constant column if there is to be an intercept."""
    X = check_array(X, accept_sparse="csr", dtype=np.float64)
    X = X.toarray() if sparse.issparse(X) else X
    X = clip_rows(X, settings.data_norm)
    X = X if settings.data_norm == 1.0 else clip_rows(X / settings.data_norm, 1.0)
    if not settings.fit_intercept:
        return np.ascontiguousarray(X)
    return np.asarray(clip_rows(np.hstack([X, np.ones((len(X), 1))]) * math.sqrt(0.5), 1.0))


def _unscaled(settings: Any, coef: Array) -> tuple[Array, Array]:
    coef = np.atleast_2d(coef)
    if not settings.fit_intercept:
        return coef / settings.data_norm, np.zeros(len(coef))
    half = math.sqrt(0.5)
    return coef[:, :-1] * (half / settings.data_norm), coef[:, -1] * half


def _ask(settings: Any, members: Any, public: Public | None, soft: str = "votes") -> _Question:
    if isinstance(members, Tally):
        facts = (members.public, members.classes, members.declared, members.own)
        return _Question(lambda: members, *facts)
    if public is None:
        raise SettingsError(
            f"{type(settings).__name__} needs public records for the members to label. Nothing was combined. "
            "Pass public=Public(X)."
        )
    found, every, declared = voters(members, settings.classes)
    own = tuple(member.guarantee for member in found)
    return _Question(
        lambda: count_votes(found, public, classes=every.tolist(), soft=soft), public, every, declared, own
    )


def _stated(settings: Any, events: Sequence[Event], declared: bool, *extra: str) -> Guarantee:
    relation = events[0].neighbours if events else Neighbours(settings.neighbours)
    if not events:
        return Guarantee(epsilon=math.inf, delta=0.0, unit=Unit.SITE, neighbours=relation)
    if settings.noise is not None and settings.noise.seed is not None:
        return Guarantee.void("seeded noise", unit=Unit.SITE, neighbours=relation)
    whole = total(events)
    return Guarantee(
        epsilon=whole.epsilon,
        delta=whole.delta,
        unit=whole.unit,
        neighbours=whole.neighbours,
        assumptions=(DISJOINT, TRUSTED, *extra, *(() if declared else (READ_CLASSES,))),
    )


def _ensemble(
    settings: Any,
    state: dict[str, Array],
    events: Sequence[Event],
    asked: _Question,
    stated: Guarantee,
    hidden: Guarantee | None = None,
) -> DistilledEnsemble:
    coef, intercept = _unscaled(settings, state["coef"])
    return DistilledEnsemble(
        asked.classes,
        coef,
        intercept,
        np.full(len(asked.own), 1 / len(asked.own)),
        stated,
        asked.own,
        tuple(events),
        float(state["regularization"]),
        hidden,
        state.get("statistic"),
    )


def _release(
    settings: Any, draw: Any, events: Sequence[Event], ledger: Ledger | None, dataset: str | None, key: str | None
) -> dict[str, Array]:
    state, _ = run_charged(
        draw,
        events,
        noise=Noise() if settings.noise is None else settings.noise,
        ledger=ledger,
        dataset=dataset,
        key=key,
        purpose=type(settings).__name__,
    )
    return state


class _Distillation:
    """What the two distillations share."""

    delta: float
    mechanism: str
    regularization: Any
    protect_public: bool
    neighbours: str
    calibration: str
    soft: str
    majority: bool
    mechanisms: tuple[str, ...]

    def _check(self) -> None:
        _check(self)
        _require(self, "mechanism", self.mechanism in self.mechanisms, f"one of {self.mechanisms}")
        strength = self.regularization
        free = self.mechanism == "statistic" and not self.protect_public
        fits = is_positive(strength) or (strength == "auto" and free)
        _require(self, "regularization", fits, "a number > 0, or 'auto' if only the statistic is released")
        _require(self, "calibration", self.calibration in ("tight", "hamm2016"), "'tight' or 'hamm2016'")
        _require(self, "soft", self.soft in ("votes", "probabilities"), "'votes' or 'probabilities'")
        relation = self.neighbours == "replace-one" or (not self.majority and not self.protect_public)
        _require(self, "neighbours", relation, "'replace-one' here: one record or one vote decides a whole label")
        if self.protect_public and self.mechanism == "statistic" and self.delta > 0:
            raise SettingsError(
                "protect_public=True with mechanism='statistic' is for pure epsilon: its proof has no Gaussian form. "
                "Nothing was combined. Use delta=0, or mechanism='output'."
            )
        if self.calibration == "hamm2016" and (self.mechanism != "output" or self.neighbours != "replace-one"):
            raise SettingsError(
                "calibration='hamm2016' is the paper's: mechanism='output' and neighbours='replace-one'. Nothing was "
                "combined. Use calibration='tight' for anything else."
            )

    def _plan(self, rows: _Rows) -> _Plan:
        if self.mechanism == "output":
            return _OutputPlan(self, rows)
        return _ObjectivePlan(self, rows) if self.protect_public else _StatisticPlan(self, rows)

    def combine(
        self,
        members: Any,
        public: Public | None = None,
        *,
        ledger: Ledger | None = None,
        dataset: str | None = None,
        key: str | None = None,
    ) -> DistilledEnsemble:
        """Return one linear model that agrees with `members`, fitted classifiers of any kind, on `public` records.

        `members` may also be what `count_votes` made of them, public records included. Labels of `public`, if there
        are any, serve ``regularization="auto"`` and nothing else. With a ledger, `dataset` is charged first.
        """
        self._check()
        asked = _ask(self, members, public, self.soft)
        plan = self._plan(_Rows(_ball(self, asked.public.X), len(asked.classes), len(asked.own)))
        state = _release(self, lambda source: plan.draw(asked.count(), source), plan.events, ledger, dataset, key)
        stated = _stated(self, plan.events, asked.declared, *(() if self.protect_public else (OPEN_RECORDS,)))
        hidden = _per_record(stated) if self.protect_public else None
        return _ensemble(self, state, plan.events, asked, stated, hidden)


def _per_record(stated: Guarantee) -> Guarantee:
    """Restate what holds for a site and a record at once as what holds for one record of the aggregation data."""
    if not stated.holds:
        return Guarantee.void(str(stated.void_reason), unit=Unit.RECORD, neighbours=stated.neighbours)
    return Guarantee(
        epsilon=stated.epsilon,
        delta=stated.delta,
        unit=Unit.RECORD,
        neighbours=stated.neighbours,
        assumptions=stated.assumptions,
    )


class VoteDistillation(_Distillation):
    """Learn one linear model from the members' majority vote on public records (Hamm et al. 2016, algorithm 1).

    One vote can decide every label, so the noise does not shrink with the number of sites; `SoftLabelDistillation`
    is better in every respect but this one: without noise its labels are as clear as labels get.

    Parameters
    ----------
    epsilon, delta
        The budget; ``delta=0`` is pure, ``epsilon=math.inf`` exact, which promises nothing.
    regularization
        λ of ``mean(loss) + λ/2 ‖w‖²``, in coordinates where rows have norm <= 1.
    protect_public
        Also hide one record of the public data, replaced at the same time as a site.
    data_norm, fit_intercept
        Declared bound on the norm of a public row, longer ones are scaled down; whether to append a constant.
    classes
        The declared labels. Without it they are read from the members, and the guarantee says so.
    calibration
        ``"tight"``, or ``"hamm2016"`` for the paper's own noise.
    noise
        ``Noise(seed=...)`` for tests and experiments; voids the guarantee.

    Privacy
    -------
    (epsilon, delta) per site, replace-one, against those who see the ensemble, not against the hub. Not hidden: the
    number of sites, the classes, and without `protect_public` the public records. Proof:
    docs/guarantees/distillation.md.
    """

    majority = True
    mechanisms = ("output",)
    soft = "votes"
    neighbours = "replace-one"

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float = 0.0,
        regularization: float = 1e-4,
        mechanism: str = "output",
        protect_public: bool = False,
        data_norm: float = 1.0,
        fit_intercept: bool = True,
        classes: Sequence[Any] | None = None,
        calibration: str = "tight",
        noise: Noise | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.regularization = regularization
        self.mechanism = mechanism
        self.protect_public = protect_public
        self.data_norm = data_norm
        self.fit_intercept = fit_intercept
        self.classes = classes
        self.calibration = calibration
        self.noise = noise


class SoftLabelDistillation(_Distillation):
    """Learn one linear model from how members' votes on public records divide, hiding any one site.

    Votes enter the logistic loss only through one small statistic, so noise on that statistic is enough
    (``mechanism="statistic"``): no factor 1/λ, and any λ afterwards. ``"output"`` is Hamm et al. 2016, algorithm 2.

    Parameters
    ----------
    epsilon, delta
        The budget; ``delta=0`` is pure, ``epsilon=math.inf`` exact, which promises nothing.
    regularization
        λ of ``mean(loss) + λ/2 ‖w‖²``, in coordinates where rows have norm <= 1. ``"auto"``, with the statistic only,
        chooses it at no cost: by the labels of the public records, or without them by the known noise.
    mechanism
        ``"statistic"`` or ``"output"``.
    protect_public
        Also hide one record of the public data, replaced at the same time as a site. The statistic then becomes noise
        in the objective, for ``delta=0`` only, and λ may be raised.
    neighbours
        ``"replace-one"``: a site's votes become any others. ``"null-one"``: they become an even split; less noise.
    soft
        ``"votes"``, or ``"probabilities"`` where members have them: same noise, labels that say more.
    data_norm, fit_intercept
        Declared bound on the norm of a public row, longer ones are scaled down; whether to append a constant.
    classes
        The declared labels. Without it they are read from the members, and the guarantee says so.
    calibration
        ``"tight"``, or ``"hamm2016"`` for the paper's own noise with ``mechanism="output"``.
    noise
        ``Noise(seed=...)`` for tests and experiments; voids the guarantee.

    Privacy
    -------
    (epsilon, delta) per site, neighbours as set, against those who see the ensemble, not against the hub. Not hidden:
    the number of sites, the classes, and without `protect_public` the public records. Proof:
    docs/guarantees/distillation.md.

    Examples
    --------
    >>> from sklearn.tree import DecisionTreeClassifier
    >>> X = Noise(seed=0).open().uniform(6000).reshape(3000, 2) - 0.5
    >>> y = (X[:, 0] > X[:, 1]).astype(int)
    >>> sites = [DecisionTreeClassifier(max_depth=3).fit(X[i::200], y[i::200]) for i in range(200)]
    >>> joined = SoftLabelDistillation(epsilon=1.0, regularization="auto", classes=[0, 1]).combine(sites, Public(X))
    >>> joined.guarantee
    Guarantee(epsilon=1, delta=0, per site, replace-one)
    """

    majority = False
    mechanisms = ("statistic", "output")

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float = 0.0,
        regularization: float | str = 1e-4,
        mechanism: str = "statistic",
        protect_public: bool = False,
        neighbours: str = "replace-one",
        soft: str = "votes",
        data_norm: float = 1.0,
        fit_intercept: bool = True,
        classes: Sequence[Any] | None = None,
        calibration: str = "tight",
        noise: Noise | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.regularization = regularization
        self.mechanism = mechanism
        self.protect_public = protect_public
        self.neighbours = neighbours
        self.soft = soft
        self.data_norm = data_norm
        self.fit_intercept = fit_intercept
        self.classes = classes
        self.calibration = calibration
        self.noise = noise


class ClippedAverage:
    """Average linear members, each cut to a public length, hiding any one site; needs no public records.

    Pathak et al. 2010 average too, but their noise hides one record: it must not be compared with the others here.

    Parameters
    ----------
    epsilon, delta
        The budget; ``delta=0`` is pure, ``epsilon=math.inf`` exact, which promises nothing.
    clip_norm
        Public bound on a member's coefficients and intercept together, contrasts between classes only.
    neighbours
        ``"replace-one"``: a site's model becomes any other. ``"null-one"``: it becomes zero; half the noise.
    data_norm
        The sites' declared norm of a record: coefficients are measured in its units.

    Privacy
    -------
    (epsilon, delta) per site, against those who see the ensemble, not against the hub. Not hidden: the number of sites
    and the classes. Proof: docs/guarantees/distillation.md.
    """

    def __init__(
        self,
        *,
        epsilon: float,
        clip_norm: float,
        delta: float = 0.0,
        neighbours: str = "replace-one",
        data_norm: float = 1.0,
        classes: Sequence[Any] | None = None,
        noise: Noise | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.clip_norm = clip_norm
        self.delta = delta
        self.neighbours = neighbours
        self.data_norm = data_norm
        self.classes = classes
        self.noise = noise

    def combine(
        self,
        members: Any,
        public: Public | None = None,
        *,
        ledger: Ledger | None = None,
        dataset: str | None = None,
        key: str | None = None,
    ) -> DistilledEnsemble:
        """Return the noisy average of linear `members`; `public` records are not used."""
        _check(self)
        _require(self, "clip_norm", is_positive(self.clip_norm), "a finite number > 0")
        found, classes, declared = voters(members, self.classes)
        _, coef, intercept, _ = aligned(found, classes.tolist())
        vectors = np.concatenate([coef * self.data_norm, intercept[:, :, None]], axis=2)
        # A member that is no vector counts as zero: whatever a site sends, the sensitivity holds.
        vectors = np.where(np.isfinite(vectors).all(axis=(1, 2), keepdims=True), vectors, 0.0)
        if len(classes) > 2:
            vectors = helmert(len(classes)) @ vectors
        shape = vectors.shape[1:]
        flat = clip_rows(vectors.reshape(len(found), -1), self.clip_norm)
        plan = _AveragePlan(self, _Rows(np.zeros((0, 1)), len(classes), len(found)), flat.shape[1])

        def draw(source: Source) -> dict[str, Array]:
            mean = plan.draw_mean(flat, source).reshape(shape)
            return {"vector": helmert(len(classes)).T @ mean if len(classes) > 2 else mean}

        vector = _release(self, draw, plan.events, ledger, dataset, key)["vector"]
        own = tuple(member.guarantee for member in found)
        return DistilledEnsemble(
            classes,
            vector[:, :-1] / self.data_norm,
            vector[:, -1],
            np.full(len(found), 1 / len(found)),
            _stated(self, plan.events, declared),
            own,
            tuple(plan.events),
        )


class _AveragePlan(_Plan):
    """Noise on an average of vectors of bounded length."""

    def __init__(self, settings: Any, rows: _Rows, dimension: int) -> None:
        super().__init__(settings, rows)
        if self.private:
            moved = 2 if settings.neighbours == "replace-one" else 1
            self._calibrate(moved * settings.clip_norm / rows.n_members)
            drawn = 2 * draw_error(dimension) * public_radius(self.noise, dimension)
            self._close(dimension, (rows.n_members + 8) * 2.0**-52 * settings.clip_norm + drawn)

    def draw_mean(self, vectors: Array, source: Source) -> Array:
        """Return the noisy mean of the rows."""
        return self._closed(vectors.mean(axis=0) + self._drawn(vectors.shape[1], source), source)


class PATE:
    """Learn a linear student from noisy majority votes on a few public records (Papernot et al. 2018, GNMax).

    A comparator: it pays for every label where `SoftLabelDistillation` pays for every feature. Its cost is the one
    that holds for all votes; the cheaper, data-dependent one would have to be hidden itself.

    Parameters
    ----------
    epsilon, delta
        The budget; `delta` must be positive.
    n_queries
        How many public records, from the first on, are labelled.
    regularization
        λ of the student.
    neighbours, data_norm, fit_intercept, classes, noise
        As in `SoftLabelDistillation`.

    Privacy
    -------
    (epsilon, delta) per site, neighbours as set, against those who see the ensemble, not against the hub. Not hidden:
    the number of sites, the classes, the public records. Proof: docs/guarantees/distillation.md.
    """

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float,
        n_queries: int,
        regularization: float = 1e-3,
        neighbours: str = "replace-one",
        data_norm: float = 1.0,
        fit_intercept: bool = True,
        classes: Sequence[Any] | None = None,
        noise: Noise | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.n_queries = n_queries
        self.regularization = regularization
        self.neighbours = neighbours
        self.data_norm = data_norm
        self.fit_intercept = fit_intercept
        self.classes = classes
        self.noise = noise

    def combine(
        self,
        members: Any,
        public: Public | None = None,
        *,
        ledger: Ledger | None = None,
        dataset: str | None = None,
        key: str | None = None,
    ) -> DistilledEnsemble:
        """Return the student; `members` and `public` as in `SoftLabelDistillation.combine`."""
        _check(self)
        _require(self, "delta", is_positive(self.delta), "a number in (0, 1)")
        _require(self, "regularization", is_positive(self.regularization), "a finite number > 0")
        asked = _ask(self, members, public)
        n_queries, K = self.n_queries, len(asked.classes)
        limit = asked.public.X.shape[0]
        _require(self, "n_queries", isinstance(n_queries, int) and 1 <= n_queries <= limit, f"from 1 to {limit}")
        if not isinstance(members, Tally):
            asked = _ask(self, members, Public(asked.public.X[:n_queries]))  # the others are not asked about
        rows = _Rows(_ball(self, asked.public.X[:n_queries]), K, len(asked.own))
        unit = members.unit if isinstance(members, Tally) else K
        events: list[Event] = []
        if math.isfinite(self.epsilon):
            # All queries are one vector of counts; √n queries' worth of one vote is how far a site moves it.
            moved = unit * _shares_moved(K, self.neighbours) * math.sqrt(n_queries)
            facts: Any = {"unit": Unit.SITE, "neighbours": Neighbours(self.neighbours), "at_delta": self.delta}

            def kind(sigma: float) -> Event:
                return DiscreteGaussian(sensitivity=moved, sigma=sigma, **facts)

            events.append(kind(calibrate_scale(kind, epsilon=self.epsilon)))

        def draw(source: Source) -> dict[str, Array]:
            counts = asked.count().counts[:n_queries]
            for event in events:
                assert isinstance(event, DiscreteGaussian)
                counts = gaussian_counts(counts, event=event, source=source)
            labels = np.zeros_like(counts)
            labels[np.arange(n_queries), counts.argmax(axis=1)] = K
            S = _statistic(labels, K, rows.X) + rows.X.mean(axis=0) / K
            ridge = self.regularization * n_queries
            target = S[1] if rows.logistic else S
            coef = _minimum(rows, target, ridge, _loose_tolerance(rows, target, self.regularization))
            return {"coef": coef, "regularization": np.array(self.regularization)}

        state = _release(self, draw, events, ledger, dataset, key)
        return _ensemble(self, state, events, asked, _stated(self, events, asked.declared, OPEN_RECORDS))
