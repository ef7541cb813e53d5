"""Laws of the gated pass: one file knows it, any source of evidence gives the same decisions."""

import logging
import re
from pathlib import Path

import pytest
import torch
from laws import close, small, tokens

import amor
from amor.decode.blocks import CompiledBlocks, Residual
from amor.decode.compile import Compiled
from amor.decode.engine import Engine
from amor.decode.evidence import JointEvidence
from amor.decode.policy import Fixed
from amor.models.gated import PassOptions, gated_pass
from amor.presets import every_name

ROOT = Path(amor.__file__).parent


def test_only_one_file_of_models_decode_and_vllm_reads_the_words_of_the_pass():
    words = re.compile(r"prenorm|blocks\.(first|final|probe|decide)\b|[\"'](final|once)[\"']")
    readers = {
        f.relative_to(ROOT).as_posix()
        for room in ("models", "decode", "vllm", "gates")
        for f in (ROOT / room).rglob("*.py")
        if words.search(f.read_text())
    }
    assert readers == {"models/gated.py"}


@pytest.mark.parametrize("name", [n for n in every_name() if n.startswith("amor-mamba2")])
@torch.no_grad()
def test_a_compiled_pass_without_speculation_decides_as_the_forward(name):
    """The pass over plain compiled blocks, as a step runs it, but without the wrapper."""
    model, engine = small(name), Engine(small(name))
    state, token = model(tokens(3, 6)).state, tokens(3, 1, seed=1)[:, 0]
    want = model(token[:, None], state.fork())
    layout = state.layout(1, None, None)
    parts = engine.compiled.writable(state.fork(), layout)
    h, columns = engine.compiled.through_layers(token, parts, layout)
    programs, count = engine.compiled.blocks, len(model.blocks)
    kv = parts[len(parts) - count :]
    blocks = CompiledBlocks(programs, layout, kv)
    residual = Residual(h, torch.empty(count + 1, *h.shape) if columns is None else columns)
    evidence = JointEvidence(
        blocks, engine.head, engine.gates, state.position, programs.norms.probe_output
    )
    hidden, verdicts = gated_pass(residual, blocks, engine.gates, evidence)
    close(hidden, want.hidden[:, 0])
    for verdict, trace in zip(verdicts, want.gates, strict=True):
        assert torch.equal(verdict.fire, trace.fire[:, 0])
        close(verdict.score, trace.score[:, 0].float())


