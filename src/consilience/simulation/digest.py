"""Digests of code: a cell of a checkpoint is used again only if the same code would run it."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

# Whatever can change a number. Of this folder, sweep.py and report.py only carry numbers.
CODE = (
    "aggregators",
    "evaluation",
    "learners",
    "privacy",
    "simulation/cell.py",
    "simulation/digest.py",
    "simulation/division.py",
    "simulation/once.py",
    "simulation/simulate.py",
    "simulation/together.py",
    "statistics",
    "tables",
)


@cache  # the code that runs is the one that was loaded, even if its files have changed since
def code_digest() -> str:
    """Return a digest of the code that a cell runs through.

    Comments, docstrings and layout change no number, so they are not part of it.
    """
    here = Path(__file__).parents[1]
    files = sorted(
        {
            file
            for name in CODE
            for file in (*here.glob(name), *here.glob(f"{name}/**/*.py"))
            if file.is_file()
        }
    )
    return hashlib.sha256(
        "\0".join(statements_of(file.read_text(encoding="utf-8")) for file in files).encode()
    ).hexdigest()


def statements_of(source: str) -> str:
    """Return what Python source does, without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body[: ast.get_docstring(node, clean=False) is not None] = []
    return ast.dump(tree)


def describe_function(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return what identifies a function in every process: where it is, what it does and holds.

    Functions that it calls are not looked into.
    """
    held = inspect.getclosurevars(function).nonlocals
    facts = (function.__module__, function.__qualname__)
    defaults = getattr(function, "__defaults__", None)
    return (*facts, defaults, held, _describe_code(function.__code__))


def _describe_code(code: CodeType) -> tuple[Any, ...]:
    constants = [
        _describe_code(constant) if inspect.iscode(constant) else repr(constant)
        for constant in code.co_consts
    ]
    return (code.co_code, code.co_names, constants)
