"""Any folder with a model in it: ours, a run of ours, or one that is converted on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amor import registry
from amor.config import Config
from amor.convert.base import NO_TOKENIZER, Layout, Outputs
from amor.convert.peer import run_by_transformers
from amor.convert.source import CONFIG, TOKENIZER_FILES, Source
from amor.errors import AmorError, nearest
from amor.models.amor import Amor
from amor.models.folder import LATEST, load_model, resolve
from amor.vocabulary import load_file, vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OURS = "amor"
OWN = "our own forward"


@dataclass(frozen=True)
class Opened:
    """A model, where it is from, and what there is to say about it."""

    model: Amor
    source: Source | None  # None: it is ours as it lies there
    layout: type[Layout] | None
    folder: Path
    notes: tuple[str, ...] = ()
    face: bool = False  # ours as transformers keeps it
    given: Tokenizer | None = None  # instead of the folder's own

    @property
    def title(self) -> str:
        return "amor" if self.layout is None else self.layout.title

    @property
    def tokenizer_files(self) -> list[Path]:
        return [self.folder / name for name in TOKENIZER_FILES if (self.folder / name).is_file()]

    def tokenizer(self) -> Tokenizer | None:
        if self.given is not None:
            return self.given
        path = self.folder / "tokenizer.json"
        return load_file(path) if path.is_file() else None

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> tuple[Tensor, str]:
        """[B, T, V] of the folder as it was found, by its own library where it is not ours."""
        found = self.outputs(tokens)
        return found.logits, found.by

    @torch.no_grad()
    def outputs(self, tokens: Tensor, decided: Tensor | None = None) -> Outputs:
        """`logits` with what the gates did; decided [K, B, T]: see Layout.outputs."""
        if self.layout is not None and self.source is not None:
            return self.layout.outputs(self.source, tokens, decided)
        if self.face:
            import amor.hf  # noqa: F401 (registers our models with transformers)

            out, by = run_by_transformers(self.folder, "AutoModelForCausalLM", tokens)
            return Outputs(out.logits, by, *self._gates(out.gate_scores, out.gate_fires))
        found = self.model(tokens)
        scores, fires = ([getattr(gate, key) for gate in found.gates] for key in ("score", "fire"))
        return Outputs(self.model.logits(found.hidden), OWN, *self._gates(scores, fires))

    def _gates(self, scores: Sequence[Tensor] | None, fires: Sequence[Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
        """Entropies, or what routers predict of them, and decisions [K, B, T]."""
        if not scores or not fires or self.model.config.blocks.gate not in ("entropy", "router"):
            return None, None
        return torch.stack(list(scores)), torch.stack(list(fires))


def kinds() -> tuple[str, ...]:
    """Layouts by the names a command takes."""
    return tuple(kind.replace("_", "-") for kind in registry.kinds("convert"))


def targets() -> tuple[str, ...]:
    """Layouts that can be written: ours, that of transformers, and those that have a way back."""
    written = (kind for kind in kinds() if layout_of(kind).back is not Layout.back)
    return (OURS, "hf", *written)


def layout_of(kind: str) -> type[Layout]:
    found = registry.find("convert", kind.replace("-", "_"))
    assert issubclass(found, Layout)
    return found


def open_model(folder: str | Path, vocab: int | None = None, tokenizer: Tokenizer | None = None) -> Opened:
    """The model of a folder; vocab: keep this many rows; tokenizer: instead of the folder's own."""
    folder = Path(folder)
    if (folder / LATEST).exists() or (folder / "checkpoints").is_dir():
        folder = resolve(folder)
    source = Source.open(folder)
    layout = recognised(source)
    if vocab is not None and layout is not None and layout.gated:
        raise AmorError(
            f"--vocab {vocab}: {layout.title} has gates, and their thresholds are of entropies over all rows of its head"
        )
    model = load_model(folder).eval() if layout is None else converted(source, layout)
    notes = about_numbers(
        model.embed.weight.dtype if layout is None else source.tree.get("torch_dtype") or source.tree.get("dtype")
    )
    model = model.float()
    if vocab is not None:
        model = cut(model, vocab)
    face = layout is None and source.tree.get("model_type") == OURS
    found = Opened(model, None if layout is None else source, layout, folder, face=face and vocab is None, given=tokenizer)
    about_source = [] if layout is None else layout.notes(source)
    return replace(found, notes=(*notes, *about_source, *about_vocabulary(found)))


def recognised(source: Source) -> type[Layout] | None:
    """The layout of a folder, None for ours."""
    for kind in registry.kinds("convert"):
        layout = layout_of(kind)
        if layout.recognises(source.tree):
            return layout
    if ours(source.tree):
        return None
    where, given = source.folder / CONFIG, source.tree.get("model_type")
    if given is None:
        raise AmorError(f"{where} names no model_type and is of no layout we know; read are amor, {', '.join(kinds())}")
    types = [layout_of(kind).model_type for kind in kinds()]
    hint = nearest(str(given)[:80], (*filter(None, types), OURS))
    raise AmorError(f"{where}: no model_type {str(given)[:80]!r} is known; {hint}")


def ours(tree: Mapping[str, Any]) -> bool:
    return tree.get("model_type") == OURS or {"pattern", "width", "vocab"} <= tree.keys()


def converted(source: Source, layout: type[Layout]) -> Amor:
    """A source as our model, every tensor in its place."""
    config = named(source, layout)
    layout.check_files(source)
    held = source.tensors()
    weights = layout.weights(source, held, config)
    held.finish(layout.unused)
    with torch.device("meta"):
        model = Amor(config)
    # of its own memory: parts of one tensor, cut or split, would be saved as one
    model.load_state_dict({name: t.clone() for name, t in weights.items()}, assign=True)
    return model.eval()


def about_numbers(dtype: object) -> list[str]:
    name = str(dtype).removeprefix("torch.")
    return [] if name in ("None", "float32") else [f"weights were {name} and are float32 here, the same numbers"]


def named(source: Source, layout: type[Layout]) -> Config:
    try:
        return layout.config(source, source.folder.resolve().name[:200] or layout.kind)
    except AmorError as error:
        raise AmorError(f"{error} (of {layout.title})") from None


def cut(model: Amor, vocab: int) -> Amor:
    """The same model of the first `vocab` tokens."""
    if not 2 <= vocab <= model.config.vocab:
        raise AmorError(f"--vocab {vocab}: give 2 to {model.config.vocab}, the rows there are")
    weights = model.state_dict()
    for name in ("embed.weight", "head.weight"):
        if name in weights:
            weights[name] = weights[name][:vocab].clone()
    with torch.device("meta"):
        other = Amor(model.config.change(vocab=vocab))
    other.load_state_dict(weights, assign=True)
    return other.eval()


def about_vocabulary(found: Opened) -> list[str]:
    """Where the head has rows that are no tokens of the tokenizer, or the tokenizer tokens the head has not."""
    tokenizer, rows = found.tokenizer(), found.model.config.vocab
    if tokenizer is None:
        if found.layout is None or found.source is None:
            return [NO_TOKENIZER]
        return [found.layout.no_tokenizer(found.source)]
    known = vocabulary(tokenizer)
    if known > rows:
        return [
            f"its tokenizer has {known:,} tokens and its head {rows:,} rows: texts with a token of the difference cannot be read"
        ]
    if known < rows and found.layout is not None:
        advice = "" if found.layout.gated else f"; --vocab {known} cuts them off"
        sizes = f"its tokenizer has {known:,} tokens and its head {rows:,} rows"
        return [f"{sizes}: the others count in entropy and take probability{advice}"]
    return []
