"""What an installation is made of: hashes of packages to install, a list of those installed.

    python .ci/packages.py lock INDEX    write requirements.hashed.txt; INDEX ends in /simple
    python .ci/packages.py part FILE     write the lines of it that sites, hubs and newcomers need
    python .ci/packages.py sbom FILE     write what is installed here as CycloneDX
    python .ci/packages.py sizes         print what a site's packages take on disk here, in MB

`lock` reads the versions of constraints.txt and asks the index for the published hash of every
wheel of each that Linux or macOS can install. No address of an index is written anywhere: hashes
hold wherever an archive comes from.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
VERSIONS, HASHED = ROOT / "constraints.txt", ROOT / "requirements.hashed.txt"
INSTALLED = "consilience[site,hub,bucket]"
NEWCOMERS = "pandas"  # have their tables in data frames
HEAD = """\
# Made by `make lock`: the packages of `make setup` and the SHA-256 of every published wheel of each
# that Linux or macOS can install. pip refuses an archive that is not listed.
"""
# Where the pins have to suffice; a marker asks for these facts.
SYSTEMS = [
    {"sys_platform": system, "platform_system": name, "platform_machine": machine}
    | {"python_version": python, "python_full_version": f"{python}.0"}
    for system, name, machine in (
        ("linux", "Linux", "x86_64"),
        ("linux", "Linux", "aarch64"),
        ("darwin", "Darwin", "arm64"),
    )
    for python in ("3.11", "3.12", "3.13")
]


# ------------------------------------------------------------------------------ what needs what


def find(name: str) -> Distribution | None:
    """Return an installed package, or None."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def needs(
    package: Distribution, extras: set[str], systems: list[dict[str, str]]
) -> Iterator[Requirement]:
    """Yield what a package with these extras requires on any of the systems."""
    for line in package.requires or ():
        wanted = Requirement(line)
        asked = [{**system, "extra": extra} for system in systems for extra in {"", *extras}]
        if wanted.marker is None or any(wanted.marker.evaluate(facts) for facts in asked):
            yield wanted


def closure(wanted: str, systems: list[dict[str, str]]) -> dict[str, set[str]]:
    """Return every package that one requirement leads to, with the packages each needs itself."""
    found: dict[str, set[str]] = {}
    waiting, seen = [Requirement(wanted)], set()
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        direct = found.setdefault(name, set())
        if (name, frozenset(one.extras)) in seen:
            continue
        seen.add((name, frozenset(one.extras)))
        if (package := find(name)) is not None:
            further = list(needs(package, one.extras, systems))
            direct |= {canonicalize_name(each.name) for each in further} - {name}
            waiting += further
    return found


# ------------------------------------------------------------------------------------------- lock


def read_pins(path: Path = VERSIONS) -> dict[str, str]:
    """Return the version of each package in a file of lines ``name==version``."""
    lines = (line.split("==") for line in path.read_text().splitlines() if "==" in line)
    return {canonicalize_name(name): version.split()[0] for name, version in lines}


def is_usable(tag: Tag) -> bool:
    """Tell whether a wheel of this tag could be for a system of this project."""
    version = re.fullmatch(r"(?:cp|py)3(\d+)", tag.interpreter)
    python = tag.interpreter == "py3" or (
        version is not None
        and (int(version[1]) >= 11 or tag.abi == "abi3")
        and not tag.abi.endswith("t")
    )
    return python and tag.platform.startswith(("any", "manylinux", "musllinux", "macosx"))


def hashes(page: str, name: str, version: str) -> list[str]:
    """Return the hashes that an index's page of a package states for one version."""
    found = set()
    for file, sha256 in re.findall(r"([^/\"'#<>]+\.whl)#sha256=([0-9a-f]{64})", page):
        try:
            its_name, its_version, _, tags = parse_wheel_filename(file.replace("%2B", "+"))
        except InvalidWheelFilename:
            continue
        if (its_name, str(its_version)) == (name, version) and any(map(is_usable, tags)):
            found.add(sha256)
    return sorted(found)


