"""The journey of a user with their own model, from a test file to a verdict; arms are real, on a CPU."""

import pytest

pytest.importorskip("torchao")

pytestmark = pytest.mark.slow

OWN = """
    import pytest
    from pytest_fp8 import Workload

    @pytest.fixture
    def fp8_workload():
        def build():
            import torch
            return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))

        def batch(step):
            import torch
            return torch.randn(16, 32)

        def loss(model, x):
            {loss}

        return Workload(build=build, batch=batch, loss=loss)

    @pytest.mark.fp8(recipe="rowwise", emulated=True, steps={steps}, seeds=3)
    def test_mine(fp8_pair):
        fp8_pair.{ask}()
"""
HEALTHY = "return (model(x) - x).float().pow(2).mean()"
NAN_AT_40 = """
            import torch
            model.steps = getattr(model, "steps", 0) + 1
            from torchao.float8.float8_linear import Float8Linear
            fp8 = isinstance(model[0], Float8Linear)
            # One pass that looks at rows and three warm-up steps come first; each curve has 45.
            bad = fp8 and model.steps == 4 + 40
            return (model(x) - x).float().pow(2).mean() * (float("nan") if bad else 1.0)"""


def run(pytester, ask, loss=HEALTHY, steps=20, *arguments):
    pytester.makepyfile(OWN.format(loss=loss, ask=ask, steps=steps))
    return pytester.runpytest(*arguments)


def test_a_function_scoped_workload_of_a_test_file_is_enough(pytester):
    result = run(pytester, "assert_checkpoints")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*own-torchao-rowwise-emulated*"])


@pytest.mark.parametrize(("option", "outcome"), [("-v", "invalid"), ("--fp8-strict", "failed")])
def test_without_a_gpu_a_question_without_an_answer_passes_unless_strict(pytester, option, outcome):
    result = run(pytester, "assert_loss", "return (model(x) * 0).float().sum() + 1.0", 20, option)
    assert result.parseoutcomes() == {outcome: 1}
    assert result.ret == (outcome == "failed")


def test_a_loss_that_turns_nan_at_step_40_is_named(pytester):
    result = run(pytester, "assert_loss", NAN_AT_40, 45)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the FP8 arm's loss is not finite from step 39 on*", "*seen:*nan at step 39*"])


def test_the_same_workload_reads_its_baseline_and_another_version_calls_it_stale(pytester):
    run(pytester, "assert_layers", HEALTHY, 20, "--fp8-update=first").assert_outcomes(passed=1)
    assert (pytester.path / "baselines/emulated/own-torchao-rowwise-emulated.json").is_file()
    run(pytester, "assert_layers").assert_outcomes(passed=1)
    test = next(pytester.path.glob("test_*.py"))
    test.write_text(test.read_text().replace("loss=loss)", "loss=loss, version=2)"))
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*another definition of case*", "*functions, its version=*", "*-k own-torchao*"])


def test_a_library_that_keeps_global_state_is_not_let_into_the_test_s_own_process(pytester):
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8 import Case

        @pytest.mark.fp8(cases=[Case("tiny", "accelerate_torchao", "tensorwise", emulated=True)])
        def test_weights(fp8_model):
            raise AssertionError("not reached")
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*changes the whole process it is used in*", "*use fp8_pair, or fp8_pair.fp8.call(*"])
