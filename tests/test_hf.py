"""The face to transformers: however its tools call a model, the answers are the model's
own, and nothing wrong is loaded.

Run with the newest transformers by `make test`, and with the oldest that
is supported by `make test-hf`.
"""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from laws import Largest, close, small, tokens
from safetensors.torch import load_file, save_file

import amor
from amor.data.tokenizer import bytes_tokenizer
from amor.errors import AmorError
from amor.models.build import build
from amor.models.folder import load_config
from amor.presets import NAMES
from amor.train.distributed import World
from amor.train.optim import adamw, groups, set_rate
from amor.train.recipe import Recipe
from amor.train.step import Stepper

pytest.importorskip("transformers")
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.generation.streamers import BaseStreamer

import amor.hf
from amor.hf import AmorCache, AmorConfig, AmorForCausalLM, AmorModel, GateStatistics
from amor.hf import inputs as hf_inputs

transformers.logging.disable_progress_bar()
OTHERS = (
    "amor-mamba2-final",
    "amor-mamba2-once",
    "amor-mamba2-gain",
    "amor-gated-deltanet-classic",
    "amor-mamba2-prenorm",
)
OTHERS += ("amor-mamba2-nogate", "amor-mamba2-mlp", "kda", "amor-kda")
NEW = 6  # tokens written
ROOT = Path(__file__).parent.parent


def face(name, **changes):
    return AmorForCausalLM.of(small(name, **changes))


def ragged():
    """Three prompts, padded on the left, and the mask of what is real."""
    ids, mask = tokens(3, 9, seed=5), torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = mask[2, :2] = 0
    return ids.masked_fill(mask == 0, 7), mask


def written(model, ids, mask=None, **how):
    """The new tokens of every row."""
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **how
    )
    return out[:, -NEW:]


@pytest.mark.parametrize("name", NAMES)
def test_a_text_is_the_same_however_it_is_generated(name):
    model, (ids, mask) = face(name), ragged()
    greedy, beam = written(model, ids, mask), written(model, ids, mask, num_beams=3)
    assert torch.equal(greedy, written(model, ids, mask, use_cache=False))
    assert torch.equal(beam, written(model, ids, mask, num_beams=3, use_cache=False))
    assert not torch.equal(greedy, beam) or len(set(greedy.flatten().tolist())) > 3, (
        "texts that show nothing"
    )
    for row in range(3):
        alone = ids[row : row + 1, mask[row] == 1]
        assert torch.equal(written(model, alone)[0], greedy[row])
        assert torch.equal(written(model, alone, num_beams=3)[0], beam[row])
        whole = torch.cat([alone, greedy[row : row + 1]], 1)
        assert torch.equal(model(whole).logits[0, -NEW - 1 : -1].argmax(-1), greedy[row])
    assert torch.equal(written(model, ids, mask, cache_implementation="static"), greedy)
    assert torch.equal(written(model, ids, mask, prefill_chunk_size=4), greedy)
    cache = AmorCache()
    model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
    again = copy.deepcopy(cache)
    assert torch.equal(written(model, ids, mask, past_key_values=cache), greedy)
    assert cache.get_seq_length() == 9 + NEW - 1 and again.get_seq_length() == 5
    assert torch.equal(written(model, ids, mask, past_key_values=again, num_beams=1), greedy)


def test_sampling_from_one_seed_does_not_feel_the_cache_and_streams_what_it_writes():
    class Heard(BaseStreamer):
        put, end = (
            (lambda self, value: heard.extend(value.flatten().tolist())),
            (lambda self: heard.append("end")),
        )

    heard, texts, model = [], [], face("amor-mamba2")
    for how in ({}, {"use_cache": False}):
        torch.manual_seed(3)
        how |= {
            "max_new_tokens": NEW,
            "do_sample": True,
            "temperature": 0.9,
            "top_p": 0.9,
            "pad_token_id": 0,
        }
        texts.append(model.generate(tokens(1, 5), streamer=Heard(), **how)[0].tolist())
    assert texts[0] == texts[1] and heard == [*texts[0], "end"] * 2


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"prompt_lookup_num_tokens": 3}, "assisted generation is not for these models"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search is not for these models"),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
            "group beam search is not",
        ),
        ({"cache_implementation": "quantized"}, "no such cache here"),
        ({"cache_implementation": "paged"}, "amor.generate_batch"),
        ({"past_key_values": transformers.DynamicCache()}, "reads on from an amor.hf.AmorCache"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"inputs_embeds": torch.zeros(1, 5, 64)}, "reads input_ids only"),
    ],
)
def test_decoding_that_cannot_be_is_refused(how, said):
    with pytest.raises(AmorError, match=said):
        written(face("mamba2", pattern="mamba2"), tokens(1, 5), **how)


