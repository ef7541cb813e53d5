"""Preparing data: the result depends on text and request alone, not on workers or kills."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from amor import typed
from amor.cli import main
from amor.data import prepare as room
from amor.data import writer
from amor.data.prepare import Preparation, Request, prepare
from amor.data.shards import MANIFEST, Manifest, Shards
from amor.data.sources import Reading
from amor.data.stats import unigram_entropy
from amor.data.tokenizer import END_OF_TEXT
from amor.errors import AmorError

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "it",
    "was",
    "for",
    "on",
    "that",
    "by",
    "this",
    "with",
    "you",
    "not",
    "new",
    "an",
]


def texts(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    made = [" ".join(chance.choices(WORDS, k=chance.randint(1, 400))) + ".\n" for _ in range(count)]
    made[1] = " ".join(chance.choices(WORDS, k=4000))  # longer than a piece in these tests
    made[2] = "  \n"
    made[3] = f"not an end: {END_OF_TEXT} été 漢字"
    return made


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for name, part in (("a", texts(60)), ("b", texts(40, 1))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in part))
    return folder


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(room, "PIECE", 1000)
    monkeypatch.setattr(room, "PARCEL", 3000)


def request_for(corpus: Path, **changes: object) -> Request:
    return Request(
        **{
            "inputs": (str(corpus),),
            "tokenizer": "bpe:300",
            "valid": 0.2,
            "shard_tokens": 1000,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    prepare(request_for(corpus), out, workers=1)
    return out


def held(folder: Path) -> dict[str, bytes]:
    """Every file that is a result: all but the lock and the journal."""
    files = (
        p
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in (room.LOCK, room.JOURNAL)
    )
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_shards_hold_every_document_and_an_end_after_each(corpus, whole):
    splits = {name: Shards.open(whole / name) for name in ("train", "valid")}
    found = []
    for shards in splits.values():
        shards.verify()
        tokenizer = shards.tokenizer()
        stream = shards.read(0, shards.tokens)
        ends = np.flatnonzero(stream == shards.end_of_text)
        assert stream[-1] == shards.end_of_text and len(ends) == shards.manifest.documents
        found += [
            tokenizer.decode(part[:-1].tolist(), skip_special_tokens=False)
            for part in np.split(stream, ends + 1)[:-1]
        ]
        assert sum(s.documents for s in shards.manifest.sources) == shards.manifest.documents
        assert {s.tokens for s in shards.manifest.shards[:-1]} == {1000}
    wanted = [t for t in texts(60) + texts(40, 1) if t.strip()]
    assert sorted(found) == sorted(wanted)
    assert sum(s.manifest.text_bytes for s in splits.values()) == sum(
        len(t.encode()) for t in wanted
    )


def test_the_result_does_not_depend_on_the_number_of_workers(corpus, whole, tmp_path):
    prepare(request_for(corpus), tmp_path, workers=3)
    assert held(tmp_path) == held(whole)


def test_a_finished_folder_is_opened_and_not_written_again(corpus, whole):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*.bin")}
    prepare(request_for(corpus), whole, workers=1)
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*.bin")} == before


class KilledError(Exception):
    pass


@pytest.mark.parametrize("moment", range(12))
def test_stopped_anywhere_and_continued_equals_never_stopped(
    corpus, whole, tmp_path, monkeypatch, moment
):
    """Stops at writes whose first bytes are on the disk but in no journal."""
    chance = random.Random(moment)
    append = writer.ShardWriter.append

    def torn(self, tokens):
        if chance.random() < 0.02:
            append(self, tokens[: len(tokens) // 2])
            self.close()
            raise KilledError
        append(self, tokens)

    monkeypatch.setattr(writer.ShardWriter, "append", torn)
    stops = 0
    while True:
        try:
            Preparation(
                request_for(corpus), tmp_path, workers=1, save_every=chance.choice([0.0, 0.005])
            ).run()
            break
        except KilledError:
            stops += 1
            assert stops < 200
            assert not list(tmp_path.rglob(MANIFEST))
    assert held(tmp_path) == held(whole) and stops > 0


SCRIPT = """
import os, signal, sys
from amor.data import prepare as room
from amor.data import writer

room.PIECE, room.PARCEL = 1000, 3000
source, out, workers, left = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
fsync = os.fsync

def last_words(file):  # a shard, journal, tokenizer or manifest that is half on the disk
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(file)

