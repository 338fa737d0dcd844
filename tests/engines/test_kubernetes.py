"""What `lockstep k8s render` writes, before a real API server, with warnings and unknown fields as mistakes; and what `status` says there.

KUBERNETES_CRDS is a directory with what the projects of JobSet, Kubeflow Trainer and cert-manager publish as definitions of their kinds.
"""

import json
import os
from pathlib import Path

import pytest

from tests.engines.kubernetes import Kubernetes
from tests.support.processes.commands import lockstep_here

pytestmark = [pytest.mark.timeout(300), pytest.mark.parametrize("engine", ["kubernetes"], indirect=True)]

CLAIM = "--checkpoint-dir /kept --checkpoint-claim kept --checkpoint-size 1Gi"
PLACES = "--worker-gpus 2 --spot --worker-node gpu=a100 --worker-cpu 500m --worker-memory 2Gi --ps-cpu 1 --ps-memory 1Gi"
REST = "--env RATE=1 --mount data=/data --user 1234 --metrics-namespace monitoring --env-secret keys"
# By the kind that an API server has only once somebody has added it.
ADDED = {"": "", "jobsets": "--as jobset", "trainjobs": "--as trainjob", "certificates": "--cert-manager ClusterIssuer/all"}


def test_a_real_api_server_accepts_every_kind_that_render_writes(engine: Kubernetes, tmp_path: Path) -> None:
    given = os.environ.get("KUBERNETES_CRDS", "")
    if given:
        assert engine.complaint("apply", "--server-side", "-f", given) == ""
        assert engine.complaint("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all") == ""
    known = engine.kubectl("api-resources", "--output=name")
    lacking = [kind for kind in ADDED if kind and f"\n{kind}." not in known]
    for flags in [flags for kind, flags in ADDED.items() if kind not in lacking]:
        for values in (CLAIM, f"{CLAIM} {PLACES} {REST}"):
            file = tmp_path / "job.yaml"
            words = f"--name job --image registry/job:1 --ps 2 --workers 4 {values} {flags} --out {file}"
            lockstep_here("k8s", "render", *words.split(), "--", "python", "train.py")
            assert engine.complaint("apply", "--dry-run=server", "--validate=strict", "-f", str(file)) == "", words
    if lacking:
        pytest.skip(f"all but {', '.join(lacking)} were accepted; KUBERNETES_CRDS names no directory that defines these")


def test_status_says_in_which_pod_each_process_is(engine: Kubernetes) -> None:
    run = engine.run()
    run.await_step(10)
    told = json.loads(engine.kubectl("exec", "digits-chief-0", "--", "lockstep", "status", "--json"))
    assert [one["address"] for one in told["shards"]] == [f"digits-ps-{index}.digits-ps:5000" for index in range(2)]
    names = [pod["metadata"]["name"].rpartition("-")[0] for pod in engine.pods("worker")]
    assert sorted(one["host"].partition("/")[0] for one in told["participants"]) == sorted(names)
    run.assert_trained()
