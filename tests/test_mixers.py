"""The laws of mixers, over every kind the registry finds."""

import pytest
import torch
from laws import SMALL, close
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import amor
from amor import registry
from amor.kv import KV
from amor.layout import Layout
from amor.state import State

KINDS = registry.kinds("mixers")
LENGTH = 70


def mixer_of(kind):
    config = amor.preset("mamba2", "tiny", **SMALL).change(pattern=[kind])
    from amor.judge.randomise import randomise_for_test

    return randomise_for_test(amor.build(config)).backbone.layers[0].mixer


def read(mixer, x, state=None, lengths=None, reset=None):
    """x [B, T, D] through a mixer from a State of one part."""
    if state is None:
        state = State(
            torch.zeros(len(x), dtype=torch.long), (mixer.start(len(x), x.device, x.dtype),)
        )
    layout = state.layout(x.shape[1], lengths, reset)
    y, part = mixer(x, state.parts[0], layout)
    return y, state.advance(layout, [part], torch.zeros(x.shape[:2]))


def inputs(rows, columns, seed=0):
    return torch.randn(rows, columns, 64, generator=torch.Generator().manual_seed(seed))


def test_the_registry_finds_the_five_mixers():
    assert set(KINDS) == {"attention", "mamba2", "gated_deltanet", "kda", "fused"}


SHAPES = {
    "attention": [{}, {"head_size": 16}, {"width": 192, "head_size": 32}],
    "mamba2": [{}, {"expand": 3, "head_size": 16, "state_size": 24, "groups": 4, "conv": 3}],
    "gated_deltanet": [{}, {"head_size": 16, "conv": 2}, {"heads": 3, "expand_v": 1}],
    "kda": [{}, {"head_size": 16, "conv": 2}, {"heads": 3, "expand_v": 2}],
    "fused": [
        {},
        {"expand": 1, "head_size": 32, "state_size": 24, "groups": 2, "conv": 5, "share": 2},
    ],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [256, 512, 768])
def test_options_count_the_parameters_that_are_built(kind, width):
    cls = registry.find("mixers", kind)
    for shape in SHAPES[kind]:
        options = cls.Options(**shape)
        options.check(width)
        with torch.device("meta"):
            mixer = cls(width, options, 1e-5)
        assert options.parameters(width) == sum(p.numel() for p in mixer.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(1, 2, 3), (64,), (63, 64, 65), (35, 36)])
@torch.no_grad()
def test_a_sequence_may_be_cut_anywhere(kind, cuts):
    mixer, x = mixer_of(kind), inputs(2, LENGTH)
    whole, after = read(mixer, x)
    pieces, state = [], None
    for a, b in zip((0, *cuts), (*cuts, LENGTH), strict=True):
        y, state = read(mixer, x[:, a:b], state)
        pieces.append(y)
    close(torch.cat(pieces, 1), whole)
    same_state(state, after)


