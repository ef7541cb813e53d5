"""llama2.c's first format: the model computes what transformers computes from the same numbers, and
a text has the ids of llama2.c's own encoder."""

import json
import random
import runpy
import struct
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from laws import close

import amor
from amor.attach.blocks import write
from amor.cli import main
from amor.convert.opened import open_model
from amor.models.folder import TOKENIZER
from amor.vocabulary import load_file

ROOT = Path(__file__).parent.parent
DIM, HIDDEN, LAYERS, HEADS, LENGTH = 32, 48, 2, 4, 64
SAMPLE = "the theory of the other thing: then they gathered there, either  with   thin leather\n"
TEXTS = (
    *(
        "",
        " ",
        "the",
        " the",
        "the \n other",
        "a▁b",
        "wörd Ω漢字 \U0001d11e",
        "\x01\x7f\t",
        "<0x41>",
    ),
    *(" " * n + "the" for n in range(12)),
    *("t" * n for n in range(8)),
)


def pieces(raw_bytes):
    """Text and score of every token: bytes as an early or a later exporter wrote them, merges of
    SAMPLE in their order, letters, and runs of spaces, which are merged last."""
    known = [("<unk>", 0.0), ("\n<s>\n", 0.0), ("\n</s>\n", 0.0)]
    known += [(chr(b) if raw_bytes else f"<0x{b:02X}>", 0.0) for b in range(256)]
    words, learned = list(SAMPLE.replace("\n", "")), []
    while len(learned) < 40:
        pair = Counter(pairwise(words)).most_common(1)[0][0]
        if "".join(pair).isspace():
            words = [w for w in words if w != " "]
            continue
        learned.append("".join(pair))
        joined = []
        for word in words:
            if joined and (joined[-1], word) == pair:
                joined[-1] += word
            else:
                joined.append(word)
        words = joined
    learned = list(dict.fromkeys(learned))
    letters = sorted(set(SAMPLE) - {"\n"})
    known += [(piece, -float(i)) for i, piece in enumerate([*learned, *letters])]
    return [*known, *((" " * n, -1e9) for n in range(2, 6))]


def encoded(known, text):
    """llama2.c's encode(): <s>, a space, letters or bytes, then the best pair again and again."""
    ids = {piece: i for i, (piece, _) in enumerate(known) if i >= 259}
    out = [1, ids[" "]] if text else [1]
    for letter in text:
        out += [ids[letter]] if letter in ids else [byte + 3 for byte in letter.encode()]
    while True:
        best, where = -1e10, None
        for i, (a, b) in enumerate(pairwise(out)):
            merged = ids.get(known[a][0] + known[b][0]) if min(a, b) >= 259 else None
            if merged is not None and known[merged][1] > best:
                best, where = known[merged][1], (i, merged)
        if where is None:
            return out
        out[where[0] : where[0] + 2] = [where[1]]


def checkpoint(path, known, kv_heads=HEADS, tied=True, combined=False, theta=10_000.0):
    """Write a file of random weights; returns its tensors by llama2.c's names."""
    vocab, size = len(known), DIM // HEADS
    kv, angles = (
        size * kv_heads,
        np.outer(np.arange(LENGTH), theta ** (-np.arange(0, size, 2) / size)),
    )
    shapes = {"embedding": (vocab, DIM), "rms_att": (LAYERS, DIM), "wq": (LAYERS, DIM, DIM)}
    shapes |= {"wk": (LAYERS, kv, DIM), "wv": (LAYERS, kv, DIM), "wo": (LAYERS, DIM, DIM)}
    shapes |= {"rms_ffn": (LAYERS, DIM), "w1": (LAYERS, HIDDEN, DIM), "w2": (LAYERS, DIM, HIDDEN)}
    shapes |= {"w3": (LAYERS, HIDDEN, DIM), "rms_final": (DIM,)}
    rng = np.random.default_rng(0)
    parts = {}
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape)
        parts[name] = np.exp(0.3 * drawn) if name[:3] == "rms" else drawn * shape[-1] ** -0.5
    parts |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    if not tied:
        parts["wcls"] = rng.standard_normal((vocab, DIM)) * DIM**-0.5
    parts = {name: part.astype("<f4") for name, part in parts.items()}
    sizes = (DIM, HIDDEN, LAYERS, HEADS, kv_heads, vocab if tied else -vocab, LENGTH)
    data = struct.pack("<7i", *sizes) + b"".join(part.tobytes() for part in parts.values())
    words = struct.pack("<i", max(len(piece.encode()) for piece, _ in known))
    for piece, score in known:
        words += struct.pack("<fi", score, len(piece.encode())) + piece.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data + words if combined else data)
    if not combined:
        (path.parent / "tokenizer.bin").write_bytes(words)
    return {name: torch.from_numpy(part) for name, part in parts.items()}


