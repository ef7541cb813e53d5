"""The machine: a description, and its measured ceilings (matrix products per second, bytes read per
second)."""

import os
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from amor.bench.timing import best
from amor.records.run import Machine
from amor.threads import waiting

GEMM_SIZE = 1536  # three matrices of 9 MB: large enough for the full rate, 0.1 s per round
READ_BYTES = 512 * 2**20  # much larger than any cache


def describe() -> Machine:
    """The machine, its threads and the versions that run on it, without measuring anything."""
    import amor

    return Machine(
        cpu=cpu_model(),
        cores=available_cores(),
        threads=torch.get_num_threads(),
        waiting=waiting(),
        memory_gb=round(total_memory() / 2**30, 1),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),  # torch's own subclass of str
        simd=torch.backends.cpu.get_cpu_capability(),
        amor=amor.__version__,
        gpus=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
    )


def available_cores() -> int | None:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def cpu_model() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def total_memory() -> int:
    """Bytes of main memory, 0 where the system does not report it."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@cache
def gemm_rate(rounds: int = 7) -> float:
    """GFLOP/s of a square float32 matrix product, the best of several rounds."""
    a, b = torch.randn(GEMM_SIZE, GEMM_SIZE), torch.randn(GEMM_SIZE, GEMM_SIZE)
    out = torch.empty(GEMM_SIZE, GEMM_SIZE)
    return 2 * GEMM_SIZE**3 / best(lambda: torch.mm(a, b, out=out), rounds) / 1e9


@cache
def bandwidth(rounds: int = 7) -> float:
    """GB/s read from main memory by all threads: the best of several rounds of three ways to
    read."""
    from amor.ops.product import native
    from amor.ops.product.pages import use_huge_pages

    data = torch.ones(READ_BYTES // 4)
    use_huge_pages([data])  # like the weights of a packed model
    ways: list[Callable[[], Any]] = [data.sum, data.amax]
    if native.missing() is None:
        ways.append(lambda: native.stream(data))
    return max(READ_BYTES / best(read, rounds) / 1e9 for read in ways)
