"""Build the documentation site: ``python docs/build.py [FOLDER]``, by default in build/docs.

Pages lie in the folder's `source` as they do in the repository, so that a link that works there
works here. The API pages are made of the names that the package exports, one page for each room.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.config.config_options import ExtraScriptValue
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority

import consilience

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "build" / "docs"
SOURCE = FOLDER.resolve() / "source"
ICON = ROOT / "src" / "consilience" / "hub" / "dashboard" / "static" / "icon.svg"
STAGED = (
    *(
        "*.md",
        "docs/**/*.md",
        "docs/**/*.png",
        "docs/tutorials/*.ipynb",
        "docs/theme/*",
        "benchmarks/*.md",
        "benchmarks/*.png",
    ),
    *("experiments/README.md", "experiments/results/README.md", "experiments/results/report.html"),
)
# What the menu shows: a page, or the pages of a folder in the order of their names.
MENU: dict[str, list[str]] = {
    "Tutorials": ["docs/tutorials/*.md"],
    "Guides": [
        "docs/concepts.md",
        "docs/choosing.md",
        "docs/newcomers.md",
        "docs/troubleshooting.md",
        "docs/comparison.md",
        "docs/for-sites.md",
        "docs/for-ethics-boards.md",
        "docs/for-coordinators.md",
        "docs/for-keyholders.md",
        "docs/planning.md",
        "docs/export.md",
        "docs/odds.md",
        "docs/large-sites.md",
        "docs/flower.md",
        "docs/for-it.md",
        "docs/deployment.md",
    ],
    "Reference": [
        "docs/study-reference.md",
        "docs/cli.md",
        "docs/api/*.md",
        "docs/protocol.md",
        "docs/planning-proofs.md",
        "docs/glossary.md",
    ],
    "Security": [
        "SECURITY.md",
        "docs/threat-model.md",
        "docs/attacks.md",
        "docs/guarantees/*.md",
    ],
    "Measurements": [
        "experiments/README.md",
        "experiments/results/README.md",
        "benchmarks/*.md",
    ],
    "Project": ["CHANGELOG.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "docs/decisions/*.md"],
}
# What users call; the other methods are what the engine asks of a class.
CALLED = (
    *("fit", "predict", "predict_proba", "decision_function", "transform", "score", "combine"),
    *("plot_shapes", "shape_functions", "sampled", "even", "of", "quantiles"),
)
DRAWN = re.compile(r"!\[[^\]]*\]\((\S+\.svg)\)")
CALLED_ONLY = ("learners", "statistics", "aggregators")
ROOMS = {
    "learners": "Learners",
    "statistics": "Statistics",
    "aggregators": "Aggregators",
    "tables": "Tables and schemas",
    "privacy": "Privacy",
    "study": "Studies",
    "files": "Signed files",
    "site": "Sites",
    "planning": "Plans",
    "simulation": "Simulations",
    "auditing": "Audits",
    "evaluation": "Evaluation",
    "errors": "Errors and warnings",
}


def stage() -> None:
    """Lay all pages and pictures side by side."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for pattern in STAGED:
        for file in ROOT.glob(pattern):
            place = SOURCE / file.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, place)
    for name in ("LICENSE", "CITATION.cff"):
        shutil.copy(ROOT / name, SOURCE / name)
    shutil.copy(ICON, SOURCE / "docs" / "theme" / ICON.name)
    (SOURCE / "README.md").rename(SOURCE / "index.md")
    for page in SOURCE.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"(\]\((?:\.\./)*)README\.md", r"\1index.md", text)
        place = ROOT / page.relative_to(SOURCE)
        page.write_text(DRAWN.sub(partial(put_picture, place), text), encoding="utf-8")


def put_picture(page: Path, found: re.Match[str]) -> str:
    """Return a picture as a part of its page, whose colours it then has."""
    drawn = (page.parent / found[1]).read_text(encoding="utf-8")
    return f"<div>{drawn.strip()}</div>"


def write_api() -> None:
    """Write a page for each room, with every name that the package exports from it."""
    rooms = defaultdict(list)
    for name in consilience.__all__:
        module = consilience._MODULE_OF[name]
        room = module.split(".")[0]
        options = f"    options:\n      members: [{', '.join(CALLED)}]\n"
        entry = f"::: consilience.{module}.{name}\n"
        rooms[room].append(entry + (options if room in CALLED_ONLY else ""))
    folder = SOURCE / "docs" / "api"
    folder.mkdir()
    for number, (room, title) in enumerate(ROOMS.items(), start=1):
        entries = "\n".join(rooms.pop(room))
        (folder / f"{number:02}-{room}.md").write_text(f"# {title}\n\n{entries}", encoding="utf-8")
    if rooms:
        sys.exit(f"No page for the rooms {', '.join(rooms)}: add them to ROOMS.")


def make_menu() -> list[Any]:
    """Return the menu; a page that is named but not there is left out only if it is a pattern."""
    menu: list[Any] = [{"Start": "index.md"}]
    for title, patterns in MENU.items():
        pages = [
            str(page.relative_to(SOURCE))
            for pattern in patterns
            for page in sorted(SOURCE.glob(pattern))
        ]
        menu.append({title: pages})
    return menu


@event_priority(-100)  # after the plugin that sets the address of a script elsewhere
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Load nothing from elsewhere: the script that searches without a server is our own."""
    config.extra["polyfills"] = [ExtraScriptValue("docs/theme/worker.js")]
    return config


def on_post_page(output: str, **_: Any) -> str:
    """Give what the theme leaves unnamed a name that screen readers can say."""
    return output.replace('role="dialog">', 'role="dialog" aria-label="Search">')


def main() -> int:
    """Build the site; every warning is an error."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    stage()
    write_api()
    config = load_config(
        str(ROOT / "docs" / "mkdocs.yml"),
        nav=make_menu(),
        docs_dir=str(SOURCE),
        site_dir=str(SOURCE.with_name("site")),
        strict=True,
    )
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    sys.stdout.write(f"Written: {Path(config.site_dir) / 'index.html'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
