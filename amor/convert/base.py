"""The contract of a layout: the meaning of its config.json, its names of our tensors, and what can
run the source.

A layout refuses what our skeleton cannot do, each thing with its reason, before a tensor is read.
Numbers are never changed: tensors are renamed, cut, joined or repeated. `outputs` runs the
published folder by its own library, or, where that cannot run here, by the recurrence written out;
every conversion ends with a comparison with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from amor.config import Config
from amor.convert.peer import run_by_transformers
from amor.convert.settings import Required, Settings, Sizes
from amor.convert.source import CONFIG, SourceFolder, SourceTensors
from amor.errors import AmorError
from amor.models.amor import Amor
from amor.tensors import WEIGHTS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT = 2048  # training length of published recurrent models, whose configs name none
NO_TOKENIZER = "no tokenizer.json lies there: text cannot be read or written until one does"
# config.json and tensors of a folder in another layout
Written = tuple[dict[str, Any], dict[str, Tensor]]


@dataclass(frozen=True)
class Outputs:
    """Outputs of a model for tokens [B, T], and what ran it.

    Attributes:
        logits: [B, T, V].
        by: the library or the written-out forward that computed them, for people.
        entropy: [K, B, T], divided by log V; None without gates that compare it.
        fire: [K, B, T] decisions of the gates; None as entropy.
        ties: decisions within rounding of a threshold, taken over from the other model.
    """

    logits: Tensor
    by: str
    entropy: Tensor | None = None
    fire: Tensor | None = None
    ties: int = 0


class FolderLayout:
    """How another library names and shapes a model in a folder; one subclass per layout.

    An object is one folder in that layout.

    Attributes:
        kind: the name of its file and, with "-" for "_", of `amor convert --to`.
        title: its name for people.
        model_type: that of its config.json; "" where it has none.
        sharded: whether `write` can split the weights into several files.
        gated: whether its models have gates, whose thresholds fix the size of the vocabulary.
        names: regular expressions in our tensor names -> theirs, applied in this order.
        unused: regular expressions of its tensors with nothing learned in them.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    model_type: ClassVar[str] = ""
    sharded: ClassVar[bool] = False
    gated: ClassVar[bool] = False
    names: ClassVar[Mapping[str, str]] = {}
    unused: ClassVar[tuple[str, ...]] = ()

    def __init__(self, source: SourceFolder):
        self.source = source

    @classmethod
    def open(cls, path: Path) -> SourceFolder | None:
        """The model at a path that is no folder with a config.json, if it is of this layout."""
        return None

    @classmethod
    def recognises(cls, tree: Mapping[str, Any]) -> bool:
        """Whether a config.json is of this layout; False for layouts without such a file."""
        return False

    def config(self, name: str) -> Config:
        """Our config of the source, or an AmorError with the reason why there is none."""
        raise NotImplementedError

    def outputs(self, tokens: Tensor, decided: Tensor | None = None) -> Outputs:
        """Outputs of the published folder for tokens [B, T], not by our model.

        decided [K, B, T]: gate decisions of the model it is compared with, to be taken over where
        an entropy is within rounding of a threshold.
        """
        raise NotImplementedError

    @classmethod
    def their_name(cls, name: str, config: Config) -> str:
        """The name in this layout of one of our tensors."""
        for ours, theirs in cls.names.items():
            name = re.sub(ours, theirs, name)
        return name

    def adapt(self, tensors: SourceTensors, config: Config) -> None:
        """Give tensors of another form than ours our form, in place, named by `their_name`."""

    def weights(self, tensors: SourceTensors, config: Config) -> dict[str, Tensor]:
        """All our tensors but those of gates, by name; what `tensors` is left with is unused.

        A head that is tied by config.json may be stored, but only as a copy of the embedding.
        """
        self.adapt(tensors, config)
        with torch.device("meta"):
            shapes = {name: t.shape for name, t in Amor(config).state_dict().items()}
        weights = {
            name: tensors.take(self.their_name(name, config), *shape)
            for name, shape in shapes.items()
            if ".gate." not in name
        }
        head, embed = self.their_name("head.weight", config), weights["embed.weight"]
        if head in tensors and not torch.equal(tensors.take(head, *embed.shape), embed):
            raise AmorError(
                f"{tensors.where}: the head is tied to the embedding by its {CONFIG}, "
                f"but {head} is another matrix"
            )
        return weights

    def check_files(self) -> None:
        """Refuse files that are not those that were published, before a tensor is read."""

    def notes(self) -> list[str]:
        """Remarks on this folder for the user, one line each."""
        return []

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of a source that has one, but no tokenizer.json."""
        return None

    def no_tokenizer(self) -> str:
        """The remark where the folder holds no tokenizer.json and the user named none."""
        return NO_TOKENIZER

    def keep(self) -> dict[str, str]:
        """Text files by name, written beside our model for the way back: what our config lacks."""
        return {}

    @classmethod
    def back(cls, config: Config, weights: dict[str, Tensor]) -> Written:
        """One of our models in this layout, or an AmorError with the reason why it has none."""
        raise AmorError("this layout is read, not written")

    @classmethod
    def write(
        cls,
        config: Config,
        weights: dict[str, Tensor],
        folder: Path,
        origin: Path,
        shard: int | None = None,
    ) -> list[str]:
        """Write one of our models, read from the folder `origin`; returns remarks.

        shard: most bytes of one weight file, for layouts that have shards.
        """
        from safetensors.torch import save_file

        tree, tensors = cls.back(config, weights)
        (folder / CONFIG).write_text(json.dumps(tree, indent=2) + "\n")
        contiguous = {name: t.contiguous() for name, t in tensors.items()}
        save_file(contiguous, folder / WEIGHTS, metadata={"format": "pt"})
        return []


class TransformersLayout(FolderLayout):
    """A layout whose config.json is that of a class of transformers.

    The same tables of keys read a config and write one.

    Attributes:
        architecture: the class of transformers that runs it.
        mixer: our mixer of every layer.
        mlp: whether layers have MLPs.
        layers: the default of its num_hidden_layers.
        norm_eps: its key of the norms' epsilon, and the default.
        sizes: keys of our config -> its key and default.
        options: options of our mixer -> its key and default.
        required: its keys -> the values that our model can have, and why no others.
    """

    architecture: ClassVar[str]
    mixer: ClassVar[str]
    mlp: ClassVar[bool] = True
    layers: ClassVar[int]
    norm_eps: ClassVar[tuple[str, float]]
    sizes: ClassVar[Sizes]
    options: ClassVar[Sizes] = {}
    required: ClassVar[Required]

    @classmethod
    def recognises(cls, tree: Mapping[str, Any]) -> bool:
        return tree.get("model_type") == cls.model_type

    def config_keys(self, s: Settings) -> dict[str, Any]:
        """The keys of our config that the tables name."""
        s.require(self.required)
        return {
            **s.counts(self.sizes),
            "pattern": f"{self.mixer} x{s.count('num_hidden_layers', self.layers)}",
            "norm_eps": s.real(*self.norm_eps),
            "tied": s.flag("tie_word_embeddings", False),
            "mixers": {self.mixer: s.counts(self.options)},
        }

    def outputs(self, tokens: Tensor, decided: Tensor | None = None) -> Outputs:
        out, by = run_by_transformers(self.source.folder, self.architecture, tokens)
        return Outputs(out.logits, by)

    @classmethod
    def their_tree(cls, config: Config) -> dict[str, Any]:
        """config.json of one of our models; a model of another form is refused.

        As far as the tables go: a subclass adds keys.
        """
        for problem in cls.differences(config):
            raise AmorError(f"{cls.title} has {problem}: use --to hf")
        options = config.mixer_options(cls.mixer)
        return {
            "model_type": cls.model_type,
            "architectures": [cls.architecture],
            "dtype": "float32",
            **{theirs: getattr(config, ours) for ours, (theirs, _) in cls.sizes.items()},
            "num_hidden_layers": len(config.pattern),
            **{theirs: getattr(options, ours) for ours, (theirs, _) in cls.options.items()},
            cls.norm_eps[0]: config.eps("mixer"),
            **{key: allowed[0] for key, (allowed, _) in cls.required.items() if allowed},
            "tie_word_embeddings": config.tied,
        }

    @classmethod
    def differences(cls, config: Config) -> list[str]:
        """What this layout has and a model of ours has not, or the other way round."""
        problems = []
        if others := sorted(set(config.pattern) - {cls.mixer}):
            problems.append(f"layers of {cls.mixer} alone; this model has {', '.join(others)} too")
        norms = ("mixer_norm", "mixer", "mlp_norm", "norm_f")
        if len({config.eps(norm) for norm in norms}) > 1:
            problems.append("one epsilon for all norms, this model has several (norm_eps_of)")
        if config.blocks.count:
            problems.append(f"no gated blocks, this model has {config.blocks.count}")
        if cls.mlp and not config.d_ff:
            problems.append("MLPs, this model has none (d_ff = 0)")
        if config.d_ff and not cls.mlp:
            problems.append(f"no MLPs, this model has MLPs of d_ff {config.d_ff}")
        return problems

    @classmethod
    def back(cls, config: Config, weights: dict[str, Tensor]) -> Written:
        tensors = {cls.their_name(name, config): t for name, t in weights.items()}
        return cls.their_tree(config), tensors
