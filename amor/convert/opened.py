"""Any folder with a model in it: ours, a run of ours, or one that is converted on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amor import registry
from amor.config import Config
from amor.convert.base import NO_TOKENIZER, FolderLayout, Outputs
from amor.convert.peer import run_by_transformers
from amor.convert.source import CONFIG, SourceFolder
from amor.errors import AmorError, nearest
from amor.models.amor import Amor
from amor.models.folder import LATEST, MODEL_TYPE, TOKENIZER, load_config, load_model, resolve
from amor.vocabulary import load_file, prefix_ids, vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OWN = "our own forward"


@dataclass(frozen=True)
class Opened:
    """A model, the folder it comes from, and remarks for the user.

    Attributes:
        model: as ours, in float32.
        layout: the folder as its library publishes it; None where the layout is ours.
        folder: the folder, or the file of a layout of one file.
        notes: remarks for the user, one line each.
        by_transformers: whether it is our model as transformers saves it.
        replaced_tokenizer: used instead of the folder's own tokenizer.json.
    """

    model: Amor
    layout: FolderLayout | None
    folder: Path
    notes: tuple[str, ...] = ()
    by_transformers: bool = False
    replaced_tokenizer: Tokenizer | None = None

    @property
    def title(self) -> str:
        """The name of the layout, for people."""
        return "amor" if self.layout is None else self.layout.title

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model, if it has one."""
        if self.replaced_tokenizer is not None:
            return self.replaced_tokenizer
        path = self.folder / TOKENIZER
        return load_file(path) if path.is_file() else None

    @torch.no_grad()
    def outputs(self, tokens: Tensor, decided: Tensor | None = None) -> Outputs:
        """Outputs of the folder as it is, by its own library where it is not ours.

        decided [K, B, T]: see FolderLayout.outputs.
        """
        if self.layout is not None:
            return self.layout.outputs(tokens, decided)
        if self.by_transformers:
            import amor.hf  # noqa: F401 (registers our models with transformers)

            out, by = run_by_transformers(self.folder, "AutoModelForCausalLM", tokens)
            return Outputs(out.logits, by, *self._gates(out.gate_scores, out.gate_fires))
        out = self.model(tokens)
        gates = self._gates([g.score for g in out.gates], [g.fire for g in out.gates])
        return Outputs(self.model.logits(out.hidden), OWN, *gates)

    def _gates(
        self, scores: Sequence[Tensor] | None, fires: Sequence[Tensor] | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Entropies, or what routers predict of them, and decisions [K, B, T]."""
        if not scores or not fires or self.model.config.blocks.gate not in ("entropy", "router"):
            return None, None
        return torch.stack(list(scores)), torch.stack(list(fires))


def targets() -> tuple[str, ...]:
    """Layouts that can be written: ours, that of transformers, and those that have a way back."""
    kinds = (kind.replace("_", "-") for kind in registry.kinds("convert"))
    refused = FolderLayout.back.__func__  # type: ignore[attr-defined]
    writable = (k for k in kinds if layout_of(k).back.__func__ is not refused)  # type: ignore[attr-defined]
    return (MODEL_TYPE, "hf", *writable)


def layout_of(kind: str) -> type[FolderLayout]:
    """The layout of a name as a command takes it, e.g. mamba2-hf."""
    layout = registry.find("convert", kind.replace("-", "_"))
    assert issubclass(layout, FolderLayout)
    return layout


def open_model(
    folder: str | Path, vocab: int | None = None, tokenizer: Tokenizer | None = None
) -> Opened:
    """The model of a folder or file; vocab: keep this many rows; tokenizer: instead of its own."""
    source, layout = open_source(folder)
    folder = source.folder
    if vocab is not None and layout is not None and layout.gated:
        raise AmorError(
            f"--vocab {vocab}: {layout.title} has gates, "
            "and their thresholds are of entropies over all rows of its head"
        )
    model = load_model(folder).eval() if layout is None else converted(layout)
    notes = [] if layout is None else layout.notes()
    named = source.tree.get("torch_dtype") or source.tree.get("dtype")
    dtype = str(model.embed.weight.dtype if layout is None else named).removeprefix("torch.")
    if dtype not in ("None", "float32"):
        notes = [f"weights were {dtype} and are float32 here, the same numbers", *notes]
    model = model.float() if vocab is None else cut(model.float(), vocab)
    opened = Opened(
        model,
        layout,
        folder,
        by_transformers=vocab is None and source.tree.get("model_type") == MODEL_TYPE,
        replaced_tokenizer=tokenizer or (layout.tokenizer() if layout else None),
    )
    return replace(opened, notes=(*notes, *vocabulary_notes(opened)))


def open_source(path: str | Path) -> tuple[SourceFolder, FolderLayout | None]:
    """A folder or file with a model and its layout, None for ours; no tensor is read."""
    path = Path(path)
    if (path / LATEST).exists() or (path / "checkpoints").is_dir():
        path = resolve(path)
    for layout in map(layout_of, registry.kinds("convert")):
        if (file := layout.open(path)) is not None:
            return file, layout(file)
    source = SourceFolder.open(path)
    return source, recognise(source)


def source_config(source: SourceFolder, layout: FolderLayout | None) -> Config:
    """Our config of a source; refused with the reason where our model cannot be one."""
    if layout is None:
        return load_config(source.folder)
    path = source.folder.resolve()
    name = path.stem if path.is_file() else path.name
    try:
        return layout.config(name[:200] or layout.kind)
    except AmorError as error:
        raise AmorError(f"{error} (of {layout.title})") from None


def recognise(source: SourceFolder) -> FolderLayout | None:
    """The layout of a folder, None for ours."""
    kinds = registry.kinds("convert")
    for layout in map(layout_of, kinds):
        if layout.recognises(source.tree):
            return layout(source)
    ours = {"pattern", "width", "vocab"} <= source.tree.keys()
    if ours or source.tree.get("model_type") == MODEL_TYPE:  # the second: ours in transformers
        return None
    path, model_type = source.folder / CONFIG, source.tree.get("model_type")
    if model_type is None:
        known = ", ".join(kind.replace("_", "-") for kind in kinds)
        raise AmorError(
            f"{path} names no model_type and is of no layout we know; read are amor, {known}"
        )
    name = str(model_type)[:80]
    types = filter(None, (layout_of(kind).model_type for kind in kinds))
    hint = nearest(name, (*types, MODEL_TYPE))
    raise AmorError(f"{path}: no model_type {name!r} is known; {hint}")


def converted(layout: FolderLayout) -> Amor:
    """A source as our model, every tensor in its place."""
    config = source_config(layout.source, layout)
    layout.check_files()
    tensors = layout.source.tensors()
    weights = layout.weights(tensors, config)
    tensors.finish(layout.unused)
    # each in its own memory: parts of one tensor, cut or split, would be saved as one
    return with_weights(config, {name: t.clone() for name, t in weights.items()})


def with_weights(config: Config, weights: dict[str, Tensor]) -> Amor:
    """A model of these very tensors."""
    with torch.device("meta"):
        model = Amor(config)
    model.load_state_dict(weights, assign=True)
    return model.eval()


def cut(model: Amor, vocab: int) -> Amor:
    """The same model with the first `vocab` tokens only."""
    if not 2 <= vocab <= model.config.vocab:
        raise AmorError(f"--vocab {vocab}: give 2 to {model.config.vocab}, the rows there are")
    weights = model.state_dict()
    for name in weights.keys() & {"embed.weight", "head.weight"}:
        weights[name] = weights[name][:vocab].clone()
    return with_weights(model.config.change(vocab=vocab), weights)


def vocabulary_notes(opened: Opened) -> list[str]:
    """Remarks on the tokenizer: that there is none, the tokens it puts before every text, and
    another size than that of the head."""
    tokenizer, rows, layout = opened.tokenizer(), opened.model.config.vocab, opened.layout
    if tokenizer is None:
        return [NO_TOKENIZER if layout is None else layout.no_tokenizer()]
    known, added = vocabulary(tokenizer), prefix_ids(tokenizer)
    notes = []
    if added:
        words = " ".join(str(tokenizer.id_to_token(token)) for token in added)
        ids = ", ".join(map(str, added))
        notes = [
            f"its tokenizer begins every text with {words} (token {ids}), and so do our commands"
        ]
    sizes = f"its tokenizer has {known:,} tokens and its head {rows:,} rows"
    if known > rows:
        notes.append(f"{sizes}: texts with a token of the difference cannot be read")
    if known < rows and layout is not None:
        advice = "" if layout.gated else f"; --vocab {known} cuts them off"
        notes.append(f"{sizes}: the others count in entropy and take probability{advice}")
    return notes
