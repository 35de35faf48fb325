"""Distillation: members label public records, and one linear model learned from the labels hides any single site.

Members may be classifiers of any kind: only what they say about public records is used. Counts are
exact integers and every member keeps its own slot, so that one site moves its own votes and nothing
else, rounding included. What is then hidden is a whole site (``unit="site"``), by a hub that is
trusted with the exact members. Proofs: docs/guarantees/distillation.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.linalg import helmert
from sklearn.utils.validation import check_array

from consilience.aggregators.average import TRUSTED
from consilience.aggregators.base import Aggregator, Description, Learner
from consilience.aggregators.blend import is_logistic
from consilience.aggregators.distillation.noise import (
    AveragePlan,
    ObjectivePlan,
    OutputPlan,
    Plan,
    Rows,
    StatisticPlan,
    loose_tolerance,
    minimum,
    shares_moved,
    statistic,
)
from consilience.aggregators.distillation.tally import Question, Tally, count_votes, voters
from consilience.aggregators.members import DISJOINT, LinearEnsemble, aligned
from consilience.errors import SettingsError
from consilience.learners.base import PrivateLearner, is_positive
from consilience.learners.linear import into_ball, out_of_ball
from consilience.privacy.accounting import DiscreteGaussian, Event
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import Noise, Source, clip_rows, gaussian_counts
from consilience.privacy.spending import Account, run_charged, state_guarantee
from consilience.privacy.vector_noise import calibrate_event
from consilience.tables.public import Public

Array = NDArray[Any]

OPEN_RECORDS = "the records that members labelled are public"
READ_CLASSES = "the set of labels is public: it was read from the members"
ROW_BY_ROW = "members label each record by itself, whatever the others are"


@dataclass(frozen=True)
class DistilledEnsemble(LinearEnsemble):
    """A linear classifier that hides any one site; predicts like a fitted scikit-learn estimator.

    ``guarantee`` is per site, ``public_guarantee`` per record of the aggregation data where that is
    protected too. ``statistic`` is the noisy statistic, if that was released: more models may be
    computed from it at no cost.
    """

    events: tuple[Event, ...] = ()
    regularization: float = math.nan
    public_guarantee: Guarantee | None = None
    statistic: Array | None = field(default=None, repr=False)


@dataclass(frozen=True)
class _Question:
    """What members will be asked, and what is known before they are: `count` asks."""

    count: Callable[[], Tally]
    public: Public
    classes: Array
    declared: bool
    own: tuple[Guarantee | None, ...]
    known: dict[Any, Any] = field(
        default_factory=dict
    )  # a tally's own, which is asked again and again

    def rows(self, settings: Any) -> Rows:
        """Return the public records as `settings` has them."""
        key = ("rows", settings.data_norm, settings.fit_intercept)
        if key not in self.known:
            self.known[key] = Rows(_ball(settings, self.public.X), len(self.classes), len(self.own))
        return cast(Rows, self.known[key])


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
    _require(
        settings, "delta", no_delta or (is_positive(delta) and delta < 1), "a number in [0, 1)"
    )
    _require(
        settings,
        "neighbours",
        settings.neighbours in ("replace-one", "null-one"),
        "'replace-one' or 'null-one'",
    )
    _require(settings, "data_norm", is_positive(settings.data_norm), "a finite number > 0")
    _require(
        settings,
        "noise",
        settings.noise is None or isinstance(settings.noise, Noise),
        "None or a Noise value",
    )


def _ball(settings: Any, X: Any) -> Array:
    """Return public records as dense rows of length <= 1, with a constant column if there is to be an intercept."""
    X = check_array(X, accept_sparse="csr", dtype=np.float64)
    return np.ascontiguousarray(into_ball(X.toarray() if sparse.issparse(X) else X, settings))


def _ask(settings: Any, members: Any, public: Public | None, soft: str = "votes") -> _Question:
    if isinstance(members, Tally):
        facts = (members.public, members.classes, members.declared, members.own, members.known)
        return _Question(lambda: members, *facts)
    if public is None:
        raise SettingsError(
            f"{type(settings).__name__} needs public records for the members to label. Nothing "
            "was combined. Pass public=Public(X)."
        )
    found, every, declared = voters(members, settings.classes)
    own = tuple(member.guarantee for member in found)
    return _Question(
        lambda: count_votes(found, public, classes=every.tolist(), soft=soft),
        public,
        every,
        declared,
        own,
    )


def _stated(settings: Any, events: Sequence[Event], declared: bool, *extra: str) -> Guarantee:
    relation = events[0].neighbours if events else Neighbours(settings.neighbours)
    return state_guarantee(
        events,
        noise=settings.noise,
        unit=Unit.SITE,
        neighbours=relation,
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
    coef, intercept = out_of_ball(state["coef"], settings)
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
    settings: Any,
    draw: Any,
    events: Sequence[Event],
    ledger: Ledger | None,
    dataset: str | None,
    key: str | None,
) -> dict[str, Array]:
    state, _ = run_charged(
        draw,
        events,
        noise=settings.noise,
        account=Account(ledger, dataset, key),
        purpose=type(settings).__name__,
    )
    return state


class HidesSites(Aggregator):
    """An aggregator whose noise hides a whole site, at a hub that sees exact members."""

    epsilon: float
    neighbours: str
    classes: Sequence[Any] | None

    @property
    def needs_exact_members(self) -> bool:
        """Whether the noise is added here: then the sites' own models must have none."""
        return self.draws_noise

    @property
    def hidden_unit(self) -> Unit | None:
        """A whole site."""
        return Unit.SITE

    @property
    def hidden_neighbours(self) -> Neighbours | None:
        """The relation between sites that was asked for."""
        return Neighbours(self.neighbours)

    def problem_with(self, learner: Learner, settings: Mapping[str, Any]) -> str | None:
        """Return why such learners cannot take part, or None."""
        if getattr(learner, "predicts_number", False):
            return f"{type(self).__name__} combines classifiers; use Average for regression"
        return super().problem_with(learner, settings)


