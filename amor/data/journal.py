"""The journal of a preparation: its request and progress, so that a killed one can go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from amor import typed
from amor.data.shards import Sha256, ShardTokens, SourceName, Split
from amor.data.sources import Reading
from amor.data.writer import AGAIN, Written
from amor.errors import AmorError
from amor.typed import Count, Share

JOURNAL = "prepare.json"


class Place(NamedTuple):
    """A document: which source, and its number in it."""

    source: Count
    document: Count


class Planned(NamedTuple):
    """A source when the preparation began."""

    split: Split
    name: SourceName
    bytes: Count | None
    changed: int | None  # modification time in ns


@dataclass(frozen=True)
class Plan:
    """What two runs must share for one to continue the other."""

    format: Literal[1]  # of the shards
    sources: tuple[Planned, ...]
    tokenizer: str
    valid: Share
    reading: Reading
    shard_tokens: ShardTokens
    end_of_text: str | None


class Journal(typed.File, frozen=True, kw_only=True):
    """Progress of a preparation, on disk: replaced whole, always at a document boundary."""

    plan: Plan
    next: Place
    written: Mapping[Split, Written]
    done: bool = False
    tokenizer_hash: Sha256 | None = None  # None in journals of earlier versions

    @classmethod
    def load(cls, path: Path) -> Journal | None:
        """The journal of a folder, which must not contradict itself; None if there is none."""
        if not path.exists():
            return None
        try:
            journal = typed.read(cls, path)
        except AmorError as error:
            raise AmorError(f"{error}; {AGAIN}") from None
        plan, written = journal.plan, journal.written
        splits = {source.split for source in plan.sources} | ({"valid"} if plan.valid else set())
        if written.keys() != splits or journal.next.source >= len(plan.sources):
            raise AmorError(
                f"{path} contradicts itself (splits {sorted(written)}, next {list(journal.next)}); "
                f"{AGAIN}"
            )
        return journal


def differences(there: Plan, wanted: Plan) -> list[str]:
    """The fields in which two plans differ, each as text."""
    names = (field.name for field in fields(Plan))
    pairs = ((name, getattr(there, name), getattr(wanted, name)) for name in names)
    return [f"{name} {_brief(a)} there, {_brief(b)} now" for name, a, b in pairs if a != b]


def _brief(value: object) -> str:
    text = json.dumps(msgspec.to_builtins(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
