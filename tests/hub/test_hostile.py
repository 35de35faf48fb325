"""Hostile input: the hub refuses mutated files and requests with a code, and never answers 5xx.

It stores nothing of them. The mutations know the formats: most files here carry a right signature
over wrong contents, because the signature check refuses all others at once. Each example follows
from its number.
"""

import copy
import gc
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consilience.errors import ConsilienceError
from consilience.files.certificate import of_contribution, of_release
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import (
    ADAPTED,
    Sealed,
    SealedFile,
    SigningKey,
    canonical,
    is_signed,
)
from consilience.hub.api.app import create_app
from consilience.hub.api.routes import ROUTES
from consilience.hub.auth import hash_password
from consilience.protocol import ERRORS, HEADER, digest, sign_request
from consilience.study.collect import Publication
from forgery import Forge, dumped

SHORT, LONG = 100, 100_000
MOST_GROWTH = 128 << 20  # bytes of resident memory over all examples
lenient = {"deadline": None, "suppress_health_check": list(HealthCheck)}


# ------------------------------------------------------------------------------------- making files


NUMBERS = (
    0,
    -1,
    1,
    2**31,
    2**53,
    2**63 - 1,
    2**63,
    -(2**63),
    10**30,
    0.5,
    -0.0,
    5e-324,
    2.2e-308,
    1e308,
    -1e308,
    1e-300,
)
ODD_NUMBERS = ("NaN", "-Infinity", "1e400", "1" * 5000, "01", "1.", "0x1")
TEXTS = (
    "", " ", "inf", "-inf", "nan", "NaN", "null", "[]", "{}", "north ", "nоrth", "no\u0301rth",
    "\u202enorth", "no\u200brth", "\ud800", "\0", "a" * 5000, "../../etc/passwd",
    "<script>alert(1)</script>", "' OR 1=1 --", "%s%n", "record", "person",
    "add-remove", "PrivateRidge", "PrivateForestClassifier", "Laplace",
    '[{"name": "Laplace"}]', "1e999", "é", "\uffff",
)  # fmt: skip


def _hostile(rng: random.Random, depth: int = 0) -> Any:
    """Return a value that JSON can hold, or that it should not."""
    kind = rng.randrange(12)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 7:
        return rng.choice(TEXTS)
    if kind == 7:
        return rng.choice((None, True, False, math.inf, -math.inf, math.nan))
    if kind == 8:
        return _nested(rng.choice((3, 17, 60, 200)))
    if kind == 9:
        return rng.random() * 10 ** rng.randrange(-300, 300)
    if depth > 2:
        return []
    if kind == 10:
        return [_hostile(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS[:20]): _hostile(rng, depth + 1) for _ in range(rng.randrange(4))}


def _nested(depth: int) -> Any:
    value: Any = 0
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return every place inside `value`: a container and where in it."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for at, one in list(inside):
        yield value, at
        yield from _places(one)


def _change_inside(rng: random.Random, value: Any) -> None:
    """Change one place: another value, a near one, none, or one more."""
    container, at = rng.choice(list(_places(value)))
    old, how = container[at], rng.randrange(8)
    if how == 0:
        del container[at]
    elif how == 1 and isinstance(container, dict):
        container[rng.choice(TEXTS[5:])] = _hostile(rng)
    elif how == 1:
        container.append(copy.deepcopy(old))
    elif how == 2 and isinstance(old, int | float) and not isinstance(old, bool):
        container[at] = rng.choice(
            (old + 1, old - 1, old * 2, -old, float(old), old / 3, math.nextafter(old, math.inf))
        )
    elif how == 3 and isinstance(old, str) and old[:1] == "[":  # events are JSON within JSON
        events = json.loads(old)
        if events:
            _change_inside(rng, events)
        container[at] = json.dumps(events)
    elif how == 4 and isinstance(old, str):
        container[at] = rng.choice(
            (old + " ", old.upper(), old[:-1], old + "\0", "\ufeff" + old, old.replace("o", "о"))
        )
    else:
        container[at] = _hostile(rng)


def _lie_in_facts(rng: random.Random, forge: Forge) -> None:
    for _ in range(rng.choice((1, 1, 1, 2))):
        _change_inside(rng, forge.facts)


