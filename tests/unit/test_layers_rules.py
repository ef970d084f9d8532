"""The layers question: from executed products to layers and roles, and what is decided of evidence of an arm, healthy
and broken in each way that it must name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.evidence import CASE, HEAD, SIZES, arm_ledger, layers_evidence, verdict_of
from pytest_fp8 import Case, Verdict
from pytest_fp8.codes import L, P
from pytest_fp8.questions.layers.check import AS_IT_RUNS, beside, check_layers, find_on_wire, same_on_all_ranks
from pytest_fp8.questions.layers.kernels import LONGEST_NAME, kernel_family, short_name
from pytest_fp8.questions.layers.products import FP8, LayerCall, Product, profiled_step, role_table
from pytest_fp8.questions.ledger.evidence import Collective, TensorNote, TwoLedgers
from pytest_fp8.recipes import ROLES, Reason, Stays

# -- executed products: the recorded step says whose they are, the profile how they ran --------------------------------

AGAIN = ("fprop", "recompute", "dgrad", "wgrad")
THREE = [
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


def kinds_of(step, layer):
    return {a.role: a.kind for a in step.attributions if a.layer == layer}


def test_every_product_finds_its_layer_and_role_in_any_order():
    """What an optimizer multiplies is no layer's, and no part of the share."""
    newton_schulz, calls = Product("optimizer", 64, (128, 128), "bfloat16", "mm"), recorded(THREE)
    result = profiled_step([*products(calls), newton_schulz], calls)
    assert role_table(result, calls) == {role: {"expected": 2, "fp8": 2} for role in ("fprop", "dgrad", "wgrad")}
    assert result.fp8_share() == pytest.approx(0.5)
    assert not result.others
    assert not any(a.among for a in result.attributions)


@pytest.mark.parametrize(("kind", "share"), [(FP8, 3 / 5), ("bfloat16", 2 / 5)])
def test_a_product_that_no_linear_calls_counts_in_the_share(kind, share):
    """As of a bare function over FP8's operator: a quarter of what the Linears multiply, of which half is in FP8."""
    calls = recorded(THREE)
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
def test_what_compiled_code_alone_has_in_bf16_is_of_one_layer_of_its_size(role):
    calls, broken = recorded(THREE), recorded(THREE, ("b", role))
    wrong = [a for a in profiled_step(products(broken), calls).attributions if a.kind != FP8 and a.layer != "head"]
    assert [(a.role, a.among) for a in wrong] == [(role, [("a", role), ("b", role)])]
    every = profiled_step(products(recorded(THREE, role)), calls)
    assert [(a.layer, a.kind, a.among) for a in every.attributions if a.role == role] == [
        (name, "bfloat16", ()) for name in ("a", "b", "head")
    ]


@pytest.mark.parametrize("phase", ["recompute", "backward"])
def test_recomputation_is_a_role_of_its_own(phase):
    """In compiled code no hook says that it runs."""
    calls = recorded([replace(call, owed=AGAIN) for call in THREE], "recompute")
    ran = [replace(p, phase=phase) if p.phase == "recompute" else p for p in products(calls)]
    table = role_table(profiled_step(ran, calls), calls)
    assert (table["recompute"], table["dgrad"]) == ({"expected": 2, "fp8": 0}, {"expected": 2, "fp8": 2})


FIRST = [LayerCall("first", 64, 128, rows=128, fp8=True, owed=("fprop", "wgrad"))]
"""As many rows as outputs: its dgrad, which nobody needs and torchao computes, has the extents of its wgrad."""
UNNEEDED = Product("backward", 128, (64, 128), FP8, "mm")


@pytest.mark.parametrize(("kept", "kind"), [(("wgrad",), FP8), ((), "bfloat16")])
def test_a_product_that_nobody_needs_is_not_taken_for_the_layers_own(kept, kind):
    """With a wgrad that a recipe keeps in high precision, and with one in FP8."""
    calls = recorded(FIRST, *kept)
    result = profiled_step([calls[0].ran["fprop"], replace(UNNEEDED, kind=kind), UNNEEDED], calls, others=[UNNEEDED])
    assert kinds_of(result, "first")["wgrad"] == kind


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
    assert set(kinds_of(step, "expert").values()) == {"absent"}


