"""ARCHITECTURE.md shows the folders as they are; run this file to write its list of rooms anew."""

import ast
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
SOURCE = ROOT / "src" / "consilience"
BEGIN, END = "<!-- rooms -->\n", "<!-- end of rooms -->\n"


def summary(file):
    """Return the first sentence of a module's docstring, without its full stop."""
    return ast.get_docstring(ast.parse(file.read_text())).split("\n")[0].rstrip(".")


def rooms(folder=SOURCE, depth=0):
    """Return the tree of modules as a Markdown list, each with the first line of its docstring."""
    lines = []
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        package = path / "__init__.py"
        if path.is_dir() and package.exists():
            lines += [(depth, f"**{path.name}/** {summary(package)}"), *rooms(path, depth + 1)]
        elif path.suffix == ".py" and path.name != "__init__.py":
            lines.append((depth, f"`{path.name}` {summary(path)}"))
    return lines


def listed():
    """Return the list as it stands in the page, wrapped at 100 columns."""
    parts = []
    for depth, text in rooms():
        indent = "  " * depth
        parts += textwrap.wrap(
            text,
            100,
            initial_indent=f"{indent}- ",
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(parts) + "\n"


def test_the_rooms_of_the_architecture_are_those_of_the_source():
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown == listed(), "write it anew with: python tests/test_architecture.py"


def test_every_room_has_its_mirror_in_the_tests():
    """A folder of the source is tested by a folder, or a file, of the same name in tests/."""
    missing = []
    for package in SOURCE.rglob("__init__.py"):
        room = package.parent.relative_to(SOURCE)
        mirror = ROOT / "tests" / room
        tested = any(mirror.glob("test_*.py")) or mirror.with_name(f"test_{room.name}.py").exists()
        if room.parts and not tested:
            missing.append(str(room))
    assert missing == []


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + listed() + END + rest.partition(END)[2])
