"""Recurrent operators: every backend usable here equals the reference, gradients too."""

from collections.abc import Callable
from functools import cache
from math import log2

import pytest
import torch
import torch.nn.functional as F
from laws import close
from torch import Tensor

from amor.ops.backends import BACKENDS, missing, module
from amor.ops.chunks import CHOICES

pytestmark = pytest.mark.usefixtures("fresh_memory_is_poisoned")

# what is called, and its operator: kda is delta with a decay a channel
OPERATOR = {"scan": "scan", "delta": "delta", "kda": "delta", "conv": "conv"}
GUESTS = [
    (op, guest.name)
    for op, called in OPERATOR.items()
    for guest in BACKENDS[called]
    if guest.name != "reference" and missing(called, guest, "cpu") is None
]
RECURRENT = [pair for pair in GUESTS if pair[0] != "conv"]
LENGTHS = (1, 2, 63, 64, 65, 100)
Inputs = dict[str, Tensor]


def kernel(op: str, backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return getattr(module(OPERATOR[op], backend), OPERATOR[op])


def made(
    op: str,
    length: int,
    sizes: tuple[int, int] = (24, 16),
    heads: int = 4,
    rows: int = 2,
    seed: int = 0,
) -> Inputs:
    """Inputs of an operator as a mixer hands them over: pieces of one larger tensor."""
    torch.manual_seed(seed)
    a, b = sizes
    if op == "scan":
        groups = 2 if heads % 2 == 0 else 1
        x, B, C = torch.randn(rows, length, heads * a + 2 * groups * b).split(
            [heads * a, groups * b, groups * b], dim=-1
        )
        dt, A, D = (
            F.softplus(torch.randn(rows, length, heads) - 1),
            -4 * torch.rand(heads),
            torch.randn(heads),
        )
        B, C = (t.unflatten(-1, (groups, b)) for t in (B, C))
        return {"x": x.unflatten(-1, (heads, a)), "dt": dt, "A": A, "B": B, "C": C, "D": D}
    if OPERATOR[op] == "delta":
        q, k, v = torch.randn(rows, length, heads * (2 * a + b)).split(
            [heads * a, heads * a, heads * b], dim=-1
        )
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
        g, beta = -3 * torch.rand(rows, length, heads) ** 3, torch.rand(rows, length, heads)
        if op == "kda":
            g = -3 * torch.rand(rows, length, heads, a) ** 3
        return {"q": q, "k": F.normalize(k, dim=-1), "v": v, "g": g, "beta": beta}
    x = torch.randn(rows, length, 2 * a)[..., : a + 1]
    return {"x": x, "weight": torch.randn(a + 1, 4), "bias": torch.randn(a + 1)}


def remembered(op: str, inputs: Inputs) -> Inputs:
    """A state that is not zero."""
    if op == "scan":
        x, B = inputs["x"], inputs["B"]
        return {"state": torch.randn(len(x), *x.shape[2:], B.shape[3])}
    if OPERATOR[op] == "delta":
        k, v = inputs["k"], inputs["v"]
        return {"state": torch.randn(len(k), *k.shape[2:], v.shape[3])}
    return {"window": torch.randn(len(inputs["x"]), 3, inputs["x"].shape[2])}


def answers(op: str, backend: str, inputs: Inputs, **more: object) -> Inputs:
    """Both outputs, and the gradient of every input through both."""
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    outputs = kernel(op, backend)(**leaves, **more)
    torch.manual_seed(1)
    sum((t * torch.randn(t.shape)).sum() for t in outputs).backward()
    found = dict(zip(("output", "state after"), (t.detach() for t in outputs)))
    for name, leaf in leaves.items():
        found[f"gradient of {name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return found


def same(op: str, backend: str, inputs: Inputs, **more: object) -> None:
    want = answers(op, "reference", inputs, **{k: v for k, v in more.items() if k != "chunk"})
    compare(answers(op, backend, inputs, **more), want, f"{op} {backend}")


def compare(got: Inputs, want: Inputs, who: str) -> None:
    for name in want:
        close(got[name], want[name], f"{who} {name}")


def begins(rows: int, length: int) -> Tensor:
    torch.manual_seed(2)
    return torch.rand(rows, length) < 0.07


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("op", "backend"), GUESTS)
def test_a_backend_equals_the_reference(op: str, backend: str, length: int) -> None:
    inputs = made(op, length)
    reset = begins(2, length)
    for start in ({}, remembered(op, inputs)):
        same(op, backend, inputs | start)
        same(op, backend, inputs | start, reset=reset)


@pytest.mark.parametrize("sizes", [(5, 7), (64, 128), (17, 33)])
@pytest.mark.parametrize(("op", "backend"), GUESTS)
def test_head_sizes_may_be_odd(op: str, backend: str, sizes: tuple[int, int]) -> None:
    inputs = made(op, 70, sizes, heads=3)
    same(op, backend, inputs | remembered(op, inputs), reset=begins(2, 70))


@cache
def five_thousand(op: str, backend: str) -> Inputs:
    inputs = made(op, 5000, (6, 5), heads=2, rows=1)
    return answers(
        op,
        backend,
        inputs | remembered(op, inputs),
        reset=begins(1, 5000) & (torch.arange(5000) % 40 == 0),
    )


@pytest.mark.parametrize(("op", "backend"), GUESTS)
def test_five_thousand_tokens_equal_the_reference(op: str, backend: str) -> None:
    compare(five_thousand(op, backend), five_thousand(op, "reference"), f"{op} {backend}")


@pytest.mark.parametrize(("op", "backend"), RECURRENT)
def test_every_chunk_size_gives_the_same(op: str, backend: str) -> None:
    inputs = made(op, 130, (8, 8), heads=2)
    inputs |= remembered(op, inputs)
    for chunk in CHOICES:
        same(op, backend, inputs, reset=begins(2, 130), chunk=chunk)


@pytest.mark.parametrize("few", [3, 40])
@pytest.mark.parametrize(("op", "backend"), RECURRENT)
def test_a_pad_leaves_the_state_alone(op: str, backend: str, few: int) -> None:
    inputs = made(op, few + 37)
    start = remembered(op, inputs)
    for name in ("dt", "g", "beta"):
        if name in inputs:
            inputs[name][:, few:] = 0
    inputs |= start
    same(op, backend, inputs)
    short = {name: t if t.ndim < 3 or name == "state" else t[:, :few] for name, t in inputs.items()}
    run = kernel(op, backend)
    with torch.no_grad():
        (y, s), (y_short, s_short) = run(**inputs), run(**short)
    close(s, s_short, "state")
    close(y[:, :few], y_short, "output")


@pytest.mark.parametrize(("op", "backend"), RECURRENT)
def test_a_token_that_forgets_everything_does_not_blur_the_decays_after_it(
    op: str, backend: str
) -> None:
    inputs = made(op, 150)
    inputs |= remembered(op, inputs)
    logs = torch.zeros(2, 150, 4)
    logs[:, 1::2] = -0.01
    logs[:, 20::31] = -1e4
    if op == "scan":
        inputs |= {
            "A": torch.full((4,), -1.0),
            "dt": -logs,
            "x": inputs["x"] / (1 - logs)[..., None],
        }
    elif (
        op == "kda"
    ):  # one half of the channels forgets five tokens before the other, and some never
        inputs["g"] = torch.stack([logs, logs.roll(-5, 1), logs.clamp(min=-0.01)], dim=-1).repeat(
            1, 1, 1, 8
        )
    else:
        inputs["g"] = logs
    same(op, backend, inputs)


@pytest.mark.parametrize("backend", [name for op, name in GUESTS if op == "kda"])
@pytest.mark.parametrize("log", [-2.0, -40.0, -1e4])
def test_channels_that_forget_at_once_stand_beside_channels_that_never_do(
    backend: str, log: float
) -> None:
    inputs = made("kda", 100)
    inputs["g"] = torch.where(torch.rand(4, 24) < 0.5, log, 0.0).expand(2, 100, 4, 24)
    same("kda", backend, inputs | remembered("kda", inputs), reset=begins(2, 100))


def test_natively_no_rounding_comes_back_through_a_document_s_beginning() -> None:
    inputs, reset = made("kda", 100), begins(2, 100)
    if ("kda", "native") in GUESTS:
        assert not answers("kda", "native", inputs | remembered("kda", inputs), reset=reset)[
            "gradient of g"
        ][reset].any()


@pytest.mark.parametrize("backend", ["reference", *(name for op, name in GUESTS if op == "kda")])
def test_a_decay_all_channels_share_is_the_decay_of_their_head(backend: str) -> None:
    inputs = made("delta", 100)
    inputs |= remembered("delta", inputs)
    shared = inputs | {"g": inputs["g"][..., None].expand(-1, -1, -1, 24)}
    for reset in (None, begins(2, 100)):
        want, got = (
            answers(op, backend, given, reset=reset)
            for op, given in (("delta", inputs), ("kda", shared))
        )
        got["gradient of g"] = got["gradient of g"].sum(-1)
        compare(got, want, backend)
    with torch.no_grad():  # and of a few tokens, by the recurrence itself
        few = [
            {name: t if name == "state" else t[:, :5] for name, t in given.items()}
            for given in (inputs, shared)
        ]
        for a, b in zip(*(kernel("delta", backend)(**given) for given in few)):
            close(b, a, backend)


@pytest.mark.parametrize(("op", "backend"), RECURRENT)
def test_a_length_past_64k_may_be_cut_anywhere(op: str, backend: str) -> None:
    inputs = made(op, 70_001, (4, 4), heads=2, rows=1)
    run = kernel(op, backend)
    with torch.no_grad():
        y, s = run(**inputs)
        state, ys = None, []
        for piece in (slice(0, 1), slice(1, 65_600), slice(65_600, None)):
            y_piece, state = run(
                **{n: t[:, piece] if t.ndim > 1 else t for n, t in inputs.items()}, state=state
            )
            ys.append(y_piece)
    close(torch.cat(ys, 1), y, "output")
    close(state, s, "state")


@pytest.mark.parametrize(("op", "backend"), GUESTS)
def test_a_call_without_gradient_gives_the_same_values(op: str, backend: str) -> None:
    for length in (1, 2, 16, 17, 100):
        inputs = made(op, length)
        inputs |= remembered(op, inputs)
        with torch.no_grad():
            for reset in (None, begins(2, length)):
                got, want = (
                    kernel(op, name)(**inputs, reset=reset) for name in (backend, "reference")
                )
                close(got[0], want[0], "output")
                close(got[1], want[1], "state")


@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_a_convolution_knows_ragged_rows(length: int) -> None:
    inputs = made("conv", length)
    lengths = torch.tensor([length, max(1, length - 2)])
    for name in [name for op, name in GUESTS if op == "conv"]:
        for start in ({}, remembered("conv", inputs)):
            same("conv", name, inputs | start, lengths=lengths)
            same("conv", name, inputs | start, lengths=lengths, reset=begins(2, length))
            same("conv", name, {n: t for n, t in (inputs | start).items() if n != "bias"})


@pytest.mark.parametrize("order", ["gate_norm", "norm_gate"])
@pytest.mark.parametrize("shape", [(2, 5, 40), (2, 300, 5), (1, 130, 3, 24)])
def test_norm_and_gate_equal_the_reference(order: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    given = torch.randn(*shape[:2], 3, *shape[2:])  # pieces of one tensor, as after a split
    found = []
    for backend in (
        "reference",
        *(b.name for b in BACKENDS["gated_norm"] if missing("gated_norm", b, "cpu") is None),
    ):
        x, z, w = (
            t.detach().requires_grad_()
            for t in (given[:, :, 0], given[:, :, 1], given[0, 0, 2].flatten()[: shape[-1]])
        )
        y = getattr(module("gated_norm", backend), order)(x, z, w, 1e-5)
        (y * given[:, :, 2]).sum().backward()
        found.append((y.detach(), x.grad, z.grad, w.grad))
    for got in found[1:]:
        for name, a, b in zip(
            ("output", "gradient of x", "gradient of z", "gradient of weight"), got, found[0]
        ):
            close(a, b, name)


def rowwise_calls(size: int, tokens: int) -> dict[str, tuple[Tensor, ...]]:
    """Inputs of every function of `rowwise`; some are views, as after a split or a transpose."""
    torch.manual_seed(0)
    angles = torch.rand(2, tokens, size // 2) * 100
    return {
        "norm": (torch.randn(2, tokens, size), torch.randn(size)),
        "swiglu": torch.randn(2, tokens, 2 * size).split(size, -1),
        "rotate": (torch.randn(2, 3, tokens, size).transpose(1, 2), angles.cos(), angles.sin()),
    }


@pytest.mark.parametrize(
    "guest", [b.name for b in BACKENDS["rowwise"] if missing("rowwise", b, "cpu") is None]
)
@pytest.mark.parametrize("name", ["norm", "swiglu", "rotate"])
@pytest.mark.parametrize(("size", "tokens"), [(40, 5), (6, 300), (64, 130)])
def test_what_is_done_to_a_token_by_itself_equals_the_reference(
    guest: str, name: str, size: int, tokens: int
) -> None:
    learnt = {"norm": 2, "swiglu": 2, "rotate": 1}[name]
    found = []
    for backend in ("reference", guest):
        given = [
            t.detach().requires_grad_(i < learnt)
            for i, t in enumerate(rowwise_calls(size, tokens)[name])
        ]
        y = getattr(module("rowwise", backend), name)(*given, *([1e-5] if name == "norm" else []))
        heed = (
            torch.linspace(-1, 1, y.numel()).view(y.mT.shape).mT
        )  # a gradient that is not dense either
        found.append([y, *torch.autograd.grad(y, given[:learnt], heed)])
    for got, want in zip(*reversed(found), strict=True):
        close(got, want, name)


@pytest.mark.parametrize(("op", "backend"), [pair for pair in GUESTS if pair[1] == "native"])
def test_native_bits_do_not_depend_on_threads_or_on_the_run(op: str, backend: str) -> None:
    inputs, few = (
        made(op, 200, (48, 40), heads=8),
        made(op, 16, (48, 40), heads=8),
    )  # enough work that threads meet
    inputs, few = inputs | remembered(op, inputs), few | remembered(op, few)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            with torch.no_grad():
                briefly = dict(
                    zip(("output of a few", "state after a few"), kernel(op, backend)(**few))
                )
            found.append(answers(op, backend, inputs) | briefly)
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.equal(value, other[name]), name


def kept_floats(op: str, backend: str, inputs: Inputs, chunk: int) -> float:
    """How many floats a call keeps for its gradient, its inputs not counted."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    own = {t.untyped_storage().data_ptr() for t in leaves.values()}
    seen: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        held = kernel(op, backend)(**leaves, chunk=chunk)
    assert held
    return sum(seen.values()) / 4


@pytest.mark.parametrize(("op", "backend"), RECURRENT)
def test_what_is_kept_for_the_gradient_is_the_formula_in_the_file(op: str, backend: str) -> None:
    H, a, b, G = 4, 64, 32, 2
    formulas = {
        ("scan", "native"): lambda T, Q: T * (H * a + G * Q) + T / Q * H * a * b,
        ("scan", "chunked"): lambda T, Q: (
            T * H * (2 * Q + 4 * a + 2) + T * G * (Q + 4 * b) + 2 * T / Q * H * a * b
        ),
        ("delta", "native"): lambda T, Q: T * H * b + T / Q * H * a * b,
        ("delta", "chunked"): lambda T, Q: T * H * (6 * Q + 8 * a + 3 * b + 3) + T / Q * H * a * b,
        ("kda", "native"): lambda T, Q: T * H * b + T / Q * H * a * b,
        ("kda", "chunked"): lambda T, Q: (
            T * H * (3 * Q + (2.5 * log2(Q) + 9) * a + 3 * b) + T / Q * H * a * b
        ),
    }
    for length in (512, 1024):
        for chunk in (32, 64):
            inputs = made(op, length, (a, b), heads=H, rows=1)
            got, want = (
                kept_floats(op, backend, inputs, chunk),
                formulas[op, backend](length, chunk),
            )
            assert abs(got - want) < 0.01 * want, (length, chunk, got, want)
