"""Seeded bugs, one a family: each breaks the code the way this field breaks it,
and the contract must notice."""

import dataclasses

import pytest
import torch
from laws import small

from amor.decode import compile
from amor.decode.blocks import CompiledBlocks, Residual
from amor.decode.engine import Engine
from amor.decode.evidence import JointEvidence
from amor.decode.record import RecordedPass
from amor.decode.rows import Row, RowMemory
from amor.gates.entropy import Entropy
from amor.judge.check import check
from amor.kv import KV
from amor.layout import Layout
from amor.mixers.attention import Attention
from amor.mixers.gated_deltanet import GatedDeltaNet
from amor.mixers.mamba2 import Mamba2
from amor.models.block import Block, TorchBlocks
from amor.ops import attend
from amor.ops.product import FORMATS
from amor.ops.product.native import Weights
from amor.program import Program


def caught(name, *ways):
    """Which of the ways the contract reports as differing."""
    formats = [kind for kind in FORMATS if any(f" {kind} " in way for way in ways)]
    failed = {f.way for f in check(small(name), length=70, rows=3, formats=formats) if not f.ok}
    assert set(ways) <= failed, f"{failed} differ, {set(ways) - failed} should too"


def drop(part, name):
    return {k: torch.zeros_like(v) if k == name else v for k, v in part.items()}


@pytest.mark.parametrize(
    ("mixer", "name", "part"),
    [(Mamba2, "mamba2", "scan"), (GatedDeltaNet, "gated-deltanet", "delta")],
)
def test_a_dropped_recurrent_state_is_noticed(monkeypatch, mixer, name, part):
    honest = mixer.forward
    monkeypatch.setattr(
        mixer, "forward", lambda self, x, state, layout: honest(self, x, drop(state, part), layout)
    )
    caught(
        name, "chunked at random cuts", "token by token", "state through disk", "rollback and redo"
    )


@pytest.mark.parametrize(
    ("mixer", "name"), [(Mamba2, "amor-mamba2"), (GatedDeltaNet, "gated-deltanet-serial")]
)
def test_a_lost_convolution_window_is_noticed(monkeypatch, mixer, name):
    honest = mixer.forward
    monkeypatch.setattr(
        mixer,
        "forward",
        lambda self, x, state, layout: honest(self, x, drop(state, "conv"), layout),
    )
    caught(name, "chunked at random cuts", "token by token", "ragged batch")


@pytest.mark.parametrize("name", ["mamba2", "gated-deltanet"])
def test_a_pad_read_by_the_recurrence_is_noticed(monkeypatch, name):
    monkeypatch.setattr(Layout, "valid", property(lambda self: None))
    caught(name, "ragged batch")


def test_an_off_by_one_mask_is_noticed(monkeypatch):
    honest = Layout.mask.func

    def shifted(self):
        mask = honest(self)
        return mask.roll(-1, -1)

    upto = attend.upto
    monkeypatch.setattr(Layout, "mask", property(shifted))
    monkeypatch.setattr(
        attend, "upto", lambda q, k, v, lengths: upto(q, k, v, (lengths - 1).clamp(min=1))
    )
    caught("transformer", "chunked at random cuts", "packed documents")


def test_keys_written_to_the_wrong_slot_are_noticed(monkeypatch):
    honest = KV._append_in_place

    def misplaced(self, k, v, layout):
        return honest(
            self,
            k,
            v,
            layout
            if layout.rows_aligned
            else Layout(layout.start - 1, layout.columns, False, layout.max_position),
        )

    monkeypatch.setattr(KV, "_append_in_place", misplaced)
    caught("amor-mamba2", "ragged batch")


def test_positions_that_restart_in_every_call_are_noticed(monkeypatch):
    honest = Attention.ask

    def restarted(self, x, cos, sin):
        return honest(self, x, cos[:, :1].expand_as(cos) if cos.ndim == 3 else cos, sin)

    monkeypatch.setattr(Attention, "ask", restarted)
    caught("transformer", "chunked at random cuts", "token by token")


def test_documents_that_leak_into_each_other_are_noticed(monkeypatch):
    honest = Mamba2.forward

    def leaky(self, x, state, layout):
        return honest(
            self,
            x,
            state,
            Layout(
                layout.start,
                layout.columns,
                layout.rows_aligned,
                layout.max_position,
                layout.lengths,
            ),
        )

    monkeypatch.setattr(Mamba2, "forward", leaky)
    caught("mamba2", "packed documents")


