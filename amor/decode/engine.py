"""The engine: prompts are read in chunks, then one token a row and step; rows join and leave without touching others.

A Session is what is being written: the State of its rows, which it owns, and what is known of each row's next token.
Steps run from packed weights (amor/decode/step.py) where there is native code for this machine, otherwise by the model's
own forward; `engine.path` says which and why. No saving changes a decision (amor/decode/savings.py).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from amor.decode import kernels
from amor.decode.head import Head
from amor.decode.probe import Stepping
from amor.decode.savings import Savings
from amor.decode.step import Packed
from amor.errors import AmorError
from amor.models.amor import Amor, Output
from amor.models.block import Trace
from amor.models.probe import Separate
from amor.ops import head as head_op
from amor.ops import native
from amor.ops.backends import wishes
from amor.ops.head import reference as all_logits
from amor.state import State

log = logging.getLogger("amor")
INSIDE = ("product", "scan", "delta", "conv", "gated_norm", "rowwise", "linear")  # operators whose place a packed step takes
CHUNK = 512  # tokens of a prompt read at a time


@dataclass(frozen=True)
class Next:
    """What is known of each row's next token, and what the gates decided at the last one."""

    logits: Tensor  # [B, V], or [B, 0] where only the best token was wanted
    entropy: Tensor  # [B] in nats; of a cheap probe, within its bound
    fire: Tensor  # [B, K] whether each block fired
    score: Tensor  # [B, K] what its gate compared with the threshold; of a cheap probe, within its bound
    found: Tensor  # [B, 1] the best token where it was found without the logits, else [B, 0]

    @property
    def best(self) -> Tensor:
        """[B] the token of the largest logit."""
        return self.found[:, 0] if self.found.shape[1] else self.logits.argmax(-1)

    def map(self, change: Any) -> Next:
        return Next(*(change(t) for t in self.fields()))

    def fields(self) -> tuple[Tensor, ...]:
        return self.logits, self.entropy, self.fire, self.score, self.found

    @staticmethod
    def join(every: Sequence[Next]) -> Next:
        if len({n.logits.shape[1] for n in every}) > 1:  # what one does not know, all forget
            every = [replace(n, logits=n.logits[:, :0], found=n.best[:, None]) for n in every]
        return Next(*(torch.cat(f) for f in zip(*(n.fields() for n in every), strict=True)))


@dataclass
class Tally:
    """What the steps of an engine have spent, counted where it was spent."""

    blocks: int
    steps: int = 0
    tokens: int = 0
    head_passes: int = 0
    cheap_passes: int = 0
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    prompt_head_rows: int = 0  # vectors the head was asked for while reading prompts
    fired: list[int] = field(default_factory=list)  # tokens that fired, a block
    keys_seen: int = 0  # keys met by queries that ran, over all blocks
    keys_skipped: int = 0  # keys that queries that did not run would have met

    def __post_init__(self) -> None:
        self.fired = self.fired or [0] * self.blocks

    @property
    def fire_rates(self) -> list[float]:
        return [f / max(self.tokens, 1) for f in self.fired]

    @property
    def head_passes_a_token(self) -> float:
        """A pass over the 8-bit copy reads a quarter of the bytes, and is counted as a quarter."""
        return (self.head_passes + self.cheap_passes / 4) / max(self.tokens, 1)

    @property
    def skipped(self) -> float:
        """The share of attention, in keys met, that did not run."""
        return self.keys_skipped / max(self.keys_seen + self.keys_skipped, 1)


