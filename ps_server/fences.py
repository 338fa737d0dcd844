"""Whom a parameter server serves: its epoch, the chief that has it, and whether it still works at all."""

from ps_protocol.errors import EpochMismatch, InternalError, InvalidSpec, ShuttingDown, Superseded


class Fences:
    """Epoch, incarnation and life that calls must have, as chiefs have told them.

    `name` is the server's, for texts. The caller serialises the calls.
    """

    def __init__(self, name: str) -> None:
        self.epoch = 0
        self.chief_incarnation = 0
        self.life = 0
        self._name = name
        self._damage = ""
        self._shutdown_reason: str | None = None

    def adopt(self, *, epoch: int, chief_incarnation: int, life: int = 0) -> bool:
        """Lets a chief take over, and says whether a new epoch begins; raises InvalidSpec or Superseded."""
        if epoch < 1 or chief_incarnation < 1:
            raise InvalidSpec(f"{self._name}: epoch {epoch} and chief incarnation {chief_incarnation}: want both >= 1")
        self.check_chief(chief_incarnation)
        if chief_incarnation == self.chief_incarnation:
            self.check_chief_life(life)
        if epoch < self.epoch:
            raise Superseded(f"{self._name}: cluster epoch is {self.epoch}, you have {epoch}; a later chief has rolled the cluster back")
        is_new = epoch > self.epoch
        if is_new:
            # What is damaged goes with its epoch; see `is_damaged`.
            self._damage = ""
        self.epoch, self.chief_incarnation, self.life = epoch, chief_incarnation, life
        return is_new

    @property
    def served_epoch(self) -> int:
        """The epoch whose callers are served; 0: nobody is."""
        return self.epoch if self._shutdown_reason is None and not self._damage else 0

    @property
    def is_damaged(self) -> bool:
        """Whether what is here can only be dropped."""
        return bool(self._damage)

    def check_not_ending(self) -> None:
        """Raises ShuttingDown if the server ends."""
        if self._shutdown_reason is not None:
            raise ShuttingDown(f"{self._name} is shutting down: {self._shutdown_reason}")

    def check_running(self) -> None:
        """Raises ShuttingDown or InternalError if the server serves nobody any more."""
        self.check_not_ending()
        if self._damage:
            raise InternalError(self._damage)

    def check_caller(self, epoch: int) -> None:
        """Raises EpochMismatch, or what `check_running` raises."""
        if epoch == self.epoch and epoch and self._shutdown_reason is None and not self._damage:
            return
        self.check_running()
        if not self.epoch:
            raise self.other_epoch(epoch)
        self.check_epoch(epoch)

    def check_life(self, life: int) -> None:
        """Raises EpochMismatch if the caller is known to stem from another life of the cluster."""
        if life != self.life and life and self.life:
            raise EpochMismatch(
                f"{self._name}: the cluster has begun anew since you joined it; reconnect", facts={"epoch": str(self.epoch)}
            )

    def check_chief_life(self, life: int) -> None:
        """Raises Superseded if a chief is of another life of the cluster: its number may have been given again, and says nothing."""
        if life != self.life and life and self.life:
            raise Superseded(f"{self._name}: a chief of another life of the cluster has adopted it; end this chief")

    def check_epoch(self, epoch: int) -> None:
        """Raises EpochMismatch unless it is the cluster's."""
        if epoch != self.epoch:
            raise self.other_epoch(epoch)

    def check_chief_call(self, epoch: int, chief_incarnation: int) -> None:
        """Notes the incarnation of a chief that asks for something; raises Superseded, or what `check_caller` raises."""
        self.check_not_ending()
        # First: a superseded chief is to end, whatever has become of its epoch, and not to believe that its training has failed.
        self.check_chief(chief_incarnation)
        self.check_caller(epoch)
        self.chief_incarnation = chief_incarnation

    def other_epoch(self, epoch: int) -> EpochMismatch:
        """Returns the error for a caller of another epoch."""
        stands = f"cluster epoch is {self.epoch}" if self.epoch else "no chief has adopted it since it started"
        return EpochMismatch(f"{self._name}: {stands}, you have epoch {epoch}; reconnect", facts={"epoch": str(self.epoch)})

    def refuse_from_now_on(self, reason: str) -> None:
        """Makes every later call raise ShuttingDown. The first reason stays."""
        self._shutdown_reason = self._shutdown_reason or reason or "asked to"

    def note_damage(self, step: int) -> None:
        """Makes every later call raise InternalError: what an apply changes in place is half old, half new."""
        self._damage = f"{self._name}: applying step {step} failed half-way; its values are lost, go back to a checkpoint"

    def check_chief(self, chief_incarnation: int) -> None:
        """Raises Superseded if a later chief has the server."""
        if chief_incarnation < self.chief_incarnation:
            raise Superseded(
                f"{self._name}: chief incarnation {self.chief_incarnation} has adopted it, you are {chief_incarnation}; end this chief",
                facts={"chief_incarnation": str(self.chief_incarnation)},
            )
