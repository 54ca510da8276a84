"""Core attention for context parallelism on the CPU.

Megatron's own core attention refuses ``--context-parallel-size``; transformer-engine's, which does
not, are GPU kernels. Here each rank gathers the keys and values of the whole sequence and attends
from the queries that it has: right, and with none of the memory that context parallelism saves.
``--cp-comm-type`` has no effect.

Megatron cuts a sequence into two chunks a rank and gives rank r the chunks r and 2 size - 1 - r.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


def install() -> None:
    """Let Megatron's DotProductAttention be built, and be right, under context parallelism."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    build, attend = DotProductAttention.__init__, DotProductAttention.forward

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        parallel = config.context_parallel_size > 1
        if parallel and config.window_size is not None:
            raise ValueError(
                "--window-size with --context-parallel-size needs a GPU, and there is none here: "
                "drop one of them."
            )
        if parallel:
            config = copy.copy(config)
            config.context_parallel_size = 1
        build(self, config, *args, **kwargs)
        self.context_parallel = parallel

    def forward(
        self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.context_parallel:
            group = parallel_state.get_context_parallel_group()
            order = positions(key.shape[0] * group.size(), group.size())
            mine = order.chunk(group.size())[group.rank()]
            if attention_mask is None:  # else Megatron cut its rows as it cut the tokens
                attention_mask = torch.arange(len(order)) > mine[:, None]
            # The gradient of a gather is the sum over ranks, scattered.
            key, value = (
                gather_from_sequence_parallel_region(x, group=group)[order.argsort()]
                for x in (key, value)
            )
        return attend(self, query, key, value, attention_mask, *args, **kwargs)

    DotProductAttention.__init__, DotProductAttention.forward = __init__, forward


def positions(length: int, ranks: int) -> torch.Tensor:
    """The true positions [length] of the tokens of all ranks, one rank's after the other's."""
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[i] for r in range(ranks) for i in (r, 2 * ranks - 1 - r)])
