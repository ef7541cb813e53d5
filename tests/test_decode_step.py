"""Packed steps: a row's bits are its own, whatever the threads and neighbours; what does not fit is refused; large pages."""

import dataclasses
import itertools

import pytest
import torch
from laws import close, small, tokens

import amor
from amor.bench.simulate import Rounds, Scheduled, filled
from amor.decode.engine import Engine
from amor.decode.head import Head
from amor.decode.regate import gated
from amor.decode.savings import Savings
from amor.decode.step import Packed
from amor.ops import product
from amor.ops.backends import BACKENDS, missing, module
from amor.ops.product import pages
from amor.ops.product.refine import refine

RECURRENT = ["mamba2", "gated-deltanet", "mamba2-fused", "amor-mamba2-mlp"]


@torch.no_grad()
def read(model, rows):
    """A State of some rows after a few tokens, and their next tokens."""
    return model(tokens(rows, 6)).state, tokens(rows, 1, seed=1)[:, 0]


@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("name", RECURRENT)
def test_a_row_s_step_has_the_same_bits_beside_others_and_with_more_threads(name, kind):
    model = small(name)
    packed = Packed(model, kind)
    state, token = read(model, 11)
    apart = [packed.step(token[r : r + 1], state.select([r])) for r in range(11)]
    for threads in (1, 3):
        torch.set_num_threads(threads)
        together = packed.step(token, state.fork())
        torch.set_num_threads(1)
        for row, alone in enumerate(apart):
            assert torch.equal(together.logits[row], alone.logits[0]), f"row {row}, {threads} threads"
            for mine, theirs in zip(together.state.parts, alone.state.parts, strict=True):
                for part, held in mine.items():
                    if isinstance(held, torch.Tensor):
                        assert torch.equal(held[row], theirs[part][0]), part


@pytest.mark.parametrize("name", RECURRENT)
def test_a_packed_step_is_the_forward_of_one_token(name):
    model = small(name)
    state, token = read(model, 3)
    with torch.no_grad():
        out = model(token[:, None], state.fork())
    seen = Packed(model).step(token, state)
    close(seen.hidden, out.hidden[:, 0])
    for mine, theirs in zip(seen.state.parts, out.state.parts, strict=True):
        for part, held in mine.items():
            if isinstance(held, torch.Tensor):
                close(held, theirs[part], part)


def test_a_state_that_does_not_fit_is_refused_before_memory_is_touched():
    packed, other = Packed(small("mamba2")), small("mamba2", width=128)
    state, token = read(other, 2)
    with pytest.raises(amor.AmorError, match="another model"):
        packed.step(token, state)
    state, token = read(small("mamba2"), 2)
    one_row = dataclasses.replace(state, parts=state.select([0]).parts)
    with pytest.raises(amor.AmorError, match="shape"):
        packed.step(token, one_row)


def test_every_matrix_is_counted_once():
    model = small("amor-mamba2-mlp")
    own = sum(p.nbytes for p in model.parameters() if p.ndim == 2)
    assert Packed(model).nbytes == own


def test_weights_gathered_into_large_pages_keep_their_place_and_numbers():
    weight = torch.randn(3 * pages.PAGE)
    place, before = weight.data_ptr(), weight.clone()
    assert pages.settle([weight]) in (0, 11 * pages.PAGE, 12 * pages.PAGE)
    assert weight.data_ptr() == place and torch.equal(weight, before)


def test_neighbours_in_memory_are_gathered_as_one_and_only_pages_that_are_all_theirs():
    page = pages.PAGE
    room = torch.empty(4 * page, dtype=torch.int8)
    first, second, far = room[:100], room[100:page], room[3 * page :]
    start = room.data_ptr()
    assert pages.spans([far, second, first]) == [(start, start + page), (start + 3 * page, start + 4 * page)]
    assert pages.whole_pages([(page - 1, 3 * page + 1), (5 * page + 1, 6 * page + 5)]) == [(page, 3 * page)]
    assert pages.settle([torch.empty(10)]) == 0


@pytest.mark.parametrize("guest", [b.name for b in BACKENDS["product"] if missing("product", b, "cpu") is None])
@pytest.mark.parametrize("likely", [0, 40, 5200])
def test_refined_entropies_are_those_of_logits_with_the_likeliest_made_exact(guest, likely):
    torch.manual_seed(0)
    weight, x = torch.randn(5200, 65) * 0.3, torch.randn(3, 65)
    exact, copy = product.pack(weight), product.pack(weight, "int8")
    logits = product.probe(x, copy, logits=True).logits
    before = logits.clone()
    found, looked_at = module("product", guest).refined(x, exact, copy, logits, likely)
    assert torch.equal(logits, before)
    assert 3 * likely <= looked_at <= 3.6 * likely
    if likely == 40:  # some weights are exact: less was lost, and not nothing
        assert (found.residual > 0).all() and (found.residual < product.probe(x, copy).residual).all()
        return
    logp = ((x @ weight.T) if likely else logits).double().log_softmax(1)
    close(found.entropy, -(logp.exp() * logp).sum(1).float(), "entropy")
    assert (found.residual == 0).all() == (likely == 5200)


