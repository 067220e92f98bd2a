"""``cupyflash config``: the files of tuned tiles, looked at and moved. Every action prints and returns a status."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

from cupyflash import dispatch, resources
from cupyflash.cli.explain import (
    PROBLEM_HELP,
    describe,
    describe_config,
    describe_gpu,
    problem_and_gpu,
    vector_bytes_as_allocated,
)
from cupyflash.problem import Band, Problem
from cupyflash.resources import KNOWN_GPUS, Limits
from cupyflash.tiles import Task
from cupyflash.tuning import files, layers, settings, store
from cupyflash.tuning.entries import Entry, Kind, Winners
from cupyflash.tuning.kernel_hash import is_stale
from cupyflash.tuning.merging import merge

CurrentGpu = Callable[[], Limits]


def add_arguments(parser: ArgumentParser) -> None:
    """The actions and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True)
    gpu: dict[str, Any] = {"choices": list(KNOWN_GPUS), "help": "default: this machine's"}
    where = actions.add_parser("where", help="the files that are looked at, first to last")
    where.add_argument("--gpu", **gpu)
    why = actions.add_parser("why", help="which tiles a problem takes, and why not others")
    why.add_argument("problem", nargs="+", metavar="PROBLEM", help=PROBLEM_HELP)
    show = actions.add_parser("show", help="the entries for a GPU, or those of a file")
    show.add_argument("file", nargs="?", type=Path, metavar="FILE")
    show.add_argument("--gpu", **gpu)
    export = actions.add_parser("export", help="all entries for a GPU as one file")
    export.add_argument("file", type=Path, metavar="FILE", help='a new file; "-" prints it')
    export.add_argument("--gpu", **gpu)
    import_ = actions.add_parser("import", help="adds the entries of files to the user's, the better of each kind")
    import_.add_argument("files", nargs="+", type=Path, metavar="FILE")
    merge = actions.add_parser("merge", help="makes one file of several for one GPU model, the better of each kind")
    merge.add_argument("files", nargs="+", type=Path, metavar="FILE")
    merge.add_argument("--out", "-o", type=Path, required=True, metavar="FILE", help='a new file; "-" prints it')
    check = actions.add_parser("check", help="says what in files cannot be used, or was measured with other kernels")
    check.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: all that there are")


def run(options: Namespace, current_gpu: CurrentGpu) -> int:
    """Runs the chosen action; what keeps it from that is raised as OSError, RuntimeError, TypeError or ValueError."""
    return _ACTIONS[options.action](options, current_gpu)


def where(options: Namespace, current_gpu: CurrentGpu) -> int:
    """The layers of a GPU model, and what they hold."""
    limits = _limits(options.gpu, current_gpu)
    lines = [("GPU", describe_gpu(limits))]
    if settings.config_path() is None:
        lines.append(("CUPYFLASH_CONFIG", "not set"))
    for layer in layers.layers(limits.name):
        if layer.path is not None:
            lines.append((layer.name, f"{layer.path}: {_holds(layer, limits)}"))
    if layers.user_folder() is None:
        lines.append(("user", "there is no home for a cache folder; CUPYFLASH_CACHE_DIR names one"))
    for layer in layers.related(limits):
        lines.append(("same architecture", str(layer.path)))
    lines.append(("CUPYFLASH_TUNE", settings.tune_mode()))
    _print_table(lines)
    return 0


def why(options: Namespace, current_gpu: CurrentGpu) -> int:
    """What is chosen for a problem, and every winner that was considered before it."""
    problem, limits = problem_and_gpu(" ".join(options.problem), current_gpu)
    lines = [("problem", describe(problem)), ("GPU", describe_gpu(limits))]
    mappable = vector_bytes_as_allocated(problem) == 16
    tasks: tuple[Task, ...] = ("forward", *dispatch.backward_tasks(problem, limits, None, mappable))
    for task in tasks:
        lines.append((task, f"looked up as {Kind.of(task, problem)}"))
        lines += [("", line) for line in _decision(task, problem, limits, mappable)]
    _print_table(lines)
    return 0


def show(options: Namespace, current_gpu: CurrentGpu) -> int:
    """The entries of a file, or of all layers of a GPU model."""
    if options.file is not None:
        winners, complaints = _read(options.file)
        print(describe_gpu(winners.device))
        _print_entries((entry, "") for entry in winners.entries)
        return _report(complaints)
    limits = _limits(options.gpu, current_gpu)
    print(describe_gpu(limits))
    _print_entries((entry, str(layer)) for layer, entry in _in_force(limits))
    return 0