def same_state(a, b):
    for name, held in a.parts[0].items():
        other = b.parts[0][name]
        if isinstance(held, KV):
            close(held.k, other.k, "keys")
            close(held.v, other.v, "values")
        else:
            close(held, other, name)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_the_state_as_through_the_whole(kind):
    mixer, goal = mixer_of(kind), inputs(2, LENGTH, seed=5)

    def gradients(cuts):
        x = inputs(2, LENGTH).requires_grad_()
        mixer.zero_grad()
        state, total = None, 0.0
        for a, b in zip((0, *cuts), (*cuts, LENGTH), strict=True):
            y, state = read(mixer, x[:, a:b], state)
            total = total + (y * goal[:, a:b]).sum()
        total.backward()
        return {"x": x.grad, **{n: p.grad for n, p in mixer.named_parameters()}}

    whole, cut = gradients(()), gradients((30, 31))
    for name, grad in whole.items():
        close(cut[name], grad, f"gradient of {name}")


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_nothing_before_a_changed_token_moves(kind):
    mixer, x = mixer_of(kind), inputs(1, LENGTH)
    before = read(mixer, x)[0]
    for place in (0, 1, 33, 64, LENGTH - 1):
        changed = x.clone()
        changed[:, place] += 1
        after = read(mixer, changed)[0]
        close(after[:, :place], before[:, :place], f"before {place}")
        assert not torch.equal(after[:, place:], before[:, place:])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_row_does_not_know_its_neighbours_nor_its_pads(kind):
    mixer, lengths = mixer_of(kind), torch.tensor([LENGTH, 1, 0, 33, 64])
    x = inputs(5, LENGTH)
    batched, state = read(mixer, x, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            same_state(read_nothing(mixer, x), state.select([row]))
            continue
        own, after = read(mixer, x[row : row + 1, :length])
        close(batched[row : row + 1, :length], own, f"row {row}")
        mine = state.select([row])
        for name, held in after.parts[0].items():
            other = mine.parts[0][name]
            if isinstance(held, KV):
                close(other.k[:, :, :length], held.k, "keys")
            else:
                close(other, held, name)


def read_nothing(mixer, x):
    part = mixer.start(1, x.device, x.dtype)
    return State(
        torch.zeros(1, dtype=torch.long),
        ({k: v for k, v in part.items() if not isinstance(v, KV)},),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_do_not_leak(kind):
    """Change the last token of the first document: nothing of the second may change."""
    mixer, goal = mixer_of(kind), inputs(1, LENGTH, seed=5)
    reset = torch.zeros(1, LENGTH, dtype=torch.bool)
    reset[0, [0, 37]] = True
    x = inputs(1, LENGTH).requires_grad_()
    y, _ = read(mixer, x, reset=reset)
    (y[:, 37:] * goal[:, 37:]).sum().backward()
    close(x.grad[:, :37], torch.zeros_like(x.grad[:, :37]), "gradient of the first document")
    with torch.no_grad():
        own, _ = read(mixer, x[:, 37:])
        close(y[:, 37:], own, "the second document")
        changed = x.clone()
        changed[:, 36] += 1
        close(
            read(mixer, changed, reset=reset)[0][:, 37:],
            y[:, 37:],
            "after a change in the first document",
        )


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_fresh_memory_is_never_read(kind):
    """Uninitialised memory is poisoned with NaN; nothing of it may reach a result."""
    mixer = mixer_of(kind)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        y, state = read(mixer, inputs(3, 65), lengths=torch.tensor([65, 0, 7]))
        y2, state = read(mixer, inputs(3, 2), state, lengths=torch.tensor([1, 2, 0]))
        y3, state = read(mixer, inputs(3, 1), state)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.isfinite(y[0]).all() and torch.isfinite(y[2, :7]).all()
    assert (
        torch.isfinite(y2[0, 0]).all() and torch.isfinite(y2[1]).all() and torch.isfinite(y3).all()
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [1, 50])
@torch.no_grad()
def test_declared_parameters_state_and_flops_are_what_is_built_and_run(kind, context, monkeypatch):
    monkeypatch.setenv(
        "AMOR_KERNELS", "reference"
    )  # the recurrence itself, whose products can be counted
    mixer = mixer_of(kind)
    _, state = read(mixer, inputs(1, context))
    cost = mixer.cost(context)
    held = sum(t.nbytes for t in state.parts[0].values())
    assert held == cost.state_held
    assert cost.weights == sum(p.numel() for p in mixer.parameters())
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        read(mixer, inputs(1, 1), state)
    assert counter.get_total_flops() == cost.flops


def test_layouts_number_positions_inside_documents():
    layout = Layout(
        torch.tensor([3, 0]),
        5,
        rows_aligned=False,
        max_position=3,
        reset=torch.tensor([[0, 0, 1, 0, 0], [1, 0, 0, 0, 1]]).bool(),
    )
    assert layout.positions.tolist() == [[3, 4, 0, 1, 2], [0, 1, 2, 3, 0]]
    assert layout.end.tolist() == [3, 1]
