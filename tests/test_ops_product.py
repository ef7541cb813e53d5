"""Skinny products, one-pass probes of the head, 8-bit weights with a bound that holds, and lone queries."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from laws import close
from torch import Tensor

from amor.errors import AmorError
from amor.ops import attend, product
from amor.ops.backends import BACKENDS, missing, module
from amor.ops.product.bound import bound, errors

pytestmark = pytest.mark.usefixtures("fresh_memory_is_poisoned")

GUESTS = [b.name for b in BACKENDS["product"] if missing("product", b, "cpu") is None]
# outputs, inner: whole vectors and groups, neither, less than one of each, several slabs of the probe
SHAPES = [(130, 128), (37, 100), (3, 5), (1200, 65)]
ROWS = (1, 2, 3, 4, 5, 8, 33)


def made(outputs: int, inner: int, rows: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, inner), torch.randn(outputs, inner) / inner**0.5


@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize("kind", list(product.FORMATS))
@pytest.mark.parametrize(("outputs", "inner"), SHAPES)
def test_a_product_is_x_times_the_packed_weights(guest: str, kind: str, outputs: int, inner: int) -> None:
    x, weight = made(outputs, inner, rows=11)
    matrix, backend = product.pack(weight, kind), module("product", guest)
    used = matrix.format.rounded(x)
    assert torch.equal(used, x) == (matrix.format.levels == 0)
    assert ((used - x).norm(dim=1) <= 1.001 * matrix.format.moved(x)).all()
    if guest == "native" and matrix.format.levels:
        close(backend.rounded(x, matrix).float(), used, "x as it is rounded")
    close(backend.product(x, matrix), (used.double() @ matrix.floats().double().T).float())


@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize("kind", list(product.FORMATS))
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_every_format_keeps_a_product_within_its_bound(guest: str, kind: str, scale: float) -> None:
    """|x w' - x w| <= |x'| r + slack, also for x along what was lost, where it is nearly met."""
    x, weight = made(48, 200)
    weight[3, 7] *= 50  # an outlier spoils its group
    matrix = product.pack(weight, kind, bounded=True)
    left = torch.nn.functional.normalize(weight - matrix.floats() + 1e-20, dim=1)
    x = torch.cat([x, left[:8], left[3:4]]) * scale
    wrong = (module("product", guest).product(x, matrix).double() - x.double() @ weight.double().T).abs()
    length, slack = errors(x, matrix)
    allowed = length[:, None] * matrix.lost.residuals.double() + slack[:, None]
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
def test_a_rows_bits_do_not_depend_on_its_neighbours(kind: str, outputs: int, inner: int, rows: int) -> None:
    if "native" not in GUESTS:
        pytest.skip("no compiler here")
    backend = module("product", "native")
    x, weight = made(outputs, inner, rows)
    matrix = product.pack(weight, kind)
    together, probed = backend.product(x, matrix), backend.probe(x, matrix, logits=True)
    for row in range(rows):
        alone, lone = backend.product(x[row : row + 1], matrix), backend.probe(x[row : row + 1], matrix)
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
def test_a_probe_is_the_softmax_of_the_logits(guest: str, kind: str, outputs: int, inner: int) -> None:
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
    assert got.bound is None


def test_eight_bits_hold_a_weight_to_half_a_step_and_know_what_they_lost() -> None:
    _, weight = made(64, 200)
    weight[7] = 0
    weight[8, 3] = 100  # an outlier spoils its own group only
    matrix = product.pack(weight, "int8", bounded=True)
    step = torch.nn.functional.pad(weight, (0, 56)).unflatten(1, (-1, 64)).abs().amax(2) / 127
    allowed = (step / 2).repeat_interleave(64, 1)[:, :200] * 1.0001
    assert ((matrix.floats() - weight).abs() <= allowed).all()
    close(matrix.lost.residuals, (matrix.floats().double() - weight.double()).norm(dim=1).float(), "residuals")
    assert matrix.nbytes < 0.36 * weight.nbytes  # 200 is padded to 256


def without_gain(matrix: product.Matrix) -> product.Matrix:
    return replace(matrix, lost=replace(matrix.lost, gain=math.inf))


def exact_entropy(x: Tensor, weight: Tensor) -> Tensor:
    logp = (x.double() @ weight.double().T).log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


AWKWARD = ("random", "along what was lost", "along what all lost", "all err alike", "outliers", "sharp", "flat", "two alike")


def awkward(kind: str) -> tuple[Tensor, Tensor]:
    """Hidden vectors and heads made to make the 8-bit entropy wrong."""
    x, weight = made(3000, 96)
    if kind == "along what was lost":  # x points where one row's rounding error points: Cauchy-Schwarz is met
        matrix = product.pack(weight, "int8")
        left = weight - matrix.floats()
        return torch.nn.functional.normalize(left[:8], dim=1) * 40, weight
    if kind == "along what all lost":  # the directions in which many rows err at once, and most
        left = weight - product.pack(weight, "int8").floats()
        return torch.linalg.svd(left / left.norm(dim=1, keepdim=True)).Vh[:8] * 20, weight
    if kind == "all err alike":  # what is lost makes likely tokens likelier and the others less so: no bound can be much narrower
        side = torch.where(torch.arange(3000) % 2 == 0, 1.0, -1.0)[:, None]
        weight = side.expand(3000, 96) * 0.004
        weight[:, 0:1], weight[:, 64] = 1.27 * side, 1.27
        x = torch.ones(8, 96) * torch.linspace(0.1, 1, 8)[:, None]
        x[:, 0] = 0.5
    if kind == "outliers":
        weight[::7, 5] *= 300
    if kind == "sharp":
        x *= 30
    if kind == "flat":
        x *= 1e-3
    if kind == "two alike":  # two tokens share all probability, told apart by less than a step
        weight[0] = weight[1] = x[0] / 3
        weight[1] += 1e-3 * torch.randn(96)
    return x, weight


@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize("kind", AWKWARD)
def test_the_exact_entropy_is_within_the_bound_of_the_eight_bit_one(guest: str, kind: str) -> None:
    x, weight = awkward(kind)
    matrix = product.pack(weight, "int8", bounded=True)
    found = module("product", guest).probe(x, matrix, logits=True)
    wrong = (exact_entropy(x, weight) - found.entropy.double()).abs()
    assert (wrong <= found.bound).all(), f"{(wrong / found.bound).max():.2f} times the bound"
    close(found.bound, bound(x, without_gain(matrix), found.logits), "bound")


@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize("kind", AWKWARD)
@pytest.mark.parametrize("likely", [0, 24, 3000])
def test_the_exact_entropy_is_within_the_refined_bound_which_is_the_definition_s(guest: str, kind: str, likely: int) -> None:
    x, weight = awkward(kind)
    exact, copy = product.pack(weight), product.pack(weight, "int8", bounded=True)
    logits = product.probe(x, copy, logits=True).logits
    found, looked_at = module("product", guest).refined(x, exact, copy, logits, likely)
    wrong = (exact_entropy(x, weight) - found.entropy.double()).abs()
    assert (wrong <= found.bound).all(), f"{(wrong / found.bound).max():.2f} times the bound"
    if not likely:
        assert looked_at == 0
        close(found.bound, bound(x, copy, logits), "bound")
    if kind == "random" and likely == 24:  # what the gain is for
        alone = module("product", guest).refined(x, exact, without_gain(copy), logits, likely)[0].bound
        assert (found.bound < 0.5 * alone).all()


def test_the_gain_is_the_most_that_residuals_at_length_one_add_up_to() -> None:
    for outputs, inner in ((700, 96), (5000, 64), (40, 100)):
        _, weight = made(outputs, inner)
        matrix = product.pack(weight, "int8", bounded=True)
        left = (weight - matrix.floats()).double()
        true = float(torch.linalg.matrix_norm(left / left.norm(dim=1, keepdim=True), 2))
        assert true <= matrix.lost.gain <= 1.01 * true
    weight[3, 3] = torch.nan
    assert product.pack(weight, "int8", bounded=True).lost.gain == math.inf


@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize(
    "kind", ["random", "along what was lost", "outliers", "sharp", "flat", "two alike", "crowd", "twins", "not a number"]
)
def test_the_best_token_of_the_exact_head_is_found_among_the_eight_bit_one_s(guest: str, kind: str) -> None:
    x, weight = awkward(kind)
    if kind == "crowd":  # told apart by less than a step: the 8-bit head alone is wrong
        weight[100:200] = weight[100] + 1e-3 * torch.randn(100, 96)
        x = 5 * weight[100] + 0.1 * x
    if kind == "twins":  # equal logits: the first of them
        weight[300] = weight[500] = x[0]
    if kind == "not a number":
        weight[300, 2] = x[3, 7] = torch.nan
    exact, copy = product.pack(weight), product.pack(weight, "int8", bounded=True)
    one = module("product", guest)
    logits = one.probe(x, copy, logits=True).logits
    tokens, looked_at = one.best(x, exact, copy, logits)
    wanted = one.product(x, exact).argmax(-1)
    if kind == "twins" and guest == "reference":  # torch's product may give equal rows unequal bits, and so choose either
        tokens, wanted = (torch.where(t == 500, 300, t) for t in (tokens, wanted))
    assert torch.equal(tokens, wanted)
    if kind == "crowd":
        assert not torch.equal(tokens, logits.argmax(-1))
    if kind == "random":
        assert looked_at < 8 * 50


def test_the_bound_is_of_use() -> None:
    """At the paper's width and the head's first spread, it decides for a threshold not near the entropy."""
    torch.manual_seed(0)
    x, weight = torch.randn(8, 768), torch.randn(2000, 768) * 0.02
    matrix = product.pack(weight, "int8", bounded=True)
    assert (product.probe(x, matrix).bound / math.log(2000) < 0.02).all()


def test_a_bound_without_knowing_what_was_lost_is_refused() -> None:
    x, weight = made(10, 8)
    matrix = product.pack(weight)
    with pytest.raises(AmorError, match="bounded=True"):
        bound(x, matrix, product.product(x, matrix))


def test_an_unknown_kind_of_weights_is_refused() -> None:
    with pytest.raises(AmorError, match="int8"):
        product.pack(torch.ones(2, 2), "int9")


def test_not_a_number_stays_one() -> None:
    x, weight = made(20, 70)
    x[1, 3] = torch.nan
    for kind in list(product.FORMATS):
        y = product.product(x, product.pack(weight, kind))
        assert y[1].isnan().all() and y[0].isfinite().all()


@pytest.mark.parametrize("guest", [b.name for b in BACKENDS["product"] if missing("product", b, "cpu") is None])
@pytest.mark.parametrize(("rows", "last"), [(1, 1), (4, 1), (8, 8), (11, 2), (11, 5), (20, 3)])
def test_logits_of_the_last_rows_are_those_of_all_rows(guest: str, rows: int, last: int) -> None:
    torch.manual_seed(0)
    matrix, x = product.pack(torch.randn(700, 96), "float32"), torch.randn(rows, 96)
    probe = module("product", guest).probe
    every, some = probe(x, matrix, logits=True), probe(x, matrix, logits=True, last=last)
    assert some.logits.shape == (last, 700) and torch.equal(some.logits, every.logits[-last:])
    assert torch.equal(some.entropy, every.entropy)


@pytest.mark.parametrize("guest", [b.name for b in BACKENDS["attend"] if missing("attend", b, "cpu") is None])
@pytest.mark.parametrize(("size", "length"), [(16, 130), (20, 7), (16, 700)])  # 700: several blocks of queries a row
def test_fired_queries_attend_and_learn_as_if_all_had_been_asked(guest: str, size: int, length: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, length, 3, size).transpose(1, 2).requires_grad_() for _ in range(3))
    fire = torch.rand(4, length) < torch.tensor([0.5, 0.0, 1.0, 0.1])[:, None]  # a row may have no query at all
    fire[3, 0] = True
    rows, columns = fire.nonzero(as_tuple=True)
    heed = torch.randn(len(rows), 3, size)
    want = attend.reference(q, k, v, causal=True).transpose(1, 2)[rows, columns]
    got = module("attend", guest).fired(q.transpose(1, 2)[rows, columns], k, v, rows, columns + 1)
    close(got, want)
    for mine, theirs in zip(*(torch.autograd.grad(a, (q, k, v), heed) for a in (got, want)), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("guest", [b.name for b in BACKENDS["attend"] if missing("attend", b, "cpu") is None])
@pytest.mark.parametrize("length", [1, 50, 130])
def test_causal_attention_and_its_gradient_equal_the_reference(guest: str, length: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, length, 3, 24).transpose(1, 2).requires_grad_() for _ in range(3))
    heed = torch.randn(2, 3, length, 24)
    got, want = module("attend", guest).causal(q, k, v), attend.reference(q, k, v, causal=True)
    close(got, want)
    for mine, theirs in zip(*(torch.autograd.grad(a, (q, k, v), heed) for a in (got, want)), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("guest", [b.name for b in BACKENDS["attend"] if missing("attend", b, "cpu") is None])
def test_queries_that_see_the_first_keys_of_their_row_equal_the_reference(guest: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, t, 2, 24).transpose(1, 2).requires_grad_() for t in (5, 40, 40))
    lengths, heed = torch.tensor([[1], [17], [36]]) + torch.arange(5), torch.randn(3, 2, 5, 24)
    got, want = module("attend", guest).upto(q, k, v, lengths), attend.reference(q, k, v, torch.arange(40) < lengths[..., None])
    close(got, want)
    for mine, theirs in zip(*(torch.autograd.grad(a, (q, k, v), heed) for a in (got, want)), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("guest", [b.name for b in BACKENDS["attend"] if missing("attend", b, "cpu") is None])
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
        module("attend", "native").fired(torch.randn(1, 1, 16), k, k, torch.tensor([row]), torch.tensor([length]))


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
