"""Optimizers against the libraries that they are from. tests/unit compares with recorded numbers where no library is installed."""

import numpy as np
import pytest

import worker_client
from tests.support.sessions.framework_optimizers import PAIRS

for _framework in ("torch", "jax", "optax"):
    pytest.importorskip(_framework, reason=f"{_framework} is not installed: make test-frameworks")

NUM_STEPS = 120


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", PAIRS)
def test_every_step_is_that_of_the_library(name: str, dtype: str) -> None:
    from tests.frameworks.record_optimizers import steps_of

    pair, rng = PAIRS[name], np.random.default_rng(3)
    initial, gradients = rng.standard_normal((40, 5)).astype(dtype), rng.standard_normal((NUM_STEPS, 40, 5)).astype(dtype)
    expected = steps_of(pair, initial, gradients)
    tolerance = max(pair.tolerance, 5e-6) if dtype == "float32" else pair.tolerance
    with worker_client.local() as session:
        session.create_or_join({"w": initial}, optimizer=pair.ours)
        for step, gradient in enumerate(gradients):
            session.step({"w": gradient})
            np.testing.assert_allclose(session.read()["w"], expected[step], rtol=tolerance, atol=tolerance, err_msg=f"step {step + 1}")
