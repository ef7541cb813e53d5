"""Laws of conversion: a model of another library says the same as ours, or is refused with the
reason and nothing is written."""

import json
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from laws import close, small
from safetensors.torch import load_file, save_file

import amor
from amor.cli import main
from amor.convert.opened import open_model
from amor.convert.source import SourceFolder
from amor.data.tokenizer import bytes_tokenizer
from amor.models.folder import save

transformers = pytest.importorskip("transformers")
TEXT = torch.randint(0, 200, (2, 70), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def stirred(model, seed=0):
    """Weights that all matter; nothing is 0 or 1 throughout."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.ndim == 1 and ("norm" in name or name.endswith(".D")):
            p.log_normal_(0, 0.3, generator=generator)
        elif name.endswith("conv1d.bias"):
            p.normal_(0, 0.2, generator=generator)
        elif p.ndim > 1:
            p.normal_(0, 0.5 if "conv1d" in name else p.shape[-1] ** -0.5, generator=generator)
    return model.eval()


def mamba2_hf(**changes):
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 1,
    }
    more = {"vocab_size": 257, "chunk_size": 16, "expand": 2}
    return stirred(
        transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**shape | more | changes))
    )


def llama(**changes):
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
    }
    return stirred(
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**shape | {"vocab_size": 257} | changes)
        )
    )


def gdn_fla(folder, tied=False, **changes):
    """A folder as fla publishes one: sizes, names and defaults of its config and model."""
    width, heads, key, d_ff = 32, 2, 8, 48
    tree = {
        "model_type": "gated_deltanet",
        "architectures": ["GatedDeltaNetForCausalLM"],
        "attn_mode": "chunk",
        "attn": None,
    }
    tree |= {
        "hidden_size": width,
        "num_heads": heads,
        "head_dim": key,
        "expand_v": 2.0,
        "conv_size": 4,
        "hidden_ratio": 4,
    }
    tree |= {
        "intermediate_size": None,
        "num_hidden_layers": 2,
        "norm_eps": 1e-6,
        "vocab_size": 257,
        "use_gate": True,
    }
    tree |= {
        "use_short_conv": True,
        "hidden_act": "swish",
        "tie_word_embeddings": tied,
        "max_position_embeddings": 2048,
    }
    sizes = {
        "q": heads * key,
        "k": heads * key,
        "v": 2 * heads * key,
        "g": 2 * heads * key,
        "a": heads,
        "b": heads,
    }
    shapes = {"model.embeddings.weight": (257, width), "model.norm.weight": (width,)} | (
        {} if tied else {"lm_head.weight": (257, width)}
    )
    for i in range(2):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.attn_norm.weight": (width,), f"{at}.mlp_norm.weight": (width,)}
        shapes |= {f"{at}.attn.{n}_proj.weight": (size, width) for n, size in sizes.items()}
        shapes |= {f"{at}.attn.{n}_conv1d.weight": (sizes[n], 1, 4) for n in "qkv"}
        shapes |= {
            f"{at}.attn.A_log": (heads,),
            f"{at}.attn.dt_bias": (heads,),
            f"{at}.attn.o_norm.weight": (2 * key,),
        }
        shapes |= {
            f"{at}.attn.o_proj.weight": (width, 2 * heads * key),
            f"{at}.mlp.down_proj.weight": (width, d_ff),
        }
        shapes |= {f"{at}.mlp.{n}_proj.weight": (d_ff, width) for n in ("gate", "up")}
    return published(folder, tree | changes, shapes, "model.safetensors")


def mamba2_ssm(folder, ssm=None, d_intermediate=0, tied=True, **changes):
    """A folder as state-spaces publishes one: 205 tokens in an embedding of
    208 rows, a pickle of tensors."""
    width, heads, states, d_ff = 32, 4, 8, 128
    tree = {
        "d_model": width,
        "n_layer": 2,
        "vocab_size": 205,
        "d_intermediate": d_intermediate,
        "rms_norm": True,
    }
    tree |= {
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": tied,
    }
    tree |= {
        "ssm_cfg": {"layer": "Mamba2", "headdim": 16, "d_state": states} | (ssm or {}),
        "attn_layer_idx": [],
        "attn_cfg": {},
    }
    shapes = {
        "backbone.embedding.weight": (208, width),
        "backbone.norm_f.weight": (width,),
        "lm_head.weight": (208, width),
    }
    for i in range(2):
        at = f"backbone.layers.{i}"
        shapes |= {
            f"{at}.norm.weight": (width,),
            f"{at}.mixer.norm.weight": (64,),
            f"{at}.mixer.out_proj.weight": (width, 64),
        }
        shapes |= {f"{at}.mixer.in_proj.weight": (64 + 64 + 2 * states + heads, width)}
        shapes |= {
            f"{at}.mixer.conv1d.weight": (64 + 2 * states, 1, 4),
            f"{at}.mixer.conv1d.bias": (64 + 2 * states,),
        }
        shapes |= {f"{at}.mixer.{n}": (heads,) for n in ("A_log", "dt_bias", "D")}
        if d_intermediate:  # mamba_ssm rounds it up to a multiple of 128
            shapes |= {
                f"{at}.norm2.weight": (width,),
                f"{at}.mlp.fc1.weight": (2 * d_ff, width),
                f"{at}.mlp.fc2.weight": (width, d_ff),
            }
    return published(
        folder, tree | changes, shapes, "pytorch_model.bin", "lm_head.weight" if tied else None
    )


def published(folder, tree, shapes, file, copy_of_embedding=None):
    generator = torch.Generator().manual_seed(0)
    held = {}
    for name, shape in shapes.items():
        spread = 0.5 if "conv1d" in name else shape[-1] ** -0.5
        t = torch.randn(shape, generator=generator)
        held[name] = (
            (0.3 * t).exp()
            if len(shape) == 1 and "norm" in name
            else t * (1.0 if len(shape) == 1 else spread)
        )
    if copy_of_embedding:
        held[copy_of_embedding] = held["backbone.embedding.weight"]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(tree))
    torch.save(held, folder / file) if file.endswith(".bin") else save_file(held, folder / file)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Every kind of source once, with a tokenizer beside it."""
    root = tmp_path_factory.mktemp("sources")
    mamba2_hf(tie_word_embeddings=True).save_pretrained(root / "mamba2-hf")
    llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}).save_pretrained(
        root / "llama"
    )
    gdn_fla(root / "gdn-fla")
    mamba2_ssm(root / "mamba2-ssm")
    for folder in root.iterdir():
        bytes_tokenizer().save(str(folder / "tokenizer.json"))
    return root


