"""Fit routers to a trained model: collect inputs and targets of every block, fit a network per
block, set thresholds.

The weights of the model are not touched. Vectors are collected once, with the model's own gates
deciding. The linear part of a router is solved for (ridge regression, the ridge chosen on held-back
tokens); the hidden layer is then trained by AdamW from there, and the epoch with the smallest error
on the held-back tokens is kept.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from amor.data.loader import Windows
from amor.errors import AmorError
from amor.gates.base import Adaptive, Gate
from amor.gates.router import Router, network_output
from amor.judge.gates import RecordingGate, own_gates
from amor.judge.loop import ignore_tokens, join_chunks, run_windows
from amor.models.amor import Amor, Output
from amor.models.build import build
from amor.models.gated import PassOptions
from amor.models.measure import Measured
from amor.records.fit import CalibrationBin, Decisions, NetworkFit

BATCH, EPOCHS = 1024, 20
LR, DECAY = 1e-3, 1e-2
# fraction of the collected tokens, the last ones, that choose the ridge and the epoch
HELD_BACK = 0.1
RIDGES = tuple(10.0**p for p in range(-6, 2))  # times the mean variance of a channel
BINS = 10


def with_routers(model: Amor, options: dict[str, Any], decide: str) -> Amor:
    """A model's weights behind fresh routers, which keep the statistics of its gates."""
    own = own_gates(model)
    replaced = "" if isinstance(own[0], Router) else own[0].kind
    options = {"replaced": replaced, **options}
    keys = {"blocks.gate": "router", "blocks.gate_options": options, "blocks.decide": decide}
    return with_gates(model, keys, own)


def with_gates(model: Amor, keys: dict[str, Any], own: Sequence[Gate] = ()) -> Amor:
    """The same weights behind gates by keys of the config; routers keep the statistics of `own`."""
    other = build(model.config.change(**keys)).to(model.embed.weight)
    weights = {name: t for name, t in model.state_dict().items() if ".gate." not in name}
    other.load_state_dict(weights, strict=False)
    for gate, old in zip(own_gates(other), own, strict=False):
        gate.float()
        if isinstance(gate, Router) and isinstance(old, Adaptive):
            gate.remember(old)
    return other.eval()


def detach_routers(model: Amor) -> Amor:
    """A copy of the model with the gates that its routers replaced."""
    routers = [gate for gate in own_gates(model) if isinstance(gate, Router)]
    kind = routers[0].options.replaced if routers else ""
    if not kind:
        lack = "has no routers that replaced a gate, so there is nothing to detach"
        raise AmorError(f"{model.config.name} {lack}")
    keys = {"blocks.gate": kind, "blocks.gate_options": {}, "blocks.decide": "each"}
    other = with_gates(model, keys)
    if len(routers) != len(own_gates(other)):
        lost = "one router decides for all blocks, and the gates of the others were not kept"
        raise AmorError(f"{lost}; take the original model")
    for router, gate in zip(routers, own_gates(other), strict=True):
        if not isinstance(gate, Adaptive) or list(gate.parameters()) or gate.measures:
            lost = f"gate {kind!r} has weights that routers do not keep"
            raise AmorError(f"{lost}; take the model as it was before the fit")
        router.restore(gate)
    return other


def collect(
    other: Amor,
    model: Amor,
    text: Windows,
    every: int,
    on_tokens: Callable[[int], None] = ignore_tokens,
) -> list[Measured | None]:
    """Per block inputs and targets for gates of `other`, where the gates of `model` decide."""
    columns = torch.arange(0, text.columns, every)

    def measuring(tokens: Tensor, *arguments: Any, options: PassOptions, **more: Any) -> Output:
        options = replace(options, measure=columns.expand(len(tokens), -1))
        return other(tokens, *arguments, options=options, **more)

    gates = own_gates(model)
    chunks = run_windows(other, text, gates=gates, forward=measuring, on_tokens=on_tokens)
    samples: list[Measured | None] = []
    for parts in zip(*(chunk.out.measured for chunk in chunks), strict=True):
        known = [part for part in parts if part is not None]
        x, value = ([getattr(part, name).float() for part in known] for name in ("x", "value"))
        samples.append(Measured(torch.cat(x), torch.cat(value)) if known else None)
    return samples


