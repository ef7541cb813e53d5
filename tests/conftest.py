"""One thread a process: small models run faster so, and two test processes
do not wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# some virtual machines announce units for bf16 products (AMX) that they do not have: oneDNN
# would die of an illegal instruction
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """A folder of prepared data, small and invented: train/ and valid/."""
    from training import corpus

    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def fresh_memory_is_poisoned():
    """Memory that nobody wrote to holds NaN, so that reading it shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
