"""pip builds the source distribution and the wheel that users get."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import scaledtensor as sct

ROOT = Path(__file__).parents[1]
#: A checkout has more files, and these belong to no distribution.
CHANCE = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "*.egg-info")

pytest.importorskip("setuptools", "77")


def run(*command: object, **options: object) -> str:
    """Return a command's output, without the variables that lead Python to this checkout."""
    env = {name: words for name, words in os.environ.items() if not name.startswith("PYTHON")}
    options = {"env": env, "capture_output": True, "text": True, "check": False} | options
    done = subprocess.run([str(word) for word in command], **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(kind: str, tree: Path, into: Path) -> Path:
    """Build by the back end of pyproject.toml, as pip and build call it, in this environment."""
    call = f"from setuptools import build_meta as b; b.build_{kind}({str(into)!r})"
    run(sys.executable, "-c", call, cwd=tree)
    (made,) = into.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT, folder / "checkout", ignore=CHANCE)
    (folder / "sdist").mkdir()
    with tarfile.open(built("sdist", folder / "checkout", folder / "sdist")) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"scaledtensor-{sct.__version__}"


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The wheel that pip makes of the source distribution."""
    return built("wheel", source, tmp_path_factory.mktemp("wheel"))


def test__the_source_distribution__has_what_the_tests_read(source):
    for name in (
        *("LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"),
        *("pyproject.toml", "requirements-dev.txt", "docs/ops.md", "docs/write_ops.py"),
        *("scaledtensor/native/casts.cpp", "tests/conftest.py", "tests/ops/opinfo.py"),
        *("tests/torch_versions/2.15.0.json", "examples/new_op.ipynb", "benchmarks/step.py"),
    ):
        assert (source / name).is_file(), name
    assert not list(source.rglob("*.pyc"))


def test__the_wheel__has_every_module_and_what_it_reads(wheel):
    package = ROOT / "scaledtensor"
    files = [f for f in package.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    here = {f.relative_to(ROOT).as_posix() for f in files}
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        (about,) = (archive.read(n).decode() for n in inside if n.endswith("/METADATA"))
    assert {"scaledtensor/native/casts.cpp", "scaledtensor/py.typed"} <= inside
    info = f"scaledtensor-{sct.__version__}.dist-info/"
    assert {name for name in inside if not name.startswith(info)} == here
    assert {f"{info}licenses/LICENSE", f"{info}entry_points.txt"} <= inside
    for line in (
        f"Version: {sct.__version__}",
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.11",
        "Requires-Dist: torch>=2.11",
    ):
        assert line in about.splitlines()


def test__the_installed_wheel__runs_without_the_checkout(wheel, tmp_path):
    """Run in an empty environment that sees this environment's torch."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    offline = ("--no-deps", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, "install", *offline, wheel)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    # This path comes last, and Python does not read .pth files in it, such as an editable
    # checkout's.
    (site / "torch.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    said = run(python.with_name("scaledtensor"), "--help", cwd=tmp_path)
    assert "usage: scaledtensor" in said
    program = """
import importlib.metadata, pathlib, torch
import scaledtensor as sct
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
x = torch.randn(32, 8)
before = model(x).detach()
y = sct.scale_model(model)(x)
y.square().mean().backward()
assert (y.dequantize() - before).abs().max() < 0.25
assert isinstance(model[0].weight.grad, sct.ScaledTensor)
print(importlib.metadata.version("scaledtensor"), pathlib.Path(sct.__file__).parents[1])
"""
    said = run(python, "-c", program, cwd=tmp_path)
    assert said.split() == [sct.__version__, str(site)]
