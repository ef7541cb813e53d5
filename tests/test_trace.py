"""The laws of traces and of gate value accounting."""

import json
import math
import re

import numpy as np
import pytest
import torch
from laws import close, small, tokens

from amor.cli import main
from amor.data.tokenizer import bytes_tokenizer
from amor.decode.override import Told, Watched, all_told, gated, own_gates
from amor.decode.policies import Reader, largest, shuffled
from amor.decode.prompts import PAPER
from amor.decode.resample import mean, ratio
from amor.decode.spelling import Speller, kinds, rare
from amor.decode.trace import PIECE, read, trace
from amor.decode.value import passes, value
from amor.decode.windows import Windows, of_ids, of_shards, spaced
from amor.errors import AmorError
from amor.models.folder import save

TEXT = "The old tower, 12 m tall, is é-shaped.\nIt fell."


def reading(name="amor-mamba2", text=TEXT):
    tokenizer = bytes_tokenizer()
    model = small(name, vocab=257)
    return model, tokenizer, tokenizer.encode(text).ids


def cut(rows=5, columns=24):
    held = tokens(rows, columns + 1)
    return Windows(held[:, :-1].contiguous(), held[:, 1:].contiguous(), None, "invented")


def reader(name, windows=None):
    return Reader(small(name), windows or cut(), 2, lambda read: None)


def test_gates_come_back_even_after_an_error():
    model = small("amor-mamba2")
    own = own_gates(model)
    with pytest.raises(AmorError), gated(model, all_told(model, True)):  # noqa: PT012
        assert own_gates(model) != own
        model(torch.zeros(1, 0, dtype=torch.long))
    assert all(a is b for a, b in zip(own_gates(model), own, strict=True))


def test_watching_a_gate_changes_nothing():
    model = small("amor-mamba2")
    held = tokens(2, 30)
    plain = model(held)
    watched = [Watched(gate, "entropy", "margin") for gate in own_gates(model)]
    with gated(model, watched), torch.no_grad():
        seen = model(held)
    close(seen.hidden, plain.hidden.detach())
    for gate, a, b in zip(watched, seen.gates, plain.gates, strict=True):
        assert torch.equal(a.fire, b.fire)
        close(gate.seen("entropy", 0), b.score)


def test_a_trace_says_what_the_model_did():
    model, tokenizer, ids = reading()
    found = trace(model, tokenizer, ids)
    held = torch.tensor([ids])
    with torch.no_grad():
        out = model(held[:, :-1], targets=held[:, 1:])
        whole = model(held)
    for t, token in enumerate(found["tokens"]):
        assert token["fire"] == [bool(g.fire[0, t]) for g in whole.gates]
        close(torch.tensor(token["entropy"]), torch.stack([g.score[0, t] for g in whole.gates]))
        # surprise stands at the token that was predicted, entropy at the token that was read
        assert token["surprise"] == (None if t == 0 else pytest.approx(out.nll[0, t - 1].item(), rel=1e-4))
    chances = model.logits(whole.hidden[0]).softmax(-1)
    for t, token in enumerate(found["tokens"][1:]):
        assert token["p"]["as_is"] == pytest.approx(chances[t, ids[t + 1]].item(), rel=1e-3)
        assert found["tokens"][t]["guesses"][0]["p"] == pytest.approx(chances[t].max().item(), rel=1e-3)
    assert found["thresholds"] == [pytest.approx(float(gate.threshold)) for gate in own_gates(model)]
    assert any(any(token["fire"]) for token in found["tokens"]), "a trace of a gate that never fires tests little"


@pytest.mark.parametrize(("gate", "policy"), [("never", "closed"), ("always", "open")])
def test_closed_and_open_are_the_models_without_a_gate(gate, policy):
    model, tokenizer, ids = reading()
    found = trace(model, tokenizer, ids)
    other = small("amor-mamba2", vocab=257, **{"blocks.gate": gate})
    other.load_state_dict(model.state_dict(), strict=False)
    held = torch.tensor([ids])
    with torch.no_grad():
        nll = other(held[:, :-1], targets=held[:, 1:]).nll[0]
    close(torch.tensor([token["p"][policy] for token in found["tokens"][1:]]), torch.exp(-nll))
    assert found["loss"][policy] == pytest.approx(nll.mean().item(), rel=1e-4)


def test_a_long_text_is_traced_in_pieces_that_do_not_show(monkeypatch):
    model, _, ids = reading(text=TEXT * 3)
    whole = read(model, torch.tensor(ids), own_gates(model))
    monkeypatch.setattr("amor.decode.trace.PIECE", 17)
    parts = read(model, torch.tensor(ids), own_gates(model))
    assert len(ids) < PIECE
    close(parts.nll, whole.nll)
    assert torch.equal(parts.fire, whole.fire)


def test_every_architecture_has_a_trace_and_one_token_is_a_text():
    for name in ("mamba2", "amor-gated-deltanet", "amor-mamba2-nogate", "amor-mamba2-classic"):
        model, tokenizer, _ = reading(name)
        for text in ("a", "ab"):
            found = trace(model, tokenizer, tokenizer.encode(text).ids)
            json.dumps(found, allow_nan=False)
            assert len(found["tokens"]) == len(text) and len(found["tokens"][0]["entropy"]) == found["blocks"]
    with pytest.raises(AmorError, match="empty"):
        trace(model, tokenizer, [])


