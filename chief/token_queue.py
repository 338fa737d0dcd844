"""Strict accounting of the tokens of the open step. Knows worker numbers and steps; no leases, calls or clocks.

A token of the open step that a worker gets because it has an older one ("base token") is a matter of state: ask again, get it again.
With fewer workers than contributions a step has extra tokens, shared by all; those are counted here: free, held, or spent.
"""

from dataclasses import dataclass

from ps_protocol.errors import StepAhead


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    request_id: int
    may_take_extra: bool


class TokenQueue:
    """Waiting workers in order of their asking, and the extra tokens. Never hands out a token of a step gone by."""

    def __init__(self, *, num_extras: int, step: int = 0) -> None:
        self.step = step
        self.num_free = num_extras
        self._num_extras = num_extras
        self._held: set[int] = set()
        self._last_extra: dict[int, int] = {}  # worker -> request id of its latest extra of this step
        self._wishes: dict[int, _Wish] = {}

    @property
    def waiting(self) -> tuple[int, ...]:
        """The workers that wait, in order of their asking."""
        return tuple(self._wishes)

    def ask(self, worker: int, *, local_step: int, request_id: int, may_take_extra: bool) -> int | None:
        """Returns the step of a token, or None: the worker waits, and is named by `open_step`, `drop` or `allow_extra` when it gets one."""
        if local_step > self.step:
            raise StepAhead(f"local_step {local_step} is ahead of global_step {self.step}; read again")
        if local_step < self.step or worker in self._held or request_id <= self._last_extra.get(worker, -1):
            self._wishes.pop(worker, None)
            return self.step
        if may_take_extra and self.num_free:
            self._wishes.pop(worker, None)
            self._take_extra(worker, request_id)
            return self.step
        # A repeated wish keeps its place.
        self._wishes[worker] = _Wish(request_id=request_id, may_take_extra=may_take_extra)
        return None

    def allow_extra(self, worker: int) -> list[int]:
        """Lets a waiting worker take an extra from now on; returns the workers that get a token by it."""
        wish = self._wishes.get(worker)
        if wish is not None:
            self._wishes[worker] = _Wish(request_id=wish.request_id, may_take_extra=True)
        return self._hand_out()

    def holds_extra(self, worker: int) -> bool:
        """Whether the worker has an extra token that it has not contributed with yet."""
        return worker in self._held

    def spend_extra(self, worker: int) -> bool:
        """Uses up the worker's extra token; False if it holds none."""
        if worker not in self._held:
            return False
        self._held.remove(worker)
        return True

    def forget_wish(self, worker: int) -> None:
        """Stops waiting on behalf of a worker; an extra that it holds stays its own."""
        self._wishes.pop(worker, None)

    def drop(self, worker: int) -> list[int]:
        """Forgets a worker that is gone and takes its unspent extra back; returns the workers that get a token by it."""
        self._wishes.pop(worker, None)
        self._last_extra.pop(worker, None)
        if self.spend_extra(worker):
            self.num_free += 1
        return self._hand_out()

    def open_step(self, step: int) -> list[int]:
        """Opens the next step; returns the workers that waited for it: each has a token of it now."""
        released = list(self._wishes)
        self.step, self.num_free = step, self._num_extras
        self._held.clear()
        self._last_extra.clear()
        self._wishes.clear()
        return released

    def _take_extra(self, worker: int, request_id: int) -> None:
        self.num_free -= 1
        self._held.add(worker)
        self._last_extra[worker] = request_id

    def _hand_out(self) -> list[int]:
        if not self.num_free:
            return []
        lucky = [worker for worker, wish in self._wishes.items() if wish.may_take_extra][: self.num_free]
        for worker in lucky:
            self._take_extra(worker, self._wishes.pop(worker).request_id)
        return lucky