def fit(
    model: Amor,
    text: Windows,
    options: dict[str, Any],
    decide: str = "each",
    # of firing; None: the trained threshold of the gates that are replaced
    rate: float | None = None,
    every: int = 2,  # one of so many columns is measured
    seed: int = 0,
    on_tokens: Callable[[int], None] = ignore_tokens,
) -> tuple[Amor, list[NetworkFit]]:
    """The model behind fitted routers, and how well each predicts."""
    if not model.blocks:
        lack = "has no gated blocks, so there is nothing to route"
        raise AmorError(f"{model.config.name} {lack}; give an AMOR model")
    other = with_routers(model, options | threshold_options(model, rate), decide)
    samples = collect(other, model, text, every, on_tokens)
    fits = []
    for index, (gate, sample) in enumerate(zip(own_gates(other), samples, strict=True)):
        if sample is not None and isinstance(gate, Router):
            fits.append(fit_network(gate, sample.x, sample.value, seed + index))
            set_statistics(gate, own_gates(model)[index], sample.x)
    return other, fits


def threshold_options(model: Amor, rate: float | None) -> dict[str, Any]:
    """Options of a router that set where it fires: a rate, or the kappa of the gate it replaces."""
    if rate is not None:
        return {"rate": rate}
    native = own_gates(model)[0]
    options: Any = native.options
    names = [name for name in ("rate", "kappa") if hasattr(options, name)]
    if not isinstance(native, Adaptive) or not names:
        lack = f"gate {native.kind!r} has no trained threshold to take over"
        raise AmorError(f"{lack}; give --fire-rate, e.g. 0.22")
    rate = getattr(options, "rate", None)
    return {"kappa": options.kappa} if rate is None else {"rate": rate}


@torch.no_grad()
def set_statistics(gate: Router, native: Gate, x: Tensor) -> None:
    """Quantiles of the router's own scores; median and std of the gate it replaces, where it
    predicts that gate's score."""
    gate.observe(gate.predict(x))
    options: Any = gate.options
    if options.rate is None and options.target == "entropy" and isinstance(native, Adaptive):
        gate.mu.copy_(native.mu)
        gate.sigma.copy_(native.sigma)


def fit_network(gate: Router, x: Tensor, value: Tensor, seed: int) -> NetworkFit:
    """Fit the network of one router to x [n, D] -> value [n]."""
    cut = len(x) - max(1, round(HELD_BACK * len(x)))
    if cut < 2:
        lack = f"{len(x)} tokens are too few to fit a router"
        raise AmorError(f"{lack}; give more --tokens or a longer text")
    mean, std = value.mean(), value.std().clamp(min=1e-8)
    y = (value - mean) / std  # so that one learning rate serves entropies and gains
    train, rest = (x[:cut], y[:cut]), (x[cut:], y[cut:])
    skip, bias = ridge(train, rest)
    network = [torch.zeros_like(t) for t in gate.network()]
    network[0].copy_(gate.fc1_weight)  # as a fresh router draws it
    network[3], network[4] = bias[None].float(), skip[None].float()
    error = linear_error = _error(network, rest)
    epoch = 0
    if len(network[0]):  # there is a hidden layer
        error, epoch = descend(network, train, rest, linear_error, seed)
    with torch.no_grad():
        network[2] *= std
        network[3] = network[3] * std + mean
        network[4] *= std
        for t, fitted in zip(gate.network(), network, strict=True):
            t.copy_(fitted)
        gate.measured.fill_(max(len(x), gate.options.explore))
    variance = float(rest[1].var())
    return NetworkFit(
        tokens=len(x),
        explained=1 - error / variance,
        explained_linear=1 - linear_error / variance,
        epochs=epoch,
    )


Pairs = tuple[Tensor, Tensor]  # x [n, D] and y [n]


