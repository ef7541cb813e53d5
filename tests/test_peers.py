"""Our layers against transformers' own with the same weights: outputs, states and
gradients, whole and in pieces.

The weights are ours; `to_peer` names them and lays them out as the peer
does, and our gradients after them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from laws import SMALL, close, tokens
from torch import Tensor, nn
from transformers import (
    Cache,
    DynamicCache,
    KimiLinearConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    PreTrainedConfig,
    Qwen3NextConfig,
)
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import amor
from amor.kv import KV
from amor.layout import Layout
from amor.mixers.attention import Attention, AttentionOptions
from amor.mixers.base import Mixer
from amor.mixers.gated_deltanet import GatedDeltaNet, GatedDeltaNetOptions
from amor.mixers.kda import KDA, KDAOptions
from amor.mixers.mamba2 import Mamba2, Mamba2Options
from amor.ops.head import IGNORE
from amor.parts import RMSNorm, SwiGLU

WIDTH, ROWS = 64, 2
EPS = 1e-3  # far from every default and large, so that forgetting it shows
LENGTHS = (1, 2, 63, 64, 65, 100)
CUTS = {
    "token by token": list(range(41)),
    "a prompt, then tokens": [0, 65, 66, 67, 68],
    "chunks": [0, 1, 3, 66, 67, 100],
    "chunks of 64": [0, 64, 128, 130],
}
Named = dict[str, Tensor]
lengths = pytest.mark.parametrize("length", LENGTHS)
cuttings = pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)


@dataclass(frozen=True)
class Pair:
    """One of our mixers and the layer of transformers it must equal."""

    ours: Mixer
    theirs: nn.Module
    config: PreTrainedConfig
    read: Callable[[Tensor, Cache | None, int], Tensor]  # the peer reads x after `past` tokens
    states: Callable[[Cache], Named]  # what the peer remembers, named and laid out as ours
    to_peer: Callable[[Named], Named] = dict

    def __post_init__(self):
        stirred(self.ours)
        self.theirs.load_state_dict(self.to_peer(self.ours.state_dict()))
        self.theirs.eval()


def stirred(module):
    """Weights large enough to matter everywhere; decays from three tokens to a hundred.

    Not faster: both sides add up log decays over a chunk in float32, and a large sum has
    few digits left for one token.
    """
    generator = torch.Generator().manual_seed(0)
    for name, p in module.named_parameters():
        fresh = torch.randn(p.shape, generator=generator)
        if name.endswith("A_log"):
            fresh = fresh.sigmoid() * 2 - 2
        elif name.endswith("dt_bias"):
            fresh = fresh.sigmoid() * 3 - 3
        elif "norm" in name:
            fresh = 1 + fresh / 4
        else:
            fresh = fresh * p.shape[1] ** -0.5 if p.ndim == 2 else fresh / 2
        p.data = fresh
    return module


def recurrent_states(name, taps):
    # a peer's window holds one input more than the next token needs, and time last
    return lambda held: {
        "conv": held.get_conv_state(0)[..., 1 - taps :].mT,
        name: held.get_recurrent_state(0),
    }


def mamba2(**options):
    chosen = Mamba2Options(**{"head_size": 16, "state_size": 24} | options)
    config = Mamba2Config(
        hidden_size=WIDTH,
        num_heads=chosen.expand * WIDTH // chosen.head_size,
        head_dim=chosen.head_size,
        state_size=chosen.state_size,
        expand=chosen.expand,
        n_groups=chosen.groups,
        conv_kernel=chosen.conv,
        chunk_size=24,
        num_hidden_layers=1,
        layer_norm_epsilon=EPS,
    )
    theirs, states = Mamba2Mixer(config, layer_idx=0), recurrent_states("scan", chosen.conv)
    return Pair(
        Mamba2(WIDTH, chosen, EPS),
        theirs,
        config,
        lambda x, held, past: theirs(x, cache_params=held),
        states,
    )


def gated_deltanet(**options):
    chosen = GatedDeltaNetOptions(**{"head_size": 16} | options)
    heads = chosen.count(WIDTH)
    config = Qwen3NextConfig(
        hidden_size=WIDTH,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=chosen.head_size,
        linear_value_head_dim=chosen.head_size * chosen.expand_v,
        linear_conv_kernel_dim=chosen.conv,
        num_hidden_layers=1,
        rms_norm_eps=EPS,
    )

    def by_head(weights):
        """One matrix that gives, head after head, that head's part of every weight."""
        return torch.cat([w.unflatten(0, (heads, -1)) for w in weights], 1).flatten(0, 1)

    def to_peer(ours):
        return {name: ours[name] for name in ("A_log", "dt_bias", "conv1d.weight")} | {
            "in_proj_qkvz.weight": by_head([ours[f"{name}_proj.weight"] for name in "qkvg"]),
            "in_proj_ba.weight": by_head([ours[f"{name}_proj.weight"] for name in "ba"]),
            "norm.weight": ours["o_norm.weight"],
            "out_proj.weight": ours["o_proj.weight"],
        }

    ours, theirs = GatedDeltaNet(WIDTH, chosen, EPS), Qwen3NextGatedDeltaNet(config, layer_idx=0)
    states = recurrent_states("delta", chosen.conv)
    return Pair(
        ours, theirs, config, lambda x, held, past: theirs(x, cache_params=held), states, to_peer
    )


