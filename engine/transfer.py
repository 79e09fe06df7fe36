"""Copies between the host and a device that is still computing: on CUDA, without waiting for earlier launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`, through pinned memory: an unpinned copy would wait for the whole stream."""
    if device.type == "cpu":
        return tensor
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Download:
    """Starts copying tensors to the host, with the values that they have at this point of the stream."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [tensor.to("cpu", non_blocking=tensor.is_cuda, copy=True) for tensor in tensors]  # then pinned
        self._arrived: torch.cuda.Event | None = None  # None: the copies are complete
        if tensors[0].is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[list[Any]]:
        """Wait for these copies, but not for anything launched later; returns each tensor as nested lists."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [copy.tolist() for copy in self._copies]
