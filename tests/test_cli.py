"""The command line: what each verb finds, and what it says to a wrong input."""

import json
from functools import cache

import pytest
import torch
from laws import small
from rich.console import Console

import amor
from amor.cli import main, verbs
from amor.cli.doctor import POSSIBLE, OperatorBackend, draw_operators
from amor.data.tokenizer import bytes_tokenizer
from amor.models.folder import save
from amor.ops import chunks
from amor.presets import NAMES
from amor.run import Run


def last_json(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_help_is_a_table_of_contents(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    for verb, words in verbs().items():
        assert verb in out and words and words in out


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_explains_itself_and_takes_json(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_answers_a_wrong_option_in_one_line(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--jsn"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error


WRONG = [
    ["inof"],
    ["info"],
    ["info", "amor-mamba"],
    ["info", "--model", "mamba2", "--scale", "2b"],
    ["info", "mamba2", "--set", "vocab"],
    ["info", "mamba2", "--set", "vocab=1"],
    ["info", "mamba2", "--model", "mamba2"],
    ["info", "mamba2", "--context", "-1"],
    ["info", "amor-mamba2", "--fire-rate", "2"],
    ["check", "no/such/folder"],
    ["check", "mamba2", "--length", "2"],
    ["bench", "ops", "--rounds", "0"],
    ["bench", "train", "--only", "nosuch"],
    ["bench", "decode", "--quick", "--contexts", "-5"],
    ["bench", "decode", "--quick", "--fire-rates", "2"],
    ["report", "one", "two", "--quick"],
    ["demo", "--minutes", "0"],
    ["generate", "no/such/folder", "--prompt", "x"],
    ["trace", "amor-mamba2", "--text", "x"],
    ["report", "no/such/run"],
    ["train", "no-such-recipe"],
    ["prepare", "no/such/text", "--out", "no/such/out", "--tokenizer", "bytes"],
]


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_wrong_input_is_one_line_that_says_what_to_do(words, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err
    assert captured.err.startswith("amor")


@pytest.mark.parametrize("name", NAMES)
def test_info_counts_without_building(name, capsys):
    assert main(["info", "--model", name, "--scale", "1.5b", "--json"]) == 0
    found = last_json(capsys)
    whole = sum(
        p.numel() for p in amor.build(amor.preset(name, "1.5b"), device="meta").parameters()
    )
    assert found["parameters"] == whole == sum(found["parts"].values())


def test_doctor_says_which_backend_runs_and_why(capsys, monkeypatch):
    assert main(["doctor", "--quick", "--json"]) == 0
    found = last_json(capsys)
    assert {row["operator"] for row in found["operators"]} >= {"scan", "delta", "conv", "head"}
    monkeypatch.setenv("AMOR_KERNELS", "scan=reference")
    main(["doctor", "--quick", "--json"])
    rows = {row["operator"]: row for row in last_json(capsys)["operators"]}
    assert rows["scan"]["backend"] == "reference" and "AMOR_KERNELS" in rows["scan"]["why"]
    step = rows["decode step"]
    assert step["backend"] == "the model's forward" and "scan=reference" in step["why"]
    monkeypatch.setenv("AMOR_KERNELS", "reference")
    main(["doctor", "--quick", "--json"])
    rows = last_json(capsys)["operators"]
    assert {row["backend"] for row in rows} == {"reference", "the model's forward"}
    monkeypatch.setenv("AMOR_KERNELS", "scan=fast")
    assert main(["doctor", "--quick"]) == 2


def test_doctor_has_a_line_per_operator_and_each_reason_once_at_80_columns(capsys):
    rows = [
        OperatorBackend("scan", "cpu", "chunked", "", {"native": "no compiler", "fla": "no GPU"}),
        OperatorBackend("conv", "cpu", "reference", "", {"native": "no compiler"}),
        OperatorBackend("head", "cpu", "chunked", "", {"reference": POSSIBLE}),
    ]
    draw_operators(Console(width=80), rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    starts = [line.split()[0] for line in lines]
    assert all(starts.count(name) == 1 for name in ("scan", "conv", "head"))
    assert sum("no compiler" in line for line in lines) == 1
    assert any(line.split() == ["native", "no", "compiler"] for line in lines)


def test_doctor_names_the_code_of_a_decode_step(capsys):
    assert main(["doctor", "--quick", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["operators"]
    assert [row["backend"] for row in rows if row["operator"] == "decode step"] in (
        ["compiled"],
        ["the model's forward"],
    )


def test_doctor_measures_chunks_and_keeps_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(chunks, "path", lambda: tmp_path / "new" / "chunks.json")
    monkeypatch.setattr("amor.bench.chunks.TOKENS", 40)
    monkeypatch.delenv("AMOR_CHUNK", raising=False)
    monkeypatch.setattr(chunks, "stored", cache(chunks.stored.__wrapped__))
    chunks.keep("scan", "native", (1, 2, 3), 16)
    assert main(["doctor", "--quick", "--measure", "tiny", "--json"]) == 0
    out = capsys.readouterr().out
    rows = {row["operator"]: row for row in json.loads(out.splitlines()[-1])["chunks"]}
    assert str(tmp_path) in out
    assert rows["scan"]["shape"] == [8, 64, 128] and rows["delta"]["shape"] == [3, 64, 128]
    for op, row in rows.items():
        fastest = min(row["seconds"], key=row["seconds"].get)
        assert (
            row["chunk"]
            == int(fastest)
            == chunks.chunk_size(op, row["backend"], 1024, tuple(row["shape"]))
        )
    assert chunks.chunk_size("scan", "native", 1024, (1, 2, 3)) == 16, "what was kept before stays"
    assert main(["doctor", "--quick", "--measure", "2b"]) == 2


def folder_of(tmp_path, name="amor-mamba2"):
    save(small(name), tmp_path / "model")
    return str(tmp_path / "model")


def test_check_passes_a_sound_model_and_fails_a_broken_one(tmp_path, capsys, monkeypatch):
    folder = folder_of(tmp_path)
    assert main(["check", folder, "--length", "30", "--rows", "2", "--json"]) == 0
    assert last_json(capsys)["ok"]
    from amor.mixers.mamba2 import Mamba2

    honest = Mamba2.forward

    def forgetful(self, x, state, layout):
        return honest(self, x, {k: torch.zeros_like(v) for k, v in state.items()}, layout)

    monkeypatch.setattr(Mamba2, "forward", forgetful)
    assert main(["check", folder, "--length", "30", "--rows", "2", "--json"]) == 1
    assert not last_json(capsys)["ok"]


def a_run(tmp_path, checkpoint=True):
    """A run directory as training leaves it: its config.json is a recipe,
    its models are checkpoints."""
    run = Run(tmp_path / "run")
    run.make()
    run.write(run.config, {"name": "run", "model": {"name": "amor-mamba2"}})
    if checkpoint:
        save(small("amor-mamba2", vocab=257), run.checkpoints / "step-000001", bytes_tokenizer())
        (run.folder / "latest").symlink_to("checkpoints/step-000001")
    return str(run.folder)


VERBS_ON_A_RUN = [
    ["check", "RUN", "--length", "20", "--rows", "1"],
    ["info", "RUN"],
    ["trace", "RUN", "--text", "some text"],
    ["generate", "RUN", "--prompt", "some", "--max-tokens", "2"],
]


@pytest.mark.parametrize("words", VERBS_ON_A_RUN, ids=lambda words: words[0])
def test_a_run_stands_for_its_newest_model(tmp_path, words, capsys):
    run = a_run(tmp_path)
    assert main([run if word == "RUN" else word for word in words]) == 0
    assert main([f"{run}/latest" if word == "RUN" else word for word in words]) == 0
    assert amor.load(run)[1] is not None


@pytest.mark.parametrize("words", VERBS_ON_A_RUN, ids=lambda words: words[0])
def test_a_run_without_a_checkpoint_is_said_to_have_no_model(tmp_path, words, capsys):
    run = a_run(tmp_path, checkpoint=False)
    assert main([run if word == "RUN" else word for word in words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "without a checkpoint" in said


def test_a_model_folder_opens_as_it_was_saved(tmp_path):
    model = small("amor-gated-deltanet")
    save(model, tmp_path)
    again, tokenizer = amor.load(tmp_path)
    assert tokenizer is None
    for (name, a), (_, b) in zip(
        model.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("damage", ["config", "weights", "cut", "extra"])
def test_a_damaged_model_folder_is_refused_with_a_reason(tmp_path, damage, capsys):
    folder = tmp_path / "model"
    save(small("mamba2"), folder)
    if damage == "config":
        (folder / "config.json").write_text("{")
    elif damage == "weights":
        (folder / "model.safetensors").unlink()
    elif damage == "cut":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    else:
        text = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(text | {"d_ff": 97}))
    assert main(["check", str(folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
