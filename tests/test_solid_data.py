"""Prepared data, its sources and the paths of commands: whatever they hold, a result or one
line that says what is wrong."""

import gzip
import hashlib
import itertools
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from nonsense import nodes, replaced
from pyarrow import parquet

from amor.checks import MOST_TOKENS
from amor.cli import main
from amor.cli.prepare import advice
from amor.data import prepare as room
from amor.data import sources
from amor.data.prepare import Preparation, Request, prepare
from amor.data.shards import MANIFEST, Shards, splits
from amor.data.sources import Reading, find_sources
from amor.data.stats import counts
from amor.data.tokenizer import load, tokenizer_hash
from amor.data.writer import ShardWriter
from amor.errors import AmorError
from amor.vocabulary import load_file

DEEP = 100_000
LONG = "n" * 300
NONSENSE: list[Any] = [
    *(None, True, False, -1, 0, 1, 7, 2**31, 2**63, 10**30, 1.5, 1e308),
    *("", "x", "../x", "/etc/passwd", "a\0b", LONG, "00000.bin", "0" * 64, "\u2028"),
    *([], [[]], [1, 2], {}, {"a": 1}, {"train": {}}),
]


def mutants(tree: Any) -> Iterator[str]:
    """The tree with each node replaced by each nonsense value, left out, or with a
    neighbour it should not have."""
    for path in nodes(tree):
        for value in NONSENSE:
            yield json.dumps(replaced(tree, path, value))
        held = tree
        for key in path:
            held = held[key]
        if isinstance(held, dict):
            yield json.dumps(replaced(tree, path, {**held, "unknown": 1}))
            for key in held:
                yield json.dumps(replaced(tree, path, {k: v for k, v in held.items() if k != key}))


def one_line(work: Any) -> str:
    """What an AmorError says of the work; "" where it succeeds. Any other
    error is a failure of the test."""
    said = "fine"
    try:
        work()
    except AmorError as error:
        said = str(error)
    assert said.strip()
    assert "\n" not in said
    return "" if said == "fine" else said


class KilledError(Exception):
    pass


