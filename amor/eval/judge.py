"""Answers of a model to evaluation requests, computed or taken from the store, with the gate counts
of each.

Log-likelihoods come from amor/eval/score.py, texts from the decode engine. Nothing here depends on
lm-evaluation-harness.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from amor.data.encoder import Encoder
from amor.data.shards import dtype_for
from amor.data.tokenizer import end_of_text
from amor.decode.engine import Engine, Session
from amor.decode.generate import ROOM, Generation, Generator
from amor.decode.generate import ROWS as TEXTS
from amor.decode.sample import Sampling
from amor.errors import AmorError
from amor.eval.score import ROWS, Scorer, ScoreRequest
from amor.eval.store import Answer, Kind, Store, key_of
from amor.eval.subject import Ranks
from amor.judge.gates import force_all, own_gates
from amor.models.amor import Amor
from amor.ops.linear import each_alone
from amor.progress import Progress
from amor.records.evals import EvalSettings, GateCounts, Phases
from amor.vocabulary import prefix_ids, vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# of some requests by index: (index, answer, gate counts) of each
Compute = Callable[[list[int]], Iterator[tuple[int, Any, Phases]]]


class GenerationOptions(NamedTuple):
    """How a text is generated."""

    until: tuple[str, ...]  # stop strings
    tokens: int  # at most
    temperature: float  # 0: greedy


@dataclass
class Judge:
    """A model with all that its answers depend on, and the store of answers."""

    model: Amor
    tokenizer: Tokenizer
    fingerprint: str  # of model and tokenizer
    store: Store
    settings: EvalSettings = field(default_factory=EvalSettings)  # what answers depend on
    rows: int = ROWS  # contexts per batch; no answer depends on it
    ranks: Ranks = field(default_factory=Ranks)  # requests of other ranks get an empty answer
    title: str = ""  # of progress bars; "": none are shown
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
        self.prefix = prefix_ids(self.tokenizer, self.settings.bos)  # before each context
        settings = self.settings
        forced = {"closed": False, "open": True}.get(settings.gates)
        gates = own_gates(self.model) if forced is None else force_all(self.model, forced)
        engine = self.engine if settings.path == "decode" else None
        self.scorer = Scorer(
            self.model, gates=gates, rows=self.rows, engine=engine, on_tokens=self.count_tokens
        )
        how = [settings.gates, settings.path, settings.max_length]
        self.name = key_of(self.fingerprint, "segment", how)

    @cached_property
    def engine(self) -> Engine:
        """The decode engine, made at first use."""
        return Engine(self.model)

    def count_tokens(self, tokens: int) -> None:
        """Count tokens fed to the model."""
        self.tokens += tokens

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without the prefix."""
        return np.asarray(self.encoder(text)).tolist()

    def cut(self, ids: Sequence[int], room: int) -> tuple[int, ...]:
        """The end of a context that leaves room for `room` tokens, as the harness truncates."""
        most = self.settings.max_length
        if most is None:
            return tuple(ids)
        if room >= most:
            lack = f"{room} tokens are to be judged or written, which leaves no context"
            raise AmorError(f"max_length {most}: {lack}; give more")
        return tuple(ids[-(most - room) :])

    def answer(
        self,
        kind: Kind,
        requests: Sequence[tuple[str, Any]],  # task and question
        compute: Compute,
    ) -> list[Any]:
        """The answers to requests, from the store or computed; None for those of other ranks."""
        keys = [key_of(self.name, kind, question) for _, question in requests]
        known, fresh = self.store.answers, dict[str, int]()
        for index, key in enumerate(keys):
            if key not in known:
                fresh.setdefault(key, index)
        rank, count = self.ranks.rank, self.ranks.count
        wanted = [i for key, i in fresh.items() if int(key[:8], 16) % count == rank]
        bar = Progress(f"{self.title}: {kind}", len(wanted), "requests") if self.title else None
        before = time.perf_counter()
        with bar or nullcontext():
            for index, value, phases in compute(wanted) if wanted else ():
                seconds, before = time.perf_counter() - before, time.perf_counter()
                self.store.add(
                    Answer(key=keys[index], kind=kind, value=value, gates=phases, seconds=seconds)
                )
                self.computed += 1
                if bar is not None:
                    bar.add(1)
        self.reused += len(requests) - len(wanted)
        for (task, _), key in zip(requests, keys, strict=True):
            if key in known:
                total = self.gates.setdefault(task, {})
                for phase, counts in known[key].gates.items():
                    so_far = total.get(phase, GateCounts(tokens=0))
                    if so_far.tokens and len(so_far.fires) != len(counts.fires):
                        sizes = f"{len(counts.fires)} blocks beside counts of {len(so_far.fires)}"
                        hint = "delete the file to compute its answers again"
                        raise AmorError(f"{self.store.path}: counts of {sizes}; {hint}")
                    total[phase] = so_far + counts
        return [known[key].value if key in known else None for key in keys]

    def score(self, requests: Sequence[tuple[str, ScoreRequest]]) -> list[tuple[float, bool]]:
        """Log-likelihoods of (task, request), and whether greedy decoding gives the target."""

        def compute(wanted: list[int]) -> Iterator[tuple[int, Any, Phases]]:
            for at, score in self.scorer.score([requests[index][1] for index in wanted]):
                yield wanted[at], [score.logprob, score.greedy], score.phases

        questions = [(task, [request.context, request.target]) for task, request in requests]
        answers = self.answer("loglikelihood", questions, compute)
        return [(0.0, False) if each is None else (each[0], each[1]) for each in answers]

    def write(
        self, requests: Sequence[tuple[str, tuple[int, ...], GenerationOptions]]
    ) -> list[str]:
        """Texts generated after prompts; requests are (task, prompt, options)."""

        def compute(wanted: list[int]) -> Iterator[tuple[int, Any, Phases]]:
            for options in dict.fromkeys(requests[index][2] for index in wanted):
                some = [index for index in wanted if requests[index][2] == options]
                some.sort(key=lambda index: (-len(requests[index][1]), index))
                prompts = [requests[index][1] for index in some]
                for at, text, phases in self._generate(prompts, options):
                    yield some[at], text, phases

        questions = [(task, [prompt, *options]) for task, prompt, options in requests]
        return [text or "" for text in self.answer("generate_until", questions, compute)]

    def _generate(
        self, prompts: list[tuple[int, ...]], options: GenerationOptions
    ) -> Iterator[tuple[int, str, Phases]]:
        scorer = Scorer(
            self.model, gates=self.scorer.gates, engine=self.engine, on_tokens=self.count_tokens
        )
        assert scorer.engine is not None
        before: dict[tuple[int, ...], GateCounts] = {}

        def prefill(ids: list[list[int]]) -> Session:
            sessions = []
            for each in ids:  # alone: its bits, and with them its text, do not depend on the others
                with each_alone():
                    read = scorer.read([tuple(each)])
                before[tuple(each)] = read.before[0]
                sessions.append(scorer.session(read, min(options.tokens, ROOM)))
            return sessions[0].join(*sessions[1:]) if len(sessions) > 1 else sessions[0]

        sampling = Sampling(temperature=options.temperature)
        writer = Generator(
            scorer.engine, self.tokenizer, sampling, options.tokens, options.until, TEXTS, prefill
        )
        texts = [Generation(list(prompt)) for prompt in prompts]
        for piece in writer.run([list(prompt) for prompt in prompts]):
            text = texts[piece.row]
            text.append(piece)
            self.tokens += 1
            if piece.end:
                fires = tuple(map(sum, zip(*text.fire)))
                counts = GateCounts(tokens=len(text.tokens), fires=fires)
                phases: Phases = {"prefill": before[prompts[piece.row]], "decode": counts}
                yield piece.row, text.text, phases if self.scorer.gates else {}
