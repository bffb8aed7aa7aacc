"""Print the longest files and functions of the package, which may need to be split."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "gpipe_hpc"


def main(num_shown: int = 10) -> None:
    files, functions = [], []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text("utf-8")
        name = path.relative_to(PACKAGE.parent).as_posix()
        files.append((len(text.splitlines()), name))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                functions.append((length, f"{name}:{node.lineno} {node.name}"))
    for what, found in (("files", files), ("functions", functions)):
        print(f"the longest {what}:")
        for length, name in sorted(found, reverse=True)[:num_shown]:
            print(f"  {length:5d} {name}")


if __name__ == "__main__":
    main()
