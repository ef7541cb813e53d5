"""The tables of a study by name: one of these files where several measurements are combined, else a
measurement's own.

A file amor/study/tables/<name>.py defines one class with that name as its `kind` (base.py is the
contract).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from amor import registry
from amor.errors import AmorError, nearest
from amor.measures.base import MeasureKind
from amor.study.definition import Study, find_measure
from amor.study.tables.base import StudyTable

if TYPE_CHECKING:
    from amor.study.results import Results
    from amor.study.table import Table


def make_tables(results: Results) -> list[Table]:
    """The tables that a study lists, in its order."""
    return [find_table(name).table(results) for name in results.study.tables]


@dataclass(frozen=True)
class TableMaker:
    """How a table is made of results, and which studies can have it (StudyTable says what each
    field is)."""

    needs: frozenset[str]
    table: Callable[[Results], Table]
    check: Callable[[Study], None]


def find_table(name: str) -> TableMaker:
    """The maker of a table; "package.module.Class" is that of a measurement outside the package."""
    if "." in name:
        return _own_table(find_measure(name))
    measures = {kind: find_measure(kind) for kind in registry.kinds("measures")}
    known = {
        m.table_name or kind: _own_table(m)
        for kind, m in measures.items()
        if m.table is not MeasureKind.table
    }
    for kind in registry.kinds("study.tables"):
        made = cast(type[StudyTable], registry.find("study.tables", kind))
        known[kind] = TableMaker(made.needs, made.table, made.check)
    if name not in known:
        raise AmorError(f"tables: no table {name!r}; {nearest(name, known)}")
    return known[name]


def _own_table(measure: type[MeasureKind]) -> TableMaker:
    return TableMaker(frozenset({measure.kind}), measure.table, lambda study: None)
