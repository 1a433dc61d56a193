"""The README's links lead somewhere; its code is run by tests/examples."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT


def test_links_of_the_readme_lead_to_files() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)", text) if not re.match(r"https?:", target)]

    assert len(targets) > 10
    assert [target for target in targets if not (ROOT / target).exists()] == []
