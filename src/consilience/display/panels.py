"""Axes to draw on: those that the caller gives, or those of a new figure of pyplot's."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilience.errors import SettingsError

ACROSS = 3  # panels of a figure, side by side


def can_draw() -> bool:
    """Tell whether matplotlib is installed, which models do without."""
    return find_spec("matplotlib") is not None


def require_drawing() -> None:
    """Refuse to draw without matplotlib, before anything is computed for a chart."""
    if not can_draw():
        raise SettingsError(
            "A chart was asked for, and matplotlib, which draws it, is not installed here. Nothing "
            "was drawn. Install it with: pip install 'consilience[plots]'"
        )


def panels(
    n: int,
    ax: object = None,
    *,
    size: tuple[float, float] = (4.2, 2.8),
    across: int = ACROSS,
    sharey: bool = False,
) -> NDArray[Any]:
    """Return up to `n` axes to draw on.

    Parameters
    ----------
    n
        How many panels there are to draw.
    ax
        None: a new figure of pyplot's, which notebooks show. An Axes or several: as many panels are
        drawn as there are axes. A Figure: its whole area, and pyplot is not used.
    size
        Width and height of a panel in inches, of a figure that is made or has nothing on it yet.
    across
        How many panels stand side by side.
    sharey
        Whether all panels have one scale.
    """
    require_drawing()
    from matplotlib.axes import Axes  # loaded here: it takes a second, and only charts need it
    from matplotlib.figure import Figure, FigureBase

    if ax is None:
        from matplotlib import pyplot

        ax = pyplot.figure(layout="constrained")
    if isinstance(ax, FigureBase):
        columns = min(across, n)
        rows = -(-n // columns)
        if isinstance(ax, Figure) and not ax.axes:
            ax.set_size_inches(size[0] * columns, size[1] * rows)
        made = ax.subplots(rows, columns, squeeze=False, sharey=sharey).ravel()
        for spare in made[n:]:
            spare.remove()
        return np.asarray(made[:n])
    given = np.asarray(ax, dtype=object).ravel()
    if not (len(given) and all(isinstance(one, Axes) for one in given)):
        raise SettingsError(
            "The parameter 'ax' must be an Axes of matplotlib, several of them, or a Figure. Got "
            f"a {type(ax).__name__} instead. Nothing was drawn. To write a file, call "
            ".figure.savefig(path) of an Axes that is returned."
        )
    return given[:n]
