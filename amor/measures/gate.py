"""The gates at the end of training: how often they fired, their thresholds, how wide their blocks
were open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from amor import typed
from amor.measures.base import MeasureKind, NoOptions
from amor.records import MOST_BLOCKS, Record
from amor.records.run import BlockMean, block_means, settled
from amor.study.cells import mean_cell, missing_notes, study_table
from amor.study.table import Table, TableRow

if TYPE_CHECKING:
    from amor.experiment.subject import FinishedRun
    from amor.study.results import Results

KEYS = ("mu", "sigma", "tau", "alpha")


class GateResult(Record, frozen=True):
    """Means of the last steps of training."""

    steps: typed.Count
    blocks: Annotated[tuple[BlockMean, ...], Meta(max_length=MOST_BLOCKS)]


class GateMeasure(MeasureKind):
    """Statistics of every gate at the end of training."""

    kind = "gate"
    Result = GateResult
    needs_gates = True
    table_name = "gates"

    @staticmethod
    def measure(subject: FinishedRun, options: NoOptions) -> GateResult:
        """Means over the last steps of metrics.jsonl."""
        last = settled(subject.steps)
        return GateResult(steps=len(last), blocks=block_means(last))

    @staticmethod
    def table(results: Results) -> Table:
        """Every gate at the end of training."""
        lines, steps = [], set()
        for row, each in results.by_row("gate").items():
            steps |= {one.steps for one in each}
            for number, blocks in enumerate(zip(*(one.blocks for one in each))):
                fires = mean_cell((100 * block.fire for block in blocks), 1)
                cells = (mean_cell((getattr(block, key) for block in blocks), 3) for key in KEYS)
                lines.append(TableRow(f"{row}, block {number}", (fires, *cells)))
        counts = " or ".join(f"{n:,}" for n in sorted(steps))
        last = f"means of the last {counts} steps of training, over seeds"
        columns, lacking = ("fires, %", "μ", "σ", "threshold", "α"), missing_notes(results)
        return study_table(results, "gates", "gate", columns, lines, last, *lacking)
