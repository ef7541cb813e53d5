"""Scores: what the plain forward says, whatever else is read, in which order, and by
either way of running a gate."""

import random

import pytest
import torch
from laws import close, small

from amor.decode.engine import Engine
from amor.eval.score import Scorer, ScoreRequest
from amor.presets import NAMES
from amor.records.evals import GateCounts


def requests(vocab: int, seed: int = 0) -> list[ScoreRequest]:
    """Contexts of awkward lengths, some with several targets, one of a single token."""
    draw = random.Random(seed)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocab) for _ in range(n))

    found = []
    for n in (1, 5, 16, 17, 40, 63, 64, 65, 100, 270, 300):
        context = tokens(n)
        found += [
            ScoreRequest(context, tokens(draw.choice((1, 2, 5, 17, 20))))
            for _ in range(draw.choice((1, 2, 4)))
        ]
    return found


def scores(scorer: Scorer, asked: list[ScoreRequest]) -> list[tuple[float, bool, object]]:
    found = dict(scorer.score(asked))
    return [(found[i].logprob, found[i].greedy, found[i].phases) for i in range(len(asked))]


@pytest.fixture(params=[*NAMES, "amor-mamba2-gain"])
def model(request: pytest.FixtureRequest):
    return small(request.param).eval()


def test_a_score_is_what_the_plain_forward_says(model) -> None:
    asked = requests(model.config.vocab)
    found = scores(Scorer(model), asked)
    for request, (logprob, greedy, phases) in zip(asked, found, strict=True):
        out = model(torch.tensor([[*request.context, *request.target]]))
        said = model.logits(out.hidden[0]).log_softmax(-1)[len(request.context) - 1 : -1]
        target = torch.tensor(request.target)
        close(torch.tensor(logprob), said.gather(1, target[:, None]).sum())
        assert greedy == bool((said.argmax(-1) == target).all())
        if out.gates:
            fire = torch.stack([g.fire[0, :-1] for g in out.gates])
            cut = len(request.context) - 1
            assert phases["prefill"].fires == (tuple(fire[:, :cut].sum(1).tolist()) if cut else ())
            assert phases["target"].fires == tuple(fire[:, cut:].sum(1).tolist())
            assert (phases["prefill"].tokens, phases["target"].tokens) == (cut, len(request.target))
        else:
            assert not phases


def test_a_score_has_the_same_bits_alone_beside_others_and_in_any_order(model) -> None:
    asked = requests(model.config.vocab)
    alone = [scores(Scorer(model), [one])[0] for one in asked]
    for rows in (1, 3, 16):
        assert scores(Scorer(model, rows=rows), asked) == alone, f"{rows} rows"
    order = random.Random(1).sample(range(len(asked)), len(asked))
    mixed = scores(Scorer(model, rows=5), [asked[i] for i in order])
    assert [mixed[order.index(i)] for i in range(len(asked))] == alone


def test_a_long_context_is_read_in_pieces_with_the_same_bits_beside_others(
    model, monkeypatch
) -> None:
    monkeypatch.setattr("amor.eval.score.CHUNK", 96)
    asked = requests(model.config.vocab)
    alone = [scores(Scorer(model), [one])[0] for one in asked]
    assert scores(Scorer(model), asked) == alone
    monkeypatch.undo()
    for (logprob, *_), (whole, *_) in zip(alone, scores(Scorer(model), asked), strict=True):
        assert abs(logprob - whole) < 1e-3


def test_a_target_of_several_pieces_is_scored_token_by_token_where_it_belongs(model, monkeypatch):
    """Targets of more than one chunk: no piece may be shifted against the hidden vectors."""
    monkeypatch.setattr("amor.eval.score.CHUNK", 64)
    draw = random.Random(2)
    lengths = (64, 65, 66, 129, 200)
    asked = [
        ScoreRequest(*(tuple(draw.randrange(model.config.vocab) for _ in range(n)) for n in (9, t)))
        for t in lengths
    ]
    for request, (logprob, _, phases) in zip(asked, scores(Scorer(model), asked), strict=True):
        out = model(torch.tensor([[*request.context, *request.target]]))
        expected = model.logits(out.hidden[0]).log_softmax(-1)[8:-1]
        close(
            torch.tensor(logprob),
            expected.gather(1, torch.tensor(request.target)[:, None]).sum(),
        )
        if out.gates:
            assert phases["target"].tokens == len(request.target)


def test_the_decode_path_scores_as_the_likelihood_path(model) -> None:
    asked = requests(model.config.vocab)
    for (a, greedy, phases), (b, same, _) in zip(
        scores(Scorer(model, engine=Engine(model)), asked),
        scores(Scorer(model), asked),
        strict=True,
    ):
        assert abs(a - b) < 1e-3 and greedy == same
        if model.each_block():
            assert set(phases) == {"prefill", "decode"}


def test_prefill_counts_every_token_of_the_context_but_the_last(model) -> None:
    asked = requests(model.config.vocab)
    found = [phases for *_, phases in scores(Scorer(model), asked)]
    if model.each_block():
        assert [p["prefill"].tokens for p in found] == [len(r.context) - 1 for r in asked]
        total = sum((p["prefill"] for p in found), GateCounts(tokens=0))
        assert total.tokens == sum(len(r.context) - 1 for r in asked)
        assert total.fires[0] == sum(p["prefill"].fires[0] for p in found if p["prefill"].tokens)
