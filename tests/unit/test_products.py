"""From executed products to layers and roles: the recorded step says whose they are, the profile how they ran."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fp8.questions.layers.kernels import LONGEST_NAME, kernel_family, short_name
from pytest_fp8.questions.layers.products import FP8, LayerCall, Product, profiled_step, role_table

AGAIN = ("fprop", "recompute", "dgrad", "wgrad")
CALLS = [
    LayerCall("a", 64, 128, rows=32, fp8=True),
    LayerCall("b", 64, 128, rows=32, fp8=True),
    LayerCall("head", 64, 256, rows=32),
]


def recorded(calls, *bf16):
    """The calls with their products, in FP8 but for these layers and roles."""

    def product(call, role):
        return Product(*call.expected(role, "recompute"), FP8 if call.fp8 else "bfloat16", "mm")

    def kind(call, role):
        return {"kind": "bfloat16"} if (call.name, role) in bf16 or role in bf16 else {}

    return [
        replace(call, ran={role: replace(product(call, role), **kind(call, role)) for role in call.owed})
        for call in calls
    ]


def products(calls):
    """What these calls ran. The last comes first, as if a compiler had chosen the order."""
    return [product for call in reversed(calls) for product in call.ran.values()]


def kinds(step, layer):
    return {a.role: a.kind for a in step.attributions if a.layer == layer}


def test_every_product_finds_its_layer_and_role_in_any_order():
    """What an optimizer multiplies is no layer's, and no part of the share."""
    newton_schulz, calls = Product("optimizer", 64, (128, 128), "bfloat16", "mm"), recorded(CALLS)
    result = profiled_step([*products(calls), newton_schulz], calls)
    assert role_table(result, calls) == {role: {"expected": 2, "fp8": 2} for role in ("fprop", "dgrad", "wgrad")}
    assert result.fp8_share() == pytest.approx(0.5)
    assert not result.others
    assert not any(a.among for a in result.attributions)


