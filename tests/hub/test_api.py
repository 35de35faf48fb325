"""The hub over HTTP: what is accepted, what is refused and with which code, and who sees what."""

import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import Sealed, SigningKey, canonical, message_of
from consilience.protocol import ERRORS, HEADER, digest, rotation_message, sign_request


def test_a_study_goes_from_invitation_to_release(world: Any, tools: Any, tmp_path: Any) -> None:
    study = world.add_study()
    wards = world.fill(study, 3)
    assert (
        world.call(wards[0], "GET", "/api/studies/demo/release").json()["error"]["code"]
        == "no-release"
    )
    world.combiner.run(at_once=True)
    answer = world.call(wards[0], "GET", "/api/studies/demo/release")
    (tmp_path / "release").write_bytes(answer.content)
    release = Release.load(tmp_path / "release", key=world.hub.key.public)
    assert [source.site for source in release.sources] == [ward.name for ward in wards]
    assert release.study == study.reference
    assert release.guarantee.epsilon == pytest.approx(1.0)
    by_number = world.call(wards[1], "GET", "/api/studies/demo/releases/1")
    assert by_number.content == answer.content
    assert world.hub.store.verify()[0] > 0


def test_the_same_contribution_again_changes_nothing(world: Any) -> None:
    study = world.add_study()
    ward = world.ward("north")
    contribution = ward.train(study)
    first, second = world.submit(ward, contribution), world.submit(ward, contribution)
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json() == second.json()
    assert len(world.hub.store.contributions("demo")) == 1
    assert world.hub.store.study("demo")["changes"] == 1


def test_a_newer_contribution_supersedes_and_an_older_one_is_stale(world: Any, tools: Any) -> None:
    study = world.add_study()
    ward = world.ward("north")
    two, one, three = (ward.train(study, sequence=n) for n in (2, 1, 3))
    assert world.submit(ward, two).status_code == 201
    assert tools.code(world.submit(ward, one)) == "stale"
    assert tools.code(world.submit(ward, ward.train(study, sequence=2))) == "stale"
    assert world.submit(ward, three).status_code == 201
    states = [(row["sequence"], row["state"]) for row in world.hub.store.contributions("demo")]
    assert states == [(2, "superseded"), (3, "accepted")]
    assert world.submit(ward, two).json()["state"] == "superseded"


def test_what_is_withdrawn_stays_out(world: Any, tools: Any) -> None:
    study = world.add_study()
    wards = world.fill(study, 2)
    world.combiner.run(at_once=True)
    answer = world.call(wards[0], "POST", "/api/studies/demo/withdrawals", b"{}")
    assert answer.json()["state"] == "withdrawn"
    assert (
        world.call(wards[0], "POST", "/api/studies/demo/withdrawals", b"{}").json() == answer.json()
    )
    # The release that rested on it is gone at once, and none replaces it: one site is too few.
    assert tools.code(world.call(wards[1], "GET", "/api/studies/demo/release")) == "no-release"
    assert tools.code(world.call(wards[1], "GET", "/api/studies/demo/releases/1")) == "no-release"
    world.combiner.run(at_once=True)
    assert tools.code(world.call(wards[1], "GET", "/api/studies/demo/release")) == "no-release"
    again = [row for row in world.hub.store.contributions("demo") if row["site"] == wards[0].name]
    body = world.hub.store.content(again[0]["sha256"])
    assert tools.code(world.submit(wards[0], body)) == "stale"


def test_a_site_sees_nothing_of_another(world: Any, tools: Any) -> None:
    study = world.add_study()
    wards = world.fill(study, 2)
    seen = world.call(wards[0], "GET", "/api/studies/demo/contributions").json()["contributions"]
    assert [row["site"] for row in seen] == [wards[0].name]
    facts = world.call(wards[0], "GET", "/api/studies/demo").text
    assert wards[1].name not in facts
    for path in ("sites", "invitations"):
        assert (
            tools.code(world.call(wards[0], "GET", f"/api/studies/demo/{path}"))
            == "not-authenticated"
        )
    assert tools.code(world.call(wards[0], "GET", "/api/audit")) == "not-authenticated"
    world.add_study(tools.study_text("other"))
    assert tools.code(world.call(wards[0], "GET", "/api/studies/other")) == "not-authenticated"


