"""Rows with memory of their own: they enter, leave, fork and roll back without a copy of others,
and tokens that are read ahead and taken back leave no trace."""

import pytest
import torch
from laws import small, tokens

import amor
from amor.decode.engine import Engine
from amor.decode.policy import Fixed
from amor.decode.rows import RowMemory

NAMES = ["mamba2", "amor-kda", "mamba2-fused", "transformer", "amor-mamba2", "amor-gated-deltanet"]


def prompts_of(*lengths):
    return [tokens(1, n, seed=i)[0].tolist() for i, n in enumerate(lengths)]


def places(session):
    """Where the memory of each row lies."""
    return [(row.recurrent.data_ptr(), row.keys.data_ptr()) for row in session.memory.rows]


def same(mine, theirs):
    """Whether the memories of two sessions hold the same numbers."""
    for part, other in zip(mine.state.parts, theirs.state.parts, strict=True):
        for name, entry in part.items():
            pair = (entry, other[name])
            if not isinstance(entry, torch.Tensor):
                pair = [torch.stack([kv.k, kv.v]) for kv in pair]
            if not torch.equal(*pair):
                return False
    return torch.equal(mine.position, theirs.position)


@pytest.mark.parametrize("name", ["amor-mamba2", "transformer"])
def test_rows_enter_and_leave_and_no_other_row_moves(name):
    engine = Engine(small(name))
    session = engine.prefill(prompts_of(9, 5, 7), room=20)
    first = places(session)
    session = session.select([2, 0])
    session.step([1, 2])
    session = session.join(engine.prefill(prompts_of(30), room=20))
    session.step([3, 4, 5])
    assert places(session)[:2] == [first[2], first[0]]
    assert [row.capacity for row in session.memory.rows] == [27, 29, 50]


@pytest.mark.parametrize("name", NAMES)
def test_a_fork_is_copied_when_one_of_both_steps_and_neither_disturbs_the_other(name):
    engine = Engine(small(name))
    session = engine.prefill(prompts_of(9, 5), room=20)
    fork, twice = session.fork(), session.select([0, 0])
    assert places(fork) == places(session), "nothing is copied yet"
    want = engine.prefill(prompts_of(9, 5)).step([3, 4])
    other = session.step([8, 9])
    assert torch.equal(fork.step([3, 4]).logits, want.logits)
    assert not torch.equal(other.logits, want.logits)
    both = twice.step([3, 8]).logits
    assert torch.equal(both[0], want.logits[0]) and torch.equal(both[1], other.logits[0])


def test_a_row_that_only_one_session_still_holds_is_not_copied():
    session = Engine(small("amor-mamba2")).prefill(prompts_of(9, 5), room=20)
    first = places(session)
    session = session.fork()
    session.step([1, 2])
    assert places(session) == first


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_a_row_grow_alone_when_its_memory_is_full(name):
    model = small(name)
    engine = Engine(model)
    session = engine.prefill(prompts_of(9), room=2).join(engine.prefill(prompts_of(7), room=90))
    other = session.memory.rows[1].keys.data_ptr()
    text = tokens(2, 80, seed=3)
    for column in text.T:
        output = session.step(column)
    assert session.memory.rows[1].keys.data_ptr() == other
    for row, prompt in enumerate([*prompts_of(9), *prompts_of(7)]):
        alone = engine.prefill([prompt], room=90)
        for token in text[row]:
            want = alone.step(token[None])
        assert torch.equal(output.logits[row], want.logits[0])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_read_ahead_have_the_bits_of_steps_and_leave_no_trace_where_refused(
    name, speculate, threads
):
    engine = Engine(small(name), policy=Fixed(speculate))
    session = engine.prefill(prompts_of(9, 5, 7), room=20)
    alone = [session.fork().select([row]) for row in range(3)]
    drafts, counts = [[3, 1, 4], [1], [5, 9, 2, 6]], [2, 1, 3]
    torch.set_num_threads(threads)
    ahead = session.step_ahead(drafts)
    torch.set_num_threads(1)
    last = session.accept(counts)
    for row, (draft, count) in enumerate(zip(drafts, counts, strict=True)):
        first = sum(len(d) for d in drafts[:row])
        for line, token in enumerate(draft[:count], first):
            output = alone[row].step([token])
            assert torch.equal(ahead.logits[line], output.logits[0])
            assert torch.equal(ahead.fire[line], output.fire[0])
        assert torch.equal(last.logits[row], output.logits[0])
    assert same(session, alone[0].join(*alone[1:]))


@pytest.mark.parametrize("name", NAMES)
def test_a_rollback_takes_back_what_steps_ahead_kept_and_single_steps(name):
    engine = Engine(small(name))
    session = engine.prefill(prompts_of(9, 5), room=20, memory=4)
    before = session.fork()
    session.step([1, 2])
    session.step_ahead([[3, 4, 5], [6, 7]])
    session.accept([3, 1])
    session.rollback(torch.tensor([4, 2]))
    assert same(session, before)
    with pytest.raises(amor.AmorError, match="remembered"):
        session.rollback(1)


def test_what_cannot_be_accepted_is_refused():
    session = Engine(small("mamba2")).prefill(prompts_of(9))
    with pytest.raises(amor.AmorError, match="call step_ahead"):
        session.accept([1])
    with pytest.raises(amor.AmorError, match="at least one token"):
        session.step_ahead([[]])
    session.step_ahead([[1, 2]])
    for count in (0, 3):
        with pytest.raises(amor.AmorError, match="accepted"):
            session.accept([count])
    session.step([1])
    with pytest.raises(amor.AmorError, match="call step_ahead"):
        session.accept([1])
    whole = Engine(small("mamba2"), amor.decode.savings.Savings(compiled=False))
    with pytest.raises(amor.AmorError, match="compiled as a whole"):
        whole.prefill(prompts_of(9)).step_ahead([[1, 2]])


@torch.no_grad()
def test_a_state_goes_into_rows_and_comes_out_as_it_was():
    model = small("amor-gated-deltanet")
    state = model(tokens(3, 11)).state
    session = Engine(model).resume(state)
    assert isinstance(session.memory, RowMemory)
    session.state.check(state.spec)
    again = session.state
    for part, other in zip(state.parts, again.parts, strict=True):
        for name, entry in part.items():
            if isinstance(entry, torch.Tensor):
                assert torch.equal(entry, other[name])
            else:
                assert torch.equal(entry.k, other[name].k)
                assert torch.equal(entry.v, other[name].v)


def test_only_accepted_tokens_are_counted_and_drafts_apart():
    engine = Engine(small("amor-mamba2"))
    session = engine.prefill(prompts_of(9))
    session.step_ahead([[1, 2, 3]])
    session.accept([2])
    stats = engine.stats
    assert (stats.tokens, stats.drafted, stats.accepted) == (2, 2, 1)
