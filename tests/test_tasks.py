"""Laws of generated tasks: every answer stands in its row, a row is a function of its
key alone, streams never meet."""

import hashlib
from itertools import combinations

import numpy as np
import pytest
import torch

from amor import registry
from amor.data.chance import STREAMS, Chance, row_keys
from amor.data.generated import Generated
from amor.data.tasks.base import PACKAGE, read_task
from amor.errors import AmorError
from amor.ops.head import IGNORE

# every kind as it comes, and at an awkward size; the beginning of the hash of some rows, written
# down once: where it changes, a run made before can no longer be resumed, and FORM of
# amor/data/generated.py must be raised
SIZES = [
    ({"kind": "mqar"}, "9bf95ce2"),
    (
        {"kind": "mqar", "vocab": 9, "pairs": 3, "length": 13, "queries": 2, "power": 1.0},
        "29e9d17b",
    ),
    ({"kind": "stream"}, "2ee57605"),
    ({"kind": "stream", "vocab": 13, "pairs": 3, "length": 31, "filler": 0.0}, "752dc4c0"),
    ({"kind": "selective-copy"}, "08d00841"),
    ({"kind": "selective-copy", "vocab": 4, "symbols": 5, "length": 10}, "38b2d6e1"),
    ({"kind": "induction"}, "cdb60c76"),
    ({"kind": "induction", "vocab": 5, "length": 3}, "f4683b0a"),
    ({"kind": "phone-book"}, "f7eea027"),
    ({"kind": "phone-book", "vocab": 14, "entries": 9, "queries": 9, "digits": 2}, "90a9f8bb"),
    ({"kind": "needle"}, "abac8646"),
    ({"kind": "needle", "vocab": 17, "needles": 4, "value": 3, "length": 19}, "83cae66a"),
    ({"kind": "needle", "distance": 11}, "54a06d2d"),
]
TREES = [tree for tree, _ in SIZES]
each_task = pytest.mark.parametrize("tree", TREES, ids=lambda t: " ".join(map(str, t.values())))


def oracle(task, before):
    """The answer to the question that a row's tokens so far end with, by
    reading them one after the other."""
    o, last = task, before[-1]
    if task.kind in ("mqar", "stream"):
        known = {}
        for place in range(0, 2 * o.pairs, 2):
            assert before[place] not in known, "a key stands twice"
            known[before[place]] = before[place + 1]
        return known[last]
    if task.kind == "selective_copy":
        mark = before.index(1)
        return [token for token in before[:mark] if token != 0][len(before) - mark - 1]
    if task.kind == "induction":
        assert before.count(0) == 2
        return before[before.index(0) + 1]
    if task.kind == "phone_book":
        mark = max(place for place, token in enumerate(before) if token == 10)
        book = {}
        for start in range(0, o.entries * (2 + o.digits), 2 + o.digits):
            name = tuple(before[start : start + 2])
            assert name not in book, "a name stands twice"
            book[name] = before[start + 2 : start + 2 + o.digits]
        return book[tuple(before[mark + 1 : mark + 3])][len(before) - mark - 3]
    assert task.kind == "needle"
    key = before[o.length - o.value]
    assert before[: o.length - o.value].count(key) == 1
    return before[before.index(key) + len(before) - (o.length - o.value)]


def drawn(tree, rows=20, seed=3, stream="train", step=5):
    task = read_task(tree)
    return task, task.rows(seed, stream, step, 0, rows)


def test_every_kind_is_held_to_the_laws():
    assert {read_task(tree).kind for tree in TREES} == set(registry.kinds(PACKAGE))


@each_task
def test_every_answer_stands_in_the_row_before_its_question(tree):
    task, found = drawn(tree)
    assert found.tokens.shape == found.targets.shape == found.question.shape == (20, task.length)
    assert int(found.tokens.min()) >= 0 and int(found.tokens.max()) < task.vocab
    for tokens, targets, asked in zip(
        found.tokens.tolist(), found.targets.tolist(), found.question.tolist(), strict=True
    ):
        places = [place for place, number in enumerate(asked) if number]
        assert {asked[place] for place in places} == set(range(1, max(asked) + 1))
        for place in places:
            assert targets[place] == oracle(task, tokens[: place + 1])


