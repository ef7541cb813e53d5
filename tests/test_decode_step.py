"""Compiled steps: the forward of one token, a row's bits its own.

Adapters, hooks and changed weights are honoured; what does not fit is refused; large pages.
"""

import dataclasses
import itertools

import pytest
import torch
from laws import close, small, tokens

import amor
from amor.bench.simulate import ScheduledGate
from amor.decode.engine import Engine
from amor.decode.policy import Fixed
from amor.decode.step import CompiledModel
from amor.mixers.mamba2 import Mamba2
from amor.ops.product import FORMATS, pages
from amor.presets import every_name

SOME = ["mamba2", "gated-deltanet", "amor-kda", "mamba2-fused", "transformer", "amor-mamba2-mlp"]


@torch.no_grad()
def read(model, rows):
    """A State of some rows after a few tokens, and their next tokens."""
    return model(tokens(rows, 6)).state, tokens(rows, 1, seed=1)[:, 0]


def tensors(state):
    """Every tensor of a state, keys and values as far as they are used."""
    for part in state.parts:
        for name, held in part.items():
            yield from (
                [(name, held)] if isinstance(held, torch.Tensor) else [("k", held.k), ("v", held.v)]
            )


@pytest.mark.parametrize("kind", list(FORMATS))
@pytest.mark.parametrize("name", SOME)
def test_a_row_s_step_has_the_same_bits_beside_others_and_with_more_threads(name, kind):
    model = small(name)
    engine = Engine(model, weights=kind)
    state, token = read(model, 11)
    apart = [engine.step(token[r : r + 1], state.select([r])) for r in range(11)]
    for threads in (1, 3):
        torch.set_num_threads(threads)
        after, together = engine.step(token, state.fork())
        torch.set_num_threads(1)
        for row, (own, alone) in enumerate(apart):
            assert torch.equal(together.logits[row], alone.logits[0]), (
                f"row {row}, {threads} threads"
            )
            for (part, mine), (_, theirs) in zip(tensors(after), tensors(own), strict=True):
                assert torch.equal(mine[row], theirs[0]), part


@pytest.mark.parametrize("name", every_name())
def test_a_compiled_step_is_the_forward_of_one_token(name):
    model = small(name)
    state, token = read(model, 3)
    with torch.no_grad():
        out = model(token[:, None], state.fork())
        logits = model.logits(out.hidden[:, 0])
    engine = Engine(model)
    assert engine.path == "compiled steps"
    after, found = engine.step(token, state)
    close(found.logits, logits, "logits")
    for block, gate in enumerate(out.gates):
        close(found.score[:, block], gate.score[:, 0].float(), "scores")
        assert torch.equal(found.fire[:, block], gate.fire[:, 0])
    for (part, mine), (_, theirs) in zip(tensors(after), tensors(out.state), strict=True):
        close(mine, theirs, part)


@pytest.mark.parametrize("groups", [2, 4])
def test_each_head_of_a_decode_step_reads_b_and_c_of_its_own_group(groups):
    """Heads of a group are neighbours: head h of H belongs to group h // (H / groups)."""
    model = small("mamba2", **{"mixers.mamba2.groups": groups})
    assert model.backbone.layers[0].mixer.heads // groups > 1
    state, token = read(model, 3)
    with torch.no_grad():
        out = model(token[:, None], state.fork())
    engine = Engine(model)
    assert engine.path == "compiled steps"
    after, step = engine.step(token, state)
    close(step.logits, model.logits(out.hidden[:, 0]).detach(), "logits")
    for (part, mine), (_, theirs) in zip(tensors(after), tensors(out.state), strict=True):
        close(mine, theirs, part)


@torch.no_grad()
def test_a_state_that_a_step_overwrote_is_refused_and_not_misread():
    model = small("amor-mamba2")
    old, token = read(model, 1)
    fork = old.fork()
    want = model(torch.tensor([[5]]), fork).hidden
    after, _ = Engine(model).step(token, old)
    for use in (
        lambda: model(torch.tensor([[5]]), old),
        old.fork,
        lambda: old.select([0]),
        lambda: Engine(model).resume(old),
        lambda: old.save("nowhere"),
    ):
        with pytest.raises(amor.AmorError, match="fork"):
            use()
    assert torch.equal(model(torch.tensor([[5]]), fork).hidden, want), "a fork taken before goes on"
    model(torch.tensor([[5]]), after)  # and so does the newest


