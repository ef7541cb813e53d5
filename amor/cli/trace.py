"""Where attention ran on a text, token by token, and whether it was worth it.

  amor trace MODEL --text "The Eiffel Tower is a lattice tower." --html trace.html
  amor trace MODEL --preset paper --png traces.png
  amor trace MODEL --value --data DATA/valid --out judged
  amor trace MODEL --choices --data DATA

A trace shows for every token how unsure the model was at each block, where the gate fired, how
surprised it was, and what attention changed. --value judges the gate on held-out text: against
never, always, random and the best choice of tokens. --choices exchanges it: which score would have
selected the tokens worth firing, in front of the same attention? docs/gate.md explains the numbers.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from amor import typed
from amor.cli import Parser
from amor.cli._model import (
    bos_arguments,
    chosen_gates,
    gate_arguments,
    held_out_windows,
    open_trained,
    replace_invalid,
    require_tokenizer,
    trained_arguments,
)
from amor.cli._terminal import show_choices, show_trace, show_value
from amor.errors import AmorError, nearest
from amor.files import file_to_write, folder_to_write
from amor.gates.base import Gate
from amor.judge import choosing, value, windows
from amor.judge.prompts import PAPER
from amor.judge.trace import trace
from amor.judge.windows import encode
from amor.models.amor import Amor
from amor.progress import Progress
from amor.records.trace import Traces
from amor.records.value import Choosing, Value
from amor.study import figures, page
from amor.study.trace import trace_page
from amor.study.value import value_page
from amor.study.verdict import sentences

PRESETS = ("paper",)
# with --choices: windows of the training text that gains are learned on, per window judged
LEARNED = 16
MOST = 32  # windows judged by default


def arguments(parser: Parser) -> None:
    """The options of the verb."""
    trained_arguments(parser)
    parser.repeated("--text", "TEXT", "the text to trace")
    parser.text("--file", "FILE", "a file of text to trace, or with --value to judge on")
    parser.text("--preset", "NAME", "paper: the paper's teaser sentence and its four domains")
    parser.number("--limit", 4096, "trace the first N tokens of a text")
    gate_arguments(parser)
    bos_arguments(parser)
    parser.text("--html", "FILE", "write one self-contained page, with details under the pointer")
    parser.text("--png", "FILE", "write the figure")
    parser.text("--svg", "FILE", "write the figure as vectors (--svg name.pdf gives a PDF)")
    parser.text("--out", "FOLDER", "write the results as JSON, the page and the figure here")
    parser.flag("--value", "judge the gate on held-out text")
    parser.flag("--choices", "compare other gates on the same attention; needs --data")
    parser.text("--data", "FOLDER", "with --value: prepared tokens, e.g. DATA/valid")
    words = (
        f"windows of text judged (default: {MOST} with --choices, with --value about a minute's)"
    )
    parser.number("--windows", None, words)
    parser.number("--context", None, "tokens per window (default: the training length)")
    words = "joined: a window is one text; apart: each document is"
    parser.choice("--documents", ("joined", "apart"), "joined", words)


def run(args: argparse.Namespace) -> "dict[str, Any] | Choosing":
    """Trace texts, or judge the gate."""
    model, tokenizer = open_trained(args)
    gates = chosen_gates(args, model)
    for path in filter(None, (args.html, args.png, args.svg)):
        file_to_write(path)
    if args.out:
        folder_to_write(args.out)
    if args.choices:
        return compare_gates(args, model, tokenizer)
    return (judge if args.value else trace_texts)(args, model, tokenizer, gates)


def chosen_texts(args: argparse.Namespace) -> dict[str, str]:
    """Title -> text, of the texts that the command names."""
    if args.preset is not None and args.preset not in PRESETS:
        raise AmorError(f"no preset {args.preset!r}; {nearest(args.preset, PRESETS)}")
    texts = dict(PAPER) if args.preset else {}
    if args.file:
        texts[Path(args.file).name] = read_file(args.file)
    alone = len(args.text) == 1 and not texts
    for number, text in enumerate(args.text, 1):
        texts["" if alone else f"text {number}"] = replace_invalid(text)
    if not texts:
        hint = "give --text TEXT, --file FILE or --preset paper (or --value to judge the gate)"
        raise AmorError(f"nothing to trace; {hint}")
    return texts


def read_file(path: str) -> str:
    """A text file, which may be large."""
    return typed.read_text(Path(path), most=1 << 30)


def trace_texts(
    args: argparse.Namespace, model: Amor, own_tokenizer: Tokenizer | None, gates: "list[Gate]"
) -> dict[str, Any]:
    """Print a strip per text and write the files."""
    if args.limit < 1:
        raise AmorError(f"--limit {args.limit}: give the number of tokens to trace, at least 1")
    tokenizer, console = require_tokenizer(own_tokenizer), Console(highlight=False)
    traces = []
    for title, text in chosen_texts(args).items():
        ids = encode(tokenizer, text, args.bos).tolist()
        if len(ids) > args.limit:
            title = f"{title} (first {args.limit:,} of {len(ids):,} tokens)".strip()
        traces.append(trace(model, tokenizer, ids[: args.limit], title, gates))
        show_trace(console, traces[-1])
        console.print()
    result = Traces(traces=tuple(traces))
    return typed.tree(result) | {"written": write(args, "trace", result)}


def judge(
    args: argparse.Namespace, model: Amor, tokenizer: Tokenizer | None, gates: "list[Gate]"
) -> dict[str, Any]:
    """What the gate is worth on held-out text."""
    if (args.data is None) == (args.file is None):
        hint = "give --data FOLDER (prepared tokens) or --file FILE, one of them"
        raise AmorError(f"--value needs held-out text: {hint}")
    config = model.config
    context = config.context if args.context is None else args.context
    count = value.affordable_windows(model, context, MOST) if args.windows is None else args.windows
    if args.data is not None:
        apart = args.documents == "apart"
        text = windows.of_shards(args.data, context, count, tokenizer, config.vocab, apart)
    else:
        ids = encode(require_tokenizer(tokenizer), read_file(args.file), args.bos)
        text = windows.of_ids(ids, context, count, args.file)
    tokens = value.passes_of(model) * text.tokens.numel()
    with Progress("judging the gate", tokens, "tokens") as progress:
        result = value.value(model, text, gates, on_tokens=progress.add)
    show_value(Console(highlight=False), result)
    written = write(args, "value", result)
    return typed.tree(result) | {"verdict": sentences(result), "written": written}


def compare_gates(args: argparse.Namespace, model: Amor, tokenizer: "Tokenizer | None") -> Choosing:
    """Other gates in front of the same attention, on held-out text."""
    if args.data is None:
        raise AmorError("--choices needs --data FOLDER, written by `amor prepare` with --valid")
    for name in ("value", "gate", "fire_rate", "text", "file", "preset", "html", "png", "svg"):
        if getattr(args, name) not in (None, False, []):
            flag = name.replace("_", "-")
            words = "--choices judges held-out text with gates of its own"
            raise AmorError(f"{words}; leave --{flag} away")
    if not model.blocks:
        hint = "so there is no gate to exchange; give an AMOR model"
        raise AmorError(f"{model.config.name} has no gated blocks, {hint}")
    count, apart = MOST if args.windows is None else args.windows, args.documents == "apart"
    counts = count, LEARNED * count
    text, learned = held_out_windows(args, model, tokenizer, counts, apart)
    tokens = choosing.tokens_read(model, text, learned)
    with Progress("choosing", tokens, "tokens") as progress:
        result = choosing.compare_gates(model, text, learned, on_tokens=progress.add)
    show_choices(Console(highlight=False), result)
    if args.out:
        print(f"wrote {page.write_json(Path(args.out) / 'choices.json', result)}")
    return result


def write(args: argparse.Namespace, name: str, result: Traces | Value) -> list[str]:
    """Write the files that the command names; --out stands for all of them."""

    def paths(*named: str | None, kinds: tuple[str, ...]) -> list[str | Path]:
        folder = [Path(args.out) / f"{name}.{kind}" for kind in kinds] if args.out else []
        return [*(path for path in named if path), *folder]

    files = [page.write_json(Path(path), result) for path in paths(kinds=("json",))]
    for path in paths(args.html, kinds=("html",)):
        text = trace_page(result) if isinstance(result, Traces) else value_page(result)
        files.append(page.put(path, text))
    pictures = paths(args.png, args.svg, kinds=("png", "svg"))
    if pictures:
        drawing = figures.draw(name, result)
        files += [figures.save(drawing, path) for path in pictures]
    for path in files:
        print(f"wrote {path}")
    return [str(path) for path in files]
