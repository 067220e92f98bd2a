"""What is installed is complete: all kernels and tuned configurations are in the wheel, and found as resources."""

import subprocess
import sys
import zipfile
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# source folder -> where it is in the installed package
FOLDERS = {"cupyflash": "cupyflash", "kernels_cu": "cupyflash/kernels_cu", "tuning": "cupyflash/tuning"}


def shipped(*patterns):
    """(path in the repository, path in the package) of all files of these patterns."""
    for folder, package in FOLDERS.items():
        for pattern in patterns:
            for path in (ROOT / folder).rglob(pattern):
                yield path, f"{package}/{path.relative_to(ROOT / folder).as_posix()}"


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True, **options).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The built wheel. Without isolation, so nothing is downloaded; from elsewhere, so nothing is left here."""
    pytest.importorskip("setuptools", minversion="77", reason="setuptools>=77 is not installed")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", *FOLDERS):
        (source / name).symlink_to(ROOT / name)
    python("-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(out), str(source))
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_contains_every_source_file(wheel):
    names = set(wheel.namelist())
    expected = {target for _, target in shipped("*.py", "*.cu", "*.cuh", "*.yaml", "py.typed")}
    assert len(expected) > 20
    assert expected <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith("tests/")]


def test_wheel_runs_alone(wheel, tmp_path):
    """Unpacked where nothing of the repository is near, it imports and finds its kernels."""
    wheel.extractall(tmp_path)
    program = (
        "import cupyflash, importlib.resources as r;"
        "print(cupyflash.__file__, sum(f.name.endswith('.cu') for f in r.files('cupyflash.kernels_cu').iterdir()))"
    )
    where, kernels = python("-S", "-c", f"import sys; sys.path[:0] = {[str(tmp_path), *sys.path]!r}; {program}").split()
    assert Path(where).is_relative_to(tmp_path)
    assert int(kernels) == len(list((ROOT / "kernels_cu").glob("*.cu"))) > 0


def test_resources_of_this_installation():
    """Editable or not: the files are where importlib.resources looks."""
    for path, target in shipped("*.cu", "*.cuh", "*.yaml"):
        package, *parts = Path(target).parts[:2], *Path(target).parts[2:]
        resource = resources.files(".".join(package)).joinpath(*parts)
        assert resource.read_bytes() == path.read_bytes()
