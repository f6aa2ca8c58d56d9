"""Public names: experiments and pages import from `jtrain` and its packages, and from no deeper."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
USERS = ("experiments", "docs", "notebooks", "README.md", "jtrain/cli/project_template")
DEEP = re.compile(r"\b(?:from|import) jtrain\.\w+\.\w.*")


def test_no_page_and_no_experiment_imports_an_inner_module():
    files = [path for user in USERS for path in [ROOT / user, *(ROOT / user).rglob("*")]]
    files = [path for path in files if path.suffix in {".md", ".py", ".txt", ".ipynb"}]
    assert len(files) > 60
    found = {str(path.relative_to(ROOT)): DEEP.findall(path.read_text()) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}
