"""Layers and models of transformers at the shapes of ours."""

from typing import Any

import torch
from torch import nn

from amor.convert.peer import library


def mamba2_config(width: int, layers: int = 1, vocab: int = 64, chunk: int = 256) -> Any:
    """transformers' config of a model with the options of our Mamba2; its own default chunk is
    256."""
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None}
    shape = {
        "num_heads": 2 * width // 64,
        "head_dim": 64,
        "n_groups": 1,
        "state_size": 128,
        "chunk_size": chunk,
    }
    given = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
    }
    return library().Mamba2Config(**given, **shape, **tokens)


def mamba2_layer(width: int, chunk: int = 256) -> nn.Module:
    """One Mamba2 mixer."""
    library()
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    return Mamba2Mixer(mamba2_config(width, chunk=chunk), layer_idx=0)


def delta_layer(width: int, heads: int) -> nn.Module:
    """The Gated DeltaNet layer of Qwen3-Next with our head sizes."""
    library()
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 128, "linear_num_key_heads": heads}
    config = library().Qwen3NextConfig(
        hidden_size=width, num_hidden_layers=4, linear_num_value_heads=heads, **sizes
    )
    return Qwen3NextGatedDeltaNet(config, layer_idx=0)


def mamba2(width: int, layers: int, vocab: int, seed: int = 0) -> nn.Module:
    """A Mamba2 language model, tied embeddings, fresh weights."""
    torch.manual_seed(seed)
    return library().Mamba2ForCausalLM(mamba2_config(width, layers, vocab))


def mamba2_depth(parameters: int, width: int, vocab: int) -> float:
    """The depth at which a Mamba2 has a given number of parameters; 5.6 lies between 5 layers and
    6."""
    with torch.device("meta"):
        one, two = (sum(p.numel() for p in mamba2(width, n, vocab).parameters()) for n in (1, 2))
    return max(1.0, 1 + (parameters - one) / (two - one))


def llama(width: int, layers: int, d_ff: int, vocab: int, seed: int = 0) -> nn.Module:
    """A Llama language model with heads of 64, tied embeddings, fresh weights."""
    torch.manual_seed(seed)
    heads = {
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "tie_word_embeddings": True,
    }
    config = library().LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=d_ff,
        vocab_size=vocab,
        pad_token_id=0,
        **heads,
    )
    return library().LlamaForCausalLM(config)


def fast_tokenizer(tokenizer: Any) -> Any:
    """One of our tokenizers as transformers' class."""
    from amor.data.tokenizer import end_of_text

    ended = tokenizer.id_to_token(end_of_text(tokenizer))
    return library().PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=ended)
