"""Distillation: members label public records, and one linear model is learned from the labels.

What the noise hides is a whole site (``unit="site"``). Proofs: docs/guarantees/distillation.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, Unpack

import numpy as np

from consilience.aggregators.base import Charge, Description, Joining, Outlook
from consilience.aggregators.distillation.noise import (
    ObjectivePlan,
    OutputPlan,
    Rows,
    StatisticPlan,
)
from consilience.aggregators.distillation.site_level import (
    OPEN_RECORDS,
    DistilledEnsemble,
    HidesSites,
)
from consilience.aggregators.distillation.tally import Tally
from consilience.aggregators.labelled import is_logistic
from consilience.errors import SettingsError
from consilience.learners.ball import out_of_ball
from consilience.learners.base import PrivateLearner, is_positive
from consilience.privacy.guarantee import Unit
from consilience.privacy.mechanisms import Noise
from consilience.privacy.spending import Account
from consilience.tables.public import Public

ROW_BY_ROW = "members label each record by itself, whatever the others are"


@dataclass(eq=False, kw_only=True)
class Distillation(HidesSites):
    """What the two distillations share."""

    needs_public = asks_votes = combines_kinds = True
    majority: ClassVar[bool]
    mechanisms: ClassVar[tuple[str, ...]]

    epsilon: float
    delta: float = 0.0
    regularization: float | str = 1e-4
    mechanism: str
    protect_public: bool = False
    data_norm: float = 1.0
    fit_intercept: bool = True
    classes: Sequence[Any] | None = None
    calibration: str = "tight"
    noise: Noise | None = None

    def describe(self) -> Description:
        """Return its title and what the weights mean."""
        learned = "majority" if self.majority else "mean vote"
        return Description(
            type(self).__name__,
            "Every member votes once on each public record; the release learns the noisy "
            f"{learned}.",
        )

    def is_predictable(self, learner: PrivateLearner[Any, Any], *, public: bool) -> bool:
        """Tell whether the loss is logistic and the public records need not be hidden."""
        return public and is_logistic(learner) and not self.protect_public

    def expected(self, joining: Joining) -> Outlook:
        """Return the law of a model learned from the members' votes."""
        return joining.distilled(self)

    def assumed(self) -> tuple[str, ...]:
        """Return the same, and what hiding a public record rests on."""
        return (*super().assumed(), ROW_BY_ROW)

    def check_settings(self) -> None:
        """Refuse settings that cannot work."""
        super().check_settings()
        self._require("mechanism", self.mechanism in self.mechanisms, f"one of {self.mechanisms}")
        strength = self.regularization
        free = self.mechanism == "statistic" and not self.protect_public
        fits = is_positive(strength) or (strength == "auto" and free)
        must = "a number > 0, or 'auto' if only the statistic is released"
        self._require("regularization", fits, must)
        fits = self.calibration in ("tight", "hamm2016")
        self._require("calibration", fits, "'tight' or 'hamm2016'")
        self._require("soft", self.soft in ("votes", "probabilities"), "'votes' or 'probabilities'")
        relation = self.neighbours == "replace-one"
        fits = relation or (not self.majority and not self.protect_public)
        must = "'replace-one' here: one record or one vote decides a whole label"
        self._require("neighbours", fits, must)
        if self.calibration == "hamm2016" and not (self.mechanism == "output" and relation):
            raise SettingsError(
                "calibration='hamm2016' is the paper's: mechanism='output' and "
                "neighbours='replace-one'. Nothing was combined. Use calibration='tight' for "
                "anything else."
            )

    def plan(self, rows: Rows) -> StatisticPlan | OutputPlan | ObjectivePlan:
        """Return what will be drawn for public records `rows`."""
        if self.mechanism == "output":
            return OutputPlan(self, rows)
        return ObjectivePlan(self, rows) if self.protect_public else StatisticPlan(self, rows)

    def combine(
        self, members: Sequence[Any] | Tally, public: Public | None = None, **charge: Unpack[Charge]
    ) -> DistilledEnsemble:
        """Return one linear model that agrees with `members` on the `public` records.

        `members` are fitted classifiers of any kind, or what `count_votes` made of them, public
        records included. Labels of `public`, if there are any, serve ``regularization="auto"`` and
        nothing else. With a ledger, `dataset` is charged first.
        """
        self.check_settings()
        tally = self._tally(members, public)
        plan = self.plan(self._rows(tally))
        events = plan.events
        state = self._run(
            lambda source: plan.draw(tally, source),
            events,
            Account(**charge),
            lambda: [tally.fingerprint()],
        )
        rests_on = ROW_BY_ROW if self.protect_public else OPEN_RECORDS
        stated = self._guarantee(events, tally.declared, rests_on)
        # What holds for a site and a record at once holds for one public record.
        hidden = replace(stated, unit=Unit.RECORD) if self.protect_public else None
        coef, intercept = out_of_ball(state["coef"], self)
        n = tally.n_members
        return DistilledEnsemble(
            tally.classes,
            coef,
            intercept,
            np.full(n, 1 / n),
            stated,
            tally.own,
            tuple(events),
            float(state["regularization"]),
            hidden,
            state.get("statistic"),
        )


