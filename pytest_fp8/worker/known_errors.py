"""What the user's code may raise in an arm and where it comes from: a cause and a next step, told by the exception."""

from __future__ import annotations

import re
import traceback

import torch

from pytest_fp8.codes import Code, R
from pytest_fp8.worker.error_trace import is_users, mixes_types

MIXED = (
    R.MIXED_TYPES,
    "arms run the model and its floating-point batches in bfloat16, and an operation also got a tensor of another "
    "type: tensors made inside forward, such as a positional encoding or a mask, must take the input's dtype",
    "make it in the input's dtype, torch.arange(n, device=x.device).to(x.dtype), or register it as a buffer",
)
ON_CUDA = (
    R.CUDA_IN_EMULATED_ARM,
    "emulated arms run on the CPU, and this asks torch for a GPU; each arm moves model and batches to its own device",
    "leave the device out: no .cuda() and no device='cuda' in build() and batch(step); inside forward and loss take "
    "the input's, device=x.device",
)
NO_CUDA = (
    "not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "Cannot re-initialize CUDA in forked subprocess",
)
"""What torch says where it is asked for a GPU and sees none. An arm that is to run on a GPU refuses to start there, and
is never a fork."""

TOLD_BY = (
    (
        r"expected (scalar type|target dtype to be) Long",
        R.CLASSES_AS_FLOATS,
        "a loss takes classes as integers, and got floating-point numbers: those of a batch become bfloat16",
        "give class targets as integers in batch(step), y.long()",
    ),
    (
        r"Unsupported dtype BFloat16|not implemented for 'BFloat16'|Low precision dtypes not supported",
        R.NO_BF16_OPERATOR,
        "arms run the model in bfloat16, and torch has no bfloat16 of this operator, as of Fourier transforms and most "
        "of linear algebra",
        "cast around it: torch.fft.rfft(x.float()), and back with .to(x.dtype) where it has become real again",
    ),
    (
        r"Expecting\s+both Float8TrainingTensor",
        R.SECOND_DERIVATIVE,
        "torchao's FP8 layers have no second derivative, and the loss goes backward through a gradient: a gradient "
        "penalty, forces from an energy, autograd.grad(..., create_graph=True)",
        "leave the layers on that way in BF16, Workload(leave=(names,)), or test the training without that term",
    ),
    (
        r"matmul_with_hp_or_float8_args is a view and is being modified inplace",
        R.CHANGED_IN_PLACE,
        "the last line changes an FP8 layer's output in place; torchao's layers without a bias give a view of their "
        "product, which autograd lets nobody change",
        "write that line as y = y * x in place of y *= x; where it is a library's, leave the layer in BF16, "
        "Workload(leave=(names,))",
    ),
    (
        r"Tried to step \d+ times",
        R.SCHEDULE_ENDS,
        "the schedule ends before the loss curve does, which has 40 steps for a model of one's own",
        "no more steps than the schedule has: @pytest.mark.fp8(loss_steps=...); or a schedule of more steps",
    ),
    (
        r"LBFGS\.step\(\) missing|step\(\) missing .* 'closure'",
        R.NEEDS_CLOSURE,
        "this optimizer calls the loss itself, through a closure, and is given none where the workload has no step of "
        "its own",
        "write the step: Workload(step=...), which calls optimizer.step(closure)",
    ),
    (
        r"(linear|embedding|conv\dd|matmul|mm)\(\): argument '(input|indices)' .* must be Tensor, not",
        R.NO_TENSOR,
        "no tensor came where one is multiplied: a function without a return gives None, and the model is called with "
        "what batch(step) gives",
        "return a tensor, or a batch that holds tensors, at the end of batch(step); or look at what loss(model, batch) "
        "gives the model",
    ),
    (
        r"Expected to have finished reduction in the prior iteration",
        R.UNUSED_PARAMETERS,
        "DDP waits for the gradients of all parameters, and a step does not use some of them",
        "wrap the model yourself, with parallel='own' in the mark: Workload(parallelize=lambda model, mesh: "
        "DistributedDataParallel(model, find_unused_parameters=True))",
    ),
    (
        r"with Gloo|CUDA 11\+ and NCCL",
        R.NEEDS_NCCL,
        "emulated ranks speak through gloo, which has not all of NCCL's operations: some communication hooks and "
        "reductions need NCCL",
        "ask the test on GPUs, without emulated=True; or leave that part out where torch.distributed.get_backend() is "
        "'gloo'",
    ),
    (
        r"SyncBatchNorm .*GPU",
        R.NEEDS_NCCL,
        "SyncBatchNorm works on GPUs alone, and emulated ranks are processes on the CPU",
        "ask the test on GPUs, without emulated=True; or leave convert_sync_batchnorm() out where "
        "torch.distributed.get_backend() is 'gloo'",
    ),
    (
        r"Can't pickle .*(not the same object as|import of module|attribute lookup|not found as)",
        R.CANNOT_PICKLE,
        "pickle stores a class or function by its name, and arms get those of a test file without importing it",
        "put it into a module that the test imports, or save plain values: dataclasses.asdict(config)",
    ),
    (
        r"has no attribute '_optimizer_step_pre_hooks'",
        R.BAD_OPTIMIZER,
        "the optimizer's class never called torch.optim.Optimizer.__init__(), so that its steps cannot be followed",
        "call super().__init__(parameters, defaults) in its __init__; or keep the optimizer that it wraps as "
        "self.optimizer",
    ),
)
"""What the error says -> its code, its cause and the next step."""

