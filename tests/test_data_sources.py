"""Laws of sources: every format gives the same documents from any place on, and what cannot be read is named."""

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from amor.data import sources
from amor.data.sources import Reading, find_sources
from amor.errors import AmorError

TEXTS = ["one", "", "trois été", "four\nlines\n", "漢字 🙂", "six \x00 \u2028 end"]


def write(folder: Path, kind: str, texts: list[str] = TEXTS) -> str:
    """The same documents as a file of any kind; returns what a user would name."""
    path = folder / f"a{kind}"
    rows = "".join(
        json.dumps({"id": i, "text": t}) + "\n" + "\n" * (i == 2) for i, t in enumerate(texts)
    ).encode()
    if kind == ".parquet":
        parquet.write_table(
            pyarrow.table({"id": list(range(len(texts))), "text": texts}), path, row_group_size=2
        )
    elif kind.endswith(".gz"):
        path.write_bytes(gzip.compress(rows if "jsonl" in kind else "|||".join(texts).encode()))
    else:
        path.write_bytes(rows if "jsonl" in kind else "|||".join(texts).encode())
    return str(path)


def read(name: str, skip: int = 0, **how: object) -> list[str]:
    (source,) = find_sources([name], Reading(**how))
    return [document.text for document in source.documents(skip)]


@pytest.mark.parametrize("kind", sources.SUFFIXES)
def test_every_format_gives_the_same_documents_from_any_place_on(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sources, "BLOCK", 4)  # so that separators lie across blocks
    name = write(tmp_path, kind)
    for skip in range(len(TEXTS) + 1):
        assert read(name, skip, separator="|||") == TEXTS[skip:]


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_a_dataset_folder_streams_like_its_files(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    write(tmp_path / "set", kind)
    for skip in (0, 4):
        assert read(f"hf:{tmp_path / 'set'}", skip) == TEXTS[skip:]
    with pytest.raises(AmorError, match="row 0 has no field 'body', it has 'id', 'text'"):
        read(f"hf:{tmp_path / 'set'}", field="body")
    with pytest.raises(AmorError, match=r"split nowhere.*cannot be opened"):
        read(f"hf:{tmp_path / 'set'}", split="nowhere")


def test_a_text_file_is_one_document_without_a_separator(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\n\ntwo\n")
    assert read(str(tmp_path / "a.txt")) == ["one\n\ntwo\n"]


def test_a_folder_is_its_files_in_the_order_of_their_names(tmp_path):
    for name in ("b.txt", "a.jsonl", "sub/c.txt.gz", ".hidden.txt", "notes.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    names = [s.name for s in find_sources([str(tmp_path)], Reading())]
    assert names == [str(tmp_path / n) for n in ("a.jsonl", "b.txt", "sub/c.txt.gz")]


WRONG = {
    "missing": ("absent.txt", None, "no file or folder .*absent.txt"),
    "suffix": ("a.pdf", b"x", "a.pdf cannot be read; suffixes: .txt"),
    "not gzip": ("a.txt.gz", b"plain", "a.txt.gz is not a whole gzip file"),
    "cut gzip": (
        "a.jsonl.gz",
        gzip.compress(b'{"text": "abc"}\n' * 999)[:-20],
        "a.jsonl.gz is not a whole gzip file",
    ),
    "utf-8": ("a.txt", b"good \xff bad", "a.txt is not UTF-8 at byte 5 .*--errors replace"),
    "utf-8 line": ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "a.jsonl line 2 is not UTF-8"),
    "surrogate": ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl line 1 holds a broken character"),
    "not json": ("a.jsonl", b'{"text": "a"}\n\n{"text"\n', "a.jsonl line 3 is not JSON"),
    "no field": (
        "a.jsonl",
        b'{"text": "a"}\n{"body": "b"}\n',
        "a.jsonl line 2 has no field 'text', it has 'body'; .*--field",
    ),
    "no text": ("a.jsonl", b'{"text": 7}\n', "line 1: field 'text' is a int"),
    "no object": ("a.jsonl", b'["text"]\n', "line 1 has no field 'text', it has a list"),
    "not parquet": ("a.parquet", b"PAR1xxxx", "a.parquet is not a whole parquet file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_read_is_named(tmp_path, case):
    name, held, words = WRONG[case]
    if held is not None:
        (tmp_path / name).write_bytes(held)
    with pytest.raises(AmorError, match=words):
        read(str(tmp_path / name))


def test_broken_bytes_may_be_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good \xff bad")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "x\\ud800y"}\n')
    assert read(str(tmp_path / "a.txt"), errors="replace") == ["good \ufffd bad"]
    assert read(str(tmp_path / "b.jsonl"), errors="replace") == ["x?y"]


def test_a_missing_column_and_an_empty_cell_are_named(tmp_path):
    with pytest.raises(AmorError, match="no column 'body', it has id, text"):
        read(write(tmp_path, ".parquet"), field="body")
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "n.parquet")
    with pytest.raises(AmorError, match=r"n\.parquet row 1: field 'text' is a NoneType"):
        read(str(tmp_path / "n.parquet"))


def test_a_missing_package_is_named_with_what_installs_it(tmp_path, monkeypatch):
    name = write(tmp_path, ".parquet")
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(AmorError, match=r'pyarrow is needed .*pip install -e "\.\[data\]"'):
        read(name)
    with pytest.raises(AmorError, match=r'datasets is needed .*pip install -e "\.\[data\]"'):
        read("hf:some/name")


def test_an_input_given_twice_or_a_folder_without_text_is_an_error(tmp_path):
    with pytest.raises(AmorError, match="holds no file"):
        find_sources([str(tmp_path)], Reading())
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(AmorError, match="given twice"):
        find_sources([str(tmp_path), str(tmp_path / "a.txt")], Reading())
