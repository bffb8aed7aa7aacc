"""Put the pages of experiments/ into the site, and follow links between them and docs/.

In the repository a page of docs/ links to ../../experiments/X/README.md, and a README of
experiments/ to ../../docs/how-to/Y.md. In the site both folders are below one root.
"""

import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parent.parent
_SHOWN: Final = (".md", ".svg", ".py", ".yaml")  # what READMEs are and link to


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of experiments/, their pictures and their code."""
    for path in sorted((ROOT / "experiments").rglob("*")):
        inside = path.relative_to(ROOT)
        if path.suffix in _SHOWN and "out" not in inside.parts:
            files.append(File.generated(config, inside.as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between the two folders into those of the site."""
    if page.file.src_uri.startswith("experiments/"):
        return re.sub(r"(\](?:\(|: )(?:\.\./)+)docs/", r"\1", markdown)
    return re.sub(r"(\](?:\(|: )(?:\.\./)*)\.\./experiments/", r"\1experiments/", markdown)
