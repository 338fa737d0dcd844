"""The iterator over a worker's ranges of the training data. Decides nothing."""

from collections.abc import Iterator

from ps_protocol.model.data import DataRange, DataSpec
from ps_protocol.process.waiting import Wait
from worker_client.core.data import WorkerData
from worker_client.core.requests import run
from worker_client.session.calls import WorkerCalls
from worker_client.session.membership import Membership


class DataBatches:
    """Made by `Session.batches()`. For one thread."""

    def __init__(self, spec: DataSpec, *, calls: WorkerCalls, member: Membership, former: "DataBatches | None") -> None:
        self.spec = spec
        self.timeout_s: float | None = None
        self._calls, self._member = calls, member
        first: int = 1 if former is None else former.data.request_id + 1
        self.data: WorkerData = WorkerData(spec, calls.worker, request_id=first, begin_wait=Wait)

    def __iter__(self) -> Iterator[DataRange]:
        return self

    def __next__(self) -> DataRange:
        self._member.check_open()
        given = run(self.data.next(timeout_s=self.timeout_s), self._calls.acts)
        if given is None:
            raise StopIteration
        return given
