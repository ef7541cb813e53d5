"""Linear layers: native products against torch's, values and gradients, one weight or several."""

import pytest
import torch
from laws import close
from torch import Tensor, nn

from amor.ops.backends import BACKENDS, missing, module
from amor.ops.linear import native
from amor.parts import Linear, linears_sharing_input, split_linear

pytestmark = pytest.mark.usefixtures("fresh_memory_is_poisoned")

GUESTS = [
    b.name
    for b in BACKENDS["linear"]
    if b.name != "reference" and missing("linear", b, "cpu") is None
]
# tokens, inner, outputs: no token, one, few; whole blocks, ragged ones, one output, several pieces
# of the inner dimension, several widths of panels
SHAPES = [
    (0, 16, 8),
    (1, 64, 48),
    (3, 37, 19),
    (96, 64, 48),
    (101, 37, 19),
    (64, 5, 1),
    (70, 1100, 33),
    (130, 16, 2070),
    (1000, 8, 8),
]


def made(tokens: int, inner: int, *outputs: int) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    weights = [(torch.randn(n, inner) / inner**0.5).requires_grad_() for n in outputs]
    return torch.randn(tokens, inner).requires_grad_(), weights


@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_reference(
    guest: str, shape: tuple[int, int, int]
) -> None:
    tokens, inner, outputs = shape
    x, (a, b, c) = made(tokens, inner, outputs, 3, 20)
    groups = [[a, b], [c]]
    wanted = module("linear", "reference").linears(
        x.double(), [[w.double() for w in group] for group in groups]
    )
    found = module("linear", guest).linears(x, groups)
    directions = [torch.randn_like(y) for y in found]
    leaves = (x, a, b, c)
    gradients = torch.autograd.grad(wanted, leaves, [d.double() for d in directions])
    for mine, theirs in zip(
        [*found, *torch.autograd.grad(found, leaves, directions)],
        [*wanted, *gradients],
        strict=True,
    ):
        assert mine.dtype == torch.float32
        close(mine, theirs.float())


@pytest.mark.parametrize("guest", GUESTS)
def test_a_result_nobody_uses_and_a_frozen_weight_cost_no_gradient(guest: str) -> None:
    x, (a, b, c) = made(80, 24, 10, 11, 12)
    c.requires_grad_(False)
    used, _, frozen = module("linear", guest).linears(x, [[a], [b], [c]])
    (used.sum() + frozen.sum()).backward()
    close(x.grad, (a.sum(0) + c.sum(0)).expand_as(x))
    assert a.grad is not None and b.grad is None and c.grad is None


@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize("turned", [False, True])
def test_x_may_lie_anyhow_in_memory(guest: str, turned: bool) -> None:
    whole = torch.randn(70, 300)
    x = (torch.randn(100, 90).T if turned else whole[:, 7:107]).detach().requires_grad_()
    (weight,) = made(1, x.shape[1], 40)[1]
    (y,) = module("linear", guest).linears(x, [[weight]])
    close(y, x @ weight.T)
    dy = torch.randn(40, len(x)).T  # a gradient that is turned
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    close(dx, dy @ weight)
    close(dw, dy.T @ x)


def test_bits_depend_neither_on_threads_nor_on_the_tokens_beside() -> None:
    if "native" not in GUESTS:
        pytest.skip("no compiler here")
    x, (weight,) = made(300, 700, 50)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = native.linears(x, [[weight]])[0]
            found.append((y, *torch.autograd.grad(y, x, y.detach())))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert torch.equal(native.linears(x[100:200], [[weight]])[0], found[0][0][100:200])


def moved(t: Tensor, floats: int) -> Tensor:
    """A copy that lies this many numbers past a multiple of 64 bytes."""
    room = torch.empty(t.numel() + floats)
    assert room.data_ptr() % 64 == 0
    return room[floats:].view_as(t).copy_(t.detach()).requires_grad_()


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 7, 70])
def test_what_learns_does_not_depend_on_where_tensors_lie_nor_on_how_many_tokens_there_are(
    tokens: int,
) -> None:
    if "native" not in GUESTS:
        pytest.skip("no compiler here")
    x, (weight,) = made(100, 128, 128)
    dy = torch.randn(100, 128)

    def outcome(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        (y,) = native.linears(x, [[weight]])
        return y, *torch.autograd.grad(y, (x, weight), dy)

    first = slice(0, tokens)
    y, dx, dw = outcome(moved(x[first], 0), weight, moved(dy[first], 0))
    for floats in (1, 2, 3, 5):
        other = outcome(moved(x[first], floats), moved(weight, floats), moved(dy[first], floats))
        assert all(torch.equal(a, b) for a, b in zip((y, dx, dw), other, strict=True)), (
            f"{floats} numbers past the line"
        )
    whole, whole_dx, _ = outcome(x, weight, dy)
    assert torch.equal(y, whole[first]) and torch.equal(dx, whole_dx[first])


def test_few_tokens_that_learn_nothing_other_types_and_autocast_are_torchs() -> None:
    x, (weight,) = made(native.FEW, 16, 8)
    for inputs in ((x[:3].detach(), weight.detach()), (x.double(), weight.double())):
        assert torch.equal(native.linears(inputs[0], [[inputs[1]]])[0], inputs[0] @ inputs[1].T)
    with torch.autocast("cpu", torch.bfloat16):
        assert native.linears(x, [[weight]])[0].dtype == torch.bfloat16
    assert native.linears(x[:0], [[weight]])[0].shape == (0, 8)


def test_a_width_that_does_not_fit_is_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        native.linears(torch.randn(100, 16), [[torch.randn(8, 17)]])


class Adapted(nn.Module):
    """What adapter libraries put in the place of a layer."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer, self.weight = layer, layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 1


def test_a_layer_that_was_replaced_or_is_watched_is_called_itself() -> None:
    x, layers = torch.randn(70, 16), [Linear(16, 8), Linear(16, 4), Linear(16, 6)]
    joined, alone = linears_sharing_input(x, layers[:2], layers[2:])
    close(torch.cat([joined, alone], 1), torch.cat([x @ layer.weight.T for layer in layers], 1))
    seen: list[int] = []
    layers[1].register_forward_hook(lambda module, args, out: seen.append(len(out)))
    close(linears_sharing_input(x, layers[:2])[0], joined)
    assert seen == [70]
    adapted = Adapted(layers[2])
    close(linears_sharing_input(x, [adapted])[0], alone + 1)  # type: ignore[list-item]
    first, second = split_linear(x, adapted, [2, 4])  # type: ignore[arg-type]
    close(torch.cat([first, second], 1), alone + 1)
    assert all(
        torch.equal(a, b)
        for a, b in zip(split_linear(x, layers[2], [2, 4]), alone.split([2, 4], 1), strict=True)
    )
