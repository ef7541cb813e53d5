"""torch's description of a checkpoint's moments, read without trusting it: it is a pickle, and a pickle may say anything."""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amor.errors import AmorError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

FILE = ".metadata"
MOST_BYTES = 64 << 20
# all that such a description is made of
KNOWN = {
    "torch": {"Size", "float32", "float64", "float16", "bfloat16"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read(folder: Path) -> Metadata:
    """The description in a folder of moments, of the right type throughout its upper layers."""
    from torch.distributed.checkpoint.metadata import Metadata

    path = folder / FILE
    try:
        held = path.read_bytes() if path.stat().st_size <= MOST_BYTES else b""
    except OSError as error:
        raise AmorError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        # a place in the memo far beyond the file would allocate all memory up to it
        if any(arg > len(held) for op, arg, _ in pickletools.genops(held) if op.name.endswith("PUT") and arg is not None):
            raise pickle.UnpicklingError("it refers beyond its end")
        found = _Unpickler(io.BytesIO(held)).load()
    except Exception as error:  # Python's manual: a broken pickle may raise any
        raise AmorError(f"{path}: not a description of moments ({_words(error)})") from None
    if not isinstance(found, Metadata) or not _are_dicts(found, "state_dict_metadata", "storage_data"):
        raise AmorError(f"{path}: not a description of moments")
    return found


def _are_dicts(thing: Any, *names: str) -> bool:
    return all(isinstance(getattr(thing, name, None), dict) for name in names)


def check(folder: Path, wanted: Mapping[str, Tensor]) -> None:
    """Refuse a description that does not hold these moments, whole and in files that are there."""
    found = read(folder)
    sizes = {p.name: p.stat().st_size for p in folder.iterdir()}
    for name, moment in wanted.items():
        wrong = _wrong(found, name, moment, sizes)
        if wrong:
            raise AmorError(f"{folder / FILE}: {name}: {wrong}")


def _wrong(found: Metadata, name: str, moment: Tensor, sizes: Mapping[str, int]) -> str | None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties, TensorStorageMetadata

    about = found.state_dict_metadata.get(name)
    if not isinstance(about, TensorStorageMetadata):
        return "not there"
    size, chunks = getattr(about, "size", None), getattr(about, "chunks", None)
    if not isinstance(size, torch.Size) or size != moment.shape:
        return f"of shape {size!r}, where the model has {list(moment.shape)}"
    properties = getattr(about, "properties", None)
    if not isinstance(properties, TensorProperties) or getattr(properties, "dtype", None) != moment.dtype:
        return f"not of {moment.dtype}"
    if not isinstance(chunks, list) or not all(_inside(chunk, size) for chunk in chunks):
        return "its parts are not parts of it"
    if sum(math.prod(chunk.sizes) for chunk in chunks) != moment.numel():
        return "its parts are not the whole"
    for chunk in chunks:
        place = found.storage_data.get(MetadataIndex(name, chunk.offsets))
        if not isinstance(place, _StorageInfo):
            return "a part of it is nowhere"
        start, length = getattr(place, "offset", None), getattr(place, "length", None)
        file = getattr(place, "relative_path", None)
        if not isinstance(file, str) or not isinstance(start, int) or not isinstance(length, int) or file not in sizes:
            return "a part of it is in no file"
        if start < 0 or length < 0 or start + length > sizes[file] or getattr(place, "transform_descriptors", None):
            return f"a part of it is not in {file}"
    return None


def _inside(chunk: Any, size: torch.Size) -> bool:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if not isinstance(chunk, ChunkStorageMetadata):
        return False
    offsets, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
    if not isinstance(offsets, torch.Size) or not isinstance(sizes, torch.Size) or not len(offsets) == len(sizes) == len(size):
        return False
    return all(o >= 0 and s >= 0 and o + s <= whole for o, s, whole in zip(offsets, sizes, size, strict=True))


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
