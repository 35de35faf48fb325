"""Write the tutorials as notebooks: ``python docs/notebooks.py`` writes docs/tutorials/*.ipynb.

The page is the only source: its programs become cells, and what they print is left out.
tests/test_docs.py compares the files with what this script makes, and runs them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

FOLDER = Path(__file__).with_name("tutorials")
BLOCK = re.compile(r"```(python|text|sh|csv \S+)\n(.*?)```\n", flags=re.S)
HERE = "This page as a [notebook]"  # which the notebook itself does not say
# What a notebook does in place of a second terminal, and of copying from one command to the next.
SERVE = """\
import subprocess
import time

hub = subprocess.Popen(["consilience", "hub", "serve"])
time.sleep(5)"""
INVITED = 'INVITATION = max(" ".join(said).split(), key=len)'
APPROVED = 'DIGEST = " ".join(said).split("--approved ")[1].split()[0]'
FETCH = """\
for _ in range(30):  # the hub needs a moment
    !{line}
    if _exit_code == 0:
        break
    time.sleep(2)"""


def make_notebook(page: Path) -> nbformat.NotebookNode:
    """Return a tutorial as a notebook without outputs."""
    text = page.read_text(encoding="utf-8")
    cells, end = [], 0
    for found in BLOCK.finditer(text):
        cells.append(new_markdown_cell(_words(text[end : found.start()])))
        kind, program = found.groups()
        if kind != "text":
            cells.append(new_code_cell(_cell(kind, program)))
        end = found.end()
    cells.append(new_markdown_cell(_words(text[end:])))
    if any("hub = subprocess" in cell.source for cell in cells):
        cells.append(new_code_cell("hub.terminate()"))
    cells = [cell for cell in cells if cell.source]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # a random one would change with every writing
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def _words(text: str) -> str:
    blocks = text.strip().split("\n\n")
    return "\n\n".join(block for block in blocks if not block.startswith(HERE))


def _cell(kind: str, program: str) -> str:
    if kind == "python":
        return program.strip()
    if kind == "sh":
        return "\n".join(_commands(program.replace("\\\n", " ")))
    return f"%%writefile {kind.removeprefix('csv ')}\n{program.strip()}"


def _commands(program: str) -> Iterator[str]:
    """Yield the lines of a cell that runs commands."""
    for given in program.strip().splitlines():
        line = re.sub(r" {2,}", " ", given)
        line = re.sub(r"\b(INVITATION|DIGEST)\b", r"{\1}", line)
        if line == "consilience hub serve":
            yield SERVE
        elif " hub invite " in line:
            yield f"said = !{line}\n{INVITED}"
        elif "--dry-run" in line:
            yield f"said = !{line}\n{APPROVED}"
        elif " site submit " in line:
            yield f"!{line} < /dev/null"  # at a terminal it would wait for an answer
        elif " site fetch " in line:
            yield FETCH.format(line=line)
        else:
            yield f"!{line}"


def write(page: Path) -> str:
    """Return the text of a tutorial's notebook."""
    return nbformat.writes(make_notebook(page)) + "\n"


if __name__ == "__main__":
    for page in sorted(FOLDER.glob("*.md")):
        page.with_suffix(".ipynb").write_text(write(page), encoding="utf-8")