class Engine:
    def __init__(self, model: Amor, savings: Savings | None = None, weights: str = "float32"):
        self.model, self.savings, self.weights = model.eval(), savings or Savings(), weights
        why = self._unpacked()
        if why is not None and weights != "float32":
            raise AmorError(f"weights {weights!r} need packed steps, which cannot run: {why}; use weights='float32'")
        self.packed = Packed(model, weights, self.savings) if why is None else None
        self.path = "packed steps" if why is None else f"the model's forward ({why})"
        log.info("decode by %s", self.path)
        self.head = self.packed.head if self.packed else Head(model.embed.weight, weights, self.savings.cheap)
        self.tally = Tally(len(model.each_block()))

    def _unpacked(self) -> str | None:
        """Why steps cannot run from packed weights, or None."""
        weight = self.model.embed.weight
        if not self.savings.packed:
            return "packed steps are switched off"
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            return f"packed steps are for float32 on cpu, the model is {weight.dtype} on {weight.device.type}"
        wanted = {
            op: name for op, name in wishes(os.environ.get("AMOR_KERNELS", "")).items() if op in INSIDE and name != "native"
        }
        if wanted:
            return (
                f"AMOR_KERNELS asks for {', '.join(f'{op}={name}' for op, name in wanted.items())}, and packed steps are native"
            )
        return native.missing(kernels.SOURCE)

    @property
    def nbytes(self) -> int:
        """Bytes of weights held: the model's own and what was packed besides."""
        own = sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))
        copies = 0 if self.head.copy is None else self.head.copy.nbytes
        return own + copies + (self.packed.nbytes if self.packed is not None and self.weights != "float32" else 0)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int = CHUNK, room: int = 0, memory: int = 0) -> Session:
        """Read prompts, a row each. `room`: tokens to be written, kept free; `memory`: tokens that can be taken back."""
        if not prompts or not all(len(p) for p in prompts):
            raise AmorError("an empty prompt has no last token to go on from; begin it with the tokenizer's end-of-text token")
        if chunk < 1:
            raise AmorError(f"chunk is {chunk}; at least 1 token is read at a time")
        began = time.perf_counter()
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        live = _Live(self, [list(prompts[i]) for i in order])
        for start in range(0, len(prompts[order[0]]), chunk):
            live.read(start, chunk)
        back = [order.index(i) for i in range(len(prompts))]
        session = live.finish().select(back) if len(prompts) > 1 else live.finish()
        self.tally.prompt_tokens += sum(len(p) for p in prompts)
        longest = max(len(p) for p in prompts)
        session.state = session.state.reserve(longest + room).remember(memory)
        self.tally.prompt_seconds += time.perf_counter() - began
        return session

    def resume(self, state: State) -> Session:
        """A session from a State that was saved or taken elsewhere; it is copied, and knows nothing of the next token yet."""
        return Session(self, state.fork(), None)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: State, best: bool = False) -> tuple[State, Next]:
        """One token a row, [B]; the State is written over. best: the logits of the next one may be left out."""
        before = replace(self.head.passes)
        if self.packed is not None:
            seen = self.packed.step(tokens, state, best)
            after, found = seen.state, _next(seen.logits, seen.entropy, seen.fire, seen.score, seen.best)
        else:
            after, found = self._forward(tokens[:, None], state, "true_sparse")
        self._count(before, state, found)
        return after, found

    def _count(self, before: Any, state: State, found: Next) -> None:
        tally, passes = self.tally, self.head.passes
        tally.steps += 1
        tally.tokens += state.rows
        tally.head_passes += passes.exact - before.exact
        tally.cheap_passes += passes.cheap - before.cheap
        if not tally.blocks:
            return
        keys = state.position + 1
        # one look at the decisions a step, for all rows and blocks
        counted = torch.cat([found.fire.sum(0), (keys[:, None] * found.fire).sum()[None], keys.sum()[None]]).tolist()
        tally.fired = [f + n for f, n in zip(tally.fired, counted, strict=False)]
        tally.keys_seen += counted[-2]
        tally.keys_skipped += counted[-1] * tally.blocks - counted[-2]

    def _forward(self, tokens: Tensor, state: State, compute: str, valid: Tensor | None = None) -> tuple[State, Next]:
        """The model's own forward with the savings switched on, and what it says of each row's next token."""
        savings = self.savings
        plain = Separate(self.model, None, self._read)
        ahead = savings.joint or savings.cheap
        probe = Stepping(self.model, self.head, plain, savings) if ahead else None
        compute = compute if savings.sparse else "full_with_mask"
        keep: Any = "last" if savings.last else "all"
        out = self.model(tokens, state, valid=valid, keep=keep, probe=probe or plain, compute=compute)
        hidden, gates = _last(out, valid)
        if probe is not None:
            logits, _, entropy = probe.probes.output(hidden)
            self.head.expect([g.fire[:, 0].tolist() for g in gates], len(hidden), probe.probes.doubts)
        else:
            self.head.passes.exact += 1
            self.head.passes.rows += len(hidden)
            logits = self.model.logits(hidden).float()
            logp = logits.log_softmax(-1)
            entropy = -(logp.exp() * logp).sum(-1)
        nothing = torch.zeros(len(hidden), 0, device=hidden.device)
        fire, score = (torch.cat([getattr(g, name) for g in gates], 1) if gates else nothing for name in ("fire", "score"))
        return out.state, _next(logits, entropy, fire.bool(), score)

    def _read(self, x: Tensor, weight: Tensor, *words: Any, **named: Any) -> head_op.Reading:
        self.head.passes.exact += 1
        self.head.passes.rows += len(x)
        read = head_op.read if self.savings.streamed else all_logits.read
        return read(x, weight, *words, **named)


