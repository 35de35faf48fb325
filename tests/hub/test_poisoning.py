"""One wrong member stops no study, and what it spoils is not published unasked."""

import json
import re
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load as load_tensors

from consilience import Budget
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import Sealed
from consilience.hub.auth import new_token
from consilience.protocol import Refusal
from consilience.study import collect as collecting
from studies import overstate


def newest(world: Any, study: str = "demo") -> Release:
    _, path = world.hub.release_path(study)
    return Release.load(path, key=world.hub.key.public)


def read_page(world: Any, path: str) -> str:
    token, _ = new_token(world.hub.store, "ann", hours=1, kind="test")
    answer = world.client.get(path, headers={"cookie": f"consilience={token}"})
    assert answer.status_code == 200, answer.text
    return str(answer.text)


def forge(contribution: Contribution, ward: Any, scale: float = 1.0, **facts: Any) -> bytes:
    """Return a contribution with other numbers and facts, signed by its own site all the same."""
    sealed = contribution.sealed
    tensors = {name: np.asarray(one) * scale for name, one in sealed.tensors.items()}
    kept = {name: value for name, value in sealed.facts.items() if name not in ("key", "tensors")}
    return Sealed.seal("contribution", {**kept, **facts}, tensors, ward.key).to_bytes()


def lie_about_events(contribution: Contribution, **changes: Any) -> str:
    events = json.loads(contribution.sealed.facts["events"])
    events[0] |= changes
    return json.dumps(events, sort_keys=True, separators=(",", ":"))


@pytest.fixture
def world(sqlite_world: Any) -> Any:
    return sqlite_world


def test_the_door_recomputes_what_a_sender_states(world: Any, tools: Any) -> None:
    study = world.add_study()
    ward = world.ward("mallory")
    honest = ward.train(study)
    events = honest.sealed.facts["events"]
    for scale, facts in (
        (-1000.0, {}),
        (1e100, {}),
        (1e307, {}),
        (1.0, {"size": None}),
        (1.0, {"size": 2**59}),
        (1.0, {"size": 201}),
        (1.0, {"events": lie_about_events(honest, strong_convexity=1e300)}),
        (1.0, {"events": lie_about_events(honest, scale=1e-6)}),
        (1.0, {"events": events.replace("]", "," + events[1:], 1)}),
        (1.0, {"events": "[]"}),
        (1.0, {"events": "nothing"}),
    ):
        answer = world.submit(ward, forge(honest, ward, scale, **facts))
        assert tools.code(answer) == "rejected", (scale, facts, answer.text)
    assert world.submit(ward, honest).status_code == 201


def test_a_study_limits_what_a_site_may_state(world: Any, tools: Any) -> None:
    limited = tools.study_text().replace("min_sites = 2", "min_sites = 2\nmax_size = 199")
    ward = world.ward("north", world.add_study(limited).name)
    answer = world.submit(ward, ward.train(world.hub.agreed("demo")))
    assert tools.code(answer) == "rejected"
    assert "199" in answer.text


def accept_unchecked(world: Any, monkeypatch: pytest.MonkeyPatch, ward: Any, body: bytes) -> None:
    """Submit as a hub of an earlier version took it: without recomputing anything."""
    with monkeypatch.context() as patch:
        patch.setattr("consilience.files.contribution._check_implied", lambda *_: None)
        assert world.submit(ward, body).status_code == 201


