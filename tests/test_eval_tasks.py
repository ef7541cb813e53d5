"""Tasks of the suites: loaded from local rows without a network, run by the harness, or skipped by
name; never a part of them."""

import gzip
import hashlib
import random
import socket

import pytest
from eval_rows import LONG, ROWS, harness_needles, lines, write

from amor.data import hub
from amor.data.tokenizer import bytes_tokenizer
from amor.errors import AmorError
from amor.eval import harness, tasks
from amor.eval.tasks.longbench import TITLES

pytest.importorskip("lm_eval")
import datasets
import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

EVERY = ROWS | {f"longbench_{name}": LONG for name in TITLES}
HARNESS = [name for name, suite in tasks.SUITES.items() if suite.harness]
OURS = [name for name in tasks.all_tasks() if not name.startswith("niah_stock")]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Whoever opens a socket is refused."""

    class Refused(socket.socket):
        def __init__(self, *_, **__):
            raise AssertionError("a socket was opened")

    def refused(*_, **__):
        raise AssertionError("a name was looked up")

    monkeypatch.setattr(socket, "socket", Refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data"), EVERY)


@pytest.fixture
def punkt(monkeypatch):
    """nltk's model of sentences, pretended: the harness's generator asks
    for it when it is imported."""
    monkeypatch.setattr(
        harness_needles(monkeypatch), "cached_sent_tokenize", lambda text: text.split(". ")
    )


def load(suite, data, **more):
    return tasks.load(
        suite, data, tokenizer=bytes_tokenizer(), lengths=(900, 1200), samples=3, **more
    )


class Knowing(LM):
    """Says the right thing where text is written, and finds the shortest
    continuation the likeliest."""

    def generate_until(self, requests, **_):
        return [self.answer(request.doc) for request in requests]

    def answer(self, doc):
        known = doc.get("outputs") or doc.get("answers") or [doc["value"]]
        return f" {known[-1]}\nand much more that nobody asked for"

    def loglikelihood(self, requests, **_):
        return [(-float(len(request.args[1])), request.args[1] == " mat") for request in requests]

    def loglikelihood_rolling(self, requests, **_):
        raise NotImplementedError


def run(loaded):
    """What the harness finds; a manager without its 13,000 tasks."""
    manager = TaskManager(include_defaults=False)
    return lm_eval.simple_evaluate(
        Knowing(), tasks=list(loaded.tasks.values()), task_manager=manager, bootstrap_iters=10
    )


@pytest.mark.parametrize("suite", HARNESS)
def test_every_task_is_loaded_from_rows_and_run_by_the_harness(suite, folder):
    loaded = load(suite, folder)
    names = [name for name in tasks.in_suite(suite) if name in OURS]
    assert list(loaded.tasks) == list(loaded.data) == names
    assert set(loaded.skipped) == set(tasks.in_suite(suite)) - set(names)
    found = run(loaded)
    for name in names:
        columns = tasks.in_suite(suite)[name].columns
        for key in ["900", "1200"] if suite == "niah" else [columns[-1].metric]:
            score, error = (
                found["results"][name][f"{key},none"],
                found["results"][name][f"{key}_stderr,none"],
            )
            assert 0 <= score <= 1 and isinstance(error, float), (name, key)
            assert score == 1 or suite not in ("retrieval", "niah"), (name, score)
        left_out = name == "cloze_squad"
        assert found["n-samples"][name]["original"] == loaded.data[name].rows - left_out
        assert found["samples"][name][0]["doc_id"] == 0
    assert -1 not in [value for scores in found["results"].values() for value in scores.values()]


def test_scores_are_those_of_the_rows(folder):
    found = run(load("common-sense", folder))["results"]
    assert found["lambada_openai"]["acc,none"] == 0.5 and found["lambada_openai"][
        "perplexity,none"
    ] == pytest.approx(2.718281828**4.5)
    assert (
        found["hellaswag"]["acc,none"] == 0.5
    )  # "off. go." is the shorter; "flies." is as long as "sinks." and comes first
    assert found["piqa"]["acc,none"] == 0.5
    assert (
        found["arc_challenge"]["acc,none"] == 0.5
    )  # "a stone" is as long as "the sun"; then "x" is right
    assert found["truthfulqa_mc2"]["acc,none"] > 0.5


def test_prompts_of_stock_tasks_are_the_harness_s(folder):
    loaded = load("common-sense", folder)
    assert loaded.tasks["hellaswag"].eval_docs[0]["query"] == "Roof: A man stands. He"
    assert loaded.tasks["hellaswag"].eval_docs[0]["choices"][0] == "off. go."
    expected = {
        "lambada_openai": ("the cat sat on the", " mat"),
        "piqa": ("Question: Dry a cup\nAnswer:", " Use a towel."),
        "arc_easy": ("Question: What shines?\nAnswer:", " a stone"),
        "winogrande": ("Ann called Sue because Ann", " was late."),
        "openbookqa": ("A plant needs", " a stone"),
    }
    for name, arguments in expected.items():
        loaded.tasks[name].set_config("num_fewshot", 0)
        loaded.tasks[name].build_all_requests(limit=1)
        assert loaded.tasks[name].instances[0].args == arguments
    assert loaded.tasks["truthfulqa_mc2"].VERSION == 3.0


def test_what_was_read_is_told(folder):
    loaded = load("common-sense", folder)
    for name, file in (("lambada_openai", "lambada_openai_test"), ("piqa", "piqa_validation")):
        data = loaded.data[name]
        assert file in data.source and data.rows == 2
        assert (
            data.sha256 == hashlib.sha256(lines(ROWS[file])).hexdigest()
        )  # of what was packed, however it was packed


def test_stand_ins_say_so_and_give_way_to_the_set_itself(tmp_path):
    write(
        tmp_path,
        {
            "squad_v1_dev_subset": ROWS["squad_v1_dev_subset"],
            "swde_completion": ROWS["swde_completion"],
        },
    )
    loaded = load("retrieval", tmp_path)
    assert set(loaded.tasks) == {"swde", "squad_completion", "cloze_swde", "cloze_squad"}
    assert (
        "stand-in" in loaded.data["squad_completion"].source
        and "not the completions" in loaded.data["cloze_squad"].source
    )
    assert "one letter: 1" in loaded.data["cloze_squad"].source
    task = loaded.tasks["squad_completion"]
    assert (
        task.doc_to_text(task.eval_docs[0])
        == "The race is held in June.\n\nQuestion: When is the race?\nAnswer:"
    )
    write(
        tmp_path,
        {"based_squad": [{"text": "It is held in June. The race is in ", "value": " June "}]},
    )
    loaded = load("retrieval", tmp_path, names=["squad_completion"])
    assert loaded.data["squad_completion"].source.endswith("based_squad.jsonl")
    task = loaded.tasks["squad_completion"]
    assert task.doc_to_text(task.eval_docs[0]) == "It is held in June. The race is in"


def test_longbench_scores_the_first_line_too(folder):
    loaded = load("longbench", folder, names=["longbench_qasper", "longbench_trec"])
    task = loaded.tasks["longbench_qasper"]
    assert "Question: Who has a cat?\n\nAnswer:" in task.doc_to_text(task.eval_docs[0])
    scores = run(loaded)["results"]["longbench_qasper"]
    assert scores["score_first_line,none"] == 1 and 0 < scores["score,none"] < 0.4
    assert scores["qa_f1_score,none"] == scores["score,none"]


def test_a_missing_file_skips_its_task_by_name_with_the_command_that_supplies_it(tmp_path):
    for suite in HARNESS:
        held = tasks.in_suite(suite)
        loaded = load(suite, tmp_path)
        assert set(loaded.tasks) == ({"niah_single_1"} if suite == "niah" else set())
        assert set(loaded.skipped) == set(held) - set(loaded.tasks)
        for name, reason in loaded.skipped.items():
            assert "\n" not in reason
            if not name.startswith("niah"):
                assert (
                    held[name].file in reason
                    and "load_dataset('" in reason
                    and str(tmp_path) in reason
                )
    assert "paul_graham_essays.jsonl" in load("niah", tmp_path).skipped["niah_single_2"]
    assert "nltk" in load("niah", tmp_path).skipped["niah_stock_1"]


def test_a_hub_out_of_reach_is_asked_once_and_every_task_skipped_by_name(monkeypatch):
    asked = []

    def down(name, config, split, streaming):
        asked.append(name)
        raise ConnectionError(f"Couldn't reach {name}\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", down)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    loaded = load("common-sense", None)
    assert asked == [
        "EleutherAI/lambada_openai"
    ]  # every further one would wait through its retries
    assert not loaded.tasks and list(loaded.skipped) == list(tasks.in_suite("common-sense"))
    for name, reason in loaded.skipped.items():
        assert "Couldn't reach EleutherAI/lambada_openai on the Hub" in reason
        assert (
            f"to_json('FOLDER/{tasks.in_suite('common-sense')[name].file}.jsonl')" in reason
            and "--data FOLDER" in reason
        )
    monkeypatch.setattr(
        datasets.config, "HF_HUB_OFFLINE", True
    )  # what was fetched before may be there: each is looked for
    assert len(load("common-sense", None).skipped) == 8 and len(asked) == 9


def test_rows_of_the_hub_are_checked_like_those_of_a_file(monkeypatch, folder):
    held = {
        "EleutherAI/lambada_openai": ROWS["lambada_openai_test"],
        "baber/piqa": ROWS["piqa_validation"],
    }
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, config, split, streaming: datasets.Dataset.from_list(held[name]),
    )
    loaded = load("common-sense", None, names=["lambada_openai", "piqa"])
    assert loaded.data["lambada_openai"].source == "hf:EleutherAI/lambada_openai (default, test)"
    assert loaded.data["piqa"].rows == 2 and len(loaded.data["piqa"].sha256) == 64
    assert list(loaded.tasks["piqa"].eval_docs) == list(
        load("common-sense", folder, names=["piqa"]).tasks["piqa"].eval_docs
    )
    held["baber/piqa"] = [{"goal": "x", "sol1": "y", "sol2": "z", "label": -1}]
    with pytest.raises(AmorError, match=r"^hf:baber/piqa \(default, validation\) row 1: label"):
        load("common-sense", None, names=["piqa"])


WRONG = [
    ("common-sense", "piqa_validation", b'{"goal": "x"\n', "not JSON"),
    ("common-sense", "piqa_validation", b'{"goal": "x", "sol1": "y", "label": 0}', "sol2"),
    (
        "common-sense",
        "piqa_validation",
        b'{"goal": "x", "sol1": "y", "sol2": 3, "label": 0}',
        "sol2: expected str, got int",
    ),
    (
        "common-sense",
        "piqa_validation",
        b'{"goal": "x", "sol1": "y", "sol2": "z", "label": 2}',
        "label",
    ),
    ("common-sense", "piqa_validation", b"[1]", "expected object"),
    ("common-sense", "piqa_validation", b"\xff\n", "not JSON"),
    (
        "common-sense",
        "piqa_validation",
        b'{"goal": "\\ud800", "sol1": "y", "sol2": "z", "label": 0}',
        "not JSON",
    ),
    ("common-sense", "lambada_openai_test", b'{"text": "word "}', "last word"),
    (
        "common-sense",
        "hellaswag_validation",
        b'{"activity_label":"","ctx_a":"","ctx_b":"","endings":["a"],"label":"1"}',
        "beyond",
    ),
    *(
        (
            "common-sense",
            "hellaswag_validation",
            b'{"activity_label":"","ctx_a":"","ctx_b":"","endings":["a","%s"],"label":"0"}'
            % ending,
            "endings[",
        )
        for ending in (b"", b" ", b"[header] ")
    ),
    (
        "common-sense",
        "arc_easy_test",
        b'{"question":"q","choices":{"text":["","b"],"label":["A","B"]},"answerKey":"A"}',
        "choices.text",
    ),
    (
        "common-sense",
        "arc_easy_test",
        b'{"question":"q","choices":{"text":["a"],"label":["A"]},"answerKey":"B"}',
        "answerKey 'B'",
    ),
    (
        "common-sense",
        "arc_easy_test",
        b'{"question":"q","choices":{"text":["a","b"],"label":["A"]},"answerKey":"A"}',
        "2 texts",
    ),
    (
        "common-sense",
        "openbookqa_test",
        b'{"question_stem":"q","choices":{"text":["a"],"label":["A"]},"answerKey":"B"}',
        "answerKey",
    ),
    (
        "common-sense",
        "winogrande_xl_validation",
        b'{"sentence":"s","option1":"a","option2":"b","answer":"1"}',
        "no _",
    ),
    (
        "common-sense",
        "truthfulqa_mc_validation",
        b'{"question":"q","mc2_targets":{"choices":["a"],"labels":[0]}}',
        "one of them 1",
    ),
    ("retrieval", "based_swde", b'{"text": "t", "value": "v"}', "key is missing"),
    ("retrieval", "based_fda", b'{"text": "t", "value": " ", "key": "k"}', "white space"),
    (
        "retrieval",
        "squad_v1_dev_subset",
        b'{"context":"c","question":"q","answers":{"text":[]}}',
        "answers.text",
    ),
    ("retrieval", "based_drop", b'{"context":"c","question":" ","answers":["a"]}', "white space"),
    (
        "longbench",
        "longbench_qasper",
        b'{"context":"c","answers":["a"]}',
        "neither question nor input",
    ),
    ("niah", "paul_graham_essays", b'{"name": "x"}', "text"),
]


@pytest.mark.parametrize(("suite", "file", "row", "said"), WRONG)
def test_a_row_that_cannot_be_read_stops_the_suite_and_is_named(tmp_path, suite, file, row, said):
    good = lines(EVERY.get(file, [{"text": "t is", "value": "vv", "key": "k"}])[:1])
    (tmp_path / f"{file}.jsonl").write_bytes(good + b"\n" + row)
    with pytest.raises(AmorError) as caught:
        load(suite, tmp_path)
    words = str(caught.value)
    assert (
        words.startswith(f"{tmp_path / file}.jsonl line 3: ")
        and said in words
        and "\n" not in words
    )


def test_files_that_are_empty_or_torn_are_refused(tmp_path):
    path = tmp_path / "piqa_validation.jsonl.gz"
    for held, said in (
        (gzip.compress(b"\n"), "holds no row"),
        (gzip.compress(lines(ROWS["piqa_validation"]))[:-9], "not a whole gzip"),
    ):
        path.write_bytes(held)
        with pytest.raises(AmorError, match=said):
            load("common-sense", tmp_path)
    (tmp_path / "paul_graham_essays.jsonl").write_bytes(lines([{"text": " \n"}]))
    with pytest.raises(AmorError, match="white space"):
        load("niah", tmp_path)


def test_what_is_not_known_is_refused_with_the_nearest(folder):
    with pytest.raises(AmorError, match=r"no suite 'commonsense'; did you mean 'common-sense'\?"):
        load("commonsense", folder)
    with pytest.raises(
        AmorError, match=r"no task 'arc-easy' in the suite common-sense; did you mean 'arc_easy'\?"
    ):
        load("common-sense", folder, names=["piqa", "arc-easy"])
    with pytest.raises(AmorError, match="no such folder"):
        load("common-sense", folder / "nowhere")
    with pytest.raises(AmorError, match="not a folder"):
        load("common-sense", folder / "lambada_openai_test.jsonl.gz")
    for wrong in ({"lengths": ()}, {"lengths": (0,)}, {"samples": 0}):
        with pytest.raises(AmorError, match=r"lengths|samples"):
            tasks.load("niah", folder, **({"tokenizer": bytes_tokenizer()} | wrong))


def test_a_package_that_is_missing_is_named(monkeypatch, folder):
    find = harness.importlib.util.find_spec
    monkeypatch.setattr(
        harness.importlib.util, "find_spec", lambda name: None if name == "rouge" else find(name)
    )
    with pytest.raises(AmorError, match=r"rouge is needed .*: pip install .*\[eval\]"):
        load("longbench", folder)
    monkeypatch.setattr(
        harness.importlib.util, "find_spec", lambda name: None if name == "nltk" else find(name)
    )
    assert "pip install nltk" in load("niah", folder).skipped["niah_stock_2"]


def test_needles_tell_their_true_lengths_and_their_fingerprint(folder):
    loaded = load("niah", folder)
    for name in ("niah_single_1", "niah_single_2", "niah_single_3"):
        for length in (900, 1200):
            assert 0.99 * (length - 129) <= loaded.lengths[f"{name},{length}"] <= length - 129
        task = loaded.tasks[name]
        task.set_config("num_fewshot", 0)
        task.build_all_requests()
        (prompt, generation) = task.instances[0].args
        assert (
            len(prompt) == task.eval_docs[0]["tokens"]
            and generation["max_gen_toks"] == 128
            and generation["until"] == []
        )
    assert load("niah", folder).data == loaded.data
    assert (
        load("niah", folder, seed=1).data["niah_single_1"].sha256
        != loaded.data["niah_single_1"].sha256
    )


def test_the_harness_s_own_needles_are_seeded_and_leave_chance_alone(folder, punkt):
    state = random.getstate()
    names = ["niah_stock_1", "niah_stock_2", "niah_stock_3"]
    loaded = load("niah", folder, names=names)
    assert random.getstate() == state
    assert list(loaded.tasks) == names and loaded.data["niah_stock_1"].rows == 6
    random.seed(5)
    assert load("niah", folder, names=names[::-1]).data == loaded.data
    assert (
        load("niah", folder, names=names, seed=1).data["niah_stock_1"].sha256
        != loaded.data["niah_stock_1"].sha256
    )
    assert (
        loaded.lengths["niah_stock_2,1200"] < 1200
        and "lm-evaluation-harness" in loaded.data["niah_stock_3"].source
    )
    results = run(loaded)["results"]["niah_stock_3"]
    assert {key for key in results if key.endswith(",none") and "stderr" not in key} == {
        "900,none",
        "1200,none",
    }
    with pytest.raises(AmorError, match=r"niah_stock_1: Could not generate"):
        tasks.load(
            "niah",
            folder,
            tokenizer=bytes_tokenizer(),
            lengths=(300,),
            samples=1,
            names=["niah_stock_1"],
        )


def test_a_table_is_changed_without_a_bar(capfd):
    held = hub.changed(
        hub.table([{"a": 1}]), lambda table: table.map(lambda row: {"b": row["a"] + 1})
    )
    assert list(held) == [{"a": 1, "b": 2}] and capfd.readouterr().err == ""
    assert not datasets.are_progress_bars_disabled()
