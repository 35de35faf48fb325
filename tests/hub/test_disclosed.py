"""What a hub answers and shows: every field has a reason, and none tells neighbours apart.

The reasons are the tables of docs/guarantees/disclosure.md.
"""

import html
import re
from contextlib import ExitStack

import numpy as np
import pytest

from consilience.hub.api.app import create_app
from consilience.hub.api.routes import ROUTES
from consilience.hub.auth import new_token
from consilience.hub.dashboard.pages import PAGES
from consilience.hub.roles import Action
from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Ledger
from disclosed import TABLES, differing, listed

STUDY = "/api/studies/{study}"
# What each address answers: the name of the list, if it is one, and the table of its rows.
ANSWERS = {
    "/api/studies": ("studies", "The hub's row of a study"),
    STUDY: (None, "The hub's answer about a study"),
    f"{STUDY}/invitations": ("invitations", "The hub's row of an invitation"),
    f"{STUDY}/sites": ("sites", "The hub's row of a site"),
    f"{STUDY}/contributions": ("contributions", "The hub's row of a contribution"),
    f"{STUDY}/releases": ("releases", "The hub's row of a release"),
    f"{STUDY}/log": (None, "The hub's log of releases"),
    "/api/audit": ("entries", "The hub's audit log"),
}
# Files, which have tables of their own, and what is about the hub and no study.
FILES = {f"{STUDY}/files/{{file}}", f"{STUDY}/contributions/{{digest}}", f"{STUDY}/release"}
FILES |= {f"{STUDY}/releases/{{sequence}}", "/healthz", "/readyz", "/metrics", "/api/hub"}
FILES |= {"/api/drafts/{token}", "/api/audit.csv"}  # the latter with the rows of /api/audit
# Digests and files of contributions, for the site that weighs them.
MEMBERS = {f"{STUDY}/members", f"{STUDY}/members/{{digest}}"}
PAPERS = {f"{STUDY}/blind", f"{STUDY}/blind/files", f"{STUDY}/blind/batches"}


def records(tools, seed, relation, *, changed):
    rows = tools.table(200, seed)
    if changed and relation == "add-remove":
        return {name: column[1:] for name, column in rows.items()}
    if changed:
        rows = {name: np.array(column) for name, column in rows.items()}
        rows["a"][0], rows["y"][0] = 1 - rows["a"][0], "no" if rows["y"][0] == "yes" else "yes"
    return rows


def filled(tools, stack, folder, relation, *, changed):
    """Return a hub with a release of two sites, of which the first may have other records."""
    folder.mkdir()
    world = tools.World(
        stack.enter_context(tools.Client(create_app(tools.quick(folder / "hub")))), folder
    )
    text = tools.study_text()
    if relation == "add-remove":
        text = text.replace("[privacy]", '[privacy]\nneighbours = "add-remove"')
        text = text.replace("[aggregator]", "public_size = 100\n[aggregator]")
    study = world.add_study(text)
    wards = [world.ward(f"ward {i}") for i in range(2)]
    for i, ward in enumerate(wards):
        ledger = Ledger(folder / f"{i}.ledger")
        ledger.allow("ward", Budget(epsilon=9.0, neighbours=relation))
        sender = {"site": ward.name, "signing": ward.key, "dataset": "ward"}
        rows = records(tools, i, relation, changed=changed and i == 0)
        made = study.train(rows, ledger, epsilon=1.0, **sender)
        assert world.submit(ward, made).status_code == 201
    world.combiner.combine("demo")
    return world, wards


def answers(world, wards):
    """Return the JSON of every address, for the account and for the site that may have changed."""
    found = {}
    for path in ANSWERS:
        address = path.replace("{study}", "demo")
        found[path, "account"] = world.client.get(address, headers=world.coordinator)
        found[path, "site"] = world.call(wards[0], "GET", address)
    return {asked: answer.json() for asked, answer in found.items() if answer.status_code == 200}


@pytest.fixture(params=["replace-one", "add-remove"])
def pair(request, tools, tmp_path):
    """Two hubs whose sites have neighbouring records."""
    with ExitStack() as stack:
        yield [
            filled(tools, stack, tmp_path / str(changed), request.param, changed=changed)
            for changed in (False, True)
        ]


def test_every_address_for_machines_is_listed():
    read = {route.path for route in ROUTES if route.method == "GET"}
    assert read == set(ANSWERS) | FILES | PAPERS | MEMBERS


def test_answers_and_pages_of_neighbours_differ_in_noise_and_chance_alone(pair):
    both = [answers(*each) for each in pair]
    assert set(both[0]) == set(both[1])
    assert set(ANSWERS) == {path for path, _ in both[0]}
    seen = set()
    for (path, who), answer in both[0].items():
        inside, heading = ANSWERS[path]
        rows = [each[path, who] if inside is None else each[path, who][inside] for each in both]
        if inside is None:
            rows = [[row] for row in rows]
        else:
            assert set(answer) == {inside}
        assert len(rows[0]) == len(rows[1]) > 0
        for one, two in zip(*rows, strict=True):
            seen |= listed(heading, one)
            assert differing(heading, one, two) == set()
            if heading == "The hub's row of a contribution":
                assert one["size"] == two["size"]  # each is the first of its ledger
    ours = {(heading, name) for heading in TABLES for name in TABLES[heading]}
    assert {one for one in ours if one[0] in {table for _, table in ANSWERS.values()}} <= seen
    shown = [pages(*each) for each in pair]
    assert set(shown[0]) == set(shown[1])
    for page, text in shown[0].items():
        assert text == shown[1][page], page


# What is chance or noise on a page, by its form: digests and keys, also shortened; times.
DRAWN = (
    (r"[0-9a-f]{8,}…?", "DIGEST"),
    (r"20\d\d-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(\+00:00| UTC)?", "TIME"),
)


def pages(world, wards):
    """Return the text of every page that can be read, without what is drawn, by address."""
    token, _ = new_token(world.hub.store, "ann", hours=1, kind="test")
    digest = next(iter(world.hub.store.contributions("demo", site="ward 0")))["digest"]
    known = {"study": "demo", "site": "ward 0", "number": "1", "digest": digest, "kind": "html"}
    known |= {"account": "ann"}
    found = {}
    for page in PAGES:
        named = re.findall(r"{(\w+)}", page.path)
        if "GET" in page.methods and page.action is not Action.OPEN and set(named) <= set(known):
            address = page.path.format(**known)
            answer = world.client.get(address, headers={"cookie": f"consilience={token}"})
            assert answer.status_code in (200, 303, 403, 404), (address, answer.text)
            if answer.headers.get("content-type", "").startswith("text/html"):
                text = html.unescape(re.sub(r"<[^>]+>", "\n", answer.text))
                for form, word in DRAWN:
                    text = re.sub(form, word, text)
                found[page.path] = [line.strip() for line in text.split("\n") if line.strip()]
    return found
