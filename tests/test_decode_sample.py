"""Choosing tokens: each filter leaves what it says, and a row's choices are its own."""

import pytest
import torch

import amor
from amor.decode.sample import FEW, Sampler, Sampling, candidates, draw


def logits(rows=3, vocab=50, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def allowed(scores, **options):
    """The set of tokens that may be chosen, a row."""
    p, tokens = candidates(scores, Sampling(**options))
    tokens = torch.arange(scores.shape[1]).expand_as(scores) if tokens is None else tokens
    return [set(t[q > 0].tolist()) for t, q in zip(tokens, p, strict=True)]


def test_top_k_leaves_the_k_best():
    scores = logits()
    assert allowed(scores, top_k=7) == [set(row.topk(7).indices.tolist()) for row in scores]


@pytest.mark.parametrize("vocab", [50, 3 * FEW])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.999])
def test_top_p_leaves_the_fewest_best_that_hold_the_probability(vocab, top_p):
    scores = logits(vocab=vocab)
    for row, left in zip(scores.softmax(1), allowed(scores, top_p=top_p), strict=True):
        order = row.argsort(descending=True)
        needed = 1
        while needed < vocab and row[order[:needed]].sum() < top_p:
            needed += 1
        assert abs(len(left) - needed) <= (
            1 if top_p > 0.99 else 0
        )  # sums of thousands of numbers meet 0.999 one token apart
        assert left == set(order[: len(left)].tolist())


@pytest.mark.parametrize("vocab", [50, 3 * FEW])
def test_min_p_leaves_those_near_the_best(vocab):
    scores = logits(vocab=vocab)
    expected = [set((row >= 0.1 * row.max()).nonzero()[:, 0].tolist()) for row in scores.softmax(1)]
    assert allowed(scores, min_p=0.1) == expected


def test_filters_work_one_after_another():
    scores = logits()
    for row, left in zip(scores, allowed(scores, top_k=10, top_p=0.6), strict=True):
        best = row.topk(10)
        p = best.values.softmax(0)
        assert left == {
            int(t) for t, before in zip(best.indices, p.cumsum(0) - p, strict=True) if before < 0.6
        }


def test_a_token_is_drawn_as_often_as_its_probability_says():
    scores = torch.tensor([[2.0, 1.0, 0.0, -torch.inf]])
    places = (torch.arange(20_000) + 0.5) / 20_000
    for options in ({}, {"top_p": 0.95}):
        found = draw(scores.expand(20_000, -1), Sampling(temperature=0.7, **options), places)
        share = torch.bincount(found, minlength=4) / 20_000
        kept = (scores[0] / 0.7).softmax(0)
        kept = kept if not options else torch.where(kept.cumsum(0) - kept < 0.95, kept, 0)
        assert torch.allclose(share, kept / kept.sum(), atol=2e-4)


def test_the_last_place_of_all_is_still_a_possible_token():
    scores = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    assert draw(scores, Sampling(), torch.tensor([1 - 2**-24])).item() == 0


def test_temperature_0_takes_the_best():
    scores = logits()
    assert torch.equal(
        Sampler(Sampling(temperature=0), range(3), [[]] * 3, 50).choose(scores), scores.argmax(1)
    )


def test_the_penalty_makes_tokens_met_before_less_likely():
    scores = torch.tensor([[3.0, 2.9, -1.0], [3.0, 2.9, -1.0]])
    sampler = Sampler(Sampling(temperature=0, repetition_penalty=1.5), range(2), [[0], []], 3)
    assert sampler.choose(scores).tolist() == [1, 0]
    assert sampler.choose(scores).tolist() == [
        0,
        1,
    ]  # 3 / 1.5 = 2 against 2.9 / 1.5; then row 1 has met 0


def test_a_row_draws_the_same_whatever_stands_beside_it():
    def drawn(names, keep=None):
        sampler = Sampler(Sampling(seed=5, top_p=0.9), names, [[]] * len(names), 50)
        found = {name: [] for name in names}
        for step in range(12):
            if keep is not None and step == 4:
                sampler.select([names.index(n) for n in keep])
                names = keep
            for name, token in zip(
                names,
                sampler.choose(torch.cat([logits(1, seed=100 * n + step) for n in names])),
                strict=True,
            ):
                found[name].append(int(token))
        return found

    alone = {name: drawn([name])[name] for name in (0, 1, 7)}
    assert drawn([7, 1, 0]) == alone
    assert {n: drawn([0, 1, 7], keep=[7, 0])[n] for n in (0, 7)} == {n: alone[n] for n in (0, 7)}
    assert alone[0] != alone[1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"top_k": -1},
        {"repetition_penalty": 0},
    ],
)
def test_impossible_options_are_refused_by_name(wrong):
    with pytest.raises(amor.AmorError, match=next(iter(wrong))):
        Sampling(**wrong)
