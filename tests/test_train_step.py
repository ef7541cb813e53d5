"""Laws of one optimiser step: micro-batches, gate statistics, spikes, and
numbers that are not finite."""

import json

import pytest
import torch
from laws import close
from training import GAIN, ONCE, QUICK, KilledError, Killer, Watch, same, small_recipe, trained

import amor
from amor.data.loader import Batches
from amor.data.shards import Shards
from amor.errors import AmorError
from amor.judge.evaluate import evaluate
from amor.judge.randomise import randomise_for_test
from amor.judge.windows import BatchWindows
from amor.models.build import build
from amor.train.distributed import World
from amor.train.loop import train
from amor.train.optim import adamw, groups
from amor.train.step import MicroBatchStats, Stepper, check_precision
from amor.train.trouble import ENOUGH, Spikes

CPU = torch.device("cpu")


def stepper(data, **keys):
    """A stepper outside of any run, its data in hand."""
    recipe = small_recipe(data, **keys)
    model = build(recipe.config(), recipe.seed)
    optimizer = adamw(groups(model, recipe.optimiser, recipe.lr), recipe.optimiser)
    source = Batches(Shards.open(data / "train"), recipe.context, recipe.batch, recipe.seed)
    return Stepper(model, optimizer, recipe, source, World(CPU), 256)


def buffers(model):
    return {name: t.clone() for name, t in model.named_buffers()}


def other_text(data):
    """Eight windows that are not trained on."""
    return Batches(Shards.open(data / "valid"), 24, 8, 1)


def fired(folder, data):
    """What the gates of a trained model decide on other tokens."""
    model, _ = amor.load(folder)
    tokens, _ = other_text(data).rows(0, 0, 8)
    return torch.stack([g.fire for g in model(tokens).gates])


def test_four_micro_batches_are_one_large_batch(prepared, tmp_path):
    whole, parts = (
        trained(
            small_recipe(prepared, batch=16, micro_batch=m, lr={"peak": 5e-4}), tmp_path / str(m)
        )
        for m in (16, 4)
    )
    for name in whole["weights"]:
        close(parts["weights"][name].float(), whole["weights"][name].float(), name)
    for a, b in zip(whole["metrics"], parts["metrics"]):
        assert b.get("loss", 0) == pytest.approx(a.get("loss", 0), rel=1e-5)
        assert [x["fire"] for x in a.get("blocks", ())] == [x["fire"] for x in b.get("blocks", ())]
    rates = [x["fire"] for x in whole["metrics"][-2]["blocks"]]
    assert all(
        0.1 < r < 0.9 for r in rates
    )  # gates that fire now and then, or the law says nothing
    assert torch.equal(
        fired(tmp_path / "16/latest", prepared), fired(tmp_path / "4/latest", prepared)
    )


class Half(World):
    """One of two ranks, without the other: each has as many targets, and
    gradients are summed by the law."""

    def __init__(self, rank):
        super().__init__(CPU)
        self.rank, self.size = rank, 2

    def sum(self, t):
        return 2 * t


def gradients(data, micro_batch, world=None):
    """Loss and gradients of one step of 8 sequences, and how it was cut."""
    s = stepper(data, batch=8, micro_batch=micro_batch)
    randomise_for_test(s.model)  # weights all of which learn, and gates that have met data
    if world is not None:
        s.world, (s.first, s.last) = world, world.local_rows(8)
    pieces = list(s.micro_batches(0))
    tally = s.forward_backward(pieces)
    found = {name: p.grad for name, p in s.model.named_parameters()}
    return found | {"loss": tally.loss.float()}, [len(p.tokens) for p in pieces]


def test_uneven_micro_batches_have_the_gradients_of_one_large_batch(prepared):
    whole, _ = gradients(prepared, 8)
    for micro_batch, sizes in ((3, [3, 3, 2]), (5, [5, 3]), (7, [7, 1])):
        parts, cut = gradients(prepared, micro_batch)
        assert cut == sizes
        for name, wanted in whole.items():
            close(parts[name] / wanted.abs().max(), wanted / wanted.abs().max(), f"{name}, {sizes}")


def test_uneven_micro_batches_of_two_ranks_sum_to_the_gradients_of_one_large_batch(prepared):
    whole, _ = gradients(prepared, 8)
    (one, cut), (other, _) = (gradients(prepared, 3, Half(rank)) for rank in range(2))
    assert cut == [3, 1]
    for name, wanted in whole.items():
        close((one[name] + other[name]) / wanted.abs().max(), wanted / wanted.abs().max(), name)


def test_the_threshold_is_the_same_to_the_bit_however_the_batch_is_cut(prepared):
    first = [stepper(prepared, batch=16, micro_batch=m) for m in (16, 4, 3)]
    for s in first:
        s(0)
    for other in first[1:]:
        for name, t in buffers(first[0].model).items():
            assert torch.equal(t, buffers(other.model)[name]), name


