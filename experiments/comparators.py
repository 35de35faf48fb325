"""Comparators: methods that hide a whole site and that no paper's system has.

They work wherever an aggregator of the library does, through the same capabilities, but are not
part of the library. Proofs: docs/guarantees/distillation.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import helmert

from consilience.aggregators.distillation.noise import (
    Plan,
    Rows,
    loose_tolerance,
    minimum,
    shares_moved,
    statistic,
)
from consilience.aggregators.distillation.site_level import (
    OPEN_RECORDS,
    DistilledEnsemble,
    HidesSites,
)
from consilience.aggregators.distillation.tally import Question, Tally, voters
from consilience.aggregators.members import align_members
from consilience.learners.base import is_positive
from consilience.learners.linear import out_of_ball
from consilience.privacy.accounting import DiscreteGaussian
from consilience.privacy.guarantee import Neighbours, Unit
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import (
    Noise,
    Source,
    clip_rows,
    draw_error,
    gaussian_counts,
)
from consilience.privacy.spending import Account
from consilience.privacy.vector_noise import calibrate_event, public_radius
from consilience.tables.public import Public

Array = NDArray[Any]


class ClippedAverage(HidesSites):
    """Average linear members, each cut to a public length; hides any one site.

    Pathak et al. 2010 average too, but their noise hides one record: it must not be compared with
    the others here.

    Parameters
    ----------
    epsilon, delta
        The budget; ``delta=0`` is pure, ``epsilon=math.inf`` exact, which promises nothing.
    clip_norm
        Public bound on a member's coefficients and intercept together, contrasts between classes
        only.
    neighbours
        ``"replace-one"``: a site's model becomes any other. ``"null-one"``: it becomes zero; half
        the noise.
    data_norm
        The sites' declared norm of a record: coefficients are measured in its units.

    Privacy
    -------
    (epsilon, delta) per site, against those who see the ensemble, not against the hub. Not hidden:
    the number of sites and the classes. Proof: docs/guarantees/distillation.md.
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
        members: Sequence[Any],
        public: Public | None = None,
        *,
        ledger: Ledger | None = None,
        dataset: str | None = None,
        key: str | None = None,
    ) -> DistilledEnsemble:
        """Return the noisy average of linear `members`; `public` records are not used."""
        self.check_settings()
        self._require("clip_norm", is_positive(self.clip_norm), "a finite number > 0")
        found, classes, declared = voters(members, self.classes)
        _, coef, intercept, _ = align_members(found, classes.tolist())
        with np.errstate(over="ignore", invalid="ignore"):
            vectors = np.concatenate([coef * self.data_norm, intercept[:, :, None]], axis=2)
            if len(classes) > 2:
                vectors = helmert(len(classes)) @ vectors
        # A member that is no vector counts as zero: whatever a site sends, the sensitivity holds.
        vectors = np.where(np.isfinite(vectors).all(axis=(1, 2), keepdims=True), vectors, 0.0)
        shape = vectors.shape[1:]
        flat = clip_rows(vectors.reshape(len(found), -1), self.clip_norm)
        plan = AveragePlan(self, Rows(np.zeros((0, 1)), len(classes), len(found)), flat.shape[1])

        def draw(source: Source) -> dict[str, Array]:
            mean = plan.draw_mean(flat, source).reshape(shape)
            return {"vector": helmert(len(classes)).T @ mean if len(classes) > 2 else mean}

        account = Account(ledger, dataset, key)
        known = [member.fingerprint() for member in found]
        vector = self._run(draw, plan.events, account, lambda: known)["vector"]
        return DistilledEnsemble(
            classes,
            vector[:, :-1] / self.data_norm,
            vector[:, -1],
            np.full(len(found), 1 / len(found)),
            self._guarantee(plan.events, declared),
            tuple(member.guarantee for member in found),
            tuple(plan.events),
        )


