"""What `make wheel` runs in a clean environment: all of the package, and one training."""

import importlib
import pkgutil

import consilience

NOT_INSTALLED = ("consilience.adapters.flower",)  # has an environment of its own
for module in pkgutil.walk_packages(consilience.__path__, "consilience."):
    if module.name not in NOT_INSTALLED:
        importlib.import_module(module.name)
for name in consilience.__all__:
    getattr(consilience, name)
learner = consilience.PrivateLogisticRegression(epsilon=1.0, classes=[0, 1])
fitted = learner.fit([[0.0], [0.5], [1.0], [0.8]], [0, 0, 1, 1])
fitted.predict([[0.7]])
if not repr(fitted.guarantee_).startswith("Guarantee(epsilon=1, delta=0, per record, replace-one"):
    raise SystemExit(f"The installed package states {fitted.guarantee_}.")
