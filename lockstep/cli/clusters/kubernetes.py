"""`lockstep k8s render`: writes manifests for a cluster on Kubernetes. Knows flags, the terminal and a file; makes no object."""

import argparse
from pathlib import Path

from lockstep.kubernetes.chart import chart_of
from lockstep.kubernetes.head import commands_of, head_of
from lockstep.kubernetes.objects import objects_of
from lockstep.kubernetes.spec import FLAGS, KubernetesSpec
from lockstep.kubernetes.yaml_text import yaml_of
from lockstep.launcher.spec import ClusterSpec, flags_of
from lockstep.launcher.supervisor import LaunchFailed
from ps_protocol.errors import InvalidSpec
from ps_protocol.process import options
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.options import CHIEF, NUM_PS, NUM_WORKERS, SERVER, UP, add_options, options_of

# A pod has its page at a port of its own, and no directory for a history.
_NOT_HERE = (options.PAGE, options.HISTORY, options.HISTORY_MAX_BYTES)
_FLAGS = (NUM_PS, NUM_WORKERS, *(option for option in options_of(CHIEF, UP) if option not in _NOT_HERE))


def add_k8s_render_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `k8s render`."""
    add_options(parser, _FLAGS, has_variables=False)
    for flag, (_, metavar, words) in FLAGS.items():
        parser.add_argument(f"--{flag}", metavar=metavar, help=words, action="append" if "repeated" in words else "store")
    parser.add_argument("--spot", action="store_true", help="workers on spot nodes of GKE, EKS, AKS or Karpenter, all else on others")
    words = "workers as a Job (default), or all as JobSet, or as a runtime and TrainJob of Kubeflow"
    parser.add_argument("--as", dest="kind", choices=("job", "jobset", "trainjob"), default="job", help=words)
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: standard output)")
    parser.add_argument("--helm", type=Path, metavar="DIR", help="write a chart of Helm there, whose values are the image and workers")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what each worker runs")


def run_k8s_render(arguments: argparse.Namespace) -> int:
    """Prints or writes the manifests. Raises InvalidSpec for flags that make no cluster."""
    spec, file = spec_of(arguments), arguments.out
    if arguments.helm is not None:
        if file is not None:
            raise InvalidSpec("--helm: a chart is a directory of files; leave --out out")
        return _write_chart(spec, arguments.helm)
    if file is None:
        print(manifests_of(spec, f"{spec.name}.yaml"), end="")
        return ExitCode.DONE
    try:
        file.write_text(manifests_of(spec, str(file)), encoding="utf-8")
    except OSError as error:
        raise InvalidSpec(f"--out {file}: {error.strerror}; choose another file") from error
    print(f"wrote {file}; now:\n\n{commands_of(spec, str(file))}")
    return ExitCode.DONE


def _write_chart(spec: KubernetesSpec, place: Path) -> int:
    try:
        (place / "templates").mkdir(parents=True, exist_ok=True)
        for name, text in chart_of(spec).items():
            (place / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidSpec(f"--helm {place}: {error.strerror}; choose another directory") from error
    print(f"wrote {place}; now:\n\n{commands_of(spec, str(place), is_chart=True)}")
    return ExitCode.DONE


def manifests_of(spec: KubernetesSpec, file: str) -> str:
    """Returns the text of the file."""
    return head_of(spec, file) + yaml_of(objects_of(spec))


def spec_of(arguments: argparse.Namespace) -> KubernetesSpec:
    """Returns the cluster that the arguments describe. Raises InvalidSpec."""
    try:
        cluster = ClusterSpec(**flags_of(arguments))
    except LaunchFailed as failed:
        raise InvalidSpec(str(failed)) from failed
    variables = {role: {option.variable for option in options_of(role)} for role in (SERVER, CHIEF)}
    keys = {flag.replace("-", "_") for flag in (*FLAGS, "spot", "kind")}
    return KubernetesSpec(
        **{key: value for key, value in vars(arguments).items() if key in keys and value is not None},
        command=arguments.command[arguments.command[:1] == ["--"] :],
        ps=cluster.num_ps,
        workers=cluster.num_workers,
        checkpoint_dir=cluster.checkpoint_dir,
        server_variables={name: text for name, text in cluster.told.items() if name in variables[SERVER]},
        chief_variables={name: text for name, text in cluster.told.items() if name in variables[CHIEF]},
    )
