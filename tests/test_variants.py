"""Laws of the variants: what the head is asked, one decision for all blocks, and a gate
that learns what firing saves."""

import pytest
import torch
from laws import close, small, tokens
from safetensors.torch import load_file, save_file
from training import FINAL, GAIN, ONCE, KilledError, Killer, small_recipe, trained
from training import same as same_bits

import amor
from amor.decode.engine import Engine
from amor.gates.base import Evidence
from amor.gates.follower import Follower
from amor.gates.gain import Gain, GainOptions
from amor.gates.override import override_gates
from amor.judge.gates import RecordingGate, force_all, own_gates
from amor.models.evidence import HeadEvidence
from amor.models.gated import PassOptions
from amor.ops import head
from amor.ops.linear import each_alone
from amor.train.loop import train
from amor.train.sample import EVERY, sampled

TEXT = tokens(3, 60, seed=5)
TARGETS = TEXT.roll(-1, 1)
EVERYWHERE = torch.arange(60).expand_as(TEXT)
PROMPT = TEXT[0, :20].tolist()


# --- what the head is asked ---


def counted(model, **more):
    """The forward of TEXT, and how many vectors the head was asked for by each gate."""
    asked = []

    def read(x, *words, **named):
        asked.append(len(x))
        return head.read(x, *words, **named)

    def source(blocks, targets):
        return HeadEvidence(blocks, model.head_weight, targets, read)

    with torch.no_grad():
        options = PassOptions(evidence=source, **more)
        return model(TEXT, options=options), asked


def test_a_gate_that_reads_the_output_s_vector_is_asked_again_only_where_the_block_before_fired():
    model = small("amor-mamba2-final")
    out, asked = counted(model)
    fired = [int(gate.fire.sum()) for gate in out.gates]
    assert asked == [TEXT.numel(), *fired[:2]] and min(fired) > 0 and max(fired) < TEXT.numel() / 2
    assert counted(model, gates=force_all(model, True))[1] == []
    blind = [
        force_all(model, True)[0],
        *own_gates(model)[1:],
    ]  # a gate that asks nothing, then two that do
    seen, asked = counted(model, gates=blind)
    assert asked == [TEXT.numel(), int(seen.gates[1].fire.sum())]


@torch.no_grad()
def test_a_closed_gate_s_reading_is_the_output_s():
    model = small("amor-mamba2-final")
    watched = [RecordingGate(gate, "entropy") for gate in force_all(model, False)]
    out = model(TEXT, options=PassOptions(gates=watched))
    wanted = (
        head.read(out.hidden.flatten(0, 1), model.embed.weight, entropy=True).entropy
        / torch.tensor(211.0).log()
    )
    for gate in watched:
        close(gate.values("entropy", 0).flatten(), wanted)


PASSES = {"amor-mamba2": 1, "amor-mamba2-final": 1, "amor-mamba2-once": 1, "amor-mamba2-gain": 0}
VECTORS = {"amor-mamba2": 4, "amor-mamba2-final": 1, "amor-mamba2-once": 2, "amor-mamba2-gain": 1}


@pytest.mark.parametrize("name", PASSES)
def test_a_step_reads_the_head_once_and_again_only_where_a_gate_that_asked_fired(name):
    """What every variant promises: passes over the head, and for how many vectors."""
    model = small(name)
    session = Engine(model).prefill([PROMPT])
    for fire in (False, True):
        gates = override_gates(own_gates(model), rate=float(fire))
        engine = Engine(model, gates=gates)
        session = engine.resume(session.state)
        before, rows = engine.passes.passes, engine.passes.rows
        assert bool(session.step([7]).fire.all()) == fire
        firings = (
            1 if name.endswith("once") else 3
        )  # decisions that a reading comes before; foresight has yet to learn
        assert engine.passes.passes - before == 1 + fire * PASSES[name] * firings
        if not fire:
            assert engine.passes.rows - rows == VECTORS[name]
            assert model.cost(20, 0.0, heads=VECTORS[name]) == model.cost(20, 0.0)
    assert model.head_passes(0.22) == 1 + 0.22 * PASSES[name]


# --- one decision for all blocks ---


@torch.no_grad()
def test_blocks_that_follow_tell_what_the_first_decided_and_hold_no_numbers():
    model = small("amor-mamba2-once")
    out = model(TEXT)
    for gate in out.gates[1:]:
        assert torch.equal(gate.fire, out.gates[0].fire) and torch.equal(
            gate.score, out.gates[0].score
        )
        assert torch.equal(gate.threshold, out.gates[0].threshold)
    assert {name.split(".")[1] for name, _ in model.named_buffers() if ".gate." in name} == {"0"}
    for words, rate in (("random:0.3", None), (None, 0.1)):
        gates = override_gates(own_gates(model), words, rate)
        assert all(isinstance(gate, Follower) and gate.decider is gates[0] for gate in gates[1:])
        first, *others = model(TEXT, options=PassOptions(gates=gates)).gates
        assert first.fire.any() and all(torch.equal(first.fire, other.fire) for other in others)
        assert all(torch.equal(first.threshold, other.threshold) for other in others)


