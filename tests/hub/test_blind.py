"""A hub that sees sums only: its roster, its batches, and what it refuses from whom."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from blindhub import BlindHub
from consilience.blind.masked import ACKNOWLEDGEMENT, OPENING, Acknowledgement, Batch, MaskedFile
from consilience.blind.roster import Card
from consilience.errors import ConsilienceError, SettingsError
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import Sealed, SigningKey
from consilience.hub import operating
from consilience.hub.auth import new_token
from consilience.hub.hub import Hub, Settings
from consilience.hub.state import read_study
from consilience.hub.store.database import now
from consilience.hub.store.tables import acknowledgements
from consilience.protocol import Refusal
from consilience.statistics.total import Total
from consilience.study.check import check_release
from studies import public_rows


@pytest.fixture
def blind(sqlite_world: Any) -> BlindHub:
    return make(sqlite_world)


def make(world: Any, **more: Any) -> BlindHub:
    def send(method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        answer = world.client.request(method, path, content=body, headers=headers)
        return answer.status_code, answer.content

    return BlindHub(world.hub, world.folder, send, **more)


def release(world: Any, name: str = "heart-risk") -> Release:
    world.combiner.run(at_once=True)
    return Release.load(world.hub.release_path(name)[1], key=world.hub.key.public)


def states(blind: BlindHub) -> list[str]:
    return [batch["state"] for batch in blind.hub.store.batches(blind.name)]


def test_a_hub_learns_from_votes_that_it_never_sees(sqlite_world: Any) -> None:
    blind = make(sqlite_world, statistic="VoteTally", settings=public_rows())
    blind.freeze()
    blind.hand_over(*range(4))
    assert blind.work() == []
    sqlite_world.combiner.run(at_once=True)
    assert blind.work() == []
    made = check_release(blind.study, release(sqlite_world))
    assert made.guarantee.unit == "site"
    assert made.total is not None
    assert made.total.size == pytest.approx(sum(blind.study.build(1.0).scale for _ in range(4)))
    assert all(source.size is None for source in made.sources)
    page = sqlite_world.client.get(f"/studies/{blind.name}")
    assert page.status_code < 400


def test_a_batch_of_the_whole_roster_becomes_a_release(world: Any) -> None:
    blind = make(world)
    blind.freeze()
    blind.hand_over(*range(4))
    assert blind.work() == []
    world.combiner.run(at_once=True)
    assert states(blind) == ["listed"]
    assert blind.work(0) == []
    with pytest.raises(Refusal, match="no release"):
        release(world)
    assert blind.work() == []
    assert states(blind) == ["opened"]
    made = release(world)
    assert [source.site for source in made.sources] == [
        file["site"] for file in blind.hub.store.batches(blind.name)[0]["files"]
    ]
    assert [len(each.log()) for each in blind.keyholders] == [1, 1]
    assert world.hub.store.verify()


def test_a_file_that_breaks_the_total_is_named(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can be taken out of a sum, but a coordinator can withdraw it with its batch."""
    blind = make(world)
    blind.freeze()
    blind.hand_over(*range(4))
    blind.work()
    world.combiner.run(at_once=True)
    blind.work()
    assert states(blind) == ["opened"]
    load, opens = Contribution.load.__func__, Total.open

    def marked(cls: Any, source: Any, **options: Any) -> Contribution:
        contribution = load(cls, source, **options)
        contribution.learner.poison = contribution.site == "site 2"
        return contribution

    def fragile(self: Any, members: Any, *more: Any) -> Any:
        if any(getattr(member, "poison", False) for member in members):
            raise OverflowError("broken")
        return opens(self, members, *more)

    monkeypatch.setattr(Contribution, "load", classmethod(marked))
    monkeypatch.setattr(Total, "open", fragile)
    world.combiner.run(at_once=True)
    problem = blind.hub.store.study(blind.name)["problem"]
    assert "'site 2' is left out: OverflowError" in problem
    assert "the whole batch leaves" in problem
    assert "site 1" not in problem


