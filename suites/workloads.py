"""The workloads of users' own models and loops that the suite asks: a vision transformer, a mixture of five experts, a
loop as people write it (accumulation, clipping, evaluation, lengths that are no multiple of 16).

On a GPU the loop that is timed runs on 1b, those that are not on 182m, torchao's with activation checkpointing: there
the loss has an answer in a tenth of the time. Stored baselines hold a hash of the text of these functions.
"""

from pytest_fp8 import Workload, pad_to_multiple
from pytest_fp8.zoo import data, models, training
from pytest_fp8.zoo.shapes import SHAPES

EXPERTS = 5
CLASSES = 10
MICRO_BATCHES = 2
ROWS = 4
"""Sequences of each micro-batch on a GPU: 1b's usual batch."""
EVALUATED_EVERY = 10
SHORT_OF = 3
"""Tokens by which each sequence misses its model's usual length."""


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


# -- a loop ------------------------------------------------------------------------------------------------------------


def step(model, batch, optimizer, precision):
    """One training step; what is specific to FP8 is the padding and ``with precision()``."""
    total = 0.0
    for part in range(MICRO_BATCHES):
        rows = pad_to_multiple({name: tokens[part::MICRO_BATCHES] for name, tokens in batch.items()})
        with precision():
            loss = loss_of(model, rows) / MICRO_BATCHES
        loss.backward()
        total = total + loss.detach()
    clip(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    optimizer.steps = getattr(optimizer, "steps", 0) + 1
    if optimizer.steps % EVALUATED_EVERY == 0:
        evaluate(model, rows, precision)
    return total


def loss_of(model, rows):
    return training.cross_entropy(model(input_ids=rows["input_ids"]).logits, rows["labels"])


def clip(parameters, most):
    import torch

    torch.nn.utils.clip_grad_norm_(parameters, most)


def evaluate(model, rows, precision):
    import torch

    model.eval()
    with torch.no_grad(), precision():
        loss_of(model, rows)
    model.train()


def loop(case):
    """The workload of a case: micro on a CPU; 1b on a GPU where it is timed, 182m where it is not."""
    size, checkpointed = _size(case), case.name.endswith("_ac")
    shape = SHAPES[size]
    rows = shape.batch if size == "micro" else MICRO_BATCHES * ROWS

    def build():
        import torch

        device = "cpu" if size == "micro" else "cuda"
        dtype = torch.float32 if case.autocast else torch.bfloat16
        model = models.build(size, seed=torch.initial_seed(), device=device, dtype=dtype)
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def batch(step):
        import torch

        return data.text_batch(rows, shape.seq - SHORT_OF, torch.initial_seed() % 2**31, step)

    return Workload(build=build, batch=batch, step=step, learning_rate=shape.learning_rate)


def _size(case):
    if case.emulated:
        return "micro"
    return "1b" if case.asks("speedup") else "182m"


def workload_of(case):
    """The workload of a case of an own model."""
    return {"vit": vision_transformer, "moe": mixture_of_experts, "loop": loop, "loop_ac": loop}[case.name](case)
