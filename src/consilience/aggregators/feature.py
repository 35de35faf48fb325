"""FeatureMethod: members as features of the aggregation data; selection among many; several levels.

A linear member turns a record x into the number f_i·x. The feature method learns, on labelled
aggregation records, how to weigh these numbers, so the result is f = Σ ω_i f_i with learned ω (Xie,
Plis & Sarwate, ICASSP 2017).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, Unpack

import numpy as np
from scipy import linalg
from sklearn.utils import check_random_state

from consilience.aggregators.average import TrustedNoise, common_settings
from consilience.aggregators.base import Array, Charge, Joining, Outlook, Table
from consilience.aggregators.labelled import Labelled, UsesLabels, is_logistic, read_labelled
from consilience.aggregators.members import DISJOINT, LinearEnsemble, Member, as_members, dense
from consilience.aggregators.mixture import Mixture, Ridge
from consilience.errors import GuaranteeVoid, PrivacyLeakWarning, RecordsWarning, SettingsError
from consilience.learners.ball import Ball, out_of_ball
from consilience.learners.base import (
    LARGEST,
    LEAST_EPSILON,
    PrivateLearner,
    is_count,
    is_delta,
    is_epsilon,
    is_positive,
)
from consilience.learners.erm import Logistic, Problem, PublicFacts, gradient_error, solve
from consilience.learners.linear import PrivateLogisticRegression, PrivateRidge
from consilience.learners.perturbation import (
    TOLERANCE,
    LinearTask,
    output_sensitivity,
    plan_linear,
    plan_perturbation,
)
from consilience.privacy.accounting import Event, Selection
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit, compose_disjoint
from consilience.privacy.mechanisms import (
    Noise,
    Source,
    clip_rows,
    draw_error,
)
from consilience.privacy.mechanisms import select as draw_one
from consilience.privacy.spending import Account, state_guarantee
from consilience.privacy.vector_noise import (
    calibrate_vector,
    close_vector,
    closing_event,
    draw_vector,
    public_radius,
)
from consilience.tables.public import Public
from consilience.tables.schema import Schema

STRENGTHS = (math.inf, *10.0 ** np.arange(2.0, -4.1, -0.5))
PRIVATE_REGULARIZATION = 1e-2  # nothing about private aggregation records may choose it
MOST_BAGS = 1000  # a study decides how long the hub of others works for it
GRAIN = 1 << 20  # a regressor's error is rounded to it: scores stay integers, whose sums are exact

AGGREGATOR_ONLY = (
    "Noise at the aggregator was asked for over exact members (the thesis' second scenario). It "
    "protects the aggregation records and not the sites: the result is a combination of the "
    "sites' exact models, so with fewer sites than features it lies in their span, and a changed "
    "record of a site changes the span. Nothing was combined or charged. Train the members with "
    "an epsilon of their own, or ask for mechanism='output', which calibrates noise to both."
)


@dataclass(frozen=True)
class FeatureEnsemble(LinearEnsemble):
    """A linear ensemble Σ weights_i f_i whose aggregation records have a guarantee of their own.

    ``aggregation_guarantee`` is theirs; None says that they were public and nothing is promised to
    them.
    """

    aggregation_guarantee: Guarantee | None = None


@dataclass(eq=False, kw_only=True)
class FeatureMethod(UsesLabels):
    """Learn on labelled aggregation records how to weigh the members' scores.

    Parameters
    ----------
    regularization
        ``"auto"`` mixes strengths in proportion to their cross-validated likelihood on public
        records (with `epsilon`, where nothing may be tried out: 0.01). A number is Λ of
        ``mean(loss) + Λ/2 ‖ω - centre‖²``.
    toward
        The centre: the members' ``"precision"`` average, scaled to fit, or ``"zero"``.
    scaling
        ``"public"`` divides each member's scores by their size on the public records (with
        `epsilon`: by the member's length), so that one Λ suits any amount of noise; ``"none"``
        leaves them.
    epsilon, delta
        None: the aggregation records are public. A number: they are private too, and hidden at this
        cost.
    mechanism
        With `epsilon`: ``"objective"`` for members that brought their own noise; ``"output"`` adds
        noise once, for sites and aggregation records alike, to exact members at a trusted
        aggregator (two classes only; the noise is large).
    max_members
        Use at most so many members, chosen by orthogonal matching pursuit on public records. On
        private ones one after the other, each drawn by how many records the chosen get right
        together with it, at a cost.
    selection_share
        With `epsilon` and `max_members`: the share of `epsilon` that pays for choosing. 0 chooses
        for independence alone, by column-pivoted QR of the released models, which costs nothing.
    n_bags
        Average the weights over so many bootstrap samples of the public records, up to 1,000; 0 for
        none.
    data_norm, label_bound
        With `epsilon`: declared bounds on a private aggregation record's norm and, for regressors,
        label.
    classes, huber, random_state
        As `PublicBlend`.
    noise
        ``Noise(seed=...)`` for tests and experiments; voids the guarantee.

    The papers' own version: ``FeatureMethod(regularization=1e-2, toward="zero", scaling="none")``.

    Privacy
    -------
    Public aggregation records: each site's own guarantee, against everyone; nothing for the
    aggregation records. With `epsilon`: in addition (epsilon, delta) per aggregation record,
    replace-one, in ``aggregation_guarantee``; with ``mechanism="output"`` the same for each site's
    units, against those who see the ensemble, not against the aggregator. Not hidden: the number of
    aggregation records. Proof: docs/guarantees/feature.md.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.sin(np.arange(1200.0)).reshape(400, 3) / 2
    >>> y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
    >>> members = [
    ...     cs.PrivateLogisticRegression(epsilon=5.0, classes=[0, 1]).fit(X[part::4], y[part::4])
    ...     for part in (0, 1, 2)
    ... ]
    >>> ensemble = cs.FeatureMethod().combine(members, public=cs.Public(X[3::4], y[3::4]))
    >>> ensemble.predict(X[:5]).shape
    (5,)
    """

    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {"feature": {}}

    weighing = (
        "Weights are learned on public records, or by a site that the study names on its own: a "
        "member gets what its predictions add to the others', which can be nothing, or less than "
        "nothing."
    )

    regularization: float | str = "auto"
    toward: str = "precision"
    scaling: str = "public"
    epsilon: float | None = None
    delta: float = 0.0
    mechanism: str = "objective"
    max_members: int | None = None
    selection_share: float = 0.25
    n_bags: int = 0
    data_norm: float = 1.0
    label_bound: float = 1.0
    noise: Noise | None = None

    @property
    def needs_exact_members(self) -> bool:
        """Whether the noise covers the sites too, so that their own models must have none."""
        return self.draws_noise and self.mechanism == "output"

    def with_budget(self, epsilons: Sequence[float]) -> Self:
        """Return a copy with the smallest epsilon, if it draws noise; exact if that is infinite."""
        made = super().with_budget(epsilons)
        if self.draws_noise and math.isinf(min(epsilons)):
            made.epsilon, made.delta = None, 0.0
        return made

    @classmethod
    def planned(
        cls, learner: PrivateLearner[Any, Any], epsilons: Sequence[float], *, public: bool
    ) -> dict[str, Self]:
        """Return the method on public records and on private ones."""
        if not (public and is_logistic(learner)):
            return {}
        private = cls(epsilon=min(epsilons), delta=learner.delta)
        return {"feature method": cls(), "feature, private records": private}

    def is_predictable(self, learner: PrivateLearner[Any, Any], *, public: bool) -> bool:
        """Tell whether the loss is logistic, all members are used and have noise of their own."""
        own_noise = self.epsilon is None or self.mechanism != "output"
        return public and is_logistic(learner) and self.max_members is None and own_noise

    def expected(self, joining: Joining) -> Outlook:
        """Return the law of weights learned on the public records."""
        return joining.feature(self)

    def combine(
        self, members: Sequence[Any], public: Public | None = None, **charge: Unpack[Charge]
    ) -> FeatureEnsemble:
        """Return the combination of linear `members` that best fits the labelled `public` records.

        With `epsilon` these records are treated as private, whatever they are passed in, and
        `dataset` is charged before noise is drawn.
        """
        self.check_settings()
        task = read_labelled(self, members, public, weigh_by_public=self.epsilon is None)
        if self.epsilon is None:
            kept = (
                np.arange(len(task.members))
                if self.max_members is None
                else select(task, self.max_members)
            )
            return self._on_public(task, kept)
        exact = [member.is_exact for member in task.members]
        account = Account(**charge)
        if self.mechanism == "output":
            return self._at_trusted_aggregator(task, all(exact), account)
        if any(exact):
            raise GuaranteeVoid(AGGREGATOR_ONLY)
        return self._on_private(task, account)

    def _on_public(self, task: Labelled, kept: Array) -> FeatureEnsemble:
        features = _Features.on_public(task, kept, scaled=self.scaling == "public")
        ridge = Ridge(features.records, task.y, task.loss)
        # θ = stretch·ω'', so a strength Λ in the features' own scale is Λ/stretch² in the ball's.
        strengths = STRENGTHS if self.regularization == "auto" else (float(self.regularization),)
        candidates = [
            (self.toward == "precision", strength / features.stretch**2) for strength in strengths
        ]
        centre = features.enter(task.mass)
        if len(candidates) == 1:
            mixture = Mixture(ridge, centre, tuple(candidates), np.ones(1))
        else:
            if self.toward == "zero":
                candidates = candidates[1:]  # infinitely strong around zero is no classifier
            mixture = Mixture.by_cross_validation(ridge, centre, candidates, self.random_state)
        if self.n_bags == 0:
            return features.ensemble(task, mixture.fit())
        generator, m = check_random_state(self.random_state), len(task.y)
        bags = [mixture.fit(generator.randint(m, size=m)) for _ in range(self.n_bags)]
        return features.ensemble(task, np.mean(bags, axis=0))

    def _on_private(self, task: Labelled, account: Account) -> FeatureEnsemble:
        epsilon, relation = float(self.epsilon or 0.0), Neighbours.REPLACE_ONE
        joint = task.ensemble(*task.average, task.shares).guarantee
        if joint is not None:
            # What cannot be stated together must be refused before anything is charged.
            planned = Guarantee(
                epsilon=epsilon, delta=self.delta, unit=Unit.RECORD, neighbours=relation
            )
            compose_disjoint(joint, planned, assumption=DISJOINT)
        self._check_moderate(task)
        kept, choice = np.arange(len(task.members)), None
        if self.max_members is not None and self.max_members < len(kept):
            if self.selection_share > 0:
                choice = Choice.planned(task, self)
            # Of the size that is planned for; a choice replaces it.
            kept = independent(task, self.max_members)
        chosen = [] if choice is None else choice.events
        left = epsilon - math.fsum(event.epsilon for event in chosen)
        learner = self._learner(task.classes, left, self.delta)
        n, dimension = len(task.y), len(kept) * task.n_outputs
        one = LinearTask(learner.loss(max(2, task.n_outputs)), dimension, n, n)
        training = tuple(plan_linear(learner, one).events)
        events = [*chosen, *training]

        def draw(source: Source) -> dict[str, Array]:
            final = kept if choice is None else choice.draw(source)
            records = _Features.on_private(
                task, final, self.data_norm, scaled=self.scaling == "public"
            ).records
            learner.set_params(noise=Noise(seed=int(source.words(1)[0])) if source.seeded else None)
            with warnings.catch_warnings():
                # They depend on the records, and this may be a hub, whose log others read.
                for kind in (PrivacyLeakWarning, RecordsWarning):
                    warnings.simplefilter("ignore", kind)
                learner.fit(records, task.labels)  # charged already, with the choice
            # A plan knows sizes only, whichever members were chosen.
            assert learner.events_ == training
            return {"kept": final, "theta": np.asarray(learner.coef_)}

        state = self._run(
            draw, events, account, lambda: [member.fingerprint() for member in task.members]
        )
        features = _Features.on_private(
            task, state["kept"], self.data_norm, scaled=self.scaling == "public"
        )
        own = state_guarantee(
            events, noise=self.noise, unit=Unit.RECORD, neighbours=Neighbours.REPLACE_ONE
        )
        return features.ensemble(task, state["theta"], own)

    def _check_moderate(self, task: Labelled) -> None:
        # Larger ones can make no number of a record: of it a choice would make the most negative
        # count, and training would fail after the charge.
        largest = np.maximum(np.abs(task.coef).max(), np.abs(task.intercept).max())
        if not float(largest) * max(1.0, self.data_norm) <= LARGEST:
            raise SettingsError(
                "A member's coefficients, times the data_norm, are not all numbers within "
                f"±{LARGEST:g}. Nothing was combined or charged. Leave it out."
            )

    def at_site(self, schema: Schema) -> Self:
        """Return a copy that weighs members at a site whose own records are private."""
        automatic = self.max_members is None and self.n_bags == 0 and self.epsilon is None
        if not automatic or self.mechanism != "objective" or schema.person is not None:
            raise SettingsError(
                "FeatureMethod at a site takes no epsilon of its own (the site chooses it), no "
                "max_members, no n_bags, mechanism='objective', and a schema without persons. "
                "Nothing was done. Leave them out."
            )
        bound = {} if schema.label_bound is None else {"label_bound": schema.label_bound}
        return self._with(data_norm=schema.norm, **bound)

    def weigher(self, epsilon: float, delta: float) -> PrivateLearner[Any, Any]:
        """Return what learns the members' weights at a site, from `weighed_rows`.

        Privacy
        -------
        A fit costs (epsilon, delta) per record of the site; the rows are functions of released
        members and of one record each. Proof: docs/guarantees/feature.md.
        """
        classes = None if self.classes is None else np.asarray(self.classes)
        made: PrivateLearner[Any, Any] = self._learner(classes, epsilon, delta)
        return made

    def weighed_rows(self, members: Sequence[Any], X: Table) -> Array:
        """Return what the members say of each record, scaled by public facts."""
        return self._weighed(members, X)[1].records

    def combine_weighed(
        self, members: Sequence[Any], weigher: PrivateLearner[Any, Any]
    ) -> FeatureEnsemble:
        """Return the ensemble of `members` with the weights that a fitted `weigher` learned."""
        # No record is here: rows of zeros stand for them, and scale nothing.
        task, features = self._weighed(members, np.zeros((2, weigher_width(members))))
        return features.ensemble(task, np.asarray(vars(weigher)["coef_"]), weigher.guarantee_)

    def _weighed(self, members: Sequence[Any], X: Table) -> tuple[Labelled, _Features]:
        labels = np.zeros(len(dense(X)))
        if self.classes is not None:
            labels = np.asarray(self.classes)[labels.astype(int)]
        task = read_labelled(self, members, Public(X, labels), weigh_by_public=False)
        if any(member.is_exact for member in task.members):
            raise GuaranteeVoid(AGGREGATOR_ONLY)
        self._check_moderate(task)
        kept = np.arange(len(task.members))
        scaled = self.scaling == "public"
        return task, _Features.on_private(task, kept, self.data_norm, scaled=scaled)

    def _learner(self, classes: Array | None, epsilon: float, delta: float) -> Any:
        settings: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": delta,
            "mechanism": "objective",
            "regularization": PRIVATE_REGULARIZATION
            if self.regularization == "auto"
            else self.regularization,
            "fit_intercept": False,
        }
        if classes is None:
            huber = 1.0 if self.huber is None else self.huber / self.label_bound
            return PrivateRidge(label_bound=self.label_bound, huber=huber, **settings)
        return PrivateLogisticRegression(classes=classes, **settings)

    def _at_trusted_aggregator(
        self, task: Labelled, exact: bool, account: Account
    ) -> FeatureEnsemble:
        plan = TrustedAggregator(self, task, exact)
        state = self._run(
            plan.draw, plan.events, account, lambda: [one.fingerprint() for one in task.members]
        )
        whole, each, own = plan.guarantees()
        return FeatureEnsemble(
            task.classes, state["coef"], state["intercept"], state["weights"], whole, each, own
        )

    def check_settings(self) -> None:
        """Refuse settings that cannot work."""
        super().check_settings()
        need, most, share, delta = self._require, self.max_members, self.selection_share, self.delta
        automatic = isinstance(self.regularization, str) and self.regularization == "auto"
        fits = automatic or is_positive(self.regularization)
        need("regularization", fits, "'auto' or a number > 0")
        need("toward", self.toward in ("precision", "zero"), "'precision' or 'zero'")
        need("scaling", self.scaling in ("public", "none"), "'public' or 'none'")
        need("mechanism", self.mechanism in ("objective", "output"), "'objective' or 'output'")
        need("max_members", most is None or is_count(most), "None or an integer >= 1")
        fits = isinstance(share, int | float) and 0 <= share < 1
        need("selection_share", fits, "a number in [0, 1)")
        fits = self.n_bags == 0 or is_count(self.n_bags, MOST_BAGS)
        need("n_bags", fits, f"an integer from 0 to {MOST_BAGS:,}")
        need("noise", self.noise is None or isinstance(self.noise, Noise), "None or a Noise value")
        bounded = ("data_norm", "label_bound", *(() if automatic else ("regularization",)))
        self._require_moderate(*bounded)
        if self.epsilon is None:
            must = "0 where the aggregation records are public (no epsilon)"
            need("delta", delta == 0, must)
            return
        need("epsilon", is_epsilon(self.epsilon), f"None or a finite number >= {LEAST_EPSILON:g}")
        need("delta", is_delta(delta), "a number in [0, 1)")
        must = "0 with epsilon: every bag would be one more use of the private records"
        need("n_bags", self.n_bags == 0, must)
        fits = most is None or self.mechanism == "objective"
        must = "None with mechanism='output', whose noise is for all members"
        need("max_members", fits, must)


def _rows_in_ball(X: Any, ball: Ball) -> Array:
    """Return (x / norm, s) / √(1 + s²) or x / norm, dense, of records cut to their norm."""
    rows = dense(clip_rows(X, ball.data_norm) * (1 / ball.data_norm)) * ball.row_factor
    constant = np.full((len(rows), 1), ball.constant)
    return np.hstack([rows, constant]) if ball.fit_intercept else rows


@dataclass(frozen=True)
class _Features:
    """The kept members' scores as records of norm <= 1, and the way back to coefficients."""

    records: Array  # (m, n·K)
    kept: Array
    sizes: Array  # (n·K,): what each feature was divided by
    stretch: float  # what all were divided by then
    outputs: int

    @classmethod
    def on_public(cls, task: Labelled, kept: Array, *, scaled: bool) -> _Features:
        """Scale by the public records: features to mean square 1, then all into the ball."""
        scores = task.margins()[kept].reshape(len(kept) * task.n_outputs, -1).T
        sizes = np.sqrt(np.mean(scores**2, axis=0)) if scaled else np.ones(scores.shape[1])
        sizes = np.where(sizes > 0, sizes, 1.0)
        scores = scores / sizes
        stretch = (float(np.linalg.norm(scores, axis=1).max()) or 1.0) * (1 + 1e-12)
        return cls(scores / stretch, kept, sizes, stretch, task.n_outputs)

    @classmethod
    def on_private(
        cls, task: Labelled, kept: Array, data_norm: float, *, scaled: bool
    ) -> _Features:
        """Scale by released models and declared bounds alone: ‖M x‖ <= ‖M‖_op ‖x‖."""
        M = task.coef[kept].reshape(-1, task.coef.shape[2]) * data_norm
        ball = Ball(data_norm, task.with_intercept)
        X = _rows_in_ball(task.X, ball)
        if task.with_intercept:  # M holds what the rows' constant is multiplied by
            M = np.hstack([M, task.intercept[kept].reshape(-1, 1)])
        # What is shorter than this is nothing: weights that make up for it would overflow.
        least = 1 / LARGEST
        lengths = np.linalg.norm(M, axis=1) if scaled else np.ones(len(M))
        lengths = np.where(lengths > least, lengths, 1.0)
        M = M / lengths[:, None]
        stretch = max(float(np.linalg.norm(M, 2)) * (1 + 1e-12), least)
        return cls(X @ M.T / stretch, kept, lengths / ball.row_factor, stretch, task.n_outputs)

    def enter(self, mass: Array) -> Array:
        """Return weights of `records`' columns that give each output its shares of `mass`."""
        theta = np.zeros((self.outputs, len(self.kept), self.outputs))
        output = np.arange(self.outputs)
        kept = mass[self.kept]
        total_mass = kept.sum(axis=0)
        theta[output, :, output] = (kept / np.where(total_mass > 0, total_mass, 1.0)).T
        theta = theta.reshape(self.outputs, -1) * (self.sizes * self.stretch)
        return theta[0] if self.outputs == 1 else theta

    def ensemble(
        self, task: Labelled, theta: Array, aggregation: Guarantee | None = None
    ) -> FeatureEnsemble:
        """Return Σ ω f over the kept members; a member's weight is the mean of its classes' own."""
        shape = (self.outputs, len(self.kept), self.outputs)
        omega = (np.atleast_2d(theta) / (self.sizes * self.stretch)).reshape(shape)
        coef = np.einsum("anb,nbd->ad", omega, task.coef[self.kept])
        intercept = np.einsum("anb,nb->a", omega, task.intercept[self.kept])
        weights = np.zeros(len(task.members))
        weights[self.kept] = np.einsum("ana->n", omega) / self.outputs
        plain = task.ensemble(coef, intercept, weights)
        joint = plain.guarantee
        if joint is not None and aggregation is not None:
            joint = compose_disjoint(joint, aggregation, assumption=DISJOINT)
        return FeatureEnsemble(
            plain.classes, coef, intercept, weights, joint, plain.guarantees, aggregation
        )


