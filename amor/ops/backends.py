"""Which implementation of an operator runs: chosen per call by the tensor's device and logged once.

AMOR_KERNELS forces the choice: a backend name for every operator that has it ("reference",
"chunked", "fla"), or pairs ("scan=chunked,head=reference"). A backend forced but unusable is an
error; "auto" takes the first usable one. A backend is amor/ops/<op>/<backend>.py with the
reference's functions and a `missing()` that returns why it cannot run here, or None.
"""

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

from amor.errors import AmorError, nearest
from amor.ops import native

log = logging.getLogger("amor")


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator."""

    name: str  # of its module
    devices: tuple[str, ...]  # types of torch devices that it runs on


ANYWHERE = ("cpu", "cuda", "xpu", "mps", "meta")
# operator -> backends, the fastest first
BACKENDS: dict[str, tuple[Backend, ...]] = {
    "scan": (
        Backend("native", ("cpu",)),
        Backend("mamba_ssm", ("cuda",)),
        Backend("fla", ("cuda",)),
        Backend("chunked", ANYWHERE),
        Backend("reference", ANYWHERE),
    ),
    "delta": (
        Backend("native", ("cpu",)),
        Backend("fla", ("cuda",)),
        Backend("chunked", ANYWHERE),
        Backend("reference", ANYWHERE),
    ),
    "conv": (Backend("native", ("cpu",)), Backend("reference", ANYWHERE)),
    "gated_norm": (Backend("native", ("cpu",)), Backend("reference", ANYWHERE)),
    "linear": (Backend("native", ("cpu",)), Backend("reference", ANYWHERE)),
    "rowwise": (Backend("native", ("cpu",)), Backend("reference", ANYWHERE)),
    "head": (
        Backend("native", ("cpu",)),
        Backend("triton", ("cuda",)),
        Backend("chunked", ANYWHERE),
        Backend("reference", ANYWHERE),
    ),
    "attend": (
        Backend("native", ("cpu",)),
        Backend("masked", ANYWHERE),
        Backend("reference", ANYWHERE),
    ),
    "product": (Backend("native", ("cpu",)), Backend("reference", ANYWHERE)),
}


def wishes(text: str) -> dict[str, str]:
    """AMOR_KERNELS as operator -> backend; operators not named are chosen automatically."""
    every = {backend.name for backends in BACKENDS.values() for backend in backends}
    wanted: dict[str, str] = {}
    for word in filter(None, (w.strip() for w in text.split(","))):
        op, _, name = word.rpartition("=")
        if name == "auto":
            continue
        if name not in every or (op and op not in BACKENDS):
            choices = [f"{o}={b.name}" for o, bs in BACKENDS.items() for b in bs] + sorted(every)
            raise AmorError(f"AMOR_KERNELS: no {word!r}; {nearest(word, choices)}")
        for target in [op] if op else BACKENDS:
            if any(backend.name == name for backend in BACKENDS[target]):
                wanted[target] = name
            elif op:
                hint = nearest(name, [b.name for b in BACKENDS[op]])
                raise AmorError(f"AMOR_KERNELS: {op} has no {name!r}; {hint}")
    return wanted


@contextmanager
def kernels(words: str) -> Iterator[None]:
    """AMOR_KERNELS with these words added, for as long as a `with` lasts."""
    before = os.environ.get("AMOR_KERNELS")
    os.environ["AMOR_KERNELS"] = ",".join(filter(None, (before, words)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["AMOR_KERNELS"]
        else:
            os.environ["AMOR_KERNELS"] = before


def module(op: str, backend: str) -> ModuleType:
    """The module of a backend, amor.ops.<op>.<backend>."""
    return importlib.import_module(f"amor.ops.{op}.{backend}")


def missing(op: str, backend: Backend, device: str) -> str | None:
    """Why a backend cannot serve tensors of a device here, or None."""
    if device not in backend.devices:
        return f"runs on {', '.join(backend.devices)} only"
    reason = getattr(module(op, backend.name), "missing", None)
    return reason() if reason else None


@cache
def _choose(op: str, device: str, forced: str) -> tuple[str, str]:
    """The backend and why."""
    wanted = wishes(forced).get(op)
    reasons: list[str] = []
    for backend in BACKENDS[op]:
        if wanted and backend.name != wanted:
            continue
        why_not = missing(op, backend, device)
        if why_not is None:
            why = "forced by AMOR_KERNELS" if wanted else "; ".join(reasons) or "the fastest"
            log.info("%s on %s: %s (%s)", op, device, backend.name, why)
            return backend.name, why
        if wanted:
            raise AmorError(
                f"AMOR_KERNELS asks for {op}={wanted}, which cannot run on {device}: {why_not}"
            )
        reasons.append(f"{backend.name}: {why_not}")
    raise AmorError(f"no backend of {op} runs on {device}: {'; '.join(reasons)}")


def choice(op: str, device: str) -> tuple[str, str]:
    """The backend that serves an operator on a device, and why."""
    return _choose(op, device, os.environ.get("AMOR_KERNELS", ""))


@cache
def _serving(op: str, device: str, forced: str) -> ModuleType:
    name, _ = _choose(op, device, forced)
    fastest = BACKENDS[op][0]
    if fastest.name == "native" != name and device in fastest.devices:
        native.warn_slow(missing(op, fastest, device) or "")
    return module(op, name)


def backend(op: str, tensor: torch.Tensor) -> ModuleType:
    """The module that serves an operator for a tensor."""
    return _serving(op, tensor.device.type, os.environ.get("AMOR_KERNELS", ""))