def kda(**options):
    chosen = KDAOptions(**{"head_size": 16} | options)
    config = KimiLinearConfig(
        hidden_size=WIDTH,
        linear_num_heads=chosen.count(WIDTH),
        linear_head_dim=chosen.head_size,
        linear_conv_kernel_dim=chosen.conv,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        rms_norm_eps=EPS,
    )

    def to_peer(ours):
        forgets = ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight")
        renamed = {
            f"forget_gate.{name}" if name in forgets else name: value
            for name, value in ours.items()
        }
        return renamed | {"forget_gate.A_log": ours["A_log"].view(1, 1, -1, 1)}

    ours, theirs = KDA(WIDTH, chosen, EPS), KimiLinearDeltaAttention(config, layer_idx=0)
    states = recurrent_states("delta", chosen.conv)
    return Pair(
        ours, theirs, config, lambda x, held, past: theirs(x, cache_params=held), states, to_peer
    )


def test_kda_begins_with_the_decays_of_its_peer():
    ours = KDA(WIDTH, KDAOptions(head_size=16, heads=200), EPS)
    ours.reset_parameters(torch.Generator().manual_seed(0))
    strengths, steps = ours.A_log.exp(), F.softplus(ours.dt_bias)
    assert 1 <= strengths.min() < 1.5 and 15.5 < strengths.max() <= 16, "uniform from 1 to 16"
    assert 0.9e-3 < steps.min() < 1.1e-3 and 0.09 < steps.max() < 0.101, "from 0.001 to 0.1"
    close(
        steps.log().mean(),
        torch.tensor(0.01).log(),
        "even on a logarithmic scale",
        dtype=torch.bfloat16,
    )


def llama_config(theta=10_000.0, heads=4, layers=1):
    return LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=SMALL["d_ff"],
        vocab_size=SMALL["vocab"],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=16,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=True,
        attn_implementation="eager",  # softmax written out, not the kernel we call ourselves
    )


def attention(**options):
    chosen = AttentionOptions(**{"head_size": 16} | options)
    config = llama_config(chosen.rope_theta, (chosen.width or WIDTH) // chosen.head_size)
    theirs, rotary = LlamaAttention(config, layer_idx=0), LlamaRotaryEmbedding(config)

    def read(x, held, past):
        positions = torch.arange(past, past + x.shape[1])
        unseen = torch.arange(past + x.shape[1]) > positions[:, None]
        mask = torch.zeros(unseen.shape).masked_fill(unseen, -torch.inf)[None, None]
        angles = rotary(x, positions.expand(len(x), -1))
        return theirs(x, position_embeddings=angles, attention_mask=mask, past_key_values=held)[0]

    ours = Attention(WIDTH, chosen, EPS)
    return Pair(
        ours,
        theirs,
        config,
        read,
        lambda held: {"k": held.layers[0].keys, "v": held.layers[0].values},
    )


BUILDERS = {
    "mamba2": mamba2,
    "mamba2, two groups, three taps": lambda: mamba2(groups=2, conv=3),
    "mamba2, not expanded": lambda: mamba2(expand=1),
    "gated_deltanet": gated_deltanet,
    "gated_deltanet, values as keys, two taps": lambda: gated_deltanet(heads=5, expand_v=1, conv=2),
    "kda": kda,
    "kda, five heads, two taps": lambda: kda(heads=5, conv=2),
    "attention": attention,
    "attention, narrow, fast turning": lambda: attention(width=32, rope_theta=50.0),
}


@cache
def built(name):
    return BUILDERS[name]()


@pytest.fixture(params=BUILDERS)
def pair(request):
    return built(request.param)


def inputs(length):
    return torch.randn(ROWS, length, WIDTH, generator=torch.Generator().manual_seed(0))


def in_pieces(mixer, x, cuts):
    """What our mixer says of x read in pieces, and what it remembers after the last."""
    state, said = mixer.start(len(x), x.device, x.dtype), []
    for a, b in pairwise(cuts):
        y, state = mixer(
            x[:, a:b],
            state,
            Layout(torch.full((len(x),), a), columns=b - a, rows_aligned=True, max_position=a),
        )
        said.append(y)
    held = {}
    for name, value in state.items():
        held |= {"k": value.k, "v": value.v} if isinstance(value, KV) else {name: value}
    return torch.cat(said, 1), held


def peer_in_pieces(pair, x, cuts):
    held = DynamicCache(config=pair.config)
    said = [pair.read(x[:, a:b], held, a) for a, b in pairwise(cuts)]
    return torch.cat(said, 1), pair.states(held)


def same_names(ours, theirs, what=""):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        close(value, theirs[name].to(value.dtype), f"{what} {name}".strip())


def learned(parameters, x, read):
    """What `read` says of x, and of a random weighting of it the gradients
    of x and of every parameter."""
    named, x = dict(parameters), x.clone().requires_grad_()
    y = read(x)
    weighted = (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(7))).sum()
    gradients = derived(weighted, {"the input": x, **named})
    return {"output": y, "gradient of the input": gradients.pop("the input")}, gradients


