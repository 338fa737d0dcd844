"""The estimator's network and its batches: gradients, probabilities and orders of examples. No cluster."""

import numpy as np
import pytest

from ps_protocol.errors import InvalidSpec
from worker_client.neural_network import ACTIVATIONS, Network


def network(*sizes: int, activation: str = "relu") -> Network:
    return Network(sizes=sizes, activation=activation, dtype=np.float64)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("sizes", [(4, 3), (4, 6, 3), (4, 6, 5, 3)])
def test_gradients_are_those_of_finite_differences(sizes: tuple[int, ...], activation: str) -> None:
    random = np.random.default_rng(5)
    net = network(*sizes, activation=activation)
    variables = net.initial_values(random)
    features, labels = random.standard_normal((7, 4)), random.integers(3, size=7)
    gradients = {name: np.empty_like(value) for name, value in variables.items()}
    net.loss_and_gradients(variables, features, labels, into=gradients)
    unused = {name: np.empty_like(value) for name, value in variables.items()}
    for name, value in variables.items():
        for index in random.integers(value.size, size=4):
            around = []
            for change in (1e-6, -1e-6):
                changed = {**variables, name: value.copy()}
                changed[name].flat[index] += change
                around.append(net.loss_and_gradients(changed, features, labels, into=unused))
            assert gradients[name].flat[index] == pytest.approx((around[0] - around[1]) / 2e-6, rel=1e-4, abs=1e-7), (name, index)


def test_the_loss_and_the_probabilities_of_a_network_that_is_sure_and_wrong_are_finite() -> None:
    net = network(1, 2)
    variables = {"logits/weights": np.array([[1e5, -1e5]]), "logits/biases": np.zeros(2)}
    features, labels = np.array([[1.0], [-1.0]]), np.array([1, 0])
    gradients = {name: np.empty_like(value) for name, value in variables.items()}
    assert np.isfinite(net.loss_and_gradients(variables, features, labels, into=gradients))
    np.testing.assert_array_equal(net.predictions(variables, features), [[1.0, 0.0], [0.0, 1.0]])


def test_an_activation_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(InvalidSpec, match="'swish', want one of relu, tanh, logistic, identity"):
        network(1, 2, activation="swish")


def test_a_pass_has_every_example_once_and_the_next_another_order() -> None:
    from worker_client.estimator import batches

    given = [labels for _, labels in batches(np.arange(10.0)[:, None], np.arange(10), 4, seed=1, worker=0, passes=range(2))]
    assert [len(batch) for batch in given] == [4, 4, 2, 4, 4, 2]
    first, second = np.concatenate(given[:3]), np.concatenate(given[3:])
    assert sorted(first) == sorted(second) == list(range(10)) and list(first) != list(second)


def test_workers_go_through_the_same_examples_in_different_orders_and_each_the_same_every_time() -> None:
    from worker_client.estimator import batches

    one, again, other = (
        next(batches(np.zeros((50, 1)), np.arange(50), 50, seed=1, worker=worker, passes=range(1)))[1].tolist() for worker in (0, 0, 1)
    )
    assert one == again != other


def test_the_loss_of_a_pass_is_the_mean_of_its_batches_also_of_one_that_was_cut_short() -> None:
    from worker_client.estimator import pass_losses

    assert pass_losses([1.0, 2.0, 3.0, 5.0, 8.0], num_batches=2) == [1.5, 4.0, 8.0]