def test_a_gate_learns_the_same_to_the_bit_in_whatever_order_scores_come(prepared):
    a, b = stepper(prepared), stepper(prepared)
    scores = torch.rand(3, 1000, generator=torch.Generator().manual_seed(0))
    mixed = scores[:, torch.randperm(1000, generator=torch.Generator().manual_seed(1))]
    for _ in range(2):
        a.model.observe(list(scores))
        b.model.observe(a_pooled(b, mixed))
    for name, t in buffers(a.model).items():
        assert torch.equal(t, buffers(b.model)[name]), name


def a_pooled(s, scores):
    """Scores as a step pools them, from micro-batches of uneven size."""
    tally = MicroBatchStats(s.zero(), [list(row.split([7, 493, 500])) for row in scores], [])
    return s.gather_scores(tally)


def test_the_first_step_decides_with_the_statistics_of_its_own_batch_and_takes_them_in_once(
    prepared,
):
    s = stepper(prepared)
    found = s(0)
    seen = buffers(s.model)
    scores = [
        g.score.flatten() for g in stepper(prepared).read(next(iter(s.micro_batches(0))), 1.0).gates
    ]
    for k, block in enumerate(found.blocks):
        assert int(seen[f"blocks.{k}.gate.updates"]) == 1
        assert block.mu == float(seen[f"blocks.{k}.gate.mu"]) == float(scores[k].median())
        assert (
            block.fire == float((scores[k] > block.tau).double().mean()) and 0.2 < block.fire < 0.6
        )


def test_a_step_decides_with_the_statistics_from_before_it_and_then_takes_in_its_own(prepared):
    s = stepper(prepared)
    s(0)
    before = buffers(s.model)
    with torch.no_grad():
        scores = [g.score.flatten() for g in s.read(next(iter(s.micro_batches(1))), 1.0).gates]
    found = s(1)
    after = buffers(s.model)
    for k, block in enumerate(found.blocks):
        mu = before[f"blocks.{k}.gate.mu"]
        assert block.mu == float(mu)
        assert block.fire == float((scores[k] > block.tau).double().mean())
        close(after[f"blocks.{k}.gate.mu"], torch.lerp(mu, scores[k].median(), 0.5))
        assert int(after[f"blocks.{k}.gate.updates"]) == 2


@pytest.mark.parametrize("changes", [QUICK, ONCE, GAIN], ids=["entropy", "once", "gain"])
def test_in_open_steps_blocks_fire_everywhere_and_gates_learn_what_they_will_decide_with(
    prepared, changes
):
    s = stepper(prepared, changes=changes, open_steps=3)
    dense = stepper(prepared, changes={"blocks.gate": "always"})
    for step in range(3):
        found, all_fire = s(step), dense(step)
        assert [block.fire for block in found.blocks] == [1.0] * 3 and found.loss == all_fire.loss
    weights = dict(dense.model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in s.model.named_parameters())
    gate = s.model.blocks[0].gate
    assert int(gate.updates) == 3 and (changes is not GAIN or int(gate.measured) == 3 * 4)
    threshold, found = float(gate.threshold), s(3)
    assert found.blocks[0].tau == threshold and all(
        0.05 < block.fire < 0.95 for block in found.blocks
    )


def test_a_run_goes_on_to_the_same_bits_where_gates_begin_to_decide(prepared, tmp_path):
    recipe = small_recipe(prepared, changes=GAIN, open_steps=3)
    with pytest.raises(KilledError):
        train(recipe, tmp_path / "killed", observers=[Killer(3)])
    same(trained(recipe, tmp_path / "killed"), trained(recipe, tmp_path / "whole"))


@pytest.mark.parametrize("steps", [0, 1])
def test_evaluation_changes_no_gate_statistic_and_no_weight(prepared, steps):
    s = stepper(prepared)
    for step in range(steps):
        s(step)
    before = {name: t.clone() for name, t in s.model.state_dict().items()}
    found = evaluate(s.model, BatchWindows(other_text(prepared), 0, 8), 4, s.forward, s.world.sum)
    assert all(
        (0 < rate < 1) == bool(steps) for rate in found.fire
    )  # a gate that has met no data is asked too
    assert all(torch.equal(t, before[name]) for name, t in s.model.state_dict().items())


def test_computing_activations_again_changes_nothing(prepared, tmp_path):
    plain, again = (
        trained(small_recipe(prepared, recompute=r), tmp_path / str(r)) for r in (False, True)
    )
    assert plain["metrics"] == again["metrics"]
    assert all(torch.equal(t, again["weights"][name]) for name, t in plain["weights"].items())


def test_documents_apart_do_not_see_each_other(prepared):
    s = stepper(prepared, documents="apart")
    part = next(iter(s.micro_batches(0)))
    assert part.reset is not None and bool(part.reset[:, 0].all())
    assert torch.equal(part.reset[:, 1:], part.tokens[:, :-1] == 256)


