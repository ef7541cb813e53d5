"""The engine says what the full forward says: text and gate decisions, however prompts are
cut, batched, forked or stored."""

import copy
import dataclasses
import subprocess
import sys

import pytest
import torch
from laws import close, small, tokens

import amor
from amor.decode.blocks import CompiledBlocks
from amor.decode.engine import Engine
from amor.decode.policy import Fixed, Follow
from amor.decode.savings import Savings
from amor.judge.dequantised import dequantised_reference
from amor.ops.product import FORMATS
from amor.ops.spent import counting
from amor.presets import NAMES as PAPER
from amor.presets import more_names

NAMES = PAPER + more_names()

GATED = [name for name in NAMES if name.startswith("amor-")]
EVERY = Savings()
SWITCHED = {
    "every saving": EVERY,
    "none": Savings.none(),
    "the model's forward": dataclasses.replace(EVERY, compiled=False),
    **{
        f"no {f.name}": dataclasses.replace(EVERY, **{f.name: False})
        for f in dataclasses.fields(Savings)
    },
}
LENGTHS = (19, 1, 30, 7, 19)


def greedy(session, count):
    """Tokens [B, count] and what was known at each: the engine's own choice of text."""
    text, known = [], []
    for _ in range(count):
        text.append(session.next.logits.argmax(-1))
        known.append(session.next)
        session.step(text[-1])
    return torch.stack(text, 1), known


@torch.no_grad()
def as_the_full_forward(model, prompts, text, known):
    """Every row read whole and by itself, in float64: each token was its best,
    each number and decision its own.

    float64, because a chunk of Gated DeltaNet loses digits in float32 where a step does not: in the
    text of one row the forward was off by 1.5e-4 and the engine by 2e-5.
    """
    model = copy.deepcopy(model).double()
    for row, prompt in enumerate(prompts):
        whole = torch.cat([torch.tensor(prompt), text[row]])[None]
        out = model(whole)
        start = len(prompt) - 1
        logits = model.logits(out.hidden)[0, start:-1].float()
        assert logits.argmax(-1).tolist() == text[row].tolist()
        for mine, n in zip(logits, known, strict=True):
            close(n.logits[row], mine, "logits")
        for block, gate in enumerate(out.gates):
            assert gate.fire[0, start:-1].tolist() == [bool(n.fire[row, block]) for n in known], (
                f"row {row}, block {block}"
            )
            close(
                torch.stack([n.score[row, block] for n in known]),
                gate.score[0, start:-1].float(),
                "scores",
            )