def refusals(blind: BlindHub) -> list[tuple[str, str]]:
    """Return what keyholders were refused, as the audit log has it."""
    return [
        (entry["action"], entry["facts"]["code"])
        for entry in blind.hub.store.audit(limit=1000)
        if entry["action"].endswith("refused") and entry["actor"].startswith("keyholder:")
    ]


# ------------------------------------------------------------------------------------- the roster


def test_nobody_is_enrolled_once_the_roster_is_frozen(blind: BlindHub, sqlite_world: Any) -> None:
    """A hub could otherwise fill a batch with sites that it made up."""
    hub = blind.hub
    open_one, _ = hub.invite(blind.name, "operator")
    roster = blind.freeze()
    key = SigningKey.generate()
    with pytest.raises(Refusal, match="already used"):
        hub.enrol(code=open_one, site="late", key=key.public, nonce="0" * 32)
    with pytest.raises(Refusal, match="roster of this study is frozen"):
        hub.invite(blind.name, "operator")
    proof = key.sign(f"consilience rotation {blind.keys[0].public} {key.public}".encode()).hex()
    with pytest.raises(Refusal, match="roster of this study is frozen"):
        hub.rotate(blind.name, blind.keys[0].public, key.public, proof, "1" * 32)
    reader, _ = hub.invite(blind.name, "operator", fetch_only=True)
    hub.enrol(code=reader, site="reader", key=key.public, nonce="2" * 32, fetch_only=True)
    assert hub.blind.freeze(blind.study, {}, "operator").digest == roster.digest
    assert "reader" not in roster.names.values()


def test_a_roster_says_who_checked_each_key_and_has_enough_sites(blind: BlindHub) -> None:
    with pytest.raises(Refusal, match="Nobody is named for site 0"):
        blind.hub.blind.freeze(blind.study, {"site 1": "ann"}, "operator")
    with pytest.raises(SettingsError, match="not frozen yet"):
        blind.desk(blind.keyholders[0]).agree()
    for i in (1, 2, 3):
        blind.hub.revoke(blind.name, f"site {i}", "operator")
    with pytest.raises(Refusal, match="fewer than 3 sites"):
        blind.hub.blind.freeze(blind.study, {"site 0": "ann"}, "operator")
    assert blind.hub.store.roster(blind.name) is None


def test_the_operator_sees_the_keys_before_the_roster_is_frozen(
    blind: BlindHub, capsys: pytest.CaptureFixture[str]
) -> None:
    from consilience.cli.app import main

    folder = str(blind.hub.settings.folder)
    for arguments in ((), ("--checked-by", "ann", "--checked", "site 2=ben")):
        with pytest.raises(SystemExit) as ended:
            main(["hub", "roster", blind.name, *arguments, "--yes", "--folder", folder])
        assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "not frozen yet" in said
    assert said.count(blind.keys[0].public) == 2
    assert said.count("compared by ann") == 3
    assert said.count("compared by ben") == 1


# ---------------------------------------------------------------------------- who is in which batch


def test_late_sites_form_a_second_batch_when_others_lend_them_their_noise(
    blind: BlindHub, sqlite_world: Any
) -> None:
    blind.freeze()
    blind.hand_over(0, 1, 2)
    blind.work()
    sqlite_world.combiner.run(at_once=True)
    assert states(blind) == []  # a fourth site may still come
    blind.hub.blind.list_batch(blind.study, "operator")
    blind.work()
    assert len(release(sqlite_world).sources) == 3
    blind.hand_over(3)
    blind.work()
    waiting = blind.hub.blind.find_waiting(blind.study)
    assert list(waiting.reasons.values()) == ["1 of the 3 sites that it needs are there"]
    with pytest.raises(ConsilienceError, match="added up twice"):
        blind.hand_over(0, sequence=2)
    blind.hand_over(0, 1, epsilon=None, sequence=2)
    blind.work()
    sqlite_world.combiner.run(at_once=True)
    blind.work()
    assert states(blind) == ["opened", "opened"]
    made = release(sqlite_world)
    held = [source.site for source in made.sources if source.guarantee.epsilon > 0]
    assert sorted(held) == [f"site {i}" for i in range(4)]
    assert len(made.sources) == 6
    check_release(blind.study, made)
    assert [len(each.log()) for each in blind.keyholders] == [2, 2]