def _lie_in_tensors(rng: random.Random, forge: Forge) -> None:
    name = rng.choice(sorted(forge.tensors))
    tensor = forge.tensors[name]
    how = rng.randrange(9)
    if how == 0 and tensor.size:
        flat = tensor.reshape(-1)
        extremes = (
            (math.nan, math.inf, -math.inf, 5e-324, 1e308, -0.0)
            if tensor.dtype.kind == "f"
            else (2**63 - 1, -(2**63), -1, 10**6)
        )
        flat[rng.randrange(flat.size)] = rng.choice(extremes)
    elif how == 1:
        tensor[...] = rng.choice((0, 1, -1, 10**15))
    elif how == 2:
        forge.tensors[name] = tensor.astype(
            rng.choice((np.float64, np.int64, np.uint8, np.bool_, np.float32, np.float16))
        )
    elif how == 3:
        forge.tensors[name] = tensor.reshape(
            rng.choice(((-1,), (1, -1), (-1, 1), (1, 1, 1, -1), (1, 1, 1, 1, -1)))
        )
    elif how == 4:
        forge.tensors[name] = np.concatenate([tensor.reshape(-1)] * rng.choice((2, 3)))
    elif how == 5:
        forge.tensors[name] = tensor.reshape(-1)[: rng.randrange(tensor.size + 1)]
    elif how == 6:
        del forge.tensors[name]
    elif how == 7:
        forge.tensors[
            rng.choice(("more", "COEF", "a/b", "__metadata__x", "é", "", "m0.coef", "x" * 300))
        ] = tensor
    else:
        forge.tensors[name] = np.zeros(rng.choice(((0,), (0, 3), (2, 0), ())), tensor.dtype)


def _lie_in_text(rng: random.Random, forge: Forge) -> None:
    """Write the facts in a form that is not canonical, and sign that form."""
    ways: tuple[Callable[[dict[str, Any]], str], ...] = (
        lambda facts: json.dumps(facts, sort_keys=True, ensure_ascii=False),
        lambda facts: json.dumps(facts, separators=(",", ":"), ensure_ascii=False),
        lambda facts: json.dumps(
            {**facts, "site": "nör\ud800th"}, sort_keys=True, separators=(",", ":")
        ),
        lambda facts: dumped(facts) + rng.choice((" ", "\n", "\0", "}", "{}", "\ufeff")),
        lambda facts: rng.choice((" ", "\ufeff", "\t")) + dumped(facts),
        lambda facts: dumped(facts)[:-1] + ',"site":"south"}',
        lambda facts: '{"aa":' + rng.choice(ODD_NUMBERS) + "," + dumped(facts)[1:],
        lambda facts: (
            '{"aa":'
            + "[" * (n := rng.choice((20, 1000, 50_000)))
            + "]" * n
            + ","
            + dumped(facts)[1:]
        ),
        lambda facts: dumped(facts).replace(":1", ":1.0", 1),
        lambda facts: dumped(facts)[: rng.randrange(len(dumped(facts)))],
        lambda facts: dumped(list(facts.items())),
        lambda facts: '{"aa":"' + "a" * rng.choice((1 << 16, 5 << 20)) + '",' + dumped(facts)[1:],
    )  # fmt: skip
    # Five megabytes are worth a try, and cost as much as a hundred others.
    forge.text = ways[rng.randrange(len(ways) - (rng.random() > 0.02))]


