"""The training loop: for each step forward, backward, update; now and then evaluate and save.

    ended = train(recipe, "runs/first", observers=[Lines()])

A run that was stopped, by whatever, resumes from its newest good checkpoint when the same is called
again, and on the same CPU with the same threads and builds ends with the same bits as one that was
never stopped.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch

from amor import tensors as on_disk
from amor.errors import AmorError, nearest
from amor.files import locked
from amor.judge.evaluate import evaluate
from amor.judge.windows import BatchWindows
from amor.models.amor import Amor
from amor.models.build import build
from amor.models.folder import load_model
from amor.records.run import EvalTiming, Evaluated, Event, Judged, Machine, Step, StepTiming
from amor.run import Run
from amor.train import checkpoint, resume, retention
from amor.train.data import TrainingData
from amor.train.distributed import World, init_world
from amor.train.optim import adamw, describe, freeze, groups
from amor.train.recipe import Recipe
from amor.train.step import Stepper
from amor.train.stop import Stop
from amor.train.trouble import STEPS, GradientCheck, NonFiniteError, Spikes, first_non_finite
from amor.train.watch import CheckpointSaved, MetricsWriter, Observer, RunEnded, RunStarted

LOCK = "train.lock"
NOTHING = "{} holds no checkpoint to resume from; leave --resume away to start"


def train(
    recipe: Recipe,
    out: str | Path,
    observers: Iterable[Observer] = (),
    go_on: str = "auto",
    machine: Machine | None = None,
) -> RunEnded:
    """Train to the end of the recipe, or until a signal to stop.

    out: the run directory. observers: called on rank 0. machine: written to RUN/machine.json.
    go_on: "auto" resumes if there is a checkpoint; "yes": there must be one; "no": `out` must be
        new.
    """
    world = init_world(recipe.distributed, recipe.device)
    try:
        run = Run(out)
        watching = [MetricsWriter(run), *observers] if world.is_main else []
        return Trainer(recipe, run, world, watching, machine or Machine()).go(go_on)
    except OSError as error:
        if error.errno is None:  # not the system's: e.g. a shared library that cannot be loaded
            raise
        # a disk that is full or gone; steps since the last checkpoint will be trained again
        raise AmorError(
            f"{error.filename or out}: {error.strerror or error}; "
            "mend that and run the same command again: it resumes"
        ) from error
    finally:
        world.close()


class Trainer:
    """One run: its model, optimiser and data, and the loop over its steps."""

    def __init__(
        self,
        recipe: Recipe,
        run: Run,
        world: World,
        observers: Sequence[Observer],
        machine: Machine,
    ):
        self.recipe, self.run, self.world, self.machine = recipe, run, world, machine
        self.observers = observers
        self.steps = recipe.total_steps
        self.done = 0  # optimiser steps taken
        self.saved = -1  # the step of the newest checkpoint
        self.valid: Judged | None = None  # the last evaluation, with its step
        # in the first steps of a run with frozen parts
        self.gradient_check: GradientCheck | None = None

    def go(self, go_on: str) -> RunEnded:
        """The whole run; go_on as in `train`."""
        self.data = TrainingData.open(self.recipe, self.world)
        self.check_choice(go_on)
        one_writer = locked(self.run.folder, LOCK, "amor train")
        with one_writer if self.world.is_main else nullcontext():
            return self.train(go_on)

    def train(self, go_on: str) -> RunEnded:
        """The run, while no other process writes its folder."""
        self.assemble(self.open_folder(go_on))
        started = self.about()
        self.notify(lambda observer: observer.on_start(started))
        with Stop(self.world) as stop:
            stopped = self.loop(stop)
        ended = RunEnded(
            done=self.done == self.steps,
            step=self.done,
            folder=str(self.run.folder),
            exit=stop.code if stopped else None,
            stopped_by=stop.name if stopped else None,
            valid=self.valid,
        )
        self.notify(lambda observer: observer.on_end(ended))
        return ended

    def loop(self, stop: Stop) -> bool:
        """Step by step to the end; True if a signal stopped it before."""
        while self.done < self.steps:
            self.step()
            stopping = stop.requested()
            if self.due(self.recipe.eval.every):
                self.evaluate()
            if self.due(self.recipe.checkpoint.every) or stopping:
                self.save()
            if stopping and self.done < self.steps:
                self.event(
                    "stopped",
                    f"{stop.name}: stopped after step {self.done} of {self.steps}, "
                    "checkpoint written; "
                    f"the same command with --out {self.run.folder} goes on from here",
                )
                return True
        return False

    def due(self, every: int) -> bool:
        """At every multiple of so many steps, and at the end; never if `every` is 0."""
        return bool(every) and (self.done % every == 0 or self.done == self.steps)

    def step(self) -> None:
        """One optimiser step and its line of metrics."""
        started = time.perf_counter()
        try:
            result = self.stepper(self.done)
        except NonFiniteError as error:
            raise self.non_finite(error) from error
        self.done += 1
        seconds = time.perf_counter() - started
        self.check_gradients()
        if result.spike:
            self.event(
                "spike",
                f"step {self.done}: gradient norm {result.norm:.3g} is a spike; "
                f"the step was {result.spike}",
            )
        rate = self.recipe.step_tokens / seconds
        line = Step(
            step=self.done,
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.norm,
            tokens=self.done * self.recipe.step_tokens,
            timing=StepTiming(seconds=seconds, tokens_per_second=rate, time=time.time()),
            spike=result.spike,
            blocks=result.blocks,
        )
        self.notify(lambda observer: observer.on_step(line))

    def check_gradients(self) -> None:
        """With frozen parts: whether every trained tensor gets a gradient, until all do."""
        check = self.gradient_check
        if check is None or self.stepper.updates > STEPS:
            return
        check.update(self.model)
        counts = {"tensors": len(check.names), "silent": check.silent, "missing": check.missing}
        self.event("gradients", check.summary(self.done), step=self.done, now=counts)
        if not check.silent:
            self.gradient_check = None

    def evaluate(self) -> None:
        """Judge the model on the validation windows, where there are any."""
        if self.data.valid is None:
            return
        started = time.perf_counter()
        rows = self.world.local_rows(self.data.valid.batch)
        windows = BatchWindows(self.data.valid, *rows, self.stepper.apart)
        scores = evaluate(
            self.model, windows, self.recipe.micro_batch, self.stepper.forward, self.world.sum
        )
        self.valid = Judged(step=self.done, **msgspec.structs.asdict(scores))
        timing = EvalTiming(seconds=time.perf_counter() - started)
        evaluated = Evaluated(step=self.done, valid=scores, timing=timing)
        self.notify(lambda observer: observer.on_eval(evaluated))

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one, and delete those no longer kept."""
        if self.saved == self.done:
            return
        started = time.perf_counter()
        state = checkpoint.TrainerState(
            step=self.done,
            updates=self.stepper.updates,
            norms=tuple(self.stepper.spikes.norms),
            data=self.data.train.fingerprint,
            valid=self.valid if self.valid and self.valid.step == self.done else None,
        )
        folder = checkpoint.save(
            self.run, self.world, self.model, self.optimizer, state, self.data.tokenizer
        )
        self.saved = self.done
        if self.world.is_main:
            retention.prune(self.run, self.recipe.checkpoint)
        saved = CheckpointSaved(self.done, str(folder), time.perf_counter() - started)
        self.notify(lambda observer: observer.on_checkpoint(saved))

    def check_choice(self, go_on: str) -> None:
        """Refuse to start in a run that exists, or to resume one that does not."""
        if go_on not in resume.CHOICES:
            raise AmorError(f"resume: no {go_on!r}; {nearest(go_on, resume.CHOICES)}")
        if go_on == "no" and self.run.used:
            raise AmorError(
                f"{self.run.folder} holds a run already; give another --out, or let it resume"
            )
        if go_on == "yes" and not self.run.used:
            raise AmorError(NOTHING.format(self.run.folder))

    def open_folder(self, go_on: str) -> Path | None:
        """Make the run directory; the checkpoint to resume from, if there is one."""
        newest = None
        if self.world.is_main and self.run.used:
            retention.sweep(self.run)
            changed = resume.differences(resume.recipe_of(self.run), self.recipe)
            newest = retention.newest_good(self.run, lambda text: self.event("damaged", text))
            retention.prune(self.run, self.recipe.checkpoint)
            for key, (was, now) in changed.items() if newest else ():
                text = f"{key} was {was!r} and is {now!r} from here on"
                self.event("changed", text, key=key, was=was, now=now)
        newest = self.world.broadcast(newest)
        if go_on == "yes" and newest is None:
            raise AmorError(NOTHING.format(self.run.folder))
        if self.world.is_main:
            self.run.make()
            self.run.write_config(self.recipe.to_dict())
            self.run.write(self.run.machine, self.machine)
        return newest

    def assemble(self, newest: Path | None) -> None:
        """Model, optimiser and stepper: fresh, or from a checkpoint."""
        state = checkpoint.TrainerState(step=0, updates=0, norms=(), data="")
        if newest:
            state = checkpoint.read_training(newest)
            self.data.train.check(state.data)
        self.model: Amor = load_model(newest) if newest else first_model(self.recipe)
        freeze(self.model, self.recipe.freeze)
        self.model.backbone.recompute = self.recipe.recompute
        self.world.place(self.model)
        if self.recipe.compile:
            compile_layers(self.model, self.world.device)
        self.groups = groups(self.model, self.recipe.optimiser, self.recipe.lr)
        self.optimizer = adamw(self.groups, self.recipe.optimiser)
        source, end_of_text = self.data.train, self.data.end_of_text
        self.stepper = Stepper(
            self.model, self.optimizer, self.recipe, source, self.world, end_of_text
        )
        self.done, self.stepper.updates = state.step, state.updates
        if self.recipe.freeze != "none" and state.updates < STEPS:
            self.gradient_check = GradientCheck(self.model, self.world.full_tensor)
        self.stepper.spikes = Spikes(self.recipe.optimiser.spike, state.norms)
        if self.world.is_main:
            self.run.rewind(self.done)
        if newest:
            checkpoint.load_moments(newest, self.model, self.optimizer, state.updates, self.world)
            self.saved, self.valid = self.done, state.valid
            left = f"{self.steps - self.done:,} steps to go"
            self.event("resumed", f"going on from {newest.name} ({left})", step=self.done)

    def about(self) -> RunStarted:
        """What observers get before the first step."""
        world, recipe = self.world, self.recipe
        where = f"{recipe.precision} on {world.size} x {world.device.type}"
        return RunStarted(
            recipe=recipe,
            model=self.model.config.name,
            parameters=sum(p.numel() for p in self.model.parameters()),
            groups=describe(self.model, self.groups),
            step=self.done,
            steps=self.steps,
            folder=str(self.run.folder),
            where=where + (f" ({recipe.distributed})" if world.size > 1 else ""),
        )

    def non_finite(self, error: NonFiniteError) -> AmorError:
        """Name what is not finite, keep the batch, and save the weights, which are still good."""
        batches = list(self.stepper.micro_batches(error.step))

        def again() -> None:
            for batch in batches:
                self.stepper.read(batch, 1.0)

        first = first_non_finite(self.model, again, self.world.full_tensor)
        first = min(self.world.gather_objects(first), key=lambda where: where == "the loss itself")
        folder = self.run.failures / f"step-{error.step + 1:06d}"
        if self.world.is_main:
            keep_batch(folder, self.data.train.rows(error.step, 0, self.recipe.batch))
            numbers = {"loss": str(error.loss), "grad_norm": str(error.norm), "first": first}
            facts = {"step": error.step + 1, "rows": [0, self.recipe.batch], **numbers}
            self.run.write(folder / "failure.json", facts)
        if self.done and not first.startswith("parameter"):
            self.save()
        text = (
            f"{error}; the first number that is not finite: {first}. No weight was changed; "
            f"the batch is kept in {folder}. The same command tries this step again; "
            "to go on differently change the recipe, e.g. --set lr.peak=..."
        )
        self.event("non_finite", text, step=error.step + 1)
        return AmorError(text)

    def event(self, kind: str, message: str, **more: Any) -> None:
        """Something out of the ordinary, for every observer; more: fields of `Event`."""
        event = Event(event=kind, message=message, **more)
        self.notify(lambda observer: observer.on_event(event))

    def notify(self, call: Callable[[Observer], None]) -> None:
        """Call a method of every observer, in their order."""
        for observer in self.observers:
            call(observer)


def first_model(recipe: Recipe) -> Amor:
    """A model with fresh weights, or with those of the folder model.start."""
    if not recipe.model.start:
        return build(recipe.config(), recipe.seed)
    model = load_model(recipe.model.start)
    dtype = model.embed.weight.dtype
    if dtype != torch.float32:
        raise AmorError(f"{recipe.model.start} is in {dtype}; training starts from float32 weights")
    model.config = recipe.config()
    return model


def keep_batch(folder: Path, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Write tokens and targets of a batch to folder/batch.safetensors, to replay it."""
    folder.mkdir(parents=True, exist_ok=True)
    on_disk.write(folder / "batch.safetensors", {"tokens": rows[0], "targets": rows[1]})


def compile_layers(model: Amor, device: torch.device) -> None:
    """torch.compile every layer, on a GPU only.

    On two CPU cores it was no faster, and it cannot trace operators in C++.
    """
    if device.type == "cpu":
        raise AmorError(
            "compile = true is for GPUs: on a CPU the operators are C++ of our own; leave it false"
        )
    for layer in model.backbone.layers:
        layer.compile()
