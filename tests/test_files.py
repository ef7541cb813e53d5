"""Files: a reader, or a kill, meets the old one or the new one; tensors of several shards."""

import os

import pytest
import torch

from amor import tensors
from amor.errors import AmorError
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


def test_a_tensor_that_stands_in_two_shards_is_refused(tmp_path):
    """Which of the two a model gets would depend on the order of the files."""
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    tensors.write(paths[0], {"x": torch.zeros(2), "y": torch.zeros(2)})
    tensors.write(paths[1], {"z": torch.zeros(2)})
    assert sorted(tensors.read_files(paths)) == ["x", "y", "z"]
    tensors.write(paths[1], {"y": torch.ones(2)})
    with pytest.raises(AmorError, match=r"b\.safetensors: tensor 'y' is in another shard too"):
        tensors.read_files(paths)


def test_two_that_write_at_once_do_not_meet(tmp_path):
    path = tmp_path / "file"
    with atomic_write(path, mark="a") as one, atomic_write(path, mark="b") as other:
        one.write_text("one")
        other.write_text("other")
        assert one != other
    assert path.read_text() == "one" and os.listdir(tmp_path) == ["file"]