def test_a_withdrawal_before_a_batch_is_listed_takes_one_file_and_afterwards_all(
    blind: BlindHub, sqlite_world: Any
) -> None:
    blind.freeze()
    blind.hand_over(*range(4))
    blind.work()
    blind.client(blind.keys[3]).withdraw(blind.name)
    batch = blind.hub.blind.list_batch(blind.study, "operator")
    files = blind.hub.store.batches(blind.name)[0]["files"]
    assert sorted(file["site"] for file in files) == ["site 0", "site 1", "site 2"]
    blind.work()
    release(sqlite_world)
    blind.client(blind.keys[0]).withdraw(blind.name)
    assert states(blind) == ["withdrawn"]
    assert blind.hub.store.release(blind.name) is None
    blind.hand_over(1, 2, 3, sequence=2)
    blind.work()
    again = blind.hub.blind.list_batch(blind.study, "operator")
    assert again["digest"] != batch["digest"]
    blind.work()
    made = release(sqlite_world)
    assert sorted(source.site for source in made.sources) == ["site 1", "site 2", "site 3"]


def test_a_file_that_is_replaced_before_a_batch_is_listed_is_in_none(
    blind: BlindHub, sqlite_world: Any
) -> None:
    blind.freeze()
    blind.hand_over(*range(4))
    blind.work()
    blind.hand_over(0, sequence=2)
    blind.work()
    sqlite_world.combiner.run(at_once=True)
    files = blind.hub.store.batches(blind.name)[0]["files"]
    assert {(file["site"], file["sequence"]) for file in files} == {
        ("site 0", 2),
        ("site 1", 1),
        ("site 2", 1),
        ("site 3", 1),
    }


def test_no_site_delays_a_batch_by_replacing_its_file(blind: BlindHub, sqlite_world: Any) -> None:
    """Noise alone costs nothing: one file a day would keep all others waiting for ever."""
    blind.freeze()
    blind.hand_over(0, 1, 2)
    blind.work()
    yesterday = acknowledgements.update().values(received=now(seconds=-90_000))
    blind.hub.store.write(lambda db: db.execute(yesterday))
    blind.hand_over(0, epsilon=None, sequence=2)
    blind.work()
    sqlite_world.combiner.run(at_once=True)
    assert states(blind) == ["listed"]


def test_the_hub_looks_only_at_studies_where_enough_files_wait_for_a_batch(
    blind: BlindHub, sqlite_world: Any
) -> None:
    """It asks every second. What waits when a study is closed is still listed."""

    def look() -> bool:
        asked: list[str] = []
        note = lambda db, cursor, statement, *more: asked.append(statement)  # noqa: E731
        sa.event.listen(sa.Engine, "before_cursor_execute", note)
        try:
            sqlite_world.combiner.run(at_once=True)
        finally:
            sa.event.remove(sa.Engine, "before_cursor_execute", note)
        return any("FROM acknowledgements" in statement for statement in asked)

    blind.freeze()
    blind.hand_over(0, 1)
    blind.work()
    assert not look()
    blind.hand_over(2, 3)
    blind.work()
    blind.hub.close_study(blind.name, "operator")
    assert look()
    assert states(blind) == ["listed"]
    blind.work()
    assert len(release(sqlite_world).sources) == 4
    assert not look()


def test_too_few_sites_make_no_batch_even_if_a_coordinator_asks(blind: BlindHub) -> None:
    blind.freeze()
    blind.hand_over(0, 1)
    blind.work()
    with pytest.raises(Refusal, match="No batch can be opened now"):
        blind.hub.blind.list_batch(blind.study, "operator")


