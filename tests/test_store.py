"""The measured winners: which is found for a problem, in which file, and that all that ship can run on their GPU."""

import dataclasses
import os
import subprocess
import sys
import timeit
import warnings
from pathlib import Path

import pytest
import yaml

from cupyflash import dispatch, heuristics
from cupyflash.problem import Band, Problem
from cupyflash.resources import KNOWN_GPUS, Limits, why_illegal
from cupyflash.tiles import TileConfig
from cupyflash.tuning import configs, files, layers, plain_yaml, settings, store
from cupyflash.tuning.entries import Entry, EntryError, Kind, Measured, Winners

SHIPPED = sorted(Path(configs.__file__).parent.glob("*.yaml"))
H100, H200, A100 = (KNOWN_GPUS[name] for name in ("H100", "H200", "A100"))
WINNER = TileConfig("mma", 64, 32, 4)  # legal, and not what the heuristic takes
OTHER = TileConfig("mma", 64, 48, 4)  # the same
WARPGROUPS = TileConfig("wgmma", 128, 64, 12, 2)
FIRST = TileConfig("v1", 64, 128, 8, 2, 1, 2, 2, 2)
KIND = Kind("forward", "half", 64, 64, False)


def problem(d=64, dv=None, dtype="float16", precision="ieee", band=Band(None, None), **changes):  # noqa: B008
    dv = d if dv is None else dv
    p = Problem(1, 512, 512, 4, 2, d, dv, dtype, band, 0.125, 0.0, precision, False)
    return dataclasses.replace(p, **changes)


def entry(config=WINNER, measured=Measured(), **changes):  # noqa: B008
    return Entry(dataclasses.replace(KIND, **changes), config, measured)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """{layer: empty folder} that takes the place of the real one; CUPYFLASH_CONFIG is not set."""
    places = {name: tmp_path / name for name in ("CUPYFLASH_CONFIG", "user", "packaged")}
    for place in places.values():
        place.mkdir()
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path))
    places["user"] = tmp_path / "winners"
    monkeypatch.setattr(layers, "packaged_folder", lambda: places["packaged"])
    monkeypatch.setattr(layers, "_memory", {})
    monkeypatch.setattr(settings, "_warned", set())
    store.refresh()
    yield places
    store.refresh()


@pytest.fixture
def write(folders):
    """write(entries, device=, layer=): a file of winners; returns its path."""

    def write(*entries, device=H200, layer="packaged"):
        path = folders[layer] / files.file_name(device.name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(files.text_of(Winners(device, entries)))
        store.refresh()
        return path

    return write


def found(p=None, limits=H200, task="forward"):
    return [winner.config for winner in store.find(task, p or problem(), limits)]


def origin(p=None, limits=H200, mappable=True):
    config, where = dispatch.choose("forward", p or problem(), limits, mappable=mappable)
    return config, where


# ---- which entry


@pytest.mark.parametrize("name", ["NVIDIA H200", "Graphics Device / prototype", "../etc/passwd", "GPU (b)", "日本 GPU"])
def test_winners_are_found_by_the_name_of_the_gpu(write, folders, name):
    limits = dataclasses.replace(H200, name=name)
    path = write(entry(), device=limits)
    assert path.resolve().parent == folders["packaged"].resolve()
    assert found(limits=limits) == [WINNER]
    assert origin(limits=limits) == (WINNER, f"tuned: packaged {path.name}")
    assert found(limits=H100) == []


def test_without_a_file_the_heuristic_decides(folders):
    expected = heuristics.candidates("forward", problem(), H200)[0]
    assert expected != WINNER
    assert origin() == (expected, "heuristic")


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, True),
        ({"d": 59}, True),  # 64 in tiles
        ({"d": 72}, False),
        ({"dv": 128}, False),
        ({"dtype": "float32", "precision": "tf32"}, False),
        ({"dtype": "float32"}, False),
        ({"dtype": "float16", "precision": "tf32"}, True),  # only float32 has precisions
        ({"band": Band(None, 0)}, False),
        ({"band": Band(0, None)}, False),
        ({"softcap": 1.0}, False),
        ({"scale": -1.0}, False),
        ({"scale": 0.0}, False),
        ({"seqlen_k": 1 << 20, "batch": 1000}, True),
    ],
)
def test_what_an_entry_holds_for(write, changes, holds):
    write(entry())
    assert found(problem(**changes)) == ([WINNER] if holds else [])
    assert found(problem(**changes), task="backward") == []


