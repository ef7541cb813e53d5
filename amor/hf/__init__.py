"""The face to transformers: importing it registers our models with the Auto classes."""

from transformers import AutoConfig

from amor.hf.config import AmorConfig

AutoConfig.register("amor", AmorConfig, exist_ok=True)

__all__ = ["AmorConfig"]