def test_a_cache_is_reordered_repeated_and_never_run_backwards():
    model, ids = face("amor-mamba2"), tokens(2, 8)
    cache = model(ids[:, :6], use_cache=True).past_key_values
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0]))
    close(model(ids[[1, 0], 6:], past_key_values=cache).logits, model(ids[[1, 0]]).logits[:, 6:])
    with pytest.raises(AmorError, match="cannot run backwards"):
        cache.crop(-1)
    cache.reset()
    assert cache.get_seq_length() == 0 and torch.equal(
        model(ids, past_key_values=cache).logits, model(ids).logits
    )


@torch.no_grad()
def test_a_deep_copy_of_a_cache_counts_the_pads_where_every_row_is_padded():
    model, ids = face("amor-mamba2"), tokens(2, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :2] = mask[1, :3] = 0
    cache = model(ids[:, :6], attention_mask=mask[:, :6], use_cache=True).past_key_values
    copied = copy.deepcopy(cache)
    assert copied.get_seq_length() == cache.get_seq_length() == 6
    ends = [
        model(ids[:, 6:], attention_mask=mask, past_key_values=each).logits
        for each in (cache, copied)
    ]
    assert torch.equal(*ends)
    close(ends[0], model(ids, attention_mask=mask).logits[:, 6:])


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES + OTHERS)
def test_a_folder_is_the_same_model_for_transformers_and_for_amor(name, tmp_path):
    model, ids = small(name), tokens(2, 12)
    logits = model.logits(model(ids).hidden)
    AmorForCausalLM.of(model).save_pretrained(tmp_path / "theirs")
    amor.save(model, tmp_path / "ours")
    amor.hf.export(tmp_path / "ours", tmp_path / "exported")
    held = model.state_dict()
    for folder in (tmp_path / "theirs", tmp_path / "exported"):
        mine, _ = amor.load(folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder)
        assert (
            type(theirs) is AmorForCausalLM
            and not theirs.training
            and mine.config == theirs.core.config == model.config
        )
        for found in (
            mine.state_dict(),
            theirs.state_dict(),
            load_file(folder / "model.safetensors"),
        ):
            assert found.keys() == held.keys() and all(
                torch.equal(found[name], held[name]) for name in held
            )
        assert torch.equal(mine.logits(mine(ids).hidden), logits) and torch.equal(
            theirs(ids).logits, logits
        )


