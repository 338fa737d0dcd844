"""How a shard comes to its model: the creation under way, and the model that came of one."""

from collections.abc import Callable
from threading import Condition

from ps_protocol.allocator import give_back_freed_memory
from ps_protocol.errors import Cancelled, PsError, VariableExists, WrongRole
from ps_protocol.shard import ShardSpec
from ps_server.memory import MemoryBudget, VariablesMemory, format_bytes, private_variables
from ps_server.shard_difference import difference
from ps_server.shard_model import ShardModel
from ps_server.stripes import ONE_THREAD, StripeRunner
from ps_server.transactions import Creation

_LARGE_BYTES = 16 << 20


class Creations:
    """`model` is None until a creation is whole. All calls are made while the owner's `lock` is held, and may let it go while waiting.

    `allocate` gives memory for the variables. `on_model` is called, with the lock held, when `model` has changed.
    """

    def __init__(
        self,
        lock: Condition,
        *,
        index: int,
        name: str,
        budget: MemoryBudget,
        stripes: StripeRunner = ONE_THREAD,
        allocate: Callable[[int], VariablesMemory] = private_variables,
        on_model: Callable[[], None] = lambda: None,
        half_done: Callable[[], None] = lambda: None,
    ) -> None:
        self.model: ShardModel | None = None
        self._lock = lock
        self._index = index
        self._name = name
        self._budget = budget
        self._stripes = stripes
        self._allocate = allocate
        self._on_model = on_model
        self._half_done = half_done
        # Says how far a restoration is, while one is under way.
        self.restoring: Callable[[], str] | None = None
        self._creation: Creation | None = None

    def open_locked(self, spec: ShardSpec, *, check: Callable[[], None]) -> Creation:
        """Begins to create all variables; `check` raises if the caller is not served. The latest attempt displaces one under way."""
        # Displacing may have to wait, and then everything may have changed.
        while True:
            check()
            if self._is_created_locked(spec):
                return Creation(self._lock, spec, None, end=self._end)
            if self._creation is None:
                break
            self._displace_locked(self._creation, spec)
        model = self.model or self.make(spec)
        if len(model.tables):
            # Tables have one copy: while it is written anew, there are no variables.
            model.accumulator.clear(Cancelled(f"{self._name}: the variables are created anew"))
            model.serve(0)
            self.model = None
            self._on_model()
        self._creation = Creation(self._lock, spec, model, end=self._end)
        return self._creation

    def make(self, spec: ShardSpec) -> ShardModel:
        """Returns a model whose values are undefined. Raises LimitExceeded if there is no memory for it."""
        return ShardModel(spec, budget=self._budget, stripes=self._stripes, allocate=self._allocate, half_done=self._half_done)

    def drop_model_locked(self, reason: PsError) -> None:
        """Drops contributions, creations and the model; streams under way end with `reason`, and callers find no values."""
        self.drop_locked(reason)
        if self.model is not None:
            model, self.model = self.model, None
            model.serve(0)
            self._on_model()
            model.release()

    def put_locked(self, model: ShardModel) -> None:
        """Makes a model, whose values stand, the one that is here."""
        self.model = model
        self._on_model()

    def drop_locked(self, reason: PsError) -> None:
        """Drops contributions and creations, whole or under way; their streams end with `reason`."""
        if self.model is not None:
            self.model.accumulator.clear(reason)
        while self._creation is not None:
            self._break_off_locked(self._creation, reason)

    def awaited_locked(self) -> str:
        """Says in words what is being waited for until there is a model."""
        if self.restoring is not None:
            return self.restoring()
        if self._creation is None:
            return "waiting for a worker to initialise the model"
        received, wanted = self._creation.progress
        spec = self._creation.spec
        share = f"{format_bytes(received)} of {format_bytes(wanted)} for {len(spec.layout.slices) + len(spec.layout.tables)} variables"
        return f"{share} received in attempt {spec.attempt}; waiting for the rest"

    def _is_created_locked(self, spec: ShardSpec) -> bool:
        if spec.shard != self._index:
            raise WrongRole(
                f"this is {self._name}, not ps {spec.shard}; check the addresses and their order", facts={"index": str(self._index)}
            )
        if self.model is None:
            return False
        if spec.epoch > self.model.spec.epoch and not (self.model.has_applied and self.model.step):
            # Nobody has trained it: what a worker of an earlier epoch began, or a checkpoint of step 0 had, need not be gone on with.
            self.drop_model_locked(Cancelled(f"{self._name}: the variables are created anew, in epoch {spec.epoch}"))
            return False
        words = difference(self.model.spec, spec)
        if words:
            raise VariableExists(f"{self._name}: {words}; use another cluster for another model")
        return spec.attempt <= self.model.spec.attempt or self.model.has_applied

    def _displace_locked(self, creation: Creation, spec: ShardSpec) -> None:
        newest = max(spec.attempt, creation.spec.attempt)
        reason = Cancelled(
            f"{self._name}: initialisation attempt {spec.attempt} was broken off, attempt {newest} has begun on another stream"
        )
        if spec.attempt < newest:
            raise reason
        self._break_off_locked(creation, reason)

    def _break_off_locked(self, creation: Creation, reason: PsError) -> None:
        creation.failure = reason
        # Its buffer may be written anew by another; a copy into it that is at work, which takes a moment, must end first.
        self._lock.wait_for(lambda: not creation.is_writing)
        self._forget_locked(creation)
        creation.let_go()

    def _end(self, creation: Creation, is_whole: bool) -> None:
        with self._lock:
            if creation.failure is None and is_whole and creation.model is not None:
                creation.model.publish_initial(creation.spec)
                self.model, self._creation = creation.model, None
                self._on_model()
            else:
                self._forget_locked(creation)
        if creation.spec.content_bytes >= _LARGE_BYTES:
            # The messages of the first values; none like them comes again where steps go by shared memory.
            give_back_freed_memory()

    def _forget_locked(self, creation: Creation) -> None:
        if self._creation is creation:
            self._creation = None
            if creation.model is not None and creation.model is not self.model:
                creation.model.release()
