"""Text generation: prompts in, tokens out as they are generated, with continuous batching.

A row leaves when its text ends, and the next prompt takes its place. Prompts are read in chunks
between the steps of the rows that are being generated, so a long one does not hold them up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from amor import typed
from amor.data.tokenizer import check_text, find_end_of_text, special_tokens
from amor.decode.draft import NgramDraft, PassCost
from amor.decode.engine import CHUNK, Engine
from amor.decode.sample import Sampler, Sampling
from amor.decode.session import Prefill, Session
from amor.decode.step_output import StepOutput
from amor.decode.text import Detokenizer, Stopper
from amor.errors import AmorError
from amor.models.amor import Amor
from amor.vocabulary import prefix_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST = 1 << 20  # largest max_tokens
ROOM = 1024  # slots of keys and values reserved at first; they grow with the text
Draft = Literal["none", "ngram"]
# texts generated at a time: a quarter more tokens/s than with 8; 32 gain little more and hold twice
# the keys and values, 64 are slower (docs/log.md, 2026-11-18)
ROWS = 16


@dataclass(frozen=True)
class GeneratedToken:
    """One token, as it was generated.

    Attributes:
        row: index of its prompt.
        token: its id.
        text: the text that it completes; "" inside a character or a possible stop string.
        entropy: of the distribution it was drawn from, in nats.
        fire: for each gated block, whether it fired at the token before this one.
        end: "stop" or "length" where the text ends with this token, else "".
    """

    row: int
    token: int
    text: str
    entropy: float
    fire: tuple[bool, ...]
    end: str = ""


@dataclass
class Generation:
    """One prompt and the text generated after it.

    Attributes:
        prompt: as it was given.
        prompt_tokens: the ids that the model read, BOS included.
        text: the generated text, without the prompt and without a stop string.
        tokens: the generated ids, the one that ended the text included.
        entropy, fire: of each generated token, as in `GeneratedToken`.
        end: "stop" (end-of-text, a stop id or a stop string) or "length" (max_tokens).
    """

    prompt: str | list[int]
    prompt_tokens: list[int] = field(default_factory=list)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    fire: list[tuple[bool, ...]] = field(default_factory=list)
    end: str = ""

    def append(self, piece: GeneratedToken) -> None:
        """Add one token."""
        self.text += piece.text
        self.tokens.append(piece.token)
        self.entropy.append(piece.entropy)
        self.fire.append(piece.fire)
        self.end = piece.end


@dataclass
class _Row:
    name: int
    detokenizer: Detokenizer
    stopper: Stopper
    left: int
    draft: NgramDraft | None
    chosen: int | None = None  # drawn where it differed from a draft, and not shown yet
    end: str = ""


class Generator:
    """Generates text for a queue of prompts, some rows at a time."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        sampling: Sampling,
        max_tokens: int,
        stop: Sequence[str] = (),
        rows: int = ROWS,
        prefill: Callable[[list[list[int]]], Session] | None = None,
        *,
        stop_ids: Sequence[int] = (),
        add_bos: bool | None = None,
        draft: Draft = "none",
    ):
        """The arguments are those of `generate_batch`; `prefill` replaces the engine's own."""
        if tokenizer is None:  # as amor.load returns it for a folder without one
            raise AmorError(
                "the tokenizer is None: the model folder holds no tokenizer.json; give that of the "
                "training data or model, amor.data.tokenizer.load(FOLDER)"
            )
        if not 1 <= max_tokens <= LONGEST or rows < 1:
            raise AmorError(
                f"max_tokens {max_tokens}, rows {rows}: 1 to {LONGEST:,} tokens and at least 1 "
                "row are needed"
            )
        self.engine, self.tokenizer, self.sampling = engine, tokenizer, sampling
        self.max_tokens, self.stop, self.most = max_tokens, list(stop), rows
        self.prefill, self.drafts, self.cost = prefill, draft == "ngram", PassCost()
        if self.drafts and not engine.own_memory:
            raise AmorError(
                f"drafts are checked by compiled steps, but this engine decodes by {engine.path}; "
                "leave drafts out"
            )
        self.prefix, self.stop_ids = prefix_ids(tokenizer, add_bos), set(stop_ids)
        vocab = engine.model.config.vocab
        if any(not 0 <= token < vocab for token in self.stop_ids):
            raise AmorError(f"stop ids {sorted(self.stop_ids)}: an id is 0 to {vocab - 1:,}")
        self.last = find_end_of_text(tokenizer)
        if self.last is None and not self.stop_ids:
            raise AmorError(
                "the tokenizer has no token for the end of a text; name the id that ends one "
                f"with --stop-id N (stop_ids=[N] in Python): {special_tokens(tokenizer)}"
            )
        self.rows: list[_Row] = []
        self.session: Session | None = None
        self.sampler: Sampler | None = None
        self.reading: tuple[Prefill, list[_Row], Sampler] | None = None  # prompts being read

    def run(self, prompts: Sequence[str | list[int]]) -> Iterator[GeneratedToken]:
        """The tokens of all prompts as they are generated, those of several rows interleaved."""
        waiting = deque(enumerate(prompts))
        while waiting or self.rows or self.reading:
            self._admit(waiting)
            if self.rows:
                yield from self._step()

    def encode(self, prompt: str | list[int]) -> list[int]:
        """The ids of a prompt: those of a text with the BOS in front, or ids as they are given.

        An empty prompt begins as training texts do: with the BOS, or else with end-of-text.
        """
        if isinstance(prompt, str):
            check_text(prompt, "the prompt")
            ids = self.prefix + self.tokenizer.encode(prompt, add_special_tokens=False).ids
        else:
            ids = list(prompt)
        ids = ids or self.prefix or ([] if self.last is None else [self.last])
        vocab = self.engine.model.config.vocab
        if not ids:
            raise AmorError("the prompt is empty, and the tokenizer has no token to begin with")
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise AmorError(
                f"the prompt has token {max(ids) if min(ids) >= 0 else min(ids)}, but the model "
                f"has a vocabulary of {vocab}; they do not belong together"
            )
        return ids

    def _admit(self, waiting: deque[tuple[int, str | list[int]]]) -> None:
        """Read one chunk of the prompts that are next; when they end, their rows join."""
        free = min(self.most - len(self.rows), len(waiting))
        if free and not self.reading:
            names, texts = zip(*(waiting.popleft() for _ in range(free)), strict=True)
            ids = [self.encode(text) for text in texts]
            sampler = self.new_sampler(names, ids)
            rows = [self._row(name, prompt) for name, prompt in zip(names, ids, strict=True)]
            if self.prefill is not None:
                return self._join(self.prefill(ids), rows, sampler)
            begun = self.engine.begin(ids, room=min(self.max_tokens, ROOM))
            self.reading = begun, rows, sampler
        if self.reading:
            prefill, rows, sampler = self.reading
            prefill.read(CHUNK)
            if prefill.done:
                self.reading = None
                self._join(prefill.finish(), rows, sampler)

    def new_sampler(self, names: Sequence[int], prompts: Sequence[Sequence[int]]) -> Sampler:
        """What chooses the tokens of some rows."""
        return Sampler(self.sampling, names, prompts, self.engine.model.config.vocab)

    def _row(self, name: int, prompt: list[int]) -> _Row:
        draft = NgramDraft(prompt) if self.drafts else None
        detokenizer = Detokenizer(self.tokenizer, prompt)
        return _Row(name, detokenizer, Stopper(self.stop), self.max_tokens, draft)

    def _join(self, session: Session, rows: list[_Row], sampler: Sampler) -> None:
        self.rows += rows
        if self.session is None or self.sampler is None:
            self.session, self.sampler = session, sampler
        else:
            self.session = self.session.join(session)
            self.sampler.join(sampler)

    def _step(self) -> Iterator[GeneratedToken]:
        """At least one token for every row; rows that end leave before the others are read on."""
        assert self.session is not None
        output = self.session.next
        self._draw(output)
        entropy, fire = output.entropy.tolist(), output.fire.tolist()
        for index, row in enumerate(self.rows):
            assert row.chosen is not None
            yield self._show(row, row.chosen, entropy[index], fire[index])
        self._drop_ended()
        if not self.rows:
            return
        tokens = [row.chosen or 0 for row in self.rows]
        for row in self.rows:
            row.chosen = None
        cost = self.cost.per_token(len(self.rows))
        drafts = [[] if row.draft is None else row.draft.propose(cost) for row in self.rows]
        began, drafted = perf_counter(), sum(map(len, drafts))
        if drafted:
            passed = [[token, *draft] for token, draft in zip(tokens, drafts, strict=True)]
            output = self.session.step_ahead(passed)
        else:
            self.session.step(tokens)
        self.cost.observe(len(tokens), len(tokens) + drafted, perf_counter() - began)
        if drafted:
            yield from self._check(drafts, output)
            self._drop_ended()

    def _draw(self, output: StepOutput) -> None:
        """Choose the next token of every row that has not drawn one in place of a draft."""
        assert self.sampler is not None
        rows = [index for index, row in enumerate(self.rows) if row.chosen is None]
        logits = output.logits if len(rows) == len(self.rows) else output.logits[rows]
        if rows:
            for index, token in zip(rows, self.sampler.choose(logits, rows).tolist(), strict=True):
                self.rows[index].chosen = token

    def _check(self, drafts: list[list[int]], output: StepOutput) -> Iterator[GeneratedToken]:
        """Keep the draft tokens that are also chosen from the model's distribution.

        output: of the pass that read each row's next token and its draft, row after row.
        """
        assert self.session is not None and self.sampler is not None
        entropy, fire = output.entropy.tolist(), output.fire.tolist()
        starts = [sum(len(d) + 1 for d in drafts[:index]) for index in range(len(drafts))]
        kept = [1] * len(drafts)  # tokens of the pass, per row
        open_rows = [index for index, draft in enumerate(drafts) if draft]
        while open_rows:
            lines = [starts[index] + kept[index] - 1 for index in open_rows]
            drawn = self.sampler.choose(output.logits[lines], open_rows).tolist()
            agreed = []
            for index, line, token in zip(open_rows, lines, drawn, strict=True):
                row = self.rows[index]
                if token != drafts[index][kept[index] - 1]:
                    row.chosen = token
                    continue
                yield self._show(row, token, entropy[line], fire[line])
                kept[index] += 1
                if not row.end and kept[index] <= len(drafts[index]):
                    agreed.append(index)
            open_rows = agreed
        for row, draft, count in zip(self.rows, drafts, kept, strict=True):
            if row.draft is not None and draft:
                row.draft.observe(len(draft), count - 1)
        self.session.accept(kept)

    def _show(self, row: _Row, token: int, entropy: float, fire: list[bool]) -> GeneratedToken:
        """Add a token to the text of a row."""
        text, row.end = self._text_of(row, token)
        if row.draft is not None:
            row.draft.append(token)
        return GeneratedToken(row.name, token, text, entropy, tuple(fire), row.end)

    def _drop_ended(self) -> None:
        """Rows whose text has ended leave."""
        going = [index for index, row in enumerate(self.rows) if not row.end]
        if len(going) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in going]
        if not going:
            self.session = self.sampler = None
        elif self.session is not None and self.sampler is not None:
            self.session = self.session.select(going)
            self.sampler.select(going)

    def _text_of(self, row: _Row, token: int) -> tuple[str, str]:
        row.left -= 1
        if token == self.last or token in self.stop_ids:
            return row.stopper.add(row.detokenizer.flush()) + row.stopper.flush(), "stop"
        text = row.stopper.add(row.detokenizer.add(token))
        if row.stopper.stopped:
            return text, "stop"
        if row.left == 0:
            text += row.stopper.add(row.detokenizer.flush())
            return text + ("" if row.stopper.stopped else row.stopper.flush()), "length"
        return text, ""


