"""Switches of torch that a user's module or build() set are the user's in the arms, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_fp8.worker.training.preparation import compile_blocks, prefer_fast_attention

pytestmark = pytest.mark.slow


def enabled():
    switches = torch.backends.cuda
    return switches.cudnn_sdp_enabled(), switches.flash_sdp_enabled(), switches.math_sdp_enabled()


def test_attention_kernels_that_the_user_switched_off_stay_off():
    before = enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        with prefer_fast_attention(torch.device("cuda")):
            assert enabled() == (False, False, True)
        assert enabled() == (False, False, True)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before[0])
        torch.backends.cuda.enable_flash_sdp(before[1])


@pytest.mark.parametrize(("users", "limit", "fails"), [(4, 4, False), (8, 64, True)])
def test_a_recompile_limit_that_the_user_set_stays(users, limit, fails):
    with torch._dynamo.config.patch(recompile_limit=users, fail_on_recompile_limit_hit=False):
        compile_blocks(nn.Sequential(nn.Linear(2, 2)))
        config = torch._dynamo.config
        assert (config.recompile_limit, config.fail_on_recompile_limit_hit) == (limit, fails)
