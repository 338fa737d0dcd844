"""Posts of one author: what a post and a look at them cost, however many there are."""

import sys

import numpy as np
import pytest

from ps_protocol.roles.board import FIRST_KEY, Key, Post, Posts


def numbered(number: int) -> Post:
    return Post(key=Key(number), incarnation=1, content=np.empty(0, np.uint8))


@pytest.mark.parametrize("keeps_from", [FIRST_KEY, Key(1)])
def test_the_work_for_a_post_does_not_grow_with_what_was_posted_before(keeps_from: Key) -> None:
    posts, num_calls = Posts(), 0
    for number in range(2000):
        posts.add(numbered(number), keeps_from=FIRST_KEY)

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        posts.add(numbered(2000), keeps_from=keeps_from)
        found = posts.first(Key(1999))
    finally:
        sys.setprofile(None)
    assert found is not None and found.key == Key(1999)
    assert num_calls <= 50
