"""Writing text: a thousand odd prompts never crash it and never mix; characters and
stop strings come out whole."""

import inspect
import io
import json
import random
import sys

import pytest
from laws import small

import amor
from amor.cli import main
from amor.data.tokenizer import bytes_tokenizer, train_bpe
from amor.decode import generate
from amor.decode.engine import Engine
from amor.decode.sample import Sampling
from amor.decode.session import Prefill
from amor.decode.text import Detokenizer, Stopper
from amor.models.folder import save

END = 256
WORDS = "attention, Aufmerksamkeit — 注意 🙂 où? naïve\n"


@pytest.fixture(scope="module")
def model():
    return small("amor-mamba2", vocab=257, width=32, d_ff=32, pattern=["mamba2", "mamba2"])


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    save(model, place, bytes_tokenizer())
    return place


def odd_prompts(count):
    rng = random.Random(0)
    makers = [
        lambda: "",
        lambda: rng.choice("aé注🙂"),
        lambda: "<|end_of_text|>" * rng.randint(1, 4),
        lambda: bytes(rng.randrange(256) for _ in range(rng.randint(1, 20))).decode(
            "utf-8", "replace"
        ),
        lambda: "".join(
            chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xA0, 0xD7FF))))
            for _ in range(rng.randint(1, 12))
        ),
        lambda: "\x00\x07\n\t" * rng.randint(1, 3),
    ]
    return [rng.choice(makers)() for _ in range(count)]


def test_a_thousand_odd_prompts_never_crash_it_and_never_mix(model):
    prompts = odd_prompts(999)
    prompts.insert(500, "x" * 10_000)
    engine = Engine(model)
    found = amor.generate_batch(
        engine, bytes_tokenizer(), prompts, max_tokens=4, temperature=0, rows=16
    )
    assert all(1 <= len(t.tokens) <= 4 and t.end in ("stop", "length") for t in found)
    order = list(range(1000))
    random.Random(1).shuffle(order)
    other = amor.generate_batch(
        engine, bytes_tokenizer(), [prompts[i] for i in order], max_tokens=4, temperature=0, rows=12
    )
    for place, index in enumerate(order):
        assert other[place].tokens == found[index].tokens, prompts[index]


def test_a_row_s_text_depends_on_its_seed_and_not_on_its_mates(model):
    prompts = odd_prompts(12)
    stop = [chr(c) for c in range(32, 100)]  # so that rows end one after another
    kinds = [{"rows": 1}, {"rows": 5}, {"rows": 12}, {"rows": 5, "seed": 1}]
    texts = [
        amor.generate_batch(
            model, bytes_tokenizer(), prompts, max_tokens=6, top_p=0.9, stop=stop, **k
        )
        for k in kinds
    ]
    found = [[t.tokens for t in texts_of] for texts_of in texts]
    assert found[0] == found[1] == found[2] != found[3]
    assert len({len(tokens) for tokens in found[0]}) > 2


def test_only_stop_tokens_end_at_once_and_spell_nothing(model, monkeypatch):
    finish = Prefill.finish

    def ended(prefill):
        session = finish(prefill)
        session.next.logits[:, END] = session.next.logits.max() + 1
        return session

    monkeypatch.setattr(Prefill, "finish", ended)
    found = amor.generate_batch(
        model, bytes_tokenizer(), ["<|end_of_text|>" * 3, ""], max_tokens=9, temperature=0
    )
    assert [(t.text, t.tokens, t.end) for t in found] == [("", [END], "stop")] * 2


@pytest.mark.parametrize(
    "tokenizer", [bytes_tokenizer(), train_bpe([WORDS * 20], 300)], ids=["bytes", "bpe"]
)
def test_text_comes_in_whole_characters_and_none_is_lost(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in tokenizer.encode(WORDS).ids]
    assert "".join(pieces) + detokenizer.flush() == WORDS
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_text_are_marked_and_hold_nothing_up():
    detokenizer = Detokenizer(bytes_tokenizer())
    assert (
        "".join(detokenizer.add(token) for token in [0xE6, 0x41, 0xFF, 0x42, END, 0xF0])
        + detokenizer.flush()
        == "\ufffdA\ufffdB\ufffd"
    )


def test_a_metaspace_tokenizer_keeps_its_spaces():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "▁": 2}, unk_token="▁"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.add(token) for token in (0, 1, 0)) == "one two one"


