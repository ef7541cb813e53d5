"""The paper's models as rows of a study: loss, firing rate and speed, at the scale at which it
tells all of them."""

from __future__ import annotations

from dataclasses import dataclass

from amor.study import paper
from amor.study.decode import paper_decode

SCALE = "1.5B"
TABLES = ("common_sense", "ablation_common_sense_1p5b")
# as the paper prints it -> our name
NAMES = {
    "Transformer": "transformer",
    "Mamba2": "mamba2",
    "Gated DeltaNet": "gated-deltanet",
    "Mamba2 Serial Hybrid": "mamba2-serial",
    "Gated DeltaNet Serial Hybrid": "gated-deltanet-serial",
    "Mamba2 Fused Hybrid": "mamba2-fused",
    "AMOR-Mamba2": "amor-mamba2",
    "AMOR-GatedDeltaNet": "amor-gated-deltanet",
    "AMOR (Block 0 pre-norm) Mamba2": "amor-mamba2-prenorm",
    "AMOR (Block 0 pre-norm) Gated DeltaNet": "amor-gated-deltanet-prenorm",
}


@dataclass(frozen=True)
class PaperModel:
    """One of the paper's models; None where the paper has no number."""

    perplexity: float
    fires: float | None  # greedy, after 3K tokens
    train: float | None  # tokens per second
    decode: float | None


def reported() -> dict[str, PaperModel]:
    """Our name -> what the paper reports."""
    decode, found = paper_decode(), {}
    for printed, values in paper.rows(TABLES, SCALE).items():
        name = NAMES[printed]
        speed = decode.throughput.get(name)
        found[name] = PaperModel(
            perplexity=values["fineweb_edu_ppl"],
            fires=decode.fire_rate.get(name, {}).get("T0/3K"),
            train=None if speed is None else 1000 * speed.train,
            decode=None if speed is None else speed.decode,
        )
    return found
