"""Check that record values appear in no file, log, error, page or hub table outside a site.

The test runs a whole study on a table of marked values, with every mistake a table can contain,
and searches every byte for the marks in all forms a value can take. A twin that does leak shows
that the search works.
"""

import re
import socket
import struct
import threading
import time
import traceback

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import sqlalchemy as sa

from consilience import Budget
from consilience.cli.app import main
from consilience.hub.auth import new_token
from consilience.hub.hub import Hub, Settings
from consilience.hub.store import tables
from consilience.learners.linear import PrivateLogisticRegression
from consilience.site.site import Site
from forks import HubProcess
from studies import study, study_text, table

AGES = (77.123456789, 33.987654321, 64.192837465, 51.736452819)
PRESSURES = (123.765432198, 188.564738291, 91.837465192, 142.918273645)
ROWS = (17, 40, 91, 150)
WORDS = ("secret-value-4711", "Ängström-marked-0815", "7351937351937351")


def marked(n=300):
    """Return a table, as columns, in which four records are marked."""
    columns = table(n).to_pydict()
    for row, age, pressure in zip(ROWS, AGES, PRESSURES, strict=True):
        columns["age"][row], columns["pressure"][row] = age, pressure
    return columns


class Marks:
    """Finds marked values in bytes: as text, rounded or not, and as raw or encoded numbers."""

    def __init__(self):
        rows = study().schema.encode(pa.table(marked()))
        task, *_ = study().build(1.0).make_task(rows.X, rows.y)
        ordinary = (
            np.delete(task.X, ROWS, axis=0).reshape(-1).tolist()
        )  # a category, or the constant
        seen = [*rows.X[list(ROWS)].reshape(-1).tolist(), *task.X[list(ROWS)].reshape(-1).tolist()]
        scaled = [value for value in seen if value not in {0.0, 1.0, -1.0, *ordinary}]
        texts = {word for word in WORDS}
        self.short = []
        for value in (*AGES, *PRESSURES):
            texts |= {
                repr(value),
                *(f"{value:.{n}f}" for n in (4, 5, 6, 7, 8)),
                f"{value:.7e}",
                f"{value:.6g}",
            }
            self.short.append([struct.pack(f"{order}f", value) for order in "<>"])
        texts |= {repr(value)[:14] for value in scaled}
        self.needles = {
            form for text in texts for form in map(text.encode, ("utf-8", "utf-16-le", "utf-16-be"))
        }
        self.needles |= {word.encode("latin-1") for word in WORDS} | {
            text.encode().hex().encode() for text in texts
        }
        self.needles |= {
            struct.pack(f"{order}d", value)
            for value in (*AGES, *PRESSURES, *scaled)
            for order in "<>"
        }
        self.needles |= {
            struct.pack(f"{order}d", value).hex().encode() for value in AGES for order in "<>"
        }

    def found(self, content):
        """Return what was found.

        Four bytes may match by chance (four of eight marks with a probability of about 1e-9);
        eight do not."""
        hits = [needle for needle in self.needles if needle in content]
        brief = [forms for forms in self.short if any(form in content for form in forms)]
        return hits + (brief if len(brief) >= 4 else [])


class Relay:
    """Stands between a site and the hub and keeps every byte of both directions."""

    def __init__(self, port):
        self.port_of_hub, self.kept, self.open = port, [], []
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self.server.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.port_of_hub))
            self.open += (near, far)
            for source, target in ((near, far), (far, near)):
                kept = bytearray()
                self.kept.append(kept)
                threading.Thread(
                    target=self._pass_on, args=(source, target, kept), daemon=True
                ).start()

    def close(self):
        for one in (self.server, *self.open):
            one.close()

    @staticmethod
    def _pass_on(source, target, kept):
        try:
            while part := source.recv(1 << 16):
                kept += part
                target.sendall(part)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def bad_tables(folder):
    """Write tables that cannot be used, each because of a marked record."""

    def changed(column, value):
        columns = marked()
        columns[column] = [str(each) for each in columns[column]]
        columns[column][ROWS[0]] = value
        return pa.table(columns)

    wrong = {
        "category": changed("sex", WORDS[0]),
        "number": changed("age", WORDS[1]),
        "label": changed("ill", WORDS[2]),
        "missing": changed("pressure", ""),
    }
    for name, found in wrong.items():
        pyarrow.csv.write_csv(found, folder / f"{name}.csv")
        pyarrow.parquet.write_table(found, folder / f"{name}.parquet")
    whole = (folder / "category.csv").read_text().splitlines()
    whole[60] += f",{AGES[0]},{WORDS[0]}"
    (folder / "ragged.csv").write_text("\n".join(whole))
    (folder / "latin.csv").write_bytes(
        "\n".join([*whole[:60], f"{AGES[0]},{WORDS[1]},1,0"]).encode("latin-1")
    )
    (folder / "torn.parquet").write_bytes((folder / "number.parquet").read_bytes()[:-40])
    (folder / "headless.csv").write_text(
        "\n".join(f"{AGES[0]},{WORDS[0]},{value},1" for value in PRESSURES)
    )
    kinds = ("category", "number", "label", "missing")
    return [f"{kind}.{ending}" for kind in kinds for ending in ("csv", "parquet")] + [
        "ragged.csv",
        "latin.csv",
        "torn.parquet",
        "headless.csv",
    ]


def pages(hub, address):
    """Return all that the dashboard shows a coordinator, by following its links."""
    token, _ = new_token(hub.store, "ann", hours=1, kind="test")
    waiting, seen = ["/studies", "/audit", "/metrics", "/api/hub"], {}
    with httpx.Client(
        base_url=address, cookies={"consilience": token}, timeout=30, follow_redirects=True
    ) as client:
        while waiting:
            path = waiting.pop()
            if path in seen:
                continue
            answer = client.get(path)
            assert answer.status_code < 500, path
            seen[path] = answer.content
            waiting += [
                found.replace("&amp;", "&") for found in re.findall(r'href="(/[^"#]*)', answer.text)
            ]
    return seen


