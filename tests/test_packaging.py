"""The wheel holds the package whole, and setup.py agrees with the pins of the tests."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import megatron_aro
from megatron_aro.version import TESTED

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy: setuptools leaves folders beside setup.py."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "megatron_aro", folder / "megatron_aro")
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(folder / "out")]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, str(folder)], check=True)
    return zipfile.ZipFile(next((folder / "out").glob("*.whl")))


def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "megatron_aro").rglob("*.py")}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == modules
    assert any(name.endswith("/LICENSE") for name in wheel.namelist())


def test_version_and_requirements(wheel):
    name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == megatron_aro.__version__
    accepted = {r.name: r for r in map(Requirement, metadata.get_all("Requires-Dist"))}
    assert not accepted["torch"].specifier  # installing must not replace a container's torch
    pins = (ROOT / "scripts" / "requirements.txt").read_text().splitlines()
    for pin in (Requirement(line) for line in pins if not line.startswith("#")):
        if pin.name in accepted:
            assert next(iter(pin.specifier)).version in accepted[pin.name].specifier
        if pin.name in TESTED:
            pinned = next(iter(pin.specifier)).version + "."
            assert any(pinned.startswith(tested + ".") for tested in TESTED[pin.name])


def test_what_other_releases_the_tests_fetch_is_in_the_window():
    """Each tested release of Megatron and of Bridge is installed, or scripts/test.sh fetches it."""
    script = (ROOT / "scripts" / "test.sh").read_text()
    installed = (ROOT / "scripts" / "requirements.txt").read_text()
    for name in ("megatron-core", "megatron-bridge"):
        for version in TESTED[name]:
            assert f"{name}=={version}" in script + installed


def test_no_link_is_in_the_project():
    """One to a machine's own files once broke every other clone."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert listed and not [line for line in listed if line.startswith("120000")]
