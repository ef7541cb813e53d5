"""Skinny products, one-pass probes of the head, weights of fewer bits with a bound that holds."""

from itertools import pairwise

import pytest
import torch
from laws import close
from torch import Tensor

from amor.errors import AmorError
from amor.ops import attend, product
from amor.ops.backends import BACKENDS, missing, module
from amor.ops.product.formats import Format

pytestmark = pytest.mark.usefixtures("fresh_memory_is_poisoned")

GUESTS = [b.name for b in BACKENDS["product"] if missing("product", b, "cpu") is None]
# outputs, inner: whole vectors and groups, neither, less than one of each, several probe slabs
SHAPES = [(130, 128), (37, 100), (3, 5), (1200, 65)]
ROWS = (1, 2, 3, 4, 5, 8, 33)


def made(outputs: int, inner: int, rows: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, inner), torch.randn(outputs, inner) / inner**0.5


def moved(form: Format, x: Tensor) -> Tensor:
    """[R] the most by which a format can move x [R, K]: half a step for each number."""
    if not form.levels:
        return torch.zeros(len(x), dtype=torch.float64)
    steps = form.steps or x.shape[1]
    pieces = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % steps)).unflatten(1, (-1, steps))
    return 0.5 / form.levels * (pieces.abs().amax(2).square() * steps).sum(1).sqrt()


@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize("kind", list(product.FORMATS))
@pytest.mark.parametrize(("outputs", "inner"), SHAPES)
def test_a_product_is_x_times_the_packed_weights(
    guest: str, kind: str, outputs: int, inner: int
) -> None:
    x, weight = made(outputs, inner, rows=11)
    matrix, backend = product.pack(weight, kind), module("product", guest)
    used = matrix.format.rounded(x)
    assert torch.equal(used, x) == (matrix.format.levels == 0)
    assert ((used - x).norm(dim=1) <= 1.001 * moved(matrix.format, x)).all()
    if guest == "native" and matrix.format.levels:
        close(backend.rounded(x, matrix).float(), used, "x as it is rounded")
    close(backend.product(x, matrix), (used.double() @ matrix.floats().double().T).float())


@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize("kind", list(product.FORMATS))
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_every_format_keeps_a_product_within_its_bound(guest: str, kind: str, scale: float) -> None:
    """|x' w' - x w| <= |x'| |w' - w| + |x' - x| |w|, also for x along w' - w."""
    x, weight = made(48, 200)
    weight[3, 7] *= 50  # an outlier spoils its group
    matrix = product.pack(weight, kind)
    left = torch.nn.functional.normalize(weight - matrix.floats() + 1e-20, dim=1)
    x = torch.cat([x, left[:8], left[3:4]]) * scale
    wrong = (
        module("product", guest).product(x, matrix).double() - x.double() @ weight.double().T
    ).abs()
    length, off = x.double().norm(dim=1), moved(matrix.format, x)
    # a float32 sum of K products in any order errs by K roundings of sum |w_k x_k| <= |w| |x|
    slack = weight.double().norm(dim=1).max() * (off + 2 * (200 + 16) * 2.0**-24 * length)
    residuals = (matrix.floats().double() - weight.double()).norm(dim=1)
    allowed = (length + off)[:, None] * residuals + slack[:, None]
    assert (wrong <= allowed).all(), f"{(wrong / allowed).max():.2f} times the bound"
    if matrix.format.group > 1:
        assert (wrong / allowed)[8:16].amax() > 0.5, "no bound can be much narrower"


def test_fewer_bits_lose_more_and_take_less() -> None:
    _, weight = made(256, 512)
    packed = [product.pack(weight, kind) for kind in product.FORMATS]
    lost = [(m.floats() - weight).square().mean().sqrt().item() for m in packed]
    assert lost[0] == 0 and all(a < b for a, b in pairwise(lost))
    assert lost[3] < 0.12 * weight.std()
    for m in packed:
        assert m.nbytes == pytest.approx(weight.numel() * m.format.bits / 8)


