"""A folder that transformers opens, and amor.load too: the checks when it is read, and the files
that are written into it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amor import tensors, typed
from amor.config import Config
from amor.data.tokenizer import end_of_text
from amor.errors import AmorError
from amor.files import replace_file
from amor.hf.card import MARK, card
from amor.hf.config import check_keys
from amor.models.folder import CONFIG, TOKENIZER, list_weights, load, load_config
from amor.vocabulary import prefix_ids, vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from amor.hf.model import AmorPreTrainedModel

STUB, README, GENERATION = "modeling_amor.py", "README.md", "generation_config.json"
STUB_TEXT = '''"""The code of this model is the package amor, with its extra hf; see README.md."""

from amor.hf import AmorConfig, AmorForCausalLM, AmorModel  # noqa: F401
'''
AUTO_MAP = {
    "AutoConfig": "modeling_amor.AmorConfig",
    "AutoModel": "modeling_amor.AmorModel",
    "AutoModelForCausalLM": "modeling_amor.AmorForCausalLM",
}


def load_strictly(
    load_one: Callable[..., Any],
    path: Any,
    *args: Any,
    output_loading_info: bool = False,
    **more: Any,
) -> Any:
    """Load by transformers' `load_one`, and refuse a folder that does not fit its config.

    transformers would fill tensors that a file lacks with random numbers and only print that.
    """
    if more.pop("ignore_mismatched_sizes", False):
        raise AmorError(
            "ignore_mismatched_sizes: a tensor of another shape would be left with random numbers; "
            "nothing is loaded"
        )
    local = None if path is None else Path(path) / more.get("subfolder", "")
    partial = any(more.get(name) is not None for name in ("state_dict", "variant", "gguf_file"))
    if local is not None and (local / GENERATION).is_file():
        text = typed.read_text(local / GENERATION)
        check_keys(typed.json_tree(text, str(local / GENERATION)), str(local / GENERATION))
    if local is not None and not partial and (local / CONFIG).is_file():
        config = getattr(more.get("config"), "built", None)
        list_weights(local, config if isinstance(config, Config) else load_config(local))
    model, info = load_one(
        path, *args, output_loading_info=True, **{"use_safetensors": True} | more
    )
    for what, names in info.items():
        if names:
            some = ", ".join(sorted(str(name) for name in names)[:3])
            problem = f"{what.replace('_', ' ')}: {some}"
            raise AmorError(f"{path} does not fit its config: {problem}; nothing is loaded")
    own_memory(model)
    tensors.check_finite(dict(model.state_dict()), Path(str(path)))
    return (model, info) if output_loading_info else model


def own_memory(model: AmorPreTrainedModel) -> None:
    """Give each tensor memory of its own, as amor.load does.

    In a file tensors lie at any address, and the rounding of torch's products of few rows depends
    on it.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()


def save_with_card(
    model: AmorPreTrainedModel,
    save: Callable[..., None],
    folder: str | os.PathLike[str],
    *args: Any,
    **more: Any,
) -> None:
    """Save by transformers' `save`, and write the stub of the code and a model card beside it.

    A README.md that is not our card stays.
    """
    model.config.auto_map = dict(AUTO_MAP)
    save(folder, *args, **{"save_original_format": False} | more)
    adapters_only = getattr(model, "_hf_peft_config_loaded", False)
    if (
        adapters_only
        or not more.get("is_main_process", True)
        or not (Path(folder) / CONFIG).is_file()
    ):
        return
    replace_file(Path(folder) / STUB, STUB_TEXT)
    readme = Path(folder) / README
    if not readme.is_file() or MARK in readme.read_text(errors="replace"):
        replace_file(readme, card(model.core, (Path(folder) / TOKENIZER).is_file()))


def export(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    end: str | None = None,
    shard: int | str = "50GB",
) -> Path:
    """Write the model of a folder of ours, or of a run, as a folder that transformers opens;
    amor.load opens it too.

    end: the token that ends a text, where its name is not a usual one. shard: most bytes of one
    weight file; the default is one file for any model of ours.
    """
    from amor.hf.model import AmorForCausalLM

    model, tokenizer = load(os.fspath(source))
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise AmorError(f"{out} is a file; give a folder to write to")
    wrapped = AmorForCausalLM.of(model)
    if tokenizer is not None:
        ending = end_of_text(tokenizer, end)
        known, rows = vocabulary(tokenizer), model.config.vocab
        if known > rows:
            sizes = f"its tokenizer has {known:,} tokens, but the model has {rows:,} rows"
            raise AmorError(f"{source}: {sizes}; they do not belong together")
        out.mkdir(parents=True, exist_ok=True)
        prefix = prefix_ids(tokenizer)
        bos = prefix[0] if len(prefix) == 1 else None
        write_tokenizer(tokenizer, ending, out, bos)
        for config in (wrapped.config, wrapped.generation_config):
            config.eos_token_id = config.pad_token_id = ending
            config.bos_token_id = bos
    wrapped.save_pretrained(out, max_shard_size=shard)
    return out


def write_tokenizer(tokenizer: Tokenizer, end: int, folder: Path, begin: int | None = None) -> None:
    """Write tokenizer.json, and the tokenizer_config.json that transformers needs.

    A name that is not in tokenizer.json would silently become a new token. `begin` is the token
    that its post-processor puts before every text; tokenizers that `amor prepare` trains put none,
    since documents follow the end of another.
    """
    word = tokenizer.id_to_token(end)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": word,
        "pad_token": word,  # masked wherever it pads; no other token is free
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    replace_file(folder / TOKENIZER, tokenizer.to_str(pretty=True))
    if begin is not None:
        settings["bos_token"] = tokenizer.id_to_token(begin)
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    replace_file(folder / "tokenizer_config.json", text + "\n")
