"""Drafts: several tokens per pass and the same text, states and random numbers as without."""

import pytest
from laws import small, tokens

import amor
from amor.decode import draft as drafting
from amor.decode.draft import NgramDraft, PassCost
from amor.decode.engine import Engine
from amor.decode.generate import Generator
from amor.decode.sample import Sampling
from amor.decode.savings import Savings

VOCAB = 211


class Numbers:
    """A tokenizer of a few letters: token n is the n-th of them."""

    def __new__(cls):
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel

        words = {f"w{i}": i for i in range(VOCAB - 1)} | {"<|endoftext|>": VOCAB - 1}
        tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
        tokenizer.add_special_tokens(["<|endoftext|>"])
        return tokenizer


def texts(model, prompts, rows=8, draft="none", count=60, **sampling):
    engine = Engine(model)
    out = amor.generate_batch(
        engine, Numbers(), prompts, max_tokens=count, rows=rows, draft=draft, **sampling
    )
    return [(t.tokens, t.text, t.entropy, t.fire, t.end) for t in out], engine.stats


def know(monkeypatch, prompts, plain, wrong_every=4):
    """Drafts of the five tokens that will be chosen, but for a wrong one in some places."""
    whole = [[*prompt, *text[0]] for prompt, text in zip(prompts, plain, strict=True)]

    def propose(draft, cost):
        here = len(draft.tokens)
        text = next(each for each in whole if each[:here] == draft.tokens)
        return [
            (token + (place % wrong_every == 0)) % VOCAB
            for place, token in enumerate(text[here : here + 5], here)
        ]

    monkeypatch.setattr(NgramDraft, "propose", propose)


@pytest.mark.parametrize("name", ["amor-mamba2", "amor-gated-deltanet", "mamba2-fused"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 0.3, "top_k": 4, "seed": 3},
        {"temperature": 0.5, "repetition_penalty": 1.1},
    ],
)
def test_text_entropies_and_firings_are_those_without_drafts(name, sampling, monkeypatch):
    model = small(name)
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (36, 7, 27, 4)]
    plain, _ = texts(model, prompts, rows=3, **sampling)
    know(monkeypatch, prompts, plain)
    drafted, stats = texts(model, prompts, draft="ngram", rows=3, **sampling)
    assert drafted == plain
    assert stats.drafted > stats.accepted > 100


def test_accepted_drafts_save_passes_over_the_weights(monkeypatch):
    model = small("amor-mamba2", **{"blocks.gate": "never"})
    prompt = tokens(1, 9)[0].tolist()
    plain, alone = texts(model, [prompt], temperature=0, count=121)
    know(monkeypatch, [prompt], plain, wrong_every=1000)
    _, stats = texts(model, [prompt], temperature=0, count=121, draft="ngram")
    assert alone.head_passes == alone.tokens == stats.tokens == 120
    assert stats.accepted == stats.drafted == 100 and stats.head_passes == 20


def test_stop_ids_and_lengths_end_inside_a_draft(monkeypatch):
    model = small("amor-mamba2")
    prompt = tokens(1, 9)[0].tolist()
    plain, _ = texts(model, [prompt], temperature=0, count=50)
    know(monkeypatch, [prompt], plain)
    ids = plain[0][0]
    for count in range(40, 50):
        ((cut, *_, end),), _ = texts(model, [prompt], temperature=0, count=count, draft="ngram")
        assert cut == ids[:count] and end == "length"
    for stop in sorted(set(ids[10:]))[:12]:
        engine = Engine(model)
        out = amor.generate(
            engine, Numbers(), prompt, max_tokens=50, stop_ids=[stop], temperature=0, draft="ngram"
        )
        assert out.tokens == ids[: ids.index(stop) + 1] and out.end == "stop"


def test_a_draft_is_what_followed_the_longest_earlier_occurrence():
    draft = NgramDraft([1, 2, 3, 4, 9, 9, 8, 2, 3, 4, 5, 6, 1, 2, 3])
    draft.append(4)
    assert draft.propose(0.0)[:5] == [9, 9, 8, 2, 3]  # 1 2 3 4 stood before, and later 2 3 4
    assert NgramDraft([1, 2, 3, 4, 5]).propose(0.0) == []
    repeated = NgramDraft([7, 8, 7, 8, 7, 8])
    assert repeated.propose(0.0)[:4] == [7, 8, 7, 8]  # it goes on beyond the end of the text


def test_drafts_are_as_long_as_they_pay_and_stop_where_they_do_not():
    draft = NgramDraft([1, 2, 3] * 5)
    assert draft.length(0.0) == drafting.MOST
    assert 1 <= draft.length(0.2) < drafting.MOST and draft.length(2.0) == 0
    assert draft.propose(0.2)
    for _ in range(40):
        draft.observe(3, 0)
    assert draft.length(0.15) == 0 and draft.propose(0.15) == []
    while not draft.propose(0.15):
        draft.append([1, 2, 3][len(draft.tokens) % 3])
    assert draft.waited == drafting.FIRST_PAUSE and draft.pause == 2 * drafting.FIRST_PAUSE
    for _ in range(30):
        draft.observe(1, 1)
    assert draft.length(0.15) > 1 and draft.pause == drafting.FIRST_PAUSE


def test_the_cost_of_a_token_is_what_passes_took():
    cost = PassCost()
    for _ in range(60):
        cost.observe(2, 2, 0.010)
        cost.observe(2, 6, 0.018)
    assert cost.per_token(2) == pytest.approx(2 * 0.2, rel=0.02)


def test_drafts_on_an_engine_that_cannot_check_them_are_refused():
    engine = Engine(small("mamba2"), Savings(compiled=False))
    with pytest.raises(amor.AmorError, match="leave drafts out"):
        Generator(engine, Numbers(), Sampling(), 9, draft="ngram")