def test_no_keyholder_opens_what_a_hostile_hub_adds_to_a_batch(blind: BlindHub) -> None:
    """Its store says that a batch differs by one file from one that was opened."""
    blind.freeze()
    blind.hand_over(0, 1, 2, 3)
    blind.work()
    files = [row for row, _ in blind.hub.store.acknowledged(blind.name)]
    digests = sorted(row["digest"] for row in files)
    desk, keyholder = blind.desk(blind.keyholders[0]), blind.keyholders[0]
    masked = {each: MaskedFile.of(_load(blind, each)) for each in digests}
    keyholder.open(Batch.of(masked[each] for each in digests[:3]))
    whole = Batch.of(masked.values())
    blind.hub.store.list_batch(blind.name, whole.digest, whole.files, "hub")
    assert desk.batches(keyholder.key.public) == [whole]
    (refused,) = blind.work(0)
    assert "opened before" in refused


def _load(blind: BlindHub, digest: str) -> Sealed:
    rows = {row["digest"]: row for row in blind.hub.store.contributions(blind.name)}
    return Contribution.load(blind.hub.store.content(rows[digest]["sha256"])).sealed


# ----------------------------------------------------------------------------- what sites may send


def test_files_are_refused_that_were_made_for_other_terms(
    blind: BlindHub, sqlite_world: Any
) -> None:
    other = make(sqlite_world, name="other-study")
    other.freeze()
    blind.freeze()
    stranger = SigningKey.generate()
    with pytest.raises(ConsilienceError, match="another version"):
        blind.submit(0, other.mask(0, signing=blind.keys[0]))
    with pytest.raises(ConsilienceError, match="another site"):
        blind.submit(0, blind.mask(0, signing=stranger))  # not on the roster
    first = blind.mask(0).sealed
    second = blind.mask(1).sealed
    copied = {**second.facts["blind"], "seeds": first.facts["blind"]["seeds"]}
    facts = {name: value for name, value in second.facts.items() if name not in ("key", "tensors")}
    forged = Sealed.seal("contribution", {**facts, "blind": copied}, second.tensors, blind.keys[1])
    with pytest.raises(ConsilienceError, match="not sealed for it"):
        blind.submit(1, Contribution(forged))
    assert blind.hub.store.contributions(blind.name) == []
    blind.submit(0, Contribution(first))
    assert len(blind.hub.store.contributions(blind.name)) == 1


# ----------------------------------------------------------------------- what keyholders may send


def test_strangers_and_sites_cannot_post_as_keyholders(blind: BlindHub) -> None:
    blind.freeze()
    for key in (SigningKey.generate(), blind.keys[0]):
        client = blind.client(key)
        for what in ("cards", "acknowledgements", "openings"):
            with pytest.raises(SettingsError, match="not that of a keyholder"):
                client.request("POST", f"/api/studies/{blind.name}/blind/{what}", b"x" * 1000)
        for what in ("files", "batches"):
            with pytest.raises(SettingsError, match="not that of a keyholder"):
                client.request("GET", f"/api/studies/{blind.name}/blind/{what}")


