"""The exact models of many sites, trained together and measured together.

The models are those that `fit` with ``epsilon=math.inf`` returns site by site, up to the tolerance
of the solver, at the price of a few matrix products. This is for simulations with thousands of
sites, whose records are public.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.base import clone

from consilience.evaluation.measures import f1_scores
from consilience.learners.ball import into_ball, out_of_ball
from consilience.learners.base import PrivateLearner
from consilience.learners.erm import Loss
from consilience.learners.inputs import label_codes
from consilience.learners.perturbation import LinearTask, plan_perturbation
from consilience.tables.public import Features

Array = NDArray[Any]
Learner = PrivateLearner[Any, Any]
# Measures the models with these coefficients and intercepts.
Measuring = Callable[[Array, Array], list[dict[str, float]]]

_SITES = 512  # measured side by side
_ENTRIES = 1 << 21  # scores held at a time by a thread: 16 MB


def fit_together(
    learner: Learner, X: Features, y: Array, sites: Sequence[Array], n_threads: int | None = None
) -> list[Learner]:
    """Return one fitted copy of an exact linear learner for each site.

    `sites` lists the rows of each site's records. Every site must have records, and classes must be
    declared: `learner.can_train_together()` says so. Settings are checked by fitting the first site
    alone.

    Privacy
    -------
    None: ``epsilon`` must be infinite.
    """
    # Loaded here: its compiler would cost every start 50 MB.
    from consilience.learners.batch import SiteProblems, solve_many

    assert math.isinf(learner.epsilon)
    first = clone(learner).fit(X[sites[0]], y[sites[0]])
    rows = np.concatenate(sites)
    sizes = np.array([len(part) for part in sites])
    ball, (loss, problems) = into_ball(X[rows], first), _problems(first, y[rows])
    dimension = ball.shape[1]
    plans = {
        n: plan_perturbation(first, LinearTask(loss, dimension, n, n, len(problems)))
        for n in np.unique(sizes).tolist()
    }
    trainings = SiteProblems(
        loss,
        sites=np.repeat(np.arange(len(sites)), sizes),
        n_sites=len(sites),
        regularization=np.array([plans[n].regularization for n in sizes.tolist()]),
        tolerance=np.array([plans[n].tolerance for n in sizes.tolist()]),
    )
    parts = [solve_many(ball, labels, trainings, n_threads=n_threads).coef for labels in problems]
    # (site, output, dimension): one output for each problem, or all outputs of the only problem.
    vectors = np.stack(parts, axis=1) if loss.n_outputs == 1 else parts[0]
    vectors = vectors * getattr(first, "label_bound", 1.0)
    fitted = []
    for vector, size in zip(vectors, sizes.tolist(), strict=True):
        model = copy.copy(first)
        model.restore_state(
            dict(zip(("coef", "intercept"), out_of_ball(vector, first), strict=True))
        )
        if first.predicts_number:
            model.coef_ = model.coef_.ravel()
        model.public_size_ = size if first.neighbours == "replace-one" else first.public_size_
        fitted.append(model)
    return fitted


def _problems(learner: Learner, labels: Array) -> tuple[Loss, list[Array]]:
    """Return a learner's loss, and the labels of its problem, or of each class against the rest."""
    if learner.predicts_number:
        return learner.loss(1), [np.clip(labels / learner.label_bound, -1.0, 1.0)]
    n_classes = len(learner.classes_)
    loss, codes = (
        learner.loss(n_classes),
        label_codes(type(learner).__name__, learner.classes_, labels),
    )
    if loss.n_outputs > 1:
        return loss, [codes]
    positive = [1] if n_classes == 2 else range(n_classes)
    return loss, [np.where(codes == code, 1.0, -1.0) for code in positive]


