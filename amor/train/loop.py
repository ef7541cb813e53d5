"""The loop: for each step forward, backward, update; now and then evaluate, save, tell.

    ended = train(recipe, "runs/first", observers=[Lines()])

A run that was stopped, by whatever, goes on from its newest good checkpoint when the same is called again, and on the same
CPU with the same threads and builds ends with the same bits as one that was never stopped.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from amor.errors import AmorError, nearest
from amor.judge.evaluate import evaluate
from amor.judge.windows import BatchWindows
from amor.models.amor import Amor
from amor.models.build import build
from amor.models.folder import load_model
from amor.records.run import EvalTiming, Evaluated, Event, Judged, Machine, Step, StepTiming
from amor.run import Run
from amor.train import checkpoint, resume
from amor.train.data import Data
from amor.train.distributed import Team, form
from amor.train.freeze import described, freeze
from amor.train.optim import adamw, describe, groups
from amor.train.reached import STEPS, Reached
from amor.train.recipe import Recipe
from amor.train.step import Stepper
from amor.train.stop import Stop
from amor.train.trouble import Spikes, UnsoundError, first_unsound
from amor.train.watch import Begun, Ended, Observer, Record, Saved


def train(
    recipe: Recipe,
    out: str | Path,
    observers: Iterable[Observer] = (),
    go_on: str = "auto",  # "auto": if there is a checkpoint; "yes": there must be one; "no": the folder must be new
    machine: Machine | None = None,
) -> Ended:
    """Train to the end of the recipe, or until asked to stop."""
    team = form(recipe.distributed, recipe.device)
    try:
        run = Run(out)
        told = [Record(run), *observers] if team.leads else []
        return Trainer(recipe, run, team, told, machine or Machine()).go(go_on)
    except OSError as error:  # a disk that is full or gone; anything trained since the last checkpoint is trained again
        if not checkpoint.of_the_disk(error):
            raise
        words = f"{error.filename or out}: {error.strerror or error}; mend that and run the same command again: it resumes"
        raise AmorError(words) from error
    finally:
        team.close()


class Trainer:
    """One run: what it is made of, and the loop over its steps."""

    def __init__(self, recipe: Recipe, run: Run, team: Team, observers: Sequence[Observer], machine: Machine):
        self.recipe, self.run, self.team, self.observers, self.machine = recipe, run, team, observers, machine
        self.steps = recipe.total_steps
        self.done = 0  # optimiser steps taken
        self.saved = -1  # the step of the newest checkpoint
        self.valid: Judged | None = None  # the last evaluation, with its step
        self.reached: Reached | None = None  # of a run with frozen parts: which of the others gradients have reached

    def go(self, go_on: str) -> Ended:
        self.data = Data.open(self.recipe, self.team)
        found = self.begin(go_on)
        self.assemble(found)
        self.tell("on_start", self.about())
        with Stop(self.team) as stop:
            stopped = self.loop(stop)
        ended = Ended(
            done=self.done == self.steps,
            step=self.done,
            folder=str(self.run.folder),
            exit=stop.code if stopped else None,
            stopped_by=stop.name if stopped else None,
            valid=self.valid,
        )
        self.tell("on_end", ended)
        return ended

    def loop(self, stop: Stop) -> bool:
        """Step by step to the end; True if it was asked to stop before."""
        while self.done < self.steps:
            self.step()
            stopping = stop.asked()
            if self.due(self.recipe.eval.every):
                self.judge()
            if self.due(self.recipe.checkpoint.every) or stopping:
                self.save()
            if stopping and self.done < self.steps:
                self.event(
                    "stopped",
                    f"{stop.name}: stopped after step {self.done} of {self.steps}, checkpoint written; "
                    f"the same command with --out {self.run.folder} goes on from here",
                )
                return True
        return False

    def due(self, every: int) -> bool:
        """At every so many steps, and at the end."""
        return bool(every) and (self.done % every == 0 or self.done == self.steps)

    def step(self) -> None:
        started = time.perf_counter()
        try:
            found = self.stepper(self.done)
        except UnsoundError as error:
            raise self.unsound(error) from error
        self.done += 1
        seconds = time.perf_counter() - started
        self.look_at_gradients()
        if found.spike:
            self.event("spike", f"step {self.done}: gradient norm {found.norm:.3g} is a spike; the step was {found.spike}")
        line = Step(
            step=self.done,
            loss=found.loss,
            lr=found.lr,
            grad_norm=found.norm,
            tokens=self.done * self.recipe.step_tokens,
            timing=StepTiming(seconds=seconds, tokens_per_second=self.recipe.step_tokens / seconds, time=time.time()),
            spike=found.spike,
            blocks=found.blocks,
        )
        self.tell("on_step", line)

    def look_at_gradients(self) -> None:
        """Of a run with frozen parts: whether they arrive, until they do."""
        if self.reached is None or self.stepper.updates > STEPS:
            return
        self.reached.look(self.model)
        found = {"tensors": len(self.reached.names), "silent": self.reached.silent, "missing": self.reached.missing}
        self.event("gradients", self.reached.told(self.done), step=self.done, now=found)
        if not self.reached.silent:
            self.reached = None

    def judge(self) -> None:
        if self.data.valid is None:
            return
        started = time.perf_counter()
        mine = BatchWindows(self.data.valid, *self.team.own_rows(self.data.valid.batch), self.stepper.apart)
        found = evaluate(self.model, mine, self.recipe.micro_batch, self.stepper.forward, self.team.sum)
        self.valid = Judged(step=self.done, **msgspec.structs.asdict(found))
        timing = EvalTiming(seconds=time.perf_counter() - started)
        self.tell("on_eval", Evaluated(step=self.done, valid=found, timing=timing))

    def save(self) -> None:
        if self.saved == self.done:
            return
        started = time.perf_counter()
        trainer = checkpoint.Training(
            step=self.done,
            updates=self.stepper.updates,
            norms=tuple(self.stepper.spikes.norms),
            data=self.data.train.fingerprint,
            valid=self.valid if self.valid and self.valid.step == self.done else None,
        )
        folder = checkpoint.save(self.run, self.team, self.model, self.optimizer, trainer, self.data.tokenizer)
        self.saved = self.done
        if self.team.leads:
            checkpoint.prune(self.run, self.recipe.checkpoint)
        self.tell("on_checkpoint", Saved(self.done, str(folder), time.perf_counter() - started))

    def begin(self, go_on: str) -> Path | None:
        """Make the run directory, or find the checkpoint to go on from."""
        if go_on not in resume.CHOICES:
            raise AmorError(f"resume: no {go_on!r}; {nearest(go_on, resume.CHOICES)}")
        if go_on == "no" and self.run.used:
            raise AmorError(f"{self.run.folder} holds a run already; give another --out, or let it resume")
        found = None
        if self.team.leads and self.run.used:
            checkpoint.sweep(self.run)
            changed = resume.differences(resume.recipe_of(self.run), self.recipe)
            found = checkpoint.newest_good(self.run, lambda words: self.event("damaged", words))
            checkpoint.prune(self.run, self.recipe.checkpoint)
            for key, (was, now) in changed.items() if found else ():
                self.event("changed", f"{key} was {was!r} and is {now!r} from here on", key=key, was=was, now=now)
        found = self.team.broadcast(found)
        if go_on == "yes" and found is None:
            raise AmorError(f"{self.run.folder} holds no checkpoint to resume from; leave --resume away to start")
        if self.team.leads:
            self.run.make()
            self.run.write_config(self.recipe.to_dict())
            self.run.write(self.run.machine, self.machine)
        return found

    def assemble(self, found: Path | None) -> None:
        """Model, optimiser and stepper: fresh, or as a checkpoint has them."""
        trainer = checkpoint.read_training(found) if found else checkpoint.Training(step=0, updates=0, norms=(), data="")
        if found:
            self.data.train.check(trainer.data)
        self.model: Amor = load_model(found) if found else first_model(self.recipe)
        freeze(self.model, self.recipe.freeze)
        self.model.backbone.recompute = self.recipe.recompute
        self.team.place(self.model)
        if self.recipe.compile:
            compile_layers(self.model, self.team.device)
        self.groups = groups(self.model, self.recipe.optimiser, self.recipe.lr)
        self.optimizer = adamw(self.groups, self.recipe.optimiser)
        self.stepper = Stepper(self.model, self.optimizer, self.recipe, self.data.train, self.team, self.data.end_of_text)
        self.done, self.stepper.updates = trainer.step, trainer.updates
        watched = self.recipe.freeze != "none" and trainer.updates < STEPS
        self.reached = Reached(self.model, self.team.full_tensor) if watched else None
        self.stepper.spikes = Spikes(self.recipe.optimiser.spike, trainer.norms)
        if self.team.leads:
            self.run.rewind(self.done)
        if found:
            checkpoint.load_moments(found, self.model, self.optimizer, trainer.updates, self.team)
            self.saved, self.valid = self.done, trainer.valid
            self.event("resumed", f"going on from {found.name} ({self.steps - self.done:,} steps to go)", step=self.done)

    def about(self) -> Begun:
        parameters = sum(p.numel() for p in self.model.parameters())
        team, recipe = self.team, self.recipe
        where = f"{recipe.precision} on {team.world} x {team.device.type}" + (
            f" ({recipe.distributed})" if team.world > 1 else ""
        )
        folder = str(self.run.folder)
        return Begun(
            recipe,
            self.model.config.name,
            parameters,
            describe(self.groups) + described(self.model),
            self.done,
            self.steps,
            folder,
            where,
        )

    def unsound(self, error: UnsoundError) -> AmorError:
        """Name what is not finite, keep the batch, and save what was good before it."""
        pieces = list(self.stepper.pieces(error.step))
        where = first_unsound(self.model, lambda: [self.stepper.read(part, 1.0) for part in pieces], self.team.full_tensor)
        where = min(self.team.gather_objects(where), key=lambda words: words == "the loss itself")
        folder = self.run.failures / f"step-{error.step + 1:06d}"
        if self.team.leads:
            keep_batch(folder, self.data.train.rows(error.step, 0, self.recipe.batch))
            known = {"loss": str(error.loss), "grad_norm": str(error.norm), "first": where}
            self.run.write(folder / "failure.json", {"step": error.step + 1, "rows": [0, self.recipe.batch], **known})
        if self.done and not where.startswith("parameter"):
            self.save()
        words = (
            f"{error}; the first number that is not finite: {where}. No weight was changed; the batch is kept in {folder}. "
            "The same command tries this step again; to go on differently change the recipe, e.g. --set lr.peak=..."
        )
        self.event("unsound", words, step=error.step + 1)
        return AmorError(words)

    def tell(self, moment: str, about: Any) -> None:
        for observer in self.observers:
            getattr(observer, moment)(about)

    def event(self, kind: str, message: str, **more: Any) -> None:
        self.tell("on_event", Event(event=kind, message=message, **more))


def first_model(recipe: Recipe) -> Amor:
    """Fresh weights, or those of a folder."""
    if not recipe.model.start:
        return build(recipe.config(), recipe.seed)
    model = load_model(recipe.model.start)
    if model.embed.weight.dtype != torch.float32:
        raise AmorError(f"{recipe.model.start} is in {model.embed.weight.dtype}; training starts from float32 weights")
    model.config = recipe.config()
    return model


def keep_batch(folder: Path, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({"tokens": rows[0], "targets": rows[1]}, folder / "batch.safetensors")


def compile_layers(model: Amor, device: torch.device) -> None:
    """torch.compile every layer, on a GPU: on two CPU cores it was no faster, and it cannot trace operators in C++."""
    if device.type == "cpu":
        raise AmorError("compile = true is for GPUs: on a CPU the operators are C++ of our own; leave it false")
    for layer in model.backbone.layers:
        layer.compile()
