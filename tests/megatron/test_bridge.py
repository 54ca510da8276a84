"""ARO in recipes of Megatron-Bridge, as far as no GPU is needed.

Megatron-Bridge does not import without transformer-engine. What it calls is tried all the same. The
model is built by Megatron's own builder, which Bridge's ModelConfig uses, hooks and DDP included.
The optimizer is set up by Bridge's `setup_optimizer`, compiled from the file of the release without
what that file imports; and, where the release is not at hand, by the one call of it that matters,
written down here from 0.6.2.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pool import Pool

from megatron_aro.version import TESTED

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "bridge_recipe.py"
PIN = f"megatron-bridge=={TESTED['megatron-bridge'][-1]}"
BRIDGE = ROOT / ".releases" / PIN / "megatron" / "bridge"


def written_down(recipe: Any, model: list, groups: Any, source: str = "") -> tuple[Any, Any]:
    """What `setup_optimizer` of 0.6.2 does with a configuration that can provide."""
    from megatron.core.optimizer import get_standard_config_overrides

    optimizer = recipe.optimizer.provide(
        model_chunks=model,
        config_overrides=get_standard_config_overrides(config=recipe.optimizer),
        use_gloo_process_groups=True,
        pg_collection=groups,
    )
    return optimizer, None


def released(recipe: Any, model: list, groups: Any, source: str) -> tuple[Any, Any]:
    """Bridge's own functions, with the names of Megatron's that they use."""
    from megatron.core import optimizer, optimizer_param_scheduler, utils

    wanted = ("setup_optimizer", "_get_scheduler")
    tree = ast.parse("from __future__ import annotations\n" + source)
    tree.body = [tree.body[0], *(x for x in tree.body if getattr(x, "name", None) in wanted)]
    names: dict[str, Any] = {**vars(optimizer), **vars(optimizer_param_scheduler), **vars(utils)}
    names["OptimizerConfigOverrideProviderContext"] = lambda *of: of
    exec(compile(tree, "optim.py", "exec"), names)
    overrides = SimpleNamespace(
        build_config_overrides=lambda of: optimizer.get_standard_config_overrides(config=of[1])
    )
    return names["setup_optimizer"](
        optimizer_config=recipe.optimizer,
        scheduler_config=recipe.scheduler,
        model=model,
        use_gloo_process_groups=True,
        pg_collection=groups,
        optimizer_config_override_provider=overrides,
    )


def train(setup: str, source: str, provider: bool = False, **changed: Any) -> dict[str, Any]:
    """Four steps of a recipe on this rank.

    Args:
        setup: which of the functions above sets up the optimizer.
        provider: let the model take its hooks by a method, as Bridge's providers do.
        changed: fields of the recipe's optimizer that are set after `use_aro`, as overrides are.
    """
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.training.models.gpt import GPTModelConfig

    from megatron_aro import AROConfig
    from megatron_aro.megatron import bridge, cpu_mode

    cpu_mode.enable()
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    shape = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, bf16=True, params_dtype=torch.bfloat16
    )
    spec = get_gpt_layer_local_spec()
    recipe = SimpleNamespace(
        model=GPTModelConfig(transformer=shape, transformer_layer_spec=spec, vocab_size=64),
        optimizer=OptimizerConfig(lr=1e-2, min_lr=1e-3, bf16=True, use_distributed_optimizer=True),
        scheduler=SimpleNamespace(
            lr_warmup_init=0.0, lr_warmup_steps=1, lr_decay_steps=9, lr_decay_style="cosine",
            start_weight_decay=0.1, end_weight_decay=0.1, wd_incr_steps=9,
            weight_decay_incr_style="constant", use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True, wsd_decay_steps=None, lr_wsd_decay_style=None,
        ),
        logger=SimpleNamespace(log_interval=2),
    )  # fmt: skip
    model_config = recipe.model
    if provider:
        recipe.model = SimpleNamespace(register_pre_wrap_hook=model_config.pre_wrap_hooks.append)
    bridge.use_aro(recipe, AROConfig(momentum=0.9))
    for name, value in changed.items():
        setattr(recipe.optimizer, name, value)
    recipe.optimizer.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = model_config.get_builder_cls()(model_config).build_distributed_models(
        pg_collection=groups,
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True),
    )
    optimizer, scheduler = globals()[setup](recipe, model, None, source)
    mask = torch.ones(1, 1, 32, 32).triu(1).bool()
    losses = []
    for _ in range(4):
        tokens = torch.arange(33)[None] % 64
        loss = model[0](tokens[:, :-1], torch.arange(32)[None], mask, labels=tokens[:, 1:]).mean()
        model[0].zero_grad_buffer()
        loss.backward()
        finalize_model_grads(model)
        optimizer.step()
        if scheduler is not None:
            scheduler.step(increment=1)
        losses.append(loss.item())
    return {
        "losses": losses,
        "optimizer": type(optimizer).__name__,
        "momentum": {matrices.aro.momentum for matrices in optimizer.matrices},
        "rotations": [key for matrices in optimizer.matrices for key in matrices.rotation_state()],
        "clip": optimizer.config.clip_grad,
        "lr": optimizer.param_groups[0]["lr"],
    }


@pytest.fixture(params=[written_down, released])
def setup(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Name of the function that sets up, and the source of Bridge's own."""
    if request.param is written_down:
        return request.param.__name__, ""
    if not BRIDGE.is_dir():
        pytest.skip(f"{BRIDGE} is missing; scripts/test.sh fetches it")
    return request.param.__name__, (BRIDGE / "training" / "optim.py").read_text()


@pytest.mark.parametrize("provider", [False, True])
def test_a_recipe_trains_with_aro(pool: Pool, setup: tuple[str, str], provider: bool) -> None:
    """Both ranks have the recipe's settings and ARO's, share the matrices, and learn."""
    results = pool.run(2, train, *setup, provider=provider, clip_grad=0.5)
    for result in results:
        assert result["optimizer"] == "AROChainedOptimizer"
        assert result["momentum"] == {0.9} and result["clip"] == 0.5
        assert result["losses"][-1] < result["losses"][0] - 0.5
        assert result["lr"] <= 1e-2
    rotations = [key for result in results for key in result["rotations"] if "rotation" in key]
    assert len(set(rotations)) == 2 * 6  # two layers of q, k, v, attention output, fc1 and fc2


def test_overrides_that_aro_cannot_do_are_refused(pool: Pool) -> None:
    """A recipe's fields are refused as Megatron's flags are, in one sentence."""
    with pytest.raises(Exception, match="does not work with --optimizer-cpu-offload: .*; drop"):
        pool.run(1, train, "written_down", "", optimizer_cpu_offload=True)


def test_the_example_names_what_there_is(setup: tuple[str, str]) -> None:
    """It compiles, and what it imports of Bridge is in the release's files."""
    tree = ast.parse(EXAMPLE.read_text())
    compile(tree, str(EXAMPLE), "exec")
    if setup[0] == "written_down":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron.bridge."):
            path = BRIDGE.joinpath(*str(node.module).split(".")[2:])
            text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
            assert all(alias.name in text for alias in node.names)
