"""The head: every backend usable here equals the reference, gradients too; no T x V logits."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from laws import Largest, close
from torch import Tensor

from amor.errors import AmorError
from amor.ops import head
from amor.ops.backends import BACKENDS, missing, module
from amor.ops.head import IGNORE, chunked, parts

pytestmark = pytest.mark.usefixtures("fresh_memory_is_poisoned")

GUESTS = [
    b.name for b in BACKENDS["head"] if b.name != "reference" and missing("head", b, "cpu") is None
]
SUMS = {"chunked": module("head", "chunked").Sums, "native": module("head", "native").NativeSums}
# tokens, vocabulary: one, a few, more than one slice, no whole number of vectors, none at all
SHAPES = [(1, 2), (7, 301), (65, 5000), (3, 9001), (0, 50)]


def made(
    tokens: int, vocab: int, spread: float = 1.0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden vectors, head, targets (one of them not scored) and shares."""
    torch.manual_seed(seed)
    targets = torch.randint(0, vocab, (tokens,))
    targets[1:2] = IGNORE
    return torch.randn(tokens, 48) * spread, torch.randn(vocab, 48), targets, torch.rand(tokens)


@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize(("tokens", "vocab"), SHAPES)
def test_every_backend_reads_what_the_reference_reads(guest: str, tokens: int, vocab: int) -> None:
    x, weight, targets, _ = made(tokens, vocab)
    k = min(5, vocab)
    asked = dict(targets=targets, entropy=True, margin=True, topk=k)
    want, got = (module("head", name).read(x, weight, **asked) for name in ("reference", guest))
    for name in ("nll", "entropy", "margin", "logsumexp"):
        close(getattr(got, name), getattr(want, name), name)
    close(got.topk[0], want.topk[0], "best logits")
    assert torch.equal(got.topk[1], want.topk[1])


@pytest.mark.parametrize("guest", GUESTS)
def test_what_was_not_asked_for_is_none(guest: str) -> None:
    x, weight, _, _ = made(3, 20)
    got = module("head", guest).read(x, weight, entropy=True)
    assert (got.nll, got.margin, got.topk) == (None,) * 3 and got.entropy is not None


@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize(("tokens", "vocab"), SHAPES)
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_loss_and_both_gradients_are_the_references(
    guest: str, tokens: int, vocab: int, factor: float
) -> None:
    inputs = made(tokens, vocab)
    found = []
    for name in ("reference", guest):
        x, weight = (t.clone().requires_grad_() for t in inputs[:2])
        total, reading = module("head", name).loss(x, weight, *inputs[2:])
        (total * factor).backward()
        found.append(
            (total.detach(), x.grad, weight.grad, reading.nll, reading.entropy, reading.logsumexp)
        )
    for want, got, what in zip(
        *found, ("loss", "grad x", "grad weight", "nll", "entropy", "logsumexp"), strict=True
    ):
        close(got, want, what)


@pytest.mark.parametrize("finish", [module("head", guest).finish for guest in GUESTS], ids=GUESTS)
def test_the_loss_does_not_depend_on_its_tiles(finish: chunked.Finish) -> None:
    inputs = made(29, 301)
    found = []
    for logits in (301, 5 * 301, 10**9):
        x, weight = (t.clone().requires_grad_() for t in inputs[:2])
        total, _ = chunked.loss(x, weight, *inputs[2:], finish, logits)
        total.backward()
        found.append((total.detach(), x.grad, weight.grad))
    for other in found[1:]:
        for want, got in zip(found[0], other, strict=True):
            close(got, want)


@pytest.mark.parametrize("sums", [SUMS[guest] for guest in GUESTS], ids=GUESTS)
def test_a_reading_does_not_depend_on_its_tiles(sums: type[chunked.Sums]) -> None:
    x, weight, targets, _ = made(29, 301)
    one, other = (
        chunked.read(x, weight, targets, True, True, 4, sums, tile) for tile in ((100, 301), (3, 7))
    )
    for name in ("nll", "entropy", "margin", "logsumexp"):
        close(getattr(one, name), getattr(other, name), name)
    assert torch.equal(one.topk[1], other.topk[1])


