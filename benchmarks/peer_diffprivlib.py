"""Fit diffprivlib's LogisticRegression on arrays handed over by accuracy.py and peers.py.

Runs in an environment of its own. Each line of standard input is a JSON request,
{"folder", "fits": [{"epsilon", "seed", "regularization", "tol", "max_iter"}, ...]}; each line of
output is its answer: the library's version and, for each fit, test error, AUC (of two classes),
elapsed and processor seconds, iterations and whether the solver converged. The folder holds
X_train, y_train, X_test and y_test as .npy files. Without a regularization C stays at the
library's default, 1.

diffprivlib minimises mean loss + (1/2nC)|f|^2, so this project's regularization Lambda corresponds
to C = 1/(n Lambda).
"""

import json
import sys
import time
import warnings
from pathlib import Path

import diffprivlib
import numpy as np
import sklearn
from diffprivlib.models import LogisticRegression
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import roc_auc_score


def answer(request: dict) -> list[dict]:
    X, y, X_test, y_test = (
        np.load(Path(request["folder"]) / f"{name}.npy")
        for name in ("X_train", "y_train", "X_test", "y_test")
    )
    # Not counted: the first fit in a process loads and warms up.
    LogisticRegression(epsilon=1.0, data_norm=1.0, fit_intercept=False).fit(
        X[:200], np.arange(200) % 2
    )
    answers = []
    for fit in request["fits"]:
        learner = LogisticRegression(
            epsilon=fit["epsilon"],
            data_norm=1.0,
            C=1.0 / (len(X) * fit["regularization"]) if "regularization" in fit else 1.0,
            fit_intercept=False,
            tol=fit["tol"],
            max_iter=fit["max_iter"],
            random_state=fit["seed"],
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            begun, processor = time.perf_counter(), time.process_time()
            learner.fit(X, y)
            seconds, processor = time.perf_counter() - begun, time.process_time() - processor
        answers.append(
            {
                "error": float(np.mean(learner.predict(X_test) != y_test)),
                "auc": float(roc_auc_score(y_test, learner.decision_function(X_test))),
                "seconds": seconds,
                "processor": processor,
                "iterations": int(learner.n_iter_[0]),
                "converged": not any(issubclass(w.category, ConvergenceWarning) for w in caught),
            }
        )
    return answers


def main() -> None:
    warnings.simplefilter("ignore")
    versions = ", ".join(
        f"{package.__name__.replace('sklearn', 'scikit-learn')} {package.__version__}"
        for package in (diffprivlib, sklearn, np)
    )
    for line in sys.stdin:
        request = json.loads(line)
        print(
            json.dumps({"versions": versions, "fits": answer(request) if request["fits"] else []}),
            flush=True,
        )


if __name__ == "__main__":
    main()