@pytest.mark.parametrize(
    ("name", "by", "vocab"),
    [
        ("mamba2-hf", "transformers", 257),
        ("llama", "transformers", 257),
        ("gdn-fla", "written out", 257),
        ("mamba2-ssm", "written out", 205),
    ],
)
def test_every_source_is_converted_and_shown_to_say_the_same(
    sources, tmp_path, capsys, name, by, vocab
):
    assert main(["convert", str(sources / name), "--out", str(tmp_path / "ours"), "--json"]) == 0
    *words, last = capsys.readouterr().out.strip().splitlines()
    found = json.loads(last)
    assert (
        found["ok"]
        and found["vocab"] == vocab
        and by in found["compared"]["by"]
        and by in words[-2]
    )
    assert (
        found["compared"]["difference"] <= 2e-5 * found["compared"]["largest"]
        and found["compared"]["tokens"] > 250
    )
    model, tokenizer = amor.load(tmp_path / "ours")
    assert tokenizer is not None and model.config.vocab == vocab
    wanted = open_model(sources / name).outputs(TEXT).logits
    close(model.logits(model(TEXT).hidden), wanted[..., :vocab].float(), name)


@pytest.mark.parametrize("to", ["amor", "hf"])
def test_the_bos_that_a_tokenizer_adds_is_reported_and_stays(sources, tmp_path, capsys, to):
    from tokenizers import processors

    folder = copied(sources / "llama", tmp_path / "source")
    tokenizer = bytes_tokenizer()
    post = processors.TemplateProcessing(
        single="<|end_of_text|> $A", special_tokens=[("<|end_of_text|>", 256)]
    )
    tokenizer.post_processor = post
    tokenizer.save(str(folder / "tokenizer.json"))
    words = ["convert", str(folder), "--out", str(tmp_path / "ours"), "--to", to, "--json"]
    assert main(words) == 0
    *lines, last = capsys.readouterr().out.strip().splitlines()
    line = "its tokenizer begins every text with <|end_of_text|> (token 256)"
    assert sum(line in printed for printed in lines) == 1
    assert json.loads(last)["prefix_ids"] == [256]
    model, tokenizer = amor.load(tmp_path / "ours")
    assert amor.generate(model, tokenizer, "a", max_tokens=1).prompt_tokens == [256, 97]
    if to == "hf":
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
        assert theirs("a")["input_ids"] == [256, 97] and theirs.bos_token_id == 256
        config = transformers.GenerationConfig.from_pretrained(tmp_path / "ours")
        assert config.bos_token_id == 256


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"n_groups": 2, "use_conv_bias": False},
        {
            "layer_norm_epsilon": 1e-2,
            "conv_kernel": 3,
            "hidden_size": 48,
            "num_heads": 9,
            "head_dim": 16,
            "expand": 3,
        },
    ],
    ids=str,
)
def test_mamba2_of_other_shapes_says_the_same(tmp_path, changes):
    mamba2_hf(**changes).save_pretrained(tmp_path / "source")
    opened = open_model(tmp_path / "source")
    close(opened.model.logits(opened.model(TEXT).hidden), opened.outputs(TEXT).logits)
    assert opened.model.config.tied == changes.get("tie_word_embeddings", False)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
        {"head_dim": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-2},
    ],
    ids=str,
)
def test_llamas_of_other_shapes_say_the_same(tmp_path, changes):
    llama(**changes).save_pretrained(tmp_path / "source")
    opened = open_model(tmp_path / "source")
    close(opened.model.logits(opened.model(TEXT).hidden), opened.outputs(TEXT).logits)