def select(task: Labelled, most: int) -> Array:
    """Return at most `most` members, picked by orthogonal matching pursuit on public records.

    Scores divided by their size on the public records are the members whitened by the public second
    moment. Each step takes the member whose scores explain most of what is left of the labels.
    """
    scores = task.margins()
    left = _centred_labels(task)
    chosen: list[int] = []
    basis = np.zeros((len(left), 0))
    while len(chosen) < min(most, len(scores)):
        gains = np.full(len(scores), -1.0)
        for i, columns in enumerate(scores):
            if i not in chosen:
                fresh = columns.T - basis @ (basis.T @ columns.T)
                gains[i] = float(np.square(_orthonormal(fresh).T @ left).sum())
        best = int(np.argmax(gains))
        chosen.append(best)
        basis = np.hstack(
            [basis, _orthonormal(scores[best].T - basis @ (basis.T @ scores[best].T))]
        )
        left = left - basis @ (basis.T @ left)
    return np.sort(chosen)


def independent(task: Labelled, most: int) -> Array:
    """Return `most` precise and independent members, by pivoted QR of the models alone."""
    rows = task.coef.reshape(len(task.members), -1)
    rows = (
        rows
        / np.where(np.linalg.norm(rows, axis=1) > 0, np.linalg.norm(rows, axis=1), 1.0)[:, None]
    )
    _, _, order = linalg.qr(
        (rows * np.sqrt(task.shares)[:, None]).T, mode="economic", pivoting=True
    )
    return np.sort(order[: min(most, len(rows))])


