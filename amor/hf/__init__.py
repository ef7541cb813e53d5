"""The face to transformers: importing it registers our models with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from amor.hf.cache import AmorCache
from amor.hf.config import AmorConfig
from amor.hf.folder import export
from amor.hf.model import AmorForCausalLM, AmorModel, AmorOutput
from amor.hf.training import GateStatistics

AutoConfig.register("amor", AmorConfig, exist_ok=True)
AutoModel.register(AmorConfig, AmorModel, exist_ok=True)
AutoModelForCausalLM.register(AmorConfig, AmorForCausalLM, exist_ok=True)

__all__ = ["AmorCache", "AmorConfig", "AmorForCausalLM", "AmorModel", "AmorOutput", "GateStatistics", "export"]
