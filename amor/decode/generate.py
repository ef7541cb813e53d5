"""Text from a model: prompts in, tokens out as they are written; rows leave when they end, and others take their place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from amor import typed
from amor.data.tokenizer import check_text, end_of_text
from amor.decode.engine import Engine, Session
from amor.decode.sample import Sampler, Sampling
from amor.decode.text import Detokenizer, Stopper
from amor.errors import AmorError
from amor.models.amor import Amor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST = 1 << 20  # tokens written after a prompt at most
ROOM = 1024  # tokens that keys and values are given room for at first; a text that grows longer is given more
ROWS = 8  # texts written at the same time: as many as one pass over the weights serves


@dataclass(frozen=True)
class Piece:
    """One token, as it was written."""

    row: int  # of the prompts
    token: int
    text: str  # what can be shown now; "" inside a character or a possible stop string
    entropy: float  # nats of the distribution it was drawn from
    fire: tuple[bool, ...]  # which blocks fired at the token before it
    end: str = ""  # why the row ends with it: "stop" or "length"


@dataclass
class Text:
    """One prompt and what was written after it."""

    prompt: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    fire: list[tuple[bool, ...]] = field(default_factory=list)
    end: str = ""

    def take(self, piece: Piece) -> None:
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


class Writer:
    """Writes after a queue of prompts, some rows at a time."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        sampling: Sampling,
        max_tokens: int,
        stop: Sequence[str],
        rows: int = ROWS,
        prefill: Callable[[list[list[int]]], Session] | None = None,  # how prompts are read; None: by the engine
    ):
        if not 1 <= max_tokens <= LONGEST or rows < 1:
            raise AmorError(f"max_tokens {max_tokens}, rows {rows}: 1 to {LONGEST:,} tokens and at least 1 row are needed")
        self.engine, self.tokenizer, self.sampling = engine, tokenizer, sampling
        self.max_tokens, self.stop, self.most = max_tokens, list(stop), rows
        self.prefill = prefill or partial(engine.prefill, room=min(max_tokens, ROOM))
        self.last = end_of_text(tokenizer)
        self.rows: list[_Row] = []
        self.session: Session | None = None
        self.sampler: Sampler | None = None

    def write(self, prompts: Sequence[str | list[int]]) -> Iterator[Piece]:
        """Prompts are texts, or the tokens of texts."""
        waiting = deque(enumerate(prompts))
        while waiting or self.rows:
            self._admit(waiting)
            yield from self._step()

    def encode(self, prompt: str | list[int]) -> list[int]:
        """An empty prompt begins where a document does: after the end of another."""
        if isinstance(prompt, str):
            check_text(prompt, "the prompt")
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids if isinstance(prompt, str) else prompt
        ids = ids or [self.last]
        vocab = self.engine.model.config.vocab
        if max(ids) >= vocab:
            raise AmorError(f"the tokenizer gives token {max(ids)}, but the model knows {vocab}; they do not belong together")
        return ids

    def _admit(self, waiting: deque[tuple[int, str | list[int]]]) -> None:
        free = min(self.most - len(self.rows), len(waiting))
        if not free:
            return
        names, texts = zip(*(waiting.popleft() for _ in range(free)), strict=True)
        ids = [self.encode(text) for text in texts]
        session = self.prefill(ids)
        sampler = Sampler(self.sampling, names, ids, self.engine.model.config.vocab)
        for name in names:
            self.rows.append(_Row(name, Detokenizer(self.tokenizer), Stopper(self.stop), self.max_tokens))
        if self.session is None or self.sampler is None:
            self.session, self.sampler = session, sampler
        else:
            self.session = self.session.join(session)
            self.sampler.join(sampler)

    def _step(self) -> Iterator[Piece]:
        """One token for every row; rows that end leave before the others are read on."""
        assert self.session is not None and self.sampler is not None
        found = self.session.next
        chosen = self.sampler.choose(found.logits)
        tokens, entropy, fire = chosen.tolist(), found.entropy.tolist(), found.fire.tolist()
        going = []
        for index, row in enumerate(self.rows):
            shown, end = self._show(row, tokens[index])
            yield Piece(row.name, tokens[index], shown, entropy[index], tuple(fire[index]), end)
            if not end:
                going.append(index)
        self.rows = [self.rows[i] for i in going]
        if not going:
            self.session = self.sampler = None
            return
        if len(going) < len(tokens):
            self.session = self.session.select(going)
            self.sampler.select(going)
        self.session.step(chosen[going])

    def _show(self, row: _Row, token: int) -> tuple[str, str]:
        row.left -= 1
        if token == self.last:
            return row.stopper.add(row.detokenizer.flush()) + row.stopper.flush(), "stop"
        shown = row.stopper.add(row.detokenizer.add(token))
        if row.stopper.stopped:
            return shown, "stop"
        if row.left == 0:
            shown += row.stopper.add(row.detokenizer.flush())
            return shown + ("" if row.stopper.stopped else row.stopper.flush()), "length"
        return shown, ""


def stream(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int = 128,
    stop: Sequence[str] = (),
    rows: int = ROWS,
    sampling: Sampling | None = None,
) -> Iterator[Piece]:
    """Tokens as they are written; those of several prompts come mixed, each with the number of its prompt."""
    return Writer(engine, tokenizer, sampling or Sampling(), max_tokens, stop, rows).write(prompts)


def generate(
    model: Amor | Engine,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int = 128,
    stop: Sequence[str] = (),
    **sampling: float | int,  # temperature, top_k, top_p, min_p, repetition_penalty, seed
) -> Text:
    """What a model writes after a prompt."""
    return generate_batch(model, tokenizer, [prompt], max_tokens=max_tokens, stop=stop, rows=1, **sampling)[0]


def generate_batch(
    model: Amor | Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int = 128,
    stop: Sequence[str] = (),
    rows: int = ROWS,  # written at the same time
    **sampling: float | int,  # as in generate
) -> list[Text]:
    """What a model writes after each of several prompts; none can change another's text."""
    if isinstance(prompts, str):
        raise AmorError("generate_batch takes several prompts; generate takes one")
    engine = model if isinstance(model, Engine) else Engine(model)
    found = [Text(prompt) for prompt in prompts]
    chosen = typed.convert(Sampling, sampling, "sampling")
    for piece in stream(engine, tokenizer, prompts, max_tokens=max_tokens, stop=stop, rows=rows, sampling=chosen):
        found[piece.row].take(piece)
    return found