def in_transformers(parts, kv_heads, tied):
    """The same numbers as LlamaForCausalLM, whose rotary positions turn halves of a head."""
    transformers = pytest.importorskip("transformers")
    vocab = len(parts["embedding"])
    shape = {"vocab_size": vocab, "hidden_size": DIM, "intermediate_size": HIDDEN}
    shape |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    shape |= {"num_key_value_heads": kv_heads, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()

    def rows(t, heads):
        size = DIM // HEADS
        order = [
            h * size + i for h in range(heads) for i in (*range(0, size, 2), *range(1, size, 2))
        ]
        return t[order]

    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(parts["embedding"])
        model.lm_head.weight.copy_(parts["embedding" if tied else "wcls"])
        model.model.norm.weight.copy_(parts["rms_final"])
        for i, layer in enumerate(model.model.layers):
            layer.input_layernorm.weight.copy_(parts["rms_att"][i])
            layer.post_attention_layernorm.weight.copy_(parts["rms_ffn"][i])
            layer.self_attn.q_proj.weight.copy_(rows(parts["wq"][i], HEADS))
            layer.self_attn.k_proj.weight.copy_(rows(parts["wk"][i], kv_heads))
            layer.self_attn.v_proj.weight.copy_(parts["wv"][i])
            layer.self_attn.o_proj.weight.copy_(parts["wo"][i])
            for ours, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
                getattr(layer.mlp, ours).weight.copy_(parts[theirs][i])
    return model


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "head of its own"])
def test_a_checkpoint_of_llama2c_writes_what_transformers_writes(tmp_path, capsys, kv_heads, tied):
    parts = checkpoint(tmp_path / "m.bin", pieces(False), kv_heads, tied)
    assert (
        main(["convert", str(tmp_path / "m.bin"), "--out", str(tmp_path / "ours"), "--json"]) == 0
    )
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert result["ok"] and result["tied"] is tied and "same\n" in printed
    assert "written out in float64" in result["compared"]["by"]
    theirs, ids = in_transformers(parts, kv_heads, tied), torch.tensor([[1, 300, 280, 265, 299]])
    model, tokenizer = amor.load(tmp_path / "ours")
    close(model.logits(model(ids).hidden), theirs(ids).logits)
    close(open_model(tmp_path / "m.bin").outputs(ids).logits.float(), theirs(ids).logits)
    texts = amor.generate(model, tokenizer, ids[0].tolist(), max_tokens=60, temperature=0.0)
    longer = theirs.generate(
        ids, max_new_tokens=60, do_sample=False, eos_token_id=2, pad_token_id=0
    )
    assert texts.tokens == longer[0, ids.shape[1] :].tolist() and len(set(texts.tokens)) > 3


@pytest.mark.parametrize("raw_bytes", [False, True], ids=["<0x41>", "A"])
def test_a_text_has_the_ids_of_llama2c_s_encoder(tmp_path, raw_bytes):
    known = pieces(raw_bytes)
    checkpoint(tmp_path / "m.bin", known)
    assert main(["convert", str(tmp_path / "m.bin"), "--out", str(tmp_path / "ours")]) == 0
    tokenizer = load_file(tmp_path / "ours")
    draw, letters = random.Random(0), [*SAMPLE, "é", "€", "▁", "\t"]
    drawn = ("".join(draw.choices(letters, k=draw.randrange(1, 40))) for _ in range(300))
    merged = 0
    for text in (*TEXTS, SAMPLE, *drawn):
        ids = tokenizer.encode(text).ids
        assert ids == encoded(known, text), text
        assert tokenizer.decode(ids) == text
        merged += any(i >= 259 and len(known[i][0]) > 1 for i in ids)
    assert merged > 100


def test_a_checkpoint_is_a_file_or_a_folder_with_its_tokenizer_beside_or_behind_it(tmp_path):
    known, ids = pieces(False), torch.tensor([[1, 270, 280]])
    checkpoint(tmp_path / "beside/m.bin", known)
    checkpoint(tmp_path / "behind/all.data", known, combined=True)
    outputs, spelled = [], set()
    for path in ("beside/m.bin", "beside", "behind/all.data", "behind"):
        opened = open_model(tmp_path / path)
        outputs.append(opened.outputs(ids).logits)
        spelled.add(opened.tokenizer().to_str())
        assert opened.model.config.name == path.partition(".")[0].rpartition("/")[2]
    assert len(spelled) == 1 and all(torch.equal(logits, outputs[0]) for logits in outputs)
    (tmp_path / "beside/tokenizer.bin").unlink()
    assert "no tokenizer.json" in open_model(tmp_path / "beside").notes[0]
    assert not (tmp_path / "beside" / TOKENIZER).exists()