@dataclass(eq=False, kw_only=True)
class VoteDistillation(Distillation):
    """Learn one linear model from the members' majority vote on public records.

    Algorithm 1 of Hamm, Cao & Belkin (2016).

    One vote can decide every label, so the noise does not shrink with the number of sites;
    `SoftLabelDistillation` is better in every respect but this one: without noise its labels are as
    clear as labels get.

    Parameters
    ----------
    epsilon, delta
        The budget; ``delta=0`` is pure, ``epsilon=math.inf`` exact, which promises nothing.
    regularization
        λ of ``mean(loss) + λ/2 ‖w‖²``, in coordinates where rows have norm <= 1.
    mechanism
        ``"output"``: noise on the model; there is no other one.
    protect_public
        Also hide one record of the public data, replaced at the same time as a site.
    data_norm, fit_intercept
        Declared bound on the norm of a public row, longer ones are scaled down; whether to append a
        constant.
    classes
        The declared labels. Without it they are read from the members, and the guarantee says so.
    calibration
        ``"tight"``, or ``"hamm2016"`` for the paper's own noise.
    noise
        ``Noise(seed=...)`` for tests and experiments; voids the guarantee.

    Privacy
    -------
    (epsilon, delta) per site, replace-one, against those who see the ensemble, not against the hub.
    Not hidden: the number of sites, the classes, and without `protect_public` the public records.
    Proof: docs/guarantees/distillation.md.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> from sklearn.tree import DecisionTreeClassifier
    >>> X = np.sin(np.arange(6000.0)).reshape(3000, 2) / 2
    >>> y = (X[:, 0] > X[:, 1]).astype(int)
    >>> sites = [DecisionTreeClassifier(max_depth=3).fit(X[i::50], y[i::50]) for i in range(50)]
    >>> cs.VoteDistillation(epsilon=5.0, classes=[0, 1]).combine(sites, cs.Public(X)).guarantee
    Guarantee(epsilon=5, delta=0, per site, replace-one, 3 assumptions)
    """

    majority = True
    mechanisms = ("output",)
    soft = "votes"
    neighbours = "replace-one"
    mechanism: str = "output"

    @classmethod
    def planned(
        cls, learner: PrivateLearner[Any, Any], epsilons: Sequence[float], *, public: bool
    ) -> dict[str, Self]:
        """Return the paper's own version."""
        if not (public and is_logistic(learner)):
            return {}
        return {"vote, 2016 noise": cls(epsilon=min(epsilons), calibration="hamm2016")}


@dataclass(eq=False, kw_only=True)
class SoftLabelDistillation(Distillation):
    """Learn one linear model from how members' votes on public records divide, hiding any one site.

    Votes enter the logistic loss only through one small statistic, so noise on that statistic is
    enough (``mechanism="statistic"``): no factor 1/λ, and any λ afterwards. ``"output"`` is Hamm et
    al. 2016, algorithm 2.

    Parameters
    ----------
    regularization
        A number, or ``"auto"``, which with the statistic only chooses it at no cost: by the labels
        of the public records, or without them by the known noise.
    mechanism
        ``"statistic"`` or ``"output"``.
    protect_public
        Also hide one record of the public data, replaced at the same time as a site. The statistic
        then becomes noise in the objective, and λ may be raised.
    neighbours
        ``"replace-one"``: a site's votes become any others. ``"null-one"``: they become an even
        split; less noise.
    soft
        ``"votes"``, or ``"probabilities"`` where members have them: same noise, labels that say
        more.
    calibration
        As in `VoteDistillation`. The paper's own noise is for ``mechanism="output"``.
    epsilon, delta, data_norm, fit_intercept, classes, noise
        As in `VoteDistillation`.

    Privacy
    -------
    (epsilon, delta) per site, neighbours as set, against those who see the ensemble, not against
    the hub. Not hidden: the number of sites, the classes, and without `protect_public` the public
    records. Proof: docs/guarantees/distillation.md.

    Examples
    --------
    >>> from sklearn.tree import DecisionTreeClassifier
    >>> X = Noise(seed=0).open().uniform(6000).reshape(3000, 2) - 0.5
    >>> y = (X[:, 0] > X[:, 1]).astype(int)
    >>> sites = [DecisionTreeClassifier(max_depth=3).fit(X[i::200], y[i::200]) for i in range(200)]
    >>> distil = SoftLabelDistillation(epsilon=1.0, regularization="auto", classes=[0, 1])
    >>> joined = distil.combine(sites, Public(X))
    >>> joined.guarantee
    Guarantee(epsilon=1, delta=0, per site, replace-one, 3 assumptions)
    """

    majority = False
    mechanisms = ("statistic", "output")
    mechanism: str = "statistic"
    neighbours: str = "replace-one"
    soft: str = "votes"

    @classmethod
    def planned(
        cls, learner: PrivateLearner[Any, Any], epsilons: Sequence[float], *, public: bool
    ) -> dict[str, Self]:
        """Return the paper's own version, and noise on the statistic alone."""
        if not (public and is_logistic(learner)):
            return {}
        epsilon = min(epsilons)
        paper = cls(epsilon=epsilon, mechanism="output", calibration="hamm2016")
        ours = cls(epsilon=epsilon, delta=learner.delta, regularization="auto")
        return {"soft labels, 2016 noise": paper, "soft labels, statistic": ours}
