"""The door to the package `datasets`: documents of a Hugging Face dataset, streamed, by name or from a local folder."""

from collections.abc import Iterator
from typing import Any

from amor.data.sources import Document, Reading, need, text_of
from amor.errors import AmorError


def dataset_documents(name: str, reading: Reading, skip: int) -> Iterator[Document]:
    """The texts of a dataset from row `skip` on; nothing is stored on this machine but what is in flight."""
    rows = _opened(name, reading)
    for number, row in enumerate(rows.skip(skip) if skip else rows, start=skip):
        where = f"hf:{name} row {number}"
        if reading.field not in row:
            raise AmorError(
                f"{where} has no field {reading.field!r}, it has {', '.join(map(repr, row))}; choose one with --field"
            )
        yield Document(text_of(row[reading.field], reading, where), 0)


def _opened(name: str, reading: Reading) -> Any:
    need("datasets", f"to read hf:{name}")
    import datasets

    try:
        return datasets.load_dataset(name, reading.config, split=reading.split, streaming=True)
    except (ValueError, OSError) as error:  # the library's own errors for names, configs, splits and the network are of these
        words = " ".join(str(error).split())
        raise AmorError(f"hf:{name} (config {reading.config}, split {reading.split}) cannot be opened: {words}") from error
