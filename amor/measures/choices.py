"""Other gates in front of the same attention, at equal firing rates: what each would have saved
(amor/judge/choosing.py)."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from amor.measures.base import RATES, MeasureKind, Rates, TextOptions, WindowCount
from amor.records.value import Choosing
from amor.study.cells import notes, pooled_error
from amor.study.table import Cell, Table, TableRow

if TYPE_CHECKING:
    from amor.experiment.subject import FinishedRun
    from amor.study.results import Results


class ChoicesOptions(TextOptions, frozen=True):
    """Which windows are read, the firing rates that are compared, and how much gates are fitted
    on."""

    rates: Rates = RATES
    # windows of the training text; with fewer, predicted gains are mostly noise
    learned: WindowCount = 512


class ChoicesMeasure(MeasureKind):
    """What other gates would save in front of the same attention."""

    kind = "choices"
    Options, Result = ChoicesOptions, Choosing
    needs_gates = needs_text = True

    @staticmethod
    def measure(subject: FinishedRun, options: ChoicesOptions) -> Choosing:
        """Fit the gates on training text and compare them on held-out windows."""
        from amor.data.shards import splits
        from amor.judge.choosing import compare_gates
        from amor.judge.windows import of_shards

        windows, apart = subject.windows(options), subject.recipe.documents == "apart"
        train, vocab = splits(subject.prepared)[0].folder, subject.model.config.vocab
        text = of_shards(train, windows.columns, options.learned, subject.tokenizer, vocab, apart)
        return compare_gates(subject.model, windows, text, options.rates)

    @staticmethod
    def table(results: Results) -> Table:
        """Nats saved by other gates in front of the same attention, at equal firing rates."""
        lines = []
        for row in results.ledger.rows:
            seeds: list[Choosing] = list(results.of(row, "choices").values())
            for each in zip(*(one.choices for one in seeds), strict=True):
                cells = []
                for levels in zip(*(choice.levels for choice in each), strict=True):
                    error = pooled_error([(level.saved, level.se) for level in levels])
                    cells.append(Cell(statistics.mean(level.saved for level in levels), error, 4))
                lines.append(TableRow(f"{row}: {each[0].name}", tuple(cells)))
        columns = tuple(f"at {100 * rate:g} %" for rate in results.options("choices").rates)
        meaning = (
            "nats per token saved over never firing; weights as trained, gates exchanged, "
            "each firing on its highest scores"
        )
        title, remarks = (
            f"{results.study.title}: other gates",
            (meaning, *notes(results, "choices")),
        )
        return Table(title, "chosen by", columns, tuple(lines), notes=remarks)