def test_an_entry_for_one_dtype_goes_before_half(write):
    write(entry(length=512), entry(OTHER, dtype="float16", length=512))
    assert found(problem(dtype="bfloat16")) == [WINNER]
    assert found() == [OTHER, WINNER]


def test_a_nearer_entry_for_both_dtypes_goes_before_one_dtypes(write):
    """It was proven in both; what one dtype has for other sizes says less."""
    write(entry(OTHER, dtype="float16", length=1024), entry(WARPGROUPS, dtype="float16"), entry(length=512))
    assert found() == [WINNER, OTHER, WARPGROUPS]


def test_what_is_for_the_other_dtype_ends_the_reach_of_farther_entries(write):
    write(entry(OTHER, length=2048), entry(WARPGROUPS, dtype="bfloat16", length=512), entry())
    assert found() == [WINNER]
    write(entry(OTHER, length=512), entry(WARPGROUPS, dtype="bfloat16", length=512), entry())  # it came second
    assert found() == [WINNER]
    write(entry(OTHER, length=2048), entry(WARPGROUPS, dtype="bfloat16", length=512), entry())
    assert found(problem(dtype="bfloat16")) == [WARPGROUPS, OTHER, WINNER]
    assert found(problem(seqlen_k=2048)) == [OTHER, WINNER]


def test_what_is_not_legal_ends_the_reach_of_farther_entries(write):
    """Another family's, measured elsewhere, would be a guess."""
    write(entry(OTHER, length=2048), entry(WARPGROUPS, length=512), entry())
    assert origin()[0] == WARPGROUPS
    assert origin(mappable=False) == (WINNER, "tuned: packaged NVIDIA_H200.yaml")


