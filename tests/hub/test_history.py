"""What a site replaced costs the hub little: a quota for a day, bytes that go, quick pages."""

from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa

from consilience.hub.store import Store, now
from consilience.hub.store.sites import MOST_KEPT
from consilience.hub.store.tables import bodies, contributions, versions
from consilience.privacy.guarantee import Guarantee, compose

LONG = 3000


def replace_often(world: Any, n: int) -> None:
    """Give "north" a history: contributions number 1 to `n` of long ago, all superseded."""
    first = world.hub.store.contributions("demo", site="north")[0]
    rows = [
        {
            **first,
            "digest": f"{i:064x}",
            "sha256": f"{i:064x}",
            "sequence": i,
            "state": "superseded",
            "received": now(seconds=-(10**6) + i),
            "kept": i > n - MOST_KEPT,
        }
        for i in range(2, n + 1)
    ]
    world.hub.store.write(lambda db: db.execute(contributions.insert(), rows))


def measure(world: Any, ask: Any) -> tuple[int, int]:
    """Return how many rows a request reads, and how many hundred steps SQLite takes for it."""
    rows, steps = [0], [0]

    def count_row(_: object, row: tuple[Any, ...]) -> tuple[Any, ...]:
        rows[0] += 1
        return row

    def count_step() -> None:
        steps[0] += 1

    def watch(connection: Any, *_: object) -> None:
        connection.row_factory = count_row
        connection.set_progress_handler(count_step, 100)

    engines = world.hub.store._engines
    for engine in engines:
        sa.event.listen(engine, "checkout", watch)
    try:
        ask()
    finally:
        for engine in engines:
            sa.event.remove(engine, "checkout", watch)
    return rows[0], steps[0]


def test_pages_and_submissions_cost_the_same_after_thousands_of_contributions(
    sqlite_world: Any,
) -> None:
    world = sqlite_world
    study = world.add_study()
    ward = world.ward("north")
    assert world.submit(ward, ward.train(study)).status_code == 201
    cookie = {"cookie": "consilience=" + world.coordinator["authorization"].split()[1]}

    def submit() -> None:
        n = world.hub.store.sender("demo", ward.key.public)[1]["sequence"]
        assert world.submit(ward, ward.train(study, sequence=n + 1)).status_code == 201

    def get(page: str) -> None:
        answer = world.client.get(page, headers=cookie)
        assert answer.status_code == 200
        assert "north" in answer.text

    costs = {}
    for n in (10, LONG):
        replace_often(world, n)
        costs[n] = {"submit": measure(world, submit)}
        for page in ("", "/sites", "/sites/north", "/sites/north?contributions=2"):
            costs[n][page] = measure(world, lambda page=page: get(f"/studies/demo{page}"))
        later = contributions.delete().where(contributions.c.sequence > 1)
        world.hub.store.write(lambda db, later=later: db.execute(later))
    for ask, (rows, steps) in costs[LONG].items():
        few, quick = costs[10][ask]
        assert rows <= few + 50, ask  # the rows of one page
        if ask == "submit":
            assert rows <= few + 2  # the hundredth newest, and one whose bytes go
            assert steps <= 2 * quick + MOST_KEPT // 10  # it passes those that are kept


@pytest.mark.parametrize("world", [{"most_daily": 3}], indirect=True)
def test_a_site_submits_so_many_contributions_a_day(world: Any, tools: Any) -> None:
    study = world.add_study()
    ward, other = world.ward("north"), world.ward("south")
    for sequence in (1, 2, 3):
        last = ward.train(study, sequence=sequence)
        assert world.submit(ward, last).status_code == 201
    more = ward.train(study, sequence=4)
    assert tools.code(world.submit(ward, more)) == "too-often"
    assert world.submit(ward, last).status_code == 200  # the same again is not another one
    assert world.submit(other, other.train(study)).status_code == 201
    first = contributions.update().where(contributions.c.sequence == 1)
    yesterday = first.values(received=now(seconds=-86401))
    world.hub.store.write(lambda db: db.execute(yesterday))
    assert world.submit(ward, more).status_code == 201


@pytest.mark.parametrize("world", [{}, {"small_bytes": 0}], indirect=True)
def test_the_bytes_of_what_was_replaced_long_ago_go_and_their_rows_stay(
    world: Any, tools: Any
) -> None:
    study = world.add_study()
    ward, _ = world.fill(study, 2)
    world.combiner.run(at_once=True)  # the current release rests on number 1
    store, n = world.hub.store, 8
    store.most_kept = 4
    files = [ward.train(study, sequence=i) for i in range(2, n + 1)]
    for file in files:
        assert world.submit(ward, file).status_code == 201
    rows = {row["sequence"]: row for row in store.contributions("demo", site=ward.name)}
    assert len(rows) == n
    assert [i for i, row in rows.items() if not row["kept"]] == [2, 3]
    left = {row["sha256"] for row in store.fetch_all(sa.select(bodies))}
    left |= {path.parent.name + path.name for path in store.files.folder.glob("*/*")}
    assert {i for i, row in rows.items() if row["sha256"] in left} == {1, *range(4, n + 1)}
    store.verify()
    guarantees = [Guarantee.from_dict(row["guarantee"]) for row in rows.values()]
    whole = Guarantee.from_dict(rows[n]["total"])
    assert whole.epsilon == pytest.approx(compose(*guarantees).epsilon, rel=1e-12)
    assert world.submit(ward, files[0]).status_code == 200  # known, and not stored again
    cookie = {"cookie": "consilience=" + world.coordinator["authorization"].split()[1]}
    pages = {i: f"/studies/demo/contributions/{rows[i]['digest']}" for i in (1, 2)}
    assert [world.client.get(pages[i], headers=cookie).status_code for i in (1, 2)] == [200, 404]