def derived(loss, named):
    return dict(zip(named, torch.autograd.grad(loss, named.values()), strict=True))


def same_learning(pair, x, cuts):
    """Through our pieces and the states between them, and through the peer's whole sequence."""
    found, ours = learned(
        pair.ours.named_parameters(), x, lambda x: in_pieces(pair.ours, x, cuts)[0]
    )
    wanted, theirs = learned(pair.theirs.named_parameters(), x, lambda x: pair.read(x, None, 0))
    same_names(found, wanted)
    same_names(pair.to_peer(ours), theirs, "gradient of")


@torch.no_grad()
def same_words(pair, x, cuts):
    (y, held), (wanted, remembered) = in_pieces(pair.ours, x, cuts), peer_in_pieces(pair, x, cuts)
    close(y, wanted, "output")
    same_names(held, remembered, "state")


@lengths
def test_a_mixer_says_and_remembers_what_its_peer_does(pair, length):
    same_words(pair, inputs(length), [0, length])


@cuttings
def test_a_mixer_reads_on_as_its_peer_does(pair, cuts):
    same_words(pair, inputs(cuts[-1]), cuts)


@lengths
def test_a_mixer_has_the_gradients_of_its_peer(pair, length):
    same_learning(pair, inputs(length), [0, length])


@cuttings
def test_gradients_flow_through_states_as_through_a_whole_sequence_of_the_peer(pair, cuts):
    same_learning(pair, inputs(cuts[-1]), cuts)


# a token's log decay before -exp(A_log), a head or a channel after the other, and its output gate
WRITTEN = {
    "gated_deltanet": (
        lambda p, token: F.softplus(p["a_proj.weight"] @ token + p["dt_bias"]),
        lambda p, token: F.silu(p["g_proj.weight"] @ token),
    ),
    "kda": (
        lambda p, token: F.softplus(
            p["f_b_proj.weight"] @ (p["f_a_proj.weight"] @ token) + p["dt_bias"]
        ),
        lambda p, token: torch.sigmoid(p["g_b_proj.weight"] @ (p["g_a_proj.weight"] @ token)),
    ),
}


