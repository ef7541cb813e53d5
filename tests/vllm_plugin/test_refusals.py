"""The plug-in is found by vLLM itself; what cannot be served is refused with its reason, before
or while the model is built."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from safetensors.torch import load_file, save_file
from serving import engine, exported, small_model
from vllm import ModelRegistry
from vllm.plugins import load_general_plugins

import amor.vllm
from amor.vllm.served import refuse


def test_vllm_finds_the_plug_in_by_its_entry_points():
    code = (
        "from vllm.plugins import load_general_plugins as load; load(); "
        "from vllm import ModelRegistry; import transformers; "
    )
    code += (
        "assert 'AmorForCausalLM' in ModelRegistry.get_supported_archs(); "
        "assert 'amor' in transformers.CONFIG_MAPPING"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert [
        one.value for one in entry_points(group="vllm.stat_logger_plugins") if one.name == "amor"
    ] == ["amor.vllm.stats:GateLogger"]


def test_registering_again_changes_nothing():
    load_general_plugins()
    before = ModelRegistry.get_supported_archs()
    amor.vllm.register()
    amor.vllm.register()
    assert ModelRegistry.get_supported_archs() == before


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("amor-mamba2", {"blocks.gate": "oracle"}, "'oracle' must be told the next token"),
        ("amor-mamba2", {"blocks.head_size": 16}, "heads of 16 in gated blocks"),
        ("mamba2", {"mixers.mamba2.conv": 7}, "mamba2.conv is 7"),
        ("mamba2", {"pattern": "mamba2, kda"}, "mixes mamba2 and kda"),
        ("mamba2", {"pattern": "gated_deltanet, kda"}, "mixes gated_deltanet and kda"),
        ("mamba2-fused", {"mixers.mamba2.state_size": 16}, "states of different shapes"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(name, changes, reason, tmp_path):
    model = small_model(name, **changes)
    with pytest.raises(ValueError, match=reason), engine(exported(model, tmp_path)):
        pass


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("amor-mamba2", {}, "does not divide the model's 4 Mamba2 heads"),
        ("transformer", {"d_ff": 90}, "does not divide the model's 2 heads of attention layers"),
        ("mamba2", {"d_ff": 97}, "does not divide the model's 97 columns of an MLP"),
        ("mamba2", {"mixers.mamba2.groups": 2}, "does not divide the model's 4 Mamba2 heads"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused(name, changes, reason):
    with pytest.raises(ValueError, match=reason):
        refuse(small_model(name, **changes).config, 3)


def _lost(tensors):
    del tensors["blocks.1.gate.mu"]


def _extra(tensors):
    tensors["blocks.7.alpha"] = tensors["blocks.0.alpha"].clone()


def _misshapen(tensors):
    tensors["blocks.1.attention.q_proj.weight"] = tensors["blocks.1.attention.q_proj.weight"][
        :-1
    ].clone()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_lost, "'blocks.1.gate.mu' is missing"),
        (_extra, "no tensor 'blocks.7.alpha'"),
        (_misshapen, "q_proj.weight has shape"),
    ],
)
def test_weights_that_do_not_fit_are_refused(damage, reason, tmp_path):
    folder = exported(small_model("amor-mamba2"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=reason), engine(folder):
        pass
