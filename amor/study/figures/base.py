"""The contract of a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from amor.study.figures.canvas import Figure

if TYPE_CHECKING:
    from amor.study.definition import Study


class FigureKind:
    """A figure reads files, never models. What `draw` takes depends on what the figure is of."""

    kind: ClassVar[str]
    # of a study's results: measurements of which at least one is there
    needs: ClassVar[frozenset[str]] = frozenset()
    suites: ClassVar[tuple[str, ...]] = ()  # of evaluations: the suites that it can be drawn of

    @staticmethod
    def draw(data: Any) -> Figure:
        """data: Results where `needs` is set, SuiteRows where `suites` is, else what the caller of
        figures.draw has."""
        raise NotImplementedError

    @staticmethod
    def check(study: Study) -> None:
        """Raise ValueError where a study cannot have this figure."""