def by_hand(p, x, size, steps, gate):
    """A Gated DeltaNet or KDA with keys of `size`, token after token and
    head after head, S [values, keys].

    S <- S diag(a) (I - b k k^T) + b v k^T          o = S q          as the papers write it
    (arXiv 2412.06464, 2510.26692)
    """
    heads, taps = len(p["A_log"]), p["conv1d.weight"][:, 0]
    qkv = torch.cat([p[f"{name}_proj.weight"] for name in "qkv"])
    keys, values = heads * size, len(p["v_proj.weight"])
    padded = F.pad(x, (0, 0, taps.shape[1] - 1, 0))
    said = []
    for row in range(len(x)):
        S = torch.zeros(heads, values // heads, size, dtype=x.dtype)
        for t, token in enumerate(x[row]):
            seen = padded[row, t : t + taps.shape[1]]
            parts = F.silu((seen @ qkv.T * taps.T).sum(0)).split([keys, keys, values])
            decays, gates = steps(p, token).chunk(heads), gate(p, token).chunk(heads)
            after, out = [], []
            for h, (q, k, v) in enumerate(zip(*(part.chunk(heads) for part in parts), strict=True)):
                q, k = (u / (u.dot(u) + 1e-6).sqrt() for u in (q, k))
                a = torch.exp(-p["A_log"][h].exp() * decays[h])
                b = torch.sigmoid(p["b_proj.weight"][h].dot(token))
                after.append(S[h] * a @ (torch.eye(size) - b * k.outer(k)) + b * v.outer(k))
                o = after[-1] @ q / size**0.5
                normed = o / (o.square().mean() + EPS).sqrt() * p["o_norm.weight"]
                out.append(normed * gates[h])
            S = torch.stack(after)
            said.append(p["o_proj.weight"] @ torch.cat(out))
    return torch.stack(said).view(x.shape)


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("length", [1, 2, 65])
def test_a_delta_rule_is_the_recurrence_written_out(kind, length):
    mixer, x = built(kind).ours, inputs(length)
    exact = {name: p.detach().double().requires_grad_() for name, p in mixer.named_parameters()}
    wanted, theirs = learned(exact, x.double(), lambda x: by_hand(exact, x, 16, *WRITTEN[kind]))
    for cuts in ([0, length], list(range(length + 1))):
        found, ours = learned(
            mixer.named_parameters(), x, lambda x, cuts=cuts: in_pieces(mixer, x, cuts)[0]
        )
        same_names(found, wanted)
        same_names(ours, theirs, "gradient of")


def test_kda_with_wide_values_is_the_recurrence_written_out():
    mixer, x = stirred(KDA(WIDTH, KDAOptions(head_size=16, heads=3, expand_v=2), EPS)), inputs(33)
    exact = {name: p.detach().double() for name, p in mixer.named_parameters()}
    with torch.no_grad():
        close(
            in_pieces(mixer, x, [0, 20, 33])[0].double(),
            by_hand(exact, x.double(), 16, *WRITTEN["kda"]),
            dtype=torch.float32,
        )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SwiGLU(WIDTH, SMALL["d_ff"]), LlamaMLP(llama_config())),
        (RMSNorm(WIDTH, EPS), LlamaRMSNorm(WIDTH, EPS)),
    ],
    ids=["SwiGLU", "RMSNorm"],
)
def test_a_part_equals_its_peer(ours, theirs):
    theirs.load_state_dict(stirred(ours).state_dict())
    x = (
        inputs(9) * torch.logspace(-3, 0, 9)[:, None]
    )  # small tokens too: there the eps of a norm speaks
    for found, wanted in zip(
        *(learned(m.named_parameters(), x, m) for m in (ours, theirs)), strict=True
    ):
        same_names(found, wanted)


RENAMED = (
    ("embed.", "model.embed_tokens."),
    ("backbone.layers.", "model.layers."),
    (".mixer_norm.", ".input_layernorm."),
    (".mixer.", ".self_attn."),
    (".mlp_norm.", ".post_attention_layernorm."),
    ("norm_f.", "model.norm."),
)


def to_llama(ours):
    renamed = {}
    for name, value in ours.items():
        for mine, theirs in RENAMED:
            name = name.replace(mine, theirs)
        renamed[name] = value
    return renamed


@cache
def transformers_of_both_houses():
    ours = stirred(amor.build(amor.preset("transformer", "tiny", **SMALL, norm_eps=EPS))).eval()
    theirs = LlamaForCausalLM(llama_config(layers=len(ours.backbone.layers))).eval()
    weights = to_llama(ours.state_dict())
    theirs.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    return ours, theirs


@lengths
@torch.no_grad()
def test_the_transformer_equals_llama(length):
    ours, theirs = transformers_of_both_houses()
    text = tokens(ROWS, length)
    close(ours.logits(ours(text).hidden), theirs(text).logits, "logits")


@pytest.mark.parametrize("length", LENGTHS[1:])
def test_the_transformer_has_the_loss_and_gradients_of_llama(length):
    ours, theirs = transformers_of_both_houses()
    text = tokens(ROWS, length)
    loss = ours(text, targets=F.pad(text[:, 1:], (0, 1), value=IGNORE), target_weight=1.0).loss
    wanted = (
        theirs(text, labels=text).loss * text[:, 1:].numel()
    )  # sums, whose gradients are not lost below the tolerance
    close(loss, wanted, "loss")
    found, peers = (
        derived(loss, dict(ours.named_parameters())),
        derived(wanted, dict(theirs.named_parameters())),
    )
    same_names(to_llama(found), peers, "gradient of")


@cuttings
@torch.no_grad()
def test_the_transformer_reads_on_as_llama_does(cuts):
    ours, theirs = transformers_of_both_houses()
    text = tokens(ROWS, cuts[-1])
    state, held = None, DynamicCache(config=theirs.config)
    for a, b in pairwise(cuts):
        output = ours(text[:, a:b], state)
        state = output.state
        close(
            ours.logits(output.hidden),
            theirs(text[:, a:b], past_key_values=held).logits,
            f"logits of {a}..{b}",
        )


@torch.no_grad()
def test_the_transformer_reads_left_padded_rows_as_llama_does():
    ours, theirs = transformers_of_both_houses()
    text, valid = tokens(3, 20), torch.arange(20) >= torch.tensor([[0], [7], [19]])
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    wanted = theirs(text, attention_mask=valid.long(), position_ids=positions).logits
    close(ours.logits(ours(text, valid=valid).hidden)[valid], wanted[valid], "logits")