@pytest.mark.parametrize("noticed", [True, False])
def test_a_recomputation_that_ended_early_takes_no_other_roles_product(noticed):
    """The second layer's fprop and the first one's dgrad have equal extents, and no phase tells them apart."""
    calls = recorded(LayerCall(name, *sizes, rows=32, fp8=True, owed=AGAIN) for name, sizes in UP_DOWN.items())
    ran = [replace(p, phase="backward") if p.phase == "recompute" else p for p in products(calls)]
    ran.remove(replace(calls[1].ran["recompute"], phase="backward"))
    if noticed:
        calls[1] = replace(calls[1], ran={role: p for role, p in calls[1].ran.items() if role != "recompute"})
    step = profiled_step(ran, calls)
    assert [(a.layer, a.role) for a in step.attributions if a.kind == "absent"] == [("down", "recompute")]


UP_DOWN = {"up": (64, 256), "down": (256, 64)}


def test_where_operators_were_not_recorded_the_recipe_says_what_is_expected():
    """As of Unsloth, whose library refuses it: forward products in FP8, gradients not, and all sizes alike."""
    calls = [LayerCall("q", 64, 64, rows=32, fp8=True, owed=("fprop", "recompute", "dgrad"))]
    forward = Product("forward", 64, (32, 64), FP8, "mm")
    ran = [forward, *(replace(forward, phase="backward", kind=kind) for kind in ("bfloat16", FP8))]
    assert kinds_of(profiled_step(ran, calls, fp8_roles=("fprop",)), "q") == {
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


# -- what is decided ---------------------------------------------------------------------------------------------------

PASS, FAIL = Verdict.PASS, Verdict.FAIL
HP = Case("1b", "torchao", "rowwise_with_gw_hp")
ACCELERATE = Case("1b", "accelerate_te", "delayed")
RECOMPUTED = Case("1b", "torchao", "tensorwise", activation_checkpointing=True)
RECIPE = {"recipe": "delayed", **CASE.full_options}
HEALTHY = layers_evidence()


def judge(case=CASE, ledgers=None, **changes):
    return check_layers(case, layers_evidence(case=case, **changes), ledgers=ledgers)


def of_arms(**fp8):
    return TwoLedgers(arm_ledger(), arm_ledger(**fp8), "torchao")


def in_bf16(*names):
    """The products and calls of an arm in which these layers are not FP8."""
    healthy = layers_evidence(bf16=[(name, role) for name in names for role in ROLES])
    calls = [replace(call, fp8=call.fp8 and call.name not in names) for call in healthy.calls]
    return {"products": healthy.products, "calls": calls}


def nothing(skipped=None, **more):
    return {"converted": [], "live_fp8": [], "skipped": skipped or {}, **in_bf16("q", "up"), **more}


def seen_in(recipe):
    return {"recipes": {name: {"recipe": "delayed", **recipe} for name in ("q", "up")}}


def with_function(gradients=FP8):
    """A healthy arm with a function of the user's own in FP8, and its gradients of this kind."""
    call = LayerCall("mix (64 to 128)", 64, 128, 48, fp8=True, by="mix")
    kinds = {"fprop": FP8, "dgrad": gradients, "wgrad": gradients}
    ran = {role: Product(*call.expected(role), kinds[role], "_scaled_mm", "fp8_kernel_1x1") for role in ROLES}
    return {"calls": [*HEALTHY.calls, replace(call, ran=ran)], "products": [*HEALTHY.products, *ran.values()]}


def in_some_calls():
    """Layers that are off in one of two micro-batches."""
    off = layers_evidence(bf16=[("q", "fprop"), ("up", "fprop")])
    return {"calls": [*HEALTHY.calls, *off.calls], "products": [*HEALTHY.products, *off.products]}


def recomputed_in_bf16():
    """Recomputation that torch ended early."""
    healthy = layers_evidence(case=RECOMPUTED, again=["q", "up"])
    ended = [p for p in healthy.products if p != healthy.calls[1].ran["recompute"]]
    ran = [replace(p, kind="bfloat16") if p.phase == "recompute" and p.kind == FP8 else p for p in ended]
    return {"case": RECOMPUTED, "again": ["q", "up"], "products": ran}


def cut_off():
    """The one dgrad of two layers of equal sizes may be anybody's."""
    expected = HEALTHY.calls[0].expected("dgrad")
    return {"products": [p for p in HEALTHY.products if p.phase == "forward" or p.extents != expected]}


def of_twelve_layers():
    """Six of each size, of which one has its dgrad in BF16 in compiled code."""
    alike = [replace(call, name=f"{call.name}{index}") for index in range(6) for call in HEALTHY.calls]
    names = [call.name for call in alike if call.fp8]
    products = [product for call in alike for product in call.ran.values()]
    products[products.index(alike[1].ran["dgrad"])] = replace(alike[1].ran["dgrad"], kind="bfloat16")
    return {
        "originals": {call.name: (call.in_features, call.out_features) for call in alike},
        "skipped": {call.name: HEAD for call in alike if not call.fp8},
        **dict.fromkeys(("converted", "live_fp8"), names),
        "recipes": {},
        "calls": alike,
        "products": products,
    }


def not_called(layer):
    return {"products": [p for p in HEALTHY.products if p not in layer.ran.values()]}


IN_EVALUATION = {"products": [Product("evaluation", 64, (48, 128), FP8, "mm", "fp8_kernel_1x1")]}
BOTH_FORWARD, BOTH_WGRAD = ([(name, role) for name in ("q", "up")] for role in ("fprop", "wgrad"))
SIZE, LEFT, EDGE = Reason(Stays.SIZE, "odd"), Reason(Stays.LEFT, "the workload leaves '*'"), Reason(Stays.EDGE, "first")
ROUTER = Reason(Stays.SIZE, "out_features=10 is not a multiple of 16")
ADAPTED = {
    "originals": {"q": (32, 32), "q.lora_A": (32, 16)},
    "converted": ["q"],
    "skipped": {"q.lora_A": Reason(Stays.ADAPTER, "LoRA")},
    "live_fp8": ["q", "q.lora_A"],
}
STOPPED = {
    "originals": {"mlp.gate": (64, 64), "mlp.router": (64, 10), "mlp.up": (64, 256)},
    "converted": ["mlp.gate", "mlp.up"],
    "skipped": {"mlp.router": ROUTER},
    "live_fp8": ["mlp.gate"],
}
ASKED = {"amax_compute_algo": "max"}
COUNTS = {"fp8_layers": 2, "fp8_fprop": 2, "fp8_dgrad": 2, "fp8_wgrad": 2}

FOUND = [  # code, what the message says, changes of the evidence
    # What was converted.
    (L.NOTHING_CONVERTED, "size: odd", nothing(dict.fromkeys(SIZES, SIZE))),
    # What a conversion of the user's own left without a reason was not meant to be left.
    (L.NOTHING_CONVERTED, "2 Linears could be FP8 and are not: q, up", nothing({"lm_head": LEFT})),
    (L.NO_LINEAR_FITS, "the backend torchao converts both", nothing(dict.fromkeys(SIZES, EDGE))),
    (L.NO_LINEAR_FITS, "no Linear at all", nothing(originals={})),
    (L.OTHER_LIBRARY, "torchao.float8", nothing(kinds=dict.fromkeys(SIZES, "torchao.float8.Linear"))),
    (P.NOTHING_READS_IT, "", nothing(switches={"asked": "fp8", "accelerate": ""})),
    (P.TRAINER_DECIDES, "", nothing(switches={"asked": "fp8", "accelerate": "bf16"})),
    (P.PROGRAM_DECIDES, "", nothing(switches={"asked": "fp8", "accelerate": "no"})),
    (L.LEFT_AND_CONVERTED, "q.lora_A left alone (adapter: LoRA)", ADAPTED),
    (L.LOST_BEHAVIOUR, "q: a forward hook", {"dropped_behaviour": {"q": "a forward hook"}}),
    (L.UNACCOUNTED, "no reason: lm_head", {"skipped": {}}),
    # Accelerate's conversion stops at the first Linear that does not fit.
    (L.NOT_CONVERTED, "left for their sizes: mlp.router (size: out_features=10", {"case": ACCELERATE, **STOPPED}),
    # The recipe in force.
    (L.FP8_OFF, "off, in q", {"recipes": {"q": {"recipe": "off"}}}),
    (L.OTHER_RECIPE, "amax_compute_algo=max", {"recipes": {"q": {**RECIPE, "amax_compute_algo": "most_recent"}}}),
    (L.OTHER_RECIPE, "to_kwargs()", {"case": ACCELERATE, **seen_in({**ACCELERATE.full_options, **ASKED})}),
    # Products.
    (L.NEVER_CALLED, "no Linear was called", {"calls": [], "products": []}),
    (L.WGRAD_NOT_IN_FP8, "1 in FP8; bfloat16: up", {"bf16": [("up", "wgrad")]}),
    (L.STALE_AMAX, "unchanged: q, up", {"stale_amax": ["q", "up"]}),
    (L.NO_FORWARD_IN_FP8, "evaluation: 1 FP8 products", nothing(**IN_EVALUATION)),
    (L.GRADIENTS_NOT_IN_FP8, "bfloat16: mix", with_function("bfloat16")),
    (L.FPROP_NOT_IN_FP8, "fprop of 2 of 2 layers", {"kernel": "bf16_kernel_1x1"}),
    (L.AGAINST_RECIPE, "wgrad", {"case": HP}),
    (None, "eval() switched FP8 off: 1", {"bf16": BOTH_FORWARD, "in_eval": ["q"]}),
    (None, "fprop of 2 of 4 calls", in_some_calls()),
    (L.RECOMPUTE_NOT_IN_FP8, "recompute of 1 of 2 layers", recomputed_in_bf16()),
    # No hook and no dispatch mode sees whose product it is that compiled code alone has in BF16.
    (L.DGRAD_NOT_IN_FP8, "1 of 6 of equal sizes, and which is not known: up0, up1", of_twelve_layers()),
    # A branch that is cut off, and not a layer whose products are missed.
    (L.NO_GRADIENT, "lm_head.weight, up.weight", {"ledgers": of_arms(gradients=["q.weight"]), **cut_off()}),
    (L.DGRAD_NOT_IN_FP8, "dgrad of 1 of 2", {"ledgers": of_arms(), **cut_off()}),
]


@pytest.mark.parametrize(("code", "says", "changes"), FOUND)
def test_what_is_broken_is_named(code, says, changes):
    verdict_of(judge(**changes), FAIL, says, *([code] if code else []))


SOUND = [  # what the message says, changes of the evidence
    ("2 of 3 Linears", {}),
    ("in FP8 where no Linear is called", with_function()),
    ("", {"case": HP, "bf16": BOTH_WGRAD}),
    ("leave='mlp.*' matches no Linear", {"unmatched": ["mlp.*"]}),
    # Of torch._scaled_grouped_mm on an H200, shortened: no learned family has the kernel's name, which says FP8.
    *(("", {"kernel": f"_ZN7cutlass13device_kernelI12{kind}EPNS6_E"}) for kind in ("float_e4m3_t", "float_e5m2_t")),
    # An expert that no row was sent to in the profiled step owes nothing.
    ("", {**not_called(HEALTHY.calls[1]), "routed": ["up"]}),
    ("1 converted layer was not called", {"ledgers": of_arms(fp8_layers=["q", "up", "up2"])}),
]


@pytest.mark.parametrize(("says", "changes"), SOUND)
def test_sound_arms_pass(says, changes):
    verdict_of(judge(**changes), PASS, says)


def test_what_compiled_code_alone_does_has_a_cause_of_its_own():
    assert judge(**of_twelve_layers()).cause == AS_IT_RUNS
    assert judge(**in_some_calls()).cause != AS_IT_RUNS


def test_a_kernel_that_is_not_known_decides_nothing():
    verdict_of(judge(kernel="cute_1x1"), Verdict.INCONCLUSIVE, L.UNKNOWN_KERNEL, "cute")


@pytest.mark.parametrize(("count", "says"), [("fp8_layers", "Linears"), ("fp8_dgrad", "dgrad products")])
def test_counts_are_exact(count, says):
    assert judge().figures.stored() == {**COUNTS, "fp8_share": pytest.approx(5 / 13)}
    assert judge().numbers["roles"]["wgrad"] == {"expected": 2, "fp8": 2}
    verdict_of(check_layers(CASE, HEALTHY, stored=COUNTS), PASS)
    more = check_layers(CASE, HEALTHY, stored={**COUNTS, count: 3})
    verdict_of(more, FAIL, L.LESS_THAN_BASELINE, says)


# -- what a PASS names besides: Linears of odd sizes that weigh something, and no others ------------------------------


def odd(size, side="out_features"):
    return Reason(Stays.SIZE, f"{side}={size} is not a multiple of 16")


@pytest.mark.parametrize(
    ("originals", "skipped", "named"),
    [
        (
            {"0": (64, 250), "2": (250, 256), "4": (256, 64)},
            {"0": odd(250), "2": odd(250, "in_features")},
            "2 of 3 Linears stay in BF16: 0, 2 "
            "(out_features=250 is not a multiple of 16, in_features=250 is not a multiple of 16)",
        ),
        ({"q": (64, 512), "r": (64, 5)}, {"r": odd(5)}, ""),
    ],
    ids=["odd sizes", "a small router"],
)
def test_linears_of_odd_sizes_are_named_and_no_others(originals, skipped, named):
    evidence = replace(HEALTHY, originals=originals, skipped=skipped)
    assert beside(CASE, evidence, evidence.step(), None) == ([named] if named else [])


def test_a_pass_keeps_its_notes_in_headline_and_numbers():
    decision = judge(stacked_weights={"experts": [4, 64, 64]})
    verdict_of(decision, PASS, "; not in FP8, since no Linear holds them: experts")
    assert decision.numbers["notes"] == ["not in FP8, since no Linear holds them: experts"]
    assert judge().numbers["notes"] == []


def test_stacked_weights_that_a_wrapper_multiplies_in_fp8_are_not_said_to_stay():
    evidence = layers_evidence(**with_function(), stacked_weights={"mix.up": [4, 64, 64], "down": [4, 64, 64]})
    assert beside(CASE, evidence, evidence.step(), None)[-1] == "not in FP8, since no Linear holds them: down"


@pytest.mark.parametrize(
    ("ranks", "digests", "same"),
    [(2, "abab", True), (2, "abac", False), (1, "ab", False), (2, "", False), (2, ["a", "", "a", ""], False)],
)
def test_ranks_that_are_given_one_batch_are_told(ranks, digests, same):
    batch = [TensorNote([48, 64], "bfloat16", digest) for digest in digests]
    assert same_on_all_ranks(arm_ledger(ranks=ranks, batch=batch)) is same


# -- the wire: what a configuration promises to gather in FP8 --------------------------------------------------------

SHARDED = Case("1b", "torchao", "tensorwise", gpus=2, parallel="fsdp2", options={"float8_all_gather": True})
OWN = replace(SHARDED, model="own", parallel="own")
CONVERTED = sum(SIZES[name][0] * SIZES[name][1] for name in ("q", "up"))
GATHERED = 2 * (CONVERTED + SIZES["lm_head"][0] * SIZES["lm_head"][1])


def gathers(*collectives):
    return arm_ledger(ranks=2, wire=[Collective(*one) for one in collectives])


@pytest.mark.parametrize(
    ("now", "fails"), [(1.015 * (GATHERED - CONVERTED), False), (1.03 * (GATHERED - CONVERTED), True)]
)
def test_fp8_all_gather_sends_one_byte_of_each_converted_weight(now, fails):
    other = ("backward", "reduce-scatter", "bfloat16", GATHERED, 1)
    arms = [gathers(("forward", "all-gather", "uint8", int(size) // 2, 2), other) for size in (GATHERED, now)]
    evidence = layers_evidence(case=SHARDED, sharded=[*SIZES])
    found = check_layers(SHARDED, evidence, ledgers=TwoLedgers(*arms, "torchao"))
    assert found.code is (L.GATHERS_BF16 if fails else None), found.message
    said = f"{(GATHERED - CONVERTED) / 2**10:.1f} KiB gathered before the backward pass"
    assert (said in found.message) is fails


@pytest.mark.parametrize(("dtype", "fails"), [("uint8", False), ("bfloat16", True)])
def test_of_weights_that_are_sharded_in_part_fp8_must_be_gathered(dtype, fails):
    """One converted weight, and 400 bytes of a bias of the same group. In an evaluation ahead of the forward
    pass: the root then stays gathered."""
    size = SIZES["q"][0] * SIZES["q"][1]
    arms = [
        gathers(("evaluation", "all-gather", each, size * bytes_ + 400, 1))
        for each, bytes_ in (("bfloat16", 2), (dtype, 1 + fails))
    ]
    found = find_on_wire(OWN, layers_evidence(sharded=["q"]), TwoLedgers(*arms, "torchao"))
    assert (found.code if found else None) is (L.GATHERS_BF16 if fails else None)
