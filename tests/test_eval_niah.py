"""Needles of true length: there once, at every depth, the same for a seed, and
worded as the harness words them."""

import random
import re

import pytest
from eval_rows import harness_needles

from amor.data.tokenizer import bytes_tokenizer, train_bpe
from amor.errors import AmorError
from amor.eval import niah

FORMS = {f"niah_single_{number}": form for number, form in niah.FORMS.items()}
ESSAYS = niah.one_line(
    (
        f"On day {n} the miller {'rowed' if n % 3 else 'walked'} to town number {n * 37 % 101}, "
        'extraordinarily slow. "Why?" said we.'
    )
    for n in range(60)
)


def documents(name, *given):
    return niah.documents(name, FORMS[name], *given)


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request):
    return (
        bytes_tokenizer()
        if request.param == "bytes"
        else train_bpe([ESSAYS, niah.NOISE, niah.PROMPT], 400)
    )


@pytest.mark.parametrize("name", sorted(FORMS))
@pytest.mark.parametrize("length", [900, 2048, 6000])
def test_a_prompt_fills_its_length_to_one_per_cent_and_holds_its_needle_once(
    tokenizer, name, length
):
    for doc in documents(name, tokenizer, (length,), 12, 0, ESSAYS):
        whole = f"{doc['input']} {doc['gen_prefix']}"
        tokens = len(tokenizer.encode(whole, add_special_tokens=False).ids)
        assert doc["tokens"] == tokens
        assert 0.99 * (length - 129) <= tokens <= length - 129
        (value,) = doc["outputs"]
        key = re.search(r"for (\S+) mentioned", doc["gen_prefix"])[1]
        kind = "uuid" if name == "niah_single_3" else "number"
        assert doc["input"].count(niah.NEEDLE.format(kind=kind, key=key, value=value)) == 1
        assert doc["input"].count(value) == 1
        assert re.fullmatch(
            r"\d{7}" if kind == "number" else r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f-]{17}",
            value,
        )


def test_a_needle_lies_between_sentences_at_depths_spread_evenly(tokenizer):
    docs = documents("niah_single_2", tokenizer, (4000,), 80, 0, ESSAYS)
    depths = [doc["depth"] for doc in docs]
    assert sorted(depths[:40]) == sorted(depths[40:]) == [n / 39 for n in range(40)]
    assert depths[:40] != depths[40:] and depths[:40] != sorted(depths[:40])
    for doc in docs:
        text = doc["input"].partition("\n")[2].rpartition("\n")[0]
        before, _, after = re.fullmatch(
            r"(.*?) ?(One of the special magic .*?: \d{7}\.) ?(.*)", text, re.S
        ).groups()
        assert abs(len(before) / len(before + after) - doc["depth"]) < 0.05
        assert not before or before[-1] in '.!?"' or not after


def test_samples_depend_on_seed_length_and_number_alone(tokenizer):
    random.seed(1)
    state = random.getstate()
    first = documents("niah_single_3", tokenizer, (1000, 1500), 4, 0, ESSAYS)
    assert random.getstate() == state
    random.seed(2)
    assert documents("niah_single_3", tokenizer, (1000, 1500), 4, 0, ESSAYS) == first
    assert documents("niah_single_3", tokenizer, (1500,), 2, 0, ESSAYS) == [first[1], first[3]]
    other = documents("niah_single_3", tokenizer, (1000, 1500), 4, 1, ESSAYS)
    assert all(
        a["outputs"] != b["outputs"] and a["input"] != b["input"] for a, b in zip(first, other)
    )
    assert len({doc["outputs"][0] for doc in first}) == len(first)
    assert [doc["max_length"] for doc in first] == [1000, 1500] * 4


def test_short_essays_are_read_again_and_a_length_without_room_is_refused(tokenizer):
    (doc,) = documents("niah_single_2", tokenizer, (3000,), 1, 0, "Few words.")
    assert doc["tokens"] >= 0.99 * (3000 - 129)
    with pytest.raises(AmorError, match=r"length of 200 has no room"):
        documents("niah_single_1", tokenizer, (200,), 1, 0)


def test_the_words_are_those_of_the_harness(monkeypatch):
    prepare_niah = harness_needles(monkeypatch)
    from lm_eval.tasks.ruler import niah_utils
    from wonderwords import RandomWord

    known = RandomWord()._categories
    assert niah._word_lists() == (sorted(set(known["adjectives"])), sorted(set(known["nouns"])))
    assert prepare_niah.get_haystack("repeat") == niah.NOISE
    for kind in ("number", "uuid"):
        kinds = {
            "type_haystack": "repeat",
            "type_needle_k": "words",
            "type_needle_v": kind + "s",
            "template": niah_utils.TEMPLATE,
        }
        text, (value,), key = prepare_niah.generate_input_output(
            3, niah.NOISE, num_needle_k=1, num_needle_v=1, **kinds
        )
        context = text.partition("\n")[2].rpartition("\n")[0]
        assert text == niah.PROMPT.format(kind=kind, key=key, text=context)
        assert sorted(context.split("\n")) == sorted(
            [niah.NOISE] * 3 + [niah.NEEDLE.format(kind=kind, key=key, value=value)]
        )


def test_a_value_counts_under_the_name_of_its_length():
    doc = {"max_length": 1024, "outputs": ["ab12"]}
    assert niah.score(doc, [" it is AB12."]) == {"1024": 1.0}
    assert niah.score(doc, ["it is ab1"]) == {"1024": 0.0}
