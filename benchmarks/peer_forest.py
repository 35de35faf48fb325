"""Fit diffprivlib's RandomForestClassifier on arrays handed over by forests.py.

Runs in an environment of its own. Each line of standard input is a JSON request,
{"folder", "low", "high", "fits": [{"epsilon", "seed", "n_estimators", "max_depth"}, ...]}; each
line of output is its answer: the library's version and, for each fit, AUC on the test records and
elapsed and processor seconds. The folder holds X_train, y_train, X_test and y_test as .npy files;
low and high are the declared bounds of each feature.

With shuffle=False, its default, records go to trees in order of their place; here they come in
random order anyway.
"""

import json
import sys
import time
import warnings
from pathlib import Path

import diffprivlib
import numpy as np
import sklearn
from diffprivlib.models import RandomForestClassifier
from sklearn.metrics import roc_auc_score


def forest(request: dict, fit: dict) -> RandomForestClassifier:
    return RandomForestClassifier(
        fit["n_estimators"],
        epsilon=fit["epsilon"],
        bounds=(np.array(request["low"]), np.array(request["high"])),
        classes=[0, 1],
        max_depth=fit["max_depth"],
        random_state=fit["seed"],
    )


def answer(request: dict) -> list[dict]:
    X, y, X_test, y_test = (
        np.load(Path(request["folder"]) / f"{name}.npy")
        for name in ("X_train", "y_train", "X_test", "y_test")
    )
    # Not counted: the first fit in a process loads and warms up.
    forest(request, {"n_estimators": 2, "epsilon": 1.0, "max_depth": 2, "seed": 0}).fit(
        X[:200], np.arange(200) % 2
    )
    answers = []
    for fit in request["fits"]:
        learner = forest(request, fit)
        wall, processor = time.perf_counter(), time.process_time()
        learner.fit(X, y)
        seconds, processor = time.perf_counter() - wall, time.process_time() - processor
        auc = float(roc_auc_score(y_test, learner.predict_proba(X_test)[:, 1]))
        answers.append({"auc": auc, "seconds": seconds, "processor": processor})
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
