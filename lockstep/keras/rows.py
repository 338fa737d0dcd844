"""A layer whose rows are those of one batch, of a table on the parameter servers. Knows Keras and sessions; no optimizer.

Backends trace a layer's call, or differentiate it, without numbers: it could not ask servers for rows. So `positions()` reads a batch's
rows before the step, into a variable as large as a batch may need, whose gradient is that of the rows.
"""

from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.errors import InvalidSpec
from lockstep.keras.variables import gradient_of
from ps_protocol.model.variables import Array
from worker_client import EmbeddingTable, IndexedSlices, Session


class TableRows(keras.layers.Layer):  # type: ignore[misc]
    """An embedding whose rows lie on parameter servers, also of keys that nobody can count.

    `table`: of rows with one axis, such as `EmbeddingTable(16, keys="int64")`; `name` is its name there. A batch has at most `max_keys`
    different keys. The layer takes what `positions(keys)` returns, and gives a row for each: call that before each `train_on_batch()`,
    `test_on_batch()` or `predict_on_batch()`, not in a data set of `fit()`, which reads batches ahead. `Optimizer(…, tables=[layer])`
    declares the table, and pushes the gradient of the batch's rows.
    """

    def __init__(self, table: EmbeddingTable, *, max_keys: int, name: str) -> None:
        super().__init__(name=name)
        given = np.asarray(table.value_or_shape)
        # A shape, or the first values.
        width = int(given.shape[-1] if given.ndim > 1 else given.ravel()[-1])
        self.table = table
        self.session: Session | None = None
        self._keys: Array | None = None
        self.rows = self.add_weight(shape=(max_keys, width), initializer="zeros", dtype=np.dtype(table.dtype).name, name="rows")

    def positions(self, keys: npt.ArrayLike) -> Array:
        """Reads the rows of a batch's keys, of this worker's step, and returns the keys' positions among them, in the shape of `keys`.

        Blocks. Raises InvalidSpec for too many keys or before the optimizer is built, and the errors of `Session.read_rows`.
        """
        if self.session is None:
            raise InvalidSpec(
                f"{self.name}: no optimizer has been built with it; before the first batch:"
                " Optimizer(…, tables=[…]).build(model.trainable_variables)"
            )
        unique, positions = np.unique(np.asarray(keys), return_inverse=True)
        rows = np.zeros(self.rows.shape, self.rows.dtype)
        if unique.size > len(rows):
            raise InvalidSpec(f"{self.name}: {unique.size} different keys in a batch, max_keys is {len(rows)}")
        rows[: unique.size] = self.session.read_rows(self.name, unique)
        self.rows.assign(rows)
        self._keys = unique
        return positions.reshape(np.shape(keys)).astype(np.int32)

    def take_gradient(self, gradient: Any, *, scale: float | None) -> IndexedSlices | None:
        """Returns the gradient of the table by that of `rows`, divided by `scale`, and forgets the batch; None: there is none."""
        keys, self._keys = self._keys, None
        if keys is None or gradient is None:
            return None
        array = gradient_of(self.name, gradient, dtype=np.dtype(self.rows.dtype))[: keys.size]
        return IndexedSlices(keys, array if scale is None else array / array.dtype.type(scale))

    def call(self, positions: Any) -> Any:
        """Returns the rows at these positions."""
        return keras.ops.take(self.rows, positions, axis=0)