def test_a_gate_that_looks_at_the_batch_is_noticed(monkeypatch):
    honest = Entropy.forward

    def batchwise(self, evidence):
        self.mu.copy_(evidence.entropy.median())
        return honest(self, evidence)

    monkeypatch.setattr(Entropy, "forward", batchwise)
    caught("amor-mamba2", "left-padded", "right-padded", "token by token")


def test_fired_queries_that_look_ahead_are_noticed(monkeypatch):
    honest = attend.fired

    def every(q, k, v, rows, lengths):
        return honest(q, k, v, rows, torch.full_like(lengths, k.shape[2]))

    monkeypatch.setattr(attend, "fired", every)
    caught("amor-mamba2", "chunked at random cuts", "token by token", "ragged batch")


def test_a_chunk_that_forgets_what_came_before_it_is_noticed(monkeypatch):
    """The operator in matrix form, started from nothing instead of the state it was given."""
    from amor.ops.scan import chunked

    honest = chunked.scan
    monkeypatch.setenv("AMOR_KERNELS", "scan=chunked")
    monkeypatch.setattr(
        chunked,
        "scan",
        lambda x, dt, A, B, C, state=None, *more: honest(x, dt, A, B, C, None, *more),
    )
    caught("mamba2", "chunked at random cuts", "state through disk")


# Steps of the decode engine: what a program says, how it is compiled, and
# the native code that walks it.


ENGINE = ("engine steps", "engine, rows join and leave")


def test_a_program_that_forgets_the_skip_of_mamba2_is_noticed(monkeypatch):
    honest = Program.scan
    monkeypatch.setattr(
        Program,
        "scan",
        lambda self, u, dt, B, C, A, D, *more: honest(self, u, dt, B, C, A, 0 * D, *more),
    )
    caught("mamba2", *ENGINE)


def test_a_program_that_norms_by_the_mean_of_the_weights_is_noticed(monkeypatch):
    honest = Program.norm

    def levelled(self, x, norm, scale=None, out=None):
        mean = norm.weight.detach().mean() / norm.weight.detach()
        return honest(self, x, norm, mean if scale is None else mean * scale, out)

    monkeypatch.setattr(Program, "norm", levelled)
    caught("gated-deltanet", *ENGINE)
    caught("mamba2-fused", *ENGINE)


def test_a_program_that_leaves_out_alpha_is_noticed(monkeypatch):
    honest = Program.add
    monkeypatch.setattr(
        Program, "add", lambda self, x, y, scale=None, out=None: honest(self, x, y, None, out)
    )
    caught("amor-mamba2", *ENGINE)


def test_a_program_that_leaves_out_the_norm_of_the_mlp_is_noticed(monkeypatch):
    def unnormed(self, p, h, x, out):
        p.add(h, self.attention.queries_program(p, x), self.alpha.detach().sigmoid(), out)
        p.accumulate(out, p.swiglu(out, self.mlp))

    monkeypatch.setattr(Block, "program", unnormed)
    caught("amor-mamba2-mlp", *ENGINE)


def test_a_fired_row_whose_later_readings_are_kept_is_noticed(monkeypatch):
    """A reading made ahead is of the residual before the firing; the pass in Python."""
    monkeypatch.setattr(Engine, "_step_program", lambda *_: None)
    monkeypatch.setattr(JointEvidence, "fired", lambda self, before: None)
    caught("amor-mamba2", *ENGINE)


DRAFTS = ("engine, drafts taken back",)
AHEAD = ("engine, blocks run ahead",)


def test_a_row_that_keeps_the_state_of_a_refused_draft_is_noticed(monkeypatch):
    honest = RowMemory.accept

    def wrong(self, counts):
        runs = [row[-1] for row in self._after]
        honest(self, counts)
        for row, run in zip(self.rows, runs, strict=True):
            row.recurrent = run.clone()

    monkeypatch.setattr(RowMemory, "accept", wrong)
    caught("gated-deltanet", *DRAFTS)


