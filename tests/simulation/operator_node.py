"""Somebody who orders something of a simulated chief, wherever it is: asks until it is done or refused. Knows no promise."""

import itertools
from collections.abc import Callable
from typing import Any

from ps_protocol.errors import NotInitialized, PsError, ShuttingDown, Unavailable
from ps_protocol.roles.chief import SavedCheckpoint
from ps_protocol.roles.request import Request
from tests.simulation.tasks import Answer, Call, Life, Sleep
from tests.simulation.world import World

_PAUSE_S = 0.3
_LIMIT_S = 8.0
# What another try is of use for.
_PASSING = (Unavailable, ShuttingDown, NotInitialized)
_names = itertools.count(1)


class OperatorNode:
    """Orders one thing. `chief` names the chief that was started last."""

    def __init__(self, world: World, life: Life, *, request: Request[Any], chief: Callable[[], str]) -> None:
        self._world, self._request, self._chief = world, request, chief
        world.spawn(life, self._run(), lambda _: world.kill(life.name))

    def serve(self, method: str, arguments: tuple[Any, ...], answer: Answer) -> None:
        """Nobody calls it."""
        raise AssertionError(method)

    async def _run(self) -> None:
        what = type(self._request).__name__
        while True:
            try:
                reply = await Call(self._chief(), "ask", (self._request,), timeout_s=_LIMIT_S)
            except _PASSING:
                await Sleep(_PAUSE_S)
                continue
            except PsError as error:
                self._world.seen[f"{what} refused: {type(error).__name__}"] += 1
                return
            if reply is not None and not (isinstance(reply, SavedCheckpoint) and not reply.tag):
                self._world.seen[f"{what} carried out"] += 1
                return


def start_operator(world: World, *, request: Request[Any], chief: Callable[[], str]) -> None:
    """Starts one."""
    world.start(f"operator-{next(_names)}", lambda life: OperatorNode(world, life, request=request, chief=chief))