@dataclass(frozen=True)
class Choice:
    """Members chosen one by one by the exponential mechanism on private aggregation records."""

    scores: Array  # (m, N, 1 or K): each member's, times its weight
    weights: Array  # (N,), by precision where it is known
    labels: Array  # codes, or numbers in [-1, 1]
    regression: bool
    event: Selection
    n_chosen: int

    @classmethod
    def planned(cls, task: Labelled, method: FeatureMethod) -> Choice:
        """Divide the budget for choosing among the rounds; one record moves a count by one."""
        n_chosen, regression = int(method.max_members or 0), task.classes is None
        reach = float(GRAIN if regression else 1)
        event = Selection(
            unit=Unit.RECORD,
            neighbours=Neighbours.REPLACE_ONE,
            sensitivity=reach,
            scale=2 * reach * n_chosen / (method.selection_share * float(method.epsilon or 0.0)),
            monotone="no",
        )
        X = dense(clip_rows(task.X, method.data_norm))
        shape = (len(X), len(task.members), task.n_outputs)
        scores = (X @ task.coef.reshape(-1, X.shape[1]).T).reshape(shape) + task.intercept
        scores *= task.shares[:, None]
        if regression:
            labels = np.clip(
                np.asarray(task.labels, dtype=np.float64) / method.label_bound, -1.0, 1.0
            )
            return cls(scores / method.label_bound, task.shares, labels, True, event, n_chosen)
        codes = (task.y > 0).astype(np.int64) if task.n_outputs == 1 else task.y
        return cls(scores, task.shares, codes, False, event, n_chosen)

    @property
    def events(self) -> list[Event]:
        """One selection for each round."""
        return [self.event] * self.n_chosen

    def counts(self, chosen: Sequence[int], candidates: Sequence[int]) -> Array:
        """Count the records that the chosen members get right together with each candidate.

        A record adds 0 or 1 to each, by itself; for regressors a part of `GRAIN` that falls with
        the error.
        """
        base, mass = np.zeros((self.scores.shape[0], self.scores.shape[2])), 0.0
        for i in chosen:
            base, mass = base + self.scores[:, i], mass + self.weights[i]
        counts = []
        for i in candidates:
            z = base + self.scores[:, i]
            if self.regression:
                guess = np.clip(z[:, 0] / max(mass + self.weights[i], 1e-300), -1.0, 1.0)
                right = GRAIN - np.rint(np.abs(guess - self.labels) * (GRAIN / 2)).astype(np.int64)
            else:
                said = (z[:, 0] > 0).astype(np.int64) if z.shape[1] == 1 else z.argmax(axis=1)
                right = (said == self.labels).astype(np.int64)
            counts.append(int(right.sum()))
        return np.asarray(counts, dtype=np.int64)

    def draw(self, source: Source) -> Array:
        """Return the members drawn, in the order of their numbers.

        Probabilities are ∝ weight · exp(count / scale): what is public anyway, the precision,
        counts first. As a whole number that is added to a count it moves no count.
        """
        prior = np.rint(
            np.maximum(self.event.scale * np.log(np.maximum(self.weights, 1e-300)), -(2.0**50))
        )
        chosen: list[int] = []
        while len(chosen) < self.n_chosen:
            left = [i for i in range(len(self.weights)) if i not in chosen]
            scores = self.counts(chosen, left) + prior[left]
            chosen.append(left[draw_one(scores, event=self.event, source=source)])
        return np.sort(chosen)


