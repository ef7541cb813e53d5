"""The contract of a table that combines several measurements of a study."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from amor.study.definition import Study
    from amor.study.results import Results
    from amor.study.table import Table


class StudyTable:
    """A table of a study that combines several measurements."""

    kind: ClassVar[str]  # its name in `tables` of a study
    # kinds without which it is empty; at least one must be measured
    needs: ClassVar[frozenset[str]] = frozenset()

    @staticmethod
    def table(results: Results) -> Table:
        """The table of a study's results."""
        raise NotImplementedError

    @staticmethod
    def check(study: Study) -> None:
        """Raise ValueError where a study cannot have this table."""
