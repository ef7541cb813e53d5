"""Log-likelihoods of continuations: each context is read once and its state forked for its
continuations; the LM head is computed at targets only.

A score depends on its request alone, to the bit: neither on how many requests are batched, nor on
which, nor on their order. So a row is padded to a width that follows from its own length (another
width would change how scans are cut into chunks, and with that the rounding), and matrix products
are batch-invariant (`each_alone`). Two paths (`records.evals.Path`): `likelihood` runs the model's
forward over whole targets; `decode` steps through the target token by token in the engine, where a
closed gate really skips its work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amor.decode.engine import Engine, Session
from amor.decode.step_output import StepOutput
from amor.gates.base import Gate
from amor.judge.gates import own_gates
from amor.judge.loop import Chunk, ChunkOutput, ignore_tokens, run_chunks
from amor.models.amor import Amor
from amor.ops import head
from amor.ops.chunks import LARGEST, MULTIPLE
from amor.ops.linear import each_alone
from amor.records.evals import GateCounts, Phases
from amor.state import State

CHUNK = 4096  # columns per forward call of a long context, which bounds the memory of activations
TOKENS = 8192  # per forward call at most, unless a single row is longer
ROWS = 32  # contexts per batch


@dataclass(frozen=True)
class ScoreRequest:
    """The log-likelihood of `target` after `context`; token ids, at least one each."""

    context: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class TargetScore:
    """The answer to a ScoreRequest."""

    logprob: float  # of the target, in nats
    greedy: bool  # whether each of its tokens is the likeliest
    phases: Phases  # what gates did; empty for a model without gates


@dataclass(frozen=True)
class ContextOutput:
    """n contexts after their last token."""

    hidden: Tensor  # [n, D] at that token
    fire: Tensor  # [n, K] at that token
    score: Tensor  # [n, K] at that token
    state: State  # after it
    before: list[GateCounts]  # per context: at all tokens before


# of a batch: row of the context, index of the request, target
Member = tuple[int, int, tuple[int, ...]]
TokenScore = tuple[float, bool]  # log-likelihood of a token, and whether it is the likeliest
# by request: the score of each token of its target, and what gates did there
RequestScores = tuple[dict[int, list[TokenScore]], dict[int, GateCounts]]


class Scorer:
    """Computes ScoreRequests in batches of equal padded width."""

    def __init__(
        self,
        model: Amor,
        *,
        gates: Sequence[Gate] | None = None,  # one per block; None: the model's own
        rows: int = ROWS,
        engine: Engine | None = None,  # given: the decode path
        on_tokens: Callable[[int], None] = ignore_tokens,  # called with the number of tokens fed
    ):
        self.model, self.rows, self.on_tokens = model.eval(), rows, on_tokens
        self.gates = own_gates(model) if gates is None else list(gates)
        self.engine = None if engine is None else engine.behind(self.gates)

    @torch.no_grad()
    def score(self, requests: Sequence[ScoreRequest]) -> Iterator[tuple[int, TargetScore]]:
        """Every request once, with its index; longest contexts first, to estimate time early."""
        by_context: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            by_context.setdefault(request.context, []).append(index)
        contexts = sorted(by_context, key=lambda c: (-len(c), c))
        by_forward = self.engine is None
        for batch in batches(contexts, self.rows):
            members = [
                (row, i, requests[i].target) for row, c in enumerate(batch) for i in by_context[c]
            ]
            with each_alone():
                read = self.read(batch)
                scores, counts = (self._by_forward if by_forward else self._by_steps)(read, members)
            before = read.before
            del read  # its state, which is large, before the next batch is read
            for row, index, _ in members:
                logprobs, greedy = zip(*scores[index], strict=True)
                phases: Phases = {"prefill": before[row]}
                phases["target" if by_forward else "decode"] = counts[index]
                score = TargetScore(sum(logprobs), all(greedy), phases if self.gates else {})
                yield index, score

    def read(self, contexts: Sequence[tuple[int, ...]]) -> ContextOutput:
        """Read contexts from their beginning; longest first."""
        lengths = torch.tensor([len(context) for context in contexts])
        before = [GateCounts(tokens=0) for _ in contexts]
        ends: list[tuple[Tensor, Tensor, Tensor]] = [()] * len(contexts)  # type: ignore[list-item]
        state = None
        for output in self._run(contexts, None):
            state, columns = output.out.state, output.chunk.place[1]
            fire, score, valid = output.fire.cpu(), output.score.cpu(), _valid(output)
            here = valid & (torch.arange(columns.start, columns.stop) < lengths[:, None] - 1)
            before = [a + b for a, b in zip(before, count_gates(fire, here), strict=True)]
            for row, length in enumerate(lengths.tolist()):
                if columns.start < length <= columns.stop:
                    at = length - 1 - columns.start
                    ends[row] = output.out.hidden[row, at], fire[:, row, at], score[:, row, at]
        hidden, fire, score = (torch.stack(each) for each in zip(*ends, strict=True))
        assert state is not None
        return ContextOutput(hidden, fire, score, state, before)

    def session(self, read: ContextOutput, room: int = 0) -> Session:
        """A session of the engine behind contexts, with memory reserved for `room` more tokens."""
        assert self.engine is not None
        output = StepOutput(read.fire, read.score, self.engine._logits(read.hidden))
        return Session(self.engine, read.state, output, room)

    def _by_forward(self, read: ContextOutput, members: list[Member]) -> RequestScores:
        # the first token of a target is predicted at the last token of its context
        hidden = read.hidden[[row for row, *_ in members]]
        first = self._token_scores(hidden, [target[0] for *_, target in members])
        scores = {index: [each] for (_, index, _), each in zip(members, first, strict=True)}
        last = _count_step(read.fire)
        counts = {index: last[row] for row, index, _ in members}
        rest = sorted((m for m in members if len(m[2]) > 1), key=lambda m: (-len(m[2]), m[1]))
        for batch in batches([target[:-1] for *_, target in rest], 4 * self.rows):
            some, rest = rest[: len(batch)], rest[len(batch) :]
            for output in self._run(batch, read.state.select([row for row, *_ in some])):
                valid, start = _valid(output), output.chunk.place[1].start
                parts = [target[start + 1 : start + 1 + CHUNK] for *_, target in some]
                tokens = [token for part in parts for token in part]
                each = iter(self._token_scores(output.out.hidden[valid], tokens))
                gates = count_gates(output.fire.cpu(), valid)
                for (_, index, _), part, done in zip(some, parts, gates, strict=True):
                    scores[index] += [next(each) for _ in part]
                    counts[index] += done
        return scores, counts

    def _by_steps(self, read: ContextOutput, members: list[Member]) -> RequestScores:
        """Rows of all contexts step together; a row leaves with its last token."""
        members = sorted(members, key=lambda m: (-len(m[2]), m[1]))
        session = self.session(read).select([row for row, *_ in members])
        scores: dict[int, list[TokenScore]] = {index: [] for _, index, _ in members}
        counts = {index: GateCounts(tokens=0) for _, index, _ in members}
        for at in range(len(members[0][2])):
            going = [m for m in members if len(m[2]) > at]
            if len(going) < session.rows:
                session = session.select(range(len(going)))
            if at:
                session.step([target[at - 1] for *_, target in going])
                self.on_tokens(len(going))
            now = session.next
            logprobs, best = now.logits.double().log_softmax(-1), now.greedy_token.tolist()
            gates = _count_step(now.fire)
            for row, (_, index, target) in enumerate(going):
                scores[index].append((float(logprobs[row, target[at]]), best[row] == target[at]))
                counts[index] += gates[row]
        return scores, counts

    def _run(self, rows: Sequence[tuple[int, ...]], state: State | None) -> Iterator[ChunkOutput]:
        """Rows fed from a state, longest first and padded on the right."""
        return run_chunks(
            self.model,
            pad_rows(rows, self.model.embed.weight.device),
            state=state,
            gates=self.gates,
            compute="true_sparse",
            on_tokens=self.on_tokens,
        )

    def _token_scores(self, hidden: Tensor, targets: Sequence[int]) -> list[TokenScore]:
        """Scores of the tokens that follow hidden vectors [n, D]."""
        wanted = torch.tensor(list(targets), device=hidden.device)
        read = head.read(hidden, self.model.head_weight, wanted, topk=1)
        assert read.nll is not None and read.topk is not None
        best = read.topk[1][:, 0] == wanted
        return [(-nll, hit) for nll, hit in zip(read.nll.tolist(), best.tolist(), strict=True)]


def count_gates(fire: Tensor, here: Tensor) -> list[GateCounts]:
    """Per row, how often each block fired where `here` [B, T] is True; fire [K, B, T]."""
    fires = (fire & here).sum(2).T.tolist()  # [B, K]
    return [
        GateCounts(tokens=n, fires=tuple(each)) if n and each else GateCounts(tokens=0)
        for n, each in zip(here.sum(1).tolist(), fires, strict=True)
    ]


def _count_step(fire: Tensor) -> list[GateCounts]:
    """Counts per row of one token each; fire [n, K]."""
    return count_gates(fire.T[..., None], torch.ones(len(fire), 1, dtype=torch.bool))


def _valid(output: ChunkOutput) -> Tensor:
    assert output.chunk.valid is not None
    return output.chunk.valid.cpu()


def pad_rows(rows: Sequence[tuple[int, ...]], device: torch.device) -> Iterator[Chunk]:
    """Rows of different lengths, longest first, as chunks padded on the right."""
    for start in range(0, len(rows[0]), CHUNK):
        some = [row[start : start + CHUNK] for row in rows]
        # after the first chunk rows of all lengths share a batch: a width at which every chunk of a
        # scan is whole
        columns = max(padded_width(len(some[0])), LARGEST if start else 0)
        tokens = torch.tensor([[*row, *[0] * (columns - len(row))] for row in some], device=device)
        valid = torch.arange(columns) < torch.tensor([len(row) for row in some])[:, None]
        place = slice(0, len(rows)), slice(start, start + columns)
        yield Chunk(place, tokens, valid=valid.to(device))


def padded_width(length: int) -> int:
    """Columns of a row: rounded up to the multiple that scans cut by, so that its chunks follow
    from its length alone."""
    return -(-length // MULTIPLE) * MULTIPLE


def batches(rows: Sequence[tuple[int, ...]], most: int) -> Iterator[list[tuple[int, ...]]]:
    """Rows, longest first, in batches of limited tokens; short rows only with their width."""
    start = 0
    while start < len(rows):
        width = padded_width(len(rows[start]))
        end = start + 1
        limit = start + min(most, max(TOKENS // width, 1))
        while end < min(limit, len(rows)):
            other = padded_width(len(rows[end]))
            if other != width and other <= LARGEST:
                break
            end += 1
        yield list(rows[start:end])
        start = end