def test_hostile_answers_of_a_keyholder_are_refused_and_named(
    blind: BlindHub, sqlite_world: Any
) -> None:
    other = make(sqlite_world, name="other-study")
    for study in (blind, other):
        study.freeze()
        study.hand_over(*range(4))
        study.work()
    sqlite_world.combiner.run(at_once=True)
    keyholder, second = blind.keyholders
    desk = blind.desk(keyholder)
    (batch,) = desk.batches(keyholder.key.public)
    opening = keyholder.open(batch)
    facts = {n: v for n, v in opening.sealed.facts.items() if n not in ("key", "tensors")}
    pads = opening.pads

    def sign(pads: Any = pads, key: SigningKey = keyholder.key, **more: object) -> Sealed:
        return Sealed.seal(OPENING, {**facts, **more}, {"pads": pads}, key)

    (foreign,) = other.desk(other.keyholders[0]).batches(other.keyholders[0].key.public)
    hostile: list[tuple[Sealed, str]] = [
        (sign(pads[:-1]), "another length"),
        (sign(pads.astype(np.float64)), "not an opening"),
        (sign(batch=foreign.digest), "does not list"),
        (sign(batch="0" * 64), "does not list"),
        (sign(study=other.study.reference), "another study"),
        (sign(key=second.key), "another key than the request"),
        (sign(number=0), "not an opening"),
        (blind.mask(0, sequence=9).sealed, "was expected"),
    ]
    for sealed, problem in hostile:
        with pytest.raises(ConsilienceError, match=problem):
            desk._post("openings", sealed)
    known = blind.hub.store.batches(blind.name)[0]["files"][0]["digest"]
    for facts_of, problem in (
        ({"study": blind.study.reference, "file": "0" * 64}, "does not have"),
        ({"study": other.study.reference, "file": known}, "another study"),
    ):
        with pytest.raises(ConsilienceError, match=problem):
            desk._post(
                "acknowledgements", Sealed.seal(ACKNOWLEDGEMENT, facts_of, {}, keyholder.key)
            )
    for roster, seal, problem in (
        (other.hub.blind.roster(other.study), "1" * 64, "another study"),
        (blind.hub.blind.roster(blind.study), "1" * 64, "only one"),
        (blind.hub.blind.roster(blind.study), blind.masking().holders[second.key.public], "same"),
    ):
        with pytest.raises(ConsilienceError, match=problem):
            desk.post_card(Card.make(roster, seal, keyholder.key))
    assert blind.hub.store.batches(blind.name)[0]["openings"] == []
    assert {action for action, _ in refusals(blind)} == {
        "opening refused",
        "acknowledgement refused",
        "card refused",
    }
    desk.post_opening(opening)
    desk.post_opening(opening)  # the answer was lost
    with pytest.raises(ConsilienceError, match="there can be only one"):
        desk._post("openings", sign(pads + 1))
    assert len(blind.hub.store.batches(blind.name)[0]["openings"]) == 1
    assert other.work() == []
    blind.work()
    sqlite_world.combiner.run(at_once=True)
    for study in (blind, other):
        assert blind.hub.store.release(study.name)["n_sites"] == 4


def test_a_keyholder_whose_log_was_put_back_is_noticed(blind: BlindHub, sqlite_world: Any) -> None:
    """It gives a second batch the number that it gave the first."""
    blind.freeze()
    blind.hand_over(0, 1, 2)
    blind.work()
    blind.hub.blind.list_batch(blind.study, "operator")
    blind.work(0)
    blind.hand_over(3)
    blind.hub.store.leave_out_batch(blind.name, 1, "operator")
    blind.hand_over(0, 1, sequence=2)
    blind.work()
    blind.hub.blind.list_batch(blind.study, "operator")
    keyholder = blind.keyholders[0]
    (batch,) = blind.desk(keyholder).batches(keyholder.key.public)
    first = keyholder.open(batch)
    facts = {n: v for n, v in first.sealed.facts.items() if n not in ("key", "tensors")}
    again = Sealed.seal(OPENING, {**facts, "number": 1}, {"pads": first.pads}, keyholder.key)
    with pytest.raises(ConsilienceError, match="put back to an older state"):
        blind.desk(keyholder)._post("openings", again)


def test_a_wrong_sum_of_pads_spoils_its_own_study_and_no_other(
    blind: BlindHub, sqlite_world: Any
) -> None:
    other = make(sqlite_world, name="other-study")
    for study in (blind, other):
        study.freeze()
        study.hand_over(*range(4))
        study.work()
    sqlite_world.combiner.run(at_once=True)
    keyholder = blind.keyholders[0]
    (batch,) = blind.desk(keyholder).batches(keyholder.key.public)
    opening = keyholder.open(batch)
    facts = {n: v for n, v in opening.sealed.facts.items() if n not in ("key", "tensors")}
    noise = np.random.default_rng(0).integers(-(2**63), 2**63, opening.pads.shape, np.int64)
    blind.desk(keyholder)._post(
        "openings", Sealed.seal(OPENING, facts, {"pads": noise}, keyholder.key)
    )
    blind.work(1)
    other.work()
    sqlite_world.combiner.run(at_once=True)
    assert blind.hub.store.release(other.name)["n_sites"] == 4
    row = blind.hub.store.study(blind.name)
    assert "larger than all records together" in row["problem"]
    assert blind.hub.store.release(blind.name) is None
    blind.hub.store.leave_out_batch(blind.name, 1, "operator")
    assert states(blind) == ["withdrawn"]


