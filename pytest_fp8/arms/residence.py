"""Work ordered by arm: where two arms do not fit the GPU together, each residence answers all that can be asked in it.

Each question's gathering runs as a coroutine, suspended where it asks an arm that is not resident. Arms are built and
asked by the thread that gathers, so that an interrupt or a test's time limit arrives there, and since the kernel ends
an arm with the thread that started it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from pytest_fp8.arms.coroutines import Coroutine, current, suspend


class Pool(Protocol):
    """The pool, as far as residences need it."""

    def is_alive(self, arm: Any) -> bool: ...

    def live(self, arm: Any) -> Any:
        """The arm's process, built where it is not alive. Raises :class:`ArmError`."""


@dataclass(frozen=True)
class Asked:
    """What a coroutine waits for: its arm, and the request that is then made of it."""

    arm: Any
    request: Callable[[], Any]


@dataclass(frozen=True)
class Elsewhere:
    """Evidence that another coroutine is gathering."""

    what: Any
    holder: Coroutine


class Residences:
    """Runs what several questions gather, and changes the resident arm only when all of them wait for another one."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._under_way: dict[Any, Coroutine] = {}
        """Evidence that is being gathered -> by which coroutine."""
        self._not_built: dict[str, Exception] = {}
        """Arms whose build failed while these tasks were gathered: all that wait for them get the same error."""

    def gather(self, tasks: Mapping[str, Callable[[], object]]) -> dict[str, BaseException]:
        """Run all tasks; gives the errors of those that ended in one. In each residence the first task that can go on
        does. ``KeyboardInterrupt`` and whatever else ends the wait for an arm ends them all."""
        coroutines = {name: Coroutine(task) for name, task in tasks.items()}
        resident = None
        try:
            while waiting := [each for each in coroutines.values() if not each.ended]:
                going = next((each for each in waiting if self._can_go_on(each)), None)
                if going is not None:
                    self._run(going)
                else:
                    wanted = [self._arm_of(each) for each in waiting]
                    # One that died while it was resident is asked on before the other.
                    resident = resident if resident in wanted else wanted[0]
                    self._build(resident)
        finally:
            for each in coroutines.values():
                each.close()
            self._under_way.clear()
            self._not_built.clear()
        return {name: each.error for name, each in coroutines.items() if each.error is not None}

    def ask(self, arm: Any, request: Callable[[], Any]) -> Any:
        """The answer to ``request``, which is made when the arm is resident."""
        return request() if current() is None else suspend(Asked(arm, request))

    def once(self, cache: MutableMapping[Any, Any], key: Any, ask: Callable[[], Any]) -> Any:
        """``cache[key]``, which ``ask`` gives where it is not there. What one coroutine is gathering no other asks."""
        me = current()
        what = id(cache), key
        while key not in cache:
            if me is None:
                cache[key] = ask()
            elif what in self._under_way:
                suspend(Elsewhere(what, self._under_way[what]))
            else:
                self._under_way[what] = me
                try:
                    cache[key] = ask()
                finally:
                    self._under_way.pop(what, None)
        return cache[key]

    def _can_go_on(self, one: Coroutine) -> bool:
        wanted = one.wanted
        if isinstance(wanted, Elsewhere):
            return wanted.what not in self._under_way
        return wanted is None or wanted.arm.key in self._not_built or self._pool.is_alive(wanted.arm)

    def _arm_of(self, one: Coroutine) -> Any:
        """The arm that this coroutine waits for, or the one whose evidence it waits for."""
        while isinstance(one.wanted, Elsewhere):
            one = one.wanted.holder
        return one.wanted.arm

    def _run(self, one: Coroutine) -> None:
        """Let it go on for as long as it asks what can be answered now: requests of one question follow each other."""
        one.resume(*self._answer(one.wanted))
        while not one.ended and isinstance(one.wanted, Asked) and self._can_go_on(one):
            one.resume(*self._answer(one.wanted))

    def _answer(self, wanted: Any) -> tuple[Any, BaseException | None]:
        if not isinstance(wanted, Asked):
            return None, None
        if wanted.arm.key in self._not_built:
            return None, self._not_built[wanted.arm.key]
        try:
            return wanted.request(), None
        except Exception as error:
            return None, error

    def _build(self, arm: Any) -> None:
        try:
            self._pool.live(arm)
        except Exception as error:
            self._not_built[arm.key] = error
