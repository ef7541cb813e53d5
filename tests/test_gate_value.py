"""The laws of gate value accounting: what is exact is exact, and what is
counted is what the names say."""

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from laws import close, plain, small, tokens

from amor import typed
from amor.errors import AmorError
from amor.gates.warmup import ForcedOpen
from amor.judge import choosing
from amor.judge.findings import attention
from amor.judge.gates import ForcedGate, force_all, own_gates
from amor.judge.policies import PolicyEvaluator, largest, shuffled
from amor.judge.resample import mean, ratio
from amor.judge.value import (
    affordable_windows,
    agreement,
    calibration,
    loss,
    passes,
    rank_correlation,
    value,
)
from amor.judge.windows import Windows, of_ids, of_shards, spaced
from amor.models.gated import PassOptions
from amor.records.value import Value
from amor.study.verdict import sentences


def cut(rows=5, columns=24):
    held = tokens(rows, columns + 1)
    return Windows(held[:, :-1].contiguous(), held[:, 1:].contiguous(), None, "invented")


def reader(name, windows=None):
    model = small(name)
    return PolicyEvaluator(model, windows or cut(), own_gates(model), 2)


def test_with_one_block_two_passes_give_the_loss_of_every_choice():
    judged = reader("amor-mamba2-classic")
    fire = torch.rand(judged.shape, generator=torch.Generator().manual_seed(3)) < 0.4
    run = judged.run(lambda here: [ForcedGate(block[here]) for block in fire])
    assert torch.equal(run.fire, fire)
    close(judged.nll_with_mask(fire), run.nll)


def test_errors_of_what_is_saved_are_those_of_paired_differences():
    """Windows differ by nats, what is saved in each differs by hundredths."""
    closed = torch.linspace(1, 9, 40)[:, None].expand(40, 6).contiguous()
    saved = 0.5 + 0.01 * torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    result = loss(closed - saved, torch.zeros(1, 40, 6), closed)
    paired = float(saved.mean(1).std() / 40**0.5)
    assert result.saved == pytest.approx(float(saved.mean()), rel=1e-5)
    assert 0.8 * paired < result.saved_se < 1.2 * paired
    assert result.se > 100 * result.saved_se


def test_by_default_the_value_of_a_gate_takes_about_a_minute():
    model = small("amor-mamba2")
    assert affordable_windows(model, 16) == 32, "small models are judged on as many as before"
    context = model.config.context
    tokens = passes(len(model.each_block())) * context
    large = SimpleNamespace(
        blocks=model.blocks,
        each_block=model.each_block,
        config=model.config,
        cost=lambda context: SimpleNamespace(flops=1e12 / tokens / 10),
    )
    assert affordable_windows(large, context) == 10
    large.cost = lambda context: SimpleNamespace(flops=1e15)
    assert affordable_windows(large, context) == 4, "errors come from windows"


def test_chance_is_the_mean_over_draws_of_which_no_two_are_alike():
    judged = reader("amor-mamba2")
    fire = torch.rand(judged.shape, generator=torch.Generator().manual_seed(3)) < 0.4
    masks = [shuffled(fire, seed) for seed in (5, 6, 7)]
    assert all(not torch.equal(a, b) for a, b in pairwise(masks))
    assert all(torch.equal(mask.sum((1, 2)), fire.sum((1, 2))) for mask in masks)
    each = torch.stack([judged.nll_with_mask(mask) for mask in masks])
    close(judged.random(fire, draws=3, seed=5), each.mean(0))


def test_what_is_captured_by_chance_is_the_mean_over_random_choices_of_as_many_tokens():
    draw = torch.Generator().manual_seed(1)
    gain = torch.randn(4, 50, generator=draw) + 0.3
    fire = torch.rand(4, 50, generator=draw) < 0.3
    by_chance = [agreement(0, shuffled(fire[None], seed)[0], gain).captured for seed in range(300)]
    expected = agreement(0, fire, gain).captured_by_chance
    error = torch.tensor(by_chance).std() / 300**0.5
    assert abs(sum(by_chance) / 300 - expected) < 4 * error and error < 0.01