def _lie_in_header(rng: random.Random, forge: Forge) -> None:
    """Keep the signed facts and say something else about where the tensors lie."""

    def edit(header: dict[str, Any]) -> str:
        name = rng.choice(sorted(set(header) - {"__metadata__"}) or ["__metadata__"])
        entry, how = header[name], rng.randrange(12)
        if how == 0:
            entry["data_offsets"] = rng.choice(
                (
                    [0, 0],
                    [0, 2**63],
                    [2**62, 2**62 + 8],
                    [-8, 0],
                    [8, 0],
                    [0.0, 8.0],
                    [],
                    "0",
                    [0, 1, 2],
                    None,
                )
            )
        elif how == 1:
            for other in header.values():  # all of them lie at the same place
                if "data_offsets" in other:
                    other["data_offsets"] = [0, other["data_offsets"][1] - other["data_offsets"][0]]
        elif how == 2:
            entry["shape"] = rng.choice(
                ([2**62], [2**32, 2**32], [-1], [0], [1] * 40, [2.0], [True], "2", None, [10**30])
            )
        elif how == 3:
            entry["dtype"] = rng.choice(
                ("F32", "F16", "BF16", "F8_E4M3", "U64", "I8", "", None, 7, "f64", "C64")
            )
        elif how == 4:
            whole = dumped(header)
            return whole[:-1] + f',"{name}":{dumped(entry)}' + "}"
        elif how == 5:
            header["__metadata__"][rng.choice(("more", "kind", "signature", "consilience"))] = (
                _hostile(rng)
            )
        elif how == 6:
            header[rng.choice(("more", "", "é"))] = {
                "dtype": "F64",
                "shape": [0],
                "data_offsets": [0, 0],
            }
        elif how == 7:
            entry[rng.choice(("more", "shape", "dtype"))] = _hostile(rng)
        elif how == 8:
            return json.dumps(header, indent=rng.choice((None, 1))) + rng.choice(
                ("", " " * 64, "\n")
            )
        elif how == 9:
            del header[rng.choice(sorted(header))]
        elif how == 10:
            return '{"a":' * rng.choice((50, 5000)) + dumped(header)
        else:
            header |= {
                f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
                for i in range(rng.choice((3, 300)))
            }
        return dumped(header)

    if rng.random() < 0.75:
        forge.header = edit
    elif rng.random() < 0.5:
        forge.length = rng.choice(
            (0, 1, 2**63, 2**64 - 1, 2**32, 8 << 20, 9 << 20, 100, rng.randrange(4000))
        )
    else:
        forge.tail = rng.choice((b"\0", b"\0" * 8, b"\xff" * 4096))