@torch.no_grad()
def test_shards_are_one_model_and_its_hidden_states_can_be_had_alone(tmp_path):
    model, ids = face("amor-gated-deltanet"), tokens(2, 12)
    model.save_pretrained(tmp_path, max_shard_size="80KB")
    assert (
        len(list(tmp_path.glob("model-*.safetensors"))) > 3
        and not (tmp_path / "model.safetensors").exists()
    )
    mine, _ = amor.load(tmp_path)
    theirs = AutoModel.from_pretrained(tmp_path)
    assert type(theirs) is AmorModel
    assert torch.equal(theirs(ids).last_hidden_state, mine(ids).hidden) and torch.equal(
        mine(ids).hidden, model.core(ids).hidden
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    outside = shutil.copy(
        tmp_path / index["weight_map"]["embed.weight"],
        tmp_path.parent / f"{tmp_path.name}.safetensors",
    )
    index["weight_map"]["embed.weight"] = f"../{outside.name}"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(AmorError, match="is no shard beside it"):
        amor.load(tmp_path)


def cut(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def changed(**tensors):
    """A damage: tensors replaced, or left out where None."""

    def damage(folder):
        held = load_file(folder / "model.safetensors") | {
            name.replace("__", "."): value for name, value in tensors.items()
        }
        save_file(
            {name: t for name, t in held.items() if t is not None},
            folder / "model.safetensors",
            {"format": "pt"},
        )

    return damage


def configured(change):
    def damage(folder):
        tree = json.loads((folder / "config.json").read_text())
        change(tree)
        (folder / "config.json").write_text(json.dumps(tree))

    return damage


def pickled(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"embed.weight": Boom()}, folder / "pytorch_model.bin")


class Boom:
    def __reduce__(self):
        return (os.abort, ())


DAMAGES = {
    "may be cut short": cut,
    "tensor 'norm_f.weight' is missing": changed(norm_f__weight=None),
    "tensor 'blocks.0.gate.mu' is missing": changed(blocks__0__gate__mu=None),
    "no tensor 'norm_g.weight'": changed(norm_g__weight=torch.zeros(3)),
    r"embed.weight has shape \[3, 4\]": changed(embed__weight=torch.zeros(3, 4)),
    "norm_f.weight holds a number that is not finite": changed(
        norm_f__weight=torch.full((64,), torch.nan)
    ),
    "holds no model.safetensors": pickled,
    "width: expected int <= 131072": configured(lambda tree: tree["amor"].update(width=64 << 20)),
    "widht": configured(lambda tree: tree["amor"].update(widht=64)),
    "amor": configured(lambda tree: tree.pop("amor")),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder of a small model, with a tokenizer."""
    folder = tmp_path_factory.mktemp("sound")
    amor.save(small("amor-mamba2", vocab=257, context=2048), folder / "ours", bytes_tokenizer())
    return amor.hf.export(folder / "ours", folder / "hf")


@pytest.mark.parametrize("said", DAMAGES)
def test_a_folder_that_is_damaged_is_refused_by_both(said, sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "damaged")
    DAMAGES[said](folder)
    for load in (amor.load, AutoModelForCausalLM.from_pretrained, AmorForCausalLM.from_pretrained):
        with pytest.raises(AmorError, match=said):
            load(folder)


def generation(text):
    return lambda folder: (folder / "generation_config.json").write_text(text)


def nested(levels):
    tree = 1
    for _ in range(levels):
        tree = [tree]
    return tree


# values that transformers would fail over with an exception of its own
WRONG_KEYS = {
    "dtype: expected str": configured(lambda tree: tree.update(dtype=-1)),
    "dtype is 'floaty'": configured(lambda tree: tree.update(dtype="floaty")),
    "pad_token_id: expected int": configured(lambda tree: tree.update(pad_token_id="x")),
    "eos_token_id.*expected int": configured(lambda tree: tree.update(eos_token_id=[1, "x"])),
    "use_cache: expected bool": configured(lambda tree: tree.update(use_cache="x")),
    "surrogate": configured(lambda tree: tree["amor"].update(width="\ud800")),
    "generation_config.json: expected an object of keys, not bool": generation("true"),
    "generation_config.json: not JSON": generation("{"),
    "generation_config.json: nested too deeply": generation('{"a":' * 300 + "1" + "}" * 300),
    "config.json: nested too deeply": configured(lambda tree: tree.update(a=nested(300))),
    "generation_config.json: pad_token_id: expected int": generation('{"pad_token_id": "x"}'),
}


@pytest.mark.parametrize("problem", WRONG_KEYS)
def test_keys_of_transformers_with_values_of_another_type_are_refused(problem, sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "damaged")
    WRONG_KEYS[problem](folder)
    for load in (AutoModelForCausalLM.from_pretrained, AmorForCausalLM.from_pretrained):
        with pytest.raises(AmorError, match=problem) as refused:
            load(folder)
        assert "\n" not in str(refused.value)


def test_a_folder_of_another_model_is_refused(sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "other")
    configured(lambda tree: tree.update(model_type="llama"))(folder)
    with pytest.raises(AmorError, match="model_type is 'llama'; a model of amor has 'amor'"):
        amor.load(folder)
    with pytest.raises(AmorError, match=r"open that with amor\.load"):
        AmorForCausalLM.from_pretrained(sound.parent / "ours")
    with pytest.raises(AmorError, match="random numbers"):
        AmorForCausalLM.from_pretrained(sound, ignore_mismatched_sizes=True)


def test_what_a_config_says_follows_from_ours(sound):
    config = AmorConfig.from_pretrained(sound)
    assert (
        config.built == load_config(sound)
        and config.num_hidden_layers == len(config.layer_types) == 7
    )
    assert (config.vocab_size, config.hidden_size, config.tie_word_embeddings) == (257, 64, True)
    with pytest.raises(AmorError, match="vocab_size = 3: it follows from this model's own config"):
        config.vocab_size = 3
    with pytest.raises(AmorError, match="a vocabulary of 300 tokens"):
        AmorForCausalLM.from_pretrained(sound).resize_token_embeddings(300)
    with pytest.raises(AmorError, match="no key 'amor'"):
        AmorConfig()


def test_a_tokenizer_is_what_it_was_and_knows_its_end(sound):
    theirs, ours = AutoTokenizer.from_pretrained(sound), bytes_tokenizer()
    for text in ("Ein wörd  \n and more", " <|end_of_text|> x", ""):
        assert (
            theirs(text)["input_ids"] == ours.encode(text).ids
            and theirs.decode(theirs(text)["input_ids"]) == text
        )
    assert (len(theirs), theirs.eos_token_id, theirs.pad_token_id, theirs.padding_side) == (
        257,
        256,
        256,
        "left",
    )
    with pytest.raises(AmorError, match=r"does not have a token '</end>'"):
        amor.hf.export(sound, sound / "again", end="</end>")
    assert not (sound / "again").exists()
    model = AutoModelForCausalLM.from_pretrained(sound)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 256


def test_a_model_card_says_what_the_model_is_and_another_s_is_kept(sound, tmp_path):
    card = (sound / "README.md").read_text()
    model = AmorForCausalLM.from_pretrained(sound)
    assert f"| parameters | {model.num_parameters():,} |" in card and "mamba2 x4" in card
    assert f"| 1 | {float(model.core.each_block()[1].gate.threshold):.4f} | about " in card
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    model.save_pretrained(sound)
    assert (sound / "README.md").read_text() == card


STRANGER = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
assert "amor" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
batch = tokenizer(["a cat", "the dogs of war"], padding=True, return_tensors="pt")
text = model.generate(**batch, max_new_tokens=5, do_sample=False)
model.save_pretrained(folder + "/again")
half = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
half.save_pretrained(folder + "/half")
wide = {name: str(t.dtype) for name, t in half.state_dict().items() if t.dtype != torch.bfloat16}
apart = (half(**batch).logits.float() - model(**batch).logits).abs()
apart = apart[batch["attention_mask"].bool()].mean()
print(json.dumps([type(model).__module__, text[:, -5:].tolist(), wide, float(apart)]))
"""


def test_a_folder_opens_where_nobody_imported_amor_and_in_bf16(sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "folder")
    around = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_HUB_OFFLINE": "1",
    }
    words = [sys.executable, "-c", STRANGER, str(folder)]
    done = subprocess.run(words, env=around, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    module, text, wide, apart = json.loads(done.stdout.splitlines()[-1])
    model = AmorForCausalLM.from_pretrained(sound)
    batch = AutoTokenizer.from_pretrained(sound)(
        ["a cat", "the dogs of war"], padding=True, return_tensors="pt"
    )
    assert text == model.generate(**batch, max_new_tokens=5, do_sample=False)[:, -5:].tolist()
    assert module == "amor.hf.model" and 0 < apart < 0.3
    # recurrences and gates stay exact; counters are whole numbers
    assert {name.rpartition(".")[2] for name in wide} == {
        "A_log",
        "D",
        "dt_bias",
        "mu",
        "sigma",
        "quantiles",
        "updates",
    }
    assert (folder / "again/modeling_amor.py").read_text() == (
        sound / "modeling_amor.py"
    ).read_text()
    assert [path.name for path in (folder / "again").glob("*.py")] == ["modeling_amor.py"], (
        "no code is copied into a folder"
    )
    assert json.loads((folder / "again/config.json").read_text()) == json.loads(
        (sound / "config.json").read_text()
    )
    assert {
        name: str(t.dtype)
        for name, t in amor.load(folder / "half")[0].state_dict().items()
        if name in wide
    } == wide


def test_a_loss_is_that_of_all_logits_and_makes_none(sound):
    model, ids = face("amor-mamba2"), tokens(6, 400)
    with Largest() as seen:
        out = model(ids, labels=ids.masked_fill(ids % 5 == 0, -100))
        out.loss.backward()
    assert out.logits is None and seen.numel < ids.numel() * 211
    with torch.no_grad():
        logits = model(ids).logits
        labels = ids[:, 1:].masked_fill(ids[:, 1:] % 5 == 0, -100).flatten()
        summed = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels, reduction="sum"
        )
        close(out.loss.detach(), summed / (labels != -100).sum())
        close(
            model(ids, labels=ids.masked_fill(ids % 5 == 0, -100), num_items_in_batch=1000).loss,
            summed / 1000,
        )
        close(model(ids, logits_to_keep=1).logits, logits[:, -1:])
        close(model(ids, logits_to_keep=torch.tensor([3, 7])).logits, logits[:, [3, 7]])
        assert torch.equal(model(ids, labels=ids, logits_to_keep=0).logits, logits)


@torch.no_grad()
def test_padding_on_either_side_and_packed_documents_change_nothing():
    model, ids = face("amor-mamba2"), tokens(2, 10)
    plain = model(ids[:1, :6]).logits
    for mask in ([0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0, 0, 0]):
        marks = torch.tensor([mask, [1] * 10])
        padded = ids.clone()
        padded[0, marks[0] == 1] = ids[0, :6]
        out = model(padded, attention_mask=marks)
        close(out.logits[0, marks[0] == 1], plain[0])
        close(model(padded, attention_mask=marks, logits_to_keep=1).logits[0], plain[0, -1:])
        assert not out.gate_fires[0][marks == 0].any()
    packed, places = (
        torch.cat([ids[:1, :6], ids[1:, :4]], 1),
        torch.tensor([[*range(6), *range(4)]]),
    )
    close(model(packed, position_ids=places).logits[:, 6:], model(ids[1:, :4]).logits)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"position_ids": torch.arange(1, 6)[None]}, "neither go on from what was read"),
        (
            {"attention_mask": torch.ones(1, 4, dtype=torch.long)},
            r"expected 0 and 1 of shape \[1, 5\]",
        ),
        ({"attention_mask": torch.zeros(1, 5)}, "float32"),
        ({"attention_mask": torch.ones(1, 1, 5, 5, dtype=torch.long)}, r"shape \[1, 1, 5, 5\]"),
        ({"output_attentions": True}, "output_attentions"),
        ({"past_key_values": ((),)}, "tuple"),
        ({"input_ids": torch.zeros(1, 5)}, "expected whole numbers"),
    ],
)
def test_inputs_that_mean_nothing_are_refused(given, said):
    with pytest.raises(AmorError, match=said):
        face("mamba2", pattern="mamba2")(**{"input_ids": tokens(1, 5)} | given)


