"""The source stays tidy: few root modules, few parameters, few untyped values, no name tables.

``python tests/test_house.py [SOURCE]`` prints the same counts for any state of the source.
"""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "consilience"
METHODS = {  # the classes that learners and aggregators are; naming three of them is a table
    "Average",
    "FeatureMethod",
    "PooledCounts",
    "PrivateAdaBoostClassifier",
    "PrivateForestClassifier",
    "PrivateLinearSVC",
    "PrivateLogisticRegression",
    "PrivateRidge",
    "PrivateTreeClassifier",
    "PublicBlend",
    "SiteBoosting",
    "SoftLabelDistillation",
    "VoteDistillation",
    "WeightedVote",
}


def trees(source):
    """Yield each module's path and syntax tree."""
    for path in sorted(source.rglob("*.py")):
        yield str(path.relative_to(source)), ast.parse(path.read_text())


def functions(source):
    """Yield (module, name, number of parameters, lines) of every function, `self` not counted."""
    for module, tree in trees(source):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if given and given[0].arg in ("self", "cls"):
                    given = given[1:]
                yield module, node.name, len(given), node.end_lineno - node.lineno + 1


def untyped(source):
    """Count lines with a value that may be anything."""
    lines = (line for path in source.rglob("*.py") for line in path.read_text().splitlines())
    return sum(re.search(r": Any\b", line) is not None for line in lines)


def name_tables(source):
    """Return (module, line) of every literal that lists three or more learners or aggregators.

    Registries and the package's public names are lists by nature.
    """
    found = []
    for module, tree in trees(source):
        if module == "__init__.py" or Path(module).name == "registry.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict | ast.BinOp):
                parts = node.keys + node.values if isinstance(node, ast.Dict) else [node]
                named = {
                    one.value if isinstance(one, ast.Constant) else one.id
                    for part in parts
                    if part is not None
                    for one in ast.walk(part)
                    if (isinstance(one, ast.Constant) and isinstance(one.value, str))
                    or isinstance(one, ast.Name)
                }
                if len(named & METHODS) >= 3:
                    found.append((module, node.lineno))
    return sorted({module: (module, line) for module, line in reversed(found)}.values())


def counts(source):
    """Return the numbers that describe the state of the house."""
    listed = list(functions(source))
    return {
        "modules in the root folder": len(list(source.glob("*.py"))),
        "modules": len(list(source.rglob("*.py"))),
        "lines": sum(len(path.read_text().splitlines()) for path in source.rglob("*.py")),
        "longest functions": sorted((lines for *_, lines in listed), reverse=True)[:5],
        "functions over 60 lines": sum(lines > 60 for *_, lines in listed),
        "functions with more than 6 parameters": sum(n > 6 for _, _, n, _ in listed),
        ": Any": untyped(source),
        "modules with a name table": name_tables(source),
    }


def test_the_root_folder_holds_few_modules():
    assert counts(SOURCE)["modules in the root folder"] <= 6


def test_no_module_but_the_registries_lists_learners_or_aggregators():
    assert name_tables(SOURCE) == []


def test_few_functions_take_more_than_six_parameters():
    many = [(module, name, n) for module, name, n, _ in functions(SOURCE) if n > 6]
    assert len(many) <= 20, Counter(module for module, *_ in many)


def test_few_values_are_of_any_type():
    assert untyped(SOURCE) <= 100


if __name__ == "__main__":
    for what, number in counts(Path(sys.argv[1]) if sys.argv[1:] else SOURCE).items():
        sys.stdout.write(f"{what}: {number}\n")
