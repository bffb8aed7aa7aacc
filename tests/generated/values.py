"""Valid and invalid values of settings, and how they are typed on a command line."""

import re
from typing import Any, NamedTuple

from hypothesis import strategies as st

_PLAIN = re.compile(r"[A-Za-z0-9_./+-]+")


class Raw(NamedTuple):
    """Text that is typed as it is, without quotes."""

    text: str


def typed(value: Any) -> str:
    """Format a value in Hydra's syntax."""
    if isinstance(value, Raw):
        return value.text
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        if _PLAIN.fullmatch(value):
            return value
        escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
        return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"
    if isinstance(value, list):
        return f"[{','.join(map(typed, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{typed(each)}" for key, each in value.items()) + "}"
    return str(value)


NUMBERS = (0, -1, 1, 2, 3, 7, 10_000, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, 0.5, -0.25, 1.5)
FLOATS = (1e-320, 1e308, -1e308, Raw("1e999"), Raw("nan"), Raw("inf"), Raw("-inf"), -0.0)
TEXTS = (
    *("", " ", "abc", "None", "true ", "12", "1_000", "16MB", "0x10", "1,2", "a b", "a=b", "a:b"),
    *("ünï", "漢字 🙂", "\u202eabc", "e\u0301", "\udcff", "a\nb", "a\tb", "x" * 300, "${", "$HOME"),
    *("%s", "{0}", "'", '"', "\\", "-1", "--", "#", "~", "@here", "[1", "!!python/none"),
)
REFERENCES = (
    *("${train.seed}", "${nope}", "${nope.deeper}", "${oc.env:HOME}", "${oc.env:NOT_SET_AT_ALL}"),
    *("${pipeline}", "${model}", "${train.steps}", "${data.seq_len}", "${oc.nope:1}", "???"),
)
PATHS = (
    *("folder", "folder/", "file.txt", "file.txt/below", "missing", "missing/deep/er", "broken"),
    *("loop", "with space", "a=b", "ünï/漢字", "empty", "run", ".", "..", "/", "", "//", "run/.."),
    *("/proc/self/mem", "/proc/nothing", "/sys/nothing", "/dev/null", "/dev/full", "/dev/null/x"),
    *(
        "~/nobody",
        "$HOME/x",
        "link",
        "pipe",
        "x" * 300,
        "y/" * 3000,
        "data.npy",
        "text.txt",
        "\udcff",
    ),
    *("damaged", "damaged/checkpoints/step_00000001", "*", "[a", "**/*", "file.txt\n"),
)


def disturbed() -> st.SearchStrategy[Any]:
    """Draw a value that is probably invalid for any setting."""
    scalar = st.sampled_from((*NUMBERS, *FLOATS, *TEXTS, *PATHS, None, True, False))
    return st.one_of(
        st.sampled_from(NUMBERS),
        st.sampled_from(FLOATS),
        st.sampled_from(TEXTS),
        st.sampled_from(PATHS),
        st.sampled_from((None, True, False)),
        st.sampled_from(REFERENCES).map(Raw),
        st.sampled_from([each for each in TEXTS if isinstance(each, str)]).map(Raw),
        st.lists(scalar, max_size=3),
        st.sampled_from(([], {}, {"a": 1}, [[1]], [None], [1, "a"], {"a": {"b": 2}}, [[], {}])),
        st.integers(),
        st.floats().map(lambda number: Raw(repr(number))),
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
    )
