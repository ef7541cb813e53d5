"""Windows around an answer and the prompts made of them: places counted in bytes, so that every
slice can be checked by hand."""

import pytest

from amor.data.encoder import Encoder
from amor.data.tokenizer import bytes_tokenizer
from amor.eval import cloze, tasks
from amor.eval.cloze import ClozeRow, CompletionRow
from amor.eval.tasks.retrieval import PageRow

PLAIN = "".join(
    chr(ord("a") + i % 7) for i in range(300)
)  # no word of it is longer than the alphabet's first seven letters


@pytest.fixture(scope="module")
def encoder():
    return Encoder(bytes_tokenizer(), "uint32")


def at(place, word="KEY"):
    return PLAIN[:place] + word + PLAIN[place + len(word) :]


@pytest.mark.parametrize(
    ("place", "begin", "end"),
    [(0, 0, 100), (20, 0, 100), (50, 0, 100), (150, 100, 200), (240, 190, 290), (297, 247, 300)],
    ids=["start", "near the start", "half a budget in", "middle", "near the end", "end"],
)
def test_a_window_is_centred_on_the_answer_and_what_is_left_over_goes_behind_it(
    encoder, place, begin, end
):
    context = at(place)
    assert cloze.window(encoder, context, ["key"], 100) == context[begin:end]


def test_an_answer_that_is_absent_leaves_the_last_half_of_the_budget(encoder):
    assert cloze.window(encoder, PLAIN, ["KEY"], 100) == PLAIN[299 - 50 :]


def test_an_answer_of_one_letter_drops_the_document(encoder):
    assert cloze.window(encoder, at(150), ["KEY", "7"], 100) is None
    assert cloze.window(encoder, at(150), [""], 100) is None


def test_nothing_sought_leaves_the_beginning(encoder):
    assert cloze.window(encoder, PLAIN, [], 100) == PLAIN[:100]


def test_the_earliest_of_key_and_value_counts(encoder):
    context = at(80, "VALUE")[:200] + "KEY" + PLAIN[203:]
    assert cloze.window(encoder, context, ["key", "value"], 100) == context[30:130]


def test_other_answers_are_looked_for_when_the_first_is_absent(encoder):
    row = ClozeRow(context=at(150), question="q", answers=["none"], alt_answers=["nor this", "KEY"])
    assert cloze.window(encoder, row.context, ["none"], 100, row) == row.context[100:200]
    told = ClozeRow(context=PLAIN, question="q", answers=["none"], tok_pos=120)
    assert cloze.window(encoder, PLAIN, ["none"], 100, told) == PLAIN[70:170]
    assert (
        cloze.window(encoder, PLAIN[:90], ["none"], 100, told) == PLAIN[:90][89 - 50 :]
    )  # a short context needs no telling


def test_a_document_that_fits_is_left_as_it_is(encoder):
    assert cloze.window(encoder, "  été — KEY \n", ["KEY"], 100) == "été — KEY"


FILM = "A film. Year: 1977.\nSummary of information above... year:"
PROMPTS = [
    ("cloze_swde", PageRow(text=FILM, value="1977", key="year"), "A film. Year: 1977. Year:"),
    (
        "cloze_swde",
        PageRow(text="A film: 1977\n\nYear:year:", value="1977", key="year"),
        "A film: 1977. Year:",
    ),
    (
        "cloze_fda",
        CompletionRow(text="A kit.\n\nDEVICE:", value="kit", key="device"),
        "A kit. Device:",
    ),
    (
        "cloze_squad",
        CompletionRow(text=" It ran in June. It ran in ", value="June"),
        "It ran in June. It ran in",
    ),
    (
        "cloze_triviaqa",
        ClozeRow(context="[TLE] Oslo [PAR] is. It isIt IS", question="It is ", answers=["x"]),
        "Oslo  is. It is",
    ),
    (
        "cloze_drop",
        ClozeRow(context="They won. they ranThey ran", question="They ran", answers=["7"]),
        "They won. They ran",
    ),
    (
        "cloze_nq",
        ClozeRow(context="Ouse runs. It runsIt runs", question="It runs", answers=["Ouse"]),
        "Ouse runs. It runs. It runs",
    ),
    (
        "cloze_nq",
        ClozeRow(context="Ouse runs. it runs", question="It runs", answers=["Ouse"]),
        "Ouse runs. it runs. It runs",
    ),
]


@pytest.mark.parametrize(("name", "row", "prompt"), PROMPTS)
def test_a_prompt_is_the_window_then_the_beginning_of_a_sentence(name, row, prompt):
    (doc,) = tasks.all_tasks()[name].documents([row], bytes_tokenizer())
    assert doc["prompt"] == prompt
    assert doc["tokens"] == len(prompt.encode())


def test_a_long_document_is_cut_to_its_length():
    rows = [CompletionRow(text="x " * 3000 + "Year: 1977 " + "y " * 3000, value="1977", key="Year")]
    (doc,) = tasks.all_tasks()["cloze_swde"].documents(rows, bytes_tokenizer())
    assert 1998 - 2 <= doc["tokens"] - len(". Year:") <= 1998
    assert "Year: 1977" in doc["prompt"]
    nq = [ClozeRow(context="z " * 3000, question="It is", answers=["zz"])]
    assert (
        len(tasks.all_tasks()["cloze_nq"].documents(nq, bytes_tokenizer())[0]["prompt"])
        < 1950 / 2 + 20
    )


def test_an_answer_counts_wherever_and_however_it_is_written():
    doc = {"answers": ["A+B", "Oak"]}
    assert cloze.contains(doc, [" the oak tree"]) == {"contains": 1}
    assert cloze.contains(doc, ["a+b"]) == {"contains": 1}
    assert cloze.contains(doc, ["AAB"]) == {"contains": 0}
