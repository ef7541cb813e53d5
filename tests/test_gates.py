"""The laws of gates, over every kind the registry finds."""

import pytest
import torch
from laws import close, small, tokens

import amor
from amor import registry
from amor.decode.scores import Scorers
from amor.errors import AmorError
from amor.gates.base import Adaptive, Evidence, matches_forward
from amor.gates.evidence import HEAD_EVIDENCE
from amor.gates.override import override_gates
from amor.judge.check import check

KINDS = registry.kinds("gates")


def gate_of(kind, **options):
    cls = registry.find("gates", kind)
    gate = cls(64, cls.Options(**options), 0)
    scores = torch.linspace(0, 1, 1001)
    if kind == "learned":
        torch.nn.init.normal_(gate.router.weight, generator=torch.Generator().manual_seed(0))
        scores = gate.router(evidence(1, 1000).x).squeeze(-1)
    gate.observe(scores)
    return gate


def evidence(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    numbers = {
        name: torch.rand(rows, columns, generator=generator) for name in sorted(HEAD_EVIDENCE)
    }
    gain = torch.randn(rows, columns, generator=generator)
    position = torch.arange(columns).expand(rows, -1)
    return Evidence(
        torch.randn(rows, columns, 64, generator=generator), position, gain=gain, **numbers
    )


def part(seen, rows, columns):
    return Evidence(
        **{
            name: getattr(seen, name)[rows][:, columns]
            for name in ("x", "position", "gain", *HEAD_EVIDENCE)
        }
    )


def test_the_registry_finds_every_gate():
    assert set(KINDS) == {
        "entropy",
        "margin",
        "always",
        "never",
        "random",
        "learned",
        "oracle",
        "gain",
        "quantile",
        "router",
        "varentropy",
    }


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_decision_depends_on_its_own_token_alone(kind):
    gate, seen = gate_of(kind), evidence(4, 30)
    whole = gate(seen).fire
    assert torch.equal(gate(part(seen, [2], slice(0, 30))).fire, whole[2:3])
    assert torch.equal(gate(part(seen, [3, 1], slice(7, 8))).fire, whole[[3, 1], 7:8])
    assert torch.equal(gate(part(seen, [0, 1, 2, 3], slice(0, 11))).fire, whole[:, :11])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_gate_asks_only_for_what_it_needs(kind):
    gate, seen = gate_of(kind), evidence(2, 30)
    only = Evidence(seen.x, seen.position, **{name: getattr(seen, name) for name in gate.needs})
    assert torch.equal(gate(only).fire, gate(seen).fire)


@pytest.mark.parametrize("kind", ["entropy", "margin"])
def test_the_threshold_is_an_average_of_median_plus_a_share_of_the_spread(kind):
    cls = registry.find("gates", kind)
    gate = cls(8, cls.Options(kappa=0.5, eta=0.25), 0)
    first, second = torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9])
    gate.observe(first)
    close(gate.mu, torch.tensor(0.2))
    close(gate.sigma, first.std(correction=0))
    gate.observe(second)  # of two the lower middle one, 0.5
    close(gate.mu, torch.tensor(0.75 * 0.2 + 0.25 * 0.5))
    close(gate.sigma, 0.75 * first.std(correction=0) + 0.25 * second.std(correction=0))
    close(gate.threshold, gate.mu + 0.5 * gate.sigma)


@pytest.mark.parametrize("kind", ["entropy", "margin", "learned"])
def test_a_gate_that_has_met_no_data_never_fires(kind):
    cls = registry.find("gates", kind)
    gate = cls(64, cls.Options(), 0)
    assert not gate(evidence(2, 30)).fire.any()
    with pytest.raises(amor.AmorError, match="no statistics yet"):
        gate.aim(0.1)


def test_the_order_of_scores_changes_no_bit_of_the_statistics():
    scores = torch.rand(999, generator=torch.Generator().manual_seed(3))
    one, other = (
        registry.find("gates", "entropy")(8, registry.find("gates", "entropy").Options(), 0)
        for _ in range(2)
    )
    one.observe(scores)
    other.observe(scores[torch.randperm(999)])
    for a, b in zip(one.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b)


def test_the_paper_fires_where_entropy_exceeds_mu_plus_a_fifth_of_sigma():
    gate = registry.find("gates", "entropy")(8, registry.find("gates", "entropy").Options(), 0)
    gate.observe(torch.tensor([0.3, 0.5, 0.7]))
    tau = 0.5 + 0.2 * torch.tensor([0.3, 0.5, 0.7]).std(correction=0)
    at = torch.tensor([[tau - 1e-4, tau + 1e-4]])
    assert gate(
        Evidence(torch.zeros(1, 2, 8), torch.zeros(1, 2).long(), entropy=at)
    ).fire.tolist() == [[False, True]]


@pytest.mark.parametrize("kind", ["entropy", "margin", "learned", "random"])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
@torch.no_grad()
def test_a_gate_aimed_at_a_rate_fires_on_that_share(kind, rate):
    gate, seen = gate_of(kind), evidence(10, 2000)
    gate.aim(rate)
    assert abs(gate(seen).fire.float().mean().item() - rate) < 0.03
    gate.aim(None)
    assert torch.equal(gate(seen).fire, gate_of(kind)(seen).fire)


def test_the_router_learns_from_every_token_through_a_hard_decision():
    gate, seen = gate_of("learned"), evidence(1, 50)
    verdict = gate(seen)
    assert set(verdict.weight.detach().tolist()[0]) <= {0.0, 1.0}
    (verdict.weight * torch.rand(50)).sum().backward()
    assert gate.router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["gain", "learned"])