class Session:
    """Rows being written."""

    def __init__(self, engine: Engine, state: State, found: Next | None):
        self.engine, self.state, self._next = engine, state, found

    @property
    def next(self) -> Next:
        if self._next is None:
            raise AmorError("nothing is known of the next token here: read one with step() first")
        return self._next

    @property
    def rows(self) -> int:
        return self.state.rows

    def step(self, tokens: Tensor | Sequence[int], best: bool = False) -> Next:
        """Read one token a row. best: of the next one only the best is asked, and its logits may be left out."""
        tokens = torch.as_tensor(tokens, device=self.state.position.device)
        if tokens.shape != (self.rows,):
            raise AmorError(f"step takes one token a row: {self.rows} rows, tokens of shape {list(tokens.shape)}")
        self.state, self._next = self.engine.step(tokens, self.state, best)
        return self._next

    def fork(self) -> Session:
        """An independent copy."""
        return Session(self.engine, self.state.fork(), self._next)

    def select(self, rows: Sequence[int]) -> Session:
        """Some rows; the others leave."""
        index = torch.as_tensor(rows, device=self.state.position.device)
        found = None if self._next is None else self._next.map(lambda t: t[index])
        return Session(self.engine, replace(self.state.select(rows), memory=self.state.memory), found)

    def join(self, *others: Session) -> Session:
        """This session's rows, then the others'."""
        every = (self, *others)
        state = replace(State.join([s.state for s in every]), memory=self.state.memory)
        if any(s._next is None for s in every):
            return Session(self.engine, state, None)
        return Session(self.engine, state, Next.join([s.next for s in every]))

    def rollback(self, count: int | Tensor) -> None:
        """Take back the last tokens of every row (as many as the session remembers); the next token is not known then."""
        self.state, self._next = self.state.rollback(count, self.engine.model.replay), None


class _Live:
    """Prompts being read, the longest first: a row leaves when its prompt ends."""

    def __init__(self, engine: Engine, prompts: list[list[int]]):
        self.engine, self.prompts = engine, prompts
        self.session = Session(engine, engine.model.start(len(prompts)), None)
        self.done: list[Session] = []

    def read(self, start: int, chunk: int) -> None:
        engine, device = self.engine, self.session.state.position.device
        parts = [p[start : start + chunk] for p in self.prompts]
        lengths = torch.tensor([len(p) for p in parts], device=device)
        columns = len(parts[0])
        tokens = torch.tensor([p + [0] * (columns - len(p)) for p in parts], device=device)
        valid = None if int(lengths.min()) == columns else torch.arange(columns, device=device) < lengths[:, None]
        before = engine.head.passes.rows
        after, found = engine._forward(tokens, self.session.state, "auto", valid)
        engine.tally.prompt_head_rows += engine.head.passes.rows - before
        self.session = Session(engine, after, found)
        self._leave(start + chunk)

    def _leave(self, read: int) -> None:
        going = [i for i, p in enumerate(self.prompts) if len(p) > read]
        if going and len(going) < len(self.prompts):
            self.done.insert(0, self.session.select(range(len(going), len(self.prompts))))
            self.session = self.session.select(going)
            self.prompts = self.prompts[: len(going)]

    def finish(self) -> Session:
        return self.session.join(*self.done) if self.done else self.session


def _next(logits: Tensor, entropy: Tensor, fire: Tensor, score: Tensor, best: Tensor | None = None) -> Next:
    found = fire.new_empty(len(fire), 0, dtype=torch.long) if best is None else best[:, None]
    return Next(logits, entropy, fire, score, found)


def _last(out: Output, valid: Tensor | None) -> tuple[Tensor, list[Trace]]:
    """Hidden vectors [B, D] and decisions [B, 1] of each row's last token; a call keeps them all, or the last block's last."""
    rows = torch.arange(len(out.hidden), device=out.hidden.device)

    def last(t: Tensor) -> Tensor:
        if t.shape[1] == 1 or valid is None:
            return t[:, -1]
        return t[rows, valid.sum(1) - 1]

    traces = [Trace(last(g.score)[:, None], last(g.fire)[:, None], g.threshold) for g in out.gates]
    return last(out.hidden), traces
