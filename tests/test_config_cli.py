"""cupyflash config: where winners are, why one is taken, and moving them between files."""

import dataclasses
import re

import pytest

from cupyflash.cli import config as config_cli
from cupyflash.cli import info, main
from cupyflash.resources import KNOWN_GPUS
from cupyflash.tiles import TileConfig
from cupyflash.tuning import files, layers, settings, store
from cupyflash.tuning.entries import Entry, Kind, Measured, Winners

H200, A100 = KNOWN_GPUS["H200"], KNOWN_GPUS["A100"]
KIND = Kind("forward", "half", 64, 64, False)
FAST = Entry(KIND, TileConfig("mma", 64, 32, 4), Measured(seconds=1e-3, default_seconds=1.25e-3))
SLOW = Entry(KIND, TileConfig("mma", 64, 48, 4), Measured(seconds=2e-3, provenance="another machine"))
CAUSAL = Entry(dataclasses.replace(KIND, masked=True), TileConfig("mma", 64, 48, 4))


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """No file anywhere, and no GPU; the user's folder is tmp_path / "winners"."""
    packaged = tmp_path / "packaged"
    packaged.mkdir()
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(layers, "packaged_folder", lambda: packaged)
    monkeypatch.setattr(layers, "_memory", {})
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setattr(info, "current_gpu", no_gpu)
    store.refresh()
    yield
    store.refresh()


def no_gpu():
    raise RuntimeError("there is no GPU")


@pytest.fixture
def write(tmp_path):
    def write(name, *entries, device=H200):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(files.text_of(Winners(device, entries)))
        return path

    return write


@pytest.fixture
def run(capsys):
    """run(arguments): (status, what is printed, what is printed as an error)."""

    def run(*arguments):
        try:
            status = main(["config", *map(str, arguments)])
        except SystemExit as stopped:
            status = stopped.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def entries(path):
    contents = files.read(path)
    assert contents.complaints == ()
    return contents.winners.entries


# ---- where


def test_where_names_every_file(write, run, tmp_path, monkeypatch):
    path = write("packaged/NVIDIA_H200.yaml", FAST, CAUSAL)
    status, said, _ = run("where", "--gpu", "H200")
    assert status == 0
    assert re.search(r"^GPU +NVIDIA H200: sm_90", said)
    assert re.search(r"^CUPYFLASH_CONFIG +not set$", said, re.M)
    assert re.search(rf"^user +{tmp_path}/winners/NVIDIA_H200.yaml: no such file$", said, re.M)
    assert re.search(rf"^packaged +{path}: 2 entries$", said, re.M)
    assert re.search(r"^CUPYFLASH_TUNE +off$", said, re.M)

    monkeypatch.setenv("CUPYFLASH_CONFIG", str(write("mine.yaml", FAST, device=dataclasses.replace(H200, sm_count=7))))
    store.refresh()
    _, said, _ = run("where", "--gpu", "H200")
    assert re.search(rf"^CUPYFLASH_CONFIG +{tmp_path}/mine.yaml: 1 entries, measured on .*sm_count=7", said, re.M)
    monkeypatch.delenv("CUPYFLASH_CONFIG")
    _, said, _ = run("where", "--gpu", "H100")
    assert re.search(rf"^same architecture +{path}$", said, re.M)


def test_where_takes_this_machines_gpu(run, monkeypatch):
    monkeypatch.setattr(info, "current_gpu", lambda: A100)
    assert "NVIDIA A100-SXM4-80GB: sm_80" in run("where")[1]


@pytest.mark.parametrize("arguments", [("where",), ("show",), ("export", "-"), ("why", "S=64")])
def test_without_a_gpu_one_must_be_named(run, arguments):
    status, _, error = run(*arguments)
    assert status == 2
    assert "there is no GPU; or name a GPU" in error


# ---- why


def test_why_says_what_is_taken_and_what_is_not(write, run):
    hopper = Entry(KIND, TileConfig("wgmma", 128, 64, 12, 2))
    large = Entry(dataclasses.replace(KIND, length=1024), TileConfig("mma", 512, 512, 4))
    write("packaged/NVIDIA_H200.yaml", hopper, FAST)
    write("winners/NVIDIA_H200.yaml", large)
    status, said, _ = run("why", "S=1024 D=60", "gpu=H200")
    assert status == 0
    forward, backward = said.split("\nbackward ")
    assert "looked up as forward float16 d64 full length 1024 rows 16384" in forward
    assert "takes mma Br=64 Bc=32 warps=4  (tuned: packaged NVIDIA_H200.yaml)" in forward
    assert "not mma Br=512 Bc=512 warps=4  (tuned: user NVIDIA_H200.yaml): needs 2304 registers" in forward
    assert "not wgmma Br=128 Bc=64 warps=12 stages=2  (tuned: packaged NVIDIA_H200.yaml): tensor maps need" in forward
    assert "(heuristic)" in backward
    assert "there are no winners of this kind for NVIDIA H200 or its architecture" in backward