def measure_together(
    learners: Sequence[Learner], X: Features, y: Array, n_threads: int | None = None
) -> list[dict[str, float]]:
    """Return what can be counted of many linear learners: error and F1, or all of regressors.

    The numbers are those of `evaluation.measures`, but scores are computed in blocks of sites, and
    neither kept nor sorted.
    """
    coef = np.stack([np.atleast_2d(one.coef_) for one in learners])
    intercept = np.stack([np.atleast_1d(one.intercept_) for one in learners])
    classes = getattr(learners[0], "classes_", None)
    measure = _squares(X, y) if classes is None else _counts(X, y, np.asarray(classes))
    blocks = [slice(begin, begin + _SITES) for begin in range(0, len(learners), _SITES)]
    with ThreadPoolExecutor(n_threads) as pool:
        measured = pool.map(lambda block: measure(coef[block], intercept[block]), blocks)
        return [metrics for block in measured for metrics in block]


def _scores(X: Features, coef: Array, intercept: Array) -> Iterator[tuple[slice, Array]]:
    """Yield the scores (row, site, output) of a block of rows at a time."""
    W, b = coef.reshape(-1, coef.shape[2]).T, intercept.ravel()
    step = max(1, _ENTRIES // len(b))
    for begin in range(0, X.shape[0], step):
        rows = slice(begin, begin + step)
        yield rows, np.asarray(X[rows] @ W + b).reshape(-1, *intercept.shape)


def _counts(X: Features, y: Array, classes: Array) -> Measuring:
    every = np.unique(np.concatenate([classes, y]))
    truth = np.zeros((len(y), len(every)))
    truth[np.arange(len(y)), np.searchsorted(every, y)] = 1.0
    X, truth = _distinct(X, truth)
    places = np.searchsorted(every, classes)

    def measure(coef: Array, intercept: Array) -> list[dict[str, float]]:
        confusion = np.zeros((len(coef), len(every), len(every)))  # (site, true, predicted)
        for rows, scores in _scores(X, coef, intercept):
            # Sums of whole numbers: exact in any order, so that matrix products may count.
            if len(classes) == 2:
                second = (scores[:, :, 0] > 0).T.astype(np.float64)
                confusion[:, :, places[1]] += second @ truth[rows]
                continue
            predicted = scores.argmax(axis=2)
            for code, place in enumerate(places):
                confusion[:, :, place] += (predicted == code).T.astype(np.float64) @ truth[rows]
        if len(classes) == 2:
            confusion[:, :, places[0]] = truth.sum(axis=0) - confusion[:, :, places[1]]
        return _score_confusion(confusion)

    return measure


def _score_confusion(confusion: Array) -> list[dict[str, float]]:
    found = {name: score(confusion) for name, score in f1_scores(confusion.shape[1]).items()}
    found = {"error": 1 - found["f1_micro"], **found}  # the micro F1 is the share of right answers
    return [
        dict(zip(found, map(float, values), strict=True))
        for values in zip(*found.values(), strict=True)
    ]


def _squares(X: Features, y: Array) -> Measuring:
    spread = float(np.square(y - y.mean()).mean())

    def measure(coef: Array, intercept: Array) -> list[dict[str, float]]:
        squares, sizes = np.zeros(len(coef)), np.zeros(len(coef))
        for rows, scores in _scores(X, coef, intercept):
            gaps = np.abs(scores[:, :, 0] - y[rows, None])
            squares += np.square(gaps).sum(axis=0)
            sizes += gaps.sum(axis=0)
        return [
            {"rmse": math.sqrt(square), "mae": size}
            | ({"r2": 1 - square / spread} if spread > 0 else {})
            for square, size in zip(
                (squares / len(y)).tolist(), (sizes / len(y)).tolist(), strict=True
            )
        ]

    return measure


def _distinct(X: Features, truth: Array) -> tuple[Features, Array]:
    """Return each distinct row once, with its number of records by class.

    Encoded tables have many equal rows.
    """
    if sparse.issparse(X):
        return X, truth
    # Rows with the same irrational combination are taken for equal, and then compared: a row that
    # only looked equal keeps a place of its own.
    key = X @ np.sqrt(np.arange(2.0, X.shape[1] + 2))
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    if len(first) > len(key) // 2:
        return X, truth
    alone = np.flatnonzero((X != X[first[place]]).any(axis=1))
    place[alone] = len(first) + np.arange(len(alone))
    counts = np.zeros((len(first) + len(alone), truth.shape[1]))
    np.add.at(counts, place, truth)
    return X[np.concatenate([first, alone])], counts
