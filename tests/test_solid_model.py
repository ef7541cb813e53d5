"""Nonsense for any node of a valid config, recipe, state or folder of weights, and for tokens.

It is refused in one line, or a model that works, at once.
"""

import json
import struct
import time
from contextlib import contextmanager

import pytest
import torch
from laws import SMALL, small, tokens
from nonsense import nodes, replaced
from safetensors.torch import load_file, save_file

import amor
from amor.config import Config
from amor.decode.engine import Engine
from amor.decode.sample import Sampler, Sampling
from amor.errors import AmorError
from amor.kv import KV
from amor.models.folder import CONFIG, WEIGHTS, load_config, load_model, save
from amor.state import State
from amor.train.recipe import Recipe, load

DEEP: list = []
for _ in range(200):
    DEEP = [DEEP]
NONSENSE = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**30,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "mamba2 x 100000000",
]
NONSENSE += [[], [None], {}, {"mamba2": 10**9}, {"x": {"x": 1}}, DEEP]
SECONDS = 1.0  # for one nonsense; the machine may be busy


@contextmanager
def one_line(place=""):
    """Success or one line, and soon."""
    began, said = time.perf_counter(), ""
    try:
        yield
    except AmorError as error:
        said = str(error)
    assert "\n" not in said, place
    assert time.perf_counter() - began < SECONDS, place


def test_a_config_of_nonsense_is_one_line_or_a_model():
    tree = amor.preset("amor-mamba2", "tiny", **SMALL).to_dict()
    tree |= {
        "pattern": ["mamba2", "attention"],
        "blocks": {**tree["blocks"], "gate_options": {"kappa": 0.2}},
    }
    for path in nodes(tree):
        for value in NONSENSE:
            with one_line((path, value)):
                Config.from_dict(replaced(tree, path, value))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pattern": "mamba2 x 100000000"}, "more than 4096 layers"),
        ({"pattern": {"mamba2": 10**9}}, "more than 4096 layers"),
        ({"pattern": ["mamba2"] * 4097}, "pattern"),
        ({"pattern": 5}, "pattern: expected array, got int"),
        ({"pattern": ["os.path"]}, "not a class with Options"),
        ({"pattern": ["..x"]}, "no path of a class"),
        ({"vocab": 10**12}, "vocab: expected int <= 2097152"),
        ({"width": 10**13}, "width: expected int <= 131072"),
        ({"width": 2**17 - 1}, "does not divide"),
        ({"blocks.count": 2**31}, "blocks.count: expected int <= 4096"),
        ({"width": 2**17, "d_ff": 2**20, "pattern": "mamba2 x4096"}, "parameters"),
        ({"mixers.mamba2": None}, "mixers[...]: expected object, got null"),
        ({"mixers.kda.conv": "x"}, "mixers.kda: conv: expected int"),
        ({"version": 2}, "of version 2"),
        ({".".join("a" * 5000): 1}, "dots"),
        ({"self": 1}, "no key 'self'"),
        ({"name": 5}, "name: expected str"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_an_absurd_config_is_refused_at_once(changes, words):
    began = time.perf_counter()
    with pytest.raises(AmorError) as error:
        amor.preset("amor-mamba2", "tiny").change(**changes)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert time.perf_counter() - began < SECONDS


def test_a_config_without_a_version_is_of_the_first():
    tree = amor.preset("amor-mamba2", "tiny").to_dict()
    assert tree.pop("version") == 1
    assert Config.from_dict(tree) == amor.preset("amor-mamba2", "tiny")


def test_a_model_that_memory_cannot_hold_is_not_begun():
    config = amor.preset(
        "transformer", "tiny", **{"width": 2**14, "pattern": "attention x40", "d_ff": 2**20}
    )
    with pytest.raises(AmorError, match="this machine's memory"):
        amor.build(config)


def test_a_recipe_of_nonsense_is_one_line_or_a_recipe():
    tree = load("tiny/amor-mamba2").to_dict()
    tree["model"]["changes"] = {"vocab": 300, "blocks": {"count": 1}}
    for path in nodes(tree):
        for value in NONSENSE:
            with one_line((path, value)):
                Recipe.from_dict(replaced(tree, path, value)).config()


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ("extends = 5", "extends: 5 is not the path"),
        ('extends = "mine.toml"', "extends itself"),
        ('extends = "none.toml"', "not there"),
        ("steps = 5\noptimiser.betas = true", "optimiser.betas: expected array, got bool"),
        ('steps = 5\noptimiser.betas = ["a", "b"]', "optimiser.betas[0]: expected float"),
        ("steps = 5\nmodel.changes = true", "model.changes: expected object, got bool"),
        (
            "steps = 5\nmodel.changes.vocab = 2147483648",
            "vocab: expected int <= 2097152, not 2147483648",
        ),
        ("steps = 5\nmodel.changes.name = 5", "name: expected str"),
        ("steps = 5\nmodel.changes.width = 2020-01-01", "only finite numbers"),
        ("steps = 5\ncontext = 2147483648", "context: expected int <= "),
        ("steps = 5\nlr.peak = nan", "lr.peak: expected float > 0.0, not nan"),
        ("steps = 5\nlr.peak = inf", "lr.peak: expected float <= "),
        ("steps = 5\n" + ".".join("a" * 5000) + " = 1", "nested too deeply"),
        ("steps = 5\n\xff", "not UTF-8"),
    ],
    ids=lambda x: x[:40],
)
def test_an_absurd_recipe_is_one_line(tmp_path, held, words):
    (tmp_path / "mine.toml").write_bytes(held.encode("latin-1"))
    with pytest.raises(AmorError) as error:
        load(tmp_path / "mine.toml").config()
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        "model.changes=true",
        "model=3",
        "a" * 5000 + "=1",
        ".".join("a" * 5000) + "=1",
        "lr.peak=[[[",
    ],
)
def test_an_absurd_change_of_a_recipe_is_one_line(change):
    with pytest.raises(AmorError):
        load("tiny/amor-mamba2", [change, "model.changes.width=64"]).config()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    save(small("amor-mamba2", **{"pattern": "mamba2", "blocks.count": 1}), place)
    return place


