"""Packaging of megatron-aro; the tools' settings are in pyproject.toml.

Requirements are loose on purpose: installing must never replace the torch of a vendor's
container. Where Megatron-LM is a git checkout, `pip install --no-deps` leaves everything as it
is. The versions that the tests use are pinned in scripts/requirements.txt alone.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "megatron_aro/version.py").read_text())[1]
README = HERE / "README.md"

MUON = ["emerging-optimizers>=0.3,<0.5"]
QUICKSTART = ["matplotlib"]
STUDIES = QUICKSTART + ["scikit-learn"]
DATA = ["tiktoken", "tokenizers", "zstandard", "pyarrow"]
TEST = ["pytest", "hypothesis", "ruff", "mypy", "einops"]  # Megatron's, for optimizer instances

setup(
    name="megatron-aro",
    version=VERSION,
    description="The ARO optimizer for Megatron-LM: --optimizer aro",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["megatron_aro", "megatron_aro.*"]),
    python_requires=">=3.12",
    install_requires=["torch", "megatron-core>=0.18.2,<0.20", "numpy", "psutil", "pyyaml"],
    entry_points={"console_scripts": ["megatron-aro = megatron_aro.cli.main:main"]},
    extras_require={
        "muon": MUON,
        "quickstart": QUICKSTART,
        "studies": STUDIES,
        "data": DATA,
        "test": TEST + MUON + QUICKSTART,
    },
)
