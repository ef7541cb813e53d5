"""Tokenizers: every text comes back, the same text trains the same one, cuts do not matter."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from amor.data import llama
from amor.data.encoder import Encoder
from amor.data.tokenizer import (
    END_OF_TEXT,
    bpe_size,
    bytes_tokenizer,
    end_of_text,
    load,
    tokenizer_hash,
    train_bpe,
)
from amor.errors import AmorError
from amor.vocabulary import load_file, vocabulary

PROSE = (
    "It was the best of times, it was the worst of times; it wasn't 1859 (nor 1,234.5)!\n\nHe said: \u201cno\u201d.\n"
    "  Tabs\tand\r\nlines, naïve cafés, 漢字かな, हिन्दी, 🙂🏽, dogs' tails, I'LL GO\n\n\n   x = [1, 2]\n"
)
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
MIXED = st.lists(
    st.one_of(UNICODE, st.sampled_from([*PROSE.split(" "), " ", "  ", "\n", " the", END_OF_TEXT])),
    max_size=20,
).map("".join)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe([PROSE * 3, PROSE.upper()], 400)


@pytest.fixture(scope="module")
def llama31() -> Tokenizer:
    return load("llama-3.1")


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """The definition: the whole text at once, special tokens off."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.encode_special_tokens = True
    return copy.encode(text, add_special_tokens=False).ids


@settings(max_examples=150, deadline=None)
@given(text=MIXED)
def test_every_text_comes_back_from_bytes_and_bpe(bpe, text):
    for tokenizer in (bytes_tokenizer(), bpe):
        ids = Encoder(tokenizer, "uint16")(text).tolist()
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert end_of_text(tokenizer) not in ids


@given(text=UNICODE)
def test_bytes_are_the_bytes(text):
    assert Encoder(bytes_tokenizer(), "uint16")(text).tolist() == list(text.encode())


@settings(max_examples=150, deadline=None)
@given(text=MIXED)
def test_words_met_before_are_spelled_as_in_the_whole_text(bpe, text):
    encoder = Encoder(bpe, "uint16")
    assert encoder.may_cut
    assert encoder(text).tolist() == plain(bpe, text) == encoder(text).tolist()


def test_a_long_text_may_be_read_in_pieces(bpe):
    text, encoder = PROSE * 20, Encoder(bpe, "uint16")
    pieces = encoder.pieces(text, 50)
    assert len(pieces) > 50 and "".join(pieces) == text
    assert np.concatenate([encoder(piece) for piece in pieces]).tolist() == plain(bpe, text)


def test_a_tokenizer_that_joins_words_is_asked_for_the_whole_text():
    joined = bytes_tokenizer()
    joined.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    lower = bytes_tokenizer()
    lower.normalizer = normalizers.Lowercase()
    other = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    for tokenizer in (joined, lower, other):
        encoder = Encoder(tokenizer, "uint16")
        assert not encoder.may_cut and encoder.pieces(PROSE * 9, 10) == [PROSE * 9]
        assert encoder(PROSE).tolist() == plain(tokenizer, PROSE)


def test_the_same_text_trains_the_same_bpe_in_another_process(bpe):
    code = "import sys; from amor.data.tokenizer import *; t = sys.stdin.read(); b = train_bpe([t * 3, t.upper()], 400)"
    code += "; print(tokenizer_hash(b))"
    found = subprocess.run(
        [sys.executable, "-c", code], input=PROSE.encode(), capture_output=True, check=True
    )
    assert found.stdout.decode().strip() == tokenizer_hash(bpe)
    assert vocabulary(bpe) == 400


def test_the_hash_follows_the_ids_and_not_the_spelling_of_the_file(bpe):
    held = json.loads(bpe.to_str())
    again = Tokenizer.from_str(json.dumps({k: held[k] for k in sorted(held, reverse=True)}))
    again.enable_truncation(5)
    assert tokenizer_hash(again) == tokenizer_hash(bpe)
    assert tokenizer_hash(train_bpe([PROSE * 3, PROSE.upper()], 399)) != tokenizer_hash(bpe)


def test_a_vocabulary_has_room_for_the_largest_id():
    assert vocabulary(Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))) == 10