@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize(
    ("tokens", "vocab", "width"), [(31, 100, 20), (33, 100, 20), (130, 1100, 600), (200, 513, 64)]
)
def test_entropy_alone_is_what_the_reference_reads_and_a_token_is_read_by_itself(
    guest: str, tokens: int, vocab: int, width: int
) -> None:
    torch.manual_seed(0)
    x, weight = (
        torch.randn(tokens, 2 * width)[:, :width],
        torch.randn(vocab, width) * 0.3,
    )  # rows that stand apart
    x[3] = torch.nan
    got, want = (
        module("head", name).read(x, weight, entropy=True) for name in (guest, "reference")
    )
    sound = torch.arange(tokens) != 3
    close(got.entropy[sound], want.entropy[sound])
    close(got.logsumexp[sound], want.logsumexp[sound])
    assert got.entropy[3].isnan()
    if guest == "native" and tokens > 40:
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            again = module("head", guest).read(x[40:], weight, entropy=True)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(again.entropy, got.entropy[40:]), (
            "neighbours and threads leave a token's bits alone"
        )


@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize("spread", [1e-3, 30.0])
def test_entropy_is_right_where_the_softmax_is_flat_and_where_it_is_sharp(
    guest: str, spread: float
) -> None:
    x, weight, _, _ = made(9, 5000, spread)
    logp = (x.double() @ weight.double().T).log_softmax(-1)
    got = module("head", guest).read(x, weight, entropy=True).entropy
    close(got, -(logp.exp() * logp).sum(-1).float(), "entropy")


@pytest.mark.parametrize("guest", GUESTS)
def test_a_vector_that_is_not_a_number_does_not_pass_for_one(guest: str) -> None:
    x, weight, targets, _ = made(4, 300)
    x[2, 5] = torch.nan
    got = module("head", guest).read(x, weight, targets, entropy=True)
    assert got.entropy.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("guest", GUESTS)
def test_only_the_gradients_that_are_wanted_are_formed(guest: str) -> None:
    x, weight, targets, target_weight = made(5, 60)
    total, _ = module("head", guest).loss(x.requires_grad_(), weight, targets, target_weight)
    total.backward()
    assert x.grad is not None and weight.grad is None


@pytest.mark.parametrize("guest", GUESTS)
def test_a_second_backward_is_refused_aloud(guest: str) -> None:
    x, weight, targets, target_weight = made(5, 60)
    total, _ = module("head", guest).loss(x.requires_grad_(), weight, targets, target_weight)
    total.backward(retain_graph=True)
    with pytest.raises(AmorError, match="used up"):
        total.backward()


@pytest.mark.parametrize("guest", GUESTS)
def test_tokens_by_vocabulary_never_exists(guest: str) -> None:
    tokens, vocab = 5000, 40_000
    x, weight = torch.randn(tokens, 8), torch.randn(vocab, 8)
    targets, target_weight = torch.randint(0, vocab, (tokens,)), torch.ones(tokens)
    backend = module("head", guest)
    with Largest() as reading:
        backend.read(x, weight, entropy=True)
    assert reading.numel < tokens * vocab / 20
    x.requires_grad_()
    with Largest() as learning:
        backend.loss(x, weight, targets, target_weight)[0].backward()
    assert learning.numel < tokens * vocab / 4


def test_the_triton_kernel_reads_what_the_reference_reads() -> None:
    """In Triton's interpreter, in a fresh process: the switch is read when triton is imported."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("triton_head.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr[-2000:]


@pytest.mark.parametrize("cuts", [(), (7,), (1, 2, 120), (60, 60, 211)], ids=str)
def test_a_vocabulary_in_parts_says_what_the_whole_says(cuts):
    """Parts of one word, of none (two cuts at one place, or one at the end) and of many."""
    x, weight = torch.randn(9, 16), torch.randn(211, 16)
    ends = [0, *cuts, len(weight)]
    each = [weight[a:b] for a, b in pairwise(ends)]
    told = [
        parts.pack_stats(head.read(x, w, entropy=True, topk=2))
        if len(w)
        else parts.nothing(9, 2, x.device)
        for w in each
    ]
    found, whole = parts.joined(torch.stack(told)), head.read(x, weight, entropy=True, margin=True)
    close(found.entropy, whole.entropy, "entropy")
    close(found.margin, whole.margin, "margin")
    close(found.logsumexp, whole.logsumexp, "logsumexp")
