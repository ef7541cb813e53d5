"""The door to vLLM: its plug-in loader finds `register` by the entry point `vllm.general_plugins`
and calls it in every process.

Nothing here imports vLLM before that call, so the package can be installed where vLLM is not.
"""

ARCHITECTURE = "AmorForCausalLM"  # in config.json of a folder
MODEL = "amor.vllm.model:VllmAmorForCausalLM"  # a string: imported in the process that serves it


def register() -> None:
    """Register our config, our model and its restrictions with vLLM; may be called again."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    # registers our config with transformers, which reads config.json for vLLM
    import amor.hf  # noqa: F401
    from amor.vllm.served import Served

    MODELS_CONFIG_MAP[ARCHITECTURE] = Served
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, MODEL)
