"""Releases at a hub whose members bring more than a model: scores of their own."""

import pytest

from consilience import Budget
from consilience.files.release import Release
from consilience.protocol import HEADER, digest, sign_request
from consilience.site.client import HubClient
from consilience.site.site import Site


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
    centre.join("http://localhost", world.invitation())
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