def test_a_spike_is_told_from_noise_and_a_lasting_change_stops_being_one():
    spikes = Spikes(10.0)
    assert not any(spikes.is_spike(1.0 + 0.1 * (i % 3)) for i in range(ENOUGH))
    assert spikes.is_spike(50.0)
    assert not spikes.is_spike(2.0)
    assert [spikes.is_spike(50.0) for _ in range(60)][-1] is False
    assert not any(Spikes(0.0, [1.0] * ENOUGH).is_spike(1e9) for _ in range(3))


@pytest.mark.parametrize("skip", [True, False])
def test_a_spike_is_said_and_skipped_only_if_the_recipe_says_so(prepared, tmp_path, skip):
    s = stepper(prepared, optimiser={"spike": 10.0, "skip_spikes": skip})
    s(0)
    s.spikes = Spikes(10.0, [1e-6] * ENOUGH)
    before = {n: t.clone() for n, t in s.model.state_dict().items()}
    found = s(1)
    assert found.spike == ("skipped" if skip else "taken")
    assert skip == all(torch.equal(t, before[n]) for n, t in s.model.state_dict().items())
    assert s.updates == (1 if skip else 2)


def test_a_number_that_is_not_finite_stops_the_run_before_it_harms_and_is_named(
    prepared, tmp_path, monkeypatch
):
    """MLPs break on the fourth batch: nothing is changed, the culprit and the batch
    are kept, the run can go on."""
    from amor.parts import SwiGLU

    good = trained(small_recipe(prepared, name="mamba2", eval={"every": 0}), tmp_path / "good")
    whole, calls = SwiGLU.forward, {"step": 0}

    class Count(Watch):
        def on_step(self, metrics):
            calls["step"] = metrics.step

    def breaks(self, x):
        y = whole(self, x)
        return y * torch.nan if calls["step"] == 3 else y

    monkeypatch.setattr(SwiGLU, "forward", breaks)
    with pytest.raises(AmorError) as error:
        train(
            small_recipe(prepared, name="mamba2", eval={"every": 0}),
            tmp_path / "run",
            observers=[Count()],
        )
    assert "step 4" in str(error.value) and "output of backbone.layers.0.mlp" in str(error.value)
    failure = tmp_path / "run/failures/step-000004"
    assert (
        json.loads((failure / "failure.json").read_text())["first"]
        == "output of backbone.layers.0.mlp"
    )
    from safetensors.torch import load_file

    assert load_file(failure / "batch.safetensors")["tokens"].shape == (4, 24)
    monkeypatch.undo()
    mended = trained(small_recipe(prepared, name="mamba2", eval={"every": 0}), tmp_path / "run")
    assert mended["metrics"] == good["metrics"]
    assert all(torch.equal(t, mended["weights"][n]) for n, t in good["weights"].items())


def test_a_validation_that_is_not_finite_is_nothing_and_never_the_best(
    prepared, tmp_path, monkeypatch
):
    from amor.judge import evaluate

    monkeypatch.setattr(evaluate, "finite", lambda nll: None)
    found = trained(small_recipe(prepared, name="mamba2"), tmp_path / "run")
    assert found["ended"].valid.nll is None and not (tmp_path / "run/best").exists()


def test_a_parameter_or_gradient_that_is_not_finite_is_named(prepared):
    from amor.train.trouble import first_non_finite

    s = stepper(prepared)
    part = next(iter(s.micro_batches(0)))

    def again():
        return s.read(part, 1.0)

    assert first_non_finite(s.model, again, lambda t: t) == "the loss itself"
    s.model.backbone.layers[1].mlp.up_proj.weight.grad = torch.full((96, 64), torch.inf)
    assert (
        first_non_finite(s.model, again, lambda t: t)
        == "gradient of backbone.layers.1.mlp.up_proj.weight"
    )
    s.model.norm_f.weight.data[0] = torch.nan
    assert first_non_finite(s.model, again, lambda t: t) == "parameter norm_f.weight"


def test_compiling_on_a_cpu_is_refused(prepared, tmp_path):
    with pytest.raises(AmorError, match="for GPUs"):
        train(small_recipe(prepared, compile=True), tmp_path / "run")


def test_bf16_on_a_cpu_must_be_asked_for_by_name(prepared, tmp_path):
    with pytest.raises(AmorError, match="bf16-cpu"):
        train(small_recipe(prepared, precision="bf16"), tmp_path / "run")
    with pytest.raises(AmorError, match='use "bf16"'):
        check_precision("bf16-cpu", torch.device("cuda"))
    found = trained(small_recipe(prepared, precision="bf16-cpu", steps=2), tmp_path / "asked")
    assert found["weights"]["embed.weight"].dtype == torch.float32
