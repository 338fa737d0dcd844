"""`python -m tests.chaos.publisher`: publishes values that follow from a number among them."""

import numpy as np

import worker_client
from ps_protocol.model.variables import Array


def values_of(number: int) -> dict[str, Array]:
    """Returns the parameters that go with a number."""
    rng = np.random.default_rng(number)
    return {"number": np.array(float(number)), "w": rng.normal(size=(61, 7)).astype(np.float32), "b": rng.normal(size=13)}


def main() -> None:
    """Publishes without end."""
    now = values_of(0)
    with worker_client.publish(now, transport="grpc") as publisher:
        while True:
            now.update(values_of(publisher.global_step + 1))
            publisher.step()


if __name__ == "__main__":
    main()