def test_a_member_that_does_not_fit_any_more_is_left_out_and_named(
    world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = world.add_study()
    world.fill(study, 2)
    mallory = world.ward("mallory")
    accept_unchecked(world, monkeypatch, mallory, forge(mallory.train(study), mallory, 1e300))
    world.combiner.run(at_once=True)
    assert [source.site for source in newest(world).sources] == ["ward 0", "ward 1"]
    facts = world.client.get("/api/studies/demo", headers=world.coordinator).json()
    assert "mallory" in facts["left_out"]
    assert facts["problem"] is None
    page = read_page(world, "/studies/demo")
    assert "A contribution is left out" in page
    assert "left out of a release" in {entry["action"] for entry in world.hub.store.audit()}


def test_too_few_members_are_left_and_the_problem_names_the_wrong_one(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = world.add_study()
    world.fill(study, 1)
    mallory = world.ward("mallory")
    accept_unchecked(world, monkeypatch, mallory, forge(mallory.train(study), mallory, 1e300))
    world.combiner.run(at_once=True)
    assert world.hub.store.release("demo") is None
    assert "mallory" in world.hub.store.study("demo")["problem"]
    assert world.hub.store.due() == []


def break_combining(
    monkeypatch: pytest.MonkeyPatch, study: Any, digest: str, error: type[Exception]
) -> None:
    """Let the aggregator raise `error` whenever this contribution is among its members."""
    combine = type(study.build_aggregator()).combine

    def fragile(self: Any, members: Any, public: Any = None, **charge: Any) -> Any:
        if any(getattr(member, "poison", False) for member in members):
            raise error("broken")
        return combine(self, members, public, **charge)

    load = Contribution.load.__func__

    def marked(cls: Any, source: Any, **options: Any) -> Contribution:
        contribution = load(cls, source, **options)
        contribution.learner.poison = contribution.digest == digest
        return contribution

    monkeypatch.setattr(type(study.build_aggregator()), "combine", fragile)
    monkeypatch.setattr(Contribution, "load", classmethod(marked))


@pytest.mark.parametrize("error", [OverflowError, TypeError, np.linalg.LinAlgError])
def test_a_member_that_breaks_combining_is_found_and_left_out(
    world: Any, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Whatever the aggregator raises, it is the member's own fault and nobody else's."""
    study = world.add_study()
    wards = world.fill(study, 5)
    poison = world.hub.store.contributions("demo", site=wards[3].name)[0]["digest"]
    break_combining(monkeypatch, study, poison, error)
    world.combiner.run(at_once=True)
    assert [source.site for source in newest(world).sources] == [f"ward {i}" for i in (0, 1, 2, 4)]
    assert "ward 3" in world.hub.store.absent("demo")


NOISY = 'name = "Average"\nepsilon = 1.0\nweights = "equal"'


def test_a_member_that_breaks_combining_where_it_draws_noise_is_found_before_the_charge(
    world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = world.add_study(tools.study_text(hub="trusted", aggregator=NOISY, min_sites=4))
    wards = world.fill(study, 5)
    world.hub.allow("demo", Budget(epsilon=1.0), "operator")
    poison = world.hub.store.contributions("demo", site=wards[3].name)[0]["digest"]
    break_combining(monkeypatch, study, poison, OverflowError)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # after the charge
        patch.setattr("consilience.hub.combining.Combiner._publish", die)
        with pytest.raises(KeyboardInterrupt):
            world.combiner.combine("demo", request="one")
    world.combiner.combine("demo", request="one")
    assert [source.site for source in newest(world).sources] == [f"ward {i}" for i in (0, 1, 2, 4)]
    assert "'ward 3' is left out: It cannot be combined" in world.hub.store.absent("demo")
    assert "Overflow" not in world.hub.store.absent("demo")  # it may tell of exact numbers
    assert world.hub.balance("demo").spent.epsilon == pytest.approx(1.0)


def test_nobody_is_charged_if_too_few_can_be_combined(
    world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = world.add_study(tools.study_text(hub="trusted", aggregator=NOISY, min_sites=4))
    wards = world.fill(study, 4)
    world.hub.allow("demo", Budget(epsilon=1.0), "operator")
    poison = world.hub.store.contributions("demo", site=wards[3].name)[0]["digest"]
    break_combining(monkeypatch, study, poison, OverflowError)
    why = r"needs 4 sites, and 3 can be combined.*'ward 3' is left out"
    with pytest.raises(Refusal, match=why):
        world.combiner.combine("demo", request="one")
    assert world.hub.balance("demo").spent.epsilon == 0


def test_the_failure_of_one_study_does_not_touch_another(
    world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fill(world.add_study(), 2)
    world.fill(world.add_study(tools.study_text("other")), 2)
    original = collecting.collect

    def broken(study: Any, *arguments: Any, **options: Any) -> Any:
        if study.name == "demo":
            raise RuntimeError("no such luck")
        return original(study, *arguments, **options)

    monkeypatch.setattr("consilience.hub.combining.collect", broken)
    monkeypatch.setattr("consilience.hub.combining.find_breaking", lambda *_, **__: {})
    world.combiner.run(at_once=True)
    assert newest(world, "other").sequence == 1
    row = world.hub.store.study("demo")
    assert "RuntimeError" in row["problem"]
    assert "luck" not in row["problem"]
    assert world.hub.store.due() == []  # only another change tries it again


def test_a_study_that_cannot_be_read_does_not_touch_another(
    world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fill(world.add_study(), 2)
    world.fill(world.add_study(tools.study_text("other")), 2)
    agreed = type(world.hub).agreed

    def unreadable(hub: Any, name: str) -> Any:
        if name == "demo":
            raise TypeError("gone")
        return agreed(hub, name)

    monkeypatch.setattr(type(world.hub), "agreed", unreadable)
    world.combiner.run(at_once=True)
    assert newest(world, "other").sequence == 1
    assert "TypeError" in world.hub.store.study("demo")["problem"]


def test_an_error_of_the_machine_leaves_the_study_due(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fill(world.add_study(), 2)
    with monkeypatch.context() as patch:
        patch.setattr(
            "consilience.hub.combining.collect",
            lambda *_, **__: (_ for _ in ()).throw(OSError("full")),
        )
        world.combiner.run(at_once=True)
    assert world.hub.store.study("demo")["problem"] is None
    world.combiner.run(at_once=True)
    assert newest(world).sequence == 1


def add_measured_study(world: Any, tools: Any, **parts: str) -> Any:
    folder = world.folder
    shas = {
        part: tools.write_csv(folder / f"{part}.csv", tools.table(n, seed))
        for part, n, seed in (("public", 30, 77), ("test", 600, 78))
    }
    study = world.add_study(tools.study_text(**shas, **parts))
    for part, sha in shas.items():
        answer = world.client.put(
            f"/api/studies/demo/files/{part}.csv",
            content=(folder / f"{part}.csv").read_bytes(),
            headers=world.coordinator,
        )
        assert answer.status_code in (200, 201), (answer.text, sha)
    return study


def test_a_release_worse_than_public_records_is_withheld_until_a_coordinator_publishes_it(
    world: Any, tools: Any
) -> None:
    study = add_measured_study(world, tools)
    for name in ("north", "east", "south"):  # with little noise: an honest release is not withheld
        ward = world.ward(name)
        assert world.submit(ward, ward.train(study, epsilon=5.0)).status_code == 201
    world.combiner.run(at_once=True)
    assert newest(world).sequence == 1
    flipped = world.ward("mallory")
    learner = flipped.train(study, epsilon=5.0)
    # As much as the door lets through: the sign is the only thing that is wrong with it.
    body = forge(learner, flipped, -4.0)
    assert world.submit(flipped, body).status_code == 201
    world.combiner.run(at_once=True)
    row = world.hub.store.study("demo")
    assert "withheld" in row["problem"]
    assert newest(world).sequence == 1
    with pytest.raises(Refusal, match="withheld") as refused:
        world.combiner.combine("demo")
    assert refused.value.code == "withheld"
    page = read_page(world, "/studies/demo")
    assert "A release is withheld" in page
    page = read_page(world, "/studies/demo/aggregate")
    assert "public records alone" in page
    asked = publish_withheld(world)
    assert asked.status_code == 201, asked.text
    assert newest(world).sequence == 2
    assert world.hub.store.study("demo")["problem"] is None
    page = read_page(world, "/studies/demo")
    assert "A contribution is unlike the others" in page
    assert set(world.hub.store.alerts("demo")) == {"mallory"}


def publish_withheld(world: Any) -> Any:
    """Publish the release that is withheld at the moment."""
    facts = world.client.get("/api/studies/demo", headers=world.coordinator).json()
    asked = {"key": "0123456789abcdef", "change": facts["withheld"]}
    return world.client.post("/api/studies/demo/releases", json=asked, headers=world.coordinator)


def test_no_key_publishes_what_nobody_was_warned_of(world: Any, tools: Any) -> None:
    """Whoever asks before the hub has looked, or after the members changed, has seen nothing."""
    study = add_measured_study(world, tools)
    for name in ("north", "east", "south"):
        ward = world.ward(name)
        assert world.submit(ward, ward.train(study, epsilon=5.0)).status_code == 201
    world.combiner.run(at_once=True)
    mallory = world.ward("mallory")

    def lie(sequence: int, scale: float) -> None:
        body = forge(mallory.train(study, epsilon=5.0, sequence=sequence), mallory, scale)
        assert world.submit(mallory, body).status_code == 201

    def ask(key: str, **more: Any) -> Any:
        place = "/api/studies/demo/releases"
        return world.client.post(place, json={"key": key, **more}, headers=world.coordinator)

    lie(1, -3.0)
    assert tools.code(ask("nightly-1")) == "withheld"  # made at once, and judged
    shown = world.client.get("/api/studies/demo", headers=world.coordinator).json()["withheld"]
    cookie = {"cookie": "consilience=" + world.coordinator["authorization"].split()[1]}
    place = "/studies/demo/aggregate"
    page = world.client.get(place, headers=cookie).text
    form = dict(re.findall(r'name="(token|key|change)" value="([^"]*)"', page))
    lie(2, -4.0)
    assert tools.code(ask("stale", change=shown)) == "withheld"
    clicked = world.client.post(place, data=form, headers=cookie)
    assert clicked.status_code == 409
    assert "contributions have changed since the page was shown" in clicked.text
    assert newest(world).sequence == 1
    entries = world.hub.store.audit(limit=1000)
    assert sum(entry["action"] == "release withheld" for entry in entries) == 2
    for key in ("again", "and-again"):
        assert tools.code(ask(key)) == "withheld"
    assert len(world.hub.store.audit(limit=1000)) == len(entries)
    form = dict(re.findall(r'name="(token|key|change)" value="([^"]*)"', clicked.text))
    assert world.client.post(place, data=form, headers=cookie).status_code == 303
    assert newest(world).sequence == 2


def test_a_release_that_draws_noise_is_judged_after_the_draw_and_published_as_it_was_drawn(
    world: Any, tools: Any
) -> None:
    aggregator = 'name = "Average"\nepsilon = 5.0\nweights = "equal"'
    study = add_measured_study(world, tools, hub="trusted", aggregator=aggregator)
    wards = [world.ward(f"ward {i}") for i in range(3)]
    for ward in wards:  # all of them wrong, as far as a hub accepts
        assert world.submit(ward, flip_loudly(ward.train(study), ward)).status_code == 201
    world.hub.allow("demo", Budget(epsilon=10.0), "operator")

    def ask(key: str, **more: Any) -> Any:
        place = "/api/studies/demo/releases"
        return world.client.post(place, json={"key": key, **more}, headers=world.coordinator)

    assert tools.code(ask("one")) == "withheld"
    problem = world.hub.store.study("demo")["problem"]
    assert "worse than always giving the same answer" in problem
    assert "Its noise is charged" in problem
    assert "Without" not in problem  # nothing is said of exact contributions
    assert world.hub.store.alerts("demo") == {}
    assert "A release is withheld" in read_page(world, "/studies/demo")
    assert "Its noise is charged already" in read_page(world, "/studies/demo/aggregate")
    for key in ("one", "two"):  # nothing is drawn that nobody may see
        assert tools.code(ask(key)) == "withheld"
    assert world.hub.balance("demo").spent.epsilon == pytest.approx(5.0)
    change = world.client.get("/api/studies/demo", headers=world.coordinator).json()["withheld"]
    drawn = world.hub.ledger.sealed(world.hub.ledger.charges(study.digest)[0].key)
    assert ask("three", change=change).status_code == 201
    assert world.hub.balance("demo").spent.epsilon == pytest.approx(5.0)
    np.testing.assert_array_equal(newest(world).sealed.tensors["coef"], load_tensors(drawn)["coef"])
    assert ask("three").json()["sequence"] == 1
    assert world.hub.store.study("demo")["problem"] is None


def flip_loudly(contribution: Contribution, ward: Any) -> bytes:
    """Return the opposite of a contribution, as loud as a hub accepts."""
    tensors = contribution.sealed.tensors
    bounds = contribution.learner.implied({k: one.shape for k, one in tensors.items()}).bounds
    most = min(bounds[name].norm / np.linalg.norm(one) for name, one in tensors.items())
    return forge(contribution, ward, -0.99 * most)


def submit_one_wrong_of_four(world: Any, study: Any) -> None:
    """Let three honest sites have a release, and then a fourth hand in the opposite."""
    for name in ("north", "east", "south", "mallory"):
        ward = world.ward(name)
        body = ward.train(study, epsilon=5.0)
        if name == "mallory":
            world.combiner.run(at_once=True)
            body = flip_loudly(body, ward)
        assert world.submit(ward, body).status_code == 201
    world.combiner.run(at_once=True)


def test_a_release_that_is_better_without_an_unusual_member_is_withheld_and_names_it(
    world: Any, tools: Any
) -> None:
    """Test records suffice; there are no public ones to learn from."""
    sha = tools.write_csv(world.folder / "test.csv", tools.table(600, 78))
    study = world.add_study(tools.study_text(test=sha))
    content = (world.folder / "test.csv").read_bytes()
    place = "/api/studies/demo/files/test.csv"
    assert world.client.put(place, content=content, headers=world.coordinator).status_code < 300
    submit_one_wrong_of_four(world, study)
    assert newest(world).sequence == 1
    problem = world.hub.store.study("demo")["problem"]
    assert "Without 'mallory' the error is" in problem
    assert "release 1, which sites have" in problem
    assert "'mallory': Its coefficients are" in problem
    assert "A release is withheld" in read_page(world, "/studies/demo")


def test_a_release_that_one_site_decides_is_withheld_if_it_spoils_it(
    world: Any, tools: Any
) -> None:
    """A site that states the most records has all of the weight."""
    sha = tools.write_csv(world.folder / "test.csv", tools.table(600, 78))
    learner = 'name = "PrivateLogisticRegression"'
    text = tools.study_text(test=sha).replace(learner, f'{learner}\nmechanism = "output"')
    study = world.add_study(text)
    content = (world.folder / "test.csv").read_bytes()
    place = "/api/studies/demo/files/test.csv"
    assert world.client.put(place, content=content, headers=world.coordinator).status_code < 300
    world.fill(study, 3, epsilon=5.0)  # noise alone must not make the honest release bad
    world.combiner.run(at_once=True)
    mallory = world.ward("mallory")
    lie = overstate(mallory.train(study), mallory.key).sealed.to_bytes()
    assert world.submit(mallory, lie).status_code == 201
    world.combiner.run(at_once=True)
    assert newest(world).sequence == 1
    problem = world.hub.store.study("demo")["problem"]
    assert "Without 'mallory' the error is" in problem
    assert "'mallory': It" in problem  # has all of the weight, or coefficients unlike the others'


@pytest.mark.parametrize("careful", [False, True])
def test_a_study_without_test_records_can_withhold_what_has_an_unusual_member(
    world: Any, tools: Any, careful: bool
) -> None:
    text = tools.study_text()
    if careful:
        text = text.replace("min_sites = 2", "min_sites = 2\nwithhold_far = true")
    submit_one_wrong_of_four(world, world.add_study(text))
    assert newest(world).sequence == (1 if careful else 2)
    if careful:
        assert "'mallory': Its coefficients are" in world.hub.store.study("demo")["problem"]
        asked = publish_withheld(world)
        assert asked.status_code == 201, asked.text
        assert newest(world).sequence == 2
    assert set(world.hub.store.alerts("demo")) == {"mallory"}


def test_a_release_that_cannot_be_written_is_the_problem_of_its_study(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fill(world.add_study(), 2)

    def fail(*_: Any) -> None:
        raise RuntimeError("the header is too long")

    monkeypatch.setattr("consilience.hub.combining.Combiner._publish", fail)
    world.combiner.run(at_once=True)
    assert "RuntimeError" in world.hub.store.study("demo")["problem"]
    assert world.hub.store.due() == []


def test_a_number_far_beyond_the_last_one_is_refused(world: Any, tools: Any) -> None:
    study = world.add_study()
    ward = world.ward("ward 0", study.name)
    for sequence, status in ((2**53 - 1, 422), (1, 201), (1500, 422), (900, 201), (1900, 201)):
        answer = world.submit(ward, ward.train(study, sequence=sequence))
        assert answer.status_code == status, answer.text
