"""Charts are drawn on the caller's axes, on a figure, or on one of pyplot's."""

import sys

import matplotlib as mpl
import pytest

mpl.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure

from consilience.display.panels import panels
from consilience.errors import SettingsError


def test_pyplot_knows_a_figure_that_is_made_and_no_other():
    before = pyplot.get_fignums()
    figure = Figure(layout="constrained")
    assert [axes.figure for axes in panels(4, figure)] == [figure] * 4
    assert tuple(figure.get_size_inches()) == pytest.approx((3 * 4.2, 2 * 2.8))
    assert len(figure.axes) == 4
    assert pyplot.get_fignums() == before
    made = panels(2)
    assert pyplot.gcf() is made[0].figure
    pyplot.close(made[0].figure)


def test_axes_that_are_given_are_drawn_on_as_far_as_they_go():
    figure = Figure()
    given = figure.subplots(1, 2)
    assert panels(5, given[0]).tolist() == [given[0]]
    assert panels(5, given).tolist() == list(given)
    assert panels(1, list(given)).tolist() == [given[0]]
    with pytest.raises(SettingsError, match=r"savefig"):
        panels(1, "errors.png")


def test_without_matplotlib_a_chart_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as Python marks what is not there
    with pytest.raises(SettingsError, match=r"pip install 'consilience\[plots\]'"):
        panels(1)
