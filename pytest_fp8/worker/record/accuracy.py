"""The accuracy of one product: against the exact one, and beside what the recipe's own casts give on its operands."""

from __future__ import annotations

import math

import torch

from pytest_fp8.casts import BLOCK, E4M3, E5M2, LINE, MX, SQUARE, TENSOR, Cast
from pytest_fp8.source_text import is_of_a_library

FORMATS = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
SMALLEST = 1e-12
"""What a largest magnitude is taken for at least; torchao's EPS."""
SATURATES, LEFT = 4.0, {E4M3: 2.0**7, E5M2: 2.0**13}
"""How badly a scale may fit that was set before its operand was known: the largest value may be 4 times what the format
holds; and it stays 7 binades above E4M3's smallest normal number and 13 above E5M2's, 224 and 115 000 times below their
largest ones: with less left, values that belong to a product become zero. Delayed scaling's scales are made of past
steps. Emulated on a CPU with a 182M model: inputs are up to 2.2 times what their scales were made for, and gradients
2.0 times in the second step and 1.05 to 1.15 times from the third pass over equal weights on, as each pass rounds
otherwise. A history of 1024 steps keeps the first, large gradients: after 13 steps gradients are down to a 8500th of
them. An operand 8 times as large has a scale that was not renewed."""
HISTORY = 4096
"""Most numbers that a layer keeps to scale by."""


class Operand:
    """One operand of a product, of which some lines are compared: a matrix of lines along the inner dimension.

    ``amax``: the largest magnitude of the whole tensor. ``squares``: of each square of 128 x 128, as a matrix for the
    lines, where the cast needs it. ``scale``: what the layer multiplies the whole tensor by, where it says so.
    """

    def __init__(
        self,
        lines: torch.Tensor,
        amax: torch.Tensor,
        squares: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        # A GPU multiplies float64 at full speed whatever its TF32 switches say; on a CPU float32 is exact enough.
        dtype = torch.float64 if lines.is_cuda else torch.float32
        self.lines, self.amax, self.squares, self.scale = lines.to(dtype), amax.to(dtype), squares, scale

    def cast(self, how: Cast | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The lines as the cast leaves them; and the share of values that are zero only after it."""
        if how is None:
            return self.lines, self.lines.new_zeros(())
        largest = self._largest(how.scales)
        limit = torch.finfo(FORMATS[how.format]).max
        # As torchao: by float64, since a quotient that is rounded otherwise moves values to their neighbours.
        scale = (limit / largest.double().clamp(min=SMALLEST)).float()
        if how.powers:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        if self.scale is not None and how.scales == TENSOR:
            least = scale * (torch.finfo(FORMATS[how.format]).tiny * LEFT[how.format] / limit)
            scale = torch.minimum(torch.maximum(self.scale.float(), least), scale * SATURATES)
        scaled = (self.lines.float() * scale).clamp(-limit, limit)
        values = (scaled.to(FORMATS[how.format]).float() / scale).to(self.lines.dtype)
        underflow = ((values == 0) & (self.lines != 0)).double().mean()
        return values, underflow

    def _largest(self, scales: str) -> torch.Tensor:
        if scales == TENSOR:
            return self.amax
        if scales == LINE:
            return self.lines.abs().amax(dim=1, keepdim=True)
        if scales == SQUARE:
            assert self.squares is not None, "a cast by squares needs their largest magnitudes"
            return _spread(self.squares.to(self.lines.dtype), 128, self.lines.shape[1])
        size = {BLOCK: 128, MX: 32}[scales]
        width = self.lines.shape[1]
        padded = torch.nn.functional.pad(self.lines.abs(), (0, -width % size))
        return _spread(padded.view(len(padded), -1, size).amax(dim=2), size, width)


def _spread(blocks: torch.Tensor, size: int, width: int) -> torch.Tensor:
    """Each column repeated ``size`` times, ``width`` columns in all."""
    return blocks.repeat_interleave(size, dim=1)[:, :width]


def square_amax(matrix: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each square of 128 x 128."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix.abs(), (0, -columns % 128, 0, -rows % 128))
    return padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128).amax(dim=(1, 3))


class Expected:
    """What a product should give: ``exact`` from its own operands, ``own`` from these as the recipe casts them."""

    def __init__(
        self,
        left: Operand,
        right: Operand,
        casts: tuple[Cast, Cast] | None,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> None:
        """``left`` . ``right``^T. ``dtype``: of the result. ``bias``: added to each row."""
        self.exact = left.lines @ right.lines.t()
        (one, lost_one), (two, lost_two) = (
            operand.cast(how) for operand, how in zip((left, right), casts or (None, None), strict=True)
        )
        own = self.exact if casts is None else one @ two.t()
        self._bias = self.exact.new_zeros(()).double() if bias is None else bias.double()
        self.exact, self.own = self.exact.double() + self._bias, (own.double() + self._bias).to(dtype).double()
        self.underflow = torch.maximum(lost_one, lost_two)

    def compare(self, seen: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the product gave beside the exact one, as numbers on its device: of the fields of
        :class:`pytest_fp8.questions.numerics.evidence.ProductCheck`, where ``noise`` stands for ``sqnr``."""
        seen = seen.detach().double()
        power = self.exact.square().sum()
        safe = power.clamp(min=torch.finfo(torch.float64).tiny)

        def gain_of(values: torch.Tensor) -> torch.Tensor:
            return (values * self.exact).sum() / safe

        def noise_of(values: torch.Tensor) -> torch.Tensor:
            return (values - self.exact).square().sum() / safe

        gain, wrong = gain_of(seen), seen - self.exact
        # Not any row that is the same everywhere: weights of an earlier step are off by one, too.
        off = wrong.square().sum()
        left = torch.minimum((wrong - self._bias).square().sum(), (wrong + self._bias).square().sum())
        return {
            "values": power.new_tensor(float(seen.numel())),
            "power": power,
            "gain": gain,
            "noise": noise_of(seen),
            "own_gain": gain_of(self.own),
            "own_noise": noise_of(self.own),
            "gain_error": ((seen - gain * self.exact) * self.exact).square().sum().sqrt() / safe,
            "lost": ((seen == 0) & (self.own != 0)).double().mean(),
            "underflow": self.underflow,
            "of_bias": (off - left).clamp(min=0) / off.clamp(min=1e-300),
        }


def decibels(noise: float) -> float:
    """A noise-to-signal power as SQNR; at most 100, so that an exact product has a number, too."""
    return -10 * math.log10(max(noise, 1e-10)) if math.isfinite(noise) else float("nan")


def is_product(module: torch.nn.Module) -> bool:
    """Whether the layer holds one weight, a matrix, and at most a bias: it then multiplies its input by it."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and not {*module._parameters} - {"weight", "bias"}


def is_fp8_code(weight: torch.Tensor | None) -> bool:
    """Whether a weight is a plain tensor of an FP8 type: stored for inference, with its scale elsewhere."""
    return weight is not None and weight.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def kept_numbers(module: torch.nn.Module) -> dict[str, list[float]]:
    """The few numbers that a layer of the user's own keeps as tensors beside its weight and bias: scales, largest
    magnitudes of past steps. A copy of the weight is none."""
    if is_of_a_library(type(module).__module__):
        return {}
    return {
        name: value.detach().flatten().double().tolist()
        for name, value in {**vars(module), **module._buffers}.items()
        if type(value) is torch.Tensor and not value.is_meta and value.is_floating_point() and value.numel() <= HISTORY
    }
