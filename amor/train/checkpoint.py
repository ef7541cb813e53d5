"""One checkpoint: a model folder with the trainer's state beside the weights; complete or absent.

    step-000100/config.json, model.safetensors, tokenizer.json   what amor.load opens
                optimizer.safetensors   AdamW's two moments of every trained parameter
                trainer.json            step, data fingerprint, gradient norms
                manifest.json           size and sha256 of every other file

A checkpoint is written under a temporary name, synced to disk and renamed, so whoever lists the
folder sees complete ones only. Which checkpoints of a run are kept is decided in retention.py.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from msgspec import Meta
from torch import Tensor

from amor import tensors as on_disk
from amor import typed
from amor.data.shards import sha256_of
from amor.errors import AmorError
from amor.files import fsync, replace_file
from amor.models import folder as model_folder
from amor.models.amor import Amor
from amor.models.build import build
from amor.records import Amount, Record, Steps
from amor.records.run import Judged
from amor.run import Run
from amor.train.distributed import World

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MANIFEST, TRAINER, MOMENTS = "manifest.json", "trainer.json", "optimizer.safetensors"
NEEDED = (TRAINER, model_folder.CONFIG, model_folder.WEIGHTS, MOMENTS)  # every checkpoint has them
WRITING = ".writing-"  # prefix of a checkpoint that is not complete yet


class TrainerState(typed.File, frozen=True):
    """trainer.json: what the trainer needs to go on, beside weights and moments."""

    step: Steps  # optimiser steps taken, skipped ones included
    updates: Steps  # optimiser steps that changed the weights; AdamW's bias correction counts these
    norms: tuple[Amount, ...]  # recent gradient norms, the baseline for detecting spikes
    data: str  # fingerprint of the training data
    valid: Judged | None = None  # validation scores, if this very step was evaluated


class FileDigest(Record, frozen=True):
    """Size in bytes and sha256 of one file."""

    bytes: typed.Count
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class CheckpointManifest(typed.File, frozen=True):
    """manifest.json: size and hash of every other file, by path inside the checkpoint."""

    files: dict[Annotated[str, Meta(pattern=r"^[\w.-]+(/[\w.-]+)*$", max_length=200)], FileDigest]


def step_of(folder: Path) -> int:
    """The step of a checkpoint folder."""
    return int(folder.name.removeprefix("step-"))


def listed(run: Run) -> list[Path]:
    """Checkpoints of a run, the oldest first."""
    return sorted((p for p in run.checkpoints.glob("step-*") if p.name[5:].isdigit()), key=step_of)


def save(
    run: Run,
    world: World,
    model: Amor,
    optimizer: torch.optim.Optimizer,
    state: TrainerState,
    tokenizer: "Tokenizer | None",
) -> Path:
    """Write the checkpoint of state.step.

    Every rank calls it: tensors are gathered on rank 0, which writes. A full disk is an AmorError
    and leaves the earlier checkpoints as they were.
    """
    final = run.checkpoints / f"step-{state.step:06d}"
    writing = run.checkpoints / f"{WRITING}{final.name}"
    weights = gathered(world, model.state_dict())
    moments = gathered(world, moments_of(model, optimizer))

    def write() -> None:
        writing.mkdir(parents=True)
        plain = build(model.config, device="meta")
        plain.load_state_dict(weights, assign=True)
        model_folder.save(plain, writing, tokenizer)
        on_disk.write(writing / MOMENTS, moments)
        (writing / TRAINER).write_text(typed.text(state))
        _finish(run, writing, final)

    try:
        _on_rank_0(world, write)
    except OSError as error:
        if world.is_main:
            shutil.rmtree(writing, ignore_errors=True)
        kept = [p.name for p in listed(run)]
        raise AmorError(
            f"checkpoint {final.name} could not be written ({error.strerror or error}); "
            f"{'the last good one is ' + kept[-1] if kept else 'there is none yet'}. "
            f"{shutil.disk_usage(run.folder).free / 1e6:,.0f} MB are free there; "
            "mend that and run the same command: it resumes"
        ) from error
    return final


def gathered(world: World, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors in host memory on rank 0, nothing on the others. A collective."""
    full = ((name, world.full_tensor(t.detach())) for name, t in tensors.items())
    return {name: t.cpu().contiguous() for name, t in full if world.is_main}