def test_a_position_that_counts_refused_drafts_is_noticed(monkeypatch):
    honest = RowMemory.accept
    lengths = lambda self: [len(runs) for runs in self._after]  # noqa: E731
    monkeypatch.setattr(RowMemory, "accept", lambda self, counts: honest(self, lengths(self)))
    caught("transformer", *DRAFTS)


def test_a_fork_that_writes_into_the_row_it_came_from_is_noticed(monkeypatch):
    monkeypatch.setattr(RowMemory, "_own", lambda self: None)
    caught("mamba2", *DRAFTS)


def test_memory_that_is_used_again_while_a_row_refers_to_it_is_noticed(monkeypatch):
    honest = RowMemory.accept

    def wrong(self, counts):
        honest(self, counts)
        self._spare += [row.recurrent for row in self.rows]

    monkeypatch.setattr(RowMemory, "accept", wrong)
    caught("mamba2", *DRAFTS)


def test_keys_that_lose_their_last_token_when_they_grow_are_noticed(monkeypatch):
    honest = Row.grow

    def wrong(self, form, capacity):
        self.position -= 1
        honest(self, form, capacity)
        self.position += 1

    monkeypatch.setattr(Row, "grow", wrong)
    caught("transformer", *ENGINE)


@pytest.mark.parametrize(
    ("right", "wrong", "name", "ways"),
    [
        pytest.param(
            "x > 20.f ? x :", "x > 2.f ? x :", "mamba2", ENGINE, id="softplus straight above 2"
        ),
        pytest.param(
            "keys = call.position[r] + 1,",
            "keys = call.position[r] + (call.position[r] > 3 ? 0 : 1),",
            "transformer",
            ENGINE,
            id="a query that does not see itself",
        ),
        pytest.param(
            "if (!fires && mine == 0) drop_ahead(r);",
            "",
            "amor-mamba2",
            AHEAD,
            id="a residual run ahead that stays where a block between does not fire",
        ),
        pytest.param(
            "shared.ahead_after.data() + (now * call.rows + r) * width",
            "shared.ahead_after.data() + (now * call.rows) * width",
            "amor-mamba2",
            AHEAD,
            id="a residual run ahead of another row",
        ),
        pytest.param(
            "push_back({(long)s.columns[index], shared.versions[r] + firings, r})",
            "push_back({(long)s.columns[index], shared.versions[r] + !!firings, r})",
            "amor-mamba2",
            AHEAD,
            id="a reading run ahead under the version of one firing",
        ),
        pytest.param(
            "window.before[i], window.after[i]",
            "window.before[i], own(s.reach * width)",
            "amor-kda",
            ENGINE,
            id="a convolution whose window stands still",
        ),
        pytest.param(
            "s.states, state.before[i] + offset,",
            "s.states, state.before[i - (i && call.chains)] + offset,",
            "mamba2",
            DRAFTS,
            id="a draft token that starts from the state before the token before it",
        ),
        pytest.param(
            "r < (call.chains ? call.chains[chain + 1] : chain + 1); r++)",
            "r < (call.chains ? call.chains[chain] + 1 : chain + 1); r++)",
            "gated-deltanet",
            DRAFTS,
            id="a chain of drafts of which only the first token is read",
        ),
        pytest.param(
            "slot = (h * kv.capacity[i] + call.position[r]) * s.size;",
            "slot = (h * (kv.capacity[i] - 1) + call.position[r]) * s.size;",
            "transformer",
            ENGINE,
            id="keys written by another capacity than they are read by",
        ),
        pytest.param(
            "s.k, r) + h * s.size, kv.cos + call.position[r] * half",
            "s.k, r) + h * s.size, kv.cos + (call.position[r] / 2) * half",
            "transformer",
            ENGINE,
            id="keys turned by another position than their own",
        ),
        pytest.param(
            "shared.versions[r]++;",
            "",
            "amor-mamba2",
            ENGINE,
            id="a firing that does not change a residual's version",
        ),
        pytest.param(
            "at(s.h, fired[i]), shared.after",
            "at(s.h, i), shared.after",
            "amor-mamba2",
            ENGINE[1:],
            id="a residual put back to another row",
        ),
        pytest.param(
            "shared.row[i] = call.row[fired[i]]",
            "shared.row[i] = call.row[i]",
            "amor-mamba2",
            ENGINE[1:],
            id="a query that attends to the keys of another row",
        ),
        pytest.param(
            "*at(s.score, r) > *at(s.threshold, r) : given",
            "*at(s.score, r) > *at(s.threshold, r) * 1.05f : given",
            "amor-mamba2",
            ENGINE,
            id="a threshold that is not the gate's",
        ),
        pytest.param(
            "from.at(s.h, &from == this ? rows[i] : i);",
            "from.at(s.h, i);",
            "amor-mamba2",
            ENGINE[1:],
            id="a reading of another row's residual",
        ),
    ],
)
def test_wrong_native_steps_are_noticed(monkeypatch, tmp_path, right, wrong, name, ways):
    """A step that confuses rows is right where there is only one."""
    source = compile.SOURCE.read_text()
    assert source.count(right) == 1
    (tmp_path / "walk.cpp").write_text(source.replace(right, wrong))
    monkeypatch.setattr(compile, "SOURCE", tmp_path / "walk.cpp")
    compile.library.cache_clear()
    try:
        caught(name, *ways)
    finally:
        compile.library.cache_clear()


