"""The pages on benchmarks."""

from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs" / "benchmarks"
PAGES = "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
"""All pages as one text."""
