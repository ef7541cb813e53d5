"""The laws of the whole model and of AMOR: one forward, exact states,
attention only where it fires."""

import pytest
import torch
from laws import VARIED, Largest, close, small, tokens

import amor
from amor import registry
from amor.gates.base import Gate, Verdict
from amor.judge.check import check
from amor.models.gated import PassOptions
from amor.ops import head
from amor.presets import ABLATION_NAMES, NAMES, more_names

ALL = (
    *NAMES,
    *ABLATION_NAMES,
    *VARIED,
    *more_names(),
)  # blocks do not know their backbone: ablations on two of them
AMORS = [name for name in ALL if name.startswith("amor-")]


@pytest.mark.parametrize("name", ALL)
def test_however_tokens_are_fed_the_model_says_the_same(name):
    findings = check(small(name), length=70, rows=3)
    assert all(f.ok for f in findings), [f for f in findings if not f.ok]
    assert (
        sum(f.ties for f in findings) == 0
    )  # a tie would excuse differences; these seeds have none


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_a_stirred_model_has_nothing_uniform_and_predicts_more_than_the_token_it_reads(name):
    """What the laws compare must be able to differ: a norm of ones hides
    that its weights are not used."""
    model, text = small(name), tokens(4, 60)
    for part, parameter in model.named_parameters():
        assert parameter.std() > 0.1 * parameter.abs().mean(), f"{part} is nearly uniform"
    steps = torch.cat(
        [torch.zeros(0), *(p for n, p in model.named_parameters() if n.endswith("dt_bias"))]
    )
    if len(steps):  # softplus is curved below 2 or so, and computed as a straight line from 20 on
        assert steps.min() < -2 and ((steps > 0) & (steps < 20)).any() and (steps > 20).any()
    out = model(text)
    assert (model.logits(out.hidden).argmax(-1) == text).float().mean() < 0.2
    least = 0.1 if name.endswith("gain") else 0.2  # that one aims at 0.22
    assert name.endswith("nogate") or all(
        least < gate.fire.float().mean() < 0.6 for gate in out.gates
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_mean_over_targets_and_its_gradient_that_of_dense_logits(name):
    model, text = small(name), tokens(2, 30)
    goal = text.roll(-1, 1)
    goal[0, 5:9] = head.IGNORE
    out = model(text, targets=goal)
    out.loss.backward()
    sparse = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits = model.logits(model(text).hidden)
    dense = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), goal.flatten(), ignore_index=head.IGNORE
    )
    dense.backward()
    close(out.loss, dense, "loss")
    for n, p in model.named_parameters():
        if p.grad is not None:
            close(sparse[n], p.grad, n)


@pytest.mark.parametrize("name", ["amor-mamba2", "mamba2"])
def test_nothing_of_tokens_times_vocabulary_is_made_unless_logits_are_asked_for(name):
    vocab, columns = 100_000, 600
    model, text = small(name, vocab=vocab, pattern=["mamba2"]), tokens(1, columns, vocab=vocab)
    with Largest() as largest:
        model(text, targets=text).loss.backward()
    assert vocab * 64 <= largest.numel < 0.7 * columns * vocab


def backbone_of(model, name):
    """The same weights without blocks."""
    twin = small(name.split("-", 1)[1], **{})
    weights = model.state_dict()
    twin.load_state_dict({k: weights[k] for k in twin.state_dict()})
    return twin


@pytest.mark.parametrize("name", ["amor-mamba2", "amor-gated-deltanet"])
@torch.no_grad()
def test_a_gate_that_never_fires_leaves_the_backbone_untouched(name):
    model, text = small(name, **{"blocks.gate": "never"}), tokens(2, 70)
    residuals = []
    model.final_norm.register_forward_hook(lambda module, args, out: residuals.append(args[0]))
    model(text)
    assert torch.equal(residuals[0], backbone_of(model, name)(text).hidden)


@torch.no_grad()
def test_without_a_final_norm_closed_gates_say_what_the_backbone_says_to_the_bit():
    model, text = small("amor-mamba2 untied bare", **{"blocks.gate": "never"}), tokens(2, 70)
    backbone = small("mamba2 untied")
    backbone.load_state_dict({name: model.state_dict()[name] for name in backbone.state_dict()})
    assert torch.equal(model.logits(model(text).hidden), backbone.logits(backbone(text).hidden))


