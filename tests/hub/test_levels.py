"""Releases at a hub whose members bring more than a model: scores of their own."""

import html
import json

import pytest

from consilience import Budget
from consilience.files.release import Release
from consilience.files.sealed import SigningKey
from consilience.hub.auth import new_token
from consilience.hub.state import SiteState, read_study
from consilience.protocol import HEADER, Invitation, digest, sign_request
from consilience.site.client import HubClient, hand_over_release
from consilience.site.site import Site
from consilience.study.branches import leaves_of
from consilience.study.check import check_release
from consilience.study.collect import Publication
from consilience.study.study import Study


def test_a_hub_takes_scores_and_weighs_by_them(sqlite_world, tools):
    """A study whose sites pay for scores goes through the hub's door and its combiner."""
    world = sqlite_world
    text = tools.study_text(aggregator='name = "WeightedVote"\nweights = "accuracy-size"')
    study = world.add_study(text.replace("[aggregator]", "score_share = 0.2\n[aggregator]", 1))
    wards = world.fill(study, 3)
    world.combiner.run(at_once=True)
    answer = world.call(wards[0], "GET", "/api/studies/demo/release")
    release = Release.load(answer.content, key=world.hub.key.public)
    found = [member.accuracy_ for member in release.ensemble.members]
    assert all(one.events[0].epsilon > 0.19 for one in found)
    assert release.guarantee.epsilon < 1 + 1e-9


def test_a_hub_hands_members_to_the_site_that_weighs_them_and_to_nobody_else(
    sqlite_world, tools, monkeypatch
):
    """The whole way at a hub: members are fetched, weighed, charged, submitted and released."""
    world = sqlite_world
    study = world.add_study(tools.study_text(aggregator='name = "FeatureMethod"\nat = "centre"'))
    wards = world.fill(study, 2)
    assert world.combiner.run(at_once=True) == 0
    assert world.hub.store.release("demo") is None

    def reach(self, method, path, body, most):
        header = sign_request(self.key, self.hub_key, method, path, digest(body))
        found = world.client.request(method, path, content=body, headers={HEADER: header})
        return found.status_code, found.content

    monkeypatch.setattr(HubClient, "_send", reach)
    budget = Budget(epsilon=3.0)
    centre = Site.init(world.folder / "centre", name="centre", dataset="ward", budget=budget)
    centre.join("http://localhost", world.invitation(site="centre"))
    path = centre.aggregate("demo", tools.table(300, 7), epsilon=1.5)
    assert centre.ledger.balance("ward").spent.epsilon == pytest.approx(1.5)
    assert centre.aggregate("demo", tools.table(300, 7), epsilon=1.5) == path  # paid for
    assert centre.submit("demo")["state"] == "accepted"
    world.combiner.run(at_once=True)
    release = centre.fetch("demo")
    assert [one.site for one in release.sources] == ["ward 0", "ward 1", "centre"]
    for address in ("members", f"members/{release.sources[1].digest}"):
        answer = world.call(wards[0], "GET", f"/api/studies/demo/{address}")
        assert tools.code(answer) == "not-allowed"
        asked = world.client.get(f"/api/studies/demo/{address}", headers=world.coordinator)
        assert tools.code(asked) == "not-allowed"
    # What it weighed goes, comes back as another file, and the study is closed.
    assert "If a site withdraws, there is no further release" in " ".join(state(world).closing)
    world.call(wards[0], "POST", "/api/studies/demo/withdrawals")
    assert "needs 2 contributions, and 1 are in use" in " ".join(state(world).closing)
    world.submit(wards[0], wards[0].train(study, sequence=2))
    world.combiner.run(at_once=True)
    told = world.call(wards[1], "GET", "/api/studies/demo/release").text
    assert "that site has to weigh them again: consilience site aggregate" in told
    world.hub.store.close_study("demo", "ann")
    for said in (state(world).next_release, state(world).failed):
        assert "The study is closed, so 'centre' cannot weigh the others again" in said
        assert "has to weigh them again" not in said


def state(world):
    return read_study(world.hub.store, *world.hub.study("demo"))