def test_invitations_work_once_for_one_site_until_they_expire(world: Any, tools: Any) -> None:
    world.add_study()
    north, south = tools.Ward("north", world.folder), tools.Ward("south", world.folder)

    def enrol(ward: Any, invitation: str, name: str | None = None) -> Any:
        body = json.dumps({"invitation": invitation, "site": name or ward.name}).encode()
        return world.call(ward, "POST", "/api/enrolments", body)

    invitation = world.invitation(site="north")
    assert re.fullmatch(
        r"[0-9a-f]{48}\.[0-9a-f]{64}\.[0-9a-f]{64}", invitation
    )  # a hyphen in front would be an option of `site join`
    assert tools.code(enrol(south, invitation)) == "invitation"
    assert tools.code(enrol(south, "guessed")) == "invitation"
    assert enrol(north, invitation).status_code == 201
    assert enrol(north, invitation).status_code == 201  # the answer was lost: nothing changes
    assert tools.code(enrol(south, invitation, "north")) == "invitation"
    assert tools.code(enrol(south, world.invitation(), "north")) == "name-taken"
    assert (
        tools.code(enrol(north, world.invitation(), "north-2")) == "name-taken"
    )  # a key stands for one site
    assert tools.code(enrol(south, world.invitation(days=1e-9))) == "invitation"
    assert tools.code(enrol(south, world.invitation(), "a\u0000b")) == "malformed"
    assert len(world.hub.store.sites("demo")) == 1


def test_an_invited_site_learns_little_about_the_names_of_others(world: Any, tools: Any) -> None:
    world.add_study()
    world.ward("North Hospital")
    mallory, invitation = tools.Ward("mallory", world.folder), world.invitation()

    def enrol(name: str) -> Any:
        body = json.dumps({"invitation": invitation, "site": name}).encode()
        return world.call(mallory, "POST", "/api/enrolments", body)

    for name in ("north-hospital", "North Hospital", "NORTH HOSPITAL"):
        answer = enrol(name)
        assert tools.code(answer) == "name-taken"
        assert "North" not in answer.text
    for name in ("north.hospital", "mallory"):
        assert tools.code(enrol(name)) == "invitation"
    states = [
        row["state"]
        for row in world.client.get(
            "/api/studies/demo/invitations", headers=world.coordinator
        ).json()["invitations"]
    ]
    assert sorted(states) == ["used", "void"]


def test_a_site_is_not_told_how_many_others_contributed(world: Any, tools: Any) -> None:
    study = world.add_study(tools.study_text(min_sites=5))
    world.fill(study, 3)
    world.hub.close_study("demo", "operator")
    answer = world.call(world.wards["ward 0"], "GET", "/api/studies/demo/release")
    assert tools.code(answer) == "no-release"
    assert "3" not in answer.json()["error"]["message"]


def test_what_a_site_signs_for_one_hub_is_refused_by_every_other(world: Any, tools: Any) -> None:
    """A hub could pass on what its sites sign, and read or change what they have elsewhere."""
    study = world.add_study()
    ward = world.ward("north")
    assert world.submit(ward, ward.train(study)).status_code == 201
    elsewhere = SigningKey.generate().public
    body = json.dumps({"invitation": world.invitation(), "site": "south"}).encode()
    base = "/api/studies/demo"
    for method, path, content in (
        ("POST", "/api/enrolments", body),
        ("GET", f"{base}/contributions", b""),
        ("GET", f"{base}/release", b""),
        ("POST", f"{base}/withdrawals", b"{}"),
    ):
        header = sign_request(ward.key, elsewhere, method, path, digest(content))
        answer = world.client.request(method, path, content=content, headers={HEADER: header})
        assert tools.code(answer) == "not-authenticated", path
    assert [row["name"] for row in world.hub.store.sites("demo")] == ["north"]
    assert [row["state"] for row in world.hub.store.contributions("demo")] == ["accepted"]


