"""What compilers are given: flat sources against the C preprocessor, parameter structs against the C++ compiler."""

import itertools
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from cupyflash import kernels_cu
from cupyflash.runtime import params, source

KERNELS = Path(kernels_cu.__file__).parent
KERNEL_FILES = sorted(path.name for path in KERNELS.glob("*.cu"))
PLATFORMS = {"cuda": "ptx", "emulated": "emulated"}
STRUCTS = [
    *(params.FORWARD, params.FORWARD_V1, params.FORWARD_TENSOR, params.BACKWARD),
    *(params.SOFTMAX, params.GRADIENT, params.ROWS),
]
LINE = re.compile(r'#line (\d+) "(.+)"')

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
every_source = pytest.mark.parametrize("file", KERNEL_FILES)
every_platform = pytest.mark.parametrize("platform", PLATFORMS)
every_struct = pytest.mark.parametrize("param_struct", STRUCTS, ids=lambda s: s.name)


def gxx(*arguments, text=None):
    return subprocess.run(
        ["g++", "-std=c++17", *map(str, arguments)], input=text, capture_output=True, text=True, check=True
    )


# ---- flattening


@pytest.fixture(scope="module")
def include_folders(tmp_path_factory):
    """{platform: the -I options with which a compiler finds every header by itself}."""
    folders = {}
    for platform, folder in PLATFORMS.items():
        path = tmp_path_factory.mktemp(platform)
        (path / "platform").symlink_to(KERNELS / "include" / folder)
        for name, header in source._GENERATED.items():
            (path / name).write_text(f"#pragma once\n{header()}")
        folders[platform] = ["-I", path, "-I", KERNELS / "include"]
    return folders


def preprocessed(text):
    """Lines of preprocessed text that are neither blank nor markers; markers may split lines and leave blanks."""
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


@needs_gxx
@every_platform
@every_source
def test_flat_source_is_what_a_preprocessor_makes_of_the_files(include_folders, file, platform):
    of_files = gxx("-E", "-P", "-x", "c++", *include_folders[platform], KERNELS / file).stdout
    of_flat = gxx("-E", "-P", "-x", "c++", "-", text=source.flatten(file, platform)).stdout
    assert preprocessed(of_flat) == preprocessed(of_files)
    assert re.search(r"struct (Forward(V1|Tensor)?|Softmax)Params ", of_flat)


@needs_gxx
@every_platform
@every_source
def test_every_include_is_there_once(include_folders, file, platform):
    rule = gxx("-MM", "-x", "c++", *include_folders[platform], KERNELS / file).stdout
    needed = {Path(path).name for path in rule.replace("\\\n", " ").split()[1:]}
    flat = source.flatten(file, platform)
    begun = [name for number, name in LINE.findall(flat) if number == "1"]
    assert len(begun) == len(set(begun))
    assert {Path(name).name for name in begun} == needed
    assert "#include" not in flat
    assert "#pragma once" not in flat


@every_platform
@every_source
def test_line_directives_name_the_line(file, platform):
    def original(name):
        if name in source._GENERATED:
            return source._GENERATED[name]().splitlines()
        folder, _, rest = name.rpartition("/")
        path = KERNELS / "include" / (PLATFORMS[platform] if folder else "") / rest
        return (KERNELS / name if name == file else path).read_text().splitlines()

    checked = 0
    for line in source.flatten(file, platform).splitlines():
        if found := LINE.fullmatch(line):
            number, name = int(found[1]), found[2]
            continue
        if line:
            assert line == original(name)[number - 1], f"{name}:{number}"
            checked += 1
        number += 1
    assert checked > 300  # nothing of any file was lost: see the preprocessor above


@every_platform
@every_source
def test_a_changed_header_changes_the_text(monkeypatch, file, platform):
    """CuPy's cache of compiled kernels knows the text only."""
    flat = source.flatten(file, platform)
    headers = {name for _, name in LINE.findall(flat)} - {file}
    read = source._read
    assert len(headers) > 5
    for changed in headers:
        monkeypatch.setattr(source, "_read", lambda name, *of, c=changed: read(name, *of) + "// more\n" * (name == c))
        assert source.flatten.__wrapped__(file, platform) != flat


# ---- parameter structs


@pytest.fixture(scope="module")
def as_the_compiler_has_it(tmp_path_factory):
    """{struct: (its size, [(offset, size) of each field], the values of each field in bytes packed by the host)}."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("structs")
    found = {}
    for param_struct in STRUCTS:
        text = f"""