def test_every_token_has_one_kind_and_the_summary_counts_each_once():
    model, tokenizer, ids = reading()
    found = trace(model, tokenizer, ids)
    rows = {row["class"]: row for row in found["summary"]}
    assert rows["all"]["count"] == len(ids) == sum(row["count"] for name, row in rows.items() if name not in ("all", "rare"))
    fired = [token["fire"][0] for token in found["tokens"] if token["kind"] == "continuation"]
    assert rows["continuation"]["fire_rate"][0] == pytest.approx(sum(fired) / len(fired))


def test_kinds_follow_the_words():
    tokenizer = bytes_tokenizer()
    text = "An é 12,\n"
    ids = [*tokenizer.encode(text).ids, 256]
    found = kinds(ids, Speller(tokenizer))
    word, space = ["first in word", "continuation"], ["whitespace"]
    assert found == [*word, *space, *word, *space, "digit", "digit", "punctuation", *space, "special"]


def test_a_token_is_spelled_by_its_bytes():
    speller = Speller(bytes_tokenizer())
    assert [speller(i) for i in "é".encode()] == ["\\xc3", "\\xa9"]
    assert speller(ord("a")) == "a" and speller(256) == "<|end_of_text|>" and speller(300) == "<300>"


def test_rare_is_the_later_half_of_a_learned_vocabulary_or_the_rarest_of_a_text():
    assert rare([3, 4999, 5000, 9999], 10_000) == [False, False, True, True]
    found = rare([1] * 50 + [2] * 48 + [3] + [4], 257)
    assert found == [False] * 98 + [True, True]


def test_with_one_block_two_passes_give_the_loss_of_every_choice():
    judged = reader("amor-mamba2-classic")
    fire = torch.rand(judged.shape, generator=torch.Generator().manual_seed(3)) < 0.4
    run, fired = judged.run(lambda here: [Told(block[here]) for block in fire])
    assert torch.equal(fired, fire)
    close(judged.told(fire), run)


def test_with_more_blocks_a_choice_is_run_again():
    judged = reader("amor-mamba2")
    fire = torch.rand(judged.shape, generator=torch.Generator().manual_seed(3)) < 0.4
    with torch.no_grad(), gated(judged.model, [Told(block) for block in fire]):
        plain = judged.model(judged.windows.tokens, targets=judged.windows.targets).nll
    close(judged.told(fire), plain)


@pytest.mark.parametrize("name", ["amor-mamba2-classic", "amor-gated-deltanet-classic"])
def test_no_choice_of_as_many_tokens_beats_the_oracle_of_one_block(name):
    judged = reader(name)
    nll, fire, _, gain = judged.as_it_is()
    close(gain[0], judged.closed - judged.opened, "gain")
    best = judged.told(judged.oracle(gain[0], lambda k, g: largest(g, int(fire.sum())))).mean()
    assert best < nll.mean()
    for seed in range(20):
        assert best < judged.told(shuffled(fire, seed)).mean()


def test_documents_apart_are_judged_apart(prepared):
    model = small("amor-mamba2", vocab=257)
    windows = of_shards(prepared / "train", 300, 20, None, 257, apart=True)
    assert windows.reset is not None and windows.reset[:, 1:].any(), "no document begins inside a window"
    judged = Reader(model, windows, 2, lambda read: None)
    with torch.no_grad(), gated(model, all_told(model, True)):
        plain = model(windows.tokens, reset=windows.reset, targets=windows.targets).nll
    close(judged.opened, plain)


def test_the_gain_of_the_last_block_is_what_closing_it_costs():
    judged = reader("amor-mamba2")
    nll, fire, _, gain = judged.as_it_is()
    shut = fire.clone()
    shut[-1] = False
    # nothing after the last block reads what it did, so its gain is exact token by token
    close(judged.told(shut) - nll, gain[-1] * fire[-1], "gain")


