"""What Unsloth refuses and what it cannot load. Asked in an arm's process: Unsloth patches where it is imported."""

import pytest

import matrix
from floor import assert_faster
from pytest_fp8 import Case

pytestmark = pytest.mark.fp8(
    cases=matrix.on_hopper([Case("tiny", "unsloth", "rowwise", lora=16, lora_targets=matrix.ATTENTION)])
)


def load(**arguments):
    """A function for the arm: the error of loading a small model with these arguments, or an empty string."""

    def attempt(model):
        import torch
        from unsloth import FastLanguageModel

        from pytest_fp8 import Case
        from pytest_fp8.backends.unsloth import model_folder

        usual = {"dtype": torch.bfloat16, "load_in_4bit": False, "fast_inference": False, "local_files_only": True}
        with model_folder(Case("tiny", "unsloth", "rowwise", lora=16), "cuda") as folder:
            try:
                FastLanguageModel.from_pretrained(str(folder), max_seq_length=128, **usual, **arguments)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        return ""

    return attempt


def test_full_fine_tuning_is_refused(fp8_pair):
    error = fp8_pair.fp8.call(load(load_in_fp8=True, full_finetuning=True))
    assert "not compatible with full finetuning" in error


# Only an AssertionError is expected: an arm that cannot be built is another failure.
@pytest.mark.xfail(
    reason="load_in_fp8='block' fails to load: Unsloth 2026.10.9, torchao 0.18", raises=AssertionError, strict=True
)
def test_block_scaling_loads(fp8_pair):
    assert fp8_pair.fp8.call(load(load_in_fp8="block")) == ""


_adapters = {"lora": 16, "lora_targets": matrix.ATTENTION, "questions": ("speedup", "memory"), "chip": "hopper"}
TWO_LIBRARIES = Case("1b", "unsloth_te", "delayed", matrix.MOST, **_adapters)
"""The other way to FP8 that Unsloth's users are told of. test_defects.py asks what happens to its layers."""


@pytest.mark.fp8(cases=[TWO_LIBRARIES])
@pytest.mark.usefixtures("healthy_alone")
class TestAccelerateOnUnsloth:
    """No baseline is kept of this case, whose layers are known to be wrong."""

    @pytest.mark.fp8(question="speedup")
    def test_it_is_faster(self, request, fp8_pair):
        assert_faster(request, fp8_pair)

    @pytest.mark.fp8(question="memory")
    def test_its_memory(self, fp8_pair):
        fp8_pair.assert_memory()
