"""The PyTorch arms of the link benchmark, over gloo. `experiments.links` starts it in its own environment.

DistributedDataParallel as its users run it, timed from before `backward` to after it; and a port of the
compressed all-reduce of 1-bit Adam (arXiv 2102.02888). The backward pass itself hands out gradients that are
ready, so that only DDP's own work is timed.
"""

# pyright: reportMissingImports=false
# PyTorch is no dependency of the project: this file runs where `experiments.links` has installed it.

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from experiments import links_worker

PORT = 29500


def to_torch(array: np.ndarray) -> torch.Tensor:
    """PyTorch's layout: dense [out, in], convolution [out, in, h, w]; an embedding is dense here too."""
    order = {4: (3, 2, 0, 1), 2: (1, 0)}.get(array.ndim)
    return torch.from_numpy(np.ascontiguousarray(array if order is None else array.transpose(order)))


def from_torch(tensor: torch.Tensor) -> np.ndarray:
    """The inverse of `to_torch`."""
    order = {4: (2, 3, 1, 0), 2: (1, 0)}.get(tensor.ndim)
    return tensor.numpy() if order is None else tensor.numpy().transpose(order)


# =============================================================================================== DDP


class _Give(torch.autograd.Function):
    """A loss whose gradient with respect to `parameter` is what `box` holds, handed over without a copy."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:
        ctx.box = box
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return ctx.box.pop(), None


class _Model(torch.nn.Module):
    def __init__(self, values: list[torch.Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.empty_like(value) for value in values)  # never read
        self.values = values

    def forward(self) -> torch.Tensor:
        losses = [_Give.apply(w, [v.clone()]) for w, v in zip(self.weights, self.values, strict=True)]
        return torch.stack(losses).sum()  # pyright: ignore[reportArgumentType]  # apply is untyped


class DdpArm:
    """One DDP model, with the communication hook of its name."""

    def __init__(self, name: str, values: list[torch.Tensor]) -> None:
        # PowerSGD's hook races on gloo with more than one bucket; the others have DDP's default.
        is_power = name.startswith("torch-powersgd")
        self._model = _Model(values)
        options = {"bucket_cap_mb": 4096} if is_power else {}
        self._ddp = DistributedDataParallel(self._model, init_sync=False, **options)
        if is_power:
            rank = int(name.rsplit("-", 1)[1])
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            self._ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name == "torch-fp16":
            self._ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        self._loss: torch.Tensor | None = None

    def get_ready(self) -> None:
        self._ddp.zero_grad(set_to_none=True)
        self._loss = self._ddp()

    def step(self) -> None:
        assert self._loss is not None
        self._loss.backward()

    def first_mean(self) -> np.ndarray:
        grad = self._model.weights[0].grad
        assert grad is not None
        return from_torch(grad)

    def describe(self) -> str:
        return "ddp"

    def release(self) -> None:
        self._loss = None
        self._ddp.zero_grad(set_to_none=True)


# ======================================================================================== 1-bit Adam


class OneBitArm:
    """The two-phase compressed all-reduce of 1-bit Adam (arXiv 2102.02888), a port.

    All arrays as one vector, cut into one chunk per worker. Up: the signs of vector + error, eight to a byte,
    with one scale; every worker averages its chunk of everybody. Down: the signs of that mean + the server's
    own error, with one scale per chunk. Both errors are kept for the next step.
    """

    def __init__(self, values: list[torch.Tensor]) -> None:
        self._values, self._hosts = values, dist.get_world_size()
        self._size = sum(value.numel() for value in values)
        step = 8 * self._hosts
        padded = -(-self._size // step) * step
        self._error = torch.zeros(padded)
        self._server_error = torch.zeros(padded // self._hosts)
        # Eight bits -> eight times -1 or 1.
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
        self._signs = torch.from_numpy(bits.astype(np.float32) * 2 - 1)
        self._means: list[torch.Tensor] = []

    def get_ready(self) -> None:
        self._means = []

    def step(self) -> None:
        flat = torch.nn.functional.pad(
            torch.cat([value.view(-1) for value in self._values]), (0, self._error.numel() - self._size)
        )
        bits, scale = self._compress(flat.add_(self._error), self._error)
        received, scales = torch.empty_like(bits), torch.empty(self._hosts)
        dist.all_to_all_single(received, bits)
        dist.all_gather_into_tensor(scales, scale)

        chunk = self._server_error.clone()
        for one, of_one in zip(received.view(self._hosts, -1), (scales / self._hosts).tolist(), strict=True):
            chunk.add_(self._decode(one), alpha=of_one)
        bits, scale = self._compress(chunk, self._server_error)
        gathered = torch.empty(self._hosts * bits.numel(), dtype=torch.uint8)
        dist.all_gather_into_tensor(gathered, bits)
        dist.all_gather_into_tensor(scales, scale)
        mean = self._decode(gathered).view(self._hosts, -1).mul_(scales[:, None]).view(-1)[: self._size]
        parts = mean.split([value.numel() for value in self._values])
        self._means = [part.view(value.shape) for part, value in zip(parts, self._values, strict=True)]

    def _compress(self, vector: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sign bits and scale of a vector; what they miss goes to `error`."""
        scale = torch.linalg.vector_norm(vector) / math.sqrt(vector.numel())
        bits = torch.from_numpy(np.packbits((vector >= 0).numpy()))
        torch.sub(vector, self._decode(bits), alpha=float(scale), out=error)
        return bits, scale.view(1)

    def _decode(self, bits: torch.Tensor) -> torch.Tensor:
        return self._signs.index_select(0, bits.int()).view(-1)

    def first_mean(self) -> np.ndarray:
        return from_torch(self._means[0])

    def describe(self) -> str:
        return "port"

    def release(self) -> None:
        self._means = []


# ============================================================================================== main


class TorchBackend:
    """All hosts in gloo's default process group."""

    def load(self, values: dict[str, np.ndarray]) -> list[torch.Tensor]:
        return [to_torch(value) for value in values.values()]

    def probe(self, link: str, sizes_bytes: Sequence[int]) -> str:
        raise NotImplementedError("no PyTorch arm takes a substrate")

    def make_arm(
        self, name: str, values: list[torch.Tensor], substrate: str | None = None
    ) -> links_worker.Arm:
        return OneBitArm(values) if name == "torch-1bit-adam-port" else DdpArm(name, values)


def main() -> None:
    answers = links_worker.claim_stdout()
    host, hosts = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
    address = os.environ["JAX_COORDINATOR_ADDRESS"].rsplit(":", 1)[0]
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", rank=host, world_size=hosts)
    token = torch.zeros(1)
    links_worker.serve(TorchBackend(), lambda: dist.all_reduce(token), host, hosts, answers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
