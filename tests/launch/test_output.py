"""What a process prints, line by line."""

import io
import sys
import tracemalloc

import pytest

from flyte_ddp.launch.output import capture_lines


def follow_lines(*printed):
    """What is passed on of text and bytes that are written one after the other."""
    lines: list[str] = []
    with capture_lines(lines.append, lines.append):
        for piece in printed:
            (sys.stdout if isinstance(piece, str) else sys.stdout.buffer).write(piece)
    return lines


@pytest.mark.parametrize(
    ("printed", "lines"),
    [
        (["a\nb\n", "\nc\n"], ["a", "b", "", "c"]),
        (["in ", "pieces\n", "without an end"], ["in pieces", "without an end"]),
        (["dos\r\n", "dos\r", "\n"], ["dos", "dos"]),
        (["\r 10 %", "\r 20 %", "\r100 %\n", "done\n"], ["100 %", "done"]),
        ([" 10 %\r", " 20 %\r"], [" 20 %"]),
        (["undecodable \udce4\n", "été\n"], ["undecodable \\udce4", "été"]),
        ([b"bytes \xe4\n", "text\n"], ["bytes \\xe4", "text"]),
    ],
)
def test_lines_are_those_that_a_terminal_would_show(printed, lines):
    assert follow_lines(*printed) == lines


def test_a_progress_bar_that_never_ends_its_line_is_not_kept():
    tracemalloc.start()
    lines: list[str] = []
    with capture_lines(lines.append, lines.append):
        for _ in range(1000):
            sys.stdout.write("\r" + 1000 * "=")
        assert tracemalloc.get_traced_memory()[0] < 500_000
    tracemalloc.stop()


def test_standard_output_is_a_text_stream_as_libraries_expect_it():
    lines: list[str] = []
    with capture_lines(lines.append, lines.append):
        assert (sys.stdout.encoding, sys.stdout.errors) == ("utf-8", "backslashreplace")
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.reconfigure(line_buffering=True)
        assert not sys.stdout.isatty()


def test_a_finalizer_prints_while_its_thread_prints():
    lines: list[str] = []

    class Finalized:
        def __del__(self):
            print("from the finalizer")

    def hand_on(line):
        lines.append(line)
        if line == "first":
            Finalized()

    with capture_lines(hand_on, hand_on):
        print("first")
        print("second")
    assert sorted(lines) == ["first", "from the finalizer", "second"]
