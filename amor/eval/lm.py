"""A model of ours as lm-evaluation-harness wants one.

    from amor.eval.lm import AmorLM
    lm_eval.simple_evaluate(model=AmorLM.of("runs/demo"), tasks=["boolq", "wikitext"])

Requests become token ids here, as in the harness's own models; a Judge answers them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from amor.data.tokenizer import tokenizer_hash
from amor.errors import AmorError, install_hint
from amor.eval.judge import GenerationOptions, Judge
from amor.eval.score import ROWS, ScoreRequest
from amor.eval.store import Store
from amor.eval.subject import fingerprint
from amor.models.folder import load
from amor.records.evals import EvalSettings, Gates
from amor.records.evals import Path as EvalPath
from amor.vocabulary import prefix_ids

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise AmorError(
        f"evaluation needs lm-evaluation-harness ({error}): {install_hint('eval')}"
    ) from None

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

WRITTEN = 256  # tokens of a generated text where a task does not limit it


class AmorLM(TemplateLM):
    """A Judge with the interface of the harness's models; `AmorLM.of(folder)` makes one."""

    def __init__(self, judge: Judge):
        super().__init__()
        self.judge = judge

    @classmethod
    def of(
        cls,
        folder: str | Path,
        *,
        store: str | Path | None = None,
        add_bos: bool | None = None,
        gates: Gates = "model",
        path: EvalPath = "likelihood",
        max_length: int | None = None,
        rows: int = ROWS,
    ) -> AmorLM:
        """The model and the tokenizer of a folder, ready for the harness.

            lm = AmorLM.of("runs/demo")
            lm_eval.simple_evaluate(model=lm, tasks=["boolq"], limit=100)
            lm.judge.gates["boolq"]  # how often each block fired

        Args:
            folder: a model folder with a tokenizer, or a run of `amor train` (its newest model).
            store: a file that answers are written to and taken from the next time; None: memory.
            add_bos: what stands before each context, see `amor.vocabulary.prefix_ids`.
            gates: "model", or "closed" or "open" on all tokens.
            path: "likelihood" reads targets whole, "decode" token by token.
            max_length: tokens of a request, cut on the left; None: no limit.
            rows: contexts per batch; no score depends on it.
        """
        model, tokenizer = load(folder)
        if tokenizer is None:
            raise AmorError(f"{folder} holds no tokenizer.json, which an evaluation needs")
        bos = bool(prefix_ids(tokenizer, add_bos))
        settings = EvalSettings(gates=gates, path=path, max_length=max_length, bos=bos)
        name = f"{fingerprint(model)} {tokenizer_hash(tokenizer)}"
        answers = Store(None if store is None else Path(store))
        return cls(Judge(model, tokenizer, name, answers, settings, rows))

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token of the tokenizer."""
        return self.judge.end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context: BOS, or else end-of-text."""
        return (self.judge.prefix or [self.judge.end])[0]

    @property
    def max_length(self) -> int:
        """Tokens of a request at most; a million where nothing limits it."""
        return self.judge.settings.max_length or 1 << 20

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's cache of requests, which is not used."""
        return "amor"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids, behind the prefix unless add_special_tokens is False."""
        prefix = [] if add_special_tokens is False else self.judge.prefix
        return [*prefix, *self.judge.encode(string)]

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations, and whether greedy decoding would write them."""
        return self.judge.score(
            [(str(request.task_name), self._request(*request.args)) for request in requests]
        )

    def _request(self, context: str, continuation: str) -> ScoreRequest:
        if context:
            before, target = self._encode_pair(context, continuation)
        else:
            before, target = [], self.tok_encode(continuation, add_special_tokens=False)
        if not target:
            lack = f"the continuation {continuation[:80]!r} has no token of its own"
            raise AmorError(f"nothing can be scored: {lack}")
        return self._cut(before or [self.prefix_token_id], target)

    def _cut(self, context: list[int], target: list[int]) -> ScoreRequest:
        return ScoreRequest(self.judge.cut(context, len(target) - 1), tuple(target))

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        return self.judge.score([("", self._cut(*tokens)) for _, *tokens in requests])

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods of whole texts, in windows of max_length tokens."""
        pending: list[tuple[str, ScoreRequest]] = []
        counts: list[int] = []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            most = self.judge.settings.max_length or max(len(ids), 1)
            rolling = get_rolling_token_windows(ids, self.prefix_token_id, most, 1)
            windows = [tuple(map(tuple, make_disjoint_window(each))) for each in rolling]
            pending += [(str(request.task_name), ScoreRequest(*each)) for each in windows]
            counts.append(len(windows))
        scores = iter(self.judge.score(pending))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts generated after prompts, up to a stop string."""
        pending = []
        for request in requests:
            prompt, options = request.args
            options = normalize_gen_kwargs(options, default_max_gen_toks=WRITTEN)
            tokens, temperature = int(options["max_gen_toks"]), options.get("temperature", 0.0)
            how = GenerationOptions(tuple(options["until"]), tokens, float(temperature))
            ids = self.tok_encode(prompt) or [self.prefix_token_id]
            pending.append((str(request.task_name), self.judge.cut(ids, tokens), how))
        return self.judge.write(pending)
