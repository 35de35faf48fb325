"""Limits that hold to the last: no file, key, entry, session or place beyond what is granted."""

import json
import threading
from typing import Any

import pytest

from consilience.files.sealed import SigningKey
from consilience.hub import auth
from consilience.hub.auth import Logins, Rate, fits_password, hash_password
from consilience.hub.store.sites import MOST_KEYS_DAILY
from consilience.protocol import Refusal, rotation_message

IN_FILES = {"small_bytes": -1, "most_daily": 2}


def cookie_of(headers: dict[str, str]) -> dict[str, str]:
    return {"cookie": "consilience=" + headers["authorization"].split()[1]}


def kept_files(world: Any) -> set[str]:
    files = world.hub.store.files.folder.glob("??/*")
    return {path.parent.name + path.name for path in files}


@pytest.mark.parametrize("world", [IN_FILES], indirect=True)
def test_a_refused_contribution_leaves_no_file(world: Any, tools: Any) -> None:
    study = world.add_study()
    ward = world.ward("north")
    for sequence in (1, 2):
        assert world.submit(ward, ward.train(study, sequence=sequence)).status_code == 201
    before = kept_files(world)
    assert len(before) == 2
    for sequence in (3, 4):
        answer = world.submit(ward, ward.train(study, sequence=sequence))
        assert tools.code(answer) == "too-often"
    assert kept_files(world) == before


@pytest.mark.parametrize("world", [{"small_bytes": -1}], indirect=True)
def test_a_contribution_refused_at_the_last_moment_leaves_no_file(
    world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site is revoked while its file is kept; the file of a row stays in any case."""
    study = world.add_study()
    ward, other = world.ward("north"), world.ward("south")
    assert world.submit(other, other.train(study)).status_code == 201
    before = kept_files(world)
    keep = world.hub.store.files.keep

    def revoke_and_keep(*arguments: Any) -> Any:
        world.hub.revoke("demo", "north", "operator")
        return keep(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(world.hub.store.files, "keep", revoke_and_keep)
        assert tools.code(world.submit(ward, ward.train(study))) == "key-revoked"
    assert kept_files(world) == before
    for sha256 in before:
        world.hub.store.remove_unnamed(sha256)
    assert kept_files(world) == before


@pytest.mark.parametrize("world", [{"small_bytes": -1}], indirect=True)
def test_no_row_names_a_file_that_was_removed_meanwhile(
    world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, ward = world.add_study(), world.ward("north")
    keep = world.hub.store.files.keep

    def keep_and_lose(*arguments: Any) -> None:
        keep(*arguments).unlink()

    contribution = ward.train(study)
    with monkeypatch.context() as patch:
        patch.setattr(world.hub.store.files, "keep", keep_and_lose)
        assert tools.code(world.submit(ward, contribution)) == "unavailable"
    assert world.hub.store.contributions("demo") == []
    assert world.submit(ward, contribution).status_code == 201


def test_a_site_rotates_its_key_a_few_times_a_day(world: Any, tools: Any) -> None:
    world.add_study()
    ward = world.ward("north")

    def rotate() -> Any:
        new = SigningKey.generate()
        proof = new.sign(rotation_message(ward.key.public, new.public)).hex()
        body = json.dumps({"study": "demo", "new_key": new.public, "proof": proof}).encode()
        answer = world.call(ward, "POST", "/api/keys/rotation", body)
        ward.key = new if answer.status_code == 200 else ward.key
        return answer

    for _ in range(MOST_KEYS_DAILY - 1):
        assert rotate().status_code == 200
    length = len(world.hub.store.audit(limit=1000))
    assert tools.code(rotate()) == "too-often"
    assert len(world.hub.store.audit(limit=1000)) == length


@pytest.mark.parametrize("sqlite_world", [{"by_note": Rate(1e-6, 2)}], indirect=True)
def test_nobody_fills_the_audit_log_by_repeating(sqlite_world: Any) -> None:
    world = sqlite_world
    world.fill(world.add_study(), 2)
    ward = world.wards["ward 0"]

    def count(action: str) -> int:
        return sum(entry["action"] == action for entry in world.hub.store.audit(limit=1000))

    for _ in range(5):
        link = world.call(ward, "POST", "/api/studies/demo/visits").json()["path"]
        token = world.client.get(link).text.split('name="token" value="')[1].split('"')[0]
        assert world.client.post(link, data={"token": token}).status_code == 303
    assert count("dashboard opened") == 2
    for key in ("one", "one", "one", "two"):
        answer = world.client.post(
            "/api/studies/demo/releases", json={"key": key}, headers=world.coordinator
        )
        assert answer.json()["sequence"] == 1
    assert count("release asked for") == 1


def test_a_changed_password_also_ends_logins_that_have_begun(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The password is compared outside the transaction that adds the session."""
    store = world.hub.store
    store.add_account("eve", hash_password("correct horse battery"), "operator")

    def change_meanwhile(password: str, stored: str) -> bool:
        fits = fits_password(password, stored)
        store.set_password("eve", hash_password("another password"), "operator")
        return fits

    logins: Logins = world.app.state.logins
    with monkeypatch.context() as patch:
        patch.setattr(auth, "fits_password", change_meanwhile)
        with pytest.raises(Refusal) as refused:
            logins.log_in("eve", "correct horse battery", "10.0.0.1", hours=1)
    assert refused.value.code == "not-authenticated"
    assert not store.knows("eve", "10.0.0.1")
    assert logins.log_in("eve", "another password", "10.0.0.1", hours=1)


def test_all_sessions_of_a_coordinator_are_one_sender(
    sqlite_world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = sqlite_world
    sha256 = tools.write_csv(world.folder / "test.csv", tools.table(30, 7))
    world.add_study(tools.study_text(test=sha256))
    senders, lock = list[str](), threading.Lock()
    place = auth.Uploads.place

    def note(self: Any, sender: str) -> Any:
        with lock:
            senders.append(sender)
        return place(self, sender)

    monkeypatch.setattr(auth.Uploads, "place", note)
    for _ in range(2):
        token, _ = auth.new_token(world.hub.store, "ann", hours=1, kind="session")
        headers = {"authorization": f"Bearer {token}"}
        world.client.post("/studies/demo/files/test.csv", headers=cookie_of(headers))
    world.client.put("/api/studies/demo/files/test.csv", headers=world.coordinator)
    assert senders == ["coordinator:ann"] * 3


def test_the_audit_log_has_logouts_and_its_page_claims_no_more_than_it_has(world: Any) -> None:
    page = world.client.get("/audit", headers=cookie_of(world.coordinator)).text
    assert "Everything that was done" not in page
    assert "Reading is not in it, nor is the removal of old files." in page
    for _ in range(2):
        world.client.delete("/api/sessions", headers=world.coordinator)
    actions = [entry["action"] for entry in world.hub.store.audit(limit=1000)]
    assert actions.count("logged out") == 1
