"""The model that the workers of a cluster agree on, and who initialises it. Knows no call, shard or clock."""

from ps_protocol.errors import InvalidSpec, ModelMismatch, NotInitializer
from ps_protocol.model.layout import Layout
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec, Placement, layouts, place
from ps_protocol.roles.chief import ModelState
from ps_protocol.roles.shard import ShardSpec

_MAX_DIFFERENCES = 10


class ModelRegistry:
    """Agrees on a model and elects its initialiser: the first to present it, or, if that one is gone, the next who asks."""

    def __init__(self, *, num_shards: int) -> None:
        self.model: ModelSpec | None = None
        self.placement: Placement = ()
        self.layouts: tuple[Layout, ...] = ()
        self.attempt = 0
        self.is_created = False
        self.is_ready = False
        self.initializer: tuple[int, int] | None = None  # worker, incarnation
        # Names of the layouts that shards hold values of, while the model itself is unknown.
        self.held: tuple[str, ...] = ()
        self._num_shards = num_shards

    @property
    def state(self) -> ModelState:
        """ABSENT, WAIT (not initialised yet) or READY."""
        if self.model is None:
            return ModelState.ABSENT
        return ModelState.READY if self.is_ready else ModelState.WAIT

    def check_policy(self, policy: PolicySpec) -> None:
        """Raises InvalidSpec if the model that stands cannot be trained so."""
        if self.model is not None:
            check_clip(self.model, policy)

    def check_placeable(self, model: ModelSpec) -> None:
        """Raises InvalidSpec if a model cannot lie on these shards."""
        place(model, num_shards=self._num_shards)

    def check(self, model: ModelSpec) -> None:
        """Raises ModelMismatch if another model stands."""
        if self.model is None or model == self.model:
            return
        differences = self.model.differences(model) or ["it differs"]
        rest = len(differences) - _MAX_DIFFERENCES
        text = "; ".join(differences[:_MAX_DIFFERENCES]) + (f"; and {rest} more differences" if rest > 0 else "")
        raise ModelMismatch(
            f"your model is not the one that this cluster trains: {text}. Start all workers with the same model, or"
            " begin anew: restart the cluster, with --restore none if it has checkpoints"
        )

    def join(self, worker: int, incarnation: int, model: ModelSpec) -> ModelState:
        """Presents a model; returns INITIALIZE, WAIT or READY. Raises ModelMismatch."""
        self.check(model)
        if self.is_ready:
            return ModelState.READY
        if self.model is None:
            self._place(model)
        if self.is_created:
            return ModelState.WAIT  # the shards have its values; they are about to work on
        if self.initializer is None:
            self.initializer = (worker, incarnation)
            self.attempt += 1
        return ModelState.INITIALIZE if self.initializer == (worker, incarnation) else ModelState.WAIT

    def complete(self, worker: int, incarnation: int, *, attempt: int) -> bool:
        """The initial values are there. False if that was known. Raises NotInitializer."""
        if self.initializer != (worker, incarnation) or attempt != self.attempt:
            now = "nobody has it now" if self.initializer is None else f"worker {self.initializer[0]} has it (attempt {self.attempt})"
            raise NotInitializer(
                f"worker {worker} (attempt {attempt}) does not have the task of initialising the model: {now}. Register the model again"
            )
        was_created, self.is_created = self.is_created, True
        return not was_created

    def restore(self, model: ModelSpec) -> None:
        """The shards hold this model's values, or are about to."""
        if self.model is None:
            self._place(model)
        self.is_created, self.is_ready = True, False

    def restart(self) -> None:
        """There is no model: the first worker that presents one initialises it."""
        self.model, self.placement, self.layouts, self.held = None, (), (), ()
        self.is_created = self.is_ready = False
        self.initializer = None

    def shard_specs(self, *, epoch: int, step: int, max_staged_per_worker: int) -> tuple[ShardSpec, ...]:
        """Returns what is to lie at each shard that is brought back to this step, under this epoch; there must be a model."""
        model = self.model
        assert model is not None
        return tuple(
            ShardSpec(
                epoch=epoch,
                shard=index,
                layout=layout,
                optimizer=model.optimizer,
                initial_step=step,
                attempt=max(1, self.attempt),
                max_staged_per_worker=max_staged_per_worker,
                averages=model.averages,
                clip=model.clip,
            )
            for index, layout in enumerate(self.layouts)
        )

    def _place(self, model: ModelSpec) -> None:
        placement = place(model, num_shards=self._num_shards)
        found = layouts(placement, num_shards=self._num_shards)
        if self.held and self.held != tuple(layout.hash for layout in found):
            raise ModelMismatch(
                "your model is not the one whose values the parameter servers hold; start all workers with the same model,"
                " or restart the cluster"
            )
        self.placement, self.layouts, self.model = placement, found, model
        self.is_created = bool(self.held)

    def open(self) -> None:
        """The shards work as they shall: training may begin."""
        self.is_ready = True

    def release(self, worker: int) -> bool:
        """A worker is gone; True if it was to initialise the model, and somebody else must."""
        if self.is_created or self.initializer is None or self.initializer[0] != worker:
            return False
        self.initializer = None
        return True


def check_clip(model: ModelSpec, policy: PolicySpec) -> None:
    """Raises InvalidSpec if the policy cannot keep the model's limits."""
    if policy.applies_on_arrival and model.clip.needs_norms:
        raise InvalidSpec(
            "clip: a norm over all parameter servers needs a step that they apply together, and under async without locking"
            " there is none; use use_locking=True, or clip by value"
        )
