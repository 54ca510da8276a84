"""How the pieces of a parameter that ranks hold become whole matrices.

An exchange is the seam between what a rank stores and what it steps. `gather` turns this rank's
pieces into whole parameters; the caller cuts its piece out of an update by `Piece`. Owners and
fused all-to-alls will be a third exchange beside these two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened parameter of `numel` elements, held by one rank."""

    start: int
    stop: int
    numel: int


class Exchange(Protocol):
    """Makes whole parameters from the pieces that the ranks of a group hold."""

    def gather(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Flat float32 pieces of this rank by name -> whole flat parameters by name."""


class WholeExchange:
    """Every rank holds every parameter whole: one process, or no distributed optimizer."""

    def gather(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(pieces)


class AllGatherExchange:
    """Every rank of a group gathers every parameter in one collective and steps all of them.

    Right on any split of the parameters, and redundant: work and traffic do not shrink with the
    group.
    """

    def __init__(self, pieces: Mapping[str, Piece], group: dist.ProcessGroup, device: torch.device):
        """
        Args:
            pieces: what this rank holds, by name. Names that it holds nothing of are absent.
            group: the ranks that share the parameters. A collective: all of them must call.
            device: where the gathered parameters live.

        Raises:
            ValueError: the pieces of all ranks do not make up whole parameters.
        """
        everyone: list[dict[str, Piece]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, dict(pieces), group=group)
        self._pieces = everyone
        self._group = group
        self._device = device
        self._numel = {name: piece.numel for held in everyone for name, piece in held.items()}
        # Collectives take equal sizes, so each rank sends as much as the fullest one holds.
        self._length = max(sum(p.stop - p.start for p in held.values()) for held in everyone)
        for name, numel in self._numel.items():
            spans = sorted((h[name].start, h[name].stop) for h in everyone if name in h)
            bounds = [0] + [bound for span in spans for bound in span] + [numel]
            if bounds[0::2] != bounds[1::2]:
                raise ValueError(f"The ranks hold {spans} of the {numel} elements of {name}.")

    def gather(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        send = torch.zeros(self._length, device=self._device)
        offset = 0
        for name in self._pieces[dist.get_rank(self._group)]:
            send[offset : offset + pieces[name].numel()] = pieces[name]
            offset += pieces[name].numel()
        received = torch.empty(len(self._pieces), self._length, device=self._device)
        dist.all_gather_into_tensor(received.view(-1), send, group=self._group)

        whole = {
            name: torch.empty(numel, device=self._device) for name, numel in self._numel.items()
        }
        for row, held in zip(received, self._pieces, strict=True):
            offset = 0
            for name, piece in held.items():
                size = piece.stop - piece.start
                whole[name][piece.start : piece.stop] = row[offset : offset + size]
                offset += size
        return whole
