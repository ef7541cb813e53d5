"""The package as others get it: a plain install holds everything a command needs,
recipes and kernels included."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which the package was installed, not linked, from a copy of the sources."""
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools")
    source, site = tmp_path_factory.mktemp("source") / "amor", tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "amor", source / "amor", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        ROOT / "benchmarks", source / "benchmarks", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--disable-pip-version-check",
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", site, source], check=True
    )
    return site


def run(site, *words):
    environment = os.environ | {"PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, *words],
        cwd=site,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_every_file_of_the_package_is_installed(site):
    held = {
        p.relative_to(ROOT)
        for p in (ROOT / "amor").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert not {p for p in held if not (site / p).is_file()}
    assert Path("amor/recipes/tiny/demo.toml") in held


def test_benchmarks_of_the_project_are_not_installed_and_those_of_a_user_run(site, tmp_path):
    assert not (site / "benchmarks").exists()
    words = [
        "batch",
        "--quick",
        "--rounds",
        "1",
        "--models",
        "mamba2",
        "--weights",
        "int4",
        "--batches",
        "1",
        "--prefill=",
    ]
    out = tmp_path / "batch.json"
    assert "tokens/s" in run(site, "-m", "amor", "bench", *words, "--out", str(out))
    assert json.loads(out.read_text())["commit"] is None


def test_an_installed_package_finds_its_recipes(site):
    code = (
        "import amor.train.recipe as r; print(r.find('tiny/demo'), "
        "r.load('paper/180m').total_steps)"
    )
    where, steps = run(site, "-c", code).split()
    assert Path(where).is_relative_to(site) and steps == "7503"
    assert "amor-mamba2" in run(
        site, "-m", "amor", "train", "tiny/amor-mamba2", "--dry-run", "--flops", "1e12"
    )
