"""Settings of every test: one thread a process, and GPU tests only where there is a GPU."""

import os
from pathlib import Path

# Child processes find the package from any folder, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")])
)
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # before torch is imported; children inherit
    os.environ[name] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
