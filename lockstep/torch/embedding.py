"""torch.nn.Embedding and EmbeddingBag with a table on the parameter servers as weights: they read rows, and their gradients are rows.

The modules have no parameters of their own. `Optimizer` finds them in the model and gives each its table.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from lockstep.torch.tensors import array_of, tensor_of
from worker_client import EmbeddingTable, IndexedSlices, Initializer, normal_initializer

ReadRows = Callable[[Any], Any]


class Table:
    """The table of one module: reads its rows, and collects the gradients of backward passes since the last step."""

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        weight: Any,
        *,
        padding_idx: int | None,
        initializer: Initializer | None,
        dtype: Any,
        options: dict[str, Any],
    ) -> None:
        shape = (embedding_dim,) if num_embeddings is None else (num_embeddings, embedding_dim)
        if weight is not None and tuple(weight.shape) != shape:
            raise ValueError(f"_weight has shape {tuple(weight.shape)}, the module is for {(num_embeddings, embedding_dim)}")
        if weight is not None and initializer is not None:
            raise ValueError("_weight and initializer both say what the rows begin with; give one of them")
        self.dtype = (weight.dtype if weight is not None else dtype) or torch.get_default_dtype()
        if weight is None:
            initializer = initializer or normal_initializer(0.0, 1.0)
            if padding_idx is not None and num_embeddings is not None:
                if initializer.zero_row not in (None, padding_idx):
                    raise ValueError(f"initializer makes row {initializer.zero_row} zero, and padding_idx row {padding_idx}; want one row")
                initializer = replace(initializer, zero_row=padding_idx)  # as in torch
        self.declared = EmbeddingTable(
            array_of(weight) if weight is not None else shape,
            dtype=str(self.dtype).removeprefix("torch."),
            initializer=initializer,
            **{"sparse_mean": "per_replica", **options},
        )
        self.read_rows: ReadRows | None = None
        self._gradients: list[tuple[Any, Any]] = []

    # torch.compile() cannot trace this. Disabled as in torch's own optimizers, which does not load the compiler.
    @torch._disable_dynamo  # type: ignore[untyped-decorator]  # PyTorch may not be installed where types are checked
    def rows(self, unique: "torch.Tensor") -> "torch.Tensor":
        """Returns these rows as a leaf of the graph, whose gradient becomes a gradient of the table."""
        if self.read_rows is None:
            raise RuntimeError("this embedding's rows are on the parameter servers: make lockstep.torch.Optimizer with the model first")
        indices = unique.detach().cpu().numpy()
        # `read_rows` returns a copy, so the tensor may use its memory.
        rows = tensor_of(self.read_rows(indices)).to(unique.device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(lambda leaf: self._add(indices, leaf))
        return rows

    def _add(self, indices: Any, leaf: "torch.Tensor") -> None:
        self._gradients.append((indices, leaf.grad.detach()))
        leaf.grad = None  # else a second backward pass through this graph would add to the noted gradient

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient."""
        return bool(self._gradients)

    def take(self, scale: float) -> IndexedSlices | None:
        """Returns the gradient, multiplied by `scale`, and forgets it; None: there is none."""
        given, self._gradients = self._gradients, []
        if not given:
            return None
        values = [array_of(gradient if scale == 1.0 else gradient * scale) for _, gradient in given]
        return IndexedSlices(np.concatenate([indices for indices, _ in given]), np.concatenate(values))

    def forget(self) -> None:
        """Drops the gradients, as zero_grad() does."""
        self._gradients.clear()


