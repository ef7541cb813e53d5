"""Ways of feeding tokens to the decode engine, for `amor check`: prompts, steps, rows that join and
leave.

Outputs inside a prompt are not observed, only those from the prompt's last token on. A decision
inside it whose score lies at the threshold could fall either way unobserved, so a prompt ends
before the first token with such a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from amor.decode.engine import Engine, Session
from amor.decode.step_output import StepOutput
from amor.judge.feeding import Feeder, FeedOutput, join


class EngineFeeder:
    """Rows of a feeder fed to an engine, with its outputs from the end of each prompt on."""

    def __init__(self, feeder: Feeder, engine: Engine):
        self.feeder, self.engine = feeder, engine
        self.tokens = [row[0].tolist() for row in feeder.rows()]
        self.outputs: list[list[FeedOutput]] = [[] for _ in self.tokens]  # per row, one per token
        self.starts = [0] * len(self.tokens)  # the column of a row's first output
        self.rows: list[int] = []  # in the session, in its order
        self.session: Session | None = None

    def prefill(self, rows: Sequence[int], lengths: Sequence[int], chunk: int = 512) -> None:
        """Read the first tokens of some rows as prompts; the rows join the session."""
        prompts = [self.tokens[row][:n] for row, n in zip(rows, lengths, strict=True)]
        fresh = self.engine.prefill(prompts, chunk=chunk)
        self.session = fresh if self.session is None else self.session.join(fresh)
        self.rows += rows
        for row, length in zip(rows, lengths, strict=True):
            self.starts[row] = length - 1
        self.record(fresh.next, rows)

    def begin(self, row: int) -> None:
        """Start a row from an empty state: even its first token is a step of the engine."""
        self.session = self.engine.resume(self.engine.model.start(1))
        self.rows = [row]

    def step(self) -> None:
        """One token of every row in the session."""
        assert self.session is not None
        tokens = [self.tokens[row][self.position(row)] for row in self.rows]
        self.record(self.session.step(tokens), self.rows)

    def position(self, row: int) -> int:
        """How many tokens of a row have been read."""
        return self.starts[row] + len(self.outputs[row])

    def step_ahead(self) -> None:
        """Some tokens of every row and wrong ones behind them in one pass; the wrong ones are taken
        back, and every row is forked and rolled back once."""
        assert self.session is not None
        random, vocab = self.feeder.random, self.engine.model.config.vocab
        drafts, counts = [], []
        for row in self.rows:
            rest = self.tokens[row][self.position(row) :][: random.randint(1, 4)]
            drafts.append(rest + [random.randrange(vocab) for _ in range(random.randint(0, 2))])
            counts.append(len(rest))
        output = self.session.step_ahead(drafts)
        self.session.accept(counts)
        fork = self.session.fork()
        fork.step([random.randrange(vocab) for _ in self.rows])
        kept = [row for row, n in zip(self.rows, counts, strict=True) for _ in range(n)]
        first = [sum(map(len, drafts[:index])) for index in range(len(drafts))]
        lines = [start + t for start, n in zip(first, counts, strict=True) for t in range(n)]
        self.record(output.map(lambda t: t[lines]), kept)

    def record(self, output: StepOutput, rows: Sequence[int]) -> None:
        """Keep the output of one token of some rows; rows at their end leave the session, with
        their final states kept."""
        assert self.session is not None
        for index, row in enumerate(rows):
            logits, score, fire = (
                t[index : index + 1].clone() for t in (output.logits, output.score, output.fire)
            )
            kept = FeedOutput(logits[:, None], score[..., None], fire[..., None], None)
            self.outputs[row].append(kept)
        going = []
        for index, row in enumerate(self.rows):
            if self.position(row) < len(self.tokens[row]):
                going.append(index)
            else:
                state = self.session.select([index]).state
                self.outputs[row][-1] = replace(self.outputs[row][-1], state=state)
        if len(going) < len(self.rows):
            self.keep(going)

    def keep(self, order: Sequence[int]) -> None:
        """Reduce the session to some of its rows, in this order."""
        assert self.session is not None
        self.session = self.session.select(order) if order else None
        self.rows = [self.rows[index] for index in order]

    def finish(self) -> None:
        """Step until every row has been read."""
        while self.rows:
            self.step()

    def results(self) -> list[FeedOutput]:
        """The outputs of every row as one."""
        return [join(*each) for each in zip(self.outputs, self.starts, strict=True)]


def engine_steps(feeder: Feeder, engine: Engine, clear: list[int]) -> list[FeedOutput]:
    """Every row by itself: a prompt of one token, then token by token."""
    fed = EngineFeeder(feeder, engine)
    for row in range(len(feeder.lengths)):
        fed.prefill([row], [1])
        fed.finish()
    return fed.results()


def engine_steps_only(feeder: Feeder, engine: Engine) -> list[FeedOutput]:
    """Every row by itself, every token a step."""
    fed = EngineFeeder(feeder, engine)
    for row in range(len(feeder.lengths)):
        fed.begin(row)
        fed.finish()
    return fed.results()


def engine_chunks(feeder: Feeder, engine: Engine, clear: list[int]) -> list[FeedOutput]:
    """Every row by itself: a prompt of random length in random chunks, then token by token."""
    fed = EngineFeeder(feeder, engine)
    for row, length in enumerate(feeder.lengths):
        prompt = feeder.random.randint(1, min(length, clear[row]))
        fed.prefill([row], [prompt], chunk=feeder.random.randint(1, max(prompt // 2, 1)))
        fed.finish()
    return fed.results()


def engine_rows(feeder: Feeder, engine: Engine, clear: list[int]) -> list[FeedOutput]:
    """Ragged prompts; rows join later, change their order at every step, leave where they end."""
    fed, count = EngineFeeder(feeder, engine), len(feeder.lengths)
    prompts = [feeder.random.randint(1, min(n, clear[row])) for row, n in enumerate(feeder.lengths)]
    halves = list(range(count // 2)), list(range(count // 2, count))
    for rows in halves:
        if rows:
            fed.prefill(rows, [prompts[row] for row in rows], chunk=feeder.random.randint(1, 64))
        for _ in range(3):
            order = list(range(len(fed.rows)))
            feeder.random.shuffle(order)
            if order:
                fed.keep(order)
                fed.step()
    fed.finish()
    return fed.results()


def engine_drafts(feeder: Feeder, engine: Engine, clear: list[int]) -> list[FeedOutput]:
    """All rows at once, several tokens per pass with wrong drafts behind them."""
    fed = EngineFeeder(feeder, engine)
    prompts = [feeder.random.randint(1, min(n, clear[r])) for r, n in enumerate(feeder.lengths)]
    fed.prefill(range(len(prompts)), prompts)
    while fed.rows:
        fed.step_ahead()
    return fed.results()


# name in the table of `amor check` -> the way; clear: how long the prompt of each row may be
ENGINE_WAYS: dict[str, Callable[[Feeder, Engine, list[int]], list[FeedOutput]]] = {
    "engine steps": engine_steps,
    "engine, chunked prefill": engine_chunks,
    "engine, rows join and leave": engine_rows,
    "engine, drafts taken back": engine_drafts,
}
