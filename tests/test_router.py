"""Routers: a network that predicts a gate's score, fitted to a trained
model or learned next to it."""

import copy
import json

import pytest
import torch
from laws import close, small, tokens
from training import corpus, small_recipe

import amor
from amor.cli import main
from amor.decode.scores import Scorers
from amor.errors import AmorError
from amor.gates.base import Evidence
from amor.gates.router import Router, RouterOptions
from amor.judge.gates import ForcedGate, RecordingGate, own_gates
from amor.models.gated import PassOptions
from amor.models.measure import Measured
from amor.train.loop import train

WIDTH = 64


def router(**options) -> Router:
    gate = Router(WIDTH, RouterOptions(**options), 0)
    gate.start_statistics()
    return gate


def sample(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors and a score that no linear map finds: the size of a channel."""
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x, 0.3 + 0.2 * x[:, 0].abs() + 0.05 * x[:, 2]


def test_the_network_is_a_hidden_layer_and_a_linear_skip():
    gate = router(hidden=8)
    with torch.no_grad():
        for t in gate.network():
            t.normal_(generator=torch.Generator().manual_seed(int(t.numel())))
    x = torch.randn(5, WIDTH)
    hidden = x @ gate.fc1_weight.T + gate.fc1_bias
    expected = (
        (hidden * hidden.sigmoid()) @ gate.fc2_weight[0] + x @ gate.skip_weight[0] + gate.fc2_bias
    )
    close(gate.predict(x), expected)
    linear = router(hidden=0)
    linear.skip_weight.copy_(gate.skip_weight)
    close(linear.predict(x), x @ gate.skip_weight[0])


@pytest.mark.parametrize("hidden", [0, 8, 33])
@torch.no_grad()
def test_the_compiled_score_is_the_forward(hidden):
    gate = router(hidden=hidden, explore=1)
    for t in gate.network():
        t.normal_(generator=torch.Generator().manual_seed(int(t.numel()) + 1))
    gate.measured.fill_(1)
    gate.observe(torch.randn(100))
    x, score = torch.randn(7, WIDTH), torch.empty(7, 1)
    compiled = Scorers()(gate, WIDTH)
    assert compiled is not None
    compiled([x, score])
    close(score[:, 0], gate(Evidence(x, torch.arange(7))).score)


def test_learning_next_to_the_model_finds_what_a_linear_map_cannot():
    gate, line = router(hidden=64, lr=3e-3), router(hidden=0, lr=3e-3)
    for step in range(600):
        for one in (gate, line):
            one.learn(*sample(256, step))
    x, value = sample(4096, 10_000)
    error = [float((one.predict(x) - value).square().mean()) for one in (gate, line)]
    assert error[0] < 0.5 * error[1], error


@torch.no_grad()
def test_it_is_random_until_it_has_measured_enough_and_then_decides_by_its_own_quantiles():
    gate = router(explore=500, rate=0.25)
    x, value = sample(300)
    gate.observe(torch.rand(1000))
    gate.learn(x, value)
    seen = Evidence(x, torch.arange(300))
    assert not gate.settled() and not torch.equal(gate(seen).score, gate.predict(x))
    gate.learn(x, value)
    assert gate.settled() and torch.equal(gate(seen).score, gate.predict(x))
    assert float(gate(seen).fire.float().mean()) == pytest.approx(0.25, abs=0.02)


@torch.no_grad()
@pytest.mark.parametrize("target", ["entropy", "gain"])
def test_a_router_is_taught_what_it_is_to_predict(target):
    model = small("amor-mamba2-router", **{"blocks.gate_options": {"target": target, "hidden": 16}})
    text = tokens(2, 40)
    columns = torch.arange(40).expand(2, -1)
    measured = model(text, targets=text.roll(-1, 1), options=PassOptions(measure=columns)).measured
    assert all(isinstance(one, Measured) for one in measured)
    other = small("amor-mamba2")
    other.load_state_dict(
        {k: v for k, v in model.state_dict().items() if ".gate." not in k}, strict=False
    )
    fire = [gate.fire for gate in model(text).gates]
    watched = [RecordingGate(ForcedGate(one), target) for one in fire]
    other(text, targets=text.roll(-1, 1), options=PassOptions(gates=watched))
    for one, gate in zip(measured, watched, strict=True):
        close(one.value.view(2, 40), gate.values(target, 0))


def test_a_router_asks_the_head_for_nothing_and_says_what_it_costs():
    model = small("amor-mamba2-router")
    assert all(not block.gate.needs for block in model.each_block()) and model.probes() == 0
    gate = model.each_block()[0].gate
    assert gate.cost().weights == 512 * 64 + 512 + 512 + 1 + 64


def test_the_statistics_of_the_gate_it_replaced_come_back():
    native, gate = small("amor-mamba2").each_block()[1].gate, router(hidden=4)
    gate.remember(native)
    fresh = copy.deepcopy(native)
    for buffer in fresh.buffers():
        buffer.zero_()
    gate.restore(fresh)
    for name, buffer in native.named_buffers():
        assert torch.equal(buffer, dict(fresh.named_buffers())[name]), name


def test_a_router_that_was_fitted_without_text_refuses_a_rate():
    gate = router()
    gate.mu.fill_(0.4), gate.updates.fill_(1)
    with pytest.raises(AmorError, match="calibrate"):
        gate.aim(0.2)


def test_a_router_survives_saving_and_loading(tmp_path):
    model = small("amor-mamba2-router")
    amor.save(model, tmp_path / "model")
    again, _ = amor.load(tmp_path / "model")
    text = tokens(2, 30)
    for a, b in zip(model(text).gates, again(text).gates, strict=True):
        assert torch.equal(a.score, b.score) and torch.equal(a.fire, b.fire)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small text, and a model trained on it for a few steps, its attention worth something."""
    folder = tmp_path_factory.mktemp("fit")
    data = corpus(folder)
    train(small_recipe(data, steps=60, context=48, batch=8, micro_batch=8), folder / "run")
    return data, folder / "run"


def fitted(capsys, *words: str) -> dict:
    assert main(["fit", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


SHORT = ("--tokens", "6000", "--windows", "8")


@pytest.mark.parametrize("target", ["entropy", "gain"])
def test_fit_writes_a_model_whose_routers_decide_and_whose_weights_are_the_same(
    target, trained, tmp_path, capsys
):
    data, run = trained
    rate = ("--fire-rate", "0.3") if target == "gain" else ()
    report = fitted(
        capsys,
        run,
        "--data",
        data,
        "--out",
        tmp_path / "m",
        "--target",
        target,
        "--hidden",
        32,
        *rate,
        *SHORT,
    )
    before, after = amor.load(run)[0], amor.load(tmp_path / "m")[0]
    for name, t in before.state_dict().items():
        if ".gate." not in name:
            assert torch.equal(t, after.state_dict()[name]), name
    assert [type(gate.decider) for gate in own_gates(after)] == [Router] * 3 and after.probes() == 0
    assert [choice["name"] for choice in report["choices"]["choices"]].count("this router") == 1
    decided, networks = report["decisions"], report["networks"]
    assert all(network["explained"] >= network["explained_linear"] for network in networks)
    if target == "entropy":
        assert all(one["agreement"] > 0.75 for one in decided), decided
        bins = decided[0]["calibration"]
        assert (
            bins[-1]["measured"] - bins[0]["measured"]
            > 0.5 * (bins[-1]["predicted"] - bins[0]["predicted"])
            > 0
        )
    else:
        assert all(one["router_rate"] == pytest.approx(0.3, abs=0.15) for one in decided), decided


def test_a_router_can_be_detached_again(trained, tmp_path, capsys):
    data, run = trained
    fitted(
        capsys, run, "--data", data, "--out", tmp_path / "m", "--hidden", 8, "--no-frontier", *SHORT
    )
    fitted(capsys, tmp_path / "m", "--out", tmp_path / "native", "--detach")
    native, again = amor.load(run)[0], amor.load(tmp_path / "native")[0]
    text = torch.randint(0, 200, (2, 60))
    for a, b in zip(native(text).gates, again(text).gates, strict=True):
        assert torch.equal(a.fire, b.fire)
    assert main(["fit", str(run), "--out", str(tmp_path / "x"), "--detach"]) == 2


def test_quantiles_are_stored_without_moving_the_threshold(trained, tmp_path, capsys):
    data, run = trained
    model, tokenizer = amor.load(run)
    for gate in own_gates(model):
        gate.quantiles.zero_()
    amor.save(model, tmp_path / "bare", tokenizer)
    assert main(["trace", str(tmp_path / "bare"), "--text", "abc", "--fire-rate", "0.2"]) == 2
    assert "amor fit" in capsys.readouterr().err
    fitted(
        capsys, tmp_path / "bare", "--data", data, "--out", tmp_path / "ready", "--target", "none"
    )
    ready = amor.load(tmp_path / "ready")[0]
    for a, b in zip(own_gates(model), own_gates(ready), strict=True):
        assert torch.equal(a.threshold, b.threshold)
        b.aim(0.2)
    assert main(["trace", str(tmp_path / "ready"), "--text", "abc", "--fire-rate", "0.2"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hidden", "-1"), "--hidden"),
        (("--fire-rate", "2"), "--fire-rate"),
        (("--tokens", "0"), "--tokens"),
        (("--data", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_fitted_is_said_in_one_line(words, message, trained, tmp_path, capsys):
    data, run = trained
    assert main(["fit", str(run), "--data", str(data), "--out", str(tmp_path / "m"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error
