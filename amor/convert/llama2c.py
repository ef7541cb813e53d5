"""llama2.c's first format: one file of a header and float32 tensors, and its tokenizer file.

    header      7 int32: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len
                (vocab_size is negative where the head has weights of its own)
    tensors     those of `Llama2cFile.parts`, in that order, each for all layers together
    tokenizer   int32 longest piece, then per token: float32 score, int32 bytes, UTF-8 text

The tokenizer is `tokenizer.bin` beside the weights, or follows them in the same file. Rotary
positions turn neighbouring numbers (2i, 2i + 1) where ours turn (i, i + size / 2), so that rows of
queries and keys are reordered.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from amor.config import Config
from amor.convert.base import FolderLayout, Outputs
from amor.convert.llama import repeat_heads
from amor.convert.settings import Settings
from amor.convert.source import CONFIG, SourceFolder, SourceTensors
from amor.convert.written import below, causal, double, norm
from amor.errors import AmorError
from amor.tensors import check_finite

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SUFFIXES, TOKENIZER_FILE = (".bin", ".data"), "tokenizer.bin"
HEADER = struct.Struct("<7i")
FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
MAGIC = 0x616B3432  # the first number of llama2.c's later formats
LARGEST = 2**24  # no number of a header is larger; the first bytes of a zip or a text are
EPS, THETA = 1e-5, 10_000.0  # constants of llama2.c
SPECIAL = ("<unk>", "<s>", "</s>")  # tokens 0, 1 and 2
FIRST_BYTE, FIRST_PIECE = 3, 259  # tokens 3 to 258 are the 256 bytes
WORST_SCORE = -1e10  # pairs are merged into pieces of a better score only


@dataclass(frozen=True)
class Llama2cFile(SourceFolder):
    """A checkpoint of llama2.c; `folder` is the path that was given, `tree` the header by name."""

    path: Path  # of the file with the weights

    @property
    def parts(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the tensors in the order of the file; those with a dot are stored
        for all layers together."""
        dim, hidden, layers, heads, kv_heads, vocab, length = (self.tree[key] for key in FIELDS)
        kv, angles = dim // heads * kv_heads, (length, dim // heads // 2)
        return [
            ("token_embedding_table", (abs(vocab), dim)),
            *(("layers.rms_att_weight", (layers, dim)), ("layers.wq", (layers, dim, dim))),
            *(("layers.wk", (layers, kv, dim)), ("layers.wv", (layers, kv, dim))),
            *(("layers.wo", (layers, dim, dim)), ("layers.rms_ffn_weight", (layers, dim))),
            *(("layers.w1", (layers, hidden, dim)), ("layers.w2", (layers, dim, hidden))),
            *(("layers.w3", (layers, hidden, dim)), ("rms_final_weight", (dim,))),
            *(("freq_cis_real", angles), ("freq_cis_imag", angles)),
            *([("wcls", (-vocab, dim))] if vocab < 0 else []),
        ]

    @property
    def size(self) -> int:
        """Bytes of header and tensors; a tokenizer may follow them."""
        return HEADER.size + 4 * sum(math.prod(shape) for _, shape in self.parts)

    def settings(self) -> Settings:
        """The header; the size of the vocabulary without its sign."""
        tree = self.tree | {"vocab_size": abs(self.tree["vocab_size"])}
        return Settings(tree, str(self.path))

    def tensors(self) -> SourceTensors:
        """Tensors by llama2.c's names, those of layer i as layers.i.NAME."""
        numbers = torch.from_numpy(np.fromfile(self.path, "<f4", self.size // 4)[len(FIELDS) :])
        sizes = [math.prod(shape) for _, shape in self.parts]
        tensors: dict[str, Tensor] = {}
        for (name, shape), t in zip(self.parts, numbers.split(sizes), strict=True):
            every, _, inside = name.partition(".")
            layers = enumerate(t.view(shape)) if inside else ()
            tensors |= {f"layers.{i}.{inside}": one for i, one in layers} or {every: t.view(shape)}
        check_finite(tensors, self.path)
        return SourceTensors(tensors, str(self.path))


class Llama2c(FolderLayout):
    """A Llama in the first format of llama2.c."""

    kind = "llama2c"
    title = "llama2.c's Llama"
    unused = ("freq_cis_real", "freq_cis_imag")  # computed from THETA
    names: ClassVar[Mapping[str, str]] = {
        r"^embed\.weight": "token_embedding_table",
        r"^head\.weight": "wcls",
        r"^norm_f\.weight": "rms_final_weight",
        r"^backbone\.": "",
        r"\bmixer_norm\.weight": "rms_att_weight",
        r"\bmlp_norm\.weight": "rms_ffn_weight",
        r"\bmixer\.([qkvo])_proj\.weight": r"w\1",
        r"\bmlp\.gate_proj\.weight": "w1",
        r"\bmlp\.down_proj\.weight": "w2",
        r"\bmlp\.up_proj\.weight": "w3",
    }
    source: Llama2cFile

    @classmethod
    def open(cls, path: Path) -> Llama2cFile | None:
        if path.is_file() and path.suffix in SUFFIXES:
            return read_header(path, path)
        if not path.is_dir() or (path / CONFIG).exists():
            return None
        files = [p for p in sorted(path.iterdir()) if p.suffix in SUFFIXES and p.is_file()]
        files = [p for p in files if p.name != TOKENIZER_FILE]
        if len(files) > 1:
            names = ", ".join(p.name for p in files)[:200]
            raise AmorError(
                f"{path} holds no {CONFIG} and several files of weights: name one of {names}"
            )
        return read_header(files[0], path) if files else None

    def config(self, name: str) -> Config:
        s = self.source.settings()
        width, heads = s.count("dim"), s.count("n_heads")
        keys = {
            "name": name,
            "vocab": s.count("vocab_size"),
            "width": width,
            "d_ff": s.count("hidden_dim"),
            "pattern": f"attention x{s.count('n_layers')}",
            "context": s.count("seq_len"),
            "norm_eps": EPS,
            "tied": self.source.tree["vocab_size"] > 0,
            "mixers": {"attention": {"head_size": width // heads, "rope_theta": THETA}},
        }
        return Config.from_dict(keys, s.where)

    def adapt(self, tensors: SourceTensors, config: Config) -> None:
        heads, shared = self.source.tree["n_heads"], self.source.tree["n_kv_heads"]
        size = config.width // heads
        real, imaginary = (tensors.take(n, config.context, size // 2) for n in self.unused)
        theirs = torch.complex(real.double(), imaginary.double())
        if not torch.allclose(theirs, turns(config.context, size), rtol=0, atol=1e-3):
            raise AmorError(f"{tensors.where}: its rotary positions are not of base {THETA:g}")
        for i in range(len(config.pattern)):
            for n, count in (("q", heads), ("k", shared), ("v", shared)):
                t = tensors.take(f"layers.{i}.w{n}", count * size, config.width)
                t = t if n == "v" else halves(t, count)
                tensors.remaining[f"layers.{i}.w{n}"] = repeat_heads(t, count, heads)

    @torch.no_grad()
    def outputs(self, tokens: Tensor, decided: Tensor | None = None) -> Outputs:
        tree = self.source.tree
        w = double(self.source.tensors().remaining)
        x = w["token_embedding_table"][tokens]
        for i in range(tree["n_layers"]):
            layer = below(w, f"layers.{i}")
            y = norm(x, layer["rms_att_weight"], EPS)
            x = x + attention(y, layer, tree["n_heads"], tree["n_kv_heads"])
            y = norm(x, layer["rms_ffn_weight"], EPS)
            x = x + (F.silu(y @ layer["w1"].T) * (y @ layer["w3"].T)) @ layer["w2"].T
        head = w.get("wcls", w["token_embedding_table"])
        logits = norm(x, w["rms_final_weight"], EPS) @ head.T
        return Outputs(logits, "llama2.c's forward written out in float64")

    def tokenizer(self) -> Tokenizer | None:
        path = self.source.path
        beside, data = path.with_name(TOKENIZER_FILE), path.read_bytes()[self.source.size :]
        if not data and not beside.is_file():
            return None
        where = str(path if data else beside)
        count = abs(self.source.tree["vocab_size"])
        return bpe(read_pieces(data or beside.read_bytes(), count, where), where)


def read_header(path: Path, given: Path) -> Llama2cFile:
    """The checkpoint of a file, whose size fits its header; `given`: the path the user named."""
    with path.open("rb") as file:
        start = file.read(HEADER.size)
    numbers = HEADER.unpack(start.ljust(HEADER.size, b"\0"))
    if numbers[0] == MAGIC:
        raise AmorError(
            f"{path} is of version {numbers[1]} of llama2.c's formats; the first is read, which "
            "export.py --version 0 writes"
        )
    source = Llama2cFile(given, dict(zip(FIELDS, numbers, strict=True)), path)
    dim, _, _, heads, kv_heads, vocab, _ = numbers
    whole = min(*numbers[:5], abs(vocab), numbers[6]) > 0 and max(map(abs, numbers)) <= LARGEST
    if not whole or dim % (2 * heads) or heads % kv_heads:
        raise AmorError(
            f"{path} is not of llama2.c's first format, which begins with seven sizes; "
            f"of a model with a {CONFIG} give the folder"
        )
    if (size := path.stat().st_size) < source.size:
        raise AmorError(
            f"{path} has {size:,} bytes, less than the {source.size:,} of its header; "
            "it may be cut short, copy it again"
        )
    return source


def turns(length: int, size: int) -> Tensor:
    """Complex numbers [length, size / 2] that turn pair i at position t by t THETA^(-2i / size)."""
    rates = THETA ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.polar(torch.ones_like(angle), angle)


def halves(t: Tensor, heads: int) -> Tensor:
    """Rows (0, 1, 2, 3, ...) of every head in the order (0, 2, ..., 1, 3, ...)."""
    return t.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def attention(x: Tensor, w: Mapping[str, Tensor], heads: int, shared: int) -> Tensor:
    """Causal attention over x [B, T, D]; heads / shared heads of queries read one of keys."""
    q, k, v = (
        (x @ w[f"w{n}"].T).unflatten(-1, (count, -1)).transpose(1, 2)
        for n, count in (("q", heads), ("k", shared), ("v", shared))
    )
    turn = turns(x.shape[1], q.shape[-1])
    q, k = (
        torch.view_as_real(
            torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * turn
        ).flatten(-2)
        for t in (q, k)
    )
    k, v = (t.repeat_interleave(heads // shared, dim=1) for t in (k, v))
    return causal(q, k, v) @ w["wo"].T


def read_pieces(data: bytes, count: int, where: str) -> list[tuple[str, float]]:
    """The text and the score of every token."""
    pieces, at = [], 4
    try:
        for _ in range(count):
            score, size = struct.unpack_from("<fi", data, at)
            at += 8 + size
            pieces.append((data[at - size : at].decode("utf-8"), score))
            if size < 0 or not math.isfinite(score):
                raise ValueError
    except (struct.error, ValueError):
        raise AmorError(
            f"{where}: token {len(pieces)} of its tokenizer cannot be read; copy it again"
        ) from None
    if at != len(data):
        raise AmorError(
            f"{where}: its tokenizer has {len(data):,} bytes, and {at:,} are those of the model's "
            f"{count:,} tokens; they do not belong together"
        )
    return pieces


def bpe(pieces: Sequence[tuple[str, float]], where: str) -> Tokenizer:
    """llama2.c's encoder as a tokenizer.json.

    A text begins with <s> and a space; a character that is no piece becomes its bytes. Then the
    neighbours that form the piece of the best score are merged, the leftmost of equal ones first,
    until no two form a piece. A tokenizer.json has an order of pairs instead of scores: of equal
    scores the longest pieces come first, because what was merged at the left so far is longest.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    if len(pieces) < FIRST_PIECE or any(
        text not in (chr(byte), f"<0x{byte:02X}>")
        for byte, (text, _) in enumerate(pieces[FIRST_BYTE:FIRST_PIECE])
    ):
        raise AmorError(
            f"{where}: tokens {FIRST_BYTE} to {FIRST_PIECE - 1} of its tokenizer are not the "
            "256 bytes"
        )
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = dict(pieces[FIRST_PIECE:])
    vocab = {
        name: i for i, name in enumerate([*names, *(text for text, _ in pieces[FIRST_PIECE:])])
    }
    if len(vocab) < len(pieces):
        raise AmorError(f"{where}: two tokens of its tokenizer are the same text")
    merges = [
        (-score, -len(text), -cut, text[:cut], text[cut:])
        for text, score in scores.items()
        for cut in range(1, len(text))
        if score > WORST_SCORE and text[:cut] in scores and text[cut:] in scores
    ]
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab, pairs, unk_token=SPECIAL[0], fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[1]} $A", special_tokens=[(SPECIAL[1], 1)]
    )
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
