"""The fixtures. Each imports what it needs in its body, so that an idle plugin costs milliseconds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fp8.items import failed
from pytest_fp8.options import SESSION

if TYPE_CHECKING:
    from pytest_fp8.case import Case
    from pytest_fp8.pair import Fp8Pair
    from pytest_fp8.verdicts import Decision
    from pytest_fp8.workload import Workload


@contextlib.contextmanager
def told() -> Iterator[None]:
    """An error of the block fails the test with its lines alone."""
    from pytest_fp8.errors import Fp8Error

    try:
        yield
    except Fp8Error as error:
        raise failed(error) from None


@pytest.fixture(scope="session")
def fp8_case(request: pytest.FixtureRequest) -> Case:
    """The case that the test asks about; parametrised from ``@pytest.mark.fp8``."""
    case = getattr(request, "param", None)
    if case is None:
        from pytest_fp8.codes import R
        from pytest_fp8.errors import refuse

        with told():
            # A session fixture does not know which test asked first; pytest names it above this message.
            refuse(
                R.NO_CASE,
                "this test asks for an FP8 case and names none",
                expected="@pytest.mark.fp8(backend='torchao', recipe='tensorwise') on the test or its module; "
                "for fp8_script @pytest.mark.fp8_script(['python', 'train.py'], fp8=['--fp8'])",
                seen="no mark that goes with it",
                cause="fp8_case, fp8_pair, bf16_model and fp8_model need a case, which the mark names where the test, "
                "or a fixture that it takes, has one of them as an argument; pytest gives methods of a "
                "unittest.TestCase none, marked or not",
                next_step="add the mark (pytest --markers shows its arguments); take fp8_pair as an argument in place "
                "of request.getfixturevalue('fp8_pair'); make a plain class of a unittest.TestCase",
            )
    return case  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def fp8_workload() -> Workload | None:
    """What the arms train. Override it to bring your own model, in any scope::

        @pytest.fixture
        def fp8_workload():
            return Workload(build=make_model, batch=make_batch)

    ``None``: the model that the mark names.
    """
    return None


@pytest.fixture
def fp8_pair(request: pytest.FixtureRequest, fp8_case: Case, fp8_workload: Workload | None) -> Fp8Pair:
    """The BF16 and the FP8 arm of the case, each in a process of its own, shared by all tests of the case."""
    with told():
        require_workload(request.node.name, fp8_case, fp8_workload)
        pair: Fp8Pair = request.config.stash[SESSION].pairs.pair(fp8_case, fp8_workload, request.node.nodeid)
    pair.used = False
    return pair


@pytest.fixture
def fp8_check(request: pytest.FixtureRequest, fp8_pair: Fp8Pair) -> Callable[[], Decision]:
    """Asks one question of the case, and fails the test where the answer is FAIL. pytest makes a test of each question
    that the case answers, as ``test_fp8[own-torchao-tensorwise-loss]``, so ``-k loss`` asks the loss alone::

        @pytest.mark.fp8(backend="torchao", recipe="tensorwise")
        def test_fp8(fp8_check):
            fp8_check()
    """
    return getattr(fp8_pair, f"assert_{request.param}")  # type: ignore[no-any-return]


@pytest.fixture
def fp8_script(request: pytest.FixtureRequest, fp8_case: Case) -> Callable[[], Decision]:
    """Asks one question of two runs of a training script as it is, with the words of ``bf16=`` and of ``fp8=``. pytest
    makes a test of each question, as ``test_script[own.train-script-speedup]``::

        @pytest.mark.fp8_script([sys.executable, "train.py", "--max_steps", "1000"], fp8=["--fp8"])
        def test_script(fp8_script):
            fp8_script()
    """
    from pytest_fp8.script.command import of_mark

    marked = of_mark(request.node)
    assert marked is not None, "the case comes of the mark"
    with told():
        pair = request.config.stash[SESSION].pairs.script_pair(fp8_case, marked[0])
    return getattr(pair, f"assert_{request.param}")  # type: ignore[no-any-return]


@pytest.fixture
def bf16_model(request: pytest.FixtureRequest, fp8_case: Case, fp8_workload: Workload | None) -> Any:
    """The case's model in BF16, in this process, for tests that touch its modules. To measure, use ``fp8_pair``."""
    return _model(request, fp8_case, fp8_workload, convert=False)


@pytest.fixture
def fp8_model(request: pytest.FixtureRequest, fp8_case: Case, fp8_workload: Workload | None) -> Any:
    """The same model with the same weights in the case's recipe, in this process; uncompiled."""
    return _model(request, fp8_case, fp8_workload, convert=True)


def _model(request: pytest.FixtureRequest, case: Case, workload: Workload | None, convert: bool) -> Any:
    """The one place where pytest's own process loads torch."""
    from pytest_fp8.worker.training.setup import local_model

    with told():
        require_workload(request.node.name, case, workload)
        return local_model(case, workload, convert)


def require_workload(test: str, case: Case, given: object) -> None:
    """Raise :class:`SettingsError` unless a test's mark names a model, or else ``fp8_workload`` gave a
    :class:`Workload`."""
    from pytest_fp8.case import OWN
    from pytest_fp8.codes import R
    from pytest_fp8.errors import refuse
    from pytest_fp8.workload import Workload

    if given is not None and not isinstance(given, Workload):
        refuse(
            R.NOT_A_WORKLOAD,
            "the fixture fp8_workload did not give a workload",
            expected="pytest_fp8.Workload(build=..., batch=...), or None",
            seen=f"{given!r:.200}",
            cause="a model, its class or a function belongs into the workload's build=",
        )
    if (given is None) is (case.model == OWN):
        refuse(
            R.NO_WORKLOAD if given is None else R.TWO_MODELS,
            f"{test}: {'no model' if given is None else 'two models'} to train",
            expected="a model's name in the mark, or a Workload from the fixture fp8_workload",
            seen=f"case {case.id} in the mark, and fp8_workload gave {'None' if given is None else 'a Workload'}",
            cause="no fixture fp8_workload here overrides the plugin's, which brings none; or yours returns nothing"
            if given is None
            else f"fp8_workload brings a model and the mark names another ({case.model})",
        )
