"""The model, its gradients and the engine against the model written out from the
paper (tests/written_out.py)."""

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from laws import TOLERANCE, VARIED, close, small, tokens
from written_out import entropy, weights_of, written_out

import amor
from amor.decode.engine import Engine
from amor.decode.savings import Savings
from amor.models.gated import PassOptions
from amor.presets import ABLATION_NAMES, NAMES, SCALES

ALL = NAMES + ABLATION_NAMES + VARIED
COMPUTE = ("auto", "full_with_mask", "true_sparse")
SAVINGS = {"default": Savings(), "none": Savings.none()}
TEXT = tokens(3, 40, seed=7)
PROMPTS = (19, 1, 30)  # tokens of each row of TEXT; the next ones are read in steps
STEPS = 9


@torch.no_grad()
def said(model, text):
    """What the written-out model says of rows of tokens: logits [B, T, V],
    scores and fires [B, T, K]."""
    weights = weights_of(model)
    rows = [written_out(model.config, weights, row.tolist()) for row in text]
    logits, scores, fires = (torch.stack(found) for found in zip(*rows, strict=True))
    return logits, scores.mT, fires.mT


@cache
def said_of_the_text(name):
    return said(small(name), TEXT)


@torch.no_grad()
def read(model, text, compute="auto"):
    """What the model's own forward says of them."""
    out = model(text, options=PassOptions(compute=compute))
    nothing = torch.zeros(*text.shape, 0)
    scores, fires = (
        torch.stack(t, -1) if t else nothing
        for t in ([g.score for g in out.gates], [g.fire for g in out.gates])
    )
    return model.logits(out.hidden), scores, fires.bool()


@torch.no_grad()
def stepped(engine, rows, prompts, steps=STEPS):
    """What the engine says of the last token of each prompt and of those
    after it: [B, steps + 1, ...]."""
    session = engine.prefill(
        [row[:n].tolist() for row, n in zip(rows, prompts, strict=True)], chunk=8
    )
    found = [session.next]
    for step in range(steps):
        found.append(
            session.step([int(row[n + step]) for row, n in zip(rows, prompts, strict=True)])
        )
    return tuple(
        torch.stack([getattr(n, name) for n in found], 1) for name in ("logits", "score", "fire")
    )


def behind(prompts, said, steps=STEPS):
    """Of what is said of rows of tokens, the part that `stepped` tells."""
    return [
        torch.stack([row[n - 1 : n + steps] for row, n in zip(t, prompts, strict=True)])
        for t in said
    ]


def same(found, wanted, model, what=""):
    """Logits, scores and decisions are those written out."""
    thresholds = torch.tensor([float(block.gate.threshold) for block in model.each_block()])
    # a score at its threshold would excuse the decision and all that comes
    # after it; these texts have none
    assert not ((wanted[1] - thresholds).abs() <= TOLERANCE[torch.float32]).any()
    assert torch.equal(found[2], wanted[2]), f"decisions {what}"
    close(found[1].double(), wanted[1], f"scores {what}", torch.float32)
    close(found[0].double(), wanted[0], f"logits {what}", torch.float32)


@pytest.mark.parametrize("length", [1, 2, 40])
@pytest.mark.parametrize("name", ALL)
def test_the_forward_is_the_model_written_out(name, length):
    model, wanted = small(name), [t[:, :length] for t in said_of_the_text(name)]
    for how in COMPUTE if model.blocks else COMPUTE[:1]:
        same(read(model, TEXT[:, :length], how), wanted, model, how)


@pytest.mark.parametrize("savings", SAVINGS)
@pytest.mark.parametrize("name", ALL)
def test_every_step_of_the_engine_has_the_logits_scores_and_decisions_of_the_model_written_out(
    name, savings
):
    model, wanted = small(name), said_of_the_text(name)
    engine = Engine(model, SAVINGS[savings])
    same(
        stepped(engine, TEXT, PROMPTS),
        behind(PROMPTS, wanted),
        model,
        "of rows of different lengths",
    )
    same(
        stepped(engine, TEXT[:1], [5]),
        behind([5], [t[:1] for t in wanted]),
        model,
        "of a row by itself",
    )


def test_the_texts_of_these_laws_meet_open_and_closed_gates():
    for name in (n for n in ALL if n.startswith("amor-") and "nogate" not in n):
        fires = said_of_the_text(name)[2].flatten(0, 1).double()
        assert ((fires.mean(0) > 0.15) & (fires.mean(0) < 0.85)).all(), name


