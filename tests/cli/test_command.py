import json
from dataclasses import dataclass
from typing import Annotated

import pytest
from typer import Argument, Option
from typer.testing import CliRunner

from consilience.cli.command import Answer, Commands


@dataclass(frozen=True, kw_only=True)
class Shape:
    sides: Annotated[int, Option(help="How many sides.")]
    colour: Annotated[list[str] | None, Option(help="A colour.")] = None


@pytest.fixture
def invoke():
    commands = Commands("Shapes.")

    @commands.add("draw", "draw circle")
    def draw(
        name: Annotated[str, Argument(help="A name.")],
        shape: Shape,
        size: Annotated[float, Option(help="How large.")] = 1.0,
    ) -> Answer:
        """Draw a shape."""
        facts = {"name": name, "shape": vars(shape), "size": size}
        return Answer(facts, f"{name} with {shape.sides} sides", code=3 if size < 0 else 0)

    @commands.add("wait", "wait")
    def wait() -> None:
        """Do nothing."""

    return lambda *arguments: CliRunner().invoke(commands, list(arguments))


def test_fields_of_a_dataclass_become_options(invoke):
    shown = invoke("draw", "it", "--sides", "3", "--colour", "red", "--colour", "blue", "--json")
    assert json.loads(shown.stdout) == {
        "name": "it",
        "shape": {"sides": 3, "colour": ["red", "blue"]},
        "size": 1.0,
    }
    assert invoke("draw", "it", "--sides", "3").stdout == "it with 3 sides\n"
    assert invoke("draw", "it").exit_code == 2  # a field without a default is required


def test_help_lists_options_in_the_order_of_the_parameters(invoke):
    shown = invoke("draw", "--help").stdout
    places = [shown.index(name) for name in ("--sides", "--colour", "--size", "--json", "Example:")]
    assert places == sorted(places)
    assert "Draw a shape." in shown


def test_the_exit_code_is_that_of_the_answer(invoke):
    shown = invoke("draw", "it", "--sides", "3", "--size", "-1")
    assert (shown.exit_code, shown.stdout) == (3, "it with 3 sides\n")


def test_only_commands_that_answer_take_json(invoke):
    assert invoke("wait").exit_code == 0
    assert invoke("wait", "--json").exit_code == 2


def test_text_of_others_cannot_hide_lines_of_an_answer(invoke):
    shown = invoke("draw", "a\x1b[1A\x1b[2K\u202eb", "--sides", "3")
    assert shown.stdout == "a\\u{1b}[1A\\u{1b}[2K\\u{202e}b with 3 sides\n"
