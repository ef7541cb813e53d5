"""Laws of the authors' folders: read, run and written as their released code means
them, or refused in one line."""

import json
import shutil

import pytest
import torch
from authors_folders import (
    HEAD,
    VOCAB,
    WIDTH,
    model_kwargs,
    random_tensors,
    released,
    write_manifest,
    write_tensors,
)
from laws import close, small, tokens
from safetensors.torch import load_file, save_file

import amor
from amor.cli import main
from amor.convert.authors import Authors
from amor.convert.authors_facts import ALPHA_FLOOR
from amor.convert.authors_files import sha256, weights_identity
from amor.convert.authors_router import read_router, write_router
from amor.convert.authors_written import TIE, authors_forward, predicted_entropy
from amor.convert.opened import open_model
from amor.convert.source import SourceFolder
from amor.data.tokenizer import bytes_tokenizer
from amor.errors import AmorError
from amor.models.folder import save

TEXT = tokens(2, 70, VOCAB, seed=3)
EVERY = [(b, k, mode) for b in ("mamba2", "gdn") for k in (1, 3) for mode in ("classic", "h")]
ROUTER = "router.safetensors", "router_config.json"


def convert(source, out, *more):
    return main(["convert", str(source), "--out", str(out), *map(str, more)])


def converted(source, out, *more):
    assert convert(source, out, *more) == 0
    return out


