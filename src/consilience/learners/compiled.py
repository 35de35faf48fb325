"""Compile loops once, keep the machine code where there is a place for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any], *, fast: Any = frozenset({"contract"})) -> Any:
    """Compile without the interpreter's lock; `fast` lists the permitted rounding shortcuts."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(fast)}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # there is no folder to keep compiled code in
        return numba.njit(function, **options)