def test_forged_replayed_and_late_requests_are_refused(world: Any, tools: Any) -> None:
    study = world.add_study()
    ward, stranger = world.ward("north"), SigningKey.generate()
    body = ward.train(study).sealed.to_bytes()
    path = "/api/studies/demo/contributions"
    header = sign_request(ward.key, world.hub.key.public, "POST", path, digest(body))

    def send(header: str, content: bytes = body, to: str = path) -> Any:
        return world.client.post(to, content=content, headers={HEADER: header})

    assert tools.code(world.submit(ward, body, key=stranger)) == "not-authenticated"
    assert tools.code(send(header, body[:-1] + bytes([body[-1] ^ 1]))) == "not-authenticated"
    assert tools.code(send(header, to=path + "?x=1")) == "not-authenticated"
    assert tools.code(send("")) == "not-authenticated"
    assert tools.code(send(header.replace(ward.key.public, stranger.public))) == "not-authenticated"
    for away in (-301, 301):
        assert tools.code(world.submit(ward, body, now=time.time() + away)) == "clock"
    assert send(header).status_code == 201
    assert tools.code(send(header)) == "replayed"
    read = sign_request(ward.key, world.hub.key.public, "GET", "/api/studies/demo", digest(b""))
    assert world.client.get("/api/studies/demo", headers={HEADER: read}).status_code == 200
    assert tools.code(world.client.get("/api/studies/demo", headers={HEADER: read})) == "replayed"


def test_nothing_is_received_of_a_file_whose_sender_is_not_enrolled(world: Any, tools: Any) -> None:
    world.add_study()
    ward, stranger, path = (
        world.ward("north"),
        SigningKey.generate(),
        "/api/studies/demo/contributions",
    )
    received = []

    async def parts() -> Any:
        for _ in range(3):
            received.append(1)
            yield b"x" * 9000

    def send(key: SigningKey) -> Any:
        header = sign_request(key, world.hub.key.public, "POST", path, digest(b"x" * 27_000))
        return world.client.post(path, content=parts(), headers={HEADER: header})

    assert tools.code(send(stranger)) == "not-authenticated"
    assert received == []
    assert tools.code(send(ward.key)) == "rejected"  # received, and no contribution
    assert len(received) == 3


def test_contributions_of_another_site_or_study_are_refused_with_their_own_code(
    world: Any, tools: Any
) -> None:
    study = world.add_study()
    other = world.add_study(tools.study_text("other"))
    changed = tools.study_text().replace("epsilon_max = 5.0", "epsilon_max = 6.0")
    north, south = world.ward("north"), world.ward("south")
    theirs = south.train(study)
    assert tools.code(world.submit(north, theirs)) == "wrong-site"
    assert tools.code(world.submit(north, north.train(study, key=south.key))) == "wrong-site"
    assert tools.code(world.submit(north, north.train(other))) == "study-differs"
    from consilience.study.study import Study

    assert tools.code(world.submit(north, north.train(Study.from_text(changed)))) == "study-differs"
    assert world.hub.store.contributions("demo") == []


def _resealed(
    contribution: Contribution, key: SigningKey, tensors: Any = None, **facts: Any
) -> bytes:
    """Return a contribution with other facts or numbers under a valid signature."""
    whole = {
        name: value
        for name, value in contribution.sealed.facts.items()
        if name not in ("key", "tensors")
    }
    return Sealed.seal(
        "contribution", {**whole, **facts}, tensors or contribution.sealed.tensors, key
    ).to_bytes()