REQUEST: dict[str, Any] = {
    "tokenizer": "bytes",
    "valid": 0.3,
    "shard_tokens": 40,
    "reading": Reading(separator="|"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("|".join(f"text {number}" for number in range(20)))
    return path


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    prepare(Request((str(text),), **REQUEST), out, workers=1)
    return out


@pytest.fixture(scope="module")
def stopped(text, tmp_path_factory) -> Path:
    """A preparation that was killed on its way, with some shards done and one begun."""
    out, left, append = tmp_path_factory.mktemp("stopped"), [26], ShardWriter.append

    def torn(self, tokens):
        left[0] -= 1
        if not left[0]:
            raise KilledError
        append(self, tokens)

    preparation = Preparation(Request((str(text),), **REQUEST), out, workers=1, save_every=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "append", torn)
        with pytest.raises(KilledError):
            preparation.run()
    held = json.loads((out / room.JOURNAL).read_text())
    assert held["written"]["train"]["shards"]
    assert held["written"]["train"]["part"]
    return out


@pytest.fixture
def split(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "data")) / "train"


def use(folder: Path) -> None:
    """Everything a training run does with a split before its model sees it."""
    shards = Shards.open(folder)
    shards.check(vocab=257)
    shards.tokenizer()
    assert len(shards.hash) == 64
    assert counts(shards).sum() == shards.tokens


def test_a_manifest_with_any_node_replaced_is_refused_or_read(split):
    path = split / MANIFEST
    tree = json.loads(path.read_text())
    refused = cases = 0
    for held in mutants(tree):
        path.write_text(held)
        cases += 1
        refused += bool(one_line(lambda: use(split)))
    assert cases > 400
    assert refused > 0.9 * cases


def test_a_journal_with_any_node_replaced_is_refused_or_continued(text, stopped, tmp_path):
    tree = json.loads((stopped / room.JOURNAL).read_text())
    refused = cases = 0
    tokenizer = load_file(stopped / "tokenizer.json")
    known = tokenizer_hash(tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "load_file", lambda _: tokenizer)  # most of the time otherwise
        patch.setattr(room, "tokenizer_hash", lambda _: known)
        patch.setattr("amor.data.encoder.load_file", lambda _: tokenizer)
        patch.setattr("amor.files.fsync", lambda _: None)
        out = Path(shutil.copytree(stopped, tmp_path / "out"))
        for held in mutants(tree):
            (out / room.JOURNAL).write_text(held)
            cases += 1
            if one_line(lambda: prepare(Request((str(text),), **REQUEST), out, workers=1)):
                refused += 1
            else:  # it went on to its end
                shutil.rmtree(out)
                shutil.copytree(stopped, out)
    assert cases > 600
    assert refused > 0.7 * cases


def test_a_preparation_that_was_stopped_goes_on_to_the_same_bytes(text, whole, stopped, tmp_path):
    out = Path(shutil.copytree(stopped, tmp_path / "out"))
    held = json.loads((out / room.JOURNAL).read_text())
    # as journals were before they had a version and knew their tokenizer
    (out / room.JOURNAL).write_text(
        json.dumps({k: held[k] for k in ("plan", "next", "written", "done")}, indent=1)
    )
    prepare(Request((str(text),), **REQUEST), out, workers=1)
    for path in (
        p for p in whole.rglob("*") if p.is_file() and p.name not in (room.JOURNAL, room.LOCK)
    ):
        assert (out / path.relative_to(whole)).read_bytes() == path.read_bytes()


def test_a_manifest_is_read_as_it_always_was_written(split):
    """Checkpoints keep a hash of it: a new form of the manifest must not change it."""
    tree = json.loads((split / MANIFEST).read_text())
    wanted = [
        "format",
        "dtype",
        "vocab",
        "tokenizer_hash",
        "end_of_text",
        "tokens",
        "documents",
        "text_bytes",
        "shard_tokens",
    ]
    assert list(tree) == [*wanted, "shards", "sources"]
    (split / MANIFEST).write_text(json.dumps(tree, indent=1))
    seen = {key: value for key, value in tree.items() if key != "sources"}
    assert (
        Shards.open(split).hash
        == hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()
    )


@pytest.mark.parametrize(
    "held",
    [
        b"",
        b"{",
        b"\xff\xfe{}",
        b"[" * DEEP,
        b'{"a":' * DEEP,
        b'{"format": NaN}',
        b"\0",
        b"[]",
        b'"x"',
    ],
)
def test_a_manifest_or_journal_of_nonsense_is_one_line(text, split, held):
    (split / MANIFEST).write_bytes(held)
    assert MANIFEST in one_line(lambda: Shards.open(split))
    (split.parent / room.JOURNAL).write_bytes(held)
    said = one_line(lambda: prepare(Request((str(text),), **REQUEST), split.parent, workers=1))
    assert room.JOURNAL in said
    assert "--overwrite" in said


@pytest.mark.parametrize(
    "name",
    ["../train/00000.bin", "/etc/passwd", "a\0b.bin", "0" * 300 + ".bin", "00000.bin\n", ".", ""],
)
def test_a_shard_outside_its_folder_is_refused(split, name):
    tree = json.loads((split / MANIFEST).read_text())
    (split / MANIFEST).write_text(json.dumps(replaced(tree, ("shards", 0, "file"), name)))
    assert "shards[0].file" in one_line(lambda: Shards.open(split))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("vocab", MOST_TOKENS + 1, "vocab: expected int <= "),
        ("vocab", 70_000, "dtype uint16, vocab 70,000"),
        ("end_of_text", 257, "end_of_text 257, vocab 257"),
        ("tokens", 10, "tokens 10, in shards"),
        ("shard_tokens", 39, "other sizes than shard_tokens 39"),
        ("shards", [], "in shards 0"),
        ("shards", None, "shards: expected array, got null"),
        ("tokenizer_hash", "ab", "tokenizer_hash"),
    ],
)
def test_a_manifest_says_what_of_it_cannot_be(split, key, value, words):
    tree = json.loads((split / MANIFEST).read_text())
    (split / MANIFEST).write_text(json.dumps(tree | {key: value}))
    said = one_line(lambda: Shards.open(split))
    assert words in said
    assert str(split / MANIFEST) in said


def test_a_token_beyond_the_vocabulary_is_refused_with_its_place(split):
    path = split / "00001.bin"
    held = np.fromfile(path, "<u2")
    held[[7, 9]] = 257, 60_000
    held.tofile(path)
    shards = Shards.open(split)
    assert shards.read(0, 47).max() < 257
    assert "00001.bin: token 257 at place 7 is beyond the vocabulary of 257" in one_line(
        lambda: shards.read(0, 48)
    )
    assert "token 60,000 at place 9" in one_line(lambda: shards.read(48, 30))


