"""Calls to several replicas at once: which have succeeded, and which are lost. Knows tasks and failures; decides no membership."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from chief.replica import GRACE_S, Replica, ReplicaLink, why_lost
from chief.shard_calls import TRANSIENT
from ps_protocol.errors import PsError, Superseded
from ps_protocol.shard import Adoption

_MAX_REPETITIONS = 5
_APPLY_TIMEOUT_S = 60.0

Result = TypeVar("Result")
Tasks = dict[Replica, "asyncio.Future[Any]"]


async def all_of(*calls: Awaitable[Any]) -> list[Any]:
    """Returns answers and PsErrors, in order; whatever else is raised, is."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, PsError):
            raise answer
    return answers


async def finished(tasks: Tasks, *, chief_incarnation: int) -> dict[Replica, str]:
    """Returns once all have ended but for those that are lost, with the reasons: nobody waits for these once another has succeeded."""
    lost: dict[Replica, str] = {}
    try:
        while pending := [task for one, task in tasks.items() if not task.done() and one not in lost]:
            has_one = any(map(has_succeeded, tasks.values()))
            await asyncio.wait(pending, timeout=GRACE_S / 2 if has_one else None, return_when=asyncio.FIRST_COMPLETED)
            if has_one:
                for one, task in tasks.items():
                    if not task.done() and one not in lost and (why := await why_lost(one, chief_incarnation=chief_incarnation)):
                        lost[one] = why
    finally:
        for task in tasks.values():
            task.cancel()
    return lost


async def once_more(
    one: Replica, call: Callable[[ReplicaLink], Awaitable[Result]], error: PsError, *, chief_incarnation: int
) -> "Result | PsError":
    """What one has failed in where another has succeeded: a refusal is final, a connection that broke may be made again.

    Returns the answer, or the failure. Raises Superseded.
    """
    for _ in range(_MAX_REPETITIONS):
        if isinstance(error, Superseded):
            raise error
        if not isinstance(error, TRANSIENT) or await why_lost(one, chief_incarnation=chief_incarnation):
            break
        try:
            return await call(one.link)
        except PsError as later:
            error = later
    return error


async def goes_along(one: Replica, found: Adoption, best: Adoption, *, chief_incarnation: int) -> bool:
    """Whether a replica that an earlier chief left has the same as the best, if need be by the one step that it lacks. Says why not."""
    last = best.last_apply
    if (found.step, found.layout_hash) == (best.step, best.layout_hash):
        return True
    one.missing = f"it was at step {found.step}, and the other replica at step {best.step}" if found.step is not None else "it is empty"
    if last is None or found.step is None or found.step != last.step or best.step != last.step + 1:
        return False
    try:
        await one.link.apply_step(replace(last, chief_incarnation=chief_incarnation), timeout_s=_APPLY_TIMEOUT_S)
    except PsError as error:
        one.missing += f", which it could not follow: {error.message}"
        return False
    return True


def has_succeeded(task: "asyncio.Future[Any]") -> bool:
    """Whether a call has brought an answer."""
    return task.done() and not task.cancelled() and task.exception() is None


def error_of(task: "asyncio.Future[Any]") -> BaseException | None:
    """Returns what a call has raised."""
    return task.exception() if task.done() and not task.cancelled() else None


def order_of(error: PsError) -> int:
    """Sorts failures: what ends the chief comes first, then what may be repeated, and then refusals."""
    return 0 if isinstance(error, Superseded) else 1 if isinstance(error, TRANSIENT) else 2
