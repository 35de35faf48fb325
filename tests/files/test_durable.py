import os
import stat

import pytest

from consilience.files import durable
from consilience.files.durable import move_durably, write_durably


def test_a_file_is_replaced_whole_or_left_alone(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_durably(path, b"first")
    with pytest.raises(FileExistsError):
        write_durably(path, b"second", replace=False)
    assert path.read_bytes() == b"first"

    def fail(descriptor):
        raise OSError("the disk is full")

    monkeypatch.setattr(durable.os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        write_durably(path, b"third")
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]  # no draft stays behind


def test_a_private_file_is_never_readable_by_others(tmp_path):
    write_durably(tmp_path / "key", b"secret", mode=0o600)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_a_file_that_was_moved_is_where_it_belongs(tmp_path):
    (tmp_path / "arrived").write_bytes(b"content")
    move_durably(tmp_path / "arrived", tmp_path / "kept")
    assert (tmp_path / "kept").read_bytes() == b"content"
    assert not (tmp_path / "arrived").exists()
