"""Kernel names, reduced to what does not change with a matrix's size. No torch."""

from __future__ import annotations

import re


def kernel_family(name: str) -> str:
    """A kernel's name without its tile sizes and template arguments, so that two sizes of one algorithm are equal.

    >>> kernel_family("nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT")
    'nvjet_sm90_qqtst'
    """
    name = re.sub(r"^void ", "", name)
    name = re.split(r"[<(]", name)[0]
    return re.split(r"_(?:\d+x\d+|tilesize|knob_)", name)[0]