def export(options: Namespace, current_gpu: CurrentGpu) -> int:
    """All entries for a GPU model in one file."""
    limits = _limits(options.gpu, current_gpu)
    entries = tuple(entry for _, entry in _in_force(limits))
    if not entries:
        raise ValueError(f"there are no winners for {limits.name} to export")
    _write(options.file, Winners(limits, entries))
    return 0


def import_(options: Namespace, current_gpu: CurrentGpu) -> int:
    """Merges files into the user's: each into that of its GPU model."""
    folder = layers.user_folder()
    if folder is None:
        raise ValueError("there is no home for a cache folder; set CUPYFLASH_CACHE_DIR to one")
    complaints: list[str] = []
    for path in options.files:
        winners, unusable = _read_legal(path)
        complaints += unusable
        new = _signed(path, winners)
        target = folder / files.file_name(new.device.name)
        files.update(target, new.device, partial(_merged, new))
        print(f"{len(new.entries)} entries of {path} merged into {target}")
    store.refresh()
    return _report(complaints)


def _merged(new: Winners, present: tuple[Entry, ...]) -> tuple[Entry, ...]:
    return merge(Winners(new.device, present), new).entries


def merge_(options: Namespace, current_gpu: CurrentGpu) -> int:
    """Makes one file of several."""
    read = [(path, *_read_legal(path)) for path in options.files]
    merged = reduce(merge, (_signed(path, winners) for path, winners, _ in read))
    _write(options.out, merge(merged, merged))
    return _report([complaint for *_, complaints in read for complaint in complaints])


def check(options: Namespace, current_gpu: CurrentGpu) -> int:
    """What in files cannot be used (status 1), and what should be tuned again (status 0)."""
    paths = options.files or list(_all_files())
    status = 0
    for path in paths:
        try:
            winners, errors = _read(path)
        except ValueError as error:
            winners, errors = None, [str(error)]
        notes = []
        if winners is not None:
            errors += [f"{path}: {line}" for _, line in _illegal(winners)]
            notes = [f"{path}: {line}" for line in (*_odd_device(winners), *_stale(winners))]
            print(f"{path}: {len(winners.entries)} entries for {winners.device.name}")
        for line in notes:
            print(line)
        status |= _report(errors)
    return status


_ACTIONS: dict[str, Callable[[Namespace, CurrentGpu], int]] = {
    "where": where,
    "why": why,
    "show": show,
    "export": export,
    "import": import_,
    "merge": merge_,
    "check": check,
}


def _decision(task: Task, problem: Problem, limits: Limits, mappable: bool) -> Iterator[str]:
    try:
        config, origin = dispatch.choose(task, problem, limits, mappable=mappable)
    except dispatch.UnsupportedError as error:
        yield str(error)
        return
    yield f"takes {describe_config(config)}  ({origin})"
    if problem.softcap or problem.scale <= 0:
        yield "winners are measured without a cap and with a positive scale"
        return
    found_any = False
    for found, reason in dispatch.considered(task, problem, limits, mappable):
        found_any = True
        if reason is None:
            if is_stale(found.config.family, task, found.entry.measured.kernel):
                yield "measured with kernels that have changed since: cupyflash tune measures again"
            break
        yield f"not {describe_config(found.config)}  ({found.origin}): {reason}"
    if not found_any:
        yield f"there are no winners of this kind for {limits.name} or its architecture"


def _in_force(limits: Limits) -> Iterator[tuple[layers.Layer, Entry]]:
    """Each layer's entries but those that an earlier layer has of equal kind and family."""
    seen = set()
    for layer in layers.layers(limits.name):
        for entry in layers.entries(layer, limits):
            if entry.key not in seen:
                seen.add(entry.key)
                yield layer, entry


def _limits(gpu: str | None, current_gpu: CurrentGpu) -> Limits:
    if gpu is not None:
        return KNOWN_GPUS[gpu]
    try:
        return current_gpu()
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"{error}; or name a GPU, as in --gpu H200") from error


def _holds(layer: layers.Layer, limits: Limits) -> str:
    assert layer.path is not None
    if not os.path.exists(layer.path):
        return "no such file"
    entries = layers.entries(layer, limits)
    if entries:
        device = layers.winners_in(layer).device  # type: ignore[union-attr]  # it has entries
        differs = f", measured on {device}" if device != limits else ""
        return f"{len(entries)} entries{differs}"
    return "no entries that can be used: cupyflash config check says why"


