"""Other libraries, each in an environment of its own, and processes there that fit for us.

They pin other versions of packages than this project, so their environments are made on first use
beside the project, and asked through pipes: a line of JSON to ask, a line of JSON as the answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

HERE = Path(__file__).resolve().parent
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
Ask = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Peer:
    """A library, the packages of its environment, and the variable that names another one."""

    name: str
    packages: tuple[str, ...]
    variable: str


DIFFPRIVLIB = Peer(
    "diffprivlib", ("diffprivlib==0.6.6", "scikit-learn==1.7.2"), "CONSILIENCE_DIFFPRIVLIB"
)
INTERPRET = Peer("interpret", ("interpret-core==0.7.8",), "CONSILIENCE_INTERPRET")


def find_peer(console: Console, peer: Peer = DIFFPRIVLIB) -> str | None:
    """Return a Python that has the peer, making an environment for it when there is none."""
    given = os.environ.get(peer.variable)
    if given:
        return given
    folder = HERE.parent / f".venv-{peer.name}"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = folder / ".ready"
    if not ready.exists():
        console.print(f"Setting up {folder.name} (packages are downloaded once)")
        try:
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            (folder / ".gitignore").write_text("*\n")
            install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([str(python), *install, *peer.packages], check=True)
        except subprocess.CalledProcessError:
            console.print(f"{peer.name} could not be installed: it is left out.")
            return None
        ready.touch()
    return str(python)


@contextmanager
def open_peer(python: str | None, script: str) -> Iterator[Ask | None]:
    """Start a script in a peer's environment and yield a function that asks it; None without."""
    if python is None:
        yield None
        return
    command = [python, str(HERE / script)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **ONE_THREAD}, **pipes) as process:

        def ask(request: dict[str, Any]) -> dict[str, Any]:
            print(json.dumps(request), file=process.stdin, flush=True)
            answer = process.stdout.readline()
            if not answer:
                raise RuntimeError(f"{script} ended without an answer; its own message is above.")
            return dict(json.loads(answer))

        yield ask
