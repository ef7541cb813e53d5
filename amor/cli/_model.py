"""What every verb that takes a model shares: naming it, changing it, opening it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amor import typed
from amor.config import Config
from amor.errors import AmorError
from amor.presets import NAMES, SCALES, every_name, preset

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from amor.models.amor import Amor


def model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="MODEL", help="a model folder, a run (its latest model), or a preset such as amor-mamba2"
    )
    parser.add_argument("--model", metavar="MODEL", help="the same, as an option")
    parser.add_argument("--scale", help=f"scale of a preset: {', '.join(SCALES)} (default tiny)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a config key, e.g. blocks.count=1"
    )


def changes(args: argparse.Namespace) -> dict[str, Any]:
    """Config keys that `--set` changes, and their values."""
    return typed.assignments(args.set, "blocks.count=1")


def named(args: argparse.Namespace) -> str:
    if args.name and args.model:
        raise AmorError(f"two models given, {args.name!r} and --model {args.model!r}; give one")
    name = args.name or args.model
    if not name:
        raise AmorError(f"which model? give a model folder or a preset: {', '.join(NAMES)}")
    if "/" in name and not Path(name).exists():
        raise AmorError(f"there is no folder {name}; give a model folder or a preset: {', '.join(NAMES)}")
    return name


def model_config(args: argparse.Namespace) -> Config:
    """The config of the model a command names."""
    from amor.models.folder import load_config

    name = named(args)
    if is_preset(args):
        return preset(name, "tiny" if args.scale is None else args.scale).change(**changes(args))
    return load_config(name).change(**changes(args))


def is_preset(args: argparse.Namespace) -> bool:
    name = named(args)
    if name in every_name() or not Path(name).exists():
        return True
    if args.scale is not None:
        raise AmorError(f"--scale {args.scale} is for a preset; the model in {name} has the size it has")
    return False


def as_text(word: str) -> str:
    """A word of the command line as text: bytes that are none become a mark."""
    return word.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def opened(args: argparse.Namespace) -> tuple["Amor", "Tokenizer | None"]:
    """The trained model a command names, and the tokenizer it names or the model's own."""
    from amor.data.tokenizer import load as load_tokenizer
    from amor.models.folder import load

    given = args.name or args.model
    if not given or not Path(given).is_dir():
        said = f"no model folder {given!r}" if given else "which model?"
        raise AmorError(f"{said}; give a trained model: a model folder, or a run written by amor train, e.g. runs/demo")
    folder = Path(named(args))
    model, tokenizer = load(folder)
    return model, load_tokenizer(args.tokenizer) if args.tokenizer else tokenizer
