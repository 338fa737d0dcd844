"""A role of MXNet's KVStore dist_sync over ps-lite, with SGD on the server. Runs in MXNet's environment, with an old NumPy."""

import mxnet as mx

from benchmarks.peers.role import measure, read_work


def main() -> None:
    """Trains until the process is ended. A server or a scheduler never gets here: importing MXNet runs it."""
    work = read_work()
    store = mx.kv.create("dist_sync")
    if store.rank == 0:
        # dist_sync passes the sum to the optimizer.
        store.set_optimizer(mx.optimizer.SGD(learning_rate=0.1, wd=0.0, rescale_grad=1.0 / work.num_workers))
    keys = [str(index) for index in range(work.num_variables)]
    values = [mx.nd.random.normal(shape=(work.num_elements,)) for _ in keys]
    store.init(keys, values)

    def step() -> None:
        gradients = [0.001 * value for value in values]
        for index, key in enumerate(keys):
            store.push(key, gradients[index], priority=-index)
        for index, key in enumerate(keys):
            store.pull(key, out=values[index], priority=-index)
        for value in values:
            value.wait_to_read()

    measure(work, step)


if __name__ == "__main__":
    main()