def test_a_model_attached_to_a_checkpoint_has_its_tokenizer(tmp_path):
    checkpoint(tmp_path / "m.bin", pieces(True), combined=True)
    opened = open_model(tmp_path / "m.bin")
    write(opened, opened.model, tmp_path / "out")
    written = load_file(tmp_path / "out" / TOKENIZER)
    assert written.encode(SAMPLE).ids == opened.tokenizer().encode(SAMPLE).ids


def damaged(path):
    """(what was done, what the line names)"""
    known = pieces(False)
    checkpoint(path, known)
    whole, words = path.read_bytes(), path.with_name("tokenizer.bin")
    path.write_bytes(whole[:-1])
    yield "cut short", "copy it again"
    path.write_bytes(whole[:20])
    yield "no header", "not of llama2.c's first format"
    path.write_bytes(b"PK\x03\x04" + whole)
    yield "a zip", "not of llama2.c's first format"
    path.write_bytes(struct.pack("<2i", 0x616B3432, 1) + whole)
    yield "a later format", "version 1"
    path.write_bytes(struct.pack("<i", 33) + whole[4:])
    yield "heads that do not divide", "not of llama2.c's first format"
    path.write_bytes(whole[:28] + struct.pack("<f", float("nan")) + whole[32:])
    yield "not finite", "token_embedding_table holds a number that is not finite"
    path.write_bytes(whole + b"more")
    yield "something behind it", "cannot be read"
    checkpoint(path, known, theta=500.0)
    yield "another base", "not of base 10000"
    checkpoint(path, known)
    words.write_bytes(words.read_bytes()[:4000])
    yield "a tokenizer cut short", "of its tokenizer cannot be read"
    checkpoint(path, known)
    words.write_bytes(words.read_bytes() + b"x")
    yield "a tokenizer too long", "do not belong together"
    checkpoint(path, known[:3] + known[4:] + [("zz", -900.0)])
    yield "a byte is missing", "not the 256 bytes"
    checkpoint(path, [*known[:-1], known[300]])
    yield "a token twice", "the same text"
    checkpoint(path.with_name("n.bin"), known)
    yield "two checkpoints", "name one of m.bin, n.bin"


def test_a_damaged_checkpoint_of_llama2c_is_refused_in_one_line(tmp_path, capsys):
    for done, words in damaged(tmp_path / "source/m.bin"):
        source = tmp_path / "source" / ("" if done.startswith("two") else "m.bin")
        assert main(["convert", str(source), "--out", str(tmp_path / "out")]) == 2, done
        line = capsys.readouterr().err
        assert words in line and line.count("\n") == 1 and "bug" not in line, done
        assert not (tmp_path / "out").exists()


def test_a_corpus_that_was_cut_short_goes_on_and_its_stories_begin_and_end_at_bos(
    tmp_path, monkeypatch, capsys
):
    example = runpy.run_path(str(ROOT / "examples/write_stories.py"))["main"]
    checkpoint(tmp_path / "m.bin", pieces(False))
    assert main(["convert", str(tmp_path / "m.bin"), "--out", str(tmp_path / "ours")]) == 0

    def written(name, *more):
        words = ["write_stories", str(tmp_path / "ours"), str(tmp_path / name), *more]
        monkeypatch.setattr(sys, "argv", words)
        example()
        return (tmp_path / name).read_text()

    whole = written("whole.jsonl", "--stories", "70")
    rows = [json.loads(line) for line in whole.splitlines()]
    assert len(rows) == 70 and len({row["text"] for row in rows}) > 60
    model, tokenizer = amor.load(tmp_path / "ours")
    limits = {"max_tokens": LENGTH - 1, "temperature": 1.0}
    engine = amor.Engine(model, weights="float16")
    again = amor.generate_batch(engine, tokenizer, [[1]] * 64, stop_ids=[1], seed=0, **limits)
    assert [(row["text"], row["end"]) for row in rows[:64]] == [(t.text, t.end) for t in again]
    assert any(text.tokens[-1] == 1 for text in again)
    (tmp_path / "cut.jsonl").write_text(whole[: whole.index('"seed": 1')])
    assert written("cut.jsonl", "--stories", "70") == whole
    assert not set(written("other.jsonl", "--seed", "9").splitlines()) & set(whole.splitlines())
