"""What a model does to a text, token by token: how unsure it was, where attention ran, and what that changed.

Two things are said of every token. As the token *read*, it has an entropy at each block (of the token after it, over
log(vocab)) and the decisions those led to. As the token *predicted*, it has a surprise in nats and its probability with
the gates as they are, closed everywhere and open everywhere. Nothing predicts the first token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amor.data.spelling import KINDS, Speller, kinds, rare
from amor.errors import AmorError
from amor.gates.base import Gate
from amor.judge.gates import Watched, all_told, own_gates
from amor.judge.loop import PIECE, Judged, Residuals, gathered, read
from amor.judge.windows import of_text
from amor.models.amor import Amor
from amor.numbers import finite
from amor.ops import head

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GUESSES = 5  # best next tokens kept


def trace(
    model: Amor,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    title: str = "",
    gates: Sequence[Gate] | None = None,  # one a block, instead of the model's own
) -> dict[str, Any]:
    """Everything a trace shows, as plain data."""
    if not len(ids):
        raise AmorError("the text is empty; a trace needs at least one token")
    worst = max(ids)
    if worst >= model.config.vocab:
        raise AmorError(f"token {worst} of the text is not in the model's vocabulary of {model.config.vocab:,}")
    watched = [Watched(gate, "entropy") for gate in (own_gates(model) if gates is None else gates)]
    found, hidden, nll = three_ways(model, ids, watched)
    entropy = [gate.seen("entropy", 1)[0].tolist() for gate in watched]
    rows = token_rows(tokenizer, ids, model.config.vocab)
    expected = guesses(model, hidden, Speller(tokenizer))
    for t, row in enumerate(rows):
        row["entropy"] = [block[t] for block in entropy]
        row["fire"] = found.fire[:, 0, t].tolist()
        row |= expected[t]
        row["surprise"] = nll["as_is"][t - 1] if t else None
        row["p"] = {name: math.exp(-values[t - 1]) for name, values in nll.items()} if t else None
    return {
        "title": title,
        "model": model.config.name,
        "gate": watched[0].gate.kind if watched else None,
        "blocks": len(watched),
        "thresholds": [finite(float(gate.threshold)) for gate in watched],
        "fire_rate": found.fire.float().mean((1, 2)).tolist(),
        "loss": {name: sum(values[:-1]) / (len(ids) - 1) if len(ids) > 1 else None for name, values in nll.items()},
        "tokens": rows,
        "summary": summary(rows),
    }


def three_ways(model: Amor, ids: Sequence[int], gates: Sequence[Gate]) -> tuple[Judged, Tensor, dict[str, list[float]]]:
    """A text read with these gates, its hidden vectors [T, D], and the nll of the token after each: so, all closed, all open."""
    text, residuals = of_text(ids), Residuals()
    said = list(read(model, text, columns=PIECE, gates=gates, residuals=residuals))
    found = gathered(said)
    nll = {"as_is": found.nll[0].tolist()}
    for name, fire in (("closed", False), ("open", True)):
        other = read(model, text, columns=PIECE, gates=all_told(model, fire), residuals=residuals)
        nll[name] = gathered(other).nll[0].tolist()
    return found, torch.cat([piece.out.hidden[0] for piece in said]), nll


def token_rows(tokenizer: Tokenizer, ids: Sequence[int], vocab: int) -> list[dict[str, Any]]:
    speller = Speller(tokenizer)
    texts = [speller(token) for token in ids]
    rows = zip(ids, texts, kinds(ids, speller), rare(ids, vocab), strict=True)
    return [{"id": i, "text": text, "kind": sort, "rare": is_rare} for i, text, sort, is_rare in rows]


def guesses(model: Amor, hidden: Tensor, speller: Speller) -> list[dict[str, Any]]:
    """After each token: the entropy of the final distribution, and its best tokens with their probabilities."""
    count = min(GUESSES, model.config.vocab)
    reading = head.read(hidden, model.embed.weight, entropy=True, topk=count)
    assert reading.topk is not None and reading.logsumexp is not None and reading.entropy is not None
    values, best = reading.topk
    chances = (values - reading.logsumexp[:, None]).exp().tolist()
    final = (reading.entropy / math.log(model.config.vocab)).tolist()
    return [
        {"final_entropy": h, "guesses": [{"text": speller(i), "p": p} for i, p in zip(ids, row)]}
        for h, ids, row in zip(final, best.tolist(), chances)
    ]


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By class of token: how many, mean entropy and firing rate a block after reading one, mean surprise at one."""
    groups = [("all", list(rows)), *((name, [r for r in rows if r["kind"] == name]) for name in KINDS)]
    groups.append(("rare", [r for r in rows if r["rare"]]))
    return [
        {
            "class": name,
            "count": len(group),
            "entropy": [sum(block) / len(group) for block in zip(*(r["entropy"] for r in group))],
            "fire_rate": [sum(block) / len(group) for block in zip(*(r["fire"] for r in group))],
            "surprise": mean([r["surprise"] for r in group if r["surprise"] is not None]),
        }
        for name, group in groups
        if group
    ]


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
