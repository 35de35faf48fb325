import json
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.errors import ContributionRejected, SettingsError
from consilience.files.sealed import Sealed, SealedFile, SigningKey, canonical, write_durably

KEY = SigningKey.generate()
FACTS = {"site": "north", "numbers": [1, 2.5, "é"], "nested": {"a": None}}
TENSORS = {"coef": np.arange(12.0).reshape(3, 4), "size": np.array(5), "none": np.zeros((0, 3))}
WHOLE = Sealed.seal("contribution", FACTS, TENSORS, KEY).to_bytes()


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "file.safetensors"
        path.write_bytes(content)
        return path

    return write


def rebuilt(header, body=b""):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_a_file_comes_back_bit_for_bit(file):
    found = Sealed.load(file(WHOLE), "contribution")
    assert len(found.to_bytes()) == len(WHOLE)  # the order of safetensors' metadata varies
    assert found.digest == Sealed.seal("contribution", FACTS, TENSORS, KEY).digest
    assert {name: found.facts[name] for name in FACTS} == FACTS
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(found.tensors[name], tensor)
        assert found.tensors[name].shape == tensor.shape
    assert found.key == KEY.public


def test_the_digest_tells_facts_tensors_and_kinds_apart():
    whole = Sealed.seal("contribution", FACTS, TENSORS, KEY).digest
    assert whole == Sealed.seal("contribution", FACTS, TENSORS, KEY).digest
    changed = {**TENSORS, "coef": TENSORS["coef"] + 1e-9}
    others = [
        Sealed.seal("release", FACTS, TENSORS, KEY),
        Sealed.seal("contribution", {**FACTS, "site": "south"}, TENSORS, KEY),
        Sealed.seal("contribution", FACTS, changed, KEY),
    ]
    assert len({whole, *(other.digest for other in others)}) == 4


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_no_changed_byte_is_accepted(tmp_path_factory, changes):
    content = bytearray(WHOLE)
    for place, value in changes:
        content[place] = value
    path = tmp_path_factory.mktemp("sealed") / "file"
    path.write_bytes(content)
    if bytes(content) == WHOLE:
        return
    with pytest.raises(ContributionRejected):
        Sealed.load(path, "contribution")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_at_all_are_refused_politely(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("sealed") / "file"
    path.write_bytes(content)
    with pytest.raises(ContributionRejected):
        Sealed.load(path, "contribution")


@pytest.mark.parametrize("cut", [0, 7, 8, 100, len(WHOLE) - 1])
def test_a_file_that_is_cut_short_is_refused(file, cut):
    with pytest.raises(ContributionRejected):
        Sealed.load(file(WHOLE[:cut]), "contribution")


def test_a_header_that_promises_too_much_is_refused_before_anything_is_allocated(file):
    huge = {"coef": {"dtype": "F64", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 8 << 40]}}
    hostile = [
        struct.pack("<Q", 1 << 62) + b"{}",
        rebuilt(huge),
        rebuilt({f"t{i}": {} for i in range(20_000)}),
        rebuilt({"coef": {"dtype": "F64", "shape": [-1], "data_offsets": [0, 8]}}, b"\0" * 8),
        rebuilt(
            {"coef": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8], "shape ": 1}}, b"\0" * 8
        ),
        rebuilt({"coef": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 8]}}, b"\0" * 8),
        rebuilt({"../x": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}, b"\0" * 8),
        struct.pack("<Q", 400_000) + b"[" * 400_000,
        struct.pack("<Q", 30) + b'{"a":1,"a":2}                 ',
        rebuilt({"__metadata__": {"consilience": "{}", "kind": "contribution", "signature": "00"}}),
    ]
    for content in hostile:
        with pytest.raises(ContributionRejected):
            Sealed.load(file(content), "contribution")


def test_a_file_larger_than_allowed_is_refused(file):
    with pytest.raises(ContributionRejected, match="larger than"):
        SealedFile(file(WHOLE), "contribution", most_bytes=100)


def test_a_number_that_is_not_finite_never_gets_in_or_out(file):
    with pytest.raises(ContributionRejected, match="not finite"):
        Sealed.seal("contribution", {}, {"coef": np.array([1.0, np.nan])}, KEY)


def test_tensors_are_checked_in_blocks(file, monkeypatch):
    big = {"coef": np.arange(100_000.0).reshape(1000, 100), "flat": np.arange(7)}
    path = file(Sealed.seal("contribution", FACTS, big, KEY).to_bytes())
    monkeypatch.setattr("consilience.files.sealed._BLOCK", 1000)
    found = SealedFile(path, "contribution")
    found.check_tensors()
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ContributionRejected, match="differs from its digest"):
        found.check_tensors()


def test_a_file_of_one_kind_is_no_file_of_another(file):
    with pytest.raises(ContributionRejected, match="a release was expected"):
        Sealed.load(file(WHOLE), "release")


def test_facts_have_one_text_whatever_their_order():
    assert canonical({"b": 1, "a": [1.5]}) == canonical({"a": [1.5], "b": 1}) == '{"a":[1.5],"b":1}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical({"a": float("nan")})


def test_a_key_is_written_once_and_for_its_owner_only(tmp_path):
    path = tmp_path / "key.pem"
    KEY.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert SigningKey.load(path).public == KEY.public
    with pytest.raises(FileExistsError):
        KEY.save(path)
    path.write_text("something else")
    with pytest.raises(SettingsError, match="cannot be read as a private key"):
        SigningKey.load(path)
    assert KEY.public[:16] in repr(KEY)


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_durably(path, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_durably(path, b"new")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
