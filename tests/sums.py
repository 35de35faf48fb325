"""Statistics, and records for each of them, shared by the tests of sums."""

import json
import math
from dataclasses import dataclass

import numpy as np
from sklearn.base import clone

from consilience.learners.base import PrivateLearner
from consilience.learners.registry import LEARNERS
from consilience.learners.trees.bins import Bins
from consilience.statistics.gradient_step import GradientStep, start_from
from consilience.statistics.label_tables import LabelTables
from consilience.statistics.leaf_counts import LeafCounts
from consilience.statistics.model_sum import ModelSum
from consilience.statistics.moments import Moments, MomentsRegressor
from consilience.statistics.score import Score
from consilience.statistics.summary import NumberSummary, Summary
from consilience.statistics.vote_tally import VoteTally, pack_rows
from consilience.study.study import Study
from consilience.tables.public import Public
from studies import as_number, public_rows, records_parts, statistic_text, study_text

DELTA = 1e-6
N_FEATURES = 3


@dataclass(frozen=True)
class Case:
    """A statistic with settings of its own, shown by its name."""

    name: str
    kind: type
    settings: dict
    classes: int | None = None
    takes_bins: bool = False

    def __repr__(self):
        return self.name


STATISTICS = [
    Case("two classes", Moments, {"classes": [0, 1]}, 2),
    Case("four classes", Moments, {"classes": [0, 1, 2, 3]}, 4),
    Case("a number", MomentsRegressor, {"label_bound": 1.0}),
    Case("a step, two classes", GradientStep, {"classes": [0, 1], "start": [[0.5, -1, 0, 0.2]]}, 2),
    Case(
        "a step, three classes",
        GradientStep,
        {"classes": [0, 1, 2], "start": [[0.5, -1, 0, 0.2], [0, 1, 0, 0], [0.3, 0, 0, -0.2]]},
        3,
    ),
    Case(
        "tables",
        LabelTables,
        {"classes": [0, 1, 2], "columns": [[[0, -0.5], [0, 0], [0, 0.5]], [[1, 0], [2, 0.2]]]},
        3,
        takes_bins=True,
    ),
    Case(
        "leaves",
        LeafCounts,
        {
            "classes": [0, 1, 2],
            "bins": Bins.even(-1, 1, n_features=N_FEATURES, n_bins=4),
            "n_trees": 3,
            "max_depth": 2,
        },
        3,
        takes_bins=True,
    ),
    Case(
        "a summary",
        Summary,
        {
            "classes": [0, 1, 2],
            "columns": [
                [[[0, -0.5], [0, 0], [0, 0.5]], [0, 1.5], []],
                [[[1, 0], [2, 0.2]], [], [0]],
            ],
        },
        3,
        takes_bins=True,
    ),
    Case(
        "a summary of numbers",
        NumberSummary,
        {"label_bound": 1.0, "columns": [[[[0, 0]], [0, 1.0], []], [[[3, 0]], [3, 1.0], []]]},
        takes_bins=True,
    ),
    Case("scores", Score, {"classes": [0, 1], "model": [[3.0, -1, 0.5, 0.2]]}, 2),
    Case(
        "scores of subgroups",
        Score,
        {
            "classes": [0, 1, 2],
            "model": [[3.0, -1, 0, 0.2], [-3.0, 1, 0, 0], [0.3, 3.0, 0, -0.2]],
            "subgroups": [[1, 0.0]],
            "bins": 8,
        },
        3,
        takes_bins=True,
    ),
]

# Of what sites train, and no sum over records: neighbours are tables, not records.
MODELS = [
    Case("a model, two classes", ModelSum, {"classes": [0, 1], "regularization": 1e-3}, 2),
    Case("a model, three classes", ModelSum, {"classes": [0, 1, 2], "regularization": 1e-3}, 3),
]

