"""How many generated examples a test runs: a fifth in `make test`, and all of them at night. Knows no test."""

from hypothesis import HealthCheck, settings

# By name, of `--hypothesis-profile`: the share of examples in per cent.
PROFILES = {"full": 100, "fast": 20}


def register_profiles() -> None:
    # On a busy machine a single example may take long, and is right all the same; every test has its time limit anyway.
    for name, percent in PROFILES.items():
        settings.register_profile(name, max_examples=percent, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
    settings.load_profile("fast")


def examples(num: int) -> int:
    """Returns the share of `num` that this run makes."""
    return max(1, num * settings().max_examples // PROFILES["full"])


def machine_settings(*, num_examples: int, num_steps: int) -> settings:
    """Settings of a state machine: the same examples in every run."""
    return settings(
        max_examples=examples(num_examples),
        stateful_step_count=num_steps,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
