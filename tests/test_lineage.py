"""The documentation of the lineage says what docs/data has, and what the code says of it today."""

import ast
import html
import re
from pathlib import Path

import pytest

from cupyflash.compare import figures, hbm, table, views
from cupyflash.compare.cases import DIRECTIONS
from cupyflash.resources import KNOWN_GPUS
from cupyflash.tiles import TileConfig

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data" / "lineage_NVIDIA_H200.csv"
ROWS = table.read(DATA)
FIGURES = ROOT / "docs" / "figures"
LENGTHS = (1024, 4096, 8192, 16384)


def lines_of_a_table(page, head):
    """The cells of each line below a head, as text; the first cell is the key."""
    text = (ROOT / "docs" / page).read_text().partition(head)[2]
    lines = re.match(r"\n\|[ |-]+\n((?:\|.*\n)+)", text)[1].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {key: found for key, *found in cells}


def seconds(algorithm, length, causal):
    step = {"algorithm": algorithm, "direction": "step", "seqlen": length, "causal": causal, "head_dim": 128}
    (row,) = [row for row in table.select(ROWS, **step) if row.seconds]
    return row.seconds


def test_the_file_is_as_compare_writes_it(tmp_path):
    """Guards what it has of its own rows: TFLOP/s, speed-ups, operations per byte."""
    table.write(tmp_path / "again.csv", ROWS)
    assert (tmp_path / "again.csv").read_text() == DATA.read_text()


def test_figures_are_drawn_from_the_file():
    drawn = figures.figures(ROWS)
    assert len(drawn) == 7
    for name, svg in drawn.items():
        assert (FIGURES / name).read_text() == svg + "\n", f"{name}: python -m cupyflash.compare.figures draws another"


def tiles_of(text):
    """From "forward mma Br=128 Bc=64 warps=4; backward ..."."""
    found = {}
    for of_task in text.split("; "):
        task, family, *numbers = of_task.split()
        found[task] = TileConfig(family, **{k: ast.literal_eval(v) for k, v in (n.split("=") for n in numbers)})
    return found


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("algorithm", ["standard", "v1", "v2", "v3"])
def test_counted_bytes_are_those_of_the_count(algorithm, direction):
    """Rows with counters have the tiles of the timed row of that length, and an emptied cache."""
    of_pass = [row for row in table.select(ROWS, algorithm=algorithm, direction=direction) if row.counted]
    tiles = {(row.seqlen, row.causal): tiles_of(row.tiles) if row.tiles else {} for row in of_pass if row.seconds}
    assert len(of_pass) >= 8
    for row in of_pass:
        taken, flushed = tiles[row.seqlen, row.causal], row.measured is not None
        problem = row.case.problem(algorithm)
        counted = hbm.count(algorithm, direction, problem, taken, KNOWN_GPUS["H200"], flushed)
        assert row.counted == counted, row.case


def test_speed_ups_in_the_text():
    told = lines_of_a_table("how-it-works.md", "| length | V1 over standard | V2 over V1 | V3 over V2 |")
    assert told == {
        f"{length:,}": [
            ", ".join(f"{seconds(older, length, causal) / seconds(newer, length, causal):.2f}" for causal in (0, 1))
            for newer, older in views.RATIOS[:3]
        ]
        for length in LENGTHS
    }


def test_bytes_of_a_step_in_the_text():
    steps = {"direction": "step", "seqlen": 16384, "head_dim": 128}
    kB = {
        (row.algorithm, row.causal): f"{row.counted.total / row.batch / row.heads / row.seqlen / 1000:.0f}"
        for row in table.select(ROWS, **steps)
    }
    text = " ".join((ROOT / "docs" / "how-it-works.md").read_text().split())
    full = f"{kB['v1', False]} kB per query and head in V1 and {kB['standard', False]} in standard attention"
    assert f"a training step at 16,384 moves {full}" in text
    assert f"under a causal mask {kB['v1', True]} and {kB['standard', True]}." in text


def test_what_a_causal_mask_saves_in_the_text():
    short, long = (seconds("v3", length, True) / seconds("v3", length, False) for length in (1024, 16384))
    told = f"A training step of V3 takes {short:.2f} of the time at 1,024 tokens, {long:.2f} at 16,384."
    assert told in (ROOT / "docs" / "how-it-works.md").read_text()


def test_bytes_in_the_text():
    told = lines_of_a_table("compare.md", "| | 1,024 | 4,096 | 8,192 | 16,384 |")
    names = {"standard": "standard, forward and backward", "v1": "V1", "v2": "V2", "v3": "V3"}
    ratios = {
        (row.algorithm, row.direction, row.seqlen): row.measured.total / row.counted.total
        for row in ROWS
        if row.measured
    }
    assert told == {
        name: [
            f"{ratios[algorithm, 'forward', length]:.2f}, {ratios[algorithm, 'backward', length]:.2f}"
            for length in LENGTHS
        ]
        for algorithm, name in names.items()
    }


@pytest.mark.parametrize("algorithm", ["v1", "v2", "v3"])
def test_schedules_name_the_lines_of_the_kernels_of_now(algorithm):
    """A kernel that has changed since leaves other statements at these lines."""
    drawn = (FIGURES / f"trace-{algorithm}.svg").read_text()
    named = set(re.findall(r"^(forward_\w+\.cu):(\d+)  (.*?)(?:</title>.*)?$", drawn, re.MULTILINE))
    assert len(named) >= 5
    for file, line, statement in named:
        lines = (ROOT / "kernels_cu" / file).read_text().splitlines()
        assert html.unescape(statement).startswith(lines[int(line) - 1].strip()), f"{file}:{line}; draw it anew"