def generate(
    model: Amor | Engine,
    tokenizer: Tokenizer,
    prompt: str | list[int],
    *,
    max_tokens: int = 128,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    add_bos: bool | None = None,
    draft: Draft = "none",
    **sampling: float | int,
) -> Generation:
    """The text that a model generates after one prompt.

    Args:
        model: a model, or an `amor.Engine` made of it, which spares packing the weights again.
        tokenizer: the one it was trained with, as `amor.load` returns it.
        prompt: a text, or its token ids, which are read as they are.
        max_tokens: tokens generated at most.
        stop: texts that end the text; they are left out of it.
        stop_ids: token ids that end the text besides the tokenizer's end-of-text token, for
            instance the BOS of a model whose training texts were separated by it.
        add_bos: None puts the tokens in front of a text that the tokenizer's post-processor adds,
            as transformers does; False puts none, True the BOS token
            (`amor.vocabulary.prefix_ids`).
        draft: "ngram" reads what followed earlier in the text ahead of the choice, several tokens
            in one pass: faster where a text repeats itself or its prompt, the same text anyway.
        sampling: the fields of `amor.Sampling`, by name: temperature=0.8 (0: greedy), top_k=0
            (all), top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0.
    """
    return generate_batch(
        model,
        tokenizer,
        [prompt],
        max_tokens=max_tokens,
        stop=stop,
        stop_ids=stop_ids,
        add_bos=add_bos,
        draft=draft,
        rows=1,
        **sampling,
    )[0]


def generate_batch(
    model: Amor | Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[str | list[int]],
    *,
    max_tokens: int = 128,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    add_bos: bool | None = None,
    draft: Draft = "none",
    rows: int = ROWS,
    **sampling: float | int,
) -> list[Generation]:
    """The texts after several prompts; no text depends on the other prompts.

    Args:
        rows: texts generated at the same time. With 16 the weights are read rarely enough; more
            rows need more memory and gain little.
    The other arguments are those of `generate`; each prompt has a random stream of its own.
    """
    if isinstance(prompts, str):
        raise AmorError("generate_batch takes several prompts; generate takes one")
    engine = model if isinstance(model, Engine) else Engine(model)
    options = typed.convert(Sampling, sampling, "sampling")
    generator = Generator(
        *(engine, tokenizer, options, max_tokens, stop, rows),
        stop_ids=stop_ids,
        add_bos=add_bos,
        draft=draft,
    )
    texts = [Generation(prompt, generator.encode(prompt)) for prompt in prompts]
    for piece in generator.run([text.prompt_tokens for text in texts]):
        texts[piece.row].append(piece)
    return texts
