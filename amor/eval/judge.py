"""A model as it is judged: what it is asked becomes answers, computed or found in the store, with what its gates did for them.

Log-likelihoods come from amor/eval/score.py, texts from the engine. Nothing here knows lm-evaluation-harness.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from amor.data.encoder import Encoder
from amor.data.shards import dtype_for
from amor.data.tokenizer import end_of_text
from amor.decode.engine import Engine, Session
from amor.decode.generate import ROOM, Writer
from amor.decode.generate import ROWS as TEXTS
from amor.decode.sample import Sampling
from amor.errors import AmorError
from amor.eval.score import ROWS, Request, Scorer, Tally
from amor.eval.store import Answer, Kind, Store, key_of
from amor.judge.gates import all_told, own_gates
from amor.models.amor import Amor
from amor.ops.linear import each_alone
from amor.records.evals import Counts, Phases, Settings
from amor.vocabulary import vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]")


@dataclass
class Progress:
    """Told how many requests of a kind there are and how many are done."""

    begin: Callable[[str, int, int], None] = lambda kind, all_of_them, known: None
    step: Callable[[int], None] = lambda done: None


@dataclass(frozen=True)
class Writing:
    """How a text is to be written."""

    until: tuple[str, ...]
    tokens: int
    temperature: float

    def __iter__(self) -> Iterator[Any]:
        return iter((list(self.until), self.tokens, self.temperature))


@dataclass
class Judge:
    """A model with all that its answers depend on, and the store they are kept in."""

    model: Amor
    tokenizer: Tokenizer
    fingerprint: str  # of model and tokenizer
    store: Store
    settings: Settings = field(default_factory=Settings)
    rows: int = ROWS
    rank: int = 0  # of `ranks` that share the work: requests of others are answered with nothing
    ranks: int = 1
    progress: Progress = field(default_factory=Progress)
    computed: int = 0
    reused: int = 0
    tokens: int = 0
    gates: dict[str, dict[str, Tally]] = field(default_factory=dict)  # by task and phase

    def __post_init__(self) -> None:
        known = vocabulary(self.tokenizer)
        if known > self.model.config.vocab:
            knows = f"the tokenizer has {known:,} tokens, but the model knows {self.model.config.vocab:,}"
            raise AmorError(f"{knows}; they do not belong together")
        self.end = end_of_text(self.tokenizer)
        self.encoder = Encoder(self.tokenizer, dtype_for(known))
        self.first = self._beginning() if self.settings.bos else None
        told = {"closed": False, "open": True}.get(self.settings.gates)
        gates = own_gates(self.model) if told is None else all_told(self.model, told)
        self.engine: Engine | None = None
        decodes = self.settings.path == "decode"
        self.scorer = Scorer(self.model, gates=gates, rows=self.rows, engine=self._engine() if decodes else None, fed=self.fed)
        self.name = key_of(self.fingerprint, "segment", [self.settings.gates, self.settings.path, self.settings.max_length])

    def fed(self, tokens: int) -> None:
        self.tokens += tokens

    def _engine(self) -> Engine:
        if self.engine is None:
            self.engine = Engine(self.model)
        return self.engine

    def _beginning(self) -> int:
        for word in BEGINNINGS:
            found = self.tokenizer.token_to_id(word)
            if found is not None:
                return int(found)
        raise AmorError(f"--bos: the tokenizer has no token to begin with; looked for {', '.join(BEGINNINGS)}")

    def encode(self, text: str) -> list[int]:
        ids = [int(i) for i in np.asarray(self.encoder(text))]
        return ids if self.first is None else [self.first, *ids]

    def cut(self, ids: Sequence[int], room: int) -> tuple[int, ...]:
        """The last tokens of a context that leaves room for others, as the harness cuts."""
        most = self.settings.max_length
        if most is None:
            return tuple(ids)
        if room >= most:
            raise AmorError(f"max_length {most}: {room} tokens are to be judged or written, which leaves no context; give more")
        return tuple(ids[-(most - room) :])

    def ask(
        self, kind: Kind, asked: Sequence[tuple[str, Any]], compute: Callable[[list[int]], Iterator[tuple[int, Any, Phases]]]
    ) -> list[Any]:
        """Answers to (task, question), from the store or by compute(places), which tells them as it finds them."""
        keys = [key_of(self.name, kind, question) for _, question in asked]
        fresh: dict[str, int] = {}
        for place, key in enumerate(keys):
            if key not in self.store and key not in fresh:
                fresh[key] = place
        wanted = [place for key, place in fresh.items() if int(key[:8], 16) % self.ranks == self.rank]
        self.progress.begin(kind, len(asked), len(asked) - len(wanted))
        before = time.perf_counter()
        for place, said, phases in compute(wanted) if wanted else ():
            now = time.perf_counter()
            self.store.add([Answer(key=keys[place], kind=kind, said=said, gates=phases, seconds=now - before)])
            self.computed += 1
            self.progress.step(1)
            before = now
        self.reused += len(asked) - len(wanted)
        for (task, _), key in zip(asked, keys, strict=True):
            if key in self.store:
                for phase, counts in self.store[key].gates.items():
                    self.gates.setdefault(task, {}).setdefault(phase, Tally()).include(counts)
        return [self.store[key].said if key in self.store else None for key in keys]

    def phases(self) -> dict[str, Phases]:
        return {task: {phase: t.counts() for phase, t in found.items()} for task, found in self.gates.items()}  # type: ignore[misc]

    def score(self, asked: Sequence[tuple[str, Request]]) -> list[tuple[float, bool]]:
        def compute(places: list[int]) -> Iterator[tuple[int, Any, Phases]]:
            for at, scored in self.scorer.score([asked[place][1] for place in places]):
                yield places[at], [scored.logprob, scored.greedy], scored.phases

        questions = [(task, [list(request.context), list(request.target)]) for task, request in asked]
        return [(0.0, False) if said is None else (said[0], said[1]) for said in self.ask("loglikelihood", questions, compute)]

    def write(self, asked: Sequence[tuple[str, tuple[int, ...], Writing]]) -> list[str]:
        def compute(places: list[int]) -> Iterator[tuple[int, Any, Phases]]:
            for how in dict.fromkeys(asked[place][2] for place in places):
                some = sorted((p for p in places if asked[p][2] == how), key=lambda p: (-len(asked[p][1]), p))
                for at, text, phases in self._written([asked[place][1] for place in some], how):
                    yield some[at], text, phases

        questions = [(task, [list(prompt), *how]) for task, prompt, how in asked]
        return [said or "" for said in self.ask("generate_until", questions, compute)]

    def _written(self, prompts: list[tuple[int, ...]], how: Writing) -> Iterator[tuple[int, str, Phases]]:
        scorer = Scorer(self.model, gates=self.scorer.gates, engine=self._engine(), fed=self.fed)
        before: dict[tuple[int, ...], Counts] = {}

        def prefill(ids: list[list[int]]) -> Session:
            sessions = []
            for each in ids:  # each by itself: its bits, and with them its text, do not depend on the others
                with each_alone():
                    read = scorer.read([tuple(each)])
                before[tuple(each)] = read.before[0]
                sessions.append(scorer.session(read, min(how.tokens, ROOM)))
            return sessions[0].join(*sessions[1:]) if len(sessions) > 1 else sessions[0]

        sampling = Sampling(temperature=how.temperature)
        writer = Writer(scorer.engine or self._engine(), self.tokenizer, sampling, how.tokens, how.until, TEXTS, prefill)
        texts = [""] * len(prompts)
        counts = [Tally() for _ in prompts]
        for piece in writer.write([list(prompt) for prompt in prompts]):
            texts[piece.row] += piece.text
            counts[piece.row].include(Counts(tokens=1, fires=tuple(map(int, piece.fire))))
            self.tokens += 1
            if piece.end:
                phases: Phases = {"prefill": before[prompts[piece.row]], "decode": counts[piece.row].counts()}
                yield piece.row, texts[piece.row], phases if self.scorer.gates else {}
