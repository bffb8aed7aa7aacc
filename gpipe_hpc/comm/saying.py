"""What a command tells its user on standard error, which the ranks of a run share."""

import os
import sys


def say(text: str) -> None:
    """Write a text and the end of its line in one piece, so no other rank's comes in between.

    `print` writes the end by itself where the text has several lines, or Python does not buffer:
    launchers that collect the output of all ranks then made one line of two.
    """
    stream, piece = sys.stderr, f"{text}\n"
    stream.flush()
    is_collected = stream is not sys.__stderr__  # or a bar is drawn below
    if is_collected:
        stream.write(piece)
        stream.flush()
        return
    left = piece.encode(stream.encoding, "backslashreplace")
    while left:
        left = left[os.write(stream.fileno(), left) :]
