"""The package `datasets`, imported here alone: documents and rows of Hugging Face datasets."""

from collections.abc import Callable, Iterator
from typing import Any

from amor.data.sources import Document, Reading, need, text_of
from amor.errors import AmorError


class UnreachableError(AmorError):
    """A dataset that could not be fetched.

    down: the network is, so that fetching another one would only wait again.
    """

    def __init__(self, message: str, down: bool) -> None:
        super().__init__(message)
        self.down = down


def dataset_documents(name: str, reading: Reading, skip: int) -> Iterator[Document]:
    """The texts of a dataset from row `skip` on, streamed: nothing is stored on this machine."""
    rows = _load(name, reading.config, reading.split, "opened", streaming=True)
    for number, row in enumerate(rows.skip(skip) if skip else rows, start=skip):
        where = f"hf:{name} row {number}"
        if reading.field not in row:
            raise AmorError(
                f"{where} has no field {reading.field!r}, it has {', '.join(map(repr, row))}; "
                "choose one with --field"
            )
        yield Document(text_of(row[reading.field], reading, where), 0)


def dataset_rows(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
    """All rows of a split, in memory: for evaluation sets, which are small."""
    return list(_load(name, config, split, "fetched"))


def _load(name: str, config: str | None, split: str, verb: str, streaming: bool = False) -> Any:
    need("datasets", f"to read hf:{name}")
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    # the library's errors for names, configs, splits and the network are of these two
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        down = isinstance(error, ConnectionError) and not datasets.config.HF_HUB_OFFLINE
        raise UnreachableError(
            f"hf:{name} (config {config}, split {split}) cannot be {verb}: {reason}", down
        ) from error


def table(rows: list[dict[str, Any]]) -> Any:
    """Rows as a `datasets.Dataset`."""
    need("datasets", "to hand rows to lm-evaluation-harness")
    import datasets

    return datasets.Dataset.from_list(rows)


def changed(dataset: Any, change: Callable[[Any], Any]) -> Any:
    """change(dataset), without the progress bars that `datasets` would draw."""
    import datasets

    enabled = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return change(dataset)
    finally:
        if enabled:
            datasets.enable_progress_bars()
