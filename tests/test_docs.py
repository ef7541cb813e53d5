"""Documentation: links lead somewhere, pages agree with the package, prose is short, the notebook
runs.
"""

import ast
import importlib
import json
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from amor.cli import verbs

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "extensions"))
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = TOP + sorted((ROOT / "docs").rglob("*.md"))
# pages that other commands write; a link to one that is not there yet is no mistake
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.S | re.M)


def prose(text):
    """A page without its code: fenced blocks, and code inside lines."""
    return re.sub(r"`[^`\n]+`", "`code`", FENCED.sub("", text))


def slug(heading):
    """The anchor of a heading, as mkdocs and GitHub build it."""
    plain = re.sub(r"[`*]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


@cache
def anchors(page):
    """Anchors of a page: its headings, and what the API reference documents there."""
    text = FENCED.sub("", page.read_text())
    named = {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)}
    return named | set(re.findall(r"^::: (\S+)$", text, re.M))


def documented(anchor, named):
    """Whether an anchor is a member of a class that the page documents."""
    owner, _, member = anchor.rpartition(".")
    if owner not in named:
        return False
    module, _, name = owner.rpartition(".")
    return hasattr(getattr(importlib.import_module(module), name), member)


def broken(page, text):
    """Links of a page that lead nowhere."""
    for target in LINK.findall(prose(text)):
        path, _, anchor = target.partition("#")
        if re.match(r"https?:", target):
            continue
        file = (page.parent / path).resolve() if path else page
        outside = ROOT / "docs" in page.parents and ROOT / "docs" not in file.parents
        known = anchors(file) if file.exists() and anchor else set()
        if (
            not file.exists()
            or outside
            or (anchor and anchor not in known and not documented(anchor, known))
        ):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    assert not list(broken(page, page.read_text()))


def test_a_broken_link_is_noticed():
    page = ROOT / "docs/index.md"
    forward = "reference/models.md#amor.models.amor.Amor.forward"
    wrong = [
        "nowhere.md",
        "gate.md#nothing",
        "../README.md",
        forward.replace("forward", "backward"),
    ]
    right = ["gate.md", "gate.md#what-a-trace-shows", forward]
    text = " ".join(f"[a]({target})" for target in wrong + right)
    assert list(broken(page, text)) == wrong


def test_every_page_is_in_the_table_of_contents_once():
    contents = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = {
        str(page.relative_to(ROOT / "docs")) for page in PAGES if ROOT / "docs" in page.parents
    }
    assert sorted(contents) == sorted(pages)


def paragraphs(text):
    """Paragraphs of a page: no headings, tables, lists of links or code."""
    for block in re.split(r"\n\s*\n", prose(text)):
        if not re.match(r"(#|\||!\[| {4})", block):
            yield re.sub(r"\]\([^)]*\)", "]", block)


def numbers(paragraph):
    return re.findall(r"(?<![\w.])\d[\d,.]*", paragraph)


def test_no_paragraph_of_the_readme_has_more_than_three_numbers():
    crowded = [p for p in paragraphs((ROOT / "README.md").read_text()) if len(numbers(p)) > 3]
    assert not crowded
    assert len(numbers("99 % with attention on 45 % of tokens; 40 %, 99 % and 2 %")) == 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_installs_from_an_index_that_does_not_have_amor(page):
    assert not re.search(r"pip install [^\n`]*(?<![./\w-])amor\b", page.read_text())
    assert "amor[" not in page.read_text()


def test_private_words_do_not_come_back():
    """Rooms, doors, guests, the house: packages, backends, optional dependencies, invariants."""
    private = re.compile(r"\bthe house\b|\brooms\b|\bguests?\b|\bdoors?\b")
    assert not [page for page in PAGES if private.search(prose(page.read_text()))]


def test_the_page_of_commands_lists_every_verb_by_its_help():
    page = (ROOT / "docs/reference/cli.md").read_text()
    rows = re.findall(r"^\| `amor (\w+)` \| (.+) \|$", page, re.M)
    helps = {
        verb: ast.get_docstring(ast.parse((ROOT / f"amor/cli/{verb}.py").read_text())).splitlines()[
            0
        ]
        for verb in verbs()
    }
    assert dict(rows) == helps


REFERENCE = [name for page in PAGES for name in anchors(page) if name.startswith("amor.")]


@pytest.mark.parametrize("name", sorted(REFERENCE))
def test_what_the_reference_documents_exists_and_has_a_docstring(name):
    module, _, member = name.rpartition(".")
    assert getattr(importlib.import_module(module), member).__doc__


def test_entries_of_the_log_are_dated_newest_first():
    headings = re.findall(r"^## (.+)$", (ROOT / "docs/log.md").read_text(), re.M)
    dates = [re.match(r"(\d{4}-\d\d-\d\d): ", heading) for heading in headings]
    assert all(dates)
    assert [d[1] for d in dates] == sorted((d[1] for d in dates), reverse=True)


def test_the_citation_names_the_version_of_the_package():
    import amor

    assert f"version: {amor.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_a_training_loop_of_one_s_own_trains_a_model_whose_gates_fire(tmp_path, monkeypatch):
    page = (ROOT / "docs/how-to/training-loop.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.S)[1]
    assert code.count("\n") <= 22
    (tmp_path / "book.txt").write_text((ROOT / "docs/gate.md").read_text())
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, "training-loop.md", "exec"), names)
    assert names["out"].loss < 3.2
    assert all(0.05 < fire < 0.95 for fire in names["fires"])


def test_the_notebook_runs():
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "examples/first_steps.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "of the spaces" in printed


def test_the_notebook_is_stored_without_outputs():
    notebook = json.loads((ROOT / "examples/first_steps.ipynb").read_text())
    assert not [cell for cell in notebook["cells"] if cell.get("outputs")]


def test_every_place_that_the_page_of_the_gate_names_exists():
    page = (ROOT / "docs/gate.md").read_text()
    table = page[page.index("| part of the equation") : page.index("`kappa` is 0.2")]
    assert (ROOT / "amor/ops/head/reference.py").is_file() and "head/reference.py" in table
    named = re.findall(r"`(\w+)\.(\w+)` in `(amor/gates/\w+)\.py`", table)
    assert len(named) == 3
    for owner, method, file in named:
        assert method in vars(getattr(importlib.import_module(file.replace("/", ".")), owner))


def test_long_signatures_of_the_site_are_cut_into_lines():
    """mkdocstrings leaves them in one line, without a word, where no formatter is installed."""
    docs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "ruff" in docs["docs"]


def test_arguments_and_comments_become_documentation_of_the_site():
    from docstrings import comment_of, listed

    text = "Read.\n\nstate: where; None:\n    the beginning.\nkeep: last.\n\nMore."
    assert (
        listed(text)
        == "Read.\n\n\n- `state`: where; None:\n  the beginning.\n- `keep`: last.\n\nMore."
    )
    source = ["a: int  # beside", "# above", "# it", "b: int = 1", "c: int"]
    assert [comment_of(source, n) for n in (1, 4, 5)] == ["beside", "above it", ""]