def test_state_spaces_with_mlps_and_a_head_of_its_own_and_fla_with_a_tied_one_say_the_same(
    tmp_path,
):
    for folder in (
        mamba2_ssm(tmp_path / "a", d_intermediate=100, tied=False),
        gdn_fla(tmp_path / "b", tied=True, norm_eps=1e-2),
    ):
        opened = open_model(folder)
        vocab = opened.model.config.vocab
        close(
            opened.model.logits(opened.model(TEXT).hidden),
            opened.outputs(TEXT).logits[..., :vocab].float(),
        )


def test_the_rows_of_padding_change_no_entropy(sources):
    """log V and the softmax are of 205 tokens, not of the 208 rows that are stored."""
    opened = open_model(sources / "mamba2-ssm")
    said = opened.outputs(TEXT).logits[..., :205].double()
    from amor.ops import head

    found = head.read(
        opened.model(TEXT).hidden.flatten(0, 1), opened.model.head_weight, entropy=True
    ).entropy
    p = said.softmax(-1).flatten(0, 1)
    close(found, -(p * p.log()).sum(-1).float())


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("mamba2 untied", "mamba2-hf"),
        ("gated-deltanet", "gated-deltanet-fla"),
        ("transformer", "llama"),
    ],
)
def test_ours_becomes_theirs_and_comes_back_to_the_bit(tmp_path, name, to):
    changes = {"d_ff": 0} if to == "mamba2-hf" else {}
    model = small(name, pattern=[small(name).config.pattern[0]] * 2, **changes)
    save(model, tmp_path / "ours", bytes_tokenizer())
    assert (
        main(["convert", str(tmp_path / "ours"), "--out", str(tmp_path / "theirs"), "--to", to])
        == 0
    )
    assert main(["convert", str(tmp_path / "theirs"), "--out", str(tmp_path / "again")]) == 0
    again = amor.load(tmp_path / "again")[0]
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in again.state_dict().items())
    assert (tmp_path / "theirs/tokenizer.json").is_file()