def test_validly_signed_lies_are_rejected(world: Any, tools: Any) -> None:
    study = world.add_study()
    ward = world.ward("north")
    honest = ward.train(study)
    facts = honest.sealed.facts
    tensors = dict(honest.sealed.tensors)
    better = {**facts["guarantee"], "epsilon": 0.01}
    nothing: dict[str, Any] = {**facts["guarantee"], "epsilon": "inf"}
    lies: list[bytes] = [
        _resealed(honest, ward.key, guarantee=better),
        _resealed(
            honest,
            ward.key,
            guarantee=nothing,
            events="[]",
            settings={**facts["settings"], "epsilon": "inf"},
        ),
        _resealed(honest, ward.key, receipt=None),
        _resealed(honest, ward.key, settings={**facts["settings"], "regularization": 1e-9}),
        _resealed(honest, ward.key, classes=["no", "maybe"]),
        _resealed(honest, ward.key, learner="os.system"),
        _resealed(honest, ward.key, n_features=3),
        _resealed(honest, ward.key, sequence=0),
        _resealed(honest, ward.key, sequence="1"),
        _resealed(honest, ward.key, tensors={**tensors, "coef": np.zeros((1, 3))}),
        _resealed(honest, ward.key, tensors={**tensors, "more": np.zeros(3)}),
        _resealed(ward.train(study, epsilon=1.0), ward.key, events="[" * 2000),
        _not_finite(honest, ward.key),
        honest.sealed.to_bytes()[:-8],
        b"",
        b"PK\x03\x04" + b"\0" * 100,
    ]
    for lie in lies:
        assert tools.code(world.submit(ward, lie)) == "rejected"
    assert world.hub.store.contributions("demo") == []
    assert world.submit(ward, honest).status_code == 201


def _not_finite(contribution: Contribution, key: SigningKey) -> bytes:
    """Return a file that is whole and signed, with a number in it that is not finite."""
    import hashlib

    tensors = {name: np.array(tensor) for name, tensor in contribution.sealed.tensors.items()}
    tensors["coef"][0, 0] = np.inf
    listed = {
        name: {
            "dtype": one.dtype.name,
            "shape": list(one.shape),
            "sha256": hashlib.sha256(one.tobytes()).hexdigest(),
        }
        for name, one in tensors.items()
    }
    facts = {**contribution.sealed.facts, "tensors": listed}
    return Sealed(
        "contribution", facts, tensors, key.sign(message_of("contribution", canonical(facts)))
    ).to_bytes()


def test_half_a_character_is_no_text(world: Any, tools: Any) -> None:
    study = world.add_study()
    ward = world.ward("north")
    body = ward.train(study).sealed.to_bytes()
    hostile = body.replace(
        b'\\"software\\":\\"',
        b'\\"software\\":\\"\\ud800'[: len(b'\\"software\\":\\"')] + b"\\ud800",
    )
    start = int.from_bytes(hostile[:8], "little") + len(hostile) - len(body)
    assert tools.code(world.submit(ward, start.to_bytes(8, "little") + hostile[8:])) == "rejected"


def test_only_a_trusted_hub_takes_exact_learners(world: Any, tools: Any) -> None:
    study = world.add_study(
        tools.study_text(hub="trusted", aggregator='name = "Average"\nepsilon = 1.0')
    )
    ward = world.ward("north")
    assert world.submit(ward, ward.train(study)).status_code == 201
    world.add_study(tools.study_text("open"))
    same = world.ward("north", "open")
    exact = _resealed(ward.train(study), ward.key, study=world.hub.study("open")[1].reference)
    assert tools.code(world.submit(same, exact, "open")) == "rejected"


def test_a_key_can_be_rotated_and_revoked(world: Any, tools: Any) -> None:
    study = world.add_study()
    ward = world.ward("north")
    old, new = ward.key, SigningKey.generate()

    def rotate(proof: SigningKey) -> Any:
        signature = proof.sign(rotation_message(old.public, new.public)).hex()
        body = json.dumps({"study": "demo", "new_key": new.public, "proof": signature}).encode()
        return world.call(ward, "POST", "/api/keys/rotation", body, key=old)

    assert tools.code(rotate(old)) == "not-authenticated"
    assert rotate(new).json()["key"] == new.public
    assert tools.code(world.call(ward, "GET", "/api/studies/demo", key=old)) == "key-revoked"
    ward.key = new
    assert world.submit(ward, ward.train(study)).status_code == 201
    assert (
        world.client.delete(
            "/api/studies/demo/sites/north/key", headers=world.coordinator
        ).status_code
        == 200
    )
    assert tools.code(world.call(ward, "GET", "/api/studies/demo")) == "key-revoked"
    assert [row["state"] for row in world.hub.store.contributions("demo")] == ["accepted"]
    # A revoked key never comes back; the site does, by an invitation in its own name.
    body = json.dumps({"invitation": world.invitation(site="north"), "site": "north"}).encode()
    assert tools.code(world.call(ward, "POST", "/api/enrolments", body)) == "name-taken"
    ward.key = SigningKey.generate()
    assert (
        tools.code(world.call(ward, "POST", "/api/enrolments", body.replace(b"north", b"south")))
        == "invitation"
    )
    assert world.call(ward, "POST", "/api/enrolments", body).status_code == 201
    assert tools.code(world.submit(ward, ward.train(study))) == "stale"
    assert world.submit(ward, ward.train(study, sequence=2)).status_code == 201
    answer = world.client.delete(
        "/api/studies/demo/sites/north/key?withdraw=true", headers=world.coordinator
    )
    assert answer.status_code == 200
    assert {row["state"] for row in world.hub.store.contributions("demo")} == {
        "superseded",
        "withdrawn",
    }


