"""Look at the training data before anything is built.

Megatron finds a missing file when model and optimizer stand, and a token outside the vocabulary as
an index error, or a CUDA assertion, some steps later.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import numpy as np

_WINDOWS, _WINDOW = 16, 1 << 16  # tokens: 16 stretches of 65,536, so small files are read whole


def check_data(args: argparse.Namespace, tokenizer: Any) -> None:
    """Refuse data that is missing, damaged or made with another vocabulary.

    Args:
        args: Megatron's, validated.
        tokenizer: Megatron's.

    Raises:
        ValueError: one sentence that names the file and what to do.
    """
    prefixes = data_prefixes(args)
    if args.mock_data:
        return
    if not prefixes:
        raise ValueError("There is no data: give --data-path (or its variants), or --mock-data.")
    for prefix in prefixes:
        if "://" not in prefix:  # object storage is Megatron's to open
            _check_prefix(prefix, args, tokenizer)


def data_prefixes(args: argparse.Namespace) -> list[str]:
    """The path prefixes of all data flags, each once."""
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    blends = [blend, *(per_split or ())]
    return list(dict.fromkeys(prefix for blend in blends if blend for prefix in blend[0]))


def _check_prefix(prefix: str, args: argparse.Namespace, tokenizer: Any) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    for suffix in (".idx", ".bin"):
        if not Path(prefix + suffix).is_file():
            raise ValueError(
                f"Data file {prefix}{suffix} does not exist: a data path is the common prefix of "
                "a .bin and an .idx file."
            )
    if Path(prefix + ".bin").stat().st_size == 0:
        raise ValueError(f"{prefix}.bin is empty.")
    dataset = IndexedDataset(prefix)
    if args.data_path or args.data_args_path:
        _check_split(prefix, len(dataset), args.split)
    index = dataset.index
    need = int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * index.dtype_size
    have = Path(prefix + ".bin").stat().st_size
    if have != need:
        raise ValueError(
            f"{prefix}.bin has {have} bytes, but its .idx speaks of {need}: the two files do not "
            "belong together, or copying was cut off."
        )
    largest = largest_token(prefix + ".bin", index.dtype)
    kind = args.tokenizer_type
    if largest >= args.padded_vocab_size:
        raise ValueError(
            f"{prefix}.bin holds token id {largest}, but the vocabulary of {kind} ends at "
            f"{args.padded_vocab_size - 1} (padded): use the tokenizer or --vocab-size that the "
            "data was made with."
        )
    if largest >= tokenizer.vocab_size:
        warnings.warn(
            f"{prefix}.bin holds token id {largest}, in the padding of {kind}'s vocabulary of "
            f"{tokenizer.vocab_size}: was the data made with another tokenizer?",
            stacklevel=2,
        )


def _check_split(prefix: str, documents: int, split: str) -> None:
    """Megatron never ends looking for tokens in a split that got no document."""
    from megatron.core.datasets import blended_megatron_dataset_config as megatron_config
    from megatron.core.datasets.utils import Split

    shares = megatron_config.parse_and_normalize_split(split)
    bounds = megatron_config.convert_split_vector_to_split_matrix(shares)
    for kind, share in zip(Split, bounds, strict=True):
        if share and round(share[0] * documents) == round(share[1] * documents):
            raise ValueError(
                f"{prefix} has {documents} documents, of which --split {split} leaves none for "
                f"{kind.name}: give that a larger share, or 0."
            )


def largest_token(path: str, dtype: type) -> int:
    """The largest token id in stretches spread evenly over a .bin file of one dtype."""
    tokens = np.memmap(path, mode="r", dtype=dtype)
    last_start = max(len(tokens) - _WINDOW, 0)
    starts = np.unique(np.linspace(0, last_start, _WINDOWS).astype(np.int64))
    return max(int(tokens[start : start + _WINDOW].max()) for start in starts)
