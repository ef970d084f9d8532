"""From executed products to layers and roles."""

import pytest

from pytest_fp8.questions.layers.kernels import kernel_family
from pytest_fp8.questions.layers.products import FP8, LayerCall, Product, attribute, role_table

CALLS = [
    LayerCall("a", 64, 128, rows=32, fp8=True),
    LayerCall("b", 64, 128, rows=32, fp8=True),
    LayerCall("head", 64, 256, rows=32),
]


def step(calls, kind_of, recompute=False):
    """The products a training step would execute, in order: forward, then backward in reverse."""
    ran = []
    for call in calls:
        phase, inner, outer = call.expected("fprop")
        ran.append(Product(phase, inner, outer, kind_of(call, "fprop"), "mm"))
    for call in reversed(calls):
        for role in call.roles(recompute):
            if role != "fprop":
                phase, inner, outer = call.expected(role)
                ran.append(Product(phase, inner, outer, kind_of(call, role), "mm"))
    return ran


def all_fp8(call, role):
    return FP8 if call.fp8 else "bfloat16"


def test_every_product_finds_its_layer_and_role():
    result = attribute(step(CALLS, all_fp8), CALLS)
    assert role_table(result, CALLS) == {role: {"expected": 2, "fp8": 2} for role in ("fprop", "dgrad", "wgrad")}
    assert not result.others
    assert all(a.sure for a in result.attributions)


def test_the_share_counts_flops_not_products():
    # a and b are 64 x 128, the head 64 x 256: half of the FLOPs, two thirds of the products.
    assert attribute(step(CALLS, all_fp8), CALLS).fp8_share() == pytest.approx(0.5)


def test_what_an_optimizer_multiplies_is_no_layer_s_and_no_part_of_the_share():
    newton_schulz = Product("optimizer", 64, (128, 128), "bfloat16", "mm")
    result = attribute([*step(CALLS, all_fp8), newton_schulz], CALLS)
    assert result.fp8_share() == pytest.approx(0.5)
    assert not result.others


@pytest.mark.parametrize(("kind", "share"), [(FP8, 1.0), ("bfloat16", 5 / 6)])
def test_a_product_that_no_layer_needs_counts_unless_it_is_in_fp8(kind, share):
    """torchao's first layer, uncompiled, whose input needs no gradient: a compiled step has no such product."""
    calls = [
        LayerCall("first", 64, 128, rows=32, owed=("fprop", "wgrad"), fp8=True),
        LayerCall("last", 128, 64, 32, fp8=True),
    ]
    ran = step(calls, all_fp8)
    unneeded = Product("backward", 128, (32, 64), kind, "mm")
    result = attribute([*ran, unneeded], calls)
    assert result.others == [unneeded]
    assert result.fp8_share() == pytest.approx(share)


