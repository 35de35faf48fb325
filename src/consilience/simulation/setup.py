"""The checked arguments of a simulation: all that a worker needs to run any cell of it.

A `Setup` makes learners and aggregators for a cell. With a seed, every draw of noise follows from
the seed and the names of the cell, so results do not depend on the backend or on which cell is done
first.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import joblib
import numpy as np
import scipy
import sklearn
from numpy.typing import NDArray
from sklearn.base import clone, is_classifier

from consilience.aggregators.base import Aggregator
from consilience.errors import SettingsError
from consilience.evaluation.baselines import BEST, LOCAL, POOLED, TITLES
from consilience.learners.base import PrivateLearner
from consilience.privacy.guarantee import Guarantee, Unit
from consilience.privacy.mechanisms import Noise
from consilience.privacy.spending import void_by_seed
from consilience.simulation.checks import is_whole, require
from consilience.simulation.digest import code_digest, describe_function
from consilience.simulation.division import Cut, Divider, derive_seed

Array = NDArray[Any]
Learner = PrivateLearner[Any, Any]
Level = float | Sequence[float]
Levels = Level | Sequence[Level] | Mapping[str, Level]
Found = Mapping[tuple[str, str, str], Guarantee]


@dataclass(frozen=True)
class Ways:
    """What is tried on the divided records: all learners with all aggregators, at all levels."""

    learners: Mapping[str, Learner]
    aggregators: Mapping[str, Aggregator]
    levels: Mapping[str, Array] | None  # epsilon by name; None: each learner's own
    baselines: frozenset[str]
    draws: int = 1
    gives_budget: bool = True  # whether aggregators with an epsilon get the level's

    @property
    def classify(self) -> bool:
        """Whether the learners are classifiers, which all are or none is."""
        return bool(is_classifier(next(iter(self.learners.values()))))

    @property
    def all_need_exact_members(self) -> bool:
        """Whether no aggregator takes private members."""
        return all(one.needs_exact_members for one in self.aggregators.values())


@dataclass(frozen=True)
class Setup:
    """Divided records, and what is tried on them."""

    divider: Divider
    ways: Ways
    seed: int | None
    digests: Mapping[str, str] = field(default_factory=dict)  # by learner, for a checkpoint
    held: dict[int, Cut] = field(default_factory=dict)  # the last cut, for the next learner

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"held": {}}  # a worker divides for itself

    def run(self, cell: tuple[int, str], n_threads: int) -> dict[str, list[Any]]:
        """Run one cell. The answer is plain values, as they are stored in a checkpoint."""
        from consilience.simulation.cell import Cell

        return Cell(self, *cell, n_threads).run()

    def key(self, cell: tuple[int, str]) -> str:
        """Return a digest of everything that determines one cell, and of nothing that does not."""
        repeat, name = cell
        return hashlib.sha256(f"{self.digests[name]} {repeat}".encode()).hexdigest()

    def with_digests(self) -> Setup:
        """Return the setup with a digest of arguments and code for each learner."""
        divider, ways = self.divider, self.ways
        prepare: Any = divider.preparation
        if prepare is not None and inspect.isfunction(prepare.how):
            prepare = (prepare.learned_on, describe_function(prepare.how))
        shared = [
            [getattr(divider.records, part.name) for part in fields(divider.records)],
            [getattr(divider.division, part.name) for part in fields(divider.division)],
            [divider.ids, divider.split_seed, self.seed, prepare],
            [ways.levels, ways.draws, ways.gives_budget],
            # The order of aggregators is that of rows; the order of a set is no order.
            [dict(ways.aggregators), list(ways.aggregators), sorted(ways.baselines)],
            [np.__version__, scipy.__version__, sklearn.__version__, code_digest()],
        ]
        try:
            common = joblib.hash(shared, hash_name="sha1")
            digests = {
                name: joblib.hash([common, name, learner], hash_name="sha1")
                for name, learner in ways.learners.items()
            }
        except Exception:  # of any kind: what cannot be pickled says so in its own way
            raise SettingsError(
                "A checkpoint was asked for, but a learner, an aggregator or 'prepare' cannot be "
                "told from others: it holds what cannot be pickled. Nothing was trained. Use a "
                "function of a module, or no checkpoint."
            ) from None
        return replace(self, digests=digests)

    def cut(self, repeat: int) -> Cut:
        """Return the division of one repeat: the same for all methods."""
        cut = self.held.get(repeat)
        if cut is None:
            cut = self.divider.cut(repeat)
            self.held.clear()
            self.held[repeat] = cut
        return cut

    def epsilons(self, name: str) -> dict[str, tuple[float, ...]]:
        """Return the epsilon of each site at each level of this learner."""
        own = self.ways.learners[name].epsilon
        levels = {f"{own:g}": np.asarray(own)} if self.ways.levels is None else self.ways.levels
        return {
            level: tuple(np.broadcast_to(epsilon, self.divider.n_sites).tolist())
            for level, epsilon in levels.items()
        }

    def noise(self, *names: object) -> Noise | None:
        """Return the noise of one draw: seeded by its names if the report is to repeat."""
        return None if self.seed is None else Noise(seed=derive_seed(self.seed, *names))

    def make(
        self,
        name: str,
        epsilon: float,
        noise: Noise | None = None,
        *,
        size: int | None = None,
        who: tuple[object, ...],
    ) -> Learner:
        """Return an untrained learner that knows the public facts.

        `size` is the public guess of its number of records. Public randomness, such as which
        features a tree may split, is another for each model of a repeat (`who`); an exact forest
        draws too, which tree a record is for.
        """
        made: Learner = clone(self.ways.learners[name])
        known = made.get_params(deep=False)
        noise = noise if math.isfinite(epsilon) else self.noise(name, *who, "exact")
        facts: dict[str, Any] = {"epsilon": epsilon, "noise": noise}
        if known.get("classes", ()) is None:
            facts["classes"] = self.divider.records.classes if self.ways.classify else None
        if known.get("public_size") is not None and size is not None:
            facts["public_size"] = size
        if known.get("random_state", 0) is None:
            facts["random_state"] = derive_seed(self.divider.split_seed, name, *who) % 2**32
        made.set_params(**facts)
        return made

    def aggregator(
        self, name: str, epsilons: Sequence[float], cell: tuple[object, ...], draw: Sequence[str]
    ) -> Aggregator:
        """Return an aggregator with what the level promises and randomness of its own.

        Private aggregation records too are promised what the level promises to records.
        """
        made = self.ways.aggregators[name]
        if self.ways.levels is not None and self.ways.gives_budget:
            made = made.with_budget(epsilons)
        # Folds and the like are public, and the same in every run.
        state = derive_seed(self.divider.split_seed, *cell, name) % 2**32
        return made.with_noise(self.noise(*cell, *draw, name), state)

    def guarantee(self, found: Found) -> Guarantee | None:
        """Return the weakest guarantee of any private result, or that there is none."""
        if self.seed is not None:
            some = next(iter(self.ways.learners.values()))
            return void_by_seed(unit=some.unit, neighbours=some.neighbours)
        return max(found.values(), key=lambda one: (not one.holds, one.epsilon), default=None)

    def facts(self, repeats: int) -> dict[str, Any]:
        """Return what a reader of the report must know."""
        cut, divider = self.cut(0), self.divider
        division, preparation = divider.division, divider.preparation
        return {
            "records": len(divider.records.y),
            "features": int(cut.X.shape[1]),
            "sites": divider.n_sites,
            "sizes": [len(rows) for rows in cut.sites],
            "public": 0 if cut.public is None else int(cut.public.X.shape[0]),
            "labelled": cut.public is not None and cut.public.y is not None,
            "test": len(cut.y_test),
            "resampled": divider.resampled,
            "repeats": repeats,
            "draws": self.ways.draws,
            "seed": self.seed,
            "skew": {"label": division.label_skew, "feature": division.feature_skew},
            "prepared": None if preparation is None else preparation.learned_on,
        }


# --------------------------------------------------------------------------- checking arguments

_LEARNER = (
    "this project's learners with unit='record' and no noise of their own (pass seed= to "
    "simulate instead), classifiers or regressors"
)


def check_learners(given: object, *, persons: bool = False) -> dict[str, Learner]:
    """Return the learners by name, all classifiers or all regressors."""
    learners = _name_all("learner", given)
    require("learner", given, len(learners) > 0, "at least one")
    for name, learner in learners.items():
        facts = learner.get_params(deep=False) if hasattr(learner, "get_params") else {}
        known = {"epsilon", "noise"} <= set(facts) and facts["noise"] is None
        unit = "person" if persons else "record"
        kinds = {is_classifier(one) for one in learners.values()}
        fits = known and facts.get("unit", "record") == unit and len(kinds) == 1
        require("learner", f"{name}={learner!r}", fits, _LEARNER)
    return learners


def check_aggregators(given: object, baselines: Collection[str] | None) -> dict[str, Aggregator]:
    """Return the aggregators by name; none at all only if baselines are asked for."""
    aggregators = _name_all("aggregator", given)
    must = "at least one, unless baselines are asked for"
    require("aggregator", given, bool(aggregators or baselines), must)
    for name, made in aggregators.items():
        own = isinstance(made, Aggregator) and getattr(made, "noise", None) is None
        fits = own and name not in TITLES
        require("aggregator", f"{name}={made!r}", fits, "an aggregator without noise of its own")
    return aggregators


def check_baselines(
    given: Collection[str] | None, aggregators: Mapping[str, Aggregator]
) -> frozenset[str]:
    """Return the baselines to compute: by default all that answer the same question.

    A site alone and private is there if some aggregator takes private members, and the private pool
    if some aggregator hides records rather than whole sites.
    """
    if given is None:
        given, made = set(TITLES), aggregators.values()
        given -= {LOCAL, BEST} if all(one.needs_exact_members for one in made) else set()
        given -= {POOLED} if all(_hides_sites(one) for one in made) else set()
    require("baselines", given, set(given) <= set(TITLES), f"of {list(TITLES)}")
    return frozenset(given)


def check_draws(draws: int) -> int:
    """Return the number of draws."""
    require("draws", draws, is_whole(draws), "a whole number > 0")
    return draws


def check_levels(epsilon: Levels | None, n_sites: int) -> dict[str, Array] | None:
    """Return levels of epsilon by name; None leaves each learner its own."""
    if epsilon is None:
        return None
    named = isinstance(epsilon, Mapping)
    listed: Any = epsilon if isinstance(epsilon, list | tuple | Mapping | np.ndarray) else [epsilon]
    levels: dict[str, Array] = {}
    for key in listed:
        level = np.asarray(listed[key] if named else key, dtype=float)
        name = f"{level:g}" if level.ndim == 0 else f"{level.min():g} to {level.max():g}"
        name = str(key) if named else name
        fits = level.shape in ((), (n_sites,)) and bool((level > 0).all()) and name not in levels
        must = f"levels > 0 of different names, each one number or {n_sites}, one per site"
        require("epsilon", epsilon, fits, must)
        levels[name] = level
    require("epsilon", epsilon, len(levels) > 0, "at least one level")
    return levels


def _hides_sites(aggregator: Aggregator) -> bool:
    return aggregator.draws_noise and aggregator.hidden_unit is Unit.SITE


def _name_all(what: str, given: object) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return {str(name): one for name, one in given.items()}
    listed = list(given) if isinstance(given, list | tuple) else [given]
    named = {type(one).__name__: one for one in listed}
    unique = len(named) == len(listed)
    require(what, given, unique, "a dictionary by name where two are of one kind")
    return named
