"""An evaluation from a model folder to files: resumed after a kill, shared by ranks, offline, with
the scores the harness has."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from eval_rows import LONG, ROWS, write
from laws import small

from amor.cli import main
from amor.data.tokenizer import bytes_tokenizer
from amor.errors import AmorError
from amor.eval.judge import Judge
from amor.eval.store import Store
from amor.models.folder import save
from amor.records.evals import GateCounts

pytest.importorskip("lm_eval")
from amor.eval import harness, tasks
from amor.eval.lm import AmorLM
from amor.eval.tasks.longbench import TITLES

ROOT = Path(__file__).parent.parent
EVERY = ROWS | {f"longbench_{name}": LONG for name in TITLES}
TEXT = "The quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write(tmp_path_factory.mktemp("data"), EVERY)
    lines = [json.dumps({"text": TEXT})] * 3
    (folder / "lengths_pg19.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "held-out.txt").write_text(TEXT)
    return folder


def model_folder(folder: Path, name: str = "amor-mamba2", vocab: int = 257) -> Path:
    save(small(name, vocab=vocab), folder, bytes_tokenizer())
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def evaluate(model: Path, data: Path, out: Path, *words: str) -> dict[str, dict]:
    """What the command wrote, by file."""
    assert main(["eval", str(model), "--data", str(data), "--out", str(out), *words]) == 0
    return {path.name: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}


def told(found: dict[str, dict]) -> dict[str, object]:
    """What must be the same however it was computed: all but when and how fast."""
    return {
        name: (one["results"], one["amor"]["gates"], one["amor"]["curves"])
        for name, one in found.items()
    }


ALL = ("--suite", "common-sense,retrieval,niah,longbench,length-extrapolation,perplexity")
SMALL = ("--lengths", "900,1200", "--samples", "2")


def test_every_suite_runs_without_a_network_or_is_skipped_by_name(
    model, data, tmp_path, monkeypatch, capsys
):
    def refused(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    found = evaluate(
        model,
        data,
        tmp_path,
        *ALL,
        *SMALL,
        "--text",
        str(data / "held-out.txt"),
        "--context",
        "64",
        "--limit",
        "2",
    )
    said = capsys.readouterr().out
    assert {name.removesuffix(".json") for name in found} == set(ALL[1].split(","))
    for name, one in found.items():
        for task, why in one["amor"]["skipped"].items():
            assert f"{task} is skipped: " in said and why, name
    assert found["common-sense.json"]["amor"]["skipped"] == {}
    assert set(found["common-sense.json"]["results"]) == set(tasks.in_suite("common-sense"))
    assert found["length-extrapolation.json"]["amor"]["curves"]["pg19"]["lengths"] == [900, 1200]
    gates = found["common-sense.json"]["amor"]["gates"]
    assert set(gates) == set(tasks.in_suite("common-sense"))
    assert set(gates["piqa"]) == {"prefill", "target"} and set(
        found["niah.json"]["amor"]["gates"]["niah_single_1"]
    ) == {
        "prefill",
        "decode",
    }
    for path in tmp_path.glob("*.json"):
        assert "NaN" not in path.read_text()
    assert main(["table", str(tmp_path), "--suite", "common-sense"]) == 0


@pytest.mark.parametrize("suite", ["common-sense", "niah"])
def test_a_second_run_computes_nothing_and_tells_the_same(suite, model, data, tmp_path):
    words = ("--suite", suite, *SMALL)
    first = evaluate(model, data, tmp_path, *words)
    rows = (tmp_path / "requests.jsonl").read_text()
    again = evaluate(model, data, tmp_path, *words)
    assert (tmp_path / "requests.jsonl").read_text() == rows
    assert told(first) == told(again)
    timing = again[f"{suite}.json"]["amor"]["timing"]
    assert timing["computed"] == 0 and timing["reused"] > 0 and timing["tokens"] == 0


def test_a_run_killed_in_the_middle_goes_on_with_the_same_scores_and_computes_no_row_twice(
    model, data, tmp_path
):
    words = ("--suite", "common-sense,retrieval", "--rows", "1")
    whole = evaluate(model, data, tmp_path / "whole", *words)
    count = len((tmp_path / "whole" / "requests.jsonl").read_text().splitlines())
    command = [
        sys.executable,
        "-m",
        "amor",
        "eval",
        str(model),
        "--data",
        str(data),
        "--out",
        str(tmp_path / "killed"),
        *words,
    ]
    store = tmp_path / "killed" / "requests.jsonl"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for wanted in (count // 4, count // 2):
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and (
            not store.exists() or store.read_bytes().count(b"\n") < wanted
        ):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    store.write_bytes(store.read_bytes()[:-7])  # and a line was torn
    found = evaluate(model, data, tmp_path / "killed", *words)
    assert told(found) == told(whole)
    keys = [
        json.loads(line)["key"]
        for line in store.read_bytes().split(b"\n")
        if line.endswith(b"}") and line.startswith(b'{"key"')
    ]
    assert len(keys) == len(set(keys)) == count


def test_two_ranks_find_what_one_finds(model, data, tmp_path):
    words = ["--suite", "common-sense,niah,length-extrapolation", *SMALL, "--limit", "2"]
    alone = evaluate(model, data, tmp_path / "alone", *words)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "amor",
        "eval",
    ]
    ran = subprocess.run(
        [*command, str(model), "--data", str(data), "--out", str(tmp_path / "shared"), *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    shared = {
        path.name: json.loads(path.read_text())
        for path in sorted((tmp_path / "shared").glob("*.json"))
    }
    assert told(shared) == told(alone)
    parts = [
        len(path.read_text().splitlines())
        for path in sorted((tmp_path / "shared").glob("requests*.jsonl"))
    ]
    assert len(parts) == 2 and all(parts), "both ranks computed something"
    for name, one in shared.items():  # no request is counted twice
        for count in ("computed", "reused"):
            expected = alone[name]["amor"]["timing"][count]
            assert one["amor"]["timing"][count] == expected, (name, count)
    assert sum(parts) == len((tmp_path / "alone" / "requests.jsonl").read_text().splitlines())


def test_scores_do_not_depend_on_how_many_are_read_at_a_time(model, data, tmp_path):
    """tests/test_eval_score.py has this to the bit, for every architecture."""
    found = [
        told(evaluate(model, data, tmp_path / rows, "--rows", rows, "--limit", "2"))
        for rows in ("1", "3", "16")
    ]
    assert found[0] == found[1] == found[2]


def test_gates_closed_and_open_and_the_decode_path_have_files_of_their_own(model, data, tmp_path):
    found = evaluate(model, data, tmp_path, "--gates", "model,closed,open")
    found |= evaluate(model, data, tmp_path, "--gates", "model,closed", "--path", "decode")
    assert set(found) == {
        f"common-sense{way}.json" for way in ("", ".closed", ".open", ".decode", ".decode.closed")
    }
    fires = {
        name: [p["fires"] for p in one["amor"]["gates"]["piqa"].values()]
        for name, one in found.items()
    }
    assert all(n == 0 for each in fires["common-sense.closed.json"] for n in each)
    tokens = [
        p["tokens"] for p in found["common-sense.open.json"]["amor"]["gates"]["piqa"].values()
    ]
    assert fires["common-sense.open.json"] == [[n] * 3 for n in tokens]
    for way in ("", ".closed"):  # the same scores by both paths
        forward, steps = (
            found[f"common-sense{path}{way}.json"]["results"] for path in ("", ".decode")
        )
        for task, numbers in forward.items():
            assert numbers.get("acc,none") == pytest.approx(
                steps[task].get("acc,none"), abs=1e-6
            ), task
    decode = found["common-sense.decode.json"]["amor"]["gates"]["piqa"]
    likelihood = found["common-sense.json"]["amor"]["gates"]["piqa"]
    assert decode["decode"]["fires"] == likelihood["target"]["fires"], (
        "steps decide as the forward did"
    )


def test_an_evaluation_ends_with_a_table_of_scores_and_the_next_command(
    model, data, tmp_path, capsys
):
    words = ("--task", "piqa,lambada_openai", "--gates", "model,closed", "--json")
    file = evaluate(model, data, tmp_path, *words)["common-sense.json"]
    *table, next_command, last = capsys.readouterr().out.splitlines()
    assert next_command.endswith(f"amor table {tmp_path}")
    piqa = next(line.split() for line in table if line.startswith("piqa"))
    right, error = (file["results"]["piqa"][f"acc{end},none"] for end in ("", "_stderr"))
    assert piqa[:3] == ["piqa", "acc", f"{right:.4f}±{error:.4f}"] and len(piqa) == 4
    scores = json.loads(last)["scores"]["common-sense"]
    assert scores["model"]["piqa"]["acc"] == right and set(scores) == {"model", "closed"}


def test_scores_of_length_curves_and_needles_are_in_the_table(model, data, tmp_path, capsys):
    words = ("--suite", "niah,length-extrapolation", "--task", "niah_single_1,pg19", "--limit", "2")
    evaluate(model, data, tmp_path, *words, *SMALL)
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["niah_single_1", "900"] in [line[:2] for line in table]
    assert ["pg19", "perplexity", "at", "1200"] in [line[:4] for line in table]


def with_bos(bos: str = "<s>"):
    """A tokenizer whose post-processor puts a token in front of a text, as Llama's does."""
    from tokenizers import processors

    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens([bos])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def test_what_the_post_processor_adds_stands_before_every_context_and_document(data, tmp_path):
    """One setting for likelihoods, generated text, perplexity, long texts and traces."""
    from amor.eval import lengths, perplexity
    from amor.judge.windows import encode

    tokenizer = with_bos()
    bos = tokenizer.token_to_id("<s>")
    save(small("amor-mamba2", vocab=bos + 1), tmp_path / "model", tokenizer)
    text, file = "A dog barks. " * 9, data / "held-out.txt"
    for add_bos, prefix in ((None, [bos]), (True, [bos]), (False, [])):
        lm = AmorLM.of(tmp_path / "model", add_bos=add_bos)
        assert lm.tok_encode("A") == [*prefix, 65] and lm.judge.settings.bos == bool(prefix)
        assert lm._request("A", " B").context == (*prefix, 65)
        assert lm._request("", "B").context == ((*prefix,) or (lm.eot_token_id,))
        assert encode(tokenizer, "A", add_bos).tolist() == [*prefix, 65]
        windows = perplexity.held_out(file, tokenizer, bos + 1, 8, add_bos=add_bos)
        assert windows.tokens[0].tolist()[: len(prefix) + 1] == [*prefix, ord(TEXT[0])]
        (span,) = lengths.spans(tokenizer, [text], (16,), 1, add_bos=add_bos)
        assert span.ids.tolist()[: len(prefix) + 1] == [*prefix, 65]


