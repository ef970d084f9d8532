"""Whether this is continuous integration, and what is refused there."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_fp8.codes import R
from pytest_fp8.errors import refuse

FALSE = ("", "0", "false", "no", "off")
CI_VARIABLES = (
    "CI",
    "CONTINUOUS_INTEGRATION",
    "GITHUB_ACTIONS",
    "GITLAB_CI",
    "BUILDKITE",
    "CIRCLECI",
    "TF_BUILD",
    "JENKINS_URL",
    "TEAMCITY_VERSION",
)
"""Set by the CI services of those names (TF_BUILD: Azure Pipelines); most set ``CI`` too."""


def ci_variable(environment: Mapping[str, str]) -> str:
    """The variable that says this is continuous integration, or an empty string. ``CI=false`` says that it is not."""
    for name in CI_VARIABLES:
        if environment.get(name, "").strip().lower() not in FALSE:
            return name
    return ""


def refuse_in_ci(environment: Mapping[str, str]) -> None:
    """Refuse an update of baselines there. Raises :class:`SettingsError`."""
    name = ci_variable(environment)
    if name:
        refuse(
            R.REFUSED_IN_CI,
            "--fp8-update-baselines is refused in continuous integration",
            expected="a person who measures and reviews, or a job whose purpose is to update",
            seen=f"{name}={environment[name]}",
            cause="a gate that rewrites its own baselines never fails",
            next_step="run it by hand; or give the job that is there to update --fp8-update-in-ci "
            "(PYTEST_FP8_UPDATE_IN_CI=1)",
        )