def test_a_shard_that_changes_after_it_was_opened_is_one_line(split):
    shards = Shards.open(split)
    path = split / "00001.bin"
    good = path.read_bytes()
    path.write_bytes(good[:-2])
    assert "39 tokens instead of 40" in one_line(lambda: shards.read(40, 1))
    path.write_bytes(good[:-1])
    assert "00001.bin" in one_line(lambda: shards.read(40, 1))
    path.write_bytes(b"")
    assert "00001.bin" in one_line(lambda: shards.read(40, 1))
    path.unlink()
    assert "00001.bin cannot be read" in one_line(lambda: shards.read(40, 1))
    assert "00001.bin cannot be read" in one_line(shards.verify)
    path.mkdir()
    assert "00001.bin" in one_line(lambda: shards.read(40, 1))
    assert "00001.bin is missing" in one_line(lambda: Shards.open(split))


def tokenizers() -> dict[str, bytes]:
    tree = json.loads(load("bytes").to_str())
    vocab = tree["model"]["vocab"]
    return {
        "nothing": b"",
        "torn": json.dumps(tree)[:1000].encode(),
        "junk": b"\xff\x00" * 100,
        "deep": b"[" * DEEP,
        "no object": b"[]",
        "no model": json.dumps(tree | {"model": None}).encode(),
        "huge id": json.dumps(replaced(tree, ("model", "vocab"), {**vocab, "a": 2**31})).encode(),
        "empty": json.dumps(
            tree | {"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
        ).encode(),
    }


@pytest.mark.parametrize("kind", tokenizers())
def test_a_broken_tokenizer_is_one_line(text, split, kind):
    path = split.parent / "tokenizer.json"
    path.write_bytes(tokenizers()[kind])
    assert "tokenizer.json" in one_line(lambda: Shards.open(split).tokenizer())
    asked = Request((str(text),), str(path))
    assert "tokenizer.json" in one_line(
        lambda: prepare(asked, split.parent.parent / "o", workers=1)
    )


def test_another_tokenizer_is_refused_when_a_preparation_goes_on(text, stopped, tmp_path):
    out = Path(shutil.copytree(stopped, tmp_path / "out"))
    tree = json.loads((out / "tokenizer.json").read_text())
    vocab = tree["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (out / "tokenizer.json").write_text(json.dumps(tree))
    said = one_line(lambda: prepare(Request((str(text),), **REQUEST), out, workers=1))
    assert "is not the tokenizer this preparation began with" in said


def test_a_tokenizer_without_a_spelling_for_a_text_is_one_line(text, tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="none")).save(
        str(tmp_path / "t.json")
    )
    asked = Request((str(text),), str(tmp_path / "t.json"))
    assert "no spelling" in one_line(lambda: prepare(asked, tmp_path / "o", workers=1))


@pytest.mark.parametrize(
    "name", ["bpe:", "bpe:_", "bpe:,", "bpe:-1", "bpe:" + "9" * 5000, "bpe:1e9", "bpe", "", LONG]
)
def test_a_tokenizer_s_name_of_nonsense_is_one_line(text, tmp_path, name, capsys):
    assert main(["prepare", str(text), "--out", str(tmp_path / "o"), "--tokenizer", name]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def parquet_of(values: Any, kind: Any = None) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"text": pyarrow.array(values, kind)}), sink)
    return sink.getvalue().to_pybytes()


BROKEN = {
    "array.jsonl": b"[1]\n",
    "number.jsonl": b"5\n",
    "null.jsonl": b"null\n",
    "missing.jsonl": b'{"body": "x"}\n',
    "empty.jsonl": b"{}\n",
    "other type.jsonl": b'{"text": 5}\n',
    "torn.jsonl": b'{"text": "x',
    "deep.jsonl": b'{"text":' + b"[" * DEEP,
    "digits.jsonl": b'{"text": ' + b"9" * 10_000 + b"}",
    "surrogate.jsonl": b'{"text": "\\ud800"}',
    "junk.jsonl": b"\xff\x00\x01",
    "junk.txt": b"\xff\x00\x01",
    "junk.txt.gz": b"\xff\x00\x01",
    "torn.jsonl.gz": gzip.compress(b'{"text": "a"}\n' * 1000)[:-9],
    "junk.parquet": b"PAR1" + b"\xff" * 100,
    "nothing.parquet": b"",
    "torn.parquet": parquet_of(["a"] * 100)[:-20],
    "middle.parquet": (lambda held: held[:8] + b"\xff" * 40 + held[48:])(
        parquet_of([f"text {n}" for n in range(100)])
    ),
    "numbers.parquet": parquet_of([1, 2]),
    "nulls.parquet": parquet_of([None], pyarrow.string()),
    "bytes.parquet": parquet_of([b"\xff"]),
    "no utf-8.parquet": parquet_of(pyarrow.array([b"\xff\xfe"]).view(pyarrow.string())),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_source_is_one_line_with_its_name(tmp_path, name):
    (tmp_path / name).write_bytes(BROKEN[name])
    asked = Request((str(tmp_path / name),), "bytes")
    assert name in one_line(lambda: prepare(asked, tmp_path / "o", workers=1))


def test_a_document_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST", 1000)
    monkeypatch.setattr(sources, "BLOCK", 100)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a" * 1001))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "b" * 1001}))
    for name, reading in (
        ("a.txt.gz", Reading()),
        ("a.txt.gz", Reading(separator="|")),
        ("b.jsonl", Reading()),
    ):
        (source,) = find_sources([str(tmp_path / name)], reading)
        assert "a document of more than" in one_line(lambda source=source: list(source.documents()))


def test_inputs_that_are_no_files_are_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "plain.txt").write_text("x")
    loop = tmp_path / "loop.txt"
    loop.symlink_to(loop)
    odd = tmp_path / os.fsdecode(b"\xff.txt")
    odd.write_text("x")
    for path in (
        tmp_path / "pipe.txt",
        Path("a\0.txt"),
        tmp_path / LONG,
        tmp_path / "plain.txt" / "x.txt",
        loop,
        odd,
    ):
        assert one_line(lambda path=path: find_sources([str(path)], Reading()))