def prompts_of(lengths):
    return [tokens(1, n, seed=i)[0].tolist() for i, n in enumerate(lengths)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("switched", SWITCHED)
def test_text_and_decisions_are_the_full_forward_s_with_every_saving_on_and_off(name, switched):
    writes_as_it_reads(small(name), SWITCHED[switched])


FINAL = {"blocks.probe": "final"}


@pytest.mark.parametrize(
    ("name", "changes", "switched"),
    [
        *(
            ("amor-mamba2", FINAL, how)
            for how in ("every saving", "no joint", "no speculate", "the model's forward")
        ),
        *(
            ("amor-mamba2", {"blocks.decide": "once"}, how)
            for how in ("every saving", "no joint", "the model's forward")
        ),
        *(
            ("amor-gated-deltanet-gain", {"blocks.decide": how}, "every saving")
            for how in ("each", "once")
        ),
        (
            "amor-mamba2",
            FINAL | {"blocks.decide": "once", "blocks.first": "prenorm"},
            "every saving",
        ),
        ("amor-mamba2-mlp", FINAL | {"blocks.gate": "margin"}, "every saving"),
    ],
)
def test_variants_write_as_they_read(name, changes, switched):
    writes_as_it_reads(small(name, **changes), SWITCHED[switched])


def writes_as_it_reads(model, savings):
    engine = Engine(model, savings, policy=Fixed(savings.speculate))
    for lengths, chunk in (((19,), 512), (LENGTHS, 8)):
        prompts = prompts_of(lengths)
        text, fires = greedy(engine.prefill(prompts, chunk=chunk), 12)
        as_the_full_forward(model, prompts, text, fires)


@pytest.mark.parametrize(
    "name",
    ["amor-mamba2-classic", "amor-gated-deltanet-prenorm", "amor-mamba2-nogate", "amor-mamba2-mlp"],
)
@pytest.mark.parametrize("savings", [EVERY, dataclasses.replace(EVERY, compiled=False)])
def test_ablations_decode_as_they_read(name, savings):
    model, prompts = small(name), prompts_of((9, 4))
    as_the_full_forward(model, prompts, *greedy(Engine(model, savings).prefill(prompts), 10))


@pytest.mark.parametrize("gate", ["margin", "learned", "random", "never", "always"])
@pytest.mark.parametrize("savings", [EVERY, dataclasses.replace(EVERY, compiled=False)])
def test_any_gate_decodes_as_it_reads(gate, savings):
    model, prompts = small("amor-mamba2", **{"blocks.gate": gate}), prompts_of((9, 4))
    as_the_full_forward(model, prompts, *greedy(Engine(model, savings).prefill(prompts), 10))


def test_the_oracle_is_refused_for_it_would_have_to_know_the_future():
    with pytest.raises(amor.AmorError, match="true next tokens"):
        Engine(small("amor-mamba2", **{"blocks.gate": "oracle"})).prefill([[1, 2, 3]]).step([1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compiled", [True, False])
def test_rows_join_and_leave_without_touching_the_others(name, compiled):
    model = small(name)
    engine = Engine(model, Savings(compiled=compiled))
    prompts = prompts_of((12, 5, 20))
    alone = [greedy(engine.prefill([p]), 12)[0] for p in prompts]
    session = engine.prefill(prompts[:2])
    first, _ = greedy(session, 4)
    session = session.join(engine.prefill(prompts[2:]))
    second, _ = greedy(session, 4)
    session = session.select([2, 0])
    third, _ = greedy(session, 4)
    assert torch.cat([first[0], second[0], third[1]]).tolist() == alone[0][0].tolist()
    assert torch.cat([first[1], second[1]]).tolist() == alone[1][0, :8].tolist()
    assert torch.cat([second[2], third[0]]).tolist() == alone[2][0, :8].tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_fork_and_a_rollback_go_on_as_if_nothing_had_happened(name, compiled):
    model = small(name)
    engine = Engine(model, Savings(compiled=compiled))
    prompts = prompts_of((12, 5))
    text, fires = greedy(engine.prefill(prompts), 10)
    session = engine.prefill(prompts, memory=8)
    other = session.fork()
    greedy(other, 5)
    for column in (text[:, 0], (text[:, 1] + 1) % 211, (text[:, 2] + 5) % 211):
        session.step(column)
    session.rollback(2)
    with pytest.raises(amor.AmorError, match="step"):
        _ = session.next
    session.rollback(1)
    session.step(text[:, 0])
    again, fires_again = greedy(session, 9)
    assert again.tolist() == text[:, 1:].tolist()
    assert all(torch.equal(a.fire, b.fire) for a, b in zip(fires_again, fires[1:], strict=True))


@pytest.mark.parametrize("name", ["mamba2-fused", "gated-deltanet-serial", *GATED])
def test_a_session_saved_goes_on_in_another_process(name, tmp_path):
    model, prompts = small(name), prompts_of((12, 5))
    session = Engine(model).prefill(prompts)
    text, _ = greedy(session.fork(), 8)
    session.step(text[:, 0])
    session.state.save(tmp_path / "state.safetensors")
    code = (
        "import sys, torch; torch.set_num_threads(1); sys.path.insert(0, 'tests'); "
        "from laws import small;"
        "from amor.decode.engine import Engine; from amor.state import State;"
        f"s = Engine(small({name!r})).resume(State.load({str(tmp_path / 'state.safetensors')!r}));"
        f"token = torch.tensor({text[:, 1].tolist()});\n"
        "for _ in range(6): token = s.step(token).logits.argmax(-1); print(*token.tolist())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [[int(w) for w in line.split()] for line in said.stdout.splitlines()]
    assert torch.tensor(lines).T.tolist() == text[:, 2:].tolist()


def test_one_pass_over_the_head_serves_a_token_that_does_not_fire():
    engine = Engine(small("amor-mamba2", **{"blocks.gate": "entropy"}))
    for block in engine.model.each_block():
        block.gate.aim(0.0)
    greedy(engine.prefill(prompts_of((9,))), 10)
    assert engine.stats.head_passes == engine.stats.tokens == 10
    assert engine.stats.skipped == 1


@pytest.mark.parametrize("compiled", [True, False])
def test_every_firing_costs_one_more_pass_and_nothing_else_does(compiled):
    engine = Engine(small("amor-mamba2"), Savings(compiled=compiled))
    session = engine.prefill(prompts_of((9,)))
    for _ in range(40):
        before = engine.stats.head_passes
        session.step(session.next.logits.argmax(-1))
        assert engine.stats.head_passes - before == 1 + int(session.next.fire.sum())
    assert 0 < sum(engine.stats.fired) < 120


def test_without_the_joint_pass_the_head_is_read_once_a_block_and_once_for_the_output():
    engine = Engine(small("amor-mamba2"), Savings(joint=False))
    greedy(engine.prefill(prompts_of((9,))), 10)
    assert engine.stats.head_passes == 40


def test_the_last_block_looks_at_the_last_token_of_a_prompt_only():
    rows = {}
    for last in (True, False):
        engine = Engine(small("amor-mamba2"), Savings(last=last))
        engine.prefill(prompts_of((50,)))
        rows[last] = engine.stats.prompt_head_rows
    assert rows[False] == 3 * 50 + 1
    assert 2 * 50 + 2 <= rows[True] <= 2 * 50 + 3


def test_a_closed_gate_runs_no_query_and_an_open_one_only_for_its_rows(monkeypatch):
    asked, fire = [], CompiledBlocks.fire
    monkeypatch.setattr(
        CompiledBlocks,
        "fire",
        lambda self, index, h, *more: asked.append(len(h)) or fire(self, index, h, *more),
    )
    found = []
    for native in (True, False):
        if not native:
            monkeypatch.setattr(Engine, "_step_program", lambda *_: None)
        engine = Engine(small("amor-mamba2"), policy=Fixed(False))
        session = engine.prefill(prompts_of(LENGTHS))
        fired, keys = 0, 0
        with counting() as spent:
            for _ in range(10):
                lengths = session.position + 1
                session.step(session.next.logits.argmax(-1))
                fired += int(session.next.fire.sum())
                keys += int((session.next.fire.sum(1) * lengths).sum())
        assert spent.by["attention"][0] == 4 * keys * 64, "counted keys times the width"
        assert fired == sum(engine.stats.fired) and 0 < fired < 10 * 5 * 3
        found.append((fired, spent.flops, spent.bytes))
    assert found[0] == found[1]
    assert sum(asked) == fired, "native steps call no Python"


def test_the_policy_follows_what_blocks_did():
    policy = Follow()
    rows = [[True, False, True], [False, True, False], [False] * 3, [False] * 3]
    for _ in range(500):
        policy.observe(rows)
    # one of two firings before the last block is followed by another
    assert 0.4 < policy.refire_rate < 0.6 and not policy.speculates()
    for _ in range(500):
        policy.observe([[True, True, True]])
    assert policy.speculates()


@pytest.mark.parametrize("name", ["transformer", "amor-mamba2"])
def test_keys_and_values_never_move_while_reserved_room_lasts(name):
    session = Engine(small(name)).prefill(prompts_of((20, 9)), room=50)
    places = [row.keys.data_ptr() for row in session.memory.rows]
    size = session.memory.nbytes
    greedy(session, 50)
    assert [row.keys.data_ptr() for row in session.memory.rows] == places
    assert session.memory.nbytes == size


@pytest.mark.parametrize("name", ["mamba2", "amor-gated-deltanet"])
def test_recurrent_states_are_written_in_place(name):
    session = Engine(small(name)).prefill(prompts_of((20,)), room=50)
    places = [row.recurrent.data_ptr() for row in session.memory.rows]
    greedy(session, 5)
    assert places == [row.recurrent.data_ptr() for row in session.memory.rows]


@pytest.mark.parametrize("name", [*NAMES, "amor-mamba2-mlp"])
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "float32"])
@torch.no_grad()
def test_a_format_speaks_as_a_model_of_the_weights_it_stands_for(name, kind):
    """Within the tolerance its row of the table states; gates are open, so that no
    decision at a threshold differs."""
    model = small(name, **({"blocks.gate": "always"} if name.startswith("amor") else {}))
    stands_for = dequantised_reference(model, kind)
    state, mine = stands_for.start(2), Engine(model, weights=kind).resume(model.start(2))
    apart = []
    for column in tokens(2, 12).T:
        got = mine.step(column).logits
        out = stands_for(column[:, None], state)
        state, want = out.state, stands_for.logits(out.hidden[:, 0])
        apart.append(float((got - want).abs().max() / want.abs().max()))
    assert max(apart) <= FORMATS[kind].tolerance
    assert sorted(apart)[len(apart) // 2] <= FORMATS[kind].tolerance / 2, (
        "and mostly well within it"
    )


def test_wrong_calls_are_refused_with_a_reason():
    engine = Engine(small("mamba2"))
    for prompts in ([], [[]], [[1], []]):
        with pytest.raises(amor.AmorError, match="empty prompt"):
            engine.prefill(prompts)
    with pytest.raises(amor.AmorError, match="one token per row"):
        engine.prefill([[1, 2]]).step([1, 2])
    with pytest.raises(amor.AmorError, match="float32"):
        Engine(small("mamba2"), Savings(compiled=False), weights="int8")
    with pytest.raises(amor.AmorError, match="int4"):
        Engine(small("mamba2"), weights="int5")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_step_spends_is_what_the_model_declares(name):
    model = small(name)
    engine = Engine(model)
    session = engine.prefill(prompts_of((30,)))
    for _ in range(5):
        context, before = int(session.position[0]), dataclasses.replace(engine.passes)
        with counting() as spent:
            session.step(session.next.logits.argmax(-1))
        rate = session.next.fire.double().mean().item() if model.blocks else 0.0
        passes, rows = engine.passes.passes - before.passes, engine.passes.rows - before.rows
        assert spent.flops == pytest.approx(model.cost(context, rate, rows).flops)
        declared = model.cost(context, rate, passes)
        norms = sum(
            p.numel() for n, p in model.named_parameters() if p.ndim == 1 or "conv1d" in n
        )  # counted by nobody
        most = round(
            declared.weights * 4 + declared.state_read
        )  # a whole number but for the rate's rounding
        assert most - 4 * norms <= spent.bytes <= most
