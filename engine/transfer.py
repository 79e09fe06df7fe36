"""Between the host and a device that is still computing: on CUDA, nothing here waits for what was launched before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`. From memory that is not pinned, the copy would wait for the whole stream."""
    if device.type == "cpu":
        return tensor
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Download:
    """Tensors on their way to the host, as they are at this place of the stream."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [tensor.to("cpu", non_blocking=tensor.is_cuda) for tensor in tensors]  # then pinned
        self._arrived: torch.cuda.Event | None = None  # elsewhere they are there already
        if tensors[0].is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[list[Any]]:
        """Wait for these alone, whatever was launched since; each as nested lists."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [copy.tolist() for copy in self._copies]