# --- what firing saves ---


@pytest.mark.parametrize("decide", ["each", "once"])
@torch.no_grad()
def test_a_measured_gain_is_the_loss_with_all_blocks_closed_less_that_with_them_open(decide):
    """One block: exactly, for every token. Three: closed for every
    token, open for those that fired."""
    one = small("amor-mamba2-gain", **{"blocks.count": 1, "blocks.decide": decide})
    found = one(TEXT, targets=TARGETS, options=PassOptions(measure=EVERYWHERE)).measured[0]
    closed, opened = (
        one(TEXT, targets=TARGETS, options=PassOptions(gates=force_all(one, fire))).nll
        for fire in (False, True)
    )
    close(found.value.view_as(TEXT), closed - opened)
    model = small("amor-mamba2-gain", **{"blocks.decide": decide})
    out = model(TEXT, targets=TARGETS, options=PassOptions(measure=EVERYWHERE))
    gain, fire = out.measured[0].value.view_as(TEXT), out.gates[0].fire
    assert [m is not None for m in out.measured] == [True, decide == "each", decide == "each"]
    if decide == "once":
        closed = model(
            TEXT, targets=TARGETS, options=PassOptions(gates=force_all(model, False))
        ).nll
        close(gain[fire], (closed - out.nll)[fire])
    else:
        watched = [RecordingGate(gate, "gain") for gate in own_gates(model)]
        model(TEXT, targets=TARGETS, options=PassOptions(gates=watched))
        for gate, measured in zip(watched, out.measured, strict=True):
            close(measured.value.view_as(TEXT), gate.values("gain", 0))


@torch.no_grad()
def test_a_gain_is_measured_inside_its_own_document_and_not_where_nothing_follows():
    model = small("amor-mamba2-gain")
    reset, targets = torch.zeros_like(TEXT, dtype=torch.bool), TARGETS.clone()
    reset[:, 30], targets[0, 3] = True, head.IGNORE
    measured = model(
        TEXT, targets=targets, reset=reset, options=PassOptions(measure=EVERYWHERE)
    ).measured
    whole = measured[0].value.view_as(TEXT)
    second = (
        model(
            TEXT[:, 30:], targets=targets[:, 30:], options=PassOptions(measure=EVERYWHERE[:, :30])
        )
        .measured[0]
        .value.view(3, 30)
    )
    close(whole[:, 30:], second)
    assert (whole == 0).nonzero().tolist() == [[0, 3]]
    gate = model.each_block()[0].gate
    known = int(gate.measured)
    model.learn(measured)
    assert gate.measured == known + TEXT.numel(), (
        "a token of which nothing is asked is a lesson too: firing saves nothing"
    )


def taught(steps=60, rate=0.25, noise=1.0, **options):
    """A gate of width 16 that was shown gains of 0.3 x_2 - 0.2 x_5 + 0.1, under
    noise; and all that it was shown."""
    generator = torch.Generator().manual_seed(0)
    gate, shown = Gain(16, GainOptions(rate=rate, **options), 0), []
    for _ in range(steps + 1):
        x = 1 + torch.randn(64, 16, generator=generator)
        position = torch.randint(0, 3000, (64,), generator=generator)
        gain = 0.3 * x[:, 2] - 0.2 * x[:, 5] + 0.1 + noise * torch.randn(64, generator=generator)
        gate.observe(gate(Evidence(x, position)).score)
        gate.learn(x, gain)
        shown.append((x.double(), gain.double()))
    return gate, *(torch.cat(one) for one in zip(*shown, strict=True))


def test_the_gain_gate_is_the_ridge_regression_of_all_it_was_shown():
    """As long as every sample counts alike, which is 1 / ema_rate steps."""
    gate, x, gain = taught()
    away, about = x - x.mean(0), gain - gain.mean()
    ridge = away.square().sum() / len(x) / (0.05 * len(x))
    w = torch.linalg.inv(away.T @ away / len(x) + ridge * torch.eye(16)) @ (away.T @ about / len(x))
    close(gate.weight.double(), w, "weights", torch.float32)
    close(gate.bias.double(), gain.mean() - w @ x.mean(0), "bias", torch.float32)
    close(gate.pred_std.double(), (away @ w).std(correction=0), "spread", torch.float32)


def test_the_gain_gate_forgets_what_was_true_long_ago():
    gate, *_ = taught(noise=0.0, explained_variance=1.0, steps=20, ema_rate=0.2)
    for _ in range(40):
        x = torch.randn(64, 16)
        gate.learn(x, x[:, 7])
    assert (
        gate.weight.argmax() == 7
        and abs(float(gate.weight[7]) - 1) < 0.1
        and gate.weight[:7].abs().max() < 0.1
    )


