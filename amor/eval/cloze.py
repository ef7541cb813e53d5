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
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from tokenizers import Tokenizer

from amor.data.encoder import Encoder
from amor.eval.rows import Text, Texts

ANSWER = 50  # tokens of the context length that are kept free


class CompletionRow(msgspec.Struct):
    """A document whose text ends where `value` would follow (SWDE, FDA: as "Key:")."""

    text: Text
    value: Text
    key: str = ""

    def __post_init__(self) -> None:
        if not self.value.strip():
            raise ValueError("value is white space")


class KeyedRow(CompletionRow):
    """A completion with the key of the value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.key:
            raise ValueError("key is missing or empty")


class ClozeRow(msgspec.Struct):
    """A context, a question to be completed, and the answers that count."""

    context: str
    question: Text
    answers: Texts
    alt_answers: list[str] = []
    tok_pos: Annotated[int, Meta(ge=0)] | None = (
        None  # centre of the window where no answer is in the context
    )

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise ValueError("question is white space")


@dataclass(frozen=True)
class ClozeForm:
    """How the prompt of a task is made of a row.

    `sought` gives the words whose first occurrence centres the window; none: the beginning of the
    document.
    """

    context: Callable[[Any], str]
    sought: Callable[[Any], list[str]]
    prompt: Callable[[str, Any], str]
    answers: Callable[[Any], list[str]]
    length: int = 2048  # tokens of window and answer


def documents(form: ClozeForm, rows: list[Any], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """One document per row; `tokens` is the length of its prompt. Rows with a sought word of one
    letter are left out."""
    encoder = Encoder(tokenizer, "uint32")
    docs = []
    for number, row in enumerate(rows):
        cut = window(encoder, form.context(row), form.sought(row), form.length - ANSWER, row)
        if cut is not None:
            prompt = form.prompt(cut, row)
            docs.append(
                {
                    "row": number,
                    "prompt": prompt,
                    "answers": form.answers(row),
                    "tokens": len(encoder(prompt)),
                }
            )
    return docs


def window(
    encoder: Encoder, context: str, sought: list[str], budget: int, row: Any = None
) -> str | None:
    """At most `budget` tokens of a context: half before the first place of a sought word, what is
    left over behind it.

    A word that is not found leaves the last half of the budget. None where a sought word is too
    short to be looked for.
    """
    if any(len(word) <= 1 for word in sought):
        return None
    context = context.strip()
    ids = encoder(context)
    middle = _middle(encoder, context, sought, budget, row)
    start = max(0, middle - budget // 2)
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
    given = getattr(row, "tok_pos", None)
    return last if given is None or last <= budget else given


def _place(context: str, word: str) -> int:
    """Where a word first stands, its case ignored; -1 where it does not."""
    match = re.search(re.escape(word), context, re.IGNORECASE)
    return match.start() if match else -1


def contains(doc: dict[str, Any], results: list[str]) -> dict[str, int]:
    """Whether the completion contains an answer, ignoring case."""
    return {"contains": int(any(_place(results[0], answer) >= 0 for answer in doc["answers"]))}


def without(text: str, question: str) -> str:
    """A text without a question repeated at its end."""
    while text.lower().endswith(question.lower()):
        text = text[: -len(question)]
    return text


def ask(key: str) -> str:
    """A key as the beginning of a sentence to complete."""
    return f"{key[0].upper()}{key[1:]}:"


def with_question(text: str, row: ClozeRow) -> str:
    """A window without the question at its end, then the question."""
    question = row.question.strip()
    return f"{without(text, question).strip().strip('.')}. {question}"
