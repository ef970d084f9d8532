"""Modules with a workload, each with one place, @@, that the hash of the workload must see."""

EDITS = {
    "a default of a method": """
        WIDTH = @@
        class Net:
            def __init__(self, width=WIDTH): ...
        def build(): return Net()""",
    "a class in a class": """
        class Block:
            def forward(self, x): return x * @@
        class Net:
            block = Block
        def build(): return Net()""",
    "a static method": """
        def act(x): return x * @@
        class Net:
            act = staticmethod(act)
        def build(): return Net()""",
    "a forward put in its place": """
        def fast(self, x): return x * @@
        class Net: ...
        Net.forward = fast
        def build(): return Net()""",
    "a private constant of a class": """
        WIDTH = @@
        class Net:
            _width = WIDTH
        def build(): return Net()""",
    "a nested class": """
        WIDTH = @@
        class Net:
            class Block:
                def f(self): return WIDTH
        def build(): return Net()""",
    "a partial method": """
        import functools
        WIDTH = @@
        class Net:
            def f(self, w): return w
            g = functools.partialmethod(f, WIDTH)
        def build(): return Net()""",
    "a dataclass's default": """
        import dataclasses
        WIDTH = @@
        @dataclasses.dataclass(slots=True)
        class Settings:
            width: int = WIDTH
        def build(): return Settings()""",
    "a dataclass's factory": """
        import dataclasses
        WIDTH = @@
        @dataclasses.dataclass
        class Settings:
            width: list = dataclasses.field(default_factory=lambda: [WIDTH])
        def build(): return Settings""",
    "a named tuple's default": """
        import typing
        WIDTH = @@
        class Settings(typing.NamedTuple):
            width: int = WIDTH
        def build(): return Settings""",
    "an enum's value": """
        import enum
        WIDTH = @@
        class Size(enum.Enum):
            WIDE = WIDTH
        def build(): return Size.WIDE""",
    "an enum's method": """
        import enum
        class Size(enum.Enum):
            WIDE = 1
            def f(self): return @@
        CHOSEN = Size.WIDE
        def build(): return CHOSEN""",
    "a metaclass": """
        class Meta(type):
            def __call__(cls): return @@
        class Net(metaclass=Meta): ...
        def build(): return Net()""",
    "one of two classes of a name": """
        if @@ == 2:
            class Net:
                def f(self): return 1
        else:
            class Net:
                def f(self): return 2
        def build(): return Net()""",
    "a decorator": """
        import functools
        def scaled(fn):
            @functools.wraps(fn)
            def wrapper(*a): return fn(*a) * @@
            return wrapper
        @scaled
        def build(): return 1""",
    "a decorator's argument": """
        import functools
        FACTOR = @@
        def scaled(k):
            def around(fn):
                @functools.wraps(fn)
                def wrapper(*a): return fn(*a) * k
                return wrapper
            return around
        class Net:
            @scaled(FACTOR)
            def f(self): return 1
        def build(): return Net()""",
    "what wraps a library's function": """
        import functools, textwrap
        @functools.wraps(textwrap.dedent)
        def build(): return @@""",
    "one of two lambdas on a line": """
        V = [lambda: 1, lambda: 2, lambda: 3]
        build = V[@@ - 1]""",
    "a lambda that goes on": """
        def make(build, k): return build
        build = make(lambda: [1,
            @@], 3)""",
    "a namespace with a function in it": """
        from types import SimpleNamespace
        S = SimpleNamespace(width=@@, act=lambda x: x)
        def build(): return S""",
    "a deque of objects": """
        import collections
        class O:
            def __init__(self, w): self.w = w
        D = collections.deque([O(@@)])
        def build(): return D""",
    "a pattern": """
        import re
        P = re.compile("a" * 250 + "@@")
        def build(): return P""",
    "a builtin function": """
        import math
        ACT = [math.sin, math.cos][@@ - 2]
        def build(): return ACT""",
    "a method of a list": """
        DATA = [@@]
        def build(): return DATA
        get = DATA.__getitem__
        def build(): return get""",
    "an overload": """
        import functools
        @functools.singledispatch
        def make(x): return 0
        @make.register
        def _(x: int): return @@
        def build(): return make(1)""",
    "a dict of one's own class": """
        class Settings(dict): ...
        S = Settings()
        S.width = @@
        def build(): return S""",
    "a default of a dict": """
        import collections
        D = collections.defaultdict(lambda: @@)
        def build(): return D""",
    "an object with a shape": """
        import dataclasses
        @dataclasses.dataclass
        class Spec:
            shape: tuple
            dtype: str
            layers: int
        S = Spec((1, 2), "bf16", @@)
        def build(): return S""",
    "a number of numpy's": """
        import numpy
        W = numpy.int64(@@)
        def build(): return W""",
    "an array of sizes": """
        import numpy
        W = numpy.array([@@, 3])
        def build(): return W""",
    "a function of numpy's": """
        import numpy
        F = [numpy.sin, numpy.cos][@@ - 2]
        def build(): return F""",
}

TORCH_EDITS = {
    "heads of a built module": """
        import torch
        M = torch.nn.MultiheadAttention(12, @@)
        def build(): return M""",
    "a setting of one's own in a built module": """
        import torch
        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.k = @@
        M = torch.nn.Sequential(Block())
        def build(): return M""",
    "what a library's function was made with": """
        from torch.optim.swa_utils import get_ema_multi_avg_fn
        F = get_ema_multi_avg_fn(1 / @@)
        def build(): return F""",
    "without gradients": """
        import torch
        @torch.no_grad()
        def helper(x): return x * @@
        def build(): return helper(1)""",
}