def test_a_training_loop_of_one_s_own_fires_its_gates():
    torch.manual_seed(0)
    model = amor.build(small("amor-mamba2").config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert all(block.gate.threshold.isinf() for block in model.each_block())
    for step in range(6):
        x = tokens(4, 33, seed=step)
        out = model(x[:, :-1], targets=x[:, 1:])
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.observe(out)
        rates = [float(gate.fire.float().mean()) for gate in out.gates]
        assert all(0.05 < rate < 0.95 for rate in rates), rates
    assert [int(block.gate.updates) for block in model.each_block()] == [7, 7, 7]


def test_observing_an_output_leaves_pads_out():
    model, other = (amor.build(small("amor-mamba2").config).train() for _ in range(2))
    x, valid = tokens(2, 20), torch.arange(20) < torch.tensor([[20], [7]])
    out = model(x, valid=valid)
    model.observe(out)
    other(x, valid=valid)
    other.observe([gate.score[valid] for gate in out.gates])
    for mine, theirs in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(model.blocks[0].gate.quantiles, torch.zeros(257))


def test_a_loop_that_never_observes_is_warned_once(caplog):
    model, x = amor.build(small("amor-mamba2").config).train(), tokens(1, 4)
    with caplog.at_level(logging.WARNING, "amor"):
        for _ in range(49):
            model(x)
        assert not caplog.records
        for _ in range(60):
            model(x)
    assert len(caplog.records) == 1 and "model.observe(out)" in caplog.text
    caplog.clear()
    silent = amor.build(small("amor-mamba2").config).train()
    silent.observe(silent(x))
    with caplog.at_level(logging.WARNING, "amor"), torch.no_grad():
        for _ in range(60):
            silent(x)
    for _ in range(60):
        silent(x)
    assert not caplog.records


@torch.no_grad()
def test_a_forward_that_does_not_train_leaves_the_gates_without_statistics():
    model = amor.build(small("amor-mamba2").config)
    for training in (True, False):
        model.train(training)(tokens(1, 9))
        with torch.enable_grad():
            model.eval()(tokens(1, 9))
        assert all(block.gate.threshold.isinf() for block in model.each_block())


def test_an_observer_sees_every_block_after_its_keys_and_before_its_decision():
    model, seen = small("amor-mamba2"), []

    class Watching:
        def __init__(self, blocks, evidence):
            self.blocks, self.evidence = blocks, evidence

        def decide(self, index, *more):
            seen.append(("decide", index, len(self.blocks.keys)))
            return self.evidence.decide(index, *more)

    def source(blocks, targets):
        from amor.models.evidence import HeadEvidence

        return Watching(blocks, HeadEvidence(blocks, model.head_weight, targets))

    model(tokens(2, 5), options=PassOptions(evidence=source))
    assert seen == [("decide", 0, 1), ("decide", 1, 2), ("decide", 2, 3)]


@pytest.mark.parametrize("probe", ["block", "final"])
@torch.no_grad()
def test_varentropy_is_the_variance_of_surprise_in_the_forward_and_in_decode(probe):
    model = small("amor-mamba2", **{"blocks.gate": "varentropy", "blocks.probe": probe})
    text = tokens(3, 100)  # more vectors than one tile
    out, first = model(text), model.norms.columns[-1 if probe == "final" else 0]
    residual = model.norms.enter(out.residual)
    vectors = residual if first is None else first(residual)
    log_p = model.logits(vectors).double().log_softmax(-1)
    p = log_p.exp()
    mean = (p * log_p).sum(-1, keepdim=True)
    want = (p * (log_p - mean) ** 2).sum(-1) / torch.tensor(211.0).log() ** 2
    close(out.gates[0].score, want.float())
    assert 0.05 < float(out.gates[0].fire.float().mean()) < 0.95
    session = Engine(model).resume(model(text[:, :-1]).state)
    close(session.step(text[:, -1]).score[:, 0], want[:, -1].float())


def test_a_new_kind_of_evidence_touches_its_gate_and_the_file_of_evidence():
    named = {
        f.relative_to(ROOT).as_posix() for f in ROOT.rglob("*.py") if "varentropy" in f.read_text()
    }
    assert named - {"vllm/served.py"} == {"gates/evidence.py", "gates/varentropy.py"}


NATIVE = ["always", "entropy", "gain", "learned", "margin", "never", "quantile", "random", "router"]


@pytest.mark.parametrize("kind", NATIVE)
@torch.no_grad()
def test_a_step_of_any_number_of_rows_is_one_native_call_that_decides_as_python_does(
    monkeypatch, kind
):
    model = small("amor-mamba2", **{"blocks.gate": kind})
    calls, call = [], Compiled.__call__
    monkeypatch.setattr(
        Compiled, "__call__", lambda *a, **more: calls.append(1) or call(*a, **more)
    )
    state, token = model(tokens(12, 6)).state, tokens(12, 1, seed=1)[:, 0]
    for rows in (1, 5, 12):
        some, engine = list(range(rows)), Engine(model, policy=Fixed(False))
        calls.clear()
        after, native = engine.step(token[:rows], state.select(some))
        assert engine.path == "compiled steps" and len(calls) == 1
        other = Engine(model, policy=Fixed(False))
        monkeypatch.setattr(other, "_step_program", lambda compiled: None)
        before, python = other.step(token[:rows], state.select(some))
        assert len(calls) > 2 and other.passes == engine.passes
        assert torch.equal(native.fire, python.fire) and torch.equal(native.logits, python.logits)
        close(native.score, python.score)
        close(native.entropy, python.entropy)
        for mine, theirs in zip(after.parts[-3:], before.parts[-3:], strict=True):
            assert torch.equal(mine["kv"].k, theirs["kv"].k)


def test_the_path_of_an_engine_tells_why_gates_run_in_python():
    model = small("amor-mamba2", **{"blocks.gate": "varentropy"})
    reason = "gate 'varentropy' states no program"
    assert Engine(model).path == f"compiled steps, gates in Python ({reason})"
    model = small("amor-mamba2")
    model.blocks[1].gate.register_forward_hook(lambda *_: None)
    assert "gates in Python" in Engine(model).path and "hook" in Engine(model).path
