"""Fit interpret's DPExplainableBoostingClassifier on arrays handed over by peers.py.

Runs in an environment of its own. Each line of standard input is a JSON request,
{"folder", "types", "bounds", "delta", "fits": [{"epsilon", "seed", "settings"}, ...]}; each line
of output is its answer: the library's version and, for each fit, test error, AUC and elapsed and
processor seconds. The folder holds X_train, y_train, X_test and y_test as .npy files; `types` says
of each column whether it is "continuous" or "nominal", and `bounds` between which numbers it lies.
"""

import json
import sys
import time
import warnings
from pathlib import Path

import interpret
import numpy as np
import sklearn
from interpret.privacy import DPExplainableBoostingClassifier
from sklearn.metrics import roc_auc_score


def booster(request: dict, fit: dict) -> DPExplainableBoostingClassifier:
    return DPExplainableBoostingClassifier(
        feature_types=request["types"],
        privacy_bounds=dict(enumerate(map(tuple, request["bounds"]))),
        epsilon=fit["epsilon"],
        delta=request["delta"],
        n_jobs=1,
        random_state=fit["seed"],
        **fit["settings"],
    )


def answer(request: dict) -> list[dict]:
    X, y, X_test, y_test = (
        np.load(Path(request["folder"]) / f"{name}.npy")
        for name in ("X_train", "y_train", "X_test", "y_test")
    )
    # Not counted: the first fit in a process loads and warms up.
    first = {"epsilon": 1.0, "seed": 0, "settings": {"max_rounds": 2}}
    booster(request, first).fit(X[:200], np.arange(200) % 2)
    answers = []
    for fit in request["fits"]:
        learner = booster(request, fit)
        wall, processor = time.perf_counter(), time.process_time()
        learner.fit(X, y)
        seconds, processor = time.perf_counter() - wall, time.process_time() - processor
        chances = learner.predict_proba(X_test)[:, 1]
        answers.append(
            {
                "error": float(np.mean((chances > 0.5) != y_test)),
                "auc": float(roc_auc_score(y_test, chances)),
                "seconds": seconds,
                "processor": processor,
            }
        )
    return answers


def main() -> None:
    warnings.simplefilter("ignore")
    versions = f"interpret-core {interpret.__version__}, scikit-learn {sklearn.__version__}"
    for line in sys.stdin:
        request = json.loads(line)
        fits = answer(request) if request["fits"] else []
        print(json.dumps({"versions": versions, "fits": fits}), flush=True)


if __name__ == "__main__":
    main()