class Doubled(Mamba2):
    """A mixer whose author changed the forward and forgot the program."""

    kind = "doubled"

    def forward(self, x, state, layout):
        y, after = super().forward(x, state, layout)
        return 2 * y, after


class Adapter(torch.nn.Module):
    """As adapters do: a layer wrapped, a low-rank product added."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.up = layer, torch.nn.Parameter(torch.randn(layer.weight.shape[0], 1) * 0.1)
        self.weight = layer.weight

    def forward(self, x):
        return self.layer(x) + x.sum(-1, keepdim=True) @ self.up.T


def adapted(model, where):
    *parents, name = where.split(".")
    parent = model.get_submodule(".".join(parents))
    setattr(parent, name, Adapter(getattr(parent, name)))


def hooked(model, where):
    model.get_submodule(where).register_forward_hook(lambda module, args, out: out * 1.5)


PLACES = [
    "backbone.layers.1.mixer.out_proj",
    "backbone.layers.0.mlp.up_proj",
    "blocks.1.attention.q_proj",
    "blocks.0.mlp.down_proj",
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", [adapted, hooked])
@pytest.mark.parametrize("late", [True, False])
@torch.no_grad()
def test_an_adapter_or_a_hook_on_any_layer_is_heard_in_decode(place, change, late):
    model = small("amor-mamba2-mlp", **{"blocks.gate": "always"})
    before = Engine(model).resume(model.start(2)).step([3, 4]).logits
    engine = Engine(model) if late else None
    change(model, place)
    engine = engine or Engine(model)
    session = engine.resume(model.start(2))
    for column in tokens(2, 3).T:
        found = session.step(column)
    want = model(tokens(2, 3))
    close(found.logits, model.logits(want.hidden[:, -1]))
    assert not torch.allclose(Engine(model).resume(model.start(2)).step([3, 4]).logits, before)
    assert "by" in engine.path and ("hook" in engine.path or "Adapter" in engine.path), engine.path
    with pytest.raises(amor.AmorError, match="int8"):
        Engine(model, weights="int8")


@torch.no_grad()
def test_a_mixer_that_inherits_a_program_of_another_forward_runs_its_own():
    model = small("mamba2")
    layer = model.backbone.layers[1]
    other = Doubled(64, layer.mixer.options, 1e-5)
    other.load_state_dict(layer.mixer.state_dict())
    layer.mixer = other
    engine = Engine(model)
    assert engine.path == (
        "compiled steps, layer 1 by its own forward (Doubled has a forward of its own, "
        "and only Mamba2's program)"
    )
    session = engine.prefill([[1, 2], [3]])
    close(
        session.step([5, 6]).logits[0], model.logits(model(torch.tensor([[1, 2, 5]])).hidden[0, -1])
    )


@pytest.mark.parametrize("kind", list(FORMATS))
@torch.no_grad()
def test_weights_that_changed_after_packing_are_packed_again(kind):
    model = small("amor-mamba2")
    engine = Engine(model, weights=kind)
    session = engine.prefill([[1, 2, 3]])
    session.step([4])
    for weight in (
        p
        for n, p in model.named_parameters()
        if "in_proj" in n or "A_log" in n or "alpha" in n or "conv" in n
    ):
        weight.mul_(0.5)
    fork = session.fork()
    want = Engine(model, weights=kind).resume(fork.state).step([5]).logits
    assert torch.equal(session.step([5]).logits, want)
    model.backbone.layers[0].mixer.out_proj.weight = torch.nn.Parameter(
        torch.zeros_like(model.backbone.layers[0].mixer.out_proj.weight)
    )
    want = Engine(model, weights=kind).resume(session.fork().state).step([6]).logits
    assert torch.equal(session.step([6]).logits, want)


def test_a_state_that_does_not_fit_is_refused_before_memory_is_touched():
    engine, other = Engine(small("mamba2")), small("mamba2", width=128)
    state, token = read(other, 2)
    with pytest.raises(amor.AmorError, match="not one of this model"):
        engine.step(token, state)
    state, token = read(small("mamba2"), 2)
    one_row = dataclasses.replace(state, parts=state.select([0]).parts)
    with pytest.raises(amor.AmorError, match="shape"):
        engine.step(token, one_row)
    for name in ("transformer", "amor-mamba2"):
        engine = Engine(small(name))
        for broken in (
            lambda t: t[:1],
            lambda t: t[:, :1],
            lambda t: t.double(),
            lambda t: t[..., :8],
        ):
            state, token = read(small(name), 2)
            parts = tuple(
                {n: h if isinstance(h, torch.Tensor) else h.map(broken) for n, h in p.items()}
                for p in state.parts
            )
            with pytest.raises(amor.AmorError, match="not one of this model: 'kv'"):
                engine.step(token, dataclasses.replace(state, parts=parts))


def test_every_matrix_is_counted_once():
    model = small("amor-mamba2-mlp")
    own = sum(p.nbytes for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n)
    assert CompiledModel(model).nbytes == own
    assert Engine(model).nbytes == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert Engine(model, weights="float16").nbytes > Engine(model).nbytes + own // 2


def test_weights_gathered_into_large_pages_keep_their_place_and_numbers():
    weight = torch.randn(3 * pages.PAGE)
    place, before = weight.data_ptr(), weight.clone()
    assert pages.use_huge_pages([weight]) in (0, 11 * pages.PAGE, 12 * pages.PAGE)
    assert weight.data_ptr() == place and torch.equal(weight, before)


def test_neighbours_in_memory_are_gathered_as_one_and_only_pages_that_are_all_theirs():
    page = pages.PAGE
    room = torch.empty(4 * page, dtype=torch.int8)
    first, second, far = room[:100], room[100:page], room[3 * page :]
    start = room.data_ptr()
    assert pages.spans([far, second, first]) == [
        (start, start + page),
        (start + 3 * page, start + 4 * page),
    ]
    assert pages.whole_pages([(page - 1, 3 * page + 1), (5 * page + 1, 6 * page + 5)]) == [
        (page, 3 * page)
    ]
    assert pages.use_huge_pages([torch.empty(10)]) == 0


@pytest.mark.parametrize("probe", ["block", "final"])
@pytest.mark.parametrize("fires", list(itertools.product([False, True], repeat=3)))
def test_blocks_run_as_if_they_fired_leave_no_trace_where_they_do_not(fires, probe):
    """With `final`, a row that fires, does not, and fires again has as many firings as
    one that was run ahead twice."""
    model = small("amor-mamba2", **{"blocks.probe": probe})
    found = []
    for speculate in (True, False):
        gates = [
            ScheduledGate(block.gate, float(fire), 15, 6)
            for block, fire in zip(model.each_block(), fires, strict=True)
        ]
        engine = Engine(model, policy=Fixed(speculate), gates=gates)
        state, token = read(model, 2)
        for _ in range(2):
            state, seen = engine.step(token, state)
        known = (
            seen.greedy_token,
            seen.fire,
            *(t for part in state.parts[-3:] for t in (part["kv"].k, part["kv"].v)),
        )
        found.append((known, seen))
    assert found[0][0][1].tolist() == [list(fires)] * 2
    for mine, theirs in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(mine, theirs)
    for name in ("entropy", "logits", "score"):
        close(getattr(found[0][1], name), getattr(found[1][1], name), name)


@pytest.mark.parametrize(("speculate", "exact"), [(False, 4), (True, 2)])
def test_where_all_blocks_fire_speculation_reads_the_head_twice(speculate, exact):
    model = small("amor-mamba2")
    gates = [ScheduledGate(block.gate, 1.0, 15, 6) for block in model.each_block()]
    engine = Engine(model, policy=Fixed(speculate), gates=gates)
    state, token = read(model, 1)
    engine.step(token, state)
    assert engine.passes.passes == exact


def test_a_position_outside_its_slots_is_refused_and_nothing_is_written():
    model = small("transformer")
    engine = Engine(model)
    state, token = read(model, 2)
    for wrong in (-1, 10_000):
        broken = dataclasses.replace(
            state.fork(), position=torch.tensor([6, wrong]), rows_aligned=False
        )
        with pytest.raises(amor.AmorError, match="not one of this model"):
            engine.step(token, broken)


def test_kernels_that_were_asked_for_are_not_passed_over_by_compiled_steps(monkeypatch):
    model = small("mamba2")
    assert Engine(model).path == "compiled steps"
    monkeypatch.setenv("AMOR_KERNELS", "scan=reference")
    assert "scan=reference" in Engine(model).path
    with pytest.raises(amor.AmorError, match="scan=reference"):
        Engine(model, weights="int8")
