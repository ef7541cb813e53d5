"""Recipes: every one builds, the paper's have its numbers, and errors give a hint."""

import itertools
import math

import pytest

from amor.cli import main
from amor.errors import AmorError
from amor.mixers.attention import AttentionOptions
from amor.mixers.fused import FusedOptions
from amor.models.build import build
from amor.presets import ABLATION_NAMES, NAMES, every_name
from amor.train.optim import adamw, groups, set_rate, shape
from amor.train.predict import lines, predict
from amor.train.recipe import Rates, Recipe, load
from amor.train.recipe import names as every_recipe

RECIPES = [name for name in every_recipe() if not name.endswith("/base")]
PAPER = {
    "180m": (7_503, 3.69, 184.4),
    "440m": (18_255, 8.97, 448.7),
    "1.5b": (62_558, 30.7, 1537.4),
}


def test_every_architecture_and_ablation_has_a_tiny_recipe_and_every_scale_a_paper_recipe():
    assert set(RECIPES) >= {f"tiny/{n}" for n in (*NAMES, *ABLATION_NAMES)} | {
        f"paper/{s}" for s in PAPER
    }


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds_and_puts_every_parameter_into_one_group(name):
    recipe = load(name)
    model = build(recipe.config(), device="meta")
    found = {
        group.name: [n for n, _ in group.members]
        for group in groups(model, recipe.optimiser, recipe.lr)
    }
    assert sorted(n for names in found.values() for n in names) == sorted(
        n for n, _ in model.named_parameters()
    )
    assert len(found.get("alpha", ())) == model.config.blocks.count
    bare = ("norm.weight", "norm_f.weight", "bias", "A_log", ".D", "dt_bias", "_scale")
    for names, decays in ((found["matrices"], True), (found["vectors"], False)):
        assert all(n.endswith(bare) != decays for n in names)
    if recipe.name in (*NAMES, *ABLATION_NAMES):
        assert recipe.config().name == f"{recipe.name}-tiny"


def test_alpha_has_its_own_rate_and_only_matrices_decay():
    recipe = load("paper/1.5b")
    model = build(recipe.config().change(**{"pattern": "mamba2", "vocab": 64}), device="meta")
    optimizer = adamw(groups(model, recipe.optimiser, recipe.lr), recipe.optimiser)
    set_rate(optimizer, 0.5)
    assert [
        (g["name"], g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups
    ] == [
        ("matrices", 0.75e-4, 0.1, (0.9, 0.95)),
        ("vectors", 0.75e-4, 0.0, (0.9, 0.95)),
        ("alpha", 1.5e-3, 0.0, (0.9, 0.95)),
    ]


@pytest.mark.parametrize("scale", PAPER)
def test_a_paper_recipe_has_the_steps_and_tokens_of_the_paper(scale):
    steps, billions, millions = PAPER[scale]
    recipe = load(f"paper/{scale}", ["micro_batch=1", "recompute=true"])
    found = predict(recipe, 312e12, "given")
    assert (found.steps, found.step_tokens) == (steps, 491_520)
    assert float(f"{found.tokens / 1e9:.3g}") == billions
    assert round(found.parameters / 1e6, 1) == millions
    assert recipe.tokens == 20 * found.parameters and recipe.model.name == "amor-mamba2"
    assert (recipe.precision, recipe.seed, recipe.lr.floor, recipe.lr.warmup) == (
        "bf16",
        42,
        1e-5,
        2000,
    )
    assert (recipe.lr.peak, recipe.lr.alpha) == (1.5e-4 if scale == "1.5b" else 3e-4, 3e-3)
    assert f"{billions} B tokens" in "\n".join(lines(found))


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("paper/")])
def test_a_paper_recipe_clips_at_one_and_has_the_paper_s_betas_and_decay(name):
    recipe = load(name)
    found = recipe.optimiser
    assert (found.clip, found.betas, found.weight_decay, found.skip_spikes) == (
        1.0,
        (0.9, 0.95),
        0.1,
        False,
    )
    assert found.eps == 1e-8  # of which the paper says nothing
    optimizer = adamw(groups(build(recipe.config(), device="meta"), found, recipe.lr), found)
    assert {(g["betas"], g["eps"]) for g in optimizer.param_groups} == {((0.9, 0.95), 1e-8)}


@pytest.mark.parametrize(("scale", "last"), [("180m", 1e-4), ("440m", 1e-4), ("1.5b", 2e-4)])
def test_what_the_paper_leaves_open_is_as_the_departures_say(scale, last):
    recipe = load(f"paper/{scale}")
    end = shape(recipe.total_steps - 1, recipe.total_steps, recipe.lr)
    assert (recipe.lr.peak * end, recipe.lr.alpha * end) == pytest.approx((1e-5, last))
    config = recipe.config()
    assert (
        config.norm_eps,
        config.blocks.rope_theta,
        AttentionOptions().rope_theta,
        FusedOptions().rope_theta,
    ) == (
        1e-5,
        *[1e4] * 3,
    )


def test_memory_kept_for_the_backward_pass_is_less_when_it_is_recomputed():
    kept, again = (
        predict(load("tiny/amor-mamba2", ["context=64", f"recompute={r}"]), 1e12, "given")
        for r in ("false", "true")
    )
    assert 0 < again.memory.activations < kept.memory.activations
    assert kept.memory.optimiser == 8 * kept.parameters