def lock(index: str) -> None:
    """Write the file of hashes for all that `make setup` installs."""
    pins = read_pins()
    needed = sorted(closure("consilience[dev]", SYSTEMS).keys() - {"consilience"})
    if missing := [name for name in needed if name not in pins]:
        sys.exit(f"{VERSIONS.name} has no version of {', '.join(missing)}. Nothing was written.")
    if missing := [name for name in closure("consilience[dev]", [{}]) if find(name) is None]:
        sys.exit(f"Not installed here: {', '.join(missing)}. Nothing was written: make setup.")

    def ask(name: str) -> list[str]:
        if not index.startswith("https://"):
            raise ValueError("an index is asked over https")
        with urllib.request.urlopen(f"{index.rstrip('/')}/{name}/", timeout=60) as answer:  # noqa: S310
            return hashes(answer.read().decode(), name, pins[name])

    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(needed, pool.map(ask, needed), strict=True))
    if missing := [f"{name}=={pins[name]}" for name in needed if not found[name]]:
        sys.exit(f"The index states no wheel of {', '.join(missing)}. Nothing was written.")
    lines = (
        " \\\n    ".join(
            [f"{name}=={pins[name]}", *(f"--hash=sha256:{one}" for one in found[name])]
        )
        for name in needed
    )
    HASHED.write_text(HEAD + "\n".join(lines) + "\n")


def part(*wanted: str) -> str:
    """Return the packages of the file of hashes that an installation here needs, with hashes."""
    stated = {
        canonicalize_name(lines.split("==")[0]): lines
        for lines in re.split(r"\n(?=\w)", HASHED.read_text().removeprefix(HEAD).strip())
    }
    named = {name for each in wanted for name in closure(each, [{}]) if find(name)}
    needed = named - {"consilience"}
    if missing := [name for name in needed if name not in stated]:
        sys.exit(f"{HASHED.name} has no hash of {', '.join(missing)}. Nothing was written.")
    return "\n".join(stated[name] for name in sorted(needed)) + "\n"


# ------------------------------------------------------------------------------------------- sbom


def reference(package: Distribution) -> str:
    """Return a package's URL, which names it in any list of this kind."""
    return f"pkg:pypi/{canonicalize_name(package.name)}@{package.version}"


def describe(package: Distribution) -> dict[str, object]:
    """Return one component: its name, version and what it says of its licence."""
    facts = package.metadata
    licences: list[dict[str, object]] = [
        {"license": {"name": line.rpartition(" :: ")[2]}}
        for line in facts.get_all("Classifier", ())
        if line.startswith("License :: ")
    ]
    if "License-Expression" in facts:
        licences = [{"expression": facts["License-Expression"]}]
    return {
        "type": "library",
        "bom-ref": reference(package),
        "name": package.name,
        "version": package.version,
        "purl": reference(package),
        **({"licenses": licences} if licences else {}),
    }


def make_sbom(wanted: str = INSTALLED) -> dict[str, object]:
    """Return what an installation of sites and hubs consists of; the same for the same packages."""
    tree = {name: direct for name, direct in closure(wanted, [{}]).items() if find(name)}
    packages = {name: distribution(name) for name in sorted(tree)}
    own = packages.pop("consilience")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**describe(own), "type": "application"}},
        "components": [describe(package) for package in packages.values()],
        "dependencies": [
            {
                "ref": reference(package),
                "dependsOn": sorted(
                    reference(packages[each]) for each in tree[name] if each in packages
                ),
            }
            for name, package in itertools.chain([("consilience", own)], packages.items())
        ],
    }


# ------------------------------------------------------------------------------------------ sizes


def list_sizes(wanted: str) -> str:
    """Return a line for each package of an installation, the largest first."""
    packages = (find(name) for name in closure(wanted, [{}]))
    size = {
        package.name: sum(
            Path(str(file.locate())).stat().st_size
            for file in package.files or ()
            if file.suffix != ".pyc" and Path(str(file.locate())).is_file()
        )
        for package in packages
        if package is not None
    }
    size["together"] = sum(size.values())
    lines = sorted(size.items(), key=lambda item: -item[1])
    return "".join(f"{n_bytes / 1e6:7.1f}  {name}\n" for name, n_bytes in lines)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["lock", index]:
            lock(index)
        case ["part", file]:
            Path(file).write_text(part(INSTALLED, NEWCOMERS))
        case ["sizes"]:
            sys.stdout.write(list_sizes("consilience[site]"))
        case ["sbom", file]:
            Path(file).write_text(json.dumps(make_sbom(), indent=1) + "\n")
        case _:
            sys.exit(__doc__)
