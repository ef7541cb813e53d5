"""Laws of recall: who knows the answers has them all, who guesses has as many as chance, and a
task is learned like a text."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from laws import SMALL, close, small
from test_tasks import TREES, oracle
from training import QUICK, KilledError, Killer, same, trained
from training import pattern as layers

import amor
from amor import registry, typed
from amor.cli import main
from amor.data.tasks.base import PACKAGE, read_task
from amor.errors import AmorError
from amor.judge import recall as judging
from amor.judge.gates import ForcedGate, force_all
from amor.judge.randomise import randomise_for_test
from amor.judge.recall import recall
from amor.models.amor import Output
from amor.models.build import build
from amor.models.size import state_size
from amor.presets import NAMES
from amor.records.recall import Recall
from amor.run import Run
from amor.train.data import TrainingData
from amor.train.distributed import World
from amor.train.look import summarise_run
from amor.train.loop import train
from amor.train.optim import adamw, groups
from amor.train.recipe import Recipe, load
from amor.train.step import Stepper

each_task = pytest.mark.parametrize("tree", TREES, ids=lambda t: " ".join(map(str, t.values())))


class Sayer:
    """Stands for a model: says what it is told to of the tokens up to each."""

    blocks = ()

    def __init__(self, task, say):
        self.say = say
        self.head_weight = torch.eye(task.vocab)
        self.embed = SimpleNamespace(weight=self.head_weight)
        self.config = amor.preset("mamba2", "tiny", vocab=task.vocab)

    def each_block(self):
        return []

    def __call__(self, tokens, state, *, targets, **more):
        said = [
            [self.say(row[: place + 1], place) for place in range(len(row))]
            for row in tokens.tolist()
        ]
        return Output(
            self.embed.weight[torch.tensor(said)], None, None, (), nll=torch.zeros(targets.shape)
        )


@each_task
def test_who_reads_the_row_answers_everything_and_who_guesses_as_much_as_chance(tree):
    task = read_task(tree)
    asked = task.rows(0, "test", 0, 0, 1).question[0]
    places = set(torch.nonzero((task.rows(0, "test", 0, 0, 40).question > 0).any(0))[:, 0].tolist())

    def knows(before, place):
        try:
            return oracle(task, before) if place in places else 0
        except (KeyError, ValueError, IndexError):  # nothing is asked here in this row
            return 0

    found = recall(Sayer(task, knows), task, rows=40)
    assert (found.token.mean, found.whole.mean, found.token.se, found.whole.se) == (1, 1, 0, 0)
    assert (found.questions, found.answers) == (int(asked.max()), int((asked > 0).sum()))

    chance, held = random.Random(0), task.rows(1, "test", 0, 0, 1000)
    answers = sorted(set(held.targets[held.question > 0].tolist()))
    assert task.chance == pytest.approx(1 / len(answers))
    guesses = recall(Sayer(task, lambda *_: chance.choice(answers)), task, rows=150)
    assert abs(guesses.token.mean - task.chance) < 4 * max(guesses.token.se, 0.01)


def test_a_question_is_answered_when_all_of_its_tokens_are():
    asked = torch.tensor([[0, 1, 1, 0, 2, 2], [0, 1, 1, 0, 2, 2]])
    hits = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 1, 0, 1, 1]], dtype=torch.bool)
    assert judging.count_answered(hits, asked).tolist() == [1, 1]
    assert judging.count_answered(asked > 0, asked).tolist() == [2, 2]


def test_what_is_found_is_what_a_loop_over_the_rows_finds():
    task = read_task({"kind": "phone-book", "vocab": 27, "entries": 4})
    model = small("amor-mamba2", vocab=30)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = recall(model, task, rows=9, seed=5)
    right, whole, nll, fires = [], [], {True: [], False: []}, {True: [], False: []}
    for index in range(9):
        row = task.change(loss="all").rows(5, "test", 0, index, index + 1)
        out = model(row.tokens, targets=row.targets)
        best = model.logits(out.hidden)[0].argmax(-1)
        questions = {}
        for place, number in enumerate(row.question[0].tolist()):
            nll[number > 0].append(float(out.nll[0, place]))
            fires[number > 0].append([bool(gate.fire[0, place]) for gate in out.gates])
            if number:
                right.append(bool(best[place] == row.targets[0, place]))
                questions.setdefault(number, []).append(right[-1])
        whole += [all(each) for each in questions.values()]
    assert found.token.mean == pytest.approx(
        sum(right) / len(right)
    ) and found.whole.mean == pytest.approx(sum(whole) / len(whole))
    assert found.nll_questions.mean == pytest.approx(sum(nll[True]) / len(nll[True]), rel=1e-5)
    assert found.nll_elsewhere.mean == pytest.approx(sum(nll[False]) / len(nll[False]), rel=1e-5)
    rates = [torch.tensor(fires[asked]).double().mean(0).tolist() for asked in (True, False)]
    assert [(b.questions, b.elsewhere) for b in found.blocks] == [
        pytest.approx(pair) for pair in zip(*rates, strict=True)
    ]
    assert 0 < found.blocks[0].questions < 1 and found.gate == "entropy"
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert typed.from_json(Recall, typed.text(found), "found") == found


def test_recall_depends_on_no_way_of_reading_and_takes_other_gates_and_sizes(monkeypatch):
    task, model = (
        read_task({"kind": "stream", "pairs": 4, "length": 30, "vocab": 64}),
        small("amor-mamba2", vocab=64),
    )
    found = recall(model, task, rows=10)
    monkeypatch.setattr(judging, "TOKENS", 70)
    again = recall(model, task, rows=10)
    assert (again.token, again.whole, again.blocks) == (found.token, found.whole, found.blocks)
    assert recall(model, task, rows=10, seed=1).nll_questions != found.nll_questions
    opened = recall(model, task, rows=3, gates=force_all(model, True))
    assert opened.gate == "forced" and all(
        (b.questions, b.elsewhere) == (1, 1) for b in opened.blocks
    )
    marks = (task.rows(0, "test", 0, 0, 3).question > 0).expand(3, -1, -1)
    there = recall(
        model, task, rows=3, gates=lambda here: [ForcedGate(block[here]) for block in marks]
    )
    assert all((b.questions, b.elsewhere) == (1, 0) for b in there.blocks)
    assert recall(model, task.change(pairs=12, length=60), rows=2).task["pairs"] == 12
    with pytest.raises(AmorError, match="task stream has 65 tokens, but the model has 64"):
        recall(model, task.change(vocab=65))


def test_a_state_holds_as_many_numbers_as_it_says():
    for name in NAMES:
        config = amor.preset(name, "tiny", **SMALL)
        model, size = amor.build(config), state_size(config)
        state = model(torch.zeros(1, 5, dtype=torch.long)).state
        fixed = [
            t.numel() for part in state.parts for t in part.values() if isinstance(t, torch.Tensor)
        ]
        kept = [
            2 * kv.k.numel() // 5
            for part in state.parts
            for kv in part.values()
            if not isinstance(kv, torch.Tensor)
        ]
        assert (size.fixed, size.a_token) == (sum(fixed), sum(kept)), name


def small_task(tree, name="amor-mamba2", **keys):
    """A recipe of a task that takes hundredths of a second a step."""
    held = load("recall/mqar").to_dict()
    held["model"] = {
        "name": name,
        "changes": {**SMALL, "pattern": layers(name)} | (QUICK if name.startswith("amor") else {}),
    }
    held["model"]["changes"].pop("vocab")
    held |= {"task": tree, "context": 256, "batch": 6, "micro_batch": 6, "steps": 6}
    held |= {"eval": {"every": 3, "windows": 4}, "checkpoint": {"every": 2, "keep_last": 2}} | keys
    return Recipe.from_dict(held)


def test_a_run_of_a_task_that_was_stopped_ends_with_the_same_bits(tmp_path):
    recipe = small_task({"kind": "phone-book", "entries": 3})
    whole = trained(recipe, tmp_path / "whole")
    with pytest.raises(KilledError):
        train(recipe, tmp_path / "cut", observers=[Killer(5)])
    same(trained(recipe, tmp_path / "cut"), whole)
    valid = [line["valid"] for line in whole["metrics"] if "valid" in line][-1]
    answered = valid["answered"]
    assert answered["tokens"] == 4 * 2 * 4 and len(answered["fire"]) == 3
    judged = read_task(recipe.task).rows(recipe.seed, "valid", 0, 0, 4)
    model = amor.load(tmp_path / "whole")[0]
    out = model(judged.tokens, targets=judged.targets)
    asked = judged.question > 0
    assert answered["accuracy"] == float(
        (model.logits(out.hidden).argmax(-1) == judged.targets)[asked].float().mean()
    )
    assert answered["fire"] == pytest.approx(
        [float(gate.fire[asked].float().mean()) for gate in out.gates]
    )
    assert valid["nll"] == pytest.approx(float(out.nll[asked].mean()), rel=1e-5)


class Half(World):
    """One of two ranks, without the other: each row has as many answers, and
    gradients are summed by the law."""

    def __init__(self, rank):
        super().__init__(torch.device("cpu"))
        self.rank, self.size = rank, 2

    def sum(self, t):
        return 2 * t


def gradients(recipe, world):
    model = randomise_for_test(build(recipe.config()))
    data = TrainingData.open(recipe, world)
    step = Stepper(
        model,
        adamw(groups(model, recipe.optimiser, recipe.lr), recipe.optimiser),
        recipe,
        data.train,
        world,
    )
    step.forward_backward(list(step.micro_batches(0)))
    return {name: p.grad for name, p in model.named_parameters()}


def test_micro_batches_and_ranks_have_the_gradients_of_one_large_batch():
    recipe = small_task({"kind": "selective-copy", "length": 20, "symbols": 4}, name="mamba2")
    whole, alone = gradients(recipe, World(torch.device("cpu"))), replace(recipe, micro_batch=4)
    parts = gradients(alone, World(torch.device("cpu")))
    ranks = [gradients(alone, Half(rank)) for rank in range(2)]
    for name, wanted in whole.items():
        scale = wanted.abs().max()
        close(parts[name] / scale, wanted / scale, name)
        close((ranks[0][name] + ranks[1][name]) / scale, wanted / scale, name)


def test_a_task_says_how_long_rows_are_and_how_many_tokens_there_are():
    recipe = load("recall/phone-book", ["task.entries=20"])
    task = read_task(recipe.task)
    assert (recipe.context, recipe.config().context, recipe.config().vocab) == (
        task.length,
        task.length,
        task.vocab,
    )
    assert recipe.task == task.tree and Recipe.from_dict(recipe.to_dict()) == recipe
    assert load("recall/mqar", ["model.changes.vocab=1000"]).config().vocab == 1000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["model.changes.vocab=100"], "model.changes.vocab 100: task mqar has 256 tokens"),
        (["data=somewhere"], "data 'somewhere' and a task are given"),
        (["context=100"], "context 100: rows of task mqar are 64 tokens long"),
        (["task.pairs=2000"], "pairs is 2,000, at most 127"),
        (["task.kind=needl"], "no kind 'needl'; did you mean 'needle'"),
    ],
)
def test_a_recipe_that_cannot_be_asked_is_refused_in_one_line(changes, words):
    with pytest.raises(AmorError) as raised:
        load("recall/mqar", changes)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_run_goes_on_with_its_own_task_only(tmp_path):
    recipe = small_task({"kind": "induction", "length": 8}, name="mamba2", steps=1)
    train(recipe, tmp_path / "run")
    with pytest.raises(AmorError, match=r"made with task\.loss = 'questions', not 'all'"):
        train(
            small_task({"kind": "induction", "length": 8, "loss": "all"}, name="mamba2", steps=1),
            tmp_path / "run",
        )
    with pytest.raises(AmorError, match="end-of-text"):
        train(replace(recipe, documents="apart"), tmp_path / "other")
    with pytest.raises(AmorError, match="learned task induction, not a text"):
        summarise_run(Run(tmp_path / "run"))


@pytest.mark.parametrize("kind", registry.kinds(PACKAGE))
def test_every_kind_has_a_recipe(kind):
    assert load(f"recall/{kind.replace('_', '-')}").task["kind"] == kind


def test_a_run_of_a_task_is_trained_reported_and_asked_by_commands(tmp_path, capsys):
    out = str(tmp_path / "run")
    small_one = [
        "task.pairs=2",
        "task.length=16",
        "task.vocab=32",
        "batch=4",
        "eval.windows=4",
        "model.name=amor-mamba2",
    ]
    assert (
        main(
            [
                "train",
                "recall/mqar",
                "--out",
                out,
                "--steps",
                "2",
                *(w for s in small_one for w in ("--set", s)),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "valid nll" in said and "fires on" in said and "of their tokens (by chance 6.2%)" in said
    assert "right answers" in (tmp_path / "run" / "report.html").read_text()
    held = Run(out).read_recall()
    assert held is not None and held.rows == 256 and held.task["pairs"] == 2
    words = [
        "recall",
        out,
        "--set",
        "pairs=3",
        "--set",
        "length=20",
        "--gate",
        "always",
        "--rows",
        "5",
        "--json",
    ]
    assert main([*words, "--out", str(tmp_path / "found.json")]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = typed.read(Recall, tmp_path / "found.json")
    assert told == json.loads(typed.text(found)) and (
        found.rows,
        found.gate,
        found.task["pairs"],
    ) == (5, "always", 3)
    assert all((b.questions, b.elsewhere) == (1, 1) for b in found.blocks)
    for wrong, hint in (
        (["--task", "neddle"], "did you mean 'needle'"),
        (["--rows", "0"], "0 rows"),
        (["--set", "vocab=64"], "but the model has 32"),
    ):
        assert main(["recall", out, *wrong]) == 2
        assert hint in capsys.readouterr().err
    assert main(["recall", str(tmp_path / "nowhere")]) == 2


def test_attention_behind_a_recurrent_layer_really_learns_to_recall(tmp_path):
    """Two pairs in eight tokens: some seconds of one core, from half right
    (either value) to nearly always."""
    changes = [
        "task.vocab=16",
        "task.pairs=2",
        "task.length=8",
        "lr.peak=1e-2",
        "model.changes.width=32",
        "model.changes.d_ff=0",
    ]
    changes += [
        "model.name=mamba2-serial",
        "model.changes.mixers.attention.head_size=32",
        "eval.every=0",
        "checkpoint.every=500",
    ]
    recipe = load("recall/mqar", changes, steps=400)
    train(recipe, tmp_path / "run")
    found = recall(amor.load(tmp_path / "run")[0], read_task(recipe.task), rows=500)
    assert found.token.mean > 0.95


def test_a_row_with_fewer_questions_than_another_has_answered_no_more_than_its_own():
    question = torch.tensor([[1, 1, 2, 3], [0, 1, 0, 0], [1, 2, 2, 0]])
    hits = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [0, 1, 1, 0]]).bool()
    assert judging.count_answered(hits, question).tolist() == [2, 1, 1]