@pytest.mark.parametrize(
    "words",
    [
        ["--workers", "0"],
        ["--workers", "-1"],
        ["--workers", "1000000"],
        ["--shard-tokens", str(10**30)],
    ],
)
def test_numbers_of_nonsense_are_one_line(text, tmp_path, words, capsys):
    command = ["prepare", str(text), "--out", str(tmp_path / "o"), "--tokenizer", "bytes", *words]
    try:
        code = main(command)
    except SystemExit as stop:  # a number that no option takes ends in the parser
        code = stop.code
    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_that_prepare_advises_trains_with_validation(prepared, tmp_path, capsys):
    """As printed, but for a smaller model and fewer steps."""
    out = tmp_path / "my data"
    assert (
        main(
            [
                "prepare",
                str(prepared.parent / "texts"),
                "--out",
                str(out),
                "--tokenizer",
                "bytes",
                "--valid",
                "0.1",
                "--workers",
                "1",
            ]
        )
        == 0
    )
    command = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("train with: ")[2])
    assert command[:2] == ["amor", "train"]
    small = ["--steps", "1", "--out", str(tmp_path / "run")]
    for key in (
        "context=24",
        "batch=2",
        "micro_batch=2",
        "eval.windows=2",
        "model.changes.width=64",
        "model.changes.d_ff=32",
    ):
        small += ["--set", key]
    assert main([*command[1:], *small]) == 0
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["valid"]["nll"] > 0 for line in lines if "valid" in line] == [True]


def test_advice_fits_the_vocabulary_of_the_data():
    from amor.train.recipe import load as recipe

    for vocab in (257, 4096, 4097, 128_256):
        command = shlex.split(advice("data", vocab))
        changes = [word for before, word in itertools.pairwise(command) if before == "--set"]
        assert recipe(command[2], changes).config().vocab >= vocab


def test_validation_is_found_wherever_it_was_prepared(whole, tmp_path):
    for folder in (whole, whole / "train", str(whole) + "/"):
        train, valid = splits(folder)
        assert (train.folder, valid.folder) == (whole / "train", whole / "valid")
    alone = Path(shutil.copytree(whole / "valid", tmp_path / "alone"))
    assert splits(alone)[1] is None
    copied = Path(shutil.copytree(whole, tmp_path / "copy"))
    (copied / "valid" / MANIFEST).unlink()  # killed between the two manifests
    assert "did not end" in one_line(lambda: splits(copied))
    shutil.rmtree(copied / "valid")
    assert splits(copied)[1] is None


def test_held_out_text_too_short_to_judge_by_is_said(text, tmp_path, capsys):
    (tmp_path / "v.txt").write_text("few")
    (tmp_path / "t.txt").write_text("many words " * 200)
    asked = Request((str(tmp_path / "t.txt"),), "bytes", valid_inputs=(str(tmp_path / "v.txt"),))
    prepare(asked, tmp_path / "data", workers=1)
    assert (
        main(
            [
                "train",
                "tiny/mamba2",
                "--data",
                str(tmp_path / "data"),
                "--out",
                str(tmp_path / "run"),
            ]
        )
        == 2
    )
    assert "eval.every=0" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from laws import SMALL

    from amor.models.build import build
    from amor.models.folder import save
    from amor.presets import preset

    folder = tmp_path_factory.mktemp("model")
    save(
        build(preset("amor-mamba2", "tiny", **SMALL | {"vocab": 257, "pattern": "mamba2, mamba2"})),
        folder,
        load("bytes"),
    )
    return folder