ROWS, CONTEXT = 4, 20


class Same:
    """Every step the same rows, as the Stepper asks for them and as Trainer does."""

    ids = tokens(ROWS, CONTEXT, seed=9)

    def rows(self, step, first, last):
        return self.ids[first:last], hf_inputs.next_tokens(self.ids[first:last])

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return {"input_ids": self.ids[row], "labels": self.ids[row]}


def trainer(model, out, recipe, callbacks, micro=ROWS, **more):
    optimizer = adamw(groups(model, recipe.optimiser, recipe.lr), recipe.optimiser)
    set_rate(optimizer, 1.0)
    arguments = TrainingArguments(
        str(out),
        num_train_epochs=recipe.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=ROWS // micro,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no"} | more,
    )
    constant = transformers.get_constant_schedule(optimizer)
    made = Trainer(
        model,
        arguments,
        train_dataset=Same(),
        optimizers=(optimizer, constant),
        callbacks=callbacks,
    )
    made.remove_callback(transformers.trainer_callback.PrinterCallback)
    return made


@pytest.fixture(scope="module")
def recipe():
    changes = {
        "width": 32,
        "d_ff": 48,
        "vocab": 211,
        "pattern": "mamba2",
        "blocks.count": 2,
        "blocks.head_size": 16,
    }
    changes |= {
        "mixers": {"mamba2": {"head_size": 16, "state_size": 8}},
        "blocks.gate_options": {"eta": 0.5},
    }
    tree = {
        "model": {"name": "amor-mamba2", "changes": changes},
        "batch": ROWS,
        "micro_batch": ROWS,
        "context": CONTEXT,
    }
    return Recipe.from_dict(
        tree | {"steps": 3, "lr": {"peak": 1e-3, "floor": 1e-3, "warmup": 0, "alpha": 1e-2}}
    )


