"""Configs and presets: the paper's parameter counts, and every impossible model refused."""

import json
from dataclasses import dataclass

import pytest
import torch

import amor
from amor import registry
from amor.config import Config
from amor.presets import ABLATION_NAMES, NAMES, SCALES, every_name

# millions of parameters, as the paper prints them: 180M, 440M, 1.5B
PAPER = {
    "transformer": (160.5, 378.3, 1269.4),
    "mamba2": (177.3, 436.1, 1487.1),
    "gated-deltanet": (174.9, 429.5, 1473.7),
    "mamba2-serial": (174.5, 428.8, 1459.9),
    "gated-deltanet-serial": (172.5, 423.1, 1448.1),
    "mamba2-fused": (179.1, 439.2, 1499.7),
    "amor-mamba2": (184.4, 448.7, 1537.4),
    "amor-gated-deltanet": (182.0, 442.1, 1524.0),
}


def parameters(config: Config) -> int:
    return sum(p.numel() for p in amor.build(config, device="meta").parameters())


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_has_the_parameters_the_paper_prints(name):
    found = tuple(
        round(parameters(amor.preset(name, scale)) / 1e6, 1) for scale in ("180m", "440m", "1.5b")
    )
    assert found == PAPER[name]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("base", ["mamba2", "gated-deltanet"])
def test_ablations_have_the_parameters_of_their_formula(base, scale):
    backbone = amor.preset(base, scale)
    D, d_ff = backbone.width, backbone.d_ff
    before = parameters(backbone)
    whole = before + 3 * 4 * D * D + 6 * D
    assert parameters(amor.preset(f"amor-{base}", scale)) == whole
    assert parameters(amor.preset(f"amor-{base}-classic", scale)) == before + 4 * D * D + 2 * D
    assert parameters(amor.preset(f"amor-{base}-prenorm", scale)) == whole
    assert parameters(amor.preset(f"amor-{base}-nogate", scale)) == whole
    assert parameters(amor.preset(f"amor-{base}-mlp", scale)) == whole + 3 * (3 * D * d_ff + D)


def test_attention_stands_where_the_paper_puts_it():
    def places(name, scale, kind):
        return [i for i, k in enumerate(amor.preset(name, scale).pattern) if k == kind]

    for name in ("mamba2-serial", "gated-deltanet-serial"):
        assert places(name, "180m", "attention") == [4, 8]
        assert places(name, "1.5b", "attention") == [6, 12, 18]
    assert places("mamba2-fused", "180m", "fused") == [0, 6, 11]
    assert places("mamba2-fused", "440m", "fused") == [0, 12, 23]


@pytest.mark.parametrize("name", NAMES + ABLATION_NAMES)
def test_a_config_survives_json(name):
    config = amor.preset(name, "tiny")
    assert Config.from_dict(json.loads(config.to_json())) == config


def test_a_config_written_before_init_spread_was_renamed_is_refused_with_the_new_name():
    old = json.loads(amor.preset("amor-mamba2", "tiny").to_json())
    old["init_spread"] = old.pop("init_std")
    with pytest.raises(amor.AmorError, match=r"^FILE: init_spread is now init_std$"):
        Config.from_dict(old, "FILE")


def test_a_config_written_before_untied_heads_and_optional_final_norms_is_the_same_model():
    config = amor.preset("amor-mamba2", "tiny")
    old = json.loads(config.to_json())
    del old["tied"], old["blocks"]["final"]
    assert Config.from_dict(old) == config and config.tied and config.blocks.final == "norm"


@pytest.mark.parametrize("name", every_name())
def test_a_config_counts_the_parameters_that_are_built(name):
    for scale in ("tiny", "180m"):
        config = amor.preset(name, scale)
        assert config.parameters == parameters(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"tied": False},
        {"d_ff": 0},
        {"blocks.final": "none"},
        {"blocks.count": 1, "blocks.mlp": True},
        {"blocks.decide": "once", "blocks.gate": "learned"},
        *({"blocks.gate": kind} for kind in registry.kinds("gates")),
    ],
    ids=str,
)
def test_a_config_counts_what_its_changes_add_and_remove(changes):
    config = amor.preset("amor-mamba2", "tiny", **changes)
    assert config.parameters == parameters(config)


