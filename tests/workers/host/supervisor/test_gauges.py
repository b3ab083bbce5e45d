"""How a host fares: processors from the second look on, each byte of a network once."""

from __future__ import annotations

from pathlib import Path

from workers.host.supervisor.gauges import HostGauge, _lowest


def test_processors_are_told_once_there_is_something_to_count_from() -> None:
    """Each attempt began with no processor in use: psutil counts by thread, from the call before."""
    gauge = HostGauge({}, with_gpus=False)
    (first,), (second,) = gauge.look(), gauge.look()
    assert "cpu" not in first
    assert "cpu" in second


def test_bonds_bridges_and_vlans_count_nothing_again(tmp_path: Path) -> None:
    for name in ("eth0/device", "eth1/device", "bond0/lower_eth0", "bond0/lower_eth1", "eth0.7/lower_eth0", "veth1"):
        (tmp_path / name).mkdir(parents=True)
    names = ["lo", "eth0", "eth1", "bond0", "eth0.7", "veth1"]
    assert _lowest(names, tmp_path) == ["eth0", "eth1"]
    assert _lowest(["lo", "veth1"], tmp_path) == ["veth1"], "of a container, which has no hardware"