@pytest.mark.parametrize(("kind", "share"), [(FP8, 3 / 5), ("bfloat16", 2 / 5)])
def test_a_product_that_no_linear_calls_counts_in_the_share(kind, share):
    """As of a bare function over FP8's operator: a quarter of what the Linears multiply, of which half is in FP8."""
    calls = recorded(CALLS)
    result = profiled_step(products(calls), calls)
    size = result.flops() // 4
    outside = Product("forward", size // (2 * 64), (64, 1), kind, "mm")
    assert replace(result, foreign=[outside]).fp8_share() == pytest.approx(share)


@pytest.mark.parametrize(("kind", "share"), [(FP8, 1.0), ("bfloat16", 5 / 6)])
def test_a_product_that_no_layer_needs_counts_unless_it_is_in_fp8(kind, share):
    """torchao's first layer, uncompiled, whose input needs no gradient: a compiled step has no such product."""
    first = LayerCall("first", 64, 128, rows=32, owed=("fprop", "wgrad"), fp8=True)
    calls = recorded([first, LayerCall("last", 128, 64, 32, fp8=True)])
    unneeded = Product("backward", 128, (32, 64), kind, "mm")
    result = profiled_step([*products(calls), unneeded], calls, others=[unneeded])
    assert result.others == [unneeded]
    assert result.fp8_share() == pytest.approx(share)
    assert {a.kind for a in result.attributions} == {FP8}


@pytest.mark.parametrize("role", ["fprop", "dgrad", "wgrad"])
def test_one_product_in_bf16_is_named_where_the_recorded_step_has_it_too(role):
    calls = recorded(CALLS, ("b", role))
    wrong = [a for a in profiled_step(products(calls), calls).attributions if a.kind != FP8 and a.layer != "head"]
    assert [(a.layer, a.role, a.among) for a in wrong] == [("b", role, ())]


@pytest.mark.parametrize("role", ["fprop", "dgrad", "wgrad"])
def test_what_compiled_code_alone_has_in_bf16_is_of_one_layer_of_its_size(role):
    calls, broken = recorded(CALLS), recorded(CALLS, ("b", role))
    wrong = [a for a in profiled_step(products(broken), calls).attributions if a.kind != FP8 and a.layer != "head"]
    assert [(a.role, a.among) for a in wrong] == [(role, [("a", role), ("b", role)])]
    every = profiled_step(products(recorded(CALLS, role)), calls)
    assert [(a.layer, a.kind, a.among) for a in every.attributions if a.role == role] == [
        (name, "bfloat16", ()) for name in ("a", "b", "head")
    ]


@pytest.mark.parametrize("phase", ["recompute", "backward"])
def test_recomputation_is_a_role_of_its_own(phase):
    """In compiled code no hook says that it runs."""
    calls = recorded([replace(call, owed=AGAIN) for call in CALLS], "recompute")
    ran = [replace(p, phase=phase) if p.phase == "recompute" else p for p in products(calls)]
    table = role_table(profiled_step(ran, calls), calls)
    assert (table["recompute"], table["dgrad"]) == ({"expected": 2, "fp8": 0}, {"expected": 2, "fp8": 2})


# As many tokens as inputs and outputs, as an 8B model has: dgrad and wgrad of both Linears have the same extents. "out"
# is converted, "left" is not.
ALIKE = [LayerCall("left", 128, 128, rows=128), LayerCall("out", 128, 128, rows=128, fp8=True)]


def backward(kinds):
    """``8``: in FP8, ``h``: in high precision."""
    return [Product("backward", 128, (128, 128), FP8 if kind == "8" else "bfloat16", "mm") for kind in kinds]


@pytest.mark.parametrize(("kept", "ran"), [((), "hh88"), (("wgrad",), "hhh8")])
def test_products_of_equal_sizes_are_told_by_their_number(kept, ran):
    calls = recorded(ALIKE, *kept)
    forward = [call.ran["fprop"] for call in calls]
    result = profiled_step(forward + backward(ran), calls)
    assert set(kinds(result, "left").values()) == {"bfloat16"}
    assert kinds(result, "out") == {"fprop": FP8, "dgrad": FP8, "wgrad": "bfloat16" if kept else FP8}


FIRST = [LayerCall("first", 64, 128, rows=128, fp8=True, owed=("fprop", "wgrad"))]
"""As many rows as outputs: its dgrad, which nobody needs and torchao computes, has the extents of its wgrad."""
UNNEEDED = Product("backward", 128, (64, 128), FP8, "mm")


KEPT = ("wgrad",)


@pytest.mark.parametrize(
    ("kept", "ran", "found"),
    [(KEPT, "8h", "h"), (KEPT, "88", "8"), ((), "h8", "h"), ((), "88", "8")],
)
def test_a_product_that_nobody_needs_is_not_taken_for_the_layers_own(kept, ran, found):
    """With a wgrad that a recipe keeps in high precision, and with one in FP8."""
    calls = recorded(FIRST, *kept)
    alike = [replace(product, outer=(64, 128)) for product in backward(ran)]
    result = profiled_step([calls[0].ran["fprop"], *alike], calls, others=[UNNEEDED])
    assert kinds(result, "first")["wgrad"] == (FP8 if found == "8" else "bfloat16")


def one_step(call, rows):
    """The products of a Linear, all in FP8, for ``rows`` in place of the call's own."""
    return products(recorded([replace(call, rows=rows)]))


def test_one_of_several_experts_whose_product_lost_its_fp8_is_one_of_them():
    calls = recorded([LayerCall(name, 64, 128, rows=48, fp8=True) for name in ("one", "two")])
    ran = [*one_step(calls[0], rows=32), *one_step(calls[1], rows=64)]
    ran[0] = replace(ran[0], kind="bfloat16")
    wrong = [a for a in profiled_step(ran, calls).attributions if a.kind != FP8]
    assert [(a.kind, [layer for layer, _ in a.among]) for a in wrong] == [("bfloat16", ["one", "two"])]


def test_a_layer_of_other_sizes_is_never_taken_for_a_missing_one():
    calls = recorded([LayerCall("expert", 64, 128, rows=48, fp8=True)])
    step = profiled_step(one_step(LayerCall("other", 64, 256, rows=48, fp8=True), rows=48), calls)
    assert set(kinds(step, "expert").values()) == {"absent"}


@pytest.mark.parametrize("noticed", [True, False])
def test_a_recomputation_that_ended_early_takes_no_other_roles_product(noticed):
    """The second layer's fprop and the first one's dgrad have equal extents, and no phase tells them apart."""
    calls = recorded(LayerCall(name, *sizes, rows=32, fp8=True, owed=AGAIN) for name, sizes in TWO.items())
    ran = [replace(p, phase="backward") if p.phase == "recompute" else p for p in products(calls)]
    ran.remove(replace(calls[1].ran["recompute"], phase="backward"))
    if noticed:
        calls[1] = replace(calls[1], ran={role: p for role, p in calls[1].ran.items() if role != "recompute"})
    step = profiled_step(ran, calls)
    assert [(a.layer, a.role) for a in step.attributions if a.kind == "absent"] == [("down", "recompute")]


TWO = {"up": (64, 256), "down": (256, 64)}


def test_where_operators_were_not_recorded_the_recipe_says_what_is_expected():
    """As of Unsloth, whose library refuses it: forward products in FP8, gradients not, and all sizes alike."""
    calls = [LayerCall("q", 64, 64, rows=32, fp8=True, owed=("fprop", "recompute", "dgrad"))]
    forward = Product("forward", 64, (32, 64), FP8, "mm")
    ran = [forward, *(replace(forward, phase="backward", kind=kind) for kind in ("bfloat16", FP8))]
    assert kinds(profiled_step(ran, calls, fp8_roles=("fprop",)), "q") == {
        "fprop": FP8,
        "recompute": FP8,
        "dgrad": "bfloat16",
    }


def test_a_family_is_a_kernel_without_its_size():
    for sizes in ("128x128_128x6_2x1_v_bz_ovscale_TNT", "192x192_64x4_2x1_v_bz_coopB_TNN"):
        assert kernel_family(f"nvjet_sm90_qqtst_{sizes}") == "nvjet_sm90_qqtst"
    gemm = "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n"
    assert kernel_family(f"{gemm}_tilesize128x128x64") == gemm
    assert kernel_family("void pytorch_flash::flash_fwd_kernel<T<64>>(P)") == "pytorch_flash::flash_fwd_kernel"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::copy<4, (anonymous namespace)::Max<f(int)> >(int, int)", "copy<4, Max<f(int)> >"),
        ("triton_red_fused_abs_max_12", "triton_red_fused_abs_max"),
        (2 * LONGEST_NAME * "k", LONGEST_NAME * "k"),
    ],
)
def test_a_kernel_s_name_is_shown_without_namespaces_and_parameters(name, short):
    assert short_name(name) == short
