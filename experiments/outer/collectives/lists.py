"""Parsers of comma-separated command-line options."""

import argparse
from collections.abc import Callable, Collection


def numbers(least: int) -> Callable[[str], list[int]]:
    """Return a parser of comma-separated whole numbers of at least `least`."""

    def read(text: str) -> list[int]:
        try:
            found = [int(each) for each in text.split(",")]
        except ValueError:
            found = []
        if not found or min(found) < least:
            raise argparse.ArgumentTypeError(
                f"expected comma-separated whole numbers from {least} up, got {text}"
            )
        return found

    return read


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names out of `known`."""

    def read(text: str) -> list[str]:
        for name in (found := text.split(",")):
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {name}")
        return found

    return read
