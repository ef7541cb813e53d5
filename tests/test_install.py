"""A plain install of the package holds all that a command needs, kernels included."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from amor.errors import install_hint

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
    code = "import amor.train.recipe as r; "
    code += "print(r.find('tiny/demo'), r.load('paper/180m').total_steps)"
    where, steps = run(site, "-c", code).split()
    assert Path(where).is_relative_to(site) and steps == "7503"
    assert "amor-mamba2" in run(
        site, "-m", "amor", "train", "tiny/amor-mamba2", "--dry-run", "--flops", "1e12"
    )


def test_a_missing_package_is_answered_by_a_command_that_can_work():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = set()
    for path in (ROOT / "amor").rglob("*.py"):
        text = path.read_text()
        # no index has amor, so a name without a place installs nothing, or another's package
        assert not re.search(r"pip install ['\"]?amor(\[\w+\])?(?! @)['\"\s]", text), path
        named |= set(re.findall(r"install_hint\(['\"](\w+)['\"]\)", text))
    assert named >= {"data", "demo", "eval", "hf", "llama", "peers", "track"} and named <= set(
        extras
    )
    hint = install_hint("hf")
    assert 'pip install -e ".[hf]"' in hint and 'pip install "amor[hf] @ git+' in hint


@pytest.mark.parametrize("extra", ["demo", "test", "docs", "check"])
def test_what_make_installs_is_pinned(extra):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    pinned = {canonicalize_name(line.split("==")[0]) for line in constraints()}
    for requirement in map(Requirement, wanted):
        assert canonicalize_name(requirement.name) in pinned
    for line in constraints():
        requirement = Requirement(line)
        for each in map(Requirement, wanted):
            if canonicalize_name(each.name) == canonicalize_name(requirement.name):
                assert each.specifier.contains(line.split("==")[1]), (each, line)


def constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]
