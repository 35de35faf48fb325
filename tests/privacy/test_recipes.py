"""Each privacy recipe exists once, in the trusted core: this scan finds copies anywhere else.

A recipe is: calibrating vector noise, the scale of the closing noise, drawing by event, the
variance of an event, and turning events into a guarantee. Elsewhere they are called, not written
again.
"""

import ast
from pathlib import Path

import pytest

import consilience

SRC = Path(consilience.__file__).parent
CORE = "privacy/"

# Functions and classes of the core whose use is a recipe, and what to call instead.
CALLS = {
    "gaussian_sigma": "vector_noise.calibrate_vector or calibrate_shared",
    "calibrate_scale": "vector_noise.calibrate_event",
    "L2Laplace": "vector_noise.calibrate_vector or vector_event",
    "Gaussian": "vector_noise.calibrate_vector or vector_event",
    "Closing": "vector_noise.closing_event",
    "gaussian": "vector_noise.draw_vector",
    "l2_laplace": "vector_noise.draw_vector",
    "close": "vector_noise.close_vector",
}
VECTOR_EVENTS = {"L2Laplace", "Gaussian", "ObjectiveL2Laplace", "ObjectiveGaussian", "Objective"}
CLOSING_SHARE = "CLOSING_SHARE"  # code that reads it computes a share of epsilon

# What is allowed outside, and why.
ALLOWED = {
    ("auditing/", "isinstance"): "an attack knows the density of each noise apart from the core",
    ("learners/perturbation.py", "calibrate_scale"): "a ridge is chosen by the scale it would need",
}


def names_from_core(tree):
    """Return what the module imported from the core, by the name it uses."""
    return {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("consilience.privacy")
        for alias in node.names
    }


def called_name(node, imported):
    """Return the core's name of a called function: by its imported name, or module.name."""
    if isinstance(node.func, ast.Name):
        return imported.get(node.func.id)
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        module = imported.get(node.func.value.id)
        return node.func.attr if module in ("accounting", "mechanisms", "vector_noise") else None
    return None


def is_seeded_void(node):
    return (
        isinstance(node.func, ast.Attribute)
        and node.func.attr == "void"
        and any(isinstance(a, ast.Constant) and a.value == "seeded noise" for a in node.args)
    )


def recipes(text):
    """Yield (line, recipe) for each privacy recipe written in this source text."""
    tree = ast.parse(text)
    imported = names_from_core(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name == CLOSING_SHARE:
                yield node.lineno, CLOSING_SHARE
        if not isinstance(node, ast.Call):
            continue
        if is_seeded_void(node):
            yield node.lineno, "seeded noise"
        elif isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
            kinds = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
            if {imported.get(kind) for kind in kinds} & VECTOR_EVENTS:
                yield node.lineno, "isinstance"
        elif called_name(node, imported) in CALLS:
            yield node.lineno, called_name(node, imported)


def copies():
    for path in sorted(SRC.rglob("*.py")):
        where = path.relative_to(SRC).as_posix()
        if where.startswith(CORE):
            continue
        for line, recipe in recipes(path.read_text()):
            if not any(where.startswith(room) and recipe == what for room, what in ALLOWED):
                yield f"{where}:{line} {recipe}; use {CALLS.get(recipe, 'privacy/')}"


def test_privacy_recipes_stand_in_the_core_only():
    assert list(copies()) == []


def test_every_exception_is_still_needed():
    used = {
        (room, what)
        for path in SRC.rglob("*.py")
        for _, recipe in recipes(path.read_text())
        for room, what in ALLOWED
        if path.relative_to(SRC).as_posix().startswith(room) and recipe == what
    }
    assert used == set(ALLOWED)


@pytest.mark.parametrize(
    "pasted",
    [
        "from consilience.privacy.accounting import gaussian_sigma\n"
        "sigma = gaussian_sigma(epsilon=1.0, delta=1e-5, sensitivity=1.0)",
        "from consilience.privacy.accounting import L2Laplace as Noise\n"
        "event = Noise(sensitivity=1.0, scale=1.0, unit='record', neighbours='replace-one')",
        "from consilience.privacy import accounting\n"
        "event = accounting.Closing(dimension=3, distance=d, scale=s, **who)",
        "from consilience.privacy.vector_noise import CLOSING_SHARE\n"
        "scale = 2 * math.sqrt(d) * distance / (CLOSING_SHARE * epsilon)",
        "from consilience.privacy import vector_noise\n"
        "main = (1 - vector_noise.CLOSING_SHARE) * epsilon",
        "from consilience.privacy.mechanisms import gaussian, l2_laplace\n"
        "drawn = gaussian(3, event=event, source=source)",
        "from consilience.privacy.mechanisms import close\n"
        "vector = close(vector, event=closing, source=source)",
        "from consilience.privacy.accounting import Gaussian, ObjectiveGaussian\n"
        "variance = e.sigma**2 if isinstance(e, Gaussian | ObjectiveGaussian) else e.scale**2",
        "from consilience.privacy.guarantee import Guarantee\n"
        "own = Guarantee.void('seeded noise', unit='record', neighbours='replace-one')",
    ],
)
def test_a_pasted_recipe_is_found(pasted):
    assert list(recipes(pasted))


def test_calling_the_core_is_no_recipe():
    assert not list(
        recipes(
            "from consilience.privacy.vector_noise import calibrate_vector, closing_event\n"
            "from consilience.privacy.accounting import Gaussian\n"
            "noise: Gaussian = calibrate_vector(1.0, epsilon=1.0, delta=0.1, **who)\n"
            "file.close()\n"
        )
    )
