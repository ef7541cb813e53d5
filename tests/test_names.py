"""One class per name, docstrings, and no private words in names, comments and docstrings."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "amor"
FILES = sorted(ROOT.rglob("*.py"))

DENIED = {"found", "held", "told", "said", "asked"}  # participles that name nothing
PROSE = re.compile(r"\b(told|said|foretells?|unsaid)\b")  # machines do not speak


def public_classes(sources):
    """Public class names at the top of files -> the files that define them."""
    where = defaultdict(list)
    for name, text in sources.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(name)
    return where


def public_names(text):
    """Names of functions, methods, classes, fields and module constants."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        if isinstance(node, ast.Module | ast.ClassDef):
            for each in node.body:
                targets = (
                    each.targets
                    if isinstance(each, ast.Assign)
                    else [getattr(each, "target", None)]
                )
                yield from (t.id for t in targets if isinstance(t, ast.Name))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def prose(text):
    """Names, comments and docstrings of a file: everything but strings that users read."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.COMMENT):
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def undocumented(text):
    """Public classes and top-level functions without a docstring."""
    for node in ast.parse(text).body:
        definition = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        if definition and not node.name.startswith("_") and not ast.get_docstring(node):
            yield node.name


def test_no_two_public_classes_share_a_name():
    where = public_classes({str(path.relative_to(ROOT)): path.read_text() for path in FILES})
    assert not {name: files for name, files in where.items() if len(files) > 1}


def test_a_second_class_of_a_name_is_noticed():
    where = public_classes(
        {"a.py": "class Counts: pass", "b.py": "class Counts: pass\nclass _Own: pass"}
    )
    assert where == {"Counts": ["a.py", "b.py"]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_are_not_participles(path):
    assert not DENIED & set(public_names(path.read_text()))


def test_participles_are_noticed_wherever_a_name_is_public():
    text = "def told(): pass\nclass A:\n    found: int = 0\n    def said(self): self.held = 1\n"
    text += "asked = 2\n"
    assert set(public_names(text)) & DENIED == DENIED


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_machines_do_not_speak(path):
    assert not [text for text in prose(path.read_text()) if PROSE.search(text)]


def test_speech_is_noticed_in_comments_and_docstrings_and_allowed_in_messages():
    assert [
        t
        for t in prose('def f():\n    """A gate is told."""\n    x = "told"  # as was said\n')
        if PROSE.search(t)
    ] == [
        "# as was said",
        "A gate is told.",
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_public_class_and_function_has_a_docstring(path):
    assert not list(undocumented(path.read_text()))


def test_a_missing_docstring_is_noticed():
    text = "class A: pass\ndef f(): pass\ndef _own(): pass\ndef g():\n    'Documented.'\n"
    assert list(undocumented(text)) == ["A", "f"]
