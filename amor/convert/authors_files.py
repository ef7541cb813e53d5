"""Files of the authors' folders: manifest.json with checksums, shards, the identity of weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from torch import Tensor

from amor import typed
from amor.errors import AmorError
from amor.tensors import INDEX, WEIGHTS, weight_files

MANIFEST = "manifest.json"
SHARD = r"model-\d{5}-of-\d{5}\.safetensors"
SHARDED = "safetensors-sharded-v1"  # what they call the identity of sharded weights
SHA256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class ManifestEntry:
    """Size and checksum of one file."""

    bytes: typed.Count
    sha256: SHA256


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    about = path.stat()
    return _sha256(path, about.st_size, about.st_mtime_ns)


@lru_cache(64)
def _sha256(path: Path, size: int, changed: int) -> str:
    """Of a file that is still as large and as old: gigabytes are read once per conversion."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weight_names(folder: Path) -> list[str]:
    """Names of the files that hold the weights: one, or the shards that the index names."""
    if (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        raise AmorError(f"{folder} holds both {WEIGHTS} and {INDEX}; remove one")
    files = weight_files(folder)
    if not files:
        raise AmorError(f"{folder} holds no weights; expected {WEIGHTS}, or shards and {INDEX}")
    return [path.name for path in files]


def check_manifest(folder: Path) -> None:
    """Compare bytes and sha256 of every file with manifest.json, before any tensor is parsed.

    Every weight file must be listed. Other listed files are checked where they are present.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise AmorError(f"{folder} holds no {MANIFEST}; a released folder lists its files there")
    entries = typed.from_json(dict[str, ManifestEntry], typed.read_text(path), str(path))
    if INDEX in entries and (folder / INDEX).is_file():
        check_file(folder / INDEX, entries[INDEX])
    names = weight_names(folder)
    for name in names:
        if name not in entries:
            raise AmorError(f"{path} does not list {name}, so its checksum is unknown")
    for name, entry in entries.items():
        if re.fullmatch(SHARD, name) and name not in names:
            raise AmorError(f"{path} lists {name}, which is not among the weights of {folder}")
        if re.fullmatch(r"[\w.-]+", name) and (folder / name).is_file():
            check_file(folder / name, entry)


def check_file(path: Path, entry: ManifestEntry) -> None:
    """Refuse a file of another size or checksum."""
    size = path.stat().st_size
    if size != entry.bytes:
        known = f"{entry.bytes:,}"
        raise AmorError(f"{path} has {size:,} bytes, its {MANIFEST} says {known}; copy it again")
    if sha256(path) != entry.sha256:
        raise AmorError(f"{path}: its sha256 is not that of {MANIFEST}; copy it again")


def weights_identity(folder: Path) -> str:
    """The sha256 that a router names its weights by: of the single file, or of shards and index."""
    names = weight_names(folder)
    if names == [WEIGHTS]:
        return sha256(folder / WEIGHTS)
    files = {name: sha256(folder / name) for name in (INDEX, *names)}
    text = json.dumps({"format": SHARDED, "files": files}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write_weights(tensors: Mapping[str, Tensor], folder: Path, shard: int | None = None) -> None:
    """Weight files and manifest.json; `shard`: most bytes of one file, None for a single file."""
    from safetensors.torch import save_file

    parts = _split(tensors, shard)
    count = len(parts)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    if count == 1:
        names = [WEIGHTS]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name, metadata={"format": "pt"})
    if count > 1:
        where = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        total = sum(t.nbytes for t in tensors.values())
        tree = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(tree, indent=2) + "\n")
        names.append(INDEX)
    entries = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
        for name in names
    }
    (folder / MANIFEST).write_text(json.dumps(entries, indent=2) + "\n")


def _split(tensors: Mapping[str, Tensor], shard: int | None) -> list[dict[str, Tensor]]:
    """Tensors in their order, cut where the next one would exceed `shard` bytes of a file."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shard is not None and parts[-1] and size + tensor.nbytes > shard:
            parts.append({})
            size = 0
        size += tensor.nbytes
        parts[-1][name] = tensor.contiguous()
    return parts
