"""The contract of a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from amor.study.definition import Study


class FigureKind:
    """A figure reads files, never models. What `draw` is given depends on what the figure is of."""

    kind: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()  # of a study's results: measurements of which at least one is there
    suites: ClassVar[tuple[str, ...]] = ()  # of evaluations: the suites that it can be drawn of

    @staticmethod
    def draw(data: Any) -> Figure:
        """data: Results where `needs` is set, SuiteRows where `suites` is, else what the caller of figures.draw has."""
        raise NotImplementedError

    @staticmethod
    def check(study: Study) -> None:
        """Raise ValueError where a study cannot have this figure."""
