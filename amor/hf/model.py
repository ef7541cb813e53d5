"""The models as transformers knows models: one forward of ours behind their signature.

A model here has the modules of an `Amor` under the same names, so that weights are the same file for both, and `core` is that
Amor: whatever is done to a module of one (an adapter, a hook, a device) is done to the other, for there is only one of it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import ModelOutput
from transformers.utils import logging

from amor.errors import AmorError
from amor.gates.base import Adaptive
from amor.hf import folder as on_disk
from amor.hf import inputs
from amor.hf.cache import AmorCache
from amor.hf.config import AmorConfig
from amor.models.amor import Amor, Output
from amor.models.build import initialise
from amor.models.folder import FLOAT32

logger = logging.get_logger(__name__)

WAYS = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
CACHES = {None: 0, "dynamic": 0, "static": 1}  # whether room for the longest text is made at once


@dataclass
class AmorOutput(ModelOutput):
    """As transformers' output of a causal language model, and what the gates did, a tensor a block."""

    loss: Tensor | None = None
    logits: Tensor | None = None  # [B, T, V], or the columns asked for; None beside a loss unless asked for
    last_hidden_state: Tensor | None = None  # [B, T, D], of AmorModel
    past_key_values: AmorCache | None = None
    gate_scores: tuple[Tensor, ...] | None = None  # [B, T] each
    gate_fires: tuple[Tensor, ...] | None = None


class AmorPreTrainedModel(PreTrainedModel):
    config: AmorConfig
    config_class = AmorConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # Trainer: forward takes num_items_in_batch
    gates_follow: bool | None = None  # whether thresholds follow training (amor.hf.GateStatistics); None: nobody has said
    _is_stateful = True
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012 (as transformers declares it)

    def __init__(self, config: AmorConfig):
        super().__init__(config)
        self.gradient_checkpointing = False
        self._hold(Amor(config.built))
        self._keep_in_fp32_modules_strict = {rf"^{re.escape(name)}$" for name in float32_names(self.core)}
        self.post_init()

    def _hold(self, core: Amor) -> None:
        """Be the face of this model. Its dict of modules is shared: a module replaced here is replaced there."""
        self._modules = core._modules
        self._core = (core,)  # in a tuple, so that torch does not count its modules a second time

    @property
    def core(self) -> Amor:
        """The model itself."""
        return self._core[0]

    @classmethod
    def of(cls, model: Amor) -> Any:
        """The face of a model in memory, which stays the same model: same modules, same weights."""
        with torch.device("meta"):
            face = cls(AmorConfig.of(model.config))
        face._hold(model)
        return face.eval() if not model.training else face

    def init_weights(self) -> None:
        """Fresh weights by our rule, drawn from torch's generator."""
        if not self.embed.weight.is_meta:
            initialise(self.core, int(torch.randint(2**31, (1,))))

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: transformers calls it for tensors that a folder lacks, and a folder that lacks one is refused."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **more: Any) -> Any:
        """As transformers', but a tensor that is missing, extra, misshapen or not finite is an error."""
        return on_disk.loaded(super().from_pretrained, pretrained_model_name_or_path, *args, **more)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **more: Any) -> None:
        """As transformers', with a model card and what `trust_remote_code` needs."""
        on_disk.saved(self, super().save_pretrained, save_directory, *args, **more)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed = value

    def get_output_embeddings(self) -> nn.Module:
        return self.core.embed if self.config.tie_word_embeddings else self.core.get_submodule("head")

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **more: Any) -> nn.Embedding:
        if new_num_tokens in (None, self.config.vocab_size):
            return self.core.embed
        raise AmorError(
            f"a vocabulary of {new_num_tokens} tokens: this model's has {self.config.vocab_size}, and entropies of its gates "
            "are measured against that size; train a model with the vocabulary it needs"
        )

    def _set_gradient_checkpointing(self, enable: bool = True, *given: Any, **more: Any) -> None:
        """Layers of the backbone are computed again in the backward pass; gates decide once, in the forward pass."""
        self.gradient_checkpointing = self.core.backbone.recompute = enable

    def _read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: AmorCache | None,
        use_cache: bool | None,
        **ways: Any,
    ) -> tuple[Output, AmorCache | None]:
        """One call of the model, and the cache after it."""
        if self.config.tie_word_embeddings and not isinstance(self.core.embed, nn.Embedding):
            raise AmorError(
                f"the embedding was replaced by a {type(self.core.embed).__name__}: the tied head reads its weight alone "
                "and would not hear it; leave `embed` out of an adapter's targets"
            )
        read = inputs.tokens(input_ids, ways.pop("inputs_embeds"))
        cache = inputs.cache(past_key_values)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if cache is None and use_cache:
            cache = AmorCache()
        valid = inputs.real(attention_mask, read, cache)
        reset = inputs.documents(position_ids, read, valid, cache)
        state = None if cache is None else cache.state
        if cache is not None and state is None:
            state = cache.begin(self.core.start(len(read)))
        if self.training and torch.is_grad_enabled():
            warn_of_gates(self)
        out = self.core(read, state, valid=valid, reset=reset, **ways)
        if cache is not None:
            cache.take(out.state, read.shape[1])
        return out, cache

    def _answer(self, return_dict: bool | None, out: Output, cache: AmorCache | None, **found: Any) -> Any:
        scores, fires = tuple(g.score for g in out.gates), tuple(g.fire for g in out.gates)
        answer = AmorOutput(past_key_values=cache, gate_scores=scores or None, gate_fires=fires or None, **found)
        return answer if (self.config.return_dict if return_dict is None else return_dict) else answer.to_tuple()


