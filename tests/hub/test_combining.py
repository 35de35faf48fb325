"""Combining: once for every change, by any worker; noise only on request, charged first."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consilience.errors import SettingsError
from consilience.files.release import Release
from consilience.hub.api.app import create_app
from consilience.hub.combining import Combiner
from consilience.hub.hub import Hub
from consilience.privacy.guarantee import Budget
from consilience.protocol import Refusal


def newest(world: Any, study: str = "demo") -> Release:
    row, path = world.hub.release_path(study)
    release = Release.load(path, key=world.hub.key.public)
    assert row["digest"] == release.digest
    return release


def test_changes_that_come_together_are_combined_together(world: Any) -> None:
    study = world.add_study()
    wards = world.fill(study, 3)
    world.combiner.run(at_once=True)
    world.combiner.run(at_once=True)  # nothing has changed
    assert [row["sequence"] for row in world.hub.store.releases("demo")] == [1]
    for ward in wards[:2]:
        world.submit(ward, ward.train(study, sequence=2))
    world.combiner.run(at_once=True)
    states = [
        (row["sequence"], row["state"], row["change"]) for row in world.hub.store.releases("demo")
    ]
    assert states == [(2, "current", 5), (1, "superseded", 3)]
    assert [source.sequence for source in newest(world).sources] == [2, 2, 1]


def test_a_site_is_promised_what_all_it_ever_submitted_adds_up_to(world: Any) -> None:
    study = world.add_study(None)
    north, south = world.ward("north"), world.ward("south")
    for sequence, epsilon in enumerate((0.5, 1.0), start=1):
        world.submit(north, north.train(study, sequence=sequence, epsilon=epsilon))
    world.submit(south, south.train(study, epsilon=1.2))
    world.call(north, "POST", "/api/studies/demo/withdrawals", b"{}")
    world.submit(north, north.train(study, sequence=3, epsilon=2.0))
    world.combiner.run(at_once=True)
    release = newest(world)
    promised = {source.site: source.guarantee.epsilon for source in release.sources}
    assert promised == {"north": pytest.approx(3.5), "south": pytest.approx(1.2)}
    assert release.guarantee.epsilon == pytest.approx(3.5)


def test_several_workers_combine_every_change_once(world: Any, url: str | None, tools: Any) -> None:
    """Four workers share a database while sites submit: every change is combined exactly once."""
    study = world.add_study()
    wards = world.fill(study, 2)
    hubs = [Hub(tools.quick(world.folder / "hub", url, lease_seconds=2.0)) for _ in range(4)]
    done = threading.Event()
    problems: list[BaseException] = []

    def work(hub: Hub) -> None:
        combiner = Combiner(hub)
        while not done.is_set():
            try:
                combiner.run(at_once=True)
            except BaseException as problem:
                problems.append(problem)
                raise
            time.sleep(0.01)

    threads = [threading.Thread(target=work, args=(hub,)) for hub in hubs]
    for thread in threads:
        thread.start()
    for sequence in range(2, 6):
        for ward in wards:
            assert world.submit(ward, ward.train(study, sequence=sequence)).status_code == 201
    until = time.monotonic() + 20
    while world.hub.store.due() and time.monotonic() < until:
        time.sleep(0.02)
    done.set()
    for thread in threads:
        thread.join()
    for hub in hubs:
        hub.close()
    assert not problems
    releases = world.hub.store.releases("demo")
    changes = [row["change"] for row in releases]
    assert len(set(changes)) == len(changes)
    assert changes[0] == 10 == world.hub.store.study("demo")["combined"]
    assert [row["sequence"] for row in releases] == list(range(len(releases), 0, -1))
    assert [source.sequence for source in newest(world).sources] == [5, 5]
    world.hub.store.verify()


def test_a_dead_workers_claim_runs_out(world: Any) -> None:
    world.fill(world.add_study(), 2)
    assert world.hub.store.claim("demo", "dead", 0.3) is not None
    with pytest.raises(Refusal) as refused:
        world.combiner.combine("demo")
    assert refused.value.code == "unavailable"
    time.sleep(0.35)
    assert world.combiner.combine("demo")["sequence"] == 1


def test_a_worker_that_lost_its_claim_publishes_nothing(world: Any) -> None:
    world.fill(world.add_study(), 2)
    world.hub.store.claim("demo", "slow", 0.0)
    release = world.combiner.combine("demo")
    with pytest.raises(Refusal):
        world.hub.store.publish({**release, "digest": "0" * 64, "sequence": 2}, [], "slow")
    assert len(world.hub.store.releases("demo")) == 1


def test_a_member_withdrawn_meanwhile_does_not_come_back(world: Any) -> None:
    wards = world.fill(world.add_study(), 3)
    row, every = world.hub.store.claim("demo", "me", 60)
    study = world.hub.study("demo")[1]
    release, _ = world.combiner._release(study, every, every, None)
    world.call(wards[0], "POST", "/api/studies/demo/withdrawals", b"{}")
    published = world.combiner._publish(release, row, None, "me")
    assert published["state"] == "withdrawn"
    world.combiner.run(at_once=True)
    assert [source.site for source in newest(world).sources] == [ward.name for ward in wards[1:]]


def test_the_worker_combines_by_itself(tmp_path: Path, url: str | None, tools: Any) -> None:
    settings = tools.quick(tmp_path / "hub", url, combine_itself=True, quiet_seconds=0.05)
    with tools.Client(create_app(settings)) as client:
        world = tools.World(client, tmp_path)
        wards = world.fill(world.add_study(), 2)
        until = time.monotonic() + 20
        while (
            answer := world.call(wards[0], "GET", "/api/studies/demo/release")
        ).status_code != 200:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert answer.headers["x-consilience-sequence"] == "1"


def test_what_cannot_be_combined_is_tried_once_and_said(world: Any, tools: Any) -> None:
    sha256 = tools.write_csv(world.folder / "public.csv", tools.table(60, 7))
    world.fill(
        world.add_study(tools.study_text(aggregator='name = "PublicBlend"', public=sha256)), 2
    )
    world.combiner.run(at_once=True)
    row = world.hub.store.study("demo")
    assert "public.csv" in row["problem"]
    assert world.hub.store.due() == []
    content = (world.folder / "public.csv").read_bytes()
    world.client.put(
        "/api/studies/demo/files/public.csv", content=content, headers=world.coordinator
    )
    world.combiner.run(at_once=True)
    assert world.hub.store.study("demo")["problem"] is None
    assert newest(world).sequence == 1


def test_the_quality_table_has_the_honest_baselines(world: Any, tools: Any) -> None:
    public = tools.write_csv(world.folder / "public.csv", tools.table(60, 7))
    test = tools.write_csv(world.folder / "test.csv", tools.table(300, 8))
    world.add_study(tools.study_text(public=public, test=test))
    for name in ("public.csv", "test.csv"):
        content = (world.folder / name).read_bytes()
        answer = world.client.put(
            f"/api/studies/demo/files/{name}", content=content, headers=world.coordinator
        )
        assert answer.status_code == 200
    world.fill(world.hub.study("demo")[1], 3)
    world.combiner.run(at_once=True)
    row = world.hub.store.study("demo")
    if row["withheld"]:  # public records alone may be better
        world.combiner.combine("demo", request="asked", change=row["changes"])
    release = newest(world)
    rows = {row["method"]: row for row in release.sealed.facts["quality"]}
    assert rows["Average (precision)"]["kind"] == "study"
    assert {"public records alone", "one site alone (the median site)", "PublicBlend"} <= set(rows)
    held = tools.table(300, 8)
    X = world.hub.study("demo")[1].schema.encode(world.folder / "test.csv").X
    wrong = float(np.mean(release.predict(X) != held["y"]))
    assert rows["Average (precision)"]["error"]["value"] == pytest.approx(wrong)
    assert (
        rows["Average (precision)"]["error"]["low"]
        <= wrong
        <= rows["Average (precision)"]["error"]["high"]
    )


DISTIL = 'name = "SoftLabelDistillation"\nepsilon = 1.0\nregularization = 0.01'


def test_noise_is_drawn_on_command_only_and_charged_first(world: Any, tools: Any) -> None:
    public = tools.write_csv(world.folder / "public.csv", tools.table(80, 7))
    test = tools.write_csv(world.folder / "test.csv", tools.table(100, 8))
    study = world.add_study(
        tools.study_text(hub="trusted", aggregator=DISTIL, public=public, test=test)
    )
    for name in ("public.csv", "test.csv"):
        content = (world.folder / name).read_bytes()
        world.client.put(
            f"/api/studies/demo/files/{name}", content=content, headers=world.coordinator
        )

    def ask(key: str) -> Any:
        place, json = "/api/studies/demo", {"key": key}
        answer = world.client.post(f"{place}/releases", json=json, headers=world.coordinator)
        if answer.status_code == 201 or tools.code(answer) != "withheld":
            return answer
        # So much noise may make it worse than guessing; it is published all the same.
        json["change"] = world.client.get(place, headers=world.coordinator).json()["withheld"]
        return world.client.post(f"{place}/releases", json=json, headers=world.coordinator)

    assert tools.code(ask("first")) == "too-few-sites"
    wards = world.fill(study, 3)
    world.combiner.run(at_once=True)
    assert world.hub.store.releases("demo") == []
    assert tools.code(ask("first")) == "budget"
    world.hub.allow("demo", Budget(epsilon=2.0, unit="site"), "operator")
    first = ask("first")
    assert first.status_code == 201
    assert first.json()["guarantee"]["unit"] == "site"
    assert first.json()["guarantee"]["epsilon"] == pytest.approx(1.0)
    assert ask("first").json() == first.json()
    assert world.hub.balance("demo").spent.epsilon == pytest.approx(1.0)
    assert ask("second").json()["sequence"] == 2
    assert tools.code(ask("third")) == "budget"
    assert world.hub.balance("demo").left.epsilon == pytest.approx(0.0, abs=1e-6)
    # Exact members are not private by themselves: the table shows nothing that was measured on
    # them.
    methods = [row["method"] for row in newest(world).sealed.facts["quality"]]
    baselines = ["always the most frequent class", "public records alone"]
    assert methods == ["SoftLabelDistillation", *baselines]
    assert world.call(wards[0], "GET", "/api/studies/demo/release").status_code == 200


def test_a_request_for_post_processing_returns_the_release_that_is_there(
    world: Any, tools: Any
) -> None:
    world.fill(world.add_study(), 2)

    def ask(key: str) -> Any:
        return world.client.post(
            "/api/studies/demo/releases", json={"key": key}, headers=world.coordinator
        )

    assert ask("one").json()["sequence"] == 1
    assert ask("one").json()["sequence"] == 1
    assert ask("two").json()["sequence"] == 1
    assert tools.code(ask("a b")) == "malformed"


def test_a_public_file_concerns_only_the_studies_that_wait_for_it(world: Any, tools: Any) -> None:
    """Anything else would combine a study again, and clear its problem, whenever anyone uploads."""
    digests = {}
    for seed, name in enumerate(("mine", "other", "same")):
        place = world.folder / f"{name}.csv"
        digests[name] = tools.write_csv(place, tools.table(30, 90 + min(seed, 1)))
        world.add_study(tools.study_text(name, test=digests[name]))
        store = world.hub.store
        assert store.claim(name, "worker", 60)
        store.give_up(name, 0, "worker", "It is withheld.")

    def upload(name: str) -> set[str]:
        before = {row["name"]: row["changes"] for row in store.studies()}
        content = (world.folder / f"{name}.csv").read_bytes()
        answer = world.client.put(
            f"/api/studies/{name}/files/test.csv", content=content, headers=world.coordinator
        )
        assert answer.status_code < 300
        after = {row["name"]: row for row in store.studies()}
        changed = {one for one, row in after.items() if row["changes"] > before[one]}
        assert {one for one in changed if after[one]["problem"] is None} == changed
        return changed

    assert digests["same"] == digests["other"]
    assert upload("mine") == {"mine"}
    assert store.claim("mine", "worker", 60)
    store.give_up("mine", 1, "worker", "It is withheld.")
    assert upload("mine") == set()
    store.files.path(digests["mine"]).unlink()  # lost, so this is news
    assert upload("mine") == {"mine"}
    assert upload("other") == {"other", "same"}


def test_a_public_file_that_arrives_while_the_hub_looks_for_it_is_not_lost(
    world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub looks for it in one transaction and says in another that it is missing."""
    place = world.folder / "test.csv"
    sha256 = tools.write_csv(place, tools.table(30, 90))
    world.fill(world.add_study(tools.study_text(test=sha256)), 2)
    store, give_up, answers = world.hub.store, world.hub.store.give_up, list[int]()

    def upload_first(*facts: Any, **more: Any) -> None:
        answer = world.client.put(
            "/api/studies/demo/files/test.csv",
            content=place.read_bytes(),
            headers=world.coordinator,
        )
        answers.append(answer.status_code)
        give_up(*facts, **more)

    with monkeypatch.context() as patch:
        patch.setattr(store, "give_up", upload_first)
        world.combiner.run(at_once=True)
    assert answers == [200]
    row = store.study("demo")
    assert (row["problem"], row["changes"] > row["combined"]) == (None, True)
    world.combiner.run(at_once=True)
    assert store.release("demo")["sequence"] == 1


