"""A chart of Helm from a cluster's spec: its manifests, in which the image and the workers are values. Writes no file."""

from dataclasses import replace
from typing import Any

from lockstep.kubernetes.objects import objects_of
from lockstep.kubernetes.spec import KubernetesSpec
from lockstep.kubernetes.yaml_text import Verbatim, yaml_of
from ps_protocol.process.options import EXPECTED_WORKERS

_IMAGE, _WORKERS, _WORKERS_TEXT = map(Verbatim, ('"{{.Values.image}}"', "{{.Values.workers}}", '"{{.Values.workers}}"'))


def chart_of(spec: KubernetesSpec) -> dict[str, str]:
    """Returns the texts of its files by their paths in the chart."""
    chief = {**spec.chief_variables, EXPECTED_WORKERS.variable: _WORKERS_TEXT}
    manifests = objects_of(replace(spec, image=_IMAGE, workers=_WORKERS, chief_variables=chief))
    about = {"apiVersion": "v2", "name": spec.name, "version": "0.1.0", "description": "A cluster of Lockstep"}
    return {
        "Chart.yaml": yaml_of([about]),
        "values.yaml": yaml_of([{"image": spec.image, "workers": spec.workers}]),
        "templates/cluster.yaml": yaml_of([_escaped(one) for one in manifests]),
    }


def _escaped(node: Any) -> Any:
    """Returns a node whose own braces Helm takes for text."""
    if isinstance(node, dict):
        return {key: _escaped(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_escaped(value) for value in node]
    return node.replace("{{", "{{`{{`}}") if isinstance(node, str) and not isinstance(node, Verbatim) else node