def _edited(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """Damage bytes: the signature refuses most of it, if the form does not before."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        # Half of all edits hit the header: the rest of the file is covered by one digest.
        at = (
            rng.randrange(min(len(content), 3000) if rng.random() < 0.5 else len(content))
            if content
            else 0
        )
        junk = rng.choice(
            (
                rng.randbytes(rng.randrange(1, 17)),
                b"\xff" * 8,
                b"\0" * 8,
                b'"',
                b"\\ud800",
                b"1e999",
                b"NaN",
                b"[[[[",
                b"9" * 400,
                b"}",
                b",",
            )
        )
        how = rng.randrange(7)
        if how == 0 and content:
            content = (
                content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
            )
        elif how == 1:
            content = content[:at] + content[at + len(junk) :]
        elif how == 2:
            content = content[:at] + junk + content[at:]
        elif how == 3:
            content = content[:at] + junk + content[at + len(junk) :]
        elif how == 4:
            content = content[:at] + content[max(0, at - 64) :]
        elif how == 5:
            content = content[:at]
        else:
            content = content[:at] + other[at:]
    return content


LIES = (_lie_in_facts, _lie_in_facts, _lie_in_tensors, _lie_in_text, _lie_in_header)


def _forged(
    rng: random.Random, sealed: Sealed, key: SigningKey, other: bytes, sequence: int | None = None
) -> bytes:
    if rng.random() < 0.1:
        return _edited(rng, sealed.to_bytes(), other)
    forge = Forge(sealed, key)
    if (
        sequence is not None and rng.random() < 0.5
    ):  # else everything after the first that is taken would be stale
        forge.facts["sequence"] = sequence
    rng.choice(LIES)(rng, forge)
    said = forge.facts.get("sequence")
    if (
        sequence is not None and type(said) is int and sequence < said < 2**53
    ):  # one such, and all that follow are stale
        forge.facts["sequence"] = sequence
    try:
        return forge.to_bytes()
    except (
        ValueError,
        OverflowError,
        RecursionError,
    ):  # what cannot even be written, cannot be sent
        return _edited(rng, sealed.to_bytes(), other)


# --------------------------------------------------------------------------------------- the target


class Target:
    """One hub with studies of three kinds, an enrolled site that lies, and an honest one."""

    def __init__(self, world: Any, tools: Any) -> None:
        self.world, self.code, self.tools = world, tools.code, tools
        forest = tools.study_text("trees").replace(
            '"PrivateLogisticRegression"', '"PrivateForestClassifier"\nn_trees = 3\nmax_depth = 2'
        )
        forest = forest.replace("[privacy]", '[privacy]\nneighbours = "add-remove"').replace(
            '"Average"', '"WeightedVote"'
        )
        texts = [
            tools.study_text(),
            forest,
            tools.study_text(
                "exact",
                hub="trusted",
                aggregator='name = "Average"\nepsilon = 1.0\nweights = "equal"',
            ),
        ]
        self.studies = [world.add_study(text) for text in texts]
        self.texts = texts
        self.honest = []
        for study in self.studies:
            self.ward, beside = world.ward("north", study.name), world.ward("south", study.name)
            assert world.submit(beside, self._train(beside, study), study.name).status_code == 201
            self.honest.append(self._train(self.ward, study))
        self.beside = beside
        self.others = [one.sealed.to_bytes() for one in self.honest[1:] + self.honest[:1]]
        world.hub.store.add_account("bob", hash_password("correct horse battery"), "operator")
        self.taken, self.answers, self.sequence = 0, Counter(), 1
        self.release = self._release()

    def _train(self, ward: Any, study: Any) -> Contribution:
        from consilience.privacy.guarantee import Budget
        from consilience.privacy.ledger import Ledger

        ledger = Ledger(ward.folder / f"{ward.name} {study.name}.ledger")
        ledger.allow("ward", Budget(epsilon=1000.0, neighbours=study.neighbours))
        facts = {"site": ward.name, "signing": ward.key, "dataset": "ward"}
        return study.train(
            self.tools.table(200, 1), None if study.trusted else ledger, epsilon=1.0, **facts
        )

    def _release(self) -> list[Release]:
        found = []
        for study, mine in zip(self.studies[:2], self.honest[:2], strict=True):
            other = self._train(self.beside, study)
            published = Publication(self.world.hub.key)
            found.append(study.combine([mine, other], publication=published))
        return found

    def submit(self, number: int) -> None:
        """Send one forged contribution: refused with its code, or as good as an honest one."""
        rng = random.Random(number)
        which = rng.choice((0, 0, 1, 1, 2))
        honest, study = self.honest[which], self.studies[which]
        self.sequence += 1
        body = _forged(rng, honest.sealed, self.ward.key, self.others[which], self.sequence)
        answer = self.world.submit(self.ward, body, study.name)
        if answer.status_code < 300:
            self.taken += answer.status_code == 201
            promised, stated = answer.json()["guarantee"], honest.guarantee.as_dict()
            assert {**promised, "assumptions": None} == {**stated, "assumptions": None}, number
            self.answers["taken"] += 1
            if self.taken % 100 == 1:
                self.world.combiner.run(at_once=True)
            return
        found = self.code(answer)
        assert found in ("rejected", "study-differs", "wrong-site", "stale"), (number, answer.text)
        self.answers[found] += 1

    def read(self, number: int, path: Path) -> None:
        """Read one forged release as a site would: refused, or complete enough to predict."""
        rng = random.Random(number)
        which = rng.randrange(2)
        sealed = self.release[which].sealed
        path.write_bytes(_forged(rng, sealed, self.world.hub.key, self.others[which]))
        try:
            found = Release.load(path, key=self.world.hub.key.public)
        except ConsilienceError:
            self.answers["release refused"] += 1
            return
        n_features = found.sealed.facts["n_features"]
        with np.errstate(over="ignore", invalid="ignore"):
            assert found.predict(np.full((3, n_features), 0.5)).shape == (3,), number
        assert of_release(found).as_html(), number
        self.answers["release read"] += 1

    def ask(self, number: int) -> None:
        """Send one hostile request: whatever it is, it is answered, and not with a 5xx."""
        rng = random.Random(number)
        method, path, headers, body = _request(rng, self)
        answer = self.world.client.request(method, path, content=body, headers=headers)
        assert answer.status_code < 500, (number, method, path, answer.text)
        if (
            answer.status_code >= 400
            and method != "HEAD"
            and answer.request.url.path.startswith("/api/")
        ):
            assert self.code(answer) in ERRORS, (number, method, path)
        self.answers[f"request {answer.status_code}"] += 1


SEGMENTS = (
    "demo",
    "trees",
    "nope",
    "..",
    "%2e%2e",
    "a%00b",
    "%ff",
    "é",
    "x" * 3000,
    "-1",
    "1",
    "0",
    "9" * 20,
    "1e3",
    "north",
    "south",
    "%2f",
    "a b",
    "'",
)


def _request(rng: random.Random, target: Target) -> tuple[str, str, dict[str, bytes], bytes]:
    pages = (
        "/",
        "/login",
        "/studies",
        "/studies/{study}",
        "/studies/{study}/sites/{site}",
        "/audit",
        "/new-study",
        "/visits/{link}",
        "/studies/{study}/releases/{sequence}",
    )
    known = rng.choice(
        [(method, path) for method, path, *_ in ROUTES] + [("GET", page) for page in pages]
    )
    method, path = (
        known
        if rng.random() < 0.85
        else (
            rng.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "FOO")),
            known[1],
        )
    )
    while "{" in path:
        begin, end = path.index("{"), path.index("}")
        segment = (
            rng.choice(SEGMENTS)
            if rng.random() < 0.5
            else "demo"
            if path[begin:end] == "{study"
            else rng.choice(("1", "north", "public.csv"))
        )
        path = path[:begin] + segment + path[end + 1 :]
    if rng.random() < 0.2:
        path += "?" + rng.choice(
            (
                "after=-1",
                "after=1e9",
                "limit=0",
                "limit=9999",
                "after=" + "9" * 40,
                "withdraw=maybe",
                "a=%ff",
                "&&&=",
                "study=%00",
                "done=x",
            )
        )
    path = path.encode("utf-8").decode("latin-1")
    body = _body(rng, target, known[1])
    headers = {}
    if rng.random() < 0.4 and not known[1].endswith(
        ("/close", "/key")
    ):  # a coordinator's request would end the study or the key
        headers |= target.world.coordinator
    elif rng.random() < 0.2:
        headers["authorization"] = rng.choice(
            ("Bearer ", "Bearer x", "Basic eDp5", "bearer \xff", "Bearer " + "a" * 5000)
        )
    if rng.random() < 0.6:
        headers[HEADER] = _signature(rng, target, method, path, body)
    if rng.random() < 0.1:
        headers["content-type"] = rng.choice(
            (
                "application/json",
                "text/plain",
                "multipart/form-data",
                "application/x-www-form-urlencoded",
                "\xff",
            )
        )
    if rng.random() < 0.1:
        headers["cookie"] = rng.choice(("session=x", "consilience=%00", "a" * 3000, "=;=;"))
    if rng.random() < 0.03:
        headers["content-length"] = rng.choice(
            ("-1", "x", "99999999999999", "9" * 5000, "1e3", "²")
        )
    return (
        method,
        path,
        {name: value.encode("latin-1", "ignore") for name, value in headers.items()},
        body,
    )


def _signature(rng: random.Random, target: Target, method: str, path: str, body: bytes) -> str:
    key = rng.choice((target.ward.key, target.ward.key, target.beside.key, SigningKey.generate()))
    now, hub_key = rng.choice((None, None, None, 0, 1e11)), target.world.hub.key.public
    whole = sign_request(key, hub_key, method, path, digest(body), now=now)
    if rng.random() < 0.3:
        at = rng.randrange(len(whole))
        return rng.choice(
            (
                whole[:at],
                whole[:at] + "0" + whole[at:],
                whole.upper(),
                whole + ";a=b",
                whole.replace("key", "Key"),
                "\xff" + whole,
            )
        )
    return whole


def _body(rng: random.Random, target: Target, path: str) -> bytes:
    if path.endswith("/studies") and rng.random() < 0.7:
        return _study(rng, rng.choice(target.texts)).encode(errors="ignore")
    honest = {
        "invitation": "x" * 32, "site": "north", "fetch_only": False, "name": "bob",
        "password": "x", "days": 1.0, "study": "demo", "new_key": "0" * 64, "proof": "0" * 128,
        "key": "one",
    }  # fmt: skip
    names = {
        "/api/enrolments": ("invitation", "site", "fetch_only"),
        "/api/sessions": ("name", "password"),
        "/api/keys/rotation": ("study", "new_key", "proof"),
    }
    wanted = names.get(
        path, ("site", "fetch_only", "days") if path.endswith("invitations") else ("key",)
    )
    how = rng.randrange(6)
    if how == 0:
        return rng.randbytes(rng.randrange(200))
    if how == 1:
        return b"[" * 100_000 if rng.random() < 0.05 else b'{"a":' * 500
    facts = {name: honest[name] for name in wanted}
    if how > 2:
        _change_inside(rng, facts)
    return json.dumps(facts).encode()


def _study(rng: random.Random, text: str) -> str:
    """Change lines of a study file."""
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(lines))
        how = rng.randrange(6)
        name, _, value = lines[at].partition("=")
        if how == 0:
            del lines[at]
        elif how == 1:
            lines.insert(at, lines[rng.randrange(len(lines))])
        elif how == 2 and value:
            lines[at] = f"{name}= " + rng.choice(
                (
                    "nan",
                    "inf",
                    "-1",
                    "1e400",
                    '""',
                    "[]",
                    "{}",
                    "true",
                    "9" * 30,
                    "1979-05-27",
                    '"x"',
                    "[[[[1]]]]",
                    "0x10",
                    "'''\n'''",
                    '"\\u0000"',
                )
            )
        elif how == 3:
            lines[at] = lines[at].replace("0", rng.choice(("-0", "9" * 20, "1e300", "nan")))
        elif how == 4:
            lines[at] = f"[{rng.choice(TEXTS[:9])}]"
        else:
            lines[at] += rng.choice(("]", '"', " # é", "\0", "\ud800", " = 1", ","))
        if not lines:
            return ""
    return "\n".join(lines)


@pytest.fixture
def target(sqlite_world: Any, tools: Any) -> Target:
    store = sqlite_world.hub.store  # one site sends more in a minute than sites do in a year
    store.most_daily, store.return_seconds = 1 << 40, 0.0
    return Target(sqlite_world, tools)


def _resident() -> int:
    """Return the bytes of memory this process holds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _attack(target: Target, folder: Path, n: int, first: int = 0) -> dict[str, Any]:
    """Make `n` attempts: half contributions, a fifth releases, else requests. Return counts."""
    began, failures = 0, []
    for number in range(first, first + n):
        if number - first == n // 10:  # by then everything has been loaded that ever will be
            began = _resident()
        try:
            _attempt(target, folder, number)
        except Exception as problem:  # all of them at once, and any of them again by its number
            failures.append((number, type(problem).__name__, str(problem)[:300]))
            assert len(failures) < 20, failures
    grown = _resident() - began
    assert (failures, grown < MOST_GROWTH) == ([], True), (failures, grown)
    target.world.combiner.run(at_once=True)
    target.world.hub.store.verify()
    sizes = {"MiB before": began >> 20, "MiB grown": grown >> 20}
    return {"examples": n, **sizes, "new taken": target.taken, "answers": dict(target.answers)}


def _attempt(target: Target, folder: Path, number: int) -> None:
    if number % 10 < 5:
        target.submit(number)
    elif number % 10 < 7:
        target.read(number, folder / "release.safetensors")
    else:
        target.ask(number)


def test_hostile_files_and_requests_are_refused(target: Target, tmp_path: Path) -> None:
    found = _attack(target, tmp_path, 10 * SHORT)
    for expected in ("rejected", "release refused", "request 404", "request 401", "taken"):
        assert found["answers"][expected] > 0  # every kind of attempt got as far as it should


@pytest.mark.soak
@pytest.mark.parametrize("half", [1, 2])
def test_100000_hostile_files_and_requests(
    target: Target, tmp_path: Path, half: int, record_property: Any
) -> None:
    record_property("numbers", _attack(target, tmp_path, LONG // 2, first=half * 10**6))


def test_inspecting_refuses_what_loading_refuses(target: Target, tmp_path: Path) -> None:
    """The hub checks block by block; it may never take a file that `load` would not."""
    path = tmp_path / "file"

    def taken(check: Any) -> bool:
        try:
            found = check()
        except ConsilienceError:
            return False
        assert of_contribution(found).as_html()
        return True

    for number in range(5 * SHORT):
        rng = random.Random(number)
        which = rng.randrange(2)
        path.write_bytes(
            _forged(rng, target.honest[which].sealed, target.ward.key, target.others[which])
        )
        whole = taken(lambda: Contribution.load(path))
        blocks = taken(lambda: Contribution.inspect(SealedFile(path, "contribution")))
        assert whole == blocks, number


def test_a_forged_file_that_tells_no_lie_is_the_honest_one(target: Target) -> None:
    """Honest files from the forge are accepted: the attempts above are refused for their lies."""
    for honest in target.honest:
        forge = Forge(honest.sealed, target.ward.key)
        assert canonical(forge.facts) == canonical(
            {k: v for k, v in honest.sealed.facts.items() if k != "tensors"}
        )
        assert (
            target.world.submit(target.ward, forge.to_bytes(), honest.study["name"]).json()[
                "digest"
            ]
            == honest.digest
        )


def test_a_key_for_which_anyone_can_sign_is_nobodys(target: Target) -> None:
    """Points of small order: a signature of zeros fits about one message in four."""
    prime, eighth = (
        2**255 - 19,
        bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
    )
    ys = [0, 1, prime - 1, prime, prime + 1, int.from_bytes(eighth, "little")]
    ys.append(prime - ys[-1])
    weak = [(y + sign * 2**255).to_bytes(32, "little") for y in ys for sign in (0, 1)]
    for key in weak:
        signatures = [(str(i).encode(), point + bytes(32)) for i in range(40) for point in weak]
        assert any(_verifies(key, *one) for one in signatures)  # the library below takes them
        assert not any(is_signed(*one, key.hex()) for one in signatures)
    key = weak[0].hex()
    for _ in range(20):
        body = json.dumps({"study": "demo", "new_key": key, "proof": "0" * 128}).encode()
        answer = target.world.call(target.ward, "POST", "/api/keys/rotation", body)
        assert target.code(answer) == "not-authenticated"


def _verifies(key: bytes, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def test_no_request_that_the_description_allows_ends_in_a_5xx(tmp_path: Path, tools: Any) -> None:
    """Send requests made from the OpenAPI description and its negation, with and without token."""
    import schemathesis
    from schemathesis.config import SchemathesisConfig

    with tools.Client(create_app(tools.quick(tmp_path / "hub"))) as client:
        world = tools.World(client, tmp_path)
        world.add_study()
        described = client.get("/openapi.json").json()
        described["paths"] = {
            path: what for path, what in described["paths"].items() if path.startswith("/api/")
        }
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
                headers = {
                    name: value
                    for name, value in headers.items()
                    if value.isascii() and value.isprintable()
                }
                headers |= world.coordinator if known else {}
                body = case.body if isinstance(case.body, bytes) else _encoded(case.body)
                query = {name: str(value) for name, value in dict(case.query or {}).items()}
                answer = client.request(
                    case.method, path, content=body, headers=headers, params=query
                )
                assert answer.status_code < 500, (case.method, path, answer.text)
                if answer.status_code >= 400:
                    codes.add(tools.code(answer))

            run()
        assert codes <= set(ERRORS)
        world.hub.store.verify()


def _encoded(body: Any) -> bytes:
    try:
        return json.dumps(body).encode()
    except TypeError:
        return b""


def test_a_model_of_exact_records_is_refused_and_not_kept(world: Any, tools: Any) -> None:
    """Whatever a site adapts for itself carries its signature and must not be kept by a hub."""
    study, ward = world.add_study(), world.ward("north")
    facts = {"study": study.reference, "site": "north", "sequence": 1}
    sealed = Sealed.seal(ADAPTED, facts, {"coef": np.arange(3.0)}, ward.key)
    before = set((world.folder / "hub").rglob("*.safetensors"))
    assert tools.code(world.submit(ward, sealed.to_bytes())) == "rejected"
    assert set((world.folder / "hub").rglob("*.safetensors")) == before
