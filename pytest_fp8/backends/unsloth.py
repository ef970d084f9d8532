"""Unsloth: LoRA on a frozen base that ``load_in_fp8`` keeps in FP8 only; and the same library's 16-bit LoRA.

From its source (2026.10): torchao quantizes the base's Linears, one scale per row of the weight. A forward product
casts its input row by row and multiplies with ``torch._scaled_mm``; a backward product dequantizes the weight to BF16
first. Three fused functions (q/k/v, o, and an MLP whose projections all have adapters) use the weights without calling
their modules; other projections go through peft. Adapters are float32 parameters, cast at each use.
"""

from __future__ import annotations

import functools
import gc
import inspect
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_fp8.backends.accelerate import AccelerateTransformerEngine
from pytest_fp8.backends.base import Backend, Conversion, MakeOptimizer, NoteProduct, Prepared
from pytest_fp8.backends.bf16 import Bf16
from pytest_fp8.backends.linears import linears, observed_conversion, weight_of
from pytest_fp8.case import OWN
from pytest_fp8.codes import R
from pytest_fp8.recipes import FPROP, RecipeFacts, Rule, Stays

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case

BASE_SEED = 0
"""The base is frozen and takes long to load, so every seed uses the same; a seed draws the adapters and the data."""
SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>")
"""Special tokens in the order of their ids; begin and end have the ids of a Llama configuration."""
SAMPLE_ROWS = 256
"""Input rows on which a fused function's product is compared with high precision."""


RULES = (
    Rule(
        lambda case: case.lora and case.model != OWN and case.compile and not case.activation_checkpointing,
        "{case.backend!r} trains LoRA adapters alone, and builds and compiles its model itself",
        "lora= a rank from 1, a model of the suite, compile=True and activation_checkpointing=False",
        "lora={case.lora}, model={case.model!r}, compile={case.compile}, "
        "activation_checkpointing={case.activation_checkpointing}",
        R.ADAPTERS_ALONE,
    ),
    Rule(
        lambda case: not case.autocast,
        "float32 weights under autocast and {case.backend!r}",
        "a backend that keeps weights as they are: Unsloth loads its model in bfloat16",
    ),
)