def test_the_setting_of_bos_reaches_the_scores_of_every_suite(data, tmp_path):
    tokenizer = with_bos()
    save(small("amor-mamba2", vocab=tokenizer.get_vocab_size()), tmp_path / "model", tokenizer)
    words = ("--suite", "common-sense,length-extrapolation,perplexity", *SMALL, "--limit", "2")
    words += ("--task", "lambada_openai,pg19,perplexity", "--context", "64")
    words += ("--text", str(data / "held-out.txt"))
    own, forced, without = (
        evaluate(tmp_path / "model", data, tmp_path / f"out{n}", *words, *bos)
        for n, bos in enumerate(((), ("--bos",), ("--no-bos",)))
    )
    assert told(own) == told(forced)
    for name, one in own.items():
        assert one["amor"]["settings"]["bos"] and not without[name]["amor"]["settings"]["bos"]
        assert told({name: one}) != told({name: without[name]}), name


def test_a_full_disk_is_an_error_that_names_the_file_and_the_remedy(
    model, data, tmp_path, monkeypatch, capsys
):
    words = ["eval", str(model), "--data", str(data), "--task", "piqa", "--out"]

    class FullDisk:
        def __init__(self, file):
            self.file = file

        def write(self, line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self):
            self.file.close()

    def opened(self, path, more=()):
        whole(self, path, more)
        self.file = FullDisk(self.file)

    whole = Store.__init__
    with monkeypatch.context() as patch:
        patch.setattr(Store, "__init__", opened)
        assert main([*words, str(tmp_path / "a")]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert "requests.jsonl cannot be written (No space left on device); free some space" in line

    def full(path, text, mark=""):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("amor.eval.run.replace_file", full)
    assert main([*words, str(tmp_path / "b")]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert "samples_common-sense_piqa.jsonl cannot be written" in line and "free some space" in line


def test_a_model_for_the_harness_is_one_line(model, data, tmp_path):
    """The documents, the scores and the gate counts of `amor eval`, with a store and without."""
    file = evaluate(model, data, tmp_path / "out", "--task", "piqa")["common-sense.json"]
    for store in (None, tmp_path / "answers.jsonl", tmp_path / "answers.jsonl"):
        lm = AmorLM.of(model, store=store)
        loaded = tasks.load("common-sense", data, tokenizer=lm.judge.tokenizer, names=["piqa"])
        results = harness.evaluated(lm, loaded.tasks, None, 1000, samples=False)["results"]
        assert results["piqa"]["acc,none"] == file["results"]["piqa"]["acc,none"]
        counts = lm.judge.gates["piqa"]["target"]
        assert list(counts.fires) == file["amor"]["gates"]["piqa"]["target"]["fires"]
    assert lm.judge.computed == 0 and lm.judge.reused > 0
    with pytest.raises(AmorError, match="max_length 1"):
        AmorLM.of(model, max_length=1).judge.cut([1, 2], 1)


def test_an_untrained_model_is_the_floor(model, data, tmp_path):
    found = evaluate(model, data, tmp_path, "--untrained")["common-sense.json"]["amor"]["model"]
    assert found["tokens"] == 0 and found["name"].endswith("untrained")
    mine = evaluate(model, data, tmp_path / "mine")["common-sense.json"]["amor"]["model"]
    assert mine["fingerprint"] != found["fingerprint"]


WEATHER = """
from amor.eval.cloze import ClozeRow, ClozeTask
from amor.eval.rows import HubSource
from amor.eval.task_specs import ScoreColumn

TASKS = (
    ClozeTask(
        name="weather", suite="retrieval", columns=(ScoreColumn("Weather", "weather", "contains"),),
        row=ClozeRow, file="weather_reports", hub=HubSource("nobody/weather"),
        prompt=lambda text, row: text + row.question,
    ),
)
"""


def test_a_new_task_is_one_file(model, tmp_path, monkeypatch, capsys):
    """A file in a folder of tasks, and its rows: the command runs it,
    and tables have its column."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "weather.py").write_text(WEATHER)
    (tmp_path / "weather_reports.jsonl").write_text(
        '{"context": "It rains in June.", "question": " It", "answers": ["rains"]}\n'
    )
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path / "more")])
    tasks.all_tasks.cache_clear()
    try:
        out = tmp_path / "out"
        words = ("--suite", "retrieval", "--task", "weather")
        found = evaluate(model, tmp_path, out, *words)["retrieval.json"]
        assert (
            found["results"]["weather"]["contains,none"] in (0, 1)
            and found["amor"]["data"]["weather"]["rows"] == 1
        )
        assert set(found["amor"]["gates"]["weather"]) == {"prefill", "decode"}
        capsys.readouterr()
        assert (
            main(["table", str(out), "--suite", "retrieval"]) == 0
            and "Weather" in capsys.readouterr().out
        )
        assert (
            main(
                [
                    "eval",
                    str(model),
                    "--data",
                    str(tmp_path),
                    "--out",
                    str(out),
                    "--suite",
                    "retrieval",
                    "--task",
                    "wether",
                ]
            )
            == 2
        )
        assert "did you mean 'weather'?" in capsys.readouterr().err
    finally:
        tasks.all_tasks.cache_clear()
        sys.modules.pop("amor.eval.tasks.weather", None)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--suite", "common-sens"], "common-sense"),
        (["--task", "piqb"], "piqa"),
        (["--gates", "ajar"], "closed"),
        (["--path", "walk"], "likelihood"),
        (["--limit", "0"], "--limit 0"),
        (["--lengths", "ten"], "--lengths"),
        (["--data", "nowhere"], "nowhere"),
        (["--bos"], "no BOS token"),
        (["--max-length", "3"], "max_length 3"),
        (["--suite", "perplexity"], "--text"),
        (["--tokenizer", "mine.json"], "mine.json"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words, named, model, data, tmp_path, capsys):
    assert main(["eval", str(model), "--data", str(data), "--out", str(tmp_path), *words]) == 2
    said = capsys.readouterr().err.strip()
    assert named in said.splitlines()[-1]


def test_a_tokenizer_of_another_model_a_model_without_gates_and_a_broken_row_are_said(
    model, data, tmp_path, capsys
):
    other = model_folder(tmp_path / "other", "mamba2", vocab=100)
    assert main(["eval", str(other), "--data", str(data), "--out", str(tmp_path / "a")]) == 2
    assert "they do not belong together" in capsys.readouterr().err
    plain = model_folder(tmp_path / "plain", "mamba2")
    assert (
        main(
            [
                "eval",
                str(plain),
                "--data",
                str(data),
                "--gates",
                "closed",
                "--out",
                str(tmp_path / "b"),
            ]
        )
        == 2
    )
    assert "has no gates" in capsys.readouterr().err
    write(tmp_path / "broken", EVERY)
    piqa = next((tmp_path / "broken").rglob("piqa*"))
    piqa.write_bytes(b'{"goal": 3}\n')
    assert (
        main(["eval", str(model), "--data", str(tmp_path / "broken"), "--out", str(tmp_path / "c")])
        == 2
    )
    assert "piqa" in capsys.readouterr().err
    assert not list((tmp_path / "c").glob("*.json")), "nothing is half run"


def llama_of(model) -> object:
    """transformers' Llama with the weights of our Transformer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    attention = model.backbone.layers[0].mixer
    theirs = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=config.width,
            intermediate_size=config.d_ff,
            vocab_size=config.vocab,
            num_hidden_layers=len(config.pattern),
            num_attention_heads=attention.heads,
            num_key_value_heads=attention.heads,
            head_dim=attention.head_size,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": attention.theta},
            tie_word_embeddings=True,
            eos_token_id=bytes_tokenizer().token_to_id("<|end_of_text|>"),
        )
    ).eval()
    names = {
        "embed.weight": "model.embed_tokens.weight",
        "backbone.layers": "model.layers",
        "mixer_norm": "input_layernorm",
        "mixer.": "self_attn.",
        "mlp_norm": "post_attention_layernorm",
        "norm_f": "model.norm",
    }
    weights = {}
    for name, tensor in model.state_dict().items():
        for ours, other in names.items():
            name = name.replace(ours, other)
        weights[name] = tensor
    theirs.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    return theirs


