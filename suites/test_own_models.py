"""Architectures that the zoo does not have: a vision transformer, and a mixture of experts with five of them."""

import pytest

from floor import assert_faster
from integrations import MOE, VIT
from pytest_fp8 import Workload, pad_to_multiple
from pytest_fp8.questions.asks import fp8_layers

CASES = VIT + MOE
EXPERTS = 5
CLASSES = 10


def vision_transformer(case):
    """transformers' own; the patch embedding is a Conv2d, the classifier has ten outputs."""
    small = case.emulated
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    if not small:
        # 1024 wide it is too narrow for FP8 to pay: 0.84x with torchao, 0.59x with Transformer Engine on an H200.
        sizes = {"hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 16, "intermediate_size": 8192}
    picture = {"image_size": 32, "patch_size": 8} if small else {"image_size": 224, "patch_size": 16}

    def build():
        from transformers import ViTConfig, ViTForImageClassification

        return ViTForImageClassification(ViTConfig(**sizes, **picture, num_labels=CLASSES))

    def batch(step):
        import torch

        # 17 or 197 places a picture: the number of pictures has to be the multiple of 16.
        pixels = torch.randn(16 if small else 64, 3, picture["image_size"], picture["image_size"])
        labels = pixels[:, 0, :, :CLASSES].mean(1).argmax(1)
        return {"pixel_values": pixels, "labels": labels}

    # From random weights without a warm-up, at this width, the usual one makes the loss jump by more than FP8 could: at
    # 1e-4 it still ended above chance, and eight seeds lay 0.1 nats apart.
    return Workload(build=build, batch=batch, learning_rate=None if small else 2e-5)


def mixture(width=64, experts=EXPERTS):
    """One routed expert of five for each token; each expert's rows are padded to a multiple of 16."""
    import torch
    from torch import nn

    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

        def forward(self, x):
            return self.down(nn.functional.gelu(self.up(x)))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(width, experts)
            self.experts = nn.ModuleList(Expert() for _ in range(experts))

        def forward(self, x):
            weights, chosen = self.router(x).float().softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                mine = (chosen == index).nonzero().flatten()
                out = out.index_add(0, mine, expert(pad_to_multiple(x[mine]))[: len(mine)])
            return x + weights.to(x.dtype)[:, None] * out

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = nn.Linear(width, width)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.leave = nn.Linear(width, width)

        def forward(self, x):
            x = self.enter(x)
            for block in self.blocks:
                x = block(x)
            return self.leave(x)

    return Mixture()


def mixture_of_experts(case):
    width, rows = (64, 128) if case.emulated else (1024, 4096)

    def batch(step):
        import torch

        return torch.randn(rows, width)

    def loss(model, x):
        return (model(x) - x.sin()).float().pow(2).mean()

    return Workload(build=lambda: mixture(width=width), batch=batch, loss=loss)


@pytest.fixture
def fp8_workload(fp8_case):
    return vision_transformer(fp8_case) if fp8_case.name == "vit" else mixture_of_experts(fp8_case)


@pytest.mark.fp8(cases=VIT, question="layers")
def test_the_classifier_and_the_patches_stay_and_all_else_is_fp8(fp8_pair):
    decision = fp8_pair.assert_layers()
    assert decision.numbers["skipped"] == {"head: output projections stay in high precision": 1}
    assert fp8_pair.evidence(fp8_layers).skipped.keys() == {"classifier"}


@pytest.mark.fp8(cases=MOE, question="layers")
def test_the_router_stays_with_its_reason_and_each_expert_is_fp8(fp8_pair):
    decision = fp8_pair.assert_layers()
    assert decision.numbers["skipped"] == {"size: out_features=5 is not a multiple of 16": 2}
    assert decision.numbers["converted"] == 2 + 2 * 2 * EXPERTS


@pytest.mark.fp8(cases=CASES, question="numerics")
def test_numerics(fp8_pair):
    fp8_pair.assert_numerics()


@pytest.mark.fp8(cases=CASES, question="loss")
def test_the_loss_is_right(fp8_pair):
    fp8_pair.assert_loss()


@pytest.mark.fp8(cases=CASES, question="speedup")
def test_it_is_faster(request, fp8_pair):
    assert_faster(request, fp8_pair)


@pytest.mark.fp8(cases=CASES, question="speedup")
def test_it_holds_its_baseline(fp8_pair):
    fp8_pair.assert_speedup()


@pytest.mark.fp8(cases=CASES, question="memory")
def test_its_memory(fp8_pair):
    fp8_pair.assert_memory()


@pytest.mark.fp8(cases=CASES, question="checkpoints")
def test_it_switches_back(fp8_pair):
    fp8_pair.assert_checkpoints()
