"""Optimizers against recorded results of PyTorch and optax, made by tests/frameworks/record_optimizers.py."""

import json
from pathlib import Path

import numpy as np
import pytest

import worker_client
from tests.support.sessions.framework_optimizers import NUM_STEPS, PAIRS

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_hundred_steps_are_those_of_the_library(name: str, dtype: str) -> None:
    pair, expected = PAIRS[name], RECORDED["after"][name][dtype]
    tolerance = max(pair.tolerance, 1e-6) if dtype == "float32" else pair.tolerance
    with worker_client.local() as session:
        session.create_or_join({"w": np.array(RECORDED["initial"], dtype)}, optimizer=pair.ours)
        for step, gradient in enumerate(RECORDED["gradients"], start=1):
            session.step({"w": np.array(gradient, dtype)})
            if str(step) in expected:
                np.testing.assert_allclose(session.read()["w"], expected[str(step)], rtol=tolerance, atol=tolerance, err_msg=f"step {step}")
    assert step == NUM_STEPS and len(expected) == 4


def test_every_recorded_case_is_replayed() -> None:
    assert set(PAIRS) == set(RECORDED["after"])
