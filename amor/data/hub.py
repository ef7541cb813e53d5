"""The door to the package `datasets`: documents of a Hugging Face dataset, streamed or whole, and
tables of rows.
"""

from collections.abc import Callable, Iterator
from typing import Any

from amor.data.sources import Document, Reading, need, text_of
from amor.errors import AmorError


def dataset_documents(name: str, reading: Reading, skip: int) -> Iterator[Document]:
    """The texts of a dataset from row `skip` on; nothing is stored on this machine but what is in
    flight.
    """
    rows = _opened(name, reading)
    for number, row in enumerate(rows.skip(skip) if skip else rows, start=skip):
        where = f"hf:{name} row {number}"
        if reading.field not in row:
            raise AmorError(
                f"{where} has no field {reading.field!r}, it has {', '.join(map(repr, row))}; "
                "choose one with --field"
            )
        yield Document(text_of(row[reading.field], reading, where), 0)


def _opened(name: str, reading: Reading) -> Any:
    need("datasets", f"to read hf:{name}")
    import datasets

    try:
        return datasets.load_dataset(name, reading.config, split=reading.split, streaming=True)
    except (
        ValueError,
        OSError,
    ) as error:  # the library's own errors for names, configs, splits and the network are of these
        words = " ".join(str(error).split())
        raise AmorError(
            f"hf:{name} (config {reading.config}, split {reading.split}) cannot be opened: {words}"
        ) from error


class UnreachableError(AmorError):
    """A data set that could not be fetched. `down`: the network is, so that asking for another
    would only wait again.
    """

    def __init__(self, words: str, down: bool) -> None:
        super().__init__(words)
        self.down = down


def dataset_rows(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
    """All rows of a split, in memory: for sets of evaluation, which are small."""
    need("datasets", f"to read hf:{name}")
    import datasets

    try:
        return list(datasets.load_dataset(name, config, split=split))
    except (ValueError, OSError) as error:  # as above
        words = " ".join(str(error).split())
        down = isinstance(error, ConnectionError) and not datasets.config.HF_HUB_OFFLINE
        raise UnreachableError(
            f"hf:{name} (config {config}, split {split}) cannot be fetched: {words}", down
        ) from error


def table(rows: list[dict[str, Any]]) -> Any:
    """Rows as the table that users of `datasets` expect."""
    need("datasets", "to hand rows to lm-evaluation-harness")
    import datasets

    return datasets.Dataset.from_list(rows)


def changed(held: Any, change: Callable[[Any], Any]) -> Any:
    """A table as a function of `datasets` users makes it, without the progress bars it would draw."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return change(held)
    finally:
        if shown:
            datasets.enable_progress_bars()
