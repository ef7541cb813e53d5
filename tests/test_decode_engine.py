"""The engine says what the full forward says: text and gate decisions, however prompts are cut, batched, forked or stored."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from laws import small, tokens

import amor
from amor.decode.engine import Engine
from amor.decode.head import Head
from amor.decode.probe import Probes, inputs_of
from amor.decode.savings import Savings
from amor.ops.spent import counting
from amor.presets import NAMES

GATED = [name for name in NAMES if name.startswith("amor-")]
EVERY = Savings(cheap=True)
SWITCHED = {
    "default": Savings(),
    "every saving": EVERY,
    "none": Savings.none(),
    "the model's forward": dataclasses.replace(EVERY, packed=False),
    **{f"no {f.name}": dataclasses.replace(EVERY, **{f.name: False}) for f in dataclasses.fields(Savings)},
}
LENGTHS = (19, 1, 30, 7, 19)


def greedy(session, count, best=False):
    """Tokens [B, count] and the decisions [B, K] made at each: the engine's own choice of text."""
    text, fires = [], []
    for _ in range(count):
        text.append(session.next.best if best else session.next.logits.argmax(-1))
        fires.append(session.next.fire)
        session.step(text[-1], best)
    return torch.stack(text, 1), fires


@torch.no_grad()
def as_the_full_forward(model, prompts, text, fires):
    """Every row read whole and by itself: each token was its best, each decision its own."""
    for row, prompt in enumerate(prompts):
        whole = torch.cat([torch.tensor(prompt), text[row]])[None]
        out = model(whole)
        start = len(prompt) - 1
        assert model.logits(out.hidden)[0, start:-1].argmax(-1).tolist() == text[row].tolist()
        for block, gate in enumerate(out.gates):
            assert gate.fire[0, start:-1].tolist() == [bool(f[row, block]) for f in fires], f"row {row}, block {block}"