@torch.no_grad()
def test_a_score_is_compiled_from_the_program_of_a_gate_and_follows_its_numbers(kind):
    gate, seen, scorers = gate_of(kind), evidence(1, 50), Scorers()
    x, position = seen.x[0], seen.position[0].tolist()

    def compiled():
        told = torch.empty(50, 1)
        scorers(gate, 64)([x, told])
        scores = told[:, 0].tolist()
        return told[:, 0], gate.fires(scores, position)

    def agrees():
        verdict, (scores, fires) = gate(seen), compiled()
        close(scores, verdict.score[0])
        far = (verdict.score[0] - gate.threshold).abs() > 1e-5  # a tie may fall either way
        assert [f for f, here in zip(fires, far.tolist()) if here] == verdict.fire[0][far].tolist()
        return scores

    if kind == "gain":
        assert scorers(gate, 64) is None, "while it explores it looks at positions"
        gate.learn(torch.randn(600, 64), torch.rand(600))
    first = agrees()
    held = scorers(gate, 64)
    assert scorers(gate, 64) is held, "compiled once"
    fired = sum(compiled()[1])
    gate.aim(0.9)
    assert sum(compiled()[1]) > fired
    if kind == "gain":
        gate.learn(torch.randn(600, 64), torch.rand(600) + 1)
    else:
        gate.router.weight.mul_(2)
    assert not torch.equal(agrees(), first)


def test_what_was_said_of_another_forward_is_not_believed():
    class Late(registry.find("gates", "learned")):
        def forward(self, evidence):
            return super().forward(evidence)

    class Early(registry.find("gates", "entropy")):
        def forward(self, evidence):
            return super().forward(evidence)

    own = gate_of("learned")
    assert Scorers()(own, 64) is not None
    assert Scorers()(Late(64, own.options, 0), 64) is None
    assert not matches_forward(Early, "fires") and matches_forward(
        type(gate_of("quantile")), "fires"
    )
    own.register_forward_hook(lambda *_: None)
    assert Scorers()(own, 64) is None, "whoever watches it sees it decide"


@pytest.mark.parametrize("kind", KINDS)
def test_a_threshold_as_a_number_is_the_one_that_decides(kind):
    gate = gate_of(kind)
    if not isinstance(gate, Adaptive):
        return
    for change in (
        lambda: None,
        lambda: gate.observe(torch.full((9,), 0.7)),
        lambda: gate.aim(0.3),
        lambda: gate.aim(None),
    ):
        change()
        assert gate.threshold_value() == float(gate.threshold)
    gate.load_state_dict({name: number * 0.5 for name, number in gate.state_dict().items()})
    assert gate.threshold_value() == float(gate.threshold)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_decides_as_the_whole_forward_did_whatever_the_batch(kind):
    findings = check(
        small("amor-mamba2", **{"blocks.gate": kind, "blocks.count": 2}), length=40, rows=3
    )
    assert all(f.ok for f in findings), [f for f in findings if not f.ok]
    assert sum(f.ties for f in findings) == 0


@torch.no_grad()
def test_the_oracle_fires_exactly_where_attention_lowers_the_loss():
    model, text = (
        small("amor-mamba2", **{"blocks.gate": "oracle", "blocks.count": 1}),
        tokens(2, 40),
    )
    goal = text.roll(-1, 1)
    fire = model(text, targets=goal).gates[0].fire
    losses = {}
    for kind in ("never", "always"):
        twin = small("amor-mamba2", **{"blocks.gate": kind, "blocks.count": 1})
        twin.load_state_dict(model.state_dict(), strict=False)
        losses[kind] = twin(text, targets=goal).nll
    assert torch.equal(fire, losses["always"] < losses["never"])
    with pytest.raises(amor.AmorError, match="targets"):
        model(text)


def test_another_gate_given_in_words_leaves_the_model_s_own_alone():
    model = small("amor-mamba2")
    own = [block.gate for block in model.each_block()]
    assert (
        all(a is b for a, b in zip(override_gates(own), own, strict=True))
        and override_gates(own, "entropy")[0] is own[0]
    )
    assert [gate.kind for gate in override_gates(own, "never")] == ["never"] * 3
    spread = override_gates(own, "random:0.25")
    assert [float(gate.threshold) for gate in spread] == [0.75] * 3
    assert not torch.equal(
        *(gate(Evidence(torch.zeros(9, 1), torch.arange(9))).score for gate in spread[:2])
    )
    lifted = override_gates(own, rate=0.1)
    assert all(
        a is not b and a.threshold > b.threshold and b.aimed is None
        for a, b in zip(lifted, own, strict=True)
    )


@pytest.mark.parametrize(
    ("words", "rate", "said"),
    [
        ("allways", None, "always"),
        ("random:x", None, "not a number"),
        ("random:2", None, "rate: expected float <= 1.0, not 2"),
        ("never:1", None, "no number"),
        (None, 2.0, "between 0 and 1"),
        ("always", 0.5, "cannot aim"),
    ],
)
def test_a_gate_that_cannot_be_had_is_refused_with_a_hint(words, rate, said):
    own = [block.gate for block in small("amor-mamba2").each_block()]
    with pytest.raises(AmorError, match=said):
        override_gates(own, words, rate)
    with pytest.raises(AmorError, match="no gated blocks"):
        override_gates([], words, rate)


def test_a_tensor_that_moved_by_as_much_as_its_version_fell_is_another_one():
    class Moved:
        def __init__(self, address, version):
            self._version, self.data_ptr = version, lambda: address

    gate = gate_of("entropy")
    keys = []
    for address, version in ((64, 1), (63, 2)):
        gate.decision_tensors = lambda address=address, version=version: (Moved(address, version),)
        keys.append(gate.version_key())
    assert keys[0] != keys[1]
