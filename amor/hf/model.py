"""Our models as models of transformers: one forward of ours behind their signature.

A model here has the modules of an `Amor` under the same names, so that weights are the same file
for both, and `core` is that Amor: whatever is done to a module of one (an adapter, a hook, a
device) is done to the other, for there is only one of it.
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

MODES = (
    *(GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
    *(GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE),
)
# cache_implementation -> whether memory for the longest text is allocated at once
CACHES = {None: 0, "dynamic": 0, "static": 1}


@dataclass
class AmorOutput(ModelOutput):
    """As transformers' output of a causal language model, and scores and decisions of the gates.

    Attributes:
        loss: mean negative log-likelihood of the targets in nats, with labels.
        logits: [B, T, V], or the columns of `logits_to_keep`; None with labels and without
            `logits_to_keep`, because a loss needs no logits in memory.
        last_hidden_state: [B, T, D], what the head reads; of AmorModel alone.
        past_key_values: the cache to continue from; None where `use_cache` is False.
        gate_scores: per gated block the score [B, T] that is compared with its threshold.
        gate_fires: per gated block whether attention ran, [B, T]; None without blocks, as scores.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    past_key_values: AmorCache | None = None
    gate_scores: tuple[Tensor, ...] | None = None
    gate_fires: tuple[Tensor, ...] | None = None


class AmorPreTrainedModel(PreTrainedModel):
    """What both models share: `core`, folders, one call of the core.

    Attributes:
        gates_follow: whether thresholds follow training, which amor.hf.GateStatistics sets to
            True. None: undecided, so that training warns once; False: they shall stay.
    """

    config: AmorConfig
    config_class = AmorConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # Trainer: forward takes num_items_in_batch
    gates_follow: bool | None = None
    _is_stateful = True
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012 (as transformers declares it)

    def __init__(self, config: AmorConfig):
        super().__init__(config)
        self.gradient_checkpointing = False
        self._hold(Amor(config.built))
        names = float32_names(self.core)
        self._keep_in_fp32_modules_strict = {rf"^{re.escape(name)}$" for name in names}
        self.post_init()

    def _hold(self, core: Amor) -> None:
        """Wrap this model; the dict of modules is shared, so that a replaced module is in both."""
        self._modules = core._modules
        self._core = (core,)  # in a tuple, so that torch does not count its modules a second time

    @property
    def core(self) -> Amor:
        """The model itself."""
        return self._core[0]

    @classmethod
    def of(cls, model: Amor) -> Any:
        """A model in memory as a model of transformers: the same modules and weights."""
        with torch.device("meta"):
            wrapped = cls(AmorConfig.of(model.config))
        wrapped._hold(model)
        return wrapped if model.training else wrapped.eval()

    def init_weights(self) -> None:
        """Fresh weights by our rule, drawn from torch's generator."""
        if not self.embed.weight.is_meta:
            initialise(self.core, int(torch.randint(2**31, (1,))))

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: transformers calls it for tensors that a folder lacks, which are refused."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **more: Any) -> Any:
        """As transformers', but a missing, extra, misshapen or not finite tensor is an error."""
        path = pretrained_model_name_or_path
        return on_disk.load_strictly(super().from_pretrained, path, *args, **more)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **more: Any
    ) -> None:
        """As transformers', with a model card and what `trust_remote_code` needs."""
        on_disk.save_with_card(self, super().save_pretrained, save_directory, *args, **more)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding [V, D]."""
        return self.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding."""
        self.embed = value

    def get_output_embeddings(self) -> nn.Module:
        """The head [V, D]; the embedding where it is tied."""
        tied = self.core.config.tied
        return self.core.embed if tied else self.core.get_submodule("head")

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **more: Any
    ) -> nn.Embedding:
        """The embedding as it is; another size is refused."""
        if new_num_tokens in (None, self.core.config.vocab):
            return self.core.embed
        raise AmorError(
            f"a vocabulary of {new_num_tokens} tokens: this model's has {self.core.config.vocab}, "
            "and entropies of its gates are measured against that size; "
            "train a model with the vocabulary it needs"
        )

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **more: Any) -> None:
        """Layers are computed again in the backward pass; gates decide in the forward pass only."""
        self.gradient_checkpointing = self.core.backbone.recompute = enable

    def _read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: AmorCache | None,
        use_cache: bool | None,
        inputs_embeds: Tensor | None,
        **more: Any,
    ) -> tuple[Output, AmorCache | None]:
        """One call of the core, and the cache after it; more: arguments of Amor."""
        if self.core.config.tied and not isinstance(self.core.embed, nn.Embedding):
            raise AmorError(
                f"the embedding was replaced by a {type(self.core.embed).__name__}: the tied head "
                "reads its weight alone and would ignore it; "
                "leave `embed` out of an adapter's targets"
            )
        read = inputs.tokens(input_ids, inputs_embeds)
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
        out = self.core(read, state, valid=valid, reset=reset, **more)
        if cache is not None:
            cache.take(out.state, read.shape[1])
        return out, cache

    def _output(
        self, return_dict: bool | None, out: Output, cache: AmorCache | None, **tensors: Any
    ) -> Any:
        output = AmorOutput(
            past_key_values=cache,
            gate_scores=tuple(gate.score for gate in out.gates) or None,
            gate_fires=tuple(gate.fire for gate in out.gates) or None,
            **tensors,
        )
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()


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
        """The vectors that the head reads; arguments as those of AmorForCausalLM.forward."""
        inputs.refuse(output_attentions, output_hidden_states)
        out, cache = self._read(
            input_ids, attention_mask, position_ids, past_key_values, use_cache, inputs_embeds
        )
        return self._output(return_dict, out, cache, last_hidden_state=out.hidden)