class _Distillation(HidesSites):
    """What the two distillations share."""

    needs_public = asks_votes = True
    delta: float
    mechanism: str
    regularization: Any
    protect_public: bool
    neighbours: str
    calibration: str
    soft: str
    majority: bool
    mechanisms: tuple[str, ...]

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

    def expected(self, joining: Any) -> tuple[Any, float] | None:
        """Return the law of a model learned from the members' votes."""
        found: tuple[Any, float] = joining.distilled(self)
        return found

    def question(self, public: Public) -> Question:
        """Ask about all public records."""
        classes = None if self.classes is None else tuple(self.classes)
        return Question(self.soft, classes, public.X.shape[0])

    def _check(self) -> None:
        _check(self)
        _require(self, "mechanism", self.mechanism in self.mechanisms, f"one of {self.mechanisms}")
        strength = self.regularization
        free = self.mechanism == "statistic" and not self.protect_public
        fits = is_positive(strength) or (strength == "auto" and free)
        _require(
            self,
            "regularization",
            fits,
            "a number > 0, or 'auto' if only the statistic is released",
        )
        _require(
            self, "calibration", self.calibration in ("tight", "hamm2016"), "'tight' or 'hamm2016'"
        )
        _require(
            self, "soft", self.soft in ("votes", "probabilities"), "'votes' or 'probabilities'"
        )
        relation = self.neighbours == "replace-one" or (
            not self.majority and not self.protect_public
        )
        _require(
            self,
            "neighbours",
            relation,
            "'replace-one' here: one record or one vote decides a whole label",
        )
        if self.calibration == "hamm2016" and (
            self.mechanism != "output" or self.neighbours != "replace-one"
        ):
            raise SettingsError(
                "calibration='hamm2016' is the paper's: mechanism='output' and "
                "neighbours='replace-one'. Nothing was combined. Use calibration='tight' for "
                "anything else."
            )

    def _plan(self, rows: Rows) -> Plan:
        if self.mechanism == "output":
            return OutputPlan(self, rows)
        return ObjectivePlan(self, rows) if self.protect_public else StatisticPlan(self, rows)

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

        `members` may also be what `count_votes` made of them, public records included. Labels of
        `public`, if there are any, serve ``regularization="auto"`` and nothing else. With a ledger,
        `dataset` is charged first.
        """
        self._check()
        asked = _ask(self, members, public, self.soft)
        plan = self._plan(asked.rows(self))
        state = _release(
            self, lambda source: plan.draw(asked.count(), source), plan.events, ledger, dataset, key
        )
        stated = _stated(
            self, plan.events, asked.declared, ROW_BY_ROW if self.protect_public else OPEN_RECORDS
        )
        hidden = _per_record(stated) if self.protect_public else None
        return _ensemble(self, state, plan.events, asked, stated, hidden)


def _per_record(stated: Guarantee) -> Guarantee:
    """Restate what holds for a site and a record at once as what holds for one record of the aggregation data."""
    if not stated.holds:
        return Guarantee.void(
            str(stated.void_reason), unit=Unit.RECORD, neighbours=stated.neighbours
        )
    return Guarantee(
        epsilon=stated.epsilon,
        delta=stated.delta,
        unit=Unit.RECORD,
        neighbours=stated.neighbours,
        assumptions=stated.assumptions,
    )


class VoteDistillation(_Distillation):
    """Learn one linear model from the members' majority vote on public records (Hamm et al. 2016, algorithm 1).

    One vote can decide every label, so the noise does not shrink with the number of sites;
    `SoftLabelDistillation` is better in every respect but this one: without noise its labels are as
    clear as labels get.

    Parameters
    ----------
    epsilon, delta
        The budget; ``delta=0`` is pure, ``epsilon=math.inf`` exact, which promises nothing.
    regularization
        λ of ``mean(loss) + λ/2 ‖w‖²``, in coordinates where rows have norm <= 1.
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
    """

    majority = True
    mechanisms = ("output",)
    soft = "votes"
    neighbours = "replace-one"

    @classmethod
    def planned(
        cls, learner: PrivateLearner[Any, Any], epsilons: Sequence[float], *, public: bool
    ) -> dict[str, Self]:
        """Return the paper's own version."""
        if not (public and is_logistic(learner)):
            return {}
        return {"vote, 2016 noise": cls(epsilon=min(epsilons), calibration="hamm2016")}

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

    Votes enter the logistic loss only through one small statistic, so noise on that statistic is
    enough (``mechanism="statistic"``): no factor 1/λ, and any λ afterwards. ``"output"`` is Hamm et
    al. 2016, algorithm 2.

    Parameters
    ----------
    epsilon, delta
        The budget; ``delta=0`` is pure, ``epsilon=math.inf`` exact, which promises nothing.
    regularization
        λ of ``mean(loss) + λ/2 ‖w‖²``, in coordinates where rows have norm <= 1. ``"auto"``, with
        the statistic only, chooses it at no cost: by the labels of the public records, or without
        them by the known noise.
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
    data_norm, fit_intercept
        Declared bound on the norm of a public row, longer ones are scaled down; whether to append a
        constant.
    classes
        The declared labels. Without it they are read from the members, and the guarantee says so.
    calibration
        ``"tight"``, or ``"hamm2016"`` for the paper's own noise with ``mechanism="output"``.
    noise
        ``Noise(seed=...)`` for tests and experiments; voids the guarantee.

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
    >>> joined = SoftLabelDistillation(epsilon=1.0, regularization="auto", classes=[0, 1]).combine(sites, Public(X))
    >>> joined.guarantee
    Guarantee(epsilon=1, delta=0, per site, replace-one)
    """

    majority = False
    mechanisms = ("statistic", "output")

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


class ClippedAverage(HidesSites):
    """Average linear members, each cut to a public length, hiding any one site; needs no public records.

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


