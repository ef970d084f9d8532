"""A plugin of tox: ``runner = shared`` lets environments of equal dependencies use one folder, with one torch in it.

tox itself empties a folder that an environment of another name made.
"""

from __future__ import annotations

from typing import Any

from tox.plugin import impl
from tox.tox_env.info import Info
from tox.tox_env.python.virtual_env.runner import VirtualEnvRunner
from tox.tox_env.register import ToxEnvRegister


class NamelessInfo(Info):
    """What an environment was made with, without its name."""

    def compare(self, value: Any, section: str, sub_section: str | None = None) -> Any:
        if section == "ToxEnv":
            value = {key: each for key, each in value.items() if key != "name"}
        return super().compare(value, section, sub_section)


class SharedEnvRunner(VirtualEnvRunner):
    """An environment whose ``env_dir`` others may have, too. Their ``deps`` must be the same."""

    @staticmethod
    def id() -> str:
        return "shared"

    @property
    def cache(self) -> Info:
        return NamelessInfo(self.env_dir)


@impl
def tox_register_tox_env(register: ToxEnvRegister) -> None:
    register.add_run_env(SharedEnvRunner)
