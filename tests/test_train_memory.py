"""Laws of the memory estimate: within a quarter of what a step needs, in seconds,
without allocating the model."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from amor.train.predict import predict
from amor.train.recipe import load

CASES = [
    ("tiny/transformer", ()),
    ("tiny/kda", ()),
    ("tiny/amor-mamba2", ()),
    ("tiny/amor-mamba2", ("recompute=true",)),
    ("tiny/amor-mamba2", ("freeze=backbone",)),
    (
        "tiny/amor-mamba2-mlp",
        ("recompute=true", "model.changes.blocks.count=9"),
    ),  # more in blocks than in a layer
]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
@pytest.mark.parametrize(("recipe", "changes"), CASES)
def test_activations_are_within_a_quarter_of_the_measured_peak(recipe, changes):
    changes = [*changes, "micro_batch=8"]
    script = Path(__file__).with_name("peak_memory.py")
    given = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(
        [sys.executable, script, recipe, *changes],
        env=given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert predict(load(recipe, changes), 1e12, "given").memory.activations == pytest.approx(
        int(run.stdout), rel=0.25
    )


def peak_resident():
    """Bytes, of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("model", ["amor-mamba2", "amor-gated-deltanet-gain"])
def test_the_largest_recipe_is_predicted_in_seconds_without_its_weights(model):
    resident, before = peak_resident(), time.process_time()
    memory = predict(load("paper/1.5b", (), model), 1e14, "given").memory
    assert time.process_time() - before < 10
    assert peak_resident() - resident < 1e9
    assert memory.total == memory.weights + memory.gradients + memory.optimiser + memory.activations
    assert memory.weights == memory.gradients == memory.optimiser // 2 > 6e9


def test_activations_grow_with_the_tokens_of_a_micro_batch_and_not_with_the_batch():
    def kept(*changes):
        return predict(load("tiny/amor-mamba2", changes), 1e12, "given").memory.activations

    head = 4 * 4096 * 256  # the gradient of the head's weights, once
    assert kept("micro_batch=8") - head == pytest.approx(2 * (kept("micro_batch=4") - head))
    assert kept("micro_batch=8", "context=512") - head == pytest.approx(
        4 * (kept("micro_batch=4") - head)
    )
    assert kept("micro_batch=8", "batch=64") == kept("micro_batch=8")