def ridge(train: Pairs, rest: Pairs) -> Pairs:
    """Weights [D] and bias of the linear map with the smallest error on held-back tokens."""
    x, y = train[0].double(), train[1].double()
    center, level = x.mean(0), y.mean()
    C, c = (x - center).T @ (x - center) / len(x), (x - center).T @ (y - level) / len(x)
    scale, eye = C.diagonal().mean(), torch.eye(len(c), dtype=C.dtype)

    def error(weights: Tensor) -> float:
        return float(((rest[0].double() - center) @ weights + level - rest[1]).square().mean())

    solutions = [torch.linalg.solve(C + strength * scale * eye, c) for strength in RIDGES]
    best = min(solutions, key=error)
    return best, level - best @ center


def descend(
    network: list[Tensor], train: Pairs, rest: Pairs, error: float, seed: int
) -> tuple[float, int]:
    """Train a network in place by AdamW; its smallest held-back error, and of which epoch."""
    best, kept, epoch_of = error, [t.clone() for t in network], 0
    for t in network:
        t.requires_grad_()
    optimizer = torch.optim.AdamW(network, lr=LR, weight_decay=DECAY)
    generator = torch.Generator().manual_seed(seed)
    steps = math.ceil(len(train[0]) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * steps)
    for epoch in range(1, EPOCHS + 1):
        for rows in torch.randperm(len(train[0]), generator=generator).split(BATCH):
            with torch.enable_grad():
                loss = (network_output(train[0][rows], *network) - train[1][rows]).square().mean()
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            schedule.step()
        now = _error(network, rest)
        if now < best:
            best, kept, epoch_of = now, [t.detach().clone() for t in network], epoch
    for index, t in enumerate(kept):
        network[index] = t.detach()
    return best, epoch_of


@torch.no_grad()
def _error(network: Sequence[Tensor], rest: Pairs) -> float:
    return float((network_output(rest[0], *network) - rest[1]).double().square().mean())


@torch.no_grad()
def compare_decisions(model: Amor, other: Amor, windows: Windows) -> list[Decisions]:
    """Per block: how often a router decides as the model's own gate does, and its predictions
    against the measured values.

    The model's own gates decide, so that both are given the same vectors.
    """
    routers = own_gates(other)
    target = next(gate.measures for gate in routers if isinstance(gate, Router))
    recording = [RecordingGate(gate, "x", target) for gate in own_gates(model)]
    fire = join_chunks(run_windows(model, windows, gates=recording)).fire
    once = sum(isinstance(gate, Router) for gate in routers) < len(routers)
    results = []
    for index, (gate, native) in enumerate(zip(routers, recording, strict=True)):
        if not isinstance(gate, Router):
            continue
        predicted = torch.cat([gate.predict(x) for x in native.recorded["x"]]).cpu()
        chosen, value = predicted > gate.threshold, native.values(target, 0).cpu()
        found = Decisions(
            agreement=float((chosen == fire[index]).float().mean()),
            native_rate=float(fire[index].float().mean()),
            router_rate=float(chosen.float().mean()),
            calibration=() if once and target == "gain" else calibration(predicted, value),
        )
        results.append(found)
    return results


def calibration(predicted: Tensor, value: Tensor) -> tuple[CalibrationBin, ...]:
    """Bins of equally many tokens by prediction: mean prediction, and mean measured value."""
    order = predicted.flatten().argsort()
    bins = (t.flatten()[order].double().chunk(BINS) for t in (predicted, value))
    return tuple(
        CalibrationBin(predicted=float(p.mean()), measured=float(v.mean()))
        for p, v in zip(*bins, strict=True)
    )


@torch.no_grad()
def calibrate_gates(model: Amor, text: Windows) -> Amor:
    """A copy of the model whose gates have the quantiles of a text, and the same thresholds."""
    other = copy.deepcopy(model)
    scores = join_chunks(run_windows(model, text)).score
    for gate, score in zip(own_gates(other), scores, strict=True):
        if isinstance(gate, Adaptive):
            mu, sigma, fresh = gate.mu.clone(), gate.sigma.clone(), int(gate.updates) == 0
            gate.quantiles.zero_()
            gate.observe(score)
            if not fresh:
                gate.mu.copy_(mu)
                gate.sigma.copy_(sigma)
    return other
