"""What Megatron's validation lets through and what would fail later, or never end.

A missing data file is found when model and optimizer stand; a token outside the vocabulary is an
index error, or a CUDA assertion, some steps later; a split without documents is searched forever.
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from megatron_aro.megatron import support

_ELSEWHERE = {  # flags of Megatron's own script for other things than pretraining a GPT
    "sft": "--sft",
    "fim_data": "--fim-data",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "logits_load_dir": "--logits-load-dir",
    "inprocess_restart": "--inprocess-restart",
    "perform_rl_step": "--perform-rl-step",
}
_WINDOWS, _WINDOW = 16, 1 << 16  # tokens: 16 stretches of 65,536, so small files are read whole


def check_megatron() -> None:
    """Refuse a Megatron that has not what `megatron_aro.pretrain_gpt` builds models with.

    Raises:
        ValueError: one sentence that says what to do.
    """
    if support.megatron_version.startswith("0.18."):
        raise ValueError(
            "This entry needs megatron-core 0.19: with 0.18, run the pretrain_gpt.py of your "
            "Megatron-LM with `-m megatron_aro.run SCRIPT ...`."
        )


def check_purpose(args: argparse.Namespace) -> None:
    """Refuse what is not pretraining a GPT, on whatever machine.

    Raises:
        ValueError: one sentence that says what to do.
    """
    for name, flag in _ELSEWHERE.items():
        if getattr(args, name, None):
            raise ValueError(
                f"{flag} is not part of this entry: run your own script with "
                "`-m megatron_aro.run SCRIPT ...`."
            )


def check_settings(args: argparse.Namespace) -> None:
    """Refuse what `megatron_aro.pretrain_gpt` cannot do, or not on this machine.

    Raises:
        ValueError: one sentence that says what to do.
    """
    check_purpose(args)
    if args.transformer_impl == "transformer_engine":
        try:
            importlib.import_module("transformer_engine.pytorch")
        except ImportError:
            raise ValueError(
                "transformer-engine is not installed: pass --transformer-impl local."
            ) from None
    # Megatron imports it at the first save, after hours of training.
    if args.save and args.ckpt_format == "torch_dist" and not find_spec("psutil"):
        raise ValueError(
            "--save needs the package psutil for torch_dist checkpoints: install it, or pass "
            "--ckpt-format torch."
        )


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
    have = Path(prefix + ".bin").stat().st_size
    dataset: Any = IndexedDataset(prefix) if have else []
    if not len(dataset):
        raise ValueError(f"{prefix}.bin is empty.")
    index = dataset.index
    need = int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * index.dtype_size
    if have != need:
        raise ValueError(
            f"{prefix}.bin has {have} bytes, but its .idx speaks of {need}: the two files do not "
            "belong together, or copying was cut off."
        )
    if args.data_path or args.data_args_path:
        _check_split(prefix, len(dataset), args.split)
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