#include <cstddef>
#include <cstdio>
using Element = unsigned short; using Wide = float; using u32 = unsigned; using i32 = int; using i64 = long long;
struct alignas(64) TensorMap {{ i64 words[15], last; operator i64() const {{ return last; }} }};
{param_struct.declaration()}
int main() {{
    {param_struct.name} p;
    printf("%zu\\n", fread(&p, 1, sizeof p, stdin));
"""
        for name, ctype in param_struct.fields:
            value = f"(double)p.{name}" if ctype in ("i32", "float", "double") else f"(i64)p.{name}"
            form = "%lld" if value.startswith("(i64)") else "%.17g"
            text += f'printf("%zu %zu {form}\\n", offsetof({param_struct.name}, {name}), sizeof p.{name}, {value});\n'
        program = folder / param_struct.name
        gxx("-x", "c++", "-", "-o", program, text=text + "}")
        values = zip(param_struct.fields, values_of(param_struct), strict=True)
        packed = param_struct.packer.pack(
            *(struct.pack("120xq", value) if ctype == "TensorMap" else value for (_, ctype), value in values)
        )
        output = subprocess.run([program], input=packed + b"\xff", capture_output=True, check=True).stdout.decode()
        size, *fields = output.splitlines()
        found[param_struct.name] = int(size), [line.split() for line in fields]
    return found


def values_of(param_struct):
    """Different values, each of which needs the width of its field."""
    big = {"i64": -(2**40), "i32": -(2**20), "float": 0.5, "double": 2**-40}
    return [big.get(ctype, 2**46) + n for n, (_, ctype) in enumerate(param_struct.fields)]


@every_struct
def test_the_compiler_reads_what_the_host_packs(as_the_compiler_has_it, param_struct):
    size, fields = as_the_compiler_has_it[param_struct.name]
    assert size == param_struct.packer.size
    assert [float(value) for _, _, value in fields] == values_of(param_struct)
    end = 0
    for (name, _), (offset, width, _) in zip(param_struct.fields, fields, strict=True):
        assert int(offset) == end, f"{name} has padding before it"
        end += int(width)
    assert 0 <= size - end < (64 if param_struct.maps else 8)


@every_struct
def test_maps_and_pointers_come_first_and_are_counted(as_the_compiler_has_it, param_struct):
    maps = [name for name, ctype in param_struct.fields if ctype == "TensorMap"]
    pointers = [name for name, ctype in param_struct.fields if ctype.endswith("*")]
    addresses = param_struct.maps + param_struct.pointers
    assert [name for name, _ in param_struct.fields[:addresses]] == maps + pointers
    assert struct.calcsize(param_struct.address_packer.format) == 128 * len(maps) + 8 * len(pointers)
    _, fields = as_the_compiler_has_it[param_struct.name]
    assert int(fields[addresses][0]) == param_struct.address_packer.size


@pytest.mark.parametrize(
    ("param_struct", "family"),
    [
        *itertools.product((params.FORWARD, params.BACKWARD), ("_mma", "_simt")),
        (params.FORWARD_V1, "_v1"),
        (params.BACKWARD, "_v1"),
    ],
)
def test_every_family_uses_all_strides(param_struct, family):
    assert {name for name in unused([param_struct], family) if name.endswith("_stride")} == set()


def test_tensor_maps_stand_for_pointers_and_strides():
    """Of q and k: v is read where it is not finite, too."""
    strides = {name for name in unused([params.FORWARD_TENSOR], "_wgmma") if name.endswith("_stride")}
    assert all(re.match("[qk]_", name) for name in strides)


def test_every_field_is_used():
    """Of the fields that both structs have, one pass may do without some."""
    assert unused(STRUCTS, "") == set()


def unused(structs, family):
    """Fields of these structs that no kernel of a family reads."""
    texts = [source.flatten(name) for name in KERNEL_FILES if family in name]
    kernels = "".join(text for text in texts if any(f"PARAMS({s.name})" in text for s in structs))
    fields = {name for s in structs for name, _ in s.fields}
    return {name for name in fields if not re.search(rf"\bparams\.{name}\b", kernels)}


@needs_gxx
def test_another_layout_does_not_compile():
    wider = params.ParamStruct("Params", (("q", "float*"), ("batch", "i32")))
    text = wider.declaration().replace("batch;", "batch; i32 another; i32 third;")
    with pytest.raises(subprocess.CalledProcessError) as error:
        gxx("-fsyntax-only", "-x", "c++", "-", text=f"using i32 = int;\n{text}")
    assert "params.py lays Params out differently" in error.value.stderr
