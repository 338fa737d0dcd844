"""Learns handwritten digits with optimizers that are given as formulas: Lion and LAMB. The parameter servers check and interpret them.

Both are built in as well, as `lockstep.lion()` and `lockstep.lamb()`.

python examples/custom_optimizers.py
lockstep up --ps 2 --workers 2 -- python examples/custom_optimizers.py
"""

import os

import lockstep
from lockstep.demo.digits import NETWORK, evaluate, initial_values, load_digits, split

NUM_STEPS = 150

# Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2.
LION = lockstep.custom_optimizer(
    """
    v = v - lr * (sign(b1 * m + (1 - b1) * g) + decay * v)
    m = b2 * m + (1 - b2) * g
    """,
    learning_rate=0.002, slots={"m": 0.0}, b1=0.9, b2=0.99, decay=0.01,
)  # fmt: skip

# You et al., "Large Batch Optimization for Deep Learning" (2019), algorithm 2: the norms are those of each variable.
LAMB = lockstep.custom_optimizer(
    """
    m = b1 * m + (1 - b1) * g
    s = b2 * s + (1 - b2) * g * g
    u = m / (1 - b1 ** t) / (sqrt(s / (1 - b2 ** t)) + eps) + decay * v
    ratio = where(norm(v) > 0, where(norm(u) > 0, norm(v) / norm(u), 1), 1)
    v = v - lr * ratio * u
    """,
    learning_rate=lockstep.cosine_decay(0.03, NUM_STEPS), slots={"m": 0.0, "s": 0.0}, b1=0.9, b2=0.999, eps=1e-6, decay=0.01,
)  # fmt: skip


def main() -> None:
    """Trains a network with each optimizer in turn, a half of its variables with either if there is a cluster, and prints accuracies."""
    train, test = split(load_digits())
    in_cluster = "LOCKSTEP_CHIEF" in os.environ
    for name, weights, biases in [("Lion and LAMB", LAMB, LION)] if in_cluster else [("Lion", LION, LION), ("LAMB", LAMB, LAMB)]:
        values = initial_values(seed=7)
        variables = {key: lockstep.Variable(value, optimizer=weights if value.ndim == 2 else biases) for key, value in values.items()}
        with lockstep.connect() if in_cluster else lockstep.local() as session:
            session.create_or_join(variables, optimizer=LION)
            for step in range(NUM_STEPS):
                batch = train.batch(64, worker=session.worker_index, step=step)
                gradients = session.gradient_buffers()
                NETWORK.loss_and_gradients(session.read(), batch.images, batch.labels, into=gradients)
                session.step(gradients)
            accuracy = evaluate(session.read(), test.images, test.labels).accuracy
        print(f"{name}: accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
