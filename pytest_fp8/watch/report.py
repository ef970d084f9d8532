"""What ``pytest-fp8 watch`` says of a run: some 25 lines for a person, and the same as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from textwrap import TextWrapper
from typing import Any

from pytest_fp8.questions.layers.products import FP8
from pytest_fp8.recipes import RECOMPUTE, ROLES
from pytest_fp8.watch.attribution import Class, stays_for
from pytest_fp8.watch.judge import EMULATES, OFF, ON, UNKNOWN, Note, Training, asked

SCHEMA = 2
WIDTH, INDENT = 110, 14
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
ACCOUNT = {
    "fp8 products": "FP8 products",
    "other products": "other products",
    "attention": "attention",
    "casts": "casts, amax",
    "optimizer": "optimizer",
    "communication": "communication",
    "rest": "other kernels",
}
WORST = (OFF, UNKNOWN, ON)


def groups(trainings: Sequence[Training]) -> list[list[Training]]:
    """The processes of one training together, its first rank first."""
    found: dict[Any, list[Training]] = {}
    for each in trainings:
        told = each.evidence
        own = (told.get("run"), told.get("world")) if told.get("world", 1) > 1 else told["pid"]
        found.setdefault(own, []).append(each)
    return [sorted(group, key=lambda each: each.evidence.get("rank", 0)) for group in found.values()]


def verdict_of(group: Sequence[Training]) -> Training:
    """The rank that decides: the worst, and of equals the one with the least in FP8."""
    return min(group, key=lambda each: (WORST.index(each.verdict), each.share or 0.0))


def report(group: Sequence[Training]) -> Iterator[str]:
    """The lines on one training."""
    lead = verdict_of(group)
    yield from opening(group, lead)
    yield ""
    if lead.why is not None and lead.verdict == UNKNOWN:
        yield from unknown(lead.why)
        return
    assert lead.found is not None
    yield from verdict_lines(group, lead)
    yield ""
    yield from table(lead.found.classes)
    yield ""
    yield from step_lines(lead)
    notes = lead.notes or ([lead.why] if lead.why else [])
    if notes:
        yield ""
    for note in notes:
        yield from told(f"{note.code}", f"{note.text}. Next: {note.next_step}")


def unknown(why: Note) -> Iterator[str]:
    yield from told("FP8 UNKNOWN", f"{why.code}: {why.text}")
    yield from told("  next", why.next_step)


def told(title: str, text: str) -> list[str]:
    indent = " " * INDENT
    return TextWrapper(WIDTH, initial_indent=title.ljust(INDENT), subsequent_indent=indent).wrap(text or "-")


def opening(group: Sequence[Training], lead: Training) -> Iterator[str]:
    evidence = lead.evidence
    device = evidence.get("device", {"name": "?"})["name"]
    ranks = int(evidence.get("world", 1))
    of_all = f" of {ranks}" if len(group) < ranks else ""
    many = f"{len(group)}{of_all} training process{'es' if ranks > 1 else ''} on {device}"
    parts = [many, f"torch {evidence.get('torch', '?')}"]
    if evidence.get("optimizers"):
        optimizers = " and ".join(dict.fromkeys(evidence["optimizers"]))
        parts.append(f"{optimizers} over {evidence['parameters']:,} parameters")
    yield from told("pytest-fp8:", ", ".join(parts))
    if "steps_ms" in evidence:
        warm, timed = evidence["warm_steps"], len(evidence["steps_ms"])
        last = f", {warm + timed + 1} profiled" if lead.window else ""
        said = f"steps 1-{warm} warmed up, {warm + 1}-{warm + timed} timed{last}; the script ran on as it was"
        yield from told("", said)


def verdict_lines(group: Sequence[Training], lead: Training) -> Iterator[str]:
    found = lead.found
    assert found is not None
    roles = [f"{role} {share:.0%}" for role, share in role_shares(lead).items()]
    how = " (emulated: FP8 values, multiplied in a wider type)" if lead.emulated else ""
    shares = {round(each.share or 0, 3) for each in group}
    every = f", {'alike on' if len(shares) == 1 else 'the least of'} {len(group)} ranks" if len(group) > 1 else ""
    said = f"{lead.share:.1%} of the FLOPs of matrix products{how}: {', '.join(roles)}{every}"
    yield from told(f"FP8 {lead.verdict}", said + (f"  [{lead.why.code}]" if lead.why else ""))
    layers = [layer for each in found.classes for layer in each.layers]
    ran = sum(each.share("fprop") * len(each.layers) for each in found.classes)
    yield from told("  layers", f"{ran:.0f} of {len(layers)} that ran")
    yield from told("  asked", ", ".join(asked(lead)) or "nothing in environment or arguments names FP8")
    yield from told("  in force", "; ".join(in_force(lead)) or "no library's setting found")


def role_shares(training: Training) -> dict[str, float]:
    """Role -> share of its FLOPs in FP8, of the roles that ran."""
    assert training.found is not None
    shares = {}
    for role in (*ROLES, RECOMPUTE):
        products = [product for each in training.found.classes for product in each.products.get(role, ())]
        total = sum(product.flops for product in products)
        if total:
            shares[role] = sum(product.flops for product in products if product.kind == FP8) / total
    return shares


def in_force(training: Training) -> list[str]:
    found = []
    if state := training.settings("accelerate"):
        found.append(f"accelerate's mixed precision is {state}")
    if true := training.settings("arguments"):
        found.append(f"TrainingArguments({true[0]}=True)")
    for config in training.settings("torchao") or ():
        scaling = "rowwise" if "axiswise" in config.lower() else "tensorwise"
        found.append(f"torchao, {scaling}{', emulated' if EMULATES in config else ''}")
    for said, count in training.evidence.get("recipes", {}).items():
        found.append(f"Transformer Engine in {count} layers: {said[:120]}")
    return found


def table(classes: Sequence[Class]) -> Iterator[str]:
    roles = [role for role in (*ROLES, RECOMPUTE) if any(each.products.get(role) for each in classes)]
    total = sum(each.flops for each in classes)
    yield f"  {'layers':40}{'of':>4}  " + "".join(f"{role:14}" for role in roles) + "FLOPs"
    labels = [each.label for each in classes]
    for each in classes:
        label = each.label if labels.count(each.label) == 1 else f"{each.label} {each.inputs} x {each.outputs}"
        cells = "".join(f"{cell(each, role):14}" for role in roles)
        reasons = {stays_for(layer) for layer in each.layers} if not each.in_fp8("fprop") else set()
        why = f"  {reasons.pop()}" if len(reasons) == 1 else ""
        yield f"  {label[:39]:40}{len(each.layers):>4}  {cells}{each.flops / total:6.1%}{why}".rstrip()


def cell(each: Class, role: str) -> str:
    """The precision of a role; where two ran, how many of the layers had which."""
    kinds = each.kinds(role) or {"-": 0}
    if len(kinds) == 1:
        (only,) = kinds
        return SHORT.get(only, only)
    layers = len(each.layers) / sum(kinds.values())
    shown = sorted(kinds, key=lambda kind: kind != FP8)
    return " ".join(f"{SHORT.get(kind, kind)} {kinds[kind] * layers:.0f}" for kind in shown)


def step_lines(training: Training) -> Iterator[str]:
    evidence, window, found = training.evidence, training.window, training.found
    assert window is not None
    assert found is not None
    times = evidence["steps_ms"]
    middle, spread = median(times), 1.4826 * median(abs(each - median(times)) for each in times)
    parts = [f"{middle:.1f} ms +-{spread:.1f} ({len(times)} steps)"]
    passes = window.backward_passes
    rows = found.rows * passes
    parts.append(f"{rows:,} rows through the layers, {rows / middle * 1e3:,.0f}/s")
    parts.append(f"{passes} backward pass{'es' if passes > 1 else ''}")
    parts.append(f"peak {evidence['peak_bytes'] / 2**30:.2f} GiB {evidence['peak_of']}")
    yield from told("ONE STEP", "; ".join(parts))
    if count := len(window.evaluated):
        quick = sum(product.kind == FP8 for product in window.evaluated)
        yield from told("", f"an evaluation came before it, not counted here: {count} products, {quick} of them in FP8")
    waits = f"input wait {window.input_wait_ms:.1f} ms, {window.waits} values read by the host (.item())"
    if not window.milliseconds.get("busy"):
        yield from told("", f"{waits}; times by kind of kernel need a GPU")
        return
    idle = max(0.0, middle - window.milliseconds["busy"])
    shown = [(word, window.milliseconds[name]) for name, word in ACCOUNT.items() if window.milliseconds[name] > 0]
    cells = [f"{word:15}{ms:8.1f} ms {ms / middle:5.0%}" for word, ms in [*shown, ("GPU idle", idle)]]
    for first, second in zip(cells[::2], [*cells[1::2], ""], strict=False):
        yield f"  {first}    {second}".rstrip()
    yield from told("", waits)
    if loose := sum(kernel.milliseconds for kernel in window.loose):
        said = (
            f"of no operator that is known, and not in the share: {loose:.1f} ms, most of them {window.loose[0].name}"
        )
        yield from told("", f"kernels with a product's name {said}")


# -- plain data ---------------------------------------------------------------------------------------------------


def plain(groups_: Sequence[Sequence[Training]], command: Sequence[str], exit_code: int) -> dict[str, Any]:
    """All that was said, as docs/watch.md describes it."""
    return {
        "schema": SCHEMA,
        "command": list(command),
        "script_exit_code": exit_code,
        "trainings": [plain_training(group) for group in groups_],
    }


def plain_training(group: Sequence[Training]) -> dict[str, Any]:
    lead = verdict_of(group)
    evidence, window, found = lead.evidence, lead.window, lead.found
    times = evidence.get("steps_ms")
    return {
        "verdict": lead.verdict,
        "code": lead.why.code if lead.why else None,
        "reason": lead.why.text if lead.why else "",
        "fp8_share": lead.share,
        "emulated": lead.emulated,
        "device": evidence.get("device", {}).get("name"),
        "torch": evidence.get("torch"),
        "ranks": [
            {"rank": each.evidence.get("rank", 0), "verdict": each.verdict, "fp8_share": each.share} for each in group
        ],
        "asked": asked(lead),
        "in_force": in_force(lead),
        "notes": [{"code": note.code, "text": note.text, "next": note.next_step} for note in lead.notes],
        "step_ms": median(times) if times else None,
        "steps_ms": times or [],
        "peak_bytes": evidence.get("peak_bytes"),
        "roles": role_shares(lead) if found and lead.share is not None else {},
        "classes": [plain_class(each) for each in found.classes] if found else [],
        "account_ms": window.milliseconds if window and window.milliseconds.get("busy") else {},
        "rows": found.rows if found else 0,
        "backward_passes": window.backward_passes if window else 0,
        "input_wait_ms": window.input_wait_ms if window else None,
    }


def plain_class(each: Class) -> dict[str, Any]:
    return {
        "layers": [layer["name"] for layer in each.layers],
        "in": each.inputs,
        "out": each.outputs,
        "flops": each.flops,
        "products": {role: dict(each.kinds(role)) for role in each.products},
    }
