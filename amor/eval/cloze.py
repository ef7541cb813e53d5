"""The cloze form of six reading tasks: a window of the document around the answer, then the
beginning of a sentence to complete.

It is the protocol that prefix-linear-attention's fork of the harness introduced ("2K context"
means: a window of 2,048 - 50 tokens of the document, centred on the answer). Prompts and windows
differ from the harness's own `swde`, `fda` and `squad_completion`, so scores of the two must not be
mixed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from amor.data.encoder import Encoder
from amor.errors import AmorError
from amor.eval import harness
from amor.eval.harness import Row
from amor.eval.rows import HubSource, Rows, Text, Texts
from amor.eval.task_specs import LoadedTask, RowTask

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ANSWER = 50  # tokens of the context length that are kept free


class CompletionRow(msgspec.Struct):
    """A document whose text ends where `value` would follow (SWDE, FDA: as "Key:")."""

    text: Text
    value: Text
    key: str = ""

    def __post_init__(self) -> None:
        if not self.value.strip():
            raise ValueError("value is white space")

    @property
    def context(self) -> str:
        """The text that a window is cut from."""
        return self.text

    @property
    def answers(self) -> list[str]:
        """The answers that count."""
        return [self.value]


class ClozeRow(msgspec.Struct):
    """A context, a question to be completed, and the answers that count."""

    context: str
    question: Text
    answers: Texts
    alt_answers: list[str] = []  # centre of the window where no answer is in the context
    # the same as a token, where these are not in it either
    tok_pos: Annotated[int, Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise ValueError("question is white space")


@dataclass(frozen=True, kw_only=True)
class ClozeTask(RowTask):
    """A cloze task; its rows have `context` and `answers`."""

    suite: str = "retrieval"
    hub: HubSource  # the data set
    prompt: Callable[[str, Any], str]  # of a window and its row
    # words of a row whose first occurrence centres the window; none: the beginning of the document
    sought: Callable[[Any], list[str]] = lambda row: []
    length: int = 2048  # tokens of window and answer

    def source(self) -> HubSource:
        """Its data set on the hub."""
        return self.hub

    def build(self, dataset: Rows, tokenizer: Tokenizer) -> LoadedTask:
        """The task of the harness: greedy text after each prompt, searched for the answers."""
        docs, source = self.documents(dataset.rows, tokenizer), dataset.data.source
        if not docs:
            lack = "no row has an answer of two letters or more"
            raise AmorError(f"{source}: {lack}, so {self.name} is empty")
        if left_out := len(dataset.rows) - len(docs):
            source += f" (rows left out, their answers being one letter: {left_out})"
        generation = {"until": ["\n"], "max_gen_toks": 48}
        config = harness.generated(
            self.name, ["contains"], "prompt", "answers", contains, generation
        )
        task = harness.configured(config, docs, "test", source)
        data = msgspec.structs.replace(dataset.data, source=source)
        return LoadedTask(task, data, {self.name: mean_tokens(docs)})

    def documents(self, rows: list[Any], tokenizer: Tokenizer) -> list[Row]:
        """One document per row; those with a sought word of one letter are left out."""
        encoder = Encoder(tokenizer, "uint32")
        docs = []
        for number, row in enumerate(rows):
            text = window(encoder, row.context, self.sought(row), self.length - ANSWER, row)
            if text is not None:
                prompt = self.prompt(text, row)
                doc = {"row": number, "prompt": prompt, "answers": row.answers}
                docs.append(doc | {"tokens": len(encoder(prompt))})
        return docs


def mean_tokens(docs: list[Row]) -> float:
    """The mean length of prompts."""
    return sum(doc["tokens"] for doc in docs) / max(len(docs), 1)


def window(
    encoder: Encoder, context: str, sought: list[str], budget: int, row: Any = None
) -> str | None:
    """At most `budget` tokens of a context: half before the first place of a sought word, what is
    left over behind it.

    A word that does not occur leaves the last half of the budget. None where a sought word is too
    short to be searched for.
    """
    if any(len(word) <= 1 for word in sought):
        return None
    context = context.strip()
    ids = encoder(context)
    start = max(0, _middle(encoder, context, sought, budget, row) - budget // 2)
    end = min(len(ids), start + budget)
    if start == 0 and end == len(ids):
        return context
    return encoder.tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=True)


def _middle(encoder: Encoder, context: str, sought: list[str], budget: int, row: Any) -> int:
    """The token at which the window is centred."""
    if not sought:
        return 0
    places = [place for word in sought if (place := _place(context, word)) >= 0]
    if places:
        return len(encoder(context[: min(places)]))
    for word in getattr(row, "alt_answers", ()):
        if (place := _place(context, word)) >= 0:
            return len(encoder(context[:place]))
    last = len(encoder(context[:-1]))
    centre = getattr(row, "tok_pos", None)
    return last if centre is None or last <= budget else centre


def _place(context: str, word: str) -> int:
    """Where a word first occurs, ignoring case; -1 where it does not."""
    match = re.search(re.escape(word), context, re.IGNORECASE)
    return match.start() if match else -1


def contains(doc: Row, results: list[str]) -> dict[str, int]:
    """Whether the completion contains an answer, ignoring case."""
    return {"contains": int(any(_place(results[0], answer) >= 0 for answer in doc["answers"]))}