@pytest.fixture(scope="module")
def own(recipe):
    """Three steps of our own training: the losses, and the model after them."""
    model = build(recipe.config(), recipe.seed)
    optimizer = adamw(groups(model, recipe.optimiser, recipe.lr), recipe.optimiser)
    step = Stepper(model, optimizer, recipe, Same(), World(torch.device("cpu")))
    return [step(number).loss for number in range(recipe.steps)], model


def numbers_of_gates(model):
    return torch.stack(
        [torch.stack([b.gate.mu, b.gate.sigma, b.gate.threshold]) for b in model.each_block()]
    )


def test_trainer_trains_as_our_own_loop_does(recipe, own, tmp_path):
    losses, expected = own
    model = AmorForCausalLM.of(build(recipe.config(), recipe.seed))
    made = trainer(model, tmp_path, recipe, [GateStatistics()], save_strategy="steps", save_steps=2)
    made.train()
    logged = [line["loss"] for line in made.state.log_history if "loss" in line]
    close(torch.tensor(logged), torch.tensor(losses))
    close(numbers_of_gates(model.core), numbers_of_gates(expected))
    assert (
        int(model.core.each_block()[0].gate.updates) == recipe.steps and model.gates_follow is None
    )
    resumed = AmorForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    trainer(resumed, tmp_path, recipe, [GateStatistics()]).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-2")
    )
    close(numbers_of_gates(resumed.core), numbers_of_gates(expected))