# two layers: rounding of many would hide what is looked for
@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("amor-mamba2", "mamba2 x2"),
        ("amor-gated-deltanet", "gated_deltanet x2"),
        ("amor-mamba2-mlp", "attention, mamba2"),
        ("amor-gated-deltanet-prenorm", "gated_deltanet, attention"),
        ("amor-mamba2-prenorm", "mamba2 x2"),
        ("amor-mamba2-final", "mamba2 x2"),
        ("amor-mamba2-once", "mamba2 x2"),
        ("amor-mamba2 untied bare", "mamba2 x2"),
        ("mamba2-fused", "mamba2, fused"),
    ],
)
def test_every_gradient_is_that_of_the_model_written_out(name, pattern):
    model, text = small(name, pattern=pattern), TEXT[:2, :25]
    weights = weights_of(model, learn=True)
    rows = [written_out(model.config, weights, row.tolist())[0] for row in text[:, :-1]]
    loss = F.cross_entropy(torch.cat(rows), text[:, 1:].flatten())
    loss.backward()
    for how in COMPUTE if model.blocks else COMPUTE[:1]:
        model.zero_grad()
        out = model(text[:, :-1], targets=text[:, 1:], options=PassOptions(compute=how))
        out.loss.backward()
        close(out.loss.double(), loss, f"loss {how}", torch.float32)
        for parameter_name, parameter in model.named_parameters():
            wanted = weights[parameter_name].grad
            largest = wanted.abs().max()
            assert largest > 0, f"nothing is learned by {parameter_name}"
            close(
                parameter.grad / largest,
                wanted / largest,
                f"gradient of {parameter_name} {how}",
                torch.float32,
            )


@pytest.mark.parametrize("theta", [10_000.0, 300.0])
def test_queries_and_keys_of_blocks_are_turned_by_the_theta_of_the_config(theta):
    model, text = small("amor-mamba2", pattern="mamba2", **{"blocks.rope_theta": theta}), TEXT[:1]
    wanted = said(model, text)
    same(read(model, text), wanted, model)
    same(stepped(Engine(model), text, [30]), behind([30], wanted), model)


@pytest.mark.parametrize("scale", SCALES)
def test_every_attention_of_the_paper_s_models_has_a_theta_of_ten_thousand(scale):
    for name in NAMES:
        config = amor.preset(name, scale)
        options = [config.mixer_options(kind) for kind in set(config.pattern)]
        assert {
            config.blocks.rope_theta,
            *(o.rope_theta for o in options if hasattr(o, "rope_theta")),
        } == {10_000.0}


@pytest.mark.parametrize("name", ["amor-mamba2", "amor-mamba2-prenorm"])
@torch.no_grad()
def test_a_score_is_the_entropy_of_what_the_head_says_over_log_vocab(name):
    model, read_by_block = small(name), []
    model.norm_f.register_forward_hook(lambda module, args, out: read_by_block.append(out[0]))
    score = model(TEXT[:1]).gates[0].score[0]
    logits = read_by_block[0].double() @ model.embed.weight.double().T
    wanted = torch.tensor([entropy(row) / math.log(211) for row in logits])
    close(score, wanted, "scores")
    assert 0 < wanted.min() < 0.6 < wanted.max() < 1


@torch.no_grad()
def test_a_head_that_finds_every_token_alike_gives_a_score_of_one():
    model = small("amor-mamba2")
    model.embed.weight.copy_(model.embed.weight[:1].expand(211, -1))
    close(read(model, TEXT)[1], torch.ones(3, 40, 3), "forward")
    for savings in SAVINGS.values():
        close(
            stepped(Engine(model, savings), TEXT, PROMPTS)[1], torch.ones(3, STEPS + 1, 3), "steps"
        )


@pytest.mark.parametrize("name", ["amor-mamba2-mlp", "amor-gated-deltanet-prenorm", "mamba2-fused"])
@torch.no_grad()
def test_every_norm_and_scale_weighs_each_channel_by_itself_in_the_forward_and_in_steps(name):
    model, generator = small(name), torch.Generator().manual_seed(3)
    for part, parameter in model.named_parameters():
        if part.endswith(("norm.weight", "norm_f.weight", "_scale", "alpha")):
            parameter.normal_(0.3, 0.7, generator=generator)
    same_in_forward_and_steps(model)


@pytest.mark.parametrize("name", ["mamba2", "gated-deltanet", "mamba2-fused"])
@pytest.mark.parametrize("size", [-8.0, 1.9, 2.1, 6.0, 19.9, 20.1, 100.0])
@torch.no_grad()
def test_steps_of_a_recurrence_may_be_of_any_size_in_the_forward_and_in_decode(name, size):
    model = small(name)
    for part, parameter in model.named_parameters():
        if part.endswith("dt_bias"):
            parameter.fill_(size)
        elif part.endswith("A_log"):
            parameter.fill_(-math.log(max(size, 1)) - 1)
    same_in_forward_and_steps(model)


def same_in_forward_and_steps(model):
    text = TEXT[:1, :9]
    wanted = said(model, text)
    same(read(model, text), wanted, model, "of the forward")
    same(stepped(Engine(model), text, [4], 5), behind([4], wanted, 5), model, "of steps")
