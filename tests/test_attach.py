"""Laws of attachment: blocks behind a trained model change nothing until they learn, and
nothing of the model when they do."""

import json
import shutil

import pytest
import torch
from laws import small
from training import KilledError, Killer, corpus, left_by, same, small_recipe, trained

import amor
from amor.attach.blocks import AttachOptions, attached
from amor.attach.text import calibrate
from amor.cli import main
from amor.data.tokenizer import bytes_tokenizer
from amor.errors import AmorError
from amor.judge.gates import force_all
from amor.judge.windows import of_ids
from amor.models.folder import save
from amor.models.gated import PassOptions
from amor.run import Run
from amor.train.loop import train
from amor.train.trouble import GradientCheck

SHORT = [
    "--set",
    "context=24",
    "--set",
    "batch=2",
    "--set",
    "micro_batch=2",
    "--set",
    "eval.windows=4",
    "--set",
    "checkpoint.every=4",
]
VOCAB = 257


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("attach"))


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A recurrent model of ours with a head of its own and norms that are not
    1, as a trained one has them."""
    folder = tmp_path_factory.mktemp("attach") / "backbone"
    save(
        small("mamba2 untied", vocab=VOCAB, pattern="mamba2, gated_deltanet"),
        folder,
        bytes_tokenizer(),
    )
    return folder


@pytest.fixture(scope="module")
def learned(backbone, data, tmp_path_factory):
    """What the command said of a few steps, and the run it left."""
    out = tmp_path_factory.mktemp("attach") / "run"
    return run_verb(backbone, out, "--data", str(data), "--train-steps", "6"), out


def run_verb(backbone, out, *more, code=0):
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        left = main(
            [
                "attach",
                str(backbone),
                "--out",
                str(out),
                "--head-size",
                "16",
                "--blocks",
                "2",
                "--json",
                *SHORT,
                *more,
            ]
        )
    assert left == code, said.getvalue()
    return said.getvalue(), json.loads(said.getvalue().splitlines()[-1])


def text(columns=60):
    return torch.randint(0, VOCAB, (3, columns), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("gate", "rate"),
    [("entropy", None), ("entropy", 0.3), ("always", None), ("learned", 0.5), ("gain", 0.2)],
)
@torch.no_grad()
def test_at_step_0_the_logits_are_the_backbone_s_to_the_bit_whether_gates_fire_or_not(
    backbone, gate, rate
):
    before = amor.load(backbone)[0]
    model = attached(before, AttachOptions(2, gate, rate, 16))
    for gates in (None, force_all(model, True), force_all(model, False)):
        assert torch.equal(
            model.logits(model(text(), options=PassOptions(gates=gates)).hidden),
            before.logits(before(text()).hidden),
        )


@torch.no_grad()
def test_with_a_final_norm_they_would_not_be(backbone):
    """Why attached blocks have none: the norm of a trained backbone is not 1, so a second one
    rescales what the head reads."""
    before = amor.load(backbone)[0]
    model = amor.build(
        attached(before, AttachOptions(2, head_size=16)).config.change(**{"blocks.final": "norm"})
    ).eval()
    model.load_state_dict(before.state_dict(), strict=False)
    assert (
        model.logits(model(text()).hidden) - before.logits(before(text()).hidden)
    ).abs().max() > 0.1


def test_the_command_trains_blocks_alone_and_says_what_it_did(learned, backbone):
    (words, found), out = learned
    assert (
        found["ok"]
        and found["moved"] == []
        and found["shut_is_backbone"]
        and found["gradients"]["silent"] == []
    )
    assert "to the bit: yes" in words and "NO" not in words
    before, after = amor.load(backbone)[0], amor.load(out)[0]
    assert all(torch.equal(after.state_dict()[n], t) for n, t in before.state_dict().items())
    assert all(
        block.attention.o_proj.weight.any() and block.alpha.any() for block in after.each_block()
    )
    with torch.no_grad():
        shut = after(text(), options=PassOptions(gates=force_all(after, False)))
        assert torch.equal(after.logits(shut.hidden), before.logits(before(text()).hidden))
        assert not torch.equal(
            after(text(), options=PassOptions(gates=force_all(after, True))).hidden,
            before(text()).hidden,
        )
    assert (
        found["before"]["tokens"] == found["after"]["tokens"]
        and found["after"]["perplexity"] != found["before"]["perplexity"]
    )


def test_the_first_steps_tell_which_tensors_gradients_reach(learned):
    events = [event for event in Run(learned[1]).read_events() if event.event == "gradients"]
    first, *_, last = events
    assert (
        all("o_proj" not in name for name in first.now["silent"])
        and len(first.now["silent"]) == first.now["tensors"] - 2
    )
    assert (
        first.now["missing"] == [] and last.now["silent"] == [] and "wait for W_O" in first.message
    )


def test_a_tensor_that_takes_no_part_is_named():
    model = small("amor-mamba2", pattern="mamba2")
    seen = GradientCheck(model, lambda t: t)
    model(
        text(20) % 211, targets=text(20) % 211, options=PassOptions(gates=force_all(model, False))
    ).loss.backward()
    seen.update(model)
    assert any("blocks.0" in name for name in seen.silent) and "embed.weight" not in seen.silent
    assert "did their gate fire" in seen.summary(3) or "no part in the loss" in seen.summary(3)


def test_a_gate_that_never_fires_leaves_blocks_without_gradients_and_the_command_says_so(
    backbone, data, tmp_path
):
    words, found = run_verb(
        backbone,
        tmp_path / "run",
        "--data",
        str(data),
        "--train-steps",
        "3",
        "--gate",
        "never",
        code=1,
    )
    assert found["gradients"]["silent"] and "did their gate fire" in words


def test_no_frozen_tensor_has_moments_or_a_gradient(learned):
    held = left_by(learned[1])
    assert held["moments"] and all(name.startswith("blocks.") for name in held["moments"])


def test_a_run_with_a_frozen_backbone_resumes_to_the_bit(learned, data, tmp_path):
    recipe = small_recipe(data, steps=4, freeze="backbone", eval={"every": 4})
    recipe = type(recipe).from_dict(
        recipe.to_dict() | {"model": {"name": "x", "scale": "", "start": str(learned[1] / "start")}}
    )
    whole = trained(recipe, tmp_path / "whole")
    with pytest.raises(KilledError):
        train(recipe, tmp_path / "run", observers=[Killer(3)])
    same(trained(recipe, tmp_path / "run"), whole)


def test_the_same_command_goes_on_and_another_is_refused(learned, backbone, data, tmp_path, capsys):
    (_, first), out = learned
    assert (
        run_verb(backbone, out, "--data", str(data), "--train-steps", "6")[1]["after"]
        == first["after"]
    )
    assert (
        main(
            [
                "attach",
                str(backbone),
                "--out",
                str(out),
                "--head-size",
                "16",
                "--blocks",
                "1",
                "--data",
                str(data),
                "--train-steps",
                "6",
            ]
        )
        == 2
    )
    assert "another kind" in capsys.readouterr().err


def test_thresholds_are_the_paper_s_rule_or_hold_a_rate(backbone, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("the quick brown fox jumps over the lazy dog and runs away. " * 40)
    _, by_rule = run_verb(backbone, tmp_path / "rule", "--text", str(book))
    _, by_rate = run_verb(backbone, tmp_path / "rate", "--text", str(book), "--fire-rate", "0.25")
    rule, rate = (amor.load(tmp_path / name)[0] for name in ("rule", "rate"))
    for block, told in zip(rule.each_block(), by_rule["thresholds"], strict=True):
        assert told["threshold"] == pytest.approx(
            float(block.gate.mu + 0.2 * block.gate.sigma), rel=1e-6
        )
    assert rate.config.blocks.gate == "quantile" and rate.config.blocks.gate_options == {
        "rate": 0.25
    }
    assert all(abs(told["fire"] - 0.25) < 0.02 for told in by_rate["thresholds"])
    assert amor.load(tmp_path / "rate")[1] is not None


def test_all_is_trained_where_nothing_is_to_be_frozen(backbone, data, tmp_path):
    words, found = run_verb(
        backbone, tmp_path / "run", "--data", str(data), "--train-steps", "2", "--no-freeze"
    )
    assert found["ok"] and "frozen " not in words
    before, after = amor.load(backbone)[0], amor.load(tmp_path / "run")[0]
    assert not torch.equal(before.embed.weight, after.embed.weight)


def test_a_model_of_transformers_is_converted_on_the_way(data, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Mamba2Config(
        hidden_size=32,
        num_hidden_layers=1,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=1,
        vocab_size=VOCAB,
        chunk_size=16,
    )
    transformers.Mamba2ForCausalLM(config).save_pretrained(tmp_path / "hf")
    shutil.copyfile(data / "tokenizer.json", tmp_path / "hf/tokenizer.json")
    words, found = run_verb(tmp_path / "hf", tmp_path / "out", "--data", str(data))
    assert (
        found["ok"]
        and found["compared"]["by"].startswith("transformers")
        and "transformers' Mamba2" in words
    )
    assert amor.load(tmp_path / "out")[0].config.blocks.final == "none"


def test_data_of_another_tokenizer_is_refused(backbone, tmp_path, capsys):
    other = corpus(tmp_path, "bpe:257")
    assert (
        main(
            [
                "attach",
                str(backbone),
                "--out",
                str(tmp_path / "out"),
                "--head-size",
                "16",
                "--data",
                str(other),
            ]
        )
        == 2
    )
    assert "another tokenizer" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_llama_is_refused_by_its_config_before_a_tensor_is_read(data, tmp_path, capsys):
    tree = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text(json.dumps(tree | {"num_attention_heads": 4}))
    words = ["attach", str(tmp_path / "llama"), "--out", str(tmp_path / "out"), "--data", str(data)]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert "attention throughout" in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_what_blocks_cannot_stand_behind_is_refused():
    with pytest.raises(AmorError, match="gated blocks already"):
        attached(small("amor-mamba2"), AttachOptions(head_size=16))
    with pytest.raises(AmorError, match="attention throughout"):
        attached(small("transformer"), AttachOptions(head_size=16))
    with pytest.raises(AmorError, match="nearest that does is"):
        attached(small("mamba2"), AttachOptions(head_size=48))
    with pytest.raises(AmorError, match="has no target firing rate"):
        AttachOptions(gate="margin", rate=0.2).keys()


def test_a_recipe_that_leaves_nothing_to_train_or_changes_a_whole_model_is_refused(
    data, tmp_path, backbone
):
    with pytest.raises(AmorError, match="nothing to train"):
        train(small_recipe(data, "mamba2", freeze="backbone"), tmp_path / "run")
    with pytest.raises(AmorError, match="nothing to change"):
        small_recipe(data, model={"start": str(backbone)})


def test_thresholds_are_not_set_on_scores_that_are_not_finite():
    model = small("amor-mamba2")
    with torch.no_grad():
        model.norm_f.weight.fill_(1e38)
    with pytest.raises(AmorError, match="scores of the gates on a text are not finite"):
        calibrate(model, of_ids(torch.arange(200) % 50, 32, 2, "a text"))
