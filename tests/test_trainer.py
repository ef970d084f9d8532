"""A workload with a Trainer: an arm's steps are those of train(), and its arguments decide whether FP8 is on."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import torch
from transformers import Trainer, TrainingArguments

from helpers.loops import judge_both
from pytest_fp8 import Case, SettingsError, Verdict, Workload
from pytest_fp8.backends import backend
from pytest_fp8.codes import P
from pytest_fp8.said import WorkloadError
from pytest_fp8.worker.training.trainer import by_trainer

pytestmark = pytest.mark.slow

CASE = Case("own", "trainer_torchao", "tensorwise", {"fp8_all_gather": False}, emulated=True, name="trained")
WIDTH, BATCH, ACCUMULATED, STEPS = 32, 16, 2, 3
ROWS = torch.randn(STEPS * ACCUMULATED * BATCH, WIDTH, generator=torch.Generator().manual_seed(0))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.inner, self.leave = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, labels=None):
        return {"loss": (self.leave(self.inner(self.enter(x)).relu()) - x.sin()).float().square().mean()}


class Doubled(Trainer):
    """A Trainer of one's own, with another loss and the rows in their order."""

    def compute_loss(self, model, inputs, **given):
        return 2 * super().compute_loss(model, inputs, **given)

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def make_trainer(folder, bf16=False):
    def trainer(model):
        arguments = TrainingArguments(
            output_dir=str(folder),
            bf16=bf16,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            max_grad_norm=0.1,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATED,
        )
        return Doubled(model, arguments, train_dataset=[{"x": row} for row in ROWS])

    return trainer


def seeded():
    torch.manual_seed(5)
    return Net()


def test_an_arms_steps_are_those_of_train(tmp_path):
    case = CASE.reference()
    own = by_trainer(Workload(seeded, trainer=make_trainer(tmp_path)), backend(case.backend), case, torch.device("cpu"))
    model = own.build()
    optimizer = own.optimizer(model)
    parts = [{"x": part} for part in ROWS.split(BATCH)]
    for step in range(STEPS):
        own.step(model, parts[step * ACCUMULATED : (step + 1) * ACCUMULATED], optimizer, torch.enable_grad)
    trained = make_trainer(tmp_path)(seeded())
    trained.train()
    for name, weight in trained.model.named_parameters():
        assert torch.equal(weight, model.get_parameter(name)), name


def test_batches_are_drawn_anew_for_each_seed_and_step(tmp_path):
    case = CASE.reference()
    own = by_trainer(Workload(seeded, trainer=make_trainer(tmp_path)), backend(case.backend), case, torch.device("cpu"))
    own.build()
    torch.manual_seed(1)
    first, second = own.batch(0), own.batch(1)
    torch.manual_seed(1)
    assert [part["x"].shape for part in first] == [(BATCH, WIDTH)] * ACCUMULATED
    assert all(torch.equal(one["x"], again["x"]) for one, again in zip(first, own.batch(0), strict=True))
    assert not torch.equal(first[0]["x"], second[0]["x"])


def judged(tmp_path, monkeypatch, bf16):
    # What the session's own environment says of FP8 is not the arms'.
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    return judge_both(CASE, build=Net, batch=None, trainer=make_trainer(tmp_path, bf16))


def test_the_trainers_own_model_is_converted_and_trained(tmp_path, monkeypatch):
    decision = judged(tmp_path, monkeypatch, bf16=False)
    assert decision.verdict is Verdict.PASS, decision.message
    # Accelerate leaves the first and the last Linear.
    assert (decision.figures.converted, decision.figures.linears) == (1, 3)
    assert decision.figures.roles["wgrad"] == {"expected": ACCUMULATED, "fp8": ACCUMULATED}


def test_arguments_that_win_over_the_environment_leave_the_arm_in_bf16(tmp_path, monkeypatch):
    decision = judged(tmp_path, monkeypatch, bf16=True)
    assert (decision.verdict, decision.code) == (Verdict.FAIL, P.TRAINER_DECIDES), decision.message


def test_what_is_no_trainer_is_told():
    own = by_trainer(
        Workload(seeded, trainer=lambda model: None), backend("bf16"), CASE.reference(), torch.device("cpu")
    )
    with pytest.raises(WorkloadError, match="must give a Trainer of transformers, it gave NoneType"):
        own.build()


def test_without_a_trainer_a_batch_is_needed():
    with pytest.raises(SettingsError, match="batch"):
        Workload(Net)