def test_with_more_blocks_a_choice_is_run_again():
    judged = reader("amor-mamba2")
    fire = torch.rand(judged.shape, generator=torch.Generator().manual_seed(3)) < 0.4
    with torch.no_grad():
        plain = judged.model(
            judged.windows.tokens,
            targets=judged.windows.targets,
            options=PassOptions(gates=[ForcedGate(block) for block in fire]),
        ).nll
    close(judged.nll_with_mask(fire), plain)


@pytest.mark.parametrize("name", ["amor-mamba2-classic", "amor-gated-deltanet-classic"])
def test_no_choice_of_as_many_tokens_beats_the_oracle_of_one_block(name):
    judged = reader(name)
    nll, fire, _, gain = judged.with_own_gates()
    close(gain[0], judged.nll_closed - judged.nll_open, "gain")
    best = judged.nll_with_mask(
        judged.oracle(gain[0], lambda k, g: largest(g, int(fire.sum())))
    ).mean()
    assert best < nll.mean()
    for seed in range(20):
        assert best < judged.nll_with_mask(shuffled(fire, seed)).mean()


def test_what_attention_saved_is_told_beside_chance_and_everywhere():
    judged = reader("amor-mamba2")
    model, windows, nll = judged.model, judged.windows, {}
    for name, gates in {
        "never": force_all(model, False),
        "gate": None,
        "everywhere": force_all(model, True),
    }.items():
        with torch.no_grad():
            out = model(windows.tokens, targets=windows.targets, options=PassOptions(gates=gates))
        nll[name] = out.nll.mean()
    found = attention(model, windows, judged.run(None), 2)
    assert 0.1 < found.fire < 0.9
    for name in ("gate", "everywhere"):
        assert getattr(found, name).saved == pytest.approx(
            float(nll["never"] - nll[name]), abs=1e-5
        )
    by_chance = judged.nll_closed - judged.nll_with_mask(shuffled(judged.run(None).fire, 0))
    assert (
        found.chance.saved == pytest.approx(float(by_chance.mean()), abs=1e-6)
        and found.chance.saved != found.gate.saved
    )


def test_documents_apart_are_judged_apart(prepared):
    model = small("amor-mamba2", vocab=257)
    windows = of_shards(prepared / "train", 300, 20, None, 257, apart=True)
    assert windows.reset is not None and windows.reset[:, 1:].any(), (
        "no document begins inside a window"
    )
    judged = PolicyEvaluator(model, windows, own_gates(model), 2)
    with torch.no_grad():
        plain = model(
            windows.tokens,
            reset=windows.reset,
            targets=windows.targets,
            options=PassOptions(gates=force_all(model, True)),
        ).nll
    close(judged.nll_open, plain)


@torch.no_grad()
def test_other_gates_choose_in_front_of_the_same_attention():
    model, text, counted = small("amor-mamba2"), cut(16, 64), []
    found = choosing.compare_gates(model, text, text, rates=(0.1, 0.3), on_tokens=counted.append)
    assert (
        sum(counted)
        == (choosing.passes(3, once=False, rates=2) + choosing.learning_passes()) * 16 * 64
    )
    judged = PolicyEvaluator(model, text, own_gates(model))
    by_name = {choice.name: choice.levels for choice in found.choices}
    paper = mean(judged.nll_closed - judged.nll_with_mask(judged.top_fraction(0.3)))
    assert (
        by_name["entropy of what a block reads"][1].saved,
        by_name["entropy of what a block reads"][1].se,
    ) == paper
    more = {choice.name: choice.over_paper[1].saved for choice in found.choices}
    for (
        name,
        levels,
    ) in by_name.items():  # of the text it was learned on, a predicted gain beats chance too
        assert name in ("chance", "oracle") or levels[1].saved != by_name["chance"][1].saved
        assert name == "oracle" or levels[1].saved < by_name["oracle"][1].saved
        assert more[name] == pytest.approx(levels[1].saved - paper[0], abs=1e-9)
    assert (
        by_name["gain by a linear map, once for all blocks"][1].saved > by_name["chance"][1].saved
    )
    close(torch.tensor(found.always.saved), (judged.nll_closed - judged.nll_open).mean())


