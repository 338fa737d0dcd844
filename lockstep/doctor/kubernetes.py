"""Checks whether kubectl reaches a Kubernetes that takes what `lockstep k8s render` writes. Asks its API server; changes nothing there."""

import json
import re
import subprocess
from collections.abc import Iterator
from operator import itemgetter

from lockstep.doctor.findings import Finding, fail, ok
from lockstep.kubernetes.head import LEAST_MINOR

_MADE = (
    "services",
    "secrets",
    "persistentvolumeclaims",
    "statefulsets.apps",
    "jobs.batch",
    "poddisruptionbudgets.policy",
    "networkpolicies.networking.k8s.io",
)
# What some flags of `lockstep k8s render` need, by its version of the API.
_ADDED = {
    "jobset.x-k8s.io/v1alpha2": "--as jobset",
    "trainer.kubeflow.org/v1alpha1": "--as trainjob",
    "cert-manager.io/v1": "--cert-manager",
}
_ANSWER_S = 10


def kubernetes_findings() -> Iterator[Finding]:
    """Yields findings about the cluster of kubectl's context: whether it answers, its version, who may create what, and what it adds."""
    code, text, complaint = _kubectl("get", "--raw", "/version")
    try:
        name, minor = itemgetter("gitVersion", "minor")(json.loads(text))
        is_old = int(re.sub(r"\D", "", minor)) < LEAST_MINOR  # some say "28+"
    except (ValueError, TypeError, KeyError):  # something else may answer at that address, such as a proxy's page
        said = complaint if code else f"its cluster answers as no Kubernetes does: {text.strip()[:80]!r}"
        yield fail("kubectl", said, "choose a cluster that answers: kubectl config get-contexts")
        return
    advice = f"manifests of `lockstep k8s render` need 1.{LEAST_MINOR} or newer"
    yield fail("kubernetes", name, advice) if is_old else ok("kubernetes", name)
    if refused := [kind for kind in _MADE if _kubectl("auth", "can-i", "create", kind)[0]]:
        advice = "choose another namespace or user of kubectl, or ask for the right"
        yield fail("permissions", f"you may not create {', '.join(refused)}", advice)
    else:
        yield ok("permissions", "you may create all that is rendered, in the namespace of kubectl")
    versions = _kubectl("api-versions")[1].split()
    yield ok("additions", ", ".join(f"{flag} {'works' if one in versions else 'does not'}" for one, flag in _ADDED.items()))


def _kubectl(*words: str) -> tuple[int, str, str]:
    """Returns its exit code, what it printed, and its last words if it failed."""
    ended = subprocess.run(["kubectl", f"--request-timeout={_ANSWER_S}s", *words], capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout, (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
