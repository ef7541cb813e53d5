"""Results are files: the page is printed from them, and a file that breaks its form is refused."""

import json
from pathlib import Path

import pytest

from amor.errors import AmorError
from benchmarks import results

ROOT = Path(__file__).parent.parent


def test_the_page_of_results_is_printed_from_the_files():
    page = (ROOT / "docs" / "results.md").read_text()
    hint = "python -m benchmarks.results --write docs/results.md"
    assert page == results.page(results.read()), hint


def test_every_number_of_a_file_stands_on_the_page_with_its_caption():
    page = (ROOT / "docs" / "results.md").read_text()
    for name, result in results.read().items():
        section = page.split(f"## {results.escape_markdown(result.title)}\n")[1].split("\n## ")[0]
        lines = section.split("\n")
        for row in result.rows:
            cells = [cell or "-" for cell in row]
            printed = [" ".join(line.strip("| ").split()) for line in lines]
            wanted = " | ".join(results.escape_markdown(str(cell)) for cell in cells)
            assert wanted in [" | ".join(w.strip() for w in p.split("|")) for p in printed], row
        for words in (result.date, result.commit, name):
            assert words in section


WRONG = {
    "another key": ({"speed": 1}, "speed"),
    "no commit": ({"commit": ""}, "commit"),
    "a date in words": ({"date": "yesterday"}, "date"),
    "a row too short": ({"rows": [["a"]]}, "expected a name and 1 cells"),
    "two lines": ({"machine": "a\nb"}, "machine"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_result_without_its_caption_is_refused(name, tmp_path):
    change, named = WRONG[name]
    file = {
        **{"title": "t", "date": "2026-11-18", "commit": "1234567", "machine": "m"},
        **{"command": "amor bench", "data": "d", "columns": ["a", "b"], "rows": [["a", 1.5]]},
    }
    (tmp_path / "one.json").write_text(json.dumps(file))
    assert "| a   | 1.5 |" in results.page(results.read(tmp_path))
    (tmp_path / "one.json").write_text(json.dumps(file | change))
    with pytest.raises(AmorError, match=named):
        results.read(tmp_path)
