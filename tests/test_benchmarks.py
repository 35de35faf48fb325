"""Every benchmark script still runs: in miniature, on made-up tables, in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
# They measure time and memory in many processes, or play many attacks; what they call has tests of
# its own. The quick tests load them and find every constant of their miniatures.
SLOW = (
    *("backends", "forest_speed", "hub_load", "large_site", "many_members", "planning"),
    "poisoning",
)
NEEDS_OTHERS = {  # of a process or an environment that the tests of adapters/ start
    "flower_relay": "needs Flower's environment; tests/adapters/test_flower.py runs its scenarios",
    "peer_diffprivlib": "a peer's process, started by accuracy.py in the peer's environment",
    "peer_interpret": "a peer's process, started by peers.py in the peer's environment",
    "peer_forest": "a peer's process, started by forests.py in the peer's environment",
}


def small():
    spec = importlib.util.spec_from_file_location("miniature", FOLDER / "miniature.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SMALL


def test_every_script_has_its_miniature():
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"environments", "miniature", "pages"}
    assert scripts == set(small()) | set(NEEDS_OTHERS)


@pytest.fixture(scope="module")
def miniatures():
    """A process that has imported what scripts need, and forks one for each."""
    with subprocess.Popen(
        [sys.executable, FOLDER / "miniature.py"],
        env={**os.environ, "MPLBACKEND": "Agg"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


def test_slow_scripts_load_and_have_what_their_miniatures_change(miniatures, tmp_path):
    for name in SLOW:
        folder = tmp_path / name
        folder.mkdir()
        ended, said = run(miniatures, name, folder, load_only=True)
        assert ended == "0\n", said[-3000:]


def run(miniatures, name, folder, *, load_only=False):
    miniatures.stdin.write(json.dumps([name, str(folder), load_only]) + "\n")
    miniatures.stdin.flush()
    return miniatures.stdout.readline(), (folder / "said").read_text()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.soak] if name in SLOW else [])
        for name in sorted(small())
    ],
)
def test_a_script_runs_in_miniature(name, miniatures, tmp_path):
    ended, said = run(miniatures, name, tmp_path)
    assert ended == "0\n", said[-3000:]
    shown = said + "".join(path.read_text() for path in tmp_path.rglob("*.md"))
    assert "|---" in shown  # a table was made
