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
            next_step="run the tests again with --fp8-report-dir",
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
    if "const" in rule and (value != rule["const"] or isinstance(value, bool)):
        raise Unsound(f"{where} is {quoted(value)}, not {rule['const']!r}")
    if "enum" in rule and value not in rule["enum"]:
        raise Unsound(f"{where} is {quoted(value)}, not one of {', '.join(rule['enum'])}")
    if "type" in rule:
        _check_type(value, rule["type"], where)
    if isinstance(value, int | float) and value < rule.get("minimum", value):
        raise Unsound(f"{where} is {quoted(value)}, less than {rule['minimum']}")
    for keyword, kind in (("maxLength", str), ("maxItems", list), ("maxProperties", dict)):
        if isinstance(value, kind) and len(value) > rule.get(keyword, len(value)):
            raise Unsound(f"{where} is longer than {rule[keyword]}")
    if isinstance(value, list) and "items" in rule:
        for index, item in enumerate(value):
            check(item, rule["items"], f"{where}[{index}]")
    if isinstance(value, dict):
        _check_fields(value, rule, where)


def _check_type(value: Any, wanted: str | list[str], where: str) -> None:
    names = [wanted] if isinstance(wanted, str) else wanted
    kinds = tuple(kind for name in names for kind in KINDS[name])
    if not isinstance(value, kinds) or (isinstance(value, bool) and "boolean" not in names):
        raise Unsound(f"{where} is {quoted(value)}, not {' or '.join(names)}")


def _check_fields(value: dict[str, Any], rule: Mapping[str, Any], where: str) -> None:
    missing = [name for name in rule.get("required", ()) if name not in value]
    if missing:
        raise Unsound(f"{where} lacks {', '.join(missing)}")
    known, others = rule.get("properties", {}), rule.get("additionalProperties", True)
    for name, item in value.items():
        inner = known.get(name, others)
        if inner is False:
            raise Unsound(f"{where} has the unknown field {quoted(name)}")
        if inner is not True:
            check(item, inner, f"{where}.{name if name.isidentifier() else quoted(name)}")
