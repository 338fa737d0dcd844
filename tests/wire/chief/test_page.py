"""The chief's page over HTTP: its content, its permissions, and that bad input changes nothing."""

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import worker_client
from chief.page import site
from chief.page.site import page_response
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.policy import PolicyName
from ps_protocol.security.options import OPEN, Security
from ps_protocol.security.permissions import CallerRole
from ps_protocol.security.tokens import new_token_lines, token_of
from ps_server.config import ParameterServerConfig
from tests.support.chief.running_chief import RunningChief
from tests.support.formats.prometheus import Read, parsed, value
from tests.support.parameter_servers.shards import open_server
from tests.support.waiting import wait_until

ACTION = {"X-Lockstep-Action": "1", "Content-Type": "application/json"}


class Reader:
    """A browser, as far as a chief's page sees it."""

    def __init__(self, url: str, *, token: str = "") -> None:
        self.url, self._headers = url, {"Authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str) -> tuple[int, Any]:
        return self._ask(urllib.request.Request(self.url + path, headers=self._headers))

    def post(self, path: str, **body: object) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        return self._ask(urllib.request.Request(self.url + path, data=data, headers={**self._headers, **ACTION}, method="POST"))

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


def test_metrics_that_workers_report_become_curves() -> None:
    with training() as (chief, session):
        wait_until(lambda: is_drawn(session, Reader(chief.page_url)), timeout_s=20, what="the loss is there")


def test_a_reader_gets_what_is_new() -> None:
    with training() as (chief, _):
        reader = Reader(chief.page_url)
        last = reader.cluster()["events"][-1][0]
        assert reader.cluster(f"?event={last}")["events"] == []
        reader.post("api/learning-rate", learning_rate=0.25)
        ((_, _, _, kind, text, _),) = reader.cluster(f"?event={last}")["events"]
        assert kind == "settings"
        assert "0.25" in text


def test_a_learning_rate_is_set() -> None:
    with training() as (chief, session):
        status, said = Reader(chief.page_url).post("api/learning-rate", learning_rate=0.125)
        assert (status, said["step"]) == (200, 0)
        train(session)
        np.testing.assert_array_equal(session.read()["w"], np.full(3, -0.125, np.float32))


def test_a_policy_is_set() -> None:
    with training() as (chief, _):
        reader = Reader(chief.page_url)
        assert reader.post("api/policy", policy="ssp", staleness=3)[0] == 200
        assert reader.cluster()["policy"] == "ssp(3)"


def test_the_page_offers_every_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = "".join(f"<option>{name.name.lower()}</option>" for name in PolicyName)
    assert f'<select name="policy">{offered}</select>' in page_response().body.decode()
    with_another = [*PolicyName, SimpleNamespace(name="ANOTHER")]
    monkeypatch.setattr(site, "PolicyName", with_another)
    assert f"{offered}<option>another</option></select>" in page_response().body.decode()


def test_a_checkpoint_needs_a_place() -> None:
    with training() as (chief, _):
        status, said = Reader(chief.page_url).post("api/checkpoint")
        assert status == 409
        assert said["reason"] == "CHECKPOINT_STORAGE_MISSING"


def test_training_is_finished() -> None:
    with training() as (chief, session):
        status, said = Reader(chief.page_url).post("api/finish", reason="seen enough")
        assert (status, said) == (200, {"step": 0})
        assert Reader(chief.page_url).cluster()["headline"].startswith("Training is finished: seen enough")
        assert session.step({"w": np.ones(3, np.float32)}).is_finished


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("api/learning-rate", {}),
        ("api/learning-rate", {"learning_rate": "0.1"}),
        ("api/learning-rate", {"learning_rate": True}),
        ("api/learning-rate", {"learning_rate": -1}),
        ("api/learning-rate", {"learning_rate": float("nan")}),
        ("api/learning-rate", {"learning_rate": 0.1, "other": 1}),
        ("api/learning-rate", {"learning_rate": 0.1, "variable": 3}),
        ("api/policy", {}),
        ("api/policy", {"policy": "best"}),
        ("api/policy", {"policy": ["sync"]}),
        ("api/policy", {"policy": "ssp", "staleness": 1.5}),
        ("api/policy", {"policy": "ssp", "staleness": -1}),
        ("api/policy", {"policy": "sync", "staleness": 2}),
        ("api/checkpoint", {"now": True}),
    ],
)
def test_bad_input_to_the_page_is_refused_with_a_reason_and_changes_nothing(path: str, body: dict[str, object]) -> None:
    with training() as (chief, _):
        reader = Reader(chief.page_url)
        before = reader.cluster()
        status, said = reader.post(path, **body)
        assert status == 400, said
        assert said["error"]
        after = reader.cluster()
        assert (after["policy"], after["optimizer"]) == (before["policy"], before["optimizer"])


@pytest.mark.parametrize("query", ["?after=x", "?event=1.5"])
def test_a_question_that_means_nothing_is_refused(query: str) -> None:
    with training() as (chief, _):
        assert Reader(chief.page_url).get(f"api/cluster{query}")[0] == 400


def test_tokens_decide_which_callers_may_look_and_which_may_act(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(new_token_lines())
    file.chmod(0o600)
    with training(Security(token_file=file)) as (chief, session):
        stranger, observer, admin = (
            Reader(chief.page_url, token=token) for token in ("", token_of(file, CallerRole.OBSERVER), token_of(file, CallerRole.ADMIN))
        )
        assert stranger.get("api/cluster")[0] == 401
        assert observer.cluster()["state"] == "training"
        for path, body in (("api/finish", {}), ("api/learning-rate", {"learning_rate": 1}), ("api/policy", {"policy": "async"})):
            assert stranger.post(path, **body)[0] == 401
            assert observer.post(path, **body)[0] == 403
        assert [one.get("api/may-act")[0] for one in (stranger, observer, admin)] == [401, 403, 200]
        assert admin.post("api/learning-rate", learning_rate=0.5)[0] == 200
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
        reader = Reader(chief.page_url)
        reader.post("api/finish", reason=evil)
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