LIGHT = {"neighbours": "add-remove", "regularization": 1.0}
HIDING_RECORDS = [
    *MODELS,
    Case("a model, two classes, added", ModelSum, {"classes": [0, 1], **LIGHT}, 2),
    Case("a model, three classes, added", ModelSum, {"classes": [0, 1, 2], **LIGHT}, 3),
]
_DRAWN = np.random.default_rng(7).normal(size=(40, N_FEATURES))
ASKED = pack_rows(Public(_DRAWN / np.linalg.norm(_DRAWN, axis=1, keepdims=True)))
_VOTES = {"records": ASKED, "regularization": 1e-4}
_SHARES = {**_VOTES, "soft": "probabilities"}
_CUT = {"unit": "site", "max_norm": 2.0}
# What hides a whole site: of two sums, all records of a site may be others.
WHOLE = [
    Case("votes, two classes", VoteTally, {"classes": [0, 1], **_VOTES}, 2),
    Case("votes, three classes", VoteTally, {"classes": [0, 1, 2], **_VOTES}, 3),
    Case("probabilities", VoteTally, {"classes": [0, 1, 2], **_SHARES}, 3),
    Case("a cut model, two classes", ModelSum, {"classes": [0, 1], **_CUT}, 2),
    Case("a cut model, three classes", ModelSum, {"classes": [0, 1, 2], **_CUT}, 3),
]


# Every statistic of the registry in the usual study of `studies`, and what a study has to set.
MODEL = "[[1.5, 0.0, 0.0, 1.5, 0.0]]"  # the old and those of high pressure are ill
REGISTERED = {
    "GradientStep": None,  # a step from a model of public records
    "LabelTables": "",
    "LeafCounts": "n_trees = 12\nmax_depth = 3",
    "ModelSum": "regularization = 0.05",
    "Moments": "",
    "MomentsRegressor": "",
    "NumberSummary": "",
    "Score": f"model = {MODEL}",
    "Summary": "",
    "VoteTally": public_rows(),
}
# What hides a whole site is little disturbed by noise only at an epsilon that promises little.
WIDE = {"VoteTally": 80.0}


def study_settings(name, folder):
    """Return what a study sets for a statistic; public records that it needs go into `folder`."""
    settings = REGISTERED[name]
    if settings is not None:
        return settings
    files = records_parts(folder)
    schema = Study.from_text(study_text()).schema
    public = Public(*schema.encode(folder / "public.csv")[:2])
    return f"start = {json.dumps(start_from(public, classes=[0, 1]))}\n{files}"


def sum_text(name, folder):
    """Return the usual study with this statistic, of numbers if it learns numbers."""
    text = statistic_text(name, study_settings(name, folder))
    text = text.replace("epsilon_max = 3.0", f"epsilon_max = {WIDE.get(name, 3.0)}")
    return as_number(text) if LEARNERS[name].predicts_number else text


class Chunks:
    """A table in chunks of so many records."""

    def __init__(self, X, y, size):
        self.X, self.y, self.size = X, y, size
        self.n_features, self.n_records = X.shape[1], len(y)

    def chunks(self):
        for start in range(0, len(self.y), self.size):
            yield self.X[start : start + self.size], self.y[start : start + self.size]


def make(statistic, **changes):
    """Return the statistic with these settings."""
    if isinstance(statistic, PrivateLearner):
        return clone(statistic).set_params(**changes)
    return statistic.kind(**{"epsilon": 1.0, "delta": DELTA, **statistic.settings, **changes})


def exact(statistic, X, y=None, **whose):
    """Return the statistic fitted without noise."""
    return make(statistic, epsilon=math.inf, delta=0.0).fit(X, y, **whose)


def records(statistic, n, seed=0):
    """Return rows around the unit sphere and labels that the first columns explain."""
    draw = np.random.default_rng(seed)
    X = draw.normal(size=(n, N_FEATURES))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    if statistic.classes is None:
        return X, np.clip(X[:, 0] + 0.1 * draw.normal(size=n), -1, 1)
    places = np.floor((X[:, 0] + 1) / 2 * statistic.classes).astype(int)
    return X, np.clip(places, 0, statistic.classes - 1)