def test_pages_say_who_has_to_weigh_the_contributions(sqlite_world, tools):
    """Of a study whose members a site weighs, in each state of that site."""
    world = sqlite_world
    study = world.add_study(tools.study_text(aggregator='name = "FeatureMethod"\nat = "centre"'))
    token, _ = new_token(world.hub.store, "ann", hours=1, kind="test")

    def read(path=""):
        headers = {"cookie": f"consilience={token}"}
        return html.unescape(world.client.get(f"/studies/demo{path}", headers=headers).text)

    wards = world.fill(study, 2)
    world.combiner.run(at_once=True)
    page = read()
    assert "Weights are learned on public records, or by a site" in page
    assert "The site 'centre' has to weigh the models of the others first" in page
    assert "it needs an invitation in its own name" in page
    for said in ("could not make one", "The hub combines the remaining"):
        assert said not in page
    assert "'centre' then has to weigh the others again" in page
    answer = world.call(wards[0], "GET", "/api/studies/demo/release").text
    assert "The site 'centre' has to weigh" in answer
    closing = read("/close")
    assert "'centre' has not weighed the models of the others and cannot any more" in closing
    said = " ".join(read_study(world.hub.store, *world.hub.study("demo")).before_publishing)
    assert "'centre' has to weigh the others again" in said
    world.ward("centre", site="centre")
    assert "weighs the others with “consilience site aggregate”" in read("/sites/centre")
    world.call(wards[0], "POST", "/api/studies/demo/withdrawals")
    world.combiner.run(at_once=True)
    page = read()
    assert "2 contributions beside that of 'centre', which weighs them, and 1 are in use" in page
    world.submit(wards[0], wards[0].train(study, sequence=2))
    world.hub.store.close_study("demo", "ann")
    page = read()
    assert "and the study is closed, so none will be made" in page
    assert "There is no release yet" not in page
    assert "site aggregate" not in page


def test_nobody_takes_the_name_of_a_site_that_the_study_gives_a_part(sqlite_world, tools):
    """Whoever is invited chooses a name; not that of the site that all models are handed to."""
    world = sqlite_world
    world.add_study(tools.study_text(aggregator='name = "FeatureMethod"\nat = "centre"'))
    for options in ({}, {"fetch_only": True}):
        thief = tools.Ward("thief", world.folder)
        asked = {"invitation": world.invitation(**options), "site": "centre"}
        answer = world.call(thief, "POST", "/api/enrolments", json.dumps(asked).encode())
        assert tools.code(answer) == "invitation"
        assert "invitation in its own name" in answer.json()["error"]["message"]
    assert world.hub.store.sites("demo") == []
    centre = world.ward("centre", site="centre")
    assert world.call(centre, "GET", "/api/studies/demo/members").json() == {"members": []}


def test_a_hub_takes_the_releases_of_branches_from_their_own_hubs_alone(sqlite_world, tools):
    """The branch's hub signs the request and the file; nobody else can hand in either."""
    world, key = sqlite_world, SigningKey.generate()
    branch = Study.from_text(tools.study_text("branch"))
    parts = [
        tools.Ward(f"far {i}", world.folder, seed=20 + i).train(branch, epsilon=1.5)
        for i in range(2)
    ]
    release = branch.combine(parts, publication=Publication(key))
    rule = f'[branches.far]\nstudy = "{branch.digest}"\nkey = "{key.public}"\n'
    weighing = 'name = "Average"\nweights = "size"'
    parent = world.add_study(tools.study_text(aggregator=f"{weighing}\n{rule}"))
    other = world.ward("far", site="far")  # under the branch's name, with a key of its own
    row = {**world.hub.store.sites("demo")[0], "status": "enrolled"}
    state = read_study(world.hub.store, *world.hub.study("demo"))
    assert "release hand-over" in SiteState(row, state, []).nothing
    assert "The coordinator of each branch hands its release in" in state.waiting
    assert "handed in by their coordinators" in state.no_contributions.text
    content = release.sealed.to_bytes()
    assert tools.code(world.submit(other, content)) == "wrong-site"
    world.client.delete("/api/studies/demo/sites/far/key", headers=world.coordinator)
    near = world.ward("near")
    assert tools.code(world.submit(near, content)) == "rejected"
    assert world.submit(near, near.train(parent)).status_code == 201
    invited = Invitation.parse(world.invitation(site="far"))

    class Through(HubClient):
        def _send(self, method, path, body, most):
            header = sign_request(self.key, self.hub_key, method, path, digest(body))
            found = world.client.request(method, path, content=body, headers={HEADER: header})
            return found.status_code, found.content

    client = Through("http://localhost", key, invited.hub_key)
    assert hand_over_release(release, parent, "far", client, invited)["state"] == "accepted"
    assert hand_over_release(release, parent, "far", client, invited)["state"] == "accepted"
    world.combiner.run(at_once=True)
    answer = world.call(near, "GET", "/api/studies/demo/release")
    made = check_release(parent, Release.load(answer.content, key=world.hub.key.public))
    assert sorted(leaf.site for leaf in leaves_of(made.sources)) == ["far 0", "far 1", "near"]
    assert made.guarantee.epsilon == pytest.approx(1.5)
