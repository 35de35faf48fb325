"""Write the pages of the benchmarks: prose ends at 100 columns, tables stay as they are."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

COLUMNS = 100
KEPT = ("|", "#", "!")  # tables, headings and pictures have one line each


def write_page(path: Path, text: str) -> None:
    """Write a page of Markdown that has no code blocks, with every line of prose wrapped."""
    lines = [line if line.startswith(KEPT) else _wrap(line) for line in text.splitlines()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _wrap(line: str) -> str:
    indent = " " * len(re.match(r" *(- )?", line)[0])  # what follows a bullet is part of its item
    return textwrap.fill(
        line,
        COLUMNS,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