def test_micro_batches_and_recomputing_change_nothing_and_gates_stay_where_nobody_tells_them(
    recipe, own, tmp_path
):
    losses, _ = own
    one_step = Recipe.from_dict(recipe.to_dict() | {"steps": 1})
    model = AmorForCausalLM.of(build(recipe.config(), recipe.seed))
    made = trainer(
        model, tmp_path, one_step, [GateStatistics()], micro=1, gradient_checkpointing=True
    )
    made.train()
    assert model.core.backbone.recompute and model.is_gradient_checkpointing
    close(torch.tensor(made.state.log_history[0]["loss"]), torch.tensor(losses[0]))
    first = build(recipe.config(), recipe.seed)
    first.observe([gate.score.flatten() for gate in first(Same.ids).gates])
    close(numbers_of_gates(model.core), numbers_of_gates(first))
    before = numbers_of_gates(model.core)
    trainer(model, tmp_path, one_step, []).train()
    assert torch.equal(numbers_of_gates(model.core), before)


def test_gates_take_in_real_tokens_of_training_once():
    model, (ids, mask) = face("amor-mamba2").train(), ragged()
    scores = [gate.score[mask == 1] for gate in model.core(ids, valid=mask).gates]
    expected = copy.deepcopy(model.core)
    expected.observe(scores)
    statistics = GateStatistics()
    statistics.attach(torch.nn.Sequential(model))
    model(ids, attention_mask=mask, labels=ids)
    with torch.no_grad():
        model(ids[:, :3], labels=ids[:, :3])
    statistics.step()
    statistics.step()  # of a step that showed nothing
    statistics.detach()
    model(ids, labels=ids)
    close(numbers_of_gates(model.core), numbers_of_gates(expected))
    assert [int(b.gate.updates) for b in model.core.each_block()] == [
        int(b.gate.updates) for b in expected.each_block()
    ]
    with pytest.raises(AmorError, match=r"attach\(model\) comes before"):
        statistics.step()
    with pytest.raises(AmorError, match="only `amor train` measures"):
        statistics.attach(face("amor-mamba2-gain"))
    with pytest.raises(AmorError, match="holds no model of amor"):
        statistics.attach(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    "name", ["mamba2-fused", "gated-deltanet-serial", "amor-mamba2-mlp", "amor-kda"]
)
def test_an_adapter_learns_on_every_projection_and_is_heard(name, tmp_path):
    peft = pytest.importorskip("peft")
    model, ids = face(name), tokens(2, 12)
    with torch.no_grad():
        before = model(ids).logits
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules="all-linear", r=2, init_lora_weights=True)
    )
    projections = [
        n
        for n, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and n.endswith("base_layer")
    ]
    adapted.train()
    adapted(input_ids=ids, labels=ids).loss.backward()
    learned = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    silent = [
        n for n, p in learned.items() if "lora_B" in n and not (p.grad is not None and p.grad.any())
    ]
    assert len(learned) == 2 * len(projections) > 20 and not silent
    torch.optim.SGD(learned.values(), 1.0).step()
    adapted.eval()
    with torch.no_grad():
        after = adapted(input_ids=ids).logits
        assert (after - before).abs().max() > 0.1
        assert torch.equal(written(adapted, ids), written(adapted, ids, use_cache=False))
        adapted.save_pretrained(tmp_path / "adapter")
        close(
            peft.PeftModel.from_pretrained(face(name), tmp_path / "adapter")
            .eval()(input_ids=ids)
            .logits,
            after,
        )
        adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
        mine, _ = amor.load(tmp_path / "merged")
        close(mine.logits(mine(ids).hidden), after)