@torch.no_grad()
def test_the_output_s_vector_is_what_the_final_norm_gives_and_a_measured_gain_that_of_all_blocks():
    model, text = small("amor-mamba2"), cut(4, 32)
    others = choosing.with_other_gates(model, text, choosing.WAYS)
    out = model(text.tokens)
    said = model.logits(model.final_norm(model.norm_f(out.residual))).log_softmax(-1)
    scores = others["entropy of the output's vector"](
        text.tokens,
        options=PassOptions(gates=all_scoring(others["entropy of the output's vector"])),
    )
    close(scores.gates[0].score, -(said.exp() * said).sum(-1) / math.log(model.config.vocab))
    gain = others["gain by a linear map, once for all blocks"].blocks[0].gate
    assert int(gain.measured) == 4 * 32 // choosing.EVERY and gain.pred_std > 0
    kept = {name: held for name, held in model.state_dict().items() if ".gate." not in name}
    assert all(
        torch.equal(other.state_dict()[name], held)
        for other in others.values()
        for name, held in kept.items()
    )


def all_scoring(model):
    """Its own gates, open: what they score is told, and nothing is decided."""
    return [ForcedOpen(gate) for gate in own_gates(model)]


def test_the_gain_of_the_last_block_is_what_closing_it_costs():
    judged = reader("amor-mamba2")
    nll, fire, _, gain = judged.with_own_gates()
    shut = fire.clone()
    shut[-1] = False
    # nothing after the last block reads what it did, so its gain is exact token by token
    close(judged.nll_with_mask(shut) - nll, gain[-1] * fire[-1], "gain")