def _centred_labels(task: Labelled) -> Array:
    if task.n_outputs == 1:
        return np.asarray(task.y - task.y.mean())[:, None]
    ones = np.eye(task.n_outputs)[task.y]
    return np.asarray(ones - ones.mean(axis=0))


def _orthonormal(columns: Array) -> Array:
    """Return an orthonormal basis of what is more than rounding in `columns`."""
    left, values, _ = np.linalg.svd(columns, full_matrices=False)
    return np.asarray(left[:, values > 1e-9 * max(float(values.max(initial=0.0)), 1e-300)])


@dataclass(frozen=True)
class Branch(Member):
    """An ensemble as a member of another aggregator: one node of a tree of aggregators."""

    scale_to_user: float = 1.0
    variance: float = 0.0

    @property
    def to_user(self) -> float:
        """As its members'."""
        return self.scale_to_user

    def noise_variance(self, curvature: float = 0.0) -> float:
        """Return what is left of its members' noise."""
        return self.variance


def branch(
    ensemble: LinearEnsemble, members: Sequence[Member], *, curvature: float = 0.02
) -> Branch:
    """Return the `ensemble` of `members` as a member: sizes add up, noise averages out.

    Privacy
    -------
    Post-processing: the branch carries the ensemble's guarantee, that of a record at any site below
    it.
    """
    if len(members) != len(ensemble.weights):
        raise SettingsError(
            f"A branch was to be made of {len(members)} members, and its ensemble has "
            f"{len(ensemble.weights)}. Nothing was combined. Pass the members that the ensemble "
            "was made of."
        )
    sizes = [member.size for member in members]
    known = all(size is not None for size in sizes)
    shares = np.abs(ensemble.weights) / (np.abs(ensemble.weights).sum() or 1.0)
    return Branch(
        learner=ensemble,
        classes=ensemble.classes,
        guarantee=ensemble.guarantee,
        events=(),
        size=sum(size or 0 for size in sizes) if known else None,
        coef=ensemble.coef,
        intercept=ensemble.intercept,
        scale_to_user=members[0].to_user if known else 1.0,
        variance=float(
            sum(w * w * m.noise_variance(curvature) for w, m in zip(shares, members, strict=True))
        )
        if known
        else 0.0,
    )