def _read(path: Path) -> tuple[Winners, list[str]]:
    """A file's winners, and what in it is left out; raises ValueError where nothing can be used."""
    contents = files.read(path)
    if contents is None:
        raise ValueError(f"{path} does not exist")
    complaints = [f"{path}: {complaint}" for complaint in contents.complaints]
    if contents.winners is None:
        raise ValueError("; ".join(complaints))
    return contents.winners, complaints


def _read_legal(path: Path) -> tuple[Winners, list[str]]:
    """The same without what its GPU cannot run, which might count as the better one. Tells of an odd device."""
    winners, complaints = _read(path)
    illegal = dict(_illegal(winners))
    complaints += [f"{path}: {line}, and left out" for line in illegal.values()]
    for line in _odd_device(winners):
        print(f"{path}: {line}")
    return Winners(winners.device, tuple(e for e in winners.entries if e not in illegal)), complaints


def _write(path: Path, winners: Winners) -> None:
    text = files.text_of(winners)
    if str(path) == "-":
        print(text, end="")
        return
    if os.path.exists(path):
        raise ValueError(f"{path} exists; name a new file, or - to print")
    files.replace_file(path, text.encode())
    print(f"{len(winners.entries)} entries for {winners.device.name} in {path}")


def _signed(path: Path, winners: Winners) -> Winners:
    """With the file's name as the provenance of what has none."""
    return Winners(
        winners.device,
        tuple(
            replace(e, measured=replace(e.measured, provenance=e.measured.provenance or f"from {path.name}"))
            for e in winners.entries
        ),
    )


def _report(complaints: Iterable[str]) -> int:
    status = 0
    for complaint in complaints:
        print(complaint, file=sys.stderr)
        status = 1
    return status


def _all_files() -> Iterator[Path]:
    given = settings.config_path()
    if given is not None and not os.path.isdir(given):
        yield given
    for folder in (given, layers.user_folder(), layers.packaged_folder()):
        if folder is not None and os.path.isdir(folder):
            yield from sorted(folder.glob("*.yaml"))


def _illegal(winners: Winners) -> Iterator[tuple[Entry, str]]:
    for entry in winners.entries:
        reason = resources.why_illegal(entry.kind.task, entry.config, _example(entry.kind), winners.device)
        if reason is not None:
            yield entry, f"{entry.kind}, {describe_config(entry.config)}, is never taken: {reason}"


def _odd_device(winners: Winners) -> Iterator[str]:
    known = {limits.name: limits for limits in KNOWN_GPUS.values()}.get(winners.device.name)
    if known is not None and known != winners.device:
        yield f"its device is {winners.device}; known is {known}"


def _stale(winners: Winners) -> Iterator[str]:
    for entry in winners.entries:
        if is_stale(entry.config.family, entry.kind.task, entry.measured.kernel):
            yield (
                f"{entry.kind}, {describe_config(entry.config)}, was measured with kernels that have changed since: "
                "still used; cupyflash tune measures again"
            )


def _example(kind: Kind) -> Problem:
    """A problem of a kind."""
    dtype = {"half": "float16", "tf32": "float32"}.get(kind.dtype, kind.dtype)
    return Problem(
        batch=1,
        seqlen_q=kind.length or 1024,
        seqlen_k=kind.length or 1024,
        num_heads=16,
        num_kv_heads=16,
        head_dim=kind.head_dim,
        head_dim_v=kind.head_dim_v,
        dtype=dtype,
        band=Band(None, 0 if kind.masked else None),
        scale=1.0,
        softcap=0.0,
        precision="tf32" if kind.dtype == "tf32" else "ieee",
        deterministic=kind.task in ("backward_dkv", "backward_dq"),
    )


def _print_entries(entries: Iterable[tuple[Entry, str]]) -> None:
    rows = [(str(e.kind), describe_config(e.config), _time(e), source) for e, source in entries]
    widths = [max((len(row[n]) for row in rows), default=0) for n in range(4)]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _time(entry: Entry) -> str:
    seconds, default = entry.measured.seconds, entry.measured.default_seconds
    if seconds is None:
        return ""
    return f"{1e6 * seconds:.1f} us" + (f", {default / seconds:.2f} times the default" if default else "")


def _print_table(lines: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in lines)
    print("\n".join(f"{name:{width}}  {line}".rstrip() for name, line in lines))
