"""Select the fields of a spec that hosts need."""

from __future__ import annotations

from typing import Any

SERVER_FIELDS = ("project", "run", "retry", "after", "after_failed")
SERVER_RESOURCE_FIELDS = ("max_hosts", "pool", "labels")


def spec_for_hosts(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec without the fields that only the server reads.

    A host may have the previous version, which rejects unknown fields. Drop a new field here while it has its default.
    """
    sent = {name: value for name, value in spec.items() if name not in SERVER_FIELDS}
    if "resources" in sent:
        resources = spec["resources"].items()
        sent["resources"] = {name: value for name, value in resources if name not in SERVER_RESOURCE_FIELDS}
    return sent
