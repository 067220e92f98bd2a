"""The measured winners: how they are found, and that every one that ships can run on its GPU."""

from pathlib import Path

import pytest
import yaml

from cupyflash import dispatch, heuristics
from cupyflash.problem import Band, Problem
from cupyflash.resources import KNOWN_GPUS, Limits, why_illegal
from cupyflash.tiles import TASKS, TileConfig
from cupyflash.tuning import configs, store

SHIPPED = sorted(Path(configs.__file__).parent.glob("*.yaml"))
H200 = KNOWN_GPUS["H200"]
WINNER = TileConfig("mma", 64, 32, 4)  # legal, and not what the heuristic takes


def problem(d=64, dv=None, dtype="float16", precision="ieee", band=Band(None, None)):  # noqa: B008
    dv = d if dv is None else dv
    return Problem(1, 512, 512, 4, 2, d, dv, dtype, band, 0.125, 0.0, precision, False)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(device, entries): a file of winners, in a folder that takes the place of the shipped one."""
    monkeypatch.setattr(store, "files", lambda package: tmp_path if package == "cupyflash.tuning.configs" else None)
    store.winners.cache_clear()
    yield lambda device, *entries: (tmp_path / store.file_name(device)).write_text(
        yaml.safe_dump({"device": device, "winners": list(entries)})
    )
    store.winners.cache_clear()


def entry(config=None, **changes):
    config = {"family": "mma", "Br": 64, "Bc": 32, "warps": 4} if config is None else config
    key = {"task": "forward", "dtype": "half", "head_dim": 64, "head_dim_v": 64, "masked": False}
    return key | changes | {"config": config}


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H200", "NVIDIA_H200.yaml"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA_H100_80GB_HBM3.yaml"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA_A100-SXM4-80GB_MIG_1g.10gb.yaml"),
        ("../etc/a (b)", ".._etc_a_b_.yaml"),
    ],
)
def test_file_names(device, expected):
    assert store.file_name(device) == expected


def test_known_gpus_have_files_of_their_own():
    assert len({store.file_name(limits.name) for limits in KNOWN_GPUS.values()}) == len(KNOWN_GPUS)


@pytest.mark.parametrize("device", ["NVIDIA H200", "Graphics Device / prototype", "NVIDIA RTX 6000 Ada Generation"])
def test_winners_are_found_by_the_name_of_the_gpu(write, device):
    write(device, entry())
    limits = Limits(device, 90, 232_448, 132, 60 << 20)
    assert store.find("forward", problem(), limits) == (WINNER,)
    assert dispatch.choose("forward", problem(), limits) == (WINNER, "tuned")
    assert store.find("forward", problem(), KNOWN_GPUS["H100"]) == ()


def test_without_a_file_the_heuristic_decides(write):
    assert store.winners("NVIDIA H200") == {}
    expected = heuristics.candidates("forward", problem(), H200)[0]
    assert expected != WINNER
    assert dispatch.choose("forward", problem(), H200) == (expected, "heuristic")


@pytest.mark.parametrize(
    ("changes", "found"),
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
    ],
)
def test_what_an_entry_holds_for(write, changes, found):
    write(H200.name, entry())
    assert store.find("forward", problem(**changes), H200) == ((WINNER,) if found else ())
    assert store.find("backward", problem(**changes), H200) == ()


def test_an_illegal_winner_is_passed_over(write):
    large = {"family": "mma", "Br": 512, "Bc": 512, "warps": 4}
    uneven = {"family": "mma", "Br": 96, "Bc": 64, "warps": 4}
    for config in (large, uneven):
        write(H200.name, entry(config))
        store.winners.cache_clear()
        assert store.find("forward", problem(), H200) == (TileConfig(**config),)
        expected = heuristics.candidates("forward", problem(), H200)[0]
        assert dispatch.choose("forward", problem(), H200) == (expected, "heuristic")


def test_several_winners_stand_in_the_order_of_preference(write):
    """A layout that the first family does not take goes to the second one's winner, and not to a heuristic."""
    hopper = {"family": "wgmma", "Br": 128, "Bc": 64, "warps": 12, "stages": 2}
    write(H200.name, entry(hopper), entry(masked=True), entry())
    assert store.find("forward", problem(), H200) == (TileConfig(**hopper), WINNER)
    assert dispatch.choose("forward", problem(), H200) == (TileConfig(**hopper), "tuned")
    assert dispatch.choose("forward", problem(), H200, mappable=False) == (WINNER, "tuned")
    for vector_bytes, mappable in ((16, False), (8, True)):
        ((_, *chosen),) = dispatch.plan_forward(problem(), vector_bytes, H200, mappable=mappable).configs
        assert chosen == [WINNER, "tuned"]

    write(H200.name, entry(), entry(hopper))
    store.winners.cache_clear()
    assert dispatch.choose("forward", problem(), H200) == (WINNER, "tuned")


