"""This package's version, and those of others that it was tested with. Imports nothing.

The one place for both: setup.py reads the version without importing the package; `register()`
refuses any megatron-core that is not here; `megatron-aro doctor` reports what else differs.
"""

__version__ = "0.1.0"

# "2.11" stands for all of 2.11. What the tests install is pinned in scripts/requirements.txt.
TESTED = {
    "megatron-core": ("0.18.2", "0.19.2"),  # 0.18.2: your own scripts, by tests/.../test_patches.py
    "megatron-bridge": ("0.6.2",),
    "torch": ("2.11",),
    "triton": ("3.6",),
    "emerging-optimizers": ("0.3", "0.4"),
}