@torch.no_grad()
def test_an_untied_head_is_what_is_read_and_an_adapter_on_it_is_refused():
    model, text = small("amor-mamba2 untied"), tokens(2, 30)
    before = model(text, targets=text)
    model.head.weight.copy_(model.head.weight.flip(0))
    after = model(text, targets=text)
    assert (after.nll - before.nll).abs().max() > 0.1
    close(
        after.gates[0].score, before.gates[0].score
    )  # the entropy does not mind which token is which
    model.embed.weight.copy_(model.embed.weight.flip(0))
    assert not torch.allclose(model(text).gates[0].score, before.gates[0].score)
    model.head = torch.nn.Sequential(model.head)
    with pytest.raises(amor.AmorError, match="leave `head` out"):
        model(text)


@pytest.mark.parametrize("name", AMORS)
@torch.no_grad()
def test_at_init_the_residual_after_the_blocks_is_the_backbones_to_the_bit(name):
    model = small(name)
    from amor.models.build import closed_start

    before, after = [], []
    for block in model.each_block():
        closed_start(block)
    model.backbone.register_forward_hook(lambda module, args, out: before.append(out[0]))
    if model.final_norm is not None:
        model.final_norm.register_forward_hook(lambda module, args, out: after.append(args[0]))
    out = model(tokens(2, 70))
    after = after or [out.hidden]
    assert all(gate.fire.any() for gate in out.gates)
    assert torch.equal(
        after[-1], before[0] if "prenorm" in name else model.norm_f(before[0])
    )  # gates may have asked it before


@pytest.mark.parametrize("name", AMORS)
@torch.no_grad()
def test_block_0_reads_what_norm_f_gives_and_prenorm_alone_leaves_the_residual_unnormed(name):
    model, raw, met = small(name), [], []
    model.backbone.register_forward_hook(lambda module, args, out: raw.append(out[0]))
    model.each_block()[0].register_forward_pre_hook(lambda module, args: met.append(args[:2]))
    model(tokens(2, 20))
    (residual, read), normed = met[0], model.norm_f(raw[0])
    assert torch.equal(read, normed)
    assert torch.equal(residual, raw[0] if "prenorm" in name else normed)


def test_a_fresh_model_has_the_paper_s_first_weights():
    model = amor.build(amor.preset("amor-mamba2", "tiny"))
    block, mixer = model.blocks[1], model.backbone.layers[0].mixer
    assert not block.attention.o_proj.weight.any() and torch.equal(
        block.alpha.sigmoid(), torch.full((256,), 0.5)
    )
    for weight in (
        model.embed.weight,
        mixer.in_proj.weight,
        mixer.conv1d.weight,
        block.attention.q_proj.weight,
    ):
        assert abs(weight.std().item() - 0.02) < 0.002
    dt = torch.nn.functional.softplus(mixer.dt_bias)
    assert (dt >= 1e-4 * 0.999).all() and (dt <= 0.1 * 1.001).all()
    close(mixer.A_log.exp(), torch.arange(1.0, 9.0))
    assert torch.equal(mixer.D, torch.ones(8)) and torch.equal(model.norm_f.weight, torch.ones(256))
    again = amor.build(amor.preset("amor-mamba2", "tiny"))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_init_std_is_that_of_first_weights_and_of_nothing_else():
    paper, wider = (
        dict(amor.build(amor.preset("amor-mamba2", "tiny", init_std=s)).named_parameters())
        for s in (0.02, 0.06)
    )
    drawn = ("embed.", "proj.weight", "conv1d.weight")
    for name, weight in paper.items():
        factor = 3 if any(part in name for part in drawn) else 1
        torch.testing.assert_close(wider[name], factor * weight, rtol=1e-6, atol=0)
    with pytest.raises(amor.AmorError, match="init_std"):
        amor.preset("mamba2", "tiny", init_std=0.0)


@torch.no_grad()
def test_gates_and_the_backbone_s_residual_are_handed_in_as_values():
    model, text = small("amor-mamba2"), tokens(2, 30)
    own = model(text)
    never = [registry.find("gates", "never")(64, None, k) for k in range(3)]
    closed = model(text, options=PassOptions(gates=never, residual=own.residual))
    assert own.gates[0].fire.any() and not any(g.fire.any() for g in closed.gates)
    assert torch.equal(closed.hidden, model(text, options=PassOptions(gates=never)).hidden)
    assert torch.equal(model(text, options=PassOptions(residual=own.residual)).hidden, own.hidden)
    assert torch.equal(model(text).hidden, own.hidden), "the model's own gates are untouched"
    with pytest.raises(amor.AmorError, match="full_with_mask"):
        model(text, options=PassOptions(compute="full_with_maks"))