def test_a_budget_is_for_what_the_noise_of_the_study_hides(world: Any, tools: Any) -> None:
    """A ledger keeps the first unit and relation for good, so a wrong one ended the study."""
    noisy = {"aggregator": 'name = "Average"\nepsilon = 1.0', "hub": "trusted"}
    world.add_study(tools.study_text("noisy", **noisy))
    world.add_study(tools.study_text("exact"))
    for wrong in ({"unit": "site"}, {"unit": "person"}, {"neighbours": "add-remove"}):
        with pytest.raises(SettingsError, match="hub allow noisy --unit record"):
            world.hub.allow("noisy", Budget(epsilon=3.0, **wrong), "operator")
    with pytest.raises(SettingsError, match="draws no noise"):
        world.hub.allow("exact", Budget(epsilon=3.0), "operator")
    assert world.hub.ledger.datasets() == []
    assert world.hub.allow("noisy", Budget(epsilon=3.0), "operator").left.epsilon == 3.0


def test_a_file_that_was_removed_under_a_running_hub_is_named(world: Any, tools: Any) -> None:
    sha256 = tools.write_csv(world.folder / "test.csv", tools.table(60, 7))
    study = world.add_study(tools.study_text(test=sha256))
    content = (world.folder / "test.csv").read_bytes()
    file = "/api/studies/demo/files/test.csv"
    world.client.put(file, content=content, headers=world.coordinator)
    ward, _ = world.fill(study, 2)
    world.combiner.run(at_once=True)
    store = world.hub.store
    release = store.release("demo")
    store.files.path(release["sha256"]).unlink()
    cookie = {"cookie": "consilience=" + world.coordinator["authorization"].split()[1]}
    for page in ("/studies", "/studies/demo", "/studies/demo/releases/1"):
        answer = world.client.get(page, headers=cookie)
        assert answer.status_code == 200, page
        assert ("The file of the release is missing" in answer.text) == (page != "/studies")
    asked = world.call(ward, "GET", "/api/studies/demo/release")
    assert tools.code(asked) == "unavailable"
    assert release["sha256"][:12] in asked.text
    assert world.submit(ward, ward.train(study, sequence=2)).status_code == 201
    world.combiner.run(at_once=True)  # nobody is unusual, so what is lost is replaced
    assert newest(world).sequence == 2
    store.files.path(sha256).unlink()
    assert tools.code(world.call(ward, "GET", file)) == "unavailable"
    assert world.submit(ward, ward.train(study, sequence=3)).status_code == 201
    world.combiner.run(at_once=True)
    assert sha256[:12] in store.study("demo")["problem"]
    assert store.due() == []
    world.client.put(file, content=content, headers=world.coordinator)
    world.combiner.run(at_once=True)
    assert newest(world).sequence == 3


