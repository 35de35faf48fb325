"""Members that vote on made-up records, and tallies of given votes, for tests of distillation."""

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import LinearSVC
from sklearn.tree import DecisionTreeClassifier

from consilience import Noise
from consilience.aggregators.distillation.tally import Tally
from consilience.aggregators.members import Member
from consilience.tables.public import Public

KINDS = [DecisionTreeClassifier, GaussianNB, LogisticRegression, KNeighborsClassifier, LinearSVC]


def made_up(n_records=600, n_features=4, n_classes=3, seed=1):
    source = Noise(seed=seed).open()
    X = source.normal(n_records * n_features).reshape(n_records, n_features)
    X /= np.linalg.norm(X, axis=1).max() * 1.01
    weights = source.normal(n_features * n_classes).reshape(n_features, n_classes) * 6
    return X, (X @ weights + source.normal(n_records * n_classes).reshape(n_records, -1)).argmax(
        axis=1
    )


def sites(X, y, n_sites, kinds=KINDS):
    return [kinds[i % len(kinds)]().fit(X[i::n_sites], y[i::n_sites]) for i in range(n_sites)]


def vectors(n_members, n_classes, n_features, seed=3):
    rows = 1 if n_classes == 2 else n_classes
    draws = (
        Noise(seed=seed)
        .open()
        .normal(n_members * rows * n_features)
        .reshape(n_members, rows, n_features)
    )
    return [Member(None, np.arange(n_classes), None, (), 5, w, np.zeros(rows)) for w in draws]


def tally_of(votes, X, n_classes=2):
    """Return the tally of `votes` (member, record)."""
    counts = n_classes * (votes[:, :, None] == np.arange(n_classes)).sum(axis=0)
    return Tally(
        counts.astype(np.int64),
        n_classes,
        len(votes),
        np.arange(n_classes),
        Public(X),
        (None,) * len(votes),
    )
