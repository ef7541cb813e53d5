"""The door to vLLM: its plug-in loader finds `register` by the entry point `vllm.general_plugins` and calls it in every process.

Nothing here imports vLLM before that call, so the package can be installed where vLLM is not.
"""

ARCHITECTURE = "AmorForCausalLM"


def register() -> None:
    """Tell vLLM of our config, our model and what it cannot serve; may be called again."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import amor.hf  # noqa: F401  registers our config with transformers, which reads config.json for vLLM
    from amor.vllm.served import Served

    MODELS_CONFIG_MAP[ARCHITECTURE] = Served
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"amor.vllm.model:{ARCHITECTURE}")  # as words: imported where it is served