@pytest.mark.parametrize(
    "held",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"null",
        b"[]",
        b"5",
        b'{"name": NaN}',
        b'{"a": ' * 900 + b"1" + b"}" * 900,
    ],
)
def test_a_config_file_of_nonsense_names_itself(tmp_path, held):
    (tmp_path / CONFIG).write_bytes(held)
    with pytest.raises(AmorError, match=r"config\.json: "):
        load_config(tmp_path)


def wrong_weights():
    half = {"norm_f.weight": torch.float16}
    yield "int8", {"embed.weight": torch.int8}, "embed.weight is I8"
    yield "complex", {"embed.weight": torch.complex64}, "embed.weight is C64"
    yield "float8", {"norm_f.weight": torch.float8_e4m3fn}, "norm_f.weight is F8_E4M3"
    yield "int64", {"embed.weight": torch.int64}, "embed.weight is int64, not float32"
    yield "mixed", half, "norm_f.weight is float16, not float32"


@pytest.mark.parametrize(
    ("kinds", "words"), [w[1:] for w in wrong_weights()], ids=[w[0] for w in wrong_weights()]
)
def test_weights_of_another_dtype_are_refused(folder, tmp_path, kinds, words):
    held = {name: t.to(kinds.get(name, t.dtype)) for name, t in load_file(folder / WEIGHTS).items()}
    refused(folder, tmp_path, held, words)