@pytest.mark.parametrize(
    ("suite", "names"), [("common-sense", None), ("retrieval", ["swde", "cloze_fda"])]
)
def test_scores_are_those_of_the_harness_s_own_model_with_the_same_weights(
    suite, names, data, tmp_path
):
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    model, tokenizer = small("transformer", vocab=257).eval(), bytes_tokenizer()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)  # far from uniform, so that answers differ
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end_of_text|>")
    ours = AmorLM(Judge(model, tokenizer, "it", Store(tmp_path / "requests.jsonl")))
    theirs = HFLM(
        pretrained=llama_of(model),
        tokenizer=fast,
        batch_size=1,
        max_length=8192,
        add_bos_token=False,
    )
    found = []
    for lm in (ours, theirs):
        loaded = tasks.load(suite, data, tokenizer=tokenizer, names=names)
        found.append(harness.evaluated(lm, loaded.tasks, 2, 0, samples=True))
    for task in found[0]["results"]:
        mine, other = (one["samples"][task] for one in found)
        for a, b in zip(mine, other, strict=True):
            for said, wanted in zip(a["filtered_resps"], b["filtered_resps"], strict=True):
                if isinstance(said, str):
                    assert said == wanted, task
                else:
                    assert float(said[0]) == pytest.approx(float(wanted[0]), abs=2e-3), task
                    assert str(said[1]) == str(wanted[1]), task