def test_logits_of_another_head_are_refused():
    weight = torch.randn(50, 16)
    with pytest.raises(amor.AmorError, match="head"):
        refine(torch.randn(2, 16), product.pack(weight), product.pack(weight, "int8"), torch.randn(2, 49))


def test_the_cheap_head_is_asked_while_firing_costs_more_than_asking():
    head = Head(torch.randn(100, 16), "float32", True)
    head.copy_cost, head.doubted = 0.3, 0.1
    assert [head.copy_pays(fires) for fires in (0.0, 0.3, 0.5, 1.0)] == [False, False, True, True]
    head.doubted = 1.0
    assert not head.copy_pays(0.9)
    assert not Head(torch.randn(100, 16), "float32", False).copy_pays(1.0)
    head.doubted = 0.0  # the output's own pass is over the copy where the best token is all that is wanted
    assert head.copy_pays(0.0, best=True) and not head.copy_pays(0.0)
    head.doubted = 0.7
    assert not head.copy_pays(0.0, best=True)


def test_what_is_expected_follows_what_blocks_did():
    head = Head(torch.randn(100, 16), "float32", True)
    for _ in range(500):  # row 0 fires at blocks 0 and 2, row 1 at block 1, rows 2 and 3 never
        head.expect([[True, False, False, False], [False, True, False, False], [True, False, False, False]], rows=4, doubts=1)
    assert head.fires == pytest.approx(0.5, abs=1e-3) and head.doubted == pytest.approx(0.25, abs=1e-3)
    assert 0.4 < head.again < 0.6  # one of two firings before the last block is followed by another
    for _ in range(500):
        head.expect([], rows=4, doubts=0)
    assert head.fires < 1e-3


@pytest.mark.parametrize(("again", "foresee", "passes"), [(0.0, True, (1, 1)), (1.0, False, (1, 3)), (1.0, True, (1, 1))])
def test_after_a_firing_the_exact_head_is_read_unless_another_is_expected(again, foresee, passes):
    model = small("amor-mamba2")
    engine = Engine(model, Savings(cheap=True, foresee=foresee))
    rounds = Rounds(engine, filled(model, 50, 32), 1.0)
    engine.head.copy_cost, engine.head.fires, engine.head.again, engine.head.doubted = 0.3, 1.0, again, 0.0
    for gate in rounds.gates:
        gate.doubts = gate.deep_doubts = [False] * len(gate.plan)
        gate.plan = [gate is rounds.gates[0] or again > 0] * len(gate.plan)
    with rounds.gates_set():
        engine.step(torch.tensor([5]), rounds.base)
    # the first look is cheap; then the rest and the output in one exact pass, or every block cheaply and the output alone,
    # or all that is foreseen in one exact pass
    assert (engine.head.passes.exact, engine.head.passes.cheap) == passes


@pytest.mark.parametrize("fires", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("savings", [Savings(), Savings(cheap=True)])
def test_blocks_run_as_if_they_fired_leave_no_trace_where_they_do_not(fires, savings):
    model = small("amor-mamba2")
    found = []
    for foresee in (True, False):
        engine = Engine(model, dataclasses.replace(savings, foresee=foresee))
        state, token = read(model, 2)
        gates = [Scheduled(k, 3, float(fire), 15, 6, together=False) for k, fire in enumerate(fires)]
        for gate in gates:
            gate.doubts = gate.deep_doubts = [False] * 15
        engine.head.copy_cost, engine.head.doubted = 0.1, 0.0
        for best in (False, True):
            engine.head.fires = engine.head.again = 1.0
            with gated(model, gates):
                state, seen = engine.step(token, state, best)
            found.append(
                (seen.best, seen.entropy, seen.fire, *(t for part in state.parts[-3:] for t in (part["kv"].k, part["kv"].v)))
            )
    for mine, theirs in zip(found[:2], found[2:], strict=True):
        assert mine[2].tolist() == [list(fires)] * 2
        for a, b in zip(mine, theirs, strict=True):
            close(a.float(), b.float()) if a is mine[1] else torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_position_outside_its_slots_is_refused_and_nothing_is_written():
    model = small("amor-mamba2")
    packed = Packed(model)
    state, token = read(model, 2)
    for wrong in (-1, 10_000):
        broken = dataclasses.replace(state.fork(), position=torch.tensor([6, wrong]), even=False)
        with pytest.raises(amor.AmorError, match="slots"):
            packed.step(token, broken)


def test_kernels_that_were_asked_for_are_not_passed_over_by_packed_steps(monkeypatch):
    model = small("mamba2")
    assert Engine(model).path == "packed steps"
    monkeypatch.setenv("AMOR_KERNELS", "scan=reference")
    assert "scan=reference" in Engine(model).path
    with pytest.raises(amor.AmorError, match="scan=reference"):
        Engine(model, weights="int8")