def test_validating_a_config_builds_no_module(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a module was built")

    monkeypatch.setattr(torch.nn.Module, "__init__", refuse)
    for name in every_name():
        assert amor.preset(name, "tiny").parameters > 0
    with pytest.raises(amor.AmorError, match="parameters; more than"):
        amor.preset("kda", "1.5b", width=2**17, d_ff=2**20, pattern="kda x4096")


@dataclass(frozen=True)
class Uncounted:
    def check(self, width: int) -> None:
        """Every width is fine."""


class Outside(torch.nn.Module):
    Options = Uncounted


def test_a_mixer_from_outside_the_house_whose_options_do_not_count_is_refused():
    with pytest.raises(
        amor.AmorError, match=r"Options of '.*Outside' need check\(width\) and parameters\(width\)"
    ):
        amor.preset("mamba2", "tiny", pattern=[f"{__name__}.Outside"])


REFUSED = [
    ({"vocab": 1}, "vocab: expected int >= 2, not 1"),
    ({"wdith": 3}, "did you mean 'width'"),
    ({"init_spread": 0.02}, "config: init_spread is now init_std"),
    ({"width": "many"}, "width: expected int, got str"),
    ({"width": 100}, "head size 64 does not divide 200"),
    ({"blocks.count": -1}, "blocks.count: expected int >= 0, not -1"),
    ({"blocks.head_size": 48}, "nearest that does is"),
    ({"blocks.first": "pre-norm"}, "did you mean 'prenorm'"),
    ({"blocks.final": "norms"}, "did you mean 'norm'"),
    ({"blocks.final": "none", "blocks.first": "prenorm"}, 'needs blocks.first "plain"'),
    ({"tied": 1}, "tied: expected bool, got int"),
    ({"blocks.gate": "entropi"}, "did you mean 'entropy'"),
    ({"blocks.gate_options.kappa": "high"}, "kappa: expected float, got str"),
    ({"blocks.gate_options.kappa": float("nan")}, "not nan"),
    ({"blocks.gate_options.kapa": 0.2}, "did you mean 'kappa'"),
    ({"blocks.gate_options.eta": 2.0}, "eta: expected float <= 1.0, not 2"),
    ({"blocks.mlp": 1}, "blocks.mlp: expected bool, got int"),
    ({"pattern": ""}, "pattern is empty"),
    ({"pattern": "mamba x4"}, "did you mean 'mamba2'"),
    ({"pattern": {"mamba2": 4, "attention": [4]}}, "layer 4 for 'attention' is outside 0..3"),
    ({"mixers.mamba2.state": 3}, "did you mean 'state_size'"),
    ({"mixers.mamba2.head_size": 100}, "does not divide 512"),
    ({"mixers.mamba2.groups": 3}, "groups 3 does not divide"),
    ({"mixers.mamba3.state_size": 3}, "did you mean 'mamba2'"),
    ({"pattern": "gated_deltanet", "width": 64, "blocks.count": 0}, "give heads=1"),
    ({"pattern": "kda", "width": 96, "blocks.count": 0}, "give heads=2"),
    ({"pattern": "attention", "mixers.attention.head_size": 1}, "must be even"),
    ({"norm_eps": 0.0}, "norm_eps: expected float > 0.0, not 0"),
    ({"context": 0}, "context: expected int >= 1, not 0"),
    ({"vocab.x": 1}, "reaches nothing"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[str(c) for c, _ in REFUSED])
def test_an_impossible_model_is_refused_with_its_numbers_and_a_way_out(changes, words):
    with pytest.raises(amor.AmorError) as caught:
        amor.preset("amor-mamba2", "tiny", **changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_or_scale_names_the_nearest():
    with pytest.raises(amor.AmorError, match="did you mean 'amor-mamba2'"):
        amor.preset("amor-mamba", "tiny")
    with pytest.raises(amor.AmorError, match="did you mean '180m'"):
        amor.preset("mamba2", "180")


def test_a_pattern_can_be_written_three_ways():
    listed = amor.preset("mamba2", "tiny", pattern=["mamba2", "mamba2", "attention", "mamba2"])
    assert (
        listed.pattern
        == amor.preset("mamba2", "tiny", pattern="mamba2 x2, attention, mamba2").pattern
    )
    assert (
        listed.pattern
        == amor.preset("mamba2", "tiny", pattern={"mamba2": 4, "attention": [2]}).pattern
    )


def test_a_mixer_from_outside_the_house_is_reached_by_its_path():
    config = amor.preset("mamba2", "tiny", pattern=["amor.mixers.attention.Attention", "mamba2"])
    assert type(amor.build(config, device="meta").backbone.layers[0].mixer).__name__ == "Attention"
