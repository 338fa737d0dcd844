"""SyncReplicasOptimizer with the API of tf.compat.v1.train. Knows graphs and policies; the cluster has the queue and the accumulators.

In the original, the chief worker runs a thread that takes means, applies them, and fills a queue of tokens. Here the chief process does
that for all workers, and the methods for that thread return stand-ins, so that programs need no change. The rules are the original's;
docs/how-to/migrate.md lists each, and the repaired defects.
"""

from collections.abc import Iterable
from typing import Any

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.chief import ClusterState
from worker_client.model.policies import sync_policy
from worker_client.sync_replicas.averages import ExponentialMovingAverage
from worker_client.sync_replicas.gradients import TrainOp, check_pairs, is_gradient
from worker_client.sync_replicas.graph import Graph, ModelVariable, Run, default_graph
from worker_client.sync_replicas.hooks import Coordinator, SessionRunHook
from worker_client.sync_replicas.optimizers import Optimizer, SlotVariable, as_optimizer, checked


class SyncReplicasOptimizer(Optimizer):
    """Collects gradients of `replicas_to_aggregate` (R) contributions, averages them, and has `opt` apply the mean, as one step.

    `opt`: an optimizer of this package, or what `lockstep.adam()` and the like return. `total_num_replicas` (T): the number of
    workers, None means R. With T > R the first R contributions win; with T < R a worker contributes several a step. `variable_averages`, an
    `ExponentialMovingAverage`, follows `variables_to_average` (None: all trainable ones) within the step. `use_locking` is accepted and has
    no effect, as in the original: a synchronous step is atomic anyway. `name` is what `get_name()` returns. Contributions are averaged, not
    summed: scale the learning rate yourself. Raises ValueError for R or T < 1, TypeError for another kind of `opt`.
    """

    def __init__(
        self,
        opt: Optimizer | OptimizerSpec,
        replicas_to_aggregate: int,
        total_num_replicas: int | None = None,
        variable_averages: ExponentialMovingAverage | None = None,
        variables_to_average: Iterable[ModelVariable] | None = None,
        use_locking: bool = False,
        name: str = "sync_replicas",
    ) -> None:
        del use_locking
        if isinstance(opt, SyncReplicasOptimizer):
            raise TypeError(f"opt: got {opt!r}, want the optimizer that it wraps")
        self._opt = as_optimizer(opt)
        super().__init__(self._opt.spec, name=name)
        self._replicas = replicas_to_aggregate
        self._total = replicas_to_aggregate if total_num_replicas is None else total_num_replicas
        for what, value in (("replicas_to_aggregate", self._replicas), ("total_num_replicas", self._total)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{what}: got {value!r}, want a number of replicas >= 1")
        self._averages = variable_averages
        self._variables_to_average = None if variables_to_average is None else list(variables_to_average)
        self._graph: Graph | None = None
        self._policy = self._policy_with(-1)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, ModelVariable]]:
        """Returns pairs of a gradient's handle and its variable: `compute_gradients()` of the wrapped optimizer, with its arguments.

        Use `map` or `map_gradients` on the handles to clip each replica's own gradient; the servers can clip the mean.
        """
        return self._opt.compute_gradients(*args, **kwargs)

    def apply_gradients(self, grads_and_vars: Iterable[Any], global_step: Any = None, name: str | None = None) -> TrainOp:
        """Returns the op that every worker runs: push the gradients, then take a token, which is the step of the next variables.

        A gradient that comes too late for its step is dropped, and `session.run(op)` reports it (`TrainResult.outcome`). A None gradient
        leaves its variable unchanged. `name` names the op. Raises ValueError if there is no variable, no `global_step`, another kind of
        gradient, a variable twice, or no gradient at all.
        """
        del name  # ignored by the original as well
        given = list(grads_and_vars)
        if not given:
            raise ValueError("Must supply at least one variable")
        if global_step is None:
            raise ValueError("Global step is required to check staleness")
        pairs = check_pairs(given)
        for gradient, _ in pairs:
            if gradient is not None and not is_gradient(gradient):
                raise ValueError(f"Unknown grad type! {gradient!r}")
        self._graph = default_graph()
        op = self._opt.train(pairs, policy=self._policy, name=self.get_name())
        if self._averages is not None:
            self._averages.apply(self._variables_to_average)
        return op

    def get_chief_queue_runner(self) -> "ChiefQueueRunner":
        """Returns a stand-in for the chief's thread. Starting it does nothing: the chief process does the work.

        Raises ValueError before `apply_gradients()`.
        """
        if self._graph is None:
            raise ValueError("Should be called after apply_gradients().")
        return ChiefQueueRunner(name=self.get_name())

    def get_init_tokens_op(self, num_tokens: int = -1) -> "InitTokensOp":
        """Returns the op that begins training with `num_tokens` tokens (-1: R), each with the global step of that moment.

        The chief worker runs it once, unless it uses the hook, which runs it by itself. Raises ValueError before `apply_gradients()`, and
        for fewer tokens than R - T, because then the first step could not be finished.
        """
        if self._graph is None:
            raise ValueError("get_init_tokens_op() should be called after apply_gradients().")
        needed = self._replicas - self._total
        if num_tokens != -1 and num_tokens < needed:
            raise ValueError(f"Too few tokens to finish the first step: {num_tokens} (given) vs {needed} (needed)")
        return InitTokensOp(self._policy_with(num_tokens))

    def make_session_run_hook(self, is_chief: bool, num_tokens: int = -1) -> "SyncReplicasHook":
        """Returns the hook that a worker gives to its session; the chief's sets R, T and the initial tokens of the cluster.

        `num_tokens`: see `get_init_tokens_op`; with 0 and R = T, each worker contributes one gradient per step from the first step on. May
        be called before `apply_gradients()`, but not used before.
        """
        return SyncReplicasHook(self, is_chief=is_chief, num_tokens=num_tokens)

    def get_slot(self, *args: Any, **kwargs: Any) -> SlotVariable | None:
        """Returns a slot of the wrapped optimizer, None if there is none: `get_slot(var, name)`."""
        return self._opt.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> list[str]:
        """Returns the sorted names of the wrapped optimizer's slots."""
        return self._opt.get_slot_names(*args, **kwargs)

    def variables(self) -> list[Any]:
        """Returns the wrapped optimizer's variables, sorted by name; a worker's local step is not one of them."""
        return self._opt.variables()

    def begin(self, *, is_chief: bool, num_tokens: int) -> None:
        """Sets how the graph's training begins; called by the hook. Raises ValueError as `get_init_tokens_op` does."""
        if self._graph is None:
            raise ValueError("SyncReplicasOptimizer.apply_gradient should be called before using the hook.")
        if is_chief:
            self._policy = self.get_init_tokens_op(num_tokens).policy
            self._graph.policy = self._policy

    def _policy_with(self, num_tokens: int) -> PolicySpec:
        policy: PolicySpec = checked(
            sync_policy,
            tokens="fifo",
            num_tokens=-1 if num_tokens == -1 else max(0, num_tokens),
            replicas_to_aggregate=self._replicas,
            total_num_replicas=self._total,
        )
        return policy