@pytest.mark.parametrize("role", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("layer", ["a", "b"])
def test_one_product_in_bf16_is_named(role, layer):
    ran = step(CALLS, lambda c, r: "bfloat16" if (c.name, r) == (layer, role) else all_fp8(c, r))
    wrong = [(a.layer, a.role) for a in attribute(ran, CALLS).attributions if a.kind != FP8 and a.layer != "head"]
    assert wrong == [(layer, role)]


def test_a_product_that_never_ran_is_absent():
    ran = [p for p in step(CALLS, all_fp8) if not (p.phase == "backward" and p.inner == 32)]
    result = attribute(ran, CALLS)
    assert {a.role for a in result.attributions if a.kind == "absent"} == {"wgrad"}


def test_recomputation_is_a_role_of_its_own():
    ran = step(CALLS, lambda c, r: "bfloat16" if r == "recompute" else all_fp8(c, r), recompute=True)
    assert role_table(attribute(ran, CALLS, recompute=True), CALLS)["recompute"] == {"expected": 2, "fp8": 0}


def test_a_frozen_weight_owes_no_weight_gradient():
    frozen = [LayerCall("a", 64, 128, rows=32, owed=("fprop", "dgrad"), fp8=True)]
    assert "wgrad" not in role_table(attribute(step(frozen, all_fp8), frozen), frozen)


def test_products_of_no_layer_are_kept_apart():
    extra = Product("forward", 1, (32, 128), "float32", "bmm")
    result = attribute([*step(CALLS, all_fp8), extra], CALLS)
    assert result.others == [extra]


def test_two_roles_of_equal_sizes_in_two_precisions_are_not_told_apart_with_confidence():
    # As many tokens as outputs: dgrad and wgrad have the same extents.
    square = [LayerCall("a", 64, 128, rows=128, fp8=True)]
    ran = step(square, lambda c, r: "bfloat16" if r == "wgrad" else FP8)
    assert {a.role for a in attribute(ran, square).attributions if not a.sure} == {"dgrad", "wgrad"}


# As many tokens as inputs and outputs, as an 8B model has: dgrad and wgrad of both Linears have the same extents. "out"
# is converted, "left" is not, and a compiled backward pass runs what is ready first.
ALIKE = [LayerCall("left", 128, 128, rows=128), LayerCall("out", 128, 128, rows=128, fp8=True)]


def interleaved(*kinds):
    forward = [Product("forward", 128, (128, 128), kind, "mm") for kind in ("bfloat16", FP8)]
    return forward + [Product("backward", 128, (128, 128), kind, "mm") for kind in kinds]


def test_high_precision_products_are_those_of_the_layer_that_was_left():
    result = attribute(interleaved(FP8, "bfloat16", FP8, "bfloat16"), ALIKE)
    assert role_table(result, ALIKE) == {role: {"expected": 1, "fp8": 1} for role in ("fprop", "dgrad", "wgrad")}
    assert {(a.layer, a.kind) for a in result.attributions} == {("left", "bfloat16"), ("out", FP8)}


def test_a_role_that_the_recipe_keeps_in_high_precision_is_none_that_lost_its_fp8():
    result = attribute(interleaved("bfloat16", FP8, "bfloat16", "bfloat16"), ALIKE, fp8_roles=("fprop", "dgrad"))
    assert [(a.layer, a.role) for a in result.attributions if a.kind == FP8] == [("out", "fprop"), ("out", "dgrad")]


@pytest.mark.parametrize(
    "kinds", [(FP8, "bfloat16", "bfloat16", "bfloat16"), ("bfloat16",) * 4, (FP8, "bfloat16", "bfloat16")]
)
def test_one_product_in_fp8_too_few_is_still_found_among_alike_layers(kinds):
    result = attribute(interleaved(*kinds), ALIKE)
    assert [a for a in result.attributions if a.layer == "out" and a.kind != FP8]
    assert not any(a.sure for a in result.attributions if a.role != "fprop") or len(set(kinds)) == 1


FIRST = [LayerCall("first", 64, 128, rows=128, fp8=True, owed=("fprop", "wgrad"))]
"""As many rows as outputs: its dgrad, which nobody needs and torchao computes, has the extents of its wgrad."""


@pytest.mark.parametrize("kinds", [(FP8, "bfloat16"), ("bfloat16", FP8)])
def test_a_product_that_nobody_needs_is_not_taken_for_one_that_a_recipe_keeps(kinds):
    forward, (_, inner, outer) = step(FIRST, all_fp8)[0], FIRST[0].expected("wgrad")
    ran = [forward, *(Product("backward", inner, outer, kind, "mm") for kind in kinds)]
    kept = attribute(ran, FIRST, fp8_roles=("fprop", "dgrad"))
    assert [(a.role, a.kind) for a in kept.attributions] == [("fprop", FP8), ("wgrad", "bfloat16")]


def test_a_wgrad_in_fp8_that_a_recipe_keeps_is_found_beside_a_product_that_nobody_needs():
    forward, (_, inner, outer) = step(FIRST, all_fp8)[0], FIRST[0].expected("wgrad")
    ran = [forward, *(Product("backward", inner, outer, FP8, "mm") for _ in range(2))]
    assert attribute(ran, FIRST, fp8_roles=("fprop", "dgrad")).attributions[1].kind == FP8


def test_a_lost_wgrad_is_found_beside_a_product_that_nobody_needs():
    ran = [step(FIRST, all_fp8)[0]]
    _, inner, outer = FIRST[0].expected("wgrad")
    ran += [Product("backward", inner, outer, kind, "mm") for kind in ("bfloat16", FP8)]
    assert attribute(ran, FIRST).attributions[1].kind == "bfloat16"


CRITIC = [
    LayerCall("critic", 64, 128, rows=128, fp8=True, owed=("fprop", "wgrad")),
    LayerCall("generator", 128, 64, rows=128, fp8=True, microbatch=1),
    LayerCall("critic", 64, 128, rows=128, fp8=True, owed=("fprop", "dgrad"), microbatch=1),
]
"""A GAN: the critic's weights rest for the second loss, whose gradient passes through it. All gradients but the
generator's dgrad are alike, and torchao computes those that nobody needs."""


@pytest.mark.parametrize(
    ("order", "sound"),
    [("8h 8hh", True), ("h8 h8h", True), ("8h 8h", True), ("8h hhh", False), ("hh hhh", False), ("88 88h", False)],
)
def test_a_layer_that_rests_in_one_loss_may_compute_its_wgrad_all_the_same(order, sound):
    kinds = [FP8 if kind == "8" else "bfloat16" for kind in order.replace(" ", "")]
    ran = [Product("forward", *call.expected("fprop")[1:], FP8, "mm") for call in CRITIC]
    ran += [Product("backward", 128, (64, 128), kind, "mm") for kind in kinds]
    ran.append(Product("backward", *CRITIC[1].expected("dgrad")[1:], FP8, "mm"))
    result = attribute(ran, CRITIC, fp8_roles=("fprop", "dgrad")).attributions
    assert all((a.kind == FP8) == (a.role != "wgrad") for a in result) == sound


def test_in_the_forward_pass_order_counts():
    swapped = [Product("forward", 128, (128, 128), kind, "mm") for kind in (FP8, "bfloat16")]
    result = attribute(swapped + interleaved(FP8, FP8, "bfloat16", "bfloat16")[2:], ALIKE)
    assert [(a.layer, a.kind) for a in result.attributions if a.role == "fprop"] == [("left", FP8), ("out", "bfloat16")]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_ovscale_TNT", "nvjet_sm90_qqtst"),
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "nvjet_sm90_tst"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x64", "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n"),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(Params)",
            "pytorch_flash::flash_fwd_kernel",
        ),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x64x64",
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16",
        ),
    ],
)
def test_a_family_is_a_kernel_without_its_size(name, family):
    assert kernel_family(name) == family