OUT = {
    "prepare": (["TEXT", "--tokenizer", "bytes", "--out"], "folder"),
    "train": (
        [
            "tiny/mamba2",
            "--data",
            "DATA",
            "--set",
            "context=8",
            "--set",
            "model.changes.width=64",
            "--out",
        ],
        "folder",
    ),
    "demo": (["--out"], "folder"),
    "trace --out": (["MODEL", "--text", "a", "--out"], "folder"),
    "trace --html": (["MODEL", "--text", "a", "--html"], "file"),
    "trace --png": (["MODEL", "--text", "a", "--png"], "file"),
    "generate": (["MODEL", "--prompt", "a", "--max-tokens", "2", "--out"], "file"),
    "bench": (["ops", "--out"], "file"),
}


@pytest.mark.parametrize("verb", OUT)
def test_a_place_that_cannot_be_written_is_one_line(verb, model, text, whole, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    words, kind = OUT[verb]
    names = {"TEXT": text, "DATA": whole, "MODEL": model}
    words = [str(names.get(word, word)) for word in words]
    taken = tmp_path / ("file" if kind == "folder" else "folder")
    suffix = ".svg" if kind == "file" else ""
    for out in (
        taken,
        f"/dev/null/x{suffix}",
        tmp_path / "file" / f"x{suffix}",
        tmp_path / (LONG + suffix),
        f"a\0b{suffix}",
    ):
        assert main([verb.split()[0], *words, str(out)]) == 2, out
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
        assert any(
            words in said
            for words in ("cannot be written", "Not a directory", "File name too long", "a NUL")
        ), said
    assert (tmp_path / "file").read_text() == "kept"


def test_a_page_or_figure_that_cannot_be_written_is_one_line(tmp_path):
    from amor.study import page
    from amor.study.figures import canvas

    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder.svg").mkdir()
    for out in (
        tmp_path / "folder.svg",
        tmp_path / "file" / "x.svg",
        tmp_path / f"{LONG}.svg",
        "/dev/null/x.svg",
        "a\0b.svg",
    ):
        assert "cannot be written" in one_line(
            lambda out=out: canvas.write(canvas.figure(1, 1), out)
        )
        assert "cannot be written" in one_line(lambda out=out: page.put(out, "text"))


@pytest.mark.parametrize(
    "held",
    ["{", "5", "null", "[" * DEEP, '{"prompt": 5}', "{}", '"\\ud800"', "9" * 10_000, "", "\udcff"],
)
def test_prompts_of_nonsense_are_one_line(model, tmp_path, held, capsys):
    path = tmp_path / "p.jsonl"
    path.write_bytes(f'"a"\n{held}\n"b"\n'.encode(errors="surrogateescape"))
    assert main(["generate", str(model), "--batch", str(path), "--max-tokens", "1"]) == 2
    said = capsys.readouterr().err
    assert "p.jsonl:2" in said
    assert said.count("\n") == 1


def test_tokens_without_end_are_refused_and_long_texts_take_room_as_they_grow(
    model, monkeypatch, capsys
):
    from amor import generate
    from amor import load as load_model
    from amor.decode import generate as writing

    assert main(["generate", str(model), "--prompt", "a", "--max-tokens", str(10**10)]) == 2
    assert "1 to 1,048,576 tokens" in capsys.readouterr().err
    opened = load_model(model)
    wanted = generate(*opened, "abc", max_tokens=100, temperature=1.0).tokens
    monkeypatch.setattr(writing, "ROOM", 1)
    assert generate(*opened, "abc", max_tokens=100, temperature=1.0).tokens == wanted
    asked = []
    monkeypatch.setattr(
        writing.Engine, "begin", lambda self, ids, room: asked.append(room) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        generate(*opened, "abc", max_tokens=writing.LONGEST)
    assert asked == [1]


def test_so_many_shards_that_they_cannot_all_be_open_are_refused_in_one_line(
    tmp_path, monkeypatch, capsys
):
    """--shard-tokens 1 once wrote a file per token, and none could be read."""
    monkeypatch.setattr("amor.data.writer.MOST_FILES", 5)
    (tmp_path / "book.txt").write_text("abcdefgh")
    words = ["prepare", str(tmp_path / "book.txt"), "--tokenizer", "bytes", "--workers", "1"]
    words += ["--out", str(tmp_path / "out"), "--shard-tokens"]
    assert main([*words, "1"]) == 2
    said = capsys.readouterr().err
    assert "more than 5 shards of 1 tokens" in said and said.count("amor prepare:") == 1
    assert main([*words, "2", "--overwrite"]) == 0