def sentencepiece():
    """A tokenizer as Llama's: words begin with a space, other characters are bytes."""
    from tokenizers import Tokenizer, decoders, models

    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁one", "▁two", "t"]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(names[:3])
    steps = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


def test_the_first_word_after_a_prompt_keeps_its_space():
    tokenizer = sentencepiece()
    one, two = (tokenizer.token_to_id(name) for name in ("▁one", "▁two"))
    assert [Detokenizer(tokenizer).add(one), Detokenizer(tokenizer, [1]).add(one)] == ["one"] * 2
    assert Detokenizer(tokenizer, [1, two]).add(one) == " one"


def test_bytes_between_words_are_whole_characters_or_marks_and_hold_nothing_up():
    tokenizer = sentencepiece()
    one = tokenizer.token_to_id("▁one")
    ids = [one, *(byte + 3 for byte in "注意\n🙂".encode()), one, 0xE6 + 3, one, 0xF0 + 3]
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.add(token) for token in ids]
    assert "".join(parts) == "one注意\n🙂 one\ufffd one" and detokenizer.flush() == "\ufffd"
    assert parts[1:4] == ["", "", "注"]


def test_a_stop_string_is_found_across_pieces_and_never_shown():
    for cut in range(1, 6):
        stopper = Stopper(["END", "\n\n"])
        text = "a E EN x END after"
        shown = ""
        for at in range(0, len(text), cut):
            shown += stopper.add(text[at : at + cut])
            if stopper.stopped:
                break
        assert stopper.stopped and shown == "a E EN x "
    stopper = Stopper(["END"])
    assert stopper.add("the EN") + stopper.flush() == "the EN" and not stopper.stopped


def test_a_stop_string_ends_a_text(model):
    whole = amor.generate(model, bytes_tokenizer(), "abc", max_tokens=40, seed=3).text
    stop = whole[20:22]
    cut = amor.generate(model, bytes_tokenizer(), "abc", max_tokens=40, seed=3, stop=[stop])
    assert cut.text == whole[: whole.index(stop)] and cut.end == "stop"


def test_a_tokenizer_that_does_not_belong_to_the_model_is_refused(model):
    with pytest.raises(amor.AmorError, match="do not belong together"):
        amor.generate(model, train_bpe([WORDS * 20], 300), WORDS)