def test_a_shuffled_choice_fires_as_often_and_on_the_same_combinations():
    fire = torch.rand(3, 4, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    other = shuffled(fire, 1)
    assert not torch.equal(fire, other)
    patterns = [sorted(map(tuple, f.flatten(1).T.tolist())) for f in (fire, other)]
    assert patterns[0] == patterns[1]


@pytest.mark.parametrize(("name", "blocks"), [("amor-mamba2-classic", 1), ("amor-mamba2", 3)])
def test_the_accounting_adds_up(name, blocks):
    model, windows, read_tokens = small(name), cut(), []
    found = value(model, windows, rates=(0, 0.3, 1), rows=2, seen=read_tokens.append)
    json.dumps(found, allow_nan=False)
    assert sum(read_tokens) == passes(blocks, rates=3) * windows.tokens.numel()
    losses = found["losses"]
    with torch.no_grad():
        out = model(windows.tokens, targets=windows.targets)
    assert losses["gate"]["nll"] == pytest.approx(out.nll.mean().item(), rel=1e-5)
    assert losses["gate"]["fire_rate"] == pytest.approx([g.fire.float().mean().item() for g in out.gates])
    assert losses["oracle"]["fire_rate"] == losses["gate"]["fire_rate"]
    assert losses["oracle"]["nll"] < min(losses["gate"]["nll"], losses["random"]["nll"])
    first, middle, last = found["curve"]
    for policy in ("gate", "random", "oracle"):
        assert first[policy]["nll"] == pytest.approx(losses["never"]["nll"], rel=1e-5)
        assert last[policy]["nll"] == pytest.approx(losses["always"]["nll"], rel=1e-5)
    assert 0 < middle["fire_rate"] < 1 and found["exact"] == (blocks == 1)
    for row, block in zip(found["agreement"], found["calibration"], strict=True):
        assert 0 <= row["best"] <= 1 and row["captured"] <= 1
        assert sum(b["tokens"] for b in block) == windows.tokens.numel()


def test_precision_and_recall_count_what_they_say():
    from amor.decode.value import agreement

    gain = torch.tensor([[3.0, 2.0, -1.0, 1.0], [0.5, -2.0, -3.0, -4.0]])
    fire = torch.tensor([[True, False, True, True], [False, False, False, False]])
    found = agreement(0, fire, gain)
    # best three: 3, 2, 1; fired: 3, -1, 1
    assert found["best"] == pytest.approx(2 / 3)
    assert found["precision"] == pytest.approx(2 / 3)
    assert found["recall"] == pytest.approx(2 / 4)
    assert found["captured"] == pytest.approx((3 - 1 + 1) / 6)


def test_equal_entropies_stay_in_one_group():
    from amor.decode.value import calibration

    gain = torch.arange(12.0).view(3, 4)
    assert [(b["tokens"], b["gain"]) for b in calibration(torch.full((3, 4), 0.5), gain)] == [(12, pytest.approx(5.5))]
    split = calibration(torch.arange(12.0).view(3, 4) / 12, gain)
    assert sum(b["tokens"] for b in split) == 12 and [b["gain"] for b in split] == sorted(b["gain"] for b in split)


def test_a_gate_that_cannot_aim_is_judged_without_its_curve():
    found = value(small("amor-mamba2-nogate"), cut(), rates=(0, 0.5))
    assert all("gate" not in point and "oracle" in point for point in found["curve"])
    assert any("cannot aim" in note for note in found["notes"])


def test_a_poor_gate_is_called_poor():
    found = value(small("amor-mamba2"), cut(), rates=(0, 1))
    assert any(sentence.startswith("Poor") for sentence in found["verdict"])


def test_bootstrapped_errors_are_those_of_the_mean():
    values = torch.randn(400, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    level, error = mean(values)
    assert level == pytest.approx(values.mean().item())
    assert error == pytest.approx(values.mean(1).std().item() / math.sqrt(400), rel=0.15)
    assert all(math.isnan(x) for x in ratio(torch.zeros(3), torch.zeros(3)))


def test_windows_lie_apart_and_over_the_whole_text():
    starts = spaced(1000, 50, 7, "text")
    assert starts[0] == 0 and starts[-1] + 50 < 1000 <= starts[-1] + 150 and min(np.diff(starts)) >= 50
    held = of_ids(np.arange(1000), 50, 7, "text")
    assert torch.equal(held.targets, held.tokens + 1)
    with pytest.raises(AmorError, match="two windows"):
        spaced(60, 50, 7, "text")


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
    assert found["written"] == [str(out / f"trace.{kind}") for kind in ("json", "html", "png", "svg")]
    page = (out / "trace.html").read_text()
    assert page.count("</script>") == 2 and not re.search(r"(src|href)=|https?://(?!www.w3.org)|@import|url\(", page)
    held = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert held["traces"] == found["traces"] == json.loads((out / "trace.json").read_text())["traces"]


def test_no_text_can_end_the_script_that_holds_it():
    from amor.study.page import trace_page

    shown = trace_page({"traces": [{"title": "</script><script>alert(1)</script>"}]})
    assert shown.count("</script>") == 2
    assert json.loads(re.search(r'id="data">(.*?)</script>', shown, re.S)[1])["traces"][0]["title"].startswith("</script>")


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
    assert main(["trace", folder, "--value", "--file", str(file), "--windows", "3", "--out", str(out), "--json"]) == 0
    found = last_json(capsys)
    assert found["data"] == {"source": str(file), "windows": 3, "context": 16, "tokens": 48, "documents": "joined"}
    assert "<svg" in (out / "value.html").read_text() and (out / "value.png").stat().st_size > 1000
    assert main(["trace", folder, "--value", "--data", f"{prepared}/valid", "--windows", "2", "--json"]) == 0
    assert last_json(capsys)["data"]["windows"] == 2


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "nothing to trace"),
        (["--text", ""], "empty"),
        (["--preset", "papper"], "'paper'"),
        (["--file", "missing.txt"], "cannot be read"),
        (["--value"], "--data"),
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
