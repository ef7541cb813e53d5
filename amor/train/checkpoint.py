"""Checkpoints: a model folder with the state of training beside the weights, complete or not there at all.

    step-000100/  config.json, model.safetensors, tokenizer.json   what amor.load opens
                  optimizer/                                       AdamW's moments, sharded (torch.distributed.checkpoint)
                  trainer.json                                     step, data fingerprint, what the loop remembers
                  manifest.json                                    size and sha256 of every other file

A checkpoint is written under another name, forced to disk, and renamed: whoever lists the folder sees whole ones only.
An old one is renamed before it is deleted, for the same reason.
"""

import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from msgspec import Meta
from torch import Tensor

from amor import typed
from amor.data.shards import sha256_of
from amor.errors import AmorError
from amor.files import replace_file, to_disk
from amor.models import folder as model_folder
from amor.models.amor import Amor
from amor.models.build import build
from amor.records import Amount, Record, Steps
from amor.records.run import Judged
from amor.run import Run
from amor.train import metadata
from amor.train.distributed import Team
from amor.train.recipe import Keeping

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MANIFEST, TRAINER, OPTIMIZER = "manifest.json", "trainer.json", "optimizer"
# what a system says of a disk that is full, gone, broken or closed to us; other errors of its are mistakes of ours
REFUSALS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE, errno.ENODEV),
    *(errno.ENXIO, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE),
}
WRITING, OLD, DAMAGED = ".writing-", ".old-", "damaged-"
NEEDED = (TRAINER, model_folder.CONFIG, model_folder.WEIGHTS, f"{OPTIMIZER}/{metadata.FILE}")  # a checkpoint without one is none


class Training(typed.File, frozen=True):
    """trainer.json: where a run stands beside its weights and moments."""

    step: Steps
    updates: Steps  # optimiser steps that changed the weights
    norms: tuple[Amount, ...]  # of the last gradients, by which spikes are told
    data: str  # fingerprint of the training text
    valid: Judged | None = None  # where this very step was judged


class Written(Record, frozen=True):
    bytes: typed.Count
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Manifest(typed.File, frozen=True):
    """manifest.json: size and hash of every other file."""

    files: dict[Annotated[str, Meta(pattern=r"^[\w.-]+(/[\w.-]+)*$", max_length=200)], Written]


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def listed(run: Run) -> list[Path]:
    """Checkpoints of a run, the oldest first."""
    return sorted((p for p in run.checkpoints.glob("step-*") if p.name[5:].isdigit()), key=step_of)


def save(
    run: Run, team: Team, model: Amor, optimizer: torch.optim.Optimizer, trainer: Training, tokenizer: "Tokenizer | None"
) -> Path:
    """Write the checkpoint of trainer.step; every rank calls it. A full disk leaves the earlier ones as they were."""
    from torch.distributed.checkpoint.api import CheckpointException

    final = run.checkpoints / name_of(trainer.step)
    writing = run.checkpoints / f"{WRITING}{final.name}"
    weights = {name: team.full_tensor(t).detach().cpu() for name, t in model.state_dict().items()}

    def write_model() -> None:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        plain = build(model.config, device="meta")
        plain.load_state_dict(weights, assign=True)
        model_folder.save(plain, writing, tokenizer)
        (writing / TRAINER).write_text(typed.text(trainer))

    try:
        _by_leader(team, write_model)
        _write_moments(writing / OPTIMIZER, moments(model, optimizer), team)
        _by_leader(team, lambda: _finish(run, writing, final))
    except BaseException as error:  # torch's CheckpointException is no Exception
        if not of_the_disk(error):
            if isinstance(error, CheckpointException):
                raise RuntimeError(f"{final.name} could not be written: {_reason(error)}") from error
            raise
        _by_leader(team, lambda: shutil.rmtree(writing, ignore_errors=True))
        kept = [p.name for p in listed(run)]
        raise AmorError(
            f"checkpoint {final.name} could not be written ({_reason(error)}); "
            f"{'the last good one is ' + kept[-1] if kept else 'there is none yet'}. "
            f"{shutil.disk_usage(run.folder).free / 1e6:,.0f} MB are free there; mend that and run the same command: it resumes"
        ) from error
    return final


def _by_leader(team: Team, work: Callable[[], None]) -> None:
    """Done by one, an error known to all."""
    problem: Exception | None = None
    if team.leads:
        try:
            work()
        except Exception as error:  # handed to every rank below, so that none waits for ever
            problem = error
    told = team.broadcast(None if problem is None else (_reason(problem), of_the_disk(problem)))
    if problem is not None:
        raise problem
    if told is not None:
        words, disk = told
        raise OSError(errno.EIO, words) if disk else RuntimeError(f"the leading rank failed: {words}")


def of_the_disk(error: BaseException) -> bool:
    """Whether the system refused to read or write a file: its own error, or the same in the wrapping of torch or safetensors."""
    inner = [pair[0] for pair in getattr(error, "failures", {}).values()]  # torch's CheckpointException: rank -> (error, ...)
    if inner:
        return all(of_the_disk(one) for one in inner)
    if isinstance(error, OSError):
        return error.errno in REFUSALS
    said = re.search(r"\(os error (\d+)\)", str(error))  # so ends what safetensors says of the system's errors
    if said:
        return int(said[1]) in REFUSALS
    # torch raises a RuntimeError while it handles the system's; a mistake made in handling it is of another type
    below = error.__cause__ or (error.__context__ if type(error) is RuntimeError else None)
    return below is not None and of_the_disk(below)


