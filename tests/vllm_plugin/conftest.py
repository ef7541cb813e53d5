"""Laws that need vLLM: run by `make test-vllm` in an environment of its own, never by `make
test` (pyproject: norecursedirs).

Where vLLM is missing the import below fails, so nothing here can be
taken for passed that was not run.
"""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
    "0"  # engines in this process: started in seconds, not a minute
)
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = (
    "nobind"  # two ranks on one socket are told cores by hand otherwise
)
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import pytest
import vllm  # noqa: F401
from serving import exported, small_model


@pytest.fixture(scope="session")
def entropy_model(tmp_path_factory):
    """The paper's model, small, and its folder."""
    model = small_model("amor-mamba2")
    return model, exported(model, tmp_path_factory.mktemp("entropy"))
