"""The laws of traces, and of the command that shows them."""

import json
import re

import pytest
import torch
from evaluations import fits_a_column
from laws import close, plain, small, tokens

from amor import typed
from amor.cli import main
from amor.data.spelling import Speller, kinds, rare
from amor.data.tokenizer import bytes_tokenizer
from amor.errors import AmorError
from amor.gates.override import override_gates
from amor.judge.choosing import WAYS
from amor.judge.gates import RecordingGate, own_gates
from amor.judge.prompts import PAPER
from amor.judge.trace import trace
from amor.models.folder import save
from amor.models.gated import PassOptions
from amor.records.trace import Traces
from amor.records.value import Value
from amor.study import figures
from amor.study.trace import verdict

TEXT = "The old tower, 12 m tall, is é-shaped.\nIt fell."


def reading(name="amor-mamba2", text=TEXT):
    tokenizer = bytes_tokenizer()
    model = small(name, vocab=257)
    return model, tokenizer, tokenizer.encode(text).ids


def test_watching_a_gate_changes_nothing():
    model = small("amor-mamba2")
    held = tokens(2, 30)
    plain = model(held)
    watched = [RecordingGate(gate, "entropy", "margin") for gate in own_gates(model)]
    with torch.no_grad():
        seen = model(held, options=PassOptions(gates=watched))
    close(seen.hidden, plain.hidden.detach())
    for gate, a, b in zip(watched, seen.gates, plain.gates, strict=True):
        assert torch.equal(a.fire, b.fire)
        close(gate.values("entropy", 0), b.score)


def test_a_trace_in_which_no_gate_fired_begins_with_that():
    model, tokenizer, ids = reading()
    never = trace(model, tokenizer, ids, gates=override_gates(own_gates(model), "never"))
    assert verdict(never).startswith("No gate fired: attention ran on none of the tokens, ")
    always = trace(model, tokenizer, ids, gates=override_gates(own_gates(model), "always"))
    assert verdict(always).startswith("Attention ran on 100 / 100")


def test_a_trace_says_what_the_model_did():
    model, tokenizer, ids = reading()
    found = plain(trace(model, tokenizer, ids))
    held = torch.tensor([ids])
    with torch.no_grad():
        out = model(held[:, :-1], targets=held[:, 1:])
        whole = model(held)
    for t, token in enumerate(found["tokens"]):
        assert token["fire"] == [bool(g.fire[0, t]) for g in whole.gates]
        close(torch.tensor(token["entropy"]), torch.stack([g.score[0, t] for g in whole.gates]))
        # surprise stands at the token that was predicted, entropy at the token that was read
        assert token["surprise"] == (
            None if t == 0 else pytest.approx(out.nll[0, t - 1].item(), rel=1e-4)
        )
    chances = model.logits(whole.hidden[0]).softmax(-1)
    for t, token in enumerate(found["tokens"][1:]):
        assert token["p"]["as_is"] == pytest.approx(chances[t, ids[t + 1]].item(), rel=1e-3)
        assert found["tokens"][t]["guesses"][0]["p"] == pytest.approx(
            chances[t].max().item(), rel=1e-3
        )
    assert found["thresholds"] == [
        pytest.approx(float(gate.threshold)) for gate in own_gates(model)
    ]
    assert any(any(token["fire"]) for token in found["tokens"]), (
        "a trace of a gate that never fires tests little"
    )


@pytest.mark.parametrize(("gate", "policy"), [("never", "closed"), ("always", "open")])
def test_closed_and_open_are_the_models_without_a_gate(gate, policy):
    model, tokenizer, ids = reading()
    found = plain(trace(model, tokenizer, ids))
    other = small("amor-mamba2", vocab=257, **{"blocks.gate": gate})
    other.load_state_dict(model.state_dict(), strict=False)
    held = torch.tensor([ids])
    with torch.no_grad():
        nll = other(held[:, :-1], targets=held[:, 1:]).nll[0]
    close(torch.tensor([token["p"][policy] for token in found["tokens"][1:]]), torch.exp(-nll))
    assert found["loss"][policy] == pytest.approx(nll.mean().item(), rel=1e-4)


def test_a_long_text_is_traced_in_pieces_that_do_not_show(monkeypatch):
    model, tokenizer, ids = reading(text=TEXT * 3)
    whole = plain(trace(model, tokenizer, ids))
    monkeypatch.setattr("amor.judge.trace.CHUNK", 17)
    parts = plain(trace(model, tokenizer, ids))
    for name in ("as_is", "closed", "open"):
        close(
            *(
                torch.tensor([token["p"][name] for token in found["tokens"][1:]])
                for found in (parts, whole)
            )
        )
    assert [token["fire"] for token in parts["tokens"]] == [
        token["fire"] for token in whole["tokens"]
    ]


