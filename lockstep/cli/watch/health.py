"""`lockstep health`: one grpc.health.v1 check, for containers. Imports as little as possible, because it runs every two seconds."""

import argparse
import os
import sys

_TIMEOUT_S = 1.5
_ROLES = ("ps_protocol.v1.ParameterService", "ps_protocol.v1.ChiefService")


def add_health_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `health`."""
    from ps_protocol.process import options

    parser.add_argument(
        "--address", default=os.environ.get("LOCKSTEP_ADDRESS", ""), metavar="ADDRESS", help="address of a parameter server or chief"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--ready", action="store_true", help="ask whether it can take traffic, not only whether it is alive")
    options.add_options(parser, options.options_of(options.CALLER, group=options.SECURITY_GROUP))


def run_health(arguments: argparse.Namespace) -> int:
    """Returns 0 if the process answers that it serves; otherwise prints the reason and returns 1."""
    if not arguments.address:
        print("lockstep health: which process? give --address ADDRESS or set LOCKSTEP_ADDRESS", file=sys.stderr)
        return 2
    from ps_protocol.process import options
    from ps_protocol.roles.identity import parse_address
    from ps_protocol.rpc.channel import Access

    parse_address(arguments.address)
    import grpc  # after ps_protocol.rpc, which says how it is loaded
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    access = Access(options.security_of(options.Given(vars(arguments), os.environ)))
    answers = health_pb2.HealthCheckResponse
    with access.open_channel(arguments.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in _ROLES if arguments.ready else ("",):
            try:
                reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND and service == _ROLES[0]:
                    continue  # the process has the other role
                print(f"{arguments.address} does not answer ({error.code().name}: {error.details()})", file=sys.stderr)
                return 1
            word = answers.ServingStatus.Name(reply.status)
            print(f'{{"status": "{word.lower()}"}}' if arguments.json else word)
            return 0 if reply.status == answers.SERVING else 1
    raise AssertionError("the last role either answers or fails")
