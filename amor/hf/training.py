"""Gates that follow training by transformers' Trainer, as they follow ours: once an optimiser step, over all its tokens.

    trainer = Trainer(model, ..., callbacks=[amor.hf.GateStatistics()])

Without it gates keep the numbers they have. In a loop of one's own: attach(model) before it, step() after every optimiser
step, detach() at the end.

In the first step of a model whose gates have met nothing, every micro-batch is read once without gradient before, so that
its gates have something to decide with; after the step they hold the numbers of all its micro-batches together, as in
amor/train/step.py.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.utils import logging

from amor.errors import AmorError
from amor.gates.base import Adaptive
from amor.hf import inputs
from amor.hf.model import AmorOutput, AmorPreTrainedModel
from amor.models.amor import Amor

logger = logging.get_logger(__name__)


class GateStatistics(TrainerCallback):
    def __init__(self) -> None:
        self.model: AmorPreTrainedModel | None = None
        self.scores: list[list[Tensor]] = []  # a block: those of every micro-batch of this step
        self.fresh: list[int] = []  # blocks whose gates had met nothing before this step
        self.hooks: list[Any] = []

    def attach(self, model: nn.Module) -> None:
        """Listen to a model, whatever is wrapped around it."""
        self.detach()
        found = [module for module in model.modules() if isinstance(module, AmorPreTrainedModel)]
        if not found:
            raise AmorError(f"GateStatistics: {type(model).__name__} holds no model of amor")
        if found[0].core.measures:
            raise AmorError(
                f"GateStatistics: gates of kind {found[0].core.each_block()[0].gate.kind!r} learn from what only `amor train` "
                "measures; without this callback they stay as they are"
            )
        self.model = found[0]
        self.model.gates_follow = True
        before = self.model.register_forward_pre_hook(self._meet, with_kwargs=True)
        self.hooks = [before, self.model.register_forward_hook(self._listen, with_kwargs=True)]
        self._begin()

    def detach(self) -> None:
        for hook in self.hooks:
            hook.remove()
        if self.model is not None:
            self.model.gates_follow = None
        self.hooks, self.model = [], None

    def step(self) -> None:
        """Let the gates take in what the micro-batches since the last step have shown."""
        if self.model is None:
            raise AmorError("GateStatistics: attach(model) comes before step()")
        if self.scores and self.scores[0]:
            pooled = [everyone(torch.cat(scores)) for scores in self.scores]
            self._forget()
            self.model.core.observe(pooled)
        self._begin()

    def _begin(self) -> None:
        blocks = self._core.each_block()
        self.scores = [[] for _ in blocks]
        gates = [block.gate for block in blocks]
        self.fresh = [
            i for i, g in enumerate(gates) if isinstance(g, Adaptive) and not g.updates_in_forward and int(g.updates) == 0
        ]

    @property
    def _core(self) -> Amor:
        assert self.model is not None
        return self.model.core

    def _forget(self) -> None:
        """Fresh gates as if they had met nothing."""
        for index in self.fresh:
            for held in self._core.each_block()[index].gate.buffers():
                held.zero_()

    def _meet(self, model: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Show gates that have met nothing a micro-batch before they decide on it."""
        if not self.fresh or not learning(model):
            return
        call = called(model, args, given)
        with torch.no_grad():
            read = inputs.tokens(call.get("input_ids"), call.get("inputs_embeds"))
            valid = inputs.real(call.get("attention_mask"), read, None)
            reset = inputs.documents(call.get("position_ids"), read, valid, None)
            gates = self._core(read, valid=valid, reset=reset).gates
        self._forget()
        for index in self.fresh:
            seen = torch.cat([*self.scores[index], shown(gates[index].score, valid)])
            self._core.each_block()[index].gate.observe(everyone(seen))

    def _listen(self, model: nn.Module, args: tuple[Any, ...], given: dict[str, Any], out: Any) -> None:
        if not learning(model) or not isinstance(out, AmorOutput) or out.gate_scores is None:
            return
        mask = called(model, args, given).get("attention_mask")
        valid = None if mask is None else mask[:, -out.gate_scores[0].shape[1] :].bool()
        for scores, score in zip(self.scores, out.gate_scores, strict=True):
            scores.append(shown(score, valid))

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.attach(more["model"])
        if hasattr(more["model"], "peft_config"):
            logger.warning("gates follow this training, but an adapter does not hold their numbers: save the whole model too")

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.detach()


def learning(model: nn.Module) -> bool:
    """Not judging: a pass in the middle of training that learns nothing teaches the gates nothing either."""
    return model.training and torch.is_grad_enabled()


def called(model: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    return inspect.signature(model.forward).bind(*args, **given).arguments


def shown(score: Tensor, valid: Tensor | None) -> Tensor:
    """Scores of real tokens, [n]."""
    return score.detach().flatten() if valid is None else score.detach()[valid]


def everyone(scores: Tensor) -> Tensor:
    """The scores of all processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return scores
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, scores.cpu())
    return torch.cat(parts).to(scores.device)