def one_step(call, phase="forward", rows=None):
    """The three products of a Linear, all in FP8, for ``rows`` in place of the call's own."""
    m, k, n = rows or call.rows, call.in_features, call.out_features
    return [
        Product(phase, k, (m, n), FP8, "mm"),
        Product("backward", n, (m, k), FP8, "mm"),
        Product("backward", m, (n, k), FP8, "mm"),
    ]


def test_rows_that_a_router_moved_are_matched_by_the_layers_own_sizes():
    call = LayerCall("expert", 64, 128, rows=48, fp8=True)
    step = attribute(one_step(call, rows=32), [call])
    assert [a.kind for a in step.attributions] == [FP8] * 3
    assert step.fp8_share() == 1.0


def test_a_layer_of_other_sizes_is_never_taken_for_a_missing_one():
    call = LayerCall("expert", 64, 128, rows=48, fp8=True)
    step = attribute(one_step(LayerCall("other", 64, 256, rows=48)), [call])
    assert [a.kind for a in step.attributions] == ["absent"] * 3


def test_a_recomputation_that_ended_early_takes_no_other_roles_product():
    # The second layer's fprop and the first one's dgrad have equal extents, and no phase tells them apart.
    up = LayerCall("up", 64, 256, rows=32, fp8=True, owed=("fprop", "recompute", "dgrad", "wgrad"))
    down = LayerCall("down", 256, 64, rows=32, fp8=True, owed=("fprop", "recompute", "dgrad", "wgrad"))
    products = [*one_step(up), *one_step(down), Product("backward", 64, (32, 256), FP8, "mm")]
    step = attribute(products, [up, down])
    assert [(a.layer, a.role) for a in step.attributions if a.kind == "absent"] == [("down", "recompute")]
