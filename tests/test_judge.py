"""The laws of judging: one loop reads every text, and neither how it is cut nor
how often it is read shows."""

import pytest
import torch
from laws import close, small, tokens

from amor.data.loader import Batches, Windows, cut
from amor.data.shards import Shards
from amor.decode.engine import Engine
from amor.errors import AmorError
from amor.judge.evaluate import evaluate
from amor.judge.gates import ForcedGate, RecordingGate, force_all, own_gates
from amor.judge.loop import join_chunks, run_windows
from amor.judge.quantised import quantised_perplexity, step_nll
from amor.judge.windows import BatchWindows, of_text
from amor.models.backbone import Backbone
from amor.models.gated import PassOptions
from amor.ops.head import IGNORE
from amor.ops.product import FORMATS

MODELS = ["amor-mamba2", "amor-gated-deltanet", "transformer"]


def text(rows=5, columns=23, documents=False):
    windows = cut(tokens(rows, columns + 1))
    reset = torch.zeros_like(windows.tokens, dtype=torch.bool)
    reset[:, [0, 7, 16]] = True
    return Windows(windows.tokens, windows.targets, reset if documents else None)


def plainly(model, windows, gates=None):
    with torch.no_grad():
        options = PassOptions(gates=gates)
        return model(windows.tokens, reset=windows.reset, targets=windows.targets, options=options)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_rows_and_columns_read_at_a_time_do_not_show(name, documents):
    model, windows = small(name), text(documents=documents)
    whole = plainly(model, windows)
    for rows, columns in ((5, None), (2, None), (2, 9), (5, 1), (3, 100)):
        found = join_chunks(run_windows(model, windows, rows=rows, columns=columns))
        close(found.nll, whole.nll)
        assert found.fire.shape == found.score.shape == (len(whole.gates), 5, 23)
        for fire, score, gate in zip(found.fire, found.score, whole.gates, strict=True):
            assert torch.equal(fire, gate.fire)
            close(score, gate.score)


def test_gates_by_place_fire_where_they_are_told_however_the_text_is_cut():
    model, windows = small("amor-mamba2"), text()
    marks = torch.rand(3, 5, 23, generator=torch.Generator().manual_seed(1)) < 0.4
    whole = plainly(model, windows, gates=[ForcedGate(block) for block in marks])
    for columns in (None, 9):
        found = join_chunks(
            run_windows(
                model,
                windows,
                rows=2,
                columns=columns,
                gates=lambda here: [ForcedGate(block[here]) for block in marks],
            )
        )
        assert torch.equal(found.fire, marks)
        close(found.nll, whole.nll)


@pytest.mark.parametrize("columns", [None, 9])
def test_a_text_read_again_asks_the_backbone_once_and_says_the_same(columns, monkeypatch):
    model, windows, residuals, asked = small("amor-mamba2"), text(documents=True), {}, []
    plain = [plainly(model, windows, gates=force_all(model, fire)).nll for fire in (False, True)]
    honest = Backbone.forward
    monkeypatch.setattr(
        Backbone,
        "forward",
        lambda self, h, *more: asked.append(h[..., 0].numel()) or honest(self, h, *more),
    )
    for fire in (False, True):
        found = join_chunks(
            run_windows(
                model,
                windows,
                rows=2,
                columns=columns,
                gates=force_all(model, fire),
                residuals=residuals,
            )
        )
        close(found.nll, plain[fire])
        assert sum(asked) == windows.tokens.numel()


def test_judging_leaves_the_model_as_it_was():
    model, windows = small("amor-mamba2"), text()
    own, before = own_gates(model), {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(AmorError, match="compute"):
        join_chunks(run_windows(model, windows, gates=force_all(model, True), compute="slowly"))
    join_chunks(run_windows(model, windows, gates=[RecordingGate(gate, "gain") for gate in own]))
    assert all(a is b for a, b in zip(own_gates(model), own, strict=True))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_s_steps_give_the_losses_of_the_forward(name):
    model, ids = small(name), tokens(3, 24)
    close(step_nll(Engine(model), ids), join_chunks(run_windows(model, cut(ids))).nll)


def test_rounded_weights_cost_little_and_something():
    found = quantised_perplexity(small("mamba2"), tokens(2, 30), FORMATS)
    for kind, allowed in {"float16": 0.01, "int8": 0.2}.items():
        assert found[kind] != found["float32"] and found[kind] == pytest.approx(
            found["float32"], rel=allowed
        ), kind
    assert found["int4"] > 0
    with pytest.raises(AmorError, match="at least 2"):
        quantised_perplexity(small("mamba2"), tokens(2, 1), FORMATS)


def test_a_text_is_one_window_whose_last_token_predicts_nothing():
    window = of_text([3, 1, 2])
    assert window.tokens.tolist() == [[3, 1, 2]] and window.targets.tolist() == [[1, 2, IGNORE]]
    found = evaluate(small("mamba2"), window, rows=1)
    assert found.tokens == 2 and found.fire == ()


def test_windows_drawn_from_batches_are_the_batch_s_rows(prepared):
    source = Batches(Shards.open(prepared / "valid"), 24, 6, 1)
    whole = source.rows(0, 0, 6)
    drawn = BatchWindows(source, 2, 6, end_of_text=256)
    assert len(drawn) == 4
    assert torch.equal(drawn[1:3].tokens, whole[0][3:5]) and torch.equal(
        drawn[0:9].targets, whole[1][2:6]
    )
    assert drawn[0:1].reset is not None and BatchWindows(source, 0, 6)[0:1].reset is None


def test_ranks_that_read_windows_of_their_own_add_up_to_one_that_reads_all(prepared):
    model, source = (
        small("amor-mamba2", vocab=257),
        Batches(Shards.open(prepared / "valid"), 24, 4, 1),
    )
    sums = []
    for first in (0, 2):
        evaluate(
            model, BatchWindows(source, first, first + 2), 1, total=lambda t: sums.append(t) or t
        )
    found = evaluate(model, BatchWindows(source, 0, 4), 3)
    both = evaluate(model, BatchWindows(source, 0, 2), 2, total=lambda t: sums[0] + sums[1])
    assert both.tokens == found.tokens == 4 * 24
    assert both.nll == pytest.approx(found.nll, rel=1e-6) and both.fire == pytest.approx(found.fire)