def test_each_keyholder_acknowledges_for_itself(blind: BlindHub) -> None:
    blind.freeze()
    blind.hand_over(0)
    first, second = blind.keyholders
    (file,) = blind.desk(first).files(first.key.public)
    stolen = Acknowledgement(first.acknowledge(file).sealed)
    with pytest.raises(ConsilienceError, match="another key than the request"):
        blind.desk(second).post_acknowledgement(stolen)


def test_a_backup_holds_the_hubs_own_key_for_seeds(blind: BlindHub, tmp_path: Path) -> None:
    blind.freeze()
    seal = blind.hub.blind.seal(blind.study).public
    operating.backup(blind.hub.settings.folder, tmp_path / "copy")
    operating.restore(tmp_path / "copy", tmp_path / "restored")
    hub = Hub(Settings(tmp_path / "restored"))
    try:
        assert hub.blind.seal(blind.study).public == seal
        assert hub.blind.roster(blind.study).digest == blind.hub.blind.roster(blind.study).digest
    finally:
        hub.close()


def test_a_study_cannot_name_its_hub_as_a_keyholder(blind: BlindHub) -> None:
    text = blind.hub.store.study(blind.name)["text"].replace(blind.name, "another")
    own = text.replace(blind.keyholders[0].key.public, blind.hub.key.public)
    with pytest.raises(Refusal, match="must be others"):
        blind.hub.add_study(own, "operator")


# ------------------------------------------------------------------------------------ the dashboard


def test_a_coordinator_runs_a_blind_study_from_its_page(blind: BlindHub, sqlite_world: Any) -> None:
    token, _ = new_token(blind.hub.store, "ann", hours=1, kind="test")
    cookie = {"cookie": f"consilience={token}"}
    at, client = f"/studies/{blind.name}", sqlite_world.client

    def read(path: str = at) -> str:
        answer = client.get(path, headers=cookie)
        assert answer.status_code == 200
        return html.unescape(answer.text)

    def press(path: str, **form: str) -> Any:
        form["token"] = re.search('name="token" value="([0-9a-f]+)"', read())[1]  # type: ignore[index]
        return client.post(path, data=form, headers=cookie)

    assert "The coordinator freezes the roster" in read()
    assert blind.keys[0].public in read(f"{at}/roster")
    assert press(f"{at}/roster", checked_by="").status_code == 400
    assert press(f"{at}/roster", checked_by="the registrar").status_code == 303
    page = read(f"{at}?done=frozen")
    assert "The roster is frozen. Its keyholders can sign it now." in page
    assert "2 of 2 keyholders have to sign the roster" in page
    assert "only a site's own share of the noise is left" in page
    assert "Invite a site" not in page
    blind.freeze()
    assert "Sites on the roster train and submit" in read()
    blind.hand_over(0, 1, 2)
    assert "0 of 2 keyholders have acknowledged it" in read()
    assert "Files that it has not acknowledged: 3." in read()
    blind.work()
    assert "A batch of 3 files can be listed" in read()
    assert press(f"{at}/batches").status_code == 303
    assert "2 of 2 keyholders have to open" in read()
    assert "Batches that it has not opened: 1." in read()
    blind.work()
    sqlite_world.combiner.run(at_once=True)
    page = read()
    assert "All keyholders have opened it." in page
    assert "Sites on the roster train and submit" in page
    with pytest.raises(ConsilienceError):
        blind.desk(blind.keyholders[0])._post("openings", blind.mask(3).sealed)
    assert "A keyholder was refused" in read()
    path = blind.client(blind.keys[0]).open_view(blind.name).removeprefix("http://hub")
    link = client.get(path)
    form = re.search('name="token" value="([0-9a-f]+)"', link.text)
    answer = client.post(path, data={"token": form[1]}, headers={"cookie": _cookie(link)})  # type: ignore[index]
    own = client.get(at, headers={"cookie": _cookie(answer)})
    assert own.status_code == 200
    assert "A hub that sees sums only" in own.text
    assert "Leave it out" not in own.text
    page = read(f"{at}/batches/1")
    assert "It cannot be undone" in page
    assert "Its sites can hand over again, which costs each of them as much again" in page
    assert press(f"{at}/batches/1").status_code == 303
    assert "It was left out as a whole." in read()
    assert "It was left out as a whole." in read(f"{at}/batches/1")
    assert press(f"{at}/batches/7").status_code == 404
    assert client.get(f"{at}/batches/7", headers=cookie).status_code == 404


