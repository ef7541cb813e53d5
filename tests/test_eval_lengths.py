"""The laws of perplexity against length: one pass holds every prefix, a segment stands for
itself, and a set says what it is."""

import gzip
import json
import math
from itertools import islice

import msgspec
import numpy as np
import pytest
import torch
from laws import Largest, small

from amor import typed
from amor.data.loader import cut
from amor.data.tokenizer import bytes_tokenizer
from amor.errors import AmorError
from amor.eval import perplexity, texts
from amor.eval.lengths import LENGTHS, Segment, Span, curve, each_segment, spans
from amor.eval.tasks.long_texts import SETS
from amor.judge.evaluate import evaluate
from amor.judge.gates import force_all
from amor.judge.windows import of_shards
from amor.ops import linear
from amor.presets import NAMES

END = 256
WORDS = "the state of a token is what the model has read of it so far and no more than that"
SHORT = (12, 20, 37)


def model(name="amor-mamba2", **changes):
    return small(name, vocab=257, **changes)


def documents(count, size, seed=0):
    chance = np.random.default_rng(seed)
    words = WORDS.split()
    return [" ".join(chance.choice(words, size)) for _ in range(count)]


def judged(of, chosen, **more):
    return list(each_segment(of, chosen, **({"lengths": SHORT, "chunk": 8, "bucket": 6} | more)))


def one_line(error):
    return "\n" not in str(error.value)


def test_the_ten_lengths_go_from_3k_to_20k():
    assert len(LENGTHS) == 10 and LENGTHS[:3] == (3072, 4096, 6144) and LENGTHS[-1] == 20480


@pytest.mark.parametrize("name", NAMES)
def test_one_pass_equals_a_pass_for_every_length(name):
    of, chosen = model(name), spans(bytes_tokenizer(), documents(3, 30), SHORT, 3)
    found = curve(judged(of, chosen))
    assert found.lengths == SHORT and found.segments == 3
    for i, length in enumerate(SHORT):
        losses, last, fired = [], [], []
        for span in chosen:
            window = cut(torch.from_numpy(span.ids[None, : length + 1]))
            with torch.no_grad():
                out = of(window.tokens, targets=window.targets)
            losses.append(float(out.nll.double().mean()))
            last.append(float(out.nll[0, -6:].double().mean()))
            fired.append([float(gate.fire[0, -6:].double().mean()) for gate in out.gates])
        assert found.prefix[i] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
        assert found.bucket[i] == pytest.approx(math.exp(np.mean(last)), rel=1e-5)
        assert found.errors[i] == pytest.approx(
            found.prefix[i] * np.std(losses, ddof=1) / math.sqrt(3), rel=1e-3
        )
        if of.blocks:
            assert found.rates[i] == pytest.approx(np.mean(fired, axis=0).tolist())
    assert bool(found.rates) == bool(of.blocks)


def test_the_prefix_perplexity_is_the_one_evaluation_finds():
    of, chosen = model("mamba2"), spans(bytes_tokenizer(), documents(2, 30), SHORT, 2)
    valid = evaluate(of, cut(torch.from_numpy(np.stack([span.ids for span in chosen]))), rows=2)
    assert curve(judged(of, chosen)).prefix[-1] == pytest.approx(valid.perplexity, rel=1e-5)


def test_gates_closed_and_open_are_counted_as_such():
    of, chosen = model(), spans(bytes_tokenizer(), documents(2, 30), SHORT, 2)
    found = {fire: judged(of, chosen, gates=force_all(of, fire)) for fire in (False, True)}
    assert (
        curve(found[False]).rates == ((0.0,) * 3,) * 3
        and curve(found[True]).rates == ((1.0,) * 3,) * 3
    )
    assert found[True][0].gates.fires == (37, 37, 37) and found[True][0].gates.tokens == 37
    own = judged(of, chosen)
    assert 0 < sum(own[0].gates.fires) < 3 * 37
    assert len({curve(each).prefix for each in (own, found[False], found[True])}) == 3


