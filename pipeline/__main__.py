"""`python -m pipeline run | study | ui | serve | table | verify`."""

from __future__ import annotations

import argparse
import signal
import sys
import time

from pipeline.errors import PalimpsestError
from pipeline.link import leave


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.action(options)
    except PalimpsestError as error:
        print(f"\n{error}\n", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; what is done is kept, and the next run goes on from there.", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pipeline", description="Runs the stages of dvc.yaml, caching by DVC.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="bring stages up to date, shown in Prefect if a server is running")
    run.add_argument("targets", nargs="*", metavar="STAGE", help="these stages and what they depend on (default: all)")
    run.add_argument("--force", action="store_true", help="run them even if nothing changed")
    run.add_argument("--jobs", type=_at_least_one, default=2, metavar="N", help="stages side by side (default 2; needs a server)")
    run.set_defaults(action=_run)
    study = commands.add_parser("study", help="run studies/NAME.yaml: many settings, one table")
    study.add_argument("name", metavar="NAME", help="a file in studies/, without .yaml")
    where = study.add_mutually_exclusive_group()
    where.add_argument("--workers", type=_at_least_one, default=1, metavar="N", help="cells side by side here (default 1)")
    where.add_argument("--address", metavar="tcp://HOST:PORT", help="of a Dask scheduler whose workers run the cells")
    study.add_argument("--remote", metavar="NAME", help="with --address: the DVC remote that results go by (default: DVC's)")
    study.set_defaults(action=_study)
    ui = commands.add_parser("ui", help="start a Prefect server for this project on this machine")
    ui.add_argument("--port", type=int, default=4200)
    ui.set_defaults(action=_ui)
    serve = commands.add_parser("serve", help="put a button into the Prefect UI that runs the stages in this folder")
    serve.set_defaults(action=_serve)
    table = commands.add_parser("table", help="print what was measured, and where the report is")
    table.set_defaults(action=_table)
    verify = commands.add_parser("verify", help="drop cached files that something has damaged; dvc repro makes them anew")
    verify.set_defaults(action=_verify)
    return parser


def _run(options: argparse.Namespace) -> None:
    from pipeline.checking import check_params
    from pipeline.link import find_server, open_link
    from pipeline.params import read_params
    from pipeline.reproduce import reproduce

    _stop_on_signals()
    check_params(read_params())
    start = time.monotonic()
    url, sentence = find_server()
    if url:
        open_link(url)
        from pipeline.flow import run_flow

        print(f"Shown in Prefect: {url.removesuffix('/api')}", flush=True)
        answers = run_flow(options.targets, options.force, options.jobs)
    else:
        print(sentence, flush=True)
        answers = reproduce(options.targets, force=options.force)
    counts = {one: list(answers.values()).count(one) for one in ("unchanged", "restored", "ran")}
    said = ", ".join(f"{count} {one}" for one, count in counts.items() if count)
    print(f"{'Nothing to do: ' if counts['unchanged'] == len(answers) else ''}{said} in {time.monotonic() - start:.1f} s")


def _study(options: argparse.Namespace) -> None:
    from pipeline.study.running import run_study

    _stop_on_signals()
    print(run_study(options.name, options.workers, options.address, options.remote))


def _stop_on_signals() -> None:
    """On Ctrl-C or SIGTERM end DVC and the stages under it, so that they remove what they have half-written."""
    from pipeline.reproduce import stop

    def interrupt(*_: object) -> None:
        stop()
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)


def _ui(options: argparse.Namespace) -> None:
    from pipeline.server import serve

    serve(options.port)


def _serve(options: argparse.Namespace) -> None:
    from pipeline.serving import serve

    serve()


def _table(options: argparse.Namespace) -> None:
    from pipeline.graph import read_graph
    from pipeline.table import comparison

    read_graph()  # says so if this is not the project's folder
    print(comparison())


def _verify(options: argparse.Namespace) -> None:
    from pipeline.graph import read_graph
    from pipeline.verify import verify

    read_graph()
    removed = verify()
    print(
        "\n".join([*(f"removed {path}" for path in removed), "Damaged; now run: dvc repro" if removed else "Nothing is damaged."])
    )


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("should be at least 1")
    return number


if __name__ == "__main__":
    leave(main())
