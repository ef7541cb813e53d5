"""The laws of the equivalence contract itself: what it compares, what a tie excuses, and
that the engine is inside it."""

import dataclasses

import pytest
import torch
from laws import small, tokens

from amor.cli import main
from amor.decode.engine import Session
from amor.errors import AmorError
from amor.judge.check import TOLERANCE, check, compare
from amor.judge.engine_feeding import ENGINE_WAYS
from amor.judge.feeding import Feeder, row_by_row

ALLOWED = TOLERANCE[torch.float32]


@pytest.fixture
def read():
    """A model with two blocks, and what its plain forward says of three rows."""
    model = small("amor-mamba2", **{"blocks.count": 2})
    with torch.no_grad():
        return model, row_by_row(Feeder(model, tokens(3, 12), [12, 7, 5], 0))


def test_float64_weights_are_refused_in_one_line():
    with pytest.raises(
        AmorError,
        match=r"^check: the model's weights are float64, .* give float32 or bfloat16 weights$",
    ):
        check(small("amor-mamba2").double())


def changed(seen, row, **more):
    return [dataclasses.replace(s, **more) if index == row else s for index, s in enumerate(seen)]


def flipped(seen, row, block, column):
    fires = seen[row].fires.clone()
    fires[0, block, column] ^= True
    return changed(seen, row, fires=fires)


def at_threshold(model, seen, row, block, column):
    scores = seen[row].scores.clone()
    scores[0, block, column] = model.each_block()[block].gate.threshold
    return changed(seen, row, scores=scores)


def moved(seen, row, column):
    logits = seen[row].logits.clone()
    logits[0, column] += logits.abs().max()
    return changed(seen, row, logits=logits)


def test_the_same_is_the_same(read):
    model, plain = read
    found = compare("way", plain, plain, model, ALLOWED)
    assert found.ok and found.tokens == 24 and found.logits == found.scores == found.states == 0


def test_a_decision_that_differs_far_from_the_threshold_is_a_flip(read):
    model, plain = read
    found = compare("way", plain, flipped(plain, 1, 0, 3), model, ALLOWED)
    assert not found.ok and (found.flips, found.ties) == (1, 0)


def test_a_tie_ends_the_comparison_of_its_row_and_of_no_other(read):
    model, plain = read
    plain = at_threshold(model, plain, 0, 1, 4)
    tied = flipped(plain, 0, 1, 4)
    found = compare("way", plain, tied, model, ALLOWED)
    assert found.ok and (found.flips, found.ties, found.tokens) == (0, 1, 4 + 7 + 5)
    for row, column, ok in (
        (0, 3, False),
        (0, 4, True),
        (0, 11, True),
        (1, 6, False),
        (2, 0, False),
    ):
        assert compare("way", plain, moved(tied, row, column), model, ALLOWED).ok == ok, (
            row,
            column,
        )
    # the block before the tied one decided before it, the same block on a later token after it
    assert not compare("way", plain, flipped(tied, 0, 0, 4), model, ALLOWED).ok
    assert compare("way", plain, flipped(tied, 0, 0, 5), model, ALLOWED).ok


def test_a_tie_excuses_no_recurrent_state_and_no_key_before_it(read):
    model, plain = read
    plain = at_threshold(model, plain, 0, 1, 4)
    tied = flipped(plain, 0, 1, 4)

    def with_part(index, change):
        state = tied[0].state
        parts = list(state.parts)
        parts[index] = change(parts[index])
        return changed(tied, 0, state=dataclasses.replace(state, parts=tuple(parts)))

    def late(part):
        return {"kv": part["kv"].map(lambda t: torch.cat([t[:, :, :4], t[:, :, 4:] + 1], 2))}

    assert compare("way", plain, with_part(-1, late), model, ALLOWED).ok
    for index, change in (
        (0, lambda part: part | {"scan": part["scan"] + 1}),
        (-1, lambda p: {"kv": p["kv"].map(lambda t: t + 1)}),
    ):
        assert not compare("way", plain, with_part(index, change), model, ALLOWED).ok


def test_where_nothing_was_compared_nothing_is_the_same(read):
    model, plain = read
    for row in range(3):
        plain = at_threshold(model, plain, row, 0, 0)
    tied = plain
    for row in range(3):
        tied = flipped(tied, row, 0, 0)
    found = compare("way", plain, tied, model, ALLOWED)
    assert not found.ok and found.tokens == 0


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_engine_s_ways_compare_most_tokens(rows):
    ways = {f.way: f for f in check(small("amor-gated-deltanet"), length=30, rows=rows)}
    assert ways.keys() >= ENGINE_WAYS.keys() and all(f.ok for f in ways.values())
    whole = ways["token by token"].tokens
    assert ways["engine steps"].tokens == whole
    assert all(0 < ways[name].tokens <= whole for name in ENGINE_WAYS)


DRAFTS = "engine, drafts taken back"
RUN_AHEAD = {"engine, blocks run ahead"}


def wrong_logits(honest):
    return lambda self, *words: dataclasses.replace(
        found := honest(self, *words), logits=found.logits.roll(1, -1)
    )


def lost_order(honest):
    return lambda self, rows: honest(self, sorted(rows))


@pytest.mark.parametrize(
    ("method", "wrong", "ways"),
    [
        ("step", wrong_logits, [way for way in ENGINE_WAYS if way != DRAFTS]),
        ("step_ahead", wrong_logits, [DRAFTS]),
        ("select", lost_order, ["engine, rows join and leave"]),
    ],
)
def test_an_engine_that_says_something_else_is_noticed(monkeypatch, method, wrong, ways):
    monkeypatch.setattr(Session, method, wrong(getattr(Session, method)))
    assert {
        f.way for f in check(small("amor-mamba2"), length=40, rows=4, formats=[]) if not f.ok
    } - RUN_AHEAD == set(ways)


def test_an_engine_that_would_have_to_know_the_future_is_left_out_with_a_reason():
    found = {
        f.way: f
        for f in check(small("amor-mamba2", **{"blocks.gate": "oracle"}), length=20, rows=2)
    }
    assert all(
        "needs the next token" in found[name].left_out and found[name].ok for name in ENGINE_WAYS
    )
    assert not found["token by token"].left_out


def test_a_format_of_weights_that_is_not_there_is_refused():
    with pytest.raises(AmorError, match="int8"):
        check(small("mamba2"), formats=["int9"])


@pytest.mark.parametrize("words", [["--length", "9" * 15], ["--rows", "9" * 15], ["--length", "7"]])
def test_a_size_that_no_machine_can_check_is_refused_in_one_line(words, capsys):
    assert main(["check", "amor-mamba2", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words[0] in line and "1,048,576 tokens" in line
