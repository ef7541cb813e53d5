"""The law of files: a reader, or a kill, meets the old one or the new one."""

import os

import pytest

from amor.files import atomic_write, replace_file


class Kill(BaseException):
    """Stands for kill -9."""


def test_a_file_is_the_old_one_until_it_is_the_new_one(tmp_path):
    path = tmp_path / "file"
    replace_file(path, "old é")
    with atomic_write(path) as beside:
        beside.write_text("new")
        assert path.read_text(encoding="utf-8") == "old é"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_an_error_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "file"
    replace_file(path, "old")
    with pytest.raises(OSError, match="full"), atomic_write(path) as beside:  # noqa: PT012
        beside.write_text("ne")
        raise OSError("full")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_what_a_kill_leaves_is_taken_by_the_next_write_of_one_that_writes_alone(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(Kill), atomic_write(path, mark="part") as beside:  # noqa: PT012
        beside.write_text("half")
        raise Kill
    assert not path.exists() and len(os.listdir(tmp_path)) == 1
    replace_file(path, "whole", mark="part")
    assert path.read_text() == "whole" and os.listdir(tmp_path) == ["file"]


def test_two_that_write_at_once_do_not_meet(tmp_path):
    path = tmp_path / "file"
    with atomic_write(path, mark="a") as one, atomic_write(path, mark="b") as other:
        one.write_text("one")
        other.write_text("other")
        assert one != other
    assert path.read_text() == "one" and os.listdir(tmp_path) == ["file"]
