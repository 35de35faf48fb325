"""Total: add up what sites counted, and let the statistic make a model of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack, cast

import numpy as np

from consilience.aggregators.base import Aggregator, Array, Charge, Description, Ensemble, Learner
from consilience.aggregators.members import (
    Member,
    are_shares,
    as_members,
    cap_shares,
    joint_guarantee,
)
from consilience.errors import SchemaMismatch, SettingsError
from consilience.learners.base import PrivateLearner, spell_out
from consilience.privacy.guarantee import Neighbours
from consilience.statistics.base import ROOM, Statistic, Summed
from consilience.tables.public import Public

WEIGHING = {
    "precision": "The sums of all sites are added up. Unless sums are masked, a site with few "
    "records beside its noise counts for less; where numbers of records are hidden, one with more "
    "noise does. A member's share is that of the records behind the total, all sites' numbers "
    "taken as equal where they are hidden.",
    "equal": "The sums of all sites are added up as they are. A member's share is that of the "
    "records behind the total, all sites' numbers taken as equal where they are hidden.",
}


@dataclass(eq=False)
class Total(Aggregator):
    """Add up the sums of sites that all have the same statistic, and finish the total.

    Parameters
    ----------
    weights
        ``"precision"`` multiplies each site's sum by what its public size and its noise imply, at
        most 1; ``"equal"`` adds sums up as they are.

    Privacy
    -------
    Each site's own guarantee, against everyone: post-processing. None for public records. Proof:
    docs/guarantees/statistics.md.

    Examples
    --------
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> sums = [cs.Moments(epsilon=1.0, delta=1e-6, schema=schema).fit(table) for _ in range(3)]
    >>> joined = cs.Total().combine(sums)
    >>> joined.guarantee, joined.predict([[-1.0], [1.0]]).tolist()
    (Guarantee(epsilon=1, delta=1e-06, per record, replace-one, 1 assumption), ['no', 'yes'])
    """

    weights: str = "precision"

    def __post_init__(self) -> None:
        self._require("weights", self.weights in WEIGHING, "'precision' or 'equal'")

    def problem_with(self, learner: Learner, settings: Mapping[str, Any]) -> str | None:
        """Return why there is nothing to add up, or None."""
        if issubclass(learner, Statistic):
            if learner.counts_alike and self.max_weight < 1:
                return f"every record of a {learner.__name__} counts alike: leave out max_weight"
            return None
        return f"Total needs a statistic; use Average or WeightedVote for {learner.__name__}"

    def may_weigh(self, weights: Array) -> bool:
        """Tell whether these are shares."""
        return are_shares(weights, self.max_weight)

    def may_make(
        self,
        ensemble: Ensemble,
        learners: Sequence[PrivateLearner[Any, Any]],
        sizes: Sequence[int | None],
    ) -> bool:
        """Tell whether the study's statistic can have made this of a total."""
        low, high = learners
        return isinstance(low, Statistic) and low.may_finish(ensemble, high, sizes)

    def describe(self) -> Description:
        """Return its title and what the weights mean."""
        title = "Total" if self.weights == "precision" else f"Total ({self.weights})"
        return Description(title, WEIGHING[self.weights])

    def combine(
        self, members: Sequence[Any], public: Public | None = None, **charge: Unpack[Charge]
    ) -> Ensemble:
        """Return the model of all `members`' sums; labelled `public` records join them."""
        found = as_members(members)
        sums = self._check_alike(found)
        if sums[0].sharing is not None:
            # Sites scaled their records themselves, so that nobody needs to see a single sum.
            words = np.sum([one.total_ for one in sums], axis=0)  # modulo 2^64
            return self._finish(found, words, public)[0]
        parts = [one.summed() for one in sums]
        total, shares = self._add(sums, parts)
        return sums[0].keep_parts(self._model(sums[0], total, public, shares, found), parts)

    def add(self, members: Sequence[Any]) -> Summed:
        """Return the total of all `members`' sums, which are no shares."""
        sums = self._check_alike(as_members(members))
        return self._add(sums, [one.summed() for one in sums])[0]

    def _check_alike(self, found: Sequence[Member]) -> list[Statistic]:
        sums = [_check_sum(member.learner) for member in found]
        if len({_describe(one) for one in sums}) > 1:
            raise SchemaMismatch(
                "Sums of two members were to be added up that differ in their settings, columns or "
                "classes. Nothing was combined. Let all sites train one study."
            )
        return sums

    def _add(self, sums: Sequence[Statistic], parts: Sequence[Summed]) -> tuple[Summed, Array]:
        """Return the total and the members' shares of it."""
        sizes = np.array([1.0 if part.size is None else max(part.size, 1.0) for part in parts])
        scales = np.array([self._scale(one, n) for one, n in zip(sums, sizes, strict=True)])
        scales, shares = self._cap(scales / scales.max(), sizes)
        known = all(part.size is not None for part in parts)
        total = Summed(
            _weigh(scales, [part.values for part in parts]),
            _weigh(np.square(scales), [part.variance for part in parts]),
            float(scales @ sizes) if known else None,
            float(np.square(scales) @ sizes) if known else None,
        )
        return total, shares

    def open(
        self, members: Sequence[Any], words: Array, public: Public | None = None
    ) -> tuple[Ensemble, Summed]:
        """Return the model of the `words` that all members' masked sums add up to, and the total.

        Members without records brought noise only. Nothing is known of any single sum.
        """
        found = as_members(members)
        sums = [member.learner for member in found]
        if len({_describe(one) for one in sums}) > 1 or words.shape != (sums[0].length,):
            raise SchemaMismatch(
                "Masked sums were to be opened together that differ in their settings, columns or "
                "classes. Nothing was combined. Let all sites train one study."
            )
        return self._finish(found, words, public)

    def _finish(
        self, found: Sequence[Member], words: Array, public: Public | None
    ) -> tuple[Ensemble, Summed]:
        """Finish the total of shared sums, in whole numbers."""
        parts = [member.learner.behind(words) for member in found]
        first = found[0].learner
        known = all(part.size is not None for part in parts)
        size, squares = (
            sum(getattr(part, name) for part in parts) if known else None
            for name in ("size", "squares")
        )
        counted = np.array([1.0 if part.size is None else part.size for part in parts])
        if known and counted.sum() * first.most_moved > ROOM:
            raise SettingsError(
                f"The sum of {int(counted.sum()):,} records may not fit 64 bits. Nothing was "
                "combined. Split the study."
            )
        most = counted.sum() * first.most_moved if known else ROOM
        most += 20.0 * float(np.sqrt(sum(part.variance for part in parts)).max()) / first.step
        if np.abs(words.astype(np.float64)).max(initial=0.0) > most:
            raise SettingsError(
                "The total is larger than all records together can be. Nothing was combined. A "
                "keyholder's sum of pads, or the numbers of a site, are wrong, and nobody can tell "
                "whose: leave the whole batch out, and ask all who took part."
            )
        total = Summed(
            parts[0].values, np.sum([part.variance for part in parts], axis=0), size, squares
        )
        shares = counted / max(counted.sum(), 1e-300)
        return self._model(first, total, public, shares, found), total

    def _model(
        self,
        first: Statistic,
        total: Summed,
        public: Public | None,
        shares: Array,
        found: Sequence[Member],
    ) -> Ensemble:
        labelled = public if public is not None and public.y is not None else None
        finished: Ensemble = replace(
            cast(Any, first.finish(total, labelled)),  # a frozen dataclass, as ensembles are
            weights=shares,
            guarantee=joint_guarantee(found),
            guarantees=tuple(member.guarantee for member in found),
        )
        return finished

    def _scale(self, statistic: Statistic, size: float) -> float:
        """Return what a site's sum is multiplied by, from public facts.

        With scales a the variance of a mean is ∝ Σ a²(n·v + s²) / (Σ a·n)², v a record's part and
        s² the noise, both for a number of weight one: least at a ∝ n / (n·v + s²).
        """
        if self.weights == "equal" or statistic.counts_alike:
            return 1.0
        one = statistic.reach(Neighbours.ADD_REMOVE) ** 2 / statistic.length
        noise = float((statistic.noise_variance() * np.square(statistic.weights())).mean())
        return size / (size * one + noise)

    def _cap(self, scales: Array, sizes: Array) -> tuple[Array, Array]:
        """Return scales at which no member has more than its share, and the shares."""
        shares = scales * sizes / (scales @ sizes)
        capped = cap_shares(shares, self.max_weight)
        if capped is not shares:
            scales = capped / sizes
            scales = scales / scales.max()
        return scales, capped


def _weigh(scales: Array, values: Sequence[Array]) -> Array:
    return np.asarray(sum(a * value for a, value in zip(scales.tolist(), values, strict=True)))


def _describe(statistic: Statistic) -> str:
    """Return all that sums must have in common to be added up."""
    settings = statistic.stated_settings()
    settings.pop("epsilon")
    classes, sharing = getattr(statistic, "classes_", None), statistic.sharing
    shared = None if sharing is None else replace(sharing, only_noise=False)
    facts = [type(statistic).__name__, settings, statistic.n_features_in_, classes, shared]
    return spell_out(facts)


def _check_sum(learner: object) -> Statistic:
    if not (isinstance(learner, Statistic) and hasattr(learner, "total_")):
        raise SettingsError(
            f"A {type(learner).__name__} was given as a member, but it is no fitted statistic. "
            "Nothing was combined. Combine models by Average or WeightedVote."
        )
    return learner
