"""Who would join: the sites of a plan, their sizes and epsilons, and the hub's public records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from consilience.errors import SettingsError
from consilience.learners.base import is_count


@dataclass(frozen=True)
class Site:
    """A number of sites that are alike."""

    count: int
    n_records: int
    epsilon: float


@dataclass(frozen=True)
class Case:
    """Who would join, and how many public records the hub has."""

    sites: tuple[Site, ...]
    n_public: int | None
    asking: Site

    @property
    def n_sites(self) -> int:
        """Number of sites of all kinds."""
        return sum(site.count for site in self.sites)

    def change(self, what: str, value: float, base: float) -> Case:
        """Return the case with one quantity changed.

        Epsilons of all sites change in proportion: `value` takes the place of `base`.
        """
        if what == "n_public":
            return replace(self, n_public=int(value))
        if what == "epsilon":
            asking, *sites = (
                replace(s, epsilon=s.epsilon * value / base) for s in (self.asking, *self.sites)
            )
            return replace(self, sites=tuple(sites), asking=asking)
        (site,) = self.sites
        if what == "n_sites":
            return replace(self, sites=(replace(site, count=int(value)),))
        asking, site = (replace(one, n_records=int(value)) for one in (self.asking, site))
        return replace(self, sites=(site,), asking=asking)


@dataclass(frozen=True, kw_only=True)
class Sites:
    """The sites that `plan` is asked about.

    All sites have `n_records` and `epsilon`, unless `sizes` or `epsilons` list those of each site;
    then `n_records` and `epsilon` are those of the site that asks, and the sites are counted.
    """

    n_records: int
    epsilon: float
    n_sites: int = 1
    sizes: Sequence[int] | None = None
    epsilons: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name in ("n_records", "n_sites"):
            count = getattr(self, name)
            require(name, count, is_count(count), "a whole number > 0")
        require("epsilon", self.epsilon, math.isfinite(self.epsilon), "finite")

    @property
    def asking(self) -> Site:
        """The site that asks."""
        return Site(1, self.n_records, self.epsilon)

    def kinds(self) -> tuple[Site, ...]:
        """Return the different kinds of sites: one kind, or each listed site its own."""
        if self.sizes is None and self.epsilons is None:
            return (Site(self.n_sites, self.n_records, self.epsilon),)
        count = len(self.sizes if self.sizes is not None else self.epsilons or ())
        sizes = [self.n_records] * count if self.sizes is None else list(self.sizes)
        epsilons = [self.epsilon] * count if self.epsilons is None else list(self.epsilons)
        fits = self.n_sites in (1, count)
        require("n_sites", self.n_sites, fits, f"left out where sites are listed, or {count}")
        fits = all(is_count(n) for n in sizes)
        require("sizes", sizes, fits and count > 0, "a list of whole numbers > 0")
        fits = len(epsilons) == len(sizes) and all(math.isfinite(e) and e > 0 for e in epsilons)
        require("epsilons", epsilons, fits, "as many finite numbers > 0 as there are sizes")
        return tuple(Site(1, int(n), float(e)) for n, e in zip(sizes, epsilons, strict=True))


def require(name: str, value: object, fits: bool, must: str) -> None:
    """Refuse a parameter of `plan` that does not fit."""
    if not fits:
        raise SettingsError(
            f"The {name!r} parameter of plan must be {must}. Got {value!r} instead."
        )
