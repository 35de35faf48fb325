"""Releases at a hub whose members bring more than a model: scores of their own."""

from consilience.files.release import Release


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