@each_task
def test_the_loss_counts_answers_alone_or_every_next_token(tree):
    _, alone = drawn({**tree, "loss": "questions"})
    _, everything = drawn({**tree, "loss": "all"})
    asked = alone.question > 0
    assert torch.equal(alone.tokens, everything.tokens) and torch.equal(
        alone.question, everything.question
    )
    assert (alone.targets[~asked] == IGNORE).all()
    assert torch.equal(alone.targets[asked], everything.targets[asked])
    further, here = alone.tokens[:, 1:], ~asked[:, :-1]
    assert torch.equal(everything.targets[:, :-1][here], further[here])
    assert (everything.targets != IGNORE).all()


@each_task
def test_answers_are_the_text_itself_but_in_mqar(tree):
    task, found = drawn({**tree, "loss": "all"}, rows=60)
    asked = (found.question > 0)[:, :-1]
    same = found.targets[:, :-1][asked] == found.tokens[:, 1:][asked]
    assert not same.all() if task.kind == "mqar" else same.all()


@pytest.mark.parametrize(
    ("tree", "known"),
    SIZES,
    ids=lambda t: t if isinstance(t, str) else " ".join(map(str, t.values())),
)
def test_rows_are_the_same_on_every_machine_and_version(tree, known):
    _, found = drawn(tree, rows=3)
    held = np.stack([found.tokens.numpy(), found.question.numpy()]).astype("<i8").tobytes()
    assert hashlib.sha256(held).hexdigest()[:8] == known


@each_task
def test_a_row_depends_neither_on_how_many_are_drawn_nor_on_anybody_s_random_numbers(tree):
    source = Generated(read_task(tree), 7, seed=3)
    whole = source.rows(2)
    torch.manual_seed(1)
    np.random.seed(1)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    for cut in range(8):
        halves = [
            Generated(read_task(tree), 7, seed=3).rows(2, *part) for part in ((0, cut), (cut, 7))
        ]
        for both, one in zip(zip(*halves, strict=True), whole, strict=True):
            assert torch.equal(torch.cat(both), one)
    assert torch.equal(states[0], torch.get_rng_state()) and np.array_equal(
        states[1], np.random.get_state()[1]
    )


@pytest.mark.parametrize("kind", registry.kinds(PACKAGE))
def test_seeds_steps_and_streams_never_meet(kind):
    ways = [(seed, stream, step) for seed in (0, 1, -1) for stream in STREAMS for step in (0, 1)]
    found = {way: drawn({"kind": kind}, 40, *way)[1].tokens.tolist() for way in ways}
    for one, other in combinations(found, 2):
        assert not {tuple(row) for row in found[one]} & {tuple(row) for row in found[other]}, (
            one,
            other,
        )
    keys = np.concatenate([row_keys(*way, 0, 1000) for way in ways])
    assert len(np.unique(keys)) == len(keys)


def test_rows_of_training_may_have_fewer_pairs_and_those_of_judging_have_all():
    tree = {"kind": "stream", "vocab": 64, "pairs": 8, "length": 40, "filler": 0.2}
    met = set()
    _, found = drawn({**tree, "fewest": 3}, rows=200)
    for tokens, targets, asked in zip(
        found.tokens.tolist(), found.targets.tolist(), found.question.tolist(), strict=True
    ):
        keys, values = tokens[0:16:2], tokens[1:16:2]
        count = sum(key < 16 for key in keys)
        met.add(count)
        assert all(
            key < 16 <= value < 32 for key, value in zip(keys[:count], values[:count], strict=True)
        )
        assert all(token >= 32 for token in tokens[2 * count : 16]), "filler stands for the others"
        known = dict(zip(keys[:count], values[:count], strict=True))
        for place in (place for place, number in enumerate(asked) if number):
            assert targets[place] == known[tokens[place]]
    assert met == set(range(3, 9))
    for stream in ("valid", "test"):
        _, eased = drawn({**tree, "fewest": 3}, stream=stream)
        _, plain = drawn(tree, stream=stream)
        assert torch.equal(eased.tokens, plain.tokens) and torch.equal(
            eased.question, plain.question
        )
    with pytest.raises(AmorError, match="fewest is 9, at most 8"):
        read_task({**tree, "fewest": 9})


