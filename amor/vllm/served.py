"""Checks before vLLM builds a model: what it cannot serve is refused, settings are made right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import CompilationMode, CUDAGraphMode
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from amor.config import Config
from amor.errors import AmorError
from amor.mixers.attention import AttentionOptions
from amor.mixers.mamba2 import Mamba2Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = init_logger("vllm.amor")

# mixers made of vLLM's layers; any other runs by our operators
ITS_OWN = ("attention", "mamba2", "fused")
TAPS = (2, 3, 4)  # of a short convolution in vLLM's kernels


class Served(VerifyAndUpdateConfig):
    """vLLM calls it for every model of ours, in the process where it is started."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        config = vllm_config.model_config.hf_config.built
        refuse(config, vllm_config.parallel_config.tensor_parallel_size)
        if set(config.pattern) == {"attention"}:
            return
        cache, ours = vllm_config.cache_config, own_kind(config)
        if cache.mamba_ssm_cache_dtype == "auto":
            # as our own states: rounded ones drift over a long text
            cache.mamba_ssm_cache_dtype = "float32"
        if cache.enable_prefix_caching and (ours or current_platform.is_cpu()):
            cache.enable_prefix_caching = False
            why = (
                f"states of {ours} are not copied"
                if ours
                else "vLLM's Mamba2 on a CPU fails with it"
            )
            log.warning(
                "Prefix caching is off: %s. Say --no-enable-prefix-caching to silence this.", why
            )
        if ours:
            log.info("%s runs by amor's own operators, without torch.compile and CUDA graphs", ours)
            vllm_config.model_config.enforce_eager = True
            vllm_config.compilation_config.mode = CompilationMode.NONE
            vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE


def refuse(config: Config, ranks: int) -> None:
    """Raise for a model that this plug-in cannot serve, with the reason."""
    if config.blocks.count and config.blocks.gate == "oracle":
        raise AmorError(
            "the gate 'oracle' must be told the next token, which nobody knows while serving"
        )
    if config.blocks.count and config.blocks.gate == "varentropy":
        raise AmorError(
            "the gate 'varentropy' needs all logits of every token; vLLM's ranks hold parts of them"
        )
    scan = scans(config)
    if scan is not None and own_kind(config):
        kinds = f"mamba2 and {own_kind(config)}"
        raise AmorError(f"the pattern mixes {kinds}; vLLM keeps recurrent states of one shape")
    if scan is not None and scan.conv not in TAPS:
        taps = f"{TAPS[0]} to {TAPS[-1]}"
        raise AmorError(f"mamba2.conv is {scan.conv}; vLLM's convolutions take {taps} tokens")
    for what, count in shared_out(config).items():
        if count % ranks:
            raise AmorError(
                f"tensor_parallel_size {ranks} does not divide the model's {count} {what}"
            )
    if current_platform.is_cpu():
        _fit_cpu(config)


def _fit_cpu(config: Config) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    for kind, options in attentions(config).items():
        if options.head_size not in sizes:
            known = ", ".join(map(str, sizes))
            size = options.head_size
            raise AmorError(f"heads of {size} in {kind}; vLLM's attention on a CPU has {known}")


def own_kind(config: Config) -> str | None:
    """The mixer of the model that runs by our operators, None where vLLM has all of them."""
    kinds = sorted(set(config.pattern) - set(ITS_OWN))
    if len(kinds) > 1:
        both = " and ".join(kinds)
        raise AmorError(f"the pattern mixes {both}; vLLM keeps recurrent states of one shape")
    return kinds[0] if kinds else None


def scans(config: Config) -> Mamba2Options | None:
    """The shape of the model's Mamba2 layers; None where it has none."""
    shapes = [config.mixer_options("mamba2")] if "mamba2" in config.pattern else []
    shapes += [config.mixer_options("fused").mamba2] if "fused" in config.pattern else []
    if len(shapes) == 2 and shapes[0] != shapes[1]:
        raise AmorError(
            "mixers.mamba2 and mixers.fused have states of different shapes; "
            "vLLM keeps states of one shape"
        )
    return shapes[0] if shapes else None


def shared_out(config: Config) -> dict[str, int]:
    """Sizes that are split evenly over tensor parallel ranks."""
    counts: dict[str, int] = {"columns of an MLP": config.d_ff}
    scan = scans(config)
    if scan is not None:
        counts["Mamba2 heads"] = scan.expand * config.width // scan.head_size
        if scan.groups > 1:  # one group is copied to every rank
            counts["Mamba2 groups"] = scan.groups
    for kind, options in attentions(config).items():
        counts[f"heads of {kind}"] = (options.width or config.width) // options.head_size
    return counts


def attentions(config: Config) -> dict[str, AttentionOptions]:
    """The options of every kind of attention the model has."""
    options = {}
    if "attention" in config.pattern:
        options["attention layers"] = config.mixer_options("attention")
    if "fused" in config.pattern:
        options["fused attention"] = config.mixer_options("fused").attention(config.width)
    if config.blocks.count:
        options["gated blocks"] = AttentionOptions(
            config.blocks.head_size, config.blocks.rope_theta
        )
    return options
