"""Laws of the order of data: a function of seed and step alone, a permutation every epoch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amor.data.loader import Batches, document_starts
from amor.data.order import permuted
from amor.data.prepare import Request, prepare
from amor.data.shards import Shards
from amor.errors import AmorError

CONTEXT, BATCH = 7, 6


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Shards:
    folder = tmp_path_factory.mktemp("order")
    text = "".join(f"{n} " for n in range(400))
    (folder / "numbers.txt").write_text(text)
    return prepare(
        Request((str(folder / "numbers.txt"),), "bytes", shard_tokens=100),
        folder / "out",
        workers=1,
    )["train"]


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(n, seed, epoch):
    assert np.array_equal(np.sort(permuted(np.arange(n), n, seed, epoch)), np.arange(n))


def test_an_order_looks_like_chance():
    n, rounds = 10, 1000
    counts = np.zeros((n, n))
    for epoch in range(rounds):
        counts[np.arange(n), permuted(np.arange(n), n, 42, epoch)] += 1
    spread = ((counts - rounds / n) ** 2 / (rounds / n)).sum()
    assert (
        spread < 81 + 5 * (2 * 81) ** 0.5
    )  # chi-square of 9 x 9 degrees of freedom, five deviations
    big = permuted(np.arange(100_000), 100_000, 42, 0)
    assert abs(np.corrcoef(big[:-1], big[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(100_000), big)[0, 1]) < 0.02


def test_the_order_is_the_same_on_every_machine_and_version():
    """Written down once: where this changes, a run made before can no longer be
    resumed with the same data."""
    assert permuted(np.arange(10), 10, 42, 0).tolist() == [8, 3, 0, 9, 2, 7, 5, 6, 1, 4]


def test_ten_billion_windows_cost_no_memory():
    n = 10**10
    places = permuted(np.array([0, 1, n - 1]), n, 42, 3)
    assert ((places >= 0) & (places < n)).all() and len(set(places.tolist())) == 3


def test_other_seeds_and_epochs_give_other_orders():
    n = np.arange(500)
    first = permuted(n, 500, 1, 0)
    assert not np.array_equal(first, permuted(n, 500, 2, 0))
    assert not np.array_equal(first, permuted(n, 500, 1, 1))
    assert not np.array_equal(permuted(n, 500, 1, 2), permuted(n, 500, 2, 1))


def test_rows_do_not_depend_on_how_a_batch_is_split(shards):
    batches = Batches(shards, CONTEXT, BATCH, seed=3)
    for step in (0, 5, 91):
        tokens, targets = batches.rows(step, 0, BATCH)
        for cut in range(BATCH + 1):
            halves = [
                Batches(shards, CONTEXT, BATCH, seed=3).rows(step, *part)
                for part in ((0, cut), (cut, BATCH))
            ]
            assert torch.equal(torch.cat([h[0] for h in halves]), tokens)
            assert torch.equal(torch.cat([h[1] for h in halves]), targets)


def test_an_epoch_shows_every_target_once(shards):
    batches = Batches(shards, CONTEXT, 1, seed=3)
    seen = np.sort(np.concatenate([batches.places(step) for step in range(batches.windows)]))
    assert np.array_equal(seen, np.arange(batches.windows))
    assert shards.tokens - 1 - batches.windows * CONTEXT < CONTEXT
    second = np.concatenate(
        [batches.places(step) for step in range(batches.windows, 2 * batches.windows)]
    )
    assert np.array_equal(np.sort(second), seen)
    assert not np.array_equal(
        second, np.concatenate([batches.places(s) for s in range(batches.windows)])
    )


def test_the_last_window_has_its_last_target_at_every_context(shards):
    for context in range(1, 120):
        batches = Batches(shards, context, 1, seed=0)
        last = next(
            s for s in range(batches.windows) if batches.places(s)[0] == batches.windows - 1
        )
        tokens, targets = batches.rows(last)
        assert tokens.shape == targets.shape == (1, context)
        assert 0 <= shards.tokens - 1 - batches.windows * context < context


def test_a_batch_may_straddle_two_epochs(shards):
    batches, one = Batches(shards, CONTEXT, 5, seed=3), Batches(shards, CONTEXT, 1, seed=3)
    step = batches.windows // 5
    assert batches.windows % 5, "the fixture must not divide evenly"
    alone = np.concatenate([one.places(place) for place in range(5 * step, 5 * step + 5)])
    assert np.array_equal(batches.places(step), alone)


def test_targets_are_the_next_tokens_of_the_stream(shards):
    batches = Batches(shards, CONTEXT, BATCH, seed=3)
    tokens, targets = batches.rows(4)
    assert tokens.dtype == torch.long and tokens.shape == targets.shape == (BATCH, CONTEXT)
    for place, row, target in zip(batches.places(4), tokens, targets):
        stream = shards.read(int(place) * CONTEXT, CONTEXT + 1)
        assert row.tolist() == stream[:-1].tolist() and target.tolist() == stream[1:].tolist()


def test_the_fingerprint_changes_with_whatever_changes_the_data(shards, tmp_path):
    (tmp_path / "b.txt").write_text("".join(f"{n} " for n in range(400))[::-1])
    other = prepare(
        Request((str(tmp_path / "b.txt"),), "bytes", shard_tokens=100), tmp_path / "out", workers=1
    )["train"]
    base = Batches(shards, CONTEXT, BATCH, 3)
    changed = [
        Batches(shards, 8, BATCH, 3),
        Batches(shards, CONTEXT, 7, 3),
        Batches(shards, CONTEXT, BATCH, 4),
    ]
    prints = {b.fingerprint for b in [base, *changed, Batches(other, CONTEXT, BATCH, 3)]}
    assert len(prints) == 5 and Batches(shards, CONTEXT, BATCH, 3).fingerprint == base.fingerprint
    base.check(base.fingerprint)
    with pytest.raises(AmorError, match=r"made with other data .* seed 4"):
        changed[2].check(base.fingerprint)


def test_data_shorter_than_a_window_is_an_error(shards):
    assert Batches(shards, shards.tokens - 1, 1, 0).windows == 1
    with pytest.raises(AmorError, match="less than one window"):
        Batches(shards, shards.tokens, 1, 0)


def test_a_document_begins_after_the_end_of_the_one_before():
    tokens = torch.tensor([[5, 9, 1, 2, 9], [9, 9, 3, 4, 5]])
    wanted = [[True, False, True, False, False], [True, True, True, False, False]]
    assert document_starts(tokens, end_of_text=9).tolist() == wanted