def weigher_width(members: Sequence[Any]) -> int:
    """Return how many features the members have."""
    (first, *_) = as_members(members)
    return int(np.asarray(first.coef).shape[1])


class TrustedAggregator(TrustedNoise):
    """Output perturbation over exact members: noise that hides sites and aggregation records.

    All in the coordinates of the unit ball. Members are at most `longest` long, so x'' = M
    x/(√N·longest) is in the unit ball of R^N; ω minimises mean(ℓ(y ω·x'')) + Λ/2‖ω‖², and f =
    Mᵀω/(√N·longest) is released with noise.
    """

    def __init__(self, method: FeatureMethod, task: Labelled, exact: bool) -> None:
        learners = [member.learner for member in task.members]
        shared = common_settings(task.members) if exact else None
        two_classes = task.classes is not None and task.n_outputs == 1
        if shared is None or shared[1:] != ("record", "replace-one") or not two_classes:
            raise SettingsError(
                "mechanism='output' is for exact two-class members (epsilon=math.inf) of this "
                "package with one data_norm and intercept setting, unit='record' and "
                "neighbours='replace-one'. Nothing was combined or charged. Leave out "
                "FeatureMethod's mechanism if members brought noise."
            )
        self.task, self.epsilon, self.noise = task, float(method.epsilon or 0.0), method.noise
        self.ball = shared[0]
        self.strength = (
            PRIVATE_REGULARIZATION
            if method.regularization == "auto"
            else float(method.regularization)
        )
        self.ridge = self.strength * len(task.y)
        features = task.coef.shape[2] + self.ball.fit_intercept
        reaches, slack, lengths = [], [], []
        for member in task.members:
            loss, size = member.learner.loss(2), int(member.size or 1)
            one = LinearTask(loss, features, size, size)
            plan = plan_perturbation(member.learner, one)
            reaches.append(output_sensitivity(member.learner, one))
            slack.append(plan.inexactness)
            strength = member.learner.strength(size, features)
            lengths.append(min(math.sqrt(2 * loss.at_zero / strength), loss.lipschitz / strength))
        self.longest, self.stretch = max(lengths), math.sqrt(len(learners)) * max(lengths)
        gain = site_gain(self.strength) / self.stretch
        self.site_reach = gain * np.asarray(reaches)
        self.record_reach = record_reach(self.strength, len(task.y))
        reach = max(float(self.site_reach.max()), self.record_reach)
        who: dict[str, Any] = {"unit": Unit.RECORD, "neighbours": Neighbours.REPLACE_ONE}
        self.event = calibrate_vector(reach, epsilon=self.epsilon, delta=method.delta, **who)
        self.features = features
        rounding = gradient_error(
            PublicFacts(
                Logistic(),
                n_records=len(task.y),
                n_features=len(learners),
                regularization=self.ridge,
            )
        )
        self.tolerance = max(TOLERANCE * self.ridge, 8 * rounding)
        # Inexact members move f like changed ones; inexact ω by tolerance/ridge; features and sums
        # are rounded.
        rounded = 4 * (features + len(learners) + 8) * 2.0**-52 * site_gain(self.strength)
        distance = gain * math.fsum(slack) + 1.25 * self.tolerance / self.ridge + rounded
        distance += 2 * draw_error(features) * public_radius(self.event, features)
        self.closing = closing_event(features, distance, epsilon=self.epsilon, **who)

    def members_in_ball(self) -> Array:
        """Return the members as rows of the ball's coordinates, at most `longest` long."""
        rows = self.task.coef[:, 0] * (self.ball.data_norm / self.ball.row_factor)
        if self.ball.fit_intercept:
            rows = np.hstack([rows, self.task.intercept / self.ball.constant])
        return np.asarray(clip_rows(rows, self.longest))

    def records_in_ball(self) -> Array:
        """Return the aggregation records clipped, scaled and with the constant, of norm <= 1."""
        X = _rows_in_ball(self.task.X, self.ball)
        return np.asarray(clip_rows(X, 1.0))

    def exact(self) -> tuple[Array, Array]:
        """Return ω of the rescaled features and f, before any noise."""
        M = self.members_in_ball() / self.stretch
        Z = clip_rows(self.records_in_ball() @ M.T, 1.0)
        found = solve(
            Z,
            self.task.y,
            Problem(Logistic(), regularization=self.ridge),
            tolerance=self.tolerance,
        )
        omega = np.asarray(found.coef, dtype=np.float64)
        return omega, np.asarray(M.T @ omega)

    def draw(self, source: Source) -> dict[str, Array]:
        """Add the noise and go back to the user's coordinates; ω itself is not released."""
        _, f = self.exact()
        f = close_vector(
            f + draw_vector(self.features, event=self.event, source=source),
            event=self.closing,
            source=source,
        )
        n = len(self.task.members)
        weights = np.full(n, 1 / n)  # nominal: the true ones are not covered by the noise
        coef, intercept = out_of_ball(f, self.ball)
        return {"coef": coef, "intercept": intercept, "weights": weights}

    def guarantees(self) -> tuple[Guarantee, tuple[Guarantee, ...], Guarantee]:
        """Return the joint guarantee, each site's, and the aggregation records'."""
        sites = tuple(self.stated(float(reach)) for reach in self.site_reach)
        return self.stated(self.event.sensitivity), sites, self.stated(self.record_reach)


def site_gain(strength: float) -> float:
    """Return how far f moves at most, in units of √N·longest, if one member moves by 1.

    Proof: docs/guarantees/feature.md.
    """
    loss = Logistic()
    longest = min(math.sqrt(2 * loss.at_zero / strength), loss.lipschitz / strength)
    return longest + (loss.lipschitz + loss.curvature * longest) / strength


def record_reach(strength: float, n_records: int) -> float:
    """Return how far f moves at most when one aggregation record is replaced."""
    return 2 * Logistic().lipschitz / (strength * n_records)
