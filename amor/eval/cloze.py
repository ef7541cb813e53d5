"""The cloze form of six reading tasks: a window of the document around the answer, then the beginning of a sentence to complete.

It is the protocol that prefix-linear-attention's fork of the harness introduced ("2K context" means: a window of 2,048 - 50
tokens of the document, centred on the answer). Prompts and windows differ from the harness's own `swde`, `fda` and
`squad_completion`, so scores of the two must not be mixed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from amor.data.encoder import Encoder
from amor.eval.rows import Cloze, Completion

ANSWER = 50  # tokens of the context length that are kept free
MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")
SUMMARY = "Summary of information above..."  # where SWDE's own prompt begins, which this protocol does not use


@dataclass(frozen=True)
class Form:
    """How one task is asked. `sought` are the words whose first place centres the window; none: the document's beginning."""

    context: Callable[[Any], str]
    sought: Callable[[Any], list[str]]
    prompt: Callable[[str, Any], str]
    answers: Callable[[Any], list[str]]
    length: int = 2048


def documents(form: Form, rows: list[Any], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """What is asked, one document a row; `tokens` is the prompt's true length. Rows sought by one letter are left out."""
    encoder = Encoder(tokenizer, "uint32")
    found = []
    for number, row in enumerate(rows):
        cut = window(encoder, form.context(row), form.sought(row), form.length - ANSWER, row)
        if cut is not None:
            prompt = form.prompt(cut, row)
            found.append(
                {
                    "row": number,
                    "prompt": prompt,
                    "answers": form.answers(row),
                    "tokens": len(encoder(prompt)),
                }
            )
    return found


def window(encoder: Encoder, context: str, sought: list[str], budget: int, row: Any = None) -> str | None:
    """At most `budget` tokens of a context: half before the first place of a sought word, what is left over behind it.

    A word that is not found leaves the last half of the budget. None where a sought word is too short to be looked for.
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
    told = getattr(row, "tok_pos", None)
    return last if told is None or last <= budget else told


def _place(context: str, word: str) -> int:
    """Where a word first stands, its case ignored; -1 where it does not."""
    match = re.search(re.escape(word), context, re.IGNORECASE)
    return match.start() if match else -1


def contains(doc: dict[str, Any], results: list[str]) -> dict[str, int]:
    """Whether any answer stands in the completion, whatever its case."""
    return {"contains": int(any(_place(results[0], answer) >= 0 for answer in doc["answers"]))}


def _without(text: str, question: str) -> str:
    """A text without a question repeated at its end."""
    while text.lower().endswith(question.lower()):
        text = text[: -len(question)]
    return text


def _asked(key: str) -> str:
    return f"{key[0].upper()}{key[1:]}:"


def _swde(text: str, row: Completion) -> str:
    return f"{_without(text, row.key + ':').strip().strip('.')}. {_asked(row.key)}"


def _fda(text: str, row: Completion) -> str:
    bare = _without(text, row.key + ":").strip("\n").strip(".")
    return f"{bare}. {_asked(row.key)}"


def _question(text: str, row: Cloze) -> str:
    question = row.question.strip()
    return f"{_without(text, question).strip().strip('.')}. {question}"


def _nq(text: str, row: Cloze) -> str:
    question = row.question.strip()
    return f"{text.strip().removesuffix(question).strip().strip('.')}. {question}"


FORMS = {
    "cloze_swde": Form(
        lambda r: r.text.partition(SUMMARY)[0],
        lambda r: [r.key, r.value],
        _swde,
        lambda r: [r.value],
    ),
    "cloze_fda": Form(lambda r: r.text, lambda r: [r.key, r.value], _fda, lambda r: [r.value]),
    "cloze_squad": Form(lambda r: r.text, lambda r: [r.value], lambda text, r: text.strip(), lambda r: [r.value]),
    "cloze_triviaqa": Form(
        lambda r: r.context,
        lambda r: [],
        lambda text, r: _question(MARKS.sub("", text.strip()), r),
        lambda r: r.answers,
    ),
    "cloze_nq": Form(lambda r: r.context, lambda r: r.answers[:1], _nq, lambda r: r.answers, length=2000),
    "cloze_drop": Form(
        lambda r: r.context,
        lambda r: [],
        lambda text, r: _question(text.strip(), r),
        lambda r: r.answers,
    ),
}