def test_a_file_that_was_changed_under_a_running_hub_is_named(world: Any, tools: Any) -> None:
    """A row names a file's content: one that is there and differs is as good as lost."""
    sha256 = tools.write_csv(world.folder / "test.csv", tools.table(60, 7))
    study = world.add_study(tools.study_text(test=sha256))
    content, file = (world.folder / "test.csv").read_bytes(), "/api/studies/demo/files/test.csv"
    world.client.put(file, content=content, headers=world.coordinator)
    ward, _ = world.fill(study, 2)
    store, cookie = world.hub.store, world.coordinator["authorization"].split()[1]
    world.combiner.run(at_once=True)
    release = store.release("demo")
    for damaged, ask in ((release["sha256"], "/api/studies/demo/release"), (sha256, file)):
        path = store.files.path(damaged)
        path.write_bytes(path.read_bytes()[:-9])
        assert tools.code(world.call(ward, "GET", ask)) == "unavailable"
    for page in ("/studies", "/studies/demo", "/studies/demo/releases/1"):
        answer = world.client.get(page, headers={"cookie": f"consilience={cookie}"})
        assert answer.status_code == 200, page
    certificate = "/studies/demo/releases/1/certificate.txt"
    answer = world.client.get(certificate, headers={"cookie": f"consilience={cookie}"})
    assert answer.status_code in (404, 503)
    assert world.submit(ward, ward.train(study, sequence=2)).status_code == 201
    world.combiner.run(at_once=True)
    assert sha256[:12] in store.study("demo")["problem"]
    world.client.put(file, content=content, headers=world.coordinator)
    assert store.study("demo")["problem"] is None
    world.combiner.run(at_once=True)
    assert newest(world).sequence == 2


def test_a_key_is_never_charged_twice(
    world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub was killed after the charge, and a member has changed: the key is used up."""
    noisy = 'name = "Average"\nepsilon = 1.0\nweights = "equal"'
    study = world.add_study(tools.study_text(hub="trusted", aggregator=noisy))
    ward, _ = world.fill(study, 2)
    world.hub.allow("demo", Budget(epsilon=3.0), "operator")

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("consilience.hub.combining.Combiner._publish", die)
        with pytest.raises(KeyboardInterrupt):
            world.combiner.combine("demo", request="one")
    assert world.submit(ward, ward.train(study, sequence=2)).status_code == 201
    with pytest.raises(Refusal, match="under a new key"):
        world.combiner.combine("demo", request="one")
    assert world.hub.balance("demo").spent.epsilon == pytest.approx(1.0)
    assert world.combiner.combine("demo", request="two")["sequence"] == 1
    assert world.hub.balance("demo").spent.epsilon == pytest.approx(2.0)