PANICS = """
import json, sys
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from amor.errors import AmorError
from amor.vocabulary import load_file
bpe = Tokenizer(models.BPE({"a": 0, "é": 1, "aé": 2, "<s>": 3}, [("a", "é")]))
bpe.normalizer = normalizers.Replace("q", "b")
bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
tree = json.loads(bpe.to_str())
*keys, last = sys.argv[2].split(".")
at = tree
for key in keys:
    at = at[key]
at[last] = json.loads(sys.argv[3])
open(sys.argv[1], "w").write(json.dumps(tree))
try:
    load_file(sys.argv[1])
except AmorError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.continuing_subword_prefix", '"x"', "continuing_subword_prefix is 'x'"),
        ("model.continuing_subword_prefix", '"abc"', "continuing_subword_prefix is 'abc'"),
        ("normalizer.pattern", '{"String": ""}', "can read"),
        ("post_processor.special_tokens", "{}", "can read"),
    ],
)
def test_a_tokenizer_file_that_makes_the_library_panic_is_refused_in_one_line(
    key, value, words, tmp_path
):
    """In a process of its own: the library's panic may abort it."""
    command = [sys.executable, "-c", PANICS, str(tmp_path / "tokenizer.json"), key, value]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.returncode
    assert re.search(words, ran.stdout) and ran.stdout.count("\n") == 1


def test_a_prefix_of_continuing_subwords_that_merges_have_is_read(tmp_path):
    tokenizer = Tokenizer(
        models.BPE({"a": 0, "##b": 1, "ab": 2}, [("a", "##b")], continuing_subword_prefix="##")
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_file(tmp_path).encode("ab").ids == [2]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bpe", "bpe:4096"),
        ("bpe:100", "257"),
        ("gpt9", "no tokenizer 'gpt9'"),
        ("absent.json", "no file absent.json"),
    ],
)
def test_a_wrong_name_is_an_error_that_helps(name, words):
    with pytest.raises(AmorError, match=words):
        bpe_size(name) or load(name)


def test_a_file_that_is_no_tokenizer_is_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(AmorError, match=r"is not a tokenizer\.json"):
        load(str(tmp_path))


def test_too_little_text_for_a_bpe_is_an_error():
    with pytest.raises(AmorError, match=r"too small for bpe:5000.*use bpe:\d+ or less"):
        train_bpe(["abc abc"], 5000)


def test_a_tokenizer_without_an_end_must_be_given_one():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<stop>": 1}, unk_token="a"))
    with pytest.raises(AmorError, match="--end-of-text"):
        end_of_text(tokenizer)
    assert end_of_text(tokenizer, "<stop>") == 1


def test_the_llama_tokenizer_has_its_special_tokens(llama31):
    assert (
        vocabulary(llama31) == 128_256
        and len(llama.special_tokens()) == len(set(llama.special_tokens())) == 256
    )
    assert [llama31.token_to_id(t) for t in llama.special_tokens()] == list(range(128_000, 128_256))
    assert end_of_text(llama31) == 128_001


def test_the_llama_tokenizer_spells_as_its_owners_do(llama31):
    from llama_models.llama3.tokenizer import Tokenizer as Theirs

    theirs, encoder = Theirs.get_instance(), Encoder(llama31, "uint32")
    assert encoder.may_cut
    assert theirs.special_tokens == {t: 128_000 + i for i, t in enumerate(llama.special_tokens())}

    @settings(max_examples=300, deadline=None)
    @given(text=MIXED)
    def equal(text: str) -> None:
        ids = encoder(text).tolist()
        assert ids == theirs.model.encode(text, disallowed_special=())
        assert llama31.decode(ids, skip_special_tokens=False) == text

    equal()
    # 588 of the tokens cannot be reached by merges, as ' việc'; as words of their own they are themselves all the same
    words = [
        word.decode() for word in [*llama.read_ranks(llama.llama_file())][::8] if _is_text(word)
    ] + [" việc", " jeho"]
    found = llama31.encode_batch_fast(words, add_special_tokens=False)
    assert [f.ids for f in found] == theirs.model.encode_batch(words, disallowed_special=())
    for text in (
        PROSE,
        PROSE.upper(),
        "'s 'S 'ſ don'T",
        "0 12 123 1234 12345 ٣٤٥٦",
        " \t \n \r\n\u00a0\u3000 a",
        "a" * 300,
    ):
        assert encoder(text).tolist() == theirs.encode(text, bos=False, eos=False)


def _is_text(held: bytes) -> bool:
    return "\ufffd" not in held.decode(errors="replace")


def test_another_file_is_not_taken_for_llamas(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"YQ== 0\n")
    with pytest.raises(AmorError, match="is not the Llama-3 tokenizer"):
        llama.read_ranks(tmp_path / "tokenizer.model")
