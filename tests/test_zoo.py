"""The suite's models: causal attention that does not wait for the device; other architectures keep their masks."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from pytest_fp8.zoo import models  # noqa: E402

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.name())
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def logits(model, tokens):
    return model(input_ids=tokens).logits.float()


def test_a_later_token_changes_nothing_before_it():
    model = models.build("micro", seed=0, device="cpu").eval()
    tokens = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 16] = (changed[0, 16] + 1) % 256
    before, after = logits(model, tokens), logits(model, changed)
    assert before[:, :16].equal(after[:, :16])
    assert not before[:, 16:].equal(after[:, 16:])


def test_a_forward_pass_never_waits_for_the_device():
    model = models.build("micro", seed=0, device="cpu")
    tokens = torch.randint(0, 256, (2, 24))
    with Operators() as ours:
        model(input_ids=tokens)
    assert "aten::_local_scalar_dense" not in ours.seen
    model.set_attn_implementation("sdpa")
    with Operators() as theirs:
        # transformers makes position ids of its own and looks for packed sequences in them.
        model(input_ids=tokens, position_ids=torch.arange(24).expand(2, 24))
    assert "aten::_local_scalar_dense" in theirs.seen, "the reason for an own attention function is gone: use sdpa"


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_a_folder_keeps_the_mask_of_its_architecture(tmp_path, kind):
    torch.manual_seed(0)
    window = {"sliding_window": 4} if kind == "Mistral" else {}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **window)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").bfloat16().eval()
    theirs.save_pretrained(tmp_path)
    ours = models.build("tiny", seed=0, device="cpu", weights=str(tmp_path)).eval()
    tokens = torch.randint(0, 64, (1, 24))
    assert torch.allclose(logits(ours, tokens), logits(theirs, tokens), atol=0.02)
    if window:
        theirs.config.sliding_window = None
        assert not torch.allclose(logits(ours, tokens), logits(theirs, tokens), atol=0.02), "the window matters here"
