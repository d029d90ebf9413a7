"""The HTML page: one file that needs no network.

What a graph file says reaches the page only as JSON, in which no character can end the
script element, and from there only as text of DOM nodes. A content security policy
lets nothing run but the page's own scripts, by digest, and nothing be loaded.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from jetrl_compile.differences import attribute_label
from jetrl_compile.show import styles
from jetrl_compile.show.vendor import asset
from jetrl_compile.show.view import View
from jetrl_compile.show.visible import Switches

SCRIPTS = (
    "vendor/cytoscape.min.js",
    "vendor/dagre.min.js",
    "model.js",
    "sheet.js",
    "panel.js",
    "draw.js",
    "main.js",
)
MOST = 500  # boxes that are laid out at once: 4 s at worst, mostly below 1 s
MOST_PLACES = 3000  # layers that edges pass on their way, all edges together
_UNSAFE = re.compile("[<>&\u2028\u2029]")


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in the page.

    Attributes:
        caption: What it shows, in a sentence.
        png: Its bytes.
    """

    caption: str
    png: bytes


def page(
    view: View,
    pictures: Sequence[Picture] = (),
    switches: Switches | None = None,
) -> str:
    """Return the page of a view.

    Args:
        view: What is drawn.
        pictures: Shown beside the graph.
        switches: What is shown at first.
    """
    scripts = [asset(name) for name in SCRIPTS]
    sources = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    title = " and ".join(view.titles)
    return _fill(
        asset("page.html"),
        {
            "policy": f"default-src 'none'; script-src {sources}; "
            "style-src 'unsafe-inline'; img-src data: blob:",
            "title": html.escape(f"Precision flow of {title}"),
            "style": asset("page.css"),
            "data": safe_json(page_data(view, pictures, switches or Switches())),
            "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
        },
    )


def page_data(
    view: View, pictures: Sequence[Picture], switches: Switches
) -> dict[str, object]:
    """Return what the scripts of the page read."""
    return {
        "format": "jetrl.view",
        "version": 1,
        "view": view.table(),
        "all_phases": view.phases(),
        "switches": asdict(switches),
        "styles": [asdict(style) for style in styles.STYLES],
        "saved_label": attribute_label("saved_dtype"),
        "widest": styles.WIDEST,
        "most": MOST,
        "most_places": MOST_PLACES,
        "colors": {
            "difference": styles.DIFFERENCE,
            "fp8": styles.FP8_FILL,
            "block": styles.BLOCK_FILL,
        },
        "pictures": [
            {
                "caption": picture.caption,
                "data": "data:image/png;base64,"
                + base64.b64encode(picture.png).decode(),
            }
            for picture in pictures
        ],
    }


def safe_json(value: object) -> str:
    """Return JSON that is safe inside a script element.

    Neither `</script>` nor `<!--` nor a line separator can occur in it: `<`, `>`, `&`
    and all that is not ASCII are written as escapes.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Fill each {{name}} once; what is filled in is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)