def test_scoring_a_long_context_of_a_large_vocabulary_takes_little_memory():
    """T = 2048, V = 128,256: nothing of the size of all logits (1 GB) is ever there."""
    code = """
import resource, random, torch
torch.set_num_threads(1)
from amor.eval.score import Scorer, ScoreRequest
from amor.models.build import build
from amor.presets import preset
model = build(preset("amor-mamba2", "tiny", vocab=128256)).eval()
draw = random.Random(0)
tokens = lambda n: tuple(draw.randrange(128256) for _ in range(n))
scorer = Scorer(model)
list(scorer.score([ScoreRequest(tokens(20), tokens(4))]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
list(scorer.score([ScoreRequest(tokens(2032), tokens(16))]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert float(ran.stdout) < 300


def test_counts_of_another_number_of_blocks_in_a_store_are_one_line(tmp_path):
    judge = Judge(small("amor-mamba2", vocab=258), bytes_tokenizer(), "it", Store(None))
    questions = [("a", 1), ("a", 2)]

    def compute(wanted):
        for index in wanted:
            yield index, [0.0, True], {"target": GateCounts(tokens=4, fires=(1,) * (3 + index))}

    with pytest.raises(AmorError, match="counts of 4 blocks beside counts of 3"):
        judge.answer("loglikelihood", questions, compute)


def test_a_stored_value_of_another_type_is_computed_again(tmp_path, caplog):
    good = '{"key": "a", "kind": "loglikelihood", "value": [-1.5, true]}'
    bad = '{"key": "b", "kind": "loglikelihood", "value": [-1.5]}'
    (tmp_path / "requests.jsonl").write_text(f"{good}\n{bad}\n")
    assert set(Store(tmp_path / "requests.jsonl").answers) == {"a"}
    assert "1 line(s) cannot be read" in caplog.text