@pytest.mark.parametrize(
    ("sizes", "changes", "holds"),
    [
        ((128, 128), {}, True),
        ((64, 100), {}, True),
        ((128, 4096), {}, False),
        ((129, 129), {}, False),
        ((64, 160), {}, False),
        ((128, 128), {"num_heads": 128}, False),
        ((128, 128), {"band": Band(-9, None)}, False),
    ],
)
def test_a_winner_with_a_block_per_head_holds_for_heads_as_short_and_alone(write, sizes, changes, holds):
    """As many rows, in fewer and longer heads or in groups of heads, would leave most of a GPU idle."""
    seqlen_q, seqlen_k = sizes
    masked = "band" in changes
    write(entry(FIRST, task="backward", length=128, rows=8192, masked=masked), entry(task="backward", masked=masked))
    heads = max(1, 8192 // seqlen_k)
    p = problem(**{"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "num_heads": heads, "num_kv_heads": heads, **changes})
    assert found(p, task="backward") == ([FIRST, WINNER] if holds else [WINNER])
    assert FIRST in found(dataclasses.replace(p, algorithm="v1"), task="backward")


def test_several_winners_stand_in_the_order_of_preference(write):
    """A layout that the first family does not take goes to the second one's winner, and not to a heuristic."""
    write(entry(WARPGROUPS), entry(masked=True), entry())
    assert found() == [WARPGROUPS, WINNER]
    assert origin()[0] == WARPGROUPS
    assert origin(mappable=False) == (WINNER, "tuned: packaged NVIDIA_H200.yaml")
    for vector_bytes, mappable in ((16, False), (8, True)):
        ((_, *chosen),) = dispatch.plan_forward(problem(), vector_bytes, H200, mappable=mappable).configs
        assert chosen == [WINNER, "tuned: packaged NVIDIA_H200.yaml"]
    write(entry(), entry(WARPGROUPS))
    assert origin()[0] == WINNER


def test_a_winner_of_one_family_leaves_the_others_to_the_heuristic(write):
    write(entry(WARPGROUPS))
    config, where = origin(mappable=False)
    assert (config.family, where) == ("mma", "heuristic")


def test_given_tiles_come_before_measured_ones(write):
    write(entry())
    given = TileConfig("mma", 128, 32, 4)
    assert dispatch.choose("forward", problem(), H200, {"forward": given}) == (given, "given")


def test_plans_say_where_tiles_come_from(write):
    write(entry(masked=True))
    ((task, config, where),) = dispatch.plan_forward(problem(band=Band(None, 0)), 16, H200).configs
    assert (task, config, where) == ("forward", WINNER, "tuned: packaged NVIDIA_H200.yaml")
    assert [where for *_, where in dispatch.plan_backward(problem(), 16, H200).configs] == ["heuristic"]


@pytest.mark.parametrize(
    "config",
    [
        TileConfig("mma", 512, 512, 4),  # registers
        TileConfig("mma", 64, 1024, 4),  # shared memory
        TileConfig("mma", 96, 64, 4),  # warps do not share it
        TileConfig("mma", 64, 32, 64),  # threads
    ],
)
def test_an_illegal_winner_is_passed_over(write, config):
    write(entry(config), entry(OTHER, length=1 << 20))
    assert found() == [config, OTHER]
    assert origin()[0] == OTHER
    write(entry(config))
    assert origin() == (heuristics.candidates("forward", problem(), H200)[0], "heuristic")


# ---- lengths and rows


@pytest.mark.parametrize(
    ("task", "streamed", "owned"),
    [("forward", 1000, 8 * 500), ("backward", 500, 2 * 1000), ("backward_dkv", 500, 2000)],
)
def test_classes_of_length_and_rows(task, streamed, owned):
    """What a block streams, and what blocks share: keys and queries of all heads, or the other way round."""
    p = problem(seqlen_q=500, seqlen_k=1000, num_heads=8, num_kv_heads=2)
    kind = Kind.of(task, p)
    assert (kind.length, kind.rows) == (1024 if streamed == 1000 else 512, 4096 if owned == 4000 else 2048)


@pytest.mark.parametrize(("seqlen", "length"), [(0, 64), (1, 64), (90, 64), (91, 128), (1448, 1024), (1449, 2048)])
def test_a_class_is_the_nearest_power_of_two(seqlen, length):
    """Nearest by ratio: 1024 * sqrt(2) is 1448.2."""
    assert Kind.of("forward", problem(seqlen_k=seqlen)).length == length


def test_many_rows_are_one_class():
    assert Kind.of("forward", problem(batch=1 << 10)).rows == Kind.of("forward", problem(batch=1 << 20)).rows == 1 << 18


@pytest.mark.parametrize(
    ("seqlen", "expected"),
    [
        (512, [512, 2048, None, 1 << 14]),
        (1024, [2048, 512, None, 1 << 14]),  # equally near: the longer one
        (1500, [2048, 512, None, 1 << 14]),
        (4096, [2048, 1 << 14, None, 512]),
        (1 << 16, [1 << 14, None, 2048, 512]),
        (1 << 18, [None, 1 << 14, 2048, 512]),  # more than four times as long: for all lengths goes before it
    ],
)
def test_an_unseen_length_takes_the_nearest(write, seqlen, expected):
    lengths = (None, 512, 2048, 1 << 14)
    tiles = {length: TileConfig("mma", 64, 16 * n, 4) for n, length in enumerate(lengths, start=1)}
    write(*(entry(tiles[length], length=length) for length in lengths))
    assert found(problem(seqlen_k=seqlen)) == [tiles[length] for length in expected]


def test_few_rows_are_another_class(write):
    """One short sequence leaves multiprocessors idle, a batch of them does not."""
    write(entry(WINNER, length=1024, rows=1 << 12), entry(OTHER, length=1024, rows=1 << 18))
    one, batch = problem(seqlen_q=1024, seqlen_k=1024), problem(seqlen_q=1024, seqlen_k=1024, batch=64)
    assert found(one) == [WINNER, OTHER]
    assert found(batch) == [OTHER, WINNER]
    assert origin(batch)[1] == "tuned: packaged NVIDIA_H200.yaml"
    near = dataclasses.replace(one, seqlen_k=2048)
    assert origin(near)[1] == "tuned: packaged NVIDIA_H200.yaml, measured at length 1024 and 4096 rows"


# ---- layers


def test_layers_go_in_their_order(write, folders, monkeypatch):
    tiles = {layer: TileConfig("mma", 64, 16 * n, 4) for n, layer in enumerate(folders, start=1)}
    monkeypatch.setenv("CUPYFLASH_CONFIG", str(folders["CUPYFLASH_CONFIG"]))
    paths = {layer: write(entry(config), layer=layer) for layer, config in tiles.items()}
    assert found() == list(tiles.values())
    for layer, path in paths.items():
        assert origin() == (tiles[layer], f"tuned: {layer} NVIDIA_H200.yaml")
        path.unlink()
        store.refresh()
    assert origin()[1] == "heuristic"


def test_a_nearer_length_of_a_later_layer_waits_while_the_first_holds(write):
    write(entry(WINNER, length=2048), layer="user")
    write(entry(OTHER, length=512), layer="packaged")
    assert found(problem(seqlen_k=512)) == [WINNER, OTHER]
    assert found(problem(seqlen_k=256)) == [OTHER, WINNER]  # eight times as long does not hold


def test_the_variable_names_one_file(write, folders, monkeypatch, tmp_path):
    path = write(entry(), layer="CUPYFLASH_CONFIG").rename(tmp_path / "mine.yml")
    monkeypatch.setenv("CUPYFLASH_CONFIG", str(path))
    assert origin() == (WINNER, "tuned: CUPYFLASH_CONFIG mine.yml")
    with pytest.warns(settings.ConfigWarning, match=r"mine\.yml is not used on NVIDIA A100.*names? a folder"):
        assert found(limits=A100) == []


def test_a_variable_that_names_nothing_warns_once(write, monkeypatch, tmp_path):
    monkeypatch.setenv("CUPYFLASH_CONFIG", str(tmp_path / "nowhere.yaml"))
    write(entry())
    with pytest.warns(settings.ConfigWarning, match=r"nowhere\.yaml, which does not exist"):
        assert found() == [WINNER]
    store.refresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(problem(seqlen_k=7)) == [WINNER]


def test_several_gpu_models_in_one_process(write):
    write(entry())
    write(entry(OTHER), device=A100)
    assert (found(), found(limits=A100), found(limits=KNOWN_GPUS["L4"])) == ([WINNER], [OTHER], [])


def test_files_are_read_once_and_others_not_at_all(write, monkeypatch):
    write(entry())
    write(entry(OTHER), device=A100)
    read = []
    monkeypatch.setattr(files, "read", lambda path, read_=files.read: read.append(path.name) or read_(path))
    for seqlen in range(1, 9):
        assert found(problem(seqlen_k=seqlen)) == [WINNER]
    assert read == ["NVIDIA_H200.yaml"] * 2  # the user's, which is not there, and the packaged one


def test_a_packaged_file_serves_its_architecture(write):
    """Legal on the other GPU, and before the heuristic; what is measured there goes first."""
    write(entry(WARPGROUPS), entry(OTHER))
    assert origin(limits=H100) == (WARPGROUPS, "tuned: packaged NVIDIA_H200.yaml, a GPU of the same architecture")
    small = dataclasses.replace(H100, name="a smaller Hopper", shared_bytes=48 << 10)
    assert why_illegal("forward", WARPGROUPS, problem(), small)
    assert origin(limits=small)[0] == OTHER
    write(entry(), device=H100, layer="user")
    assert origin(limits=H100) == (WINNER, "tuned: user NVIDIA_H100_80GB_HBM3.yaml")
    assert origin(limits=A100)[1] == "heuristic"


def test_what_a_gpu_of_another_architecture_won_is_not_taken(write):
    """A name that two architectures share is not enough."""
    write(entry())
    with pytest.warns(settings.ConfigWarning, match=r"is not used on NVIDIA H200 \(sm_80\)"):
        assert found(limits=dataclasses.replace(H200, arch=80)) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("schema: 1\ndevice: {", "cannot be used"),
        ("schema: 2\n", "schema is 2; this version of cupyflash reads schema 1"),
        ("", "expected keys schema, device and entries"),
        ("- a\n- b\n", "expected keys schema, device and entries"),
        ("device: NVIDIA H200\nwinners: []\n", "schema is missing"),
        (b"\xff\xfe\x00", "cannot be read"),
        ("schema: 1\nschema: 1\n", "schema stands twice"),
    ],
)
def test_a_broken_file_is_one_warning_and_the_next_layer(write, folders, text, complaint):
    write(entry())
    folders["user"].mkdir()
    path = folders["user"] / "NVIDIA_H200.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.warns(settings.ConfigWarning) as warned:
        assert found() == found(problem(dtype="bfloat16")) == [WINNER]
    (warning,) = warned
    assert f"{path}: " in str(warning.message)
    assert complaint in str(warning.message)


def test_a_folder_in_place_of_the_file(write, folders):
    write(entry())
    (folders["user"] / "NVIDIA_H200.yaml").mkdir(parents=True)
    with pytest.warns(settings.ConfigWarning, match="cannot be read"):
        assert found() == [WINNER]


# ---- homes


def run(program, **environment):
    """A fresh process; what it prints."""
    environment = {"PATH": os.environ["PATH"], **environment}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


PROGRAM = """
from cupyflash import dispatch
from cupyflash.problem import Band, Problem
from cupyflash.resources import KNOWN_GPUS
from cupyflash.tiles import TileConfig
from cupyflash.tuning import store
from cupyflash.tuning.entries import Entry, Kind
problem = Problem(1, 512, 512, 4, 2, 64, 64, "float16", Band(None, None), 0.125, 0.0, "ieee", False)
limits = KNOWN_GPUS["H200"]
print(dispatch.choose("forward", problem, limits)[1])
print(store.keep([Entry(Kind.of("forward", problem), TileConfig("mma", 64, 32, 4))], limits))
print(dispatch.choose("forward", problem, limits)[1])
"""


@pytest.mark.parametrize(
    "environment",
    [
        {"HOME": "/dev/null"},
        {"HOME": "/proc"},  # nothing can be made there, not even by root
        {"HOME": "/nonexistent/home", "XDG_CACHE_HOME": "/proc/cache"},
        {"CUPYFLASH_CACHE_DIR": os.devnull},  # a file
    ],
    ids=str,
)
def test_a_home_that_cannot_be_written(environment):
    """What was tuned serves this process, and one warning says that it is not kept."""
    pytest.importorskip("platformdirs")
    said = run(PROGRAM, **environment)
    before, path, after = [line for line in said.splitlines() if line.startswith(("tuned:", "None"))]
    assert (before, path, after) == ("tuned: packaged NVIDIA_H200.yaml", "None", "tuned: process")
    assert said.count("ConfigWarning") == 1
    assert "kept for this process only" in said


@pytest.mark.skipif(os.getuid() == 0, reason="root writes where it may not")
def test_a_home_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    assert "kept for this process only" in run(PROGRAM, HOME=str(tmp_path))


def test_a_user_without_a_home(monkeypatch):
    pytest.importorskip("platformdirs")
    for variable in ("CUPYFLASH_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does for a user that the system knows not
    assert layers.user_folder() is None
    assert [layer.name for layer in layers.layers("NVIDIA H200")] == ["process", "packaged"]


def test_a_home_that_can_be_written(tmp_path):
    pytest.importorskip("platformdirs")
    pytest.importorskip("filelock")
    said = run(PROGRAM, HOME=str(tmp_path))
    kept = tmp_path / ".cache/cupyflash/winners/NVIDIA_H200.yaml"
    assert said.splitlines() == ["tuned: packaged NVIDIA_H200.yaml", str(kept), "tuned: user NVIDIA_H200.yaml"]
    assert run(PROGRAM, HOME=str(tmp_path)).splitlines()[0] == "tuned: user NVIDIA_H200.yaml"


def test_without_platformdirs_the_packaged_winners_serve(write, monkeypatch):
    write(entry())
    monkeypatch.delenv("CUPYFLASH_CACHE_DIR")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.warns(settings.ConfigWarning, match="install platformdirs, or set CUPYFLASH_CACHE_DIR"):
        assert found() == [WINNER]


# ---- keeping


def test_what_is_kept_goes_before_what_ships(write, folders):
    pytest.importorskip("filelock")
    write(entry(WARPGROUPS))
    path = store.keep([entry()], H200)
    assert path == folders["user"] / "NVIDIA_H200.yaml"
    assert found() == [WINNER, WARPGROUPS]
    assert store.keep([entry(OTHER)], H200) == path
    assert found() == [OTHER, WARPGROUPS]  # of equal kind and family


def test_an_entry_that_could_not_be_read_back_is_refused(folders):
    with pytest.raises(EntryError, match=r"measured\.seconds is nan"):
        store.keep([entry(measured=Measured(seconds=float("nan")))], H200)
    assert not folders["user"].exists()


def test_without_filelock_winners_stay_in_memory(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "filelock", None)
    with pytest.warns(settings.ConfigWarning, match=r"kept for this process only.*cupyflash\[tune\]"):
        assert store.keep([entry()], H200) is None
    assert origin() == (WINNER, "tuned: process")


@pytest.mark.parametrize(
    ("entries", "tuned"),
    [((), False), ((entry(),), True), ((entry(length=512, rows=2048),), True), ((entry(length=1024),), False)],
)
def test_what_counts_as_tuned(write, entries, tuned):
    write(*entries)
    assert store.is_tuned("forward", problem(), H200) == tuned
    assert not store.is_tuned("forward", problem(), H100)


@pytest.mark.parametrize(
    ("config", "serves"),
    [
        (TileConfig("mma", 64, 32, 4), False),
        (TileConfig("simt", 32, 32, 2), True),
        (TileConfig("standard", 1, 1, 1), True),
    ],
)
def test_exact_float32_has_the_tiles_of_its_family(write, config, serves):
    """Few rows, which multiply-adds compute; standard rounds in cuBLAS's way forward and backward."""
    write(entry(config=config, dtype="float32", length=512, rows=2048))
    p = problem(dtype="float32")
    assert store.is_tuned("forward", p, H200) == serves
    assert (origin(p)[0] == config) == serves


# ---- costs


def test_looking_up_is_light(write, record_property):
    """No assertion on time: the figure is for the report."""
    write(entry())
    p = problem()
    seconds = min(timeit.repeat(lambda: store.find("forward", p, H200), number=10_000, repeat=3)) / 10_000
    record_property("microseconds", 1e6 * seconds)
    before = store.find.cache_info()
    store.find("forward", problem(), H200)
    assert store.find.cache_info().hits == before.hits + 1


def test_importing_reads_nothing():
    heavy = "yaml", "filelock", "platformdirs", "optuna", "hashlib", "cupy"
    program = f"import sys, cupyflash.dispatch; print([name for name in {heavy} if name in sys.modules])"
    assert run("import numpy, sys; print('hashlib' in sys.modules)").strip() == "False"
    assert run(program).strip() == "[]"


def test_a_first_lookup_does_not_import_pyyaml():
    program = PROGRAM.partition("print(store.keep")[0] + "import sys; print('yaml' in sys.modules)"
    assert run(program).split("\n")[:2] == ["tuned: packaged NVIDIA_H200.yaml", "False"]


# ---- what ships


def shipped_entries():
    for path in SHIPPED:
        winners = files.read(path).winners
        for shipped in winners.entries:
            yield pytest.param(winners.device, shipped, id=f"{path.stem}-{shipped.kind}-{shipped.config.family}")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_belongs_to_a_known_gpu(path):
    contents = files.read(path)
    assert contents.complaints == ()
    assert repr(plain_yaml.read(path.read_text())) == repr(yaml.safe_load(path.read_text()))
    assert files.file_name(contents.winners.device.name) == path.name
    assert contents.winners.device in KNOWN_GPUS.values()


@pytest.mark.parametrize(("limits", "shipped"), list(shipped_entries()))
def test_shipped_winner_is_what_its_gpu_gets(limits, shipped):
    kinds = {"half": ("float16", "bfloat16"), "tf32": ("float32",)}
    kind, config = shipped.kind, shipped.config
    for dtype in kinds.get(kind.dtype, (kind.dtype,)):
        if dtype == "bfloat16" and limits.arch < 80:
            continue
        p = problem(
            kind.head_dim,
            kind.head_dim_v,
            dtype,
            "tf32" if kind.dtype == "tf32" else "ieee",
            Band(None, 0) if kind.masked else Band(None, None),
            seqlen_q=kind.length or 1 << 20,  # far from those that name a length
            seqlen_k=kind.length or 1 << 20,
        )
        if kind.rows:
            heads = max(1, kind.rows // p.seqlen_q)
            p = dataclasses.replace(p, num_heads=heads, num_kv_heads=heads)
        assert why_illegal(kind.task, config, p, limits) is None
        winners = store.find(kind.task, p, limits)
        assert config in [winner.config for winner in winners]
        if kind.dtype == "half" and any(winner.entry.kind.dtype == dtype for winner in winners):
            continue  # it has an entry of its own
        # What comes before the others takes what tensor maps describe; they have the rest.
        mappable = config.family == "wgmma"
        assert dispatch.choose(kind.task, p, limits, mappable=mappable) == (
            config,
            f"tuned: packaged {winners[0].layer.path.name}",
        )


def test_known_gpus_have_files_of_their_own():
    assert len({files.file_name(limits.name) for limits in KNOWN_GPUS.values()}) == len(KNOWN_GPUS)


def test_limits_identify_a_device():
    """The fields of a file's device are those of Limits; a new one needs a new schema version."""
    assert [f.name for f in dataclasses.fields(Limits)] == ["name", "arch", "shared_bytes", "sm_count", "l2_bytes"]