@pytest.mark.parametrize("source", ["ours", "mamba2-ssm"])
def test_a_folder_for_transformers_is_compared_as_transformers_runs_it(
    sources, tmp_path, capsys, source
):
    if source == "ours":
        save(
            small("amor-mamba2 untied bare", vocab=257, pattern="mamba2, attention"),
            tmp_path / "ours",
            bytes_tokenizer(),
        )
    folder = tmp_path / "ours" if source == "ours" else sources / source
    if source != "ours":  # a tokenizer of 257 tokens does not fit its 205
        folder = copied(folder, tmp_path / "source")
        (folder / "tokenizer.json").unlink()
    assert (
        main(["convert", str(folder), "--out", str(tmp_path / "hf"), "--to", "hf", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (
        "the result by transformers" in found["compared"]["by"]
        and json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "amor"
    )
    assert main(["convert", str(tmp_path / "hf"), "--out", str(tmp_path / "again")]) == 0
    again, wanted = amor.load(tmp_path / "again")[0], open_model(folder).model
    assert all(torch.equal(t, wanted.state_dict()[n]) for n, t in again.state_dict().items())


CANNOT = [
    ("mamba2", "mamba2-hf", "has no MLPs"),
    ("amor-mamba2", "mamba2-hf", "no gated blocks"),
    ("mamba2-serial", "llama", "layers of attention alone"),
]


@pytest.mark.parametrize(("name", "to", "words"), CANNOT)
def test_an_architecture_that_a_layout_has_not_is_refused(tmp_path, capsys, name, to, words):
    save(small(name), tmp_path / "ours")
    assert (
        main(["convert", str(tmp_path / "ours"), "--out", str(tmp_path / "out"), "--to", to]) == 2
    )
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# what our skeleton cannot do, and the word of the reason
REFUSED = [
    ("mamba2-hf", {"use_bias": True}, "no bias"),
    ("mamba2-hf", {"time_step_limit": [0.01, 0.1]}, "clamp"),
    ("mamba2-hf", {"hidden_act": "gelu"}, "SiLU"),
    ("mamba2-hf", {"num_heads": 5}, "5 heads of 16"),
    ("mamba2-hf", {"hidden_size": "32"}, "whole number"),
    ("llama", {"hidden_size": 10**9}, "width: expected int <="),
    ("llama", {"num_hidden_layers": 10**9}, "more than 4096 layers"),
    ("mamba2-hf", {"model_type": "mamba3"}, "did you mean 'mamba2'"),
    ("mamba2-hf", {"model_type": None}, "of no layout we know"),
    ("mamba2-hf", {"tie_word_embeddings": False}, "lm_head.weight' is missing"),
    ("mamba2-hf", {"num_hidden_layers": 1}, "no place for tensor 'backbone.layers.1"),
    ("mamba2-hf", {"num_hidden_layers": 3}, "'backbone.layers.2.norm.weight' is missing"),
    ("mamba2-hf", {"state_size": 9}, "has shape"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}},
        "not scaled",
    ),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "not scaled"),
    ("llama", {"attention_bias": True}, "no bias"),
    ("llama", {"mlp_bias": True}, "no bias"),
    ("llama", {"hidden_act": "gelu"}, "SwiGLU"),
    ("llama", {"sliding_window": 128}, "everything before"),
    ("llama", {"num_key_value_heads": 3}, "cannot share"),
    ("gdn-fla", {"allow_neg_eigval": True}, "beta"),
    ("gdn-fla", {"num_v_heads": 4}, "heads of values"),
    ("gdn-fla", {"use_gate": False}, "output gate"),
    ("gdn-fla", {"attn": {"layers": [1], "num_heads": 2}}, "attention layers"),
    ("gdn-fla", {"expand_v": 1.5}, "whole number"),
    ("mamba2-ssm", {"ssm_cfg": {"layer": "Mamba1"}}, "Mamba1"),
    ("mamba2-ssm", {"ssm_cfg": {}}, "Mamba1"),
    ("mamba2-ssm", {"ssm_cfg": {"layer": "Mamba2", "ngroups": 2}}, "each by itself"),
    ("mamba2-ssm", {"ssm_cfg": {"layer": "Mamba2", "norm_before_gate": True}}, "gates first"),
    ("mamba2-ssm", {"ssm_cfg": {"layer": "Mamba2", "magic": 1}}, "magic"),
    ("mamba2-ssm", {"attn_layer_idx": [1]}, "attention layers"),
    ("mamba2-ssm", {"rms_norm": False}, "RMSNorm"),
]


