"""A ridge regression for tests whose labels lie within 1."""

from dataclasses import dataclass

from consilience.learners import linear


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateRidge(linear.PrivateRidge):
    label_bound: float | None = 1.0
