"""`workhorse report`: write the report page of a run, or of several runs side by side."""

from pathlib import Path

import click

from workhorse.cli.loading import PATH, json_option
from workhorse.cli.output import print_result


@click.command("report")
@click.argument("runs", type=PATH, nargs=-1, required=True, metavar="RUN...")
@click.option("--out", type=PATH, help="HTML file; report.html in the runs' folder by default.")
@json_option
def command(*, runs: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Write the report of one or several runs, finished or in training, as one HTML file.

    The charts of several runs have a line per run, and their samples are shown side by side.
    """
    from workhorse.checkpoints import RunDirectory
    from workhorse.train.report.page import write_report

    path = write_report([RunDirectory(run) for run in runs], out)
    print_result({"report": path}, as_json, text=f"report {path}")
