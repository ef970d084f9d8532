"""Kernel names, reduced to what does not change with a matrix's size. No torch."""

from __future__ import annotations

import re

LONGEST_NAME = 100
COMMON = re.compile(r"^void |\(anonymous namespace\)::|\b(?:at|native|c10|std|detail|transformer_engine)::")
COMPILED = re.compile(r"^(triton_\w+?)_\d+$")


def kernel_family(name: str) -> str:
    """A kernel's name without its tile sizes and template arguments, so that two sizes of one algorithm are equal.

    >>> kernel_family("nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT")
    'nvjet_sm90_qqtst'
    """
    name = re.sub(r"^void ", "", name)
    name = re.split(r"[<(]", name)[0]
    return re.split(r"_(?:\d+x\d+|tilesize|knob_)", name)[0]


def says_fp8(name: str) -> bool:
    """Whether a kernel's name has the type of FP8 operands in it, as CUTLASS's have among their template arguments."""
    return "float_e4m3_t" in name or "float_e5m2_t" in name


def short_name(name: str) -> str:
    """A kernel's name as a reader needs it: without common namespaces, parameters and the numbers that torch's compiler
    gives, cut to ``LONGEST_NAME`` characters.

    >>> short_name("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MaxOps> >(int, int)")
    'reduce_kernel<512, 1, ReduceOp<float, MaxOps> >'
    >>> short_name("triton_red_fused_abs_max_12")
    'triton_red_fused_abs_max'
    """
    name, open_templates = COMMON.sub("", name), 0
    for position, letter in enumerate(name):
        open_templates += (letter == "<") - (letter == ">")
        if letter == "(" and not open_templates:
            name = name[:position]
            break
    return COMPILED.sub(r"\1", name)[:LONGEST_NAME]
