"""Batches of telemetry, as a page is told them."""

from __future__ import annotations

from typing import Any


def cell(count: int, payload: int, **other: Any) -> dict[str, Any]:
    base = {"phase": "step", "op": "all_reduce", "axis": "dp", "group_size": 2, "busy_s": 0.01 * count}
    return {**base, "count": count, "completed": count, "payload_bytes": payload, "algorithmic_bytes": payload, **other}


def traffic(rank: int, time: float, *cells: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "traffic", "rank": rank, "time": time, "cells": list(cells), "dropped": 0}


def batch(time: float, *items: dict[str, Any]) -> dict[str, Any]:
    return {"v": 1, "job": "j", "attempt": 1, "time": time, "items": list(items)}
