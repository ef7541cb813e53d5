"""Answers of a model to evaluation requests, computed or taken from the store, with the gate counts
of each.

Log-likelihoods come from amor/eval/score.py, texts from the decode engine. Nothing here knows
lm-evaluation-harness.
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
from amor.decode.generate import ROOM, Generator
from amor.decode.generate import ROWS as TEXTS
from amor.decode.sample import Sampling
from amor.errors import AmorError
from amor.eval.score import ROWS, Scorer, ScoreRequest
from amor.eval.store import Answer, Kind, Store, key_of
from amor.judge.gates import force_all, own_gates
from amor.models.amor import Amor
from amor.ops.linear import each_alone
from amor.progress import Progress
from amor.records.evals import EvalSettings, GateCounts, Phases
from amor.vocabulary import vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS_TOKENS = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]")


@dataclass(frozen=True)
class GenerationOptions:
    """How a text is generated: stop strings, tokens at most, sampling temperature (0: greedy)."""

    until: tuple[str, ...]
    tokens: int
    temperature: float

    def __iter__(self) -> Iterator[Any]:
        return iter((list(self.until), self.tokens, self.temperature))


@dataclass
class Judge:
    """A model with everything its answers depend on, and the store of answers. Several ranks may
    share the requests."""

    model: Amor
    tokenizer: Tokenizer
    fingerprint: str  # of model and tokenizer
    store: Store
    settings: EvalSettings = field(default_factory=EvalSettings)
    rows: int = ROWS
    rank: int = 0  # of `ranks`: requests of other ranks get an empty answer
    ranks: int = 1
    progress: Progress | None = None  # shows how many requests are computed
    computed: int = 0  # requests
    reused: int = 0  # requests that the store held
    tokens: int = 0  # fed to the model
    gates: dict[str, Phases] = field(default_factory=dict)  # by task

    def __post_init__(self) -> None:
        size = vocabulary(self.tokenizer)
        if size > self.model.config.vocab:
            sizes = f"the tokenizer has {size:,} tokens, but the model {self.model.config.vocab:,}"
            raise AmorError(f"{sizes}; they do not belong together")
        self.end = end_of_text(self.tokenizer)
        self.encoder = Encoder(self.tokenizer, dtype_for(size))
        self.first = self._bos_token() if self.settings.bos else None
        forced = {"closed": False, "open": True}.get(self.settings.gates)
        gates = own_gates(self.model) if forced is None else force_all(self.model, forced)
        self.engine: Engine | None = None
        decodes = self.settings.path == "decode"
        self.scorer = Scorer(
            self.model,
            gates=gates,
            rows=self.rows,
            engine=self._engine() if decodes else None,
            on_tokens=self.count_tokens,
        )
        self.name = key_of(
            self.fingerprint,
            "segment",
            [self.settings.gates, self.settings.path, self.settings.max_length],
        )

    def count_tokens(self, tokens: int) -> None:
        """Count tokens fed to the model."""
        self.tokens += tokens

    def _engine(self) -> Engine:
        if self.engine is None:
            self.engine = Engine(self.model)
        return self.engine

    def _bos_token(self) -> int:
        for word in BOS_TOKENS:
            token = self.tokenizer.token_to_id(word)
            if token is not None:
                return int(token)
        raise AmorError(
            f"--bos: the tokenizer has no token to begin with; looked for {', '.join(BOS_TOKENS)}"
        )

    def encode(self, text: str) -> list[int]:
        """Token ids, behind the tokenizer's BOS token where the settings ask for one."""
        ids = [int(i) for i in np.asarray(self.encoder(text))]
        return ids if self.first is None else [self.first, *ids]

    def cut(self, ids: Sequence[int], room: int) -> tuple[int, ...]:
        """The last tokens of a context that leave room for `room` more within max_length, as the
        harness truncates."""
        most = self.settings.max_length
        if most is None:
            return tuple(ids)
        if room >= most:
            raise AmorError(
                f"max_length {most}: {room} tokens are to be judged or written, which leaves no "
                "context; give more"
            )
        return tuple(ids[-(most - room) :])

    def answer(
        self,
        kind: Kind,
        requests: Sequence[tuple[str, Any]],  # task and question
        compute: Callable[[list[int]], Iterator[tuple[int, Any, Phases]]],
    ) -> list[Any]:
        """Answers from the store, or by compute(indices of requests), which yields (index, answer,
        gate counts)."""
        keys = [key_of(self.name, kind, question) for _, question in requests]
        fresh: dict[str, int] = {}
        for place, key in enumerate(keys):
            if key not in self.store and key not in fresh:
                fresh[key] = place
        wanted = [
            place for key, place in fresh.items() if int(key[:8], 16) % self.ranks == self.rank
        ]
        if self.progress is not None:
            self.progress.begin(kind, len(wanted))
        before = time.perf_counter()
        for index, said, phases in compute(wanted) if wanted else ():
            now = time.perf_counter()
            self.store.add(
                [Answer(key=keys[index], kind=kind, said=said, gates=phases, seconds=now - before)]
            )
            self.computed += 1
            if self.progress is not None:
                self.progress.add(1)
            before = now
        self.reused += len(requests) - len(wanted)
        for (task, _), key in zip(requests, keys, strict=True):
            if key in self.store:
                total = self.gates.setdefault(task, {})
                for phase, counts in self.store[key].gates.items():
                    total[phase] = total.get(phase, GateCounts(tokens=0)) + counts
        return [self.store[key].said if key in self.store else None for key in keys]

    def score(self, requests: Sequence[tuple[str, ScoreRequest]]) -> list[tuple[float, bool]]:
        """Log-likelihoods, each with whether its target is what greedy decoding writes; requests
        are (task, request)."""

        def compute(places: list[int]) -> Iterator[tuple[int, Any, Phases]]:
            for at, score in self.scorer.score([requests[place][1] for place in places]):
                yield places[at], [score.logprob, score.greedy], score.phases

        questions = [
            (task, [list(request.context), list(request.target)]) for task, request in requests
        ]
        answers = self.answer("loglikelihood", questions, compute)
        return [(0.0, False) if said is None else (said[0], said[1]) for said in answers]

    def write(
        self, requests: Sequence[tuple[str, tuple[int, ...], GenerationOptions]]
    ) -> list[str]:
        """Texts generated after prompts; requests are (task, prompt, options)."""

        def compute(places: list[int]) -> Iterator[tuple[int, Any, Phases]]:
            for how in dict.fromkeys(requests[place][2] for place in places):
                some = sorted(
                    (p for p in places if requests[p][2] == how),
                    key=lambda p: (-len(requests[p][1]), p),
                )
                for at, text, phases in self._generate([requests[place][1] for place in some], how):
                    yield some[at], text, phases

        questions = [(task, [list(prompt), *how]) for task, prompt, how in requests]
        return [said or "" for said in self.answer("generate_until", questions, compute)]

    def _generate(
        self, prompts: list[tuple[int, ...]], how: GenerationOptions
    ) -> Iterator[tuple[int, str, Phases]]:
        scorer = Scorer(
            self.model, gates=self.scorer.gates, engine=self._engine(), on_tokens=self.count_tokens
        )
        before: dict[tuple[int, ...], GateCounts] = {}

        def prefill(ids: list[list[int]]) -> Session:
            sessions = []
            for (
                each
            ) in ids:  # each alone: its bits, and with them its text, do not depend on the others
                with each_alone():
                    read = scorer.read([tuple(each)])
                before[tuple(each)] = read.before[0]
                sessions.append(scorer.session(read, min(how.tokens, ROOM)))
            return sessions[0].join(*sessions[1:]) if len(sessions) > 1 else sessions[0]

        sampling = Sampling(temperature=how.temperature)
        writer = Generator(
            scorer.engine or self._engine(),
            self.tokenizer,
            sampling,
            how.tokens,
            how.until,
            TEXTS,
            prefill,
        )
        texts = [""] * len(prompts)
        counts = [GateCounts(tokens=0) for _ in prompts]
        for piece in writer.run([list(prompt) for prompt in prompts]):
            texts[piece.row] += piece.text
            counts[piece.row] += GateCounts(tokens=1, fires=tuple(map(int, piece.fire)))
            self.tokens += 1
            if piece.end:
                phases: Phases = {
                    "prefill": before[prompts[piece.row]],
                    "decode": counts[piece.row],
                }
                yield piece.row, texts[piece.row], phases if self.scorer.gates else {}