class _Rows(nn.Module):  # type: ignore[misc]  # PyTorch may not be installed where types are checked
    """The common part of both modules."""

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None,
        *,
        max_norm: float | None,
        scale_grad_by_freq: bool,
        weight: Any,
        initializer: Initializer | None,
        dtype: Any,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        if max_norm is not None:
            raise ValueError("max_norm changes rows while they are read, which tables on servers do not do; clip the gradient instead")
        if (num_embeddings is None) != (options.get("keys") is not None):
            keys = options.get("keys")
            raise ValueError(
                f"num_embeddings = {num_embeddings}, keys = {keys!r}: a table has a size or keys; give one, None for the other"
            )
        if padding_idx is not None and num_embeddings is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx = {padding_idx}: there are {num_embeddings} rows")
        self.num_embeddings, self.embedding_dim, self.scale_grad_by_freq = num_embeddings, embedding_dim, scale_grad_by_freq
        self.padding_idx = padding_idx if padding_idx is None or num_embeddings is None else padding_idx % num_embeddings
        self.table = Table(
            num_embeddings, embedding_dim, weight,
            padding_idx=self.padding_idx, initializer=initializer, dtype=dtype, options=options,
        )  # fmt: skip

    def _read(self, indices: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor, int | None]":
        """Returns the rows, the position of each index among them, and that of the padding row (None: it is not among them)."""
        unique, positions = torch.unique(indices, return_inverse=True)
        if not unique.numel():
            # torch requires a row, although it uses none.
            return torch.zeros(1, self.embedding_dim, dtype=self.table.dtype, device=indices.device, requires_grad=True), positions, None
        rows = self.table.rows(unique)
        found = (unique == self.padding_idx).nonzero() if self.padding_idx is not None else None
        padding = int(found[0]) if found is not None and found.numel() else None
        if padding is not None and self.num_embeddings is None:
            rows.detach()[padding] = 0  # as a key its row begins like others; no gradient changes it
        return rows, positions, padding

    def extra_repr(self) -> str:
        """Describes the module in a printed model."""
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        num_rows = "any keys" if self.num_embeddings is None else self.num_embeddings
        return f"{num_rows}, {self.embedding_dim}{padding}, on parameter servers"


class Embedding(_Rows):
    """torch.nn.Embedding on a table.

    `initializer`: the result of lockstep.uniform_initializer(…) or another initializer function (None: N(0, 1), as in torch, made by the
    servers); the row of `padding_idx` begins with zeros. `_weight`: first values instead. `device` has no effect: rows are copied to the
    device of the indices. `options`: others of `lockstep.EmbeddingTable`, for example `optimizer` (the table's own; None: that of the first
    parameter group), `sparse_mean` ("per_replica", the mean over the workers, as for dense gradients, or "per_index", over those that have
    a row), and `keys="int64"`: with `num_embeddings` None, rows of any ids. Modules share a table after `one.table = other.table`.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        _weight: Any = None,
        *,
        device: Any = None,
        initializer: Initializer | None = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, padding_idx,
            max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq, weight=_weight,
            initializer=initializer, dtype=dtype, options=options,
        )  # fmt: skip

    def forward(self, input: "torch.Tensor") -> "torch.Tensor":
        """Returns the rows of the indices."""
        rows, positions, padding = self._read(input)
        return functional.embedding(positions, rows, padding, scale_grad_by_freq=self.scale_grad_by_freq)


class EmbeddingBag(_Rows):
    """torch.nn.EmbeddingBag on a table; the other arguments are those of `Embedding`."""

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = True,
        _weight: Any = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        device: Any = None,
        initializer: Initializer | None = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode = {mode!r}, want 'sum', 'mean' or 'max'")
        super().__init__(
            num_embeddings, embedding_dim, padding_idx,
            max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq, weight=_weight,
            initializer=initializer, dtype=dtype, options=options,
        )  # fmt: skip
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self, input: "torch.Tensor", offsets: "torch.Tensor | None" = None, per_sample_weights: "torch.Tensor | None" = None
    ) -> "torch.Tensor":
        """Returns the sum, mean or largest elements of the rows of each bag."""
        rows, positions, padding = self._read(input)
        return functional.embedding_bag(
            positions,
            rows,
            offsets,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
