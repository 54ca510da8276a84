"""A recipe of Megatron-Bridge, trained with ARO: two lines more than without.

torchrun --nproc-per-node 8 docs/examples/bridge_recipe.py  # needs GPUs and transformer-engine
"""

from megatron.bridge.recipes.qwen import qwen3_8b_pretrain_config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

from megatron_aro import AROConfig
from megatron_aro.megatron.bridge import use_aro

if __name__ == "__main__":
    recipe = qwen3_8b_pretrain_config()  # AdamW's learning rate and schedule stay
    recipe.train.train_iters = 100
    use_aro(recipe, AROConfig(momentum=0.95))
    pretrain(recipe, forward_step)
