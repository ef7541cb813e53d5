"""Our models in transformers: importing this registers them with its Auto classes."""

import importlib.util

from amor.errors import AmorError, install_hint

if importlib.util.find_spec("transformers") is None:
    raise AmorError(f"amor.hf needs transformers, which is not installed: {install_hint('hf')}")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from amor.hf.cache import AmorCache
from amor.hf.config import AmorConfig
from amor.hf.folder import export
from amor.hf.model import AmorForCausalLM, AmorModel, AmorOutput
from amor.hf.training import GateStatistics

AutoConfig.register("amor", AmorConfig, exist_ok=True)
AutoModel.register(AmorConfig, AmorModel, exist_ok=True)
AutoModelForCausalLM.register(AmorConfig, AmorForCausalLM, exist_ok=True)

__all__ = [
    "AmorCache",
    "AmorConfig",
    "AmorForCausalLM",
    "AmorModel",
    "AmorOutput",
    "GateStatistics",
    "export",
]
