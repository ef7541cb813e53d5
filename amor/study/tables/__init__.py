"""The tables of a study by name: one of these files where several measurements are combined, else a
measurement's own.

A file amor/study/tables/<name>.py defines one class with that name as its `kind` (base.py is the
contract).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amor import registry
from amor.errors import AmorError, nearest
from amor.measures.base import MeasureKind
from amor.study.definition import find_measure
from amor.study.tables.base import StudyTable

if TYPE_CHECKING:
    from amor.study.results import Results
    from amor.study.table import Table


def make_tables(results: Results) -> list[Table]:
    """The tables that a study lists, in its order."""
    return [find_table(name).table(results) for name in results.study.tables]


def find_table(name: str) -> type[StudyTable]:
    """The table of a name; "package.module.Class" is that of a measurement outside the package."""
    if "." in name:
        return _own_table(find_measure(name))
    measures = {kind: find_measure(kind) for kind in registry.kinds("measures")}
    shown = {kind: each for kind, each in measures.items() if each.table is not MeasureKind.table}
    known = {measure.table_name or kind: _own_table(measure) for kind, measure in shown.items()}
    known |= {
        kind: registry.find("study.tables", kind, "table")
        for kind in registry.kinds("study.tables")
    }
    if name not in known:
        raise AmorError(f"tables: no table {name!r}; {nearest(name, known)}")
    return known[name]


def _own_table(measure: type[MeasureKind]) -> type[StudyTable]:
    """The table of one measurement, which needs no other."""

    class OwnTable(StudyTable):
        kind = measure.kind
        needs = frozenset({measure.kind})
        table = staticmethod(measure.table)

    return OwnTable
