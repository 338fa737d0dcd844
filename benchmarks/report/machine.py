"""Describes the machine that figures were made on, as far as this process can see. Measures nothing."""

import datetime
import os
import platform
from importlib.metadata import version


def machine() -> dict[str, object]:
    """Returns date, number of processors, load and versions."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{package: version(package) for package in ("grpcio", "protobuf", "numpy")},
    }
