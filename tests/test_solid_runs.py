"""Laws of files that are broken: whatever stands in a run directory, a command succeeds or
says in one line what is wrong."""

import hashlib
import json
import random
import shutil
import traceback

import msgspec
import pytest
import torch
from nonsense import nodes, replaced
from safetensors.torch import load_file, save
from training import small_recipe, trained

from amor import typed
from amor.cli import BUG, main
from amor.cli import report as report_verb
from amor.errors import AmorError
from amor.ops import chunks
from amor.records.bench import DecodeFile
from amor.records.findings import Findings
from amor.records.run import Event, GateLine, Machine, Step, StepTiming
from amor.records.trace import Traces
from amor.run import Run
from amor.study import decode, figures, report, runs
from amor.study.table import as_text
from amor.study.trace import trace_page
from amor.train import checkpoint, retention
from amor.train.look import summarise_run
from amor.train.loop import train

NONSENSE = [None, True, -1, 0, 10**30, 1e308, "", "x", [], {}, [None], {"a": None}, "\ud800"]


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory):
    """A finished tiny run with findings, an event and a machine."""
    out = tmp_path_factory.mktemp("whole") / "run"
    trained(small_recipe(prepared, steps=2, checkpoint={"every": 1}), out)
    run = Run(out)
    run.write(
        run.machine,
        Machine(cpu="an abacus", threads=2, gpus=(), gemm_gflops=1.0, flops_per_token=1e6),
    )
    run.happened(Event(event="spike", message="a spike"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amor.judge.findings.WRITTEN", 4)
        found = summarise_run(run)
    short = tuple(msgspec.structs.replace(text, tokens=text.tokens[:2]) for text in found.texts[:1])
    run.write(run.findings, msgspec.structs.replace(found, texts=short))
    return run


def copied(whole, tmp_path):
    shutil.copytree(whole.folder, tmp_path / "run", symlinks=True)
    return Run(tmp_path / "run")


def survives(path, text, use):
    """Whether `use` succeeds; anything but success and one line is a failure of the law."""
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        use()
    except AmorError as error:
        if "\n" in str(error):
            pytest.fail(f"more than one line: {error}")
        return False
    except Exception:
        pytest.fail(f"{path.name} with {text[:300]}: {traceback.format_exc()}")
    return True


@pytest.mark.parametrize(
    "name", ["config.json", "machine.json", "metrics.jsonl", "events.jsonl", "findings.json"]
)
def test_a_report_of_a_broken_run_is_drawn_or_refused_in_one_line(whole, tmp_path, name):
    run, chance = copied(whole, tmp_path), random.Random(0)
    path = run.folder / name
    lines = path.read_text().splitlines() if name.endswith("l") else [path.read_text()]
    trees = [json.loads(line) for line in lines]
    cases = [
        (k, where, value)
        for k, tree in enumerate(trees)
        for where in nodes(tree)
        for value in NONSENSE
    ]
    cases = [
        case for case in cases if case[1][:2] != ("model", "changes")
    ]  # what a config may be is test_config.py's
    # nonsense in a recipe is mostly not read, so nearly every case draws a whole page, which takes
    # most of a second; tests/fuzz.py tries more
    drawn, most = 0, 15 if name == "config.json" else 40
    for k, where, value in chance.sample(cases, min(len(cases), most)):
        put = [*trees[:k], replaced(trees[k], where, value), *trees[k + 1 :]]
        drawn += survives(
            path,
            "".join(json.dumps(tree) + "\n" for tree in put),
            lambda: (report.write(run), runs.compare([run])),
        )
    # strict: most nonsense is refused; of a recipe only a part is read
    assert name == "config.json" or drawn < 0.8 * most


RAW = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a": NaN}\n',
    b'{"step": 1}\n',
    b"\x00",
    b'{"version": 9}\n',
]


@pytest.mark.parametrize(
    "name", ["config.json", "machine.json", "metrics.jsonl", "events.jsonl", "findings.json"]
)
@pytest.mark.parametrize("held", RAW, ids=lambda held: repr(held[:8]))
def test_files_that_are_cut_empty_or_no_text_are_one_line_and_exit_code_2(
    whole, tmp_path, name, held, capsys
):
    run = copied(whole, tmp_path)
    (run.folder / name).write_bytes(held)
    code, said = main(["report", str(run.folder), "--quick"]), capsys.readouterr().err
    assert code in (0, 2) and said.count("\n") == (code == 2)
    may_be_absent = (
        name == "events.jsonl" and b"\n" not in held and held not in (b"\xff\xfe",)
    )  # a last line that was cut off
    assert (code == 0) == may_be_absent, said


def test_a_diverged_run_is_written_and_read(whole, tmp_path):
    """A number that is not finite is null in a file, and left out of a drawing."""
    run = copied(whole, tmp_path)
    blocks = (GateLine(fire=0.5),) * len(next(iter(run.lines())).blocks)
    timing = StepTiming(seconds=1.0, tokens_per_second=1.0)
    run.measured(
        Step(step=3, loss=None, lr=1e-3, grad_norm=None, tokens=1, timing=timing, blocks=blocks)
    )
    assert '"loss":null' in run.metrics.read_text()
    assert [line.loss is None for line in run.lines() if isinstance(line, Step)] == [
        False,
        False,
        True,
    ]
    assert report.write(run).is_file() and runs.table(runs.compare([run])).lines
    run.metrics.write_text(
        "".join(
            typed.line(msgspec.structs.replace(x, loss=None))
            for x in run.lines()
            if isinstance(x, Step)
        )
    )
    assert "not finite" in report.write(run).read_text()
    assert runs.table(runs.compare([run])).lines[0].cells[3] is None


def test_files_without_a_version_are_read_and_those_of_another_are_refused(whole, tmp_path):
    run = copied(whole, tmp_path)
    for path in (run.config, run.findings):
        tree = json.loads(path.read_text())
        assert tree.pop("version") == 1
        path.write_text(json.dumps(tree))
    folder = run.folder / "latest"
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest["files"]))
    assert report.write(run) and checkpoint.problem_with(folder) is None
    run.config.write_text(json.dumps(json.loads(run.config.read_text()) | {"version": 2}))
    with pytest.raises(AmorError, match="of version 2"):
        run.read_config()