def test_no_marked_value_leaves_a_site(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    said = {}

    def run(*arguments, fails=False):
        with pytest.raises(SystemExit) as leaving:
            main(list(map(str, arguments)))
        printed = capfd.readouterr()
        said[f"{len(said)} {arguments[1]}"] = (printed.out + printed.err).encode()
        said[f"{len(said)} exception"] = "".join(traceback.format_exception(leaving.value)).encode()
        assert bool(leaving.value.code) == fails, printed.err

    hub = Hub(Settings(tmp_path / "hub"))
    hub.add_study(study_text(), "operator")
    hub.store.add_account("ann", "scrypt:none", "operator")
    server = HubProcess(tmp_path / "hub", log=tmp_path / "hub.log")
    server.start()
    server.wait()
    relay = Relay(server.port)
    records = tmp_path / "records"
    records.mkdir()
    pyarrow.csv.write_csv(pa.table(marked()), records / "good.csv")
    bad = bad_tables(records)
    try:
        for name in ("north", "south"):
            place = ("--folder", tmp_path / name)
            run("site", "init", "--name", name, "--dataset", "ward", "--epsilon", 3, *place)
            run("site", "join", relay.address, hub.invite("heart-risk", "operator")[0], *place)
            train = ("site", "train", "heart-risk", "--epsilon", 1, *place)
            run(*train, records / "good.csv", "--dry-run")
            approved = ("--approved", Site(tmp_path / name).preview("heart-risk", epsilon=1).digest)
            for file in bad:
                run(*train, records / file, *approved, fails=True)
            run(*train, records / "good.csv", *approved, "--json")
            run("site", "submit", "heart-risk", *place)
        until = time.monotonic() + 60
        while hub.store.release("heart-risk") is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        run("site", "fetch", "heart-risk", *place)
        (release,) = (tmp_path / "south").glob("studies/*/release-*.safetensors")
        run(
            "release",
            "predict",
            release,
            tmp_path / "south",
            records / "good.csv",
            "--out",
            records / "said.csv",
        )
        for file in bad:
            if file.split(".")[0] != "label":  # nothing of it is looked at
                run("release", "predict", release, tmp_path / "south", records / file, fails=True)
        run("release", "show", release, "--html", tmp_path / "release.html")
        run("site", "status", *place)
        run("site", "backup", tmp_path / "copy.sqlite", *place)
        run("site", "withdraw", "heart-risk", "--yes", *place)
        shown = pages(hub, server.address)
    finally:
        server.kill()
        server.end()
        relay.close()
    with hub.store.reading() as db:
        rows = {
            one.name: str(db.execute(sa.select(one)).all()) for one in tables.tables.sorted_tables
        }
    hub.store.verify()
    hub.close()
    everything = {f"said: {name}": content for name, content in said.items()}
    everything |= {f"on the wire: {i}": bytes(kept) for i, kept in enumerate(relay.kept)}
    everything |= {f"table: {name}": text.encode() for name, text in rows.items()}
    everything |= {f"page: {path}": content for path, content in shown.items()}
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.parent != records:
            everything[f"file: {file.relative_to(tmp_path)}"] = file.read_bytes()
    # The whole study took place: its traces are among what is searched.
    assert "file: hub.log" in everything
    assert len(rows["contributions"]) > 200
    assert any("/contributions/" in path for path in shown)
    sent = next(tmp_path.glob("south/studies/*/contribution-0001.safetensors")).read_bytes()
    assert any(sent in bytes(kept) for kept in relay.kept)
    marks = Marks()
    assert {
        where: hits for where, content in everything.items() if (hits := marks.found(content))
    } == {}
    assert marks.found((records / "good.csv").read_bytes())


def test_the_search_finds_a_learner_that_remembers_a_record(tmp_path, monkeypatch):
    """The broken twin: its coefficients are one record, exactly as the learner saw it."""
    whole = PrivateLogisticRegression._train

    def remembering(self, task, plan, source):
        whole(self, task, plan, source)
        self.coef_ = np.array(task.X[ROWS[0], :-1], np.float64).reshape(self.coef_.shape)

    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "study.toml").write_text(study_text())
    for name, leaks in (("honest", False), ("twin", True)):
        site = Site.init(tmp_path / name, name=name, dataset="ward", budget=Budget(epsilon=3.0))
        site.join_folder(shared)
        if leaks:
            monkeypatch.setattr(PrivateLogisticRegression, "_train", remembering)
        site.train("heart-risk", marked(), epsilon=1.0)
        site.submit("heart-risk")
        sent = (shared / f"contribution-{name}-0001.safetensors").read_bytes()
        assert bool(Marks().found(sent)) == leaks


@pytest.mark.parametrize("text", ["utf-8", "utf-16-le", "utf-16-be"])
def test_the_search_finds_every_form(text):
    marks, around = Marks(), b"\x01around" * 50
    for value in (*AGES, *PRESSURES):
        for written in (repr(value), f"{value:.4f}", f"{value:.6g}", f"{value:.7e}"):
            assert marks.found(around + written.encode(text) + around)
        for form in ("<d", ">d"):
            assert marks.found(around + struct.pack(form, value) + around)
    for word in WORDS:
        assert marks.found(around + word.encode(text) + around)
    for kind in ("<f4", ">f4"):
        assert marks.found(around + np.array(AGES, kind).tobytes() + around)
    assert not marks.found(
        around + struct.pack("<f", AGES[0]) + around
    )  # one such number may be chance
    assert not marks.found(around)