@pytest.mark.parametrize("name", AMORS)
def test_computing_only_fired_queries_equals_computing_all_and_masking(name):
    model, text = small(name), tokens(3, 70)
    valid = torch.arange(70) < torch.tensor([70, 20, 1])[:, None]

    def outcome(compute):
        model.zero_grad()
        first = model(text[:, :40], valid=valid[:, :40], options=PassOptions(compute=compute))
        out = model(
            text[:, 40:], first.state, valid=valid[:, 40:], options=PassOptions(compute=compute)
        )
        (out.hidden.square().sum() + first.hidden.square().sum()).backward()
        return (
            first,
            out,
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        )

    first, out, grads = outcome("full_with_mask")
    first2, out2, grads2 = outcome("true_sparse")
    rate = first.gates[0].fire.float().mean()
    assert rate > 0
    close(first2.hidden, first.hidden)
    close(out2.hidden, out.hidden)
    for n, grad in grads.items():
        close(grads2[n], grad, n)


def test_a_batch_on_which_nothing_fires_gives_a_gradient_of_nothing_not_none():
    # AdamW passes over a parameter without a gradient: its moments would stand still
    model = small("amor-mamba2", **{"blocks.gate": "never"})
    model(tokens(2, 30)).hidden.square().sum().backward()
    for block in model.each_block():
        for parameter in (
            block.alpha,
            block.attention.q_proj.weight,
            block.attention.o_proj.weight,
        ):
            assert parameter.grad is not None and not parameter.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_another_type_learns_through_fired_queries(dtype):
    model = small("amor-mamba2").to(dtype)
    out = model(tokens(2, 40))
    assert 0 < out.gates[0].fire.float().mean() < 1
    out.hidden.float().square().sum().backward()
    assert model.each_block()[0].attention.q_proj.weight.grad.dtype == dtype


def test_training_computes_no_query_where_the_gate_is_closed():
    model, seen = small("amor-mamba2"), []
    block = model.each_block()[0]
    block.attention.q_proj.register_forward_hook(
        lambda module, args, out: seen.append(args[0][..., 0].numel())
    )
    out = model(tokens(3, 70))
    assert seen == [int(out.gates[0].fire.sum())] and 0 < seen[0] < 3 * 70


@torch.no_grad()
def test_always_is_the_ungated_hybrid():
    model, text = small("amor-mamba2", **{"blocks.gate": "always"}), tokens(2, 50)
    h = backbone_of(model, "amor-mamba2")(text).hidden
    for index, block in enumerate(model.each_block()):
        x = model.norms.column(index, h)
        layout = model.start(2).layout(50, None, None)
        a, _ = block.attention(x, block.start(2, x.device, x.dtype), layout)
        h = h + block.alpha.sigmoid() * a
    close(model(text).hidden, model.final_norm(h))


def test_queries_learn_only_where_the_gate_fires_keys_wherever_a_later_query_looks():
    model, text = small("amor-mamba2", **{"blocks.count": 1}), tokens(1, 40)
    block = model.each_block()[0]
    seen = {}

    def keep(name):
        def hook(module, args, out):
            out.retain_grad()
            seen[name] = out

        return hook

    for name in ("q_proj", "k_proj", "o_proj"):
        getattr(block.attention, name).register_forward_hook(keep(name))
    out = model(text, options=PassOptions(compute="full_with_mask"))
    out.hidden.sum().backward()
    fire = out.gates[0].fire[0]
    assert fire.any() and not fire.all()
    assert torch.equal(seen["q_proj"].grad[0].abs().sum(-1) > 0, fire)
    assert torch.equal(seen["o_proj"].grad[0].abs().sum(-1) > 0, fire)
    last = int(fire.nonzero().max())
    assert (seen["k_proj"].grad[0, : last + 1].abs().sum(-1) > 0).all()
    assert not seen["k_proj"].grad[0, last + 1 :].any()


class Told(Gate):
    """Decides as it is told."""

    def __init__(self, fire):
        super().__init__(0, None, 0)
        self.fire = fire

    def forward(self, evidence):
        return Verdict(self.fire, self.fire.float())