def _cookie(answer: Any) -> str:
    return "; ".join(f"{name}={value}" for name, value in answer.cookies.items())


def read_page(world: Any, path: str) -> str:
    token, _ = new_token(world.hub.store, "ann", hours=1, kind="test")
    answer = world.client.get(path, headers={"cookie": f"consilience={token}"})
    assert answer.status_code == 200
    return html.unescape(answer.text)


def test_pages_of_a_study_without_a_roster_say_that_nobody_can_train(
    blind: BlindHub, sqlite_world: Any
) -> None:
    at = f"/studies/{blind.name}"
    page = read_page(sqlite_world, at)
    assert "No site can train before the roster is frozen" in page
    assert "you do not have to start anything" not in page
    assert "No site can train before" in read_page(sqlite_world, f"{at}/sites/site 0")
    assert "no site can train" in read_page(sqlite_world, f"{at}/close")
    blind.hub.store.close_study(blind.name, "ann")
    page = read_page(sqlite_world, at)
    assert "not frozen before the study was closed" in page
    for said in ("freezes the roster", "sites can enrol", "Freeze the roster", "can sign"):
        assert said not in page
    assert "Who compared the keys" not in read_page(sqlite_world, f"{at}/roster")


def test_pages_say_what_leaves_with_a_site_of_a_batch_and_who_cannot_return(
    blind: BlindHub, sqlite_world: Any
) -> None:
    blind.freeze()
    at = f"/studies/{blind.name}"
    assert "site train" in read_page(sqlite_world, at)
    blind.hand_over(0, 1, 2)
    blind.work()
    name = blind.hub.store.sites(blind.name)[0]["name"]
    page = read_page(sqlite_world, f"{at}/sites/{name}/revoke")
    assert "the whole batch leaves, and the others can hand over again" in page
    assert "frozen with this key: the site can return only to fetch" in page
    assert "join only to fetch" in read_page(sqlite_world, f"{at}/invite")
    state = read_study(blind.hub.store, *blind.hub.study(blind.name))
    assert "No single contribution can be taken out" in " ".join(state.before_publishing)
    page = read_page(sqlite_world, f"{at}/close")
    assert "the whole batch leaves, and nobody can hand over again" in page
    blind.hub.blind.list_batch(blind.hub.agreed(blind.name), "ann")
    blind.hub.revoke(blind.name, name, "ann", withdraw=True)
    assert "Invite it again" not in read_page(sqlite_world, f"{at}/sites/{name}")
    page = read_page(sqlite_world, at)
    assert "Its sites can hand over again" in page
    assert "Invite another site" not in page
    assert "superseded by a newer one" not in page
    blind.hub.store.close_study(blind.name, "ann")
    page = read_page(sqlite_world, at)
    for said in ("hand over again, which", "Its sites can hand over again", "site train."):
        assert said not in page
    assert "Nothing is waited for" in page


def test_a_release_whose_batch_was_left_out_is_not_said_to_lack_a_withdrawn_contribution(
    blind: BlindHub, sqlite_world: Any
) -> None:
    blind.freeze()
    blind.hand_over(0, 1, 2, 3)
    blind.work()
    blind.hub.blind.list_batch(blind.hub.agreed(blind.name), "ann")
    blind.work()
    release(sqlite_world)
    blind.hub.store.leave_out_batch(blind.name, 1, "ann")
    why = "a contribution in it was withdrawn, or the batch of one was left out"
    with pytest.raises(Refusal, match=why):
        blind.hub.release_path(blind.name, 1)
    assert why in read_page(sqlite_world, f"/studies/{blind.name}/releases/1").replace("A c", "a c")
    assert why in read_page(sqlite_world, f"/studies/{blind.name}")
