"""What every part of a simulation checks its arguments with."""

import reprlib

import numpy as np

from consilience.errors import SettingsError


def is_whole(value: object) -> bool:
    """Tell whether `value` is a whole number above zero, and not a truth value."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) > 0


def require(name: str, value: object, fits: bool, must: str) -> None:
    """Refuse an argument of `simulate` that does not fit."""
    if not fits:
        raise SettingsError(
            f"The {name!r} parameter of simulate must be {must}. Got {reprlib.repr(value)} instead."
        )