def test_counts_are_of_every_token_of_the_segment():
    of, chosen = model(), spans(bytes_tokenizer(), documents(1, 30), SHORT, 1)
    with torch.no_grad():
        out = of(torch.from_numpy(chosen[0].ids[None, :-1]))
    found = judged(of, chosen)[0].gates
    assert found.fires == tuple(int(gate.fire.sum()) for gate in out.gates)
    assert found.tokens == len(chosen[0].ids) - 1


def test_going_on_after_a_stop_equals_never_stopping():
    of, chosen = model(), spans(bytes_tokenizer(), documents(4, 30), SHORT, 4)
    whole = judged(of, chosen)
    each = each_segment(of, chosen, lengths=SHORT, chunk=8, bucket=6)
    kept = [typed.from_json(Segment, typed.line(one), "store") for one in islice(each, 2)]
    assert kept + judged(of, chosen[2:]) == whole


def test_the_spread_of_one_segment_is_not_made_up():
    assert curve(judged(model(), spans(bytes_tokenizer(), documents(1, 30), SHORT, 1))).errors == (
        0.0,
        0.0,
        0.0,
    )


def test_a_long_segment_holds_no_logit_for_every_token_and_word():
    of, ids = small("amor-mamba2", vocab=4001), np.arange(1025) % 4001
    with Largest() as largest:
        judged(of, [Span(ids, 1)], lengths=(512, 1024), chunk=64)
    assert largest.numel < 1024 * 4001 / 4


def test_long_documents_give_their_beginning_and_short_ones_are_joined():
    long, short = documents(2, 40, seed=1), ["abc", "", "defgh", "ij" * 20]
    found = spans(bytes_tokenizer(), [short[0], long[0], *short[1:], long[1]], (50,), 5)
    assert [span.documents for span in found] == [1, 1, 3]
    assert [bytes(span.ids.tolist()).decode() for span in found[:2]] == [text[:51] for text in long]
    joined = [*b"abc", END, *b"defgh", END, *b"ij" * 20, END]
    assert found[2].ids.tolist() == joined[:51]
    assert [span.documents for span in spans(bytes_tokenizer(), [*short, *long], (50,), 2)] == [
        1,
        1,
    ]


def test_what_is_left_of_a_joined_document_begins_the_next_segment():
    stream = [*b"abcdefg", END, *b"hijklmn", END, *b"opqrstu", END]
    found = spans(bytes_tokenizer(), ["abcdefg", "hijklmn", "opqrstu"], (9,), 9)
    assert [span.ids.tolist() for span in found] == [stream[:10], stream[10:20]]
    assert [span.documents for span in found] == [2, 2]


def test_a_stream_without_long_documents_is_not_read_for_ever():
    def endless():
        while True:
            yield "twenty characters..."

    assert len(spans(bytes_tokenizer(), endless(), (50,), 2)) == 2


@pytest.mark.parametrize("lengths", [(), (0, 4), (8, 4), (4, 4)])
def test_lengths_that_do_not_rise_are_refused(lengths):
    with pytest.raises(AmorError, match=r"lengths .* larger than the one before") as error:
        spans(bytes_tokenizer(), documents(1, 9), lengths, 1)
    assert one_line(error)


def test_wrong_texts_are_one_line():
    with pytest.raises(
        AmorError, match=r"books holds 6 tokens, less than one segment of 38; give more"
    ) as error:
        spans(bytes_tokenizer(), ["abc", "def"], SHORT, 2, source="books")
    assert one_line(error)
    with pytest.raises(AmorError, match="segments 0"):
        spans(bytes_tokenizer(), ["abc"], (2,), 0)
    with pytest.raises(AmorError, match=r"token 250 .* vocabulary of 211"):
        judged(small("mamba2"), [Span(np.full(38, 250), 1)])
    found = judged(model("mamba2"), [Span(np.arange(38), 1)])
    with pytest.raises(AmorError, match="two curves"):
        curve([*found, msgspec.structs.replace(found[0], lengths=(12, 20, 36))])
    with pytest.raises(AmorError, match="no segments"):
        curve([])


