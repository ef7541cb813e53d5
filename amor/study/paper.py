"""The paper's result tables as numbers: what stands below our rows. Firing rates and speeds of
decode are in paper.json."""

from functools import cache
from pathlib import Path

import msgspec

from amor import typed
from amor.records import Number

FILE = Path(__file__).with_name("paper_tables.json")


class PaperRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model: one number per column."""

    scale: typed.Name
    model: typed.Name
    values: tuple[Number, ...]


class Printed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table, as it is printed: accuracies in percent."""

    columns: tuple[typed.Name, ...]
    rows: tuple[PaperRow, ...]

    def at(self, scale: str) -> dict[str, dict[str, float]]:
        """Model -> column -> number, of one scale."""
        return {
            row.model: dict(zip(self.columns, row.values, strict=True))
            for row in self.rows
            if row.scale == scale
        }


class Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """paper_tables.json."""

    source: typed.Name
    tables: dict[str, Printed]


@cache
def tables() -> dict[str, Printed]:
    """The paper's tables by name."""
    return typed.read(Tables, FILE).tables


def rows(names: tuple[str, ...], scale: str) -> dict[str, dict[str, float]]:
    """Models of several tables, each once: ablations print the full model again, with "(K=3)"
    behind its name."""
    found: dict[str, dict[str, float]] = {}
    for name in names:
        for model, values in tables()[name].at(scale).items():
            found.setdefault(model.removesuffix(" (K=3)"), values)
    return found
