"""Lists on the command line."""

import argparse
from collections.abc import Callable, Collection


def numbers(least: int) -> Callable[[str], list[int]]:
    """Return what reads whole numbers from `least` up, with commas between them."""

    def read(text: str) -> list[int]:
        try:
            found = [int(each) for each in text.split(",")]
        except ValueError:
            found = []
        if not found or min(found) < least:
            raise argparse.ArgumentTypeError(
                f"expected whole numbers from {least} up with commas between them, got {text}"
            )
        return found

    return read


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return what reads some of the known names, with commas between them."""

    def read(text: str) -> list[str]:
        for name in (found := text.split(",")):
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {name}")
        return found

    return read
