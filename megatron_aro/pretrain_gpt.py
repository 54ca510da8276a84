"""Pretrain a GPT with Megatron-LM and any optimizer, ARO's included.

    torchrun --nproc-per-node N -m megatron_aro.pretrain_gpt <any Megatron flags> --optimizer aro

One process needs no torchrun. Without a GPU, training runs on the CPU (`megatron_aro.megatron.
cpu_mode`). Settings that cannot work end with exit code 2 and one sentence before training starts;
the environment variable MEGATRON_ARO_TRACEBACK=1 shows where it comes from.

Data: ``--mock-data``, or .bin/.idx files by ``--data-path``, ``--train-data-path`` and so on,
``--data-args-path`` or ``--per-split-data-args-path``.

Tokenizer: data that is tokenized already needs ``--tokenizer-type NullTokenizer --vocab-size V``,
ids 0..V-1. V counts the end-of-document id, which is V - 1 unless ``--null-tokenizer-eod-id`` says
otherwise: bytes are ``--vocab-size 257``, where 0..255 are the bytes and 256 ends a document.
Megatron's default, GPT2BPETokenizer, fetches from the network.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_model_config,
)
from megatron.training import arguments as megatron_arguments
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, print_rank_0
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_aro.megatron import launch, preflight

_SPIKE = 10.0  # --check-for-spiky-loss: a loss this many times the largest so far
_BATCH = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
_stragglers = StragglerDetector()


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the flags (by default the command line's) say; returns the exit code."""

    def run() -> None:
        train(sys.argv[1:] if argv is None else argv)
        torch.distributed.destroy_process_group()

    return launch.reported(run)


def train(argv: Sequence[str], forward: Callable[..., Any] | None = None) -> None:
    """Train as the flags say, with `forward_step` or something around it; the world stays."""
    preflight.check_megatron()
    from megatron.training.argument_utils import gpt_config_from_args  # not in 0.18

    sys.argv[1:] = launch.prepare(argv)  # where Megatron reads them
    args = megatron_arguments.parse_and_validate_args(
        extra_args_provider=_complain_in_one_sentence,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
    preflight.check_settings(args)
    if args.local_rank == 0:  # every node looks at its files, once
        preflight.check_data(args, get_tokenizer())
    alone = args.world_size == 1 and "MASTER_ADDR" not in os.environ
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        datasets,
        ModelType.encoder_or_decoder,
        forward or forward_step,
        get_embedding_ranks=embedding_ranks,
        store=torch.distributed.HashStore() if alone else None,
    )


def _complain_in_one_sentence(parser: Any) -> Any:
    """argparse prints a thousand lines of usage on each rank for one wrong flag."""

    def error(message: str) -> None:
        raise ValueError(f"{message} (--help lists all flags)")

    parser.error = error
    return parser


def forward_step(
    data_iterator: Iterator[dict] | None, model: GPTModel, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """One microbatch forward: the stage's output (or its schedule plan), and the loss function."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with _stragglers(bdata=True):
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        batch = _next_batch(data_iterator, get_model_config(model), vp_stage)
    timers("batch-generator").stop()

    with _stragglers:
        run = model.build_schedule_plan if return_schedule_plan else model
        output = run(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
    return output, functools.partial(loss, batch["loss_mask"])


def _next_batch(
    data_iterator: Iterator[dict] | None, config: Any, vp_stage: int | None
) -> dict[str, Any]:
    """This rank's share of the next microbatch, [micro batch, sequence / CP].

    Only tensor-parallel rank 0 reads; what a pipeline stage does not use is None.
    """
    args = get_args()
    if not _stage_reads_data(config, vp_stage):
        return dict.fromkeys(_BATCH)
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        read = next(data_iterator)
        batch = {key: read[key].cuda(non_blocking=True) if key in read else None for key in _BATCH}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=_has_mtp(config, vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )


def _has_mtp(config: Any, vp_stage: int | None) -> bool:
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def _stage_reads_data(config: Any, vp_stage: int | None) -> bool:
    return is_first_or_last_pipeline_stage(vp_stage) or _has_mtp(config, vp_stage)


def loss(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(summed loss, number of tokens, report) of a microbatch on the last stage.

    Args:
        loss_mask: [micro batch, sequence], 1 where a token counts.
        output: [micro batch, sequence], the cross entropy of each token.
    """
    args = get_args()
    mask = loss_mask.view(-1).float()
    total = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)

    state = get_rerun_state_machine()
    validate = functools.partial(state.validate_result, result=total, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        for what, found in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            message = f"found {what} in local forward loss calculation"
            validate(rejection_func=found, message=message, fatal=True)
    if args.check_for_spiky_loss:
        spike = functools.partial(state.is_unexpectedly_large, threshold=_SPIKE, context="loss")
        validate(rejection_func=spike, message="Spiky loss", fatal=False)
    report = torch.cat([total.clone().detach().view(1), tokens.view(1)])
    return total, tokens, {"lm loss": report}


def datasets(samples: Sequence[int | None], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """The (train, validation, test) datasets of the data flags, None where this rank has no use."""
    args = get_args()
    config = core_transformer_config_from_args(args)
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    data_config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )

    def built_here() -> bool:
        reads = mpu.get_tensor_model_parallel_rank() == 0
        return reads and _stage_reads_data(config, vp_stage)

    kind = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    return BlendedMegatronDatasetBuilder(kind, samples, built_here, data_config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]  # Megatron asks: on every rank


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that hold the word embeddings: first, tied last, and MTP's."""
    args = get_args()
    ranks = {pp_ranks[0], *get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args))}
    if not args.untie_embeddings_and_output_weights:
        ranks.add(pp_ranks[-1])
    return sorted(ranks)


if __name__ == "__main__":
    sys.exit(main())