def test_every_architecture_has_a_trace_and_one_token_is_a_text():
    for name in ("mamba2", "amor-gated-deltanet", "amor-mamba2-nogate", "amor-mamba2-classic"):
        model, tokenizer, _ = reading(name)
        for text in ("a", "ab"):
            found = plain(trace(model, tokenizer, tokenizer.encode(text).ids))
            assert (
                len(found["tokens"]) == len(text)
                and len(found["tokens"][0]["entropy"]) == found["blocks"]
            )
    with pytest.raises(AmorError, match="empty"):
        trace(model, tokenizer, [])


def test_the_command_takes_bos_and_no_bos(tmp_path, capsys):
    from test_decode_generate import bos_tokenizer

    save(small("amor-mamba2", vocab=258), tmp_path / "m", bos_tokenizer())
    (tmp_path / "book.txt").write_text("abc" * 30)
    for words, first in (((), "<s>"), (("--bos",), "<s>"), (("--no-bos",), "a")):
        assert main(["trace", str(tmp_path / "m"), "--text", "abc", "--json", *words]) == 0
        tokens_read = last_json(capsys)["traces"][0]["tokens"]
        assert tokens_read[0]["text"] == first and len(tokens_read) == (4 if first == "<s>" else 3)
    value = [
        "trace",
        str(tmp_path / "m"),
        "--value",
        "--file",
        str(tmp_path / "book.txt"),
        "--json",
    ]
    losses = []
    for words in ((), ("--bos",), ("--no-bos",)):
        assert main([*value, "--windows", "2", "--context", "16", *words]) == 0
        losses.append(last_json(capsys)["losses"]["never"]["nll"])
    assert losses[0] == losses[1] != losses[2]


def test_every_token_has_one_kind_and_the_summary_counts_each_once():
    model, tokenizer, ids = reading()
    found = plain(trace(model, tokenizer, ids))
    rows = {row["class"]: row for row in found["summary"]}
    assert (
        rows["all"]["count"]
        == len(ids)
        == sum(row["count"] for name, row in rows.items() if name not in ("all", "rare"))
    )
    fired = [token["fire"][0] for token in found["tokens"] if token["kind"] == "continuation"]
    assert rows["continuation"]["fire_rate"][0] == pytest.approx(sum(fired) / len(fired))


def test_kinds_follow_the_words():
    tokenizer = bytes_tokenizer()
    text = "An é 12,\n"
    ids = [*tokenizer.encode(text).ids, 256]
    found = kinds(ids, Speller(tokenizer))
    word, space = ["first in word", "continuation"], ["whitespace"]
    assert found == [
        *word,
        *space,
        *word,
        *space,
        "digit",
        "digit",
        "punctuation",
        *space,
        "special",
    ]


def test_a_token_is_spelled_by_its_bytes():
    speller = Speller(bytes_tokenizer())
    assert [speller(i) for i in "é".encode()] == ["\\xc3", "\\xa9"]
    assert (
        speller(ord("a")) == "a" and speller(256) == "<|end_of_text|>" and speller(300) == "<300>"
    )


def test_rare_is_the_later_half_of_a_learned_vocabulary_or_the_rarest_of_a_text():
    assert rare([3, 4999, 5000, 9999], 10_000) == [False, False, True, True]
    found = rare([1] * 50 + [2] * 48 + [3] + [4], 257)
    assert found == [False] * 98 + [True, True]


@pytest.fixture
def folder(tmp_path):
    model = small("amor-mamba2", vocab=257, context=16)
    save(model, tmp_path / "model", bytes_tokenizer())
    return str(tmp_path / "model")