def refused(folder, tmp_path, held, words):
    (tmp_path / CONFIG).write_text((folder / CONFIG).read_text())
    save_file(held, tmp_path / WEIGHTS)
    with pytest.raises(AmorError) as error:
        load_model(tmp_path)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_every_tensor_that_is_missing_misshapen_or_not_finite_is_named(folder, tmp_path):
    held = load_file(folder / WEIGHTS)
    for name, t in held.items():
        refused(
            folder, tmp_path, {n: x for n, x in held.items() if n != name}, f"{name!r} is missing"
        )
        refused(
            folder,
            tmp_path,
            held | {name: torch.cat([t.flatten(), t.flatten()[:1]])},
            f"{name} has shape",
        )
        if t.is_floating_point():
            bad = t.clone()
            bad.view(-1)[-1] = float("nan") if len(name) % 2 else float("-inf")
            refused(
                folder, tmp_path, held | {name: bad}, f"{name} holds a number that is not finite"
            )
    refused(
        folder, tmp_path, held | {"embed.wieght": torch.zeros(1)}, "did you mean 'embed.weight'"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_of_the_bits_are_read(folder, tmp_path, dtype):
    save(small("amor-mamba2").to(dtype), tmp_path)
    assert {p.dtype for p in load_model(tmp_path).parameters()} == {dtype}


def headed(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header


BROKEN = {
    "empty": b"",
    "short": b"\x01",
    "no header": headed(b"", 2**63),
    "long header": headed(b"{}", 10**15),
    "no json": headed(b"\xff\xfe"),
    "nested": headed(b'{"a":' * 5000),
    "absent bytes": headed(b'{"position":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'),
    "absurd shape": headed(
        b'{"position":{"dtype":"F32","shape":[9223372036854775807,8],"data_offsets":[0,16]}}'
    )
    + b"0" * 16,
    "unknown dtype": headed(b'{"position":{"dtype":"X","shape":[4],"data_offsets":[0,16]}}')
    + b"0" * 16,
    "null": headed(b"null"),
}


@pytest.mark.parametrize("held", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_of_tensors_is_one_line(folder, tmp_path, held):
    (tmp_path / CONFIG).write_text((folder / CONFIG).read_text())
    (tmp_path / WEIGHTS).write_bytes(held)
    for read in (load_model, lambda place: State.load(place / WEIGHTS)):
        with pytest.raises(AmorError) as error:
            read(tmp_path)
        assert "\n" not in str(error.value)


def parts_on_disk(path):
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        names = file.keys()
        return json.loads(file.metadata()["amor"]), {name: file.get_tensor(name) for name in names}


@torch.no_grad()
def test_a_state_file_of_nonsense_is_one_line_or_a_state(tmp_path):
    model, path = small("amor-mamba2", pattern="mamba2"), tmp_path / "state.safetensors"
    engine = Engine(model)
    model(tokens(2, 5)).state.save(path)
    facts, held = parts_on_disk(path)

    def tried(facts, held, place):
        save_file(
            held, path, metadata={"amor": facts if isinstance(facts, str) else json.dumps(facts)}
        )
        with one_line(place):
            engine.resume(State.load(path)).step([1, 2])

    tried(facts, held, "as it was")
    for path_in in nodes(facts):
        for value in NONSENSE:
            tried(replaced(facts, path_in, value), held, (path_in, value))
    for words in ("", "x", "{", "[" * 5000, '{"layers": 1}'):
        tried(words, held, words)
    for name, t in held.items():
        tried(facts, {n: x for n, x in held.items() if n != name}, f"without {name}")
        changes = [
            t.to(d) for d in (torch.int8, torch.int64, torch.float64, torch.bfloat16, torch.bool)
        ]
        changes += [
            t[:1],
            t[:0],
            t[None],
            t.flatten(),
            t.reshape(-1)[0],
            t.clone().fill_(-1),
            torch.zeros(0),
        ]
        changes += [t.double() / 0] if t.is_floating_point() else [t + 2**62]
        for change in changes:
            tried(
                facts,
                held | {name: change.contiguous()},
                f"{name} as {change.dtype} {list(change.shape)}",
            )
    for name in (
        "0.kv.k",
        "9.conv",
        "x",
        "-1.conv",
        "0.",
        "9" * 5000 + ".a",
        "position.k",
        "0.conv.k",
    ):
        tried(facts, held | {name: torch.zeros(2, 1, 5, 4)}, name)


MODELS = ["transformer", "mamba2", "gated-deltanet", "mamba2-fused", "amor-mamba2", "kda"]


@torch.no_grad()
def test_a_state_of_one_model_is_refused_by_every_other_with_what_differs():
    models = {name: small(name) for name in MODELS}
    models["wider"] = small("amor-mamba2", **{"mixers.mamba2.state_size": 32})
    models["half"] = small("amor-mamba2").bfloat16()
    engines = {name: Engine(model) for name, model in models.items()}
    states = {name: model(tokens(2, 6)).state for name, model in models.items()}
    for mine in models:
        for theirs, state in states.items():
            if mine == theirs:
                continue
            for enter in (
                lambda state, mine=mine: models[mine](tokens(2, 1), state),
                lambda state, mine=mine: engines[mine].step(torch.tensor([1, 2]), state),
                lambda state, mine=mine: engines[mine].resume(state),
                lambda state, mine=mine: State.join([states[mine], state]),
            ):
                with pytest.raises(AmorError, match=r"not one of this model: .*not ") as error:
                    enter(state)
                assert "\n" not in str(error.value)


@torch.no_grad()
def test_a_state_is_looked_at_once(monkeypatch):
    model, looked = small("amor-mamba2"), []
    monkeypatch.setattr(State, "_unsound", lambda self: looked.append(self) or "")
    session = Engine(model).prefill([[1, 2, 3]], room=9)
    session.step([1])
    looked.clear()
    for _ in range(6):
        session.step([1])
    assert not looked
    state = first = session.state
    for _ in range(3):
        state = model(tokens(1, 1), state).state
    assert [id(each) for each in looked] == [id(first)]


@torch.no_grad()
def test_a_state_made_by_hand_is_looked_at_before_native_code_writes_to_it():
    from dataclasses import replace

    model = small("amor-mamba2")
    engine, good = Engine(model), model(tokens(2, 6)).state
    kv = good.parts[-1]["kv"]
    assert isinstance(kv, KV)
    for changed in (
        replace(good, max_position=10**9),
        replace(good, position=good.position + 50),
        replace(good, position=good.position.float()),
        replace(good, position=torch.tensor([6, 5])),
        replace(good, parts=(*good.parts[:-1], {"kv": KV.of(kv.k[:1], kv.v[:1])})),
        replace(good, parts=(*good.parts[:-1], {"kv": KV.of(kv.k, kv.v[:, :, :3])})),
        replace(good, parts=(*good.parts[:-1], {"kv": KV.of(kv.k[:, :, :3], kv.v[:, :, :3])})),
        replace(good, parts=(*good.parts[:-1], {"kv": replace(kv, used=10**6)})),
        replace(good, parts=(*good.parts[:-1], {})),
        replace(good, parts=good.parts[:-1]),
    ):
        for enter in (
            lambda s: engine.step(torch.tensor([1, 2]), s),
            lambda s: model(tokens(2, 1), s),
        ):
            with pytest.raises(AmorError, match="not one of this model"):
                enter(changed)
    engine.step(torch.tensor([1, 2]), good)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.tensor([[1, 2, 211]]), "token 211 is outside the vocabulary, 0 to 210"),
        (torch.tensor([[1, -1]]), "token -1 is outside the vocabulary"),
        (torch.tensor([1, 2]), r"int64 of shape \[2\]; give int64 of shape \[rows, columns\]"),
        (torch.tensor([[1.0, 2.0]]), "tokens are float32"),
        (torch.tensor([[True]]), "tokens are bool"),
        (torch.zeros(0, 3, dtype=torch.long), "no rows"),
    ],
    ids=["beyond", "negative", "1-D", "float", "bool", "no rows"],
)
def test_tokens_that_are_no_ids_of_the_model_are_refused_in_one_line(given, words):
    model = small("mamba2")
    with one_line(), pytest.raises(AmorError, match=words):
        model(given)


def test_pads_may_hold_anything_and_a_wrong_token_of_a_decode_step_is_refused():
    model = small("mamba2")
    padded = torch.tensor([[-100, 1, 2], [3, 4, 5]])
    model(padded, valid=padded >= 0)
    with pytest.raises(AmorError, match="token -100"):
        model(padded)
    session = Engine(model).prefill([[1, 2]])
    with pytest.raises(AmorError, match="token 211 is outside the vocabulary"):
        session.step([211])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.no_grad()
def test_weights_so_large_that_logits_are_not_finite_are_named_by_decode(temperature):
    model = small("amor-mamba2")
    for parameter in model.backbone.parameters():
        parameter.mul_(1e38)
    logits = Engine(model).prefill([[1, 2]]).next.logits
    with pytest.raises(AmorError, match="logits are not finite"):
        Sampler(Sampling(temperature=temperature), [0], [[1, 2]], 211).choose(logits)