class AveragePlan(Plan):
    """Noise on an average of vectors of bounded length."""

    def __init__(self, settings: ClippedAverage, rows: Rows, dimension: int) -> None:
        super().__init__(settings, rows)
        if self.private:
            moved = 2 if settings.neighbours == "replace-one" else 1
            self._calibrate(moved * settings.clip_norm / rows.n_members)
            drawn = 2 * draw_error(dimension) * public_radius(self.noise, dimension)
            self._close(dimension, (rows.n_members + 8) * 2.0**-52 * settings.clip_norm + drawn)

    def draw_mean(self, vectors: Array, source: Source) -> Array:
        """Return the noisy mean of the rows."""
        return self._closed(vectors.mean(axis=0) + self._drawn(vectors.shape[1], source), source)


class PATE(HidesSites):
    """Learn a linear student from noisy majority votes on a few public records.

    GNMax of Papernot et al. (2018).

    A comparator: it pays for every label where `SoftLabelDistillation` pays for every feature. Its
    cost is the one that holds for all votes; the cheaper, data-dependent one would have to be
    hidden itself.

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
    (epsilon, delta) per site, neighbours as set, against those who see the ensemble, not against
    the hub. Not hidden: the number of sites, the classes, the public records. Proof:
    docs/guarantees/distillation.md.
    """

    needs_public = asks_votes = True

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

    def question(self, public: Public) -> Question:
        """Ask about the first `n_queries` records."""
        return self._ask_about(min(self.n_queries, public.X.shape[0]))

    def combine(
        self,
        members: Sequence[Any] | Tally,
        public: Public | None = None,
        *,
        ledger: Ledger | None = None,
        dataset: str | None = None,
        key: str | None = None,
    ) -> DistilledEnsemble:
        """Return the student; `members` and `public` as in `SoftLabelDistillation.combine`."""
        self.check_settings()
        self._require("delta", is_positive(self.delta), "a number in (0, 1)")
        fits = is_positive(self.regularization)
        self._require("regularization", fits, "a finite number > 0")
        tally = self._tally(members, public)
        n_queries, limit = self.n_queries, tally.public.X.shape[0]
        fits = isinstance(n_queries, int) and 1 <= n_queries <= limit
        self._require("n_queries", fits, f"from 1 to {limit}")
        if not isinstance(members, Tally):  # members are not asked about the other records
            tally = self._tally(members, Public(tally.public.X[:n_queries]))
        X = self._in_ball(tally.public.X[:n_queries])
        rows = Rows(X, len(tally.classes), tally.n_members)
        events = self._events(tally.unit, rows)

        def draw(source: Source) -> dict[str, Array]:
            counts = tally.counts[:n_queries]
            for event in events:
                counts = gaussian_counts(counts, event=event, source=source)
            return {"coef": self._student(counts, rows)}

        account = Account(ledger, dataset, key)
        state = self._run(draw, events, account, lambda: [tally.fingerprint()])
        coef, intercept = out_of_ball(state["coef"], self)
        return DistilledEnsemble(
            tally.classes,
            coef,
            intercept,
            np.full(tally.n_members, 1 / tally.n_members),
            self._guarantee(events, tally.declared, OPEN_RECORDS),
            tally.own,
            tuple(events),
            float(self.regularization),
        )

    def _events(self, unit: int, rows: Rows) -> list[DiscreteGaussian]:
        """Return the noise on all counts, a vote being `unit` of them."""
        if not math.isfinite(self.epsilon):
            return []
        # All queries are one vector of counts; √n queries' worth of one vote is how far a site
        # moves it.
        moved = unit * shares_moved(rows.n_classes, self.neighbours) * math.sqrt(self.n_queries)
        facts: dict[str, Any] = {
            "unit": Unit.SITE,
            "neighbours": Neighbours(self.neighbours),
            "at_delta": self.delta,
        }
        return [
            calibrate_event(
                lambda sigma: DiscreteGaussian(sensitivity=moved, sigma=sigma, **facts),
                epsilon=self.epsilon,
            )
        ]

    def _student(self, counts: Array, rows: Rows) -> Array:
        """Return the linear model of the noisy majority's labels."""
        n, K = counts.shape
        labels = np.zeros_like(counts)
        labels[np.arange(n), counts.argmax(axis=1)] = K
        S = statistic(labels, K, rows.X) + rows.X.mean(axis=0) / K
        target = S[1] if rows.logistic else S
        tolerance = loose_tolerance(rows, target, self.regularization)
        return minimum(rows, target, self.regularization * n, tolerance)
