"""Jobs, comparisons, plans, and advice as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from meshboard.answers import (
    Advice,
    Comparison,
    Estimate,
    FoundLayout,
    Interval,
    JobBrief,
    JobDetail,
    Option,
    Part,
    Plan,
    SearchResult,
    UploadDetail,
)
from meshboard.client import Job
from meshboard.formatting import format_bytes, format_seconds, format_table, remove_escapes

MAX_LISTED_FILES: Final = 20
AXES: Final = ("tp", "cp", "pp", "dp", "ep")


def format_job_line(job: Job) -> str:
    """Return id, status, name, and reason of a job, and whether it is backfilled."""
    notes = [job.reason, "backfilled" if job.backfilled and "backfilled" not in job.reason else ""]
    note = ", ".join(filter(None, notes))
    return remove_escapes(f"{job.id}  {job.status:<12} {job.name}" + (f"  ({note})" if note else ""))


def format_job(job: Job) -> str:
    """Return the line of a job and its verdict."""
    return format_job_line(job) + (f"\n{remove_escapes(job.verdict)}" if job.verdict else "")


def format_upload(files: Sequence[tuple[str, int]], upload: UploadDetail) -> str:
    """Return the packed files with their sizes, and the size and checksum of the archive."""
    lines = [f"  {remove_escapes(name)}  {format_bytes(size)}" for name, size in files[:MAX_LISTED_FILES]]
    if len(files) > MAX_LISTED_FILES:
        lines.append(f"  and {len(files) - MAX_LISTED_FILES:,} more files")
    count = f"{len(files):,} file{'' if len(files) == 1 else 's'}"
    size = f"{format_bytes(upload['size'])} compressed, sha256 {upload['sha256']}"
    return "\n".join([f"Uploaded {remove_escapes(upload['name'])}: {count}, {size}", *lines])


def format_jobs(jobs: Iterable[JobBrief]) -> str:
    """Return a table of jobs."""
    names: Final = ("id", "status", "name", "project", "owner", "created")
    # An older board does not return the project.
    return format_table(names, ([brief.get(name, "-") for name in names] for brief in jobs))


def format_comparison(comparison: Comparison) -> str:
    """Return a table with a column per job: different spec fields, then measurements. "-" is unknown."""
    runs = comparison["jobs"]
    rows: list[Sequence[object]] = [["id", *(run["job"] for run in runs)]]
    rows += [[one["field"], *("-" if v is None else v for v in one["values"])] for one in comparison["differences"]]
    curves, parts = [run["curve"] for run in runs], [run["parts"] for run in runs]
    rows += [
        ["steps", *(_format_last(curve.get("step"), "") for curve in curves)],
        ["final loss", *(_format_last(curve.get("loss"), ".6g") for curve in curves)],
        ["tokens per second in the last step", *(_format_last(curve.get("tokens_s"), ",.0f") for curve in curves)],
        ["mean step time", *(_format_seconds(part.get("step_s") if part else None) for part in parts)],
        ["mean time per step for data", *(_format_seconds(part.get("data_s") if part else None) for part in parts)],
        [
            "mean time per step for optimizer",
            *(_format_seconds(part.get("optimizer_s") if part else None) for part in parts),
        ],
    ]
    times = {
        "exposed": [part.get("exposed", {}) if part else {} for part in parts],
        "overlapped": [part.get("hidden", {}) if part else {} for part in parts],
    }
    for kind, by_run in times.items():
        rows += [
            [f"mean time per step for {axis}, {kind}", *(_format_seconds(by_axis.get(axis)) for by_axis in by_run)]
            for axis in sorted({axis for by_axis in by_run for axis in by_axis})
        ]
    sent = [{(row["axis"], row["op"]): row["payload_bytes"] for row in run["traffic"]} for run in runs]
    for axis, op in sorted({key for one in sent for key in one}):
        totals = (_format_total(one.get((axis, op), 0)) if one else "-" for one in sent)
        rows.append([f"bytes.{axis}.{op}, total", *totals])
    return format_table(["", *(run["name"] for run in runs)], rows)


def _format_last(column: Sequence[float | None] | None, spec: str) -> str:
    return format(column[-1], spec) if column and column[-1] is not None else "-"


def _format_seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _format_total(num_bytes: int) -> str:
    return f"{num_bytes:,} B ({format_bytes(num_bytes)})"


def format_plan(estimate: Estimate) -> str:
    """Return step time by part, memory, and payload bytes per step of the rank that sends most."""
    time = estimate["time"]
    parts = "  ".join(f"{remove_escapes(part['name'])} {format_seconds(part['seconds'])}" for part in time["parts"])
    cluster = remove_escapes(estimate["cluster"]["name"])
    fits = ("might not fit" if estimate.get("tight") else "fits") if estimate["fits"] else "does not fit"
    if estimate.get("may_fit"):
        fits = "might fit"
    sent: dict[str, int] = {}
    for stage in estimate["stages"]:
        for axis, num_bytes in stage["step_bytes"].items():
            sent[axis] = max(sent.get(axis, 0), num_bytes)
    traffic = ", ".join(f"{remove_escapes(axis)} {num_bytes:,} B" for axis, num_bytes in sent.items() if num_bytes)
    peak_bytes = estimate["peak_memory_bytes"]
    return "\n".join(
        [
            f"step    {format_seconds(time['step_s'])} (estimate): {parts}",
            *_format_interval_line(format_seconds, time["step_s"], time.get("interval")),
            *(
                f"        {remove_escapes(one['words'])}: {one['ratio']:.2f} x the step time"
                for one in time.get("assumptions", ())
            ),
            f"memory  {format_bytes(peak_bytes)} on the rank with the most memory: {fits} {cluster}",
            *_format_interval_line(format_bytes, peak_bytes, estimate.get("memory_interval")),
            *_list_host_memory(estimate),
            f"sends   {traffic or '0 B'} (payload bytes per step of the rank that sends most)",
        ]
    )


def _list_host_memory(estimate: Estimate) -> list[str]:
    """Return lines about memory options. A plan without them has no `host_memory_bytes`."""
    host_bytes = estimate.get("host_memory_bytes")
    if host_bytes is None:
        return []
    note = "        memory options change memory only; traffic and time: AdamW on all weights, no offload"
    return [f"        CPU memory per rank: {format_bytes(host_bytes)}", note]


def format_interval(format_value: Callable[[float], str], value: float, interval: Interval | None) -> str:
    """Return the interval of an estimate: "9 ms to 11 ms". An older board returns no interval."""
    if interval is None:
        return ""
    share = max(0.01, interval["share"])
    low = value / (1 + share) if share > 1 else value * (1 - share)
    return f"{format_value(low)} to {format_value(value * (1 + share))}"


def _format_interval_line(format_value: Callable[[float], str], value: float, interval: Interval | None) -> list[str]:
    if interval is None:
        return []
    return [f"        {format_interval(format_value, value, interval)}: {remove_escapes(interval['words'])}"]


def format_chosen_layout(content: Plan | JobDetail) -> str:
    """Return the layout that Meshboard chose for "auto" with its reason, or "" for a layout in the spec."""
    chosen = content.get("chosen")  # an older board does not return it; `why` begins with the layout
    if not chosen:
        return ""
    ranks = "1 rank" if chosen["ranks"] == 1 else f"{chosen['ranks']:,} ranks"
    return remove_escapes(f"layout on {ranks}: {chosen['why']}")


def format_layouts(result: SearchResult) -> str:
    """Return a table of the layouts that a search found, fastest first."""
    head = ["layout", "", "schedule", "recompute", "micro-batch", "step", "between", "memory", "between", "runs here"]
    return format_table(head, [_get_layout_cells(layout) for layout in result["best"]])


def _get_layout_cells(found: FoundLayout) -> list[object]:
    layout = found["layout"]
    return [
        " x ".join(f"{axis} {layout[axis]}" for axis in AXES if layout[axis] > 1) or "1 rank",
        f"ZeRO-{layout['zero']}",
        layout["schedule"] if layout["pp"] > 1 else "-",
        layout["recompute"],
        found["micro_batch_size"],
        format_seconds(found["step_s"]),
        format_interval(format_seconds, found["step_s"], found.get("interval")),
        format_bytes(found["memory_bytes"]),
        format_interval(format_bytes, found["memory_bytes"], found.get("memory_interval")),
        "yes" if found["runnable"] else "no",
    ]


def format_search_summary(result: SearchResult) -> str:
    """Return the number of layouts that a search checked, and the reasons for rejected layouts."""
    limited = "" if result["complete"] else f" of {result['total']:,}"
    cluster = remove_escapes(result["cluster"]["name"])
    counted = f"checked {result['considered']:,} layouts{limited}; {result['fitting']:,} fit in memory on {cluster}"
    rejected = sorted(result["refused"].items())
    return "\n".join([counted, *(f"rejected {count:,}: {remove_escapes(reason)}" for reason, count in rejected)])


def format_advice(advice: Advice) -> str:
    """Return the faster options, and for each option the part of the step with the largest gain."""
    parts = {part["part"]: part for part in advice["parts"]}
    options = (*advice["options"], *advice["unsure"])
    rows = [_get_gain_cells(option, parts) for option in options if option.get("because")]
    if not rows:
        return format_options(advice)
    head = ["change", "largest gain", "in this run", "with the change", "basis"]
    return "\n".join([format_options(advice), "", format_table(head, rows)])


def _get_gain_cells(option: Option, parts: Mapping[str, Part]) -> list[object]:
    gain = option["because"]
    times = (format_seconds(gain["apportioned_s"]), format_seconds(gain["there_s"]))
    return [option["change"], gain["part"], *times, _describe_basis(parts.get(gain["part"]))]


def _describe_basis(part: Part | None) -> str:
    if part and (measured_s := part.get("measured_s")) is not None:
        return f"measured: {format_seconds(measured_s)}"
    if part and (at_most_s := part.get("measured_at_most_s")) is not None:
        return f"measured: {format_seconds(at_most_s)} at most"
    return "estimate, not measured"


def format_options(advice: Advice) -> str:
    """Return the summary of the advice and a table of faster options. Uncertain options are last."""
    lines = [remove_escapes(advice["text"])]
    options = [(option, "") for option in advice["options"]]
    options += [(option, "within the error of the estimate") for option in advice["unsure"]]
    if options:
        rows = [[*_get_option_cells(option), note] for option, note in options]
        lines += ["", format_table(["change", "step", "faster", "memory", ""], rows)]
    return "\n".join(lines)


def _get_option_cells(option: Option) -> list[str]:
    faster, memory = f"{option['faster']:.1%}", format_bytes(option["memory_bytes"])
    return [option["change"], format_seconds(option["step_s"]), faster, memory]