def test_why_says_that_kernels_have_changed(write, run):
    write("packaged/NVIDIA_H200.yaml", dataclasses.replace(FAST, measured=Measured(kernel="0123456789ab")))
    assert "kernels that have changed since: cupyflash tune measures again" in run("why", "gpu=H200")[1]


def test_why_speaks_of_what_is_never_looked_up(write, run):
    write("packaged/NVIDIA_H200.yaml", FAST)
    said = run("why", "gpu=H200", "softcap=3")[1]
    assert "(heuristic)" in said
    assert "winners are measured without a cap and with a positive scale" in said


def test_why_takes_what_info_explain_takes(run):
    status, _, error = run("why", "colour=blue")
    assert status == 2
    assert "why: unknown key 'colour'" in error


def test_info_names_layer_and_file(write, capsys):
    write("winners/NVIDIA_H200.yaml", FAST)
    assert main(["info", "--explain", "gpu=H200"]) == 0
    assert "mma Br=64 Bc=32 warps=4  (tuned: user NVIDIA_H200.yaml)" in capsys.readouterr().out


# ---- show, export


def test_show_lists_what_is_in_force(write, run):
    write("packaged/NVIDIA_H200.yaml", SLOW, CAUSAL)
    write("winners/NVIDIA_H200.yaml", FAST)
    status, said, _ = run("show", "--gpu", "H200")
    assert status == 0
    _, *lines = (re.sub(" +", " ", line) for line in said.splitlines())
    assert lines == [
        "forward half d64 full mma Br=64 Bc=32 warps=4 1000.0 us, 1.25 times the default user NVIDIA_H200.yaml",
        "forward half d64 masked mma Br=64 Bc=48 warps=4 packaged NVIDIA_H200.yaml",
    ]


def test_show_a_file(write, run):
    path = write("some.yaml", FAST)
    path.write_text(path.read_text() + "- {}\n")
    status, said, error = run("show", path)
    assert status == 1
    assert "forward half d64 full  mma Br=64 Bc=32 warps=4  1000.0 us" in said
    assert error == f"{path}: entry 2 (line 8) is left out: kind is missing\n"


def test_export_writes_what_is_in_force(write, run, tmp_path):
    write("packaged/NVIDIA_H200.yaml", SLOW, CAUSAL)
    write("winners/NVIDIA_H200.yaml", FAST)
    out = tmp_path / "out.yaml"
    assert run("export", out, "--gpu", "H200") == (0, f"2 entries for NVIDIA H200 in {out}\n", "")
    assert entries(out) == (FAST, CAUSAL)
    assert files.parse_text(run("export", "-", "--gpu", "H200")[1]).winners.entries == (FAST, CAUSAL)

    status, _, error = run("export", out, "--gpu", "H200")
    assert status == 2
    assert f"{out} exists; name a new file, or - to print" in error
    assert "there are no winners for NVIDIA A100-SXM4-80GB to export" in run("export", "-", "--gpu", "A100")[2]


# ---- import, merge


def test_import_keeps_the_better_ones(write, run, tmp_path):
    pytest.importorskip("filelock")
    one, two = write("one.yaml", FAST, CAUSAL), write("two.yaml", SLOW)
    other = write("other.yaml", SLOW, device=A100)
    kept = tmp_path / "winners" / "NVIDIA_H200.yaml"
    status, said, _ = run("import", one, two, other)
    assert status == 0
    assert f"1 entries of {two} merged into {kept}" in said
    assert [entry.config for entry in entries(kept)] == [FAST.config, CAUSAL.config]
    assert [entry.measured.provenance for entry in entries(kept)] == ["from one.yaml"] * 2
    assert entries(kept.with_name("NVIDIA_A100-SXM4-80GB.yaml")) == (SLOW,)  # who measured it is kept
    before = kept.read_bytes()
    run("import", two, one)
    assert kept.read_bytes() == before


def test_import_says_what_it_leaves_out(write, run, tmp_path):
    pytest.importorskip("filelock")
    path = write("one.yaml", FAST)
    path.write_text(path.read_text() + "- {}\n")
    status, _, error = run("import", path)
    assert (status, error) == (1, f"{path}: entry 2 (line 8) is left out: kind is missing\n")
    assert len(entries(tmp_path / "winners" / "NVIDIA_H200.yaml")) == 1


def test_import_and_merge_leave_out_what_the_gpu_cannot_run(write, run, tmp_path):
    pytest.importorskip("filelock")
    huge = dataclasses.replace(FAST, config=dataclasses.replace(FAST.config, Bc=1024))
    path, kept = write("one.yaml", huge, CAUSAL), tmp_path / "winners" / "NVIDIA_H200.yaml"
    assert huge.key == FAST.key
    run("import", write("two.yaml", FAST))
    for arguments in (("import", path), ("merge", path, write("three.yaml", FAST), "-o", tmp_path / "out.yaml")):
        status, _, error = run(*arguments)
        assert status == 1
        assert re.fullmatch(rf"{path}: .* is never taken: needs .*, and left out\n", error)
    for result in (kept, tmp_path / "out.yaml"):
        assert [entry.config for entry in entries(result)] == [FAST.config, CAUSAL.config]


