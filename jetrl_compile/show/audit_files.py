"""What an audit found, as pictures and as a page that holds them."""

from pathlib import Path

from jetrl_compile.audit import Audit
from jetrl_compile.errors import OutputError
from jetrl_compile.files import write_bytes
from jetrl_compile.show.mismatch_pictures import mismatch_pictures
from jetrl_compile.show.output import write_picture
from jetrl_compile.show.paired import pair_graphs
from jetrl_compile.show.view import make_view
from jetrl_compile.show.visible import Switches, default_phases


def write_audit(found: Audit, folder: Path) -> list[Path]:
    """Write what an audit found as pictures, and as a page that holds them.

    Args:
        found: The audit of a live pair.
        folder: Made if it is not there.

    Returns:
        The files: flow.html, then the PNG pictures.

    Raises:
        OutputError: A file cannot be written, or matplotlib is not installed.
    """
    pictures = mismatch_pictures(found)
    paired = pair_graphs(
        [found.rollout_graph, found.train_graph], ["rollout", "train"], found.report
    )
    view = make_view(paired)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot make the folder {folder}: {error.strerror}; name one that can be "
            "written"
        ) from error
    page_path = folder / "flow.html"
    switches = Switches(default_phases(view))
    write_picture(view, page_path, list(pictures.values()), switches)
    for name, picture in pictures.items():
        write_bytes(folder / name, picture.png)
    return [page_path, *(folder / name for name in pictures)]
