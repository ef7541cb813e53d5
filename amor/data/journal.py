"""The journal of a preparation: what was asked for and how far it is, so that a run that was
stopped goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
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
    """A source as it was found."""

    split: Split
    name: SourceName
    bytes: Count | None
    changed: int | None


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
    """How far a preparation is: kept on disk, replaced whole, always at a document boundary of both
    splits.
    """

    plan: Plan
    next: Place
    written: Mapping[Split, Written]
    done: bool = False
    tokenizer_hash: Sha256 | None = None  # None in journals of before it was kept

    @classmethod
    def load(cls, path: Path) -> Journal | None:
        if not path.exists():
            return None
        try:
            found = typed.read(cls, path)
        except AmorError as error:
            raise AmorError(f"{error}; {AGAIN}") from None
        splits = {source.split for source in found.plan.sources} | (
            {"valid"} if found.plan.valid else set()
        )
        if found.written.keys() != splits or found.next.source >= len(found.plan.sources):
            raise AmorError(
                f"{path} contradicts itself (splits {sorted(found.written)}, next "
                f"{list(found.next)}); {AGAIN}"
            )
        return found


def differs(there: Plan, asked: Plan) -> list[str]:
    """What of two plans is not the same, in words."""
    pairs = (
        (name, getattr(there, name), getattr(asked, name)) for name in there.__dataclass_fields__
    )
    return [
        f"{name} {_brief(one)} there, {_brief(other)} asked"
        for name, one, other in pairs
        if one != other
    ]


def _brief(value: object) -> str:
    words = json.dumps(msgspec.to_builtins(value))
    return words if len(words) <= 60 else f"{words[:57]}..."