def prompts_of(lengths):
    return [tokens(1, n, seed=i)[0].tolist() for i, n in enumerate(lengths)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("switched", SWITCHED)
def test_text_and_decisions_are_the_full_forward_s_with_every_saving_on_and_off(name, switched):
    model = small(name)
    engine = Engine(model, SWITCHED[switched])
    engine.head.fires, engine.head.again, engine.head.copy_cost = 1.0, 1.0, 0.0  # so that a cheap probe pays
    for lengths, chunk, best in (((19,), 512, False), ((19,), 512, True), (LENGTHS, 8, False), (LENGTHS, 8, True)):
        prompts = prompts_of(lengths)
        text, fires = greedy(engine.prefill(prompts, chunk=chunk), 12, best)
        as_the_full_forward(model, prompts, text, fires)


@pytest.mark.parametrize("name", ["amor-mamba2-classic", "amor-gated-deltanet-prenorm", "amor-mamba2-nogate", "amor-mamba2-mlp"])
@pytest.mark.parametrize("savings", [EVERY, dataclasses.replace(EVERY, packed=False)])
def test_ablations_decode_as_they_read(name, savings):
    model, prompts = small(name), prompts_of((9, 4))
    as_the_full_forward(model, prompts, *greedy(Engine(model, savings).prefill(prompts), 10))


@pytest.mark.parametrize("gate", ["margin", "learned", "random", "never", "always"])
@pytest.mark.parametrize("savings", [EVERY, dataclasses.replace(EVERY, packed=False)])
def test_any_gate_decodes_as_it_reads(gate, savings):
    model, prompts = small("amor-mamba2", **{"blocks.gate": gate}), prompts_of((9, 4))
    as_the_full_forward(model, prompts, *greedy(Engine(model, savings).prefill(prompts), 10))


def test_the_oracle_is_refused_for_it_would_have_to_know_the_future():
    with pytest.raises(amor.AmorError, match="true next tokens"):
        Engine(small("amor-mamba2", **{"blocks.gate": "oracle"})).prefill([[1, 2, 3]]).step([1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packed", [True, False])
def test_rows_join_and_leave_without_touching_the_others(name, packed):
    model = small(name)
    engine = Engine(model, Savings(packed=packed))
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
@pytest.mark.parametrize("packed", [True, False])
def test_a_fork_and_a_rollback_go_on_as_if_nothing_had_happened(name, packed):
    model = small(name)
    engine = Engine(model, Savings(packed=packed))
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
    assert all(torch.equal(a, b) for a, b in zip(fires_again, fires[1:], strict=True))


@pytest.mark.parametrize("name", ["mamba2-fused", "gated-deltanet-serial", *GATED])
def test_a_session_saved_goes_on_in_another_process(name, tmp_path):
    model, prompts = small(name), prompts_of((12, 5))
    session = Engine(model).prefill(prompts)
    text, _ = greedy(session.fork(), 8)
    session.step(text[:, 0])
    session.state.save(tmp_path / "state.safetensors")
    code = (
        "import sys, torch; torch.set_num_threads(1); sys.path.insert(0, 'tests'); from laws import small;"
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
    assert engine.tally.head_passes == engine.tally.tokens == 10
    assert engine.tally.skipped == 1


@pytest.mark.parametrize("packed", [True, False])
def test_every_firing_costs_one_more_pass_and_nothing_else_does(packed):
    engine = Engine(small("amor-mamba2"), Savings(packed=packed))
    session = engine.prefill(prompts_of((9,)))
    for _ in range(40):
        before = engine.tally.head_passes
        session.step(session.next.logits.argmax(-1))
        assert engine.tally.head_passes - before == 1 + int(session.next.fire.sum())
    assert 0 < sum(engine.tally.fired) < 120


def test_without_the_joint_pass_the_head_is_read_once_a_block_and_once_for_the_output():
    engine = Engine(small("amor-mamba2"), Savings(joint=False))
    greedy(engine.prefill(prompts_of((9,))), 10)
    assert engine.tally.head_passes == 40


def test_the_last_block_looks_at_the_last_token_of_a_prompt_only():
    rows = {}
    for last in (True, False):
        engine = Engine(small("amor-mamba2"), Savings(last=last))
        engine.prefill(prompts_of((50,)))
        rows[last] = engine.tally.prompt_head_rows
    assert rows[False] == 3 * 50 + 1
    assert 2 * 50 + 2 <= rows[True] <= 2 * 50 + 3


def test_a_closed_gate_runs_no_query_and_an_open_one_only_for_its_rows(monkeypatch):
    from amor.decode.layers import PackedAttention

    asked = []
    honest = PackedAttention.ask
    monkeypatch.setattr(PackedAttention, "ask", lambda self, x, *more: asked.append(len(x)) or honest(self, x, *more))
    engine = Engine(small("amor-mamba2"))
    session = engine.prefill(prompts_of(LENGTHS))
    fired = 0
    for _ in range(10):
        session.step(session.next.logits.argmax(-1))
        fired += int(session.next.fire.sum())
    assert sum(asked) == fired == sum(engine.tally.fired)
    assert 0 < fired < 10 * 5 * 3


@pytest.mark.parametrize("name", ["mamba2", "amor-mamba2"])
def test_the_best_token_is_found_over_the_8_bit_head_alone_and_rows_still_join(name):
    engine = Engine(small(name), EVERY)
    engine.head.fires, engine.head.copy_cost = 0.0, 0.1
    prompts = prompts_of((9, 4))
    alone = [greedy(Engine(small(name)).prefill([p]), 9)[0] for p in prompts]
    session = engine.prefill(prompts[:1])
    before = engine.tally.head_passes
    first, _ = greedy(session, 4, best=True)
    assert session.next.logits.shape == (1, 0) and engine.tally.cheap_passes
    if name == "mamba2":
        assert engine.tally.head_passes == before and engine.tally.cheap_passes == 4
    session = session.join(engine.prefill(prompts[1:]))  # one knows its logits, the other its best token
    second, _ = greedy(session, 5, best=True)
    assert torch.equal(torch.cat([first, second[:1]], 1), alone[0])
    assert torch.equal(second[1:], alone[1][:, :5])


def cheap_head(model):
    """A head whose 8-bit copy is asked: many firings, and a copy that costs nothing."""
    head = Head(model.embed.weight, "float32", True)
    head.fires, head.copy_cost = 1.0, 0.0
    return head


@torch.no_grad()
def test_a_cheap_probe_gives_the_exact_decision_or_asks_the_exact_head():
    model = small("amor-mamba2")
    gates = [b.gate for b in model.each_block()]
    sure = 0
    for seed in range(20):
        h = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed)) * (0.03 + 0.02 * seed)
        heads = {cheap: cheap_head(model) if cheap else Head(model.embed.weight, "float32", False) for cheap in (True, False)}
        found = {
            cheap: gates[0](Probes(head, gates, inputs_of(model), EVERY).ask(0, h, h, torch.zeros(2))).fire
            for cheap, head in heads.items()
        }
        assert torch.equal(found[True], found[False])
        sure += heads[True].passes.rows == 0
    assert sure > 0


def test_a_threshold_at_the_entropy_itself_is_never_left_to_the_cheap_probe():
    model = small("amor-mamba2", **{"blocks.count": 1})
    gate = model.each_block()[0].gate
    h = torch.randn(1, 64, generator=torch.Generator().manual_seed(3)) * 0.1
    head = cheap_head(model)
    exact = (
        Probes(Head(model.embed.weight, "float32", False), [gate], inputs_of(model), EVERY).ask(0, h, h, torch.zeros(1)).entropy
    )
    gate.mu.copy_(exact[0])
    gate.sigma.zero_()
    Probes(head, [gate], inputs_of(model), EVERY).ask(0, h, h, torch.zeros(1))
    assert head.passes.cheap == head.passes.exact == 1


@pytest.mark.parametrize("name", ["transformer", "amor-mamba2"])
def test_keys_and_values_never_move_while_reserved_room_lasts(name):
    session = Engine(small(name)).prefill(prompts_of((20, 9)), room=50)
    buffers = {id(part["kv"].buffer) for part in session.state.parts if "kv" in part}
    size = session.state.nbytes
    greedy(session, 50)
    assert {id(part["kv"].buffer) for part in session.state.parts if "kv" in part} == buffers
    assert session.state.nbytes == size


@pytest.mark.parametrize("name", ["mamba2", "amor-gated-deltanet"])
def test_recurrent_states_are_written_in_place(name):
    session = Engine(small(name)).prefill(prompts_of((20,)), room=50)
    places = [t.data_ptr() for part in session.state.parts for t in part.values() if isinstance(t, torch.Tensor)]
    greedy(session, 5)
    assert places == [t.data_ptr() for part in session.state.parts for t in part.values() if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", ["transformer", "mamba2", "gated-deltanet", "amor-mamba2", "amor-gated-deltanet"])
def test_eight_bit_weights_speak_nearly_as_the_model_does(name):
    model, prompts = small(name, **{"blocks.gate": "never"}), prompts_of((9, 4))
    model.embed.weight.data.mul_(4)  # layers turn the residual by a part of itself, or each would enlarge the last one's rounding
    sessions = [Engine(model, weights=kind).prefill(prompts) for kind in ("float32", "int8")]
    exact, rounded = (s.step([5, 6]).logits for s in sessions)
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).abs().max() < 0.02 * exact.abs().max()


def test_wrong_calls_are_refused_with_a_reason():
    engine = Engine(small("mamba2"))
    for prompts in ([], [[]], [[1], []]):
        with pytest.raises(amor.AmorError, match="empty prompt"):
            engine.prefill(prompts)
    with pytest.raises(amor.AmorError, match="one token a row"):
        engine.prefill([[1, 2]]).step([1, 2])
    with pytest.raises(amor.AmorError, match="float32"):
        Engine(small("mamba2"), Savings(packed=False), weights="int8")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_step_spends_is_what_the_model_declares(name):
    model = small(name)
    engine = Engine(model)
    session = engine.prefill(prompts_of((30,)))
    for _ in range(5):
        context, before = int(session.state.position[0]), dataclasses.replace(engine.head.passes)
        with counting() as spent:
            session.step(session.next.logits.argmax(-1))
        rate = session.next.fire.double().mean().item() if model.blocks else 0.0
        passes, rows = engine.head.passes.exact - before.exact, engine.head.passes.rows - before.rows
        assert spent.flops == pytest.approx(model.cost(context, rate, rows).flops)
        declared = model.cost(context, rate, passes)
        norms = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 1 or "conv1d" in n)  # counted by nobody
        most = round(declared.weights * 4 + declared.state_read)  # a whole number but for the rate's rounding
        assert most - 4 * norms <= spent.bytes <= most