def test_a_broken_model_is_said_to_be_broken():
    of = model("mamba2")
    with torch.no_grad():
        of.embed.weight[5] = torch.nan
    with pytest.raises(AmorError, match="not finite"):
        judged(of, [Span(np.arange(38), 1)])


# The six sets


def write(path, *rows):
    path.parent.mkdir(exist_ok=True)
    held = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(held.encode()) if path.suffix == ".gz" else held.encode())


STAND_INS = {
    "gov_report": (
        "long/leval_gov_report.jsonl.gz",
        {"input": "A report.", "outputs": ["no"]},
        "A report.",
    ),
    "qmsum": (
        "long/qmsum_test.jsonl.gz",
        {
            "topic_list": [],
            "meeting_transcripts": [
                {"speaker": "Ann", "content": "Yes."},
                {"speaker": "Bob", "content": "No."},
            ],
        },
        "Ann: Yes.\nBob: No.",
    ),
    "qasper": (
        "long/qasper_yesno_papers.jsonl.gz",
        {
            "title": "On gates",
            "abstract": "We look.",
            "full_text": [
                {"section_name": "Work", "paragraphs": ["One.", "Two."]},
                {"section_name": None, "paragraphs": []},
            ],
        },
        "On gates\n\nWe look.\n\nWork\n\nOne.\n\nTwo.",
    ),
    "codeparrot": (
        "train/python_code_valid.jsonl.gz",
        {"path": "a.py", "content": "x = 1\n"},
        "x = 1\n",
    ),
    "pg19": ("train/classics_test.jsonl.gz", {"title": "T", "text": "Chapter 1"}, "Chapter 1"),
}


def test_stand_ins_are_read_and_named_and_what_is_missing_is_left_out(tmp_path):
    for file, row, _ in STAND_INS.values():
        write(tmp_path / file, row)
    found, skipped = texts.find(tmp_path)
    assert {name: list(each) for name, each in found.items()} == {
        name: [text] for name, (_, _, text) in STAND_INS.items()
    }
    assert all(
        f"{STAND_INS[name][0]} (a stand-in: " in each.source and len(each.sha256) == 64
        for name, each in found.items()
    )
    assert list(skipped) == ["narrativeqa"]
    assert (
        "lengths_narrativeqa.jsonl" in skipped["narrativeqa"]
        and "load_dataset" in skipped["narrativeqa"]
    )


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_set_s_own_file_comes_before_a_stand_in(tmp_path, ending):
    write(tmp_path / "train/classics_test.jsonl.gz", {"text": "a stand-in"})
    write(
        tmp_path / f"lengths_pg19.jsonl{ending}", {"text": "one"}, {"text": "two"}, {"text": "one"}
    )
    found, skipped = texts.find(tmp_path, ["pg19", "qmsum"])
    assert list(found["pg19"]) == ["one", "two"], "a document is read once"
    assert list(found["pg19"]) == ["one", "two"], "and again by whoever asks again"
    assert "stand-in" not in found["pg19"].source
    assert "long/qmsum_test.jsonl.gz" in skipped["qmsum"]


def test_results_say_where_documents_were_joined(tmp_path):
    write(
        tmp_path / "lengths_pg19.jsonl",
        *({"text": text} for text in [*documents(1, 30), "a few words", "and a few more of them"]),
    )
    found = texts.find(tmp_path, ["pg19"])[0]["pg19"]
    segments = judged(model(), spans(bytes_tokenizer(), found, (33,), 5), lengths=(33,))
    assert found.data(segments).source.endswith("short documents joined in 1 of 2 segments")
    assert found.data(segments[:1]).source == found.source and found.data(segments).rows == 2