@pytest.mark.parametrize("kind", ["entropy", "margin", "learned"])
def test_the_gate_sends_no_gradient_into_the_backbone(kind):
    """All but the gate itself learn what they would learn if its
    decisions had been given as numbers."""
    model, text = small("amor-mamba2", **{"blocks.gate": kind}), tokens(2, 30)

    def gradients():
        model.zero_grad()
        out = model(text, targets=text.roll(-1, 1))
        out.loss.backward()
        return out, {n: p.grad.clone() for n, p in model.named_parameters() if ".gate." not in n}

    for block in model.each_block():
        block.compute = "full_with_mask"  # as a gate that learns has it
    out, own = gradients()
    assert all(0 < gate.fire.float().mean() < 1 for gate in out.gates)
    for block, gate in zip(model.each_block(), out.gates, strict=True):
        block.gate = Told(gate.fire)
    _, told = gradients()
    for name, grad in told.items():
        assert grad.any(), f"{name} learns nothing"
        close(own[name] / grad.abs().max(), grad / grad.abs().max(), name)


@torch.no_grad()
def test_a_forward_changes_no_statistic():
    model = small("amor-mamba2").train()
    before = {n: b.clone() for n, b in model.named_buffers()}
    model(tokens(2, 30), targets=tokens(2, 30))
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


@torch.no_grad()
def test_a_skipped_query_costs_nothing():
    """A saving is claimed only for work that was not done: with a closed gate
    W_Q and W_O are never called."""
    model, text = small("amor-mamba2", **{"blocks.gate": "never"}), tokens(2, 20)
    calls = []
    for block in model.each_block():
        for name in ("q_proj", "o_proj", "k_proj"):
            getattr(block.attention, name).register_forward_hook(
                lambda *_, name=name: calls.append(name)
            )
    model(text)
    assert calls == ["k_proj"] * 3


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_keeping_the_last_token_only_changes_nothing_about_it(name):
    model, text = small(name), tokens(3, 20)
    valid = torch.arange(20) < torch.tensor([20, 7, 1])[:, None]
    whole, last = model(text, valid=valid), model(text, valid=valid, keep="last")
    for row, length in enumerate((20, 7, 1)):
        close(last.hidden[row, 0], whole.hidden[row, length - 1])
        for k, gate in enumerate(last.gates):
            column = slice(0, 1) if k == len(last.gates) - 1 else slice(None)
            full = (
                whole.gates[k].fire[row, length - 1 : length]
                if k == len(last.gates) - 1
                else whole.gates[k].fire[row]
            )
            assert torch.equal(gate.fire[row, column], full)


@torch.no_grad()
def test_whoever_watches_the_last_attention_sees_it_run_though_only_the_last_token_is_kept():
    model, text, seen = small("transformer"), tokens(2, 9), []
    plain = model(text, keep="last")
    watch = model.backbone.layers[-1].mixer.register_forward_hook(
        lambda _, __, out: seen.append(out[0].shape)
    )
    watched = model(text, keep="last")
    watch.remove()
    assert seen == [(2, 9, model.config.width)]
    close(watched.hidden, plain.hidden)
    close(watched.state.parts[-1]["kv"].k, plain.state.parts[-1]["kv"].k)


@pytest.mark.parametrize("context", [5, 60])
@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_declared_state_bytes_are_those_held(name, context):
    model = small(name)
    assert model(tokens(1, context)).state.nbytes == model.cost(context).state_held
    probes = sum(1 for block in model.each_block() if block.gate.needs)
    every = sum(p.numel() for p in model.parameters()) - (
        0 if model.head is None else model.embed.weight.numel()
    )
    every += sum(block.gate.cost().weights for block in model.each_block())  # routers are buffers
    assert (
        model.cost(context).weights - every == 211 * 64 * probes
    )  # of an embedding that is no head a token reads one row
    assert (probes == 3) == (
        name
        in [n for n in AMORS if not n.endswith(("classic", "nogate", "once", "gain", "router"))]
    )


def test_wrong_calls_are_refused_with_a_reason():
    model = small("mamba2")
    with pytest.raises(amor.AmorError, match="no tokens"):
        model(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(amor.AmorError, match="3 rows of tokens, but the state holds 2"):
        model(tokens(3, 4), model(tokens(2, 4)).state)
    with pytest.raises(amor.AmorError, match="one mark per token"):
        model(tokens(2, 4), valid=torch.ones(2, 3))