class PATE(HidesSites):
    """Learn a linear student from noisy majority votes on a few public records (Papernot et al. 2018, GNMax).

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
        classes = None if self.classes is None else tuple(self.classes)
        return Question("votes", classes, min(self.n_queries, public.X.shape[0]))

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
        _require(
            self,
            "n_queries",
            isinstance(n_queries, int) and 1 <= n_queries <= limit,
            f"from 1 to {limit}",
        )
        if not isinstance(members, Tally):
            asked = _ask(
                self, members, Public(asked.public.X[:n_queries])
            )  # the others are not asked about
        rows = Rows(_ball(self, asked.public.X[:n_queries]), K, len(asked.own))
        unit = members.unit if isinstance(members, Tally) else K
        events: list[Event] = []
        if math.isfinite(self.epsilon):
            # All queries are one vector of counts; √n queries' worth of one vote is how far a site
            # moves it.
            moved = unit * shares_moved(K, self.neighbours) * math.sqrt(n_queries)
            facts: Any = {
                "unit": Unit.SITE,
                "neighbours": Neighbours(self.neighbours),
                "at_delta": self.delta,
            }

            def kind(sigma: float) -> Event:
                return DiscreteGaussian(sensitivity=moved, sigma=sigma, **facts)

            events.append(calibrate_event(kind, epsilon=self.epsilon))

        def draw(source: Source) -> dict[str, Array]:
            counts = asked.count().counts[:n_queries]
            for event in events:
                assert isinstance(event, DiscreteGaussian)
                counts = gaussian_counts(counts, event=event, source=source)
            labels = np.zeros_like(counts)
            labels[np.arange(n_queries), counts.argmax(axis=1)] = K
            S = statistic(labels, K, rows.X) + rows.X.mean(axis=0) / K
            ridge = self.regularization * n_queries
            target = S[1] if rows.logistic else S
            coef = minimum(rows, target, ridge, loose_tolerance(rows, target, self.regularization))
            return {"coef": coef, "regularization": np.array(self.regularization)}

        state = _release(self, draw, events, ledger, dataset, key)
        return _ensemble(
            self, state, events, asked, _stated(self, events, asked.declared, OPEN_RECORDS)
        )
