"""`python -m pipeline serve`: the flow with a button of its own in the Prefect UI."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import PalimpsestError
from pipeline.link import find_server, open_link

DEPLOYMENT = "this-folder"


def serve(root: Path = Path()) -> None:
    """Register the deployment and run what its button starts, one run at a time, until interrupted.

    Raises PalimpsestError if no server runs.
    """
    url, _ = find_server(root)
    if url is None:
        raise PalimpsestError("no Prefect server answers, and it is there that the button is; start one: python -m pipeline ui")
    open_link(url, root)
    from prefect.types.entrypoint import EntrypointType

    from pipeline.flow import palimpsest

    print(
        f"\n  {url.removesuffix('/api')}/deployments\n\n"
        f"Its button Run > Custom run starts the stages in {root.resolve()}.\nLeave this running (Ctrl-C ends it).",
        flush=True,
    )
    palimpsest.serve(name=DEPLOYMENT, limit=1, print_starting_message=False, entrypoint_type=EntrypointType.MODULE_PATH)