@pytest.mark.parametrize("kind", list(product.FORMATS))
@pytest.mark.parametrize(("outputs", "inner"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_a_rows_bits_do_not_depend_on_its_neighbours(
    kind: str, outputs: int, inner: int, rows: int
) -> None:
    if "native" not in GUESTS:
        pytest.skip("no compiler here")
    backend = module("product", "native")
    x, weight = made(outputs, inner, rows)
    matrix = product.pack(weight, kind)
    together, probed = backend.product(x, matrix), backend.probe(x, matrix, logits=True)
    for row in range(rows):
        alone, lone = (
            backend.product(x[row : row + 1], matrix),
            backend.probe(x[row : row + 1], matrix),
        )
        assert torch.equal(alone[0], together[row])
        assert torch.equal(probed.logits[row], together[row])
        assert torch.equal(lone.entropy[0], probed.entropy[row])


@pytest.mark.parametrize("kind", list(product.FORMATS))
def test_bits_do_not_depend_on_the_number_of_threads(kind: str) -> None:
    x, weight = made(3000, 65)
    matrix = product.pack(weight, kind)
    one = product.probe(x, matrix, logits=True)
    torch.set_num_threads(3)
    three = product.probe(x, matrix, logits=True)
    torch.set_num_threads(1)
    for name in ("entropy", "logsumexp", "logits"):
        assert torch.equal(getattr(one, name), getattr(three, name)), name
    assert all(torch.equal(a, b) for a, b in zip(one.topk, three.topk, strict=True))


@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize("kind", list(product.FORMATS))
def test_a_product_can_be_written_or_added_between_others(guest: str, kind: str) -> None:
    x, weight = made(40, 100)
    matrix, backend = product.pack(weight, kind), module("product", guest)
    want = backend.product(x, matrix)
    room = torch.ones(8, 60)
    backend.product(x, matrix, room[:, 10:50])
    close(room[:, 10:50], want)
    assert (room[:, :10] == 1).all() and (room[:, 50:] == 1).all()
    backend.product(x, matrix, room[:, 10:50], add=True)
    close(room[:, 10:50], 2 * want)


@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize("kind", list(product.FORMATS))
@pytest.mark.parametrize(("outputs", "inner"), SHAPES)
def test_a_probe_is_the_softmax_of_the_logits(
    guest: str, kind: str, outputs: int, inner: int
) -> None:
    x, weight = made(outputs, inner, rows=11)
    x *= torch.linspace(0.01, 40, 11)[:, None]  # from flat to sharp
    matrix = product.pack(weight, kind)
    got = module("product", guest).probe(x, matrix, logits=True)
    z = got.logits.double()
    logp = z.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    close(got.entropy, entropy.float(), "entropy")
    close(got.logsumexp, z.logsumexp(-1).float(), "logsumexp")
    assert torch.equal(got.topk[1][:, 0], z.argmax(-1))
    close(got.topk[0], z.topk(2, dim=-1).values.float(), "best")
    close(module("product", guest).entropies(got.logits), entropy.float(), "entropies")


def test_eight_bits_hold_a_weight_to_half_a_step() -> None:
    _, weight = made(64, 200)
    weight[7] = 0
    weight[8, 3] = 100  # an outlier spoils its own group only
    matrix = product.pack(weight, "int8")
    step = torch.nn.functional.pad(weight, (0, 56)).unflatten(1, (-1, 64)).abs().amax(2) / 127
    allowed = (step / 2).repeat_interleave(64, 1)[:, :200] * 1.0001
    assert ((matrix.floats() - weight).abs() <= allowed).all()
    assert matrix.nbytes < 0.36 * weight.nbytes  # 200 is padded to 256


def test_an_unknown_kind_of_weights_is_refused() -> None:
    with pytest.raises(AmorError, match="int8"):
        product.pack(torch.ones(2, 2), "int9")


def test_not_a_number_stays_one() -> None:
    x, weight = made(20, 70)
    x[1, 3] = torch.nan
    for kind in list(product.FORMATS):
        y = product.product(x, product.pack(weight, kind))
        assert y[1].isnan().all() and y[0].isfinite().all()


@pytest.mark.parametrize(
    "guest", [b.name for b in BACKENDS["product"] if missing("product", b, "cpu") is None]
)
@pytest.mark.parametrize(("rows", "last"), [(1, 1), (4, 1), (8, 8), (11, 2), (11, 5), (20, 3)])
def test_logits_of_the_last_rows_are_those_of_all_rows(guest: str, rows: int, last: int) -> None:
    torch.manual_seed(0)
    matrix, x = product.pack(torch.randn(700, 96), "float32"), torch.randn(rows, 96)
    probe = module("product", guest).probe
    every, some = probe(x, matrix, logits=True), probe(x, matrix, logits=True, last=last)
    assert some.logits.shape == (last, 700) and torch.equal(some.logits, every.logits[-last:])
    assert torch.equal(some.entropy, every.entropy)


@pytest.mark.parametrize(
    "guest", [b.name for b in BACKENDS["attend"] if missing("attend", b, "cpu") is None]
)
@pytest.mark.parametrize(
    ("size", "length"), [(16, 130), (20, 7), (16, 700)]
)  # 700: several blocks of queries a row
def test_fired_queries_attend_and_learn_as_if_all_had_been_asked(
    guest: str, size: int, length: int
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, length, 3, size).transpose(1, 2).requires_grad_() for _ in range(3))
    fire = (
        torch.rand(4, length) < torch.tensor([0.5, 0.0, 1.0, 0.1])[:, None]
    )  # a row may have no query at all
    fire[3, 0] = True
    rows, columns = fire.nonzero(as_tuple=True)
    heed = torch.randn(len(rows), 3, size)
    want = attend.reference(q, k, v, causal=True).transpose(1, 2)[rows, columns]
    got = module("attend", guest).fired(q.transpose(1, 2)[rows, columns], k, v, rows, columns + 1)
    close(got, want)
    for mine, theirs in zip(
        *(torch.autograd.grad(a, (q, k, v), heed) for a in (got, want)), strict=True
    ):
        close(mine, theirs)


@pytest.mark.parametrize(
    "guest", [b.name for b in BACKENDS["attend"] if missing("attend", b, "cpu") is None]
)
@pytest.mark.parametrize("length", [1, 50, 130])
def test_causal_attention_and_its_gradient_equal_the_reference(guest: str, length: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, length, 3, 24).transpose(1, 2).requires_grad_() for _ in range(3))
    heed = torch.randn(2, 3, length, 24)
    got, want = module("attend", guest).causal(q, k, v), attend.reference(q, k, v, causal=True)
    close(got, want)
    for mine, theirs in zip(
        *(torch.autograd.grad(a, (q, k, v), heed) for a in (got, want)), strict=True
    ):
        close(mine, theirs)


