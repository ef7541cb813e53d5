"""Wrong command lines, verb by verb: each gets one line, and nothing is trained or measured."""

import io
import sys

import pytest
from laws import small

from amor.cli import main
from amor.data.tokenizer import bytes_tokenizer
from amor.models.folder import save

LONG = "x" * 300  # longer than any file system takes
NUL = "a\0b"

# (the command, what the answer names); `model` has gates, `plain` has none, `mute` has no tokenizer
WRONG = [
    (["info", ""], "which model"),
    (["info", LONG], "... (300 characters): File name too long"),
    (["info", NUL], "NUL"),
    (["info", "folder"], "holds no config.json"),
    (["info", "file.txt"], "holds no config.json"),
    (["info", "model", "--fire-rate", "nan"], "between 0 and 1"),
    (["info", "model", "--context", "x"], "--context"),
    (["info", "model", "--scale", "180m"], "--scale 180m is for a preset"),
    (["info", "mamba2", "--scale", ""], "no scale ''"),
    (["info", "mamba2", "--set", "="], "key=value"),
    (["info", "mamba2", "--set", "scale=tiny"], "no key 'scale'"),
    (["check", "plain", "--rows", "0"], "1 row"),
    (["check", "plain", "--seed", "9" * 20], "--seed"),
    (["check", "plain", "--scale", "tiny"], "--scale tiny is for a preset"),
    (["check", LONG], "File name too long"),
    (["check", "model", "--set", "vocab=3"], "--set changes a preset"),
    (["doctor", "--quick", "--measure", ""], "no scale ''"),
    (["doctor", "extra"], "extra"),
    (["demo", "--steps", "0"], "steps"),
    (["demo", "--steps", "1", "--minutes", "1"], "not allowed with"),
    (["demo", "--minutes", "inf"], "--minutes inf"),
    (["demo", "--model", "mamba3"], "mamba3"),
    (["demo", "--model", ""], "no model ''"),
    (["prepare", LONG, "--out", "new", "--tokenizer", "bytes"], LONG),
    (["prepare", "file.txt", "--out", "new"], "--tokenizer"),
    (
        ["prepare", "file.txt", "--out", "new", "--tokenizer", "bytes", "--separator", "\udcff"],
        "the separator is not UTF-8",
    ),
    (["bench", "ops", "--quick", "--out", "\ud800"], "surrogate"),
    (["prepare", "file.txt", "--out", "new", "--tokenizer", "bpe:x"], "bpe:x"),
    (["prepare", "file.txt", "--out", "new", "--tokenizer", "bytes", "--valid", "2"], "2"),
    (["prepare", "file.txt", "--out", "new", "--tokenizer", "bytes", "--workers", "0"], "workers"),
    (
        ["prepare", "file.txt", "--out", "new", "--tokenizer", "bytes", "--errors", "ignore"],
        "strict",
    ),
    (["prepare", "file.txt", "--out", "new", "--tokenizer=--"], "--tokenizer: '--' is no value"),
    (["generate", "model", "--prompt", "a", "--batch=--"], "--batch: '--' is no value"),
    (["info", "mamba2", "--set=--"], "--set: '--' is no value"),
    (["info", "mamba2", "--set=vocab=300", "--set=--"], "--set: '--' is no value"),
    (["check", "plain", "--length=" + "9" * 20], "too large"),
    (["demo", "--steps", "9" * 5000], "too large"),
    (["generate", "model", "--prompt", "a", "--seed=-" + "9" * 20], "too large"),
    (["generate", "model", "--prompt", "a", "--stop-id", "x"], "invalid int value: 'x'"),
    (["generate", "model", "--prompt", "a", "--stop-id", "-1"], "an id is 0 to 256"),
    (["train", ""], "no recipe ''"),
    (["train", LONG], "no recipe"),
    (["train", "folder"], "no recipe 'folder'"),
    (["train", "tiny/mamba2", "--steps", "-4", "--data", "folder"], "steps"),
    (["train", "tiny/mamba2", "--dry-run", "--flops", "0"], "--flops 0"),
    (["train", "tiny/mamba2", "--dry-run", "--flops", "nan"], "--flops nan"),
    (["train", "tiny/mamba2", "--data", "folder", "--flops", "1e12"], "with --dry-run"),
    (["train", "tiny/mamba2", "--set", "x"], "key=value"),
    (["train", "tiny/mamba2", "--resume", "perhaps"], "perhaps"),
    (["train", "tiny/mamba2", "--dry-run", "--track", "nosuch"], "no tracker 'nosuch'"),
    (["train", "tiny/mamba2", "--data", "folder", "--set", "device=meta"], "no 'meta'"),
    (["convert", "plain"], "--out"),
    (["convert", "plain", "--out", "new", "--to", "lama"], "did you mean 'llama'"),
    (["convert", "plain", "--out", "new", "--vocab", "1"], "give 2 to"),
    (["convert", "nowhere", "--out", "new"], "nowhere: no such folder"),
    (["convert", "folder", "--out", "new"], "config.json: no such file"),
    (["convert", "file.txt", "--out", "new"], "file.txt: no such folder"),
    (["convert", "plain", "--out", "model"], "holds something already"),
    (["convert", "plain", "--out", "file.txt"], "holds something already"),
    (["convert", "plain", "--out", LONG], "File name too long"),
    (["convert", LONG, "--out", "new"], "File name too long"),
    (["convert", "model", "--out", "new", "--to", "llama"], "use --to hf"),
    (["attach", "plain"], "--out"),
    (["attach", "plain", "--out", "new"], "give --text FILE"),
    (
        ["attach", "plain", "--out", "new", "--text", "nowhere.txt", "--head-size", "16"],
        "nowhere.txt: no such file",
    ),
    (
        ["attach", "plain", "--out", "new", "--text", "empty", "--head-size", "16"],
        "less than two windows",
    ),
    (["attach", "plain", "--out", "new", "--text", "file.txt"], "less than two windows"),
    (
        ["attach", "plain", "--out", "new", "--text", "file.txt", "--head-size", "7"],
        "does not divide 64",
    ),
    (["attach", "plain", "--out", "new", "--text", "file.txt", "--blocks", "0"], "--blocks 0"),
    (
        ["attach", "plain", "--out", "new", "--text", "file.txt", "--gate", "entropi"],
        "did you mean 'entropy'",
    ),
    (
        ["attach", "plain", "--out", "new", "--text", "file.txt", "--fire-rate", "2"],
        "--fire-rate 2",
    ),
    (
        ["attach", "plain", "--out", "new", "--text", "file.txt", "--fire-rate", "nan"],
        "--fire-rate nan",
    ),
    (
        [
            "attach",
            "plain",
            "--out",
            "new",
            "--text",
            "file.txt",
            "--gate",
            "never",
            "--fire-rate",
            "0.1",
        ],
        "no target firing rate",
    ),
    (["attach", "plain", "--out", "new", "--text", "file.txt", "--probe", "last"], "--probe"),
    (
        ["attach", "plain", "--out", "new", "--text", "file.txt", "--train-steps", "3"],
        "needs --data",
    ),
    (
        ["attach", "plain", "--out", "new", "--text", "file.txt", "--train-steps", "-3"],
        "--train-steps -3",
    ),
    (["attach", "plain", "--out", "new", "--data", "folder"], "manifest.json"),
    (["attach", "plain", "--out", "model", "--text", "file.txt"], "holds something already"),
    (["attach", "model", "--out", "new", "--text", "file.txt"], "gated blocks already"),
    (["attach", "folder", "--out", "new", "--text", "file.txt"], "config.json: no such file"),
    (["attach", "plain", "--out", "new", "--text", "file.txt", "--recipe", "nosuch"], "no recipe"),
    (["attach", "plain", "--out", "new", "--text", "file.txt", "--set", "x"], "key=value"),
    (["attach", LONG, "--out", "new", "--text", "file.txt"], "File name too long"),
    (["study", ""], "no study ''"),
    (["study", LONG], "no study"),
    (["study", "smok"], "did you mean 'smoke'"),
    (["study", "smoke"], "give --data FOLDER"),
    (["study", "smoke", "--data", "folder"], "manifest.json"),
    (["study", "smoke", "--jobs", "0"], "--jobs 0"),
    (["study", "smoke", "--seeds", "1;2"], "--seeds 1;2"),
    (["study", "smoke", "--set", "x"], "key=value"),
    (["study", "file.txt"], "file.txt: not TOML"),
    (["generate", "mute", "--tokenizer", "bpe:300", "--prompt", "a"], "trained on text"),
    (["bench", "decode", "--quick", "--text", "file.txt"], "with --model"),
    (["table", LONG], "File name too long"),
    (["table", "nowhere"], "nowhere: no such folder"),
    (["table", "folder"], "no evaluation in it"),
    (["table", "folder", "--suite", "nihil"], "no suite 'nihil'"),
    (["table", "folder", "--suite", "niah"], "no niah.json"),
    (["table", "folder", "folder"], "the same folder twice"),
    (["table", "folder", "--scale", "3B"], "3B"),
    (["table", "folder", "--suite", "niah", "--figure", "nosuch:a.svg"], "no figure 'nosuch'"),
    (
        ["table", "folder", "--suite", "niah", "--figure", "firing:a.svg"],
        "firing is drawn of length-extrapolation",
    ),
    (["table", "folder", "--suite", "niah", "--figure", "a.bmp"], "a figure is one of"),
    (
        ["table", "folder", "--suite", "perplexity", "--figure", "a.svg"],
        "no figure is drawn of perplexity",
    ),
    (["compare", "folder", NUL], "NUL"),
    (["table", "a\ud800"], "half of a character"),
    (["compare", "folder", "list.json"], "two folders or two files"),
    (["compare", "list.json", "list.json"], "list.json: expected object"),
    (["compare", "folder", "folder", "--suite", "length-extrapolation"], "amor table"),
    (["report", LONG], "File name too long"),
    (["report", "folder"], "not a run directory"),
    (["report", "nowhere.json"], "nowhere.json"),
    (["report", "list.json"], "list.json: expected object"),
    (["report", "list.json", "folder"], "by itself"),
    (["generate"], "which model"),
    (["generate", LONG, "--prompt", "a"], "File name too long"),
    (["generate", "file.txt", "--prompt", "a"], "no model folder"),
    (["generate", "model", "--prompt", "a", "--max-tokens", "0"], "max_tokens 0"),
    (["generate", "model", "--prompt", "a", "--temperature", "nan"], "temperature"),
    (["generate", "model", "--prompt", "a", "--top-k", "-1"], "top_k"),
    (["generate", "model", "--prompt", "a", "--rows", "0"], "rows 0"),
    (["generate", "model", "--prompt", "a", "--fire-rate", "2"], "between 0 and 1"),
    (["generate", "model", "--prompt", "a", "--gate", ""], "--gate"),
    (["generate", "model", "--prompt", "a", "--gate", "random:2"], "rate"),
    (["generate", "plain", "--prompt", "a", "--gate", "always"], "no gated blocks"),
    (["generate", "model", "--prompt", "a", "--weights", "int3"], "int3"),
    (["generate", "model", "--prompt", "a", "--batch", "file.txt"], "both given"),
    (["generate", "model", "--batch", "empty"], "is empty"),
    (["generate", "model", "--batch", LONG], "File name too long"),
    (["generate", "mute", "--prompt", "a"], "--tokenizer"),
    (["trace", "no/such/model", "--text", "a"], "no model folder"),
    (["trace", "model"], "nothing to trace"),
    (["trace", "model", "--text", "a", "--limit", "0"], "--limit 0"),
    (["trace", "model", "--file", "folder"], "folder"),
    (["trace", "model", "--file", NUL], "NUL"),
    (["trace", "model", "--preset", "papr"], "did you mean 'paper'"),
    (["trace", "model", "--value"], "needs held-out text"),
    (["trace", "model", "--value", "--data", ""], "manifest.json"),
    (["trace", "model", "--value", "--file", "file.txt", "--context", "0"], "context 0"),
    (["trace", "model", "--value", "--file", "file.txt", "--windows", "-1"], "windows -1"),
    (["trace", "plain", "--value", "--file", "file.txt", "--context", "8"], "no gated blocks"),
    (["bench", "nosuch"], "nosuch"),
    (["bench", "ops", "--rouns", "3"], "did you mean '--rounds'"),
    (["bench", "ops", "--rounds", "x"], "--rounds"),
    (["bench", "ops", "--out", "folder"], "folder cannot be written"),
    (["bench", "decode", "--scale", "2b"], "2b"),
    (["bench", "decode", "--quick", "--models", "nosuch"], "nosuch"),
    (["bench", "decode", "--quick", "--parts", ""], "--parts"),
    (["bench", "decode", "--model", "model"], "--text FILE"),
    (["bench", "decode", "--model", "model", "--text", "nowhere.txt"], "nowhere.txt"),
    (["bench", "batch", "--quick", "--models", "nosuch"], "nosuch"),
    (["bench", "batch", "--quick", "--models", "mamba2", "--batches", "0"], "--batches 0"),
    ([NUL], "NUL"),
    ([LONG], "no verb"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, texts and things that are neither."""
    folder = tmp_path_factory.mktemp("lines")
    save(small("amor-mamba2", vocab=257), folder / "model", bytes_tokenizer())
    save(small("mamba2", vocab=257), folder / "plain", bytes_tokenizer())
    save(small("amor-mamba2", vocab=257), folder / "mute")
    (folder / "folder").mkdir()
    (folder / "file.txt").write_text("some words. " * 40)
    (folder / "empty").write_text("")
    (folder / "list.json").write_text("[]")
    return folder


@pytest.mark.parametrize(
    ("words", "named"), WRONG, ids=[" ".join(words)[:60].replace("\0", "NUL") for words, _ in WRONG]
)
def test_a_wrong_command_line_is_answered_in_one_line(words, named, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    before = sorted(folder.rglob("*"))
    try:
        code = main(words)
    except SystemExit as left:  # argparse
        code = left.code
    said = capsys.readouterr().err
    assert code == 2
    assert said.count("\n") == 1 and said.startswith("amor") and named in said and len(said) < 1500
    assert sorted(folder.rglob("*")) == before, "a wrong command leaves nothing behind"


def test_bytes_that_are_no_text_become_a_mark(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    save(small("amor-mamba2", vocab=257), tmp_path, bytes_tokenizer())
    for words in (
        ["generate", "--prompt", "a\ud800\udc80", "--max-tokens", "2"],
        ["trace", "--text", "a\ud800b"],
    ):
        assert main([words[0], str(tmp_path), *words[1:]]) == 0, capsys.readouterr().err
