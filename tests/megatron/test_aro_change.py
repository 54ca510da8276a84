"""Going on with ARO from another optimizer's checkpoint, or with other settings: as said, only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aro_runs import ARO as _ARO
from aro_runs import DISTRIBUTED, GATED
from logical_state import logical, train_watched
from pool import Pool
from runs import TINY

SHORT = ["--train-iters", "6", *GATED]
ARO = [*_ARO, *SHORT]
RESHARDABLE = ["--dist-ckpt-optim-fully-reshardable"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
FROM = ["--aro-init-momentum", "exp_avg", "--aro-init-rotation"]


def save(pool: Pool, folder: Path, ranks: int, argv: list[str]) -> list[float]:
    """Train six steps, save after three; returns the losses of the last three."""
    saved = pool.train(ranks, [*argv, "--save", str(folder), "--save-interval", "3"])
    assert saved[0].exit_status == 0, saved[0].stderr
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return saved[0].losses[3:]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint of iteration 3, whole."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(str(folder / "iter_0000003"))
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize("bf16", [[], ["--bf16"]], ids=["float32", "bf16"])
def test_momenta_come_from_another_optimizers_checkpoint(
    pool: Pool, tmp_path: Path, optimizer: str, bf16: list[str]
) -> None:
    """Momenta and AdamW's moments bit for bit, in another layout too; the loss goes on falling."""
    argv = [*TINY, *SHORT, *bf16, "--optimizer", optimizer]
    losses = save(pool, tmp_path, 2, argv)
    load = ["--load", str(tmp_path), *FROM]
    (refused, _) = pool.train(2, [*ARO, *bf16, "--load", str(tmp_path)])
    assert refused.exit_status == 2
    assert f"The checkpoint's optimizer is {optimizer}" in refused.stderr
    assert "--aro-init-momentum exp_avg (or zero)" in refused.stderr
    states = {}
    for name, ranks, flags in (
        ("identity", 2, [*load, "identity"]),
        ("qr", 2, [*load, "qr", *TP2, *DISTRIBUTED]),
        ("zero", 1, [*load, "identity", "--aro-init-momentum", "zero"]),
    ):
        results = pool.run(ranks, train_watched, [*ARO, *bf16, *flags])
        assert results[0].exit_status == 0
        states[name] = logical([rank.inspected for rank in results])
        assert results[0].losses[0] == pytest.approx(losses[0], abs=2e-2)
        assert len(results[0].losses) == 3
    logged = pool.train(2, [*ARO, *bf16, *load, "identity"])[0].stdout
    position = "embedding.position_embeddings.weight"
    absent = f"not in the checkpoint, from zero: exp_avg of {position}, exp_avg_sq of {position}\n"
    assert (absent in logged) == (optimizer == "muon")
    assert f"ARO: from {optimizer}: momenta: exp_avg, rotations: identity" in logged
    moments = stored(tmp_path)
    last = "decoder.layers.self_attention.linear_proj.weight"
    kind = "exp_avg" if optimizer == "adam" else "momentum_buffer"
    for layer in range(2):
        name = f"decoder.layers.{layer}.self_attention.linear_proj.weight"
        assert torch.equal(
            states["qr"][f"{name}.exp_avg"], moments[f"optimizer.state.{kind}.{last}"][layer]
        )
        assert not states["zero"][f"{name}.exp_avg"].any()
    word = "embedding.word_embeddings.weight"
    for state in states.values():
        assert torch.equal(
            state[f"{word}.exp_avg_sq"], moments[f"optimizer.state.exp_avg_sq.{word}"]
        )
        assert state[f"{word}.step"] == 3
    for name, tensor in states["identity"].items():
        if name.startswith("rotation."):
            assert torch.equal(tensor, torch.eye(*tensor.shape))
            turned = states["qr"][name]
            assert not torch.allclose(turned, tensor, atol=0.1)
            assert torch.allclose(turned.T @ turned, torch.eye(tensor.shape[1]), atol=1e-2)
        elif not name.startswith("fallbacks."):
            assert torch.equal(tensor, states["qr"][name]), name


def test_pieces_of_buffers_of_adamw_are_refused(pool: Pool, tmp_path: Path) -> None:
    argv = [*TINY, *SHORT, *DISTRIBUTED, "--optimizer", "adam"]
    save(pool, tmp_path, 2, argv)
    (refused, _) = pool.train(2, [*ARO, *DISTRIBUTED, "--load", str(tmp_path), *FROM, "qr"])
    assert refused.exit_status == 2
    assert "save it with --dist-ckpt-optim-fully-reshardable" in refused.stderr
    weights = ["--load", str(tmp_path), "--no-load-optim"]
    assert len(pool.train(2, [*ARO, *DISTRIBUTED, *weights])[0].losses) == 3
    save(pool, tmp_path / "all", 2, [*argv, *RESHARDABLE])
    results = pool.train(2, [*ARO, *DISTRIBUTED, "--load", str(tmp_path / "all"), *FROM, "qr"])
    assert results[0].exit_status == 0 and len(results[0].losses) == 3


@pytest.mark.parametrize("form", [[], DISTRIBUTED], ids=["model space", "bucket space"])
def test_other_settings_start_other_rotations(pool: Pool, tmp_path: Path, form: list[str]) -> None:
    """With --aro-init-rotation, momenta stay; what has the same settings loads as always."""
    save(pool, tmp_path, 2, [*ARO, *form])
    load = [*form, "--load", str(tmp_path)]
    other = ["--aro-orientation", "left", "--aro-projection", "adam"]
    (refused, _) = pool.train(2, [*ARO, *load, *other])
    assert refused.exit_status == 2
    assert "--aro-projection from sinkhorn to adam" in refused.stderr
    assert "--aro-orientation from residual to left" in refused.stderr
    assert "--aro-init-rotation identity (or qr" in refused.stderr
    states = []
    for flags in (other, []):
        argv = [*ARO, *load, *flags, "--aro-init-rotation", "identity"]
        results = pool.run(2, train_watched, argv)
        assert results[0].exit_status == 0
        states.append(logical([rank.inspected for rank in results]))
    anew, kept = states
    for name, tensor in anew.items():
        if name.startswith("rotation."):
            assert torch.equal(tensor, torch.eye(*tensor.shape))
        elif name.endswith(".exp_avg"):
            assert tensor.any() and torch.equal(tensor, kept[name])
    assert not any(torch.equal(t, torch.eye(*t.shape)) for n, t in kept.items() if "rotation" in n)