if __name__ == "__main__":
    os.fsync = last_words
    request = room.Request(inputs=(source,), tokenizer="bpe:300", valid=0.2, shard_tokens=1000)
    room.Preparation(request, out, workers=workers, save_every=0.0).run()
    print(left)
"""


def test_killed_for_real_and_continued_equals_never_killed(corpus, whole, tmp_path):
    script, out = tmp_path / "run.py", tmp_path / "out"
    script.write_text(SCRIPT)
    for workers, moment in ((1, 1), (2, 30), (1, 33), (1, 100)):
        child = subprocess.Popen(
            [sys.executable, script, corpus, out, str(workers), str(moment)], start_new_session=True
        )
        assert child.wait() == -signal.SIGKILL, "the kill came too late to show anything"
        assert not (out / "train" / MANIFEST).exists()
        patience = time.monotonic() + 30
        while (
            alive(child.pid) and time.monotonic() < patience
        ):  # the workers of a killed parent leave too
            time.sleep(0.01)
        assert not alive(child.pid)
    subprocess.run([sys.executable, script, corpus, out, "2", "0"], check=True)
    assert held(out) == held(whole)


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_document_and_its_copy_stand_on_one_side(tmp_path):
    (tmp_path / "a.txt").write_text("|".join([f"text {n % 50}" for n in range(200)]))
    splits = prepare(
        Request((str(tmp_path / "a.txt"),), "bytes", valid=0.3, reading=Reading(separator="|")),
        tmp_path / "o",
        workers=1,
    )
    seen = {name: set(bytes_of(shards)) for name, shards in splits.items()}
    assert not seen["train"] & seen["valid"] and len(seen["train"] | seen["valid"]) == 50
    assert 5 <= len(seen["valid"]) <= 25


def bytes_of(shards: Shards) -> list[bytes]:
    stream = shards.read(0, shards.tokens)
    return [
        bytes(p[:-1].tolist()) for p in np.split(stream, np.flatnonzero(stream == 256) + 1)[:-1]
    ]


def test_a_large_vocabulary_gets_wider_numbers(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    big = Tokenizer(models.WordLevel({"a": 0, "b": 70_000, "</s>": 1}, unk_token="a"))
    big.pre_tokenizer = pre_tokenizers.Whitespace()
    big.save(str(tmp_path / "big.json"))
    (tmp_path / "a.txt").write_text("a b a b")
    shards = prepare(
        Request((str(tmp_path / "a.txt"),), str(tmp_path / "big.json")), tmp_path / "o", workers=1
    )["train"]
    assert shards.manifest.dtype == "uint32" and shards.read(0, 5).tolist() == [
        0,
        70_000,
        0,
        70_000,
        1,
    ]


def test_reading_crosses_shards_and_stops_at_the_end(whole):
    shards = Shards.open(whole / "train")
    stream = np.concatenate([np.fromfile(path, "<u2") for path, _ in shards.files()])
    for start, count in ((0, 1), (999, 2), (500, 2600), (0, shards.tokens), (shards.tokens, 0)):
        assert np.array_equal(shards.read(start, count), stream[start : start + count])
    with pytest.raises(IndexError):
        shards.read(shards.tokens - 1, 2)
    assert np.array_equal(np.concatenate(list(shards.pieces(777))), stream)


def test_other_settings_do_not_continue_a_folder(corpus, whole):
    with pytest.raises(AmorError, match=r"shard_tokens 1000 there, 999 now.*--overwrite"):
        prepare(request_for(corpus, shard_tokens=999), whole, workers=1)
    with pytest.raises(AmorError, match="tokenizer"):
        prepare(request_for(corpus, tokenizer="bytes"), whole, workers=1)


def test_a_first_attempt_that_wrote_nothing_is_in_nobodys_way(corpus, tmp_path):
    with pytest.raises(AmorError, match="no field 'body'"):
        prepare(
            Request((str(corpus),), "bytes", reading=Reading(field="body")), tmp_path, workers=1
        )
    assert (
        prepare(Request((str(corpus),), "bytes"), tmp_path, workers=1)["train"].manifest.documents
        == 98
    )


def test_a_source_changed_on_the_way_is_noticed(corpus, tmp_path):
    (tmp_path / "a.txt").write_text("before")
    prepare(Request((str(tmp_path / "a.txt"),), "bytes"), tmp_path / "o", workers=1)
    (tmp_path / "a.txt").write_text("after it")
    with pytest.raises(AmorError, match="sources"):
        prepare(Request((str(tmp_path / "a.txt"),), "bytes"), tmp_path / "o", workers=1)
    again = Preparation(
        Request((str(tmp_path / "a.txt"),), "bytes"), tmp_path / "o", workers=1
    ).run(overwrite=True)["train"]
    assert bytes_of(again) == [b"after it"]


def test_nothing_to_write_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(AmorError, match=r"no document with text for train in .*a\.txt"):
        prepare(Request((str(tmp_path / "a.txt"),), "bytes"), tmp_path / "o", workers=1)
    (tmp_path / "b.txt").write_text("one book")
    with pytest.raises(AmorError, match="none of the 1 documents fell into valid"):
        prepare(
            Request((str(tmp_path / "b.txt"),), "bytes", valid=0.0001), tmp_path / "p", workers=1
        )


@pytest.mark.parametrize("workers", [1, 2])
def test_the_end_of_a_single_text_is_held_out(tmp_path, capsys, workers):
    text = "".join(f"line {n} of the play\n" for n in range(1000))
    (tmp_path / "play.txt").write_text(text)
    words = ["--tokenizer", "bytes", "--valid", "0.05", "--workers", str(workers)]
    out = tmp_path / "data"
    assert main(["prepare", str(tmp_path / "play.txt"), "--out", str(out), *words]) == 0
    assert "its last 0.05 is held out" in capsys.readouterr().out
    (train,), (valid,) = (bytes_of(Shards.open(out / split)) for split in ("train", "valid"))
    assert train + valid == text.encode() and 0.05 <= len(valid) / len(text) < 0.052
    assert valid.startswith(b"line ")


def test_a_single_text_killed_between_its_two_parts_goes_on_with_the_second(tmp_path):
    (tmp_path / "play.txt").write_text("a line\n" * 100)
    request = Request((str(tmp_path / "play.txt"),), "bytes", valid=0.1)
    preparation = Preparation(request, tmp_path / "data", workers=1)
    whole = list(preparation._documents(room.Place(0, 0)))
    assert [document.split for document in whole] == ["train", "valid"]
    assert list(preparation._documents(room.Place(0, 1))) == whole[1:]


def test_a_share_that_no_document_falls_into_is_refused_before_any_is_encoded(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(room, "encoded", None)
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text(f"one book, number {n}")
    words = ["--out", str(tmp_path / "data"), "--tokenizer", "bytes", "--valid", "0.0001"]
    assert main(["prepare", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert "none of the 3 documents" in error and r"--separator '\n\n'" in error


def test_files_of_another_kind_in_a_folder_are_counted(tmp_path, capsys):
    for name in ("a.txt", "notes.md", "more.md", "LICENSE"):
        (tmp_path / name).write_text("some words")
    words = ["--out", str(tmp_path / "data"), "--tokenizer", "bytes"]
    assert main(["prepare", str(tmp_path), *words]) == 0
    assert "3 files of another kind left out (.md, LICENSE)" in capsys.readouterr().out


def test_two_preparations_do_not_write_one_folder(corpus, tmp_path):
    with (
        room.locked(tmp_path, room.LOCK, "amor prepare"),
        pytest.raises(AmorError, match="another `amor prepare`"),
    ):
        prepare(request_for(corpus), tmp_path, workers=1)


def test_a_folder_of_someone_else_is_left_alone(corpus, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine").write_text("keep")
    with pytest.raises(AmorError, match="choose another --out"):
        prepare(request_for(corpus), tmp_path, workers=1)
    assert (tmp_path / "train" / "mine").read_text() == "keep"


def test_a_full_disk_is_said_and_the_work_goes_on_after_it(corpus, whole, tmp_path, monkeypatch):
    sync = writer.ShardWriter.sync

    def full(self):
        with writer.disk(self.folder):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.ShardWriter, "sync", full)
    with pytest.raises(AmorError, match=r"No space left.*run the same command again"):
        prepare(request_for(corpus), tmp_path, workers=1)
    monkeypatch.setattr(writer.ShardWriter, "sync", sync)
    prepare(request_for(corpus), tmp_path, workers=1)
    assert held(tmp_path) == held(whole)


def damaged(whole: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(whole, tmp_path / "copy")) / "train"


def test_a_cut_a_missing_and_a_corrupt_shard_are_found(whole, tmp_path):
    train = damaged(whole, tmp_path)
    shard = train / "00001.bin"
    good = shard.read_bytes()
    shard.write_bytes(good[:-1])
    with pytest.raises(AmorError, match=r"00001.bin has 1,999 bytes instead of 2,000"):
        Shards.open(train)
    shard.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    with pytest.raises(AmorError, match=r"00001.bin is corrupt"):
        Shards.open(train).verify()
    shard.unlink()
    with pytest.raises(AmorError, match=r"00001.bin is missing"):
        Shards.open(train)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 5}, "contradicts itself"),
        ({"dtype": "uint32"}, "contradicts itself"),
        ({"format": 99}, "of version 99; this amor reads version 1"),
        ({"extra": 1}, "no key 'extra'"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused(whole, tmp_path, change, words):
    train = damaged(whole, tmp_path)
    (train / MANIFEST).write_text(
        json.dumps({**json.loads((train / MANIFEST).read_text()), **change})
    )
    with pytest.raises(AmorError, match=words):
        Shards.open(train)


def test_a_wrong_folder_is_answered_with_the_right_one(whole, tmp_path):
    with pytest.raises(AmorError, match=r"give .*train"):
        Shards.open(whole)
    with pytest.raises(AmorError, match="amor prepare"):
        Shards.open(tmp_path)
    train = damaged(whole, tmp_path)
    (train / MANIFEST).write_text("{")
    with pytest.raises(AmorError, match="not JSON"):
        Shards.open(train)
    (train / MANIFEST).unlink()
    with pytest.raises(AmorError, match="did not end; run the same"):
        Shards.open(train)


def test_a_wrong_tokenizer_or_vocabulary_is_refused(whole, tmp_path):
    train = damaged(whole, tmp_path)
    shards = Shards.open(train)
    shards.check(vocab=300, tokenizer_hash=shards.tokenizer_hash)
    with pytest.raises(AmorError, match="vocabulary of 299"):
        shards.check(vocab=299)
    prepare(Request((str(damaged_text(tmp_path)),), "bytes"), tmp_path / "bytes", workers=1)
    (train.parent / "tokenizer.json").write_bytes(
        (tmp_path / "bytes" / "tokenizer.json").read_bytes()
    )
    with pytest.raises(AmorError, match="was prepared with tokenizer"):
        shards.tokenizer()
    (train.parent / "tokenizer.json").unlink()
    with pytest.raises(AmorError, match=r"no tokenizer.json"):
        shards.tokenizer()


def damaged_text(folder: Path) -> Path:
    (folder / "x.txt").write_text("x")
    return folder / "x.txt"


def test_a_manifest_survives_writing_and_reading(whole):
    manifest = Manifest.load(whole / "train")
    assert typed.text(manifest) == (whole / "train" / MANIFEST).read_text()


def test_the_unigram_baseline_is_the_cross_entropy_of_frequencies(tmp_path):
    (tmp_path / "t.txt").write_text("aab")
    (tmp_path / "v.txt").write_text("ab")
    request = Request((str(tmp_path / "t.txt"),), "bytes", valid_inputs=(str(tmp_path / "v.txt"),))
    splits = prepare(request, tmp_path / "o", workers=1)
    share = {"a": 3 / 261, "b": 2 / 261, "end": 2 / 261}  # 4 tokens seen, one more for each of 257
    wanted = -sum(np.log(p) for p in share.values()) / 3
    assert unigram_entropy(splits["train"], splits["valid"]) == pytest.approx(wanted, rel=1e-12)


def test_the_command_prepares_and_says_what_it_found(corpus, whole, tmp_path, capsys):
    words = [
        str(corpus),
        "--out",
        str(tmp_path),
        "--tokenizer",
        "bpe:300",
        "--valid",
        "0.2",
        "--shard-tokens",
        "1000",
        "--workers",
        "1",
    ]
    assert main(["prepare", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["train"]["tokens"] == Shards.open(whole / "train").tokens
    assert found["unigram_entropy"] > 1 and held(tmp_path) == held(whole)
    assert (
        main(
            [
                "prepare",
                str(tmp_path / "absent"),
                "--out",
                str(tmp_path / "o"),
                "--tokenizer",
                "bytes",
            ]
        )
        == 2
    )
    assert "no file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"valid": 1.5}, "not in"),
        ({"valid_inputs": ("a",)}, "give one"),
        ({"shard_tokens": 0}, "1"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(corpus, wrong, words):
    with pytest.raises(AmorError, match=words):
        request_for(corpus, **wrong)


def test_a_file_is_not_both_for_training_and_validation(corpus, tmp_path):
    name = str(corpus / "a.jsonl")
    with pytest.raises(AmorError, match="for training and for validation"):
        prepare(Request((name,), "bytes", valid_inputs=(name,)), tmp_path, workers=1)