def test_a_shuffled_choice_fires_as_often_and_on_the_same_combinations():
    fire = torch.rand(3, 4, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    other = shuffled(fire, 1)
    assert not torch.equal(fire, other)
    patterns = [sorted(map(tuple, f.flatten(1).T.tolist())) for f in (fire, other)]
    assert patterns[0] == patterns[1]


@pytest.mark.parametrize(
    ("name", "blocks"), [("amor-mamba2-classic", 1), ("amor-mamba2", 3), ("amor-mamba2-gain", 3)]
)
def test_the_accounting_adds_up(name, blocks):
    model, windows, read_tokens = small(name), cut(), []
    found = plain(value(model, windows, rates=(0, 0.3, 1), rows=2, on_tokens=read_tokens.append))
    assert plain(typed.convert(Value, found, "value.json")) == found
    once = name.endswith("gain")  # one gate decides for all blocks, and so does its oracle
    assert sum(read_tokens) == passes(blocks, rates=3, once=once) * windows.tokens.numel()
    losses = found["losses"]
    with torch.no_grad():
        out = model(windows.tokens, targets=windows.targets)
    assert losses["gate"]["nll"] == pytest.approx(out.nll.mean().item(), rel=1e-5)
    assert losses["gate"]["fire_rate"] == pytest.approx(
        [g.fire.float().mean().item() for g in out.gates]
    )
    assert losses["oracle"]["fire_rate"] == losses["gate"]["fire_rate"]
    assert losses["oracle"]["nll"] < min(losses["gate"]["nll"], losses["random"]["nll"])
    first, middle, last = found["curve"]
    for policy in ("gate", "random", "oracle"):
        assert first[policy]["nll"] == pytest.approx(losses["never"]["nll"], rel=1e-5)
        assert last[policy]["nll"] == pytest.approx(losses["always"]["nll"], rel=1e-5)
    assert 0 < middle["fire_rate"] < 1 and found["exact"] == (blocks == 1)
    for row, block in zip(found["agreement"], found["calibration"], strict=True):
        assert 0 <= row["best"] <= 1 and row["captured"] <= 1
        assert sum(b["tokens"] for b in block) == windows.tokens.numel()


def test_precision_and_recall_count_what_they_say():
    gain = torch.tensor([[3.0, 2.0, -1.0, 1.0], [0.5, -2.0, -3.0, -4.0]])
    fire = torch.tensor([[True, False, True, True], [False, False, False, False]])
    found = plain(agreement(0, fire, gain))
    # best three: 3, 2, 1; fired: 3, -1, 1
    assert found["best"] == pytest.approx(2 / 3)
    assert found["precision"] == pytest.approx(2 / 3)
    assert found["recall"] == pytest.approx(2 / 4)
    assert found["captured"] == pytest.approx((3 - 1 + 1) / 6)


def test_equal_entropies_stay_in_one_group():
    gain = torch.arange(12.0).view(3, 4)
    assert [(b.tokens, b.gain) for b in calibration(torch.full((3, 4), 0.5), gain)] == [
        (12, pytest.approx(5.5))
    ]
    split = calibration(torch.arange(12.0).view(3, 4) / 12, gain)
    assert sum(b.tokens for b in split) == 12 and [b.gain for b in split] == sorted(
        b.gain for b in split
    )


def test_a_gate_that_cannot_aim_is_judged_without_its_curve():
    found = plain(value(small("amor-mamba2-nogate"), cut(), rates=(0, 0.5)))
    assert all("gate" not in point and "oracle" in point for point in found["curve"])
    assert any("cannot aim" in note for note in found["notes"])


def test_a_poor_gate_is_called_poor():
    said = sentences(value(small("amor-mamba2"), cut(), rates=(0, 1)))
    assert any(sentence.startswith("Poor") for sentence in said)


def test_rank_correlation_averages_the_ranks_of_ties_and_is_none_where_nothing_varies():
    entropy = torch.tensor([[1.0, 2.0, 2.0], [3.0, 4.0, 4.0]])
    assert rank_correlation(entropy, entropy**3) == pytest.approx(1.0)
    assert rank_correlation(entropy, -entropy) == pytest.approx(-1.0)
    # ranks 1, 2.5, 2.5, 4, 5.5, 5.5 against 1, 2, 3, 4, 5, 6: Pearson's correlation of these
    expected = np.corrcoef([1, 2.5, 2.5, 4, 5.5, 5.5], [1, 2, 3, 4, 5, 6])[0, 1]
    assert rank_correlation(entropy, torch.arange(6.0).view(2, 3)) == pytest.approx(expected)
    for same in (torch.zeros(2, 3), torch.full((2, 3), 0.1)):
        assert rank_correlation(entropy, same) is None and rank_correlation(same, entropy) is None


def test_of_blocks_that_have_learned_nothing_the_verdict_says_that_all_gains_are_equal():
    model = small("amor-mamba2")
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.o_proj.weight)
    found = value(model, cut(), rates=())
    assert all(each.rank_correlation is None for each in found.gains)
    assert "block 0: entropy or gain is the same for all tokens." in sentences(found)


def test_bootstrapped_errors_are_those_of_the_mean():
    values = torch.randn(400, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    level, error = mean(values)
    assert level == pytest.approx(values.mean().item())
    assert error == pytest.approx(values.mean(1).std().item() / math.sqrt(400), rel=0.15)
    assert all(math.isnan(x) for x in ratio(torch.zeros(3), torch.zeros(3)))
    assert ratio(torch.ones(1), torch.full((1,), 4)) == (0.25, 0.0)
    top, bottom = (
        torch.rand(2, 300, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    )
    level, error = ratio(top, bottom)
    by_hand = (top - level * bottom).std().item() / (
        bottom.mean().item() * math.sqrt(300)
    )  # of a ratio of sums
    assert level == pytest.approx((top.sum() / bottom.sum()).item()) and error == pytest.approx(
        by_hand, rel=0.1
    )
    few = torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])  # some draws divide by nothing
    assert ratio(*few) == (0.5, 0.0)


def test_windows_lie_apart_and_over_the_whole_text():
    starts = spaced(1000, 50, 7, "text")
    assert (
        starts[0] == 0 and starts[-1] + 50 < 1000 <= starts[-1] + 150 and min(np.diff(starts)) >= 50
    )
    held = of_ids(np.arange(1000), 50, 7, "text")
    assert torch.equal(held.targets, held.tokens + 1)
    with pytest.raises(AmorError, match="two windows"):
        spaced(60, 50, 7, "text")
