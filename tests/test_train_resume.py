"""Stopping: a run stopped anywhere, by anything, ends with the bits of one never stopped."""

import errno
import inspect
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from kills import FEW, TOKENIZERS, finished, survives, survives_three
from training import QUICK, KilledError, Killer, Watch, corpus, left_by, same, small_recipe, trained

import amor
from amor.cli import main
from amor.cli._training import Reporter
from amor.errors import AmorError
from amor.files import locked
from amor.presets import NAMES
from amor.train import checkpoint, loop, retention
from amor.train.display import Display, Lines
from amor.train.distributed import init_world
from amor.train.loop import LOCK, Trainer, train
from amor.train.recipe import load
from amor.train.trackers import TensorBoard, Tracker
from amor.train.watch import MetricsWriter, Observer


@pytest.fixture(scope="module")
def unbroken(prepared, tmp_path_factory):
    """A run of amor-mamba2 that was never stopped, and what it left."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    return trained(small_recipe(prepared), out)


def killed(recipe, out, step):
    with pytest.raises(KilledError):
        train(recipe, out, observers=[Killer(step)])


@pytest.fixture(scope="module")
def halted(prepared, tmp_path_factory):
    """A fresh copy of a run killed after step 5 of 6; its newest checkpoint is of step 4."""
    out = tmp_path_factory.mktemp("halted") / "run"
    killed(small_recipe(prepared), out, 5)
    return lambda to: shutil.copytree(out, to, symlinks=True)


@pytest.mark.parametrize("name", NAMES)
def test_killed_and_resumed_is_never_stopped_for_every_architecture(prepared, tmp_path, name):
    recipe = small_recipe(prepared, name, steps=3, eval={"every": 3})
    whole = trained(recipe, tmp_path / "whole")
    killed(recipe, tmp_path / "run", 3)  # one step after the checkpoint of step 2
    assert left_by(tmp_path / "run")["trainer"]["step"] == 2
    same(trained(recipe, tmp_path / "run"), whole)


def test_killed_and_resumed_is_never_stopped_with_a_head_of_its_own_and_no_final_norm(
    prepared, tmp_path
):
    recipe = small_recipe(
        prepared,
        changes=QUICK | {"tied": False, "blocks.final": "none"},
        steps=3,
        eval={"every": 3},
    )
    whole = trained(recipe, tmp_path / "whole")
    killed(recipe, tmp_path / "run", 3)
    same(trained(recipe, tmp_path / "run"), whole)
    held = amor.load(tmp_path / "run")[0]
    assert held.head is not None and held.final_norm is None and held.head.weight.std() > 0


@pytest.mark.parametrize("step", [1, 5])
def test_killed_twice_at_any_step_is_never_stopped(prepared, tmp_path, unbroken, step):
    for _ in range(2):
        killed(small_recipe(prepared), tmp_path / "run", step)
    same(trained(small_recipe(prepared), tmp_path / "run"), unbroken)


STAGES = {
    "nothing written": (checkpoint.model_folder, "save"),
    "weights written": (checkpoint.on_disk, "write"),
    "all written, nothing named": (checkpoint, "_finish"),
    "hashes unwritten": (checkpoint, "replace_file"),
    "before its name": (checkpoint.os, "rename"),
    "before the pointer": (checkpoint, "point"),
    "before old ones go": (retention, "prune"),
    "half an old one gone": (checkpoint.shutil, "rmtree"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_killed_inside_a_checkpoint_loses_no_checkpoint(
    prepared, tmp_path, unbroken, halted, monkeypatch, stage
):
    where, name = STAGES[stage]
    out = halted(tmp_path / "run")
    before = [p.name for p in (out / "checkpoints").glob("step-*")]
    assert sorted(before) == ["step-000002", "step-000004"]

    def kill(*given, **more):
        if stage == "weights written" and given[0].name != checkpoint.MOMENTS:
            return real(*given, **more)
        if stage == "before its name" and given[1] != out / "checkpoints/step-000006":
            return real(*given, **more)
        raise KilledError

    real = getattr(where, name)

    class Arm(Observer):
        def on_step(self, metrics):
            if metrics.step == 6:
                monkeypatch.setattr(where, name, kill)

    with pytest.raises(KilledError):
        train(small_recipe(prepared), out, observers=[Arm()])
    monkeypatch.undo()
    for folder in checkpoint.listed(checkpoint.Run(out)):
        assert checkpoint.problem_with(folder) is None
        amor.load(folder)
    same(trained(small_recipe(prepared), out), unbroken)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-000004", "step-000006"]


@pytest.mark.parametrize(("step", "inside"), [(4, False), (6, True)])
def test_kill_9_is_never_stopped(prepared, tmp_path, step, inside):
    recipe = small_recipe(prepared, "mamba2", steps=9, checkpoint={"every": 3})
    whole, seconds = finished(recipe, tmp_path / "whole")
    found = survives(
        recipe, tmp_path / "run", whole, step, wait=min(seconds) / 2 if inside else 0.0
    )
    assert found["kept"] in ((3, 6) if inside else (3,))


@pytest.fixture(scope="module")
def spelled(prepared, tmp_path_factory):
    """The invented text as bytes and as pieces of words."""
    (other,) = (name for name in TOKENIZERS if name != "bytes")
    return {"bytes": prepared, other: corpus(tmp_path_factory.mktemp("pieces"), other)}


@pytest.mark.parametrize("case", FEW, ids=str)
def test_kill_9_three_times_in_sixty_steps_is_never_stopped_also_where_a_lone_token_fires(
    spelled, tmp_path, case
):
    survives_three(case, spelled[case.tokenizer], tmp_path)


def test_what_a_run_resumes_with_lies_in_memory_as_in_a_fresh_run(halted, prepared, tmp_path):
    """Products of a few rows round by it."""

    class Look(Observer):
        def on_step(self, metrics):
            for t in (*self.of.model.parameters(), *self.of.model.buffers()):
                self.off.append(t.data_ptr() % 64)
            for state in self.of.optimizer.state.values():
                self.off += [t.data_ptr() % 64 for t in state.values()]

    for out in (tmp_path / "fresh", halted(tmp_path / "run")):
        world, look = init_world("none", "cpu"), Look()
        look.of, look.off = (
            Trainer(small_recipe(prepared), checkpoint.Run(out), world, [look], {}),
            [],
        )
        look.of.go("auto")
        assert look.off and not any(look.off)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_step_writes_a_checkpoint_and_says_how_to_go_on(
    prepared, tmp_path, unbroken, number, code
):
    class Ask(Watch):
        def on_step(self, metrics):
            if metrics.step == 3:
                os.kill(os.getpid(), number)

    ask = Ask()
    ended = train(small_recipe(prepared), tmp_path / "run", observers=[ask])
    assert (ended.exit, ended.step, ended.done) == (code, 3, False)
    assert [e.event for e in ask.events] == [
        "stopped"
    ] and f"--out {tmp_path / 'run'}" in ask.events[0].message
    assert left_by(tmp_path / "run")["trainer"]["step"] == 3
    again = trained(small_recipe(prepared), tmp_path / "run")
    assert again["watch"].steps[0].step == 4
    same(again, unbroken)


@pytest.mark.parametrize("harm", ["a flipped bit", "cut short", "no manifest", "moments changed"])
def test_a_damaged_checkpoint_is_said_and_the_one_before_it_is_used(
    prepared, tmp_path, unbroken, halted, harm
):
    out = halted(tmp_path / "run")
    folder = out / "checkpoints/step-000004"
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    if harm == "a flipped bit":
        data[-5] ^= 1
        weights.write_bytes(data)
    elif harm == "cut short":
        weights.write_bytes(data[:-100])
    elif harm == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        moments = folder / "optimizer.safetensors"
        moments.write_bytes(moments.read_bytes()[:-1] + b"!")
    again = trained(small_recipe(prepared), out)
    said = [e.message for e in again["watch"].events if e.event == "damaged"]
    assert len(said) == 1 and "step-000004 is damaged" in said[0]
    assert again["watch"].steps[0].step == 3
    assert (out / "checkpoints/damaged-step-000004").is_dir()
    same(again, unbroken)


@pytest.mark.parametrize("where", ["model", "moments", "manifest"])
def test_a_full_disk_is_said_and_leaves_the_checkpoint_before(
    prepared, tmp_path, unbroken, halted, monkeypatch, where
):
    out = halted(tmp_path / "run")

    def full(*given, **more):
        if where == "moments" and given[0].name != checkpoint.MOMENTS:
            return honest(*given, **more)
        raise OSError(28, "No space left on device")

    honest = checkpoint.on_disk.write

    class Fill(Observer):
        def on_step(self, metrics):
            if metrics.step == 6:
                place = {
                    "model": (checkpoint.model_folder, "save"),
                    "moments": (checkpoint.on_disk, "write"),
                }
                monkeypatch.setattr(*place.get(where, (checkpoint, "replace_file")), full)

    with pytest.raises(AmorError, match=r"No space left on device.*last good one is step-000004"):
        train(small_recipe(prepared), out, observers=[Fill()])
    monkeypatch.undo()
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    same(trained(small_recipe(prepared), out), unbroken)


@pytest.mark.parametrize(("where", "allowed"), [("weights", 100_000), ("moments", 1_000_000)])
def test_a_system_that_refuses_to_write_is_told_as_such(
    prepared, tmp_path, monkeypatch, where, allowed
):
    """No file may grow past a limit: safetensors wraps the system's error in one of its own."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    written = []
    honest = checkpoint.on_disk.write
    monkeypatch.setattr(
        checkpoint.on_disk,
        "write",
        lambda path, held: honest(path, held) or written.append(path.name),
    )

    class Limit(Observer):
        def on_step(self, metrics):
            resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, before[1]))

    try:
        with pytest.raises(AmorError, match=r"step-000002 could not be written \(.*File too large"):
            train(small_recipe(prepared), tmp_path / "run", observers=[Limit()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert bool(written) == (where == "moments")  # the weights are written first, and fit
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_a_checkpoint_of_an_earlier_version_is_refused_in_one_line_and_left_as_it_was(
    prepared, tmp_path, halted
):
    out = halted(tmp_path / "run")
    for folder in (out / "checkpoints").glob(
        "step-*"
    ):  # as they were: torch's distributed format in a folder
        (folder / "optimizer").mkdir()
        (folder / "optimizer.safetensors").rename(folder / "optimizer/__0_0.distcp")
    with pytest.raises(
        AmorError,
        match=r"step-000004 was written by an earlier amor.*now kept in optimizer.safetensors",
    ) as error:
        train(small_recipe(prepared), out)
    assert "\n" not in str(error.value)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    assert amor.load(out)[0].config.vocab == 257  # its weights are read as before
    from_there = {"name": "amor-mamba2", "changes": {}, "start": str(out / "latest")}
    assert train(
        small_recipe(prepared, model=from_there, steps=1), tmp_path / "next"
    ).done  # as the error advises


def test_a_run_or_recipe_with_an_earlier_key_is_refused_with_the_new_one(
    prepared, tmp_path, halted
):
    out = halted(tmp_path / "run")
    tree = json.loads((out / "config.json").read_text())
    for old, new in (("latest", "keep_last"), ("best", "keep_best"), ("milestones", "keep_every")):
        policy = {old if key == new else key: value for key, value in tree["checkpoint"].items()}
        (out / "config.json").write_text(json.dumps(tree | {"checkpoint": policy}))
        with pytest.raises(AmorError, match=rf"config.json: .*checkpoint\.{old} is now {new}"):
            train(small_recipe(prepared), out)
        with pytest.raises(AmorError, match=rf"base.toml: checkpoint\.{old} is now {new}"):
            load("tiny/mamba2", [f"checkpoint.{old}=1"])


@pytest.mark.parametrize(("number", "refusal"), [(errno.ENOSPC, AmorError), (None, OSError)])
def test_only_an_error_of_the_system_is_told_as_one_of_the_disk(
    prepared, tmp_path, number, refusal
):
    class Fail(Observer):
        def on_step(self, metrics):
            raise (
                OSError("libamor.so: undefined symbol")
                if number is None
                else OSError(number, "No space left on device")
            )

    with pytest.raises((AmorError, OSError)) as error:
        train(small_recipe(prepared), tmp_path / "run", observers=[Fail()])
    assert error.type is refusal


def test_a_mistake_in_the_code_is_not_told_as_a_full_disk(prepared, tmp_path, monkeypatch):
    wrong = amor.preset("mamba2", "tiny")
    monkeypatch.setattr(
        checkpoint, "build", lambda config, device: amor.build(wrong, device=device)
    )
    with pytest.raises(RuntimeError, match="loading state_dict"):
        train(small_recipe(prepared), tmp_path / "run")


def test_checkpoints_are_kept_by_policy(prepared, tmp_path):
    keeping = {"every": 1, "keep_last": 1, "keep_every": 3, "keep_best": True}
    found = trained(
        small_recipe(
            prepared, checkpoint=keeping, eval={"every": 2}, steps=8, lr={"peak": 1.0, "floor": 1.0}
        ),
        tmp_path / "run",
    )
    nll = {line["step"]: line["valid"]["nll"] for line in found["metrics"] if "valid" in line}
    best = min(nll, key=nll.get)
    assert best != 8  # such a learning rate ends worse than it began
    kept = {int(p.name[5:]) for p in (tmp_path / "run/checkpoints").iterdir()}
    assert kept == {3, 6, 8, best}
    assert (tmp_path / "run/best").resolve().name == f"step-{best:06d}"
    assert (tmp_path / "run/latest").resolve().name == "step-000008"
    model, tokenizer = amor.load(tmp_path / "run/best")
    assert model.config.vocab == 257 and tokenizer.get_vocab_size() == 257


def test_another_run_is_refused_and_another_rate_is_said(prepared, tmp_path):
    out = tmp_path / "run"
    killed(small_recipe(prepared), out, 3)
    for other, key in (
        (small_recipe(prepared, batch=8), "batch"),
        (small_recipe(prepared, "mamba2"), "model."),
    ):
        with pytest.raises(AmorError, match=f"was made with {key}"):
            train(other, out)
    with pytest.raises(AmorError, match="holds a run already"):
        train(small_recipe(prepared), out, go_on="no")
    with pytest.raises(AmorError, match="no checkpoint to resume"):
        train(small_recipe(prepared), tmp_path / "new", go_on="yes")
    found = trained(small_recipe(prepared, lr={"peak": 1e-4}, micro_batch=2), out)
    said = {e.key: (e.was, e.now) for e in found["watch"].events if e.event == "changed"}
    assert said == {"lr.peak": (2e-3, 1e-4)}


def test_other_data_is_refused(prepared, tmp_path):
    killed(small_recipe(prepared), tmp_path / "run", 3)
    other = tmp_path / "data"
    shutil.copytree(prepared, other)
    train(small_recipe(other, steps=6), tmp_path / "run")  # the same bytes in another place
    killed(small_recipe(prepared), tmp_path / "second", 3)
    shutil.rmtree(other / "train")
    shutil.copytree(other / "valid", other / "train")
    with pytest.raises(AmorError, match="other data"):
        train(small_recipe(other), tmp_path / "second")
    (prepared_bytes := bytearray((other / "train/00000.bin").read_bytes()))[7] ^= 1
    (other / "train/00000.bin").write_bytes(prepared_bytes)
    with pytest.raises(AmorError, match="corrupt"):
        train(small_recipe(other), tmp_path / "third")


def test_a_finished_run_has_nothing_to_do(prepared, tmp_path):
    first = trained(small_recipe(prepared, steps=2), tmp_path / "run")
    again = trained(small_recipe(prepared, steps=2), tmp_path / "run")
    assert not again["watch"].steps and again["ended"].done
    same(first, again)


def test_the_command_trains_and_goes_on_and_leaves_a_run_that_can_be_read(
    prepared, tmp_path, capsys
):
    words = [
        "train",
        "tiny/mamba2",
        "--data",
        str(prepared),
        "--out",
        str(tmp_path / "run"),
        "--steps",
        "2",
        "--json",
    ]
    for change in (
        "width=64",
        "d_ff=64",
        "vocab=257",
        "pattern=mamba2",
        "mixers.mamba2.head_size=16",
        "mixers.mamba2.state_size=8",
    ):
        words += ["--set", f"model.changes.{change}"]
    words += ["--set", "context=16", "--set", "batch=2"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["done"] and found["step"] == 2 and found["valid"]["nll"] > 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2]
    assert {"loss", "lr", "grad_norm", "tokens", "timing"} <= lines[0].keys()
    assert json.loads((tmp_path / "run/config.json").read_text())["model"]["name"] == "mamba2"
    assert "torch" in json.loads((tmp_path / "run/machine.json").read_text())
    assert main([*words, "--resume", "no"]) == 2
    assert "holds a run already" in capsys.readouterr().err


HOLD = """
import sys, time
from amor.files import locked
from amor.train.loop import LOCK
with locked(sys.argv[1], LOCK, "amor train"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_train_into_one_folder_is_refused_and_a_killed_one_is_taken_over(
    prepared, tmp_path
):
    recipe, out = small_recipe(prepared, steps=1), tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(AmorError) as error:
            train(recipe, out)
        owner = f"process {holder.pid} on {socket.gethostname()}"
        assert f"another `amor train` is writing {out} ({owner})" in str(error.value)
        assert not (out / "config.json").exists()
    finally:
        holder.kill()
        holder.wait()
    assert train(recipe, out).done
    with (
        locked(out, LOCK, "amor train"),  # the message names the newest owner, not the killed one
        pytest.raises(AmorError, match=rf"\(process {os.getpid()} on "),
    ):
        train(recipe, out)


def test_every_moment_that_an_observer_takes_is_one_that_the_trainer_calls():
    moments = {name for name in vars(Observer) if name.startswith("on_")}
    assert set(re.findall(r"observer\.(on_\w+)\(", inspect.getsource(loop))) == moments
    kinds = [MetricsWriter, Lines, Display, Tracker, TensorBoard, Reporter]
    assert all(issubclass(kind, Observer) for kind in kinds)
    assert {name for kind in kinds for name in vars(kind) if name.startswith("on_")} <= moments
