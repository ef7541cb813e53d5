"""Seeded bugs, one a family: each breaks the code the way this field breaks it, and the contract must notice."""

import pytest
import torch
from laws import small

from amor.gates.entropy import Entropy
from amor.judge.check import check
from amor.layout import Layout
from amor.mixers.attention import Attention
from amor.mixers.gated_deltanet import GatedDeltaNet
from amor.mixers.mamba2 import Mamba2
from amor.ops import attend
from amor.state import KV


def caught(name, *ways):
    """Which of the ways the contract reports as differing."""
    failed = {f.way for f in check(small(name), length=70, rows=3) if not f.ok}
    assert set(ways) <= failed, f"{failed} differ, {set(ways) - failed} should too"


def drop(part, name):
    return {k: torch.zeros_like(v) if k == name else v for k, v in part.items()}


@pytest.mark.parametrize(("mixer", "name", "part"), [(Mamba2, "mamba2", "scan"), (GatedDeltaNet, "gated-deltanet", "delta")])
def test_a_dropped_recurrent_state_is_noticed(monkeypatch, mixer, name, part):
    honest = mixer.forward
    monkeypatch.setattr(mixer, "forward", lambda self, x, state, layout: honest(self, x, drop(state, part), layout))
    caught(name, "chunked at random cuts", "token by token", "state through disk", "rollback and redo")


@pytest.mark.parametrize(("mixer", "name"), [(Mamba2, "amor-mamba2"), (GatedDeltaNet, "gated-deltanet-serial")])
def test_a_lost_convolution_window_is_noticed(monkeypatch, mixer, name):
    honest = mixer.forward
    monkeypatch.setattr(mixer, "forward", lambda self, x, state, layout: honest(self, x, drop(state, "conv"), layout))
    caught(name, "chunked at random cuts", "token by token", "ragged batch")


@pytest.mark.parametrize("name", ["mamba2", "gated-deltanet"])
def test_a_pad_read_by_the_recurrence_is_noticed(monkeypatch, name):
    monkeypatch.setattr(Layout, "valid", property(lambda self: None))
    caught(name, "ragged batch")


def test_an_off_by_one_mask_is_noticed(monkeypatch):
    honest = Layout.mask.func

    def shifted(self):
        mask = honest(self)
        return None if mask is None else mask.roll(-1, -1)

    monkeypatch.setattr(Layout, "mask", property(shifted))
    caught("transformer", "chunked at random cuts", "packed documents")


def test_keys_written_to_the_wrong_slot_are_noticed(monkeypatch):
    honest = KV._append_in_place

    def misplaced(self, k, v, layout):
        return honest(self, k, v, layout if layout.even else Layout(layout.start - 1, layout.columns, False, layout.past))

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
        return honest(self, x, state, Layout(layout.start, layout.columns, layout.even, layout.past, layout.lengths))

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
    monkeypatch.setattr(chunked, "scan", lambda x, dt, A, B, C, state=None, *more: honest(x, dt, A, B, C, None, *more))
    caught("mamba2", "chunked at random cuts", "state through disk")