def test_a_line_that_a_kill_cut_off_is_gone_when_the_next_is_written(whole, tmp_path):
    run = copied(whole, tmp_path)
    before = len(list(run.read_events()))
    with run.events.open("a") as file:
        file.write('{"event": "cut')
    run.happened(Event(event="after"))
    assert [e.event for e in run.read_events()][before:] == ["after"]


def mended(folder, name, held):
    """A file of a checkpoint replaced, and its manifest with it."""
    (folder / name).write_bytes(held)
    tree = json.loads((folder / "manifest.json").read_text())
    tree["files"][name] = {"bytes": len(held), "sha256": hashlib.sha256(held).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(tree))


@pytest.mark.parametrize("name", ["manifest.json", "trainer.json"])
def test_a_checkpoint_that_describes_itself_wrongly_is_told_as_damaged(whole, tmp_path, name):
    folder, chance = copied(whole, tmp_path).checkpoints / "step-000002", random.Random(0)
    tree = json.loads((folder / name).read_text())
    cases = [(where, value) for where in nodes(tree) for value in NONSENSE]
    told = 0
    for where, value in chance.sample(cases, 60):
        text = json.dumps(replaced(tree, where, value)).encode()
        if name == "manifest.json":
            (folder / name).write_bytes(text)
        else:
            mended(folder, name, text)
        problem = checkpoint.problem_with(folder)
        told += problem is not None
        assert problem is None or "\n" not in problem
    assert told > 45


@pytest.mark.parametrize(
    "held",
    [b"", b"\x00" * 8, b"\xff" * 8, b"\x02" + b"\x00" * 7 + b"{}!", b"\x80\x04.", b"(" * 10_000],
)
def test_moments_that_are_no_safetensors_send_the_run_back_to_the_checkpoint_before(
    whole, tmp_path, prepared, held
):
    run = copied(whole, tmp_path)
    mended(run.checkpoints / "step-000002", checkpoint.MOMENTS, held)
    assert "cannot be read as safetensors" in checkpoint.problem_with(
        run.checkpoints / "step-000002"
    )
    assert retention.newest_good(run, lambda words: None).name == "step-000001"


def other_moments(tensors):
    """Moments of another model, and such as no optimiser leaves; what is said of each."""
    name, some = next(iter(tensors.items()))
    rest = {key: t for key, t in tensors.items() if key != name}
    yield rest, "is missing"
    yield tensors | {"another.weight.exp_avg": torch.zeros(2)}, "belongs to no trained parameter"
    yield rest | {name: torch.zeros(2)}, r"of shape \[2\], not"
    yield rest | {name: some.half()}, "is torch.float16 of shape"
    yield rest | {name: torch.full_like(some, torch.nan)}, "not finite"


def test_moments_that_do_not_fit_the_model_are_one_line(whole, tmp_path, prepared):
    run = copied(whole, tmp_path)
    path = run.checkpoints / "step-000002" / checkpoint.MOMENTS
    for tensors, words in other_moments(load_file(path)):
        mended(path.parent, path.name, save(tensors))
        with pytest.raises(AmorError, match=words) as error:
            train(small_recipe(prepared, steps=3, checkpoint={"every": 1}), run.folder)
        assert "\n" not in str(error.value)


