"""When a parameter server warns that it hears no chief. The clock is a number."""

from ps_server.server import LOOK_INTERVAL_S, ChiefSilence


def _looks(silence: ChiefSilence, start: int, end: int, *, heard_at: float | None) -> dict[int, str]:
    """Looks at every second from `start` up to `end`; returns what was said when."""
    assert LOOK_INTERVAL_S == 1.0
    ago_s = {now: None if heard_at is None else now - heard_at for now in range(start, end)}
    said = {now: silence.look(float(now), heard_ago_s=ago_s[now], address="host-p:5000") for now in range(start, end)}
    return {now: words for now, words in said.items() if words}


def test_a_server_that_no_chief_has_adopted_warns_after_ten_seconds_and_then_once_a_minute() -> None:
    said = _looks(ChiefSilence(now=0.0), 1, 140, heard_at=None)
    assert list(said) == [10, 70, 130]
    assert said[10] == "no chief has adopted this parameter server for 10 s; is the chief started with --ps naming host-p:5000?"


def test_a_server_warns_of_a_silent_chief_after_ten_seconds_and_then_once_a_minute() -> None:
    said = _looks(ChiefSilence(now=0.0), 3, 80, heard_at=3.0)
    assert list(said) == [13, 73]
    assert said[73] == (
        "the chief has been silent for 70 s; if it is gone, start it again, here or elsewhere: training then continues at its step"
    )


def test_a_chief_that_calls_is_not_silent() -> None:
    silence = ChiefSilence(now=0.0)
    for now in range(1, 200):
        assert not silence.look(float(now), heard_ago_s=1.0, address="host-p:5000")


def test_a_second_silence_of_the_chief_is_reported_again() -> None:
    silence = ChiefSilence(now=0.0)
    assert list(_looks(silence, 1, 20, heard_at=0.0)) == [10]
    assert list(_looks(silence, 20, 40, heard_at=20.0)) == [30]


def test_a_server_that_stood_still_hears_its_chief_before_it_complains() -> None:
    silence = ChiefSilence(now=0.0)
    assert not _looks(silence, 1, 5, heard_at=0.0)
    assert list(_looks(silence, 100, 120, heard_at=0.0)) == [110]
