"""The processes that train one model: one alone, replicas (DDP), or shards (FSDP2).

The loop uses a World and mentions no rank or device. Every rank works on its own rows of the
global batch; gradients are summed, not averaged, because each rank already weighs its targets by
the number of targets in the global batch.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amor.errors import AmorError
from amor.models.amor import Amor

BUCKET = 25_000_000  # gradient elements per all-reduce: 100 MB in float32


class World:
    """One process on one device: the whole batch is its own, and no collective does anything."""

    rank, size = 0, 1

    def __init__(self, device: torch.device):
        self.device = device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def local_rows(self, rows: int) -> tuple[int, int]:
        """This rank's rows of a global batch: the first, and one past the last."""
        if rows % self.size:
            raise AmorError(
                f"{rows} sequences cannot be shared by {self.size} ranks; "
                f"give a multiple of {self.size}"
            )
        mine = rows // self.size
        return self.rank * mine, (self.rank + 1) * mine

    def place(self, model: Amor) -> None:
        """Move a model to the device where it is trained, in the layout of this world."""
        model.to(self.device)

    def reduce_gradients(self, model: nn.Module) -> None:
        """Turn gradients of the local rows into gradients of the global batch."""

    def full_tensor(self, t: Tensor) -> Tensor:
        """The full tensor, whatever shard of it this rank holds. A collective."""
        return t

    def shard(self, full: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a full tensor that every rank has, laid out as `like`."""
        return full

    def sum(self, t: Tensor) -> Tensor:
        """The sum over ranks."""
        return t

    def gather(self, t: Tensor) -> Tensor:
        """The same-shaped tensors of all ranks, concatenated along the first dimension."""
        return t

    def broadcast(self, thing: Any) -> Any:
        """Rank 0's object, on every rank."""
        return thing

    def gather_objects(self, thing: Any) -> list[Any]:
        """The objects of all ranks, on every rank."""
        return [thing]

    def close(self) -> None:
        """Leave the process group."""


class Replicas(World):
    """Every rank holds the whole model; gradients are summed once per optimiser step."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def reduce_gradients(self, model: nn.Module) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for bucket in buckets(gradients, BUCKET):
            together = torch.cat([g.flatten() for g in bucket])
            dist.all_reduce(together)
            for g, summed in zip(bucket, together.split([g.numel() for g in bucket]), strict=True):
                g.copy_(summed.view_as(g))

    def sum(self, t: Tensor) -> Tensor:
        t = t.clone()
        dist.all_reduce(t)
        return t

    def gather(self, t: Tensor) -> Tensor:
        parts = [torch.empty_like(t) for _ in range(self.size)]
        dist.all_gather(parts, t.contiguous())
        return torch.cat(parts)

    def broadcast(self, thing: Any) -> Any:
        box = [thing]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather_objects(self, thing: Any) -> list[Any]:
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, thing)
        return box

    def close(self) -> None:
        dist.destroy_process_group()


class Sharded(Replicas):
    """Every rank holds a shard of every tensor (FSDP2); layers are gathered while they run."""

    def place(self, model: Amor) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        mesh = init_device_mesh(self.device.type, (self.size,))
        model.to(self.device)
        for layer in model.backbone.layers:
            fully_shard(layer, mesh=mesh)
        # The rest is one group that stays gathered from the forward to the backward pass: the
        # blocks and the loss read the head's weights inside the forward, and the model calls a
        # block's norm outside the block.
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # a sum, not a mean
                module.set_force_sum_reduction_for_comms(True)  # gloo can only sum

    def reduce_gradients(self, model: nn.Module) -> None:
        """FSDP2 has summed them in the backward pass."""

    def full_tensor(self, t: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return t.full_tensor() if isinstance(t, DTensor) else t

    def shard(self, full: Tensor, like: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(like, DTensor):
            return full
        # src_data_rank=None: every rank cuts its shard out of its own copy, nothing is sent
        full = full.to(self.device)
        return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def buckets(tensors: list[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Tensors in order, in groups of about `size` elements."""
    bucket: list[Tensor] = []
    for t in tensors:
        bucket.append(t)
        if sum(b.numel() for b in bucket) >= size:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def init_world(mode: str, device: str) -> World:
    """The world of this process, from the recipe and the environment that torchrun sets."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    place = pick_device(device)
    if size == 1:
        return World(place)
    if mode == "none":
        raise AmorError(
            f'{size} processes were started but distributed = "none"; '
            "use --set distributed=ddp or fsdp"
        )
    return {"ddp": Replicas, "fsdp": Sharded}[mode](place)


def pick_device(device: str) -> torch.device:
    """The device of this process; "auto" is a GPU where there is one."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise AmorError('device = "cuda", but torch sees no GPU here; use "cpu" or "auto"')
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    return torch.device(device)
