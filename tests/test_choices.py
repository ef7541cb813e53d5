"""The training choices of the authors' released code, as options: each does what it says,
and leaves the default alone."""

import math

import pytest
import torch

import amor
from amor.config import NORMS
from amor.errors import AmorError
from amor.gates.base import Evidence
from amor.models.block import Block
from amor.parts import RMSNorm, ShortConv
from amor.train.recipe import load, names

TINY = dict(width=32, d_ff=64, vocab=64, context=32)
SMALL_HEADS = {"blocks.head_size": 16, "mixers.mamba2": {"head_size": 16, "state_size": 8}}
FLOOR = 0.2689414213699951


def small(name: str = "amor-mamba2", **changes):
    return amor.preset(name, "tiny", 2, **(TINY | SMALL_HEADS | changes))


def tokens(rows: int = 2, columns: int = 24) -> torch.Tensor:
    return torch.randint(0, 64, (rows, columns), generator=torch.Generator().manual_seed(1))


def test_every_norm_takes_its_own_epsilon():
    given = {norm: 10.0 ** -(3 + i) for i, norm in enumerate(NORMS)}
    model = amor.build(small(norm_eps_of=given, **{"blocks.mlp": True}))
    expected = {
        "mixer_norm": "mixer_norm",
        "mixer.norm": "mixer",
        "mlp_norm": "mlp_norm",
        "norm_f": "norm_f",
        "final_norm": "final_norm",
    }
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            which = (
                "block"
                if name.startswith("blocks.")
                else next(v for k, v in expected.items() if name.endswith(k))
            )
            assert module.eps == given[which], name
    with pytest.raises(AmorError, match="norm_eps_of: no norm 'mixer_nrom'"):
        small(norm_eps_of={"mixer_nrom": 1e-6})


def test_alpha_stays_above_its_floor_and_gets_no_gradient_below_it():
    block = amor.build(small(**{"blocks.alpha_floor": FLOOR})).blocks[1]
    assert isinstance(block, Block)
    with torch.no_grad():
        block.alpha[:4] = torch.tensor([-5.0, -1.5, -0.5, 2.0])
    scale = block.scale()
    assert scale[:2].tolist() == pytest.approx([FLOOR] * 2) and scale[3] == torch.sigmoid(
        torch.tensor(2.0)
    )
    scale.sum().backward()
    assert (
        block.alpha.grad is not None
        and block.alpha.grad[:2].tolist() == [0, 0]
        and block.alpha.grad[2] > 0
    )


def test_decode_scales_attention_by_the_floored_alpha():
    model = amor.build(small(**{"blocks.alpha_floor": FLOOR, "blocks.gate": "always"})).eval()
    with torch.no_grad():
        for block in model.each_block():
            block.attention.o_proj.weight.normal_(0, 0.5)
            block.alpha.fill_(-6.0)
    whole = model.logits(model(tokens()).hidden)
    session = amor.Engine(model).prefill(tokens()[:, :-1].tolist())
    assert torch.allclose(session.step(tokens()[:, -1]).logits, whole[:, -1], atol=1e-4)


def test_gate_statistics_begin_where_they_are_told():
    model = amor.build(small(**{"blocks.gate_options.start": [0.3, 0.1]}))
    gate = model.each_block()[0].gate
    assert float(gate.threshold) == pytest.approx(0.32)
    gate.observe(torch.full((9,), 0.8))
    assert float(gate.mu) == pytest.approx(0.3 * 0.99 + 0.8 * 0.01) and float(
        gate.sigma
    ) == pytest.approx(0.099)
    assert gate.quantiles.tolist() == pytest.approx([0.8] * len(gate.quantiles)), (
        "the first scores are the first quantiles"
    )
    with pytest.raises(AmorError, match="give the median and the std"):
        small(**{"blocks.gate_options.start": [0.3]})


def test_a_gate_without_quantiles_refuses_a_firing_rate_until_it_has_read_text():
    gate = amor.build(small(**{"blocks.gate_options.start": [0.3, 0.1]})).each_block()[0].gate
    with pytest.raises(AmorError, match="amor fit"):
        gate.aim(0.2)
    gate.observe(torch.rand(1000, generator=torch.Generator().manual_seed(0)))
    gate.aim(0.2)
    assert float(gate.threshold) == pytest.approx(0.8, abs=0.05)


def test_statistics_of_every_forward_are_taken_before_its_decision_and_only_in_training():
    model = amor.build(
        small(**{"blocks.gate_options.update": "forward", "blocks.gate_options.eta": 1.0})
    )
    x = tokens()
    out = model.train()(x, targets=x)
    gate, trace = model.each_block()[0].gate, out.gates[0]
    scores = trace.score.flatten()
    assert float(gate.mu) == float(scores.sort().values[(len(scores) - 1) // 2])
    assert float(gate.sigma) == pytest.approx(float(scores.std(correction=1)))
    assert torch.equal(trace.fire, trace.score > gate.mu + 0.2 * gate.sigma), (
        "the batch is decided by its own statistics"
    )
    for quiet in (
        lambda: model.eval()(x),
        lambda: torch.no_grad()(model.train())(x),
        lambda: model.observe([scores] * 3),
    ):
        before = gate.updates.clone()
        quiet()
        assert gate.updates == before


def test_statistics_of_the_step_do_not_move_in_a_forward():
    model = amor.build(small()).train()
    for _ in range(2):  # the first one gives a gate without statistics those of its batch
        model(tokens(), targets=tokens())
        assert int(model.each_block()[0].gate.updates) == 1


def test_uniform_convolutions_are_drawn_as_torch_draws_its_own():
    model = amor.build(
        small(conv_init="uniform", **{"mixers.mamba2": {"head_size": 16, "state_size": 64}})
    )
    convs = [module for module in model.modules() if isinstance(module, ShortConv)]
    drawn = torch.cat([conv.weight.detach().flatten() for conv in convs])
    assert (
        convs
        and float(drawn.abs().max()) <= 0.5
        and float(drawn.std()) == pytest.approx(1 / math.sqrt(12), rel=0.05)
    )
    assert all(
        conv.bias is not None and float(conv.bias.detach().abs().max()) > 0.1 for conv in convs
    )
    plain = amor.build(small())
    assert float(
        next(m for m in plain.modules() if isinstance(m, ShortConv)).weight.std()
    ) == pytest.approx(0.02, rel=0.2)
    with pytest.raises(AmorError, match="conv_init"):
        small(conv_init="wide")


@pytest.mark.parametrize("name", [name for name in names() if "authors" in name and "/" in name])
def test_recipes_of_the_authors_set_every_choice(name: str):
    config = load(name).config()
    assert config.conv_init == "uniform" and config.blocks.alpha_floor == FLOOR
    assert config.gate_options().start == (0.3, 0.1) and config.gate_options().update == "forward"
    assert (config.eps("mlp_norm"), config.eps("mixer_norm")) == (1e-6, 1e-5)


def test_the_gate_sees_the_same_evidence_twice_when_it_updates_in_the_forward():
    gate = amor.build(small(**{"blocks.gate_options.update": "forward"})).each_block()[0].gate
    evidence = Evidence(
        torch.zeros(4, 32), torch.arange(4), entropy=torch.tensor([0.1, 0.2, 0.3, 0.4])
    )
    assert not gate(evidence).fire.any(), "nothing was observed yet, so it never fires"
