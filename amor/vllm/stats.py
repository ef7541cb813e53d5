"""Counts of gate decisions while serving: made in the workers, published in vLLM's log and under
/metrics.

The first worker of an engine writes its counts into a small file; the process that serves reads
them there. Every rank decides alike, so the counts of one are those of all.
"""

from __future__ import annotations

import atexit
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from amor.errors import AmorError
from amor.ops.native.owner import others_may_write

if TYPE_CHECKING:
    from amor.vllm.gate import Decider

log = init_logger("vllm.amor")
PAUSE = 1.0  # seconds between two copies of counts from a device: a copy waits for it


@dataclass(frozen=True)
class Counted:
    """Tokens that one block computed (again after a pre-emption too), and where it fired."""

    tokens: int
    fired: int


def counted(vllm_config: VllmConfig, engine: int | None = None) -> list[Counted]:
    """Counts of a running engine so far, one per block; an empty list before the first step."""
    try:
        content = _file(vllm_config, engine).read_bytes()
    except FileNotFoundError:
        return []
    numbers = memoryview(content).cast("q").tolist()
    pairs = zip(numbers[0::2], numbers[1::2], strict=True)
    return [Counted(tokens, fired) for tokens, fired in pairs]


def _file(vllm_config: VllmConfig, engine: int | None = None) -> Path:
    """The file of an engine's counts, in a folder that nobody else can write to."""
    folder = Path(tempfile.gettempdir()) / f"amor-vllm-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if open_to := others_may_write(folder):
        raise AmorError(
            f"counts of gates are not kept in a folder that is not yours alone: {open_to}"
        )
    index = vllm_config.parallel_config.data_parallel_rank if engine is None else engine
    return folder / f"{vllm_config.instance_id}-{index}"


class Ledger:
    """In a worker: the counts of all blocks, written where the serving process finds them."""

    def __init__(self, vllm_config: VllmConfig, deciders: Sequence[Decider]):
        self.deciders = list(deciders) if get_tensor_model_parallel_rank() == 0 else []
        self.published, self.file = 0.0, -1
        if self.deciders:
            path = _file(vllm_config)
            self.file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
            atexit.register(path.unlink, missing_ok=True)

    def publish(self) -> None:
        """Write the counts, from a device at most once per PAUSE."""
        if not self.deciders:
            return
        if self.deciders[0].counts.device.type != "cpu":
            early = time.monotonic() < self.published + PAUSE
            if early or torch.cuda.is_current_stream_capturing():
                return
            self.published = time.monotonic()
        numbers = torch.stack([decider.counts for decider in self.deciders]).cpu()
        os.pwrite(self.file, numbers.numpy().tobytes(), 0)


@cache
def _counters() -> tuple[Counter, Counter]:
    """Made once per process: prometheus refuses a second one of the same name."""
    labels = ["model_name", "engine", "block"]
    return (
        Counter("amor:gate_tokens", "Tokens at which the gate of a block decided.", labels),
        Counter("amor:gate_fired", "Tokens at which the gate of a block fired.", labels),
    )


class GateLogger(StatLoggerBase):
    """vLLM makes one per engine (entry point `vllm.stat_logger_plugins`).

    For models that are not ours it does nothing.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0):
        config = vllm_config.model_config.hf_config
        self.blocks = config.built.blocks.count if config.model_type == "amor" else 0
        self.vllm_config, self.engine = vllm_config, engine_index
        self.known = self.logged = [Counted(0, 0)] * self.blocks

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if not self.blocks:
            return
        now = counted(self.vllm_config, self.engine) or self.known
        names = (
            self.vllm_config.model_config.served_model_name or self.vllm_config.model_config.model
        )
        name = names[0] if isinstance(names, list) else names
        tokens, fired = _counters()
        for block, (old, new) in enumerate(zip(self.known, now, strict=True)):
            tokens.labels(name, str(self.engine), str(block)).inc(new.tokens - old.tokens)
            fired.labels(name, str(self.engine), str(block)).inc(new.fired - old.fired)
        self.known = now

    def log(self) -> None:
        """One line of vLLM's log, about the time since the last."""
        pairs = zip(self.logged, self.known, strict=True)
        since = [(new.tokens - old.tokens, new.fired - old.fired) for old, new in pairs]
        if since and since[0][0]:
            rates = ", ".join(f"{fired / tokens:.1%}" for tokens, fired in since)
            line = "Engine %03d: Gates decided on %d tokens and fired on %s (per block)"
            log.info(line, self.engine, since[0][0], rates)
        self.logged = self.known

    def log_engine_initialized(self) -> None:
        pass
