"""The whole model written out from the paper: one sequence, one token at a time, in
float64, every sum in the open.

    Embed -> [ h + mixer(norm h), h + mlp(norm h) ] x N -> norm_f
          -> [ AMOR block ] x K -> final norm -> head

Nothing here is taken from the package: weights are read by their names, shapes say the
rest. It knows no batch, no pad, no chunk and no kernel, so it is slow, and what it says is
what every fast way has to say.

Letters: D width, V vocabulary, T tokens, K blocks, H heads of size d; x [D] what a part
reads of one token; w its weights by name. A part with a memory is an object: call it
with one token after the other.
"""

import math

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def weights_of(model, learn: bool = False) -> Weights:
    """Copies of a model's weights and gate statistics in float64; `learn`: with gradients."""
    parameters = {name for name, _ in model.named_parameters()}
    return {
        n: t.detach().double().requires_grad_(learn and n in parameters)
        for n, t in model.state_dict().items()
    }


def written_out(config, weights: Weights, tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, V], scores [K, T] and fires [K, T] of one sequence."""
    layers = [
        Layer(config, kind, below(weights, f"backbone.layers.{i}"))
        for i, kind in enumerate(config.pattern)
    ]
    blocks: list[Block] = []
    for k in range(config.blocks.count):
        blocks.append(
            Block(config, weights, k, blocks[0] if k and config.blocks.decide == "once" else None)
        )
    said = []
    for token in tokens:
        h = weights["embed.weight"][token]
        for layer in layers:
            h = layer(h)
        if (
            config.blocks.first == "plain" or not blocks
        ):  # else block 0 norms what it reads, and h stays as it is
            h = norm(h, weights["norm_f.weight"], config.norm_eps)
        for block in blocks:
            h = block(h)
        if blocks and config.blocks.final == "norm":
            h = norm(h, weights["final_norm.weight"], config.norm_eps)
        said.append(head_of(weights) @ h)
    scores = torch.tensor([block.scores for block in blocks], dtype=torch.float64)
    fires = torch.tensor([block.fires for block in blocks], dtype=torch.bool)
    return (
        torch.stack(said),
        scores.view(len(blocks), len(tokens)),
        fires.view(len(blocks), len(tokens)),
    )


def head_of(weights: Weights) -> Tensor:
    """[V, D] the head's own weights, or those of the embedding that it is tied to."""
    return weights.get("head.weight", weights["embed.weight"])


class Block:
    """Attention behind a gate: every token leaves its key and value, only
    tokens the head is unsure of ask."""

    def __init__(self, config, weights: Weights, index: int, leader: "Block | None"):
        """leader: the block whose gate decides for this one too."""
        self.config, self.head, self.w = config, head_of(weights), below(weights, f"blocks.{index}")
        self.final_norm, self.leader = weights.get("final_norm.weight"), leader
        self.norm = self.w.get("norm.weight")  # of blocks 1 .. K-1
        if index == 0 and config.blocks.first == "prenorm":
            self.norm = weights["norm_f.weight"]
        self.attention = Attention(
            below(self.w, "attention"), config.blocks.head_size, config.blocks.rope_theta
        )
        self.scores: list[float] = []
        self.fires: list[bool] = []

    def __call__(self, h: Tensor) -> Tensor:
        x = h if self.norm is None else norm(h, self.norm, self.config.norm_eps)
        self.attention.remember(x)
        if not self.fire(h, x):
            return h
        h = h + sigmoid(self.w["alpha"]) * self.attention.ask(x)
        if self.config.blocks.mlp:  # the ablation's, which alpha does not scale
            h = h + mlp(
                norm(h, self.w["mlp_norm.weight"], self.config.norm_eps), below(self.w, "mlp")
            )
        return h

    def fire(self, h: Tensor, x: Tensor) -> bool:
        """As another block decided, or by this one's gate."""
        if self.leader is not None:
            score, fires = self.leader.scores[-1], self.leader.fires[-1]
        else:
            score, threshold = self.gate(h, x)
            fires = score > threshold
        self.scores.append(score)
        self.fires.append(fires)
        return fires

    def gate(self, h: Tensor, x: Tensor) -> tuple[float, float]:
        """Entropy: how unsure the head is, asked about x or about what it would say of h, against
        mu + kappa sigma. Gain: what firing is predicted to save, against the quantile of
        predictions that a share of them exceeds. Router: a hidden layer and a linear skip, against
        mu + kappa sigma. Without a gate, always."""
        options = self.config.blocks.gate_options
        if self.config.blocks.gate == "entropy":
            said = h if self.final_norm is None else norm(h, self.final_norm, self.config.norm_eps)
            asked = said if self.config.blocks.probe == "final" else x
            score = entropy(self.head @ asked) / math.log(len(self.head))
            return score, float(
                self.w["gate.mu"] + options.get("kappa", 0.2) * self.w["gate.sigma"]
            )
        if self.config.blocks.gate == "gain":
            place = (1 - options.get("rate", 0.22)) * 256  # among 257 quantiles, 0 to 1
            low, high = (
                self.w["gate.quantiles"][int(place)],
                self.w["gate.quantiles"][int(place) + 1],
            )
            return float(self.w["gate.weight"] @ x + self.w["gate.bias"]), float(
                low + (place - int(place)) * (high - low)
            )
        if self.config.blocks.gate == "router":
            w = {
                name: self.w[f"gate.{name}"]
                for name in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias", "skip_weight")
            }
            hidden = silu(w["fc1_weight"] @ x + w["fc1_bias"])
            score = float(w["fc2_weight"][0] @ hidden + w["skip_weight"][0] @ x + w["fc2_bias"][0])
            return score, float(
                self.w["gate.mu"] + options.get("kappa", 0.2) * self.w["gate.sigma"]
            )
        return 1.0, 0.0