SLIPS = (NameError, AttributeError, LookupError, ImportError, SystemExit)
"""What is wrong in any dtype and on any device."""


def known_cause(error: BaseException) -> tuple[Code, str, str]:
    """Code, cause and next step; the two are empty where there is nothing to say."""
    empty = _given_no_rows(error)
    if empty is not None:
        return empty
    for text, code, cause, next_step in TOLD_BY:
        if re.search(text, str(error)):
            return code, cause, next_step
    if mixes_types(error):
        return MIXED
    if isinstance(error, AssertionError | RuntimeError) and any(text in str(error) for text in NO_CUDA):
        return ON_CUDA
    return R.ARM_RAISED, "", _mend(error)


def _given_no_rows(error: BaseException) -> tuple[Code, str, str] | None:
    """What is said where a layer that multiplies raised it, and was given no rows of the right width."""
    modules: list[torch.nn.Module] = []
    scaling = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, module = frame.f_code, frame.f_locals.get("self")
        scaling = scaling or code.co_name == "tensor_to_amax"
        if not isinstance(module, torch.nn.Module):
            continue
        modules.append(module)
        weight = module._parameters.get("weight")
        # A library's layer: another forward may raise for reasons of its own.
        if code.co_name != "forward" or is_users(code.co_filename) or weight is None or weight.dim() != 2:
            continue
        given = [frame.f_locals.get(name) for name in code.co_varnames[1 : code.co_argcount]]
        for each in given:
            if isinstance(each, torch.Tensor) and not each.numel() and each.shape[-1] == weight.shape[1]:
                name = _name_of(module, modules)
                return _no_rows(f"layer {name!r} was given 0 rows (shape {tuple(each.shape)})", repr(name))
    # In a backward pass no layer is on the way.
    of_nothing = scaling and re.search(r"max\(\): Expected reduction dim", str(error))
    return _no_rows("an FP8 layer was given 0 rows", "names") if of_nothing else None


def _no_rows(seen: str, name: str) -> tuple[Code, str, str]:
    return (
        R.NO_ROWS,
        f"{seen}, as an expert is to which a router sends nothing: FP8 takes its scale from the largest value, and "
        "there is none; the same layer in BF16 takes 0 rows",
        "pytest_fp8.pad_to_multiple(rows) before the layer, [: len(rows)] after it: 0 rows become 16 rows of zeros, "
        f"which add nothing; where these lines are a library's, leave the layer in BF16: Workload(leave=({name},))",
    )


def _name_of(module: torch.nn.Module, callers: list[torch.nn.Module]) -> str:
    """In the outermost of the modules that call it."""
    names = (name for caller in callers for name, each in caller.named_modules() if each is module)
    return next(names, "") or type(module).__name__


def _mend(error: BaseException) -> str:
    """What to do where the user's own line raised one of :data:`SLIPS`, or says ``raise`` itself."""
    innermost = traceback.extract_tb(error.__traceback__)[-1:]
    if not (innermost and is_users(innermost[0].filename)):
        return ""
    file, line, name, text = innermost[0]
    where = f"line {line} of {file.rpartition('/')[2]}, in {name}"
    if re.search(r"(^|:)\s*raise\b", text or ""):
        return f"{where}, raised it: see what it checks"
    return f"mend {where}" if isinstance(error, SLIPS) else ""
