"""The model under evaluation: which weights it has, where its answers are stored, and the ranks
that share the work."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from amor.data.tokenizer import tokenizer_hash
from amor.errors import AmorError
from amor.eval.store import Store
from amor.models.amor import Amor
from amor.models.folder import resolve
from amor.records.evals import Model
from amor.records.run import Step
from amor.run import Run

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger("amor")
PATIENCE = timedelta(days=7)  # how long ranks wait for one that has more to read


@dataclass(frozen=True)
class Ranks:
    """The processes that share an evaluation, as torchrun starts them."""

    rank: int = 0  # of this process
    count: int = 1  # of all processes

    @staticmethod
    @contextmanager
    def here() -> Iterator[Ranks]:
        """The ranks of this process; all leave together, lest one break the connections."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            yield Ranks()
            return
        torch.distributed.init_process_group("gloo", timeout=PATIENCE)
        try:
            yield Ranks(torch.distributed.get_rank(), count)
            torch.distributed.barrier()
        finally:
            torch.distributed.destroy_process_group()

    def total(self, *numbers: int) -> list[int]:
        """Sums over all ranks; a barrier."""
        sums = torch.tensor(numbers)
        torch.distributed.all_reduce(sums)
        return sums.tolist()


@dataclass
class EvalSubject:
    """A model to be evaluated."""

    model: Amor
    tokenizer: Tokenizer
    about: Model  # as results name it
    out: Path  # the folder of its results
    rows: int  # contexts per batch
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def fingerprint(self) -> str:
        """Of model and tokenizer."""
        return f"{self.about.fingerprint} {tokenizer_hash(self.tokenizer)}"

    def store(self) -> Store:
        """The store of this rank, with the answers of all ranks in it."""
        rank = f".{self.ranks.rank}" if self.ranks.rank else ""
        own = self.out / f"requests{rank}.jsonl"
        return Store(own, [p for p in sorted(self.out.glob("requests*.jsonl")) if p != own])


def fingerprint(model: Amor) -> str:
    """sha256 of the config and every tensor."""
    digest = hashlib.sha256(model.config.to_json().encode())
    for name, tensor in sorted(model.state_dict().items()):
        t = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {t.dtype} {list(t.shape)}".encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def describe_model(model: Amor, folder: str, untrained: bool) -> Model:
    """The model as results name it: fingerprint, size, and how far it was trained."""
    step, tokens = (0, 0) if untrained else trained_for(resolve(folder))
    return Model(
        name=f"{model.config.name}, untrained" if untrained else model.config.name,
        folder=folder,
        fingerprint=fingerprint(model),
        parameters=sum(p.numel() for p in model.parameters()),
        step=step,
        tokens=tokens,
    )


def trained_for(folder: Path) -> tuple[int | None, int | None]:
    """Steps and tokens a checkpoint was trained for, by the metrics of its run; None: not known."""
    folder = folder.resolve()
    step, run = folder.name.removeprefix("step-"), Run(folder.parent.parent)
    if folder.parent.name != "checkpoints" or not step.isdigit() or not run.metrics.is_file():
        return None, None
    try:
        lines = (line for line in run.lines() if isinstance(line, Step) and line.step == int(step))
        return int(step), next((line.tokens for line in lines), None)
    except AmorError as error:
        log.warning("how many tokens the model was trained on is not known: %s", error)
        return int(step), None