@pytest.mark.parametrize("kind", ["float16", "int8", "int4"])
def test_a_format_whose_scales_or_numbers_are_off_is_noticed(monkeypatch, kind):
    honest = Weights.of

    def other(matrix):
        weight = matrix.weight.roll(1, 0)
        KEPT.append(weight)
        return honest(dataclasses.replace(matrix, weight=weight))

    monkeypatch.setattr(Weights, "of", other)
    caught("mamba2", f"engine, {kind} weights")


# The gated pass, as every way of running it goes through it.


def test_a_pass_that_writes_keys_only_where_it_fires_is_noticed(monkeypatch):
    """Later queries then attend to keys of nothing."""
    honest = TorchBlocks.apply

    def forgetful(self, index, h, x, verdict):
        kv = self.parts[index]["kv"]
        if h.shape[1] == x.shape[1] == 1 and not bool(verdict.fire.all()):
            kv.buffer.k[:, :, -1] = 0
        return honest(self, index, h, x, verdict)

    monkeypatch.setattr(TorchBlocks, "apply", forgetful)
    caught("amor-mamba2", "token by token")


def test_a_follower_that_repeats_the_decision_of_another_row_is_noticed(monkeypatch):
    honest = JointEvidence.decide

    def mixed(self, index, gate, h, x, before):
        if before is not None:
            before = dataclasses.replace(before, fire=before.fire.roll(1, 0))
        return honest(self, index, gate, h, x, before)

    monkeypatch.setattr(Engine, "_step_program", lambda *_: None)
    monkeypatch.setattr(JointEvidence, "decide", mixed)
    caught("amor-mamba2-once", *ENGINE[1:])  # one row has no other


def test_a_gate_that_reads_the_column_of_the_block_before_is_noticed(monkeypatch):
    honest = JointEvidence._stats
    monkeypatch.setattr(Engine, "_step_program", lambda *_: None)
    monkeypatch.setattr(
        JointEvidence, "_stats", lambda self, column, h: honest(self, max(column - 1, 0), h)
    )
    caught("amor-mamba2", *ENGINE)


def test_a_recorded_pass_that_leaves_out_the_norm_before_the_blocks_is_noticed(monkeypatch):
    monkeypatch.setattr(RecordedPass, "enter", lambda self, h: h)
    caught("amor-mamba2", *ENGINE)


def test_a_recorded_pass_that_probes_the_block_s_input_for_the_output_s_is_noticed(monkeypatch):
    honest = RecordedPass.__init__

    def other(self, *given):
        honest(self, *given)
        self.norms = dataclasses.replace(self.norms, probe_output=False)

    monkeypatch.setattr(RecordedPass, "__init__", other)
    caught("amor-mamba2-final", *ENGINE)


def test_a_residual_whose_columns_are_of_the_one_before_is_noticed(monkeypatch):
    honest = CompiledBlocks.apply

    def stale(self, index, h, x, verdict):
        after = honest(self, index, h, x, verdict)
        return Residual(after.h, h.columns, True) if h.filled else after

    monkeypatch.setattr(Engine, "_step_program", lambda *_: None)
    monkeypatch.setattr(CompiledBlocks, "apply", stale)
    caught("amor-mamba2", *ENGINE)


KEPT = []  # memory that native code was given