def last_json(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_trace_writes_a_page_that_fetches_nothing(folder, tmp_path, capsys):
    out = tmp_path / "out"
    text = "a < b </script> & ⏎ é"
    assert main(["trace", folder, "--text", text, "--out", str(out), "--json"]) == 0
    found = last_json(capsys)
    assert found["written"] == [
        str(out / f"trace.{kind}") for kind in ("json", "html", "png", "svg")
    ]
    page = (out / "trace.html").read_text()
    assert page.count("</script>") == 2 and not re.search(
        r"(src|href)=(?!\"#)|https?://(?!www.w3.org)|@import|url\((?!#)", page
    )
    held = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert (
        held["traces"] == found["traces"] == json.loads((out / "trace.json").read_text())["traces"]
    )


def test_no_text_can_end_the_script_that_holds_it():
    from amor.study.trace import trace_page

    model, tokenizer, ids = reading()
    shown = trace_page(
        Traces(traces=(trace(model, tokenizer, ids, "</script><script>alert(1)</script>"),))
    )
    assert shown.count("</script>") == 2
    assert json.loads(re.search(r'id="data">(.*?)</script>', shown, re.S)[1])["traces"][0][
        "title"
    ].startswith("</script>")


def test_the_strip_marks_what_fired(folder, capsys):
    assert main(["trace", folder, "--text", "tower", "--json"]) == 0
    shown = capsys.readouterr().out
    found = json.loads(shown.strip().splitlines()[-1])["traces"][0]
    lines = shown.splitlines()
    for k in range(3):
        marks = next(line for line in lines if line.startswith(f"block {k} "))[8:]
        assert marks == "".join("●" if token["fire"][k] else "·" for token in found["tokens"])
    assert lines[0][8:] == "tower"


def test_a_text_longer_than_the_limit_is_cut_and_said_to_be(folder, capsys):
    assert main(["trace", folder, "--text", TEXT, "--limit", "5", "--json"]) == 0
    found = last_json(capsys)["traces"][0]
    assert len(found["tokens"]) == 5 and "first 5 of" in found["title"]


def test_the_paper_s_examples_are_a_preset(folder, capsys):
    assert main(["trace", folder, "--preset", "paper", "--json"]) == 0
    traces = last_json(capsys)["traces"]
    assert [found["title"] for found in traces] == list(PAPER)
    assert "".join(token["text"] for token in traces[0]["tokens"]) == PAPER["teaser"]


def test_value_judges_a_file_and_prepared_data(folder, prepared, tmp_path, capsys):
    file = tmp_path / "held.txt"
    file.write_text(TEXT * 4)
    out = tmp_path / "judged"
    assert (
        main(
            [
                "trace",
                folder,
                "--value",
                "--file",
                str(file),
                "--windows",
                "3",
                "--out",
                str(out),
                "--json",
            ]
        )
        == 0
    )
    found = last_json(capsys)
    assert found["data"] == {
        "source": str(file),
        "windows": 3,
        "context": 16,
        "tokens": 48,
        "documents": "joined",
    }
    page = (out / "value.html").read_text()
    assert "<svg" in page and page.index(found["verdict"][0]) < page.index('class="tiles"')
    fits_a_column(figures.draw("value", typed.read(Value, out / "value.json")))
    assert (out / "value.png").stat().st_size > 1000
    assert (
        main(
            ["trace", folder, "--value", "--data", f"{prepared}/valid", "--windows", "2", "--json"]
        )
        == 0
    )
    assert last_json(capsys)["data"]["windows"] == 2
    assert (
        main(
            [
                "trace",
                folder,
                "--choices",
                "--data",
                str(prepared),
                "--windows",
                "2",
                "--out",
                str(out),
                "--json",
            ]
        )
        == 0
    )
    found = last_json(capsys)
    assert json.loads((out / "choices.json").read_text())["choices"] == found["choices"]
    assert (
        found["data"]["windows"] == 2
        and len(found["choices"]) == 2 + len(WAYS)
        and found["rates"] == [0.05, 0.1, 0.22, 0.44]
    )


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "nothing to trace"),
        (["--text", ""], "empty"),
        (["--preset", "papper"], "'paper'"),
        (["--file", "missing.txt"], "no such file"),
        (["--value"], "--data"),
        (["--choices"], "--data"),
        (["--choices", "--data", "d", "--png", "a.png"], "leave --png away"),
        (["--text", "a", "--png", "out.jpeg"], ".png"),
        (["--text", "a", "--fire-rate", "1.5"], "between 0 and 1"),
    ],
)
def test_a_wrong_request_is_one_line(folder, words, hint, capsys):
    assert main(["trace", folder, *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and hint in said


def test_a_fire_rate_moves_the_threshold(folder, capsys):
    rates = []
    for rate in ("0", "0.5", "1"):
        assert main(["trace", folder, "--text", TEXT, "--fire-rate", rate, "--json"]) == 0
        rates.append(last_json(capsys)["traces"][0]["fire_rate"][0])
    assert rates[0] == 0 < rates[1] < rates[2] == 1