def entropy(logits: Tensor) -> float:
    """-sum p log p in nats."""
    weight = (logits.detach() - logits.detach().max()).exp()
    p = weight / weight.sum()
    return float(-(p * p.log()).sum())


class Layer:
    """One layer of the backbone: a mixer and an MLP, with a norm before either."""

    def __init__(self, config, kind: str, w: Weights):
        options = {"head_size": 64, "rope_theta": 10_000.0, **config.mixers.get(kind, {})}
        self.w, self.eps = w, config.norm_eps
        self.mixer = MIXERS[kind](
            below(w, "mixer"), options["head_size"], options["rope_theta"], config.norm_eps
        )

    def __call__(self, h: Tensor) -> Tensor:
        h = h + self.mixer(norm(h, self.w["mixer_norm.weight"], self.eps))
        return h + mlp(norm(h, self.w["mlp_norm.weight"], self.eps), below(self.w, "mlp"))


class Attention:
    """Causal attention with rotary positions: a list of the keys and values of all
    tokens so far, [H, d] each."""

    def __init__(self, w: Weights, size: int, theta: float, eps: float = 0.0):
        self.w, self.size, self.theta = w, size, theta
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.remember(x)
        return self.ask(x)

    def remember(self, x: Tensor) -> None:
        k, v = (heads(self.w[f"{name}_proj.weight"] @ x, self.size) for name in "kv")
        self.keys.append(turn(k, len(self.keys), self.theta))
        self.values.append(v)

    def ask(self, x: Tensor) -> Tensor:
        """What the newest token finds, a head: sum_j softmax_j(q . k_j / sqrt d) v_j; then W_O."""
        q = turn(heads(self.w["q_proj.weight"] @ x, self.size), len(self.keys) - 1, self.theta)
        likeness = (q * torch.stack(self.keys)).sum(-1) / math.sqrt(self.size)  # [tokens so far, H]
        weight = (likeness - likeness.max()).exp()
        p = weight / weight.sum(0)
        found = (p[:, :, None] * torch.stack(self.values)).sum(0)
        return self.w["o_proj.weight"] @ found.flatten()


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of [H, d]: each pair (x_i, x_{i + d/2}) is turned by
    position * theta^(-2i/d) radians."""
    size = x.shape[1]
    angle = torch.tensor(
        [position * theta ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64
    )
    a, b = x[:, : size // 2], x[:, size // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=1)


class Mamba2:
    """Per head s <- exp(-exp(A_log) dt) s + dt u B^T,  y = s C + D u; then y silu(z) is normed
    and projected.

    dt = softplus(of the token + dt_bias). B and C are shared by all heads (one group).
    """

    def __init__(self, w: Weights, size: int, theta: float, eps: float):
        self.w, self.size, self.eps = w, size, eps
        self.heads, self.inner = len(w["A_log"]), w["out_proj.weight"].shape[1]
        self.convolution = Convolution(below(w, "conv1d"))
        self.channels = self.convolution.channels  # of u, B and C together
        self.states = (self.channels - self.inner) // 2
        self.s = torch.zeros(self.heads, size, self.states, dtype=torch.float64)

    def __call__(self, x: Tensor) -> Tensor:
        w = self.w
        z, uBC, dt = (w["in_proj.weight"] @ x).split([self.inner, self.channels, self.heads])
        u, B, C = self.convolution(uBC).split([self.inner, self.states, self.states])
        u, dt = heads(u, self.size), softplus(dt + w["dt_bias"])
        keeps = (-w["A_log"].exp() * dt).exp()
        self.s = keeps[:, None, None] * self.s + (dt[:, None] * u)[:, :, None] * B
        y = self.s @ C + w["D"][:, None] * u
        return w["out_proj.weight"] @ norm(y.flatten() * silu(z), w["norm.weight"], self.eps)


class GatedDeltaNet:
    """Per head s <- decay s;  s <- s + k (beta (v - s^T k))^T;  o = s^T q / sqrt d; then
    norm(o) silu(g) is projected.

    q and k have length 1; decay = exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b).
    """

    def __init__(self, w: Weights, size: int, theta: float, eps: float):
        self.w, self.size, self.eps = w, size, eps
        self.keys, self.values = len(w["q_proj.weight"]), len(w["v_proj.weight"])
        self.value_size = len(w["o_norm.weight"])
        self.convolution = Convolution(below(w, "conv1d"))
        self.s = torch.zeros(len(w["A_log"]), size, self.value_size, dtype=torch.float64)

    def __call__(self, x: Tensor) -> Tensor:
        w = self.w
        qkv = torch.cat([w[f"{name}_proj.weight"] @ x for name in "qkv"])
        q, k, v = self.convolution(qkv).split([self.keys, self.keys, self.values])
        q, k, v = unit(heads(q, self.size)), unit(heads(k, self.size)), heads(v, self.value_size)
        g, a, b = (w[f"{name}_proj.weight"] @ x for name in "gab")
        decay, beta = (-w["A_log"].exp() * softplus(a + w["dt_bias"])).exp(), sigmoid(b)
        s = decay[:, None, None] * self.s
        held = (k[:, :, None] * s).sum(1)  # s^T k
        self.s = s + k[:, :, None] * (beta[:, None] * (v - held))[:, None, :]
        o = (q[:, :, None] * self.s).sum(1) / math.sqrt(self.size)
        o = norm(o, w["o_norm.weight"], self.eps) * silu(heads(g, self.value_size))
        return w["o_proj.weight"] @ o.flatten()


class Fused:
    """The average of a whole Mamba2 and a narrow attention, each normed and scaled a channel."""

    def __init__(self, w: Weights, size: int, theta: float, eps: float):
        self.w, self.eps = w, eps
        self.branches = {
            "mamba2": Mamba2(below(w, "mamba2"), size, theta, eps),
            "attention": Attention(below(w, "attention"), size, theta),
        }

    def __call__(self, x: Tensor) -> Tensor:
        w = self.w
        said = [
            norm(b(x), w[f"{name}_norm.weight"], self.eps) * w[f"{name}_scale"]
            for name, b in self.branches.items()
        ]
        return (said[0] + said[1]) / 2


MIXERS = {"attention": Attention, "mamba2": Mamba2, "gated_deltanet": GatedDeltaNet, "fused": Fused}


class Convolution:
    """Each channel by itself: silu(bias + sum over the last few tokens of tap *
    input), 0 before the first token."""

    def __init__(self, w: Weights):
        self.taps, self.bias = w["weight"][:, 0], w.get("bias", torch.zeros(()))
        self.channels, reach = self.taps.shape
        self.window = [torch.zeros(self.channels, dtype=torch.float64)] * reach  # the oldest first

    def __call__(self, x: Tensor) -> Tensor:
        self.window = [*self.window[1:], x]
        return silu(
            self.bias + sum(self.taps[:, tap] * seen for tap, seen in enumerate(self.window))
        )


def mlp(x: Tensor, w: Weights) -> Tensor:
    """SwiGLU."""
    return w["down_proj.weight"] @ (silu(w["gate_proj.weight"] @ x) * (w["up_proj.weight"] @ x))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the last dimension."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def unit(x: Tensor) -> Tensor:
    """x made 1 long; 1e-6 under the root, as in fla and transformers."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def heads(x: Tensor, size: int) -> Tensor:
    """[D] -> [H, d]"""
    return x.view(-1, size)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    return (1 + x.exp()).log()


def below(w: Weights, name: str) -> Weights:
    """The weights of one part, by their names inside it."""
    return {key.removeprefix(f"{name}."): t for key, t in w.items() if key.startswith(f"{name}.")}
