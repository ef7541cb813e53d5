"""Files become typed things or one line that says what is wrong and where."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta

from amor import typed
from amor.errors import AmorError


@dataclass(frozen=True)
class Inner:
    depth: Annotated[int, Meta(ge=1, le=1000)] = 1


class Thing(typed.File, frozen=True):
    name: str
    rate: float = 0.5
    inner: Inner = Inner()
    many: tuple[int, ...] = ()


def said(value) -> str:
    with pytest.raises(AmorError) as found:
        typed.convert(Thing, value, "F")
    assert "\n" not in str(found.value)
    return str(found.value)


def test_a_thing_comes_back_as_it_was_written(tmp_path: Path):
    thing = Thing(name="a", rate=1.5, inner=Inner(7), many=(1, 2))
    (tmp_path / "f.json").write_text(typed.text(thing))
    assert typed.read(Thing, tmp_path / "f.json") == thing
    assert typed.from_json(Thing, typed.line(thing), "F") == thing


def test_what_is_wrong_is_said_with_its_place():
    assert said({"name": 5}) == "F: name: expected str, got int"
    assert (
        said({"name": "a", "inner": {"depth": 10**9}})
        == "F: inner.depth: expected int <= 1000, not 1000000000"
    )
    assert said({"name": "a", "many": [1, None]}) == "F: many[1]: expected int, got null"
    assert "no key 'nam'; did you mean 'name'?" in said({"nam": "a"})
    assert "inner.no key 'dept'" in said({"name": "a", "inner": {"dept": 1}})
    assert said({"name": "a", "rate": True}) == "F: rate: expected float, got bool"
    assert said([]) == "F: expected object, got array"
    assert said({"name": "a", "version": 9}) == "F: of version 9; this amor reads version 1"


@pytest.mark.parametrize(
    "held",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"name": NaN}',
        b"\x00",
        b'{"name": "\xed\xa0\x80"}',
    ],
)
def test_broken_files_are_one_line(tmp_path: Path, held: bytes):
    (tmp_path / "f.json").write_bytes(held)
    with pytest.raises(AmorError, match=r"f\.json: "):
        typed.read(Thing, tmp_path / "f.json")


def test_a_lone_surrogate_is_one_line():
    """transformers reads JSON with Python's reader, which lets one through."""
    assert said({"name": "a", "rate": "\ud800"}) == (
        "F: text with a lone surrogate, '\\ud800', which UTF-8 lacks"
    )
    with pytest.raises(AmorError, match="lone surrogate"):
        typed.line(Thing(name="\ud800"))


@pytest.mark.parametrize("held", ["a = ", "a = " + "[" * 5000, "a = " + "9" * 10_000, "a = nan"])
def test_broken_toml_is_one_line(tmp_path: Path, held: str):
    (tmp_path / "f.toml").write_text(held)
    with pytest.raises(AmorError, match=r"f\.toml: "):
        typed.read(Thing, tmp_path / "f.toml")


def test_files_that_are_none(tmp_path: Path):
    for path in (
        tmp_path,
        tmp_path / "none",
        tmp_path / ("n" * 300),
        Path("a\0b"),
        tmp_path / "x" / "y",
    ):
        with pytest.raises(AmorError):
            typed.read(Thing, path)
    (tmp_path / "large").write_bytes(b" " * 100)
    with pytest.raises(AmorError, match="larger than"):
        typed.read_text(tmp_path / "large", most=99)


def test_set_key_reaches_into_tables_and_leaves_shared_ones_alone():
    shared = {"peak": 1}
    tree = {"lr": shared, "changes": {"blocks.count": 1, "blocks": {"mlp": True}}}
    typed.set_key(tree, "lr.floor", 2, "F")
    typed.set_key(tree, "new.a.b", 3, "F")
    typed.set_key(
        tree, "changes.blocks.count", 4, "F"
    )  # replaced where it stands, spelled with a dot
    typed.set_key(tree, "changes.blocks.mlp", False, "F")
    assert tree["lr"] == {"peak": 1, "floor": 2} and shared == {"peak": 1}
    assert tree["new"] == {"a": {"b": 3}}
    assert tree["changes"] == {"blocks.count": 4, "blocks": {"mlp": False}}
    with pytest.raises(
        AmorError, match=r"F: 'peak' is 1 and has no keys, so 'lr.peak.x' reaches nothing"
    ):
        typed.set_key(tree, "lr.peak.x", 1, "F")
    with pytest.raises(AmorError, match="dots"):
        typed.set_key(tree, "a." * 20 + "b", 1, "F")


def test_a_flat_tree_set_key_by_key_is_the_tree():
    tree = {
        "blocks": {"gate_options": {"kappa": 0.1}, "count": 2},
        "pattern": {"mamba2": 4, "attention": [2]},
        "width": 8,
    }
    assert typed.flat(tree) == {
        "blocks.gate_options.kappa": 0.1,
        "blocks.count": 2,
        "pattern": {"mamba2": 4, "attention": [2]},
        "width": 8,
    }
    again: dict[str, object] = {}
    for key, value in typed.flat(tree).items():
        typed.set_key(again, key, value, "F")
    assert again == tree


def test_words_of_a_command_line_are_keys_and_toml_values():
    assert typed.assignments(["a.b = 1", "c=true", "d=word", "e=[1, 2]", "f=a=b"], "x=1") == {
        "a.b": 1,
        "c": True,
        "d": "word",
        "e": [1, 2],
        "f": "a=b",
    }
    for wrong in ("a", "=1", " =1", ""):
        with pytest.raises(AmorError, match=r"write it as key=value, e.g. --set x=1"):
            typed.assignments([wrong], "x=1")


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path):
    (tmp_path / "f").write_text('{"name": "a"}\n{"name": "b"}\n{"name": "c')
    assert [t.name for t in typed.read_lines(Thing, tmp_path / "f")] == ["a", "b"]
    (tmp_path / "f").write_text('{"name": "a"}\n{"nam')
    (tmp_path / "g").write_text('{"name": "a"}\n{"nam\n')
    with pytest.raises(AmorError, match="g:2: not JSON"):
        list(typed.read_lines(Thing, tmp_path / "g"))
