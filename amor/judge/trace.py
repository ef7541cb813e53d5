"""A trace of one text: per token the entropy, where attention ran, and what that changed.

Every token has two roles. As the token *read*, it has an entropy at each block (of the token after
it, over log(vocab)) and the decisions those led to. As the token *predicted*, it has a surprise in
nats and its probability with the gates as they are, closed everywhere and open everywhere. Nothing
predicts the first token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amor.data.spelling import KINDS, Speller, kinds, rare
from amor.errors import AmorError
from amor.gates.base import Gate
from amor.judge.gates import RecordingGate, force_all, own_gates
from amor.judge.loop import CHUNK, CorpusOutput, Residuals, check_finite, join_chunks, run_windows
from amor.judge.windows import check_tokens, of_text
from amor.models.amor import Amor
from amor.numbers import finite
from amor.ops import head
from amor.records.trace import Chances, ClassRow, Guess, Losses, Token, Trace

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GUESSES = 5  # best next tokens kept


def trace(
    model: Amor,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    title: str = "",
    gates: Sequence[Gate] | None = None,  # one per block; None: the model's own
) -> Trace:
    """The trace of one text of token ids."""
    if not len(ids):
        raise AmorError("the text is empty; a trace needs at least one token")
    check_tokens(max(ids), model.config.vocab)
    gates = own_gates(model) if gates is None else gates
    recording = [RecordingGate(gate, "entropy") for gate in gates]
    output, hidden, nll = three_ways(model, ids, recording)
    entropy = [gate.values("entropy", 1)[0].tolist() for gate in recording]
    speller = Speller(tokenizer)
    final, expected = guesses(model, hidden, speller)
    check_finite(model, torch.tensor([*chain(*nll.values(), *entropy, final)]))
    rows = []
    classes = zip(ids, kinds(ids, speller), rare(ids, model.config.vocab), strict=True)
    for t, (token, kind, is_rare) in enumerate(classes):
        before = {name: values[t - 1] for name, values in nll.items()} if t else {}
        row = Token(
            id=token,
            text=speller(token),
            kind=kind,
            rare=is_rare,
            entropy=tuple(block[t] for block in entropy),
            fire=tuple(output.fire[:, 0, t].tolist()),
            final_entropy=final[t],
            guesses=expected[t],
            surprise=before.get("as_is"),
            p=Chances(**{name: chance(-value) for name, value in before.items()}) if t else None,
        )
        rows.append(row)
    return Trace(
        title=title,
        model=model.config.name,
        gate=recording[0].gate.kind if recording else None,
        blocks=len(recording),
        thresholds=tuple(finite(float(gate.threshold)) for gate in recording),
        fire_rate=tuple(output.fire.float().mean((1, 2)).tolist()),
        loss=Losses(**{name: mean(values[:-1]) for name, values in nll.items()}),
        tokens=tuple(rows),
        summary=summary(rows),
    )


def chance(log: float) -> float:
    """A probability from its logarithm, which rounding may put slightly above 0."""
    return math.exp(min(log, 0.0))


def three_ways(
    model: Amor, ids: Sequence[int], gates: Sequence[Gate]
) -> tuple[CorpusOutput, Tensor, dict[str, list[float]]]:
    """The output with these gates, its hidden vectors [T, D], and the nll [T] with these gates, all
    closed, all open."""
    text, residuals = of_text(ids), Residuals()
    chunks = list(run_windows(model, text, columns=CHUNK, gates=gates, residuals=residuals))
    output = join_chunks(chunks)
    nll = {"as_is": output.nll[0].tolist()}
    for name, fire in (("closed", False), ("open", True)):
        forced = force_all(model, fire)
        other = run_windows(model, text, columns=CHUNK, gates=forced, residuals=residuals)
        nll[name] = join_chunks(other).nll[0].tolist()
    return output, torch.cat([chunk.out.hidden[0] for chunk in chunks]), nll


def guesses(
    model: Amor, hidden: Tensor, speller: Speller
) -> tuple[list[float], list[tuple[Guess, ...]]]:
    """After each token: the final entropy, and the best next tokens with their probabilities."""
    count = min(GUESSES, model.config.vocab)
    reading = head.read(hidden, model.head_weight, entropy=True, topk=count)
    assert reading.topk and reading.logsumexp is not None and reading.entropy is not None
    values, best = reading.topk
    logs = (values - reading.logsumexp[:, None]).tolist()
    final = (reading.entropy / math.log(model.config.vocab)).tolist()
    expected = [
        tuple(Guess(text=speller(i), p=chance(log)) for i, log in zip(ids, row))
        for ids, row in zip(best.tolist(), logs)
    ]
    return final, expected


def summary(rows: Sequence[Token]) -> tuple[ClassRow, ...]:
    """By class of token: how many, mean entropy and firing rate per block after reading one, mean
    surprise at one."""
    groups = {"all": list(rows), **{name: [r for r in rows if r.kind == name] for name in KINDS}}
    groups["rare"] = [r for r in rows if r.rare]
    return tuple(
        ClassRow(
            name=name,
            count=len(group),
            entropy=tuple(sum(block) / len(group) for block in zip(*(r.entropy for r in group))),
            fire_rate=tuple(sum(block) / len(group) for block in zip(*(r.fire for r in group))),
            surprise=mean([r.surprise for r in group if r.surprise is not None]),
        )
        for name, group in groups.items()
        if group
    )


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None of nothing."""
    return sum(values) / len(values) if values else None
