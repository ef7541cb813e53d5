"""Where attention ran on a text, token by token, and whether it was worth it.

  amor trace MODEL --text "The Eiffel Tower is a lattice tower." --html trace.html
  amor trace MODEL --preset paper --png traces.png
  amor trace MODEL --value --data DATA/valid --out judged
  amor trace MODEL --choices --data DATA

A trace shows for every token how unsure the model was at each block, where the gate fired, how surprised it was, and what
attention changed. --value judges the gate on held-out text: against never, always, random and the best choice of tokens.
--choices exchanges it: which score would have found the tokens worth firing, in front of the same attention?
docs/gate.md tells what the numbers mean.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amor import typed
from amor.cli._model import as_text, opened
from amor.errors import AmorError, nearest
from amor.files import file_to_write, folder_to_write

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from amor.gates.base import Gate
    from amor.models.amor import Amor
    from amor.records.trace import Traces
    from amor.records.value import Value

PRESETS = ("paper",)
LEARNED = 16  # with --choices: windows of the training text that gains are learned on, for each that is judged


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="MODEL", help="a model folder, or a run (its latest model)")
    parser.add_argument("--model", metavar="MODEL", help="the same, as an option")
    parser.add_argument("--tokenizer", help="for a model folder without one: bytes, llama-3.1, or a tokenizer.json")
    parser.add_argument("--text", action="append", metavar="TEXT", help="the text to trace; may be repeated")
    parser.add_argument("--file", metavar="FILE", help="a file of text to trace, or with --value to judge on")
    parser.add_argument("--preset", help="paper: the paper's teaser sentence, and a text of each of its four domains")
    parser.add_argument("--limit", type=int, default=4096, metavar="N", help="trace the first N tokens of a text (default 4096)")
    parser.add_argument("--fire-rate", type=float, metavar="SHARE", help="set the gate to fire on this share of tokens, 0 to 1")
    parser.add_argument(
        "--gate", metavar="KIND", help="another gate for the while: always, never or random:SHARE, e.g. random:0.3"
    )
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page, with details under the pointer")
    parser.add_argument("--png", metavar="FILE", help="write the figure")
    parser.add_argument("--svg", metavar="FILE", help="write the figure as vectors (--svg name.pdf gives a PDF)")
    parser.add_argument("--out", metavar="FOLDER", help="write everything found as JSON, the page and the figure here")
    parser.add_argument("--value", action="store_true", help="judge the gate on held-out text")
    parser.add_argument(
        "--choices",
        action="store_true",
        help="other gates on the same attention, at equal rates; --data: a folder of amor prepare",
    )
    parser.add_argument("--data", metavar="FOLDER", help="with --value: prepared tokens, e.g. DATA/valid")
    parser.add_argument("--windows", type=int, default=32, metavar="N", help="with --value: windows of text judged (default 32)")
    parser.add_argument("--context", type=int, metavar="N", help="with --value: tokens per window (default: the training length)")
    parser.add_argument(
        "--documents",
        default="joined",
        choices=("joined", "apart"),
        help="with --value --data: joined (default): a window is one text; apart: a document sees nothing of the one before it",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    from amor.gates.override import override_gates
    from amor.judge.gates import own_gates

    model, tokenizer = opened(args)
    gates = override_gates(own_gates(model), args.gate, args.fire_rate)
    for path in (args.html, args.png, args.svg):
        if path:
            file_to_write(path)
    if args.out:
        folder_to_write(args.out)
    if args.choices:
        return choose(args, model, tokenizer)
    return judge(args, model, tokenizer, gates) if args.value else show(args, model, tokenizer, gates)


def texts(args: argparse.Namespace) -> dict[str, str]:
    """Title -> text, of what the command asks to trace."""
    if args.preset is not None and args.preset not in PRESETS:
        raise AmorError(f"no preset {args.preset!r}; {nearest(args.preset, PRESETS)}")
    found: dict[str, str] = {}
    if args.preset:
        from amor.judge.prompts import PAPER

        found |= PAPER
    if args.file:
        found[Path(args.file).name] = content(args.file)
    given = [as_text(text) for text in args.text or []]
    found |= {("" if len(given) == 1 and not found else f"text {i + 1}"): text for i, text in enumerate(given)}
    if not found:
        raise AmorError("nothing to trace; give --text TEXT, --file FILE or --preset paper (or --value to judge the gate)")
    return found


def content(path: str) -> str:
    return typed.read_text(Path(path), most=1 << 30)


def spelled_by(tokenizer: "Tokenizer | None") -> "Tokenizer":
    if tokenizer is None:
        raise AmorError("the model folder has no tokenizer.json; name one with --tokenizer, for instance --tokenizer bytes")
    return tokenizer


def show(args: argparse.Namespace, model: "Amor", tokenizer: "Tokenizer | None", gates: "list[Gate]") -> dict[str, Any]:
    from rich.console import Console

    from amor.cli import _strip
    from amor.judge.trace import trace
    from amor.judge.windows import encode
    from amor.records.trace import Traces

    if args.limit < 1:
        raise AmorError(f"--limit {args.limit}: give the number of tokens to trace, at least 1")
    speller, console, traces = spelled_by(tokenizer), Console(highlight=False), []
    for title, text in texts(args).items():
        ids = encode(speller, text).tolist()
        if len(ids) > args.limit:
            title = f"{title} (first {args.limit:,} of {len(ids):,} tokens)".strip()
        traces.append(trace(model, speller, ids[: args.limit], title, gates))
        _strip.show(console, traces[-1])
        console.print()
    found = Traces(traces=tuple(traces))
    return typed.tree(found) | {"written": write(args, "trace", found)}


def judge(args: argparse.Namespace, model: "Amor", tokenizer: "Tokenizer | None", gates: "list[Gate]") -> dict[str, Any]:
    from rich.console import Console

    from amor.cli import _judged
    from amor.data.progress import Progress
    from amor.judge import windows
    from amor.judge.value import passes as value_passes
    from amor.judge.value import value
    from amor.study.verdict import sentences

    if (args.data is None) == (args.file is None):
        raise AmorError("--value needs held-out text: give --data FOLDER (prepared tokens) or --file FILE, one of them")
    context = model.config.context if args.context is None else args.context
    if args.data is not None:
        apart = args.documents == "apart"
        cut = windows.of_shards(args.data, context, args.windows, tokenizer, model.config.vocab, apart)
    else:
        cut = windows.of_ids(windows.encode(spelled_by(tokenizer), content(args.file)), context, args.windows, args.file)
    passes = value_passes(len(model.each_block()), once=model.config.blocks.decide == "once" and len(model.blocks) > 1)
    with Progress("judging the gate", passes * cut.tokens.numel(), " tokens") as progress:
        found = value(model, cut, gates, on_tokens=progress.add)
    _judged.show(Console(highlight=False), found)
    return typed.tree(found) | {"verdict": sentences(found), "written": write(args, "value", found)}


def choose(args: argparse.Namespace, model: "Amor", tokenizer: "Tokenizer | None") -> dict[str, Any]:
    from rich.console import Console

    from amor.cli import _judged
    from amor.data.progress import Progress
    from amor.data.shards import splits
    from amor.judge import choosing, windows
    from amor.study import page

    if args.data is None:
        raise AmorError("--choices needs --data FOLDER, written by `amor prepare` with --valid")
    for name in ("value", "gate", "fire_rate", "text", "file", "preset", "html", "png", "svg"):
        if getattr(args, name) not in (None, False):
            raise AmorError(f"--choices judges held-out text with gates of its own; leave --{name.replace('_', '-')} away")
    if not model.blocks:
        raise AmorError(f"{model.config.name} has no gated blocks, so there is no gate to exchange; give an AMOR model")
    train, valid = splits(args.data)
    if valid is None:
        raise AmorError(f"{args.data} holds no held-out text; prepare it with --valid")
    context = model.config.context if args.context is None else args.context
    apart = args.documents == "apart"
    cut, learned = (
        windows.of_shards(shards.folder, context, count, tokenizer, model.config.vocab, apart)
        for shards, count in ((valid, args.windows), (train, LEARNED * args.windows))
    )
    passes = choosing.passes(len(model.blocks), model.config.blocks.decide == "once")
    with Progress(
        "choosing", passes * cut.tokens.numel() + choosing.learning_passes() * learned.tokens.numel(), " tokens"
    ) as progress:
        found = choosing.compare_gates(model, cut, learned, on_tokens=progress.add)
    _judged.show_choices(Console(highlight=False), found)
    if args.out:
        print(f"wrote {page.write_json(Path(args.out) / 'choices.json', found)}")
    return dict(typed.tree(found))


def write(args: argparse.Namespace, name: str, found: "Traces | Value") -> list[str]:
    """The files that the command names; --out stands for all of them."""
    from amor.records.trace import Traces
    from amor.study import page
    from amor.study.value import value_page

    out = Path(args.out) if args.out else None
    files = []
    if out:
        files.append(page.write_json(out / f"{name}.json", found))
    for path in [args.html, *([out / f"{name}.html"] if out else [])]:
        if path:
            files.append(page.put(path, page.trace_page(found) if isinstance(found, Traces) else value_page(found)))
    pictures = [p for p in (args.png, args.svg) if p] + ([out / f"{name}.png", out / f"{name}.svg"] if out else [])
    if pictures:
        from amor.study import figures

        drawing = figures.draw(name, found)
        files += [figures.save(drawing, path) for path in pictures]
    for path in files:
        print(f"wrote {path}")
    return [str(path) for path in files]
