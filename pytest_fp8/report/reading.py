"""Reports as files from strangers: parsed strictly, and held against ``report.schema.json`` field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pytest_fp8.baselines.strict import Unsound, parse, quoted, read_regular
from pytest_fp8.codes import R
from pytest_fp8.errors import Fp8Error

MOST_BYTES = 64 << 20
"""Of a report. One case of the 8B model, with 225 layers, has about 200 kB."""
KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
"""JSON Schema's types -> Python's."""


def read_report(path: Path) -> dict[str, Any]:
    """The report in a file, or in the ``report.json`` of a folder. Raises :class:`Fp8Error` of two lines."""
    file = path / "report.json" if path.is_dir() else path
    try:
        report = parse(read_regular(file, MOST_BYTES))
        check(report, schema(), "the report")
    except (OSError, Unsound) as error:
        said = f"{type(error).__name__}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise Fp8Error(
            R.NOT_A_REPORT,
            f"{quoted(str(file))} is no report of this pytest-fp8: {said}"[:500],
            next_step="run the tests again with --fp8-report",
        ) from None
    found: dict[str, Any] = report
    return found


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema of a report."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "report.schema.json").read_text())
    return found


def check(value: Any, rule: Mapping[str, Any], where: str) -> None:
    """Hold plain data against a JSON Schema of the keywords that ``report.schema.json`` uses. Raises ``Unsound``."""
    if "$ref" in rule:
        rule = schema()["$defs"][rule["$ref"].rpartition("/")[2]]
    if wrong := _wrong(value, rule):
        raise Unsound(f"{where} is {wrong}")
    for index, item in enumerate(value if isinstance(value, list) else ()):
        check(item, rule.get("items", {}), f"{where}[{index}]")
    if not isinstance(value, dict):
        return
    if missing := [name for name in rule.get("required", ()) if name not in value]:
        raise Unsound(f"{where} lacks {', '.join(missing)}")
    for name, item in value.items():
        inner = rule.get("properties", {}).get(name, rule.get("additionalProperties", True))
        if inner is False:
            raise Unsound(f"{where} has the unknown field {quoted(name)}")
        check(item, {} if inner is True else inner, f"{where}.{name if name.isidentifier() else quoted(name)}")


def _wrong(value: Any, rule: Mapping[str, Any]) -> str:
    """What is wrong with a value itself, in words; empty where nothing is."""
    names = [rule["type"]] if isinstance(rule.get("type"), str) else rule.get("type", list(KINDS))
    for keyword, kind in (("maxLength", str), ("maxItems", list), ("maxProperties", dict)):
        if isinstance(value, kind) and len(value) > rule.get(keyword, len(value)):
            return f"longer than {rule[keyword]}"
    if "const" in rule and (value != rule["const"] or isinstance(value, bool)):
        return f"{quoted(value)}, not {rule['const']!r}"
    if "enum" in rule and value not in rule["enum"]:
        return f"{quoted(value)}, not one of {', '.join(rule['enum'])}"
    if not isinstance(value, sum((KINDS[name] for name in names), ())) or (
        isinstance(value, bool) and "boolean" not in names
    ):
        return f"{quoted(value)}, not {' or '.join(names)}"
    if isinstance(value, int | float) and value < rule.get("minimum", value):
        return f"{quoted(value)}, less than {rule['minimum']}"
    return ""
