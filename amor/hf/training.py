"""Gates that follow training by transformers' Trainer, as they follow ours: once per optimiser
step, over all its tokens.

    trainer = Trainer(model, ..., callbacks=[amor.hf.GateStatistics()])

Without it gates keep the numbers they have. In a loop of one's own: attach(model) before it, step()
after every optimiser step, detach() at the end.

In the first step of a model whose gates have no statistics yet, every micro-batch is first read
without gradient, so that its gates can decide; after the step they hold the statistics of all its
micro-batches together, as in amor/train/step.py.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.utils import logging

from amor.errors import AmorError
from amor.gates.base import lacks_statistics
from amor.hf import inputs
from amor.hf.model import AmorOutput, AmorPreTrainedModel
from amor.models.amor import Amor

logger = logging.get_logger(__name__)


class GateStatistics(TrainerCallback):
    """Collects the scores of the gates in training, and updates the gates after every step."""

    def __init__(self) -> None:
        self.model: AmorPreTrainedModel | None = None
        self.scores: list[list[Tensor]] = []  # per block: those of every micro-batch of this step
        self.fresh: list[int] = []  # blocks whose gates had no statistics before this step
        self.hooks: list[Any] = []

    def attach(self, model: nn.Module) -> None:
        """Hook into a model, whatever is wrapped around it."""
        self.detach()
        modules = (module for module in model.modules() if isinstance(module, AmorPreTrainedModel))
        wrapped = next(modules, None)
        if wrapped is None:
            raise AmorError(f"GateStatistics: {type(model).__name__} holds no model of amor")
        if wrapped.core.measures:
            kind = wrapped.core.each_block()[0].gate.kind
            raise AmorError(
                f"GateStatistics: gates of kind {kind!r} learn from what only `amor train` "
                "measures; without this callback they stay as they are"
            )
        self.model = wrapped
        wrapped.gates_follow = True
        before = wrapped.register_forward_pre_hook(self._start_gates, with_kwargs=True)
        self.hooks = [before, wrapped.register_forward_hook(self._collect, with_kwargs=True)]
        self._begin()

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()
        if self.model is not None:
            self.model.gates_follow = None
        self.hooks, self.model = [], None

    def step(self) -> None:
        """Update the gates by the scores of the micro-batches since the last step."""
        if self.model is None:
            raise AmorError("GateStatistics: attach(model) comes before step()")
        if self.scores and self.scores[0]:
            pooled = [gather_scores(torch.cat(scores)) for scores in self.scores]
            self._clear_fresh()
            self.model.core.observe(pooled)
        self._begin()

    def _begin(self) -> None:
        blocks = self._core.each_block()
        self.scores = [[] for _ in blocks]
        self.fresh = [index for index, block in enumerate(blocks) if lacks_statistics(block.gate)]

    @property
    def _core(self) -> Amor:
        assert self.model is not None
        return self.model.core

    def _clear_fresh(self) -> None:
        """Set the statistics of fresh gates back to nothing."""
        for index in self.fresh:
            for buffer in self._core.each_block()[index].gate.buffers():
                buffer.zero_()

    def _start_gates(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Give fresh gates the statistics of a micro-batch before they decide on it."""
        if not self.fresh or not learning(model):
            return
        call = arguments(model, args, kwargs)
        with torch.no_grad():
            read = inputs.tokens(call.get("input_ids"), call.get("inputs_embeds"))
            valid = inputs.real(call.get("attention_mask"), read, None)
            reset = inputs.documents(call.get("position_ids"), read, valid, None)
            gates = self._core(read, valid=valid, reset=reset).gates
        self._clear_fresh()
        for index in self.fresh:
            scores = torch.cat([*self.scores[index], real_scores(gates[index].score, valid)])
            self._core.each_block()[index].gate.observe(gather_scores(scores))

    def _collect(self, model: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if not learning(model) or not isinstance(out, AmorOutput) or out.gate_scores is None:
            return
        mask = arguments(model, args, kwargs).get("attention_mask")
        valid = None if mask is None else mask[:, -out.gate_scores[0].shape[1] :].bool()
        for scores, score in zip(self.scores, out.gate_scores, strict=True):
            scores.append(real_scores(score, valid))

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Hook into the model of a Trainer."""
        self.attach(more["model"])
        if hasattr(more["model"], "peft_config"):
            logger.warning(
                "gates follow this training, but an adapter does not hold their numbers: "
                "save the whole model too"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Update the gates after an optimiser step of a Trainer."""
        self.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Remove the hooks."""
        self.detach()


def learning(model: nn.Module) -> bool:
    """Whether a pass trains the model; an evaluation in the middle of training does not."""
    return model.training and torch.is_grad_enabled()


def arguments(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward by name."""
    return inspect.signature(model.forward).bind(*args, **kwargs).arguments


def real_scores(score: Tensor, valid: Tensor | None) -> Tensor:
    """Scores of real tokens, [n]."""
    return score.detach().flatten() if valid is None else score.detach()[valid]


def gather_scores(scores: Tensor) -> Tensor:
    """The scores of all processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return scores
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, scores.cpu())
    return torch.cat(parts).to(scores.device)
