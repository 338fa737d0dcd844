"""A worker's program under `lockstep.ray.up()`: calls the user's function, and leaves what it returns or raises for the driver."""

import os
import traceback
from pathlib import Path

import ray.cloudpickle as pickle

from lockstep.launcher.engines.ray_bridge import FUNCTION, FUNCTION_VARIABLE, RESULT


def main() -> None:
    """Raises what the function raises."""
    directory = Path(os.environ[FUNCTION_VARIABLE])
    # As Ray itself passes functions: the bytes are from the driver, a program of the same user. No server reads them.
    train, arguments = pickle.loads((directory / FUNCTION).read_bytes())
    try:
        _leave(directory, (train(*arguments), None, ""))
    except Exception as error:
        _leave(directory, (None, error, traceback.format_exc()))
        raise


def _leave(directory: Path, result: object) -> None:
    draft = directory / f"{RESULT}.draft"
    try:
        draft.write_bytes(pickle.dumps(result))
    except Exception as error:  # of the user's classes
        raise TypeError(f"what the function has returned or raised cannot be sent to the driver: {error}") from error
    draft.replace(directory / RESULT)


if __name__ == "__main__":
    main()
