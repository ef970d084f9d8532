"""Whether this is continuous integration."""

from __future__ import annotations

from collections.abc import Mapping

FALSE = ("", "0", "false", "no", "off")
CI_VARIABLES = ("CI", "TF_BUILD", "JENKINS_URL", "TEAMCITY_VERSION")
"""Services set ``CI``, but for Azure Pipelines (TF_BUILD), Jenkins and TeamCity."""


def ci_variable(environment: Mapping[str, str]) -> str:
    """The variable that says this is continuous integration, or an empty string. ``CI=false`` says that it is not."""
    for name in CI_VARIABLES:
        if environment.get(name, "").strip().lower() not in FALSE:
            return name
    return ""
