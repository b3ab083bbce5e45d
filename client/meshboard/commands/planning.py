"""What a spec would cost."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from meshboard import files
from meshboard.commands.app import AsJson, Cluster, JobId, Sets, Spec, app, board, print_json
from meshboard.errors import line_of
from meshboard.exits import Exit
from meshboard.show import plans, reasons
from meshboard.show.words import clean


@app.command()
def plan(
    spec: Spec,
    changes: Sets = [],  # noqa: B006
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Predict the memory, traffic, and step time of a spec."""
    with board() as client:
        told = client.plan(files.spec(spec, changes), cluster)
    if as_json:
        print_json(told)
    elif (estimate := told["estimate"]) is not None:
        print(*filter(None, (reasons.chosen(told), plans.plan(estimate))), sep="\n")
    elif not told["problems"]:
        print("Meshboard has no estimate for jobs of this kind.")
    for problem in told["problems"]:
        print(clean(line_of(problem["field"], problem["message"])), file=sys.stderr)
    if told["problems"]:
        raise typer.Exit(Exit.WRONG)


@app.command()
def search(
    spec: Spec,
    ranks: Annotated[int, typer.Option(min=1, help="number of ranks")],
    changes: Sets = [],  # noqa: B006
    cluster: Cluster = None,
    limit: Annotated[int, typer.Option(min=1, max=100)] = 10,
    as_json: AsJson = False,
) -> None:
    """List the fastest layouts of a model that fit in memory. The exit code is 1 if no layout fits."""
    query: dict[str, Any] = {"spec": files.spec(spec, changes), "ranks": ranks, "limit": limit}
    with board() as client:
        told = client.search({**query, "cluster": cluster} if cluster else query)
    if as_json:
        print_json(told)
    else:
        print(plans.found(told) if told["best"] else "No layout fits in memory.")
        print(plans.tried(told), file=sys.stderr)
    if not told["best"]:
        raise typer.Exit(Exit.FAILED)


@app.command()
def advise(job_id: JobId, as_json: AsJson = False) -> None:
    """List faster layouts for a finished job, and the part of the step that each layout improves."""
    with board() as client:
        told = client.advice(job_id)
    print_json(told) if as_json else print(reasons.advised(told))