def run(capsys, *words):
    code = main(["generate", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_writes_plain_text_into_a_pipe_and_closes_with_what_it_cost(folder, capsys):
    code, out, err = run(
        capsys, folder, "--prompt", "hello", "--max-tokens", 12, "--temperature", 0
    )
    assert code == 0 and "\x1b" not in out and out.endswith("\n")
    for words in ("tokens/s", "fired", "head passes per token", "of attention skipped"):
        assert words in err


def test_bytes_on_standard_input_that_are_no_text_are_read(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00bad")))
    assert run(capsys, folder, "--max-tokens", 3)[0] == 0


def test_a_batch_file_gives_a_line_of_json_a_prompt(folder, capsys, tmp_path):
    (tmp_path / "in.jsonl").write_text('"one"\n{"prompt": ""}\n{"prompt": "three\\n"}\n')
    (tmp_path / "in.txt").write_text("one\n\nthree\n")
    for name in ("in.jsonl", "in.txt"):
        assert (
            run(
                capsys,
                folder,
                "--batch",
                tmp_path / name,
                "--out",
                tmp_path / "o.jsonl",
                "--max-tokens",
                3,
            )[0]
            == 0
        )
        lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
        assert [line["prompt"].strip() for line in lines] == ["one", "", "three"]
        assert all(len(line["fire"]) == len(line["tokens"]) for line in lines)


def test_a_firing_rate_and_another_gate_are_set_at_run_time(folder, capsys):
    def fired(*words):
        code, out, _ = run(
            capsys, folder, "--prompt", "hello there", "--max-tokens", 60, "--json", *words
        )
        assert code == 0
        return json.loads(out.splitlines()[-1])

    assert fired("--gate", "never")["attention_skipped"] == 1
    assert fired("--gate", "always")["attention_skipped"] == 0
    assert fired("--fire-rate", 0)["fire_rates"] == [0, 0, 0]
    assert 0.1 < sum(fired("--gate", "random:0.4")["fire_rates"]) / 3 < 0.7
    for words, said in (
        (("--gate", "alway"), "always"),
        (("--gate", "random:x"), "number"),
        (("--fire-rate", 2), "between 0 and 1"),
    ):
        code = main(["generate", str(folder), "--prompt", "a", *map(str, words)])
        assert code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["float16", "int8", "int4"])
def test_rounded_weights_say_what_they_cost(folder, capsys, kind):
    code, _, err = run(
        capsys, folder, "--prompt", "hello there", "--max-tokens", 5, "--weights", kind
    )
    assert code == 0 and f"{kind}: perplexity" in err


def test_an_unknown_format_or_a_misspelled_option_is_refused_by_the_nearest_name(folder, capsys):
    assert main(["generate", str(folder), "--prompt", "a", "--weights", "int5"]) == 2
    assert "int4" in capsys.readouterr().err
    model, tokenizer = amor.load(folder)
    with pytest.raises(amor.AmorError, match="temperature"):
        amor.generate(model, tokenizer, "a", temprature=0.5)
    with pytest.raises(amor.AmorError, match="several prompts"):
        amor.generate_batch(model, tokenizer, "a")


def test_colours_show_entropy_and_underline_what_fired():
    from amor.cli.generate import LivePrinter
    from amor.decode.generate import GeneratedToken

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    live = LivePrinter(out, 5.0)
    for fire in ((False,), (True,)):
        live.show(GeneratedToken(0, 1, "word", 2.5, fire))
    calm, fired = out.getvalue().split("word")[:2]
    assert "48;2;" in calm and "1;4;" not in calm and "1;4;" in fired


def bos_tokenizer():
    """Bytes, with <s> (257) that the post-processor puts in front of a text, as Llama's does."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    return tokenizer


@pytest.fixture(scope="module")
def bos_model():
    return small("amor-mamba2", vocab=258, width=32, d_ff=32, pattern=["mamba2", "mamba2"])


def test_generation_puts_the_bos_of_the_post_processor_in_front(bos_model):
    tokenizer, more = bos_tokenizer(), {"max_tokens": 12, "temperature": 0}

    def write(prompt, **options):
        return amor.generate(bos_model, tokenizer, prompt, **more, **options)

    read = write("abc")
    assert read.prompt_tokens == [257, 97, 98, 99] == tokenizer.encode("abc").ids
    assert read.tokens == write([257, 97, 98, 99]).tokens
    assert write("abc", add_bos=True).prompt_tokens == read.prompt_tokens
    without = write("abc", add_bos=False)
    assert without.prompt_tokens == [97, 98, 99] and without.entropy != read.entropy
    assert write("").prompt_tokens == [257] and write("", add_bos=False).prompt_tokens == [END]
    with pytest.raises(amor.AmorError, match="no BOS token"):
        amor.generate(bos_model, bytes_tokenizer(), "abc", add_bos=True)


def test_the_command_takes_bos_and_no_bos(bos_model, capsys, tmp_path):
    save(bos_model, tmp_path / "m", bos_tokenizer())
    for words, tokens in (([], [257, 97]), (["--bos"], [257, 97]), (["--no-bos"], [97])):
        code, out, _ = run(
            capsys, tmp_path / "m", "--prompt", "a", "--max-tokens", 2, "--json", *words
        )
        assert code == 0 and json.loads(out)["texts"][0]["prompt_tokens"] == tokens


def test_a_truncating_tokenizer_file_does_not_shorten_prompts(bos_model, tmp_path):
    tokenizer = bos_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    save(bos_model, tmp_path, tokenizer)
    model, tokenizer = amor.load(tmp_path)
    read = amor.generate(model, tokenizer, "abcdef", max_tokens=1)
    assert read.prompt_tokens == [257, *b"abcdef"]


def test_a_stop_id_ends_a_text(model, folder, capsys):
    options = {"max_tokens": 40, "temperature": 0.8, "seed": 3}
    whole = amor.generate(model, bytes_tokenizer(), "abc", **options)
    stop = whole.tokens[20]
    cut = amor.generate(model, bytes_tokenizer(), "abc", stop_ids=[stop], **options)
    assert cut.tokens == whole.tokens[: whole.tokens.index(stop) + 1] and cut.end == "stop"
    unused = set(range(256)) - set(whole.tokens)
    assert min(unused) < stop < max(unused)
    for other in (min(unused), max(unused)):
        either = amor.generate(model, bytes_tokenizer(), "abc", stop_ids=[stop, other], **options)
        assert either.tokens == cut.tokens, "each of several ids ends a text"
    words = ["--prompt", "abc", "--max-tokens", 40, "--seed", 3, "--json"]
    code, out, _ = run(capsys, folder, *words, "--stop-id", 300, "--stop-id", stop)
    assert code == 2
    code, out, _ = run(capsys, folder, *words, "--stop-id", stop)
    assert code == 0 and json.loads(out)["texts"][0]["tokens"] == cut.tokens


def test_a_tokenizer_without_an_end_is_refused_by_an_option_of_generate(model):
    from tokenizers import Tokenizer, models

    from amor.cli import parser_of

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    with pytest.raises(amor.AmorError, match="--stop-id") as error:
        amor.generate(model, tokenizer, "a")
    assert {w for w in str(error.value).split() if w.startswith("--")} <= parser_of(
        "generate"
    ).flags()
    assert amor.generate(model, tokenizer, "a", stop_ids=[1], max_tokens=2).tokens
    with pytest.raises(amor.AmorError, match="empty"):
        amor.generate(model, tokenizer, "", stop_ids=[1])


def test_a_model_without_a_tokenizer_is_answered_by_how_to_give_one(
    model, folder, capsys, tmp_path
):
    save(model, tmp_path / "mute", None)
    mute, tokenizer = amor.load(tmp_path / "mute")
    with pytest.raises(amor.AmorError, match=r"amor\.data\.tokenizer\.load\(FOLDER\)"):
        amor.generate(mute, tokenizer, "a")
    assert run(capsys, tmp_path / "mute", "--prompt", "a")[0] == 2
    assert main(["generate", str(tmp_path / "mute"), "--prompt", "a"]) == 2
    assert "add --tokenizer FOLDER" in capsys.readouterr().err
    words = ["--prompt", "a", "--max-tokens", 1, "--tokenizer", folder]
    assert run(capsys, tmp_path / "mute", *words)[0] == 0


def test_a_folder_of_transformers_is_answered_by_convert(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    assert f"amor convert {tmp_path} --out FOLDER" in capsys.readouterr().err


def test_a_gate_given_as_a_class_is_answered_by_its_path():
    with pytest.raises(amor.AmorError, match=r"blocks\.gate: expected str.*'module\.Class'"):
        amor.preset("amor-mamba2", "tiny").change(**{"blocks.gate": Stopper})


def test_the_command_and_the_function_have_one_default_of_each_option():
    from dataclasses import asdict

    from amor.cli import parser_of

    args = vars(parser_of("generate").parse_args(["x"]))
    assert {name: args[name] for name in asdict(amor.Sampling())} == asdict(amor.Sampling())
    assert args["rows"] == inspect.signature(amor.generate_batch).parameters["rows"].default
    assert all(
        f"{name}={value}" in amor.generate.__doc__
        for name, value in asdict(amor.Sampling()).items()
    )


def test_a_long_prompt_is_read_in_chunks_between_the_steps_of_other_rows(model, monkeypatch):
    """And changes no text: rows that are waiting join when their own prompts have been read."""
    monkeypatch.setattr(generate, "CHUNK", 8)
    engine, prompts = Engine(model), [[1, 2, 3], [4, 5], [6] * 50]
    alone = [
        amor.generate(engine, bytes_tokenizer(), prompt, max_tokens=20, temperature=0).tokens
        for prompt in prompts
    ]
    generator = generate.Generator(
        engine, bytes_tokenizer(), Sampling(temperature=0), max_tokens=20, rows=2
    )
    pieces, order = [[], [], []], []
    for piece in generator.run(prompts):
        pieces[piece.row].append(piece.token)
        order.append(piece.row)
        if len(pieces[0]) == 5 and piece.row == 0:  # the first row makes place for the long prompt
            generator.rows[0].left = 1
    assert pieces[1:] == alone[1:] and pieces[0] == alone[0][:6]
    between = order[len(order) - order[::-1].index(0) : order.index(2)]
    assert between == [1] * 8, "in the step that ended row 0, and after each of seven chunks"
