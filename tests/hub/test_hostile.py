"""Hostile input: mutated files and requests. The hub refuses with a code, stores nothing and answers no 5xx."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consilience.contribution import Contribution
from consilience.errors import ConsilienceError
from consilience.hub.app import create_app
from consilience.protocol import ERRORS
from consilience.sealed import Sealed

SHORT, LONG = 150, 100_000
lenient = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[str, float, bytes]]:
    """Draw a few edits of a file: where, as a share of its length, and what."""
    kinds = st.sampled_from(("flip", "cut", "insert", "overwrite", "repeat"))
    junk = st.one_of(
        st.binary(min_size=1, max_size=16),
        st.sampled_from((b"\xff" * 8, b"\0" * 8, b'"', b"\\ud800", b"1e999", b"NaN", b"[[[[", b"9" * 400, b"}", b",")),
    )
    return draw(st.lists(st.tuples(kinds, st.floats(0, 1), junk), min_size=1, max_size=4))


def edited(content: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    for kind, share, junk in changes:
        # Half of all edits hit the header: the rest of the file is covered by one digest.
        at = int(share * len(content)) if share > 0.5 else int(2 * share * min(len(content), 3000))
        if kind == "flip" and content:
            at = min(at, len(content) - 1)
            content = content[:at] + bytes([content[at] ^ (junk[0] or 1)]) + content[at + 1 :]
        elif kind == "cut":
            content = content[:at] + content[at + len(junk) :]
        elif kind == "insert":
            content = content[:at] + junk + content[at:]
        elif kind == "overwrite":
            content = content[:at] + junk + content[at + len(junk) :]
        else:
            content = content[:at] + content[max(0, at - 64) :]
    return content


@st.composite
def plain(draw: st.DrawFn) -> Any:
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8).filter(lambda text: text.isprintable()),
        st.sampled_from(("inf", "-inf", "PrivateRidge", "[]", "record", "add-remove")),
    )
    return draw(
        st.recursive(
            leaves,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
            max_leaves=5,
        )
    )


class _Target:
    """One hub for all examples: nothing that is refused may change it."""

    def __init__(self, world: Any, tools: Any) -> None:
        self.world, self.code = world, tools.code
        self.study = world.add_study()
        self.ward = world.ward("north")
        self.honest = self.ward.train(self.study)
        self.body = self.honest.sealed.to_bytes()

    def refuse(self, body: bytes) -> None:
        answer = self.world.submit(self.ward, body)
        if answer.status_code < 300:  # another spelling of the same file, or of one that is as good
            assert answer.json()["guarantee"] == self.honest.guarantee.as_dict()
            return
        assert self.code(answer) in ("rejected", "study-differs", "wrong-site", "stale")


@pytest.fixture
def target(sqlite_world: Any, tools: Any) -> _Target:
    return _Target(sqlite_world, tools)


def _mutated_files(target: _Target, n: int) -> None:
    @settings(max_examples=n, **lenient)
    @given(edits())
    def run(changes: Any) -> None:
        target.refuse(edited(target.body, changes))

    run()


def _signed_lies(target: _Target, n: int) -> None:
    """Change a fact and sign anew: the signature is right, what it covers is not."""
    facts = {name: value for name, value in target.honest.sealed.facts.items() if name not in ("key", "tensors")}
    names = st.sampled_from(sorted(facts))
    inside = st.sampled_from(sorted(facts["settings"]) + sorted(facts["guarantee"]) + ["name", "digest"])

    @settings(max_examples=n, **lenient)
    @given(names, inside, plain(), st.booleans())
    def run(name: str, part: str, value: Any, deep: bool) -> None:
        changed = dict(facts)
        if deep and isinstance(facts[name], dict):
            changed[name] = {**facts[name], part: value}
        else:
            changed[name] = value
        if changed == facts:
            return
        sealed = Sealed.seal("contribution", changed, target.honest.sealed.tensors, target.ward.key)
        target.refuse(sealed.to_bytes())

    run()


def test_mutated_files_are_refused(target: _Target) -> None:
    _mutated_files(target, SHORT)
    target.world.hub.verify()


def test_lies_under_a_right_signature_are_refused(target: _Target) -> None:
    _signed_lies(target, SHORT)
    target.world.hub.verify()


@pytest.mark.soak
def test_100000_mutated_files_are_refused(target: _Target) -> None:
    _mutated_files(target, LONG // 2)
    _signed_lies(target, LONG // 2)
    target.world.hub.verify()


def test_inspecting_refuses_what_loading_refuses(target: _Target, tmp_path: Path) -> None:
    """The hub checks block by block; it may never take a file that `load` would not."""
    from consilience.sealed import read_facts

    path = tmp_path / "file"

    def taken(check: Any) -> bool:
        try:
            check()
        except ConsilienceError:
            return False
        return True

    @settings(max_examples=SHORT, **lenient)
    @given(edits())
    def run(changes: Any) -> None:
        path.write_bytes(edited(target.body, changes))
        whole = taken(lambda: Contribution.load(path))
        blocks = taken(lambda: Contribution.inspect(path, read_facts(path, "contribution")))
        assert whole == blocks

    run()


def test_no_request_that_the_description_allows_ends_in_a_5xx(tmp_path: Path, tools: Any) -> None:
    """Requests made from the OpenAPI description, and from its negation, with and without a token."""
    import schemathesis
    from schemathesis.config import SchemathesisConfig

    with tools.Client(create_app(tools.quick(tmp_path / "hub"))) as client:
        world = tools.World(client, tmp_path)
        world.add_study()
        described = client.get("/openapi.json").json()
        described["paths"] = {path: what for path, what in described["paths"].items() if path.startswith("/api/")}
        for path in described["paths"].values():  # a file is bytes to us, whatever is written in it
            for what in path.values():
                content = what.get("requestBody", {}).get("content", {})
                if "application/toml" in content:
                    content["application/octet-stream"] = content.pop("application/toml")
        schema = schemathesis.openapi.from_dict(described, config=SchemathesisConfig())
        codes = set()
        for result in schema.get_all_operations():
            operation = result.ok()

            @settings(max_examples=8, database=None, **lenient)
            @given(operation.as_strategy(), st.booleans())
            def run(case: Any, known: bool) -> None:
                path = case.formatted_path
                headers = {name: str(value) for name, value in dict(case.headers or {}).items()}
                headers = {name: value for name, value in headers.items() if value.isascii() and value.isprintable()}
                headers |= world.coordinator if known else {}
                body = case.body if isinstance(case.body, bytes) else _encoded(case.body)
                query = {name: str(value) for name, value in dict(case.query or {}).items()}
                answer = client.request(case.method, path, content=body, headers=headers, params=query)
                assert answer.status_code < 500, (case.method, path, answer.text)
                if answer.status_code >= 400:
                    codes.add(tools.code(answer))

            run()
        assert codes <= set(ERRORS)
        world.hub.verify()


def _encoded(body: Any) -> bytes:
    try:
        return json.dumps(body).encode()
    except TypeError:
        return b""