class ThroughUnsloth(Backend):
    """The library's model with adapters, and its loss. What it changes in other libraries, and what its own functions
    multiply without calling a layer, is its own affair: operators of its steps are not recorded."""

    brings_model = True
    other_modules = True
    requires: Mapping[str, str] = MappingProxyType({"unsloth": "2026.10"})
    emulates = False
    parallel: Sequence[str] = ()
    rules = RULES
    saves = (".lora_A.", ".lora_B.")
    # Generated code, which it writes to the current folder otherwise.
    writes_to = MappingProxyType({"UNSLOTH_COMPILE_LOCATION": "compiled"})
    fp8 = False

    def import_library(self) -> None:
        # First, because it patches other libraries and must find them unchanged. Without these variables it uses the
        # network, which an arm may not have.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
        import unsloth  # noqa: F401

        super().import_library()

    def build(self, case: Case, seed: int, device: str) -> torch.nn.Module:
        """The model with adapters; the base's weights are those of :data:`BASE_SEED`."""
        self.import_library()
        import torch
        from unsloth import FastLanguageModel

        from pytest_fp8.zoo.models import ALPHA, PROJECTIONS

        tokens = case.tokens
        assert tokens is not None, "only models of the suite run through Unsloth"
        with model_folder(case, device) as folder:
            model, _ = FastLanguageModel.from_pretrained(
                str(folder),
                max_seq_length=tokens[1],
                dtype=torch.bfloat16,
                load_in_4bit=False,
                load_in_fp8=self.fp8,
                fast_inference=False,
                local_files_only=True,
                use_gradient_checkpointing=False,
                # By default it moves embeddings to the host where memory is short: in one arm and not in the other.
                offload_embedding=False,
            )
        model = FastLanguageModel.get_peft_model(
            model,
            r=case.lora,
            lora_alpha=ALPHA * case.lora,
            lora_dropout=0.0,
            target_modules=list(case.lora_targets or PROJECTIONS),
            use_gradient_checkpointing=False,
            random_state=seed,
        )
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in self.seeded_values(model, seed).items():
                parameters[name].copy_(value)
        return model.train()  # type: ignore[no-any-return]

    def prepare(self, model: torch.nn.Module, make_optimizer: MakeOptimizer, case: Case) -> Prepared:
        prepared = super().prepare(model, make_optimizer, case)
        prepared.loss_of = language_model_loss
        return prepared

    def seeded_values(self, model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
        """Adapters as peft initialises them: A uniform within 1/sqrt(in_features), B zero.

        They are drawn on the CPU, one parameter after the other, so that both arms get the same bits.
        """
        import torch

        generator = torch.Generator().manual_seed(seed)
        values: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                value = torch.empty(parameter.shape, dtype=torch.float32)
                torch.nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
            elif ".lora_B." in name:
                value = torch.zeros(parameter.shape, dtype=torch.float32)
            else:
                continue
            values[name] = value.to(parameter.device, parameter.dtype)
        # The noise of a jittered restart is drawn after this.
        torch.manual_seed(seed)
        return values

    @contextmanager
    def watch_fused_functions(self, model: torch.nn.Module, note: NoteProduct) -> Iterator[None]:
        """Replace ``matmul_lora``, through which each fused function computes ``x . W^T`` and the adapter's two
        products. Its calls in the backward pass get transposed weights, which belong to no module, and are not noted.
        """
        from unsloth.kernels import fast_lora

        owners = {id(linear.weight): linear for linear in linears(model).values()}
        original = fast_lora.matmul_lora
        # The table and the samples of one step watch each other: a sample is no product of the step.
        unwatched = inspect.unwrap(original)

        @functools.wraps(original)
        def watched(x: Any, weight: Any, state: Any, a: Any, b: Any, scale: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(x, weight, state, a, b, scale, *args, **kwargs)
            layers = [owners[id(w)] for w in (weight, a, b) if id(w) in owners]
            for layer in layers:
                sample = None
                if self.is_fp8_layer(layer):
                    some = x.detach().reshape(-1, x.shape[-1])[:SAMPLE_ROWS]
                    sample = some, unwatched(some, weight, state, None, None, None)
                note(layer, x.numel() // x.shape[-1], sample)
            return result

        fast_lora.matmul_lora = watched
        try:
            yield
        finally:
            fast_lora.matmul_lora = original


class UnslothBf16(ThroughUnsloth, Bf16):
    """16-bit LoRA: the reference for an FP8 base of the same library."""

    name = "unsloth_bf16"
    short = "unsloth.bf16"

    def precision(self, case: Case) -> Callable[[], AbstractContextManager[Any]]:
        """The autocast of ``TrainingArguments(bf16=True)``. Without it adapters outside the fused functions would
        multiply in float32."""
        import torch

        return lambda: torch.autocast("cuda", dtype=torch.bfloat16)


class Unsloth(UnslothBf16):
    """``load_in_fp8=True``: FP8 weights with a scale per row, activations cast row by row, in forward products only."""

    name = "unsloth"
    short = ""
    # FP8 weights that stay frozen: the forward product is FP8, the backward one runs on weights cast back to BF16.
    recipes = (RecipeFacts("rowwise", roles=(FPROP,), minimum_capability=(9, 0)),)
    library = "torchao"
    reference = "unsloth_bf16"
    fp8 = True

    def convert(self, model: torch.nn.Module, case: Case) -> Conversion:
        """The library loads the model converted; what it did is read from the model."""
        sizes = {name: (linear.in_features, linear.out_features) for name, linear in linears(model).items()}
        found = observed_conversion(model, sizes, self.is_fp8_layer)
        kept = {name: str(linear.weight.dtype).removeprefix("torch.") for name, linear in linears(model).items()}
        for name, reason in found.skipped.items():
            if reason.kind is Stays.ADAPTER:
                found.skipped[name] = replace(reason, text=f"{reason.text}, kept in {kept[name]}")
        return found

    def is_fp8_layer(self, module: torch.nn.Module) -> bool:
        return fp8_weight(module) is not None

    def recipe_in_force(self, module: torch.nn.Module) -> dict[str, Any]:
        return describe(fp8_weight(module))


class UnslothTransformerEngine(ThroughUnsloth, AccelerateTransformerEngine):
    """Unsloth's model, adapters and loss; the layers and the precision are Accelerate's and Transformer Engine's.

    Unsloth compiles its own blocks, te.Linear inside them included, as it does for users who combine the two.
    """

    name = "unsloth_te"
    short = "unsloth.te"
    requires = MappingProxyType({**ThroughUnsloth.requires, **AccelerateTransformerEngine.requires})
    reference = "unsloth_bf16"


def fp8_weight(module: torch.nn.Module) -> Any:
    """The layer's weight if it is one of torchao's tensors that keep FP8 values (``qdata``) with a scale, or None."""
    import torch

    weight = weight_of(module)
    values = getattr(weight, "qdata", None)
    return weight if values is not None and values.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else None


def describe(weight: Any) -> dict[str, Any]:
    """The recipe of the products with such a weight, from its scale's shape. ``weight_only``: the input is not cast, so
    the product is computed in high precision."""
    if weight is None:
        return {"recipe": "off"}
    if getattr(weight, "act_quant_kwargs", None) is None:
        return {"recipe": "weight_only"}
    rows, columns = weight.shape
    scale = tuple(weight.scale.shape)
    if scale in ((rows, 1), (rows,)):
        return {"recipe": "rowwise"}
    return {"recipe": "tensorwise" if math.prod(scale) == 1 else f"blocks of {rows // scale[0]}x{columns // scale[-1]}"}


def language_model_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The library's fused loss, in nats. It takes the input's own tokens as labels and shifts them itself; the suite's
    labels are shifted already, so they are shifted back by one and each row's last label is dropped."""
    labels = batch["labels"]
    unshifted = labels.roll(1, dims=1)
    unshifted[:, 0] = -100
    return model(input_ids=batch["input_ids"], labels=unshifted).loss  # type: ignore[no-any-return]


@contextmanager
def model_folder(case: Case, device: str) -> Iterator[Path]:
    """A temporary folder with the case's base, of random weights. What the library caches of it in the arm's temporary
    folder, a copy in FP8, is removed at the end."""
    import torch

    with tempfile.TemporaryDirectory(prefix="fp8-unsloth-") as made:
        folder = Path(made)
        write_model(case.model, folder, seed=BASE_SEED, device=device)
        # Its memory, before the model is loaded.
        gc.collect()
        torch.cuda.empty_cache()
        try:
            yield folder
        finally:
            for copy in Path(tempfile.gettempdir(), f"unsloth-fp8-{os.getuid()}").glob(f"{folder.name}-fp8-*"):
                shutil.rmtree(copy, ignore_errors=True)


def write_model(name: str, folder: Path, *, seed: int, device: str) -> None:
    """The model ``name`` with the weights of ``seed``, as ``config.json``, safetensors and a tokenizer.

    The configuration names no attention function: the suite's own is registered in this process only.
    """
    from pytest_fp8.zoo import models

    model = models.build(name, seed=seed, device=device)
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer(model.config.vocab_size).save_pretrained(folder)  # type: ignore[union-attr,arg-type]


def tokenizer(vocab: int) -> Any:
    """A byte-level tokenizer of ``vocab`` entries: the special ones, the bytes as far as they fit, then fillers.

    Nothing is tokenized with it. Loaders read it all the same, and enlarge the embedding of a model whose tokenizer has
    no padding token or more entries than the model.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fillers = (f"<|{index}|>" for index in range(vocab))
    entries = [*SPECIAL, *letters, *fillers][:vocab]
    made = Tokenizer(BPE(vocab={entry: index for index, entry in enumerate(entries)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    pad, begin, end = SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=pad, bos_token=begin, eos_token=end)