@pytest.mark.parametrize("steps", [0, 2, 4, 30])
def test_the_gain_gate_holds_its_rate_while_it_explores_and_when_it_begins_to_predict(steps):
    gate, *_ = taught(steps, eta=0.1)
    assert bool(gate.pred_std > 0) == (steps >= 3)  # 4 x 64 tokens measured
    x = 1 + torch.randn(4000, 16, generator=torch.Generator().manual_seed(9))
    assert 0.15 < float(gate(Evidence(x, torch.arange(4000))).fire.float().mean()) < 0.35
    other = Gain(16, GainOptions(), 0)
    other.learn(x[:300], torch.zeros(300))
    assert not other.pred_std > 0, "nothing is predicted while firing changes nothing"


def test_the_sample_is_one_of_every_64_columns_whoever_asks():
    whole = sampled(3, 7, range(8), 8, 256)
    assert whole.shape == (8, 4) and torch.equal(whole // EVERY, torch.arange(4).expand(8, 4))
    parts = torch.cat([sampled(3, 7, range(a, b), 8, 256) for a, b in ((0, 3), (3, 6), (6, 8))])
    assert torch.equal(parts, whole)
    assert not torch.equal(sampled(3, 8, range(8), 8, 256), whole) and not torch.equal(
        sampled(4, 7, range(8), 8, 256), whole
    )
    many = torch.cat([sampled(0, step, range(8), 8, 100) for step in range(400)])
    assert many.min() == 0 and many.max() == 99 and set(many[:, 1].tolist()) == set(range(64, 100))


def test_measuring_changes_nothing_that_is_learned():
    model = small("amor-mamba2-gain")
    gradients = []
    for measure in (None, EVERYWHERE):
        model.zero_grad()
        model(TEXT, targets=TARGETS, options=PassOptions(measure=measure)).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


@pytest.mark.parametrize("changes", [FINAL, ONCE, GAIN], ids=["final", "once", "gain"])
def test_a_variant_trains_alike_in_one_batch_in_four_and_after_a_kill(prepared, tmp_path, changes):
    def recipe(micro_batch):
        return small_recipe(
            prepared, changes=changes, batch=8, micro_batch=micro_batch, steps=4, lr={"peak": 5e-4}
        )

    whole, parts = (trained(recipe(m), tmp_path / str(m)) for m in (8, 2))
    for name in whole["weights"]:
        close(parts["weights"][name].float(), whole["weights"][name].float(), name)
    for a, b in zip(whole["metrics"], parts["metrics"], strict=True):
        assert [x["fire"] for x in a.get("blocks", ())] == [x["fire"] for x in b.get("blocks", ())]
        assert all(0.05 < x["fire"] < 0.95 for x in a.get("blocks", ()))
    with pytest.raises(KilledError):
        train(recipe(2), tmp_path / "killed", observers=[Killer(3)])
    same_bits(trained(recipe(2), tmp_path / "killed"), parts)
    if changes is GAIN:
        assert (
            whole["weights"]["blocks.0.gate.pred_std"] > 0
            and int(whole["weights"]["blocks.0.gate.measured"]) == 4 * 8
        )


def test_a_prediction_of_gain_has_the_same_bits_alone_and_beside_others():
    gate = Gain(256, GainOptions(), 0)
    gate.weight.copy_(torch.randn(256, generator=torch.Generator().manual_seed(1)))
    gate.pred_std.fill_(1.0)
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(2))
    with each_alone():
        together = gate(Evidence(x, torch.arange(4))).score
        alone = torch.cat(
            [
                gate(Evidence(x[row : row + 1], torch.arange(4)[row : row + 1])).score
                for row in range(4)
            ]
        )
    assert torch.equal(together, alone)


def test_a_seed_of_any_size_chooses_a_sample():
    wide = sampled(2**53 - 1, 3, range(2), 4, 130)
    assert (
        torch.equal(wide, sampled((2**53 - 1) & 0xFFFFFFFF, 3, range(2), 4, 130))
        and int(wide.max()) < 130
    )


def test_options_and_buffers_under_their_old_names_are_refused_with_the_new_ones(tmp_path):
    for old, new in {"pace": "ema_rate", "foreseen": "explained_variance"}.items():
        with pytest.raises(amor.AmorError, match=f"gate gain: {old} is now {new}"):
            amor.preset("amor-mamba2-gain", "tiny", **{f"blocks.gate_options.{old}": 0.5})
    amor.save(small("amor-mamba2-gain"), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["blocks.0.gate.doubt"] = tensors.pop("blocks.0.gate.inv_effective_n")
    save_file(tensors, path)
    with pytest.raises(
        amor.AmorError, match=r"tensor blocks.0.gate.doubt is now blocks.0.gate.inv_effective_n"
    ):
        amor.load(tmp_path)