def test_the_bytes_of_old_releases_go_but_not_of_one_that_may_be_offered_again(
    world: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    study, store = world.add_study(), world.hub.store
    store.most_old = 2
    world.fill(study, 2)
    world.combiner.run(at_once=True)  # number 1, without the third site
    third = world.ward("third")
    for sequence in range(1, 7):
        assert world.submit(third, third.train(study, sequence=sequence)).status_code == 201
        world.combiner.run(at_once=True)
    # What is forgotten is forgotten when the next release is made.
    rows = {row["sequence"]: row for row in store.releases("demo")}
    assert len(rows) == 7
    kept = {i for i, row in rows.items() if row["kept"]}
    assert kept == {1, 4, 5, 6, 7}
    assert {i for i, row in rows.items() if store.files.path(row["sha256"]).exists()} == kept
    store.verify()
    assert store.release_digests("demo") == [rows[i]["digest"] for i in range(1, 8)]
    cookie = {"cookie": "consilience=" + world.coordinator["authorization"].split()[1]}
    page = world.client.get("/studies/demo/releases/2", headers=cookie)
    assert page.status_code == 200
    assert "no longer here" in page.text
    assert "no longer here" in world.client.get("/studies/demo", headers=cookie).text
    for path in ("file", "certificate.txt"):
        gone = world.client.get(f"/studies/demo/releases/2/{path}", headers=cookie)
        assert gone.status_code == 404
        assert "keeps its number" in gone.text
    (tmp_path / "copy").mkdir()
    copy_file, store.most_old = store.files.copy, 1

    def copy_late(sha256: str, target: Any) -> None:  # the hub forgets while it is copied
        for old in store.forget_releases("demo"):
            store.files.remove(old)
        copy_file(sha256, target)

    with monkeypatch.context() as patched:
        patched.setattr(store.files, "copy", copy_late)
        store.copy_to(tmp_path / "copy")
    with closing(Store(tmp_path / "copy")) as copy:
        copy.verify()
        assert [row["sequence"] for row in copy.releases("demo") if row["kept"]] == [7, 6, 1]
    answer = world.call(third, "POST", "/api/studies/demo/withdrawals", b"{}")
    assert answer.status_code == 200
    assert world.hub.release_path("demo")[0]["sequence"] == 1
    world.combiner.run(at_once=True)
    kept = {row["sequence"] for row in store.releases("demo") if row["kept"]}
    assert kept == {1, 7, 8}
    store.verify()


def test_the_bytes_stay_that_a_release_rests_on_which_could_be_offered_again(world: Any) -> None:
    study = world.add_study()
    ward, _ = world.fill(study, 2)
    world.combiner.run(at_once=True)
    other = world.ward("other")
    assert world.submit(other, other.train(study)).status_code == 201
    store = world.hub.store
    store.most_kept = 1
    for sequence in range(2, 6):
        world.combiner.run(at_once=True)
        assert world.submit(ward, ward.train(study, sequence=sequence)).status_code == 201
    world.call(other, "POST", "/api/studies/demo/withdrawals", b"{}")
    current = store.release("demo")
    assert current["sequence"] == 1
    first = store.contributions("demo", site=ward.name)[0]
    assert first["kept"]
    place = f"/api/studies/demo/contributions/{first['digest']}"
    assert world.call(ward, "GET", place).status_code == 200


def test_a_database_of_an_earlier_version_gets_the_totals(tmp_path: Any, world: Any) -> None:
    study = world.add_study()
    ward = world.ward("north")
    for sequence in (1, 2, 3):
        assert world.submit(ward, ward.train(study, sequence=sequence)).status_code == 201
    store = world.hub.store
    before = store.contributions("demo")
    for text in (
        "DROP INDEX kept_contributions",
        "DROP INDEX withdrawn_contributions",
        "DROP TABLE known_addresses",
        "ALTER TABLE contributions DROP COLUMN kept",
        "ALTER TABLE contributions DROP COLUMN total",
        "ALTER TABLE releases DROP COLUMN kept",
    ):
        store.write(lambda db, text=text: db.execute(sa.text(text)))
    newest = versions.delete().where(versions.c.version >= 4)
    store.write(lambda db: db.execute(newest))
    with closing(Store(store.folder, store.url.render_as_string(False))) as again:
        assert again.contributions("demo") == before