def test_a_wrong_row_is_one_line_with_its_place(tmp_path):
    write(tmp_path / "lengths_pg19.jsonl", {"text": "one"}, {"words": "two"})
    write(
        tmp_path / "long/qmsum_test.jsonl.gz",
        {"meeting_transcripts": [{"speaker": "Ann", "content": 3}]},
    )
    found, _ = texts.find(tmp_path, ["pg19", "qmsum"])
    for name, place in {
        "pg19": "lengths_pg19.jsonl line 2: .*text",
        "qmsum": r"line 1: meeting_transcripts\[0\].content",
    }.items():
        with pytest.raises(AmorError, match=place) as error:
            list(found[name])
        assert one_line(error)
    with pytest.raises(AmorError, match="did you mean 'pg19'"):
        texts.find(tmp_path, ["pg-19"])
    with pytest.raises(AmorError, match="no folder"):
        texts.find(tmp_path / "nowhere")


def test_without_a_hub_a_set_is_left_out_with_the_command_that_supplies_it(monkeypatch):
    def nobody(name, config, split, verb, streaming):
        raise AmorError(f"hf:{name} cannot be opened: no network")

    monkeypatch.setattr("amor.data.hub._load", nobody)
    found, skipped = texts.find(None)
    assert not found and set(skipped) == set(SETS)
    assert all(
        f"FOLDER/lengths_{name}.jsonl" in why and "\n" not in why for name, why in skipped.items()
    )


def test_the_hub_s_sets_are_streamed(monkeypatch):
    asked = []

    class Rows(list):
        def skip(self, n):
            return self[n:]

    def opened(name, config, split, verb, streaming):
        asked.append((name, config, split))
        assert streaming
        return Rows({hub.field: text for hub, _ in SETS.values()} for text in ("one", "one", "two"))

    monkeypatch.setattr("amor.data.hub._load", opened)
    found, skipped = texts.find(None)
    assert not skipped and {name: list(each) for name, each in found.items()} == {
        name: ["one", "two"] for name in SETS
    }
    assert ("Xnhyacinth/LongBench", "qmsum", "test") in asked and "qmsum" in found["qmsum"].source


# Held-out perplexity


def plainly(of, windows):
    with torch.no_grad():
        return of(windows.tokens, targets=windows.targets).nll.double()


def spelled(windows):
    return [sum(token != END for token in row) for row in windows.targets.tolist()]


def test_held_out_tokens_of_a_prepared_folder(prepared):
    of = model()
    held = perplexity.held_out(prepared, bytes_tokenizer(), 257, context=64, count=9)
    assert len(held) == 9 and held.columns == 64 and held.source.endswith("valid")
    found = perplexity.metrics(list(perplexity.each_window(of, bytes_tokenizer(), held)))
    nll = plainly(of, held)
    assert found["perplexity,none"] == pytest.approx(math.exp(nll.mean()), rel=1e-5)
    sums = nll.sum(1) / math.log(2)
    assert found["bits_per_byte,none"] == pytest.approx(
        float(sums.sum()) / sum(spelled(held)), rel=1e-5
    )
    error = float(nll.mean(1).std()) / 3
    assert found["perplexity_stderr,none"] == pytest.approx(
        found["perplexity,none"] * error, rel=0.15
    )  # drawn again, not computed
    assert 0 < found["bits_per_byte_stderr,none"] < found["bits_per_byte,none"]
    about = perplexity.data(prepared, held)
    assert about.rows == 9 and about.source.endswith("valid") and len(about.sha256) == 64


@pytest.mark.parametrize("name", ["amor-mamba2", "gated-deltanet", "transformer"])
def test_a_window_s_bits_do_not_know_its_company(name, prepared):
    of = model(name)
    held = perplexity.held_out(prepared, bytes_tokenizer(), 257, context=33, count=10)
    whole = list(perplexity.each_window(of, bytes_tokenizer(), held))
    places = [7, 1, 2]
    assert list(perplexity.each_window(of, bytes_tokenizer(), held[places])) == [
        whole[i] for i in places
    ]


def test_products_are_those_whose_tokens_do_not_know_each_other():
    of, alone = model(), []
    of.register_forward_pre_hook(lambda *_: alone.append(linear.alone()))
    list(perplexity.each_window(of, None, cut(torch.arange(40).view(2, 20))))
    judged(of, spans(bytes_tokenizer(), documents(1, 30), SHORT, 1))
    assert len(alone) == 2 + 5 and all(alone) and not linear.alone()