class AmorForCausalLM(AmorPreTrainedModel, GenerationMixin):
    """The model as generate(), Trainer, PEFT and lm-evaluation-harness use one."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: AmorCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> AmorOutput | tuple[Any, ...]:
        """Logits or loss of a batch, the gates' scores and decisions, and the cache after it.

        Args:
            input_ids: tokens [B, T].
            attention_mask: [B, T] of this call or of the whole text so far; 0 at pads, which may
                be on either side.
            position_ids: only checked. Where they restart at 0 a packed document begins.
            past_key_values: the cache of the call before, which this call changes.
            inputs_embeds, output_attentions, output_hidden_states: refused.
            labels: [B, T] the tokens again, -100 where none is scored; shifted here.
            use_cache: whether to return a cache; None: as in the config, and never in training.
            return_dict: False for a tuple; None: as in the config.
            logits_to_keep: how many last columns, 0 for all, or which ones; None: all, or none
                with labels. With 1 it is each row's last real token.
            num_items_in_batch: the loss is the sum over targets divided by it, as Trainer wants
                with gradient accumulation; None: divided by the number of targets.
        """
        inputs.refuse(output_attentions, output_hidden_states)
        more: dict[str, Any] = {}
        if labels is not None:
            more["targets"] = inputs.next_tokens(labels.long())
            more["target_weight"] = None if num_items_in_batch is None else 1 / num_items_in_batch
        elif isinstance(logits_to_keep, int) and logits_to_keep == 1:
            # of each row the last real token, so that a text may be padded on either side
            more["keep"] = "last"
        out, cache = self._read(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            use_cache,
            inputs_embeds,
            **more,
        )
        logits = None
        if labels is None or logits_to_keep is not None:
            columns = 0 if logits_to_keep is None else logits_to_keep
            logits = self.core.logits(select_columns(out.hidden, columns))
        return self._output(return_dict, out, cache, loss=out.loss, logits=logits)

    def _validate_generation_mode(self, generation_mode: Any, *args: Any, **more: Any) -> None:
        check_mode(generation_mode)
        super()._validate_generation_mode(generation_mode, *args, **more)  # type: ignore[misc]

    def _get_deprecated_gen_repo(self, generation_mode: Any, *args: Any, **more: Any) -> str | None:
        check_mode(generation_mode)  # before transformers offers to load code for it from elsewhere
        return super()._get_deprecated_gen_repo(generation_mode, *args, **more)

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        cache = inputs.cache(model_kwargs.get("past_key_values"))
        kind = generation_config.cache_implementation
        if kind not in CACHES:
            raise AmorError(
                f"cache_implementation={kind!r}: no such cache here; "
                "leave it out, or give 'static' to allocate memory at once"
            )
        if cache is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = AmorCache(capacity=CACHES[kind] * max_cache_length)

    def generate_batch(self, *args: Any, **more: Any) -> Any:
        """Refused."""
        raise AmorError(
            "continuous batching of transformers is for attention only; "
            "amor.generate_batch writes many texts at once"
        )


def check_mode(mode: GenerationMode) -> None:
    """Refuse ways of decoding that take tokens back, or that are untested."""
    if mode not in MODES:
        raise AmorError(
            f"generate: {mode.value.replace('_', ' ')} is not for these models: "
            "a recurrent state cannot run backwards, "
            "and nobody has tried the rest; use greedy, sampling or beam search"
        )


def select_columns(hidden: Tensor, which: int | Tensor) -> Tensor:
    """The last columns of hidden [B, T, D] (0: all), or those of a list."""
    return hidden[:, -which:] if isinstance(which, int) else hidden[:, which]


def float32_names(model: Amor) -> list[str]:
    """Tensors that stay in float32 when a model is loaded in 16 bits.

    These are statistics of gates, and decays and steps of recurrences.
    """
    names = [name for name, _ in model.named_parameters() if name.rpartition(".")[2] in FLOAT32]
    return names + [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]


def warn_of_gates(model: AmorPreTrainedModel) -> None:
    """Warn of training in which no callback updates the gates."""
    adaptive = any(isinstance(block.gate, Adaptive) for block in model.core.each_block())
    if adaptive and model.gates_follow is None:
        logger.warning_once(
            "the gates of this model keep the thresholds they have, for nothing updates them in "
            "training: give Trainer callbacks=[amor.hf.GateStatistics()], "
            "or set model.gates_follow = False if that is meant"
        )