def test_import_tells_of_a_device_that_is_not_what_its_name_says(write, run):
    pytest.importorskip("filelock")
    odd = dataclasses.replace(A100, sm_count=7)
    status, said, _ = run("import", write("one.yaml", SLOW, device=odd))
    assert status == 0
    assert "its device is Limits(name='NVIDIA A100-SXM4-80GB', arch=80, " in said


@pytest.mark.parametrize(("text", "message"), [(None, "does not exist"), ("schema: 3", "schema is 3; this version")])
def test_import_of_nothing(run, tmp_path, text, message):
    path = tmp_path / "x.yaml"
    if text:
        path.write_text(text)
    status, _, error = run("import", path)
    assert status == 2
    assert message in error
    assert not (tmp_path / "winners").exists()


def test_merge_makes_one_file(write, run, tmp_path):
    one, two, out = write("one.yaml", SLOW), write("two.yaml", CAUSAL, FAST), tmp_path / "out.yaml"
    assert run("merge", one, two, "-o", out)[0] == 0
    assert [entry.config for entry in entries(out)] == [FAST.config, CAUSAL.config]
    assert run("merge", two, one, out, "-o", "-")[1] == out.read_text()
    assert run("merge", one, "-o", "-")[1] == files.text_of(Winners(H200, (SLOW,)))


def test_gpu_models_are_not_merged(write, run):
    status, _, error = run("merge", write("one.yaml", SLOW), write("two.yaml", FAST, device=A100), "-o", "-")
    assert status == 2
    assert "merge those of one model only" in error


# ---- check


def test_check_finds_what_is_wrong(write, run, tmp_path, monkeypatch):
    illegal = Entry(dataclasses.replace(KIND, head_dim=128), TileConfig("mma", 512, 512, 4))
    stale = dataclasses.replace(FAST, measured=Measured(kernel="0123456789ab"))
    user = write("winners/NVIDIA_H200.yaml", illegal, stale)
    user.write_text(user.read_text() + "- {kind: 3}\n")
    packaged = write("packaged/NVIDIA_A100.yaml", FAST, device=dataclasses.replace(A100, sm_count=7))
    mine = tmp_path / "mine.yaml"
    mine.write_text("nothing")
    monkeypatch.setenv("CUPYFLASH_CONFIG", str(mine))
    status, said, error = run("check")
    assert status == 1
    assert f"{user}: 2 entries for NVIDIA H200" in said
    assert "forward half d64 full, mma Br=64 Bc=32 warps=4, was measured with kernels that have changed" in said
    assert f"{packaged}: its device is Limits(name='NVIDIA A100-SXM4-80GB'" in said
    assert [line.partition(": ")[0] for line in error.splitlines()] == [str(mine), str(user), str(user)]
    assert "entry 3 (line 10) is left out: config is missing" in error
    assert re.search(r"forward half d128/64 full, mma Br=512 .*, is never taken: needs \d+ ", error)


def test_check_of_good_files(write, run):
    path = write("one.yaml", FAST, CAUSAL)
    assert run("check", path) == (0, f"{path}: 2 entries for NVIDIA H200\n", "")
    assert run("check") == (0, "", "")


def test_what_ships_is_in_order(run, monkeypatch):
    monkeypatch.undo()
    for path in sorted(layers.packaged_folder().glob("*.yaml")):
        status, said, error = run("check", path)
        assert (status, error) == (0, "")
        assert said.count("\n") == 1, said


@pytest.mark.parametrize("kind", ["half", "float16", "bfloat16", "tf32", "float32"])
def test_checks_of_every_kind_of_dtype(kind):
    dtype = {"half": "float16", "tf32": "float32"}.get(kind, kind)
    assert config_cli._example(dataclasses.replace(KIND, dtype=kind)).dtype == dtype


# ---- info


class FakeRuntime:
    def getDeviceProperties(self, index):
        return {
            "name": [b"NVIDIA H200", b"NVIDIA H100 80GB HBM3", b"NVIDIA L4"][index],
            "major": [9, 9, 8][index],
            "minor": [0, 0, 9][index],
            "sharedMemPerBlockOptin": 232_448,
            "multiProcessorCount": 132,
            "l2CacheSize": 60 << 20,
        }


def test_info_says_what_is_measured(write):
    write("packaged/NVIDIA_H200.yaml", FAST, CAUSAL)
    write("winners/NVIDIA_H200.yaml", FAST)
    assert [info._tiles(FakeRuntime(), index) for index in range(3)] == [
        "1 measured winners in user NVIDIA_H200.yaml, 2 measured winners in packaged NVIDIA_H200.yaml, else by "
        "heuristic",
        "as measured on the same architecture (packaged NVIDIA_H200.yaml), else by heuristic",
        "by heuristic (there are no measurements for this model)",
    ]