class AmorModel(AmorPreTrainedModel):
    """The model without its head's logits: `last_hidden_state` is what the head reads."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: AmorCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> AmorOutput | tuple[Any, ...]:
        inputs.refuse(output_attentions=output_attentions, output_hidden_states=output_hidden_states)
        out, cache = self._read(input_ids, attention_mask, position_ids, past_key_values, use_cache, inputs_embeds=inputs_embeds)
        return self._answer(return_dict, out, cache, last_hidden_state=out.hidden)


class AmorForCausalLM(AmorPreTrainedModel, GenerationMixin):
    """The model as generate(), Trainer, PEFT and lm-evaluation-harness want one."""

    def forward(
        self,
        input_ids: Tensor | None = None,  # [B, T]
        attention_mask: Tensor | None = None,  # [B, T], or of the whole text so far; 0 at pads, wherever they are
        position_ids: Tensor | None = None,  # checked; where they restart at 0, a packed document begins
        past_key_values: AmorCache | None = None,
        inputs_embeds: Tensor | None = None,  # refused
        labels: Tensor | None = None,  # [B, T] the tokens again, -100 where none is scored
        use_cache: bool | None = None,
        output_attentions: bool | None = None,  # refused
        output_hidden_states: bool | None = None,  # refused
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor | None = None,  # last columns, 0 for all; None: all, or none beside a loss
        num_items_in_batch: Tensor | int | None = None,  # the loss is the sum over targets by this number, or else their mean
    ) -> AmorOutput | tuple[Any, ...]:
        inputs.refuse(output_attentions=output_attentions, output_hidden_states=output_hidden_states)
        ways: dict[str, Any] = {"inputs_embeds": inputs_embeds}
        if labels is not None:
            ways["targets"] = inputs.next_tokens(labels.long())
            ways["target_weight"] = None if num_items_in_batch is None else 1 / num_items_in_batch
        elif isinstance(logits_to_keep, int) and logits_to_keep == 1:
            ways["keep"] = "last"  # of each row the last real token, so that a text may be padded on either side
        out, cache = self._read(input_ids, attention_mask, position_ids, past_key_values, use_cache, **ways)
        logits = None
        if labels is None or logits_to_keep is not None:
            logits = self.core.logits(kept(out.hidden, 0 if logits_to_keep is None else logits_to_keep))
        return self._answer(return_dict, out, cache, loss=out.loss, logits=logits)

    def _validate_generation_mode(self, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any) -> None:
        only_forwards(generation_mode)
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)  # type: ignore[misc]

    def _get_deprecated_gen_repo(self, generation_mode: Any, *given: Any, **more: Any) -> str | None:
        only_forwards(generation_mode)  # before transformers offers to load code for it from elsewhere
        return super()._get_deprecated_gen_repo(generation_mode, *given, **more)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> Any:
        given, kind = inputs.cache(model_kwargs.get("past_key_values")), generation_config.cache_implementation
        if kind not in CACHES:
            raise AmorError(
                f"cache_implementation={kind!r}: no such cache here; leave it out, or give 'static' to make room at once"
            )
        if given is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = AmorCache(room=CACHES[kind] * max_cache_length)

    def generate_batch(self, *given: Any, **more: Any) -> Any:
        raise AmorError("continuous batching of transformers knows attention only; amor.generate_batch writes many texts at once")


def only_forwards(mode: GenerationMode) -> None:
    if mode not in WAYS:
        raise AmorError(
            f"generate: {mode.value.replace('_', ' ')} is not for these models: a recurrent state cannot run backwards, "
            "and nobody has tried the rest; use greedy, sampling or beam search"
        )


def kept(hidden: Tensor, which: int | Tensor) -> Tensor:
    """The columns whose logits are asked for: the last ones (0: all), or those of a list."""
    return hidden[:, -which:] if isinstance(which, int) else hidden[:, which]


def float32_names(model: Amor) -> list[str]:
    """Numbers that stay in float32 when a model is loaded in 16 bits: statistics of gates, decays and steps of recurrences."""
    parameters = [name for name, _ in model.named_parameters() if name.rpartition(".")[2] in FLOAT32]
    return parameters + [name for name, held in model.named_buffers() if held.is_floating_point()]


def warn_of_gates(model: AmorPreTrainedModel) -> None:
    """Training without anyone who lets the gates follow it is worth a word."""
    adaptive = any(isinstance(block.gate, Adaptive) for block in model.core.each_block())
    if adaptive and model.gates_follow is None:
        logger.warning_once(
            "the gates of this model keep the thresholds they have, for nothing tells them what training meets: "
            "give Trainer callbacks=[amor.hf.GateStatistics()], or say model.gates_follow = False if that is meant"
        )