def _reason(error: BaseException) -> str:
    """What the system said, in one line; torch and safetensors wrap it."""
    for inner in getattr(error, "failures", {}).values():  # torch's CheckpointException: rank -> (error, traceback)
        return _reason(inner[0])
    below = error.__cause__ or error.__context__
    if below is not None and not isinstance(error, OSError):
        return _reason(below)
    return " ".join(str(error).split())[:200] or type(error).__name__


def _finish(run: Run, writing: Path, final: Path) -> None:
    files = sorted(p for p in writing.rglob("*") if p.is_file())
    for path in files:
        to_disk(path)
    held = {str(p.relative_to(writing)): Written(bytes=p.stat().st_size, sha256=sha256_of(p)) for p in files}
    replace_file(writing / MANIFEST, typed.text(Manifest(files=held)))
    to_disk(writing / OPTIMIZER)
    to_disk(writing)
    os.rename(writing, final)
    to_disk(final.parent)
    point(run, "latest", final)


def point(run: Run, name: str, target: Path) -> None:
    """RUN/name -> a checkpoint, switched in one move."""
    beside = run.folder / f".{name}.{os.getpid()}"
    beside.unlink(missing_ok=True)
    beside.symlink_to(target.relative_to(run.folder))
    os.replace(beside, run.folder / name)


def moments(model: Amor, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's two moments of every parameter that is trained, by name; zeros where there are none yet."""
    held: dict[str, Tensor] = {}
    for name, parameter in ((n, p) for n, p in model.named_parameters() if p.requires_grad):
        state = optimizer.state[parameter]
        if not state:
            # torch keeps the count on the device for a fused optimiser
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        held |= {f"{name}.exp_avg": state["exp_avg"].detach(), f"{name}.exp_avg_sq": state["exp_avg_sq"].detach()}
    return held


def _write_moments(folder: Path, held: dict[str, Tensor], team: Team) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process: that is what we ask for
        dcp.save(held, storage_writer=dcp.FileSystemWriter(folder), no_dist=team.world == 1)


def load_moments(folder: Path, model: Amor, optimizer: torch.optim.Optimizer, updates: int, team: Team) -> None:
    """Put the moments of a checkpoint into an optimiser, whatever number of ranks wrote them."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    held = moments(model, optimizer)
    metadata.check(folder / OPTIMIZER, held)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(held, storage_reader=dcp.FileSystemReader(folder / OPTIMIZER), no_dist=team.world == 1)
    except CheckpointException as error:
        raise AmorError(
            f"{folder / OPTIMIZER}: the moments cannot be read ({_reason(error)}); "
            f"take {folder.name} away, and the run goes on from the checkpoint before it"
        ) from error
    for state in optimizer.state.values():
        state["step"].fill_(updates)


def problem_with(folder: Path) -> str | None:
    """Why a checkpoint cannot be trusted, or None."""
    try:
        held = read_manifest(folder).files
        for name in NEEDED:
            if name not in held:
                return f"{MANIFEST} names no {name}"
        for name, wanted in held.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != wanted.bytes:
                return f"{name} has {path.stat().st_size:,} bytes instead of {wanted.bytes:,}"
            if sha256_of(path) != wanted.sha256:
                return f"{name} is not what was written (its sha256 differs)"
        read_training(folder)
        metadata.read(folder / OPTIMIZER)
    except AmorError as error:
        return str(error)
    return None


def read_manifest(folder: Path) -> Manifest:
    """Earlier ones hold the files alone, without a version."""
    path = folder / MANIFEST
    tree = typed.json_tree(typed.read_text(path), str(path))
    return typed.convert(Manifest, tree if isinstance(tree, dict) and "files" in tree else {"files": tree}, str(path))


def newest_good(run: Run, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose every byte is right; a damaged one is said and set aside, never used and never deleted."""
    for folder in reversed(listed(run)):
        problem = problem_with(folder)
        if problem is None:
            point(run, "latest", folder)
            return folder
        aside = folder.with_name(f"{DAMAGED}{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
        say(f"checkpoint {folder.name} is damaged: {problem}; set aside as {aside.name}, going back to the one before")
    return None


def read_training(folder: Path) -> Training:
    return typed.read(Training, folder / TRAINER)


def sweep(run: Run) -> None:
    """Remove what a kill left half written or half deleted."""
    for pattern in (f"{WRITING}*", f"{OLD}*"):
        for left in run.checkpoints.glob(pattern):
            shutil.rmtree(left)


def prune(run: Run, keeping: Keeping) -> None:
    """Delete what the policy does not keep."""
    known = listed(run)
    best = best_of(known)
    keep = set(known[-keeping.latest :])
    if keeping.milestones:
        keep |= {p for p in known if step_of(p) % keeping.milestones == 0}
    if best is not None and keeping.best:
        keep.add(best)
        point(run, "best", best)
    for folder in known:
        if folder not in keep:
            old = folder.with_name(f"{OLD}{folder.name}")
            os.rename(folder, old)
            shutil.rmtree(old)


def best_of(known: list[Path]) -> Path | None:
    """The checkpoint with the lowest validation nll of its own step, the earlier of equals."""
    judged = [(valid, p) for p in known if (valid := read_training(p).valid)]
    sound = [(valid.nll, p) for valid, p in judged if valid.nll is not None]
    return min(sound, key=lambda pair: pair[0])[1] if sound else None