def copied(source, folder):
    return shutil.copytree(source, folder)


def refusal(source, out, capsys):
    """The one line with which a source is refused; nothing is left where the result would be."""
    assert main(["convert", str(source), "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "bug" not in said.err
    assert [p.name for p in out.parent.iterdir() if p != source] == []
    return said.err


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_our_skeleton_cannot_do_is_refused_with_the_reason(
    sources, tmp_path, capsys, name, changes, words
):
    folder = copied(sources / name, tmp_path / "source")
    tree = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in tree.items() if v is not None or k != "model_type"})
    )
    assert words in refusal(folder, tmp_path / "out", capsys)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"use_cache": "x"}),
        ("llama", {"pad_token_id": "x"}),
        ("mamba2-hf", {"chunk_size": 0}),
        ("mamba2-hf", {"auto_map": 5, "eos_token_id": {"a": 1}}),
    ],
    ids=str,
)
def test_what_transformers_itself_refuses_is_a_wrong_input_and_no_bug(
    sources, tmp_path, capsys, name, changes
):
    folder = copied(sources / name, tmp_path / "source")
    tree = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(tree))
    assert "transformers cannot run it (" in refusal(folder, tmp_path / "out", capsys)


class Code:
    """What a pickle with code in it holds."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_with_code_in_it_is_refused_and_not_run(sources, tmp_path, capsys):
    folder = copied(sources / "mamba2-ssm", tmp_path / "source")
    held = torch.load(folder / "pytorch_model.bin")
    torch.save(held | {"evil": Code(tmp_path / "source/ran")}, folder / "pytorch_model.bin")
    assert "a pickle can run code" in refusal(folder, tmp_path / "out", capsys)
    (folder / "pytorch_model.bin").write_bytes(
        pickle.dumps({"evil": Code(tmp_path / "source/ran")})
    )
    assert "a pickle can run code" in refusal(folder, tmp_path / "out", capsys)
    assert not (folder / "ran").exists()


def garbage(folder):
    """(what was done, what the line names)"""
    file = folder / "model.safetensors"
    whole, held = file.read_bytes(), {name: t.clone() for name, t in load_file(file).items()}
    file.write_bytes(whole[: len(whole) // 2])
    yield "cut short", "cannot be read as safetensors"
    file.write_bytes(b"")
    yield "empty", "cannot be read as safetensors"
    some = dict(held)
    del some["backbone.layers.1.mixer.D"]
    save_file(some, file)
    yield "missing", "'backbone.layers.1.mixer.D' is missing; did you mean"
    save_file(held | {"extra.weight": torch.zeros(2)}, file)
    yield "unexpected", "no place for tensor 'extra.weight'"
    save_file(held | {"backbone.norm_f.weight": torch.ones(33)}, file)
    yield "misshapen", "backbone.norm_f.weight has shape [33], not [32]"
    save_file(held | {"backbone.norm_f.weight": torch.full((32,), torch.nan)}, file)
    yield "not finite", "not finite"
    save_file(held | {"backbone.norm_f.weight": torch.ones(32, dtype=torch.int8)}, file)
    yield "bytes", "is I8"
    save_file(held | {"lm_head.weight": torch.zeros(257, 32)}, file)
    yield "tied and other", "another matrix"
    file.unlink()
    yield "no weights", "holds no weights"
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04 not a zip")
    yield "no zip", "cannot be read as weights"
    (folder / "pytorch_model.bin").write_bytes(b"NaN\n")
    yield "no pickle", "cannot be read as weights"
    torch.save([1, 2], folder / "pytorch_model.bin")
    yield "a list", "expected names and tensors"
    (folder / "pytorch_model.bin").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../secret.safetensors"}})
    )
    yield "out of the folder", "is no shard beside it"
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "gone.safetensors"}})
    )
    yield "a shard gone", "gone.safetensors, which is not there"
    (folder / "model.safetensors.index.json").write_text("[]")
    yield "no map", "no weight_map"
    (folder / "config.json").write_text("{")
    yield "no JSON", "not JSON"
    (folder / "config.json").write_text("[1]")
    yield "a list for a config", "expected an object"
    (folder / "config.json").unlink()
    yield "no config", "no such file"


def test_garbage_is_refused_in_one_line_and_nothing_is_half_written(sources, tmp_path, capsys):
    folder = copied(sources / "mamba2-hf", tmp_path / "source")
    for done, words in garbage(folder):
        assert words in refusal(folder, tmp_path / "out", capsys), done


def test_shards_are_read_as_one_and_weights_of_16_bits_are_those_numbers(sources, tmp_path):
    model = mamba2_hf(tie_word_embeddings=True).bfloat16()
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    opened = open_model(tmp_path / "sharded")
    assert torch.equal(opened.model.embed.weight, model.backbone.embeddings.weight.float())
    assert any("bfloat16" in note for note in opened.notes)
    close(opened.model.logits(opened.model(TEXT).hidden), opened.outputs(TEXT).logits)


def test_a_conversion_that_says_something_else_is_not_written_and_exits_1(
    sources, tmp_path, capsys, monkeypatch
):
    """The comparison is with the source as it lies there: a layout that
    swaps two matrices is found out."""
    from amor.convert.mamba2_hf import Mamba2HF

    def swapped(self, held, config):
        found = weights(self, held, config)
        names = [f"backbone.layers.{i}.mixer.out_proj.weight" for i in (0, 1)]
        return found | {names[0]: found[names[1]], names[1]: found[names[0]]}

    weights = Mamba2HF.weights
    monkeypatch.setattr(Mamba2HF, "weights", swapped)
    assert (
        main(["convert", str(sources / "mamba2-hf"), "--out", str(tmp_path / "out"), "--json"]) == 1
    )
    said = capsys.readouterr().out
    assert "DIFFERS" in said and not json.loads(said.splitlines()[-1])["ok"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_as_it_is(sources, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["convert", str(sources / "mamba2-hf"), "--out", str(tmp_path)]) == 2
    assert "holds something already" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_rows_behind_the_vocabulary_are_told_of_and_cut_where_asked(tmp_path, capsys):
    mamba2_hf(vocab_size=272, tie_word_embeddings=True).save_pretrained(tmp_path / "source")
    bytes_tokenizer().save(str(tmp_path / "source/tokenizer.json"))
    assert main(["convert", str(tmp_path / "source"), "--out", str(tmp_path / "whole")]) == 0
    assert "--vocab 257 cuts them off" in capsys.readouterr().out
    assert (
        main(
            ["convert", str(tmp_path / "source"), "--out", str(tmp_path / "cut"), "--vocab", "257"]
        )
        == 0
    )
    whole, cut = (amor.load(tmp_path / name)[0] for name in ("whole", "cut"))
    assert (whole.config.vocab, cut.config.vocab) == (272, 257)
    assert torch.equal(cut.embed.weight, whole.embed.weight[:257])


def test_what_is_written_for_transformers_is_opened_by_it_in_a_process_without_amor(
    sources, tmp_path
):
    assert (
        main(
            [
                "convert",
                str(sources / "mamba2-ssm"),
                "--out",
                str(tmp_path / "hf"),
                "--to",
                "mamba2-hf",
            ]
        )
        == 0
    )
    code = (
        "import sys, torch, transformers as t; "
        "m = t.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval(); "
        "print(float(m(torch.arange(9)[None]).logits[0, -1, 5])); assert 'amor' not in sys.modules"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "hf")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    wanted = open_model(sources / "mamba2-ssm").outputs(torch.arange(9)[None]).logits[0, -1, 5]
    assert abs(float(said) - float(wanted)) < 1e-4


def test_the_reference_that_is_written_out_is_transformers_where_both_can_run(tmp_path):
    """The recurrence of state-spaces' folders, on a model that transformers runs too."""
    from amor.convert.mamba2_ssm import Mamba2SSM

    model = mamba2_hf(tie_word_embeddings=True, vocab_size=208)
    held = {n.replace("embeddings", "embedding"): t.clone() for n, t in model.state_dict().items()}
    folder = mamba2_ssm(tmp_path / "ssm")
    torch.save(held, folder / "pytorch_model.bin")
    with torch.no_grad():
        wanted = model(TEXT).logits
    close(Mamba2SSM(SourceFolder.open(folder)).outputs(TEXT).logits.float(), wanted)