@pytest.mark.parametrize(
    "guest", [b.name for b in BACKENDS["attend"] if missing("attend", b, "cpu") is None]
)
def test_queries_that_see_the_first_keys_of_their_row_equal_the_reference(guest: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, t, 2, 24).transpose(1, 2).requires_grad_() for t in (5, 40, 40))
    lengths, heed = torch.tensor([[1], [17], [36]]) + torch.arange(5), torch.randn(3, 2, 5, 24)
    got, want = (
        module("attend", guest).upto(q, k, v, lengths),
        attend.reference(q, k, v, torch.arange(40) < lengths[..., None]),
    )
    close(got, want)
    for mine, theirs in zip(
        *(torch.autograd.grad(a, (q, k, v), heed) for a in (got, want)), strict=True
    ):
        close(mine, theirs)


@pytest.mark.parametrize(
    "guest", [b.name for b in BACKENDS["attend"] if missing("attend", b, "cpu") is None]
)
def test_keys_nobody_looks_at_get_a_gradient_of_nothing(guest: str) -> None:
    k = torch.randn(2, 2, 9, 16, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    got = module("attend", guest).fired(torch.empty(0, 2, 16, requires_grad=True), k, k, none, none)
    assert got.shape == (0, 2, 16)
    if guest == "native":
        assert torch.equal(torch.autograd.grad(got.sum(), k)[0], torch.zeros_like(k))


@pytest.mark.parametrize(("row", "length"), [(2, 3), (1, 6)])
def test_rows_and_keys_that_are_not_there_are_refused(row: int, length: int) -> None:
    if missing("attend", BACKENDS["attend"][0], "cpu") is not None:
        pytest.skip("no compiler here")
    k = torch.randn(2, 1, 5, 16)
    with pytest.raises(AmorError, match="queries"):
        module("attend", "native").fired(
            torch.randn(1, 1, 16), k, k, torch.tensor([row]), torch.tensor([length])
        )


def test_bits_of_fired_queries_do_not_depend_on_threads() -> None:
    if missing("attend", BACKENDS["attend"][0], "cpu") is not None:
        pytest.skip("no compiler here")
    torch.manual_seed(0)
    k, v = (torch.randn(2, 3, 150, 24).requires_grad_() for _ in range(2))
    rows, lengths = torch.arange(2).repeat_interleave(70), torch.arange(70).mul(2).add(3).repeat(2)
    q, found, before = torch.randn(140, 3, 24, requires_grad=True), [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = module("attend", "native").fired(q, k, v, rows, lengths)
            found.append([out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