def test_numbers_look_like_chance():
    """Both ways of drawing without repetition give every ordered pair equally often; the first by
    weight follows the weights."""
    chance = Chance(row_keys(0, "train", 0, 0, 24_000))
    for high in (5, 8):  # few of few: all are sorted; few of many: what stands twice is drawn again
        pairs = chance.distinct(high, 2)
        counts = np.bincount(pairs[:, 0] * high + pairs[:, 1], minlength=high * high).reshape(
            high, high
        )
        assert (np.diag(counts) == 0).all()
        off, mean = counts[~np.eye(high, dtype=bool)], len(pairs) / (high * (high - 1))
        assert ((off - mean) ** 2 / mean).sum() < len(off) + 5 * (2 * len(off)) ** 0.5
    assert (np.sort(chance.distinct(6, 6)) == np.arange(6)).all()
    weights = np.array([1.0, 2.0, 5.0])
    ranked = chance.ranked(weights, 2)
    assert np.bincount(ranked[:, 0]) / len(ranked) == pytest.approx(weights / 8, abs=0.02)
    after_the_last = ranked[ranked[:, 0] == 2, 1]
    assert (after_the_last == 1).mean() == pytest.approx(2 / 3, abs=0.03)
    assert abs(np.corrcoef(chance.shares(2).T)[0, 1]) < 0.03


WRONG = [
    ({}, "no kind; name one of"),
    ({"kind": "mqr"}, "no kind 'mqr'; did you mean 'mqar'"),
    ({"kind": "mqar", "pair": 3}, "no key 'pair'; did you mean 'pairs'"),
    ({"kind": "mqar", "pairs": 0}, "pairs: expected int >= 1, not 0"),
    (
        {"kind": "mqar", "pairs": 17, "length": 64},
        "too short for 17 pairs and their questions; give 68",
    ),
    ({"kind": "mqar", "vocab": 16, "pairs": 8}, "pairs is 8, at most 7"),
    ({"kind": "mqar", "pairs": 4, "queries": 5}, "queries is 5, at most 4"),
    ({"kind": "mqar", "loss": "some"}, "loss"),
    ({"kind": "stream", "vocab": 16, "pairs": 5}, "pairs is 5, at most 4"),
    ({"kind": "stream", "pairs": 64}, "leaves no room for a question"),
    ({"kind": "selective-copy", "symbols": 33}, "symbols is 33, at most 32"),
    ({"kind": "induction", "length": 2}, "length 2 is too short"),
    ({"kind": "phone-book", "vocab": 11}, "holds no names"),
    ({"kind": "phone-book", "vocab": 13, "entries": 5}, "entries is 5, at most 4"),
    ({"kind": "phone-book", "entries": 5, "queries": 6}, "queries is 6, at most 5"),
    ({"kind": "needle", "vocab": 8, "needles": 3}, "needles is 3, at most 2"),
    ({"kind": "needle", "length": 4}, "too short; give 5"),
    ({"kind": "needle", "distance": 124}, "distance is 124, at most 123"),
    ({"kind": "needle", "distance": 1, "needles": 2}, "is for one needle"),
]


@pytest.mark.parametrize(
    ("tree", "words"),
    WRONG,
    ids=lambda t: t if isinstance(t, str) else " ".join(map(str, t.values())),
)
def test_what_cannot_be_asked_is_refused_in_one_line(tree, words):
    with pytest.raises(AmorError) as raised:
        read_task(tree)
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "tree",
    [
        {"kind": "mqar", "pairs": 17, "length": 64},
        {"kind": "needle", "length": 4},
        {"kind": "stream", "pairs": 64},
        {"kind": "stream", "pairs": 64, "filler": 0.99},
        {"kind": "induction", "length": 2},
    ],
    ids=lambda t: " ".join(map(str, t.values())),
)
def test_the_length_that_an_error_names_is_enough(tree):
    with pytest.raises(AmorError) as raised:
        read_task(tree)
    enough = int(str(raised.value).split()[-1])
    assert drawn({**tree, "length": enough})[1].question.max() >= 1


def test_a_needle_stands_at_its_distance():
    task, found = drawn({"kind": "needle", "distance": 11, "value": 3})
    for row in found.tokens.tolist():
        question = task.length - 3
        assert row.index(row[question]) + 3 + 11 == question - 1


def test_a_task_of_another_size_is_the_same_task():
    task = read_task({"kind": "phone-book"}).change(entries=20, queries=1)
    assert (task.kind, task.entries, task.length) == ("phone_book", 20, 20 * 6 + 7 - 1)
    assert read_task(task.tree).tree == task.tree