def test_a_site_that_joined_to_fetch_only_fetches_only(world: Any, tools: Any) -> None:
    study = world.add_study()
    reader = world.ward("reader", fetch_only=True)
    world.fill(study, 2)
    world.combiner.run(at_once=True)
    assert world.call(reader, "GET", "/api/studies/demo/release").status_code == 200
    assert tools.code(world.submit(reader, reader.train(study))) == "not-allowed"


def test_a_closed_study_takes_nothing_more_and_keeps_its_release(world: Any, tools: Any) -> None:
    study = world.add_study()
    wards = world.fill(study, 2)
    world.combiner.run(at_once=True)
    late = world.ward("late")
    assert (
        world.client.post("/api/studies/demo/close", headers=world.coordinator).json()["status"]
        == "closed"
    )
    assert tools.code(world.submit(late, late.train(study))) == "study-closed"
    answer = world.client.post("/api/studies/demo/invitations", json={}, headers=world.coordinator)
    assert tools.code(answer) == "study-closed"
    assert world.call(wards[0], "GET", "/api/studies/demo/release").status_code == 200
    same = world.hub.store.contributions("demo", site=wards[0].name)[0]
    repeated = world.submit(wards[0], world.hub.store.content(same["sha256"]))
    assert repeated.status_code == 200  # an answer that was lost can still be had


def test_public_files_are_the_ones_the_study_names(world: Any, tools: Any, tmp_path: Any) -> None:
    sha256 = tools.write_csv(tmp_path / "public.csv", tools.table(20, 1))
    world.add_study(tools.study_text(public=sha256))
    ward, path = world.ward("north"), "/api/studies/demo/files/public.csv"
    content = (tmp_path / "public.csv").read_bytes()
    assert tools.code(world.call(ward, "GET", path)) == "not-found"
    assert (
        tools.code(world.client.put(path, content=content + b"\n", headers=world.coordinator))
        == "file-differs"
    )
    other = world.client.put(
        "/api/studies/demo/files/x.csv", content=content, headers=world.coordinator
    )
    assert tools.code(other) == "not-found"
    assert tools.code(world.call(ward, "PUT", path, content)) == "not-authenticated"
    assert world.client.put(path, content=content, headers=world.coordinator).status_code == 200
    assert world.call(ward, "GET", path).content == content
    assert world.call(ward, "GET", f"/api/studies/demo/files/{sha256}").content == content


def test_studies_are_checked_and_never_replaced(world: Any, tools: Any) -> None:
    text = tools.study_text()
    world.add_study(text)
    world.add_study(text + "\n# the same study, with a comment\n")
    assert len(world.hub.store.studies()) == 1

    def add(content: Any) -> Any:
        return world.client.post("/api/studies", content=content, headers=world.coordinator)

    assert tools.code(add(text.replace("min_sites = 2", "min_sites = 3"))) == "name-taken"
    assert tools.code(add("not toml [")) == "study-invalid"
    assert tools.code(add(b"\xff\xfe")) == "study-invalid"
    assert tools.code(add(text.replace("demo", "Bad Name"))) == "study-invalid"
    assert tools.code(add(b"#" * (2 << 20))) == "too-large"


