"""Options shared by verbs that take a model: naming it, changing it, opening it, setting gates."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from amor import typed
from amor.cli import Parser
from amor.config import Config
from amor.data.loader import Windows
from amor.data.shards import splits
from amor.data.tokenizer import load as load_tokenizer
from amor.errors import AmorError
from amor.gates.base import Gate
from amor.gates.override import override_gates
from amor.judge.gates import own_gates
from amor.judge.windows import of_shards
from amor.models.amor import Amor
from amor.models.folder import load, load_config
from amor.presets import NAMES, SCALES, every_name, preset

TRAINED = "a model folder, or a run (its latest model)"


def name_arguments(parser: Parser, words: str = TRAINED) -> None:
    """The model, as an argument or an option."""
    parser.argument("name", "MODEL", words, "?")
    parser.text("--model", "MODEL", "the same, as an option")


def trained_arguments(parser: Parser) -> None:
    """A trained model and its tokenizer, for `open_trained`."""
    name_arguments(parser)
    parser.text(
        "--tokenizer",
        "NAME",
        "of a model without one: bytes, llama-3.1, a folder with a tokenizer.json",
    )


def config_arguments(parser: Parser) -> None:
    """A model folder or a preset and changes to it, for `model_config`."""
    name_arguments(parser, f"{TRAINED}, or a preset such as amor-mamba2")
    parser.text("--scale", "NAME", f"scale of a preset: {', '.join(SCALES)} (default tiny)")
    parser.repeated("--set", "KEY=VALUE", "change a config key, e.g. blocks.count=1")


def gate_arguments(parser: Parser) -> None:
    """Another gate or firing rate for a trained model, for `chosen_gates`."""
    parser.text("--gate", "KIND", "another gate: always, never or e.g. random:0.3")
    parser.number("--fire-rate", None, "fire on this share of tokens, 0 to 1", float)


def chosen_gates(args: argparse.Namespace, model: Amor) -> list[Gate]:
    """The gates of `gate_arguments`, one per block; the model's own where none are named."""
    return override_gates(own_gates(model), args.gate, args.fire_rate)


def bos_arguments(parser: Parser) -> None:
    """Whether a BOS token is put in front of texts, `args.bos`, for amor.vocabulary.prefix_ids."""
    words = "put the BOS token before a text (default: as the tokenizer's post-processor does)"
    parser.add_argument("--bos", action=argparse.BooleanOptionalAction, default=None, help=words)


def config_changes(args: argparse.Namespace) -> dict[str, Any]:
    """Config keys that `--set` changes, and their values."""
    return typed.assignments(args.set, "blocks.count=1")


def model_name(args: argparse.Namespace) -> str:
    """The folder or preset that a command names."""
    if args.name and args.model:
        raise AmorError(f"two models given, {args.name!r} and --model {args.model!r}; give one")
    name = args.name or args.model
    choices = f"give a model folder or a preset: {', '.join(NAMES)}"
    if not name:
        raise AmorError(f"which model? {choices}")
    if "/" in name and not Path(name).exists():
        raise AmorError(f"there is no folder {name}; {choices}")
    return name


def model_config(args: argparse.Namespace) -> Config:
    """The config of the model a command names, with its changes."""
    name = model_name(args)
    scale = "tiny" if args.scale is None else args.scale
    config = preset(name, scale) if is_preset(args) else load_config(name)
    return config.change(**config_changes(args))


def is_preset(args: argparse.Namespace) -> bool:
    """Whether the model a command names is a preset, not a folder."""
    name = model_name(args)
    if name in every_name() or not Path(name).exists():
        return True
    if args.scale is not None:
        raise AmorError(f"--scale {args.scale} is for a preset; {name} is a model of its own size")
    return False


def open_trained(args: argparse.Namespace) -> tuple[Amor, Tokenizer | None]:
    """The trained model a command names, and the tokenizer it names or the model's own."""
    name = args.name or args.model
    if not name or not Path(name).is_dir():
        problem = f"no model folder {name!r}" if name else "which model?"
        hint = "a model folder, or a run written by amor train, e.g. runs/demo"
        raise AmorError(f"{problem}; give a trained model: {hint}")
    model, tokenizer = load(Path(model_name(args)))
    return model, load_tokenizer(args.tokenizer) if args.tokenizer else tokenizer


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, or an error where the model has none."""
    if tokenizer is None:
        hint = "e.g. the model or data it was trained from, or --tokenizer bytes"
        raise AmorError(f"the model folder holds no tokenizer.json; add --tokenizer FOLDER, {hint}")
    return tokenizer


def replace_invalid(word: str) -> str:
    """A word of the command line with bytes that are not UTF-8 replaced by a mark."""
    return word.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def held_out_windows(
    args: argparse.Namespace,
    model: Amor,
    tokenizer: Tokenizer | None,
    counts: Sequence[int],
    apart: bool = False,
) -> tuple[Windows, Windows]:
    """Windows of DATA/valid and of DATA/train, at most so many of each."""
    train, valid = splits(args.data)
    if valid is None:
        raise AmorError(f"{args.data} holds no held-out text; prepare it with --valid")
    context = model.config.context if args.context is None else args.context
    first, second = (
        of_shards(shards.folder, context, count, tokenizer, model.config.vocab, apart)
        for shards, count in zip((valid, train), counts, strict=True)
    )
    return first, second
