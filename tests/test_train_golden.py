"""The losses of twenty steps of every tiny recipe, held as they were; a change
of numbers anywhere shows here.

After a change that is meant to move them: python tests/test_train_golden.py
"""

import json
import tempfile
from pathlib import Path

import pytest
from training import Watch, corpus

from amor.presets import NAMES
from amor.train.loop import train
from amor.train.recipe import load

GOLDEN = Path(__file__).parent / "golden" / "losses.json"
STEPS = 20
# losses of float32 runs on different processors and kernels part by rounding,
# which twenty steps enlarge a little
TOLERANCE = {"float32": 1e-4}


def losses(name: str, data: Path, out: Path) -> list[float]:
    """The tiny recipe with short rows and small batches; the model is the recipe's own."""
    watch = Watch()
    changes = [
        "context=32",
        "batch=2",
        "micro_batch=2",
        "lr.warmup=5",
        "eval.every=0",
        f"checkpoint.every={STEPS}",
    ]
    train(load(f"tiny/{name}", changes, data=str(data), steps=STEPS), out, observers=[watch])
    return [line.loss for line in watch.steps]


@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_of_a_tiny_recipe_have_the_losses_they_had(prepared, tmp_path, name):
    held = json.loads(GOLDEN.read_text())[name]
    assert losses(name, prepared, tmp_path / "run") == pytest.approx(held, rel=TOLERANCE["float32"])


def test_the_losses_held_are_of_every_architecture_and_fall():
    """So a golden file made by a model that learns nothing is not taken over unseen."""
    found = json.loads(GOLDEN.read_text())
    assert set(found) == set(NAMES)
    for name, held in found.items():
        assert len(held) == STEPS and held[-1] < held[0] - 2, name


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        text = corpus(Path(folder) / "corpus")
        found = {name: losses(name, text, Path(folder) / name) for name in NAMES}
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {GOLDEN}")