def test_gates_are_counted_a_window_and_documents_may_stand_apart():
    of, ids = model(), torch.arange(4 * 33).view(4, 33) * 7 % 256
    ids[[1, 3], [5, 20]] = END
    held = cut(ids, END)
    assert held[[3, 1]].reset.equal(held.reset[[3, 1]])
    closed = list(perplexity.each_window(of, bytes_tokenizer(), held, gates=force_all(of, False)))
    assert [one.gates.fires for one in closed] == [(0, 0, 0)] * 4 and closed[0].gates.tokens == 32
    with torch.no_grad():
        out = of(held.tokens, reset=held.reset)
    found = list(perplexity.each_window(of, bytes_tokenizer(), held))
    assert [one.gates.fires for one in found] == [
        tuple(int(gate.fire[row].sum()) for gate in out.gates) for row in range(4)
    ]
    assert any(sum(one.gates.fires) for one in found)
    assert [one.bytes for one in found] == spelled(held) == [32, 31, 32, 31]


def test_prepared_documents_may_stand_apart(prepared):
    joined, apart = (
        of_shards(prepared / "train", 900, 1000, bytes_tokenizer(), 257, way)
        for way in (False, True)
    )
    assert joined.reset is None and apart.reset.sum() > len(apart)


def test_a_file_is_encoded_as_prepared_data_would_be(tmp_path):
    (tmp_path / "wiki.txt").write_text(" = A title = \n\n " + " ".join(documents(1, 60)) + " \n")
    write(tmp_path / "wiki.jsonl", {"text": "naïve café"}, {"text": "x" * 30})
    held = perplexity.held_out(tmp_path / "wiki.txt", bytes_tokenizer(), 257, context=32)
    assert bytes(held.tokens[0].tolist()).decode().startswith(" = A title = \n")
    held = perplexity.held_out(tmp_path / "wiki.jsonl", bytes_tokenizer(), 257, context=11)
    stream = [*"naïve café".encode(), END, *b"x" * 30, END]
    assert held.tokens.tolist() == [stream[i : i + 11] for i in (0, 11, 22)]
    assert held.targets.tolist() == [stream[i : i + 11] for i in (1, 12, 23)]
    assert perplexity.data(tmp_path / "wiki.jsonl", held).rows == len(held)


def test_bytes_are_those_of_the_text_however_tokens_cut_it():
    from amor.data.tokenizer import train_bpe

    text = "naïve café — " * 3 + WORDS
    tokenizer = train_bpe([text], 270)
    held = perplexity.sizes(tokenizer, 300)
    ids = tokenizer.encode(text).ids
    assert int(held[torch.tensor(ids)].sum()) == len(text.encode())
    assert held[tokenizer.token_to_id("<|end_of_text|>")] == 0


def test_without_bytes_there_are_no_bits_a_byte():
    from tokenizers import Tokenizer, models

    assert perplexity.sizes(Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), 2) is None
    windows = list(perplexity.each_window(model("mamba2"), None, cut(torch.arange(40).view(2, 20))))
    assert set(perplexity.metrics(windows)) == {"perplexity,none", "perplexity_stderr,none"}


def test_wrong_held_out_text_is_one_line(tmp_path, prepared):
    (tmp_path / "short.txt").write_text("a few words")
    for path, context, vocab, match in (
        (tmp_path / "short.txt", 32, 257, "short.txt holds 12 tokens, less than two windows of 32"),
        (tmp_path / "none.txt", 32, 257, "no file or folder"),
        (tmp_path, 32, 257, "holds no manifest.json"),
        (
            tmp_path / "short.txt",
            2,
            100,
            "token 256 of .*short.txt is not in the model's vocabulary of 100",
        ),
        (prepared, 32, 211, "vocabulary of 211"),
    ):
        with pytest.raises(AmorError, match=match) as error:
            perplexity.held_out(path, bytes_tokenizer(), vocab, context)
        assert one_line(error)
    with pytest.raises(AmorError, match="no windows"):
        perplexity.metrics([])
