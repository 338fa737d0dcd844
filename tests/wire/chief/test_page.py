"""The chief's page over HTTP: its content, who may look, and that nobody can change anything by it."""

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.optimizers import constant
from ps_protocol.roles.chief import ChangeSettingsRequest, HyperparameterChange
from ps_protocol.roles.request import CallerRole
from ps_protocol.security.options import OPEN, Security
from ps_protocol.security.tokens import new_token_lines, token_of
from ps_server.config import ParameterServerConfig
from tests.support.chief.running_chief import RunningChief, client_of
from tests.support.formats.prometheus import Read, parsed, value
from tests.support.parameter_servers.shards import open_server
from tests.support.waiting import wait_until


class Reader:
    """A browser, as far as a chief's page sees it."""

    def __init__(self, url: str, *, token: str = "") -> None:
        self.url, self._headers = url, {"Authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str, *, method: str = "GET") -> tuple[int, Any]:
        return self._ask(urllib.request.Request(self.url + path, headers=self._headers, method=method))

    def cluster(self, query: str = "") -> dict[str, Any]:
        status, value = self.get(f"api/cluster{query}")
        assert status == 200, value
        found: dict[str, Any] = value
        return found

    @staticmethod
    def _ask(request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())


@contextlib.contextmanager
def training(security: Security = OPEN, **options: Any) -> Iterator[tuple[RunningChief, worker_client.Session]]:
    """A chief with a page, a server, and a worker whose model stands."""
    with (
        open_server(ParameterServerConfig(index=0, security=security)) as server,
        RunningChief(server.address, page="127.0.0.1:0", total_num_replicas=1, security=security, **options) as chief,
        worker_client.connect(chief.address, security=security) as session,
    ):
        session.create_or_join({"w": np.zeros(3, np.float32)}, optimizer=worker_client.sgd(0.5))
        yield chief, session


def train(session: worker_client.Session, num_steps: int = 1, **metrics: float) -> None:
    for _ in range(num_steps):
        session.step({"w": np.ones(3, np.float32)}, metrics=metrics or None)


def test_a_reader_sees_the_training() -> None:
    with training(max_steps=100) as (chief, session):
        train(session, 5)
        seen = Reader(chief.page_url).cluster()
        assert (seen["state"], seen["step"], seen["max_steps"], seen["policy"]) == ("training", 5, 100, "sync")
        (worker,) = [dict(zip(seen["workers"]["columns"], row, strict=True)) for row in seen["workers"]["rows"]]
        assert (worker["kind"], worker["index"], worker["accepted"]) == ("worker", 0, 5)
        steps = [dict(zip(seen["steps"]["columns"], row, strict=True)) for row in seen["steps"]["rows"]]
        assert [step["step"] for step in steps] == [0, 1, 2, 3, 4]
        assert all(step["last"] == 0 and step["compute_s"] >= 0.0 and step["apply_s"] > 0.0 for step in steps)
        assert {event[3] for event in seen["events"]} >= {"joined"}


def test_a_reader_sees_what_became_of_the_keys_of_tables() -> None:
    table = worker_client.EmbeddingTable(2, keys="int64", max_rows=4)
    with (
        open_server(ParameterServerConfig(index=0)) as server,
        RunningChief(server.address, page="127.0.0.1:0", total_num_replicas=1) as chief,
        worker_client.connect(chief.address) as session,
    ):
        session.create_or_join({"ids": table}, optimizer=worker_client.sgd(0.5))
        for first in (0, 100):
            keys = np.arange(first, first + 4)
            session.step({"ids": worker_client.IndexedSlices(keys, np.ones((4, 2), np.float32))})
        reader = Reader(chief.page_url)
        wait_until(
            lambda: (reader.cluster()["servers"][0]["report"] or {}).get("num_made", 0) > 4, what="the server has reported both steps"
        )
        found = reader.cluster()["servers"][0]["report"]
        assert found["num_rows"] == found["num_made"] - found["num_evicted"] <= 4
        assert found["num_unadmitted"] == 0


def set_learning_rate(chief: RunningChief, rate: float) -> None:
    with client_of(chief) as client:
        client.call(
            ChangeSettingsRequest(hyperparameters=HyperparameterChange(learning_rate=constant(rate)), request_id=1, max_wait_s=10.0)
        )


def test_a_reader_gets_what_is_new() -> None:
    with training() as (chief, _):
        reader = Reader(chief.page_url)
        last = reader.cluster()["events"][-1][0]
        assert reader.cluster(f"?event={last}")["events"] == []
        set_learning_rate(chief, 0.25)
        ((_, _, _, kind, text, _),) = reader.cluster(f"?event={last}")["events"]
        assert kind == "settings"
        assert "0.25" in text


def test_the_status_names_the_page() -> None:
    with training() as (chief, _), client_of(chief) as client:
        assert client.status().page_url == chief.page_url


@pytest.mark.parametrize("query", ["?after=x", "?event=1.5"])
def test_a_question_that_means_nothing_is_refused(query: str) -> None:
    with training() as (chief, _):
        assert Reader(chief.page_url).get(f"api/cluster{query}")[0] == 400


def test_tokens_decide_who_may_look(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(new_token_lines())
    file.chmod(0o600)
    with training(Security(token_file=file)) as (chief, session):
        stranger, observer = (Reader(chief.page_url, token=token) for token in ("", token_of(file, CallerRole.OBSERVER)))
        assert stranger.get("api/cluster")[0] == 401
        assert observer.cluster()["state"] == "training"
        # The metrics are read with the chief's own token.
        wait_until(lambda: is_drawn(session, observer), timeout_s=20, what="the loss is there")


def is_drawn(session: worker_client.Session, reader: Reader) -> bool:
    """Trains a step with a loss of 2.5, and looks whether the page has one."""
    train(session, loss=2.5)
    return any(value == 2.5 for _, _, value in reader.cluster()["metrics"].get("loss", ()))


def test_nothing_that_a_worker_says_is_markup() -> None:
    evil = '<script>alert(1)</script>"&'
    with training() as (chief, session):
        train(session, 2, **{evil: 1.0})
        with urllib.request.urlopen(f"{chief.page_url}api/cluster", timeout=10) as response:
            assert response.headers["Content-Type"] == "application/json; charset=utf-8"
            assert "script-src" not in response.headers["Content-Security-Policy"]


def test_the_page_runs_its_own_script_and_nothing_else() -> None:
    with training() as (chief, _), urllib.request.urlopen(chief.page_url, timeout=10) as response:
        policy, text = response.headers["Content-Security-Policy"], response.read().decode()
        assert "default-src 'none'" in policy
        assert "'unsafe-inline'" not in policy
        assert policy.count("sha256-") == 2
        assert "https://" not in text and "@import" not in text and "innerHTML" not in text


@pytest.mark.parametrize("page", ["unix:/tmp/page", "0.0.0.0:0", "nonsense"])
def test_an_address_that_is_no_place_for_a_page_is_refused(page: str) -> None:
    with pytest.raises(InvalidSpec):
        RunningChief("127.0.0.1:1", page=page, total_num_replicas=1)


def test_training_continues_though_the_page_cannot_be_served() -> None:
    with training() as (first, _):
        taken = first.page_url.removeprefix("http://").rstrip("/")
        with (
            open_server(ParameterServerConfig(index=0)) as server,
            RunningChief(server.address, page=taken, total_num_replicas=1) as other,
            worker_client.connect(other.address) as session,
        ):
            session.create_or_join({"w": np.zeros(3, np.float32)}, optimizer=worker_client.sgd(0.5))
            train(session)


def test_scraper_finds_the_cluster_and_what_workers_report_at_the_port_of_the_page() -> None:
    with training() as (chief, session):

        def scraped() -> dict[str, Read]:
            with urllib.request.urlopen(f"{chief.page_url}metrics", timeout=30) as response:
                return parsed(response.read().decode())

        def is_there() -> bool:
            train(session, loss=0.5)
            return "lockstep_reported_weighted_value" in scraped()

        wait_until(is_there, timeout_s=20, what="the loss is exported")
        found = scraped()
        mean = value(found, "lockstep_reported_weighted_value", metric="loss") / value(found, "lockstep_reported_weight", metric="loss")
        assert mean == 0.5 and value(found, "lockstep_cluster_global_step") > 0