def test_coordinators_log_in_with_a_password(sqlite_world: Any, tools: Any) -> None:
    from consilience.hub.operating import add_coordinator

    world = sqlite_world
    add_coordinator(world.folder / "hub", "bea", "correct horse battery")

    def log_in(name: str, password: str) -> Any:
        return world.client.post("/api/sessions", json={"name": name, "password": password})

    assert tools.code(log_in("bea", "wrong")) == "not-authenticated"
    assert tools.code(log_in("nobody", "correct horse battery")) == "not-authenticated"
    token = log_in("bea", "correct horse battery").json()["token"]
    bearer = {"authorization": f"Bearer {token}"}
    assert world.client.get("/api/studies", headers=bearer).status_code == 200
    stored = "".join(map(str, world.hub.store.account("bea").values()))
    assert "correct horse" not in stored
    assert world.hub.store.session(token) is None  # the database knows its hash only
    world.client.delete("/api/sessions", headers=bearer)
    assert tools.code(world.client.get("/api/studies", headers=bearer)) == "not-authenticated"
    token = log_in("bea", "correct horse battery").json()["token"]
    add_coordinator(world.folder / "hub", "bea", "another password")  # ends what the old one opened
    answer = world.client.get("/api/studies", headers={"authorization": f"Bearer {token}"})
    assert tools.code(answer) == "not-authenticated"


def test_files_beyond_the_limit_are_refused(tmp_path: Any, tools: Any) -> None:
    from consilience.hub.api.app import create_app

    settings = tools.quick(tmp_path / "hub", most_bytes=10_000)
    with tools.Client(create_app(settings)) as client:
        world = tools.World(client, tmp_path)
        world.add_study()
        ward = world.ward("north")
        assert tools.code(world.submit(ward, b"x" * 10_001)) == "too-large"
        chunked = sign_request(
            ward.key, world.hub.key.public, "POST", "/api/studies/demo/contributions", "0" * 64
        )

        async def parts() -> Any:
            for _ in range(9):
                yield b"x" * 9000

        answer = client.post(
            "/api/studies/demo/contributions", content=parts(), headers={HEADER: chunked}
        )
        assert tools.code(answer) == "too-large"
        assert list(world.hub.store.files.incoming.iterdir()) == []


def test_requests_beyond_the_rate_are_refused(tmp_path: Any, tools: Any) -> None:
    from consilience.hub.api.app import create_app
    from consilience.hub.auth import Rate

    settings = tools.quick(tmp_path / "hub", by_key=Rate(0.001, 3), by_guess=Rate(0.001, 4))
    with tools.Client(create_app(settings)) as client:
        world = tools.World(client, tmp_path)
        world.add_study()
        ward = world.ward("north")
        answers = [world.call(ward, "GET", "/api/studies/demo") for _ in range(4)]
        assert [one.status_code for one in answers] == [200, 200, 200, 429]
        assert tools.code(answers[-1]) == "too-many"
        other = world.ward("south")
        assert world.call(other, "GET", "/api/studies/demo").status_code == 200
        guesses = [
            client.post("/api/sessions", json={"name": "ann", "password": "x"}) for _ in range(3)
        ]
        assert tools.code(guesses[-1]) == "too-many"


def test_an_address_beyond_its_rate_is_told_so_in_the_words_it_reads(
    tmp_path: Any, tools: Any
) -> None:
    from consilience.hub.api.app import create_app
    from consilience.hub.auth import Rate

    with tools.Client(
        create_app(tools.quick(tmp_path / "hub", by_address=Rate(0.001, 2)))
    ) as client:
        assert client.get("/login").status_code == client.get("/api/hub").status_code == 200
        page, machine = client.get("/login"), client.get("/api/hub")
        assert (page.status_code, machine.status_code) == (429, 429)
        assert "Too many" in page.text
        assert page.headers["content-type"].startswith("text/html")
        assert tools.code(machine) == "too-many"
        assert client.get("/healthz").status_code == 200  # monitoring is never limited