def test_an_adapter_that_the_head_would_not_hear_is_refused():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        face("mamba2", pattern="mamba2"), peft.LoraConfig(target_modules=["embed"], r=2)
    )
    with pytest.raises(AmorError, match="leave `embed` out of an adapter's targets"):
        adapted(input_ids=tokens(1, 3))


def test_a_copy_is_a_model_of_its_own_and_shares_nothing():
    model = face("amor-mamba2")
    other = copy.deepcopy(model)
    assert other.core.embed is other.embed and other.core is not model.core
    with torch.no_grad():
        other.embed.weight.zero_()
    assert not other(tokens(1, 3)).logits.any() and model(tokens(1, 3)).logits.any()
    model.set_input_embeddings(other.embed)
    assert model.core.embed is other.embed and not model(tokens(1, 3)).logits.any()


def test_fresh_weights_are_drawn_by_our_rule():
    config = AmorConfig.of(small("amor-mamba2").config)
    torch.manual_seed(5)
    one = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(5)
    two = AutoModelForCausalLM.from_config(config)
    assert (
        torch.equal(one.embed.weight, two.embed.weight)
        and 0.018 < one.embed.weight.detach().std() < 0.022
    )
    assert (
        not one.core.each_block()[0].attention.o_proj.weight.any()
        and int(one.core.each_block()[0].gate.updates) == 0
    )


def test_the_harness_s_own_model_gives_our_adapter_s_scores(sound, tmp_path):
    pytest.importorskip("lm_eval")
    from eval_rows import write
    from lm_eval.api.registry import get_model

    from amor.eval import harness, tasks
    from amor.eval.judge import Judge
    from amor.eval.lm import AmorLM
    from amor.eval.store import Store

    model, tokenizer = amor.load(sound)
    ours = AmorLM(Judge(model, tokenizer, "it", Store(tmp_path / "requests.jsonl")))
    given = f"pretrained={sound},trust_remote_code=True"
    theirs = get_model("hf").create_from_arg_string(given, {"batch_size": 2, "device": "cpu"})
    data, names, found = (
        write(tmp_path / "sets"),
        ["arc_easy", "lambada_openai", "truthfulqa_mc2"],
        [],
    )
    for suite, some in (("common-sense", names), ("retrieval", ["swde"])):
        for lm in (ours, theirs):
            loaded = tasks.load(suite, data, tokenizer=tokenizer, names=some)
            found.append(harness.evaluated(lm, loaded.tasks, 2, 0, samples=True)["samples"])
    for mine, other in (found[:2], found[2:]):
        for task in mine:
            for a, b in zip(mine[task], other[task], strict=True):
                for said, wanted in zip(a["filtered_resps"], b["filtered_resps"], strict=True):
                    if isinstance(said, str):
                        assert said == wanted, task
                    else:
                        assert float(said[0]) == pytest.approx(float(wanted[0]), abs=1e-3), task
                        assert str(said[1]) == str(wanted[1]), task
