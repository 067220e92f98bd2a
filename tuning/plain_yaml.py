"""The part of YAML that files of winners are written in, read without PyYAML, whose import alone takes longer.

    key: scalar
    key: {key: scalar, key: scalar}
    key:
    - key: {key: scalar}
      key: {key: scalar}

and whole lines of remarks, in printable ASCII. What is read here PyYAML's safe loader reads alike; all else, and all
that is wrong, is left to it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

_ODD = re.compile(r"[^ -~\n]")
_REMARK = re.compile(r" *(?:#.*)?")
_LINE = re.compile(r"(- |  |)(\w+):(?: (?:\{(.+)\}|(.+)))?")
_SCALAR = re.compile(
    r"(?P<flag>true|false)"
    r"|(?P<whole>0|[1-9][0-9]*)"
    r"|(?P<real>[0-9]+\.[0-9]*(?:e[-+][0-9]+)?)"
    r"|'(?P<quoted>[^']*)'"
    r"|(?P<hash>(?!0b[01]+$)[0-9a-f]*[a-f][0-9a-f]*)"
    r"|(?P<version>[0-9]+\.[0-9]+\.[\w.]+)"
    r"|(?P<text>(?!(?i:yes|no|on|off|true|false|null)$)[a-zA-Z][\w.+/-]*(?: [\w.+/-]+)*)"
)


class NotPlain(ValueError):
    """Text that PyYAML has to read."""


def read(text: str) -> dict[Any, Any]:
    """The top-level mapping of a file's text.

    Raises:
        NotPlain: it is no such text, or a key stands twice.
    """
    if _ODD.search(text):
        raise NotPlain("a character beyond printable ASCII")
    top: dict[Any, Any] = {}
    mapping = top  # that is open, and the list that is
    items: list[dict[Any, Any]] | None = None
    for line in text.split("\n"):
        match = _LINE.fullmatch(line)
        if match is None:
            if _REMARK.fullmatch(line):
                continue
            raise NotPlain(line)
        lead, name, pairs, scalar = match.groups()
        if not lead:
            mapping, items = top, None if pairs or scalar else []
        elif lead == "- " and items is not None:
            mapping = {}
            items.append(mapping)
        elif lead == "- " or mapping is top:
            raise NotPlain(line)
        key = _scalar(name)
        value = _mapping(pairs) if pairs else _scalar(scalar) if scalar else None if lead else items
        if key in mapping or value is None:
            raise NotPlain(line)
        mapping[key] = value
    if not top or [] in top.values():
        raise NotPlain("nothing, or a key with nothing")
    return top


def _mapping(text: str) -> dict[Any, Any]:
    """Of what stands between braces. Where a comma is quoted, it leaves a part of a scalar, which is none."""
    pairs = text.split(", ")
    mapping = dict(map(_pair, pairs))
    if len(mapping) < len(pairs):
        raise NotPlain(text)
    return mapping


@lru_cache(4096)  # most stand in many entries
def _pair(text: str) -> tuple[Any, Any]:
    key, _, value = text.partition(": ")
    return _scalar(key), _scalar(value)


@lru_cache(4096)
def _scalar(text: str) -> Any:
    match = _SCALAR.fullmatch(text)
    if match is None:
        raise NotPlain(text)
    kind = match.lastgroup
    if kind == "flag":
        return text == "true"
    if kind == "whole":
        return int(text)
    if kind == "real":
        return float(text)
    return match["quoted"] if kind == "quoted" else text