@pytest.mark.parametrize("wrong", ["%00", "a%00b", "%ff", "%ed%a0%80", "0" * 5000])
def test_no_part_of_an_address_makes_the_database_fail(world: Any, tools: Any, wrong: str) -> None:
    """PostgreSQL takes no zero bytes: each part of each address has one in turn."""
    world.add_study()
    ward = world.ward("north")
    right = {"study": "demo", "site": "north", "sequence": "1", "number": "1", "file": "x.csv"}
    cookie = {"cookie": f"consilience={world.coordinator['authorization'].split()[1]}"}
    asked = 0
    for route in world.app.routes:
        parts = re.findall(r"{(\w+)}", route.path)
        for part in parts:
            path = route.path
            for name in parts:
                path = path.replace(f"{{{name}}}", wrong if name == part else right.get(name, "x"))
            for method in route.methods - {"HEAD"}:
                asked += 1
                for answer in (
                    world.call(ward, method, path),
                    world.client.request(method, path, headers=world.coordinator),
                    world.client.request(method, path, headers=cookie),
                ):
                    assert answer.status_code < 500, (method, path, answer.text)
    assert asked > 50
    for query in ("like", "page", "study", "done", "next", "after"):
        for path in ("/studies", "/studies/demo/sites", "/studies/demo", "/audit", "/login"):
            answer = world.client.get(f"{path}?{query}={wrong}", headers=cookie)
            assert answer.status_code < 500, (path, query)


def test_every_route_refuses_in_one_shape(world: Any, tools: Any) -> None:
    """Try every route without credentials, with wrong ones and with junk: errors look the same."""
    world.add_study()
    ward = world.ward("north")
    seen = set()
    described = world.client.get("/openapi.json").json()["paths"]
    assert {path for path in described} >= {
        "/healthz",
        "/metrics",
        "/api/studies/{study}/contributions",
    }
    for path in described:
        for wrong in ("demo", "%00", "%ff" * 999):
            filled = path
            for name in ("study", "file", "site", "sequence"):
                filled = filled.replace(f"{{{name}}}", wrong)
            for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
                for body in (b"{}", b"\xff\x00"):
                    answers = [
                        world.client.request(method, filled, content=body),
                        world.client.request(
                            method, filled, content=body, headers={"authorization": "Bearer x"}
                        ),
                        world.client.request(
                            method, filled, content=body, headers={HEADER: "key=1"}
                        ),
                    ]
                    if body == b"{}":
                        answers.append(world.call(ward, method, filled, body))
                    for answer in answers:
                        assert answer.status_code < 500, (method, filled, answer.text)
                        if answer.status_code >= 400:
                            seen.add(tools.code(answer))
    assert seen <= set(ERRORS)
    assert {"not-found", "wrong-method", "not-authenticated", "malformed"} <= seen


def test_metrics_and_health_tell_no_names(world: Any) -> None:
    study = world.add_study()
    world.fill(study, 2)
    text = world.client.get("/metrics").text
    assert 'consilience_rows{table="contributions",state="accepted"} 2' in text
    assert 'route="/api/studies/{study}/contributions",status="201"} 2' in text
    assert "ward" not in text
    assert "demo" not in text
    assert world.client.get("/healthz").json()["status"] == "ok"


def test_the_audit_log_names_every_change(world: Any) -> None:
    study = world.add_study()
    world.fill(study, 2)
    world.combiner.run(at_once=True)
    entries = world.client.get("/api/audit", headers=world.coordinator).json()["entries"]
    actions = [entry["action"] for entry in entries]
    assert actions[0] == "account added"
    for action in (
        "study created",
        "site invited",
        "site enrolled",
        "contribution accepted",
        "release published",
    ):
        assert action in actions
    assert [entry["number"] for entry in entries] == list(range(1, len(entries) + 1))
    assert all(a["hash"] == b["previous"] for a, b in pairwise(entries))


def test_the_protocol_page_names_every_address_and_code(sqlite_world: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    for path in sqlite_world.client.get("/openapi.json").json()["paths"]:
        shown = path
        letters = {"study": "S", "file": "F", "site": "N", "sequence": "N", "digest": "D"}
        letters |= {"number": "N", "token": "TOKEN"}
        for name, letter in letters.items():
            shown = shown.replace(f"{{{name}}}", letter)
        assert shown in page or f"`{shown.partition('/S')[2]}`" in page, path
    for name, (status, _) in ERRORS.items():
        assert f"| `{name}` | {status} |" in page, name