class SyncReplicasHook(SessionRunHook):
    """Makes a session train synchronously; made by `make_session_run_hook()`. On workers other than the chief it only checks."""

    def __init__(self, optimizer: SyncReplicasOptimizer, *, is_chief: bool, num_tokens: int) -> None:
        self._optimizer = optimizer
        self.is_chief = is_chief
        self.num_tokens = num_tokens

    def begin(self) -> None:
        """Has the chief worker's session set the policy before the model is made. Raises ValueError before `apply_gradients()`."""
        self._optimizer.begin(is_chief=self.is_chief, num_tokens=self.num_tokens)

    def after_create_session(self, session: Any, coord: Coordinator) -> None:
        """Raises RuntimeError if the cluster has another policy, for example if the chief worker runs without this hook's optimizer."""
        status = session.status()
        if status.state is ClusterState.TRAINING and not status.policy.has_common_steps:
            raise RuntimeError(
                f"Init operations did not make model ready for SyncReplicasOptimizer local_init: the cluster trains {status.policy.text};"
                " have the chief worker use the same SyncReplicasOptimizer, with make_session_run_hook(is_chief=True)"
            )


@light_dataclass(frozen=True, slots=True, eq=False)
class InitTokensOp:
    """Begins synchronous training with some tokens; see `get_init_tokens_op`."""

    policy: PolicySpec
    phase: int = 0

    def evaluate(self, run: Run) -> None:
        """Sets the policy, unless the cluster has it since the session's creation; so running this op after the hook adds no tokens."""
        if run.graph.policy != self.policy:
            run.session.set_policy(self.policy)
            run.graph.policy = self.policy


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ChiefQueueRunner:
    """A stand-in for the thread of the original's chief; the chief process does its work from the start."""

    name: str

    def create_threads(self, sess: Any, coord: Any = None, daemon: bool = False, start: bool = False) -> list[Any]:
        """Returns no threads: there is nothing to start."""
        del sess, coord, daemon, start
        return []
