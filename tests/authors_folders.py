"""Small folders in the layout of the authors' released code, with random uneven weights, written
from the facts of the layout."""

import hashlib
import json

import torch
from safetensors.torch import save_file

WIDTH, D_FF, LAYERS, VOCAB, HEAD, STATES, HEADS = 64, 96, 2, 300, 16, 24, 4
KWARGS = {
    "d_model": WIDTH,
    "n_layer": LAYERS,
    "d_ff": D_FF,
    "n_heads": HEADS,
    "head_dim": HEAD,
    "d_state": STATES,
}
KWARGS |= {
    "vocab_size": VOCAB,
    "max_seq_len": 4096,
    "attention_mode": "full_with_mask",
    "n_groups": 1,
    "expand": 2,
}


def model_kwargs(backbone="mamba2", blocks=3, mode="classic", **more):
    return KWARGS | {"backbone": backbone, "n_amor_blocks": blocks, "residual_mode": mode} | more


def shapes_of(kwargs):
    """Tensor names and shapes of a released folder without its copy of the head."""
    shapes = {
        "embed.weight": (VOCAB, WIDTH),
        "norm_f.weight": (WIDTH,),
        "final_norm.weight": (WIDTH,),
    }
    for k in range(kwargs["n_amor_blocks"]):
        at = f"amor_blocks.{k}"
        shapes |= {
            f"{at}.raw_alpha": (WIDTH,),
            f"{at}.gate.running_threshold": (),
            f"{at}.gate.running_std": (),
        }
        names = ("q_proj", "kv_proj.k_proj", "kv_proj.v_proj", "out_proj")
        shapes |= {f"{at}.{name}.weight": (WIDTH, WIDTH) for name in names}
        shapes |= {f"amor_pre_norms.{k}.weight": (WIDTH,)} if k else {}
    for i in range(LAYERS):
        shapes |= (
            gdn_layer(i) if kwargs["backbone"] == "gdn" else mamba2_layer(i, kwargs["n_groups"])
        )
    return shapes


def mamba2_layer(i, groups):
    inner, mixed = 2 * WIDTH, 2 * WIDTH + 2 * groups * STATES
    heads, at = inner // HEAD, f"ssd_layers.{i}"
    return {
        f"{at}.norm.weight": (WIDTH,),
        **{f"{at}.mixer.{name}": (heads,) for name in ("dt_bias", "A_log", "D")},
        f"{at}.mixer.conv1d.weight": (mixed, 1, 4),
        f"{at}.mixer.conv1d.bias": (mixed,),
        f"{at}.mixer.in_proj.weight": (inner + mixed + heads, WIDTH),
        f"{at}.mixer.norm.weight": (inner,),
        f"{at}.mixer.out_proj.weight": (WIDTH, inner),
        f"mlp_norms.{i}.weight": (WIDTH,),
        **{f"mlps.{i}.{name}_proj.weight": (D_FF, WIDTH) for name in ("gate", "up")},
        f"mlps.{i}.down_proj.weight": (WIDTH, D_FF),
    }


def gdn_layer(i):
    heads, at = int(0.75 * WIDTH / HEAD), f"layers.{i}"
    keys = heads * HEAD
    sizes = {"q": keys, "k": keys, "v": 2 * keys, "g": 2 * keys, "a": heads, "b": heads}
    return {
        f"{at}.norm_ssm.weight": (WIDTH,),
        **{f"{at}.gdn.{name}": (heads,) for name in ("A_log", "dt_bias")},
        **{f"{at}.gdn.{name}_proj.weight": (size, WIDTH) for name, size in sizes.items()},
        **{f"{at}.gdn.{name}_conv1d.weight": (sizes[name], 1, 4) for name in "qkv"},
        f"{at}.gdn.o_norm.weight": (2 * HEAD,),
        f"{at}.gdn.o_proj.weight": (WIDTH, 2 * keys),
        f"{at}.norm_mlp.weight": (WIDTH,),
        **{f"{at}.mlp.{name}_proj.weight": (D_FF, WIDTH) for name in ("gate", "up")},
        f"{at}.mlp.down_proj.weight": (WIDTH, D_FF),
    }


def random_tensors(kwargs, seed=0):
    """Uneven weights: no norm is 1, alpha lies partly below the floor,
    thresholds split the tokens."""
    generator = torch.Generator().manual_seed(seed)
    held = {}
    for name, shape in shapes_of(kwargs).items():
        t = torch.randn(shape, generator=generator)
        if name.endswith("running_threshold"):
            held[name] = 0.42 + 0.02 * t
        elif name.endswith("running_std"):
            held[name] = (0.08 + 0.02 * t).abs()
        elif name.endswith("raw_alpha"):
            held[name] = 1.5 * t  # a quarter below -1
        elif name == "embed.weight":
            held[name] = 0.35 * t
        elif len(shape) == 1:
            held[name] = (0.3 * t).exp() if "norm" in name else t
        else:
            held[name] = t * (0.5 if "conv1d" in name else shape[-1] ** -0.5)
    return held


def released(folder, kwargs, tensors=None, shards=1, head=False, **top):
    """Write a released folder; head: with the copy of the embedding that is its head."""
    tensors = dict(random_tensors(kwargs) if tensors is None else tensors)
    if head:
        tensors["lm_head.weight"] = tensors["embed.weight"].clone()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"model_kwargs": kwargs, "tokenizer": "some/hub-name"} | top)
    )
    write_tensors(folder, tensors, shards)
    return folder


def write_tensors(folder, tensors, shards=1):
    for old in [*folder.glob("model*"), folder / "manifest.json"]:
        old.unlink(missing_ok=True)
    names = sorted(tensors)
    files = {"model.safetensors": names}
    if shards > 1:
        files = {
            f"model-{s + 1:05d}-of-{shards:05d}.safetensors": names[s::shards]
            for s in range(shards)
        }
        where = {name: file for file, some in files.items() for name in some}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": where})
        )
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, folder / file)
    write_manifest(folder)


def write_manifest(folder):
    entries = {}
    for path in sorted(folder.glob("model*")):
        held = path.read_bytes()
        entries[path.name] = {"bytes": len(held), "sha256": hashlib.sha256(held).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(entries))
