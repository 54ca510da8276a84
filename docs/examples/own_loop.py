"""Your own training loop on megatron-core with ARO: a small GPT on tokens that count up.

torchrun --nproc-per-node 2 docs/examples/own_loop.py FOLDER  # go on from FOLDER, save there
"""

import os
import sys

import torch
from megatron.core import dist_checkpointing, distributed, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from megatron_aro import AROConfig, AROOptimizerConfig, get_aro_optimizer, tag_parameters
from megatron_aro.megatron import cpu_mode


def main(folder: str) -> None:
    vocabulary, length, aro = 64, 32, AROConfig()
    on_cpu = cpu_mode.enable()  # False, and nothing done, where there is a GPU
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("gloo" if on_cpu else "nccl")
    parallel_state.initialize_model_parallel()  # data parallel over all ranks
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    shape = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    gpt = GPTModel(shape, get_gpt_layer_local_spec(), vocabulary, length).cuda()
    tag_parameters([gpt], aro)  # before DDP, which gives ARO's matrices buffers of their own
    ddp = distributed.DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = distributed.DistributedDataParallel(shape, ddp, gpt)
    settings = dict(lr=3e-3, weight_decay=0.1, use_distributed_optimizer=True, aro=aro)
    optimizer = get_aro_optimizer(AROOptimizerConfig(optimizer="aro", **settings), [model])

    def state(is_loading: bool) -> dict:
        how = {"distrib_optim_sharding_type": "fully_reshardable"}  # any layout can load it
        weights = gpt.sharded_state_dict()
        return {"gpt": weights, "aro": optimizer.sharded_state_dict(weights, is_loading, how)}

    torch.manual_seed(torch.distributed.get_rank())  # each rank has data of its own
    if os.path.exists(folder):
        loaded = dist_checkpointing.load(state(is_loading=True), folder)
        gpt.load_state_dict(loaded["gpt"])
        optimizer.load_state_dict(loaded["aro"])
    positions = torch.arange(length)[None].cuda()
    mask = torch.ones(1, 1, length, length).triu(1).bool().cuda()
    for _ in range(20):
        tokens = (torch.randint(vocabulary, (8, 1)) + torch.arange(length + 1)).cuda() % vocabulary
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        model.zero_grad_buffer()
        loss.backward()
        distributed.finalize_model_grads([model])
        optimizer.step()
        if torch.distributed.get_rank() == 0:
            print(f"loss {loss.item():.4f}", flush=True)
    os.makedirs(folder, exist_ok=True)
    dist_checkpointing.save(state(is_loading=False), folder)


if __name__ == "__main__":  # saving starts processes that import this file
    main(sys.argv[1])
