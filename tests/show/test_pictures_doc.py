"""What docs/pictures.md says of limits and of its picture is true."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from jetrl_compile.show.page import MOST
from jetrl_compile.show.view import LARGEST

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "pictures.md").read_text()


def test_limits_and_picture() -> None:
    assert f"At most {MOST} boxes" in TEXT
    assert f"{LARGEST:,} different operators" in TEXT
    (picture,) = re.findall(r"!\[[^]]*\]\(([^)]+)\)", TEXT)
    root = ET.fromstring((ROOT / "docs" / picture).read_text())
    texts = ["".join(element.itertext()) for element in root.iter()]
    assert any("model.layers.0-63" in text and "\u00d764" in text for text in texts)