def test_a_winner_of_one_family_leaves_the_others_to_the_heuristic(write):
    write(H200.name, entry({"family": "wgmma", "Br": 128, "Bc": 64, "warps": 12, "stages": 2}))
    config, origin = dispatch.choose("forward", problem(), H200, mappable=False)
    assert (config.family, origin) == ("mma", "heuristic")


def test_given_tiles_come_before_measured_ones(write):
    write(H200.name, entry())
    given = TileConfig("mma", 128, 32, 4)
    assert dispatch.choose("forward", problem(), H200, {"forward": given}) == (given, "given")


def test_plans_say_where_tiles_come_from(write):
    write(H200.name, entry(masked=True))
    ((task, config, origin),) = dispatch.plan_forward(problem(band=Band(None, 0)), 16, H200).configs
    assert (task, config, origin) == ("forward", WINNER, "tuned")
    assert [origin for *_, origin in dispatch.plan_backward(problem(), 16, H200).configs] == ["heuristic"]


def test_an_entry_for_one_dtype_goes_before_half(write):
    own = {**entry({"family": "mma", "Br": 64, "Bc": 48, "warps": 4}), "dtype": "float16"}
    write(H200.name, entry(), own)
    assert store.find("forward", problem(dtype="bfloat16"), H200) == (WINNER,)
    assert store.find("forward", problem(), H200) == (TileConfig("mma", 64, 48, 4),)


def test_an_unknown_key_is_named(write):
    write(H200.name, entry({"family": "mma", "Br": 64, "Bc": 32, "wraps": 4}))
    with pytest.raises(TypeError, match="'wraps'"):
        store.winners(H200.name)


def test_files_are_read_once(write):
    write(H200.name, entry())
    first = store.winners(H200.name)
    write(H200.name)
    assert store.winners(H200.name) is first


# ---- what ships


def shipped_entries():
    for path in SHIPPED:
        content = yaml.safe_load(path.read_text())
        for found in content["winners"]:
            yield pytest.param(content["device"], found, id=f"{path.stem}-{'-'.join(map(str, found.values()))}"[:90])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_belongs_to_a_known_gpu(path):
    content = yaml.safe_load(path.read_text())
    assert set(content) == {"device", "winners"}
    assert store.file_name(content["device"]) == path.name
    assert content["device"] in {limits.name for limits in KNOWN_GPUS.values()}
    for kind, configs_ in store.winners(content["device"]).items():
        families = [config.family for config in configs_]
        assert len(families) == len(set(families)), f"two entries of one family for {kind}"


@pytest.mark.parametrize(("device", "found"), list(shipped_entries()))
def test_shipped_winner_is_what_its_gpu_gets(device, found):
    limits = next(limits for limits in KNOWN_GPUS.values() if limits.name == device)
    assert set(found) == {"task", "dtype", "head_dim", "head_dim_v", "masked", "config"}
    assert found["task"] in TASKS
    assert isinstance(found["masked"], bool)
    kinds = {
        "half": [("float16", "ieee"), ("bfloat16", "ieee")],
        "float16": [("float16", "ieee")],
        "bfloat16": [("bfloat16", "ieee")],
        "tf32": [("float32", "tf32")],
        "float32": [("float32", "ieee")],
    }
    band = Band(None, 0) if found["masked"] else Band(None, None)
    for dtype, precision in kinds[found["dtype"]]:
        if dtype == "bfloat16" and limits.arch < 80:
            continue
        kind = (found["head_dim"], found["head_dim_v"], found["masked"])
        if found["dtype"] == "half" and (found["task"], dtype, *kind) in store.winners(device):
            continue
        p = problem(found["head_dim"], found["head_dim_v"], dtype, precision, band)
        config = TileConfig(**found["config"])
        assert why_illegal(found["task"], config, p, limits) is None
        # What comes before the others takes what tensor maps describe; they have the rest.
        mappable = config.family == "wgmma"
        assert dispatch.choose(found["task"], p, limits, mappable=mappable) == (config, "tuned")
