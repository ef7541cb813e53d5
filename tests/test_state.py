"""States are values: forked, selected, joined, rolled back, stored; reading on is exact."""

import pytest
import torch
from laws import close, small, tokens

import amor
from amor.kv import KV
from amor.presets import NAMES
from amor.state import State


def tensors(state):
    for part in state.parts:
        for _, held in sorted(part.items()):
            yield from (held.k, held.v) if isinstance(held, KV) else (held,)


def same(a, b):
    assert torch.equal(a.position, b.position)
    for x, y in zip(tensors(a), tensors(b), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_state_on_disk_comes_back_to_the_bit(name, tmp_path):
    state = small(name)(
        tokens(3, 20), valid=torch.arange(20) < torch.tensor([20, 7, 1])[:, None]
    ).state
    state.save(tmp_path / "state.safetensors")
    again = State.load(tmp_path / "state.safetensors")
    same(again, state)
    assert not any(t.data_ptr() % 64 for t in tensors(again)), (
        "tensors lie as fresh ones do, so that they are computed with alike"
    )


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_reading_on_leaves_the_old_state_as_it_was(name):
    model, text = small(name), tokens(2, 40)
    state = model(text[:, :20]).state
    kept = state.fork()
    first = model(text[:, 20:], state)
    model(text[:, 20:] + 1 - 2 * (text[:, 20:] == 210).long(), state)
    model(text[:, 20:21], first.state)
    same(state, kept)
    close(model(text[:, 20:], state).hidden, first.hidden)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_rows_selected_and_joined_read_on_as_if_alone(name):
    model, text = small(name), tokens(3, 30)
    singles = [model(text[i : i + 1, :n]).state for i, n in enumerate((20, 7, 1))]
    joined = State.join(singles)
    assert joined.position.tolist() == [20, 7, 1]
    out = model(text[:, 20:25], joined)
    back = out.state.select([2, 0])
    for row, i in enumerate((2, 0)):
        own = model(text[i : i + 1, 20:25], singles[i])
        close(out.hidden[i : i + 1], own.hidden)
        close(
            model(text[i : i + 1, 25:], back.select([row])).hidden,
            model(text[i : i + 1, 25:], own.state).hidden,
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 4, 5, 9, 10])
@torch.no_grad()
def test_tokens_can_be_taken_back_at_any_place_inside_what_is_remembered(name, count):
    model, text = small(name), tokens(2, 40)
    state = model(text[:, :20]).state.keep_history(10)
    for a, b in ((20, 25), (25, 26), (26, 27), (27, 30)):
        state = model(text[:, a:b], state).state
    back = state.rollback(count, model.replay)
    assert back.position.tolist() == [30 - count] * 2
    close(model(text[:, 30 - count :], back).hidden, model(text).hidden[:, 30 - count :])


@torch.no_grad()
def test_each_row_can_be_taken_back_its_own_number_of_tokens():
    model, text = small("amor-mamba2"), tokens(3, 40)
    state = model(text[:, :30], model.start(3).keep_history(16)).state
    for a in range(30, 36):
        state = model(text[:, a : a + 1], state).state
    back = state.rollback(torch.tensor([0, 2, 9]), model.replay)
    assert back.position.tolist() == [36, 34, 27]
    for row, place in enumerate((36, 34, 27)):
        own = model(text[row : row + 1]).hidden[:, place:]
        close(model(text[row : row + 1, place:], back.select([row])).hidden, own)


@torch.no_grad()
def test_a_state_that_was_rolled_back_is_refused_not_misread():
    model, text = small("amor-mamba2"), tokens(1, 40)
    state = model(text[:, :20], model.start(1).keep_history(8)).state
    later = model(text[:, 20:24], state).state
    back = later.rollback(4, model.replay)
    model(text[:, 24:28], back)
    with pytest.raises(amor.AmorError, match="fork it before rollback"):
        model(text[:, 24:25], later)


@torch.no_grad()
def test_more_than_is_remembered_cannot_be_taken_back():
    model = small("mamba2")
    state = model(tokens(1, 20)).state
    with pytest.raises(amor.AmorError, match=r"state.keep_history\(n\)"):
        state.rollback(1, model.replay)


@torch.no_grad()
def test_keys_grow_without_copying_at_every_step():
    model, text = small("transformer"), tokens(1, 200)
    state = model(text[:, :100]).state
    buffers = set()
    for column in range(100, 200):
        state = model(text[:, column : column + 1], state).state
        buffers.add(id(state.parts[0]["kv"].buffer))
    assert len(buffers) <= 3


def test_truncated_backpropagation_carries_the_state_and_cuts_its_history():
    model, text = small("amor-mamba2"), tokens(1, 40)
    first = model(text[:, :20], targets=text[:, :20])
    second = model(text[:, 20:], first.state.detach(), targets=text[:, 20:])
    close(second.hidden, model(text).hidden[:, 20:])
    second.loss.backward()
    assert all(not t.requires_grad for t in tensors(first.state.detach()))


def test_a_file_that_is_no_state_is_refused(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "junk").write_bytes(b"junk")
    save_file({"a": torch.zeros(1)}, str(tmp_path / "other"))
    for name in ("junk", "other", "absent"):
        with pytest.raises(amor.AmorError, match="not a saved state"):
            State.load(tmp_path / name)
