"""The lines of workers' output that are shown when several print the same traceback."""

from lockstep.launcher.repeated import RepeatedTracebacks, without_traceback

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "train.py", line 9, in <module>',
    "    main()",
    "ShapeMismatch: gradient for 'w'",
]
OTHER = [*TRACEBACK[:2], "    train()", "ShapeMismatch: gradient for 'b'"]


def shown(*lines: tuple[str, str]) -> list[tuple[str, str]]:
    tracebacks = RepeatedTracebacks()
    return [(name, one) for name, line in lines for one in tracebacks.shown(name, line)]


def test_a_traceback_is_shown_for_the_first_worker_and_named_for_the_others() -> None:
    first, second, third = ([(name, line) for line in TRACEBACK] for name in "abc")
    named = "ShapeMismatch: gradient for 'w'   (the traceback is that of a)"
    assert shown(*first, ("b", "hello"), *second, *third, ("b", "bye")) == [
        *first, ("b", "hello"), ("b", named), ("c", named), ("b", "bye")
    ]  # fmt: skip


def test_workers_that_print_line_by_line_at_once_show_it_once_where_one_is_ahead() -> None:
    pairs = [pair for line in TRACEBACK for pair in (("a", line), ("b", line))]
    assert [line for name, line in shown(*pairs) if name == "a"] == TRACEBACK
    assert [line for name, line in shown(*pairs) if name == "b"] == [f"{TRACEBACK[-1]}   (the traceback is that of a)"]


def test_another_traceback_is_shown_whole_and_so_is_a_second_one_of_the_same_worker() -> None:
    first, other = [("a", line) for line in TRACEBACK], [("b", line) for line in OTHER]
    assert shown(*first, *other, *first) == [*first, *other, *first]
    third = [("c", line) for line in OTHER]
    assert shown(*first, *other, *third)[-1] == ("c", f"{OTHER[-1]}   (the traceback is that of b)")


def test_of_a_traceback_the_error_is_left_also_where_its_beginning_is_lost() -> None:
    assert without_traceback(["step 3", *TRACEBACK, "bye"]) == ["step 3", TRACEBACK[-1], "bye"]
    assert without_traceback(TRACEBACK[1:]) == [TRACEBACK[-1]]
    assert without_traceback(["  indented", "bad luck"]) == ["  indented", "bad luck"]
    assert without_traceback([*TRACEBACK[:2]]) == TRACEBACK[:2], "one that is cut off is kept"
