"""How far a tune has come, told to people and to logs."""

import io

import pytest

from cupyflash.tuning import progress


def test_lines_tell_how_much_time_is_left(monkeypatch):
    now = iter([0.0, 100.0, 103.0, 300.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    out = io.StringIO()
    lines = progress.Lines(out)
    lines.update(0.25, "forward")
    lines.update(0.26, "too soon for another line")
    lines.update(0.75, "backward")
    assert out.getvalue().splitlines() == [
        " 25% after 1:40, about 5:00 left: forward",
        " 75% after 5:00, about 1:40 left: backward",
    ]


def test_what_is_no_terminal_gets_lines(monkeypatch):
    monkeypatch.setattr(progress.sys, "stdout", io.StringIO())
    assert isinstance(progress.suitable(), progress.Lines)


def test_the_bar_takes_what_lines_take(capsys):
    pytest.importorskip("rich")
    with progress.Bar() as bar:
        bar.update(0.5, "forward")
        bar.note("a [note] with brackets")
    assert "a [note] with brackets" in capsys.readouterr().out
