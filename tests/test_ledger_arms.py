"""The ledgers of live arms on a CPU: sound workloads have no difference, and what a router decides is tried."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("torchao")

from dataclasses import replace

from helpers.loops import CASE, batch, judge_both, ledgers, loop, routed, serve
from pytest_fp8 import Verdict
from pytest_fp8.questions.ledger.compare import compare

pytestmark = pytest.mark.slow


def squares(model, x):
    return (model(x) - x).float().pow(2).mean()


def convolved():
    import torch

    class Convolved(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = torch.nn.Conv1d(32, 32, 3, padding=1), torch.nn.BatchNorm1d(32)
            self.drop, self.leave = torch.nn.Dropout(0.2), torch.nn.Linear(32, 32)

        def forward(self, x):
            hidden = self.norm(self.conv(x.view(6, 16, 32).transpose(1, 2)))
            return self.leave(self.drop(hidden).transpose(1, 2)).reshape(96, 32)

    return Convolved()


def recurrent():
    import torch

    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.leave = torch.nn.LSTM(32, 32, batch_first=True), torch.nn.Linear(32, 32)

        def forward(self, x):
            return self.leave(self.lstm(x.view(6, 16, 32))[0]).reshape(96, 32)

    return Recurrent()


def raw():
    import torch

    class Raw(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.leave = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
            self.mixing = torch.nn.Parameter(torch.randn(32, 32) / 6)

        def forward(self, x):
            return self.leave(self.enter(x) @ self.mixing)

    return Raw()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(
    "given", [{"step": loop(2, clip=0.1, evaluate=True)}, {"build": routed, "loss": squares}], ids=["loop", "routed"]
)
def test_a_sound_workload_has_no_difference(given, recipe):
    """All others: ``python -m benchmarks.healthy``."""
    assert compare(ledgers(replace(CASE, recipe=recipe), **given)) == []


def test_a_fused_norm_of_the_fp8_arm_s_own_class_is_the_same_norm():
    """Another epsilon, another activation: the controls of ``suites/controls/arms.py``."""
    import torch

    class Fused(torch.nn.LayerNorm):
        def forward(self, x):
            return torch.nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def convert(model):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
        model[1].__class__ = Fused
        return model

    def build():
        return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 32))

    assert compare(ledgers(build=build, loss=squares, convert=convert)) == []


def test_what_accelerate_merely_calls_is_compared():
    pytest.importorskip("accelerate")
    case = replace(CASE, backend="accelerate_torchao")
    assert compare(ledgers(case, build=raw, loss=squares)) == []
    assert compare(ledgers(case, step=loop(2, clip=0.1))) == []


@pytest.mark.parametrize(
    ("build", "share"), [(convolved, 0.5), (recurrent, 0.5), (raw, 5 / 8)], ids=["convolved", "recurrent", "raw"]
)
def test_what_no_linear_multiplies_is_counted_and_keeps_the_share_below_all(build, share):
    """A raw parameter: of eight products that are needed five are of Linears."""
    assert 0 < judge_both(build=build, loss=squares).numbers["fp8_share"] <= share


def summed(how):
    import torch

    class Net(torch.nn.Module):
        activation = staticmethod(torch.nn.functional.gelu)

        def __init__(self):
            super().__init__()
            self.enter, self.leave = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

        def forward(self, x):
            hidden = self.enter(x)
            if how == "halves":
                hidden = hidden[:48] + hidden[48:]
            if how == "accuracy":
                self.seen = (hidden.argmax(-1) == 0).sum().item()
            return self.leave(self.activation(hidden))

    return Net()


def power(model, x):
    return model(x).square().mean()


def with_relu(model):
    from torch.nn.functional import relu
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model.activation = relu
    return convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))


@pytest.mark.parametrize("how", ["halves", "accuracy"])
def test_another_activation_in_one_arm_is_told_behind_a_slice_and_a_logged_number(how):
    same = {"build": lambda: summed(how), "loss": power}
    assert compare(ledgers(**same)) == []
    decision = judge_both(**same, convert=with_relu)
    assert decision.verdict is Verdict.INVALID, decision.message
    assert "relu" in decision.message


@pytest.mark.parametrize(("more", "records"), [({}, 1), ({"step": loop(clip=0.1)}, 1), ({"build": routed}, 5)])
def test_only_a_step_that_may_choose_rows_is_recorded_again(more, records, monkeypatch):
    from pytest_fp8.worker.answers import ledger, recorded

    seen = []
    step = recorded.observed_step
    for module in (ledger, recorded):
        monkeypatch.setattr(module, "observed_step", lambda *given, **how: seen.append(1) or step(*given, **how))
    serve(**({"loss": squares} if "step" not in more else {}), **more).ledger()
    assert len(seen) == records


def test_a_pass_names_the_modules_whose_rows_a_router_chooses():
    assert ledgers(build=routed, loss=squares).routed() == {"", *(f"experts.{index}" for index in range(4))}
    decision = judge_both(build=routed, loss=squares)
    assert decision.verdict is Verdict.PASS, decision.message
    assert "not compared" in decision.message
    assert "experts.0" in decision.message


def test_tokens_that_the_model_itself_chose_are_no_other_data():
    import torch

    def distilled(model, x):
        with torch.no_grad():
            chosen = model(x).argmax(-1)
        return (model(torch.nn.functional.one_hot(chosen, 32).to(x.dtype)) - x).square().mean()

    assert compare(ledgers(loss=distilled)) == []


def test_data_that_a_loss_draws_for_one_arm_alone_is_other_data():
    import random

    def shuffled(model, x):
        first = model(x)
        own = x + random.Random(time.perf_counter_ns()).random()
        return (first - x).square().mean() + (model(own) - x).square().mean()

    assert "other inputs" in compare(ledgers(loss=shuffled))[0].headline


def test_what_another_thread_does_meanwhile_is_no_part_of_the_step():
    import torch

    stop = threading.Event()
    other = torch.nn.Identity()

    def beat():
        while not stop.is_set():
            other(None)
            time.sleep(0.0001)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        ledger = serve(batch=batch, loss=squares).ledger()
    finally:
        stop.set()
        thread.join()
    assert not [call for call in ledger["calls"] if "Identity" in call["module"]]