def decoded():
    curve = {"context": 3072, "tokens_per_second": 10.0, "bytes": 1}
    curves = [curve | {"label": "amor-mamba2 f=0.22", "rate": 0.22}, curve | {"label": "mamba2"}]
    crossings = [
        {"gated": "amor-mamba2 f=0.22", "other": "transformer", "measured": 0, "contexts": [3072]}
    ]
    firing = [{"prompt": 3072, "temperature": 0.0, "rate": 0.3, "rates": [0.3]}]
    here = {"suite": "decode", "scale": "tiny", "machine": {"threads": 2}, "curves": curves}
    return here | {
        "crossings": crossings,
        "firing": firing,
        "model": "amor-gated-deltanet-tiny",
        "asked": [],
    }


def test_a_broken_benchmark_is_shown_or_refused_in_one_line(tmp_path):
    pytest.importorskip("matplotlib")
    tree, file, drawn = decoded(), tmp_path / "decode.json", 0
    cases = [(where, value) for where in nodes(tree) for value in NONSENSE]
    for where, value in random.Random(0).sample(cases, 120):
        drawn += survives(
            file,
            json.dumps(replaced(tree, where, value)),
            lambda: report_verb.decode_report(file, None),
        )
    assert 0 < drawn < 100
    figures.draw("decode", typed.convert(DecodeFile, tree, "F"))


@pytest.mark.parametrize(
    ("model", "column"),
    [
        ("amor-gated-deltanet-tiny", "0.301"),
        ("amor-mamba2-1.5b", "0.208"),
        ("amor-mamba2-classic-tiny", None),
        (None, None),
    ],
)
def test_firing_rates_stand_beside_those_of_the_model_that_was_measured(model, column):
    table = decode.tables(typed.convert(DecodeFile, decoded() | {"model": model}, "F"))[-1]
    row = next(line for line in table.lines if line.name == "3,072, T = 0")
    assert row.cells[0].value == 0.3 and row.cells[1:] == ((column,) if column else ())


def test_a_broken_trace_is_refused_in_one_line(whole, tmp_path):
    traces = Traces(traces=whole.read_findings().texts)
    tree, file, drawn = json.loads(typed.line(traces)), tmp_path / "trace.json", 0
    cases = [(where, value) for where in nodes(tree) for value in NONSENSE]
    for where, value in random.Random(0).sample(cases, 150):
        text = json.dumps(replaced(tree, where, value))
        drawn += survives(file, text, lambda: trace_page(typed.read(Traces, file)))
    assert drawn < 60


@pytest.mark.parametrize(
    "held",
    ["", "[]", '{"a": 17}', '{"a": null}', '{"chunks": {"a": "64"}}', '{"chunks": {"a": 100000}}'],
)
def test_measured_chunks_that_are_none_are_one_line(tmp_path, monkeypatch, held):
    monkeypatch.setattr(chunks, "path", lambda: tmp_path / "chunks.json")
    (tmp_path / "chunks.json").write_text(held)
    with pytest.raises(AmorError, match=r"chunks\.json"):
        chunks.stored.__wrapped__()
    (tmp_path / "chunks.json").write_text('{"a": 64}')  # as it was written before it had a version
    assert chunks.stored.__wrapped__() == {"a": 64}


def test_a_mistake_of_ours_is_called_a_bug_and_shown_with_debug(tmp_path, monkeypatch, capsys):
    def wrong(*given):
        raise TypeError("a number\nwas a text")

    monkeypatch.setattr(report_verb, "report", wrong)
    assert main(["report", str(tmp_path)]) == BUG == 70
    said = capsys.readouterr().err
    assert (
        said
        == "amor report: a bug: TypeError: a number was a text (run again with --debug for where)\n"
    )
    assert main(["report", str(tmp_path), "--debug"]) == BUG
    assert "Traceback" in (said := capsys.readouterr().err) and said.endswith(
        "a bug: TypeError: a number was a text\n"
    )


def test_a_wrong_input_shows_where_it_was_refused_only_with_debug(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["report", str(tmp_path), "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
    assert main(["bench", "decode", "--scale", "no", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_the_numbers_of_a_gate_are_means_over_the_end_of_a_run(whole, tmp_path):
    run = copied(whole, tmp_path)
    run.findings.unlink()
    run.metrics.unlink()
    timing = StepTiming(seconds=1.0, tokens_per_second=1.0)
    for step in range(1, 401):
        gate = GateLine(fire=step / 1000, tau=step / 400 if step % 2 else None)
        run.measured(
            Step(
                step=step,
                loss=1.0,
                lr=1.0,
                grad_norm=1.0,
                tokens=step,
                timing=timing,
                blocks=(gate,),
            )
        )
    text = as_text(report.gate_table(report.RunData(run)))
    assert "means of the last 40 steps, 361 to 400" in text
    assert f"{sum(range(361, 401)) / 40 / 1000:.1%}" in text  # fires
    assert f"{sum(range(361, 401, 2)) / 20 / 400:.3f}" in text  # tau, where it has one
    assert "4.0% - 36.0%" in text  # of all steps, as the paper reports it


def test_findings_are_what_they_were_written_as(whole):
    assert (
        typed.convert(Findings, json.loads(whole.findings.read_text()), "F")
        == whole.read_findings()
    )