def _on_rank_0(world: World, work: Callable[[], None]) -> None:
    """Run `work` on rank 0; an error there is raised on every rank, so that none waits for ever."""
    problem: Exception | None = None
    if world.is_main:
        try:
            work()
        except Exception as error:  # raised below, after the other ranks have been informed
            problem = error
    is_disk, message = world.broadcast((isinstance(problem, OSError), str(problem or "")))
    if problem is not None:
        raise problem
    if message:
        raise OSError(message) if is_disk else RuntimeError(f"rank 0 failed: {message}")


def _finish(run: Run, writing: Path, final: Path) -> None:
    """Sync every file, write the manifest, and give the checkpoint its name."""
    files = sorted(p for p in writing.rglob("*") if p.is_file())
    for path in files:
        fsync(path)
    digests = {p.name: FileDigest(bytes=p.stat().st_size, sha256=sha256_of(p)) for p in files}
    replace_file(writing / MANIFEST, typed.text(CheckpointManifest(files=digests)))
    fsync(writing)
    os.rename(writing, final)
    fsync(final.parent)
    point(run, "latest", final)


def point(run: Run, name: str, target: Path) -> None:
    """Make RUN/name a link to a checkpoint, atomically."""
    beside = run.folder / f".{name}.{os.getpid()}"
    beside.unlink(missing_ok=True)
    beside.symlink_to(target.relative_to(run.folder))
    os.replace(beside, run.folder / name)


def moments_of(model: Amor, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's two moments of every trained parameter, by name; zeros where there are none yet.

    They are the optimiser's own tensors, so that writing into them restores its state.
    """
    moments: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        state = optimizer.state[parameter]
        if not state:
            # torch keeps the step count on the device for a fused optimiser
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        moments |= {f"{name}.{key}": state[key].detach() for key in ("exp_avg", "exp_avg_sq")}
    return moments


def load_moments(
    folder: Path, model: Amor, optimizer: torch.optim.Optimizer, updates: int, world: World
) -> None:
    """Put the moments of a checkpoint into an optimiser, whatever number of ranks wrote them.

    updates: optimiser steps behind them, TrainerState.updates.
    """
    path, moments = folder / MOMENTS, moments_of(model, optimizer)
    with on_disk.opened(path) as file:
        stored = on_disk.listed(file, path)
        for name in sorted(stored.keys() ^ moments.keys()):
            problem = "is missing" if name in moments else "belongs to no trained parameter"
            raise AmorError(f"{path} does not fit the model: {name[:200]!r} {problem}")
        for name, moment in moments.items():
            if (stored[name].shape, stored[name].dtype) != (tuple(moment.shape), moment.dtype):
                raise AmorError(
                    f"{path} does not fit the model: {name} is {stored[name].dtype} of shape "
                    f"{list(stored[name].shape)}, not {moment.dtype} of shape {list(moment.shape)}"
                )
            full = file.get_tensor(name)
            on_disk.check_finite({name: full}, path)
            moment.copy_(world.shard(full, moment))
    for state in optimizer.state.values():
        state["step"].fill_(updates)


def problem_with(folder: Path) -> str | None:
    """Why a checkpoint cannot be trusted, in one line, or None."""
    try:
        files = read_manifest(folder).files
        for name in NEEDED:
            if name not in files:
                return f"{MANIFEST} names no {name}"
        for name, digest in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != digest.bytes:
                return f"{name} has {path.stat().st_size:,} bytes instead of {digest.bytes:,}"
            if sha256_of(path) != digest.sha256:
                return f"{name} is not what was written (its sha256 differs)"
        read_training(folder)
        with on_disk.opened(folder / MOMENTS) as file:
            on_disk.listed(file, folder / MOMENTS)
    except AmorError as error:
        return str(error)
    return None


def refuse_old_form(folder: Path) -> None:
    """Refuse a checkpoint of an earlier amor, which kept moments in torch's distributed format."""
    if (folder / "optimizer").is_dir() and not (folder / MOMENTS).exists():
        raise AmorError(
            f"{folder} was written by an earlier amor: its moments are in optimizer/, "
            "and are now kept in "
            f"{MOMENTS}; finish this run with that amor, or begin another --out with "
            f"--set model.start={folder} (weights are read as before)"
        )


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a checkpoint; the first ones held the files alone, without a version."""
    path = folder / MANIFEST
    tree = typed.json_tree(typed.read_text(path), str(path))
    tree = tree if isinstance(tree, dict) and "files" in tree else {"files": tree}
    return typed.convert(CheckpointManifest, tree, str(path))


def read_training(folder: Path) -> TrainerState:
    """trainer.json of a checkpoint."""
    return typed.read(TrainerState, folder / TRAINER)
