"""Other gates in front of the same attention, at equal firing rates: what each would have saved
(amor/judge/choosing.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amor.measures.base import RATES, MeasureKind, Rates, TextOptions, WindowCount
from amor.records.value import Choosing
from amor.study.cells import notes, pooled_cell, study_table
from amor.study.table import Table, TableRow

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
        for row, seeds in results.by_row("choices").items():
            for each in zip(*(one.choices for one in seeds), strict=True):
                by_rate = zip(*(choice.levels for choice in each), strict=True)
                cells = (pooled_cell([(lv.saved, lv.se) for lv in levels], 4) for levels in by_rate)
                lines.append(TableRow(f"{row}: {each[0].name}", tuple(cells)))
        columns = (f"at {100 * rate:g} %" for rate in results.options("choices").rates)
        meaning = (
            "nats per token saved over never firing; weights as trained, gates exchanged, "
            "each firing on its highest scores"
        )
        remarks = (meaning, *notes(results, "choices"))
        return study_table(results, "other gates", "chosen by", columns, lines, *remarks)