def test_tiny_and_any_recipe_take_a_model_by_name_and_every_preset_is_a_tiny_recipe():
    named, chosen = load("tiny/mamba2-serial"), load("tiny", (), "mamba2-serial")
    assert named == chosen and (named.name, named.model.name, named.steps) == (
        "mamba2-serial",
        "mamba2-serial",
        2000,
    )
    assert load("tiny").model.name == "amor-mamba2"
    paper = load("paper/180m", (), "mamba2-serial")
    assert (paper.name, paper.model.name, paper.model.scale) == (
        "180m-mamba2-serial",
        "mamba2-serial",
        "180m",
    )
    assert load("paper/180m").name == "180m"
    assert set(every_recipe()) >= {f"tiny/{name}" for name in every_name()} | {
        "tiny/demo",
        "tiny/authors",
        "paper/authors-180m",
    }
    with pytest.raises(AmorError, match="did you mean 'mamba2-serial'"):
        load("tiny", (), "mamba2-seriel").config()
    with pytest.raises(
        AmorError, match="--model mamba2: the run starts from there; leave one of the two away"
    ):
        load("tiny", ["model.start=there"], "mamba2")


def test_the_rate_warms_up_to_the_peak_and_ends_at_the_floor():
    rates = Rates(peak=3e-4, floor=1e-5, warmup=10)
    curve = [rates.peak * shape(step, 100, rates) for step in range(100)]
    assert curve[0] == pytest.approx(rates.peak / 10) and curve[9] == pytest.approx(rates.peak)
    assert curve[-1] == pytest.approx(rates.floor)
    assert all(a > b for a, b in itertools.pairwise(curve[9:]))
    assert curve[54] == pytest.approx((rates.peak + rates.floor) / 2)  # half way down the cosine


def test_a_run_shorter_than_its_warm_up_only_warms_up():
    curve = [shape(step, 5, Rates(warmup=10)) for step in range(5)]
    assert curve == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert math.isclose(shape(0, 1, Rates(warmup=0)), Rates.floor / Rates.peak)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ("batsh=4", "did you mean 'batch'"),
        ("lr.peek=1", "did you mean 'peak'"),
        ("model.name=amor-mamba", "did you mean 'amor-mamba2'"),
        ("model.changes.widht=64", "did you mean 'width'"),
        ("precision=fp16", "bf16"),
        ("distributed=fsdp2", "did you mean 'fsdp'"),
        ("batch=2.5", "batch: expected int, got float"),
        ("batch=0", "batch: expected int >= 1, not 0"),
        ("optimiser.betas=[0.9, 1.0]", "optimiser.betas[1]: expected float < 1.0, not 1"),
        ("tokens=100000", "one of the two"),
        ("lr=3", "lr: expected object, got int"),
        ("batch.size=3", "'batch' is 16 and has no keys"),
        ("batch", "key=value"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_a_hint(change, hint):
    with pytest.raises(AmorError) as error:
        load("tiny/amor-mamba2", [change]).config()
    assert hint in str(error.value) and "\n" not in str(error.value)


def test_a_recipe_that_is_not_there_is_refused_with_the_nearest_name():
    with pytest.raises(AmorError, match="did you mean 'tiny/amor-mamba2'"):
        load("tiny/amor-mamba")


def test_a_recipe_extends_another_and_the_command_line_has_the_last_word(tmp_path):
    (tmp_path / "base.toml").write_text(
        'steps = 10\n[model]\nscale = "tiny"\n[model.changes.blocks]\ncount = 2\n'
    )
    (tmp_path / "mine.toml").write_text(
        'extends = "base.toml"\nmodel.name = "amor-gated-deltanet"\n'
    )
    recipe = load(
        tmp_path / "mine.toml",
        ["lr.peak=1e-2", "model.changes.width=512", "model.changes.blocks.mlp=true"],
        steps=7,
    )
    assert (recipe.name, recipe.steps, recipe.lr.peak, recipe.lr.floor) == ("mine", 7, 1e-2, 1e-5)
    config = recipe.config()
    assert (config.width, config.blocks.count, config.blocks.mlp, config.pattern[0]) == (
        512,
        2,
        True,
        "gated_deltanet",
    )
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_steps_of_the_command_line_shorten_the_warm_up_and_print_it(monkeypatch, capsys):
    recipes = []
    monkeypatch.setattr("amor.cli.train.dry_run", lambda recipe, flops: recipes.append(recipe))

    def warm_up(*words):
        assert main(["train", "tiny/mamba2", "--dry-run", *words]) == 0
        return recipes[-1].lr.warmup, capsys.readouterr().out

    assert warm_up()[0] == warm_up("--steps", "1000")[0] == 100
    steps, out = warm_up("--steps", "60")
    assert steps == 6 and "warm-up 6 steps instead of 100" in out
    assert shape(5, 60, recipes[-1].lr) == 1 and shape(59, 60, recipes[-1].lr) < 0.1
    assert warm_up("--steps", "3")[0] == 1
    assert warm_up("--steps", "60", "--set", "lr.warmup=50") == (50, "")
    assert load("tiny/mamba2", steps=60).lr.warmup == 100  # recipes in Python are as written