def tensors_of(folder):
    """Every tensor of a folder, of one file or of shards, without the copy of the
    embedding that is the head."""
    held = {}
    for path in folder.glob("model*.safetensors"):
        held |= load_file(path)
    held.pop("lm_head.weight", None)
    return held


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A released folder of three blocks in one file, with a copy of the head."""
    return released(tmp_path_factory.mktemp("released") / "theirs", model_kwargs(), head=True)


@pytest.fixture(scope="module")
def ours(theirs, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted") / "ours"
    assert convert(theirs, out, "--tokenizer", "bytes") == 0
    return out


@pytest.mark.parametrize(("backbone", "blocks", "mode"), EVERY)
def test_a_released_folder_computes_what_their_model_computes_and_comes_back_to_the_bit(
    tmp_path, capsys, backbone, blocks, mode
):
    shards = 3 if blocks == 3 else 1
    source = released(
        tmp_path / "theirs", model_kwargs(backbone, blocks, mode), shards=shards, head=mode == "h"
    )
    assert convert(source, tmp_path / "ours", "--json") == 0
    lines = capsys.readouterr().out.splitlines()
    compared = json.loads(lines[-1])["compared"]
    assert compared["difference"] <= 2e-5 * compared["largest"] and "written out" in compared["by"]
    gates = compared["gates"]
    assert (gates["differing"], gates["decisions"]) == (0, 260 * blocks) and gates[
        "entropy_difference"
    ] < 1e-5
    assert sum("'some/hub-name' of the hub" in line for line in lines[:-1]) == 1
    model = amor.load(tmp_path / "ours")[0]
    with torch.no_grad():
        out = model(TEXT)
        wanted = open_model(source).outputs(TEXT)
    for k in range(blocks):
        assert 0.1 < float(out.gates[k].fire.float().mean()) < 0.9, (
            "the threshold splits the tokens"
        )
        assert torch.equal(out.gates[k].fire, wanted.fire[k])
    close(model.logits(out.hidden), wanted.logits.float())

    more = ("--shard-size", "150KB") if shards > 1 else ()
    assert convert(tmp_path / "ours", tmp_path / "back", "--to", "authors", *more) == 0
    again, before = tensors_of(tmp_path / "back"), tensors_of(source)
    assert again.keys() == before.keys() and all(
        torch.equal(again[name], t) for name, t in before.items()
    )
    configs = [
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back")
    ]
    assert configs[0] == configs[1]
    assert (len(list((tmp_path / "back").glob("model-*"))) > 1) == (shards > 1)
    assert convert(tmp_path / "back", tmp_path / "twice") == 0  # its manifest is right


@pytest.mark.parametrize("backbone", ["mamba2", "gdn"])
def test_no_gate_decision_of_ten_thousand_tokens_differs(tmp_path, backbone):
    source = released(tmp_path / "theirs", model_kwargs(backbone, 3, "classic"))
    opened, text = open_model(source), tokens(40, 256, VOCAB)
    with torch.no_grad():
        out = opened.model(text)
    fire = torch.stack([gate.fire for gate in out.gates])
    wanted = opened.outputs(text, fire)
    assert text.numel() > 10_000 and int((fire != wanted.fire).sum()) == 0 and wanted.ties <= 5
    close(opened.model.logits(out.hidden), wanted.logits.float())
    assert all(0.1 < float(one.float().mean()) < 0.9 for one in fire)


def test_what_their_code_fixes_is_in_our_config(theirs):
    held, model = tensors_of(theirs), open_model(theirs).model
    config, gate = model.config, model.each_block()[1].gate
    assert [config.eps(norm) for norm in ("mixer_norm", "mixer", "norm_f")] == [1e-5] * 3
    assert [config.eps(norm) for norm in ("mlp_norm", "block", "final_norm")] == [1e-6] * 3
    assert (
        config.blocks.alpha_floor
        == ALPHA_FLOOR
        == float(torch.tensor(-1.0, dtype=torch.float64).sigmoid())
    )
    assert (gate.options.kappa, gate.options.eta, gate.options.start, gate.options.update) == (
        0.2,
        0.01,
        (0.3, 0.1),
        "forward",
    )
    assert float(gate.mu) == float(held["amor_blocks.1.gate.running_threshold"])
    assert float(gate.sigma) == float(held["amor_blocks.1.gate.running_std"])
    assert int(gate.updates) == 1 and not gate.quantiles.any()
    alpha = held["amor_blocks.1.raw_alpha"]
    assert float((alpha < -1).float().mean()) > 0.1 and torch.equal(
        model.each_block()[1].alpha, alpha
    )
    assert float(model.each_block()[1].scale().detach().min()) == pytest.approx(ALPHA_FLOOR)
    assert config.conv_init == "uniform" and config.tied and config.context == 4096
    gdn = settings_config({"backbone": "gdn"})
    eps = ("mixer_norm", "mlp_norm", "norm_f", "block", "final_norm")
    assert gdn.eps("mixer") == 1e-5 and {gdn.eps(norm) for norm in eps} == {1e-6}
    assert gdn.mixer_options("gated_deltanet").count(WIDTH) == int(0.75 * WIDTH / HEAD) == 3


def settings_config(changes, tmp="config.json"):
    from pathlib import Path

    source = SourceFolder(Path(tmp), {"model_kwargs": model_kwargs() | changes})
    return Authors(source).config("x")


def test_a_fixed_offset_is_a_threshold_of_median_plus_three_hundredths(tmp_path):
    source = released(tmp_path / "theirs", model_kwargs(offset_mode="fixed"))
    opened = open_model(source)
    median = tensors_of(source)["amor_blocks.2.gate.running_threshold"]
    assert float(opened.model.each_block()[2].gate.threshold) == pytest.approx(
        float(median) + 0.03, abs=1e-7
    )
    assert convert(source, tmp_path / "ours") == 0
    assert convert(tmp_path / "ours", tmp_path / "back", "--to", "authors") == 0
    assert (
        json.loads((tmp_path / "back/config.json").read_text())["model_kwargs"]["offset_mode"]
        == "fixed"
    )


def test_several_groups_are_read_as_transformers_means_them(tmp_path):
    """Their Mamba2 layers are transformers': the written-out one is compared
    with it where both can run."""
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    from transformers import Mamba2Config

    from amor.convert.written import below
    from amor.convert.written import mamba2 as written

    kwargs = model_kwargs(n_groups=2)
    source = released(tmp_path / "theirs", kwargs)
    assert convert(source, tmp_path / "ours") == 0
    shape = {
        "hidden_size": WIDTH,
        "num_heads": 8,
        "head_dim": HEAD,
        "state_size": 24,
        "n_groups": 2,
        "expand": 2,
    }
    mixer = mamba2.Mamba2Mixer(
        Mamba2Config(**shape, conv_kernel=4, chunk_size=16, num_hidden_layers=1), 0
    )
    held = below(tensors_of(source), "ssd_layers.0.mixer")
    mixer.load_state_dict(held)
    x = torch.randn(2, 30, WIDTH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = mixer(x)
    double = {name: t.double() for name, t in held.items()}
    close(written(x.double(), double, HEAD, 24, 1e-5, 2).float(), wanted)


def test_a_decision_within_rounding_of_the_threshold_is_a_tie_and_any_other_is_not(tmp_path):
    source = SourceFolder(tmp_path, {"model_kwargs": model_kwargs(blocks=1)})
    kwargs = Authors(source).settings.tree
    held = random_tensors(model_kwargs(blocks=1))
    held["amor_blocks.0.gate.running_std"] = torch.tensor(0.0)
    entropy = authors_forward(kwargs, held, TEXT).entropy
    held["amor_blocks.0.gate.running_threshold"] = entropy[0, 1, 20] - 0.2 * TIE  # of float64 here
    whole = authors_forward(kwargs, held, TEXT)
    other = whole.fire.clone()
    other[0, 1, 20] = ~other[0, 1, 20]
    followed = authors_forward(kwargs, held, TEXT, other)
    assert followed.ties == 1 and torch.equal(followed.fire, other)
    assert not torch.equal(followed.logits, whole.logits)
    held["amor_blocks.0.gate.running_threshold"] = entropy[0, 1, 20] - 2 * TIE
    kept = authors_forward(kwargs, held, TEXT, other)
    assert kept.ties == 0 and int((kept.fire != other).sum()) == 1


def test_decisions_that_differ_are_found_where_logits_are_the_same(tmp_path, capsys, monkeypatch):
    held = random_tensors(model_kwargs())
    for k in range(3):
        held[f"amor_blocks.{k}.out_proj.weight"].zero_()  # firing changes nothing
    source = released(tmp_path / "theirs", model_kwargs(), held)
    right = Authors.weights

    def shifted(self, held, config):
        found = right(self, held, config)
        return found | {"blocks.1.gate.mu": found["blocks.1.gate.mu"] + 0.01}

    monkeypatch.setattr(Authors, "weights", shifted)
    assert convert(source, tmp_path / "ours", "--json") == 1
    said = capsys.readouterr().out
    compared = json.loads(said.splitlines()[-1])["compared"]
    assert (
        compared["gates"]["differing"] > 0
        and compared["difference"] <= compared["allowed"]
        and "DIFFERS" in said
    )
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("key", ["alpha_floor", "norm_eps"])
def test_a_config_that_is_not_theirs_is_found_by_the_comparison(theirs, tmp_path, monkeypatch, key):
    """Without the floor of alpha, or with another epsilon than theirs, the result is not
    written."""
    right = Authors.config
    wrong = {"blocks.alpha_floor": 0.0} if key == "alpha_floor" else {"norm_eps": 1e-2}
    monkeypatch.setattr(Authors, "config", lambda self, name: right(self, name).change(**wrong))
    assert convert(theirs, tmp_path / "ours") == 1
    assert list(tmp_path.iterdir()) == []


def refusal(source, out, capsys):
    """The one line with which a folder is refused; nothing is left where the result would be."""
    capsys.readouterr()
    assert convert(source, out) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "bug" not in said and not out.exists()
    return said


def damaged(folder):
    """(what was done, what the line names)"""
    names = sorted(path.name for path in folder.glob("model-*"))
    held = tensors_of(folder)
    first = folder / names[0]
    whole, manifest = first.read_bytes(), (folder / "manifest.json").read_text()
    first.write_bytes(whole[:-100])
    yield "cut short", f"its manifest.json says {len(whole):,}"
    first.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    yield "one bit", "sha256"
    first.unlink()
    yield "a shard gone", "which is not there"
    first.write_bytes(whole)
    index = folder / "model.safetensors.index.json"
    good = index.read_text()
    index.write_text(good + " ")
    yield "another index", "model.safetensors.index.json has"
    index.write_text(good)
    (folder / "manifest.json").unlink()
    yield "no manifest", "no manifest.json"
    (folder / "manifest.json").write_text("[]")
    yield "a list for a manifest", "expected object"
    entries = json.loads(manifest)
    (folder / "manifest.json").write_text(
        json.dumps({n: e for n, e in entries.items() if n != names[1]})
    )
    yield "a shard that is not listed", f"does not list {names[1]}"
    (folder / "manifest.json").write_text(
        json.dumps(entries | {"model-00009-of-00009.safetensors": entries[names[0]]})
    )
    yield "a shard too many listed", "lists model-00009-of-00009"
    (folder / "manifest.json").write_text(
        json.dumps(entries | {names[0]: {"bytes": 5, "sha256": "x"}})
    )
    yield "no checksum", "sha256"
    write_tensors(
        folder, {n: t for n, t in held.items() if n != "amor_blocks.1.kv_proj.k_proj.weight"}
    )
    yield "a tensor missing", "'amor_blocks.1.kv_proj.k_proj.weight' is missing"
    write_tensors(folder, held | {"amor_pre_norms.0.weight": torch.ones(WIDTH)})
    yield "a tensor too many", "no place for tensor 'amor_pre_norms.0.weight'"
    write_tensors(folder, held | {"lm_head.weight": held["embed.weight"] + 1})
    yield "another head", "another matrix"
    write_tensors(folder, held | {"norm_f.weight": torch.ones(WIDTH + 1)})
    yield "misshapen", "norm_f.weight has shape"
    write_tensors(folder, held)
    index.write_text(good)
    yield "both kinds of weights", "holds both"
    (folder / "model.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    (folder / "manifest.json").write_text("{}")
    yield "out of the folder", "is no shard"
    index.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    yield "a pickle", "holds no weights"


def test_a_damaged_folder_is_refused_in_one_line(tmp_path, capsys):
    folder = released(tmp_path / "theirs", model_kwargs(), shards=3)
    for done, words in damaged(folder):
        assert words in refusal(folder, tmp_path / "out", capsys), done


def test_checksums_are_compared_before_a_tensor_is_parsed(theirs, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(theirs, tmp_path / "theirs")
    (folder / "model.safetensors").write_bytes(
        b"\0" * (folder / "model.safetensors").stat().st_size
    )
    monkeypatch.setattr(SourceFolder, "tensors", lambda self: pytest.fail("parsed"))
    assert "sha256" in refusal(folder, tmp_path / "out", capsys)


KEYS = [
    ({"backbone": "mamba3"}, "backbone is 'mamba3'"),
    ({"residual_mode": None}, "residual_mode is 'None'"),
    ({"attention_mode": "some"}, "attention_mode is 'some'"),
    ({"n_amor_blocks": 0}, "n_amor_blocks is 0"),
    ({"n_heads": 7}, "not a whole number of n_heads 7"),
    ({"d_ff": "96"}, "d_ff is '96'"),
    ({"offset_mode": "other"}, "offset_mode is other"),
    ({"magic": 1}, "no key 'magic' is known"),
    ({"backbone": "gdn", "expand_v": 1.5}, "expand_v is 1.5"),
    ({"n_amor_blocks": 2}, "no place for tensor 'amor_blocks.2"),
    ({"d_state": 25}, "has shape"),
]


@pytest.mark.parametrize(("changes", "words"), KEYS, ids=lambda v: str(v)[:40])
def test_arguments_that_are_not_theirs_are_refused(theirs, tmp_path, capsys, changes, words):
    folder = shutil.copytree(theirs, tmp_path / "theirs")
    (folder / "config.json").write_text(json.dumps({"model_kwargs": model_kwargs() | changes}))
    assert words in refusal(folder, tmp_path / "out", capsys)


FITTING = {
    **{"norm_eps_of.mlp_norm": 1e-6, "norm_eps_of.block": 1e-6, "norm_eps_of.final_norm": 1e-6},
    "blocks.alpha_floor": ALPHA_FLOOR,
}
CANNOT = [
    ({"blocks.alpha_floor": 0.0}, "blocks.alpha_floor is 0"),
    ({"blocks.gate": "quantile"}, "its gate is 'quantile'"),
    ({"blocks.gate_options": {"kappa": 0.3}}, "kappa 0.3"),
    ({"blocks.mlp": True}, "blocks.mlp"),
    ({"blocks.final": "none"}, "blocks.final is 'none'"),
    ({"blocks.probe": "final"}, "blocks.probe is 'final'"),
    ({"blocks.decide": "once"}, "blocks.decide is 'once'"),
    ({"blocks.rope_theta": 500.0}, "blocks.rope_theta is 500.0"),
    ({"norm_eps_of.block": 1e-5}, "the epsilon of block is 1e-05, theirs 1e-06"),
    ({"blocks.count": 0}, "no gated blocks"),
    ({"tied": False}, "weights of its own"),
    ({"d_ff": 0}, "d_ff = 0"),
    ({"pattern": ["mamba2", "attention"]}, "not attention, mamba2"),
]


@pytest.mark.parametrize(("changes", "words"), CANNOT, ids=lambda v: str(v)[:40])
def test_a_model_that_their_layout_cannot_express_is_refused(tmp_path, capsys, changes, words):
    save(small("amor-mamba2", **FITTING | changes), tmp_path / "ours")
    assert convert(tmp_path / "ours", tmp_path / "out", "--to", "authors") == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["amor-mamba2-prenorm", "amor-gated-deltanet-classic"])
def test_a_model_of_ours_is_written_for_their_code(tmp_path, capsys, name):
    eps = {"norm_eps": 1e-6, "norm_eps_of": {"mixer": 1e-5}} if "deltanet" in name else {}
    model = small(name, **FITTING | eps)
    save(model, tmp_path / "ours", bytes_tokenizer())
    assert convert(tmp_path / "ours", tmp_path / "theirs", "--to", "authors") == 0
    assert "names no tokenizer" in capsys.readouterr().out
    kwargs = json.loads((tmp_path / "theirs/config.json").read_text())["model_kwargs"]
    assert (
        kwargs["residual_mode"] == ("h" if "prenorm" in name else "classic")
        and kwargs["head_dim"] == HEAD
    )
    assert convert(tmp_path / "theirs", tmp_path / "again") == 0
    again, own = amor.load(tmp_path / "again")[0].state_dict(), model.state_dict()
    assert all(
        torch.equal(t, own[n])
        for n, t in again.items()
        if not n.endswith((".quantiles", ".updates"))
    )


def test_a_gate_that_has_met_no_data_is_not_written(tmp_path, capsys):
    save(amor.build(small("amor-mamba2", **FITTING).config), tmp_path / "ours")
    assert convert(tmp_path / "ours", tmp_path / "out", "--to", "authors") == 2
    assert "has met no data" in capsys.readouterr().err


def test_an_offset_is_no_longer_fixed_where_one_gate_of_several_has_another_std(tmp_path):
    source = released(tmp_path / "theirs", model_kwargs(offset_mode="fixed"))
    model = amor.load(converted(source, tmp_path / "ours"))[0]
    model.each_block()[1].gate.sigma.fill_(0.3)
    amor.save(model, tmp_path / "ours")
    back = converted(tmp_path / "ours", tmp_path / "back", "--to", "authors")
    assert "offset_mode" not in json.loads((back / "config.json").read_text())["model_kwargs"]


def test_no_shard_is_larger_than_asked_for_unless_it_is_one_tensor(ours, tmp_path):
    back = converted(ours, tmp_path / "back", "--to", "authors", "--shard-size", "60KB")
    sizes = [sorted(t.nbytes for t in load_file(p).values()) for p in back.glob("model-*")]
    assert len(sizes) > 4 and all(sum(part) <= 60_000 or len(part) == 1 for part in sizes)


def test_a_model_that_was_changed_since_is_written_as_it_is_now(ours, tmp_path):
    """The config that a converted folder keeps is for the way back, and no more
    than the model itself says."""
    folder = shutil.copytree(ours, tmp_path / "ours")
    tree = json.loads((folder / "config.json").read_text()) | {"context": 9000}
    (folder / "config.json").write_text(json.dumps(tree))
    assert convert(folder, tmp_path / "back", "--to", "authors") == 0
    found = json.loads((tmp_path / "back/config.json").read_text())
    assert found["model_kwargs"]["max_seq_len"] == 9000 and found["tokenizer"] == "some/hub-name"


def test_a_firing_rate_is_refused_until_the_gates_are_calibrated(ours, capsys):
    assert (
        main(["generate", str(ours), "--prompt", "The", "--max-tokens", "3", "--fire-rate", "0.1"])
        == 2
    )
    assert "calibrate it on text first" in capsys.readouterr().err
    assert main(["generate", str(ours), "--prompt", "The", "--max-tokens", "3"]) == 0


def test_a_converted_model_reads_more_than_their_longest_text(ours):
    model = amor.load(ours)[0]
    with torch.no_grad():
        out = model(tokens(1, model.config.context + 20, VOCAB))
    assert out.hidden.isfinite().all() and out.hidden.shape[1] == model.config.context + 20


def test_a_released_folder_becomes_one_for_transformers(theirs, tmp_path, capsys):
    pytest.importorskip("transformers")
    assert convert(theirs, tmp_path / "hf", "--to", "hf", "--tokenizer", "bytes", "--json") == 0
    compared = json.loads(capsys.readouterr().out.splitlines()[-1])["compared"]
    assert "the result by transformers" in compared["by"] and compared["gates"]["differing"] == 0
    assert compared["gates"]["decisions"] == 3 * compared["tokens"]
    assert "not known" in (tmp_path / "hf/README.md").read_text()


def test_rows_of_a_gated_model_are_not_cut_off(theirs, tmp_path, capsys):
    assert convert(theirs, tmp_path / "out", "--vocab", 257) == 2
    assert "thresholds are of entropies over all rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--shard-size", "5GB"), "for --to hf or authors"),
        (("--tokenizer", "gone.json"), "gone.json"),
    ],
)
def test_options_that_do_not_fit_are_refused(theirs, tmp_path, capsys, words, said):
    assert convert(theirs, tmp_path / "out", *words) == 2
    assert said in capsys.readouterr().err


def fitted_router(blocks=3, hidden=20, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):  # predictions of about 1, as large as entropies
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def one(k):
        return {
            "fc1.weight": draw(hidden, WIDTH),
            "fc1.bias": draw(hidden),
            "fc2.weight": draw(1, hidden),
            "fc2.bias": draw(1),
            "skip.weight": draw(1, WIDTH),
            "fit_meta": torch.tensor([WIDTH, 0, k, 77]),
        }

    return tuple(one(k) for k in range(blocks))


def test_a_router_is_compared_with_the_threshold_of_a_fixed_offset(tmp_path):
    folder = released(tmp_path / "theirs", model_kwargs(offset_mode="fixed"))
    write_router(folder, fitted_router())
    ours = amor.load(converted(folder, tmp_path / "ours"))[0]
    medians = tensors_of(folder)
    for k, block in enumerate(ours.each_block()):
        median = float(medians[f"amor_blocks.{k}.gate.running_threshold"])
        assert float(block.gate.threshold) == pytest.approx(median + 0.03, abs=1e-6)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_router_is_read_as_it_was_written_and_reported(tmp_path, capsys, shards):
    folder = released(tmp_path / "theirs", model_kwargs(), shards=shards)
    assert read_router(folder) is None
    router = fitted_router()
    write_router(folder, router)
    again = read_router(folder)
    assert again[0]["fc1.weight"].shape == (20, WIDTH)
    for a, b in zip(again, router, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)
    assert convert(folder, tmp_path / "ours") == 0
    assert (
        capsys.readouterr().out.count("its fitted router (3 blocks, hidden size 20) decides") == 1
    )
    assert convert(folder, tmp_path / "copy", "--to", "authors", "--shard-size", "200KB") == 0
    assert read_router(tmp_path / "copy") is not None and weights_identity(
        tmp_path / "copy"
    ) != weights_identity(folder)


def test_a_router_decides_in_our_model_and_comes_back_to_the_bit(tmp_path, capsys):
    folder, router = released(tmp_path / "theirs", model_kwargs()), fitted_router()
    plain = amor.load(converted(folder, tmp_path / "plain"))[0]
    write_router(folder, router)
    ours = amor.load(converted(folder, tmp_path / "ours"))[0]
    text = torch.randint(0, 300, (2, 50), generator=torch.Generator().manual_seed(3))
    trace = ours(text).gates[0]
    x = ours.norms.column(0, ours.norm_f(ours(text).residual))
    assert torch.allclose(trace.score, predicted_entropy(x, router[0]), atol=1e-5)
    assert (
        torch.equal(trace.fire, trace.score > plain.each_block()[0].gate.threshold)
        and 0 < trace.fire.float().mean() < 1
    )
    again = read_router(converted(tmp_path / "ours", tmp_path / "back", "--to", "authors"))
    for a, b in zip(again, router, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)
    assert main(["fit", str(tmp_path / "ours"), "--out", str(tmp_path / "native"), "--detach"]) == 0
    for a, b in zip(plain(text).gates, amor.load(tmp_path / "native")[0](text).gates, strict=True):
        assert torch.equal(a.fire, b.fire)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"target": "gain"}, "predicts gain"),
        ({"rate": 0.2}, "fires on 0.2"),
        ({"hidden": 0}, "no hidden layer"),
    ],
)
def test_a_router_that_theirs_cannot_be_is_not_written(tmp_path, capsys, options, problem):
    folder = released(tmp_path / "theirs", model_kwargs())
    write_router(folder, fitted_router())
    ours = converted(folder, tmp_path / "ours")
    model = amor.load(ours)[0]
    other = amor.build(model.config.change(**{"blocks.gate_options": {"hidden": 20} | options}))
    amor.save(other, tmp_path / "other")
    assert convert(tmp_path / "other", tmp_path / "x", "--to", "authors") == 2
    assert problem in capsys.readouterr().err


def test_a_router_s_prediction_is_its_network_written_out():
    one = fitted_router()[1]
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    for row, found in zip(x, predicted_entropy(x, one), strict=True):
        hidden = one["fc1.weight"] @ row + one["fc1.bias"]
        wanted = (
            one["fc2.weight"][0] @ (hidden / (1 + (-hidden).exp()))
            + one["fc2.bias"][0]
            + one["skip.weight"][0] @ row
        )
        assert float(found) == pytest.approx(float(wanted), rel=1e-5)


def test_the_identity_of_sharded_weights_is_that_of_their_layout(tmp_path):
    import hashlib

    folder = released(tmp_path / "theirs", model_kwargs(), shards=2)
    names = (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    )
    files = ",".join(f'"{name}":"{sha256(folder / name)}"' for name in names)
    text = '{"files":{' + files + '},"format":"safetensors-sharded-v1"}'
    assert weights_identity(folder) == hashlib.sha256(text.encode()).hexdigest()
    single = released(tmp_path / "single", model_kwargs())
    held = (single / "model.safetensors").read_bytes()
    assert weights_identity(single) == hashlib.sha256(held).hexdigest()


def broken_routers(folder):
    """(what was done, what the line names)"""
    config, file = folder / "router_config.json", folder / "router.safetensors"
    good, held, whole = json.loads(config.read_text()), load_file(file), file.read_bytes()

    def changed(**keys):
        config.write_text(json.dumps(good | keys))

    def refitted(tensors):
        save_file(tensors, file)
        changed(router_sha256=sha256(file))

    for key, value in {"format_version": 2, "variant": "joint", "activation": "gelu"}.items():
        changed(**{key: value})
        yield key, f"{key} is {value!r}"
    for key, value in {
        "backbone": "gdn",
        "residual_mode": "h",
        "d_model": 65,
        "n_blocks": 2,
    }.items():
        changed(model=good["model"] | {key: value})
        yield key, "of another model"
    changed(base_weight_sha256="0" * 64)
    yield "other weights", "fitted to other weights"
    changed(base_weight_sha256=None)
    yield "no weights named", "base_weight_sha256"
    changed(router_sha256="0" * 64)
    yield "another file", "router_sha256"
    changed(extra=1)
    yield "an unknown key", "no key 'extra'"
    changed(hidden_dim=21)
    yield "another size", "blocks.0.fc1.weight is float32 [20, 64], not float32 [21, 64]"
    refitted({n: t for n, t in held.items() if n != "blocks.2.skip.weight"})
    yield "a tensor missing", "'blocks.2.skip.weight' is missing"
    refitted(held | {"blocks.3.skip.weight": torch.zeros(1, WIDTH)})
    yield "a tensor too many", "no place for tensor 'blocks.3.skip.weight'"
    refitted(held | {"blocks.0.fc2.bias": torch.zeros(1, dtype=torch.float64)})
    yield "another dtype", "blocks.0.fc2.bias is float64"
    refitted(held | {"blocks.0.fc2.bias": torch.full((1,), torch.inf)})
    yield "not finite", "not finite"
    refitted(held | {"blocks.1.fit_meta": held["blocks.0.fit_meta"].clone()})
    yield "of another block", "blocks.1.fit_meta is of width 64 and block 0"
    file.write_bytes(whole)
    config.unlink()
    yield "no config", "router.safetensors alone; a router is two files"
    changed()
    file.unlink()
    yield "no tensors", "router_config.json alone"
    file.write_bytes(whole)
    write_tensors(folder, random_tensors(model_kwargs(), seed=1))
    yield "weights of another model", "fitted to other weights"


def test_a_router_of_other_weights_or_another_form_is_refused(tmp_path, capsys):
    folder = released(tmp_path / "theirs", model_kwargs())
    write_router(folder, fitted_router())
    for done, words in broken_routers(folder):
        with pytest.raises(AmorError):
            read_router(folder)
        assert words in refusal(folder, tmp_path / "out", capsys), done


def test_a_router_that_does_not_fit_is_not_written(tmp_path):
    folder = released(tmp_path / "theirs", model_kwargs())
    with pytest.raises(AmorError, match="a router of 2 blocks for a model of 3"):
        write_router(folder, fitted_router(blocks=2))
    write_manifest(folder)
    assert not any((folder / name).exists() for name in ROUTER)
